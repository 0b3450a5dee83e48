"""Bindings: what an open inode reads from, decided at its first open, kept until its last release.

All opens of an inode share one binding, so that its readers see one version of the bytes, and so
that a copy that is removed or replaced meanwhile disturbs nobody: the descriptor stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from monarch.placement.residency import SOURCE
from monarch.tiers.source import SourceFile
from monarch.types import Ino


class OpenCopy:
    """An open copy of a tier, and the number by which the kernel can read it itself, or 0.

    ``let_go`` gives such a number back that nobody has used.
    """

    __slots__ = ("_let_go", "backing_id", "fd")

    def __init__(self, fd: int, backing_id: int, let_go: Callable[[int], None]) -> None:
        self.fd = fd
        self.backing_id = backing_id
        self._let_go = let_go

    def take_backing_id(self) -> int:
        """The number, which is the caller's from now on."""
        taken, self.backing_id = self.backing_id, 0
        return taken

    def close(self) -> None:
        if self.backing_id:
            self._let_go(self.take_backing_id())
        os.close(self.fd)


class Binding:
    """One open inode. Exactly one of ``content``, ``file`` and ``fd`` (not -1) gives its bytes.

    ``tier`` is where the bytes come from: SOURCE for ``content`` and ``file``. ``users`` counts
    the opens that were not released yet. ``outdated``: the source has another version by now.
    ``left`` are the bytes that were not given to reads that no open came before. One that is read
    from the source is offered for a copy again at ``offer_s`` of the loop's clock, then after
    ``pause_s``. ``copy`` is where ``fd`` comes from.
    """

    __slots__ = (
        "content",
        "copy",
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
        copy: OpenCopy | None = None,
        file: SourceFile | None = None,
        content: bytes | memoryview | None = None,
    ) -> None:
        self.ino = ino
        self.size = size
        self.left = size
        self.tier = tier
        self.copy = copy
        self.fd = copy.fd if copy is not None else -1
        self.file = file
        self.content = content
        self.users = 0
        self.outdated = False
        self.offer_s = 0.0
        self.pause_s = 0.0

    def fall_back(self, file: SourceFile) -> None:
        """Go on at the source. The copy's descriptor stays open: a read may still be using it."""
        self.fd = -1
        self.tier = SOURCE
        self.file = file

    def close(self) -> None:
        if self.copy is not None:
            self.copy.close()
            self.copy = None
        self.fd = -1
        if self.file is not None:
            self.file.release()
            self.file = None
        self.content = None
