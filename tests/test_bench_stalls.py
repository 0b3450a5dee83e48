"""The rows of the benchmark of analyses, from profiles that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.benchmark import stalls
from scripts.benchmark.options import parsed
from scripts.benchmark.rows import BenchError, measure


class FakeBench:
    """Profiles by the limit of the source, and the fetch stall with the advised tier."""

    def __init__(self, fast: str, slow: str, left: float, tier: int | None = 500) -> None:
        self._verdicts = {0: fast, stalls.SLOW_MB_S: slow}
        self._left = left
        self._tier = tier
        self.asked: list[tuple[int, int]] = []

    def whole(self) -> int:
        return 1000

    def profile(self, *, limit: int, capacity: int) -> dict[str, Any]:
        self.asked.append((limit, capacity))
        shares = [{"rate": 4.0, "fetch_stall": 0.6}]
        result = {"verdict": self._verdicts[limit], "shares": shares, "smallest_tier": self._tier}
        return {"result": result}

    def stall(self, *, limit: int, capacity: int) -> float:
        self.asked.append((limit, capacity))
        return self._left


def verdicts(bench: Any) -> list[str]:
    results = measure(stalls.rows(), lambda: stalls.Lab(bench), 3)
    return [result.verdict for result in results]


def test_a_job_must_be_called_what_it_is_and_the_advice_must_help() -> None:
    bench = FakeBench("prep-bound", "fetch-bound", 0.02)
    assert verdicts(bench) == ["good", "good", "", "good"]
    # Each profile is measured once a round.
    assert bench.asked == [(0, 1000), (20, 1000), (20, 500)] * 3
    assert verdicts(FakeBench("unsure", "prep-bound", 0.1)) == ["missed", "missed", "", "missed"]


def test_an_analysis_without_advice_is_an_error() -> None:
    with pytest.raises(BenchError, match="names no size"):
        verdicts(FakeBench("prep-bound", "fetch-bound", 0.1, tier=None))
    assert parsed(["stalls", "--quick"]).files == 1200
