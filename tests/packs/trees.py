"""Trees of files for the tests of packs, and their comparison with an unpacked or packed one."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from monarch.packs.build import BuildReport, Parameters, build
from monarch.packs.pack import Pack
from monarch.posix.files import closing_fd, empty_directory


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


@contextmanager
def deep_tree(root: Path, name: str, depth: int) -> Iterator[Path]:
    """A file ``depth`` directories beneath a new directory ``root``, each called ``name``. It is
    removed at the end: other programs may not be able to."""
    root.mkdir()
    with closing_fd(os.open(root, os.O_RDONLY | os.O_DIRECTORY)) as top:
        here = os.dup(top)
        for _ in range(depth):
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        with closing_fd(here), open("file", "wb", opener=partial(os.open, dir_fd=here)) as file:
            file.write(b"deep")
        yield root
        empty_directory(top)


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


def two_packs(directory: Path) -> list[Path]:
    """Two packs of the same names, sizes and times, in which all bytes differ: ``pack0`` and
    ``pack1`` in ``directory``, of the trees ``tree0`` and ``tree1``."""
    packs = []
    for number in (0, 1):
        tree = directory / f"tree{number}"
        tree.mkdir()
        for file in range(8):
            (tree / f"{file}").write_bytes(bytes([16 * number + file]) * 3000)
            os.utime(tree / f"{file}", ns=(0, 10**18))
        os.utime(tree, ns=(0, 10**18))
        packs.append(directory / f"pack{number}")
        pack(tree, packs[-1])
    return packs


def chunks_of(directory: Path) -> list[list[str]]:
    """The files of each chunk of a pack, by their paths."""
    with Pack.open(os.fsencode(directory)) as opened:
        return [
            [os.fsdecode(opened.record(int(n)).path) for n in opened.chunk_numbers(chunk)]
            for chunk in range(opened.info.chunks)
        ]


def contents(root: Path) -> dict[str, bytes]:
    """All files beneath ``root`` and their bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def copied(directory: Path, to: Path) -> Path:
    """A copy of the files of a pack."""
    shutil.copytree(directory, to)
    return to


def shown(root: Path) -> dict[bytes, tuple[object, ...]]:
    """All entries beneath ``root``: their attributes but for the time of access, and contents.

    Names of one file have one number in both trees, if the trees are equal.
    """
    found: dict[bytes, tuple[object, ...]] = {}
    files: dict[tuple[int, int], int] = {}
    top = os.fsencode(root)
    for path in [top, *sorted(_below(top))]:
        status = os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        content: object = None
        if kind == stat.S_IFREG:
            with open(path, "rb") as file:
                content = file.read()
        elif kind == stat.S_IFLNK:
            content = os.readlink(path)
        number = files.setdefault((status.st_dev, status.st_ino), len(files))
        xattrs = {}
        if kind in (stat.S_IFREG, stat.S_IFDIR):
            xattrs = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        found[path[len(top) :]] = (
            *(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, content),
            *(number, xattrs),
        )
    return found


def _below(top: bytes) -> Iterator[bytes]:
    for directory, names, files in os.walk(top):
        yield from (os.path.join(directory, name) for name in (*names, *files))
