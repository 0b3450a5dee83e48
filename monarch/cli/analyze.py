"""``monarch analyze``: measures where a training job waits, and predicts what would help."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import click

from monarch import __version__
from monarch.analysis import profile as profiles
from monarch.analysis.loader_model import TOLERANCE
from monarch.analysis.plan import Phase
from monarch.analysis.profile import Profile, Result, model_of, result_of
from monarch.analysis.stalls import last_rounds
from monarch.cli.daemon_call import JSON
from monarch.cli.job_runs import JobRuns
from monarch.cli.measured_mount import (
    COMMAND,
    ITERS,
    MOST_ITERS,
    PLACE,
    WARMUP,
    limit_of,
    measured_mount,
    most_batches,
)
from monarch.cli.options import FILE, aligned, bandwidth
from monarch.cli.output import duration, progress_bar, show
from monarch.cli.output import remark as to_stderr
from monarch.cli.profile_file import PROFILE, read_profile
from monarch.cli.whatif import whatif
from monarch.cli.written_files import or_unchanged, replace_whole, require_writable
from monarch.errors import UsageError
from monarch.text import counted, escape_text, format_bytes

# The exit code without a verdict.
UNSURE = 15
# Cores that the report considers for a job that waits for prepared batches.
_MOST_CORES = 256


@click.group()
def analyze() -> None:
    """Measure where a training job waits, and predict what would help it.

    The script needs two lines: `import monarch`, and `for batch in monarch.watch(loader):` around
    its loader (docs/analyze.md). Without `monarch analyze run` they cost nothing.
    """


def _shares(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        shares = {float(part) for part in value.split(",")}
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list like 0,.5,1", context, parameter) from error
    if not all(0 <= share <= 1 for share in shares) or not shares - {1.0}:
        what = "give shares of the files from 0 to 1, at least one below 1"
        raise click.BadParameter(what, context, parameter)
    return sorted(shares - {1.0})


@analyze.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  monarch analyze run -- python train.py --epochs 1
  monarch analyze run --mount /mnt/data --out resnet.json -- srun python train.py
  monarch analyze run --x 0,.25,.5 --repeat 2 --source 200MB/s -- ./train.sh
""",
)
@ITERS
@MOST_ITERS
@WARMUP
@click.option(
    "--x",
    "shares",
    callback=_shares,
    default="0,.5,1",
    show_default=True,
    metavar="LIST",
    help="Shares of the files that may be read from the tiers; 1 is always measured.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Rounds of all runs, alternately in one order and the other.",
)
@click.option(
    "--most-repeat",
    type=click.IntRange(min=1),
    metavar="N",
    help="While the last rounds differ too much another one follows, up to N. Default: twice"
    " --repeat.",
)
@bandwidth(
    "--source",
    "limit",
    help="Measure as if the source gave at most RATE, like 200MB/s; at least 1MiB/s.",
)
@PLACE
@click.option(
    "--out",
    type=FILE,
    default="profile.json",
    show_default=True,
    metavar="FILE",
    help="The profile to write; a file that exists is replaced.",
)
@JSON
@COMMAND
def run(
    iters: int,
    most_iters: int | None,
    warmup: int,
    shares: list[float],
    repeat: int,
    most_repeat: int | None,
    limit: float | None,
    place: Path | None,
    out: Path,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run a training script several times, a hundred batches each, and measure where it waits.

    One run trains on batches in memory, one with all files from the tiers, and others with a share
    of them; the differences are the time that the job waits for prepared batches and for files.
    No copy is removed, no other job is slowed down, and root is not needed. Each run ends the
    script as soon as it is measured. The exit code is 15 if there is no verdict, since the runs
    differ too much or the tiers do not hold the files.
    """
    most = most_batches(iters, most_iters)
    most_rounds = 2 * repeat if most_repeat is None else most_repeat
    if most_rounds < repeat:
        raise UsageError(f"--most-repeat {most_rounds} is less than --repeat {repeat}")
    source_limit, mount = limit_of(limit), measured_mount(place)
    require_writable(out)
    phases: list[tuple[Phase, float]] = [("synthetic", 1.0), ("cached", 1.0)]
    phases += [("real", share) for share in reversed(shares)]
    jobs = JobRuns(command, mount.mountpoint, iters, warmup, source_limit, most)
    started_ns = time.time_ns()
    with or_unchanged(out), progress_bar(quiet=as_json) as advance:
        runs = jobs.all(phases, repeat, most_rounds, advance)
    used = last_rounds(runs, repeat)
    profile = Profile(
        monarch_profile=profiles.VERSION,
        monarch=__version__,
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        started_ns=started_ns,
        command=list(command),
        mountpoint=mount.mountpoint,
        data_bytes=mount.data_bytes,
        tier_bytes=mount.tier_bytes,
        source_limit=source_limit,
        iterations=iters,
        warmup=warmup,
        runs=used,
        most_iterations=most,
        unused_runs=runs[: -len(used)],
    )
    try:
        code = _show(profile, as_json)
    finally:
        # Also if nothing reads the output any more: the runs took long.
        replace_whole(out, profiles.encode(profile))
    if not as_json:
        to_stderr(f"the profile is in {escape_text(os.fspath(out))}")
    return code


@analyze.command(
    epilog="""\b
Examples:
  monarch analyze report profile.json
  monarch analyze report profile.json --json | jq .verdict
"""
)
@PROFILE
@JSON
def report(file: Path, as_json: bool) -> int:
    """Show the verdict of a profile, its reason, and what to do next.

    The exit code is 15 if there is no verdict.
    """
    return _show(read_profile(file), as_json)


def _epoch(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _show(profile: Profile, as_json: bool) -> int:
    """Prints the conclusions; returns the exit code."""
    result = result_of(profile)
    show(result, as_json, *_lines(profile, result))
    return UNSURE if result.verdict == "unsure" else 0


def _lines(profile: Profile, result: Result) -> Iterator[str]:
    least = result.shares[0]
    yield f"{result.verdict}: {result.why} (with {least.share:.0%} of the files from the tiers)"
    yield ""
    cells = [
        ["from tiers", "hits", "batches/s", "loader alone", "epoch", "fetch stall", "prep stall"]
    ]
    for each in result.shares:
        cells.append(
            [
                f"{each.share:.0%}",
                f"{each.hits:.0%}",
                f"{each.rate:.4g}",
                f"{each.load_rate:.4g}",
                _epoch(each.epoch_s),
                f"{each.fetch_stall:.0%}",
                f"{each.prep_stall:.0%}",
            ]
        )
    cells.append(["training", "", f"{result.training_rate:.4g}", *[""] * 4])
    yield from aligned(cells)
    yield ""
    yield from _lengths(profile, result)
    if result.model is not None:
        yield f"model: {result.model}, error {result.model_error or 0.0:.1%}"
    yield from _advice(profile, result)


def _lengths(profile: Profile, result: Result) -> Iterator[str]:
    """How long was measured, and why not longer."""
    every = [*profile.unused_runs, *profile.runs]
    batches = sorted({len(run.report.train_s) * run.report.window for run in profile.runs})
    each = counted(batches[-1], "batch", "batches")
    if len(batches) > 1:
        each = f"{batches[0]} to {each}"
    rounds, used = (len({run.round for run in some}) for some in (every, profile.runs))
    of = counted(used, "round", "rounds")
    if used < rounds:
        of = f"the last {used} of {rounds} rounds"
    seconds = sum(sum(run.report.train_s) + sum(run.report.load_s) for run in every)
    why = ""
    # Earlier versions of Monarch measured a fixed number of batches.
    if profile.most_iterations:
        why = "; until the windows agreed"
        if result.troubles:
            why = "; as long as --most-iters and --most-repeat allow; still "
            why += "; ".join(result.troubles)
    yield f"measured: {of}, runs of {each}, {duration(seconds)} in all{why}"


def _advice(profile: Profile, result: Result) -> Iterator[str]:
    """What to do next."""
    if result.verdict == "fetch-bound" and result.smallest_tier is not None:
        share = result.smallest_share or 0.0
        yield (
            f"next: a tier of {format_bytes(result.smallest_tier)} ({share:.0%} of the"
            f" {format_bytes(result.epoch_bytes)} of an epoch) ends the fetch stall;"
            f" the tiers have {format_bytes(profile.tier_bytes)}"
        )
    elif result.verdict == "prep-bound":
        yield f"next: {_cores(profile)}"
    elif result.verdict == "gpu-bound":
        yield "next: neither a larger tier nor more cores makes this job faster"
    elif result.verdict == "unsure":
        yield (
            "next: measure again on an idle node, with more --most-iters; or copy the files into"
            " the tiers first (monarch warm), or a part of them that fits"
        )


def _cores(profile: Profile) -> str:
    model, _ = model_of(profile)
    if model is None:
        return "give the loader more cores and workers"
    used = min(model.workers, model.cores)
    most = max(_MOST_CORES, 2 * used)
    for cores in range(used, most):
        if model.with_cores(cores).rate(1.0) * model.training_s > 1 - TOLERANCE:
            return (
                f"the loader needs {cores} cores, and as many workers; it uses {used} of the"
                f" {profile.cores} cores"
            )
    return f"not even {most} cores prepare as fast as this job trains: prepare in advance"


analyze.add_command(whatif)
