"""Attributes, kinds and unusual files: lstat returns the same on the mount as at the source."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from tests.conftest import EITHER_SIDE, MonarchCommand, Tree
from tests.equipment.inotify import OpenCounter
from tests.equipment.waiting import readable
from tests.mount.command import needs_root
from tests.mount.compare import assert_equal_trees, getdents, opened, wait_for_copies
from tests.mount.observe import account, copy_of, forget_pages

MiB = 1 << 20
GiB = 1 << 30


@pytest.mark.modes(*EITHER_SIDE)
def test_times_modes_and_owners_are_those_of_the_source(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"directory": None, **dict.fromkeys(("a", "b", "c", "d"), b"12345")})
    os.utime(source / "a", ns=(1, 1_234_567_890_123_456_789))
    os.utime(source / "b", ns=(0, -1_000_000_001))  # before 1970
    os.utime(source / "c", ns=(0, 4_102_444_800_000_000_001))  # beyond 32 bits
    for name, mode in (("a", 0o4755), ("b", 0o2710), ("c", 0), ("directory", 0o3771)):
        (source / name).chmod(mode)
    if os.geteuid() == 0:
        os.chown(source / "d", 12345, 2**31 + 5)
        os.chown(source / "directory", 65534, 65534, follow_symlinks=False)
    mounted = monarch.mount(source)
    assert_equal_trees(source, mounted.path)


@pytest.mark.promise(122)
def test_a_file_that_is_dated_beyond_the_year_2262_is_a_file_as_others(
    monarch: MonarchCommand, tree: Tree
) -> None:
    """Its time is shown as the greatest that 64 bits of ns can hold; its copy is kept."""
    source = tree({"small": 5000, "large": 5_000_000, "other": b"x"})
    for name in ("small", "large"):
        os.utime(source / name, ns=(0, 10_413_792_000_000_000_001))  # in 2300
    mounted = monarch.mount(source)
    for name in ("small", "large", "other"):
        assert (mounted.path / name).read_bytes() == (source / name).read_bytes()
        assert (mounted.path / name).stat().st_size == (source / name).stat().st_size
    assert (mounted.path / "small").stat().st_mtime_ns == 2**63 - 1
    wait_for_copies(mounted, 3)
    with OpenCounter(source) as counter:
        assert (mounted.path / "large").read_bytes() == (source / "large").read_bytes()
        assert counter.count() == 1  # that of this test
    assert not [p for p in account(mounted)["health"]["problems"] if p["kind"] == "files-changed"]


@pytest.mark.promise(14)
def test_a_hard_link_is_one_file_and_copied_once(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a/first": 3000, "other": b"x", "z/large": 5_000_000})
    os.link(source / "a/first", source / "z/second")
    os.link(source / "z/large", source / "a/large too")
    mounted = monarch.mount(source)
    first, second = mounted.path / "a/first", mounted.path / "z/second"
    assert first.stat().st_ino == second.stat().st_ino != (mounted.path / "other").stat().st_ino
    assert first.stat().st_nlink == second.stat().st_nlink == 2
    with opened(mounted.path / "z") as fd:
        numbers = {entry.name: entry.ino for entry in getdents(fd, 4096)}
        assert numbers[b"second"] == first.stat().st_ino
    with OpenCounter(source) as opens:
        assert first.read_bytes() == second.read_bytes() == (source / "a/first").read_bytes()
        opens.reset()
        second.read_bytes()
        (mounted.path / "z/large").read_bytes()
        wait_for_copies(mounted, 2)
        opens.reset()
        for name in ("a/first", "z/second", "z/large", "a/large too"):
            (mounted.path / name).read_bytes()
        assert opens.paths() == {}
    assert mounted.xattr("z/second") == mounted.xattr("a/first") == "fast"
    tier = account(mounted)["tiers"][0]
    assert (tier["files"], tier["used"]) == (2, 5_003_000)


def test_a_small_hard_linked_file_is_opened_at_the_source_once(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"a": 3000})
    os.link(source / "a", source / "b")
    mounted = monarch.mount(source)
    with OpenCounter(source) as opens:
        (mounted.path / "b").read_bytes()
        (mounted.path / "a").read_bytes()
        wait_for_copies(mounted, 1)
        assert opens.count() == 1


@pytest.mark.fault("S10")
def test_a_sparse_file_keeps_its_bytes_and_its_holes(monarch: MonarchCommand, source: Path) -> None:
    with open(source / "sparse", "wb") as file:
        file.truncate(64 * MiB)
        for offset in (0, 3 * MiB + 17, 40 * MiB):
            file.seek(offset)
            file.write(b"data")
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    assert_equal_trees(source, mounted.path)
    wait_for_copies(mounted, 1)
    assert_equal_trees(source, mounted.path)
    copy = copy_of(mounted, "sparse")
    assert copy.stat().st_size == 64 * MiB
    assert copy.stat().st_blocks * 512 <= 4 * MiB


@pytest.mark.fault("S10")
def test_a_file_is_right_on_both_sides_of_4_gib(monarch: MonarchCommand, source: Path) -> None:
    around = 4 * GiB - 100_000
    data = os.urandom(200_000)
    with open(source / "huge", "wb") as file:
        file.truncate(4 * GiB + GiB // 2)
        os.pwrite(file.fileno(), data, around)
        os.pwrite(file.fileno(), b"the end", 4 * GiB + GiB // 2 - 7)
    mounted = monarch.mount(source)  # its tier is too small for this file
    with open(mounted.path / "huge", "rb", buffering=0) as file:
        fd = file.fileno()
        assert os.fstat(fd).st_size == 4 * GiB + GiB // 2
        assert os.fstat(fd).st_blocks == (source / "huge").stat().st_blocks
        assert os.pread(fd, 200_000, around) == data
        assert os.pread(fd, 10, 4 * GiB - 5) == data[99_995:100_005]
        assert os.pread(fd, 4096, 4 * GiB) == data[100_000:104_096]
        assert os.pread(fd, 100, 4 * GiB + GiB // 2 - 7) == b"the end"
        assert os.pread(fd, 100, 4 * GiB + GiB // 2) == b""
        assert file.seek(0, os.SEEK_END) == 4 * GiB + GiB // 2
    assert account(mounted)["copies"]["done"] == 0
    assert account(mounted)["health"]["state"] == "ok"


@pytest.mark.fault("S10")
def test_the_copy_of_a_sparse_file_of_4_gib_takes_little_room(
    monarch: MonarchCommand, source: Path
) -> None:
    with open(source / "huge", "wb") as file:
        file.truncate(4 * GiB + 10)
        os.pwrite(file.fileno(), b"on both sides", 4 * GiB - 6)
    # Its parts alone would be copied.
    options = ["foresight.parts=false"]
    mounted = monarch.mount(source, tiers={"fast": "5GiB"}, options=options)
    for _ in range(2):
        with open(mounted.path / "huge", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 30, 4 * GiB - 10) == b"\0" * 4 + b"on both sides\0\0\0"
            forget_pages(file.fileno())
        wait_for_copies(mounted, 1)
    assert mounted.xattr("huge") == "fast"
    copy = copy_of(mounted, "huge")
    assert copy.stat().st_size == 4 * GiB + 10
    assert copy.stat().st_blocks * 512 <= 2 * MiB
    assert account(mounted)["tiers"][0]["used"] == 4 * GiB + 10


@pytest.mark.promise(17)
@pytest.mark.modes(*EITHER_SIDE)
def test_a_fifo_joins_two_processes_of_the_mount_and_not_the_source(
    monarch: MonarchCommand, source: Path
) -> None:
    os.mkfifo(source / "fifo")
    mounted = monarch.mount(source)
    there = os.open(source / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    here = os.open(mounted.path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(mounted.path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(writer, b"hello")
        assert os.read(here, 10) == b"hello"
        assert readable(there, within_s=0) == []
        assert os.read(there, 10) == b""  # no process writes at the source
    finally:
        for fd in (there, here, writer):
            os.close(fd)


@pytest.mark.promise(17, 22)
@needs_root
@pytest.mark.modes(*EITHER_SIDE)
def test_devices_are_shown_with_their_numbers_and_cannot_be_opened(
    monarch: MonarchCommand, source: Path
) -> None:
    os.mknod(source / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(source / "block", stat.S_IFBLK | 0o600, os.makedev(259, 1_000_000))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
        server.listen()
        mounted = monarch.mount(source)
        assert_equal_trees(source, mounted.path)
        for name, expected in (("null", errno.EACCES), ("socket", errno.ENXIO)):
            with pytest.raises(OSError) as caught:
                os.open(mounted.path / name, os.O_RDONLY)
            assert caught.value.errno == expected
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(mounted.path / "socket"))
    assert account(mounted)["source_totals"]["opens"] == 0


@pytest.mark.modes(*EITHER_SIDE)
def test_a_listing_tells_the_kind_of_each_entry(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"directory": None, "file": b"x"})
    (source / "link").symlink_to("directory")
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
    mounted = monarch.mount(source)
    with opened(mounted.path) as fd:
        entries = {entry.name: entry for entry in getdents(fd, 4096)}
    for name in os.listdir(os.fsencode(source)):
        status = os.lstat(os.fsencode(mounted.path) + b"/" + name)
        assert entries[name].kind == stat.S_IFMT(status.st_mode) >> 12, name
        assert entries[name].ino == status.st_ino, name


@pytest.mark.promise(16)
@pytest.mark.modes(*EITHER_SIDE)
def test_links_are_shown_as_they_are_and_followed_by_the_reader_alone(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    secret = tmp_path / "outside"
    secret.write_bytes(b"outside of the source")
    source = tree({"inside": b"inside"})
    for name, target in (("out", str(secret)), ("in", "inside"), ("loop", "loop")):
        (source / name).symlink_to(target)
    mounted = monarch.mount(source)
    with OpenCounter(tmp_path) as opens:
        assert (mounted.path / "in").read_bytes() == b"inside"
        wait_for_copies(mounted, 1)
        assert "outside" not in opens.paths()
    assert (mounted.path / "out").read_bytes() == b"outside of the source"
    with pytest.raises(OSError) as caught:
        (mounted.path / "loop").read_bytes()
    assert caught.value.errno == errno.ELOOP
    for name in ("out", "in", "loop"):
        assert os.readlink(mounted.path / name) == os.readlink(source / name)
    assert account(mounted)["source_totals"]["opens"] == 1


@pytest.mark.modes(*EITHER_SIDE)
def test_the_mount_tells_its_size_and_how_long_names_may_be(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({"a": 10_000, "b": 1, "c": b""}))
    space = os.statvfs(mounted.path)
    assert space.f_namemax == 255
    assert space.f_files == 4
    assert space.f_blocks * space.f_frsize == 12_288
    assert (space.f_bfree, space.f_bavail, space.f_ffree) == (0, 0, 0)
    assert (
        space.f_flag & os.ST_RDONLY and space.f_flag & os.ST_NOSUID and space.f_flag & os.ST_NODEV
    )


@pytest.mark.modes(*EITHER_SIDE)
def test_access_answers_as_at_the_source_but_for_writing(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"program": b"#!/bin/true\n", "data": b"x", "closed": None})
    (source / "program").chmod(0o755)
    (source / "data").chmod(0o644)
    (source / "closed").chmod(0o500)
    mounted = monarch.mount(source)
    for name in ("program", "data", "closed", "missing", "."):
        for mode in (os.F_OK, os.R_OK, os.X_OK):
            here = os.access(mounted.path / name, mode)
            assert here == os.access(source / name, mode), (name, mode)
        assert not os.access(mounted.path / name, os.W_OK)


@pytest.mark.finding("S4")
@pytest.mark.promise(31)
@pytest.mark.modes("relay", "python")
def test_attributes_that_were_set_are_shown_after_the_next_mount(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"d/f": 10, "d/sub/g": 10, "data/f": 10})
    for name in ("d/f", "data/f"):
        os.setxattr(source / name, b"user.theirs", b"1")
    options = ["absorb=d/**"]
    mounted = monarch.mount(source, tiers={"fast": "16MiB"}, options=options)
    for name in ("d/f", "d/sub", "d/sub/g"):
        os.setxattr(mounted.path / name, b"user.a", name.encode())
    mounted.umount()
    mounted = monarch.mount(source, tiers={"fast": "16MiB"}, options=options)
    for name in ("d/f", "d/sub", "d/sub/g"):
        assert os.getxattr(mounted.path / name, b"user.a") == name.encode()
        assert "user.a" in os.listxattr(mounted.path / name)
    assert sorted(os.listxattr(mounted.path / "d/f")) == ["user.a", "user.theirs"]
    assert os.listxattr(mounted.path / "data/f") == []
    os.removexattr(mounted.path / "d/f", b"user.a")
    assert os.listxattr(mounted.path / "d/f") == ["user.theirs"]
    for name in (b"user.a", b"user.none"):
        with pytest.raises(OSError) as missing:
            os.getxattr(mounted.path / "d/f", name)
        assert missing.value.errno == errno.ENODATA
    mounted.umount()
    assert os.listxattr(source / "d/f") == ["user.theirs"]


@pytest.mark.promise(31)
@pytest.mark.promise(99)
@pytest.mark.modes("relay", "python")
def test_a_mount_that_does_not_absorb_shows_what_was_set_on_an_earlier_one(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source, tiers = tree({"d/f": 10, "data/f": 10}), {"fast": "16MiB"}
    os.setxattr(source / "data/f", b"user.theirs", b"1")
    mounted = monarch.mount(source, tiers=tiers, options=["absorb=d/**"])
    for name in ("d/f", "d"):
        os.setxattr(mounted.path / name, b"user.a", name.encode())
    mounted.umount()
    # The second one has a new snapshot, which tells nothing of attributes.
    for arguments in ([], ["--refresh"]):
        mounted = monarch.mount(source, tiers=tiers, arguments=arguments)
        for name in ("d/f", "d"):
            assert os.getxattr(mounted.path / name, b"user.a") == name.encode()
            assert os.listxattr(mounted.path / name) == ["user.a"]
        # It cannot know which paths those were.
        assert os.getxattr(mounted.path / "data/f", b"user.theirs") == b"1"
        mounted.umount()
