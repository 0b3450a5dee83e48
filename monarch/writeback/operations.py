"""What a mount that can be written does with names and attributes: checks, does, and journals it.

An operation changes the tree in memory (``namespace``), goes into the journal, and from there to
the source in the background (``writeback``). The kernel has checked permissions before; here it is
decided whether the path may be written at all. Bytes are ``files``' business.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress

import trio

from monarch.config.write_patterns import WritePatterns, is_staged
from monarch.errors import Refused, SourceChanged
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES, Node
from monarch.placement.residency import SOURCE
from monarch.posix.credentials import Credentials
from monarch.posix.sparse import copy_data
from monarch.tiers.source import Source, identity_of
from monarch.tiers.tier import Space
from monarch.transfer.source_calls import SourceCalls
from monarch.types import Attributes, Identity, Ino, file_now_ns
from monarch.writeback.drain import Drain
from monarch.writeback.file_systems import FileSystems
from monarch.writeback.op import Kind, Op
from monarch.writeback.open_files import FULL, WrittenFiles

log = logging.getLogger(__name__)

XATTR_DURABLE = b"user.monarch.durable"
_OURS = b"user.monarch."
# What the source could keep as well. Others have a meaning that is not ours to give.
_KEPT = (b"user.", b"trusted.")
_LARGEST_XATTR = 64 * 1024
# So often a file that changes at the source is brought.
_BRINGS = 3


class WriteOperations:
    """One mount's writing side. Belongs to the event loop. Everything raises Refused.

    A file of the source that is changed in whatever way is *taken*: it gets an object with its
    bytes. ``taken`` hears of each. ``space`` tells what the tier has. Of names that the snapshot
    does not have, and what else is kept in memory, there may be as much as ``names_max`` new files
    take.
    """

    def __init__(
        self,
        *,
        names: Namespace,
        patterns: WritePatterns,
        drain: Drain,
        files: WrittenFiles,
        source_calls: SourceCalls,
        waits_for_source: bool,
        names_max: int,
        taken: Callable[[Ino], None],
        space: Callable[[], Space],
    ) -> None:
        self.names = names
        self.files = files
        self._patterns = patterns
        self._drain = drain
        self._source_calls = source_calls
        self._file_systems = FileSystems(source_calls.source.path)
        self._waits_for_source = waits_for_source
        self.names_max = names_max
        self._taken = taken
        self.room = space
        # Files of the source that are being taken: whoever comes meanwhile waits.
        self._taking: dict[Ino, trio.Event] = {}

    # -- may it ------------------------------------------------------------------------------------

    def _require_covered(self, parent: Ino, name: bytes) -> bytes:
        path = self.names.path_of(parent, name)
        self._require_journal()
        if not self._patterns.covers(path):
            raise Refused(errno.EROFS)
        if is_staged(name):
            # At the source such a name is of what is on its way there.
            raise Refused(errno.EPERM)
        return path

    def _require_node_covered(self, ino: Ino) -> bytes:
        path = self.names.visible_path(ino)
        self._require_journal()
        if not self._patterns.covers(path):
            raise Refused(errno.EROFS)
        return path

    def _require_journal(self) -> None:
        if self.files.is_broken:
            raise Refused(errno.EIO)

    @property
    def names_held(self) -> int:
        """How many new files would take the memory that is taken."""
        return -(-self.names.held_bytes // NAME_BYTES)

    @property
    def names_free(self) -> int:
        """How many new files there may still be."""
        return max(0, self.names_max - self.names_held)

    def _require_memory(self, count: int) -> None:
        """So many bytes of it for names and attributes; ENOSPC where they are not left."""
        most = self.names_max * NAME_BYTES
        if count <= 0 or self.names.held_bytes + count <= most:
            return
        self.files.forget_unlinked()
        if self.names.held_bytes + count > most:
            raise Refused(errno.ENOSPC)

    def _require_held(self, ino: Ino) -> None:
        """Memory for what is about to be noted of an inode, if nothing is noted of it yet."""
        if not self.names.is_written(ino):
            self._require_memory(NAME_BYTES)

    def has(self, ino: Ino) -> bool:
        """Whether it is a file that was made or changed here."""
        return (node := self.names.node(ino)) is not None and node.is_file

    # -- names -------------------------------------------------------------------------------------

    async def create(self, parent: Ino, name: bytes, *, mode: int, by: Credentials) -> Attributes:
        """A new regular file that is open; ``by`` is who makes it, as in all that follows."""
        path = self._require_covered(parent, name)
        if self.names.lookup(parent, name) is not None:
            raise Refused(errno.EEXIST)
        self._require_memory(NAME_BYTES)
        await self.files.require_room()
        is_here = True
        try:
            number, fd = await self.files.create()
        except Refused as error:
            if error.errno not in FULL:
                raise
            is_here = False
            number = await self.files.number()
            fd = await self.files.stage(path, number, by=(by,), is_new=True)
        try:
            # Directories above may have got other names meanwhile.
            path = self.names.path_of(parent, name)
            node = self.names.make(
                parent,
                name,
                mode=stat.S_IFREG | stat.S_IMODE(mode),
                uid=by.uid,
                gid=by.gid,
                now_ns=file_now_ns(),
                object=number,
            )
        except Refused:
            self.files.close_later(fd)
            self.files.remove(number)
            raise
        self._note_made("create", node, path, by)
        self.files.opened(node, fd, created=True, by=by)
        if not is_here:
            await self.files.go_on_there(node, fd)
        return self.names.attributes(node.ino)

    async def make(
        self,
        parent: Ino,
        name: bytes,
        *,
        mode: int,
        by: Credentials,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Attributes:
        """A directory, symbolic link, fifo or socket."""
        path = self.names.path_of(parent, name)
        kind = stat.S_IFMT(mode)
        if not (kind == stat.S_IFDIR and self._patterns.leads_to(path)):
            self._require_covered(parent, name)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            # They would have no effect here, and no right to be at the source.
            raise Refused(errno.EPERM)
        if self.names.lookup(parent, name) is None:
            self._require_memory(NAME_BYTES + len(target))
            await self.files.require_room()
            # Directories above may have got other names meanwhile.
            path = self.names.path_of(parent, name)
        node = self.names.make(
            parent,
            name,
            mode=mode,
            uid=by.uid,
            gid=by.gid,
            now_ns=file_now_ns(),
            rdev=rdev,
            target=target,
        )
        kinds: dict[int, Kind] = {stat.S_IFDIR: "mkdir", stat.S_IFLNK: "symlink"}
        self._note_made(kinds.get(kind, "mknod"), node, path, by)
        return self.names.attributes(node.ino)

    async def make_file(
        self, parent: Ino, name: bytes, *, mode: int, by: Credentials
    ) -> Attributes:
        """A new regular file that nobody has open: mknod."""
        attributes = await self.create(parent, name, mode=mode, by=by)
        self.files.release(attributes.ino)
        return attributes

    def _note_made(self, kind: Kind, node: Node, path: bytes, by: Credentials) -> None:
        self.files.note(
            Op(
                strict=True,
                kind=kind,
                path=path,
                to=node.target,
                ino=node.ino,
                object=node.object,
                mode=node.mode,
                uid=node.uid,
                gid=node.gid,
                rdev=node.rdev,
                mtime_ns=node.mtime_ns,
                by=by,
            )
        )

    def _known_at_source(self, ino: Ino | None) -> Identity | None:
        """What the source is known to have of a file or directory that has no object."""
        if ino is None or self._object_of(ino):
            return None
        there = self.names.at_source(ino)
        return there.identity if there is not None and there.source_ino else None

    async def link(self, ino: Ino, parent: Ino, name: bytes, *, by: Credentials) -> Attributes:
        to = self._require_covered(parent, name)
        self._file_systems.require_one(self._require_node_covered(ino), to)
        self._require_memory(NAME_BYTES)
        await self.files.require_room()
        if self.names.attributes(ino).is_file:
            await self._have_recorded(ino, by)
        # Directories above may have got other names meanwhile.
        path, to = self.names.visible_path(ino), self.names.path_of(parent, name)
        self.names.link(ino, parent, name, now_ns=file_now_ns())
        self.files.note(
            Op(
                strict=True,
                kind="link",
                path=path,
                to=to,
                ino=ino,
                object=self._object_of(ino),
                by=by,
                was=self._known_at_source(ino),
            )
        )
        return self.attributes(ino)

    def unlink(self, parent: Ino, name: bytes, *, by: Credentials) -> None:
        path = self._require_covered(parent, name)
        ino = self._known(parent, name)
        number, was = self._object_of(ino), self._known_at_source(ino)
        node = self.names.unlink(parent, name, now_ns=file_now_ns())
        self.files.note(
            Op(kind="unlink", path=path, ino=ino, object=number, strict=True, by=by, was=was)
        )
        self._left(node)

    def take_away(self, parent: Ino, name: bytes, *, by: Credentials | None) -> Ino:
        """Remove a name, though no process has asked for that; the inode that it was of.

        ``by`` whom it is removed at the source, too; None: others have done so. The kernel goes on
        knowing the name until it asks for the inode, which is forgotten unless somebody has it
        open.
        """
        path, ino = self.names.path_of(parent, name), self._known(parent, name)
        number, was = self._object_of(ino), self._known_at_source(ino)
        kind: Kind = "rmdir" if self.names.attributes(ino).is_dir else "unlink"
        remove = self.names.rmdir if kind == "rmdir" else self.names.unlink
        node = remove(parent, name, now_ns=file_now_ns())
        if by is not None:
            self.files.note(Op(kind=kind, path=path, ino=ino, object=number, by=by, was=was))
        if not node.names:
            self._taken(ino)
            if not self.files.is_in_use(ino):
                self.files.forget(node)
            elif not self.files.is_open(ino):
                self.files.leave(node)
        return ino

    def put_back(self, ino: Ino, parent: Ino, name: bytes, *, by: Credentials) -> None:
        """Give a directory the name again that it had, and still has at the source."""
        ((from_parent, from_name),) = self.names.copy_up(ino).names
        path, to = self.names.path_of(from_parent, from_name), self.names.path_of(parent, name)
        now_ns = file_now_ns()
        if self.names.rename(from_parent, from_name, parent, name, now_ns=now_ns, is_again=True):
            self.files.note(Op(kind="rename", path=path, to=to, ino=ino, by=by))

    def rmdir(self, parent: Ino, name: bytes, *, by: Credentials) -> None:
        self._require_journal()
        path = self.names.path_of(parent, name)
        ino = self._known(parent, name)
        made_here = self._patterns.leads_to(path) and self.names.is_written(ino)
        if not made_here:
            self._require_covered(parent, name)
        was = self._known_at_source(ino)
        node = self.names.rmdir(parent, name, now_ns=file_now_ns())
        self.files.note(Op(kind="rmdir", path=path, ino=ino, by=by, was=was))
        self._left(node)

    async def rename(
        self,
        parent: Ino,
        name: bytes,
        to_parent: Ino,
        to_name: bytes,
        flags: int,
        *,
        by: Credentials,
    ) -> None:
        self._require_journal()
        path, to = self.names.path_of(parent, name), self.names.path_of(to_parent, to_name)
        covered = self._patterns.covers(path), self._patterns.covers(to)
        if not all(covered):
            # Who moves it then copies it, which may be allowed.
            raise Refused(errno.EXDEV if any(covered) else errno.EROFS)
        self._file_systems.require_one(path, to)
        ino = self._known(parent, name)
        self._require_held(ino)
        await self.files.require_room()
        while True:
            if self.names.attributes(ino).is_file:
                await self._have_recorded(ino, by)
            await self._make_replacement_safe(ino, self.names.lookup(to_parent, to_name))
            # One that was on its way to the source may be there by now.
            if self._object_of(ino) or not self.names.attributes(ino).is_file:
                break
        # Directories above may have got other names meanwhile.
        path, to = self.names.path_of(parent, name), self.names.path_of(to_parent, to_name)
        replaced = self.names.lookup(to_parent, to_name)
        was, over = self._known_at_source(ino), self._known_at_source(replaced)
        over_object = self._object_of(replaced) if replaced is not None else 0
        renamed = self.names.rename(
            parent, name, to_parent, to_name, flags=flags, now_ns=file_now_ns()
        )
        if renamed is None:
            return
        self.files.note(
            Op(
                strict=True,
                kind="rename",
                path=path,
                to=to,
                ino=ino,
                object=renamed.node.object,
                by=by,
                was=was,
                over=over,
                over_ino=replaced or 0,
                over_object=over_object,
            )
        )
        if renamed.replaced is not None:
            self._left(renamed.replaced)

    async def _have_recorded(self, ino: Ino, by: Credentials) -> None:
        """Have the bytes of a file that gets another name recorded under the one that it has."""
        node = self.names.node(ino)
        if node is not None and node.object and self.files.is_away(node):
            # They are, and need not be at the source for that: it may have no room for them.
            return
        self.files.record(await self.copy_up(ino, empty=False, by=by))

    async def _make_replacement_safe(self, ino: Ino, replaced: Ino | None) -> None:
        """A power cut must not take the old file, which was safe, and the new one, which is not."""
        old = self.names.node(replaced) if replaced is not None and replaced != ino else None
        new = self.names.node(ino)
        if old is None or new is None or not (old.is_file and new.is_file):
            return
        if self.files.is_only_here(old) and not self.files.is_away(new):
            await self.files.make_safe(new)

    def _known(self, parent: Ino, name: bytes) -> Ino:
        ino = self.names.lookup(parent, name)
        if ino is None:
            raise Refused(errno.ENOENT)
        return ino

    def _object_of(self, ino: Ino) -> int:
        node = self.names.node(ino)
        return node.object if node is not None else 0

    def _left(self, node: Node) -> None:
        """A name of it is gone: with the last one, and when nobody has it open, all of it goes."""
        if node.names:
            return
        self._taken(node.ino)
        if not self.files.is_open(node.ino):
            self.files.leave(node)

    # -- attributes --------------------------------------------------------------------------------

    async def change(
        self,
        ino: Ino,
        *,
        by: Credentials,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
    ) -> Attributes:
        """Change what is not None."""
        node = self.names.node(ino)
        if node is None or node.names:
            self._require_node_covered(ino)
        if self.names.attributes(ino).is_file:
            node = await self.copy_up(ino, empty=size == 0, by=by)
            if size is not None:
                await self._cut(node, size, by)
            self.files.status(node)
        elif size is not None:
            raise Refused(errno.EINVAL)
        if mode is None and uid is None and gid is None and atime_ns is None and mtime_ns is None:
            return self.names.attributes(ino)
        self._require_held(ino)
        await self.files.require_room()
        was = self._known_at_source(ino)
        # Only owners change modes. Of others it is the kernel that does: it takes the set-ID bits
        # from a program into which they write.
        now = self.names.attributes(ino)
        owner = Credentials(now.uid, now.gid)
        if node is not None and node.object > 0 and (atime_ns is not None or mtime_ns is not None):
            # Before they are its node's: whoever looks meanwhile takes over what the object has.
            await self.files.set_times(
                node,
                atime_ns=node.atime_ns if atime_ns is None else atime_ns,
                mtime_ns=node.mtime_ns if mtime_ns is None else mtime_ns,
            )
        node = self.names.change(
            ino,
            mode=mode,
            uid=uid,
            gid=gid,
            atime_ns=atime_ns,
            mtime_ns=mtime_ns,
            now_ns=file_now_ns(),
        )
        if node.names:
            self.files.note(
                Op(
                    kind="attr",
                    path=self.names.visible_path(ino),
                    paths=self._paths_of(node),
                    object=node.object,
                    mode=None if mode is None else stat.S_IMODE(mode),
                    uid=uid,
                    gid=gid,
                    atime_ns=atime_ns,
                    mtime_ns=mtime_ns,
                    same=mtime_ns is not None and self.files.is_recorded(node),
                    ino=ino,
                    by=owner if mode is not None and by.uid not in (0, owner.uid) else by,
                    was=was,
                )
            )
        return self.names.attributes(ino)

    def _paths_of(self, node: Node) -> tuple[bytes, ...]:
        """All paths of a file that has several: others may take the first one at the source."""
        return tuple(self.names.visible_paths(node.ino)) if len(node.names) > 1 else ()

    def attributes(self, ino: Ino) -> Attributes:
        node = self.names.node(ino)
        if node is not None:
            self.files.status(node)
        return self.names.attributes(ino)

    def tier_of(self, ino: Ino) -> int:
        """The tier that has the bytes of a file that was made or changed here."""
        node = self.names.node(ino)
        return self.files.tier_of(node) if node is not None else SOURCE

    def xattr(self, ino: Ino, name: bytes) -> bytes | None:
        """The value of an extended attribute, None where there is none."""
        node = self.names.node(ino)
        if node is None:
            return None
        if name == XATTR_DURABLE and node.is_file:
            return self.files.durable(node)
        return node.xattrs.get(name)

    def xattrs(self, ino: Ino) -> list[bytes]:
        node = self.names.node(ino)
        return list(node.xattrs) if node is not None else []

    async def xattrs_elsewhere(self, ino: Ino) -> dict[bytes, bytes] | None:
        """The source's extended attributes of what is read from there and may have been written
        through a mount; None where those known here are shown. Raises SourceError."""
        node, now = self.names.node(ino), self.names.attributes(ino)
        if node is not None and (node.object or node.has_source_xattrs):
            return None
        if self.names.at_source(ino) is None or not (now.is_file or now.is_dir):
            return None
        path = self.names.path(ino)
        if self._patterns and not self._patterns.covers(path):
            return None
        try:
            found = await self._source_calls.call(ino, self._source_calls.source.xattrs, path)
        except SourceChanged:
            return None
        return {name: value for name, value in found.items() if not name.startswith(_OURS)}

    async def set_xattr(
        self, ino: Ino, name: bytes, value: bytes | None, *, by: Credentials
    ) -> None:
        """Set an extended attribute, or remove it: None."""
        path = self._require_node_covered(ino)
        if name.startswith(_OURS):
            raise Refused(errno.EPERM)
        if not name.startswith(_KEPT):
            raise Refused(errno.EOPNOTSUPP)
        if self.names.attributes(ino).is_file:
            await self.copy_up(ino, empty=False, by=by)
        elif self.names.attributes(ino).is_dir:
            await self._have_xattrs_of_source(ino, path)
        # It, or a directory above, may have got another name meanwhile.
        path = self.names.visible_path(ino)
        if value is not None and len(value) > _LARGEST_XATTR:
            raise Refused(errno.E2BIG)
        self._require_held(ino)
        if value is not None:
            self._require_memory(self.names.more_for_xattr(ino, name, value))
            await self.files.require_room()
        now_ns, was = file_now_ns(), self._known_at_source(ino)
        node = self.names.set_xattr(ino, name, value, now_ns=now_ns)
        self.files.note(
            Op(
                strict=True,
                kind="xattr",
                path=path,
                paths=self._paths_of(node),
                ino=ino,
                object=node.object,
                xattrs={name: value},
                by=by,
                was=was,
            )
        )

    async def _have_xattrs_of_source(self, ino: Ino, path: bytes) -> None:
        """Know those of a directory that the source has, as an earlier mount may have set them."""
        node = self.names.node(ino)
        if self.names.at_source(ino) is None or (node is not None and node.has_source_xattrs):
            return
        try:
            found = await self._source_calls.call(ino, self._source_calls.source.xattrs, path)
        except SourceChanged:
            # It has another name there, or is gone.
            found = {}
        self._require_held(ino)
        node = self.names.copy_up(ino)
        if not node.has_source_xattrs:
            node.has_source_xattrs = True
            self.names.have_xattrs(node, found | node.xattrs)

    # -- bytes -------------------------------------------------------------------------------------

    async def open(self, ino: Ino, flags: int, by: Credentials) -> None:
        """Open a file for writing, or one that is written here for reading."""
        known = self.names.node(ino)
        if known is not None and not (known.names or known.object or self.files.is_open(ino)):
            # Whoever found its name looks it up anew: another file may have it.
            raise Refused(errno.ESTALE)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            if self.files.is_open_at_source(ino):
                # Who reads it there would not see what is written.
                raise Refused(errno.ETXTBSY)
            node = self.names.node(ino)
            if node is None or node.names:
                self._require_node_covered(ino)
            node = await self.copy_up(ino, empty=bool(flags & os.O_TRUNC), keep=True, by=by)
        else:
            found = self.names.node(ino)
            assert found is not None
            node = found
            await self.files.open(node)
        if flags & os.O_TRUNC:
            try:
                await self._cut(node, 0, by)
            except BaseException:
                self.files.release(ino)
                raise

    async def _cut(self, node: Node, size: int, by: Credentials) -> None:
        """Make a file as long as that; who is not root takes a program's special rights from it."""
        await self.files.truncate(node, size, by=by)
        if not by.is_root:
            node.drop_privileges()

    async def copy_up(self, ino: Ino, *, empty: bool, by: Credentials, keep: bool = False) -> Node:
        """Have the bytes of a file in an object; ``empty``: they are about to go anyway.

        With ``keep`` it is open then, for one more user.
        """
        while True:
            node = self.names.node(ino)
            if node is not None and node.object:
                if not self.files.is_away(node):
                    if keep:
                        await self.files.open(node, by=by)
                    return node
                await self.files.arrive(node)
            taking = self._taking.get(ino)
            if taking is None:
                break
            await taking.wait()
        taking = self._taking[ino] = trio.Event()
        try:
            return await self._copy_up(ino, empty=empty, keep=keep, by=by)
        finally:
            del self._taking[ino]
            taking.set()

    async def _copy_up(self, ino: Ino, *, empty: bool, keep: bool, by: Credentials) -> Node:
        self._require_held(ino)
        await self.files.require_room()
        number, fd = await self.files.create()
        staged = -1
        xattrs: dict[bytes, bytes] = {}
        try:
            try:
                xattrs = await self._bring(ino, fd, empty=empty)
            except _NoRoomError:
                path = self.names.visible_path(ino)
                staged = await self.files.stage(path, number, by=(by,), is_new=False)
                xattrs = await self._bring(ino, staged, empty=empty)
            if staged < 0 and not empty:
                await self.files.sync_object(number, fd)
        except BaseException:
            for opened in (fd, staged):
                if opened >= 0:
                    self.files.close_later(opened)
            self.files.remove(number)
            raise
        path, was = self.names.visible_path(ino), self._known_at_source(ino)
        node = self.names.copy_up(ino)
        node.object = number
        if not node.xattrs:
            self.names.have_xattrs(node, xattrs)
        paths = tuple(self.names.visible_paths(ino))
        self.files.note(
            Op(
                strict=True,
                kind="take",
                path=path,
                paths=paths if len(paths) > 1 else (),
                ino=ino,
                object=number,
                mode=node.mode,
                xattrs=dict(node.xattrs),
                by=by,
                was=was,
            )
        )
        self._taken(ino)
        self.files.copied_up(node, by)
        self.files.opened(node, fd, created=False, by=by if keep else None)
        if staged >= 0:
            await self.files.go_on_there(node, staged)
        if not keep:
            self.files.release(ino)
        return node

    async def _bring(self, ino: Ino, fd: int, *, empty: bool) -> dict[bytes, bytes]:
        """Raises SourceError."""
        source, attempts = self._source_calls.source, 0
        while True:
            attempts += 1
            identity = (self.names.at_source(ino) or self.names.attributes(ino)).identity
            is_ours = self.names.is_written(ino)
            path = self.names.visible_path(ino) if is_ours else self.names.path(ino)
            try:
                return await self._source_calls.call(ino, _bring, source, path, identity, fd, empty)
            except SourceChanged:
                if attempts == _BRINGS:
                    raise
            await self.files.look_again(ino)

    async def sync(self, ino: Ino, user: int | None) -> None:
        """What fsync promises: the file is safe, here or at the source as configured, and so is
        all that was done to names; ``user`` is who asks, as ``Drain.wait_for`` has it."""
        node = self.names.node(ino)
        if node is None or not (node.names and node.object) or self.files.is_open(ino):
            await self._sync(ino, user)
            return
        # Whoever asks may have opened it past us, to read.
        await self.files.open(node)
        try:
            await self._sync(ino, user)
        finally:
            self.files.release(ino)

    async def _sync(self, ino: Ino, user: int | None) -> None:
        while True:
            seq = await self.files.sync(ino) if self.files.is_open(ino) else 0
            await self.files.sync_journal()
            if not self._waits_for_source:
                return
            if seq:
                await self._drain.progress.wait(seq)
            if not (seq and self.files.is_left_out(ino)):
                break
        await self._wait_for_names(ino, user)

    async def sync_directory(self, ino: Ino, user: int | None) -> None:
        """All that was done to names is safe."""
        await self.files.sync_journal()
        if self._waits_for_source:
            await self._wait_for_names(ino, user)

    async def _wait_for_names(self, ino: Ino, user: int | None) -> None:
        path, number = self.names.visible_path(ino), self._object_of(ino)
        await self._drain.progress.wait_for(path, object=number, user=user)


class _NoRoomError(Exception):
    """The tier is full."""


def _bring(
    source: Source, path: bytes, identity: Identity, fd: int, empty: bool
) -> dict[bytes, bytes]:
    """Copy a whole file of the source into ``fd``; its attributes that anybody may set.

    With ``empty`` the bytes are not wanted.

    Raises OSError, and SourceChanged if it is not that version, or no longer.
    """
    file = source.open(path)
    try:
        if identity_of(file.status) != identity:
            raise SourceChanged("not the version that the snapshot tells of")
        os.ftruncate(fd, 0)
        offset = 0
        try:
            if not empty:
                offset = copy_data(file.fd, fd, identity.size)
        except OSError as error:
            if error.errno in FULL:
                raise _NoRoomError from error
            raise
        if (offset != identity.size and not empty) or identity_of(os.fstat(file.fd)) != identity:
            raise SourceChanged("changed while it was taken")
        # It is the same file as before.
        os.utime(fd, ns=(identity.mtime_ns, identity.mtime_ns))
        xattrs = {}
        with suppress(OSError):
            for name in os.listxattr(file.fd):
                if name.startswith("user."):
                    xattrs[os.fsencode(name)] = os.getxattr(file.fd, name)
        return xattrs
    finally:
        file.release()
