"""``monarch simulate nodes``: what the nodes of a job read from the source and from each other."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from monarch.analysis.nodes import Expected, NodesEpoch, Rates, expected, simulate_nodes
from monarch.analysis.replay import Files
from monarch.cli.daemon_call import JSON
from monarch.cli.options import (
    CAPACITY,
    EPOCHS,
    FILE,
    SEED,
    Capacity,
    aligned,
    bandwidth,
    time_text,
)
from monarch.cli.output import progress_bar, show
from monarch.cli.plots import PLOT, Line, draw, require_plot
from monarch.cli.recorded import MOST_BYTES, read
from monarch.errors import UsageError
from monarch.peers.members import listed, slurm_members
from monarch.peers.ownership import MOST_MEMBERS, Member
from monarch.text import counted, format_bytes, parse_bytes

_EPOCHS = 4
# The arrays of an epoch take about 100 bytes a file.
_MOST_FILES = 20_000_000
# Inode numbers of a parallel file system are large and consecutive.
_FIRST_KEY = 1 << 57

Names = list[str]


@dataclass(frozen=True, slots=True)
class NodesOutcome:
    """``expected`` are the closed forms for an epoch after the first one."""

    members: Names
    capacity_bytes: int
    epochs: list[NodesEpoch]
    expected: Expected


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rates are in bytes a second; ``job`` is None if the job never waits for its own work."""

    files: int
    bytes: int
    seed: int
    source: float
    network: float
    tier: float
    job: float | None
    ahead: int
    lost: dict[int, int]
    runs: list[NodesOutcome]


def _nodes(context: click.Context, parameter: click.Parameter, value: str) -> list[Names]:
    """The names of the nodes of each run."""
    if value == "slurm":
        return [[str(member) for member in slurm_members(os.environ)]]
    if re.fullmatch(r"[0-9.,\s]+", value) is None:
        return [[str(member) for member in listed(value)]]
    try:
        counts = _counts([part.strip() for part in value.split(",")])
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return [[f"node{number}" for number in range(count)] for count in counts]


def _counts(parts: list[str]) -> list[int]:
    """``1,2,4,...,64`` as numbers: dots continue by the factor of the two numbers before them, if
    it is whole, or else by their difference. Raises ValueError."""
    counts: list[int] = []
    is_open = False
    for part in parts:
        if part == "..." and len(counts) > 1 and not is_open:
            is_open = True
            continue
        if not part.isdigit() or not 1 <= int(part[:9]) <= MOST_MEMBERS:
            raise ValueError(
                f"{part!r} is no number of nodes from 1 to {MOST_MEMBERS:,}; write it like 4, or"
                " like 1,2,4,...,64"
            )
        end = int(part[:9])
        if is_open:
            before, last = counts[-2:]
            if last <= before or end <= last:
                raise ValueError("numbers of nodes around ... must rise, as in 1,2,4,...,64")
            factor = last // before if last % before == 0 else 1
            while (last := last * factor if factor > 1 else last + counts[1] - counts[0]) < end:
                counts.append(last)
            is_open = False
        counts.append(end)
    if is_open:
        raise ValueError("no number of nodes comes after ...")
    return counts


def _lost(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, int]:
    lost: dict[int, int] = {}
    for value in values:
        match = re.fullmatch(r"([0-9]{1,6})@([0-9]{1,4})", value)
        if match is None or not int(match[1]) or not int(match[2]) or int(match[2]) in lost:
            raise click.BadParameter(
                f"{value!r} is not written as NODES@EPOCH, such as 1@2, once for each epoch",
                context,
                parameter,
            )
        lost[int(match[2])] = int(match[1])
    return lost


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


