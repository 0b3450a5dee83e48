"""The native datapath: the only module that uses the C extension between kernel and pyfuse3.

The extension is optional. Its own threads answer requests that need no decision (names, opens and
reads of resident files) without the interpreter, and report afterwards what they served.
_datapath.c draws the parts. Without the extension pyfuse3 answers all requests.
"""

from __future__ import annotations

import importlib
import os
import socket
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

from monarch.config.settings import LimitSettings
from monarch.namespace.schema import CHILDREN, INODES, NAMES
from monarch.namespace.snapshot import Snapshot
from monarch.placement.residency import COPYING, DIFFERS, FORCED, UNUSABLE, Residency
from monarch.telemetry.metrics import BUCKETS_S
from monarch.text import MiB
from monarch.tiers.source import Source
from monarch.tiers.tier import Tier
from monarch.transfer.source_load import CallTotals, SourceTraffic
from monarch.types import Attributes, Ino
from monarch.vfs.interfaces import Served, Tally

# The numbers of the tables in _names.h.
_TABLES = {INODES: 0, NAMES: 1, CHILDREN: 2}
# The file handle of a read that the extension passes on: the inode number, and above it the token
# with which the read is answered (_datapath.c, TOKEN_SHIFT).
_TOKEN_SHIFT = 40
_INO_MASK = (1 << _TOKEN_SHIFT) - 1
_WRITE_SYNC = 1 << 60
_WRITE_REMOVES_SET_ID = 1 << 59
# What is answered with attributes (_python_direct.c).
_ATTRIBUTES_ALONE, _NAME = -2, -1
# Threads that answer requests: more than processors, since some wait for disks.
_THREADS_PER_CPU = 2
_MAX_THREADS = 32
# The size of the socket's buffer: larger than the largest message.
_SOCKET_BYTES = 4 * MiB
_SO_SNDBUFFORCE = 32


# A request that does not go to pyfuse3: its number in the protocol, the number to answer it, the
# inode, user, group and process, and what depends on its kind.
DirectRequest: TypeAlias = tuple[int, int, int, int, int, int, tuple[Any, ...]]


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
    """The inode number of a read, and the token for its answer; 0 if pyfuse3 answers it. For an
    fsync: the inode number, and the low bits of the number of the calling user."""
    return Ino(fh & _INO_MASK), fh >> _TOKEN_SHIFT


def split_write_handle(fh: int) -> tuple[Ino, bool, bool]:
    """The inode number of a write, whether it must be durable before it is answered, and whether
    it removes the set-ID bits of the file."""
    return Ino(fh & _INO_MASK), bool(fh & _WRITE_SYNC), bool(fh & _WRITE_REMOVES_SET_ID)


