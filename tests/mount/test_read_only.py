"""Every attempt to change something through the mount fails with EROFS and changes nothing."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Tree
from tests.mount.compare import assert_equal_trees

ATTEMPTS: dict[str, Callable[[Path], object]] = {
    "open for writing": lambda at: os.open(at / "file", os.O_WRONLY),
    "open for both": lambda at: os.open(at / "file", os.O_RDWR),
    "open for appending": lambda at: os.open(at / "file", os.O_WRONLY | os.O_APPEND),
    "open and truncate": lambda at: os.open(at / "file", os.O_RDONLY | os.O_TRUNC),
    "create": lambda at: os.open(at / "new", os.O_WRONLY | os.O_CREAT),
    "create exclusively": lambda at: os.open(at / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "create in a directory": lambda at: os.open(at / "full/new", os.O_WRONLY | os.O_CREAT),
    "create without a name": lambda at: os.open(at, os.O_RDWR | os.O_TMPFILE),
    "mkdir": lambda at: os.mkdir(at / "new"),
    "mknod of a file": lambda at: os.mknod(at / "new", stat.S_IFREG | 0o644),
    "mknod of a fifo": lambda at: os.mkfifo(at / "new"),
    "unlink": lambda at: os.unlink(at / "file"),
    "unlink of a link": lambda at: os.unlink(at / "link"),
    "rmdir": lambda at: os.rmdir(at / "empty"),
    "rename": lambda at: os.rename(at / "file", at / "new"),
    "rename over another": lambda at: os.rename(at / "file", at / "full/file"),
    "rename of a directory": lambda at: os.rename(at / "full", at / "new"),
    "link": lambda at: os.link(at / "file", at / "new"),
    "symlink": lambda at: os.symlink("file", at / "new"),
    "chmod": lambda at: os.chmod(at / "file", 0o600),
    "chmod of the root": lambda at: os.chmod(at, 0o700),
    "chown": lambda at: os.chown(at / "file", 1, 1),
    "chown of a link": lambda at: os.chown(at / "link", 1, 1, follow_symlinks=False),
    "utime": lambda at: os.utime(at / "file", (1, 1)),
    "touch": lambda at: os.utime(at / "file"),
    "truncate": lambda at: os.truncate(at / "file", 0),
    "lengthen": lambda at: os.truncate(at / "file", 1 << 20),
    "setxattr": lambda at: os.setxattr(at / "file", "user.mine", b"1"),
    "setxattr of ours": lambda at: os.setxattr(at / "file", "user.monarch.tier", b"x"),
    "removexattr": lambda at: os.removexattr(at / "file", "user.monarch.tier"),
}


@pytest.mark.promise(25)
def test_every_attempt_to_change_something_is_erofs(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"file": b"content", "full/file": b"x", "empty": None})
    (source / "link").symlink_to("file")
    before = {path: path.lstat() for path in source.rglob("*")}
    mounted = monarch.mount(source)
    outcomes = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt(mounted.path)
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno or 0]
        else:
            outcomes[name] = "done"
    assert outcomes == dict.fromkeys(ATTEMPTS, "EROFS")
    after = {path: path.lstat() for path in source.rglob("*")}
    assert {path: (s.st_ctime_ns, s.st_size) for path, s in after.items()} == {
        path: (s.st_ctime_ns, s.st_size) for path, s in before.items()
    }
    assert_equal_trees(source, mounted.path)


def test_a_descriptor_for_reading_changes_nothing_either(
    monarch: MonarchCommand, tree: Tree
) -> None:
    source = tree({"file": bytes(8192)})
    mounted = monarch.mount(source)
    fd = os.open(mounted.path / "file", os.O_RDONLY)
    for attempt, expected in (
        (lambda: os.write(fd, b"x"), errno.EBADF),
        (lambda: os.ftruncate(fd, 0), errno.EINVAL),
        (lambda: os.posix_fallocate(fd, 0, 100_000), errno.EBADF),
        (lambda: os.fchmod(fd, 0o600), errno.EROFS),
        (lambda: os.fchown(fd, 1, 1), errno.EROFS),
        (lambda: os.utime(fd), errno.EROFS),
        (lambda: os.setxattr(fd, "user.mine", b"1"), errno.EROFS),
        (lambda: mmap.mmap(fd, 8192, mmap.MAP_SHARED, mmap.PROT_WRITE), errno.EACCES),
    ):
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == expected
    with mmap.mmap(fd, 8192, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
        private[:5] = b"mine!"
    assert os.pread(fd, 5, 0) == bytes(5)
    os.close(fd)
    assert_equal_trees(source, mounted.path)
