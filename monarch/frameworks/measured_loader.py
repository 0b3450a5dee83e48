"""Measures one run of a training script at its loader: see ``monarch analyze run``.

The training takes the time from a batch to the request for the next one, so the intervals between
two batches are measured, in windows, with the fetches and the preparation that they wait for. Then
batches are taken without the training, which gives the rate of the loader alone.
"""

from __future__ import annotations

import copy
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any, NamedTuple

from monarch.analysis.plan import WINDOWS, Plan, ProcessId, RunReport, encode
from monarch.analysis.stalls import agree
from monarch.control.registry import process_started
from monarch.errors import MonarchError
from monarch.frameworks.job_limits import JobLimits
from monarch.posix.files import closing_fd
from monarch.posix.processes import process_space

# Batches that are kept for the run on batches in memory.
_KEPT = 8
# How long a process may take to end when its analysis has ended.
_GRACE_S = 0.5


class Measured(SystemExit):
    """The run is measured, so its process ends."""

    def __init__(self) -> None:
        super().__init__(0)


class _Batch(NamedTuple):
    """A batch, and its place in the pass over the loader."""

    place: int
    batch: Any


class MeasuredLoader:
    """Yields the batches of ``loader`` while ``plan`` is carried out, then ends the process."""

    def __init__(self, loader: Any, plan: Plan) -> None:
        self._loader = loader
        self._plan = plan
        self._limits: JobLimits | None = None
        self._is_over = False
        # Batches that were taken from the loader.
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while this object is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan
        if self._is_over:
            raise Measured
        limits = self._limit()
        skipped, before, taken = self._skipped(), None, 0
        batches = self._replayed() if plan.phase == "synthetic" else self._passes(skipped)
        clock = _Clock(plan.iterations, plan.most_iterations, _workers(self._loader) or 1)
        for place, batch in batches:
            if clock.tick(counts=place >= skipped):
                break
            if clock.began and before is None:
                before, taken = limits.counts(), self._taken
            yield batch
        train_s, load_s = clock.windows(), []
        if plan.phase in ("cached", "real"):
            load_s = self._drained(batches, skipped, clock.window)
        after = limits.counts()
        hits, misses, nbytes = (b - a for a, b in zip(before or after, after, strict=True))
        report = RunReport(
            window=clock.window,
            train_s=train_s,
            load_s=load_s,
            hits=hits,
            misses=misses,
            source_bytes=nbytes,
            batches=self._taken - taken,
            workers=_workers(self._loader),
            in_stages=type(self._loader).__module__.partition(".")[0] == "tensorflow",
            epoch_batches=_length(self._loader),
        )
        _write(Path(plan.report), encode(report))
        self._is_over = True
        raise Measured

    def _limit(self) -> JobLimits:
        """Begins the limits once, before the loader opens its first file."""
        if self._limits is None:
            self._limits = JobLimits(self._plan.mountpoint)
            self._limits.limit(self._plan.share, self._plan.source_limit)
            analysis = self._plan.analysis
            if analysis is not None and analysis.space == process_space():
                args = analysis, self._limits
                threading.Thread(target=_end_with, args=args, daemon=True).start()
        return self._limits

    def _skipped(self) -> int:
        """The batches of a pass that are not measured: the queue of ready ones fills meanwhile."""
        length, in_flight = _length(self._loader), _in_flight(self._loader)
        queue = in_flight + 1 if length is None else min(in_flight + 1, length // 2)
        return max(self._plan.warmup, queue)

    def _passes(self, skipped: int) -> Iterator[_Batch]:
        """The batches of one pass over the loader after the other."""
        while True:
            place = -1
            for place, batch in enumerate(self._loader):
                self._taken += 1
                yield _Batch(place, batch)
            if place < 0 and self._taken:
                raise ValueError(
                    f"the loader gave {self._taken} batches once, and then none: it must begin"
                    " again, or have more; give monarch analyze run fewer --iters and --most-iters"
                )
            if place <= skipped:
                raise ValueError(
                    f"the loader ended after {place + 1} batches, which are too few to measure;"
                    " give monarch analyze run a smaller --warmup, or a loader with more batches"
                )

    def _replayed(self) -> Iterator[_Batch]:
        """The first batches of the loader again and again. Each is a copy of its containers: a
        script may take items out of them."""
        kept: list[Any] = []
        source = iter(self._loader)
        for batch in source:
            kept.append(batch)
            if len(kept) == _KEPT:
                break
        # Its workers end.
        del source
        if not kept:
            raise ValueError("the loader has no batches")
        for place, batch in zip(count(), chain.from_iterable(repeat(kept)), strict=False):
            yield _Batch(place, _copied(batch))

    def _drained(self, batches: Iterable[_Batch], skipped: int, window: int) -> list[float]:
        """The durations of windows of batches that are taken without the training."""
        clock = _Clock(window * WINDOWS)
        # All workers begin a pass together, and have their first batches ready together.
        begun = min(skipped, max(1, _workers(self._loader) or 0))
        # The first ones were prepared while the last step of the training ran.
        for taken, batch in enumerate(batches):
            if clock.tick(counts=taken > skipped and batch.place >= begun):
                break
        return clock.windows()


class MeasuredIterator(MeasuredLoader):
    """The same of a loader that is an iterator, so a script may ask it for the next batch."""

    def __init__(self, loader: Any, plan: Plan) -> None:
        super().__init__(loader, plan)
        self._begun = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._begun)


