"""What the kernel of a mount knows and reads by itself, and how this is corrected.

Usually the kernel sends each open. It then keeps the pages of a file until an open says otherwise.
With ``open: none`` it sends only reads, and a file may have been read in part at any time.

Such a kernel reads up to the end of the file that it knows. A read that was sent before the size
changed is padded with zeros by the kernel, so reads of that file fail until those have drained.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from monarch.namespace.namespace import Namespace
from monarch.placement.residency import Residency
from monarch.types import Ino, KernelCaches
from monarch.vfs.interfaces import FastPath

# The time in which reads that were sent before a change of the size arrive, as a number of turns of
# the event loop and their length: the daemon may have been stopped meanwhile.
_STEPS, _STEP_S = 5, 0.05


@dataclass(eq=False, repr=False)
class KernelView:
    """Without ``sends_opens`` the kernel only reads. With ``reads_copies`` it reads open copies by
    itself (passthrough)."""

    _caches: KernelCaches
    _names: Namespace
    _residency: Residency
    _fast: FastPath | None
    sends_opens: bool
    reads_copies: bool

    def __post_init__(self) -> None:
        self.invalidate_listing = self._caches.invalidate_listing
        self.store = self._caches.store
        # The size that the kernel was last given, where it is not that of the snapshot.
        self._given: dict[Ino, int] = {}
        # The remaining steps of each stale size.
        self._steps: dict[Ino, int] = {}
        self._waiting = trio.Event()

    def keeps_pages(self, ino: Ino) -> bool:
        """Whether the next open may keep the pages of the file."""
        return not (self._residency.is_changed(ino) or self._residency.is_spoiled(ino))

    def opened(self, ino: Ino) -> bool:
        """Called at an open. Returns whether the kernel may keep the pages that it has so far."""
        if self.keeps_pages(ino):
            return True
        self._residency.unmark_changed(ino)
        self._residency.unmark_spoiled(ino)
        return False

    def drop_pages(self, ino: Ino) -> None:
        """Pages of a file may be wrong: the kernel drops them, at the next open if it sends one."""
        if self.sends_opens:
            self._residency.mark_spoiled(ino)
        else:
            self._caches.drop(ino)

    def may_be_half_read(self, ino: Ino) -> bool:
        """Whether a process may have read a part of a file whose opens the kernel does not send."""
        return not self.sends_opens and self.was_read(ino)

    def was_read(self, ino: Ino) -> bool:
        """Whether bytes of the file were given to a reader without an open."""
        given = self._fast is not None and self._fast.was_given(ino)
        return given or self._residency.is_served(ino)

    # -- sizes -----------------------------------------------------------------------------------

    def invalidate_attributes(self, ino: Ino) -> None:
        """The attributes of an inode have changed: the kernel requests them when it needs them. It
        is not made to request them here, since a process that waits for its own mount cannot be
        killed."""
        if not self.sends_opens:
            size = self._names.attributes(ino).size
            given = self._given.get(ino, self._names.snapshot.attributes(ino).size)
            if size != given or ino in self._steps:
                self._given[ino] = size
                self._steps[ino] = _STEPS
                self._waiting.set()
        self._caches.invalidate_attributes(ino)

    def is_size_stale(self, ino: Ino) -> bool:
        """Whether reads may arrive that a kernel without opens sent before the size changed."""
        return ino in self._steps

    async def run(self) -> None:
        """Lets the stale sizes expire, until cancelled."""
        while True:
            await self._waiting.wait()
            await trio.sleep(_STEP_S)
            for ino, steps in list(self._steps.items()):
                if steps > 1:
                    self._steps[ino] = steps - 1
                else:
                    del self._steps[ino]
            if not self._steps:
                self._waiting = trio.Event()
