"""Training over a mount while the trainer and the daemon are killed again and again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from monarch.frameworks.checkpoint import verify
from tests.conftest import MonarchCommand
from tests.frameworks.test_training import (
    BATCH,
    EPOCHS,
    UPDATES,
    Trainers,
    arrays,
    images,
    trainers,
)
from tests.mount.command import needs_fuse

__all__ = ["images", "trainers"]

pytestmark = [needs_fuse, pytest.mark.frameworks, pytest.mark.modes("auto")]


@pytest.mark.promise(67)
@pytest.mark.timeout(900)
def test_killed_with_its_daemon_it_ends_with_the_same_weights(
    trainers: Trainers,
    images: Path,
    monarch: MonarchCommand,
    source: Path,
    request: pytest.FixtureRequest,
) -> None:
    soak = request.config.getoption("--soak")
    kills = 30 if soak else 3
    chance = random.Random(2)
    shutil.copytree(images, source / "train")
    results = monarch.directory / "results"
    results.mkdir()

    def mount() -> Path:
        return monarch.mount(source, tiers={"fast": "64MiB"}, options=["absorb=ckpt/**"]).path

    def start(name: str, directory: Path) -> int:
        paths = (mnt / "train", directory, results / f"{name}.npz")
        options = ("--epochs", EPOCHS, "--batch", BATCH, "--every", 2, "--in-flight", 2)
        return trainers.start(*paths, *options)

    mnt = mount()
    start("undisturbed", results / "undisturbed")
    assert trainers.next_value("ended") == "0"
    killed = 0
    while killed < kills:
        pid = start("killed", mnt / "ckpt")
        begun = int(trainers.next_value("begins"))
        last = begun
        if begun <= UPDATES * (killed + 1) // (kills + 1):
            last = begun + chance.randrange(0, 8)
        step = "0"
        while begun < last and (step := trainers.next_value("update")):
            begun = int(step)
        time.sleep(chance.random() * 0.02)
        if daemon_first := chance.random() < 0.5:
            monarch.mounted[-1].kill()
        # Without its files it may have ended by itself.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if not daemon_first:
            monarch.mounted[-1].kill()
        if step:
            assert trainers.next_value("ended") != "0"
        killed += 1
        mnt = mount()
        assert {each.state for each in verify(mnt / "ckpt")} <= {"whole"}
    start("killed", mnt / "ckpt")
    assert trainers.next_value("ended") == "0"
    monarch.mounted[-1].umount()
    assert {each.state for each in verify(source / "ckpt")} == {"whole"}
    expected, found = arrays(results / "undisturbed.npz"), arrays(results / "killed.npz")
    with np.load(results / "killed.npz") as file:
        assert (file["used"] == 1).all()
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
