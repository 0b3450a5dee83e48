"""Which contents are drained, and which only as a part of a later one, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from monarch.posix.credentials import Credentials
from monarch.types import Identity
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.op import Kind, Op
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_state import SourceState
from tests.writeback.files_in_use import FilesInUse

OLD = Identity(3, 30, 0, 7)


class Ordered:
    """Contents of one file, with what the source has of it."""

    def __init__(self) -> None:
        self.state, self.files = SourceState(), FilesInUse()
        self.order = ContentOrder(self.state, self.files)
        self._seq = 0

    def put(
        self, kind: Kind = "content", *, size: int = 0, intact: int = 0, by: int | None = None
    ) -> Entry:
        self._seq += 1
        credentials = None if by is None else Credentials(by, by)
        op = Op(kind=kind, path=b"a", object=1, size=size, intact=intact, by=credentials)
        self.order.expect(self._seq, op)
        return Entry(self._seq, op, 0, 0, was_tried=False)

    def is_published(self) -> None:
        self.state.note(Op(kind="content", path=b"a", object=1), OLD)


@pytest.fixture
def it() -> Ordered:
    return Ordered()


@pytest.mark.finding("W5")
async def test_a_content_that_was_written_over_comes_with_the_next_one(it: Ordered) -> None:
    first, attr, second = it.put(size=3), it.put("attr"), it.put(size=4)
    assert it.order.later(first) is second.op
    assert it.order.is_left_out(first)
    assert first.skipped
    it.order.settle(first)
    it.order.settle(attr)
    # It is made, and the source lacks its bytes.
    assert it.order.unmet == {first.seq}
    assert not it.order.is_left_out(second)
    it.order.settle(second)
    assert it.order.unmet == set()


async def test_a_new_file_that_was_only_appended_to_keeps_its_place(it: Ordered) -> None:
    first = it.put(size=3)
    it.put(size=8, intact=3)
    assert not it.order.is_left_out(first)
    it.files.lowest_of[1] = 2
    assert it.order.is_left_out(first)


@pytest.mark.finding("W9")
async def test_a_published_file_that_is_appended_to_is_put_off_for_a_while_only(
    it: Ordered, clock: trio.testing.MockClock
) -> None:
    it.is_published()
    first, second = it.put(size=3), it.put(size=5, intact=3)
    it.put(size=8, intact=5)
    assert it.order.is_left_out(first)
    await trio.sleep(9)
    third = second
    it.order.settle(first)
    assert it.order.is_left_out(third)
    it.order.settle(third)
    await trio.sleep(1.1)
    fourth = it.put(size=9, intact=8)
    it.put(size=10, intact=9)
    assert not it.order.is_left_out(fourth)


async def test_a_published_file_that_is_renamed_first_keeps_its_place(it: Ordered) -> None:
    it.is_published()
    first = it.put(size=3)
    it.put("attr")
    it.put("rename")
    it.put(size=4)
    assert not it.order.is_left_out(first)


async def test_a_content_that_may_have_some_of_its_names_keeps_its_place(it: Ordered) -> None:
    first = it.put(size=3)
    first.op = replace(first.op, paths=(b"a", b"b"))
    it.put(size=4)
    first.was_tried = True
    it.state.note_staged(1, OLD)
    assert not it.order.is_left_out(first)


async def test_bytes_of_two_users_come_each_with_the_rights_of_one(it: Ordered) -> None:
    first = it.put(size=3, by=1)
    it.put(size=4, by=2)
    assert not it.order.is_left_out(first)


@pytest.mark.parametrize("why", ["moot", "lost", "dead", "through"])
async def test_a_content_that_is_not_needed_is_left_out(it: Ordered, why: str) -> None:
    only = it.put(size=3)
    assert not it.order.is_left_out(only)
    if why == "moot":
        only.is_moot = True
    elif why == "through":
        # The object has no file any more: these bytes come with those behind them.
        it.put("through")
    elif why == "lost":
        it.order.lost[1] = b"a"
    else:
        it.files.dead.add(1)
    assert it.order.is_left_out(only)
    it.order.settle(only)
    assert only.seq not in it.order.unmet
