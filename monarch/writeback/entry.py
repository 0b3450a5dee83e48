"""One change that is not at the source yet, with the drain's knowledge about it."""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass

from monarch.writeback.op import Op
from monarch.writeback.source_contents import Place
from monarch.writeback.staging import Staged


@dataclass(slots=True, eq=False)
class Entry:
    """A change that waits for its turn: ``op`` with its number ``seq`` in the journal.

    ``record`` is the number of its journal record, ``recorded_ns`` the time of that record.

    Of contents: ``was_tried`` says that a staged file of it may exist. ``is_staging``: a task
    stages it at this moment. ``is_left``: staging ahead of its turn has failed. ``staged``: its
    bytes are in a staged file, which goes to ``place``. ``published``: the source has these bytes
    already, with ``is_grown`` because they were appended in place. ``skipped``: its bytes are not
    brought. ``restaged`` counts how often it was staged again because the source has changed.

    Of changes that the source refuses: ``is_held`` says that other changes go first. ``refusal``
    and ``why`` are the reason as text, empty for a change that only depends on a refused one;
    ``answer`` is the errno. ``tries`` counts the refusals since ``refused_s`` (event loop clock).
    ``is_aside``: later changes of the same user do not wait for it any more. ``is_moot``: the
    change is not needed any more, or was given up.
    """

    seq: int
    op: Op
    recorded_ns: int
    record: int
    was_tried: bool
    is_staging: bool = False
    is_left: bool = False
    staged: Staged | None = None
    published: bool = False
    skipped: bool = False
    place: Place | None = None
    restaged: int = 0
    is_held: bool = False
    refusal: str = ""
    why: str = ""
    answer: int = errno.EIO
    is_moot: bool = False
    tries: int = 0
    refused_s: float = math.inf
    is_aside: bool = False
    is_grown: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the change can be made at the source in its turn."""
        return self.staged is not None or self.published or self.skipped
