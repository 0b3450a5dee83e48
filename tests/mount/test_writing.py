"""Files written through a mount: visible at once, safe after fsync, drained, never lost."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import (
    EITHER_SIDE,
    OPENS_ARE_REPORTED,
    MonarchCommand,
    Mounted,
    Tree,
    contents,
    let_others_in,
    names_in,
)
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import account, forget_pages, objects_in, open_objects, wait_until

pytestmark = pytest.mark.modes(*OPENS_ARE_REPORTED)

_MB = 1 << 20


def durable(path: Path) -> str:
    return os.getxattr(path, "user.monarch.durable").decode()


def write_safely(path: Path, content: bytes) -> None:
    """As a trainer saves: under another name, synced, renamed, the directory synced."""
    staged = path.with_name(path.name + ".tmp")
    with staged.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def drained(mounted: Mounted, *names: str) -> None:
    def there() -> bool:
        return all(durable(mounted.path / name) == "source" for name in names)

    wait_until(there, f"{names} are not drained")


@pytest.fixture
def absorbing(monarch: MonarchCommand, tree: Tree) -> Mounted:
    """A small dataset on a mount that accepts all writes."""
    return monarch.mount(
        tree({"a.bin": 1000, "d/b.bin": 5000}), tiers={"fast": "64MiB"}, options=["write=absorb"]
    )


@pytest.mark.promise(61)
@pytest.mark.modes(*EITHER_SIDE)
def test_by_default_a_mount_absorbs_nothing(monarch: MonarchCommand, tree: Tree) -> None:
    mounted = monarch.mount(tree({"a": 1}))
    with pytest.raises(OSError) as raised:
        (mounted.path / "new").write_bytes(b"x")
    assert raised.value.errno == errno.EROFS


@pytest.mark.finding("S9")
@pytest.mark.promise(171)
@pytest.mark.modes(*EITHER_SIDE)
def test_open_written_files_take_two_descriptors_of_as_many_as_are_allowed(
    monarch: MonarchCommand, tree: Tree
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        mounted = monarch.mount(tree({}), tiers={"fast": "16MiB"}, options=["write=absorb"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    descriptors = Path(f"/proc/{mounted.pid}/fd")
    before = len(os.listdir(descriptors))
    held = [os.open(mounted.path / f"{n}", os.O_RDWR | os.O_CREAT) for n in range(100)]
    # 32 objects are made ahead, and the drain has a few files open.
    assert len(os.listdir(descriptors)) - before <= 2 * len(held) + 64
    for fd in held:
        os.close(fd)
    wait_until(lambda: len(os.listdir(descriptors)) <= before + 64, "they keep descriptors")


@pytest.mark.promise(30)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_written_file_says_where_its_bytes_are(absorbing: Mounted) -> None:
    new, changed = absorbing.path / "new", absorbing.path / "a.bin"
    new.write_bytes(b"new")
    changed.write_bytes(b"changed")
    names = ["new", "a.bin"]
    for _ in range(2):
        for path in (absorbing.path / name for name in names):
            shown = [os.getxattr(path, f"user.monarch.{what}") for what in ("tier", "state")]
            assert shown == [b"fast", b"resident"]
            assert os.listxattr(path) == []
        drained(absorbing, *names)


@pytest.mark.promise(122)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_time_after_2262_that_a_program_sets_is_kept_as_that_moment(
    absorbing: Mounted, monarch: MonarchCommand
) -> None:
    at, last_ns = absorbing.path, (1 << 63) - 1
    (at / "made").mkdir()
    (at / "made/file").write_bytes(b"file")
    (at / "link").symlink_to("made")
    names = ["made", "made/file", "link", "a.bin", "d"]

    def shown() -> dict[str, int]:
        return {name: os.lstat(at / name).st_mtime_ns for name in names}

    for name in names:
        os.utime(at / name, ns=(last_ns + 1, last_ns + 10**18), follow_symlinks=False)
    # The times of some file systems end earlier.
    assert max(shown().values()) == shown()["made"] == shown()["link"] == last_ns
    absorbing.kill()
    monarch.mount(absorbing.source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert max(shown().values()) <= last_ns
    (at / "made/more").touch()
    assert names_in(at / "made") == ["file", "more"]


@pytest.mark.promise(61)
def test_only_what_the_patterns_name_can_be_changed(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"data/a": 10, "ckpt/old": 10})
    mounted = monarch.mount(source, options=["absorb=ckpt/**", "absorb=runs/*/logs"])
    at = mounted.path
    (at / "ckpt/new").write_bytes(b"new")
    (at / "runs/1/logs").mkdir(parents=True)
    (at / "runs/1/logs/out").write_bytes(b"log")
    for attempt in (
        lambda: (at / "data/new").write_bytes(b"x"),
        lambda: (at / "data/a").write_bytes(b"x"),
        lambda: (at / "data/a").unlink(),
        lambda: (at / "data/a").chmod(0o600),
        lambda: (at / "runs/1/out").write_bytes(b"x"),
        lambda: os.truncate(at / "data/a", 0),
        lambda: os.utime(at / "data/a"),
    ):
        with pytest.raises(OSError) as raised:
            attempt()
        assert raised.value.errno == errno.EROFS
    for one, other in (("data/a", "ckpt/a"), ("ckpt/new", "data/new")):
        with pytest.raises(OSError) as raised:
            (at / one).rename(at / other)
        assert raised.value.errno == errno.EXDEV
    assert (at / "data/a").read_bytes() == contents("data/a", 10)
    drained(mounted, "ckpt/new", "runs/1/logs/out")
    assert (source / "ckpt/new").read_bytes() == b"new"
    assert (source / "runs/1/logs/out").read_bytes() == b"log"


@pytest.mark.finding("W24")
@pytest.mark.modes("relay", "passthrough")
@pytest.mark.parametrize("directory", ["made", "d", ""])
@pytest.mark.parametrize("handler", ["lookup", "getattr"])
def test_of_a_name_that_is_made_only_the_making_is_pythons(
    monarch: MonarchCommand,
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    directory: str,
    handler: str,
) -> None:
    """The kernel also looks for the name, and asks for the attributes of the directory."""
    monkeypatch.setenv("MONARCH_POINT", f"handler-{handler}:50:raise")
    source = tree({"a.bin": 1000, "d/b.bin": 5000})
    mounted = monarch.mount(source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    at = mounted.path / directory
    at.mkdir(exist_ok=True)
    for n in range(100):
        (at / f"new-{n}").write_bytes(b"%d" % n)
    for n in range(100):
        (at / f"new-{n}").rename(at / f"now-{n}")
        assert not (at / f"new-{n}").exists()
    for n in range(100):
        (at / f"new-{n}").write_bytes(b"again")
        if n % 10:
            (at / f"now-{n}").unlink()
    for n in range(0, 100, 10):
        assert (at / f"now-{n}").read_bytes() == b"%d" % n


@pytest.mark.promise(62)
def test_written_bytes_are_seen_at_once_and_reach_the_source(absorbing: Mounted) -> None:
    at, source = absorbing.path, absorbing.source
    (at / "ckpt").mkdir()
    content = contents("big", 3 * _MB + 17)
    (at / "ckpt/step-1.pt").write_bytes(content)
    assert (at / "ckpt/step-1.pt").read_bytes() == content
    assert (at / "ckpt/step-1.pt").stat().st_size == len(content)
    assert sorted(os.listdir(at)) == ["a.bin", "ckpt", "d"]
    (at / "ckpt/step-1.pt").chmod(0o640)
    os.symlink("step-1.pt", at / "ckpt/latest")
    drained(absorbing, "ckpt/step-1.pt")
    wait_until(lambda: (source / "ckpt/latest").is_symlink(), "the link is not drained")
    assert (source / "ckpt/step-1.pt").read_bytes() == content
    assert (source / "ckpt/step-1.pt").stat().st_mode & 0o7777 == 0o640
    assert os.readlink(source / "ckpt/latest") == "step-1.pt"
    there, here = (source / "ckpt/step-1.pt").stat(), (at / "ckpt/step-1.pt").stat()
    assert there.st_mtime_ns == here.st_mtime_ns
    absorbing.umount()
    assert sorted(os.listdir(source / "ckpt")) == ["latest", "step-1.pt"]


@pytest.mark.promise(62)
def test_a_file_of_the_source_can_be_written_renamed_and_removed(absorbing: Mounted) -> None:
    at, source = absorbing.path, absorbing.source
    with (at / "a.bin").open("r+b") as file:
        file.seek(500)
        file.write(b"in the middle")
    expected = bytearray(contents("a.bin", 1000))
    expected[500:513] = b"in the middle"
    assert (at / "a.bin").read_bytes() == expected
    (at / "d/b.bin").rename(at / "c.bin")
    assert (at / "c.bin").read_bytes() == contents("d/b.bin", 5000)
    (at / "d").rmdir()
    drained(absorbing, "a.bin", "c.bin")
    absorbing.umount()
    assert names_in(source) == ["a.bin", "c.bin"]
    assert (source / "a.bin").read_bytes() == expected
    assert (source / "c.bin").read_bytes() == contents("d/b.bin", 5000)


@pytest.mark.promise(64)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_file_says_how_durable_it_is(absorbing: Mounted) -> None:
    path = absorbing.path / "f"
    with path.open("wb") as file:
        file.write(b"x" * 100)
        file.flush()
        assert durable(path) == "none"
        os.fsync(file.fileno())
        assert durable(path) in ("local", "source")
    drained(absorbing, "f")


@pytest.mark.finding("W6")
@pytest.mark.promise(151)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_synchronous_write_is_safe_when_it_returns(absorbing: Mounted) -> None:
    for flag in (os.O_DSYNC, os.O_SYNC):
        for mode in (os.O_WRONLY, os.O_RDWR):
            path = absorbing.path / f"{flag}-{mode}"
            fd = os.open(path, mode | os.O_CREAT | flag)
            for number in range(2):
                os.write(fd, b"%d" % number)
                assert durable(path) in ("local", "source")
            os.close(fd)
    for mode in (os.O_WRONLY, os.O_RDWR):
        path = absorbing.path / f"one-{mode}"
        fd = os.open(path, mode | os.O_CREAT)
        os.pwritev(fd, [b"not"], 0)
        assert durable(path) == "none"
        os.pwritev(fd, [b"safe"], 0, os.RWF_DSYNC)
        assert durable(path) in ("local", "source")
        os.close(fd)


@pytest.mark.promise(63)
@pytest.mark.modes(*EITHER_SIDE)
def test_fsync_waits_for_the_source_if_it_shall(monarch: MonarchCommand, tree: Tree) -> None:
    mounted = monarch.mount(tree({"a": 1}), options=["write=absorb", "writeback.fsync=source"])
    with (mounted.path / "f").open("wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        os.fsync(file.fileno())
        assert (mounted.source / "f").read_bytes() == b"x" * 100_000
        assert durable(mounted.path / "f") == "source"


@pytest.mark.finding("W12")
@pytest.mark.promise(63, 153)
@pytest.mark.modes(*EITHER_SIDE)
def test_fsync_waits_for_names_at_the_source_if_it_shall(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a": 1, "d/b": 10})
    mounted = monarch.mount(source, options=["write=absorb", "writeback.fsync=source"])
    write_safely(mounted.path / "new", b"new")
    assert (source / "new").read_bytes() == b"new"
    # By the file, and by its directory.
    fd = os.open(mounted.path / "d/b", os.O_WRONLY)
    os.write(fd, b"more")
    os.fsync(fd)
    for _ in range(30):
        # Each is a turn of the drain's.
        (mounted.path / "d/b").rename(mounted.path / "d/c")
        (mounted.path / "d/c").rename(mounted.path / "d/b")
    (mounted.path / "d/b").rename(mounted.path / "d/c")
    os.fsync(fd)
    os.close(fd)
    assert os.listdir(source / "d") == ["c"]
    (mounted.path / "made").mkdir()
    (mounted.path / "d/c").unlink()
    fd = os.open(mounted.path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert (source / "made").is_dir() and not os.listdir(source / "d")


@pytest.mark.promise(153)
@pytest.mark.modes("relay")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_fsync_waits_for_no_change_that_the_source_refuses_another(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("the source refuses")
    source = tree({"a": 1})
    source.chmod(0o777)
    mounted = monarch.mount(
        source, options=["write=absorb", "writeback.fsync=source", "allow_other=true"]
    )
    (source / "theirs").write_bytes(b"")
    let_others_in(source)
    mkdir = ["mkdir", str(mounted.path / "theirs")]
    subprocess.run(mkdir, check=True, user=1002, group=1002, extra_groups=[])
    write_safely(mounted.path / "ours", b"ours")
    assert (source / "ours").read_bytes() == b"ours"
    (source / "theirs").unlink()


@pytest.mark.promise(153)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
@pytest.mark.modes(*EITHER_SIDE)
def test_closing_a_file_does_not_wait_for_a_source_that_refuses_it(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("the source refuses")
    source = tree({"d/a": 1})
    let_others_in(source)
    (source / "d").chmod(0o777)
    mounted = monarch.mount(
        source, options=["write=absorb", "writeback.fsync=source", "allow_other=true"]
    )
    script = 'exec 3>"$1"; echo begun; read go; echo bytes >&3; exec 3>&-; echo closed'
    with subprocess.Popen(
        ["sh", "-c", script, "sh", str(mounted.path / "d/new")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=1002,
        group=1002,
        extra_groups=[],
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"begun\n"
        (source / "d").chmod(0o755)
        out, _ = writer.communicate(b"go\n", timeout=100)
        assert out == b"closed\n"
    wait_until(
        lambda: "d/new" in mounted.status()["writing"]["trouble"], "the source does not refuse it"
    )
    (source / "d").chmod(0o777)
    wait_until(lambda: (source / "d/new").exists(), "the source does not get it", timeout_s=90)


@pytest.mark.promise(67)
def test_a_killed_daemon_has_lost_nothing(monarch: MonarchCommand, absorbing: Mounted) -> None:
    at = absorbing.path
    (at / "ckpt").mkdir()
    for step in range(5):
        write_safely(at / f"ckpt/{step}.pt", contents(str(step), 200_000))
    (at / "closed").write_bytes(b"closed, not synced")
    absorbing.kill()
    again = monarch.mount(absorbing.source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    for step in range(5):
        assert (again.path / f"ckpt/{step}.pt").read_bytes() == contents(str(step), 200_000)
    assert (again.path / "closed").read_bytes() == b"closed, not synced"
    drained(again, *(f"ckpt/{step}.pt" for step in range(5)), "closed")
    again.umount()
    names = sorted(os.listdir(absorbing.source / "ckpt"))
    assert names == [f"{step}.pt" for step in range(5)]
    for step in range(5):
        there = (absorbing.source / f"ckpt/{step}.pt").read_bytes()
        assert there == contents(str(step), 200_000)


@pytest.mark.promise(67, 79)
def test_times_that_were_set_make_nothing_new_of_a_drained_file(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    at, source = absorbing.path, absorbing.source
    for name in ("edited", "replaced", "linked", "rewritten"):
        (at / name).write_bytes(b"as written")
        os.utime(at / name, (1_000_000_000, 1_000_000_000))
    os.link(at / "linked", at / "again")
    drained(absorbing, "edited", "replaced", "again", "rewritten")
    # Only the file shows these bytes: its times are as before.
    with (at / "rewritten").open("r+b", buffering=0) as unfinished:
        unfinished.write(b"AS WRITTEN")
        os.utime(at / "rewritten", (1_000_000_000, 1_000_000_000))
        absorbing.kill()
        with suppress(OSError):
            unfinished.close()
    before = (source / "linked").stat().st_ino
    with (source / "edited").open("ab") as file:
        file.write(b", and more")
    (source / "new").write_bytes(b"of others")
    (source / "new").rename(source / "replaced")
    # It is the snapshot of that file for which all others are as they were.
    again = monarch.mount(source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert (again.path / "rewritten").read_bytes() == b"AS WRITTEN"
    again.umount()
    again = monarch.mount(source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert (again.path / "edited").read_bytes() == b"as written, and more"
    assert (again.path / "replaced").read_bytes() == b"of others"
    assert (again.path / "rewritten").read_bytes() == b"AS WRITTEN"
    assert (again.path / "linked").stat().st_nlink == 2
    # A file that was open when the daemon was killed is brought again, with all its names.
    again.umount()
    assert not list(source.glob("*conflict*"))
    assert (source / "rewritten").read_bytes() == b"AS WRITTEN"
    assert {(source / name).stat().st_ino for name in ("linked", "again")} == {before}


@pytest.mark.promise(79, 116)
@pytest.mark.modes(*EITHER_SIDE)
def test_inodes_numbered_otherwise_by_another_snapshot_are_not_mixed_up(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({f"d{number}/x": 1 for number in range(6)})
    mounted = monarch.mount(source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    numbers = set()
    for directory in mounted.path.iterdir():
        numbers.add(directory.stat().st_ino)
        directory.chmod(0o750)
    mounted.umount()
    shutil.rmtree(source / "d0")
    again = monarch.mount(source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    directories = list(again.path.iterdir())
    assert any(path.stat().st_ino in numbers for path in directories)
    for directory in directories:
        directory.chmod(0o700)
    again.umount()
    assert {(source / name).stat().st_mode & 0o777 for name in names_in(source)} == {0o700}


@pytest.mark.promise(67)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_file_that_others_removed_while_it_was_written_is_made_again(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    monarch.expects_log("others")
    monarch.expects_log("changed at the source since the snapshot")
    with (absorbing.path / "a.bin").open("r+b", buffering=0) as file:
        file.write(b"written")
        absorbing.kill()
        with suppress(OSError):
            file.close()
    (absorbing.source / "a.bin").unlink()
    again = monarch.mount(absorbing.source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert (again.path / "a.bin").read_bytes()[:7] == b"written"
    again.umount()
    assert (absorbing.source / "a.bin").read_bytes()[:7] == b"written"


@pytest.mark.promise(67)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_file_removed_before_it_was_drained_does_not_hinder_the_next_mount(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    """The source has not changed, so the next mount goes by the same snapshot and the journal."""
    names = [f"passing{number}" for number in range(5)]
    for name in names:
        (absorbing.path / name).write_bytes(b"for a moment")
        (absorbing.path / name).unlink()
    absorbing.umount()
    again = monarch.mount(absorbing.source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert not set(names) & set(os.listdir(again.path))
    (again.path / names[0]).write_bytes(b"to stay")
    again.umount()
    assert (absorbing.source / names[0]).read_bytes() == b"to stay"
    assert not set(names[1:]) & set(os.listdir(absorbing.source))


@pytest.mark.promise(67)
@pytest.mark.modes(*EITHER_SIDE)
def test_bytes_that_no_name_leads_to_are_gone_with_the_mount_after_a_kill(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    for name in ("one", "other"):
        (absorbing.path / name).write_bytes(bytes(60_000))
    (absorbing.path / "one").unlink()
    absorbing.kill()
    again = monarch.mount(absorbing.source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    again.umount()
    assert (absorbing.source / "other").read_bytes() == bytes(60_000)
    assert not (absorbing.source / "one").exists()
    objects = list(again.tiers["fast"].glob("monarch/absorbed-*/??/*"))
    assert len(objects) == 1, objects


@pytest.mark.promise(67)
def test_a_file_that_is_copied_up_again_keeps_its_names(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    at, source = absorbing.path, absorbing.source
    (at / "b").write_bytes(b"first")
    os.link(at / "b", at / "a")
    os.link(at / "b", at / "d/c")
    drained(absorbing, "a", "b", "d/c")
    with (at / "a").open("ab", buffering=0) as file:
        file.write(b", second")
        absorbing.kill()
        with suppress(OSError):
            file.close()
    again = monarch.mount(source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert (again.path / "d/c").read_bytes() == b"first, second"
    again.umount()
    there = [(source / name).stat() for name in ("a", "b", "d/c")]
    assert len({status.st_ino for status in there}) == 1 and there[0].st_nlink == 3
    assert (source / "b").read_bytes() == b"first, second"


@pytest.mark.promise(67)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_file_open_when_the_daemon_was_killed_has_the_bytes_that_were_written(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    at = absorbing.path
    (at / "logs").mkdir()
    fresh = (at / "logs/fresh").open("wb", buffering=0)
    fresh.write(b"never closed")
    known = (at / "logs/known").open("wb", buffering=0)
    known.write(b"recorded, ")
    os.fsync(known.fileno())
    # The next mount finds directories that changed, and makes a new snapshot.
    (at / "logs/other").write_bytes(b"other")
    drained(absorbing, "logs/other", "logs/known")
    known.write(b"and not")
    absorbing.kill()
    for file in (fresh, known):
        with suppress(OSError):
            file.close()
    again = monarch.mount(absorbing.source, tiers={"fast": "64MiB"}, options=["write=absorb"])
    assert (again.path / "logs/known").stat().st_size == len(b"recorded, and not")
    # No process opens them, which would record them as well.
    again.umount()
    assert (absorbing.source / "logs/fresh").read_bytes() == b"never closed"
    assert (absorbing.source / "logs/known").read_bytes() == b"recorded, and not"


@pytest.mark.promise(62)
@pytest.mark.modes(*EITHER_SIDE)
def test_files_made_and_removed_before_they_were_drained_leave_nothing(absorbing: Mounted) -> None:
    at = absorbing.path
    for number in range(20):
        (at / f"tmp{number}").write_bytes(b"x" * 1000)
        (at / f"tmp{number}").unlink()
    with (at / "open").open("w+b") as file:
        file.write(b"still there")
        (at / "open").unlink()
        file.flush()
        file.seek(0)
        assert file.read() == b"still there"
        assert os.fstat(file.fileno()).st_nlink == 0
    absorbing.umount()
    assert names_in(absorbing.source) == ["a.bin", "d"]
    assert objects_in(absorbing.tiers["fast"]) == []


@pytest.mark.promise(62)
def test_mapped_and_read_bytes_are_the_same(absorbing: Mounted) -> None:
    path = absorbing.path / "mapped"
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fd, 1 << 20)\n"
        "m = mmap.mmap(fd, 1 << 20)\n"
        "m[1000:1005] = b'hello'\n"
        "m.flush()\n"
        "assert os.pread(fd, 5, 1000) == b'hello'\n"
        "os.pwrite(fd, b'world', 5000)\n"
        "assert m[5000:5005] == b'world'\n"
        "m[70000:70003] = b'end'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    found = path.read_bytes()
    assert (found[1000:1005], found[5000:5005], found[70000:70003]) == (b"hello", b"world", b"end")
    drained(absorbing, "mapped")
    assert (absorbing.source / "mapped").read_bytes() == found


@pytest.mark.promise(69)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_signal_ends_the_mount_after_it_has_drained(absorbing: Mounted) -> None:
    content = contents("x", 2 * _MB)
    (absorbing.path / "x").write_bytes(content)
    os.kill(absorbing.pid, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{absorbing.pid}").exists(), "the daemon has not ended")
    assert (absorbing.source / "x").read_bytes() == content


@pytest.mark.promise(65)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_file_comes_to_the_source_with_all_that_it_is(absorbing: Mounted) -> None:
    at, source = absorbing.path, absorbing.source
    (at / "k").mkdir(mode=0o750)
    (at / "k/f").write_bytes(b"bytes")
    (at / "k/f").chmod(0o4711)
    os.chown(at / "k/f", 1234, 4321)
    os.setxattr(at / "k/f", "user.note", b"a note")
    os.utime(at / "k/f", ns=(1_000_000_000, 2_000_000_123))
    os.link(at / "k/f", at / "k/g")
    os.mkfifo(at / "k/fifo", 0o622)
    absorbing.umount()
    found = (source / "k/f").stat()
    assert (source / "k").stat().st_mode & 0o7777 == 0o750
    assert (found.st_uid, found.st_gid, found.st_nlink) == (1234, 4321, 2)
    # Giving it away takes the right from it, as everywhere.
    assert found.st_mode & 0o7777 == 0o711
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_000_000_000, 2_000_000_123)
    assert os.getxattr(source / "k/f", "user.note") == b"a note"
    assert (source / "k/g").stat().st_ino == found.st_ino
    assert (source / "k/fifo").is_fifo()


@pytest.mark.promise(74)
def test_a_file_that_is_read_from_a_copy_is_not_written_under_its_readers(
    absorbing: Mounted,
) -> None:
    at = absorbing.path
    (at / "a.bin").read_bytes()
    wait_until(lambda: absorbing.xattr("a.bin") == "fast", "there is a copy")
    with (at / "a.bin").open("rb", buffering=0) as reader:
        reader.read(1)
        if absorbing.cli.mode == "relay":
            # A reader sees the written bytes, as on a disk.
            with (at / "a.bin").open("r+b") as writer:
                writer.write(b"NEW")
            reader.seek(0)
            assert reader.read(3) == b"NEW"
        else:
            for change in (
                lambda: (at / "a.bin").open("r+b"),
                lambda: os.truncate(at / "a.bin", 1),
            ):
                with pytest.raises(OSError) as raised:
                    change()
                assert raised.value.errno == errno.ETXTBSY
    with (at / "a.bin").open("r+b") as writer:
        writer.write(b"new")
    assert (at / "a.bin").read_bytes() == b"new" + contents("a.bin", 1000)[3:]
    with pytest.raises(OSError) as raised:
        (at / "d").rename(at / "e")
    assert raised.value.errno == errno.EXDEV
    subprocess.run(["mv", at / "d", at / "e"], check=True)
    assert (at / "e/b.bin").read_bytes() == contents("d/b.bin", 5000)


@pytest.mark.promise(74)
@pytest.mark.parametrize("place", ["source", "copy", "drained"])
def test_a_writer_waits_while_the_last_reader_closes_the_file(
    monarch: MonarchCommand, tree: Tree, place: str
) -> None:
    """The kernel sends the release of a reader after its close: the open to write may be first."""
    content = contents("f", 100_000)
    source = tree({"f": len(content)} if place != "drained" else {})
    options = ["write=absorb", "writeback.reserve=0", "limits.inline_max=64KiB"]
    mounted = monarch.mount(source, options=options)
    path = mounted.path / "f"
    if place == "drained":
        path.write_bytes(content)
        drained(mounted, "f")
        wait_until(lambda: not objects_in(mounted.tiers["fast"]), "it is kept")
    elif place == "copy":
        path.read_bytes()
        wait_until(lambda: mounted.xattr("f") == "fast", "there is a copy")
    with ThreadPoolExecutor(1) as threads:
        # A machine that is very slow may miss the second in which a writer waits.
        for _ in range(50):
            with path.open("rb", buffering=0) as reader:
                reader.read(1)
                opens = threads.submit(path.open, "r+b", buffering=0)
                wait_until(
                    lambda opens=opens: opens.done() or account(mounted)["requests"]["waiting"] > 0,
                    "the writer opens it",
                )
            if not opens.exception():
                break
    with opens.result() as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new" + content[3:]


@pytest.mark.promise(26, 74)
@pytest.mark.parametrize("change", ["rename", "link"])
def test_a_file_that_is_read_from_a_copy_is_opened_again_to_read_after_a_change_by_path(
    monarch: MonarchCommand, tree: Tree, change: str
) -> None:
    # With ``verify: open`` no copy is opened without the daemon.
    mounted = monarch.mount(tree({"f": 300_000}), options=["write=absorb", "verify=open"])
    path, content = mounted.path / "f", contents("f", 300_000)
    path.read_bytes()
    wait_until(lambda: mounted.xattr("f") == "fast", "there is a copy")
    with path.open("rb", buffering=0) as reader:
        assert reader.read(1) == content[:1]
        if change == "rename":
            path = path.rename(mounted.path / "g")
        else:
            os.link(path, mounted.path / "g")
        for _ in range(2):
            with path.open("rb") as second:
                assert second.read() == content
        assert reader.read() == content[1:]
        os.fsync(reader.fileno())
    # The kernel sends a release after the close, and until then a process reads the file.
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the releases arrived")
    with path.open("r+b", buffering=0) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"new" + content[3:]
    mounted.umount()
    assert (mounted.source / path.name).read_bytes() == b"new" + content[3:]


@pytest.mark.promise(67, 74)
def test_a_file_that_is_opened_to_read_while_it_is_opened_to_write_gets_all_that_is_written(
    slow: SlowSource, source: Path, monarch: MonarchCommand
) -> None:
    content = contents("f", 300_000)
    (source / "f").write_bytes(content)
    mounted = monarch.mount(slow.path, options=["write=absorb"])
    path = mounted.path / "f"
    path.read_bytes()
    wait_until(lambda: mounted.xattr("f") == "fast", "there is a copy")
    slow.rules("hang open /f$")
    with ThreadPoolExecutor(2) as threads:
        opens_to_write = threads.submit(path.open, "r+b", buffering=0)
        wait_until(lambda: slow.counters()["hanging"] == 1, "the file is being copied")
        opens_to_read = threads.submit(path.open, "rb", buffering=0)
        wait_until(
            lambda: opens_to_read.done() or account(mounted)["requests"]["waiting"] >= 2,
            "the second process opens it",
        )
        slow.rules()
        with opens_to_write.result() as writer:
            with opens_to_read.result() as reader:
                assert reader.read(10) == content[:10]
            for _ in range(30):
                # The release of the reader arrives between two of these writes.
                writer.write(b"new")
                time.sleep(0.01)
    mounted.umount()
    assert (source / "f").read_bytes() == b"new" * 30 + content[90:]


@pytest.mark.promise(74)
def test_a_reader_of_a_file_whose_mode_was_changed_does_not_end_the_writing_of_it(
    absorbing: Mounted,
) -> None:
    path = absorbing.path / "a.bin"
    writer = None
    with path.open("rb", buffering=0) as reader:
        reader.read(1)
        path.chmod(0o600)
        # ETXTBSY where the reader would not see what is written.
        with contextlib.suppress(OSError):
            writer = path.open("r+b", buffering=0)
    with writer or path.open("r+b", buffering=0) as file:
        for _ in range(30):
            # The release of the reader arrives between two of these writes.
            file.write(b"new")
            time.sleep(0.01)
    assert path.read_bytes()[:90] == b"new" * 30


def _changes_by_path(at: Path) -> dict[str, Callable[[], object]]:
    """Changes of drained files by their paths, by the names of the files."""
    return {
        "chmod": lambda: (at / "chmod").chmod(0o600),
        "utime": lambda: os.utime(at / "utime", ns=(1_000_000_000, 2_000_000_123)),
        "setxattr": lambda: os.setxattr(at / "setxattr", "user.note", b"a note"),
        "truncate": lambda: os.truncate(at / "truncate", 100_000),
        "link": lambda: os.link(at / "link", at / "linked"),
        "rename": lambda: (at / "rename").rename(at / "renamed"),
    }


@pytest.mark.promise(74)
def test_a_reader_of_a_released_file_reads_on_when_the_file_is_changed_by_its_path(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({}), options=["write=absorb", "writeback.reserve=0"])
    changes, size = _changes_by_path(mounted.path), {"truncate": 100_000}
    for name in changes:
        (mounted.path / name).write_bytes(contents(name, 300_000))
    drained(mounted, *changes)
    wait_until(lambda: not objects_in(mounted.tiers["fast"]), "they are kept")
    for name, change in changes.items():
        expected = contents(name, 300_000)[: size.get(name)]
        with (mounted.path / name).open("rb") as second:
            with (mounted.path / name).open("rb", buffering=0) as reader:
                assert reader.read(1) == expected[:1]
                change()
                forget_pages(reader.fileno())
                assert reader.read() == expected[1:], name
            forget_pages(second.fileno())
            assert second.read() == expected, name
    # Nothing that would end their bytes at the source, or their descriptors, is left.
    wait_until(lambda: not objects_in(mounted.tiers["fast"]), "they are kept again")
    wait_until(lambda: not _kept_descriptors(mounted), "descriptors are kept")
    wait_until(lambda: not any(account(mounted)["handles"].values()), "handles are kept")
    assert account(mounted)["health"]["problems"] == []
    mounted.umount()
    there = {name: (mounted.source / name).read_bytes() for name in names_in(mounted.source)}
    shown = {name: contents(name, 300_000)[: size.get(name)] for name in changes}
    shown |= {"linked": shown["link"], "renamed": shown.pop("rename")}
    assert there == shown
    assert (mounted.source / "chmod").stat().st_mode & 0o777 == 0o600
    assert (mounted.source / "utime").stat().st_mtime_ns == 2_000_000_123
    assert os.getxattr(mounted.source / "setxattr", "user.note") == b"a note"


@pytest.mark.promise(74)
def test_a_released_file_can_be_written_under_its_readers_once_its_mode_was_changed(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({}), options=["write=absorb", "writeback.reserve=0"])
    path, content = mounted.path / "f", contents("f", 300_000)
    path.write_bytes(content)
    drained(mounted, "f")
    wait_until(lambda: not objects_in(mounted.tiers["fast"]), "it is kept")
    with path.open("rb", buffering=0) as reader:
        assert reader.read() == content
        with pytest.raises(OSError) as raised:
            path.open("r+b")
        assert raised.value.errno == errno.ETXTBSY
        path.chmod(0o600)
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"new")
            assert os.pread(reader.fileno(), 300_000, 0) == b"new" + content[3:]
        forget_pages(reader.fileno())
        assert os.pread(reader.fileno(), 300_000, 0) == b"new" + content[3:]
    drained(mounted, "f")
    assert (mounted.source / "f").read_bytes() == b"new" + content[3:]
    assert account(mounted)["health"]["problems"] == []


def _kept_descriptors(mounted: Mounted) -> list[str]:
    """Descriptors of the daemon of files at the source, and of objects that were removed."""
    held = []
    for fd in Path(f"/proc/{mounted.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.append(os.readlink(fd))
    assert any("/absorbed-" in path for path in held), "the journal"
    removed = [path for path in held if "/absorbed-" in path and path.endswith(" (deleted)")]
    return removed + [path for path in held if path.startswith(f"{mounted.source}/")]


@pytest.mark.promise(52)
@pytest.mark.parametrize("size", [0, 1000])
def test_a_file_whose_copy_is_under_way_can_be_written_and_removed(
    monarch: MonarchCommand, tree: Tree, size: int
) -> None:
    names = [f"f{number}" for number in range(100)]
    mounted = monarch.mount(
        tree(dict.fromkeys(names, size)), tiers={"fast": "64MiB"}, options=["write=absorb"]
    )
    for name in names:
        path = mounted.path / name
        with path.open("rb", buffering=0) as file:
            file.read(10)
        with path.open("ab") as file:
            file.write(b"y" * 100_000)
        path.unlink()
    assert os.listdir(mounted.path) == []
    monarch("ckpt", "wait", str(mounted.path))
    assert monarch("fsck", str(mounted.path)).returncode == 0
    assert mounted.status()["tiers"][0]["files"] == 0


@pytest.mark.promise(75)
@pytest.mark.modes(*EITHER_SIDE)
def test_absorbed_files_are_closed_to_other_users(absorbing: Mounted) -> None:
    (absorbing.path / "open to all").write_bytes(b"x")
    (absorbing.path / "open to all").chmod(0o777)
    drained(absorbing, "open to all")
    kept = list(absorbing.tiers["fast"].rglob("absorbed-*/**/*"))
    assert kept
    for path in kept:
        # The daemon may remove an object meanwhile.
        with suppress(FileNotFoundError):
            assert path.stat().st_mode & 0o077 == 0, path
    for path in absorbing.tiers["fast"].glob("monarch"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.promise(76)
@pytest.mark.modes(*EITHER_SIDE)
def test_temporary_names_are_not_shown_and_cannot_be_made(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a": 1, ".monarch-0123456789abcdef-7.part": 10})
    mounted = monarch.mount(source, options=["write=absorb"])
    assert os.listdir(mounted.path) == ["a"]
    with pytest.raises(OSError) as raised:
        (mounted.path / ".monarch-0123456789abcdef-8.part").write_bytes(b"x")
    assert raised.value.errno == errno.EPERM


def refused(call: Callable[[], object]) -> int:
    """The errno of a call, 0 if it is made."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.finding("D15")
