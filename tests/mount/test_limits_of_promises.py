"""The things that a mount does not keep, check or notice, and that it says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Tree, contents
from tests.equipment.slowfs import SlowSource
from tests.faults.conftest import slow
from tests.mount.observe import read_through, settled

__all__ = ["slow"]


@pytest.mark.promise(18)
def test_access_times_are_not_kept(monarch: MonarchCommand, tree: Tree) -> None:
    tree({"file": 5000})
    mounted = monarch.mount(tree({}))
    before = (mounted.path / "file").stat()
    assert before.st_atime_ns == before.st_mtime_ns
    read_through(mounted.path / "file")
    assert (mounted.path / "file").stat().st_atime_ns == before.st_atime_ns


@pytest.mark.promise(31)
def test_extended_attributes_of_the_source_are_not_shown(
    monarch: MonarchCommand, source: Path
) -> None:
    (source / "file").write_bytes(b"bytes")
    os.setxattr(source / "file", "user.colour", b"blue")
    mounted = monarch.mount(source)
    assert os.listxattr(mounted.path / "file") == []
    with pytest.raises(OSError) as refused:
        os.getxattr(mounted.path / "file", "user.colour")
    assert refused.value.errno == errno.ENODATA


@pytest.mark.promise(29)
@pytest.mark.modes("relay", "no_open")
def test_a_change_that_no_attribute_shows_is_not_noticed(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    """The source gives other bytes than before, and the same size, times and inode number."""
    tree({"file": 5000})
    slow.rules("flip read ^/file")
    mounted = monarch.mount(slow.path)
    then = read_through(mounted.path / "file")
    settled(mounted)
    slow.rules()
    assert then != contents("file", 5000)
    assert read_through(mounted.path / "file") == then
    mounted.umount()
    mounted = monarch.mount(slow.path)
    assert read_through(mounted.path / "file") == then
    assert mounted.status()["snapshot"]["stale"] is not True
