"""The files in the directory of a tier with the copies of a mount, and the forms of their names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from monarch.types import Ino

# The directories with the copies of one generation.
_GENERATION = re.compile(r"copies-[0-9A-Za-z-]+")
# The names beneath stage/.
_STAGED = re.compile(r"[0-9]+\.part|probe")

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def copy_name(ino: Ino) -> str:
    """The path of the copy of ``ino`` in a generation's directory, as in the C datapath."""
    return f"{ino & 0xFF:02x}/{ino}"


def ino_of(path: str) -> Ino | None:
    """The inode number of a path beneath a generation's directory, None if it is not a copy."""
    name = path.partition("/")[2]
    # A name of a copy has ASCII digits only; Python accepts other digits as numbers, too.
    if not (name.isascii() and name.isdecimal() and len(name) < 20):
        return None
    ino = Ino(int(name))
    return ino if ino > 0 and path == copy_name(ino) else None


class Contents:
    """The files beneath ``root``, a descriptor of the tier's own directory. Raises OSError; a
    directory that is missing counts as empty."""

    PREFIX = "copies-"
    _KNOWN = frozenset({"lock", "tier.json", "tier.part", "stage"})

    def __init__(self, root: int) -> None:
        self._root = root

    def generations(self) -> list[str]:
        """The ids of the snapshots that have copies there."""
        return [
            name.removeprefix(self.PREFIX)
            for name in self.names(".")
            if _GENERATION.fullmatch(name)
        ]

    def strangers(self) -> list[str]:
        """Files that Monarch did not make."""
        return [
            name
            for name in self.names(".")
            if name not in self._KNOWN and not _GENERATION.fullmatch(name)
        ]

    def stages(self) -> list[str]:
        """Stages: copies that are being written, or were when a daemon was killed."""
        unnamed = [name for name in self.names(".") if name == "tier.part"]
        return unnamed + [f"stage/{name}" for name in self.names("stage")]

    def staged_copies(self) -> list[str]:
        """The stages that have the form of a name that Monarch gives."""
        return [f"stage/{name}" for name in self.names("stage") if _STAGED.fullmatch(name)]

    def files(self, generation: str) -> Iterator[list[str]]:
        """The paths beneath a generation's directory, one subdirectory at a time."""
        top = self.PREFIX + generation
        loose: list[str] = []
        buckets: list[str] = []
        for name in self.names(top):
            (buckets if self._is_directory(f"{top}/{name}") else loose).append(name)
        yield loose
        for bucket in buckets:
            yield [f"{bucket}/{name}" for name in self.names(f"{top}/{bucket}")]

    def copies(self, generation: str) -> Iterator[str]:
        """The paths beneath the directory of the tier, of all copies of a generation."""
        # A file of another program may have the name of a generation.
        with suppress(NotADirectoryError):
            for paths in self.files(generation):
                for path in paths:
                    if ino_of(path) is not None:
                        yield f"{self.PREFIX}{generation}/{path}"

    def _is_directory(self, name: str) -> bool:
        return stat.S_ISDIR(os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode)

    def names(self, name: str) -> list[str]:
        """The sorted names in a directory."""
        try:
            fd = os.open(name, DIRECTORY, dir_fd=self._root)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)
