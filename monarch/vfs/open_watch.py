"""Counts the opens that the kernel does not report to the daemon (``open: none``).

Inotify reports each open of a file in a watched directory, in the order of the opens, also by other
mounts of the same file system. All directories that have files are watched, or none: a count of
some opens would be a wrong number. Where they cannot all be watched, or the queue of the kernel has
lost events, opens are not counted, and ``not_counted`` has the reason.

Inotify does not report the process, so all processes that read one directory are one job. The
kernel merges an event with an equal one that precedes it directly: two opens of one file without an
open of another file between them may count as one.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import trio

from monarch.posix.inotify import OpenEvents, most_watches
from monarch.text import counted, errno_words
from monarch.types import Ino

log = logging.getLogger(__name__)

# Directories that one mount watches at most, and its share of the watches that the user may have:
# other programs need some. A watch keeps some 2 KiB of memory in the kernel.
_MOST_DIRECTORIES = 32_768
_SHARE_OF_WATCHES = 0.25
# The start of a mount waits for the watches at most so long, in seconds.
_PATIENCE_S = 5.0
# How long events are collected, in seconds. The queue overflows at 16,384 opens in this time.
_STEP_S = 0.02
# The setting that may be the reason for an error.
_LIMITS = {
    errno.EMFILE: ", perhaps fs.inotify.max_user_instances",
    errno.ENOSPC: ", fs.inotify.max_user_watches",
}
# The datapath's last number at the end of the file system.
_UNMOUNTED = 0xFFFFFFFF


class Directories(Protocol):
    """What is needed of the snapshot; the first method reads the whole table."""

    def directories_of_files(self) -> list[Ino]: ...
    def path(self, ino: Ino) -> bytes: ...


class EventsReader(Protocol):
    """The datapath: finds the files of events. If not all opens are reported, the last is 0; if the
    file system has ended, 2^32 - 1."""

    def opened(self, events: bytes, directories: array[int]) -> array[int]: ...


class OpenWatch:
    """Belongs to the event loop. Nothing is watched before ``begin``."""

    def __init__(self, names: Directories, datapath: EventsReader, mountpoint: Path) -> None:
        self._names = names
        self._datapath = datapath
        self._mountpoint = os.fsencode(mountpoint)
        self._events: OpenEvents | None = None
        # The inode number of each watched directory, by the number of its watch.
        self._directories = array("I")
        # Opens by the daemon's own processes that were not reported yet.
        self._own: Counter[Ino] = Counter()
        self._begun = trio.Event()
        self.opens = 0
        self.not_counted = "the watches are not set yet"

    @property
    def counts(self) -> bool:
        """Whether every open since ``begin`` was counted."""
        return not self.not_counted

    async def begin(self) -> None:
        """Sets the watches. The mount must answer."""
        with trio.move_on_after(_PATIENCE_S) as patience:
            await self._set_all()
        if patience.cancelled_caught:
            self._give_up(f"setting the watches takes longer than {_PATIENCE_S:g} seconds")

    async def _set_all(self) -> None:
        inos = await trio.to_thread.run_sync(self._names.directories_of_files)
        most = min(_MOST_DIRECTORIES, int(_SHARE_OF_WATCHES * most_watches()))
        if len(inos) > most:
            what = counted(len(inos), "directory", "directories")
            self._give_up(f"{what}, and at most {most:,} are watched")
            return
        try:
            self._events = OpenEvents()
            code, numbers = await self._set_watches(self._events, inos)
        except OSError as error:
            self._give_up(errno_words(error.errno) + _LIMITS.get(error.errno or 0, ""))
            return
        if code or len(numbers) < len(inos):
            why = errno_words(code or errno.EIO) + _LIMITS.get(code, "")
            self._give_up(f"a directory cannot be watched: {why}")
            return
        self._directories = array("I", bytes(4 * (max(numbers, default=0) + 1)))
        for number, ino in zip(numbers, inos, strict=True):
            self._directories[number] = ino
        self.not_counted = ""
        self._begun.set()

    async def _set_watches(self, events: OpenEvents, inos: list[Ino]) -> tuple[int, array[int]]:
        """The exit code of the process that sets them, and their numbers."""
        paths = (os.path.join(self._mountpoint, self._names.path(ino)) for ino in inos)
        setting = await trio.run_process(
            events.setter(),
            stdin=b"".join(path + b"\0" for path in paths),
            capture_stdout=True,
            stderr=subprocess.DEVNULL,
            pass_fds=[events.fileno()],
            check=False,
        )
        numbers = array("i")
        numbers.frombytes(setting.stdout[: len(setting.stdout) // 4 * 4])
        return setting.returncode, numbers

    def expect_own(self, ino: Ino) -> None:
        """Must be called before a process of the daemon opens a file of the mount: this open is not
        counted."""
        if self.counts:
            self._own[ino] += 1

    def opened(self) -> array[int]:
        """The files that were opened since the last call, in the order of the opens: an array of
        type I."""
        events = self._events.read() if self._events is not None and self.counts else b""
        if not events:
            return array("I")
        found = self._datapath.opened(events, self._directories)
        if found and found[-1] == _UNMOUNTED:
            found.pop()
            self.close()
        elif found and not found[-1]:
            found.pop()
            self._give_up("the kernel has lost reports of opens")
        if self._own:
            found = array("I", (ino for ino in found if not self._is_own(Ino(ino))))
        self.opens += len(found)
        return found

    async def run(self, count: Callable[[], None]) -> None:
        """Calls ``count``, which calls ``opened``, when there are opens. Returns when opens are not
        counted any more."""
        await self._begun.wait()
        while self._events is not None:
            try:
                await trio.lowlevel.wait_readable(self._events)
            except trio.ClosedResourceError:
                return
            opens = -1
            # While there are opens, one wait for each lot of them: a wait costs as much processor
            # time as a hundred opens.
            while opens != self.opens:
                opens = self.opens
                count()
                await trio.sleep(_STEP_S)

    def close(self) -> None:
        """Ends all watches; does nothing if there are none."""
        if self._events is not None:
            trio.lowlevel.notify_closing(self._events)
            self._events.close()
            self._events = None

    def _is_own(self, ino: Ino) -> bool:
        if ino not in self._own:
            return False
        self._own[ino] -= 1
        self._own += Counter()
        return True

    def _give_up(self, why: str) -> None:
        log.warning("opens are not counted: %s", why)
        self.not_counted = why
        self.close()
        self._begun.set()
