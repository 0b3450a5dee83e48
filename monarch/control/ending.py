"""The steps of the end of a daemon, shown in its log and in the name of its process.

At that time its control socket is closed, and its state may be on a disk that hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

# The kernel keeps at most 15 bytes of the name of a process.
_PREFIX = "end: "
STEPS = {
    "requests": "requests that are being answered",
    "copies": "copies whose bytes were fetched already",
    "written": "written files to be drained or closed",
    "tasks": "tasks that are running",
    "tiers": "the disks of its tiers to sync all written data",
}
# A step that takes longer than this is logged.
_LONG_S = 1.0


@contextmanager
def step(name: str) -> Iterator[None]:
    """Marks that the end of this process waits for ``name``, a key of STEPS."""
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
    """The key of STEPS that process ``pid`` waits for; None if it is not ending, or has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read().rstrip("\n")
    except OSError:
        return None
    known = name.removeprefix(_PREFIX)
    return known if name.startswith(_PREFIX) and known in STEPS else None
