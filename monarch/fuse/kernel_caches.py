"""What the kernel caches of a mount: attributes, listings and pages, invalidated or stored.

The notifications of pyfuse3 are functions of its module, so this needs no session. Before the
session exists and after it ended, all calls do nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyfuse3

from monarch.fuse.datapath import Datapath
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.types import Ino

log = logging.getLogger(__name__)

# The daemon must not access its own mount, not even in a thread: if it is killed while the thread
# waits for its own answer, the thread never ends, the device stays open, and readers wait without
# end. Another process does not have the device open.
_DROP = """
import os, sys
fd = os.open(os.fsencode(sys.argv[1]), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
"""


class MountCaches:
    """The caches of the mount at ``mountpoint``. ``path_of`` returns the path of an inode there,
    relative to it; ``datapath`` answers the kernel, if the C extension does."""

    def __init__(
        self, mountpoint: Path, path_of: Callable[[Ino], bytes], datapath: Datapath | None
    ) -> None:
        self._mountpoint = os.fsencode(mountpoint)
        self._path_of = path_of
        self._datapath = datapath
        self._is_open = False
        self._storing = threading.Lock()
        self._threads = ThreadPool(1, "pages", abandon=True)
        self._limiter = Limiter(60.0)

    def open(self) -> None:
        """The session exists from now on."""
        self._is_open = True

    def close(self) -> None:
        """The session may be freed from now on: no thread uses it any more."""
        with self._storing:
            self._is_open = False

    def invalidate_attributes(self, ino: Ino) -> None:
        """Makes the kernel ask for the attributes again. It never waits, so a handler may call it.

        Pages are not invalidated here: that waits for running reads, and a daemon that is killed
        meanwhile could never end. The next open drops them instead.
        """
        if not self._is_open:
            return
        try:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attr_only=True)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._limiter.warning(
                    log,
                    error.errno,
                    "the kernel refused a change of inode %d: %s; it may show the old size and"
                    " times of the file until it is opened",
                    ino,
                    errno_words(error.errno),
                )

    def invalidate_listing(self, directory: Ino) -> None:
        """Makes the kernel drop a cached listing. No request of the daemon locks its pages."""
        if self._is_open:
            with suppress(OSError):
                pyfuse3.invalidate_inode(pyfuse3.InodeT(directory))

    def store(self, ino: Ino, content: bytes) -> None:
        """Stores the whole content of an inode that is being opened in the page cache, in any
        thread.

        The inode is not open yet, so no running read can have its pages locked.
        """
        with self._storing:
            if not self._is_open:
                return
            if self._datapath is not None:
                self._datapath.store(ino, content)
                return
            with suppress(OSError):
                pyfuse3.notify_store(pyfuse3.InodeT(ino), 0, content)

    def drop(self, ino: Ino) -> None:
        """Makes the kernel drop the cached pages of a file, if the kernel sends no opens. Another
        process does that; this does not wait for it.

        Pages that are being read, or are mapped, stay: the kernel does not wait for them, as it
        would for an invalidation of the inode.
        """
        self._threads.start(_drop, os.path.join(self._mountpoint, self._path_of(ino)))


def _drop(path: bytes) -> None:
    null = subprocess.DEVNULL
    with suppress(OSError):
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DROP, path], stdin=null, stdout=null, stderr=null
        )
