"""Draining a file with holes takes the time of its data."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio.testing

from monarch.posix.files import copy_data
from monarch.text import GiB, MiB
from monarch.writeback.growth import Growth
from monarch.writeback.objects import Objects
from monarch.writeback.staging import Staging
from tests.writeback.remounts import ROOT, Rig

pytestmark = pytest.mark.promise(150)

SIZE = 1 * GiB
# Where the data are: at the beginning, between, and at the end.
PLACES = (0, 300 * MiB + 4097, SIZE - 2)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each call has read."""
    counts: list[int] = []
    pread, sendfile = os.pread, os.sendfile

    def counted(fd: int, count: int, offset: int) -> bytes:
        found = pread(fd, count, offset)
        counts.append(len(found))
        return found

    def sent(to: int, fd: int, offset: int, count: int) -> int:
        counts.append(sendfile(to, fd, offset, count))
        return counts[-1]

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(os, "sendfile", sent)
    return counts


def fill(fd: int) -> None:
    os.ftruncate(fd, SIZE)
    for place in PLACES:
        os.pwrite(fd, b"ab", place)


def is_filled(path: Path) -> bool:
    status = path.stat()
    with path.open("rb") as file:
        found = [os.pread(file.fileno(), 4, place) for place in PLACES]
    is_sparse = status.st_blocks * 512 < MiB
    return (status.st_size, is_sparse, found) == (SIZE, True, [b"ab\0\0", b"ab\0\0", b"ab"])


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    (tmp_path / "objects").mkdir()
    return Objects(tmp_path / "objects")


def staged(objects: Objects, part: Path) -> Staging:
    def opened() -> tuple[int, None]:
        return os.open(part, os.O_RDWR | os.O_CREAT, 0o600), None

    staging = Staging(objects, 1, open_part=opened)
    staging.open(sync=False)
    staging.begin()
    while staging.turn(4 * MiB):
        pass
    staging.finish(lambda fd: None)
    return staging


def verify(staging: Staging) -> None:
    while staging.verify(4 * MiB):
        pass


def test_holes_are_neither_read_nor_written_nor_read_back(
    objects: Objects, tmp_path: Path, read_bytes: list[int]
) -> None:
    fd = objects.create(1)
    fill(fd)
    os.close(fd)
    staging = staged(objects, tmp_path / "part")
    verify(staging)
    staging.close()
    assert is_filled(tmp_path / "part")
    assert sum(read_bytes) < MiB


@pytest.mark.parametrize("place", [PLACES[1], PLACES[1] + MiB, SIZE - 1, SIZE])
def test_other_bytes_at_the_source_are_noticed_wherever_they_are(
    objects: Objects, tmp_path: Path, place: int
) -> None:
    fd = objects.create(1)
    fill(fd)
    os.close(fd)
    staging = staged(objects, tmp_path / "part")
    with (tmp_path / "part").open("r+b") as file:
        os.pwrite(file.fileno(), b"x", place)
    with pytest.raises(OSError, match="other bytes") as raised:
        verify(staging)
    assert raised.value.errno == errno.EIO
    staging.close()


@pytest.mark.parametrize("place", [PLACES[0], PLACES[1]])
def test_appended_bytes_keep_their_holes(
    objects: Objects, tmp_path: Path, read_bytes: list[int], place: int
) -> None:
    fd = objects.create(1)
    fill(fd)
    if place == PLACES[0]:
        # It ends in a hole.
        os.ftruncate(fd, SIZE - MiB)
        os.ftruncate(fd, SIZE)
    there = tmp_path / "there"
    there.write_bytes(b"ab")
    os.truncate(there, place + 2)
    growth = Growth(fd, os.open(there, os.O_RDWR), by=None, base=place + 2)
    while missing := growth.missing(SIZE):
        assert growth.read(min(missing, 4 * MiB), SIZE)
        growth.write()
    assert growth.finish(SIZE, None).size == SIZE
    growth.close()
    assert there.stat().st_blocks * 512 < MiB
    assert sum(read_bytes) < MiB


def test_a_copy_has_the_same_holes(tmp_path: Path, read_bytes: list[int]) -> None:
    with (tmp_path / "a").open("w+b") as one, (tmp_path / "b").open("w+b") as other:
        fill(one.fileno())
        assert copy_data(one.fileno(), other.fileno(), SIZE) == SIZE
    assert is_filled(tmp_path / "b")
    assert sum(read_bytes) < MiB


@pytest.mark.finding("S6")
async def test_a_sparse_file_of_the_mount_is_drained_in_the_time_of_its_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    read_bytes: list[int],
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    async with rig.mount() as session:
        ino = await session.open(b"sparse")
        await session.front.attributes.change(ino, size=SIZE, by=ROOT)
        for place in PLACES:
            await session.files.write(ino, place, b"ab")
        session.files.release(ino)
        await session.drained()
    assert is_filled(rig.source / "sparse")
    assert sum(read_bytes) < 4 * MiB
