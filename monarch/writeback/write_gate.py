"""Whether something may be changed: the patterns, the journal, and the memory for names."""

from __future__ import annotations

import errno
import math
import os
import time
from dataclasses import dataclass

from monarch.config.write_patterns import WritePatterns, is_staged
from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES
from monarch.posix.mounts import mount_table
from monarch.types import Ino
from monarch.writeback.change_log import ChangeLog
from monarch.writeback.open_files import OBJECT_BYTES
from monarch.writeback.space import SpaceReclaimer
from monarch.writeback.tier_objects import TierObjects
from monarch.writeback.unlinked import UnlinkedFiles

# How long the mount table is not read again, in seconds.
_FRESH_S = 1.0


@dataclass(eq=False, repr=False)
class WriteGate:
    """Belongs to the event loop. Everything raises Refused.

    Names that the snapshot does not have, and what else is kept in memory, may take as much as
    ``names_max`` new files.
    """

    _names: Namespace
    patterns: WritePatterns
    _changes: ChangeLog
    _objects: TierObjects
    _unlinked: UnlinkedFiles
    _space: SpaceReclaimer
    names_max: int
    file_systems: FileSystems

    def require_covered(self, parent: Ino, name: bytes) -> bytes:
        """The path of a name that may be made, changed or removed."""
        path = self._require_pattern(self._names.path_of(parent, name))
        if is_staged(name):
            # At the source such a name is of a file on its way there.
            raise Refused(errno.EPERM)
        return path

    def require_node_covered(self, ino: Ino) -> bytes:
        """The path of an inode that may be changed."""
        return self._require_pattern(self._names.visible_path(ino))

    def _require_pattern(self, path: bytes) -> bytes:
        self.require_journal()
        if not self.patterns.covers(path):
            raise Refused(errno.EROFS)
        return path

    def require_journal(self) -> None:
        if self._changes.is_broken:
            raise Refused(errno.EIO)

    async def require_room(self) -> None:
        """Before a change that takes room of the journal's disk; ENOSPC if there is none."""
        if self._changes.has_room():
            return
        if await self._space.make(OBJECT_BYTES):
            self._changes.note_delayed()
            if self._changes.has_room():
                return
        self._objects.count_failure(errno.ENOSPC)
        raise Refused(errno.ENOSPC)

    @property
    def names_held(self) -> int:
        """How many new files would take the memory that is in use."""
        return -(-self._names.held_bytes // NAME_BYTES)

    @property
    def names_free(self) -> int:
        """How many new files there may still be."""
        return max(0, self.names_max - self.names_held)

    def require_memory(self, count: int) -> None:
        """``count`` bytes of memory for names and attributes; ENOSPC if they are not left."""
        most = self.names_max * NAME_BYTES
        if count <= 0 or self._names.held_bytes + count <= most:
            return
        self._unlinked.forget_all()
        if self._names.held_bytes + count > most:
            raise Refused(errno.ENOSPC)

    def require_held(self, ino: Ino) -> None:
        """Memory for what is about to be noted of an inode, if nothing is noted of it yet."""
        if not self._names.is_written(ino):
            self.require_memory(NAME_BYTES)


class FileSystems:
    """The file systems that are mounted below the source. Belongs to the event loop."""

    def __init__(self, source: bytes) -> None:
        self._source = os.path.realpath(source)
        self._mount_points: list[bytes] = []
        self._read_s = -math.inf

    def require_one(self, path: bytes, other: bytes) -> None:
        """Raises Refused if the source cannot move or link a name from one path to the other,
        because these are in different file systems."""
        now = time.monotonic()
        if now - self._read_s > _FRESH_S:
            try:
                table = [os.fsencode(mounted.mount_point) for mounted in mount_table()]
            except OSError as error:
                raise Refused(error.errno or errno.EIO) from error
            self._mount_points = [at for at in table if at.startswith(self._source + b"/")]
            self._read_s = now
        if self._mount_points and self._of(path) != self._of(other):
            raise Refused(errno.EXDEV)

    def _of(self, path: bytes) -> bytes:
        full = os.path.join(self._source, path)
        holders = (at for at in self._mount_points if full == at or full.startswith(at + b"/"))
        return max(holders, key=len, default=b"")
