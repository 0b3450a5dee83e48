"""The mount table of this process."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MountedFileSystem:
    """A line of the mount table: the mount point and the type of the file system."""

    mount_point: Path
    kind: str


def mount_table(text: bytes | None = None) -> list[MountedFileSystem]:
    """The mounts of this process, from the text of ``/proc/self/mountinfo``."""
    table = []
    for line in (Path("/proc/self/mountinfo").read_bytes() if text is None else text).splitlines():
        before, _, after = line.partition(b" - ")
        # Blanks and newlines in a name are written \040 and \012.
        place = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), before.split(b" ")[4])
        table.append(MountedFileSystem(Path(os.fsdecode(place)), after.split(b" ")[0].decode()))
    return table
