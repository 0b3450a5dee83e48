"""``get_many`` reads the copies of a mount where the mount names them, and only as its files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import monarch as library
from monarch.datasets.copies import reads_ahead
from monarch.posix.files import closing_fd
from monarch.types import XATTR_COPIES
from tests.conftest import MonarchCommand, Mounted, Tree
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, needs_root
from tests.mount.observe import as_a_disk_does, copy_of, epoch, files, resident
from tests.mount.test_permissions import as_another_user

pytestmark = [needs_fuse, needs_root]


def places(path: Path) -> dict[str, object] | None:
    """The copies that a mount names."""
    try:
        found: dict[str, object] = json.loads(os.getxattr(path, XATTR_COPIES))
    except OSError:
        return None
    return found


def read_all(mounted: Mounted, content: dict[str, bytes]) -> None:
    with library.open_dataset(mounted.path) as dataset:
        assert dataset.get_many(content) == list(content.values())


@pytest.mark.promise(252, 253)
@pytest.mark.modes("no_open")
def test_the_copies_are_read_once_every_file_has_one(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    content = files(6)
    mounted = monarch.mount(tree(content), options=["allow_other"])
    names = list(content)
    epoch(mounted, {name: content[name] for name in names[:3]})
    wait_until(lambda: len(resident(mounted, names)) == 3, "three files have copies")
    assert places(mounted.path) is None
    read_all(mounted, content)
    wait_until(lambda: places(mounted.path) is not None, "every file has a copy")
    refused = {"ask": lambda: os.getxattr("mnt", XATTR_COPIES)}
    assert as_another_user(tmp_path, refused) == {"ask": "ENODATA"}
    with library.open_dataset(mounted.path) as dataset:
        assert dataset.get_many(content) == list(content.values())
        # The mount has the pages of the file, so only a read of the copy shows other bytes.
        copy = copy_of(mounted, names[0])
        with as_a_disk_does(copy):
            copy.write_bytes(content[names[1]])
        assert dataset.get_many(content) == [content[names[1]], *list(content.values())[1:]]
        copy.unlink()
        assert dataset.get_many(content) == list(content.values())


@pytest.mark.promise(252)
@pytest.mark.modes("relay", "passthrough")
def test_a_mount_that_reports_opens_names_no_copies(monarch: MonarchCommand, tree: Tree) -> None:
    content = files(3)
    mounted = monarch.mount(tree(content))
    read_all(mounted, content)
    wait_until(lambda: len(resident(mounted, content)) == 3, "every file has a copy")
    assert places(mounted.path) is None
    read_all(mounted, content)


def is_read_ahead(path: Path) -> bool:
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        return reads_ahead(fd)


@pytest.mark.promise(251)
@pytest.mark.modes("no_open")
def test_the_kernel_reads_ahead_on_a_mount_that_reports_no_opens(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    content = files(40)
    mounted = monarch.mount(tree(content))
    # The kernel agrees to send no opens at the first one.
    read_all(mounted, content)
    assert is_read_ahead(mounted.path)
    assert not is_read_ahead(tmp_path)
    read_all(mounted, content)


@pytest.mark.promise(251)
@pytest.mark.modes("relay", "passthrough")
def test_the_kernel_is_not_asked_to_read_where_each_open_is_reported(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree(files(3)))
    assert not is_read_ahead(mounted.path)
