"""Looking at what may hang: in a thread that is left behind if it does not come back in time."""

from __future__ import annotations

import threading
from collections.abc import Callable

# How long a look at a path may take before its file system counts as hung. Seconds.
PATIENCE_S = 2.0


def within(seconds: float, task: Callable[[], None]) -> bool:
    """Whether ``task`` ended in time; if not, its thread is left behind."""
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
