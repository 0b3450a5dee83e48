"""Calls that may hang: in a thread that is abandoned after a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable

# A file system that does not answer for a path in this time counts as hung, in seconds.
PATIENCE_S = 2.0


def within(seconds: float, task: Callable[[], None]) -> bool:
    """Whether ``task`` ended in ``seconds``; if not, its thread is abandoned."""
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
