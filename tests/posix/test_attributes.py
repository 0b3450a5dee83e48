"""Modes, owners, times and extended attributes: the rights to change them, and the side effects."""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand
from tests.posix.calls import (
    USER,
    UTIME_NOW,
    UTIME_OMIT,
    elsewhere,
    fails,
    opened,
    read_file,
    utimensat,
    write_file,
)
from tests.posix.conftest import NATIVE, OLD, Place, options

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# A time that no clock tells, before the wall clock could.
PAST = 1_000_000_000_123_456_789
LATER = 4_102_444_800_987_654_321


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def later(path: str, change: Callable[[], object]) -> bool:
    """Whether ``change`` changes the ctime of ``path``."""
    before = os.lstat(path).st_ctime_ns
    # Two calls may find the same time on the kernel's clock.
    time.sleep(0.01)
    change()
    after = os.lstat(path).st_ctime_ns
    assert after >= before
    return after > before


# -- modes and owners ------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_has_lost_its_name_keeps_changing_its_attributes(
    name: str, replaced: bool
) -> None:
    with opened(name, os.O_RDONLY) as fd:
        if replaced:
            os.rename("full/inner", name)
        else:
            os.unlink(name)
        os.fchmod(fd, 0o600)
        os.utime(fd, ns=(PAST, LATER))
        status = os.fstat(fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert (status.st_mtime_ns, status.st_nlink) == (LATER, 0)
        assert os.pread(fd, len(OLD), 0) == OLD


@pytest.mark.parametrize("bits", [0o000, 0o400, 0o644, 0o755, 0o1777, 0o777])
def test_chmod_gives_files_and_directories_their_mode(name: str, bits: int) -> None:
    os.chmod(name, bits & 0o777)
    os.chmod("empty", bits)
    assert (mode_of(name), mode_of("empty")) == (bits & 0o777, bits)
    assert stat.S_ISREG(os.stat(name).st_mode) and stat.S_ISDIR(os.stat("empty").st_mode)
    os.chmod(name, 0o644)
    assert read_file(name) == OLD


def test_chmod_follows_links_and_fchmod_needs_no_name(name: str) -> None:
    os.chmod("link", 0o600)
    assert mode_of("old") == 0o600
    with opened(name, os.O_RDONLY) as fd:
        os.fchmod(fd, 0o640)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640
    assert mode_of(name) == 0o640
    with fails(errno.ENOENT):
        os.chmod("dangling", 0o600)
    with fails(errno.ENOENT):
        os.chmod("missing", 0o600)
    with fails(errno.ENOTDIR):
        os.chmod("old/x", 0o600)


def test_chmod_changes_ctime_and_not_mtime(name: str) -> None:
    before = os.stat(name).st_mtime_ns
    assert later(name, lambda: os.chmod(name, 0o600))
    assert os.stat(name).st_mtime_ns == before


def test_rights_are_those_of_the_mode_from_the_next_open_on(here: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    write_file("f", b"x", 0o644)

    def may_read() -> bool:
        return elsewhere(lambda: os.access("f", os.R_OK), uid=USER)

    assert may_read()
    with opened("f", os.O_RDONLY) as fd:
        os.chmod("f", 0o600)
        assert not may_read()
        assert os.read(fd, 1) == b"x"
    os.chown("f", USER, -1)
    assert may_read()


@needs_root
def test_chown_gives_away_and_clears_the_bits_of_a_program(here: Place) -> None:
    write_file("f", b"x")
    for name in ("f", "old"):
        os.chmod(name, 0o6755)
        assert mode_of(name) == 0o6755
        os.chown(name, USER, 1234)
        status = os.stat(name)
        assert (status.st_uid, status.st_gid, mode_of(name)) == (USER, 1234, 0o755)
        os.chown(name, -1, 99)
        assert (os.stat(name).st_uid, os.stat(name).st_gid) == (USER, 99)
        os.chown(name, 5, -1)
        assert (os.stat(name).st_uid, os.stat(name).st_gid) == (5, 99)
    # A directory's are no program's.
    os.chmod("empty", 0o6755)
    os.chown("empty", USER, USER)
    assert mode_of("empty") == 0o6755


@needs_root
def test_chown_of_a_link_is_the_link_s_if_asked_so(here: Place) -> None:
    os.chown("link", USER, USER, follow_symlinks=False)
    assert os.lstat("link").st_uid == USER
    assert os.stat("old").st_uid == 0
    os.chown("link", 7, 7)
    assert (os.lstat("link").st_uid, os.stat("old").st_uid) == (USER, 7)


@needs_root
def test_a_user_cannot_give_a_file_away_and_may_set_only_groups_of_that_user(here: Place) -> None:
    write_file("f", b"x")
    os.chown("f", USER, 0)
    os.chmod("f", 0o6755)

    def try_all() -> None:
        with fails(errno.EPERM):
            os.chown("f", 0, -1)
        with fails(errno.EPERM):
            os.chown("f", -1, 1234)
        os.chown("f", USER, USER)
        with fails(errno.EPERM):
            os.chown("old", USER, -1)

    elsewhere(try_all, uid=USER)
    assert (os.stat("f").st_uid, os.stat("f").st_gid) == (USER, USER)
    assert mode_of("f") == 0o755


@needs_root
@pytest.mark.parametrize("change", ["written", "cut", "emptied"])
def test_writing_clears_the_set_id_bits_of_a_program_for_ordinary_users(
    here: Place, change: str
) -> None:
    write_file("f", OLD)
    for name in ("f", "old"):
        os.chown(name, USER, USER)
        os.chmod(name, 0o6777)

        def write(name: str = name) -> None:
            if change == "cut":
                os.truncate(name, 100)
                return
            with opened(name, os.O_RDWR | (os.O_TRUNC if change == "emptied" else 0)) as fd:
                if change == "written":
                    os.write(fd, b"x")

        elsewhere(write, uid=USER)
        assert mode_of(name) == 0o777, name


@needs_root
@pytest.mark.promise(88)
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
def test_writing_clears_the_set_id_bits_that_a_file_got_while_it_was_open(
    here: Place, flags: int
) -> None:
    write_file("f", OLD)
    for name in ("f", "old"):
        os.chown(name, USER, USER)
        os.chmod(name, 0o777)

        def write(name: str = name) -> None:
            with opened(name, flags) as fd:
                os.write(fd, b"x")
                os.chmod(name, 0o6777)
                os.write(fd, b"y")
                assert mode_of(name) == 0o777

        elsewhere(write, uid=USER)
        assert mode_of(name) == 0o777
        # A user may also have inherited the descriptor from root.
        with opened(name, flags) as fd:
            os.chmod(name, 0o6777)
            elsewhere(lambda fd=fd: os.write(fd, b"z"), uid=USER)
            assert mode_of(name) == 0o777
            os.chmod(name, 0o6777)
            os.write(fd, b"root")
            # Without a datapath the kernel does not report who writes.
            assert mode_of(name) == (0o777 if here.way == "python" else 0o6777)
            assert os.fstat(fd).st_size == len(OLD)


@needs_root
def test_a_user_cannot_set_the_set_group_id_bit_of_a_foreign_group(here: Place) -> None:
    write_file("f", b"x")
    os.chown("f", USER, 1234)
    elsewhere(lambda: os.chmod("f", 0o2755), uid=USER)
    assert mode_of("f") == 0o755


@needs_root
def test_files_made_by_an_ordinary_user_belong_to_that_user(here: Place) -> None:
    os.mkdir("open")
    os.chmod("open", 0o777)

    def make() -> None:
        write_file("open/f", b"mine")
        os.mkdir("open/d")
        os.symlink("x", "open/l")
        os.mkfifo("open/p")
        write_file("open/d/g", b"mine, too")
        os.rename("open/d/g", "open/g")

    elsewhere(make, uid=USER)
    for made in ("f", "d", "l", "p", "g"):
        status = os.lstat(f"open/{made}")
        assert (status.st_uid, status.st_gid) == (USER, USER), made


# -- times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ns", [0, 1, PAST, LATER, -1_000_000_001])
def test_times_are_kept_to_the_nanosecond(name: str, ns: int) -> None:
    os.utime(name, ns=(ns + 5, ns))
    status = os.stat(name)
    assert (status.st_atime_ns, status.st_mtime_ns) == (ns + 5, ns)
    os.utime("empty", ns=(ns, ns))
    assert os.stat("empty").st_mtime_ns == ns
    with opened(name, os.O_RDWR) as fd:
        os.utime(fd, ns=(ns, ns + 7))
        assert os.fstat(fd).st_mtime_ns == ns + 7
        # Reading is no change, closing is none.
        os.read(fd, 10)
    assert os.stat(name).st_mtime_ns == ns + 7


def test_times_are_set_one_by_one_to_now_or_not_at_all(name: str) -> None:
    utimensat(name, PAST, PAST + 1)
    begin = time.time_ns() - 20_000_000
    utimensat(name, UTIME_OMIT, UTIME_OMIT)
    assert (os.stat(name).st_atime_ns, os.stat(name).st_mtime_ns) == (PAST, PAST + 1)
    utimensat(name, UTIME_OMIT, PAST + 2)
    assert (os.stat(name).st_atime_ns, os.stat(name).st_mtime_ns) == (PAST, PAST + 2)
    utimensat(name, PAST + 3, UTIME_OMIT)
    assert (os.stat(name).st_atime_ns, os.stat(name).st_mtime_ns) == (PAST + 3, PAST + 2)
    utimensat(name, UTIME_OMIT, UTIME_NOW)
    assert os.stat(name).st_atime_ns == PAST + 3
    assert begin <= os.stat(name).st_mtime_ns <= time.time_ns() + 1_000_000
    utimensat(name, PAST, PAST)
    utimensat(name, UTIME_NOW, UTIME_NOW)
    assert begin <= os.stat(name).st_atime_ns <= time.time_ns() + 1_000_000


def test_times_of_a_link_are_its_own(anyone: Place) -> None:
    before = os.stat("old").st_mtime_ns
    utimensat("link", PAST, PAST, follow=False)
    assert os.lstat("link").st_mtime_ns == PAST
    assert os.stat("old").st_mtime_ns == before
    utimensat("link", PAST, PAST)
    assert os.stat("old").st_mtime_ns == PAST


def test_setting_times_changes_ctime(name: str) -> None:
    assert later(name, lambda: os.utime(name, ns=(PAST, PAST)))
    assert os.stat(name).st_ctime_ns > PAST


def test_writing_cutting_and_emptying_change_mtime_and_ctime(name: str) -> None:
    def truncated() -> None:
        os.close(os.open(name, os.O_WRONLY | os.O_TRUNC))

    def written() -> None:
        with opened(name, os.O_WRONLY) as fd:
            os.write(fd, b"x")

    def cut(size: int) -> None:
        os.truncate(name, size)

    for change in (written, lambda: cut(50), lambda: cut(99), truncated):
        os.utime(name, ns=(PAST, PAST))
        assert later(name, change)
        assert os.stat(name).st_mtime_ns > PAST


def test_a_write_gives_a_file_the_same_mtime_and_ctime(name: str) -> None:
    # As on a local file system: both are stamped by one clock, also just after a chmod.
    for _ in range(20):
        os.chmod(name, 0o640)
        with opened(name, os.O_WRONLY) as fd:
            os.write(fd, b"x")
        status = os.stat(name)
        assert status.st_mtime_ns == status.st_ctime_ns


def test_a_file_that_is_open_tells_the_time_of_each_write(name: str) -> None:
    with opened(name, os.O_WRONLY) as fd:
        for _ in range(3):
            os.utime(fd, ns=(PAST, PAST))
            assert os.stat(name).st_mtime_ns == PAST
            os.write(fd, b"x")
            assert os.fstat(fd).st_mtime_ns > PAST
            assert os.stat(name).st_mtime_ns == os.fstat(fd).st_mtime_ns
        os.utime(fd, ns=(PAST, PAST))
    assert os.stat(name).st_mtime_ns == PAST


def test_a_time_that_was_set_after_writing_stays_when_the_file_is_closed_and_renamed(
    name: str,
) -> None:
    with opened(name, os.O_WRONLY) as fd:
        os.write(fd, b"x")
        os.utime(name, ns=(PAST, PAST))
        os.fsync(fd)
        os.rename(name, "renamed")
    assert os.stat("renamed").st_mtime_ns == PAST
    os.chmod("renamed", 0o600)
    os.rename("renamed", name)
    os.link(name, "second")
    assert os.stat("second").st_mtime_ns == PAST


def test_names_that_come_and_go_change_the_ctime_of_what_they_name(name: str) -> None:
    assert later(name, lambda: os.link(name, "second"))
    assert later(name, lambda: os.unlink("second"))
    before = os.stat(name).st_mtime_ns
    os.rename(name, "moved")
    assert os.stat("moved").st_mtime_ns == before


def test_writing_nothing_changes_nothing(name: str) -> None:
    os.utime(name, ns=(PAST, PAST))
    with opened(name, os.O_WRONLY) as fd:
        assert os.write(fd, b"") == 0
    assert (os.stat(name).st_mtime_ns, os.stat(name).st_size) == (PAST, len(OLD))


def test_a_new_file_has_the_time_of_now(anyone: Place) -> None:
    begin = time.time_ns() - 20_000_000
    write_file("f", b"x")
    os.mkdir("d")
    os.symlink("x", "l")
    for made in ("f", "d", "l"):
        status = os.lstat(made)
        for time_ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns):
            assert begin <= time_ns <= time.time_ns() + 1_000_000, made


def test_blocks_and_block_size_are_reported(name: str) -> None:
    with opened(name, os.O_RDWR) as fd:
        os.write(fd, os.urandom(100_000))
        os.fsync(fd)
        assert os.fstat(fd).st_blocks * 512 >= 100_000
        assert os.fstat(fd).st_blksize >= 512
    assert os.stat(name).st_blocks * 512 >= 100_000


# -- extended attributes ---------------------------------------------------------------------------


def test_attributes_are_set_replaced_listed_and_removed(name: str) -> None:
    for target in (name, "full"):
        assert listed(target) == []
        os.setxattr(target, "user.a", b"one")
        os.setxattr(target, "user.b", b"")
        os.setxattr(target, "user.c", bytes(range(256)))
        assert listed(target) == ["user.a", "user.b", "user.c"]
        assert os.getxattr(target, "user.b") == b""
        assert os.getxattr(target, "user.c") == bytes(range(256))
        os.setxattr(target, "user.a", b"another, longer")
        assert os.getxattr(target, "user.a") == b"another, longer"
        os.removexattr(target, "user.a")
        assert listed(target) == ["user.b", "user.c"]
        for call in (os.getxattr, os.removexattr):
            with fails(errno.ENODATA):
                call(target, "user.a")
    with opened(name, os.O_RDONLY) as fd:
        os.setxattr(fd, "user.a", b"by descriptor")
        assert os.getxattr(fd, "user.a") == b"by descriptor"
    os.rename(name, "moved")
    assert os.getxattr("moved", "user.a") == b"by descriptor"
    assert read_file("moved") == OLD


def listed(path: str) -> list[str]:
    return sorted(os.listxattr(path))


def test_flags_say_whether_an_attribute_must_be_there(name: str) -> None:
    with fails(errno.ENODATA):
        os.setxattr(name, "user.a", b"x", os.XATTR_REPLACE)
    os.setxattr(name, "user.a", b"x", os.XATTR_CREATE)
    with fails(errno.EEXIST):
        os.setxattr(name, "user.a", b"y", os.XATTR_CREATE)
    assert os.getxattr(name, "user.a") == b"x"
    os.setxattr(name, "user.a", b"z", os.XATTR_REPLACE)
    assert os.getxattr(name, "user.a") == b"z"


def test_attributes_that_are_too_long_or_have_no_namespace_are_refused(name: str) -> None:
    with fails(errno.E2BIG):
        os.setxattr(name, "user.a", b"x" * 65537)
    with fails(errno.ERANGE):
        os.setxattr(name, "user." + "n" * 251, b"x")
    os.setxattr(name, "user." + "n" * 250, b"x")
    with fails(errno.EOPNOTSUPP):
        os.setxattr(name, "nonsense.a", b"x")
    with fails(errno.EINVAL):
        os.setxattr(name, "user.", b"x")
    with fails(errno.ENOENT):
        os.setxattr("missing", "user.a", b"x")
    assert listed(name) == ["user." + "n" * 250]


def test_attributes_that_a_file_has_at_the_source_stay_when_it_is_changed(
    way: str, tmp_path: Path
) -> None:
    if way == NATIVE:
        pytest.skip("there is no other source")
    source = tmp_path / "source"
    source.mkdir()
    for made in ("written", "renamed", "given one more"):
        (source / made).write_bytes(b"x")
        os.setxattr(source / made, "user.kept", b"kept")
    command = MonarchCommand(tmp_path, uuid.uuid4().hex, way)
    try:
        mounted = command.mount(source, options=options(way))
        (mounted.path / "written").write_bytes(b"written")
        (mounted.path / "renamed").rename(mounted.path / "moved")
        os.setxattr(mounted.path / "given one more", "user.more", b"more")
        mounted.umount()
    finally:
        command.close()
    for made in ("written", "moved", "given one more"):
        assert os.getxattr(source / made, "user.kept") == b"kept", made
    assert os.getxattr(source / "given one more", "user.more") == b"more"


def test_links_and_fifos_have_no_attributes_of_a_user_s(anyone: Place) -> None:
    os.mkfifo("pipe")
    for target in ("link", "pipe"):
        with fails(errno.EPERM):
            os.setxattr(target, "user.a", b"x", follow_symlinks=False)
        assert os.listxattr(target, follow_symlinks=False) == []
    os.setxattr("link", "user.a", b"x")
    assert os.getxattr("old", "user.a") == b"x"


def test_setting_an_attribute_changes_ctime_and_not_mtime(name: str) -> None:
    before = os.stat(name).st_mtime_ns
    assert later(name, lambda: os.setxattr(name, "user.a", b"x"))
    assert later(name, lambda: os.removexattr(name, "user.a"))
    assert os.stat(name).st_mtime_ns == before


@needs_root
def test_only_users_who_may_write_set_attributes(here: Place) -> None:
    os.setxattr("old", "user.a", b"x")
    write_file("private", b"x", 0o600)
    os.setxattr("private", "user.a", b"x")

    def try_all() -> None:
        assert os.getxattr("old", "user.a") == b"x"
        for call in (
            lambda: os.setxattr("old", "user.a", b"y"),
            lambda: os.removexattr("old", "user.a"),
            lambda: os.getxattr("private", "user.a"),
        ):
            with fails(errno.EACCES):
                call()
        with fails(errno.EPERM):
            os.setxattr("old", "trusted.a", b"x")

    elsewhere(try_all, uid=USER)
    assert os.getxattr("old", "user.a") == b"x"


def test_many_attributes_are_listed_whole(name: str) -> None:
    names = [f"user.{number:03}" for number in range(40)]
    for each in names:
        os.setxattr(name, each, each.encode())
    assert listed(name) == names
    for each in names[::2]:
        os.removexattr(name, each)
    assert listed(name) == names[1::2]


# -- the file system -------------------------------------------------------------------------------


def test_the_file_system_tells_its_size_and_lengths(here: Place) -> None:
    space = os.statvfs(".")
    assert space.f_namemax == 255
    assert space.f_bsize > 0 and space.f_frsize > 0
    assert 0 < space.f_bavail <= space.f_bfree <= space.f_blocks
    assert space.f_flag & os.ST_RDONLY == 0
    assert os.pathconf(".", "PC_NAME_MAX") == 255
    with opened("old", os.O_RDONLY) as fd:
        assert os.fstatvfs(fd).f_blocks == space.f_blocks
