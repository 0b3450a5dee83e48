"""What a mount reports on the other nodes of a large job."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from monarch.daemon.health_checks import PeersCheck
from monarch.daemon.peers import SharedFiles, Sharing
from monarch.peers.answers import Answers
from monarch.peers.breaker import Breaker
from monarch.peers.client import PeerClient
from monarch.peers.engine import Engine
from monarch.peers.hello import MemberKey
from monarch.peers.members import Endpoint
from monarch.peers.nginx import Site
from monarch.peers.requests import Received
from monarch.peers.source import Peers

OUT, ANSWERING = 400, 3


@pytest.mark.parametrize(
    ("answering", "out", "what"),
    [
        (0, 1, "1 of 1 other node does not share its copies: n000 (unreachable)"),
        (2, 1, "1 of 3 other nodes does not share its copies: n002 (unreachable)"),
        (1, 2, "2 of 3 other nodes do not share their copies: n001 (unreachable), n002"),
    ],
)
def test_health_counts_and_names_the_nodes_that_are_left_out(
    answering: int, out: int, what: str
) -> None:
    (problem,) = PeersCheck(sharing_of(answering, out).report).problems()
    assert problem.what.startswith(what)


def test_health_has_the_remedy_for_nodes_with_another_snapshot() -> None:
    sharing = sharing_of(1, 2)
    for state, remedy in (("unreachable", "docs/nodes.md"), ("other-set", "with one snapshot")):
        client = sharing._peers.clients[-1]
        assert client is not None
        client.trouble = state
        (problem,) = PeersCheck(sharing.report).problems()
        assert remedy in problem.remedy


def test_health_names_an_engine_that_did_not_start_but_none_that_is_starting() -> None:
    sharing = sharing_of(1, 0)
    sharing._engine.port = None
    assert [*PeersCheck(sharing.report).problems()] == []
    sharing._engine.settled.set()
    (problem,) = PeersCheck(sharing.report).problems()
    assert problem.kind == "peers-engine"


def test_all_nodes_that_are_left_out_are_counted_and_some_are_named() -> None:
    report = sharing_of(ANSWERING, OUT).report()
    assert report.out == OUT
    assert len(report.peers) == 256
    assert report.sent_bytes is None
    (problem,) = PeersCheck(lambda: report).problems()
    assert problem.kind == "peers-out"
    assert problem.what.startswith(f"{OUT} of {ANSWERING + OUT} other nodes do not share")
    assert problem.what.endswith("(unreachable), ...")


def sharing_of(answering: int, out: int) -> Sharing:
    clients: list[PeerClient | None] = [None]
    for number in range(answering + out):
        endpoint = Endpoint(f"n{number:03}")
        key = MemberKey(str(endpoint), "ab" * 16, b"secret")
        client = PeerClient(endpoint, [1], key, Breaker(0.05))
        if number >= answering:
            client.trouble = "unreachable"
            for _ in range(3):
                client.breaker.failed(0.0)
        clients.append(client)
    peers = SimpleNamespace(
        clients=clients,
        received=[Received() for _ in clients],
        failures=Counter(),
        not_kept=0,
        share=0.1,
        catch_up=lambda: None,
    )
    return Sharing(
        cast("Peers", peers),
        cast("Answers", SimpleNamespace(fetched_files=0, fetched_bytes=0)),
        cast(
            "Engine",
            SimpleNamespace(port=1, starts=1, sent_bytes=lambda: None, settled=trio.Event()),
        ),
        Site([], MemberKey("own", "ab" * 16, b"secret"), "127.0.0.1", [1]),
        "own",
        cast("SharedFiles", None),
    )
