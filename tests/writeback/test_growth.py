"""Bytes that are appended to a file at the source, on real files: others may write there too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarch.text import MiB
from monarch.writeback.growth import Growth, OthersWroteError


class Growing:
    """An object whose first bytes the file at the source has."""

    def __init__(self, directory: Path, content: bytes, *, base: int) -> None:
        self.object, self.file = directory / "object", directory / "file"
        self.object.write_bytes(content)
        self.file.write_bytes(content[:base])
        self.growth = Growth(
            os.open(self.object, os.O_RDONLY), os.open(self.file, os.O_RDWR), by=None, base=base
        )

    def bring(self, size: int, *, turn: int = 4) -> None:
        while missing := self.growth.missing(size):
            self.growth.read(min(missing, turn), size)
            self.growth.write()


def test_appended_bytes_are_drained_in_turns_with_the_time_of_the_file(tmp_path: Path) -> None:
    it = Growing(tmp_path, b"old, and new bytes", base=3)
    it.bring(12)
    identity = it.growth.finish(12, 1_000_000_007)
    assert it.file.read_bytes() == b"old, and new"
    assert (identity.size, identity.mtime_ns) == (12, 1_000_000_007)
    it.growth.close()
    it.growth.close()


def test_holes_are_not_read_and_stay_holes(tmp_path: Path) -> None:
    it = Growing(tmp_path, bytes(range(256)) * 4096, base=MiB)
    with it.object.open("r+b") as file:
        file.truncate(40 * MiB)
    assert it.growth.read(4, 40 * MiB) == 39 * MiB
    it.growth.write()
    assert it.growth.missing(40 * MiB) == 0
    assert it.growth.finish(40 * MiB, None).size == 40 * MiB
    assert it.file.stat().st_blocks * 512 < 2 * MiB


def test_bytes_that_a_failed_turn_has_left_are_overwritten(tmp_path: Path) -> None:
    it = Growing(tmp_path, b"old and new", base=3)
    it.file.write_bytes(b"old and rubbish"[:9])
    again = Growth(os.open(it.object, os.O_RDONLY), os.open(it.file, os.O_RDWR), by=None, base=3)
    it.growth = again
    it.bring(11)
    again.finish(11, None)
    assert it.file.read_bytes() == b"old and new"


@pytest.mark.parametrize("change", ["append", "truncate", "set-ID"])
def test_a_file_that_others_change_meanwhile_is_left_to_them(tmp_path: Path, change: str) -> None:
    it = Growing(tmp_path, b"old and new bytes", base=3)
    it.growth.read(4, 17)
    it.growth.write()
    match change:
        case "append":
            with it.file.open("ab") as file:
                file.write(b"theirs")
        case "truncate":
            os.truncate(it.file, 2)
        case "set-ID":
            it.file.chmod(0o4755)
    before = it.file.read_bytes()
    it.growth.read(4, 17)
    with pytest.raises(OthersWroteError):
        it.growth.write()
    assert it.file.read_bytes() == before
    if change != "set-ID":
        with pytest.raises(OthersWroteError):
            it.growth.finish(17, None)


def test_a_source_that_keeps_other_bytes_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Growing(tmp_path, b"old and new", base=3)
    it.growth.read(4, 11)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, bytes(len(data)), at))
    with pytest.raises(OSError, match="other bytes"):
        it.growth.write()
