"""The residency records: which copy is committed, of which version of the file, with which digest.

One file per state directory and snapshot, ``residency-GENERATION``: a header page and one 64-byte
record per inode, at ``4096 + 64 * ino``. The file is sparse, so a record that was never written
costs nothing. It is written with ``pwrite`` at each commit: a killed daemon loses no record, and
each record carries a check sum over itself and its inode number, so that a torn one is no record.

A copy is believed only if the last daemon ended cleanly; ``trusted`` says so. After anything else
each copy is verified by its digest before its first use.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import TierError
from monarch.types import Identity, Ino

_MAGIC = "monarch residency"
_VERSION = 1
_HEADER_BYTES = 4096
_PREFIX = "residency-"
_RECORD = struct.Struct("<B7xQqqQ16s")  # tier, size, mtime_ns, ctime_ns, source_ino, digest
_CHECK = struct.Struct("<Q")
_RECORD_BYTES = _RECORD.size + _CHECK.size
_LAYOUT = np.dtype(
    {
        "names": ["tier", "size", "mtime_ns", "ctime_ns", "source_ino", "digest", "check"],
        "formats": ["u1", "<u8", "<i8", "<i8", "<u8", "V16", "<u8"],
        "offsets": [0, 8, 16, 24, 32, 40, 56],
        "itemsize": _RECORD_BYTES,
    }
)


@dataclass(frozen=True, slots=True)
class Record:
    """A committed copy: the ``tier`` that holds it, the version it is of, its xxh3-128."""

    tier: int
    identity: Identity
    digest: bytes


class Records:
    """The records of one generation (a snapshot's id), kept in ``directory``.

    ``tier_ids`` gives the identity of tier 1, 2, ...: copies of a tier that is no longer
    configured are forgotten, and those of one that has changed its place keep their copies.
    Raises TierError if the file cannot be made.
    """

    def __init__(self, directory: Path, generation: str, tier_ids: Sequence[str]) -> None:
        self._path = directory / (_PREFIX + generation)
        self._header: dict[str, object] = {
            "magic": _MAGIC,
            "version": _VERSION,
            "generation": generation,
            "tiers": list(tier_ids),
            "clean": False,
        }
        known = _read_header(self._path)
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(f"state file {self._path}: {error.strerror}") from error
        self.trusted = False
        if known is None:
            os.ftruncate(self._fd, 0)
        else:
            self.trusted = known["clean"] is True
            self._renumber(known["tiers"], tier_ids)
        self._write_header()

    def _renumber(self, before: object, after: Sequence[str]) -> None:
        """Give the records the tiers' present numbers if the configuration has moved them."""
        if before == list(after) or not isinstance(before, list):
            return
        place = {old + 1: after.index(i) + 1 for old, i in enumerate(before) if i in after}
        for inos, tiers, _sizes in self.load():
            for ino, tier in zip(inos.tolist(), tiers.tolist(), strict=True):
                record = self.get(Ino(ino))
                if record is not None:
                    if tier in place:
                        self.put(Ino(ino), Record(place[tier], record.identity, record.digest))
                    else:
                        self.clear(Ino(ino))

    def _write_header(self) -> None:
        os.pwrite(self._fd, json.dumps(self._header).encode().ljust(_HEADER_BYTES), 0)

    def put(self, ino: Ino, record: Record) -> None:
        """Believe this copy from now on. Raises OSError."""
        i = record.identity
        body = _RECORD.pack(
            record.tier, i.size, i.mtime_ns, i.ctime_ns, i.source_ino, record.digest
        )
        os.pwrite(self._fd, body + _CHECK.pack(_check(ino, body)), _offset(ino))

    def clear(self, ino: Ino) -> None:
        os.pwrite(self._fd, b"\0", _offset(ino))

    def get(self, ino: Ino) -> Record | None:
        raw = os.pread(self._fd, _RECORD_BYTES, _offset(ino))
        if len(raw) < _RECORD_BYTES or raw[0] == 0:
            return None
        body = raw[: _RECORD.size]
        if _CHECK.unpack_from(raw, _RECORD.size)[0] != _check(ino, body):
            return None
        tier, size, mtime_ns, ctime_ns, source_ino, digest = _RECORD.unpack(body)
        return Record(tier, Identity(size, mtime_ns, ctime_ns, source_ino), digest)

    def forget_other_versions(self, known: Callable[[range], npt.NDArray[np.void]]) -> None:
        """Forget the copies of other versions than those that ``known`` tells of inode numbers.

        The last daemon may have learnt of a change that its snapshot did not know.
        """
        for first, table in self._tables():
            held = np.flatnonzero(table["tier"])
            if not len(held):
                continue
            start = int(held[0])
            rows = known(range(first + start, first + int(held[-1]) + 1))[held - start]
            same = np.ones(len(held), bool)
            for name in ("size", "mtime_ns", "ctime_ns", "source_ino"):
                same &= table[name][held] == rows[name]
            for ino in (held[~same] + first).tolist():
                self.clear(Ino(ino))

    def load(
        self,
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.uint64]]]:
        """The inode numbers, tiers and sizes of all records, in pieces; holes are skipped."""
        for first, table in self._tables():
            held = np.flatnonzero(table["tier"])
            if len(held):
                yield held + first, table["tier"][held].copy(), table["size"][held].copy()

    def by_source_ino(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The source's inode numbers of all records, sorted, and the inode numbers beside them."""
        keys: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        inos: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for first, table in self._tables():
            held = np.flatnonzero(table["tier"])
            keys.append(table["source_ino"][held])
            inos.append(held + first)
        order = np.argsort(np.concatenate(keys), kind="stable")
        return np.concatenate(keys)[order], np.concatenate(inos)[order]

    def _tables(self) -> Iterator[tuple[int, npt.NDArray[np.void]]]:
        piece = 4096 * _RECORD_BYTES
        end = os.fstat(self._fd).st_size
        position = _HEADER_BYTES
        while position < end:
            try:
                data = os.lseek(self._fd, position, os.SEEK_DATA)
            except OSError:
                return
            position = max(position, data - (data - _HEADER_BYTES) % _RECORD_BYTES)
            raw = os.pread(self._fd, piece, position)
            count = len(raw) // _RECORD_BYTES
            if count == 0:
                return
            table = np.frombuffer(raw, dtype=_LAYOUT, count=count)
            yield (position - _HEADER_BYTES) // _RECORD_BYTES, table
            position += count * _RECORD_BYTES

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self, *, clean: bool) -> None:
        """``clean`` tells the next daemon that every record's copy is whole and on the disk."""
        self._header["clean"] = clean
        self._write_header()
        os.fdatasync(self._fd)
        os.close(self._fd)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()


def other_generations(directory: Path, generation: str) -> list[str]:
    """The generations whose records lie in ``directory`` besides this one."""
    return [
        name.removeprefix(_PREFIX)
        for name in sorted(os.listdir(directory))
        if name.startswith(_PREFIX) and name != _PREFIX + generation
    ]


def _offset(ino: Ino) -> int:
    return _HEADER_BYTES + ino * _RECORD_BYTES


def _check(ino: Ino, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=ino)


def _read_header(path: Path) -> dict[str, object] | None:
    """The header if the file is one that this version understands."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(header, dict) or header.get("magic") != _MAGIC:
        return None
    return header if header.get("version") == _VERSION else None
