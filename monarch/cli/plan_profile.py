"""``monarch plan profile``: measures how the rate of a job depends on its cores and its tier."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from monarch import __version__
from monarch.analysis import profile as profiles
from monarch.analysis.loader_model import JobModel
from monarch.analysis.plan import Phase, RunReport
from monarch.analysis.profile import Profile, model_of, result_of
from monarch.analysis.sensitivity import (
    FullTier,
    Sensitivity,
    WithoutTier,
    job_of,
    next_cores,
    optimistic,
    verified,
)
from monarch.analysis.stalls import LEAST_HITS, Rate, Run, rate_of
from monarch.cli.analyze import UNSURE
from monarch.cli.daemon_call import JSON
from monarch.cli.job_runs import JobRuns, Measure
from monarch.cli.measured_mount import (
    COMMAND,
    ITERS,
    MOST_ITERS,
    PLACE,
    WARMUP,
    MeasuredMount,
    limit_of,
    measured_mount,
    most_batches,
)
from monarch.cli.options import Capacity, bandwidth, counts_of
from monarch.cli.output import progress_bar, remark
from monarch.cli.sensitivity_file import GPUS, OUTPUT, TIERS, write_matrix
from monarch.cli.written_files import or_unchanged, require_writable
from monarch.errors import MonarchError, UsageError
from monarch.text import counted, escape_text, format_bytes
from monarch.types import Progress

# A computed rate that differs more from the measured one is not to be used.
_MOST_ERROR = 0.10
_COUNTS = ("hits", "misses")


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  monarch plan profile resnet18 -o resnet18.json -- python train.py
  monarch plan profile resnet18 --cores 2,4,8 --verify 2 -o resnet18.json -- python train.py
  monarch plan profile bert --gpus 2 --source 200MB/s -o bert.json -- ./train.sh
""",
)
@click.argument("job", metavar="JOB")
@click.option(
    "--cores",
    callback=counts_of,
    metavar="LIST",
    help="The numbers of cores to measure. Default: from all on, half as many while that costs at"
    " most a tenth of the rate, then one less for each GPU.",
)
@TIERS
@GPUS
@ITERS
@MOST_ITERS
@WARMUP
@click.option(
    "--repeat",
    type=click.IntRange(1, 100),
    default=2,
    show_default=True,
    metavar="N",
    help="How often each rate is measured.",
)
@bandwidth(
    "--source",
    "limit",
    help="Measure as if the source gave at most RATE, like 200MB/s; at least 1MiB/s.",
)
@PLACE
@click.option(
    "--verify",
    "checks",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    metavar="K",
    help="Measure also K of the computed rates, and show how far they were from it.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Which rates --verify chooses.",
)
@OUTPUT
@JSON
@COMMAND
def profile(
    job: str,
    cores: list[int],
    tiers: list[Capacity],
    gpus: int,
    iters: int,
    most_iters: int | None,
    warmup: int,
    repeat: int,
    limit: float | None,
    place: Path | None,
    checks: int,
    seed: int,
    output: Path,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Measure how the rate of JOB depends on its cores and on the size of its tier.

    Only the rates with all files in the tier are measured, with a few numbers of cores, those of
    the job without a tier with the most and the fewest cores, and that of the training alone. The
    other rates are computed by the model of the loader that describes them (docs/planning.md).

    The loop of the script must be over monarch.watch(loader). The cores of its processes on this
    node are limited as by taskset; those that `srun` starts are not. The exit code is 15 if runs
    differ too much, if the tiers do not hold the files, or if a computed rate that was verified
    differs from the measured one by more than a tenth.
    """
    most = most_batches(iters, most_iters)
    source_limit, mount = limit_of(limit), measured_mount(place)
    _require_sense(job, cores, gpus)
    require_writable(output)
    runs = JobRuns(command, mount.mountpoint, iters, warmup, source_limit, most)
    with or_unchanged(output), progress_bar(quiet=as_json) as advance, runs.begun() as measure:
        measured = _Measurements(measure, advance)
        _measure(measured, cores, gpus, repeat)
        base = measured.profile(mount, command, iters, warmup, source_limit)
        model, _ = model_of(base)
        if model is None:
            raise MonarchError(
                "nothing can be computed: the job reads the same share of the files from the tiers"
                " in all runs",
                hint="copy the files into the tiers first (monarch warm)",
            )
        # Whole bytes: a tier of 100 % holds all.
        total = int(result_of(base).epoch_bytes)
        sizes = {tier.of(total) for tier in tiers}
        full = {each: measured.full(each, model) for each in measured.cores()}
        found = optimistic(
            job, gpus, model, full, measured.without_tier(), total=total, tiers=[*sizes]
        )
        rates = {
            (number, size): measured.rate("real", size / total, number, repeat)
            for number, size in _chosen(found, checks, seed)
        }
    if rates:
        found = verified(found, rates, total=total, batch_bytes=model.batch_bytes)
    try:
        job_of(found)
    except ValueError as error:
        raise MonarchError(f"{escape_text(job)}: {error}") from error
    write_matrix(found, output, "batches", as_json, *_checked(found))
    troubles = [*measured.troubles(), *_errors(found)]
    for trouble in troubles:
        remark(f"monarch: {trouble}")
    return UNSURE if troubles else 0


def _require_sense(job: str, cores: Sequence[int], gpus: int) -> None:
    """Raises UsageError for what cannot be measured here."""
    if not job.isprintable() or not 1 <= len(job) <= 200:
        raise UsageError("JOB is not a short name")
    usable = len(os.sched_getaffinity(0))
    if max(cores, default=0) > usable:
        raise UsageError(f"--cores: {max(cores)} cores are not here; this process may use {usable}")
    few = [each for each in cores or [usable] if each < gpus or (cores and each % gpus)]
    if few:
        raise UsageError(
            f"{counted(few[0], 'core is', 'cores are')} not as many for each of"
            f" {counted(gpus, 'GPU', 'GPUs')}"
        )


def _measure(measured: _Measurements, cores: Sequence[int], gpus: int, repeat: int) -> None:
    """Measures the rates that the others are computed from."""
    most = max(cores, default=0) or len(os.sched_getaffinity(0)) // gpus * gpus
    measured.rate("cached", 1.0, most, repeat)
    measured.rate("real", 0.0, most, repeat)
    measured.rate("synthetic", 1.0, most, repeat)
    rates = {most: measured.rate("cached", 1.0, most, 0)}
    named = iter(sorted(set(cores) - {most}, reverse=True))
    while (fewer := next(named, None) if cores else next_cores(rates, gpus)) is not None:
        rates[fewer] = measured.rate("cached", 1.0, fewer, repeat)
    # A source that is slow for one worker may be as slow for all together, or not.
    if min(rates) != most:
        measured.rate("real", 0.0, min(rates), repeat)


def _chosen(found: Sensitivity, count: int, seed: int) -> list[tuple[int, int]]:
    """The cores and the tier of some computed rates."""
    computed = [
        (cores, size)
        for cores, row in zip(found.cores, found.measured, strict=True)
        for size, is_measured in zip(found.tier_bytes, row, strict=True)
        if not is_measured
    ]
    return random.Random(seed).sample(computed, min(count, len(computed)))


@dataclass
class _Measurements:
    """The runs of a job so far, by phase, share of the files in the tiers, and cores."""

    _run: Measure
    _advance: Progress
    _reports: dict[tuple[Phase, float, int], list[RunReport]] = field(default_factory=dict)
    _begun_ns: int = field(default_factory=time.time_ns)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def rate(self, phase: Phase, share: float, cores: int, repeat: int) -> float:
        """The batches/s of all runs of this kind, of which ``repeat`` are made now. While these
        differ too much, up to as many others follow, each in place of the earliest one."""
        reports = self._reports.setdefault((phase, share, cores), [])
        for number in range(2 * repeat):
            if number >= repeat:
                if not _train_rate(reports).trouble(phase):
                    break
                del reports[0]
            of = "" if phase == "synthetic" else f", {share:.0%} from the tiers"
            words = f"runs: {phase}{of}, {counted(cores, 'core', 'cores')}"
            self._advance(next(self._number), None, words)
            reports.append(self._run(phase, share, cores))
        return _train_rate(reports).per_s

    def cores(self) -> list[int]:
        """The numbers of cores with which the job was measured with all files in the tiers."""
        return [cores for phase, _, cores in self._reports if phase == "cached"]

    def full(self, cores: int, model: JobModel) -> FullTier:
        """The job with all files in the tiers."""
        reports = self._reports["cached", 1.0, cores]
        load = _load_rate(reports)
        last = reports[-1]
        workers = last.workers or (cores if last.in_stages else 1)
        return FullTier(
            self.rate("cached", 1.0, cores, 0), load, 1 if model.kind == "inline" else workers
        )

    def without_tier(self) -> dict[int, WithoutTier]:
        """The loader without a tier, for the numbers of cores with which it was measured."""
        found = {}
        for (phase, share, cores), reports in self._reports.items():
            if phase == "real" and share == 0:
                hits, misses = (sum(getattr(each, name) for each in reports) for name in _COUNTS)
                rate = self.rate(phase, share, cores, 0)
                load = _load_rate(reports)
                found[cores] = WithoutTier(rate, load, hits / (hits + misses) if misses else 0.0)
        return found

    def profile(
        self,
        mount: MeasuredMount,
        command: Sequence[str],
        iterations: int,
        warmup: int,
        source_limit: int,
    ) -> Profile:
        """The runs on the most cores, as `monarch analyze run` would have measured them."""
        most = max(self.cores())
        return Profile(
            monarch_profile=profiles.VERSION,
            monarch=__version__,
            host=socket.gethostname(),
            cores=most,
            started_ns=self._begun_ns,
            command=list(command),
            mountpoint=mount.mountpoint,
            data_bytes=mount.data_bytes,
            tier_bytes=mount.tier_bytes,
            source_limit=source_limit,
            iterations=iterations,
            warmup=warmup,
            runs=[
                Run(phase, share, number, report)
                for (phase, share, cores), reports in self._reports.items()
                if cores == most
                for number, report in enumerate(reports)
            ],
        )

    def troubles(self) -> Iterator[str]:
        """Why the rates are not to be used."""
        for (phase, share, cores), reports in self._reports.items():
            used = counted(cores, "core", "cores")
            name = f"the run {phase!r} with {share:.0%} from the tiers and {used}"
            if trouble := _train_rate(reports).trouble(name):
                yield f"the rates are unsure: {trouble}"
            hits = sum(each.hits for each in reports)
            opens = hits + sum(each.misses for each in reports)
            if phase == "cached" and opens and hits < LEAST_HITS * opens:
                yield (
                    f"the rates are unsure: the tiers served only {hits / opens:.0%} of the opens"
                    f" of {name}; copy the files first (monarch warm)"
                )


def _train_rate(reports: Sequence[RunReport]) -> Rate:
    return rate_of([each.train_rates() for each in reports])


def _load_rate(reports: Sequence[RunReport]) -> float:
    return rate_of([each.load_rates() for each in reports]).per_s


def _checked(found: Sensitivity) -> Iterator[str]:
    """A line for each rate that was verified."""
    for each in found.verified:
        yield (
            f"verified: {counted(each.cores, 'core', 'cores')}, tier"
            f" {format_bytes(each.tier_bytes)}: computed {each.computed:.3g}, measured"
            f" {each.measured:.3g}, error {each.error:.1%}"
        )


def _errors(found: Sensitivity) -> Iterator[str]:
    worst = max((each.error for each in found.verified), default=0.0)
    if worst > _MOST_ERROR:
        yield (
            f"the computed rates are not to be used: one is wrong by {worst:.0%}; measure them"
            " all (--verify 1000)"
        )
