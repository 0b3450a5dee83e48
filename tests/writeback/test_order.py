"""The order in which repeatedly written files reach the source, and which files wait for it."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import trio
import trio.testing

from monarch.posix import failpoints
from monarch.text import MiB
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Op
from tests.equipment.slowfs import SlowSource
from tests.writeback.rig import Killed, Model, draining, read_tree

Clock = trio.testing.MockClock


def shown_at_each_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """What the source has of files at each step of the drain from now on."""
    shown: list[dict[str, bytes]] = []

    def reached(name: str) -> None:
        if name.startswith("drain-"):
            tree = read_tree(model.source)
            shown.append({os.fsdecode(n): node.content for n, node in tree.items()})

    monkeypatch.setattr(failpoints, "failpoint", reached)
    return shown


@pytest.mark.finding("W5")
@pytest.mark.promise(143)
async def test_a_pointer_is_never_at_the_source_before_what_it_points_to(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (100, 200, 300):
        model.write(b"step%d" % step, b"%d" % step * 10, synced=True)
        model.write(b"latest", b"%d" % step, synced=True)
    shown = shown_at_each_step(model, monkeypatch)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    assert shown
    for there in shown:
        if "latest" in there:
            assert f"step{there['latest'].decode()}" in there
    model.check_all_is_there()


@pytest.mark.promise(143)
async def test_a_content_that_gave_way_is_waited_for_until_its_bytes_are_there(
    model: Model, clock: Clock
) -> None:
    first = model.write(b"latest", b"100", synced=True)
    model.mkdir(b"x")
    # A file stands there: what is behind it waits.
    (model.source / "x").write_bytes(b"")
    second = model.write(b"latest", b"200", synced=True)
    async with draining(model, model.kill()) as drain:
        with trio.move_on_after(5):
            await drain.progress.wait(first)
        assert not (model.source / "latest").exists()
        assert not drain.progress.is_done(first) and not drain.progress.has_all(first)
        (model.source / "x").unlink()
        await drain.progress.wait(first)
        assert (model.source / "latest").read_bytes() == b"200"
        await drain.progress.wait(second)
    model.check_all_is_there()


@pytest.mark.promise(143)
async def test_appended_records_are_at_the_source_before_files_that_refer_to_them(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = model.create(b"data")
    node.writers = 1
    model.append(node, b"whole")
    model.content(node, synced=True)
    model.write(b"index", b"data: 5", synced=True)
    model.append(node, b" and more")
    model.content(node, synced=True)
    node.writers = 0
    shown = shown_at_each_step(model, monkeypatch)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    assert next(there["data"] for there in shown if "index" in there) == b"whole"
    model.check_all_is_there()


@pytest.mark.promise(143)
async def test_a_published_file_that_gave_way_does_not_vanish_when_it_is_renamed(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with draining(model) as drain:
        await drain.progress.wait(model.write(b"log", b"old", synced=True))
    model.write(b"log", b"new", synced=True)
    model.rename(b"log", b"log.1")
    model.write(b"log.1", b"newer", synced=True)
    shown = shown_at_each_step(model, monkeypatch)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    assert all("log" in there or "log.1" in there for there in shown)
    model.check_all_is_there()


@pytest.mark.promise(80)
@pytest.mark.parametrize("kills", [False, True])
async def test_attributes_that_follow_a_rename_reach_a_file_with_other_names(
    model: Model, clock: Clock, kills: bool
) -> None:
    """The file is written meanwhile, so the rename removes the old name only, and the other name
    keeps the earlier version, which the next content replaces."""
    async with draining(model) as drain:
        model.write(b"first", b"1")
        await drain.progress.wait(model.link(b"first", b"z"))
        model.chmod(b"first", 0o777)
        await drain.progress.wait(model.setxattr(b"first", b"user.k", b"old"))
        node = model.begin(b"first")
        model.store(node, b"22")
        model.rename(b"first", b"second")
        model.store(node, b"333")
        model.chmod(b"z", 0o640)
        await drain.progress.wait(model.setxattr(b"second", b"user.k", b"new"))
        assert (model.source / "z").read_bytes() == b"1"
        assert (model.source / "z").stat().st_mode & 0o7777 == 0o640
        if not kills:
            model.end(node)
            await drain.progress.wait(model.last_seq)
    if kills:
        replay = model.kill()
        async with draining(model, replay) as drain:
            model.catch_up(replay)
            await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


@pytest.mark.promise(80)
async def test_such_attributes_leave_alone_what_the_rename_has_replaced(
    model: Model, clock: Clock
) -> None:
    """No name leads to the earlier version, and the new name leads to another file."""
    async with draining(model) as drain:
        model.write(b"first", b"1")
        await drain.progress.wait(model.link(b"first", b"z"))
        node = model.begin(b"first")
        model.store(node, b"22")
        mode = (model.source / "a").stat().st_mode
        model.rename(b"first", b"a")
        model.unlink(b"z")
        model.link(b"a", b"y")
        model.store(node, b"333")
        await drain.progress.wait(model.chmod(b"a", 0o400))
        assert (model.source / "a").stat().st_mode == mode
        assert drain.backlog().conflicts == 0
        model.end(node)
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


@pytest.mark.finding("W9")
@pytest.mark.promise(144)
async def test_a_file_that_is_written_all_the_time_does_not_hold_up_others(
    model: Model, patient_clock: Clock
) -> None:
    busy = model.begin(b"a")
    for number in range(20):
        model.store(busy, b"%d" % number)
        model.content(busy, synced=True)
    model.store(busy, b"half")
    model.write(b"other", b"bytes", synced=True)
    async with draining(model) as drain:
        for seq, op in model.recorded:
            drain.put(seq, op)
        began = trio.current_time()
        await drain.progress.wait(model.last_seq)
        assert trio.current_time() - began < 0.5
        model.end(busy)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


@pytest.mark.finding("W9")
@pytest.mark.promise(144)
async def test_a_log_that_is_synced_all_the_time_is_not_put_off_for_ever(
    model: Model, slow: SlowSource, clock: Clock
) -> None:
    """There is always a later content behind the one whose turn it is."""
    async with draining(model, root=slow.path, bandwidth=MiB) as drain:
        node = model.create(b"log")
        node.writers = 1
        seen: set[int] = set()
        for number in range(60):
            model.append(node, b"line %d\n" % number)
            model.content(node, synced=True)
            model.write(b"big%d" % number, bytes(2 * MiB))
            await trio.sleep(1)
            # At first the drain has no backlog.
            if number >= 20:
                seen.add((model.source / "log").stat().st_size)
        assert len(seen) >= 3
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


@pytest.mark.promise(116, 143)
async def test_a_content_that_was_published_under_some_of_its_names_does_not_give_way(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with draining(model) as drain:
        model.write(b"a", b"first")
        await drain.progress.wait(model.link(b"a", b"d/x"))
    model.write(b"a", b"second")

    def kill(name: str) -> None:
        if name == "drain-renamed":
            raise Killed(name)

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", kill)
        with suppress(BaseException):
            async with draining(model, model.kill(), abandon=False) as drain:
                await drain.progress.wait(model.last_seq)
    assert (model.source / "a").stat().st_ino != (model.source / "d/x").stat().st_ino
    model.setxattr(b"a", b"user.x", b"1")
    model.unlink(b"d/x")
    model.write(b"a", b"the third")
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


@pytest.mark.parametrize("is_grown", [False, True])
async def test_a_replaced_name_is_removed_though_its_file_has_changed_under_another(
    model: Model, clock: Clock, is_grown: bool
) -> None:
    """A new file without bytes at the source has replaced the name, and is renamed away."""
    async with draining(model) as drain:
        model.link(b"a", b"linked")
        node = model.create(b"new")
        node.writers = 1
        model.store(node, b"half")
        model.content(node)
        model.store(node, b"other")
        model.rename(b"new", b"linked")
        model.store(node, b"newer")
        await until_empty(drain)
        file = model.begin(b"a")
        if is_grown:
            model.append(file, b" and more")
        else:
            model.store(file, b"rewritten")
        model.end(file)
        await until_empty(drain)
        expected = b"old a and more" if is_grown else b"old a"
        assert (model.source / "linked").read_bytes() == expected
        model.rename(b"linked", b"renamed")
        node.writers = 0
        model.unlink(b"renamed")
        await until_empty(drain)
    model.check_all_is_there()


async def test_a_replaced_name_is_removed_though_its_file_is_copied_up_in_the_same_turn(
    model: Model, clock: Clock
) -> None:
    os.link(model.source / "a", model.source / "linked")
    model.tree = read_tree(model.source)
    file = model.tree[b"a"]
    async with draining(model) as drain:
        node = model.create(b"new")
        node.writers = 1
        model.store(node, b"half")
        model.content(node)
        model.store(node, b"other")
        # The drain gives the file another identity before it has an object.
        names = (b"a", b"linked")
        model.record(
            Op(
                kind="attr",
                path=b"a",
                paths=names,
                ino=file.ino,
                mtime_ns=10**18,
                was=file.was,
            )
        )
        await until_empty(drain)
        assert (model.source / "linked").stat().st_mtime_ns == 10**18
        # The rename records no content, which would be drained in a turn of its own.
        node.is_recorded = node.is_kept = True
        model.rename(b"new", b"linked")
        model.take(b"a")
        await until_empty(drain)
        model.rename(b"linked", b"renamed")
        node.writers = 0
        model.unlink(b"renamed")
        await until_empty(drain)
        assert drain.backlog().conflicts == 0
    assert not (model.source / "linked").exists()


async def until_empty(drain: Drain) -> None:
    """Wait until no change waits."""
    with trio.fail_after(10_000):
        while drain.backlog().ops:
            await trio.sleep(0.05)


# -- what is only appended to ------------------------------------------------------------------


@pytest.mark.finding("W9")
@pytest.mark.promise(145)
async def test_appended_bytes_are_written_behind_those_at_the_source(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        node = model.create(b"log")
        node.writers = 1
        model.append(node, os.urandom(MiB))
        await drain.progress.wait(model.content(node, synced=True))
        there = (model.source / "log").stat().st_ino
        for number in range(20):
            model.append(node, b"line %d\n" % number)
            await drain.progress.wait(model.content(node, synced=number % 2 == 0))
            assert (model.source / "log").read_bytes() == node.content
        model.end(node)
        # So does what is appended to a file that the source had before.
        taken = model.begin(b"a")
        before = (model.source / "a").stat().st_ino
        model.append(taken, b" and more")
        model.end(taken)
        await drain.progress.wait(model.last_seq)
        backlog = drain.backlog()
    assert (model.source / "log").stat().st_ino == there
    assert (model.source / "a").stat().st_ino == before
    assert backlog.drained_bytes <= 1.1 * (len(node.content) + len(b" and more"))
    model.check_all_is_there()


@pytest.mark.promise(145)
@pytest.mark.parametrize("change", ["rewritten", "cut", "left out"])
async def test_a_file_changed_before_its_end_is_drained_whole(
    model: Model, clock: Clock, change: str
) -> None:
    async with draining(model) as drain:
        node = model.begin(b"a")
        model.store(node, b"x" * 1000)
        await drain.progress.wait(model.content(node, synced=True))
        if change == "rewritten":
            model.store(node, b"y" * 1000)
        elif change == "cut":
            model.store(node, b"z" * 10)
        else:
            # Its bytes come with the next content, which is only appended to.
            model.store(node, b"y" * 1000)
            model.content(node, synced=True)
        model.append(node, b"end")
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def drain_killed_at(point: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of the drain that is killed at the failpoint."""
    reached = []

    def kill(name: str) -> None:
        if name == point:
            reached.append(name)
            raise Killed(name)

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", kill)
        with suppress(BaseException):
            async with draining(model, model.kill(), abandon=False) as drain:
                await drain.progress.wait(model.last_seq)
    assert reached


