"""What a file system does when the source differs from the snapshot."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable

import pytest
import trio

from monarch.errors import SourceError
from monarch.types import ROOT_INO
from tests.conftest import Tree
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import READER, FakeFastPath, Rig


async def number(call: Awaitable[object]) -> int | None:
    with pytest.raises(SourceError) as failed:
        await call
    return failed.value.errno


async def test_a_file_that_did_not_change_keeps_its_copy(rig: Rig) -> None:
    ino = rig.copy("small")
    await rig.read_side.revalidation.look_again(ino)
    assert rig.residency.tier_of(ino) == 1 and rig.caches.attributes == []


async def test_a_file_that_changed_is_refreshed_and_loses_its_copy(rig: Rig) -> None:
    ino = rig.copy("small")
    rig.write("small", b"new", in_place=True)
    await rig.read_side.revalidation.look_again(ino)
    assert rig.names.attributes(ino).size == 3
    assert rig.residency.tier_of(ino) == 0 and rig.ledger.used(1) == 0
    assert rig.caches.attributes == [ino] and rig.metrics.changes == 1


@pytest.mark.parametrize("others", [["twin"], ["twin", "triplet"]], ids=["one left", "two left"])
async def test_a_name_that_the_drain_has_removed_is_no_change_of_the_file(
    rigs: Rigs, tree: Tree, others: list[str]
) -> None:
    """The number of names and the time of change differ, the bytes do not."""
    source = tree(FILES)
    for name in others:
        (source / name).hardlink_to(source / "small")
    rig = rigs()
    ino = rig.ino("small")
    rig.names.unlink(ROOT_INO, b"twin", now_ns=time.time_ns())
    (rig.source_path / "twin").unlink()
    await rig.read_side.revalidation.look_again(ino)
    assert rig.metrics.changes == 0
    assert rig.names.stored(ino).ctime_ns == (rig.source_path / "small").stat().st_ctime_ns
    # A change of its bytes is noticed.
    rig.write("small", b"new", in_place=True)
    await rig.read_side.revalidation.look_again(ino)
    assert rig.metrics.changes == 1


async def test_readers_keep_the_version_that_they_have_open(rig: Rig) -> None:
    ino = rig.copy("small")
    await rig.open("small")
    rig.write("small", b"new", in_place=True)
    await rig.read_side.revalidation.look_again(ino)
    assert rig.names.attributes(ino).size == 1000
    assert await rig.read(ino) == FILES["small"]
    rig.filesystem.release(ino)
    assert rig.residency.tier_of(ino) == 0 and rig.residency.is_spoiled(ino)
    assert await rig.content("small") == b"new"


async def test_a_copy_that_the_datapath_has_open_is_kept_until_its_last_release(
    rigs: Rigs,
) -> None:
    rig = rigs(fast=FakeFastPath())
    assert rig.fast is not None
    ino = rig.copy("small")
    rig.fast.open.add(ino)
    rig.write("small", b"new", in_place=True)
    await rig.read_side.revalidation.look_again(ino)
    assert rig.fast.outdated == [ino] and rig.residency.tier_of(ino) == 1
    rig.fast.events.append((ino, 0xFF, None, 0, 0, 0))
    rig.filesystem.readers.catch_up()
    assert rig.residency.tier_of(ino) == 0


async def test_a_file_that_is_read_at_the_source_changes_under_its_readers(rig: Rig) -> None:
    ino = await rig.open("large")
    rig.write("large", b"n" * 100_000, in_place=True)
    # The second open finds it; pages of the first version are dropped.
    await rig.open("large")
    assert rig.caches.attributes == [ino]
    assert await rig.read(ino, 0, 10) == b"n" * 10
    for _ in range(2):
        rig.filesystem.release(ino)


async def test_no_open_of_a_changed_file_keeps_pages_before_another_has_dropped_them(
    rig: Rig,
) -> None:
    ino = await rig.open("large")
    rig.filesystem.release(ino)
    rig.write("large", b"n" * 100_000)
    # The answers may reach the callers in any order.
    kept: list[bool] = []

    async def open_it() -> None:
        kept.append(await rig.filesystem.open(ino, os.O_RDONLY, READER))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(open_it)
    assert kept == [False] * 3
    for _ in range(3):
        rig.filesystem.release(ino)
    # All pages are those of this version now.
    await open_it()
    assert kept[3]
    rig.filesystem.release(ino)


async def test_an_open_that_was_given_up_has_not_dropped_the_pages_of_a_changed_file(
    rigs: Rigs,
) -> None:
    rig = rigs(fast=FakeFastPath())
    assert rig.fast is not None
    ino = await rig.open("large")
    rig.filesystem.release(ino)
    rig.write("large", b"n" * 100_000)
    await rig.open("large")
    rig.fast.events.append((ino, 0xFD, None, 0, 0, 0))
    rig.filesystem.readers.catch_up()
    assert not await rig.filesystem.open(ino, os.O_RDONLY, READER)
    rig.filesystem.release(ino)


async def test_a_file_that_is_gone_is_forgotten_and_found_again(rig: Rig) -> None:
    ino = rig.copy("small")
    target = rig.source_path / "small"
    target.rename(rig.root / "away")
    assert await number(rig.read_side.revalidation.look_again(ino)) == errno.ENOENT
    assert rig.names.is_gone(ino) and rig.residency.tier_of(ino) == 0
    assert rig.caches.listings == [ROOT_INO]
    assert await number(rig.filesystem.attributes(ino)) == errno.ENOENT
    (rig.root / "away").rename(target)
    assert (await rig.filesystem.attributes(ino)).size == 1000
    assert not rig.names.is_gone(ino)


async def test_a_file_that_is_denied_without_a_change_above_it_is_not_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = rig.copy("small")
    status = rig.source.status

    def denying(path: bytes) -> os.stat_result:
        if path == b"small":
            raise OSError(errno.ENOENT, "lost a server")
        return status(path)

    monkeypatch.setattr(rig.source, "status", denying)
    assert await number(rig.read_side.revalidation.look_again(ino)) == errno.EIO
    assert not rig.names.is_gone(ino) and rig.residency.tier_of(ino) == 1


async def test_a_directory_in_the_place_of_a_file_is_not_the_file(rig: Rig) -> None:
    ino = rig.ino("small")
    (rig.source_path / "small").unlink()
    (rig.source_path / "small").mkdir()
    assert await number(rig.read_side.revalidation.look_again(ino)) == errno.ENOENT


async def test_another_mode_is_refused_once_so_that_the_kernel_checks_again(rig: Rig) -> None:
    ino = rig.ino("small")
    os.chmod(rig.source_path / "small", 0o640)
    assert await number(rig.read_side.revalidation.look_again(ino)) == errno.ESTALE
    assert rig.names.attributes(ino).mode & 0o777 == 0o640
    await rig.read_side.revalidation.look_again(ino)


async def test_bytes_that_may_be_old_are_not_served_to_new_readers(rig: Rig) -> None:
    ino = rig.copy("small")
    await rig.open("small")
    rig.read_side.revalidation.distrust(ino, differs=True)
    assert rig.residency.tier_of(ino) == 0 and rig.residency.is_wanted(ino)
    # Otherwise an idle engine would not make the copy again.
    assert rig.engine.wake_ups == 1
    # A process that opens it meanwhile reads what the others read.
    assert await rig.content("small") == FILES["small"]
    rig.filesystem.release(ino)
    assert rig.metrics.changes == 1 and rig.residency.is_spoiled(ino)


async def test_without_opens_old_pages_are_dropped_and_readers_fail(rigs: Rigs) -> None:
    rig = rigs(sends_opens=False)
    ino = rig.ino("small")
    await rig.read(ino)
    rig.read_side.revalidation.distrust(ino, differs=False)
    assert rig.caches.dropped == []
    rig.read_side.revalidation.distrust(ino, differs=True)
    assert rig.caches.dropped == [ino]
    assert await number(rig.filesystem.read(ino, 0, 10)) == errno.ESTALE


async def test_a_file_with_two_names_is_found_under_the_other(rigs: Rigs, rig: Rig) -> None:
    os.link(rig.source_path / "small", rig.source_path / "d/second")
    linked = rigs()
    ino = linked.ino("small")
    paths = {os.fsencode("small"), b"d/second"} - {linked.names.path(ino)}
    (linked.source_path / os.fsdecode(linked.names.path(ino))).unlink()
    await linked.read_side.revalidation.look_again(ino)
    assert {linked.names.path(ino)} == paths
