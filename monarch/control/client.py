"""A synchronous client of the control socket. A training process may import it: it loads the
standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from monarch.control.messages import MAX_LINE_BYTES, MalformedError, decode, encode
from monarch.errors import MonarchError, NotMountedError, UsageError, error_of
from monarch.posix.files import closing_fd


def call(
    socket_path: Path,
    verb: str,
    params: dict[str, Any],
    *,
    timeout: float | None = 10.0,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Sends a request to the daemon at ``socket_path`` and waits for its result.

    ``timeout`` is the longest silence in seconds, None for no limit; a progress message ends the
    silence. Raises NotMountedError if no process listens there, the error of the daemon (by its
    exit code), and MonarchError if the daemon does not answer or its answer is not valid.
    Interrupting the call closes the connection, which ends the request.
    """
    try:
        line = encode({"verb": verb, "params": params})
    except MalformedError as error:
        raise UsageError(str(error), hint="name directories instead of their files") from error
    with _connected(socket_path, timeout) as connection:
        for reply in _replies(connection, line, timeout, socket_path):
            match decode(reply):
                case {"progress": dict(progress), **rest} if not rest:
                    if on_progress is not None:
                        on_progress(progress)
                case {"ok": True, "result": dict(result), **rest} if not rest:
                    return result
                case {
                    "ok": False,
                    "error": str(message),
                    "hint": str(hint),
                    "exit_code": int(code),
                    **rest,
                } if not rest:
                    raise error_of(code, message, hint=hint)
                case _:
                    raise MalformedError("the answer is not known to this version of monarch")
    raise _hung_up(socket_path)


def _hung_up(socket_path: Path) -> NotMountedError:
    return NotMountedError(
        f"the daemon at {socket_path} ended before it answered", hint="see its log"
    )


@contextlib.contextmanager
def _failing_as(socket_path: Path, timeout: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise MonarchError(
            f"the daemon at {socket_path} has not answered for {timeout:g} seconds",
            hint="it may wait for a hung source; see its log",
        ) from error
    except OSError as error:
        raise _hung_up(socket_path) from error


def _connected(path: Path, timeout: float | None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        with closing_fd(os.open(path.parent, flags)) as directory:
            # The address of a socket has at most 107 bytes; a path may be longer.
            address = f"/proc/self/fd/{directory}/{path.name}"
            while True:
                try:
                    connection.connect(address)
                    return connection
                except BlockingIOError:
                    # With a timeout set, a full backlog fails at once with this error.
                    if deadline is None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        connection.close()
        raise NotMountedError(
            f"no daemon listens at {path}", hint="`monarch status` lists the mounts"
        ) from error
    except OSError as error:
        connection.close()
        raise MonarchError(
            f"cannot reach the daemon at {path}: {error.strerror or error}",
            hint="run the command as its user or as root",
        ) from error


def _replies(
    connection: socket.socket, request: bytes, timeout: float | None, socket_path: Path
) -> Iterator[bytes]:
    """The lines of the answer. Raises MonarchError for each failure of the connection, so that an
    OSError of the caller's own is none."""
    with _failing_as(socket_path, timeout):
        # If the request was refused before it was read, the reply has the reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
    received = bytearray()
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        with _failing_as(socket_path, timeout):
            if deadline is not None:
                connection.settimeout(max(deadline - time.monotonic(), 1e-6))
            chunk = connection.recv(64 * 1024)
        if not chunk:
            return
        received += chunk
        *lines, rest = bytes(received).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise MalformedError("the answer is too long")
        received = bytearray(rest)
        yield from lines
        if lines and timeout is not None:
            deadline = time.monotonic() + timeout
