"""The inodes that were made or changed through the mount, kept over the snapshot.

Everything else is answered by the snapshot, so memory grows with what is written and not with the
files. Inodes that were not used recently are moved to a file (``put_away``, spill.py) and read
again when they are requested, so memory does not grow with drained files either. Used from one
thread, that of the event loop; nothing here waits. A call that needs the file raises Unanswered
while its disk hangs, and Refused, EIO, if the file is damaged.
"""

from __future__ import annotations

import marshal
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from monarch.namespace.listing import ENTRY_BYTES, Listings
from monarch.namespace.source_view import SourceView
from monarch.namespace.spill import Spill
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino

# Memory, in bytes: of an inode with what other parts of the daemon keep of it, of an extended
# attribute without its name and value, and of an inode that is only in the file. A new file takes
# an inode and a name.
_NODE_BYTES = 2816
_XATTR_BYTES = 256
_SPILLED_BYTES = 64
NAME_BYTES = _NODE_BYTES + ENTRY_BYTES

# Unused inodes that stay in memory; inodes that are moved at once, which takes the event loop some
# milliseconds; inodes that are read back at once.
_KEPT = 8192
_BATCH = 256
_READ = 256


@dataclass(slots=True)
class Node:
    """An inode that was made or changed through the mount.

    ``names`` are all its names, each the directory's number and the name there, the first one
    first; an inode without names is unlinked, and its ``nlink`` is 0. The root has no names.
    ``parent`` is the directory of the first name, or of the last one that was removed. ``size`` in
    bytes, ``blocks`` in 512-byte units, times in ns since the epoch. ``object`` is the number of
    the written file that has its bytes; 0: the source has them, or there are none. ``source_ino``
    is the source's number of it, 0 if it was made here.

    Fields marked by ``keeps_*`` were set through the mount; the others of a node without an object
    follow the source when that changes. ``is_separate``: it had an object once, or got another name
    here, so it is not read as a file of the snapshot any more. ``removed_xattrs``: extended
    attributes that the source may have, and that were removed by an earlier mount, or here from a
    file without an object. ``undrained`` is the number in the journal of the last change of
    attributes that the source may lack, if the file had no object then; 0 if there is none. Until
    then ``xattrs`` of such a file are those that differ from the source's. ``undrained_mtimes`` are
    the modification times that such changes set, by their numbers. ``drained`` is the number of the
    last such change that has left the drain, or 0. ``hidden_bits``: bits of a mask, not shown.
    """

    ino: Ino
    parent: Ino
    mode: int
    uid: int
    gid: int
    nlink: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    rdev: int = 0
    size: int = 0
    blocks: int = 0
    source_ino: int = 0
    target: bytes = b""
    object: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    # Whether those that the source had are among them.
    has_source_xattrs: bool = False
    names: dict[tuple[Ino, bytes], None] = field(default_factory=dict)
    keeps_mode: bool = False
    keeps_owner: bool = False
    keeps_times: bool = False
    is_separate: bool = False
    undrained: int = 0
    undrained_mtimes: dict[int, int] | None = None
    drained: int = 0
    removed_xattrs: frozenset[bytes] = frozenset()
    hidden_bits: int = 0

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def has_source_bytes(self) -> bool:
        """Whether it is a file of the snapshot with the source's bytes, and under no new name."""
        is_separate = self.object or self.is_separate or self.ino >= WRITTEN_INO
        return self.is_file and not is_separate

    @property
    def attributes(self) -> Attributes:
        return Attributes(*_ATTRIBUTES_FIELDS(self))

    def touch(self, now_ns: int) -> None:
        """The content, or the names in a directory, changed at ``now_ns``."""
        self.mtime_ns = self.ctime_ns = now_ns
        self.keeps_times = True

    def set_object(self, number: int) -> None:
        """The written file with this number has the bytes from now on."""
        self.object = number
        self.is_separate = True

    def take_object(self) -> int:
        """The source has the bytes from now on. Returns the number of the written file, or 0."""
        number, self.object = self.object, 0
        return number

    def set_content(
        self, size: int, *, blocks: int | None = None, mtime_ns: int | None = None
    ) -> None:
        """Records what is known of the bytes; what is None stays."""
        self.size = size
        self.blocks = self.blocks if blocks is None else blocks
        self.mtime_ns = self.mtime_ns if mtime_ns is None else mtime_ns

    def grow(self, size: int, now_ns: int) -> None:
        """Bytes were written at ``now_ns``, up to ``size`` at least."""
        self.size = max(self.size, size)
        self.touch(now_ns)

    @property
    def set_id_to_remove(self) -> int:
        """The set-ID bits of the mode that a change of the bytes by a user removes.

        Linux keeps the set-group-ID bit of a file without the execute bit of its group if the user
        is a member of that group. The groups of the user are unknown here: the bit is removed.
        """
        return self.mode & (stat.S_ISUID | stat.S_ISGID)

    def drop_privileges_of_owner(self) -> None:
        """Removes the set-ID bits that a new owner removes."""
        is_program = self.mode & stat.S_IXGRP
        self.drop_bits(stat.S_ISUID | (stat.S_ISGID if is_program else 0))

    def drop_bits(self, bits: int) -> None:
        """Removes ``bits`` from the mode."""
        if self.mode & bits:
            self.mode &= ~bits
            self.keeps_mode = True

    def follow_all(self) -> None:
        """The source has all that was set here: its attributes count from now on."""
        self.keeps_mode = self.keeps_owner = self.keeps_times = False

    def follow(self, attributes: Attributes) -> None:
        """Takes over the source's new attributes, except those set through the mount."""
        if self.object or stat.S_IFMT(attributes.mode) != stat.S_IFMT(self.mode):
            return
        if not self.keeps_mode:
            self.mode, self.hidden_bits = attributes.mode, 0
        if not self.keeps_owner:
            self.uid, self.gid = attributes.uid, attributes.gid
        if not self.keeps_times:
            self.mtime_ns = self.atime_ns = attributes.mtime_ns
        self.ctime_ns = max(self.ctime_ns, attributes.ctime_ns)
        self.source_ino = attributes.source_ino
        if self.is_file:
            self.size, self.blocks = attributes.size, attributes.blocks


