"""The journal: what was done to absorbed files, in order, and what of it the source has.

An append-only file beside the objects, one record a line: 16 hex digits of the xxh3-64 of the
rest, a blank, JSON, a newline. Records are

    {"monarch": 1, "token", "source", "seq", "object", "ino"}   first: whose it is, and the
                                numbers from which new ones are counted
    {"boot"}                    what follows was written after this start of the machine
    {"seq", "ns", "op", ...}    a change (ops.py) and when it was recorded
    {"done", "at", "also"}      all up to that seq is at the source, and, of what comes after one
                                that the source refuses, those in ``also``; ``at``: [seq, size,
                                mtime_ns, ctime_ns, source_ino] of each content that was published
                                and of what was made
    {"staged"}                  [object, source_ino]: that file of the source is ours, and is about
                                to get the object's name
    {"known", "made", "over", "ours", "new", "present"}
                                in a journal that was written anew: what the changes that it has no
                                more have left at the source (``Known``), each as a list of lists or
                                of objects
    {"believed"}, {"lost"}      objects that have been synced, as no record of a content here says;
                                those whose bytes are lost

and each may have "upto": so many bytes of the file had been synced before.

A record that was appended outlives the daemon, one that was synced outlives the machine. What a
crash left of a record at the end is cut off when the journal is opened; a record that was whole
once and is not any more is an error.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from monarch import points
from monarch.errors import TierError
from monarch.text import counted, errno_words
from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.losses import names_of, without
from monarch.writeback.ops import Op, from_record, raw, text, to_record

__all__ = ["Journal", "Known", "Look", "Op", "Replay", "look"]

log = logging.getLogger(__name__)

_NAME = "journal"
_STAGED = "journal.part"
# Version 2 names the user of each change; the Monarch that knows version 1 would make all as root.
_VERSION = 2
_BOOT = "/proc/sys/kernel/random/boot_id"
_DIGITS = 16

_LIBC = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE = 1
# Room that the journal has on its disk before it needs it, so that it can still say what the source
# has got when the disk is full; it is asked for when less than the first is left.
_SCARCE_BYTES = 1 * MiB
_AHEAD_BYTES = 4 * MiB


Told = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Known:
    """What changes that a journal has no more have left at the source, as far as others need it.

    By object: ``known``, what the source has of its file; ``over``, what a rename on the mount had
    the file replace, which stands there still; ``ours``, the source's numbers of files that may
    have got its name; ``new``: it was made on the mount; ``present``: the source has it under its
    names. ``made``: what the source has of what has no object, by its number on the mount.
    ``given_up``: numbers of what was made on the mount and is not at the source under its name.
    """

    known: Mapping[int, Identity] = field(default_factory=dict)
    made: Mapping[int, Identity] = field(default_factory=dict)
    over: Mapping[int, tuple[Identity, ...]] = field(default_factory=dict)
    ours: Mapping[int, frozenset[int]] = field(default_factory=dict)
    new: frozenset[int] = frozenset()
    present: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "known": [[number, *astuple(it)] for number, it in self.known.items()],
            "made": [[ino, *astuple(it)] for ino, it in self.made.items()],
            "over": [[number, *astuple(it)] for number, its in self.over.items() for it in its],
            "ours": [[number, ino] for number, inos in self.ours.items() for ino in sorted(inos)],
            "new": sorted(self.new),
            "present": sorted(self.present),
            "given_up": sorted(self.given_up),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Known:
        """The inverse of ``record``. Raises KeyError, TypeError, ValueError if it is none."""
        over: dict[int, tuple[Identity, ...]] = {}
        for number, *it in record["over"]:
            over[number] = (*over.get(number, ()), Identity(*it))
        ours: dict[int, frozenset[int]] = {}
        for number, ino in record["ours"]:
            ours[number] = ours.get(number, frozenset()) | {ino}
        return cls(
            known={number: Identity(*it) for number, *it in record["known"]},
            made={ino: Identity(*it) for ino, *it in record["made"]},
            over=over,
            ours=ours,
            new=frozenset(record["new"]),
            present=frozenset(record["present"]),
            given_up=frozenset(record.get("given_up", ())),
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal held when it was opened.

    ``ops``: (seq, change) in order, from the snapshot to the tree as it was last; ``done``: those
    of them that the source has, with what it has of a content that was published. ``next_object``
    and ``next_ino`` have never been used. ``lost``: the last that was recorded of each file that a
    power cut has taken, with its names; found now for the first time, they are not in ``ops``.
    ``recorded_ns``: when that was, of each op that is not done. ``staged``: the source's numbers of
    files that may have got the name of an object in an earlier life, unknown to the journal.
    ``known``: what was known when the journal was written anew, None if it never was.
    """

    ops: tuple[tuple[int, Op], ...]
    done: Mapping[int, Identity | None]
    next_object: int
    next_ino: int
    lost: tuple[Op, ...]
    recorded_ns: Mapping[int, int]
    staged: Mapping[int, frozenset[int]] = field(default_factory=dict)
    known: Known | None = None

    def unpublished(self, objects: Iterable[int]) -> set[int]:
        """Those of ``objects`` whose bytes will not come to the source by what is recorded: none of
        their contents waits for it, and none was the last to be published."""
        settled = set()
        for seq, op in self.ops:
            if op.kind == "content":
                if seq not in self.done or self.done[seq] is not None:
                    settled.add(op.object)
                else:
                    settled.discard(op.object)
        return set(objects) - settled

    def told(self) -> dict[int, Told]:
        """Size and time of modification of each object as they were recorded last.

        The time is None, which is that of no object, if it was set while there were bytes that no
        content tells of.
        """
        told: dict[int, Told] = {}
        for _, op in self.ops:
            if op.kind == "content":
                told[op.object] = op.size, op.mtime_ns
            elif op.kind == "attr" and op.mtime_ns is not None and op.object in told:
                told[op.object] = told[op.object][0], op.mtime_ns if op.same else None
        return told


