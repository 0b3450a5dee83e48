"""The soak detects a wrong byte, an error without a reason, and growth."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.soaking.readers import Reading, Refused
from scripts.soaking.soaked_mount import Window
from scripts.soaking.verdict import judge, theil_sen
from scripts.tools.launch import ROOT
from tests.conftest import require_fuse
from tests.equipment.mounts import mounts_below


def samples(
    slope: float, *, noise: float = 1.0, count: int = 200
) -> tuple[list[float], list[float]]:
    """Hourly growth by ``slope``, with noise and a few samples far off."""
    dice = random.Random(1)
    times = [10.0 * number for number in range(count)]
    values = [100 + slope * t / 3600 + dice.gauss(0, noise) for t in times]
    for number in range(0, count, 17):
        values[number] += 300
    return times, values


def test_a_slope_is_found_through_noise_and_samples_far_off() -> None:
    times, values = samples(50.0)
    assert theil_sen(times, values) * 3600 == pytest.approx(50.0, abs=10)


@pytest.mark.parametrize(("slope", "flat"), [(0.0, True), (-80.0, True), (80.0, False)])
def test_growing_values_are_distinguished_from_flat_ones(slope: float, flat: bool) -> None:
    verdict = judge("memory", *samples(slope), warm_up=100, tolerance=10, unit=" MiB")
    assert verdict.flat is flat
    assert ("GROWS" in verdict.words) is not flat


def test_a_value_that_rises_in_the_first_minutes_only_is_flat() -> None:
    times = [float(second) for second in range(0, 1800, 10)]
    values = [min(100.0, 10 + second / 3) for second in times]
    assert judge("memory", times, values, warm_up=300, tolerance=2).flat


def test_few_samples_are_no_verdict() -> None:
    assert judge("memory", [1.0, 2.0], [1.0, 9.0], warm_up=0, tolerance=0).flat is None


@pytest.mark.parametrize("size", [5000, 300_000])
@pytest.mark.parametrize("damage", ["one byte", "cut", "zeros"])
def test_a_wrong_byte_is_found_by_every_reader(tmp_path: Path, size: int, damage: str) -> None:
    true, seen = tmp_path / "true", tmp_path / "seen"
    content = random.Random(2).randbytes(size)
    wrong = {
        "one byte": content[: size // 2]
        + bytes([content[size // 2] ^ 1])
        + content[size // 2 + 1 :],
        "cut": content[: size // 2],
        "zeros": content[: size // 2] + bytes(size - size // 2),
    }[damage]
    for directory, held in ((true, content), (seen, wrong)):
        directory.mkdir()
        (directory / "file").write_bytes(held)
    reading = Reading(seen, true, ["file"], random.Random(3))
    for _ in range(200):
        reading.step()
        if reading.report.wrong:
            break
    reading.close()
    assert reading.report.wrong and "file" in reading.report.wrong[0]


def test_readers_of_the_right_bytes_find_nothing_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(random.Random(2).randbytes(300_000))
    (tmp_path / "empty").touch()
    reading = Reading(tmp_path, tmp_path, ["file", "empty"], random.Random(3))
    for _ in range(100):
        reading.step()
    reading.close()
    assert reading.report.wrong == [] and reading.report.refused == []
    assert reading.report.files == 100


def test_an_error_has_a_reason_only_while_there_is_one() -> None:
    window = Window(10.0, 20.0, frozenset({errno.EIO}))
    assert window.explains(Refused("file", errno.EIO, 5.0, 12.0))
    assert not window.explains(Refused("file", errno.EIO, 21.0, 22.0))
    assert not window.explains(Refused("file", errno.EIO, 5.0, 9.0))
    assert not window.explains(Refused("file", errno.EACCES, 5.0, 12.0))


def test_a_short_soak_reads_right_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    require_fuse()
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts/soak"), "--minutes", "0.3", "--files", "120"),
            *("--turn", "4", "--sample", "0.5", "--directory", str(tmp_path)),
            *("--json", str(tmp_path / "soak.json"), "--modes", "relay,no_open"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    for mount in report["mounts"].values():
        assert mount["files"] > 100 and mount["bytes"] > 1_000_000
        assert mount["wrong"] == [] and mount["unexplained"] == []
    assert len(report["mounts"]["changing"]["lifetimes"]) >= 2
    assert len(report["mounts"]["steady"]["lifetimes"]) == 1
    assert mounts_below(tmp_path) == []
