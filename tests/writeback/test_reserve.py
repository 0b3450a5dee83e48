"""A full disk: necessary records are written, and calls that need room are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monarch.writeback.journal import Journal, Op
from monarch.writeback.journal_file import Reserve
from tests.equipment import disks
from tests.equipment.disks import Disk
from tests.writeback.test_journal import until_full

_MB = 1 << 20
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
