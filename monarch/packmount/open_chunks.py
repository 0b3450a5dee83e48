"""Open chunks of a pack: the next extent of a chunk needs no further open at the source."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
    """Descriptors of chunks. The one that was used last stays open longest. In any thread.

    A chunk is opened once for all that need it at the same time: besides the calls, a further open
    makes some clients of file systems, such as FUSE, forget the pages that they have of the file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenChunk] = OrderedDict()
        # The chunks that a thread is opening, for those that wait for it.
        self._opening: dict[int, Future[None]] = {}
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
        opened, opens = self._used(chunk, open_chunk)
        try:
            yield Used(opened.fd, opens)
        except OSError:
            self.forget(chunk)
            raise
        finally:
            self._leave(opened)

    def _used(self, chunk: int, open_chunk: Callable[[int], int]) -> tuple[_OpenChunk, int]:
        """A descriptor with one more user, and the opens that it took. Raises OSError."""
        while True:
            with self._lock:
                opened = self._open.get(chunk)
                if opened is not None:
                    self._open.move_to_end(chunk)
                    opened.users += 1
                    return opened, 0
                other = self._opening.get(chunk)
                if other is None:
                    mine = self._opening[chunk] = Future()
                    break
            # The error of the other thread is that of this one, too: a source that fails slowly is
            # not asked by one thread after the other.
            other.result()
        try:
            return self._kept(chunk, open_chunk(chunk)), 1
        except OSError as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._opening[chunk]
            if not mine.done():
                mine.set_result(None)

    def _kept(self, chunk: int, fd: int) -> _OpenChunk:
        """Keeps a new descriptor, with one user."""
        fresh = _OpenChunk(fd, users=1)
        dropped = []
        with self._lock:
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
