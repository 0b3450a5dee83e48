"""One descriptor of a chunk for all threads that need it at the same time."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monarch.packmount.open_chunks import OpenChunks
from tests.equipment.waiting import wait_until

THREADS = 8


class Opener:
    """Opens ``path`` once it may. ``calls``: how often it was asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.may_end = threading.Event()
        self.calls = 0

    def open(self, chunk: int) -> int:
        self.calls += 1
        assert self.may_end.wait(60)
        return os.open(self._path, os.O_RDONLY)


@pytest.fixture
def chunks() -> Iterator[OpenChunks]:
    opened = OpenChunks()
    yield opened
    opened.close()


def use(chunks: OpenChunks, opener: Opener) -> tuple[int, bytes]:
    """The opens of one use, and bytes by its descriptor."""
    with chunks.using(0, opener.open) as used:
        return used.opens, os.pread(used.fd, 8, 0)


def waiting_in(names: set[str]) -> int:
    """The threads that are in one of these functions."""
    found = 0
    for frame in sys._current_frames().values():
        at = frame
        while at is not None and at.f_code.co_name not in names:
            at = at.f_back
        found += at is not None
    return found


def begun(chunks: OpenChunks, opener: Opener, pool: ThreadPoolExecutor) -> list[object]:
    """All threads wait for the first open, or for one of their own."""
    uses = [pool.submit(use, chunks, opener) for _ in range(THREADS)]
    wait_until(lambda: waiting_in({"open", "result"}) >= THREADS, "all threads wait")
    opener.may_end.set()
    return [found.exception() or found.result() for found in uses]


@pytest.mark.promise(231)
def test_a_chunk_is_opened_once_for_threads_that_need_it_at_once(
    chunks: OpenChunks, tmp_path: Path
) -> None:
    (tmp_path / "chunk").write_bytes(b"contents")
    opener = Opener(tmp_path / "chunk")
    with ThreadPoolExecutor(THREADS) as pool:
        found = begun(chunks, opener, pool)
    assert opener.calls == 1
    assert sorted(found) == [(0, b"contents")] * (THREADS - 1) + [(1, b"contents")]


def test_threads_that_wait_for_an_open_get_its_error_and_the_next_open_is_tried(
    chunks: OpenChunks, tmp_path: Path
) -> None:
    opener = Opener(tmp_path / "chunk")
    with ThreadPoolExecutor(THREADS) as pool:
        found = begun(chunks, opener, pool)
    assert opener.calls == 1
    assert [getattr(error, "errno", None) for error in found] == [errno.ENOENT] * THREADS
    (tmp_path / "chunk").write_bytes(b"contents")
    assert use(chunks, opener) == (1, b"contents")
