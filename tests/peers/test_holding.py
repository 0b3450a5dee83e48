"""Requests between members about written files, through two real engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import trio
import xxhash

from monarch.peers import holding as holdings
from monarch.peers.answers import Answers
from monarch.peers.breaker import Breaker
from monarch.peers.client import NOT_KEPT, Answer, PeerClient, PeerFailed
from monarch.peers.engine import Engine, find_engine
from monarch.peers.held import HeldFiles, Record
from monarch.peers.hello import MemberKey
from monarch.peers.holding import Holding, member_id
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
        path.parent.mkdir(parents=True)
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
                    peers, files = directory / f"peers{own}", Files(directory / f"files{own}")
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
        client = await owner.ask(record)
        assert client is pair.clients[1]
        assert other.held.of(TOKEN) == [record]
        fd = other.held.open(record)
        assert os.pread(fd, len(CONTENT) + 1, 0) == CONTENT
        os.close(fd)
        assert await owner.is_held(client, record)
        # Its bytes have changed since the digest was computed.
        assert await owner.ask(pair.record(CONTENT[::-1])) is None
        assert other.held.of(TOKEN) == [record]
        assert await owner.forget(client, TOKEN, 300)
        assert not await owner.is_held(client, record) and not other.held.files
        assert await owner.forget_all(TOKEN)

    with_pair(tmp_path, check)


def test_short_requests_do_not_wait_for_whole_files(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        owner, other = pair.members
        record = pair.record()
        assert await owner.ask(record) is pair.clients[1]
        ended = threading.Event()
        try:
            for _ in range(holdings._THREADS):
                owner._asks.start(ended.wait)
                other._threads.start(ended.wait)
            assert await owner.is_held(pair.clients[1], record)
            assert await owner.forget(pair.clients[1], TOKEN, 300)
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

        offer = next(owner._offers)
        for kind in ("record", "bytes"):
            assert await status(f"{kind}/{own}/{offer}") == NOT_KEPT
        assert await status("written/2c/300") == NOT_KEPT
        # A member that is not known, and one that has offered nothing.
        assert await status(f"hold/{'0' * 16}/5") == NOT_KEPT
        for _ in range(30):
            kind = dice.choice(("hold", "record", "bytes", "held", "forget", "holds"))
            digits = "".join(dice.choices("0123456789abcdef.%/", k=dice.randrange(1, 70)))
            answered = await status(f"{kind}/{digits}/{dice.randrange(10**21)}".replace("%", "%25"))
            assert answered in (NOT_KEPT, 200) and (answered == NOT_KEPT or kind == "forget")
        # It still works.
        assert await owner.ask(pair.record()) is pair.clients[1]
        assert other.held.files == 1

    with_pair(tmp_path, check)


def test_a_member_that_is_left_out_gets_no_removals(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        client = pair.clients[1]
        for _ in range(10):
            client.breaker.failed(time.monotonic() + 1000)
        assert not await pair.members[0].forget_all(TOKEN)
        assert not client.was_asked

    with_pair(tmp_path, check)


def test_a_file_that_could_not_be_recovered_is_not_kept(tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        record = replace(pair.record(), path=b"other/a")
        assert await pair.members[0].ask(record) is None
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
        assert await pair.members[0].ask(pair.record()) is None
        assert not pair.members[1].held.files

    with_pair(tmp_path, check)
