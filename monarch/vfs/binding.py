"""Bindings: what an open inode reads from, decided at its first open, kept until its last release.

All opens of an inode share one binding, so its readers see one version of the bytes, and the
removal or replacement of a copy does not disturb them: the descriptor stays open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from monarch.namespace.namespace import Namespace
from monarch.placement.residency import SOURCE
from monarch.text import MiB
from monarch.tiers.source import SourceFile
from monarch.transfer.source_calls import Caller
from monarch.types import Ino
from monarch.vfs.interfaces import FastPath
from monarch.vfs.measured import MeasuredJob
from monarch.vfs.units import OpenPart

# The first read of a watched file from this offset on decides how it is copied (parts.py).
WATCHED_FROM = 8 * MiB


@dataclass(slots=True, eq=False)
class OpenCopy:
    """An open copy of a tier, and the number by which the kernel can read it itself, or 0.
    ``unregister`` returns a number that was not used to the kernel."""

    fd: int
    backing_id: int
    unregister: Callable[[int], None]

    def take_backing_id(self) -> int:
        """Moves the number to the caller."""
        taken, self.backing_id = self.backing_id, 0
        return taken

    def close(self) -> None:
        if self.backing_id:
            self.unregister(self.take_backing_id())
        os.close(self.fd)


@dataclass(slots=True, eq=False)
class Binding:
    """One open inode. Exactly one of ``content``, ``file`` and ``fd`` (not -1) gives its bytes. A
    ``part``, a partial copy, gives those bytes that it has, and ``file`` the others.

    ``tier`` is where the bytes come from: SOURCE for ``content`` and ``file``. ``users`` counts
    the opens that were not released yet. ``outdated``: the source has another version now.
    ``unread_bytes`` limits the reads for which the kernel sent no open. A file that is read from
    the source is offered for a copy again at ``offer_s`` of the loop's clock, then after
    ``pause_s``. ``copy`` is the origin of ``fd``. ``is_watched``: its first reads decide how it is
    copied. ``has_old_pages``: at its first open the kernel may have had pages of another version,
    or its pages must not be used. ``job`` is measured, so all reads of the source come here.
    ``opener`` was the last process that opened the file, if it is known.
    ``is_shared``: other nodes may give bytes in the place of ``file``, so all reads come here.
    """

    ino: Ino
    size: int
    tier: int = SOURCE
    copy: OpenCopy | None = None
    file: SourceFile | None = None
    content: bytes | memoryview | None = None
    part: OpenPart | None = None
    is_watched: bool = False
    has_old_pages: bool = False
    job: MeasuredJob | None = None
    opener: Caller | None = None
    is_shared: bool = False
    users: int = 0
    outdated: bool = False
    offer_s: float = 0.0
    pause_s: float = 0.0
    fd: int = field(init=False)
    unread_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.fd = self.copy.fd if self.copy is not None else -1
        self.unread_bytes = self.size

    def fall_back(self, file: SourceFile) -> None:
        """Continues at the source. The copy's descriptor stays open: a read may be using it."""
        self.fd = -1
        self.tier = SOURCE
        self.file = file

    def put_file(self, file: SourceFile) -> None:
        """Adds the file at the source, unless another read has done so, or all users have gone."""
        if self.file is not None or not self.users:
            file.release()
        else:
            self.file = file

    @property
    def has_dropped_part(self) -> bool:
        return self.part is not None and self.part.is_dropped

    def close(self) -> None:
        if self.copy is not None:
            self.copy.close()
            self.copy = None
        self.fd = -1
        if self.file is not None:
            self.file.release()
            self.file = None
        self.content = None
        if self.part is not None:
            self.part.leave()
            self.part = None


