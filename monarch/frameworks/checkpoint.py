"""Checkpoints during training: copied in one iteration, written during the following ones.

Two phases, as in CheckFreq (Mohan, Phanishayee and Chidambaram, FAST 2021): a thread copies the
state into host memory while the next iteration runs, and ``before_update`` delays the update of the
weights until the copy is done; then the thread writes it to storage. ``interval.py`` decides how
often, ``store.py`` writes, ``format.py`` defines what a state may contain, ``group.py`` exchanges
messages between ranks and chooses what to read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from monarch.errors import CheckpointError
from monarch.frameworks.format import Capture, Octets, Parts, UpdatedOnly, trailer
from monarch.frameworks.group import (
    CheckpointWarning,
    Group,
    directory_of,
    newest_set,
    newest_whole,
)
from monarch.frameworks.interval import FIRST_INTERVAL, Interval
from monarch.frameworks.sampler import ResumableSampler
from monarch.frameworks.store import (
    PIECE_BYTES,
    Checkpoint,
    CheckpointStore,
    Durable,
    Listed,
    Retention,
    Verified,
    durability,
    list_checkpoints,
    name_of,
    prune,
    serial_of,
    verify,
)
from monarch.text import counted

__all__ = [
    "Checkpointer",
    "CheckpointWarning",
    "Group",
    "Parts",
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

# The ranks exchange at most this many sets that may be incomplete.
_MOST_SETS = 8


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored state, saved after ``step`` updates. The order of its data is already set.

    ``state`` is a ``Parts`` if another number of ranks saved it."""

    checkpoint: Checkpoint
    step: int
    epoch: int
    consumed: int
    state: Any


def allocate(size: int) -> Octets:
    """``size`` bytes of host memory whose pages are already allocated."""
    buffer = np.empty(size, np.uint8)
    buffer.fill(0)
    return buffer