@dataclass(frozen=True, slots=True)
class Look:
    """What stands in a journal that was only looked at. ``ops`` without those of files that a power
    cut has taken, of which ``lost`` has the last that was recorded; all up to ``done_upto`` is at
    the source.
    """

    source: bytes
    ops: tuple[tuple[int, Op], ...]
    recorded_ns: Mapping[int, int]
    done_upto: int
    lost: tuple[Op, ...]
    done_beyond: frozenset[int] = frozenset()

    def is_done(self, seq: int) -> bool:
        return seq <= self.done_upto or seq in self.done_beyond


def look(directory: Path) -> Look:
    """Read the journal of ``directory`` as it is, whoever may be writing it. Nothing is changed.

    Raises TierError if it cannot be read, is damaged, or of a newer Monarch.
    """
    path = directory / _NAME
    try:
        boot = Path(_BOOT).read_text().strip()
        read = _Read.of(path.read_bytes(), path, boot)
    except OSError as error:
        raise TierError(
            f"journal {os.fspath(path)!r}: {error.strerror}", hint="look at its disk: `dmesg`"
        ) from error
    if read is None:
        return Look(b"", (), {}, 0, ())
    gone = read.lost_now(boot)
    ops = [(seq, op) for seq, op, _, _ in read.ops]
    return Look(
        source=read.source,
        ops=tuple(without(ops, read.lost | gone.keys())),
        recorded_ns={seq: ns for seq, _, ns, _ in read.ops},
        done_upto=read.done_upto,
        done_beyond=frozenset(read.done_beyond),
        lost=tuple(op for op in gone.values() if op.kind != "take"),
    )


