"""Partial copies on a real file system: granules, digests, terms, seals, and completion."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from monarch.tiers.contents import part_name
from monarch.tiers.kept_parts import PartsAtStart
from monarch.tiers.ownership import Owner, remove_copies, shared_copies
from monarch.tiers.partial import (
    ABSENT,
    DOUBTED,
    GRANULE,
    PRESENT,
    Layout,
    PartialFile,
    compare_parts,
    look_at,
)
from monarch.tiers.records import Record, Records
from monarch.tiers.tier import Tier
from monarch.tiers.verify import DIGEST, UNKNOWN, VERSION
from monarch.types import Identity, Ino

INO = Ino(7)
COUNT = 5
SIZE = COUNT * GRANULE - 1000
CONTENT = np.random.default_rng(1).bytes(SIZE)
VERSION_1 = Identity(SIZE, 1_700_000_000_123_456_789, 1_700_000_001_000_000_000, 4242)
VERSION_2 = Identity(SIZE, 1_700_000_000_123_456_790, 1_700_000_001_000_000_000, 4242)

Opens = Callable[..., PartialFile]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    opened = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt/data"))
    opened.use("g")
    yield opened
    opened.close()


@pytest.fixture
def reopened(tier: Tier) -> Iterator[Opens]:
    """Opens the partial copy; it is closed at the end of the test."""
    opened = []

    def reopen(*, term: int = 1, doubts: str = "unclean") -> PartialFile:
        part = PartialFile.open(tier, INO, VERSION_1, term, doubts=doubts)
        opened.append(part)
        return part

    yield reopen
    for part in opened:
        part.close()


def granule(index: int) -> bytes:
    return CONTENT[index * GRANULE : (index + 1) * GRANULE]


def make(tier: Tier, *indexes: int) -> PartialFile:
    part = PartialFile.create(tier, INO, VERSION_1, 1)
    for index in indexes:
        part.store(index, granule(index))
        part.map[index] = PRESENT
    return part


def path_of(tier: Tier) -> Path:
    return tier.own / "copies-g" / part_name(INO)


def change(tier: Tier, offset: int, data: bytes) -> None:
    """As a disk that returns other bytes: the file's times stay."""
    status = path_of(tier).stat()
    with path_of(tier).open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path_of(tier), ns=(status.st_atime_ns, status.st_mtime_ns))


def test_stored_granules_are_present_again_in_the_same_term(tier: Tier, reopened: Opens) -> None:
    make(tier, 1, 4).close()
    part = reopened()
    assert list(part.map) == [ABSENT, PRESENT, ABSENT, ABSENT, PRESENT]
    assert os.pread(part.fd, GRANULE, GRANULE) == granule(1)
    assert os.pread(part.fd, len(granule(4)), 4 * GRANULE) == granule(4)
    # The C datapath reads the same bytes.
    assert os.pread(part.fd, COUNT, part.layout.map_at) == bytes(part.map)


def test_several_granules_are_stored_as_one_unit(tier: Tier, reopened: Opens) -> None:
    part = make(tier)
    part.store(2, CONTENT[2 * GRANULE :])
    part.close()
    assert list(reopened().map) == [ABSENT, ABSENT, PRESENT, PRESENT, PRESENT]


def test_granules_of_an_earlier_term_are_compared_before_use(tier: Tier, reopened: Opens) -> None:
    make(tier, 0, 2).close()
    change(tier, 2 * GRANULE + 5, b"rotten")
    part = reopened(term=2)
    assert list(part.map) == [DOUBTED, ABSENT, DOUBTED, ABSENT, ABSENT]
    # The C datapath must not serve them either.
    assert os.pread(part.fd, COUNT, part.layout.map_at) == bytes(part.map)
    assert part.verify(0, 1) == bytes([PRESENT])
    assert part.verify(2, 3) == bytes([ABSENT])
    part.close()
    # The result is kept, and the file is of this term now.
    assert list(reopened(term=2).map) == [PRESENT, ABSENT, ABSENT, ABSENT, ABSENT]


def test_a_daemon_that_dies_before_it_compares_leaves_them_doubted(
    tier: Tier, reopened: Opens
) -> None:
    make(tier, 0).close()
    reopened(term=2)
    assert reopened(term=2).map[0] == DOUBTED
    assert reopened(term=3).map[0] == DOUBTED


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_of_the_map_makes_a_granule_absent(
    tier: Tier, reopened: Opens, bit: int
) -> None:
    """Its bytes were not fetched, or cannot be trusted: it would be read as zeros."""
    part = make(tier, 1)
    layout = part.layout
    part.close()
    change(tier, layout.map_at, bytes([ABSENT ^ 1 << bit, PRESENT ^ 1 << bit]))
    assert look_at(tier.directory, INO).granules == 0
    again = reopened(doubts="never")
    assert list(again.map) == [ABSENT] * COUNT
    assert os.pread(again.fd, COUNT, layout.map_at) == bytes(COUNT), "C reads the same"
    assert DOUBTED ^ 1 << bit != PRESENT


