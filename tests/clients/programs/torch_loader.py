"""PyTorch: an image folder, decoded by PIL, through a DataLoader of four forked workers."""

from __future__ import annotations

from pathlib import Path

import torch
from _protocol import digest, serve
from PIL import Image
from torch.utils.data import DataLoader, Dataset

WORKERS = 4


class ImageFolder(Dataset[tuple[str, str, int]]):
    """Reads and decodes as torchvision's ``ImageFolder`` does: one open, then PIL."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = sorted(str(path.relative_to(root)) for path in root.glob("*/*.JPEG"))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, str, int]:
        name = self._names[index]
        with open(self._root / name, "rb") as file:
            image = Image.open(file).convert("RGB")
            file.seek(0)
            content = file.read()
        return name, digest(content), image.width * image.height


def epoch(root: Path, number: int) -> dict[str, str]:
    loader = DataLoader(
        ImageFolder(root),
        batch_size=16,
        shuffle=True,
        num_workers=WORKERS,
        multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(number),
    )
    seen: dict[str, str] = {}
    for names, digests, pixels in loader:
        assert min(pixels) > 0
        assert not seen.keys() & set(names)
        seen.update(zip(names, digests, strict=True))
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(epoch)
