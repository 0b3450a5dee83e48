"""Extended attributes: those that were set, access control lists, and what Monarch itself shows."""

from __future__ import annotations

from monarch.placement.residency import SOURCE
from monarch.posix import acl
from monarch.types import Ino
from monarch.vfs.read_side import ReadSide
from monarch.vfs.readers import Readers
from monarch.writeback.attributes import XATTR_DURABLE, WrittenAttributes

_OURS = b"user.monarch."
XATTR_TIER = b"user.monarch.tier"
XATTR_STATE = b"user.monarch.state"
XATTR_DIGEST = b"user.monarch.digest"


class ExtendedAttributes:
    """``writing`` has the attributes that were set through the mount, None if it is read-only."""

    def __init__(self, read: ReadSide, readers: Readers, writing: WrittenAttributes | None) -> None:
        self._names = read.names
        self._residency = read.residency
        self._records = read.records
        self._metrics = read.metrics
        self._catch_up = readers.catch_up
        self._writing = writing

    async def get(self, ino: Ino, name: bytes) -> bytes | None:
        """The value of an attribute that was set, of ``user.monarch.*`` of a regular file, or of an
        access control list. None if there is none. Raises SourceError."""
        if name in acl.NAMES:
            return self._acl(ino, name) or None
        writing = self._writing
        if writing is not None and name.startswith(b"user.") and not name.startswith(_OURS):
            there = await writing.xattrs_elsewhere(ino)
            if there is not None:
                return there.get(name)
        is_written = writing is not None and self._names.is_written(ino)
        if writing is not None and is_written and name not in (XATTR_TIER, XATTR_STATE):
            return writing.xattr(ino, name)
        if not self._names.attributes(ino).is_file:
            return None
        self._catch_up()
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
            return lists
        there = await self._writing.xattrs_elsewhere(ino)
        return lists + (list(there) if there is not None else self._writing.xattrs(ino))

    def _acl(self, ino: Ino, name: bytes) -> bytes:
        if not self._names.has_acls:
            return b""
        acls = self._names.acls(ino)
        if name == acl.DEFAULT:
            return acls.default
        return acl.with_mode(acls.access, self._names.attributes(ino).mode)
