"""With ``open: none`` the kernel opens files alone: the daemon counts these opens by inotify."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Tree, contents
from tests.mount.observe import settled

pytestmark = pytest.mark.modes("no_open")

# Reads each file whose path is in a line of the standard input.
_READER = "import sys; [open(line.rstrip(), 'rb').read() for line in sys.stdin]"


def images(files: int) -> dict[str, bytes]:
    return {
        f"train/class{number % 7}/{number:04}.jpg": contents(str(number), 300)
        for number in range(files)
    }


@pytest.mark.promise(183)
def test_each_open_of_three_epochs_is_counted(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    """The kernel has the pages of all files since the first epoch, and asks for nothing."""
    content = images(300)
    tree({**content, "notes/readme": b"text"})
    mounted = monarch.mount(source)
    for seed in range(3):
        order = random.Random(seed).sample(sorted(content), len(content))
        text = "\n".join(str(mounted.path / name) for name in order)
        subprocess.run([sys.executable, "-c", _READER], input=text, text=True, check=True)
        report = settled(mounted)
        assert report["opens"] == 300 * (seed + 1)
    assert [(e["opens"], e["hits"]) for e in report["epochs"]] == [(300, None)] * 3
    assert report["hit_ratio"] is None and report["opens_not_counted"] == ""
    (stream,) = report["foresight"]["streams"]
    assert (stream["directory"], stream["epoch"]) == ("train", 3)
    assert report["source_totals"]["opens"] == 300, "each file was opened once at the source"
    text = monarch("status", str(mounted.path)).stdout
    assert "900 opens, hits not counted" in text
    mounted.umount()  # the watches do not keep it in use


@pytest.mark.promise(183)
def test_with_it_switched_off_opens_are_not_counted(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = images(80)
    tree(content)
    mounted = monarch.mount(source, options=["foresight.count_opens=false"])
    for name in sorted(content):
        (mounted.path / name).read_bytes()
    report = settled(mounted)
    assert report["opens"] is report["epochs"] is report["hit_ratio"] is None
    assert report["opens_not_counted"] == "foresight.count_opens is false"
    assert report["bytes"] == 80 * 300, "reads that reach the daemon are counted all the same"
    assert {stream["epoch"] for stream in report["foresight"]["streams"]} == {None}
    assert "foresight.count_opens is false" in monarch("status", str(mounted.path)).stdout
