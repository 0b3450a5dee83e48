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
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext

from monarch.errors import MonarchError, Unanswered
from monarch.fuse.datapath import Datapath, split_handle, split_write_handle
from monarch.fuse.datapath_mode import Serving
from monarch.posix import acl, failpoints
from monarch.posix.credentials import Credentials, credentials_of
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.transfer.source_calls import CALLER, Caller
from monarch.types import Attributes, Ino
from monarch.vfs.filesystem import FileSystem
from monarch.writeback.front import WriteFront
from monarch.writeback.others import LOOK_S

log = logging.getLogger(__name__)

# Names and attributes do not change unless the kernel is notified. In seconds: a day is long enough
# that the kernel does not ask again within an epoch.
_TIMEOUT_S = 86400

_BLOCK = 4096

# The limit of every file system that can be a source. The kernel itself allows 1024 bytes.
_NAME_MAX = 255
# Every listing begins with "." and "..".
_DOTS = 2
# Errors by a lack of resources, which are not bugs.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})

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
                while True:
                    failpoints.failpoint(point)
                    try:
                        return await handler(*args, **kwargs)
                    except Unanswered:
                        # The call has changed nothing and is repeated. Other requests do not wait.
                        await operations.names.answers()
        except FUSEError:
            raise
        except MonarchError as error:
            raise FUSEError(_number(error)) from error
        except Exception as error:
            number = _number(error)
            operations.unforeseen(handler.__name__, number)
            raise FUSEError(number) from error
        finally:
            CALLER.reset(token)

    return answer


def _number(error: Exception) -> int:
    number = (error.errno if isinstance(error, OSError | MonarchError) else None) or errno.EIO
    # Many programs take EAGAIN for the end of the data, and would continue with half a file.
    return errno.EIO if number == errno.EAGAIN else number


STATUS_ATTRIBUTE = b"user.monarch.status"


