"""The order in which repeatedly written files reach the source, and which files wait for it."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import trio
import trio.testing

from monarch.posix import failpoints
from monarch.text import MiB
from tests.equipment.slowfs import SlowSource
from tests.writeback.rig import Killed, World, draining, read_tree

Clock = trio.testing.MockClock


def shown_at_each_step(world: World, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """What the source has of files at each step of the drain from now on."""
    shown: list[dict[str, bytes]] = []

    def reached(name: str) -> None:
        if name.startswith("drain-"):
            tree = read_tree(world.source)
            shown.append({os.fsdecode(n): node.content for n, node in tree.items()})

    monkeypatch.setattr(failpoints, "failpoint", reached)
    return shown


@pytest.mark.finding("W5")
@pytest.mark.promise(143)
async def test_a_pointer_is_never_at_the_source_before_what_it_points_to(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (100, 200, 300):
        world.write(b"step%d" % step, b"%d" % step * 10, synced=True)
        world.write(b"latest", b"%d" % step, synced=True)
    shown = shown_at_each_step(world, monkeypatch)
    async with draining(world, world.kill()) as drain:
        await drain.progress.wait(world.last_seq)
    assert shown
    for there in shown:
        if "latest" in there:
            assert f"step{there['latest'].decode()}" in there
    world.check_all_is_there()


@pytest.mark.promise(143)
async def test_a_content_that_gave_way_is_waited_for_until_its_bytes_are_there(
    world: World, clock: Clock
) -> None:
    first = world.write(b"latest", b"100", synced=True)
    world.mkdir(b"x")
    # A file stands there: what is behind it waits.
    (world.source / "x").write_bytes(b"")
    second = world.write(b"latest", b"200", synced=True)
    async with draining(world, world.kill()) as drain:
        with trio.move_on_after(5):
            await drain.progress.wait(first)
        assert not (world.source / "latest").exists()
        assert not drain.progress.is_done(first) and not drain.progress.has_all(first)
        (world.source / "x").unlink()
        await drain.progress.wait(first)
        assert (world.source / "latest").read_bytes() == b"200"
        await drain.progress.wait(second)
    world.check_all_is_there()


@pytest.mark.promise(143)
async def test_appended_records_are_at_the_source_before_files_that_refer_to_them(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = world.create(b"data")
    node.writers = 1
    world.append(node, b"whole")
    world.content(node, synced=True)
    world.write(b"index", b"data: 5", synced=True)
    world.append(node, b" and more")
    world.content(node, synced=True)
    node.writers = 0
    shown = shown_at_each_step(world, monkeypatch)
    async with draining(world, world.kill()) as drain:
        await drain.progress.wait(world.last_seq)
    assert next(there["data"] for there in shown if "index" in there) == b"whole"
    world.check_all_is_there()


@pytest.mark.promise(143)
async def test_a_published_file_that_gave_way_does_not_vanish_when_it_is_renamed(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with draining(world) as drain:
        await drain.progress.wait(world.write(b"log", b"old", synced=True))
    world.write(b"log", b"new", synced=True)
    world.rename(b"log", b"log.1")
    world.write(b"log.1", b"newer", synced=True)
    shown = shown_at_each_step(world, monkeypatch)
    async with draining(world, world.kill()) as drain:
        await drain.progress.wait(world.last_seq)
    assert all("log" in there or "log.1" in there for there in shown)
    world.check_all_is_there()


@pytest.mark.promise(80)
@pytest.mark.parametrize("kills", [False, True])
async def test_attributes_that_follow_a_rename_reach_a_file_with_other_names(
    world: World, clock: Clock, kills: bool
) -> None:
    """The file is written meanwhile, so the rename removes the old name only, and the other name
    keeps the earlier version, which the next content replaces."""
    async with draining(world) as drain:
        world.write(b"first", b"1")
        await drain.progress.wait(world.link(b"first", b"z"))
        world.chmod(b"first", 0o777)
        await drain.progress.wait(world.setxattr(b"first", b"user.k", b"old"))
        node = world.begin(b"first")
        world.store(node, b"22")
        world.rename(b"first", b"second")
        world.store(node, b"333")
        world.chmod(b"z", 0o640)
        await drain.progress.wait(world.setxattr(b"second", b"user.k", b"new"))
        assert (world.source / "z").read_bytes() == b"1"
        assert (world.source / "z").stat().st_mode & 0o7777 == 0o640
        if not kills:
            world.end(node)
            await drain.progress.wait(world.last_seq)
    if kills:
        replay = world.kill()
        async with draining(world, replay) as drain:
            world.catch_up(replay)
            await drain.progress.wait(world.last_seq)
    world.check_all_is_there()


@pytest.mark.promise(80)
async def test_such_attributes_leave_alone_what_the_rename_has_replaced(
    world: World, clock: Clock
) -> None:
    """No name leads to the earlier version, and the new name leads to another file."""
    async with draining(world) as drain:
        world.write(b"first", b"1")
        await drain.progress.wait(world.link(b"first", b"z"))
        node = world.begin(b"first")
        world.store(node, b"22")
        mode = (world.source / "a").stat().st_mode
        world.rename(b"first", b"a")
        world.unlink(b"z")
        world.link(b"a", b"y")
        world.store(node, b"333")
        await drain.progress.wait(world.chmod(b"a", 0o400))
        assert (world.source / "a").stat().st_mode == mode
        assert drain.backlog().conflicts == 0
        world.end(node)
        await drain.progress.wait(world.last_seq)
        assert drain.backlog().conflicts == 0
    world.check_all_is_there()


@pytest.mark.finding("W9")
@pytest.mark.promise(144)
async def test_a_file_that_is_written_all_the_time_does_not_hold_up_others(
    world: World, clock: Clock
) -> None:
    busy = world.begin(b"a")
    for number in range(20):
        world.store(busy, b"%d" % number)
        world.content(busy, synced=True)
    world.store(busy, b"half")
    world.write(b"other", b"bytes", synced=True)
    async with draining(world) as drain:
        for seq, op in world.recorded:
            drain.put(seq, op)
        began = trio.current_time()
        await drain.progress.wait(world.last_seq)
        assert trio.current_time() - began < 0.5
        world.end(busy)
        await drain.progress.wait(world.last_seq)
    world.check_all_is_there()


@pytest.mark.finding("W9")
@pytest.mark.promise(144)
async def test_a_log_that_is_synced_all_the_time_is_not_put_off_for_ever(
    world: World, slow: SlowSource, clock: Clock
) -> None:
    """There is always a later content behind the one whose turn it is."""
    async with draining(world, root=slow.path, bandwidth=MiB) as drain:
        node = world.create(b"log")
        node.writers = 1
        seen: set[int] = set()
        for number in range(60):
            world.append(node, b"line %d\n" % number)
            world.content(node, synced=True)
            world.write(b"big%d" % number, bytes(2 * MiB))
            await trio.sleep(1)
            # At first the drain has no backlog.
            if number >= 20:
                seen.add((world.source / "log").stat().st_size)
        assert len(seen) >= 3
        world.end(node)
        await drain.progress.wait(world.last_seq)
    world.check_all_is_there()


@pytest.mark.promise(116, 143)
async def test_a_content_that_was_published_under_some_of_its_names_does_not_give_way(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with draining(world) as drain:
        world.write(b"a", b"first")
        await drain.progress.wait(world.link(b"a", b"d/x"))
    world.write(b"a", b"second")

    def kill(name: str) -> None:
        if name == "drain-renamed":
            raise Killed(name)

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", kill)
        with suppress(BaseException):
            async with draining(world, world.kill(), abandon=False) as drain:
                await drain.progress.wait(world.last_seq)
    assert (world.source / "a").stat().st_ino != (world.source / "d/x").stat().st_ino
    world.setxattr(b"a", b"user.x", b"1")
    world.unlink(b"d/x")
    world.write(b"a", b"the third")
    async with draining(world, world.kill()) as drain:
        await drain.progress.wait(world.last_seq)
        assert drain.backlog().conflicts == 0
    world.check_all_is_there()


# -- what is only appended to ------------------------------------------------------------------


@pytest.mark.finding("W9")
@pytest.mark.promise(145)
async def test_appended_bytes_are_written_behind_those_at_the_source(
    world: World, clock: Clock
) -> None:
    async with draining(world) as drain:
        node = world.create(b"log")
        node.writers = 1
        world.append(node, os.urandom(MiB))
        await drain.progress.wait(world.content(node, synced=True))
        there = (world.source / "log").stat().st_ino
        for number in range(20):
            world.append(node, b"line %d\n" % number)
            await drain.progress.wait(world.content(node, synced=number % 2 == 0))
            assert (world.source / "log").read_bytes() == node.content
        world.end(node)
        # So does what is appended to a file that the source had before.
        taken = world.begin(b"a")
        before = (world.source / "a").stat().st_ino
        world.append(taken, b" and more")
        world.end(taken)
        await drain.progress.wait(world.last_seq)
        backlog = drain.backlog()
    assert (world.source / "log").stat().st_ino == there
    assert (world.source / "a").stat().st_ino == before
    assert backlog.drained_bytes <= 1.1 * (len(node.content) + len(b" and more"))
    world.check_all_is_there()


@pytest.mark.promise(145)
@pytest.mark.parametrize("change", ["rewritten", "cut", "left out"])
async def test_a_file_changed_before_its_end_is_drained_whole(
    world: World, clock: Clock, change: str
) -> None:
    async with draining(world) as drain:
        node = world.begin(b"a")
        world.store(node, b"x" * 1000)
        await drain.progress.wait(world.content(node, synced=True))
        if change == "rewritten":
            world.store(node, b"y" * 1000)
        elif change == "cut":
            world.store(node, b"z" * 10)
        else:
            # Its bytes come with the next content, which is only appended to.
            world.store(node, b"y" * 1000)
            world.content(node, synced=True)
        world.append(node, b"end")
        world.end(node)
        await drain.progress.wait(world.last_seq)
    world.check_all_is_there()


@pytest.mark.promise(145)
@pytest.mark.parametrize("point", ["drain-staged", "drain-synced", "drain-published"])
async def test_growth_that_is_cut_off_by_a_kill_is_no_conflict(
    world: World, clock: Clock, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with draining(world) as drain:
        node = world.begin(b"a")
        world.append(node, b"first")
        await drain.progress.wait(world.content(node, synced=True))
    world.append(node, b"second")
    world.content(node, synced=True)
    there = (world.source / "a").read_bytes()
    reached = []

    def kill(name: str) -> None:
        if name == point:
            reached.append(name)
            raise Killed(name)

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", kill)
        with suppress(BaseException):
            async with draining(world, world.kill(), abandon=False) as drain:
                await drain.progress.wait(world.last_seq)
    assert reached
    assert (world.source / "a").read_bytes().startswith(there)
    async with draining(world, world.kill()) as drain:
        await drain.progress.wait(world.last_seq)
        assert drain.backlog().conflicts == 0
    world.check_all_is_there()


@pytest.mark.promise(79, 145)
async def test_growth_overwrites_nothing_that_others_have_appended(
    world: World, clock: Clock
) -> None:
    async with draining(world) as drain:
        node = world.begin(b"a")
        world.append(node, b" ours")
        await drain.progress.wait(world.content(node, synced=True))
        with (world.source / "a").open("ab") as file:
            file.write(b" them")
        world.append(node, b" again")
        world.end(node)
        await drain.progress.wait(world.last_seq)
        assert drain.backlog().conflicts == 1
    assert (world.source / "a").read_bytes() == b"old a ours them"
    [kept] = world.source.glob("a.monarch-conflict-*")
    assert kept.read_bytes() == b"old a ours again"


@pytest.mark.promise(88, 145)
async def test_a_program_is_not_grown_in_place(world: World, clock: Clock) -> None:
    async with draining(world) as drain:
        await drain.progress.wait(world.write(b"program", b"code"))
        (world.source / "program").chmod(0o4755)
        node = world.begin(b"program")
        world.append(node, b" and more")
        world.end(node)
        there = (world.source / "program").stat().st_ino
        await drain.progress.wait(world.last_seq)
    assert (world.source / "program").stat().st_ino != there
    assert (world.source / "program").read_bytes() == b"code and more"
