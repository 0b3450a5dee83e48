"""Batches that several training jobs on one node prepare together, each batch once.

In a search for hyper-parameters J jobs read the same data and prepare it in the same way. With an
area of one name each job prepares a J-th of the batches, and gets the others from the other jobs,
as read-only views of shared memory::

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
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from monarch.datasets.staging_batch import Batch, Views, load, store
from monarch.datasets.staging_messages import (
    MOST_COUNT,
    MOST_DEPTH,
    MOST_JOBS,
    MOST_STALL_S,
    REFUSED,
    Answer,
    Ask,
    MessageError,
    Request,
    decode_answer,
    receive,
)
from monarch.datasets.staging_socket import connect, default_directory
from monarch.datasets.staging_table import Kind
from monarch.errors import MonarchError
from monarch.posix.files import closing_fd

Produce = Callable[[int], Batch]

# As many times in succession the broker may end before a job works alone for one epoch.
_MOST_LOSSES = 5
# The broker sends to a job that waits at least twice in a stall timeout. A broker that is silent
# for this many stall timeouts, and for this many seconds, does not answer any more.
_SILENCE = 2.0
_LEAST_SILENCE_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class StagingWarning(UserWarning):
    """The job continues, but it prepares more batches itself."""


class _Lost(Exception):
    """The connection to the broker has ended."""


class _Unusable(Exception):
    """No broker can be used now; the text says why."""


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
    job. A job that others wait for, and that prepares or asks for no batch for ``stall_timeout``
    seconds, is not waited for any more. At the beginning the jobs wait until ``jobs`` of them are
    there, also ``stall_timeout`` seconds at most. ``directory`` is a private directory for the
    socket, the same in all jobs.

    The object is for one thread. A forked process is another job. Raises ValueError.
    """

    def __init__(
        self,
        name: str,
        *,
        jobs: int = 4,
        depth: int = 16,
        stall_timeout: float = 60.0,
        directory: str | Path | None = None,
    ) -> None:
        if not _NAME.fullmatch(name) or name.endswith(".lock"):
            raise ValueError(f"the name of a staging area is one plain word, not {name!r}")
        for what, number, most in (("jobs", jobs, MOST_JOBS), ("depth", depth, MOST_DEPTH)):
            if not 1 <= number <= most:
                raise ValueError(f"{what} must be from 1 to {most}, not {number}")
        if not 0.001 <= stall_timeout <= MOST_STALL_S:
            raise ValueError(f"stall_timeout is at least 1 ms, not {stall_timeout}")
        self._name = name
        self._directory = default_directory() if directory is None else Path(directory)
        self._depth, self._stall_s = depth, stall_timeout
        # The number of jobs to expect if the broker must be started again.
        self._known = jobs
        self._count = 0
        self._connection: socket.socket | None = None
        self._process = os.getpid()
        # This job works alone before this position.
        self._alone_until = 0
        self.prepared = 0
        self.expulsions = 0
        self.report = StagingReport(0, 0, 0, 0)

    def epoch(self, number: int, count: int, produce: Produce) -> Iterator[Views]:
        """The batches 0 to ``count`` - 1 of epoch ``number``, in this order, each once.

        ``produce(b)`` prepares batch b of this epoch: a dict of numpy arrays, or bytes. It gives
        the same batch in every job. The batches are read-only views: arrays by name, or a
        memoryview. They are valid as long as they are kept, and take memory as long.

        Raises what ``produce`` raises, ValueError if ``count`` differs from that of earlier epochs,
        MonarchError if the area cannot be used, and OSError. The epoch can then be begun again.
        Warns with StagingWarning if the job was not waited for any more, or has lost the broker.
        """
        if not 0 <= number < MOST_COUNT or not 1 <= count < MOST_COUNT:
            raise ValueError(f"epoch {number} of {count} batches")
        if self._count not in (0, count):
            raise ValueError(f"an epoch has {self._count} batches, not {count}")
        self._count = count
        return self._batches(number * count, produce)

    def _batches(self, first: int, produce: Produce) -> Iterator[Views]:
        for position in range(first, first + self._count):
            yield self._batch(position, first, produce)
        self._send(Ask.MOVE, first + self._count)

    def close(self) -> None:
        """Leaves the area; the other jobs do not wait for this one. The next epoch joins again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

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

    def _batch(self, position: int, first: int, produce: Produce) -> Views:
        losses = 0
        while position >= self._alone_until:
            try:
                answer, fd = self._ask(position)
            except _Lost:
                self.close()
                losses += 1
                if losses > _MOST_LOSSES:
                    self._work_alone(first, "the broker ends again and again")
                continue
            except _Unusable as error:
                self.close()
                self._work_alone(first, str(error))
                continue
            if answer.kind == Kind.READY:
                with closing_fd(fd):
                    return load(fd)
            if answer.kind == Kind.ALONE:
                break
            if answer.kind == Kind.EXPELLED:
                self._note_expulsion()
            elif position <= answer.position < first + self._count:
                with closing_fd(self._prepare(position, answer.position - first, produce)) as fd:
                    self._send(Ask.PUBLISH, answer.position, fd)
                    if answer.position == position:
                        return load(fd)
            else:
                raise self._invalid("it asks for a batch of another epoch")
        with closing_fd(self._prepare(position, position - first, produce)) as fd:
            return load(fd)

    def _prepare(self, position: int, number: int, produce: Produce) -> int:
        """A descriptor of the batch ``number`` of the epoch, while the job waits for another."""
        try:
            fd = store(produce(number))
        except BaseException:
            # Another job may prepare the batch that this one has claimed.
            self._send(Ask.MOVE, position)
            raise
        self.prepared += 1
        return fd

    def _work_alone(self, first: int, why: str) -> None:
        self._alone_until = first + self._count
        what = f"the staging area {self._name!r} is not used in the rest of this epoch: {why}"
        warnings.warn(what, StagingWarning, stacklevel=4)

    def _note_expulsion(self) -> None:
        self.close()
        self.expulsions += 1
        what = (
            f"the other jobs of the staging area {self._name!r} had to wait longer than the stall"
            " timeout for this job, and have continued without it"
        )
        warnings.warn(what, StagingWarning, stacklevel=4)

    # -- the broker --------------------------------------------------------------------------------

    def _ask(self, position: int) -> tuple[Answer, int]:
        """The reply to the wish for a batch, and a descriptor or -1. Raises _Lost, _Unusable,
        MonarchError and OSError."""
        if self._process != os.getpid():
            # The connection is that of the process that was forked.
            self.close()
            self._process = os.getpid()
        if self._connection is None:
            self._connection = self._connected()
            self._connection.settimeout(max(self._stall_s * _SILENCE, _LEAST_SILENCE_S))
            self._send(Ask.JOIN, position)
        self._send(Ask.WANT, position)
        while True:
            answer, fd = self._receive()
            if answer.kind == Kind.READY and fd < 0:
                raise self._invalid("a batch is missing")
            if answer.kind == REFUSED:
                self.close()
                raise MonarchError(
                    f"the jobs of the staging area {self._name!r} have another number of batches"
                    f" than {self._count} in an epoch",
                    hint="use another name",
                )
            if answer.kind != Kind.WAIT:
                return answer, fd

    def _connected(self) -> socket.socket:
        try:
            return connect(self._directory, self._name)
        except (OSError, MonarchError) as error:
            if not self.report.jobs:
                raise
            raise _Unusable(str(error)) from error

    def _receive(self) -> tuple[Answer, int]:
        connection = self._connection
        if connection is None:
            raise _Lost
        try:
            message, fd = receive(connection)
        except TimeoutError as error:
            raise _Unusable("the broker does not answer") from error
        except ConnectionError:
            # The kernel reports a lost request before the last reply.
            message, fd = self._last_reply(connection)
        if not message:
            raise _Lost
        try:
            answer = decode_answer(message)
        except MessageError as error:
            if fd >= 0:
                os.close(fd)
            raise self._invalid(str(error)) from error
        self.report = StagingReport(answer.jobs, answer.kept, answer.most_kept, answer.published)
        if answer.jobs:
            self._known = answer.jobs
        return answer, fd

    def _last_reply(self, connection: socket.socket) -> tuple[bytes, int]:
        try:
            return receive(connection)
        except ConnectionError:
            return b"", -1

    def _send(self, kind: Ask, position: int, fd: int = -1) -> None:
        """Sends a request. If the connection has ended, the next wait for a reply notes it."""
        connection = self._connection
        if connection is None:
            return
        request = Request(
            kind, position, self._known, self._depth, self._stall_s, self._count
        ).encode()
        try:
            socket.send_fds(connection, [request], [fd] if fd >= 0 else [])
        except ConnectionError:
            pass
        except TimeoutError:
            # A broker that takes no requests answers none.
            self.close()

    def _invalid(self, what: str) -> MonarchError:
        return MonarchError(
            f"the broker of the staging area {self._name!r} gives a wrong reply: {what}",
            hint="use the same version of monarch in all jobs",
        )
