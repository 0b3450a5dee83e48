"""Written files that a power cut has damaged: their names, and the journal without them. Pure.

The bytes of a file that was never synced may be on the disk completely, in part or not at all. Such
a file is lost: its operations are removed from the journal's history, so that the file that it had
replaced exists again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from monarch.writeback.op import Op

Numbered = tuple[int, Op]


def names_of(ops: Iterable[Numbered], objects: Container[int]) -> dict[int, list[bytes]]:
    """The names of ``objects`` after the last of ``ops``; objects without a name are left out."""
    names: dict[bytes, int] = {}
    for _, op in ops:
        ours = op.object in objects
        if op.kind in ("create", "take"):
            # A file of the source may have several names there.
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
    """The history ``ops`` without the objects in ``lost``.

    A file of the source remains, with the source's bytes. A new file may have replaced another file
    by a rename, and then have been renamed again or removed. The other file was gone from then on,
    so an unlink is inserted; it may find no file. A rename over a file that is left out replaces
    the file that this one had replaced.
    """
    taken = {op.object: op for _, op in ops if op.kind == "take" and op.object in lost}
    # The renames of lost files over other files, by their present target names.
    replaced: dict[bytes, Op] = {}
    for seq, op in ops:
        if op.kind == "rename" and not op.object and replaced:
            replaced = {moved(name, op): rename for name, rename in replaced.items()}
        if op.kind == "rename":
            op = _over_remaining(op, taken, replaced.get(op.to))
        if op.object not in lost:
            if op.kind == "rename":
                replaced.pop(op.to, None)
            yield seq, op
        elif op.object in taken:
            if op.kind not in ("take", "content", "gone"):
                yield seq, replace(op, object=0, was=op.was or taken[op.object].was)
        elif op.kind in ("rename", "unlink"):
            if rename := replaced.pop(op.path, None):
                yield seq, _unlink_of_replaced(rename, op)
            if op.kind == "rename":
                replaced[op.to] = op


def _over_remaining(rename: Op, taken: Mapping[int, Op], earlier: Op | None) -> Op:
    """The rename with the file that it replaces when lost files are left out.

    Instead of a lost file it replaces the file of the source that was copied up into it, or the
    file that ``earlier`` had replaced, the rename of the lost file to this name.
    """
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
