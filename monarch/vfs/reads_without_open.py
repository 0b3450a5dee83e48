"""Which files have another size than a kernel believes that tells no opens.

Such a kernel reads up to the end that it knows. A read that it had sent before it was told of
another end takes no size from the answer: it would show zeros behind a new end. So the reads of a
file whose size has changed fail until those that were under way then have come.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from monarch.namespace.namespace import Namespace
from monarch.types import Ino

# How long that takes, and in how many turns of the loop at least: it may have stood still.
_STEPS, _STEP_S = 5, 0.05


class StaleSizes:
    """``attributes_changed`` has the kernel ask for the attributes of an inode when it needs them.

    It is asked by nobody here: a process that waits for its own mount cannot be killed.
    """

    def __init__(self, names: Namespace, *, attributes_changed: Callable[[Ino], None]) -> None:
        self._names = names
        self._attributes_changed = attributes_changed
        # What the kernel was told last, where it is not what the snapshot tells.
        self._told: dict[Ino, int] = {}
        # With the steps that are left.
        self._unheard: dict[Ino, int] = {}
        self._waiting = trio.Event()

    def changed(self, ino: Ino) -> None:
        """The attributes of an inode have changed."""
        size = self._names.attributes(ino).size
        told = self._told.get(ino, self._names.snapshot.attributes(ino).size)
        if size != told or ino in self._unheard:
            self._told[ino] = size
            self._unheard[ino] = _STEPS
            self._waiting.set()
        self._attributes_changed(ino)

    def are_unheard(self, ino: Ino) -> bool:
        return ino in self._unheard

    async def run(self) -> None:
        """Let them be heard of, until cancelled."""
        while True:
            await self._waiting.wait()
            await trio.sleep(_STEP_S)
            for ino, steps in list(self._unheard.items()):
                if steps > 1:
                    self._unheard[ino] = steps - 1
                else:
                    del self._unheard[ino]
            if not self._unheard:
                self._waiting = trio.Event()
