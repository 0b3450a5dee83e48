"""Which contents are staged ahead of their turn, and how they are shared among the workers."""

from __future__ import annotations

import errno
from typing import cast

import pytest

from monarch.errors import Refused
from monarch.transfer.pace import TokenBucket
from monarch.types import Identity
from monarch.writeback import stager
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.mover import Courtesy
from monarch.writeback.op import Kind, Op
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_state import SourceState
from monarch.writeback.stager import StageAhead, Stager
from monarch.writeback.wakeups import Trouble, Wakeups
from tests.writeback.files_in_use import FilesInUse


class CountingStager:
    """Stages nothing; contents of up to ten bytes are small."""

    def __init__(self) -> None:
        self.count = 0

    def is_small(self, entry: Entry) -> bool:
        return entry.op.size <= 10


class Waiting:
    """Changes that wait, and what a worker would stage of them next."""

    def __init__(self, workers: int = 2) -> None:
        wakeups, state = Wakeups(), SourceState()
        self.state = state
        self.queue = DrainQueue(wakeups, lambda seqs: None, lambda entry: False)
        self.order = ContentOrder(state, FilesInUse())
        self.stager, self.trouble = CountingStager(), Trouble(wakeups)
        bucket = TokenBucket(0, 0)
        courtesy = Courtesy(wakeups, bucket, lambda now: False, lambda: False, 0.0)
        self.ahead = StageAhead(
            self.queue,
            state,
            self.order,
            cast(Stager, self.stager),
            courtesy,
            self.trouble,
            wakeups,
            workers,
        )

    def put(
        self,
        path: bytes,
        object: int = 0,
        *,
        kind: Kind = "content",
        to: bytes = b"",
        size: int = 5,
    ) -> Entry:
        seq = self.queue.last_seq + 1
        op = Op(kind=kind, path=path, to=to, paths=(path,), object=object, size=size)
        entry = Entry(seq, op, 0, 0, was_tried=False)
        self.state.foresee(op)
        self.queue.append(entry)
        self.order.expect(seq, op)
        return entry

    def next(self) -> list[list[int]]:
        return [[entry.seq for entry in lot] for lot in self.ahead.next_lots()]


async def test_many_small_contents_are_shared_and_a_large_one_is_staged_alone() -> None:
    waiting = Waiting(workers=2)
    for number in range(1, 6):
        waiting.put(b"%d" % number, number)
    assert waiting.next() == [[1, 2, 3], [4, 5]]
    waiting = Waiting()
    waiting.put(b"large", 1, size=100)
    waiting.put(b"small", 2)
    assert waiting.next() == [[1]]
    waiting.queue.front.is_staging = True
    assert waiting.next() == [[2]]


async def test_small_contents_before_a_large_one_are_staged_first() -> None:
    waiting = Waiting()
    waiting.put(b"small", 1)
    waiting.put(b"large", 2, size=100)
    assert waiting.next() == [[1]]


@pytest.mark.parametrize("state", ["is_staging", "was_ahead", "published", "skipped", "same"])
async def test_a_content_that_is_under_way_or_ready_is_not_staged(state: str) -> None:
    waiting = Waiting()
    entry = waiting.put(b"a", 1)
    if state == "same":
        entry.op = Op(kind="content", path=b"a", paths=(b"a",), object=1, same=True)
    else:
        setattr(entry, state, True)
    assert waiting.next() == []


async def test_no_content_is_staged_before_its_directory_or_its_attributes_are_there() -> None:
    waiting = Waiting()
    waiting.put(b"d", kind="mkdir")
    waiting.put(b"d/a", 1)
    waiting.put(b"b", 2, kind="attr")
    waiting.put(b"b", 2)
    waiting.put(b"x", 3, kind="rename", to=b"c")
    waiting.put(b"c", 4)
    free = waiting.put(b"free", 5)
    assert waiting.next() == [[free.seq]]


async def test_the_content_of_a_new_file_has_its_attributes() -> None:
    waiting = Waiting()
    waiting.put(b"a", 1, kind="create")
    waiting.put(b"a", 1, kind="attr")
    waiting.put(b"a", 1, kind="xattr")
    content = waiting.put(b"a", 1)
    assert waiting.next() == [[content.seq]]
    # Once the source has the file, its attributes are changed there first.
    waiting.state.note(content.op, Identity(5, 0, 0, 1))
    assert waiting.next() == []


async def test_a_content_of_which_a_later_one_waits_is_left_to_its_turn() -> None:
    waiting = Waiting()
    waiting.put(b"a", 1)
    waiting.put(b"a", 1)
    assert waiting.next() == []


async def test_nothing_is_staged_while_the_source_takes_nothing_or_has_much_that_is_staged() -> (
    None
):
    waiting = Waiting()
    waiting.put(b"a", 1)
    waiting.trouble.reason = "it is full"
    assert waiting.next() == []
    waiting.trouble.reason = None
    waiting.stager.count = stager._MOST_STAGED
    assert waiting.next() == []
    waiting.stager.count -= 1
    assert waiting.next() == [[1]]


async def test_a_content_that_depends_on_a_refused_change_is_not_staged() -> None:
    waiting = Waiting()
    waiting.put(b"d", kind="mkdir")
    waiting.queue.hold_front(PermissionError(errno.EACCES, ""))
    waiting.put(b"d/a", 1)
    assert waiting.next() == []


async def test_names_that_cannot_be_read_now_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()
    waiting.put(b"a", 1)

    def refused(entry: Entry) -> bool:
        raise Refused(errno.EIO)

    monkeypatch.setattr(waiting.order, "is_skipped", refused)
    with pytest.raises(Refused):
        waiting.next()
