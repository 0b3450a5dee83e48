"""Data sets, clients in processes of their own, and the expected results of three epochs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted
from tests.equipment.inotify import OpenCounter
from tests.equipment.waiting import readable

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SETTLE_S = 100.0
ANSWER_S = 100.0


@pytest.fixture(scope="session")
def make_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a data set with ``scripts/dataset`` once for all tests that ask for the same."""
    made: dict[tuple[str, ...], Path] = {}

    def make(kind: str, *options: object, name: str = "") -> Path:
        """The directory that holds it; ``name`` for the kinds that are one file or directory."""
        key = (kind, name, *map(str, options))
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            command = [sys.executable, str(ROOT / "scripts" / "dataset"), kind]
            command += [str(directory / name), *map(str, options)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            made[key] = directory
        return made[key]

    return make


@pytest.fixture
def images(make_dataset: Callable[..., Path]) -> Path:
    """200 JPEGs of 20 KB in 10 classes."""
    return make_dataset("imagefolder", "--files", 200, "--mean", "20KB")


class Client:
    """A program of ``programs/`` in its own process, which gets the names of the files to read for
    each epoch."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._name = program
        # A file, not a pipe: it is read only if the program fails.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"},
        )

    def epoch(self, root: Path, number: int = 0) -> dict[str, str]:
        """Reads every sample below ``root``: its name to the digest of its bytes."""
        self.begin(root, number)
        return self.finish()

    def begin(self, root: Path, number: int) -> None:
        """Tells the program to read; ``finish`` waits for what it read."""
        assert self._process.stdin is not None
        order = {"root": str(root), "epoch": number}
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pytest.fail(self._trouble("ended"))

    def finish(self) -> dict[str, str]:
        assert self._process.stdout is not None
        if not readable(self._process.stdout, within_s=ANSWER_S):
            pytest.fail(self._trouble(f"did not answer in {ANSWER_S:.0f} s"))
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(self._trouble("ended"))
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _trouble(self, what: str) -> str:
        self._errors.seek(0)
        return f"{self._name}.py {what}; it said:\n{self._errors.read()[-4000:]}"


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    """Starts a program of ``programs/``."""
    with ExitStack() as stack:

        def start(program: str, *arguments: str) -> Client:
            started = Client(program, *arguments)
            stack.callback(started.close)
            return started

        yield start


def settle(mounted: Mounted, files: int) -> None:
    """Wait until ``files`` files have a committed copy and nothing moves any more."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        status = mounted.status()
        resident, copies = status["residency"], status["copies"]
        if resident["files"] >= files and not copies["queued"] and not copies["running"]:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"{files} files should have copies by now: {resident}, {copies}")
        time.sleep(0.1)


def regular_files(root: Path) -> list[str]:
    """The regular files below ``root``, as paths relative to it."""
    return sorted(
        os.path.relpath(os.path.join(directory, name), root)
        for directory, _, names in os.walk(root)
        for name in names
        if not os.path.islink(os.path.join(directory, name))
    )


def copied_files(mounted: Mounted) -> list[str]:
    """The files of the source that get a copy when all is read.

    A kernel that only reads never asks for an empty file.
    """
    files = regular_files(mounted.source)
    if mounted.cli.mode == "no_open":
        files = [name for name in files if (mounted.source / name).stat().st_size]
    return files


def digests(root: Path) -> dict[str, str]:
    """Every regular file below ``root``: its path to the digest of its bytes."""
    return {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in regular_files(root)
    }


def three_epochs(
    monarch: MonarchCommand,
    source: Path,
    read: Callable[[Path, int], dict[str, str]],
    *,
    expected: dict[str, str],
    opens_at_first: int = 1,
) -> Mounted:
    """Read everything three times through a fresh mount, and count at the source from outside.

    Each epoch gives the source's bytes. Epoch 1 opens each file of the source at least once and
    at most ``opens_at_first`` times (2: the reader and the copy of a large file), later epochs
    none.
    """
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    files = copied_files(mounted)
    with OpenCounter(source) as opened:
        assert read(mounted.path, 1) == expected
        first = opened.paths()
        assert sorted(first) == files
        if opens_at_first == 1:
            assert set(first.values()) == {1}
        settle(mounted, len(files))
        assert max(opened.paths().values()) <= opens_at_first
        opened.reset()
        for number in (2, 3):
            assert read(mounted.path, number) == expected
            assert opened.paths() == {}, f"the source was read in epoch {number}"
    return mounted


def copied_tree(source: Path, target: Path) -> Path:
    """A private copy of a shared data set, for a test that changes it."""
    shutil.copytree(source, target, symlinks=True)
    return target
