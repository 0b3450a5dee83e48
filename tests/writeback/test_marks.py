"""The drain's marks in the journal: which are on the disk, and what has to wait for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch.posix.thread_pool import ThreadPool
from monarch.types import Identity
from monarch.writeback.journal import Journal
from monarch.writeback.op import Op
from monarch.writeback.progress import Marks
from monarch.writeback.queue_entry import Entry
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState

VERSION = Identity(5, 50, 6, 7)


class Rig:
    """A journal with the content of one file, and the marks in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.journal = self.opened()
        self.state = SourceState()
        self.marks = Marks(self.journal, ThreadPool(1, "marks", abandon=True), self.state)
        self.op = Op(kind="content", path=b"a", paths=(b"a",), object=1, size=5)
        seq = self.journal.append(self.op)
        self.entry = Entry(seq, self.op, 0, self.journal.file.written, was_tried=False)

    def opened(self) -> Journal:
        return Journal.open(self.directory, source=b"/source", boot="boot")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "absorbed")


async def test_a_staged_file_is_known_in_the_journal_and_to_the_drain(rig: Rig) -> None:
    before = rig.entry.record
    rig.entry.place = Place(source_ino=9)
    rig.marks.staged({rig.entry: VERSION})
    assert rig.entry.record > before
    # With the number that the source gave it, and without a time of change.
    staged = Identity(5, 50, 0, 9)
    assert rig.state.expected(2, rig.op).ours == {staged}
    rig.journal.close()
    assert rig.opened().replay().staged == {1: {staged}}


async def test_a_change_waits_until_the_mark_of_another_of_its_paths_is_on_the_disk(
    rig: Rig,
) -> None:
    rig.marks.done({rig.entry.seq: VERSION}, upto=rig.entry.seq, withheld={}, removed=())
    assert not rig.marks.unsynced
    rig.marks.unsynced.add(rig.op)
    assert rig.marks.unsynced
    assert rig.marks.unsynced.conflicts_with(Op(kind="unlink", path=b"a"))
    assert not rig.marks.unsynced.conflicts_with(Op(kind="unlink", path=b"b"))
    await rig.marks.sync_done()
    assert rig.journal.file.synced == rig.journal.file.written
    assert not rig.marks.unsynced.conflicts_with(Op(kind="unlink", path=b"a"))


async def test_the_journal_is_synced_only_up_to_the_record_that_is_needed(rig: Rig) -> None:
    await rig.marks.sync(rig.entry.record)
    synced = rig.journal.file.synced
    assert synced >= rig.entry.record
    rig.journal.append(Op(kind="mkdir", path=b"d"))
    await rig.marks.sync(rig.entry.record)
    assert rig.journal.file.synced == synced


async def test_a_content_that_was_synced_later_has_a_later_record(rig: Rig) -> None:
    before = rig.journal.file.written
    rig.marks.durable()
    assert rig.journal.file.written == before
    rig.marks.durable(rig.entry)
    assert rig.entry.record == rig.journal.file.written > before


async def test_a_content_that_is_staged_again_and_again_leaves_one_mark(rig: Rig) -> None:
    """As one that the source refuses for hours: the journal must not grow meanwhile."""
    rig.entry.place = Place(source_ino=9)
    rig.marks.staged({rig.entry: VERSION})
    written = rig.journal.file.written
    for _ in range(3):
        rig.entry.place = Place(source_ino=9, instead=9)
        rig.marks.staged({rig.entry: VERSION})
    assert rig.journal.file.written == rig.entry.record == written
    # The source may give each staged file another number.
    for number in range(10, 20):
        rig.entry.place = Place(source_ino=number, instead=number - 1)
        rig.marks.staged({rig.entry: VERSION})
    last = Identity(5, 50, 0, 19)
    assert rig.state.unmarked(1) == {last}
    rig.journal.shorten()
    records = rig.journal.file.path.read_bytes().splitlines()
    assert sum(b'"staged"' in record for record in records) == 1
    # One that may have got its name stays known.
    rig.entry.place = Place(source_ino=20)
    rig.marks.staged({rig.entry: VERSION})
    both = {last, Identity(5, 50, 0, 20)}
    assert rig.state.unmarked(1) == both
    rig.journal.close()
    assert rig.opened().replay().staged == {1: both}
