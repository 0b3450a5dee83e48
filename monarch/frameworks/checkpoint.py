"""Checkpoints beside the training: copied behind one iteration, written behind the next ones.

Two phases, as in CheckFreq (Mohan, Phanishayee and Chidambaram, FAST 2021): a thread copies the
state into host memory while the next iteration goes on, and the gate ``before_update`` holds the
update of the weights until that is done; then the thread writes it to storage. ``interval.py`` says
how often, ``shelf.py`` how it is written, ``layout.py`` what a state may be.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from monarch.errors import CheckpointError
from monarch.frameworks.interval import Interval
from monarch.frameworks.layout import Capture, Octets, UpdatedOnly, trailer
from monarch.frameworks.shelf import (
    PIECE_BYTES,
    Checkpoint,
    Durable,
    Listed,
    Shelf,
    Verified,
    durability,
    list_checkpoints,
    load,
    name_of,
    prune,
    verify,
)
from monarch.order import ResumableSampler

__all__ = [
    "Checkpointer",
    "CheckpointWarning",
    "Restored",
    "UpdatedOnly",
    "Checkpoint",
    "Listed",
    "Verified",
    "list_checkpoints",
    "prune",
    "verify",
]

Batch = TypeVar("Batch")


class CheckpointWarning(RuntimeWarning):
    """A checkpoint was not saved, or one that was saved cannot be used. The training goes on."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A state that was saved after ``step`` updates. The order of its data is set already."""

    checkpoint: Checkpoint
    step: int
    epoch: int
    consumed: int
    state: Any


def allocate(size: int) -> Octets:
    """``size`` bytes of host memory that the kernel has given already."""
    buffer = np.empty(size, np.uint8)
    buffer.fill(0)
    return buffer


