"""A source that changes under a mount: new bytes or an immediate error, never a hang or a mixture.

Each warning that the daemon must log is announced with ``expects_log``.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from monarch.posix.bounded_calls import call_within
from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment.slowfs import SlowSource
from tests.mount.compare import wait_for_copies
from tests.mount.observe import RESTED_S, account, settled, wait_until

CHANGED = r"changed at the source since the snapshot; run: monarch snapshot refresh"
DIRECTORIES = r"1 directory changed at the source since the snapshot"
GONE = r"is gone from the source since the snapshot; run: monarch snapshot refresh"

SMALL, LARGE = 100_000, 6_000_000


def truncated(path: Path) -> None:
    os.truncate(path, 1000)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"grown" * 1000)


def rewritten(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(contents("new bytes in place", size))


def disguised(path: Path) -> None:
    """In place, with the size and the time of modification that it had."""
    status = path.stat()
    path.write_bytes(contents("new bytes in disguise", status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path) -> None:
    """By rename, with other bytes of the same size and the same time of modification."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(contents("new bytes by rename", status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


def regrown(path: Path) -> None:
    """So large that it is no small file any more."""
    path.write_bytes(contents("new and longer", 7_000_000))


def regrown_by_rename(path: Path) -> None:
    regrown(path.with_name("other"))
    path.with_name("other").rename(path)


CHANGES = (truncated, emptied, grown, rewritten, disguised, replaced, regrown)


def without_hanging(call: Callable[[], object]) -> object:
    return call_within(60.0, call)


def wait_for_change(mounted: Mounted) -> None:
    """Wait until the daemon has compared its copies with the source and found a difference."""
    wait_until(lambda: account(mounted)["snapshot"]["stale"] is True, "a difference is noticed")


def wait_for_looks(mounted: Mounted, entries: int) -> None:
    """Wait until the daemon has compared each of the ``entries`` it watches once more."""
    seen = account(mounted)["snapshot"]["checks"]
    wait_until(lambda: account(mounted)["snapshot"]["checks"] >= seen + 2 * entries, "it looks")


def refreshing(mounted: Mounted) -> list[str]:
    problems = account(mounted)["health"]["problems"]
    return [problem["what"] for problem in problems if "--refresh" in problem["remedy"]]


@pytest.mark.fault("S4", "S6")
@pytest.mark.promise(1, 26)
@pytest.mark.modes("no_open")
@pytest.mark.promise(40)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("change", CHANGES)
def test_without_opens_a_change_before_the_first_read_gives_the_new_bytes_whole(
    monarch: MonarchCommand, tree: Tree, size: int, change: Callable[[Path], None]
) -> None:
    source = tree({"file": size})
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    os.stat(mounted.path / "file")  # the kernel now knows the old size
    change(source / "file")
    expected = (source / "file").read_bytes()
    monarch.expects_log(CHANGED)

    def read() -> bytes:
        # Not by a file object of Python's, which would have the kernel ask for the size.
        fd = os.open(mounted.path / "file", os.O_RDONLY)
        try:
            return b"".join(iter(lambda: os.read(fd, 50_000), b""))
        finally:
            os.close(fd)

    def has_come() -> bool:
        # Nothing between: an error until the kernel knows the size, then all of it.
        try:
            content = read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        assert content == expected
        return True

    wait_until(has_come, "the new version is served")
    assert (mounted.path / "file").stat().st_size == len(expected)


@pytest.mark.modes(*OPENS_ARE_REPORTED)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_change_before_the_first_open_gives_the_new_bytes_at_once(
    monarch: MonarchCommand, tree: Tree, size: int
) -> None:
    source = tree({change.__name__: size for change in CHANGES} | {"same": size})
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    for change in CHANGES:
        os.stat(mounted.path / change.__name__)  # the kernel now knows the old size
        change(source / change.__name__)
    monarch.expects_log(CHANGED)
    for change in CHANGES:
        with open(mounted.path / change.__name__, "rb", buffering=0) as file:
            expected = (source / change.__name__).read_bytes()
            assert os.fstat(file.fileno()).st_size == len(expected), change.__name__
            assert without_hanging(file.readall) == expected, change.__name__
    wait_for_copies(mounted, len(CHANGES))
    for change in CHANGES:
        name = change.__name__
        assert mounted.xattr(name) == "fast"
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes()
        seen, true = (mounted.path / name).stat(), (source / name).stat()
        assert (seen.st_size, seen.st_mtime_ns) == (true.st_size, true.st_mtime_ns)
    assert refreshing(mounted) == [f"{len(CHANGES)} files changed at the source since the snapshot"]


