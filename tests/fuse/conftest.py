"""The source that can be slow, fail and hang, and callers that wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.fuse.rig import eventually, kill
from tests.mount.conftest import slow as slow


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a source that does not even receive signals."""
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    (tmp_path / "hanging").mkdir()
    (tmp_path / "hanging" / "file").write_bytes(b"x")
    with SlowSource(tmp_path / "hanging", tmp_path / "stopped") as slow:
        slow.rules("hang open file")
        process = subprocess.Popen(["cat", str(slow.path / "file")])
        eventually(lambda: slow.counters()["open"] > 0, "it waits")
        os.kill(slow.pid, signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()
            os.kill(slow.pid, signal.SIGCONT)
            process.wait(60)


@pytest.fixture
def killed(stuck: subprocess.Popen[bytes]) -> int:
    """A process that was killed and cannot end yet."""
    kill(stuck)
    return stuck.pid
