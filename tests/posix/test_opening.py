"""Opening and creating files: the effect of each flag, and the resulting modes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from tests.posix.calls import (
    USER,
    elsewhere,
    exists,
    fails,
    opened,
    read_file,
    together,
    write_file,
)
from tests.posix.conftest import OLD, Place

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_a_file_that_is_made_is_there_empty_and_can_be_written_and_read(anyone: Place) -> None:
    with opened("f", os.O_RDWR | os.O_CREAT) as fd:
        assert (os.fstat(fd).st_size, os.fstat(fd).st_nlink) == (0, 1)
        assert os.listdir(".").count("f") == 1
        assert os.write(fd, b"content") == 7
        assert os.pread(fd, 100, 0) == b"content"
    assert read_file("f") == b"content"
    assert os.stat("f").st_uid == os.geteuid()


def test_a_directory_that_is_missing_is_enoent_and_a_file_in_its_place_enotdir(
    anyone: Place,
) -> None:
    with fails(errno.ENOENT):
        os.open("missing/f", os.O_WRONLY | os.O_CREAT)
    with fails(errno.ENOENT):
        os.open("missing", os.O_RDONLY)
    with fails(errno.ENOTDIR):
        os.open("old/f", os.O_WRONLY | os.O_CREAT)
    with fails(errno.ENOENT):
        os.open("", os.O_WRONLY | os.O_CREAT)


def test_exclusive_makes_a_file_once_only(anyone: Place) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open("f", flags))
    for name in ("f", "old", "full", "link", "dangling"):
        with fails(errno.EEXIST):
            os.open(name, flags)
    assert not exists("nothing")


def test_one_of_many_processes_makes_a_file_exclusively(here: Place) -> None:
    def win() -> list[int]:
        won = []
        for number in range(20):
            try:
                os.close(os.open(f"prize{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                won.append(number)
            except FileExistsError:
                pass
        return won

    results = together(win, win, win, win)
    assert sorted(number for won in results for number in won) == list(range(20))


def test_creat_follows_a_link_to_what_is_not_there_yet(anyone: Place) -> None:
    os.close(os.open("dangling", os.O_WRONLY | os.O_CREAT))
    assert os.lstat("nothing").st_size == 0
    assert os.readlink("dangling") == "nothing"


def test_trunc_empties_a_file_and_leaves_its_inode_mode_and_owner(name: str) -> None:
    before = os.stat(name)
    with opened(name, os.O_WRONLY | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
    after = os.stat(name)
    assert read_file(name) == b""
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert after.st_mtime_ns >= before.st_mtime_ns


def test_processes_with_a_file_open_see_it_emptied_and_written_by_another(
    here: Place, name: str
) -> None:
    with opened(name, os.O_RDONLY) as reader, contextlib.ExitStack() as stack:
        assert os.pread(reader, 10, 0) == OLD[:10]
        with here.may_refuse("a file of the source that is written while it is read"):
            writer = stack.enter_context(opened(name, os.O_WRONLY | os.O_TRUNC))
        for _ in range(2):
            assert (os.fstat(reader).st_size, os.pread(reader, 10, 0)) == (0, b"")
            os.pwrite(writer, b"new", 0)
            assert (os.fstat(reader).st_size, os.pread(reader, 10, 0)) == (3, b"new")
            os.ftruncate(writer, 0)


def test_processes_with_a_file_open_see_it_truncated_by_name(here: Place, name: str) -> None:
    with opened(name, os.O_RDONLY) as reader:
        assert os.pread(reader, 10, 0) == OLD[:10]
        with here.may_refuse("a file of the source that is written while it is read"):
            os.truncate(name, 5)
        assert (os.fstat(reader).st_size, os.pread(reader, 10, 0)) == (5, OLD[:5])


def test_a_reader_that_opened_before_the_first_write_sees_the_written_bytes(
    here: Place, name: str
) -> None:
    with opened(name, os.O_RDONLY) as reader, contextlib.ExitStack() as stack:
        with here.may_refuse("a file of the source that is written while it is read"):
            writer = stack.enter_context(opened(name, os.O_WRONLY))
        assert os.pread(reader, len(OLD) + 1, 0) == OLD
        os.pwrite(writer, b"CHANGED", 5000)
        assert os.pread(reader, 7, 5000) == b"CHANGED"
        assert (
            elsewhere(lambda: read_file(name)[4999:5008])
            == OLD[4999:5000] + b"CHANGED" + (OLD[5007:5008])
        )


def test_append_writes_at_the_end_wherever_the_position_is(name: str) -> None:
    with opened(name, os.O_RDWR | os.O_APPEND) as fd:
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"first")
        os.lseek(fd, 3, os.SEEK_SET)
        os.write(fd, b"second")
        assert os.lseek(fd, 0, os.SEEK_CUR) == len(OLD) + 11
    assert read_file(name) == OLD + b"firstsecond"


def test_processes_that_append_at_once_lose_nothing_and_mix_nothing(here: Place) -> None:
    count, width = 100, 64

    def append(letter: bytes) -> None:
        with opened("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
            for number in range(count):
                line = (letter + b"%05d" % number).ljust(width - 1, letter) + b"\n"
                assert os.write(fd, line) == width

    together(*(lambda letter=letter: append(letter) for letter in (b"a", b"b", b"c")))
    content = read_file("log")
    lines = content.splitlines()
    assert len(content) == 3 * count * width
    for letter in (b"a", b"b", b"c"):
        own = [line for line in lines if line.startswith(letter)]
        assert own == [(letter + b"%05d" % n).ljust(width - 1, letter) for n in range(count)]


def test_calls_that_the_descriptor_was_not_opened_for_are_ebadf(name: str) -> None:
    with opened(name, os.O_RDONLY) as fd, fails(errno.EBADF):
        os.write(fd, b"x")
    with opened(name, os.O_RDONLY) as fd, fails(errno.EINVAL, errno.EBADF):
        os.ftruncate(fd, 0)
    with opened(name, os.O_WRONLY) as fd, fails(errno.EBADF):
        os.read(fd, 1)
    assert read_file(name) == OLD


def test_directory_flag_takes_directories_alone_and_none_is_opened_to_be_written(
    anyone: Place,
) -> None:
    with opened("full", os.O_RDONLY | os.O_DIRECTORY) as fd, fails(errno.EISDIR):
        os.read(fd, 1)
    with fails(errno.ENOTDIR):
        os.open("old", os.O_RDONLY | os.O_DIRECTORY)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_CREAT):
        with fails(errno.EISDIR):
            os.open("full", flags)


def test_nofollow_opens_no_link(anyone: Place) -> None:
    os.symlink("full", "to full")
    for name in ("link", "dangling", "to full"):
        with fails(errno.ELOOP):
            os.open(name, os.O_RDONLY | os.O_NOFOLLOW)
    with fails(errno.ENOTDIR, errno.ELOOP):
        os.open("to full", os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    with opened("to full/inner", os.O_RDONLY | os.O_NOFOLLOW) as fd:
        assert os.read(fd, 10) == b"inner"


def test_a_file_without_a_name_can_be_given_one_where_there_are_such(here: Place) -> None:
    with here.may_refuse("tmpfile"):
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, b"nameless")
    # With a directory named, or Python would ask for a name of the link in /proc.
    os.link(f"/proc/self/fd/{fd}", "named", src_dir_fd=fd, follow_symlinks=True)
    os.close(fd)
    assert read_file("named") == b"nameless"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_modes_are_those_asked_for_less_the_mask(here: Place, mask: int) -> None:
    os.umask(mask)
    os.close(os.open("f", os.O_WRONLY | os.O_CREAT, 0o7777))
    os.mkdir("d", 0o1777)
    os.mkfifo("p", 0o666)
    assert (mode_of("f"), mode_of("d"), mode_of("p")) == (
        0o7777 & ~mask,
        0o1777 & ~mask,
        0o666 & ~mask,
    )


def test_a_file_made_without_write_permission_is_writable_by_its_maker(
    anyone: Place,
) -> None:
    with opened("f", os.O_WRONLY | os.O_CREAT, 0o400) as fd:
        os.write(fd, b"once")
    assert read_file("f") == b"once"
    assert mode_of("f") == 0o400


@needs_root
def test_entries_made_in_a_setgid_directory_get_its_group_and_directories_the_bit(
    here: Place,
) -> None:
    os.mkdir("shared")
    os.chown("shared", -1, 1234)
    os.chmod("shared", 0o2777)
    os.close(os.open("shared/f", os.O_WRONLY | os.O_CREAT, 0o644))
    os.mkdir("shared/d")
    os.symlink("x", "shared/l")
    os.mkfifo("shared/p")
    for name in ("f", "d", "l", "p"):
        assert os.lstat(f"shared/{name}").st_gid == 1234, name
    assert mode_of("shared/d") == 0o2755
    assert mode_of("shared/f") == 0o644

    def make() -> None:
        os.close(os.open("shared/of a user", os.O_WRONLY | os.O_CREAT, 0o2770))
        os.mkdir("shared/directory of a user")

    elsewhere(make, uid=USER)
    made = os.stat("shared/of a user")
    # A user that is not in the group may not make its programs.
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (USER, 1234, 0o750)
    assert mode_of("shared/directory of a user") == 0o2755


@needs_root
def test_in_a_sticky_directory_only_the_owner_removes_and_renames(here: Place) -> None:
    os.mkdir("tmp")
    os.chmod("tmp", 0o1777)
    write_file("tmp/of root", b"")
    os.mkdir("tmp/directory of root")

    def try_all() -> None:
        with fails(errno.EPERM):
            os.unlink("tmp/of root")
        with fails(errno.EPERM):
            os.rename("tmp/of root", "tmp/mine")
        with fails(errno.EPERM):
            os.rmdir("tmp/directory of root")
        write_file("tmp/of user", b"")
        with fails(errno.EPERM):
            os.rename("tmp/of user", "tmp/of root")
        os.rename("tmp/of user", "tmp/still of user")
        os.unlink("tmp/still of user")

    elsewhere(try_all, uid=USER)
    assert sorted(os.listdir("tmp")) == ["directory of root", "of root"]


@needs_root
def test_a_user_without_permission_gets_eacces_and_changes_nothing(here: Place) -> None:
    write_file("private", b"secret", 0o600)
    os.mkdir("closed", 0o700)
    write_file("closed/f", b"x")

    def try_all() -> None:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_TRUNC):
            with fails(errno.EACCES):
                os.open("private", flags)
        with fails(errno.EACCES):
            os.open("old", os.O_WRONLY)
        with fails(errno.EACCES):
            os.open("f", os.O_WRONLY | os.O_CREAT)
        for change in (os.unlink, os.rmdir, os.mkdir):
            with fails(errno.EACCES):
                change("closed/f")
        for change in (os.unlink, os.mkfifo):
            with fails(errno.EACCES, errno.EEXIST):
                change("old")
        with fails(errno.EACCES):
            os.rename("old", "mine")
        with fails(errno.EACCES, errno.EPERM):
            os.link("private", "mine")
        with fails(errno.EACCES):
            os.truncate("private", 0)
        with fails(errno.EPERM):
            os.chmod("private", 0o666)
        with fails(errno.EPERM):
            os.utime("private", (1, 1))
        with fails(errno.EACCES):
            os.utime("private")
        assert read_file("old") == OLD

    elsewhere(try_all, uid=USER)
    assert read_file("private") == b"secret"
    assert mode_of("private") == 0o600


def test_a_program_is_executed_and_cannot_be_written_meanwhile(here: Place) -> None:
    content = Path("/bin/sleep").read_bytes()
    write_file("program", content, 0o755)
    pid = os.posix_spawn("program", ["program", "100"], {})
    try:
        # Whether it is refused to write it is the kernel's matter, and nothing must break.
        with opened("program", os.O_RDONLY) as fd:
            assert os.pread(fd, 100, 0) == content[:100]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    with opened("program", os.O_WRONLY) as fd:
        os.write(fd, b"no program")


def test_fsync_of_files_and_directories_and_of_all_succeeds(name: str) -> None:
    with opened(name, os.O_RDWR) as fd:
        os.write(fd, b"x" * 100_000)
        os.fsync(fd)
        os.fdatasync(fd)
    for where in (name, ".", "full"):
        with opened(where, os.O_RDONLY) as fd:
            os.fsync(fd)
    assert len(read_file(name)) == 100_000


@pytest.mark.parametrize("flag", [os.O_SYNC, os.O_DSYNC])
def test_synchronous_writes_are_in_the_file(anyone: Place, flag: int) -> None:
    with opened("f", os.O_WRONLY | os.O_CREAT | flag) as fd:
        for number in range(3):
            os.write(fd, b"%d" % number)
    assert read_file("f") == b"012"


def test_a_file_can_be_opened_by_its_descriptor_and_without_any_right_by_path(
    anyone: Place,
) -> None:
    with opened("old", os.O_PATH) as fd:
        assert os.fstat(fd).st_size == len(OLD)
        with fails(errno.EBADF):
            os.read(fd, 1)
        with opened(f"/proc/self/fd/{fd}", os.O_RDWR) as again:
            assert os.read(again, 4) == OLD[:4]
