"""What `monarch status` shows of the reads that are foreseen, and of the fetches ahead of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnnouncedReport:
    """The orders of reads that processes have announced. ``orders``, ``entries`` not read yet, and
    ``bytes`` of memory are of the present ones; all others count since the mount began.

    ``opened`` entries were opened in their turn; ``skipped`` ones were not, though the readers have
    passed them. ``unknown`` entries are not of a file of the snapshot that the user may read.
    ``deviated`` orders were dropped, since the opens did not follow them. ``refused`` are messages.
    """

    orders: int
    entries: int
    bytes: int
    opened: int
    skipped: int
    unknown: int
    ended: int
    deviated: int
    refused: int


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The opens of one job in one directory and beneath. Of a long path ``directory`` is the end,
    after ``...``. ``files`` is the number of entries at the depth that the job reads; ``share`` of
    them, 0 to 1, were opened in ``epoch``. Files are given out up to ``ahead`` entries before they
    are read. ``epoch`` and ``share`` are None if opens are not counted, or the same files are
    opened again and again, or with ``is_mixed``: a file comes again before all others were opened,
    so the epochs cannot be distinguished."""

    directory: str
    pattern: str
    files: int
    epoch: int | None
    share: float | None
    ahead: int
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class NextUseReport:
    """Copies that were made in place of others, since their next use was known: their number, and
    the bytes that were written to tiers for them."""

    replaced_files: int = 0
    replaced_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Files that no tier admits, fetched ahead into memory: ``files`` and ``bytes`` are there now,
    of at most ``capacity`` bytes. Since the mount, ``served`` ones were read from there, and
    ``dropped`` ones left without a reader."""

    files: int = 0
    bytes: int = 0
    capacity: int = 0
    served_files: int = 0
    served_bytes: int = 0
    dropped_files: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ForesightReport:
    """The streams of opens, the last used first, the announced orders, and what was fetched ahead
    of readers since the mount. ``unread`` of it was not opened since, perhaps never will be."""

    streams: list[StreamReport]
    announced: AnnouncedReport
    fetched_files: int
    fetched_bytes: int
    unread_files: int
    unread_bytes: int
    window: WindowReport = WindowReport()
    next_use: NextUseReport = NextUseReport()