@dataclass(frozen=True, slots=True)
class DatapathState:
    """The state of the extension, and what the kernel agreed to.

    ``serving``: it has begun to talk to the kernel. ``refusal``: the errno with which the kernel
    refused passthrough of a tier's file, 0 if it did not. ``ended`` is not 0 when the kernel has
    ended the session. ``oldest_wait_s``: the age of the oldest call to the source, 0 if there is
    none. ``timed_out`` counts callers that got a timeout. ``waiting``: the number of requests that
    wait for Python, for the source or for another request; ``oldest_request_s``: the age of the
    oldest unanswered request.
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


@dataclass(frozen=True, slots=True)
class DatapathOptions:
    """What the extension answers without Python.

    ``passthrough``: let the kernel read resident files itself if it can. ``no_open``: the kernel
    opens files without a request. ``decide_opens``: Python decides every open.
    ``cache_listings``: the kernel may cache directory listings. ``ask_names``: Python is asked for
    names that the snapshot does not have, and for the begin of listings. ``ask_xattrs``: and for
    extended attributes in the namespace "user". ``as_caller``: files are fetched with the rights of
    the opening process.
    """

    passthrough: bool
    no_open: bool
    decide_opens: bool
    cache_listings: bool
    ask_names: bool
    ask_xattrs: bool
    as_caller: bool


class Datapath:
    """The extension, connected to the tables of one mount. ``start`` gives it the device. The
    ``limits`` for fetching small files apply to it, too."""

    def __init__(
        self,
        *,
        snapshot: Snapshot,
        source: Source,
        limits: LimitSettings,
        residency: Residency,
        tiers: Sequence[Tier],
        options: DatapathOptions,
    ) -> None:
        self._options = options
        self._tiers = len(tiers)
        self._native: Any = _extension().Datapath(
            residency=residency.tiers_table,
            marks=residency.marks_table,
            differs=DIFFERS,
            unusable=UNUSABLE,
            copying=COPYING,
            forced=FORCED,
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
        if (extents := source.extents) is not None:
            self._native.set_pack(extents.file, extents.offset, extents.digest, extents.files)
            extents.lender.lend_to(self._native.lend, self._native.take_back)
        for tier in tiers:
            self._native.add_tier(tier.number, tier.directory, tier.seals)
        snapshot.on_load(partial(_publish, self._native))

    # -- start and end ---------------------------------------------------------------------------

    def start(self, device: int) -> int:
        """Answers the requests of ``device``; returns the descriptor for pyfuse3. ``device`` then
        belongs to the datapath. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            _widen(end)
        cpus = len(os.sched_getaffinity(0))
        threads = min(_MAX_THREADS, 2 + _THREADS_PER_CPU * cpus)
        channel = ours.detach()
        try:
            self._native.start(
                device=device, channel=channel, threads=threads, **asdict(self._options)
            )
        except BaseException:
            os.close(channel)
            theirs.close()
            raise
        return theirs.detach()

    def stop(self) -> None:
        """Closes the device. Waits for the threads, except those that hang at the source."""
        self._native.stop()

    def fileno(self) -> int:
        """A descriptor that is readable when there are events, or when the session has ended."""
        return int(self._native.fileno())

    def state(self) -> DatapathState:
        return DatapathState(**self._native.state())

    # -- tiers that come and go ------------------------------------------------------------------

    def bypass(self, tier: int, bypassed: bool) -> None:
        """Sends every open of a copy in ``tier`` to Python, or ends that."""
        self._native.shun(tier, bypassed)

    def measure(self, sessions: tuple[int, ...]) -> None:
        """Sends the first opens of files by processes of ``sessions`` to Python, and those of no
        other session any more. At most 16; raises ValueError for more."""
        self._native.measure(sessions)

    def throttled(self, change: int) -> None:
        """``change`` more requests wait with Python for the limits of their jobs, or fewer if it is
        negative. As many more requests that need the source may come to Python."""
        self._native.throttled(change)

    def move(self, tier: Tier) -> None:
        """Sets the new directory of a tier. In any thread: it may wait for the disk."""
        self._native.move_tier(tier.number, tier.directory, tier.seals)

    # -- what Python decides ---------------------------------------------------------------------

    def register(self, fd: int, tier: int) -> int:
        """Registers ``fd`` for passthrough; returns its number, 0 if the kernel refuses. In any
        thread: it waits for the tier's disk."""
        return int(self._native.register(fd, tier))

    def unregister(self, backing_id: int) -> None:
        """Releases a number that no ``bind`` has used."""
        self._native.unregister(backing_id)

    def bind(self, ino: Ino, fd: int, *, tier: int, size: int, backing_id: int = 0) -> bool:
        """Serves an inode that is being opened from a duplicate of ``fd``.

        ``tier`` 0 is the source, ``size`` the size that the file must have. With ``backing_id``,
        from ``register``, the kernel reads it. Returns False if reads must come to Python now.
        """
        return bool(self._native.bind(ino, fd, tier, size, backing_id))

    def end_binding(self, ino: Ino) -> None:
        """Ends ``bind`` after the last release. An open that was not answered yet is to be bound
        anew, maybe to another version."""
        self._native.end_binding(ino)

    def bind_part(self, ino: Ino, fd: int, *, tier: int, size: int) -> bool:
        """Answers reads of an inode that is being opened or is bound from a duplicate of ``fd``,
        the partial copy (tiers/partial.py) of a file of ``size`` bytes. A read with a granule that
        is not present comes to Python. Returns False if all reads must."""
        return bool(self._native.bind_part(ino, fd, tier, size))

    def drop_part(self, ino: Ino) -> None:
        """Ends ``bind_part``: reads are answered as if there were no partial copy."""
        self._native.drop_part(ino)

    def watch(self, ino: Ino, offset: int) -> None:
        """Sends reads of a bound inode that end behind ``offset`` to Python; 0 ends this."""
        self._native.watch(ino, offset)

    def bind_written(self, ino: Ino, fd: int, *, tier: int, create: bool, writer: int = 0) -> bool:
        """Serves reads and writes of an inode, which is being opened or is open, from a duplicate
        of ``fd``. Readers that were opened without Python see the file, too.

        It stays bound until ``release_written``; binding it again changes the ``writer`` only. That
        is the user with whose rights it is written; 0: with those of the process that writes. Reads
        count for ``tier``. A write that the disk refuses (ENOSPC, EDQUOT, EIO and similar) comes to
        Python. With ``create`` the inode is the one that the current call creates. A process that
        opens the file for writing only may get ``direct_io`` with its handle.

        Returns False if all must come to Python now: no descriptor is free, or the kernel reads the
        former copy by passthrough. Raises ValueError for an inode above 2**40 or an unknown tier.
        """
        return bool(self._native.bind_written(ino, fd, tier, create, writer))

    def set_objects(self, directory: int, *, tier: int) -> None:
        """Sets the directory of the objects of written files. Before ``start``. Raises OSError."""
        self._native.set_objects(tier, directory)

    def know_object(self, ino: Ino, number: int) -> bool:
        """Lets readers open the object of a file that was created through the mount and is not open
        for writing, until ``forget_object``. These opens are not reported; ``outdate`` reports the
        end of the last one. Returns False if there is no memory for it."""
        return bool(self._native.know_object(ino, number))

    def forget_object(self, ino: Ino) -> None:
        """Sends each open of the inode to Python from now on. Existing opens are not affected."""
        self._native.forget_object(ino)

    def name_given(self, parent: Ino, name: bytes) -> None:
        """Records that a name that is not in the snapshot exists; must be called before a process
        can see it."""
        self._native.name_given(parent, name)

    def name_taken(self, parent: Ino, name: bytes) -> None:
        """Records that a name that was passed to ``name_given`` is free again."""
        self._native.name_taken(parent, name)

    def serve_missing(self, directory: Ino, *, valid_s: int, for_s: float) -> None:
        """Lets the datapath answer for missing names of a directory for ``for_s`` seconds: names
        that are neither in the snapshot nor passed to ``name_given``. The kernel may cache each
        answer for ``valid_s`` seconds.

        The datapath does so only while its table has a place for the directory. After 0 seconds
        Python is asked again.
        """
        self._native.serve_missing(directory, valid_s, round(for_s * 1e9))

    def serve_attributes(self, now: Attributes) -> None:
        """Lets the datapath answer for the attributes of a directory until ``forget_attributes``,
        as long as its table has a place for the directory (``serve_missing``)."""
        self._native.serve_attributes(_numbers(now))

    def forget_attributes(self, ino: Ino) -> None:
        """Must be called before the attributes of an inode change: Python is asked from then on."""
        self._native.forget_attributes(ino)

    def release_written(self, ino: Ino) -> None:
        """Ends the binding of a written inode, when no open that Python knows is left.

        An unanswered creation for which it was bound must then fail. Processes that opened it for
        reading before it was written continue to read the last binding.
        """
        self._native.release_written(ino)

    def unbind(self, ino: Ino) -> bool:
        """Sends reads and writes of a written inode to Python. Waits for the running ones, in any
        thread. Returns False if the inode is not bound for writing."""
        return bool(self._native.unbind(ino))

    def rebind(self, ino: Ino, fd: int, *, tier: int) -> bool:
        """Serves an inode from a duplicate of ``fd`` after an ``unbind``. Returns False if it is
        not unbound, not bound any more, or no descriptor is free. Raises ValueError for an unknown
        tier."""
        return bool(self._native.rebind(ino, fd, tier))

    def know_set_id(self, ino: Ino, *, has_set_id: bool) -> None:
        """Records whether the mode of an inode may have set-ID bits, until its last release.

        If so, writes that remove these bits come to Python: those of users that bypass the page
        cache of the kernel. The kernel itself removes the bits at other writes of users.
        """
        self._native.know_set_id(ino, has_set_id)

    def written(self, ino: Ino) -> int:
        """The number of changes of a written inode without Python since it was bound, 0 for another
        inode. A change is counted when it is done, before its caller gets the answer."""
        return int(self._native.written(ino))

    def lowest(self, ino: Ino, *, forget: bool) -> int:
        """The lowest offset at which bytes of a written inode were changed without Python since it
        was bound, or since the last call with ``forget``; 2**64 - 1 if there is none.

        A change is recorded before and after it is made, so two calls may report it.
        """
        return int(self._native.lowest(ino, forget))

    def is_open(self, ino: Ino) -> bool:
        """Whether a process has an inode open, or is about to, also where Python saw no open."""
        return bool(self._native.is_open(ino))

    def is_passed(self, ino: Ino) -> bool:
        """Whether the kernel reads an open inode by passthrough, until its last close."""
        return bool(self._native.is_passed(ino))

    def outdate(self, ino: Ino) -> bool:
        """The source has another version: existing readers of the copy keep it. If there are any,
        returns True, and ``served`` reports the last release of the copy."""
        return bool(self._native.outdate(ino))

    def answer(self, token: int, data: bytes | bytearray | memoryview) -> None:
        """Answers a read that was passed on; releases the interpreter lock meanwhile."""
        self._native.answer(token, data)

    def reader(self, token: int) -> tuple[int, int, int] | None:
        """The process, user and group that have sent a read that was passed on; None if it does not
        wait any more."""
        found: tuple[int, int, int] | None = self._native.reader(token)
        return found

    def store(self, ino: Ino, data: bytes) -> bool:
        """Stores the first bytes of an inode in the page cache; no read of it may be waiting."""
        return bool(self._native.store(ino, data))

    # -- requests without pyfuse3 ----------------------------------------------------------------

    def take_over(self) -> int:
        """From now on requests that change names or attributes, or ask for them, are handed out by
        ``requests`` and do not go to pyfuse3. Returns a descriptor that is readable while there are
        any. Raises OSError."""
        return int(self._native.take_over())

    def requests(self) -> list[DirectRequest]:
        """The requests since the last call, in their order. Each must be answered once."""
        found: list[DirectRequest] = self._native.requests()
        return found

    def requests_so_far(self) -> int:
        """How many requests there were for ``requests`` until now."""
        return int(self._native.requests_so_far())

    def refused_hints(self) -> tuple[int, int, int]:
        """How many hints were refused since the last call, as too many waited; and the user and the
        process that have sent the last of them."""
        refused: tuple[int, int, int] = self._native.refused_hints()
        return refused

    def answer_error(self, unique: int, number: int) -> None:
        """Answers a request with an errno; 0 if it succeeded and has no other answer."""
        self._native.answer_error(unique, number)

    def answer_ioctl(self, unique: int, result: int) -> None:
        """Answers an ioctl that succeeded: its caller gets ``result``, 0 or more."""
        self._native.answer_ioctl(unique, result)

    def answer_missing(self, unique: int, *, valid_s: int) -> None:
        """Answers a lookup: the name does not exist, which the kernel may cache."""
        self._native.answer_missing(unique, valid_s)

    def answer_attributes(self, unique: int, now: Attributes, *, valid_s: int) -> None:
        """Answers with the attributes of an inode alone."""
        self._native.answer_attributes(unique, valid_s, _numbers(now), _ATTRIBUTES_ALONE)

    def answer_name(self, unique: int, now: Attributes, *, valid_s: int) -> None:
        """Answers with a name that leads to an inode with these attributes."""
        self._native.answer_attributes(unique, valid_s, _numbers(now), _NAME)

    def answer_created(self, unique: int, now: Attributes, *, valid_s: int, flags: int) -> None:
        """Answers a creation; ``flags`` of the open file as of linux/fuse.h (FOPEN_*)."""
        self._native.answer_attributes(unique, valid_s, _numbers(now), flags)

    # -- what it has served ----------------------------------------------------------------------

    def served(self) -> list[Served]:
        """The events since the last call, in their order."""
        happened: list[Served] = self._native.events()
        return happened

    def opened(self, events: bytes, directories: array[int]) -> array[int]:
        """The files that ``struct inotify_event`` in ``events`` name, in their order, as an array
        of type I. The table has the directory of each watch, 0 for none. If not all opens are
        reported, the last is 0; if the file system has ended, 2^32 - 1."""
        return array("I", self._native.opened(events, directories))

    def taken(self, ino: Ino) -> None:
        """Releases the fetched bytes of ``ino`` that were held for reads to come."""
        self._native.taken(ino)

    def keep(self, files: array[int], data: bytes | bytearray) -> list[memoryview | None]:
        """Keeps bytes for readers until ``unkeep``: ``files`` has for each file its inode number,
        and the begin and the number of its bytes in ``data``. These opens are reported as of the
        source. Returns views of the bytes; None for a file that is open, or without memory."""
        kept: list[memoryview | None] = self._native.keep(files, data)
        return kept

    def keep_unread(self, ino: Ino, content: bytes | memoryview, unread: int) -> bool:
        """Keeps the bytes of a file for reads without an open, until they have got ``unread`` bytes
        or pause for a second or two. False if such reads still come to Python."""
        return bool(self._native.keep_unread(ino, content, unread))

    def unkeep(self, ino: Ino) -> None:
        """Ends ``keep``; files that are open are read to their end."""
        self._native.unkeep(ino)

    # -- files that other nodes have (peers/connections.py) ---------------------------------------

    def set_peers(
        self,
        givers: object,
        digests: object,
        requests: Sequence[tuple[bytes, bytes] | None],
        *,
        gives_bytes: bool,
    ) -> None:
        self._native.set_peers(givers, digests, tuple(requests), gives_bytes)

    def keep_connection(self, member: int, fd: int, limit_us: int) -> bool:
        return bool(self._native.keep_connection(member, fd, limit_us))

    def take_connection(self, member: int) -> tuple[int, int] | None:
        found: tuple[int, int] | None = self._native.take_connection(member)
        return found

    def drop_connections(self, member: int) -> None:
        self._native.drop_connections(member)

    def received(
        self, member: int, limit_us: int, fair_us: int
    ) -> tuple[int, int, int, int, list[int]]:
        found: tuple[int, int, int, int, list[int]]
        found = self._native.received(member, limit_us, fair_us)
        return found

    # -- what it has served without an event -----------------------------------------------------

    def was_given(self, ino: Ino) -> bool:
        """Whether bytes of ``ino`` were read without an open."""
        return bool(self._native.was_given(ino))

    def tallies(self) -> list[Tally]:
        """Totals of each tier so far; index 0 is the source."""
        return [Tally(*row) for row in self._native.tallies(self._tiers + 1)]

    def totals(self, tier: int) -> CallTotals:
        """The opens and reads of one tier so far."""
        tally = self.tallies()[tier]
        return CallTotals(tally.opens + tally.reads, (tally.open_ns + tally.read_ns) / 1e9)

    def oldest_wait_s(self) -> float:
        """The age of the oldest call to the source, in seconds; 0 if there is none."""
        return self.state().oldest_wait_s

    def source_traffic(self) -> SourceTraffic:
        """The traffic of readers to the source so far, outside the event loop."""
        return SourceTraffic(*self._native.source())

    def open_files(self) -> int:
        """The number of opens without a release, including those that Python answered."""
        return self.state().open_files

    def backing_ids(self) -> int:
        """The number of files that are registered for passthrough."""
        return self.state().backing_ids

    def reached(self, ino: Ino) -> int:
        """The position, in bytes, of a reader of an open source file."""
        return int(self._native.reached(ino))


def _numbers(now: Attributes) -> tuple[int, ...]:
    """The attributes of an inode in the order of the extension."""
    return (
        now.ino,
        now.mode,
        now.nlink,
        now.uid,
        now.gid,
        now.rdev,
        now.size,
        now.blocks,
        now.mtime_ns if now.atime_ns is None else now.atime_ns,
        now.mtime_ns,
        now.ctime_ns,
    )


def _widen(end: socket.socket) -> None:
    """Enlarges the buffers of a socket; the limit is wmem_max, except for root."""
    for option in (_SO_SNDBUFFORCE, socket.SO_SNDBUF):
        try:
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        except OSError:
            continue
        return


def _publish(native: Any, table: bytes, number: int, block: memoryview) -> None:
    if table in _TABLES:
        native.publish(_TABLES[table], number, block)
