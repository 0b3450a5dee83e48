"""Moves parts of the written tree that are not in use from memory to a file.

    node(ino, what)                   what: the inode and what the source has of it (``marshal``)
    name(parent, name, place, ino)    place: the index of an entry in its directory's listing

The file is sqlite's, which keeps a few pages of it and maps none: a disk that fails is an error and
no signal. It has no name, is never synced and ends with the daemon; the next mount plays the
journal. Used from one thread, the event loop's. The calls are made in another one: a disk that
hangs takes a second of the event loop once, and from then on only what needs the file waits.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from monarch.errors import Refused
from monarch.namespace.build import sweep_stages
from monarch.posix.bounded_calls import BoundedCalls
from monarch.types import Ino

log = logging.getLogger(__name__)

_SETTINGS = (
    "pragma journal_mode = memory",
    "pragma synchronous = off",
    "pragma locking_mode = exclusive",
    "pragma temp_store = memory",
    "pragma cache_size = -2048",
)
# The size of the checksum before the bytes of a node.
_SUM = 4
# How long the event loop waits for the disk, in seconds.
_WAIT_S = 1.0
# The interval of checks whether a disk answers again, in seconds.
_LOOK_S = 0.05
_TABLES = (
    "create table node(ino integer primary key, what blob not null)",
    "create table name(parent integer, name blob, place integer not null, ino integer not null,"
    " primary key(parent, name)) without rowid",
    "create unique index place on name(parent, place)",
)


class Spill:
    """The file of written names that are not in use. ``prefix`` is the begin of its name, which is
    removed at once.

    All calls raise Unanswered while the disk does not answer, and Refused, EIO, if the file cannot
    be read or is damaged; ``failure`` then has the reason. Calls that write raise OSError.
    """

    def __init__(self, prefix: Path) -> None:
        self._calls = BoundedCalls("names", wait_s=_WAIT_S)
        # The bytes of the nodes that were read with the last names, by inode.
        self._near: dict[int, bytes] = {}
        self._directory = prefix.parent
        self.failure = ""
        try:
            self._tables = self._calls.call(_made, prefix)
        except BaseException:
            self._calls.close()
            raise

    async def answers(self) -> None:
        while self._calls.is_stuck:
            await trio.sleep(_LOOK_S)

    def close(self) -> None:
        self._calls.call(self._tables.close)
        self._calls.close()

    def node(self, ino: Ino) -> bytes | None:
        what = self._near.get(ino)
        if what is None:
            found = self._asked("select what from node where ino = ?", ino)
            if not found:
                return None
            what = found[0][0]
        if _summed(what[_SUM:]) != what:
            raise self._failed("a record is damaged")
        return what[_SUM:]

    def inos(self, after: Ino, count: int) -> list[Ino]:
        """The next ``count`` inodes after ``after``, ascending."""
        wanted = "select ino, what from node where ino > ? order by ino limit ?"
        found = self._asked(wanted, after, count)
        self._near = dict(found)
        return [Ino(ino) for ino, _ in found]

    def find(self, parent: Ino, name: bytes) -> tuple[int, Ino] | None:
        """The place of a name and its inode."""
        wanted = "select place, ino from name where parent = ? and name = ?"
        found = self._asked(wanted, parent, name)
        return (found[0][0], Ino(found[0][1])) if found else None

    def names(self, parent: Ino, start: int, end: int, count: int) -> list[tuple[int, bytes, Ino]]:
        """The next ``count`` names of a directory, by place, from ``start`` to before ``end``."""
        wanted = (
            "select place, name, name.ino, what from name left join node using (ino)"
            " where parent = ? and place >= ? and place < ? order by place limit ?"
        )
        found = self._asked(wanted, parent, start, end, count)
        self._near = {ino: what for _, _, ino, what in found if what is not None}
        return [(place, name, ino) for place, name, ino, _ in found]

    def move(
        self,
        *,
        nodes: Iterable[tuple[Ino, bytes]],
        names: Iterable[tuple[Ino, bytes, int, Ino]],
        gone: Iterable[Ino],
        unnamed: Iterable[tuple[Ino, bytes]],
    ) -> None:
        """Adds ``nodes`` and ``names``, and removes ``gone`` and ``unnamed``, in one transaction.
        After Unanswered the transaction may still complete."""
        self._near = {}
        summed = [(ino, _summed(what)) for ino, what in nodes]
        self._calls.call(_move, self._tables, summed, list(names), list(gone), list(unnamed))

    def _asked(self, wanted: str, *values: object) -> list[Any]:
        try:
            return self._calls.call(_found, self._tables, wanted, values)
        except OSError as error:
            raise self._failed(str(error.strerror)) from error

    def _failed(self, why: str) -> Refused:
        if not self.failure:
            self.failure = f"{self._directory}: {why}"
            log.error(
                "names of written files cannot be read from the state directory %s; nothing is"
                " lost: check its disk, unmount and mount again",
                self.failure,
            )
        return Refused(errno.EIO)


def _summed(what: bytes) -> bytes:
    """``what`` with its checksum before it."""
    return zlib.crc32(what).to_bytes(_SUM, "little") + what


def _made(prefix: Path) -> sqlite3.Connection:
    sweep_stages(prefix)
    fd, path = tempfile.mkstemp(".part", f"{prefix.name}.", prefix.parent)
    os.close(fd)
    try:
        with _as_os_error():
            tables = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for statement in (*_SETTINGS, *_TABLES):
                tables.execute(statement)
        return tables
    finally:
        os.unlink(path)


def _found(tables: sqlite3.Connection, wanted: str, values: tuple[object, ...]) -> list[Any]:
    with _as_os_error():
        return tables.execute(wanted, values).fetchall()


def _move(
    tables: sqlite3.Connection,
    nodes: list[tuple[Ino, bytes]],
    names: list[tuple[Ino, bytes, int, Ino]],
    gone: list[Ino],
    unnamed: list[tuple[Ino, bytes]],
) -> None:
    with _as_os_error():
        tables.execute("begin")
        try:
            tables.executemany("delete from node where ino = ?", ((ino,) for ino in gone))
            tables.executemany("delete from name where parent = ? and name = ?", unnamed)
            tables.executemany("insert or replace into node values (?, ?)", nodes)
            tables.executemany("insert or replace into name values (?, ?, ?, ?)", names)
            tables.execute("commit")
        except BaseException:
            if tables.in_transaction:
                tables.execute("rollback")
            raise


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
        raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error)) from error
