"""What a mount recognises of the order in which jobs read, and what it fetches ahead."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tests.conftest import MonarchCommand, Tree, contents
from tests.mount.observe import epoch, settled

# Reads the files whose paths come from the standard input, in a session of its own.
_READER = "import sys; [open(line.rstrip(), 'rb').read() for line in sys.stdin]"


def images(directory: str, files: int) -> dict[str, bytes]:
    """A data set as for ImageFolder: ten classes."""
    return {
        f"{directory}/class{number % 10}/{number:04}.jpg": contents(f"{directory}{number}", 500)
        for number in range(files)
    }


def test_status_shows_in_which_order_each_job_reads(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    train, val = images("train", 400), images("val", 200)
    tree({**train, **val})
    mounted = monarch.mount(source)
    for seed in range(2):
        order = random.Random(seed).sample(sorted(train), len(train))
        epoch(mounted, train, order)
    text = "\n".join(str(mounted.path / name) for name in sorted(val))
    subprocess.run(
        [sys.executable, "-c", _READER], input=text, text=True, check=True, start_new_session=True
    )
    report = settled(mounted)["foresight"]
    shown = {stream["directory"]: stream for stream in report["streams"]}
    assert {name: stream["pattern"] for name, stream in shown.items()} == {
        "train": "shuffled",
        "val": "sequential",
    }
    is_counted = monarch.mode != "no_open"
    assert [shown["train"]["epoch"], shown["val"]["epoch"]] == (
        [2, 1] if is_counted else [None] * 2
    )
    assert [shown["train"]["files"], shown["val"]["files"]] == [400, 200]
    text = monarch("status", str(mounted.path)).stdout
    assert "train/: shuffled, epoch 2" in text or not is_counted
    assert "val/: sequential" in text
