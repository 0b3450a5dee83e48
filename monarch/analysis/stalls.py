"""Where a training job waits: stalls by the difference of three runs, and a verdict.

Run 1 trains on batches in memory, run 2 with all files in the tiers, run 3 with a share of them.
With T1, T2 and T3 the times of a batch, the prep stall is T2 - T1 and the fetch stall T3 - T2
(Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, VLDB 2021). Timers in the
script cannot distinguish them. Only waiting that the training does not hide counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Literal, TypeAlias

from monarch.analysis.plan import LEAST_S, Phase, RunReport

Verdict: TypeAlias = Literal["fetch-bound", "prep-bound", "gpu-bound", "unsure"]

# A rate whose windows differ more, or that changed more between the rounds, is not used.
MOST_CV = 0.10
MOST_DRIFT = 0.10
# A run is measured until its windows differ by at most this share of the limits above: the windows
# of several runs differ more than those of one.
_PART_OF_RUN = 0.5
# A job that waits for less than this share of its time is bound by the training.
LEAST_STALL = 0.05
# With fewer hits among its opens, run 2 was not served by the tiers.
LEAST_HITS = 0.98


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run of the job: its phase, the share of files that the tiers might serve, the
    round to which it belongs, and its report."""

    phase: Phase
    share: float
    round: int
    report: RunReport


@dataclass(frozen=True, slots=True)
class Rate:
    """``per_s`` is the median of the rates of all windows, in batches/s; ``cv`` their coefficient
    of variation; ``drift`` the difference between the earlier and the later rounds, as a share of
    the rate."""

    per_s: float
    cv: float
    drift: float

    @property
    def batch_s(self) -> float:
        """The time of a batch in seconds."""
        return 1 / self.per_s

    def trouble(self, name: str) -> str:
        """Why the rate is not to be used; empty if it is."""
        if self.cv > MOST_CV:
            return f"the windows of {name} differ by {self.cv:.0%} (CV), more than {MOST_CV:.0%}"
        if self.drift > MOST_DRIFT:
            return f"the rate of {name} changed by {self.drift:.0%} between the rounds"
        return ""


@dataclass(frozen=True, slots=True)
class Share:
    """The measurements with a share of the files in the tiers.

    ``asked`` is the share that was asked for, ``hits`` the share of the opens that the tiers have
    served. ``train`` is the rate of the job, ``load`` that of its loader alone.
    """

    asked: float
    hits: float
    train: Rate
    load: Rate


@dataclass(frozen=True, slots=True)
class Stalls:
    """The shares of the time of the job that it waits for prepared batches and for fetched
    bytes."""

    prep: float
    fetch: float


@dataclass(frozen=True, slots=True)
class Measured:
    """``synthetic`` is the rate of the training alone, ``cached`` run 2, ``real`` the runs 3,
    the smallest share first. All rates are in batches/s."""

    synthetic: Rate
    cached: Share
    real: list[Share]


def rate_of(rates: Sequence[Sequence[float]]) -> Rate:
    """The rate of windows, whose rates are given by round. One round alone is divided in its middle
    to find a drift. Raises ValueError if there is no window."""
    every = [rate for each in rates for rate in each]
    if not every:
        raise ValueError("no window was measured")
    parts = rates if len(rates) > 1 else [[rate] for rate in every]
    half = len(parts) // 2
    middle = median(every)
    drift = 0.0
    if half:
        earlier, later = (
            median([rate for each in some for rate in each])
            for some in (parts[:half], parts[-half:])
        )
        drift = abs(earlier - later) / middle
    return Rate(middle, pstdev(every) / fmean(every), drift)


def agree(windows_s: Sequence[float]) -> bool:
    """Whether the windows of one run, which took so long, differ little enough for its end."""
    if min(windows_s) < LEAST_S:
        return True
    rate = rate_of([[1 / seconds for seconds in windows_s]])
    return rate.cv <= MOST_CV * _PART_OF_RUN and rate.drift <= MOST_DRIFT * _PART_OF_RUN


