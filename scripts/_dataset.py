"""Makes data sets of the kinds that training reads: seeded, of any size, in seconds.

The same arguments give the same bytes (with the same Pillow). Images are real JPEGs, every one
different, with the sizes of a photo collection: a few hundred are drawn and compressed, and each
file is one of them with random bytes in a comment segment, so that making 5,000 files costs what
writing them costs.
"""

from __future__ import annotations

import argparse
import errno
import io
import math
import os
import random
import shutil
import sqlite3
import stat
import statistics
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from monarch.units import format_bytes, parse_bytes

EXAMPLES = """\
examples:
  scripts/dataset imagefolder /tmp/images --files 5000 --classes 100
  scripts/dataset imagefolder /tmp/thumbnails --files 1000 --mean 12KB --seed 7
  scripts/dataset tfrecord /tmp/records --shards 8 --records 1000
  scripts/dataset webdataset /tmp/shards --shards 8 --samples 1000
  scripts/dataset hdf5 /tmp/train.h5 --samples 2000 --side 64
  scripts/dataset lmdb /tmp/train.lmdb --records 1000
  scripts/dataset sqlite /tmp/train.sqlite --records 1000
  scripts/dataset git /tmp/repository --files 300
  scripts/dataset empty /tmp/million --files 1000000 --directories 1000
"""

# The spread of ImageNet's file sizes is about this once the few giants are left out.
SIGMA = 0.5
# Beyond three sigmas a set of some hundred files would be ruled by one of them.
SIGMA_LIMIT = 3.0
SMALLEST_JPEG = 2_000
DRAWN_IMAGES = 240
# Classes differ by hue, so that a tiny network has something to learn.
HUES = 10
# A JPEG segment's length field has 16 bits and counts itself.
SEGMENT_LIMIT = 65_533
ARCHIVE_MTIME = 1_600_000_000


class DatasetError(Exception):
    """A data set that cannot be made: what, where and what to do, in one line."""


class Meter:
    """Progress on standard error: a living line on a terminal, and a summary at the end."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = self._bytes = 0
        self._begin = self._shown = time.monotonic()
        self._living = sys.stderr.isatty()

    def add(self, count: int, size: int = 0) -> None:
        self._done += count
        self._bytes += size
        now = time.monotonic()
        if self._living and now - self._shown > 0.1:
            self._shown = now
            percent = 100 * self._done // max(self._total, 1)
            line = f"{self._what}: {self._done:,} of {self._total:,} ({percent} %)"
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def finish(self, where: Path) -> None:
        seconds = time.monotonic() - self._begin
        start = "\r\x1b[K" if self._living else ""
        size = f", {format_bytes(self._bytes)}" if self._bytes else ""
        sys.stderr.write(f"{start}{where}: {self._done:,} {self._what}{size} in {seconds:.1f} s\n")


# -- images ----------------------------------------------------------------------------------------


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
        # Quantiles of the size distribution: a file then needs only a little padding.
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
    """A photo-like JPEG of at most ``size`` bytes, or of the smallest that there is."""
    # 0.75 bytes a pixel and 4:3 are ImageNet's averages.
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
    """``jpeg`` with comment segments of random bytes, ``size`` bytes long where it was shorter."""
    # Readers of JFIF want its own segment first, so the comments follow it.
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
    """``count`` labelled images in a shuffled order of their classes."""
    images = Images(mean, seed=seed, expected=count)
    labels = [number % classes for number in range(count)]
    random.Random(f"{seed} labels").shuffle(labels)
    for number, label in enumerate(labels):
        yield Sample(f"{number:08d}", label, images.jpeg(number, label))


# -- places ----------------------------------------------------------------------------------------


def _new_directory(path: Path, *, needs: int) -> Path:
    """An empty directory at ``path`` with room for ``needs`` bytes."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DatasetError(f"{path} exists and is not empty; remove it or name another one")
    path.mkdir(parents=True, exist_ok=True)
    _check_room(path, needs)
    return path


