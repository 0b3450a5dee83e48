"""Announced orders: what is given out, how opens move the cursor, limits, and hostile orders."""

from __future__ import annotations

import copy
import errno
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Sequence

import pytest

from monarch.config.settings import ForesightSettings
from monarch.errors import MonarchError, Refused
from monarch.foresight.announced import (
    ENTRY_BYTES,
    POSITION_BYTES,
    WINDOW_BYTES,
    Announcements,
    Announcer,
    Limits,
    OrderKey,
)
from monarch.foresight.foresight import Foresight
from monarch.foresight.messages import (
    FIRST_ENTRIES,
    SAMPLES,
    Begin,
    End,
    Piece,
    Progress,
    decode,
    encode_begin,
    encode_end,
    encode_piece,
    encode_progress,
    entries_of_a_piece,
)
from monarch.types import Ino
from tests.foresight.streams import Tree

ONE = Announcer(uid=1000, pid=10, started=5)
TWO = Announcer(uid=1001, pid=20, started=6)


def begin(on: Announcements, by: Announcer = ONE, number: int = 1) -> OrderKey:
    return on.begin(by, number)


def extend(
    on: Announcements,
    inos: Sequence[int],
    by: Announcer = ONE,
    number: int = 1,
    *,
    position: int = 0,
) -> int:
    kept = 0
    for start in range(0, len(inos), 4000):
        part = array("I", inos[start : start + 4000])
        kept += on.extend(by, Piece(number, position + start, part))
    return kept


def announced(inos: Sequence[int], limits: Limits | None = None) -> Announcements:
    on = Announcements(limits)
    begin(on)
    extend(on, inos)
    return on


def open_all(on: Announcements, inos: Iterable[int]) -> int:
    return sum(on.opened(Ino(ino)) for ino in inos)


def shuffled(count: int, seed: int = 1) -> list[int]:
    order = list(range(2, count + 2))
    random.Random(seed).shuffle(order)
    return order


def interleaved(order: Sequence[int], *, workers: int, batch: int, seed: int = 1) -> list[int]:
    """The opens of a loader's workers: each has the next batch when it is done, at its own pace."""
    draw, queues = random.Random(seed), [list[int]() for _ in range(workers)]
    batches = [list(order[start : start + batch]) for start in range(0, len(order), batch)]
    opens = []
    while batches or any(queues):
        worker = draw.randrange(workers)
        if not queues[worker]:
            if not batches:
                queues = [queue for queue in queues if queue]
                workers = len(queues)
                continue
            queues[worker] = batches.pop(0)
        opens.append(queues[worker].pop(0))
    return opens


# -- what is given out -----------------------------------------------------------------------------


def test_the_next_files_are_given_out_once_in_their_order_up_to_the_lead() -> None:
    on = announced([7, 3, 9, 4, 8, 2])
    assert on.next(2, 4) == [7, 3]
    assert on.next(9, 4) == [9, 4]
    assert on.next(9, 4) == []
    assert on.opened(Ino(7))
    assert on.next(9, 4) == [8]
    assert open_all(on, (3, 9, 4, 8)) == 4
    assert on.next(9, 4) == [2]
    assert on.next(9, 4) == []


@pytest.mark.promise(188)
def test_nothing_is_given_out_before_the_first_entries_are_known_or_a_reader_begins() -> None:
    """Which copies are worth their room depends on the next uses of all files."""
    on = Announcements()
    on.awaits_entries = True
    on.begin(ONE, 1, entries=6)
    extend(on, [7, 3, 9])
    assert on.next(9, 9) == []
    extend(on, [3, 4, 7], position=3)
    assert on.next(9, 9) == [7, 3, 9, 4]
    # A process that sends no more, and another one that gives only its progress.
    for number in (2, 3):
        on.begin(ONE, number, entries=1 << 40)
        extend(on, [number * 10, number * 10 + 1], number=number)
    assert on.next(9, 9) == []
    assert on.opened(Ino(20))
    assert on.next(9, 9) == [21]
    on.progress(ONE, 3, 1)
    assert on.next(9, 9) == [31]
    # Of a long order only so many are sent at once.
    on.begin(ONE, 4, entries=1 << 40)
    extend(on, range(100, 100 + FIRST_ENTRIES - 1), number=4)
    assert on.next(9, 9) == []
    extend(on, [50], number=4, position=FIRST_ENTRIES - 1)
    assert on.next(2, 9) == [100, 101]


