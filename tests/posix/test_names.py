"""Names: rename in all its cases, links, removal of open files, directories, unusual names."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import time

import pytest

from tests.posix.calls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    Child,
    Directory,
    elsewhere,
    exists,
    fails,
    opened,
    read_file,
    renameat2,
    together,
    write_file,
)
from tests.posix.conftest import MANY, NAMES, OLD, Place

# -- rename ----------------------------------------------------------------------------------------


def test_rename_moves_a_file_with_its_bytes_and_number(name: str) -> None:
    before = os.stat(name)
    os.rename(name, "moved")
    assert not exists(name)
    after = os.stat("moved")
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    assert read_file("moved") == OLD
    os.rename("moved", "full/deep/moved")
    assert read_file("full/deep/moved") == OLD
    assert exists("full/deep/moved") and not exists("moved")


def test_rename_replaces_a_file_and_the_old_one_lives_while_it_is_open(name: str) -> None:
    write_file("newer", b"newer")
    with opened(name, os.O_RDWR) as fd:
        os.rename("newer", name)
        assert (os.fstat(fd).st_nlink, os.pread(fd, len(OLD) + 1, 0)) == (0, OLD)
        os.pwrite(fd, b"nobody sees it", 0)
        assert read_file(name) == b"newer"
        assert os.pread(fd, 14, 0) == b"nobody sees it"
    assert not exists("newer")
    assert os.stat(name).st_nlink == 1


def test_rename_of_a_file_over_a_directory_and_the_other_way_is_refused(anyone: Place) -> None:
    with fails(errno.EISDIR):
        os.rename("old", "empty")
    with fails(errno.EISDIR):
        os.rename("old", "full")
    with fails(errno.ENOTDIR):
        os.rename("empty", "old")
    with fails(errno.ENOTDIR):
        os.rename("full", "link")
    with fails(errno.ENOTDIR):
        os.rename("old/", "other")
    assert read_file("old") == OLD


def test_rename_of_a_directory_replaces_an_empty_one_only(anyone: Place, full: str) -> None:
    os.mkdir("without anything")
    with fails(errno.ENOTEMPTY, errno.EEXIST):
        os.rename("without anything", full)
    number = os.stat(full).st_ino
    with anyone.may_refuse("a directory of the source that is renamed"):
        os.rename(full, "empty")
    assert os.stat("empty").st_ino == number
    assert not exists(full)
    assert read_file("empty/inner") == b"inner"
    assert sorted(os.listdir("empty")) == ["deep", "inner"]


def test_entries_below_a_renamed_directory_move_with_it_and_stay_usable(
    anyone: Place, full: str
) -> None:
    write_file(f"{full}/deep/new", b"new")
    with opened(f"{full}/deep/new", os.O_RDWR) as fd, opened(f"{full}/deep", os.O_RDONLY) as deep:
        with anyone.may_refuse("a directory of the source that is renamed"):
            os.rename(full, "moved")
        os.mkdir(full)
        os.write(fd, b"NEW")
        assert read_file("moved/deep/new") == b"NEW"
        os.close(os.open("later", os.O_WRONLY | os.O_CREAT, dir_fd=deep))
    assert sorted(os.listdir("moved/deep")) == ["later", "new"]
    assert read_file("moved/inner") == b"inner"
    assert os.listdir(full) == []
    os.rename("moved", full)
    assert read_file(f"{full}/deep/new") == b"NEW"


def test_a_directory_moves_between_directories_and_its_dot_dot_with_it(
    anyone: Place, full: str
) -> None:
    os.mkdir("target")
    links = os.stat(".").st_nlink
    with anyone.may_refuse("a directory of the source that is renamed"):
        os.rename(full, "target/full")
    assert os.stat("target/full/..").st_ino == os.stat("target").st_ino
    # One less here and one more there, where links of directories are counted at all.
    if links > 1:
        assert (os.stat(".").st_nlink, os.stat("target").st_nlink) == (links - 1, 3)


def test_rename_into_its_own_subtree_is_einval(full: str) -> None:
    for target in ("deep/full", "full", "deep"):
        with fails(errno.EINVAL, errno.ENOTEMPTY):
            os.rename(full, f"{full}/{target}")
    with fails(errno.ENOTEMPTY, errno.EEXIST, errno.EINVAL):
        os.rename(f"{full}/deep", full)
    with fails(errno.EBUSY, errno.EINVAL):
        os.rename(f"{full}/.", "other")
    assert sorted(os.listdir(full)) == ["deep", "inner"]


def test_a_directory_of_the_source_is_moved_by_mv_whatever_that_takes(anyone: Place) -> None:
    subprocess.run(["mv", "full", "moved"], check=True)
    assert not exists("full")
    assert read_file("moved/inner") == b"inner"
    assert os.listdir("moved/deep") == []


def test_rename_between_two_names_of_one_file_does_nothing(name: str) -> None:
    os.link(name, "second")
    os.rename(name, "second")
    os.rename(name, name)
    assert os.stat(name).st_nlink == 2
    assert os.path.samefile(name, "second")
    os.rename("twin", "other twin")
    assert os.stat("twin").st_nlink == 2


def test_rename_over_one_of_two_names_leaves_the_other(anyone: Place) -> None:
    os.rename("old", "twin")
    assert read_file("twin") == OLD
    assert read_file("other twin") == b"twin"
    assert os.stat("other twin").st_nlink == 1


def test_rename_of_links_moves_the_links(anyone: Place) -> None:
    os.rename("dangling", "moved")
    os.rename("link", "moved")
    assert os.readlink("moved") == "old"
    assert read_file("old") == OLD
    os.rename("moved", "old")
    assert os.readlink("old") == "old"
    with fails(errno.ELOOP):
        read_file("old")


def test_rename_of_what_is_not_there_is_enoent(anyone: Place) -> None:
    with fails(errno.ENOENT):
        os.rename("missing", "old")
    with fails(errno.ENOENT):
        os.rename("old", "missing/old")
    with fails(errno.ENOTDIR):
        os.rename("old", "twin/old")
    assert read_file("old") == OLD


def test_noreplace_replaces_nothing(anyone: Place) -> None:
    for target in ("twin", "full", "link", "dangling"):
        with fails(errno.EEXIST):
            renameat2("old", target, RENAME_NOREPLACE)
    renameat2("old", "free", RENAME_NOREPLACE)
    assert read_file("free") == OLD
    assert not exists("old")


def test_exchange_exchanges_where_it_can_be_had(here: Place) -> None:
    with here.may_refuse("exchange"):
        renameat2("old", "full", RENAME_EXCHANGE)
    assert read_file("full") == OLD
    assert read_file("old/inner") == b"inner"
    with fails(errno.ENOENT):
        renameat2("old", "missing", RENAME_EXCHANGE)


def test_unknown_flags_and_flags_that_exclude_each_other_are_einval(anyone: Place) -> None:
    for flags in (1 << 10, RENAME_NOREPLACE | RENAME_EXCHANGE):
        with fails(errno.EINVAL):
            renameat2("old", "twin", flags)
    assert read_file("old") == OLD


def test_readers_of_a_file_that_is_replaced_again_and_again_see_whole_versions_only(
    here: Place,
) -> None:
    size, versions = 50_000, 120
    write_file("target", b"a" * size)

    def write() -> None:
        for number in range(versions):
            write_file("staged", bytes([ord("a") + number % 26]) * (size + number))
            os.rename("staged", "target")
        write_file("over", b"")

    def read() -> int:
        seen = set()
        while not exists("over"):
            content = read_file("target")
            assert content == content[:1] * len(content)
            number = len(content) - size
            assert 0 <= number < versions and content[0] == ord("a") + number % 26
            seen.add(number)
        return len(seen)

    *readers, _ = together(read, read, write)
    assert all(readers)
    assert len(read_file("target")) == size + versions - 1


def test_two_processes_that_rename_the_same_names_lose_nothing(here: Place) -> None:
    def rename(names: list[str]) -> None:
        for turn in range(200):
            with contextlib.suppress(FileNotFoundError):
                os.rename(names[turn % len(names)], names[(turn + 1) % len(names)])

    together(lambda: rename(["old", "a", "b"]), lambda: rename(["b", "old", "a"]))
    (left,) = [name for name in ("old", "a", "b") if exists(name)]
    assert read_file(left) == OLD


# -- links -----------------------------------------------------------------------------------------


def test_names_of_one_file_share_everything_and_are_counted(name: str) -> None:
    before = os.stat(name)
    os.link(name, "second")
    os.link("second", "full/deep/third")
    with opened("second", os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"more")
    os.chmod("full/deep/third", 0o600)
    for path in (name, "second", "full/deep/third"):
        status = os.stat(path)
        assert (status.st_ino, status.st_nlink) == (before.st_ino, 3)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert read_file(path) == OLD + b"more"
    os.unlink(name)
    assert os.stat("second").st_nlink == 2
    os.rename("second", "full/second")
    os.unlink("full/deep/third")
    assert os.stat("full/second").st_nlink == 1
    assert read_file("full/second") == OLD + b"more"


def test_a_file_of_the_source_with_two_names_is_written_by_either(anyone: Place) -> None:
    write_file("twin", b"written")
    assert read_file("other twin") == b"written"
    assert os.path.samefile("twin", "other twin")
    os.unlink("twin")
    assert os.stat("other twin").st_nlink == 1
    assert read_file("other twin") == b"written"


def test_a_file_of_the_source_that_lost_one_of_its_names_is_changed_by_the_other(
    anyone: Place,
) -> None:
    os.unlink("other twin")
    # Its drain changes the file at the source, which is still the one that it was.
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and exists(anyone.at_source("other twin")):
        time.sleep(0.02)
    os.chmod("twin", 0o600)
    assert read_file("twin") == b"twin"
    os.rename("twin", "full/twin")
    assert os.stat("full/twin").st_nlink == 1


def test_link_refuses_directories_what_exists_and_what_is_missing(anyone: Place) -> None:
    with fails(errno.EPERM):
        os.link("full", "second")
    for target in ("twin", "full", "dangling"):
        with fails(errno.EEXIST):
            os.link("old", target)
    with fails(errno.ENOENT):
        os.link("missing", "second")
    with fails(errno.ENOENT):
        os.link("old", "missing/second")
    assert os.stat("old").st_nlink == 1


def test_a_link_to_a_symbolic_link_is_a_name_of_the_link(anyone: Place) -> None:
    os.link("dangling", "second", follow_symlinks=False)
    assert os.readlink("second") == "nothing"
    assert os.lstat("second").st_ino == os.lstat("dangling").st_ino
    assert os.lstat("second").st_nlink == 2


@pytest.mark.parametrize("length", [1, 255, 1000, 4095])
def test_links_hold_targets_of_every_length(anyone: Place, length: int) -> None:
    target = "x" * length
    os.symlink(target, "long")
    assert os.readlink("long") == target
    assert os.lstat("long").st_size == length
    assert stat.S_ISLNK(os.lstat("long").st_mode)


def test_a_target_that_is_too_long_or_empty_is_refused(anyone: Place) -> None:
    with fails(errno.ENAMETOOLONG):
        os.symlink("x" * 4096, "long")
    with fails(errno.ENOENT):
        os.symlink("", "empty target")
    with fails(errno.EEXIST):
        os.symlink("x", "old")
    with fails(errno.EINVAL):
        os.readlink("old")
    assert not exists("long")


def test_links_are_followed_within_the_place_and_cycles_are_eloop(anyone: Place) -> None:
    os.symlink("second", "first")
    os.symlink("first", "second")
    os.symlink("full/deep/..", "around")
    assert read_file("around/inner") == b"inner"
    assert read_file("link") == OLD
    for call in (os.stat, os.listdir, read_file):
        with fails(errno.ELOOP):
            call("first")
    with fails(errno.ENOENT):
        os.stat("dangling")
    for number in range(45):
        os.symlink("old" if number == 0 else f"chain{number - 1}", f"chain{number}")
    assert read_file("chain30") == OLD
    with fails(errno.ELOOP):
        read_file("chain44")


# -- removal ---------------------------------------------------------------------------------------


def test_a_removed_file_lives_as_long_as_it_is_open(name: str) -> None:
    with opened(name, os.O_RDWR) as fd:
        os.unlink(name)
        assert not exists(name)
        with fails(errno.ENOENT):
            os.open(name, os.O_RDONLY)
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, len(OLD) + 1, 0) == OLD
        os.pwrite(fd, b"still", 0)
        os.ftruncate(fd, 100)
        assert os.pread(fd, 200, 0) == b"still" + OLD[5:100]
        os.fchmod(fd, 0o600)
        os.fsync(fd)
        status = os.fstat(fd)
        assert (status.st_size, stat.S_IMODE(status.st_mode)) == (100, 0o600)
        # The name is free for another.
        write_file(name, b"another")
        assert os.fstat(fd).st_ino != os.stat(name).st_ino
        assert os.pread(fd, 5, 0) == b"still"
    assert read_file(name) == b"another"


def test_a_removed_file_that_was_not_written_is_read_to_its_end(here: Place) -> None:
    with opened("old", os.O_RDONLY) as fd:
        os.unlink("old")
        assert os.read(fd, 100) == OLD[:100]
        assert elsewhere(lambda: os.pread(fd, len(OLD), 0)) == OLD
        assert os.fstat(fd).st_nlink == 0


def test_unlink_and_rmdir_refuse_each_other_s(anyone: Place) -> None:
    with fails(errno.EISDIR, errno.EPERM):
        os.unlink("empty")
    with fails(errno.ENOTDIR):
        os.rmdir("old")
    with fails(errno.ENOTDIR):
        os.rmdir("link")
    with fails(errno.ENOTEMPTY, errno.EEXIST):
        os.rmdir("full")
    with fails(errno.EINVAL):
        os.rmdir("empty/.")
    with fails(errno.ENOTEMPTY, errno.EEXIST):
        os.rmdir("full/deep/..")
    for call in (os.unlink, os.rmdir):
        with fails(errno.ENOENT):
            call("missing")
    os.rmdir("empty")
    assert not exists("empty")


def test_unlink_of_a_link_leaves_its_target(anyone: Place) -> None:
    os.unlink("link")
    os.unlink("dangling")
    assert read_file("old") == OLD


def test_a_name_can_be_something_else_after_it_was_removed(anyone: Place) -> None:
    for _ in range(3):
        os.unlink("old")
        os.mkdir("old")
        write_file("old/f", b"in a directory")
        os.unlink("old/f")
        os.rmdir("old")
        os.symlink("twin", "old")
        assert read_file("old") == b"twin"
        os.unlink("old")
        os.mkfifo("old")
        os.unlink("old")
        write_file("old", b"again")
    assert read_file("old") == b"again"
    os.rename("full/inner", "was in full")
    os.rmdir("full/deep")
    os.rmdir("full")
    os.rename("was in full", "full")
    assert read_file("full") == b"inner"


def test_a_removed_directory_that_is_open_takes_nothing(anyone: Place) -> None:
    with opened("empty", os.O_RDONLY) as fd:
        os.rmdir("empty")
        with fails(errno.ENOENT):
            os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        with fails(errno.ENOENT):
            os.mkdir("d", dir_fd=fd)
        assert os.listdir(fd) == []
        assert stat.S_ISDIR(os.fstat(fd).st_mode)
        os.fchmod(fd, 0o700)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o700


def test_a_removed_fifo_that_is_open_has_attributes(anyone: Place) -> None:
    os.mkfifo("pipe")
    with opened("pipe", os.O_RDWR) as fd:
        os.unlink("pipe")
        assert os.fstat(fd).st_nlink == 0
        os.write(fd, b"still a pipe")
        assert os.read(fd, 100) == b"still a pipe"


def test_a_tree_of_the_source_is_removed_whole_and_made_again(anyone: Place) -> None:
    os.unlink("full/inner")
    os.rmdir("full/deep")
    os.rmdir("full")
    assert not exists("full")
    os.mkdir("full")
    assert os.listdir("full") == []
    with fails(errno.ENOENT):
        os.stat("full/inner")
    os.mkdir("full/deep")
    assert os.listdir("full") == ["deep"]
    assert os.listdir("full/deep") == []


# -- directories -----------------------------------------------------------------------------------


def test_directories_know_their_own_and_have_times(anyone: Place) -> None:
    before = os.stat("empty")
    os.utime("empty", ns=(0, 0))
    os.mkdir("empty/d")
    made = os.stat("empty")
    assert made.st_mtime_ns > 0
    assert made.st_ino == before.st_ino
    if before.st_nlink > 1:
        assert made.st_nlink == before.st_nlink + 1
    os.utime("empty", ns=(0, 0))
    os.rmdir("empty/d")
    assert os.stat("empty").st_mtime_ns > 0
    assert os.stat("empty").st_nlink == before.st_nlink
    for change in (
        lambda: write_file("empty/f", b""),
        lambda: os.link("empty/f", "empty/g"),
        lambda: os.rename("empty/g", "empty/h"),
        lambda: os.symlink("x", "empty/l"),
        lambda: os.unlink("empty/h"),
    ):
        os.utime("empty", ns=(0, 0))
        change()
        assert os.stat("empty").st_mtime_ns > 0
    os.utime("empty", ns=(0, 0))
    os.chmod("empty/f", 0o600)
    write_file("empty/f", b"bytes are not the directory's")
    assert os.stat("empty").st_mtime_ns == 0


def test_mkdir_refuses_what_is_there(anyone: Place) -> None:
    for name in ("old", "full", "link", "dangling", "."):
        with fails(errno.EEXIST):
            os.mkdir(name)
    with fails(errno.ENOENT):
        os.mkdir("missing/d")
    with fails(errno.ENOTDIR):
        os.mkdir("old/d")


def test_many_processes_make_and_remove_in_one_directory_at_once(here: Place) -> None:
    os.mkdir("busy")

    def work(number: int) -> None:
        for turn in range(40):
            path = f"busy/{number}-{turn}"
            write_file(path, b"%d" % turn)
            os.rename(path, f"{path}-done")
            if turn % 2:
                os.unlink(f"{path}-done")

    together(*(lambda number=number: work(number) for number in range(3)))
    expected = {f"{number}-{turn}-done" for number in range(3) for turn in range(0, 40, 2)}
    assert sorted(os.listdir("busy")) == sorted(expected)


def test_a_large_directory_is_listed_once_each_while_names_come_and_go(here: Place) -> None:
    here_fd = os.open(f"../{MANY}", os.O_RDONLY)
    listed = os.listdir(here_fd)
    stay = {name for name in listed if not name.startswith("new") and int(name) % 10}
    assert len(listed) == len(set(listed)) and len(stay) == NAMES * 9 // 10
    directory = Directory(f"../{MANY}")
    seen: list[bytes] = [name for _ in range(100) if (name := directory.next())]
    gone = [f"{number:05}" for number in range(0, NAMES, 100)]
    for number, name in enumerate(gone):
        os.unlink(name, dir_fd=here_fd)
        os.symlink("x", f"new{number}", dir_fd=here_fd)
        seen += [name for _ in range(37) if (name := directory.next())]
    seen += directory.rest()
    directory.close()
    # Entries made and removed meanwhile may be seen or not, all others exactly once.
    assert len(seen) == len(set(seen))
    assert stay <= {os.fsdecode(name) for name in seen}
    after = os.listdir(here_fd)
    assert len(after) == len(set(after)) == NAMES
    assert not set(gone) & set(after)
    for number, name in enumerate(gone):
        os.unlink(f"new{number}", dir_fd=here_fd)
        os.symlink("x", name, dir_fd=here_fd)
    assert sorted(os.listdir(here_fd)) == sorted(f"{number:05}" for number in range(NAMES))
    os.close(here_fd)


def test_everything_in_a_directory_can_be_removed_while_it_is_listed(anyone: Place) -> None:
    os.mkdir("d")
    for number in range(500):
        os.symlink("x", f"d/{number}")
    directory = Directory("d")
    removed = 0
    while name := directory.next():
        os.unlink(b"d/" + name)
        removed += 1
    directory.close()
    assert removed == 500
    os.rmdir("d")


def test_a_position_in_a_directory_is_found_again(anyone: Place) -> None:
    os.mkdir("d")
    for number in range(300):
        os.symlink("x", f"d/{number}")
    directory = Directory("d")
    places: list[tuple[int, bytes]] = []
    while True:
        position = directory.tell()
        name = directory.next()
        if name is None:
            break
        places.append((position, name))
    assert len({name for _, name in places}) == 300
    for position, name in places[::-7]:
        directory.seek(position)
        assert directory.next() == name
    directory.seek(places[150][0])
    assert directory.rest() == [name for _, name in places[150:]]
    os.symlink("x", "d/new")
    directory.rewind()
    assert sorted(directory.rest()) == sorted([*(name for _, name in places), b"new"])
    directory.close()


def test_a_listing_tells_kinds_and_numbers_as_lstat_does(anyone: Place) -> None:
    os.mkfifo("pipe")
    write_file("new", b"")
    with os.scandir(".") as entries:
        for entry in entries:
            status = os.lstat(entry.name)
            assert entry.inode() == status.st_ino, entry.name
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)
            assert entry.is_file(follow_symlinks=False) == stat.S_ISREG(status.st_mode)
            assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)


# -- what a name may hold --------------------------------------------------------------------------


def test_a_name_may_have_255_bytes_and_not_one_more(anyone: Place) -> None:
    name, longer = "n" * 255, "n" * 256
    write_file(name, b"long")
    os.link(name, "m" * 255)
    os.rename(name, "o" * 255)
    os.mkdir("d" * 255)
    assert read_file("o" * 255) == b"long"
    for call in (
        lambda: os.stat(longer),
        lambda: os.open(longer, os.O_WRONLY | os.O_CREAT),
        lambda: os.mkdir(longer),
        lambda: os.symlink("x", longer),
        lambda: os.link("old", longer),
        lambda: os.rename("old", longer),
        lambda: os.unlink(longer),
        lambda: os.mkfifo(longer),
    ):
        with fails(errno.ENAMETOOLONG):
            call()


def test_a_name_may_hold_every_byte_but_two(anyone: Place) -> None:
    os.mkdir("bytes")
    names = [bytes([byte]) + b"x" for byte in range(1, 256) if byte != ord("/")]
    for name in names:
        write_file(b"bytes/" + name, name)
    assert sorted(map(os.fsencode, os.listdir("bytes"))) == sorted(names)
    for name in names:
        assert read_file(b"bytes/" + name) == name


def test_names_that_trouble_others_are_names_like_any(anyone: Place) -> None:
    for name in (
        *(".hidden", "trailing.", "...", " ", "a ", "-rf", "a\nb", "Ünï→cødé🚀", "e\u0301"),
        *(
            "con",
            "CASE",
            "case",
            "*",
            "\\",
            '"',
            "'",
            "%s",
            "$HOME",
            ".part",
            "monarch-1-1.part",
            ".monarch-1-1",
        ),
    ):
        write_file(name, b"it")
        os.mkdir(f"{name}.d")
        os.rename(name, f"{name}.d/{name}")
        os.symlink(name, f"{name}.d/link to {name.strip()}")
        assert sorted(os.listdir(f"{name}.d")) == sorted([name, f"link to {name.strip()}"])
        assert read_file(f"{name}.d/link to {name.strip()}") == b"it"


def test_names_that_differ_in_case_or_composition_are_different_names(anyone: Place) -> None:
    for name in ("name", "NAME", "\u00e9", "e\u0301"):
        write_file(name, name.encode())
    for name in ("name", "NAME", "\u00e9", "e\u0301"):
        assert read_file(name) == name.encode()


def test_paths_longer_than_the_kernel_takes_at_once_are_reached_step_by_step(
    here: Place,
) -> None:
    part = "p" * 250
    fds = [os.open(".", os.O_RDONLY)]
    for _ in range(20):
        os.mkdir(part, dir_fd=fds[-1])
        fds.append(os.open(part, os.O_RDONLY, dir_fd=fds[-1]))
    fd = os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fds[-1])
    os.write(fd, b"deep")
    os.close(fd)
    os.rename("f", "g", src_dir_fd=fds[-1], dst_dir_fd=fds[-2])
    fd = os.open("g", os.O_RDONLY, dir_fd=fds[-2])
    assert os.read(fd, 10) == b"deep"
    for each in (*fds, fd):
        os.close(each)
    with fails(errno.ENAMETOOLONG):
        os.stat("/".join([part] * 20))


# -- fifos and devices -----------------------------------------------------------------------------


def test_two_processes_talk_through_a_fifo(anyone: Place) -> None:
    os.mkfifo("pipe", 0o600)
    assert stat.S_ISFIFO(os.lstat("pipe").st_mode)

    def send() -> None:
        with opened("pipe", os.O_WRONLY) as fd:
            os.write(fd, b"through the pipe")

    child = Child(send)
    with opened("pipe", os.O_RDONLY) as fd:
        assert os.read(fd, 100) == b"through the pipe"
    child.result()
    os.rename("pipe", "moved")
    os.unlink("moved")
    with fails(errno.EEXIST):
        os.mkfifo("old")


def test_mknod_makes_regular_files_and_devices_only_where_they_may_be(here: Place) -> None:
    os.mknod("regular", stat.S_IFREG | 0o640)
    assert stat.S_IMODE(os.lstat("regular").st_mode) == 0o640
    write_file("regular", b"written")
    assert read_file("regular") == b"written"
    if os.geteuid() == 0:
        with here.may_refuse("devices"):
            os.mknod("null", stat.S_IFCHR | 0o600, os.makedev(1, 3))


def test_a_socket_is_a_name(anyone: Place) -> None:
    os.mknod("socket", stat.S_IFSOCK | 0o600)
    assert stat.S_ISSOCK(os.lstat("socket").st_mode)
    with fails(errno.ENXIO):
        os.open("socket", os.O_RDONLY)


def test_changes_by_one_process_are_seen_by_another_at_once(here: Place) -> None:
    with fails(errno.ENOENT):
        os.stat("f")

    def make() -> float:
        write_file("f", b"made")
        return time.monotonic()

    elsewhere(make)
    assert read_file("f") == b"made"
    elsewhere(lambda: os.unlink("f"))
    with fails(errno.ENOENT):
        os.stat("f")
