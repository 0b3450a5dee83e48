"""One FUSE session: mount, answer the kernel until the end, unmount; and what the kernel caches of
the mount: attributes, listings and pages, invalidated or stored.

pyfuse3 keeps its session in module variables, so a process has one session at a time. Its
notifications are functions of the module, so the caches need no session: before it exists and after
it ended, all calls do nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyfuse3
import trio

from monarch.errors import FuseError
from monarch.fuse.datapath import Datapath
from monarch.fuse.mountpoint import mount, mount_at, unmount
from monarch.fuse.operations import Operations
from monarch.posix.mounts import is_dead
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import KiB, MiB, errno_words
from monarch.types import Ino

log = logging.getLogger(__name__)

# Requests in progress at once. A reader that waits for the source occupies one.
_MAX_TASKS = 20_000
# Idle tasks that are kept; with fewer, each burst would start and end some.
_IDLE_TASKS = 32
# The mount answers from memory. It only takes long if the machine does not run its processes.
_ANSWER_S = 60
# The readahead for sequential readers: the largest request of FUSE.
_READ_AHEAD_BYTES = 1 * MiB


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
        # Called before another process opens the file in ``drop``.
        self.before_drop: Callable[[Ino], None] = lambda _: None
        self._is_open = False
        self._storing = threading.Lock()
        # The process that drops pages now, and a lock: it is not reaped while it may be killed.
        self._dropping: subprocess.Popen[bytes] | None = None
        self._ending = threading.Lock()
        self._threads = ThreadPool(1, "pages", abandon=True)
        self._limiter = Limiter(log)

    def open(self) -> None:
        """The session exists from now on."""
        self._is_open = True

    def close(self) -> None:
        """The session may be freed from now on: no thread uses it any more. Paths of the mount lead
        elsewhere from now on, so no process drops pages any more."""
        with self._storing, self._ending:
            self._is_open = False
            if self._dropping is not None:
                self._dropping.kill()

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
            # ENOSYS: the kernel has not begun the session yet, so it has no attributes.
            if error.errno not in (errno.ENOENT, errno.ENOSYS):
                self._limiter.warning(
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
        """Stores the whole content of an inode in the page cache, in any thread. It is being
        opened, so no running read can have its pages locked."""
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
        self.before_drop(ino)
        self._threads.start(self._drop, os.path.join(self._mountpoint, self._path_of(ino)))

    def _drop(self, path: bytes) -> None:
        command: list[str | bytes] = [sys.executable, "-I", "-S", "-c", _DROP, path]
        null = subprocess.DEVNULL
        was_open = self._is_open
        if not was_open:
            return
        try:
            # Outside the lock: the process closes what it inherits, and the source may hang.
            process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
        except OSError:
            return
        with self._ending:
            self._dropping = process
            if not self._is_open:
                process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._ending:
            process.wait()
            self._dropping = None


@dataclass(eq=False, kw_only=True)
class Session:
    """The mount of ``operations`` at ``mountpoint``; ``source`` is shown as its device. A
    ``datapath`` is placed between the kernel and pyfuse3. ``caches`` are open while it exists."""

    operations: Operations
    mountpoint: Path
    source: bytes
    allow_other: bool
    writable: bool
    datapath: Datapath | None
    caches: MountCaches
    _serving: bool = field(default=False, init=False)
    # The device of FUSE once more, and the device number of the mount.
    _connection: int = field(default=-1, init=False)
    _number: str = field(default="", init=False)

    def mount(self) -> None:
        """Mounts; requests of the kernel wait until ``serve``. Raises FuseError."""
        name = self.source.decode("ascii", "backslashreplace")
        device = fuse = mount(
            self.mountpoint,
            name,
            allow_other=self.allow_other,
            writable=self.writable,
            has_acls=self.operations.enable_acl,
        )
        try:
            if (mounted := mount_at(self.mountpoint)) is not None:
                self._number = mounted.device
            self._connection = os.dup(device)
            if self.datapath is not None:
                fuse = self.datapath.start(device)
            # libfuse takes this name for a device that is mounted already.
            pyfuse3.init(self.operations, f"/dev/fd/{fuse}", set())
        except (OSError, RuntimeError) as error:
            is_mounted = self._is_mounted()
            # Processes that access the mount would wait until the device is closed.
            self._close_connection()
            if self.datapath is not None and fuse != device:
                self.datapath.stop()
            else:
                os.close(device)
            if is_mounted:
                unmount(self.mountpoint, lazy=True)
            raise FuseError(
                f"cannot serve {os.fspath(self.mountpoint)!r}: {error}", hint="run: monarch doctor"
            ) from error
        self._serving = True
        self.caches.open()

    async def serve(self) -> None:
        """Answers the kernel until the mount is unmounted or ``stop`` is called."""
        async with trio.open_nursery() as nursery:
            direct = self.operations.direct
            if direct is not None:
                await nursery.start(direct.run)
            await pyfuse3.main(min_tasks=_IDLE_TASKS, max_tasks=_MAX_TASKS)
            if direct is not None:
                direct.stop()

    def stop(self) -> None:
        if self._serving:
            pyfuse3.terminate()

    def close(self) -> None:
        """Unmounts, even if files are open, and frees the session."""
        self._serving = False
        self.caches.close()
        if self._is_mounted():
            with suppress(FuseError):
                unmount(self.mountpoint, lazy=True)
        self._close_connection()
        pyfuse3.close(unmount=False)
        if self.datapath is not None:
            self.datapath.stop()

    def _is_mounted(self) -> bool:
        """Whether this mount is still at its mount point: after its end there may be another one,
        perhaps with the same device number. A mount whose connection was aborted is dead."""
        mounted = mount_at(self.mountpoint)
        if mounted is None or mounted.device != self._number:
            return False
        if self._connection < 0:
            return True
        poll = select.poll()
        poll.register(self._connection, 0)
        is_ended = any(event & select.POLLERR for _, event in poll.poll(0))
        return not is_ended or is_dead(self.mountpoint)

    def _close_connection(self) -> None:
        if self._connection >= 0:
            os.close(self._connection)
            self._connection = -1

    def raise_limits(self) -> None:
        """Raises the readahead for sequential readers, which only root may do, and the limit of
        background requests, so that readers of a hanging source do not use it up.

        The kernel's default is 12 requests, and it limits an ordinary user further
        (``max_user_bgreq``). The datapath negotiates the limit itself. If the control files of FUSE
        are not mounted, as in a container, the limit is unchanged.
        """
        mounted = mount_at(self.mountpoint)
        if mounted is None:
            return
        readahead = f"/sys/class/bdi/{mounted.device}/read_ahead_kb"
        with suppress(OSError), open(readahead, "r+") as file:
            if int(file.read()) < _READ_AHEAD_BYTES // KiB:
                file.write(str(_READ_AHEAD_BYTES // KiB))
        if self.datapath is not None:
            return
        connection = f"/sys/fs/fuse/connections/{mounted.device.partition(':')[2]}"
        for name, most in (("max_background", 65535), ("congestion_threshold", 49152)):
            with suppress(OSError), open(f"{connection}/{name}", "w") as file:
                file.write(str(most))


async def wait_until_answered(mountpoint: Path) -> None:
    """Waits until the mount answers a request. Raises FuseError if it does not in a minute."""
    null = subprocess.DEVNULL
    # Another process: the daemon must not access its own mount (see ``_DROP``).
    asking = await trio.lowlevel.open_process(
        ["stat", "--", os.fspath(mountpoint)], stdin=null, stdout=null, stderr=null
    )
    with trio.move_on_after(_ANSWER_S) as patience:
        await asking.wait()
    if patience.cancelled_caught:
        asking.kill()
        raise FuseError(f"the mount at {os.fspath(mountpoint)!r} does not answer")
