"""What a measured job would do with other tiers, cores, sources, nodes and packs.

The rate on one node is that of the model of the job (loader_model.py). On several nodes, which
share their tiers, each node trains on an equal part of the files: the arithmetic of a partitioned
cache (nodes.py) gives the bytes from its own tier, from other nodes and from the source. What
neither the profile nor an option says is unknown, and nothing is predicted from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from monarch.analysis.formulas import partitioned
from monarch.analysis.loader_model import JobModel
from monarch.analysis.nodes import Rates, expected

# Why a rate is unknown, and how it becomes known.
NO_SOURCE = "what the source gives several nodes together; name it with --source"
NO_NETWORK = "the bandwidth of the network of a node; name it with --network"
NO_BYTES = "the bytes of a batch: no measured run has read files from the source"
NO_CHUNKS = "how fast the source gives large chunks; name it with --pack RATE"


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured job: its ``model`` on one node, the bytes that an epoch reads, and the batches of
    an epoch, None if that is not known."""

    model: JobModel
    epoch_bytes: float
    epoch_batches: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """A tier of ``tier`` bytes on each of ``nodes``, a loader with ``cores`` on each node, a source
    that gives at most ``source`` bytes/s to all nodes together (None: as when it was measured), and
    at most ``network`` bytes/s into and out of each node (None: not known).

    ``pack``: the files are in a pack. The source then gives chunks at ``chunks`` bytes/s, None: not
    known."""

    tier: int
    cores: int
    source: float | None = None
    nodes: int = 1
    network: float | None = None
    pack: bool = False
    chunks: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A prediction. ``share`` of the files are in the tiers of all nodes together. ``rate`` is that
    of all nodes, in batches/s; None if it is unknown, for the reason in ``unknown``. The stalls are
    shares of the time of the job: waiting for files, from wherever, and for prepared batches."""

    tier: int
    share: float
    cores: int
    source: float | None
    nodes: int
    pack: bool
    rate: float | None
    epoch_s: float | None
    fetch_stall: float | None
    prep_stall: float | None
    unknown: str = ""


def changes(
    model: JobModel,
    *,
    tiers: Sequence[int],
    cores: Sequence[int] = (),
    sources: Sequence[float] = (),
    nodes: Sequence[int] = (),
    network: float | None = None,
    packs: Sequence[float | None] = (),
) -> Iterator[Change]:
    """Every combination, of which the last one varies first. With ``packs`` each is shown without a
    pack and with one, whose chunks come at such a rate."""
    variants: list[tuple[bool, float | None]] = [(False, None), *((True, each) for each in packs)]
    choices = product(tiers, cores or (model.cores,), sources or (None,), nodes or (1,), variants)
    for tier, number, source, count, (pack, chunks) in choices:
        yield Change(tier, number, source, count, network, pack, chunks)


def predicted(job: Measured, change: Change) -> Row:
    """The job after a change."""
    shares = partitioned(change.tier / job.epoch_bytes, change.nodes)
    unknown = _unknown(job, change, remote=shares.remote, source=shares.source)
    rate = fetch_stall = prep_stall = epoch_s = None
    if not unknown:
        model = _changed(job.model, change)
        cached = model.rate(1.0)
        of_node = _rate_of_node(job, model, change, 1 - shares.source)
        rate = of_node * change.nodes
        fetch_stall = max(0.0, 1 - of_node / cached)
        prep_stall = max(0.0, of_node / cached - of_node * model.training_s)
        epoch_s = None if job.epoch_batches is None else job.epoch_batches / rate
    return Row(
        tier=change.tier,
        share=1 - shares.source,
        cores=change.cores,
        source=change.source,
        nodes=change.nodes,
        pack=change.pack,
        rate=rate,
        epoch_s=epoch_s,
        fetch_stall=fetch_stall,
        prep_stall=prep_stall,
        unknown=unknown,
    )


def _unknown(job: Measured, change: Change, *, remote: float, source: float) -> str:
    """What must be known and is not; empty if all is."""
    reads_source, is_shared = source > 0, change.nodes > 1
    if (is_shared or (change.pack and reads_source)) and not job.model.batch_bytes:
        return NO_BYTES
    if change.pack and reads_source and change.chunks is None:
        return NO_CHUNKS
    if is_shared and reads_source and change.source is None and change.chunks is None:
        return NO_SOURCE
    if is_shared and remote > 0 and change.network is None:
        return NO_NETWORK
    return ""


def _changed(model: JobModel, change: Change) -> JobModel:
    """The model of a node after a change of its cores and its source."""
    if change.cores != model.cores:
        model = model.with_cores(change.cores)
    source = _source(change)
    if source == math.inf or not model.batch_bytes:
        return model
    # All nodes read alike, so each gets an equal part.
    return model.with_source(source / change.nodes)


def _source(change: Change) -> float:
    """The bytes/s that the source gives all nodes together, infinite without a limit."""
    limits = [each for each in (change.source, change.chunks) if each is not None]
    return min(limits, default=math.inf)


def _rate_of_node(job: Measured, model: JobModel, change: Change, share: float) -> float:
    """The batches/s of each node, if ``share`` of the files are in the tiers of all."""
    alone = model.rate(share)
    if change.nodes == 1:
        return alone
    # The tier of a node serves the others as fast as the network takes it.
    rates = Rates(
        source=_source(change),
        network=math.inf if change.network is None else change.network,
        tier=math.inf,
        job=alone * model.batch_bytes,
    )
    epoch = expected(round(job.epoch_bytes), change.nodes, change.tier, rates)
    return job.epoch_bytes / change.nodes / epoch.seconds / model.batch_bytes


def assumptions(model: JobModel, rows: Sequence[Row], cores: int) -> Iterator[str]:
    """What the predictions take for granted, a sentence each. ``cores`` were measured."""
    yield "the tiers keep a fixed share of the files (no_evict), and nothing is fetched ahead"
    if any(row.cores > cores for row in rows):
        yield f"with more cores than the {cores} measured: at most, if the source keeps up"
    if any(row.nodes > 1 for row in rows):
        yield (
            "several nodes: each trains on an equal part of the files and has a tier of this size,"
            " the nodes do not wait for one another, the source gives what is named to all of them"
            " together, each file is small enough to be shared (limits.inline_max), and a file of"
            " another node costs nothing but its bytes on the network"
        )
    if any(row.pack for row in rows):
        yield (
            "pack: the order is chunk by chunk, each chunk that does not fit crosses the network"
            " once an epoch, and opening its files costs nothing; in an order file by file the job"
            " is as fast as without a pack"
        )
    if model.source_limit:
        yield "the source was limited while the job was measured; its delay in a call was not"
    for why in sorted({row.unknown for row in rows if row.unknown}):
        yield f"unknown: {why}"