@pytest.mark.fault("S4")
@pytest.mark.promise(27)
def test_resident_files_that_changed_are_fresh_after_the_next_mount(
    monarch: MonarchCommand, tree: Tree
) -> None:
    in_place = [change for change in CHANGES if change is not replaced]
    source = tree({change.__name__: SMALL for change in in_place} | {"same": 10})
    old = {name: (source / name).read_bytes() for name in os.listdir(source)}
    mounted = monarch.mount(source)
    for name in old:
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, len(old))
    # What changes just before or after it is fetched is noticed at the second look.
    time.sleep(RESTED_S)
    for change in in_place:
        change(source / change.__name__)
    for name, content in old.items():
        assert (mounted.path / name).read_bytes() == content  # compared when mounting, no sooner
    mounted.umount()

    again = monarch.mount(source)
    monarch.expects_log(CHANGED)
    wait_for_change(again)
    assert settled(again)["residency"]["files"] == 1
    for name in old:
        expected = (source / name).read_bytes()
        if monarch.mode == "no_open":
            wait_until(lambda n=name: _is_heard(again.path / n), "the kernel knows its size")
        with open(again.path / name, "rb", buffering=0) as file:
            assert os.fstat(file.fileno()).st_size == len(expected)
            assert file.readall() == expected
    assert len(refreshing(again)) == 1


def _is_heard(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return False
    return True


@pytest.mark.fault("S4")
@pytest.mark.promise(27, 28)
def test_with_freshness_never_a_resident_file_stays_as_it_was_copied(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({change.__name__: SMALL for change in CHANGES})
    old = {name: (source / name).read_bytes() for name in os.listdir(source)}
    mounted = monarch.mount(source)
    for name in old:
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, len(old))
    mounted.umount()
    for change in CHANGES:
        change(source / change.__name__)
    again = monarch.mount(source, options=["snapshot.freshness=never"])
    for name, content in old.items():
        assert (again.path / name).read_bytes() == content
        assert (again.path / name).stat().st_size == len(content)
    assert account(again)["health"]["state"] == "ok"
    again.umount()

    refreshed = monarch.mount(source, arguments=["--refresh"])
    for name in old:
        assert (refreshed.path / name).read_bytes() == (source / name).read_bytes()
    assert account(refreshed)["health"]["state"] == "ok"


@pytest.mark.fault("S4")
@pytest.mark.promise(27, 28)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_with_a_ttl_a_change_is_noticed_while_mounted(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"file": SMALL})
    mounted = monarch.mount(source, options=["snapshot.freshness=ttl:1s"])
    (mounted.path / "file").read_bytes()
    wait_for_copies(mounted, 1)
    monarch.expects_log(CHANGED)
    monarch.expects_log(DIRECTORIES)
    replaced(source / "file")
    # The directory may be compared before the change, and the file after it.
    wait_until(lambda: re.search(DIRECTORIES, mounted.log_text) is not None, "both are noticed")
    wait_for_change(mounted)
    assert (mounted.path / "file").read_bytes() == (source / "file").read_bytes()


@pytest.mark.fault("S4")
@pytest.mark.promise(5, 26)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_resident_file_that_changes_while_it_is_open_is_served_whole_until_it_is_closed(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({change.__name__: LARGE for change in (truncated, grown, replaced)})
    old = {name: (source / name).read_bytes() for name in os.listdir(source)}
    mounted = monarch.mount(source, tiers={"fast": "100MiB"}, options=["snapshot.freshness=ttl:1s"])
    for name in old:
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, 3)
    files = {name: open(mounted.path / name, "rb", buffering=0) for name in old}  # noqa: SIM115
    for change in (truncated, grown, replaced):
        change(source / change.__name__)
    monarch.expects_log(CHANGED)
    monarch.expects_log(DIRECTORIES)
    wait_for_change(mounted)
    wait_for_looks(mounted, 4)  # the directory and three files
    for name, file in files.items():
        assert (mounted.path / name).read_bytes() == old[name], name
        assert os.fstat(file.fileno()).st_size == LARGE
        with file:
            assert file.readall() == old[name], name
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "all is closed")
    for name in old:
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes() != old[name]