def measured(loader: Any, plan: Plan) -> MeasuredLoader:
    """The loader whose batches are measured."""
    # The command explains why it waits while there is none. Other nodes have no such directory.
    with suppress(OSError):
        Path(plan.seen).touch()
    kind = MeasuredIterator if hasattr(loader, "__next__") else MeasuredLoader
    return kind(loader, plan)


class _Clock:
    """The intervals between ``count`` batches, in ``WINDOWS`` windows. Workers that began together
    have their batches ready together, so a window has whole rounds of them if it is long enough.

    While the windows do not agree they become twice as long, as far as ``most`` batches allow."""

    def __init__(self, count: int, most: int = 0, workers: int = 1) -> None:
        window = count // WINDOWS
        self.window = window - window % workers if workers < window else window
        self._most = most
        self._intervals: list[float] = []
        self._last_s = 0.0
        self.began = False

    def tick(self, *, counts: bool) -> bool:
        """Called at each batch. ``counts``: the interval since the last one is measured. Returns
        whether all are measured."""
        if len(self._intervals) % self.window == 0:
            _wait_for_gpu()
        now = time.perf_counter()
        if counts and self._last_s:
            if self.began:
                self._intervals.append(now - self._last_s)
            self.began = True
        self._last_s = now
        measured = len(self._intervals)
        if measured < self.window * WINDOWS:
            return False
        if 2 * measured > self._most or agree(self.windows()):
            return True
        self.window *= 2
        return False

    def windows(self) -> list[float]:
        """The durations of the windows in seconds."""
        size = self.window
        return [sum(self._intervals[i : i + size]) for i in range(0, len(self._intervals), size)]


def _wait_for_gpu() -> None:
    """The training only gives a GPU its work: at the end of a window the GPU must have done it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _copied(batch: Any) -> Any:
    if isinstance(batch, dict | list):
        return copy.copy(batch)
    return batch


def _workers(loader: Any) -> int | None:
    workers = getattr(loader, "num_workers", None)
    return workers if isinstance(workers, int) else None


def _in_flight(loader: Any) -> int:
    """The batches that a loader of PyTorch has ready, or under way, at most."""
    return (_workers(loader) or 0) * (getattr(loader, "prefetch_factor", None) or 0)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:
        # Loaders without a length raise TypeError, NotImplementedError or RuntimeError.
        return None


def _write(path: Path, text: str) -> None:
    """Only the first rank of a job reports."""
    # An empty variable is one that is not set, as by RANK=$SLURM_PROCID without Slurm.
    ranks = map(os.environ.get, ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    if any(rank not in (None, "", "0") for rank in ranks):
        return
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def _end_with(analysis: ProcessId, limits: JobLimits) -> None:
    """Ends the process group of this process when the command that analyses it has ended."""
    try:
        _wait_for_end(analysis)
    except OSError:
        # Linux before 5.3, or a filter of system calls: the job continues until it is measured.
        return
    # The mount may have gone; the limits end with this process in any case.
    with suppress(MonarchError):
        limits.limit(1.0, 0)
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _wait_for_end(process: ProcessId) -> None:
    """Raises OSError if that is not possible."""
    try:
        opened = closing_fd(os.pidfd_open(process.number))
    except ProcessLookupError:
        return
    with opened as fd:
        # It is None for a zombie, and if /proc hides the process.
        if process_started(process.number) in (process.started, None):
            ended = select.poll()
            ended.register(fd, select.POLLIN)
            ended.poll()
