"""Reads many small files of a directory in one call.

A loop of ``open`` and ``read`` waits for one file after the other, and takes the interpreter for
each. Here threads open, read and close the files, without the interpreter where the C extension is
installed. Files are opened by their names, so permissions hold as for any program, on a mount of
Monarch and in any other directory. Where a mount says so, their copies are read (copies.py).
"""

from __future__ import annotations

import errno
import importlib
import os
import stat
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Union

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from monarch.datasets.copies import Copies, reads_ahead
from monarch.posix.files import SharedFd
from monarch.posix.workers import Workers
from monarch.text import KiB

Name = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Places = npt.NDArray[np.int64]
# The place and size of each file, the bytes that all need, and how many files have none.
Found = tuple[bytes, int, int]
ReadMany = Callable[
    [int, "tuple[Name, ...]", memoryview, bool, int, int, "bytes | array[int]", bool], Found
]


Views = Callable[[memoryview, bytes], "list[memoryview]"]


def _views_in_python(buffer: memoryview, found: bytes) -> list[memoryview]:
    """The view of each file that was read into ``buffer``; of the others a view without a
    meaning."""
    return [buffer[offset : offset + size] for offset, size in struct.iter_unpack("qq", found)]


def _extension() -> tuple[ReadMany | None, Views]:
    try:
        module = importlib.import_module("monarch.datasets._many")
    except ImportError:
        # There was no compiler.
        return None, _views_in_python
    return module.read_many, module.views


_read_many, _views = _extension()

# As many threads begin at once as the process has cores, but no more than one for so many files,
# since a thread costs about as much as reading ten small files. More are started while calls wait
# for a server.
_FILES_A_THREAD = 16
MOST_THREADS = 32

# In the place of an offset: the file could not be read, or there was no room for it. The same in
# _many.c.
_FAILED, _NO_ROOM = -1, -2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

