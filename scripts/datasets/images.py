"""Labelled JPEGs, every one different, with the sizes of a photo collection.

A few hundred images are drawn and compressed. Each file is one of them with random bytes in a
comment segment, so that making 5,000 files costs what writing them costs.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import statistics
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from scripts.datasets.target import Meter, new_directory

# About the spread of the file sizes of ImageNet without its few giants.
SIGMA = 0.5
# Beyond three sigmas one file would dominate a set of some hundred.
SIGMA_LIMIT = 3.0
SMALLEST_JPEG = 2_000
DRAWN_IMAGES = 240
# Classes differ by hue, so that a tiny network has something to learn.
HUES = 10
# The length field of a JPEG segment has 16 bits and counts itself.
SEGMENT_LIMIT = 65_533


@dataclass(frozen=True, slots=True)
class Sample:
    """One labelled image: ``key`` is unique, ``label`` counts from 0, ``jpeg`` decodes."""

    key: str
    label: int
    jpeg: bytes


class Images:
    """An endless set of different JPEGs with log-normal sizes around ``mean`` bytes."""

    def __init__(self, mean: int, *, seed: int, expected: int) -> None:
        self._seed = seed
        self._mu = math.log(mean) - SIGMA**2 / 2
        per_hue = max(1, min(DRAWN_IMAGES, expected) // HUES)
        # At the quantiles of the size distribution, so that a file needs little padding.
        normal = statistics.NormalDist()
        sizes = [
            self._size(normal.inv_cdf((number + 0.1) / per_hue)) if number else SMALLEST_JPEG
            for number in range(per_hue)
        ]
        self._drawn = [
            [_draw(size, hue, random.Random(f"{seed} {hue} {size}")) for size in sizes]
            for hue in range(min(HUES, max(1, expected)))
        ]

    def _size(self, deviation: float) -> int:
        limited = max(-SIGMA_LIMIT, min(SIGMA_LIMIT, deviation))
        return max(SMALLEST_JPEG, round(math.exp(self._mu + SIGMA * limited)))

    def jpeg(self, number: int, label: int) -> bytes:
        """The image ``number``, of the class ``label``: the same bytes for the same arguments."""
        chance = random.Random(f"{self._seed} {number}")
        size = self._size(chance.gauss(0, 1))
        candidates = self._drawn[label % len(self._drawn)]
        drawn = max((one for one in candidates if len(one) <= size), key=len, default=candidates[0])
        return _padded(drawn, size, chance)


def _draw(size: int, hue: int, chance: random.Random) -> bytes:
    """A photo-like JPEG of at most ``size`` bytes, or the smallest that can be made."""
    # 0.75 bytes a pixel and 4:3 are the averages of ImageNet.
    width = max(16, int(math.sqrt(size * 4 / 3 / 0.75)))
    while True:
        image = _picture(width, max(12, width * 3 // 4), hue, chance)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=88)
        jpeg = stream.getvalue()
        if len(jpeg) <= size or width <= 16:
            return jpeg
        width = max(16, int(width * min(0.97, math.sqrt(size / len(jpeg)))))


def _picture(width: int, height: int, hue: int, chance: random.Random) -> Image.Image:
    def noise(columns: int, rows: int) -> Image.Image:
        return Image.frombytes("RGB", (columns, rows), chance.randbytes(columns * rows * 3))

    shapes = noise(8, 6).resize((width, height), Image.Resampling.BICUBIC)
    grain = noise(max(1, width // 2), max(1, height // 2)).resize((width, height))
    mixed = Image.blend(shapes, grain, 0.25)
    tint = Image.new("HSV", (width, height), (hue * 255 // HUES, 200, 200)).convert("RGB")
    return Image.blend(mixed, tint, 0.25)


def _padded(jpeg: bytes, size: int, chance: random.Random) -> bytes:
    """``jpeg`` with comment segments of random bytes: ``size`` bytes, unless it was longer."""
    # Readers of JFIF expect its own segment first, so the comments follow it.
    head = 4 + int.from_bytes(jpeg[4:6], "big")
    wanted = max(size - len(jpeg), 20)
    parts = [jpeg[:head]]
    while wanted > 0:
        length = max(4, min(wanted, SEGMENT_LIMIT))
        parts.append(struct.pack(">HH", 0xFFFE, length - 2) + chance.randbytes(length - 4))
        wanted -= length
    parts.append(jpeg[head:])
    return b"".join(parts)


def samples(count: int, *, classes: int, mean: int, seed: int) -> Iterator[Sample]:
    """``count`` labelled images, whose classes are shuffled."""
    images = Images(mean, seed=seed, expected=count)
    labels = [number % classes for number in range(count)]
    random.Random(f"{seed} labels").shuffle(labels)
    for number, label in enumerate(labels):
        yield Sample(f"{number:08d}", label, images.jpeg(number, label))


def image_folder(options: argparse.Namespace) -> None:
    root = new_directory(options.path, needs=int(options.files * options.mean * 1.1))
    images = Images(options.mean, seed=options.seed, expected=options.files)
    meter = Meter("images", options.files)
    number = 0
    for label in range(options.classes):
        name = f"n{label + 1:08d}"
        (root / name).mkdir()
        here = options.files // options.classes + (label < options.files % options.classes)
        chance = random.Random(f"{options.seed} names {label}")
        for serial in sorted(chance.sample(range(1, 20 * here + 1), here)):
            jpeg = images.jpeg(number, label)
            (root / name / f"{name}_{serial}.JPEG").write_bytes(jpeg)
            meter.add(1, len(jpeg))
            number += 1
    meter.finish(root)
