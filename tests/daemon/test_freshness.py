"""The comparison of copies with the source while the drain changes attributes there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from monarch.config.settings import SnapshotSettings
from monarch.daemon.freshness import FreshnessWatch
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.source import identity_of
from monarch.types import Ino, attributes_of
from tests.conftest import Tree
from tests.equipment import disks
from tests.vfs.rig import Rig

pytestmark = pytest.mark.promise(172)


@pytest.fixture
def rig(tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    source = tree({"f": 1000})
    # Older than the time within which a file is compared again.
    os.utime(source / "f", ns=(10**18, 10**18))
    rig = Rig(tmp_path / "rig", source)
    yield rig
    rig.close()


async def compare(rig: Rig, *, of_doubts: bool = False) -> None:
    """Compares all copies, or only those that are to be compared again."""
    watch = watch_of(rig, just_built=True)
    if not of_doubts:
        await watch.run()
    for ino, doubt in rig.doubts.due(1 << 62):
        await watch._look_twice([(ino, doubt)])


def watch_of(rig: Rig, *, just_built: bool) -> FreshnessWatch:
    hierarchy = cast(Hierarchy, SimpleNamespace(tiers=[rig.tier], records=rig.records))
    return FreshnessWatch(
        names=rig.names,
        source=rig.source,
        source_threads=rig.threads,
        hierarchy=hierarchy,
        residency=rig.residency,
        revalidation=rig.read_side.revalidation,
        doubts=rig.doubts,
        metrics=rig.metrics,
        settings=SnapshotSettings(),
        just_built=just_built,
        inline_max=4096,
        sends_opens=True,
    )


def change(rig: Rig, ino: Ino) -> None:
    """The mode is changed on the mount, and the journal has the change."""
    rig.names.change(ino, mode=0o640, now_ns=time.time_ns())
    node = rig.names.node(ino)
    assert node is not None
    node.undrained = 1


def mark(rig: Rig, ino: Ino) -> None:
    """The change is marked as drained."""
    before, status = rig.names.stored(ino), (rig.source_path / "f").stat()
    rig.names.refresh(ino, attributes_of(status, ino, before.parent, status.st_mode))
    rig.read_side.renewals.renewed(ino, before.identity, identity_of(status))
    node = rig.names.node(ino)
    assert node is not None
    node.undrained = 0


async def test_a_copy_stays_while_the_drain_changes_attributes(rig: Rig) -> None:
    ino = rig.copy("f")
    change(rig, ino)
    (rig.source_path / "f").chmod(0o640)
    await compare(rig)
    assert rig.residency.tier_of(ino) == 1
    mark(rig, ino)
    await compare(rig)
    assert rig.residency.tier_of(ino) == 1 and rig.metrics.changes == 0


async def test_a_change_by_others_meanwhile_is_noticed_behind_the_drain(rig: Rig) -> None:
    ino = rig.copy("f")
    change(rig, ino)
    # The version differs by the time of change alone.
    (rig.source_path / "f").write_bytes(b"o" * 1000)
    os.utime(rig.source_path / "f", ns=(10**18, 10**18))
    await compare(rig)
    node = rig.names.node(ino)
    assert node is not None
    node.undrained = 0
    await compare(rig)
    assert rig.residency.tier_of(ino) == 0


async def test_other_bytes_are_noticed_before_the_drain(rig: Rig) -> None:
    ino = rig.copy("f")
    change(rig, ino)
    (rig.source_path / "f").write_bytes(b"of others")
    await compare(rig)
    assert rig.residency.tier_of(ino) == 0


async def test_a_change_by_others_that_the_drain_finds_is_noticed(rig: Rig) -> None:
    """The drain then returns the identity of the bytes that the mount knows."""
    ino = rig.copy("f")
    known = rig.names.stored(ino).identity
    await compare(rig, of_doubts=True)
    change(rig, ino)
    (rig.source_path / "f").write_bytes(b"o" * 1000)
    (rig.source_path / "f").chmod(0o640)
    rig.read_side.renewals.renewed(ino, known, known)
    await compare(rig, of_doubts=True)
    assert rig.residency.tier_of(ino) == 0 and rig.metrics.changes == 1
    assert await rig.content("f") == b"o" * 1000


@pytest.mark.promise(27)
@pytest.mark.fault("M5")
async def test_a_directory_that_changed_again_in_the_second_of_the_scan_is_reported(
    tmp_path: Path,
) -> None:
    with disks.coarse(tmp_path) as disk:
        source = disk / "source"
        source.mkdir()
        while True:
            (source / "f").write_bytes(b"x")
            rig = Rig(tmp_path / f"rig-{time.monotonic_ns()}", source)
            before = source.stat()
            (source / "new").touch()
            after = source.stat()
            if (before.st_mtime, before.st_ctime) == (after.st_mtime, after.st_ctime):
                break
            rig.close()
            (source / "new").unlink()
        watch = watch_of(rig, just_built=False)
        await watch.run()
        assert watch.stale and watch.changed_directories == 1
        rig.close()
