"""A model over a small source, and a clock that jumps ahead when all tasks wait."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from monarch.posix.mounts import mount_table
from monarch.posix.thread_pool import ThreadPool, _Call
from tests.equipment.virtual_clock import virtual_clock
from tests.equipment.waiting import becomes_true
from tests.mount.conftest import slow
from tests.writeback.rig import Model

__all__ = ["slow"]

# The objects and the journal of a mount, and what it uses at the source.
_KEPT_OPEN = re.compile(r"/absorbed[^/]*/([0-9a-f]+/[0-9]+|journal)\b|/source\b")


@pytest.fixture(autouse=True)
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what would end with the process of a daemon, of which a run of tests has thousands: the
    threads, which also keep all that their tasks have used, and what a killed one has open."""
    pools: list[ThreadPool] = []
    over: list[None] = []
    init, work = ThreadPool.__init__, ThreadPool._work

    def noted(pool: ThreadPool, *arguments: Any, **options: Any) -> None:
        init(pool, *arguments, **options)
        pools.append(pool)

    def counted(pool: ThreadPool, token: trio.lowlevel.TrioToken) -> None:
        try:
            work(pool, token)
        finally:
            over.append(None)

    monkeypatch.setattr(ThreadPool, "__init__", noted)
    monkeypatch.setattr(ThreadPool, "_work", counted)
    yield
    for pool in pools:
        for _ in range(pool._started):
            # A thread ends when nothing takes the answer.
            pool._calls.put(_Call(int, (), None))
    started = sum(pool._started for pool in pools)
    if not becomes_true(lambda: len(over) == started, timeout_s=60.0, step_s=0.001):
        # A call that hangs may still close what it has opened.
        return
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if _KEPT_OPEN.search(path) and (path.startswith(f"{tmp_path}/") or _is_detached(fd)):
                os.close(int(fd))


def _is_detached(fd: str) -> bool:
    """Whether it is on a disk that was unmounted, and so has no path."""
    number = re.search(r"^mnt_id:\s+(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.M)
    assert number is not None
    return int(number[1]) not in {mounted.id for mounted in mount_table()}


@pytest.fixture
def clock() -> Iterator[MockClock]:
    with virtual_clock() as clock:
        yield clock


@pytest.fixture
def patient_clock() -> Iterator[MockClock]:
    """For a test that measures: this clock does not jump while a thread is at work."""
    with virtual_clock(patience_s=60.0) as clock:
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


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory, with a small disk ``small`` in it that a tier can fill.

    Where that may not be mounted it is a directory like any other, and no tier is ever full.
    """
    root = tmp_path_factory.mktemp("memory")
    mounted = []
    try:
        for path, size in ((root, "512m"), (root / "small", "8m")):
            if os.geteuid() != 0:
                break
            path.mkdir(exist_ok=True)
            how = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", path]
            if subprocess.run(how, check=False).returncode != 0:
                break
            mounted.append(path)
        yield root
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", "-l", path], check=True)


def small_disk(memory: Path, number: int) -> Path | None:
    """A directory for the tier of a history on the small disk, if there is one."""
    return memory / "small" / str(number) if (memory / "small").is_mount() else None
