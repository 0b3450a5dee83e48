"""The connection of a job, or of a worker of a job, to the broker of its area.

A process keeps the batches that it has prepared until no job needs them. If the broker is killed,
the process gives them to the next one, so that no batch is prepared again.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.datasets.staging_members import Membership
from monarch.datasets.staging_messages import (
    REFUSED,
    Answer,
    Ask,
    MessageError,
    Request,
    Terms,
    decode_answer,
    receive,
)
from monarch.datasets.staging_socket import connect, private_directory
from monarch.datasets.staging_table import Kind
from monarch.errors import MonarchError

# The broker sends to a process that waits at least twice in a stall timeout. A broker that is
# silent for this many stall timeouts, and for this many seconds, does not answer any more.
_SILENCE = 2.0
_LEAST_SILENCE_S = 5.0
# The parts in which a process waits for the broker. The time in which the process was stopped
# counts as one part, since the broker may have been stopped, too.
_LOOKS = 8
# As many times in succession the broker may end before a process does without one.
_MOST_LOSSES = 5


class Lost(Exception):
    """The connection to the broker has ended."""


class Unusable(Exception):
    """No broker can be used now; the text says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which area it is, and how many jobs are expected in it at its beginning."""

    directory: Path
    name: str
    jobs: int


class Link:
    """``answer`` is the last reply of a broker, in a worker at first that of its job. Methods raise
    OSError and MonarchError, Lost if the broker has ended, and Unusable if none answers any more.
    """

    def __init__(self, place: Place, answer: Answer | None = None) -> None:
        self.place = place
        self.answer = answer
        self._terms = Terms(1, 1, 1.0, 0)
        self._connection: socket.socket | None = None
        self._membership = Membership(place.name)
        self._kept: dict[int, int] = {}
        # Where the process began, when it entered the area.
        self._begin: int | None = None
        self._losses = 0

    def open(self, terms: Terms, kind: Ask, position: int) -> None:
        """Connects, unless it is connected, and begins with ``kind``: JOIN or ATTACH."""
        if self._connection is not None:
            return
        self._terms = terms
        try:
            # A broker waits for the members in its own directory. Another directory, and another
            # broker, may get the same path meanwhile.
            with private_directory(self.place.directory) as directory_fd:
                self._connection = connect(directory_fd, self.place.directory, self.place.name)
                # A broker that ends removes the file of the members.
                self._membership.enter(directory_fd)
        except (OSError, MonarchError) as error:
            self.disconnect()
            if self.answer is None:
                raise
            raise Unusable(str(error)) from error
        self._connection.settimeout(self._silence_s())
        if self._begin is None or self._has_met_all():
            self._begin = position
        # Jobs that have not come yet begin there, too.
        self.send(kind, self._begin)
        for kept, fd in self._kept.items():
            self.send(Ask.KEEP, kept, fd)

    def send(self, kind: Ask, position: int, fd: int = -1) -> None:
        """Sends a request. If the connection has ended, the next wait for a reply notes it."""
        if self._connection is None:
            return
        jobs = 1 if self._has_met_all() else self.place.jobs
        request = Request(kind, position, jobs, self._membership.number, self._terms).encode()
        try:
            socket.send_fds(self._connection, [request], [fd] if fd >= 0 else [])
        except ConnectionError:
            pass
        except TimeoutError:
            # A broker that takes no requests answers none.
            self.disconnect()

    def publish(self, position: int, fd: int) -> None:
        """Gives a prepared batch to the broker. It is closed when no job needs it."""
        self._keep(position, fd)
        self.send(Ask.PUBLISH, position, fd)

    def wait(self, others: Sequence[socket.socket]) -> bool:
        """Waits for a reply of the broker or a message of ``others``; whether it is a reply."""
        if self._connection is None:
            raise Lost
        poll = select.poll()
        for each in (self._connection, *others):
            poll.register(each, select.POLLIN)
        for _ in range(_LOOKS):
            if ready := [fd for fd, _ in poll.poll(self._silence_s() * 1000 / _LOOKS)]:
                return ready == [self._connection.fileno()]
        raise Unusable("the broker does not answer")

    def receive(self) -> tuple[Answer, int] | None:
        """The next reply, with a descriptor or -1; None for one that needs no action."""
        connection = self._connection
        if connection is None:
            raise Lost
        try:
            message, fd = receive(connection)
        except TimeoutError as error:
            raise Unusable("the broker does not answer") from error
        except ConnectionError:
            # The kernel reports a lost request before the last reply.
            message, fd = _last_reply(connection)
        if not message:
            self.disconnect()
            self._losses += 1
            if self._losses > _MOST_LOSSES:
                self._losses = 0
                raise Unusable("the broker ends again and again")
            raise Lost
        self._losses = 0
        try:
            answer = decode_answer(message)
        except MessageError as error:
            if fd >= 0:
                os.close(fd)
            raise self.invalid(str(error)) from error
        if (answer.kind in (Kind.READY, Kind.HOLD)) != (fd >= 0):
            if fd >= 0:
                os.close(fd)
            raise self.invalid("a batch is missing")
        if answer.kind == REFUSED:
            self.close()
            raise self._refused()
        self.answer = answer
        if answer.kind == Kind.HOLD:
            self._keep(answer.position, fd)
        for position in [at for at in self._kept if at < answer.floor]:
            os.close(self._kept.pop(position))
        is_last = answer.kind not in (Kind.WAIT, Kind.RELEASE, Kind.HOLD)
        return (answer, fd) if is_last else None

    def disconnect(self) -> None:
        """Ends the connection. The process stays a member, and keeps its batches."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Leaves the area: no process waits for this one."""
        self.disconnect()
        self._begin = None
        self._membership.leave()
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()

    def invalid(self, what: str) -> MonarchError:
        """The error for a reply that no broker of this version gives."""
        return MonarchError(
            f"the broker of the staging area {self.place.name!r} gives a wrong reply: {what}",
            hint="use the same version of monarch in all jobs",
        )

    def _refused(self) -> MonarchError:
        return MonarchError(
            f"the jobs of the staging area {self.place.name!r} have another number of batches than"
            f" {self._terms.batches} in an epoch, or another fingerprint",
            hint="use another name",
        )

    def _has_met_all(self) -> bool:
        return self.answer is not None and self.answer.has_all

    def _keep(self, position: int, fd: int) -> None:
        if position in self._kept:
            os.close(self._kept[position])
        self._kept[position] = fd

    def _silence_s(self) -> float:
        return max(self._terms.stall_s * _SILENCE, _LEAST_SILENCE_S)


def _last_reply(connection: socket.socket) -> tuple[bytes, int]:
    try:
        return receive(connection)
    except ConnectionError:
        return b"", -1
