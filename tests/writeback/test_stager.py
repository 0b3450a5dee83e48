"""Contents that are staged, alone and in lots, while processes write their objects."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.posix.thread_pool import ThreadPool
from monarch.transfer.pace import TokenBucket
from monarch.types import Identity
from monarch.writeback import staging
from monarch.writeback.content_order import ContentOrder
from monarch.writeback.drain_queue import DrainQueue
from monarch.writeback.journal import Journal
from monarch.writeback.mover import Courtesy, Mover
from monarch.writeback.objects import Objects, object_path
from monarch.writeback.op import Op
from monarch.writeback.progress import Marks
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState
from monarch.writeback.stager import Stager
from monarch.writeback.steps import Steps
from monarch.writeback.wakeups import Wakeups
from tests.writeback.files_in_use import FilesInUse
from tests.writeback.remounts import Rig
from tests.writeback.test_damaged_objects import FUTURE_NS


class Stage:
    """Objects of contents, and a directory of staged files. ``meanwhile`` runs for each object when
    its bytes are there, before its attributes are."""

    def __init__(self, root: Path) -> None:
        self.root, self.files, self.state = root, FilesInUse(), SourceState()
        self.meanwhile: Callable[[int], None] = lambda number: None
        self.trouble: OSError | None = None
        wakeups, threads = Wakeups(), ThreadPool(1, "stage", abandon=False)
        journal = Journal.open(root / "absorbed", source=b"/source", boot="boot")
        self.objects = Objects(root / "absorbed")
        self.queue = DrainQueue(wakeups, lambda seqs: None, lambda entry: False)
        self.order = ContentOrder(self.state, self.files)
        bucket = TokenBucket(0, 0)
        courtesy = Courtesy(wakeups, bucket, lambda now: False, lambda: False, 0.0)
        self.stager = Stager(
            self.objects,
            self.files,
            threads,
            self.queue,
            self.state,
            self.order,
            cast(Steps, self),
            Marks(journal, threads, self.state),
            Mover(threads, courtesy, verify=True),
            wakeups,
        )

    # How a content is staged.
    def opening(self, entry: Entry, *, make: bool) -> Callable[[], tuple[int, None]]:
        entry.place = Place()

        def opened() -> tuple[int, None]:
            if self.trouble is not None:
                raise self.trouble
            return os.open(self.part(entry.op.object), os.O_RDWR | os.O_CREAT | os.O_TRUNC), None

        return opened

    def applying(self, entry: Entry, staged: Identity) -> Callable[[int], None]:
        return lambda fd: self.meanwhile(entry.op.object)

    def part(self, number: int) -> Path:
        return self.root / f"{number}.part"

    def write(self, number: int, content: bytes) -> Identity:
        """A process writes an object, with a new time of modification."""
        is_new = number not in self.objects.numbers()
        fd = self.objects.create(number) if is_new else self.objects.open(number)
        try:
            os.pwrite(fd, content, 0)
            os.utime(fd, ns=(10**18 + number, 10**18 + len(content)))
            status = os.fstat(fd)
            return Identity(status.st_size, status.st_mtime_ns, 0, 0)
        finally:
            os.close(fd)

    def put(self, number: int, content: bytes, *, synced: bool = True) -> Entry:
        version = self.write(number, content)
        op = Op(
            kind="content",
            path=b"%d" % number,
            paths=(b"%d" % number,),
            object=number,
            size=version.size,
            mtime_ns=version.mtime_ns,
            synced=synced,
        )
        entry = Entry(self.queue.last_seq + 1, op, 0, 0, was_tried=False)
        self.queue.append(entry)
        self.order.expect(entry.seq, op)
        return entry


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for entry in stage.queue.entries():
        stage.stager.forget(entry)
    assert stage.stager.count == 0


async def test_a_lot_is_staged_but_for_what_is_written_meanwhile(stage: Stage) -> None:
    lot = [stage.put(number, b"old") for number in range(1, 5)]
    stage.meanwhile = lambda number: cast(Any, number == 3 and stage.write(3, b"newer"))
    await stage.stager.stage_lot(lot)
    assert [entry.staged is not None for entry in lot] == [True, True, False, True]
    assert all(entry.was_ahead and not entry.is_staging for entry in lot)
    assert stage.stager.count == 3
    assert stage.part(1).read_bytes() == b"old"


async def test_a_content_that_the_source_has_is_not_staged_again(stage: Stage) -> None:
    entry = stage.put(1, b"one")
    await stage.stager.stage(entry, in_turn=False)
    assert entry.staged is not None
    stage.state.note_version(1, entry.staged)
    stage.stager.forget(entry)
    assert not entry.is_ready
    await stage.stager.stage(entry, in_turn=True)
    assert (entry.published, entry.staged) == (True, None)
    stage.stager.forget(entry)
    await stage.stager.stage_lot([entry, stage.put(2, b"two")])
    assert entry.published


async def test_a_failure_counts_in_the_turn_of_a_content_only(stage: Stage) -> None:
    entry = stage.put(1, b"one")
    stage.trouble = PermissionError(errno.EACCES, "")
    await stage.stager.stage(entry, in_turn=False)
    assert (entry.was_ahead, entry.is_ready) == (True, False)
    with pytest.raises(PermissionError):
        await stage.stager.stage(entry, in_turn=True)
    assert not entry.is_staging


async def test_bytes_that_the_tier_has_lost_are_reported_in_their_turn(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    entry = stage.put(1, b"one")
    stage.objects.remove(1)
    await stage.stager.stage(entry, in_turn=False)
    assert stage.order.lost == {}
    await stage.stager.stage(entry, in_turn=True)
    assert stage.order.lost == {1: b"1"}
    assert (entry.skipped, "'1' is lost" in caplog.text) == (True, True)


@pytest.mark.promise(68)
async def test_a_file_that_is_truncated_while_its_object_is_opened_is_not_lost(
    stage: Stage, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = stage.put(1, b"0123456789")
    recorded_ns = entry.op.mtime_ns or 0
    opened = Objects.open

    def truncated(self: Objects, number: int) -> int:
        fd = opened(self, number)
        stage.files.written.add(number)
        stage.files.lowest_of[number] = 4
        os.ftruncate(fd, 4)
        # Within one tick of the clock the time of modification stays the same.
        os.utime(fd, ns=(recorded_ns, recorded_ns))
        return fd

    monkeypatch.setattr(Objects, "open", truncated)
    await stage.stager.stage(entry, in_turn=True)
    assert stage.order.lost == {}
    # The close of the file records another content.
    assert (entry.skipped, stage.files.skipped) == (True, [1])


@pytest.mark.promise(73)
async def test_a_truncated_object_with_a_time_in_the_future_is_not_lost(stage: Stage) -> None:
    entry = stage.put(1, b"0123456789")
    path = object_path(stage.root / "absorbed", 1)
    os.utime(path, ns=(FUTURE_NS, FUTURE_NS))
    entry.op = replace(entry.op, mtime_ns=FUTURE_NS)
    entry.recorded_ns = time.time_ns()
    os.truncate(path, 4)
    await stage.stager.stage(entry, in_turn=True)
    assert (stage.order.lost, stage.part(1).read_bytes()) == ({}, b"0123")


async def test_a_file_that_is_written_all_the_time_is_left_to_its_close(
    stage: Stage, clock: trio.testing.MockClock
) -> None:
    entry = stage.put(1, b"one")
    stage.files.written.add(1)
    stage.write(1, b"more")
    stage.files.lowest_of[1] = 0
    await stage.stager.stage(entry, in_turn=True)
    assert (entry.skipped, stage.files.skipped) == (True, [1])
    # No other change waited behind it.
    assert trio.current_time() == pytest.approx(2, abs=0.2)


async def test_of_a_file_that_is_appended_to_the_recorded_bytes_are_staged(stage: Stage) -> None:
    entry = stage.put(1, b"one")
    stage.files.written.add(1)
    stage.write(1, b"one more")
    stage.files.lowest_of[1] = 3
    await stage.stager.stage(entry, in_turn=True)
    assert entry.staged is not None
    assert (entry.staged.size, stage.part(1).read_bytes()) == (3, b"one")


@pytest.mark.promise(81)
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("files", [1, 4])
async def test_a_content_without_room_at_the_source_takes_none_there_until_the_next_try(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    number: int,
    files: int,
) -> None:
    def half(fd: int, piece: bytes, offset: int) -> None:
        os.pwrite(fd, piece[: len(piece) // 2], offset)
        raise OSError(number, os.strerror(number))

    rig = Rig(tmp_path, monkeypatch)
    async with rig.mount() as session:
        with monkeypatch.context() as patched:
            patched.setattr(staging, "_write", half)
            for index in range(files):
                await session.write(b"%d" % index, b"bytes" * 1000, synced=True)
            drain = session.write_back.drain
            await rig.come_to_rest()
            while not drain.backlog().failures or any(
                entry.is_staging for entry in drain.queue.entries()
            ):
                await trio.sleep(0.01)
                await rig.come_to_rest()
            # No try is under way, and the next one begins after a pause.
            parts = [it for it in rig.source.glob(".monarch-*.part") if it.is_file()]
            assert parts and not any(it.stat().st_size for it in parts)
        await session.drained()
        await session.end()
    assert (rig.source / "0").read_bytes() == b"bytes" * 1000
    assert not [it for it in rig.source.glob(".monarch-*.part") if it.is_file()]