def test_a_file_that_was_opened_before_its_turn_is_not_given_out() -> None:
    on = announced([7, 3, 9, 4])
    assert open_all(on, (3, 9)) == 2
    assert on.next(9, 9) == [7, 4]


def test_entries_that_are_not_known_keep_their_positions() -> None:
    on = Announcements()
    begin(on)
    assert extend(on, [0, 7, 0, 0, 3, 0]) == 2
    assert on.next(9, 9) == [7, 3]
    on.progress(ONE, 1, 4)
    assert on.report().entries == 2
    on.progress(ONE, 1, 6)
    assert on.report().entries == 0 and on.report().unknown == 4


def test_a_file_that_comes_several_times_is_read_several_times() -> None:
    on = announced([7, 7, 3, 7])
    assert on.next(1, 9) == [7]
    assert open_all(on, (7, 7, 7)) == 3
    assert not on.opened(Ino(7))
    assert on.report().entries == 2
    assert on.opened(Ino(3))
    assert on.report().entries == 0


def test_the_order_with_the_fewest_files_ahead_has_its_turn_first() -> None:
    on = Announcements()
    for by, first in ((ONE, 100), (TWO, 500)):
        begin(on, by)
        extend(on, range(first, first + 100), by)
    given = on.next(64, 40)
    assert sum(ino < 500 for ino in given) == 32
    assert on.next(64, 40) == [*range(132, 140), *range(532, 540)]
    assert on.next(64, 40) == []


# -- the position ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "batch"), [(1, 1), (4, 32), (16, 64), (4, 256)])
def test_workers_that_interleave_are_followed_to_the_end(workers: int, batch: int) -> None:
    order = shuffled(20_000)
    on = announced(order, Limits(window=4096))
    given: list[int] = []
    for done, ino in enumerate(interleaved(order, workers=workers, batch=batch)):
        assert on.opened(Ino(ino))
        given += on.next(64, 512)
        assert len(given) <= done + 1 + 512
    report = on.report()
    assert (report.opened, report.skipped, report.entries) == (20_000, 0, 0)
    # What a reader has opened first is not given out.
    assert len(set(given)) == len(given) > 15_000


def test_files_that_are_not_opened_do_not_hold_the_readers_up() -> None:
    order = shuffled(30_000)
    on = announced(order, Limits(window=1024))
    given = []
    for place, ino in enumerate(order):
        if place % 100:
            assert on.opened(Ino(ino))
        given += on.next(64, 200)
    report = on.report()
    assert report.opened == 29_700
    assert 150 < report.skipped <= 300
    assert len(given) > 29_000


def test_another_job_on_the_same_files_hardly_moves_an_order_that_waits() -> None:
    order = shuffled(100_000)
    on = announced(order)
    open_all(on, shuffled(100_000, seed=2)[:50_000])
    assert on.report().skipped < 8192
    assert on.report().entries > 80_000


def test_progress_moves_the_cursor_forward_only_and_also_beyond_the_window() -> None:
    order = shuffled(10_000)
    on = announced(order, Limits(window=100))
    on.next(50, 50)
    on.progress(ONE, 1, 40)
    assert on.next(90, 50) == order[50:90]
    on.progress(ONE, 1, 5)
    assert on.report().entries == 9_960
    on.progress(ONE, 1, 7_000)
    assert on.next(10, 50) == order[7_000:7_010]
    assert on.opened(Ino(order[7_000])) and not on.opened(Ino(order[50]))
    on.progress(ONE, 1, 10_000)
    assert on.next(10, 50) == [] and on.report().entries == 0


def test_an_order_can_be_extended_while_it_is_read() -> None:
    order = shuffled(50_000)
    on = Announcements(Limits(user_bytes=2_000_000))
    begin(on)
    sent = 0
    for read, ino in enumerate(order):
        while sent < len(order) and sent < read + 8000:
            extend(on, order[sent : sent + 1000], position=sent)
            sent += 1000
        assert on.opened(Ino(ino))
        on.next(10, 100)
    assert on.report().opened == 50_000 and on.report().entries == 0