# A buffer has room for files of this size at first, and then for those of the mean of the last
# call, and this share more. Memory that is not written takes no room.
_FIRST_BYTES = 256 * KiB
_SPARE = 1.25
# O_NONBLOCK: the open of a fifo must not wait for a process that writes to it.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Dataset:
    """The files below the directory ``path``, which stays open. Raises OSError.

    At most ``threads`` threads wait for the file system at once. Threads may share the object, and
    so may forked processes. A pickled object opens the directory again, by its absolute path.
    """

    def __init__(self, path: Name, *, threads: int = MOST_THREADS) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._path = os.path.abspath(os.fsencode(path))
        self._threads = threads
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._directory = SharedFd(os.open(self._path, flags), "the data set")
        self._copies = Copies()
        self._reads_ahead: bool | None = None
        self._mean_bytes = float(_FIRST_BYTES)
        # The buffers of the last calls, the newest at the end. One is used again when the caller
        # has no view of it any more. Two: in a loop the caller has those of the call before.
        self._buffers: deque[npt.NDArray[np.uint8]] = deque(maxlen=2)

    def get(self, name: Name) -> memoryview:
        """The bytes of one file. As ``get_many``."""
        return self.get_many((name,))[0]

    def get_many(self, names: Iterable[Name], *, into: Buffer | None = None) -> list[memoryview]:
        """The bytes of the files ``names``, in this order. A name is relative to the directory; it
        may occur several times.

        ``into`` is memory of the caller, as a bytearray, a numpy array or a pinned tensor (its
        numpy view): all bytes are then in it, in any order and without gaps, and the views lead to
        their places. Raises ValueError if they do not fit; ``into`` may be changed then. Without it
        the views are read-only and share one buffer. The bytes of a file are those that it has
        while it is read, up to its size at the open.

        Raises OSError with the name of the first file, in the order of ``names``, that cannot be
        read: also for a directory (EISDIR), and for what is no regular file (EINVAL). Ctrl-C ends
        the call when the calls to the file system that run have ended.
        """
        # The class of a path asks each other class anew.
        if not isinstance(names, list | tuple) and isinstance(names, str | bytes | os.PathLike):
            raise TypeError(f"get_many takes several names, not one: {names!r}; see get")
        wanted = tuple(names)
        # A data set that is closed meanwhile is read to the end of the call.
        kept = self._directory.kept()
        if into is not None:
            return self._fill(kept.fd, wanted, memoryview(into).cast("B"))
        return self._read_new(kept.fd, wanted) if wanted else []

    def _read_new(self, directory: int, names: tuple[Name, ...]) -> list[memoryview]:
        """Reads the files into memory of this object."""
        buffer = self._buffer(len(names) * self._mean_bytes)
        found, needed, unread = self._read(directory, names, buffer.data, has_gaps=True)
        views = _views(buffer.data.toreadonly(), found)
        if unread:
            self._read_rest(directory, names, _places(found), views)
        self._mean_bytes = max(1.0, needed / len(names))
        return views

    def _read_rest(
        self, directory: int, names: tuple[Name, ...], places: Places, views: list[memoryview]
    ) -> None:
        """Replaces the views of the files for which there was no room."""
        left = np.flatnonzero(places[:, 0] == _NO_ROOM)
        while len(left):
            # Their sizes are known now, unless they grow.
            more = np.empty(int(places[left, 1].sum()), np.uint8)
            rest = tuple(names[index] for index in left)
            found, _, _ = self._read(directory, rest, more.data, has_gaps=False)
            places[left] = _places(found)
            again = _views(more.data.toreadonly(), found)
            for index, view in zip(left.tolist(), again, strict=True):
                views[index] = view
            left = left[places[left, 0] == _NO_ROOM]

    def _buffer(self, expected: float) -> npt.NDArray[np.uint8]:
        """A buffer for ``expected`` bytes, and some more. Memory that was used before needs no new
        pages of the kernel. It has half of the spare room at least: the gaps between the files, and
        so the expected bytes, differ a little from call to call."""
        size, least = int(expected * _SPARE), expected * (1 + _SPARE) / 2
        used: list[npt.NDArray[np.uint8]] = []
        found = None
        while found is None:
            try:
                # A list: the number of references from a variable depends on the interpreter. The
                # last one first: the processor's cache may have its memory.
                taken = [self._buffers.pop()]
            except IndexError:
                # There is none, or another thread has taken it.
                break
            # Two: the list, and the argument of the function.
            if sys.getrefcount(taken[0]) != 2:
                used.append(taken[0])
            elif len(taken[0]) >= least:
                found = taken[0]
        if found is None:
            found = _memory(size)
        self._buffers.extend((*reversed(used), found))
        return found

    def _fill(self, directory: int, names: tuple[Name, ...], into: memoryview) -> list[memoryview]:
        found, needed, unread = self._read(directory, names, into, has_gaps=False)
        if unread:
            raise ValueError(
                f"{len(names)} files have {needed:,} bytes, and the buffer {len(into):,}"
            )
        return _views(into, found)

    def _read(
        self, directory: int, names: tuple[Name, ...], buffer: memoryview, *, has_gaps: bool
    ) -> Found:
        """Reads the files into ``buffer``, one behind the other, or with gaps where that is faster.
        Raises OSError."""
        most = min(self._threads, max(1, len(names)))
        found, needed, unread = self._read_at_once(directory, names, buffer, most, has_gaps)
        if unread:
            places = _places(found)
            needed += self._read_again(directory, names, buffer, most, has_gaps, places)
            found, unread = places.tobytes(), _count_unread(places)
            self._require_read(names, places)
        return found, needed, unread

    def _read_at_once(
        self,
        directory: int,
        names: tuple[Name, ...],
        buffer: memoryview,
        most: int,
        has_gaps: bool,
    ) -> Found:
        """Up to ``most`` files at the same time."""
        read = _read_in_python if _read_many is None else _read_many
        cores = len(os.sched_getaffinity(0))
        least = min(most, cores, 1 + len(names) // _FILES_A_THREAD)
        # Kept until all files are read.
        copies = None if _read_many is None else self._copies.now(directory)
        table = b"" if copies is None else copies.table
        if self._reads_ahead is None:
            self._reads_ahead = reads_ahead(directory)
        return read(directory, names, buffer, has_gaps, least, most, table, self._reads_ahead)

    def _read_again(
        self,
        directory: int,
        names: tuple[Name, ...],
        buffer: memoryview,
        most: int,
        has_gaps: bool,
        places: Places,
    ) -> int:
        """Reads the files again for which the process had no free descriptor, fewer at the same
        time. Returns the bytes that they need."""
        needed = 0
        while most > 1 and len(left := _without_descriptor(places)):
            most //= 2
            used = int(places[places[:, 0] >= 0].sum(axis=1).max(initial=0))
            rest = tuple(names[index] for index in left)
            found, more, _ = self._read_at_once(directory, rest, buffer[used:], most, has_gaps)
            again = _places(found)
            again[again[:, 0] >= 0, 0] += used
            places[left] = again
            needed += more
        return needed

    def _require_read(self, names: tuple[Name, ...], places: Places) -> None:
        """Raises OSError for the first file that could not be read."""
        bad = np.flatnonzero(places[:, 0] == _FAILED)
        if len(bad):
            index = int(bad[0])
            number = int(places[index, 1])
            name = os.path.join(self._path, os.fsencode(names[index]))
            raise OSError(number, os.strerror(number), os.fsdecode(name))

    def close(self) -> None:
        """Closes the directory, as soon as no call reads from it. Bytes that were read stay
        valid."""
        self._directory.close()
        self._copies = Copies()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "threads": self._threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Dataset.__init__(self, state["path"], threads=state["threads"])


def open_dataset(path: Name, *, threads: int = MOST_THREADS) -> Dataset:
    """The files below the directory ``path``, to be read many at a time (``Dataset``)."""
    return Dataset(path, threads=threads)


def _places(found: bytes) -> Places:
    """The place and size of each file, of shape (n, 2)."""
    return np.frombuffer(found, np.int64).reshape(-1, 2).copy()


def _without_descriptor(places: Places) -> npt.NDArray[np.int64]:
    """The files for which the process had no free descriptor."""
    has_failed = places[:, 0] == _FAILED
    return np.flatnonzero(has_failed & np.isin(places[:, 1], _NO_DESCRIPTOR))


def _count_unread(places: Places) -> int:
    return int(np.count_nonzero(places[:, 0] < 0))


def _memory(size: int) -> npt.NDArray[np.uint8]:
    """``size`` bytes, or less if there are not so many: the size is an estimate, and files
    without room are read again when their sizes are known. Raises MemoryError."""
    while True:
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            if size <= _FIRST_BYTES:
                raise
            size //= 4


# -- without the C extension -----------------------------------------------------------------------


def _read_in_python(
    directory: int,
    names: tuple[Name, ...],
    buffer: memoryview,
    has_gaps: bool,
    least: int,
    most: int,
    copies: bytes | array[int],
    ahead: bool,
) -> Found:
    """As ``read_many`` of _many.c, in threads of the interpreter, without copies and gaps."""
    places = np.zeros((len(names), 2), np.int64)
    with Workers[bytes | int](most) as workers:
        contents = workers.map(partial(_content, directory), map(os.fsencode, names))
        used = needed = 0
        for place, content in zip(places, contents, strict=True):
            if isinstance(content, int):
                place[:] = _FAILED, content
                continue
            size = len(content)
            needed += size
            if used + size > len(buffer):
                place[:] = _NO_ROOM, size
                continue
            buffer[used : used + size] = content
            place[:] = used, size
            used += size
    return places.tobytes(), needed, _count_unread(places)


def _content(directory: int, name: bytes) -> bytes | int:
    """The bytes of a file, or an errno."""
    try:
        fd = os.open(name, _FLAGS, dir_fd=directory)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
            return file.read(status.st_size)
    except OSError as error:
        return error.errno or errno.EIO
