"""The history that a journal has: the names of its files, and what of it still matters. Pure.

The bytes of a file that was never synced before a power cut may be on the disk completely, in part
or not at all. Such a file is lost: ``without`` removes its operations, so that the file that it had
replaced exists again.

For compaction ``obsolete`` finds the operations that do not matter any more. The others lead from
the same snapshot to the same tree, and the drain learns the same from them about the source. Two
kinds of operations are left out, and only if they are drained: contents with a later content of the
same file, and operations on entries that were created and removed again.

``obsolete`` reads the operations several times, one after the other, and holds none of them: a
journal may have millions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from monarch.types import Identity
from monarch.writeback.numbers import Numbers
from monarch.writeback.op import Op
from monarch.writeback.path_table import PathTable

Numbered = tuple[int, Op]


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``obsolete`` must know of the operations before it reads them.

    Sequence numbers: ``done`` are the operations that are drained; ``published`` those of them with
    a known entry at the source. Numbers of objects: ``gone`` are the objects that were removed;
    ``several`` have more than one content; ``unnamed`` may have lost a name.
    """

    done: Container[int]
    published: Container[int]
    gone: Container[int]
    several: Container[int]
    unnamed: Container[int]


@dataclass(frozen=True, slots=True)
class Obsolete:
    """The sequence numbers of the operations that may be left out, and the operations of the others
    that change when these are left out. ``objects`` are those of the others."""

    seqs: Numbers = field(default_factory=Numbers)
    changed: dict[int, Op] = field(default_factory=dict)
    objects: Numbers = field(default_factory=Numbers)


def names_of(ops: Iterable[Numbered], objects: Container[int]) -> dict[int, list[bytes]]:
    """The names of ``objects`` after the last of ``ops``; objects without a name are left out."""
    names = PathTable[int]()
    for _, op in ops:
        ours = op.object in objects
        if op.kind in ("create", "take"):
            # A file of the source may have several names there.
            for path in op.paths or (op.path,):
                names.pop(path)
                if ours:
                    names[path] = op.object
        elif op.kind == "content" and ours:
            for path in op.paths:
                names[path] = op.object
        elif op.kind == "link" and ours:
            names[op.to] = op.object
        elif op.kind == "unlink":
            names.pop(op.path)
        elif op.kind == "rename":
            names.pop(op.path)
            names.pop(op.to)
            if ours:
                names[op.to] = op.object
            if not op.object:
                names.move(op.path, op.to)
    found: dict[int, list[bytes]] = {}
    for name, number in names.items():
        found.setdefault(number, []).append(name)
    return found


def without(ops: Iterable[Numbered], lost: Container[int]) -> Iterator[Numbered]:
    """The history ``ops``, which is read twice, without the objects in ``lost``.

    A file of the source remains, with the source's bytes. A new file may have replaced another file
    by a rename, and then have been renamed again or removed. The other file was gone from then on,
    so an unlink is inserted; it may find no file. A rename over a file that is left out replaces
    the file that this one had replaced.
    """
    taken = {op.object: op.was for _, op in ops if op.kind == "take" and op.object in lost}
    for seq, _, left in _each_without(ops, lost, taken):
        if left is not None:
            yield seq, left


def _each_without(
    ops: Iterable[Numbered], lost: Container[int], taken: Mapping[int, Identity | None]
) -> Iterator[tuple[int, Op, Op | None]]:
    """Each of ``ops``, and what ``without`` makes of it: None if it is left out. ``taken``: the
    version of the source's file that was copied up, by the object, of those of ``lost``."""
    # The renames of lost files over other files, by their present target names.
    replaced = PathTable[Op]()
    for seq, before in ops:
        op, left = before, None
        if op.kind == "rename" and not op.object:
            replaced.move(op.path, op.to)
        if op.kind == "rename":
            op = _over_remaining(op, taken, replaced.get(op.to))
        if op.object not in lost:
            if op.kind == "rename":
                replaced.pop(op.to)
            left = op
        elif op.object in taken:
            if op.kind not in ("take", "content", "gone"):
                was, is_of_file = op.was or taken[op.object], op.kind in ("attr", "xattr")
                left = replace(op, object=0, was=was, file=is_of_file)
        elif op.kind in ("rename", "unlink"):
            if rename := replaced.pop(op.path):
                left = _unlink_of_replaced(rename, op)
            if op.kind == "rename":
                replaced[op.to] = op
        yield seq, before, left


