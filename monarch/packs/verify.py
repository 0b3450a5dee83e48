"""Reads a whole pack, and compares all of it with its digests."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from monarch.errors import PackError
from monarch.packs.directory import naming, require_known
from monarch.packs.format import LARGE, Entry
from monarch.packs.pack import Pack, PackSummary, chunk_name, large_name
from monarch.packs.rebuild import Damage, Tables, read_tables
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.posix.workers import Workers
from monarch.text import MiB, escape_text
from monarch.types import Progress

_PIECE = 1 * MiB
_TURN_S = 0.2
_READ = os.O_RDONLY | os.O_NONBLOCK
# The most damaged files that are listed one by one.
_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """``files`` and ``bytes`` that were read. ``damage`` lists the first of ``damaged`` faults."""

    files: int
    bytes: int
    damaged: int
    damage: list[Damage]


def verify(path: Path, *, jobs: int, progress: Progress) -> VerifyReport:
    """Reads all files of the pack ``path``, up to ``jobs`` at once. Damage is listed, not raised.
    Raises PackError if ``path`` is no directory of a pack, or a file of it is of a newer
    Monarch."""
    name = escape_text(os.fspath(path))
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            with naming(os.fsencode(path)):
                require_known(root)
                tables = read_tables(root, progress=lambda done, total, words: None)
            run = _Run(root, tables, progress)
            run.read_all(jobs)
            run.compare_index(path)
            return run.report()
    except OSError as error:
        raise PackError(f"{name}: {error.strerror}", hint="name the directory of a pack") from error


class _Run:
    """One check of all files. Several threads read; a lock guards the counts."""

    def __init__(self, root: int, tables: Tables, progress: Progress) -> None:
        self._root = root
        self._tables = tables
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = False
        self._files = 0
        self._bytes = 0
        self._damage = tables.damage[:_MOST_LISTED]
        self._damaged = len(tables.damage)
        self._reported = {each.file for each in tables.damage}

    def read_all(self, jobs: int) -> None:
        """Compares the bytes of all files with their digests."""
        total = sum(entry.size for entry in self._tables.entries if not _is_further(entry))
        work = self._work()
        with Workers[None](jobs) as workers:
            try:
                while True:
                    while workers.pending < 2 * jobs and (each := next(work, None)):
                        workers.put(self._read_file, *each)
                    if not workers.pending:
                        return
                    with suppress(queue.Empty):
                        workers.take(_TURN_S)
                    self._progress(self._bytes, total, "verifying")
            finally:
                self._stopped = True

    def _work(self) -> Iterator[tuple[bytes, list[Entry]]]:
        """Each file of the pack, with the entries whose bytes are in it."""
        for number, found in enumerate(self._tables.chunks):
            if found is not None:
                yield chunk_name(number), found.entries
        for entry in self._tables.entries:
            if entry.chunk == LARGE:
                yield large_name(entry.offset), [entry._replace(offset=0)]

    def _read_file(self, name: bytes, entries: list[Entry]) -> None:
        try:
            fd = open_beneath(self._root, name, _READ)
        except OSError as error:
            # What is missing was reported with the tables.
            if name not in self._reported:
                self._note(Damage(name, None, f"it cannot be read: {error.strerror}"))
            return
        with closing_fd(fd):
            for entry in entries:
                if self._stopped:
                    return
                what = self._compared(fd, entry)
                if what:
                    self._note(Damage(name, entry.path, what))

    def _compared(self, fd: int, entry: Entry) -> str:
        """What is wrong with the bytes of an entry, empty if nothing is."""
        digest = xxhash.xxh3_64()
        position, end = entry.offset, entry.offset + entry.size
        while position < end and not self._stopped:
            try:
                piece = os.pread(fd, min(_PIECE, end - position), position)
            except OSError as error:
                return f"it cannot be read: {error.strerror}"
            if not piece:
                return "its bytes are cut off"
            digest.update(piece)
            position += len(piece)
            with self._lock:
                self._bytes += len(piece)
        with self._lock:
            self._files += 1
        return "" if digest.intdigest() == entry.digest else "its bytes differ from their digest"

    def _note(self, damage: Damage) -> None:
        with self._lock:
            self._damaged += 1
            if len(self._damage) < _MOST_LISTED:
                self._damage.append(damage)

    def compare_index(self, path: Path) -> None:
        """Compares the index and the description with the tables."""
        expected = self._expected()
        try:
            with Pack.open(os.fsencode(path)) as pack:
                pack.require_sound()
                found = pack.info
        except PackError as error:
            self._note(Damage(b"index", None, str(error.args[0])))
            return
        loses = any(each.loses for each in self._tables.damage)
        if expected is not None and found != expected and not loses:
            self._note(Damage(b"index", None, "it differs from the tables of the chunks"))

    def _expected(self) -> PackSummary | None:
        try:
            return self._tables.index()[1]
        except PackError as error:
            self._note(Damage(b"chunks", None, str(error.args[0])))
            return None

    def report(self) -> VerifyReport:
        return VerifyReport(self._files, self._bytes, self._damaged, self._damage)


def _is_further(entry: Entry) -> bool:
    """Whether the bytes of a name are those of another entry."""
    return bool(entry.group) and entry.chunk > LARGE
