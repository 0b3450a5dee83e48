"""Batches that several training jobs on one node prepare together, each batch once.

In a search for hyper-parameters J jobs read the same data and prepare it in the same way. With an
area of one name each job prepares a J-th of the batches, ahead of its training, and gets the others
from the other jobs, as read-only views of shared memory::

    area = StagingArea("resnet-search", jobs=4)
    for epoch in range(90):
        for batch in area.epoch(epoch, len(batches), lambda b: prepare(epoch, b)):
            train(batch["images"], batch["labels"])

The broker, a process that the first job starts, distributes the work (``staging_table.py``). It has
no names in ``/dev/shm``: memory without a user is freed, in whatever way its jobs have ended.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from monarch.datasets.staging_batch import Views, load, store
from monarch.datasets.staging_link import Link, Lost, Place, Unusable
from monarch.datasets.staging_messages import (
    MOST_COUNT,
    MOST_DEPTH,
    MOST_JOBS,
    MOST_STALL_S,
    Answer,
    Ask,
    Terms,
)
from monarch.datasets.staging_socket import default_directory
from monarch.datasets.staging_table import Kind
from monarch.datasets.staging_worker import Produce, Retired, Task, Workers
from monarch.posix.files import closing_fd
from monarch.text import counted

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MOST_WORKERS = 256


class StagingWarning(UserWarning):
    """The job continues, but it prepares more batches itself."""


@dataclass(frozen=True, slots=True)
class StagingReport:
    """The state of the area at the last reply of the broker: the number of jobs, of batches that it
    keeps, the largest such number, and the number of batches that were published."""

    jobs: int
    kept: int
    most_kept: int
    published: int


class StagingArea:
    """One of ``jobs`` jobs of a user on this node that prepare batches together.

    ``name`` is the same in these jobs, and only in these. At most ``depth`` prepared batches are
    kept for jobs that have not used them. ``depth`` and ``stall_timeout`` are those of the first
    job. A process that others wait for, and that prepares or asks for no batch for
    ``stall_timeout`` seconds, is not waited for any more. At the beginning the jobs wait until
    ``jobs`` of them are there, also ``stall_timeout`` seconds at most. While a job works alone, a
    worker that is silent for five times as long, and for a minute, is replaced.

    ``workers`` processes of each job prepare batches ahead. They are forked for each epoch, as
    those of PyTorch's DataLoader. With 0 a job prepares batches itself, while it waits for one.
    ``fingerprint`` says what is in the batches, for example the seed, the batch size and the
    augmentations: a job with another one than the others is refused. ``directory`` is a private
    directory for the socket, the same in all jobs.

    The object is for one thread. A forked process is another job. Raises ValueError.
    """

    def __init__(
        self,
        name: str,
        *,
        jobs: int = 4,
        workers: int = 1,
        depth: int = 16,
        stall_timeout: float = 60.0,
        fingerprint: str = "",
        directory: str | Path | None = None,
    ) -> None:
        if not _NAME.fullmatch(name) or name.endswith((".lock", ".jobs")):
            raise ValueError(f"the name of a staging area is one plain word, not {name!r}")
        for what, number, least, most in (
            ("jobs", jobs, 1, MOST_JOBS),
            ("workers", workers, 0, _MOST_WORKERS),
            ("depth", depth, 1, MOST_DEPTH),
        ):
            if not least <= number <= most:
                raise ValueError(f"{what} must be from {least} to {most}, not {number}")
        if not 0.001 <= stall_timeout <= MOST_STALL_S:
            raise ValueError(f"stall_timeout is at least 1 ms, not {stall_timeout}")
        where = default_directory() if directory is None else Path(directory)
        self._place = Place(where, name, jobs)
        content = int.from_bytes(sha256(fingerprint.encode()).digest()[:8], "little")
        # The number of batches is that of the first epoch.
        self._terms = Terms(0, depth, stall_timeout, content)
        self._worker_count = workers
        self._workers: Workers | None = None
        self._retired = Retired()
        self._link = Link(self._place)
        self._process = os.getpid()
        # This job works alone before this position.
        self._alone_until = 0
        self.prepared = 0
        self.expulsions = 0

    @property
    def report(self) -> StagingReport:
        """What the broker has reported last."""
        answer = self._link.answer
        if answer is None:
            return StagingReport(0, 0, 0, 0)
        return StagingReport(answer.jobs, answer.kept, answer.most_kept, answer.published)

    def epoch(self, number: int, count: int, produce: Produce) -> Iterator[Views]:
        """The batches 0 to ``count`` - 1 of epoch ``number``, in this order, each once.

        ``produce(b)`` prepares batch b of this epoch: a dict of numpy arrays, or bytes. It gives
        the same batch in every process. The batches are read-only views: arrays by name, or a
        memoryview. They are valid as long as they are kept, and take memory as long.

        Raises what ``produce`` raises, ValueError if ``count`` differs from that of earlier epochs,
        MonarchError if the area cannot be used, and OSError. The epoch can then be begun again.
        Warns with StagingWarning if the job was not waited for any more, or has lost the broker.
        """
        if not 0 <= number < MOST_COUNT or not 1 <= count < MOST_COUNT:
            raise ValueError(f"epoch {number} of {count} batches")
        if self._terms.batches not in (0, count):
            raise ValueError(f"an epoch has {self._terms.batches} batches, not {count}")
        self._terms = self._terms._replace(batches=count)
        return self._batches(Task(self._place, self._terms, number * count, produce))

    def _batches(self, task: Task) -> Iterator[Views]:
        self._notice_fork()
        if self._workers is not None:
            self._retire(self._workers)
        workers = self._workers = Workers(task, self._link, self._worker_count)
        try:
            for position in range(task.first, task.end):
                yield self._batch(position, task, workers)
            self._link.send(Ask.MOVE, task.end)
        finally:
            self._retire(workers)

    def close(self) -> None:
        """Leaves the area; the other jobs do not wait for this one. The next epoch joins again."""
        self._notice_fork()
        if self._workers is not None:
            self._retire(self._workers)
        self._retired.end()
        self._link.close()

    def __del__(self) -> None:
        # The constructor may have refused its arguments.
        if hasattr(self, "_process") and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> StagingArea:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one batch ---------------------------------------------------------------------------------

    def _batch(self, position: int, task: Task, workers: Workers) -> Views:
        self._retired.forget_ended()
        while position >= self._alone_until:
            try:
                answer, fd = self._ask(position, workers)
            except Lost:
                continue
            except Unusable as error:
                self._link.close()
                self._work_alone(task.end, str(error))
                continue
            if answer.kind == Kind.READY:
                with closing_fd(fd):
                    return load(fd)
            if answer.kind == Kind.ALONE:
                break
            if answer.kind == Kind.EXPELLED:
                self._link.close()
                self._note_expulsions(1)
            elif position <= answer.position < task.end:
                fd = self._prepare(answer.position, position, task)
                self._link.publish(answer.position, fd)
                if answer.position == position:
                    return load(fd)
            else:
                raise self._link.invalid("it asks for a batch of another epoch")
        if self._worker_count:
            fd = workers.prepare(position)
            self._note_work(workers)
        else:
            fd = self._prepare(position, position, task)
        with closing_fd(fd):
            return load(fd)

    def _ask(self, position: int, workers: Workers) -> tuple[Answer, int]:
        """The reply to the wish for a batch, and a descriptor or -1."""
        self._notice_fork()
        self._link.open(self._terms, Ask.JOIN, position)
        workers.start()
        try:
            self._link.send(Ask.AWAIT if self._worker_count else Ask.WANT, position)
            while True:
                if not self._link.wait(workers.channels):
                    workers.handle()
                    workers.start()
                    self._note_work(workers)
                elif (received := self._link.receive()) is not None:
                    return received
        except (Lost, Unusable):
            raise
        except BaseException:
            # The reply that comes later would be taken for that to the next wish.
            self._link.disconnect()
            raise

    def _prepare(self, number: int, position: int, task: Task) -> int:
        """A descriptor of a batch, while the job waits for the one at ``position``."""
        try:
            fd = store(task.produce(number - task.first))
        except BaseException:
            # Another job may prepare the batch that this one has claimed.
            self._link.send(Ask.MOVE, position)
            raise
        self.prepared += 1
        return fd

    # -- other processes ---------------------------------------------------------------------------

    def _notice_fork(self) -> None:
        """In a forked process the connection and the workers are those of the first one."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._link.close()
        self._link = Link(self._place)
        self._retired = Retired()
        self._workers = None

    def _retire(self, workers: Workers) -> None:
        if self._process != os.getpid():
            return
        self._retired.add(workers)
        self._note_work(workers)

    def _note_work(self, workers: Workers) -> None:
        expulsions, workers.expulsions = workers.expulsions, 0
        self.prepared += workers.published
        workers.published = 0
        if expulsions:
            self._note_expulsions(expulsions)
        replaced, workers.replaced = workers.replaced, 0
        if replaced:
            what = (
                f"{counted(replaced, 'process', 'processes')} that prepared batches for the staging"
                f" area {self._place.name!r} sent nothing for {workers.most_silence_s:g} seconds,"
                " and had to be replaced"
            )
            warnings.warn(what, StagingWarning, stacklevel=4)

    def _work_alone(self, end: int, why: str) -> None:
        self._alone_until = end
        what = f"the staging area {self._place.name!r} is not used in the rest of this epoch: {why}"
        warnings.warn(what, StagingWarning, stacklevel=4)

    def _note_expulsions(self, count: int) -> None:
        self.expulsions += count
        what = (
            f"the other jobs of the staging area {self._place.name!r} had to wait longer than the"
            " stall timeout for this job, and have continued without it"
        )
        warnings.warn(what, StagingWarning, stacklevel=4)
