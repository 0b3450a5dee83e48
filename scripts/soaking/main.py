"""Runs mounts and readers for a long time while faults are injected, and judges the result.

Two mounts of one source run side by side. The first one runs until the end, with faults that it
must survive. The second is unmounted or killed again and again, and mounted in another mode
each time. Processes read through both in all ways and compare each byte with the source. Meanwhile
copies are evicted, warmed, deleted and damaged, the disk of a tier is full, and the source is
slow, fails and hangs. Memory, descriptors, threads, log and accounts of the daemons are sampled; at
the end lines through the samples show whether any of them grows.

Exit code 0: every byte was right, every error had a reason, nothing grew, nothing was left.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from monarch.errors import MonarchError
from scripts.soaking import judgement
from scripts.soaking.report import plot, table, to_dict
from scripts.soaking.soak import Soak
from scripts.soaking.soaked_mount import SoakError
from scripts.soaking.verdict import Verdict
from scripts.tools.mount import MonarchFailed

EXAMPLES = """\
examples:
  scripts/soak --minutes 30
  scripts/soak --minutes 30 --json soak.json --plot soak.png
  scripts/soak --minutes 600 --source /pfs/imagenet/val --modes relay,passthrough
"""

# The first is that of the mount that lives through the whole run.
MODES = ("relay", "passthrough", "no_open", "python")


def main(arguments: Sequence[str]) -> int:
    options = _parsed(arguments)
    # A request to end, like that of a scheduler, unmounts everything, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(stderr=True)
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=options.directory)).resolve()
    soak = Soak(options, directory, console)
    verdicts: list[Verdict] = []
    try:
        soak.run()
        verdicts += judgement.verdicts_of_one(soak.mounts[0].daemon)
        verdicts += judgement.verdicts_over(soak.mounts[1].lifetimes)
        soak.problems += judgement.problems(soak.mounts, verdicts)
    except (SoakError, MonarchFailed, MonarchError) as error:
        soak.problems.append(str(error))
    finally:
        if not soak.problems:
            shutil.rmtree(directory, ignore_errors=True)
    _show(console, options, soak, verdicts)
    if soak.problems:
        console.print(f"{len(soak.problems)} problems; logs and states are in {directory}")
    return 1 if soak.problems else 0


def _show(
    console: Console, options: argparse.Namespace, soak: Soak, verdicts: Sequence[Verdict]
) -> None:
    if soak.faults is not None:
        console.print(table(soak.mounts))
        report = to_dict(
            soak.mounts,
            minutes=options.minutes,
            seed=options.seed,
            faults=soak.faults.counts,
            problems=soak.problems,
            verdicts=verdicts,
        )
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1))
        if options.plot:
            plot(report, MODES, Path(options.plot))
        counts = ", ".join(f"{count} {name}" for name, count in sorted(soak.faults.counts.items()))
        console.print(f"faults: {counts or 'none'}", highlight=False, soft_wrap=True)
    judged = [verdict.words for verdict in verdicts if verdict.flat is not None]
    if len(judged) < len(verdicts):
        judged.append(f"too short to judge {len(verdicts) - len(judged)} of the lines")
    for words in judged:
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    for problem in soak.problems:
        console.print(problem, style="red", highlight=False, markup=False, soft_wrap=True)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="duration (5)")
    parser.add_argument(
        "--source",
        help="directory to read (files made for the run); no other program may change it",
    )
    parser.add_argument(
        "--files", type=int, default=1500, help="number of files made without --source (1500)"
    )
    parser.add_argument("--readers", type=int, default=2, help="reading processes per mount (2)")
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help="modes, in turn; the steady mount has the first (%(default)s)",
    )
    parser.add_argument(
        "--turn", type=float, default=20.0, help="lifetime of the other mount in s (20)"
    )
    parser.add_argument(
        "--sample", type=float, default=2.0, help="interval between samples in s (2)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the faults and of the reads (1)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all samples and verdicts to this file"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw memory, descriptors and threads into this file"
    )
    parser.add_argument("--directory", help="directory of the run (the temporary directory)")
    options = parser.parse_args(arguments)
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    if not (math.isfinite(options.minutes) and options.minutes > 0):
        parser.error("--minutes must be more than 0")
    return options
