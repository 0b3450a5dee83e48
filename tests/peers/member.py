"""A member of the job that plays what a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from monarch.peers.hello import MemberKey

Act = Callable[[socket.socket], None]

HOST, SET = "127.0.0.1", "0" * 32
KEY = MemberKey(HOST, SET, b"the secret of the job")
TOKEN = KEY.token().encode()


class Member:
    """A server that answers each hello with the proofs of ``key``, or plays ``hello``, and plays
    one act for each other request."""

    def __init__(
        self, *acts: Act, key: MemberKey = KEY, hello: Act | None = None, port: int = 0
    ) -> None:
        self._listener = socket.create_server((HOST, port))
        self.port: int = self._listener.getsockname()[1]
        self._key, self._hello = key, hello
        self._acts = iter(acts)
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        while True:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                part = connection.recv(4096)
                if not part:
                    return
                request += part
            self.requests.append(request)
            act = self._act(request)
            if act is None:
                return
            act(connection)

    def _act(self, request: bytes) -> Act | None:
        if not request.startswith(b"GET /hello/"):
            return next(self._acts, None)
        if self._hello is not None:
            return self._hello
        challenge = request.split()[1].decode().rpartition("/")[2]
        return say(head(128), self._key.proofs(challenge, HOST, self.port))

    def close(self) -> None:
        # A thread that waits in accept is woken by shutdown, not by close.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()


def say(*parts: bytes) -> Act:
    def act(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return act


def hang_up(connection: socket.socket) -> None:
    """Closes the connection. A request that has arrived meanwhile is not read."""
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def without_end(part: bytes) -> Act:
    """Sends until the client closes the connection."""

    def act(connection: socket.socket) -> None:
        while True:
            connection.sendall(part)

    return act


def silent(connection: socket.socket) -> None:
    """Answers nothing until the client closes the connection."""
    connection.recv(1)


def head(size: int, *fields: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {size}", *fields, "", ""]).encode()
