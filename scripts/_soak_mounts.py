"""A mount that is soaked: its state, tiers and readers, and the daemons that serve it in turn."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _mounts import MonarchFailed, is_mounted, monarch
from _soak_readers import Readers, Refused

from monarch.control.client import call
from monarch.units import KiB

# The first is that of the mount that lives through the whole run.
MODES = {
    "relay": "datapath=relay,open=open",
    "passthrough": "datapath=passthrough,open=open",
    "no_open": "datapath=relay,open=none",
    "python": "datapath=python",
}
SETTLE_S = 30.0


class SoakError(Exception):
    """A soak that cannot run: what is missing, in one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a daemon. ``at_s`` counts from the begin of the run."""

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
        """The median of what was sampled in the second half; None if nothing was."""
        values = sorted(getattr(s, what) for s in self.samples[len(self.samples) // 2 :])
        return float(values[len(values) // 2]) if values else None


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which errors with these numbers are no mistake of Monarch's."""

    begin_s: float
    end_s: float
    numbers: frozenset[int]

    def explains(self, refused: Refused) -> bool:
        return (
            refused.number in self.numbers
            and refused.opened_s <= self.end_s
            and refused.ended_s >= self.begin_s
        )


class Course:
    """A mount point with its state, tiers and readers, and the daemons that serve it in turn."""

    def __init__(
        self,
        name: str,
        directory: Path,
        source: Path,
        true: Path,
        names: Sequence[str],
        *,
        capacity: int,
        readers: int,
        seed: int,
    ) -> None:
        self.name = name
        self.mountpoint = directory / "mnt"
        self.state = directory / "state"
        # The first may be made full, so it is small; the second takes all.
        self.tiers = [directory / "fast", directory / "slow"]
        for path in (self.mountpoint, *self.tiers):
            path.mkdir(parents=True, exist_ok=True)
        self._source = source
        self._capacities = (capacity // 4, capacity)
        self.readers = Readers(self.mountpoint, true, names, count=readers, seed=seed)
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
        """Nothing is open, nothing is copied: what does not agree then."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            told = self.ask("status")
            busy = [
                f"{told['copies'][name]} copies are {name}"
                for name in ("queued", "running")
                if told["copies"][name]
            ] + [f"{n}: {count}" for n, count in told["handles"].items() if count]
            busy += [
                f"tier {t['name']}: {t['reserved']} reserved"
                for t in told["tiers"]
                if t["reserved"]
            ]
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        wrong = [f"{self.name}: {what}" for what in busy]
        wrong += [f"{self.name}: left: {p}" for tier in self.tiers for p in tier.rglob("*.part")]
        for tier in told["tiers"]:
            if tier["used"] > tier["capacity"]:
                wrong.append(f"{self.name}: tier {tier['name']} holds more than it may")
        return wrong

    def empty(self) -> list[str]:
        """Evict all; what the accounts or the disks hold then."""
        self.ask("evict", paths=[])
        deadline = time.monotonic() + SETTLE_S
        while True:
            told = self.ask("status")
            left = [
                f"{self.name}: tier {t['name']}: {t['used']} bytes, {t['files']} files"
                for t in told["tiers"]
                if t["used"] or t["files"]
            ]
            left += [f"{self.name}: left: {path}" for path in self.copies()[:3]]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

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
        deadline = time.monotonic() + SETTLE_S
        while alive(self.daemon.pid):
            if time.monotonic() > deadline:
                return [f"{self.name}: the daemon {self.daemon.pid} is still there"]
            time.sleep(0.02)
        return []

    def close(self) -> None:
        """Whatever became of the run, nothing stays mounted and no process stays."""
        self.readers.end()
        if self.lifetimes and alive(self.daemon.pid):
            self.kill()
        if is_mounted(self.mountpoint):
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=False)

    def unexplained(self) -> list[Refused]:
        return [r for r in self.readers.refused if not any(w.explains(r) for w in self.windows)]


def _memory(pid: int) -> tuple[int, int]:
    """Resident bytes, and those of them that are no file's: nobody else can change that number."""
    found = {"Rss": 0, "Anonymous": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * KiB
    return found["Rss"], found["Anonymous"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits for nothing but its parent's look does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in ("Z", "X") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False
