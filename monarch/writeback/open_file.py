"""A written file that is open: its counts, and the place of its bytes.

The bytes are in an object of the tier (``ObjectBytes``), in a staged file at the source
(``StagedBytes``), or under the file's name at the source (``SourceBytes``). The three have the same
methods, so that no caller asks which of them it is.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix.credentials import Credentials, least_of
from monarch.tiers.source import SourceFile
from monarch.transfer.source_calls import SourceCalls
from monarch.types import Ino
from monarch.writeback.tier_objects import TierObjects

Args = TypeVarTuple("Args")
T = TypeVar("T")

# An offset that no file has.
UNTOUCHED = 2**64 - 1
# The kernel sends the release of a file after the process has closed it. The time in which it must
# come, as the pauses between questions for it, in seconds: 1 s in all, and a last question.
RELEASE_PAUSES_S = (0.001, 0.002, 0.004, 0.008, 0.016, *[0.032] * 30, 0.0)


class FastWrites(Protocol):
    """What a datapath does for written files: it reads and writes a duplicate of ``fd``, and opens
    those that it knows the object of by itself, to read.

    ``written`` counts what has changed the bytes of one since it was bound, until it is released;
    ``lowest`` is the lowest offset at which it did so.
    """

    def bind(self, ino: Ino, fd: int, *, tier: int, size: int) -> bool: ...
    def bind_written(self, ino: Ino, fd: int, *, tier: int, create: bool, writer: int) -> bool: ...
    def know_set_id(self, ino: Ino, *, has_set_id: bool) -> None: ...
    def written(self, ino: Ino) -> int: ...
    def lowest(self, ino: Ino, *, forget: bool) -> int: ...
    def set_objects(self, directory: int, *, tier: int) -> None: ...
    def know_object(self, ino: Ino, number: int) -> bool: ...
    def forget_object(self, ino: Ino) -> None: ...
    def name_given(self, parent: Ino, name: bytes) -> None: ...
    def name_taken(self, parent: Ino, name: bytes) -> None: ...
    def forget_attributes(self, ino: Ino) -> None: ...
    def serve_missing(self, directory: Ino, *, valid_s: int, for_s: float) -> None: ...
    def is_open(self, ino: Ino) -> bool: ...
    def outdate(self, ino: Ino) -> bool: ...
    def release_written(self, ino: Ino) -> None: ...
    def unbind(self, ino: Ino) -> bool: ...
    def rebind(self, ino: Ino, fd: int, *, tier: int) -> bool: ...


class _NoFastWrites:
    """Where there is no datapath: Python does all."""

    def _no(self, *args: object, **options: object) -> bool:
        return False

    def _nothing(self, *args: object, **options: object) -> None: ...

    def written(self, ino: Ino) -> int:
        return 0

    def lowest(self, ino: Ino, *, forget: bool) -> int:
        return UNTOUCHED

    bind = bind_written = know_object = is_open = outdate = unbind = rebind = _no
    set_objects = forget_object = release_written = know_set_id = _nothing
    name_given = name_taken = forget_attributes = serve_missing = _nothing


NO_FAST_WRITES: FastWrites = _NoFastWrites()


def set_times(fd: int, atime_ns: int, mtime_ns: int) -> None:
    """Sets the times of an open file, in ns since the epoch. Raises OSError."""
    os.utime(fd, ns=(atime_ns, mtime_ns))


@dataclass(slots=True, eq=False)
class FileBytes(ABC):
    """Where the bytes of an open file are; ``fd`` is open there. Raises Refused or SourceError."""

    fd: int
    is_write_through = is_from_source = False

    @abstractmethod
    async def run(self, function: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        """``function(fd, *args)`` in a thread."""

    @abstractmethod
    async def sync(self, node: Node) -> int:
        """Make the bytes safe; their number before. Once that has failed it fails again."""

    @abstractmethod
    def close(self) -> None: ...

    async def set_times(self, atime_ns: int, mtime_ns: int) -> None:
        await self.run(set_times, atime_ns, mtime_ns)

    def keep_status(self, node: Node) -> bool:
        """Take over size, blocks and times; whether this place tells them."""
        return False


@dataclass(slots=True, eq=False)
class ObjectBytes(FileBytes):
    """In an object of the absorbing tier."""

    _number: int
    _objects: TierObjects

    async def run(self, function: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        return await self._objects.run(function, self.fd, *args)

    async def set_times(self, atime_ns: int, mtime_ns: int) -> None:
        # As quick as the record that follows in the journal, which is on the same disk.
        with self._objects.refusing():
            set_times(self.fd, atime_ns, mtime_ns)

    async def sync(self, node: Node) -> int:
        size = os.fstat(self.fd).st_size
        await self._objects.run_sync(self._objects.on_disk.sync, self._number, self.fd)
        return size

    def keep_status(self, node: Node) -> bool:
        status = os.fstat(self.fd)
        if status.st_mtime_ns != node.mtime_ns:
            node.ctime_ns = max(node.ctime_ns, status.st_mtime_ns)
        node.set_content(status.st_size, blocks=status.st_blocks, mtime_ns=status.st_mtime_ns)
        return True

    def close(self) -> None:
        self._objects.close_soon(self.fd)


@dataclass(slots=True, eq=False)
class StagedBytes(FileBytes):
    """In a staged file at the source, since the tier was full.

    ``before`` is the descriptor of the object that had them, or -1: a read may still be using it.
    """

    _ino: Ino
    _number: int
    _objects: TierObjects
    _calls: SourceCalls
    _before: int
    is_write_through = True

    async def run(self, function: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        return await self._calls.call(self._ino, function, self.fd, *args)

    async def sync(self, node: Node) -> int:
        if failure := self._objects.on_disk.failure(self._number):
            raise Refused(failure)
        size = node.size
        await self.run(os.fsync)
        return size

    def close(self) -> None:
        for fd in (self.fd, self._before):
            if fd >= 0:
                self._objects.close_soon(fd)


@dataclass(slots=True, eq=False)
class SourceBytes(FileBytes):
    """Under the name of a file at the source, whose object was released: they are only read."""

    _file: SourceFile
    _ino: Ino
    _names: Namespace
    _calls: SourceCalls
    is_from_source = True

    async def run(self, function: Callable[[int, Unpack[Args]], T], *args: Unpack[Args]) -> T:
        try:
            paths = self._names.source_paths(self._ino)
        except Refused as error:
            if error.errno != errno.ENOENT:
                raise
            # A file without a name is read as long as it is open. It cannot be opened again.
            return await self._calls.call(self._ino, function, self.fd, *args)
        on = self._calls.source.on
        return await self._calls.call(self._ino, on, self._file, paths, function, *args)

    async def sync(self, node: Node) -> int:
        return node.size

    def close(self) -> None:
        self._file.release()


@dataclass(slots=True, eq=False, repr=False)
class OpenFile:
    """A written file that is open. ``users`` are the opens that were not released.

    ``is_left_out``: its last content was not published, so there must be another. ``changes``
    counts the changes of its bytes that Python made; ``recorded`` is how many there were in all
    when its content was last recorded. A task that changes bytes in Python holds ``turn``.
    ``touched_from`` is the lowest offset that Python has changed since then. ``writers`` are the
    users who have opened it for writing, the first one first. ``earlier_place`` is where its
    readers read the bytes before it got an object; a read may still be using it.
    """

    node: Node
    place: FileBytes
    _fast: FastWrites
    ino: Ino = field(init=False)
    object: int = field(init=False)
    is_left_out: bool = False
    turn: trio.Lock = field(default_factory=trio.Lock)
    users: int = 1
    writers: dict[Credentials, None] = field(default_factory=dict)
    changes: int = 0
    touched_from: int = UNTOUCHED
    recorded: int = 0
    seen: int = 0
    quiet_s: float = 0.0
    earlier_place: FileBytes | None = None

    def __post_init__(self) -> None:
        self.ino, self.object = self.node.ino, self.node.object

    @property
    def is_write_through(self) -> bool:
        return self.place.is_write_through

    @property
    def writer(self) -> Credentials | None:
        """The user with whose rights its bytes are written; None for the daemon's own."""
        return least_of(self.writers)

    def count(self) -> int:
        """How often its bytes were changed since it was opened."""
        return self.changes + self._fast.written(self.ino)

    def touch(self, offset: int) -> None:
        """Bytes from ``offset`` on are about to be changed in Python, or were."""
        self.touched_from = min(self.touched_from, offset)
        self.changes += 1

    def lowest(self, *, forget: bool = False) -> int:
        """The lowest offset at which its bytes were changed since the last call with ``forget``,
        which the recording of its content makes."""
        lowest = min(self.touched_from, self._fast.lowest(self.ino, forget=forget))
        if forget:
            self.touched_from = UNTOUCHED
        return lowest

    @property
    def is_changed(self) -> bool:
        """Whether its bytes were changed since its content was recorded."""
        return self.count() != self.recorded

    def take_over(self, earlier: OpenFile) -> None:
        """Count the users of an open file that is read at the source as users of this one."""
        self.users += earlier.users
        self.earlier_place = earlier.place

    def close(self) -> None:
        """Close the descriptors, after the last release."""
        self.place.close()
        if self.earlier_place is not None:
            self.earlier_place.close()


