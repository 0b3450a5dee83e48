"""The example of docs/training.md for jobs that prepare their batches together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.datasets.brokers import kill_brokers

ROOT = Path(__file__).parents[2]
FILES = 40


@pytest.mark.frameworks
def test_the_example_of_the_document_prepares_each_batch_once(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (example,) = (example for example in examples if "StagingArea(" in example)
    # There are more batches than the area keeps, so no job ends before both are there.
    for what, instead in (
        ("size, seed = 32, 7", "size, seed = 2, 7"),
        ("range(90)", "range(2)"),
        ("224", "32"),
        ('"search"', f'"search", directory="{tmp_path}/area"'),
    ):
        assert what in example
        example = example.replace(what, instead)
    (tmp_path / "search.py").write_text(example)
    for number in range(FILES):
        path = tmp_path / f"images/class{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number, 0, 255 * (number % 2))).save(path)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.datasets.image_folders"),
            *(str(tmp_path / "search.py"), str(tmp_path / "images"), "0.1", "0.01"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    kill_brokers(tmp_path / "area")
    assert (done.returncode, done.stderr) == (0, "")
    # With PYTHONUNBUFFERED each print writes its text and its newline apart, so two jobs that
    # print at once may end up on one line.
    found = re.findall(r"rate ([\d.]+), epoch 1: [\d.]+, prepared (\d+) batches", done.stdout)
    assert sorted(rate for rate, _ in found) == ["0.01", "0.1"], done.stdout
    assert sum(int(prepared) for _, prepared in found) == 2 * FILES // 2
