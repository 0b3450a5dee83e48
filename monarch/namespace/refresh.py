"""Bringing a snapshot up to date without reading again what has not changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from monarch.errors import SnapshotError
from monarch.namespace.build import open_source, write
from monarch.namespace.compare import diff
from monarch.namespace.scan import Scan, printable
from monarch.namespace.schema import SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.types import Progress


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """What a refresh found, in entries. ``reused`` entries were not looked at, ``unlisted``
    directories not listed; ``info`` tells of the new snapshot."""

    added: int
    removed: int
    changed: int
    reused: int
    unlisted: int
    info: SnapshotSummary


def refresh(
    source: Path | bytes,
    file: Path,
    *,
    jobs: int = 32,
    quick: bool = False,
    progress: Progress | None = None,
) -> RefreshReport:
    """Replace the snapshot ``file`` by one of today's ``source``, as ``build`` would.

    A directory whose times have not changed is not listed again. Its entries are still looked at;
    with ``quick`` only directories and hard links are, which misses a file that was written in
    place. Raises SourceError and SnapshotError; ``file`` is then what it was.
    """
    with Snapshot.open(file) as before, open_source(source) as (root_fd, path):
        if before.source != path:
            raise SnapshotError(
                f"snapshot {file} is of {printable(before.source)}, not of {printable(path)}",
                hint="give the source it was built from, or build another snapshot",
            )
        one_file_system = before.info().one_file_system
        with Scan(
            root_fd, jobs=jobs, one_file_system=one_file_system, previous=before, quick=quick
        ) as scan:
            write(
                scan,
                file,
                source=path,
                one_file_system=one_file_system,
                progress=progress,
                expected=before.entries,
            )
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
