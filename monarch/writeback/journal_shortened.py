"""A journal without the records that do not matter any more.

A journal may have a million records, and most of them may still matter. So the file is read several
times, and no pass holds the records that it has read: a file that stays takes a few bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from monarch.types import Identity
from monarch.writeback.history import Numbered, Summary, obsolete
from monarch.writeback.journal_file import JournalFile
from monarch.writeback.journal_records import DIGITS, Record, change
from monarch.writeback.journal_state import MARKS_OF_A_RECORD, JournalState
from monarch.writeback.numbers import Numbers
from monarch.writeback.op import from_record

# The line of ``Known`` begins with this after its digest. It may be long, and is copied as it is.
_KNOWN = b' {"known":'


class Shortening:
    """The records of ``file`` before ``position``, at which a record ends. ``kept``: the sequence
    numbers of the changes that still matter.

    The constructor and ``lines`` wait for the disk, and raise OSError.
    """

    def __init__(self, file: JournalFile, position: int) -> None:
        self._file, self._position = file, position
        self._state = state = _summed_up(file, position)
        done = Numbers()
        done.update(filter(state.is_done, state.seqs))
        summary = Summary(done, state.published_seqs, state.gone, state.several, state.unnamed)
        self._obsolete = found = obsolete(_Changes(file, position), summary)
        self.kept = Numbers()
        self.kept.update(seq for seq in state.seqs if seq not in found.seqs)

    def lines(self, boot: str) -> Iterator[Record | bytes]:
        """The records, or their lines, that lead to the same state; ``boot`` is the present start
        of the machine."""
        state, found, kept = self._state, self._obsolete, self.kept
        yield from state.beginning(found.objects)
        yield {"boot": boot}
        at: list[list[int]] = []
        # Few files have set-ID bits.
        withheld: list[list[int]] = []
        for line in self._file.lines(0, self._position):
            if line.startswith(_KNOWN, DIGITS):
                yield line
                continue
            record = self._file.record(line)
            if "op" in record and (seq := int(record["seq"])) in kept:
                changed = found.changed.get(seq)
                yield record if changed is None else change(seq, int(record["ns"]), changed)
            elif "done" in record:
                at += [mark for mark in record.get("at", ()) if mark[0] in kept]
                withheld += [each for each in record.get("withheld", ()) if each[0] in kept]
                while len(at) >= MARKS_OF_A_RECORD:
                    yield state.mark(at=at[:MARKS_OF_A_RECORD])
                    del at[:MARKS_OF_A_RECORD]
        if at:
            yield state.mark(at=at)
        if withheld:
            yield state.mark(withheld=withheld)
        yield from state.ending(kept, found.objects)


class _Sum(JournalState):
    """The state, and of the changes the sequence numbers, and those that were published. Of the
    objects: those that are gone, those with more than one content, and those that may have lost a
    name."""

    def __init__(self, source: bytes, token: str = "") -> None:
        super().__init__(source, token)
        self.seqs = Numbers()
        self.published_seqs = Numbers()
        self.gone = Numbers()
        self.several = Numbers()
        self.unnamed = Numbers()
        self._with_content = Numbers()

    def changed(self, seq: int, record: Record) -> None:
        self.seqs.add(seq)
        kind, number = record["op"], int(record.get("object", 0))
        if kind == "gone":
            self.gone.add(number)
        elif kind in ("unlink", "rename"):
            self.unnamed.update((number, int(record.get("over_object", 0))))
        elif kind == "content":
            (self.several if number in self._with_content else self._with_content).add(number)

    def published(self, seq: int, identity: Identity) -> None:
        self.published_seqs.add(seq)


def _summed_up(file: JournalFile, position: int) -> _Sum:
    """The sum of the records before ``position``. Raises OSError."""
    lines = file.lines(0, position)
    state = _Sum.begun(file.record(next(lines, b"")), file.path)
    for line in lines:
        if not line.startswith(_KNOWN, DIGITS):
            state.add(file.record(line))
    return state


class _Changes:
    """The changes in a file, which can be read again and again. Raises OSError."""

    def __init__(self, file: JournalFile, position: int) -> None:
        self._file, self._position = file, position

    def __iter__(self) -> Iterator[Numbered]:
        for line in self._file.lines(0, self._position):
            # A record without a change is not decoded.
            if b'"op":"' in line:
                record = self._file.record(line)
                if "op" in record:
                    yield int(record["seq"]), from_record(record)
