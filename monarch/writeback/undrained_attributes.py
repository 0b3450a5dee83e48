"""Changes of attributes of files that have no object: the source has the bytes, and perhaps not yet
the attributes.

While the source may lack a change, the file shows what was set here, and follows the source in all
else. When the source has it, the file has another identity there, by the drain and not by others:
the identity that the mount knows is renewed, and so are the records of the file's copies.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.types import WRITTEN_INO, Attributes, Identity, Ino
from monarch.writeback.expected import is_time
from monarch.writeback.history import Numbered
from monarch.writeback.op import Op


class UndrainedAttributes:
    """Belongs to the event loop. ``renewed`` is called with the inode number of each file that the
    drain has changed, and its identity at the source before and after that; ``unset`` with that of
    each file that does not show any more what was set, since the drain has left that out."""

    def __init__(
        self,
        names: Namespace,
        renewed: Callable[[Ino, Identity, Identity], None],
        unset: Callable[[Ino], None],
    ) -> None:
        self._names = names
        self._renewed = renewed
        self._unset = unset
        # The inodes of changes of earlier mounts, by seq: a new snapshot has numbered them anew.
        self._inos: dict[int, Ino] = {}
        # By inode number, the changes of extended attributes since each of the reads under way.
        self._reads: dict[Ino, list[dict[bytes, bytes | None]]] = {}

    def noted(self, ino: Ino, seq: int, op: Op) -> None:
        """A change of a file is in the journal."""
        node = self._names.node(ino)
        if node is not None and node.has_source_bytes:
            node.undrained = seq
            if op.mtime_ns is not None:
                if node.undrained_mtimes is None:
                    node.undrained_mtimes = {}
                node.undrained_mtimes[seq] = op.mtime_ns

    def drained(
        self,
        seq: int,
        op: Op,
        before: Identity | None,
        now: Identity | None,
        *,
        dropped: Container[tuple[bytes, bytes]],
    ) -> None:
        """A change has left the drain. The file was known as ``before`` at the source and is
        ``now``, None if it was not changed there. ``dropped`` are the extended attributes, by path
        and name, that the source has not taken: this mount continues to show them."""
        ino = self._inos.pop(seq, Ino(op.ino))
        node = self._names.node(ino)
        if node is None or node.object:
            return
        node.drained = seq
        if node.undrained_mtimes is not None:
            node.undrained_mtimes.pop(seq, None)
        there = self._names.at_source(ino)
        if now is not None and there is not None and there.identity == before:
            # Otherwise the mount has noticed another change since.
            self._refresh(ino, there, op, now)
            if ino < WRITTEN_INO:
                self._renewed(ino, there.identity, now)
        if node.undrained == seq:
            node.undrained, node.undrained_mtimes = 0, None
            if node.has_source_bytes:
                # The others are read from the source again.
                paths = {op.path, *op.paths}
                kept = {
                    name: value
                    for name, value in node.xattrs.items()
                    if now is not None and any((path, name) in dropped for path in paths)
                }
                self._names.have_xattrs(node, kept)
                node.removed_xattrs = frozenset()
        if as_made(op, now) is not op:
            self._left_out(node, now)

    def _left_out(self, node: Node, now: Identity | None) -> None:
        """The source has not taken a change, or not its times: unless later changes wait, the file
        shows what the source has."""
        if now is not None and not node.undrained_mtimes:
            node.keeps_times = False
        elif now is None and not node.undrained:
            node.follow_all()
        else:
            return
        if (there := self._names.at_source(node.ino)) is not None and node.names:
            self._names.refresh(node.ino, there)
            self._unset(node.ino)

    def _refresh(self, ino: Ino, there: Attributes, op: Op, now: Identity) -> None:
        """The source has a file as ``now`` after ``op``; ``there`` is what was known of it."""
        given = op.mode_from(there.mode)
        mode = there.mode if given is None else stat.S_IFMT(there.mode) | stat.S_IMODE(given)
        fresh = replace(
            there,
            mode=mode,
            uid=there.uid if op.uid is None else op.uid,
            gid=there.gid if op.gid is None else op.gid,
            size=now.size,
            mtime_ns=now.mtime_ns,
            ctime_ns=now.ctime_ns,
            source_ino=now.source_ino,
        )
        self._names.refresh(ino, fresh)

    def take_up(
        self,
        ops: Iterable[Numbered],
        done: Mapping[int, Identity | None],
        inos: Mapping[int, Ino],
    ) -> None:
        """Takes over the changes of earlier mounts, which the tree shows. ``inos`` has the inodes
        of the changes of files without an object, by seq."""
        files: dict[Ino, list[Numbered]] = {}
        for seq, op in ops:
            if seq in inos:
                files.setdefault(inos[seq], []).append((seq, op))
            elif op.kind in ("take", "content"):
                # What the source had before does not matter any more.
                files.pop(Ino(op.ino), None)
        for ino, changes in files.items():
            node = self._names.node(ino)
            if node is not None and not node.object:
                self._take_up(node, changes, done)

    def _take_up(
        self, node: Node, changes: Iterable[Numbered], done: Mapping[int, Identity | None]
    ) -> None:
        known: set[Identity] = set()
        # The version that copies may have, and that the source has now.
        before: Identity | None = None
        now: Identity | None = None
        for seq, op in changes:
            if seq not in done:
                self._inos[seq] = node.ino
                self.noted(node.ino, seq, op)
                if node.has_source_bytes:
                    self.show_xattrs(node, op.xattrs)
                continue
            became, there = done[seq], self._names.at_source(node.ino)
            if became is None or there is None:
                continue
            if op.ino < 0 and became.ctime_ns < there.ctime_ns:
                # The mark has what the mount knew at the change, and the snapshot is newer: others
                # wrote the file in between.
                self._refresh(node.ino, there, op, there.identity)
                continue
            known.add(there.identity)
            if op.was is not None and op.was not in known:
                # The mount had noticed a change by others: earlier copies have other bytes.
                before = op.was
            elif before is None:
                before = there.identity
            now = became
            self._refresh(node.ino, there, op, now)
            known |= {before, now}
        if before is not None and now is not None and node.ino < WRITTEN_INO:
            self._renewed(node.ino, before, now)

    @contextmanager
    def reading(self, ino: Ino) -> Iterator[Mapping[bytes, bytes | None]]:
        """For a read of a file's extended attributes at the source: yields the changes that the
        answer may lack, those made during the read included. The drain may bring a change to the
        source, and the mount forget it, after the source was read."""
        changes = dict(self.xattrs(ino))
        reads = self._reads.setdefault(ino, [])
        reads.append(changes)
        try:
            yield changes
        finally:
            self._reads[ino] = [each for each in reads if each is not changes]
            if not self._reads[ino]:
                del self._reads[ino]

    def xattrs(self, ino: Ino) -> Mapping[bytes, bytes | None]:
        """The changes of extended attributes that the source may lack of a file without an object;
        None for a removed one."""
        node = self._names.node(ino)
        if node is None or not node.has_source_bytes:
            return {}
        return {**dict.fromkeys(node.removed_xattrs), **node.xattrs}

    def show_xattrs(self, node: Node, changes: Mapping[bytes, bytes | None]) -> None:
        """Shows extended attributes that the source may lack; None removes one."""
        if not changes:
            return
        for read in self._reads.get(node.ino, ()):
            read.update(changes)
        given = {name: value for name, value in changes.items() if value is not None}
        kept = {name: value for name, value in node.xattrs.items() if name not in changes}
        self._names.have_xattrs(node, kept | given)
        node.removed_xattrs = (node.removed_xattrs | changes.keys()) - given.keys()


def as_made(op: Op, now: Identity | None) -> Op:
    """A change of the attributes of a file without an object as the drain has made it; ``now`` is
    its mark.

    It leaves a change out if others have replaced the file, and the times if others have written
    it.
    """
    if now is None:
        return replace(op, mode=None, uid=None, gid=None, mtime_ns=None, atime_ns=None)
    if op.mtime_ns is not None and not is_time(now.mtime_ns, op.mtime_ns):
        return replace(op, mtime_ns=None, atime_ns=None)
    return op


def applied(
    there: Mapping[bytes, bytes], changes: Mapping[bytes, bytes | None]
) -> dict[bytes, bytes]:
    """Extended attributes after changes of them; None removes one."""
    changed = {**there, **changes}
    return {name: value for name, value in changed.items() if value is not None}
