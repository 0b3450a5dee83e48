"""Several ranks save the same steps, and restore only steps that every rank has."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch.errors import CheckpointError, LockedError
from monarch.frameworks import store
from monarch.frameworks.checkpoint import (
    Checkpointer,
    CheckpointWarning,
    Group,
    Parts,
    UpdatedOnly,
    list_checkpoints,
)
from monarch.frameworks.group import directory_of
from monarch.frameworks.sampler import ResumableSampler
from tests.frameworks.together import in_ranks


class Slow:
    """An array whose copy blocks until it is released, so that its checkpoint is in flight."""

    kind, deferred, shape = "numpy", True, (3,)

    def __init__(self) -> None:
        self.array = np.zeros(3)
        self.dtype, self.nbytes = self.array.dtype.str, self.array.nbytes
        self.may_copy = threading.Event()

    def copy_into(self, target: Any) -> None:
        assert self.may_copy.wait(60)
        UpdatedOnly(self.array).copy_into(target)


def update(checkpointer: Checkpointer, state: object) -> bool:
    # Without the gate: the copy of these tests stands for the whole of a slow write.
    checkpointer._gate_passed = True
    return checkpointer.after_update(lambda: state)


def settle(checkpointer: Checkpointer) -> None:
    with checkpointer._changed:
        assert checkpointer._changed.wait_for(lambda: not checkpointer._threads, 60)


def steps(directory: Path) -> list[int]:
    return sorted(listed.checkpoint.step for listed in list_checkpoints(directory))


def steps_of(directory: Path, ranks: int) -> list[list[int]]:
    return [steps(directory_of(directory, rank)) for rank in range(ranks)]


@pytest.mark.finding("W13")
@pytest.mark.promise(161)
def test_one_slow_write_puts_no_rank_out_of_step_with_another(tmp_path: Path) -> None:
    begun = []
    for rank in range(2):
        with Checkpointer(tmp_path / str(rank), every=5, keep_last=99) as checkpointer:
            slow = Slow()
            for step in range(1, 61):
                state: object = {"w": slow} if rank and step == 10 else {"w": step}
                update(checkpointer, state)
                if step == 16:
                    slow.may_copy.set()
                if step > 16 or step < 10 or not rank:
                    settle(checkpointer)
        begun.append(steps(tmp_path / str(rank)))
    assert begun[0] == list(range(5, 61, 5))
    # What was due meanwhile is left out, and the next is where the others have theirs.
    assert begun[1] == [step for step in begun[0] if step != 15]


@pytest.mark.finding("W13")
@pytest.mark.promise(161)
@pytest.mark.parametrize("every", [5, None])
def test_ranks_put_a_checkpoint_off_together_until_all_have_room(
    tmp_path: Path, every: int | None
) -> None:
    taken: list[list[int]] = [[], []]
    states: list[list[int]] = [[], []]

    def train(group: Group) -> None:
        slow = Slow()
        with Checkpointer(tmp_path, every=every, keep_last=99, group=group) as checkpointer:
            # What each finds best by itself is another number.
            checkpointer._interval.iterations = 3 + 4 * group.rank
            for step in range(1, 41):

                def state(step: int = step) -> object:
                    states[group.rank].append(step)
                    return {"w": slow if group.rank and step == 10 else step}

                checkpointer._gate_passed = True
                if checkpointer.after_update(state):
                    taken[group.rank].append(step)
                if step == 17:
                    slow.may_copy.set()
                if step >= 17 or not group.rank or step < 10:
                    settle(checkpointer)
                if every is None:
                    checkpointer._interval.iterations = 3 + 4 * group.rank

    in_ranks(2, train)
    # ``state`` may be a call of all ranks together: all came there at the same steps.
    assert states[0] == states[1] == taken[0] == taken[1]
    assert steps_of(tmp_path, 2) == taken
    if every:
        assert taken[0] == [5, 10, 18, 20, 25, 30, 35, 40]
    else:
        # The longest interval of all, from the one that was put off on.
        assert taken[0] == [10, 18, 25, 32, 39]


def test_ranks_that_are_not_at_the_same_call_get_an_error_and_none_waits(tmp_path: Path) -> None:
    def train(group: Group) -> str:
        with Checkpointer(tmp_path, every=2, group=group) as checkpointer:
            checkpointer.step = group.rank
            with pytest.raises(CheckpointError, match="rank 1 is at save of 1, rank 0 at"):
                checkpointer.save({})
        with Checkpointer(tmp_path, every=2 + group.rank, group=group) as checkpointer:
            with pytest.raises(CheckpointError, match="different values of"):
                checkpointer.save({})
        return "closed"

    assert in_ranks(2, train) == ["closed"] * 2


def save(directory: Path, ranks: int, *steps: int, keep_last: int = 99) -> None:
    def work(group: Group) -> None:
        sampler = ResumableSampler(100, seed=1, rank=group.rank, world_size=group.size)
        with Checkpointer(
            directory, group=group, keep_last=keep_last, order=sampler
        ) as checkpointer:
            for step in steps:
                sampler.consumed(1)
                checkpointer.step = step
                checkpointer.save({"step": step, "rank": group.rank, "w": np.full(9, step)})

    in_ranks(ranks, work)


def restored(directory: Path, ranks: int, step: int | None = None) -> list[Any]:
    def work(group: Group) -> Any:
        with Checkpointer(directory, group=group) as checkpointer:
            found = checkpointer.restore(step)
            if found is None:
                return None
            assert checkpointer.step == found.step
            return found.step, found.state

    # Warnings are the process's, not the thread's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return in_ranks(ranks, work)


def parts(directory: Path, rank: int) -> list[Path]:
    return sorted(directory_of(directory, rank).glob("*.ckpt"))


@pytest.mark.finding("W13")
@pytest.mark.promise(162)
@pytest.mark.parametrize("loss", ["no part", "no entry nor part", "damaged", "another's"])
def test_a_step_counts_only_when_every_ranks_part_is_there_and_whole(
    tmp_path: Path, loss: str
) -> None:
    save(tmp_path, 3, 10, 20, 30)
    lost = parts(tmp_path, 1)[-1]
    content = lost.read_bytes()
    lost.unlink()
    if loss == "no entry nor part":
        (directory_of(tmp_path, 1) / "manifest").unlink()
    elif loss == "damaged":
        lost.write_bytes(content[:-1] + b"?")
    elif loss == "another's":
        # The part of a rank that went another way is whole, and of the same step and name.
        shutil.copy(parts(tmp_path, 0)[-1], lost)
    found = restored(tmp_path, 3)
    assert [step for step, _ in found] == [20] * 3
    assert [state["rank"] for _, state in found] == [0, 1, 2]
    assert [step for step, _ in restored(tmp_path, 3, step=10)] == [10] * 3
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 30 .* whole at every rank"):
        restored(tmp_path, 3, step=30)


@pytest.mark.finding("W13")
@pytest.mark.promise(162)
def test_a_step_can_be_named_and_the_newest_of_it_is_taken(tmp_path: Path) -> None:
    for content in (1, 2):
        with Checkpointer(tmp_path, keep_last=9) as checkpointer:
            for step in (10, 20):
                checkpointer.step = step
                checkpointer.save({"w": content})
            found = checkpointer.restore(step=10)
            assert found is not None and (found.step, found.state) == (10, {"w": content})
            assert checkpointer.step == 10
            with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
                checkpointer.restore(step=7)


@pytest.mark.promise(162)
def test_old_sets_stay_until_newer_ones_are_known_to_be_on_storage_at_every_rank(
    tmp_path: Path,
) -> None:
    def train(group: Group) -> None:
        slow = Slow()
        with Checkpointer(
            tmp_path, every=1, keep_last=1, max_in_flight=3, group=group
        ) as checkpointer:
            for step in range(1, 5):
                last = group.rank and step > 1
                update(checkpointer, {"w": slow if last else step})
                if not last:
                    settle(checkpointer)
            # Rank 1 has step 1 only, and rank 0 knows of no other.
            if not group.rank:
                assert steps(directory_of(tmp_path, 0)) == [1, 2, 3, 4]
            slow.may_copy.set()

    in_ranks(2, train)
    save(tmp_path, 2, 5, 6, keep_last=1)
    assert steps_of(tmp_path, 2) == [[6], [6]]


def test_ranks_tell_each_other_of_few_sets_however_long_one_cannot_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = [0, 0]
    fails = threading.Event()
    fails.set()
    real = store.CheckpointStore.stage

    def stage(self: Any, name: str, *rest: Any, **options: Any) -> Any:
        if fails.is_set() and self.directory.name == "rank-00001":
            raise OSError(28, "No space left on device")
        return real(self, name, *rest, **options)

    monkeypatch.setattr(store.CheckpointStore, "stage", stage)

    def train(group: Group) -> None:
        def all_gather(message: bytes) -> Any:
            longest[group.rank] = max(longest[group.rank], len(message))
            return group.all_gather(message)

        messages = Group(group.rank, group.size, all_gather)
        checkpointer = Checkpointer(tmp_path, every=1, keep_last=1, group=messages)
        for step in range(60):
            if step == 50 and group.rank:
                fails.clear()
            update(checkpointer, {"w": step})
            settle(checkpointer)
        with contextlib.suppress(CheckpointError):
            checkpointer.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        in_ranks(2, train)
    assert max(longest) < 2000
    assert [step for step, _ in restored(tmp_path, 2)] == [60, 60]
    # What was saved by one of them only has gone when there was something newer.
    assert [len(each) <= 3 for each in steps_of(tmp_path, 2)] == [True, True]


def test_a_part_that_cannot_be_saved_is_an_error_at_every_rank(tmp_path: Path) -> None:
    def work(group: Group) -> str:
        with Checkpointer(tmp_path, group=group) as checkpointer:
            checkpointer.save({"w": 1})
            error: Any = TypeError if group.rank else CheckpointError
            with pytest.raises(error, match=r"object|rank 1: .* step 0 is not saved"):
                checkpointer.save({"w": object() if group.rank else 1})
            checkpointer.step = 3
            return checkpointer.save({"w": 1}).name

    names = in_ranks(2, work)
    assert names[0] == names[1]
    assert [step for step, _ in restored(tmp_path, 2)] == [3, 3]


def test_sets_that_were_never_complete_begin_a_new_run_with_a_warning(tmp_path: Path) -> None:
    assert restored(tmp_path, 2) == [None, None]

    def work(group: Group) -> None:
        with Checkpointer(tmp_path, every=1, group=group) as checkpointer:
            update(checkpointer, {"w": 1})

    in_ranks(2, work)
    shutil.rmtree(directory_of(tmp_path, 1))
    with pytest.warns(CheckpointWarning, match="some of its 2 parts"):
        assert in_ranks(2, lambda g: _restore(tmp_path, g)) == [None, None]
    # One that was committed is missed.
    save(tmp_path, 2, 10)
    shutil.rmtree(directory_of(tmp_path, 1))
    with pytest.raises(CheckpointError, match="whole at every rank"):
        restored(tmp_path, 2)


def _restore(directory: Path, group: Group) -> object:
    with Checkpointer(directory, group=group) as checkpointer:
        return checkpointer.restore()


@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3), (2, 1)])
def test_another_number_of_ranks_gets_the_parts_of_all(
    tmp_path: Path, before: int, now: int
) -> None:
    save(tmp_path, before, 10, 20)
    for rank, (step, state) in enumerate(restored(tmp_path, now)):
        assert step == 20 and isinstance(state, Parts)
        assert (state.rank, state.size) == (rank, now)
        assert [each["rank"] for each in state.states] == list(range(before))
    # It continues from there; then its own sets are the newest.
    save(tmp_path, now, 30)
    assert [state["rank"] for _, state in restored(tmp_path, now)] == list(range(now))


def test_the_checkpoints_of_ranks_are_not_taken_for_none(tmp_path: Path) -> None:
    save(tmp_path, 2, 10)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="checkpoints of 2 ranks"):
            checkpointer.restore()
    with Checkpointer(tmp_path, group=Group(0, 1, lambda messages: [messages])):
        with pytest.raises(LockedError):
            Checkpointer(tmp_path, group=Group(0, 1, lambda messages: [messages]))
