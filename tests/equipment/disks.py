"""A disk in a file: mounted as a file system of its own; a test can cut its power.

Written data is in the memory of the mounted file system until the kernel writes it to the disk, so
the file behind the disk does not have it before. A copy of that file is the disk that a machine
finds when it starts after a power cut at this moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-m", "0"),
    # Times in whole seconds, as file systems made long ago have them.
    "ext4 of old": ("mkfs.ext4", "-q", "-F", "-m", "0", "-I", "128"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


def _make(kind: str, image: Path) -> None:
    """Makes a file system. mkfs.btrfs compares the file with all loop devices, and fails if another
    test removes one of them meanwhile."""
    for _ in range(5):
        done = subprocess.run([*MAKE[kind], str(image)], capture_output=True, text=True)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{' '.join(MAKE[kind])} {image}: {done.stderr}")


def unavailable(kind: str = "ext4") -> str | None:
    """Why this machine cannot have such disks, None if it can."""
    if os.geteuid() != 0:
        return "only root may mount a disk"
    if shutil.which(MAKE[kind][0]) is None:
        return f"{MAKE[kind][0]} is not installed"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    return None


# The copy of an XFS disk has its UUID, and the original may still be mounted.
_OPTIONS = {"xfs": ("nouuid",)}


class Disk:
    """The disk in the file ``image``; ``mounted`` and ``cut`` are what it is for."""

    def __init__(self, image: Path, kind: str = "ext4", *, size: int = 64 << 20) -> None:
        self.image = image
        self.kind = kind
        self._type = kind.split()[0]
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(size)
            _make(kind, image)

    @contextmanager
    def mounted(self, at: Path, options: Sequence[str] = ()) -> Iterator[CuttableDisk]:
        at.mkdir(parents=True, exist_ok=True)
        every_option = ",".join(("loop", *_OPTIONS.get(self._type, ()), *options))
        subprocess.run(
            ["mount", "-t", self._type, "-o", every_option, str(self.image), str(at)], check=True
        )
        try:
            yield CuttableDisk(at, self)
        finally:
            subprocess.run(["umount", "-l", str(at)], check=True)


@contextmanager
def coarse(directory: Path) -> Iterator[Path]:
    """A disk in ``directory`` that keeps times in whole seconds."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Disk(directory / "disk", "ext4 of old").mounted(directory / "coarse") as disk:
        yield disk.path


class CuttableDisk:
    """A disk in use, at ``path``."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        device = os.stat(path).st_dev
        self._counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")

    def cut(self, image: Path) -> Disk:
        """The disk as the power fails now, in a file of its own.

        A copy takes a while, and the kernel may write meanwhile. Then it is made again, for no
        power cut leaves the beginning of a disk older than its end.
        """
        while True:
            before = self._counters.read_text().split()
            # Without those that are under way.
            subprocess.run(["cp", "--sparse=always", self._disk.image, image], check=True)
            after = self._counters.read_text().split()
            # Writes completed, sectors written, requests in flight.
            if [before[n] for n in (4, 6)] == [after[n] for n in (4, 6)] and after[8] == "0":
                return Disk(image, self._disk.kind)


@contextmanager
def in_memory(at: Path, size_mib: int) -> Iterator[Path]:
    """A small file system in memory, mounted at ``at``. Only root may mount it."""
    at.mkdir(parents=True)
    options = f"size={size_mib}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill_quota(disk: Path, count: int) -> Path:
    """Limits a disk with btrfs to ``count`` bytes and uses all of them; returns the file that takes
    the last ones. Then its file system takes nothing at all, not even a name for a file."""
    for command in (("quota", "enable"), ("qgroup", "limit", str(count), "0/5")):
        subprocess.run(["btrfs", *command, str(disk)], check=True, capture_output=True)
    return fill_all(disk)


def fill_all(disk: Path) -> Path:
    """As ``fill``, of a disk with btrfs, on which that takes several rounds."""
    before = -1
    while (filler := fill(disk)).stat().st_size > before:
        before = filler.stat().st_size
        # Metadata that is written later gives back what was claimed for it.
        os.sync()
    return filler


def fill(disk: Path) -> Path:
    """Use all space of a disk that is free; returns the file that takes it."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler
