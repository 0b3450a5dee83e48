"""The matrix that follows from few measurements, compared with all of them in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch.analysis.sensitivity import sensitivity_of
from tests.analysis.pipeline import Job, serial_workers, stages

FILES, SIZE = 1000, 100
CORES = (1, 2, 4)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SOURCE = 400.0


def job(cores: int) -> Job:
    return Job(source=SOURCE, tier=20_000.0, prep=300.0, training=1e6, workers=cores, cores=cores)


def errors(
    truth: Callable[[Job, float], float], hits: Callable[[float], float] = lambda share: share
) -> list[float]:
    """The relative error of each rate. ``hits`` are those that a tier with room for a share of the
    files has; the matrix takes them for this share, as with ``no_evict``."""
    found = sensitivity_of(
        "job",
        1,
        {cores: truth(job(cores), 1.0) for cores in CORES},
        files=FILES,
        total=FILES * SIZE,
        source=SOURCE * SIZE,
        tiers=[int(share * FILES * SIZE) for share in SHARES],
    )
    return [
        abs(rate / truth(job(cores), hits(share)) - 1)
        for cores, row in zip(found.cores, found.rates, strict=True)
        for share, rate in zip(SHARES, row, strict=True)
    ]


def test_the_matrix_errs_by_at_most_five_percent_if_stages_fetch_and_prepare() -> None:
    assert max(errors(stages)) < 0.05


@pytest.mark.parametrize(
    ("truth", "hits"),
    [(serial_workers, lambda share: share), (stages, lambda share: share if share == 1 else 0.0)],
)
def test_the_matrix_errs_if_its_assumptions_do_not_hold(
    truth: Callable[[Job, float], float], hits: Callable[[float], float]
) -> None:
    """A worker that fetches does not prepare meanwhile, or the tier evicts what is read next, as
    ``lru`` does for an order that is the same in each epoch."""
    assert max(errors(truth, hits)) > 0.25
