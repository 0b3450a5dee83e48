"""The drain's marks in the journal: which are on the disk, and what has to wait for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch.posix.thread_pool import ThreadPool
from monarch.types import Identity
from monarch.writeback.drain_queue import Entry
from monarch.writeback.journal import Journal
from monarch.writeback.op import Op
from monarch.writeback.progress import Marks
from monarch.writeback.source_contents import Place
from monarch.writeback.source_state import SourceState

VERSION = Identity(5, 50, 6, 7)


class Book:
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
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "absorbed")


async def test_a_staged_file_is_known_in_the_journal_and_to_the_drain(book: Book) -> None:
    before = book.entry.record
    book.entry.place = Place(source_ino=9)
    book.marks.staged({book.entry: VERSION})
    assert book.entry.record > before
    # With the number that the source gave it, and without a time of change.
    staged = Identity(5, 50, 0, 9)
    assert book.state.expected(2, book.op).ours == {staged}
    book.journal.close()
    assert book.opened().replay().staged == {1: {staged}}


async def test_a_change_waits_until_the_mark_of_another_of_its_paths_is_on_the_disk(
    book: Book,
) -> None:
    book.marks.done({book.entry.seq: VERSION}, upto=book.entry.seq)
    assert not book.marks.unsynced
    book.marks.unsynced.add(book.op)
    assert book.marks.unsynced
    assert book.marks.unsynced.conflicts_with(Op(kind="unlink", path=b"a"))
    assert not book.marks.unsynced.conflicts_with(Op(kind="unlink", path=b"b"))
    await book.marks.sync_done()
    assert book.journal.file.synced == book.journal.file.written
    assert not book.marks.unsynced.conflicts_with(Op(kind="unlink", path=b"a"))


async def test_the_journal_is_synced_only_up_to_the_record_that_is_needed(book: Book) -> None:
    await book.marks.sync(book.entry.record)
    synced = book.journal.file.synced
    assert synced >= book.entry.record
    book.journal.append(Op(kind="mkdir", path=b"d"))
    await book.marks.sync(book.entry.record)
    assert book.journal.file.synced == synced


async def test_a_content_that_was_synced_later_has_a_later_record(book: Book) -> None:
    before = book.journal.file.written
    book.marks.durable()
    assert book.journal.file.written == before
    book.marks.durable(book.entry)
    assert book.entry.record == book.journal.file.written > before
