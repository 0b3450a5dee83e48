"""Open chunks of a pack: the next extent of a chunk needs no further open at the source."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

# Descriptors that are kept open after their last use: a share of those of the process, and the
# fewest and the most.
_SHARE, _LEAST_OPEN, _MOST_OPEN = 1 / 16, 64, 1024


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
        self._lend: Callable[[int, int], None] = _ignore
        self._take_back: Callable[[int], None] = _ignore
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(_LEAST_OPEN, min(_MOST_OPEN, int(limit * _SHARE)))

    def lend_to(self, lend: Callable[[int, int], None], take_back: Callable[[int], None]) -> None:
        """From now on ``lend`` gets the descriptor of each chunk that is opened, and ``take_back``
        its number before it is closed. Neither may wait."""
        self._lend, self._take_back = lend, take_back

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
                with suppress(OSError):
                    self._lend(chunk, fd)
            while len(self._open) > self._most:
                number, oldest = self._open.popitem(last=False)
                self._take_back(number)
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
            self._take_back(chunk)
            opened.is_dropped = True
            is_over = not opened.users
        if is_over:
            os.close(opened.fd)

    def close(self) -> None:
        for chunk in list(self._open):
            self.forget(chunk)


def _ignore(*_: int) -> None:
    """Until ``lend_to`` is called."""
