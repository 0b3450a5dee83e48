"""What a power cut has taken of the absorbed files, and what of their history still holds. Pure.

The bytes of a file that nobody fsynced may be on the disk, or not, or in part: a file of which no
content is believed is lost. What happened to it is taken out of the history, so that what it had
replaced is there again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from monarch.writeback.op import Op

Numbered = tuple[int, Op]


def names_of(ops: Iterable[Numbered], objects: Container[int]) -> dict[int, list[bytes]]:
    """The names that those of ``objects`` have at the end that have one at all."""
    names: dict[bytes, int] = {}
    for _, op in ops:
        ours = op.object in objects
        if op.kind in ("create", "take"):
            # One that the source has may have several there.
            for path in op.paths or (op.path,):
                names.pop(path, None)
                if ours:
                    names[path] = op.object
        elif op.kind == "content" and ours:
            names.update(dict.fromkeys(op.paths, op.object))
        elif op.kind == "link" and ours:
            names[op.to] = op.object
        elif op.kind == "unlink":
            names.pop(op.path, None)
        elif op.kind == "rename":
            names.pop(op.path, None)
            names.pop(op.to, None)
            if ours:
                names[op.to] = op.object
            if not op.object:
                names = {moved(name, op): number for name, number in names.items()}
    found: dict[int, list[bytes]] = {}
    for name, number in names.items():
        found.setdefault(number, []).append(name)
    return found


def without(ops: Sequence[Numbered], lost: Container[int]) -> Iterator[Numbered]:
    """The history without the objects in ``lost``.

    A file that the source has remains, with its bytes there. Where a new one had come into the
    place of another and left it again, the other was gone from then on: an unlink tells so; it may
    find nothing. What replaces one that is left out replaces what that had replaced.
    """
    taken = {op.object: op for _, op in ops if op.kind == "take" and op.object in lost}
    # The renames by which a lost file came into the place of another, by the name of that place.
    replaced: dict[bytes, Op] = {}
    for seq, op in ops:
        if op.kind == "rename" and not op.object and replaced:
            replaced = {moved(name, op): rename for name, rename in replaced.items()}
        if op.kind == "rename":
            op = _over_what_is_left(op, taken, replaced.get(op.to))
        if op.object not in lost:
            if op.kind == "rename":
                replaced.pop(op.to, None)
            yield seq, op
        elif op.object in taken:
            if op.kind not in ("take", "content", "gone"):
                yield seq, replace(op, object=0, was=op.was or taken[op.object].was)
        elif op.kind in ("rename", "unlink"):
            if rename := replaced.pop(op.path, None):
                yield seq, _unlink_of_what(rename, op)
            if op.kind == "rename":
                replaced[op.to] = op


def _over_what_is_left(rename: Op, taken: Mapping[int, Op], earlier: Op | None) -> Op:
    """A rename as it is when what it has replaced was a lost file: in its place is the file of the
    source that it was made of, or what ``earlier``, the rename that brought it there, replaced."""
    if rename.over_object in taken:
        was = rename.over or taken[rename.over_object].was
        return replace(rename, over_object=0, over=was)
    if earlier is not None:
        return replace(
            rename,
            over=earlier.over,
            over_ino=earlier.over_ino,
            over_object=earlier.over_object,
        )
    return rename


def _unlink_of_what(rename: Op, op: Op) -> Op:
    """The removal, by ``op``, of what a rename that is left out had replaced."""
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
    """Where ``name`` is after a directory that may hold it got another."""
    inside = name.startswith(rename.path + b"/")
    return rename.to + name[len(rename.path) :] if inside else name
