"""``monarch simulate``: the hits and the traffic of a job before it runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import click
import numpy as np

from monarch.analysis.formulas import HITS
from monarch.analysis.replay import POLICIES, Epoch, Order, Rates, replay, shuffled
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
from monarch.cli.output import progress_bar, remark, show
from monarch.cli.plots import PLOT, Line, draw, require_plot
from monarch.cli.recorded import Recorded, read, sampled
from monarch.cli.simulate_nodes import nodes
from monarch.errors import UsageError
from monarch.text import counted, escape_text, format_bytes

_DEFAULT_POLICIES = "no_evict,lru,fifo,random,belady"
_MOST_FILES = 200_000
_EPOCHS = 4
_MOST_COLUMNS = 8
_ORDERS = {
    "shuffled": "each in a new random order",
    "same": "each in the order of the names",
    "trace": "in the order of the trace",
}


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """``steady`` is the mean hit ratio from the third epoch on, or of the last epoch; ``formula``
    is what the closed form gives for it, None if there is none."""

    policy: str
    epochs: list[Epoch]
    steady: float
    formula: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """``share`` is the capacity relative to the bytes of all files. With a sample, the epochs have
    the files of the sample, and ``simulated_capacity_bytes`` is in proportion. ``recorded_hits``
    are those of the mount that the trace recorded, for each epoch."""

    file: str
    files: int
    bytes: int
    order: str
    seed: int
    capacity_bytes: int
    share: float
    simulated_files: int
    simulated_bytes: int
    simulated_capacity_bytes: int
    policies: list[PolicyOutcome]
    recorded_hits: list[int] | None


class _Simulate(click.Group):
    """A group whose first command needs no name: ``monarch simulate FILE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["policies", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(cmd_name, self.commands["policies"])


def _policies(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        what = f"no policy {unknown[0]!r}" if unknown else "no policy is named"
        raise click.BadParameter(f"{what}; there are {', '.join(POLICIES)}", context, parameter)
    return list(dict.fromkeys(names))


@click.group(cls=_Simulate)
def simulate() -> None:
    """Compute the hits and the traffic of a job before it runs.

    `monarch simulate FILE` replays the epochs of a job under several placement policies, as
    `monarch simulate policies FILE`. `monarch simulate nodes` computes what several nodes read from
    the source and from each other. Both use the code by which a mount decides (docs/planning.md).

    \b
    Examples:
      monarch simulate imagenet.snapshot --capacity 35%
      monarch simulate opens.jsonl.gz --capacity 800GiB --policies no_evict,lru
      monarch simulate nodes imagenet.snapshot --capacity 800GiB --nodes 1,2,4,8
    """


@simulate.command()
@click.argument("file", type=FILE, metavar="FILE")
@CAPACITY
@click.option(
    "--policies",
    "names",
    default=_DEFAULT_POLICIES,
    show_default=True,
    callback=_policies,
    metavar="NAMES",
    help=f"The policies to compare, of {', '.join(POLICIES)}.",
)
@EPOCHS
@click.option(
    "--order",
    type=click.Choice(list(_ORDERS)),
    help="The order of the opens in an epoch. Default: trace for a trace, else shuffled.",
)
@SEED
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    default=_MOST_FILES,
    show_default=True,
    metavar="N",
    help="Simulate a random sample of N files if there are more, with the capacity in proportion."
    " 0: simulate all files.",
)
@bandwidth(
    "--source-bandwidth",
    "source",
    help="Bytes that the source gives in a second, like 500MB. With --job-bandwidth, shows the"
    " time of an epoch.",
)
@bandwidth(
    "--job-bandwidth",
    "job",
    help="Bytes that the job uses in a second if it never waits, like 2GB.",
)
@JSON
@PLOT
def policies(
    file: Path,
    capacity: Capacity,
    names: list[str],
    epochs: int | None,
    order: str | None,
    seed: int,
    sample: int,
    source: float | None,
    job: float | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay the epochs of a job under several placement policies.

    FILE is a snapshot (monarch snapshot build) or a trace (monarch trace). The files of a snapshot
    are read once an epoch. Shown are the hits of each epoch, and of the later epochs the mean, what
    the closed form gives, and the bytes that are read from the source and copied into the tier.
    no_evict is the default of a mount; belady knows the whole order; fifo and random are for
    comparison only.

    \b
    Examples:
      monarch simulate imagenet.snapshot --capacity 35%
      monarch simulate opens.jsonl.gz --capacity 800GiB --policies no_evict,lru
      monarch simulate imagenet.snapshot --capacity 35% --epochs 10 -o hits.png
      monarch simulate imagenet.snapshot --capacity 50% --order same --policies \\
          no_evict,first_come --source-bandwidth 500MB --job-bandwidth 1GB
    """
    if (source is None) != (job is None):
        raise UsageError("--source-bandwidth and --job-bandwidth are needed together")
    require_plot(plot)
    rates = None if source is None or job is None else Rates(source, job)
    with progress_bar() as progress:
        found = read(file, progress)
        some = sampled(found, sample, seed) if sample else found
        orders = _orders(some, order, epochs, seed, escape_text(os.fspath(file)))
        total = found.files.bytes
        capacity_bytes = capacity.of(total)
        scaled = int(Fraction(capacity_bytes * some.files.bytes, total))
        is_shuffled = _is_shuffled(orders, len(some.files))
        opens = len(names) * sum(len(each) for each in orders)
        done = 0

        def on_opens(count: int) -> None:
            nonlocal done
            done += count
            progress(done, opens, f"simulating {name}")

        outcomes = []
        for name in names:
            rows = replay(
                name, some.files, orders, scaled, seed=seed, rates=rates, on_opens=on_opens
            )
            formula = HITS.get(name) if is_shuffled else None
            outcomes.append(_outcome_of(name, list(rows), formula, capacity_bytes / total))
    outcome = Outcome(
        file=os.fspath(file),
        files=len(found.files),
        bytes=total,
        order=order or ("shuffled" if found.orders is None else "trace"),
        seed=seed,
        capacity_bytes=capacity_bytes,
        share=capacity_bytes / total,
        simulated_files=len(some.files),
        simulated_bytes=some.files.bytes,
        simulated_capacity_bytes=scaled,
        policies=outcomes,
        recorded_hits=some.hits[: len(orders)] if some.hits and order in (None, "trace") else None,
    )
    if found.lost or found.is_cut_off:
        remark(f"monarch: {escape_text(os.fspath(file))}: {_missing(found)}")
    try:
        show(outcome, as_json, *_lines(outcome))
    finally:
        if plot is not None:
            _plot(outcome, plot)


simulate.add_command(nodes)


def _orders(
    found: Recorded, order: str | None, epochs: int | None, seed: int, name: str
) -> list[Order]:
    """The opens of each epoch. Raises UsageError if there are none of this kind."""
    count = len(found.files)
    recorded = found.orders
    if order is None:
        order = "shuffled" if recorded is None else "trace"
    if order == "shuffled":
        return shuffled(count, epochs or _EPOCHS, seed)
    if order == "same":
        return [np.arange(count)] * (epochs or _EPOCHS)
    if recorded is None:
        raise UsageError(f"{name} is a snapshot, which has no order of opens", hint="give a trace")
    if epochs is not None and epochs > len(recorded):
        raise UsageError(
            f"{name} has {counted(len(recorded), 'epoch', 'epochs')}, not {epochs}",
            hint="--order shuffled reads its files in any number of epochs",
        )
    return recorded[:epochs]


def _outcome_of(
    name: str, rows: list[Epoch], formula: Callable[[float], float] | None, share: float
) -> PolicyOutcome:
    steady = float(np.mean([row.hits / max(1, row.opens) for row in _steady(rows)]))
    return PolicyOutcome(name, rows, steady, None if formula is None else formula(share))


def _is_shuffled(orders: Sequence[Order], files: int) -> bool:
    """Whether each epoch opens each file once, and not in the order of the epoch before."""
    whole = all(len(order) == files == len(np.unique(order)) for order in orders)
    return whole and not any(
        np.array_equal(one, other) for one, other in itertools.pairwise(orders)
    )


def _steady(rows: Sequence[Epoch]) -> Sequence[Epoch]:
    """The epochs from the third on: the first fills the tier, the second begins with what a part of
    the first left."""
    return rows[2:] or rows[-1:]


def _missing(found: Recorded) -> str:
    lost = f"{counted(found.lost, 'open was', 'opens were')} lost when it was recorded"
    cut_off = "the trace was cut off"
    return "; ".join([lost] * bool(found.lost) + [cut_off] * found.is_cut_off)


# -- output ----------------------------------------------------------------------------------------


def _lines(outcome: Outcome) -> list[str]:
    number = len(outcome.policies[0].epochs)
    shown = min(number, _MOST_COLUMNS)
    first = [
        f"{counted(outcome.files, 'file', 'files')}, {format_bytes(outcome.bytes)}:"
        f" {escape_text(outcome.file)}",
        f"{counted(number, 'epoch', 'epochs')}, {_ORDERS[outcome.order]}; the tier holds"
        f" {format_bytes(outcome.capacity_bytes)}, {outcome.share:.1%} of the bytes",
    ]
    if outcome.simulated_files < outcome.files:
        first.append(
            f"simulated with a random sample of {outcome.simulated_files:,} files; bytes are scaled"
        )
    is_timed = outcome.policies[0].epochs[0].seconds is not None
    later = "later" if number > 2 else f"epoch {number}"
    columns = ["hits", "formula", "source", "copied", *(["time"] if is_timed else [])]
    rows = [
        ["", *["hits"] * shown, *[later] * len(columns)],
        ["policy", *(f"epoch {each + 1}" for each in range(shown)), *columns],
    ]
    if outcome.recorded_hits is not None:
        opens = [row.opens for row in outcome.policies[0].epochs]
        ratios = map(_ratio, outcome.recorded_hits[:shown], opens)
        rows.append(["(recorded)", *ratios, *[""] * len(columns)])
    rows += [_row(outcome, each, shown) for each in outcome.policies]
    note = ["", "later: the mean of the epochs from the third on"] if number > 2 else []
    return [*first, "", *aligned(rows), *note]


def _row(outcome: Outcome, each: PolicyOutcome, shown: int) -> list[str]:
    steady = _steady(each.epochs)
    scale = outcome.bytes / outcome.simulated_bytes
    seconds = [row.seconds for row in steady if row.seconds is not None]
    return [
        each.policy,
        *(_ratio(row.hits, row.opens) for row in each.epochs[:shown]),
        f"{each.steady:.1%}",
        "-" if each.formula is None else f"{each.formula:.1%}",
        format_bytes(scale * float(np.mean([row.bytes - row.hit_bytes for row in steady]))),
        format_bytes(scale * float(np.mean([row.copied_bytes for row in steady]))),
        *([time_text(scale * float(np.mean(seconds)))] if seconds else []),
    ]


def _ratio(hits: int, opens: int) -> str:
    return f"{hits / max(1, opens):.1%}"


def _plot(outcome: Outcome, path: Path) -> None:
    lines = []
    for colour, each in enumerate(outcome.policies):
        points = [
            (number, 100 * row.hits / max(1, row.opens))
            for number, row in enumerate(each.epochs, 1)
        ]
        lines.append(Line(each.policy, points, colour))
        if each.formula is not None and len(points) > 1:
            level = 100 * each.formula
            ends = [(2.0, level), (float(len(points)), level)]
            lines.append(Line(f"{each.policy}, formula", ends, colour, is_formula=True))
    title = f"{outcome.files:,} files, {_ORDERS[outcome.order]}; capacity {outcome.share:.1%}"
    draw(path, title, lines, x_label="epoch", y_label="hits, % of the opens")
