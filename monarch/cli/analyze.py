"""``monarch analyze``: measures where a training job waits, and predicts what would help."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import click

from monarch import __version__
from monarch.analysis import profile as profiles
from monarch.analysis.loader_model import TOLERANCE, JobModel
from monarch.analysis.plan import WINDOWS, Phase
from monarch.analysis.profile import Profile, Result, model_of, result_of
from monarch.cli.daemon_call import JSON
from monarch.cli.job_runs import JobRuns
from monarch.cli.options import FILE, aligned, bandwidth, counts_of, listed, parse_rate
from monarch.cli.output import duration, progress_bar, show
from monarch.cli.output import remark as to_stderr
from monarch.cli.written_files import replace_whole, require_writable
from monarch.errors import MonarchError, MountPointError, NotMountedError, UsageError
from monarch.foresight.messages import LEAST_LIMIT
from monarch.posix.mounts import mount_table
from monarch.text import escape_text, format_bytes, parse_bytes

T = TypeVar("T")

# The exit code without a verdict.
UNSURE = 15
# The attribute of the root of a mount that has its public figures.
_FIGURES = "user.monarch.status"
# The shares of the files in a tier that ``whatif`` shows without --tier.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Cores that the report considers for a job that waits for prepared batches.
_MOST_CORES = 256

_PROFILE = click.argument("file", metavar="PROFILE", type=FILE)


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
@click.option(
    "--iters",
    type=click.IntRange(min=2 * WINDOWS),
    default=100,
    show_default=True,
    metavar="N",
    help="Batches that each run measures.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Batches before the measured ones.",
)
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
@bandwidth(
    "--source",
    "limit",
    help="Measure as if the source gave at most RATE, like 200MB/s; at least 1MiB/s.",
)
@click.option(
    "--mount",
    "place",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="MOUNT",
    help="The mount that the job reads. Default: the only mount of this node.",
)
@click.option(
    "--out",
    type=FILE,
    default="profile.json",
    show_default=True,
    metavar="FILE",
    help="The profile to write; a file that exists is replaced.",
)
@JSON
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def run(
    iters: int,
    warmup: int,
    shares: list[float],
    repeat: int,
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
    if limit is not None and limit < LEAST_LIMIT:
        raise UsageError("--source is a rate of at least 1MiB/s")
    mountpoint = _mountpoint(place)
    figures = _figures(mountpoint)
    if figures["open"] == "none" or figures["datapath"] == "python":
        where = escape_text(mountpoint)
        raise MountPointError(
            f"{where} is mounted so that its daemon does not see the opens of one job",
            hint="mount it again with -o open=open,datapath=auto",
        )
    source_limit = int(limit or 0)
    require_writable(out)
    phases: list[tuple[Phase, float]] = [("synthetic", 1.0), ("cached", 1.0)]
    phases += [("real", share) for share in reversed(shares)]
    jobs = JobRuns(command, mountpoint, iters, warmup, source_limit)
    started_ns = time.time_ns()
    with progress_bar(quiet=as_json) as advance:
        runs = jobs.all(phases, repeat, advance)
    profile = Profile(
        monarch_profile=profiles.VERSION,
        monarch=__version__,
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        started_ns=started_ns,
        command=list(command),
        mountpoint=mountpoint,
        data_bytes=figures["bytes"],
        tier_bytes=sum(tier["capacity"] for tier in figures["tiers"]),
        source_limit=source_limit,
        iterations=iters,
        warmup=warmup,
        runs=runs,
    )
    code = _show(profile, as_json)
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
@_PROFILE
@JSON
def report(file: Path, as_json: bool) -> int:
    """Show the verdict of a profile, its reason, and what to do next.

    The exit code is 15 if there is no verdict.
    """
    return _show(_read(file), as_json)


@analyze.command(
    epilog="""\b
Examples:
  monarch analyze whatif profile.json --tier 100GiB,200GiB,400GiB
  monarch analyze whatif profile.json --cores 4,8,16 --source 500MB/s
  monarch analyze whatif profile.json --tier 1TB --json
