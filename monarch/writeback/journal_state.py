"""The state that the records of a journal lead to, without the changes themselves."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Self

from monarch.errors import TierError
from monarch.types import Identity
from monarch.writeback.journal_records import (
    VERSION,
    Record,
    header,
    staged_besides,
    staged_of,
    staged_record,
)
from monarch.writeback.numbers import Numbers
from monarch.writeback.op import raw

# The greatest number of entries of a list in a record of a rewritten journal. A list of all files
# would take as much memory at once as all files.
MARKS_OF_A_RECORD = 256


class JournalState:
    """The state after the records that were passed to ``add``.

    Before the first one it is that of a new journal. ``end`` is the offset behind the last complete
    record, in bytes. ``boot``: the last recorded start of the machine. ``durable``: objects with a
    content that was synced or published. ``removed``: objects without a content that was published
    since the drain has removed their older version. ``ended``: the last record is that of a clean
    end.
    """

    def __init__(self, source: bytes, token: str = "") -> None:
        self.version = VERSION
        self.token = token or uuid.uuid4().hex[:16]
        self.source = source
        self.next_seq = 1
        self.next_object = 1
        self.next_ino = 1
        self.done_upto = 0
        self.done_beyond: set[int] = set()
        self.aside: set[int] = set()
        self.staged: dict[int, frozenset[Identity]] = {}
        self.removed: set[int] = set()
        # The object of each content that was not published yet, by sequence number.
        self._contents: dict[int, int] = {}
        self.durable = Numbers()
        self.lost: set[int] = set()
        self.boot = ""
        self.ended = False
        self.end = 0

    @classmethod
    def begun(cls, record: Record, path: Path) -> Self:
        """The state after the first record. Raises TierError if the journal is of a newer Monarch,
        and ValueError, KeyError or TypeError if the record is not valid."""
        version = record["monarch"]
        if version > VERSION:
            raise TierError(
                f"journal {os.fspath(path)!r} is of version {version}, this Monarch knows"
                f" {VERSION}",
                hint="mount with the Monarch that wrote it",
            )
        found = cls(raw(record["source"]), str(record["token"]))
        found.version = int(version)
        found.next_seq = int(record["seq"])
        found.next_object = int(record["object"])
        found.next_ino = int(record["ino"])
        return found

    def add(self, record: Record) -> None:
        """Adds a record. Raises ValueError, KeyError or TypeError if it is not valid."""
        self.ended = bool(record.get("ended"))
        if "op" in record:
            self._add_change(record)
        elif "done" in record:
            self._add_marks(record)
        elif "staged" in record:
            number, staged = staged_of(*map(int, record["staged"]))
            instead = int(record.get("instead", 0))
            earlier = self.staged.get(number, frozenset())
            self.staged[number] = staged_besides(earlier, instead) | {staged}
        elif "known" in record:
            self.knows(record)
        elif "boot" in record:
            self.boot = str(record["boot"])
            self.started()
        elif "believed" in record:
            self.durable.update(record["believed"])
        elif "lost" in record:
            self.lost |= set(record["lost"])
        else:
            raise ValueError("a record of an unknown kind")

    def _add_change(self, record: Record) -> None:
        seq, number = int(record["seq"]), int(record.get("object", 0))
        if record["op"] == "content":
            self._contents[seq] = number
            if record.get("synced"):
                self.durable.add(number)
        self.next_seq = max(self.next_seq, seq + 1)
        self.next_object = max(self.next_object, number + 1)
        self.next_ino = max(self.next_ino, int(record.get("ino", 0)) + 1)
        self.changed(seq, record)

    def _add_marks(self, record: Record) -> None:
        before, self.done_upto = self.done_upto, int(record["done"])
        self.aside = set(record.get("aside", self.aside))
        self.done_beyond |= set(record.get("also", ()))
        # While a change is refused, each mark adds to them and none is passed.
        if self.done_upto > before:
            self.done_beyond = {seq for seq in self.done_beyond if seq > self.done_upto}
        for seq, size, mtime_ns, ctime_ns, source_ino in record.get("at", ()):
            if number := self._contents.pop(seq, 0):
                self.durable.add(number)
                self.staged.pop(number, None)
                self.removed.discard(number)
            self.published(seq, Identity(size, mtime_ns, ctime_ns, source_ino))
        self.removed.update(record.get("removed", ()))
        for seq, bits in record.get("withheld", ()):
            self.withholds(seq, bits)

    def is_done(self, seq: int) -> bool:
        return seq <= self.done_upto or seq in self.done_beyond

    def changed(self, seq: int, record: Record) -> None:
        """A change was added."""

    def published(self, seq: int, identity: Identity) -> None:
        """The mark of a content that was published, or of an entry that was made, was added."""

    def withholds(self, seq: int, bits: int) -> None:
        """The mark of a change was added after which the drain withholds these set-ID bits."""

    def knows(self, record: Record) -> None:
        """The record of a rewritten journal about the changes that it does not contain any more was
        added."""

    def started(self) -> None:
        """The record of a start of the machine was added."""

    def header(self) -> Record:
        """The first record of a journal in this state."""
        return header(self.token, self.source, self.next_seq, self.next_object, self.next_ino)

    def beginning(self, objects: Container[int]) -> Iterator[Record]:
        """The first records of a rewritten journal, of whose changes ``objects`` are."""
        yield self.header()
        durable = (number for number in self.durable if number in objects)
        while believed := [*itertools.islice(durable, MARKS_OF_A_RECORD)]:
            yield {"believed": believed}
        if self.lost:
            yield {"lost": sorted(self.lost)}

    def mark(self, **lists: list[list[int]]) -> Record:
        """A mark with some entries of its ``lists``, by their names, in a rewritten journal."""
        return {"done": self.done_upto, **lists}

    def ending(self, seqs: Container[int], objects: Container[int]) -> Iterable[Record]:
        """The last records of a rewritten journal, which has the changes ``seqs``."""
        if self.done_upto or self.done_beyond or self.aside:
            yield {
                "done": self.done_upto,
                "aside": sorted(seq for seq in self.aside if seq in seqs),
                "also": sorted(seq for seq in self.done_beyond if seq in seqs),
                "removed": sorted(number for number in self.removed if number in objects),
            }
        # After the marks: the mark of a content means that files staged before it have arrived.
        for number, files in self.staged.items():
            if number in objects:
                for staged in files:
                    yield staged_record(number, staged)