def test_a_broken_seal_makes_all_granules_doubted(tier: Tier, reopened: Opens) -> None:
    make(tier, 0, 1).close()
    os.utime(path_of(tier))
    assert list(reopened(doubts="never").map)[:2] == [DOUBTED, DOUBTED]


def test_the_setting_verify_decides_when_granules_are_compared(tier: Tier, reopened: Opens) -> None:
    make(tier, 0).close()
    assert reopened(term=2, doubts="never").map[0] == PRESENT
    reopened(term=2, doubts="never").close()
    assert reopened(term=2, doubts="open").map[0] == DOUBTED


@pytest.mark.parametrize("lost", ["data", "digest", "map"])
def test_no_torn_granule_is_served_after_a_power_cut(
    tier: Tier, reopened: Opens, lost: str
) -> None:
    """The pages of one write reach the disk in any order."""
    part = make(tier, 1)
    layout = part.layout
    places = {"data": GRANULE, "digest": layout.digests_at + 16, "map": layout.map_at + 1}
    os.pwrite(part.fd, bytes({"data": GRANULE, "digest": 16, "map": 1}[lost]), places[lost])
    part.close()
    again = reopened(term=2)
    if lost != "map":
        assert again.verify(1, 2) == bytes([ABSENT])
    else:
        assert again.map[1] == ABSENT


def test_zeros_stay_holes(tier: Tier) -> None:
    part = PartialFile.create(tier, INO, VERSION_1, 1)
    part.store(0, bytes(4 * GRANULE))
    assert path_of(tier).stat().st_blocks * 512 < GRANULE
    assert part.verify(0, 4) == bytes([PRESENT]) * 4
    part.close()


def test_a_damaged_granule_is_replaced_by_zeros(tier: Tier, reopened: Opens) -> None:
    part = PartialFile.create(tier, INO, VERSION_1, 1)
    part.store(0, bytes(SIZE))
    part.close()
    places = {0: 5, COUNT - 1: SIZE - 1}
    for place in places.values():
        change(tier, place, b"rotten"[:1])
    part = reopened(term=2)
    for index, place in places.items():
        assert part.verify(index, index + 1) == bytes([ABSENT])
        part.store(index, bytes(part.layout.length(index, index + 1)))
        assert os.pread(part.fd, 1, place) == b"\0"
        assert part.verify(index, index + 1) == bytes([PRESENT])


def test_a_complete_file_becomes_the_copy(tier: Tier) -> None:
    part = make(tier, 0, 1, 2, 3)
    assert not part.is_complete
    part.store(4, granule(4))
    part.map[4] = PRESENT
    assert part.is_complete
    assert part.whole_digest() == xxhash.xxh3_128_digest(CONTENT)
    part.become_copy(tier)
    part.close()
    assert not path_of(tier).exists()
    fd = tier.open(INO, VERSION_1)
    assert os.pread(fd, SIZE + 1, 0) == CONTENT
    os.close(fd)
    tier.verify(INO, VERSION_1, xxhash.xxh3_128_digest(CONTENT))


def test_a_complete_file_with_a_damaged_granule_does_not_become_the_copy(tier: Tier) -> None:
    part = make(tier, *range(COUNT))
    change(tier, 3 * GRANULE, b"rotten")
    with pytest.raises(OSError) as caught:
        part.whole_digest()
    assert caught.value.errno == errno.ESTALE
    part.close()


@pytest.mark.parametrize("damage", ["header", "cut", "version"])
def test_a_damaged_file_or_another_version_is_not_opened(
    tier: Tier, reopened: Opens, damage: str
) -> None:
    make(tier, 0).close()
    layout = Layout(SIZE)
    if damage == "header":
        change(tier, layout.header_at + 20, b"?")
    elif damage == "cut":
        os.truncate(path_of(tier), layout.header_at)
    identity = VERSION_2 if damage == "version" else VERSION_1
    with pytest.raises(OSError) as caught:
        PartialFile.open(tier, INO, identity, 1, doubts="unclean")
    assert caught.value.errno == errno.ESTALE


def test_the_bytes_of_a_closed_file_are_counted(tier: Tier) -> None:
    make(tier, 1, 4).close()
    found = look_at(tier.directory, INO)
    assert found.granules == 2
    assert found.nbytes == Layout(SIZE).overhead + GRANULE + len(granule(4))


