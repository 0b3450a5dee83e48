"""Small files that come to the source together: few hops to a thread, few waits for disks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import trio.testing

from monarch.threads import Threads
from monarch.writeback import staging
from tests.writeback.rig import World, draining

Clock = trio.testing.MockClock
COUNT = 120


class Calls:
    """What was done, in order: ``hop``, ``hurry`` and ``sync`` of files that are staged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.threads: list[tuple[int, str]] = []
        run, hurry, fsync = Threads.run, staging.hurry, os.fsync

        async def counted(threads: Threads, *args: Any) -> Any:
            self.made.append("hop")
            return await run(threads, *args)

        def hurried(fd: int) -> None:
            self.made.append("hurry")
            self.threads.append((threading.get_ident(), "hurry"))
            hurry(fd)

        def synced(fd: int) -> None:
            if b".part" in os.readlink(b"/proc/self/fd/%d" % fd):
                self.made.append("sync")
                self.threads.append((threading.get_ident(), "sync"))
            fsync(fd)

        monkeypatch.setattr(Threads, "run", counted)
        monkeypatch.setattr(staging, "hurry", hurried)
        monkeypatch.setattr(os, "fsync", synced)

    def by_thread(self) -> list[list[tuple[int, str]]]:
        """What each thread did to staged files, in order."""
        idents = {ident for ident, _ in self.threads}
        return [[each for each in self.threads if each[0] == ident] for ident in idents]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def write_all(world: World, *, synced: bool = False) -> None:
    for number in range(COUNT):
        world.write(b"new%d" % number, b"%d" % number * 999, synced=synced)


@pytest.mark.parametrize("synced", [False, True])
async def test_many_small_files_take_few_hops_and_all_of_them_come(
    world: World, clock: Clock, calls: Calls, synced: bool
) -> None:
    write_all(world, synced=synced)
    async with draining(world, world.kill()) as drain:
        await drain.wait(world.last_seq)
        told = drain.backlog()
    world.check_all_is_there()
    assert (told.ops, told.drained_files, told.failures) == (0, COUNT, 0)
    assert calls.made.count("hop") < COUNT / 2, "not several for each file"
    assert calls.made.count("sync") == COUNT, "each is on the disk before it gets its name"


async def test_the_disk_has_the_bytes_of_many_files_before_it_is_waited_for(
    world: World, clock: Clock, calls: Calls
) -> None:
    write_all(world, synced=True)
    async with draining(world, world.kill(), workers=1) as drain:
        await drain.wait(world.last_seq)
    # Of each thread: a file may be brought in its turn beside a lot.
    done = ["".join(what[0] for _, what in each) for each in calls.by_thread()]
    assert any("h" * 32 + "s" * 32 in what for what in done), "no wait in between"


async def test_a_lot_goes_on_without_those_of_which_the_object_is_gone_or_was_written_again(
    world: World, clock: Clock, calls: Calls
) -> None:
    write_all(world, synced=True)
    replay = world.kill()
    gone, written = world.tree[b"new7"], world.tree[b"new9"]
    world.objects.remove(gone.object)
    world.store(written, b"newer, and not recorded")
    async with draining(world, replay, catch_up=False) as drain:
        await drain.come_to_rest()
        told = drain.backlog()
    assert told.lost == (b"new7",)
    names = {path.name for path in world.source.glob("new*")}
    assert names == {f"new{number}" for number in range(COUNT)} - {"new7"}
    assert (world.source / "new9").read_bytes() == written.content


async def test_what_cannot_be_staged_ahead_is_staged_in_its_turn(
    world: World, clock: Clock, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    write_all(world)
    # Not a directory: no file of it can be staged before the source is as it was.
    world.mkdir(b"later")
    for number in range(COUNT):
        world.write(b"later/%d" % number, b"x" * number)
    async with draining(world, world.kill()) as drain:
        await drain.wait(world.last_seq)
    world.check_all_is_there()
