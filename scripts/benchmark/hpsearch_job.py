"""One job of a search for hyper-parameters: an epoch of an image folder with augmentations.

It writes a line when its imports are done, begins when it reads one, and then writes the processor
time of the epoch, its own and that of its workers, in seconds, and the number of images.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from monarch.datasets.staging import StagingArea

BATCH = 32
SEED = 7
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Job:
    """``area`` is the directory of the staging area of ``jobs`` jobs, or empty: then the job reads
    with a DataLoader. A step of the training takes ``step_s`` seconds, without the processor."""

    root: str
    area: str
    jobs: int
    workers: int
    step_s: float


@cache
def imported_torchvision() -> Any:
    """PyTorch's index has builds of torchvision for processors alone, PyPI has one for GPUs. With a
    build of torch for processors its operators are missing, and the import fails without them,
    although image folders need none."""
    import torch

    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    import torchvision

    return torchvision


class Images:
    """The image folder with the usual augmentations, in an order that the seed determines."""

    def __init__(self, root: str) -> None:
        torchvision = imported_torchvision()
        transforms = torchvision.transforms
        self._folder = torchvision.datasets.ImageFolder(
            root,
            transforms.Compose(
                [
                    transforms.RandomResizedCrop(224),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                    transforms.Normalize(_MEAN, _DEVIATION),
                ]
            ),
        )
        count = len(self._folder)
        order = random.Random(SEED).sample(range(count), count)
        self.batches = [order[at : at + BATCH] for at in range(0, count - BATCH + 1, BATCH)]

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, number: int) -> Any:
        return self._folder[number]

    def collated(self, chosen: Sequence[int]) -> tuple[Any, Any]:
        import torch.utils.data

        pixels, labels = torch.utils.data.default_collate(
            [self._folder[number] for number in chosen]
        )
        return pixels, labels


def independent(images: Images, job: Job) -> Iterator[Any]:
    """The batches as PyTorch recommends to read them."""
    import torch.utils.data

    yield from torch.utils.data.DataLoader(
        images, batch_sampler=images.batches, num_workers=job.workers
    )


def shared(images: Images, job: Job) -> Iterator[Any]:
    """The batches of a staging area."""
    import torch

    def produce(number: int) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED * len(images.batches) + number)
            pixels, labels = images.collated(images.batches[number])
        return {"images": pixels.numpy(), "labels": labels.numpy()}

    with StagingArea(
        "hpsearch", jobs=job.jobs, workers=job.workers, directory=job.area, fingerprint=job.root
    ) as area:
        for batch in area.epoch(0, len(images.batches), produce):
            assert isinstance(batch, dict)
            yield torch.from_numpy(batch["images"]), torch.from_numpy(batch["labels"])


def main() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    job = Job(**json.loads(sys.argv[1]))
    images = Images(job.root)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    before = _cpu_s()
    used = 0
    for pixels, labels in (shared if job.area else independent)(images, job):
        # As the copy to a GPU reads all bytes once.
        pixels.clone()
        used += len(labels)
        time.sleep(job.step_s)
    sys.stdout.write(json.dumps({"cpu_s": _cpu_s() - before, "images": used}) + "\n")


def command(job: Job) -> list[str]:
    return [sys.executable, "-m", "scripts.benchmark.hpsearch_job", json.dumps(asdict(job))]


def _cpu_s() -> float:
    """Of this process and of its children that have ended, in seconds."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
