"""What is compared: Monarch in each of its modes, and file systems that are separate programs.

Each contender mounts a directory for the length of a ``with`` block.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmark.programs import output, required
from scripts.benchmark.rows import BenchError
from scripts.tools.mount import Mount
from tests.equipment.modes import MODES
from tests.equipment.mounts import is_mounted, unmount
from tests.equipment.waiting import becomes_true

AUTO = "auto"
SLOW = "slow source"
ALL_MODES = {**MODES, AUTO: "datapath=auto,open=auto"}
START_S = 20.0
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """A directory to be mounted: the name of its role, and how many files and bytes it has."""

    name: str
    path: Path
    files: int
    bytes: int
    snapshot: Path | None = None


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that answers. ``settle`` waits until no copy is under way."""

    path: Path
    pid: int
    settle: Callable[[], None]
    mode: str = ""


class Contender:
    """A file system that is measured.

    ``fills``: it keeps copies locally. ``fronts``: it shows a directory that exists already.
    ``mount(source, mountpoint, place)`` keeps everything of the mount in ``place``. With the
    ``place`` of an earlier mount it has the copies of that one; contenders with the same ``shares``
    can use each other's.
    """

    name: str
    shares: str
    fills = True
    fronts = True
    directories: int | None = None

    def prepare(self, source: Source, place: Path) -> None:
        """Called once for each source, before anything is measured."""

    def version(self) -> str:
        """Its own words; empty where the report has the version already."""
        return ""

    def mount(
        self, source: Source, mountpoint: Path, place: Path
    ) -> AbstractContextManager[Mounted]:
        raise NotImplementedError


class Monarch(Contender):
    """Monarch in one mode. ``auto`` is the mode of a user who sets nothing."""

    shares = "monarch"

    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        mount = Mount(
            source.path,
            mountpoint,
            tier=place / "tier",
            capacity=str(source.bytes * 2 + (64 << 20)),
            state=place / "state",
            snapshot=source.snapshot,
            options=ALL_MODES[self.name],
        )
        with mount:
            status = mount.status()
            mode = status["mode"]
            yield Mounted(
                mount.path,
                status["pid"],
                lambda: mount.settle(source.files),
                "no_open" if mode["open"] == "none" else mode["datapath"],
            )


class MonarchWriting(Contender):
    """Monarch in one mode, with write-back of every file (``write: absorb``)."""

    shares = "monarch"

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self._capacity = name, capacity

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        mount = Mount(
            source.path,
            mountpoint,
            tier=place / "tier",
            capacity=str(self._capacity),
            state=place / "state",
            options=f"write=absorb,{ALL_MODES[self.name]}",
        )
        with mount:
            yield Mounted(mount.path, mount.status()["pid"], lambda: None)


class SourceItself(Contender):
    """The slow source, without any file system before it."""

    name = shares = SLOW

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        yield Mounted(source.path, os.getpid(), lambda: None)


class Server(Contender):
    """A file system that is a separate program, started in the foreground."""

    version_argument = "version"

    def version(self) -> str:
        lines = output(required(self.name), self.version_argument).splitlines()
        return lines[0] if lines else ""

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        raise NotImplementedError

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        place.mkdir(parents=True, exist_ok=True)
        mountpoint.mkdir(parents=True, exist_ok=True)
        command = self.command(source, mountpoint, place)
        log = place / "log"
        with log.open("ab") as stream:
            # In a separate session: Ctrl-C reaches us alone, and we unmount before the program
            # ends.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(process, mountpoint, log)
            yield Mounted(mountpoint, process.pid, lambda: None)
        finally:
            unmount(mountpoint)
            _end(process)

    def _wait(self, process: subprocess.Popen[bytes], mountpoint: Path, log: Path) -> None:
        def is_decided() -> bool:
            return is_mounted(mountpoint) or process.poll() is not None

        becomes_true(is_decided, timeout_s=START_S)
        if not is_mounted(mountpoint):
            lines = log.read_text(errors="replace").strip().splitlines()
            raise BenchError(f"{self.name} did not mount: {lines[-1] if lines else 'no message'}")
        os.stat(mountpoint)


def in_turn(contenders: Sequence[Contender], turn: int, rounds: int) -> list[Contender]:
    """The order of one round: each begins with another contender."""
    begin = turn * len(contenders) // rounds
    return [*contenders[begin:], *contenders[:begin]]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
        return
    process.kill()
    process.wait()
