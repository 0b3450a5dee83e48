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
from monarch.posix.acl import Acls
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
from tests.equipment.virtual_clock import until

Clock = trio.testing.MockClock
ALICE, BOB = Credentials(1001, 1001), Credentials(1002, 1002)


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

    def path_text(self, ino: Ino, *, is_visible: bool) -> str:
        assert is_visible
        return repr(os.fsdecode(self.visible_path(ino)))

    def acls(self, ino: Ino) -> Acls:
        return Acls()

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

    takes_content = has_room

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


class Rig:
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
            lambda path: [path],
        )
        self.drained = DrainedObjects(
            self.table, self.disk, drain, self.opens, self.recorder, self.unlinked
        )
        self.failures = FsyncFailures(names, self.table, self.objects, self.opens, self.drained)

    @property
    def progress(self) -> Rig:
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
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for file in rig.table.open.values():
        file.place.close()


# -- the change log --------------------------------------------------------------------------------


async def test_a_change_that_did_not_fit_is_recorded_before_all_later_ones(rig: Rig) -> None:
    rig.journal.error = errno.ENOSPC
    for kind in ("mkdir", "unlink"):
        with pytest.raises(Refused):
            rig.recorder.note(Op(kind=cast(Any, kind), path=b"a"))
    with pytest.raises(Refused):
        rig.recorder.note(Op(kind="content", path=b"a"))
    assert not rig.recorder.has_room() and not rig.recorder.is_broken
    assert (rig.objects.failures, rig.put) == (3, [])
    rig.journal.error = 0
    assert rig.recorder.note(Op(kind="rmdir", path=b"b")) == 3
    # A content is recorded anew: its bytes may be others by now.
    assert rig.kinds() == ["mkdir", "unlink", "rmdir"] and rig.put == [1, 2, 3]
    assert all(op.strict for op in rig.journal.ops) and rig.recorder.has_room()


async def test_after_another_failure_of_the_journal_nothing_is_changed(rig: Rig) -> None:
    rig.journal.error = errno.EIO
    with pytest.raises(Refused) as raised:
        rig.recorder.note(Op(kind="mkdir", path=b"a"))
    assert raised.value.errno == errno.EIO and rig.recorder.is_broken
    assert "EIO" in rig.objects.failure


# -- contents --------------------------------------------------------------------------------------


async def test_an_open_file_is_recorded_when_it_was_not_written_for_two_seconds(
    rig: Rig,
) -> None:
    file = rig.create()
    for step in range(8):
        if step < 3:
            file.touch(step)
        rig.recorder.record_if_quiet(file, 0.5)
    assert rig.kinds() == ["content"] and rig.journal.ops[0].size == 3
    assert rig.recorder.is_recorded(file.node)
    for _ in range(8):
        rig.recorder.record_if_quiet(file, 0.5)
    assert rig.kinds() == ["content"], "nothing was written since"
    file.touch(1)
    rig.recorder.record(file.node)
    assert [op.intact for op in rig.journal.ops] == [0, 1]


async def test_a_content_that_did_not_fit_is_recorded_as_the_file_is_by_then(rig: Rig) -> None:
    file = rig.create()
    rig.journal.error = errno.ENOSPC
    with pytest.raises(Refused):
        rig.recorder.record(file.node)
    os.pwrite(file.place.fd, b"defg", 3)
    rig.recorder.record_delayed()
    assert rig.journal.ops == []
    rig.journal.error = 0
    rig.recorder.record_delayed()
    rig.recorder.record_delayed()
    assert [op.size for op in rig.journal.ops] == [7]


async def test_the_last_user_with_the_file_open_for_writing_makes_its_content(rig: Rig) -> None:
    file = rig.create()
    rig.recorder.copied_up(file.object, BOB)
    rig.recorder.record(file.node)
    file.touch(0)
    for user in (ALICE, BOB):
        rig.recorder.may_write(file, user)
    rig.recorder.record(file.node)
    first, second = rig.journal.ops
    assert first.same and not second.same
    if os.geteuid() == 0:
        assert (first.by, second.by, second.also) == (BOB, BOB, (ALICE,))


# -- open files ------------------------------------------------------------------------------------


async def test_a_file_that_no_process_has_open_is_not_opened_without_python(rig: Rig) -> None:
    ino = Ino(WRITTEN_INO)
    rig.datapath.known.add(ino)
    assert not rig.opens.is_in_use(ino) and not rig.datapath.known
    rig.datapath.read.add(ino)
    assert rig.opens.is_in_use(ino) and not rig.opens.is_open(ino)


