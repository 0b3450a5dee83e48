"""What earlier mounts left in the journal, and what a mount with a new snapshot needs of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain
from operator import itemgetter

from monarch.config.settings import MountSettings
from monarch.types import WRITTEN_INO
from monarch.writeback.history import Numbered, names_of
from monarch.writeback.journal import Replay, Told, look
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.store import directory_of, snapshot_known


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier mounts left in the tiers. ``undone``: the number of changes that the source
    lacks; ``snapshot_id``: the snapshot that the journal of these changes, or of the last mount
    if there are none. ``changed``: the paths of files that were changed in place, drained or
    not."""

    undone: int
    snapshot_id: str
    changed: frozenset[bytes]


def earlier(settings: MountSettings) -> Earlier:
    """Reads what earlier mounts left in the tiers of a mount. Raises TierError if a journal cannot
    be read."""
    undone, snapshot_id = 0, ""
    changed: set[bytes] = set()
    for tier in settings.tiers:
        directory = directory_of(tier.path, settings.source)
        with suppress(OSError):
            if not (directory / "journal").exists():
                continue
            found = look(directory).replay
            changed |= changed_in_place(found.ops)
            left = [op for _, op in unfinished(found, Objects(directory)) if op.kind != "gone"]
            if (left and not undone) or not snapshot_id:
                undone, snapshot_id = len(left), snapshot_known(directory)
    return Earlier(undone, snapshot_id, frozenset(changed))


def changed_in_place(ops: Iterable[Numbered]) -> set[bytes]:
    """The paths of entries that ``ops`` have changed but not created, and perhaps others.

    A file that is created, renamed or replaced changes the time of its directory. A renewed
    snapshot compares these times only. So it must read by name the files with other changes: of
    mode, owner, length or number of names.
    """
    made: set[tuple[int, int]] = set()
    paths: set[bytes] = set()
    for _, op in ops:
        entry = (op.object, 0 if op.object else op.ino)
        match op.kind:
            case "create" | "mkdir" | "symlink" | "mknod":
                made.add(entry)
            case "take" | "content" | "attr" | "xattr" if entry not in made:
                paths |= {op.path, *op.paths}
            case "link" if entry not in made:
                paths |= {op.path, op.to}
    return paths


def renumbered(found: Replay) -> Replay:
    """``found`` with negative inode numbers for entries of the old snapshot: a new snapshot numbers
    them differently. Numbers of files created through a mount are never reused."""
    numbers: dict[int, int] = {}
    ops = []
    for seq, op in found.ops:
        if 0 < op.ino < WRITTEN_INO:
            op = replace(op, ino=numbers.setdefault(op.ino, -2 * seq))
        if 0 < op.over_ino < WRITTEN_INO:
            op = replace(op, over_ino=numbers.setdefault(op.over_ino, -2 * seq - 1))
        ops.append((seq, op))
    return replace(found, ops=tuple(ops))


def unfinished(found: Replay, objects: Objects) -> Iterator[Numbered]:
    """The changes that lead from the present state of the source to the tree of the mount.

    These are the changes that the source lacks. Before them come the files whose bytes it lacks,
    with the names that they had when the first of these changes was made. The journal may have no
    content of a file that was open when its daemon was killed.
    """
    ops = found.ops
    undone = [op for _, op in _undone(found)]
    made = {op.object for _, op in ops if op.kind in ("create", "take")}
    # The mount forgot these files; any that still has a name is read from the source.
    made -= {op.object for _, op in ops if op.kind == "gone"}
    told = found.told()
    new = found.unpublished(made) | {n for n in made & told.keys() if _differs(objects, n, told[n])}
    new |= {op.object for op in undone if op.kind == "content"}
    # Another program may have removed the old name, at the source, of a file to be renamed.
    renamed = {op.object for op in undone if op.kind in ("rename", "link")} - new
    names = names_of([(seq, op) for seq, op in ops if seq in found.done], new | renamed)
    first: dict[int, tuple[int, Op]] = {}
    # The last content of each file to be renamed, and the changes of attributes behind it.
    published: dict[int, list[Numbered]] = {}
    for seq, op in ops:
        if seq not in found.done or op.object not in names:
            continue
        paths = names[op.object]
        if op.kind in ("create", "take"):
            more = tuple(paths) if len(paths) > 1 else ()
            first[op.object] = seq, replace(op, path=paths[0], paths=more)
        elif op.kind in ("attr", "xattr", "content") and op.object in first:
            at, made_as = first[op.object]
            given = {name: getattr(op, name) for name in ("mode", "uid", "gid")}
            now = {name: value for name, value in given.items() if value is not None}
            known = dict(op.xattrs)
            if op.kind != "content":
                known = {**made_as.xattrs, **known}
            xattrs = {name: value for name, value in known.items() if value is not None}
            first[op.object] = at, replace(made_as, **now, xattrs=xattrs)
        if op.kind == "content" and op.object in renamed:
            published[op.object] = []
        if op.object in published and op.kind in ("content", "attr", "xattr"):
            here = replace(op, path=paths[0], paths=tuple(paths))
            published[op.object].append((seq, here))
    done = [*first.values(), *chain.from_iterable(published.values())]
    yield from merge(sorted(done, key=itemgetter(0)), _undone(found), key=itemgetter(0))


def _undone(found: Replay) -> Iterator[Numbered]:
    return ((seq, op) for seq, op in found.ops if seq not in found.done)


def _differs(objects: Objects, number: int, told: Told) -> bool:
    """Whether an object was written after ``told`` was recorded."""
    try:
        status = objects.status(number)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) != told