class Bindings:
    """The open files of one mount: those that are bound here, and those that ``fast`` has open.
    ``held_bytes`` are the bytes of fetched files in memory."""

    def __init__(self, fast: FastPath | None) -> None:
        self._fast = fast
        self._bound: dict[Ino, Binding] = {}
        self.get = self._bound.get
        # For each inode that is being bound, an event that is set when this has ended.
        self._opening: dict[Ino, trio.Event] = {}
        self.held_bytes = 0

    def all(self) -> list[Binding]:
        return list(self._bound.values())

    @property
    def open_files(self) -> int:
        """The number of opens that were not released yet."""
        if self._fast is not None:
            return self._fast.open_files()
        return sum(binding.users for binding in self._bound.values())

    @property
    def backing_ids(self) -> int:
        """The number of files that the kernel was given to read itself."""
        return 0 if self._fast is None else self._fast.backing_ids()

    def is_open(self, ino: Ino) -> bool:
        """Whether a process has an unwritten file open, or is opening it."""
        is_fast = self._fast is not None and self._fast.is_open(ino)
        return is_fast or ino in self._bound or ino in self._opening

    def is_read_by_kernel(self, ino: Ino) -> bool:
        """Whether the kernel itself reads a copy that a process has open."""
        return self._fast is not None and self._fast.is_passed(ino)

    async def settled(self, ino: Ino) -> None:
        """Waits while an inode is being bound."""
        while (begun := self._opening.get(ino)) is not None:
            await begun.wait()

    def begin(self, ino: Ino) -> trio.Event | None:
        """Called to bind an inode that is not bound. If another open is binding it, returns an
        event that is set when this has ended; otherwise the caller must ``settle``."""
        begun = self._opening.get(ino)
        if begun is None:
            self._opening[ino] = trio.Event()
        return begun

    def settle(self, ino: Ino, binding: Binding | None) -> None:
        """Ends the open that ``begin`` began; without a binding, the next waiting open begins."""
        if binding is not None:
            self._bound[ino] = binding
            if binding.content is not None:
                self.held_bytes += len(binding.content)
        self._opening.pop(ino).set()

    def leave(self, ino: Ino) -> bool:
        """Removes one user. Returns whether that was the last user of an outdated version."""
        binding = self._bound[ino]
        binding.users -= 1
        if binding.users:
            return False
        del self._bound[ino]
        if binding.content is not None:
            self.held_bytes -= len(binding.content)
        if self._fast is not None:
            self._fast.end_binding(ino)
        binding.close()
        return binding.outdated

    def hand_over(self, binding: Binding, names: Namespace) -> None:
        """Lets the datapath read from the descriptor; reads without one come here, and those of the
        source if a measured job reads the file, also if the datapath has its descriptor."""
        if self._fast is None:
            return
        if binding.job is not None:
            self._fast.watch(binding.ino, 1)
        else:
            self._give_file(self._fast, binding, names)
        part = binding.part
        if part is not None and not part.is_dropped and part.file.fd >= 0:
            size = part.identity.size
            self._fast.bind_part(binding.ino, part.file.fd, tier=part.tier, size=size)

    def leave_content(self, binding: Binding) -> bool:
        """Lets the datapath answer the further reads of bytes in memory, for which the kernel sends
        no open: it would fetch a file that has left the window for each of them. Returns False if
        they still come here."""
        content = binding.content
        if content is None or binding.outdated or self._fast is None:
            return False
        return self._fast.keep_unread(binding.ino, content, binding.unread_bytes)

    @staticmethod
    def _give_file(fast: FastPath, binding: Binding, names: Namespace) -> None:
        fd = binding.file.fd if binding.file is not None else binding.fd
        if binding.is_shared and binding.fd < 0:
            size = names.attributes(binding.ino).size
            fast.bind(binding.ino, -1, tier=binding.tier, size=size, backing_id=0)
        elif fd >= 0:
            copy, size = binding.copy, names.attributes(binding.ino).size
            backing_id = copy.take_backing_id() if copy is not None else 0
            fast.bind(binding.ino, fd, tier=binding.tier, size=size, backing_id=backing_id)
        if binding.is_watched:
            fast.watch(binding.ino, WATCHED_FROM)

    def outdate_elsewhere(self, ino: Ino) -> bool:
        """Whether the datapath has a copy open; it then reports the last release of the copy."""
        return self._fast is not None and self._fast.outdate(ino)

    def close(self) -> None:
        """Closes all files that were open when the mount ended."""
        for binding in self._bound.values():
            binding.close()
        self._bound.clear()


def read_fully(fd: int, offset: int, size: int) -> bytes:
    """``size`` bytes, fewer only at the end of the file. Raises OSError."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def read_if_in_memory(fd: int, offset: int, size: int) -> bytes | bytearray:
    """The bytes that the page cache has, without waiting for a disk; may be short or empty."""
    buffer = bytearray(size)
    try:
        count = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return b""
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return b""
    del buffer[count:]
    return buffer