async def test_an_open_waits_until_another_task_has_opened_the_file(rig: Rig, clock: Clock) -> None:
    file = rig.create()
    found: list[OpenFile | None] = []
    del rig.opens.files[file.ino]

    async def opened() -> None:
        found.append(await rig.opens.get(file.ino))

    async with trio.open_nursery() as nursery:
        with rig.opens.opening(file.ino):
            nursery.start_soon(opened)
            await trio.sleep(1)
            assert rig.opens.busy() == {file.ino} and not found
            rig.opens.files[file.ino] = file
    assert found == [file]


async def test_staged_bytes_tell_their_size_and_close_the_object_too(rig: Rig) -> None:
    file = rig.create()
    before, staged = file.place.fd, os.memfd_create("staged")
    place = StagedBytes(staged, file.ino, file.object, rig.objects, cast(Any, None), before)
    file.node.grow(10, 1)
    file.node.grow(5, 2)
    assert file.node.size == 10 and not place.keep_status(file.node)
    rig.disk.note_failure(file.object, errno.EIO)
    with pytest.raises(Refused):
        await place.sync(file.node)
    closed: list[int] = []
    cast(Any, rig.objects).close_soon = closed.append
    place.close()
    assert closed == [staged, before]
    os.close(staged)
    cast(Any, rig.objects).close_soon = os.close


# -- files that leave ------------------------------------------------------------------------------


async def test_an_unlinked_file_is_kept_for_a_second_and_while_it_is_read(
    rig: Rig, clock: Clock
) -> None:
    nodes = [rig.closed(name=b"") for _ in range(3)]
    numbers = [node.object for node in nodes]
    rig.datapath.read.add(nodes[1].ino)
    for node in nodes:
        rig.unlinked.leave(node)
    with rig.opens.opening(nodes[2].ino):
        rig.unlinked.forget_old()
        assert len(rig.names.nodes_) == 3
        await trio.sleep(1.1)
        rig.unlinked.forget_old()
    await rig.removed(numbers[0])
    assert set(rig.names.nodes_) == {nodes[1].ino, nodes[2].ino}
    rig.unlinked.closed_by_readers(nodes[1].ino)
    await trio.sleep(1.1)
    rig.unlinked.forget_old()
    assert not rig.names.nodes_ and rig.kinds() == 3 * ["gone"]
    for number in numbers:
        await rig.removed(number)


async def test_drained_objects_leave_oldest_first_unless_they_are_open(
    rig: Rig, clock: Clock
) -> None:
    nodes = [rig.closed(drained=True) for _ in range(4)]
    numbers = [node.object for node in nodes]
    assert [rig.drained.durable(node) for node in nodes] == 4 * [b"source"]
    with rig.opens.opening(nodes[0].ino):
        assert rig.drained.release_oldest(1) > 0
    assert [node.object for node in nodes] == [numbers[0], 0, numbers[2], numbers[3]]
    rig.datapath.read.add(nodes[2].ino)
    assert not rig.drained.release_if_clean(nodes[2])
    rig.done = 0
    assert rig.drained.release_oldest(1 << 30) == 0, "the source lacks their last change"
    assert rig.drained.durable(nodes[3]) == b"none"
    await rig.removed(numbers[1])


# -- fsync that fails ------------------------------------------------------------------------------


async def test_a_file_whose_fsync_failed_is_written_anew_with_growing_pauses(
    rig: Rig, clock: Clock
) -> None:
    node = rig.closed()
    fd = rig.disk.open(node.object)
    file = OpenFile(node, ObjectBytes(fd, node.object, rig.objects), NO_FAST_WRITES)
    rig.disk.error = errno.EIO
    with pytest.raises(Refused):
        await file.place.sync(node)
    rig.failures.note(file, errno.EIO)
    assert rig.failures.shown() == [rig.names.path_text(node.ino, is_visible=True)]
    assert rig.drained.durable(node) == b"none" and rig.objects.failures == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.failures.run)
        tried_s: list[float] = []
        with trio.fail_after(1000):
            while len(tried_s) < 6:
                await trio.sleep(0.1)
                if rig.objects.failures - 1 > len(tried_s):
                    tried_s.append(trio.current_time())
        # At 0, 1, 3, 7, 15 and 31 s, with half a second between two looks; later on a busy machine,
        # where the clock of the test runs while a thread works.
        gaps_s = [later - earlier for earlier, later in itertools.pairwise(tried_s)]
        assert all(gap_s >= 0.4 * 2**turn for turn, gap_s in enumerate(gaps_s)), tried_s
        rig.disk.error = 0
        await trio.sleep(61)
        await until(lambda: rig.failures.shown() == [])
        nursery.cancel_scope.cancel()
    file.place.close()
