"""CheckFreq's overhead (FAST 2021) with the real ``Checkpointer``, a real disk and pauses as
iterations."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from monarch.frameworks.checkpoint import Checkpointer
from scripts.benchmark.rows import BenchError, Result, Row, measure

ITERATION_S, UPDATE_S = 0.016, 0.004
ITERATIONS = 100
STATE_BYTES = 16 << 20
# The share of the time that checkpoints may cost, and the bar, with the noise of the machine.
P, BAR = 0.035, 1.06


class Training:
    """One round; a directory of its own for the checkpoints of each training."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._state = {"weights": np.zeros(STATE_BYTES, np.uint8)}
        self._trainings = 0

    def plain(self) -> float:
        begin = time.perf_counter()
        for _ in range(ITERATIONS):
            time.sleep(ITERATION_S)
            time.sleep(UPDATE_S)
        return time.perf_counter() - begin

    def checkpointed(self) -> float:
        """The time of the training; the last checkpoint may still be written at its end."""
        self._trainings += 1
        directory = self._work / f"checkpoints{self._trainings}"
        with Checkpointer(directory, p=P) as checkpointer:
            begin = time.perf_counter()
            for _ in checkpointer.watch(range(ITERATIONS)):
                time.sleep(ITERATION_S)
                checkpointer.before_update()
                time.sleep(UPDATE_S)
                checkpointer.after_update(lambda: self._state)
            seconds = time.perf_counter() - begin
        if checkpointer.newest is None:
            raise BenchError("no checkpoint was saved")
        return seconds


def of_checkfreq(options: argparse.Namespace, work: Path) -> list[Result[Any]]:
    row = Row(
        f"time with checkpoints of {STATE_BYTES >> 20} MiB against none, {ITERATIONS} iterations",
        _ratio,
        "",
        bar=BAR,
        contender="CheckFreq",
        published="1.035 or less",
        how="run",
    )
    return measure([row], partial(Training, work), options.rounds)


def _ratio(training: Training) -> float:
    plain = training.plain()
    return training.checkpointed() / plain
