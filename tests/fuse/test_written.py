"""Written files through the datapath, message by message: its actions, and its events for Python.

As in ``test_messages`` the test plays the kernel and pyfuse3; the files are real ones.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monarch.fuse import datapath
from monarch.fuse.datapath import split_handle, split_write_handle
from monarch.types import WRITTEN_INO, Ino
from monarch.vfs.interfaces import ABANDONED, RELEASED, Served
from monarch.writeback.objects import object_path
from tests.conftest import Tree, contents
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.equipment.waiting import readable
from tests.fuse import wire
from tests.fuse.rig import PATIENCE_S, NoMessage, Rig, eventually, rig
from tests.fuse.test_messages import SIZE
from tests.fuse.wire import Op, Request

NEW = Ino(WRITTEN_INO + 7)
BLOCK = 1 << 20
KEEP_SIZE, PUNCH_HOLE, COLLAPSE = 1, 2, 8


@pytest.fixture
def made(tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    tree({"a": SIZE, "b": SIZE})
    with rig(tmp_path / "source", tmp_path, fetch_max=SIZE) as it:
        it.init()
        yield it


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "object", os.O_RDWR | os.O_CREAT, 0o600)
    yield number
    os.close(number)


def created(made: Rig, fd: int, node: Ino = NEW, *, flags: int = 0) -> int:
    """Have a file created that Python binds; its handle."""
    unique = made.send_create(b"new")
    passed = made.passed()
    assert (passed.opcode, passed.node) == (Op.CREATE, 1)
    assert made.datapath.bind_written(node, fd, tier=1, create=True)
    made.reply_create(passed, node, flags=flags)
    answer = made.answer(unique)
    assert answer.error == 0 and len(answer.body) == 128 + wire.OPEN_OUT.size
    handle, seen, backing = wire.OPEN_OUT.unpack_from(answer.body, 128)
    assert handle & wire.HANDLE_FAST and handle & wire.HANDLE_BOUND
    assert (seen, backing) == (flags, 0)
    return int(handle)


def opened(made: Rig, ino: Ino, fd: int, mode: int = os.O_RDWR) -> int:
    """Have an inode opened that Python binds; the handle."""
    unique = made.send_open(ino, flags=mode)
    passed = made.passed()
    assert (passed.opcode, passed.node) == (Op.OPEN, ino)
    assert made.datapath.bind_written(ino, fd, tier=1, create=False)
    made.reply_open(passed, flags=0)
    handle, flags, backing = wire.OPEN_OUT.unpack(made.answer(unique).body)
    # A close must report what could not be written back.
    assert (flags, backing) == (0, 0)
    return int(handle)


def released(made: Rig, ino: Ino, handle: int) -> None:
    unique = made.send_release(ino, handle)
    passed = made.passed()
    assert (passed.opcode, passed.node) == (Op.RELEASE, ino)
    assert wire.RELEASE_IN.unpack(passed.body)[0] == ino
    made.reply(passed)
    assert made.answer(unique).error == 0


def passed_write(made: Rig, ino: Ino, offset: int, data: bytes) -> Request:
    """The next request to Python is this write, whole, with Python's handle."""
    passed = made.passed()
    assert (passed.opcode, passed.node) == (Op.WRITE, ino)
    handle, seen, size = wire.WRITE_IN.unpack_from(passed.body)[:3]
    assert (handle, seen, size) == (ino, offset, len(data))
    assert passed.body[wire.WRITE_IN.size :] == data
    return passed


# -- written and read ------------------------------------------------------------------------------


def test_a_created_file_is_written_read_and_counted_without_python(made: Rig, fd: int) -> None:
    handle = created(made, fd)
    assert made.datapath.open_files() == 1
    whole = contents("whole", 3 * BLOCK + 5)
    for offset in range(0, len(whole), BLOCK):
        answer = made.write(NEW, handle, offset, whole[offset : offset + BLOCK])
        assert answer.error == 0
        assert wire.WRITE_OUT.unpack(answer.body)[0] == len(whole[offset : offset + BLOCK])
    assert made.datapath.written(NEW) == 4
    assert os.pread(fd, len(whole) + 1, 0) == whole
    assert made.read(NEW, handle, 3 * BLOCK, BLOCK).body == whole[3 * BLOCK :]
    assert made.read(NEW, handle, 5 * BLOCK, 10).body == b""
    # What Python does with its own descriptor is seen, since the file is one.
    os.ftruncate(fd, 10)
    assert made.read(NEW, handle, 0, BLOCK).body == whole[:10]
    assert made.datapath.tallies()[1].reads == 3
    assert made.is_quiet(0)
    released(made, NEW, handle)
    # Python still wants to know how often, and says when it does not.
    assert made.datapath.open_files() == 0
    assert made.datapath.written(NEW) == 4
    made.datapath.release_written(NEW)
    assert made.datapath.written(NEW) == 0


