"""What the journal tells, done again over the snapshot when a mount begins.

Over the snapshot that the journal belongs to, all is as it was. Another one, of a mount that has
lost that, has what had come to the source by then and what others have done there: an operation may
find done what it was to do, a directory gone, or others' names in its way. What was written wins:
directories that are missing are made again, as the drain makes them at the source, what is in the
way is not shown, and what still does not fit is told and left to the drain.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from monarch.errors import MonarchError, Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.types import WRITTEN_INO, Ino
from monarch.writeback.op import Op

log = logging.getLogger(__name__)

# So many records that could not be done again are told in the log.
_TOLD = 5


def replay(names: Namespace, ops: Iterable[tuple[int, Op]], *, now_ns: int) -> None:
    """Bring ``names`` to what they were when the last of ``ops`` was done.

    A record that does not fit is told and left out: nothing in a journal keeps a mount from coming
    up.
    """
    failed = 0
    for seq, op in ops:
        try:
            _Again(names, op, now_ns).do()
        except Exception as error:
            failed += 1
            if failed <= _TOLD:
                # Of an error that is no answer of the tree, it is of use where it came from.
                log.warning(
                    "record %d (%s of %r) does not fit: %s",
                    *(seq, op.kind, os.fsdecode(op.path), str(error) or repr(error)),
                    exc_info=not isinstance(error, MonarchError),
                )
    if failed > _TOLD:
        log.warning("%d more records do not fit", failed - _TOLD)


class _Again:
    def __init__(self, names: Namespace, op: Op, now_ns: int) -> None:
        self._names = names
        self._op = op
        self._now_ns = op.mtime_ns if op.mtime_ns is not None else now_ns

    def do(self) -> None:
        op = self._op
        if op.object and op.kind in ("rename", "link", "unlink", "attr", "xattr"):
            self._have_object()
        match op.kind:
            case "create" | "mkdir" | "symlink" | "mknod":
                node = self._make(op.path)
                for other in op.paths:
                    self._name_again(node.ino, other)
            case "take" | "content":
                self._content()
            case "link":
                self._name_again(self._linked(), op.to)
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
                        # One of the source's own is not known here.
                        with suppress(Refused):
                            self._names.remove_xattr(ino, name, now_ns=self._now_ns)
                    else:
                        self._names.set_xattr(ino, name, value, now_ns=self._now_ns)
            case "gone":
                pass

    def _place(self, path: bytes) -> tuple[Ino, bytes]:
        """The directory of a name; it is made if it is not there."""
        directory, _, name = path.rpartition(b"/")
        return self._directory(directory), name

    def _directory(self, path: bytes) -> Ino:
        found = self._names.resolve(path)
        if found is not None and self._names.attributes(found).is_dir:
            return found
        above, name = self._place(path)
        if found is not None:
            self._names.hide(above, name, now_ns=self._now_ns)
        like = self._names.attributes(above)
        made = self._names.make(
            above,
            name,
            mode=stat.S_IFDIR | (like.mode & 0o777),
            uid=like.uid,
            gid=like.gid,
            now_ns=self._now_ns,
        )
        return made.ino

    def _have_object(self) -> None:
        """The file has an object, though the snapshot tells of it: what a later name of it leads
        to at the source may be another file until then."""
        ino = self._names.resolve(self._op.path)
        if ino is not None and self._names.attributes(ino).is_file:
            self._names.copy_up(ino).object = self._op.object

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
            self._names.hide(parent, name, now_ns=self._now_ns)
        node = self._names.make(
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
            ino=Ino(op.ino) if self._is_free(op.ino) else None,
        )
        self._have_xattrs(node)
        return node

    def _is_free(self, ino: int) -> bool:
        return ino >= WRITTEN_INO and self._names.node(Ino(ino)) is None

    def _have_xattrs(self, node: Node) -> None:
        given = {name: value for name, value in self._op.xattrs.items() if value is not None}
        self._names.have_xattrs(node, given)

    def _linked(self) -> Ino:
        """What gets another name; the source may have that alone by now."""
        found = self._names.resolve(self._op.path)
        return self._require(self._op.to) if found is None else found

    def _name_again(self, ino: Ino, path: bytes) -> None:
        """Give a file another name; the snapshot may know the name as a file of the source."""
        parent, name = self._place(path)
        found = self._names.lookup(parent, name)
        if found == ino:
            return
        if found is not None:
            self._names.hide(parent, name, now_ns=self._now_ns)
        self._names.link(ino, parent, name, now_ns=self._now_ns)

    def _content(self) -> None:
        op = self._op
        ino = self._names.resolve(op.path)
        if ino is not None and not self._names.attributes(ino).is_file:
            # Others have put something else there.
            ino = None
        node = self._make(op.path) if ino is None else self._names.copy_up(ino)
        node.object = op.object
        if op.kind == "content" or op.xattrs:
            self._have_xattrs(node)
        if op.kind == "content":
            node.size = op.size
            if op.mtime_ns is not None:
                node.mtime_ns = op.mtime_ns
        for other in op.paths:
            self._name_again(node.ino, other)

    def _rename(self) -> None:
        op, names = self._op, self._names
        ino, existing = names.resolve(op.path), names.resolve(op.to)
        if ino is None:
            # Done at the source already; or others have removed what it is of, and what is to
            # come beneath it makes it again.
            return
        is_dir = names.attributes(ino).is_dir
        parent, name = self._place(op.path)
        to_parent, to_name = self._place(op.to)
        if existing not in (None, ino) and (is_dir or names.attributes(existing).is_dir):
            names.hide(to_parent, to_name, now_ns=self._now_ns)
        if is_dir:
            names.copy_up_all(ino)
        names.rename(parent, name, to_parent, to_name, flags=0, now_ns=self._now_ns, is_again=True)