@pytest.mark.fault("S4")
@pytest.mark.promise(1, 26)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_an_open_file_keeps_its_version_and_the_next_open_has_the_new_one(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"small": SMALL, "large": LARGE})
    old = {name: (source / name).read_bytes() for name in ("small", "large")}
    mounted = monarch.mount(source, tiers={"fast": "1KiB"})
    files = {name: open(mounted.path / name, "rb", buffering=0) for name in old}  # noqa: SIM115
    for name, file in files.items():
        assert file.read(4096) == old[name][:4096]
        replaced(source / name)
    for name, file in files.items():
        with file:
            assert file.readall() == old[name][4096:]
    monarch.expects_log(CHANGED)
    for name in old:
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes() != old[name]


@pytest.mark.fault("S6")
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_truncated_while_it_is_read_ends_early(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"large": 40_000_000})
    old = (source / "large").read_bytes()
    mounted = monarch.mount(source, tiers={"fast": "1KiB"})
    with open(mounted.path / "large", "rb", buffering=0) as file:
        assert file.read(4096) == old[:4096]
        os.truncate(source / "large", 30_000_000)
        os.lseek(file.fileno(), 20_000_000, os.SEEK_SET)
        assert without_hanging(file.readall) == old[20_000_000:30_000_000]
    monarch.expects_log(CHANGED)
    assert (mounted.path / "large").read_bytes() == old[:30_000_000]


@pytest.mark.fault("S5")
@pytest.mark.promise(26)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_deleted_file_is_enoent_and_leaves_the_listing(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"d/small": SMALL, "d/large": LARGE, "d/same": 10, "gone/file": 10})
    mounted = monarch.mount(source)
    for name in ("d/small", "d/large", "gone/file"):
        os.stat(mounted.path / name)
        (source / name).unlink()
    (source / "gone").rmdir()
    monarch.expects_log(GONE)
    for name in ("d/small", "d/large", "gone/file"):
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                without_hanging(partial(os.open, mounted.path / name, os.O_RDONLY))
        with pytest.raises(FileNotFoundError):
            os.stat(mounted.path / name)
    assert os.listdir(mounted.path / "d") == ["same"]
    assert (mounted.path / "d/same").read_bytes() == (source / "d/same").read_bytes()
    assert refreshing(mounted)


@pytest.mark.fault("S5")
@pytest.mark.promise(27)
def test_a_resident_file_deleted_at_the_source_is_enoent_after_the_next_mount(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"file": SMALL, "same": 10})
    mounted = monarch.mount(source)
    for name in ("file", "same"):
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, 2)
    mounted.umount()
    (source / "file").unlink()
    again = monarch.mount(source)
    with pytest.raises(FileNotFoundError):
        (again.path / "file").read_bytes()
    assert os.listdir(again.path) == ["same"]
    wait_for_copies(again, 1)


@pytest.mark.fault("S5")
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_deleted_while_it_is_open_can_be_read_to_its_end(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"small": SMALL, "large": LARGE})
    mounted = monarch.mount(source, tiers={"fast": "1KiB"})
    for name in ("small", "large"):
        expected = (source / name).read_bytes()
        with open(mounted.path / name, "rb", buffering=0) as file:
            (source / name).unlink()
            assert os.fstat(file.fileno()).st_size == len(expected)
            assert file.readall() == expected
    monarch.expects_log(GONE)
    for name in ("small", "large"):
        with pytest.raises(FileNotFoundError):
            os.open(mounted.path / name, os.O_RDONLY)


