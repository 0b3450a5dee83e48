"""Threads that work for one thread: their order and number, and their end after an exception."""

from __future__ import annotations

import _thread
import concurrent.futures._base
import concurrent.futures.thread
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from monarch.namespace import refresh, scan
from monarch.namespace.build import build as build_snapshot
from monarch.namespace.compare import verify as verify_snapshot
from monarch.namespace.snapshot import Snapshot
from monarch.packs.verify import verify as verify_pack
from monarch.posix import workers as workers_module
from monarch.posix.files import closing_fd
from monarch.posix.workers import Threads, Workers
from tests.equipment.interrupts import Interrupted, interrupted_in_each_line, raised_in_line
from tests.equipment.waiting import wait_until
from tests.packs.trees import pack

LOCKS = (workers_module, threading, concurrent.futures._base, concurrent.futures.thread)


def test_the_results_of_a_map_are_in_the_order_of_its_items() -> None:
    with Workers[int](3) as workers:
        assert list(workers.map(abs, range(-50, 50))) == [abs(n) for n in range(-50, 50)]
        assert workers.pending == 0


def test_as_many_calls_as_allowed_run_at_once() -> None:
    together = threading.Barrier(3, timeout=60)
    running: list[int] = []
    most: list[int] = []

    def call() -> None:
        running.append(1)
        most.append(len(running))
        together.wait()
        running.pop()
        together.wait()

    with Workers[None](3) as workers:
        for _ in range(9):
            workers.put(call)
        for _ in range(9):
            workers.take()
    assert max(most) == 3


@pytest.mark.parametrize("allowed", [0, 2])
def test_threads_that_the_machine_refuses_are_done_without(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    start, asked = _thread.start_new_thread, 0

    def refuse(*arguments: Any) -> int:
        nonlocal asked
        asked += 1
        if asked > allowed:
            raise RuntimeError("can't start new thread")
        return start(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    with Workers[int](8) as workers:
        if not allowed:
            with pytest.raises(RuntimeError):
                workers.put(abs, 1)
            return
        assert list(workers.map(abs, range(-50, 50))) == [abs(n) for n in range(-50, 50)]
    # It was not asked again.
    assert asked == allowed + 1


def test_a_call_that_fails_raises_and_those_that_have_not_begun_are_dropped() -> None:
    made: list[int] = []

    def call(number: int) -> int:
        made.append(number)
        return 1 // number

    with Workers[int](1) as workers:
        with pytest.raises(ZeroDivisionError):
            list(workers.map(call, (1, 0, 1)))
    # The thread may have begun the next call.
    assert made[:2] == [1, 0] and len(made) <= 3
    begun, blocked = threading.Lock(), threading.Lock()
    begun.acquire()
    made.clear()

    def block() -> int:
        begun.release()
        with blocked:
            return 0

    with blocked, Workers[int](1, wait_s=0.0) as workers:
        workers.put(block)
        workers.put(call, 1)
        begun.acquire()
    wait_until(lambda: workers._threads.wait(0.0), "the thread ends")
    assert made == []


def test_an_exception_at_the_end_lets_no_further_call_begin() -> None:
    made: list[int] = []
    begun, blocked = threading.Lock(), threading.Lock()
    begun.acquire()

    def block() -> None:
        begun.release()
        with blocked:
            pass

    workers = Workers[None](1)
    workers.put(block)
    workers.put(made.append, 1)
    with blocked:
        begun.acquire()
        with raised_in_line(1, (workers_module,)), pytest.raises(Interrupted):
            workers.__exit__()
    wait_until(lambda: workers._threads.wait(0.0), "the thread ends")
    assert made == []


def test_a_call_that_does_not_end_is_waited_for_as_long_as_allowed() -> None:
    blocked = threading.Lock()
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()
    ended: list[None] = []

    def call() -> None:
        begun.put(None)
        with blocked:
            ended.append(None)

    with blocked:
        with Workers[None](1, wait_s=0.01) as workers:
            workers.put(call)
            # One that has not begun at the end is dropped.
            begun.get(timeout=60)
            with pytest.raises(queue.Empty):
                workers.take(0.01)
        assert not ended
    wait_until(lambda: len(ended) == 1, "the call ends")


def test_threads_that_have_begun_are_waited_for() -> None:
    threads, blocked = Threads(), threading.Lock()
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work() -> None:
        begun.put(None)
        with blocked:
            pass

    with blocked:
        threads.start(work)
        begun.get(timeout=60)
        assert not threads.wait(0.01)
    assert threads.wait()
    assert threads.count == 1


# -- exceptions of signal handlers -----------------------------------------------------------------


Call = Callable[[Path], object]


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the small tree ``tree``, its ``snapshot`` and its ``pack``. Every directory
    is a task of its own."""
    for number in range(6):
        (tmp_path / f"tree/{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"tree/{number % 3}/{number}").write_bytes(b"content %d" % number)
    build_snapshot(tmp_path / "tree", tmp_path / "snapshot")
    pack(tmp_path / "tree", tmp_path / "pack", chunk=20)
    monkeypatch.setattr(refresh, "_BATCH", 1)
    monkeypatch.setattr(scan, "_SLICE_FIRST", 2)
    monkeypatch.setattr(scan, "_is_waiting", lambda mean, done: True)
    return tmp_path


def make_pack(top: Path) -> object:
    with TemporaryDirectory(dir=top) as directory:
        report = pack(top / "tree", Path(directory) / "pack", chunk=20)
    return report.pack and report.pack.files


def check_pack(top: Path) -> object:
    report = verify_pack(top / "pack", jobs=3, progress=lambda done, total, words: None)
    return report.files, report.damage


def check_sample(top: Path) -> object:
    with Snapshot.open(top / "snapshot") as snapshot:
        return verify_snapshot(top / "tree", snapshot, sample=4, jobs=3)


def look_for_changes(top: Path) -> object:
    with Snapshot.open(top / "snapshot") as snapshot:
        return refresh.directories_changed(top / "tree", snapshot, jobs=3, patience_s=600)


def scan_tree(top: Path) -> object:
    with closing_fd(os.open(top / "tree", os.O_RDONLY)) as root, scan.Scan(root, jobs=3) as scanned:
        return sum(len(batch.names) for batch in scanned.batches())


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (make_pack, 6),
        (check_pack, (6, [])),
        (check_sample, []),
        (look_for_changes, False),
        (scan_tree, 10),
    ],
)
def test_an_exception_in_any_line_leaves_no_lock_that_a_thread_waits_for(
    top: Path, call: Call, expected: object
) -> None:
    result, interrupted = interrupted_in_each_line(lambda: call(top), *LOCKS)
    assert result == expected
    assert interrupted > 10
