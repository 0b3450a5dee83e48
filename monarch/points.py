"""Named points of the work at which a test has the daemon killed, or fail.

``MONARCH_POINT=NAME:N`` in the environment sends SIGKILL to the process when it passes the point
NAME for the N-th time, as a power cut or the kernel's memory killer would at that very moment.
``NAME:N:raise`` raises RuntimeError there instead. Without the variable a point costs a comparison.

Beside those below each call that the kernel makes has one, ``handler-NAME``, and each task of the
daemon, ``task-NAME``.
"""

from __future__ import annotations

import itertools
import os
import signal

POINTS = frozenset(
    (
        # A copy: room is reserved, its stage is opened and written, it is compared, made visible,
        # recorded.
        "copy-reserved",
        "copy-staged",
        "copy-half-written",
        "copy-written",
        "copy-compared",
        "copy-sealed",
        "copy-renamed",
        "copy-recorded",
        # A copy leaves.
        "eviction-forgotten",
        "eviction-removed",
        # A copy whose seal was broken, or that an unclean end left, has its digest.
        "verify-compared",
        "verify-sealed",
        # A tier is taken into use.
        "tier-name-staged",
        "tier-named",
        "tier-generation-made",
        # The records of copies are opened, and brought to the tiers' present order and version.
        "records-dirty",
        "records-forgotten",
        # Copies of an earlier snapshot are found again.
        "adopt-renamed",
        "adopt-recorded",
        "adopt-done",
        # A change of what is absorbed is recorded, the journal is synced, and written anew.
        "journal-appended",
        "journal-synced",
        "journal-staged",
        "journal-compacted",
        # What nobody has fsynced is synced with all else of its file system, and that is recorded.
        "commit-synced",
        "commit-recorded",
        # The drain: a content is written beside its name at the source, synced, renamed, its other
        # names linked; a change is made there, and marked as done.
        "drain-staged",
        "drain-synced",
        "drain-renamed",
        "drain-linked",
        "drain-published",
        "drain-marked",
        # What nobody knows is removed.
        "sweep-removed",
        # The names.
        "snapshot-staged",
        "snapshot-published",
        "refresh-done",
        # The mount, its entry in the list of mounts, and its end.
        "mount-made",
        "registry-staged",
        "registry-added",
        "registry-removed",
        "end-synced",
        "end-clean",
    )
)


def _armed() -> tuple[str, int, bool]:
    """The name, the turn and whether to raise; no name if no test asks."""
    name, _, rest = os.environ.get("MONARCH_POINT", "").partition(":")
    turn, _, how = rest.partition(":")
    return (name, int(turn), how == "raise") if name and turn.isdecimal() else ("", 0, False)


_NAME, _TURN, _RAISES = _armed()
# Threads pass points, too.
_PASSED = itertools.count(1)


def reached(name: str) -> None:
    """Nothing, unless a test says so."""
    if name == _NAME and next(_PASSED) == _TURN:
        if _RAISES:
            raise RuntimeError(f"point {name}, as a test demanded")
        os.kill(os.getpid(), signal.SIGKILL)
