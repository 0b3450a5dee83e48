"""The daemon's end of the control socket: one request a connection, each in its own task.

A client cannot disturb the service: lines, connections and times are bounded, only the daemon's own
user and root may send requests, and the caller gets the error of a failed verb.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as stdlib_socket
import stat
import struct
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import trio

from monarch.control import messages
from monarch.errors import BusyError, MonarchError, TierError, UsageError, sole_cause
from monarch.telemetry.log import Limiter
from monarch.text import errno_words

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

log = logging.getLogger(__name__)

# Sends one progress message to the client; waits while the client does not read.
Send = Callable[[messages.Message], Awaitable[None]]
Verb = Callable[[messages.Message, Send], Awaitable[messages.Message]]

# For terminals, a monitor and the ranks of a job; each may hold MAX_LINE_BYTES of memory.
MAX_CONNECTIONS = 64
# Time limit for receiving the request, and for sending each reply.
IDLE_SECONDS = 30.0
# Time limit, at the end of the server, for a client to receive its reply.
LAST_WORD_SECONDS = 1.0
# Connections that the kernel queues while the event loop is busy.
_BACKLOG = 128
_ACCEPT_PAUSE_SECONDS = 0.1
_ABORTED = frozenset({errno.ECONNABORTED, errno.EPROTO})


class Server:
    """Serves ``verbs`` at ``path``, whose directory must exist and belong to the daemon's user."""

    def __init__(
        self, path: Path, verbs: Mapping[str, Verb], *, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._path = path
        self._verbs = verbs
        self._idle_seconds = idle_seconds
        self._connections = 0
        self._uids = frozenset({os.geteuid(), 0})
        self._limiter = Limiter(log)
        # A spare descriptor, closed on EMFILE so that a status request is still answered.
        self._spare = -1

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled, from "started" on; replaces the socket of an earlier daemon, and
        removes its own. Raises TierError if the socket cannot be created."""
        with _listening(self._path) as listener, ExitStack() as cleanup:
            self._take_spare()
            cleanup.callback(self._close_spare)
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    try:
                        connection, _ = await listener.accept()
                    except OSError as error:
                        if error.errno in (errno.EMFILE, errno.ENFILE) and self._spare >= 0:
                            self._close_spare()
                            continue
                        # Without a free descriptor or memory an immediate retry would fail again.
                        if error.errno not in _ABORTED:
                            self._limiter.warning(
                                error.errno,
                                "cannot accept a control connection: %s; it waits, reads continue",
                                errno_words(error.errno),
                            )
                            await trio.sleep(_ACCEPT_PAUSE_SECONDS)
                        continue
                    nursery.start_soon(self._connected, trio.SocketStream(connection))

    async def _connected(self, stream: trio.SocketStream) -> None:
        self._connections += 1
        try:
            async with stream:
                await self._converse(stream)
        except Exception as error:
            if not _hung_up_only(error):
                self._limiter.exception(
                    "connection",
                    "internal error in a control connection; the mount continues. This is a bug,"
                    " please report it",
                )
        finally:
            self._connections -= 1
            self._take_spare()

    def _take_spare(self) -> None:
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    async def _converse(self, stream: trio.SocketStream) -> None:
        peer = stream.socket.getsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("iII", peer)
        if uid not in self._uids:
            self._limiter.warning(
                ("refused", uid), "refused user %d at the control socket %s", uid, self._path
            )
            await self._send(
                stream, messages.failure(MonarchError("only the mount's user may ask"))
            )
            return
        if self._connections > MAX_CONNECTIONS:
            what = f"{MAX_CONNECTIONS} clients are connected already"
            await self._send(stream, messages.failure(BusyError(what, hint="try again later")))
            return
        with trio.move_on_after(self._idle_seconds) as patience:
            try:
                name, params = messages.parse_request(await _request_line(stream))
            except messages.MalformedError as error:
                await self._send(stream, messages.failure(error))
                return
        if patience.cancelled_caught:
            slow = MonarchError(f"no request came within {self._idle_seconds:g} seconds")
            await self._send(stream, messages.failure(slow))
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch_for_hang_up, stream, nursery.cancel_scope)
            reply = await self._carry_out(name, params, stream)
            if reply is not None:
                # The reply is sent even if the verb was `stop`.
                with (
                    trio.CancelScope(deadline=trio.current_time() + LAST_WORD_SECONDS, shield=True),
                    suppress(trio.BrokenResourceError),
                ):
                    await self._send(stream, reply)
            nursery.cancel_scope.cancel()

    async def _carry_out(
        self, name: str, params: messages.Message, stream: trio.SocketStream
    ) -> messages.Message | None:
        """The last line for the client; None if the client has disconnected."""
        verb = self._verbs.get(name)
        if verb is None:
            known = ", ".join(sorted(self._verbs))
            return messages.failure(UsageError(f"no verb {name[:40]!r}", hint=f"known: {known}"))

        one_at_a_time = trio.Lock()

        async def send(progress: messages.Message) -> None:
            async with one_at_a_time:
                await self._send(stream, {"progress": progress})

        try:
            return {"ok": True, "result": await verb(params, send)}
        except Exception as error:
            if _hung_up_only(error):
                return None
            cause = sole_cause(error)
            if isinstance(cause, MonarchError):
                return messages.failure(cause)
            self._limiter.exception(
                name,
                "internal error in the control verb %s; the mount continues. This is a bug, please"
                " report it",
                name,
            )
            return messages.failure(
                MonarchError(f"{name} failed: {cause!r:.500}", hint="see the log")
            )

    async def _send(self, stream: trio.SocketStream, reply: messages.Message) -> None:
        """Raises BrokenResourceError if the client has disconnected or does not read in time."""
        try:
            line = messages.encode(reply)
        except (messages.MalformedError, TypeError, ValueError):
            self._limiter.exception(
                "reply", "a control reply cannot be sent, the client gets an error instead"
            )
            line = messages.encode(
                messages.failure(MonarchError("the answer cannot be sent", hint="see the log"))
            )
        with trio.move_on_after(self._idle_seconds) as patience:
            await stream.send_all(line)
        if patience.cancelled_caught:
            raise trio.BrokenResourceError("the client does not read")


async def _request_line(stream: trio.SocketStream) -> bytes:
    """The bytes before the first newline, which must be the last byte of the request."""
    received = bytearray()
    while True:
        chunk = await stream.receive_some(64 * 1024)
        if not chunk:
            raise messages.MalformedError("the request ends before its newline")
        received += chunk
        end = chunk.find(b"\n")
        if end == len(chunk) - 1:
            return bytes(received[:-1])
        if end >= 0:
            raise messages.MalformedError("a connection may have only one request")
        if len(received) >= messages.MAX_LINE_BYTES:
            raise messages.MalformedError(f"a request is at most {messages.MAX_LINE_BYTES} bytes")


async def _watch_for_hang_up(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancels ``scope`` when the client closes its end, or sends more data."""
    with suppress(trio.BrokenResourceError):
        await stream.receive_some(1)
    scope.cancel()


def _hung_up_only(error: BaseException) -> bool:
    """Whether ``error`` only means that the client disconnected, which is allowed."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.BrokenResourceError)[1] is None
    return isinstance(error, trio.BrokenResourceError)


@contextmanager
def _listening(path: Path) -> Iterator[trio.socket.SocketType]:
    with ExitStack() as cleanup:
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            cleanup.callback(os.close, directory)
            made = cleanup.enter_context(stdlib_socket.socket(stdlib_socket.AF_UNIX))
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(
                    os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode
                ):
                    os.unlink(path.name, dir_fd=directory)
            # Before bind, so that the file never exists with a wider mode.
            os.fchmod(made.fileno(), 0o600)
            # The address of a socket has at most 107 bytes; a path may be longer.
            made.bind(f"/proc/self/fd/{directory}/{path.name}")
            made.listen(_BACKLOG)
        except OSError as error:
            raise TierError(
                f"cannot make the control socket {path}: {error.strerror}",
                hint="the state directory must be a writable local directory",
            ) from error
        ours = os.stat(path.name, dir_fd=directory)
        try:
            with trio.socket.from_stdlib_socket(made) as listener:
                yield listener
        finally:
            with suppress(OSError):
                now = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
                # Not removed if a later daemon has created a new one.
                if (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino):
                    os.unlink(path.name, dir_fd=directory)
