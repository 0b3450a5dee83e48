"""Failpoints: named points of the code at which a test kills the daemon or makes it fail.

``MONARCH_POINT=NAME:N`` in the environment sends SIGKILL to the process when it passes the point
NAME for the N-th time, as a power cut or the kernel's OOM killer would. ``NAME:N:raise`` raises
RuntimeError there instead. Without the variable a point costs one comparison.

Each kernel request has a point ``handler-NAME``, and each task of the daemon ``task-NAME``. The
other points are calls of ``failpoint``; tests/faults/test_crash_points.py lists them, and
tests/packs/test_build.py those of ``monarch pack``.
"""

from __future__ import annotations

import itertools
import os
import signal


def _armed() -> tuple[str, int, bool]:
    """The name of the point, the N, and whether to raise; no name if the variable is not set."""
    name, _, rest = os.environ.get("MONARCH_POINT", "").partition(":")
    turn, _, how = rest.partition(":")
    return (name, int(turn), how == "raise") if name and turn.isdecimal() else ("", 0, False)


_NAME, _TURN, _RAISES = _armed()
# Thread-safe, since threads pass points, too.
_PASSED = itertools.count(1)


def is_armed() -> bool:
    """Whether a point is named: code in C passes no points."""
    return bool(_NAME)


def failpoint(name: str) -> None:
    """Marks a point; does nothing unless MONARCH_POINT names it."""
    if name == _NAME and next(_PASSED) == _TURN:
        if _RAISES:
            raise RuntimeError(f"point {name}, as MONARCH_POINT demands")
        os.kill(os.getpid(), signal.SIGKILL)
