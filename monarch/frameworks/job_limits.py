"""Asks a mount to serve the session of this process as if its tiers were smaller, or its source
slower, and what the session has read (docs/hints.md)."""

from __future__ import annotations

import errno
import fcntl
import os
import time

from monarch.errors import MonarchError, NotMountedError
from monarch.foresight.messages import (
    HITS,
    MISSES,
    SOURCE_KIB,
    encode_count,
    encode_limit,
    request_number,
)
from monarch.posix.files import closing_fd
from monarch.text import KiB, escape_text

# How often a message is sent while the daemon has too many, and the interval in seconds.
_TRIES, _RETRY_S = 200, 0.01
_WHY = {
    errno.ENOTTY: "it is not a mount of Monarch, or it has no native datapath",
    errno.EINVAL: "its daemon is of a version that measures no jobs",
    errno.EOPNOTSUPP: "it is mounted with `open: none`, so its daemon does not see the opens",
    errno.ESRCH: "its daemon does not see this process (is it in a container of its own?)",
    errno.ENOSPC: "its daemon measures as many jobs as it can",
    errno.EPERM: "another user has this session measured",
}


class JobLimits:
    """The limits of the session of this process. They end with the process. Methods raise
    MonarchError; NotMountedError if the mount cannot measure the session.

    No directory stays open between two messages: it would keep the mount from being unmounted."""

    def __init__(self, mountpoint: str) -> None:
        # The directory of the process may change.
        self._mountpoint = os.path.abspath(mountpoint)

    def limit(self, share: float, source_limit: int) -> None:
        """From now on ``share`` of the files may be read from tiers, and the source gives at most
        ``source_limit`` bytes/s, 0: as many as it can."""
        self._send(encode_limit(share, source_limit))

    def counts(self) -> tuple[int, int, int]:
        """The opens that tiers have served so far, the other opens, and the bytes that were read
        from the source, in whole KiB."""
        hits, misses, kib = (self._send(encode_count(n)) for n in (HITS, MISSES, SOURCE_KIB))
        return hits, misses, kib * KiB

    def _send(self, message: bytes) -> int:
        try:
            return self._tried(message)
        except OSError as error:
            where, why = escape_text(self._mountpoint), _WHY.get(error.errno or 0)
            what = f"{where} cannot measure a job: {why or error.strerror}"
            raise (NotMountedError if why else MonarchError)(what) from error

    def _tried(self, message: bytes) -> int:
        """Sends a message again while too many wait. Raises OSError."""
        number = request_number(len(message))
        for _ in range(_TRIES):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            try:
                with closing_fd(os.open(self._mountpoint, flags)) as fd:
                    return int(fcntl.ioctl(fd, number, bytearray(message), True))
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(_RETRY_S)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
