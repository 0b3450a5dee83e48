"""A real training run that can be killed: a small CNN on a folder of images, with a Checkpointer.

    python -m tests.frameworks.trainer DATA CHECKPOINTS RESULT [--epochs N] [--every K] ...

DATA has a directory of images for each class. When the run is over, RESULT has the weights, the
optimizer's state and how often each sample was used in each epoch; that count is part of the
checkpointed state, so it shows which samples led to these weights, also after kills. Each update
prints a line ``update STEP``.

With ``--serve`` the arguments of runs are lines of JSON on standard input. Each run is a fork,
which spares it the import of PyTorch. The server prints the pid of the run, its updates, and
``ended CODE``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from monarch.frameworks.checkpoint import Checkpointer
from monarch.frameworks.torch import TorchState
from monarch.order import ResumableSampler, fingerprint


class ImageFolder(Dataset[tuple[int, torch.Tensor, int]]):
    """As torchvision's, with the number of the sample beside its image and its class."""

    def __init__(self, root: Path) -> None:
        classes = sorted(path for path in root.iterdir() if path.is_dir())
        self.samples = [(p, n) for n, each in enumerate(classes) for p in sorted(each.iterdir())]
        self.classes = len(classes)
        self.fingerprint = fingerprint(str(p.relative_to(root)) for p, _ in self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"), np.float32) / 255
        return index, torch.from_numpy(pixels).permute(2, 0, 1), label


class Used:
    """How often each sample was used in each epoch. Saved and restored with the weights."""

    def __init__(self, epochs: int, count: int) -> None:
        self.times = torch.zeros(epochs, count, dtype=torch.int32)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.times.copy_(state["times"])


def cnn(classes: int) -> nn.Module:
    # With what makes bit for bit hard: running means, and random numbers at each step.
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, classes)),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    made.add_argument("data", type=Path)
    made.add_argument("checkpoints", type=Path)
    made.add_argument("result", type=Path)
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--workers", type=int, default=0)
    made.add_argument("--every", type=int, help="iterations; without it, what p=0.035 allows")
    made.add_argument("--in-flight", type=int, default=1)
    made.add_argument("--seed", type=int, default=1)
    return made


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    images = ImageFolder(options.data)
    model = cnn(images.classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    used = Used(options.epochs, len(images))
    sampler = ResumableSampler(len(images), seed=options.seed, fingerprint=images.fingerprint)
    loader = DataLoader(
        images,
        batch_size=options.batch,
        sampler=sampler,
        num_workers=options.workers,
        # Or each loop over the loader would draw from the generator of the training.
        generator=torch.Generator(),
    )
    state = TorchState(model=model, optimizer=optimizer, scheduler=scheduler, used=used)
    loss_of = nn.CrossEntropyLoss()
    with Checkpointer(
        options.checkpoints, every=options.every, max_in_flight=options.in_flight, order=sampler
    ) as checkpointer:
        restored = checkpointer.restore()
        if restored is not None:
            state.load(restored.state)
        print(f"begins {checkpointer.step}", flush=True)
        for epoch in sampler.epochs(options.epochs):
            for step, (numbers, pixels, labels) in checkpointer.watch(loader):
                loss = loss_of(model(pixels), labels)
                optimizer.zero_grad()
                loss.backward()
                checkpointer.before_update()
                optimizer.step()
                scheduler.step()
                used.times[epoch, numbers] += 1
                sampler.consumed(len(numbers))
                checkpointer.after_update(state)
                print(f"update {step}", flush=True)
        checkpointer.save(state())
    result = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        result |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
    result["used"] = used.times
    np.savez(options.result, **{name: value.numpy() for name, value in result.items()})


def serve() -> None:
    # What these import at their first use is most of a short run's time.
    torch.use_deterministic_algorithms(True)
    torch.optim.AdamW(cnn(2).parameters())
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                train(parser().parse_args(json.loads(line)))
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(f"pid {pid}", flush=True)
        print(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
    # Taking PyTorch apart takes seconds.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        train(parser().parse_args())
