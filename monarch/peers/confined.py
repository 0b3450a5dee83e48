"""Commands with the rights of the engine: as the user of the daemon, without capabilities."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import trio

# In seconds. A disk that hangs must not delay the start of the engine.
_PATIENCE_S = 2.0


def confined(*command: str) -> list[str]:
    """A command with these rights, which ends with the thread that starts it."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return [*command]
    bounds = ["--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    return [setpriv, "--pdeathsig", "KILL", "--no-new-privs", *bounds, *command]


async def may_enter(directory: Path) -> bool:
    """Whether such a command may enter a directory, as the daemon may; True also if that is not
    known. Raises OSError."""
    if os.geteuid() != 0:
        return True
    command = confined("test", "-x", f"{directory}/.")
    with trio.move_on_after(_PATIENCE_S):
        return await trio.to_thread.run_sync(_exit_status, command, abandon_on_cancel=True) != 1
    return True


def _exit_status(command: list[str]) -> int:
    """Raises OSError."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode
