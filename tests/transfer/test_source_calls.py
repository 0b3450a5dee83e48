"""The reports about a source that fails, and their end; the test sets the clock."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import cast

import pytest
import trio.testing

from monarch.errors import SourceError
from monarch.namespace.build import build
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.peers.source import Peers, PeerSource
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.tiers.source import Source
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import NoDatapath
from monarch.types import ROOT_INO, Identity, Ino
from tests.conftest import Tree


class OtherNode:
    """What other nodes give, once they do not keep this one waiting: nothing."""

    def __init__(self) -> None:
        self.is_asked, self.answers = threading.Event(), threading.Event()
        self.ranges = None

    def fetch(self, ino: Ino, identity: Identity) -> bytes | None:
        self.is_asked.set()
        assert self.answers.wait(60)
        return None

    def source_took(self, seconds: float) -> None:
        pass


@pytest.mark.promise(43, 274)
async def test_a_wait_for_another_node_is_none_for_the_source(
    tree: Tree, tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    root = tree({"file": b"bytes"})
    build(root, tmp_path / "snapshot")
    source, other = PeerSource(os.fsencode(root)), OtherNode()
    source.peers = cast(Peers, other)
    snapshot = Snapshot.open(tmp_path / "snapshot")
    ino = snapshot.resolve(b"file")
    assert ino is not None
    threads, is_shown = ThreadPool(2, "source", abandon=True), trio.Event()
    source_calls = SourceCalls(
        source,
        threads,
        names=Namespace(snapshot, lambda ino: None),
        metrics=Metrics(["fast"]),
        timeout_s=8.0,
        datapath=NoDatapath(),
    )
    found: list[bytes] = []
    hung = threading.Event()

    async def read() -> None:
        identity = snapshot.attributes(ino).identity
        fetched = await source_calls.at(ino, source.fetch_shared, identity, ino)
        found.append(fetched.data)
        is_shown.set()

    async def jump(checks: int) -> None:
        for _ in range(checks):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(1.0)

    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source_calls.run)
            nursery.start_soon(read)
            nursery.start_soon(source_calls.wait, ino, is_shown)
            await trio.to_thread.run_sync(other.is_asked.wait)
            await jump(100)
            assert source_calls.trouble() is None and threads.oldest_s() == 0.0
            other.answers.set()
            await is_shown.wait()
            assert found == [b"bytes"]
            # A call of the source itself is given up.
            nursery.start_soon(jump, 20)
            with pytest.raises(SourceError) as given_up:
                await source_calls.call(ino, hung.wait, 60)
            assert given_up.value.errno == errno.ETIMEDOUT
            hung.set()
            nursery.cancel_scope.cancel()
    snapshot.close()
    source.close()


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.fault("S2", "S7")
@pytest.mark.promise(55)
async def test_trouble_lasts_a_minute_beyond_the_last_error_and_a_refusal_is_none(
    tree: Tree, tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    root = tree({"file": b"bytes"})
    build(root, tmp_path / "snapshot")
    source = Source(os.fsencode(root))
    snapshot = Snapshot.open(tmp_path / "snapshot")
    source_calls = SourceCalls(
        source,
        ThreadPool(1, "source", abandon=True),
        names=Namespace(snapshot, lambda ino: None),
        metrics=Metrics(["fast"]),
        timeout_s=None,
        datapath=NoDatapath(),
    )

    async def asked(number: int) -> None:
        with pytest.raises(SourceError) as refused:
            await source_calls.call(ROOT_INO, fail, number)
        assert refused.value.errno == number

    await asked(errno.EACCES)
    assert source_calls.trouble() is None
    for _ in range(3):
        await asked(errno.EIO)
        mock_clock.jump(50)
        found = source_calls.trouble()
        assert found is not None
        assert "Input/output error" in found.what and not found.hangs
    mock_clock.jump(20)
    assert source_calls.trouble() is None
    snapshot.close()
    source.close()
