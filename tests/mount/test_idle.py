"""An idle mount sleeps: its event loop waits for events, and does not wake at intervals."""

from __future__ import annotations

import time

import pytest

from tests.conftest import MonarchCommand, Tree
from tests.equipment.processes import status_field
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse
from tests.mount.observe import copies

pytestmark = [needs_fuse, pytest.mark.modes("auto")]

# The time in which wake-ups are counted, and how many of them there may be: those of checks for
# which there is no event, such as that of the tier's directory.
_WATCHED_S = 3.0
_MOST = 8


def wake_ups(pid: int, seconds: float) -> int:
    """How often the main thread of a process has gone to sleep again, as the kernel counts it."""
    before = status_field(pid, "voluntary_ctxt_switches")
    time.sleep(seconds)
    return status_field(pid, "voluntary_ctxt_switches") - before


def test_the_event_loop_of_an_idle_mount_sleeps_and_wakes_for_work(
    tree: Tree, monarch: MonarchCommand
) -> None:
    mounted = monarch.mount(
        tree({str(number): 4096 for number in range(20)}), options=["limits.source_timeout=10s"]
    )
    for number in range(19):
        (mounted.path / str(number)).read_bytes()
    wait_until(lambda: len(copies(mounted)["fast"]) == 19, "all files that were read have copies")
    # Files that have just changed are compared with the source again, for two seconds.
    wait_until(
        lambda: wake_ups(mounted.pid, _WATCHED_S) <= _MOST,
        "the event loop sleeps",
        timeout_s=60.0,
    )
    (mounted.path / "19").read_bytes()
    wait_until(lambda: len(copies(mounted)["fast"]) == 20, "a file that is read now has a copy")
