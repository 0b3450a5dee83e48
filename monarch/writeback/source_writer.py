"""The source's side of the drain: every change that is made at the source.

    expected.py              what the mount knew of an entry, compared with what the source has
    source_log.py            conflicts, and what the source does not support
    source_directories.py    directories that are open while changes are made in them
    source_temporaries.py    the names of staged files
    source_places.py         where a content goes
    source_contents.py       staged files
    source_publishing.py     contents under their names, and files grown in place
    source_attributes.py     owner, mode, times and extended attributes of an open entry
    source_changes.py        changes of these at an entry that the source has
    source_names.py          directories, links and special files; renames and removals

Each call may wait for the source without a limit: none belongs on the event loop. Names are not
trusted: all calls stay beneath the descriptor of the source's root and follow no symbolic link. A
daemon of root makes each change with the rights of the user who made it on the mount (``Op.by``),
so that the source's own kernel decides what that user may do. A change whose record names no user
is made with the rights of the owner of the entry.

What stands at the source is compared with what the mount knew of it (``Expected``) before it is
replaced, removed or changed. A difference is a *conflict*: the entry of the source stays, and bytes
that were written on the mount are kept beside it, under a name of their own.

Every change is idempotent: after a crash it is made again, so "already done" is success. An
attribute that the source does not support is reported once and left out; every other failure is
raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from monarch.posix import failpoints
from monarch.posix.credentials import Credentials
from monarch.tiers.source import Source, SourceFile
from monarch.types import Identity
from monarch.writeback.expected import Expected, is_shared, is_time, shared
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import SourceAttributes
from monarch.writeback.source_changes import AttributeChanges
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_directories import OpenDirectories
from monarch.writeback.source_log import Conflict, SourceLog
from monarch.writeback.source_names import SourceNames
from monarch.writeback.source_places import Place
from monarch.writeback.source_publishing import Publishing
from monarch.writeback.source_temporaries import Temporaries
from monarch.writeback.staging import Staged

__all__ = [
    "Conflict",
    "Expected",
    "OpenDirectories",
    "Outcome",
    "Place",
    "SourceWriter",
    "Step",
    "is_shared",
    "is_time",
    "shared",
]

Step = Callable[[OpenDirectories], "Identity | None"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What each step returned that was made, and the error that ended the list, if one did."""

    made: tuple[Identity | None, ...]
    error: OSError | None


class SourceWriter:
    """``token`` of the journal is in the names of staged files, so that no file of others is taken
    for one of them; ``node`` is in the names of what is kept beside a file that changed."""

    def __init__(self, source: Source, token: str, node: str | None = None) -> None:
        self._source = source
        self._log = SourceLog(token, node)
        attributes = SourceAttributes(self._log)
        temporaries = Temporaries(token, self._log)

        def directories() -> closing[OpenDirectories]:
            return closing(OpenDirectories(source, attributes, self._log))

        self._directories = directories
        self._temporaries = temporaries
        self._staged = StagedContents(source, directories, attributes, temporaries)
        self._publishing = Publishing(directories, attributes, temporaries, self._log)
        self._names = SourceNames(attributes, temporaries, self._log)
        self._changes = AttributeChanges(attributes, self._log)

    def carry_out(self, steps: Sequence[Step]) -> Outcome:
        """Make the steps in order until one fails; those in the outcome are durable."""
        made: list[Identity | None] = []
        failure: OSError | None = None
        with self._directories() as directories:
            for step in steps:
                try:
                    made.append(self._source.at_root(_step_at, step, directories))
                except OSError as error:
                    failure = error
                    break
                failpoints.failpoint("drain-published")
            try:
                directories.sync()
            except OSError as error:
                return Outcome((), error)
        return Outcome(tuple(made), failure)

    # -- conflicts -------------------------------------------------------------------------------

    @property
    def conflicts(self) -> deque[Conflict]:
        """The last conflicts, the oldest first."""
        return self._log.conflicts

    @property
    def conflict_count(self) -> int:
        return self._log.conflict_count

    @property
    def dropped_xattrs(self) -> dict[tuple[bytes, bytes], str]:
        """The last extended attributes, by path and name, that the source has not taken: why."""
        return self._log.dropped_xattrs

    def forget_conflicts(self) -> None:
        """The user knows the conflicts and dropped attributes so far."""
        self._log.forget()

    # -- staged files: each raises OSError -------------------------------------------------------

    def part_name(self, number: int, *, through: bool = False) -> bytes:
        return self._temporaries.part(number, through=through)

    def open_part(self, op: Op, *, make: bool, is_new: bool) -> int:
        return self._staged.open_part(op, make=make, is_new=is_new)

    def open_place(self, op: Op, place: Place, expected: Expected, *, make: bool) -> int:
        return self._staged.open_place(op, place, expected, make=make)

    def open_staged(self, path: bytes, number: int, source_ino: int) -> SourceFile:
        return self._staged.open_staged(path, number, source_ino)

    def finish_part(self, op: Op, place: Place, expected: Expected) -> tuple[int, Identity | None]:
        return self._staged.finish_part(op, place, expected)

    def discard_part(self, path: bytes, number: int) -> None:
        self._staged.discard_part(path, number)

    def apply_attributes(self, fd: int, op: Op, place: Place, expected: Expected) -> None:
        self._staged.apply_attributes(fd, op, place, expected)

    def open_to_grow(
        self, op: Op, expected: Expected, base: int
    ) -> tuple[int, Credentials | None] | None:
        return self._publishing.open_to_grow(op, expected, base)

    # -- steps: each raises OSError --------------------------------------------------------------

    def publish(
        self,
        directories: OpenDirectories,
        op: Op,
        staged: Staged,
        place: Place,
        expected: Expected,
    ) -> Identity:
        return self._publishing.publish(directories, op, staged, place, expected)

    def grown(
        self, directories: OpenDirectories, op: Op, expected: Expected, *, tried: bool
    ) -> Identity | None:
        """``tried``: something of the content may be staged as well."""
        if tried:
            self._staged.discard(directories, op)
        return self._publishing.grown(directories, op, expected)

    def look_at_same(
        self, directories: OpenDirectories, op: Op, expected: Expected
    ) -> Identity | None:
        return self._publishing.look_at_same(directories, op, expected)

    def discard(self, directories: OpenDirectories, op: Op) -> None:
        self._staged.discard(directories, op)

    def mkdir(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity:
        return self._names.mkdir(directories, op, expected)

    def symlink(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        return self._names.symlink(directories, op, expected)

    def mknod(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        return self._names.mknod(directories, op, expected)

    def link(self, directories: OpenDirectories, op: Op, expected: Expected) -> Identity | None:
        return self._names.link(directories, op, expected)

    def unlink(self, directories: OpenDirectories, op: Op, expected: Expected) -> None:
        self._names.unlink(directories, op, expected)

    def rmdir(self, directories: OpenDirectories, op: Op, expected: Expected) -> None:
        self._names.rmdir(directories, op, expected)

    def rename(
        self, directories: OpenDirectories, op: Op, expected: Expected, over: Expected
    ) -> Identity | None:
        return self._names.rename(directories, op, expected, over)

    def attr(
        self, directories: OpenDirectories, op: Op, expected: Expected, *, will_come: bool = False
    ) -> Identity | None:
        return self._changes.change(directories, op, expected, will_come=will_come)


def _step_at(_root: int, step: Step, directories: OpenDirectories) -> Identity | None:
    return step(directories)
