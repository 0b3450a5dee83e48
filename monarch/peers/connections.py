"""Connections to a member that have no request now, for the next one.

Without the datapath they are kept here. With it they are kept there: it requests files itself, and
uses the same connections.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from monarch.posix.files import is_scarce

_MOST_IDLE = 16
# The part of the descriptors that no connection without a request has.
_LAST = 1 / 4
_TIMEVAL = struct.Struct("@ll")


@dataclass(slots=True, eq=False)
class Connection:
    """``limit_s`` is the limit of each wait that is set in the kernel, 0: none."""

    socket: socket.socket
    limit_s: float = 0.0

    def limit(self, seconds: float) -> None:
        """Sets the limit of each wait in the kernel. Raises OSError."""
        if seconds != self.limit_s:
            value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self.limit_s = seconds

    def send(self, data: bytes) -> None:
        """Raises OSError."""
        self.socket.sendall(data)

    def receive(self, most: int) -> bytes:
        """The bytes that have come, at least one; none at the end. Raises OSError."""
        return self.socket.recv(most)

    def receive_whole(self, size: int) -> bytes:
        """The next ``size`` bytes; fewer at the end. Raises OSError, TimeoutError."""
        # The kernel limits the wait for all bytes of one call.
        part = self.socket.recv(size, socket.MSG_WAITALL)
        if 0 < len(part) < size and self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            raise TimeoutError
        return part

    def certificate(self) -> str:
        """The fingerprint of the certificate of the member; empty without TLS."""
        return ""

    def close(self) -> None:
        self.socket.close()


class Connections(Protocol):
    """Thread-safe."""

    def keep(self, connection: Connection) -> bool:
        """Keeps a connection. False if there are enough, or if descriptors are scarce: then it
        still belongs to the caller."""

    def take(self) -> Connection | None:
        """The connection that was kept last; None if there is none."""

    def drop(self) -> None:
        """Closes all of them."""


class OwnConnections:
    """Connections that are kept here."""

    def __init__(self) -> None:
        self._idle: deque[Connection] = deque()

    def keep(self, connection: Connection) -> bool:
        if len(self._idle) >= _MOST_IDLE or is_scarce(connection.socket.fileno(), _LAST):
            return False
        self._idle.append(connection)
        return True

    def take(self) -> Connection | None:
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def drop(self) -> None:
        while (connection := self.take()) is not None:
            connection.close()


class PeerFetcher(Protocol):
    """The datapath, which fetches files from other members itself. A member is a number from 0 on,
    and limits and latencies are in microseconds."""

    def set_peers(
        self,
        givers: object,
        digests: object,
        requests: Sequence[tuple[bytes, bytes] | None],
        *,
        gives_bytes: bool,
    ) -> None:
        """Before the start. Two arrays by inode number, which both sides change: ``givers`` (u16)
        has one more than the member that is asked for a file, or one of the values of
        ``source.py``; ``digests`` (u64) that of its bytes, 0 if the member knows it. ``requests``
        has for each member what a request has before and after the name of the file; None for this
        node. Without ``gives_bytes`` an open is reported as one of the source, without the bytes of
        the file, unless its copy is forced."""

    def keep_connection(self, member: int, fd: int, limit_us: int) -> bool:
        """Whether the descriptor belongs to the datapath from now on."""

    def take_connection(self, member: int) -> tuple[int, int] | None:
        """A descriptor, which then belongs to the caller, and its limit; None if there is none."""

    def drop_connections(self, member: int) -> None:
        """Closes all connections to a member."""

    def received(
        self, member: int, limit_us: int, fair_us: int
    ) -> tuple[int, int, int, int, list[int]]:
        """What a member gave since the last call: files, their bytes, answers that took longer than
        the limit, the time for which answers were late, each moment once, and the latencies of the
        last answers. Sets the limit of each wait for it, and what each MiB may take without being
        late."""


class DatapathConnections:
    """Connections to ``member`` that the datapath keeps."""

    def __init__(self, datapath: PeerFetcher, member: int) -> None:
        self._datapath = datapath
        self._member = member

    def keep(self, connection: Connection) -> bool:
        fd, limit_us = connection.socket.fileno(), microseconds(connection.limit_s)
        if is_scarce(fd, _LAST):
            return False
        is_kept = self._datapath.keep_connection(self._member, fd, limit_us)
        if is_kept:
            connection.socket.detach()
        return is_kept

    def take(self) -> Connection | None:
        found = self._datapath.take_connection(self._member)
        return None if found is None else Connection(socket.socket(fileno=found[0]), found[1] / 1e6)

    def drop(self) -> None:
        self._datapath.drop_connections(self._member)


def microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
