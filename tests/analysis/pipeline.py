"""A job and its loader in virtual time: workers that fetch and prepare, or stages that do.

Samples have exact times; only whether a sample is a hit is drawn. The source serves one fetch at a
time. Samples are started in the order of the epoch, and trained on in that order.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

# Samples before the measurement, and those measured.
_BEFORE, _MEASURED = 200, 1800
# Samples that a worker may be ahead of the training.
_AHEAD = 32


@dataclass(frozen=True)
class Job:
    """Rates in samples/s: ``source`` and ``tier`` of one fetch, ``prep`` of one core, ``training``
    of the GPU."""

    source: float
    tier: float
    prep: float
    training: float
    workers: int
    cores: int = 8

    def fetches(self, share: float) -> Iterator[tuple[bool, float]]:
        """Whether each sample is a hit, and the time of its fetch."""
        draw = random.Random(1).random
        while True:
            is_hit = draw() < share
            yield is_hit, 1 / (self.tier if is_hit else self.source)


def serial_workers(job: Job, share: float) -> float:
    """The rate of a job whose workers fetch a sample, and then prepare it."""
    free = [0.0] * job.workers
    cores = [0.0] * job.cores
    source_free = trained = 0.0
    ends: list[float] = []
    fetches = job.fetches(share)
    for number in range(_BEFORE + _MEASURED):
        begin = heapq.heappop(free)
        ahead = number - _AHEAD * job.workers
        if ahead >= 0:
            begin = max(begin, ends[ahead])
        is_hit, fetch_s = next(fetches)
        fetched = (begin if is_hit else max(begin, source_free)) + fetch_s
        if not is_hit:
            source_free = fetched
        prepared = max(fetched, heapq.heappop(cores)) + 1 / job.prep
        heapq.heappush(cores, prepared)
        heapq.heappush(free, prepared)
        trained = max(trained, prepared) + 1 / job.training
        ends.append(trained)
    return _MEASURED / (ends[-1] - ends[_BEFORE - 1])


def stages(job: Job, share: float) -> float:
    """The rate of a job whose loader fetches in one stage, and prepares in another."""
    cores = [0.0] * min(job.workers, job.cores)
    fetched = trained = 0.0
    ends: list[float] = []
    fetches = job.fetches(share)
    for number in range(_BEFORE + _MEASURED):
        ahead = number - _AHEAD * job.workers
        fetched = max(fetched, ends[ahead] if ahead >= 0 else 0.0) + next(fetches)[1]
        prepared = max(fetched, heapq.heappop(cores)) + 1 / job.prep
        heapq.heappush(cores, prepared)
        trained = max(trained, prepared) + 1 / job.training
        ends.append(trained)
    return _MEASURED / (ends[-1] - ends[_BEFORE - 1])
