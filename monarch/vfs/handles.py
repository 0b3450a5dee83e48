"""Bindings: what an open inode reads from, decided at its first open, kept until its last release.

All opens of an inode share one binding, so that its readers see one version of the bytes, and so
that a copy that is removed or replaced meanwhile disturbs nobody: the descriptor stays.
"""

from __future__ import annotations

import os

from monarch.placement.residency import SOURCE
from monarch.tiers.source import SourceFile
from monarch.types import Ino


class Binding:
    """One open inode. Exactly one of ``content``, ``file`` and ``fd`` (not -1) gives its bytes.

    ``tier`` is where the bytes come from: SOURCE for ``content`` and ``file``. ``users`` counts
    the opens that were not released yet. ``outdated``: the source has another version by now.
    ``left`` are the bytes that were not given to reads that no open came before. One that is read
    from the source is offered for a copy again at ``offer_s`` of the loop's clock, then after
    ``pause_s``.
    """

    __slots__ = (
        "_lost_fd",
        "content",
        "fd",
        "file",
        "ino",
        "left",
        "offer_s",
        "outdated",
        "pause_s",
        "size",
        "tier",
        "users",
    )

    def __init__(
        self,
        ino: Ino,
        size: int,
        *,
        tier: int = SOURCE,
        fd: int = -1,
        file: SourceFile | None = None,
        content: bytes | memoryview | None = None,
    ) -> None:
        self.ino = ino
        self.size = size
        self.left = size
        self.tier = tier
        self.fd = fd
        self.file = file
        self.content = content
        self.users = 0
        self.outdated = False
        self.offer_s = 0.0
        self.pause_s = 0.0
        self._lost_fd = -1

    def fall_back(self, file: SourceFile) -> None:
        """Go on at the source. The copy's descriptor stays open: a read may still be using it."""
        self._lost_fd, self.fd = self.fd, -1
        self.tier = SOURCE
        self.file = file

    def close(self) -> None:
        for fd in (self.fd, self._lost_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lost_fd = -1
        if self.file is not None:
            self.file.release()
            self.file = None
        self.content = None
