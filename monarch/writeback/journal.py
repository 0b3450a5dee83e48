"""The journal: every change of absorbed files, in order, and which of them the source has.

    journal_records.py    records as text
    journal_file.py       the file: appended, synced, replaced
    journal_found.py      what a journal held when it was read
    journal_shortened.py  the same file without the records that do not matter any more

When most of its records do not matter any more, the journal is rewritten without them
(history.py). What a crash left of the last record is cut off when the journal is opened; a
damaged record before others is an error.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial
from pathlib import Path

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.text import KiB, MiB, counted
from monarch.types import Identity
from monarch.writeback.doubtful import Doubtful
from monarch.writeback.history import Numbered
from monarch.writeback.journal_file import JournalFile, nothing
from monarch.writeback.journal_found import NAME, Found, boot_now, read_journal, read_replay
from monarch.writeback.journal_records import (
    VERSION,
    Known,
    Record,
    change,
    marks,
    staged_record,
)
from monarch.writeback.journal_replay import Replay
from monarch.writeback.journal_shortened import Shortening
from monarch.writeback.numbers import Numbers
from monarch.writeback.op import Op

__all__ = ["Journal", "Known", "Op", "Replay", "read_replay"]

log = logging.getLogger(__name__)

# The largest record of one change, and of a removal.
_LONGEST_CHANGE = 128 * KiB
_LONGEST_REMOVAL = 32 * KiB
# The room that is kept on a full disk for the marks of each change, in bytes.
_MARKS = 1 * KiB
# The most room for marks: the first drained objects give room for those of the others.
_MOST_FOR_MARKS = 4 * MiB
# The journal is shortened when it is longer than this, in bytes, and than this many times its
# length after it was shortened last, and the records of the changes that are not done, which stay.
_LONG_BYTES = 1 * MiB
_LONG_TIMES = 5
# The same on a full disk.
_LONG_BYTES_FULL = 64 * KiB
_LONG_TIMES_FULL = 2


class Journal:
    """``open`` makes one. Appending and marking are quick; ``sync``, ``compact`` and ``shorten``
    wait for the disk and may be called from any thread, all else belongs to one thread. ``file``
    has the number of its records and how many of them are on the disk."""

    def __init__(self, file: JournalFile, boot: str, found: Found) -> None:
        self.file = file
        self._boot = boot
        self.token = found.token
        self._next_seq = found.next_seq
        self._done_upto = found.done_upto
        self._aside = set(found.aside)
        # Objects of files that are still needed: those with a content that was synced or published,
        # and those without one, which a power cut may damage.
        gone = {op.object for _, op in found.ops if op.kind == "gone"}
        self._durable = {number for number in found.durable if number not in gone}
        self._doubtful: set[int] = set()
        # The changes that are not done, in order: of which object each is a content, or 0.
        self._undone: dict[int, int] = {}
        # About how long their records are, in bytes.
        self._undone_bytes = 0
        # What was read at opening, and how many records there were then.
        self._found: Found | None = None
        self._found_records = 0
        self._replay: Replay | None = None
        # The length of the file after it was shortened last, in bytes.
        self._short_bytes = 0
        # Whether syncs fail, and no other file could take the place of this one.
        self.is_beyond_repair = False

    @classmethod
    def open(cls, directory: Path, *, source: bytes, boot: str | None = None) -> Journal:
        """The journal of ``directory``, made if there is none.

        ``source`` is the path that it drains to, ``boot`` the start of the machine, by default the
        present one. Raises TierError if it cannot be read, is damaged, of another source, or of a
        newer Monarch; then nothing has been changed.
        """
        path = directory / NAME
        try:
            boot = boot_now() if boot is None else boot
            directory.mkdir(mode=0o700, exist_ok=True)
            file = JournalFile.open(path)
            try:
                journal = cls(file, boot, found := _prepared(file, source, boot))
                journal._take_up(found)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise TierError(
                f"journal {os.fspath(path)!r}: {error.strerror}",
                hint="the tier that absorbs writes must be readable and writable",
            ) from error
        return journal

    def _take_up(self, found: Found) -> None:
        """Continue from what was read."""
        lost = found.lost_now(self._boot, self.file.path.parent)
        new: list[Record] = []
        if found.boot != self._boot:
            new.append({"boot": self._boot})
        if lost:
            new.append({"lost": sorted(lost)})
        if found.ended and not new:
            # Objects change from now on.
            new.append({"believed": []})
        for record in new:
            self.file.append(record)
            found.add(record)
        replay = self._replay = found.replay(lost)
        for seq, op in replay.ops:
            self._doubt(op)
            if seq not in replay.done:
                self._undone[seq] = op.object if op.kind == "content" else 0
        changes = max(1, len(replay.ops))
        self._undone_bytes = self.file.position * len(self._undone) // changes
        for op in replay.lost:
            if op in found.unrecorded:
                continue
            log.error(
                "%r was never synced, and the machine or the tier's file system has stopped since,"
                " or the tier was restored and lacks bytes of it: what is left of it is kept aside,"
                " and does not go to the source",
                os.fsdecode(op.path),
            )
        self.sync()
        self._found, self._found_records = found, self.file.written

    def replay(self) -> Replay:
        """What was read at opening: handed out once, for it may be large. Raises ValueError after
        that."""
        if self._replay is None:
            raise ValueError("what the journal held has been handed out")
        replay, self._replay = self._replay, None
        return replay

    def taken_up(self) -> None:
        """Drops the state that was read at opening."""
        self._replay = self._found = None

    @property
    def doubtful(self) -> frozenset[int]:
        """Recorded objects without a record that they have been synced."""
        return frozenset(self._doubtful)

    def has_room(self) -> bool:
        """Whether a change may be recorded that takes room of the disk, and is no removal."""
        return self.file.has_room(_LONGEST_CHANGE)

    def takes_content(self) -> bool:
        """Whether a content may be recorded, so that room is left for the marks of all changes."""
        return self.file.has_left(_LONGEST_CHANGE + self._for_marks())

    def takes_removal(self) -> bool:
        """Whether a removal may be recorded. Half of the room that is kept for a full disk is left
        to the marks, with which the drain makes more room."""
        if self.has_room():
            return True
        return self.file.has_left(_LONGEST_REMOVAL + min(self._for_marks(), self.file.kept // 2))

    def _for_marks(self) -> int:
        """The room for the marks, and for a short journal that gives back the room of this one."""
        marks = min(_MARKS * (len(self._undone) + 1), _MOST_FOR_MARKS)
        return marks + _LONG_BYTES_FULL

    def append(self, op: Op, *, is_due: bool = False) -> int:
        """Record a change, which then outlives the daemon; returns its seq. ``is_due``: the drain
        makes no other change before this one, so it may take the room for marks. Raises OSError."""
        seq = self._next_seq
        keep = self._for_marks() if op.kind == "content" and not is_due else 0
        self._undone_bytes += self.file.append(change(seq, time.time_ns(), op), keep=keep)
        failpoints.failpoint("journal-appended")
        self._next_seq += 1
        self._undone[seq] = content = op.object if op.kind == "content" else 0
        if content and op.synced:
            self._durable.add(content)
        self._doubt(op)
        if op.kind == "gone":
            # Its number is never used again.
            self._durable.discard(op.object)
        return seq

    def _doubt(self, op: Op) -> None:
        if op.object in self._durable or op.through or op.kind in ("gone", "through"):
            self._doubtful.discard(op.object)
        elif op.kind in ("create", "take", "content"):
            self._doubtful.add(op.object)

    def mark_done(
        self,
        done: Mapping[int, Identity | None],
        *,
        upto: int | None = None,
        withheld: Mapping[int, int] | None = None,
        removed: Collection[int] = (),
    ) -> None:
        """Records that the source has all of ``done``, each with the identity of the published or
        created entry, and all changes up to ``upto``, by default the last of ``done``.
        ``withheld``: the set-ID bits that are withheld since some of them. ``removed``: the objects
        whose older version they have removed at the source. Raises OSError."""
        upto = max(done) if upto is None else max(upto, self._done_upto)
        record: Record = {"done": upto}
        if at := marks(done):
            record["at"] = at
        if withheld:
            record["withheld"] = [[seq, bits] for seq, bits in withheld.items()]
        if removed:
            record["removed"] = sorted(removed)
        if also := [seq for seq in done if seq > upto]:
            record["also"] = also
        self.file.append(record)
        self._done_upto = upto
        over = [*itertools.takewhile(lambda seq: seq <= upto, self._undone), *also]
        before = len(self._undone)
        contents = {seq: self._undone.pop(seq, 0) for seq in over}
        self._undone_bytes = self._undone_bytes * len(self._undone) // max(1, before)
        for seq, identity in done.items():
            if identity is not None and (number := contents.get(seq, 0)):
                self._durable.add(number)
                self._doubtful.discard(number)

    def mark_aside(self, seqs: Iterable[int]) -> None:
        """Record that of the changes that the source refuses these are set aside, and no others.

        Raises OSError.
        """
        aside = set(seqs)
        if aside != self._aside:
            self.file.append({"done": self._done_upto, "aside": sorted(aside)})
            self._aside = aside

    def mark_staged(self, *staged: tuple[int, Identity, int]) -> None:
        """Record that files of the source are staged and about to get the names of objects. Each
        comes with the number of an earlier staged file that was removed for it, or 0. Raises
        OSError."""
        self.file.append(*(staged_record(*each) for each in staged))

    def mark_durable(self, *numbers: int) -> None:
        """Record that objects have been synced since they were recorded. Raises OSError."""
        if new := sorted({*numbers} - self._durable):
            self.file.append({"believed": new})
            self._durable.update(new)
            self._doubtful.difference_update(new)

    def mark_lost(self, number: int) -> None:
        """Record that the tier has lost the bytes of an object: the next mount takes up no change
        of its file. Raises OSError."""
        self.file.append({"lost": [number]})

    def mark_ended(self) -> None:
        """Record a clean end: every object has the size of its last record. Raises OSError."""
        self.file.append({"believed": [], "ended": True})

    def sync(self) -> None:
        """Wait until everything appended so far is on the disk; callers share the wait.

        Raises OSError, and after a failure again and again until another file has taken the place
        of this one: the kernel forgets what it could not write.
        """
        self.file.sync()

    def compact(
        self, keep: Iterable[Numbered], *, position: int, known: Known | None = None
    ) -> None:
        """Rewrites the journal: ``keep`` replaces all records before ``position``, and ``known``
        has the state that the other changes have left at the source.

        ``position`` was the end of the journal when ``keep`` was collected. ``keep`` has all
        changes that are not drained, and of the others those that still lead from the snapshot to
        the tree, each with its sequence number. Raises OSError, and ValueError if a change is
        missing that is not done.
        """
        kept = sorted(keep, key=lambda numbered: numbered[0])
        found = self._found_at(position)
        if known is not None:
            found.now_known(known, kept)
        seqs = {seq for seq, _ in kept}
        self._rewrite(seqs, partial(found.rewritten, kept, self._boot), position)

    @property
    def is_long(self) -> bool:
        """Whether most of it may be left out by ``shorten``, or enough on a full disk."""
        if self.has_room():
            stays = max(self._short_bytes, self._undone_bytes)
            return self.file.position > max(_LONG_BYTES, _LONG_TIMES * stays)
        is_long = self.file.position > max(_LONG_BYTES_FULL, _LONG_TIMES_FULL * self._short_bytes)
        return is_long and self.file.has_left(self._short_bytes)

    def shorten(self, pause: Callable[[], object] = nothing) -> None:
        """Rewrite the journal without what does not matter, unless most matters and syncs work.

        Appends continue meanwhile, and syncs wait for no more than a rename. The file is read
        several times, and its records are not held. ``pause`` is called after each few records.
        Raises OSError, and ValueError if a change would be left out that is not done.
        """
        position, has_failed = self.file.position, bool(self.file.failed)
        shortening = Shortening(self.file, position, pause, is_due=has_failed)
        if not shortening.is_needless:
            self._rewrite(shortening.kept, partial(shortening.lines, self._boot), position, pause)
        self._short_bytes, self.is_beyond_repair = self.file.position, False

    def _found_at(self, position: int) -> Found:
        """The state after the records before ``position``. Raises OSError."""
        found = self._found
        if found is None or self.file.written != self._found_records:
            found = Found.of(self.file.read(position), self.file.path, self._boot)
            assert found is not None
        return found

    def _rewrite(
        self,
        kept: Container[int],
        first: Callable[[], Iterable[Record | bytes]],
        position: int,
        pause: Callable[[], object] = nothing,
    ) -> None:
        """Replaces the records before ``position`` by those of ``first``, which have the changes
        with the sequence numbers ``kept``."""
        # In this order: a change is in the file before it is among those that are not done.
        undone, end = list(self._undone), self.file.position
        later = Numbers()
        records = map(self.file.record, self.file.paced(position, end, pause))
        later.update(it["seq"] for it in records if "seq" in it)
        if missing := [seq for seq in undone if seq not in kept and seq not in later]:
            raise ValueError(f"{missing[0]} is not done yet and would be forgotten")
        self.file.replace(first, position, pause)
        failpoints.failpoint("journal-compacted")

    def close(self) -> None:
        self.file.close()


def _prepared(file: JournalFile, source: bytes, boot: str) -> Found:
    """The state of the journal in ``file``, of which a damaged end is cut off and an older version
    is brought up to this one. Raises OSError, TierError."""
    path = file.path
    found = read_journal(file.fd, path, boot)
    doubtful = Doubtful(path.parent)
    if found is None:
        for object in path.parent.glob("??/*"):
            raise TierError(
                f"{os.fspath(path.parent)!r} holds absorbed files, {object.name!r} among them, but"
                " no journal that knows them",
                hint="put the journal back, or move the directory away",
            )
        found = Found(source)
        file.begin(found.header())
    elif found.source != source:
        raise TierError(
            f"journal {os.fspath(path)!r} belongs to the source {os.fsdecode(found.source)!r}",
            hint="mount that one to drain it, or name another tier for the writes",
        )
    elif found.end < file.position:
        log.warning(
            "journal %s: its end is no record, as a crash leaves one: %s cut off",
            path,
            counted(file.position - found.end, "byte is", "bytes are"),
        )
        # Before the cut: a mount that is killed in between leaves them to the next.
        found.unrecorded = doubtful.keep_unrecorded(found.next_object)
        for op in found.unrecorded:
            log.error(
                "the record of an object is lost: its %s kept aside as %r",
                counted(op.size, "byte is", "bytes are"),
                os.fsdecode(op.path),
            )
        file.cut(found.end)
    found.next_object = max(found.next_object, doubtful.next_number)
    file.remove_staged()
    if found.version < VERSION:
        records = [*file.records(0, found.end)]
        records[0]["monarch"] = VERSION
        file.replace(lambda: records, found.end)
        log.info("journal %s: is of version %d, now %d", path, found.version, VERSION)
    return found
