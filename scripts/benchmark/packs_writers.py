"""Makes the tree of files, and the same files in the formats that are compared with a pack.

The samples of each format are in one random order, as the documents of all three libraries
recommend. A shard has the size that they recommend, or less, so that each reader has one at least.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmark.packs_readers import imported_tensorflow
from scripts.tools.loader import WORKERS

# Files in a directory of the tree.
_A_DIRECTORY = 500
# WebDataset: "each shard is often ~1 GB", and as many shards as workers at least. TFRecord: 100 MB,
# and ten shards at least. litdata: 64 MB.
_TAR_BYTES, _RECORDS_BYTES, _CHUNK_BYTES = 10**9, 10**8, 64 * 10**6
_LEAST_RECORDS = 12

Write = Callable[[Sequence[Path], Path, int], None]


def tree(root: Path, files: int, size: int) -> list[str]:
    """``files`` files of ``size`` random bytes. Returns their names relative to ``root``."""
    chance = random.Random(size)
    names = []
    for number in range(files):
        name = f"{number // _A_DIRECTORY:03}/{number:06}.bin"
        if number % _A_DIRECTORY == 0:
            (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(chance.randbytes(size))
        names.append(name)
    return names


def tars(paths: Sequence[Path], root: Path, size: int) -> None:
    for number, share in enumerate(_shares(paths, _shards(size, _TAR_BYTES, WORKERS))):
        with tarfile.open(root / f"train-{number:06}.tar", "w") as archive:
            for path in share:
                content = path.read_bytes()
                member = tarfile.TarInfo(path.name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def tfrecords(paths: Sequence[Path], root: Path, size: int) -> None:
    tensorflow = imported_tensorflow()
    for number, share in enumerate(_shares(paths, _shards(size, _RECORDS_BYTES, _LEAST_RECORDS))):
        with tensorflow.io.TFRecordWriter(str(root / f"train-{number:05}.tfrecord")) as writer:
            for path in share:
                writer.write(_example(tensorflow.train, path.read_bytes()))


def chunks(paths: Sequence[Path], root: Path, size: int) -> None:
    # Otherwise litdata leaves two directories in /tmp.
    for kind in ("", "DATA_"):
        os.environ[f"DATA_OPTIMIZER_{kind}CACHE_FOLDER"] = str(root.with_name("litdata-cache"))
    import litdata

    litdata.optimize(
        fn=content_of,
        inputs=[str(path) for path in paths],
        output_dir=str(root),
        chunk_bytes=min(_CHUNK_BYTES, size // WORKERS),
        num_workers=1,
        reorder_files=False,
        start_method="fork",
        verbose=False,
    )


def content_of(path: str) -> bytes:
    return Path(path).read_bytes()


WRITERS: dict[str, Write] = {"webdataset": tars, "tfrecord": tfrecords, "litdata": chunks}


def _example(train: Any, content: bytes) -> bytes:
    feature = train.Feature(bytes_list=train.BytesList(value=[content]))
    example = train.Example(features=train.Features(feature={"file": feature}))
    return bytes(example.SerializeToString())


def _shards(size: int, shard_bytes: int, least: int) -> int:
    """A multiple of the readers, so that each has as much to read."""
    return max(least, round(size / (shard_bytes * WORKERS)) * WORKERS)


def _shares(paths: Sequence[Path], count: int) -> list[Sequence[Path]]:
    return [paths[number::count] for number in range(count)]
