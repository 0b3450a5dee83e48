"""The residency records: a written record is found again, a torn record does not count."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from monarch.errors import TierError
from monarch.namespace.schema import RECORD
from monarch.tiers.records import Record, Records, other_generations, require_known_versions
from monarch.types import Identity, Ino


def identity(number: int, size: int = 100) -> Identity:
    return Identity(size, 1_000_000_007 * number, -5 * number, 10_000_000 - number)


def record(number: int, tier: int = 1) -> Record:
    return Record(tier, identity(number), bytes([number % 251]) * 16)


def loaded(records: Records) -> dict[int, tuple[int, int]]:
    """The tier and size of each inode number that has a record."""
    return {
        ino: (tier, size)
        for inos, tiers, sizes in records.load()
        for ino, tier, size in zip(inos.tolist(), tiers.tolist(), sizes.tolist(), strict=True)
    }


def test_a_record_is_found_again_by_the_next_daemon(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a", "b"])
    # Near and far: the file is sparse in between.
    for number in (1, 2, 63, 64, 5000, 3_000_000):
        records.put(Ino(number), record(number, 1 + number % 2))
    records.close(clean=True)
    assert (tmp_path / "residency-g").stat().st_blocks * 512 < 100_000
    again = Records(tmp_path, "g", ["a", "b"])
    for number in (1, 2, 63, 64, 5000, 3_000_000):
        assert again.get(Ino(number)) == record(number, 1 + number % 2)
    assert again.get(Ino(3)) is None
    assert again.get(Ino(9_000_000)) is None
    assert loaded(again) == {n: (1 + n % 2, 100) for n in (1, 2, 63, 64, 5000, 3_000_000)}
    again.close(clean=True)


def test_a_record_that_was_cleared_is_gone(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a"])
    records.put(Ino(5), record(5))
    records.clear(Ino(5))
    records.clear(Ino(77))
    assert records.get(Ino(5)) is None
    assert loaded(records) == {}
    records.close(clean=True)


@pytest.mark.fault("S14")
@pytest.mark.promise(29)
@pytest.mark.finding("D4")
@pytest.mark.parametrize("clean", [True, False])
def test_a_record_of_a_young_version_is_believed_by_the_daemon_that_made_it_only(
    tmp_path: Path, clean: bool
) -> None:
    records = Records(tmp_path, "g", ["a"])
    for number in (1, 2, 3):
        records.put(Ino(number), record(number), young=True)
    records.put(Ino(4), record(4))
    assert loaded(records) == dict.fromkeys((1, 2, 3, 4), (1, 100))
    # It has looked again, or the copy was made anew.
    records.settle(Ino(1))
    records.put(Ino(2), record(2))
    # A copy whose digest was compared is no less young.
    records.confirm(Ino(3), record(3))
    assert [records.is_young(Ino(n)) for n in (1, 2, 3, 4, 99)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    records.close(clean=clean)
    again = Records(tmp_path, "g", ["a"])
    assert loaded(again) == dict.fromkeys((1, 2, 4), (1, 100))
    assert again.get(Ino(3)) is None
    again.close(clean=True)


def doubted(records: Records) -> list[int]:
    return [ino for inos in records.unverified() for ino in inos.tolist()]


def test_records_are_doubted_after_an_unclean_end_until_they_are_confirmed(tmp_path: Path) -> None:
    fresh = Records(tmp_path, "g", ["a"])
    for number in (1, 2, 3):
        fresh.put(Ino(number), record(number))
    fresh.close(clean=True)
    clean = Records(tmp_path, "g", ["a"])
    assert doubted(clean) == []
    # As a killed daemon leaves them.
    clean.close(clean=False)
    after_a_kill = Records(tmp_path, "g", ["a"])
    assert doubted(after_a_kill) == [1, 2, 3]
    after_a_kill.put(Ino(4), record(4))
    after_a_kill.confirm(Ino(2), record(2))
    after_a_kill.confirm(Ino(3), record(5))
    after_a_kill.confirm(Ino(9), record(9))
    assert doubted(after_a_kill) == [1, 3]
    after_a_kill.close(clean=True)
    # However many clean ends come after it.
    for _ in range(2):
        later = Records(tmp_path, "g", ["a"])
        assert doubted(later) == [1, 3]
        assert [later.doubts(Ino(n)) for n in (1, 2, 3, 4, 5)] == [True, False, True, False, True]
        assert loaded(later) == dict.fromkeys((1, 2, 3, 4), (1, 100))
        later.close(clean=True)
    Records(tmp_path, "g", ["a"]).close(clean=False)
    assert doubted(Records(tmp_path, "g", ["a"])) == [1, 2, 3, 4]


@pytest.mark.parametrize("byte", range(64))
def test_a_record_with_one_flipped_bit_is_no_record(tmp_path: Path, byte: int) -> None:
    records = Records(tmp_path, "g", ["a"])
    records.put(Ino(9), record(9))
    with (tmp_path / "residency-g").open("r+b") as file:
        file.seek(4096 + 9 * 64 + byte)
        (before,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([before ^ 4]))
    assert records.get(Ino(9)) is None
    records.close(clean=True)


def test_a_record_in_the_place_of_another_is_no_record(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a"])
    records.put(Ino(9), record(9))
    path = tmp_path / "residency-g"
    content = bytearray(path.read_bytes().ljust(4096 + 12 * 64, b"\0"))
    content[4096 + 10 * 64 : 4096 + 11 * 64] = content[4096 + 9 * 64 : 4096 + 10 * 64]
    path.write_bytes(content)
    assert records.get(Ino(9)) == record(9)
    assert records.get(Ino(10)) is None
    records.close(clean=True)


def test_copies_stay_with_their_tier_when_the_order_changes(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a", "b", "c"])
    for number in range(1, 301):
        records.put(Ino(number), record(number, 1 + number % 3))
    records.close(clean=True)
    # b has become the first, a the second, c is no longer there, d is new.
    again = Records(tmp_path, "g", ["b", "d", "a"])
    place = {1: 3, 2: 1}
    for number in range(1, 301):
        expected = place.get(1 + number % 3)
        found = again.get(Ino(number))
        assert found == (record(number, expected) if expected else None)
    again.close(clean=True)


def test_copies_of_versions_that_the_snapshot_does_not_know_are_forgotten(tmp_path: Path) -> None:
    numbers = (1, 2, 3, 4, 5, 4090, 4099, 9000)
    rows = np.zeros(10_000, RECORD)
    for number in numbers:
        known = identity(number)
        rows[number] = (0, 0, 0, 0, 0, 0, known.size, known.mtime_ns, known.ctime_ns, 0, 0)
        rows["source_ino"][number] = known.source_ino
    records = Records(tmp_path, "g", ["a"])
    for number in numbers:
        records.put(Ino(number), record(number))
    for number, field in ((2, "size"), (4, "mtime_ns"), (4099, "ctime_ns"), (9000, "source_ino")):
        rows[field][number] += 1
    # The drain has changed 2 last, and 4 once more since; 9000 is another file now.
    renewed = {record(number).identity.source_ino: record(number).identity for number in (2, 9000)}
    renewed[record(4).identity.source_ino] = identity(5)
    records.forget_other_versions(lambda inos: rows[inos.start : inos.stop], renewed)
    assert set(loaded(records)) == {1, 2, 3, 5, 4090}
    records.close(clean=True)


def test_the_inode_numbers_of_the_source_are_given_in_order(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a"])
    assert [list(column) for column in records.by_source_ino()] == [[], []]
    for number in (5, 900, 20_000):
        records.put(Ino(number), record(number))
    keys, numbers = records.by_source_ino()
    assert keys.tolist() == [9_980_000, 9_999_100, 9_999_995]
    assert numbers.tolist() == [20_000, 900, 5]
    records.close(clean=True)


@pytest.mark.parametrize(
    "header", [b"", b"not json", b"[]", json.dumps({"magic": "other"}).encode()]
)
def test_a_file_of_another_format_is_started_anew(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "residency-g").write_bytes(header.ljust(4096) + b"\x01" * 6400)
    records = Records(tmp_path, "g", ["a"])
    assert loaded(records) == {}
    records.close(clean=True)


def of_version(path: Path, version: int) -> bytes:
    """Rewrite the version in a file of records; what it holds then."""
    content = path.read_bytes()
    header = {**json.loads(content[:4096]), "version": version}
    if version == 1:
        del header["term"]
    path.write_bytes(json.dumps(header).encode().ljust(4096) + content[4096:])
    return path.read_bytes()


def test_records_of_a_newer_version_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a"])
    records.put(Ino(1), record(1))
    records.close(clean=True)
    path = tmp_path / "residency-g"
    before = of_version(path, 3)
    for _ in range(2):
        with pytest.raises(TierError, match="is of version 3, this Monarch knows 2"):
            Records(tmp_path, "g", ["a"])
        with pytest.raises(TierError, match="residency-g"):
            require_known_versions(tmp_path)
    assert path.read_bytes() == before


def test_records_of_the_version_before_are_taken_over(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a", "b"])
    # A version that knew no terms left their place empty.
    records.put(Ino(1), record(1, 2), doubted=True)
    records.close(clean=True)
    of_version(tmp_path / "residency-g", 1)
    require_known_versions(tmp_path)
    again = Records(tmp_path, "g", ["a", "b"])
    assert again.get(Ino(1)) == record(1, 2)
    assert doubted(again) == [1]
    again.close(clean=True)
    assert json.loads((tmp_path / "residency-g").read_bytes()[:4096])["version"] == 2


def test_no_record_is_rewritten_when_the_order_of_the_tiers_changes(tmp_path: Path) -> None:
    records = Records(tmp_path, "g", ["a", "b", "c"])
    for number in (1, 2, 3):
        records.put(Ino(number), record(number, number))
    records.close(clean=True)
    before = (tmp_path / "residency-g").read_bytes()[4096:]
    again = Records(tmp_path, "g", ["c", "a", "b"])
    assert (tmp_path / "residency-g").read_bytes()[4096:] == before
    assert loaded(again) == {1: (2, 100), 2: (3, 100), 3: (1, 100)}
    again.close(clean=True)


def test_the_place_of_a_tier_that_is_gone_goes_to_the_next_one_with_none_of_its_copies(
    tmp_path: Path,
) -> None:
    for turn in range(4):
        records = Records(tmp_path, "g", ["kept", f"tier {turn}"])
        assert loaded(records) == ({5: (1, 100)} if turn else {})
        records.put(Ino(5), record(5, 1))
        records.put(Ino(6), record(6, 2))
        assert records.get(Ino(6)) == record(6, 2)
        records.close(clean=True)


def test_generations_are_distinguished(tmp_path: Path) -> None:
    for generation in ("one", "two", "three"):
        Records(tmp_path, generation, ["a"]).close(clean=True)
    (tmp_path / "snapshot.lmdb").write_bytes(b"")
    assert other_generations(tmp_path, "two") == ["one", "three"]
    one = Records(tmp_path, "one", ["a"])
    one.close(clean=True)
    one.remove()
    one.remove()
    assert other_generations(tmp_path, "two") == ["three"]


def test_a_state_directory_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="residency-g"):
        Records(tmp_path / "missing", "g", ["a"])


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_fifo_is_not_waited_for_and_a_link_is_not_followed(tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of others")
    if kind == "fifo":
        os.mkfifo(tmp_path / "residency-g")
    else:
        (tmp_path / "residency-g").symlink_to(elsewhere)
    with pytest.raises(TierError, match="residency-g"):
        Records(tmp_path, "g", ["a"])
    assert elsewhere.read_bytes() == b"of others"
