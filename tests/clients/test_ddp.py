"""A data-parallel training on four hosts that share their caches, and on three after a failure."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import require_fuse
from tests.equipment import hosts
from tests.equipment.hosts import Hosts, address
from tests.equipment.waiting import wait_until
from tests.peers.lab import Lab, lab

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "programs" / "ddp.py"
NODES, SAMPLES, EPOCHS = 4, 96, 3
CHECKPOINTS = "ckpt"


class Training:
    """The process that has imported PyTorch and forks the ranks."""

    def __init__(self, network: Hosts) -> None:
        self._network = network
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def begin(self, places: Sequence[Path], **job: object) -> None:
        ranks = [
            {"namespace": str(self._network.namespace(number)), "place": str(place)}
            for number, place in enumerate(places, start=1)
        ]
        order = {
            "ranks": ranks,
            "epochs": EPOCHS,
            "latest": CHECKPOINTS,
            "meeting": address(1),
            **job,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        assert self._process.stdout is not None
        answers: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return answers

    def weights(self, places: Sequence[Path], **job: object) -> list[float]:
        """The weights of a training that all ranks end with the same ones."""
        self.begin(places, **job)
        answers = self.end()
        assert [each for each in answers if "weights" not in each] == []
        assert all(each == answers[0] for each in answers)
        found: list[float] = answers[0]["weights"]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def mount_all(job: Lab, nodes: int) -> list[Path]:
    for number in range(1, nodes + 1):
        job.mount(number, f"absorb={CHECKPOINTS}/**", "writeback.shared=true")
        # The other mounts write the same directories. A training that takes more than some seconds
        # also meets the next look of a mount at the names of others, which finds a new `latest`.
        job.commands[-1].allows_log("another mount|other mount|'ckpt/latest' changed at the source")
    return [mounted.path for mounted in job.nodes.values()]


@pytest.fixture
def network() -> Iterator[Hosts]:
    require_fuse()
    if reason := hosts.unavailable():
        pytest.skip(reason)
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    with Hosts(NODES) as made:
        yield made


def write_samples(root: Path) -> None:
    chance = Random(1)
    for number in range(SAMPLES):
        path = root / "data" / str(number % 3) / f"{number:03}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("8d", *(chance.gauss(0, 1) for _ in range(8))))
    (root / CHECKPOINTS).mkdir()


@pytest.mark.promise(313)
def test_a_training_continues_on_three_nodes_with_the_weights_of_an_undisturbed_one(
    network: Hosts, tmp_path: Path
) -> None:
    source, plain = tmp_path / "source", tmp_path / "plain"
    for root in (source, plain):
        write_samples(root)
    with ExitStack() as stack:
        training = Training(network)
        stack.callback(training.close)
        undisturbed = training.weights([plain] * NODES)
        with lab(tmp_path / "first", source, NODES, network) as first:
            stopped = tmp_path / "stopped"
            training.begin(mount_all(first, NODES), stop=EPOCHS, stopped=str(stopped))
            wait_until(stopped.exists, "a rank is in the middle of the last epoch", timeout_s=100)
            for number in first.nodes:
                assert first.peers(number)["files"] > 0, "copies of other nodes were read"
            # A node is lost: its rank and its daemon, with the engine.
            first.nodes[NODES].kill()
            os.kill(int(stopped.read_text()), signal.SIGKILL)
            assert all("error" in each for each in training.end())
        with lab(tmp_path / "second", source, NODES - 1, network) as second:
            found = training.weights(mount_all(second, NODES - 1))
        # The gradients of other numbers of ranks are added in another order.
        assert found == pytest.approx(undisturbed, rel=1e-9, abs=1e-12)
        # The last epoch was saved by the three nodes, and others can load it.
        assert (source / CHECKPOINTS / "latest").read_text() == str(EPOCHS)
        assert training.weights([source]) == found
