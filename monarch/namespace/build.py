"""Builds a snapshot in one pass over the source; it is written to another name, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

import lmdb
import numpy as np
import numpy.typing as npt

from monarch.errors import SnapshotError, SourceError, UsageError
from monarch.namespace import schema
from monarch.namespace.numbering import Batch
from monarch.namespace.scan import Scan, printable
from monarch.namespace.schema import RECORD_BYTES, SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import append_trailer
from monarch.posix import failpoints
from monarch.posix.buckets import BUCKETS, buckets
from monarch.posix.files import closing_fd, sync_path
from monarch.text import MiB
from monarch.types import Ino, Progress

# Bytes that a transaction holds in memory before it is written.
_TRANSACTION_BYTES = 32 * MiB
_FIRST_MAP_BYTES = 1024 * MiB

_UNREADABLE_PATHS_SHOWN = 20
_PROGRESS_SECONDS = 0.1

# An inode number is 32 bits wide in the file.
_MOST_ENTRIES = (1 << 32) - 2


def build(
    source: Path | bytes,
    target: Path,
    *,
    jobs: int = 32,
    one_file_system: bool = False,
    mode: int | None = None,
    progress: Progress | None = None,
) -> SnapshotSummary:
    """Scans the directory ``source`` and publishes its snapshot as the file ``target``.

    Up to ``jobs`` calls wait for the source at once. No file is opened, and no symbolic link is
    followed. ``target`` is created or replaced only when the snapshot is complete and on the disk;
    a failure leaves no file. Without ``mode`` an existing file keeps its mode; a new file is closed
    to other users, since it names the files in closed directories. Raises SourceError,
    SnapshotError, and UsageError for a ``target`` in the source.
    """
    with open_source(source) as (root_fd, path):
        require_outside(root_fd, path, target)
        with Scan(root_fd, jobs=jobs, one_file_system=one_file_system) as scan:
            write(
                scan,
                target,
                source=path,
                mode=mode,
                progress=progress,
                expected=None,
            )
    with Snapshot.open(target) as snapshot:
        return snapshot.info()


@contextlib.contextmanager
def open_source(source: Path | bytes) -> Iterator[tuple[int, bytes]]:
    """A descriptor of the source directory, and its absolute path. Raises SourceError."""
    path = os.path.abspath(os.fsencode(source))
    try:
        root_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(
            f"cannot open the source {printable(path)}: {error.strerror}",
            errno=error.errno or 0,
            hint="name a directory that exists and that you may read",
        ) from error
    with closing_fd(root_fd):
        yield root_fd, path


class Tree(Protocol):
    """The entries that a snapshot is made of. ``batches`` yields every entry in the order of inode
    numbers, the root first."""

    one_file_system: bool

    def batches(self) -> Iterator[Batch]: ...


# The buckets of files by their inode numbers at the source (posix.buckets).
Buckets: TypeAlias = Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.int64]]


def write(
    scan: Tree,
    target: Path,
    *,
    source: bytes,
    mode: int | None,
    progress: Progress | None,
    expected: int | None,
    snapshot_id: str | None = None,
    buckets: Buckets = buckets,
) -> None:
    """Writes the entries of ``scan`` to a snapshot and publishes it as ``target``, with ``mode`` as
    for ``build``. ``expected`` is the number of entries for the progress, None if unknown. Without
    ``snapshot_id`` the snapshot gets a new id."""
    started = time.monotonic()
    created_ns = time.time_ns()
    report = paced(progress)
    if not target.parent.is_dir():
        raise _cannot_write(target, f"there is no directory {target.parent}")
    sweep_stages(target)
    # Unique, because another node may be building the same file on a shared file system.
    part = target.with_name(f"{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    held = -1
    # Begun before the file exists, since Ctrl-C may come between any two lines.
    try:
        held = _stage(part, target)
        writer = _Writer(_opened(held), buckets)
        try:
            for batch in scan.batches():
                writer.add(batch)
                report(writer.entries, expected, "entries")
            writer.finish(
                snapshot_id=snapshot_id or uuid.uuid4().hex,
                source=source,
                created_ns=created_ns,
                one_file_system=scan.one_file_system,
                scan_seconds=time.monotonic() - started,
            )
        finally:
            writer.close()
        _publish(held, part, target, mode=mode, page_bytes=writer.page_bytes)
    except lmdb.Error as error:
        raise _cannot_write(target, str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
        if held >= 0:
            os.close(held)
    if progress is not None:
        progress(writer.entries, writer.entries, "entries")


def require_outside(root_fd: int, source: bytes, target: Path) -> None:
    """Raises UsageError if ``target`` is in the source: it would be an entry of itself."""
    root = os.fstat(root_fd)
    parent = Path(os.path.realpath(target.parent))
    for directory in (parent, *parent.parents):
        with contextlib.suppress(OSError):
            if os.path.samestat(directory.stat(), root):
                raise UsageError(
                    f"snapshot {target} would be inside its source {printable(source)}",
                    hint="name a file outside it",
                )


def _stage(part: Path, target: Path) -> int:
    """Creates the empty file ``part``; returns a descriptor with a lock, which the kernel releases
    when the process dies: ``sweep_stages`` relies on that. Raises SnapshotError."""
    while True:
        try:
            held = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(target, error.strerror or str(error)) from error
        # Some network file systems have no locks: there the file stays if the process is killed.
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_nlink:
            return held
        # Another build removed it before it was locked, as of a dead process.
        os.close(held)


def _opened(fd: int) -> Path:
    """A path of an open file. Its own name may lead to another file by now: root may build the
    snapshot in a directory of another user."""
    return Path(f"/proc/self/fd/{fd}")


def sweep_stages(target: Path) -> None:
    """Removes the stages of ``target`` that killed processes have left."""
    for part in target.parent.glob(f"{glob.escape(target.name)}.*.part"):
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with closing_fd(os.open(part, flags)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def paced(progress: Progress | None) -> Progress:
    """A function that calls ``progress``, if given, at most ten times a second."""
    reported = time.monotonic()

    def report(done: int, total: int | None, words: str) -> None:
        nonlocal reported
        now = time.monotonic()
        if progress is not None and now - reported > _PROGRESS_SECONDS:
            reported = now
            progress(done, total, words)

    return report


class _Writer:
    """Writes batches as blocks into a database that no other process has open."""

    def __init__(self, part: Path, buckets: Buckets) -> None:
        self._map_bytes = _FIRST_MAP_BYTES
        self._environment = lmdb.open(
            os.fsencode(part),
            subdir=False,
            lock=False,
            sync=False,
            metasync=False,
            readahead=False,
            map_size=self._map_bytes,
            mode=0o600,
        )
        self._part = part
        self._transaction = self._environment.begin(write=True)
        self._written_bytes = 0
        self._pending_bytes = 0
        self.page_bytes = 0
        self.entries = 0
        self._records = bytearray()
        self._names: list[bytes] = []
        self._links: list[bytes] = []
        self._firsts: list[int] = []
        self._acls: list[bytes] = []
        # The blocks of each table so far.
        self._blocks: Counter[bytes] = Counter()
        self._acl_values = 0
        self._last_rank = -1
        self._closed: list[Ino] = []
        self._unreadable = 0
        self._unreadable_paths: list[str] = []
        self._totals = _Totals(buckets)

    def add(self, batch: Batch) -> None:
        if batch.rank > self._last_rank:
            self._last_rank = batch.rank
            # One more number than a block has entries: the last is the first of the next block.
            if len(self._firsts) == schema.BLOCK:
                self._put_firsts(self.entries + 1)
            self._firsts.append(self.entries + 1)
            if batch.closed:
                self._closed.append(batch.directory)
                self._add_unreadable(batch.path)
        for path in batch.unreadable:
            self._add_unreadable(path)
        self._records += batch.records
        self._names += batch.names
        self._links += batch.links
        for pair in batch.new_acls:
            self._acls += pair
            self._acl_values += 1
        self.entries += len(batch.names)
        if len(self._names) >= schema.BLOCK:
            if self.entries > _MOST_ENTRIES:
                raise SnapshotError("the source has more entries than a snapshot can number")
            self._put_inodes(schema.BLOCK)
        if len(self._links) >= schema.BLOCK:
            self._put_links(schema.BLOCK)
        while len(self._acls) >= schema.BLOCK:
            self._put_acls(schema.BLOCK)

    def finish(
        self,
        *,
        snapshot_id: str,
        source: bytes,
        created_ns: int,
        one_file_system: bool,
        scan_seconds: float,
    ) -> None:
        while self._names:
            self._put_inodes(schema.BLOCK)
        while self._links:
            self._put_links(schema.BLOCK)
        if self._acls:
            self._put_acls(schema.BLOCK)
        self._put_firsts(self.entries + 1)
        self._flag_closed()
        totals = self._totals
        info = SnapshotSummary(
            id=snapshot_id,
            source=source,
            created_ns=created_ns,
            entries=self.entries,
            **totals.counts,
            bytes_total=int(totals.curve.sum()),
            largest=totals.largest,
            sizes=tuple((bits, int(n)) for bits, n in enumerate(totals.sizes) if n),
            unreadable=self._unreadable,
            unreadable_paths=tuple(self._unreadable_paths),
            one_file_system=one_file_system,
            scan_seconds=round(scan_seconds, 3),
            acl_values=self._acl_values,
            newest_ns=totals.newest_ns,
        )
        self._put(schema.CURVE, totals.curve.astype("<u8").tobytes())
        self._put(schema.META, schema.encode_meta(info))
        self._transaction.commit()
        self.page_bytes = self._environment.stat()["psize"]
        self._environment.close()

    def close(self) -> None:
        self._transaction.abort()
        self._environment.close()

    def _put_inodes(self, count: int) -> None:
        block = bytes(self._records[: count * RECORD_BYTES])
        del self._records[: count * RECORD_BYTES]
        self._totals.add(np.frombuffer(block, dtype=schema.RECORD))
        self._append(schema.INODES, block)
        self._append(schema.NAMES, schema.pack_strings(self._names[:count]))
        del self._names[:count]

    def _put_links(self, count: int) -> None:
        self._append(schema.LINKS, schema.pack_strings(self._links[:count]))
        del self._links[:count]

    def _put_acls(self, count: int) -> None:
        self._append(schema.ACLS, schema.pack_strings(self._acls[:count]))
        del self._acls[:count]

    def _put_firsts(self, following: int) -> None:
        self._append(schema.CHILDREN, schema.pack_firsts(self._firsts, following))
        self._firsts.clear()

    def _append(self, table: bytes, content: bytes) -> None:
        self._put(schema.key(table, self._blocks[table]), content)
        self._blocks[table] += 1

    def _put(self, name: bytes, content: bytes) -> None:
        self._transaction.put(name, schema.seal(name, content))
        self._pending_bytes += len(content)
        if self._pending_bytes > _TRANSACTION_BYTES:
            self._transaction.commit()
            self._written_bytes += self._pending_bytes
            self._pending_bytes = 0
            # Enlarged long before it is full, because a put into a full database spoils all the
            # puts of its transaction.
            if self._written_bytes * 2 > self._map_bytes:
                self._map_bytes *= 4
                self._environment.set_mapsize(self._map_bytes)
            self._transaction = self._environment.begin(write=True)

    def _add_unreadable(self, path: bytes) -> None:
        self._unreadable += 1
        if len(self._unreadable_paths) < _UNREADABLE_PATHS_SHOWN:
            self._unreadable_paths.append(printable(path) or ".")

    def _flag_closed(self) -> None:
        """Flag the directories that could not be listed; their blocks were written before."""
        by_block: dict[int, list[Ino]] = {}
        for ino in self._closed:
            by_block.setdefault((ino - 1) >> schema.SHIFT, []).append(ino)
        for number, inos in by_block.items():
            name = schema.key(schema.INODES, number)
            value = self._transaction.get(name)
            if value is None:
                raise AssertionError("every inode has been written")
            content = bytearray(schema.unseal(name, value, where=str(self._part)))
            for ino in inos:
                at = ((ino - 1) & schema.MASK) * RECORD_BYTES + schema.FLAGS_OFFSET
                (flags,) = schema.U32.unpack_from(content, at)
                schema.U32.pack_into(content, at, flags | schema.UNREADABLE)
            self._put(name, bytes(content))


class _Totals:
    """Sums over the records of a snapshot."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        # By the names of the fields of SnapshotSummary.
        self.counts: Counter[str] = Counter()
        self.largest = 0
        self.newest_ns: int | None = None
        self.sizes = np.zeros(65, dtype=np.int64)
        self.curve = np.zeros(BUCKETS, dtype=np.uint64)

    def add(self, records: npt.NDArray[np.void]) -> None:
        alias = (records["flags"] & schema.ALIAS) != 0
        kinds = records["mode"] & 0o170000
        file = (kinds == 0o100000) & ~alias
        directory, link = kinds == 0o040000, (kinds == 0o120000) & ~alias
        of_kind = {
            "files": file,
            "directories": directory,
            "symlinks": link,
            "others": ~(alias | file | directory | link),
            "aliases": alias,
            "acls": records["flags"] >> schema.ACL_SHIFT,
        }
        self.counts.update({name: int(np.count_nonzero(it)) for name, it in of_kind.items()})
        newest_ns = int(records["ctime_ns"].max())
        self.newest_ns = newest_ns if self.newest_ns is None else max(self.newest_ns, newest_ns)
        sizes = records["size"][file].astype(np.uint64)
        if len(sizes):
            self.largest = max(self.largest, int(sizes.max()))
        # frexp returns the bit length: exact up to 2**53; a larger file may be counted
        # in the next class.
        self.sizes += np.bincount(np.frexp(sizes.astype(np.float64))[1], minlength=65)
        np.add.at(self.curve, self._buckets(records["source_ino"][file]), sizes)


def _publish(held: int, part: Path, target: Path, *, mode: int | None, page_bytes: int) -> None:
    """Names the open file ``held``, which ``part`` leads to, ``target``."""
    try:
        append_trailer(_opened(held), page_bytes=page_bytes)
        with contextlib.suppress(FileNotFoundError):
            before = target.stat()
            # The owner of a file that root refreshes must still be able to read it.
            with contextlib.suppress(PermissionError):
                os.fchown(held, before.st_uid, before.st_gid)
            os.fchmod(held, before.st_mode & 0o777)
        if mode is not None:
            os.fchmod(held, mode)
        os.fsync(held)
        failpoints.failpoint("snapshot-staged")
        part.replace(target)
        failpoints.failpoint("snapshot-published")
        sync_path(target.parent)
    except OSError as error:
        raise _cannot_write(target, error.strerror or str(error)) from error


def _cannot_write(target: Path, reason: str) -> SnapshotError:
    return SnapshotError(
        f"cannot write snapshot {target}: {reason}",
        hint="check that its directory exists, is writable and has space",
    )
