"""Changes of names on a mount that can be written: check, make, and record each.

An operation changes the tree in memory (``namespace``), goes into the journal, and from there to
the source in the background. The kernel has checked permissions before; here it is decided whether
the path may be written at all.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import trio

from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES, Node
from monarch.posix.credentials import Credentials
from monarch.types import Attributes, Ino, file_now_ns
from monarch.writeback.copy_up import CopyUp, known_at_source, object_of
from monarch.writeback.op import Kind, Op
from monarch.writeback.open_file import RELEASE_PAUSES_S, OpenTable
from monarch.writeback.open_files import WrittenFiles
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_files import DrainedObjects
from monarch.writeback.tier_objects import FULL
from monarch.writeback.unlinked import UnlinkedFiles
from monarch.writeback.write_gate import WriteGate

# The number of names that are recorded of an entry that gets another one: it may have thousands.
_MOST_NAMES = 32


@dataclass(eq=False, repr=False)
class WriteOperations:
    """Belongs to the event loop. Everything raises Refused, and SourceError where a file of the
    source is copied up. ``by`` is the user who makes a change.

    ``copied_up`` is called with each inode that the source no longer has as the mount shows it.
    """

    _names: Namespace
    _gate: WriteGate
    _files: WrittenFiles
    _opens: OpenTable
    _copies: CopyUp
    _recorder: Recorder
    _drained: DrainedObjects
    _unlinked: UnlinkedFiles
    _copied_up: Callable[[Ino], None]

    def has(self, ino: Ino) -> bool:
        """Whether it is a file that was made or written here, or has lost all names here."""
        node = self._names.node(ino)
        return node is not None and node.is_file and not (node.has_source_bytes and node.names)

    async def open(self, ino: Ino, flags: int, by: Credentials) -> None:
        """Open a file for writing, or one that is written here for reading."""
        is_to_read = flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC
        if not is_to_read:
            await self._require_unread(ino)
        known = self._names.node(ino)
        if known is not None and not (known.names or known.object or self._files.is_open(ino)):
            # The caller looks its name up anew: another file may have it.
            raise Refused(errno.ESTALE)
        if is_to_read:
            assert known is not None
            await self._files.open(known)
            return
        if known is None or known.names:
            self._gate.require_node_covered(ino)
        empty = bool(flags & os.O_TRUNC)
        node = await self._copies.copy_up(ino, empty=empty, keep=True, by=by)
        if empty:
            try:
                await self._files.truncate(node, 0, by=by)
            except BaseException:
                self._files.release(ino)
                raise

    async def _require_unread(self, ino: Ino) -> None:
        """Raises Refused, ETXTBSY, if processes read a file that was written here at the source:
        they would not see what is written. Waits for the releases of those that have closed it."""
        for pause_s in RELEASE_PAUSES_S:
            file = self._opens.files.get(ino)
            if file is None or not file.place.is_from_source:
                return
            await trio.sleep(pause_s)
        raise Refused(errno.ETXTBSY)

    async def create(
        self, parent: Ino, name: bytes, *, mode: int, by: Credentials, umask: int = 0
    ) -> Attributes:
        """A new regular file that is open. ``umask`` is that of the process."""
        path = self._gate.require_covered(parent, name)
        if self._names.lookup(parent, name) is not None:
            raise Refused(errno.EEXIST)
        self._gate.require_memory(NAME_BYTES)
        await self._gate.require_room()
        is_here, source_ino = True, 0
        try:
            number, fd = await self._files.create()
        except Refused as error:
            if error.errno not in FULL:
                raise
            is_here = False
            path_now = partial(self._names.path_of, parent, name)
            number, fd = await self._files.stage(path_now, by=by, is_new=True)
        try:
            if not is_here:
                source_ino = await self._files.sync_staged(parent, fd)
            # Directories above may have got other names meanwhile.
            path = self._names.path_of(parent, name)
            node = self._names.make(
                parent,
                name,
                mode=stat.S_IFREG | stat.S_IMODE(mode),
                uid=by.uid,
                gid=by.gid,
                now_ns=file_now_ns(),
                umask=umask,
                object=number,
            )
        except BaseException:
            self._unlinked.abandon_object(number, fd)
            raise
        self._note_made("create", node, path, by)
        if is_here:
            self._files.opened(node, fd, created=True, by=by)
        else:
            await self._files.opened_staged(node, fd, source_ino, created=True, by=by)
        return self._names.attributes(node.ino)

    async def make(
        self,
        parent: Ino,
        name: bytes,
        *,
        mode: int,
        by: Credentials,
        umask: int = 0,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Attributes:
        """A directory, symbolic link, fifo or socket."""
        path = self._names.path_of(parent, name)
        kind = stat.S_IFMT(mode)
        if not (kind == stat.S_IFDIR and self._gate.patterns.leads_to(path)):
            self._gate.require_covered(parent, name)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            # They would have no effect here, and no right to be at the source.
            raise Refused(errno.EPERM)
        if self._names.lookup(parent, name) is None:
            self._gate.require_memory(NAME_BYTES + len(target))
            await self._gate.require_room()
            # Directories above may have got other names meanwhile.
            path = self._names.path_of(parent, name)
        node = self._names.make(
            parent,
            name,
            mode=mode,
            uid=by.uid,
            gid=by.gid,
            now_ns=file_now_ns(),
            umask=umask,
            rdev=rdev,
            target=target,
        )
        kinds: dict[int, Kind] = {stat.S_IFDIR: "mkdir", stat.S_IFLNK: "symlink"}
        self._note_made(kinds.get(kind, "mknod"), node, path, by)
        return self._names.attributes(node.ino)

    async def make_file(
        self, parent: Ino, name: bytes, *, mode: int, by: Credentials, umask: int = 0
    ) -> Attributes:
        """A new regular file that is not open: mknod."""
        attributes = await self.create(parent, name, mode=mode, by=by, umask=umask)
        self._files.release(attributes.ino)
        return attributes

    def _note_made(self, kind: Kind, node: Node, path: bytes, by: Credentials) -> None:
        self._recorder.note(
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
                xattrs=dict(node.xattrs),
                by=by,
            )
        )

    async def link(self, ino: Ino, parent: Ino, name: bytes, *, by: Credentials) -> Attributes:
        to = self._gate.require_covered(parent, name)
        self._gate.require_one_file_system(self._gate.require_node_covered(ino), to)
        self._gate.require_memory(NAME_BYTES)
        await self._gate.require_room()
        if self._names.attributes(ino).is_file:
            await self._have_recorded(ino, by)
        # Directories above may have got other names meanwhile.
        path, to = self._names.visible_path(ino), self._names.path_of(parent, name)
        self._names.link(ino, parent, name, now_ns=file_now_ns())
        self._recorder.note(
            Op(
                strict=True,
                kind="link",
                path=path,
                to=to,
                paths=self._ways_to(ino, to, by),
                ino=ino,
                object=object_of(self._names, ino),
                by=by,
                was=known_at_source(self._names, ino),
            )
        )
        return self._names.attributes(ino)

    def _ways_to(self, ino: Ino, new: bytes, by: Credentials) -> tuple[bytes, ...]:
        """Names by which ``by`` may have reached an entry before it got the name ``new``; empty if
        there is only one, or if any name is enough: root and the owner may link it by each."""
        if by.uid in (0, self._names.attributes(ino).uid):
            return ()
        names = tuple(islice(self._names.visible_paths(ino), _MOST_NAMES))
        return tuple(name for name in names if name != new) if len(names) > 2 else ()

    async def require_removable(self, parent: Ino, name: bytes, *, is_directory: bool) -> None:
        """Refuses a removal that is not allowed; then waits until a full tier has room for its
        record."""
        if is_directory:
            self._require_directory_covered(parent, name)
        else:
            self._gate.require_covered(parent, name)
        self._known(parent, name)
        await self._gate.require_room_to_remove()

    def unlink(self, parent: Ino, name: bytes, *, by: Credentials) -> None:
        self._gate.require_covered(parent, name)
        self._forget_if_unlinked(self._removed("unlink", parent, name, by))

    def take_away(self, parent: Ino, name: bytes, *, by: Credentials | None) -> Ino:
        """Remove a name without a request of the kernel; the inode that had it.

        ``by`` is the user who removes it at the source, too; None: others have done so. The kernel
        knows the name until it asks for the inode, which is forgotten unless a process has it open.
        """
        ino = self._known(parent, name)
        is_directory = self._names.attributes(ino).is_dir
        node = self._removed("rmdir" if is_directory else "unlink", parent, name, by)
        if not node.names:
            self._copied_up(ino)
            if not self._opens.is_in_use(ino):
                self._unlinked.forget(node)
            elif not self._files.is_open(ino):
                self._unlinked.leave(node)
        return ino

    def put_back(self, ino: Ino, parent: Ino, name: bytes, *, by: Credentials) -> None:
        """Give a directory its earlier name again, which it still has at the source."""
        ((from_parent, from_name),) = self._names.copy_up(ino).names
        path, to = self._names.path_of(from_parent, from_name), self._names.path_of(parent, name)
        now_ns = file_now_ns()
        if self._names.rename(from_parent, from_name, parent, name, now_ns=now_ns, is_again=True):
            self._recorder.note(Op(kind="rename", path=path, to=to, ino=ino, by=by))

    def rmdir(self, parent: Ino, name: bytes, *, by: Credentials) -> None:
        self._require_directory_covered(parent, name)
        self._forget_if_unlinked(self._removed("rmdir", parent, name, by))

    def _require_directory_covered(self, parent: Ino, name: bytes) -> None:
        self._gate.require_journal()
        path, ino = self._names.path_of(parent, name), self._known(parent, name)
        made_here = self._gate.patterns.leads_to(path) and self._names.is_written(ino)
        if not made_here:
            self._gate.require_covered(parent, name)

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
        self._gate.require_journal()
        path, to = self._names.path_of(parent, name), self._names.path_of(to_parent, to_name)
        covered = self._gate.patterns.covers(path), self._gate.patterns.covers(to)
        if not all(covered):
            # The program that moves it then copies it, which may be allowed.
            raise Refused(errno.EXDEV if any(covered) else errno.EROFS)
        self._gate.require_one_file_system(path, to)
        ino = self._known(parent, name)
        self._gate.require_held(ino)
        await self._gate.require_room()
        while True:
            if self._names.attributes(ino).is_file:
                await self._have_recorded(ino, by)
            await self._make_replacement_safe(ino, self._names.lookup(to_parent, to_name))
            # One that was on its way to the source may be there by now.
            if object_of(self._names, ino) or not self._names.attributes(ino).is_file:
                break
        # Directories above may have got other names meanwhile.
        path, to = self._names.path_of(parent, name), self._names.path_of(to_parent, to_name)
        replaced = self._names.lookup(to_parent, to_name)
        was, over = known_at_source(self._names, ino), known_at_source(self._names, replaced)
        over_object = object_of(self._names, replaced) if replaced is not None else 0
        renamed = self._names.rename(
            parent, name, to_parent, to_name, flags=flags, now_ns=file_now_ns()
        )
        if renamed is None:
            return
        self._recorder.note(
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
            self._forget_if_unlinked(renamed.replaced)

    async def _have_recorded(self, ino: Ino, by: Credentials) -> None:
        """Have the bytes of a file that gets another name recorded under its present one."""
        node = self._names.node(ino)
        if node is not None and node.object and self._drained.is_away(node):
            # They are, and need not be at the source for that: it may have no room for them.
            return
        self._recorder.record(await self._copies.copy_up(ino, empty=False, by=by))

    async def _make_replacement_safe(self, ino: Ino, replaced: Ino | None) -> None:
        """A power cut must not take the old file, which was safe, and the new one, which is not."""
        old = self._names.node(replaced) if replaced is not None and replaced != ino else None
        new = self._names.node(ino)
        if old is None or new is None or not (old.is_file and new.is_file):
            return
        if self._drained.is_only_here(old) and not self._drained.is_away(new):
            await self._files.make_safe(new)

    def _removed(self, kind: Kind, parent: Ino, name: bytes, by: Credentials | None) -> Node:
        """Remove a name by ``kind``, "unlink" or "rmdir", and record that; the node that had it.
        ``by`` as of ``take_away``."""
        path, ino = self._names.path_of(parent, name), self._known(parent, name)
        number, was = object_of(self._names, ino), known_at_source(self._names, ino)
        remove = self._names.rmdir if kind == "rmdir" else self._names.unlink
        node = remove(parent, name, now_ns=file_now_ns())
        if by is not None:
            self._recorder.note(
                Op(strict=True, kind=kind, path=path, ino=ino, object=number, by=by, was=was)
            )
        return node

    def _known(self, parent: Ino, name: bytes) -> Ino:
        ino = self._names.lookup(parent, name)
        if ino is None:
            raise Refused(errno.ENOENT)
        return ino

    def _forget_if_unlinked(self, node: Node) -> None:
        """Forget a file or directory without names, once no process has it open."""
        if node.names:
            return
        self._copied_up(node.ino)
        if not self._files.is_open(node.ino):
            self._unlinked.leave(node)
