"""Opens below the kernel: where a file is bound, what the source is asked, and what is copied."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import pytest
import trio

from monarch.errors import Refused, SourceChanged, SourceError
from monarch.types import Ino
from monarch.vfs.binding import Binding
from monarch.vfs.readers import Readers
from tests.vfs.conftest import FILES, Rigs
from tests.vfs.rig import READER, FakeFastPath, Rig


async def test_a_small_file_is_fetched_once_for_all_that_open_it(rig: Rig) -> None:
    rig.threads.gate = trio.Event()
    ino = rig.ino("small")
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(rig.open, "small")
        await trio.testing.wait_all_tasks_blocked()
        assert rig.read_side.bindings.is_open(ino) and rig.read_side.bindings.get(ino) is None
        rig.threads.gate.set()
    assert rig.metrics.source_opens[0] == 1
    assert rig.caches.stored == {ino: FILES["small"]}
    assert bytes(rig.engine.flights[ino].content or b"") == FILES["small"]
    assert rig.read_side.bindings.open_files == 3
    assert rig.read_side.bindings.held_bytes == 1000
    assert await rig.read(ino, 990) == b"s" * 10
    for _ in range(3):
        rig.filesystem.release(ino)
    assert not rig.read_side.bindings.is_open(ino) and rig.read_side.bindings.held_bytes == 0


async def test_the_datapath_does_not_keep_what_the_last_release_has_closed(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    ino = await rig.open("large")
    await rig.open("large")
    rig.filesystem.release(ino)
    assert ino in fast.bound
    # Another open may wait in the datapath, which must not give it this descriptor.
    rig.filesystem.release(ino)
    assert ino not in fast.bound


async def test_the_next_open_begins_when_the_first_one_fails(rig: Rig) -> None:
    rig.threads.gate = trio.Event()
    target = rig.source_path / "small"
    target.rename(target.with_name("away"))
    errors = []

    async def first() -> None:
        with pytest.raises(SourceError) as failed:
            await rig.open("small")
        errors.append(failed.value.errno)
        target.with_name("away").rename(target)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(rig.content, "small")
        await trio.testing.wait_all_tasks_blocked()
        rig.threads.gate.set()
    assert errors == [errno.ENOENT]


async def test_a_large_file_is_read_at_the_source_and_copied_behind_the_reader(rig: Rig) -> None:
    ino = await rig.open("large")
    flight = rig.engine.flights[ino]
    assert flight.file is not None and flight.content is None
    assert await rig.read(ino, 50_000, 10) == b"l" * 10
    assert flight.file.read_up_to == 50_010
    rig.filesystem.release(ino)
    rig.engine.arrive(ino)
    assert rig.residency.tier_of(ino) == 1


async def test_an_open_of_a_copy_under_way_shares_its_bytes(rig: Rig) -> None:
    assert await rig.content("small") == FILES["small"]
    calls = rig.threads.calls
    assert await rig.content("small") == FILES["small"]
    assert rig.threads.calls == calls


@pytest.mark.parametrize("sends_opens", [True, False])
async def test_an_open_waits_for_a_fetch_ahead_that_has_begun(
    rigs: Rigs, sends_opens: bool
) -> None:
    rig = rigs(sends_opens=sends_opens)
    ino = rig.ino("small")
    identity = rig.names.attributes(ino).identity
    arrival = rig.engine.fetch_ahead(ino, 1000, identity, began=True)
    got = []

    async def reader() -> None:
        got.append(await rig.content("small") if sends_opens else await rig.read(ino))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        assert not got
        arrival.content = FILES["small"]
        arrival.done.set()
    assert got == [FILES["small"]]
    assert rig.metrics.source_opens[0] == 0 and rig.threads.calls == 0
    rig.engine.fail(ino)


async def _replaced(rig: Rig, ino: Ino, content: bytes) -> None:
    """Another program replaces a file at the source, and the daemon notices it."""
    target = rig.source_path / rig.names.path(ino).decode()
    mode = target.stat().st_mode & 0o7777
    rig.write(target.name, content)
    target.chmod(mode)
    await rig.read_side.revalidation.look_again(ino)


async def test_an_open_that_waits_for_a_fetch_ahead_finds_a_change_that_is_noticed_meanwhile(
    rig: Rig,
) -> None:
    """Nothing would show later opens that its bytes, and their pages in the kernel, are old."""
    ino = rig.ino("small")
    identity = rig.names.attributes(ino).identity
    arrival = rig.engine.fetch_ahead(ino, 1000, identity, began=True)
    got = []

    async def reader() -> None:
        got.append(await rig.content("small"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader)
        await trio.testing.wait_all_tasks_blocked()
        await _replaced(rig, ino, b"n" * 1000)
        arrival.content = FILES["small"]
        arrival.done.set()
    assert got == [b"n" * 1000]
    rig.engine.fail(ino)


@pytest.mark.parametrize("name", ["small", "large"])
async def test_an_open_finds_a_change_that_is_noticed_when_its_call_has_just_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its thread has the old version, and another task runs before it."""
    ino, run, calls = rig.ino(name), rig.threads.run, 0
    new = b"n" * len(FILES[name])

    async def late(*call: Any) -> Any:
        nonlocal calls
        calls += 1
        is_first = calls == 1
        result: Any = await run(*call)
        if is_first:
            await _replaced(rig, ino, new)
        return result

    monkeypatch.setattr(rig.threads, "run", late)
    assert await rig.content(name) == new
    assert not rig.residency.is_changed(ino)