def _new_file(path: Path, *, needs: int) -> Path:
    if path.exists():
        raise DatasetError(f"{path} exists; remove it or name another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_room(path.parent, needs)
    return path


def _check_room(path: Path, needs: int) -> None:
    free = shutil.disk_usage(path).free
    if needs > free:
        raise DatasetError(
            f"{path} has {format_bytes(free)} free and this needs {format_bytes(needs)}; "
            "ask for less or name another place"
        )


# -- imagefolder -----------------------------------------------------------------------------------


def image_folder(options: argparse.Namespace) -> None:
    root = _new_directory(options.path, needs=int(options.files * options.mean * 1.1))
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


# -- tfrecord --------------------------------------------------------------------------------------

CRC32C_POLYNOMIAL = 0x82F63B78
# Bytes that each lane of the parallel checksum reads one after the other.
LANE = 128


@cache
def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ CRC32C_POLYNOMIAL, table >> 1)
    return table.astype(np.uint32)


def _crc_step(
    registers: NDArray[np.uint32], column: NDArray[np.uint8] | np.uint32
) -> NDArray[np.uint32]:
    stepped: NDArray[np.uint32] = _crc_table()[(registers ^ column) & 0xFF] ^ (registers >> 8)
    return stepped


@cache
def _crc_shift(length: int) -> NDArray[np.uint32]:
    """What ``length`` zero bytes (a power of two) make of each of the register's 32 bits."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if length == 1:
        return _crc_step(bits, np.uint32(0))
    half = _crc_shift(length // 2)
    return _crc_apply(half, half)


def _crc_apply(operator: NDArray[np.uint32], registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    result = np.zeros_like(registers)
    for bit in range(32):
        result ^= np.where((registers >> np.uint32(bit)) & 1, operator[bit], np.uint32(0))
    return result


def crc32c(message: bytes) -> int:
    """The Castagnoli checksum (RFC 3720). Needs four bytes or more.

    The register is linear in the message, so pieces are summed side by side as numpy vectors and
    put together pairwise: 60 times faster than a loop in Python.
    """
    lanes = 1
    while lanes * LANE < len(message):
        lanes *= 2
    # A register of zeros stays zero over leading zeros; starting from ones is the same as
    # inverting the first four bytes.
    padded = np.zeros(lanes * LANE, dtype=np.uint8)
    padded[-len(message) :] = np.frombuffer(message, dtype=np.uint8)
    start = len(padded) - len(message)
    padded[start : start + 4] ^= 0xFF
    columns = np.ascontiguousarray(padded.reshape(lanes, LANE).T)
    registers = np.zeros(lanes, dtype=np.uint32)
    for column in columns:
        registers = _crc_step(registers, column)
    length = LANE
    while len(registers) > 1:
        registers = _crc_apply(_crc_shift(length), registers[0::2]) ^ registers[1::2]
        length *= 2
    return int(registers[0]) ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """TFRecord's masking, for checksums that lie in data that is summed again."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def framed(payload: bytes) -> bytes:
    """``payload`` as one record of a TFRecord file."""
    length = struct.pack("<Q", len(payload))
    return b"".join(
        (
            length,
            struct.pack("<I", _masked(crc32c(length))),
            payload,
            struct.pack("<I", _masked(crc32c(payload))),
        )
    )


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def example(sample: Sample) -> bytes:
    """``sample`` as a serialised ``tf.train.Example``, under the names of ImageNet's records."""

    def entry(name: str, feature: bytes) -> bytes:
        return _field(1, _field(1, name.encode()) + _field(2, feature))

    # Feature is a union: 1 is its list of bytes, 3 its list of integers.
    return _field(
        1,
        entry("image/encoded", _field(1, _field(1, sample.jpeg)))
        + entry("image/class/label", _field(3, _field(1, _varint(sample.label))))
        + entry("image/filename", _field(1, _field(1, sample.key.encode()))),
    )


def tfrecord(options: argparse.Namespace) -> None:
    root = _new_directory(options.path, needs=int(options.records * options.mean * 1.1))
    meter = Meter("records", options.records)
    made = samples(options.records, classes=options.classes, mean=options.mean, seed=options.seed)
    for shard, count in enumerate(_shares(options.records, options.shards)):
        name = f"train-{shard:05d}-of-{options.shards:05d}.tfrecord"
        with (root / name).open("wb") as stream:
            for _ in range(count):
                record = framed(example(next(made)))
                stream.write(record)
                meter.add(1, len(record))
    meter.finish(root)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