class Journal:
    """``open`` makes one. Appending and marking are quick; ``sync`` and ``compact`` wait for the
    disk and may be called from any thread, all else belongs to one."""

    def __init__(self, path: Path, fd: int, boot: str, read: _Read) -> None:
        self._path = path
        self._fd = fd
        self._boot = boot
        self._source = read.source
        self.token = read.token
        self._next_seq = read.next_seq
        self._next_object = read.next_object
        self._next_ino = read.next_ino
        self._done_upto = read.done_upto
        self._done_beyond = read.done_beyond
        self._staged = read.staged
        self._identities = read.identities
        self._believed = read.believed
        self._lost = read.lost
        # When each op that is not done was recorded, and of which object it is the content.
        self._undone: dict[int, tuple[int, int]] = {}
        self._replay: Replay | None = None
        # Of the file: its end, what of it is on the disk, what of that it says itself, and up to
        # where it has room. The lock is held for no longer than a write to the page cache.
        self._lock = threading.Lock()
        self._end = os.fstat(fd).st_size
        self._synced = 0
        self._said = 0
        self._room = 0
        # In records; those that were there count as one.
        self._written = 1
        self._durable = 0
        # One sync at a time; who comes meanwhile shares the next.
        self._turn = threading.Condition()
        self._syncing = False
        self._failed: OSError | None = None

    # -- opening -----------------------------------------------------------------------------

    @classmethod
    def open(cls, directory: Path, *, source: bytes, boot: str | None = None) -> Journal:
        """That of ``directory``, made if there is none. ``source`` is the path that it drains to,
        ``boot`` the start of the machine, by default the present one.

        Raises TierError if it cannot be read, is damaged, of another source, or of a newer Monarch;
        then nothing has been changed.
        """
        path = directory / _NAME
        try:
            if boot is None:
                boot = Path(_BOOT).read_text().strip()
            directory.mkdir(mode=0o700, exist_ok=True)
            fd = _opened(path)
            try:
                with open(fd, "rb", closefd=False) as file:
                    content = file.read()
                read = _Read.of(content, path, boot)
                if read is None:
                    _require_no_objects(directory)
                    read = _Read.new(source)
                    _begin(fd, directory, read)
                elif read.source != source:
                    raise TierError(
                        f"journal {os.fspath(path)!r} belongs to the source"
                        f" {os.fsdecode(read.source)!r}",
                        hint="mount that one to drain it, or name another tier for the writes",
                    )
                elif read.end < len(content):
                    log.warning(
                        "journal %s: its last %d bytes are no record, as a crash leaves them; they"
                        " are cut off",
                        path,
                        len(content) - read.end,
                    )
                    os.ftruncate(fd, read.end)
                    os.fsync(fd)
                with suppress(FileNotFoundError):
                    (directory / _STAGED).unlink()
                if read.version < _VERSION:
                    old, fd = fd, _brought_up(path, content[: read.end])
                    os.close(old)
                    log.info("journal %s: is of version %d, now %d", path, read.version, _VERSION)
                journal = cls(path, fd, boot, read)
                journal._take_up(read)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise TierError(
                f"journal {os.fspath(path)!r}: {error.strerror}",
                hint="the tier that absorbs writes must be readable and writable",
            ) from error
        return journal

    def _take_up(self, read: _Read) -> None:
        """Go on from what was read."""
        if read.boots[-1:] != [self._boot]:
            self._write({"boot": self._boot})
        gone = read.lost_now(self._boot)
        if gone:
            self._write({"lost": sorted(gone)})
            self._lost |= gone.keys()
        # The source has what was brought of a file that nobody finished writing.
        lost = [op for op in gone.values() if op.kind != "take"]
        ops = [(seq, op) for seq, op, _, _ in read.ops]
        if self._lost:
            ops = list(without(ops, self._lost))
        recorded_ns = {seq: ns for seq, _, ns, _ in read.ops}
        undone = [(seq, op) for seq, op in ops if not self._is_done(seq)]
        self._undone = {
            seq: (recorded_ns[seq], op.object if op.kind == "content" else 0) for seq, op in undone
        }
        self._replay = Replay(
            ops=tuple(ops),
            done={seq: read.identities.get(seq) for seq, _ in ops if self._is_done(seq)},
            staged={number: frozenset(inos) for number, inos in read.staged.items()},
            next_object=self._next_object,
            next_ino=self._next_ino,
            lost=tuple(lost),
            recorded_ns={seq: recorded_ns[seq] for seq, _ in undone},
            known=read.known,
        )
        for op in lost:
            log.error(
                "%r was never synced, and the machine has stopped since: what was written to it is"
                " lost",
                os.fsdecode(op.path),
            )
        self.sync()

    def _is_done(self, seq: int) -> bool:
        return seq <= self._done_upto or seq in self._done_beyond

    def replay(self) -> Replay:
        """What was read at opening. It is handed out once, for it may be large."""
        if self._replay is None:
            raise ValueError("what the journal held has been handed out")
        replay, self._replay = self._replay, None
        return replay

    # -- writing -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Where the next record goes, in bytes."""
        return self._end

    @property
    def failed(self) -> str:
        """Why nothing can be made safe any more, empty while it can."""
        return errno_words(self._failed.errno) if self._failed is not None else ""

    @property
    def written(self) -> int:
        """How many records there are; those found at opening count as one."""
        return self._written

    @property
    def synced(self) -> int:
        """How many of those are on the disk, the first of them."""
        return self._durable

    def append(self, op: Op) -> int:
        """Record a change; its seq. A daemon that is killed now has not lost it. Raises OSError."""
        seq, now = self._next_seq, time.time_ns()
        self._write({"seq": seq, "ns": now, **to_record(op)})
        points.reached("journal-appended")
        self._next_seq += 1
        self._next_object = max(self._next_object, op.object + 1)
        self._next_ino = max(self._next_ino, op.ino + 1)
        content = op.object if op.kind == "content" else 0
        self._undone[seq] = (now, content)
        if content and op.synced:
            self._believed.add(content)
        return seq

    def mark_done(self, done: Mapping[int, Identity | None], *, upto: int | None = None) -> None:
        """Record that the source has all of ``done``, in which what was published or made has its
        identity there, and all up to ``upto``, by default the last of ``done``. Raises OSError."""
        upto = max(done) if upto is None else max(upto, self._done_upto)
        at = [
            [seq, it.size, it.mtime_ns, it.ctime_ns, it.source_ino]
            for seq, it in done.items()
            if it is not None
        ]
        record: dict[str, Any] = {"done": upto}
        if at:
            record["at"] = at
        if also := [seq for seq in done if seq > upto]:
            record["also"] = also
        self._write(record)
        self._done_upto = upto
        self._done_beyond.update(also)
        if self._done_beyond:
            self._done_beyond = {seq for seq in self._done_beyond if seq > upto}
        contents: dict[int, int] = {}
        over = [*itertools.takewhile(lambda seq: seq <= upto, self._undone), *also]
        for seq in over:
            _, contents[seq] = self._undone.pop(seq, (0, 0))
        for seq, identity in done.items():
            if identity is not None:
                self._identities[seq] = identity
                if number := contents.get(seq, 0):
                    self._believed.add(number)
                    self._staged.pop(number, None)

    def mark_staged(self, number: int, source_ino: int) -> None:
        """Record that a file of the source is ours and about to get the name of an object.

        Raises OSError.
        """
        self._write({"staged": [number, source_ino]})
        self._staged.setdefault(number, set()).add(source_ino)

    def mark_believed(self, number: int) -> None:
        """Record that an object has been synced since its content was recorded. Raises OSError."""
        if number not in self._believed:
            self._write({"believed": [number]})
            self._believed.add(number)

    def mark_lost(self, number: int) -> None:
        """Record that the tier has lost the bytes of an object: what happened to its file is not
        among the changes that another life reads. Raises OSError."""
        self._write({"lost": [number]})
        self._lost.add(number)

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock:
            if self._synced > self._said:
                record["upto"] = self._synced
            line = _line(record)
            self._want_room(len(line))
            written = os.pwrite(self._fd, line, self._end)
            if written < len(line):
                # The disk is full. Half a record must not stand before the next.
                os.ftruncate(self._fd, self._end)
                self._room = 0
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))
            self._end += len(line)
            self._written += 1
            self._said = self._synced

    def _want_room(self, count: int) -> None:
        if self._end + count + _SCARCE_BYTES <= self._room:
            return
        offset, length = ctypes.c_longlong(self._end), ctypes.c_longlong(_AHEAD_BYTES)
        if _LIBC.fallocate(self._fd, _FALLOC_FL_KEEP_SIZE, offset, length) == 0:
            self._room = self._end + _AHEAD_BYTES
        else:
            # Not at every record again.
            self._room = self._end + _SCARCE_BYTES + _SCARCE_BYTES // 4

    def sync(self) -> None:
        """Until all that was appended by now is on the disk; callers share the wait.

        Raises OSError; once that was so it does it again until ``compact`` has written another
        file: the kernel forgets what it could not write.
        """
        wanted = self._written
        with self._turn:
            while self._syncing and self._durable < wanted:
                self._turn.wait()
            if self._durable >= wanted:
                return
            self._syncing = True
        try:
            if self._failed is not None:
                raise OSError(self._failed.errno, self._failed.strerror)
            with self._lock:
                end, written = self._end, self._written
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._failed = error
                raise
            self._synced, self._durable = end, written
        finally:
            self._end_turn()
        points.reached("journal-synced")

    def _end_turn(self) -> None:
        with self._turn:
            self._syncing = False
            self._turn.notify_all()

    def compact(
        self, keep: Iterable[tuple[int, Op]], *, position: int, known: Known | None = None
    ) -> None:
        """Write the journal anew with ``keep`` in the place of all before ``position``, the one
        when that was put together, and ``known`` of what is not among them.

        In ``keep`` are all that the source has not got yet, and of those that it has as many as
        still lead from the snapshot to the tree, with a seq that they had. Raises ValueError if one
        that is not done is missing, OSError.
        """
        kept = sorted(keep, key=lambda numbered: numbered[0])
        with self._turn:
            while self._syncing:
                self._turn.wait()
            self._syncing = True
        try:
            self._compact(kept, position, known)
        finally:
            self._end_turn()
        points.reached("journal-compacted")

    def _compact(
        self, kept: Sequence[tuple[int, Op]], position: int, known_of: Known | None
    ) -> None:
        seqs = {seq for seq, _ in kept}
        with self._lock:
            tail_end = self._end
            undone, published = list(self._undone), list(self._identities)
        known = seqs | {record.get("seq") for record in self._records(position, tail_end)}
        missing = [seq for seq in undone if seq not in known]
        if missing:
            raise ValueError(f"{missing[0]} is not done yet and would be forgotten")
        staged = self._path.with_name(_STAGED)
        fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.writelines(map(_line, self._first(kept, seqs, known_of)))
                file.writelines(map(_line, self._records(position, tail_end)))
            os.fdatasync(fd)
            points.reached("journal-staged")
            with self._lock:
                # What came meanwhile has not been synced, nobody was promised that it is.
                synced = os.fstat(fd).st_size
                late = [_line(record) for record in self._records(tail_end, self._end)]
                with open(fd, "ab", closefd=False) as file:
                    file.writelines(late)
                staged.rename(self._path)
                fd, self._fd = self._fd, fd
                self._end = os.fstat(self._fd).st_size
                self._synced, self._said, self._room = synced, 0, 0
                self._durable = self._written - len(late)
                self._failed = None
            for seq in published:
                if seq not in known:
                    del self._identities[seq]
        finally:
            os.close(fd)
        with _directory(self._path.parent) as directory:
            os.fsync(directory)

    def _first(
        self, kept: Sequence[tuple[int, Op]], seqs: set[int], known: Known | None
    ) -> Iterator[dict[str, Any]]:
        """The records that take the place of all that was before."""
        yield _header(self.token, self._source, self._next_seq, self._next_object, self._next_ino)
        believed = self._believed & {op.object for _, op in kept}
        if believed:
            yield {"believed": sorted(believed)}
        if self._lost:
            yield {"lost": sorted(self._lost)}
        if known is not None:
            yield known.record()
        yield {"boot": self._boot}
        for seq, op in kept:
            recorded_ns, _ = self._undone.get(seq, (0, 0))
            yield {"seq": seq, "ns": recorded_ns, **to_record(op)}
        for number in self._staged.keys() & {op.object for _, op in kept}:
            for source_ino in self._staged[number]:
                yield {"staged": [number, source_ino]}
        if self._done_upto or self._done_beyond:
            yield {
                "done": self._done_upto,
                "also": sorted(self._done_beyond & seqs),
                "at": [
                    [seq, it.size, it.mtime_ns, it.ctime_ns, it.source_ino]
                    for seq, it in list(self._identities.items())
                    if seq in seqs
                ],
            }

    def _records(self, start: int, end: int) -> Iterator[dict[str, Any]]:
        """Those between two offsets, without what they say of this very file."""
        for line in os.pread(self._fd, end - start, start).splitlines():
            record = _parsed(line)
            if record is None:
                raise OSError(
                    errno.EIO, "the journal has changed on its disk", os.fspath(self._path)
                )
            record.pop("upto", None)
            yield record

    def close(self) -> None:
        os.close(self._fd)