class Checkpointer:
    """Checkpoints of one training run, in their own directory::

        with Checkpointer(directory, order=sampler) as checkpointer:
            restored = checkpointer.restore()
            ...
            for step, batch in checkpointer.watch(loader):
                ...forward, backward...
                checkpointer.before_update()
                ...update the weights...
                sampler.consumed(len(batch))
                checkpointer.after_update(state_of_the_run)

    All calls must come from one thread. With several ranks, either one has a Checkpointer, or all
    have one for the same directory and a ``group``: then they save and restore the same steps.

    Training does not wait for storage. If a checkpoint is due while ``max_in_flight`` are being
    written, it is skipped with ``every`` (the next one is due ``every`` updates later); otherwise
    it is postponed until one of these is done, and with a ``group`` until that holds at every rank.

    A failed write does not harm earlier checkpoints. The next step warns (CheckpointWarning, once
    until one succeeds), ``last_error`` has the reason, and ``close()`` raises the first error.
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
        group: Group | None = None,
        allocate: Callable[[int], Octets] | None = None,
    ) -> None:
        """``p``: the share of the run's time that checkpoints may cost. The interval follows from
        it and from the measured cost, unless ``every`` is given: then a checkpoint is taken after
        each update whose number is a multiple of it.

        ``group``: the ranks that save together, each its part, in ``directory/rank-RANK``; all of
        them must call ``after_update``, ``save`` and ``restore``. ``max_in_flight`` copies of the
        state are kept in host memory, each from ``allocate``, or from the state's own ``allocate``
        (``TorchState``). ``keep_last`` and ``keep_every`` as in ``prune``. ``durable``: the
        durability that a checkpoint on a Monarch mount must have before older ones are removed.
        ``order``: its state is saved with every checkpoint and restored with it.

        Raises LockedError if another trainer uses the directory, CheckpointError, OSError, and
        ValueError for an invalid number.
        """
        if max_in_flight < 1 or keep_last < 1 or (every is not None and every < 1):
            raise ValueError("max_in_flight, keep_last and every must be at least 1")
        self.step = 0
        self._interval = Interval(p=p, max_in_flight=max_in_flight)
        self._every = every
        self._retention = Retention(keep_last, keep_every, durable)
        self._order = order
        self._allocate = allocate
        self._is_met = False
        # Free buffers; from the first checkpoint on they have the right size.
        self._buffers = [np.empty(0, np.uint8) for _ in range(max_in_flight)]
        self._slots = max_in_flight
        # Guards data that the threads and the training share; never held during I/O.
        self._changed = threading.Condition()
        # One thread at a time enters its checkpoint in the manifest and removes others.
        self._shelving = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._first_error: BaseException | None = None
        # The error of the newest checkpoint; None if it was saved.
        self.last_error: BaseException | None = None
        self._warning = ""
        self._failed = 0
        self._closed = False
        self._known_whole: set[str] = set()

        self._copied = threading.Event()
        self._copied.set()
        self._gate_passed = False
        # The start of the current iteration.
        self._began_s: float | None = None
        self._update_began_s = 0.0
        self._visible_s = 0.0
        self._quiet = True
        # Iterations since the last checkpoint began, and whether one was delayed since.
        self._age, self._late = 0, False

        self._group = group
        # The interval that the ranks agreed on at the last exchange.
        self._agreed = FIRST_INTERVAL
        # The checksums of this rank's parts, by name of the set, while not all ranks are known to
        # have theirs; and of complete sets, the checksums of all ranks until a manifest has them.
        self._written: dict[str, str] = {}
        self._commits: dict[str, tuple[str, ...]] = {}

        self._root = Path(directory)
        self._store = CheckpointStore(directory_of(self._root, group.rank) if group else self._root)
        self._serial = max((each.serial for each in self._store.checkpoints), default=0) + 1
        self._token = self._store.token
        for trouble in self._store.troubles:
            warnings.warn(trouble, CheckpointWarning, stacklevel=2)

    @property
    def interval(self) -> int:
        """The current number of iterations between two checkpoints."""
        if self._every:
            return self._every
        return self._agreed if self._group else self._interval.iterations

    @property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint on storage; None if there is none."""
        checkpoints = self._store.checkpoints
        return checkpoints[-1] if checkpoints else None

    def durable(self, step: int) -> Durable | None:
        """The durability of the newest checkpoint of ``step`` on a Monarch mount: ``none``,
        ``local``, ``peer`` or ``source``; None on other file systems. Raises CheckpointError if
        there is none, OSError if the mount does not report it.
        """
        names = [each.name for each in self._store.checkpoints if each.step == step]
        if not names:
            raise CheckpointError(f"there is no checkpoint of step {step}")
        return durability(self._store.directory / names[-1])

    def watch(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """Yields each batch with the number of its update, from 1.

        The time between two loops, of a validation for example, does not count for an iteration.
        """
        self._began_s, self._visible_s = time.monotonic(), 0.0
        try:
            for batch in batches:
                yield self.step + 1, batch
        finally:
            self._began_s = None

    def before_update(self) -> None:
        """Waits until the copy of the state is made; after it the weights may change."""
        self._warn()
        began_s = time.monotonic()
        self._copied.wait()
        self._update_began_s = time.monotonic()
        self._visible_s += self._update_began_s - began_s
        self._gate_passed = True

    def after_update(self, state: Callable[[], object]) -> bool:
        """Counts the update, and begins a checkpoint if one is due; returns whether it did.

        ``state()`` is then called and returns the state to save. Its arrays are copied before this
        returns, except those that only the update of the weights changes (``UpdatedOnly``, and
        those that the adapter of a framework marks so): they are copied during the next iteration.

        Raises CheckpointError if ``before_update`` was not called, if ranks are at different steps,
        or if the state needs a ``group``, TypeError for a state that a checkpoint cannot hold, and
        the errors of ``state``. A ``TorchState`` that cannot be saved raises at the first call.
        """
        now_s = time.monotonic()
        if not self._gate_passed:
            raise CheckpointError("call before_update() before each update of the weights")
        self._gate_passed = False
        if not self._is_met:
            self._meet(state)
        self._warn()
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
        self._visible_s = 0.0
        # ``state`` may be a collective call: all ranks must reach this point, or none.
        begins = self._is_due() and self._may_begin()
        if begins:
            self._begin(state, self._buffers.pop())
        with self._changed:
            self._quiet = len(self._buffers) == self._slots
        self._visible_s = time.monotonic() - now_s
        self._began_s = now_s
        return begins

    def save(self, state: object) -> Checkpoint:
        """Saves a checkpoint now, after those in flight; returns when it is on storage, at every
        rank.

        Raises OSError if it could not be written, CheckpointError if that of another rank could
        not, TypeError as ``after_update``.
        """
        self._warn()
        with self._changed:
            self._changed.wait_for(lambda: len(self._buffers) > 0)
        if self._group is not None:
            self._agree("save")
        with self._changed:
            buffer = self._buffers.pop()
        try:
            capture, checkpoint, buffer = self._capture(state, buffer)
            capture.copy(buffer, deferred=True)
            checkpoint = self._persist(capture, checkpoint, buffer)
        except BaseException as error:
            if self._group is not None and isinstance(error, Exception):
                with contextlib.suppress(CheckpointError):
                    self._agree("saved", error=f"{error}; step {self.step} is not saved")
            raise
        finally:
            self._give_back(buffer)
        if self._group is not None:
            self._agree("saved")
            checkpoint = self._record_commits(checkpoint)
        self._age, self._late = 0, False
        if self._began_s is not None:
            # This time is not part of an iteration.
            self._began_s, self._visible_s = time.monotonic(), 0.0
        return checkpoint

    def restore(self, step: int | None = None) -> Restored | None:
        """Restores the newest checkpoint that is complete at every rank, or the newest of ``step``;
        None if none was ever saved here. Sets ``step``, and the state of ``order``.

        Warns of newer checkpoints that are damaged or incomplete. Raises CheckpointError if no
        usable one is left, there is none of ``step``, or the order is of other data.
        """
        if self._group is None:
            found = newest_whole(self._store, self._root, step)
        else:
            found = newest_set(self._store, self._root, self._group, step)
        if found is None:
            return None
        checkpoint = found.checkpoint
        if not found.is_of_others:
            self._known_whole.add(checkpoint.name)
            if found.digests:
                self._commits[checkpoint.name] = found.digests
        if self._order is not None and found.facts.get("order") is not None:
            self._order.load_state_dict(found.facts["order"])
        self.step = checkpoint.step
        self._age, self._late = 0, False
        return Restored(
            checkpoint, checkpoint.step, checkpoint.epoch, checkpoint.consumed, found.state
        )

    def close(self) -> None:
        """Waits until all writes are done. Raises CheckpointError, caused by the first error, if a
        checkpoint could not be saved. May be called twice."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)
        self._closed = True
        self._store.release()
        first, self._first_error = self._first_error, None
        if first is not None:
            newest = self.newest
            kept = f"the newest is of step {newest.step}" if newest else "there is none"
            raise CheckpointError(
                f"{counted(self._failed, 'checkpoint was', 'checkpoints were')} not saved,"
                f" the first because of: {first}; {kept}"
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
            # The training has an error of its own, which must not be hidden.
            warnings.warn(str(failed), CheckpointWarning, stacklevel=2)

    def _meet(self, state: object) -> None:
        """Checks the state of the run and takes its ``allocate``, at the first update."""
        check = getattr(state, "check", None)
        if check is not None:
            check(together=self._group is not None)
        if self._allocate is None:
            self._allocate = getattr(state, "allocate", None)
        self._is_met = True

    def _is_due(self) -> bool:
        """Whether a checkpoint is due after this update; the same at every rank."""
        if self._every:
            put_off = self._group is not None and self._late
            return put_off or self.step % self._every == 0
        return self._age >= self.interval

    def _may_begin(self) -> bool:
        """Whether a buffer is free at every rank, and the checkpoint is still due."""
        if self._group is None:
            begins = bool(self._buffers)
        else:
            begins = self._agree("after_update")
            if not self._is_due():
                return False
        self._late |= not begins
        return begins

    def _agree(self, call: str, error: str = "") -> bool:
        """Exchanges messages with the other ranks; returns whether all have a free buffer."""
        assert self._group is not None
        with self._changed:
            message: dict[str, object] = {
                "free": bool(self._buffers),
                "interval": self._interval.iterations,
                "every": self._every,
                "serial": self._serial,
                "token": self._store.token,
                "written": dict(self._written),
            }
        answers = self._group.exchange(call, self.step, error=error, **message)
        if {other["every"] for other in answers} != {self._every}:
            raise CheckpointError("the ranks have different values of `every`")
        with self._changed:
            self._agreed = max(other["interval"] for other in answers)
            self._serial = max(other["serial"] for other in answers)
            self._token = answers[0]["token"]
            written = [other["written"] for other in answers]
            for name in [n for n in self._written if all(n in other for other in written)]:
                self._commits[name] = tuple(other[name] for other in written)
                # An earlier set with a missing part will never be complete.
                for older in [n for n in self._written if serial_of(n) <= serial_of(name)]:
                    del self._written[older]
        return all(other["free"] for other in answers)

    def _record_commits(self, checkpoint: Checkpoint) -> Checkpoint:
        with self._shelving:
            with self._changed:
                commits, self._commits = self._commits, {}
            self._store.commit(commits)
            self._thin_out()
        return replace(checkpoint, digests=commits[checkpoint.name])

    def _begin(self, state: Callable[[], object], buffer: Octets) -> None:
        try:
            capture, checkpoint, buffer = self._capture(state(), buffer)
        except BaseException:
            self._give_back(buffer)
            raise
        self._age = 0
        work = deque([(capture, checkpoint, buffer)])
        name = f"checkpoint-{checkpoint.step}"
        thread = threading.Thread(target=self._in_background, args=(work,), name=name)
        try:
            self._copied.clear()
            with self._changed:
                self._interval.begun(late=self._late)
                self._threads.add(thread)
            self._late = False
            thread.start()
        except BaseException:
            # A limit of threads or of memory is reached, or a signal handler has raised, perhaps
            # after the start: then the thread has the work, or finds none.
            with contextlib.suppress(IndexError):
                work.pop()
                with self._changed:
                    self._threads.discard(thread)
                self._copied.set()
                self._give_back(buffer)
            raise

    def _in_background(self, work: deque[tuple[Capture, Checkpoint, Octets]]) -> None:
        try:
            capture, checkpoint, buffer = work.pop()
        except IndexError:
            return
        try:
            began_s = time.monotonic()
            try:
                capture.copy(buffer, deferred=True)
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
                if self.last_error is None:
                    self._warning = f"a checkpoint was not saved: {error}; the next is tried"
                self.last_error = error
                self._first_error = self._first_error or error
                self._failed += 1
        finally:
            self._give_back(buffer)
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _capture(self, state: object, buffer: Octets) -> tuple[Capture, Checkpoint, Octets]:
        """Captures the state in ``buffer``, or in a larger one, without the deferred arrays. Its
        entry lacks the values that are known after the write."""
        if self._closed:
            raise CheckpointError("this Checkpointer is closed")
        order = None if self._order is None else self._order.state
        with self._changed:
            serial = self._serial
            self._serial += 1
        facts: dict[str, Any] = {
            "step": self.step,
            "epoch": order.epoch if order else 0,
            "consumed": order.consumed if order else 0,
            "saved_ns": time.time_ns(),
            "serial": serial,
            "rank": self._group.rank if self._group else 0,
            "ranks": self._group.size if self._group else 1,
        }
        checkpoint = Checkpoint(name_of(self.step, serial, self._token), size=0, xxh3="", **facts)
        capture = Capture(state, {**facts, "order": order.to_json() if order else None})
        if capture.is_sharded and self._group is None:
            raise CheckpointError(
                "the state belongs to several ranks, and each has a part of its arrays",
                hint="every rank needs a Checkpointer(..., group=monarch.frameworks.torch.group())",
            )
        if len(buffer) < capture.nbytes:
            buffer = (self._allocate or allocate)(capture.nbytes)
        capture.copy(buffer, deferred=False)
        return capture, checkpoint, buffer

    def _persist(self, capture: Capture, checkpoint: Checkpoint, buffer: Octets) -> Checkpoint:
        pieces = capture.pieces(buffer, PIECE_BYTES)
        part, size, xxh3 = self._store.stage(checkpoint.name, pieces, end=trailer)
        written = replace(checkpoint, size=size, xxh3=xxh3)
        with self._shelving:
            with self._changed:
                commits, self._commits = self._commits, {}
            try:
                self._store.publish(part, written, commits)
            except BaseException:
                with self._changed:
                    self._commits = {**commits, **self._commits}
                raise
            self.last_error = None
            if self._group is not None:
                with self._changed:
                    self._written[written.name] = written.xxh3
                    # A set is given up if another rank could not save its part.
                    while len(self._written) > _MOST_SETS + self._slots:
                        del self._written[next(iter(self._written))]
            self._thin_out()
        return written

    def _thin_out(self) -> None:
        try:
            self._store.thin_out(self._retention, self._known_whole)
        except OSError as error:
            self._warning = f"old checkpoints were not removed: {error}; the next does it"

    def _give_back(self, buffer: Octets) -> None:
        with self._changed:
            self._buffers.append(buffer)
            self._changed.notify_all()

    def _warn(self) -> None:
        """Warns, in the trainer's thread, of failures in other threads."""
        if self._warning:
            warning, self._warning = self._warning, ""
            warnings.warn(warning, CheckpointWarning, stacklevel=3)