# -- webdataset ------------------------------------------------------------------------------------


def webdataset(options: argparse.Namespace) -> None:
    root = _new_directory(options.path, needs=int(options.samples * (options.mean * 1.1 + 2048)))
    meter = Meter("samples", options.samples)
    made = samples(options.samples, classes=options.classes, mean=options.mean, seed=options.seed)
    for shard, count in enumerate(_shares(options.samples, options.shards)):
        with tarfile.open(root / f"train-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(count):
                sample = next(made)
                _add_member(tar, f"{sample.key}.jpg", sample.jpeg)
                _add_member(tar, f"{sample.key}.cls", str(sample.label).encode())
                meter.add(1, len(sample.jpeg))
    meter.finish(root)


def _add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), ARCHIVE_MTIME, 0o444
    tar.addfile(member, io.BytesIO(content))


# -- one large file --------------------------------------------------------------------------------


def hdf5(options: argparse.Namespace) -> None:
    import h5py  # takes half a second, and the other kinds do not need it

    count, side = options.samples, options.side
    path = _new_file(options.path, needs=count * (side * side * 3 + 8))
    meter = Meter("samples", count)
    generator = np.random.default_rng(options.seed)
    batch = 16
    with h5py.File(path, "w", libver="latest") as file:
        shape = (count, side, side, 3)
        chunks = (min(batch, count), side, side, 3)
        images = file.create_dataset("images", shape, "u1", chunks=chunks)
        labels = file.create_dataset("labels", (count,), "i8", chunks=(min(1024, count),))
        for first in range(0, count, batch):
            here = min(batch, count - first)
            block = generator.integers(0, 256, (here, side, side, 3), dtype=np.uint8)
            images[first : first + here] = block
            meter.add(here, block.nbytes)
        labels[:] = generator.integers(0, options.classes, count)
    meter.finish(path)


def lmdb_records(options: argparse.Namespace) -> None:
    import lmdb  # only this kind needs it

    needs = int(options.records * (options.mean * 1.1 + 4096)) + 16 * 1024 * 1024
    root = _new_directory(options.path, needs=needs)
    meter = Meter("records", options.records)
    made = samples(options.records, classes=options.classes, mean=options.mean, seed=options.seed)
    # Nobody else has it open, and a lock file would be one more file in the data set.
    with lmdb.open(str(root), map_size=2 * needs, lock=False) as environment:
        for first in range(0, options.records, 256):
            with environment.begin(write=True) as transaction:
                for _ in range(min(256, options.records - first)):
                    sample = next(made)
                    value = struct.pack("<I", sample.label) + sample.jpeg
                    transaction.put(sample.key.encode(), value)
                    meter.add(1, len(value))
    meter.finish(root)


def sqlite(options: argparse.Namespace) -> None:
    path = _new_file(options.path, needs=int(options.records * options.mean * 1.1))
    meter = Meter("records", options.records)
    made = samples(options.records, classes=options.classes, mean=options.mean, seed=options.seed)
    connection = sqlite3.connect(path)
    try:
        with connection:
            connection.execute(
                "CREATE TABLE samples (id INTEGER PRIMARY KEY, label INTEGER, image BLOB)"
            )
            for number, sample in enumerate(made):
                connection.execute(
                    "INSERT INTO samples VALUES (?, ?, ?)", (number, sample.label, sample.jpeg)
                )
                meter.add(1, len(sample.jpeg))
    finally:
        connection.close()
    meter.finish(path)


# -- git -------------------------------------------------------------------------------------------


