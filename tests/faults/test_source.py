"""A source that hangs, fails, vanishes, changes and comes back: rows S1 to S10, and M9's half."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.conftest import (
    EITHER_SIDE,
    MODES,
    OPENS_ARE_REPORTED,
    MonarchCommand,
    Mounted,
    Tree,
    contents,
    own_directory,
)
from tests.equipment import disks, slowfs
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import becomes_true
from tests.mount.command import needs_root, ordinary_user
from tests.mount.compare import assert_equal_trees
from tests.mount.observe import (
    RESTED_S,
    account,
    accounts_agree,
    asked_for,
    epoch,
    error_of,
    files,
    forget_pages,
    read_through,
    resident,
    settled,
    wait_until,
)

SMALL_INLINE = "limits.inline_max=64KiB"
LARGE = 2_000_000


def calls(slow: SlowSource) -> dict[str, int]:
    """What the source was asked; not what hangs now, nor how often its rules were read."""
    counters = slow.counters()
    return {name: n for name, n in counters.items() if name not in ("loads", "hanging")}


def read_or_error(path: Path) -> bytes | int | None:
    try:
        return read_through(path)
    except OSError as error:
        return error.errno


class Reader(threading.Thread):
    """Reads one file, in its own time."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.outcome: bytes | int | None = None
        self.start()

    def run(self) -> None:
        self.outcome = read_or_error(self._path)


@contextmanager
def epochs_by_four(mounted: Mounted, content: dict[str, bytes]) -> Iterator[Callable[[], int]]:
    """Four readers go through ``content`` again and again; how many epochs they have ended."""
    over = threading.Event()
    ended: list[int] = []
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            while not over.is_set():
                epoch(mounted, content)
                ended.append(1)
        except BaseException as error:
            wrong.append(error)
            raise

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    try:
        yield lambda: len(ended)
    finally:
        over.set()
        for worker in workers:
            worker.join()
    assert wrong == []


# -- S1: it hangs ----------------------------------------------------------------------------------


