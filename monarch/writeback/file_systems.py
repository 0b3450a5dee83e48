"""The file systems that are mounted below the source."""

from __future__ import annotations

import errno
import math
import os
import time

from monarch.errors import Refused
from monarch.posix.mounts import mount_table

# How long the mount table is not read again, in seconds.
_FRESH_S = 1.0


class FileSystems:
    """Belongs to the event loop."""

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
