"""The process that holds the prepared batches of one staging area of one user.

The first job starts it (``staging_socket.py``), and it ends some seconds after the last job has
left. Jobs are connections: a job that dies closes its connection, and a forked process that has
inherited the connection does not delay this, since the death of the process itself is watched too.
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

from monarch.datasets.staging_messages import (
    MOST_JOBS,
    REFUSED,
    Answer,
    Ask,
    MessageError,
    Request,
    decode_request,
    peer_of,
    receive,
    sealed_size,
)
from monarch.datasets.staging_table import Kind, Reply, StagingTable

# A pause while this process or the machine has no free descriptors, in seconds.
_PAUSE_S = 0.1


@dataclass(slots=True)
class _Connection:
    """A job after its first request. ``process`` is a pidfd, or -1."""

    number: int
    socket: socket.socket
    process: int
    is_job: bool = False


class Broker:
    """Serves the jobs that connect to ``listener``, until none has been there for ``linger_s``
    seconds."""

    def __init__(self, listener: socket.socket, linger_s: float) -> None:
        self._listener = listener
        self._linger_s = linger_s
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._numbers = 0
        self._table: StagingTable | None = None
        self._replies: deque[Reply] = deque()

    def serve(self) -> None:
        """Raises OSError if the kernel refuses to wait."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        last_seen = time.monotonic()
        while True:
            now = time.monotonic()
            events = self._selector.select(self._patience(now, last_seen))
            if self._connections:
                last_seen = now
            elif not events and now >= last_seen + self._linger_s:
                return
            for key, _ in events:
                action: Callable[[], None] = key.data
                # An earlier action may have ended the connection of a later one.
                if self._selector.get_map().get(key.fd) == key:
                    action()
                    # A READY reply names a batch that the next event may remove.
                    self._send_replies()
            if self._table is not None:
                self._replies += self._table.expire(time.monotonic())
                self._send_replies()

    def _patience(self, now: float, last_seen: float) -> float | None:
        if not self._connections:
            return max(0.0, last_seen + self._linger_s - now)
        deadline = None if self._table is None else self._table.next_deadline()
        return None if deadline is None else max(0.0, deadline - now)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_PAUSE_S)
            return
        pid, uid = peer_of(accepted)
        if uid != os.geteuid() or len(self._connections) >= MOST_JOBS:
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
            if connection.is_job == (request.kind is Ask.JOIN):
                raise MessageError("a job joins once, and first")
            if (request.kind is Ask.PUBLISH) != (fd >= 0) or (fd >= 0 and not sealed_size(fd)):
                raise MessageError("only batches are attached, and they are sealed")
        except MessageError:
            # Also the end of the connection, which is an empty message.
            if fd >= 0:
                os.close(fd)
            self._remove(connection)
            return
        self._execute(connection, request, fd)

    def _execute(self, connection: _Connection, request: Request, fd: int) -> None:
        now, number, position = time.monotonic(), connection.number, request.position
        if request.kind is Ask.JOIN:
            if self._table is None:
                self._table = StagingTable(
                    count=request.batches,
                    depth=request.depth,
                    jobs=request.jobs,
                    stall_s=request.stall_s,
                )
            if request.batches != self._table.count:
                with suppress(OSError):
                    connection.socket.send(self._answer(self._table, REFUSED, position))
                self._remove(connection)
                return
            connection.is_job = True
            self._replies += self._table.join(number, position, request.jobs, now)
        elif self._table is not None and request.kind is Ask.WANT:
            self._replies += self._table.want(number, position, now)
        elif self._table is not None and request.kind is Ask.MOVE:
            self._replies += self._table.move(number, position, now)
        elif self._table is not None:
            self._replies += self._table.publish(number, position, fd, now)

    def _send_replies(self) -> None:
        while self._replies:
            reply = self._replies.popleft()
            connection = self._connections.get(reply.job)
            if connection is None or self._table is None:
                continue
            answer = self._answer(self._table, reply.kind, reply.position)
            try:
                if reply.kind is Kind.READY:
                    fds = [self._table.token(reply.position)]
                    socket.send_fds(connection.socket, [answer], fds)
                else:
                    connection.socket.send(answer)
            except OSError:
                # The job has ended, or reads none of its replies.
                self._remove(connection)
            if reply.kind is Kind.EXPELLED:
                connection.is_job = False
                self._remove(connection)
        self._close_removed()

    def _answer(self, table: StagingTable, kind: int, position: int) -> bytes:
        published = table.published
        return Answer(
            kind, position, table.members, table.kept, table.most_kept, published
        ).encode()

    def _remove(self, connection: _Connection) -> None:
        """Ends a connection, once: its job leaves."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.process >= 0:
            self._selector.unregister(connection.process)
            os.close(connection.process)
        if connection.is_job and self._table is not None:
            self._replies += self._table.leave(connection.number, time.monotonic())
        self._close_removed()
        if self._table is not None and not len(self._table):
            self._table = None

    def _close_removed(self) -> None:
        if self._table is not None:
            for fd in self._table.take_removed():
                os.close(fd)


def main() -> None:
    """The arguments: the directory of the package, the descriptors of the listening socket and of
    the lock, which stays open, the directory and the name of the area, the seconds to linger."""
    listener_fd, directory, name, linger_s = int(sys.argv[2]), *sys.argv[4:6], float(sys.argv[6])
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Broker(socket.socket(fileno=listener_fd), linger_s).serve()
    # A job that connects meanwhile finds the connection closed, and starts another broker.
    for each in (name, f"{name}.lock"):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, each))
