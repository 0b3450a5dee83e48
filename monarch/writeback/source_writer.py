"""The source's side of the drain: every change that is made at the source.

    expected.py              what the mount knew of an entry, compared with what the source has;
                             conflicts, and what the source does not support
    source_directories.py    directories that are open while changes are made in them, and the
                             temporary names there
    source_contents.py       staged files, and the places where contents go
    source_publishing.py     contents under their names, and files grown in place
    source_attributes.py     owner, mode, times and extended attributes of an open entry
    source_entries.py        directories, links and special files; renames, removals, attributes

Each call may wait for the source without a limit: none belongs on the event loop. Names are not
trusted: all calls stay beneath the descriptor of the source's root and follow no symbolic link. A
daemon of root makes each change with the rights of the user who made it on the mount (``Op.by``),
so that the source's own kernel decides what that user may do. A change whose record names no user
is made with the rights of the owner of the entry.

An entry of the source is compared with the identity that the mount knew (``Expected``) before it is
replaced, removed or changed. A difference is a *conflict*: the entry of the source stays, and bytes
that were written on the mount are kept beside it, under a name of their own.

Every change is idempotent: after a crash it is made again, so "already done" is success. An
attribute that the source does not support is reported once and left out; every other failure is
raised.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from monarch.posix import failpoints
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.text import MiB
from monarch.tiers.source import Source
from monarch.types import Identity
from monarch.writeback.expected import SourceLog
from monarch.writeback.op import Op, above
from monarch.writeback.source_attributes import SourceAttributes
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_directories import OpenDirectories, Temporaries
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_publishing import Publishing

# A file system with less free space than this, in bytes, is full: others may have freed some since.
_FULL_BYTES = 64 * MiB
_AT = os.O_PATH | os.O_DIRECTORY

Step = Callable[[OpenDirectories], "Identity | None"]


class SourceWriter:
    """The rooms of a source: ``log``, ``staged`` files, ``publishing`` of contents, changes of
    ``entries``. A *step* is a change with all arguments but the directories.

    ``token`` of the journal is in the names of staged files, so that no file of others is taken for
    one of them; ``node`` is in the names of files that are kept beside a changed one.
    """

    def __init__(self, source: Source, token: str, node: str | None = None) -> None:
        self._source = source
        self.log = log = SourceLog(token, node)
        attributes = SourceAttributes(log)
        temporaries = Temporaries(token, log)

        def directories() -> closing[OpenDirectories]:
            return closing(OpenDirectories(source, attributes, log))

        self._directories = directories
        self.staged = StagedContents(source, directories, attributes, temporaries)
        self.publishing = Publishing(directories, attributes, temporaries, log)
        self.entries = SourceEntries(attributes, temporaries, log)

    def carry_out(self, steps: Sequence[Step]) -> tuple[list[Identity | None], OSError | None]:
        """Makes the steps in order until one fails. Returns what each step returned that was made,
        and is durable, and the error that ended the list. Waits for the source without a limit."""
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
                return [], error
        return made, failure

    def has_room(self, size: int) -> bool:
        """Whether the file system of the source's root has room for ``size`` more bytes and one
        more file; False if it does not answer. Waits for the source without a limit."""
        try:
            return bool(self._source.at_root(_has_room_at, size))
        except OSError:
            return False

    def is_read_only_there(self, op: Op) -> bool:
        """Whether a change is in a read-only file system below the source, whose root accepts
        changes; False if the source does not answer. Waits for the source without a limit."""
        try:
            return bool(self._source.at_root(_is_read_only_at, op))
        except OSError:
            return False


def _is_read_only_at(root: int, op: Op) -> bool:
    if os.fstatvfs(root).f_flag & os.ST_RDONLY:
        return False
    for name in op.names():
        # A directory that is missing is to be made in the nearest one above.
        for directory in (*above(name), b""):
            with suppress(FileNotFoundError), closing_fd(open_beneath(root, directory, _AT)) as fd:
                if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
                    return True
                break
    return False


def _has_room_at(root: int, size: int) -> bool:
    disk = os.fstatvfs(root)
    # Some file systems do not count their files.
    has_file = disk.f_files == 0 or disk.f_favail > 0
    return has_file and disk.f_bavail * disk.f_frsize >= size + _FULL_BYTES


def _step_at(_root: int, step: Step, directories: OpenDirectories) -> Identity | None:
    return step(directories)