@pytest.mark.fault("S4")
@pytest.mark.promise(1)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_rewritten_while_it_is_open_is_not_mixed_at_the_next_open(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"large": LARGE})
    mounted = monarch.mount(source, tiers={"fast": "1KiB"})
    with open(mounted.path / "large", "rb", buffering=0) as first:
        first.read(2_000_000)  # the kernel holds pages of the old version
        rewritten(source / "large")
        monarch.expects_log(CHANGED)
        assert (mounted.path / "large").read_bytes() == (source / "large").read_bytes()
        rewritten(source / "large")
        grown(source / "large")
        assert (mounted.path / "large").read_bytes() == (source / "large").read_bytes()


@pytest.mark.fault("S4")
@pytest.mark.promise(1, 2)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_file_rewritten_while_it_is_copied_is_not_mixed(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"large": 60_000_000})
    mounted = monarch.mount(
        source, tiers={"fast": "100MiB"}, options=["limits.source_bandwidth=1MB"]
    )
    with open(mounted.path / "large", "rb", buffering=0) as first:
        first.read(2_000_000)
    wait_until(lambda: account(mounted)["copies"]["running"] == 1, "the copy is under way")
    rewritten(source / "large")
    monarch.expects_log(CHANGED)
    assert (mounted.path / "large").read_bytes() == (source / "large").read_bytes()


@pytest.mark.fault("S5", "M9")
def test_a_file_deleted_before_it_is_copied_is_given_up(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a": SMALL, "b": LARGE, "c": SMALL})
    mounted = monarch.mount(source)
    (source / "b").unlink()
    monarch.expects_log(GONE)
    monarch("warm", str(mounted.path), check=False)
    wait_until(lambda: account(mounted)["residency"]["files"] == 2, "the others are copied")
    assert settled(mounted)["residency"]["wanted"] == 0
    assert sorted(os.listdir(mounted.path)) == ["a", "c"]


@pytest.mark.fault("S5")
@pytest.mark.promise(13)
def test_a_file_that_comes_back_is_served_again(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"file": SMALL})
    mounted = monarch.mount(source)
    away = source.parent / "away"
    (source / "file").rename(away)
    monarch.expects_log(GONE)
    with pytest.raises(FileNotFoundError):
        (mounted.path / "file").read_bytes()
    with pytest.raises(FileNotFoundError):
        os.stat(mounted.path / "file")
    away.rename(source / "file")
    assert (mounted.path / "file").read_bytes() == (source / "file").read_bytes()
    assert os.listdir(mounted.path) == ["file"]
    assert (mounted.path / "file").stat().st_size == SMALL


def by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "below").write_bytes(b"x")


