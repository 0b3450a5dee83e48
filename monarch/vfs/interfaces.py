"""What the file system needs of other parts of the daemon, as protocols.

The datapath, the transfer engine and the tier monitor implement them. This
package imports none of these, so its tests replace each by a few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import TierError
from monarch.placement.controller import Promote
from monarch.tiers.source import SourceFile
from monarch.tiers.tier import Tier
from monarch.transfer.source_load import SourceTraffic
from monarch.types import Identity, Ino

Args = TypeVarTuple("Args")
T = TypeVar("T")

# One event of the datapath: an inode, a number, bytes, and of the process that opened the file its
# number, its session (0: unknown) and its user. The first number is the tier that served an open.
# With bytes, the file was fetched from the source or from another node. Two numbers are no tier: an
# open that was answered here failed later, or the last open of an outdated version was released.
Served = tuple[Ino, int, memoryview | None, int, int, int]
ABANDONED = 0xFD
RELEASED = 0xFF


@dataclass(frozen=True, slots=True)
class Tally:
    """What was served from one tier so far. The counts are by bucket of ``metrics.BUCKETS_S``."""

    opens: int
    reads: int
    bytes: int
    open_counts: list[int]
    open_ns: int
    read_counts: list[int]
    read_ns: int


class FastPath(Protocol):
    """The datapath, which opens and reads files outside the interpreter. Only ``register`` waits,
    for a disk: call it in a thread."""

    def register(self, fd: int, tier: int) -> int: ...
    def unregister(self, backing_id: int) -> None: ...
    def bind(self, ino: Ino, fd: int, *, tier: int, size: int, backing_id: int) -> bool: ...
    def end_binding(self, ino: Ino) -> None: ...
    def bind_part(self, ino: Ino, fd: int, *, tier: int, size: int) -> bool: ...
    def drop_part(self, ino: Ino) -> None: ...
    def watch(self, ino: Ino, offset: int) -> None: ...
    def outdate(self, ino: Ino) -> bool: ...
    def served(self) -> list[Served]: ...
    def taken(self, ino: Ino) -> None: ...
    def keep_unread(self, ino: Ino, content: bytes | memoryview, unread: int) -> bool: ...
    def was_given(self, ino: Ino) -> bool: ...
    def tallies(self) -> list[Tally]: ...
    def source_traffic(self) -> SourceTraffic: ...
    def throttled(self, change: int) -> None: ...
    def open_files(self) -> int: ...
    def backing_ids(self) -> int: ...
    def is_open(self, ino: Ino) -> bool: ...
    def is_passed(self, ino: Ino) -> bool: ...


class Arrival(Protocol):
    """The call at the source of a copy that is fetched ahead of readers. ``content`` are its bytes
    when it is ``done``; None if it failed, or if the file is large."""

    done: trio.Event
    content: bytes | memoryview | None


class Flight(Protocol):
    """A copy that is being made, or a file in the window. A reader may share its bytes or its open
    file."""

    identity: Identity
    content: bytes | memoryview | None
    file: SourceFile | None
    copied: int

    @property
    def arrival(self) -> Arrival | None: ...


class Chunks(Protocol):
    """Reads of whole chunks, if the source is a pack. ``open`` returns the flight of a file that
    comes with its chunk, None if it is to be read alone; ``warm`` whether it comes so. ``is_right``
    records that the datapath has read a file."""

    def open(self, ino: Ino) -> Flight | None: ...
    def is_right(self, ino: Ino) -> None: ...
    def warm(self, ino: Ino) -> bool: ...
    def has_place(self) -> bool: ...


class NoChunks:
    """The source is no pack."""

    def open(self, ino: Ino) -> Flight | None:
        return None

    def is_right(self, ino: Ino) -> None: ...

    def warm(self, ino: Ino) -> bool:
        return False

    def has_place(self) -> bool:
        return True


class Window(Protocol):
    """Small files that were fetched ahead and are kept in memory for their readers."""

    def read(self, ino: Ino, *, is_last: bool) -> bool: ...
    def get(self, ino: Ino) -> Flight | None: ...
    def hand_over(self, ino: Ino) -> None: ...


class CopyEngine(Protocol):
    """The transfer engine, which makes and removes copies. Only ``removed`` waits."""

    def make_room(self, promote: Promote) -> Promote: ...
    def submit(
        self,
        promote: Promote,
        identity: Identity,
        *,
        content: bytes | memoryview | None = None,
        file: SourceFile | None = None,
    ) -> bool: ...
    def flight(self, ino: Ino) -> Flight | None: ...
    def take_over(self, ino: Ino) -> bool: ...
    def wake(self) -> None: ...
    def remove_copy(self, ino: Ino, tier: int) -> None: ...
    async def removed(self) -> None: ...
    def has_place(self) -> bool: ...
    def has_room_for(self, size: int) -> bool: ...
    @property
    def window(self) -> Window: ...


class TierCalls(Protocol):
    """The tier monitor, which runs the calls that read a tier.

    ``ask`` runs a function that reads ``size`` bytes of a copy, in a thread. Raises OSError,
    ETIMEDOUT if the tier hangs. Copies in a tier for which ``is_read`` is False are not opened.
    """

    def is_read(self, number: int) -> bool: ...
    def copy_unreadable(self, number: int, error: OSError) -> None: ...
    async def ask(
        self,
        number: int,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T: ...


class TierMonitor(TierCalls, Protocol):
    """The tier monitor, which also runs the calls that change a tier.

    ``call`` runs a function that writes ``size`` bytes in a thread. Raises TierError. ``take_room``
    claims space of the disk, and returns False if there is none. Raises TierError. ``failed``
    begins an outage.
    """

    async def call(
        self,
        tier: Tier,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T: ...
    async def take_room(self, tier: Tier, size: int) -> bool: ...
    def failed(self, tier: Tier, error: TierError) -> None: ...
