"""Which changes of a journal still matter, when all else is to be left out of it. Pure.

What is left leads from the same snapshot to the same tree, and tells the drain the same of what
the source has. Left out are contents that a later one of the same file has made obsolete, and files
that were made and removed again; all of it only when the source has it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from monarch.types import Identity
from monarch.writeback.losses import moved, without
from monarch.writeback.ops import Op

Numbered = tuple[int, Op]
Done = Mapping[int, Identity | None]


def shortened(ops: Sequence[Numbered], done: Done) -> list[Numbered]:
    """``ops`` without what does not matter; ``done``: those that the source has, and as what."""
    removed = _removed(ops, done)
    left = without(ops, removed)
    return _without_obsolete((it for it in left if not _removes_nothing(it[1], removed)), done)


def _removes_nothing(op: Op, removed: Container[int]) -> bool:
    """Whether a removal is of what one that is left out had replaced, and that was nothing, or is
    left out as well."""
    if op.kind != "unlink" or not op.strict:
        return False
    return op.object in removed or (op.ino, op.object, op.was) == (0, 0, None)


def _removed(ops: Iterable[Numbered], done: Done) -> set[int]:
    """Objects whose file was removed on the mount and is no more at the source, for good."""
    names: dict[bytes, int] = {}
    counts: dict[int, int] = {}
    removed: set[int] = set()
    waiting: set[int] = set()

    def name(path: bytes, number: int) -> None:
        take_off(path)
        names[path] = number
        counts[number] = counts.get(number, 0) + 1

    def take_off(path: bytes) -> None:
        if (number := names.pop(path, 0)) != 0:
            counts[number] -= 1

    for seq, op in ops:
        if seq not in done:
            waiting |= {op.object, op.over_object}
        match op.kind:
            case "create" | "take":
                for path in op.paths or (op.path,):
                    name(path, op.object)
            case "content":
                for path in op.paths:
                    name(path, op.object)
            case "link" if op.object:
                name(op.to, op.object)
            case "unlink":
                take_off(op.path)
            case "rename" if op.object:
                take_off(op.path)
                name(op.to, op.object)
            case "rename":
                take_off(op.to)
                names = {moved(path, op): number for path, number in names.items()}
                if (number := names.pop(op.path, 0)) != 0:
                    names[op.to] = number
            case "gone" if not counts.get(op.object, 0):
                # One that has a name yet is read from the source.
                removed.add(op.object)
    return removed - waiting - {0}


def _without_obsolete(ops: Iterable[Numbered], done: Done) -> list[Numbered]:
    left: dict[int, Op] = {}
    # The last that is told of each object, if that is a content that the source has.
    last: dict[int, int] = {}
    for seq, op in ops:
        is_content = op.kind == "content" and seq in done
        before = last.get(op.object, 0)
        # A content that was left out says nothing of what the source has by one before it.
        if is_content and before and (done[seq] is not None or done[before] is None):
            del left[before]
        last.pop(op.object, None)
        last.pop(op.over_object, None)
        if is_content:
            last[op.object] = seq
        left[seq] = op
    return list(left.items())


def objects_of(ops: Iterable[Numbered]) -> Iterator[int]:
    """All that are named."""
    for _, op in ops:
        yield op.object
        yield op.over_object
