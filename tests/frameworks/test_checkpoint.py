"""A trainer with a Checkpointer: the gate, the saved state, and the reports of failing storage."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch.errors import CheckpointError
from monarch.frameworks import store
from monarch.frameworks.checkpoint import (
    Checkpointer,
    CheckpointWarning,
    UpdatedOnly,
    list_checkpoints,
)
from monarch.frameworks.sampler import ResumableSampler
from tests.equipment.waiting import wait_until


class Weights:
    """An array whose copy blocks until it is released; a state that says what it saw."""

    kind, deferred, shape = "numpy", True, (1000,)

    def __init__(self) -> None:
        self.array = np.zeros(1000)
        self.dtype, self.nbytes = self.array.dtype.str, self.array.nbytes
        self.may_copy = threading.Event()
        self.copying = threading.Event()

    def copy_into(self, target: Any) -> None:
        self.copying.set()
        assert self.may_copy.wait(60)
        UpdatedOnly(self.array).copy_into(target)


def update(checkpointer: Checkpointer, state: object) -> bool:
    checkpointer.before_update()
    return checkpointer.after_update(lambda: state)


def steps(directory: Path) -> list[int]:
    return [listed.checkpoint.step for listed in list_checkpoints(directory)]


class Slow:
    """In place of ``os`` in the shelf: writing blocks until it is released, or fails."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.writing = threading.Event()
        self.error = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, content: Any) -> int:
        self.writing.set()
        assert self.may_write.wait(60)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return os.write(fd, content)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow()
    monkeypatch.setattr(store, "os", slow)
    yield slow
    slow.may_write.set()


def test_the_weights_do_not_change_while_they_are_copied(tmp_path: Path) -> None:
    weights = Weights()
    with Checkpointer(tmp_path, every=1) as checkpointer:
        weights.array += 1
        assert update(checkpointer, weights)
        assert weights.copying.wait(60)
        passed = threading.Event()

        def next_update() -> None:
            checkpointer.before_update()
            weights.array += 1
            passed.set()

        trainer = threading.Thread(target=next_update)
        trainer.start()
        # The gate is shut as long as the copy is not made, whatever time that takes.
        assert not passed.wait(0.1)
        weights.may_copy.set()
        trainer.join(60)
        assert passed.is_set()
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None and restored.state.tolist() == [1.0] * 1000