def _over_remaining(rename: Op, taken: Mapping[int, Identity | None], earlier: Op | None) -> Op:
    """The rename with the file that it replaces when lost files are left out.

    Instead of a lost file it replaces the file of the source that was copied up into it, or the
    file that ``earlier`` had replaced, the rename of the lost file to this name.
    """
    if rename.over_object in taken:
        was = rename.over or taken[rename.over_object]
        return replace(rename, over_object=0, over=was)
    if earlier is not None:
        return replace(
            rename,
            over=earlier.over,
            over_ino=earlier.over_ino,
            over_object=earlier.over_object,
        )
    return rename


def _unlink_of_replaced(rename: Op, op: Op) -> Op:
    """An unlink, in the place of ``op``, of the file that the left-out ``rename`` had replaced."""
    return Op(
        kind="unlink",
        path=op.path,
        ino=rename.over_ino,
        object=rename.over_object,
        was=rename.over,
        strict=rename.strict,
        by=op.by,
    )


def moved(name: bytes, rename: Op) -> bytes:
    """The path ``name`` after a rename of a directory, which may contain it."""
    inside = name.startswith(rename.path + b"/")
    return rename.to + name[len(rename.path) :] if inside else name


def followed(path: bytes, op: Op) -> bytes:
    """The path beside which a staged file lies at the source after a change of its directory: it
    moves with the directory, or out of one that is removed or replaced."""
    if op.kind == "rmdir":
        return op.path if path.rpartition(b"/")[0] == op.path else path
    if op.kind != "rename" or op.object:
        return path
    return op.to if path.rpartition(b"/")[0] == op.to else moved(path, op)


def obsolete(ops: Iterable[Numbered], summary: Summary) -> Obsolete:
    """The operations among ``ops`` that do not matter any more. Reads ``ops`` three times."""
    removed, taken = _removed(ops, summary)

    def each() -> Iterator[tuple[int, Op, Op | None]]:
        for seq, op, left in _each_without(ops, removed, taken):
            is_left = left is not None and not _removes_nothing(left, removed)
            yield seq, op, left if is_left else None

    kept = ((seq, left) for seq, _, left in each() if left is not None)
    entries = _obsolete_entries(kept, summary.done)
    found, contents = Obsolete(), _Contents(summary)
    for seq, op, left in each():
        if left is None or _number(left) in entries:
            found.seqs.add(seq)
            continue
        found.objects.update((left.object, left.over_object))
        seqs, changed = contents.add(seq, left)
        for each_seq in seqs:
            found.seqs.add(each_seq)
            found.changed.pop(each_seq, None)
        if changed is not op:
            found.changed[seq] = changed
    return found


def _removes_nothing(op: Op, removed: Container[int]) -> bool:
    """Whether ``op`` is an unlink that removes no file, or one that is left out.

    ``without`` inserts such an unlink after a rename that is left out, if that rename replaced no
    file, or one that is left out as well.
    """
    if op.kind != "unlink" or not op.strict:
        return False
    return op.object in removed or (op.ino, op.object, op.was) == (0, 0, None)


def _removed(
    ops: Iterable[Numbered], summary: Summary
) -> tuple[Container[int], Mapping[int, Identity | None]]:
    """The objects of files that were removed, with all operations on them drained, and that no
    later content still has to replace at the source. Also the versions of the source's files that
    were copied up into them, by object."""
    # The objects that keep a name, and the names of the others that are removed later. Most objects
    # are removed because their files are read from the source again, under their names.
    named = Numbers()
    names = PathTable[int]()
    taken: dict[int, Identity | None] = {}
    counts: dict[int, int] = {}
    removed: set[int] = set()
    waiting: set[int] = set()
    replaced = _Replaced(summary)

    def name(path: bytes, number: int) -> None:
        take_off(path)
        if number not in summary.gone:
            return
        if number not in summary.unnamed:
            named.add(number)
        else:
            names[path] = number
            counts[number] = counts.get(number, 0) + 1

    def take_off(path: bytes) -> None:
        if (number := names.pop(path)) is not None:
            counts[number] -= 1

    for seq, op in ops:
        replaced.add(seq, op)
        if seq not in summary.done:
            waiting |= {op.object, op.over_object}
        if op.kind == "take" and op.object in summary.gone:
            taken[op.object] = op.was
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
                names.move(op.path, op.to)
                if (number := names.pop(op.path)) is not None:
                    names[op.to] = number
            case "gone" if not (op.object in named or counts.get(op.object, 0)):
                # A file that still has a name is read from the source.
                removed.add(op.object)
    removed = removed - waiting - replaced.objects() - {0}
    return removed, {number: was for number, was in taken.items() if number in removed}


