"""A change that waits for its turn in the drain, and what is reported of such changes."""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass

from monarch.types import Identity
from monarch.writeback.expected import Conflict
from monarch.writeback.op import Op
from monarch.writeback.source_contents import Place
from monarch.writeback.wakeups import Cause

Paths = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Entry:
    """A change that waits for its turn: ``op`` with its number ``seq`` in the journal.

    ``record`` is the number of its journal record, ``recorded_ns`` the time of that record.

    Of contents: ``was_tried`` says that a staged file of it may exist. ``is_staging``: a task
    stages it at this moment. ``was_ahead``: it was staged ahead of its turn, or that has failed.
    ``staged``: the version of its object whose bytes are in a staged file, which goes to ``place``.
    ``marked``: the last staged file of it in the journal.
    ``published``: the source has these bytes already, with ``is_grown`` because they were appended
    in place. ``skipped``: its bytes are not brought. ``restaged`` counts how often it was staged
    again because the source has changed.

    ``withheld`` are the set-ID bits in the mode of the change that the file does not get yet.

    Of changes that the source refuses: ``is_held`` says that other changes go first. ``refusal``
    and ``why`` are the reason as text, empty for a change that only depends on a refused one;
    ``answer`` is the errno. ``tries`` counts the refusals since ``refused_s`` (event loop clock).
    ``is_aside``: later changes of the same user do not wait for it any more. ``is_moot``: the
    change is not needed any more, or was given up.

    ``has_no_room`` says that the source had no room for it in the last try, nor for any other user;
    ``waits_for_room`` that it is held for such a change.
    """

    seq: int
    op: Op
    recorded_ns: int
    record: int
    was_tried: bool
    is_staging: bool = False
    was_ahead: bool = False
    staged: Identity | None = None
    published: bool = False
    skipped: bool = False
    place: Place | None = None
    marked: Identity | None = None
    restaged: int = 0
    is_held: bool = False
    refusal: str = ""
    why: str = ""
    answer: int = errno.EIO
    is_moot: bool = False
    tries: int = 0
    refused_s: float = math.inf
    is_aside: bool = False
    has_no_room: bool = False
    waits_for_room: bool = False
    is_grown: bool = False
    withheld: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether the change can be made at the source in its turn."""
        return self.staged is not None or self.published or self.skipped


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused change. ``is_aside``: the other changes of its user do not wait for it."""

    seq: int
    kind: str
    path: bytes
    why: str
    tries: int
    is_aside: bool


@dataclass(frozen=True, slots=True)
class Backlog:
    """The changes that are not at the source yet, and what was drained since the start.

    ``ops`` counts all changes; ``files`` counts the files with contents among them, and ``bytes``
    is the size of these files. ``oldest_ns`` is the time of the oldest change, in ns since the
    epoch; 0 if there is none. ``failures`` counts failed tries, and ``trouble`` describes the
    present failure, whose ``cause`` is as in ``Trouble``. ``lost``: the paths of files whose bytes
    the tier has lost. ``moving_bytes`` of the files under way have reached the source.
    ``conflicts`` counts the conflicts with changes of others, and ``conflict`` is the last one.
    ``aside`` are the changes that are set aside; ``aside_ops`` counts these and the changes that
    wait for them. ``only_aside``: ``trouble`` is about a change that is set aside.
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
    cause: Cause = "source"
