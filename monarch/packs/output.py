"""The directory in which a pack is written: whose it is, what is complete in it, and commits.

``building`` is the mark of a directory in which a pack is being written. Its first line has the
parameters, and each further line a large file that is complete. Only files with names that Monarch
gives are ever removed, and only in a directory with this mark.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from monarch.errors import LockedError, MonarchError, PackError, UsageError
from monarch.packs.directory import (
    DESCRIPTION,
    INDEX,
    MARK,
    TREE,
    is_pack,
    naming,
    require_known,
)
from monarch.packs.format import FORMAT, VERSION, Entry
from monarch.packs.pack import Pack, PackSummary, encode_description
from monarch.packs.tables import TableFile, read_table
from monarch.posix.failpoints import failpoint
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.text import escape_text

_PART = b".part"
_OURS = frozenset({MARK, MARK + _PART, b"chunks", b"large", INDEX, INDEX + _PART, DESCRIPTION})
_NAMES = {
    b"chunks": re.compile(rb"([0-9]{6,}|tree)\.chunk(\.part)?"),
    b"large": re.compile(rb"[0-9]{6,}\.data(\.part)?"),
}
_READ = os.O_RDONLY | os.O_NONBLOCK
_MOST_MARK = 64 << 20
# A file of the pack may be read by the users whom the umask of the writer and the mode of the
# directory allow.
_MODE = 0o666


class Output:
    """A locked directory that is empty, has an unfinished pack, or a complete one."""

    def __init__(self, root: int, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._root = root
        self._log = -1
        self._large: dict[int, dict[str, Any]] = {}
        self.is_complete = False

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, source_root: int) -> Iterator[Output]:
        """Opens ``path`` or makes it, with mode 0700. Raises UsageError, LockedError, PackError."""
        name = escape_text(os.fspath(path))
        with ExitStack() as stack:
            try:
                _require_outside(path, source_root, name)
                with suppress(FileExistsError):
                    os.mkdir(path, 0o700)
                root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise PackError(
                    f"{name}: {error.strerror}",
                    hint="name a directory that can be made or is empty",
                ) from error
            stack.callback(os.close, root)
            lock(root, name)
            output = cls(root, path, name)
            stack.callback(output._close)
            yield output

    def _close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def begin(self, seed: int, order: str, chunk_bytes: int) -> None:
        """Marks the directory, or continues the pack in it. Raises UsageError, PackError, and
        NewerPack before anything is changed."""
        fields = {"seed": seed, "order": order, "chunk_bytes": chunk_bytes}
        mark = json.dumps({"format": FORMAT, "version": VERSION, **fields}).encode() + b"\n"
        try:
            with naming(os.fsencode(self._path)):
                require_known(self._root)
            names = {os.fsencode(name) for name in os.listdir(self._root)}
            if DESCRIPTION in names:
                self._require_ours(names)
                self.is_complete = True
                with suppress(FileNotFoundError):
                    os.unlink(MARK, dir_fd=self._root)
                return
            if MARK in names:
                self._require_ours(names)
                self._continue(mark)
            elif names <= {MARK + _PART} and self._is_part_of(names, mark):
                write_file(self._root, MARK, mark)
            else:
                raise self._not_ours()
            for below in _NAMES:
                with suppress(FileExistsError):
                    os.mkdir(below, 0o777, dir_fd=self._root)
            self._log = open_beneath(self._root, MARK, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise self.failed(error) from error

    def _is_part_of(self, names: Collection[bytes], mark: bytes) -> bool:
        """Whether the mark that an earlier run did not complete, if any, is a part of one."""
        for name in names:
            found = self._content(name, len(mark) + 1)
            if found is None or not found.startswith(mark[: min(len(found), 12)]):
                return False
        return True

    def _continue(self, mark: bytes) -> None:
        """Reads the mark of an earlier run. Raises UsageError."""
        raw = self._content(MARK, _MOST_MARK) or b""
        first, *lines = raw.split(b"\n")
        if first + b"\n" != mark:
            try:
                found = json.loads(first)
                made = (
                    f"--seed {found['seed']} --by {found['order']} --chunk {found['chunk_bytes']}"
                )
            except (ValueError, KeyError, TypeError):
                raise self._not_ours() from None
            raise UsageError(
                f"{self.name} has an unfinished pack of {made}",
                hint="continue it with these options, or name another directory",
            )
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(line)
                self._large[int(found["large"])] = found

    def _require_ours(self, names: Collection[bytes]) -> None:
        if not set(names) <= _OURS | {DESCRIPTION + _PART}:
            raise self._not_ours()

    def _not_ours(self) -> UsageError:
        return UsageError(
            f"{self.name} exists and is neither empty nor a pack of Monarch",
            hint="name another directory; nothing was changed",
        )

    # -- what is there -----------------------------------------------------------------------------

    def table(self, name: bytes) -> TableFile | None:
        """The table of a chunk, None if the chunk is missing or damaged."""
        try:
            with closing_fd(open_beneath(self._root, name, _READ)) as fd:
                return read_table(fd)
        except (OSError, PackError):
            return None

    def large_digest(self, number: int, name: bytes, entry: Entry) -> int | None:
        """The digest of a complete large file that fits the entry, else None."""
        found = self._large.get(number)
        if found is None or found != _large_line(number, entry._replace(digest=_digest(found))):
            return None
        try:
            with closing_fd(open_beneath(self._root, name, _READ)) as fd:
                status = os.fstat(fd)
        except OSError:
            return None
        is_whole = stat.S_ISREG(status.st_mode) and status.st_size == entry.size
        return _digest(found) if is_whole else None

    def remove_others(self, kept: Collection[bytes]) -> None:
        """Removes the chunks and large files of earlier runs that are not ``kept``. Raises
        PackError."""
        try:
            for below, pattern in _NAMES.items():
                with closing_fd(open_beneath(self._root, below, os.O_RDONLY)) as fd:
                    for name in map(os.fsencode, os.listdir(fd)):
                        if pattern.fullmatch(name) and b"%s/%s" % (below, name) not in kept:
                            os.unlink(name, dir_fd=fd)
        except OSError as error:
            raise self.failed(error) from error

    def summary(self) -> PackSummary:
        """The description of the complete pack. Raises PackError."""
        with Pack.open(os.fsencode(self._path)) as pack:
            return pack.info

    # -- commits -----------------------------------------------------------------------------------

    def stage(self, name: bytes) -> int:
        """A descriptor of a new file that has its name only after ``commit``. Raises OSError."""
        return _stage(self._root, name)

    def commit(self, name: bytes, fd: int) -> None:
        """Makes a staged file durable and gives it its name; closes it. Raises OSError."""
        _commit(self._root, name, fd)

    def discard(self, name: bytes, fd: int) -> None:
        """Closes and removes a staged file."""
        _discard(self._root, name, fd)

    def note_large(self, number: int, entry: Entry) -> None:
        """Records that a large file is complete. Raises OSError."""
        os.write(self._log, json.dumps(_large_line(number, entry)).encode() + b"\n")

    def finish(self, tree: bytes, index: bytes, info: PackSummary) -> None:
        """Writes the tree chunk, the index and the description. Raises PackError."""
        try:
            write_file(self._root, TREE, tree)
            failpoint("pack-tree")
            write_file(self._root, INDEX, index)
            failpoint("pack-index")
            for below in _NAMES:
                with closing_fd(open_beneath(self._root, below, os.O_RDONLY)) as fd:
                    os.fsync(fd)
            os.fsync(self._root)
            write_file(self._root, DESCRIPTION, encode_description(info))
            os.fsync(self._root)
            failpoint("pack-description")
            os.unlink(MARK, dir_fd=self._root)
            self.is_complete = True
        except OSError as error:
            raise self.failed(error) from error

    def failed(self, error: OSError) -> MonarchError:
        """The error for a pack that cannot be written."""
        hint = "the chunks written so far are kept: run the same command again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "make room and run the same command again: the chunks written so far are kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "name a directory in which you may write"
        return PackError(f"{self.name}: the pack cannot be written: {error.strerror}", hint=hint)

    def _content(self, name: bytes, most: int) -> bytes | None:
        """Up to ``most`` bytes of a regular file, else None. Raises OSError."""
        with closing_fd(open_beneath(self._root, name, _READ)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            with open(os.dup(fd), "rb") as file:
                return file.read(most)


def write_file(root: int, name: bytes, content: bytes) -> None:
    """Writes a small file of a pack, or replaces it, durably. Raises OSError."""
    fd = _stage(root, name)
    try:
        raw = memoryview(content)
        while raw:
            raw = raw[os.write(fd, raw) :]
    except OSError:
        _discard(root, name, fd)
        raise
    _commit(root, name, fd)


@contextmanager
def _parent(root: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    """The open directory of a file of a pack, which is not reached through a link, and its name.
    Raises OSError."""
    directory, _, name = path.rpartition(b"/")
    with closing_fd(open_beneath(root, directory, os.O_PATH | os.O_DIRECTORY)) as fd:
        yield fd, name


def _stage(root: int, path: bytes) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _parent(root, path) as (directory, name):
        with suppress(FileNotFoundError):
            os.unlink(name + _PART, dir_fd=directory)
        return os.open(name + _PART, flags, _MODE, dir_fd=directory)


def _commit(root: int, path: bytes, fd: int) -> None:
    with closing_fd(fd):
        os.fsync(fd)
    with _parent(root, path) as (directory, name):
        os.rename(name + _PART, name, src_dir_fd=directory, dst_dir_fd=directory)


def _discard(root: int, path: bytes, fd: int) -> None:
    os.close(fd)
    with suppress(OSError), _parent(root, path) as (directory, name):
        os.unlink(name + _PART, dir_fd=directory)


def _large_line(number: int, entry: Entry) -> dict[str, Any]:
    return {
        "large": number,
        "path": f"{xxhash.xxh3_64_intdigest(entry.path):016x}",
        "size": entry.size,
        "mtime_ns": entry.mtime_ns,
        "digest": f"{entry.digest:016x}",
    }


def _digest(line: dict[str, Any]) -> int:
    try:
        return int(str(line.get("digest")), 16)
    except ValueError:
        return 0


def lock(root: int, name: str) -> None:
    """Locks the directory of a pack for a writer. Raises LockedError."""
    try:
        fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(
            f"{name}: another process writes a pack there", hint="wait until it has ended"
        ) from error
    except OSError:
        # A file system without locks, such as Lustre mounted with noflock.
        return


def _require_outside(path: Path, source_root: int, name: str) -> None:
    """Raises UsageError if ``path``, by any name, is the source, or lies in it or in a pack;
    OSError."""
    source = os.fstat(source_root)
    real = Path(os.path.realpath(path))
    if any(is_pack(os.fsencode(above)) for above in real.parents):
        raise UsageError(f"{name} lies in a pack", hint="name a directory outside of it")
    for above in (real, *real.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(above), source):
                raise UsageError(
                    f"{name} is the source or lies in it", hint="name a directory outside of it"
                )
