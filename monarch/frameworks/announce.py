"""Announces to a mount of Monarch which files this process will read, and in which order.

The mount may then fetch them before they are opened. On any other file system, and if the mount
refuses, nothing happens: an announcement never raises OSError, and no read depends on it
(docs/hints.md).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from itertools import chain, islice
from typing import Any, TypeAlias

from monarch.foresight.messages import (
    FIRST_ENTRIES,
    MOST_BYTES,
    SAMPLES,
    Begin,
    encode_begin,
    encode_end,
    encode_piece,
    encode_progress,
    entries_of_a_piece,
    request_number,
)

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_PIECE = entries_of_a_piece(4)
# The pieces that are sent with each progress.
_MORE_PIECES = 4
# Progress is sent after so many entries, or after this time in seconds.
_STEP_ENTRIES = 4096
_STEP_S = 1.0
# Listings that are kept, and paths that are taken together: each directory is listed once for them.
_KEPT_LISTINGS = 8
_TOGETHER = 1 << 18
# The errors of a call for a path that leads to no file: ValueError if no file name has such bytes.
_NO_FILE = (OSError, ValueError)
# The mount has no room now, or the process no free descriptor, and may have later.
_LATER = frozenset((errno.ENOSPC, errno.EBUSY, errno.EMFILE, errno.ENFILE))
# How often a message is sent while other processes send too many, and the interval in seconds.
_TRIES, _RETRY_S = 5, 0.01
_UNKNOWN = 0
# The files whose numbers are compared at the begin of an order: at least so many, if there are.
_COMPARED = 16
# The first files of an order are announced before any directory is listed.
FIRST_FILES = 16


class Inodes:
    """The inode numbers of files in one mount, from listings, without a stat of each file.

    ``device`` is that of the first directory that can be listed; 0 before. A file of another
    device, or that cannot exist or does not, has the number 0.
    """

    def __init__(self) -> None:
        self.device = 0
        self.directory: bytes | None = None
        self._listings: dict[bytes, dict[bytes, int]] = {}

    def of(self, path: AnyPath) -> int:
        directory, name = _split(_encoded(path))
        return self._in(directory).get(name, _UNKNOWN)

    def now(self, path: AnyPath) -> int:
        """As ``of``, by a stat of the file."""
        try:
            found = os.stat(path)
        except _NO_FILE:
            return _UNKNOWN
        return found.st_ino if found.st_dev == self.device else _UNKNOWN

    def of_first(self, paths: Iterable[AnyPath]) -> array[int]:
        """As ``of_all``, by a stat of each file: for a few files. No directory is listed."""
        inos = array("Q")
        for path in paths:
            directory, _ = _split(_encoded(path))
            with suppress(*_NO_FILE):
                if not self.device:
                    self.device, self.directory = os.stat(directory or b".").st_dev, directory
            inos.append(self.now(path))
        return inos

    def _in(self, directory: bytes) -> dict[bytes, int]:
        """The entries of a directory."""
        listing = self._listings.get(directory)
        if listing is None:
            while len(self._listings) >= _KEPT_LISTINGS:
                del self._listings[next(iter(self._listings))]
            listing = self._listings[directory] = self._listed(directory or b".")
        return listing

    def of_all(self, paths: Iterable[AnyPath]) -> array[int]:
        """The numbers of many files, whose directories may come in any order."""
        inos, source = array("Q"), iter(paths)
        while taken := list(islice(source, _TOGETHER)):
            places: dict[bytes, list[tuple[int, bytes]]] = {}
            for place, path in enumerate(taken):
                directory, name = _split(_encoded(path))
                places.setdefault(directory, []).append((place, name))
            found = array("Q", bytes(8 * len(taken)))
            for directory, of_directory in places.items():
                listing = self._in(directory)
                for place, name in of_directory:
                    found[place] = listing.get(name, _UNKNOWN)
            inos += found
        return inos

    def _listed(self, directory: bytes) -> dict[bytes, int]:
        with suppress(*_NO_FILE):
            device = os.stat(directory).st_dev
            if self.device in (0, device):
                with os.scandir(directory) as entries:
                    self.device, self.directory = device, self.directory or directory
                    return {entry.name: self._inode(entry) for entry in entries}
        return {}

    def _inode(self, entry: os.DirEntry[bytes]) -> int:
        return self.now(entry.path) if entry.is_symlink() else entry.inode()


def _send(directory: bytes, message: bytes) -> None:
    """Sends a message to the mount that has ``directory``. The directory is open during the call
    only: while a process has a directory of a mount open, the mount cannot be unmounted. Raises
    OSError."""
    assert len(message) <= MOST_BYTES
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, request_number(len(message)), bytearray(message), True)
    finally:
        os.close(fd)


def _absolute(path: bytes) -> bytes:
    """A path that stays right when the process changes its directory. Raises OSError."""
    return path if os.path.isabs(path) else os.path.join(os.getcwdb(), path)


def _encoded(path: AnyPath) -> bytes:
    """The bytes of a path; those of a path that no file has for text that no file name has."""
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:
        return b"\0/"


def _split(path: bytes) -> tuple[bytes, bytes]:
    """As ``os.path.split``, and faster for a usual path."""
    at = path.rfind(b"/")
    if at < 1 or path[at - 1 : at] == b"/":
        return os.path.split(path)
    return path[:at], path[at + 1 :]


class Announcement:
    """An order that is announced until ``close``, or until this process ends. A process that was
    forked from this one cannot change it. Not thread-safe.

    ``inos`` are the inode numbers of the files in the order of the reads, 0 for an unknown file;
    ``directory`` is one of the mount. ``entries`` is the length of an order that ``append``
    continues, 0 if it is unknown. ``is_sent``: the mount has accepted the order so far.
    """

    def __init__(
        self,
        directory: AnyPath,
        inos: Sequence[int],
        *,
        unit: int = SAMPLES,
        entries: int | None = None,
    ) -> None:
        # The entries from ``_first`` on.
        self._inos = inos
        self._order = secrets.randbits(32)
        self._first = self._sent = self._read = 0
        self._reported_s = time.monotonic()
        self._process = os.getpid()
        # The order ends when this descriptor, of a pipe, is closed. -1: closed.
        self._fd = -1
        try:
            self._directory = _absolute(os.fsencode(directory))
            self._fd, other = os.pipe()
        except OSError:
            return
        os.close(other)
        count = len(inos) if entries is None else entries
        if not self._send(encode_begin(Begin(self._order, self._fd, unit, count))):
            self._abandon()
        self._extend(self._first_pieces())

    @property
    def is_sent(self) -> bool:
        return self._fd >= 0

    def progress(self, entries: int) -> None:
        """This process has read the first ``entries`` of the order, and perhaps more. The mount
        also sees the opens, so this need not be called; it costs nothing to call it often."""
        now = time.monotonic()
        step = entries - self._read
        if not self.is_sent or step <= 0:
            return
        if step < _STEP_ENTRIES and now - self._reported_s < _STEP_S:
            return
        self._read, self._reported_s = entries, now
        self._extend(_MORE_PIECES)
        if entries <= self._sent:
            self._send(encode_progress(self._order, entries))

    def append(self, inos: Sequence[int]) -> None:
        """Continues the order, with numbers as those of the constructor. Without any this sends
        what is left, and asks whether the mount still has the order."""
        if inos:
            self._inos = array("Q", [*self._inos[self._sent - self._first :], *inos])
            self._first = self._sent
        self._extend(max(_MORE_PIECES, self._first_pieces()))
        if not inos:
            self._send(encode_piece(self._order, self._sent, ()))

    def close(self) -> None:
        """Ends the order."""
        self._send(encode_end(self._order))
        self._abandon()

    def __del__(self) -> None:
        # The constructor may have failed.
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy announces nothing: the descriptor belongs to this object, which closes it."""
        return {**vars(self), "_fd": -1}

    def _first_pieces(self) -> int:
        """The pieces that are still to be sent at the begin."""
        return -(-(FIRST_ENTRIES - self._sent) // _PIECE)

    def _extend(self, pieces: int) -> None:
        """Sends the next entries, as far as the mount has room."""
        for _ in range(pieces):
            start = self._sent - self._first
            part = self._inos[start : start + _PIECE]
            if not part:
                return
            if max(part) >= 1 << 32:
                part = part[: entries_of_a_piece(8)]
            if not self._send(encode_piece(self._order, self._sent, part)):
                return
            self._sent += len(part)

    def _send(self, message: bytes) -> bool:
        if self._fd < 0 or os.getpid() != self._process:
            return False
        for _ in range(_TRIES):
            try:
                _send(self._directory, message)
            except OSError as error:
                if error.errno not in _LATER:
                    self._abandon()
                if error.errno != errno.EBUSY:
                    return False
                time.sleep(_RETRY_S)
            else:
                return True
        return False

    def _abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def announce(paths: Iterable[AnyPath], *, unit: int = SAMPLES) -> Announcement | None:
    """Announces that this process will read the files ``paths`` in this order, each as a whole.

    None if no file was found, or if they are not in a mount of Monarch. The order ends when the
    result is closed or not used any more. Never raises OSError, nor for a path that no file has.
    """
    inodes, files = Inodes(), iter(paths)
    known = list(islice(files, FIRST_ENTRIES))
    entries = len(paths) if isinstance(paths, Sized) else len(known)
    first = inodes.of_first(known[:FIRST_FILES])
    begun = announce_inodes(inodes, first, unit=unit, entries=entries)
    if begun is None and any(first):
        return None
    rest = inodes.of_all(chain(known[FIRST_FILES:], files))
    if begun is None:
        return announce_inodes(inodes, first + rest, unit=unit)
    begun.append(rest)
    return begun if begun.is_sent else None


def announce_inodes(
    inodes: Inodes, inos: Sequence[int], *, unit: int = SAMPLES, entries: int | None = None
) -> Announcement | None:
    """As ``announce``, for numbers from ``inodes``. ``entries`` as in ``Announcement``."""
    if inodes.directory is None or not any(inos):
        return None
    announcement = Announcement(inodes.directory, inos, unit=unit, entries=entries)
    return announcement if announcement.is_sent else None


class LatestAnnouncement:
    """The last order of a sequence of them, such as the epochs of a data set: it ends when the next
    one begins, or when this object is not used any more."""

    def __init__(self, unit: int = SAMPLES) -> None:
        self._unit = unit
        self.now: Announcement | None = None

    def announce(self, paths: Iterable[AnyPath]) -> None:
        self.close()
        self.now = announce(paths, unit=self._unit)

    def close(self) -> None:
        if self.now is not None:
            self.now.close()
        self.now = None


class AnnouncedFiles:
    """The files of the samples of a data set, by index, and the order that is announced now.

    ``path_of`` returns the path of a sample. The first order asks it for all ``count`` samples. So
    does an order after the mount, or its snapshot, was replaced by another one: the numbers of
    some files are compared.
    """

    def __init__(self, path_of: Callable[[int], AnyPath], count: int) -> None:
        self._path_of = path_of
        self._count = count
        self._inodes = Inodes()
        self._inos: array[int] | None = None
        self._now: Announcement | None = None
        # The number of entries that are announced, and the last of them that were expected only.
        self._end = 0
        self._expected = array("Q")

    def announce(
        self, indices: Sequence[int], following: Sequence[int] = (), begun: int | None = 0
    ) -> Callable[[int], None] | None:
        """Announces the samples ``indices`` in this order, and ``following`` as those that are
        expected after them. If ``indices`` are those that were expected, the order continues;
        otherwise it ends, and another begins.

        Returns a function that is to be called with the number of ``indices`` that were read, as
        ``Announcement.progress``; None if nothing is announced. ``begin`` has announced the first
        ``begun`` of them.
        """
        if self._inos is None or not self._is_current(self._inos):
            begun = begun or self.begin(indices[:FIRST_FILES], len(indices) + len(following))
            if begun is None:
                return None
            self._inos = self._inodes.of_all(map(self._path_of, range(self._count)))
        known = self._inos
        inos, more = (array("Q", [known[index] for index in each]) for each in (indices, following))
        is_continued, announcement = bool(begun) or inos == self._expected, self._now
        first = 0 if begun else self._end - len(inos)
        if announcement is not None and is_continued:
            announcement.append(inos[begun:] + more if begun else more)
        if announcement is None or not (is_continued and announcement.is_sent):
            # Or the mount has ended the order meanwhile.
            self.close()
            first, announcement = 0, announce_inodes(self._inodes, inos + more)
        self._now, self._expected = announcement, more
        self._end = first + len(inos) + len(more)
        if announcement is None:
            return None
        return lambda entries: announcement.progress(first + entries)

    def begin(self, indices: Sequence[int], entries: int) -> int | None:
        """Announces the first samples of an order of ``entries``; returns how many, 0 if they have
        no files, None if the mount does not accept them."""
        self.close()
        self._inodes = Inodes()
        first = self._inodes.of_first(map(self._path_of, indices))
        if not any(first):
            return 0
        self._now = announce_inodes(self._inodes, first, entries=entries)
        return None if self._now is None else len(first)

    def _is_current(self, inos: array[int]) -> bool:
        """Whether some of the files have the numbers that are known; False if none is known."""
        places = range(0, self._count, max(1, self._count // _COMPARED))
        now = (self._inodes.now(self._path_of(place)) == inos[place] for place in places)
        return any(inos) and all(now)

    def close(self) -> None:
        if self._now is not None:
            self._now.close()
        self._now = None
