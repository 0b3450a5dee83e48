"""Has mounts serve readers for a long time while things go wrong, and judges what that left.

Two mounts of one source, side by side: one lives through the whole run, with faults that it has to
survive; the other is unmounted or killed every while and mounted anew, in another mode each time.
Processes read through both in all ways and compare each byte with the source. Meanwhile copies are
evicted, brought in, deleted and damaged, the disk of a tier is full, and the source is slow, fails
and hangs. Memory, descriptors, threads, log and accounts of the daemons are sampled; at the end
lines through the samples tell whether anything grows.

Exit code 0: every byte was right, every error had a reason, nothing grew, nothing was left.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _mounts import MonarchFailed
from _soak_faults import Faults
from _soak_mounts import MODES, SETTLE_S, Course, Lifetime, SoakError, Window
from _soak_verdict import Verdict, judge
from rich.console import Console
from rich.table import Table

from monarch.errors import MonarchError
from monarch.units import MiB, format_bytes
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource

EXAMPLES = """\
examples:
  scripts/soak --minutes 30
  scripts/soak --minutes 30 --json soak.json --plot soak.png
  scripts/soak --minutes 600 --source /pfs/imagenet/val --modes relay,passthrough
"""

# What the mount that is made anew is told besides, in turn.
TURNS = (
    "placement.policy=no_evict",
    "placement.policy=lru",
    "placement.policy=first_come,verify=open",
    "limits.inline_max=16KiB,snapshot.freshness=never",
)
# Errors of a mount that ends.
OF_END = frozenset({errno.ENOTCONN, errno.ENOENT, errno.ECONNABORTED, errno.EIO, errno.EFAULT})


class Soak:
    """The run. ``problems`` are sentences; none is a success."""

    def __init__(self, options: argparse.Namespace, directory: Path, console: Console) -> None:
        self._options = options
        self._directory = directory
        self._console = console
        self._dice = random.Random(options.seed)
        self._begin_s = time.monotonic()
        self._modes: list[str] = options.modes.split(",")
        self.problems: list[str] = []
        self.verdicts: list[Verdict] = []
        self.courses: list[Course] = []
        self.faults: Faults | None = None
        self._turn = 0

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def run(self) -> None:
        with ExitStack() as cleanup:
            true = self._made_source()
            names = sorted(
                os.path.relpath(os.path.join(above, name), true)
                for above, _, files in os.walk(true)
                for name in files
            )
            if not names:
                raise SoakError(f"{true}: there are no files to be read")
            slow, source = None, true
            if (reason := slowfs.unavailable()) is None:
                slow = cleanup.enter_context(SlowSource(true, self._directory / "slow"))
                source = slow.path
            else:
                self._console.print(f"the source will not fail: {reason}")
            total = sum((true / name).stat().st_size for name in names)
            for number, name in enumerate(("steady", "changing")):
                disk = self._directory / name
                self._disk_of_its_own(disk / "fast", total // 3, cleanup)
                course = Course(
                    name,
                    disk,
                    source,
                    true,
                    names,
                    capacity=total,
                    readers=self._options.readers,
                    seed=self._options.seed * 100 + number * 10,
                )
                cleanup.callback(course.close)
                self.courses.append(course)
            self.faults = Faults(self.courses, slow, self._dice, os.geteuid() == 0)
            self._begin_s = time.monotonic()
            for course, mode in zip(self.courses, (self._modes[0], self._modes[-1]), strict=True):
                course.mount(mode, "", self._now_s)
                course.readers.go()
            self._go_on(self.faults)
            self._end()
        self._judge()

    def _made_source(self) -> Path:
        if self._options.source is not None:
            return Path(self._options.source).resolve()
        true = self._directory / "source"
        dice = random.Random(self._options.seed)
        for number in range(self._options.files):
            path = true / f"{number % 20:02}" / f"{number:06}"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = 9_000_000 if number % 400 == 399 else int(dice.lognormvariate(10.4, 1.0))
            path.write_bytes(dice.randbytes(min(size, 9_000_000)))
        return true

    def _disk_of_its_own(self, path: Path, size: int, cleanup: ExitStack) -> None:
        """So that it can be full without others on this machine."""
        path.mkdir(parents=True)
        if os.geteuid() == 0:
            option = f"size={max(size, 4 * MiB)}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(path)], check=True)
            cleanup.callback(subprocess.run, ["umount", "-l", str(path)], check=False)

    def _go_on(self, faults: Faults) -> None:
        end_s = self._options.minutes * 60
        step_s = self._options.sample
        next_sample_s, next_told_s = 0.0, 0.0
        next_turn_s = self._options.turn
        while self._now_s < end_s:
            now_s = self._now_s
            for course in self.courses:
                course.readers.hear()
            if now_s >= next_sample_s:
                next_sample_s = now_s + step_s
                for course in self.courses:
                    course.sample(now_s)
            faults.step(now_s)
            if now_s >= next_turn_s and not faults.of_source and now_s + 5 < end_s:
                self._turn_over()
                next_turn_s = self._now_s + self._options.turn
            if now_s >= next_told_s:
                next_told_s = now_s + (1.0 if self._console.is_terminal else 30.0)
                self._tell()
            time.sleep(0.1)

    def _tell(self) -> None:
        files = sum(course.readers.files for course in self.courses)
        size = sum(course.readers.bytes for course in self.courses)
        wrong = sum(len(course.readers.wrong) for course in self.courses)
        steady = self.courses[0].daemon.samples[-1]
        line = (
            f"{self._now_s / 60:.1f} of {self._options.minutes:g} min: {files:,} files,"
            f" {format_bytes(size)}, {wrong} wrong; steady daemon {format_bytes(steady.rss)},"
            f" {steady.descriptors} descriptors; {len(self.courses[1].lifetimes)} other lifetimes"
        )
        end = "\r" if self._console.is_terminal else "\n"
        self._console.print(line, end=end, highlight=False, soft_wrap=True)

    def _turn_over(self) -> None:
        """The second mount ends, one way or the other, and is made anew in the next mode."""
        course = self.courses[1]
        begin_s = time.monotonic()
        self._turn += 1
        if self._dice.random() < 0.5:
            self.problems += course.kill()
        else:
            if not course.readers.pause(patience_s=SETTLE_S):
                self.problems.append("changing: a reader does not answer")
            self.problems += course.settle()
            self.problems += course.umount()
        mode = self._modes[self._turn % len(self._modes)]
        more = TURNS[self._turn // len(self._modes) % len(TURNS)]
        course.mount(mode, more, self._now_s, refresh=self._dice.random() < 0.2)
        course.windows.append(Window(begin_s, time.monotonic() + 1.0, OF_END))
        course.readers.go()

    def _end(self) -> None:
        assert self.faults is not None
        self.faults.end()
        for course in self.courses:
            if not course.readers.pause(patience_s=SETTLE_S):
                self.problems.append(f"{course.name}: a reader does not answer")
            self.problems += course.settle()
            course.sample(self._now_s)
            self.problems += course.empty()
            self.problems += course.umount()

    # -- judging -----------------------------------------------------------------------------------

    def _judge(self) -> None:
        for course in self.courses:
            for wrong in course.readers.wrong[:10]:
                self.problems.append(f"{course.name}: wrong: {wrong}")
            for refused in course.unexplained()[:10]:
                name = errno.errorcode.get(refused.number, str(refused.number))
                self.problems.append(f"{course.name}: {name} for {refused.name}, without a reason")
            text = (course.state / "daemon.log").read_text(errors="replace")
            if "Traceback" in text:
                where = text.index("Traceback")
                self.problems.append(f"{course.name}: the log: {text[where : where + 600]}")
        self.verdicts += self._of_one_life(self.courses[0].daemon)
        self.verdicts += self._over_lives(self.courses[1].lifetimes)
        self.problems += [verdict.words for verdict in self.verdicts if verdict.flat is False]

    def _of_one_life(self, life: Lifetime) -> list[Verdict]:
        times = [sample.at_s for sample in life.samples]
        # The first epochs bring pages and copies in.
        warm_up = max(times[-1] * 0.25, min(60.0, times[-1] * 0.5))
        minutes = [
            (b.log_lines - a.log_lines) / max(b.at_s - a.at_s, 1e-3) * 60
            for a, b in zip(life.samples, life.samples[1:], strict=False)
        ]
        made = [
            judge(
                f"steady daemon ({life.mode}), {what}",
                times,
                [getattr(sample, slot) / scale for sample in life.samples],
                warm_up=warm_up,
                tolerance=tolerance,
                share=share,
                unit=unit,
            )
            for what, slot, scale, tolerance, share, unit in (
                ("resident memory", "rss", MiB, 4.0, 0.05, " MiB"),
                ("memory of its own", "own", MiB, 4.0, 0.05, " MiB"),
                ("descriptors", "descriptors", 1, 8.0, 0.1, ""),
                ("threads", "threads", 1, 6.0, 0.1, ""),
            )
        ]
        made.append(
            judge(
                f"steady daemon ({life.mode}), lines of log a minute",
                times[1:],
                minutes,
                warm_up=warm_up,
                tolerance=20.0,
            )
        )
        return made

    def _over_lives(self, lives: Sequence[Lifetime]) -> Iterator[Verdict]:
        """Of each mode by itself: modes need different memory."""
        for mode in dict.fromkeys(life.mode for life in lives):
            for what, slot, scale, tolerance, unit in (
                ("resident memory", "rss", MiB, 6.0, " MiB"),
                ("descriptors", "descriptors", 1, 10.0, ""),
                ("threads", "threads", 1, 8.0, ""),
            ):
                late = [life.late(slot) for life in lives if life.mode == mode]
                values = [value / scale for value in late if value is not None]
                yield judge(
                    f"lifetimes in mode {mode}, {what}",
                    [float(number) for number in range(len(values))],
                    values,
                    warm_up=0.0,
                    tolerance=tolerance,
                    share=0.08,
                    unit=unit,
                    per=(1.0, "lifetime"),
                )

    # -- telling -----------------------------------------------------------------------------------

    def table(self) -> Table:
        table = Table("mount", "lifetimes", "files", "bytes", "wrong", "errors", "without reason")
        for course in self.courses:
            readers = course.readers
            table.add_row(
                course.name,
                str(len(course.lifetimes)),
                f"{readers.files:,}",
                format_bytes(readers.bytes),
                str(len(readers.wrong)),
                str(len(readers.refused)),
                str(len(course.unexplained())),
            )
        return table

    def to_dict(self) -> dict[str, Any]:
        assert self.faults is not None
        return {
            "minutes": self._options.minutes,
            "seed": self._options.seed,
            "problems": self.problems,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "faults": self.faults.counts,
            "mounts": {
                course.name: {
                    "files": course.readers.files,
                    "bytes": course.readers.bytes,
                    "wrong": course.readers.wrong,
                    "errors": len(course.readers.refused),
                    "unexplained": [asdict(refused) for refused in course.unexplained()],
                    "lifetimes": [asdict(life) for life in course.lifetimes],
                }
                for course in self.courses
            },
        }


def plot(told: dict[str, Any], path: Path) -> None:
    """Memory, descriptors and threads over time: the steady daemon, and each of the others."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    panels = (
        ("rss", "resident memory, MiB", MiB),
        ("descriptors", "descriptors", 1),
        ("threads", "threads", 1),
    )
    figure, axes = pyplot.subplots(len(panels), 1, sharex=True, figsize=(8, 7))
    modes = list(MODES)
    for axis, (slot, label, scale) in zip(axes, panels, strict=True):
        for name, width in (("changing", 0.8), ("steady", 1.8)):
            for life in told["mounts"][name]["lifetimes"]:
                color = "black" if name == "steady" else f"C{modes.index(life['mode'])}"
                axis.plot(
                    [sample["at_s"] / 60 for sample in life["samples"]],
                    [sample[slot] / scale for sample in life["samples"]],
                    color=color,
                    linewidth=width,
                )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes")
    lines = [Line2D([], [], color="black", linewidth=1.8)]
    lines += [Line2D([], [], color=f"C{number}") for number in range(len(modes))]
    axes[0].legend(lines, ["one daemon", *modes], ncols=len(lines), fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--source", help="a directory to be read; nothing else may change it")
    parser.add_argument("--files", type=int, default=1500, help="files made without --source")
    parser.add_argument("--readers", type=int, default=2, help="processes a mount (default 2)")
    parser.add_argument("--modes", default=",".join(MODES), help="in turn; the first is the steady")
    parser.add_argument("--turn", type=float, default=20.0, help="seconds of a lifetime")
    parser.add_argument("--sample", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write all samples and verdicts there")
    parser.add_argument("--plot", metavar="FILE", help="draw memory, descriptors and threads")
    parser.add_argument("--directory", help="where all is made (default: the temporary directory)")
    options = parser.parse_args(arguments)
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    if not (math.isfinite(options.minutes) and options.minutes > 0):
        parser.error("--minutes must be more than 0")
    # A request to end, like that of a scheduler, unmounts all as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(stderr=True)
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=options.directory)).resolve()
    soak = Soak(options, directory, console)
    try:
        soak.run()
    except (SoakError, MonarchFailed, MonarchError) as error:
        soak.problems.append(str(error))
    finally:
        kept = bool(soak.problems)
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
    if soak.faults is not None:
        console.print(soak.table())
        told = soak.to_dict()
        if options.json:
            Path(options.json).write_text(json.dumps(told, indent=1))
        if options.plot:
            plot(told, Path(options.plot))
        counts = ", ".join(f"{count} {name}" for name, count in sorted(told["faults"].items()))
        console.print(f"faults: {counts or 'none'}", highlight=False, soft_wrap=True)
    told_of = [verdict.words for verdict in soak.verdicts if verdict.flat is not None]
    if len(told_of) < len(soak.verdicts):
        told_of.append(f"too short to judge {len(soak.verdicts) - len(told_of)} of the lines")
    for words in told_of:
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    for problem in soak.problems:
        console.print(problem, style="red", highlight=False, markup=False, soft_wrap=True)
    if kept:
        console.print(f"{len(soak.problems)} problems; logs and states are in {directory}")
    return 1 if soak.problems else 0
