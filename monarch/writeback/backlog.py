"""The changes that are not at the source yet, as shown to users."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.writeback.held import Refusal
from monarch.writeback.source_log import Conflict

Paths = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Backlog:
    """The changes that are not at the source yet, and what was drained since the start.

    ``ops`` counts all changes; ``files`` counts the files with contents among them, and ``bytes``
    is the size of these files. ``oldest_ns`` is the time of the oldest change, in ns since the
    epoch; 0 if there is none. ``failures`` counts failed tries, and ``trouble`` describes the
    present failure. ``lost``: the paths of files whose bytes the tier has lost. ``moving_bytes`` of
    the files under way have reached the source. ``conflicts`` counts the conflicts with changes of
    others, and ``conflict`` is the last one. ``aside`` are the changes that are set aside;
    ``aside_ops`` counts these and the changes that wait for them. ``only_aside``: ``trouble`` is
    about a change that is set aside.
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