async def test_an_open_takes_over_a_fetch_ahead_that_has_not_begun(rig: Rig) -> None:
    ino = rig.ino("small")
    rig.engine.fetch_ahead(ino, 1000, rig.names.attributes(ino).identity, began=False)
    assert await rig.content("small") == FILES["small"]
    assert rig.metrics.source_opens[0] == 1
    # Its bytes become the copy.
    rig.engine.arrive(ino)
    assert rig.residency.tier_of(ino) == 1


async def test_an_open_asks_the_source_when_a_fetch_ahead_has_failed(rig: Rig) -> None:
    ino = rig.ino("small")
    arrival = rig.engine.fetch_ahead(ino, 1000, rig.names.attributes(ino).identity, began=True)
    arrival.done.set()
    assert await rig.content("small") == FILES["small"]
    assert rig.metrics.source_opens[0] == 1
    rig.engine.fail(ino)


async def test_an_open_of_a_large_copy_under_way_shares_its_file(rig: Rig) -> None:
    ino = await rig.open("large")
    rig.filesystem.release(ino)
    opens = rig.metrics.source_opens[0]
    assert await rig.content("large") == FILES["large"]
    assert rig.metrics.source_opens[0] == opens
    # The version of the shared file is compared: another one is opened anew.
    rig.write("large", b"m" * 100_000)
    assert await rig.content("large") == b"m" * 100_000


async def test_a_copy_is_read_without_the_source(rig: Rig) -> None:
    ino = rig.copy("small")
    calls = rig.threads.calls
    assert await rig.content("small") == FILES["small"]
    assert rig.threads.calls == calls and rig.metrics.opens == [0, 1]
    assert rig.residency.tier_of(ino) == 1


async def test_a_copy_that_cannot_be_opened_is_a_miss(rig: Rig) -> None:
    ino = rig.copy("small")
    rig.copy_path(ino).unlink()
    assert await rig.content("small") == FILES["small"]
    assert rig.metrics.errors["copy-ENOENT"] == 1
    assert rig.tier_calls.unreadable == [(1, errno.ENOENT)]
    assert rig.engine.removed_copies == [ino] and ino in rig.engine.flights


@pytest.mark.parametrize("state", ["bypassed", "hanging"])
async def test_a_copy_in_a_tier_that_does_not_answer_is_kept_and_not_used(
    rig: Rig, state: str
) -> None:
    ino = rig.copy("small")
    getattr(rig.tier_calls, state).add(1)
    assert await rig.content("small") == FILES["small"]
    assert rig.residency.tier_of(ino) == 1 and rig.tier_calls.unreadable == []


async def test_a_copy_that_is_evicted_while_it_is_opened_is_no_failure(rig: Rig) -> None:
    ino = rig.copy("small")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.content, "small")
        await trio.sleep(0)
        rig.read_side.promotions.evict(ino)
    assert rig.tier_calls.unreadable == [] and not rig.metrics.errors


async def test_a_file_that_has_changed_is_opened_in_its_new_version(rig: Rig) -> None:
    ino = rig.copy("small")
    rig.write("small", b"new")
    rig.read_side.promotions.evict(ino)
    # The kernel has checked the old mode.
    os.chmod(rig.source_path / "small", 0o600)
    with pytest.raises(SourceError) as refused:
        await rig.open("small")
    assert refused.value.errno == errno.ESTALE
    assert await rig.content("small") == b"new"
    assert rig.names.attributes(ino).size == 3 and ino in rig.caches.attributes
    assert rig.ledger.used(1) == 0


