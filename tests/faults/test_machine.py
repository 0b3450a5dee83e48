"""The machine runs short, stops, jumps in time or kills: reads continue, or fail with an errno."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from monarch.control.client import call
from tests.conftest import MODES, MonarchCommand, Mounted, Tree, contents
from tests.equipment.clock import DAY_S, Clock
from tests.equipment.slowfs import SlowSource
from tests.faults.limits import control_group
from tests.mount.command import (
    assert_nothing_is_left,
    needs_fuse,
    needs_root,
    one_line,
    registered,
)
from tests.mount.observe import (
    account,
    accounts_agree,
    epoch,
    resident,
    settled,
    wait_until,
)

pytestmark = needs_fuse

ROOT = Path(__file__).parents[2]


def sized(count: int, size: int, *, large: int = 0) -> dict[str, int]:
    """Names and sizes of ``count`` small files, and of some that are not fetched whole."""
    small = {f"small/{n:04}": size + n for n in range(count)}
    return small | {f"large/{n}": 6_000_000 + n for n in range(large)}


def contents_of(sizes: dict[str, int]) -> dict[str, bytes]:
    return {name: contents(name, size) for name, size in sizes.items()}


def all_at_once(
    mounted: Mounted, sizes: dict[str, int], *how: str, readers: int = 12
) -> dict[str, int]:
    """Every file, by several readers at a time: how often each came out how."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.at_once", str(mounted.path), str(readers), *how],
        cwd=ROOT,
        input=json.dumps(sizes),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, int] = json.loads(done.stdout)
    return outcomes


def mount_by(monarch: MonarchCommand, *prefix: str, options: str = "") -> Mounted:
    """Mount the test's source by a ``monarch`` that another program starts."""
    directory = monarch.directory
    (directory / "mnt").mkdir(exist_ok=True)
    made = registered(
        monarch,
        directory / "mnt",
        directory / "source",
        directory / "state",
        {"fast": directory / "tiers/fast"},
    )
    mode = ",".join(filter(None, (*MODES[monarch.mode], options)))
    done = subprocess.run(
        [
            *(*prefix, sys.executable, "-m", "monarch", "mount", str(made.source), str(made.path)),
            *("--state", str(made.state), "--tier", f"{made.tiers['fast']}:1GiB"),
            *(("-o", mode) if mode else ()),
        ],
        env=monarch.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    made.pid = int(made.status()["pid"])
    return made


# -- M4: out of descriptors, threads, memory -------------------------------------------------------


@pytest.mark.fault("M4")
@pytest.mark.promise(51)
def test_with_256_descriptors_opens_are_served_or_refused_and_the_mount_recovers(
    monarch: MonarchCommand, tree: Tree
) -> None:
    sizes = sized(600, 3000, large=2)
    content = contents_of(sizes)
    tree(sizes)
    mounted = mount_by(monarch, "prlimit", "--nofile=256:256")
    assert resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE) == (256, 256)
    outcomes: Counter[str] = Counter()
    for _ in range(2):
        with ExitStack() as held:
            for name, expected in content.items():
                try:
                    file = held.enter_context((mounted.path / name).open("rb", buffering=0))
                    outcomes["right" if file.readall() == expected else "wrong"] += 1
                except OSError as error:
                    outcomes[errno.errorcode[error.errno or 0]] += 1
        wait_until(lambda: not account(mounted)["handles"]["open_files"], "all are closed")
    if monarch.mode == "python":
        # Each open file takes a descriptor there; without the datapath that is how many there are.
        monarch.expects_log("Too many open files")
        assert set(outcomes) == {"right", "EMFILE"} and outcomes["right"] > 200
    else:
        assert set(outcomes) == {"right"}
    epoch(mounted, content)
    settled(mounted)
    accounts_agree(mounted)


