"""File systems below the kernel, closed at the end of the test; no descriptor may be left."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from monarch.placement.policy import FirstCome
from monarch.text import MiB
from monarch.transfer.source_calls import Caller
from tests.conftest import Tree
from tests.vfs.part_rig import CONTENT, Makes, PartRig
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
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    return rigs()


@pytest.fixture(scope="module")
def us() -> Iterator[Caller]:
    """A process in a session of its own. The session of the tests has no number if it was begun
    outside their PID namespace."""
    with subprocess.Popen(["sleep", "infinity"], start_new_session=True) as process:
        try:
            yield Caller(process.pid, os.getuid(), os.getgid())
        finally:
            process.kill()


@pytest.fixture
def big(tmp_path: Path) -> Path:
    source = tmp_path / "source-of-parts"
    source.mkdir()
    (source / "big").write_bytes(CONTENT)
    os.utime(source / "big", ns=(10**18, 10**18))
    return source


@pytest.fixture
def make(big: Path, tmp_path: Path) -> Iterator[Makes]:
    made: list[PartRig] = []

    def new(**settings: Any) -> PartRig:
        defaults = {"capacity": 64 * MiB, "buffer_max": "64MiB", "policy": FirstCome()}
        rig = PartRig(tmp_path / f"rig-{len(made)}", big, **{**defaults, **settings})
        made.append(rig)
        return rig

    yield new
    for rig in made:
        rig.close()
