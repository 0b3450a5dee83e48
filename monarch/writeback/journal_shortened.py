"""A journal without the records that do not matter any more.

A journal may have a million records, and most of them may still matter. So the file is read several
times, and no pass holds the records that it has read: a file that stays takes a few bits. If the
first pass finds nothing that may be left out, there is no other one.

The passes are work of the processor in a thread, which would hold the interpreter's lock most of
the time. The event loop releases this lock at each system call, and would wait after it as long as
the interpreter lets a thread run (5 ms). So the passes pause after a few records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    numbers of the changes that still matter. ``is_needless``: all changes matter, and their records
    are most of the journal; there is nothing else then. Never so with ``is_due``. ``pause`` is
    called after each few records.

    The constructor and ``lines`` wait for the disk, and raise OSError.
    """

    def __init__(
        self, file: JournalFile, position: int, pause: Callable[[], object], *, is_due: bool = False
    ) -> None:
        self._lines = lines = _Lines(file, position, pause)
        self._state = state = _summed_up(lines)
        all_matters = not state.may_leave_out and 2 * state.change_bytes > position
        self.is_needless = all_matters and not is_due
        self.kept = Numbers()
        if self.is_needless:
            return
        done = Numbers()
        done.update(filter(state.is_done, state.seqs))
        summary = Summary(done, state.published_seqs, state.gone, state.several, state.unnamed)
        self._obsolete = found = obsolete(_Changes(lines), summary)
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
        for line in self._lines:
            if line.startswith(_KNOWN, DIGITS):
                yield line
                continue
            record = self._lines.record(line)
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
    """The state, and of the changes the sequence numbers, those that were published, and the length
    of their records in bytes. Of the objects: those that are gone, those with more than one
    content, and those that may have lost a name. ``may_leave_out``: some changes may not matter any
    more."""

    def __init__(self, source: bytes, token: str = "") -> None:
        super().__init__(source, token)
        self.seqs = Numbers()
        self.published_seqs = Numbers()
        self.gone = Numbers()
        self.several = Numbers()
        self.unnamed = Numbers()
        self.change_bytes = 0
        self.may_leave_out = False
        self._with_content = Numbers()

    def changed(self, seq: int, record: Record) -> None:
        self.seqs.add(seq)
        kind, number = record["op"], int(record.get("object", 0))
        has_content = number in self._with_content
        if kind == "gone":
            self.gone.add(number)
            # The file of an object with a content keeps its name unless a change removes that.
            self.may_leave_out |= not has_content
        elif kind in ("unlink", "rename"):
            self.unnamed.update((number, int(record.get("over_object", 0))))
            self.may_leave_out = True
        elif kind == "rmdir":
            self.may_leave_out = True
        elif kind == "content":
            (self.several if has_content else self._with_content).add(number)
            self.may_leave_out |= has_content

    def published(self, seq: int, identity: Identity) -> None:
        self.published_seqs.add(seq)


class _Lines:
    """The lines in a file before ``position``, which can be read again and again. Raises
    OSError."""

    def __init__(self, file: JournalFile, position: int, pause: Callable[[], object]) -> None:
        self.path, self.record = file.path, file.record
        self._file, self._position, self._pause = file, position, pause

    def __iter__(self) -> Iterator[bytes]:
        return self._file.paced(0, self._position, self._pause)


def _summed_up(lines: _Lines) -> _Sum:
    """The sum of the records of a journal. Raises OSError."""
    remaining = iter(lines)
    state = _Sum.begun(lines.record(next(remaining, b"")), lines.path)
    for line in remaining:
        if not line.startswith(_KNOWN, DIGITS):
            state.add(record := lines.record(line))
            state.change_bytes += len(line) if "op" in record else 0
    return state


class _Changes:
    """The changes in a journal, which can be read again and again. Raises OSError."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[Numbered]:
        for line in self._lines:
            # A record without a change is not decoded.
            if b'"op":"' in line:
                record = self._lines.record(line)
                if "op" in record:
                    yield int(record["seq"]), from_record(record)