def test_the_removal_of_a_copy_removes_the_partial_one(tier: Tier) -> None:
    make(tier, 1).close()
    tier.remove(INO)
    assert not path_of(tier).exists()


def test_the_copies_of_a_source_are_removed_with_the_partial_ones(tmp_path: Path) -> None:
    made = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt", "/pfs", "/state"))
    made.use("g")
    make(made, 1).close()
    made.close()
    [held] = shared_copies(tmp_path / "tier")
    assert (held.files, held.bytes) == (1, Layout(SIZE).total)
    remove_copies(held)
    assert not list((tmp_path / "tier").rglob("*/parts*"))


def test_a_check_finds_damage_strangers_and_other_versions(tier: Tier) -> None:
    make(tier, 0, 1).close()
    make_other = PartialFile.create(tier, Ino(8), VERSION_2, 1)
    make_other.close()
    (path_of(tier).parent / "notes.txt").write_text("not Monarch's")

    def kinds(*, whole: bool) -> dict[str, str]:
        steps = compare_parts(tier.root, "g", whole=whole, version_of=lambda ino: VERSION_1)
        return {s.suspect.path: s.suspect.kind for s in steps if s.suspect is not None}

    wrong = {"parts/8": VERSION, "parts/notes.txt": UNKNOWN}
    assert kinds(whole=True) == wrong
    change(tier, GRANULE, b"rotten")
    assert kinds(whole=False) == wrong
    assert kinds(whole=True) == {**wrong, "parts/7": DIGEST}
    change(tier, Layout(SIZE).header_at, b"?")
    assert kinds(whole=False) == {**wrong, "parts/7": DIGEST}


# -- at the start of a mount -----------------------------------------------------------------------


def table(*rows: tuple[int, Identity]) -> Iterator[tuple[int, np.ndarray]]:
    """The snapshot's inode table with these inodes."""
    kind = [("size", "u8"), ("mtime_ns", "i8"), ("ctime_ns", "i8"), ("source_ino", "u8")]
    for ino, i in rows:
        yield ino, np.array([(i.size, i.mtime_ns, i.ctime_ns, i.source_ino)], kind)


def test_a_new_snapshot_adopts_them_with_new_numbers(tier: Tier, tmp_path: Path) -> None:
    make(tier, 0, 1).close()
    tier.use("h")
    records = Records(tmp_path, "h", [tier.id])
    start = PartsAtStart([tier], records, "h")
    start.adopt(lambda: table((3, VERSION_2), (30, VERSION_1)))
    [found] = start.usable(tier, 100, lambda ino: VERSION_1)
    assert (found.ino, found.granules) == (30, 2)
    # Their term is not known.
    part = PartialFile.open(tier, Ino(30), VERSION_1, records.term, doubts="unclean")
    assert list(part.map)[:2] == [DOUBTED, DOUBTED]
    part.close()
    records.close(clean=True)


def test_files_of_other_programs_stay_when_those_of_an_earlier_snapshot_leave(tier: Tier) -> None:
    make(tier, 0).close()
    stranger = path_of(tier).with_name("notes")
    stranger.write_bytes(b"not a copy")
    tier.use("h")
    assert tier.remove_other_generations() == 1
    assert stranger.exists() and not path_of(tier).exists()


@pytest.mark.parametrize("why", ["version", "gone", "whole copy", "damaged", "directory"])
def test_the_start_removes_what_must_not_be_used(tier: Tier, tmp_path: Path, why: str) -> None:
    make(tier, 0).close()
    records = Records(tmp_path, "g", [tier.id])
    if why == "whole copy":
        records.put(INO, Record(1, VERSION_1, bytes(16)))
    elif why == "damaged":
        os.truncate(path_of(tier), 10)
    elif why == "directory":
        path_of(tier).unlink()
        (path_of(tier) / "below").mkdir(parents=True)
    start = PartsAtStart([tier], records, "g")
    version = VERSION_2 if why == "version" else VERSION_1
    assert start.usable(tier, 6 if why == "gone" else 100, lambda ino: version) == []
    assert not path_of(tier).exists()
    records.close(clean=True)


def test_a_directory_in_the_place_of_a_new_one_is_removed(tier: Tier, reopened: Opens) -> None:
    (path_of(tier) / "below").mkdir(parents=True)
    make(tier, 0).close()
    assert reopened().map[0] == PRESENT


def test_lost_records_leave_them_doubted(tier: Tier, tmp_path: Path, reopened: Opens) -> None:
    make(tier, 0).close()
    records = Records(tmp_path, "g", [tier.id])
    assert len(PartsAtStart([tier], records, "g").usable(tier, 100, lambda ino: VERSION_1)) == 1
    assert reopened(term=records.term).map[0] == DOUBTED
    records.close(clean=True)