@click.command(short_help="Compute what several nodes read from the source and each other.")
@click.argument("snapshot", required=False, type=FILE, metavar="[FILE]")
@click.option(
    "--files",
    "count",
    type=click.IntRange(1, _MOST_FILES),
    metavar="N",
    help="Instead of FILE: N files of --size.",
)
@click.option("--size", callback=_size, metavar="SIZE", help="The size of each file, like 110KB.")
@CAPACITY
@click.option(
    "--nodes",
    "runs",
    default="1,2,4,...,64",
    show_default=True,
    callback=_nodes,
    metavar="NUMBERS|LIST|slurm",
    help="Numbers of nodes, to be simulated one after the other; or the names of the nodes, like"
    " n[01-16]; or slurm, for the nodes of the Slurm job of this shell.",
)
@bandwidth(
    "--source-bandwidth",
    "source",
    default="5GB",
    help="Bytes that the source gives all nodes together in a second.",
)
@bandwidth(
    "--network",
    default="10GB",
    help="Bytes that the network of a node carries in a second, in each direction.",
)
@bandwidth(
    "--tier-bandwidth",
    "tier",
    default="5GB",
    help="Bytes that the tier of a node gives in a second.",
)
@bandwidth(
    "--job-bandwidth",
    "job",
    help="Bytes that the job on one node uses in a second if it never waits.",
)
@click.option(
    "--ahead",
    type=click.IntRange(1, _MOST_FILES),
    default=512,
    show_default=True,
    metavar="N",
    help="Files that the loader of a node reads in advance of the training.",
)
@EPOCHS
@click.option(
    "--lose",
    "lost",
    multiple=True,
    callback=_lost,
    metavar="NODES@EPOCH",
    help="NODES nodes fail in the middle of this epoch, and the others read the rest.",
)
@SEED
@JSON
@PLOT
def nodes(
    snapshot: Path | None,
    count: int | None,
    size: int | None,
    capacity: Capacity,
    runs: list[Names],
    source: float,
    network: float,
    tier: float,
    job: float | None,
    ahead: int,
    epochs: int | None,
    lost: dict[int, int],
    seed: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Compute what nodes that share their tiers read from the source and from each other.

    FILE is a snapshot or a trace, whose files are read in a new random order each epoch. One node,
    the owner, keeps a file. Times are virtual: the slowest of the source, the network, the tiers
    and the job decides, and a request costs nothing but its bytes. The formulas are for an epoch
    after the first one. For comparison: no cache (all is read from the source), alone (each node
    keeps files for itself), and local (each node has all files).

    \b
    Examples:
      monarch simulate nodes imagenet.snapshot --capacity 800GiB --nodes 1,2,4,...,1024
      monarch simulate nodes --files 1281167 --size 110KB --capacity 10% --nodes 4,8,16
      monarch simulate nodes imagenet.snapshot --capacity 30% --nodes 4 --lose 1@2
      monarch simulate nodes imagenet.snapshot --capacity 800GiB --nodes slurm -o nodes.png
    """
    epochs = epochs or _EPOCHS
    _require_sense(snapshot, count, size, runs, epochs, lost)
    require_plot(plot)
    rates = Rates(source, network, tier, math.inf if job is None else job, ahead)
    with progress_bar() as progress:
        if snapshot is not None:
            files = read(snapshot, progress).files
        else:
            keys = np.arange(_FIRST_KEY, _FIRST_KEY + (count or 0)).astype(np.uint64)
            files = Files(np.full(len(keys), size or 0, np.int64), keys)
        capacity_bytes = capacity.of(files.bytes)
        outcomes = []
        for done, names in enumerate(runs):
            rows = []
            members = [Member(name) for name in names]
            for epoch in simulate_nodes(
                files, members, capacity_bytes, rates, epochs=epochs, seed=seed, lost=lost
            ):
                rows.append(epoch)
                what = counted(len(names), "node", "nodes")
                progress(done * epochs + len(rows), len(runs) * epochs, f"simulating {what}")
            closed = expected(files.bytes, len(names), capacity_bytes, rates)
            outcomes.append(NodesOutcome(names, capacity_bytes, rows, closed))
    outcome = Outcome(
        len(files), files.bytes, seed, source, network, tier, job, ahead, lost, outcomes
    )
    try:
        lines = _by_epoch(outcome) if lost else _by_nodes(outcome)
        show(outcome, as_json, *_head(outcome), *lines)
    finally:
        if plot is not None:
            _plot(outcome, plot)


def _require_sense(
    snapshot: Path | None,
    count: int | None,
    size: int | None,
    runs: list[Names],
    epochs: int,
    lost: dict[int, int],
) -> None:
    """Raises UsageError for options that do not fit together."""
    if (snapshot is None) == (count is None):
        raise UsageError("either FILE or --files with --size is needed")
    if (count is None) != (size is None) or size == 0:
        raise UsageError("--files and --size are needed together, and the size must not be 0")
    if count is not None and size is not None and count * size >= MOST_BYTES:
        raise UsageError(f"--files and --size are of at most {format_bytes(MOST_BYTES)} together")
    late = [epoch for epoch in lost if epoch > epochs]
    if late:
        raise UsageError(f"--lose names epoch {late[0]}, and there are {epochs}")
    fewest = min(len(names) for names in runs)
    if sum(lost.values()) >= fewest:
        raise UsageError(f"with --lose no node of {fewest} would be left")


# -- output ----------------------------------------------------------------------------------------


def _head(outcome: Outcome) -> list[str]:
    job = "" if outcome.job is None else f", the job {format_bytes(outcome.job)}/s"
    capacity = outcome.runs[0].capacity_bytes
    return [
        f"{counted(outcome.files, 'file', 'files')}, {format_bytes(outcome.bytes)}; the tier of a"
        f" node holds {format_bytes(capacity)}, {capacity / outcome.bytes:.1%} of the bytes",
        f"source {format_bytes(outcome.source)}/s; each node: network"
        f" {format_bytes(outcome.network)}/s, tier {format_bytes(outcome.tier)}/s{job}",
        "",
    ]


def _by_nodes(outcome: Outcome) -> list[str]:
    """A line for each number of nodes."""
    last = f"epoch {len(outcome.runs[0].epochs)}"
    rows = [
        ["", "", *["source"] * 3, *["peers"] * 2, *["time"] * 6],
        ["nodes", "cached", "epoch 1", last, "formula", last, "formula"]
        + ["epoch 1", last, "formula", "no cache", "alone", "local"],
    ]
    for run in outcome.runs:
        first, later, closed = run.epochs[0], run.epochs[-1], run.expected
        count = len(run.members)
        read = (first.source_bytes, later.source_bytes, closed.source_bytes)
        received = (later.remote_bytes / count, closed.remote_bytes / count)
        times = (first.seconds, later.seconds, closed.seconds)
        compared = (closed.source_s, closed.alone_s, closed.local_s)
        rows.append(
            [
                f"{count:,}",
                f"{closed.cached:.1%}",
                *map(format_bytes, (*read, *received)),
                *map(time_text, (*times, *compared)),
            ]
        )
    note = "source: read by all nodes; peers: received by one node"
    return [*aligned(rows), "", note]


def _by_epoch(outcome: Outcome) -> list[str]:
    """A line for each epoch, where nodes fail."""
    rows = [
        ["", "", "source", "source", "own tier", "peers", ""],
        ["epoch", "nodes", "opens", "bytes", "bytes", "bytes", "time"],
    ]
    for run in outcome.runs:
        for number, epoch in enumerate(run.epochs, 1):
            read = (epoch.source_bytes, epoch.local_bytes, epoch.remote_bytes)
            rows.append(
                [
                    str(number),
                    f"{epoch.nodes:,}",
                    f"{epoch.source_opens:,}",
                    *map(format_bytes, read),
                    time_text(epoch.seconds),
                ]
            )
    return aligned(rows)


def _plot(outcome: Outcome, path: Path) -> None:
    by_nodes = [(float(len(run.members)), run) for run in outcome.runs]
    lines = [
        Line("no cache", [(x, run.expected.source_s) for x, run in by_nodes], 3, is_formula=True),
        Line("alone", [(x, run.expected.alone_s) for x, run in by_nodes], 1, is_formula=True),
        Line("shared, first epoch", [(x, run.epochs[0].seconds) for x, run in by_nodes], 0),
        Line("shared, last epoch", [(x, run.epochs[-1].seconds) for x, run in by_nodes], 2),
        Line("formula", [(x, run.expected.seconds) for x, run in by_nodes], 2, is_formula=True),
        Line("local", [(x, run.expected.local_s) for x, run in by_nodes], 7, is_formula=True),
    ]
    capacity = outcome.runs[0].capacity_bytes / outcome.bytes
    title = f"{outcome.files:,} files, {format_bytes(outcome.bytes)}; tier of a node {capacity:.1%}"
    draw(path, title, lines, x_label="nodes", y_label="seconds an epoch", is_logarithmic=True)
