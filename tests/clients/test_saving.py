"""Real programs save while they and the daemon are killed: acknowledged data must be there."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MonarchCommand
from tests.equipment.remounted import WAYS, WRITABLE, Remounts, rotated, small_disk
from tests.equipment.remounts import KINDS, Others
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
# They sync what they have saved, before they say so.
SYNCING = ("huggingface", "distributed", "sqlite", "sqlite-wal")
# What others do at last to the directories at the source.
_WITH_OTHERS = ("rename", "file", "remove", "link")
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


@pytest.fixture
def has_disk(tmp_path: Path) -> Iterator[bool]:
    """Whether the tier is on a disk that can be full. Name it before ``monarch``."""
    with small_disk(tmp_path) as is_made:
        yield is_made


class Run:
    """A program that saves into the directory ``run`` of one mount after another."""

    def __init__(self, saving: Saving, remounts: Remounts, program: str, scratch: Path) -> None:
        self._saving = saving
        self._remounts = remounts
        self._program = program
        self._scratch = scratch
        self._chance = random.Random(program)
        self._acks = scratch / "acks"
        self._acks.touch()

    def _acknowledged(self) -> int:
        return self._acks.read_text().count("\n")

    def work_and_be_killed(self, *, first: bool) -> None:
        """Save a few times; then the program is killed, and behind it or ``first`` the daemon."""
        wanted = self._acknowledged() + self._chance.randrange(2, 9)
        directory = self._remounts.path / "run"
        group = self._saving.ask(
            "work", program=self._program, directory=directory, acks=self._acks
        )
        deadline = time.monotonic() + 100
        while self._acknowledged() < wanted:
            assert time.monotonic() < deadline, f"{self._program} does not get on"
            time.sleep(0.002)
        time.sleep(self._chance.random() * 0.05)
        if first:
            self._remounts.kill_in_use()
        self._saving.ask("kill", group=group)
        if not first:
            self._remounts.end("kill")

    def check(self, directory: Path) -> None:
        """All acknowledged data is in the directory."""
        found = self._saving.ask(
            "check", program=self._program, directory=directory, acks=self._acks
        )
        assert found == "", f"{found}\nthe mounts until then: {', '.join(self._remounts.steps)}"

    def mount(self, kind: str) -> None:
        """A program may have to repair its files first. If the mount refuses that, the program
        reads copies of them."""
        directory = self._remounts.mount(kind) / "run"
        if kind in WRITABLE:
            self.check(directory)
            return
        copied = Path(tempfile.mkdtemp(dir=self._scratch)) / "run"
        shutil.copytree(directory, copied, symlinks=True)
        self.check(copied)


@pytest.mark.promise(67, 99, 128, 129, 149)
@pytest.mark.parametrize("program", PROGRAMS)
def test_saves_that_a_program_saw_succeed_survive_a_kill_of_program_and_daemon(
    saving: Saving,
    has_disk: bool,
    monarch: MonarchCommand,
    source: Path,
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    soak = bool(request.config.getoption("--soak"))
    kills, number = 20 if soak else 1, PROGRAMS.index(program)
    chance = random.Random(number)
    # A source that has lost all of its names is taken for another directory.
    (source / "kept").touch()
    remounts = Remounts(monarch, source, monkeypatch, write=["absorb=run/**"], disk=has_disk)
    run = Run(saving, remounts, program, monarch.directory)
    # All kinds of remounts, two for each kill, from another one on for each program.
    kinds = rotated(number, 2) + rotated(number + 1, 2 * kills - 2)
    for first, second in zip(kinds[::2], kinds[1::2], strict=True):
        run.work_and_be_killed(first=chance.random() < 0.5)
        # With another start of the machine only what was synced is there after a kill.
        run.mount("same" if first == "boot" and program not in SYNCING else first)
        remounts.end(chance.choice(WAYS[1:] if second == "boot" else WAYS))
        run.mount(second)
        remounts.end("abandon")
        run.mount("same")
    remounts.end("clean")
    run.check(source / "run")
    if not soak and number % len(_WITH_OTHERS) != 0:
        return
    others = Others(chance, source, [b"run/HEAD", b"run/runs.db", b"run/latest"])
    for act in _WITH_OTHERS if soak else _WITH_OTHERS[number % 3 :][:1]:
        remounts.mount("same", slow=True)
        directory = remounts.path / "run"
        if not directory.is_dir():
            # Others have put a file there, or a link that leads nowhere.
            directory.unlink(missing_ok=True)
        run.work_and_be_killed(first=False)
        kind = chance.choice(KINDS)
        remounts.others_act(partial(others.act, act), act, kind)
        remounts.mount(kind)
        remounts.end("abandon")
        remounts.finish("same")
