"""The daemon's memory for a written file after it is drained, and after it is removed."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3
import stat
import threading
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
from tests.writeback.remounts import Ground, Life

Clock = trio.testing.MockClock
FILES = 240
# What may be left whatever is written: a few directories, and what was used last.
FEW = 40


def tables(*of: object) -> int:
    """How many entries all tables of some objects have."""
    kinds = (dict, set, list, frozenset)
    return sum(len(it) for each in of for it in vars(each).values() if isinstance(it, kinds))


def in_memory(life: Life) -> int:
    """How many entries everything has that is kept of written files."""
    write_back, front, names = life.write_back, life.front, life.names
    owners = (
        write_back.front.object_table,
        write_back.front.object_table.states,
        write_back.drain,
        write_back.place.journal,
        *(front.opens, front.objects, front.recorder, front.unlinked),
        *(front.drained, front.source, front.failures, front.files),
        write_back.place.objects,
    )
    listings = sum(map(len, names._listings._listings.values()))
    gc.collect()
    nodes = sum(type(it) is overlay.Node for it in gc.get_objects())
    return tables(*owners, names, names._known, names._overlay, names._listings) + listings + nodes


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setattr(write_gate, "_MOST_DRAINED", 0)
    return Ground(tmp_path, monkeypatch)


@asynccontextmanager
async def mounted(ground: Ground, **more: Any) -> AsyncIterator[Life]:
    async with ground.mount(**more) as life:
        yield life
        await life.end()


async def at_rest(life: Life) -> None:
    """All is drained, and what may leave memory has left it."""
    await life.drained()
    await trio.sleep(10)
    await life.drained()
    await trio.sleep(10)


async def write_all(life: Life) -> None:
    for index in range(FILES):
        await life.write(b"d/%d" % index, b"%d" % index)


@pytest.mark.finding("W24")
@pytest.mark.promise(131)
async def test_files_that_are_drained_take_no_memory_and_are_as_they_were(
    ground: Ground, clock: Clock
) -> None:
    async with mounted(ground) as life:
        await life.mkdir(b"d")
        await life.write(b"d/kept", b"open")
        kept = await life.open(b"d/kept")
        held = life.names.node(kept)
        await write_all(life)
        inos = [life.ino(b"d/%d" % index) for index in range(FILES)]
        await life.link(b"d/0", b"linked")
        await life.symlink(b"link", b"d/0")
        await at_rest(life)
        assert in_memory(life) < FEW
        assert life.names._overlay.spilled > FILES - 3
        assert life.names.held_bytes < FEW * overlay.NAME_BYTES + 64 * FILES
        # A process that has it open sees the same inode as the names.
        assert life.names.node(kept) is held
        life.files.release(kept)

        shown = life.shown()
        assert {path for path in shown if path.startswith(b"d/")} == {
            b"d/kept",
            *(b"d/%d" % index for index in range(FILES)),
        }
        for index, ino in enumerate(inos):
            path = b"d/%d" % index
            assert life.ino(path) == ino
            assert shown[path].content == b"%d" % index and shown[path].safety == "source"
            status = (ground.source / f"d/{index}").stat()
            attributes = life.names.attributes(ino)
            assert attributes.mtime_ns == status.st_mtime_ns
            assert attributes.identity.source_ino == status.st_ino
            assert attributes.nlink == status.st_nlink
        assert life.ino(b"linked") == inos[0] and shown[b"link"].target == b"d/0"

        # They can be changed as before.
        await life.write(b"d/1", b"again", synced=True)
        await life.rename(b"d/2", b"d/renamed")
        await life.rename(b"d/3", b"d/4")
        life.unlink(b"d/5")
        await life.chmod(b"d/6", 0o600)
        await at_rest(life)
        assert in_memory(life) < FEW

    for names_kept in (2, 8192):
        ground.monkeypatch.setattr(overlay, "_KEPT", names_kept)
        async with mounted(ground, freshness="never") as life:
            shown = life.shown()
            assert shown[b"d/1"].content == b"again"
            assert shown[b"d/renamed"].content == b"2" and b"d/2" not in shown
            assert shown[b"d/4"].content == b"3" and b"d/3" not in shown
            assert b"d/5" not in shown and stat.S_IMODE(shown[b"d/6"].mode) == 0o600
            assert len(shown) == FILES + 2
            await at_rest(life)
            assert names_kept > FEW or in_memory(life) < FEW
    assert not [name for name in os.listdir(ground.state) if name.startswith("names")]


@pytest.mark.promise(131)
async def test_removed_files_release_their_memory(ground: Ground, clock: Clock) -> None:
    async with mounted(ground) as life:
        await life.mkdir(b"d")
        for _ in range(3):
            await write_all(life)
            await life.symlink(b"d/link", b"there")
            await at_rest(life)
            for index in range(FILES):
                life.unlink(b"d/%d" % index)
            life.unlink(b"d/link")
            await trio.sleep(5)
            await at_rest(life)
        life.front.unlinked.forget_all()
        await at_rest(life)
        assert in_memory(life) < FEW
        spill = life.names._overlay._spill
        assert spill is not None
        for table in ("node", "name"):
            (rows,) = spill._tables.execute(f"select count(*) from {table}").fetchone()
            assert rows < 5


@pytest.mark.promise(131)
async def test_names_stay_in_memory_when_there_is_no_room_for_them_elsewhere(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with mounted(ground) as life:
        await life.mkdir(b"d")
        with monkeypatch.context() as patched:
            patched.setattr("monarch.namespace.spill.Spill.move", full)
            await write_all(life)
            await at_rest(life)
            assert life.names._overlay.spilled == 0
        assert len(life.shown()) == FILES + 1
        await trio.sleep(120)
        assert life.names._overlay.spilled > FILES - 3
        assert len(life.shown()) == FILES + 1


def dropped(spill: Any) -> None:
    """Nothing that was moved to the file is in memory, neither sqlite's nor the kernel's."""
    spill._near = {}
    spill._tables.execute("pragma shrink_memory")
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "/slow/" in os.readlink(f"/proc/self/fd/{fd}"):
                os.posix_fadvise(int(fd), 0, 0, os.POSIX_FADV_DONTNEED)


def found_at_once(life: Life, directory: Ino, name: bytes) -> bool:
    try:
        return life.names.lookup(directory, name) is not None
    except Unanswered:
        return False


@pytest.mark.promise(132)
@pytest.mark.fault("T14")
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_names_on_a_disk_that_hangs_hold_up_only_what_needs_them(
    ground: Ground, clock: Clock, tmp_path: Path, operation: str
) -> None:
    (tmp_path / "backing").mkdir()
    lifted = threading.Event()
    with SlowSource(tmp_path / "backing", tmp_path / "slow") as slow:

        def lift() -> None:
            lifted.set()
            slow.rules()

        async with mounted(ground) as life:
            life.names._overlay._spill_at = slow.path / "names"
            for directory in (b"d", b"e", b"e/d"):
                await life.mkdir(directory)
            await write_all(life)
            await life.write(b"e/d/gone", b"soon")
            await at_rest(life)
            spill, put_away = life.names._overlay._spill, life.names._overlay.spilled
            assert spill is not None and put_away > FILES
            kept = await life.open(b"e/d/kept")
            inside, d = life.ino(b"e/d"), life.ino(b"d")
            life.names.copy_up(inside)
            dropped(spill)
            slow.rules(f"hang {operation} .*")
            timer = threading.Timer(20.0, lift)
            timer.start()
            if operation == "write":
                life.unlink(b"e/d/gone")
            await trio.sleep(30)
            assert not all(found_at_once(life, d, b"%d" % index) for index in range(FILES))
            # What is in memory does not wait, and what is written is not lost.
            assert life.names.lookup(inside, b"kept") == kept
            assert life.names.attributes(kept).is_file
            await life.files.write(kept, 0, b"written")
            with suppress(Unanswered):
                life.files.release(kept)
            await trio.sleep(30)
            assert not lifted.is_set()
            timer.cancel()
            slow.rules()
            with trio.move_on_after(3600):
                await life.names.answers()
            assert len(life.shown()) == FILES + 4 + (operation == "read")
            await trio.sleep(120)
            assert life.names._overlay.spilled >= put_away - 1
            for _ in range(2):
                shown = life.shown()
                assert all(shown[b"d/%d" % it].content == b"%d" % it for it in range(FILES))
                assert (b"e/d/gone" in shown) == (operation == "read")
                dropped(spill)
            assert shown[b"e/d/kept"].safety == "source"
        assert (ground.source / "e/d/kept").read_bytes() == b"written"


@pytest.mark.promise(131)
async def test_names_that_cannot_be_read_are_an_error_that_says_what_to_do(
    ground: Ground, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(ground) as life:
        await life.mkdir(b"d")
        await write_all(life)
        await at_rest(life)
        spill, directory = life.names._overlay._spill, life.ino(b"d")
        assert spill is not None
        tables = spill._tables
        spill._tables = sqlite3.connect(":memory:", check_same_thread=False)
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                life.names.lookup(directory, b"7")
            assert refused.value.errno == errno.EIO
        assert caplog.text.count("unmount and mount again") == 1
        spill._tables = tables
        assert life.shown()[b"d/7"].content == b"7"


def damage(life: Life, *, whole: bool) -> None:
    """Overwrite the file with the moved names, as a failing disk would."""
    spill: Any = life.names._overlay._spill
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{life.ground.state}/names."):
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
    ground: Ground, clock: Clock, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    async with ground.mount() as life:
        await life.mkdir(b"d")
        await write_all(life)
        for index in range(FILES):
            await life.setxattr(b"d/%d" % index, b"user.kept", b"%d" % index)
        await at_rest(life)
        assert problems(life) == []
        kept = await life.open(b"kept")
        await unlinked_out_of_memory(life)
        damage(life, whole=whole)
        readable, refused = 0, 0
        for index in range(FILES):
            try:
                node = life.names.node(life.ino(b"d/%d" % index))
            except Refused as error:
                refused += error.errno == errno.EIO
            else:
                assert node is not None and node.xattrs == {b"user.kept": b"%d" % index}
                readable += 1
        assert refused > FILES / 2 and readable + refused == FILES
        # Names in memory stay usable.
        await life.files.write(kept, 0, b"written")
        life.files.release(kept)
        await trio.sleep(200)
        [problem] = problems(life)
        assert problem.kind == "names-unreadable" and os.fspath(ground.state) in problem.what
        assert "cannot be read from the state directory" in caplog.text
        await life.end(abandoned=True)
    async with mounted(ground, freshness="never") as life:
        shown = life.shown()
        assert all(shown[b"d/%d" % index].content == b"%d" % index for index in range(FILES))
        await life.drained()
    assert (ground.source / "kept").read_bytes() == b"written"


async def unlinked_out_of_memory(life: Life) -> None:
    """Have a file without a name that is not in memory when it is to be forgotten.

    The drain may hold its inode in memory for the second in which that file is kept.
    """
    for attempt in range(50):
        name = b"gone %d" % attempt
        await life.write(name, b"soon")
        gone = life.ino(name)
        life.unlink(name)
        for index in range(8):
            life.names.node(life.ino(b"d/%d" % index))
        await trio.sleep(0.6)
        if gone in life.front.unlinked._since and gone not in life.names._overlay._nodes:
            return
    pytest.fail("no file without a name leaves memory")


def problems(life: Life) -> list[Problem]:
    loss_alarm = LossAlarm(life.ground.state)
    return list(WriteStatus(life.ground.settings(), life.write_back, loss_alarm).problems())