class _Read:
    """What stands in a journal. ``end``: where the last good record ends, in bytes."""

    def __init__(self, token: str, source: bytes) -> None:
        self.version = _VERSION
        self.token = token
        self.source = source
        self.next_seq = 1
        self.next_object = 1
        self.next_ino = 1
        self.done_upto = 0
        self.done_beyond: set[int] = set()
        self.staged: dict[int, set[int]] = {}
        # Of which object each content is that was not published yet.
        self._contents: dict[int, int] = {}
        self.identities: dict[int, Identity] = {}
        self.believed: set[int] = set()
        self.lost: set[int] = set()
        self.boots: list[str] = []
        self.known: Known | None = None
        # (seq, change, when it was recorded, after which start of the machine)
        self.ops: list[tuple[int, Op, int, str]] = []
        self.end = 0

    @classmethod
    def new(cls, source: bytes) -> _Read:
        return cls(uuid.uuid4().hex[:16], source)

    @classmethod
    def of(cls, content: bytes, path: Path, boot: str) -> _Read | None:
        """None if it has no record. Raises TierError if it is damaged, or of a newer Monarch."""
        read: _Read | None = None
        number = offset = 0
        while offset < len(content):
            number += 1
            cut = content.find(b"\n", offset)
            record = _parsed(content[offset:cut]) if cut >= 0 else None
            if record is None:
                boots = read.boots if read is not None else []
                _require_torn(content, offset, f"{os.fspath(path)!r}, line {number}", boots, boot)
                break
            try:
                if read is None:
                    read = cls._begun(record, path)
                else:
                    read._add(record)
            except (ValueError, KeyError, TypeError) as error:
                raise TierError(
                    f"journal {os.fspath(path)!r}, line {number}: {error}",
                    hint="it was not written by this Monarch; use the one that wrote it",
                ) from error
            offset = cut + 1
            read.end = offset
        return read

    @classmethod
    def _begun(cls, record: dict[str, Any], path: Path) -> _Read:
        version = record["monarch"]
        if version > _VERSION:
            raise TierError(
                f"journal {os.fspath(path)!r} is of version {version}, this Monarch knows"
                f" {_VERSION}",
                hint="mount with the Monarch that wrote it",
            )
        read = cls(str(record["token"]), raw(record["source"]))
        read.version = int(version)
        read.next_seq = int(record["seq"])
        read.next_object = int(record["object"])
        read.next_ino = int(record["ino"])
        return read

    def _add(self, record: dict[str, Any]) -> None:
        if "op" in record:
            seq, op = int(record["seq"]), from_record(record)
            self.ops.append((seq, op, int(record["ns"]), self.boots[-1]))
            if op.kind == "content":
                self._contents[seq] = op.object
            self.next_seq = max(self.next_seq, seq + 1)
            self.next_object = max(self.next_object, op.object + 1)
            self.next_ino = max(self.next_ino, op.ino + 1)
        elif "done" in record:
            self.done_upto = int(record["done"])
            self.done_beyond |= set(record.get("also", ()))
            if self.done_beyond:
                self.done_beyond = {seq for seq in self.done_beyond if seq > self.done_upto}
            for seq, size, mtime_ns, ctime_ns, source_ino in record.get("at", ()):
                self.identities[seq] = Identity(size, mtime_ns, ctime_ns, source_ino)
                self.staged.pop(self._contents.pop(seq, 0), None)
        elif "staged" in record:
            number, source_ino = map(int, record["staged"])
            self.staged.setdefault(number, set()).add(source_ino)
        elif "known" in record:
            self.known = Known.of(record)
        elif "boot" in record:
            self.boots.append(str(record["boot"]))
        elif "believed" in record:
            self.believed |= set(record["believed"])
        elif "lost" in record:
            self.lost |= set(record["lost"])
        else:
            raise ValueError("a record of an unknown kind")

    def lost_now(self, boot: str) -> dict[int, Op]:
        """The last that was recorded of each object that has a name, and of which no content is
        believed."""
        last: dict[int, Op] = {}
        believed = self.believed | self.lost
        for seq, op, _, recorded_boot in self.ops:
            if op.kind not in ("create", "take", "content"):
                continue
            if op.kind == "content" or op.object not in last:
                last[op.object] = op
            if recorded_boot == boot:
                believed.add(op.object)
            if op.kind == "content" and (op.synced or seq in self.identities):
                believed.add(op.object)
        doubted = last.keys() - believed
        if not doubted:
            return {}
        names = names_of([(seq, op) for seq, op, _, _ in self.ops], doubted)
        return {
            number: replace(last[number], path=found[0], paths=tuple(found))
            for number, found in names.items()
        }


