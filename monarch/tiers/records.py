"""The residency records: which copy is committed, of which version of the file, with which digest.

There is one file per state directory and snapshot, ``residency-GENERATION``: a header page and a
64-byte record per inode, at ``4096 + 64 * ino``. The file is sparse: a record that was never
written needs no space. Each commit writes its record with ``pwrite``, so a killed daemon loses no
record. A record has a checksum over itself and its inode number, so a torn record is detected.

A record names its tier by an index into the header's list of tier ids, whose order does not depend
on the configuration. So no record is ever rewritten, and a crash finds none half done.

A copy is trusted as long as every daemon ends cleanly. A *term* lasts from one unclean end to the
next. A record has the term in which its copy was made or last verified. A record of an earlier term
is doubted: its copy is verified by its digest before its first use, however late that is.

A record may be marked *young* (tiers/doubts.py): the source may have other bytes under the same
times. The mount that made it checks it again; other mounts do not trust it.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.posix.private_directory import open_private, private_opener
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)

_MAGIC = "monarch residency"
# 1: as 2, without seals and terms, so each copy is verified and sealed at its first use.
_VERSION = 2
_HEADER_BYTES = 4096
_PREFIX = "residency-"
# place, young, term, size, mtime_ns, ctime_ns, source_ino, digest
_RECORD = struct.Struct("<BB2xIQqqQ16s")
_CHECK = struct.Struct("<Q")
_RECORD_BYTES = _RECORD.size + _CHECK.size
_LAYOUT = np.dtype(
    {
        "names": [
            *("place", "young", "term", "size", "mtime_ns", "ctime_ns", "source_ino", "digest"),
            "check",
        ],
        "formats": ["u1", "u1", "<u4", "<u8", "<i8", "<i8", "<u8", "V16", "<u8"],
        "offsets": [0, 1, 4, 8, 16, 24, 32, 40, 56],
        "itemsize": _RECORD_BYTES,
    }
)


_NONE: Mapping[int, Identity] = {}


@dataclass(frozen=True, slots=True)
class Record:
    """A committed copy: the ``tier`` that holds it, its version, and its xxh3-128."""

    tier: int
    identity: Identity
    digest: bytes


class RecordsError(OSError):
    """A record could not be written: the disk of the state directory has failed or is full."""


class Records:
    """The records of one generation (the id of a snapshot), kept in ``directory``.

    ``tier_ids`` has the ids of tier 1, 2, ...: copies of a tier that is no longer configured are
    forgotten; a tier that has changed its place keeps its copies. Raises TierError if the file
    cannot be created.
    """

    def __init__(self, directory: Path, generation: str, tier_ids: Sequence[str]) -> None:
        self._path = directory / (_PREFIX + generation)
        known = _read_header(self._path)
        self._term = _term_after(known)
        # Whether no daemon has used them before.
        self.is_new = not known
        listed = known.get("tiers")
        ids = [str(name) for name in listed] if isinstance(listed, list) else []
        self._header: dict[str, object] = {
            "magic": _MAGIC,
            "version": _VERSION,
            "generation": generation,
            "tiers": ids,
            "term": self._term,
            "clean": False,
        }
        try:
            self._fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
            if not known and os.fstat(self._fd).st_size:
                log.warning("%s cannot be read, so copies are made again", self._path)
                os.ftruncate(self._fd, 0)
            elif known and known["version"] != _VERSION:
                log.info(
                    "%s is of version %s, now %d: each copy is verified at its first use",
                    *(self._path, known["version"], _VERSION),
                )
            # Synced before any change that the mark warns of.
            self._write_header()
            os.fdatasync(self._fd)
            failpoints.failpoint("records-dirty")
            self._forget_unusable(ids, tier_ids)
            failpoints.failpoint("records-forgotten")
            self._number(ids, tier_ids)
            self._write_header()
        except OSError as error:
            raise TierError(f"state file {self._path}: {error.strerror}") from error

    @classmethod
    def existing(cls, directory: Path, generation: str, tier_ids: Sequence[str]) -> Records | None:
        """The existing records, for a check; only ``clear`` changes them. None if the file cannot
        be read. Raises TierError if a newer version has written it."""
        path = directory / (_PREFIX + generation)
        header = _read_header(path)
        listed = header.get("tiers")
        if not isinstance(listed, list) or header.get("generation") != generation:
            return None
        records = cls.__new__(cls)
        records._path = path
        records._header = header
        records._term = _term_after(header)
        records._find_places(listed, tier_ids)
        records._fd = open_private(path, os.O_RDWR)
        return records

    @property
    def term(self) -> int:
        """The number of the current term."""
        return self._term

    @property
    def path(self) -> Path:
        return self._path

    def place_of(self, tier: int) -> int:
        """The index of a tier in a record."""
        return self._places[tier]

    def leave(self) -> None:
        """Closes records that were opened by ``existing``."""
        os.close(self._fd)

    def _forget_unusable(self, ids: Sequence[str], tier_ids: Sequence[str]) -> None:
        """Forgets the copies of tiers that are no longer configured, and young copies that the last
        daemon did not check again."""
        places = [place for place, name in enumerate(ids, start=1) if name in tier_ids]
        for first, table in self._tables():
            forgotten = ~np.isin(table["place"], [0, *places])
            forgotten |= (table["place"] > 0) & (table["young"] > 0)
            for index in np.flatnonzero(forgotten).tolist():
                self.clear(Ino(first + index))

    def _number(self, ids: list[str], tier_ids: Sequence[str]) -> None:
        """Gives each tier an index of the list: its old one, that of a removed tier, or a new
        one."""
        for name in tier_ids:
            if name in ids:
                continue
            gone = [place for place, other in enumerate(ids) if other not in tier_ids]
            if gone:
                ids[gone[0]] = name
            else:
                ids.append(name)
        self._find_places(ids, tier_ids)

    def _find_places(self, ids: Sequence[object], tier_ids: Sequence[str]) -> None:
        """Sets the index of each tier in the list of ids, and the tier of each index."""
        self._places = {
            tier: ids.index(name) + 1 for tier, name in enumerate(tier_ids, start=1) if name in ids
        }
        self._tiers = np.zeros(256, np.uint8)
        for tier, place in self._places.items():
            self._tiers[place] = tier

    def _write_header(self) -> None:
        os.pwrite(self._fd, json.dumps(self._header).encode().ljust(_HEADER_BYTES), 0)

    def put(self, ino: Ino, record: Record, *, doubted: bool = False, young: bool = False) -> None:
        """Records a copy. ``doubted``: it must be verified first; ``young``: only this mount trusts
        it. Raises RecordsError."""
        i = record.identity
        place, term = self._places[record.tier], 0 if doubted else self._term
        versions = (i.size, i.mtime_ns, i.ctime_ns, i.source_ino)
        body = _RECORD.pack(place, young, term, *versions, record.digest)
        self._write(body + _CHECK.pack(_check(ino, body)), _offset(ino))

    def clear(self, ino: Ino) -> None:
        """Removes a record. Raises RecordsError."""
        self._write(b"\0", _offset(ino))

    def _write(self, content: bytes, offset: int) -> None:
        try:
            os.pwrite(self._fd, content, offset)
        except OSError as error:
            raise RecordsError(error.errno, error.strerror, os.fspath(self._path)) from error

    def confirm(self, ino: Ino, record: Record) -> None:
        """Marks a verified copy as trusted, unless another one has replaced it meanwhile."""
        if self.doubts(ino) and self.get(ino) == record:
            self.put(ino, record, young=self.is_young(ino))

    def settle(self, ino: Ino) -> None:
        """Marks a young copy as checked: it equals the source. Raises OSError."""
        record = self.get(ino)
        if record is not None and self.is_young(ino):
            self.put(ino, record, doubted=self.doubts(ino))

    def is_young(self, ino: Ino) -> bool:
        raw = os.pread(self._fd, 2, _offset(ino))
        return len(raw) == 2 and raw[1] > 0

    def doubts(self, ino: Ino) -> bool:
        raw = os.pread(self._fd, _RECORD_BYTES, _offset(ino))
        return len(raw) < _RECORD_BYTES or _RECORD.unpack_from(raw)[2] != self._term

    def get(self, ino: Ino) -> Record | None:
        raw = os.pread(self._fd, _RECORD_BYTES, _offset(ino))
        if len(raw) < _RECORD_BYTES or raw[0] == 0:
            return None
        body = raw[: _RECORD.size]
        if _CHECK.unpack_from(raw, _RECORD.size)[0] != _check(ino, body):
            return None
        place, _, _, size, mtime_ns, ctime_ns, source_ino, digest = _RECORD.unpack(body)
        tier = int(self._tiers[place])
        if tier == 0:
            return None
        return Record(tier, Identity(size, mtime_ns, ctime_ns, source_ino), digest)

    def is_torn(self, ino: Ino) -> bool:
        """Whether the record of ``ino`` is damaged."""
        place = os.pread(self._fd, 1, _offset(ino))
        return bool(place) and bool(self._tiers[place[0]]) and self.get(ino) is None

    def forget_other_versions(
        self,
        known: Callable[[range], npt.NDArray[np.void]],
        renewed: Mapping[int, Identity] = _NONE,
    ) -> None:
        """Forgets copies of other versions than those that ``known`` returns for inode numbers: the
        last daemon may have found a change that its snapshot did not have. ``renewed``: versions
        that the drain has made of files since the snapshot, with the same bytes, by their inode
        number at the source."""
        for first, table in self._tables():
            held = np.flatnonzero(self._tiers[table["place"]])
            if not len(held):
                continue
            start = int(held[0])
            rows = known(range(first + start, first + int(held[-1]) + 1))[held - start]
            same = np.ones(len(held), bool)
            for name in ("size", "mtime_ns", "ctime_ns", "source_ino"):
                same &= table[name][held] == rows[name]
            for place in np.flatnonzero(~same).tolist():
                ino = Ino(int(held[place]) + first)
                now = renewed.get(int(rows["source_ino"][place]))
                record = self.get(ino) if now is not None else None
                if record is None or record.identity != now:
                    self.clear(ino)

    def load(
        self,
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.uint64]]]:
        """The inode numbers, tiers and sizes of all records, in pieces; holes are skipped."""
        for first, table in self._tables():
            held = np.flatnonzero(self._tiers[table["place"]])
            if len(held):
                yield held + first, self._tiers[table["place"][held]], table["size"][held].copy()

    def unverified(self) -> Iterator[npt.NDArray[np.int64]]:
        """The inode numbers of the copies that must be verified before they are used."""
        for first, table in self._tables():
            held = self._tiers[table["place"]] > 0
            found = np.flatnonzero(held & (table["term"] != self._term))
            if len(found):
                yield found + first

    def by_source_ino(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The inode numbers at the source of all records, sorted, and the inode number of each."""
        keys: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        inos: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for first, table in self._tables():
            held = np.flatnonzero(self._tiers[table["place"]])
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

    def close(self, *, clean: bool) -> None:
        """``clean`` marks that the copy of every record is complete and on the disk."""
        if clean:
            # The records must be on the disk before the mark is.
            os.fdatasync(self._fd)
        self._header["clean"] = clean
        self._write_header()
        os.fdatasync(self._fd)
        os.close(self._fd)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def other_generations(directory: Path, generation: str) -> list[str]:
    """The other generations with records in ``directory``."""
    return [
        name.removeprefix(_PREFIX)
        for name in sorted(os.listdir(directory))
        if name.startswith(_PREFIX) and name != _PREFIX + generation
    ]


