"""What earlier mounts left in a tier: read without a daemon, or for a mount with a new snapshot.

Nothing is changed. A daemon may use the tier meanwhile; the result is then that of one moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import chain
from operator import itemgetter
from pathlib import Path

from monarch.config.settings import MountSettings
from monarch.control.state_directory import (
    UndrainedNote,
    read_note,
    read_undrained,
    undrained_file,
)
from monarch.errors import TierError
from monarch.text import counted, counted_changes, format_bytes
from monarch.tiers.ownership import PRIVATE
from monarch.types import WRITTEN_INO, Identity, Ino, Progress
from monarch.writeback.history import Numbered, followed, names_of
from monarch.writeback.journal import Replay, read_replay
from monarch.writeback.journal_found import boot_now, no_progress, token_of
from monarch.writeback.lease import DIRECTORY as LEASES
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.store import directory_of, snapshot_known


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier mounts left in the tiers. ``undone``: the number of changes that the source
    lacks; ``snapshot_id``: the snapshot that the journal of these changes, or of the last mount
    if there are none. ``changed``: the paths of files that were changed in place, drained or
    not. ``roots``: the names in the root of the source that changes concern, and whether the
    source must have them now: all changes of them are drained, and none has removed them. Among
    them are the leases of the mounts."""

    undone: int
    snapshot_id: str
    changed: frozenset[bytes]
    roots: Mapping[bytes, bool] = field(default_factory=dict)


def earlier(settings: MountSettings, progress: Progress = no_progress) -> Earlier:
    """Reads what earlier mounts left in the tiers of a mount. Raises TierError if a journal cannot
    be read."""
    undone, snapshot_id = 0, ""
    changed: set[bytes] = set()
    roots: dict[bytes, bool] = {}
    for tier in settings.tiers:
        directory = directory_of(tier.path, settings.source)
        with suppress(OSError):
            if not (directory / "journal").exists():
                continue
            found = read_replay(directory, progress=progress)
            changed |= changed_in_place(found)
            if token := token_of(directory):
                # A mount leaves its lease there if it ends before all is drained.
                roots[LEASES + b"/" + os.fsencode(token)] = False
            roots |= _roots(found)
            ops = [op for _, op in unfinished(found, Objects(directory)) if op.kind != "gone"]
            if (ops and not undone) or not snapshot_id:
                undone, snapshot_id = len(ops), snapshot_known(directory)
    return Earlier(undone, snapshot_id, frozenset(changed), roots)


def _roots(found: Replay) -> dict[bytes, bool]:
    """``Earlier.roots`` of one journal."""
    roots: dict[bytes, bool] = {}
    # An earlier content counts as drained while a later one waits.
    waiting: set[bytes] = set()
    for seq, op in found.ops:
        for name in op.names():
            root = name.partition(b"/")[0]
            if seq not in found.done or op.kind == "gone":
                waiting.add(root)
            is_removed = name == op.path and op.kind in ("unlink", "rmdir", "rename")
            roots[root] = not is_removed or b"/" in name
    return {root: is_there and root not in waiting for root, is_there in roots.items()}


def changed_in_place(found: Replay) -> set[bytes]:
    """The paths of entries that the changes of a journal have changed but not created, and perhaps
    others.

    A file that is created, renamed or replaced changes the time of its directory. A renewed
    snapshot compares these times only. So it must read by name the files with other changes: of
    mode, owner, length or number of names. Among them are files that were created through a mount
    and that the source had already when the journal was rewritten for the present snapshot.
    """
    made: set[tuple[int, int]] = set()
    paths: set[bytes] = set()
    had = found.known.known if found.known is not None else {}
    for _, op in found.ops:
        entry = (op.object, 0 if op.object else op.ino)
        match op.kind:
            case "create" | "mkdir" | "symlink" | "mknod":
                if op.object not in had:
                    made.add(entry)
            case "take" | "content" | "attr" | "xattr" if entry not in made:
                paths |= {op.path, *op.paths}
            case "link" if entry not in made:
                paths |= {op.path, op.to}
    return paths


def renewed_by_drain(settings: MountSettings, snapshot_id: str) -> dict[int, Identity]:
    """The versions that the drain has made, by changes of attributes alone, of files of a snapshot,
    by their inode number at the source. Raises TierError if a journal cannot be read."""
    renewed: dict[int, Identity] = {}
    for tier in settings.tiers:
        with suppress(OSError):
            renewed |= renewed_in(directory_of(tier.path, settings.source), snapshot_id)
    return renewed


