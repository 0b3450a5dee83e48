"""Real programs save while they and the daemon are killed: acknowledged data must be there."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MonarchCommand
from tests.mount.command import needs_fuse

# How reads are served has nothing to do with it.
pytestmark = [
    needs_fuse,
    pytest.mark.frameworks,
    pytest.mark.modes("relay"),
    pytest.mark.timeout(900),
]

PROGRAM = Path(__file__).parent / "programs" / "saving.py"
PROGRAMS = (
    *("lightning", "huggingface", "distributed", "sqlite", "sqlite-wal"),
    *("git", "hdf5", "tensorboard"),
)
# Modules that the programs import.
NEEDED = ("torch", "safetensors", "tensorboard", "h5py")


class Saving:
    """The process that runs the programs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, do: str, **order: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        texts = {
            name: str(each) if isinstance(each, Path) else each for name, each in order.items()
        }
        self._process.stdin.write(json.dumps({"do": do, **texts}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def saving() -> Iterator[Saving]:
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    started = Saving()
    yield started
    started.close()


@pytest.mark.promise(67)
@pytest.mark.parametrize("program", PROGRAMS)
def test_saves_that_a_program_saw_succeed_survive_a_kill_of_program_and_daemon(
    saving: Saving,
    monarch: MonarchCommand,
    source: Path,
    program: str,
    request: pytest.FixtureRequest,
) -> None:
    kills = 20 if request.config.getoption("--soak") else 1
    chance = random.Random(program)
    acks = monarch.directory / "acks"
    acks.touch()
    # The drain may have brought it, and others of the journal's changes, before it could note so.
    monarch.allows_log("does not fit|changed at the source since the snapshot")

    def mount() -> Path:
        options = ["absorb=run/**"]
        return monarch.mount(source, tiers={"fast": "256MiB"}, options=options).path / "run"

    def acknowledged() -> int:
        return acks.read_text().count("\n")

    directory = mount()
    for _ in range(kills):
        wanted = acknowledged() + chance.randrange(2, 9)
        group = saving.ask("work", program=program, directory=directory, acks=acks)
        deadline = time.monotonic() + 100
        while acknowledged() < wanted:
            assert time.monotonic() < deadline, f"{program} does not get on"
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)
        if chance.random() < 0.5:
            monarch.mounted[-1].kill()
            saving.ask("kill", group=group)
        else:
            saving.ask("kill", group=group)
            monarch.mounted[-1].kill()
        directory = mount()
        assert saving.ask("check", program=program, directory=directory, acks=acks) == ""
    monarch.mounted[-1].umount()
    assert saving.ask("check", program=program, directory=source / "run", acks=acks) == ""
