"""Which files have another size than a kernel believes that tells no opens.

Such a kernel reads up to the end that it knows. Told of another while a read is under way, it takes
no size from the answer either, and shows the zeros behind the new end, or cuts what has grown. So
reads of a file whose size has changed fail until the kernel is seen to know the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from monarch.namespace.overlay import Namespace
from monarch.types import Ino

# How long it takes at least until one that did not know it is asked again. Seconds.
_STEP_S = 0.05


class Sizes:
    """``attributes_changed`` has the kernel ask for the attributes of an inode when it needs them.

    ``shown`` has it need them: the size that ``stat`` tells through the mount, negative if none.
    """

    def __init__(
        self,
        names: Namespace,
        *,
        attributes_changed: Callable[[Ino], None],
        shown: Callable[[Ino], Awaitable[int]],
    ) -> None:
        self._names = names
        self._attributes_changed = attributes_changed
        self._shown = shown
        # What the kernel was last seen to believe, where it is not what the snapshot tells.
        self._believed: dict[Ino, int] = {}
        self._unheard: set[Ino] = set()
        self._waiting = trio.Event()

    def changed(self, ino: Ino) -> None:
        """The attributes of an inode have changed."""
        believed = self._believed.get(ino, self._names.snapshot.attributes(ino).size)
        if self._names.attributes(ino).size != believed:
            self._unheard.add(ino)
            self._waiting.set()
        self._attributes_changed(ino)

    def are_unheard(self, ino: Ino) -> bool:
        return ino in self._unheard

    async def run(self) -> None:
        """See to it that the kernel hears of them, until cancelled."""
        while True:
            await self._waiting.wait()
            self._waiting = trio.Event()
            for ino in list(self._unheard):
                size = await self._shown(ino)
                if self._names.is_gone(ino) or size == self._names.attributes(ino).size:
                    self._believed[ino] = size
                    self._unheard.discard(ino)
            if self._unheard:
                await trio.sleep(_STEP_S)
                self._waiting.set()
