"""Times that are set while the file is being checked, closed, opened or released."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.errors import Refused
from monarch.posix.thread_pool import ThreadPool
from monarch.types import Ino
from monarch.writeback import open_file, open_files
from monarch.writeback.mover import Mover
from monarch.writeback.open_file import FileBytes, ObjectBytes
from tests.writeback.remounts import ROOT, Rig, Session

SET_NS = 1_300_000_000 * 10**9 + 7

Meanwhile = Callable[[Session, Ino], Awaitable[None]]

pytestmark = [pytest.mark.promise(62), pytest.mark.promise(158)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


async def closed(session: Session, ino: Ino) -> None:
    """The last close, of which the kernel tells after the program has set the times."""
    session.front.attributes.of(ino)
    session.files.release(ino)


async def reopened(session: Session, ino: Ino) -> None:
    session.files.release(ino)
    await session.files.open(session.names.copy_up(ino))
    session.front.attributes.of(ino)
    session.files.release(ino)


async def looked_at(session: Session, ino: Ino) -> None:
    await session.files.open(session.names.copy_up(ino))
    session.front.attributes.of(ino)
    session.files.release(ino)


async def let_go(session: Session, ino: Ino) -> None:
    number = session.names.copy_up(ino).object
    session.front.drained.release_oldest(1 << 30)
    assert not session.names.copy_up(ino).object
    with suppress(OSError), trio.fail_after(10_000):
        while session.front.objects.on_disk.status(number):
            await trio.sleep(0.1)


@pytest.mark.parametrize(
    ("is_open", "meanwhile"),
    [(True, closed), (True, reopened), (False, looked_at), (False, let_go)],
    ids=["closed", "reopened", "looked_at", "let_go"],
)
async def test_the_times_that_were_set_are_shown_whatever_is_done_while_they_are_set(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_open: bool, meanwhile: Meanwhile
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(function: Callable[..., None]) -> Callable[..., None]:
        def called(*args: Any) -> None:
            reached.set()
            assert go_on.wait(60)
            function(*args)

        return called

    async with rig.mount() as session:
        made = await session.writing.create(*session.at(b"new"), mode=0o644, by=ROOT)
        await session.files.write(made.ino, 0, b"bytes")
        if not is_open:
            session.files.release(made.ino)
            await session.drained()
        # As those of a file are set whose bytes are at the source.
        monkeypatch.setattr(ObjectBytes, "set_times", FileBytes.set_times)
        monkeypatch.setattr(open_file, "set_times", slow(open_file.set_times))
        monkeypatch.setattr(open_files, "_set_times_of", slow(open_files._set_times_of))

        async def set_times() -> None:
            await session.front.attributes.change(
                made.ino, by=ROOT, atime_ns=SET_NS, mtime_ns=SET_NS
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_times)
            while not reached.is_set():
                await trio.sleep(0)
            try:
                await meanwhile(session, made.ino)
            finally:
                go_on.set()
        assert not session.files.is_open(made.ino)
        assert session.front.attributes.of(made.ino).mtime_ns == SET_NS
        await session.drained()
        assert session.front.attributes.of(made.ino).mtime_ns == SET_NS
    assert (rig.source / "new").stat().st_mtime_ns == SET_NS
    async with rig.mount() as session:
        assert session.front.attributes.of(session.ino(b"new")).mtime_ns == SET_NS


@pytest.mark.parametrize("is_open", [True, False])
async def test_times_that_the_disk_refuses_are_not_shown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, os.strerror(5))

    async with rig.mount() as session:
        made = await session.writing.create(*session.at(b"new"), mode=0o644, by=ROOT)
        if not is_open:
            session.files.release(made.ino)
        before = session.front.attributes.of(made.ino)
        with monkeypatch.context() as context:
            context.setattr(os, "utime", refuse)
            with pytest.raises(Refused):
                await session.front.attributes.change(made.ino, by=ROOT, mtime_ns=SET_NS)
        assert session.front.attributes.of(made.ino) == before
        assert session.front.objects.failures == 1


async def test_a_file_is_unpacked_with_four_records_and_without_a_hop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hops = 0
    run = ThreadPool.run

    async def counted(threads: ThreadPool, *args: Any) -> Any:
        nonlocal hops
        hops += 1
        return await run(threads, *args)

    async with rig.mount(works=False) as session:
        change, journal = session.front.attributes.change, session.write_back.place.journal
        await session.write(b"first", b"makes spares")
        await rig.come_to_rest()
        before = journal.file.written
        with monkeypatch.context() as context:
            context.setattr(ThreadPool, "run", counted)
            made = await session.writing.create(*session.at(b"new"), mode=0o600, by=ROOT)
            # What tar does, to a user's own file.
            await change(made.ino, by=ROOT, mtime_ns=SET_NS)
            await change(made.ino, by=ROOT, uid=ROOT.uid, gid=ROOT.gid)
            await change(made.ino, by=ROOT, mode=0o640)
            session.files.release(made.ino)
        assert journal.file.written - before == 4, "creation, times, mode and content"
        assert hops == 0
        session.kill()
    async with rig.mount() as session:
        again = session.front.attributes.of(session.ino(b"new"))
        assert (again.mode & 0o7777, again.mtime_ns) == (0o640, SET_NS)
        await session.drained()
    there = (rig.source / "new").stat()
    assert (there.st_mode & 0o7777, there.st_mtime_ns) == (0o640, SET_NS)


@pytest.mark.parametrize("what", ["mode", "owner", "set_id", "closed"])
async def test_attributes_that_change_or_that_no_content_contains_are_recorded(
    rig: Rig, what: str
) -> None:
    async with rig.mount(works=False) as session:
        change, journal = session.front.attributes.change, session.write_back.place.journal
        mode = 0o4755 if what == "set_id" else 0o644
        made = await session.writing.create(*session.at(b"new"), mode=mode, by=ROOT)
        if what == "closed":
            session.files.release(made.ino)
        before = journal.file.written
        await change(
            made.ino,
            by=ROOT,
            mode=0o640 if what == "mode" else None,
            uid=ROOT.uid + (what == "owner"),
        )
        assert journal.file.written == before + 1
        if what == "set_id":
            assert session.front.attributes.of(made.ino).mode & 0o7777 == 0o755


@pytest.mark.promise(64)
async def test_a_closed_file_whose_times_are_set_during_each_copy_reaches_the_source(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.mount() as session:
        move, count = Mover.move, 0

        async def moved(mover: Mover, *args: Any) -> None:
            nonlocal count
            await move(mover, *args)
            count += 1
            if count <= 20:
                # As a job does that shows by the time of a file that it lives.
                await session.utime(b"alive", SET_NS + count)

        monkeypatch.setattr(Mover, "move", moved)
        await session.write(b"alive", b"bytes")
        await session.utime(b"alive", SET_NS)
        await session.drained()
        # The times that were set meanwhile, too.
        await session.at_rest()
        node = session.names.node(session.ino(b"alive"))
        assert node is not None
        assert session.front.drained.durable(node) == b"source"
        assert (rig.source / "alive").read_bytes() == b"bytes"
        assert (rig.source / "alive").stat().st_mtime_ns == SET_NS + count


@pytest.mark.promise(122)
async def test_a_file_that_is_dated_beyond_2262_is_changed_without_a_conflict(rig: Rig) -> None:
    for name in ("written", "moved", "removed", "closed"):
        (rig.source / name).write_bytes(b"old")
        os.utime(rig.source / name, ns=(0, 10_413_792_000_000_000_001))
    async with rig.mount() as session:
        await session.write(b"written", b"new")
        await session.rename(b"moved", b"to")
        session.unlink(b"removed")
        await session.chmod(b"closed", 0o400)
        await session.utime(b"closed", SET_NS)
        await session.drained()
        assert session.write_back.drain.writer.log.conflict_count == 0
    assert {path.name: path.read_bytes() for path in rig.source.iterdir() if path.is_file()} == {
        "written": b"new",
        "to": b"old",
        "closed": b"old",
    }
    assert (rig.source / "closed").stat().st_mtime_ns == SET_NS
