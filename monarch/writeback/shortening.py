"""Compaction of a journal: selects the operations that still matter. Pure functions.

The selected operations lead from the same snapshot to the same tree, and the drain learns the same
from them about the source. Two kinds of operations are left out, and only if they are drained:
contents with a later content of the same file, and operations on entries that were created and
removed again.
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
    """``ops`` without those that do not matter any more.

    ``done`` has the sequence numbers of the operations that are drained, each with the identity of
    the entry that was published or made at the source, None if there is none.
    """
    removed = _removed(ops, done)
    kept = [it for it in without(ops, removed) if not _removes_nothing(it[1], removed)]
    gone = _gone(kept, done)
    return _without_obsolete((it for it in kept if _number(it[1]) not in gone), done)


def _removes_nothing(op: Op, removed: Container[int]) -> bool:
    """Whether ``op`` is an unlink that removes no file, or one that is left out.

    ``without`` inserts such an unlink after a rename that is left out, if that rename replaced no
    file, or one that is left out as well.
    """
    if op.kind != "unlink" or not op.strict:
        return False
    return op.object in removed or (op.ino, op.object, op.was) == (0, 0, None)


def _removed(ops: Iterable[Numbered], done: Done) -> set[int]:
    """The objects of files that were removed, with all operations on them drained."""
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
                # A file that still has a name is read from the source.
                removed.add(op.object)
    return removed - waiting - {0}


def _number(op: Op) -> int:
    """The inode number of a changed entry without an object; 0 for all other operations."""
    return 0 if op.object or op.kind in ("gone", "through") else op.ino


def _gone(ops: Iterable[Numbered], done: Done) -> set[int]:
    """The inode numbers of entries without objects that have left no trace.

    Such an entry was created and removed again, both also at the source, and no operation that is
    kept was done in it. If it has replaced an entry, it was replaced itself at that same path.
    """
    paths: dict[bytes, int] = {}
    replaced_at: dict[int, bytes] = {}
    made: set[int] = set()
    stays: set[int] = set()
    # For each number, 0 for all entries not made here: the directories in which it was changed.
    within: dict[int, set[int]] = {}
    for seq, op in ops:
        number = _number(op)
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
                # At the source a file replaces the other one only when its content is drained.
                keeps_both = op.object or replaced_at.get(there, op.to) != op.to
                if there != op.over_ino or keeps_both:
                    stays |= {there, op.over_ino}
                if there or op.over_ino or op.over_object or op.over is not None:
                    replaced_at[number] = op.to
                if not op.object:
                    paths = {moved(path, op): ino for path, ino in paths.items()}
                if (there := paths.pop(op.path, 0)) != number:
                    stays |= {there, number}
                elif number:
                    paths[op.to] = number
    to_visit = [*stays, *paths.values(), 0]
    kept: set[int] = set()
    while to_visit:
        number = to_visit.pop()
        if number not in kept:
            kept.add(number)
            to_visit.extend(within.get(number, ()))
    return made - kept


def _without_obsolete(ops: Iterable[Numbered], done: Done) -> list[Numbered]:
    """``ops`` without the contents that later contents of the same object have made obsolete."""
    kept: dict[int, Op] = {}
    # The sequence numbers of the last operations on each object, if these are drained contents: the
    # last published content, and after it the last one that the drain has skipped. A skipped
    # content does not say what the source has.
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
                # The later content must bring also the bytes that an obsolete one has changed.
                op = replace(op, intact=min([op.intact, *(kept[each].intact for each in obsolete)]))
            for each in obsolete:
                del kept[each]
            last[op.object] = [*(each for each in before if each not in obsolete), seq]
        kept[seq] = op
    return list(kept.items())


def objects_of(ops: Iterable[Numbered]) -> Iterator[int]:
    """The numbers of all objects in ``ops``, with repetitions; 0 where an operation has none."""
    for _, op in ops:
        yield op.object
        yield op.over_object
