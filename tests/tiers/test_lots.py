"""Many small copies written into a tier in one call: by the C extension, and without it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from monarch.errors import SourceChanged
from monarch.tiers import lots
from monarch.tiers.contents import BrokenSeal
from monarch.tiers.lots import Content
from monarch.tiers.ownership import Owner
from monarch.tiers.tier import Tier
from monarch.types import Identity, Ino
from tests.equipment.slowfs import SlowSource, unavailable

MIB = 1 << 20


@pytest.fixture(params=["native", "python"], autouse=True)
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the C extension, and without it."""
    assert lots._write_copies is not None, "the extension was not built"
    if request.param == "python":
        monkeypatch.setattr(lots, "_write_copies", None)
    return str(request.param)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    opened = Tier(1, "fast", tmp_path / "tier", owner=Owner("mount", "/mnt/data"))
    opened.use("g")
    yield opened
    opened.close()


def content(ino: int, data: bytes | memoryview, size: int | None = None) -> Content:
    """A file whose version has a number above 2^63, and a time before 1970."""
    size = len(data) if size is None else size
    version = Identity(size, -5_000_000_001, 1_700_000_001_000_000_009, 1 << 63)
    return Content(Ino(ino), version, data)


def read(tier: Tier, one: Content) -> bytes:
    """The bytes of the copy; raises BrokenSeal for another version."""
    fd = tier.open(one.ino, one.identity)
    try:
        assert os.fstat(fd).st_mode & 0o7777 == 0o600
        return os.pread(fd, 4 * MIB, 0)
    finally:
        os.close(fd)


def stages(tier: Tier) -> list[str]:
    return os.listdir(tier.own / "stage")


def test_each_copy_has_its_bytes_its_seal_and_its_digest(tier: Tier) -> None:
    piece = memoryview(os.urandom(200_000))
    lot = [content(ino, piece[ino : ino + 100 * ino]) for ino in (1, 2, 257, 1000)]
    lot += [content(3, b""), content(5, os.urandom(2 * MIB + 1)), content(1 << 40, b"far")]
    before = {one.ino: b"replaced" for one in lot[:2]}
    lots.write(tier, [content(ino, data) for ino, data in before.items()], 0)
    assert lots.write(tier, lot, 0) == [xxhash.xxh3_128_digest(one.data) for one in lot]
    for one in lot:
        assert read(tier, one) == one.data
        if tier.seals:
            with pytest.raises(BrokenSeal):
                tier.open(one.ino, Identity(len(one.data), 1, 2, 3))
    assert stages(tier) == []
    assert sum(1 for _ in tier.own.glob("copies-*/*/*")) == len(lot)


def test_a_copy_that_fails_leaves_no_file_and_the_others_are_made(tier: Tier) -> None:
    (tier.own / "stage" / "2.part").mkdir()
    (tier.own / "copies-g" / "03").write_bytes(b"in the place of a directory")
    lot = [content(1, b"one"), content(2, b"two"), content(3, b"three"), content(4, b"four")]
    lot.append(content(5, b"short", size=6))
    first, second, third, fourth, fifth = lots.write(tier, lot, 0)
    assert (first, fourth) == tuple(xxhash.xxh3_128_digest(lot[n].data) for n in (0, 3))
    assert isinstance(second, OSError) and second.errno == errno.EISDIR
    assert isinstance(third, OSError) and third.errno == errno.ENOTDIR
    assert isinstance(fifth, SourceChanged)
    assert [read(tier, lot[n]) for n in (0, 3)] == [b"one", b"four"]
    assert stages(tier) == ["2.part"]


def test_no_copy_is_begun_when_the_tier_has_given_up(tier: Tier) -> None:
    lots.give_up(tier)
    lot = [content(1, b"one"), content(2, b"two")]
    for result in lots.write(tier, lot, 0):
        assert isinstance(result, OSError) and result.errno == errno.ECANCELED
    assert stages(tier) == [] and not list(tier.own.glob("copies-*/*/*"))
    assert None not in lots.write(tier, lot, 1) and read(tier, lot[1]) == b"two"


def test_a_link_in_the_place_of_a_stage_is_not_followed(tier: Tier, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"of another program")
    (tier.own / "stage" / "1.part").symlink_to(tmp_path / "other")
    (result,) = lots.write(tier, [content(1, b"one")], 0)
    assert isinstance(result, OSError) and result.errno == errno.ELOOP
    assert (tmp_path / "other").read_bytes() == b"of another program"


def test_a_copy_whose_close_fails_never_gets_its_name(tmp_path: Path) -> None:
    """As on NFS, which may report only there that it has no space for the bytes."""
    if reason := unavailable():
        pytest.skip(reason)
    (tmp_path / "disk").mkdir()
    with SlowSource(tmp_path / "disk", tmp_path / "slow", flush=True) as slow:
        tier = Tier(1, "fast", slow.path / "tier", owner=Owner("mount", "/mnt/data"))
        try:
            tier.use("g")
            slow.rules("err flush 122 /stage/2.part")
            lot = [content(1, b"one"), content(2, b"two")]
            first, second = lots.write(tier, lot, 0)
            assert first == xxhash.xxh3_128_digest(b"one") and read(tier, lot[0]) == b"one"
            assert isinstance(second, OSError) and second.errno == errno.EDQUOT == 122
            assert [path.name for path in (tmp_path / "disk").rglob("copies-*/*/*")] == ["1"]
            assert list((tmp_path / "disk").rglob("stage/*")) == []
        finally:
            tier.close()
