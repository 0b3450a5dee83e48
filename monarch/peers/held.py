"""Written files of other members that this node keeps until they are at the source.

    DIRECTORY/TOKEN/NUMBER.DIGEST    the bytes of an object of the mount with that token
    DIRECTORY/TOKEN/NUMBER.json      its record; the bytes count once it has their digest

A record comes from another member and names the place of a file: it is checked as any input. Calls
may wait for the disk.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from monarch.posix.files import closing_fd, sync_path
from monarch.posix.private_directory import open_private, read_private, replace_private
from monarch.text import GiB, KiB, MiB

TOKEN = "[0-9a-f]{16,64}"
Take = Callable[[bytes], object]
# What is sent of a record, whose length varies, in bytes. The longest path has 4,096.
RECORD_BYTES = 16 * KiB
# The most files that are kept, and the bytes of the disk that stay free.
_MOST_FILES = 100_000
_KEEP_FREE = 1 * GiB
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
_LARGEST = 1 << 62
_LARGEST_ID = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Record:
    """A written file as fsync has left it: the ``number`` of its object in the mount whose journal
    has ``token``, and what it is made of at another place. ``path`` is relative to the mount;
    ``digest`` is the XXH3 (128 bits) of the bytes, in hexadecimal."""

    token: str
    number: int
    size: int
    digest: str
    path: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int

    def to_text(self) -> str:
        """ASCII text of ``RECORD_BYTES``."""
        text = json.dumps(asdict(self) | {"path": self.path.hex()})
        return text.ljust(RECORD_BYTES)

    @classmethod
    def from_text(cls, text: bytes) -> Record:
        """Raises ValueError for anything but a record of a file below the mount."""
        try:
            raw = json.loads(text)
            fields = {name: raw[name] for name in cls.__slots__}
            record = cls(**fields | {"path": bytes.fromhex(fields["path"])})
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError("not a record") from error
        most = {
            "number": _LARGEST,
            "size": _LARGEST,
            "mode": 0o7777,
            "uid": _LARGEST_ID,
            "gid": _LARGEST_ID,
            "mtime_ns": _LARGEST,
        }
        for name, limit in most.items():
            value = getattr(record, name)
            if type(value) is not int or not 0 <= value <= limit:
                raise ValueError(f"{name} is out of range")
        for name, form in (("token", TOKEN), ("digest", "[0-9a-f]{32}")):
            if not isinstance(fields[name], str) or not re.fullmatch(form, fields[name]):
                raise ValueError("not a token and a digest")
        parts = record.path.split(b"/")
        if (
            len(record.path) > _LONGEST_PATH
            or b"\0" in record.path
            or any(part in (b"", b".", b"..") or len(part) > _LONGEST_NAME for part in parts)
        ):
            raise ValueError("not a path below the mount")
        return record


class HeldFiles:
    """The files in ``directory``, of ``most`` bytes together; thread-safe. Raises OSError."""

    def __init__(self, directory: Path, most: int) -> None:
        self._directory = directory
        self._most = most
        self._lock = threading.Lock()
        self._records: dict[tuple[str, int], Record] = {}
        self._arriving: set[tuple[str, int]] = set()
        # The bytes of these, and of files that are arriving.
        self._bytes = 0
        with suppress(FileNotFoundError):
            for place in directory.iterdir():
                if re.fullmatch(TOKEN, place.name):
                    self._load(place)

    def _load(self, place: Path) -> None:
        """Reads the records of a mount, and removes what does not count."""
        for path in sorted(place.glob("*.json"), key=lambda path: path.lstat().st_mtime_ns):
            with suppress(OSError, ValueError):
                record = Record.from_text(read_private(path))
                is_whole = self._path(record).stat().st_size == record.size
                if is_whole and record.token == place.name and path.stem == str(record.number):
                    self._records[record.token, record.number] = record
                    self._bytes += record.size
        found = {path for record in self._of(place.name) for path in self._paths(record)}
        for path in place.iterdir():
            if path not in found:
                with suppress(OSError):
                    path.unlink()
        self._leave(place)

    @property
    def files(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def tokens(self) -> list[str]:
        """The tokens of the mounts whose files are kept."""
        with self._lock:
            return sorted({token for token, _ in self._records})

    def of(self, token: str) -> list[Record]:
        """The files of a mount, in the order of their paths. Of files with the same path the one
        comes first that has got it last: the others had it before, as the target of a rename."""
        with self._lock:
            found = list(self._of(token))
        found.reverse()
        return sorted(found, key=lambda record: record.path)

    def _of(self, token: str) -> Iterator[Record]:
        return (record for (of, _), record in self._records.items() if of == token)

    def has(self, token: str, number: int) -> bool:
        return (token, number) in self._records

    def put(self, record: Record, fetch: Callable[[Take], None]) -> bool:
        """Keeps a file in the place of its earlier version. ``fetch`` gives its bytes, unless they
        are here. Returns False without room for it, while another version of it arrives, and if the
        bytes are not those of the record. The earlier version stays then, and after an error."""
        key = (record.token, record.number)
        before = self._records.get(key)
        if before is not None and _same_bytes(before, record):
            self._enter(record)
            return True
        # The earlier version stays until the new one is safe.
        with self._lock:
            is_full = self._bytes + record.size > self._most or len(self._records) >= _MOST_FILES
            if is_full or key in self._arriving:
                return False
            self._arriving.add(key)
            self._bytes += record.size
        is_kept = False
        try:
            place = self._directory / record.token
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._has_room(record.size) and self._receive(record, fetch):
                # The earlier version may have been forgotten meanwhile.
                before = self._enter(record)
                is_kept = True
        finally:
            with self._lock:
                self._arriving.remove(key)
                gone = before if is_kept else record
                self._bytes -= 0 if gone is None else gone.size
            if gone is not None:
                with suppress(OSError):
                    self._path(gone).unlink()
        return is_kept

    def _has_room(self, size: int) -> bool:
        room = os.statvfs(self._directory)
        return room.f_bavail * room.f_frsize - size >= _KEEP_FREE

    def _receive(self, record: Record, fetch: Callable[[Take], None]) -> bool:
        """Writes the bytes and syncs them; whether they are right."""
        digest, count = xxhash.xxh3_128(), 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(open_private(self._path(record), flags), "wb") as file:

            def take(part: bytes) -> None:
                nonlocal count
                digest.update(part)
                count += len(part)
                file.write(part)

            if record.size:
                fetch(take)
            file.flush()
            os.fsync(file.fileno())
        return count == record.size and digest.hexdigest() == record.digest

    def _enter(self, record: Record) -> Record | None:
        """Returns the record in whose place this one is."""
        place = self._directory / record.token
        replace_private(place / f"{record.number}.json", record.to_text())
        sync_path(place)
        sync_path(self._directory)
        with self._lock:
            # The last one to come is behind all others.
            before = self._records.pop((record.token, record.number), None)
            self._records[record.token, record.number] = record
        return before

    def forget(self, token: str, number: int) -> None:
        """Removes a file of a mount; all of them if the number is 0."""
        with self._lock:
            one = self._records.get((token, number))
            gone = list(self._of(token)) if number == 0 else [one] if one is not None else []
            for record in gone:
                del self._records[token, record.number]
                self._bytes -= record.size
        for record in gone:
            # The record first: without it the bytes do not count.
            for path in reversed(self._paths(record)):
                path.unlink(missing_ok=True)
        if gone:
            self._leave(self._directory / token)

    def _leave(self, place: Path) -> None:
        """Removes the directory of a mount if it is empty."""
        with suppress(OSError):
            place.rmdir()

    def open(self, record: Record) -> int:
        """A descriptor of the bytes, which are right: they are compared with the digest."""
        fd = os.open(self._path(record), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if digest_of_file(fd) != record.digest:
                raise OSError(f"the bytes of {self._path(record)} are damaged")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _path(self, record: Record) -> Path:
        return self._directory / record.token / f"{record.number}.{record.digest}"

    def _paths(self, record: Record) -> list[Path]:
        return [self._path(record), self._path(record).with_name(f"{record.number}.json")]


def _same_bytes(one: Record, other: Record) -> bool:
    return (one.size, one.digest) == (other.size, other.digest)


def digest_of_file(fd: int) -> str:
    """The XXH3 (128 bits) of a file, in hexadecimal. Raises OSError."""
    digest, offset = xxhash.xxh3_128(), 0
    while part := os.pread(fd, MiB, offset):
        digest.update(part)
        offset += len(part)
    return digest.hexdigest()


def digest_of_path(path: Path) -> str:
    """The same of the file at a path. Raises OSError."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
        return digest_of_file(fd)
