"""Answers requests that the datapath hands to the event loop without pyfuse3.

They are those that change names and attributes, those that ask for them, and hints. pyfuse3 starts
a task for each request, and its answer takes a socket and one more thread. Here one task takes all
requests that have come, and answers each of them in its own turn. Few requests have to wait: only
then another task takes over.
"""

from __future__ import annotations

import stat
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

import trio

from monarch.errors import MonarchError, Unanswered
from monarch.fuse.datapath import Datapath, DirectRequest
from monarch.fuse.handlers import VALID_S, Handlers, errno_of
from monarch.posix import failpoints
from monarch.posix.credentials import Credentials, credentials_of
from monarch.transfer.source_calls import CALLER, Caller
from monarch.types import Attributes, Ino

# Numbers of requests (_wire.h), by the names of their handlers.
_LOOKUP, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _RMDIR, _RENAME = 1, 3, 4, 9, 10, 11, 12
_RELEASE, _CREATE, _IOCTL, _RENAME2 = 18, 35, 39, 45
_NAMES = {
    _LOOKUP: "lookup",
    _GETATTR: "getattr",
    _SETATTR: "setattr",
    _MKDIR: "mkdir",
    _UNLINK: "unlink",
    _RMDIR: "rmdir",
    _RENAME: "rename",
    _RENAME2: "rename",
    _RELEASE: "release",
    _CREATE: "create",
    _IOCTL: "hint",
}
_POINTS = {opcode: f"handler-{name}" for opcode, name in _NAMES.items()}
# Bits of the request to set attributes (FATTR_* of linux/fuse.h).
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _ATIME_NOW, _MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256
_FOPEN_DIRECT_IO, _FOPEN_KEEP_CACHE = 1, 2


