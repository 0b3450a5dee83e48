"""The page of metrics over HTTP: a bounded number of connections, each a task of the event loop.

Any process that reaches the address may connect: so nothing grows with the number of clients, and
no thread or descriptor is kept for a silent connection.
"""

from __future__ import annotations

import errno
import logging
import socket as stdlib_socket
from collections.abc import Callable
from contextlib import ExitStack

import trio

from monarch.errors import ConfigError, UsageError
from monarch.telemetry.log import Limiter
from monarch.telemetry.metric_families import exposition
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.report import StatusReport
from monarch.text import KiB, errno_words

log = logging.getLogger(__name__)

# Prometheus needs one. Beyond this number the connection that is silent longest is closed.
MAX_CONNECTIONS = 16
# Time limit for receiving the request, and again for sending the answer.
REQUEST_SECONDS = 10.0
ANSWER_SECONDS = 30.0
MAX_REQUEST_BYTES = 16 * KiB
_BACKLOG = 64
_ACCEPT_PAUSE_SECONDS = 0.1
_ABORTED = frozenset({errno.ECONNABORTED, errno.EPROTO})
_END_OF_REQUEST = b"\r\n\r\n"


class MetricsPage:
    """Listens at ``address`` from construction on; ``serve`` answers.

    ``address`` is ``host:port``. Only that address is bound; port 0 takes a free port, which
    ``address`` of the object shows. ``report`` is called in the event loop. Raises ConfigError for
    an invalid address, UsageError if it cannot be bound.
    """

    def __init__(self, address: str, metrics: Metrics, report: Callable[[], StatusReport]) -> None:
        self._metrics = metrics
        self._report = report
        self._listener = _listening(address)
        host, port, *_ = self._listener.getsockname()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # Connections without a complete request, the oldest first.
        self._silent: dict[trio.CancelScope, None] = {}
        self._connections = 0
        self._rendering = trio.CapacityLimiter(1)
        self._limiter = Limiter(log)

    def close(self) -> None:
        self._listener.close()

    async def serve(self) -> None:
        """Serves until cancelled."""
        listener = trio.socket.from_stdlib_socket(self._listener)
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection, _ = await listener.accept()
                except OSError as error:
                    # Without a free descriptor or memory an immediate retry would fail again.
                    if error.errno not in _ABORTED:
                        self._limiter.warning(
                            error.errno,
                            "cannot take a connection to the metrics page: %s; the connection"
                            " waits",
                            errno_words(error.errno),
                        )
                        await trio.sleep(_ACCEPT_PAUSE_SECONDS)
                    continue
                if self._connections >= MAX_CONNECTIONS:
                    if not self._silent:
                        connection.close()
                        continue
                    oldest = next(iter(self._silent))
                    del self._silent[oldest]
                    oldest.cancel()
                self._connections += 1
                nursery.start_soon(self._connected, trio.SocketStream(connection))

    async def _connected(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await self._converse(stream)
        except trio.BrokenResourceError:
            pass  # The client closed the connection.
        except Exception:
            self._metrics.error("handler-metrics")
            self._limiter.exception(
                "connection",
                "internal error in the metrics page: that connection was closed, the mount"
                " continues. This is a bug, please report it",
            )
        finally:
            self._connections -= 1

    async def _converse(self, stream: trio.SocketStream) -> None:
        scope = trio.CancelScope(deadline=trio.current_time() + REQUEST_SECONDS)
        self._silent[scope] = None
        request = b""
        try:
            with scope:
                request = await _request(stream)
        finally:
            # The client may also close the connection in the middle of a request.
            self._silent.pop(scope, None)
        if not request:
            return
        with trio.move_on_after(ANSWER_SECONDS):
            await stream.send_all(await self._answer(request))

    async def _answer(self, request: bytes) -> bytes:
        head, *lines = request.decode("latin-1").split("\r\n")
        method, _, rest = head.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"only GET and HEAD\n")
        if path not in ("/", "/metrics"):
            return _response("404 Not Found", "text/plain", b"the metrics are at /metrics\n")
        fields = (line.partition(":") for line in lines)
        accept = next((value for name, _, value in fields if name.lower() == "accept"), "")
        report = self._report()
        # In a thread, since it takes some milliseconds: the event loop answers readers meanwhile.
        body, kind = await trio.to_thread.run_sync(
            exposition, self._metrics, report, accept.strip(), limiter=self._rendering
        )
        return _response("200 OK", kind, body, head_only=method == "HEAD")


async def _request(stream: trio.SocketStream) -> bytes:
    """The lines of the request; empty if the client closed, or sent a request that is too long."""
    received = bytearray()
    while _END_OF_REQUEST not in received:
        chunk = await stream.receive_some(4 * KiB)
        received += chunk
        if not chunk or len(received) > MAX_REQUEST_BYTES:
            return b""
    return bytes(received).partition(_END_OF_REQUEST)[0]


def _response(status: str, kind: str, body: bytes, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return head if head_only else head + body


def _listening(address: str) -> stdlib_socket.socket:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            [f"metrics.address: {address!r} is not host:port; write it like localhost:9464"]
        )
    try:
        family, kind, protocol, _, where = stdlib_socket.getaddrinfo(
            host.strip("[]"), int(port), type=stdlib_socket.SOCK_STREAM
        )[0]
        with ExitStack() as on_failure:
            made = on_failure.enter_context(stdlib_socket.socket(family, kind, protocol))
            made.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
            made.setblocking(False)
            made.bind(where)
            made.listen(_BACKLOG)
            on_failure.pop_all()
    except OSError as error:
        raise UsageError(
            f"cannot serve metrics at {address}: {error.strerror or error}",
            hint="give each mount a metrics.address of its own",
        ) from error
    return made
