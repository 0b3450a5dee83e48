"""Copies of files whose attributes the drain has changed at the source."""

from __future__ import annotations

import os
import time

import pytest
import trio

from monarch.tiers.contents import seal
from monarch.tiers.source import identity_of
from monarch.types import Identity, Ino, attributes_of
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import FakeFastPath, Rig

pytestmark = pytest.mark.promise(172)


def changed(rig: Rig, path: str) -> tuple[Ino, Identity, Identity]:
    """A file whose mode was changed on the mount, before and after it is changed at the source."""
    ino = rig.ino(path)
    rig.names.change(ino, mode=0o640, now_ns=time.time_ns())
    before = rig.names.stored(ino)
    (rig.source_path / path).chmod(0o640)
    now = attributes_of((rig.source_path / path).stat(), ino, before.parent, before.mode)
    assert before.identity != now.identity
    return ino, before.identity, now.identity


def renewed(rig: Rig, path: str) -> Ino:
    """The same, and the mount knows of it."""
    ino, before, now = changed(rig, path)
    status = (rig.source_path / path).stat()
    rig.names.refresh(ino, attributes_of(status, ino, rig.names.stored(ino).parent, 0o100640))
    rig.read_side.renewals.renewed(ino, before, now)
    return ino


async def sealed(rig: Rig) -> None:
    with trio.move_on_after(0.05):
        await rig.read_side.renewals.run()


def is_sealed(rig: Rig, ino: Ino) -> bool:
    status = (rig.source_path / rig.names.path(ino).decode()).stat()
    return rig.copy_path(ino).stat().st_mtime_ns == seal(ino, identity_of(status))


@pytest.mark.parametrize("path", ["small", "large"])
async def test_a_copy_is_read_before_and_after_the_drain(rig: Rig, path: str) -> None:
    ino = rig.copy(path)
    rig.names.change(ino, mode=0o640, now_ns=time.time_ns())
    assert await rig.content(path) == FILES[path]
    renewed(rig, path)
    # Its seal is broken, so it is compared with its digest.
    assert await rig.content(path) == FILES[path] and is_sealed(rig, ino)
    assert rig.residency.tier_of(ino) == 1 and sum(rig.metrics.source_opens) == 0
    assert rig.metrics.changes == 0 and rig.names.attributes(ino).mode & 0o777 == 0o640


async def test_the_seal_of_a_copy_is_renewed_once_for_several_changes(rig: Rig) -> None:
    ino = rig.copy("small")
    for mode in (0o600, 0o604):
        rig.names.change(ino, mode=mode, now_ns=time.time_ns())
        before = rig.names.stored(ino).identity
        os.chmod(rig.source_path / "small", mode)
        status = (rig.source_path / "small").stat()
        rig.names.refresh(ino, attributes_of(status, ino, Ino(1), status.st_mode))
        rig.read_side.renewals.renewed(ino, before, identity_of(status))
    await sealed(rig)
    assert is_sealed(rig, ino)
    record = rig.records.get(ino)
    assert record is not None and record.identity == identity_of(status)


async def test_the_copy_of_another_version_is_dropped(rig: Rig) -> None:
    ino = rig.copy("small")
    _, before, now = changed(rig, "small")
    other = Identity(before.size, before.mtime_ns + 1, before.ctime_ns, before.source_ino)
    rig.read_side.renewals.renewed(ino, other, now)
    assert rig.residency.tier_of(ino) == 0


async def test_a_broken_seal_is_not_renewed(rig: Rig) -> None:
    ino = rig.copy("small")
    os.utime(rig.copy_path(ino), ns=(0, 0))
    renewed(rig, "small")
    await sealed(rig)
    assert not is_sealed(rig, ino)


async def test_a_version_that_is_to_be_checked_is_checked_as_the_renewed_one(rig: Rig) -> None:
    ino, before, now = changed(rig, "small")
    rig.doubts.fetched(ino, before, since_ns=0)
    assert not rig.doubts.is_empty()
    rig.read_side.renewals.renewed(ino, before, now)
    ((found, doubt),) = rig.doubts.due(1 << 62)
    assert (found, doubt.identity) == (ino, now)


async def test_a_cold_file_whose_mode_was_changed_is_copied_as_any_other(rig: Rig) -> None:
    ino = rig.ino("small")
    rig.names.change(ino, mode=0o640, mtime_ns=5, now_ns=time.time_ns())
    assert await rig.content("small") == FILES["small"]
    rig.engine.arrive(ino)
    assert rig.residency.tier_of(ino) == 1
    assert await rig.content("small") == FILES["small"]
    assert sum(rig.metrics.source_opens) == 1 and rig.names.attributes(ino).mtime_ns == 5


async def test_readers_keep_the_version_that_they_have_open(rigs: Rigs) -> None:
    rig = rigs(fast=FakeFastPath())
    ino = rig.copy("small")
    rig.names.change(ino, mode=0o640, now_ns=time.time_ns()).undrained = 1
    await rig.open("small")
    rig.write("small", b"new", in_place=True)
    await rig.read_side.revalidation.look_again(ino)
    assert rig.names.attributes(ino).size == 1000
    assert await rig.read(ino) == FILES["small"]
    rig.filesystem.release(ino)
    assert rig.residency.tier_of(ino) == 0
    assert await rig.content("small") == b"new"
