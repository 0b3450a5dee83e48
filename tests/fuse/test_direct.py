"""Requests that Python answers without pyfuse3: the queue in C, and the tasks that empty it.

The test plays the kernel, and the handlers.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.errors import Refused, Unanswered
from monarch.foresight.messages import MOST_BYTES, request_number
from monarch.fuse.direct import DirectRequests
from monarch.fuse.handlers import Handlers
from monarch.posix.credentials import Credentials
from monarch.transfer.source_calls import Caller
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino
from monarch.vfs.interfaces import ABANDONED
from tests.conftest import Tree
from tests.fuse import wire
from tests.fuse.rig import Rig, rig
from tests.fuse.wire import Answer, Op

NEW = Ino(WRITTEN_INO + 7)
TIME_NS = 1_600_000_000 * 10**9 + 7
BY = Credentials(0, 0)


def attributes(ino: Ino = NEW, mode: int = stat.S_IFREG | 0o640) -> Attributes:
    return Attributes(ino, ROOT_INO, mode, 1, 5, 6, 11, TIME_NS, TIME_NS + 1, 0, 8, 0, -TIME_NS)


class Fakes:
    """Handlers that note what they are called with. ``waits`` names those that wait for ``go``;
    ``raises`` what others raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waits: set[str] = set()
        self.go = trio.Event()
        self.raises: dict[str, list[Exception]] = {}
        self.bugs: list[tuple[str, int]] = []
        self.returns: dict[str, Any] = {
            "lookup": attributes(),
            "getattr": attributes(),
            "create": (attributes(), True),
            "make": attributes(mode=stat.S_IFDIR | 0o755),
            "setattr": attributes(),
        }
        self.answered = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def handle(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *([kwargs] if kwargs else [])))
            if name in self.waits:
                await self.go.wait()
            if self.raises.get(name):
                raise self.raises[name].pop(0)
            return self.returns.get(name)

        return handle

    async def answers(self) -> None:
        self.answered += 1

    def unforeseen(self, handler: str, number: int) -> None:
        self.bugs.append((handler, number))


