"""Any tree of names is shown as it is at the source, without a call to the source."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import EITHER_SIDE, MonarchCommand, Mounted, Tree, require_fuse
from tests.equipment import slowfs
from tests.mount.compare import (
    Entry,
    assert_equal_trees,
    attributes_of,
    content,
    getdents,
    opened,
    wait_for_copies,
)
from tests.mount.observe import account

ODD_NAMES = (
    b"n" * 255,
    bytes(byte for byte in range(1, 256) if byte != ord("/")),
    b"\xff\xfe not UTF-8",
    "ümlaut 数据".encode(),
    b"two\nlines",
    b"copy.part",
    b".part",
    b".monarch",
    b"-rf",
    b" blank ",
    b"comma,colon:equals=",
    b"...",
)


@pytest.mark.promise(16, 38)
def test_a_tree_of_everything_looks_like_its_source(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a/b/c/file": 5000, "a/empty": b"", "nothing": None, "big": 5_000_000})
    (source / "a/relative").symlink_to("b/c/file")
    (source / "a/dangling").symlink_to("../nowhere")
    (source / "a/absolute").symlink_to("/etc/passwd")
    (source / "a/long").symlink_to("x" * 4000)
    os.link(source / "a/b/c/file", source / "other name")
    os.mkfifo(source / "fifo", 0o620)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
    mounted = monarch.mount(source)
    assert_equal_trees(source, mounted.path)
    # The three regular files; fifo, socket and links have none. A kernel that only reads never
    # asks for an empty one.
    wait_for_copies(mounted, 2 if monarch.mode == "no_open" else 3)
    assert_equal_trees(source, mounted.path)


@pytest.mark.finding("C1")
@pytest.mark.promise(94)
@pytest.mark.modes(*EITHER_SIDE)
def test_every_listing_begins_with_the_directory_and_its_parent(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"sub/deep/file": b"x", "sub/other": b"y", "empty": None})
    mounted = monarch.mount(source)
    for name, parent in (("", ""), ("sub", ""), ("sub/deep", "sub"), ("empty", "")):
        expected = [b".", b"..", *sorted(map(os.fsencode, os.listdir(source / name)))]
        own, above = (os.stat(mounted.path / path).st_ino for path in (name, parent))
        for size in (48, 100_000):  # one entry at a time; all at once
            with opened(mounted.path / name) as fd:
                found = list(entries_from(fd, size))
                assert [entry.name for entry in found] == expected
                assert [entry.ino for entry in found[:2]] == [own, above]
                assert {entry.kind for entry in found[:2]} == {4}
                # A listing is continued behind any entry.
                for place, entry in enumerate(found):
                    os.lseek(fd, entry.offset, os.SEEK_SET)
                    assert [e.name for e in entries_from(fd, size)] == expected[place + 1 :]


def entries_from(fd: int, size: int) -> Iterator[Entry]:
    """What is left of a listing, asked for with a buffer of ``size`` bytes."""
    while part := getdents(fd, size):
        yield from part


@pytest.mark.fault("S9")
@pytest.mark.promise(15, 38)
def test_any_name_that_the_source_allows_works(monarch: MonarchCommand, source: Path) -> None:
    with opened(source) as fd:
        for name in ODD_NAMES:
            os.mkdir(name, dir_fd=fd)
            for inner in ODD_NAMES:
                with open(os.fsencode(source) + b"/" + name + b"/" + inner, "wb") as file:
                    file.write(inner[::-1])
    mounted = monarch.mount(source)
    assert_equal_trees(source, mounted.path)
    wait_for_copies(mounted, len(ODD_NAMES) ** 2)
    assert_equal_trees(source, mounted.path)


def test_a_path_beyond_4096_bytes_is_read_cold_and_warm(
    monarch: MonarchCommand, source: Path
) -> None:
    fd = os.open(source, os.O_RDONLY)
    for level in range(30):
        name = f"{level:03}".encode() * 80
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    with open(os.open(b"file", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
        file.write(b"seven thousand bytes down")
    with open(os.open(b"large", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
        file.write(bytes(range(256)) * 20_000)
    os.close(fd)
    if monarch.mode == "no_open":
        monarch.expects_log("opens are not counted: a directory cannot be watched: File name too")
    mounted = monarch.mount(source)
    assert_equal_trees(source, mounted.path)
    wait_for_copies(mounted, 2)
    assert_equal_trees(source, mounted.path)
    opens = None if monarch.mode == "no_open" else 2
    assert account(mounted)["tiers"][0]["opens"] == opens


@pytest.mark.modes(*EITHER_SIDE)
def test_a_directory_of_100_000_files_is_listed_whole(
    monarch: MonarchCommand, source: Path
) -> None:
    expected = {f"file-{number * 7919 % 1_000_003:07}" for number in range(100_000)}
    with opened(source) as fd:
        for name in expected:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    mounted = monarch.mount(source)
    with opened(mounted.path) as fd:
        listed = os.listdir(fd)
        assert len(listed) == len(expected)
        assert set(listed) == expected
        for name in random.Random(1).sample(sorted(expected), 1000):
            assert os.stat(name, dir_fd=fd).st_size == 0
        for number in range(1000):
            with pytest.raises(FileNotFoundError):
                os.stat(f"file-{number:07}x", dir_fd=fd)


@pytest.fixture
def deep(source: Path) -> Iterator[Path]:
    """A source that pytest could not remove, some runs later: ``shutil.rmtree`` calls itself for
    each level. Name it before ``monarch``: it must outlive the mount."""
    yield source
    subprocess.run(["rm", "-rf", "--one-file-system", str(source)], check=True)


# The shell that limits the descriptors mounts without a mode.
@pytest.mark.modes("auto")
def test_1200_nested_directories_work_with_256_descriptors(
    deep: Path, monarch: MonarchCommand, tmp_path: Path
) -> None:
    fd = os.open(deep, os.O_RDONLY)
    for level in range(1200):
        os.mkdir("d", dir_fd=fd)
        with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
            file.write(b"%d" % level)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    mounted = mount_with_descriptors(monarch, deep, tmp_path, limit=256)
    for _ in range(2):
        here = os.open(mounted.path, os.O_RDONLY)
        for level in range(1200):
            assert sorted(os.listdir(here)) == ["d", "file"]
            assert content(b"file", beneath=here) == b"%d" % level
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        wait_for_copies(mounted, 1200)


def mount_with_descriptors(
    monarch: MonarchCommand, source: Path, directory: Path, *, limit: int
) -> Mounted:
    require_fuse()
    made = Mounted(
        monarch, directory / "mnt", source, directory / "state", {"fast": directory / "tier"}
    )
    made.path.mkdir()
    monarch.mounted.append(made)
    command = [sys.executable, "-m", "monarch", "mount", str(source), str(made.path)]
    command += ["--tier", f"{made.tiers['fast']}:10MiB", "--state", str(made.state)]
    shell = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *command]
    subprocess.run(shell, env=monarch.environment(), check=True, timeout=60)
    made.pid = account(made)["pid"]
    return made


@pytest.mark.modes(*EITHER_SIDE)
def test_a_name_that_does_not_exist_is_enoent_and_one_too_long_enametoolong(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree({"file": b"x", "directory": None}))
    for name, expected in (
        ("missing", errno.ENOENT),
        ("directory/missing", errno.ENOENT),
        ("file/below", errno.ENOTDIR),
        ("n" * 255, errno.ENOENT),
        ("n" * 256, errno.ENAMETOOLONG),
        ("n" * 1025, errno.ENAMETOOLONG),
    ):
        with pytest.raises(OSError) as caught:
            os.lstat(mounted.path / name)
        assert caught.value.errno == expected, name


@pytest.mark.modes(*EITHER_SIDE)
def test_a_listing_in_small_pieces_continues_where_it_stopped(
    monarch: MonarchCommand, tree: Tree
) -> None:
    names = {f"file-{number:04}".encode() for number in range(2000)}
    mounted = monarch.mount(tree({name.decode(): b"" for name in names}))
    with opened(mounted.path) as fd:
        seen: list[bytes] = []
        offsets = {}
        while entries := getdents(fd, 280):
            for entry in entries:
                offsets[entry.name] = entry.offset
                seen.append(entry.name)
                os.stat(entry.name, dir_fd=fd)
        assert len(seen) == len(set(seen))
        assert set(seen) == names | {b".", b".."} or set(seen) == names
        for index in (0, 1, 17, 1000, len(seen) - 2):
            os.lseek(fd, offsets[seen[index]], os.SEEK_SET)
            assert getdents(fd, 280)[0].name == seen[index + 1]
        os.lseek(fd, offsets[seen[-1]], os.SEEK_SET)
        assert getdents(fd, 280) == []
        os.lseek(fd, 0, os.SEEK_SET)
        assert getdents(fd, 280)[0].name == seen[0]


@pytest.mark.modes(*EITHER_SIDE)
def test_dot_and_dot_dot_lead_where_they_should(monarch: MonarchCommand, tree: Tree) -> None:
    mounted = monarch.mount(tree({"a/b/file": b"x"}))
    below = mounted.path / "a" / "b"
    assert os.stat(below / ".").st_ino == os.stat(below).st_ino
    assert os.stat(below / "..").st_ino == os.stat(mounted.path / "a").st_ino
    assert os.stat(below / "../..").st_ino == os.stat(mounted.path).st_ino
    assert os.stat(mounted.path / "..").st_ino == os.stat(mounted.path.parent).st_ino
    with opened(below) as fd:
        os.stat(fd)
        with opened(b"..", beneath=fd) as above:
            assert os.listdir(above) == ["b"]


@pytest.mark.fault("S1")
@pytest.mark.promise(13)
@pytest.mark.skipif(slowfs.unavailable() is not None, reason=str(slowfs.unavailable()))
@pytest.mark.modes(*EITHER_SIDE)
def test_names_and_attributes_ask_the_source_nothing(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    names = [f"class-{number % 20}/file-{number}" for number in range(1000)]
    root = tree(dict.fromkeys(names, b"x"))
    (root / "link").symlink_to("class-1")
    with slowfs.SlowSource(root, tmp_path / "pfs", attribute_s=0) as source:
        mounted = monarch.mount(source.path)
        before = source.counters()
        ask_everything(mounted.path, names)
        assert source.counters() == before
        # A call at the source would be counted.
        (mounted.path / names[0]).read_bytes()
        assert source.counters()["open"] > before["open"]
        mounted.umount()

        before = source.counters()
        again = monarch.mount(source.path, options=["snapshot.freshness=never"])
        after = source.counters()
        # The root and the one of the snapshot are compared, and the first names in it, which
        # identify the source: 19 calls, if all comes within a second. The kernel looks up a name
        # again that it has known for longer, and each lookup is a call.
        calls = {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]}
        assert sum(calls.values()) < 30, calls
        assert after["readdir"] == before["readdir"] + 1
        ask_everything(again.path, names)
        assert source.counters() == after
        again.umount()


def ask_everything(mount: Path, names: list[str]) -> None:
    subprocess.run(["find", str(mount), "-ls"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ls", "-lR", str(mount)], check=True, stdout=subprocess.DEVNULL)
    with opened(mount) as fd:
        for name in names:
            os.stat(name, dir_fd=fd)
        for _ in range(100):
            os.readlink("link", dir_fd=fd)
            assert not os.access("missing", os.F_OK, dir_fd=fd)
        attributes_of(b".", beneath=fd)
    os.statvfs(mount)