@pytest.mark.promise(143)
def test_the_lowest_offset_that_was_changed_is_known_until_it_is_forgotten(
    made: Rig, fd: int
) -> None:
    none = 2**64 - 1
    assert made.datapath.lowest(NEW, forget=True) == none
    handle = created(made, fd)
    assert made.datapath.lowest(NEW, forget=False) == none
    for offset in (300, 100, 200):
        assert made.write(NEW, handle, offset, b"bytes").error == 0
    assert [made.datapath.lowest(NEW, forget=forget) for forget in (False, True, True)] == [
        *(100, 100, none)
    ]
    released(made, NEW, handle)
    made.datapath.release_written(NEW)
    assert made.datapath.lowest(NEW, forget=False) == none


def test_a_write_of_no_bytes_and_one_far_out_are_as_the_file_system_takes_them(
    made: Rig, fd: int
) -> None:
    handle = created(made, fd)
    assert wire.WRITE_OUT.unpack(made.write(NEW, handle, 5, b"").body)[0] == 0
    assert made.write(NEW, handle, 1 << 40, b"far").error == 0
    assert os.fstat(fd).st_size == (1 << 40) + 3
    # The caller's own fault, and the file system's to say.
    assert made.write(NEW, handle, (1 << 63) - 10, b"too far").error == errno.EFBIG
    assert made.is_quiet(0)


def test_a_long_file_is_on_its_way_to_the_disk_while_it_is_written(made: Rig, fd: int) -> None:
    handle = created(made, fd, flags=wire.FOPEN_DIRECT_IO)
    block = contents("block", BLOCK)
    for number in range(20):
        assert made.write(NEW, handle, number * BLOCK, block).error == 0
    released(made, NEW, handle)
    made.datapath.release_written(NEW)
    assert os.pread(fd, BLOCK, 19 * BLOCK) == block
    assert made.datapath.open_files() == 0


@pytest.mark.finding("W6")
@pytest.mark.promise(151)
def test_python_makes_safe_what_must_be_when_it_is_answered(made: Rig, fd: int) -> None:
    handle = created(made, fd, flags=wire.FOPEN_DIRECT_IO)
    assert handle & wire.HANDLE_DIRECT
    flags = os.O_WRONLY | os.O_DSYNC
    unique = made.send_write(NEW, handle, 0, b"safe", flags=flags)
    passed = made.passed()
    handle_seen, _, _, _, _, flags_seen, _ = wire.WRITE_IN.unpack_from(passed.body)
    assert split_write_handle(handle_seen) == (NEW, True, False) and flags_seen == flags
    made.reply(passed, wire.WRITE_OUT.pack(4, 0))
    assert made.answer(unique).error == 0
    # After a write through its pages the kernel asks for that itself.
    cached = opened(made, NEW, fd)
    assert made.answer(made.send_write(NEW, cached, 0, b"cached", flags=flags)).error == 0
    assert made.is_quiet(0)


@pytest.mark.promise(88)
def test_python_removes_the_set_id_bits_of_a_file_that_a_user_writes(made: Rig, fd: int) -> None:
    handle = created(made, fd, flags=wire.FOPEN_DIRECT_IO)

    def comes_to_python(flags: int, handle: int = handle) -> bool:
        unique = made.send_write(NEW, handle, 0, b"bytes", write_flags=flags)
        ready = readable(made.kernel, made.python, within_s=PATIENCE_S)
        if made.python.fileno() in ready:
            passed = made.passed()
            seen, _, size = wire.WRITE_IN.unpack_from(passed.body)[:3]
            assert split_write_handle(seen) == (NEW, False, bool(flags)) and size == 5
            made.reply(passed, wire.WRITE_OUT.pack(5, 0))
            assert made.answer(unique).error == 0
            return True
        assert made.answer(unique).error == 0
        return False

    user, root = wire.WRITE_KILL_SUIDGID, 0
    assert not comes_to_python(user)
    made.datapath.know_set_id(NEW, has_set_id=True)
    assert not comes_to_python(root)
    assert comes_to_python(user) and comes_to_python(user)
    assert made.datapath.written(NEW) == 2
    made.datapath.know_set_id(NEW, has_set_id=False)
    assert not comes_to_python(user)
    # Where Python serves the file, it gets to know who writes.
    made.datapath.unbind(NEW)
    assert comes_to_python(user) and comes_to_python(root)
    made.datapath.rebind(NEW, fd, tier=1)
    # The next file with this number is another one.
    made.datapath.know_set_id(NEW, has_set_id=True)
    released(made, NEW, handle)
    made.datapath.release_written(NEW)
    handle = created(made, fd, flags=wire.FOPEN_DIRECT_IO)
    assert not comes_to_python(user, handle)


