"""What a daemon that is ending waits for: in its log, and for others by the name of its process.

Its control socket is gone by then, and its state may be on a disk that hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

# The name of a process has 15 bytes.
_PREFIX = "end: "
STEPS = {
    "requests": "requests that are being answered",
    "copies": "copies whose bytes were fetched",
    "written": "written files to be drained or closed",
    "tasks": "tasks that are under way",
    "tiers": "the disks of its tiers to have all that was written",
}
# A step that took so long is told in the log. Seconds.
_LONG_S = 1.0


@contextmanager
def step(name: str) -> Iterator[None]:
    """The end of this process waits for what STEPS says of ``name``."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(_PREFIX + name)
    began = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - began
        if seconds > _LONG_S:
            log.info("the end has waited %.1f s for %s", seconds, STEPS[name])


def step_of(pid: int) -> str | None:
    """Which of STEPS a process waits for; None if it is not ending, or has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read().rstrip("\n")
    except OSError:
        return None
    known = name.removeprefix(_PREFIX)
    return known if name.startswith(_PREFIX) and known in STEPS else None
