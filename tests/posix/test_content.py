"""Bytes that are written anywhere, truncated, left out, mapped and copied, and their readers."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.posix.calls import (
    KEEP_SIZE,
    PUNCH_HOLE,
    ZERO_RANGE,
    Child,
    elsewhere,
    exists,
    fails,
    fallocate,
    opened,
    read_file,
    together,
    write_file,
)
from tests.posix.conftest import OLD, Place

PAGE = mmap.PAGESIZE


@contextmanager
def mapped(fd: int, length: int = 0) -> Iterator[mmap.mmap]:
    pages = mmap.mmap(fd, length)
    try:
        yield pages
    finally:
        pages.close()


# -- writing and cutting ---------------------------------------------------------------------------


def test_writes_go_to_their_offset_and_change_nothing_else(name: str) -> None:
    expected = bytearray(OLD)
    with opened(name, os.O_RDWR) as fd:
        for offset, content in (
            (0, b"start"),
            (5000, b"x" * 5000),
            (4095, b"ab"),
            (14_995, b"end"),
        ):
            assert os.pwrite(fd, content, offset) == len(content)
            expected[offset : offset + len(content)] = content
            assert os.pread(fd, len(content), offset) == content
        assert os.pwritev(fd, [b"one", b"", b"two"], 7000) == 6
        expected[7000:7006] = b"onetwo"
    assert read_file(name) == expected


def test_positions_belong_to_the_open_file_and_are_shared_with_inheriting_processes(
    name: str,
) -> None:
    with opened(name, os.O_RDWR) as fd, opened(name, os.O_RDWR) as other:
        assert os.read(fd, 100) == OLD[:100]
        assert elsewhere(lambda: os.read(fd, 100)) == OLD[100:200]
        assert os.lseek(fd, 0, os.SEEK_CUR) == 200
        assert os.lseek(other, 0, os.SEEK_CUR) == 0
        assert os.lseek(fd, -10, os.SEEK_END) == len(OLD) - 10
        again = os.dup(fd)
        assert os.read(again, 100) == OLD[-10:]
        os.close(again)
        assert os.read(fd, 1) == b""
        with fails(errno.EINVAL):
            os.lseek(fd, -1, os.SEEK_SET)


def test_a_write_beyond_the_end_leaves_zeros_between(name: str) -> None:
    with opened(name, os.O_RDWR) as fd:
        os.pwrite(fd, b"far", 1_000_000)
        assert os.fstat(fd).st_size == 1_000_003
        assert os.pread(fd, 100, 500_000) == bytes(100)
        assert os.pread(fd, 10, len(OLD) - 5) == OLD[-5:] + bytes(5)
    assert read_file(name) == OLD + bytes(1_000_000 - len(OLD)) + b"far"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 14_999])
def test_truncated_bytes_are_zeros_when_the_file_grows_again(name: str, size: int) -> None:
    os.truncate(name, size)
    assert read_file(name) == OLD[:size]
    os.truncate(name, len(OLD) + 1000)
    assert read_file(name) == OLD[:size] + bytes(len(OLD) + 1000 - size)
    assert os.stat(name).st_size == len(OLD) + 1000


def test_a_file_is_cut_through_its_descriptor_while_others_have_it_open(name: str) -> None:
    with opened(name, os.O_RDWR) as fd, opened(name, os.O_RDONLY) as reader:
        os.lseek(reader, 5000, os.SEEK_SET)
        os.ftruncate(fd, 5010)
        assert os.read(reader, 100) == OLD[5000:5010]
        assert os.read(reader, 100) == b""
        os.ftruncate(fd, 6000)
        assert os.read(reader, 2000) == bytes(990)
        os.ftruncate(fd, 0)
        # The writer's position stays behind the end.
        os.lseek(fd, 100, os.SEEK_SET)
        os.write(fd, b"x")
        assert os.pread(reader, 200, 0) == bytes(100) + b"x"


def test_truncate_refuses_what_cannot_be(anyone: Place) -> None:
    with fails(errno.EISDIR):
        os.truncate("full", 0)
    with fails(errno.ENOENT):
        os.truncate("missing", 0)
    with fails(errno.EINVAL):
        os.truncate("old", -1)
    assert read_file("old") == OLD


def test_a_limit_on_file_sizes_holds(anyone: Place) -> None:
    import resource

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with opened("f", os.O_WRONLY | os.O_CREAT) as fd:
            assert os.pwrite(fd, b"x" * 2000, 9000) == 1000
            with fails(errno.EFBIG):
                os.pwrite(fd, b"x", 10_000)
            with fails(errno.EFBIG):
                os.ftruncate(fd, 10_001)

    elsewhere(write)
    assert os.stat("f").st_size == 10_000


def test_a_large_file_is_written_in_large_and_small_pieces(here: Place) -> None:
    dice = random.Random(1)
    content = dice.randbytes(5 << 20)
    with opened("large", os.O_RDWR | os.O_CREAT) as fd:
        offset = 0
        while offset < len(content):
            size = dice.choice((1, 511, 4096, 70_000, 1 << 20, 2 << 20))
            offset += os.write(fd, content[offset : offset + size])
        assert os.pread(fd, 100_000, 1_234_567) == content[1_234_567:1_334_567]
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert read_file("large") == content


def test_a_write_at_an_offset_beyond_4_gib_is_found_there(here: Place) -> None:
    with opened("sparse", os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"far away", (5 << 30) + 3)
        os.pwrite(fd, b"near", 0)
        assert os.pread(fd, 20, (5 << 30) + 3) == b"far away"
        assert os.fstat(fd).st_size == (5 << 30) + 11
        assert os.fstat(fd).st_blocks * 512 < 1 << 30
        os.ftruncate(fd, 10)
    assert read_file("sparse") == b"near" + bytes(6)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_direct_reads_and_writes_see_what_others_wrote(here: Place, flags: int) -> None:
    write_file("f", b"a" * 8192)
    with here.may_refuse("direct"):
        fd = os.open("f", flags | os.O_DIRECT)
    with mmap.mmap(-1, 4096) as block, opened("f", os.O_RDWR) as other:
        assert os.preadv(fd, [block], 4096) == 4096
        assert block[:] == b"a" * 4096
        os.pwrite(other, b"b" * 4096, 0)
        assert os.preadv(fd, [block], 0) == 4096
        assert block[:] == b"b" * 4096
        if flags == os.O_RDWR:
            block[:] = b"c" * 4096
            assert os.pwritev(fd, [block], 4096) == 4096
            assert os.pread(other, 8192, 0) == b"b" * 4096 + b"c" * 4096
    os.close(fd)


# -- holes and space -------------------------------------------------------------------------------


def test_holes_and_data_are_reported_correctly(here: Place) -> None:
    hole = 1 << 20
    with opened("f", os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"x" * 4096, hole)
        os.ftruncate(fd, 3 * hole)
        os.fsync(fd)
        size = 3 * hole
        data = os.lseek(fd, 0, os.SEEK_DATA)
        # What it calls a hole is zeros; what it calls data may be.
        assert data <= hole
        assert os.lseek(fd, hole, os.SEEK_DATA) == hole
        end = os.lseek(fd, hole, os.SEEK_HOLE)
        assert hole + 4096 <= end <= size
        assert os.lseek(fd, size - 1, os.SEEK_HOLE) in (size - 1, size)
        if end < size:
            with fails(errno.ENXIO):
                os.lseek(fd, end, os.SEEK_DATA)
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            with fails(errno.ENXIO):
                os.lseek(fd, size, whence)


def test_room_is_allocated_and_the_file_grows_only_if_asked(here: Place) -> None:
    with opened("f", os.O_RDWR | os.O_CREAT) as fd:
        with here.may_refuse("fallocate"):
            fallocate(fd, 0, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000
        assert os.fstat(fd).st_blocks * 512 >= 100_000
        assert os.pread(fd, 10, 99_990) == bytes(10)
        fallocate(fd, KEEP_SIZE, 0, 1 << 20)
        assert os.fstat(fd).st_size == 100_000
        os.pwrite(fd, b"written", 0)
        fallocate(fd, 0, 0, 50_000)
        assert os.pread(fd, 7, 0) == b"written"
        with fails(errno.EINVAL):
            fallocate(fd, 0, 0, 0)
    with opened("f", os.O_RDONLY) as fd, fails(errno.EBADF):
        fallocate(fd, 0, 0, 100)


def test_holes_are_punched_and_ranges_zeroed(name: str, here: Place) -> None:
    expected = bytearray(OLD)
    with opened(name, os.O_RDWR) as fd:
        with here.may_refuse("fallocate"):
            fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 100, 9000)
        expected[100:9100] = bytes(9000)
        assert os.pread(fd, len(OLD) + 1, 0) == expected
        with here.may_refuse("fallocate"):
            fallocate(fd, ZERO_RANGE, 10_000, 10_000)
        expected[10_000:] = bytes(10_000)
        assert os.pread(fd, len(expected) + 1, 0) == expected
        fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 1 << 30, 4096)
        with fails(errno.EOPNOTSUPP):
            fallocate(fd, PUNCH_HOLE, 0, 4096)
    assert read_file(name) == expected


def test_posix_fallocate_works_everywhere(name: str) -> None:
    """The C library writes where the file system cannot allocate."""
    with opened(name, os.O_RDWR) as fd:
        os.posix_fallocate(fd, 0, 50_000)
    assert read_file(name) == OLD + bytes(50_000 - len(OLD))


# -- mappings --------------------------------------------------------------------------------------


def test_bytes_written_into_a_mapping_are_read_by_all_processes(name: str) -> None:
    with opened(name, os.O_RDWR) as fd, mapped(fd) as pages:
        assert pages[:] == OLD
        pages[5000:5005] = b"INTO!"
        assert os.pread(fd, 5, 5000) == b"INTO!"
        assert elsewhere(lambda: read_file(name)[5000:5005]) == b"INTO!"
        os.pwrite(fd, b"BACK!", 5000)
        assert pages[5000:5005] == b"BACK!"
        pages[0:4] = b"last"
        pages.flush()
        os.fsync(fd)
    assert read_file(name) == b"last" + OLD[4:5000] + b"BACK!" + OLD[5005:]


def test_a_mapping_outlives_its_descriptor_and_its_name(name: str) -> None:
    fd = os.open(name, os.O_RDWR)
    pages = mmap.mmap(fd, 0)
    os.close(fd)
    os.link(name, "kept")
    os.unlink(name)
    pages[0:5] = b"after"
    assert read_file("kept")[:5] == b"after"
    pages.flush()
    pages.close()
    assert read_file("kept") == b"after" + OLD[5:]


def test_bytes_written_into_a_mapping_survive_a_kill_of_the_process(name: str) -> None:
    def write() -> None:
        with opened(name, os.O_RDWR) as fd, mapped(fd) as pages:
            pages[100:105] = b"alive"
            write_file("ready", b"")
            signal.pause()

    child = Child(write)
    while not exists("ready"):
        time.sleep(0.005)
    child.kill()
    assert read_file(name)[100:105] == b"alive"


def test_two_processes_share_a_mapping(here: Place) -> None:
    write_file("shared", bytes(4 * PAGE))

    def play(own: int, other: int) -> int:
        """Each adds one to what the other wrote, in turns."""
        with opened("shared", os.O_RDWR) as fd, mapped(fd) as pages:
            deadline = time.monotonic() + 100
            turn = 0
            while turn < 50:
                (seen,) = struct.unpack_from("Q", pages, other)
                if seen == turn + (1 if own > other else 0):
                    turn += 1
                    struct.pack_into("Q", pages, own, turn)
                assert time.monotonic() < deadline, (own, turn, seen)
            return turn

    assert together(lambda: play(0, 3 * PAGE), lambda: play(3 * PAGE, 0)) == [50, 50]
    content = read_file("shared")
    assert (
        struct.unpack_from("Q", content, 0) == struct.unpack_from("Q", content, 3 * PAGE) == (50,)
    )


def test_a_private_mapping_changes_no_file(name: str) -> None:
    with opened(name, os.O_RDWR) as fd:
        pages = mmap.mmap(fd, 0, mmap.MAP_PRIVATE)
        pages[0:5] = b"local"
        assert os.pread(fd, 5, 0) == OLD[:5]
        pages.close()
    assert read_file(name) == OLD


def test_bytes_written_into_a_mapping_beyond_the_end_of_the_file_are_not_in_the_file(
    name: str,
) -> None:
    with opened(name, os.O_RDWR) as fd:
        pages = mmap.mmap(fd, 0)
        size = len(OLD)
        os.ftruncate(fd, size + 100)
        assert os.pread(fd, 100, size) == bytes(100)
        pages.close()
    assert read_file(name) == OLD + bytes(100)


def test_a_file_that_grows_is_mapped_in_its_new_length(name: str) -> None:
    with opened(name, os.O_RDWR) as fd:
        os.ftruncate(fd, 100_000)
        with mapped(fd, 100_000) as pages:
            pages[99_990:] = b"0123456789"
            pages.flush(PAGE * 24, 100_000 - PAGE * 24)
        assert os.pread(fd, 20, 99_990) == b"0123456789"
    assert read_file(name) == OLD + bytes(99_990 - len(OLD)) + b"0123456789"


# -- copies inside the kernel ----------------------------------------------------------------------


def test_sendfile_sends_and_receives(name: str) -> None:
    ours, theirs = socket.socketpair()
    with opened(name, os.O_RDONLY) as fd, ours, theirs:
        assert os.sendfile(ours.fileno(), fd, 5000, 4000) == 4000
        assert theirs.recv(5000, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == OLD[5000:9000]
        with opened("copy", os.O_WRONLY | os.O_CREAT) as to:
            assert os.sendfile(to, fd, 0, 1 << 20) == len(OLD)
    assert read_file("copy") == OLD


def test_splice_moves_pipes_into_files_and_back(name: str) -> None:
    readable, writable = os.pipe()
    os.write(writable, b"through a pipe")
    with opened(name, os.O_RDWR) as fd:
        if hasattr(os, "splice"):
            assert os.splice(readable, fd, 100, offset_dst=10) == 14
            assert os.splice(fd, writable, 14, offset_src=10) == 14
            assert os.read(readable, 100) == b"through a pipe"
            assert os.pread(fd, 16, 9) == OLD[9:10] + b"through a pipe" + OLD[24:25]
    os.close(readable)
    os.close(writable)


def test_copy_file_range_copies_within_and_between_files(name: str) -> None:
    write_file("target", b"t" * 100)
    with opened(name, os.O_RDWR) as fd, opened("target", os.O_RDWR) as to:
        done = 0
        while done < 9000:
            done += os.copy_file_range(fd, to, 9000 - done, 1000 + done, 50 + done)
        assert os.pread(to, 10_000, 0) == b"t" * 50 + OLD[1000:10_000]
        done = 0
        while done < 3000:
            done += os.copy_file_range(fd, fd, 3000 - done, done, 7000 + done)
        assert os.pread(fd, 3000, 7000) == OLD[:3000]
        assert os.copy_file_range(fd, to, 100, len(OLD) + 5) == 0
    assert read_file(name) == OLD[:7000] + OLD[:3000] + OLD[10_000:]


# -- locks -----------------------------------------------------------------------------------------


def locked(function: Callable[[], object]) -> bool:
    """Whether another process finds it locked."""

    def attempt() -> bool:
        try:
            function()
        except (BlockingIOError, PermissionError):
            return True
        return False

    return bool(elsewhere(attempt))


def test_a_lock_of_a_whole_file_keeps_other_processes_out(name: str) -> None:
    def attempt(how: int) -> Callable[[], None]:
        def lock() -> None:
            with opened(name, os.O_RDWR) as fd:
                fcntl.flock(fd, how | fcntl.LOCK_NB)

        return lock

    with opened(name, os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert locked(attempt(fcntl.LOCK_EX)) and locked(attempt(fcntl.LOCK_SH))
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert locked(attempt(fcntl.LOCK_EX)) and not locked(attempt(fcntl.LOCK_SH))
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert not locked(attempt(fcntl.LOCK_EX))
        fcntl.flock(fd, fcntl.LOCK_EX)
    assert not locked(attempt(fcntl.LOCK_EX))


def test_locks_of_ranges_keep_other_processes_out_of_those_only(name: str) -> None:
    def attempt(start: int, length: int, how: int = fcntl.LOCK_EX) -> Callable[[], None]:
        def lock() -> None:
            with opened(name, os.O_RDWR) as fd:
                fcntl.lockf(fd, how | fcntl.LOCK_NB, length, start)

        return lock

    with opened(name, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 100, 1000)
        assert locked(attempt(1099, 1)) and locked(attempt(0, 0)) and locked(attempt(900, 101))
        assert not locked(attempt(1100, 100)) and not locked(attempt(0, 1000))
        fcntl.lockf(fd, fcntl.LOCK_UN, 50, 1000)
        assert not locked(attempt(1000, 50)) and locked(attempt(1050, 1))
        fcntl.lockf(fd, fcntl.LOCK_SH, 100, 1000)
        assert locked(attempt(1000, 1)) and not locked(attempt(1000, 1, fcntl.LOCK_SH))
    assert not locked(attempt(0, 0))


def test_locks_that_wait_are_granted_in_turn(here: Place) -> None:
    write_file("counter", b"0")

    def count(lock: Callable[[int, int], object]) -> None:
        for _ in range(25):
            with opened("counter", os.O_RDWR) as fd:
                lock(fd, fcntl.LOCK_EX)
                number = int(os.pread(fd, 20, 0))
                os.pwrite(fd, b"%d" % (number + 1), 0)

    for lock in (fcntl.flock, fcntl.lockf):
        together(*(lambda lock=lock: count(lock) for _ in range(3)))
    assert read_file("counter") == b"150"


def test_a_lock_goes_with_the_process_that_held_it(name: str) -> None:
    def hold() -> None:
        fd = os.open(name, os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        fcntl.flock(fd, fcntl.LOCK_EX)
        write_file("held", b"")
        signal.pause()

    child = Child(hold)
    while not exists("held"):
        time.sleep(0.005)
    with opened(name, os.O_RDWR) as fd:
        with fails(errno.EAGAIN, errno.EACCES):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.kill()
        fcntl.lockf(fd, fcntl.LOCK_EX)
        fcntl.flock(fd, fcntl.LOCK_EX)


# -- several processes -----------------------------------------------------------------------------


def test_processes_that_write_their_own_parts_of_one_file_do_not_disturb_each_other(
    here: Place,
) -> None:
    part, parts = 300_000, 4
    write_file("parts", b"")

    def write(number: int) -> None:
        with opened("parts", os.O_WRONLY) as fd:
            content = bytes([ord("a") + number]) * part
            for offset in range(0, part, 7000):
                piece = content[offset : offset + 7000]
                assert os.pwrite(fd, piece, number * part + offset) == len(piece)

    together(*(lambda number=number: write(number) for number in range(parts)))
    expected = b"".join(bytes([ord("a") + number]) * part for number in range(parts))
    assert read_file("parts") == expected


def test_a_writer_and_a_following_reader_agree(here: Place) -> None:
    lines = [b"line %04d %s\n" % (number, b"x" * (number % 50)) for number in range(400)]
    write_file("log", b"")

    def write() -> None:
        with opened("log", os.O_WRONLY | os.O_APPEND) as fd:
            for line in lines:
                os.write(fd, line)

    def follow() -> bytes:
        seen, deadline = b"", time.monotonic() + 100
        with opened("log", os.O_RDONLY) as fd:
            while seen.count(b"\n") < len(lines) and time.monotonic() < deadline:
                seen += os.read(fd, 10_000)
        return seen

    seen, _ = together(follow, write)
    assert seen == b"".join(lines)
