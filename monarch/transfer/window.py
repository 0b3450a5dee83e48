"""The window: files that no tier admits, kept in memory until they are read.

An entry begins with its fetch ahead. It leaves when a reader opens the file, or when no reader is
expected any more. If readers of another order or of another job are expected as well, it stays for
them, as long as no other file needs the room: those read first leave first. So does a file that a
reader has fetched. The bytes count for the buffer between the source and the tiers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from monarch.placement.controller import Controller
from monarch.telemetry.foresight_report import WindowReport
from monarch.tiers.source import SourceFile
from monarch.transfer.queue import Arrival, Buffer
from monarch.types import Identity, Ino


@dataclass(slots=True, eq=False)
class Held:
    """A file in the window, for readers as a ``Flight``. ``content`` is None until it is fetched.
    ``is_read``: a reader has opened it. ``is_kept``: the datapath keeps the bytes for readers.
    ``reader``: for which of several readers it was fetched."""

    ino: Ino
    identity: Identity
    arrival: Arrival | None
    content: bytes | memoryview | None = None
    is_read: bool = False
    is_kept: bool = False
    reader: Hashable = None
    file: SourceFile | None = None
    copied: int = 0


class Window:
    """At most ``most`` bytes; 0 switches it off. Belongs to the event loop.

    ``dropped_files`` and ``dropped_bytes`` were fetched, and left without a reader. ``held_for``
    has the bytes of each reader.
    """

    def __init__(self, controller: Controller, buffer: Buffer, most: int) -> None:
        self.most = most
        self.bytes = 0
        self.served_files = self.served_bytes = 0
        self.dropped_files = self.dropped_bytes = 0
        self.held_for: Counter[Hashable] = Counter()
        # Called when there is more room.
        self.on_room: Callable[[], None] = _nothing
        # Called for a file whose bytes the datapath keeps, when it leaves.
        self.unkeep: Callable[[Ino], None] = _keep
        self._controller = controller
        self._buffer = buffer
        self._held: dict[Ino, Held] = {}
        # Those that were read and stay for another reader, the first read first.
        self._read: OrderedDict[Ino, Held] = OrderedDict()
        self._read_bytes = 0
        self.get = self._held.get

    def __len__(self) -> int:
        return len(self._held)

    def report(self) -> WindowReport:
        return WindowReport(
            files=len(self._held),
            bytes=self.bytes,
            capacity=self.most,
            served_files=self.served_files,
            served_bytes=self.served_bytes,
            dropped_files=self.dropped_files,
            dropped_bytes=self.dropped_bytes,
        )

    def has_room(self, size: int) -> bool:
        """Whether ``begin`` may be called for a file of ``size`` bytes."""
        kept = self.bytes - self._read_bytes
        return kept + size <= self.most

    def begin(
        self, ino: Ino, identity: Identity, arrival: Arrival | None, reader: Hashable = None
    ) -> Held:
        """Adds a file whose fetch begins. Must be followed by ``end``. From now on the datapath
        passes opens of the file to Python."""
        while self._read and self.bytes + identity.size > self.most:
            self.drop(next(iter(self._read.values())))
        held = self._held[ino] = Held(ino, identity, arrival, reader=reader)
        self.held_for[reader] += identity.size
        self.bytes += identity.size
        self._buffer.used += identity.size
        self._controller.hold(ino)
        return held

    def stage(self, ino: Ino, identity: Identity, content: bytes | memoryview) -> bool:
        """Adds a file that a reader has fetched. It makes room for files that are fetched ahead;
        returns False if these leave no room for it."""
        if not self.has_room(identity.size):
            return False
        held = self.begin(ino, identity, None)
        held.content, held.is_read = content, True
        self._read[ino] = held
        self._read_bytes += identity.size
        return True

    def end(self, held: Held, content: bytes | memoryview | None) -> bool:
        """Ends a fetch; without ``content`` the file leaves the window. Returns whether it is in
        the window."""
        if self._held.get(held.ino) is not held:
            self._unkeep(held)
            return False
        held.content = content
        if content is None:
            self._leave(held)
            return False
        return True

    def take_over(self, ino: Ino) -> bool:
        """Gives up a fetch whose call at the source has not begun: a reader makes it."""
        held = self._held.get(ino)
        if held is None or held.arrival is None or not held.arrival.claim():
            return False
        self._leave(held)
        return True

    def read(self, ino: Ino, *, is_last: bool) -> bool:
        """Records that a reader has the bytes of a file; it leaves if that is the last one. Returns
        whether it has left; then the caller must end ``Controller.hold``."""
        held = self._held.get(ino)
        if held is None or held.content is None:
            return False
        self.served_files += 1
        self.served_bytes += len(held.content)
        if not held.is_read:
            held.is_read = True
            self._read[ino] = held
            self._read_bytes += held.identity.size
        if is_last:
            self._remove(held)
        self.on_room()
        return is_last

    def hand_over(self, ino: Ino) -> None:
        """Removes a file whose copy takes over the mark of ``Controller.hold``."""
        self._remove(self._held[ino])
        self.on_room()

    def drop(self, held: Held) -> None:
        """Removes a file that no reader is expected to open."""
        if not held.is_read and held.content is not None:
            self.dropped_files += 1
            self.dropped_bytes += len(held.content)
        self._leave(held)

    def files(self) -> list[Held]:
        """The files in it now."""
        return list(self._held.values())

    def sweep(self, is_expected: Callable[[Held], bool], files: Iterable[Held]) -> list[Ino]:
        """Drops those of ``files`` that are still in it and for which ``is_expected`` returns
        False, and returns their numbers. A fetch under way is left to its end."""
        dropped = []
        for held in files:
            is_here = held.content is not None and self._held.get(held.ino) is held
            if is_here and not is_expected(held):
                self.drop(held)
                dropped.append(held.ino)
        return dropped

    def _leave(self, held: Held) -> None:
        self._remove(held)
        self._controller.release(held.ino)
        self.on_room()

    def _remove(self, held: Held) -> None:
        del self._held[held.ino]
        if self._read.pop(held.ino, None) is not None:
            self._read_bytes -= held.identity.size
        self.held_for[held.reader] -= held.identity.size
        if not self.held_for[held.reader]:
            del self.held_for[held.reader]
        self.bytes -= held.identity.size
        self._buffer.used -= held.identity.size
        self._unkeep(held)

    def _unkeep(self, held: Held) -> None:
        if held.is_kept:
            held.is_kept = False
            self.unkeep(held.ino)


def _keep(ino: Ino) -> None:
    """Until ``unkeep`` is set: there are no such files."""


def _nothing() -> None:
    """Until ``on_room`` is set."""
