"""The tree of a pack in the order of a snapshot, read from its index instead of the source."""

from __future__ import annotations

import stat
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.namespace import schema
from monarch.namespace.numbering import Batch, Numbering
from monarch.packmount.files import chunk_buckets
from monarch.packs.pack import Pack, PackSummary
from monarch.posix import acl
from monarch.posix.acl import NO_ACLS, Acls
from monarch.types import ROOT_INO, Ino

# Entries of one batch.
_BATCH = 4096
# Changes whenever the same pack gives another snapshot.
_VERSION = 1
_ROOT = 1


def snapshot_id(info: PackSummary) -> str:
    """The id of the snapshot of a pack: the same for the same pack, so that copies of its files are
    kept even if the snapshot is made anew."""
    return xxhash.xxh3_128_hexdigest(f"{_VERSION} {info.identity}".encode())


class PackTree:
    """The entries of an open pack, for ``namespace.build.write``."""

    one_file_system = False

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._records = pack.records
        self._numbering = Numbering()
        self.id = snapshot_id(pack.info)

    def buckets(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The buckets by which the files of these records are admitted."""
        return chunk_buckets(numbers, self._pack.chunk_of)

    def batches(self) -> Iterator[Batch]:
        """Every entry in the order of inode numbers, the root first. Raises PackError."""
        root = self._batch(ROOT_INO, -1, np.array([_ROOT]))
        root.names = [b""]
        waiting = deque(self._complete(root, np.array([_ROOT])))
        yield root
        while waiting:
            ino, rank, number = waiting.popleft()
            numbers = self._pack.names(number)
            for start in range(0, max(1, len(numbers)), _BATCH):
                part = numbers[start : start + _BATCH]
                batch = self._batch(ino, rank, part)
                batch.names = [self._pack.name(each) for each in part.tolist()]
                waiting.extend(self._complete(batch, part))
                yield batch

    def _batch(self, directory: Ino, rank: int, numbers: npt.NDArray[Any]) -> Batch:
        """Without the path, which takes memory: all directories can be read."""
        found = self._records[numbers]
        rows = np.zeros(len(found), schema.RECORD)
        for name in ("mode", "uid", "gid", "nlink", "size", "mtime_ns"):
            rows[name] = found[name]
        kinds = found["mode"] & 0o170000
        is_file = kinds == stat.S_IFREG
        is_device = (kinds == stat.S_IFCHR) | (kinds == stat.S_IFBLK)
        rows["parent"] = directory
        rows["ctime_ns"] = found["mtime_ns"]
        rows["source_ino"] = np.where(is_file, found["link"], numbers)
        blocks = (found["size"] + np.uint64(511)) // np.uint64(512)
        rows["extra"] = np.where(is_file, blocks, np.where(is_device, found["offset"], 0))
        batch = Batch(directory, rank, b"", [], bytearray(rows.tobytes()))
        for place in np.flatnonzero(kinds == stat.S_IFDIR).tolist():
            batch.directory_devices.append((place, 0))
        for place in np.flatnonzero(is_file & (found["nlink"] > 1)).tolist():
            batch.shared_devices.append((place, 0))
        described = (kinds == stat.S_IFLNK) | (found["xattr_length"] > 0)
        for place in np.flatnonzero(described).tolist():
            record = self._pack.record(int(numbers[place]))
            if record.target:
                batch.link_targets.append((place, record.target))
            xattrs = dict(record.xattrs)
            access = xattrs.get(acl.ACCESS, b"")
            acls = Acls(acl.stored(access) if access else b"", xattrs.get(acl.DEFAULT, b""))
            if acls != NO_ACLS:
                batch.acls[place] = acls
        return batch

    def _complete(self, batch: Batch, numbers: npt.NDArray[Any]) -> list[tuple[Ino, int, int]]:
        """Numbers a batch; returns the directories in it: inode, rank, number."""
        return [
            (ino, rank, int(numbers[place]))
            for place, _, ino, rank in self._numbering.complete(batch)
        ]
