"""What a written file takes of the daemon's memory once it is drained, and once it is removed."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.namespace import written
from monarch.vfs import room
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
    side, names = life.side, life.names
    owners = (side.stock, side.drain, side.place.journal, side.files, side.place.objects)
    listings = sum(map(len, names._listings.values()))
    gc.collect()
    nodes = sum(type(it) is written.Node for it in gc.get_objects())
    return tables(*owners, names, names._known) + listings + nodes


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setattr(room, "_MOST_DRAINED", 0)
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
        assert life.names.put_away_count > FILES - 3
        assert life.names.held_bytes < FEW * written.NAME_BYTES + 64 * FILES
        # Who has it open has what the names have.
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
        ground.monkeypatch.setattr(written, "_KEPT", names_kept)
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
async def test_what_is_removed_gives_its_memory_back(ground: Ground, clock: Clock) -> None:
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
        life.files.forget_nameless()
        await at_rest(life)
        assert in_memory(life) < FEW
        spill = life.names._spill
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
            assert life.names.put_away_count == 0
        assert len(life.shown()) == FILES + 1
        await trio.sleep(120)
        assert life.names.put_away_count > FILES - 3
        assert len(life.shown()) == FILES + 1
