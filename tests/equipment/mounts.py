"""The mount table as the kernel shows it, and how to unmount.

Tests and scripts look here, and not by the functions of Monarch, which are under test.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class MountedFileSystem:
    """One line of the mount table. ``options`` are those of the mount: ``ro``, ``nosuid``."""

    path: str
    kind: str
    options: frozenset[str]


def mount_table(pid: int | str = "self") -> list[MountedFileSystem]:
    """All mounts that the process sees, oldest first."""
    table = []
    with open(f"/proc/{pid}/mounts", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            _, path, kind, options = line.split(" ")[:4]
            table.append(MountedFileSystem(_unescaped(path), kind, frozenset(options.split(","))))
    return table


def mounts() -> set[str]:
    """The mount points that this process sees."""
    return {mounted.path for mounted in mount_table()}


def is_mounted(path: Path) -> bool:
    # realpath of the parent: a stat of the mount itself may hang.
    return str(path.parent.resolve() / path.name) in mounts()


def mounts_below(directory: Path) -> list[str]:
    """Mount points below a directory, newest first: in this order they can be unmounted."""
    return [m.path for m in reversed(mount_table()) if m.path.startswith(f"{directory}/")]


def kind_of_file_system(path: Path) -> str:
    """The type of the file system that holds ``path``: ext4, tmpfs."""
    holder, kind = Path("/"), "unknown"
    for mounted in mount_table():
        here = Path(mounted.path)
        if path.resolve().is_relative_to(here) and len(here.parts) >= len(holder.parts):
            holder, kind = here, mounted.kind
    return kind


def unmount(path: Path) -> None:
    """Unmount, lazily if it is busy. Does nothing where nothing is mounted."""
    root = os.geteuid() == 0
    command = ["umount"] if root else ["fusermount3", "-u"]
    for lazy in ([], [], ["-l"] if root else ["-z"]):
        if not is_mounted(path):
            return
        subprocess.run([*command, *lazy, str(path)], stderr=subprocess.DEVNULL)
        if is_mounted(path):
            time.sleep(_AGAIN_S)


def _unescaped(text: str) -> str:
    """The kernel writes blanks, tabs, newlines and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda number: chr(int(number[1], 8)), text)
