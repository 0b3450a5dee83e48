"""A process that reads on command: ``python -S reader.py PIECE`` gets commands on standard input.

Commands and answers are values of ``marshal``, each behind its length in four bytes. It imports
next to nothing, so that one starts within milliseconds. PIECE is the size of its read calls.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import sys
from typing import Any

# Bytes of a map that are read in one system call.
_LOOK = 1 << 20


class Reader:
    """``slots`` are the files it keeps open, ``maps`` the maps of some of them."""

    def __init__(self, piece: int) -> None:
        self._piece = piece
        self._slots: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._copied = os.memfd_create("copied")

    def read(self, path: str) -> tuple[int, int, bytes, int]:
        """Open, read whole, close: errno of the open, size by fstat, bytes, errno of the read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return error.errno or 0, 0, b"", 0
        try:
            size = os.fstat(fd).st_size
            return 0, size, *self._all(fd)
        finally:
            os.close(fd)

    def open(self, slot: int, path: str) -> tuple[int, int]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return error.errno or 0, 0
        self._slots[slot] = fd
        return 0, os.fstat(fd).st_size

    def readall(self, slot: int) -> tuple[bytes, int]:
        return self._all(self._slots[slot])

    def pread(self, slot: int, offset: int, size: int) -> tuple[bytes, int]:
        return _pieces(self._slots[slot], offset, size, size)

    def forget(self, slot: int) -> int:
        """The next read of it is asked of the file system again."""
        os.posix_fadvise(self._slots[slot], 0, 0, os.POSIX_FADV_DONTNEED)
        return 0

    def map(self, slot: int) -> tuple[int, int]:
        """Map a file that is open: errno and the length of the map."""
        fd = self._slots[slot]
        try:
            size = os.fstat(fd).st_size
            if size:
                self._maps[slot] = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            return error.errno or 0, 0
        return 0, size

    def touch(self, slot: int, offset: int, size: int) -> tuple[bytes, int]:
        """Bytes of a map. A page that cannot be had is EFAULT here, as the kernel copies them."""
        got = b""
        with memoryview(self._maps[slot]) as whole, whole[offset : offset + size] as wanted:
            os.ftruncate(self._copied, 0)
            while len(got) < len(wanted):
                with wanted[len(got) : len(got) + _LOOK] as part:
                    try:
                        count = os.pwrite(self._copied, part, 0)
                    except OSError as error:
                        return got, error.errno or 0
                got += os.pread(self._copied, count, 0)
        return got, 0

    def close(self, slot: int) -> int:
        if slot in self._maps:
            self._maps.pop(slot).close()
        # A daemon that is gone cannot be notified; the descriptor is closed all the same.
        with contextlib.suppress(OSError):
            os.close(self._slots.pop(slot))
        return 0

    def reset(self) -> int:
        """Close whatever is open."""
        for slot in list(self._slots):
            self.close(slot)
        return 0

    def stat(self, path: str) -> tuple[int, int, int, int]:
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError as error:
            return error.errno or 0, 0, 0, 0
        return 0, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def names(self, path: str) -> tuple[int, list[str]]:
        try:
            return 0, sorted(os.listdir(path))
        except OSError as error:
            return error.errno or 0, []

    def _all(self, fd: int) -> tuple[bytes, int]:
        return _pieces(fd, 0, self._piece, sys.maxsize)


def _pieces(fd: int, offset: int, piece: int, size: int) -> tuple[bytes, int]:
    """Up to ``size`` bytes, fewer at the end and at an error, whose number comes with them."""
    parts: list[bytes] = []
    got = 0
    while got < size:
        try:
            part = os.pread(fd, min(piece, size - got), offset + got)
        except OSError as error:
            return b"".join(parts), error.errno or 0
        if not part:
            break
        parts.append(part)
        got += len(part)
    return b"".join(parts), 0


def main() -> None:
    reader = Reader(int(sys.argv[1]))
    commands, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := commands.read(4):
        name, *arguments = marshal.loads(commands.read(int.from_bytes(head, "little")))
        answer: Any = getattr(reader, name)(*arguments)
        raw = marshal.dumps(answer)
        answers.write(len(raw).to_bytes(4, "little") + raw)
        answers.flush()


if __name__ == "__main__":
    main()
