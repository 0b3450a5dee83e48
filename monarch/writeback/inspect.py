"""What lies in a tier that absorbs, for who only looks: the journal held against its objects.

Nothing is changed. A daemon may be at work there; then what is seen is as of one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from monarch.writeback.crash_losses import Numbered, names_of
from monarch.writeback.journal import look
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that the source has not got: its first name in the mount, its bytes as recorded last,
    and when it was first recorded of what waits. ``fault`` is what is wrong with its object, empty
    if nothing is.
    """

    path: bytes
    object: int
    size: int
    recorded_ns: int
    fault: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """``operations`` are not at the source yet, ``waiting`` the files among them, oldest first.

    ``lost`` were never synced before a power cut: the next mount puts them aside. ``unknown`` are
    the numbers of objects that no record knows, or of which it says that nobody needs them, without
    those that were made ahead of their files.
    """

    source: bytes
    operations: int
    waiting: tuple[Waiting, ...]
    lost: tuple[bytes, ...]
    unknown: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.waiting)


def inspect(directory: Path) -> Inspection:
    """Of the directory that holds a journal. Raises TierError if that cannot be read."""
    found = look(directory)
    # That an object is gone is nothing that the source is to be told.
    ops, done = found.replay.ops, found.replay.done
    undone = [(seq, op) for seq, op in ops if seq not in done and op.kind != "gone"]
    contents: dict[int, tuple[int, Op]] = {}
    for seq, op in undone:
        if op.kind == "content":
            first, _ = contents.get(op.object, (seq, op))
            contents[op.object] = (first, op)
    # Their bytes are at the source, in a staged file.
    through = {op.object for _, op in ops if op.kind == "through"}
    names = names_of(ops, contents)
    objects = Objects(directory)
    unknown = objects.numbers() - found.doubted - set(_needed(ops))
    waiting = [
        Waiting(
            path=names[number][0],
            object=number,
            size=op.size,
            recorded_ns=found.replay.recorded_ns[first],
            fault="" if number in through else _fault(objects, op),
        )
        for number, (first, op) in sorted(contents.items(), key=lambda item: item[1][0])
        if number in names
    ]
    return Inspection(
        source=found.source,
        operations=len(undone),
        waiting=tuple(waiting),
        lost=tuple(op.path for op in found.replay.lost),
        unknown=tuple(sorted(unknown - set(_made_ahead(objects, unknown, ops)))),
    )


def _made_ahead(objects: Objects, unknown: Iterable[int], ops: Sequence[Numbered]) -> Iterator[int]:
    """Empty objects that come behind all that is recorded (spares.py)."""
    last = max((op.object for _, op in ops), default=0)
    for number in unknown:
        with suppress(OSError):
            if number > last and objects.status(number).st_size == 0:
                yield number


def _fault(objects: Objects, op: Op) -> str:
    try:
        size = objects.status(op.object).st_size
    except FileNotFoundError:
        return "the file with its bytes is gone"
    except OSError as error:
        return f"the file with its bytes cannot be read: {error.strerror}"
    if size < op.size and op.synced:
        return f"the file with its bytes has {size} of {op.size}"
    return ""


def _needed(ops: tuple[tuple[int, Op], ...]) -> Iterator[int]:
    gone = {op.object for _, op in ops if op.kind == "gone"}
    return (op.object for _, op in ops if op.object not in gone)
