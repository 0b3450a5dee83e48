"""Drained files are recognised after a power cut: no conflict, and no leftover."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import trio.testing

from monarch.posix.thread_pool import ThreadPool
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity
from monarch.writeback.expected import Expected
from monarch.writeback.history import without
from monarch.writeback.journal import Op, Replay
from monarch.writeback.source_contents import Place, StagedContents
from monarch.writeback.source_publishing import Publishing
from tests.writeback.rig import Killed, Model, drain_of, draining, is_killed

T = TypeVar("T")
Clock = trio.testing.MockClock


class WorstCase(random.Random):
    """A power cut that leaves nothing but what was synced."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]

    def randrange(self, *args: object, **kwargs: object) -> int:
        return 0


async def drained(model: Model, replay: Replay) -> None:
    """Bring to the source what a replay holds; there must be no conflict then."""
    async with draining(model, replay) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


async def test_no_staged_file_is_left_of_a_file_that_a_power_cut_takes(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = StagedContents.open_place

    def killed(
        self: StagedContents, op: Op, place: Place, expected: Expected, *, make: bool
    ) -> int:
        os.close(opened(self, op, place, expected, make=make))
        raise Killed("staged")

    with monkeypatch.context() as patched:
        patched.setattr(StagedContents, "open_place", killed)
        try:
            async with draining(model, abandon=False) as drain:
                model.write(b"new", b"never synced")
                await drain.progress.wait(model.last_seq)
        except BaseException as error:
            if not is_killed(error):
                raise
    await drained(model, model.cut_power(WorstCase()))


async def test_a_file_that_replaces_a_name_of_one_lost_by_a_power_cut_is_no_conflict(
    model: Model, clock: Clock
) -> None:
    # It has another name at the source.
    model.take(b"c")
    model.write(b"new", b"synced", synced=True)
    model.rename(b"new", b"b")
    model.journal.sync()
    replay = model.cut_power(WorstCase())
    assert model.tree[b"c"].content == b"old b" and not model.tree[b"c"].object
    await drained(model, replay)
    assert (model.source / "b").read_bytes() == b"synced"


def test_a_file_that_replaces_a_lost_one_replaces_the_version_before_it() -> None:
    was, by_name = Identity(5, 6, 7, 8), Identity(9, 10, 11, 12)
    ops = [
        Op(kind="create", path=b"n", object=1),
        Op(kind="rename", path=b"n", to=b"r", object=1, over=was, over_ino=70, strict=True),
        Op(kind="link", path=b"r", to=b"z", object=1),
        Op(kind="rename", path=b"y", to=b"r", ino=71, over_object=1, over_ino=72, strict=True),
        Op(kind="take", path=b"t", ino=73, object=2, was=by_name),
        Op(kind="rename", path=b"w", to=b"t", ino=74, over_object=2, over_ino=73, strict=True),
    ]
    left = [op for _, op in without(list(enumerate(ops)), {1, 2})]
    assert left == [
        replace(ops[3], over=was, over_ino=70, over_object=0),
        replace(ops[5], over=by_name, over_object=0),
    ]


async def test_the_file_that_a_done_rename_replaced_is_known_to_the_next_mount(
    model: Model, clock: Clock
) -> None:
    (model.source / "x").write_bytes(b"older")
    model.write(b"x", b"older")
    older = model.tree[b"x"].object
    model.write(b"y", b"synced")
    model.rename(b"y", b"x")
    last = model.write(b"x", b"newest")
    replay = model.kill()
    # The marks say nothing of the older file, which had come, nor of contents that were left out.
    ours = frozenset({identity_of((model.source / "x").stat())})
    done = {seq: None for seq, _ in replay.ops if seq != last}
    await drained(model, replace(replay, done=done, staged={older: ours}))


async def test_a_name_is_replaced_in_the_turn_in_which_another_name_of_the_file_is_changed(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.link(b"a", b"x")
        model.symlink(b"s", b"target")
        await drain.progress.wait(model.last_seq)
        model.utime(b"a", 10**18)
        model.rename(b"s", b"x")
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


async def test_a_file_is_taken_in_the_turn_in_which_its_times_are_changed(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        # As it is in a history without a file that was taken before and then lost.
        model.record(Op(kind="attr", path=b"a", ino=model.tree[b"a"].ino, mtime_ns=10**18))
        model.write(b"a", b"new")
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


async def test_the_times_of_the_newest_bytes_stay_whatever_was_set_before(
    model: Model, clock: Clock
) -> None:
    model.write(b"n", b"1")
    model.utime(b"n", 10**18)
    model.write(b"n", b"2")
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


async def test_a_power_cut_takes_an_object_whichever_of_its_names_is_left(
    model: Model, clock: Clock
) -> None:
    model.take(b"c")
    model.write(b"new", b"synced", synced=True)
    # The file that was taken has its other name still.
    model.rename(b"new", b"c")
    model.journal.sync()
    replay = model.cut_power(WorstCase())
    assert model.tree[b"b"].content == b"old b" and not model.tree[b"b"].object
    await drained(model, replay)


async def test_attributes_are_kept_of_a_file_whose_content_was_left_out(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        node = model.begin(b"a")
        model.store(node, b"first")
        model.content(node)
        model.store(node, b"half")
        await drain.progress.wait(model.last_seq)
        model.setxattr(b"a", b"user.n", b"value")
        model.chmod(b"a", 0o600)
        await drain.progress.wait(model.last_seq)
        model.store(node, b"all of it")
        model.end(node)
        await drain.progress.wait(model.last_seq)
    model.check_all_is_there()


@pytest.mark.promise(116)
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_time_that_was_set_and_not_marked_is_no_change_of_others(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    model.write(b"n", b"1")
    model.utime(b"n", 10**18)
    model.write(b"n", b"2")
    looked_at = Publishing.look_at_same

    def killed(*args: Any, **kwargs: Any) -> Identity | None:
        looked_at(*args, **kwargs)
        raise Killed("the bytes have their own time by now")

    with monkeypatch.context() as patched:
        patched.setattr(Publishing, "look_at_same", killed)
        try:
            async with draining(model, model.kill(), abandon=False) as drain:
                await drain.progress.wait(model.last_seq)
        except BaseException as error:
            if not is_killed(error):
                raise
    if is_replaced:
        model.write(b"new", b"3", synced=True)
        model.rename(b"new", b"n")
    await drained(model, model.kill())


def written_anew(model: Model) -> Replay:
    """A mount with a new snapshot writes the journal anew, and its daemon is killed at once."""
    replay = model.kill()
    with closing(Source(os.fsencode(model.source))) as source:
        drain = drain_of(model, source, ThreadPool(1, "drain", abandon=False))
        drain.load(replay)
    ops = [(seq, op) for seq, op in replay.ops if seq not in replay.done]
    model.journal.compact(
        ops,
        position=model.journal.file.position,
        known=drain.known_of(ops),
    )
    return model.kill()


@pytest.mark.promise(116)
async def test_the_state_of_the_source_is_known_from_a_rewritten_journal(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.write(b"new", b"1")
        model.write(b"replaced", b"2")
        model.write(b"removed", b"3")
        model.symlink(b"s", b"target")
        model.symlink(b"t", b"target")
        # This one has come under no name yet, and is to replace what the source had.
        model.create(b"half")
        node = model.begin(b"half")
        model.rename(b"half", b"a")
        model.store(node, b"4")
        await drain.progress.wait(model.last_seq)
        assert not drain.backlog().conflicts
    model.end(node)
    model.write(b"new", b"5")
    model.write(b"over", b"6", synced=True)
    model.rename(b"over", b"replaced")
    model.unlink(b"removed")
    model.rename(b"s", b"t")
    ino = (model.source / "new").stat().st_ino
    replay = written_anew(model)
    # Nothing of this is known by what is left of the history, and nothing of it is forgotten.
    assert not replay.done
    replay = written_anew(model)
    await drained(model, replay)
    assert (model.source / "new").stat().st_ino != ino


@pytest.mark.promise(116)
async def test_conflicts_with_others_are_known_from_a_rewritten_journal(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        for name in (b"written", b"removed", b"replaced"):
            model.write(name, b"ours")
        await drain.progress.wait(model.last_seq)
    model.write(b"written", b"ours again")
    model.unlink(b"removed")
    model.write(b"over", b"ours as well", synced=True)
    model.rename(b"over", b"replaced")
    for name in ("written", "removed", "replaced"):
        (model.source / "theirs").write_bytes(b"theirs")
        (model.source / "theirs").rename(model.source / name)
    async with draining(model, written_anew(model)) as drain:
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 3
    for name in ("written", "removed", "replaced"):
        assert (model.source / name).read_bytes() == b"theirs"


async def test_a_file_that_replaced_others_at_two_names_is_replaced_at_both(
    model: Model, clock: Clock
) -> None:
    model.write(b"n", b"never there")
    model.link(b"n", b"m")
    for name, to in ((b"n", b"a"), (b"m", b"d/a")):
        model.rename(name, to)
    for to in (b"a", b"d/a"):
        model.write(b"new", b"new", synced=True)
        model.rename(b"new", to)
    await drained(model, model.kill())


async def test_a_file_to_be_replaced_may_be_changed_on_the_mount_by_its_other_name(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.write(b"n", b"there")
        model.link(b"n", b"m")
        await drain.progress.wait(model.last_seq)
    model.write(b"new", b"never there", synced=True)
    model.rename(b"new", b"m")
    model.utime(b"n", 10**18)
    model.write(b"newer", b"there in the end", synced=True)
    model.rename(b"newer", b"m")
    await drained(model, model.kill())


async def test_a_name_goes_that_is_renamed_to_another_of_its_file_at_the_source(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.write(b"n", b"there", synced=True)
        model.link(b"n", b"m")
        await drain.progress.wait(model.last_seq)
    # What has replaced that other name on the mount never came.
    model.write(b"new", b"never there", synced=True)
    model.rename(b"new", b"m")
    model.rename(b"n", b"m")
    await drained(model, model.kill())


@pytest.mark.promise(116)
async def test_a_file_published_again_is_known_behind_a_rename_over_it(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.write(b"x", b"1")
        await drain.progress.wait(model.last_seq)
    first = model.last_seq
    older, there = model.tree[b"x"].object, identity_of((model.source / "x").lstat())
    model.write(b"x", b"2")
    model.write(b"y", b"never there", synced=True)
    model.rename(b"y", b"x")
    last = model.unlink(b"x")
    # An earlier session has brought the second bytes, and could not mark that.
    (model.source / "new").write_bytes(b"2")
    (model.source / "new").rename(model.source / "x")
    replay = model.kill()
    done = {seq: there if seq == first else None for seq, _ in replay.ops if seq < last}
    ours = frozenset({identity_of((model.source / "x").stat())})
    await drained(model, replace(replay, done=done, staged={older: ours}))