def renewed_in(directory: Path, snapshot_id: str) -> dict[int, Identity]:
    """The same by the journal in a directory. Raises OSError."""
    # By inode number on the mount, which is negative if the journal is older than the snapshot.
    renewed: dict[Ino, Identity] = {}
    if not (directory / "journal").exists() or snapshot_known(directory) != snapshot_id:
        return {}
    found = read_replay(directory, again=True)
    for seq, op in found.ops:
        ino = Ino(op.ino)
        if op.kind in ("take", "content"):
            renewed.pop(ino, None)
        elif op.file and ino < WRITTEN_INO and (now := found.done.get(seq)) is not None:
            renewed[ino] = now
    return {now.source_ino: now for now in renewed.values()}


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
    waiting = [(seq, op) for seq, op in ops if seq not in found.done]
    undone = [op for _, op in waiting]
    new = _unrecorded(found, objects)
    new |= {op.object for op in undone if op.kind == "content"}
    # Another program may have removed the old name, at the source, of a file to be renamed. A file
    # whose attributes are to be changed has others, which the new snapshot does not tell.
    kinds = ("rename", "link", "attr", "xattr")
    changed = {op.object for op in undone if op.kind in kinds}
    # A file that is to lose one of its names keeps its attributes under the others.
    changed |= names_of(ops, {op.object for op in undone if op.kind == "unlink"}).keys()
    changed -= new | {0}
    names = names_of([(seq, op) for seq, op in ops if seq in found.done], new | changed)
    first: dict[int, tuple[int, Op]] = {}
    # The last content of each of these files, and the changes of attributes behind it.
    published: dict[int, list[Numbered]] = {}
    # Where the bytes of files are that have no room in the tier.
    through: list[Numbered] = []
    for seq, op in ops:
        if seq in found.done and op.kind in ("rename", "rmdir"):
            # The source has made it, with the staged files in that directory.
            through = [(at, replace(it, path=followed(it.path, op))) for at, it in through]
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
        if op.kind == "content" and op.object in changed:
            published[op.object] = []
        if op.object in published and op.kind in ("content", "attr", "xattr"):
            here = replace(op, path=paths[0], paths=tuple(paths))
            published[op.object].append((seq, here))
        if op.kind == "through" and op.object in new:
            through.append((seq, op))
    done = [*first.values(), *chain.from_iterable(published.values())]
    yield from merge(sorted([*done, *through], key=itemgetter(0)), waiting, key=itemgetter(0))


def _unrecorded(found: Replay, objects: Objects, *, are_known: bool = False) -> set[int]:
    """The objects with bytes that no recorded content brings to the source: the file was open when
    its daemon was killed, or the journal had no room for its last content. ``are_known``: all
    objects are as recorded."""
    made = {op.object for _, op in found.ops if op.kind in ("create", "take")}
    # The mount forgot these files; any that still has a name is read from the source.
    made -= {op.object for _, op in found.ops if op.kind == "gone"}
    # So are these: the tier lacks bytes that the source has.
    made -= found.damaged
    recorded = found.versions()
    new = found.unpublished(made)
    for number in () if are_known else made & recorded.keys():
        with suppress(OSError):
            status = objects.status(number)
            if (status.st_size, status.st_mtime_ns) != recorded[number]:
                new.add(number)
    return new


