"""A model over a small source, and a clock that jumps ahead when all tasks wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trio.testing import MockClock

from tests.equipment.virtual_clock import virtual_clock
from tests.mount.conftest import slow
from tests.writeback.rig import Model

__all__ = ["slow"]


@pytest.fixture
def clock() -> Iterator[MockClock]:
    with virtual_clock() as clock:
        yield clock


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Model:
    """Of a source with a few files, two of them one by a hard link."""
    (source / "d").mkdir()
    for name in ("a", "b", "d/a"):
        (source / name).write_bytes(b"old " + name.encode())
    (source / "c").hardlink_to(source / "b")
    (tmp_path / "tier").mkdir()
    return Model(source, tmp_path / "tier")
