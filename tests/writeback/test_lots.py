"""Small files that are drained together: few hops to a thread, few waits for disks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import trio.testing

from monarch.posix.thread_pool import ThreadPool
from monarch.writeback import staging
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.stager import StageAhead
from tests.writeback.rig import Model, draining

Clock = trio.testing.MockClock
COUNT = 120


class Calls:
    """What was done, in order: ``hop``, ``hurry`` and ``sync`` of files that are staged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.threads: list[tuple[int, str]] = []
        run, hurry, fsync = ThreadPool.run, staging.start_writeback, os.fsync

        async def counted(threads: ThreadPool, *args: Any) -> Any:
            self.made.append("hop")
            return await run(threads, *args)

        def hurried(fd: int) -> None:
            self.made.append("hurry")
            self.threads.append((threading.get_ident(), "hurry"))
            hurry(fd)

        def synced(fd: int) -> None:
            if b".part" in os.readlink(b"/proc/self/fd/%d" % fd):
                self.made.append("sync")
                self.threads.append((threading.get_ident(), "sync"))
            fsync(fd)

        monkeypatch.setattr(ThreadPool, "run", counted)
        monkeypatch.setattr(staging, "start_writeback", hurried)
        monkeypatch.setattr(os, "fsync", synced)

    def by_thread(self) -> list[list[tuple[int, str]]]:
        """What each thread did to staged files, in order."""
        idents = {ident for ident, _ in self.threads}
        return [[each for each in self.threads if each[0] == ident] for ident in idents]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def write_all(model: Model, *, synced: bool = False) -> None:
    for number in range(COUNT):
        model.write(b"new%d" % number, b"%d" % number * 999, synced=synced)


@pytest.mark.finding("W24")
@pytest.mark.fault("T12")
@pytest.mark.parametrize("synced", [False, True])
async def test_many_small_files_take_few_hops_and_all_of_them_come(
    model: Model, clock: Clock, calls: Calls, synced: bool
) -> None:
    write_all(model, synced=synced)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
        backlog = drain.backlog()
    model.check_all_is_there()
    assert (backlog.ops, backlog.drained_files, backlog.failures) == (0, COUNT, 0)
    assert calls.made.count("hop") < COUNT / 2, "not several for each file"
    assert calls.made.count("sync") == COUNT, "each is on the disk before it gets its name"


def unpack(model: Model, path: bytes, content: bytes, mtime_ns: int) -> None:
    """Make a file as tar does, which sets its attributes before it closes the file."""
    model.create(path, mode=0o600)
    node = model.begin(path)
    model.store(node, content)
    model.utime(path, mtime_ns)
    model.chmod(path, 0o640)
    model.end(node)


@pytest.mark.parametrize("killed", [False, True])
async def test_unpacked_files_are_drained_in_lots_too(
    model: Model, clock: Clock, calls: Calls, killed: bool
) -> None:
    for number in range(COUNT):
        unpack(model, b"new%d" % number, b"%d" % number * 99, 10**9 + number)
    replay = model.kill()
    turns = 0
    if killed:
        # The records of an earlier mount are read again.
        replay = model.kill()
    carry_out = SourceWriter.carry_out

    def counted(writer: SourceWriter, steps: Any) -> Any:
        nonlocal turns
        turns += 1
        return carry_out(writer, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SourceWriter, "carry_out", counted)
        async with draining(model, replay) as drain:
            await drain.progress.wait(model.last_seq)
    model.check_all_is_there()
    assert calls.made.count("hop") < COUNT / 2, "not several for each file"
    assert turns < COUNT / 8, "one turn publishes many files"


async def test_the_disk_has_the_bytes_of_many_files_before_it_is_waited_for(
    model: Model, clock: Clock, calls: Calls
) -> None:
    write_all(model, synced=True)
    async with draining(model, model.kill(), workers=1) as drain:
        await drain.progress.wait(model.last_seq)
    # Of each thread: a file may be brought in its turn beside a lot.
    done = ["".join(what[0] for _, what in each) for each in calls.by_thread()]
    assert any("h" * 32 + "s" * 32 in what for what in done), "no wait in between"


@pytest.mark.fault("T12")
async def test_a_lot_continues_without_contents_whose_object_is_gone_or_was_written_again(
    model: Model, clock: Clock, calls: Calls
) -> None:
    write_all(model, synced=True)
    replay = model.kill()
    gone, written = model.tree[b"new7"], model.tree[b"new9"]
    model.objects.remove(gone.object)
    model.store(written, b"newer, and not recorded")
    async with draining(model, replay, catch_up=False) as drain:
        await drain.progress.settle()
        backlog = drain.backlog()
    assert backlog.lost == (b"new7",)
    names = {path.name for path in model.source.glob("new*")}
    assert names == {f"new{number}" for number in range(COUNT)} - {"new7"}
    assert (model.source / "new9").read_bytes() == written.content


@pytest.mark.fault("T12")
async def test_a_file_written_while_its_lot_is_staged_keeps_its_time(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(model, synced=True)
    replay, written = model.kill(), model.tree[b"new9"]
    apply = staging.Staging.apply_attributes

    def stored(it: staging.Staging, *args: Any, **more: Any) -> None:
        apply(it, *args, **more)
        if it._number == written.object and written.content != b"newer":
            model.store(written, b"newer")

    monkeypatch.setattr(staging.Staging, "apply_attributes", stored)
    async with draining(model, replay, catch_up=False) as drain:
        await drain.progress.settle()
    there = (model.source / "new9").stat()
    assert there.st_mtime_ns == model.objects.status(written.object).st_mtime_ns
    assert (model.source / "new9").read_bytes() == b"newer"


async def test_a_content_that_cannot_be_staged_in_advance_is_staged_in_its_turn(
    model: Model, clock: Clock, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    write_all(model)
    # Not a directory: no file of it can be staged before the source is as before.
    model.mkdir(b"later")
    for number in range(COUNT):
        model.write(b"later/%d" % number, b"x" * number)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_a_writer_of_many_files_wakes_no_worker_while_the_drain_is_held(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = StageAhead.next_lots

    def counted(ahead: StageAhead) -> Any:
        nonlocal looks
        looks += 1
        return look(ahead)

    monkeypatch.setattr(StageAhead, "next_lots", counted)
    async with draining(model, workers=4, hold_s=1000) as drain:
        model.write(b"first", b"1")
        await trio.testing.wait_all_tasks_blocked()
        before = looks
        for number in range(100):
            model.write(b"new%d" % number, b"content")
            await trio.testing.wait_all_tasks_blocked()
        # As the queue begins.
        assert looks - before <= 4
        await drain.progress.settle()
    assert len([*model.source.glob("new*")]) == 100


async def test_a_process_that_writes_many_files_does_not_cause_a_search_for_each(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = 0
    search = StageAhead.next_lots

    def counted(ahead: StageAhead) -> Any:
        nonlocal searches
        searches += 1
        return search(ahead)

    monkeypatch.setattr(StageAhead, "next_lots", counted)
    async with draining(model, workers=4) as drain:
        await trio.testing.wait_all_tasks_blocked()
        before = searches
        for number in range(200):
            model.write(b"new%d" % number, b"content")
            await trio.lowlevel.checkpoint()
        assert searches - before <= 5
        await drain.progress.settle()
    assert len([*model.source.glob("new*")]) == 200
