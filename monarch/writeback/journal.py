"""The journal: what was done to absorbed files, in order, and what of it the source has.

An append-only file beside the objects, one record a line: 16 hex digits of the xxh3-64 of the
rest, a blank, JSON, a newline. Records are

    {"monarch": 1, "token", "source", "seq", "object", "ino"}   first: whose it is, and the
                                numbers from which new ones are counted
    {"boot"}                    what follows was written after this start of the machine
    {"seq", "ns", "op", ...}    a change (op.py) and when it was recorded
    {"done", "at", "also"}      all up to that seq is at the source, and, of what comes after one
                                that the source refuses, those in ``also``; ``at``: [seq, size,
                                mtime_ns, ctime_ns, source_ino] of each content that was published
                                and of what was made; ``aside``: all refused changes that are set
                                aside, if these are others than before
    {"staged"}                  [object, source_ino, size, mtime_ns]: that file of the source is
                                ours, and is about to get the object's name
    {"known", "made", "over", "ours", "new", "present"}
                                in a journal that was written anew: what the changes that it has no
                                more have left at the source (``Known``), each as a list of lists or
                                of objects
    {"believed"}, {"lost"}      objects that have been synced, as no record of a content here says;
                                those whose bytes are lost

and each may have "upto": so many bytes of the file had been synced before.

When most of it does not matter any more it is written anew without that (shortening.py).

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.text import counted, errno_words
from monarch.types import ANY_SIZE, Identity
from monarch.units import KiB, MiB
from monarch.writeback.crash_losses import names_of, without
from monarch.writeback.op import Op, from_record, raw, text, to_record
from monarch.writeback.reserve import Reserve
from monarch.writeback.shortening import objects_of, shortened

__all__ = ["Journal", "Known", "Look", "Op", "Replay", "look"]

log = logging.getLogger(__name__)

_NAME = "journal"
_STAGED = "journal.part"
# Version 2 names the user of each change; the Monarch that knows version 1 would make all as root.
_VERSION = 2
_BOOT = "/proc/sys/kernel/random/boot_id"
_DIGITS = 16
_BLOCK = 512

_LIBC = ctypes.CDLL(None, use_errno=True)
_FALLOC_FL_KEEP_SIZE = 1
# Room that the journal has on its disk before it needs it. The first is kept for what must be said
# when the disk is full, what the source has got and what is removed: a 256th of the disk, within
# these bounds. It is asked for when less is left.
_SCARCE_BYTES = (64 * KiB, 1 * MiB)
_SCARCE_SHARE = 256
_AHEAD_BYTES = 4 * MiB
# Of what is free.
_AHEAD_SHARE = 4
_LONGEST_CHANGE = 128 * KiB
# It is shortened when it is longer than this, and so many times as long as it was then. Bytes.
_LONG_BYTES = 1 * MiB
_LONG_TIMES = 5
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ENCODED = json.JSONEncoder(separators=(",", ":")).encode


Told = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Known:
    """What changes that a journal has no more have left at the source, as far as others need it.

    By object: ``known``, what the source has of its file; ``over``, what a rename on the mount had
    the file replace, which stands there still; ``ours``, what files are that may
    have got its name; ``new``: it was made on the mount; ``present``: the source has it under its
    names. ``made``: what the source has of what has no object, by its number on the mount.
    ``given_up``: numbers of what was made on the mount and is not at the source under its name.
    ``settled``: files of the source whose taking was done by then, so that all else here is newer.
    """

    known: Mapping[int, Identity] = field(default_factory=dict)
    made: Mapping[int, Identity] = field(default_factory=dict)
    over: Mapping[int, tuple[Identity, ...]] = field(default_factory=dict)
    ours: Mapping[int, frozenset[Identity]] = field(default_factory=dict)
    new: frozenset[int] = frozenset()
    present: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "known": [[number, *astuple(it)] for number, it in self.known.items()],
            "made": [[ino, *astuple(it)] for ino, it in self.made.items()],
            "over": [[number, *astuple(it)] for number, its in self.over.items() for it in its],
            "ours": [[number, *_told(it)] for number, its in self.ours.items() for it in its],
            "new": sorted(self.new),
            "present": sorted(self.present),
            "given_up": sorted(self.given_up),
            "settled": sorted(self.settled),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Known:
        """The inverse of ``record``. Raises KeyError, TypeError, ValueError if it is none."""
        over: dict[int, tuple[Identity, ...]] = {}
        for number, *it in record["over"]:
            over[number] = (*over.get(number, ()), Identity(*it))
        ours: dict[int, frozenset[Identity]] = {}
        for number, *told in record["ours"]:
            ours[number] = ours.get(number, frozenset()) | {_staged(*told)}
        return cls(
            known={number: Identity(*it) for number, *it in record["known"]},
            made={ino: Identity(*it) for ino, *it in record["made"]},
            over=over,
            ours=ours,
            new=frozenset(record["new"]),
            present=frozenset(record["present"]),
            given_up=frozenset(record.get("given_up", ())),
            settled=frozenset(record.get("settled", ())),
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
    ``known``: what was known when the journal was written anew, None if it never was. ``doubted``:
    of each object that a power cut has made doubtful, also long ago, what was recorded last and
    when, if it had a name. ``aside``: changes that are set aside, since the source refuses them.
    """

    ops: tuple[tuple[int, Op], ...]
    done: Mapping[int, Identity | None]
    next_object: int
    next_ino: int
    lost: tuple[Op, ...]
    recorded_ns: Mapping[int, int]
    staged: Mapping[int, frozenset[Identity]] = field(default_factory=dict)
    known: Known | None = None
    doubted: Mapping[int, tuple[Op, int]] = field(default_factory=dict)
    aside: frozenset[int] = frozenset()

    def unpublished(self, objects: Iterable[int]) -> set[int]:
        """Those of ``objects`` whose bytes will not come to the source by what is recorded: none of
        their contents waits for it, and the last was neither published nor as the source had it."""
        settled = set()
        for seq, op in self.ops:
            if op.kind == "content":
                if op.same or seq not in self.done or self.done[seq] is not None:
                    settled.add(op.object)
                else:
                    settled.discard(op.object)
        return set(objects) - settled

    def without_history(self) -> Replay:
        """What is of use when all else has been taken up."""
        return Replay((), {}, self.next_object, self.next_ino, self.lost, {})

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
    the source. ``doubted``: all objects that a power cut has made doubtful, which are kept.
    """

    source: bytes
    ops: tuple[tuple[int, Op], ...]
    recorded_ns: Mapping[int, int]
    done_upto: int
    lost: tuple[Op, ...]
    done_beyond: frozenset[int] = frozenset()
    doubted: frozenset[int] = frozenset()
    identities: Mapping[int, Identity] = field(default_factory=dict)

    def is_done(self, seq: int) -> bool:
        return seq <= self.done_upto or seq in self.done_beyond

    def replay(self) -> Replay:
        """As a mount would find it, but for numbers, which are not for who only looks."""
        return Replay(
            ops=self.ops,
            done={seq: self.identities.get(seq) for seq, _ in self.ops if self.is_done(seq)},
            next_object=0,
            next_ino=0,
            lost=self.lost,
            recorded_ns=self.recorded_ns,
        )


def look(directory: Path) -> Look:
    """Read the journal of ``directory`` as it is, whoever may be writing it. Nothing is changed.

    Raises TierError if it cannot be read, is damaged, or of a newer Monarch.
    """
    path = directory / _NAME
    try:
        boot = Path(_BOOT).read_text().strip()
        with open(path, "rb") as file:
            read, _ = _reading(file.fileno(), path, boot, keep=True)
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
        identities=read.identities,
        lost=tuple(op for op in gone.values() if op.kind != "take"),
        doubted=frozenset(read.lost | gone.keys()),
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
        self._aside = set(read.aside)
        self._done_beyond = set(read.done_beyond)
        # Of objects that are not gone yet: those that have been synced, those whose bytes are lost,
        # and those that are neither.
        gone = {op.object for _, op, _, _ in read.ops if op.kind == "gone"}
        self._believed = read.believed - gone
        self._lost = set(read.lost)
        self._doubtful: set[int] = set()
        # What stands in the file, as long as it is what was read at opening.
        self._read: _Read | None = None
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
        # How long the file was when it was shortened last.
        self._live = 0
        disk = os.fstatvfs(fd)
        least, most = _SCARCE_BYTES
        self._scarce = min(max(disk.f_blocks * disk.f_frsize // _SCARCE_SHARE, least), most)
        self._reserve = Reserve(path.parent)
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
                read, length = _reading(fd, path, boot)
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
                elif read.end < length:
                    log.warning(
                        "journal %s: its last %d bytes are no record, as a crash leaves them; they"
                        " are cut off",
                        path,
                        length - read.end,
                    )
                    os.ftruncate(fd, read.end)
                    os.fsync(fd)
                with suppress(FileNotFoundError):
                    (directory / _STAGED).unlink()
                if read.version < _VERSION:
                    old, fd = fd, _brought_up(path, os.pread(fd, read.end, 0))
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
        gone = read.lost_now(self._boot)
        new: list[dict[str, Any]] = []
        if read.boots[-1:] != [self._boot]:
            new.append({"boot": self._boot})
        if gone:
            new.append({"lost": sorted(gone)})
            self._lost |= gone.keys()
        for record in new:
            self._write(dict(record))
            read.add(record)
        # The source has what was brought of a file that nobody finished writing.
        lost = [op for op in gone.values() if op.kind != "take"]
        ops = [(seq, op) for seq, op, _, _ in read.ops]
        doubted = read.last_of(self._lost)
        if self._lost:
            ops = list(without(ops, self._lost))
        recorded_ns = {seq: ns for seq, _, ns, _ in read.ops}
        undone = [(seq, op) for seq, op in ops if not self._is_done(seq)]
        for _, op in ops:
            self._doubt(op)
        self._undone = {
            seq: (recorded_ns[seq], op.object if op.kind == "content" else 0) for seq, op in undone
        }
        self._replay = Replay(
            ops=tuple(ops),
            done={seq: read.identities.get(seq) for seq, _ in ops if self._is_done(seq)},
            staged={number: frozenset(its) for number, its in read.staged.items()},
            next_object=self._next_object,
            next_ino=self._next_ino,
            lost=tuple(lost),
            recorded_ns={seq: recorded_ns[seq] for seq, _ in undone},
            known=read.known,
            doubted=doubted,
            aside=frozenset(self._aside & self._undone.keys()),
        )
        for op in lost:
            log.error(
                "%r was never synced, and the machine has stopped since: what is left of it is kept"
                " aside, and does not go to the source",
                os.fsdecode(op.path),
            )
        self.sync()
        self._read = read

    def _is_done(self, seq: int) -> bool:
        return seq <= self._done_upto or seq in self._done_beyond

    def replay(self) -> Replay:
        """What was read at opening. It is handed out once, for it may be large."""
        if self._replay is None:
            raise ValueError("what the journal held has been handed out")
        replay, self._replay = self._replay, None
        return replay

    def taken_up(self) -> None:
        """Who has opened it knows what it held: nothing of that is kept any more."""
        self._replay = self._read = None

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
        failpoints.failpoint("journal-appended")
        self._next_seq += 1
        self._next_object = max(self._next_object, op.object + 1)
        self._next_ino = max(self._next_ino, op.ino + 1)
        content = op.object if op.kind == "content" else 0
        self._undone[seq] = (now, content)
        if content and op.synced:
            self._believed.add(content)
        self._doubt(op)
        if op.kind == "gone":
            # Its number is never used again.
            self._believed.discard(op.object)
        return seq

    def _doubt(self, op: Op) -> None:
        """Keep what a power cut would take."""
        if op.object in self._believed or op.through or op.kind in ("gone", "through"):
            self._doubtful.discard(op.object)
        elif op.kind in ("create", "take", "content"):
            self._doubtful.add(op.object)

    @property
    def doubtful(self) -> frozenset[int]:
        """Objects that are recorded and have been synced never, as far as is said here."""
        return frozenset(self._doubtful)

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
        is_further, self._done_upto = upto > self._done_upto, upto
        self._done_beyond.update(also)
        if self._done_beyond and is_further:
            self._done_beyond = {seq for seq in self._done_beyond if seq > upto}
        contents: dict[int, int] = {}
        over = [*itertools.takewhile(lambda seq: seq <= upto, self._undone), *also]
        for seq in over:
            _, contents[seq] = self._undone.pop(seq, (0, 0))
        for seq, identity in done.items():
            if identity is not None and (number := contents.get(seq, 0)):
                self._believed.add(number)
                self._doubtful.discard(number)

    def mark_aside(self, seqs: Iterable[int]) -> None:
        """Record which of the changes that the source refuses are set aside: these, and no others.

        Raises OSError.
        """
        aside = set(seqs)
        if aside != self._aside:
            self._write({"done": self._done_upto, "aside": sorted(aside)})
            self._aside = aside

    def mark_staged(self, *marks: tuple[int, Identity]) -> None:
        """Record that files of the source are ours and about to get the names of objects.

        Raises OSError.
        """
        self._write(*({"staged": [number, *_told(staged)]} for number, staged in marks))

    def mark_durable(self, *numbers: int) -> None:
        """Record that objects have been synced since they were recorded. Raises OSError."""
        if new := sorted({*numbers} - self._believed):
            self._write({"believed": new})
            self._believed.update(new)
            self._doubtful.difference_update(new)

    def mark_lost(self, number: int) -> None:
        """Record that the tier has lost the bytes of an object: what happened to its file is not
        among the changes that another life reads. Raises OSError."""
        self._write({"lost": [number]})
        self._lost.add(number)

    def _write(self, *records: dict[str, Any]) -> None:
        with self._lock:
            self._read = None
            if self._synced > self._said:
                records[0]["upto"] = self._synced
            lines = b"".join(map(_line, records))
            self._want_room(len(lines))
            try:
                self._put(lines)
            except OSError as error:
                if error.errno not in _FULL or not self._reserve.give_up():
                    raise
                self._put(lines)
            self._end += len(lines)
            self._written += len(records)
            self._said = self._synced

    def _put(self, lines: bytes) -> None:
        written = os.pwrite(self._fd, lines, self._end)
        if written < len(lines):
            # The disk is full. Half a record must not stand before the next.
            os.ftruncate(self._fd, self._end)
            self._room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))

    def has_room(self) -> bool:
        """Whether a change may be recorded that takes room of the disk, and is no removal."""
        with self._lock:
            return self._want_room(_LONGEST_CHANGE)

    def _want_room(self, count: int) -> bool:
        """Have room for so many bytes, and for what must be said then; whether there is."""
        wanted = count + self._scarce
        if self._end + wanted <= self._room:
            return True
        try:
            disk, status = os.fstatvfs(self._fd), os.fstat(self._fd)
        except OSError:
            return True
        available = disk.f_bavail * disk.f_frsize
        length = max(2 * wanted, min(_AHEAD_BYTES, available // _AHEAD_SHARE))
        # What an earlier life has asked for is there still.
        is_there = max(0, status.st_blocks * _BLOCK - self._end)
        for size in (length, wanted):
            if size - is_there <= available and self._allocated(size):
                self._room = self._end + size
                return True
        return False

    def _allocated(self, size: int) -> bool:
        offset, length = ctypes.c_longlong(self._end), ctypes.c_longlong(size)
        if _LIBC.fallocate(self._fd, _FALLOC_FL_KEEP_SIZE, offset, length) == 0:
            return True
        # Not every file system can.
        return ctypes.get_errno() not in _FULL

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
        failpoints.failpoint("journal-synced")

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
        read = self._read_to(position)
        if known is not None:
            read.known = known
        self._write_anew(lambda: _first_of(read, kept, self._boot), kept, position)
        failpoints.failpoint("journal-compacted")

    @property
    def is_long(self) -> bool:
        """Whether most of it may be left out by ``shorten``."""
        return self._end > max(_LONG_BYTES, _LONG_TIMES * self._live)

    def shorten(self) -> None:
        """Write the journal anew without what does not matter any more. From any thread.

        Syncs wait for no more than a rename. Raises OSError.
        """
        position = self._end
        read = self._read_to(position)
        ops = [(seq, op) for seq, op, _, _ in read.ops]
        is_done = (seq for seq, _ in ops if seq <= read.done_upto or seq in read.done_beyond)
        kept = shortened(ops, {seq: read.identities.get(seq) for seq in is_done})
        self._write_anew(lambda: _first_of(read, kept, self._boot), kept, position)
        self._live = self._end
        failpoints.failpoint("journal-compacted")

    def _read_to(self, position: int) -> _Read:
        """What stands in the file before ``position``. Raises OSError."""
        with self._lock:
            if self._read is not None:
                return self._read
            content = os.pread(self._fd, position, 0)
        read = _Read.of(content, self._path, self._boot)
        assert read is not None
        return read

    def _write_anew(
        self,
        first: Callable[[], Iterator[dict[str, Any]]],
        kept: Iterable[tuple[int, Op]],
        position: int,
    ) -> None:
        """``first`` in the place of all before ``position``; ``kept`` are the changes in it."""
        seqs = {seq for seq, _ in kept}
        try:
            self._replace(first(), seqs, position)
        except OSError as error:
            if error.errno not in _FULL or not self._reserve.give_up():
                raise
            self._replace(first(), seqs, position)

    def _replace(self, first: Iterator[dict[str, Any]], seqs: set[int], position: int) -> None:
        with self._lock:
            end, undone = self._end, list(self._undone)
        tail = [*self._records(position, end)]
        known = seqs | {record["seq"] for record in tail if "seq" in record}
        missing = [seq for seq in undone if seq not in known]
        if missing:
            raise ValueError(f"{missing[0]} is not done yet and would be forgotten")
        staged = self._path.with_name(_STAGED)
        fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._append_to(fd, itertools.chain(first, tail))
            os.fdatasync(fd)
            failpoints.failpoint("journal-staged")
            with self._turn:
                while self._syncing:
                    self._turn.wait()
                self._syncing = True
            try:
                fd = self._take_over(fd, staged, end)
            finally:
                self._end_turn()
        except OSError:
            with suppress(OSError):
                staged.unlink()
            raise
        finally:
            os.close(fd)

    def _take_over(self, fd: int, staged: Path, end: int) -> int:
        """Go on in another file, which has all up to ``end``; the descriptor of the one before."""
        with self._lock:
            later = self._end
        if self._append_to(fd, self._records(end, later)):
            os.fdatasync(fd)
        with self._lock:
            if self._fd < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            # What came meanwhile has not been synced, nobody was promised that it is.
            synced = os.fstat(fd).st_size
            late = self._append_to(fd, self._records(later, self._end))
            staged.rename(self._path)
            fd, self._fd = self._fd, fd
            self._end = os.fstat(self._fd).st_size
            self._synced, self._said, self._room = synced, 0, 0
            self._durable = self._written - late
            self._failed = None
        # Before anybody is told that something in it is safe.
        with _directory(self._path.parent) as directory:
            os.fsync(directory)
        return fd

    @staticmethod
    def _append_to(fd: int, records: Iterable[dict[str, Any]]) -> int:
        """How many there were."""
        lines = [_line(record) for record in records]
        with open(fd, "ab", closefd=False) as file:
            file.writelines(lines)
        return len(lines)

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
        # A thread that shortens it may go on: it must not replace what is another's by then.
        with self._lock:
            fd, self._fd = self._fd, -1
            os.close(fd)


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
        self.aside: set[int] = set()
        self.staged: dict[int, set[Identity]] = {}
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
                    read.add(record)
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

    def add(self, record: dict[str, Any]) -> None:
        """One more record. Raises ValueError, KeyError or TypeError if it is none."""
        if "op" in record:
            seq, op = int(record["seq"]), from_record(record)
            self.ops.append((seq, op, int(record["ns"]), self.boots[-1]))
            if op.kind == "content":
                self._contents[seq] = op.object
                if op.synced:
                    self.believed.add(op.object)
            self.next_seq = max(self.next_seq, seq + 1)
            self.next_object = max(self.next_object, op.object + 1)
            self.next_ino = max(self.next_ino, op.ino + 1)
        elif "done" in record:
            self.done_upto = int(record["done"])
            self.aside = set(record.get("aside", self.aside))
            self.done_beyond |= set(record.get("also", ()))
            if self.done_beyond:
                self.done_beyond = {seq for seq in self.done_beyond if seq > self.done_upto}
            for seq, size, mtime_ns, ctime_ns, source_ino in record.get("at", ()):
                self.identities[seq] = Identity(size, mtime_ns, ctime_ns, source_ino)
                if number := self._contents.pop(seq, 0):
                    self.believed.add(number)
                    self.staged.pop(number, None)
        elif "staged" in record:
            number, *told = map(int, record["staged"])
            self.staged.setdefault(number, set()).add(_staged(*told))
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
        believed = self.believed | self.lost
        recorded = set()
        for _, op, _, recorded_boot in self.ops:
            if op.kind in ("create", "take", "content"):
                recorded.add(op.object)
                if recorded_boot == boot:
                    believed.add(op.object)
        return {number: op for number, (op, _) in self.last_of(recorded - believed).items()}

    def last_of(self, objects: Collection[int]) -> dict[int, tuple[Op, int]]:
        """What was recorded last of those of ``objects`` that have a name, and when; with the names
        that they have in the end."""
        last: dict[int, tuple[Op, int]] = {}
        if not objects:
            return last
        for _, op, recorded_ns, _ in self.ops:
            if op.object not in objects or op.kind not in ("create", "take", "content"):
                continue
            if op.kind == "content" or op.object not in last:
                last[op.object] = op, recorded_ns
        names = names_of([(seq, op) for seq, op, _, _ in self.ops], last)
        return {
            number: (replace(last[number][0], path=found[0], paths=tuple(found)), last[number][1])
            for number, found in names.items()
        }


# What ``look`` has read last, and of which file: a mount looks before it opens.
_LOOKED: dict[tuple[int, ...], _Read] = {}


def _reading(fd: int, path: Path, boot: str, *, keep: bool = False) -> tuple[_Read | None, int]:
    """What stands in an open journal, and how long it is; with ``keep`` who opens the same file
    next need not read it again. Raises OSError, TierError."""
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    read = _LOOKED.pop(key, None)
    if read is None:
        with open(fd, "rb", closefd=False) as file:
            content = file.read()
        read, size = _Read.of(content, path, boot), len(content)
    else:
        size = status.st_size
    _LOOKED.clear()
    if keep and read is not None and size == status.st_size:
        _LOOKED[key] = read
    return read, size


def _first_of(read: _Read, kept: Sequence[tuple[int, Op]], boot: str) -> Iterator[dict[str, Any]]:
    """What takes the place of all that was read, with ``kept`` of its changes."""
    seqs = {seq for seq, _ in kept}
    objects = {*objects_of(kept)}
    yield _header(read.token, read.source, read.next_seq, read.next_object, read.next_ino)
    if believed := read.believed & objects:
        yield {"believed": sorted(believed)}
    if read.lost:
        yield {"lost": sorted(read.lost)}
    if read.known is not None:
        yield read.known.record()
    yield {"boot": boot}
    recorded_ns = {seq: ns for seq, _, ns, _ in read.ops}
    for seq, op in kept:
        yield {"seq": seq, "ns": recorded_ns.get(seq, 0), **to_record(op)}
    if read.done_upto or read.done_beyond or read.aside:
        yield {
            "done": read.done_upto,
            "aside": sorted(read.aside & seqs),
            "also": sorted(read.done_beyond & seqs),
            "at": [
                [seq, it.size, it.mtime_ns, it.ctime_ns, it.source_ino]
                for seq, it in read.identities.items()
                if seq in seqs
            ],
        }
    # Behind the marks: one of a content says that what was staged before it has come.
    for number in read.staged.keys() & objects:
        for staged in read.staged[number]:
            yield {"staged": [number, *_told(staged)]}


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


def _told(staged: Identity) -> tuple[int, int, int]:
    """A staged file of the source, as a record has it."""
    return staged.source_ino, staged.size, staged.mtime_ns


def _staged(source_ino: int, size: int = ANY_SIZE, mtime_ns: int = 0) -> Identity:
    """The inverse; an older journal has the number alone."""
    return Identity(size, mtime_ns, 0, source_ino)


def _line(record: Mapping[str, Any]) -> bytes:
    content = _ENCODED(record).encode("ascii")
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
    # TIER/monarch may be as new as that.
    for path in (directory, directory.parent, directory.parent.parent):
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
