"""A directory of checkpoints: writing without torn files, listing, pruning.

A checkpoint is written under a temporary name, synced, and renamed to
``step-STEP-SERIAL-TOKEN.ckpt``, a unique name: the token belongs to the writer. Then the
``manifest`` that names it is replaced in the same way. So a checkpoint in the manifest is complete
and durable. A crash in between leaves a complete file without an entry, which is entered at the
next start.

The manifest has a line for each checkpoint, oldest first: the XXH3 of the rest in 16 hexadecimal
digits, a blank, JSON. Removal is in the reverse order: first the entry, then the file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from monarch.errors import CheckpointError
from monarch.frameworks.format import TRAILER_BYTES, parse, parse_facts, trailer
from monarch.frameworks.owner import Owner
from monarch.posix.files import closing_fd
from monarch.posix.private_directory import open_private, private_opener
from monarch.text import MiB, format_bytes
from monarch.types import XATTR_DURABLE

MANIFEST = "manifest"
_VERSION = 1
# Names of earlier versions have no token.
_NAME = re.compile(r"step-(\d+)-(\d+)(-[0-9a-f]{8})?\.ckpt")
_PART = re.compile(r"\..+\.part")
# The most bytes of a manifest, which is read into memory, and of one of its lines, whose objects
# need many times as much; the most of its damaged lines that are named.
_MOST_BYTES = 64 * MiB
_MOST_LINE_BYTES = 4 * MiB
_MOST_DAMAGED = 100
# Larger numbers in an entry are no values of a checkpoint.
_MOST_NUMBER = 2**63 - 1
# The size of a read or write. There are few of them, since a thread waits up to 5 ms for Python's
# lock after each, beside a busy trainer.
PIECE_BYTES = 8 * MiB

# ``none``: only in memory; ``local``: on storage of the node; ``peer``: on storage of another node,
# too; ``source``: at the source of the mount. None: not on a Monarch mount, so as durable as fsync
# of that file system.
Durable = Literal["none", "local", "peer", "source"]
_DURABLE: dict[bytes, Durable] = {
    b"none": "none",
    b"local": "local",
    b"peer": "peer",
    b"source": "source",
}
_ENOUGH = {"local": ("local", "peer", "source", None), "source": ("source", None)}

# The errors of file systems without this attribute: they are not Monarch's.
_NOT_MONARCH = (errno.ENODATA, errno.ENOTSUP)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An entry of the manifest. ``size`` in bytes, ``xxh3`` of the file in hexadecimal.

    ``step``: updates of the weights; ``epoch``, ``consumed``: the position in the data order;
    ``saved_ns``: wall clock; ``serial``: rises with each checkpoint of the directory. ``rank`` of
    ``ranks``: the writer of this part of a set; ``digests``: the ``xxh3`` of all its parts, empty
    until all of them are known to be on storage.
    """

    name: str
    size: int
    xxh3: str
    step: int
    epoch: int
    consumed: int
    saved_ns: int
    serial: int
    rank: int = 0
    ranks: int = 1
    digests: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it is a single checkpoint, or part of a set that is known to be complete."""
        return self.ranks == 1 or bool(self.digests)


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint in the listing; ``complete``: its file exists and has its full length."""

    checkpoint: Checkpoint
    complete: bool
    durable: Durable | None


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint whose file was read: ``whole``, ``damaged`` (the bytes differ), ``missing``, or
    ``unreadable``; ``why`` as text, empty if whole."""

    checkpoint: Checkpoint
    state: Literal["whole", "damaged", "missing", "unreadable"]
    why: str


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Listed]:
    """The checkpoints of the manifest, newest first; reads only the manifest. Empty if there is no
    manifest. Raises CheckpointError if it is of a newer Monarch, and OSError."""
    path = Path(directory)
    return [_listed(path, each) for each in reversed(_read_manifest(path).checkpoints)]


def _listed(directory: Path, checkpoint: Checkpoint) -> Listed:
    path = directory / checkpoint.name
    try:
        complete = os.stat(path).st_size == checkpoint.size
    except OSError:
        return Listed(checkpoint, False, None)
    try:
        return Listed(checkpoint, complete, durability(path))
    except OSError:
        return Listed(checkpoint, complete, "none")


def verify(directory: str | os.PathLike[str]) -> list[Verified]:
    """Every checkpoint of the manifest, newest first, read and compared with its checksum."""
    path = Path(directory)
    return [verified(path, each) for each in reversed(_read_manifest(path).checkpoints)]


def prune(
    directory: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | Literal["epoch"] | None = None,
    durable: Literal["local", "source"] = "local",
    dry_run: bool = False,
) -> list[Checkpoint]:
    """Removes old checkpoints and returns them, oldest first; ``dry_run``: only returns them.

    It keeps the newest ``keep_last`` valid checkpoints, all newer ones, and with ``keep_every`` the
    newest of each epoch, or of each such number of steps. A part of a set counts only if all parts
    are known to be on storage. Nothing is removed unless one of the valid ones has the durability
    ``durable``. Raises LockedError while a trainer uses the directory (it removes old ones itself),
    CheckpointError, OSError, ValueError.
    """
    retention = Retention(keep_last, keep_every, durable)
    return pruned(Path(directory), retention, dry_run=dry_run)


def pruned(
    directory: Path, retention: Retention, *, dry_run: bool, shown: Path | None = None
) -> list[Checkpoint]:
    """As ``prune``. ``directory`` may lead to an open directory, which messages call ``shown``."""
    if dry_run:
        found = _read_manifest(directory, shown).checkpoints
        return _superfluous(directory, found, retention, set())
    store = CheckpointStore(directory, shown)
    try:
        return store.thin_out(retention, set())
    finally:
        store.release()


def durability(path: Path) -> Durable | None:
    """The durability of a file on a Monarch mount; None on any other file system. Raises OSError if
    the mount does not report it."""
    try:
        # An unknown value counts as not durable.
        return _DURABLE.get(os.getxattr(path, XATTR_DURABLE), "none")
    except OSError as error:
        if error.errno in _NOT_MONARCH:
            return None
        raise


def _is_durable(path: Path, wanted: Literal["local", "source"]) -> bool:
    try:
        return durability(path) in _ENOUGH[wanted]
    except OSError:
        return False


def verified(directory: Path, checkpoint: Checkpoint) -> Verified:
    """Reads the file once and compares it with its entry."""
    try:
        # Root may prune a directory of another user.
        with closing_fd(open_private(directory / checkpoint.name, os.O_RDONLY)) as fd:
            size, digest = digest_of(fd)
    except FileNotFoundError:
        return Verified(checkpoint, "missing", "its file is missing")
    except OSError as error:
        return Verified(checkpoint, "unreadable", str(error.strerror))
    if size != checkpoint.size:
        return Verified(checkpoint, "damaged", f"{size} bytes, not {checkpoint.size}")
    if digest != checkpoint.xxh3:
        return Verified(checkpoint, "damaged", "its checksum is wrong")
    return Verified(checkpoint, "whole", "")


def digest_of(fd: int, progress: Callable[[int], None] = lambda nbytes: None) -> tuple[int, str]:
    """The size and the XXH3 of an open file. ``progress`` is called with the bytes of each read.
    Raises OSError."""
    # Cached pages were written, but never read back from storage.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    digest, size = xxhash.xxh3_64(), 0
    for piece in _pieces(fd):
        digest.update(piece)
        size += len(piece)
        progress(len(piece))
    return size, digest.hexdigest()


def load(
    directory: Path, checkpoint: Checkpoint, *, mapped: bool = False
) -> tuple[dict[str, Any], Any]:
    """The facts of the header and the state; ``mapped``: the arrays are mapped from the file.

    Raises CheckpointError unless all bytes have the recorded checksum.
    """
    path = directory / checkpoint.name
    try:
        # A private mapping: a change of an array does not change the file.
        content = np.memmap(path, np.uint8, "c") if mapped else np.fromfile(path, np.uint8)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{checkpoint.name}: {why}") from error
    if xxhash.xxh3_64_hexdigest(content.data) != checkpoint.xxh3:
        raise CheckpointError(f"{checkpoint.name}: its checksum is wrong")
    try:
        return parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.name}: {error}") from error


class CheckpointStore:
    """The single writer of a directory, which messages call ``shown``. Its methods are called one
    at a time.

    Raises LockedError if another process, or another CheckpointStore, writes into it, and OSError.
    """

    def __init__(self, directory: Path, shown: Path | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        # Part of the names, so that two writers never use the same.
        self.token = os.urandom(4).hex()
        self._owner = Owner(directory, self.token, shown)
        try:
            self._checkpoints, self.troubles = _read_manifest(directory, shown)
            self._adopt()
        except BaseException:
            self.release()
            raise

    @property
    def checkpoints(self) -> Sequence[Checkpoint]:
        """Oldest first."""
        return self._checkpoints

    def stage(
        self,
        name: str,
        pieces: Iterable[bytes | memoryview],
        *,
        end: Callable[[int], bytes] | None = None,
    ) -> tuple[Path, int, str]:
        """Writes and syncs a temporary file; returns its path, size, and XXH3. In any thread.

        ``end`` returns its last bytes, from the XXH3 of those before. Raises OSError, and then no
        file is left.
        """
        part = self.directory / f".{name}.part"
        digest = xxhash.xxh3_64()
        size = 0
        # In a directory of another user anything may be at that name: it is never opened.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        _remove(part)
        try:
            with closing_fd(os.open(part, flags, 0o666)) as fd:
                for piece in pieces:
                    digest.update(piece)
                    size += len(piece)
                    _write_all(fd, piece)
                if end is not None:
                    last = end(digest.intdigest())
                    digest.update(last)
                    size += len(last)
                    _write_all(fd, last)
                os.fsync(fd)
        except BaseException:
            _remove(part)
            raise
        return part, size, digest.hexdigest()

    def publish(
        self, part: Path, checkpoint: Checkpoint, commits: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Renames the staged file ``part`` and enters it in the manifest. Durable when this
        returns.

        ``commits``: the digests of earlier sets, by name, recorded in the same step. Raises
        OSError; the manifest is then unchanged, or has the new entry as well.
        """
        path = self.directory / checkpoint.name
        try:
            os.replace(part, path)
            _sync_directory(self.directory)
            after = [*_committed(self._checkpoints, commits), checkpoint]
            self._exchange(sorted(after, key=lambda each: each.serial))
        except BaseException:
            _remove(part)
            # The sync of the directory can fail after the rename of the manifest.
            with contextlib.suppress(OSError, CheckpointError):
                found = _read_manifest(self.directory).checkpoints
                if checkpoint.name not in {each.name for each in found}:
                    _remove(path)
            raise

    def commit(self, commits: Mapping[str, tuple[str, ...]]) -> None:
        """Records the digests of sets, by name, so that they count. Durable when this returns."""
        self._exchange(_committed(self._checkpoints, commits))

    def thin_out(self, retention: Retention, known_whole: set[str]) -> list[Checkpoint]:
        """As ``prune``. Checkpoints in ``known_whole`` are not read; whole ones are added to it."""
        old = _superfluous(self.directory, self._checkpoints, retention, known_whole)
        if old:
            removed = {each.serial for each in old}
            self._exchange([c for c in self._checkpoints if c.serial not in removed])
            for checkpoint in old:
                _remove(self.directory / checkpoint.name)
        return old

    def release(self) -> None:
        """Releases the directory. May be called twice."""
        self._owner.release()

    def _exchange(self, checkpoints: list[Checkpoint]) -> None:
        self._owner.confirm()
        lines = [json.dumps({"version": _VERSION})]
        lines += [json.dumps(asdict(each), separators=(",", ":")) for each in checkpoints]
        content = b"".join(map(_line, lines))
        if len(content) > _MOST_BYTES:
            raise _too_large(self.directory / MANIFEST)
        part, _, _ = self.stage(MANIFEST, [content])
        try:
            os.replace(part, self.directory / MANIFEST)
        except BaseException:
            _remove(part)
            raise
        self._checkpoints = checkpoints
        _sync_directory(self.directory)

    def _adopt(self) -> None:
        """Enters complete checkpoints without an entry; removes other files of a crash."""
        entered = {each.name for each in self._checkpoints}
        found = []
        for name in os.listdir(self.directory):
            if _PART.fullmatch(name):
                _remove(self.directory / name)
            elif _NAME.fullmatch(name) and name not in entered:
                try:
                    found.append(_examined(self.directory, name))
                except (OSError, CheckpointError) as error:
                    self.troubles.append(f"{self.directory / name}: {error}; it is ignored")
        if found:
            after = sorted([*self._checkpoints, *found], key=lambda each: each.serial)
            self._exchange(after)


