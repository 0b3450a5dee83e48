"""Temporary names at the source: of files that are staged, and of second links to files."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from monarch.posix.descriptors import closing_fd
from monarch.posix.names import NO_LINKS
from monarch.posix.sparse import copy_data
from monarch.writeback.source_log import SourceLog

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Temporaries:
    """``token`` of the journal is part of all names, so no file of others is mistaken for one."""

    def __init__(self, token: str, log: SourceLog) -> None:
        self._prefix = b".monarch-%s-" % token.encode("ascii")
        self._log = log

    def part(self, number: int, *, through: bool = False) -> bytes:
        """The name of an object's staged file; ``through``: of a file with its bytes only there."""
        return b"%s%d%s.part" % (self._prefix, number, b"-through" if through else b"")

    def link(self, number: int) -> bytes:
        """The name of a second link to the file of an object.

        It differs from ``part``: another content of the object may be staged already.
        """
        return b"%s%d.link" % (self._prefix, number)

    def link_over(self, fd: int, name: bytes, to_fd: int, to_name: bytes, number: int) -> None:
        """Links a file of an object to ``to_name``, replacing an entry there; a source without hard
        links gets a copy. Raises OSError."""
        link = self.link(number)
        with suppress(FileNotFoundError):
            os.unlink(link, dir_fd=to_fd)
        try:
            os.link(name, link, src_dir_fd=fd, dst_dir_fd=to_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._log.note_refused("hard links, and gets copies,", error, name)
            _copy(fd, name, to_fd, link)
        os.rename(link, to_name, src_dir_fd=to_fd, dst_dir_fd=to_fd)
        # If both names led to one file already, the rename has done nothing.
        with suppress(FileNotFoundError):
            os.unlink(link, dir_fd=to_fd)

    def sweep(self, above_fd: int, name: bytes) -> bool:
        """Removes the temporary files in a directory; returns whether there were any. Raises
        OSError."""
        found = False
        with suppress(NotADirectoryError):
            with closing_fd(os.open(name, _DIRECTORY, dir_fd=above_fd)) as fd:
                # Names of a descriptor come as text.
                for each in map(os.fsencode, os.listdir(fd)):
                    if each.startswith(self._prefix):
                        os.unlink(each, dir_fd=fd)
                        found = True
        return found


def _copy(fd: int, name: bytes, to_fd: int, to_name: bytes) -> None:
    """Makes a copy of a file instead of a link, with its owner, mode and times."""
    with closing_fd(os.open(name, _TO_READ, dir_fd=fd)) as source:
        status = os.fstat(source)
        with closing_fd(os.open(to_name, NEW, 0o600, dir_fd=to_fd)) as target:
            copy_data(source, target, status.st_size)
            with suppress(OSError):
                os.fchown(target, status.st_uid, status.st_gid)
            os.fchmod(target, stat.S_IMODE(status.st_mode))
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(target)
