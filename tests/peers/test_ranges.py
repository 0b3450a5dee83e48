"""What a node requests of large files, with members of the test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from monarch.namespace.snapshot import Snapshot
from monarch.peers import ranges as range_module
from monarch.peers.breaker import Breaker
from monarch.peers.client import OTHER_SIZE, Answer, Kind, PeerClient, PeerFailed
from monarch.peers.ownership import Member, Ownership
from monarch.peers.ranges import Ranges, _item
from monarch.peers.requests import Requests
from monarch.peers.spans import Span, granule_digests, span_digest
from monarch.placement.parts import BLOCK
from monarch.text import MiB
from monarch.tiers.partial import GRANULE
from monarch.types import Identity, Ino

INO, LARGEST = Ino(7), 4 * MiB
SIZE = 24 * MiB - 1000
CONTENT = np.random.default_rng(4).bytes(SIZE)
IDENTITY = Identity(SIZE, 1, 2, 70)
PER_BLOCK = BLOCK // GRANULE


class Owner:
    """A member that has the large file. The next answers are those of ``plays``, if there are
    any."""

    def __init__(self, *plays: Answer | Kind) -> None:
        self.name = "other"
        self.breaker = Breaker(0.05)
        self.plays = list(plays)
        self.asked: list[str] = []
        # What its engine answers if the copy was made anew.
        self.anew: Answer | None = None

    def get(self, name: str, size: int, offset: int | None = None) -> Answer:
        self.asked.append(name)
        if self.plays:
            played = self.plays.pop(0)
            if isinstance(played, str):
                self.breaker.failed(0.0)
                raise PeerFailed(played)
            self.breaker.answered(0.0)
            return played
        assert offset is not None
        data = CONTENT[offset : offset + size]
        assert len(data) == size
        self.breaker.answered(0.0)
        if name.startswith("s/"):
            return self.anew or Answer(200, data, None)
        return Answer(200, data, span_digest(granule_digests(data)))

    def damaged(self) -> PeerFailed:
        self.breaker.damaged(0.0)
        return PeerFailed("damaged")

    def too_late(self) -> PeerFailed:
        return PeerFailed("slow")

    def late(self, seconds: float) -> None:
        self.breaker.late(0.0, seconds)

    def close(self) -> None: ...


COMING, NOT_KEPT = Answer(202, b"", None), Answer(404, b"", None)


def ranges_of(
    *members: Owner | None, most_held: int = 8 * MiB, coming_s: float = 60.0, replicas: int = 1
) -> tuple[Ranges, Requests]:
    attributes = SimpleNamespace(identity=IDENTITY)
    snapshot = SimpleNamespace(entries=100, attributes=lambda ino: attributes)
    ownership = Ownership([Member(f"node{number}") for number in range(len(members))])
    requests = Requests(cast(Sequence[PeerClient | None], members), coming_s=coming_s)
    made = Ranges(
        cast(Snapshot, snapshot),
        ownership,
        requests,
        largest=LARGEST,
        replicas=replicas,
        most_held=most_held,
    )
    return made, requests


def block_of(ranges: Ranges, *order: int) -> int:
    """A block whose owner and next owners are these members."""
    ownership = ranges._ownership
    return next(
        block
        for block in range(SIZE // BLOCK)
        if tuple(ownership.order(_item(INO, block))[: len(order)]) == order
    )


def read(ranges: Ranges, offset: int, size: int) -> bool:
    """Whether other nodes have given these bytes, which are then right."""
    data = ranges.read(INO, offset, size)
    assert data in (None, CONTENT[offset : offset + size])
    return data is not None


@pytest.mark.promise(340)
def test_each_block_has_one_owner_and_a_large_file_is_on_all_nodes() -> None:
    names = [Member(f"node{number}") for number in range(4)]
    attributes = SimpleNamespace(identity=Identity(2000 * MiB, 1, 2, 70))
    snapshot = SimpleNamespace(entries=100, attributes=lambda ino: attributes)
    kept = []
    for own in range(4):
        members = cast(
            Sequence[PeerClient | None], [None if n == own else Owner() for n in range(4)]
        )
        ranges = Ranges(
            cast(Snapshot, snapshot),
            Ownership(names),
            Requests(members, coming_s=1.0),
            largest=LARGEST,
            replicas=1,
            most_held=0,
        )
        kept.append(np.frombuffer(bytes(ranges.blocks(INO)), np.uint8))
    assert np.array_equal(sum(kept), np.ones(500))
    # Binomial, 500 blocks and 4 nodes: sigma is 9.7.
    assert all(75 < int(blocks.sum()) < 175 for blocks in kept)


def test_a_file_of_another_version_and_a_small_one_are_not_shared() -> None:
    ranges, _ = ranges_of(None, Owner())
    assert ranges.is_shared(INO, IDENTITY)
    assert not ranges.is_shared(INO, Identity(SIZE, 1, 3, 70))
    assert not ranges.is_shared(Ino(0), IDENTITY)
    assert not ranges.is_shared(Ino(101), IDENTITY)
    assert not ranges.is_shared(INO, Identity(LARGEST, 1, 2, 70))


@pytest.mark.promise(340)
def test_random_reads_have_the_right_bytes_and_own_blocks_are_left_to_the_source() -> None:
    other, third = Owner(), Owner()
    ranges, requests = ranges_of(None, other, third)
    mine, rng = ranges.blocks(INO), random.Random(6)
    assert 0 < sum(mine) < len(mine)
    for _ in range(200):
        offset = rng.randrange(SIZE)
        size = rng.choice((1, 4096, GRANULE, MiB))
        blocks = range(offset // BLOCK, (min(offset + size, SIZE) - 1) // BLOCK + 1)
        assert read(ranges, offset, size) == (not any(mine[block] for block in blocks))
    assert other.asked and third.asked
    assert not requests.failures
    received = sum(each.nbytes for each in requests.received)
    assert received >= GRANULE * len(other.asked + third.asked) // 2
    assert read(ranges, SIZE, 5) is False


def test_digests_are_remembered_and_then_the_engine_is_asked() -> None:
    other = Owner()
    ranges, _ = ranges_of(None, other, most_held=0)
    first = block_of(ranges, 1) * PER_BLOCK
    for _ in range(2):
        assert read(ranges, first * GRANULE, 2 * GRANULE)
    assert read(ranges, first * GRANULE + 5, 100)
    assert other.asked == [
        Span(INO, first, first + 1).name,
        Span(INO, first, first + 1).name_at_engine,
        Span(INO, first, first).name_at_engine,
    ]


def test_small_reads_in_order_need_few_requests_and_little_memory() -> None:
    other = Owner()
    ranges, _ = ranges_of(None, other, most_held=2 * MiB)
    begin = block_of(ranges, 1) * BLOCK
    for offset in range(begin, begin + BLOCK, 16 * 1024):
        assert read(ranges, offset, 16 * 1024)
        assert ranges._held_bytes <= 2 * MiB
    # One of a granule, then of a MiB each.
    assert len(other.asked) <= 6
    assert ranges._held_bytes == sum(map(len, ranges._held.values()))


@pytest.mark.promise(270)
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(200, bytes(GRANULE), 5), id="flipped"),
        pytest.param(Answer(200, CONTENT[:GRANULE], None), id="no digest"),
    ],
)
def test_bytes_without_the_right_digest_are_not_used_and_not_requested_again(
    answer: Answer,
) -> None:
    other, third = Owner(answer), Owner()
    ranges, requests = ranges_of(None, other, third)
    offset = block_of(ranges, 1) * BLOCK
    for _ in range(3):
        assert not read(ranges, offset, 10)
    assert (requests.failures, len(other.asked), third.asked) == ({"damaged": 1}, 1, [])


@pytest.mark.promise(270)
def test_an_owner_that_gives_wrong_bytes_three_times_in_a_row_is_left_out() -> None:
    wrong = Answer(200, bytes(GRANULE), 5)
    other, out = Owner(), []
    other.breaker.admits = lambda now: True  # type: ignore[method-assign]
    ranges, _ = ranges_of(None, other, most_held=0)
    offset = block_of(ranges, 1) * BLOCK
    for is_right in (False, False, True, False, False, False, True):
        # The block would not be requested again for a minute.
        ranges._known(INO).not_kept.clear()
        # At its engine and at its daemon.
        other.plays = [] if is_right else [wrong, wrong]
        assert read(ranges, offset, 10) == is_right
        out.append(other.breaker.is_failing)
    assert out == [False] * 5 + [True, False]


@pytest.mark.promise(270)
@pytest.mark.parametrize(
    "anew",
    [Answer(200, bytes(GRANULE), None), Answer(OTHER_SIZE, b"", None)],
    ids=["lacks it", "another size"],
)
def test_a_copy_that_was_made_anew_is_no_damage_and_the_daemon_gives_the_granules(
    anew: Answer,
) -> None:
    other = Owner()
    ranges, requests = ranges_of(None, other, most_held=0)
    offset = block_of(ranges, 1) * BLOCK
    assert read(ranges, offset, 10)
    other.anew = anew
    assert read(ranges, offset, 10)
    assert [name[0] for name in other.asked] == ["r", "s", "r"]
    assert not requests.failures


def test_a_block_that_its_owner_does_not_keep_is_not_requested_again() -> None:
    other = Owner(NOT_KEPT)
    ranges, requests = ranges_of(None, other)
    block = block_of(ranges, 1)
    for place in (0, 10, MiB):
        assert not read(ranges, block * BLOCK + place, 10)
    assert (len(other.asked), requests.not_kept) == (1, 1)


def test_a_span_that_is_being_fetched_is_waited_for_but_not_for_ever() -> None:
    other = Owner(COMING, COMING)
    ranges, _ = ranges_of(None, other)
    assert read(ranges, block_of(ranges, 1) * BLOCK, 10)
    assert len(other.asked) == 3
    other = Owner(*[COMING] * 5)
    ranges, requests = ranges_of(None, other, coming_s=-1.0)
    assert not read(ranges, block_of(ranges, 1) * BLOCK, 10)
    assert requests.failures == {"slow": 1}


@pytest.mark.promise(274)
def test_if_the_owner_of_a_block_fails_the_next_member_owns_it() -> None:
    other, third = Owner("unreachable"), Owner()
    ranges, _ = ranges_of(None, other, third)
    assert read(ranges, block_of(ranges, 1, 2) * BLOCK, 10)
    assert len(third.asked) == 1
    other.plays = ["unreachable"]
    mine = block_of(ranges, 1, 0)
    assert not ranges.blocks(INO)[mine]
    assert not read(ranges, mine * BLOCK, 10)
    assert ranges.blocks(INO)[mine], "this node keeps it in the place of its owner"


@pytest.mark.promise(277)
def test_the_second_owner_of_a_block_gets_it_from_the_first_one() -> None:
    other = Owner()
    ranges, _ = ranges_of(None, other, Owner(), replicas=2)
    block = block_of(ranges, 1, 0)
    assert ranges.blocks(INO)[block]
    assert read(ranges, block * BLOCK, GRANULE)
    assert len(other.asked) == 1
    assert not read(ranges, block_of(ranges, 0) * BLOCK, GRANULE)


def test_answers_are_late_compared_with_the_source() -> None:
    other = Owner()
    _, requests = ranges_of(None, other)
    requests.source_took(0.001)
    assert other.breaker.fair_s == 0.05
    requests.source_took(3.0)
    assert other.breaker.fair_s == 12.0


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_owners_of_blocks_are_computed_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    # As for a file of TB.
    monkeypatch.setattr(range_module, "_AT_OPEN", 4)
    monkeypatch.setattr(range_module, "_AT_ONCE", 4)
    ranges, _ = ranges_of(None, Owner(), replicas=1)
    ownership = ranges._ownership
    expected = ownership.first(np.array([_item(INO, n) for n in range(6)], np.uint64), 1)
    if is_prepared:
        ranges.prepare(np.array([INO, 8]), np.array([SIZE, LARGEST], np.uint64))
        assert list(ranges._mine) == [INO]
        # Nothing is computed at the open.
        monkeypatch.setattr(ranges, "_ownership", None)
    assert ranges.blocks(INO) == bytes((expected[:, 0] == 0).astype(np.uint8))
    monkeypatch.setattr(ranges, "_ownership", ownership)
    file = ranges._known(INO)
    for block in (5, 0):
        span = Span(INO, block * PER_BLOCK, block * PER_BLOCK)
        assert next(iter(ranges._order(span, file))) == expected[block, 0]
        # Those beside it, and no others.
        assert np.count_nonzero(file.owners) == (2 if block == 5 else 4)


def test_owners_that_another_thread_has_written_in_part_are_computed() -> None:
    ranges, _ = ranges_of(None, Owner(), Owner(), replicas=2)
    file, span = ranges._known(INO), Span(INO, 0, 0)
    expected = ranges._ownership.first(np.array([_item(INO, 0)], np.uint64), 2)[0].tolist()
    # One column of the row.
    file.owners[0, 0] = expected[0] + 1
    assert ranges._owners(span, file) == expected


def test_large_files_that_are_not_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, _ = ranges_of(None, Owner())
    monkeypatch.setattr(range_module, "_MOST_KNOWN", 3 * ranges._known(INO).nbytes)
    for number in range(10, 30):
        ranges.blocks(Ino(number))
        ranges.blocks(INO)
    assert list(ranges._files) == [28, 29, INO]
    assert ranges._known_bytes == sum(each.nbytes for each in ranges._files.values())