def _committed(
    checkpoints: Iterable[Checkpoint], commits: Mapping[str, tuple[str, ...]]
) -> list[Checkpoint]:
    return [replace(c, digests=commits.get(c.name, c.digests)) for c in checkpoints]


class _Manifest(NamedTuple):
    checkpoints: list[Checkpoint]
    troubles: list[str]


def _read_manifest(directory: Path, shown: Path | None = None) -> _Manifest:
    """Reads the manifest. A damaged line is reported; its file will be adopted again."""
    found, where = _Manifest([], []), (shown or directory) / MANIFEST
    try:
        with open(directory / MANIFEST, "rb", opener=private_opener) as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return found
    if len(content) > _MOST_BYTES:
        raise _too_large(where)
    for number, line in enumerate(io.BytesIO(content), 1):
        try:
            text = line[17:].decode().removesuffix("\n")
            if len(line) > _MOST_LINE_BYTES or line.removesuffix(b"\n") + b"\n" != _line(text):
                raise ValueError("damaged")
            raw = json.loads(text)
            if number > 1:
                found.checkpoints.append(entry_of(raw))
                continue
            version = _number(raw["version"])
        except (KeyError, TypeError, ValueError, RecursionError):
            if len(found.troubles) < _MOST_DAMAGED:
                found.troubles.append(f"{where}: line {number} is damaged")
            continue
        if version != _VERSION:
            raise CheckpointError(
                f"{where} has version {version}, this Monarch knows {_VERSION}",
                hint="use the Monarch that wrote it, or another directory",
            )
    return found


