"""Entries of others to which the source has given the inode number of a removed entry."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from monarch.posix.credentials import ROOT
from monarch.posix.files import born_ns
from monarch.types import Identity
from monarch.writeback import source_contents, source_entries
from monarch.writeback.expected import Expected
from monarch.writeback.op import Op
from monarch.writeback.source_contents import Place, kind_of_place
from tests.writeback.test_source_writer import Rig, rig

__all__ = ["rig"]

pytestmark = pytest.mark.promise(79)

_S = 10**9
BORN_NS = 500_000_000_123


def earlier(rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch) -> Identity:
    """A removed entry with the number of ``name``; it was changed for the last time before ``name``
    was created."""
    now = rig.identity(name)
    for module in (source_contents, source_entries):
        monkeypatch.setattr(module, "born_ns", lambda fd, name=b"": now.ctime_ns)
    # An odd number: others look like times of a source that keeps no single nanoseconds.
    return replace(now, ctime_ns=(now.ctime_ns - 2) | 1)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_another_entry_with_the_number_of_a_removed_one_keeps_its_attributes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = rig.root / "a"
    if kind == "directory":
        path.mkdir(mode=0o700)
    else:
        path.write_bytes(b"theirs")
        path.chmod(0o700)
    known = earlier(rig, "a", monkeypatch)
    op = Op(kind="attr", path=b"a", mode=0o4777, ino=7, strict=True, by=ROOT)
    with rig.directories() as directories:
        assert rig.entries.change_attributes(directories, op, Expected(known=known)) is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert rig.conflict().path == b"a"
        # A change of others in the same entry is no conflict for a mode.
        assert rig.entries.change_attributes(
            directories, op, Expected(known=replace(known, ctime_ns=rig.identity("a").ctime_ns))
        )
    assert stat.S_IMODE(path.stat().st_mode) == 0o4777


def test_another_directory_with_the_number_of_a_removed_one_is_neither_moved_nor_removed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.root / "d").mkdir()
    expected = Expected(known=earlier(rig, "d", monkeypatch))
    with rig.directories() as directories:
        rmdir = Op(kind="rmdir", path=b"d", ino=7, strict=True, by=ROOT)
        rig.entries.rmdir(directories, rmdir, expected)
        rename = Op(kind="rename", path=b"d", to=b"e", ino=7, strict=True, by=ROOT)
        rig.entries.rename(directories, rename, expected, Expected(), Place())
    assert os.listdir(rig.root) == ["d"]
    assert rig.log.conflict_count == 2


def test_another_file_with_the_number_of_a_removed_one_gets_no_second_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rig.root / "a").write_bytes(b"theirs")
    expected = Expected(known=earlier(rig, "a", monkeypatch))
    link = Op(kind="link", path=b"a", to=b"b", ino=7, strict=True, by=ROOT)
    with rig.directories() as directories:
        assert rig.entries.link(directories, link, expected) is None
    assert os.listdir(rig.root) == ["a"]
    assert rig.conflict().path == b"a"


@pytest.mark.parametrize("what", ["bytes", "birth"])
def test_another_file_with_the_number_of_a_removed_one_is_not_taken_for_a_renamed_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The older name is gone, as after a rename by a killed mount."""
    (rig.root / "b").write_bytes(b"theirs")
    known = earlier(rig, "b", monkeypatch) if what == "birth" else rig.identity("b")
    if what == "bytes":
        known = replace(known, size=5)
    rename = Op(kind="rename", path=b"a", to=b"b", ino=7, strict=True, by=ROOT)
    with rig.directories() as directories:
        call = partial(rig.entries.rename, directories, rename, over=Expected(), place=Place())
        assert call(expected=Expected(known=known, is_file=True)) is None
        ours = replace(rig.identity("b"), ctime_ns=rig.identity("b").ctime_ns + 1)
        assert call(expected=Expected(known=ours, is_file=True)) is not None


@pytest.mark.parametrize("is_reused", [True, False])
def test_another_fifo_with_the_number_of_an_expected_entry_is_neither_replaced_nor_removed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_reused: bool
) -> None:
    """Its size is that of an empty file, and its time of modification tells nothing."""
    os.mkfifo(rig.root / "a")
    (rig.root / "b").write_bytes(b"b")
    known = earlier(rig, "a", monkeypatch)
    if not is_reused:
        known = rig.identity("a")
    replaced = Expected(over=(known,))
    content = Op(kind="content", path=b"a", object=1, strict=True, by=ROOT)
    rename = Op(kind="rename", path=b"b", to=b"a", ino=7, strict=True, by=ROOT)
    unlink = Op(kind="unlink", path=b"a", ino=8, strict=True, by=ROOT)
    with rig.directories() as directories:
        fd, name = directories.of(b"a", None)
        kind, _ = kind_of_place(fd, name, content, replaced)
        assert kind == ("conflict" if is_reused else "replace")
        b = Expected(known=rig.identity("b"))
        rig.entries.rename(directories, rename, b, replaced, Place())
        assert stat.S_ISFIFO((rig.root / "a").stat().st_mode) is is_reused
        if is_reused:
            rig.entries.unlink(directories, unlink, Expected(known=known), Place())
            assert stat.S_ISFIFO((rig.root / "a").stat().st_mode)


@pytest.mark.parametrize(
    ("ctime_ns", "born", "is_reused"),
    [
        (BORN_NS - 1, BORN_NS, True),
        (BORN_NS, BORN_NS, False),
        (BORN_NS + 1, BORN_NS, False),
        (BORN_NS - 1, None, False),
        # Times in whole seconds, and a source that keeps none.
        (500 * _S, BORN_NS, False),
        (480 * _S, BORN_NS, True),
        (0, BORN_NS, False),
        # The clock of the client is behind, or a second has begun on the way to the server.
        (495 * _S, BORN_NS, False),
        (499 * _S, 500 * _S, False),
    ],
)
def test_an_entry_is_another_one_if_it_was_created_after_the_last_change_of_the_known_one(
    tmp_path: Path, ctime_ns: int, born: int | None, is_reused: bool
) -> None:
    found = tmp_path.stat()
    known = Identity(1, 2, ctime_ns, found.st_ino)
    assert Expected(known=known).is_reused(found, born) is is_reused
    assert Expected(over=(known,)).is_reused(found, born) is is_reused
    assert not Expected().is_reused(found, born)


def test_an_entry_is_born_before_its_last_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        born = born_ns(directory, b"a")
        # Not every file system reports it.
        assert born is None or born <= (tmp_path / "a").stat().st_ctime_ns
        assert (born_ns(directory) is None) is (born is None)
        with pytest.raises(FileNotFoundError):
            born_ns(directory, b"missing")
    finally:
        os.close(directory)