@pytest.mark.fault("S1")
@pytest.mark.promise(11)
def test_while_every_call_of_the_source_hangs_processes_that_need_no_call_continue(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = files() | {"large": contents("large", LARGE)}
    cold = {f"cold{n}": contents(str(n), 5000) for n in range(5)}
    cold |= {f"big{n}": contents(str(n), 300_000) for n in range(2)}
    tree(content | cold)
    mounted = monarch.mount(slow.path, options=["limits.source_concurrency=4", SMALL_INLINE])
    # A file that is fetched just after it was made is compared a second time, up to seconds later,
    # and that call would hang as well. What the datapath fetches counts from the last status on.
    time.sleep(RESTED_S)
    account(mounted)
    epoch(mounted, content)
    settled(mounted)
    slow.rules("hang * .*")
    with ExitStack() as stack:
        stack.callback(slow.rules)
        waiting = {name: Reader(mounted.path / name) for name in cold}
        # The small files are fetched by the datapath where there is one, the two large by Python.
        waiting_calls = 4 if monarch.mode == "python" else 4 + 2
        is_so = becomes_true(lambda: slow.counters()["hanging"] == waiting_calls)
        assert is_so, f"{slow.counters()} {account(mounted)} {mounted.log_text}"
        before = calls(slow)
        with epochs_by_four(mounted, content) as ended:
            wait_until(lambda: ended() >= 8, "four readers continue")
            assert sorted(os.listdir(mounted.path)) == sorted([*content, *cold])
            assert all((mounted.path / name).stat().st_size == len(cold[name]) for name in cold)
            assert mounted.status()["state"] == "serving"
            os.statvfs(mounted.path)
        assert calls(slow) == before
        assert all(reader.is_alive() for reader in waiting.values())
    for name, reader in waiting.items():
        reader.join(100)
        assert reader.outcome == cold[name]
    epoch(mounted, content | cold)
    settled(mounted)
    assert set(resident(mounted, cold)) == set(cold)
    accounts_agree(mounted)


@pytest.mark.fault("S1")
@pytest.mark.promise(43)
def test_with_a_timeout_a_read_of_a_hung_source_fails_and_the_next_one_is_tried(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("source: .* timed out")
    content = files(5)
    cold = {"small": contents("small", 5000), "large": contents("large", LARGE)}
    tree(content | cold)
    mounted = monarch.mount(slow.path, options=["limits.source_timeout=3s", SMALL_INLINE])
    epoch(mounted, content)
    settled(mounted)
    slow.rules("hang open ^/small", "hang read ^/large")
    waiting = [Reader(mounted.path / name) for name in (*cold, *cold)]
    epoch(mounted, content)
    for reader in waiting:
        reader.join(100)
        assert reader.outcome == errno.ETIMEDOUT
    slow.rules()
    wait_until(lambda: _served(mounted, cold), "what had timed out is read")
    epoch(mounted, content | cold)
    settled(mounted)
    assert set(resident(mounted, cold)) == set(cold)
    accounts_agree(mounted)


def _served(mounted: Mounted, content: dict[str, bytes]) -> bool:
    try:
        epoch(mounted, content)
    except OSError:
        return False
    return True


# -- S2: it is gone, or answers with errors --------------------------------------------------------


def taken_away(slow: SlowSource) -> int:
    """Its mount point is the empty directory that it was before."""
    slow.kill()
    subprocess.run(["umount", "-l", str(slow.path)], check=True)
    assert os.listdir(slow.path) == []
    return errno.ENOTCONN


def stale(slow: SlowSource) -> int:
    slow.rules("err * ESTALE .*")
    return errno.ESTALE


def failing(slow: SlowSource) -> int:
    slow.rules("err * EIO .*")
    return errno.EIO


@pytest.mark.fault("S2")
@pytest.mark.promise(9, 10, 57, 58)
def test_a_source_that_is_away_is_an_error_only_for_processes_that_need_it(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("source: ")
    content = files()
    faults = (stale, failing, taken_away)
    cold = {
        fails: {f"{fails.__name__}/{n}": contents(str(n), 5000) for n in range(20)}
        | {f"{fails.__name__}/large": contents("large", LARGE)}
        for fails in faults
    }
    tree({name: data for part in (content, *cold.values()) for name, data in part.items()})
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    epoch(mounted, content)
    settled(mounted)
    assert account(mounted)["health"]["state"] == "ok"
    for fails in faults:
        _fail_and_recover(mounted, slow, fails, content, cold[fails])
        content |= cold[fails]
    # One line a minute and kind of error, of more than a thousand reads that failed.
    lines = [line for line in mounted.log_text.splitlines() if " warning " in line]
    assert 1 <= len(lines) <= 2 * len(faults), lines
    accounts_agree(mounted)


def _fail_and_recover(
    mounted: Mounted,
    slow: SlowSource,
    fails: Callable[[SlowSource], int],
    content: dict[str, bytes],
    cold: dict[str, bytes],
) -> None:
    number = fails(slow)
    for _ in range(20):
        assert {error_of(mounted.path / name) for name in cold} == {number}
    epoch(mounted, content)
    assert len(os.listdir(mounted.path / fails.__name__)) == len(cold)
    assert all((mounted.path / name).stat().st_size == len(cold[name]) for name in cold)
    health = account(mounted)["health"]
    assert (health["state"], health["problems"][0]["kind"]) == ("failing", "source-errors")
    assert not resident(mounted, cold)
    # Nothing is mounted anew but the source.
    slow.restart()
    wait_until(lambda: _served(mounted, cold), "the source is found again")
    epoch(mounted, content | cold)
    settled(mounted)
    assert set(resident(mounted, cold)) == set(cold)


@pytest.mark.fault("S2")
@pytest.mark.promise(58)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_that_is_open_while_the_source_dies_is_read_on_when_it_is_back(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("source: 'large'")
    large = contents("large", 9_000_000)
    tree({"large": large, "small": 100})
    mounted = monarch.mount(slow.path, tiers={"fast": "1KiB"}, options=[SMALL_INLINE])
    with open(mounted.path / "large", "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == large[:4096]
        slow.kill()
        forget_pages(file.fileno())
        with pytest.raises(OSError) as failed:
            os.pread(file.fileno(), 4096, 8_000_000)
        assert failed.value.errno in (errno.ENOTCONN, errno.EIO)
        slow.restart()
        wait_until(lambda: _served(mounted, {"small": contents("small", 100)}), "it is found")
        assert os.pread(file.fileno(), 4096, 8_000_000) == large[8_000_000:8_004_096]
        # Another reader joins it.
        assert read_through(mounted.path / "large") == large


@pytest.mark.fault("S2")
@pytest.mark.promise(10, 58)
@pytest.mark.modes("relay")
def test_another_directory_in_the_place_of_a_lost_source_is_not_taken_for_it(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    monarch.expects_log("source: '")
    tree(files(3))
    mounted = monarch.mount(slow.path)
    taken_away(slow)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "001.jpg").write_bytes(b"foreign")
    subprocess.run(["mount", "--bind", str(foreign), str(slow.path)], check=True)
    try:
        # Longer than it takes to look for the source again.
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert error_of(mounted.path / "001.jpg") == errno.ENOTCONN
            assert error_of(mounted.path / "002.jpg") == errno.ENOTCONN
            time.sleep(0.2)
        assert len(os.listdir(mounted.path)) == 3
    finally:
        subprocess.run(["umount", "-l", str(slow.path)], check=True)


# -- S3: an error in the middle of a copy ----------------------------------------------------------


@pytest.mark.fault("S3")
@pytest.mark.modes("python", "relay", "no_open")
def test_a_copy_whose_source_fails_half_way_is_given_up_tried_again_and_made_at_last(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("copy to tier fast given up, will be tried again")
    large = contents("large", 3_000_000)
    tree({"large": large})
    mounted = monarch.mount(slow.path, options=[SMALL_INLINE])
    slow.rules("bad 1500000 large")
    with asked_for(mounted, "large"):
        wait_until(lambda: account(mounted)["copies"]["failed"] >= 2, "it was tried again")
        # Each pause is twice the one before. Without them it would be tried ten times a second.
        time.sleep(1.0)
        assert account(mounted)["copies"]["failed"] <= 4
        slow.rules()
    settled(mounted)
    assert mounted.stages() == []
    assert mounted.xattr("large") == "fast"
    assert read_through(mounted.path / "large") == large
    accounts_agree(mounted)


# -- S6, M9: changed while it is copied ------------------------------------------------------------


def unlinked(path: Path) -> None:
    path.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name("renamed"))


def truncated(path: Path) -> None:
    os.truncate(path, 1_000_000)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def replaced(path: Path) -> None:
    """By rename, with other bytes of the same size and time of modification."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(contents("other", status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def rewritten(path: Path) -> None:
    """In place, with its size and its time of modification as they were."""
    status = path.stat()
    path.write_bytes(contents("rewritten", status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES = (unlinked, renamed, truncated, emptied, replaced, rewritten)


@pytest.mark.fault("M9", "S4", "S5", "S6")
@pytest.mark.promise(2, 26)
def test_a_file_that_changes_while_it_is_copied_leaves_no_copy_and_no_temporary_name(
    monarch: MonarchCommand, tree: Tree, source: Path, tmp_path: Path
) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    for change in CHANGES:
        tree({f"{change.__name__}/large": LARGE, f"{change.__name__}/same": 10})
    monarch.expects_log("since the snapshot")
    # Another host changes the files: what this one's client remembers of them must not be believed.
    with SlowSource(source, tmp_path / "slow", attribute_s=0) as slow:
        options = [SMALL_INLINE, "limits.copy_workers=8"]
        mounted = monarch.mount(slow.path, tiers={"fast": "50MiB"}, options=options)
        try:
            _change_while_copied(mounted, slow)
            mounted.umount()
            arguments = ["--refresh"]
            again = monarch.mount(
                slow.path, tiers={"fast": "50MiB"}, options=options, arguments=arguments
            )
            assert_equal_trees(source, again.path)
            again.umount()
        finally:
            slow.rules()


def _change_while_copied(mounted: Mounted, slow: SlowSource) -> None:
    names = [f"{change.__name__}/large" for change in CHANGES]
    old = {name: (slow.root / name).read_bytes() for name in names}
    slow.rules("hang read large")
    with ExitStack() as readers:
        for name in names:
            readers.enter_context(asked_for(mounted, name))
        stage = own_directory(mounted.tiers["fast"]) / "stage"
        wait_until(lambda: len(list(stage.iterdir())) == len(CHANGES), "the copies have begun")
        for change in CHANGES:
            change(slow.root / change.__name__ / "large")
        slow.rules()
        wait_until(lambda: list(stage.iterdir()) == [], "the copies are given up")
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "all is closed")
    for name in names:
        _require_new(mounted, slow.root / name, name, old[name])
    accounts_agree(mounted)


def _require_new(mounted: Mounted, original: Path, name: str, old: bytes) -> None:
    """What is read from now on, from the source and from a copy, is what the source has now."""
    # A kernel that tells no opens reads on for a while what was opened for it. It has been given
    # bytes of the old version, so it is given none of a new one.
    stays_stale = mounted.cli.mode == "no_open"
    if stays_stale:
        wait_until(lambda: read_or_error(mounted.path / name) != old, "its time is over")
    there = original.exists()
    for _ in range(2):
        seen = read_or_error(mounted.path / name)
        if there and not (stays_stale and seen == errno.ESTALE):
            assert seen == original.read_bytes() != old, name
        elif not there:
            assert seen == errno.ENOENT or (stays_stale and seen == errno.ESTALE), name
        settled(mounted)
    # With such a kernel the listing may be stale too.
    if not stays_stale:
        expected = ["large", "same"] if there else ["same"]
        assert os.listdir((mounted.path / name).parent) == expected


# -- S7: closed to the daemon ----------------------------------------------------------------------


@pytest.mark.fault("S7")
@pytest.mark.promise(24, 59)
@pytest.mark.modes(*EITHER_SIDE)
def test_directories_that_cannot_be_listed_at_the_source_are_closed_and_not_empty(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    """As a server does that does not believe root."""
    content = files(5)
    tree(content | {"closed/file": 10, "closed/below/file": 10})
    slow.rules("err readdir EACCES ^/closed", "err getattr EACCES ^/closed/")
    monarch.expects_log("1 entry of the source could not be read when .*: 'closed'")
    mounted = monarch.mount(slow.path)
    assert sorted(os.listdir(mounted.path)) == ["000.jpg", *list(content)[1:], "closed"]
    assert stat.S_ISDIR((mounted.path / "closed").stat().st_mode)
    for attempt in (os.listdir, os.scandir):
        with pytest.raises(PermissionError):
            list(attempt(mounted.path / "closed"))
    for name in ("closed/file", "closed/below/file", "closed/missing"):
        with pytest.raises(PermissionError):
            (mounted.path / name).stat()
    epoch(mounted, content)
    settled(mounted)
    assert set(resident(mounted, content)) == set(content)
    assert (
        json.loads(
            monarch("snapshot", "info", str(mounted.state / "snapshot.lmdb"), "--json").stdout
        )["unreadable"]
        == 1
    )


@needs_root
@pytest.mark.fault("S7")
@pytest.mark.promise(24)
@pytest.mark.modes("python", "relay", "no_open")
def test_an_ordinary_users_mount_shows_unreadable_files_and_serves_the_others(
    monarch: MonarchCommand,
) -> None:
    with ordinary_user(monarch.case) as user:
        source, mnt, tier = user.mkdir("source"), user.mkdir("mnt"), user.directory / "home/tier"
        (source / "open").write_bytes(b"for all")
        (source / "secret").write_bytes(b"root's own")
        (source / "secret").chmod(0o600)
        (source / "closed").mkdir(0o700)
        (source / "closed" / "file").write_bytes(b"root's own")
        # Its names may be listed, but their attributes may not be read.
        (source / "names").mkdir(0o744)
        (source / "names" / "file").write_bytes(b"root's own")
        mode = ",".join(MODES[monarch.mode])
        done = user("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", "-o", mode)
        assert done.returncode == 0, done.stderr
        attempts = "import os, sys\nos.chdir(sys.argv[1])\n"
        attempts += "def outcome(call, *args):\n    try: return call(*args)\n"
        attempts += "    except OSError as error: return os.strerror(error.errno)\n"
        attempts += "read = lambda name: open(name, 'rb').read()\n"
        attempts += "print([sorted(os.listdir('.')), *(outcome(read, n) for n in "
        attempts += "('open', 'secret', 'closed/file', 'names/file')),"
        attempts += " outcome(os.listdir, 'closed'), outcome(os.listdir, 'names')])"
        no = "Permission denied"
        names = ["closed", "names", "open", "secret"]
        seen = user.run(user.python, "-c", attempts, str(mnt))
        assert seen.stdout == f"{[names, b'for all', no, no, no, no, ['file']]}\n", seen.stderr
        done = user("umount", str(mnt))
        assert done.returncode == 0, done.stderr
        (log,) = user.directory.rglob("daemon.log")
        lines = "2 entries of the source could not be read when its snapshot was made"
        assert log.read_text().count(lines) == 1
        assert "root's own" not in log.read_text()


# -- S8: cycles, bind mounts, other file systems ---------------------------------------------------


@needs_root
@pytest.mark.fault("S8")
@pytest.mark.promise(16, 60)
@pytest.mark.modes("python", "relay")
@pytest.mark.parametrize("one_file_system", [False, True])
def test_a_scan_neither_follows_cycles_nor_leaves_the_file_system_with_one_file_system(
    monarch: MonarchCommand, tree: Tree, *, one_file_system: bool
) -> None:
    source = tree({"a/file": 5000, "a/b/file": 5000, "again": None, "other": None, "bound": b""})
    (source / "a/up").symlink_to("..")
    (source / "self").symlink_to("self")
    (source / "there").symlink_to("back")
    (source / "back").symlink_to("there")
    with ExitStack() as stack:
        for arguments, place in (
            (["--bind", str(source)], "again"),
            (["-t", "tmpfs", "tmpfs"], "other"),
            (["--bind", str(source / "a/file")], "bound"),
        ):
            subprocess.run(["mount", *arguments, str(source / place)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(source / place)], check=True)
        (source / "other/file").write_bytes(b"on another disk")
        setting = str(one_file_system).lower()
        mounted = monarch.mount(source, options=[f"snapshot.one_file_system={setting}"])
        for name in ("self", "there", "back"):
            with pytest.raises(OSError) as cycle:
                (mounted.path / name).read_bytes()
            assert cycle.value.errno == errno.ELOOP
        assert sorted(os.listdir(mounted.path)) == sorted(os.listdir(source))
        for name in ("a/file", "a/b/file", "a/up/a/file", "again/a/file"):
            assert (mounted.path / name).read_bytes() == (source / name).read_bytes()
        # A bind mount of the source is the same file system, and does not contain itself.
        assert os.listdir(mounted.path / "again/again") == []
        assert os.listdir(mounted.path / "other") == ([] if one_file_system else ["file"])
        if not one_file_system:
            assert_equal_trees(source, mounted.path)
        settled(mounted)
        accounts_agree(mounted)
        mounted.umount()


# -- S9: names ------------------------------------------------------------------------------------


HOSTILE = (
    b"two\nlines\n2026-01-31T12:00:00.000Z error monarch.forged: forged",
    b"\x1b[31mred\x1b[0m",
    b"\xff\xfe not UTF-8",
    b"\xe2\x80\xaenrut",
    b"n" * 255,
)


@pytest.mark.fault("S9")
@pytest.mark.promise(15)
@pytest.mark.modes("relay")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_tells_of_any_name_in_one_line_that_it_cannot_forge(
    monarch: MonarchCommand, source: Path, form: str
) -> None:
    for name in HOSTILE:
        with open(os.fsencode(source) + b"/" + name, "wb") as file:
            file.write(name)
    mounted = monarch.mount(source, options=[f"log.format={form}", "log.level=debug"])
    monarch.expects_log("is gone from the source since the snapshot")
    for name in HOSTILE:
        os.unlink(os.fsencode(source) + b"/" + name)
        with pytest.raises(FileNotFoundError):
            Path(os.fsdecode(os.fsencode(mounted.path) + b"/" + name)).read_bytes()
    text = mounted.log_text
    assert "\x1b" not in text
    assert "\u202e" not in text
    lines = text.splitlines()
    assert not any(line.startswith("2026-01-31") for line in lines)
    if form == "json":
        assert all(json.loads(line)["message"] for line in lines)
    output = monarch("status", str(mounted.path), "--json").stdout
    assert json.loads(output)
    assert "\x1b" not in output
    assert "\x1b[31m" not in monarch("status", str(mounted.path)).stdout


# -- S13: a given snapshot -------------------------------------------------------------------------


def _page_out(pid: int, name: str) -> None:
    """Have the kernel take from a process the pages of mapped files whose path holds ``name``."""
    process = os.pidfd_open(pid)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if name in line:
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                where = struct.pack("QQ", start, end - start)
                # process_madvise, MADV_PAGEOUT
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.syscall(440, process, where, 1, 21, 0) >= 0, os.strerror(
                    ctypes.get_errno()
                )
    finally:
        os.close(process)


def _tree_of(path: Path) -> dict[str, list[str]]:
    return {entry.name: sorted(os.listdir(entry)) for entry in sorted(path.iterdir())}


@needs_root
@pytest.mark.fault("S13")
@pytest.mark.promise(98)
@pytest.mark.finding("D2")
@pytest.mark.modes("python", "relay", "no_open")
def test_damage_to_a_given_snapshot_does_not_stop_a_mount(
    monarch: MonarchCommand, source: Path, tmp_path: Path
) -> None:
    names = {f"d{d:02}": [f"{n:04}" for n in range(400)] for d in range(12)}
    for directory, files_in in names.items():
        (source / directory).mkdir()
        for name in files_in:
            os.close(os.open(source / directory / name, os.O_CREAT | os.O_WRONLY))
    (tmp_path / "empty").mkdir()
    (tmp_path / "shared").mkdir()
    with SlowSource(tmp_path / "shared", tmp_path / "pfs") as pfs:
        given = pfs.path / "x.snapshot"
        for what, file in ((source, given), (tmp_path / "empty", tmp_path / "other.snapshot")):
            monarch("snapshot", "build", str(what), "-o", str(file))
        size = given.stat().st_size
        whole = given.read_bytes()
        mounted = monarch.mount(source, snapshot=given)
        assert mounted.status()["snapshot"]["file"] == str(given)
        os.listdir(mounted.path)
        # Others copy another over it, and cut it short.
        given.write_bytes((tmp_path / "other.snapshot").read_bytes())
        _page_out(mounted.pid, "snapshot")
        assert _tree_of(mounted.path) == names
        assert mounted.status()["health"]["state"] == "ok"
        mounted.umount()
        # That is another source's.
        done = monarch(
            *("mount", str(source), str(mounted.path), "--state", str(mounted.state)),
            *("--tier", f"{mounted.tiers['fast']}:10MiB", "--snapshot", str(given)),
            check=False,
        )
        assert done.returncode == 5 and str(given) in done.stderr
        monarch.expects_log("x.snapshot.* describes another source")

        given.write_bytes(whole)
        monarch.mount(source, snapshot=given).umount()
        before = pfs.counters()["read_bytes"]
        os.close(os.open(given, os.O_RDONLY))
        mounted = monarch.mount(source, snapshot=given)
        # Its copy is there from the mount before.
        assert pfs.counters()["read_bytes"] - before < size // 2
        os.truncate(given, 4096)
        _page_out(mounted.pid, "snapshot")
        assert _tree_of(mounted.path) == names
        # Its file system hangs, and dies.
        pfs.rules("hang * .*")
        _page_out(mounted.pid, "snapshot")
        assert _tree_of(mounted.path) == names
        mounted.status()
        pfs.kill()
        _page_out(mounted.pid, "snapshot")
        assert _tree_of(mounted.path) == names
        assert mounted.status()["health"]["state"] == "ok"
        mounted.umount()
        # And now the type of the entry is unknown.
        done = monarch(
            *("mount", str(source), str(mounted.path), "--state", str(mounted.state)),
            *("--tier", f"{mounted.tiers['fast']}:10MiB", "--snapshot", str(given)),
            check=False,
        )
        assert (done.returncode, done.stderr.count("\n")) == (5, 1), done.stderr
        assert str(given) in done.stderr
        monarch.expects_log("cannot read snapshot .*x.snapshot")


# -- S14: changed just before it was fetched -------------------------------------------------------


@pytest.fixture
def coarse(tmp_path: Path) -> Iterator[Path]:
    """A source that keeps times in whole seconds. Name it before ``monarch``."""
    with disks.coarse(tmp_path) as path:
        yield path


def _in_one_second(path: Path, first: bytes, then: Callable[[], object], second: bytes) -> None:
    """Write both versions within a second of the clock, and do something in between."""
    while True:
        wait_until(lambda: time.time() % 1 < 0.15, "a second begins")
        path.write_bytes(first)
        before = path.stat()
        then()
        path.write_bytes(second)
        after = path.stat()
        if (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns):
            return


def _read_or_stale(mounted: Mounted, name: str, mode: str) -> bytes:
    """What is read; without opens, ESTALE until the next mount is right as well."""
    try:
        return (mounted.path / name).read_bytes()
    except OSError as error:
        if mode != "no_open" or error.errno != errno.ESTALE:
            raise
        return b"stale"


@needs_root
@pytest.mark.fault("S14")
@pytest.mark.promise(29)
@pytest.mark.finding("D4")
def test_two_versions_within_one_second_are_distinguished(
    coarse: Path, monarch: MonarchCommand, mode: str
) -> None:
    one, two = contents("one", 20_000), contents("two", 20_000)
    for name in "abc":
        (coarse / name).write_bytes(bytes(20_000))
    mounted = monarch.mount(coarse)
    for name in "ab":
        _in_one_second(
            coarse / name,
            one,
            lambda name=name: (mounted.path / name).read_bytes(),
            two,
        )
    time.sleep(RESTED_S)
    right = (two, b"stale") if mode == "no_open" else (two,)
    for name in "ab":
        wait_until(lambda n=name: _read_or_stale(mounted, n, mode) in right, f"{name} is compared")
    # And if the mount ends before it can look again.
    _in_one_second(coarse / "c", one, lambda: (mounted.path / "c").read_bytes(), two)
    mounted.umount()
    mounted = monarch.mount(coarse, arguments=["--refresh"])
    for name in "abc":
        assert (mounted.path / name).read_bytes() == two
    monarch.expects_log("changed at the source since the snapshot")


@pytest.mark.modes("no_open")
@pytest.mark.fault("S14")
@pytest.mark.promise(40)
@pytest.mark.finding("D4")
def test_without_opens_a_second_look_takes_the_old_version_out_of_the_kernel_s_pages(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a": 20_000})
    mounted = monarch.mount(source)
    # Changed before the first read, so that it is no news that the file has changed.
    (source / "a").write_bytes(contents("one", 20_000))
    # Twice: after the first read the kernel drops the pages, because the times have changed.
    for _ in range(2):
        assert (mounted.path / "a").read_bytes() == contents("one", 20_000)
        settled(mounted)
    (source / "a").write_bytes(contents("two", 20_000))
    time.sleep(RESTED_S)
    wait_until(lambda: _read_or_stale(mounted, "a", "no_open") == b"stale", "it is compared")
    monarch.expects_log("changed at the source since the snapshot")


@needs_root
@pytest.mark.fault("S14")
@pytest.mark.promise(29)
@pytest.mark.finding("D4")
def test_fetched_bytes_of_young_files_are_compared_with_the_source(
    coarse: Path, tmp_path: Path, monarch: MonarchCommand, mode: str
) -> None:
    """All that the daemon fetches by itself, files that have no room in a tier, and large ones."""
    content = {f"{n}.jpg": contents(str(n), 20_000) for n in range(4)}
    content |= {"large": contents("large", 300_000), "no room": contents("no room", 3_000_000)}
    with SlowSource(coarse, tmp_path / "slow", attribute_s=0) as slow:
        while True:
            for name, data in content.items():
                (coarse / name).write_bytes(data)
            mounted = monarch.mount(
                slow.path,
                tiers={"fast": "1MB"},
                options=[SMALL_INLINE],
                arguments=["--refresh"],
            )
            epoch(mounted, content)
            # A file that is read more than two seconds after the daemon has seen the directories is
            # not young.
            begun = mounted.log_text.rpartition(" mounting ")[0].rpartition("\n")[2].split()[0]
            if time.time() - datetime.strptime(begun, "%Y-%m-%dT%H:%M:%S.%f%z").timestamp() < 1.9:
                break
            mounted.umount()
        # Stands for a second write: other bytes, and not a time that is another.
        slow.rules("flip read .*jpg", "flip read large", "flip read room")
        time.sleep(RESTED_S)

        def flipped(data: bytes) -> bytes:
            return bytes([data[0] ^ 1]) + data[1:]

        def is_compared(name: str) -> bool:
            now = _read_or_stale(mounted, name, mode)
            return now == b"stale" or now[:1] == flipped(content[name])[:1]

        for name in content if mode != "no_open" else [f"{n}.jpg" for n in range(4)]:
            wait_until(lambda n=name: is_compared(n), f"{name} is compared")
        slow.rules()
        mounted.umount()


@needs_root
@pytest.mark.fault("S14")
@pytest.mark.promise(29)
@pytest.mark.finding("C6")
def test_a_file_that_was_fetched_while_it_was_being_written_is_whole_soon(
    monarch: MonarchCommand, tree: Tree, mode: str
) -> None:
    source = tree({f"{n}.jpg": 20_000 for n in range(3)})
    mounted = monarch.mount(source)
    whole = contents("whole", 20_000)
    for n, short in enumerate((b"", whole[:5000], whole[:19_999])):
        (source / f"{n}.jpg").write_bytes(short)
        assert _read_or_stale(mounted, f"{n}.jpg", mode) in (short, b"stale")
        (source / f"{n}.jpg").write_bytes(whole)
    time.sleep(RESTED_S)
    right = (whole, b"stale", b"") if mode == "no_open" else (whole,)
    for n in range(3):
        name = f"{n}.jpg"
        wait_until(lambda n=name: _read_or_stale(mounted, n, mode) in right, f"{name} is compared")
    monarch.expects_log("changed at the source since the snapshot")


@pytest.mark.fault("S14")
@pytest.mark.finding("D4")
def test_a_file_that_has_rested_is_checked_once(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = files(20)
    tree(content)
    time.sleep(2.2)
    tree({"the newest": 1})
    mounted = monarch.mount(slow.path)
    epoch(mounted, content)
    settled(mounted)
    time.sleep(0.5)
    before = calls(slow)
    time.sleep(RESTED_S)
    epoch(mounted, content)
    after = calls(slow)
    # The root of the source is checked at intervals, which is not a check of a file.
    assert after.pop("getattr") - before.pop("getattr") < len(content) // 2
    assert after == before