def test_an_order_that_the_opens_do_not_follow_is_dropped() -> None:
    on = announced(shuffled(5_000), Limits(unmatched=1000))
    on.next(64, 100)
    strange = [Ino(10_000 + n) for n in range(900)]
    assert open_all(on, strange) == 0
    assert on.opened(next(iter(on.next(1, 200))))
    assert open_all(on, strange) == 0 and len(on) == 1
    assert open_all(on, strange) == 0 and len(on) == 0
    assert on.report().deviated == 1
    assert on.next(64, 100) == []
    with pytest.raises(Refused) as refusal:
        on.progress(ONE, 1, 5)
    assert refusal.value.errno == errno.EINVAL


def test_an_order_that_was_read_is_not_dropped_by_the_opens_of_others() -> None:
    on = announced([2, 3], Limits(unmatched=10))
    open_all(on, [2, 3, *range(100, 200)])
    assert len(on) == 1


# -- messages that are refused ---------------------------------------------------------------------


def refused(call: object) -> int:
    with pytest.raises(Refused) as refusal:
        call()  # type: ignore[operator]
    return refusal.value.errno


def test_an_order_belongs_to_its_process_and_its_user() -> None:
    on = announced([2, 3])
    other_user = Announcer(uid=1, pid=ONE.pid, started=ONE.started)
    reused = Announcer(uid=ONE.uid, pid=ONE.pid, started=ONE.started + 1)
    for stranger, number in (
        (TWO, errno.EINVAL),
        (reused, errno.EINVAL),
        (other_user, errno.EPERM),
    ):
        assert refused(lambda by=stranger: extend(on, [4], by, position=2)) == number
        assert refused(lambda by=stranger: on.progress(by, 1, 1)) == number
        assert refused(lambda by=stranger: on.key_of(by, 1)) == number
    assert refused(lambda: begin(on, other_user)) == errno.EPERM
    assert on.next(9, 9) == [2, 3]


def test_a_piece_out_of_its_place_and_a_position_beyond_the_end_are_refused() -> None:
    on = announced([2, 3])
    assert refused(lambda: extend(on, [4], position=1)) == errno.EINVAL
    assert refused(lambda: extend(on, [4], position=3)) == errno.EINVAL
    assert refused(lambda: on.progress(ONE, 1, 3)) == errno.EINVAL
    assert on.report().entries == 2


def test_an_order_of_the_same_number_replaces_the_first() -> None:
    on = announced([2, 3])
    begin(on)
    assert (len(on), on.report().ended, on.next(9, 9)) == (1, 1, [])


def test_the_orders_of_a_user_and_of_all_are_limited() -> None:
    on = Announcements(Limits(user_orders=3, all_orders=4))
    keys = [begin(on, number=number) for number in range(3)]
    assert refused(lambda: begin(on, number=3)) == errno.ENOSPC
    begin(on, TWO)
    assert refused(lambda: begin(on, TWO, 2)) == errno.ENOSPC
    on.end(keys[0])
    begin(on, TWO, 2)
    assert len(on) == 4 and keys[0] not in on and keys[1] in on


def test_the_entries_of_a_user_and_of_all_are_limited_and_an_end_frees_them() -> None:
    limits = Limits(user_bytes=416_000, all_bytes=616_000, window=1000, has_positions=False)
    on = Announcements(limits)
    key = begin(on)
    extend(on, range(2, 60_002))
    held = on.report().bytes
    assert refused(lambda: extend(on, [2] * 2000, position=60_000)) == errno.ENOSPC
    assert on.report().bytes == held
    begin(on, TWO)
    assert refused(lambda: extend(on, range(2, 20_002), TWO)) == errno.ENOSPC
    on.end(key)
    on.end(key)
    assert on.report().ended == 1
    on.end(OrderKey(TWO.pid, TWO.started, 1))
    assert on.report().bytes == 0
    begin(on, TWO)
    extend(on, range(2, 50_002), TWO)


