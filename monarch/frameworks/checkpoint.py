"""Checkpoints beside the training: copied behind one iteration, written behind the next ones.

Two phases, as in CheckFreq (Mohan, Phanishayee and Chidambaram, FAST 2021): a thread copies the
state into host memory while the next iteration goes on, and the gate ``before_update`` holds the
update of the weights until that is done; then the thread writes it to storage. ``interval.py`` says
how often, ``shelf.py`` how it is written, ``layout.py`` what a state may be, ``group.py`` what
several ranks tell each other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from monarch.errors import CheckpointError
from monarch.frameworks.group import Group, PartSet, directory_of, ranks_in, sets_of
from monarch.frameworks.interval import FIRST_INTERVAL, Interval
from monarch.frameworks.layout import Capture, Octets, Parts, UpdatedOnly, trailer
from monarch.frameworks.shelf import (
    PIECE_BYTES,
    Checkpoint,
    Durable,
    Listed,
    Shelf,
    Verified,
    durability,
    entry_of,
    list_checkpoints,
    load,
    name_of,
    prune,
    serial_of,
    verify,
)
from monarch.order import ResumableSampler

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

# Of so many sets that may not be complete yet the ranks tell each other.
_MOST_TOLD = 8


class CheckpointWarning(RuntimeWarning):
    """A checkpoint was not saved, or one that was saved cannot be used. The training goes on."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A state that was saved after ``step`` updates. The order of its data is set already.

    ``state`` is a ``Parts`` if another number of ranks saved it."""

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

    All calls come from one thread. Of several ranks one has a Checkpointer, or all have one of the
    same directory and a ``group``: then they save and restore the same steps.

    Training waits for no storage: a checkpoint that is due while ``max_in_flight`` are being
    written is left out with ``every`` (the next one is due ``every`` updates later), otherwise put
    off until one of these is done, and with a ``group`` put off until that is so at every rank.

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
        group: Group | None = None,
        allocate: Callable[[int], Octets] | None = None,
    ) -> None:
        """``p``: the share of the run's time that checkpoints may cost; from it, and from what they
        are seen to cost, follows how often they are taken, unless ``every`` says so: after each
        update whose number is a multiple of it.

        ``group``: the ranks that save together, each its part, in ``directory/rank-RANK``.
        ``after_update``, ``save`` and ``restore`` are then called by all of them.
        ``max_in_flight`` copies of the state are kept in host memory, each from ``allocate``, or
        from what the state of the run has under that name (``TorchState``).
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
        self._is_met = False
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

        self._group = group
        # Agreed between the ranks when they last asked each other.
        self._agreed = FIRST_INTERVAL
        # The checksums of this rank's parts of sets, by name, that not all ranks are known to have;
        # and of sets that all have, of all ranks, until a manifest has them.
        self._written: dict[str, str] = {}
        self._commits: dict[str, tuple[str, ...]] = {}

        self._root = Path(directory)
        self._shelf = Shelf(directory_of(self._root, group.rank) if group else self._root)
        self._serial = self._shelf.next_serial()
        self._token = self._shelf.token
        for trouble in self._shelf.troubles:
            warnings.warn(trouble, CheckpointWarning, stacklevel=2)

    @property
    def interval(self) -> int:
        """How many iterations lie between two checkpoints now."""
        if self._every:
            return self._every
        return self._agreed if self._group else self._interval.iterations

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
        ``local`` or ``source``; None on any other. Raises CheckpointError if there is none, OSError
        if the mount cannot say it.
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

        Raises CheckpointError if ``before_update`` was not called, ranks are at different steps, or
        the state needs a ``group``, TypeError for a state that a checkpoint cannot hold, and what
        ``state`` raises. A ``TorchState`` that no checkpoint can hold is told at the first call.
        """
        now_s = time.monotonic()
        if not self._gate_passed:
            raise CheckpointError("before_update() comes before each update of the weights")
        self._gate_passed = False
        if not self._is_met:
            self._meet(state)
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
        self._visible_s = 0.0
        # With several ranks ``state`` may call them all together: all come here, or none.
        begins = self._is_due() and self._may_begin()
        if begins:
            self._begin(state, self._buffers.pop())
        with self._changed:
            self._quiet = len(self._buffers) == self._slots
        self._visible_s = time.monotonic() - now_s
        self._began_s = now_s
        return begins

    def save(self, state: object) -> Checkpoint:
        """A checkpoint now, after those in flight; returns when it is on storage, at every rank.

        Raises OSError if it could not be written, CheckpointError if another rank's could not,
        TypeError as ``after_update``.
        """
        self._tell()
        with self._changed:
            self._changed.wait_for(lambda: len(self._buffers) > 0)
        if self._group is not None:
            self._agree("save")
        with self._changed:
            buffer = self._buffers.pop()
        try:
            capture, checkpoint = self._capture(state)
            buffer = self._fitting(buffer, capture)
            capture.copy_now(buffer)
            capture.copy_deferred(buffer)
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
            # No part of an iteration.
            self._began_s, self._visible_s = time.monotonic(), 0.0
        return checkpoint

    def restore(self, step: int | None = None) -> Restored | None:
        """The newest checkpoint that is whole, at every rank, or the newest of ``step``; None if
        none was ever saved here. Sets ``step``, and the state of ``order``.

        Warns of those that are newer and damaged, or not complete. Raises CheckpointError if none
        is left, there is none of ``step``, or the order is one of other data.
        """
        if self._group is not None:
            return self._restore_set(self._group, step)
        wanted = [c for c in self._shelf.checkpoints if step is None or c.step == step]
        if not wanted and (others := ranks_in(self._root)):
            raise CheckpointError(
                f"{os.fspath(self._root)!r} has the checkpoints of {len(others)} ranks",
                hint="give the Checkpointer of each rank the group; it may be another number",
            )
        for checkpoint in reversed(wanted):
            try:
                facts, state = load(self._shelf.directory, checkpoint)
            except CheckpointError as error:
                warnings.warn(f"{error}; the one before is tried", CheckpointWarning, stacklevel=2)
                continue
            self._believed.add(checkpoint.name)
            return self._taken_up(checkpoint, facts, state)
        if not wanted and step is None:
            return None
        raise self._nothing_left(step)

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

    def _restore_set(self, group: Group, step: int | None) -> Restored | None:
        """What all ranks can restore, agreed between them."""
        told = group.exchange("restore", step, parts=[*map(asdict, self._parts(group))])
        parts = [entry_of(part) for each in told for part in each["parts"]]
        sets = [each for each in sets_of(parts) if step is None or each.step == step]
        for each in sets:
            trouble, read = "", None
            if not each.is_complete:
                trouble = f"{each.name}: not all of its {each.ranks} parts are there"
            else:
                try:
                    read = self._read_set(group, each)
                except CheckpointError as error:
                    trouble = str(error)
            answers = group.exchange("restore", each.name, trouble=trouble)
            troubles = [f"rank {r}: {a['trouble']}" for r, a in enumerate(answers) if a["trouble"]]
            if troubles or read is None:
                warnings.warn(
                    f"{troubles[0]}; the one before is tried", CheckpointWarning, stacklevel=3
                )
                continue
            if each.ranks == group.size:
                self._believed.add(each.name)
                self._commits[each.name] = tuple(each.parts[r].xxh3 for r in range(each.ranks))
            return self._taken_up(each.parts[min(group.rank, each.ranks - 1)], *read)
        if step is None and not any(each.digests for each in sets):
            # None was ever complete, as far as anybody knows.
            return None
        raise self._nothing_left(step)

    def _parts(self, group: Group) -> Iterator[Checkpoint]:
        """Those of this rank; and by rank 0 those of ranks that are no more."""
        yield from self._shelf.checkpoints
        if group.rank:
            return
        for rank in [rank for rank in ranks_in(self._root) if rank >= group.size]:
            for listed in list_checkpoints(directory_of(self._root, rank)):
                yield listed.checkpoint

    def _read_set(self, group: Group, found: PartSet) -> tuple[dict[str, Any], Any]:
        """The facts and the state of this rank. Raises CheckpointError."""
        if found.ranks == group.size:
            return load(self._shelf.directory, found.parts[group.rank])
        read = [
            load(directory_of(self._root, rank), found.parts[rank], mapped=True)
            for rank in range(found.ranks)
        ]
        facts = read[min(group.rank, found.ranks - 1)][0]
        return facts, Parts(tuple(state for _, state in read), group.rank, group.size)

    def _taken_up(self, checkpoint: Checkpoint, facts: dict[str, Any], state: Any) -> Restored:
        if self._order is not None and facts.get("order") is not None:
            self._order.load_state_dict(facts["order"])
        self.step = checkpoint.step
        self._age, self._late = 0, False
        return Restored(checkpoint, checkpoint.step, checkpoint.epoch, checkpoint.consumed, state)

    def _nothing_left(self, step: int | None) -> CheckpointError:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        whole = "whole" if self._group is None else "whole at every rank"
        return CheckpointError(
            f"{which} in {os.fspath(self._root)!r} is {whole}",
            hint="bring one back from elsewhere, or begin anew in another directory",
        )

    def _meet(self, state: object) -> None:
        """What there is to know of the state of the run, at the first update."""
        check = getattr(state, "check", None)
        if check is not None:
            check(together=self._group is not None)
        if self._allocate is None:
            self._allocate = getattr(state, "allocate", None)
        self._is_met = True

    def _is_due(self) -> bool:
        """Of this update, by what every rank knows."""
        if self._every:
            put_off = self._group is not None and self._late
            return put_off or self.step % self._every == 0
        return self._age >= self.interval

    def _may_begin(self) -> bool:
        """Whether there is room for the copy, at every rank; and it is still due by all."""
        if self._group is None:
            begins = bool(self._buffers)
        else:
            begins = self._agree("after_update")
            if not self._is_due():
                return False
        self._late |= not begins
        return begins

    def _agree(self, call: str, error: str = "") -> bool:
        """Ask the other ranks: whether all have room; what else they tell is noted."""
        assert self._group is not None
        with self._changed:
            told: dict[str, object] = {
                "free": bool(self._buffers),
                "interval": self._interval.iterations,
                "every": self._every,
                "serial": self._serial,
                "token": self._shelf.token,
                "written": dict(self._written),
            }
        heard = self._group.exchange(call, self.step, error=error, **told)
        if {other["every"] for other in heard} != {self._every}:
            raise CheckpointError("the ranks have different numbers for `every`")
        with self._changed:
            self._agreed = max(other["interval"] for other in heard)
            self._serial = max(other["serial"] for other in heard)
            self._token = heard[0]["token"]
            written = [other["written"] for other in heard]
            for name in [n for n in self._written if all(n in other for other in written)]:
                self._commits[name] = tuple(other[name] for other in written)
                # A set before it of which a part is missing never gets complete.
                for older in [n for n in self._written if serial_of(n) <= serial_of(name)]:
                    del self._written[older]
        return all(other["free"] for other in heard)

    def _record_commits(self, checkpoint: Checkpoint) -> Checkpoint:
        with self._shelving:
            with self._changed:
                commits, self._commits = self._commits, {}
            self._shelf.commit(commits)
            self._thin_out()
        return replace(checkpoint, digests=commits[checkpoint.name])

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
            name=name_of(self.step, serial, self._token),
            size=0,
            xxh3="",
            step=self.step,
            epoch=order.epoch if order else 0,
            consumed=order.consumed if order else 0,
            saved_ns=time.time_ns(),
            serial=serial,
            rank=self._group.rank if self._group else 0,
            ranks=self._group.size if self._group else 1,
        )
        facts = {
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            "consumed": checkpoint.consumed,
            "saved_ns": checkpoint.saved_ns,
            "serial": serial,
            "rank": checkpoint.rank,
            "ranks": checkpoint.ranks,
            "order": order.to_json() if order else None,
        }
        capture = Capture(state, facts)
        if capture.is_sharded and self._group is None:
            raise CheckpointError(
                "the state is one of several ranks, each of which has a part of its arrays",
                hint="every rank needs a Checkpointer(..., group=monarch.frameworks.torch.group())",
            )
        return capture, checkpoint

    def _fitting(self, buffer: Octets, capture: Capture) -> Octets:
        if len(buffer) >= capture.nbytes:
            return buffer
        return (self._allocate or allocate)(capture.nbytes)

    def _persist(self, capture: Capture, checkpoint: Checkpoint, buffer: Octets) -> Checkpoint:
        pieces = capture.pieces(buffer, PIECE_BYTES)
        part, size, xxh3 = self._shelf.stage(checkpoint.name, pieces, end=trailer)
        written = replace(checkpoint, size=size, xxh3=xxh3)
        with self._shelving:
            with self._changed:
                commits, self._commits = self._commits, {}
            try:
                self._shelf.publish(part, written, commits)
            except BaseException:
                with self._changed:
                    self._commits = {**commits, **self._commits}
                raise
            self._last_error = None
            if self._group is not None:
                with self._changed:
                    self._written[written.name] = written.xxh3
                    # Sets of which another rank could not save its part are given up.
                    while len(self._written) > _MOST_TOLD + self._slots:
                        del self._written[next(iter(self._written))]
            self._thin_out()
        return written

    def _thin_out(self) -> None:
        try:
            self._shelf.thin_out(
                keep_last=self._keep_last,
                keep_every=self._keep_every,
                durable=self._durable,
                believed=self._believed,
            )
        except OSError as error:
            self._untold = f"old checkpoints were not removed: {error}; the next does it"

    def _give_back(self, buffer: Octets) -> None:
        with self._changed:
            self._buffers.append(buffer)
            self._changed.notify_all()

    def _tell(self) -> None:
        """Warn, in the trainer's own thread, of what failed in another."""
        if self._untold:
            untold, self._untold = self._untold, ""
            warnings.warn(untold, CheckpointWarning, stacklevel=3)
