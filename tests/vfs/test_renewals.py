"""Copies of files whose attributes the drain has changed at the source."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.daemon.fsck import OnlineFsck, _FsckRun
from monarch.daemon.scrub import Scrub
from monarch.tiers.contents import copy_name, seal
from monarch.tiers.source import identity_of
from monarch.tiers.verify import SEAL, Suspect
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


def check_quiet(rig: Rig, *, opens: int = 0) -> None:
    """No copy was dropped, and no file counts as changed by others."""
    assert rig.tier_calls.unreadable == [] and rig.metrics.changes == 0
    assert sum(rig.metrics.source_opens) == opens


async def sealed(rig: Rig) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.read_side.renewals.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


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


@pytest.mark.parametrize("call", [1, 2, 3], ids=["open", "compare", "open again"])
async def test_an_open_that_the_drain_overtakes_keeps_the_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The version is renewed between the moment at which an open knows it and its call of the
    tier."""
    ino, calls, ask = rig.copy("small"), 0, rig.tier_calls.ask
    if call > 1:
        # Its seal is broken, so it is compared with its digest.
        os.utime(rig.copy_path(ino), ns=(0, 0))

    async def overtaken(number: int, function: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            before = rig.names.stored(ino).identity
            renewed(rig, "small")
            rig.tier.renew_seal(ino, before, rig.names.stored(ino).identity)
        return await ask(number, function, *arguments, **more)

    monkeypatch.setattr(rig.tier_calls, "ask", overtaken)
    assert await rig.content("small") == FILES["small"]
    assert calls > call and is_sealed(rig, ino) and rig.residency.tier_of(ino) == 1
    check_quiet(rig)


async def test_a_read_without_an_open_that_the_drain_overtakes_keeps_the_copy(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(sends_opens=False)
    ino, ask = rig.copy("small"), rig.tier_calls.ask
    assert await rig.read(ino) == FILES["small"]

    async def overtaken(number: int, function: Any, *arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(rig.tier_calls, "ask", ask)
        before = rig.names.stored(ino).identity
        renewed(rig, "small")
        rig.tier.renew_seal(ino, before, rig.names.stored(ino).identity)
        return await ask(number, function, *arguments, **more)

    monkeypatch.setattr(rig.tier_calls, "ask", overtaken)
    assert await rig.read(ino) == FILES["small"]
    assert rig.names.attributes(ino).mode & 0o777 == 0o640 and rig.residency.tier_of(ino) == 1
    check_quiet(rig)


async def test_the_scrub_keeps_the_seal_of_a_copy_that_is_renewed_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino, run = rig.copy("small"), rig.threads.run

    async def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(rig.threads, "run", run)
        before = rig.names.stored(ino).identity
        renewed(rig, "small")
        rig.tier.renew_seal(ino, before, rig.names.stored(ino).identity)
        return await run(*arguments)

    scrub = Scrub(
        tiers=[rig.tier],
        is_read=rig.tier_calls.is_read,
        records=rig.records,
        residency=rig.residency,
        copies=rig.read_side.copies,
        parts=rig.read_side.parts,
        threads=rig.threads,
        bandwidth=1 << 40,
    )
    monkeypatch.setattr(rig.threads, "run", overtaken)
    await scrub.go_round(Ino(1))
    assert scrub.report().rounds == 1 and is_sealed(rig, ino)
    check_quiet(rig)


@pytest.mark.parametrize("is_touched", [False, True], ids=["renewed", "touched"])
async def test_fsck_waits_for_the_seal_of_a_copy_that_is_renewed(
    rig: Rig, is_touched: bool, autojump_clock: trio.testing.MockClock
) -> None:
    ino = rig.copy("small")
    if is_touched:
        os.utime(rig.copy_path(ino), ns=(0, 0))
    renewed(rig, "small")
    of = SimpleNamespace(
        hierarchy=SimpleNamespace(records=rig.records),
        names=rig.names,
        residency=rig.residency,
        renewals=rig.read_side.renewals,
        threads=rig.threads,
    )
    check = _FsckRun(cast(OnlineFsck, of), False, False, _no_report)
    suspect = Suspect(SEAL, copy_name(ino), "it was touched", ino, rig.records.get(ino))
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(1)
            await rig.read_side.renewals.run()

        nursery.start_soon(later)
        assert await check._holds(rig.tier, suspect) is is_touched
        nursery.cancel_scope.cancel()
    assert is_sealed(rig, ino) is not is_touched


async def _no_report(progress: object) -> None: ...


async def test_an_open_that_a_change_by_others_overtakes_reads_the_new_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino, ask = rig.copy("small"), rig.tier_calls.ask
    rig.names.change(ino, mode=0o640, now_ns=time.time_ns()).undrained = 1

    async def overtaken(number: int, function: Any, *arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(rig.tier_calls, "ask", ask)
        rig.write("small", b"of others", in_place=True)
        await rig.read_side.revalidation.look_again(ino)
        return await ask(number, function, *arguments, **more)

    monkeypatch.setattr(rig.tier_calls, "ask", overtaken)
    assert await rig.content("small") == b"of others"
    assert rig.metrics.changes == 1


async def test_a_change_by_the_drain_is_awaited_before_a_file_is_taken_for_changed(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    """An open without a copy finds the change at the source before the mount has it recorded."""
    ino, before, now = changed(rig, "small")
    node = rig.names.node(ino)
    assert node is not None
    node.undrained = 1
    async with trio.open_nursery() as nursery:

        async def opened() -> None:
            assert await rig.content("small") == FILES["small"]

        nursery.start_soon(opened)
        await trio.sleep(0.5)
        parent = rig.names.stored(ino).parent
        status = (rig.source_path / "small").stat()
        rig.names.refresh(ino, attributes_of(status, ino, parent, 0o100640))
        rig.read_side.renewals.renewed(ino, before, now)
        node.undrained = 0
    check_quiet(rig, opens=2)


async def test_a_change_of_mode_by_others_is_noticed_while_changes_wait(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    """The drain may be at rest for hours."""
    ino, _, now = changed(rig, "small")
    node = rig.names.node(ino)
    assert node is not None
    node.undrained = 1
    assert await rig.content("small") == FILES["small"]
    assert rig.metrics.changes == 1 and rig.names.stored(ino).identity == now


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
