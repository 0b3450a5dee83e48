"""A source below a mount that can be slow, fail and hang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource


@pytest.fixture
def slow(source: Path, tmp_path: Path) -> Iterator[SlowSource]:
    """``source`` seen through slowfs. Name it before ``monarch``: it must outlive the mount."""
    reason = slowfs.unavailable()
    if reason:
        pytest.skip(reason)
    with SlowSource(source, tmp_path / "slow") as slowed:
        yield slowed
