"""The rooms of the front below the kernel, each with fakes that behave, and virtual time."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.errors import Refused
from monarch.namespace.overlay import Node
from monarch.posix.credentials import Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.types import WRITTEN_INO, Identity, Ino
from monarch.writeback.commits import FsyncFailures
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.open_file import (
    NO_FAST_WRITES,
    ObjectBytes,
    OpenFile,
    OpenTable,
    StagedBytes,
)
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_files import DrainedObjects
from monarch.writeback.tier_objects import TierObjects
from monarch.writeback.unlinked import UnlinkedFiles

Clock = trio.testing.MockClock
ALICE, BOB = Credentials(1001, 1001), Credentials(1002, 1002)


@pytest.fixture
def clock() -> Clock:
    return Clock(autojump_threshold=0.01)


class Names:
    """Nodes with one name each, or none."""

    def __init__(self) -> None:
        self.nodes_: dict[Ino, Node] = {}

    def add(self, number: int, *, name: bytes = b"f") -> Node:
        ino = Ino(WRITTEN_INO + number)
        node = Node(ino, Ino(1), 0o100644, 0, 0, 1, 0, 0, 0, object=number)
        if name:
            node.names[Ino(1), name + b"%d" % number] = None
        self.nodes_[ino] = node
        return node

    def node(self, ino: Ino) -> Node | None:
        return self.nodes_.get(ino)

    def nodes(self) -> Iterator[Node]:
        return iter(list(self.nodes_.values()))

    def visible_paths(self, ino: Ino) -> Iterator[bytes]:
        return (name for _, name in self.nodes_[ino].names)

    def visible_path(self, ino: Ino) -> bytes:
        return next(self.visible_paths(ino), b"unlinked")

    def at_source(self, ino: Ino) -> None:
        return None

    def refresh(self, ino: Ino, now: object) -> None: ...

    def forget_node(self, ino: Ino) -> None:
        del self.nodes_[ino]


class Journal:
    """``error`` is what it answers to each change, 0 if it takes them."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.error = 0

    def append(self, op: Op) -> int:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.ops.append(op)
        return len(self.ops)

    def has_room(self) -> bool:
        return not self.error

    def sync(self) -> None: ...


class Datapath:
    """Readers that have files open without Python are in ``read``."""

    def __init__(self) -> None:
        self.read: set[Ino] = set()
        self.known: set[Ino] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(NO_FAST_WRITES, name)

    def is_open(self, ino: Ino) -> bool:
        return ino in self.read

    def outdate(self, ino: Ino) -> bool:
        return ino in self.read

    def forget_object(self, ino: Ino) -> None:
        self.known.discard(ino)


