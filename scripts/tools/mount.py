"""Mounts Monarch for the length of a ``with`` block, by its own command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.tools.launch import ROOT
from tests.equipment.mounts import is_mounted, unmount
from tests.equipment.waiting import becomes_true


class MonarchFailed(Exception):
    """A command of Monarch failed; the message is its own."""


def monarch(*arguments: object, shown: bool = False, within: Sequence[str] = ()) -> str:
    """Run ``monarch ARGUMENTS`` of this checkout and return its standard output.

    With ``shown`` the command writes to our standard output instead. ``within`` is in front of the
    command, such as nsenter with its options. Raises MonarchFailed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*within, sys.executable, "-m", "monarch", *map(str, arguments)]
    done = subprocess.run(
        command,
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise MonarchFailed(f"monarch {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout or ""


class Mount:
    """``source`` mounted at ``path`` over one tier. Everything else lies in ``state``.

    ``options`` are keys of the configuration file, as ``-o`` takes them. ``within`` is in front of
    the command that mounts.
    """

    def __init__(
        self,
        source: Path,
        path: Path,
        *,
        tier: Path,
        capacity: str,
        state: Path,
        snapshot: Path | None = None,
        options: str = "",
        within: Sequence[str] = (),
    ) -> None:
        self.path = path
        self._within = within
        self.tier = tier
        self.state = state
        self.seconds = 0.0
        for directory in (path, tier):
            directory.mkdir(parents=True, exist_ok=True)
        self._command: list[object] = ["mount", source, path, "--tier", f"{tier}:{capacity}"]
        self._command += ["--state", state]
        if snapshot is not None:
            self._command += ["--snapshot", snapshot]
        if options:
            self._command += ["-o", options]

    def __enter__(self) -> Mount:
        begin = time.monotonic()
        try:
            monarch(*self._command, within=self._within)
        except BaseException:
            # Ctrl-C, for one, may come when the mount is there already.
            if is_mounted(self.path):
                self.umount()
            raise
        self.seconds = time.monotonic() - begin
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.umount()

    def umount(self) -> None:
        """End the mount by ``monarch umount``; where that fails, detach it."""
        try:
            monarch("umount", self.path)
        except MonarchFailed as refusal:
            unmount(self.path)
            sys.stderr.write(f"{refusal}\n")

    def status(self) -> dict[str, Any]:
        answer = json.loads(monarch("status", self.path, "--json"))
        status: dict[str, Any] = answer[0] if isinstance(answer, list) else answer
        return status

    def settle(self, files: int, *, timeout_s: float = 120.0) -> None:
        """Wait until ``files`` files have a copy and no copy is under way."""
        resident = 0

        def is_settled() -> bool:
            nonlocal resident
            status = self.status()
            resident, copies = status["residency"]["files"], status["copies"]
            return resident >= files and not copies["queued"] and not copies["running"]

        if not becomes_true(is_settled, timeout_s=timeout_s, step_s=0.1):
            raise MonarchFailed(
                f"{self.path}: {resident} of {files} files have a copy after {timeout_s:.0f} s"
            )
