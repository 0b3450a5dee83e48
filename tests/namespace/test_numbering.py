"""Inode numbers of a scan, without a source: their order, and which entries are aliases."""

from __future__ import annotations

import stat

from monarch.namespace.numbering import Batch, Numbering, remove
from monarch.namespace.schema import ACL_SHIFT, ALIAS, RECORD_BYTES, RECORD_STRUCT
from monarch.posix.acl import NO_ACLS, Acls
from monarch.types import ROOT_INO, Ino


def record(mode: int, *, nlink: int = 1, source_ino: int = 0) -> bytes:
    return RECORD_STRUCT.pack(ROOT_INO, mode, 0, 0, nlink, 0, 0, 0, 0, source_ino, 0)


def batch(names: list[bytes], *records: bytes) -> Batch:
    return Batch(ROOT_INO, 0, b"", names, bytearray(b"".join(records)))


def unpacked(made: Batch, position: int) -> tuple[int, ...]:
    return RECORD_STRUCT.unpack_from(made.records, position * RECORD_BYTES)


def test_further_names_of_a_file_lead_to_its_first_one_across_batches() -> None:
    numbering = Numbering()
    shared = record(stat.S_IFREG, nlink=2, source_ino=7)
    first, second = batch([b"a", b"b"], shared, record(stat.S_IFREG)), batch([b"c"], shared)
    other = batch([b"d"], shared)
    first.shared_devices.append((0, 1))
    second.shared_devices.append((0, 1))
    # The same number on another device is another file.
    other.shared_devices.append((0, 2))
    for each in (first, second, other):
        assert numbering.complete(each) == []
    assert unpacked(first, 0)[5] == 0
    assert unpacked(second, 0)[5] & ALIAS
    assert unpacked(second, 0)[10] == 1
    assert not unpacked(other, 0)[5] & ALIAS


def test_directories_and_links_are_numbered_each_by_themselves() -> None:
    numbering = Numbering()
    one = batch([b"d", b"l"], record(stat.S_IFDIR), record(stat.S_IFLNK))
    one.directory_devices.append((0, 1))
    one.link_targets.append((1, b"target"))
    two = batch([b"e"], record(stat.S_IFDIR))
    two.directory_devices.append((0, 5))
    assert numbering.complete(one) == [(0, 1, Ino(1), 0)]
    assert numbering.complete(two) == [(0, 5, Ino(3), 1)]
    assert one.links == [b"target"]
    assert unpacked(one, 1)[10] == 0
    assert unpacked(two, 0)[10] == 1


def test_each_pair_of_access_control_lists_has_one_number() -> None:
    numbering = Numbering()
    lists = Acls(b"some", b"")
    one, two = batch([b"a"], record(stat.S_IFREG)), batch([b"b"], record(stat.S_IFREG))
    one.acls[0] = two.acls[0] = lists
    numbering.complete(one)
    numbering.complete(two)
    assert (one.new_acls, two.new_acls) == ([lists], [])
    assert unpacked(two, 0)[5] >> ACL_SHIFT == 1
    assert numbering.acls_of(unpacked(two, 0)[5]) == lists
    assert numbering.acls_of(0) == NO_ACLS


def test_an_entry_that_has_gone_leaves_the_places_behind_it_right() -> None:
    made = batch([b"a", b"b"], record(stat.S_IFREG), record(stat.S_IFLNK))
    made.link_targets.append((1, b"target"))
    remove(made, 0)
    assert made.names == [b"b"]
    assert len(made.records) == RECORD_BYTES
    assert made.link_targets == [(0, b"target")]