@pytest.mark.promise(82)
@pytest.mark.fault("U5")
@pytest.mark.modes(*EITHER_SIDE)
def test_names_end_where_the_memory_for_them_does(monarch: MonarchCommand, tree: Tree) -> None:
    most = 24
    source = tree({"a": 10, "b": 10, "c": 10, "d/e": 10, "d/f": 10})
    options = ["write=absorb", f"writeback.names_max={most}"]
    mounted = monarch.mount(source, options=options)
    at = mounted.path
    free = os.statvfs(at).f_ffree
    assert most - 2 <= free <= most and os.statvfs(at).f_favail == free
    used = os.statvfs(at).f_files - free

    # What is removed gives its place back, of every kind, while it lasts and at the end of it.
    for number in range(3 * most):
        (at / f"dir{number}").mkdir()
        (at / f"file{number}").write_bytes(b"x")
        (at / f"link{number}").symlink_to("y" * 2000)
        os.setxattr(at / f"file{number}", "user.large", b"v" * 30000)
        (at / f"dir{number}").rmdir()
        (at / f"file{number}").unlink()
        (at / f"link{number}").unlink()

    kinds: tuple[Callable[[Path], object], ...] = (
        lambda path: path.write_bytes(b"new"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("target"),
        lambda path: os.mkfifo(path),
    )
    made: list[Path] = []
    while len(made) <= most:
        path = at / f"new{len(made)}"
        if number := refused(lambda path=path: kinds[len(made) % 4](path)):  # type: ignore[misc]
            assert number == errno.ENOSPC
            break
        made.append(path)
    assert most - 5 <= len(made) <= most
    assert os.statvfs(at).f_ffree == 0 and os.statvfs(at).f_files - used >= most - 1
    # Every call that takes memory is refused, for new files and for unchanged ones.
    for call in (
        lambda: (at / "one").write_bytes(b"x"),
        lambda: os.mknod(at / "one", 0o600),
        lambda: (at / "one").mkdir(),
        lambda: (at / "one").symlink_to("x"),
        lambda: os.mkfifo(at / "one"),
        lambda: os.link(made[0], at / "one"),
        lambda: os.link(at / "a", at / "one"),
        lambda: (at / "a").rename(at / "one"),
        lambda: (at / "a").chmod(0o600),
        lambda: (at / "d").chmod(0o700),
        lambda: (at / "a").write_bytes(b"x"),
        lambda: os.truncate(at / "a", 0),
        lambda: os.setxattr(made[0], "user.x", b"v" * 4000),
        lambda: os.setxattr(at / "a", "user.x", b"v"),
    ):
        assert refused(call) == errno.ENOSPC
    assert (at / "a").read_bytes() == contents("a", 10)
    status = mounted.status()
    assert status["health"]["state"] == "failing"
    [problem] = status["health"]["problems"]
    assert problem["kind"] == "written-names" and f"of {most}" in problem["what"]
    assert status["writing"]["names"] >= most - 1 and status["writing"]["names_max"] == most
    # Existing files can be used and removed.
    made[0].write_bytes(b"other")
    made[0].chmod(0o640)
    made[0].rename(at / "newer")
    made[0] = at / "newer"
    (at / "c").unlink()
    made.pop(3).unlink()
    made.pop(2).unlink()
    made.pop(1).rmdir()
    (at / "one").write_bytes(b"one")
    assert mounted.status()["health"]["state"] == "ok"

    # The next mount has in its snapshot what was drained.
    names = sorted(os.listdir(at))
    mounted.umount()
    mounted = monarch.mount(source, options=options)
    assert sorted(os.listdir(at)) == names
    assert os.statvfs(at).f_ffree >= most - 2
    (at / "after").write_bytes(b"x")


@pytest.mark.promise(131)
@pytest.mark.modes("relay")
def test_many_files_that_are_drained_leave_memory_and_are_as_they_were(
    monarch: MonarchCommand, tree: Tree
) -> None:
    # More than stay in memory, which are 8,192 without this limit: a minute's writing.
    count, monarch.kept = 1200, 512
    mounted = monarch.mount(tree({"a": 1}), options=["write=absorb", "writeback.reserve=0"])
    folder = mounted.path / "d"
    folder.mkdir()
    kept = (folder / "kept").open("wb+", buffering=0)
    kept.write(b"before")
    for number in range(count):
        (folder / f"{number}").write_bytes(b"%d" % number)
    inos = {name: (folder / name).stat().st_ino for name in ("0", "1", "2", "3")}

    def are_away() -> bool:
        written = mounted.status()["writing"]
        return not written["files"] and written["names"] < 512 + 512 // 8

    wait_until(are_away, "they stay in memory", timeout_s=300)
    wait_until(lambda: len(objects_in(mounted.tiers["fast"])) <= 1, "their bytes are kept")
    assert set(os.listdir(folder)) == {"kept", *map(str, range(count))}
    for number in range(0, count, 19):
        assert (folder / f"{number}").read_bytes() == b"%d" % number
    assert {name: (folder / name).stat().st_ino for name in inos} == inos
    kept.write(b" and after")
    assert os.pread(kept.fileno(), 100, 0) == b"before and after"
    kept.close()
    (folder / "0").rename(folder / "1")
    (folder / "2").unlink()
    os.link(folder / "3", folder / "linked")
    with (folder / "4").open("ab") as file:
        file.write(b" more")
    assert (folder / "1").stat().st_ino == inos["0"]
    assert (folder / "linked").stat().st_ino == inos["3"]
    drained(mounted, "d/1", "d/linked", "d/4", "d/kept")
    wait_until(lambda: not mounted.status()["writing"]["operations"], "not all is drained")
    mounted.umount()
    there = mounted.source / "d"
    assert len(os.listdir(there)) == count
    assert (there / "1").read_bytes() == b"0" and (there / "4").read_bytes() == b"4 more"
    assert (there / "linked").stat().st_ino == (there / "3").stat().st_ino
    assert (there / "kept").read_bytes() == b"before and after"


@pytest.mark.finding("W16")
@pytest.mark.promise(1, 156)
@pytest.mark.modes("relay", "python")
def test_a_drained_file_that_others_change_is_read_whole(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("changed at the source since")
    source = tree({"a": 1, "old": 5000})
    mounted = monarch.mount(source, options=["write=absorb", "writeback.reserve=0"])
    path = mounted.path

    def written(name: str, content: bytes) -> None:
        (path / name).write_bytes(content)
        drained(mounted, name)
        objects = mounted.tiers["fast"]
        wait_until(lambda: not objects_in(objects), "it is kept")
        assert (path / name).read_bytes() == content

    written("f", b"A" * 8000)
    for content in (b"B" * 10_000, b"C" * 3000, b"D" * 3000):
        before = (source / "f").stat().st_mtime_ns
        # The kernel's clock of such times has ticks of some milliseconds.
        while (source / "f").stat().st_mtime_ns == before:
            (source / "f").write_bytes(content)
        assert (path / "f").read_bytes() == content
        assert (path / "f").stat().st_size == len(content)
    written("latest", b"999")
    (source / "new").write_bytes(b"1000")
    (source / "new").rename(source / "latest")
    assert (path / "latest").read_bytes() == b"1000"
    # To append is to have the version that is there now; of a file never written here, too.
    for name in ("f", "old"):
        (source / name).write_bytes(b"theirs")
        with (path / name).open("ab") as file:
            file.write(b" and ours")
        drained(mounted, name)
        assert (source / name).read_bytes() == b"theirs and ours"
    written("gone", b"1")
    (source / "gone").unlink()
    with pytest.raises(FileNotFoundError):
        (path / "gone").read_bytes()
    assert "gone" not in os.listdir(path)
    written("gone", b"again")


@pytest.mark.finding("S4")
@pytest.mark.promise(31)
@pytest.mark.modes("relay")
def test_an_attribute_that_an_earlier_mount_has_drained_can_be_removed(
    monarch: MonarchCommand, absorbing: Mounted
) -> None:
    source, tiers = absorbing.source, {"fast": "64MiB"}
    for name in ("a.bin", "d"):
        for attribute in ("user.one", "user.two"):
            os.setxattr(absorbing.path / name, attribute, b"1")
    absorbing.umount()
    again = monarch.mount(source, tiers=tiers, options=["write=absorb"])
    for name in ("a.bin", "d"):
        assert sorted(os.listxattr(source / name)) == ["user.one", "user.two"]
        os.removexattr(again.path / name, "user.one")
        assert os.listxattr(again.path / name) == ["user.two"]
        os.removexattr(again.path / name, "user.two")
        with pytest.raises(OSError, match="No data available"):
            os.removexattr(again.path / name, "user.two")
    again.umount()
    for name in ("a.bin", "d"):
        assert os.listxattr(source / name) == []


# -- reads of files that are not open for writing -----------------------------------------------


@pytest.mark.promise(62)
@pytest.mark.fault("M17")
def test_a_closed_file_that_is_read_can_be_removed_cut_and_written_meanwhile(
    absorbing: Mounted,
) -> None:
    at = absorbing.path
    for name in ("removed", "replaced", "cut", "appended"):
        (at / name).write_bytes(b"0123456789")
    (at / "other").write_bytes(b"other")
    readers = {name: os.open(at / name, os.O_RDONLY) for name in ("removed", "replaced", "cut")}
    readers["appended"] = os.open(at / "appended", os.O_RDONLY)
    (at / "removed").unlink()
    (at / "other").rename(at / "replaced")
    os.truncate(at / "cut", 4)
    with (at / "appended").open("ab") as file:
        file.write(b"more")
        file.flush()
        assert os.pread(readers["appended"], 100, 0) == b"0123456789more"
    # Longer than an object without a name is kept for a process that is about to open it.
    time.sleep(2.5)
    for name in ("removed", "replaced"):
        status = os.fstat(readers[name])
        assert (status.st_size, status.st_nlink) == (10, 0)
        assert os.pread(readers[name], 100, 0) == b"0123456789"
    assert os.pread(readers["cut"], 100, 0) == b"0123" and os.fstat(readers["cut"]).st_size == 4
    assert os.pread(readers["appended"], 100, 0) == b"0123456789more"
    for fd in readers.values():
        os.close(fd)
    assert (at / "replaced").read_bytes() == b"other"
    drained(absorbing, "replaced", "cut", "appended")

    def kept() -> list[bytes]:
        found = []
        for path in objects_in(absorbing.tiers["fast"]):
            with contextlib.suppress(FileNotFoundError):
                found.append(path.read_bytes())
        return found

    wait_until(lambda: b"0123456789" not in kept(), "the objects of unlinked files are removed")


@pytest.mark.promise(63)
def test_an_fsync_of_a_descriptor_that_only_reads_makes_a_closed_file_safe(
    absorbing: Mounted,
) -> None:
    (absorbing.path / "new").write_bytes(b"bytes")
    fd = os.open(absorbing.path / "new", os.O_RDONLY)
    os.fsync(fd)
    assert durable(absorbing.path / "new") in ("local", "source")
    os.close(fd)


@pytest.mark.modes("relay", "passthrough")
def test_a_closed_file_has_its_holes_and_is_mapped(absorbing: Mounted) -> None:
    with (absorbing.path / "sparse").open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(_MB)
    with (absorbing.path / "sparse").open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4096
        with pytest.raises(OSError, match="No such device or address"):
            os.lseek(file.fileno(), 8192, os.SEEK_DATA)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:4097] == b"x" * 4096 + b"\0"


@pytest.mark.modes("relay", "passthrough")
def test_a_dropped_object_is_read_whole_by_old_and_new_descriptors(
    slow: SlowSource, monarch: MonarchCommand
) -> None:
    monarch.allows_log("draining to the source has stopped|EIO")
    mounted = monarch.mount(slow.path, options=["write=absorb", "writeback.reserve=0"])
    content = contents("f", 300_000)
    slow.rules("err create EIO .")
    (mounted.path / "f").write_bytes(content)
    # What is opened before its writer's release is Python's, and is kept while it is open.
    wait_until(lambda: not open_objects(mounted), "its writer has it open")
    with (mounted.path / "f").open("rb", buffering=0) as file:
        slow.rules()
        drained(mounted, "f")
        wait_until(lambda: not objects_in(mounted.tiers["fast"]), "it is kept")
        assert file.read() == content
        assert (mounted.path / "f").read_bytes() == content
        with (mounted.path / "f").open("r+b") as other:
            other.write(b"new")
        assert os.pread(file.fileno(), 3, 0) == b"new"