class Operations(pyfuse3.Operations):
    """pyfuse3's handlers over ``filesystem``. File and directory handles are inode numbers.

    ``count_error`` is called with the kind of an internal error. ``datapath`` answers the reads
    that it has passed on, so that their bytes take a direct way. ``status`` returns the public
    figures of the mount, an attribute of its root. ``serving`` counts the requests.
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
    ) -> None:
        super().__init__()
        self.serving = serving
        self._status = status
        self._filesystem = filesystem
        self.names = filesystem.names
        # The kernel checks access control lists, and caches them. It requests that of each entry
        # that a user other than its owner uses, so it is enabled only if there are any.
        self.enable_acl = filesystem.names.has_acls
        self._count_error = count_error
        self._datapath = datapath
        self._list_ends: dict[Ino, int] = {}
        # A bug in the path of each read must not displace all other lines of the log.
        self._limiter = Limiter(60.0)

    def unforeseen(self, handler: str, number: int) -> None:
        self._count_error(f"handler-{handler}")
        if number in _SCARCE:
            words = "%s failed with %s: this process or machine is short of it"
            self._limiter.warning(log, (handler, number), words, handler, errno_words(number))
            return
        self._limiter.exception(
            log,
            (handler, number),
            "internal error in %s(): returned %s to the caller; the mount continues."
            " This is a bug, please report it",
            handler,
            errno_words(number),
        )

    # -- names ---------------------------------------------------------------------------------

    @_answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name == b".":
            return _entry(self.names.attributes(Ino(parent_inode)))
        if name == b"..":
            parent = self.names.attributes(Ino(parent_inode)).parent
            return _entry(self.names.attributes(parent))
        if len(name) > _NAME_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        others = self._filesystem.others
        if others is not None:
            await others.listed(Ino(parent_inode))
        ino = self.names.lookup(Ino(parent_inode), name)
        if ino is None and (lost := self.names.lost(Ino(parent_inode), name)) is not None:
            await self._filesystem.revalidation.find_again(lost)
            ino = lost
        if ino is None:
            # An entry with inode number 0: the kernel caches that the name does not exist.
            missing = EntryAttributes()
            is_looked_at = others is not None and others.used(Ino(parent_inode))
            missing.entry_timeout = valid_s = LOOK_S if is_looked_at else _TIMEOUT_S
            if self._datapath is not None and (others is None or others.knows(Ino(parent_inode))):
                # Asked again after a while, so that the directory stays one that is used.
                self._datapath.tell_missing(Ino(parent_inode), valid_s=valid_s, for_s=LOOK_S)
            return missing
        return _entry(self._filesystem.latest(self.names.attributes(ino)))

    @_answered
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return _entry(await self._filesystem.attributes(Ino(inode)))

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
            others.used(directory)
            await others.listed(directory)
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
        return FileInfo(fh=inode, keep_cache=keep_cache, direct_io=self._is_direct(flags, mode))

    @_answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        ino, token = split_handle(fh)
        data = await self._filesystem.read(ino, off, size)
        if token and self._datapath is not None:
            self._datapath.answer(token, data)
            return b""
        # pyfuse3 accepts any buffer and does not use it after the reply.
        return cast(bytes, data)

    @_answered
    async def release(self, fh: int) -> None:
        self._filesystem.release(Ino(fh))

    @_answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        by = _caller(ctx)
        made = await self._writing.operations.create(Ino(parent_inode), name, mode=mode, by=by)
        self._tell_attributes(parent_inode)
        direct_io = self._is_direct(flags, made.mode)
        return FileInfo(fh=made.ino, keep_cache=True, direct_io=direct_io), _entry(made)

    def _is_direct(self, flags: int, mode: int) -> bool:
        """Whether writes of an open may bypass the page cache of the kernel.

        A process that opens a file for writing only cannot read or map through it; for other
        processes the kernel drops its pages. But for such a file the kernel would not clear set-ID
        bits at a write by another user, and would send no fsync after a write with RWF_DSYNC, which
        only the datapath sees. With O_DSYNC or O_SYNC every write is synced, and one fsync each is
        better than one for each MiB.
        """
        return (
            self._datapath is not None
            and flags & (os.O_ACCMODE | os.O_DSYNC) == os.O_WRONLY
            and not mode & (stat.S_ISUID | stat.S_ISGID)
        )

    @_answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        ino, is_synced = split_write_handle(fh)
        written = await self._writing.files.write(ino, off, buf)
        if is_synced:
            await self._writing.fsyncs.sync(ino, None)
        return written

    @_answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        ino, asks = self._sync_target(fh)
        await self._writing.fsyncs.sync(ino, asks)

    @_answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        ino, asks = self._sync_target(fh)
        await self._writing.fsyncs.sync_directory(ino, asks)

    def _sync_target(self, fh: int) -> tuple[Ino, int | None]:
        """The inode, and the low bits of the number of the calling user, None if unknown."""
        return (Ino(fh), None) if self._datapath is None else split_handle(fh)

    # -- changes of names --------------------------------------------------------------------------

    @property
    def _writing(self) -> WriteFront:
        writing = self._filesystem.writing
        if writing is None:
            raise FUSEError(errno.EROFS)
        return writing

    @_answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            return await self._make(parent_inode, name, mode, ctx, rdev=rdev)
        parent, by = Ino(parent_inode), _caller(ctx)
        made = await self._writing.operations.make_file(parent, name, mode=mode, by=by)
        self._tell_attributes(parent)
        return _entry(made)

    async def _make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        ctx: RequestContext,
        *,
        rdev: int = 0,
        target: bytes = b"",
    ) -> EntryAttributes:
        """Makes an entry that is not a file."""
        made = await self._writing.operations.make(
            Ino(parent), name, mode=mode, by=_caller(ctx), rdev=rdev, target=target
        )
        self._tell_attributes(parent)
        return _entry(made)

    @_answered
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._make(parent_inode, name, stat.S_IFDIR | stat.S_IMODE(mode), ctx)

    @_answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        return await self._make(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    @_answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        parent, by = Ino(new_parent_inode), _caller(ctx)
        linked = await self._writing.operations.link(Ino(inode), parent, new_name, by=by)
        self._tell_attributes(parent)
        return _entry(linked)

    @_answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._writing.operations.unlink(Ino(parent_inode), name, by=_caller(ctx))
        self._tell_attributes(parent_inode)

    @_answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        others, parent = self._filesystem.others, Ino(parent_inode)
        ino = self.names.lookup(parent, name)
        if others is not None and ino is not None:
            await others.listed(ino)
        self._writing.operations.rmdir(parent, name, by=_caller(ctx))
        self._tell_attributes(parent)

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
        await self._writing.operations.rename(
            Ino(parent_inode_old),
            name_old,
            Ino(parent_inode_new),
            name_new,
            flags,
            by=_caller(ctx),
        )
        self._tell_attributes(parent_inode_old, parent_inode_new)

    def _tell_attributes(self, *directories: int) -> None:
        """The kernel asks for those of a directory after each name that was given or taken."""
        if self._datapath is None:
            return
        # What is not known now is asked for: the change itself is made.
        with suppress(MonarchError):
            for directory in map(Ino, directories):
                self._datapath.tell_attributes(self.names.attributes(directory))

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
        changed = await self._writing.attributes.change(
            Ino(inode),
            by=_caller(ctx),
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
        await self._writing.attributes.set_xattr(Ino(inode), name, value, by=_caller(ctx))

    @_answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._writing.attributes.set_xattr(Ino(inode), name, None, by=_caller(ctx))

    @_answered
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = _BLOCK
        found.f_blocks = -(-self.names.info().bytes_total // _BLOCK)
        found.f_files = self.names.entries
        found.f_namemax = _NAME_MAX
        if (room := self._filesystem.room()) is not None:
            found.f_blocks = max(found.f_blocks, room.total // _BLOCK)
            found.f_bfree = found.f_bavail = room.available // _BLOCK
            # New names are kept in memory, which is limited.
            gate = self._writing.gate
            found.f_ffree = found.f_favail = gate.names_free
            found.f_files += gate.names_held + gate.names_free
        return found

    @_answered
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if name == b"security.selinux" or (name in acl.NAMES and not self.enable_acl):
            # ls then does not ask again for this mount (_requests.c).
            raise FUSEError(errno.EOPNOTSUPP)
        if name == STATUS_ATTRIBUTE and inode == pyfuse3.ROOT_INODE:
            return self._status()
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
    entry.entry_timeout = entry.attr_timeout = _TIMEOUT_S
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
