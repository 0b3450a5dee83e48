"""Trees of files for the tests of packs, and their comparison with an unpacked or packed one."""

from __future__ import annotations

import os
import random
from pathlib import Path

from monarch.packs.build import BuildReport, Parameters, build


def make_tree(root: Path, *, files: int = 60, most: int = 2000, seed: int = 1) -> Path:
    """A tree with all kinds of entries, in a new directory ``root``; reproducible but for times."""
    draw = random.Random(seed)
    root.mkdir()
    for number in range(files):
        directory = root / f"class{number % 4}"
        directory.mkdir(exist_ok=True)
        (directory / f"{number:03d}.jpg").write_bytes(draw.randbytes(draw.randrange(1, most)))
    (root / "empty").mkdir()
    (root / "class0/nothing").write_bytes(b"")
    (root / "class0.txt").write_bytes(b"sorts between class0 and its entries as plain text")
    os.link(root / "class0/000.jpg", root / "class1/link.jpg")
    os.symlink("class0/000.jpg", root / "symbolic")
    os.symlink("no such file", root / "dangling")
    os.mkfifo(root / "fifo", 0o640)
    Path(os.fsdecode(os.fsencode(root) + b"/not utf-8 \xff")).write_bytes(b"x")
    (root / "line\nbreak").write_bytes(b"y")
    (root / "large").write_bytes(draw.randbytes(20_000))
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 20)
        file.seek(500_000)
        file.write(b"in the middle")
    (root / "class1/000-private").write_bytes(b"z")
    (root / "class1/000-private").chmod(0o4710)
    os.utime(root / "class1", ns=(1, 1_234_567_890))
    return root


def pack(
    source: Path,
    to: Path,
    *,
    seed: int = 7,
    order: str = "random",
    chunk: int = 8192,
    jobs: int = 3,
) -> BuildReport:
    parameters = Parameters(seed, order, chunk)
    return build(source, to, parameters, jobs=jobs, progress=lambda done, total, words: None)


def contents(root: Path) -> dict[str, bytes]:
    """All files beneath ``root`` and their bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
