"""The checkpoints and other files that were written through a mount: found, listed, compared with
the source."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from monarch.cli.daemon_call import ask
from monarch.control.registry import MountRecord
from monarch.errors import MonarchError, Unanswered, UsageError
from monarch.frameworks.store import MANIFEST, Listed, digest_of, list_checkpoints
from monarch.fuse.mountpoint import open_root
from monarch.posix.bounded_calls import call_within
from monarch.posix.files import closing_fd, status_at
from monarch.posix.openat2 import open_beneath
from monarch.telemetry.report import WrittenFile, WrittenFiles
from monarch.text import escape_text

# Time limit for reading a manifest: the read goes through the mount, whose source may hang.
_PATIENCE_S = 10.0
# Files that a checkpointer keeps beside the checkpoints.
_BESIDE = frozenset({MANIFEST, "lock"})
# Does not wait for a fifo.
_READ = os.O_RDONLY | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Row:
    """A checkpoint, or another file that was written. ``path`` is relative to the mount. The values
    from ``xxh3`` on are None without a manifest; ``complete``: the file has its length there.
    ``moves``: the source may have it at another path, until it has a change that waits."""

    path: str
    bytes: int
    durable: str
    written_ns: int
    xxh3: str | None = None
    complete: bool | None = None
    step: int | None = None
    epoch: int | None = None
    moves: bool = False

    @property
    def is_at_source(self) -> bool:
        return self.durable == "source" and not self.moves


def rows_of(record: MountRecord, below: str) -> list[Row]:
    """Checkpoints and other written files at and beneath ``below``, newest first."""
    written = written_of(record, below)
    known = {file.path: file for file in written}
    directories = manifest_directories(below, written)
    rows = [
        _row_of(directory, listed, known)
        for directory in directories
        for listed in listed_in(record, directory)
    ]
    rows = [row for row in rows if is_beneath(row.path, below)]
    named = {row.path for row in rows}
    rows += [
        Row(file.path, file.bytes, file.durable, file.mtime_ns, moves=file.moves)
        for file in written
        if file.path not in named
        and not (
            os.path.dirname(file.path) in directories and os.path.basename(file.path) in _BESIDE
        )
    ]
    return sorted(rows, key=lambda row: (-row.written_ns, row.path))


def _row_of(directory: str, listed: Listed, known: dict[str, WrittenFile]) -> Row:
    entry = listed.checkpoint
    path = os.path.join(directory, entry.name)
    # A file that was not written through this mount comes from the source.
    durable = known[path].durable if path in known else listed.durable or "source"
    manifest = entry.xxh3, listed.complete, entry.step, entry.epoch
    moves = path in known and known[path].moves
    return Row(path, entry.size, durable, entry.saved_ns, *manifest, moves)


def is_beneath(path: str, below: str) -> bool:
    """Whether a path is ``below``, which is "" for the whole mount, or in that directory."""
    return not below or path == below or path.startswith(f"{below}/")


def written_of(record: MountRecord, below: str) -> list[WrittenFile]:
    """The files at and beneath ``below`` that the daemon lists as written, in no order."""
    files: list[WrittenFile] = []
    last = ask(
        record,
        "written",
        {"path": below},
        answer=WrittenFiles,
        on_progress=lambda raw: files.extend(WrittenFiles.from_dict(raw).files),
    )
    return [*files, *last.files]


def manifest_directories(below: str, written: Iterable[WrittenFile]) -> list[str]:
    """The directories that may have a manifest, relative to the mount."""
    found = {os.path.dirname(f.path) for f in written if os.path.basename(f.path) == MANIFEST}
    return sorted(found | {below, os.path.dirname(below)})


def listed_in(record: MountRecord, directory: str) -> list[Listed]:
    """The checkpoints of ``directory``. Raises MonarchError if its manifest cannot be read in
    time."""
    where = Path(record.mountpoint) / directory
    try:
        return call_within(_PATIENCE_S, list_checkpoints, where)
    except NotADirectoryError:
        return []
    except Unanswered:
        raise _unanswered(record, os.fspath(where)) from None


def _unanswered(record: MountRecord, where: str) -> MonarchError:
    return MonarchError(
        f"{escape_text(where)} has not answered for {_PATIENCE_S:g} seconds",
        hint=f"`monarch status {escape_text(record.mountpoint)}` shows what hangs",
    )


@contextmanager
def directory_of_checkpoints(record: MountRecord, directory: str) -> Iterator[Path | None]:
    """A path of a directory of the mount that has a manifest; None if it is none. The path leads to
    it until the end of the block, whatever its user puts in its place. No link is followed. Raises
    MonarchError, and OSError with the name of the directory."""
    where = os.path.join(record.mountpoint, directory)
    fd = -1
    try:
        fd = call_within(_PATIENCE_S, _opened_beneath, Path(record.mountpoint), directory)
        is_one = fd >= 0 and call_within(_PATIENCE_S, status_at, fd, MANIFEST) is not None
        yield Path(f"/proc/self/fd/{fd}") if is_one else None
    except Unanswered:
        raise _unanswered(record, where) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, where) from error
    finally:
        if fd >= 0:
            os.close(fd)


def _opened_beneath(root: Path, directory: str) -> int:
    """A descriptor of a directory of the mount, -1 if there is none. Raises UsageError, OSError."""
    with closing_fd(open_root(root)) as root_fd:
        try:
            fd = open_beneath(root_fd, os.fsencode(directory), os.O_PATH)
            mode = os.fstat(fd).st_mode
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            fd, mode = -1, stat.S_IFLNK
    if stat.S_ISDIR(mode):
        return fd
    if fd >= 0:
        os.close(fd)
    if not stat.S_ISLNK(mode):
        return -1
    raise UsageError(
        f"{escape_text(os.fspath(root / directory))} leads through a symbolic link",
        hint="name the directory that it leads to",
    )


def newest_of(record: MountRecord, below: str) -> list[str]:
    """The newest complete checkpoint with its manifest, or the newest file."""
    rows = rows_of(record, below)
    checkpoints = [row for row in rows if row.complete]
    for row in checkpoints or rows:
        beside = os.path.join(os.path.dirname(row.path), MANIFEST)
        return [row.path, beside] if row.complete else [row.path]
    raise UsageError(
        "no file was written there", hint="`monarch ckpt ls MOUNT` lists written files"
    )


# -- comparing with the source ---------------------------------------------------------------------

Verdict = Literal["same", "waiting", "damaged", "different", "missing", "unreadable"]


@dataclass(frozen=True, slots=True)
class Compared:
    """``waiting``: right in the mount, not at the source yet. ``damaged``: the checksum differs.
    ``different``, ``missing``, ``unreadable``: at the source or in the mount; ``why`` says which.
    """

    path: str
    bytes: int
    verdict: Verdict
    why: str


# How often a file is compared that is changed meanwhile.
_TRIES = 3
WRONG = frozenset({"damaged", "different", "missing", "unreadable"})


def compare_all(
    record: MountRecord, below: str, progress: Callable[[Row, int, int], None]
) -> list[Compared]:
    """Compares the files at and beneath ``below``, newest first. ``progress`` is called with the
    file, the bytes read and those to read.

    A file that is wrong is looked up again: it counts as wrong only if it has not changed since it
    was listed. One that is gone from the list was removed."""
    rows = to_compare = rows_of(record, below)
    found: dict[str, Compared] = {}
    total = done = 0

    def read(row: Row, count: int) -> None:
        nonlocal done
        done += count
        progress(row, done, max(total, done))

    for _ in range(_TRIES):
        total += sum(row.bytes * (1 + row.is_at_source) for row in to_compare)
        for row in to_compare:
            found[row.path] = compare(
                row.path,
                mount=Path(record.mountpoint),
                source=Path(record.source),
                drained=row.is_at_source,
                expected=row.xxh3,
                progress=partial(read, row),
            )
        wrong = [row for row in to_compare if found[row.path].verdict in WRONG]
        now = {row.path: row for row in rows_of(record, below)} if wrong else {}
        changed = [row.path for row in wrong if now.get(row.path) != row]
        to_compare = [now[path] for path in changed if path in now]
        for path in changed:
            found.pop(path)
    for row in to_compare:
        found[row.path] = Compared(row.path, row.bytes, "waiting", "it is being changed")
    return [found[row.path] for row in rows if row.path in found]


def compare(
    path: str,
    *,
    mount: Path,
    source: Path,
    drained: bool,
    expected: str | None,
    progress: Callable[[int], None],
) -> Compared:
    """Compares ``path``, relative to both. ``drained``: the source should have it. ``expected``:
    the recorded XXH3 (64 bits, hexadecimal), if any. ``progress`` is called with the bytes read.
    A hanging mount or source makes it hang, too: the user can interrupt it.
    """
    here = _digest(mount, path, progress)
    if isinstance(here, Compared):
        return Compared(path, 0, here.verdict, f"{here.why} in the mount")
    size, digest = here
    if expected is not None and digest != expected:
        return Compared(path, size, "damaged", "its bytes differ from the recorded checksum")
    if not drained:
        return Compared(path, size, "waiting", "it is not at the source yet")
    there = _digest(source, path, progress)
    if isinstance(there, Compared):
        return Compared(path, size, there.verdict, f"{there.why} at the source")
    if there[0] != size:
        why = f"it has {there[0]} bytes at the source, but {size} in the mount"
        return Compared(path, size, "different", why)
    if there[1] != digest:
        return Compared(path, size, "different", "its bytes at the source differ")
    return Compared(path, size, "same", "")


def _digest(root: Path, path: str, progress: Callable[[int], None]) -> tuple[int, str] | Compared:
    """The size and the checksum of a file, or why it has none, in a Compared without a path."""
    try:
        with (
            closing_fd(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd,
            closing_fd(open_beneath(root_fd, os.fsencode(path), _READ)) as fd,
        ):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return Compared("", 0, "unreadable", "it is not a regular file")
            return digest_of(fd, progress)
    except FileNotFoundError:
        return Compared("", 0, "missing", "it is missing")
    except OSError as error:
        return Compared("", 0, "unreadable", f"it cannot be read ({error.strerror})")