def _header(
    token: str, source: bytes, next_seq: int, next_object: int, next_ino: int
) -> dict[str, Any]:
    return {
        "monarch": _VERSION,
        "token": token,
        "source": text(source),
        "seq": next_seq,
        "object": next_object,
        "ino": next_ino,
    }


def _line(record: Mapping[str, Any]) -> bytes:
    content = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(content).encode("ascii"), content)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line, None if it is not whole."""
    content = line[_DIGITS + 1 :]
    if line[:_DIGITS] != xxhash.xxh3_64_hexdigest(content).encode("ascii"):
        return None
    try:
        record = json.loads(content)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _require_torn(content: bytes, offset: int, where: str, boots: list[str], boot: str) -> None:
    """Raises TierError if what is not whole at ``offset`` cannot be what a crash has left there.

    A power cut keeps any page that was not synced and loses any other; a kill loses none.
    """
    behind = [
        record for record in map(_parsed, content[offset:].split(b"\n")[1:]) if record is not None
    ]
    if not behind:
        return
    if not boots or boots[-1] == boot or any(record.get("upto", 0) > offset for record in behind):
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


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _require_no_objects(directory: Path) -> None:
    for path in directory.glob("??/*"):
        raise TierError(
            f"{os.fspath(directory)!r} holds absorbed files, {path.name!r} among them, but no"
            " journal that knows them",
            hint="put the journal back, or move the directory away",
        )


def _begin(fd: int, directory: Path, read: _Read) -> None:
    line = _line(_header(read.token, read.source, 1, 1, 1))
    os.ftruncate(fd, 0)
    os.pwrite(fd, line, 0)
    os.fsync(fd)
    for path in (directory, directory.parent):
        with _directory(path) as directory_fd:
            os.fsync(directory_fd)
    read.end = len(line)


def _brought_up(path: Path, content: bytes) -> int:
    """The journal of an older version as one of this, with the same records, opened.

    Its first line stays as long as it was, for the records tell of places in the file.
    """
    first, _, others = content.partition(b"\n")
    record = _parsed(first)
    assert record is not None
    staged = path.with_name(_STAGED)
    fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(_line({**record, "monarch": _VERSION}) + others)
        os.fsync(fd)
        staged.rename(path)
        with _directory(path.parent) as directory:
            os.fsync(directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
