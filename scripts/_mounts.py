"""Mounts Monarch for the length of a ``with`` block, by its own command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class MonarchFailed(Exception):
    """A command of Monarch failed; the message is its own."""


def monarch(*arguments: object, shown: bool = False) -> str:
    """Run ``monarch ARGUMENTS`` of this checkout; its standard output, or ``shown`` on our own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "monarch", *map(str, arguments)]
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


def is_mounted(path: Path) -> bool:
    # realpath of the parent: a stat of the mount itself may hang.
    where = str(path.parent.resolve() / path.name)
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        return any(line.split(" ")[1].replace(r"\040", " ") == where for line in mounts)


class Mount:
    """``source`` mounted at ``path`` over one tier. Everything else lies in ``state``.

    ``options`` are keys of the configuration file, as ``-o`` takes them.
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
    ) -> None:
        self.path = path
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
            monarch(*self._command)
        except BaseException:
            # Ctrl-C, for one, comes when the mount may be there already.
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
        """A clean end, and where that is refused, an end at any price."""
        try:
            monarch("umount", self.path)
        except MonarchFailed as refusal:
            command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
            with contextlib.suppress(OSError):
                subprocess.run([*command, "-l", str(self.path)], stderr=subprocess.DEVNULL)
            sys.stderr.write(f"{refusal}\n")

    def status(self) -> dict[str, Any]:
        answer = json.loads(monarch("status", self.path, "--json"))
        status: dict[str, Any] = answer[0] if isinstance(answer, list) else answer
        return status

    def settle(self, files: int, *, timeout_s: float = 120.0) -> None:
        """Wait until ``files`` files have a copy and nothing moves any more."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            copies = status["copies"]
            resident: int = status["residency"]["files"]
            if resident >= files and not copies["queued"] and not copies["running"]:
                return
            if time.monotonic() > deadline:
                raise MonarchFailed(
                    f"{self.path}: {resident} of {files} files have a copy after {timeout_s:.0f} s"
                )
            time.sleep(0.1)
