"""Copy up: a file of the source gets an object with its bytes before its first change.

The bytes are read once. If the tier has no room for them, they go to a staged file at the source.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from monarch.errors import Refused, SourceChanged
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix import acl
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import copy_data
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity, Ino
from monarch.writeback.object_table import xattrs_of
from monarch.writeback.op import Op
from monarch.writeback.open_file import set_times
from monarch.writeback.open_files import WrittenFiles
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_files import DrainedObjects, SourceFiles
from monarch.writeback.tier_objects import FULL, TierObjects
from monarch.writeback.undrained_attributes import UndrainedAttributes, applied
from monarch.writeback.unlinked import UnlinkedFiles
from monarch.writeback.write_gate import WriteGate

# How often a file that changes at the source is copied.
_ATTEMPTS = 3


@dataclass(eq=False, repr=False)
class CopyUp:
    """Belongs to the event loop. ``copied_up`` is called with each inode that has got an object."""

    _names: Namespace
    _gate: WriteGate
    _files: WrittenFiles
    _objects: TierObjects
    _recorder: Recorder
    _source: SourceFiles
    _drained: DrainedObjects
    _unlinked: UnlinkedFiles
    _undrained: UndrainedAttributes
    _copied_up: Callable[[Ino], None]
    # Files that are being copied: other tasks that need them wait.
    _copying: dict[Ino, trio.Event] = field(default_factory=dict, init=False)

    async def settled(self, ino: Ino) -> None:
        """Waits while the bytes of a file are being copied into an object."""
        while (copying := self._copying.get(ino)) is not None:
            await copying.wait()

    async def copy_up(self, ino: Ino, *, empty: bool, by: Credentials, keep: bool = False) -> Node:
        """Have the bytes of a file in an object; ``empty``: they are not needed.

        With ``keep`` it is then open for one more user. Raises Refused and SourceError.
        """
        while True:
            node = self._names.node(ino)
            if node is not None and node.object:
                # Its bytes cannot be changed through the descriptor of a reader.
                is_read = keep and self._drained.is_read_there(node)
                if not (is_read or self._drained.is_away(node)):
                    if not keep or await self._files.open(node, by=by):
                        return node
                    continue
                await self._drained.arrive(node)
            copying = self._copying.get(ino)
            if copying is None:
                break
            await copying.wait()
        copying = self._copying[ino] = trio.Event()
        try:
            with self._undrained.reading(ino) as changes:
                return await self._copy_up(ino, changes, empty=empty, keep=keep, by=by)
        finally:
            del self._copying[ino]
            copying.set()

    async def _copy_up(
        self,
        ino: Ino,
        changes: Mapping[bytes, bytes | None],
        *,
        empty: bool,
        keep: bool,
        by: Credentials,
    ) -> Node:
        """``changes`` of extended attributes may be missing at the source when it is read."""
        self._gate.require_held(ino)
        await self._gate.require_room()
        number, fd, staged = await self._place_for(ino, by)
        source_ino = 0
        try:
            try:
                xattrs = await self._copy(ino, fd, empty=empty, by=by)
            except _NoRoomError:
                if staged >= 0:
                    raise
                # A reader, or the next mount behind a kill, would take the part that had room for
                # the whole file.
                self._objects.close_soon(fd)
                fd = -1
                await self._objects.run(self._objects.on_disk.remove, number)
                path_now = partial(self._names.visible_path, ino)
                staged = await self._source.stage(path_now, number, by=(by,), is_new=False)
                xattrs = await self._copy(ino, staged, empty=empty, by=by)
            if staged >= 0:
                source_ino = await self._files.sync_staged(ino, staged)
            elif not empty:
                await self._objects.run_sync(self._objects.on_disk.sync, number, fd)
            was = known_at_source(self._names, ino)
            # The version that was copied: an open that is under way may find another one.
            await self._files.wait_for_opening(ino)
            if staged < 0:
                self._keep_times(ino, fd)
        except BaseException as error:
            self._unlinked.abandon_object(number, *{fd, staged})
            if isinstance(error, _NoRoomError):
                raise Refused(errno.ENOSPC) from error
            raise
        path, node = self._names.visible_path(ino), self._names.copy_up(ino)
        self._have_xattrs(node, xattrs, changes)
        node.set_object(number)
        paths = tuple(self._names.visible_paths(ino))
        self._recorder.note(
            Op(
                strict=True,
                kind="take",
                path=path,
                paths=paths if len(paths) > 1 else (),
                ino=ino,
                object=number,
                mode=node.mode | node.hidden_bits,
                uid=node.uid,
                gid=node.gid,
                xattrs=xattrs_of(self._names, node),
                by=by,
                was=was,
            )
        )
        self._copied_up(ino)
        self._recorder.copied_up(number, by)
        user = by if keep else None
        if staged < 0:
            self._files.opened(node, fd, created=False, by=user)
        else:
            await self._files.opened_staged(node, staged, source_ino, created=False, by=user)
        if not keep:
            # Processes that read the file may keep it open, so its content is recorded now. If
            # that is refused, the next mount finds the content and records it.
            with suppress(Refused):
                self._recorder.record(node)
            self._files.release(ino)
        return node

    def _keep_times(self, ino: Ino, fd: int) -> None:
        """Gives an object the times that were set while the file had none. Raises Refused."""
        node = self._names.node(ino)
        if node is not None and node.has_source_bytes and node.keeps_times:
            with self._objects.refusing():
                set_times(fd, node.atime_ns, node.mtime_ns)

    def _have_xattrs(
        self,
        node: Node,
        there: dict[bytes, bytes],
        changes: Mapping[bytes, bytes | None],
    ) -> None:
        """A file gets an object, and had the attributes ``there`` at the source when it was read:
        ``changes`` of them that the source may have lacked stay."""
        if node.has_source_bytes:
            self._names.have_xattrs(node, applied(there, changes))
            node.removed_xattrs, node.undrained = frozenset(), 0
            node.undrained_mtimes = None
        elif node.xattrs.keys() <= {*acl.NAMES}:
            self._names.have_xattrs(node, {**node.xattrs, **there})

    async def _place_for(self, ino: Ino, by: Credentials) -> tuple[int, int, int]:
        """The number and the descriptor of a new object, and -1; or, if the tier has no room for
        one, of a new staged file at the source, and its descriptor again."""
        try:
            return *await self._files.create(), -1
        except Refused as error:
            if error.errno not in FULL:
                raise
        path_now = partial(self._names.visible_path, ino)
        number, fd = await self._files.stage(path_now, by=by, is_new=False)
        return number, fd, fd

    async def _copy(self, ino: Ino, fd: int, *, empty: bool, by: Credentials) -> dict[bytes, bytes]:
        calls, names, attempts = self._source.calls, self._names, 0
        while True:
            attempts += 1
            identity = (names.at_source(ino) or names.attributes(ino)).identity
            try:
                return await calls.at(ino, _copy_file, calls.source, identity, fd, empty, by)
            except SourceChanged:
                if attempts == _ATTEMPTS:
                    raise
            await self._source.look_again(ino)


def object_of(names: Namespace, ino: Ino) -> int:
    """The object of a file, 0 if it has none."""
    node = names.node(ino)
    return node.object if node is not None else 0


def known_at_source(names: Namespace, ino: Ino | None) -> Identity | None:
    """What the source is known to have of a file or directory that has no object."""
    if ino is None or object_of(names, ino):
        return None
    there = names.at_source(ino)
    return there.identity if there is not None and there.source_ino else None


class _NoRoomError(Exception):
    """The tier is full, or the source if the bytes go there."""


def _copy_file(
    path: bytes, source: Source, identity: Identity, fd: int, empty: bool, by: Credentials
) -> dict[bytes, bytes]:
    """Copy a whole file of the source into ``fd``, which is written with the rights of ``by``; its
    attributes in the namespace "user".

    With ``empty`` the bytes are not copied. Raises OSError, and SourceChanged if it is not that
    version, or no longer.
    """
    file = source.open(path)
    try:
        if identity_of(file.status) != identity:
            raise SourceChanged("not the version of the snapshot")
        os.ftruncate(fd, 0)
        offset = 0
        try:
            if not empty:
                with acting_as(by):
                    offset = copy_data(file.fd, fd, identity.size)
        except OSError as error:
            if error.errno in FULL:
                raise _NoRoomError from error
            raise
        if (offset != identity.size and not empty) or identity_of(os.fstat(file.fd)) != identity:
            raise SourceChanged("changed while it was copied")
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
