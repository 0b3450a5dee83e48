"""A full disk: necessary records are written, and calls that need room are refused."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from monarch.errors import Refused
from monarch.types import Identity
from monarch.writeback import journal_file, store
from monarch.writeback.journal import Journal, Op
from monarch.writeback.reserve import Reserve
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.store import snapshot_known
from tests.conftest import require_root
from tests.equipment import disks
from tests.equipment.disks import Disk
from tests.writeback.remounts import Rig, Session
from tests.writeback.test_journal import until_full

_MB = 1 << 20
BLOCK = 4096
BIG = Op(kind="xattr", path=b"a", xattrs={b"user.x": bytes(60_000)})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 24 MiB."""
    if reason := disks.unavailable():
        pytest.skip(reason)
    with Disk(tmp_path / "disk", size=24 * _MB).mounted(tmp_path / "tier") as mounted:
        (mounted.path / "absorbed").mkdir()
        yield mounted.path / "absorbed"


def fill(place: Path) -> Path:
    filler = place.parent / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (_MB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return filler


@pytest.mark.finding("W17")
@pytest.mark.promise(138)
def test_changes_that_take_room_are_refused_before_the_room_for_marks_is_used(place: Path) -> None:
    reserve = Reserve(place)
    reserve.make()
    held = (place / "reserve").stat().st_blocks * 512
    assert held >= 256 << 10
    journal = Journal.open(place, source=b"/source")
    journal.append(Op(kind="mkdir", path=b"a"))
    filler = fill(place)
    count = 1
    while journal.has_room():
        journal.append(BIG)
        count += 1
    assert count > 10 and (place / "reserve").exists()
    # As often as there are things to be marked: first what is kept for it, then the reserve.
    for seq in range(1, 1 + count):
        journal.mark_done({seq: None})
    removals = until_full(lambda: journal.append(Op(kind="unlink", path=b"x" * 4000)))
    assert removals * 4000 > held and not (place / "reserve").exists()
    journal.sync()
    assert not journal.has_room()
    filler.unlink()
    os.sync()
    assert journal.has_room()
    last = journal.append(BIG)
    journal.sync()
    reserve.make()
    assert (place / "reserve").stat().st_blocks * 512 == held
    journal.close()
    journal = Journal.open(place, source=b"/source")
    assert journal.replay().ops[-1] == (last, BIG)
    journal.close()


@pytest.mark.promise(138)
def test_contents_on_a_full_disk_leave_the_room_for_their_marks(place: Path) -> None:
    Reserve(place).make()
    journal = Journal.open(place, source=b"/source")
    fill(place)
    content = Op(kind="content", path=b"a", object=1, size=1, xattrs={b"user.x": bytes(10_000)})
    contents = [journal.append(content)]
    until_full(lambda: contents.append(journal.append(content)))
    assert len(contents) > 10 and not journal.takes_content()
    for seq in contents:
        journal.mark_staged((1, Identity(1, seq, 0, 7), 0))
        journal.mark_done({seq: Identity(1, seq, seq, 7)})
    # Only one of them matters now: the shorter journal gives back the room of the others.
    assert journal.is_long
    journal.shorten()
    assert journal.has_room() and journal.takes_content() and not journal.is_long
    journal.append(content)
    journal.sync()
    journal.close()


@pytest.mark.promise(138)
def test_a_journal_is_written_anew_on_a_full_disk(place: Path) -> None:
    Reserve(place).make()
    journal = Journal.open(place, source=b"/source")
    ops = [(journal.append(op), op) for op in [BIG, Op(kind="mkdir", path=b"a")]]
    fill(place)
    journal.compact(ops, position=journal.file.position)
    assert not (place / "reserve").exists()
    journal.close()
    journal = Journal.open(place, source=b"/source")
    assert list(journal.replay().ops) == ops
    journal.close()


def test_the_reserve_is_given_up_where_less_is_free_and_made_where_more_is(place: Path) -> None:
    reserve = Reserve(place)
    assert not reserve.give_up()
    reserve.make()
    assert not reserve.give_up_if_full()
    filler = fill(place)
    assert reserve.give_up_if_full()
    reserve.make()
    assert not (place / "reserve").exists()
    filler.unlink()
    os.sync()
    reserve.make()
    assert (place / "reserve").exists()


@pytest.mark.promise(138)
def test_the_reserve_is_given_up_where_a_quota_leaves_less(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system shows its free room, whatever the quota of the directory is."""
    reserve = Reserve(place)
    reserve.make()
    shown = os.statvfs(place)
    monkeypatch.setattr(os, "statvfs", lambda path: shown)
    assert not reserve.give_up_if_full()
    fill(place)
    assert reserve.give_up_if_full() and not (place / "reserve").exists()


def _refused(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.promise(138)
@pytest.mark.parametrize("slack", [200, 0])
async def test_a_journal_without_room_gets_that_of_drained_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, slack: int
) -> None:
    """Others have filled the disk while no mount held its reserve. ``slack``: the number of bytes
    that are free in the last block of the journal."""
    require_root()
    with disks.in_memory(tmp_path / "disk", 16) as disk:
        rig = Rig(tmp_path / "rig", monkeypatch, disk=disk)
        with monkeypatch.context() as patched:
            async with rig.mount() as session:
                await session.write(b"drained", bytes(_MB))
                await session.drained()
                patched.setattr(SourceWriter, "carry_out", _refused)
                for number in range(8):
                    await session.write(b"%d" % number, b"undrained %d" % number)
                # The descriptors of a killed daemon hold no room.
                session.front.objects.close_pending()
                await _fill_block(session, slack)
                shown = session.kill()
        _without_room(rig)
        async with rig.mount() as session:
            journal_file = session.write_back.place.journal.file
            assert -journal_file.position % BLOCK == slack
            assert not session.write_back.place.journal.has_room()
            with trio.fail_after(10_000):
                await session.drained()
                await session.end()
        assert {os.fsdecode(name) for name in shown} <= set(os.listdir(rig.source))
        assert (rig.source / "7").read_bytes() == b"undrained 7"


@pytest.mark.promise(138)
@pytest.mark.parametrize("undrained", ["nothing", "one file", "a long journal"])
async def test_a_full_tier_is_mounted_with_a_new_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, undrained: str
) -> None:
    """Without changes no journal is rewritten, which would give back the room of the old one. A
    long one is rewritten in the room that it has allocated ahead."""
    require_root()
    with disks.in_memory(tmp_path / "disk", 16) as disk:
        rig = Rig(tmp_path / "rig", monkeypatch, disk=disk)
        (rig.source / "a").write_bytes(b"of the source")
        async with rig.mount(works=False) as session:
            if undrained != "nothing":
                await session.write(b"undrained", b"bytes", synced=True)
            for number in range(60 if undrained == "a long journal" else 0):
                await session.mkdir(b"%0200d" % number)
            # The descriptors of a killed daemon hold no room.
            session.front.objects.close_pending()
        _without_room(rig, keeps_ahead=undrained == "a long journal")
        rig.lose_state()
        async with rig.mount() as session:
            assert snapshot_known(rig.directory) == session.names.snapshot.id
            with trio.fail_after(10_000):
                await session.drained()
                await session.end()
        assert undrained == "nothing" or (rig.source / "undrained").read_bytes() == b"bytes"


@pytest.mark.promise(138)
async def test_a_tier_at_its_quota_is_mounted_with_a_new_snapshot_and_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """Neither another directory nor another file fits, and what is freed is not given again."""
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"of the source")
    async with rig.mount(works=False) as session:
        await session.write(b"undrained", b"bytes", synced=True)
    rig.lose_state()
    make, replace = os.mkdir, store.replace_private

    def at_quota(path: Any, *arguments: Any, **more: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def made(path: Any, *arguments: Any, **more: Any) -> None:
        is_generation = str(path).startswith("copies-")
        (at_quota if is_generation else make)(path, *arguments, **more)

    snapshot = rig.directory / "snapshot"
    before = snapshot.stat()
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", made)
        patched.setattr(store, "replace_private", at_quota)
        async with rig.mount() as session:
            assert snapshot_known(rig.directory) == session.names.snapshot.id
            with trio.fail_after(10_000):
                await session.drained()
            await session.end()
        assert (rig.source / "undrained").read_bytes() == b"bytes"
        # It keeps its block.
        assert (snapshot.stat().st_ino, snapshot.stat().st_size) == (before.st_ino, before.st_size)
        store.know_snapshot(rig.directory, "")
        assert snapshot_known(rig.directory) == "" and snapshot.stat().st_size == before.st_size
    assert store.replace_private is replace


def _without_room(rig: Rig, *, keeps_ahead: bool = False) -> None:
    """Have others fill the tier's disk, also the room of the reserve and, without ``keeps_ahead``,
    that which the journal has allocated ahead."""
    journal = rig.directory / "journal"
    if not keeps_ahead:
        os.truncate(journal, journal.stat().st_size)
    (rig.directory / "reserve").unlink(missing_ok=True)
    rig.fill(is_full=True)


async def _fill_block(session: Session, slack: int) -> None:
    """Record changes until ``slack`` bytes are free in the last block of the journal."""
    file, name = session.write_back.place.journal.file, b"user.x"

    async def recorded(count: int) -> int:
        before = file.position
        await session.setxattr(b"0", name, bytes(3 * count))
        return file.position - before

    while left := -(file.position + slack) % BLOCK:
        # Three bytes of a value are four characters of the record.
        shortest = await recorded(1)
        left = -(file.position + slack) % BLOCK
        if left % 4 == shortest % 4 and left >= shortest:
            await recorded(1 + (left - shortest) // 4)
        else:
            name += b"x"


class QuotaReached:
    """The C library of a process whose quota is reached, which ``statvfs`` does not show."""

    def fallocate(self, *_: object) -> int:
        ctypes.set_errno(errno.EDQUOT)
        return -1


@pytest.mark.promise(138)
def test_a_quota_that_is_reached_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "absorbed", source=b"/source")
    Reserve(journal.file.path.parent).make()
    assert journal.has_room() and journal.takes_content()
    content = Op(kind="content", path=b"a", object=1, size=1, xattrs={b"user.x": bytes(10_000)})
    with monkeypatch.context() as patched:
        patched.setattr(journal_file, "_LIBC", QuotaReached())
        # Nothing is allocated ahead: what the reserve holds is all that may be left.
        journal.file.free_ahead()
        assert not journal.has_room()
        left = journal.file._left()
        assert 0 < left <= journal.file._reserve.held + BLOCK
        journal.file._reserve.give_up()
        assert not journal.takes_content() and not journal.takes_removal()
        with pytest.raises(OSError, match="No space"):
            journal.append(content)
        # A mark, and a change that the drain waits for, take the last room.
        journal.append(content, is_due=True)
    assert journal.has_room()
    journal.append(content)
    journal.close()


@pytest.mark.promise(138)
async def test_undrained_files_can_all_be_removed_from_a_full_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: trio.testing.MockClock
) -> None:
    """Each removal takes room of the journal, and gives more when the object leaves."""
    require_root()
    files = 1200
    with disks.in_memory(tmp_path / "disk", 16) as disk:
        rig = Rig(tmp_path / "rig", monkeypatch, disk=disk)
        async with rig.mount() as session:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _refused)
                await session.mkdir(b"d")
                for number in range(files):
                    await session.write(b"d/%0200d" % number, bytes(BLOCK))
                session.write_back.place.journal.file.free_ahead()
                rig.fill(is_full=True)
                for number in range(files):
                    await session.front.gate.require_room_to_remove()
                    session.unlink(b"d/%0200d" % number)
                    assert session.front.recorder.has_recorded_all
            with trio.fail_after(10_000):
                await session.drained()
                await session.end()
        assert _names(rig) == ["d"] and not os.listdir(rig.source / "d")


@pytest.mark.promise(138)
async def test_a_removal_without_room_fails_while_the_source_accepts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """It fails before the tree has changed, and the drain continues when the source is back."""
    require_root()
    files = 2000
    with disks.in_memory(tmp_path / "disk", 16) as disk:
        rig = Rig(tmp_path / "rig", monkeypatch, disk=disk)
        for number in range(files):
            (rig.source / f"{number:0100}").touch()
        async with rig.mount() as session:
            gate, removed = session.front.gate, 0

            async def remove_all() -> None:
                nonlocal removed
                while removed < files:
                    place = session.at(b"%0100d" % removed)
                    await session.writing.require_removable(*place, is_directory=False)
                    session.unlink(b"%0100d" % removed)
                    removed += 1

            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _refused)
                await session.write(b"waits", b"bytes")
                session.write_back.place.journal.file.free_ahead()
                rig.fill(is_full=True)
                with pytest.raises(Refused) as refused:
                    await remove_all()
            assert refused.value.errno == errno.ENOSPC and 0 < removed < files
            with pytest.raises(Refused) as refused:
                await session.writing.require_removable(*session.at(b"none"), is_directory=False)
            assert refused.value.errno == errno.ENOENT, "it waited for room first"
            assert len(session.shown()) == files - removed + 1
            with trio.fail_after(10_000):
                await session.drained()
                await gate.require_room_to_remove()
                await session.end()
        assert len(_names(rig)) == files - removed + 1


def _names(rig: Rig) -> list[str]:
    return [name for name in os.listdir(rig.source) if not name.startswith(".monarch-")]


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Path]:
    """A disk with a file system that writes changed bytes to new blocks."""
    if reason := disks.unavailable("btrfs"):
        pytest.skip(reason)
    with Disk(tmp_path / "disk", "btrfs", size=128 * _MB).mounted(tmp_path / "at") as disk:
        yield disk.path


@pytest.mark.promise(138)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_synced_marks_fit_on_a_full_disk_that_writes_to_new_blocks(
    copied: Path, is_replaced: bool
) -> None:
    """The last block of the journal is on the disk, and gets the next record."""
    (copied / "absorbed").mkdir()
    journal = Journal.open(copied / "absorbed", source=b"/source")
    ops = [(journal.append(op), op) for op in [Op(kind="mkdir", path=b"a")]]
    if is_replaced:
        journal.compact(ops, position=journal.file.position)
    assert journal.has_room()
    journal.sync()
    disks.fill_all(copied)
    for _ in range(100):
        journal.mark_done({ops[0][0]: None})
        journal.sync()
    journal.close()


@pytest.mark.promise(138)
async def test_drained_objects_give_way_at_a_quota_that_counts_allocated_room_twice(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """Others have taken the reserve, too: the marks of the drain do not fit."""
    rig = Rig(tmp_path / "rig", monkeypatch, disk=copied)
    async with rig.mount() as session:
        await session.write(b"drained", bytes(4 * _MB))
        await session.drained()
        with monkeypatch.context() as patched:
            patched.setattr(SourceWriter, "carry_out", _refused)
            for number in range(8):
                await session.write(b"%d" % number, bytes(BLOCK), synced=True)
            (rig.directory / "reserve").unlink(missing_ok=True)
            disks.fill_quota(copied, 40 * _MB)
            is_there = session.front.object_table.states.drained_bytes
        assert is_there >= 4 * _MB
        with trio.fail_after(10_000):
            await session.drained()
            await session.write(b"new", bytes(BLOCK), synced=True)
            await session.end()
    assert all((rig.source / f"{number}").stat().st_size == BLOCK for number in range(8))