class Disk(Objects):
    """``error`` is what it answers to each fsync, and to writing an object anew."""

    error = 0

    def _fail(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def sync(self, number: int, fd: int) -> None:
        self._fail()
        super().sync(number, fd)

    def rewrite(self, number: int) -> None:
        self._fail()
        super().rewrite(number)


class Front:
    """The rooms that know the objects, wired as in ``WriteFront``."""

    def __init__(self, directory: Path) -> None:
        self.disk = Disk(directory)
        self.threads = ThreadPool(2, "test", abandon=True)
        self.names, self.journal, self.datapath = Names(), Journal(), Datapath()
        self.put: list[int] = []
        # Changes after this one are not at the source.
        self.done = 0
        names, drain = cast(Any, self.names), cast(Any, self)
        self.table = ObjectTable(names)
        self.objects = TierObjects(self.disk, self.threads, self.threads, 1)
        cast(Any, self.objects).close_soon = os.close
        self.numbers = itertools.count(1)
        self.opens = OpenTable(cast(Any, self.datapath), 1)
        self.recorder = Recorder(
            names,
            self.table,
            cast(Any, self.journal),
            cast(Any, SimpleNamespace(put=lambda seq, op: self.put.append(seq))),
            self.objects,
        )
        self.unlinked = UnlinkedFiles(
            names,
            self.table,
            self.opens,
            self.objects,
            self.recorder,
            cast(Any, None),
        )
        self.drained = DrainedObjects(
            self.table, self.disk, drain, self.opens, self.recorder, self.unlinked
        )
        self.failures = FsyncFailures(names, self.table, self.objects, self.opens, self.drained)

    @property
    def progress(self) -> Front:
        return self

    def is_done(self, seq: int) -> bool:
        return seq <= self.done

    def create(self, *, name: bytes = b"f") -> OpenFile:
        """An open file with three bytes."""
        number = next(self.numbers)
        fd = self.disk.create(number)
        os.pwrite(fd, b"abc", 0)
        node = self.names.add(number, name=name)
        file = OpenFile(node, ObjectBytes(fd, number, self.objects), self.opens.fast)
        self.opens.files[node.ino] = self.table.open[number] = file
        self.table.own(node)
        file.touch(0)
        return file

    def closed(self, *, name: bytes = b"f", drained: bool = False) -> Node:
        file = self.create(name=name)
        node = file.node
        if name:
            self.recorder.record(node)
        self.recorder.keep_status(file)
        if drained:
            self.done = len(self.journal.ops)
            self.table.states.published(node.object, Identity(3, 0, 0, node.object))
        file.place.close()
        del self.opens.files[node.ino], self.table.open[node.object]
        return node

    async def removed(self, number: int) -> None:
        """Until an object is gone; its removal is in a thread."""
        with trio.fail_after(60):
            while number in self.disk.numbers():
                await trio.sleep(0.01)

    def kinds(self) -> list[str]:
        return [op.kind for op in self.journal.ops]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    front = Front(tmp_path)
    yield front
    for file in front.table.open.values():
        file.place.close()


# -- the change log --------------------------------------------------------------------------------


async def test_a_change_that_did_not_fit_is_recorded_before_all_later_ones(front: Front) -> None:
    front.journal.error = errno.ENOSPC
    for kind in ("mkdir", "unlink"):
        with pytest.raises(Refused):
            front.recorder.note(Op(kind=cast(Any, kind), path=b"a"))
    with pytest.raises(Refused):
        front.recorder.note(Op(kind="content", path=b"a"))
    assert not front.recorder.has_room() and not front.recorder.is_broken
    assert (front.objects.failures, front.put) == (3, [])
    front.journal.error = 0
    assert front.recorder.note(Op(kind="rmdir", path=b"b")) == 3
    # A content is recorded anew: its bytes may be others by now.
    assert front.kinds() == ["mkdir", "unlink", "rmdir"] and front.put == [1, 2, 3]
    assert all(op.strict for op in front.journal.ops) and front.recorder.has_room()


async def test_after_another_failure_of_the_journal_nothing_is_changed(front: Front) -> None:
    front.journal.error = errno.EIO
    with pytest.raises(Refused) as raised:
        front.recorder.note(Op(kind="mkdir", path=b"a"))
    assert raised.value.errno == errno.EIO and front.recorder.is_broken
    assert "EIO" in front.objects.failure


# -- contents --------------------------------------------------------------------------------------


async def test_an_open_file_is_recorded_when_it_was_not_written_for_two_seconds(
    front: Front,
) -> None:
    file = front.create()
    for step in range(8):
        if step < 3:
            file.touch(step)
        front.recorder.record_if_quiet(file, 0.5)
    assert front.kinds() == ["content"] and front.journal.ops[0].size == 3
    assert front.recorder.is_recorded(file.node)
    for _ in range(8):
        front.recorder.record_if_quiet(file, 0.5)
    assert front.kinds() == ["content"], "nothing was written since"
    file.touch(1)
    front.recorder.record(file.node)
    assert [op.intact for op in front.journal.ops] == [0, 1]


async def test_a_content_that_did_not_fit_is_recorded_as_the_file_is_by_then(front: Front) -> None:
    file = front.create()
    front.journal.error = errno.ENOSPC
    with pytest.raises(Refused):
        front.recorder.record(file.node)
    os.pwrite(file.place.fd, b"defg", 3)
    front.recorder.record_delayed()
    assert front.journal.ops == []
    front.journal.error = 0
    front.recorder.record_delayed()
    front.recorder.record_delayed()
    assert [op.size for op in front.journal.ops] == [7]


async def test_the_last_user_with_the_file_open_for_writing_makes_its_content(front: Front) -> None:
    file = front.create()
    front.recorder.copied_up(file.object, BOB)
    front.recorder.record(file.node)
    file.touch(0)
    for user in (ALICE, BOB):
        front.recorder.may_write(file, user)
    front.recorder.record(file.node)
    first, second = front.journal.ops
    assert first.same and not second.same
    if os.geteuid() == 0:
        assert (first.by, second.by, second.also) == (BOB, BOB, (ALICE,))


# -- open files ------------------------------------------------------------------------------------


async def test_a_file_that_no_process_has_open_is_not_opened_without_python(front: Front) -> None:
    ino = Ino(WRITTEN_INO)
    front.datapath.known.add(ino)
    assert not front.opens.is_in_use(ino) and not front.datapath.known
    front.datapath.read.add(ino)
    assert front.opens.is_in_use(ino) and not front.opens.is_open(ino)


async def test_an_open_waits_until_another_task_has_opened_the_file(
    front: Front, clock: Clock
) -> None:
    file = front.create()
    found: list[OpenFile | None] = []
    del front.opens.files[file.ino]

    async def opened() -> None:
        found.append(await front.opens.get(file.ino))

    async with trio.open_nursery() as nursery:
        with front.opens.opening(file.ino):
            nursery.start_soon(opened)
            await trio.sleep(1)
            assert front.opens.busy() == {file.ino} and not found
            front.opens.files[file.ino] = file
    assert found == [file]


async def test_staged_bytes_tell_their_size_and_close_the_object_too(front: Front) -> None:
    file = front.create()
    before, staged = file.place.fd, os.memfd_create("staged")
    place = StagedBytes(staged, file.ino, file.object, front.objects, cast(Any, None), before)
    file.node.grow(10, 1)
    file.node.grow(5, 2)
    assert file.node.size == 10 and not place.keep_status(file.node)
    front.disk.note_failure(file.object, errno.EIO)
    with pytest.raises(Refused):
        await place.sync(file.node)
    closed: list[int] = []
    cast(Any, front.objects).close_soon = closed.append
    place.close()
    assert closed == [staged, before]
    os.close(staged)
    cast(Any, front.objects).close_soon = os.close


# -- files that leave ------------------------------------------------------------------------------


async def test_an_unlinked_file_is_kept_for_a_second_and_while_it_is_read(
    front: Front, clock: Clock
) -> None:
    nodes = [front.closed(name=b"") for _ in range(3)]
    numbers = [node.object for node in nodes]
    front.datapath.read.add(nodes[1].ino)
    for node in nodes:
        front.unlinked.leave(node)
    with front.opens.opening(nodes[2].ino):
        front.unlinked.forget_old()
        assert len(front.names.nodes_) == 3
        await trio.sleep(1.1)
        front.unlinked.forget_old()
    await front.removed(numbers[0])
    assert set(front.names.nodes_) == {nodes[1].ino, nodes[2].ino}
    front.unlinked.closed_by_readers(nodes[1].ino)
    await trio.sleep(1.1)
    front.unlinked.forget_old()
    assert not front.names.nodes_ and front.kinds() == 3 * ["gone"]
    for number in numbers:
        await front.removed(number)


async def test_drained_objects_leave_oldest_first_unless_they_are_open(
    front: Front, clock: Clock
) -> None:
    nodes = [front.closed(drained=True) for _ in range(4)]
    numbers = [node.object for node in nodes]
    assert [front.drained.durable(node) for node in nodes] == 4 * [b"source"]
    with front.opens.opening(nodes[0].ino):
        assert front.drained.release_oldest(1) > 0
    assert [node.object for node in nodes] == [numbers[0], 0, numbers[2], numbers[3]]
    front.datapath.read.add(nodes[2].ino)
    assert not front.drained.release_if_clean(nodes[2])
    front.done = 0
    assert front.drained.release_oldest(1 << 30) == 0, "the source lacks their last change"
    assert front.drained.durable(nodes[3]) == b"none"
    await front.removed(numbers[1])


# -- fsync that fails ------------------------------------------------------------------------------


async def test_a_file_whose_fsync_failed_is_written_anew_with_growing_pauses(
    front: Front, clock: Clock
) -> None:
    node = front.closed()
    fd = front.disk.open(node.object)
    file = OpenFile(node, ObjectBytes(fd, node.object, front.objects), NO_FAST_WRITES)
    front.disk.error = errno.EIO
    with pytest.raises(Refused):
        await file.place.sync(node)
    front.failures.note(file, errno.EIO)
    assert front.failures.paths() == [front.names.visible_path(node.ino)]
    assert front.drained.durable(node) == b"none" and front.objects.failures == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(front.failures.run)
        tried_s: list[float] = []
        with trio.fail_after(1000):
            while len(tried_s) < 6:
                await trio.sleep(0.1)
                if front.objects.failures - 1 > len(tried_s):
                    tried_s.append(trio.current_time())
        # At 0, 1, 3, 7, 15 and 31 s, with half a second between two looks; later on a busy machine,
        # where the clock of the test runs while a thread works.
        gaps_s = [later - earlier for earlier, later in itertools.pairwise(tried_s)]
        assert all(gap_s >= 0.4 * 2**turn for turn, gap_s in enumerate(gaps_s)), tried_s
        front.disk.error = 0
        await trio.sleep(61)
        nursery.cancel_scope.cancel()
    assert front.failures.paths() == []
    file.place.close()