def test_writers_and_readers_at_once_see_what_was_answered(made: Rig, fd: int) -> None:
    handle = created(made, fd)
    pieces = {number * 5000: contents(f"piece {number}", 5000) for number in range(200)}
    sent = {made.send_write(NEW, handle, at, data): at for at, data in pieces.items()}
    for unique, at in sent.items():
        assert made.answer(unique).error == 0
        assert made.read(NEW, handle, at, 5000).body == pieces[at]
    assert made.datapath.written(NEW) == len(pieces)


def test_an_open_of_a_written_file_is_pythons_and_shares_the_binding(made: Rig, fd: int) -> None:
    handle = created(made, fd)
    made.write(NEW, handle, 0, b"bytes")
    again = opened(made, NEW, fd, os.O_RDONLY)
    assert made.read(NEW, again, 0, 10).body == b"bytes"
    released(made, NEW, handle)
    assert made.read(NEW, again, 0, 10).body == b"bytes"
    assert made.datapath.written(NEW) == 1
    released(made, NEW, again)
    made.datapath.release_written(NEW)
    assert made.read(NEW, again, 0, 10).error == errno.EBADF
    assert made.write(NEW, again, 0, b"late").error == errno.EBADF


def test_an_inode_that_is_opened_again_is_bound_to_what_it_is_then(
    made: Rig, fd: int, tmp_path: Path
) -> None:
    handle = created(made, fd)
    made.write(NEW, handle, 0, b"first")
    unique = made.send_open(NEW)
    passed = made.passed()
    # Its last user has closed it meanwhile, and Python has released it.
    released(made, NEW, handle)
    made.datapath.release_written(NEW)
    (tmp_path / "other").write_bytes(b"second")
    with open(tmp_path / "other", "r+b") as other:
        assert made.datapath.bind_written(NEW, other.fileno(), tier=2, create=False)
    made.reply_open(passed)
    handle, _, _ = wire.OPEN_OUT.unpack(made.answer(unique).body)
    assert made.read(NEW, handle, 0, 10).body == b"second"
    assert made.datapath.written(NEW) == 0


def test_a_creation_that_python_serves_itself_is_a_plain_open(made: Rig) -> None:
    unique = made.send_create(b"new")
    made.reply_create(made.passed(), NEW)
    handle, flags, _ = wire.OPEN_OUT.unpack_from(made.answer(unique).body, 128)
    assert (handle, flags) == (NEW, wire.FOPEN_KEEP_CACHE)
    assert made.datapath.open_files() == 1
    write = made.send_write(NEW, handle, 3, b"data")
    made.reply(passed_write(made, NEW, 3, b"data"), wire.WRITE_OUT.pack(4, 0))
    assert wire.WRITE_OUT.unpack(made.answer(write).body)[0] == 4
    released(made, NEW, handle)
    assert made.datapath.open_files() == 0


@pytest.mark.parametrize("bound", [True, False])
def test_a_creation_that_fails_opens_nothing(made: Rig, fd: int, bound: bool) -> None:
    unique = made.send_create(b"new")
    passed = made.passed()
    if bound:
        assert made.datapath.bind_written(NEW, fd, tier=1, create=True)
        assert made.datapath.open_files() == 1
        made.datapath.release_written(NEW)
    made.reply(passed, error=errno.EDQUOT)
    assert made.answer(unique).error == errno.EDQUOT
    assert made.datapath.open_files() == 0


def test_a_file_whose_creator_is_killed_meanwhile_is_closed_again(
    made: Rig, fd: int, killed: int
) -> None:
    seen: list[Served] = []
    for bound in (True, False):
        unique = made.send_create(b"new", pid=killed)
        passed = made.passed()
        made.interrupt(unique)
        assert made.answer(unique).error == errno.EINTR
        if bound:
            assert made.datapath.bind_written(NEW, fd, tier=1, create=True)
        made.reply_create(passed, NEW)
        eventually(lambda: bool(seen.extend(made.datapath.served()) or seen), "Python is notified")
        assert seen.pop() == (NEW, ABANDONED, None, 0, 0, 0)
        assert made.datapath.open_files() == 0
        made.datapath.release_written(NEW)


