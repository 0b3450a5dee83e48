"""Writes a pack: lists the source, reads it in several threads, and commits chunk by chunk.

A chunk is written under a temporary name, synced and renamed, and pack.json is written last. So a
directory with pack.json is a complete pack, whenever the process was killed. The next run with the
same arguments keeps each complete chunk whose table still fits the source.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from monarch.errors import SourceError, UsageError, source_remedy
from monarch.packs.directory import TREE as TREE_NAME
from monarch.packs.format import (
    HEADER_BYTES,
    LARGE,
    ORDERS,
    PAYLOAD,
    TREE,
    Entry,
    Header,
    encode_header,
    encode_table,
    path_key,
)
from monarch.packs.index import ChunkFile, encode_index
from monarch.packs.output import Output
from monarch.packs.pack import PackSummary, chunk_name, large_name, summary_of
from monarch.packs.plan import Placed, Plan, plan
from monarch.packs.reading import PIECE, Unread, copy_files, copy_large
from monarch.packs.tree import Failure, list_tree
from monarch.posix.failpoints import failpoint
from monarch.posix.files import closing_fd
from monarch.posix.workers import Workers
from monarch.text import escape_text
from monarch.types import Progress

# Seconds between two reports of the progress while a large file is read.
_TURN_S = 0.2
# Files of one task, at a source where each call may be a round trip.
_FILES = 16
# After this many files that cannot be read, the rest is not tried.
_MOST_FAILURES = 100


@dataclass(frozen=True, slots=True)
class Parameters:
    """What decides the bytes of a pack, together with the tree."""

    seed: int
    order: str
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class BuildReport:
    """``pack`` is None if files could not be read: ``failures`` has them, and the chunks without
    them are kept for the next run. ``bytes_read`` from the source in ``seconds``; ``kept_chunks``
    and ``kept_bytes`` were there already."""

    pack: PackSummary | None
    failures: list[Failure]
    bytes_read: int
    seconds: float
    kept_chunks: int
    kept_bytes: int


@dataclass(slots=True, eq=False)
class _Work:
    """One chunk, or one large file, that is being written. ``unfinished`` counts its tasks."""

    name: bytes
    number: int
    files: Sequence[Placed]
    fd: int
    unfinished: int
    digests: list[int]
    has_failed: bool = False


class _Task(NamedTuple):
    """The files of a work from ``first`` to ``last``, excluded; a large file is alone."""

    work: _Work
    first: int
    last: int


def build(
    source: Path, directory: Path, parameters: Parameters, *, jobs: int, progress: Progress
) -> BuildReport:
    """Packs the tree ``source`` into ``directory``; up to ``jobs`` calls to the source run at once.

    Raises SourceError if the source cannot be listed, UsageError if ``directory`` is in use for
    something else, LockedError if another process packs there, and PackError if it cannot be
    written, for example because the disk is full.
    """
    try:
        root = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        name = escape_text(os.fspath(source))
        raise SourceError(
            f"{name}: {error.strerror}",
            errno=error.errno or errno.EIO,
            hint=source_remedy(error.errno, name),
        ) from error
    with closing_fd(root), Output.open(directory, source_root=root) as output:
        output.begin(parameters.seed, parameters.order, parameters.chunk_bytes)
        return _Build(root, source, output, parameters, jobs, progress).run()


class _Build:
    """One run. The calling thread decides and commits; the threads of a pool read and write."""

    def __init__(
        self,
        root: int,
        source: Path,
        output: Output,
        parameters: Parameters,
        jobs: int,
        progress: Progress,
    ) -> None:
        self._root = root
        self._source = source
        self._output = output
        self._parameters = parameters
        self._jobs = jobs
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = False
        self._open: set[_Work] = set()
        self._failures: list[Failure] = []
        self._tables: dict[int, list[Entry]] = {}
        self._large: dict[int, Entry] = {}
        self._bytes_read = 0
        self._kept_bytes = 0
        self._total = 0

    def run(self) -> BuildReport:
        name = escape_text(os.fspath(self._source))
        try:
            tree = list_tree(
                self._root,
                jobs=self._jobs,
                on_entries=lambda count: self._progress(0, None, f"{count:,} entries listed"),
            )
        except OSError as error:
            raise SourceError(
                f"{name}: {error.strerror}", errno=error.errno or errno.EIO
            ) from error
        planned = plan(
            tree.entries,
            seed=self._parameters.seed,
            order=self._parameters.order,
            chunk_bytes=self._parameters.chunk_bytes,
        )
        # Of each file the plan has another value.
        tree.entries.clear()
        self._failures = tree.failures
        if self._output.is_complete:
            return self._complete_already(planned)
        if self._failures:
            # The files that are missing would change the place of most others.
            return BuildReport(None, self._failures, 0, 0.0, 0, 0)
        self._total = planned.bytes
        self._keep(planned)
        kept = len(self._tables) + len(self._large)
        begun = time.monotonic()
        self._copy(planned)
        seconds = time.monotonic() - begun
        pack = None if self._failures else self._finish(planned)
        return BuildReport(
            *(pack, self._failures, self._bytes_read, seconds, kept, self._kept_bytes)
        )

    def _head(self, kind: int, sequence: int, entries: Sequence[Entry], large: int = 0) -> bytes:
        """The header of a chunk, and its table."""
        table = encode_table(entries)
        header = Header(
            kind=kind,
            seed=self._parameters.seed,
            sequence=sequence,
            entries=len(entries),
            table_bytes=len(table),
            payload_bytes=sum(entry.size for entry in entries) if kind == PAYLOAD else 0,
            chunk_bytes=self._parameters.chunk_bytes,
            order=ORDERS.index(self._parameters.order),
            large=large,
            table_digest=xxhash.xxh3_64_intdigest(table),
        )
        return encode_header(header) + table

    # -- what an earlier run left ------------------------------------------------------------------

    def _keep(self, planned: Plan) -> None:
        """Finds the complete chunks and large files that still fit, and removes all others."""
        for number, files in enumerate(planned.chunks):
            table = self._fitting(chunk_name(number), [each.entry for each in files], number)
            if table is not None:
                self._tables[number] = table
                self._kept_bytes += sum(entry.size for entry in table)
        for number, each in enumerate(planned.large):
            digest = self._output.large_digest(number, large_name(number), each.entry)
            if digest is not None:
                self._large[number] = each.entry._replace(digest=digest)
                self._kept_bytes += each.entry.size
        kept = {chunk_name(number) for number in self._tables}
        kept |= {large_name(number) for number in self._large}
        self._output.remove_others(kept)

    def _fitting(self, name: bytes, planned: Sequence[Entry], number: int) -> list[Entry] | None:
        """The table of a complete chunk if it is the planned one but for digests."""
        found = self._output.table(name)
        if found is None or [entry._replace(digest=0) for entry in found.entries] != planned:
            return None
        header = found.header
        parameters = self._parameters
        is_ours = (header.seed, header.order, header.chunk_bytes, header.sequence) == (
            *(parameters.seed, ORDERS.index(parameters.order), parameters.chunk_bytes, number),
        )
        return list(found.entries) if is_ours and found.is_whole else None

    def _complete_already(self, planned: Plan) -> BuildReport:
        """The report for a pack that is complete. Raises UsageError if it is another one."""
        tree = [*planned.tree, *(each.entry for each in planned.large)]
        tree.sort(key=lambda entry: path_key(entry.path))
        fits = self._fitting(TREE_NAME, tree, len(planned.chunks)) is not None and all(
            self._fitting(chunk_name(number), [each.entry for each in files], number) is not None
            for number, files in enumerate(planned.chunks)
        )
        if not fits or self._failures:
            raise UsageError(
                f"{self._output.name} has a complete pack of another state of the source, or made"
                " with other options",
                hint="a pack is never changed: name another directory",
            )
        return BuildReport(
            *(self._output.summary(), [], 0, 0.0, len(planned.chunks), planned.bytes)
        )

    # -- reading and writing -----------------------------------------------------------------------

    def _copy(self, planned: Plan) -> None:
        """Reads all that is missing. Raises PackError if it cannot be written."""
        self._progress(self._kept_bytes, self._total, "packing")
        tasks = self._tasks(planned)
        try:
            with Workers[None](self._jobs) as workers:
                try:
                    while True:
                        while workers.pending < 2 * self._jobs and (task := next(tasks, None)):
                            workers.put(self._carry_out, task)
                        if not workers.pending:
                            return
                        with suppress(queue.Empty):
                            workers.take(_TURN_S)
                        self._progress(self._kept_bytes + self._bytes_read, self._total, "packing")
                finally:
                    self._stopped = True
        except OSError as error:
            raise self._output.failed(error) from error
        finally:
            for work in self._open:
                self._output.discard(work.name, work.fd)

    def _tasks(self, planned: Plan) -> Iterator[_Task]:
        """All that is to be read. Opens a work when its first task is due. Raises OSError."""
        for number, each in enumerate(planned.large):
            if number not in self._large and not self._has_given_up():
                yield _Task(self._work(large_name(number), number, [each], 1), 0, 1)
        for number, files in enumerate(planned.chunks):
            if number in self._tables or self._has_given_up():
                continue
            batches = list(_batches(files))
            work = self._work(chunk_name(number), number, files, len(batches))
            for first, last in batches:
                yield _Task(work, first, last)

    def _has_given_up(self) -> bool:
        return len(self._failures) >= _MOST_FAILURES

    def _work(self, name: bytes, number: int, files: Sequence[Placed], tasks: int) -> _Work:
        work = _Work(name, number, files, self._output.stage(name), tasks, [0] * len(files))
        with self._lock:
            self._open.add(work)
        return work

    def _carry_out(self, task: _Task) -> None:
        """Reads files and writes them; commits the work with its last task. Raises OSError."""
        if self._stopped:
            return
        work, first, last = task
        files = work.files[first:last]
        is_large = files[0].entry.chunk == LARGE

        def on_unread(failure: Failure) -> None:
            with self._lock:
                work.has_failed = True
                self._failures.append(failure)

        if is_large:
            try:
                work.digests[0] = copy_large(self._root, files[0], work.fd, self._count)
            except Unread as error:
                on_unread(error.failure)
        else:
            work.digests[first:last] = copy_files(self._root, files, work.fd, on_unread)
            self._count(sum(each.entry.size for each in files))
        with self._lock:
            work.unfinished -= 1
            if work.unfinished:
                return
            self._open.discard(work)
        self._end(work, is_large=is_large)

    def _count(self, count: int) -> None:
        """Counts bytes that were read. Raises InterruptedError if the build has ended."""
        if self._stopped:
            raise InterruptedError(errno.EINTR, "the build has ended")
        with self._lock:
            self._bytes_read += count

    def _end(self, work: _Work, *, is_large: bool) -> None:
        """Commits a work whose bytes are written, or removes it. Raises OSError."""
        if work.has_failed:
            self._output.discard(work.name, work.fd)
            return
        entries = [
            each.entry._replace(digest=digest)
            for each, digest in zip(work.files, work.digests, strict=True)
        ]
        if is_large:
            self._output.commit(work.name, work.fd)
            failpoint("pack-large")
            self._output.note_large(work.number, entries[0])
            self._large[work.number] = entries[0]
            return
        head = self._head(PAYLOAD, work.number, entries)
        if os.pwrite(work.fd, head, 0) != len(head):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        failpoint("pack-chunk-written")
        self._output.commit(work.name, work.fd)
        failpoint("pack-chunk")
        self._tables[work.number] = entries

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, planned: Plan) -> PackSummary:
        """Writes the tree chunk, the index and pack.json. Raises PackError."""
        large = [self._large[number] for number in range(len(planned.large))]
        tree = sorted([*planned.tree, *large], key=lambda entry: path_key(entry.path))
        head = self._head(TREE, len(planned.chunks), tree, large=len(large))
        chunks = []
        entries = list(tree)
        for number in range(len(planned.chunks)):
            table = self._tables[number]
            raw = encode_table(table)
            size = HEADER_BYTES + len(raw) + sum(entry.size for entry in table)
            chunks.append(ChunkFile(size, xxhash.xxh3_64_intdigest(raw)))
            entries += table
        raw = encode_index(entries, chunks)
        info = summary_of(
            raw,
            large=len(large),
            chunk_bytes=self._parameters.chunk_bytes,
            seed=self._parameters.seed,
            order=self._parameters.order,
        )
        self._output.finish(head, raw, info)
        return info


def _batches(files: Sequence[Placed]) -> Iterator[tuple[int, int]]:
    """Where the files of a chunk are divided into tasks."""
    first, size = 0, 0
    for at, each in enumerate(files):
        size += each.entry.size
        if size >= PIECE or at + 1 - first == _FILES or at + 1 == len(files):
            yield first, at + 1
            first, size = at + 1, 0
