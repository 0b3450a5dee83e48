"""What of the written tree nobody uses now, in a file instead of in memory.

    node(ino, what)                   what: the inode and what the source has of it (``marshal``)
    name(parent, name, place, ino)    place: the index of an entry in its directory's listing

The file is sqlite's, which keeps a few pages of it and maps none: a disk that fails is an error and
no signal. It has no name, is never synced and ends with the daemon; the next mount plays the
journal. Used from one thread, the event loop's: a call takes about 10 us, and the disk's time if
the kernel has not got the page.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from monarch.namespace.build import sweep_stages
from monarch.types import Ino

_SETTINGS = (
    "pragma journal_mode = memory",
    "pragma synchronous = off",
    "pragma locking_mode = exclusive",
    "pragma temp_store = memory",
    "pragma cache_size = -2048",
)
_TABLES = (
    "create table node(ino integer primary key, what blob not null)",
    "create table name(parent integer, name blob, place integer not null, ino integer not null,"
    " primary key(parent, name)) without rowid",
    "create unique index place on name(parent, place)",
)


class Spill:
    """``prefix`` is of the name that the file has for a moment. All raise OSError."""

    def __init__(self, prefix: Path) -> None:
        sweep_stages(prefix)
        fd, path = tempfile.mkstemp(".part", f"{prefix.name}.", prefix.parent)
        os.close(fd)
        try:
            with _as_os_error():
                self._tables = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                for statement in (*_SETTINGS, *_TABLES):
                    self._tables.execute(statement)
        finally:
            os.unlink(path)

    def close(self) -> None:
        self._tables.close()

    def node(self, ino: Ino) -> bytes | None:
        with _as_os_error():
            found = self._tables.execute("select what from node where ino = ?", (ino,)).fetchone()
        return None if found is None else found[0]

    def inos(self, after: Ino, count: int) -> list[Ino]:
        """The next so many inodes in their order."""
        wanted = "select ino from node where ino > ? order by ino limit ?"
        with _as_os_error():
            return [Ino(ino) for (ino,) in self._tables.execute(wanted, (after, count))]

    def find(self, parent: Ino, name: bytes) -> tuple[int, Ino] | None:
        """The place of a name and whose it is."""
        wanted = "select place, ino from name where parent = ? and name = ?"
        with _as_os_error():
            found = self._tables.execute(wanted, (parent, name)).fetchone()
        return None if found is None else (found[0], Ino(found[1]))

    def names(self, parent: Ino, start: int, end: int, count: int) -> list[tuple[int, bytes, Ino]]:
        """The next so many names of a directory, by place, from ``start`` to before ``end``."""
        wanted = (
            "select place, name, ino from name where parent = ? and place >= ? and place < ?"
            " order by place limit ?"
        )
        with _as_os_error():
            return self._tables.execute(wanted, (parent, start, end, count)).fetchall()

    def move(
        self,
        *,
        nodes: Iterable[tuple[Ino, bytes]],
        names: Iterable[tuple[Ino, bytes, int, Ino]],
        gone: Iterable[Ino],
        nameless: Iterable[tuple[Ino, bytes]],
    ) -> None:
        """Take ``nodes`` and ``names`` in, and forget ``gone`` and ``nameless``: all or nothing."""
        tables = self._tables
        with _as_os_error():
            tables.execute("begin")
            try:
                tables.executemany("delete from node where ino = ?", ((ino,) for ino in gone))
                tables.executemany("delete from name where parent = ? and name = ?", nameless)
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
