"""Jobs of several real processes, over gloo, that save and restore together."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch.frameworks.checkpoint import list_checkpoints
from monarch.frameworks.group import directory_of

# With --soak one rank is killed at many calls of its storage.
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


class Jobs:
    """Each of ranks.py, one after the other."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.frameworks.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(self, work: str, *arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """The result of each rank, or its error."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps({"work": work, "arguments": arguments}) + "\n")
        self._server.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self._server.stdout.readline())
        return answers

    def results(self, work: str, *arguments: dict[str, Any]) -> list[Any]:
        answers = self.run(work, *arguments)
        assert [each for each in answers if "result" not in each] == []
        return [each["result"] for each in answers]

    def close(self) -> None:
        self._server.communicate(timeout=60)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    started = Jobs()
    yield started
    started.close()


@pytest.mark.promise(162)
def test_four_ranks_of_which_one_is_killed_continue_with_a_step_that_all_have(
    jobs: Jobs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (expected, *_) = jobs.results(
        "train", *[{"directory": str(tmp_path / "whole"), "steps": 12}] * 4
    )
    soak = request.config.getoption("--soak")
    killed = 0
    for at in range(4, 60, 5) if soak else (20,):
        directory = tmp_path / str(at)
        ranks: list[dict[str, Any]] = [{"directory": str(directory), "steps": 12} for _ in range(4)]
        ranks[2]["kill_at_call"] = at
        ended = jobs.run("train", *ranks)
        if ended[2].get("error") != "SIGKILL":
            continue
        killed += 1
        # The others do not wait for ever.
        assert all("error" in each for each in ended)
        del ranks[2]["kill_at_call"]
        results = jobs.results("train", *ranks)
        assert len({each["begun"] for each in results}) == 1
        assert {json.dumps(each["weights"]) for each in results} == {
            json.dumps(expected["weights"])
        }
        steps = {
            tuple(each.checkpoint.step for each in list_checkpoints(directory_of(directory, rank)))
            for rank in range(4)
        }
        assert len(steps) == 1 and steps.pop()[0] == 12
    assert killed >= (8 if soak else 1)


def close_to(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    return one.keys() == other.keys() and all(
        np.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one
    )


@pytest.mark.finding("W14")
@pytest.mark.promise(163)
def test_a_model_of_which_each_rank_has_a_part_is_restored_by_any_number_of_ranks(
    jobs: Jobs, tmp_path: Path
) -> None:
    def sharded(directory: str, ranks: int, **options: Any) -> list[dict[str, Any]]:
        arguments = {"directory": str(tmp_path / directory), **options}
        return jobs.results("sharded", *[arguments] * ranks)

    (expected, *_) = sharded("whole", 4, steps=8)
    assert expected["begun"] == 0 and len(expected["left"]) == 4 * 4
    (half, *_) = sharded("run", 4, steps=4)
    # Rows are not divided evenly by these, and some ranks have none of them.
    for ranks in (3, 5):
        shutil.copytree(tmp_path / "run", tmp_path / str(ranks))
        results = sharded(str(ranks), ranks, steps=8)
        for each in results:
            assert each["begun"] == 4
            # Bit for bit what was saved, each number at its place.
            assert each["found"] == half["left"]
            assert close_to(each["left"], expected["left"])
    # What they saved is restored by as many ranks, and by one that has the whole model.
    assert [each["found"] for each in sharded("5", 5, steps=8)] == [results[0]["left"]] * 5
    (alone,) = sharded("5", 1, steps=8, full=True)
    assert alone["found"] == results[0]["left"]
    # In two replicas of two parts each, and back.
    results = sharded("5", 4, steps=10, replicas=2)
    assert [each["begun"] for each in results] == [8] * 4
    assert all(each["found"] == alone["found"] for each in results)
    (again, *_) = sharded("5", 3, steps=10)
    assert again["found"] == results[0]["left"]


@pytest.mark.finding("W14")
@pytest.mark.promise(163)
def test_a_value_that_cannot_be_saved_is_reported_at_the_first_update(
    jobs: Jobs, tmp_path: Path
) -> None:
    answers = jobs.run(
        "sharded", *[{"directory": str(tmp_path / "a"), "steps": 1, "grouped": False}]
    )
    assert "each rank has a part of its parameters" in answers[0]["error"]
    for results in jobs.results("tensor_parallel", *[{"directory": str(tmp_path / "b")}] * 4):
        assert "cannot hold a DTensor that is placed as _StridedShard" in results
