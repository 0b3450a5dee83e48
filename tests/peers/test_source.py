"""What a node requests of the other members, with members of the test."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest

from monarch.namespace.snapshot import Snapshot
from monarch.peers.answers import digest_of
from monarch.peers.breaker import Breaker
from monarch.peers.client import OTHER_SIZE, Answer, Kind, PeerClient, PeerFailed
from monarch.peers.connections import PeerFetcher
from monarch.peers.ownership import Member, Ownership
from monarch.peers.source import Peers, PeerSource
from monarch.placement.parts import BLOCK
from monarch.posix.buckets import BUCKETS, bucket, buckets
from monarch.tiers.contents import copy_name
from monarch.tiers.source import identity_of
from monarch.types import Identity, Ino

FILES, LARGEST = 400, 1000
BYTES = b"the right bytes"


def identity(ino: int, size: int = len(BYTES)) -> Identity:
    return Identity(size, 1, 2, ino)


class FakeMember:
    """A member that gives ``answers`` one after the other, the last one again and again."""

    def __init__(self, *answers: Answer | Kind) -> None:
        self.name = "other"
        self.breaker = Breaker(0.05)
        self.request = b"before", b"after"
        self.answers = list(answers)
        self.asked: list[str] = []

    def get(self, name: str, size: int, offset: int | None = None) -> Answer:
        self.asked.append(name)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            self.breaker.failed(0.0)
            raise PeerFailed(answer)
        self.breaker.answered(0.0)
        return answer

    def damaged(self) -> PeerFailed:
        self.breaker.damaged(0.0)
        return PeerFailed("damaged")

    def too_late(self) -> PeerFailed:
        return PeerFailed("slow")

    def late(self, seconds: float) -> None:
        self.breaker.late(0.0, seconds)

    def used(self, latencies_s: Sequence[float], slow: int, late_s: float) -> None:
        self.latencies_s, self.slow, self.late_s = list(latencies_s), slow, late_s


RIGHT = Answer(200, BYTES, digest_of(BYTES))
COMING, NOT_KEPT = Answer(202, b"", None), Answer(404, b"", None)


def peers_of(
    *members: FakeMember | None,
    coming_s: float = 60.0,
    replicas: int = 1,
    snapshot: SimpleNamespace | None = None,
    most_held: int | None = None,
) -> Peers:
    known = snapshot or SimpleNamespace(
        entries=FILES, attributes=lambda ino: SimpleNamespace(identity=identity(ino))
    )
    ownership = Ownership([Member(f"node{number}") for number in range(len(members))])
    clients = cast(Sequence[PeerClient | None], members)
    return Peers(
        cast(Snapshot, known),
        ownership,
        clients,
        largest=LARGEST,
        coming_s=coming_s,
        replicas=replicas,
        most_held=most_held,
    )


def first(peers: Peers, *order: int) -> Ino:
    """A file whose owner and next owners are these members."""
    return next(
        Ino(ino)
        for ino in range(1, FILES + 1)
        if tuple(peers._ownership.order(ino)[: len(order)]) == order
    )


def test_owners_that_another_thread_has_written_in_part_are_computed() -> None:
    peers = peers_of(None, FakeMember(RIGHT), FakeMember(RIGHT), replicas=2)
    expected = peers._ownership.order(7)
    peers._owners[7, 0] = expected[0] + 1
    assert list(peers._order(Ino(7))) == expected


def test_a_file_of_another_node_comes_from_there_and_its_digest_is_remembered() -> None:
    other = FakeMember(RIGHT, Answer(200, BYTES, None))
    peers = peers_of(None, other)
    ino = first(peers, 1)
    assert not peers.owns(ino)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert other.asked == [f"d/{ino}", f"c/{copy_name(ino)}"]
    assert (peers.received[1].files, peers.received[1].nbytes) == (2, 2 * len(BYTES))
    own = first(peers, 0)
    assert peers.owns(own)
    assert peers.fetch(own, identity(own)) is None


@pytest.mark.parametrize(
    ("ino", "size"), [(0, 10), (FILES + 1, 10), (1 << 40, 10), (5, 0), (5, LARGEST + 1)]
)
def test_files_that_are_not_shared_are_not_requested(ino: int, size: int) -> None:
    other = FakeMember(RIGHT)
    peers = peers_of(None, other)
    assert not peers.is_shared(Ino(ino), size)
    assert peers.fetch(Ino(ino), identity(ino, size)) is None
    assert other.asked == []


def test_another_version_than_that_of_the_snapshot_is_read_from_the_source() -> None:
    other = FakeMember(RIGHT)
    peers = peers_of(None, other)
    ino = first(peers, 1)
    changed = Identity(len(BYTES), 1, 3, ino)
    assert peers.fetch(ino, changed) is None
    assert other.asked == []


@pytest.mark.promise(270)
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param((Answer(200, b"the wrong bytes", digest_of(BYTES)),), id="flipped"),
        pytest.param((Answer(200, BYTES, digest_of(b"")),), id="digest"),
        pytest.param((Answer(200, BYTES, None),), id="no digest"),
    ],
)
def test_bytes_without_the_right_digest_are_never_used(answers: tuple[Answer, ...]) -> None:
    other, third = FakeMember(*answers), FakeMember(RIGHT)
    peers = peers_of(None, other, third)
    ino = first(peers, 1, 2)
    assert peers.fetch(ino, identity(ino)) is None
    assert peers.failures == {"damaged": 1}
    assert third.asked == [], "the source has the right bytes"


@pytest.mark.promise(270)
def test_a_member_that_gives_wrong_bytes_three_times_in_a_row_is_left_out() -> None:
    wrong = Answer(200, b"the wrong bytes", digest_of(BYTES))
    # When the digest is known, its engine is asked, and then its daemon.
    other = FakeMember(wrong, wrong, RIGHT, wrong, wrong, wrong, wrong, RIGHT)
    other.breaker.admits = lambda now: True  # type: ignore[method-assign]
    peers, out = peers_of(None, other), []
    ino = first(peers, 1)
    for _ in range(7):
        peers.fetch(ino, identity(ino))
        out.append(other.breaker.is_failing)
    assert out == [False] * 5 + [True, False]


@pytest.mark.promise(270)
def test_a_copy_that_is_damaged_after_its_digest_was_learned_is_found() -> None:
    wrong, said = (Answer(200, b"the wrong bytes", digest) for digest in (None, digest_of(BYTES)))
    other = FakeMember(RIGHT, wrong, said, RIGHT)
    peers = peers_of(None, other)
    ino = first(peers, 1)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert peers.fetch(ino, identity(ino)) is None
    assert peers.failures == {"damaged": 1}
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert other.asked[-1] == f"d/{ino}", "the digest is asked for again"


@pytest.mark.promise(270)
@pytest.mark.parametrize(
    "answer",
    [Answer(200, b"the other bytes", None), Answer(OTHER_SIZE, b"", None)],
    ids=["other bytes", "other size"],
)
@pytest.mark.parametrize("then", [RIGHT, NOT_KEPT], ids=["made anew", "another version"])
def test_a_copy_that_its_owner_has_made_anew_is_no_failure(answer: Answer, then: Answer) -> None:
    other = FakeMember(RIGHT, answer, then)
    peers = peers_of(None, other)
    ino = first(peers, 1)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert peers.fetch(ino, identity(ino)) == (BYTES if then is RIGHT else None)
    assert peers.failures == {}
    assert other.asked == [f"d/{ino}", f"c/{copy_name(ino)}", f"d/{ino}"]


def test_a_file_that_is_being_fetched_is_waited_for() -> None:
    other = FakeMember(COMING, COMING, RIGHT)
    peers = peers_of(None, other)
    ino = first(peers, 1)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert len(other.asked) == 3


def test_a_fetch_that_never_ends_is_waited_for_only_so_long() -> None:
    peers = peers_of(None, FakeMember(COMING), coming_s=-1.0)
    ino = first(peers, 1)
    assert peers.fetch(ino, identity(ino)) is None
    assert peers.failures == {"slow": 1}


def test_a_file_that_its_owner_does_not_keep_is_not_requested_again() -> None:
    other, third = FakeMember(NOT_KEPT), FakeMember(RIGHT)
    peers = peers_of(None, other, third)
    ino = first(peers, 1, 2)
    for _ in range(5):
        assert peers.fetch(ino, identity(ino)) is None
    # A minute may end between two calls, not more.
    assert len(other.asked) <= 2
    assert peers.not_kept == len(other.asked)
    assert third.asked == []


@pytest.mark.promise(274)
def test_if_the_owner_fails_the_next_member_owns_the_file() -> None:
    other, third = FakeMember("unreachable"), FakeMember(RIGHT)
    peers = peers_of(None, other, third)
    ino = first(peers, 1, 2, 0)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert not peers.owns(ino)
    mine = first(peers, 1, 0)
    assert not peers.owns(mine)
    assert peers.fetch(mine, identity(mine)) is None
    assert peers.owns(mine), "this node keeps it in the place of its owner"


def test_at_most_two_members_are_asked_for_a_file() -> None:
    members = [FakeMember("unreachable") for _ in range(4)]
    peers = peers_of(None, *members)
    ino = first(peers, 1, 2, 3)
    assert peers.fetch(ino, identity(ino)) is None
    assert [len(member.asked) for member in members] == [1, 1, 0, 0]
    assert peers.failures == {"unreachable": 2}


@pytest.mark.parametrize("kind", ["slow", "broken", "wrong-secret", "other-set"])
def test_a_single_failure_of_a_member_that_is_there_leads_to_the_source(kind: Kind) -> None:
    other, third = FakeMember(kind), FakeMember(RIGHT)
    peers = peers_of(None, other, third)
    ino = first(peers, 1, 2)
    assert peers.fetch(ino, identity(ino)) is None
    assert third.asked == []


def test_members_that_are_out_are_passed_over() -> None:
    other, third = FakeMember(RIGHT), FakeMember(RIGHT)
    peers = peers_of(None, other, third)
    ino = first(peers, 1, 2)
    other.breaker.is_out = lambda now: True  # type: ignore[method-assign]
    other.breaker.admits = lambda now: False  # type: ignore[method-assign]
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert (other.asked, len(third.asked)) == ([], 1)
    assert peers.owns(first(peers, 1, 0))


class FakeFetcher:
    """A datapath; ``found`` is what each member gave since the last call."""

    def __init__(self) -> None:
        self.givers = self.digests = np.zeros(0, np.uint64)
        self.found: dict[int, tuple[int, int, int, int, list[int]]] = {}
        self.limits_us: dict[int, tuple[int, int]] = {}

    def set_peers(
        self,
        givers: npt.NDArray[np.uint16],
        digests: npt.NDArray[np.uint64],
        requests: Sequence[tuple[bytes, bytes] | None],
        *,
        gives_bytes: bool,
    ) -> None:
        self.givers, self.digests, self.gives_bytes = givers, digests, gives_bytes
        self.requests = list(requests)

    def received(
        self, member: int, limit_us: int, fair_us: int
    ) -> tuple[int, int, int, int, list[int]]:
        self.limits_us[member] = limit_us, fair_us
        return self.found.pop(member, (0, 0, 0, 0, []))


def fetched_by_datapath(peers: Peers) -> FakeFetcher:
    fetcher = FakeFetcher()
    peers.fetch_by(cast(PeerFetcher, fetcher))
    return fetcher


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_datapath_asks_the_members_that_this_node_would_ask(replicas: int) -> None:
    members = [FakeMember(Answer(200, BYTES, digest_of(BYTES))) for _ in range(3)]
    peers = peers_of(None, *members, replicas=replicas)
    datapath = fetched_by_datapath(peers)
    assert datapath.requests == [None] + [(b"before", b"after")] * 3
    assert not datapath.givers.any(), "no owner was computed yet"
    assert datapath.gives_bytes == (replicas > 1), "this node may be one of several owners"
    for ino in map(Ino, range(1, FILES + 1)):
        owners = peers._ownership.order(ino)[:replicas]
        peers.owns(ino)
        giver = int(datapath.givers[ino])
        assert (giver == 0) == (0 in owners)
        if giver:
            before = [len(member.asked) for member in members]
            assert peers.fetch(ino, identity(ino)) == BYTES
            assert datapath.givers[ino] == giver
            assert len(members[giver - 2].asked) == before[giver - 2] + 1


def test_the_datapath_asks_the_member_that_gave_a_file_with_its_digest() -> None:
    gone, next_one = FakeMember("unreachable"), FakeMember(RIGHT, RIGHT, NOT_KEPT)
    peers = peers_of(None, gone, next_one)
    datapath = fetched_by_datapath(peers)
    ino = first(peers, 1, 2)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert (datapath.givers[ino], datapath.digests[ino]) == (3, digest_of(BYTES))
    assert peers.fetch(ino, identity(ino)) == BYTES
    gone.breaker.admits = lambda now: False  # type: ignore[method-assign]
    assert peers.fetch(ino, identity(ino)) is None
    assert datapath.givers[ino] == 0


def test_a_member_whose_bytes_are_damaged_is_not_asked_by_the_datapath() -> None:
    other = FakeMember(RIGHT, Answer(200, b"the wrong bytes", None))
    peers = peers_of(None, other)
    datapath = fetched_by_datapath(peers)
    ino = first(peers, 1)
    assert peers.fetch(ino, identity(ino)) == BYTES
    assert peers.fetch(ino, identity(ino)) is None
    assert datapath.givers[ino] == datapath.digests[ino] == 0


@pytest.mark.promise(273)
def test_an_open_that_has_waited_for_the_datapath_waits_for_no_other_request() -> None:
    other = FakeMember(RIGHT)
    peers = peers_of(None, other)
    datapath = fetched_by_datapath(peers)
    slow, unwanted, *_ = (Ino(i) for i in range(1, FILES + 1) if not peers.owns(Ino(i)))
    datapath.givers[slow], datapath.givers[unwanted] = 0xFFFF, 0xFFFE
    datapath.found[1] = 7, 7000, 3, 4_000_000, [100, 2_000_000]
    assert peers.fetch(unwanted, identity(unwanted)) is None
    assert datapath.found, "counts of all members for each file that a member does not keep"
    assert peers.fetch(slow, identity(slow)) is None
    assert other.asked == []
    found = peers.received[1]
    assert (found.files, found.nbytes, found.failed, peers.failures) == (7, 7000, 3, {"slow": 3})
    assert (other.latencies_s, other.slow, other.late_s) == ([1e-4, 2.0], 3, 4.0)
    # The next opens ask again, but not for a file that the member does not keep.
    assert peers.fetch(slow, identity(slow)) == BYTES
    assert peers.fetch(unwanted, identity(unwanted)) is None
    assert (len(other.asked), peers.not_kept) == (1, 1)


@pytest.mark.promise(341)
def test_the_datapath_learns_what_is_late_and_its_late_time_counts() -> None:
    other = FakeMember(RIGHT)
    peers = peers_of(None, other)
    datapath = fetched_by_datapath(peers)
    peers.source_took(0.25)
    # No file came, and none in time: it was left to Python.
    datapath.found[1] = 0, 0, 0, 300_000, []
    peers.catch_up()
    assert datapath.limits_us == {1: (1_000_000, 1_000_000)}
    assert other.late_s == 0.3


def test_counts_of_many_threads_add_up() -> None:
    other = FakeMember(RIGHT)
    peers = peers_of(None, other)
    ino = first(peers, 1)

    def read() -> None:
        for _ in range(200):
            peers.fetch(ino, identity(ino))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peers.received[1].files == 800


def test_a_read_of_the_source_costs_no_step_for_each_member() -> None:
    class Counting(FakeMember):
        asked_for = 0

        def __getattribute__(self, name: str) -> Any:
            Counting.asked_for += name == "breaker"
            return super().__getattribute__(name)

    members = [Counting() for _ in range(1023)]
    peers = peers_of(None, *members)
    Counting.asked_for = 0
    peers.source_took(3.0)
    assert Counting.asked_for == 0
    assert {member.breaker.fair_s for member in members} == {12.0}


def test_the_share_of_a_node_is_that_of_its_weight() -> None:
    assert peers_of(None, FakeMember(RIGHT), FakeMember(RIGHT), FakeMember(RIGHT)).share == 0.25


def table_of(sizes: npt.NDArray[np.int64]) -> SimpleNamespace:
    """A snapshot that has only files."""

    def files_in(slots: range) -> tuple[npt.NDArray[np.int64], ...]:
        inos = np.arange(slots.start, slots.stop)
        return inos, sizes[inos - 1].astype(np.uint64), inos.astype(np.uint64)

    return SimpleNamespace(entries=len(sizes), files_in=files_in)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_curve_of_a_node_has_the_files_that_it_owns_and_those_that_are_not_shared(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    sizes = np.minimum(rng.lognormal(5, 1.5, FILES).astype(np.int64), LARGEST + 500)
    assert sizes.max() > LARGEST, "some files are not shared"
    monkeypatch.setattr("monarch.peers.source._AT_ONCE", 64)
    members = (None, FakeMember(RIGHT), FakeMember(RIGHT), FakeMember(RIGHT))
    peers = peers_of(*members, replicas=replicas, snapshot=table_of(sizes))
    expected = np.zeros(BUCKETS, np.uint64)
    for ino in range(1, FILES + 1):
        size = int(sizes[ino - 1])
        if not peers.is_shared(Ino(ino), size) or peers.owns(Ino(ino)):
            expected[bucket(ino)] += np.uint64(size)
    assert np.array_equal(peers.curve(), expected)
    assert sizes[sizes > LARGEST].sum() < expected.sum() < sizes.sum()
    # A rule counts the same bytes of its files.
    inos, sizes_of, keys = table_of(sizes).files_in(range(1, FILES + 1))
    kept = peers.kept_bytes(inos, sizes_of)
    assert np.array_equal(np.bincount(buckets(keys), kept, BUCKETS).astype(np.uint64), expected)


def test_with_too_many_scores_each_file_counts_with_the_part_of_this_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("monarch.peers.source._MOST_SCORES", 2 * FILES - 1)
    sizes = np.full(FILES, 101)
    sizes[:10] = LARGEST + 1
    peers = peers_of(None, FakeMember(RIGHT), snapshot=table_of(sizes))
    assert peers.curve().sum() == 10 * (LARGEST + 1) + (FILES - 10) * 50


@pytest.mark.parametrize("is_computed", [True, False], ids=["computed", "too many"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_start_of_a_large_job_reads_the_snapshot_once_and_computes_no_score_twice(
    replicas: int, is_computed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, members, blocks = 20_000, 1024, 2048
    sizes = np.full(files, LARGEST)
    # The blocks of a very large file are computed at the mount, those of the others when opened.
    sizes[:9] = 2 * BLOCK
    sizes[9] = blocks * BLOCK
    table = table_of(sizes)
    # The table has nothing else that could be read, such as the attributes of one file.
    table.files_in = Mock(wraps=table.files_in)
    scores: list[int] = []
    compute = Ownership._scores

    def counted(whole: Ownership, *columns: Any) -> npt.NDArray[np.float64]:
        found = compute(whole, *columns)
        scores.append(found.size)
        return found

    monkeypatch.setattr(Ownership, "_scores", counted)
    if not is_computed:
        monkeypatch.setattr("monarch.peers.source._MOST_SCORES", files * members - 1)
    others = [FakeMember(RIGHT) for _ in range(members - 1)]
    peers = peers_of(None, *others, replicas=replicas, snapshot=table, most_held=1)
    peers.curve()
    assert table.files_in.call_count == 1
    # One of each member for each file and block, and those of this node again.
    assert sum(scores) <= (members + 1) * (files * is_computed + blocks)
    # Not in steps for each file.
    assert len(scores) <= (members + 1) * (2 * is_computed + 1)


def test_a_source_reads_itself_what_no_other_node_gives(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES)
    known = identity_of((tmp_path / "file").stat())
    shared = PeerSource(bytes(tmp_path))
    try:
        assert shared.fetch_shared(b"file", known, Ino(1)).read_bytes == len(BYTES)
        shared.peers = peers_of(None, FakeMember("slow"))
        ino = first(shared.peers, 1)
        fetched = shared.fetch_shared(b"file", known, ino)
        assert (fetched.data, fetched.opens) == (BYTES, 1)
    finally:
        shared.close()


@pytest.mark.parametrize("members", [2, 3, 300])
def test_the_owners_are_those_of_the_hash_for_the_first_and_the_last_file(members: int) -> None:
    peers = peers_of(None, *(FakeMember(RIGHT) for _ in range(members - 1)))
    for ino in (1, 2, FILES - 1, FILES, 217):
        assert list(peers._order(Ino(ino))) == peers._ownership.order(ino)
        assert peers.owns(Ino(ino)) == (peers._ownership.owner(ino) == 0)


@pytest.mark.promise(274)
def test_a_bug_in_a_request_to_another_node_leads_to_the_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError

    (tmp_path / "file").write_bytes(BYTES)
    shared = PeerSource(bytes(tmp_path))
    shared.peers = peers_of(None, FakeMember(RIGHT))
    monkeypatch.setattr(shared.peers, "fetch", fails)
    try:
        fetched = shared.fetch_shared(b"file", identity_of((tmp_path / "file").stat()), Ino(1))
    finally:
        shared.close()
    assert fetched.data == BYTES
    assert "the source is read instead" in caplog.text


@pytest.mark.promise(277)
def test_a_replica_is_asked_for_by_its_owner_in_the_order_and_by_others_in_turn() -> None:
    one, two, three = (FakeMember(RIGHT) for _ in range(3))
    peers = peers_of(None, one, two, three, replicas=2)
    assert peers.share == 0.5
    mine = first(peers, 0)
    assert peers.owns(mine) and peers.fetch(mine, identity(mine)) is None
    # This node is the second owner: it gets the bytes from the first, and keeps them.
    second = first(peers, 1, 0)
    assert peers.owns(second)
    assert peers.fetch(second, identity(second)) == BYTES
    assert [len(member.asked) for member in (one, two, three)] == [1, 0, 0]
    third = first(peers, 1, 2, 0)
    assert not peers.owns(third)
    two.breaker.is_out = lambda now: True  # type: ignore[method-assign]
    assert peers.owns(third), "an owner does not answer"
    asked = {
        next(iter(peers._asked_for(Ino(ino))))
        for ino in range(1, FILES + 1)
        if peers._ownership.order(ino)[:2] == [2, 3]
    }
    assert asked == {2, 3}, "the load of a file is on both of its owners"


def test_more_replicas_than_members_are_one_on_each() -> None:
    peers = peers_of(None, FakeMember(RIGHT), replicas=64)
    assert peers.share == 1.0
    assert all(peers.owns(Ino(ino)) for ino in range(1, FILES + 1))
