"""Inspects an absorbing tier without a daemon: reads the journal and compares the objects with it.

Nothing is changed. A daemon may use the tier meanwhile; the result is then that of one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from monarch.writeback.history import Numbered, names_of
from monarch.writeback.journal import look
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op


@dataclass(frozen=True, slots=True)
class Waiting:
    """A written file that is not at the source yet.

    ``path`` is its first name in the mount, ``size`` its size in the last record, in bytes, and
    ``recorded_ns`` the time of its first record that is not drained. ``fault`` describes the damage
    of its object, empty if there is none.
    """

    path: bytes
    object: int
    size: int
    recorded_ns: int
    fault: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """``operations`` is the number of changes that are not at the source yet; ``waiting`` are the
    written files among them, oldest first.

    ``lost`` are the paths of files that were never synced before a power cut: the next mount puts
    them aside. ``unknown`` are the numbers of objects without a record, or with the record that
    they were removed. Objects made ahead (``Spares``) are not among them.
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
    """Inspects a directory with a journal. Raises TierError if the journal cannot be read."""
    found = look(directory)
    # A "gone" record is not for the source.
    ops, done = found.replay.ops, found.replay.done
    undone = [(seq, op) for seq, op in ops if seq not in done and op.kind != "gone"]
    contents: dict[int, tuple[int, Op]] = {}
    for seq, op in undone:
        if op.kind == "content":
            first, _ = contents.get(op.object, (seq, op))
            contents[op.object] = (first, op)
    # Objects whose bytes are at the source, in a staged file.
    through = {op.object for _, op in ops if op.kind == "through"}
    names = names_of(ops, contents)
    objects = Objects(directory)
    gone = {op.object for _, op in ops if op.kind == "gone"}
    unknown = objects.numbers() - found.doubted - ({op.object for _, op in ops} - gone)
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
    """The empty objects with numbers above those in all records (``Spares``)."""
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