def git(options: argparse.Namespace) -> None:
    if shutil.which("git") is None:
        raise DatasetError("git is not installed; install it: apt-get install git")
    root = _new_directory(options.path, needs=options.files * 20_000)
    environment = {
        **os.environ,
        **{f"GIT_{who}_NAME": "Data Set" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "data@set.invalid" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_DATE": f"{ARCHIVE_MTIME} +0000" for who in ("AUTHOR", "COMMITTER")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }

    def run(*arguments: str) -> None:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise DatasetError(f"git {arguments[0]} in {root} failed: {done.stderr.strip()}")

    meter = Meter("files", options.files)
    chance = random.Random(f"{options.seed} git")
    run("init", "-q", "-b", "main")
    for commit, count in enumerate(_shares(options.files, 3)):
        for number in range(count):
            path = root / f"part{number % 7}" / f"module_{commit}_{number:04d}.py"
            path.parent.mkdir(exist_ok=True)
            lines = (f"value_{chance.getrandbits(32):08x} = {chance.random()}" for _ in range(60))
            text = "\n".join(lines) + "\n"
            path.write_text(text)
            meter.add(1, len(text))
        run("add", "-A")
        run("commit", "-q", "--allow-empty", "-m", f"part {commit + 1}")
        run("tag", f"v{commit + 1}")
    run("gc", "-q")
    meter.finish(root)


# -- empty -----------------------------------------------------------------------------------------


def empty(options: argparse.Namespace) -> None:
    root = _new_directory(options.path, needs=options.files * 300)
    free = os.statvfs(root).f_favail
    if 0 < free < options.files + options.directories:
        raise DatasetError(f"{root} has only {free:,} inodes free; ask for fewer files")
    meter = Meter("files", options.files)
    jobs = [
        (str(root), number, count)
        for number, count in enumerate(_shares(options.files, options.directories))
    ]
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for made in pool.map(_fill, jobs, chunksize=8):
            meter.add(made)
    meter.finish(root)


def _fill(job: tuple[str, int, int]) -> int:
    root, number, count = job
    directory = os.path.join(root, f"d{number:06d}")
    os.mkdir(directory)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for serial in range(count):
            # One call where open and close would be two.
            os.mknod(f"f{serial:08d}.jpg", stat.S_IFREG | 0o644, dir_fd=handle)
    finally:
        os.close(handle)
    return count


# -- command line ----------------------------------------------------------------------------------


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < SMALLEST_JPEG:
        raise argparse.ArgumentTypeError(f"an image needs {SMALLEST_JPEG} bytes or more")
    return size


def _count(text: str) -> int:
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dataset",
        description="Makes data sets of the kinds that training reads. "
        "The same arguments give the same bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(
        name: str, make: Callable[[argparse.Namespace], None], summary: str
    ) -> argparse.ArgumentParser:
        added = kinds.add_parser(name, help=summary, description=summary)
        added.add_argument("path", type=Path, help="where; must not exist or be empty")
        added.add_argument("--seed", type=int, default=1, help="another seed, other bytes (1)")
        added.set_defaults(make=make)
        return added

    def counted(added: argparse.ArgumentParser, name: str, default: int) -> None:
        added.add_argument(
            f"--{name}", type=_count, default=default, metavar="N", help=f"how many ({default:,})"
        )

    def images(added: argparse.ArgumentParser) -> None:
        counted(added, "classes", 10)
        added.add_argument(
            "--mean", type=_size, default=110_000, metavar="SIZE", help="mean size (110KB)"
        )

    folder = kind("imagefolder", image_folder, "JPEGs in a directory per class, like ImageNet")
    counted(folder, "files", 1000)
    images(folder)
    records = kind("tfrecord", tfrecord, "TFRecord shards of tf.train.Example with JPEGs")
    counted(records, "shards", 8)
    counted(records, "records", 1000)
    images(records)
    shards = kind("webdataset", webdataset, "tar shards with .jpg and .cls pairs")
    counted(shards, "shards", 8)
    counted(shards, "samples", 1000)
    images(shards)
    array = kind("hdf5", hdf5, "one HDF5 file with chunked images and labels")
    counted(array, "samples", 2000)
    counted(array, "side", 64)
    counted(array, "classes", 10)
    for name, make, summary in (
        ("lmdb", lmdb_records, "an LMDB directory of labelled JPEGs"),
        ("sqlite", sqlite, "an SQLite file with a table of labelled JPEGs"),
    ):
        table = kind(name, make, summary)
        counted(table, "records", 1000)
        images(table)
    counted(kind("git", git, "a small git repository with history"), "files", 300)
    tree = kind("empty", empty, "many empty files, to measure what names cost")
    counted(tree, "files", 1_000_000)
    counted(tree, "directories", 1000)
    return parser


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.make(options)
    except DatasetError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or options.path}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += "; ask for less or name another place"
    else:
        return 0
    sys.stderr.write(f"dataset: {message}\n")
    return 1
