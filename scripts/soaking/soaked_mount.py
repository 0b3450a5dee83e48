"""A mount under soak: its state, tiers and readers, and the daemons that serve it in turn."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.control.client import call
from monarch.text import KiB
from scripts.soaking.readers import Readers, Refused
from scripts.tools.mount import MonarchFailed, monarch
from tests.equipment.modes import MODES
from tests.equipment.mounts import unmount
from tests.equipment.processes import is_running
from tests.equipment.waiting import becomes_true

SETTLE_S = 30.0


class SoakError(Exception):
    """A soak that cannot run: what is missing, in one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of a daemon at one moment. ``at_s`` counts from the start of the run."""

    at_s: float
    rss: int
    own: int
    descriptors: int
    threads: int
    log_bytes: int
    log_lines: int


@dataclass(slots=True)
class Lifetime:
    """One daemon, from its mount to its end."""

    mode: str
    pid: int
    began_s: float
    samples: list[Sample] = field(default_factory=list)

    def late(self, what: str) -> float | None:
        """The median of the samples of the second half; None without samples."""
        values = sorted(getattr(s, what) for s in self.samples[len(self.samples) // 2 :])
        return float(values[len(values) // 2]) if values else None


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which errors with these numbers are the consequence of a fault."""

    begin_s: float
    end_s: float
    numbers: frozenset[int]

    def explains(self, refused: Refused) -> bool:
        return (
            refused.number in self.numbers
            and refused.opened_s <= self.end_s
            and refused.ended_s >= self.begin_s
        )


class SoakedMount:
    """A mount point with its state, tiers and readers, and the daemons that serve it in turn.

    ``original`` is the directory behind ``source``, with which the readers compare.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        source: Path,
        original: Path,
        names: Sequence[str],
        *,
        capacity: int,
        readers: int,
        seed: int,
    ) -> None:
        self.name = name
        self.mountpoint = directory / "mnt"
        self.state = directory / "state"
        # The first is small, and may be filled by a fault; the second has room for all files.
        self.tiers = [directory / "fast", directory / "slow"]
        for path in (self.mountpoint, *self.tiers):
            path.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._capacities = (capacity // 4, capacity)
        self.readers = Readers(self.mountpoint, original, names, count=readers, seed=seed)
        self.lifetimes: list[Lifetime] = []
        self.windows: list[Window] = []
        self._log_read = 0
        self._log_lines = 0

    def mount(self, mode: str, more: str, now_s: float, *, refresh: bool = False) -> None:
        options = ",".join(filter(None, (MODES[mode], more)))
        if mode == "no_open":
            options = options.replace(",verify=open", "")
        command: list[object] = ["mount", self._source, self.mountpoint, "--state", self.state]
        for path, capacity in zip(self.tiers, self._capacities, strict=True):
            command += ["--tier", f"{path}:{capacity}"]
        command += ["-o", options, *(["--refresh"] if refresh else [])]
        monarch(*command)
        self.lifetimes.append(Lifetime(mode, self.ask("ping")["pid"], now_s))

    @property
    def daemon(self) -> Lifetime:
        return self.lifetimes[-1]

    def ask(self, verb: str, **params: Any) -> dict[str, Any]:
        return call(self.state / "control.sock", verb, params, timeout=SETTLE_S)

    def sample(self, now_s: float) -> None:
        pid = self.daemon.pid
        try:
            rss, own = _memory(pid)
            seen = Sample(
                at_s=now_s,
                rss=rss,
                own=own,
                descriptors=len(os.listdir(f"/proc/{pid}/fd")),
                threads=len(os.listdir(f"/proc/{pid}/task")),
                log_bytes=self._log_size(),
                log_lines=self._log_lines,
            )
        except OSError as error:
            raise SoakError(f"{self.name}: the daemon {pid} has died: {error}") from error
        self.daemon.samples.append(seen)

    def _log_size(self) -> int:
        with contextlib.suppress(FileNotFoundError), (self.state / "daemon.log").open("rb") as log:
            log.seek(self._log_read)
            new = log.read()
            self._log_read += len(new)
            self._log_lines += new.count(b"\n")
        return self._log_read

    def copies(self) -> list[Path]:
        return [
            path
            for tier in self.tiers
            for path in tier.glob("monarch/*/copies-*/*/*")
            if path.name.isdecimal()
        ]

    def settle(self) -> list[str]:
        """Wait until no file is open and no copy is under way. Problems, as sentences."""
        status: dict[str, Any] = {}

        def is_idle() -> bool:
            status.update(self.ask("status"))
            return not _busy(status)

        becomes_true(is_idle, timeout_s=SETTLE_S, step_s=0.1)
        wrong = [f"{self.name}: {what}" for what in _busy(status)]
        wrong += [f"{self.name}: left: {p}" for tier in self.tiers for p in tier.rglob("*.part")]
        for tier in status["tiers"]:
            if tier["used"] > tier["capacity"]:
                wrong.append(f"{self.name}: tier {tier['name']} holds more than it may")
        return wrong

    def empty(self) -> list[str]:
        """Evict all copies. What the accounts or the disks have then, as sentences."""
        self.ask("evict", paths=[])
        left: list[str] = []

        def is_empty() -> bool:
            left[:] = [
                f"{self.name}: tier {t['name']}: {t['used']} bytes, {t['files']} files"
                for t in self.ask("status")["tiers"]
                if t["used"] or t["files"]
            ]
            left.extend(f"{self.name}: left: {path}" for path in self.copies()[:3])
            return not left

        becomes_true(is_empty, timeout_s=SETTLE_S, step_s=0.1)
        return left

    def umount(self) -> list[str]:
        try:
            monarch("umount", self.mountpoint)
        except MonarchFailed as error:
            return [f"{self.name}: {error}"]
        return self._ended()

    def kill(self) -> list[str]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.daemon.pid, signal.SIGKILL)
        return self._ended()

    def _ended(self) -> list[str]:
        if becomes_true(lambda: not is_running(self.daemon.pid), timeout_s=SETTLE_S):
            return []
        return [f"{self.name}: the daemon {self.daemon.pid} is still running"]

    def close(self) -> None:
        """End the readers and the daemon and unmount, however the run has ended."""
        self.readers.end()
        if self.lifetimes and is_running(self.daemon.pid):
            self.kill()
        unmount(self.mountpoint)

    def unexplained(self) -> list[Refused]:
        return [r for r in self.readers.refused if not any(w.explains(r) for w in self.windows)]


def _memory(pid: int) -> tuple[int, int]:
    """Resident bytes, and those of them that map no file, which no other process can change."""
    found = {"Rss": 0, "Anonymous": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * KiB
    return found["Rss"], found["Anonymous"]


def _busy(status: dict[str, Any]) -> list[str]:
    """What the daemon still has open, copies or has reserved."""
    copies = status["copies"]
    return [
        *(f"{copies[name]} copies are {name}" for name in ("queued", "running") if copies[name]),
        *(f"{name}: {count}" for name, count in status["handles"].items() if count),
        *(f"tier {t['name']}: {t['reserved']} reserved" for t in status["tiers"] if t["reserved"]),
    ]
