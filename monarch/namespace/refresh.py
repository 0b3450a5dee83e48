"""Refreshes a snapshot without reading unchanged directories again."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.config.write_patterns import is_staged
from monarch.errors import SnapshotError
from monarch.namespace.build import open_source, require_outside, write
from monarch.namespace.compare import diff
from monarch.namespace.scan import CALL_WAIT_S, Scan, joined, printable, settled_ns
from monarch.namespace.schema import SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.posix import failpoints
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import lstat_beneath, open_beneath
from monarch.posix.thread_pool import batches
from monarch.posix.workers import Workers
from monarch.types import Ino, Progress, kept_ns

# Directories that one thread checks at a time. A smaller tree needs no thread.
_BATCH = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """The result of a refresh, in entries. ``reused`` entries were not read, ``unlisted``
    directories not listed; ``info`` describes the new snapshot."""

    added: int
    removed: int
    changed: int
    reused: int
    unlisted: int
    info: SnapshotSummary


def directories_changed(
    source: Path | bytes, snapshot: Snapshot, *, jobs: int, patience_s: float
) -> bool | None:
    """Whether any directory has other times than in the snapshot: names came, went or moved.

    Directories that may have changed once more without another time are listed. None if not all
    could be checked within ``patience_s`` seconds. Raises SourceError.
    """
    deadline = time.monotonic() + patience_s
    settled, unsettled = settled_ns(snapshot), list[Ino]()
    with open_source(source) as (root_fd, _path):

        def differs(directories: list[Ino]) -> bool | None:
            for ino in directories:
                if time.monotonic() > deadline:
                    return None
                known = snapshot.attributes(ino)
                try:
                    now = lstat_beneath(root_fd, snapshot.path(ino))
                except OSError:
                    return True
                times = kept_ns(now.st_mtime_ns), kept_ns(now.st_ctime_ns)
                if times != (known.mtime_ns, known.ctime_ns):
                    return True
            unsettled.extend(without_proof(snapshot, directories, settled))
            return False

        def is_listed_otherwise(directory: Ino) -> bool | None:
            try:
                return names_differ(root_fd, snapshot, directory, deadline)
            except OSError:
                return True

        directories = batches(snapshot.directories(), _BATCH)
        if (first := differs(next(directories))) is not False:
            return first
        with Workers[bool | None](jobs, wait_s=CALL_WAIT_S) as workers:
            answers = {first, *workers.map(differs, directories)}
            if answers == {False}:
                answers.update(workers.map(is_listed_otherwise, unsettled))
    return True if True in answers else None if None in answers else False


def without_proof(snapshot: Snapshot, directories: Sequence[Ino], settled: int) -> list[Ino]:
    """Those of the directories that the snapshot may list wrongly although their times are the same
    at the source. ``settled``: the ``settled_ns`` of the snapshot."""
    return [
        ino
        for ino in directories
        if snapshot.is_listed_directory(ino)
        and max((at := snapshot.attributes(ino)).mtime_ns, at.ctime_ns) >= settled
    ]


def names_differ(
    root_fd: int, snapshot: Snapshot, directory: Ino, deadline_s: float
) -> bool | None:
    """Whether a directory of the source has other entries than in the snapshot: other names, or
    other inodes under them. None if that was not found out until ``deadline_s``. Raises OSError."""
    path, children = snapshot.path(directory), snapshot.children(directory)
    numbers = snapshot.columns(children)["source_ino"].tolist()
    known = dict(zip(snapshot.names(directory), numbers, strict=True))
    # A source may answer with a name twice while the directory changes.
    found = set[bytes]()
    with closing_fd(open_beneath(root_fd, path, _DIRECTORY)) as fd:
        if snapshot.info().one_file_system and os.fstat(fd).st_dev != os.fstat(root_fd).st_dev:
            return False
        with os.scandir(fd) as entries:
            for entry in entries:
                if time.monotonic() > deadline_s:
                    return None
                name = os.fsencode(entry.name)
                if is_staged(name):
                    continue
                number = known.get(name)
                # A listing has another number for a mount point, and on some file systems.
                if number is None or (
                    number != entry.inode()
                    and number != lstat_beneath(root_fd, joined(path, name)).st_ino
                ):
                    return True
                found.add(name)
    return len(found) < len(known)


def refresh(
    source: Path | bytes,
    file: Path,
    *,
    jobs: int = 32,
    quick: bool = False,
    again: Collection[bytes] = (),
    progress: Progress | None = None,
) -> RefreshReport:
    """Replaces the snapshot ``file`` by one of the current ``source``, as ``build`` would.

    A directory whose times have not changed is not listed again. Its entries are still read; with
    ``quick`` only directories, hard links and the paths in ``again`` are, so other files that were
    written in place are missed. Raises SourceError, SnapshotError and UsageError; ``file`` is then
    unchanged.
    """
    with Snapshot.open_checked(file) as before, open_source(source) as (root_fd, path):
        if before.source != path:
            raise SnapshotError(
                f"snapshot {file} is of {printable(before.source)}, not of {printable(path)}",
                hint="name the source it was built from, or build another snapshot",
            )
        require_outside(root_fd, path, file)
        with Scan(
            root_fd,
            jobs=jobs,
            one_file_system=before.info().one_file_system,
            previous=before,
            quick=quick,
            again=again,
        ) as scan:
            write(
                scan,
                file,
                source=path,
                mode=None,
                progress=progress,
                expected=before.entries,
            )
        failpoints.failpoint("refresh-done")
        with Snapshot.open(file) as after:
            counts = Counter(difference.kind for difference in diff(before, after))
            return RefreshReport(
                added=counts["new"],
                removed=counts["missing"],
                changed=counts["changed"] + counts["changed-size"] + counts["changed-mtime"],
                reused=scan.reused,
                unlisted=scan.unlisted,
                info=after.info(),
            )