@pytest.mark.promise(145)
@pytest.mark.parametrize("point", ["drain-staged", "drain-synced", "drain-published"])
async def test_growth_that_is_cut_off_by_a_kill_is_no_conflict(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with draining(model) as drain:
        node = model.begin(b"a")
        model.append(node, b"first")
        await drain.progress.wait(model.content(node, synced=True))
    model.append(node, b"second")
    model.content(node, synced=True)
    there = (model.source / "a").read_bytes()
    await drain_killed_at(point, model, monkeypatch)
    assert (model.source / "a").read_bytes().startswith(there)
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


@pytest.mark.promise(116, 145)
@pytest.mark.parametrize("journal", ["kept", "shortened", "of a new snapshot"])
async def test_growth_that_was_cut_off_is_no_conflict_when_its_content_is_obsolete(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, journal: str
) -> None:
    async with draining(model) as drain:
        await drain.progress.wait(model.write(b"a", b"first"))
    node = model.begin(b"a")
    model.append(node, b"x" * 100)
    model.content(node)
    await drain_killed_at("drain-staged", model, monkeypatch)
    grown = (model.source / "a").read_bytes()
    assert grown == node.content
    # The content that was being appended is left out for a shorter one, and that for the last one.
    model.write(b"a", b"short")
    model.write(b"a", b"last")
    await drain_killed_at("drain-staged", model, monkeypatch)
    assert (model.source / "a").read_bytes() == grown
    replay = model.look_anew() if journal == "of a new snapshot" else model.kill()
    if journal == "shortened":
        before = len(replay.ops)
        model.journal.shorten()
        replay = model.kill()
        assert len(replay.ops) < before
    async with draining(model, replay) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


@pytest.mark.promise(79, 145)
@pytest.mark.parametrize("end", ["written", "unlinked", "replaced"])
async def test_growth_that_was_cut_off_removes_nothing_that_others_have_appended_since(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with draining(model) as drain:
        await drain.progress.wait(model.write(b"a", b"first"))
    node = model.begin(b"a")
    model.append(node, b" second")
    model.content(node)
    await drain_killed_at("drain-staged", model, monkeypatch)
    with (model.source / "a").open("ab") as file:
        file.write(b" theirs")
    match end:
        case "written":
            model.write(b"a", b"last")
        case "unlinked":
            model.unlink(b"a")
        case "replaced":
            model.write(b"new", b"other")
            model.rename(b"new", b"a")
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 1
    assert (model.source / "a").read_bytes() == b"first second theirs"


@pytest.mark.promise(79, 145)
async def test_growth_overwrites_nothing_that_others_have_appended(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        node = model.begin(b"a")
        model.append(node, b" ours")
        await drain.progress.wait(model.content(node, synced=True))
        with (model.source / "a").open("ab") as file:
            file.write(b" them")
        model.append(node, b" again")
        model.end(node)
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 1
    assert (model.source / "a").read_bytes() == b"old a ours them"
    [kept] = model.source.glob("a.monarch-conflict-*")
    assert kept.read_bytes() == b"old a ours again"


@pytest.mark.promise(88, 145)
async def test_a_program_is_not_grown_in_place(model: Model, clock: Clock) -> None:
    async with draining(model) as drain:
        await drain.progress.wait(model.write(b"program", b"code"))
        (model.source / "program").chmod(0o4755)
        node = model.begin(b"program")
        model.append(node, b" and more")
        model.end(node)
        there = (model.source / "program").stat().st_ino
        await drain.progress.wait(model.last_seq)
    assert (model.source / "program").stat().st_ino != there
    assert (model.source / "program").read_bytes() == b"code and more"
