"""A source below a mount that can be slow, fail and hang; tiers on disks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.equipment import disks
from tests.equipment.disks import Disk
from tests.mount.conftest import slow

__all__ = ["slow"]


@pytest.fixture
def coarse_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that keeps whole seconds only, where the tier ``fast`` will be. Name it first."""
    reason = disks.unavailable()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "tiers" / "fast"
    with Disk(tmp_path / "disk", "ext4 of old").mounted(path):
        yield path