# -- files that the source has ---------------------------------------------------------------------


@pytest.mark.parametrize("what", ["resident", "fetched", "bound", "plain", "nothing"])
def test_readers_see_what_is_written_to_a_file_that_they_have_open(
    made: Rig, fd: int, what: str
) -> None:
    ino = made.place("a") if what == "resident" else made.ino("a")
    reader = None
    if what in ("resident", "fetched"):
        reader, _, _ = made.open(ino)
    elif what != "nothing":
        made.residency.mark_changed(ino)
        unique = made.send_open(ino)
        passed = made.passed()
        with open(made.source / "a", "rb") as file:
            if what == "bound":
                assert made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
        made.reply_open(passed)
        reader, _, _ = wire.OPEN_OUT.unpack(made.answer(unique).body)
    if reader is not None and what != "plain":
        assert made.read(ino, reader, 0, 10).body == made.content("a")[:10]
    # Python brings the bytes here, says so in the table, and binds the inode.
    os.pwrite(fd, made.content("a"), 0)
    made.residency.mark_differing(ino)
    writer = opened(made, ino, fd, os.O_WRONLY)
    assert made.write(ino, writer, 3, b"written").error == 0
    expected = made.content("a")[:3] + b"written"
    if what == "plain":
        assert reader == ino
        made.send_read(ino, ino, 0, 10)
        assert made.passed().opcode == Op.READ
    elif reader is not None:
        assert made.read(ino, reader, 0, 10).body == expected
    assert made.read(ino, writer, 0, 10).body == expected
    released(made, ino, writer)
    made.datapath.release_written(ino)
    if reader is not None and what != "plain":
        # Python was not notified of this open, or it happened earlier: it sees the same file on.
        assert made.read(ino, reader, 0, 10).body == expected
        # But who comes now is Python's to bind, or to serve.
        unique = made.send_open(ino)
        passed = made.passed()
        assert not made.datapath.bind(ino, fd, tier=0, size=SIZE)
        made.reply_open(passed)
        assert wire.OPEN_OUT.unpack(made.answer(unique).body)[0] == ino


def test_an_open_to_write_is_pythons_though_the_copy_is_here_and_open(made: Rig) -> None:
    ino = made.place("a")
    reader, _, _ = made.open(ino)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        unique = made.send_open(ino, flags=flags)
        passed = made.passed()
        assert passed.opcode == Op.OPEN
        made.reply(passed, error=errno.EROFS)
        assert made.answer(unique).error == errno.EROFS
    assert made.datapath.open_files() == 1
    assert made.read(ino, reader, 0, SIZE).body == made.content("a")
    assert made.release(ino, reader).error == 0
    other = made.send_open(made.ino("b"), flags=os.O_WRONLY)
    made.reply_open(made.passed())
    assert wire.OPEN_OUT.unpack(made.answer(other).body)[0] == made.ino("b")


def test_a_writer_whose_file_was_not_bound_is_pythons_though_readers_are_not(made: Rig) -> None:
    ino = made.ino("a")
    made.residency.mark_changed(ino)
    unique = made.send_open(ino)
    passed = made.passed()
    with open(made.source / "a", "rb") as file:
        assert made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
    made.reply_open(passed)
    assert wire.OPEN_OUT.unpack(made.answer(unique).body)[0] & wire.HANDLE_FAST
    unique = made.send_open(ino, flags=os.O_RDWR)
    made.reply_open(made.passed())
    assert wire.OPEN_OUT.unpack(made.answer(unique).body)[0] == ino


# -- what the disk does not take -------------------------------------------------------------------


@pytest.mark.parametrize("device", ["/dev/full", "read-only"])
def test_a_write_that_the_disk_refuses_comes_to_python_whole(
    made: Rig, tmp_path: Path, device: str
) -> None:
    if device == "/dev/full":
        disk = os.open(device, os.O_RDWR)  # ENOSPC
    else:
        (tmp_path / "object").touch()
        disk = os.open(tmp_path / "object", os.O_RDONLY)  # EBADF
    handle = created(made, disk)
    os.close(disk)
    data = contents("data", BLOCK)
    unique = made.send_write(NEW, handle, 4096, data)
    passed = passed_write(made, NEW, 4096, data)
    # Something may have been written before it failed.
    assert made.datapath.written(NEW) == 1
    made.reply(passed, error=errno.ENOSPC)
    assert made.answer(unique).error == errno.ENOSPC


