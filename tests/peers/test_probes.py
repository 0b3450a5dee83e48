"""A member that was left out is asked whether it is back, though no reader wants its files."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from monarch.peers import client as clients
from monarch.peers import probes as probing
from monarch.peers.breaker import Breaker
from monarch.peers.client import PeerClient, PeerFailed
from monarch.peers.members import Endpoint
from monarch.peers.probes import Probes
from tests.peers.member import HOST, KEY, Member, head, say


class Clock:
    """The time of the breakers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (clients, probing):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def unused_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        return int(taken.getsockname()[1])


def left_out(port: int) -> PeerClient:
    """A client of a member that has not answered three requests."""
    client = PeerClient(Endpoint(HOST), [port], KEY, Breaker(10.0))
    for _ in range(3):
        with pytest.raises(PeerFailed):
            client.get("c/01/1", 5)
    assert client.breaker.is_failing and client.trouble == "unreachable"
    return client


def looks(client: PeerClient, check: Callable[[Probes], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await check(Probes([None, client]))

    trio.run(main)


@pytest.mark.promise(352)
def test_a_member_that_is_back_is_known_without_a_request(clock: Clock) -> None:
    client = left_out(port := unused_port())

    async def check(probes: Probes) -> None:
        made = Member(say(head(5) + b"hello"), port=port)
        try:
            await probes.look()
            assert made.requests == [], "its pause is not over"
            clock.now += 5.0
            await probes.look()
            assert client.trouble is None and not client.breaker.is_failing
            # It is asked only while it is left out.
            clock.now += 1000.0
            await probes.look()
            assert len(made.requests) == 1
            assert client.breaker.admits(clock.now)
            assert client.get("c/01/1", 5).data == b"hello"
            client.close()
        finally:
            made.close()

    looks(client, check)


@pytest.mark.promise(352)
def test_a_member_that_stays_away_is_asked_once_in_each_pause(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = left_out(unused_port())
    asked: list[float] = []
    connect = clients._connect

    def counted(address: tuple[str, int]) -> Any:
        asked.append(clock.now - 1000.0)
        return connect(address)

    monkeypatch.setattr(clients, "_connect", counted)

    async def check(probes: Probes) -> None:
        for _ in range(1200):
            clock.now += 1.0
            await probes.look()

    looks(client, check)
    assert asked == [5.0, 15.0, 35.0, 75.0, 155.0, 315.0, 615.0, 915.0]
    assert client.breaker.is_failing and client.trouble == "unreachable"


def test_a_member_whose_bytes_were_wrong_stays_out_until_they_are_right(clock: Clock) -> None:
    made = Member(say(head(5) + b"hello"))
    client = PeerClient(Endpoint(HOST), [made.port], KEY, Breaker(10.0))
    for _ in range(3):
        client.damaged()
    clock.now += 5.0

    async def check(probes: Probes) -> None:
        await probes.look()

    looks(client, check)
    made.close()
    assert client.trouble == "damaged" and client.breaker.is_failing
    assert client.breaker.admits(clock.now), "a request may try it"


@pytest.mark.promise(352)
def test_a_node_looks_at_times_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def times(count: int) -> list[float]:
        found: list[float] = []
        probes = Probes([])

        async def look() -> None:
            found.append(trio.current_time())
            if len(found) == count:
                scope.cancel()

        monkeypatch.setattr(probes, "look", look)
        with trio.CancelScope() as scope:
            await probes.run()
        return found

    runs = [trio.run(times, 30, clock=MockClock(autojump_threshold=0)) for _ in range(2)]
    assert runs[0] != runs[1]
    for run in runs:
        pauses = [later - earlier for earlier, later in zip([0.0, *run], run, strict=False)]
        assert all(2.0 <= pause <= 6.0 for pause in pauses)
