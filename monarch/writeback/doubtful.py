"""Doubtful objects: bytes of files that were never synced before a power cut, and objects whose
records a damaged journal has lost. They are kept for a person.

    DIRECTORY/doubtful/NUMBER.bytes     the object, unchanged
    DIRECTORY/doubtful/NUMBER.json      path, size and time as recorded in the journal

These bytes are not drained to the source. They take room in the tier until they are discarded.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from monarch.posix.private_directory import read_private, replace_private
from monarch.text import errno_words
from monarch.writeback.objects import NotAnObjectError, Objects, object_path
from monarch.writeback.op import Op, raw, text

log = logging.getLogger(__name__)

_NAME = "doubtful"
_BYTES = ".bytes"
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Kept:
    """A doubtful object. ``path`` is the last path in the mount, empty if it is not known.

    ``size`` is the present size in bytes; ``recorded`` is the size in its last journal record, of
    the time ``written_ns``. The power cut was noticed at ``found_ns``. ``file`` holds the bytes and
    occupies ``held`` bytes of the disk.
    """

    number: int
    path: bytes
    size: int
    recorded: int
    written_ns: int
    found_ns: int
    held: int
    file: Path


class Doubtful:
    """The doubtful objects of ``directory``, which holds the objects; kept in a subdirectory."""

    def __init__(self, directory: Path) -> None:
        self._objects = directory
        self.directory = directory / _NAME
        self._kept = self._found()

    @property
    def held(self) -> int:
        """Disk space of all doubtful objects, in bytes."""
        # A copy: other threads keep and discard objects meanwhile.
        return sum(kept.held for kept in list(self._kept.values()))

    def list(self) -> list[Kept]:
        """All doubtful objects, the oldest first."""
        return sorted(self._kept.values(), key=lambda kept: (kept.found_ns, kept.number))

    def keep(self, doubted: Mapping[int, tuple[Op, int]]) -> None:
        """Moves objects to the doubtful ones, each with its last record and the record's time.

        Objects that were moved before stay unchanged. An object without written bytes is removed.
        Nothing is raised: the next mount tries again to move an object that cannot be moved.
        """
        moved = False
        for number, (op, recorded_ns) in doubted.items():
            try:
                moved |= self._keep(number, op, recorded_ns)
            except OSError as error:
                log.warning(
                    "the remaining bytes of %r cannot be put aside: %s; they stay where they are",
                    os.fsdecode(op.path),
                    errno_words(error.errno),
                )
        if moved:
            self._kept = self._found()

    def keep_unrecorded(self, first: int) -> tuple[Op, ...]:
        """Moves all objects from the number ``first`` on that have bytes to the doubtful ones: the
        journal has lost their records. Returns them with names in place of the unknown ones. Raises
        OSError if one cannot be moved."""
        objects = Objects(self._objects)
        found: dict[int, tuple[Op, int]] = {}
        for number in sorted(number for number in objects.numbers() if number >= first):
            try:
                status = objects.status(number)
            except NotAnObjectError as error:
                log.warning("%s %r", error.strerror, error.filename)
                continue
            if status.st_size:
                name = b"unrecorded-%d" % number
                op = Op(kind="content", path=name, object=number, size=status.st_size)
                found[number] = op, status.st_mtime_ns
        self.keep(found)
        for number in found.keys() & objects.numbers():
            path = os.fspath(object_path(self._objects, number))
            raise OSError(errno.EIO, "an object without a record cannot be put aside", path)
        return tuple(op for number, (op, _) in found.items() if number in self._kept)

    @property
    def next_number(self) -> int:
        """The number after those of all doubtful objects."""
        return max(self._kept, default=0) + 1

    def discard(self, number: int) -> None:
        """Removes a doubtful object. Removing a large file may take long. Raises OSError."""
        self._kept.pop(number, None)
        self._bytes(number).unlink(missing_ok=True)
        self._note(number).unlink(missing_ok=True)

    def _keep(self, number: int, op: Op, recorded_ns: int) -> bool:
        path = object_path(self._objects, number)
        try:
            status = path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(status.st_mode):
            # Something else is in the place of the object, whose bytes are gone.
            return False
        now = (status.st_size, status.st_mtime_ns)
        is_as_taken = op.same or (
            op.kind == "take" and op.was is not None and (op.was.size, op.was.mtime_ns) == now
        )
        if status.st_blocks == 0 or is_as_taken:
            path.unlink()
            return False
        self.directory.mkdir(mode=0o700, exist_ok=True)
        note = {
            "path": text(op.path),
            "size": op.size,
            "written_ns": recorded_ns,
            "found_ns": time.time_ns(),
        }
        try:
            replace_private(self._note(number), json.dumps(note))
        except OSError as error:
            # Without space for the note the bytes are kept without it.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        path.rename(self._bytes(number))
        return True

    def _found(self) -> dict[int, Kept]:
        found = {}
        with suppress(OSError):
            for path in self.directory.glob(f"*{_BYTES}"):
                if path.stem.isdecimal():
                    with suppress(OSError):
                        found[int(path.stem)] = self._read(int(path.stem), path)
        return found

    def _read(self, number: int, path: Path) -> Kept:
        status = path.lstat()
        name, recorded, written_ns, found_ns = b"", 0, status.st_mtime_ns, status.st_ctime_ns
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(read_private(self._note(number)))
            name, recorded = raw(note["path"]), int(note["size"])
            written_ns, found_ns = int(note["written_ns"]), int(note["found_ns"])
        held = status.st_blocks * _BLOCK
        return Kept(number, name, status.st_size, recorded, written_ns, found_ns, held, path)

    def _bytes(self, number: int) -> Path:
        return self.directory / f"{number}{_BYTES}"

    def _note(self, number: int) -> Path:
        return self.directory / f"{number}.json"
