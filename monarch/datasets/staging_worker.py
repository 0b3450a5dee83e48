"""Processes that prepare batches ahead, while the job trains.

They are forked from the job for one epoch, as the workers of PyTorch's DataLoader are, and work for
all jobs of the area. Each has a connection of its own to the broker, and a channel to its job.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from monarch.datasets.staging_batch import Batch, store
from monarch.datasets.staging_link import Link, Lost, Place, Unusable
from monarch.datasets.staging_messages import Answer, Ask, Terms, receive
from monarch.datasets.staging_table import Kind
from monarch.errors import MonarchError
from monarch.posix.files import closing_fd

Produce = Callable[[int], Batch]

_POSITION = struct.Struct("<Q")
# The kinds of messages to the job. The position of a batch and its memory, or an exception and its
# trace follow.
_BATCH = b"B"
_PUBLISHED = b"P"
_FAILED = b"F"
_EXPELLED = b"X"
# A message on the channel is shorter.
_MOST_MESSAGE_BYTES = 1 << 16
# As many workers may end without a reason, or hang, in an epoch before the job fails.
_MOST_DEATHS = 3
# A worker hangs if it sends nothing for this many stall timeouts, and for this many seconds, while
# its job waits for a batch that only the job needs.
_MOST_SILENCE = 5.0
_LEAST_SILENCE_S = 60.0
# The time in which a worker that was killed ends, in seconds.
_END_S = 5.0
_PAUSE_S = 0.005
# How often a worker checks whether its job is still there, and a job whether its worker hangs, in
# milliseconds. Usually the end of the channel shows it at once, but another process may have a copy
# of it.
_LOOK_MS = 1000


class _Trace(Exception):
    """Where a worker has raised an exception."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in a process that prepares batches:\n{text}")


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker prepares: the batches of the epoch that begins at the position ``first``."""

    place: Place
    terms: Terms
    first: int
    produce: Produce

    @property
    def end(self) -> int:
        return self.first + self.terms.batches


class _Worker:
    """One process, as its job sees it. ``asked`` are the batches that only this job needs, and
    ``silence_s`` is the time that the job has waited for one of them without any message."""

    # Those that have not ended in the time that ``end`` waits.
    _late: ClassVar[list[_Worker]] = []

    def __init__(self, task: Task, parent: Link) -> None:
        self._forget_late()
        self.asked: set[int] = set()
        self.silence_s = 0.0
        # The exit code, or a negative signal, once the process has been waited for.
        self._code: int | None = None
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The process would write what is buffered, too.
            sys.stdout.flush()
            sys.stderr.flush()
            job = os.getpid()
            try:
                pid = os.fork()
                if not pid:
                    _run(task, parent, self.channel, theirs)
            except BaseException:
                # Ctrl-C interrupts the new process, too: it must not continue the training.
                if os.getpid() != job:
                    os._exit(0)
                raise
        # A number alone may be that of another process, if the job has waited for its children.
        self._pidfd = os.pidfd_open(pid)

    def retire(self) -> None:
        self.channel.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        if self._code is None:
            try:
                ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                # The job has waited for all its children, or ignores their ends.
                self._code = 0
            else:
                if ended is not None:
                    by_itself = ended.si_code == os.CLD_EXITED
                    self._code = ended.si_status if by_itself else -ended.si_status
        return self._code is not None

    def end(self) -> int | None:
        """Ends the process at once. The exit code, if it has ended by itself before."""
        code = self._code if self.has_ended() else None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.wait()
        if self.has_ended():
            self.forget()
        else:
            # It waits for a disk that hangs.
            self._late.append(self)
        return code

    @classmethod
    def _forget_late(cls) -> None:
        for worker in [each for each in cls._late if each.has_ended()]:
            worker.forget()
            cls._late.remove(worker)

    def wait(self) -> None:
        """Waits some seconds until the process has ended."""
        deadline = time.monotonic() + _END_S
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def forget(self) -> None:
        """Closes the descriptors of the process."""
        self.channel.close()
        os.close(self._pidfd)


class Workers:
    """The workers of a job in one epoch. ``published`` and ``expulsions`` count what they report,
    and ``replaced`` the workers that hung and were ended.

    Methods raise what ``produce`` raises, OSError, and MonarchError if workers end by themselves,
    or hang, again and again.
    """

    def __init__(self, task: Task, parent: Link, count: int) -> None:
        self._task = task
        self._parent = parent
        self._count = count
        self._process = os.getpid()
        self._workers: list[_Worker] = []
        self._deaths = 0
        # Batches that only this job needs.
        self._prepared: dict[int, int] = {}
        self._failure: BaseException | None = None
        self.published = 0
        self.expulsions = 0
        self.replaced = 0

    @property
    def most_silence_s(self) -> float:
        """The time without a message after which a worker hangs, in seconds."""
        return max(_MOST_SILENCE * self._task.terms.stall_s, _LEAST_SILENCE_S)

    @property
    def channels(self) -> list[socket.socket]:
        """They can be read when ``handle`` must be called."""
        return [worker.channel for worker in self._workers]

    def start(self) -> None:
        """Starts the workers that are missing."""
        if self._process != os.getpid():
            # They are those of the process that was forked.
            self._process = os.getpid()
            for worker in self._workers:
                worker.forget()
            self._workers.clear()
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._task, self._parent))

    def prepare(self, position: int) -> int:
        """A descriptor of a batch that only this job needs. The next ones are prepared ahead.

        A worker that hangs is ended, and another one prepares its batch."""
        for passed in [at for at in self._prepared if at < position]:
            os.close(self._prepared.pop(passed))
        while position not in self._prepared:
            self.start()
            self._ask_for(position)
            waited_s = self._listen()
            for worker in self._workers:
                worker.silence_s += waited_s
            self.handle()
            self._replace_hung(position)
        return self._prepared.pop(position)

    def _listen(self) -> float:
        """Waits for a message of a worker, at most a second. Returns the time that it waited."""
        poll = select.poll()
        for channel in self.channels:
            poll.register(channel, select.POLLIN)
        begin = time.monotonic()
        poll.poll(_LOOK_MS)
        # If this process was stopped meanwhile, its workers may have been, too.
        return min(time.monotonic() - begin, 2 * _LOOK_MS / 1000)

    def _replace_hung(self, position: int) -> None:
        """Ends the worker that was asked for a batch, if it hangs. Raises MonarchError after
        several ones."""
        for worker in list(self._workers):
            if position in worker.asked and worker.silence_s >= self.most_silence_s:
                self._workers.remove(worker)
                worker.end()
                self._deaths += 1
                self.replaced += 1
        if self._deaths > _MOST_DEATHS:
            self.replaced = 0
            raise MonarchError(
                "processes that prepare batches hang again and again: the last one sent nothing"
                f" for {self.most_silence_s:g} seconds",
                hint="check the storage that `produce` reads, or choose a longer stall_timeout",
            )

    def _ask_for(self, position: int) -> None:
        asked = {at for worker in self._workers for at in worker.asked}
        for ahead in range(position, min(position + 2 * self._count, self._task.end)):
            if ahead not in asked and ahead not in self._prepared:
                worker = min(self._workers, key=lambda worker: len(worker.asked))
                if not worker.asked:
                    worker.silence_s = 0.0
                worker.asked.add(ahead)
                # The death of a worker is noted when its channel is read.
                with suppress(ConnectionError):
                    worker.channel.send(_POSITION.pack(ahead))

    def handle(self) -> None:
        """Reads what the workers have sent."""
        self._read_all()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _read_all(self) -> None:
        for worker in list(self._workers):
            while (received := _received(worker.channel)) is not None:
                message, fd = received
                worker.silence_s = 0.0
                if not message:
                    self._note_death(worker)
                    break
                self._note(worker, message, fd)

    def _note(self, worker: _Worker, message: bytes, fd: int) -> None:
        kind, rest = message[:1], message[1:]
        if kind == _BATCH:
            (position,) = _POSITION.unpack(rest)
            worker.asked.discard(position)
            self._prepared[position] = fd
            self.published += 1
        elif kind == _PUBLISHED:
            self.published += 1
        elif kind == _EXPELLED:
            self.expulsions += 1
        else:
            self._failure, trace = pickle.loads(rest)
            self._failure.__cause__ = _Trace(trace)

    def _note_death(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        # The channel of a process that ends is closed first.
        worker.wait()
        code = worker.end()
        self._deaths += 1
        if self._deaths > _MOST_DEATHS and self._failure is None:
            ending = f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
            self._failure = MonarchError(
                f"processes that prepare batches end again and again, the last one by {ending}",
                hint="signal 9 without another reason means that the memory was not enough",
            )

    def retire(self) -> list[_Worker]:
        """The job has left the epoch. Its workers keep their batches for other jobs, and end when
        no job needs the epoch any more."""
        if self._process != os.getpid():
            return []
        self._read_all()
        retired, self._workers = self._workers, []
        for worker in retired:
            worker.retire()
        for fd in self._prepared.values():
            os.close(fd)
        self._prepared.clear()
        return retired


class Retired:
    """The workers of earlier epochs that are still there."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def add(self, workers: Workers) -> None:
        """Takes those of another epoch."""
        self._workers += workers.retire()
        self.forget_ended()

    def forget_ended(self) -> None:
        """Forgets those that have ended; until then their processes are zombies."""
        for worker in [each for each in self._workers if each.has_ended()]:
            worker.forget()
            self._workers.remove(worker)

    def end(self) -> None:
        """Ends them at once."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def _received(channel: socket.socket) -> tuple[bytes, int] | None:
    """A message and its descriptor or -1; None if there is none, and an empty one at the end."""
    try:
        return receive(channel, _MOST_MESSAGE_BYTES, wait=False)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b"", -1


# -- in the worker ---------------------------------------------------------------------------------


def _run(task: Task, parent: Link, theirs: socket.socket, channel: socket.socket) -> NoReturn:
    """The process. The descriptors of the job are closed, so that its death is noticed."""
    try:
        job = os.getppid()
        theirs.close()
        parent.close()
        _set_up()
        threading.Thread(target=_watch, args=(channel, job), daemon=True).start()
        try:
            _Loop(task, Link(task.place, parent.answer), channel).serve()
        except BaseException as error:
            channel.send(_FAILED + _pickled(error, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Nothing of the training, such as its exit handlers, is run here.
        os._exit(0)


def _set_up() -> None:
    """Signals are for the job. Several processes that use all processors would be slower."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _watch(channel: socket.socket, parent: int) -> None:
    """Ends the process when its job has ended, also in the middle of a batch."""
    poll = select.poll()
    poll.register(channel, 0)
    while os.getppid() == parent:
        if poll.poll(_LOOK_MS):
            break
    os._exit(0)