class DirectRequests:
    """``run`` answers the requests of ``datapath`` until ``stop``, and those under way then."""

    def __init__(self, datapath: Datapath, handlers: Handlers) -> None:
        self._datapath = datapath
        self._handlers = handlers
        self._waiting: deque[DirectRequest] = deque()
        # How many were taken out of ``_waiting`` so far.
        self._begun = 0
        self._fd = -1
        self._is_stopped = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._fd = self._datapath.take_over()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer_all, nursery)
            task_status.started()

    def stop(self) -> None:
        """Takes no further requests."""
        self._is_stopped = True
        trio.lowlevel.notify_closing(self._fd)

    async def catch_up(self) -> None:
        """Waits until all requests that have come so far are answered, or wait.

        A process that closes a file does not wait for the answer, and its next request may come
        through pyfuse3.
        """
        count = self._datapath.requests_so_far()
        while self._begun < count and not self._is_stopped:
            await trio.lowlevel.checkpoint()

    async def _answer_all(self, nursery: trio.Nursery) -> None:
        """Answers requests until one of them waits: another task then takes the next ones."""
        waiting = self._waiting
        while not self._is_stopped:
            while waiting:
                answering = self._answer(waiting.popleft())
                self._begun += 1
                try:
                    trap = answering.send(None)
                except StopIteration:
                    continue
                nursery.start_soon(self._answer_all, nursery)
                await _rest_of(answering, trap)
                return
            with suppress(trio.ClosedResourceError):
                await trio.lowlevel.wait_readable(self._fd)
            waiting.extend(self._datapath.requests())

    async def _answer(self, request: DirectRequest) -> None:
        opcode, unique, _, uid, gid, pid, _ = request
        # The process that closes a file is not known.
        token = CALLER.set(Caller(pid, uid, gid) if opcode != _RELEASE else None)
        handlers, datapath = self._handlers, self._datapath
        try:
            while True:
                failpoints.failpoint(_POINTS[opcode])
                try:
                    await self._handle(request)
                    return
                except Unanswered:
                    # The call has changed nothing and is repeated. Other requests do not wait.
                    await handlers.answers()
        except MonarchError as error:
            datapath.answer_error(unique, errno_of(error))
        except Exception as error:
            number = errno_of(error)
            handlers.unforeseen(_NAMES[opcode], number)
            datapath.answer_error(unique, number)
        finally:
            CALLER.reset(token)

    async def _handle(self, request: DirectRequest) -> None:
        opcode, unique, node, uid, gid, pid, details = request
        handlers, datapath, ino = self._handlers, self._datapath, Ino(node)
        if opcode == _LOOKUP:
            found = await handlers.lookup(ino, *details)
            if isinstance(found, Attributes):
                datapath.answer_name(unique, found, valid_s=VALID_S)
            else:
                datapath.answer_missing(unique, valid_s=found)
        elif opcode == _GETATTR:
            datapath.answer_attributes(unique, await handlers.getattr(ino), valid_s=VALID_S)
        elif opcode == _RELEASE:
            await handlers.release(ino)
            datapath.answer_error(unique, 0)
        elif opcode == _IOCTL:
            datapath.answer_ioctl(unique, handlers.hint(details[0], Caller(pid, uid, gid)))
        elif opcode == _CREATE:
            name, mode, umask, flags = details
            by = credentials_of(pid, uid, gid)
            made, is_direct = await handlers.create(ino, name, mode, umask, flags, by)
            opened = _FOPEN_KEEP_CACHE | (_FOPEN_DIRECT_IO if is_direct else 0)
            datapath.answer_created(unique, made, valid_s=VALID_S, flags=opened)
        elif opcode == _SETATTR:
            by = credentials_of(pid, uid, gid)
            changed = await handlers.setattr(ino, by, **_wanted(*details))
            datapath.answer_attributes(unique, changed, valid_s=VALID_S)
        elif opcode == _MKDIR:
            name, mode, umask = details
            by = credentials_of(pid, uid, gid)
            made = await handlers.make(ino, name, stat.S_IFDIR | stat.S_IMODE(mode), umask, by)
            datapath.answer_name(unique, made, valid_s=VALID_S)
        else:
            await self._change_name(opcode, ino, credentials_of(pid, uid, gid), details)
            datapath.answer_error(unique, 0)

    async def _change_name(
        self, opcode: int, parent: Ino, by: Credentials, details: tuple[Any, ...]
    ) -> None:
        """Removes a name or gives another one."""
        if opcode == _UNLINK:
            await self._handlers.unlink(parent, details[0], by)
        elif opcode == _RMDIR:
            await self._handlers.rmdir(parent, details[0], by)
        else:
            name, to_parent, to_name, flags = details
            await self._handlers.rename(parent, name, Ino(to_parent), to_name, flags, by)


def _wanted(
    valid: int,
    size: int,
    atime_s: int,
    atime_ns: int,
    mtime_s: int,
    mtime_ns: int,
    mode: int,
    uid: int,
    gid: int,
) -> dict[str, int | None]:
    """The attributes that a request sets, by name; None for those that it does not set."""
    now_ns = time.time_ns() if valid & (_ATIME_NOW | _MTIME_NOW) else None
    return {
        "mode": mode if valid & _MODE else None,
        "uid": uid if valid & _UID else None,
        "gid": gid if valid & _GID else None,
        "size": size if valid & _SIZE else None,
        "atime_ns": _time(valid & _ATIME, valid & _ATIME_NOW, atime_s, atime_ns, now_ns),
        "mtime_ns": _time(valid & _MTIME, valid & _MTIME_NOW, mtime_s, mtime_ns, now_ns),
    }


def _time(
    is_given: int, is_now: int, seconds: int, nanoseconds: int, now_ns: int | None
) -> int | None:
    if is_given:
        # The kernel sends its own time with both bits.
        return seconds * 10**9 + nanoseconds
    return now_ns if is_now else None


@types.coroutine
def _rest_of(coroutine: Coroutine[Any, Any, None], trap: Any) -> Generator[Any, Any, None]:
    """Continues a coroutine that has begun to wait, as ``await`` does. ``trap`` is what it has
    yielded to the event loop."""
    step: Callable[[Any], Any]
    while True:
        try:
            argument = yield trap
        except BaseException as error:
            step, argument = coroutine.throw, error
        else:
            step = coroutine.send
        try:
            trap = step(argument)
        except StopIteration:
            return
