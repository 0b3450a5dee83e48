"""The drain gives readers of the source, and processes that write, priority, in virtual time."""

from __future__ import annotations

import time

import pytest
import trio
import trio.testing

from monarch.transfer.pace import TokenBucket
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.mover import Courtesy
from monarch.writeback.op import Op
from monarch.writeback.queue_entry import Entry
from monarch.writeback.wakeups import Wakeups

Clock = trio.testing.MockClock


class Shared:
    """A source that readers keep busy, and a queue that fills."""

    def __init__(self, *, rate: int = 0, hold_s: float = 0.0) -> None:
        self.wakeups = Wakeups()
        self.queue = DrainQueue(self.wakeups, lambda seqs: None, lambda entry: False)
        self.busy = self.demand = False
        self.courtesy = Courtesy(
            self.wakeups,
            TokenBucket(rate, 1),
            lambda now: self.busy,
            lambda: self.demand,
            hold_s,
        )

    def put(self, *, synced: bool = False) -> None:
        seq = self.queue.last_seq + 1
        op = Op(kind="content", path=b"a", object=1, synced=synced)
        self.courtesy.note_change()
        self.queue.append(Entry(seq, op, time.time_ns(), 0, was_tried=False))

    def lets_write(self) -> bool:
        return self.courtesy.lets_write(self.queue)


async def test_readers_of_the_source_go_first_for_a_second(clock: Clock) -> None:
    shared = Shared()
    await shared.courtesy.wait(1)
    assert trio.current_time() == 0
    shared.busy = True
    await shared.courtesy.wait(1)
    assert trio.current_time() == pytest.approx(1, abs=0.02)
    shared.demand = True
    await shared.courtesy.wait(1)
    assert trio.current_time() == pytest.approx(1, abs=0.02)
    shared.demand, shared.wakeups.waiters = False, 1
    await shared.courtesy.wait(1)
    assert trio.current_time() == pytest.approx(1, abs=0.02)


async def test_the_bandwidth_is_kept(clock: Clock) -> None:
    shared = Shared(rate=100)
    for _ in range(3):
        await shared.courtesy.wait(100)
    assert trio.current_time() == pytest.approx(3, abs=0.02)


async def test_changes_wait_while_files_are_written_one_after_the_other(clock: Clock) -> None:
    shared = Shared(hold_s=5.0)
    assert not shared.lets_write()
    shared.put()
    await trio.sleep(0.2)
    assert shared.lets_write()
    await trio.sleep(0.2)
    assert not shared.lets_write()
    shared.put()
    assert shared.lets_write()


@pytest.mark.parametrize("why", ["synced", "demand", "waiter", "never"])
async def test_changes_do_not_wait_if_the_source_is_to_have_them(clock: Clock, why: str) -> None:
    shared = Shared(hold_s=0.0 if why == "never" else 5.0)
    shared.put(synced=why == "synced")
    shared.demand = why == "demand"
    shared.wakeups.waiters = int(why == "waiter")
    assert not shared.lets_write()