class OpenTable:
    """Written files that are open, by inode, and how the datapath serves them.

    ``outdated`` are files with pages in the kernel that may be of another version than the source.
    Readers may have files open without Python: those of a closed file whose object the datapath
    knows.
    """

    def __init__(self, fast: FastWrites | None, tier: int) -> None:
        self.files: dict[Ino, OpenFile] = {}
        self._opening: dict[Ino, trio.Event] = {}
        self.outdated: set[Ino] = set()
        self.has_datapath = fast is not None
        self.fast: FastWrites = NO_FAST_WRITES if fast is None else fast
        self.tier = tier

    @contextmanager
    def opening(self, ino: Ino) -> Iterator[None]:
        """While a file is being opened, or must not be: other opens of it wait."""
        done = self._opening[ino] = trio.Event()
        self.fast.forget_object(ino)
        try:
            yield
        finally:
            del self._opening[ino]
            done.set()

    async def get(self, ino: Ino) -> OpenFile | None:
        """The open file of an inode, once no task is opening it."""
        while (file := self.files.get(ino)) is None and ino in self._opening:
            await self._opening[ino].wait()
        return file

    async def wait_for_opening(self, ino: Ino) -> None:
        """Wait until no task is opening a file."""
        while (opening := self._opening.get(ino)) is not None:
            await opening.wait()

    def is_open(self, ino: Ino) -> bool:
        """Whether Python has a file open, or is about to."""
        return ino in self.files or ino in self._opening

    def busy(self) -> set[Ino]:
        """The files for which ``is_open`` returns True."""
        return self.files.keys() | self._opening.keys()

    def is_in_use(self, ino: Ino) -> bool:
        """Whether a process has a file open, or is about to. If not, all opens come to Python."""
        if self.is_open(ino):
            return True
        if not self.fast.is_open(ino):
            self.fast.forget_object(ino)
        # A reader may have come without Python in between.
        return self.fast.is_open(ino)

    def bind(self, file: OpenFile, *, created: bool = False) -> None:
        """Have the datapath serve one more open of a file whose bytes were written."""
        writer = 0 if file.writer is None else file.writer.uid
        self.fast.bind_written(
            file.ino, file.place.fd, tier=self.tier, create=created, writer=writer
        )
