"""Applies the operations of the journal to the snapshot when a mount begins.

Over the snapshot that the journal belongs to, the result is the tree of the earlier mount. A new
snapshot, after that one was lost, also has the drained operations and the changes of others at the
source. So an operation may already be done, its directory may be gone, or a name of others may be
in its way. Operations of the journal win: missing directories are made again, as the drain makes
them at the source, and entries in the way are hidden. An operation that still cannot be applied is
logged and left to the drain.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Mapping, Sequence

from monarch.errors import MonarchError, Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix import acl
from monarch.types import SHOWING_CHANGES, WRITTEN_INO, Attributes, Identity, Ino, Progress
from monarch.writeback.expected import Expected
from monarch.writeback.journal_found import PROGRESS_STEP, no_progress
from monarch.writeback.op import Op
from monarch.writeback.source_state import SourceState
from monarch.writeback.undrained_attributes import as_made

log = logging.getLogger(__name__)

# The most records that cannot be applied which are logged one by one.
_LOGGED = 5


def replay(
    names: Namespace,
    ops: Sequence[tuple[int, Op]],
    *,
    now_ns: int,
    state: SourceState | None = None,
    done: Mapping[int, Identity | None] | None = None,
    progress: Progress = no_progress,
) -> dict[int, Ino]:
    """Applies ``ops``, with their sequence numbers, to ``names``. ``now_ns`` is the time of changes
    without a recorded time. ``state`` has loaded the journal. ``done`` is what the source has of
    the changes that were drained.
    Returns the inodes of changes of files without an object, by sequence number: the extended
    attributes among these changes are not applied.

    A record that cannot be applied is logged and left out: no error in a journal may prevent the
    mount.
    """
    failed = 0
    later: dict[int, list[bytes]] = {}
    for _, op in ops:
        if op.object and op.kind in ("rename", "link"):
            later.setdefault(op.object, []).append(op.to)
    without_object: dict[int, Ino] = {}
    state = state or SourceState()
    taken: dict[int, Op] = {}
    copied = {op.ino: seq for seq, op in ops if op.kind == "take" and op.ino}
    gone: set[int] = {0}
    done = done or {}
    settled = _settled(ops, done)
    for count, (seq, op) in enumerate(ops, 1):
        if count % PROGRESS_STEP == 0:
            progress(count, len(ops), SHOWING_CHANGES)
        if op.kind == "take":
            taken[op.object] = op
        elif op.kind == "gone":
            gone.add(op.object)
        elif op.file and seq in done and (done[seq] or copied.get(op.ino, 0) < seq):
            # A change that found no file there may still come with a content of a later copy.
            op = as_made(op, done[seq])
        try:
            take, names_later = taken.get(op.object), later.get(op.object, ())
            is_settled = op.object in settled
            ino = _Replayed(names, op, now_ns, state, take, names_later, gone, is_settled).do()
            if ino is not None:
                without_object[seq] = ino
        except Exception as error:
            failed += 1
            if failed <= _LOGGED:
                # An internal error is logged with its traceback.
                log.warning(
                    "record %d (%s of %r) does not fit: %s",
                    *(seq, op.kind, os.fsdecode(op.path), str(error) or repr(error)),
                    exc_info=not isinstance(error, MonarchError),
                )
    if failed > _LOGGED:
        log.warning("%d more records do not fit", failed - _LOGGED)
    return without_object


def _settled(ops: Sequence[tuple[int, Op]], done: Mapping[int, Identity | None]) -> set[int]:
    """The objects from which the drain makes no file any more, whatever others have done to it."""
    contents = {op.object: done.get(seq) for seq, op in ops if op.kind == "content"}
    moving = {op.object for seq, op in ops if op.kind == "rename" and seq not in done}
    return {number for number, there in contents.items() if there is not None} - moving


class _Replayed:
    """One operation, applied to the tree. ``take`` has copied its file up, None if the file was
    created. ``later`` are names that the object gets later. ``gone`` has the objects that were
    removed before, and 0. ``is_settled``: the drain makes no file from the object any more."""

    def __init__(
        self,
        names: Namespace,
        op: Op,
        now_ns: int,
        state: SourceState,
        take: Op | None,
        later: Sequence[bytes],
        gone: set[int],
        is_settled: bool,
    ) -> None:
        self._is_settled = is_settled
        self._gone = gone
        self._later = later
        self._names = names
        self._op = op
        self._state = state
        self._take = take
        self._now_ns = op.mtime_ns if op.mtime_ns is not None else now_ns

    def do(self) -> Ino | None:
        """The inode of a file without an object that was changed; else None."""
        op = self._op
        if op.file:
            return self._change_file()
        if op.object and op.kind in ("rename", "link", "attr", "xattr"):
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
            case "unlink" | "rmdir":
                remove = self._names.unlink if op.kind == "unlink" else self._names.rmdir
                if self._names.resolve(op.path) is not None:
                    remove(*self._place(op.path), now_ns=self._now_ns)
            case "rename":
                self._rename()
            case "attr":
                ino = self._require(op.path)
                self._require_own(ino)
                node = self._names.change(
                    ino,
                    mode=op.mode_from(self._names.attributes(ino).mode),
                    uid=op.uid,
                    gid=op.gid,
                    atime_ns=op.atime_ns,
                    mtime_ns=op.mtime_ns,
                    now_ns=self._now_ns,
                )
                self._hide_mask(node)
            case "xattr":
                self._set_xattrs(self._require(op.path))
            case "gone":
                pass
        return None

    def _change_file(self) -> Ino:
        """Changes the attributes of a file without an object."""
        op, names = self._op, self._names
        ino = self._still_file()
        self._require_own(ino)
        node = names.change(
            ino,
            mode=op.mode_from(names.attributes(ino).mode),
            uid=op.uid,
            gid=op.gid,
            atime_ns=op.atime_ns,
            mtime_ns=op.mtime_ns,
            now_ns=self._now_ns,
        )
        if not node.has_source_bytes:
            self._set_xattrs(ino)
        return ino

    def _still_file(self) -> Ino:
        """The file at one of the paths of the change. Raises Refused, ENOENT, if others have put
        another file there."""
        op = self._op
        for path in (op.path, *op.paths):
            ino = self._names.resolve(path)
            if ino is None or not self._names.attributes(ino).is_file:
                continue
            there = self._names.at_source(ino)
            if ino == op.ino or there is None or op.was is None:
                return ino
            if there.source_ino == op.was.source_ino:
                return ino
        raise Refused(errno.ENOENT)

    def _require_own(self, ino: Ino) -> None:
        """Raises Refused if an entry without an object is another one in a newer snapshot, or
        another user's: the drain leaves the change out, and its mode would open that entry."""
        op, now = self._op, self._names.attributes(ino)
        if op.object or ino == op.ino:
            return
        there = self._names.at_source(ino)
        if there is not None and op.was is not None and there.source_ino != op.was.source_ino:
            raise Refused(errno.ENOENT)
        is_given = any(value is not None for value in (op.mode, op.uid, op.gid))
        if is_given and op.by is not None and op.by.uid not in (0, now.uid):
            raise Refused(errno.EPERM)

    def _set_xattrs(self, ino: Ino) -> None:
        for name, value in self._op.xattrs.items():
            try:
                node = self._names.set_xattr(ino, name, value, now_ns=self._now_ns)
            except Refused:
                # A removed attribute of the source is not known here.
                if value is not None:
                    raise
                node = self._names.copy_up(ino)
            if node.is_dir:
                gone = {name} if value is None else set()
                node.removed_xattrs = node.removed_xattrs - {name} | gone

    def _place(self, path: bytes) -> tuple[Ino, bytes]:
        """The directory of a path, made if it does not exist, and the name in it."""
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
        """Sets the object of a file that is in the snapshot: later names of the file may belong to
        another file at the source until the operation is drained."""
        ino = self._names.resolve(self._op.path)
        if ino is not None and self._names.attributes(ino).is_file:
            self._names.copy_up(ino).set_object(self._op.object)

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
            # If others have removed an entry of the snapshot, it gets a new number.
            ino=Ino(op.ino) if self._is_free(op.ino) else None,
        )
        self._have_xattrs(node)
        self._hide_mask(node)
        return node

    def _hide_mask(self, node: Node) -> None:
        """If the kernel does not check the list of an entry, the bits of the list's mask are not
        the group's. The source, which checks it, gets them."""
        if not self._names.has_acls:
            shown = acl.narrowed(node.mode, acl.Acls(node.xattrs.get(acl.ACCESS, b"")))
            node.mode, node.hidden_bits = shown, node.hidden_bits | node.mode & ~shown

    def _is_free(self, ino: int) -> bool:
        return ino >= WRITTEN_INO and self._names.node(Ino(ino)) is None

    def _have_xattrs(self, node: Node) -> None:
        given = {name: value for name, value in self._op.xattrs.items() if value is not None}
        if given.get(acl.ACCESS) and self._names.at_source(node.ino) is not None:
            # The list of a file of the source is that of the source.
            del given[acl.ACCESS]
        self._names.have_xattrs(node, given)

    def _have_attributes(self, node: Node) -> None:
        """Those that the mount showed of a file when its content was recorded. A write removes
        set-ID bits, and others may have changed the file at the source before: neither has another
        record. A newer snapshot has what others have changed, unless it lacks the file, or has
        another file in its place."""
        op, mode = self._op, self._op.mode
        if mode is None:
            return
        node.drop_bits((stat.S_ISUID | stat.S_ISGID) & ~mode)
        there = self._names.at_source(node.ino)
        if op.ino >= 0 or there is None or self._is_of_others(node.ino):
            if op.ino < 0 and there is not None and self._expected().may_be(there.identity):
                # It is the known file with another owner, or a number that was used again. A right
                # that the known file has lost there, is lost here.
                mode &= there.mode
            if there is not None and (access := op.xattrs.get(acl.ACCESS)):
                self._names.refresh(node.ino, there, acl.Acls(access))
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
            node.hidden_bits = 0
            self._hide_mask(node)
            node.uid = node.uid if op.uid is None else op.uid
            node.gid = node.gid if op.gid is None else op.gid

    def _is_of_others(self, ino: Ino) -> bool:
        """Whether the source has another file than the known one in its place, or others have
        written that one: the drain makes another file then. A number that the source has used
        again shows in the owner, too."""
        op, state, there = self._op, self._state, self._names.at_source(ino)
        if state.identity(op.object) is not None and not state.has_older(op.object):
            # The known one has none of the names of the object there.
            return True
        expected = self._expected()
        known = expected.known
        if known is None or there is None:
            return False
        if self._is_settled and there.source_ino == known.source_ino:
            # They have written it, and it stays as it is.
            return False
        was = self._take.was if self._take is not None else None
        if _has_bytes_of(there, known) or (was is not None and _has_bytes_of(there, was)):
            # The snapshot may be older than what the drain has made.
            return False
        has_owner = op.uid in (None, there.uid)
        return not (has_owner and expected.may_be(there.identity))

    def _expected(self) -> Expected:
        return self._state.expected(0, self._take or self._op)

    def _linked(self) -> Ino:
        """The inode that gets another name; it may have only its new name by now."""
        found = self._names.resolve(self._op.path)
        return self._require(self._op.to) if found is None else found

    def _name_again(self, ino: Ino, path: bytes) -> None:
        """Gives an inode another name, unless it has that name; hides another entry there."""
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
        if ino is not None and (
            not self._names.attributes(ino).is_file
            or self._is_to_be_replaced(ino)
            or self._is_another(ino)
        ):
            # Others have put another kind of entry there, or a link to another file, or the file
            # is to replace that one.
            ino = None
        elif ino is None and (ino := self._found_elsewhere()) is not None:
            self._name_again(ino, op.path)
        node = self._make(op.path) if ino is None else self._names.copy_up(ino)
        node.set_object(op.object)
        if op.kind == "content" or op.xattrs:
            self._have_xattrs(node)
        if op.kind == "content":
            node.set_content(op.size, mtime_ns=op.mtime_ns)
        if op.kind == "content" or (op.ino < 0 and self._is_of_others(node.ino)):
            self._have_attributes(node)
        for other in op.paths:
            self._name_again(node.ino, other)

    def _found_elsewhere(self) -> Ino | None:
        """The file that was copied up, if the snapshot has it under another of its names only: its
        rename may be done at the source without a mark."""
        op, names = self._op, self._names
        if op.kind != "take" or op.was is None:
            return None
        for path in (*op.paths, *self._later):
            ino = names.resolve(path)
            there = None if ino is None else names.at_source(ino)
            # Others may have changed its attributes, but not its bytes.
            if there is not None and _has_bytes_of(there, op.was):
                return ino
        return None

    def _is_another(self, ino: Ino) -> bool:
        """Whether a file has an object of its own: others may have made one file of two that the
        mount showed, and both were written."""
        node = self._names.node(ino)
        if node is None or node.object == self._op.object:
            return False
        return node.object not in self._gone

    def _is_to_be_replaced(self, ino: Ino) -> bool:
        """Whether another file with further names has the path of a file that was copied up: the
        file takes the path only, and the further names stay those of the other one."""
        op, there = self._op, self._names.at_source(ino)
        if op.was is None or there is None:
            return False
        if there.source_ino == op.was.source_ino and not (op.ino < 0 and self._is_of_others(ino)):
            return False
        return not {*self._names.visible_paths(ino)} <= {op.path, *op.paths}

    def _rename(self) -> None:
        op, names = self._op, self._names
        ino, existing = names.resolve(op.path), names.resolve(op.to)
        if ino is None:
            # The rename is already done at the source; or others have removed the entry, and later
            # operations make it again as far as they need it.
            return
        if existing is not None and self._is_renamed(ino, existing):
            return
        is_dir = names.attributes(ino).is_dir
        parent, name = self._place(op.path)
        to_parent, to_name = self._place(op.to)
        if existing == ino and op.path != op.to:
            # The source has made it already, or others have: the file has both names.
            names.unlink(parent, name, now_ns=self._now_ns)
            return
        if existing not in (None, ino) and (is_dir or names.attributes(existing).is_dir):
            names.hide(to_parent, to_name, now_ns=self._now_ns)
        if is_dir:
            names.copy_up_all(ino)
        names.rename(parent, name, to_parent, to_name, flags=0, now_ns=self._now_ns, is_again=True)

    def _is_renamed(self, old: Ino, new: Ino) -> bool:
        """Whether the source has renamed an entry without an object already, to ``new``, and others
        have made another one with the old name, ``old``, since."""
        was, at_source = self._op.was, self._names.at_source
        if self._op.object or was is None:
            return False
        numbers = [there.source_ino for ino in (old, new) if (there := at_source(ino)) is not None]
        return len(numbers) == 2 and numbers[0] != was.source_ino == numbers[1]


def _has_bytes_of(there: Attributes, was: Identity) -> bool:
    """Whether a file of the source is that of an identity, with the same bytes."""
    same = (was.source_ino, was.size, was.mtime_ns)
    return there.is_file and (there.source_ino, there.size, there.mtime_ns) == same