def measured(runs: Sequence[Run]) -> Measured:
    """The rates of all runs. Raises ValueError if a phase was not measured."""
    by_phase: dict[tuple[Phase, float], list[Run]] = {}
    if not all(0 <= run.share <= 1 and run.report.is_possible() for run in runs):
        raise ValueError("a run has a number out of its range")
    for run in sorted(runs, key=lambda run: run.round):
        by_phase.setdefault((run.phase, run.share), []).append(run)
    cached = [of for (phase, _), of in by_phase.items() if phase == "cached"]
    synthetic = [of for (phase, _), of in by_phase.items() if phase == "synthetic"]
    real = [of for (phase, _), of in sorted(by_phase.items()) if phase == "real"]
    if not (cached and synthetic and real):
        raise ValueError("not all phases were measured")
    return Measured(
        synthetic=rate_of([run.report.train_rates() for run in synthetic[0]]),
        cached=_share(cached[0]),
        real=[_share(of) for of in real],
    )


def _share(runs: Sequence[Run]) -> Share:
    asked = runs[0].share
    hits = sum(run.report.hits for run in runs)
    opens = hits + sum(run.report.misses for run in runs)
    return Share(
        asked=asked,
        # A job that keeps its files open has no opens while it is measured.
        hits=hits / opens if opens else asked,
        train=rate_of([run.report.train_rates() for run in runs]),
        load=rate_of([run.report.load_rates() for run in runs]),
    )


def stalls_of(t1_s: float, t2_s: float, t3_s: float) -> Stalls:
    """The stalls as shares of ``t3_s``, from the times of a batch in the three runs. If run 2 is
    longer than run 3, that is noise, and it counts as ``t3_s``: no job waits for more than its
    time."""
    prep = max(0.0, min(t2_s, t3_s) - t1_s) / t3_s
    return Stalls(prep=prep, fetch=max(0.0, t3_s - t2_s) / t3_s)


def stalls_with(found: Measured, share: Share) -> Stalls:
    """The stalls of the job with ``share`` of its files in the tiers."""
    return stalls_of(found.synthetic.batch_s, found.cached.train.batch_s, share.train.batch_s)


def troubles_of(found: Measured, shares: Sequence[Share]) -> Iterator[str]:
    """Why the rates of the training alone, of run 2, or with one of ``shares`` are not to be
    used."""
    named = [
        (found.synthetic, "the run on batches in memory"),
        (found.cached.train, "the run from the tiers"),
        *((each.train, f"the run with {each.asked:.0%} from the tiers") for each in shares),
    ]
    return filter(None, (rate.trouble(name) for rate, name in named))


def trouble_in(runs: Sequence[Run]) -> str:
    """Why a rate of these runs is not to be used; empty if all may be. Raises ValueError if a phase
    was not measured."""
    found = measured(runs)
    return next(troubles_of(found, found.real), "")


def last_rounds(runs: Sequence[Run], rounds: int) -> list[Run]:
    """The runs of the last ``rounds`` rounds."""
    first = max(run.round for run in runs) - rounds
    return [run for run in runs if run.round > first]


def verdict_on(found: Measured, share: Share) -> tuple[Verdict, str]:
    """What bounds the job with ``share`` of its files in the tiers, and the reason in words.

    There is no verdict if a rate cannot be used, or if run 2 was not served by the tiers and might
    therefore hide that the fetch stall is the larger one.
    """
    stalls = stalls_with(found, share)
    waits = f"it waits {stalls.fetch:.0%} of its time for files and {stalls.prep:.0%} for"
    waits += " prepared batches"
    if trouble := next(troubles_of(found, [share]), ""):
        return "unsure", trouble
    if found.cached.train.per_s > found.synthetic.per_s * (1 + MOST_DRIFT):
        return "unsure", "it trained faster on files than on batches in memory"
    is_served = found.cached.hits >= LEAST_HITS
    if stalls.prep + stalls.fetch < LEAST_STALL:
        return "gpu-bound", waits
    if stalls.fetch > stalls.prep:
        return "fetch-bound", waits if is_served else f"at least: {waits}"
    if is_served:
        return "prep-bound", waits
    return "unsure", (
        f"only {found.cached.hits:.0%} of the opens of the run from the tiers were served by them,"
        " so waiting for files counts as waiting for prepared batches"
    )