def test_an_unbound_inode_is_opened_by_python_until_it_is_bound_again(
    made: Rig, fd: int, tmp_path: Path
) -> None:
    handle = created(made, fd)
    made.write(NEW, handle, 0, b"one")
    assert not made.datapath.rebind(NEW, fd, tier=2)
    assert made.datapath.unbind(NEW)
    unique = made.send_write(NEW, handle, 3, b"two")
    made.reply(passed_write(made, NEW, 3, b"two"), wire.WRITE_OUT.pack(3, 0))
    assert wire.WRITE_OUT.unpack(made.answer(unique).body)[0] == 3
    unique = made.send_read(NEW, handle, 0, 100)
    seen, token = split_handle(wire.READ_IN.unpack(made.passed().body)[0])
    assert seen == NEW
    made.datapath.answer(token, b"from python")
    assert made.answer(unique).body == b"from python"
    # No other process can do these, but the error that they cannot be done now is true.
    body = wire.FALLOCATE_IN.pack(handle, 0, 10, 0, 0)
    assert made.ask(Op.FALLOCATE, NEW, body).error == errno.EOPNOTSUPP
    body = wire.LSEEK_IN.pack(handle, 0, os.SEEK_DATA, 0)
    assert made.ask(Op.LSEEK, NEW, body).error == errno.EINVAL
    # To open it meanwhile does not bind it.
    second = opened(made, NEW, fd)
    made.send_read(NEW, second, 0, 1)
    assert made.passed().opcode == Op.READ
    (tmp_path / "moved").write_bytes(b"one, two")
    with open(tmp_path / "moved", "r+b") as moved:
        assert made.datapath.rebind(NEW, moved.fileno(), tier=2)
    assert made.read(NEW, handle, 0, 100).body == b"one, two"
    assert made.datapath.written(NEW) == 1
    assert made.datapath.tallies()[2].reads == 1
    released(made, NEW, handle)
    released(made, NEW, second)
    made.datapath.release_written(NEW)
    assert not made.datapath.unbind(NEW)
    assert not made.datapath.rebind(NEW, fd, tier=2)


@pytest.mark.parametrize("operation", ["write", "read"])
def test_to_unbind_waits_for_what_is_under_way(made: Rig, tmp_path: Path, operation: str) -> None:
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "object").write_bytes(b"bytes")
    with SlowSource(tmp_path / "disk", tmp_path / "slow") as slow:
        with open(slow.path / "object", "r+b") as file:
            handle = created(made, file.fileno())
        slow.rules(f"hang {operation} object")
        if operation == "write":
            unique = made.send_write(NEW, handle, 0, b"BYTES")
        else:
            unique = made.send_read(NEW, handle, 0, 5)
        eventually(lambda: slow.counters()["hanging"] > 0, "it is under way")
        results: list[bool] = []
        waiting = threading.Thread(target=lambda: results.append(made.datapath.unbind(NEW)))
        waiting.start()

        def is_pythons() -> bool:
            made.send_write(NEW, handle, 5, b"more")
            return not made.is_quiet(0.05)

        # The next are Python's, though that one hangs.
        eventually(is_pythons, "it has begun to unbind")
        assert waiting.is_alive() and results == []
        slow.rules()
        answer = made.answer(unique)
        assert answer.error == 0
        waiting.join(60)
        assert results == [True]
        assert made.datapath.written(NEW) >= (operation == "write")


# -- holes -----------------------------------------------------------------------------------------


def test_room_is_reserved_and_holes_are_made_and_found(made: Rig, fd: int) -> None:
    handle = created(made, fd)

    def fallocate(offset: int, length: int, mode: int = 0) -> int:
        body = wire.FALLOCATE_IN.pack(handle, offset, length, mode, 0)
        return made.ask(Op.FALLOCATE, NEW, body).error

    def seek(offset: int, whence: int) -> int | None:
        answer = made.ask(Op.LSEEK, NEW, wire.LSEEK_IN.pack(handle, offset, whence, 0))
        assert answer.error in (0, errno.ENXIO)
        return None if answer.error else int(wire.LSEEK_OUT.unpack(answer.body)[0])

    assert fallocate(0, BLOCK) == 0
    assert os.fstat(fd).st_size == BLOCK and os.fstat(fd).st_blocks * 512 >= BLOCK
    assert fallocate(BLOCK, BLOCK, KEEP_SIZE) == 0
    assert os.fstat(fd).st_size == BLOCK
    assert made.datapath.written(NEW) == 2
    made.write(NEW, handle, 0, b"x" * BLOCK)
    assert seek(5, os.SEEK_DATA) == 5 and seek(5, os.SEEK_HOLE) == BLOCK
    assert fallocate(4096, 8192, KEEP_SIZE | PUNCH_HOLE) == 0
    assert made.read(NEW, handle, 4095, 3).body == b"x\0\0"
    assert seek(0, os.SEEK_HOLE) == 4096 and seek(4096, os.SEEK_DATA) == 4096 + 8192
    assert seek(BLOCK, os.SEEK_DATA) is None
    # As the file system says itself.
    assert fallocate(0, 0) == errno.EINVAL
    assert fallocate(1, 1, COLLAPSE) in (errno.EINVAL, errno.EOPNOTSUPP)
    assert fallocate(1 << 63, 1) == errno.EINVAL
    assert made.is_quiet(0)


