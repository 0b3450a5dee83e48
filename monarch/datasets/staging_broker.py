"""The process that holds the prepared batches of one staging area of one user.

The first job starts it (``staging_socket.py``), and it ends some seconds after the last job has
left. Jobs and workers are connections: a job that dies closes its connection, and a forked process
that has inherited the connection does not delay this, since the death of the process itself is
watched too.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from monarch.datasets.staging_members import living_members
from monarch.datasets.staging_messages import (
    MOST_CONNECTIONS,
    REFUSED,
    Answer,
    Ask,
    MessageError,
    Request,
    Terms,
    decode_request,
    peer_of,
    receive,
    sealed_size,
)
from monarch.datasets.staging_table import Kind, Reply, StagingTable
from monarch.posix.private_directory import open_private

# A pause while this process or the machine has no free descriptors, in seconds.
_PAUSE_S = 0.1
# How often the broker checks which members of an earlier broker are still alive, in seconds.
_LOOK_S = 0.05
# The longest wait of the broker while a job waits, in seconds.
_LONGEST_WAIT_S = 1.0


# The requests that a connection may send, by the first one.
_REQUESTS = {
    None: (Ask.JOIN, Ask.ATTACH),
    Ask.JOIN: (Ask.KEEP, Ask.WANT, Ask.AWAIT, Ask.PUBLISH, Ask.MOVE),
    Ask.ATTACH: (Ask.KEEP, Ask.WORK, Ask.PUBLISH),
}


@dataclass(slots=True)
class _Connection:
    """``kind`` is that of the first request: JOIN or ATTACH. ``process`` is a pidfd, or -1."""

    number: int
    socket: socket.socket
    process: int
    kind: Ask | None = None
    member: int = 0


class Broker:
    """Serves the jobs that connect to ``listener``, until none has been there for ``linger_s``
    seconds. ``members`` gives the members of the area that are alive (``staging_members.py``)."""

    def __init__(
        self, listener: socket.socket, linger_s: float, members: Callable[[], set[int]] = set
    ) -> None:
        self._listener = listener
        self._linger_s = linger_s
        self._members = members
        # Members of an earlier broker that have not come.
        self._missing: set[int] = set()
        self._next_look = 0.0
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._numbers = 0
        self._table: StagingTable | None = None
        self._terms: Terms | None = None
        self._replies: deque[Reply] = deque()
        self._stopped_s = 0.0

    def serve(self) -> None:
        """Raises OSError if the kernel refuses to wait."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._missing = self._members()
        last_seen = self._now()
        while True:
            now = self._now()
            events = self._wait(self._patience(now, last_seen))
            if self._connections:
                last_seen = now
            elif not events and now >= last_seen + self._linger_s:
                if not self._members():
                    return
                # A job that has not yet noticed the death of an earlier broker.
                last_seen = now
            for key, _ in events:
                action: Callable[[], None] = key.data
                # An earlier action may have ended the connection of a later one.
                if self._selector.get_map().get(key.fd) == key:
                    action()
                    # A READY reply names a batch that the next event may remove.
                    self._send_replies()
            if self._table is not None:
                self._look_for_missing(self._now())
                self._replies += self._table.expire(self._now())
                self._send_replies()

    def _now(self) -> float:
        """The time in seconds, without that in which this process was stopped."""
        return time.monotonic() - self._stopped_s

    def _wait(self, patience: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits for events, at most ``patience`` seconds. A wait that ends too late counts as one
        that does not: a scheduler that suspends a job stops this process and the processes that
        it serves, and none of them hangs."""
        if patience is None:
            return self._selector.select()
        begin, limit_s = time.monotonic(), min(patience, _LONGEST_WAIT_S)
        events = self._selector.select(limit_s)
        self._stopped_s += max(0.0, time.monotonic() - begin - limit_s)
        return events

    def _look_for_missing(self, now: float) -> None:
        if self._table is not None and self._table.is_awaiting and now >= self._next_look:
            self._missing &= self._members()
            self._replies += self._table.await_members(self._missing, now)
            self._next_look = now + _LOOK_S

    def _patience(self, now: float, last_seen: float) -> float | None:
        if not self._connections:
            return max(0.0, last_seen + self._linger_s - now)
        if self._table is None:
            return None
        deadlines = [self._table.next_deadline()]
        if self._table.is_awaiting:
            deadlines.append(self._next_look)
        times = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(times) - now) if times else None

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_PAUSE_S)
            return
        pid, uid = peer_of(accepted)
        if uid != os.geteuid() or len(self._connections) >= MOST_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        process = -1
        with suppress(OSError):
            process = os.pidfd_open(pid)
        self._numbers += 1
        connection = _Connection(self._numbers, accepted, process)
        self._connections[connection.number] = connection
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._read(connection))
        if process >= 0:
            self._selector.register(process, selectors.EVENT_READ, lambda: self._remove(connection))

    def _read(self, connection: _Connection) -> None:
        try:
            message, fd = receive(connection.socket)
        except BlockingIOError:
            return
        except OSError:
            self._remove(connection)
            return
        try:
            request = decode_request(message)
            if request.kind not in _REQUESTS[connection.kind]:
                raise MessageError("a process joins once, and first")
            has_batch = request.kind in (Ask.PUBLISH, Ask.KEEP)
            if has_batch != (fd >= 0) or (fd >= 0 and not sealed_size(fd)):
                raise MessageError("only batches are attached, and they are sealed")
        except MessageError:
            # Also the end of the connection, which is an empty message.
            if fd >= 0:
                os.close(fd)
            self._remove(connection)
            return
        self._execute(connection, request, fd)

    def _execute(self, connection: _Connection, request: Request, fd: int) -> None:
        now, number, position = self._now(), connection.number, request.position
        if connection.kind is None:
            self._begin(connection, request, now)
            return
        table = self._table
        if table is None:
            return
        if request.kind is not Ask.KEEP:
            self._missing.discard(connection.member)
        if request.kind in (Ask.WANT, Ask.AWAIT):
            prepare = request.kind is Ask.WANT
            self._replies += table.want(number, position, now, prepare=prepare)
        elif request.kind is Ask.WORK:
            self._replies += table.work(number, position, now)
        elif request.kind is Ask.MOVE:
            self._replies += table.move(number, position, now)
        elif request.kind is Ask.KEEP:
            self._replies += table.keep(number, position, fd, now)
        else:
            self._replies += table.publish(number, position, fd, now)

    def _begin(self, connection: _Connection, request: Request, now: float) -> None:
        """The first request of a process."""
        if self._table is None or self._terms is None:
            self._terms = request.terms
            self._table = StagingTable(
                count=request.terms.batches,
                depth=request.terms.depth,
                jobs=request.jobs,
                stall_s=request.terms.stall_s,
            )
            self._table.await_members(self._missing, now)
        if (request.terms.batches, request.terms.content) != (
            self._terms.batches,
            self._terms.content,
        ):
            with suppress(OSError):
                connection.socket.send(self._answer(self._table, REFUSED, request.position))
            self._remove(connection)
            return
        connection.kind, connection.member = request.kind, request.member
        number, member = connection.number, request.member
        if request.kind is Ask.JOIN:
            position, jobs = request.position, request.jobs
            self._replies += self._table.join(number, member, position, jobs, now)
        else:
            self._replies += self._table.attach(number, member, now)

    def _send_replies(self) -> None:
        while self._replies:
            reply = self._replies.popleft()
            connection = self._connections.get(reply.number)
            if connection is None or self._table is None:
                continue
            answer = self._answer(self._table, reply.kind, reply.position)
            try:
                if reply.kind in (Kind.READY, Kind.HOLD):
                    fds = [self._table.kept.token(reply.position)]
                    socket.send_fds(connection.socket, [answer], fds)
                else:
                    connection.socket.send(answer)
            except OSError:
                # The process has ended, or reads none of its replies.
                self._remove(connection)
            if reply.kind is Kind.EXPELLED:
                connection.kind = None
                self._remove(connection)
        if self._table is not None:
            for fd in self._table.kept.take_removed():
                os.close(fd)
            if self._table.is_over:
                self._end_table()

    def _answer(self, table: StagingTable, kind: int, position: int) -> bytes:
        return Answer(
            kind=kind,
            position=position,
            has_all=table.has_all,
            jobs=table.members,
            kept=len(table.kept),
            most_kept=table.most_kept,
            published=table.published,
            floor=table.floor,
        ).encode()

    def _remove(self, connection: _Connection) -> None:
        """Ends a connection, once: its job or worker leaves."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.process >= 0:
            self._selector.unregister(connection.process)
            os.close(connection.process)
        if connection.kind is not None and self._table is not None:
            self._replies += self._table.leave(connection.number, self._now())

    def _end_table(self) -> None:
        """The last job has left. Workers that are still there must attach again."""
        self._table = None
        for connection in [each for each in self._connections.values() if each.kind is Ask.ATTACH]:
            self._remove(connection)


def main() -> None:
    """The arguments: the directory of the package; the descriptors of the listening socket, of the
    lock, which stays open, and of the directory of the area; the path of that directory, the name
    of the area, and the seconds to linger."""
    listener_fd, directory_fd = int(sys.argv[2]), int(sys.argv[4])
    name, linger_s = sys.argv[6], float(sys.argv[7])
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    members = open_private(f"{name}.jobs", os.O_RDWR | os.O_CREAT, dir_fd=directory_fd)
    listener = socket.socket(fileno=listener_fd)
    Broker(listener, linger_s, lambda: living_members(members)).serve()
    # A job that connects meanwhile finds the connection closed, and starts another broker.
    for each in (name, f"{name}.jobs", f"{name}.lock"):
        with suppress(FileNotFoundError):
            os.unlink(each, dir_fd=directory_fd)
