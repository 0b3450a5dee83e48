"""Reads a directory tree in the order of a snapshot's inode numbers.

A local file system answers in microseconds: there one thread does everything, since threads would
only compete for the interpreter. A parallel file system needs a round trip for each call: there up
to ``jobs`` threads wait at once. That is measured: the calling thread works alone until calls turn
out to wait, then passes the work to threads and only numbers the results. The entries of wide
directories are read in slices, by several threads.

Work is given out in the order in which it is needed and little of it in advance, so that memory
holds the list of directories to be read and a window of finished slices.
"""

from __future__ import annotations

import errno
import os
import queue
import resource
import stat
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from monarch.config.write_patterns import is_staged
from monarch.errors import SourceError
from monarch.namespace import schema
from monarch.namespace.look import Seen, look, pack_record
from monarch.namespace.numbering import Batch, Numbering, put, remove, u32
from monarch.namespace.snapshot import Snapshot
from monarch.posix import acl
from monarch.posix.acl import NO_ACLS, Acls
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.posix.workers import Threads
from monarch.text import escape_text
from monarch.types import ROOT_INO, Ino

# The number of names read as one piece of work. Pieces are small while the speed of the source is
# unknown, so that a slow source is noticed soon; and while threads share the source, so that the
# last pieces of a directory end together.
_SLICE_ALONE = 256
_SLICE_FIRST = 32
_SLICE_SHARED = 64
_CALLS_UNTIL_KNOWN = 1024

# Calls that take longer than this on average, in seconds, are made in threads ...
_SLOW_SECONDS = 25e-6
# ... whose number is limited by the calls that can wait while the interpreter handles one entry, in
# seconds. An entry takes some 5 us; the value is doubled, since the measured time of a call
# includes the thread's wait for the interpreter.
_SECONDS_PER_THREAD = 10e-6

# Limits of work that is read before its turn, so that memory is bounded.
_DIRECTORIES_AHEAD_PER_JOB = 4
_NAMES_AHEAD = 250_000

# A directory whose times are this close to the begin of the previous scan may have changed once
# more within the same tick of the source's clock, after it was listed.
_RACY_NS = 2_000_000_000
# The most by which the clock of a node may be ahead of the source's.
_AHEAD_NS = 24 * 3600 * 10**9

# Threads whose calls to the source hang are waited for this long at the end, in seconds.
CALL_WAIT_S = 2.0

_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
_UNREADABLE = frozenset({errno.EACCES, errno.EPERM, errno.EIO})

_ENCODING = sys.getfilesystemencoding()
_ENCODING_ERRORS = sys.getfilesystemencodeerrors()


@dataclass(slots=True)
class _Directory:
    """One directory between its discovery and its last batch."""

    ino: Ino
    rank: int
    path: bytes
    device: int
    elsewhere: bool = False  # on another file system, and not to be entered
    before: Ino | None = None  # its inode number in the previous snapshot
    unchanged: bool = False  # the previous snapshot still has its names right
    fd: int = -1
    listed: bool = False
    slices: list[list[bytes]] = field(default_factory=list)
    batches: list[Batch | None] = field(default_factory=list)
    taken: int = 0
    unfinished: int = 0
    kinds: dict[bytes, tuple[int, int]] | None = None


@dataclass(slots=True)
class _Done:
    """One piece of work and the duration of its calls: a listing, a slice, or both for a small
    directory."""

    directory: _Directory
    listing: bool
    index: int
    batch: Batch | None
    calls: int
    seconds: float
    waits: int


