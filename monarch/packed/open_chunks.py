"""Open chunks of a pack: the next extent of a chunk needs no further open at the source."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Descriptors that are kept open after their last use.
_MOST_OPEN = 64


@dataclass(slots=True, eq=False)
class _OpenChunk:
    """A descriptor and its users. ``is_dropped``: its last user closes it."""

    fd: int
    users: int = 0
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Used:
    """A descriptor of a chunk; ``opens``: whether it was opened for this use."""

    fd: int
    opens: int


class OpenChunks:
    """Descriptors of chunks. The one that was used last stays open longest. In any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenChunk] = OrderedDict()

    @contextmanager
    def using(self, chunk: int, open_chunk: Callable[[int], int]) -> Iterator[Used]:
        """A descriptor of a chunk, from ``open_chunk`` if there is none. It is not kept if reading
        fails. Raises OSError."""
        with self._lock:
            opened = self._open.get(chunk)
            if opened is not None:
                self._open.move_to_end(chunk)
                opened.users += 1
        opens = 0
        if opened is None:
            opened, opens = self._kept(chunk, open_chunk(chunk)), 1
        try:
            yield Used(opened.fd, opens)
        except OSError:
            self.forget(chunk)
            raise
        finally:
            self._leave(opened)

    def _kept(self, chunk: int, fd: int) -> _OpenChunk:
        """Keeps a new descriptor, or uses that of a thread that has opened the chunk meanwhile."""
        fresh = _OpenChunk(fd, users=1)
        dropped = []
        with self._lock:
            other = self._open.get(chunk)
            if other is not None:
                other.users += 1
                dropped.append(fresh.fd)
                fresh = other
            else:
                self._open[chunk] = fresh
            while len(self._open) > _MOST_OPEN:
                _, oldest = self._open.popitem(last=False)
                oldest.is_dropped = True
                if not oldest.users:
                    dropped.append(oldest.fd)
        for fd in dropped:
            os.close(fd)
        return fresh

    def _leave(self, opened: _OpenChunk) -> None:
        with self._lock:
            opened.users -= 1
            is_over = opened.is_dropped and not opened.users
        if is_over:
            os.close(opened.fd)

    def forget(self, chunk: int) -> None:
        """Closes the descriptor of a chunk after its last use."""
        with self._lock:
            opened = self._open.pop(chunk, None)
            if opened is None:
                return
            opened.is_dropped = True
            is_over = not opened.users
        if is_over:
            os.close(opened.fd)

    def close(self) -> None:
        for chunk in list(self._open):
            self.forget(chunk)
