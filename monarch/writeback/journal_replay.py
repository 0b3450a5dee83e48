"""The part of a journal that a mount takes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from monarch.types import Identity
from monarch.writeback.history import Numbered
from monarch.writeback.journal_records import Known
from monarch.writeback.op import Op


@dataclass(frozen=True, slots=True)
class Replay:
    """What a mount takes over from a journal.

    ``ops``: the changes with their sequence numbers, in order, from the snapshot to the last tree.
    ``done``: the sequence numbers of the drained ones, each with the identity of a published
    content. ``next_object`` and ``next_ino`` were never used. ``lost``: the last record of each
    file that a power cut has damaged, with its names, if that was found now; these files are not in
    ``ops``. ``recorded_ns``: the time of each change that is not drained, in ns since the epoch.
    ``staged``: files of the source that may have got the name of an object in an earlier mount,
    without a record. ``known``: what the journal knew when it was rewritten, None if it never was.
    ``all_doubted``: the objects that any power cut has made doubtful; ``doubted`` has the last
    record, and its time, of those with a name. ``damaged``: objects whose last content the source
    has, and that lack bytes in the tier. ``aside``: changes that are set aside, since the
    source refuses them. ``source`` is the path of the source. ``withheld``: the set-ID bits that
    the drain has withheld since a drained change, by its sequence number. ``removed``: the objects
    whose older version the drain has removed at the source, and that has no newer one. ``ended``:
    the last record is that of a clean end.
    """

    ops: tuple[Numbered, ...]
    done: Mapping[int, Identity | None]
    next_object: int
    next_ino: int
    lost: tuple[Op, ...]
    recorded_ns: Mapping[int, int]
    staged: Mapping[int, frozenset[Identity]] = field(default_factory=dict)
    known: Known | None = None
    doubted: Mapping[int, tuple[Op, int]] = field(default_factory=dict)
    all_doubted: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()
    aside: frozenset[int] = frozenset()
    source: bytes = b""
    withheld: Mapping[int, int] = field(default_factory=dict)
    removed: frozenset[int] = frozenset()
    ended: bool = False

    def unpublished(self, objects: Iterable[int]) -> set[int]:
        """Those of ``objects`` with bytes that no recorded content will bring to the source: none
        of their contents waits, and the last was neither published nor the source's version.

        A content that was recorded before the bytes were moved to a staged file at the source does
        not bring that file."""
        settled = set()
        for seq, op in self.ops:
            if op.kind == "through":
                settled.discard(op.object)
            elif op.kind == "content":
                if op.same or seq not in self.done or self.done[seq] is not None:
                    settled.add(op.object)
                else:
                    settled.discard(op.object)
        return set(objects) - settled

    def without_history(self) -> Replay:
        """The objects that are still needed after the changes were taken over."""
        return Replay((), {}, self.next_object, self.next_ino, self.lost, {})

    def versions(self) -> dict[int, tuple[int, int | None]]:
        """The last recorded size and modification time of each object.

        The time is None, which no object has, if it was set while the object had bytes that no
        content records.
        """
        versions: dict[int, tuple[int, int | None]] = {}
        for _, op in self.ops:
            if op.kind == "content":
                versions[op.object] = op.size, op.mtime_ns
            elif op.kind == "attr" and op.mtime_ns is not None and op.object in versions:
                versions[op.object] = versions[op.object][0], op.mtime_ns if op.same else None
        return versions
