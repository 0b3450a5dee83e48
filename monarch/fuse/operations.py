"""The FUSE handlers: turn requests into calls of the file system, and errors into errnos.

``WriteOperations`` changes names and attributes if the mount can be written. Every request of the
kernel has a handler here; requests that are not supported are refused. The handlers decide nothing.
An exception other than FUSEError would end pyfuse3's loop and the mount, so ``_answered`` converts
all: errors of Monarch or of a system call to their errno, an unexpected exception to EIO for that
caller and one traceback in the log.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

from monarch.errors import MonarchError, Unanswered
from monarch.fuse.datapath import Datapath, split_handle, split_write_handle
from monarch.fuse.datapath_mode import Serving
from monarch.fuse.direct import DirectRequests
from monarch.fuse.handlers import NAME_MAX, VALID_S, Handlers, ReceiveHint, errno_of
from monarch.posix import acl, failpoints
from monarch.posix.credentials import Credentials, credentials_of
from monarch.transfer.source_calls import CALLER, Caller
from monarch.types import XATTR_COPIES, XATTR_STATUS, Attributes, Ino
from monarch.vfs.filesystem import FileSystem

log = logging.getLogger(__name__)

_BLOCK = 4096
# Every listing begins with "." and "..".
_DOTS = 2

P = ParamSpec("P")
T = TypeVar("T")


def _answered(
    handler: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    point = f"handler-{handler.__name__}"

    @wraps(handler)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        # The tasks are reused: a variable not set here would keep the value of another call.
        last = args[-1]
        token = CALLER.set(
            Caller(last.pid, last.uid, last.gid) if isinstance(last, RequestContext) else None
        )
        operations = cast(Operations, args[0])
        try:
            with operations.serving.answering():
                if operations.direct is not None:
                    await operations.direct.catch_up()
                while True:
                    failpoints.failpoint(point)
                    try:
                        return await handler(*args, **kwargs)
                    except Unanswered:
                        # The call has changed nothing and is repeated. Other requests do not wait.
                        await operations.handlers.answers()
        except FUSEError:
            raise
        except MonarchError as error:
            raise FUSEError(errno_of(error)) from error
        except Exception as error:
            number = errno_of(error)
            operations.handlers.unforeseen(handler.__name__, number)
            raise FUSEError(number) from error
        finally:
            CALLER.reset(token)

    return answer


class Operations(pyfuse3.Operations):
    """pyfuse3's handlers over ``filesystem``. File and directory handles are inode numbers.

    ``count_error`` is called with the kind of an internal error. ``datapath`` answers the reads
    that it has passed on, so that their bytes take a direct way. ``status`` returns the public
    figures of the mount, an attribute of its root. ``serving`` counts the requests.
    ``receive_hint`` answers hints, which only the datapath passes on.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False

    def __init__(
        self,
        filesystem: FileSystem,
        count_error: Callable[[str], None],
        datapath: Datapath | None,
        status: Callable[[], bytes],
        serving: Serving,
        receive_hint: ReceiveHint,
    ) -> None:
        super().__init__()
        self.serving = serving
        self._status = status
        self._filesystem = filesystem
        self.names = filesystem.names
        # The kernel checks access control lists, and caches them. It requests that of each entry
        # that a user other than its owner uses, so it is enabled only if there are any.
        self.enable_acl = filesystem.names.has_acls
        self._datapath = datapath
        self._list_ends: dict[Ino, int] = {}
        self.handlers = Handlers(filesystem, datapath, count_error, receive_hint)
        self.direct: DirectRequests | None = None
        if datapath is not None:
            self.direct = DirectRequests(datapath, self.handlers)

    # -- names ---------------------------------------------------------------------------------

    @_answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        found = await self.handlers.lookup(Ino(parent_inode), name)
        if isinstance(found, Attributes):
            return _entry(found)
        # An entry with inode number 0: the kernel caches that the name does not exist.
        missing = EntryAttributes()
        missing.entry_timeout = found
        return missing

    @_answered
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return _entry(await self.handlers.getattr(Ino(inode)))

    @_answered
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self.names.readlink(Ino(inode))

    @_answered
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode

    @_answered
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        reply, directory = pyfuse3.readdir_reply, Ino(fh)
        others = self._filesystem.others
        if start_id == 0 and others is not None:
            await others.listed(directory)
            await others.catch_up(directory)
        if start_id == 0 and self._filesystem.writing is not None:
            # A process that renames the files that it finds must not find them again without end.
            self._list_ends[directory] = self.names.list_end(directory)
        end, start = self._list_ends.get(directory), max(0, start_id - _DOTS)
        children = self.names.list_from(directory, start, end=end)
        if start_id < _DOTS:
            own = self.names.attributes(directory)
            dots = ((b".", own), (b"..", self.names.attributes(own.parent)))
            for index, (name, attributes) in enumerate(dots[start_id:], start_id):
                if not reply(token, name, _entry(attributes), index + 1):
                    return
        # Entries that were returned are not repeated if a later one must be waited for.
        has_replied = False
        try:
            for index, name, attributes in children:
                entry = _entry(self._filesystem.latest(attributes))
                has_replied = True
                if not reply(token, name, entry, index + 1 + _DOTS):
                    return
        except Unanswered:
            if not has_replied:
                raise

    async def releasedir(self, fh: int) -> None:
        return

    async def forget(self, inode_list: object) -> None:
        """Does nothing: no state is kept per inode."""

    # -- bytes -----------------------------------------------------------------------------------

    @_answered
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        # The groups of a process that only reads are not needed.
        writes = flags & (os.O_ACCMODE | os.O_TRUNC)
        by = _caller(ctx) if writes else Credentials(ctx.uid, ctx.gid)
        keep_cache = await self._filesystem.open(Ino(inode), flags, by)
        mode = self.names.attributes(Ino(inode)).mode
        return FileInfo(
            fh=inode, keep_cache=keep_cache, direct_io=self.handlers.is_direct(flags, mode)
        )

    @_answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        ino, token = split_handle(fh)
        datapath = self._datapath if token else None
        caller = None
        if datapath is not None and self._filesystem.limits_jobs:
            # pyfuse3 does not tell who reads.
            found = datapath.reader(token)
            caller = None if found is None else Caller(*found)
        data = await self._filesystem.read(ino, off, size, caller)
        if datapath is not None:
            datapath.answer(token, data)
            return b""
        # pyfuse3 accepts any buffer and does not use it after the reply.
        return cast(bytes, data)

    @_answered
    async def release(self, fh: int) -> None:
        await self.handlers.release(Ino(fh))

    @_answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        made, direct_io = await self.handlers.create(
            Ino(parent_inode), name, mode, ctx.umask, flags, _caller(ctx)
        )
        return FileInfo(fh=made.ino, keep_cache=True, direct_io=direct_io), _entry(made)

    @_answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        ino, is_synced, removes_set_id = split_write_handle(fh)
        files = self.handlers.writing.files
        written = await files.write(ino, off, buf, removes_set_id=removes_set_id)
        if is_synced:
            await self.handlers.writing.fsyncs.sync(ino, None)
        return written

    @_answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        ino, asks = self._sync_target(fh)
        await self.handlers.writing.fsyncs.sync(ino, asks)

    @_answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        ino, asks = self._sync_target(fh)
        await self.handlers.writing.fsyncs.sync_directory(ino, asks)

    def _sync_target(self, fh: int) -> tuple[Ino, int | None]:
        """The inode, and the low bits of the number of the calling user, None if unknown."""
        return (Ino(fh), None) if self._datapath is None else split_handle(fh)

    # -- changes of names --------------------------------------------------------------------------

    @_answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        handlers, parent = self.handlers, Ino(parent_inode)
        return _entry(await handlers.make(parent, name, mode, ctx.umask, _caller(ctx), rdev=rdev))

    @_answered
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        parent, mode, by = Ino(parent_inode), stat.S_IFDIR | stat.S_IMODE(mode), _caller(ctx)
        return _entry(await self.handlers.make(parent, name, mode, ctx.umask, by))

    @_answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        parent, mode, by = Ino(parent_inode), stat.S_IFLNK | 0o777, _caller(ctx)
        return _entry(await self.handlers.make(parent, name, mode, 0, by, target=target))

    @_answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        parent, by = Ino(new_parent_inode), _caller(ctx)
        return _entry(await self.handlers.link(Ino(inode), parent, new_name, by))

    @_answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await self.handlers.unlink(Ino(parent_inode), name, _caller(ctx))

    @_answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await self.handlers.rmdir(Ino(parent_inode), name, _caller(ctx))

    @_answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        old, new = Ino(parent_inode_old), Ino(parent_inode_new)
        await self.handlers.rename(old, name_old, new, name_new, flags, _caller(ctx))

    # -- attributes of the mount and of files ------------------------------------------------------

    @_answered
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        changed = await self.handlers.setattr(
            Ino(inode),
            _caller(ctx),
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        return _entry(changed)

    @_answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        await self.handlers.writing.attributes.set_xattr(Ino(inode), name, value, by=_caller(ctx))

    @_answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        await self.handlers.writing.attributes.set_xattr(Ino(inode), name, None, by=_caller(ctx))

    @_answered
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = _BLOCK
        found.f_blocks = -(-self.names.info().bytes_total // _BLOCK)
        found.f_files = self.names.entries
        found.f_namemax = NAME_MAX
        if (room := self._filesystem.room()) is not None:
            found.f_blocks = max(found.f_blocks, room.total // _BLOCK)
            found.f_bfree = found.f_bavail = room.available // _BLOCK
            # New names are kept in memory, which is limited.
            gate = self.handlers.writing.gate
            found.f_ffree = found.f_favail = gate.names_free
            found.f_files += gate.names_held + gate.names_free
        return found

    @_answered
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if name == b"security.selinux" or (name in acl.NAMES and not self.enable_acl):
            # ls then does not ask again for this mount (_requests.c).
            raise FUSEError(errno.EOPNOTSUPP)
        if name == XATTR_STATUS and inode == pyfuse3.ROOT_INODE:
            return self._status()
        if name == XATTR_COPIES and ctx.uid not in (0, os.getuid()):
            # Other users may not open a copy by its path.
            raise FUSEError(pyfuse3.ENOATTR)
        value = await self._filesystem.xattrs.get(Ino(inode), name)
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @_answered
    async def listxattr(self, inode: int, ctx: RequestContext) -> list[bytes]:
        # Only attributes that a user has set. Programs that list attributes copy them (cp -a, rsync
        # -X): a copy would then have "user.monarch.tier", whose value may also change its length
        # while it is read.
        return await self._filesystem.xattrs.names(Ino(inode))


def _caller(ctx: RequestContext) -> Credentials:
    """The credentials of the caller of a change; the process waits, so it still exists."""
    return credentials_of(ctx.pid, ctx.uid, ctx.gid)


def _entry(attributes: Attributes) -> EntryAttributes:
    entry = EntryAttributes()
    entry.entry_timeout = entry.attr_timeout = VALID_S
    entry.st_ino = attributes.ino
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_rdev = attributes.rdev
    entry.st_size = attributes.size
    entry.st_blocks = attributes.blocks
    entry.st_mtime_ns = entry.st_atime_ns = attributes.mtime_ns
    if attributes.atime_ns is not None:
        entry.st_atime_ns = attributes.atime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    return entry
