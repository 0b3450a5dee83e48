"""Which snapshot a mount serves from: the one at hand, that with today's names, or a new one."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from monarch.absorbing import Earlier, earlier
from monarch.errors import NewerSnapshot, SnapshotError, SourceError
from monarch.modes import memory_bytes
from monarch.namespace.build import build, sweep_stages
from monarch.namespace.given import copy_of, own_copy, read_id, remove_other_copies
from monarch.namespace.refresh import directories_changed, refresh
from monarch.namespace.schema import damaged
from monarch.namespace.snapshot import Snapshot
from monarch.settings import MountSettings
from monarch.text import counted
from monarch.tiers.source import Source
from monarch.types import ROOT_INO, Progress, kept_ns

log = logging.getLogger(__name__)

# How long a mount may take to see whether directories have changed since its snapshot. Seconds.
_NEW_NAMES_PATIENCE_S = 0.4
# A snapshot that takes no more than this part of the memory is read into it.
_MEMORY_SHARE = 64
# So many names of entries that could not be read are told in the log.
_TOLD = 5


class Chosen(NamedTuple):
    """The snapshot to serve from. ``just_built``: it was made or brought up to date just now.
    ``put_off``: why it is not the one that was asked for, empty if it is."""

    snapshot: Snapshot
    just_built: bool
    put_off: str = ""


def snapshot_for(
    settings: MountSettings, state: Path, source: Source, refreshed: bool, progress: Progress
) -> Chosen:
    """The snapshot to serve from: a file in ``state``, its own or a copy of the one that was given.

    While the source has not got all that earlier mounts have taken, it is the one that they had:
    what they have done leads from its names to theirs, and not from others.
    """
    given = settings.snapshot.file
    path = given or state / "snapshot.lmdb"
    if given is None:
        sweep_stages(path)
    left = earlier(settings)
    kept = _kept(left, state) if left.undone else None
    if kept is not None:
        if _other_source(kept, source):
            kept.close()
        else:
            if not refreshed:
                _require_content(source, kept)
            return _put_off(settings, kept, left, is_asked=refreshed)
    return Chosen(*_renewed(settings, state, source, refreshed, left.changed, progress))


def _kept(left: Earlier, state: Path) -> Snapshot | None:
    """The snapshot that a journal belongs to, if it is still in ``state``."""
    for path in (state / "snapshot.lmdb", copy_of(left.snapshot_id, state)):
        try:
            if left.snapshot_id and path.exists():
                snapshot = _checked(path)
                if snapshot.id == left.snapshot_id:
                    return snapshot
                snapshot.close()
        except NewerSnapshot:
            raise
        except (SnapshotError, OSError) as error:
            log.warning("the snapshot that what is written belongs to cannot be used: %s", error)
    log.warning(
        "the snapshot is gone that %s of earlier mounts belong to; their names are looked for in"
        " another",
        counted(left.undone, "change", "changes"),
    )
    return None


def _put_off(settings: MountSettings, kept: Snapshot, left: Earlier, *, is_asked: bool) -> Chosen:
    given = settings.snapshot.file
    if given is not None:
        is_asked = is_asked or read_id(given) != kept.id
    elif not is_asked and settings.snapshot.freshness != "never":
        jobs = settings.snapshot.jobs
        if directories_changed(settings.source, kept, jobs=jobs, patience_s=_NEW_NAMES_PATIENCE_S):
            log.info(
                "directories changed at the source since the snapshot; it is renewed by the first"
                " mount that finds all drained, %s of earlier mounts to go",
                counted(left.undone, "change", "changes"),
            )
    if not is_asked:
        return Chosen(kept, False)
    why = (
        f"the names are still those of the last mount's snapshot: the source has not got"
        f" {counted(left.undone, 'change', 'changes')} that belong to it; when"
        f" `monarch ckpt wait {settings.mountpoint}` says that all is there, mount again"
    )
    log.warning("%s", why)
    return Chosen(kept, False, why)


def _renewed(
    settings: MountSettings,
    state: Path,
    source: Source,
    refreshed: bool,
    changed: Collection[bytes],
    progress: Progress,
) -> tuple[Snapshot, bool]:
    given = settings.snapshot.file
    path = given or state / "snapshot.lmdb"
    if _exists(path):
        try:
            if refreshed:
                refresh(settings.source, path, jobs=settings.snapshot.jobs, progress=progress)
            snapshot = _checked(path) if given is None else _checked_copy(given, state)
            reason = _other_source(snapshot, source)
            if not refreshed and (given is None or not reason):
                _require_content(source, snapshot)
            if not reason:
                if given is not None or refreshed or settings.snapshot.freshness == "never":
                    return snapshot, refreshed
                return _with_new_names(settings, path, snapshot, changed, progress)
            snapshot.close()
            raise SnapshotError(
                f"snapshot {os.fspath(path)!r} {reason}",
                hint="name another with --snapshot, or build it with: monarch snapshot build",
            )
        except SnapshotError as error:
            # What a newer Monarch has built may be all that it knows: it is not ours to replace.
            if given is not None or isinstance(error, NewerSnapshot):
                raise
            log.warning("building the snapshot anew: %s", error)
    build(
        settings.source,
        path,
        jobs=settings.snapshot.jobs,
        one_file_system=settings.snapshot.one_file_system,
        progress=progress,
    )
    return _opened(path) if given is None else _checked_copy(given, state), True


def tell_unreadable(snapshot: Snapshot) -> None:
    """One line in the log about what the source did not let us look at or list."""
    told = snapshot.info()
    if told.unreadable:
        names = ", ".join(map(repr, told.unreadable_paths[:_TOLD]))
        log.warning(
            "%s of the source could not be read when its snapshot was made, opening them fails: %s",
            counted(told.unreadable, "entry", "entries"),
            names + (", ..." if told.unreadable > _TOLD else ""),
        )


def tell_unknown_acls(snapshot: Snapshot) -> None:
    """One line in the log if mode bits alone decide because the snapshot was made without lists."""
    if snapshot.info().acls is None:
        log.warning(
            "the snapshot is of an older Monarch and has no access control lists: mode bits alone"
            " decide; run: monarch snapshot refresh"
        )


def _exists(path: Path) -> bool:
    """Raises SnapshotError if that cannot be found out, as on a dead file system."""
    try:
        return path.exists()
    except OSError as error:
        raise SnapshotError(f"cannot read snapshot {path}: {error.strerror}") from error


def _opened(path: Path) -> Snapshot:
    return Snapshot.open(path, memory_max=memory_bytes(Path("/")) // _MEMORY_SHARE)


def _checked_copy(given: Path, state: Path) -> Snapshot:
    """A given snapshot from the copy in ``state``. Raises SnapshotError, TierError."""
    copy = own_copy(given, state)
    try:
        snapshot = _checked(copy)
    except SnapshotError:
        # Damaged since it was made, or just now: others may write into the one that was given.
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
    """The snapshot, every block of which is whole: a damaged one is found now, or by a reader.

    Raises SnapshotError.
    """
    snapshot = _opened(path)
    try:
        snapshot.check()
    except BaseException:
        snapshot.close()
        raise
    return snapshot


def _require_content(source: Source, snapshot: Snapshot) -> None:
    """Raises SourceError if the source is empty and was not: then it is probably not mounted.

    To believe it would throw away the snapshot, and every copy with it.
    """
    now, known = source.status(b""), snapshot.attributes(ROOT_INO)
    untouched = (now.st_ino, kept_ns(now.st_mtime_ns)) == (known.source_ino, known.mtime_ns)
    if snapshot.entries > 1 and not untouched and not os.listdir(source.path):
        raise SourceError(
            f"source {os.fsdecode(source.path)!r} is empty, but its snapshot has"
            f" {counted(snapshot.entries - 1, 'entry', 'entries')}",
            errno=errno.ENODEV,
            hint="is its file system mounted? If it really is empty now, mount with --refresh",
        )


def _with_new_names(
    settings: MountSettings,
    path: Path,
    snapshot: Snapshot,
    ours: Collection[bytes],
    progress: Progress,
) -> tuple[Snapshot, bool]:
    """The snapshot with the names of today, if it takes little time to find out what is new.

    ``ours`` are paths of what mounts have changed where it stands: no directory tells of that.
    In a tree with very many directories that is left to the watch, which only tells.
    """
    jobs = settings.snapshot.jobs
    changed = directories_changed(
        settings.source, snapshot, jobs=jobs, patience_s=_NEW_NAMES_PATIENCE_S
    )
    if snapshot.info().acls is None:
        log.info("the snapshot is of an older Monarch, access control lists are looked for")
    elif not changed:
        return snapshot, changed is False
    else:
        log.info("directories changed at the source since the snapshot, looking at them")
    try:
        refresh(settings.source, path, jobs=jobs, quick=True, again=ours, progress=progress)
    except SourceError as error:
        log.warning("the names stay as they were in the snapshot: %s", error)
        return snapshot, False
    snapshot.close()
    return _opened(path), True


def _other_source(snapshot: Snapshot, source: Source) -> str:
    """Why this snapshot does not describe this source; empty if it does.

    One path may have got another tree since, and nodes may have one source under several paths:
    the root directory's own number, and then its time, tell. (Some file systems number every
    root alike.)
    """
    now, known = source.status(b""), snapshot.attributes(ROOT_INO)
    same_path = snapshot.source == os.path.abspath(source.path)
    if now.st_ino == known.source_ino and (same_path or kept_ns(now.st_mtime_ns) == known.mtime_ns):
        return ""
    if same_path:
        return "describes a directory that has been replaced since"
    return f"describes another source, {os.fsdecode(snapshot.source)!r}"
