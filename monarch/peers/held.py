"""Written files of other members that this node keeps until they are at the source.

    DIRECTORY/TOKEN/NUMBER.DIGEST    the bytes of an object of the mount with that token
    DIRECTORY/TOKEN/NUMBER.json      its record; the bytes count once it has their digest

A record comes from another member and names the place of a file: it is checked as any input. Calls
may wait for the disk.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from monarch.posix.files import closing_fd, sync_path
from monarch.posix.private_directory import open_private, read_private, replace_private
from monarch.text import GiB, KiB, MiB

log = logging.getLogger(__name__)

TOKEN = "[0-9a-f]{16,64}"
Take = Callable[[bytes], object]
# The token of a mount and the number of an object.
_Key = tuple[str, int]
# What is sent of a record, whose length varies, in bytes. The longest path has 4,096.
RECORD_BYTES = 16 * KiB
# The most files that are kept, and the bytes of the disk that stay free.
_MOST_FILES = 100_000
_KEEP_FREE = 1 * GiB
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
_LARGEST = 1 << 62
_LARGEST_ID = (1 << 32) - 1
# 19 digits.
_LARGEST_VERSION = 10**19 - 1


@dataclass(frozen=True, slots=True)
class Record:
    """A written file as fsync has left it: the ``number`` of its object in the mount whose journal
    has ``token``, and what it is made of at another place. ``path`` is relative to the mount;
    ``digest`` is the XXH3 (128 bits) of the bytes, in hexadecimal. Of two records of an object the
    one with the higher ``version`` is the later one."""

    token: str
    number: int
    size: int
    digest: str
    path: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    version: int = 0

    def to_text(self) -> str:
        """ASCII text of ``RECORD_BYTES``."""
        text = json.dumps(asdict(self) | {"path": self.path.hex()})
        return text.ljust(RECORD_BYTES)

    @classmethod
    def from_text(cls, text: bytes) -> Record:
        """Raises ValueError for anything but a record of a file below the mount."""
        try:
            raw = {"version": 0} | json.loads(text)
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
            "version": _LARGEST_VERSION,
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
        # No call waits for the disk while it has this lock, since the event loop takes it.
        self._lock = threading.Lock()
        # Is held while a directory of a mount is made or removed; before the other one.
        self._directories = threading.RLock()
        # By token and number.
        self._records: dict[str, dict[int, Record]] = {}
        # The objects whose files on the disk are being changed, by one thread each; and up to which
        # version they are to be removed then.
        self._busy: dict[_Key, int] = {}
        # The bytes of all files with those that are arriving, and of the latter alone.
        self._bytes = self._arriving = 0
        with suppress(FileNotFoundError):
            for place in directory.iterdir():
                if re.fullmatch(TOKEN, place.name):
                    self._load(place)

    def _load(self, place: Path) -> None:
        """Reads the records of a mount, and removes what does not count."""
        found: set[Path] = set()
        for path in place.glob("*.json"):
            try:
                record = Record.from_text(read_private(path))
                is_whole = self._path(record).stat().st_size == record.size
            except FileNotFoundError:
                continue
            except (ValueError, OSError) as error:
                # The next mount may be able to read it, also that of another version.
                reason = getattr(error, "strerror", None) or error
                log.warning("%s, a file of another node, is not known: %s", path, reason)
                found.update(place.glob(f"{path.stem}.*"))
                continue
            if is_whole and record.token == place.name and path.stem == str(record.number):
                self._add(record)
                found.update(self._paths(record))
        for path in place.iterdir():
            if path not in found:
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            place.rmdir()

    @property
    def files(self) -> int:
        with self._lock:
            return self._count()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def tokens(self) -> list[str]:
        """The tokens of the mounts whose files are kept."""
        with self._lock:
            return sorted(self._records)

    def of(self, token: str) -> list[Record]:
        """The files of a mount, in the order of their paths. Of files with the same path the one
        comes first that has got it last: the others had it before, as the target of a rename."""
        with self._lock:
            found = list(self._records.get(token, {}).values())
        return sorted(found, key=lambda record: (record.path, -record.version))

    def version(self, token: str, number: int) -> int | None:
        """The version of an object that is kept, the latest one of the mount if the number is 0;
        None if none is."""
        with self._lock:
            kept = self._records.get(token, {})
            found = kept.values() if number == 0 else [kept[number]] if number in kept else []
            return max((record.version for record in found), default=None)

    def keeps(self, token: str) -> bool:
        """Whether any file of a mount is kept."""
        with self._lock:
            return token in self._records

    def put(self, record: Record, fetch: Callable[[Take], None]) -> bool:
        """Keeps a file in the place of its earlier version. ``fetch`` gives its bytes, unless they
        are here. Returns False without room for it, if a later version is here or was forgotten,
        while another version of it arrives, and if the bytes are not those of the record. The
        earlier version stays then, and after an error."""
        key = (record.token, record.number)
        with self._lock:
            before = self._find(key)
            if key in self._busy or (before is not None and before.version > record.version):
                return False
            is_here = before is not None and before.digest == record.digest
            if is_here and before is not None and before.size != record.size:
                return False
            more = 0 if is_here else record.size
            is_full = before is None and self._count() >= _MOST_FILES
            if is_full or self._bytes + more > self._most:
                return False
            # The earlier version stays until the new one is safe.
            self._busy[key] = -1
            self._bytes += more
            self._arriving += more
        is_safe = False
        try:
            with self._directories:
                (self._directory / record.token).mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_here or (self._has_room() and self._receive(record, fetch)):
                self._write(record, before)
                is_safe = True
        finally:
            with self._lock:
                self._bytes -= more
                self._arriving -= more
                gone = before if is_safe else record
                if is_safe:
                    self._remove(key)
                    self._add(record)
            self._settle(key, [] if is_here or gone is None else [self._path(gone)])
        return is_safe and self.version(*key) == record.version

    def _has_room(self) -> bool:
        """Whether the disk has room for all files that are arriving. What has come of them counts
        twice."""
        room = os.statvfs(self._directory)
        return room.f_bavail * room.f_frsize - self._arriving >= _KEEP_FREE

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

    def _write(self, record: Record, before: Record | None) -> None:
        """Writes a record, in the place of the one ``before``, which an error leaves there."""
        path = self._record_path(record)
        try:
            replace_private(path, record.to_text().rstrip())
            sync_path(path.parent)
            sync_path(self._directory)
        except OSError:
            with suppress(OSError):
                if before is None:
                    path.unlink()
                else:
                    replace_private(path, before.to_text().rstrip())
            raise

    def forget(self, token: str, number: int, version: int) -> None:
        """Removes a file of a mount, up to this version; all of them if the number is 0. What is
        arriving in such a version is not kept either."""
        failure: OSError | None = None
        with self._lock:
            known = [*self._records.get(token, ()), *(own for of, own in self._busy if of == token)]
            free = []
            for each in known if number == 0 else [number]:
                key = (token, each)
                record = self._find(key)
                if key in self._busy:
                    self._busy[key] = max(self._busy[key], version)
                elif record is not None and record.version <= version:
                    self._busy[key] = version
                    free.append(key)
        for key in free:
            failure = self._settle(key, []) or failure
        if failure is not None:
            raise failure

    def _settle(self, key: _Key, left: list[Path]) -> OSError | None:
        """Removes the files ``left`` of an object, and the object if it was forgotten meanwhile.
        After that other threads may change it. Returns the last error."""
        failure: OSError | None = None
        while True:
            with self._lock:
                record = self._find(key)
                if record is not None and record.version <= self._busy[key]:
                    self._remove(key)
                    # The record first: without it the bytes do not count.
                    left = [*reversed(self._paths(record)), *left]
                if not left:
                    del self._busy[key]
                    return failure
            for path in left:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    failure = error
            left = []
            self._leave(key)

    # -- what is known, with the lock --------------------------------------------------------------

    def _count(self) -> int:
        return sum(map(len, self._records.values()))

    def _find(self, key: _Key) -> Record | None:
        return self._records.get(key[0], {}).get(key[1])

    def _add(self, record: Record) -> None:
        self._records.setdefault(record.token, {})[record.number] = record
        self._bytes += record.size

    def _remove(self, key: _Key) -> None:
        of_mount = self._records.get(key[0], {})
        record = of_mount.pop(key[1], None)
        self._bytes -= 0 if record is None else record.size
        if not of_mount:
            self._records.pop(key[0], None)

    # -- files -------------------------------------------------------------------------------------

    def _leave(self, key: _Key) -> None:
        """Removes the directory of the mount of an object if it is empty, and no file arrives."""
        with self._directories:
            with self._lock:
                is_used = any(other[0] == key[0] and other != key for other in self._busy)
            if not is_used:
                with suppress(OSError):
                    (self._directory / key[0]).rmdir()

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

    def _record_path(self, record: Record) -> Path:
        return self._directory / record.token / f"{record.number}.json"

    def _paths(self, record: Record) -> list[Path]:
        return [self._path(record), self._record_path(record)]


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