def _too_large(where: Path) -> CheckpointError:
    return CheckpointError(
        f"{where} has more than {format_bytes(_MOST_BYTES)}",
        hint="remove checkpoints, or use another directory",
    )


def entry_of(raw: dict[str, Any]) -> Checkpoint:
    """Converts a line. Raises KeyError, TypeError, ValueError, also for a name with a path."""
    name, xxh3 = str(raw["name"]), str(raw["xxh3"])
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a checkpoint")
    # Entries of earlier versions are of one rank.
    raw = {"rank": 0, "ranks": 1, **raw}
    keys = ("size", "step", "epoch", "consumed", "saved_ns", "serial", "rank", "ranks")
    numbers = {key: _number(raw[key]) for key in keys}
    digests = tuple(map(str, raw.get("digests", ())))
    return Checkpoint(name=name, xxh3=xxh3, digests=digests, **numbers)


def _number(value: Any) -> int:
    """Raises TypeError and ValueError unless it is a number that an entry may have."""
    if not 0 <= value <= _MOST_NUMBER:
        raise ValueError(f"{value} is out of range")
    return int(value)


def _line(text: str) -> bytes:
    content = text.encode()
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept, as in ``prune``. Raises ValueError for an invalid number."""

    last: int
    every: int | Literal["epoch"] | None
    durable: Literal["local", "source"]

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError("at least one checkpoint must be kept")
        if isinstance(self.every, int) and self.every < 1:
            raise ValueError("keep_every must be a number of steps, or 'epoch'")


def _superfluous(
    directory: Path,
    checkpoints: Sequence[Checkpoint],
    retention: Retention,
    known_whole: set[str],
) -> list[Checkpoint]:
    """The checkpoints that can be removed, oldest first. ``checkpoints``: all, oldest first."""
    if len(checkpoints) <= retention.last:
        return []
    counting = [each for each in checkpoints if each.counts]
    whole: list[Checkpoint] = []
    for checkpoint in reversed(counting):
        if len(whole) == retention.last:
            break
        if checkpoint.name in known_whole or verified(directory, checkpoint).state == "whole":
            known_whole.add(checkpoint.name)
            whole.append(checkpoint)
    is_safe = any(_is_durable(directory / c.name, retention.durable) for c in whole)
    if len(whole) < retention.last or not is_safe:
        return []
    newest: dict[int, int] = {}
    if (every := retention.every) is not None:
        newest = {c.epoch if every == "epoch" else c.step // every: c.serial for c in counting}
    oldest, kept = whole[-1].serial, set(newest.values())
    return [c for c in checkpoints if c.serial < oldest and c.serial not in kept]


def _examined(directory: Path, name: str) -> Checkpoint:
    """The entry for a file without one. Raises CheckpointError unless it is valid, and OSError."""
    with closing_fd(open_private(directory / name, os.O_RDONLY)) as fd:
        status = os.fstat(fd)
        size = max(0, status.st_size - TRAILER_BYTES)
        inner = xxhash.xxh3_64()
        for piece in _pieces(fd, size):
            inner.update(piece)
        end = os.pread(fd, TRAILER_BYTES + 1, size)
        if end != trailer(inner.intdigest()):
            raise CheckpointError("it is damaged or incomplete")
        header = parse_facts(os.pread(fd, 16, 0), lambda to: os.pread(fd, to - 16, 16))
    inner.update(end)
    try:
        own = {"name": name, "size": status.st_size, "xxh3": inner.hexdigest()}
        return entry_of({**header, **own})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its header is not valid ({error})") from error


def serial_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[2])


def name_of(step: int, serial: int, token: str) -> str:
    return f"step-{step:08d}-{serial:06d}-{token}.ckpt"


def _pieces(fd: int, size: int | None = None) -> Iterator[memoryview]:
    """The first ``size`` bytes, or all; each piece is valid until the next."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    offset = 0
    while size is None or offset < size:
        wanted = PIECE_BYTES if size is None else min(PIECE_BYTES, size - offset)
        count = os.preadv(fd, [buffer[:wanted]], offset)
        if not count:
            return
        yield buffer[:count]
        offset += count


def _write_all(fd: int, piece: bytes | memoryview) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_directory(directory: Path) -> None:
    with closing_fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def _remove(path: Path) -> None:
    """Removes a file; if that fails, the next start tries again."""
    with contextlib.suppress(OSError):
        os.unlink(path)