class Checkpointer:
    """Checkpoints of one training run, in a directory of its own::

        with Checkpointer(directory, order=sampler) as checkpointer:
            restored = checkpointer.restore()
            ...
            for step, batch in checkpointer.watch(loader):
                ...forward, backward...
                checkpointer.before_update()
                ...update the weights...
                sampler.consumed(len(batch))
                checkpointer.after_update(state_of_the_run)

    All calls come from one thread; of several ranks one has a Checkpointer. A checkpoint that is
    due while ``max_in_flight`` are being written is taken as soon as one of these is done: training
    waits for no storage.

    A checkpoint that cannot be written harms none that was; the next step warns (CheckpointWarning,
    once until one succeeds), ``last_error`` has the reason, and ``close()`` raises the first.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        p: float = 0.035,
        every: int | None = None,
        max_in_flight: int = 1,
        keep_last: int = 2,
        keep_every: int | Literal["epoch"] | None = None,
        durable: Literal["local", "source"] = "local",
        order: ResumableSampler | None = None,
        allocate: Callable[[int], Octets] = allocate,
    ) -> None:
        """``p``: the share of the run's time that checkpoints may cost; from it, and from what they
        are seen to cost, follows how often they are taken, unless ``every`` (iterations) says so.

        ``max_in_flight`` copies of the state are kept in host memory, each from ``allocate``.
        ``keep_last`` and ``keep_every`` as in ``prune``. ``durable``: what a checkpoint on a
        Monarch mount must be before older ones are removed. ``order``: its state is saved with
        every checkpoint and restored with it.

        Raises LockedError if another trainer uses the directory, CheckpointError, OSError, and
        ValueError for a number that cannot be.
        """
        if max_in_flight < 1 or keep_last < 1 or (every is not None and every < 1):
            raise ValueError("max_in_flight, keep_last and every are at least 1")
        self.step = 0
        self._interval = Interval(p=p, max_in_flight=max_in_flight)
        self._every = every
        self._keep_last = keep_last
        self._keep_every: int | Literal["epoch"] | None = keep_every
        self._durable: Literal["local", "source"] = durable
        self._order = order
        self._allocate = allocate
        # Buffers that nobody uses; of the right size from the first checkpoint on.
        self._buffers = [np.empty(0, np.uint8) for _ in range(max_in_flight)]
        self._slots = max_in_flight
        # Guards what the threads change and the training looks at; never held for storage.
        self._changed = threading.Condition()
        # One at a time enters its checkpoint, and removes others.
        self._shelving = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._first_error: BaseException | None = None
        self._last_error: BaseException | None = None
        self._untold = ""
        self._failed = 0
        self._closed = False
        self._believed: set[str] = set()

        self._copied = threading.Event()
        self._copied.set()
        self._gate_passed = False
        # Of the iteration under way.
        self._began_s: float | None = None
        self._update_began_s = 0.0
        self._visible_s = 0.0
        self._quiet = True
        # Since the last checkpoint began.
        self._age = 0
        self._late = False

        self._shelf = Shelf(Path(directory))
        self._serial = self._shelf.next_serial()
        for trouble in self._shelf.troubles:
            warnings.warn(trouble, CheckpointWarning, stacklevel=2)

    @property
    def interval(self) -> int:
        """How many iterations lie between two checkpoints now."""
        return self._every or self._interval.iterations

    @property
    def last_error(self) -> BaseException | None:
        """Why the newest checkpoint was not saved; None if it was."""
        return self._last_error

    @property
    def newest(self) -> Checkpoint | None:
        """The newest one that is on storage."""
        checkpoints = self._shelf.checkpoints
        return checkpoints[-1] if checkpoints else None

    def durable(self, step: int) -> Durable | None:
        """Where the bytes of the newest checkpoint of ``step`` are, on a Monarch mount: ``none``,
        ``local`` or ``source``; None on any other. Raises CheckpointError if there is none.
        """
        names = [each.name for each in self._shelf.checkpoints if each.step == step]
        if not names:
            raise CheckpointError(f"there is no checkpoint of step {step}")
        return durability(self._shelf.directory / names[-1])

    def watch(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """Each batch with the number of the update it will be part of, from 1.

        What happens between two loops, a validation say, is not taken for part of an iteration.
        """
        self._began_s, self._visible_s = time.monotonic(), 0.0
        try:
            for batch in batches:
                yield self.step + 1, batch
        finally:
            self._began_s = None

    def before_update(self) -> None:
        """The gate: returns when the copy of the state is made, so the weights may change."""
        self._tell()
        began_s = time.monotonic()
        self._copied.wait()
        self._update_began_s = time.monotonic()
        self._visible_s += self._update_began_s - began_s
        self._gate_passed = True

    def after_update(self, state: Callable[[], object]) -> bool:
        """Counts the update, and begins a checkpoint if one is due: whether it did.

        ``state()`` is called then and gives what is to be saved. Arrays in it are copied before
        this returns, but those that only the update of the weights changes (``UpdatedOnly``, and
        what the adapter of a framework knows to be such) behind the next iteration.

        Raises CheckpointError if ``before_update`` was not called, TypeError for a state that a
        checkpoint cannot hold, and what ``state`` raises.
        """
        now_s = time.monotonic()
        if not self._gate_passed:
            raise CheckpointError("before_update() comes before each update of the weights")
        self._gate_passed = False
        self._tell()
        self.step += 1
        self._age += 1
        with self._changed:
            if self._began_s is not None:
                self._interval.iterated(
                    now_s - self._began_s - self._visible_s,
                    update_s=now_s - self._update_began_s,
                    visible_s=self._visible_s,
                    quiet=self._quiet,
                )
            is_due = self._age >= self.interval
            buffer = self._buffers.pop() if is_due and self._buffers else None
            self._late |= is_due and buffer is None
        self._visible_s = 0.0
        if buffer is not None:
            self._begin(state, buffer)
        with self._changed:
            self._quiet = len(self._buffers) == self._slots
        self._visible_s = time.monotonic() - now_s
        self._began_s = now_s
        return buffer is not None

    def save(self, state: object) -> Checkpoint:
        """A checkpoint now, after those in flight; returns when it is on storage.

        Raises OSError if it could not be written, TypeError as ``after_update``.
        """
        self._tell()
        with self._changed:
            self._changed.wait_for(lambda: len(self._buffers) > 0)
            buffer = self._buffers.pop()
        try:
            capture, checkpoint = self._capture(state)
            buffer = self._fitting(buffer, capture)
            capture.copy_now(buffer)
            capture.copy_deferred(buffer)
            checkpoint = self._persist(capture, checkpoint, buffer)
        finally:
            self._give_back(buffer)
        self._age, self._late = 0, False
        if self._began_s is not None:
            # No part of an iteration.
            self._began_s, self._visible_s = time.monotonic(), 0.0
        return checkpoint

    def restore(self) -> Restored | None:
        """The newest checkpoint that is whole, None if none was ever saved here. Sets ``step``, and
        the state of ``order``.

        Warns of those that are newer and damaged. Raises CheckpointError if all are damaged, or the
        order is one of other data.
        """
        for checkpoint in reversed(self._shelf.checkpoints):
            try:
                facts, state = load(self._shelf.directory, checkpoint)
            except CheckpointError as error:
                warnings.warn(f"{error}; the one before is tried", CheckpointWarning, stacklevel=2)
                continue
            if self._order is not None and facts.get("order") is not None:
                self._order.load_state_dict(facts["order"])
            self._believed.add(checkpoint.name)
            self.step = checkpoint.step
            return Restored(
                checkpoint, checkpoint.step, checkpoint.epoch, checkpoint.consumed, state
            )
        if self._shelf.checkpoints:
            raise CheckpointError(
                f"no checkpoint in {os.fspath(self._shelf.directory)!r} is whole",
                hint="bring one back from elsewhere, or begin anew in another directory",
            )
        return None

    def close(self) -> None:
        """Waits until nothing is being written. Raises CheckpointError, from the first error, if
        any checkpoint could not be saved. May be called twice.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)
        self._closed = True
        self._shelf.release()
        first, self._first_error = self._first_error, None
        if first is not None:
            newest = self.newest
            kept = f"the newest is of step {newest.step}" if newest else "there is none"
            raise CheckpointError(
                f"{self._failed} checkpoints were not saved, the first because of: {first}; {kept}"
            ) from first

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            # The training's own error is the one to be seen.
            warnings.warn(str(failed), CheckpointWarning, stacklevel=2)

    def _begin(self, state: Callable[[], object], buffer: Octets) -> None:
        try:
            capture, checkpoint = self._capture(state())
            buffer = self._fitting(buffer, capture)
            capture.copy_now(buffer)
        except BaseException:
            self._give_back(buffer)
            raise
        with self._changed:
            self._interval.begun(late=self._late)
        self._age, self._late = 0, False
        self._copied.clear()
        thread = threading.Thread(
            target=self._in_background,
            args=(capture, checkpoint, buffer),
            name=f"checkpoint-{checkpoint.step}",
        )
        with self._changed:
            self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            # There are too many threads, or too little memory for one.
            with self._changed:
                self._threads.discard(thread)
            self._copied.set()
            self._give_back(buffer)
            raise

    def _in_background(self, capture: Capture, checkpoint: Checkpoint, buffer: Octets) -> None:
        try:
            began_s = time.monotonic()
            try:
                capture.copy_deferred(buffer)
            finally:
                self._copied.set()
            copied_s = time.monotonic()
            self._persist(capture, checkpoint, buffer)
            with self._changed:
                self._interval.persisted(
                    copy_s=copied_s - began_s, write_s=time.monotonic() - copied_s
                )
        except Exception as error:
            with self._changed:
                if self._last_error is None:
                    self._untold = f"a checkpoint was not saved: {error}; the next is tried"
                self._last_error = error
                self._first_error = self._first_error or error
                self._failed += 1
        finally:
            self._give_back(buffer)
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _capture(self, state: object) -> tuple[Capture, Checkpoint]:
        """The state at this moment, and its entry but for what is known when it is written."""
        if self._closed:
            raise CheckpointError("this Checkpointer is closed")
        order = None if self._order is None else self._order.state
        with self._changed:
            serial = self._serial
            self._serial += 1
        checkpoint = Checkpoint(
            name=name_of(self.step, serial),
            size=0,
            xxh3="",
            step=self.step,
            epoch=order.epoch if order else 0,
            consumed=order.consumed if order else 0,
            saved_ns=time.time_ns(),
            serial=serial,
        )
        facts = {
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "consumed": checkpoint.consumed,
            "saved_ns": checkpoint.saved_ns,
            "serial": serial,
            "order": order.to_json() if order else None,
        }
        return Capture(state, facts), checkpoint

    def _fitting(self, buffer: Octets, capture: Capture) -> Octets:
        return buffer if len(buffer) >= capture.nbytes else self._allocate(capture.nbytes)

    def _persist(self, capture: Capture, checkpoint: Checkpoint, buffer: Octets) -> Checkpoint:
        pieces = capture.pieces(buffer, PIECE_BYTES)
        part, size, xxh3 = self._shelf.stage(checkpoint.name, pieces, end=trailer)
        written = replace(checkpoint, size=size, xxh3=xxh3)
        with self._shelving:
            self._shelf.publish(part, written)
            self._last_error = None
            try:
                self._shelf.thin_out(
                    keep_last=self._keep_last,
                    keep_every=self._keep_every,
                    durable=self._durable,
                    believed=self._believed,
                )
            except OSError as error:
                self._untold = f"old checkpoints were not removed: {error}; the next does it"
        return written

    def _give_back(self, buffer: Octets) -> None:
        with self._changed:
            self._buffers.append(buffer)
            self._changed.notify_all()

    def _tell(self) -> None:
        """Warn, in the trainer's own thread, of what failed in another."""
        if self._untold:
            untold, self._untold = self._untold, ""
            warnings.warn(untold, CheckpointWarning, stacklevel=3)