class Overlay:
    """The nodes by their numbers, in memory or in a file.

    The file lies beside ``spill``, the path of another one; without it all stays in memory. It also
    takes the names in ``listings`` of the inodes that are moved. Inodes that are made are numbered
    from ``first_ino`` on, and no number is used twice.
    """

    def __init__(
        self, known: SourceView, listings: Listings, *, first_ino: Ino, spill: Path | None
    ) -> None:
        self._known = known
        self._listings = listings
        # Those in memory: the last that was made or requested is at the end.
        self._nodes: dict[Ino, Node] = {}
        self._spill_at = spill
        self._spill: Spill | None = None
        # How many are only in the file; those of the snapshot among them, a bit for each inode.
        self.spilled = 0
        self._spilled_old = bytearray()
        # Inodes with an old state in the file, and those of them that were forgotten since.
        self._outdated: set[Ino] = set()
        self._dropped: list[Ino] = []
        # The bytes of extended attributes and targets of symbolic links.
        self._value_bytes = 0
        self._next_ino = Ino(max(first_ino, WRITTEN_INO))

    @property
    def held_bytes(self) -> int:
        """About how much memory the nodes take."""
        return len(self._nodes) * _NODE_BYTES + self.spilled * _SPILLED_BYTES + self._value_bytes

    @property
    def is_empty(self) -> bool:
        return not self._nodes and not self.spilled

    @property
    def failure(self) -> str:
        """Why the file cannot be read, empty if it could be."""
        return self._spill.failure if self._spill is not None else ""

    async def answers(self) -> None:
        """Waits until the file can be read."""
        if self._spill is not None:
            await self._spill.answers()

    def has(self, ino: Ino) -> bool:
        """Whether an inode was made or changed through the mount, and is not forgotten."""
        return ino in self._nodes or self._away(ino) is not None

    def get(self, ino: Ino) -> Node | None:
        """The node of an inode, which is in memory from now on; None if it has none."""
        node = self._nodes.get(ino)
        if node is None and (away := self._away(ino)) is not None:
            node, refreshed = away
            self._nodes[ino] = node
            self._outdated.add(ino)
            self.spilled -= 1
            self._value_bytes += _values_of(node)
            if refreshed is not None:
                self._known.refreshed[ino] = refreshed
        return node

    def peek(self, ino: Ino) -> Node | None:
        """The node of an inode, to be read at once and not kept."""
        node = self._nodes.get(ino)
        if node is None and (away := self._away(ino)) is not None:
            return away[0]
        return node

    def all(self) -> Iterator[Node]:
        """All nodes. Those that are not in memory must not be changed."""
        here = list(self._nodes)
        for ino in here:
            if (node := self.peek(ino)) is not None:
                yield node
        seen, after = set(here), Ino(0)
        while self._spill is not None and (inos := self._spill.inos(after, _READ)):
            after = inos[-1]
            for ino in inos:
                if ino not in seen and (node := self.peek(ino)) is not None:
                    yield node

    def refreshed(self, ino: Ino) -> Attributes | None:
        """The source's attributes that the file has of an inode, None if it has none."""
        away = None if ino in self._nodes else self._away(ino)
        return None if away is None else away[1]

    def number(self, ino: Ino | None = None) -> Ino:
        """A number for a new inode: the next one, or ``ino``, as in a replay. Raises ValueError if
        that is used."""
        if ino is not None and (ino < WRITTEN_INO or self.has(ino)):
            raise ValueError(f"inode {ino} is another's")
        number = self._next_ino if ino is None else ino
        self._next_ino = Ino(max(self._next_ino, number + 1))
        return number

    def add(self, node: Node) -> None:
        self._nodes[node.ino] = node
        self._value_bytes += _values_of(node)

    def forget(self, node: Node) -> None:
        self._value_bytes -= _values_of(node)
        del self._nodes[node.ino]
        if node.ino in self._outdated:
            self._dropped.append(node.ino)
        self._known.drop(node.ino)

    def replace_xattrs(
        self, node: Node, xattrs: Mapping[bytes, bytes], *, with_source: bool = False
    ) -> None:
        """``with_source``: the attributes that the source had are among them."""
        node.has_source_xattrs |= with_source
        self._value_bytes += xattr_bytes(xattrs) - xattr_bytes(node.xattrs)
        node.xattrs = dict(xattrs)

    # -- the file --------------------------------------------------------------------------------

    def put_away(self) -> bool:
        """Moves some inodes that were not used recently to the file, with their names. Returns
        whether there may be more of them.

        A ``Node`` that another object refers to stays: it may be about to be changed. Raises
        OSError or Unanswered if the file does not take them: they stay in memory then.
        """
        over = min(len(self._nodes) - _KEPT, _BATCH)
        has_news = bool(self._dropped or self._listings.unnamed)
        if self._spill_at is None or (over <= 0 and not has_news):
            return False
        if self._spill is None:
            self._spill = Spill(self._spill_at)
        chosen = self._unused(max(0, over))
        names = list(self._listings.in_memory((node.ino, node.names) for node in chosen))
        refreshed = self._known.refreshed
        # A move that is not answered may be made all the same, after changes in memory.
        self._listings.spill_to(self._spill, names)
        self._outdated.update(node.ino for node in chosen)
        self._spill.move(
            nodes=[(node.ino, _packed(node, refreshed.get(node.ino))) for node in chosen],
            names=names,
            gone=self._dropped,
            unnamed=self._listings.unnamed,
        )
        for ino in self._dropped:
            self._outdated.discard(ino)
            self._mark_spilled(ino, False)
        self._dropped.clear()
        self._listings.spilled(names)
        for node in chosen:
            del self._nodes[node.ino]
            self._known.put_away(node.ino)
            self._value_bytes -= _values_of(node)
            self._outdated.discard(node.ino)
            self._mark_spilled(node.ino, True)
            self.spilled += 1
        return over == _BATCH and bool(chosen)

    def _unused(self, count: int) -> list[Node]:
        """Of the ``count`` nodes that were not used for the longest time, those that may be moved;
        the others count as used."""
        chosen: list[Node] = []
        for ino in list(islice(self._nodes, count)):
            if _references(self._nodes, ino) > _ALONE or self._known.has_more(ino):
                self._nodes[ino] = self._nodes.pop(ino)
            else:
                chosen.append(self._nodes[ino])
        return chosen

    def _mark_spilled(self, ino: Ino, is_spilled: bool) -> None:
        """Records whether the file has an inode of the snapshot. Others are looked up in it."""
        if ino >= WRITTEN_INO:
            return
        at, bit, bits = ino >> 3, 1 << (ino & 7), self._spilled_old
        if at >= len(bits):
            bits.extend(bytes(at + 1 - len(bits)))
        bits[at] = bits[at] | bit if is_spilled else bits[at] & ~bit

    def _away(self, ino: Ino) -> tuple[Node, Attributes | None] | None:
        """An inode (if positive) that is only in the file, and the source's attributes of it."""
        if self._spill is None or ino in self._outdated:
            return None
        if ino < WRITTEN_INO:
            at = ino >> 3
            if not 0 <= at < len(self._spilled_old) or not self._spilled_old[at] & 1 << (ino & 7):
                return None
        packed = self._spill.node(ino)
        return None if packed is None else _unpacked(packed)