class Scan:
    """One pass over the tree beneath ``root_fd``.

    ``previous`` is an earlier snapshot of the same source: directories that have not changed since
    are not listed again. With ``quick`` the entries of such a directory are taken from it as well,
    except directories, hard links and the paths in ``again``. Use as a context manager; the threads
    end with it.
    """

    def __init__(
        self,
        root_fd: int,
        *,
        jobs: int,
        one_file_system: bool = False,
        previous: Snapshot | None = None,
        quick: bool = False,
        again: Collection[bytes] = (),
    ) -> None:
        self._root_fd = root_fd
        self._jobs = max(1, jobs)
        self.one_file_system = one_file_system
        self._previous = previous
        # An entry is taken from a snapshot only if that has all its values.
        self._quick = quick and previous is not None and previous.info().acls is not None
        self._again = again
        # Entries that the previous snapshot has must not be lost because a disk of the source fails
        # now.
        self._tolerated = _UNREADABLE if previous is None else _UNREADABLE - {errno.EIO}
        self._settled_ns = settled_ns(previous) if previous is not None else 0
        self._root_device = 0
        self._numbering = Numbering()
        # The access control lists that the flags of a record refer to.
        self.acls_of = self._numbering.acls_of
        self._devices_with_acls: dict[int, bool] = {}
        self._frontier: deque[_Directory] = deque()
        self._window: deque[_Directory] = deque()
        self._held_names = 0
        self._tasks: queue.SimpleQueue[tuple[_Directory, int | None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done | BaseException] = queue.SimpleQueue()
        self._threads = Threads()
        self._stopping = False
        # Entries that were taken from the previous snapshot without a call, and directories that
        # were not listed, since they have not changed.
        self.reused = 0
        self.unlisted = 0
        self._calls = 0
        self._recent_calls = 0
        self._recent_seconds = 0.0

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping = True
        for _ in range(self._threads.count):
            self._tasks.put(None)
        if self._threads.wait(CALL_WAIT_S):
            for directory in self._window:
                self._close(directory)

    def batches(self) -> Iterator[Batch]:
        """Every entry in the order of inode numbers, the root first. Raises SourceError if the
        source fails as a whole."""
        yield self._root()
        while self._window or self._frontier:
            self._admit()
            head = self._window[0]
            while not head.listed or head.taken < len(head.batches):
                batch = head.batches[head.taken] if head.listed else None
                if batch is None:
                    self._advance()
                    self._admit()
                    continue
                head.batches[head.taken] = None
                head.taken += 1
                self._held_names -= len(batch.names)
                self._number(head, batch)
                yield batch
            self._close(head)
            self._window.popleft()

    def _root(self) -> Batch:
        try:
            status = os.fstat(self._root_fd)
        except OSError as error:
            raise _source_error(b".", error) from error
        self._root_device = status.st_dev
        batch = Batch(ROOT_INO, -1, b"", [b""], bytearray(pack_record(status, ROOT_INO)))
        batch.directory_devices.append((0, status.st_dev))
        try:
            acls = acl.read_beneath(self._root_fd, b"")
        except OSError as error:
            self._close_to_others(b"", batch, 0, error.errno or errno.EIO)
        else:
            if acls != NO_ACLS:
                batch.acls[0] = acls
        before = ROOT_INO if self._previous is not None else None
        self._number(_Directory(ROOT_INO, -1, b"", status.st_dev, before=before), batch)
        return batch

    def _admit(self) -> None:
        """Queues the listing of directories whose turn comes soon."""
        ahead = _DIRECTORIES_AHEAD_PER_JOB * self._jobs if self._threads.count else 1
        while (
            self._frontier
            and len(self._window) < ahead
            and (self._held_names < _NAMES_AHEAD or not self._window)
        ):
            directory = self._frontier.popleft()
            self._window.append(directory)
            self._tasks.put((directory, None))

    def _advance(self) -> None:
        """Does one piece of work, or waits until a thread has done one."""
        if self._threads.count:
            done = self._done.get()
            if isinstance(done, BaseException):
                raise done
        else:
            task = self._tasks.get_nowait()
            if task is None:
                raise AssertionError("only threads get a request to stop")
            done = self._perform(*task)
        directory = done.directory
        if done.listing:
            count = len(directory.slices)
            self._held_names += sum(map(len, directory.slices))
            directory.batches = [None] * count
            directory.unfinished = count
            if done.batch is None:
                for index in range(count):
                    self._tasks.put((directory, index))
            directory.listed = True
        if done.batch is not None:
            index = done.index
            # Names that no longer exist are not held.
            self._held_names -= len(directory.slices[index]) - len(done.batch.names)
            directory.slices[index] = []
            directory.batches[index] = done.batch
            self.reused += done.batch.reused
            directory.unfinished -= 1
            if directory.unfinished == 0:
                self._close(directory)
        self._measure(done)

    def _measure(self, done: _Done) -> None:
        """Starts threads if calls wait for the source."""
        self._calls += done.calls
        self._recent_calls += done.calls
        self._recent_seconds += done.seconds
        if self._recent_calls < _SLICE_FIRST or self._jobs == 1:
            return
        mean = self._recent_seconds / self._recent_calls
        self._recent_calls //= 2
        self._recent_seconds /= 2
        if not self._threads.count and not _is_waiting(mean, done):
            return
        wanted = min(self._jobs, max(2, int(mean / _SECONDS_PER_THREAD)))
        while self._threads.count < wanted:
            self._threads.start(self._work)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None or self._stopping:
                return
            try:
                self._done.put(self._perform(*task))
            except BaseException as error:  # raised again by the thread that asked
                self._done.put(error)
                return

    def _perform(self, directory: _Directory, index: int | None) -> _Done:
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        started = time.perf_counter()
        listing = index is None
        calls = 0
        batch: Batch | None = None
        if index is None:
            calls += 2  # to open it and to list it, at least
            batch = self._list(directory)
            index = 0
        if batch is None and (not listing or len(directory.slices) == 1):
            calls += len(directory.slices[index])
            batch = self._look(directory, directory.slices[index])
            if self._devices_with_acls.get(directory.device):
                calls += len(directory.slices[index])
        if listing and batch is not None:
            # Even a close may wait for the source, so the calling thread must not make it.
            self._close(directory)
        seconds = time.perf_counter() - started
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits
        return _Done(directory, listing, index, batch, calls, seconds, waits)

    def _list(self, directory: _Directory) -> Batch | None:
        """Divides the names of a directory into slices; returns a batch if none must be read."""
        nothing = Batch(directory.ino, directory.rank, directory.path, [], bytearray())
        directory.slices = [[]]
        if directory.elsewhere:
            return nothing
        try:
            directory.fd = open_beneath(
                self._root_fd, directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
            )
            if directory.unchanged and self._previous is not None and directory.before is not None:
                names = self._previous.names(directory.before)
            else:
                # A source may answer with a name twice while the directory changes.
                found = {n.encode(_ENCODING, _ENCODING_ERRORS) for n in os.listdir(directory.fd)}
                names = sorted(name for name in found if not is_staged(name))
        except OSError as error:
            if self._is_gone(error.errno):
                return nothing
            if error.errno in self._tolerated:
                nothing.closed = True
                return nothing
            raise _source_error(directory.path, error) from error
        if not names:
            return nothing
        if self._threads.count:
            step = _SLICE_SHARED
        else:
            step = _SLICE_ALONE if self._calls > _CALLS_UNTIL_KNOWN else _SLICE_FIRST
        directory.slices = [names[i : i + step] for i in range(0, len(names), step)]
        return None

    def _look(self, directory: _Directory, names: list[bytes]) -> Batch:
        batch = Batch(directory.ino, directory.rank, directory.path, names.copy(), bytearray())
        places: Sequence[int] = range(len(names))
        if self._quick and directory.unchanged and self._previous is not None:
            places = self._reuse(directory, batch, self._previous)
        if not places:
            return batch
        asked = tuple([names[place] for place in places])
        without = 0 if self._has_acls(directory) else directory.device
        records, others = look(directory.fd, asked, directory.ino, without)
        if len(asked) == len(names):
            batch.records = records
        else:
            for index, place in enumerate(places):
                record = records[index * schema.RECORD_BYTES : (index + 1) * schema.RECORD_BYTES]
                put(batch.records, place, 0, record)
        gone = 0
        for seen in others:
            place = places[seen.place] - gone
            if not self._complete(directory, batch, place, seen):
                remove(batch, place)
                gone += 1
        return batch

    def _reuse(self, directory: _Directory, batch: Batch, previous: Snapshot) -> list[int]:
        """Takes entries from the previous snapshot; returns the indices of those that it cannot
        prove, by the times of their directory."""
        parent = directory.ino.to_bytes(4, "little")
        before = directory.before
        slot = None if before is None else previous.slot(before, batch.names[0])
        if slot is None:
            raise AssertionError("an unchanged directory has its names from the snapshot")
        places = []
        for place in range(len(batch.names)):
            record, target = previous.reusable(slot)
            slot = Ino(slot + 1)
            path = joined(directory.path, batch.names[place]) if self._again else b""
            if record is None or path in self._again:
                batch.records += bytes(schema.RECORD_BYTES)
                places.append(place)
                continue
            if target is not None:
                batch.link_targets.append((place, target))
            batch.records += parent
            batch.records += record[4:]
            batch.reused += 1
        return places

    def _has_acls(self, directory: _Directory) -> bool:
        known = self._devices_with_acls.get(directory.device)
        if known is None:
            known = self._devices_with_acls[directory.device] = acl.are_known(directory.fd)
        return known

    def _complete(self, directory: _Directory, batch: Batch, place: int, seen: Seen) -> bool:
        """Adds to a batch the values that a record does not have; False if the entry is gone."""
        if seen.error:
            return self._look_failed(directory, batch, place, seen.error)
        mode = u32(batch.records, place, schema.MODE_OFFSET)
        if stat.S_ISDIR(mode):
            batch.directory_devices.append((place, seen.device))
        else:
            if stat.S_ISLNK(mode):
                try:
                    target = os.readlink(batch.names[place], dir_fd=directory.fd)
                except OSError as failure:
                    number = failure.errno or errno.EIO
                    if number == errno.EINVAL:  # another kind of entry has its name now
                        return False
                    return self._look_failed(directory, batch, place, number)
                batch.link_targets.append((place, target))
            if u32(batch.records, place, schema.NLINK_OFFSET) > 1:
                batch.shared_devices.append((place, seen.device))
        if seen.closed:
            self._close_to_others(directory.path, batch, place, seen.closed)
        acls = Acls(acl.stored(seen.access), seen.inherited)
        if acls != NO_ACLS:
            batch.acls[place] = acls
        return True

    def _close_to_others(self, path: bytes, batch: Batch, place: int, number: int) -> None:
        """Closes an entry to all but its owner, since its access control list is unknown."""
        if number in _VANISHED:
            return
        path = joined(path, batch.names[place])
        if number not in self._tolerated:
            raise _source_error(path, OSError(number, os.strerror(number)))
        batch.unreadable.append(path)
        mode = u32(batch.records, place, schema.MODE_OFFSET) & ~0o077
        put(batch.records, place, schema.MODE_OFFSET, mode.to_bytes(4, "little"))

    def _look_failed(self, directory: _Directory, batch: Batch, place: int, number: int) -> bool:
        """Handles an entry that cannot be read; returns False if it no longer exists."""
        if self._is_gone(number):
            return False
        if number not in self._tolerated:
            error = OSError(number, os.strerror(number))
            raise _source_error(joined(directory.path, batch.names[place]), error)
        # Only its name, and perhaps that it is a directory, is known.
        if directory.kinds is None:
            directory.kinds = self._kinds(directory)
        name = batch.names[place]
        kind, source_ino = directory.kinds.get(name, (stat.S_IFREG, 0))
        if kind == stat.S_IFDIR:
            batch.directory_devices.append((place, self._root_device))
        batch.unreadable.append(joined(directory.path, name))
        values = directory.ino, kind, 0, 0, 1, schema.UNREADABLE, 0, 0, 0, source_ino, 0
        put(batch.records, place, 0, schema.RECORD_STRUCT.pack(*values))
        return True

    def _is_gone(self, number: int | None) -> bool:
        """Whether an entry was removed during the scan, but not the whole source."""
        if number == errno.ESTALE:
            try:
                os.fstatvfs(self._root_fd)
            except OSError:
                return False
        return number in _VANISHED

    def _kinds(self, directory: _Directory) -> dict[bytes, tuple[int, int]]:
        kinds: dict[bytes, tuple[int, int]] = {}
        with suppress(OSError):
            # Its own descriptor: the position of directory.fd is used by the listing.
            fd = open_beneath(self._root_fd, directory.path, os.O_RDONLY | os.O_DIRECTORY)
            with closing_fd(fd), os.scandir(fd) as entries:
                for entry in entries:
                    kind = stat.S_IFREG
                    with suppress(OSError):
                        kind = stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else kind
                    kinds[os.fsencode(entry.name)] = (kind, entry.inode())
        return kinds

    def _number(self, directory: _Directory, batch: Batch) -> None:
        """Completes a batch in its turn, and plans the reading of the directories in it."""
        for position, device, ino, rank in self._numbering.complete(batch):
            name = batch.names[position]
            found = _Directory(
                ino,
                rank,
                joined(directory.path, name),
                device,
                elsewhere=self.one_file_system and device != self._root_device,
            )
            if self._previous is not None and directory.before is not None:
                self._compare(found, self._previous, directory.before, name, batch, position)
            self._frontier.append(found)

    def _compare(
        self,
        found: _Directory,
        previous: Snapshot,
        before: Ino,
        name: bytes,
        batch: Batch,
        position: int,
    ) -> None:
        """Looks up the directory ``found`` in the previous snapshot."""
        slot = ROOT_INO if not name else previous.slot(before, name)
        if slot is None or not previous.is_listed_directory(slot):
            return
        found.before = slot
        was = previous.attributes(slot)
        now = schema.RECORD_STRUCT.unpack_from(batch.records, position * schema.RECORD_BYTES)
        found.unchanged = (
            not found.elsewhere
            and (was.mtime_ns, was.ctime_ns, was.source_ino) == (now[7], now[8], now[9])
            and max(was.mtime_ns, was.ctime_ns) < self._settled_ns
        )
        self.unlisted += found.unchanged

    def _close(self, directory: _Directory) -> None:
        if directory.fd >= 0:
            os.close(directory.fd)
            directory.fd = -1


def settled_ns(snapshot: Snapshot) -> int:
    """A directory with earlier times, by the source's clock, has the names of the snapshot as long
    as it has these times.

    The clock of the node that has made the snapshot may be wrong. When its scan began, the source's
    clock was at most as far behind the newest time that the scan has found as the scan took.
    """
    info = snapshot.info()
    begun_ns = snapshot.newest_ns() - int(info.scan_seconds * 1e9)
    return min(info.created_ns, max(begun_ns, info.created_ns - _AHEAD_NS)) - _RACY_NS


def printable(path: bytes) -> str:
    """A path of the source as text for a message."""
    return escape_text(os.fsdecode(path))


def _is_waiting(mean_seconds: float, done: _Done) -> bool:
    """Whether calls wait for the source: they make voluntary context switches. Others are slow for
    lack of a processor. On a cold disk one read of a block serves many calls."""
    return mean_seconds > _SLOW_SECONDS and done.waits * 32 >= done.calls


def joined(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _source_error(path: bytes, error: OSError) -> SourceError:
    number = error.errno or errno.EIO
    return SourceError(
        f"cannot read {printable(path)} in the source: {os.strerror(number)}",
        errno=number,
        hint="check that the source is mounted and answers",
    )
