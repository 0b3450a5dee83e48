"""What a power cut has taken of the absorbed files, and what of their history still holds. Pure.

The bytes of a file that nobody fsynced may be on the disk, or not, or in part: a file of which no
content is believed is lost. What happened to it is taken out of the history, so that what it had
replaced is there again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from monarch.writeback.ops import Op

Numbered = tuple[int, Op]


def names_of(ops: Iterable[Numbered], objects: Container[int]) -> dict[int, list[bytes]]:
    """The names that those of ``objects`` have at the end that have one at all."""
    names: dict[bytes, int] = {}
    for _, op in ops:
        ours = op.object in objects
        if op.kind in ("create", "take"):
            names.pop(op.path, None)
            if ours:
                names[op.path] = op.object
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
                names = {_moved(name, op): number for name, number in names.items()}
    found: dict[int, list[bytes]] = {}
    for name, number in names.items():
        found.setdefault(number, []).append(name)
    return found


def without(ops: Sequence[Numbered], lost: Container[int]) -> Iterator[Numbered]:
    """The history without the objects in ``lost``.

    A file that the source has remains, with its bytes there. Where a new one had come into the
    place of another and left it again, the other was gone from then on: an unlink tells so; it may
    find nothing.
    """
    taken = {op.object for _, op in ops if op.kind == "take" and op.object in lost}
    replaced: set[bytes] = set()
    for seq, op in ops:
        if op.kind == "rename" and not op.object and replaced:
            replaced = {_moved(name, op) for name in replaced}
        if op.object not in lost:
            if op.kind == "rename":
                replaced.discard(op.to)
            yield seq, op
        elif op.object in taken:
            if op.kind not in ("take", "content", "gone"):
                yield seq, replace(op, object=0)
        elif op.kind in ("rename", "unlink"):
            if op.path in replaced:
                replaced.discard(op.path)
                yield seq, Op(kind="unlink", path=op.path)
            if op.kind == "rename":
                replaced.add(op.to)


def _moved(name: bytes, rename: Op) -> bytes:
    """Where ``name`` is after a directory that may hold it got another."""
    inside = name.startswith(rename.path + b"/")
    return rename.to + name[len(rename.path) :] if inside else name
