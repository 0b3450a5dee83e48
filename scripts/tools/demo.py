"""Three epochs of training over a mount, shown step by step: the sources of the bytes, and the
speed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from scripts.datasets.main import make
from scripts.datasets.target import DatasetError
from scripts.tools.loader import WORKERS, Loader
from scripts.tools.mount import MonarchFailed, Mount, monarch
from tests.equipment import slowfs

CLASSES = 10
SIDE = 64
# What one job gets of a parallel file system on a busy day.
LATENCY_MS = 1
BANDWIDTH_MBPS = 10


@dataclass(frozen=True, slots=True)
class Learned:
    """What an epoch gave besides its time; empty where nothing was trained."""

    loss: float | None = None
    accuracy: float | None = None


Epoch = Callable[[list[str]], Learned]


def decoded(path: str) -> Any:
    from PIL import Image

    with open(path, "rb") as file:
        image = Image.open(file)
        # libjpeg then decodes at about the wanted size, which saves most of the time.
        image.draft("RGB", (SIDE, SIDE))
        return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)


def label_of(path: str) -> int:
    return int(os.path.basename(os.path.dirname(path))[1:]) - 1


class Images:
    """The pixels and the class of an image."""

    def __getitem__(self, path: str) -> tuple[Any, int]:
        import numpy as np
        import torch

        pixels = torch.from_numpy(np.array(decoded(path)))
        return pixels.permute(2, 0, 1).float() / 25 - 5, label_of(path)


def trainer() -> Epoch:
    """A small network that learns the classes, fed by a DataLoader with four workers."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    torch.set_num_threads(1)
    loader = Loader(Images(), batch_size=8)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)

    def epoch(paths: list[str]) -> Learned:
        total, right = 0.0, 0
        for pixels, labels in loader.epoch(paths):
            answers = network(pixels)
            loss: Any = nn.functional.cross_entropy(answers, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            right += int((answers.argmax(1) == labels).sum())
        return Learned(total / len(paths), right / len(paths))

    return epoch


def reader() -> Epoch:
    """Without PyTorch: the same files, read and decoded by as many processes."""
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(WORKERS)

    def epoch(paths: list[str]) -> Learned:
        assert all(side == SIDE for side in pool.map(_width, paths, chunksize=4))
        return Learned()

    return epoch


def _width(path: str) -> int:
    width: int = decoded(path).width
    return width


class Demo:
    """The steps, in their order. Whatever happens, the stack unmounts and removes everything."""

    def __init__(self, files: int, console: Console, stack: ExitStack) -> None:
        self._files, self._console, self._stack = files, console, stack
        self._work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monarch-demo-")))
        # PyTorch makes a directory beside the temporary ones, whether it compiles or not.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._work / "torch")

    def run(self) -> None:
        data = self._make_data()
        source = self._slow_down(data)
        names = sorted(str(path.relative_to(data)) for path in data.glob("*/*"))
        training = importlib.util.find_spec("torch") is not None
        epoch = trainer() if training else reader()
        epoch([str(data / name) for name in names[:64]])  # starts the workers

        target = self._work / "mnt"
        mount = Mount(
            source,
            target,
            tier=self._work / "fast",
            capacity="2GiB",
            state=self._work / "state",
        )
        self._command("monarch", "mount", source, target, "--tier", f"{mount.tier}:2GiB")
        self._stack.enter_context(mount)
        self._say(f"ready after {mount.seconds:.1f} s")
        self._say_where(target / names[0])

        self._step(f"{'Train' if training else 'Read and decode'}, {WORKERS} workers")
        table = self._table(training)
        table.add_row("the source alone", *self._epoch(epoch, source, names, None))
        table.add_row("Monarch, epoch 1", *self._epoch(epoch, target, names, mount))
        mount.settle(len(names))
        for number in (2, 3):
            row = self._epoch(epoch, target, names, mount)
            table.add_row(f"Monarch, epoch {number}", *row)
        self._console.print(table)
        self._say_where(target / names[0])

        self._step("What the daemon says")
        self._command("monarch", "status", target)
        # Written by the command itself, which knows the width of the terminal.
        self._console.file.flush()
        monarch("status", target, shown=True)
        self._command("monarch", "umount", target)

    def _make_data(self) -> Path:
        self._step(f"Make {self._files} JPEGs of 110 KB in {CLASSES} classes")
        data = self._work / "imagenet"
        make("imagefolder", data, "--files", self._files, "--classes", CLASSES)
        return data

    def _slow_down(self, data: Path) -> Path:
        if reason := slowfs.unavailable():
            self._step(f"No slow source ({reason}): the effect will be small")
            return data
        self._step(
            f"Put them behind a slow source: {LATENCY_MS} ms a call, {BANDWIDTH_MBPS} MB/s in all"
        )
        slow = self._stack.enter_context(slowfs.SlowSource(data, self._work / "pfs"))
        slow.rules(f"lat * {LATENCY_MS}", f"read_MBps {BANDWIDTH_MBPS}")
        return slow.path

    def _epoch(self, epoch: Epoch, root: Path, names: list[str], mount: Mount | None) -> list[str]:
        """The cells of the table's row for one epoch, in an order of its own."""
        paths = [str(root / name) for name in names]
        random.Random(time.time_ns()).shuffle(paths)
        before = _from_source(mount)
        begin = time.perf_counter()
        learned = epoch(paths)
        seconds = time.perf_counter() - begin
        # Each image is read once, so what the source did not give came from this node.
        source = _from_source(mount) - before
        cells = [f"{seconds:.2f} s", f"{len(paths) / seconds:,.0f}"]
        cells += [f"{len(paths)}", ""] if mount is None else [f"{source}", f"{len(paths) - source}"]
        if learned.loss is not None and learned.accuracy is not None:
            cells += [f"{learned.loss:.2f}", f"{learned.accuracy:.0%}"]
        return cells

    def _table(self, training: bool) -> Table:
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        table.add_column("")
        columns = ["time", "images/s", "from the source", "from this node"]
        for name in [*columns, "loss", "accuracy"] if training else columns:
            table.add_column(name, justify="right")
        return table

    def _step(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/bold]")

    def _say(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False)

    def _say_where(self, path: Path) -> None:
        tier = os.getxattr(path, "user.monarch.tier").decode()
        self._command("getfattr", "-n", "user.monarch.tier", path)
        self._say(f'user.monarch.tier="{tier}"')

    def _command(self, *words: object) -> None:
        line = shlex.join(map(str, words)).replace(str(self._work), "...")
        self._console.print(f"\n[green]$[/green] {line}", highlight=False, markup=True)


def _from_source(mount: Mount | None) -> int:
    """Files opened at the source since the mount was made."""
    if mount is None:
        return 0
    opens: int = mount.status()["source_totals"]["opens"]
    return opens


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", add_help=False)
    parser.add_argument("--files", type=int, default=300, help="number of images (300)")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        with ExitStack() as stack:
            Demo(options.files, console, stack).run()
    except (MonarchFailed, DatasetError) as error:
        console.print(f"[red]demo:[/red] {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    console.print("\nUnmounted; nothing is left behind.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
