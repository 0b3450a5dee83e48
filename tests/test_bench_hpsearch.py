"""The benchmark of jobs that prepare batches together: its bars, and what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark import hpsearch
from scripts.benchmark.hpsearch import Measured
from scripts.benchmark.options import parsed
from scripts.benchmark.rows import BenchError, measure


class FakeBench:
    """Both sides take the same times in each round."""

    def __init__(self, shared: Measured, independent: Measured) -> None:
        self._times = {True: shared, False: independent}
        self.measured_sides: list[bool] = []

    def measured(self, *, shared: bool) -> Measured:
        self.measured_sides.append(shared)
        return self._times[shared]


def verdicts(shared: Measured, independent: Measured) -> list[str]:
    bench: Any = FakeBench(shared, independent)
    results = measure(hpsearch.rows(4), lambda: hpsearch.Lab(bench), 3)
    assert sorted(bench.measured_sides) == [False] * 3 + [True] * 3, "each once a round"
    return [result.verdict for result in results]


def test_shared_jobs_take_a_third_of_the_processor_time_and_half_of_the_time() -> None:
    assert verdicts(Measured(2.9, 4.9), Measured(10.0, 10.0)) == ["good", "good"]
    assert verdicts(Measured(3.1, 4.9), Measured(10.0, 10.0)) == ["missed", "good"]
    assert verdicts(Measured(2.9, 5.1), Measured(10.0, 10.0)) == ["good", "missed"]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hpsearch, "find_spec", lambda name: None if name == "torchvision" else 1)
    with pytest.raises(BenchError, match="torchvision is not installed; the extra bench-formats"):
        hpsearch.run(parsed(["hpsearch"]), tmp_path)
