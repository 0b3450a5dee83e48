"""The daemon's memory for a written file after it is drained, and after it is removed."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3
import stat
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.daemon.write_status import LossAlarm, WriteStatus
from monarch.errors import Refused, Unanswered
from monarch.namespace import overlay
from monarch.telemetry.health import Problem
from monarch.types import Ino
from monarch.writeback import write_gate
from tests.equipment.slowfs import SlowSource
from tests.equipment.virtual_clock import until
from tests.writeback.remounts import Rig, Session

Clock = trio.testing.MockClock
FILES = 240
# What may be left whatever is written: a few directories, and what was used last.
FEW = 40
# The most memory that the tables of the names in a directory may keep of a drained file, in bytes.
BYTES_A_FILE = 8


def tables(session: Session) -> list[Any]:
    """All tables of everything that is kept of written files."""
    write_back, front, names = session.write_back, session.front, session.names
    drain, others = write_back.drain, write_back.others
    owners = (
        *(front.object_table, front.object_table.states, front.object_table.attributes),
        *(drain, drain.queue, drain.queue.pending, drain.state, drain.state.entries),
        *(drain.progress, drain._order, drain._steps, drain._marks, drain._marks.unsynced),
        write_back.place.journal,
        *(front.opens, front.objects, front.recorder, front.unlinked),
        *(front.drained, front.source, front.failures, front.files),
        *(write_back.place.objects, others, names),
        *(names._known, names._overlay, names._listings),
    )
    kinds = (dict, set, list, frozenset, bytearray, deque)
    return [it for each in owners if each for it in vars(each).values() if isinstance(it, kinds)]


def in_memory(session: Session) -> int:
    """How many entries everything has that is kept of written files."""
    listings = sum(map(len, session.names._listings._listings.values()))
    gc.collect()
    nodes = sum(type(it) is overlay.Node for it in gc.get_objects())
    return sum(map(len, tables(session))) + listings + nodes


def bytes_of_names(session: Session) -> list[int]:
    """The memory of the tables of the names in each directory, in bytes."""
    return [
        sum(map(sys.getsizeof, (listing._added, listing._order, listing.changed)))
        for listing in session.names._listings._listings.values()
    ]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(write_gate, "_MOST_DRAINED", 0)
    return Rig(tmp_path, monkeypatch)


@asynccontextmanager
async def mounted(rig: Rig, **more: Any) -> AsyncIterator[Session]:
    async with rig.mount(**more) as session:
        yield session
        await session.end()


async def at_rest(session: Session) -> None:
    """All is drained, and what may leave memory has left it."""
    await session.drained()
    await trio.sleep(10)
    await session.drained()
    await trio.sleep(10)


async def write_all(session: Session) -> None:
    for index in range(FILES):
        await session.write(b"d/%d" % index, b"%d" % index)


@pytest.mark.finding("W24")
@pytest.mark.promise(131)
async def test_files_that_are_drained_take_no_memory_and_are_as_they_were(
    rig: Rig, clock: Clock
) -> None:
    async with mounted(rig) as session:
        await session.mkdir(b"d")
        await session.write(b"d/kept", b"open")
        kept = await session.open(b"d/kept")
        held = session.names.node(kept)
        await write_all(session)
        inos = [session.ino(b"d/%d" % index) for index in range(FILES)]
        await session.link(b"d/0", b"linked")
        await session.symlink(b"link", b"d/0")
        await at_rest(session)
        assert in_memory(session) < FEW
        assert max(bytes_of_names(session)) < BYTES_A_FILE * FILES
        assert session.names._overlay.spilled > FILES - 3
        assert session.names.held_bytes < FEW * overlay.NAME_BYTES + 64 * FILES
        # A process that has it open sees the same inode as the names.
        assert session.names.node(kept) is held
        session.files.release(kept)

        shown = session.shown()
        assert {path for path in shown if path.startswith(b"d/")} == {
            b"d/kept",
            *(b"d/%d" % index for index in range(FILES)),
        }
        for index, ino in enumerate(inos):
            path = b"d/%d" % index
            assert session.ino(path) == ino
            assert shown[path].content == b"%d" % index and shown[path].safety == "source"
            status = (rig.source / f"d/{index}").stat()
            attributes = session.names.attributes(ino)
            assert attributes.mtime_ns == status.st_mtime_ns
            assert attributes.identity.source_ino == status.st_ino
            assert attributes.nlink == status.st_nlink
        assert session.ino(b"linked") == inos[0] and shown[b"link"].target == b"d/0"

        # They can be changed as before.
        await session.write(b"d/1", b"again", synced=True)
        await session.rename(b"d/2", b"d/renamed")
        await session.rename(b"d/3", b"d/4")
        session.unlink(b"d/5")
        await session.chmod(b"d/6", 0o600)
        await at_rest(session)
        assert in_memory(session) < FEW

    for names_kept in (2, 8192):
        rig.monkeypatch.setattr(overlay, "_KEPT", names_kept)
        async with mounted(rig, freshness="never") as session:
            shown = session.shown()
            assert shown[b"d/1"].content == b"again"
            assert shown[b"d/renamed"].content == b"2" and b"d/2" not in shown
            assert shown[b"d/4"].content == b"3" and b"d/3" not in shown
            assert b"d/5" not in shown and stat.S_IMODE(shown[b"d/6"].mode) == 0o600
            assert len(shown) == FILES + 2
            await at_rest(session)
            assert names_kept > FEW or in_memory(session) < FEW
    assert not [name for name in os.listdir(rig.state) if name.startswith("names")]


@pytest.mark.promise(131)
async def test_removed_files_release_their_memory(rig: Rig, clock: Clock) -> None:
    async with mounted(rig) as session:
        await session.mkdir(b"d")
        for _ in range(3):
            await write_all(session)
            await session.symlink(b"d/link", b"there")
            await at_rest(session)
            for index in range(FILES):
                session.unlink(b"d/%d" % index)
            session.unlink(b"d/link")
            await trio.sleep(5)
            await at_rest(session)
        session.front.unlinked.forget_all()
        await at_rest(session)
        assert in_memory(session) < FEW
        spill = session.names._overlay._spill
        assert spill is not None
        for table in ("node", "name"):
            (rows,) = spill._tables.execute(f"select count(*) from {table}").fetchone()
            assert rows < 5


@pytest.mark.promise(131)
async def test_names_stay_in_memory_when_there_is_no_room_for_them_elsewhere(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with mounted(rig) as session:
        await session.mkdir(b"d")
        with monkeypatch.context() as patched:
            patched.setattr("monarch.namespace.spill.Spill.move", full)
            await write_all(session)
            await at_rest(session)
            assert session.names._overlay.spilled == 0
        assert len(session.shown()) == FILES + 1
        await trio.sleep(120)
        await until(lambda: session.names._overlay.spilled > FILES - 3)
        assert len(session.shown()) == FILES + 1


def dropped(spill: Any) -> None:
    """Nothing that was moved to the file is in memory, neither sqlite's nor the kernel's."""
    spill._near = {}
    spill._tables.execute("pragma shrink_memory")
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "/slow/" in os.readlink(f"/proc/self/fd/{fd}"):
                os.posix_fadvise(int(fd), 0, 0, os.POSIX_FADV_DONTNEED)


def found_at_once(session: Session, directory: Ino, name: bytes) -> bool:
    try:
        return session.names.lookup(directory, name) is not None
    except Unanswered:
        return False


@pytest.mark.promise(132)
@pytest.mark.fault("T14")
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_names_on_a_disk_that_hangs_hold_up_only_what_needs_them(
    rig: Rig, clock: Clock, tmp_path: Path, operation: str
) -> None:
    (tmp_path / "backing").mkdir()
    lifted = threading.Event()
    with SlowSource(tmp_path / "backing", tmp_path / "slow") as slow:

        def lift() -> None:
            lifted.set()
            slow.rules()

        async with mounted(rig) as session:
            session.names._overlay._spill_at = slow.path / "names"
            for directory in (b"d", b"e", b"e/d"):
                await session.mkdir(directory)
            await write_all(session)
            await session.write(b"e/d/gone", b"soon")
            await at_rest(session)
            spill, put_away = session.names._overlay._spill, session.names._overlay.spilled
            assert spill is not None and put_away > FILES
            kept = await session.open(b"e/d/kept")
            inside, d = session.ino(b"e/d"), session.ino(b"d")
            session.names.copy_up(inside)
            dropped(spill)
            slow.rules(f"hang {operation} .*")
            timer = threading.Timer(20.0, lift)
            timer.start()
            if operation == "write":
                session.unlink(b"e/d/gone")
            await trio.sleep(30)
            assert not all(found_at_once(session, d, b"%d" % index) for index in range(FILES))
            # What is in memory does not wait, and what is written is not lost.
            assert session.names.lookup(inside, b"kept") == kept
            assert session.names.attributes(kept).is_file
            await session.files.write(kept, 0, b"written")
            with suppress(Unanswered):
                session.files.release(kept)
            await trio.sleep(30)
            assert not lifted.is_set()
            timer.cancel()
            slow.rules()
            with trio.move_on_after(3600):
                await session.names.answers()
            assert len(session.shown()) == FILES + 4 + (operation == "read")
            await trio.sleep(120)
            await until(lambda: session.names._overlay.spilled >= put_away - 1)
            for _ in range(2):
                shown = session.shown()
                assert all(shown[b"d/%d" % it].content == b"%d" % it for it in range(FILES))
                assert (b"e/d/gone" in shown) == (operation == "read")
                dropped(spill)
            assert shown[b"e/d/kept"].safety == "source"
        assert (rig.source / "e/d/kept").read_bytes() == b"written"


@pytest.mark.promise(131)
async def test_names_that_cannot_be_read_are_an_error_that_says_what_to_do(
    rig: Rig, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(rig) as session:
        await session.mkdir(b"d")
        await write_all(session)
        await at_rest(session)
        spill, directory = session.names._overlay._spill, session.ino(b"d")
        assert spill is not None
        tables = spill._tables
        spill._tables = sqlite3.connect(":memory:", check_same_thread=False)
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                session.names.lookup(directory, b"7")
            assert refused.value.errno == errno.EIO
        assert caplog.text.count("unmount and mount again") == 1
        spill._tables = tables
        assert session.shown()[b"d/7"].content == b"7"


def damage(session: Session, *, whole: bool) -> None:
    """Overwrite the file with the moved names, as a failing disk would."""
    spill: Any = session.names._overlay._spill
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{session.rig.state}/names."):
                found.append(f"/proc/self/fd/{fd}")
    [path] = found
    with open(path, "r+b") as file:
        content = file.read()
        if whole:
            content = content[:100] + bytes(len(content) - 100)
        else:
            content = content.replace(b"user.kept", b"user.KEPT")
        file.seek(0)
        file.write(content)
    spill._near = {}
    # sqlite reads a page anew that was not read since another wrote.
    spill._tables.execute("pragma shrink_memory")


@pytest.mark.promise(175)
@pytest.mark.fault("T15")
@pytest.mark.parametrize("whole", [True, False])
async def test_a_damaged_file_of_names_is_a_problem_of_its_own_and_the_next_mount_has_all(
    rig: Rig, clock: Clock, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    async with rig.mount() as session:
        await session.mkdir(b"d")
        await write_all(session)
        for index in range(FILES):
            await session.setxattr(b"d/%d" % index, b"user.kept", b"%d" % index)
        await at_rest(session)
        assert problems(session) == []
        kept = await session.open(b"kept")
        await unlinked_out_of_memory(session)
        damage(session, whole=whole)
        readable, refused = 0, 0
        for index in range(FILES):
            try:
                node = session.names.node(session.ino(b"d/%d" % index))
            except Refused as error:
                refused += error.errno == errno.EIO
            else:
                assert node is not None and node.xattrs == {b"user.kept": b"%d" % index}
                readable += 1
        assert refused > FILES / 2 and readable + refused == FILES
        # Names in memory stay usable.
        await session.files.write(kept, 0, b"written")
        session.files.release(kept)
        await trio.sleep(200)
        [problem] = problems(session)
        assert problem.kind == "names-unreadable" and os.fspath(rig.state) in problem.what
        assert "cannot be read from the state directory" in caplog.text
        await session.end(abandoned=True)
    async with mounted(rig, freshness="never") as session:
        shown = session.shown()
        assert all(shown[b"d/%d" % index].content == b"%d" % index for index in range(FILES))
        await session.drained()
    assert (rig.source / "kept").read_bytes() == b"written"


async def unlinked_out_of_memory(session: Session) -> None:
    """Have a file without a name that is not in memory when it is to be forgotten.

    The drain may hold its inode in memory for the second in which that file is kept.
    """
    for attempt in range(50):
        name = b"gone %d" % attempt
        await session.write(name, b"soon")
        gone = session.ino(name)
        session.unlink(name)
        for index in range(8):
            session.names.node(session.ino(b"d/%d" % index))
        await trio.sleep(0.6)
        if gone in session.front.unlinked._since and gone not in session.names._overlay._nodes:
            return
    pytest.fail("no file without a name leaves memory")


def problems(session: Session) -> list[Problem]:
    loss_alarm = LossAlarm(session.rig.state)
    return list(WriteStatus(session.rig.settings(), session.write_back, loss_alarm).problems())
