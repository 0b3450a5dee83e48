"""File systems below the kernel, closed at the end of the test; no descriptor may be left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tree
from tests.vfs.rig import Rig

Rigs = Callable[..., Rig]

FILES = {"small": b"s" * 1000, "large": b"l" * 100_000, "d/other": b"o" * 500, "empty": b""}


@pytest.fixture
def rigs(tree: Tree, tmp_path: Path) -> Iterator[Rigs]:
    """Makes a file system over FILES, with the given settings."""
    # What earlier tests have left to the collector closes its descriptors.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        count = 0

        def make(**settings: Any) -> Rig:
            nonlocal count
            count += 1
            source = tree(FILES)
            rig = Rig(tmp_path / f"rig-{count}", source, **settings)
            stack.callback(rig.close)
            return rig

        yield make
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    return rigs()
