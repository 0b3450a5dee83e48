"""What requests for names and attributes mean, for both ways on which they come.

Requests come through pyfuse3 (operations.py) or directly from the datapath (direct.py). Nothing
here uses the types of either way.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from monarch.errors import MonarchError, Refused
from monarch.fuse.datapath import Datapath
from monarch.posix.credentials import Credentials
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.transfer.source_calls import Caller
from monarch.types import Attributes, Ino, kept_ns
from monarch.vfs.filesystem import FileSystem
from monarch.writeback.front import WriteFront
from monarch.writeback.others import LOOK_S

# Names and attributes do not change unless the kernel is notified. In seconds: a day is long enough
# that the kernel does not ask again within an epoch.
VALID_S = 86400

# The limit of every file system that can be a source. The kernel itself allows 1024 bytes.
NAME_MAX = 255

# Errors by a lack of resources, which are not bugs.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})

ReceiveHint: TypeAlias = Callable[[bytes, Caller], int]

log = logging.getLogger(__name__)


def errno_of(error: Exception) -> int:
    """The errno with which a request fails, for any exception."""
    number = (error.errno if isinstance(error, OSError | MonarchError) else None) or errno.EIO
    # Many programs take EAGAIN for the end of the data, and would continue with half a file.
    return errno.EIO if number == errno.EAGAIN else number


class Handlers:
    """Belongs to the event loop. Raises MonarchError; Refused, EROFS, for a change of a mount that
    is read-only. ``count_error`` is called with the kind of an internal error.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        datapath: Datapath | None,
        count_error: Callable[[str], None],
        receive_hint: ReceiveHint,
    ) -> None:
        self._count_error = count_error
        # Answers a message about the next reads: called with the inode of its descriptor, the
        # message and the process, it returns a number for the process or raises MonarchError.
        self.hint = receive_hint
        # A bug in the path of each read must not displace all other lines of the log.
        self._limiter = Limiter(log)
        self.names = filesystem.names
        self._filesystem = filesystem
        self._datapath = datapath

    def unforeseen(self, handler: str, number: int) -> None:
        """Reports an exception of a handler that is no answer, and was converted to an errno."""
        self._count_error(f"handler-{handler}")
        if number in _SCARCE:
            words = "%s failed with %s: this process or machine is short of it"
            self._limiter.warning((handler, number), words, handler, errno_words(number))
            return
        self._limiter.exception(
            (handler, number),
            "internal error in %s(): returned %s to the caller; the mount continues."
            " This is a bug, please report it",
            handler,
            errno_words(number),
        )

    @property
    def writing(self) -> WriteFront:
        writing = self._filesystem.writing
        if writing is None:
            raise Refused(errno.EROFS)
        return writing

    async def answers(self) -> None:
        """Waits until names that are not in memory can be read."""
        await self.names.answers()

    # -- questions -------------------------------------------------------------------------------

    async def lookup(self, parent: Ino, name: bytes) -> Attributes | int:
        """The attributes of the entry with a name; if there is none, for how many seconds the
        kernel may cache that."""
        if name == b".":
            return self.names.attributes(parent)
        if name == b"..":
            return self.names.attributes(self.names.attributes(parent).parent)
        if len(name) > NAME_MAX:
            raise Refused(errno.ENAMETOOLONG)
        others = self._filesystem.others
        if others is not None:
            await others.listed(parent)
        ino = self.names.lookup(parent, name)
        if ino is None and (lost := self.names.lost(parent, name)) is not None:
            await self._filesystem.revalidation.find_again(lost)
            ino = lost
        if ino is None and others is not None and await others.catch_up(parent):
            ino = self.names.lookup(parent, name)
        if ino is not None:
            return self._filesystem.latest(self.names.attributes(ino))
        is_looked_at = others is not None and others.used(parent)
        valid_s = LOOK_S if is_looked_at else VALID_S
        if self._datapath is not None and (others is None or others.knows(parent)):
            # Asked again after a while, so that the directory stays one that is used.
            self._datapath.serve_missing(parent, valid_s=valid_s, for_s=LOOK_S)
        return valid_s

    async def getattr(self, ino: Ino) -> Attributes:
        return await self._filesystem.attributes(ino)

    # -- changes ---------------------------------------------------------------------------------

    async def create(
        self, parent: Ino, name: bytes, mode: int, umask: int, flags: int, by: Credentials
    ) -> tuple[Attributes, bool]:
        """A new file that is open, and whether its writes may bypass the kernel's page cache."""
        made = await self.writing.operations.create(parent, name, mode=mode, by=by, umask=umask)
        self._changed(parent)
        return made, self.is_direct(flags, made.mode)

    def is_direct(self, flags: int, mode: int) -> bool:
        """Whether writes of an open may bypass the page cache of the kernel.

        A process that opens a file for writing only cannot read or map through it; for other
        processes the kernel drops its pages. But for such a file the kernel does not clear set-ID
        bits at a write by a user, which is left to Python, also if the file gets the bits while it
        is open. The kernel also sends no fsync after a write with RWF_DSYNC, which only the
        datapath sees. With O_DSYNC or O_SYNC every write is synced, and one fsync each is
        better than one for each MiB.
        """
        return (
            self._datapath is not None
            and flags & (os.O_ACCMODE | os.O_DSYNC) == os.O_WRONLY
            and not mode & (stat.S_ISUID | stat.S_ISGID)
        )

    async def make(
        self,
        parent: Ino,
        name: bytes,
        mode: int,
        umask: int,
        by: Credentials,
        *,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Attributes:
        """A new entry that is not open."""
        operations = self.writing.operations
        if stat.S_IFMT(mode) in (0, stat.S_IFREG):
            made = await operations.make_file(parent, name, mode=mode, by=by, umask=umask)
        else:
            made = await operations.make(
                parent, name, mode=mode, by=by, umask=umask, rdev=rdev, target=target
            )
        self._changed(parent)
        return made

    async def link(self, ino: Ino, parent: Ino, name: bytes, by: Credentials) -> Attributes:
        linked = await self.writing.operations.link(ino, parent, name, by=by)
        self._changed(parent)
        return linked

    async def unlink(self, parent: Ino, name: bytes, by: Credentials) -> None:
        operations = self.writing.operations
        await operations.require_removable(parent, name, is_directory=False)
        operations.unlink(parent, name, by=by)
        self._changed(parent)

    async def rmdir(self, parent: Ino, name: bytes, by: Credentials) -> None:
        others, ino = self._filesystem.others, self.names.lookup(parent, name)
        if others is not None and ino is not None:
            await others.listed(ino)
        operations = self.writing.operations
        await operations.require_removable(parent, name, is_directory=True)
        operations.rmdir(parent, name, by=by)
        self._changed(parent)

    async def rename(
        self, parent: Ino, name: bytes, to_parent: Ino, to_name: bytes, flags: int, by: Credentials
    ) -> None:
        operations = self.writing.operations
        await operations.rename(parent, name, to_parent, to_name, flags, by=by)
        self._changed(parent, to_parent)

    async def setattr(self, ino: Ino, by: Credentials, **wanted: int | None) -> Attributes:
        if wanted.get("size") is not None:
            await self._filesystem.require_unread(ino)
        for name in ("atime_ns", "mtime_ns"):
            if (time_ns := wanted.get(name)) is not None:
                # A later time could not be shown.
                wanted[name] = kept_ns(time_ns)
        return await self.writing.attributes.change(ino, by=by, **wanted)

    async def release(self, ino: Ino) -> None:
        self._filesystem.release(ino)

    def _changed(self, *directories: Ino) -> None:
        """Names were given or taken in these directories; the kernel asks for the attributes of
        each after that."""
        others = self._filesystem.others
        if others is not None:
            for directory in directories:
                others.changed_here(directory)
        if self._datapath is None:
            return
        # What is not known now is asked for: the change itself is made.
        with suppress(MonarchError):
            for directory in directories:
                self._datapath.serve_attributes(self.names.attributes(directory))