def _pickled(error: BaseException, trace: str) -> bytes:
    try:
        pickled = pickle.dumps((error, trace))
        pickle.loads(pickled)
    except Exception:
        pickled = b""
    if not 0 < len(pickled) < _MOST_MESSAGE_BYTES:
        text = f"{type(error).__name__}: {error}"[:1000]
        pickled = pickle.dumps((RuntimeError(text), trace[-10_000:]))
    return pickled


class _Loop:
    """Prepares batches for the broker, and those that only the job needs."""

    def __init__(self, task: Task, link: Link, channel: socket.socket) -> None:
        self._task = task
        self._link = link
        self._channel = channel
        self._has_asked = False
        self._is_retired = False

    def serve(self) -> None:
        while not self._is_done():
            try:
                self._step()
            except Unusable:
                self._link.disconnect()
                self._has_asked = False
                if self._is_retired:
                    return
                # The job may work alone meanwhile.
                self._serve_job()

    def _is_done(self) -> bool:
        answer = self._link.answer
        return self._is_retired and answer is not None and answer.floor >= self._task.end

    def _step(self) -> None:
        try:
            if not self._has_asked:
                self._link.open(self._task.terms, Ask.ATTACH, self._task.first)
                self._link.send(Ask.WORK, self._task.first)
                self._has_asked = True
            if not self._link.wait([] if self._is_retired else [self._channel]):
                self._read_channel()
            elif (received := self._link.receive()) is not None:
                self._has_asked = False
                self._answer(*received)
        except Lost:
            self._has_asked = False

    def _serve_job(self) -> None:
        """Prepares what the job asks for, until there is nothing for a second."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._is_retired and poll.poll(_LOOK_MS):
            self._read_channel()

    def _answer(self, answer: Answer, fd: int) -> None:
        if fd >= 0:
            os.close(fd)
        if answer.kind == Kind.EXPELLED:
            self._link.disconnect()
            self._channel.send(_EXPELLED)
            return
        if answer.kind != Kind.PRODUCE:
            raise self._link.invalid("it is not for a process that prepares batches")
        fd = self._prepared(answer.position)
        # The job knows of the batch before it can have used it.
        self._channel.send(_PUBLISHED)
        self._link.publish(answer.position, fd)

    def _read_channel(self) -> None:
        message = self._channel.recv(_POSITION.size)
        if not message:
            self._is_retired = True
            return
        (position,) = _POSITION.unpack(message)
        with closing_fd(self._prepared(position)) as fd:
            socket.send_fds(self._channel, [_BATCH + message], [fd])

    def _prepared(self, position: int) -> int:
        if not self._task.first <= position < self._task.end:
            raise self._link.invalid("it asks for a batch of another epoch")
        return store(self._task.produce(position - self._task.first))
