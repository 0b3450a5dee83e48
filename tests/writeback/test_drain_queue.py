"""The queue of the drain with what is held, and callers that wait for it, in virtual time."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Collection

import pytest
import trio
import trio.testing

from monarch.posix.credentials import Credentials
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.journal import Replay
from monarch.writeback.op import Kind, Op
from monarch.writeback.progress import Progress
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_state import SourceState
from monarch.writeback.wakeups import Trouble, Wakeups
from tests.writeback.files_in_use import FilesInUse

Clock = trio.testing.MockClock


class Rig:
    """A queue whose changes are made or refused by hand."""

    def __init__(self) -> None:
        self.aside: list[set[int]] = []
        self.wakeups = Wakeups()
        self.trouble = Trouble(self.wakeups)
        # The objects that no name leads to any more.
        self.dead: set[int] = set()
        self.queue = DrainQueue(
            self.wakeups, self._mark_aside, lambda entry: entry.op.object in self.dead
        )
        self.order = ContentOrder(SourceState(), FilesInUse())
        self.progress = Progress(self.queue, self.order, self.trouble, self.wakeups)

    def _mark_aside(self, seqs: Collection[int]) -> None:
        self.aside.append(set(seqs))

    def put(self, path: bytes, *, by: int = 0, kind: Kind = "mkdir", object: int = 0) -> Entry:
        seq = self.queue.last_seq + 1
        op = Op(kind=kind, path=path, paths=(path,), object=object, by=Credentials(by, by))
        entry = Entry(seq, op, 0, 0, was_tried=False)
        self.queue.append(entry)
        self.order.expect(seq, op)
        return entry

    def make(self) -> None:
        """The source takes the change at the front."""
        entry = self.queue.front
        self.queue.remove_front()
        if entry.op.kind == "unlink":
            self.queue.retry_soon(entry.op)
        self.order.settle(entry)
        self.progress.note_done(entry.seq)
        self.wakeups.wake_all()

    def refuse(self, number: int = errno.EACCES) -> None:
        """The source refuses the change at the front."""
        self.queue.hold_front(OSError(number, ""))
        self.wakeups.wake_all()

    def front(self) -> int:
        """The number of the change whose turn it is, 0 if there is none."""
        self.queue.sift()
        return self.queue.front.seq if self.queue else 0


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_dependents_of_a_refused_change_wait_and_other_users_overtake_them(
    rig: Rig,
) -> None:
    rig.put(b"d", by=1)
    rig.put(b"e", by=2)
    rig.put(b"d/x", by=2)
    rig.put(b"f", by=1)
    rig.put(b"g", by=3)
    assert rig.front() == 1
    rig.refuse()
    assert rig.front() == 2
    rig.make()
    assert rig.front() == 5
    rig.make()
    assert rig.front() == 0
    assert [entry.seq for entry in rig.queue.entries()] == [1, 3, 4]
    assert [refusal.seq for refusal in rig.queue.refusals()] == [1]
    assert rig.progress.is_done(2)
    assert rig.progress.is_done(5)
    assert not rig.progress.is_done(3)
    assert not rig.progress.has_all(2)


async def test_held_changes_are_retried_in_their_order_after_pauses_that_double(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"d", by=1)
    rig.put(b"e", by=1)
    times = []
    for _ in range(4):
        assert rig.front() == 1
        times.append(trio.current_time())
        rig.refuse()
        assert rig.front() == 0
        await trio.sleep(rig.queue.retry_in_s())
    assert times == pytest.approx([0, 1, 3, 7])
    assert rig.front() == 1
    rig.make()
    assert rig.front() == 2
    rig.make()
    assert rig.progress.has_all(2)


async def test_removals_have_as_much_time_as_the_tries_of_what_needs_their_room(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"new", by=1)
    for name in (b"a", b"b"):
        rig.put(name, by=1, kind="unlink")
    rig.refuse(errno.EDQUOT)
    for _ in range(6):
        await trio.sleep(rig.queue.retry_in_s())
        assert rig.front() == 1
        await trio.sleep(20)
        rig.refuse(errno.EDQUOT)
    assert rig.front() == 2
    rig.make()
    assert rig.queue.retry_in_s() == pytest.approx(20)
    # A short one is followed by others soon.
    await trio.sleep(20)
    assert rig.front() == 1
    rig.refuse(errno.EDQUOT)
    assert rig.front() == 3
    rig.make()
    assert rig.queue.retry_in_s() == pytest.approx(1)


async def test_a_full_source_takes_removals_of_all_users_only_and_nothing_is_refused(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"refused", by=1)
    rig.put(b"new", by=2)
    rig.put(b"made", by=3)
    removals = [rig.put(b"%d" % by, by=by, kind="unlink") for by in (1, 2, 3)]
    rig.refuse()
    assert rig.front() == 2
    for _ in range(7):
        rig.queue.hold_front(OSError(errno.ENOSPC, ""), is_full=True)
        # The source lacks more than room for the first user.
        assert rig.front() == removals[1].seq
        held = rig.queue.held
        assert [entry.waits_for_room for entry in held] == [False, True, True, True]
        assert [entry.seq for entry in rig.queue.not_refused()] == [2, 3, 4, 5, 6]
        await trio.sleep(rig.queue.retry_in_s())
        assert rig.front() == 1
        rig.refuse()
        assert rig.front() == 2
    assert [refusal.path for refusal in rig.queue.refusals()] == [b"refused"]
    assert rig.aside == []


async def test_a_refused_change_for_which_all_users_lack_room_later_is_not_refused_any_more(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"new")
    rig.refuse()
    assert [refusal.path for refusal in rig.queue.refusals()] == [b"new"]
    rig.front()
    await trio.sleep(rig.queue.retry_in_s())
    assert rig.front() == 1
    rig.queue.hold_front(OSError(errno.ENOSPC, ""), is_full=True)
    assert list(rig.queue.refusals()) == []
    assert [entry.waits_for_room for entry in rig.queue.held] == [True]
    assert rig.aside == []


async def test_callers_bring_the_next_try_at_a_full_source_forward_to_one_a_second(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"new")
    for pause_s in (1, 2, 4, 8):
        rig.queue.hold_front(OSError(errno.ENOSPC, ""), is_full=True)
        rig.front()
        assert rig.queue.retry_in_s() == pytest.approx(pause_s)
        await trio.sleep(pause_s)
        assert rig.front() == 1
    rig.queue.hold_front(OSError(errno.ENOSPC, ""), is_full=True)
    rig.wakeups.end_pause()
    assert rig.front() == 0 and rig.queue.retry_in_s() == pytest.approx(1)


async def test_changes_before_a_removal_go_ahead_with_it_at_a_full_source(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"new")
    rig.put(b"d", kind="attr")
    rig.put(b"d/a", kind="attr")
    rig.put(b"other", kind="attr")
    rig.put(b"d/b", kind="take", object=7)
    rig.put(b"d/b", kind="content", object=7)
    rig.put(b"d/a", kind="unlink")
    rig.put(b"d/b", kind="unlink", object=7)
    rig.put(b"", kind="gone", object=7)
    rig.dead.add(7)
    made = []
    for _ in range(2):
        assert rig.front() == 1
        rig.queue.hold_front(OSError(errno.ENOSPC, ""), is_full=True)
        while front := rig.front():
            made.append(front)
            rig.make()
        await trio.sleep(rig.queue.retry_in_s())
    # What is to be removed is known from the second try on.
    assert made == [2, 3, 5, 6, 7, 8, 9]
    assert [entry.seq for entry in rig.queue.entries()] == [1, 4]


async def test_many_changes_are_held_in_short_steps_and_removals_do_not_look_at_them(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, is_behind = list[int](), DrainQueue.is_behind

    def counted(queue: DrainQueue, entry: Entry) -> bool:
        looks.append(entry.seq)
        return is_behind(queue, entry)

    monkeypatch.setattr(DrainQueue, "is_behind", counted)
    for number in range(10_000):
        rig.put(b"%d" % number, object=number + 1, kind="content")
    rig.queue.hold_front(OSError(errno.ENOSPC, ""), is_full=True)
    steps = 1
    while rig.queue.sift():
        steps += 1
        assert len(looks) <= 1024 * steps
    assert steps > 9 and len(rig.queue.held) == 10_000
    looks.clear()
    for number in range(1000):
        rig.put(b"old%d" % number, kind="unlink")
        assert rig.front() > 10_000
        rig.make()
    assert len(looks) <= 3000


async def test_a_change_that_is_refused_for_ten_minutes_does_not_hold_up_its_user(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"d", by=1)
    rig.put(b"e", by=1)
    rig.put(b"d/x", by=1)
    while not rig.queue.entries().__next__().is_aside:
        assert rig.front() == 1
        rig.refuse()
        await trio.sleep(rig.queue.retry_in_s())
    assert 600 <= trio.current_time() < 700
    assert rig.aside == [{1}]
    assert rig.front() == 1
    rig.refuse()
    # The change beneath it waits with it; the other one does not.
    assert rig.front() == 2
    rig.make()
    assert rig.front() == 0
    assert [entry.is_aside for entry in rig.queue.entries()] == [True, True]


async def test_a_source_without_links_is_asked_for_one_only_once(rig: Rig) -> None:
    rig.put(b"l", kind="symlink")
    rig.refuse(errno.EOPNOTSUPP)
    assert rig.aside == [{1}]


async def test_discarded_changes_block_nothing(rig: Rig) -> None:
    rig.put(b"d", by=1)
    rig.put(b"d/x", by=1).is_moot = True
    rig.refuse()
    assert rig.front() == 2


async def test_an_earlier_mount_has_made_a_change_behind_one_that_was_refused(rig: Rig) -> None:
    ops = tuple((seq, Op(kind="mkdir", path=b"%d" % seq)) for seq in range(1, 5))
    rig.progress.load(Replay(ops, {1: None, 3: None}, 1, 1, (), {}))
    assert [rig.progress.is_done(seq) for seq in range(1, 5)] == [True, False, True, False]
    assert rig.progress.has_all(1)
    assert not rig.progress.has_all(2)


async def waited(call: Callable[[], Awaitable[None]], done: list[str]) -> None:
    await call()
    done.append("")


async def test_callers_wait_for_what_concerns_them(rig: Rig, clock: Clock) -> None:
    rig.put(b"d", by=1)
    rig.put(b"e", by=2)
    rig.put(b"f", by=2)
    rig.refuse()
    rig.front()
    all_, own, other = list[str](), list[str](), list[str]()
    progress = rig.progress
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waited, progress.settle, all_)
        nursery.start_soon(waited, lambda: progress.wait_for(b"f", object=0, user=2), own)
        nursery.start_soon(waited, lambda: progress.wait_for(b"f", object=0, user=1), other)
        await trio.testing.wait_all_tasks_blocked()
        rig.make()
        await trio.testing.wait_all_tasks_blocked()
        assert (all_, own, other) == ([], [], [])
        rig.make()
        await trio.testing.wait_all_tasks_blocked()
        assert (all_, own, other) == ([], [""], [])
        # The callers have ended the pause.
        assert rig.wakeups.waiters == 2
        assert rig.front() == 1
        rig.make()
    assert (all_, other) == ([""], [""])
    assert rig.wakeups.waiters == 0


async def test_a_caller_that_does_not_wait_longer_gets_the_answer_of_the_source(
    rig: Rig, clock: Clock
) -> None:
    rig.put(b"d")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails_with, rig, errno.EACCES)
        await trio.testing.wait_all_tasks_blocked()
        rig.refuse(errno.EACCES)


async def fails_with(rig: Rig, number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        await rig.progress.wait_or_fail(1)


async def test_a_pause_after_a_failure_is_short_while_a_caller_waits(
    rig: Rig, clock: Clock
) -> None:
    async def paused_s() -> float:
        begun = trio.current_time()
        error = OSError(errno.EIO, "")
        await rig.trouble.rest(error, "broken", what="mkdir 'd'", waiting=1)
        return trio.current_time() - begun

    assert [await paused_s() for _ in range(5)] == pytest.approx([1, 2, 4, 8, 16])
    assert (rig.trouble.reason, rig.trouble.stops) == ("mkdir 'd': broken", 5)
    rig.put(b"d")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails_with, rig, errno.EIO)
        nursery.start_soon(rig.progress.settle)
        await trio.testing.wait_all_tasks_blocked()
        assert await paused_s() == pytest.approx(5)
        rig.make()
    rig.trouble.end()
    assert rig.trouble.reason is None
    assert await paused_s() == pytest.approx(1)


async def test_a_pause_ends_when_a_caller_comes(rig: Rig, clock: Clock) -> None:
    rig.put(b"d")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.wakeups.pause, 60.0)
        await trio.sleep(1)
        nursery.start_soon(rig.progress.settle)
        await trio.testing.wait_all_tasks_blocked()
        rig.make()
    assert trio.current_time() == pytest.approx(1)


async def test_the_paths_at_the_source_are_those_before_the_renames_that_wait(rig: Rig) -> None:
    def rename(path: bytes, to: bytes) -> Entry:
        seq = rig.queue.last_seq + 1
        entry = Entry(seq, Op(kind="rename", path=path, to=to), 0, 0, was_tried=False)
        rig.queue.append(entry)
        return entry

    paths = rig.queue.source_paths
    assert paths(b"a") == [b"a"]
    rename(b"a", b"b")
    given_up = rename(b"c", b"d")
    rig.put(b"a")
    rename(b"b/x", b"b/y")
    rename(b"b", b"a/z")
    assert paths(b"a/z/y/1") == [b"a/x/1", b"b/x/1", b"b/y/1", b"a/z/y/1"]
    assert paths(b"a/z") == [b"a", b"b", b"a/z"]
    # It has the name of the directory that was renamed, and names that only begin as others.
    assert paths(b"a/n") == [b"a/n"]
    assert paths(b"a/zz") == [b"a/zz"]
    assert paths(b"d/1") == [b"c/1", b"d/1"]
    given_up.is_moot = True
    assert paths(b"d/1") == [b"d/1"]
    rig.refuse()
    assert paths(b"a/z") == [b"a", b"b", b"a/z"]
    rig.queue.sift()
    while rig.queue:
        rig.queue.remove_front()
        rig.queue.sift()
    # The first rename, which the source refuses, is held, with those that depend on it.
    assert paths(b"a/z") == [b"a", b"b", b"a/z"]
