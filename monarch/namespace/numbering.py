"""Gives the entries of a scan their numbers, in the order of a snapshot's tables.

Inode numbers are places in the table; directories, targets of links and access control lists are
numbered separately. A further name of a file refers to its first name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch.errors import SnapshotError
from monarch.namespace import schema
from monarch.posix.acl import NO_ACLS, Acls
from monarch.types import Ino


@dataclass(slots=True)
class Batch:
    """Consecutive children of one directory, in the order of their names.

    ``records`` are packed as RECORD_STRUCT and complete. ``directory`` is the inode number of the
    directory and ``rank`` its rank; every directory has at least one batch, perhaps an empty one.
    ``links`` are the targets of the symbolic links in the batch. ``new_acls`` are the access
    control lists that no earlier batch had, in the order of their numbers. ``unreadable`` are the
    paths of entries with that flag; ``closed``: the directory itself could not be listed.
    """

    directory: Ino
    rank: int
    path: bytes
    names: list[bytes]
    records: bytearray
    links: list[bytes] = field(default_factory=list)
    unreadable: list[bytes] = field(default_factory=list)
    closed: bool = False
    reused: int = 0
    new_acls: list[Acls] = field(default_factory=list)
    # Positions that are completed when their turn comes: rank, target, device.
    directory_devices: list[tuple[int, int]] = field(default_factory=list)
    link_targets: list[tuple[int, bytes]] = field(default_factory=list)
    shared_devices: list[tuple[int, int]] = field(default_factory=list)
    acls: dict[int, Acls] = field(default_factory=dict)


class Numbering:
    """The numbers that one scan has given so far."""

    def __init__(self) -> None:
        self._next_ino = 1
        self._next_rank = 0
        self._next_link = 0
        self._primaries: dict[tuple[int, int], list[int]] = {}
        self._acls: dict[Acls, int] = {}
        self._numbered_acls: list[Acls] = []

    def complete(self, batch: Batch) -> list[tuple[int, int, Ino, int]]:
        """Completes the records of a batch; called in the order of the batches. Returns the
        position, the device, the inode number and the rank of each directory in it."""
        first = self._next_ino
        self._next_ino += len(batch.names)
        records = batch.records
        aliases: set[int] = set()
        for position, acls in batch.acls.items():
            number = self._acls.get(acls)
            if number is None:
                number = self._acls[acls] = len(self._acls) + 1
                batch.new_acls.append(acls)
                if number > schema.MOST_ACLS:
                    raise SnapshotError(
                        "the source has more different access control lists than a"
                        " snapshot can number"
                    )
            put(
                records,
                position,
                schema.FLAGS_OFFSET,
                (number << schema.ACL_SHIFT).to_bytes(4, "little"),
            )
        for position, device in batch.shared_devices:
            at = position * schema.RECORD_BYTES + schema.SOURCE_INO_OFFSET
            ino = int.from_bytes(records[at : at + 8], "little")
            primary = self._primaries.get((device, ino))
            if primary is None:
                links = u32(records, position, schema.NLINK_OFFSET)
                self._primaries[device, ino] = [first + position, links - 1]
                continue
            aliases.add(position)
            put(records, position, schema.FLAGS_OFFSET, schema.ALIAS.to_bytes(4, "little"))
            put(records, position, schema.EXTRA_OFFSET, primary[0].to_bytes(8, "little"))
            primary[1] -= 1
            if primary[1] == 0:
                del self._primaries[device, ino]
        for position, target in batch.link_targets:
            if position not in aliases:
                put(records, position, schema.EXTRA_OFFSET, self._next_link.to_bytes(8, "little"))
                batch.links.append(target)
                self._next_link += 1
        directories = []
        for position, device in batch.directory_devices:
            rank = self._next_rank
            self._next_rank += 1
            put(records, position, schema.EXTRA_OFFSET, rank.to_bytes(8, "little"))
            directories.append((position, device, Ino(first + position), rank))
        return directories

    def acls_of(self, flags: int) -> Acls:
        """The access control lists that the ``flags`` of a record refer to."""
        number = flags >> schema.ACL_SHIFT
        if len(self._numbered_acls) < number:
            self._numbered_acls = list(self._acls)
        return self._numbered_acls[number - 1] if number else NO_ACLS


def u32(records: bytearray, position: int, offset: int) -> int:
    number: int = schema.U32.unpack_from(records, position * schema.RECORD_BYTES + offset)[0]
    return number


def put(records: bytearray, position: int, offset: int, value: bytes | bytearray) -> None:
    at = position * schema.RECORD_BYTES + offset
    records[at : at + len(value)] = value


def remove(batch: Batch, position: int) -> None:
    """Removes an entry that no longer exists. Only links that are not read yet may follow it."""
    del batch.names[position]
    del batch.records[position * schema.RECORD_BYTES : (position + 1) * schema.RECORD_BYTES]
    batch.link_targets = [(at - (at > position), target) for at, target in batch.link_targets]
