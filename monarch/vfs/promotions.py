"""Which copies are made and removed: asks placement, and has the engine carry it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import trio

from monarch.namespace.namespace import Namespace
from monarch.placement.controller import Controller, Promote
from monarch.placement.policy import Item
from monarch.placement.residency import SOURCE, Residency
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts
from monarch.tiers.source import SourceFile, identity_of
from monarch.types import Attributes, Ino
from monarch.vfs.binding import Binding, Bindings
from monarch.vfs.interfaces import Chunks, CopyEngine, NoChunks

# If a copy of an open file began but did not arrive, the pause until the next offer doubles up to
# this value, in seconds.
_LONGEST_PAUSE_S = 600.0


def _never(ino: Ino, job: int) -> bool:
    return False


def _nowhere(ino: Ino) -> bool:
    return False


def _ignore(ino: Ino) -> None:
    """Until ``left`` is set."""


def _drop(attributes: Attributes, content: bytes | memoryview) -> None:
    """Until ``stage`` is set."""


@dataclass(eq=False, repr=False)
class Promotions:
    """Belongs to the event loop. ``retry_s`` is the interval in seconds in which files that stay
    open at the source are offered for a copy again."""

    _names: Namespace
    _residency: Residency
    _controller: Controller
    _engine: CopyEngine
    _bindings: Bindings
    _doubts: Doubts
    _metrics: Metrics
    _retry_s: float

    def __post_init__(self) -> None:
        # Whether more readers are expected to open a file than the job that opens it.
        self.is_expected_again: Callable[[Ino, int], bool] = _never
        # Whether another node of the job keeps a file, and this one does not.
        self.is_kept_elsewhere: Callable[[Ino], bool] = _nowhere
        # Called with a small file that was opened, that no tier admits, and that is expected again.
        self.stage: Callable[[Attributes, bytes | memoryview], None] = _drop
        # Called with each file that was removed, or is written.
        self.left: Callable[[Ino], None] = _ignore
        self.accessed = self._controller.accessed
        self.submit = self._engine.submit
        self.flight = self._engine.flight
        self.take_over = self._engine.take_over
        self.wake = self._engine.wake
        # Waits until removed copies are deleted from the disks of all responsive tiers.
        self.removed = self._engine.removed
        # The chunks of a pack, which are read as a whole.
        self.chunks: Chunks = NoChunks()

    def has_place(self) -> bool:
        """Whether ``warm`` would start a copy soon instead of only noting the request."""
        return self._engine.has_place() and self.chunks.has_place()

    def opened(self, attributes: Attributes, *, quota: int | None) -> Promote | None:
        """Called before a file is opened at the source: what to copy, if anything. Copies that must
        leave for it are removed. The caller must ``submit`` or ``abandon`` the promotion.
        ``quota``: the number of that which the copy is charged to, None if there is none."""
        promote = self._controller.opened(Item.of(attributes), job=quota)
        if promote is None:
            return None
        try:
            return self._engine.make_room(promote)
        except BaseException:
            self.abandon(promote)
            raise

    def abandon(self, promote: Promote) -> None:
        self._controller.abandoned(promote.item, promote.tier, retry=False)

    def keep_fetched(self, ino: Ino, content: memoryview, job: int, since_ns: int) -> None:
        """The datapath has fetched a file in the version of the snapshot for ``job``, at
        ``since_ns`` of the monotonic clock or later: makes a copy of it if placement admits it."""
        names = self._names
        if self._residency.is_changed(ino) or names.is_gone(ino) or names.is_rewritten(ino):
            return
        if self.is_kept_elsewhere(ino) and not self._residency.is_forced(ino):
            # Its bytes came from there. The source was not asked.
            return
        attributes = names.stored(ino)
        self._doubts.fetched(ino, attributes.identity, since_ns=since_ns)
        self.keep(attributes, content, job, quota=None)
        # Of a pack, the other files of its chunk may become copies, too.
        self.chunks.is_right(ino)
        self.chunks.open(ino)

    def read_kept(self, ino: Ino, job: int) -> None:
        """Called when the datapath has served ``job`` with bytes that it keeps."""
        held = self._engine.window.get(ino)
        if held is not None and held.content is not None:
            self.read_from_window(self._names.stored(ino), held.content, job, quota=None)

    def keep(
        self,
        attributes: Attributes,
        content: bytes | memoryview,
        job: int,
        *,
        quota: int | None,
        is_held: bool = False,
    ) -> None:
        """Makes a copy of a small file that ``job`` has opened, if placement admits it. No copy
        leaves for bytes that cannot be kept in memory until they are written: the file would have
        to be read from the source again. ``quota`` as in ``opened``; ``is_held``: it was in the
        window."""
        may_evict = self._engine.has_room_for(len(content))
        item = Item.of(attributes)
        promote = self._controller.opened(item, may_evict=may_evict, job=quota, is_held=is_held)
        if promote is not None:
            self.submit(promote, attributes.identity, content=content)
            return
        if self._residency.is_wanted(attributes.ino):
            # The window has another version of it, perhaps, and no copy is under way.
            self.wake()
        if self.is_expected_again(attributes.ino, job):
            self.stage(attributes, content)

    def read_from_window(
        self, attributes: Attributes, content: bytes | memoryview, job: int, *, quota: int | None
    ) -> None:
        """Called when ``job`` shares ``content`` of a flight. If it is in the window, and no other
        reader is expected, placement decides whether it gets a copy."""
        is_last = not self.is_expected_again(attributes.ino, job)
        if self._engine.window.read(attributes.ino, is_last=is_last):
            self.keep(attributes, content, job, quota=quota, is_held=True)

    async def run(self) -> None:
        """Offers files that stay open at the source again and again, until cancelled: a copy may
        have been given up while a tier was full, and the next first open of a large file may be
        days away."""
        while True:
            await trio.sleep(self._retry_s)
            for binding in self._bindings.all():
                if binding.is_watched:
                    continue
                if binding.file is not None and not self._names.is_rewritten(binding.ino):
                    self._offer(binding, binding.file, trio.current_time())

    def _offer(self, binding: Binding, file: SourceFile, now: float) -> None:
        attributes = self._names.stored(binding.ino)
        if now < binding.offer_s or identity_of(file.status) != attributes.identity:
            return
        promote = self._controller.offered(Item.of(attributes))
        if promote is not None:
            binding.pause_s = min(max(self._retry_s, 2 * binding.pause_s), _LONGEST_PAUSE_S)
            binding.offer_s = now + binding.pause_s
            self.submit(promote, attributes.identity, file=file)

    def warm(self, ino: Ino) -> bool:
        """Starts a whole copy on request, of the bytes in the window if the file is there; False if
        no tier has space for it. A partial copy is removed."""
        if self._residency.tier_of(ino) != SOURCE:
            return True
        if self._controller.parts.tier_of(ino) != SOURCE:
            self.forget_copy(ino)
        if not self._residency.is_copying(ino) and self.chunks.warm(ino):
            return True
        attributes = self._names.stored(ino)
        held = self._engine.window.get(ino)
        promote = self._controller.warm(Item.of(attributes), is_held=held is not None)
        if promote is None:
            return held is None and self._residency.is_copying(ino)
        content = None
        if held is not None:
            content = held.content if held.identity == attributes.identity else None
            self._engine.window.hand_over(ino)
        self._metrics.closed_files.discard(ino)
        self.submit(promote, attributes.identity, content=content)
        return True

    def is_closed(self, ino: Ino) -> bool:
        """Whether the source refused the daemon's last open of the file."""
        return ino in self._metrics.closed_files

    def bytes_copied(self, ino: Ino) -> int:
        """The bytes that a running copy of a file has copied so far."""
        flight = self.flight(ino)
        return 0 if flight is None else flight.copied

    def evict(self, ino: Ino) -> int:
        """Removes a copy on request; its size in bytes, 0 if there was none. A running copy is
        given up, a wanted one is not made. Processes that have it open continue to read it."""
        self._residency.unwant(ino)
        tier = self._residency.tier_of(ino) or self._controller.parts.tier_of(ino)
        if (binding := self._bindings.get(ino)) is not None:
            # A process that has the file open must not bring the copy back.
            binding.offer_s = math.inf
            binding.is_watched = False
        size = self.forget_copy(ino)
        if tier != SOURCE:
            self._metrics.evicted(tier, size)
        return size

    def copied_up(self, ino: Ino) -> None:
        """Removes the copy of a source file that is written or removed now, and cancels a running
        one."""
        if ino <= self._names.entries:
            self._residency.unwant(ino)
            self.forget_copy(ino)
            self.left(ino)

    def forget_copy(self, ino: Ino) -> int:
        """Drops the copy of a file, whole or partial, that is out of date or damaged; its size in
        bytes, or 0."""
        size = self._controller.parts.held(ino) or self._names.attributes(ino).size
        tier = self._controller.dropped(ino, size)
        if tier == SOURCE:
            return 0
        self._engine.remove_copy(ino, tier)
        return size

    def has_copy(self, ino: Ino) -> bool:
        """Whether a tier has a copy of a file, whole or partial."""
        return bool(self._residency.tier_of(ino) or self._controller.parts.tier_of(ino))

    def remove_file(self, ino: Ino, tier: int) -> None:
        """Removes the file of a copy that was dropped while it was completed."""
        self._engine.remove_copy(ino, tier)
