"""Which changes of a journal still matter, when all else is to be left out of it. Pure.

What is left leads from the same snapshot to the same tree, and tells the drain the same of what
the source has. Left out are contents that a later one of the same file has made obsolete, and
files, directories and other things that were made and removed again; all of it only when the source
has it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from monarch.types import Identity
from monarch.writeback.crash_losses import moved, without
from monarch.writeback.op import Op, above

Numbered = tuple[int, Op]
Done = Mapping[int, Identity | None]


def shortened(ops: Sequence[Numbered], done: Done) -> list[Numbered]:
    """``ops`` without what does not matter; ``done``: those that the source has, and as what."""
    removed = _removed(ops, done)
    left = [it for it in without(ops, removed) if not _removes_nothing(it[1], removed)]
    passed = _passed(left, done)
    return _without_obsolete((it for it in left if _about(it[1]) not in passed), done)


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


def _about(op: Op) -> int:
    """The number on the mount of what a change is about that has no object; 0 for all others."""
    return 0 if op.object or op.kind in ("gone", "through") else op.ino


def _passed(ops: Iterable[Numbered], done: Done) -> set[int]:
    """Numbers of what has no object, was made and is removed again, both at the source as well, and
    has left no trace: nothing that stays was done in it, and what has replaced something was itself
    replaced in that very place."""
    paths: dict[bytes, int] = {}
    replaced_at: dict[int, bytes] = {}
    made: set[int] = set()
    stays: set[int] = set()
    # In which of them changes of each were made; of all else: 0.
    within: dict[int, set[int]] = {}
    for seq, op in ops:
        number = _about(op)
        if op.kind in ("mkdir", "symlink", "mknod"):
            made.add(number)
        elif number not in made:
            number = 0
        used = within.setdefault(number, set())
        for path in (*op.names(), *op.paths):
            used.update(paths[directory] for directory in above(path) if directory in paths)
        if seq not in done or op.kind == "link":
            stays.add(number)
        match op.kind:
            case "mkdir" | "symlink" | "mknod":
                paths[op.path] = number
            case "rmdir" | "unlink":
                if (there := paths.pop(op.path, 0)) != number or number in replaced_at:
                    stays |= {there, number}
            case "rename":
                there = paths.pop(op.to, 0)
                # A file leaves at the source what it replaces until its bytes come.
                is_left = op.object or replaced_at.get(there, op.to) != op.to
                if there != op.over_ino or is_left:
                    stays |= {there, op.over_ino}
                if there or op.over_ino or op.over_object or op.over is not None:
                    replaced_at[number] = op.to
                if not op.object:
                    paths = {moved(path, op): ino for path, ino in paths.items()}
                if (there := paths.pop(op.path, 0)) != number:
                    stays |= {there, number}
                elif number:
                    paths[op.to] = number
    left = [*stays, *paths.values(), 0]
    seen: set[int] = set()
    while left:
        number = left.pop()
        if number not in seen:
            seen.add(number)
            left.extend(within.get(number, ()))
    return made - seen


def _without_obsolete(ops: Iterable[Numbered], done: Done) -> list[Numbered]:
    left: dict[int, Op] = {}
    # What was told last of each object, if these are contents that the source has: the last that
    # was published, and the last after it that was left out, which says nothing of what it has.
    last: dict[int, list[int]] = {}
    for seq, op in ops:
        is_content = op.kind == "content" and seq in done
        before = last.pop(op.object, [])
        last.pop(op.over_object, None)
        if is_content:
            if done[seq] is not None:
                obsolete = before
            else:
                obsolete = [each for each in before if done[each] is None]
                # What one that is left out has changed is to be brought by those behind it.
                op = replace(op, intact=min([op.intact, *(left[each].intact for each in obsolete)]))
            for each in obsolete:
                del left[each]
            last[op.object] = [*(each for each in before if each not in obsolete), seq]
        left[seq] = op
    return list(left.items())


def objects_of(ops: Iterable[Numbered]) -> Iterator[int]:
    """All that are named."""
    for _, op in ops:
        yield op.object
        yield op.over_object