def test_nothing_makes_the_kernel_forget_that_files_have_holes(made: Rig, fd: int) -> None:
    """ENOSYS of one file would be taken for all of them, and for good."""
    a = made.place("a")
    handle, _, _ = made.open(a)
    made.residency.mark_differing(made.ino("b"))
    for ino, fh in ((a, handle), (a, a), (made.ino("b"), 5), (Ino(NEW + 1), NEW + 1), (Ino(1), 1)):
        answer = made.ask(Op.FALLOCATE, ino, wire.FALLOCATE_IN.pack(fh, 0, 10, 0, 0))
        assert answer.error == errno.EOPNOTSUPP
    for offset, whence, found in (
        (5, os.SEEK_DATA, 5),
        (5, os.SEEK_HOLE, SIZE),
        (SIZE, os.SEEK_DATA, None),
        (SIZE, os.SEEK_HOLE, None),
    ):
        answer = made.ask(Op.LSEEK, a, wire.LSEEK_IN.pack(handle, offset, whence, 0))
        assert answer.error == (errno.ENXIO if found is None else 0)
        assert found is None or wire.LSEEK_OUT.unpack(answer.body)[0] == found
    for ino, whence in ((a, os.SEEK_SET), (made.ino("b"), os.SEEK_DATA), (NEW, os.SEEK_HOLE)):
        answer = made.ask(Op.LSEEK, ino, wire.LSEEK_IN.pack(1, 0, whence, 0))
        assert answer.error == errno.EINVAL
    assert made.is_quiet(0)


# -- what is Python's ------------------------------------------------------------------------------


def test_python_finds_its_own_handles_in_what_carries_one(made: Rig, fd: int) -> None:
    handle = created(made, fd)
    for opcode in (Op.FSYNC, Op.FSYNCDIR):
        made.send(opcode, NEW, wire.FSYNC_IN.pack(handle, 1, 0))
        assert wire.FSYNC_IN.unpack(made.passed().body) == (NEW, 1, 0)
    for valid, expected in ((wire.FATTR_FH | 8, NEW), (8, handle)):
        made.send(Op.SETATTR, NEW, wire.SETATTR_IN.pack(valid, 0, handle, 77, *[0] * 12))
        seen = wire.SETATTR_IN.unpack(made.passed().body)
        assert (seen[0], seen[2], seen[3]) == (valid, expected, 77)


def test_attributes_of_files_that_are_not_the_snapshots_are_pythons_to_tell(made: Rig) -> None:
    b = made.ino("b")
    made.residency.mark_differing(b)
    for ino in (NEW, b):
        for opcode, name in ((Op.GETXATTR, b"user.x\0"), (Op.LISTXATTR, b"")):
            made.send(opcode, ino, wire.GETXATTR_IN.pack(100, 0) + name)
            assert (made.passed().opcode, made.is_quiet(0)) == (opcode, True)
        # Asked for before each write; no cache keeps it.
        body = wire.GETXATTR_IN.pack(100, 0) + b"security.capability\0"
        assert made.ask(Op.GETXATTR, ino, body).error == errno.ENODATA
        made.send(Op.GETATTR, ino, bytes(16))
        assert made.passed().opcode == Op.GETATTR
    assert made.is_quiet(0)


def test_names_in_a_directory_that_was_made_are_pythons_to_find(made: Rig) -> None:
    for opcode, body in (
        (Op.LOOKUP, b"name\0"),
        (Op.READDIRPLUS, wire.READ_IN.pack(0, WRITTEN_INO, 4096, 0, 0, 0, 0)),
    ):
        made.send(opcode, NEW, body)
        assert (made.passed().opcode, made.is_quiet(0)) == (opcode, True)
    # One that Python began at a name of its own ends here when the directory is the snapshot's.
    answer = made.ask(Op.READDIRPLUS, 1, wire.READ_IN.pack(0, WRITTEN_INO + 1, 4096, 0, 0, 0, 0))
    assert (answer.error, answer.body) == (0, b"")


