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
from monarch.writeback.open_file import FileBytes, ObjectBytes
from tests.writeback.remounts import ROOT, Ground, Life

SET_NS = 1_300_000_000 * 10**9 + 7

Meanwhile = Callable[[Life, Ino], Awaitable[None]]

pytestmark = [pytest.mark.promise(62), pytest.mark.promise(158)]


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


async def closed(life: Life, ino: Ino) -> None:
    """The last close, of which the kernel tells after the program has set the times."""
    life.front.attributes.of(ino)
    life.files.release(ino)


async def reopened(life: Life, ino: Ino) -> None:
    life.files.release(ino)
    await life.files.open(life.names.copy_up(ino))
    life.front.attributes.of(ino)
    life.files.release(ino)


async def looked_at(life: Life, ino: Ino) -> None:
    await life.files.open(life.names.copy_up(ino))
    life.front.attributes.of(ino)
    life.files.release(ino)


async def let_go(life: Life, ino: Ino) -> None:
    number = life.names.copy_up(ino).object
    life.front.drained.release_oldest(1 << 30)
    assert not life.names.copy_up(ino).object
    with suppress(OSError), trio.fail_after(10_000):
        while life.front.objects.on_disk.status(number):
            await trio.sleep(0.1)


@pytest.mark.parametrize(
    ("is_open", "meanwhile"),
    [(True, closed), (True, reopened), (False, looked_at), (False, let_go)],
    ids=["closed", "reopened", "looked_at", "let_go"],
)
async def test_the_times_that_were_set_are_shown_whatever_is_done_while_they_are_set(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, is_open: bool, meanwhile: Meanwhile
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(function: Callable[..., None]) -> Callable[..., None]:
        def called(*args: Any) -> None:
            reached.set()
            assert go_on.wait(60)
            function(*args)

        return called

    async with ground.mount() as life:
        made = await life.writing.create(*life.at(b"new"), mode=0o644, by=ROOT)
        await life.files.write(made.ino, 0, b"bytes")
        if not is_open:
            life.files.release(made.ino)
            await life.drained()
        # As those of a file are set whose bytes are at the source.
        monkeypatch.setattr(ObjectBytes, "set_times", FileBytes.set_times)
        monkeypatch.setattr(open_file, "set_times", slow(open_file.set_times))
        monkeypatch.setattr(open_files, "_set_times_of", slow(open_files._set_times_of))

        async def set_times() -> None:
            await life.front.attributes.change(made.ino, by=ROOT, atime_ns=SET_NS, mtime_ns=SET_NS)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_times)
            while not reached.is_set():
                await trio.sleep(0)
            try:
                await meanwhile(life, made.ino)
            finally:
                go_on.set()
        assert not life.files.is_open(made.ino)
        assert life.front.attributes.of(made.ino).mtime_ns == SET_NS
        await life.drained()
        assert life.front.attributes.of(made.ino).mtime_ns == SET_NS
    assert (ground.source / "new").stat().st_mtime_ns == SET_NS
    async with ground.mount() as life:
        assert life.front.attributes.of(life.ino(b"new")).mtime_ns == SET_NS


@pytest.mark.parametrize("is_open", [True, False])
async def test_times_that_the_disk_refuses_are_not_shown(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, os.strerror(5))

    async with ground.mount() as life:
        made = await life.writing.create(*life.at(b"new"), mode=0o644, by=ROOT)
        if not is_open:
            life.files.release(made.ino)
        before = life.front.attributes.of(made.ino)
        with monkeypatch.context() as context:
            context.setattr(os, "utime", refuse)
            with pytest.raises(Refused):
                await life.front.attributes.change(made.ino, by=ROOT, mtime_ns=SET_NS)
        assert life.front.attributes.of(made.ino) == before
        assert life.front.objects.failures == 1


async def test_a_file_is_unpacked_with_four_records_and_without_a_hop(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    hops = 0
    run = ThreadPool.run

    async def counted(threads: ThreadPool, *args: Any) -> Any:
        nonlocal hops
        hops += 1
        return await run(threads, *args)

    async with ground.mount(works=False) as life:
        change, journal = life.front.attributes.change, life.write_back.place.journal
        await life.write(b"first", b"makes spares")
        await ground.come_to_rest()
        before = journal.file.written
        with monkeypatch.context() as context:
            context.setattr(ThreadPool, "run", counted)
            made = await life.writing.create(*life.at(b"new"), mode=0o600, by=ROOT)
            # What tar does, to a user's own file.
            await change(made.ino, by=ROOT, mtime_ns=SET_NS)
            await change(made.ino, by=ROOT, uid=ROOT.uid, gid=ROOT.gid)
            await change(made.ino, by=ROOT, mode=0o640)
            life.files.release(made.ino)
        assert journal.file.written - before == 4, "creation, times, mode and content"
        assert hops == 0
        life.kill()
    async with ground.mount() as life:
        again = life.front.attributes.of(life.ino(b"new"))
        assert (again.mode & 0o7777, again.mtime_ns) == (0o640, SET_NS)
        await life.drained()
    there = (ground.source / "new").stat()
    assert (there.st_mode & 0o7777, there.st_mtime_ns) == (0o640, SET_NS)


@pytest.mark.parametrize("what", ["mode", "owner", "set_id", "closed"])
async def test_attributes_that_change_or_that_no_content_contains_are_recorded(
    ground: Ground, what: str
) -> None:
    async with ground.mount(works=False) as life:
        change, journal = life.front.attributes.change, life.write_back.place.journal
        mode = 0o4755 if what == "set_id" else 0o644
        made = await life.writing.create(*life.at(b"new"), mode=mode, by=ROOT)
        if what == "closed":
            life.files.release(made.ino)
        before = journal.file.written
        await change(
            made.ino,
            by=ROOT,
            mode=0o640 if what == "mode" else None,
            uid=ROOT.uid + (what == "owner"),
        )
        assert journal.file.written == before + 1
        if what == "set_id":
            assert life.front.attributes.of(made.ino).mode & 0o7777 == 0o755
