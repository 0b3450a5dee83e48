"""Attributes of written files: modes, owners, times, sizes, and extended attributes."""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from monarch.errors import Refused, SourceChanged
from monarch.namespace.listing import XATTRS_MAX
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.placement.residency import SOURCE
from monarch.posix.credentials import Credentials
from monarch.transfer.source_calls import SourceCalls
from monarch.types import (
    ROOT_INO,
    WRITTEN_INO,
    XATTR_DURABLE,
    XATTR_PREFIX,
    Attributes,
    Ino,
    file_now_ns,
)
from monarch.writeback.copy_up import CopyUp, known_at_source
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.object_table import mode_of
from monarch.writeback.op import Op
from monarch.writeback.open_files import WrittenFiles
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_files import DrainedObjects
from monarch.writeback.undrained_attributes import UndrainedAttributes, applied
from monarch.writeback.write_gate import WriteGate

# The namespaces that the source could keep as well. Others mean rights, which are not ours to give.
_KEPT = (b"user.", b"trusted.")
_LARGEST_XATTR = 64 * 1024


@dataclass(eq=False, repr=False)
class WrittenAttributes:
    """Belongs to the event loop. Changes raise Refused, and SourceError where a file of the source
    is copied up; None leaves an attribute as it is, and removes an extended one. ``tier`` is the
    number of the absorbing tier."""

    _names: Namespace
    _gate: WriteGate
    _files: WrittenFiles
    _copies: CopyUp
    _recorder: Recorder
    _drained: DrainedObjects
    _states: ObjectStates
    _undrained: UndrainedAttributes
    _source_calls: SourceCalls
    _tier: int

    def of(self, ino: Ino) -> Attributes:
        """The attributes of an inode, with those that an open file has now."""
        node = self._names.node(ino)
        if node is not None:
            self._files.status(node)
        return self._names.attributes(ino)

    def tier_of(self, ino: Ino) -> int:
        """The tier that has the bytes of a file that was made or changed here."""
        node = self._names.node(ino)
        if node is None or not node.object or self._states.is_write_through(node.object):
            return SOURCE
        return self._tier

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
        node = self._names.node(ino)
        if node is None or node.names:
            self._gate.require_node_covered(ino)
        is_file = self._names.attributes(ino).is_file
        if is_file and size is not None:
            # It stays open meanwhile: else it could be drained, and be read from the source.
            node = await self._copies.copy_up(ino, empty=size == 0, by=by, keep=True)
            try:
                await self._files.truncate(node, size, by=by)
            finally:
                self._files.release(ino)
            self._files.status(node)
        elif size is not None:
            raise Refused(errno.EINVAL)
        if mode is None and uid is None and gid is None and atime_ns is None and mtime_ns is None:
            return self._names.attributes(ino)
        await self._have_place(ino, by)
        is_of_times = atime_ns is not None or mtime_ns is not None
        while is_of_times and (node := self._names.node(ino)) is not None and node.object:
            # Before the node has them: a stat meanwhile takes over the times of the object.
            number = node.object
            await self._files.set_times(
                node,
                atime_ns=node.atime_ns if atime_ns is None else atime_ns,
                mtime_ns=node.mtime_ns if mtime_ns is None else mtime_ns,
            )
            if node.object == number:
                break
            await self._have_place(ino, by)
        # Nothing below waits: the file keeps its object until the change is recorded.
        node = self._names.node(ino)
        was = None if self._has_lost_names(node) else known_at_source(self._names, ino)
        # Only owners change modes. For other users the kernel does, when it removes set-ID bits.
        now = self._names.attributes(ino)
        is_of_another = mode is not None and by.uid not in (0, now.uid)
        is_by_kernel = is_of_another or _ends_set_id(now.mode, mode, uid, gid, size)
        if node is not None and not is_of_times and self._is_recorded_with(node, mode, uid, gid):
            self._names.change(ino, now_ns=file_now_ns())
            return self._names.attributes(ino)
        if node is not None and not (mode is uid is gid is None):
            self._recorder.record_of_others(node)
        now_ns = file_now_ns()
        node = self._names.change(
            ino, mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns, now_ns=now_ns
        )
        if mode is not None:
            self._files.mode_changed(node)
        if node.names:
            self._recorder.note(
                Op(
                    kind="attr",
                    path=self._names.visible_path(ino),
                    paths=self._paths_of(node),
                    object=node.object,
                    mode=None if mode is None else stat.S_IMODE(mode),
                    uid=uid,
                    gid=gid,
                    atime_ns=atime_ns,
                    mtime_ns=mtime_ns,
                    same=mtime_ns is not None and self._recorder.is_recorded(node),
                    file=is_file and not node.object,
                    ino=ino,
                    by=Credentials(now.uid, now.gid) if is_of_another else by,
                    ends_set_id=is_by_kernel,
                    was=was,
                )
            )
        return self._names.attributes(ino)

    def _is_at_source(self, ino: Ino) -> bool:
        """Whether it is a file of the source that was not written here: its bytes stay there when
        its attributes change."""
        node = self._names.node(ino)
        if node is not None:
            return node.has_source_bytes and bool(node.names)
        return ino < WRITTEN_INO and self._names.attributes(ino).is_file

    def _has_lost_names(self, node: Node | None) -> bool:
        return node is not None and node.has_source_bytes and not node.names

    async def _have_place(self, ino: Ino, by: Credentials, *, needs_room: bool = True) -> None:
        """Has room for the record of a change of attributes, and the file an object, unless its
        bytes stay at the source. During each wait for room it may lose the object: the source would
        then have the file without the change, and the mount would show it like that."""
        self._gate.require_held(ino)
        while True:
            if self._lacks_place(ino):
                await self._copies.copy_up(ino, empty=False, by=by)
            if needs_room:
                await self._gate.require_room()
            if not self._lacks_place(ino):
                break
        if (node := self._names.node(ino)) is not None and node.object:
            self._files.status(node)

    def _lacks_place(self, ino: Ino) -> bool:
        """Whether a file needs an object before its attributes change, or has one that is not under
        its names yet. The source keeps the bytes of a file that was not written, which are not
        needed for this."""
        if not self._names.attributes(ino).is_file or self._is_at_source(ino):
            return False
        node = self._names.node(ino)
        if self._has_lost_names(node):
            return False
        return node is None or not node.object or self._drained.is_away(node)

    def _is_recorded_with(
        self, node: Node, mode: int | None, uid: int | None, gid: int | None
    ) -> bool:
        """Whether a new file has these attributes already, and a content that is still to be
        recorded will bring them. Programs that unpack files set the owner that a file has."""
        return (
            self._recorder.is_awaited(node)
            and node.keeps_mode
            and node.keeps_owner
            and (mode is None or stat.S_IMODE(mode) == mode_of(node))
            and uid in (None, node.uid)
            and gid in (None, node.gid)
            # A new owner removes these bits.
            and not (mode is None and node.mode & (stat.S_ISUID | stat.S_ISGID))
        )

    def _paths_of(self, node: Node) -> tuple[bytes, ...]:
        """All paths of a file that has several: others may take the first one at the source."""
        return tuple(self._names.visible_paths(node.ino)) if len(node.names) > 1 else ()

    def xattr(self, ino: Ino, name: bytes) -> bytes | None:
        """The value of an extended attribute, None where there is none."""
        node = self._names.node(ino)
        if node is None:
            return None
        if name == XATTR_DURABLE and node.is_file:
            return self._drained.durable(node)
        return node.xattrs.get(name)

    def xattrs(self, ino: Ino) -> list[bytes]:
        node = self._names.node(ino)
        return list(node.xattrs) if node is not None else []

    async def xattrs_elsewhere(self, ino: Ino) -> dict[bytes, bytes] | None:
        """The source's extended attributes of a file that is read from there and may have been
        written through a mount; None where those known here are shown. Raises SourceError."""
        node, now = self._names.node(ino), self._names.attributes(ino)
        if node is not None and (node.object or node.has_source_xattrs):
            return None
        if self._names.at_source(ino) is None or not (now.is_file or now.is_dir):
            return None
        path = self._names.path(ino)
        if self._gate.patterns and not self._gate.patterns.covers(path):
            return None
        with self._undrained.reading(ino) as changes:
            found = await self._at_source(ino)
        if found is None:
            return None
        there = {name: value for name, value in found.items() if not name.startswith(XATTR_PREFIX)}
        # The source may lack changes of a directory that were made through an earlier mount.
        node = self._names.node(ino)
        if node is not None and node.is_dir:
            return _changed(there, node)
        return applied(there, changes)

    async def _at_source(self, ino: Ino) -> dict[bytes, bytes] | None:
        """The source's extended attributes of an entry; None if the source has no such entry."""
        at, xattrs = self._source_calls.at, self._source_calls.source.xattrs
        there = self._names.at_source(ino)
        if there is not None and there.source_ino:
            with suppress(SourceChanged):
                return await at(ino, xattrs, there.source_ino)
        with suppress(SourceChanged):
            # Others have put another entry there, as the next comparison will find.
            return await at(ino, xattrs, 0)
        return None

    async def set_xattr(
        self, ino: Ino, name: bytes, value: bytes | None, *, by: Credentials
    ) -> None:
        node = self._names.node(ino)
        is_unlinked = node is not None and not node.names and ino != ROOT_INO
        path = b"" if is_unlinked else self._gate.require_node_covered(ino)
        if name.startswith(XATTR_PREFIX):
            raise Refused(errno.EPERM)
        if not name.startswith(_KEPT):
            raise Refused(errno.EOPNOTSUPP)
        if name in _KEPT:
            # As local file systems answer; the source would refuse it later.
            raise Refused(errno.EINVAL)
        if is_unlinked:
            await self._set_xattr_unlinked(ino, name, value)
            return
        there: dict[bytes, bytes] | None = None
        is_file = self._names.attributes(ino).is_file
        if is_file and name.startswith(b"user.") and self._is_at_source(ino):
            there = await self.xattrs_elsewhere(ino)
        elif is_file:
            await self._copies.copy_up(ino, empty=False, by=by)
        elif self._names.attributes(ino).is_dir:
            await self._know_xattrs_of_source(ino)
        self._require_memory(ino, name, value)
        await self._have_place(ino, by, needs_room=value is not None)
        # It, or a directory above, may have got another name meanwhile.
        path = self._names.visible_path(ino)
        now_ns, was = file_now_ns(), known_at_source(self._names, ino)
        if there is not None and self._is_at_source(ino):
            node = self._change_at_source(ino, name, value, there, now_ns)
        else:
            node = self._names.set_xattr(ino, name, value, now_ns=now_ns)
        self._recorder.note(
            Op(
                strict=True,
                kind="xattr",
                path=path,
                paths=self._paths_of(node),
                ino=ino,
                object=node.object,
                xattrs={name: value},
                file=is_file and not node.object,
                by=by,
                was=was,
            )
        )

    async def _set_xattr_unlinked(self, ino: Ino, name: bytes, value: bytes | None) -> None:
        """The same for an entry without a name: only processes that have it open see the change,
        and the source gets nothing of it."""
        there = await self.xattrs_elsewhere(ino)
        self._require_memory(ino, name, value)
        node = self._names.node(ino)
        if there is not None and node is not None and node.has_source_bytes:
            self._change_at_source(ino, name, value, there, file_now_ns())
        else:
            self._names.set_xattr(ino, name, value, now_ns=file_now_ns())

    def _require_memory(self, ino: Ino, name: bytes, value: bytes | None) -> None:
        if value is not None and len(value) > _LARGEST_XATTR:
            raise Refused(errno.E2BIG)
        self._gate.require_held(ino)
        if value is not None:
            self._gate.require_memory(self._names.more_for_xattr(ino, name, value))

    def _change_at_source(
        self, ino: Ino, name: bytes, value: bytes | None, there: dict[bytes, bytes], now_ns: int
    ) -> Node:
        """Shows a change of a file that has no object, and had the attributes ``there``. Raises
        Refused."""
        shown = applied(there, self._undrained.xattrs(ino))
        if value is None and name not in shown:
            raise Refused(errno.ENODATA)
        more = {} if value is None else {name: value}
        if (
            value is not None
            and sum(len(key) + len(kept) for key, kept in (shown | more).items()) > XATTRS_MAX
        ):
            raise Refused(errno.ENOSPC)
        node = self._names.change(ino, now_ns=now_ns)
        self._undrained.show_xattrs(node, {name: value})
        return node

    async def _know_xattrs_of_source(self, ino: Ino) -> None:
        """Know those that the source has of a directory: an earlier mount may have set them."""
        node = self._names.node(ino)
        if self._names.at_source(ino) is None or (node is not None and node.has_source_xattrs):
            return
        # The source may have lost it.
        found = await self._at_source(ino) or {}
        self._gate.require_held(ino)
        node = self._names.copy_up(ino)
        if not node.has_source_xattrs:
            self._names.have_xattrs(node, _changed(found, node), with_source=True)


def _changed(found: Mapping[bytes, bytes], node: Node) -> dict[bytes, bytes]:
    """The source's extended attributes of a directory with the changes by mounts."""
    kept = {name: value for name, value in found.items() if name not in node.removed_xattrs}
    return kept | node.xattrs


def _ends_set_id(was: int, mode: int | None, *others: int | None) -> bool:
    """Whether a new mode, set with one of ``others``, is the former one without some of its set-ID
    bits: so the kernel sets it with a new owner or size."""
    of_set_id = was & (stat.S_ISUID | stat.S_ISGID)
    is_with_others = any(each is not None for each in others)
    return mode is not None and is_with_others and not stat.S_IMODE(was ^ mode) & ~of_set_id