# -- agreements and limits -------------------------------------------------------------------------


@pytest.mark.parametrize("room", [50_000, 4 << 20])
def test_a_write_is_never_larger_than_what_python_can_be_given(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """An ordinary user has as much room between the two as the machine allows."""
    monkeypatch.setattr(datapath, "_SOCKET_BYTES", room)
    with rig(tree({}), tmp_path) as made:
        reply = made.init(wire.INIT_HANDLE_KILLPRIV)
        flags, largest = reply[3], reply[6]
        assert not flags & wire.INIT_HANDLE_KILLPRIV
        assert 4096 <= largest <= min(2 * room, BLOCK) and largest % 4096 == 0
        assert largest == BLOCK or room < BLOCK
        data = contents("data", largest)
        unique = made.send_write(NEW, NEW, 0, data)
        made.reply(passed_write(made, NEW, 0, data), wire.WRITE_OUT.pack(largest, 0))
        assert made.answer(unique).error == 0


@pytest.mark.fault("I4")
def test_writes_that_make_no_sense_are_refused(made: Rig, fd: int) -> None:
    handle = created(made, fd)
    for body in (
        wire.WRITE_IN.pack(handle, 0, 6, 0, 0, 0, 0) + b"short",
        wire.WRITE_IN.pack(handle, 0, 2**32 - 1, 0, 0, 0, 0) + b"short",
        wire.WRITE_IN.pack(handle, 2**63 - 1, 1, 0, 0, 0, 0) + b"x",
        wire.WRITE_IN.pack(handle, 2**64 - 1, 1, 0, 0, 0, 0) + b"x",
        wire.WRITE_IN.pack(handle, 0, 0, 0, 0, 0, 0)[:-1],
    ):
        assert made.ask(Op.WRITE, NEW, body).error == errno.EINVAL
    for opcode in (Op.FALLOCATE, Op.LSEEK, Op.FSYNC, Op.FSYNCDIR, Op.SETATTR):
        assert made.ask(opcode, NEW, bytes(15)).error == errno.EINVAL
    for node, fh in ((NEW + 1, handle), (NEW, handle + 1), (NEW, handle | 0xFFFFFFFF)):
        assert made.write(Ino(node), fh, 0, b"x").error == errno.EBADF
    assert os.fstat(fd).st_size == 0 and made.datapath.written(NEW) == 0
    assert made.is_quiet(0)
    # Only what is written is bound so: a reader's handle comes to Python, which knows better.
    reader, _, _ = made.open(made.place("a"))
    made.send_write(made.ino("a"), reader, 0, b"x")
    passed_write(made, made.ino("a"), 0, b"x")


def test_an_inode_that_cannot_be_bound_is_not_bound(made: Rig, fd: int) -> None:
    bind = made.datapath.bind_written
    assert not bind(NEW, fd, tier=1, create=False)  # no process has it open
    assert not bind(NEW, -1, tier=1, create=True)
    for ino in (0, 1 << 40, 1 << 63):
        with pytest.raises(ValueError, match="inode"):
            bind(Ino(ino), fd, tier=1, create=True)
    for tier in (-1, 17):
        with pytest.raises(ValueError, match="tier"):
            bind(NEW, fd, tier=tier, create=True)
        with pytest.raises(ValueError, match="tier"):
            made.datapath.rebind(NEW, fd, tier=tier)
    made.datapath.release_written(NEW)
    assert made.datapath.written(NEW) == 0 and made.datapath.open_files() == 0


def test_stopping_lets_go_of_written_files(tree: Tree, tmp_path: Path, fd: int) -> None:
    tree({"a": SIZE})
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with rig(tmp_path / "source", tmp_path) as made:
        made.init()
        handle = created(made, fd)
        made.write(NEW, handle, 0, b"bytes")
        opened(made, made.ino("a"), fd)
        made.datapath.stop()
        assert not made.datapath.bind_written(Ino(NEW + 1), fd, tier=1, create=True)
        made.datapath.release_written(NEW)
        del made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# -- opened without Python -------------------------------------------------------------------------


@pytest.fixture
def closed(made: Rig, tmp_path: Path) -> Path:
    """The object of a file that is not open, which Python has handed to the datapath."""
    path = object_path(tmp_path / "objects", 300)
    path.parent.mkdir()
    path.write_bytes(b"0123456789")
    assert made.datapath.know_object(NEW, 300)
    return path


def test_a_written_file_that_is_closed_is_opened_to_read_without_python(
    made: Rig, closed: Path
) -> None:
    handle, flags, _ = made.open(NEW)
    assert handle & wire.HANDLE_FAST and not handle & wire.HANDLE_BOUND
    assert flags & wire.FOPEN_KEEP_CACHE
    assert made.read(NEW, handle, 3, 100).body == b"3456789"
    body = wire.LSEEK_IN.pack(handle, 4, os.SEEK_HOLE, 0)
    assert wire.LSEEK_OUT.unpack(made.ask(Op.LSEEK, NEW, body).body) == (10,)
    assert made.datapath.is_open(NEW)
    assert made.release(NEW, handle).error == 0
    assert not made.datapath.is_open(NEW)
    assert made.is_quiet(0) and made.datapath.served() == []
    assert made.datapath.open_files() == 0


def test_an_open_to_write_is_pythons_and_its_readers_see_what_is_written(
    made: Rig, closed: Path
) -> None:
    reader, _, _ = made.open(NEW)
    unique = made.send_open(NEW, flags=os.O_RDWR)
    passed = made.passed()
    made.datapath.forget_object(NEW)
    with closed.open("r+b") as file:
        assert made.datapath.bind_written(NEW, file.fileno(), tier=1, create=False)
    made.reply_open(passed, flags=0)
    writer, _, _ = wire.OPEN_OUT.unpack(made.answer(unique).body)
    assert made.write(NEW, writer, 8, b"and more").error == 0
    assert made.read(NEW, reader, 0, 100).body == b"01234567and more"
    released(made, NEW, writer)
    made.datapath.release_written(NEW)
    assert made.read(NEW, reader, 0, 100).body == b"01234567and more"
    assert made.release(NEW, reader).error == 0


@pytest.mark.fault("M17")
@pytest.mark.parametrize("what", ["forgotten", "missing", "of the snapshot"])
def test_objects_that_python_has_taken_back_or_that_are_missing_are_opened_by_python(
    made: Rig, closed: Path, what: str
) -> None:
    ino = NEW
    if what == "forgotten":
        made.datapath.forget_object(NEW)
    elif what == "missing":
        closed.unlink()
    else:
        ino = made.place("a")
        made.evict(ino)
        assert made.datapath.know_object(ino, 300)
        made.residency.mark_changed(ino)
    unique = made.send_open(ino)
    passed = made.passed()
    assert (passed.opcode, passed.node) == (Op.OPEN, ino)
    made.reply_open(passed)
    assert made.answer(unique).error == 0


def test_the_last_release_of_a_file_without_a_name_is_reported(made: Rig, closed: Path) -> None:
    first, _, _ = made.open(NEW)
    second, _, _ = made.open(NEW)
    made.datapath.forget_object(NEW)
    assert made.datapath.outdate(NEW)
    closed.unlink()
    assert made.read(NEW, second, 0, 100).body == b"0123456789"
    made.release(NEW, first)
    assert made.datapath.served() == []
    made.release(NEW, second)
    assert made.datapath.served() == [(NEW, RELEASED, None, 0, 0, 0)]
    assert not made.datapath.outdate(NEW)


def test_many_objects_are_known_and_forgotten_in_any_order(made: Rig, closed: Path) -> None:
    inos = [Ino(NEW + 1 + number) for number in range(5000)]
    for ino in inos:
        assert made.datapath.know_object(ino, 300)
    kept = random.Random(7).sample(inos, 100)
    for ino in set(inos) - set(kept):
        made.datapath.forget_object(ino)
    for ino in [*kept, NEW]:
        handle, _, _ = made.open(ino)
        made.release(ino, handle)
    made.send_open(next(ino for ino in inos if ino not in kept))
    assert made.passed().opcode == Op.OPEN


def test_opens_while_the_object_is_taken_back_are_pythons_or_read_its_bytes(
    made: Rig, closed: Path
) -> None:
    message, done = [], threading.Event()

    def opening() -> None:
        while not done.is_set():
            unique = made.send_open(NEW)
            message.append(made.answer(unique))

    def python() -> None:
        while not done.is_set():
            with suppress(NoMessage):
                passed = made.passed(0.05)
                made.reply(passed, error=-errno.EIO)

    threads = [threading.Thread(target=work) for work in (opening, python)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        made.datapath.forget_object(NEW)
        made.datapath.know_object(NEW, 300)
    done.set()
    for thread in threads:
        thread.join()
    for answer in message:
        if answer.error == 0:
            handle, _, _ = wire.OPEN_OUT.unpack(answer.body)
            assert made.read(NEW, handle, 0, 100).body == b"0123456789"
            made.release(NEW, handle)
    assert made.datapath.open_files() == 0
