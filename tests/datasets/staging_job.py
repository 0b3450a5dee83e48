"""A training job of the tests of the staging area, as a process of its own.

It writes a line for each event to its log: P (begins to prepare batch b of epoch e), U (uses a
batch, with the ids in it), H (waits until the file ``go`` exists), and at the end D (the number of
batches it prepared, of expulsions, of descriptors that it had before and has after, and the figures
of the area).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from monarch.datasets.staging import StagingArea

SIZE = 8


class Job:
    """``stop`` is ``[event, n]``: the job waits in its n-th preparation (P) or use (U). Without
    ``closes`` it does not close the area."""

    def __init__(self, root: Path, name: str, options: dict[str, Any]) -> None:
        self._go = root / f"{name}.go"
        self._options = options
        self._seen = {"P": 0, "U": 0}
        self._log = os.open(root / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._directory = root / "area"

    def run(self) -> None:
        before = _descriptors()
        area = StagingArea("test", directory=self._directory, **self._options["area"])
        for epoch in range(self._options["epochs"]):
            batches = area.epoch(epoch, self._options["count"], lambda b, e=epoch: self._make(e, b))
            for batch in batches:
                assert isinstance(batch, dict)
                assert batch["epoch"] == epoch
                self._note("U", *batch["ids"].tolist())
        if self._options["closes"]:
            area.close()
        del batch, batches
        gc.collect()
        report = area.report
        figures = (report.most_kept, report.published)
        self._note("D", area.prepared, area.expulsions, before, _descriptors(), *figures)

    def _make(self, epoch: int, number: int) -> dict[str, npt.NDArray[Any]]:
        self._note("P", epoch, number)
        ids = np.arange(number * SIZE, (number + 1) * SIZE)
        return {"ids": ids, "epoch": np.array(epoch), "pixels": np.ones((SIZE, 3, 7), np.float32)}

    def _note(self, event: str, *numbers: int) -> None:
        os.write(self._log, f"{event} {' '.join(map(str, numbers))}\n".encode())
        if event not in self._seen:
            return
        self._seen[event] += 1
        if [event, self._seen[event]] == self._options.get("stop"):
            os.write(self._log, b"H\n")
            while not self._go.exists():
                time.sleep(0.005)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Job(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])).run()
