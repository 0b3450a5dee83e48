"""Files that wait to be fetched ahead, in a queue for each reader."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator

from monarch.types import Ino


class Waiting:
    """The next file is that of the reader with the fewest bytes in ``held``; of several such
    readers, that of the one which has waited for longest."""

    def __init__(self, held: Counter[Hashable]) -> None:
        self._held = held
        self._queues: dict[Hashable, deque[Ino]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ino]:
        for queue in self._queues.values():
            yield from queue

    def append(self, reader: Hashable, ino: Ino) -> None:
        self._queues.setdefault(reader, deque()).append(ino)
        self._count += 1

    def first(self) -> Ino:
        """The next file. There must be one."""
        return self._queues[self._next()][0]

    def pop(self) -> Ino:
        """Removes the next file, and returns it. There must be one."""
        reader = self._next()
        queue = self._queues.pop(reader)
        ino = queue.popleft()
        if queue:
            self._queues[reader] = queue
        self._count -= 1
        return ino

    def keep(self, is_kept: Callable[[Ino], bool]) -> list[Ino]:
        """Removes the files that are not to be kept, and returns them."""
        removed = [ino for ino in self if not is_kept(ino)]
        gone = set(removed)
        for reader, queue in list(self._queues.items()):
            self._queues[reader] = deque(ino for ino in queue if ino not in gone)
            if not self._queues[reader]:
                del self._queues[reader]
        self._count -= len(removed)
        return removed

    def clear(self) -> None:
        self._queues.clear()
        self._count = 0

    def _next(self) -> Hashable:
        return min(self._queues, key=self._held.__getitem__)
