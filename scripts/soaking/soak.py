"""One run of the soak: makes the mounts, injects the faults, and ends everything."""

from __future__ import annotations

import argparse
import errno
import os
import random
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from monarch.text import MiB, format_bytes
from scripts.soaking.faults import Faults
from scripts.soaking.soaked_mount import SETTLE_S, SoakedMount, SoakError, Window
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource

# Options of the second mount besides its mode, in turn.
TURNS = (
    "placement.policy=no_evict",
    "placement.policy=lru",
    "placement.policy=first_come,verify=open",
    "limits.inline_max=16KiB,snapshot.freshness=never",
)
# Errors that the end of a mount explains.
OF_END = frozenset({errno.ENOTCONN, errno.ENOENT, errno.ECONNABORTED, errno.EIO, errno.EFAULT})


class Soak:
    """One run. ``problems`` are sentences; none of them is a success."""

    def __init__(self, options: argparse.Namespace, directory: Path, console: Console) -> None:
        self._options = options
        self._directory = directory
        self._console = console
        self._dice = random.Random(options.seed)
        self._begin_s = time.monotonic()
        self._modes: list[str] = options.modes.split(",")
        self.problems: list[str] = []
        self.mounts: list[SoakedMount] = []
        self.faults: Faults | None = None
        self._turn = 0

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def run(self) -> None:
        with ExitStack() as cleanup:
            original = self._make_source()
            names = sorted(
                os.path.relpath(os.path.join(above, name), original)
                for above, _, files in os.walk(original)
                for name in files
            )
            if not names:
                raise SoakError(f"{original}: there are no files to be read")
            slow, source = None, original
            if (reason := slowfs.unavailable()) is None:
                slow = cleanup.enter_context(SlowSource(original, self._directory / "slow"))
                source = slow.path
            else:
                self._console.print(f"the source will not fail: {reason}")
            total = sum((original / name).stat().st_size for name in names)
            for number, name in enumerate(("steady", "changing")):
                disk = self._directory / name
                self._make_disk(disk / "fast", total // 3, cleanup)
                mount = SoakedMount(
                    name,
                    disk,
                    source,
                    original,
                    names,
                    capacity=total,
                    readers=self._options.readers,
                    seed=self._options.seed * 100 + number * 10,
                )
                cleanup.callback(mount.close)
                self.mounts.append(mount)
            self.faults = Faults(self.mounts, slow, self._dice, os.geteuid() == 0)
            self._begin_s = time.monotonic()
            for mount, mode in zip(self.mounts, (self._modes[0], self._modes[-1]), strict=True):
                mount.mount(mode, "", self._now_s)
                mount.readers.go()
            self._inject_faults(self.faults)
            self._end()

    def _make_source(self) -> Path:
        if self._options.source is not None:
            return Path(self._options.source).resolve()
        original = self._directory / "source"
        dice = random.Random(self._options.seed)
        for number in range(self._options.files):
            path = original / f"{number % 20:02}" / f"{number:06}"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = 9_000_000 if number % 400 == 399 else int(dice.lognormvariate(10.4, 1.0))
            path.write_bytes(dice.randbytes(min(size, 9_000_000)))
        return original

    def _make_disk(self, path: Path, size: int, cleanup: ExitStack) -> None:
        """A separate file system, which can be full without effect on others; only for root."""
        path.mkdir(parents=True)
        if os.geteuid() == 0:
            option = f"size={max(size, 4 * MiB)}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(path)], check=True)
            cleanup.callback(subprocess.run, ["umount", "-l", str(path)], check=False)

    def _inject_faults(self, faults: Faults) -> None:
        """Until the time is over and the second mount was mounted again at least once."""
        end_s = self._options.minutes * 60
        step_s = self._options.sample
        next_sample_s, next_line_s = 0.0, 0.0
        next_turn_s = self._options.turn
        while self._now_s < end_s or not self._turn:
            now_s = self._now_s
            for mount in self.mounts:
                mount.readers.collect()
            if now_s >= next_sample_s:
                next_sample_s = now_s + step_s
                for mount in self.mounts:
                    mount.sample(now_s)
            faults.step(now_s)
            is_turn = now_s >= next_turn_s and not faults.of_source
            if is_turn and (now_s + 5 < end_s or not self._turn):
                self._remount()
                next_turn_s = self._now_s + self._options.turn
            if now_s >= next_line_s:
                next_line_s = now_s + (1.0 if self._console.is_terminal else 30.0)
                self._show()
            time.sleep(0.1)

    def _show(self) -> None:
        files = sum(mount.readers.files for mount in self.mounts)
        size = sum(mount.readers.bytes for mount in self.mounts)
        wrong = sum(len(mount.readers.wrong) for mount in self.mounts)
        steady = self.mounts[0].daemon.samples[-1]
        line = (
            f"{self._now_s / 60:.1f} of {self._options.minutes:g} min: {files:,} files,"
            f" {format_bytes(size)}, {wrong} wrong; steady daemon {format_bytes(steady.rss)},"
            f" {steady.descriptors} descriptors; {len(self.mounts[1].lifetimes)} other lifetimes"
        )
        end = "\r" if self._console.is_terminal else "\n"
        self._console.print(line, end=end, highlight=False, soft_wrap=True)

    def _remount(self) -> None:
        """Unmount or kill the second mount, and mount it again in the next mode."""
        mount = self.mounts[1]
        begin_s = time.monotonic()
        self._turn += 1
        if self._dice.random() < 0.5:
            self.problems += mount.kill()
        else:
            if not mount.readers.pause(patience_s=SETTLE_S):
                self.problems.append("changing: a reader does not answer")
            self.problems += mount.settle()
            self.problems += mount.umount()
        mode = self._modes[self._turn % len(self._modes)]
        more = TURNS[self._turn // len(self._modes) % len(TURNS)]
        mount.mount(mode, more, self._now_s, refresh=self._dice.random() < 0.2)
        mount.windows.append(Window(begin_s, time.monotonic() + 1.0, OF_END))
        mount.readers.go()

    def _end(self) -> None:
        assert self.faults is not None
        self.faults.end()
        for mount in self.mounts:
            if not mount.readers.pause(patience_s=SETTLE_S):
                self.problems.append(f"{mount.name}: a reader does not answer")
            self.problems += mount.settle()
            mount.sample(self._now_s)
            self.problems += mount.empty()
            self.problems += mount.umount()
