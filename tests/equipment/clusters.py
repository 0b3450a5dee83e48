"""Jobs and servers as those of Synergy (Mohan et al., OSDI 2022), section 5 of its paper."""

from __future__ import annotations

import itertools
import math
import random

from monarch.analysis.allocation import Allocation, Server
from monarch.analysis.sensitivity import Job, Option

GB = 10**9
# The grid of Synergy's profiles, and its four servers.
CORES = (1, 2, 3, 4, 5, 6, 9, 12, 24)
TIERS = (20.83, 62.5, 125, 187.5, 250)
SERVERS = [Server(f"s{number}", 8, 24, 500 * GB) for number in range(4)]


def options(
    speedup: float, cores: int, data: float = 140, at_fair: float = 1.3
) -> tuple[Option, ...]:
    """Rates relative to 3 cores and 62.5 GB: they saturate at ``speedup`` with ``cores``. ``data``
    is the size of the data set in GB; the source allows ``at_fair`` with 62.5 GB."""
    exponent = math.log(speedup) / math.log(cores / 3)
    found = []
    for each, tier in itertools.product(CORES, TIERS):
        missing = 1 - min(1.0, tier / data)
        by_source = at_fair * (1 - 62.5 / data) / missing if missing else math.inf
        rate = min(speedup, (each / 3) ** exponent, by_source)
        found.append(Option(each, int(tier * GB), rate, 0))
    return tuple(found)


# Where the jobs of Synergy saturate (seeds 5.2), read off its matrices.
KINDS = {
    "image": [
        options(2.94, 12),
        options(2.89, 12),
        options(2.4, 9),
        options(1.55, 6, at_fair=1.6),
        options(1.15, 4, at_fair=2),
    ],
    "language": [tuple(Option(c, int(t * GB), 1, 0) for c in CORES for t in TIERS)],
    "speech": [options(2.5, 6, data=200, at_fair=1)],
}


def mixed(weights: tuple[int, int, int], seed: int, count: int = 32) -> list[Job]:
    chosen = random.Random(f"{weights} {seed}")
    kinds = chosen.choices(list(KINDS), weights, k=count)
    return [Job(f"j{n:02}", 1, chosen.choice(KINDS[kind])) for n, kind in enumerate(kinds)]


def speedups(found: Allocation) -> list[float]:
    return [grant.option.rate / grant.fair.rate for grant in found.grants]
