"""Failpoints: named points of the code at which a test kills the daemon or makes it fail.

``MONARCH_POINT=NAME:N`` in the environment sends SIGKILL to the process when it passes the point
NAME for the N-th time, as a power cut or the kernel's OOM killer would. ``NAME:N:raise`` raises
RuntimeError there instead. Without the variable a point costs one comparison.

Besides the points below, each kernel request has a point ``handler-NAME``, and each task of the
daemon ``task-NAME``.
"""

from __future__ import annotations

import itertools
import os
import signal

POINTS = frozenset(
    (
        # A copy: space is reserved, a stage is opened and written, compared, made visible,
        # recorded.
        "copy-reserved",
        "copy-staged",
        "copy-half-written",
        "copy-written",
        "copy-compared",
        "copy-sealed",
        "copy-renamed",
        "copy-recorded",
        # A copy is evicted.
        "eviction-forgotten",
        "eviction-removed",
        # The digest of a copy with a broken seal, or after an unclean end, was compared.
        "verify-compared",
        "verify-sealed",
        # A tier is used for the first time.
        "tier-name-staged",
        "tier-named",
        "tier-generation-made",
        # The records of copies are opened, and converted to the current order of tiers and version.
        "records-dirty",
        "records-forgotten",
        # Copies made with an earlier snapshot are adopted.
        "adopt-renamed",
        "adopt-recorded",
        "adopt-done",
        # A change is recorded, the journal is synced, and rewritten.
        "journal-appended",
        "journal-synced",
        "journal-staged",
        "journal-compacted",
        # Data without fsync is synced by syncfs, and that is recorded.
        "commit-synced",
        "commit-recorded",
        # The drain: a content is written beside its name at the source, synced, renamed, its other
        # names are linked; a change is made there, and marked as done.
        "drain-staged",
        "drain-synced",
        "drain-renamed",
        "drain-linked",
        "drain-published",
        "drain-marked",
        # Files without a record are removed.
        "sweep-removed",
        # A snapshot is written.
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
    """The name of the point, the N, and whether to raise; no name if the variable is not set."""
    name, _, rest = os.environ.get("MONARCH_POINT", "").partition(":")
    turn, _, how = rest.partition(":")
    return (name, int(turn), how == "raise") if name and turn.isdecimal() else ("", 0, False)


_NAME, _TURN, _RAISES = _armed()
# Thread-safe, since threads pass points, too.
_PASSED = itertools.count(1)


def failpoint(name: str) -> None:
    """Marks a point; does nothing unless MONARCH_POINT names it."""
    if name == _NAME and next(_PASSED) == _TURN:
        if _RAISES:
            raise RuntimeError(f"point {name}, as MONARCH_POINT demands")
        os.kill(os.getpid(), signal.SIGKILL)
