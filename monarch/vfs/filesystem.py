"""What the mount means, free of FUSE types: opens, reads and attributes of files.

An open of a file that is not written binds the inode to the best place that holds it
(``readers.py``). A file that was changed through the mount belongs to ``writeback``. Names and
attributes never ask the source.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Mapping

import trio

from monarch.errors import Refused
from monarch.foresight.foresight import Foresight
from monarch.placement.epochs import Epochs
from monarch.placement.residency import SOURCE
from monarch.posix import acl
from monarch.posix.buckets import bucket
from monarch.posix.credentials import Credentials
from monarch.tiers.tier import Space
from monarch.transfer.source_calls import Caller
from monarch.types import (
    XATTR_COPIES,
    XATTR_DIGEST,
    XATTR_DURABLE,
    XATTR_PREFIX,
    XATTR_STATE,
    XATTR_TIER,
    Attributes,
    Ino,
)
from monarch.vfs.measured import MeasuredJobs
from monarch.vfs.open_watch import OpenWatch
from monarch.vfs.read_side import ReadSide
from monarch.vfs.readers import Readers
from monarch.writeback.attributes import WrittenAttributes
from monarch.writeback.open_file import RELEASE_PAUSES_S
from monarch.writeback.setup import WriteBack


class FileSystem:
    """One mount, as the FUSE handlers see it. Belongs to the event loop.

    ``writing`` makes the changes of a mount that can be written, ``others`` finds changes that
    other mounts and programs make at the source; both are None if the mount is read-only and has
    nothing to drain. ``watch`` and ``measured`` as
    in ``Readers``.
    """

    def __init__(
        self,
        read: ReadSide,
        epochs: Epochs,
        foresight: Foresight,
        write_back: WriteBack | None,
        watch: OpenWatch | None = None,
        measured: MeasuredJobs | None = None,
    ) -> None:
        self.names = read.names
        self.bindings = read.bindings
        self.parts = read.parts
        self.revalidation = read.revalidation
        self._kernel, self._renewals = read.kernel, read.renewals
        self.writing = self.others = attributes = None
        if write_back is not None:
            self.writing, self.others = write_back.front, write_back.others
            attributes = self.writing.attributes
        self.measured = MeasuredJobs(bucket) if measured is None else measured
        self.readers = Readers(read, epochs, foresight, self.writing, watch, self.measured)
        # Ends one open of a file.
        self.release = self.readers.release
        self.xattrs = ExtendedAttributes(read, self.readers, attributes, self.measured)

    async def open(self, ino: Ino, flags: int, by: Credentials) -> bool:
        """Opens a file for one more user. Returns whether the kernel may keep its cached pages.

        ``flags`` as of open(2), ``by`` is the calling process. Raises SourceError with the source's
        errno if the file has to come from there and does not, ESTALE if it changes all the time;
        Refused if it cannot be written.
        """
        if self.writing is not None:
            # The places of its readers and of its writers are decided one after the other.
            await self.writing.copies.settled(ino)
        self._require_known(ino)
        is_written = self.writing is not None and self.writing.operations.has(ino)
        if is_written or flags & (os.O_ACCMODE | os.O_TRUNC):
            return await self._open_written(ino, flags, by, is_written=is_written)
        return await self.readers.open(ino)

    def _require_known(self, ino: Ino) -> None:
        if self.names.is_forgotten(ino):
            # The caller looks the name up again: another file may have it.
            raise Refused(errno.ESTALE)

    async def _open_written(
        self, ino: Ino, flags: int, by: Credentials, *, is_written: bool
    ) -> bool:
        if self.writing is None:
            raise Refused(errno.EROFS)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            await self.require_unread(ino)
            self._require_known(ino)
        elif self.bindings.is_read_by_kernel(ino):
            # The file got an object after the kernel began to read a copy of it. The kernel reads
            # an inode from one file only, so this process gets the same version.
            return await self.readers.open(ino)
        await self.writing.operations.open(ino, flags, by)
        return not self.writing.files.is_outdated(ino)

    async def require_unread(self, ino: Ino) -> None:
        """Raises Refused, ETXTBSY, if processes read a copy of a file, or the source's file: they
        would not see a change of its bytes, also if its attributes were changed since they opened
        it; and EROFS if it cannot be written at all.

        The kernel sends the release of a file after the process has closed it: this waits a second
        for that."""
        node = self.names.node(ino)
        if self.writing is not None and (node is None or node.names):
            self.writing.gate.require_node_covered(ino)
        for pause_s in RELEASE_PAUSES_S:
            await self.bindings.settled(ino)
            if self.bindings.get(ino) is None and not self.bindings.is_read_by_kernel(ino):
                return
            await trio.sleep(pause_s)
        raise Refused(errno.ETXTBSY)

    @property
    def limits_jobs(self) -> bool:
        """Whether it matters which process reads."""
        return self.readers.quotas is not None or not self.measured.is_empty

    def read(
        self, ino: Ino, offset: int, size: int, caller: Caller | None = None
    ) -> Awaitable[bytes | bytearray | memoryview]:
        """Up to ``size`` bytes from ``offset`` on of an open file; short only at its end.
        ``caller`` reads it, if that is known. Raises SourceError."""
        if self.writing is not None and self.writing.files.is_open(ino):
            return self.writing.files.read(ino, offset, size)
        return self.readers.read(ino, offset, size, caller)

    async def attributes(self, ino: Ino) -> Attributes:
        """The attributes for ``stat``; asks the source only for a file that was gone and is not
        open. Raises SourceError, ENOENT if it is still gone."""
        if (
            self.names.is_gone(ino)
            and self.bindings.get(ino) is None
            and not self.names.is_written(ino)
        ):
            await self.revalidation.find_again(ino)
        return self.latest(self.names.attributes(ino))

    def latest(self, attributes: Attributes) -> Attributes:
        """The same, with the present size and times of a file that is being written."""
        if self.writing is not None and self.writing.files.is_open(attributes.ino):
            return self.writing.attributes.of(attributes.ino)
        return attributes

    def room(self) -> Space | None:
        """The space for new data; None if the mount is read-only."""
        return self.writing.space.statfs() if self.writing is not None else None

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {
            "visits": self.readers.run,
            "jobs": self.readers.end_jobs,
            "sizes": self._kernel.run,
            "seals": self._renewals.run,
        }


class ExtendedAttributes:
    """``writing`` has the attributes that were set through the mount, None if it is read-only."""

    def __init__(
        self,
        read: ReadSide,
        readers: Readers,
        writing: WrittenAttributes | None,
        measured: MeasuredJobs,
    ) -> None:
        self._names = read.names
        self._residency = read.residency
        self._records = read.records
        self._metrics = read.metrics
        self._copies = read.copies
        self._readers, self._measured = readers, measured
        self._writing = writing
        # The attributes in the namespace "user" that a source gives which never changes.
        self.of_source: Callable[[Ino], Mapping[bytes, bytes]] = _none

    async def get(self, ino: Ino, name: bytes) -> bytes | None:
        """The value of an attribute that was set, of ``user.monarch.*`` of a regular file, or of an
        access control list. None if there is none. Raises SourceError."""
        if name in acl.NAMES:
            return self._acl(ino, name) or None
        writing = self._writing
        if writing is not None and not name.startswith(XATTR_PREFIX):
            is_of_users = name.startswith(b"user.")
            there = await writing.xattrs_elsewhere(ino) if is_of_users else None
            return there.get(name) if there is not None else writing.xattr(ino, name)
        is_written = writing is not None and self._names.is_rewritten(ino)
        if writing is not None and is_written and name not in (XATTR_TIER, XATTR_STATE):
            return writing.xattr(ino, name)
        if not name.startswith(XATTR_PREFIX) and name in (found := self.of_source(ino)):
            return found[name]
        if not self._names.attributes(ino).is_file:
            # Each open is recorded, or is answered in a way of its own.
            is_watched = self._readers.traced is not None or not self._measured.is_empty
            return self._copies.places() if name == XATTR_COPIES and not is_watched else None
        self._readers.catch_up()
        if writing is not None and is_written:
            tier = writing.tier_of(ino)
        else:
            tier = self._residency.tier_of(ino)
        if name == XATTR_DURABLE:
            return b"source"
        if name == XATTR_TIER:
            return self._metrics.names[tier].encode()
        if name == XATTR_STATE:
            if tier != SOURCE:
                return b"resident"
            return b"wanted" if not is_written and self._residency.is_wanted(ino) else b"source"
        if name == XATTR_DIGEST and tier != SOURCE:
            record = self._records.get(ino)
            return record.digest.hex().encode() if record is not None else None
        return None

    async def names(self, ino: Ino) -> list[bytes]:
        """The names of the attributes that were set, and of access control lists. Raises
        SourceError."""
        lists = [name for name in acl.NAMES if self._acl(ino, name)]
        if self._writing is None:
            return lists + [it for it in self.of_source(ino) if not it.startswith(XATTR_PREFIX)]
        there = await self._writing.xattrs_elsewhere(ino)
        others = there if there is not None else self._writing.xattrs(ino)
        return lists + [it for it in others if it not in acl.NAMES]

    def _acl(self, ino: Ino, name: bytes) -> bytes:
        if not self._names.has_acls:
            return b""
        acls = self._names.acls(ino)
        if name == acl.DEFAULT:
            return acls.default
        return acl.with_mode(acls.access, self._names.attributes(ino).mode)


def _none(ino: Ino) -> Mapping[bytes, bytes]:
    return {}
