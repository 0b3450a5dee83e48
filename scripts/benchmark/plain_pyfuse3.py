"""A plain read-only file system over a directory: what pyfuse3 costs by itself.

    python plain_pyfuse3.py SOURCE MOUNTPOINT

It does the least that a mount can do, and lets the kernel keep names, attributes and pages.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import pyfuse3
import trio

TIMEOUT_S = 3600
FIELDS = ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns")


class Plain(pyfuse3.Operations):
    """Inode numbers are those of the source; the path of an inode is kept since its lookup."""

    def __init__(self, source: bytes) -> None:
        super().__init__()
        self._paths: dict[int, bytes] = {pyfuse3.ROOT_INODE: source}
        self._listed: dict[int, list[os.DirEntry[bytes]]] = {}

    def _attributes(self, found: os.stat_result) -> Any:
        entry = pyfuse3.EntryAttributes()
        for field in FIELDS:
            setattr(entry, field, getattr(found, field))
        entry.st_atime_ns = entry.st_ctime_ns = found.st_mtime_ns
        entry.entry_timeout = entry.attr_timeout = TIMEOUT_S
        return entry

    async def getattr(self, inode: int, ctx: Any = None) -> Any:
        attributes = self._attributes(os.lstat(self._paths[inode]))
        attributes.st_ino = inode
        return attributes

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
        path = os.path.join(self._paths[parent], name)
        try:
            found = os.lstat(path)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        self._paths[found.st_ino] = path
        return self._attributes(found)

    async def opendir(self, inode: int, ctx: Any) -> int:
        with os.scandir(self._paths[inode]) as entries:
            self._listed[inode] = list(entries)
        return inode

    async def readdir(self, handle: int, start: int, token: Any) -> None:
        for number, entry in enumerate(self._listed[handle][start:], start + 1):
            found = entry.stat(follow_symlinks=False)
            if not pyfuse3.readdir_reply(token, entry.name, self._attributes(found), number):
                return
            self._paths[found.st_ino] = entry.path

    async def releasedir(self, handle: int) -> None:
        self._listed.pop(handle, None)

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        return pyfuse3.FileInfo(fh=os.open(self._paths[inode], os.O_RDONLY), keep_cache=True)

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        return os.pread(handle, size, offset)

    async def release(self, handle: int) -> None:
        os.close(handle)


def main(source: str, mountpoint: str) -> None:
    options = {*pyfuse3.default_options, "fsname=plain-pyfuse3", "ro", "default_permissions"}
    pyfuse3.init(Plain(os.fsencode(source)), mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
