"""What the journal tells, done again over the snapshot when a mount begins.

A snapshot that was made since knows what had come to the source by then, so an operation may find
done what it was to do. That is no error; anything else is told and left to the drain, which does at
the source what the record says.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable

from monarch.errors import MonarchError, Refused
from monarch.namespace.overlay import Namespace
from monarch.namespace.written import Node
from monarch.types import WRITTEN_INO, Ino
from monarch.writeback.ops import Op

log = logging.getLogger(__name__)

# So many records that could not be done again are told in the log.
_TOLD = 5


def replay(names: Namespace, ops: Iterable[tuple[int, Op]], *, now_ns: int) -> None:
    """Bring ``names`` to what they were when the last of ``ops`` was done."""
    failed = 0
    for seq, op in ops:
        try:
            _Again(names, op, now_ns).do()
        except MonarchError as error:
            failed += 1
            if failed <= _TOLD:
                told = os.fsdecode(op.path)
                log.warning("record %d (%s of %r) does not fit: %s", seq, op.kind, told, error)
    if failed > _TOLD:
        log.warning("%d more records do not fit", failed - _TOLD)


class _Again:
    def __init__(self, names: Namespace, op: Op, now_ns: int) -> None:
        self._names = names
        self._op = op
        self._now_ns = op.mtime_ns if op.mtime_ns is not None else now_ns

    def do(self) -> None:
        op = self._op
        match op.kind:
            case "create" | "mkdir" | "symlink" | "mknod":
                node = self._make(op.path)
                for other in op.paths:
                    self._name_again(node.ino, other)
            case "take" | "content":
                self._content()
            case "link":
                self._name_again(self._require(op.path), op.to)
            case "unlink":
                if self._names.resolve(op.path) is not None:
                    self._names.unlink(*self._place(op.path), now_ns=self._now_ns)
            case "rmdir":
                if self._names.resolve(op.path) is not None:
                    self._names.rmdir(*self._place(op.path), now_ns=self._now_ns)
            case "rename":
                self._rename()
            case "attr":
                self._names.change(
                    self._require(op.path),
                    mode=op.mode,
                    uid=op.uid,
                    gid=op.gid,
                    atime_ns=op.atime_ns,
                    mtime_ns=op.mtime_ns,
                    now_ns=self._now_ns,
                )
            case "xattr":
                ino = self._require(op.path)
                for name, value in op.xattrs.items():
                    if value is None:
                        self._names.remove_xattr(ino, name, now_ns=self._now_ns)
                    else:
                        self._names.set_xattr(ino, name, value, now_ns=self._now_ns)
            case "gone":
                pass

    def _place(self, path: bytes) -> tuple[Ino, bytes]:
        """The directory of a name. Raises Refused if it is not there."""
        directory, _, name = path.rpartition(b"/")
        return self._require(directory), name

    def _require(self, path: bytes) -> Ino:
        ino = self._names.resolve(path)
        if ino is None:
            raise Refused(errno.ENOENT)
        return ino

    def _make(self, path: bytes) -> Node:
        op = self._op
        parent, name = self._place(path)
        found = self._names.lookup(parent, name)
        kind = {"mkdir": stat.S_IFDIR, "symlink": stat.S_IFLNK}.get(op.kind)
        mode = op.mode or 0
        if kind is None:
            kind = stat.S_IFMT(mode) or stat.S_IFREG
        if found is not None:
            if kind == stat.S_IFDIR and self._names.attributes(found).is_dir:
                return self._names.change(found, now_ns=self._now_ns)
            self._names.unlink(parent, name, now_ns=self._now_ns)
        return self._names.make(
            parent,
            name,
            mode=kind | stat.S_IMODE(mode or 0o600),
            uid=op.uid or 0,
            gid=op.gid or 0,
            now_ns=self._now_ns,
            rdev=op.rdev,
            target=op.to if op.kind == "symlink" else b"",
            object=op.object,
            # Others have removed what an older snapshot had.
            ino=Ino(op.ino) if op.ino >= WRITTEN_INO else None,
        )

    def _name_again(self, ino: Ino, path: bytes) -> None:
        """Give a file another name; the snapshot may know the name as a file of the source."""
        parent, name = self._place(path)
        found = self._names.lookup(parent, name)
        if found == ino:
            return
        if found is not None:
            self._names.unlink(parent, name, now_ns=self._now_ns)
        self._names.link(ino, parent, name, now_ns=self._now_ns)

    def _content(self) -> None:
        op = self._op
        ino = self._names.resolve(op.path)
        node = self._make(op.path) if ino is None else self._names.take(ino)
        node.object = op.object
        if op.kind == "content":
            node.size = op.size
            given = {name: value for name, value in op.xattrs.items() if value is not None}
            self._names.have_xattrs(node, given)
            if op.mtime_ns is not None:
                node.mtime_ns = op.mtime_ns

    def _rename(self) -> None:
        op = self._op
        if self._names.resolve(op.path) is None and self._names.resolve(op.to) is not None:
            return
        self._take_object()
        parent, name = self._place(op.path)
        to_parent, to_name = self._place(op.to)
        self._names.rename(parent, name, to_parent, to_name, flags=0, now_ns=self._now_ns)

    def _take_object(self) -> None:
        """The file has an object, though the snapshot tells of it."""
        if self._op.object:
            node = self._names.take(self._require(self._op.path))
            node.object = self._op.object