def by_a_link_out(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_bytes(contents("secret", SMALL))
    path.unlink()
    path.symlink_to(secret)


def by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_a_link_within(path: Path) -> None:
    path.unlink()
    path.symlink_to("same")


def by_a_device(path: Path) -> None:
    """One that can be read for ever."""
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def restored(path: Path) -> None:
    """A file again, with bytes of its own."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.write_bytes(contents("restored", 50_000))


@pytest.mark.fault("S5")
@pytest.mark.promise(26)
@pytest.mark.parametrize(
    "change", [by_a_directory, by_a_link_out, by_a_link_within, by_a_fifo, by_a_device]
)
def test_a_file_replaced_by_something_else_is_an_error_at_once(
    monarch: MonarchCommand, tree: Tree, change: Callable[[Path], None]
) -> None:
    source = tree({"file": SMALL, "large": LARGE, "same": 10})
    mounted = monarch.mount(source)
    for name in ("file", "large"):
        os.stat(mounted.path / name)
        change(source / name)
    monarch.expects_log(GONE)
    for name in ("file", "large"):
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                without_hanging((mounted.path / name).read_bytes)
    assert os.listdir(mounted.path) == ["same"]
    assert (mounted.path / "same").read_bytes() == (source / "same").read_bytes()
    assert len(refreshing(mounted)) == 1
    assert settled(mounted)["copies"]["done"] == 1
    for name in ("file", "large"):
        restored(source / name)
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes()
    assert sorted(os.listdir(mounted.path)) == ["file", "large", "same"]


@pytest.mark.fault("S5")
def test_a_directory_replaced_by_a_link_out_is_not_followed(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"d/file": SMALL, "d/other": LARGE})
    mounted = monarch.mount(source)
    outside = source.parent / "outside"
    (source / "d").rename(outside)
    (source / "d").symlink_to(outside)
    monarch.expects_log(GONE)
    for name in ("d/file", "d/other"):
        with pytest.raises(FileNotFoundError):
            (mounted.path / name).read_bytes()


@pytest.mark.fault("S5")
@pytest.mark.promise(14)
def test_the_other_name_of_a_file_outlives_the_first(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a": SMALL})
    os.link(source / "a", source / "b")
    mounted = monarch.mount(source)
    (source / "a").unlink()
    monarch.expects_log(CHANGED)
    assert (mounted.path / "b").read_bytes() == (source / "b").read_bytes()
    assert (mounted.path / "b").stat().st_nlink == 1


@pytest.mark.fault("S2")
@pytest.mark.promise(10)
def test_a_source_that_is_stale_as_a_whole_has_not_lost_its_files(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"d/small": SMALL, "d/large": LARGE})
    mounted = monarch.mount(slow.path)
    slow.rules(f"err * {errno.ESTALE} .*")
    monarch.expects_log("source: 'd/small': Stale file handle")
    for name in ("d/small", "d/large"):
        with pytest.raises(OSError) as caught:
            without_hanging((mounted.path / name).read_bytes)
        assert caught.value.errno == errno.ESTALE
        os.stat(mounted.path / name)
    assert sorted(os.listdir(mounted.path / "d")) == ["large", "small"]
    slow.rules()
    for name in ("d/small", "d/large"):
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.fault("S4", "S5")
@pytest.mark.promise(27)
def test_names_made_removed_and_replaced_meanwhile_are_seen_by_the_next_mount(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"d/gone": 10, "d/replaced": SMALL, "e/same": 10})
    mounted = monarch.mount(source)
    for name in ("d/gone", "d/replaced", "e/same"):
        (mounted.path / name).read_bytes()
    wait_for_copies(mounted, 3)
    mounted.umount()
    (source / "d/new").write_bytes(b"new")
    (source / "d/gone").unlink()
    replaced(source / "d/replaced")
    again = monarch.mount(source)
    assert sorted(os.listdir(again.path / "d")) == ["new", "replaced"]
    for name in ("d/new", "d/replaced"):
        assert (again.path / name).read_bytes() == (source / name).read_bytes()
    assert again.xattr("e/same") == "fast"
    assert account(again)["health"]["state"] == "ok"


@pytest.mark.promise(27)
def test_new_names_are_only_reported_where_the_snapshot_was_given(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"d/file": 10, "e/file": 10})
    snapshot = tmp_path / "shared.lmdb"
    monarch("snapshot", "build", str(source), "-o", str(snapshot))
    (source / "d/new").write_bytes(b"new")
    again = monarch.mount(source, snapshot=snapshot)
    monarch.expects_log(DIRECTORIES)
    wait_for_change(again)
    assert os.listdir(again.path / "d") == ["file"]
    assert refreshing(again)
    again.umount()
    refreshed = monarch.mount(source, snapshot=snapshot, arguments=["--refresh"])
    assert (refreshed.path / "d/new").read_bytes() == b"new"
    assert account(refreshed)["health"]["state"] == "ok"


@pytest.mark.fault("S5")
@pytest.mark.promise(133)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("change", [replaced, regrown_by_rename])
def test_a_name_of_a_file_never_has_the_bytes_of_what_took_its_other_name(
    monarch: MonarchCommand, tree: Tree, size: int, name: str, change: Callable[[Path], None]
) -> None:
    monarch.expects_log(CHANGED)
    if name == "a":
        monarch.expects_log("has lost one of its names to another file at the source")
    source = tree({"a": size})
    (source / "b").hardlink_to(source / "a")
    before, other = (source / "a").read_bytes(), "b" if name == "a" else "a"
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    os.stat(mounted.path / other)
    change(source / name)
    for _ in range(2):
        for each in (other, name, other):
            with suppress(OSError):
                read = (mounted.path / each).read_bytes()
                assert read == before or (each, read) == (name, (source / name).read_bytes())
    assert (mounted.path / other).read_bytes() == before