def known_tiers(directory: Path) -> frozenset[str]:
    """The ids of all tiers in the records of ``directory``. Raises TierError."""
    known: set[str] = set()
    for generation in other_generations(directory, ""):
        listed = _read_header(directory / (_PREFIX + generation)).get("tiers")
        if isinstance(listed, list):
            known.update(map(str, listed))
    return frozenset(known)


def _term_after(header: dict[str, object]) -> int:
    """The current term: a new one if the header shows an unclean end, else the same."""
    term = header.get("term")
    if not isinstance(term, int) or term < 1:
        return 1
    return term if header.get("clean") is True else term + 1


def _offset(ino: Ino) -> int:
    return _HEADER_BYTES + ino * _RECORD_BYTES


def _check(ino: Ino, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=ino)


def require_known_versions(directory: Path) -> None:
    """Raises TierError if records there are of a newer version than this one."""
    for generation in other_generations(directory, ""):
        _read_header(directory / (_PREFIX + generation))


def _read_header(path: Path) -> dict[str, object]:
    """The header, empty if the file is not one of records. Raises TierError for a newer version."""
    try:
        with open(path, "rb", opener=private_opener) as file:
            header = json.loads(file.read(_HEADER_BYTES))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise TierError(f"state file {path}: {error.strerror}") from error
    if not isinstance(header, dict) or header.get("magic") != _MAGIC:
        return {}
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        return {}
    if version > _VERSION:
        raise TierError(
            f"state file {path} is of version {version}, this Monarch knows {_VERSION}",
            hint="mount with the Monarch that wrote it, or name another directory with --state",
        )
    return header
