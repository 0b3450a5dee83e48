"""What the example of docs/training.md uses of torchvision, which may not be installed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image


class ImageFolder:
    """Images below directories with the names of their classes."""

    def __init__(self, root: str, transform: Callable[[Any], Any]) -> None:
        self._paths = sorted(Path(root).glob("*/*"))
        self._transform = transform
        self.classes = sorted({path.parent.name for path in self._paths})

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        path = self._paths[number]
        with Image.open(path) as image:
            return self._transform(image.convert("RGB")), self.classes.index(path.parent.name)


def compose(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def transform(image: Any) -> Any:
        for step in steps:
            image = step(image)
        return image

    return transform


def random_resized_crop(size: int) -> Callable[[Any], Any]:
    def crop(image: Any) -> Any:
        left, upper = (int(torch.randint(0, edge // 2, ())) for edge in image.size)
        box = (left, upper, left + image.size[0] // 2, upper + image.size[1] // 2)
        return image.resize((size, size), box=box)

    return crop


def random_horizontal_flip() -> Callable[[Any], Any]:
    def flip(image: Any) -> Any:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image

    return flip


def to_tensor() -> Callable[[Any], Any]:
    return lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def install() -> None:
    """Makes ``torchvision`` importable."""
    datasets, transforms, package = map(ModuleType, ("datasets", "transforms", "torchvision"))
    vars(datasets)["ImageFolder"] = ImageFolder
    vars(transforms).update(
        Compose=compose,
        RandomResizedCrop=random_resized_crop,
        RandomHorizontalFlip=random_horizontal_flip,
        ToTensor=to_tensor,
    )
    vars(package).update(datasets=datasets, transforms=transforms)
    sys.modules["torchvision"] = package


def run(program: Path, root: str, rates: Sequence[str]) -> int:
    """Runs the program once for each rate, at the same time; the number of runs that failed."""
    install()
    torch.set_num_threads(1)
    code = compile(program.read_text(), str(program), "exec")
    children = []
    for rate in rates:
        child = os.fork()
        if not child:
            sys.argv = [str(program), root, rate, str(len(rates))]
            try:
                exec(code, {"__name__": "__main__"})
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
