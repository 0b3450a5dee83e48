"""``monarch analyze whatif``: what would help a measured job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import click

from monarch.analysis.loader_model import JobModel
from monarch.analysis.profile import model_of, result_of
from monarch.analysis.whatif import Measured, Row, assumptions, changes, predicted
from monarch.cli.daemon_call import JSON
from monarch.cli.options import aligned, bandwidth, counts_of, listed, parse_rate
from monarch.cli.output import duration, show
from monarch.cli.profile_file import PROFILE, read_profile
from monarch.errors import MonarchError, UsageError
from monarch.peers.ownership import MOST_MEMBERS
from monarch.text import format_bytes, parse_bytes

# The shares of the files in a tier that are shown without --tier.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# The value of --pack without a rate.
_UNKNOWN = "unknown"
# The most rows of the table.
_MOST_ROWS = 10_000


def _chunk_rates(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> list[float | None]:
    if value == _UNKNOWN:
        return [None]
    return [float(each) for each in listed(parse_rate)(context, parameter, value)]


@click.command(
    epilog="""\b
Examples:
  monarch analyze whatif profile.json --tier 100GiB,200GiB,400GiB
  monarch analyze whatif profile.json --cores 4,8,16 --source 500MB/s
  monarch analyze whatif profile.json --nodes 1,2,4 --source 2GB/s --network 10GB/s
  monarch analyze whatif profile.json --tier 1TB --pack 800MB/s --json
"""
)
@PROFILE
@click.option(
    "--tier",
    "tiers",
    callback=listed(parse_bytes),
    metavar="LIST",
    help="Sizes of the tiers of a node.",
)
@click.option(
    "--cores",
    callback=counts_of,
    metavar="LIST",
    help="Numbers of cores of a node, with at least as many workers of the loader.",
)
@click.option(
    "--source",
    "sources",
    callback=listed(parse_rate),
    metavar="LIST",
    help="Rates that the source gives all nodes together, like 1GB/s.",
)
@click.option(
    "--nodes", callback=counts_of, metavar="LIST", help="Numbers of nodes that share their tiers."
)
@bandwidth(
    "--network", "network", help="Rate of the network into a node and out of it, like 10GB/s."
)
@click.option(
    "--pack",
    "packs",
    is_flag=False,
    flag_value=_UNKNOWN,
    callback=_chunk_rates,
    metavar="[LIST]",
    help="Show also the job with a pack of its files. Rates at which the source gives large chunks"
    " to all nodes together, as `monarch pack` shows them.",
)
@JSON
def whatif(
    file: Path,
    tiers: list[int],
    cores: list[int],
    sources: list[int],
    nodes: list[int],
    network: float | None,
    packs: list[float | None],
    as_json: bool,
) -> None:
    """Predict the rate of a job with other tiers, cores, sources, nodes and packs.

    The prediction is that of the model that describes the measured runs best, and the table has
    its error in these runs. What it takes for granted is listed below the table. What neither the
    profile nor an option says is unknown, and nothing is predicted from it.
    """
    profile = read_profile(file)
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
    if nodes and max(nodes) > MOST_MEMBERS:
        raise UsageError(f"--nodes: at most {MOST_MEMBERS:,} nodes can share their tiers")
    job = Measured(model, result.epoch_bytes, result.epoch_batches)
    combinations = changes(
        model,
        tiers=tiers or [round(share * result.epoch_bytes) for share in _SHARES],
        cores=cores,
        sources=sources,
        nodes=nodes,
        network=network,
        packs=packs,
    )
    asked = list(islice(combinations, _MOST_ROWS + 1))
    if len(asked) > _MOST_ROWS:
        raise UsageError(
            f"these are more than {_MOST_ROWS:,} predictions", hint="name fewer values"
        )
    rows = [predicted(job, each) for each in asked]
    error = result.model_error or 0.0
    taken = [*assumptions(model, rows, profile.cores)]
    document = {
        "model": model.kind,
        "model_error": error,
        "assumptions": taken,
        "rows": [asdict(row) for row in rows],
    }
    lines = [*_table(model, rows), "", f"model: {model.kind}, error {error:.1%} in the measured"]
    lines[-1] += " runs"
    show(document, as_json, *lines, *taken)


def _table(model: JobModel, rows: Sequence[Row]) -> list[str]:
    is_shared, is_packed = any(row.nodes > 1 for row in rows), any(row.pack for row in rows)
    head = ["tier", "of data", "cores", "source", "batches/s", "epoch", "fetch stall", "prep stall"]
    cells = [[*(["nodes"] if is_shared else []), *(["files"] if is_packed else []), *head]]
    for row in rows:
        first = [f"{row.nodes:,}"] if is_shared else []
        if is_packed:
            first.append("pack" if row.pack else "plain")
        cells.append(
            [
                *first,
                format_bytes(row.tier),
                f"{row.share:.0%}",
                str(row.cores),
                "as now" if row.source is None else f"{format_bytes(row.source)}/s",
                *_figures(row),
            ]
        )
    return aligned(cells)


def _figures(row: Row) -> list[str]:
    if row.rate is None or row.fetch_stall is None or row.prep_stall is None:
        return [_UNKNOWN, *["-"] * 3]
    epoch = "-" if row.epoch_s is None else duration(row.epoch_s)
    return [f"{row.rate:.4g}", epoch, f"{row.fetch_stall:.0%}", f"{row.prep_stall:.0%}"]
