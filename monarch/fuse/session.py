"""One FUSE session: mount, answer the kernel until the end, unmount.

pyfuse3 keeps its session in module variables, so a process has one session at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pyfuse3
import trio

from monarch.errors import FuseError
from monarch.fuse.datapath import Datapath
from monarch.fuse.mountpoint import mount, mount_at, unmount
from monarch.fuse.operations import Operations
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.types import Ino
from monarch.units import KiB, MiB

log = logging.getLogger(__name__)

# Requests in progress at once. A reader that waits for the source occupies one.
_MAX_TASKS = 10_000
# Idle tasks that are kept; with fewer, each burst would start and end some.
_IDLE_TASKS = 32
# The daemon must not access its own mount, not even in a thread: if it is killed while the thread
# waits for its own answer, the thread never ends, the device stays open, and readers wait without
# end. Another process does not have the device open.
_NULL = subprocess.DEVNULL
_FORGET = """
import os, sys
fd = os.open(os.fsencode(sys.argv[1]), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
"""
# The readahead for sequential readers: the largest request of FUSE.
_READ_AHEAD_BYTES = 1 * MiB


class Session:
    """The mount of ``operations`` at ``mountpoint``; ``source`` is shown as its device. A
    ``datapath`` is placed between the kernel and pyfuse3."""

    def __init__(
        self,
        operations: Operations,
        mountpoint: Path,
        source: bytes,
        *,
        allow_other: bool,
        writable: bool,
        datapath: Datapath | None,
    ) -> None:
        self._writable = writable
        self._operations = operations
        self._mountpoint = mountpoint
        self._source = source
        self._allow_other = allow_other
        self._datapath = datapath
        self._serving = False
        self._storing = threading.Lock()
        self._limiter = Limiter(60.0)

    def mount(self) -> None:
        """Mounts; requests of the kernel wait until ``serve``. Raises FuseError."""
        name = self._source.decode("ascii", "backslashreplace")
        device = fuse = mount(
            self._mountpoint, name, allow_other=self._allow_other, writable=self._writable
        )
        try:
            if self._datapath is not None:
                fuse = self._datapath.start(device)
            # libfuse takes this name for a device that is mounted already.
            pyfuse3.init(self._operations, f"/dev/fd/{fuse}", set())
        except (OSError, RuntimeError) as error:
            # Processes that access the mount would wait until the device is closed.
            if self._datapath is not None and fuse != device:
                self._datapath.stop()
            else:
                os.close(device)
            unmount(self._mountpoint, lazy=True)
            raise FuseError(
                f"cannot serve {os.fspath(self._mountpoint)!r}: {error}", hint="run: monarch doctor"
            ) from error
        self._serving = True

    async def serve(self) -> None:
        """Answers the kernel until the mount is unmounted or ``stop`` is called."""
        await pyfuse3.main(min_tasks=_IDLE_TASKS, max_tasks=_MAX_TASKS)

    def stop(self) -> None:
        if self._serving:
            pyfuse3.terminate()

    def close(self) -> None:
        """Unmounts, even if files are open, and frees the session."""
        with self._storing:
            # After this no thread uses the session, which is freed below.
            self._serving = False
        if mount_at(self._mountpoint) is not None:
            with suppress(FuseError):
                unmount(self._mountpoint, lazy=True)
        pyfuse3.close(unmount=False)
        if self._datapath is not None:
            self._datapath.stop()

    def attributes_changed(self, ino: Ino) -> None:
        """Makes the kernel ask for the attributes again. It never waits, so a handler may call it.

        Pages are not invalidated here: that waits for running reads, and a daemon that is killed
        meanwhile could never end. The next open drops them instead.
        """
        if not self._serving:
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

    def names_changed(self, directory: Ino) -> None:
        """Makes the kernel drop a cached listing. No request of the daemon locks its pages."""
        if self._serving:
            with suppress(OSError):
                pyfuse3.invalidate_inode(pyfuse3.InodeT(directory))

    def store_pages(self, ino: Ino, content: bytes) -> None:
        """Stores the whole content of an inode that is being opened in the page cache, in any
        thread.

        The inode is not open yet, so no running read can have its pages locked.
        """
        with self._storing:
            if not self._serving:
                return
            if self._datapath is not None:
                self._datapath.store(ino, content)
                return
            with suppress(OSError):
                pyfuse3.notify_store(pyfuse3.InodeT(ino), 0, content)

    def forget_pages(self, path: bytes) -> None:
        """Makes the kernel drop the cached pages of a file, if the kernel sends no opens.

        Pages that are being read, or are mapped, stay: the kernel does not wait for them, as it
        would for an invalidation of the inode. Waits for a process; call it in a thread.
        """
        name = os.path.join(os.fsencode(self._mountpoint), path)
        with suppress(OSError):
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _FORGET, name],
                stdin=_NULL,
                stdout=_NULL,
                stderr=_NULL,
            )

    def widen_readahead(self) -> None:
        """Raises the readahead for sequential readers, which only root may do."""
        mounted = mount_at(self._mountpoint)
        knob = f"/sys/class/bdi/{mounted.device if mounted else None}/read_ahead_kb"
        with suppress(OSError), open(knob, "r+") as file:
            if int(file.read()) < _READ_AHEAD_BYTES // KiB:
                file.write(str(_READ_AHEAD_BYTES // KiB))

    def widen_background(self) -> None:
        """Raises the limit of background requests, so that readers of a hanging source do not use
        it up.

        The kernel's default is 12 requests, and it limits an ordinary user further
        (``max_user_bgreq``). The datapath negotiates the limit itself. If the control files of FUSE
        are not mounted, as in a container, the limit is unchanged.
        """
        mounted = mount_at(self._mountpoint)
        if self._datapath is not None or mounted is None:
            return
        connection = f"/sys/fs/fuse/connections/{mounted.device.partition(':')[2]}"
        for name, most in (("max_background", 65535), ("congestion_threshold", 49152)):
            with suppress(OSError), open(f"{connection}/{name}", "w") as file:
                file.write(str(most))


async def wait_until_answered(mountpoint: Path) -> None:
    """Waits until the mount answers a request. Raises FuseError if it does not in 10 seconds."""
    asking = await trio.lowlevel.open_process(
        ["stat", "--", os.fspath(mountpoint)], stdin=_NULL, stdout=_NULL, stderr=_NULL
    )
    with trio.move_on_after(10) as patience:
        await asking.wait()
    if patience.cancelled_caught:
        asking.kill()
        raise FuseError(f"the mount at {os.fspath(mountpoint)!r} does not answer")
