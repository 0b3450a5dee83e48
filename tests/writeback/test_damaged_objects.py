"""Objects that the tier has cut short, or lost: they are no whole files, and never reach the
source."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing

from monarch.errors import Refused
from monarch.writeback import journal_found
from monarch.writeback.objects import object_path
from tests.writeback.remounts import Rig, Session

# CLOCK_REALTIME_COARSE of Linux.
_COARSE_CLOCK = 5
# In the year 2100.
FUTURE_NS = 4_102_444_800 * 10**9
OLD, NEW = b"what the source had", b"what was written on the mount, and synced"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def number_of(session: Session, path: bytes) -> int:
    node = session.names.node(session.ino(path))
    assert node is not None and node.object
    return node.object


def cut(rig: Rig, number: int, *, restored: bool) -> None:
    """Cuts an object short. With ``restored`` it keeps its time, as in a backup."""
    path = object_path(rig.directory, number)
    before = path.stat()
    # In another tick of the clock that file systems use.
    while time.clock_gettime_ns(_COARSE_CLOCK) <= before.st_ctime_ns:
        time.sleep(0.001)
    os.truncate(path, 5)
    if restored:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.fault("T19")
@pytest.mark.promise(73)
@pytest.mark.parametrize(
    ("is_ended", "is_restored"), [(True, True), (True, False), (False, True)], ids=str
)
async def test_a_synced_object_that_is_shorter_by_now_is_lost_and_never_published(
    rig: Rig, clock: trio.testing.MockClock, is_ended: bool, is_restored: bool
) -> None:
    (rig.source / "f").write_bytes(OLD)
    async with rig.mount(works=False) as session:
        await session.write(b"f", NEW, synced=True)
        await session.write(b"other", NEW, synced=True)
        number = number_of(session, b"f")
        if is_ended:
            await session.end(abandoned=True)
        else:
            session.kill()
    cut(rig, number, restored=is_restored)
    async with rig.mount() as session:
        place = session.write_back.place
        assert [op.path for op in place.found.lost] == [b"f"]
        assert [(it.path, it.size) for it in place.doubtful.list()] == [(b"f", 5)]
        assert session.shown()[b"f"].content == OLD
        await session.drained()
        await session.end()
    assert (rig.source / "f").read_bytes() == OLD
    assert (rig.source / "other").read_bytes() == NEW


@pytest.mark.fault("T19")
@pytest.mark.promise(73)
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "short"])
async def test_a_drained_object_that_is_damaged_is_read_from_the_source(
    rig: Rig, clock: trio.testing.MockClock, is_missing: bool
) -> None:
    async with rig.mount() as session:
        await session.write(b"f", NEW, synced=True)
        await session.drained()
        number = number_of(session, b"f")
        await session.end()
    if is_missing:
        object_path(rig.directory, number).unlink()
    else:
        cut(rig, number, restored=False)
    async with rig.mount(freshness="never") as session:
        assert not session.write_back.place.found.lost
        shown = session.shown()[b"f"]
        assert (shown.content, shown.safety, shown.object) == (NEW, "source", 0)
        await session.drained()
        await session.end()
    assert (rig.source / "f").read_bytes() == NEW


MTIME_NS, TICK_NS = 1_700_000_000_000_000_000, 4_000_000


@pytest.mark.promise(73)
@pytest.mark.parametrize(
    ("mtime_ns", "ctime_ns", "is_synced", "is_older"),
    [
        (MTIME_NS, MTIME_NS, True, True),
        (MTIME_NS, MTIME_NS, False, False),
        (MTIME_NS + TICK_NS, MTIME_NS + TICK_NS, True, True),
        (MTIME_NS, MTIME_NS + 10**9, True, False),
        (MTIME_NS - TICK_NS, MTIME_NS + 10**9, True, False),
    ],
    ids=["same tick", "not synced", "before the record", "restored", "older backup"],
)
def test_a_file_truncated_within_a_tick_of_its_record_has_lost_no_bytes(
    mtime_ns: int, ctime_ns: int, is_synced: bool, is_older: bool
) -> None:
    """As a database truncates its log right after a sync. The record has the exact time."""
    recorded_ns = MTIME_NS + TICK_NS + 1_000_000
    version = journal_found._Version(100, MTIME_NS, recorded_ns, synced=is_synced)
    times = {"st_mtime_ns": mtime_ns, "st_ctime_ns": ctime_ns}
    status = cast(os.stat_result, SimpleNamespace(**times))
    assert version.is_older(status) is is_older


async def test_a_file_truncated_after_a_clean_end_and_before_a_kill_keeps_its_length(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount(works=False) as session:
        await session.write(b"f", NEW, synced=True)
        await session.end(abandoned=True)
    async with rig.mount(works=False) as session:
        ino = await session.open(b"f", os.O_WRONLY)
        await trio.to_thread.run_sync(os.ftruncate, session.front.opens.files[ino].place.fd, 5)
        session.kill()
    async with rig.mount() as session:
        assert not session.write_back.place.found.lost
        await session.drained()
        await session.end()
    assert (rig.source / "f").read_bytes() == NEW[:5]


@pytest.mark.promise(67, 73)
@pytest.mark.parametrize("is_set_before", [True, False], ids=["before its record", "after it"])
async def test_a_file_with_a_time_in_the_future_that_is_truncated_keeps_its_length(
    rig: Rig, clock: trio.testing.MockClock, is_set_before: bool
) -> None:
    (rig.source / "f").write_bytes(OLD)
    async with rig.mount(works=False) as session:
        ino = await session.open(b"f")
        await session.files.write(ino, 0, NEW)
        if is_set_before:
            await session.utime(b"f", FUTURE_NS)
        session.files.release(ino)
        if not is_set_before:
            await session.utime(b"f", FUTURE_NS)
        ino = await session.open(b"f")
        await trio.to_thread.run_sync(os.ftruncate, session.front.opens.files[ino].place.fd, 5)
        session.kill()
    async with rig.mount() as session:
        assert not session.write_back.place.found.lost
        await session.drained()
        await session.end()
    assert (rig.source / "f").read_bytes() == NEW[:5]


def replace(rig: Rig, number: int, kind: str) -> None:
    path = object_path(rig.directory, number)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()


KINDS = pytest.mark.parametrize("kind", ["fifo", "directory", "nothing"])


async def content_of(session: Session, path: bytes) -> bytes:
    ino = await session.open(path, os.O_RDONLY)
    try:
        return await session.files.read(ino, 0, 100)
    finally:
        session.files.release(ino)


@pytest.mark.fault("T20")
@pytest.mark.promise(73)
@KINDS
async def test_a_renamed_file_that_the_tier_has_lost_is_read_from_the_source(
    rig: Rig, clock: trio.testing.MockClock, kind: str
) -> None:
    (rig.source / "f").write_bytes(OLD)
    async with rig.mount(works=False) as session:
        await session.rename(b"f", b"g")
        number = number_of(session, b"g")
        session.kill()
    replace(rig, number, kind)
    async with rig.mount(works=False) as session:
        # The source has the file by its former name.
        assert await content_of(session, b"g") == OLD
    async with rig.mount() as session:
        await session.drained()
        assert await content_of(session, b"g") == OLD
        node = session.names.node(session.ino(b"g"))
        assert node is not None and not node.object
        await session.write(b"g", NEW)
        await session.drained()
        assert not session.write_back.drain.backlog().lost
        await session.end()
    assert not (rig.source / "f").exists()
    assert (rig.source / "g").read_bytes() == NEW


@pytest.mark.fault("T20")
@pytest.mark.promise(73)
@KINDS
@pytest.mark.parametrize("call", ["append", "utime", "chmod"])
async def test_a_drained_file_whose_object_is_lost_while_it_is_mounted_can_be_changed(
    rig: Rig, clock: trio.testing.MockClock, kind: str, call: str
) -> None:
    async with rig.mount() as session:
        await session.write(b"f", NEW, synced=True)
        await session.drained()
        replace(rig, number_of(session, b"f"), kind)
        if call == "append":
            ino = await session.open(b"f", os.O_WRONLY)
            await session.files.write(ino, len(NEW), b"more")
            session.files.release(ino)
        elif call == "utime":
            await session.utime(b"f", MTIME_NS)
        else:
            await session.chmod(b"f", 0o600)
        await session.drained()
        expected = NEW + b"more" if call == "append" else NEW
        assert await content_of(session, b"f") == expected
        assert not session.write_back.drain.backlog().lost
        await session.end()
    status = (rig.source / "f").stat()
    assert (rig.source / "f").read_bytes() == expected
    assert call != "utime" or status.st_mtime_ns == MTIME_NS
    assert call != "chmod" or status.st_mode & 0o777 == 0o600


@pytest.mark.fault("T20")
@pytest.mark.promise(73)
@KINDS
async def test_a_file_whose_bytes_neither_the_tier_nor_the_source_has_cannot_be_opened(
    rig: Rig, clock: trio.testing.MockClock, kind: str
) -> None:
    (rig.source / "f").write_bytes(OLD)
    async with rig.mount(works=False) as session:
        await session.write(b"f", NEW, synced=True)
        replace(rig, number_of(session, b"f"), kind)
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with pytest.raises(Refused) as refused:
                await session.open(b"f", flags)
            assert refused.value.errno == errno.EIO
    assert (rig.source / "f").read_bytes() == OLD


@pytest.mark.promise(64)
@pytest.mark.parametrize("is_in_source", [False, True], ids=str)
async def test_lost_bytes_are_not_called_durable(rig: Rig, is_in_source: bool) -> None:
    if is_in_source:
        (rig.source / "f").write_bytes(OLD)
    async with rig.mount(works=False) as session:
        await session.write(b"f", NEW, synced=True)
        number = number_of(session, b"f")
    object_path(rig.directory, number).unlink()
    async with rig.mount() as session:
        await session.drained()
        assert session.write_back.drain.backlog().lost == (b"f",)
        node = session.names.node(session.ino(b"f"))
        assert node is not None and node.object
        assert session.front.drained.durable(node) == b"none"