"""
)
@_PROFILE
@click.option(
    "--tier", "tiers", callback=listed(parse_bytes), metavar="LIST", help="Sizes of the tiers."
)
@click.option(
    "--cores",
    callback=counts_of,
    metavar="LIST",
    help="Numbers of cores, with at least as many workers of the loader.",
)
@click.option(
    "--source",
    "sources",
    callback=listed(parse_rate),
    metavar="LIST",
    help="Rates of the source, like 1GB/s.",
)
@JSON
def whatif(
    file: Path, tiers: list[int], cores: list[int], sources: list[int], as_json: bool
) -> None:
    """Predict the rate of a job with other tiers, cores and rates of its source.

    The prediction is that of the model that describes the measured runs best. The table has its
    error in these runs. It assumes that placement keeps a fixed share of the files (the policy
    no_evict, the default), and that nothing is fetched ahead.
    """
    profile = _read(file)
    result = result_of(profile)
    model, _ = model_of(profile)
    if model is None:
        raise MonarchError(
            "nothing can be predicted: all runs read the same share of the files from the tiers",
            hint="copy the files into the tiers first (monarch warm), and measure again",
        )
    if sources and not model.source_bytes_s:
        raise UsageError(
            "--source: the job did not read faster from the tiers than from the source",
            hint="measure with a slower source: monarch analyze run --source RATE",
        )
    rows = list(_rows(model, result, tiers, cores, sources))
    error = result.model_error or 0.0
    lines = [*_table(rows), "", f"model: {model.kind}, error {error:.1%} in the measured runs"]
    if any(row.cores > profile.cores for row in rows):
        lines.append("with more cores than measured: at most, if the source keeps up")
    document = {"model": model.kind, "model_error": error, "rows": [asdict(row) for row in rows]}
    show(document, as_json, *lines)


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction: ``tier`` bytes hold ``share`` of the files, the source gives at most
    ``source`` bytes/s, None: as when it was measured. ``rate`` in batches/s."""

    tier: int
    share: float
    cores: int
    source: int | None
    rate: float
    epoch_s: float | None
    fetch_stall: float
    prep_stall: float


def _rows(
    model: JobModel, result: Result, tiers: list[int], cores: list[int], sources: list[int]
) -> Iterator[Row]:
    whole = max(result.epoch_bytes, 1.0)
    sizes = tiers or [round(share * whole) for share in _SHARES]
    for tier, number, source in product(sizes, _or(cores, model.cores), _or(sources, None)):
        changed = model if number == model.cores else model.with_cores(number)
        if source is not None:
            changed = changed.with_source(source)
        share = min(1.0, tier / whole)
        rate, cached = changed.rate(share), changed.rate(1.0)
        length = result.epoch_batches
        yield Row(
            tier=tier,
            share=share,
            cores=number,
            source=source,
            rate=rate,
            epoch_s=None if length is None else length / rate,
            fetch_stall=1 - rate / cached,
            prep_stall=max(0.0, rate / cached - rate * model.training_s),
        )


def _or(values: list[int], otherwise: T) -> Sequence[int | T]:
    return values or [otherwise]


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [
        ["tier", "of data", "cores", "source", "batches/s", "epoch", "fetch stall", "prep stall"]
    ]
    for row in rows:
        cells.append(
            [
                format_bytes(row.tier),
                f"{row.share:.0%}",
                str(row.cores),
                "as now" if row.source is None else f"{format_bytes(row.source)}/s",
                f"{row.rate:.4g}",
                _epoch(row.epoch_s),
                f"{row.fetch_stall:.0%}",
                f"{row.prep_stall:.0%}",
            ]
        )
    return aligned(cells)


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
    if result.model is not None:
        yield f"model: {result.model}, error {result.model_error or 0.0:.1%}"
    yield from _advice(profile, result)


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
            "next: measure again on an idle node, with more --iters; or copy the files into the"
            " tiers first (monarch warm), or a part of them that fits"
        )


def _cores(profile: Profile) -> str:
    model, _ = model_of(profile)
    if model is None:
        return "give the loader more cores and workers"
    used = min(model.workers, model.cores)
    for cores in range(used, _MOST_CORES):
        if model.with_cores(cores).rate(1.0) * model.training_s > 1 - TOLERANCE:
            return (
                f"the loader needs {cores} cores, and as many workers; it uses {used} of the"
                f" {profile.cores} cores"
            )
    return f"not even {_MOST_CORES} cores prepare as fast as this job trains: prepare in advance"


def _read(file: Path) -> Profile:
    try:
        return profiles.decode(file.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{escape_text(os.fspath(file))} cannot be used: {error}") from error


def _mountpoint(place: Path | None) -> str:
    """The mount at or above ``place``, or the only one of this node. Raises NotMountedError."""
    found = [
        os.fspath(mount.mount_point) for mount in mount_table() if mount.kind == "fuse.monarch"
    ]
    if place is not None:
        real = os.path.realpath(place)
        above = [each for each in found if f"{real}/".startswith(f"{each.rstrip('/')}/")]
        if not above:
            raise NotMountedError(f"{escape_text(os.fspath(place))} is not in a mount of Monarch")
        return max(above, key=len)
    if len(found) != 1:
        which = ", ".join(map(escape_text, found)) or "none"
        raise NotMountedError(
            f"the job needs one mount of Monarch, and there are: {which}",
            hint="name it with --mount",
        )
    return found[0]


def _figures(mountpoint: str) -> dict[str, Any]:
    """The public figures of a mount. Raises NotMountedError if it gives none."""
    try:
        figures = json.loads(os.getxattr(mountpoint, _FIGURES))
    except OSError as error:
        raise NotMountedError(
            f"the mount {escape_text(mountpoint)} does not answer: {error.strerror}"
        ) from error
    return dict(figures)
