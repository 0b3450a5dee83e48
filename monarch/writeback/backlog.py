"""What the source has not got yet, as shown to users."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.writeback.held import Refusal
from monarch.writeback.source_log import Conflict

Paths = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the source has not got yet, and what was drained since the start.

    ``ops`` counts all changes, ``files`` those of them that are of contents, by file, and ``bytes``
    is the size of these files. ``oldest_ns``: when the oldest change was recorded, in ns since the
    epoch; 0 if there is none. ``failures`` counts failed tries, and ``trouble`` says what is wrong
    now. ``lost``: paths of files whose bytes the tier has lost. ``moving_bytes`` of the files that
    are being moved have reached the source. ``conflicts`` counts what others had changed at the
    source, and ``conflict`` is the last of them. ``aside`` are the changes that are set aside, and
    ``aside_ops`` counts these and what waits with them; ``only_aside``: ``trouble`` is one of them.
    """

    ops: int
    files: int
    bytes: int
    oldest_ns: int
    drained_files: int
    drained_bytes: int
    failures: int
    trouble: str | None
    lost: Paths
    moving_bytes: int = 0
    conflicts: int = 0
    conflict: Conflict | None = None
    aside: tuple[Refusal, ...] = ()
    aside_ops: int = 0
    only_aside: bool = False
