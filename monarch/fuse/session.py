"""One FUSE session: mount, answer the kernel until the end, unmount.

pyfuse3 keeps its session in module variables, so a process has one session at a time.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyfuse3
import trio

from monarch.errors import FuseError
from monarch.fuse.datapath import Datapath
from monarch.fuse.kernel_caches import MountCaches
from monarch.fuse.mountpoint import mount, mount_at, unmount
from monarch.fuse.operations import Operations
from monarch.units import KiB, MiB

# Requests in progress at once. A reader that waits for the source occupies one.
_MAX_TASKS = 10_000
# Idle tasks that are kept; with fewer, each burst would start and end some.
_IDLE_TASKS = 32
# The readahead for sequential readers: the largest request of FUSE.
_READ_AHEAD_BYTES = 1 * MiB


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

    def mount(self) -> None:
        """Mounts; requests of the kernel wait until ``serve``. Raises FuseError."""
        name = self.source.decode("ascii", "backslashreplace")
        device = fuse = mount(
            self.mountpoint, name, allow_other=self.allow_other, writable=self.writable
        )
        try:
            if self.datapath is not None:
                fuse = self.datapath.start(device)
            # libfuse takes this name for a device that is mounted already.
            pyfuse3.init(self.operations, f"/dev/fd/{fuse}", set())
        except (OSError, RuntimeError) as error:
            # Processes that access the mount would wait until the device is closed.
            if self.datapath is not None and fuse != device:
                self.datapath.stop()
            else:
                os.close(device)
            unmount(self.mountpoint, lazy=True)
            raise FuseError(
                f"cannot serve {os.fspath(self.mountpoint)!r}: {error}", hint="run: monarch doctor"
            ) from error
        self._serving = True
        self.caches.open()

    async def serve(self) -> None:
        """Answers the kernel until the mount is unmounted or ``stop`` is called."""
        await pyfuse3.main(min_tasks=_IDLE_TASKS, max_tasks=_MAX_TASKS)

    def stop(self) -> None:
        if self._serving:
            pyfuse3.terminate()

    def close(self) -> None:
        """Unmounts, even if files are open, and frees the session."""
        self._serving = False
        self.caches.close()
        if mount_at(self.mountpoint) is not None:
            with suppress(FuseError):
                unmount(self.mountpoint, lazy=True)
        pyfuse3.close(unmount=False)
        if self.datapath is not None:
            self.datapath.stop()

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
    """Waits until the mount answers a request. Raises FuseError if it does not in 10 seconds."""
    null = subprocess.DEVNULL
    # Another process: the daemon must not access its own mount (fuse/kernel_caches.py).
    asking = await trio.lowlevel.open_process(
        ["stat", "--", os.fspath(mountpoint)], stdin=null, stdout=null, stderr=null
    )
    with trio.move_on_after(10) as patience:
        await asking.wait()
    if patience.cancelled_caught:
        asking.kill()
        raise FuseError(f"the mount at {os.fspath(mountpoint)!r} does not answer")
