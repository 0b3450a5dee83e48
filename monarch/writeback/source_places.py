"""The place of a content at the source, and whether the users who wrote it may write there."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import Literal

from monarch.posix.credentials import Credentials, acting_as, can_act_as_others
from monarch.posix.descriptors import closing_fd
from monarch.posix.names import status_at
from monarch.writeback.expected import Expected
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import ITSELF, path_of

_TO_WRITE = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

PlaceKind = Literal["new", "over", "replace", "conflict"]


@dataclass(slots=True)
class Place:
    """The place of a content at the source: determined when its staged file is opened, and again
    when it is published.

    ``new``: the source has no such name. ``over``: ``target`` is an older version of the same file,
    so a user who may write that may publish this. ``replace``: a rename on the mount has replaced
    ``target``. ``conflict``: the name belongs to another entry now, so the content is kept beside
    it. ``by`` is the user who made the staged file, None for the daemon; ``source_ino`` is the
    inode number of the staged file.
    """

    kind: PlaceKind = "new"
    target: os.stat_result | None = None
    by: Credentials | None = None
    source_ino: int = 0


def kind_of_place(
    directory_fd: int, name: bytes, op: Op, expected: Expected
) -> tuple[PlaceKind, os.stat_result | None]:
    """The kind of a place and the entry that has its name. Raises OSError."""
    target = status_at(directory_fd, name)
    if target is None:
        return "new", None
    if stat.S_ISDIR(target.st_mode) or not expected.is_it(target, strict=op.strict, version=True):
        return "conflict", target
    known = expected.known.source_ino if expected.known is not None else 0
    is_own = target.st_ino == known or (not expected.is_made and expected.is_staged(target))
    return ("over" if is_own else "replace"), target


def require_writable(directory_fd: int, name: bytes, op: Op) -> None:
    """Raises PermissionError if one of the users who wrote a file may not write it at the source.

    The owner may: no other user could prevent it.
    """
    if op.by is None or not can_act_as_others():
        return
    with closing_fd(os.open(name, ITSELF, dir_fd=directory_fd)) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return
        for writer in (op.by, *op.also):
            if not (writer.is_root or writer.uid == status.st_uid):
                _try_to_write(fd, writer)


def _try_to_write(fd: int, by: Credentials) -> None:
    with acting_as(by):
        try:
            os.close(os.open(path_of(fd), _TO_WRITE))
        except OSError as error:
            # ETXTBSY: the file is a running program. A user without the right to write gets another
            # error.
            if error.errno != errno.ETXTBSY:
                raise