def test_training_continues_while_a_checkpoint_is_written_and_no_second_one_is_begun(
    tmp_path: Path, storage: Slow
) -> None:
    state = {"w": UpdatedOnly(np.zeros(1000))}
    with Checkpointer(tmp_path, every=2, keep_last=9) as checkpointer:
        begun = [update(checkpointer, state) for _ in range(7)]
        assert begun == [False, True] + [False] * 5
        storage.may_write.set()
        # Those that were due meanwhile are left out.
        for _ in range(10_000):
            if update(checkpointer, state):
                break
            threading.Event().wait(0.001)
        late = checkpointer.step
    assert steps(tmp_path) == [late, 2]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_while_a_thread_is_started_leaves_one_user_of_each_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """In a notebook the training may continue."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if moment == "after":
            (work,) = vars(thread)["_args"]
            start(thread)
            # Until then the training takes the work back.
            wait_until(lambda: not work, "the thread has its work")
        raise KeyboardInterrupt

    state = {"w": np.zeros(10)}
    with Checkpointer(tmp_path, every=1, max_in_flight=2, keep_last=9) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                update(checkpointer, state)
        checkpointer.save(state)
    assert len({id(buffer) for buffer in checkpointer._buffers}) == len(checkpointer._buffers) == 2
    assert steps(tmp_path) == ([1, 1] if moment == "after" else [1])


def test_as_many_are_in_flight_as_were_asked_for(tmp_path: Path, storage: Slow) -> None:
    state = {"w": np.zeros(10)}
    with Checkpointer(tmp_path, every=1, max_in_flight=3, keep_last=9) as checkpointer:
        assert [update(checkpointer, state) for _ in range(5)] == [True] * 3 + [False] * 2
        storage.may_write.set()
    assert steps(tmp_path) == [3, 2, 1]


def test_an_update_without_the_gate_is_reported_as_a_mistake(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="before_update"):
            checkpointer.after_update(dict)
        update(checkpointer, {})
        with pytest.raises(CheckpointError, match="before_update"):
            checkpointer.after_update(dict)


def test_state_that_a_checkpoint_cannot_hold_is_reported_at_once_and_the_next_one_is_taken(
    tmp_path: Path,
) -> None:
    with Checkpointer(tmp_path, every=1) as checkpointer:
        with pytest.raises(TypeError, match=r"state\['a'\]"):
            update(checkpointer, {"a": object()})
        assert update(checkpointer, {"a": 1})
    assert steps(tmp_path) == [2]


def test_the_order_of_the_data_is_saved_with_the_state_and_comes_back_with_it(
    tmp_path: Path,
) -> None:
    sampler = ResumableSampler(10, seed=3)
    with Checkpointer(tmp_path, every=1, order=sampler) as checkpointer:
        next(sampler.epochs(2))
        sampler.next_epoch()
        sampler.consumed(4)
        update(checkpointer, {"w": 1})
        # What is consumed later belongs to a later checkpoint.
        sampler.consumed(4)
    again = ResumableSampler(10, seed=3)
    with Checkpointer(tmp_path, order=again) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (restored.step, restored.epoch, restored.consumed) == (1, 1, 4)
    assert (again.epoch, again.state.consumed) == (1, 4)
    with Checkpointer(tmp_path, order=ResumableSampler(11, seed=3)) as checkpointer:
        with pytest.raises(CheckpointError, match="10 samples, now there are 11"):
            checkpointer.restore()


def test_a_checkpoint_that_fails_is_reported_once_never_replaces_the_old_one_and_is_retried(
    tmp_path: Path, storage: Slow
) -> None:
    storage.may_write.set()
    checkpointer = Checkpointer(tmp_path, every=1, keep_last=1)
    checkpointer.save({"w": 0})

    def step() -> None:
        update(checkpointer, {"w": 1})
        with checkpointer._changed:
            assert checkpointer._changed.wait_for(lambda: not checkpointer._threads, 60)

    storage.error = errno.ENOSPC
    step()
    assert isinstance(checkpointer.last_error, OSError)
    with pytest.warns(CheckpointWarning, match="No space left"):
        step()
    # A second warning would fail the test.
    step()
    assert steps(tmp_path) == [0]
    storage.error = 0
    step()
    assert checkpointer.last_error is None
    assert checkpointer.newest is not None and checkpointer.newest.step == 4
    storage.error = errno.EIO
    step()
    with pytest.warns(CheckpointWarning, match="Input/output error"):
        checkpointer.before_update()
    with pytest.raises(CheckpointError, match=r"4 checkpoints .* No space left .* step 4") as first:
        checkpointer.close()
    assert isinstance(first.value.__cause__, OSError)
    checkpointer.close()
    assert steps(tmp_path) == [4]


def test_an_error_of_the_training_is_not_hidden_by_one_of_a_checkpoint(
    tmp_path: Path, storage: Slow
) -> None:
    storage.may_write.set()
    storage.error = errno.EIO

    def train() -> None:
        with Checkpointer(tmp_path, every=1) as checkpointer:
            update(checkpointer, {})
            raise KeyError

    with pytest.warns(CheckpointWarning, match="Input/output"), pytest.raises(KeyError):
        train()


def test_save_is_on_storage_when_it_returns_and_raises_if_it_is_not(
    tmp_path: Path, storage: Slow
) -> None:
    storage.may_write.set()
    with Checkpointer(tmp_path) as checkpointer:
        saved = checkpointer.save({"w": np.arange(3)})
        assert list_checkpoints(tmp_path)[0].checkpoint == saved == checkpointer.newest
        assert list_checkpoints(tmp_path)[0].complete
        storage.error = errno.EDQUOT
        with pytest.raises(OSError) as failed:
            checkpointer.save({"w": 2})
        assert failed.value.errno == errno.EDQUOT
        # The caller of the save knows already.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpointer.before_update()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpointer.save({})


def test_the_host_memory_of_a_checkpoint_is_used_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def allocate(size: int) -> Any:
        asked.append(size)
        return np.empty(size, np.uint8)

    with Checkpointer(tmp_path, every=1, max_in_flight=2, allocate=allocate) as checkpointer:
        for _ in range(30):
            update(checkpointer, {"w": np.zeros(1000)})
    assert len(asked) <= 2


def test_the_first_checkpoint_comes_early_to_be_measured(tmp_path: Path) -> None:
    begun = []
    with Checkpointer(tmp_path) as checkpointer:
        for step, _ in checkpointer.watch(itertools.repeat(0, 200)):
            if update(checkpointer, {"w": np.zeros(10)}):
                begun.append(step)
    # Those after it depend on this machine.
    assert begun[0] == 10


def test_a_step_that_was_saved_before_is_saved_anew_beside_it(tmp_path: Path) -> None:
    for content in (1, 2):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.step = 5
            checkpointer.save({"w": content})
    assert steps(tmp_path) == [5, 5]
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None and restored.state == {"w": 2}


@pytest.mark.parametrize("wrong", [{"every": 0}, {"max_in_flight": 0}, {"keep_last": 0}, {"p": 0}])
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Checkpointer(tmp_path, **wrong)
