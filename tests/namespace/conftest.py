"""Snapshots of real directories, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from monarch.namespace import scan
from monarch.namespace.build import build
from monarch.namespace.snapshot import Snapshot

Taken = Callable[[Path], Snapshot]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the snapshot of a test lies, in a directory of its own."""
    directory = tmp_path / "snapshots"
    directory.mkdir()
    return directory / "snapshot"


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Taken]:
    """Builds a snapshot and opens it."""
    with ExitStack() as stack:
        count = 0

        def take(source: Path) -> Snapshot:
            nonlocal count
            count += 1
            target = tmp_path / f"taken-{count}.snapshot"
            build(source, target)
            return stack.enter_context(Snapshot.open(target))

        yield take


@pytest.fixture(params=["alone", "threads"])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test twice: scanning alone, and with threads from the first piece of work on."""
    kind: str = request.param
    if kind == "threads":
        monkeypatch.setattr(scan, "_SLICE_FIRST", 2)
        monkeypatch.setattr(scan, "_is_waiting", lambda mean, done: True)
    return kind
