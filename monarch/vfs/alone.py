"""Reads of the source while its client reads nothing ahead."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

from monarch.tiers.source import SourceFile


class Alone:
    """The descriptors with such reads. Belongs to the event loop; no method waits.

    Reading ahead is a property of the descriptor: meanwhile it is off for its other reads, too.
    """

    def __init__(self) -> None:
        self._reads: Counter[int] = Counter()

    def begin(self, file: SourceFile) -> None:
        """Must be followed by ``end``, before the file is closed."""
        self._reads[file.fd] += 1
        if self._reads[file.fd] == 1:
            _advise(file.fd, os.POSIX_FADV_RANDOM)

    def end(self, file: SourceFile) -> None:
        self._reads[file.fd] -= 1
        if not self._reads[file.fd]:
            del self._reads[file.fd]
            _advise(file.fd, os.POSIX_FADV_NORMAL)


def _advise(fd: int, advice: int) -> None:
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, advice)
