"""Kills a trainer at every call that its checkpoints make: ``python crashing.py DIRECTORY``.

For each call one child process saves three checkpoints and dies at the call. Then a new trainer
continues with the directory. Prints the number of calls; an exit code other than 0 is a failure.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

from monarch.frameworks import store
from monarch.frameworks.checkpoint import Checkpointer
from tests.frameworks.faulty import Faulty, weights

STEPS = (10, 20, 30)


def train(directory: Path, done: int) -> None:
    """Saves each step; a byte to ``done`` tells that one is on storage."""
    with Checkpointer(directory, keep_last=2) as checkpointer:
        for step in STEPS:
            checkpointer.step = step
            checkpointer.save(weights(step))
            os.write(done, b".")


def check(directory: Path, acknowledged: int) -> None:
    with Checkpointer(directory, keep_last=2) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        assert step >= STEPS[acknowledged - 1] if acknowledged else step in (0, STEPS[0]), step
        if restored:
            assert restored.state["step"] == step
            assert (restored.state["w"] == step).all()
        # The run continues, and in the end only the kept files are there.
        for further in (50, 60):
            checkpointer.step = further
            checkpointer.save(weights(further))
    left = sorted(path.name for path in directory.iterdir())
    assert [name.split("-")[1] for name in left if name.endswith("ckpt")] == [
        "00000050",
        "00000060",
    ]
    assert len(left) == 4, left


def main(root: Path) -> None:
    warnings.simplefilter("error")
    at = 0
    while True:
        at += 1
        directory = root / str(at)
        acknowledgements, done = os.pipe()
        pid = os.fork()
        if not pid:
            # Nothing of this process's own end may run in the child.
            try:
                store.os = Faulty(at=at)  # type: ignore[assignment]
                train(directory, done)
            finally:
                os._exit(0)
        os.close(done)
        acknowledged = len(os.read(acknowledgements, 100)) if os.waitpid(pid, 0)[1] else None
        os.close(acknowledgements)
        if acknowledged is None:
            break
        check(directory, acknowledged)
        shutil.rmtree(directory)
    print(at - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
