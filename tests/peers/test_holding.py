"""Requests between members about written files, through two real engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, cast

import pytest
import trio
import xxhash

from monarch.peers import holding as holdings
from monarch.peers.answers import Answers
from monarch.peers.breaker import Breaker
from monarch.peers.client import COMING, NOT_KEPT, OK, Answer, PeerClient, PeerFailed
from monarch.peers.engine import Engine, find_engine
from monarch.peers.held import HeldFiles, Record
from monarch.peers.hello import MemberKey
from monarch.peers.holding import Holding, Placed, member_id
from monarch.peers.members import Endpoint
from monarch.peers.nginx import SOCKET, Site
from monarch.writeback.objects import object_path
from tests.peers.test_engine import HOST, SECRET, SET, Files, free_port

TOKEN = "0123456789abcdef"
NAMES = ("one", "two")
KEYS = [MemberKey(name, SET, SECRET) for name in NAMES]
# More than one request.
CONTENT = os.urandom((8 << 20) + 5000)


class Pair:
    """Two members, each with an engine. The first one has a written file, object 300."""

    def __init__(self, directory: Path) -> None:
        self.ports = [free_port(), free_port()]
        self.objects = directory / "objects"
        path = object_path(self.objects, 300)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENT)
        self.clients = [self._client(0), self._client(1)]
        self.members = [
            Holding(
                HeldFiles(directory / f"held{own}", 20 << 20),
                {member_id(NAMES[1 - own]): self.clients[1 - own]},
                member_id(NAMES[own]),
                0.05,
                lambda number: object_path(self.objects, number).relative_to(self.objects),
                lambda record: not record.path.startswith(b"other/"),
            )
            for own in (0, 1)
        ]

    def _client(self, member: int) -> PeerClient:
        endpoint = Endpoint(HOST, self.ports[member])
        return PeerClient(endpoint, [], KEYS[member], Breaker(10.0))

    def record(self, content: bytes = CONTENT) -> Record:
        digest = xxhash.xxh3_128_hexdigest(content)
        return Record(TOKEN, 300, len(content), digest, b"ckpt/a", 0o644, 0, 0, 5)


def with_pair(directory: Path, check: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair(directory)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for own, holding in enumerate(pair.members):
                    peers, files = (
                        directory / f"peers{own}",
                        Files(Path(mkdtemp(dir=directory)) / "files"),
                    )
                    answers = Answers(
                        *(peers / SOCKET, files, KEYS[own]),
                        patience_s=0.05,
                        most_held=1 << 20,
                        holding=holding,
                    )
                    site = Site(
                        *(files.tiers, KEYS[own], HOST, [pair.ports[own]]), written=pair.objects
                    )
                    engine = Engine(find_engine(None), peers, site)
                    nursery.start_soon(answers.run)
                    nursery.start_soon(engine.run)
                    await engine.settled.wait()
                await check(pair)
                nursery.cancel_scope.cancel()
        for client in pair.clients:
            client.close()

    trio.run(main)


@pytest.mark.promise(331)
def test_a_file_is_kept_by_another_member_until_that_is_not_needed(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        owner, other = pair.members
        record = pair.record()
        client = (await owner.ask(record)).client
        assert client is pair.clients[1]
        (kept,) = other.held.of(TOKEN)
        assert kept == replace(record, version=kept.version) and kept.version > 0
        fd = other.held.open(record)
        assert os.pread(fd, len(CONTENT) + 1, 0) == CONTENT
        os.close(fd)
        assert await owner.is_held(client, record)
        # Its bytes have changed since the digest was computed.
        refused = await owner.ask(pair.record(CONTENT[::-1]))
        # It keeps the earlier version.
        assert (refused.client, refused.doubtful) == (None, [client])
        assert other.held.of(TOKEN) == [kept]
        assert await owner.forget(client, TOKEN, 300, kept.version - 1)
        assert await owner.is_held(client, record)
        assert await owner.forget(client, TOKEN, 300, kept.version)
        assert not await owner.is_held(client, record) and not other.held.files
        assert await owner.forget(client, TOKEN, 0, owner.newest())

    with_pair(tmp_path, check)


def test_the_clock_of_a_node_was_set_back(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        owner, other = pair.members
        client, ahead = pair.clients[1], owner.newest() + 10**15
        assert other.held.put(replace(pair.record(), version=ahead), lambda take: take(CONTENT))
        # The other node cannot know that the offer is later than what it keeps.
        assert await owner.ask(pair.record()) == Placed(None, [client])
        assert (await owner.ask(pair.record())).client is client
        version = other.held.version(TOKEN, 300)
        assert version is not None and version > ahead

    with_pair(tmp_path, check)


@pytest.mark.fault("N7")
def test_all_files_of_a_mount_are_removed_after_the_clock_of_its_node_was_set_back(
    tmp_path: Path,
) -> None:
    async def check(pair: Pair) -> None:
        owner, other = pair.members
        client, ahead = pair.clients[1], owner.newest() + 10**15
        assert other.held.put(replace(pair.record(), version=ahead), lambda take: take(CONTENT))
        # They may be of a time after this request, so they stay until the next one.
        assert not await owner.forget(client, TOKEN, 0, owner.newest())
        assert other.held.files == 1
        assert await owner.forget(client, TOKEN, 0, owner.newest())
        assert other.held.files == 0

    with_pair(tmp_path, check)


def test_a_version_that_no_clock_has_given_changes_no_later_offer(tmp_path: Path) -> None:
    class Other:
        name, breaker = "two", Breaker(10.0)

        def get(self, name: str, size: int) -> Answer:
            is_asked = name.startswith("version/")
            return Answer(OK, b"9" * size, None) if is_asked else Answer(NOT_KEPT, b"", None)

    async def main() -> None:
        other = cast(Any, Other())
        holding = Holding(
            *(HeldFiles(tmp_path, 1), {"2": other}, "1", 60.0),
            *(lambda number: tmp_path, lambda record: True),
        )
        record = Record(TOKEN, 300, 0, "0" * 32, b"ckpt/a", 0o644, 0, 0, 5)
        assert await holding.ask(record) == Placed(None, [other])
        request = f"GET /{SET}/hold/{TOKEN}/{holding.newest()} HTTP/1.1\r\n"
        assert holdings.REQUEST.match(request.encode()) is not None

    trio.run(main)


def test_nodes_agree_which_one_recovers_a_file(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        names = [member_id(name) for name in NAMES]
        for holding, version in zip(pair.members, (5, 6), strict=True):
            record = replace(pair.record(), version=version)
            assert holding.held.put(record, lambda take: take(CONTENT))
        one, two = pair.members
        assert await one.keepers(TOKEN) == names[1:] and await two.keepers(TOKEN) == names[:1]
        assert await one.keepers("f" * 16) == []
        records = [holding.held.of(TOKEN)[0] for holding in pair.members]
        assert await one.is_left_to(names[1:], records[0])
        assert not await two.is_left_to(names[:1], records[1])
        # Of the same version exactly one is the first.
        same = replace(pair.record(), version=6)
        assert one.held.put(same, lambda take: take(CONTENT))
        found = {
            await one.is_left_to(names[1:], same),
            await two.is_left_to(names[:1], same),
        }
        assert found == {True, False}
        await two.recovered(names[:1], same)
        assert not one.held.files

    with_pair(tmp_path, check)


@pytest.mark.fault("N7")
def test_files_are_kept_over_a_change_of_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(pair: Pair) -> None:
        assert (await pair.members[0].ask(pair.record())).client is pair.clients[1]

    async def forget(pair: Pair) -> None:
        owner, other = pair.members
        assert await owner.is_held(pair.clients[1], pair.record())
        assert await owner.forget(pair.clients[1], TOKEN, 0, owner.newest())
        assert not other.held.files

    with_pair(tmp_path, send)
    monkeypatch.setattr(f"{__name__}.KEYS", [MemberKey(name, SET, b"n" * 32) for name in NAMES])
    with_pair(tmp_path, forget)


@pytest.mark.fault("N7")
@pytest.mark.parametrize("size", [0, 1 << 40])
def test_a_node_whose_disk_hangs_delays_one_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(holdings, "_LEAST_S", 0.0)

    class Hanging:
        name, asked = "hanging", 0
        breaker = Breaker(10.0)

        def get(self, name: str, size: int) -> Answer:
            self.asked += 1
            return Answer(COMING, b"", None)

    class Keeping(Hanging):
        def get(self, name: str, size: int) -> Answer:
            return Answer(OK, b"", None)

    hanging, keeping = Hanging(), Keeping()
    record = Record(TOKEN, 300, size, "0" * 32, b"a", 0o644, 0, 0, 5)

    async def main() -> None:
        holding = Holding(
            *(HeldFiles(tmp_path, 1), cast(Any, {"1": hanging, "2": keeping}), "3", 60.0),
            *(lambda number: tmp_path, lambda record: True),
        )
        assert await holding.ask(record) == Placed(cast(Any, keeping), [cast(Any, hanging)])
        asked = hanging.asked
        assert await holding.ask(record) == Placed(cast(Any, keeping), [])
        assert hanging.asked == asked > 0

    trio.run(main)


def test_short_requests_do_not_wait_for_whole_files(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        owner, other = pair.members
        record = pair.record()
        assert (await owner.ask(record)).client is pair.clients[1]
        ended = threading.Event()
        try:
            for _ in range(holdings._THREADS):
                owner._asks.start(ended.wait)
            for _ in range(holdings._MOST_THREADS):
                other._threads.start(ended.wait)
            assert await owner.is_held(pair.clients[1], record)
            assert await owner.forget(pair.clients[1], TOKEN, 300, owner.newest())
            assert not other.held.files
        finally:
            ended.set()

    with_pair(tmp_path, check)


@pytest.mark.promise(331)
def test_bytes_are_given_only_while_they_are_offered(tmp_path: Path) -> None:
    dice = Random(16)

    async def check(pair: Pair) -> None:
        owner, other = pair.members
        get, own = pair.clients[0].get, member_id(NAMES[0])

        async def status(name: str) -> int:
            return (await trio.to_thread.run_sync(get, name, 0)).status

        offer = owner.newest()
        for kind in ("record", "bytes"):
            assert await status(f"{kind}/{own}/{offer}") == NOT_KEPT
        assert await status("written/2c/300") == NOT_KEPT
        # A member that is not known, and one that has offered nothing.
        assert await status(f"hold/{'0' * 16}/5") == NOT_KEPT
        for _ in range(30):
            kind = dice.choice(("hold", "record", "bytes", "held", "version", "forget", "holds"))
            digits = "".join(dice.choices("0123456789abcdef.%/", k=dice.randrange(1, 70)))
            numbers = "/".join(str(dice.randrange(10**21)) for _ in range(dice.randrange(1, 4)))
            answered = await status(f"{kind}/{digits}/{numbers}".replace("%", "%25"))
            assert answered in (NOT_KEPT, 200) and (answered == NOT_KEPT or kind == "forget")
        # It still works.
        assert (await owner.ask(pair.record())).client is pair.clients[1]
        assert other.held.files == 1

    with_pair(tmp_path, check)


def test_a_member_that_is_left_out_gets_no_removals(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        client = pair.clients[1]
        for _ in range(10):
            client.breaker.failed(time.monotonic() + 1000)
        assert not await pair.members[0].forget(client, TOKEN, 0, 1)
        assert not client.was_asked

    with_pair(tmp_path, check)


def test_a_member_that_has_stopped_does_not_delay_the_recovery_of_each_file(
    tmp_path: Path,
) -> None:
    class Stopped:
        name, breaker, asked = "two", Breaker(10.0), 0

        def get(self, name: str, size: int) -> Answer:
            self.asked += 1
            self.breaker.failed(time.monotonic() + 1000)
            raise PeerFailed("slow")

    async def main() -> None:
        stopped = Stopped()
        holding = Holding(
            *(HeldFiles(tmp_path, 1), {"2": cast(Any, stopped)}, "1", 60.0),
            *(lambda number: tmp_path, lambda record: True),
        )
        record = Record(TOKEN, 300, 0, "0" * 32, b"ckpt/a", 0o644, 0, 0, 5, 7)
        for _ in range(20):
            assert not await holding.is_left_to(["2"], record)
        # As many as leave a member out.
        assert stopped.asked == 3

    trio.run(main)


def test_members_are_asked_at_the_same_time_before_a_recovery(tmp_path: Path) -> None:
    count = 20
    # No member answers before all of them are asked.
    all_asked = threading.Barrier(count)

    class Waiting:
        def __init__(self) -> None:
            self.name, self.breaker = "waiting", Breaker(10.0)

        def get(self, name: str, size: int) -> Answer:
            all_asked.wait(60)
            return Answer(OK, b"%019d" % 8 if size else b"", None)

    async def main() -> None:
        others = {str(number): cast(Any, Waiting()) for number in range(count)}
        holding = Holding(
            *(HeldFiles(tmp_path, 1), others, "1", 60.0),
            *(lambda number: tmp_path, lambda record: True),
        )
        record = Record(TOKEN, 300, 0, "0" * 32, b"ckpt/a", 0o644, 0, 0, 5, 7)
        keepers = await holding.keepers(TOKEN)
        assert sorted(others) == keepers
        assert await holding.is_left_to(keepers, record)
        await holding.recovered(keepers, record)

    trio.run(main)


def test_a_file_that_could_not_be_recovered_is_not_kept(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        record = replace(pair.record(), path=b"other/a")
        assert await pair.members[0].ask(record) == Placed(None, [])
        assert not pair.members[1].held.files

    with_pair(tmp_path, check)


def test_an_offer_is_not_known_after_its_task_was_cancelled(tmp_path: Path) -> None:
    class Failing:
        name = "two"

        def get(self, name: str, size: int) -> Answer:
            raise PeerFailed("slow")

    async def main() -> None:
        holding = Holding(
            *(HeldFiles(tmp_path, 1), {"2": cast(Any, Failing())}, "1", 60.0),
            *(lambda number: tmp_path, lambda record: True),
        )
        async with trio.open_nursery() as nursery:
            assert await holding._hold("2", 5, nursery) == NOT_KEPT
            nursery.cancel_scope.cancel()
        assert not holding._arriving

    trio.run(main)


def test_a_member_knows_a_limited_number_of_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "_MOST_ARRIVING", 0)

    async def check(pair: Pair) -> None:
        assert await pair.members[0].ask(pair.record()) == Placed(None, [])
        assert not pair.members[1].held.files

    with_pair(tmp_path, check)


class Trickling:
    """A member that gives each part of its files only after ``delays``."""

    name = "slow"

    def __init__(self, size: int, delays: Callable[[], object]) -> None:
        self.breaker = Breaker(10.0)
        self.parts = 0
        self._record = Record(TOKEN, 300, size, "0" * 32, b"ckpt/a", 0o644, 0, 0, 5)
        self._delays = delays

    def get(self, name: str, size: int, offset: int | None = None) -> Answer:
        if name.startswith("record/"):
            number = int(name.rpartition("/")[2])
            return Answer(OK, replace(self._record, number=number).to_text().encode(), None)
        self.parts += 1
        self._delays()
        return Answer(OK, bytes(size), None)


@pytest.mark.fault("N7")
def test_a_member_that_sends_slowly_keeps_out_no_file_of_another_one(tmp_path: Path) -> None:
    ended = threading.Event()

    async def main() -> None:
        slow, quick = Trickling(1, lambda: ended.wait(60)), Trickling(0, bool)
        holding = Holding(
            *(HeldFiles(tmp_path / "held", 1 << 30), cast(Any, {"1": slow, "2": quick}), "3"),
            *(60.0, lambda number: tmp_path, lambda record: True),
        )
        try:
            async with trio.open_nursery() as nursery:
                for offer in range(2 * holdings._MOST_THREADS):
                    nursery.start_soon(holding._hold, "1", offer, nursery)
                with trio.fail_after(60):
                    while slow.parts < holdings._THREADS:
                        await trio.sleep(0.01)
                    assert await holding._hold("2", 1, nursery) == NOT_KEPT
                assert slow.parts == holdings._THREADS
                ended.set()
                nursery.cancel_scope.cancel()
        finally:
            ended.set()

    trio.run(main)


@pytest.mark.fault("N7")
def test_a_file_that_comes_too_slowly_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(holdings, "_now", lambda: now[0])

    def passes() -> None:
        # 1 MB/s.
        now[0] += 8.0

    slow = Trickling(100 << 20, passes)
    holding = Holding(
        *(HeldFiles(tmp_path / "held", 1 << 30), cast(Any, {"1": slow}), "3", 60.0),
        *(lambda number: tmp_path, lambda record: True),
    )
    with pytest.raises(PeerFailed):
        holding._fetch(cast(Any, slow), "1", 5)
    assert slow.parts == 2
    assert not holding.held.files and holding.held.nbytes == 0


def test_the_offers_of_one_member_leave_room_for_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "_MOST_ARRIVING", 1)

    async def main() -> None:
        members, numbers = {"1": Trickling(0, bool), "2": Trickling(0, bool)}, count(5)
        holding = Holding(
            *(HeldFiles(tmp_path / "held", 1 << 30), cast(Any, members), "3", 60.0),
            *(lambda number: tmp_path, lambda record: True),
        )
        async with trio.open_nursery() as nursery:
            for member in ("1", "1", "2"):
                await holding._hold(member, next(numbers), nursery)
            assert [member for member, _ in holding._arriving] == ["1", "2"]
            nursery.cancel_scope.cancel()
        assert not holding._arriving

    trio.run(main)


@pytest.mark.promise(352)
def test_a_member_that_is_not_mounted_yet_is_not_left_out(tmp_path: Path) -> None:
    port = free_port()
    client = PeerClient(Endpoint(HOST, port), [], KEYS[1], Breaker(10.0))
    holding = Holding(
        *(HeldFiles(tmp_path, 1), {"2": client}, "1", 60.0),
        *(lambda number: tmp_path, lambda record: True),
    )

    async def main() -> None:
        for _ in range(10):
            assert not await holding.forget(client, TOKEN, 0, 1)

    trio.run(main)
    assert (client.breaker.is_failing, client.was_asked, client.trouble) == (False, False, None)


class Counted:
    """A member that was left out, and may be asked again."""

    def __init__(self, *, is_there: bool) -> None:
        self.name, self.breaker, self.asked = "two", Breaker(10.0), list[str]()
        self._is_there = is_there
        for _ in range(3):
            self.breaker.failed(time.monotonic() - 100)

    def is_there(self) -> bool:
        return self._is_there

    def get(self, name: str, size: int, offset: int | None = None) -> Answer:
        self.asked.append(name)
        return Answer(OK, b"", None)

    def holding(self, directory: Path) -> Holding:
        return Holding(
            *(HeldFiles(directory, 1), {"2": cast(Any, self)}, "1", 60.0),
            *(lambda number: directory, lambda record: True),
        )


@pytest.mark.fault("N7")
def test_a_member_that_is_back_removes_a_file_that_another_one_has_recovered(
    tmp_path: Path,
) -> None:
    member = Counted(is_there=True)
    record = Record(TOKEN, 300, 0, "0" * 32, b"ckpt/a", 0o644, 0, 0, 5, 7)
    trio.run(member.holding(tmp_path).recovered, ["2"], record)
    assert member.asked == [f"forget/{TOKEN}/300/7"]


@pytest.mark.promise(352)
def test_a_member_that_is_not_there_for_a_removal_of_all_is_asked_for_a_file(
    tmp_path: Path,
) -> None:
    member = Counted(is_there=False)
    holding = member.holding(tmp_path)
    assert not trio.run(holding.forget, cast(Any, member), TOKEN, 0, 1)
    assert member.asked == []
    assert member.breaker.admits(time.monotonic())
