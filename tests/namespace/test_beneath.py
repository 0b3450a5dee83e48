"""A path from the source never leads out of it, however long or hostile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch.posix import openat2
from monarch.posix.openat2 import lstat_beneath, open_beneath

Opener = Callable[[int, bytes, int], int]


@pytest.fixture
def root_fd(source: Path) -> Iterator[int]:
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "file").write_bytes(b"inside")
    (source / "to_dir").symlink_to("a")
    (source / "to_file").symlink_to("a/b/file")
    (source / "out").symlink_to("/etc/passwd")
    os.mkfifo(source / "fifo")
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture(params=["openat2", "stepwise"], autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every promise holds on a kernel without openat2 as well."""
    if request.param == "stepwise":
        monkeypatch.setattr(openat2, "_has_openat2", lambda: False)
    elif not openat2._has_openat2():
        pytest.skip("this kernel has no openat2")


def refused(root_fd: int, path: bytes, flags: int = os.O_RDONLY) -> int | None:
    with pytest.raises(OSError) as failure:
        os.close(open_beneath(root_fd, path, flags))
    return failure.value.errno


@pytest.mark.parametrize("path", [b"", b".", b"./"])
def test_the_empty_path_is_the_root(root_fd: int, path: bytes) -> None:
    fd = open_beneath(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.path.sameopenfile(fd, root_fd)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("path", [b"a/b/file", b"a//b/./file", b"./a/b/file"])
def test_a_file_is_opened(root_fd: int, path: bytes) -> None:
    fd = open_beneath(root_fd, path, os.O_RDONLY)
    try:
        assert os.read(fd, 10) == b"inside"
    finally:
        os.close(fd)


@pytest.mark.fault("S5", "S8")
@pytest.mark.parametrize("path", [b"to_dir/b/file", b"to_file", b"out", b"to_dir"])
def test_no_symbolic_link_is_followed(root_fd: int, path: bytes) -> None:
    assert refused(root_fd, path) == errno.ELOOP
    assert refused(root_fd, path, os.O_RDONLY | os.O_DIRECTORY) in (errno.ELOOP, errno.ENOTDIR)


@pytest.mark.fault("S5")
@pytest.mark.parametrize("path", [b"/etc/passwd", b"..", b"a/../../x", b"a/b/.."])
def test_nothing_leads_out(root_fd: int, path: bytes) -> None:
    assert refused(root_fd, path) == errno.EXDEV


def test_the_kernels_errors_come_through(root_fd: int) -> None:
    assert refused(root_fd, b"a/nothing") == errno.ENOENT
    assert refused(root_fd, b"nothing/a") == errno.ENOENT
    assert refused(root_fd, b"a/b/file/c") == errno.ENOTDIR
    assert refused(root_fd, b"a/b/file/") == errno.ENOTDIR
    assert refused(root_fd, b"a\0b") == errno.EINVAL
    assert refused(root_fd, b"x" * 256) == errno.ENAMETOOLONG
    assert refused(root_fd, b"x" * 9000) == errno.ENAMETOOLONG
    assert refused(root_fd, b"fifo", os.O_RDONLY | os.O_DIRECTORY) == errno.ENOTDIR


def test_a_path_longer_than_the_kernel_takes(root_fd: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path = b""
    fd = os.dup(root_fd)
    for _ in range(40):
        os.mkdir(b"d" * 250, dir_fd=fd)
        below = os.open(b"d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        path += b"d" * 250 + b"/"
    os.close(os.open(b"deep", os.O_CREAT | os.O_WRONLY, 0o640, dir_fd=fd))
    os.symlink(b"deep", b"link", dir_fd=fd)
    os.close(fd)
    assert len(path) > 10_000
    os.close(open_beneath(root_fd, path + b"deep", os.O_RDONLY))
    assert lstat_beneath(root_fd, path + b"deep").st_mode & 0o777 == 0o640
    assert lstat_beneath(root_fd, path).st_nlink == 2
    assert refused(root_fd, path + b"link") == errno.ELOOP
    assert refused(root_fd, path + b"nothing") == errno.ENOENT
    assert len(os.listdir("/proc/self/fd")) <= before


def test_lstat_sees_the_link_and_not_what_it_points_to(root_fd: int, source: Path) -> None:
    for path in (b"to_file", b"out", b"fifo", b"a/b/file", b"a", b""):
        found = lstat_beneath(root_fd, path)
        expected = os.lstat(os.fsencode(source) + b"/" + path)
        assert (found.st_ino, found.st_mode) == (expected.st_ino, expected.st_mode)
    with pytest.raises(OSError) as failure:
        lstat_beneath(root_fd, b"to_dir/b")
    assert failure.value.errno in (errno.ELOOP, errno.ENOTDIR)
    for path, number in (
        (b"/etc", errno.EXDEV),
        (b"a/..", errno.EXDEV),
        (b"..", errno.EXDEV),
        (b"nothing", errno.ENOENT),
        (b"a\0", errno.EINVAL),
    ):
        with pytest.raises(OSError) as failure:
            lstat_beneath(root_fd, path)
        assert failure.value.errno == number, path