@needs_root
@pytest.mark.fault("M4")
@pytest.mark.promise(51)
def test_without_a_free_thread_reads_continue(monarch: MonarchCommand, tree: Tree) -> None:
    sizes = sized(60, 50_000, large=4)
    tree(sizes)
    mounted = monarch.mount(monarch.directory / "source", tiers={"fast": "1GiB"})
    with control_group("pids") as group:
        group.limit(len(psutil.Process(mounted.pid).threads()))
        group.add(mounted.pid)
        for _ in range(2):
            assert all_at_once(mounted, sizes) == {"right": len(sizes)}
        group.limit(None)
    settled(mounted)
    accounts_agree(mounted)


@needs_root
@pytest.mark.modes("python", "no_open")
@pytest.mark.fault("M4")
@pytest.mark.promise(51)
def test_in_little_memory_a_tier_that_cannot_keep_up_does_not_fill_it(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    sizes = {f"{n:03}": 3_900_000 + n for n in range(110)}
    for name, size in sizes.items():
        (source / name).write_bytes(contents(name, size))
    tier = monarch.directory / "tiers/fast"
    (monarch.directory / "disk").mkdir()
    with SlowSource(monarch.directory / "disk", tier) as disk, control_group("memory") as group:
        disk.rules("write_MBps 30")
        group.limit(240 << 20)
        enter = f'echo $$ > {group.directory}/cgroup.procs && exec "$@"'
        mounted = mount_by(monarch, "sh", "-c", enter, "sh")
        outcomes = all_at_once(mounted, sizes, readers=30)
        assert outcomes == {"right": len(sizes)}
        assert group.killed() == 0
        mounted.umount()


@needs_root
@pytest.mark.modes("auto")
@pytest.mark.fault("M4")
def test_the_kernel_is_asked_to_kill_others_first(monarch: MonarchCommand, tree: Tree) -> None:
    permitted = subprocess.run(["choom", "-n", "-500", "--", "true"], capture_output=True)
    expected = "-500\n" if permitted.returncode == 0 else "0\n"
    mounted = monarch.mount(tree({"a": 1}))
    assert Path(f"/proc/{mounted.pid}/oom_score_adj").read_text() == expected
    mounted.umount()
    # A value that the user has chosen stays.
    again = mount_by(monarch, "choom", "-n", "100", "--")
    assert Path(f"/proc/{again.pid}/oom_score_adj").read_text() == "100\n"


@pytest.mark.fault("M4", "S2")
@pytest.mark.promise(9)
def test_a_source_that_says_try_again_is_an_error_and_not_the_end_of_the_file(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    sizes = {"small": 5000, "large": 6_000_000}
    tree(sizes)
    mounted = monarch.mount(slow.path)
    monarch.expects_log("Resource temporarily unavailable")
    slow.rules("err read EAGAIN .")
    for name in sizes:
        with pytest.raises(OSError) as caught:
            (mounted.path / name).read_bytes()
        assert caught.value.errno == errno.EIO
    slow.rules()
    epoch(mounted, contents_of(sizes))


# -- M1, M2: the mount point, and the death of the daemon ------------------------------------------


@pytest.mark.modes("auto")
@pytest.mark.fault("M1")
def test_a_mount_in_a_mount_or_of_a_mount_is_refused(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    outer = monarch.mount(tree({"empty": None, "full/file": 1}))
    (tmp_path / "other").mkdir()
    own = ["--state", f"{tmp_path}/s", "--tier", f"{tmp_path}/t:1MiB"]
    words = f"lies in the Monarch mount {str(outer.path)!r}"
    inside = monarch("mount", str(outer.source), str(outer.path / "empty"), *own, check=False)
    assert (inside.returncode, words in one_line(inside)) == (3, True), inside.stderr
    of_it = monarch("mount", str(outer.path / "full"), str(tmp_path / "other"), *own, check=False)
    assert (of_it.returncode, words in one_line(of_it)) == (4, True), of_it.stderr
    assert "mount its source" in of_it.stderr
    assert_nothing_is_left(monarch, outer)
    assert (outer.path / "full/file").read_bytes() == contents("full/file", 1)


@pytest.mark.modes("auto")
@pytest.mark.fault("M1")
@pytest.mark.promise(109)
def test_a_mount_in_the_source_of_another_is_refused(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    """Else a file would count as safe at the source that lies in the tier of another mount."""
    outer, inner = tree({"empty": None, "file": 1}), tmp_path / "inner"
    inner.mkdir()
    (inner / "file").write_bytes(b"inner")
    first = monarch.mount(outer)
    own = ["--state", f"{tmp_path}/s", "--tier", f"{tmp_path}/t:1MiB"]
    command = ["mount", str(inner), str(outer / "empty"), *own]
    try:
        done = monarch(*command, check=False)
        words = f"lies in the source {str(outer)!r} of the mount {str(first.path)!r}"
        assert (done.returncode, words in one_line(done)) == (2, True), done.stderr
        first.umount()
        # The other mount is first.
        monarch(*command)
        more = ["--state", f"{tmp_path}/s2", "--tier", f"{tmp_path}/t2:1MiB"]
        done = monarch("mount", str(outer), str(first.path), *more, check=False)
        words = f"the Monarch mount {str(outer / 'empty')!r} lies in the source"
        assert (done.returncode, words in one_line(done)) == (4, True), done.stderr
    finally:
        monarch("umount", str(outer / "empty"), check=False)
    assert_nothing_is_left(monarch)


@pytest.mark.fault("M1", "M2")
@pytest.mark.promise(12)
def test_readers_of_a_killed_daemon_get_an_error_at_once_and_the_next_mount_serves(
    monarch: MonarchCommand, tree: Tree
) -> None:
    sizes = sized(40, 50_000, large=3)
    tree(sizes)
    mounted = monarch.mount(monarch.directory / "source", tiers={"fast": "1GiB"})
    with until_gone(mounted, sizes) as readers:
        mounted.kill()
        output, _ = readers.communicate(timeout=100)
    outcomes = set(json.loads(output))
    assert outcomes <= {"ENOTCONN", "ECONNABORTED"}
    with pytest.raises(OSError) as caught:
        os.statvfs(mounted.path)
    assert caught.value.errno == errno.ENOTCONN
    # What the kernel remembers of a directory is whole; else it is the same error.
    assert (
        listed(mounted.path / "small") == ["ENOTCONN"] or len(listed(mounted.path / "small")) == 40
    )
    again = monarch.mount(mounted.source, tiers={"fast": "1GiB"})
    epoch(again, contents_of(sizes))
    settled(again)
    accounts_agree(again)


@pytest.mark.fault("M2")
@pytest.mark.promise(12)
def test_a_daemon_killed_during_a_call_of_a_hung_source_leaves_no_process_waiting(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    """Its threads cannot end before the source answers; its readers can."""
    sizes = {"hangs": 5000, "resident": 5000}
    tree(sizes)
    mounted = monarch.mount(slow.path)
    (mounted.path / "resident").read_bytes()
    settled(mounted)
    slow.rules("hang open ^/hangs")
    with subprocess.Popen(
        ["cat", str(mounted.path / "hangs")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as waiting:
        wait_until(lambda: slow.counters()["hanging"] > 0, "it waits for the source")
        mounted.kill()
        assert waiting.wait(100) == 1
        with pytest.raises(OSError) as caught:
            os.statvfs(mounted.path)
    assert caught.value.errno == errno.ENOTCONN
    again = monarch.mount(slow.path)
    assert (again.path / "resident").read_bytes() == contents("resident", 5000)
    slow.rules()
    epoch(again, contents_of(sizes))


def listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        return [errno.errorcode[error.errno or 0]]


@contextmanager
def until_gone(mounted: Mounted, sizes: dict[str, int]) -> Iterator[subprocess.Popen[str]]:
    """Readers that list and read all the time; each ends with the first error and tells it."""
    command = [sys.executable, "-m", "tests.faults.at_once", str(mounted.path), "8", "--until-gone"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as readers:
        assert readers.stdin is not None
        try:
            readers.stdin.write(json.dumps(sizes))
            readers.stdin.close()
            readers.stdin = None
            wait_until(lambda: account(mounted)["source_totals"]["opens"] > 20, "they read")
            yield readers
        finally:
            readers.kill()


# -- M5: the clock jumps ---------------------------------------------------------------------------


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    return Clock(tmp_path)


# The datapath in C knows no clock of the wall.
@pytest.mark.modes("python", "relay")
@pytest.mark.fault("M5")
@pytest.mark.promise(54)
def test_a_clock_that_jumps_by_days_expires_nothing_and_takes_no_copy(
    monarch: MonarchCommand, tree: Tree, clock: Clock
) -> None:
    sizes = sized(60, 20_000, large=3)
    content = contents_of(sizes)
    tree(sizes)
    freshness = "mount" if monarch.mode == "no_open" else "ttl:300ms"
    options = f"snapshot.freshness={freshness}"
    mounted = mount_by(monarch, *clock.by, options=options)
    names = list(content)
    for turn, days in enumerate((1, -1, 3, -400, 0)):
        clock.move(days * DAY_S)
        some = names[turn::5]
        epoch(mounted, {name: content[name] for name in some})
        report = account(mounted)
        assert report["snapshot"]["age_s"] >= 0
    report = settled(mounted)
    assert resident(mounted, names) == dict.fromkeys(names, "fast")
    accounts_agree(mounted)
    before = report["source_totals"]
    for days in (2, -2):
        clock.move(days * DAY_S)
        epoch(mounted, content)
    report = account(mounted)
    assert report["source_totals"] == before
    assert report["copies"]["failed"] == 0
    mounted.umount()
    # The mount is as good as before when it begins a day early or late.
    for days in (1, -1):
        clock.move(days * DAY_S)
        again = mount_by(monarch, *clock.by, options=options)
        epoch(again, content)
        assert account(again)["source_totals"]["reader"]["opens"] == 0
        accounts_agree(again)
        again.umount()


@pytest.mark.modes("relay")
@pytest.mark.fault("M5")
@pytest.mark.promise(54)
def test_a_sweep_takes_no_copy_that_comes_meanwhile_whatever_the_clock_says(
    monarch: MonarchCommand, tree: Tree, clock: Clock
) -> None:
    sizes = sized(14, 20_000)
    content = contents_of(sizes)
    tree(sizes)
    names = list(content)
    (monarch.directory / "disk").mkdir()
    with SlowSource(monarch.directory / "disk", monarch.directory / "tiers/fast") as disk:
        mounted = mount_by(monarch)
        epoch(mounted, content)
        settled(mounted)
        # Their directories stay, and the sweep checks them too.
        call(mounted.state / "control.sock", "evict", {"paths": names[7:]})
        mounted.umount()
        clock.move(DAY_S)
        disk.rules("hang readdir /copies-[^/]*/")
        again = mount_by(monarch, *clock.by)
        wait_until(lambda: disk.counters()["hanging"] > 0, "the sweep has begun")
        epoch(again, content, names[7:])
        settled(again)
        disk.rules()
        # It is over when nothing asks the disk any more.
        wait_until(lambda: quiet(disk), "the sweep is over")
        assert "without a record" not in again.log_text
        assert resident(again, names) == dict.fromkeys(names, "fast")
        accounts_agree(again)
        again.umount()


def quiet(disk: SlowSource) -> bool:
    before = disk.counters()
    time.sleep(0.3)
    return disk.counters() == before


# -- M6: an exception in a handler, and in a task of the daemon ------------------------------------

# Each is called on the n-th of many entries that were not used before.
CALLS: dict[str, Callable[[Path, int], object]] = {
    "lookup": lambda top, n: os.stat(top / f"small/{n:04}"),
    "getattr": lambda top, n: ask_again(top / f"small/{n:04}"),
    "readlink": lambda top, n: os.readlink(top / f"link{n}"),
    "opendir": lambda top, n: os.listdir(top / f"d{n}"),
    "readdir": lambda top, n: os.listdir(top / f"d{n}"),
    "open": lambda top, n: (top / f"small/{n:04}").read_bytes(),
    "read": lambda top, n: read_directly(top / f"small/{n:04}"),
    "statfs": lambda top, n: os.statvfs(top),
    "getxattr": lambda top, n: os.getxattr(top / f"small/{n:04}", "user.monarch.tier"),
    "listxattr": lambda top, n: os.listxattr(top / f"small/{n:04}"),
    # The kernel reports nothing of this to the daemon.
    "release": lambda top, n: (top / f"small/{n:04}").read_bytes(),
}


def read_directly(path: Path) -> bytes:
    """Past the kernel's pages, for whose sake it would ask again by itself."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 1 << 16) as pages:
            return bytes(pages[: os.preadv(fd, [pages], 0)])
    finally:
        os.close(fd)


def ask_again(path: Path) -> None:
    """``stat`` that the kernel does not answer from what it remembers."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    at_fdcwd, force_sync, basic = -100, 0x2000, 0x7FF
    if libc.statx(at_fdcwd, os.fsencode(path), force_sync, basic, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@pytest.mark.modes("python")
@pytest.mark.fault("M6")
@pytest.mark.promise(52)
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_in_a_call_is_the_error_of_that_call_and_of_no_other(
    monarch: MonarchCommand, tree: Tree, source: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    call_fails_once(monarch, tree, source, monkeypatch, name)


@pytest.mark.modes("relay", "passthrough", "no_open")
@pytest.mark.fault("M6")
@pytest.mark.promise(52)
def test_an_exception_in_a_call_that_the_datapath_passes_on_is_that_call_s(
    monarch: MonarchCommand, tree: Tree, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_fails_once(monarch, tree, source, monkeypatch, "getxattr")


def call_fails_once(
    monarch: MonarchCommand,
    tree: Tree,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    sizes = sized(12, 5000)
    tree({**sizes, **{f"d{n}/file": 10 for n in range(12)}})
    for n in range(12):
        (source / f"link{n}").symlink_to("small/0000")
    monkeypatch.setenv("MONARCH_POINT", f"handler-{name}:8:raise")
    mounted = monarch.mount(source, options=["limits.inline_max=1KiB"])
    monarch.expects_log(rf"internal error in {name}\(\)")
    monarch.expects_log("Traceback")
    outcomes = Counter()
    for n in range(12):
        try:
            CALLS[name](mounted.path, n)
            outcomes["done"] += 1
        except OSError as error:
            outcomes[errno.errorcode[error.errno or 0]] += 1
    assert outcomes == ({"done": 12} if name == "release" else {"done": 11, "EIO": 1})
    wait_until(lambda: account(mounted)["errors"].get(f"handler-{name}") == 1, "it is counted")
    assert mounted.log_text.count("Traceback (most recent call last)") == 1
    epoch(mounted, contents_of(sizes))


TASKS = (
    *("signals", "engine", "changes", "visits", "books", "sweep", "watch", "inquiry"),
    *("sizes", "scrub", "health", "warm"),
)


@pytest.mark.modes("relay")
@pytest.mark.fault("M6")
@pytest.mark.promise(52)
@pytest.mark.parametrize("name", TASKS)
def test_a_failed_task_of_the_daemon_is_started_again_and_the_mount_continues(
    monarch: MonarchCommand, tree: Tree, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sizes = sized(4, 5000, large=1)
    monkeypatch.setenv("MONARCH_POINT", f"task-{name}:1:raise")
    mounted = monarch.mount(tree(sizes), options=["snapshot.freshness=mount"])
    monarch.expects_log(f"the task {name} failed")
    monarch.expects_log("Traceback")
    if name == "warm":
        done = monarch("warm", str(mounted.path), "--wait", check=False)
        assert (done.returncode, "not all files were copied" in one_line(done)) == (1, True)
    epoch(mounted, contents_of(sizes))
    wait_until(lambda: account(mounted)["errors"].get(f"task-{name}") == 1, "it is counted")
    assert mounted.log_text.count("Traceback (most recent call last)") == 1
    wait_until(lambda: len(resident(mounted, sizes)) == len(sizes), "all are copied")
    accounts_agree(mounted)
    if name == "signals":
        os.kill(mounted.pid, signal.SIGTERM)
        wait_until(lambda: not psutil.pid_exists(mounted.pid), "it ends on a signal")


# -- M7: many at once, and killed amid it ----------------------------------------------------------

# Of the pools of this test's mount: for the source, and for both tiers to read and to write.
MOST_THREADS = 4 + 2 * (8 + 4 + 1)


@dataclass(frozen=True, slots=True)
class OpenResources:
    """What a daemon has open, by what it is, its ends of pipes, and how many threads."""

    open: Counter[str]
    pipes: int
    threads: int


@pytest.mark.fault("M7")
def test_thousands_of_opens_and_kills_leave_nothing_open_and_no_thread(
    monarch: MonarchCommand, tree: Tree
) -> None:
    sizes = sized(150, 30_000, large=4)
    tree(sizes)
    mounted = monarch.mount(
        monarch.directory / "source",
        tiers={"fast": "4MiB", "slow": "1GiB"},
        options=["limits.source_concurrency=4", "limits.copy_workers=2"],
    )
    storm(mounted, sizes)
    before = at_rest(mounted)
    for _ in range(2):
        storm(mounted, sizes)
        # A cached entry without an open is kept for a moment, like a connection that was closed.
        _wait_until_closed(mounted, before)
    # Pools of threads grow to their bounds. In each storm a hundred readers were killed.
    after = at_rest(mounted)
    assert after.threads - before.threads <= MOST_THREADS
    # Each reader of the datapath keeps a pipe of its own. Other pipes are as many as before.
    assert after.pipes <= before.pipes + 2 * after.threads
    epoch(mounted, contents_of(sizes))
    accounts_agree(mounted)


def _wait_until_closed(mounted: Mounted, before: OpenResources) -> None:
    """Wait until the daemon has nothing open that it had not open before."""

    def left() -> Counter[str]:
        return at_rest(mounted).open - before.open

    try:
        wait_until(lambda: not left(), "nothing is left open")
    except AssertionError as error:
        raise AssertionError(f"{error}: {left()}") from None


def storm(mounted: Mounted, sizes: dict[str, int]) -> None:
    """A hundred and fifty readers at once, of which most are killed in the middle of a read."""
    outcomes = all_at_once(mounted, sizes, "--amid-kills", readers=25)
    assert outcomes == {"right": len(sizes) // 2}
    call(mounted.state / "control.sock", "evict", {"paths": []})


def at_rest(mounted: Mounted) -> OpenResources:
    """The resources that the daemon holds while it has no requests."""

    def nothing_open() -> bool:
        return not any(account(mounted)["handles"].values())

    wait_until(nothing_open, "everything is closed")
    report = settled(mounted)
    assert [tier["reserved"] for tier in report["tiers"]] == [0, 0]
    assert report["copies"]["running"] == report["copies"]["queued"] == 0
    open_now: Counter[str] = Counter()
    for fd in Path(f"/proc/{mounted.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            open_now[re.sub(r"\[\d+\]|\d+", "N", os.readlink(fd))] += 1
    # The datapath clones the device for its threads, of which there may be more by now.
    del open_now["/dev/fuse"]
    pipes = open_now.pop("pipe:N", 0)
    return OpenResources(open_now, pipes, len(os.listdir(f"/proc/{mounted.pid}/task")))


@pytest.mark.modes("python", "relay")
@pytest.mark.fault("M7")
def test_locks_of_files_are_the_kernels_and_block_no_other_process(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({"a": b"content", "b": b"other"}))
    hold = "import fcntl, sys; f = open(sys.argv[1], 'rb'); fcntl.flock(f, fcntl.LOCK_EX)"
    hold += "; print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(mounted.path / "a")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None and first.stdout.readline() == b"locked\n"
        with subprocess.Popen(command, **pipes) as second:
            assert second.stdin is not None and second.stdout is not None
            time.sleep(0.3)
            assert second.poll() is None
            assert (mounted.path / "a").read_bytes() == b"content"
            assert (mounted.path / "b").read_bytes() == b"other"
            assert account(mounted)["state"] == "serving"
            first.communicate()
            assert second.stdout.readline() == b"locked\n"
            second.communicate()


# -- M8: interrupts --------------------------------------------------------------------------------

_WAITS = """
import ctypes, os, signal, sys
signals = []
for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, lambda number, _: signals.append(number))
libc = ctypes.CDLL(None, use_errno=True)
print("about to read", flush=True)
try:
    if sys.argv[2] == "python":
        with open(sys.argv[1], "rb", buffering=0) as file:
            file.read(4096)
        print("has read", flush=True)
    else:
        # Python repeats what a signal has interrupted.
        fd = libc.open(sys.argv[1].encode(), os.O_RDONLY)
        if fd >= 0:
            fd = libc.pread(fd, ctypes.create_string_buffer(4096), 4096, 0)
        print(fd, os.strerror(ctypes.get_errno()), flush=True)
except KeyboardInterrupt:
    print("KeyboardInterrupt", flush=True)
"""


@contextmanager
def waiting(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is about to open and read a file."""
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS, str(path), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "about to read\n"
            yield process
        finally:
            process.kill()


@pytest.mark.modes("relay", "passthrough")
@pytest.mark.fault("M8", "S1")
@pytest.mark.promise(44)
def test_ctrl_c_interrupts_an_open_that_waits_for_the_source_at_once(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    content = {"small": contents("small", 5000), "large": contents("large", 9_000_000)}
    tree(content)
    mounted = monarch.mount(slow.path)
    slow.rules("hang open .")
    with ExitStack() as stack:
        readers = [
            stack.enter_context(waiting(mounted.path / name, how))
            for name in content
            for how in ("python", "system calls", "python")
        ]
        wait_until(lambda: slow.counters()["hanging"] >= 2, "they wait for the source")
        for reader in readers:
            for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
                reader.send_signal(number)
        time.sleep(0.5)
        # Signals that a program handles itself are no reason to fail its read.
        assert [reader.poll() for reader in readers] == [None] * 6
        for reader in readers[:2] + readers[3:5]:
            reader.send_signal(signal.SIGINT)
        for reader in (readers[0], readers[3]):
            assert reader.communicate(timeout=100)[0] == "KeyboardInterrupt\n"
        for reader in (readers[1], readers[4]):
            output = reader.communicate(timeout=100)[0]
            assert output in ("KeyboardInterrupt\n", "-1 Interrupted system call\n"), output
        slow.rules()
        # Readers that still wait get the bytes for which others have waited in vain.
        for reader in (readers[2], readers[5]):
            assert reader.communicate(timeout=100)[0] == "has read\n"
    epoch(mounted, content)
    settled(mounted)
    accounts_agree(mounted)


# -- M9: stopped and continued ---------------------------------------------------------------------


@pytest.mark.fault("M9")
@pytest.mark.promise(56)
def test_a_daemon_that_was_stopped_for_a_while_continues(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree, pytestconfig: pytest.Config
) -> None:
    stopped_s = 30 if pytestconfig.getoption("--soak") else 2.5
    sizes = {f"{n}": 600_000 * n + 1 for n in range(10)}
    tree(sizes)
    # Neither the source nor the tier was slow meanwhile.
    options = ["limits.source_timeout=2s", "limits.tier_timeout=2s"]
    mounted = monarch.mount(slow.path, tiers={"fast": "1GiB"}, options=options)
    slow.rules("hang open .")
    command = [sys.executable, "-m", "tests.fuse.reading", str(mounted.path)]
    with ExitStack() as running:
        readers = [
            running.enter_context(
                subprocess.Popen(
                    [*command, str(stopped_s + 1.5), str(seed), json.dumps(sizes)],
                    cwd=ROOT,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for seed in range(2)
        ]
        try:
            wait_until(lambda: slow.counters()["hanging"] >= 2, "they read")
            os.kill(mounted.pid, signal.SIGSTOP)
            try:
                slow.rules()
                time.sleep(stopped_s)
            finally:
                os.kill(mounted.pid, signal.SIGCONT)
            for reader in readers:
                _, report = reader.communicate(timeout=60)
                assert reader.returncode == 0, report
        finally:
            for reader in readers:
                reader.kill()
    epoch(mounted, contents_of(sizes))
    report = settled(mounted)
    assert [tier["in_service"] for tier in report["tiers"]] == [True]
    accounts_agree(mounted)