class _Replaced:
    """Finds the objects that renames have replaced on the mount, but perhaps not at the source.

    A rename of a file that the source does not have leaves the replaced file there until the next
    content of the renamed file is published. Without the operations on the replaced file the drain
    would not know its identity, and would take it for a file of others.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        # The replaced objects by the object that has replaced them.
        self._by: dict[int, set[int]] = {}

    def add(self, seq: int, op: Op) -> None:
        is_published = seq in self._summary.published
        is_removed = op.kind == "gone" and seq in self._summary.done
        if is_removed or (op.kind == "content" and is_published):
            self._by.pop(op.object, None)
        elif op.kind == "rename" and op.object and op.over_object and not is_published:
            # The replaced file may itself not have replaced another one at the source yet.
            earlier = self._by.get(op.over_object, ())
            self._by.setdefault(op.object, set()).update(earlier, [op.over_object])

    def objects(self) -> set[int]:
        return set().union(*self._by.values())


def _number(op: Op) -> int:
    """The inode number of a changed entry without an object; 0 for all other operations."""
    return 0 if op.object or op.kind in ("gone", "through") else op.ino


def _obsolete_entries(ops: Iterable[Numbered], done: Container[int]) -> set[int]:
    """The inode numbers of entries without objects that have left no trace.

    Such an entry was created and removed again, both also at the source, and no operation that is
    kept was done in it. If it has replaced an entry, it was replaced itself at that same path.
    """
    paths = PathTable[int]()
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
            used.update(paths.above(path))
        if seq not in done or op.kind == "link":
            stays.add(number)
        match op.kind:
            case "mkdir" | "symlink" | "mknod":
                paths[op.path] = number
            case "rmdir" | "unlink":
                if (there := paths.pop(op.path) or 0) != number or number in replaced_at:
                    stays |= {there, number}
            case "rename":
                there = paths.pop(op.to) or 0
                # At the source a file replaces the other one only when its content is drained.
                keeps_both = op.object or replaced_at.get(there, op.to) != op.to
                if there != op.over_ino or keeps_both:
                    stays |= {there, op.over_ino}
                if there or op.over_ino or op.over_object or op.over is not None:
                    replaced_at[number] = op.to
                if not op.object:
                    paths.move(op.path, op.to)
                if (there := paths.pop(op.path) or 0) != number:
                    stays |= {there, number}
                elif number:
                    paths[op.to] = number
    to_visit = [*stays, *(number for _, number in paths.items()), 0]
    kept: set[int] = set()
    while to_visit:
        number = to_visit.pop()
        if number not in kept:
            kept.add(number)
            to_visit.extend(within.get(number, ()))
    return made - kept


class _Contents:
    """Finds the contents that later contents of the same object have made obsolete."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        # The sequence numbers of the last operations on each object, if these are drained contents,
        # each with its intact bytes: the last published content, and after it the last one that the
        # drain has skipped. A skipped content does not say what the source has.
        self._last: dict[int, list[tuple[int, int]]] = {}

    def add(self, seq: int, op: Op) -> tuple[list[int], Op]:
        """Adds an operation. Returns the sequence numbers of contents that it makes obsolete, and
        the operation, changed if it must bring what they have changed."""
        if op.over_object:
            self._last.pop(op.over_object, None)
        if op.object not in self._summary.several:
            return [], op
        published = self._summary.published
        before = self._last.pop(op.object, [])
        if op.kind != "content" or seq not in self._summary.done:
            return [], op
        if seq in published:
            obsolete = before
        else:
            obsolete = [each for each in before if each[0] not in published]
            # The later content must bring also the bytes that an obsolete one has changed.
            least = min((intact for _, intact in obsolete), default=op.intact)
            if least < op.intact:
                op = replace(op, intact=least)
        kept = [each for each in before if each not in obsolete]
        self._last[op.object] = [*kept, (seq, op.intact)]
        return [each for each, _ in obsolete], op