_NODE_FIELDS = attrgetter(*(each.name for each in fields(Node)))
_ATTRIBUTES_FIELDS = attrgetter(*(each.name for each in fields(Attributes)))


def _packed(node: Node, refreshed: Attributes | None) -> bytes:
    there = None if refreshed is None else _ATTRIBUTES_FIELDS(refreshed)
    return marshal.dumps((_NODE_FIELDS(node), there))


def _unpacked(packed: bytes) -> tuple[Node, Attributes | None]:
    node, refreshed = marshal.loads(packed)
    return Node(*node), None if refreshed is None else Attributes(*refreshed)


def _references(nodes: Mapping[Ino, Any], ino: Ino) -> int:
    """How many references to a node exist, with those that this call makes."""
    node = nodes[ino]
    return sys.getrefcount(node)


# Of a node to which no other object refers.
_ALONE = _references({ROOT_INO: object()}, ROOT_INO)


def _values_of(node: Node) -> int:
    """The memory that the extended attributes and the target of an inode take, in bytes."""
    return xattr_bytes(node.xattrs) + len(node.target)


def xattr_bytes(xattrs: Mapping[bytes, bytes]) -> int:
    """The memory that extended attributes take, in bytes."""
    return sum(_XATTR_BYTES + len(name) + len(value) for name, value in xattrs.items())