@pytest.fixture
def made(tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    tree({"a": 10})
    with rig(tmp_path / "source", tmp_path) as it:
        it.init()
        yield it


@asynccontextmanager
async def serving(made: Rig, fakes: Fakes) -> AsyncIterator[DirectRequests]:
    direct = DirectRequests(made.datapath, cast(Handlers, fakes))
    async with trio.open_nursery() as nursery:
        await nursery.start(direct.run)
        yield direct
        fakes.go.set()
        direct.stop()


async def answer(made: Rig, unique: int) -> Answer:
    return await trio.to_thread.run_sync(made.answer, unique)


async def ask(made: Rig, opcode: int, node: int, body: bytes = b"") -> Answer:
    return await answer(made, made.send(opcode, node, body, pid=77))


async def test_each_request_reaches_its_handler_and_its_answer_the_kernel(made: Rig) -> None:
    fakes = Fakes()
    setattr_in = wire.SETATTR_IN.pack(
        1 | 2 | 32, 0, 0, 9, 0, 0, 5, 0, 0, 6, 0, 0o100600, 0, 33, 44, 0
    )
    rename = (8).to_bytes(8, "little") + b"old\0new\0"
    rename2 = (8).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"old\0new\0"
    async with serving(made, fakes):
        # A directory that C does not know, so that it asks.
        entry = await ask(made, Op.LOOKUP, NEW, b"name\0")
        alone = await ask(made, Op.GETATTR, NEW, bytes(16))
        changed = await ask(made, Op.SETATTR, NEW, setattr_in)
        made_here = await ask(
            made, Op.MKDIR, 1, bytes([0xED, 1, 0, 0]) + bytes([0o022, 0, 0, 0]) + b"d\0"
        )
        without = [
            await ask(made, Op.UNLINK, 1, b"a\0"),
            await ask(made, Op.RMDIR, 1, b"d\0"),
            await ask(made, Op.RENAME, 1, rename),
            await ask(made, Op.RENAME2, 1, rename2),
        ]
    assert made.is_quiet(), "pyfuse3 has received none"
    assert fakes.calls == [
        ("lookup", NEW, b"name"),
        ("getattr", NEW),
        (
            "setattr",
            NEW,
            BY,
            {
                "mode": 0o100600,
                "uid": 33,
                "gid": None,
                "size": None,
                "atime_ns": None,
                "mtime_ns": 5 * 10**9 + 6,
            },
        ),
        ("make", 1, b"d", stat.S_IFDIR | 0o755, 0o022, BY),
        ("unlink", 1, b"a", BY),
        ("rmdir", 1, b"d", BY),
        ("rename", 1, b"old", 8, b"new", 0, BY),
        ("rename", 1, b"old", 8, b"new", 1, BY),
    ]
    assert all(reply.error == 0 and reply.body == b"" for reply in without)
    now = attributes()
    for reply in (alone, changed):
        valid_s, _, _ = wire.ATTR_OUT.unpack_from(reply.body)
        found = wire.parse_stat(reply.body, wire.ATTR_OUT.size)
        assert valid_s == 86400 and len(reply.body) == wire.ATTR_OUT.size + wire.ATTR.size
        assert (found.ino, found.mode, found.uid, found.gid) == (NEW, now.mode, 5, 6)
        assert (found.size, found.blocks, found.nlink, found.blksize) == (11, 8, 1, 4096)
        assert (found.mtime_ns, found.ctime_ns) == (TIME_NS, TIME_NS + 1)
    for reply in (entry, made_here):
        nodeid, _, entry_s, attr_s, _, _ = wire.ENTRY.unpack_from(reply.body)
        assert (nodeid, entry_s, attr_s) == (NEW, 86400, 86400)
        assert len(reply.body) == wire.ENTRY.size + wire.ATTR.size


IOCTL_IN = struct.Struct("<QIIQII")


def ioctl(message: bytes, *, number: int | None = None, size: int | None = None) -> bytes:
    """The body of a request for an ioctl, of a hint by default."""
    length = len(message) if size is None else size
    number = request_number(length) if number is None else number
    return IOCTL_IN.pack(0, 0, number, 0, length, 0) + message


async def test_a_hint_reaches_its_handler_and_its_process_the_result(made: Rig) -> None:
    fakes = Fakes()
    sent: list[tuple[bytes, Caller]] = []

    def hint(message: bytes, caller: Caller) -> int:
        sent.append((message, caller))
        if not message:
            raise Refused(errno.ENOSPC)
        return len(message)

    cast(Any, fakes).hint = hint
    long = bytes(range(256)) * 64
    async with serving(made, fakes):
        for message in (b"a\0b", long[:MOST_BYTES]):
            reply = await ask(made, Op.IOCTL, 1, ioctl(message))
            assert reply.error == 0
            assert struct.unpack("<iIII", reply.body) == (len(message), 0, 0, 0)
        assert (await ask(made, Op.IOCTL, 1, ioctl(b""))).error == errno.ENOSPC
    caller = Caller(77, 0, 0)
    assert sent == [(b"a\0b", caller), (long[:MOST_BYTES], caller), (b"", caller)]
    assert made.is_quiet(), "pyfuse3 has received none"


async def test_any_other_ioctl_is_refused_without_python(made: Rig) -> None:
    fakes, hint = Fakes(), request_number(3)
    others = (0x5401, 0x80086601, hint ^ 1, hint ^ 1 << 8, hint ^ 3 << 30, hint | 2 << 30)
    async with serving(made, fakes):
        for number in others:
            reply = await ask(made, Op.IOCTL, 1, ioctl(b"abc", number=number))
            assert reply.error == errno.ENOTTY
        assert (await ask(made, Op.IOCTL, 1, ioctl(b"abc")[:20])).error == errno.ENOTTY
        for size in (2, 4, 2**32 - 1):
            reply = await ask(made, Op.IOCTL, 1, ioctl(b"abc", size=size, number=hint))
            assert reply.error == errno.EINVAL
    assert fakes.calls == [] and made.is_quiet()


async def test_the_hints_that_wait_are_limited(made: Rig) -> None:
    """A hint takes much longer than any other request, and a user may have many threads."""
    fakes = Fakes()
    cast(Any, fakes).hint = lambda message, caller: 0
    async with serving(made, fakes):
        await trio.testing.wait_all_tasks_blocked()
        # None is taken out of the queue until the event loop runs.
        sent = [made.send(Op.IOCTL, 1, ioctl(bytes(MOST_BYTES)), pid=77) for _ in range(200)]
        early = Counter(made.any_answer(20.0).error for _ in range(len(sent) - 2 * 32))
        assert early == {errno.EBUSY: len(sent) - 2 * 32}
        late = Counter[int]()
        for _ in range(len(sent) - early.total()):
            found = await trio.to_thread.run_sync(made.any_answer, 20.0)
            late[found.error] += 1
        assert late.keys() <= {0, errno.EBUSY} and late[0] >= 32
        refused = early[errno.EBUSY] + late[errno.EBUSY]
        assert made.datapath.refused_hints() == (refused, BY.uid, 77)
        assert (await ask(made, Op.IOCTL, 1, ioctl(b"abc"))).error == 0
        assert made.datapath.refused_hints()[0] == 0


async def test_a_missing_name_is_an_entry_without_a_number(made: Rig) -> None:
    fakes = Fakes()
    fakes.returns["lookup"] = 5
    async with serving(made, fakes):
        reply = await ask(made, Op.LOOKUP, NEW, b"name\0")
    nodeid, _, entry_s, _, _, _ = wire.ENTRY.unpack_from(reply.body)
    assert (reply.error, nodeid, entry_s) == (0, 0, 5)


async def test_a_file_that_is_created_is_open_and_served_from_its_object(
    made: Rig, tmp_path: Path
) -> None:
    fakes = Fakes()
    fd = os.open(tmp_path / "object", os.O_RDWR | os.O_CREAT)
    async with serving(made, fakes):
        assert made.datapath.bind_written(NEW, fd, tier=1, create=True)
        reply = await answer(made, made.send_create(b"new"))
        handle, flags, _ = wire.OPEN_OUT.unpack_from(reply.body, wire.ENTRY.size + wire.ATTR.size)
        assert flags & (wire.FOPEN_DIRECT_IO | wire.FOPEN_KEEP_CACHE) and handle & wire.HANDLE_BOUND
        assert made.write(NEW, handle, 0, b"bytes").error == 0
        assert (await answer(made, made.send_release(NEW, handle))).error == 0
    os.close(fd)
    assert (tmp_path / "object").read_bytes() == b"bytes"
    flags_asked = os.O_WRONLY | os.O_CREAT
    assert fakes.calls == [
        ("create", 1, b"new", 0o100600, 0o022, flags_asked, BY),
        ("release", NEW),
    ]
    assert made.datapath.open_files() == 0


async def test_many_requests_take_one_wakeup_and_one_task(
    made: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes, counted = Fakes(), Counter[str]()
    take, spawn = type(made.datapath).requests, trio.Nursery.start_soon

    def taken(datapath: Any) -> Any:
        found = take(datapath)
        # The wake-up for the last request may come after that request was taken with the others.
        counted["wakeups"] += bool(found)
        return found

    def spawned(nursery: trio.Nursery, *args: Any, **kwargs: Any) -> None:
        counted["tasks"] += 1
        spawn(nursery, *args, **kwargs)

    async with serving(made, fakes):
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(type(made.datapath), "requests", taken)
        monkeypatch.setattr(trio.Nursery, "start_soon", spawned)
        sent = [made.send(Op.UNLINK, 1, b"%d\0" % number) for number in range(100)]
        # All are in the queue before the event loop runs.
        while made.datapath.state().waiting < len(sent):
            pass
        while len(fakes.calls) < len(sent):
            await trio.lowlevel.checkpoint()
        assert counted == {"wakeups": 1}
        for unique in sent:
            assert (await answer(made, unique)).error == 0
    assert sorted(name for _, _, name, _ in fakes.calls) == sorted(b"%d" % n for n in range(100))


async def test_a_request_that_waits_delays_no_other(made: Rig) -> None:
    fakes = Fakes()
    fakes.waits = {"rename"}
    rename = (8).to_bytes(8, "little") + b"old\0new\0"
    async with serving(made, fakes):
        waiting = [made.send(Op.RENAME, 1, rename) for _ in range(3)]
        for name in (b"a", b"b"):
            assert (await ask(made, Op.UNLINK, 1, name + b"\0")).error == 0
        assert made.datapath.state().waiting == 3
        fakes.go.set()
        for unique in waiting:
            assert (await answer(made, unique)).error == 0
        assert (await ask(made, Op.UNLINK, 1, b"c\0")).error == 0


async def test_catching_up_waits_for_received_requests_and_not_for_waiting_ones(made: Rig) -> None:
    fakes = Fakes()
    fakes.waits = {"rename"}
    async with serving(made, fakes) as direct:
        await trio.testing.wait_all_tasks_blocked()
        await direct.catch_up()
        made.send(Op.RENAME, 1, (8).to_bytes(8, "little") + b"old\0new\0")
        made.send(Op.UNLINK, 1, b"a\0")
        while made.datapath.requests_so_far() < 2:
            pass
        await direct.catch_up()
        assert {name for name, *_ in fakes.calls} == {"rename", "unlink"}


async def test_requests_under_way_are_answered_after_the_end(made: Rig) -> None:
    fakes = Fakes()
    fakes.waits = {"unlink"}
    async with serving(made, fakes) as direct:
        unique = made.send(Op.UNLINK, 1, b"a\0")
        while not fakes.calls:
            await trio.sleep(0.001)
        direct.stop()
        await trio.testing.wait_all_tasks_blocked()
        fakes.go.set()
    assert made.answer(unique).error == 0


async def test_an_exception_is_the_error_of_its_request_alone(made: Rig) -> None:
    fakes = Fakes()
    fakes.raises = {
        "unlink": [Refused(errno.EACCES), ZeroDivisionError(), OSError(errno.EAGAIN, "")],
    }
    async with serving(made, fakes):
        errors = [(await ask(made, Op.UNLINK, 1, b"a\0")).error for _ in range(4)]
    assert errors == [errno.EACCES, errno.EIO, errno.EIO, 0]
    assert fakes.bugs == [("unlink", errno.EIO), ("unlink", errno.EIO)]


async def test_a_request_is_repeated_when_names_can_be_read_again(made: Rig) -> None:
    fakes = Fakes()
    fakes.raises = {"unlink": [Unanswered(), Unanswered()]}
    async with serving(made, fakes):
        assert (await ask(made, Op.UNLINK, 1, b"a\0")).error == 0
    assert (len(fakes.calls), fakes.answered) == (3, 2)


async def test_a_caller_that_was_killed_is_answered_and_its_file_is_given_up(
    made: Rig, killed: int
) -> None:
    fakes = Fakes()
    fakes.waits = {"create"}
    async with serving(made, fakes):
        unique = made.send_create(b"new", pid=killed)
        while not fakes.calls:
            await trio.sleep(0.001)
        made.interrupt(unique)
        assert (await answer(made, unique)).error == errno.EINTR
        fakes.go.set()
        while not (served := made.datapath.served()):
            await trio.sleep(0.001)
    assert served == [(NEW, ABANDONED, None, 0, 0, 0)]


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (Op.UNLINK, b"no end"),
        (Op.UNLINK, b"\0"),
        (Op.RENAME, (8).to_bytes(8, "little") + b"one\0"),
        (Op.RENAME, bytes(4)),
        (Op.MKDIR, bytes(8)),
        (Op.SETATTR, bytes(80)),
        (Op.UNLINK, b"x" * 1100 + b"\0"),
        (Op.READLINK, b""),
    ],
)
async def test_unusual_requests_go_to_pyfuse3(made: Rig, opcode: Op, body: bytes) -> None:
    fakes = Fakes()
    async with serving(made, fakes):
        unique = made.send(opcode, NEW, body)
        if opcode == Op.SETATTR:
            # Refused before.
            assert made.answer(unique).error == errno.EINVAL
            return
        passed = made.passed()
        assert passed.opcode == opcode
        made.reply(passed, error=errno.ENOSYS)
        assert made.answer(unique).error == errno.ENOSYS
    assert not fakes.calls


async def test_before_python_takes_over_all_goes_to_pyfuse3(made: Rig) -> None:
    unique = made.send(Op.UNLINK, 1, b"a\0")
    made.reply(made.passed())
    assert made.answer(unique).error == 0
