"""The reports about a source that fails, and their end; the test sets the clock."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio.testing

from monarch.errors import SourceError
from monarch.namespace.build import build
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.tiers.source import Source
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import NoDatapath
from monarch.types import ROOT_INO
from tests.conftest import Tree


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
