"""The state of a journal that was read: the result of its records."""

from __future__ import annotations

import gc
import logging
import os
import stat
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from monarch.errors import TierError
from monarch.posix.private_directory import private_opener
from monarch.text import KiB, counted
from monarch.types import READING_CHANGES, Identity, Progress
from monarch.writeback.history import Numbered, names_of, without
from monarch.writeback.journal_records import Known, Record, change, decoded, marks
from monarch.writeback.journal_replay import Replay
from monarch.writeback.journal_state import MARKS_OF_A_RECORD, JournalState
from monarch.writeback.objects import object_path
from monarch.writeback.op import Op, from_record

log = logging.getLogger(__name__)

NAME = "journal"
# The first record has one path of up to 4 KiB, in which a byte may take six characters.
_MOST_HEADER_BYTES = 64 * KiB
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The number of records after which progress is shown.
PROGRESS_STEP = 4096
# More than a tick of the clock from which file systems take times.
_TICK_NS = 20_000_000


def no_progress(done: int, total: int | None, words: str) -> None:
    """For callers that show none."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector while many objects are made that all live on: each of its
    full collections visits all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def boot_now() -> str:
    """The present start of the machine. Raises OSError."""
    return _BOOT.read_text().strip()


def read_replay(
    directory: Path,
    *,
    trusts_end: bool = False,
    again: bool = False,
    progress: Progress = no_progress,
) -> Replay:
    """What a mount would take over from the journal of ``directory``, which a daemon may be
    writing; changes nothing. ``trusts_end``: after a clean end no object is checked. ``again``:
    nor is one if the last call was for the same version of the journal, and checked them. Raises
    TierError if the journal cannot be read, is damaged, or is of a newer Monarch."""
    path = directory / NAME
    try:
        boot = boot_now()
        with open(path, "rb", opener=private_opener) as file:
            found = read_journal(file.fileno(), path, boot, keep=True, progress=progress)
    except OSError as error:
        raise _unreadable(path, error) from error
    found = found or Found(b"")
    if again and found.looked is not None:
        return found.looked
    are_known = trusts_end and found.ended
    replay = found.replay(found.lost_now(boot, None if are_known else directory))
    found.looked = None if are_known else replay
    return replay


def token_of(directory: Path) -> str:
    """The token of the journal of ``directory``; empty if there is none with records. Raises
    TierError if the journal cannot be read."""
    path = directory / NAME
    try:
        with open(path, "rb", opener=private_opener) as file:
            record = decoded(file.readline(_MOST_HEADER_BYTES).rstrip(b"\n"))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise _unreadable(path, error) from error
    return "" if record is None else str(record.get("token", ""))


def _unreadable(path: Path, error: OSError) -> TierError:
    return TierError(
        f"journal {os.fspath(path)!r}: {error.strerror}", hint="check its disk: `dmesg`"
    )


class Found(JournalState):
    """The state with all changes after the records that were passed to ``add``."""

    def __init__(self, source: bytes, token: str = "") -> None:
        super().__init__(source, token)
        self.identities: dict[int, Identity] = {}
        self.withheld: dict[int, int] = {}
        # Objects that were put aside since the journal has lost their records.
        self.unrecorded: tuple[Op, ...] = ()
        # The number of changes that were recorded before the last start of the machine.
        self._before_boot = 0
        self.known: Known | None = None
        self.ops: list[Numbered] = []
        self.recorded_ns: dict[int, int] = {}
        # As in ``Replay``.
        self.damaged: set[int] = set()
        # The last result of ``read_replay`` that has checked the objects.
        self.looked: Replay | None = None

    @classmethod
    def of(
        cls, content: bytes, path: Path, boot: str, progress: Progress = no_progress
    ) -> Found | None:
        """The state after the records of ``content``, None if it has none. An incomplete last
        record, left by a crash, is ignored. Raises TierError if the journal is damaged, or of a
        newer Monarch."""
        found: Found | None = None
        number = offset = 0
        while offset < len(content):
            number += 1
            cut = content.find(b"\n", offset)
            record = decoded(content[offset:cut]) if cut >= 0 else None
            if record is None:
                where = f"{os.fspath(path)!r}, line {number}"
                may_be_torn = found is not None and found.boot not in ("", boot)
                _require_torn(content, offset, where, may_be_torn=may_be_torn)
                break
            try:
                if found is None:
                    found = cls.begun(record, path)
                else:
                    found.add(record)
            except (ValueError, KeyError, TypeError) as error:
                raise TierError(
                    f"journal {os.fspath(path)!r}, line {number}: {error}",
                    hint="it was not written by this Monarch; use the one that wrote it",
                ) from error
            offset = cut + 1
            found.end = offset
            if number % PROGRESS_STEP == 0:
                progress(number, None, READING_CHANGES)
        return found

    def changed(self, seq: int, record: Record) -> None:
        self.ops.append((seq, from_record(record)))
        self.recorded_ns[seq] = int(record["ns"])

    def published(self, seq: int, identity: Identity) -> None:
        self.identities[seq] = identity

    def withholds(self, seq: int, bits: int) -> None:
        self.withheld[seq] = bits

    def knows(self, record: Record) -> None:
        self.known = Known.of(record)

    def started(self) -> None:
        self._before_boot = len(self.ops)

    def lost_now(self, boot: str, directory: Path | None) -> dict[int, Op]:
        """The last record of each object with a name that has lost bytes which the source lacks.

        No content says that the object is durable and it was recorded before the start ``boot`` of
        the machine, or it is shorter than recorded. ``directory`` holds the objects; None: they are
        as recorded.
        """
        durable = self.lost.union(self.durable)
        recorded = set(_recorded(self.ops))
        if self.boot == boot:
            durable |= set(_recorded(self.ops[self._before_boot :]))
        lost = recorded - durable
        short, missing = set[int](), set[int]()
        if directory is not None:
            short, missing = self._cut_short(directory, recorded - lost - self.lost)
        published = {
            op.object: seq in self.identities for seq, op in self.ops if op.kind == "content"
        }
        self.damaged = {number for number in short | missing if published.get(number)}
        lost |= short - self.damaged
        return {number: op for number, (op, _) in self.last_of(lost).items()}

    def _cut_short(self, directory: Path, objects: Container[int]) -> tuple[set[int], set[int]]:
        """Those of ``objects`` that are shorter than their last record says and were not changed
        after it: the tier was restored from a backup, or its file system was stopped and mounted
        again without a start of the machine. A file that was truncated before its daemon was killed
        was changed after it. Also those in whose place is no file; the drain reports them."""
        last: dict[int, _Version] = {}
        for seq, op in self.ops:
            if op.kind in ("through", "gone"):
                last.pop(op.object, None)
            elif op.object not in objects:
                continue
            elif op.kind == "content" and not op.through:
                last[op.object] = _Version(op.size, op.mtime_ns, self.recorded_ns[seq], op.synced)
            elif op.kind == "attr" and op.mtime_ns is not None and op.object in last:
                last[op.object] = replace(
                    last[op.object], mtime_ns=op.mtime_ns if op.same else None
                )
        short, missing = set[int](), set[int]()
        for number, version in last.items():
            try:
                status = object_path(directory, number).lstat()
            except FileNotFoundError:
                missing.add(number)
            except OSError:
                continue
            else:
                if not stat.S_ISREG(status.st_mode):
                    missing.add(number)
                elif status.st_size < version.size and (self.ended or not version.is_older(status)):
                    short.add(number)
        return short, missing

    def last_of(self, objects: Collection[int]) -> dict[int, tuple[Op, int]]:
        """The last record, with its time and the last names, of each of ``objects`` that has a
        name."""
        last: dict[int, tuple[Op, int]] = {}
        if not objects:
            return last
        for seq, op in self.ops:
            if op.object not in objects or op.kind not in ("create", "take", "content"):
                continue
            if op.kind == "content" or op.object not in last:
                last[op.object] = op, self.recorded_ns[seq]
        return {
            number: (replace(last[number][0], path=found[0], paths=tuple(found)), last[number][1])
            for number, found in names_of(self.ops, last).items()
        }

    def replay(self, lost: Mapping[int, Op]) -> Replay:
        """The state for a mount; ``lost`` as returned by ``lost_now``."""
        all_lost = self.lost | lost.keys()
        ops = list(without(self.ops, all_lost)) if all_lost else self.ops
        undone = [seq for seq, _ in ops if not self.is_done(seq)]
        return Replay(
            ops=tuple(ops),
            done={seq: self.identities.get(seq) for seq, _ in ops if self.is_done(seq)},
            staged={number: frozenset(its) for number, its in self.staged.items()},
            next_object=self.next_object,
            next_ino=self.next_ino,
            # The source has the bytes of a file that was only copied up, and its attributes remain.
            lost=(
                *(op for op in lost.values() if not (op.kind == "take" or op.same)),
                *self.unrecorded,
            ),
            recorded_ns={seq: self.recorded_ns[seq] for seq in undone},
            known=self.known,
            doubted=self.last_of(all_lost),
            all_doubted=frozenset(all_lost),
            damaged=frozenset(self.damaged),
            aside=frozenset(self.aside.intersection(undone)),
            source=self.source,
            withheld=self.withheld,
            removed=frozenset(self.removed),
            ended=self.ended,
        )

    def now_known(self, known: Known, kept: Iterable[Numbered]) -> None:
        """``known`` is the state of the source from which the changes ``kept`` follow."""
        self.known, bits = known, known.withheld
        self.withheld = {
            seq: bits[op.object] for seq, op in kept if op.object in bits and self.is_done(seq)
        }

    def rewritten(self, kept: Sequence[Numbered], boot: str) -> Iterator[Record]:
        """The records that lead to this state, with the changes ``kept`` only."""
        seqs = {seq for seq, _ in kept}
        objects = {number for _, op in kept for number in (op.object, op.over_object)}
        yield from self.beginning(objects)
        if self.known is not None:
            yield self.known.record()
        yield {"boot": boot}
        for seq, op in kept:
            yield change(seq, self.recorded_ns.get(seq, 0), op)
        at = marks({seq: it for seq, it in self.identities.items() if seq in seqs})
        for start in range(0, len(at), MARKS_OF_A_RECORD):
            yield self.mark(at=at[start : start + MARKS_OF_A_RECORD])
        if withheld := [[seq, bits] for seq, bits in self.withheld.items() if seq in seqs]:
            yield self.mark(withheld=withheld)
        yield from self.ending(seqs, objects)


@dataclass(frozen=True, slots=True)
class _Version:
    """A recorded version of an object: its size in bytes, its time of modification, None if that is
    not known, and the time of the record, both in ns since the epoch. ``synced``: it was on the
    disk before it was recorded."""

    size: int
    mtime_ns: int | None
    recorded_ns: int
    synced: bool

    def is_older(self, status: os.stat_result) -> bool:
        """Whether a file of this status was changed after this version. File systems take times
        from a clock that ticks: a change may have the same time, or one before the record."""
        if self.mtime_ns is None:
            return status.st_ctime_ns > self.recorded_ns
        if status.st_mtime_ns < self.mtime_ns and not (
            # A process has set a time in the future, and a later change has set both times anew.
            self.mtime_ns > self.recorded_ns and status.st_mtime_ns == status.st_ctime_ns
        ):
            return False
        if status.st_mtime_ns == self.mtime_ns:
            # A restored file was changed at another time. A file system that has stopped loses no
            # synced bytes.
            return self.synced and status.st_ctime_ns == status.st_mtime_ns
        return status.st_ctime_ns > self.recorded_ns - _TICK_NS


def _recorded(ops: Iterable[Numbered]) -> Iterator[int]:
    """The numbers of all recorded objects."""
    return (op.object for _, op in ops if op.kind in ("create", "take", "content"))


def _require_torn(content: bytes, offset: int, where: str, *, may_be_torn: bool) -> None:
    """Raises TierError if the incomplete data at ``offset`` cannot be the result of a crash.

    A power cut keeps any page that was not synced and loses any other; a kill loses none.
    ``may_be_torn``: the machine has started since the records before it.
    """
    behind = [
        record for record in map(decoded, content[offset:].split(b"\n")[1:]) if record is not None
    ]
    if not behind:
        return
    if not may_be_torn or any(record.get("upto", 0) > offset for record in behind):
        raise TierError(
            f"journal {where}: the record is damaged, and"
            f" {counted(len(behind), 'good one follows', 'good ones follow')}",
            hint="what was absorbed is beside it and untouched: put the journal's backup in place,"
            " or take the objects from there",
        )
    log.warning(
        "journal %s: what was not synced when the machine stopped is cut off, with it %s",
        where,
        counted(len(behind), "record that was kept", "records that were kept"),
    )


# The result of the last ``read_replay``, and the version of the file: a mount inspects a journal
# before it opens it.
_LOOKED: dict[tuple[int, ...], Found] = {}


def read_journal(
    fd: int, path: Path, boot: str, *, keep: bool = False, progress: Progress = no_progress
) -> Found | None:
    """The state of an open journal, None if it has no records.

    With ``keep`` the next call for the same version of the file need not read it. Raises OSError,
    TierError.
    """
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    found, size = _LOOKED.pop(key, None), status.st_size
    if found is None:
        with open(fd, "rb", closefd=False) as file:
            content = file.read()
        with collector_paused():
            found, size = Found.of(content, path, boot, progress), len(content)
    _LOOKED.clear()
    if keep and found is not None and size == status.st_size:
        _LOOKED[key] = found
    elif found is not None:
        found.looked = None
    return found
