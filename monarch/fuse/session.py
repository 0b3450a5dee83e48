"""One FUSE session: mount, answer the kernel until the end, unmount.

pyfuse3 keeps its session in module variables, so a process has one session at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3
import trio

from monarch.errors import FuseError
from monarch.fuse.mountpoint import mount_at, unmount
from monarch.fuse.operations import Operations
from monarch.types import Ino
from monarch.units import KiB, MiB

log = logging.getLogger(__name__)

# Requests in progress at once. A reader waiting for the source holds one; the kernel queues more.
_MAX_TASKS = 10_000
# Tasks that wait for the next request; with fewer, each burst would start and end some.
_IDLE_TASKS = 32
# What the kernel reads ahead of a sequential reader: the largest request that FUSE can make.
_READ_AHEAD_BYTES = 1 * MiB


class Session:
    """The mount of ``operations`` at ``mountpoint``; ``source`` is shown as its device."""

    def __init__(
        self, operations: Operations, mountpoint: Path, source: bytes, *, allow_other: bool
    ) -> None:
        self._operations = operations
        self._mountpoint = mountpoint
        self._source = source
        self._allow_other = allow_other
        self._serving = False
        self._storing = threading.Lock()

    def mount(self) -> None:
        """Make the mount; the kernel's requests wait until ``serve``. Raises FuseError."""
        _check_device()
        name = self._source.decode("ascii", "backslashreplace").replace("\\", "\\\\")
        options = {
            "ro",
            "default_permissions",
            "subtype=monarch",
            "fsname=" + name.replace(",", "\\,"),
        }
        if self._allow_other:
            options.add("allow_other")
        with _captured_stderr() as told:
            try:
                pyfuse3.init(self._operations, os.fspath(self._mountpoint), options)
            except RuntimeError as error:
                words = told().strip() or str(error)
                raise FuseError(
                    f"cannot mount at {os.fspath(self._mountpoint)!r}: {words}",
                    hint="run: monarch doctor",
                ) from error
        self._serving = True

    async def serve(self) -> None:
        """Answer the kernel until the mount is taken away or ``stop`` is called."""
        await pyfuse3.main(min_tasks=_IDLE_TASKS, max_tasks=_MAX_TASKS)

    def stop(self) -> None:
        if self._serving:
            pyfuse3.terminate()

    def close(self) -> None:
        """Take the mount away, also from under open files, and free the session."""
        with self._storing:
            # From here on no thread touches the session, which is freed below.
            self._serving = False
        if mount_at(self._mountpoint) is not None:
            with suppress(FuseError):
                unmount(self._mountpoint, lazy=True)
        pyfuse3.close(unmount=False)

    def attributes_changed(self, ino: Ino) -> None:
        """Make the kernel ask again. It waits for nothing, so a request's own path may call it.

        Pages are not invalidated here: that waits for reads in flight, and a daemon that is killed
        in it can never die. The next open drops them instead.
        """
        if not self._serving:
            return
        try:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attr_only=True)
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.warning("the kernel did not take a change of inode %d: %s", ino, error)

    def store_pages(self, ino: Ino, content: bytes) -> None:
        """Give the kernel the whole content of an inode that is being opened, in any thread.

        Nobody has the inode open yet, so no page of it can be locked by a read in flight.
        """
        with self._storing:
            if self._serving:
                with suppress(OSError):
                    pyfuse3.notify_store(pyfuse3.InodeT(ino), 0, content)

    def widen_readahead(self) -> None:
        """Let the kernel ask for large pieces of a sequential reader's file, as root may.

        Touches the mount: call it in a thread, while the session serves.
        """
        device = os.stat(self._mountpoint).st_dev
        knob = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with suppress(OSError), open(knob, "r+") as file:
            if int(file.read()) < _READ_AHEAD_BYTES // KiB:
                file.write(str(_READ_AHEAD_BYTES // KiB))


async def answers(mountpoint: Path) -> None:
    """Wait until the mount answers a request; raises FuseError if it does not in 10 seconds."""
    with trio.move_on_after(10) as patience:
        await trio.to_thread.run_sync(os.stat, mountpoint, abandon_on_cancel=True)
    if patience.cancelled_caught:
        raise FuseError(f"the mount at {os.fspath(mountpoint)!r} does not answer")


def _check_device() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        hint = {
            errno.ENOENT: "load the kernel module: modprobe fuse",
            errno.EACCES: "ask the administrator for access to /dev/fuse",
            errno.EPERM: "allow the device in the container: --device /dev/fuse",
        }.get(error.errno or 0, "run: monarch doctor")
        raise FuseError(f"/dev/fuse: {error.strerror}", hint=hint) from error


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """Collect what libfuse and fusermount3 write to descriptor 2: it is the only reason given."""
    with tempfile.TemporaryFile() as collected:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(collected.fileno(), 2)

        def told() -> str:
            collected.seek(0)
            return collected.read().decode(errors="backslashreplace")

        try:
            yield told
        finally:
            os.dup2(saved, 2)
            os.close(saved)
