"""Counts opens of regular files below a directory, as the kernel saw them, from any process.

What is counted is independent of the file system under test: it is the source's own inotify
events. A test that opens a source file itself is counted too.

The kernel merges an event with an equal one that was just queued. Closes are watched as well, so
opens one after the other are counted exactly; two opens of one file at the same moment may count
as one. Where that matters, count at the source itself (``slowfs``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

_IN_CLOSE = 0x18
_IN_OPEN = 0x20
_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
_IN_Q_OVERFLOW = 0x4000
_IN_ISDIR = 0x40000000
_EVENTS = _IN_OPEN | _IN_CLOSE | _IN_CREATE | _IN_MOVED_TO
_EVENT = struct.Struct("iIII")

_libc = ctypes.CDLL(None, use_errno=True)


class OpenCounter:
    """Counts the opens of regular files under ``directory`` for the length of a ``with`` block.

    Opens of directories are not counted. Directories made while it counts are watched as well,
    but an open that follows their creation at once may be missed: make the tree first.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self._directories: dict[int, str] = {}
        self._opens: Counter[str] = Counter()
        self._overflowed = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_draining, name="inotify", daemon=True)

    def __enter__(self) -> OpenCounter:
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
        try:
            self._watch_tree(self._directory)
        except BaseException:
            self._close()
            raise
        self._thread.start()
        self.reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def count(self) -> int:
        """How many times a regular file was opened since the start or ``reset``."""
        return sum(self.paths().values())

    def paths(self) -> dict[str, int]:
        """The same for each file: its path below the directory, and how often it was opened."""
        self._settle()
        with self._lock:
            return dict(self._opens)

    def reset(self) -> None:
        """Forget what was counted until now."""
        self._settle()
        with self._lock:
            self._opens.clear()

    def _watch_tree(self, top: Path) -> None:
        for directory, _, _ in os.walk(top):
            # Events come to the watch of the directory, with the file's name.
            descriptor = _checked(
                _libc.inotify_add_watch(self._fd, os.fsencode(directory), _EVENTS),
                f"inotify_add_watch {directory}",
            )
            self._directories[descriptor] = os.path.relpath(directory, self._directory)

    def _settle(self) -> None:
        """Take what is queued, and what still comes while it is not quiet."""
        while self._has_events(0.05):
            self._drain()
        if self._overflowed:
            raise OverflowError(
                "the inotify queue overflowed; raise fs.inotify.max_queued_events or count less"
            )

    def _has_events(self, within_s: float) -> bool:
        # Not select(), which takes no descriptor above 1,023.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def _keep_draining(self) -> None:
        # The kernel's queue holds 16,384 events: an epoch over a large tree is more.
        while not self._stop.is_set():
            if self._has_events(0.1):
                self._drain()

    def _drain(self) -> None:
        with self._lock:
            with contextlib.suppress(BlockingIOError):  # the other one of the two took them
                self._take(os.read(self._fd, 1 << 20))

    def _take(self, events: bytes) -> None:
        offset = 0
        while offset < len(events):
            descriptor, mask, _, length = _EVENT.unpack_from(events, offset)
            offset += _EVENT.size
            name = os.fsdecode(events[offset : offset + length].rstrip(b"\0"))
            offset += length
            if mask & _IN_Q_OVERFLOW:
                self._overflowed = True
                continue
            directory = self._directories.get(descriptor, ".")
            if mask & _IN_ISDIR:
                if mask & (_IN_CREATE | _IN_MOVED_TO):
                    self._watch_tree(self._directory / directory / name)
            elif mask & _IN_OPEN and name:
                self._opens[os.path.normpath(os.path.join(directory, name))] += 1

    def _close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
