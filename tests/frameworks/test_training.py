"""A training run that is killed again and again ends with the weights of an undisturbed run."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from monarch.frameworks.checkpoint import verify

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
CLASSES, EACH, EPOCHS, BATCH = 3, 31, 3, 8
UPDATES = EPOCHS * -(-CLASSES * EACH // BATCH)


# Programs, one after the other, each in a process that need not import PyTorch any more.
RUNS = """
import json, os, sys, torch
torch.optim.AdamW([torch.zeros(1)])
for directory, text in json.load(sys.stdin):
    pid = os.fork()
    if not pid:
        sys.argv = ["", directory]
        exec(text, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""


class Trainers:
    """Runs of trainer.py, one at a time."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.frameworks.trainer", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def start(self, *arguments: object) -> int:
        """The pid of the run."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([*map(str, arguments)]) + "\n")
        self._server.stdin.flush()
        return int(self.next_value("pid"))

    def next_value(self, *words: str) -> str:
        """What the next line says that begins with one of ``words``; ``ended`` is always one."""
        assert self._server.stdout is not None
        for line in self._server.stdout:
            word, _, rest = line.strip().partition(" ")
            if word in words or word == "ended":
                return rest if word in words else ""
        raise AssertionError("the trainers' parent is gone")

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        assert self._server.wait(60) == 0
        self._server.stdout.close()


@pytest.fixture
def trainers() -> Iterator[Trainers]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    started = Trainers()
    yield started
    started.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small JPEGs, a directory for each class."""
    from PIL import Image

    root = tmp_path_factory.mktemp("images")
    chance = np.random.default_rng(1)
    for label in range(CLASSES):
        (root / f"class-{label}").mkdir()
        for number in range(EACH):
            pixels = chance.integers(0, 150, (16, 16, 3)) + 50 * label
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(root / f"class-{label}" / f"{number}.JPEG")
    return root


def arrays(path: Path) -> dict[str, bytes]:
    with np.load(path) as file:
        return {name: file[name].tobytes() for name in file.files}


def test_a_killed_run_ends_with_the_same_weights_and_each_sample_used_once_an_epoch(
    trainers: Trainers,
    images: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    soak = request.config.getoption("--soak")
    kills = 30 if soak else 3
    chance = random.Random(1)
    if soak:
        request.node.add_marker(pytest.mark.timeout(600))

    def start(name: str) -> int:
        in_flight = chance.choice((1, 2))
        paths = (images, tmp_path / name, tmp_path / f"{name}.npz")
        options = ("--epochs", EPOCHS, "--batch", BATCH, "--every", 2, "--in-flight", in_flight)
        return trainers.start(*paths, *options)

    start("undisturbed")
    assert trainers.next_value("ended") == "0"
    killed = 0
    while killed < kills:
        pid = start("killed")
        begun = int(trainers.next_value("begins"))
        assert begun <= UPDATES
        if begun > UPDATES * (killed + 1) // (kills + 1):
            # Enough for now: at its beginning, or while it reads its checkpoint's data.
            last = begun
        else:
            last = begun + chance.randrange(0, 8)
        while begun < last and (step := trainers.next_value("update")):
            begun = int(step)
        time.sleep(chance.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        if trainers.next_value("ended") == "0":
            # It was over by then.
            break
        killed += 1
        assert {each.state for each in verify(tmp_path / "killed")} <= {"whole"}
    start("killed")
    assert trainers.next_value("ended") == "0"
    assert killed == kills
    expected, found = arrays(tmp_path / "undisturbed.npz"), arrays(tmp_path / "killed.npz")
    with np.load(tmp_path / "killed.npz") as file:
        assert (file["used"] == 1).all()
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_the_example_of_the_document_runs_and_continues(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    text = (ROOT / "docs" / "training.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (program,) = (example for example in examples if "Checkpointer(" in example)
    # The same with a crash in the middle of the second epoch.
    crash = "checkpointer.after_update(state)"
    assert crash in program
    crashing = program.replace(crash, f"{crash}; step == 30 and __import__('os')._exit(9)")
    runs = [(str(tmp_path / "a"), program), (str(tmp_path / "b"), crashing)]
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", RUNS],
        input=json.dumps([*runs, (str(tmp_path / "b"), program)]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stderr == ""
    undisturbed, ended, crashed, again, ended_again = done.stdout.splitlines()
    assert undisturbed.startswith("60 updates")
    assert (ended, crashed, ended_again) == ("ended 0", "ended 9", "ended 0")
    assert again == undisturbed
