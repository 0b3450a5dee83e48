"""Changes of the attributes of entries that the source has already."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace

from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.descriptors import closing_fd
from monarch.posix.names import status_at
from monarch.tiers.source import identity_of
from monarch.types import Identity
from monarch.writeback.expected import Expected, is_shared
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import ITSELF, SourceAttributes, sync_entry
from monarch.writeback.source_directories import OpenDirectories
from monarch.writeback.source_log import SourceLog

log = logging.getLogger(__name__)


class AttributeChanges:
    """``change`` makes one change of attributes or extended attributes."""

    def __init__(self, attributes: SourceAttributes, source_log: SourceLog) -> None:
        self._attributes = attributes
        self._log = source_log

    def change(
        self, directories: OpenDirectories, op: Op, expected: Expected, *, will_come: bool = False
    ) -> Identity | None:
        """Makes a change; returns the identity of the entry then, None if it is missing or belongs
        to others. ``will_come``: a later content brings its name and all attributes. Raises
        OSError."""
        try:
            by = directories.user_of(op)
            op = replace(op, path=_own_path(directories, op, by, expected))
            directory_fd, name = directories.of(op.path, by)
            with closing_fd(os.open(name, ITSELF, dir_fd=directory_fd)) as fd:
                return self._changed(fd, op, by, expected)
        except FileNotFoundError:
            if not will_come:
                log.warning("source: %r is not there to be changed", os.fsdecode(op.path))
            return None

    def _changed(
        self, fd: int, op: Op, by: Credentials | None, expected: Expected
    ) -> Identity | None:
        found = os.fstat(fd)
        if op.strict and not expected.is_same(found):
            self._log.note_conflict(op.path, "was replaced there by others: it stays as it is")
            return None
        op = self._without_times_of(op, found, expected)
        uid, known = found.st_uid, expected.known
        is_given = any(value is not None for value in (op.mode, op.uid, op.gid))
        is_others = by is not None and by.uid not in (0, uid)
        if by is not None and by.is_root and uid != 0 and known is not None and is_shared(known):
            # Access control lists are among the extended attributes.
            is_given, is_others = is_given or bool(op.xattrs), True
        if is_given and is_others:
            self._log.note_conflict(op.path, "is another user's there: its mode and owner stay")
            return None
        with acting_as(by):
            self._attributes.set(fd, op)
        sync_entry(fd)
        return identity_of(os.fstat(fd))

    def _without_times_of(self, op: Op, found: os.stat_result, expected: Expected) -> Op:
        """``op`` without its times if others have written the file since: the old times would hide
        that."""
        if (op.mtime_ns, op.atime_ns) == (None, None) or not op.strict:
            return op
        if expected.is_same(found, version=True):
            return op
        self._log.note_conflict(op.path, "was changed there by others: its times stay")
        return replace(op, mtime_ns=None, atime_ns=None)


def _own_path(
    directories: OpenDirectories, op: Op, by: Credentials | None, expected: Expected
) -> bytes:
    """The first name that still leads to the file; its first name if none does."""
    for path in op.paths if op.strict else ():
        with suppress(OSError):
            there = status_at(*directories.of(path, by))
            if there is not None and expected.is_same(there):
                return path
    return op.path
