"""Chooses the snapshot of a mount: the existing one, one with current names, or a new one."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from monarch.config.settings import MountSettings
from monarch.errors import NewerSnapshot, SnapshotError, SourceError
from monarch.namespace.build import build, sweep_stages, write
from monarch.namespace.given import copy_of, own_copy, read_id, remove_other_copies
from monarch.namespace.refresh import directories_changed, refresh
from monarch.namespace.schema import damaged
from monarch.namespace.snapshot import Snapshot
from monarch.packmount.source import PackSource
from monarch.packmount.tree import PackTree, snapshot_id
from monarch.packs.pack import Pack
from monarch.posix.cgroups import memory_bytes
from monarch.text import counted
from monarch.tiers.source import Source
from monarch.types import ROOT_INO, Progress, kept_ns
from monarch.writeback.earlier import Earlier, earlier
from monarch.writeback.lease import DIRECTORY as LEASES

log = logging.getLogger(__name__)

# Time limit of a mount for finding directories that changed since its snapshot.
_NEW_NAMES_PATIENCE_S = 0.4
# A snapshot of at most this fraction (1/64) of the memory is read into memory.
_MEMORY_SHARE = 64
# The log names at most this many entries that could not be read.
_SHOWN_PATHS = 5
# The source is recognised by at most so many names in its root.
_KNOWN_BY = 256


class Chosen(NamedTuple):
    """The snapshot to serve from. ``just_built``: it was just built or brought up to date.
    ``put_off``: why it is not the requested one; empty if it is."""

    snapshot: Snapshot
    just_built: bool
    put_off: str = ""


def snapshot_for(
    settings: MountSettings, state: Path, source: Source, refreshed: bool, progress: Progress
) -> Chosen:
    """The snapshot to serve from: a file in ``state``, its own or a copy of the given one.

    While the source does not have all changes of earlier mounts, their snapshot is used: the
    journal applies to the names of that snapshot only.
    """
    given = settings.snapshot.file
    path = given or state / "snapshot.lmdb"
    if given is None:
        sweep_stages(path)
    changes = earlier(settings, progress)
    if isinstance(source, PackSource):
        if changes.undone:
            raise SourceError(
                f"source {os.fsdecode(source.path)!r} is a pack, and lacks"
                f" {counted(changes.undone, 'change', 'changes')} of earlier mounts",
                errno=errno.EROFS,
                hint="mount the directory that was written at this path, to drain into it",
            )
        return Chosen(_of_pack(settings, state, source, progress), just_built=True)
    kept = _kept(changes, state) if changes.undone else None
    if not refreshed:
        _require_same_root(source, kept, changes)
    if kept is not None:
        if _other_source(kept, source):
            kept.close()
        else:
            if not refreshed:
                _require_content(source, kept)
            return _put_off(settings, kept, changes, is_asked=refreshed)
    return Chosen(*_renewed(settings, state, source, refreshed, changes, progress))


def _kept(changes: Earlier, state: Path) -> Snapshot | None:
    """The snapshot of the journal, if it is still in ``state``."""
    for path in (state / "snapshot.lmdb", copy_of(changes.snapshot_id, state)):
        try:
            if changes.snapshot_id and path.exists():
                snapshot = _checked(path)
                if snapshot.id == changes.snapshot_id:
                    return snapshot
                snapshot.close()
        except NewerSnapshot:
            raise
        except (SnapshotError, OSError) as error:
            log.warning("the snapshot of the written data cannot be used: %s", error)
    log.warning(
        "the snapshot is gone for %s of earlier mounts; names are looked for in another",
        counted(changes.undone, "change", "changes"),
    )
    return None


def _put_off(
    settings: MountSettings, kept: Snapshot, changes: Earlier, *, is_asked: bool
) -> Chosen:
    given = settings.snapshot.file
    if given is not None:
        is_asked = is_asked or read_id(given) != kept.id
    elif not is_asked and settings.snapshot.freshness != "never":
        jobs = settings.snapshot.jobs
        if directories_changed(settings.source, kept, jobs=jobs, patience_s=_NEW_NAMES_PATIENCE_S):
            log.info(
                "directories changed at the source since the snapshot; it is renewed by the first"
                " mount that finds all drained, %s of earlier mounts to go",
                counted(changes.undone, "change", "changes"),
            )
    if not is_asked:
        return Chosen(kept, False)
    why = (
        "the names are those of the last mount's snapshot: the source does not have"
        f" {counted(changes.undone, 'change that follows it', 'changes that follow it')}; mount"
        f" again when `monarch ckpt wait {settings.mountpoint}` reports that all are there"
    )
    log.warning("%s", why)
    return Chosen(kept, False, why)


def _renewed(
    settings: MountSettings,
    state: Path,
    source: Source,
    refreshed: bool,
    changes: Earlier,
    progress: Progress,
) -> tuple[Snapshot, bool]:
    given = settings.snapshot.file
    path = given or state / "snapshot.lmdb"
    if _exists(path):
        try:
            if refreshed:
                refresh(settings.source, path, jobs=settings.snapshot.jobs, progress=progress)
            snapshot = _checked_at(path, given, state)
            reason = _other_source(snapshot, source)
            if not refreshed and (given is None or not reason):
                _require_content(source, snapshot)
            if not reason:
                if given is not None or refreshed:
                    return snapshot, refreshed
                # Changes that came to the source over another snapshot may be newer than this one.
                is_behind = changes.snapshot_id not in ("", snapshot.id)
                if settings.snapshot.freshness == "never" and not is_behind:
                    return snapshot, False
                ours = changes.changed
                return _with_new_names(settings, path, snapshot, ours, is_behind, progress)
            snapshot.close()
            hint = "name another file with --snapshot, or build it with: monarch snapshot build"
            raise SnapshotError(f"snapshot {os.fspath(path)!r} {reason}", hint=hint)
        except SnapshotError as error:
            _require_replaceable(error, given)
            log.warning("building the snapshot anew: %s", error)
    build(
        settings.source,
        path,
        jobs=settings.snapshot.jobs,
        one_file_system=settings.snapshot.one_file_system,
        progress=progress,
    )
    return _opened(path) if given is None else _checked_copy(given, state), True


def _of_pack(
    settings: MountSettings, state: Path, source: PackSource, progress: Progress
) -> Snapshot:
    """The kept snapshot if it is of this pack, else one that is made from its index. Raises
    SnapshotError if a given one is of another source."""
    given, wanted = settings.snapshot.file, snapshot_id(source.info)
    path = given or state / "snapshot.lmdb"
    if _exists(path):
        try:
            snapshot = _checked_at(path, given, state)
            if snapshot.id == wanted:
                return snapshot
            snapshot.close()
            if given is not None:
                raise SnapshotError(
                    f"snapshot {os.fspath(given)!r} describes another source, or another pack",
                    hint="name another file with --snapshot: the mount makes it from the pack",
                )
            log.info("the snapshot is not of this pack, and is made anew")
        except SnapshotError as error:
            _require_replaceable(error, given)
            log.warning("making the snapshot anew: %s", error)
    with Pack.open(source.path, source.kept) as pack:
        tree = PackTree(pack)
        if tree.id != wanted:
            raise SourceError(
                f"pack {os.fsdecode(source.path)!r} was replaced while it was opened",
                hint="mount it again",
            )
        write(
            tree,
            path,
            source=os.path.abspath(source.path),
            mode=None,
            progress=progress,
            expected=pack.info.entries,
            snapshot_id=tree.id,
            buckets=tree.buckets,
        )
    return _opened(path) if given is None else _checked_copy(given, state)


def log_gaps(snapshot: Snapshot) -> None:
    """Logs entries that the source did not let the daemon read, and missing access control lists,
    without which mode bits decide."""
    info = snapshot.info()
    if info.unreadable:
        names = ", ".join(map(repr, info.unreadable_paths[:_SHOWN_PATHS]))
        log.warning(
            "%s of the source could not be read when its snapshot was made, opening them fails: %s",
            counted(info.unreadable, "entry", "entries"),
            names + (", ..." if info.unreadable > _SHOWN_PATHS else ""),
        )
    if info.acls is None:
        log.warning(
            "the snapshot is of an older Monarch and has no access control lists: mode bits alone"
            " decide; run: monarch snapshot refresh"
        )


def _exists(path: Path) -> bool:
    """Whether ``path`` exists. Raises SnapshotError if that is unknown, as on a dead file
    system."""
    try:
        return path.exists()
    except OSError as error:
        raise SnapshotError(f"cannot read snapshot {path}: {error.strerror}") from error


def _opened(path: Path) -> Snapshot:
    return Snapshot.open(path, memory_max=_memory_max())


def _memory_max() -> int:
    return memory_bytes(Path("/")) // _MEMORY_SHARE


def _checked_at(path: Path, given: Path | None, state: Path) -> Snapshot:
    """The snapshot at ``path``, or the copy of the given one, checked. Raises SnapshotError."""
    return _checked(path) if given is None else _checked_copy(given, state)


def _require_replaceable(error: SnapshotError, given: Path | None) -> None:
    """Raises ``error`` again if the snapshot is not made anew: a given one, and one of a newer
    Monarch, which may have more information."""
    if given is not None or isinstance(error, NewerSnapshot):
        raise error


def _checked_copy(given: Path, state: Path) -> Snapshot:
    """The copy in ``state`` of a given snapshot, checked. Raises SnapshotError, TierError."""
    copy = own_copy(given, state)
    try:
        snapshot = _checked(copy)
    except SnapshotError:
        # The copy was damaged, or the given file was changed while it was copied.
        copy.unlink()
        copy = own_copy(given, state)
        try:
            snapshot = _checked(copy)
        except SnapshotError as error:
            copy.unlink()
            raise damaged(str(given)) from error
    remove_other_copies(state, copy)
    return snapshot


def _checked(path: Path) -> Snapshot:
    """Opens the snapshot and checks every block, so that no reader finds damage. Raises
    SnapshotError."""
    return Snapshot.open_checked(path, memory_max=_memory_max())


def _require_content(source: Source, snapshot: Snapshot) -> None:
    """Raises SourceError if the source is empty but its snapshot is not: it is probably not
    mounted, and a refresh would drop all names and copies."""
    now, known = source.status(b""), snapshot.attributes(ROOT_INO)
    untouched = (now.st_ino, kept_ns(now.st_mtime_ns)) == (known.source_ino, known.mtime_ns)
    if snapshot.entries > 1 and not untouched and _is_empty(source):
        raise SourceError(
            f"source {os.fsdecode(source.path)!r} is empty, but its snapshot has"
            f" {counted(snapshot.entries - 1, 'entry', 'entries')}",
            errno=errno.ENODEV,
            hint="mount its file system; if it really is empty now, mount with --refresh",
        )


def _require_same_root(source: Source, kept: Snapshot | None, changes: Earlier) -> None:
    """Raises SourceError if the path of the source leads to another directory than ``kept``
    describes, the snapshot of ``changes``; or, if that is gone, to an empty one.

    The file system of the source is probably not mounted, and the drain would write the changes
    where nothing looks for them.
    """
    if kept is None:
        what = "is empty" if changes.undone and _is_empty(source) else ""
    else:
        is_same = _is_the_root_of(source, kept, changes)
        what = "" if is_same else "is another directory than at the last mount"
    if what:
        raise SourceError(
            f"source {os.fsdecode(source.path)!r} {what}, and lacks"
            f" {counted(changes.undone, 'change', 'changes')} of earlier mounts",
            errno=errno.ENODEV,
            hint="mount its file system; to drain into this directory, mount with --refresh",
        )


def _is_the_root_of(source: Source, kept: Snapshot, changes: Earlier) -> bool:
    """Whether the source is the directory that ``kept`` describes. The roots of two file systems
    have the same inode number, for example 2, so the names in them are compared, too."""
    now, known = source.status(b""), kept.attributes(ROOT_INO)
    if now.st_ino != known.source_ino:
        return False
    if kept_ns(now.st_mtime_ns) == known.mtime_ns:
        return True
    names = [(name, it.source_ino) for name, it in islice(kept.list_from(ROOT_INO, 0), _KNOWN_BY)]
    # A file has another inode number after a change of it was drained.
    names += [(name, 0) for name in islice(changes.roots, _KNOWN_BY) if name]
    for name, ino in names:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            if source.status(name).st_ino == ino or not ino:
                return True
    # Changes may have removed all of them.
    return not any(changes.roots.get(name, True) for name, _ in names)


def _is_empty(source: Source) -> bool:
    """The directory of the leases does not count: a mount that absorbs has just made it."""
    return {*os.listdir(source.path)} <= {LEASES}


def _with_new_names(
    settings: MountSettings,
    path: Path,
    snapshot: Snapshot,
    ours: Collection[bytes],
    is_behind: bool,
    progress: Progress,
) -> tuple[Snapshot, bool]:
    """The snapshot with current names, if the changes can be found in a short time, or if the
    snapshot is known to lack some.

    ``ours`` are paths that mounts changed at the source, which change no directory time. A mount
    with another snapshot has removed earlier such changes from the journal, so a snapshot that is
    ``is_behind`` is compared with every entry of the source. In a tree with very many directories
    the watch finds changes later, and only reports them.
    """
    jobs = settings.snapshot.jobs
    changed = is_behind or directories_changed(
        settings.source, snapshot, jobs=jobs, patience_s=_NEW_NAMES_PATIENCE_S
    )
    if snapshot.info().acls is None:
        log.info("the snapshot is of an older Monarch, access control lists are looked for")
    elif not changed:
        return snapshot, changed is False
    else:
        log.info("directories changed at the source since the snapshot, reading them")
    try:
        quick = not is_behind
        refresh(settings.source, path, jobs=jobs, quick=quick, again=ours, progress=progress)
    except SourceError as error:
        log.warning("the names of the snapshot are kept: %s", error)
        return snapshot, False
    snapshot.close()
    return _opened(path), True


def _other_source(snapshot: Snapshot, source: Source) -> str:
    """Why this snapshot does not describe this source; empty if it does.

    A path may lead to another tree later, and several paths to one source: so the inode number of
    the root is compared, then its time, as some file systems give every root the same number.
    """
    now, known = source.status(b""), snapshot.attributes(ROOT_INO)
    same_path = snapshot.source == os.path.abspath(source.path)
    if now.st_ino == known.source_ino and (same_path or kept_ns(now.st_mtime_ns) == known.mtime_ns):
        return ""
    if same_path:
        return "describes a directory that has been replaced since"
    return f"describes another source, {os.fsdecode(snapshot.source)!r}"