async def test_a_file_that_changes_all_the_time_is_not_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = rig.source.fetch
    versions = iter(range(100))

    def changing(path: bytes, identity: object) -> object:
        rig.write("small", b"x" * next(versions))
        return fetch(path, identity)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.source, "fetch", changing)
    with pytest.raises(SourceError) as failed:
        await rig.open("small")
    assert failed.value.errno == errno.ESTALE
    assert not rig.read_side.bindings.is_open(rig.ino("small"))


async def test_space_is_given_back_when_the_source_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: bytes, identity: object) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(rig.source, "fetch", failing)
    with pytest.raises(SourceError) as failed:
        await rig.open("small")
    assert failed.value.errno == errno.EIO
    assert rig.engine.flights == {} and rig.ledger.reserved(1) == 0


async def test_only_a_mount_that_can_be_written_opens_to_write(rig: Rig) -> None:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        with pytest.raises(Refused) as refused:
            await rig.filesystem.open(rig.ino("small"), flags, READER)
        assert refused.value.errno == errno.EROFS


async def test_pages_are_kept_unless_the_file_has_changed(rig: Rig) -> None:
    ino = rig.ino("small")

    async def keeps() -> bool:
        kept = await rig.filesystem.open(ino, os.O_RDONLY, READER)
        rig.filesystem.release(ino)
        return kept

    assert await keeps()
    rig.residency.mark_changed(ino)
    rig.caches.stored.clear()
    assert [await keeps(), await keeps()] == [False, True]
    rig.residency.mark_spoiled(ino)
    assert [await keeps(), await keeps()] == [False, True]


async def test_the_datapath_reads_from_the_descriptor_of_a_binding(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    small, large = rig.copy("small"), rig.ino("large")
    await rig.open("small")
    await rig.open("large")
    assert fast.bound == {small: (1, 1000, 101), large: (0, 100_000, 0)}
    # The number belongs to the datapath now, and is not given back by a second open.
    await rig.open("small")
    assert fast.bound[small] == (1, 1000, 0) and fast.unregistered == []


async def test_a_number_for_the_kernel_that_is_not_used_is_given_back(rigs: Rigs) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    ino = rig.copy("small")
    binding = await rig.read_side.copies.bind(rig.names.attributes(ino))
    assert binding is not None
    binding.close()
    assert fast.unregistered == [101]


async def test_a_file_that_was_removed_is_checked_at_the_source_when_it_is_opened(rig: Rig) -> None:
    ino = rig.ino("small")
    rig.names.forget(ino)
    assert rig.names.is_gone(ino)
    await rig.filesystem.open(ino, os.O_RDONLY, READER)
    assert not rig.names.is_gone(ino) and Ino(1) in rig.caches.listings


@pytest.mark.promise(74)
@pytest.mark.parametrize("reader", ["daemon", "kernel"])
async def test_a_writer_waits_a_second_for_the_release_of_a_file_that_was_closed(
    reader: str, rigs: Rigs, autojump_clock: trio.testing.MockClock
) -> None:
    fast = FakeFastPath()
    rig = rigs(fast=fast)
    ino = rig.ino("large")

    async def opened() -> None:
        if reader == "daemon":
            await rig.open("large")
        else:
            fast.passed.add(ino)

    def released() -> None:
        if reader == "daemon":
            rig.filesystem.release(ino)
        else:
            fast.passed.remove(ino)

    await opened()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.filesystem.require_unread, ino)
        await trio.sleep(0.9)
        released()
    await opened()
    with pytest.raises(Refused) as refused:
        await rig.filesystem.require_unread(ino)
    assert refused.value.errno == errno.ETXTBSY
    released()


async def test_an_open_is_repeated_while_the_drain_changes_attributes_of_the_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is another version. A file that others change all the time is given up."""
    opened = Readers._bind_source
    node = rig.names.change(rig.ino("small"), mode=0o640, now_ns=time.time_ns())
    tries = 0

    async def changed(self: Readers, *arguments: Any, **more: Any) -> Binding:
        nonlocal tries
        tries += 1
        if tries <= 10:
            raise SourceChanged("by the drain")
        return await opened(self, *arguments, **more)

    monkeypatch.setattr(Readers, "_bind_source", changed)
    with pytest.raises(SourceError) as failed:
        await rig.content("small")
    assert (failed.value.errno, tries) == (errno.ESTALE, 3)
    tries, node.undrained = 0, 1
    assert await rig.content("small") == FILES["small"]
    assert tries == 11
