"""The native datapath: the only module that knows the C extension between kernel and pyfuse3.

The extension is optional. It answers what needs no decision (names, opens and reads of resident
files) in threads of its own, without the interpreter, and tells afterwards what it has served;
_datapath.c draws who talks to whom. Without it everything works through pyfuse3 alone.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from monarch.metrics import BUCKETS_S
from monarch.namespace.schema import CHILDREN, INODES, NAMES
from monarch.namespace.snapshot import Snapshot
from monarch.placement.residency import COPYING, DIFFERS, UNUSABLE, Residency
from monarch.settings import LimitSettings
from monarch.tiers.directory import Tier
from monarch.tiers.source import Source
from monarch.transfer.readers import SourceTraffic
from monarch.types import Ino
from monarch.units import MiB
from monarch.vfs.served import Served, Tally

# The numbers of the tables in _names.h.
_TABLES = {INODES: 0, NAMES: 1, CHILDREN: 2}
# A file handle of a read that the extension passes on: the inode number, and behind it the token
# by which the read is answered (_datapath.c, TOKEN_SHIFT).
_TOKEN_SHIFT = 40
_INO_MASK = (1 << _TOKEN_SHIFT) - 1
_WRITE_SYNC = 1 << 60
# Threads that wait for requests. More of them than processors, since some wait for disks.
_THREADS_PER_CPU = 2
_MAX_THREADS = 32
# What one end may have sent that the other has not taken yet. Above the largest message.
_SOCKET_BYTES = 4 * MiB
_SO_SNDBUFFORCE = 32


def _extension() -> ModuleType:
    return importlib.import_module("monarch.fuse._datapath")


def built() -> bool:
    """Whether the extension was compiled when Monarch was installed."""
    try:
        _extension()
    except ImportError:
        return False
    return True


def split_handle(fh: int) -> tuple[Ino, int]:
    """The inode number of a read, and the token to answer it by, 0 if pyfuse3 is to answer.

    Of an fsync: and the low bits of the number of the user who asks.
    """
    return Ino(fh & _INO_MASK), fh >> _TOKEN_SHIFT


def split_write_handle(fh: int) -> tuple[Ino, bool]:
    """The inode number of a write, and whether it must be safe when it is answered."""
    return Ino(fh & _INO_MASK), bool(fh & _WRITE_SYNC)


@dataclass(frozen=True, slots=True)
class DatapathState:
    """What the extension has open and agreed upon with the kernel.

    ``serving``: it has begun to talk with the kernel. ``refusal`` is the errno with which the
    kernel refused a file of a tier for passthrough, 0 if it did not. ``ended`` is not 0 when the
    kernel has ended the session. ``oldest_wait_s`` is how long the call that has waited longest for
    the source has done so, 0 if none does. ``timed_out`` counts the callers that were told so.
    ``waiting`` requests wait for Python, for the source or for another request; the oldest request
    that is not answered came ``oldest_request_s`` ago.
    """

    serving: bool
    open_files: int
    backing_ids: int
    passthrough: bool
    no_open: bool
    refusal: int
    ended: int
    threads: int
    oldest_wait_s: float
    timed_out: int
    waiting: int
    oldest_request_s: float


class Datapath:
    """The extension, wired to one mount's tables. ``start`` gives it the device.

    What ``limits`` says of fetching small files holds for the extension, too. ``passthrough``: let
    the kernel read resident files itself where it will. ``no_open``: have the kernel open files
    without asking. ``decide_opens``: Python looks at every open. ``cache_listings``: the kernel may
    keep directory listings. ``ask_names``: Python is asked for names that the snapshot has not,
    and for listings as they begin. ``as_caller``: files are fetched with the rights of the process
    that opens them.
    """

    def __init__(
        self,
        *,
        snapshot: Snapshot,
        source: Source,
        limits: LimitSettings,
        residency: Residency,
        tiers: Sequence[Tier],
        passthrough: bool,
        no_open: bool,
        decide_opens: bool,
        cache_listings: bool,
        ask_names: bool,
        as_caller: bool,
    ) -> None:
        self._options = {
            "passthrough": passthrough,
            "no_open": no_open,
            "decide_opens": decide_opens,
            "cache_listings": cache_listings,
        }
        self._tiers = len(tiers)
        self._native: Any = _extension().Datapath(
            residency=residency.tiers_table,
            marks=residency.marks_table,
            differs=DIFFERS,
            unusable=UNUSABLE,
            copying=COPYING,
            entries=snapshot.entries,
            directories=snapshot.info().directories,
            bounds_ns=[round(bound * 1e9) for bound in BUCKETS_S],
            acls=[snapshot.acl_value(n + 1) for n in range(snapshot.info().acl_values)],
        )
        self._native.set_source(
            source.directory,
            limits.inline_max,
            limits.buffer_max,
            limits.source_concurrency,
            round((limits.source_timeout or 0) * 1e9),
        )
        if ask_names:
            self._native.ask_names()
        if as_caller:
            self._native.fetch_as_caller()
        for tier in tiers:
            self._native.add_tier(tier.number, tier.directory, tier.seals)
        snapshot.on_load(self._publish)

    def _publish(self, table: bytes, number: int, block: memoryview) -> None:
        if table in _TABLES:
            self._native.publish(_TABLES[table], number, block)

    # -- its life --------------------------------------------------------------------------------

    def start(self, device: int) -> int:
        """Answer what comes from ``device``; the descriptor that pyfuse3 takes for it.

        ``device`` belongs to the datapath from now on. Raises OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            _widen(end)
        cpus = len(os.sched_getaffinity(0))
        threads = min(_MAX_THREADS, 2 + _THREADS_PER_CPU * cpus)
        channel = ours.detach()
        try:
            self._native.start(device=device, channel=channel, threads=threads, **self._options)
        except BaseException:
            os.close(channel)
            theirs.close()
            raise
        return theirs.detach()

    def stop(self) -> None:
        """Let go of the device. Waits for the threads, but for those that hang in the source."""
        self._native.stop()

    def fileno(self) -> int:
        """Readable when something was served, or when the session has ended."""
        return int(self._native.fileno())

    def state(self) -> DatapathState:
        return DatapathState(**self._native.state())

    # -- tiers that come and go ------------------------------------------------------------------

    def shun(self, tier: int, shunned: bool) -> None:
        """Let Python look at every open of a copy there, or do without again."""
        self._native.shun(tier, shunned)

    def move(self, tier: Tier) -> None:
        """The tier's directory is another one now. In any thread: it may wait for the disk."""
        self._native.move_tier(tier.number, tier.directory, tier.seals)

    # -- what Python decides ---------------------------------------------------------------------

    def register(self, fd: int, tier: int) -> int:
        """A number by which the kernel can read ``fd`` itself, 0 if it cannot or will not.

        In any thread: it waits for the tier's disk.
        """
        return int(self._native.register(fd, tier))

    def unregister(self, backing_id: int) -> None:
        """Give back a number that was given to no ``bind``."""
        self._native.unregister(backing_id)

    def bind(self, ino: Ino, fd: int, *, tier: int, size: int, backing_id: int = 0) -> bool:
        """Serve an inode that is being opened from ``fd``, of which it keeps a duplicate.

        ``tier`` 0 is the source, ``size`` the bytes that the file must have. With ``backing_id``,
        which ``register`` has told, the kernel reads it. False if it is not possible now; then
        reads come to Python.
        """
        return bool(self._native.bind(ino, fd, tier, size, backing_id))

    def bind_written(self, ino: Ino, fd: int, *, tier: int, create: bool) -> bool:
        """Read and write an inode through ``fd``, of which it keeps a duplicate.

        The inode is being opened, or is open already: then readers that did not come by Python see
        the file, too. It stays bound until ``release_written``; to bind it again changes nothing.
        Reads are counted for ``tier``. What the disk does not take (ENOSPC, EDQUOT, EIO and the
        like) comes to Python as the write that it was. With ``create`` the inode is one that the
        call being answered creates.

        Whoever opens the file to write only may have ``direct_io`` with its handle.

        False if it is not possible now: all descriptors are in use, or the kernel reads the copy
        that the inode was, and as long as it does so it opens it in no other way. Reads and writes
        come to Python then. Raises ValueError for an inode above 2**40 or an unknown tier.
        """
        return bool(self._native.bind_written(ino, fd, tier, create))

    def set_objects(self, directory: int, *, tier: int) -> None:
        """Where the objects of written files lie. Before ``start``. Raises OSError."""
        self._native.set_objects(tier, directory)

    def know_object(self, ino: Ino, number: int) -> bool:
        """Let readers open the object of a file that was made through the mount, and that nobody
        has open to write, until ``forget_object``. They are not told; ``outdate`` tells of the last
        one's end. False if there is no memory for it."""
        return bool(self._native.know_object(ino, number))

    def forget_object(self, ino: Ino) -> None:
        """From now on each open of it comes to Python. Those who have it open go on."""
        self._native.forget_object(ino)

    def release_written(self, ino: Ino) -> None:
        """Nobody has a written inode open any more, as far as Python is told of it.

        A creation that it was bound for and that is not answered yet must fail then. Who was
        reading it before it was written goes on reading what it was bound to last.
        """
        self._native.release_written(ino)

    def unbind(self, ino: Ino) -> bool:
        """Have reads and writes of a written inode come to Python from now on.

        Waits for those that are under way, as long as the disk takes; in any thread. False if it is
        not bound so.
        """
        return bool(self._native.unbind(ino))

    def rebind(self, ino: Ino, fd: int, *, tier: int) -> bool:
        """Read and write it through ``fd`` after an ``unbind``, of which it keeps a duplicate.

        False if it was not unbound or is not bound any more, or if all descriptors are in use.
        Raises ValueError for an unknown tier.
        """
        return bool(self._native.rebind(ino, fd, tier))

    def written(self, ino: Ino) -> int:
        """How often a written inode was changed past Python since it was bound; 0 if it is not.

        Each change is counted when it is done, before its caller can know.
        """
        return int(self._native.written(ino))

    def lowest(self, ino: Ino, *, forget: bool) -> int:
        """The lowest offset of a written inode at which bytes were changed past Python since it was
        bound, or since that was asked with ``forget``; 2**64 - 1 if there is none.

        What is changed is told before and after: if it was asked in between, it is told again.
        """
        return int(self._native.lowest(ino, forget))

    def is_passed(self, ino: Ino) -> bool:
        """Whether the kernel reads an open inode by itself, and will until all have closed it."""
        return bool(self._native.is_passed(ino))

    def outdate(self, ino: Ino) -> bool:
        """The source has another version: whoever has the copy open keeps it whole.

        Then ``served`` tells of its last release, and this returns True.
        """
        return bool(self._native.outdate(ino))

    def answer(self, token: int, data: bytes | bytearray | memoryview) -> None:
        """Answer a read that was passed on; without the interpreter's lock."""
        self._native.answer(token, data)

    def store(self, ino: Ino, data: bytes) -> bool:
        """Give the kernel the first bytes of an inode that no read can be waiting for."""
        return bool(self._native.store(ino, data))

    # -- what it has served ----------------------------------------------------------------------

    def served(self) -> list[Served]:
        """What happened since the last call, in its order."""
        happened: list[Served] = self._native.events()
        return happened

    def taken(self, ino: Ino) -> None:
        """What was fetched of ``ino`` need not be held any longer for reads to come."""
        self._native.taken(ino)

    def was_given(self, ino: Ino) -> bool:
        """Whether bytes of ``ino`` were read that no open came before."""
        return bool(self._native.was_given(ino))

    def tallies(self) -> list[Tally]:
        """What was served so far, for each tier; place 0 is the source."""
        return [Tally(*row) for row in self._native.tallies(self._tiers + 1)]

    def source_traffic(self) -> SourceTraffic:
        """What readers have asked of the source so far, past the event loop."""
        return SourceTraffic(*self._native.source())

    def open_files(self) -> int:
        """Opens that were not released yet, those that Python answered included."""
        return self.state().open_files

    def backing_ids(self) -> int:
        """Files that the kernel was given to read itself and has not given back."""
        return self.state().backing_ids

    def reached(self, ino: Ino) -> int:
        """How far a reader has gone through an open file of the source, in bytes."""
        return int(self._native.reached(ino))


def _widen(end: socket.socket) -> None:
    """Room for many messages. Only root may go beyond what the machine allows (wmem_max)."""
    for option in (_SO_SNDBUFFORCE, socket.SO_SNDBUF):
        try:
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        except OSError:
            continue
        return