@pytest.mark.parametrize("kind", ["shuffled", "with replacement", "each twice", "one file"])
def test_memory_stays_within_the_limits_that_are_counted(kind: str) -> None:
    draw = random.Random(1)
    orders = {
        "shuffled": shuffled(400_000),
        "with replacement": [draw.randrange(2, 8000) for _ in range(20_000)],
        "each twice": [number // 2 + 2 for number in range(20_000)],
        "one file": [2] * 20_000,
    }
    order = orders[kind]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        on = announced(order)
        on.next(8192, 8192)
        open_all(on, order[1:4000])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 1.05 * on.report().bytes
    entry = ENTRY_BYTES + POSITION_BYTES
    # Positions of the same file are kept in pairs, too.
    assert on.report().bytes <= 3 * entry * len(order) + WINDOW_BYTES * 8192


def steps_of(call: Callable[[], object]) -> int:
    """The calls of Python functions that a call makes."""
    steps = 0

    def count(frame: object, event: str, _: object) -> None:
        nonlocal steps
        steps += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def test_a_call_reads_no_long_row_of_unknown_entries_one_by_one() -> None:
    """The event loop would answer nothing else meanwhile."""
    unknown = 100_000
    on = announced([7, *[0] * unknown, 8])
    assert steps_of(lambda: on.next(1, 9)) < 1000
    assert steps_of(lambda: on.next(9, 9)) < 1000
    assert steps_of(lambda: on.opened(Ino(7))) < 1000
    assert on.report().entries == 1 and on.opened(Ino(8))
    on = announced([7, *[0] * unknown, 8])
    assert steps_of(lambda: on.progress(ONE, 1, unknown - 1)) < 1000
    assert on.report().entries == 1 and on.next(9, 9) == [8]


@pytest.mark.parametrize("has_copies", [True, False])
def test_the_next_files_are_found_in_few_steps_beside_many_orders(has_copies: bool) -> None:
    """The event loop would answer nothing else meanwhile."""
    tree = Tree((1, 20_000))
    settings, orders = ForesightSettings(), Limits().all_orders
    foresight = Foresight(tree, settings, lambda ino: has_copies)
    on, files = foresight.announced, tree.files[0]
    for user in range(orders // 64):
        by = Announcer(uid=user, pid=user, started=1)
        for number in range(64):
            begin(on, by, number)
            extend(on, random.Random(64 * user + number).sample(files, 100), by, number)
    # A step for each of the 1,024 files that may have copies, and for each order.
    for _ in range(30):
        assert steps_of(lambda: foresight.next(1)) < 20 * 1024
    for ino in files[:2000]:
        foresight.opened(ino, 1)
        assert steps_of(lambda: foresight.next(1)) < 20 * 1024
    if not has_copies:
        assert steps_of(lambda: foresight.next(1)) < 200
        assert steps_of(lambda: foresight.next(256)) < 20 * 256


@pytest.mark.parametrize("seed", range(8))
def test_the_turns_of_orders_are_those_of_a_search_of_all(seed: int) -> None:
    draw = random.Random(seed)
    limits = Limits(all_orders=8, window=40, unmatched=300, has_positions=False)
    on, ends = Announcements(limits), dict[OrderKey, int]()
    for _ in range(3000):
        key = OrderKey(ONE.pid, ONE.started, draw.randrange(8))
        match draw.choice(["begin", "extend", "extend", "progress", "end", *["open"] * 12, "next"]):
            case "begin" if key not in on and len(on) < limits.all_orders:
                begin(on, ONE, key.number)
                ends[key] = 0
            case "extend" if key in on:
                more = draw.choices(range(60), k=draw.randrange(30))
                extend(on, more, ONE, key.number, position=ends[key])
                ends[key] += len(more)
            case "progress" if key in on:
                on.progress(ONE, key.number, draw.randrange(ends[key] + 1))
            case "end" if not draw.randrange(4):
                on.end(key)
            case "open":
                on.opened(Ino(draw.randrange(60)))
            case "next":
                most, lead = draw.randrange(50), draw.choice([3, 20, 100])
                other = copy.deepcopy(on)
                assert on.next(most, lead) == searched(other, most, lead)
    assert on.report().opened > 1000
    # What has ended is not kept.
    waiting = on._turns._waiting.values()
    assert all(order in on._orders.values() for order in waiting)
    assert len(on._turns._heap) <= 2 * len(waiting) + 64


def searched(on: Announcements, most: int, lead: int) -> list[Ino]:
    """What ``next`` returns, by its definition."""
    found: list[Ino] = []
    while len(found) < most:
        able = [order for order in on._orders.values() if order.can_give(lead)]
        if not able:
            break
        order = min(able, key=lambda each: len(each.out))
        found += order.give(min(16, most - len(found)), lead)
    return found


def test_the_order_that_had_the_last_file_is_asked_first() -> None:
    on = Announcements()
    first, second = begin(on), begin(on, TWO)
    extend(on, [2, 3])
    extend(on, [3, 4], TWO)
    assert on.is_waiting(Ino(4)) and on.is_waiting(Ino(3)) and on.is_waiting(Ino(2))
    on.mark(first, is_idle=True)
    assert on.is_idle(Ino(2)) and not on.is_idle(Ino(3)) and not on.is_idle(Ino(4))
    on.end(second)
    assert on.is_idle(Ino(3)) and not on.is_waiting(Ino(4)) and not on.is_idle(Ino(4))
    on.mark(first, is_idle=False)
    assert not on.is_idle(Ino(3)) and on.is_waiting(Ino(3))
    on.end(first)
    assert not on.is_waiting(Ino(3)) and not on.is_idle(Ino(3))


def test_an_open_costs_the_same_in_an_order_of_any_length() -> None:
    def cost_of(order: Sequence[int]) -> float:
        on = announced(order, Limits(user_bytes=1 << 30, all_bytes=1 << 30))
        begun = time.process_time()
        open_all(on, order[:15_000])
        return time.process_time() - begun

    short, long = shuffled(20_000), range(2, 1_000_002)
    assert min(cost_of(long) for _ in range(3)) < 5 * min(cost_of(short) for _ in range(3))


# -- hostile messages ------------------------------------------------------------------------------


def receive(on: Announcements, by: Announcer, message: bytes, keys: set[OrderKey]) -> None:
    """What the daemon does with a message, without the checks of its files."""
    match decode(message):
        case Begin() as begun:
            keys.add(on.begin(by, begun.order))
        case Piece() as piece:
            on.extend(by, piece)
        case Progress(order, position):
            on.progress(by, order, position)
        case End(order):
            on.end(on.key_of(by, order))


@pytest.mark.parametrize("seed", range(4))
def test_random_messages_and_opens_keep_the_limits_and_raise_only_refusals(seed: int) -> None:
    draw = random.Random(seed)
    limits = Limits(100_000, 150_000, user_orders=4, all_orders=6, window=64, unmatched=500)
    on, accepted, refusals = Announcements(limits), 0, set[int]()
    users = [Announcer(uid, pid, 1) for uid in (1, 2) for pid in (0, 5)]
    keys = set[OrderKey]()
    ends: dict[tuple[Announcer, int], int] = {}
    for _ in range(2000):
        by, number = draw.choice(users), draw.randrange(3)
        position = draw.choice([ends.get((by, number), 0), draw.randrange(1000)])
        count = draw.choice([0, 1, 10, 300])
        message = draw.choice(
            [
                encode_begin(Begin(number, 3, SAMPLES, 0)),
                encode_piece(number, position, draw.choices(range(50), k=count)),
                encode_piece(number, position, [0] * entries_of_a_piece(4)),
                encode_progress(number, draw.randrange(max(1, position))),
                encode_end(number),
            ]
        )
        if draw.random() < 0.1:
            place = draw.randrange(len(message))
            message = message[:place] + bytes([draw.randrange(256)]) + message[place + 1 :]
        try:
            receive(on, by, message, keys)
            accepted += 1
        except MonarchError as refusal:
            refusals.add(refusal.errno)
        else:
            match decode(message):
                case Begin(order):
                    ends[by, order] = 0
                case Piece(order, start, inos):
                    ends[by, order] = start + len(inos)
        open_all(on, [draw.randrange(60) for _ in range(draw.randrange(20))])
        given = on.next(draw.randrange(40), draw.randrange(80))
        assert 0 not in given
        report = on.report()
        assert report.bytes <= limits.all_bytes and report.orders <= limits.all_orders
    assert accepted > 200
    assert refusals <= {errno.EINVAL, errno.E2BIG, errno.EPERM, errno.ENOSPC}
    assert {errno.EINVAL, errno.EPERM} <= refusals
    for key in keys:
        on.end(key)
    assert on.report().orders == on.report().bytes == 0