@dataclass(frozen=True, slots=True)
class Waiting:
    """A written file that is not at the source yet.

    ``path`` is its first name in the mount, ``size`` its size in the last record, in bytes, and
    ``recorded_ns`` the time of its first record that is not drained. Of a file whose last bytes
    have no record they are those of its object. ``fault`` describes the damage
    of its object, empty if there is none.
    """

    path: bytes
    object: int
    size: int
    recorded_ns: int
    fault: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """``operations`` is the number of changes that are not at the source yet, recorded or not;
    ``waiting`` are the written files among them, the oldest record first, those without one last.

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

    def confirming(self, before: Inspection) -> Inspection:
        """This inspection with the faults alone that an earlier one has found, too."""
        faults = {(each.object, each.fault) for each in before.waiting}
        waiting = tuple(
            each if (each.object, each.fault) in faults else replace(each, fault="")
            for each in self.waiting
        )
        unknown = tuple(number for number in self.unknown if number in before.unknown)
        return replace(self, waiting=waiting, unknown=unknown)


def inspect(directory: Path, *, has_ended: bool = False) -> Inspection:
    """Inspects a directory with a journal. ``has_ended``: its daemon has just ended; after a clean
    end the journal has all that matters, and no object is checked. Raises TierError if the journal
    cannot be read."""
    found = read_replay(directory, trusts_end=has_ended)
    are_known = has_ended and found.ended
    # A "gone" record is not for the source.
    ops, done = found.ops, found.done
    undone = [(seq, op) for seq, op in ops if seq not in done and op.kind != "gone"]
    contents: dict[int, tuple[int, Op]] = {}
    for seq, op in undone:
        if op.kind == "content":
            first, _ = contents.get(op.object, (seq, op))
            contents[op.object] = (first, op)
    # Objects whose bytes are at the source, in a staged file.
    through = {op.object for _, op in ops if op.kind == "through"}
    objects = Objects(directory)
    unrecorded = _unrecorded(found, objects, are_known=are_known) - contents.keys() - through
    names = names_of(ops, contents.keys() | unrecorded)
    removed = {op.object for _, op in ops if op.kind == "gone"}
    unknown = set[int]()
    if not are_known:
        unknown = objects.numbers() - found.all_doubted - ({op.object for _, op in ops} - removed)
    waiting = [
        Waiting(
            path=names[number][0],
            object=number,
            size=op.size,
            recorded_ns=found.recorded_ns[first],
            fault="" if are_known or number in through else _fault(objects, op),
        )
        for number, (first, op) in sorted(contents.items(), key=lambda item: item[1][0])
        if number in names
    ]
    for number in sorted(unrecorded & names.keys()):
        with suppress(OSError):
            status = objects.status(number)
            size, written_ns = status.st_size, status.st_mtime_ns
            waiting.append(Waiting(names[number][0], number, size, written_ns, fault=""))
    return Inspection(
        source=found.source,
        operations=len(undone) + len(waiting) - len(contents.keys() & names.keys()),
        waiting=tuple(waiting),
        lost=tuple(op.path for op in found.lost),
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


def require_former_tiers_drained(settings: MountSettings, state: Path) -> UndrainedNote | None:
    """Refuses a mount without a tier of the last mount that has changes which the source lacks: the
    mount does not name the tier any more, or the journal of the tier is missing.

    Returns what ``lost_changes`` returns. Must be called before the snapshot is chosen: the changes
    belong to the current snapshot. Raises TierError.
    """
    lost, noted = lost_changes(settings, state), read_undrained(state)
    try:
        before = read_note(state).tiers
    except TierError:
        return lost
    now = {os.path.realpath(tier.path) for tier in settings.tiers}
    for tier in before:
        directory = directory_of(Path(tier.path), settings.source)
        if os.path.realpath(tier.path) in now or not (directory / "journal").exists():
            continue
        found = inspect(directory)
        if found.operations:
            words = counted_changes(found.operations, len(found.waiting), found.bytes) + ","
            away = os.fspath(directory)
            if noted is not None and noted.directory == away:
                away += f" and {os.fspath(undrained_file(state))}"
            raise TierError(
                f"tier {tier.path!r} is not used any more, but still has {words} not at the source",
                hint=f"mount with it until they are drained, or give them up by removing {away}",
            )
    return lost


def lost_changes(settings: MountSettings, state: Path) -> UndrainedNote | None:
    """The note of changes that the source lacks and that were in the memory of an earlier start of
    the machine; None if there are none.

    Raises TierError if the journal with such changes is neither in its place nor in a tier of the
    mount, and may still exist. Changes nothing.
    """
    note = read_undrained(state)
    if note is None:
        return None
    directory = Path(note.directory)
    named = [tier.path / PRIVATE / directory.name for tier in settings.tiers]
    tokens = [token_of(place) for place in (directory, *named)]
    if note.journal in tokens:
        return None
    if note.in_memory and note.boot != boot_now():
        return note
    raise TierError(
        f"tier {note.tier!r} had {counted(note.operations, 'change', 'changes')}"
        f" ({format_bytes(note.bytes)}) not at the source, but"
        f" {'another' if tokens[0] else 'no'} journal is in {note.directory!r}",
        hint="mount the disk of the tier there and try again, or give up these changes by removing"
        f" {os.fspath(undrained_file(state))}",
    )
