"""Writes the files of a node that is gone, which this node keeps, through the mount of this node.

So they are written files of this mount, with its journal, drain and rules for conflicts. An owner
that has no lease in force at the source for ``writeback.recover_after`` counts as gone. If it comes
back later, its drain finds files that it has not made, and keeps both.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from monarch.peers.held import HeldFiles, Record, digest_of_path
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import closing_fd, copy_data, rename_new
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import counted, errno_words

log = logging.getLogger(__name__)

_LOOK_S = 2.0
_STEP_S = 0.2
_NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(eq=False, repr=False)
class Recovery:
    """Belongs to the event loop. ``is_alive`` returns whether the mount with a token has a lease in
    force at the source; it raises OSError if that is not known."""

    _held: HeldFiles
    _mountpoint: Path
    _after_s: float
    _is_alive: Callable[[str], Awaitable[bool]]
    # Since when each mount was seen without a lease.
    _gone_s: dict[str, float] = field(default_factory=dict, init=False)
    _threads: ThreadPool = field(
        default_factory=lambda: ThreadPool(1, "recovery", abandon=True), init=False
    )
    _limiter: Limiter = field(default_factory=lambda: Limiter(log), init=False)
    recovered: int = field(default=0, init=False)

    async def run(self) -> None:
        """Recovers until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            await self.look()

    async def finish(self, within_s: float) -> None:
        """At the end of the mount: waits until the owners that live need no file any more, for at
        most ``within_s`` seconds. What is kept then is recovered by the next mount."""
        with trio.move_on_after(within_s, shield=True):
            for token in self._held.tokens():
                while self._held.of(token) and await self._lives(token):
                    await trio.sleep(_STEP_S)
        if self._held.files:
            log.warning(
                "%s of other nodes of the job, which are not at the source, stay in the state"
                " directory; the next mount brings them there",
                counted(self._held.files, "file", "files"),
            )

    async def _lives(self, token: str) -> bool:
        try:
            return await self._is_alive(token)
        except OSError:
            return False

    async def look(self) -> None:
        """Recovers the files of all mounts that are gone for long enough."""
        tokens = self._held.tokens()
        self._gone_s = {token: self._gone_s[token] for token in tokens if token in self._gone_s}
        for token in tokens:
            await self._look_at(token)

    async def _look_at(self, token: str) -> None:
        """Recovers the files of a mount if it is gone for long enough."""
        now = trio.current_time()
        try:
            is_alive = await self._is_alive(token)
        except OSError:
            # The source does not answer.
            return
        if is_alive:
            self._gone_s.pop(token, None)
        elif now - self._gone_s.setdefault(token, now) >= self._after_s:
            await self._recover(token)

    async def _recover(self, token: str) -> None:
        records, count = self._held.of(token), 0
        for record in records:
            try:
                await self._threads.run(self._write, record)
                await self._threads.run(self._held.forget, token, record.number)
            except OSError as error:
                self._limiter.warning(
                    f"recovery {token}",
                    "%r of another node is not recovered yet: %s; this node keeps it",
                    *(os.fsdecode(record.path), errno_words(error.errno)),
                )
            else:
                count += 1
        self.recovered += count
        if count:
            log.warning(
                "a node with the lease %s is gone: %s that it had written %s recovered",
                *(token, counted(count, "file", "files"), "is" if count == 1 else "are"),
            )

    def _write(self, record: Record) -> None:
        """Writes a file as its user, beside the name if another file has that. Raises OSError."""
        path = self._mountpoint / os.fsdecode(record.path)
        with closing_fd(self._held.open(record)) as content:
            with acting_as(Credentials(record.uid, record.gid)):
                if _is_there(path, record):
                    return
                path.parent.mkdir(parents=True, exist_ok=True)
                directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with closing_fd(directory):
                    self._write_in(directory, os.fsencode(path.name), content, record)

    def _write_in(self, directory: int, name: bytes, content: int, record: Record) -> None:
        mark = f"{record.token[:8]}-{record.number}".encode()
        staged = b".%s.recovering" % mark
        with closing_fd(os.open(staged, _NEW, 0o600, dir_fd=directory)) as fd:
            copy_data(content, fd, record.size)
            # Another node may say anything: no program gets the rights of a user by it.
            os.fchmod(fd, record.mode & 0o777)
            os.utime(fd, ns=(record.mtime_ns, record.mtime_ns))
            os.fsync(fd)
        try:
            rename_new(directory, staged, name)
        except FileExistsError:
            # The longest name that a file may have is 255 bytes.
            beside = name[: 255 - len(mark) - 11] + b".recovered-" + mark
            os.rename(staged, beside, src_dir_fd=directory, dst_dir_fd=directory)
            log.warning(
                "%r exists with other bytes: what another node has written is %r",
                *(os.fsdecode(record.path), os.fsdecode(beside)),
            )
        os.fsync(directory)


def _is_there(path: Path, record: Record) -> bool:
    """Whether a file has the bytes already, as after an end in the middle of a recovery."""
    with suppress(OSError):
        status = os.stat(path, follow_symlinks=False)
        is_same_size = stat.S_ISREG(status.st_mode) and status.st_size == record.size
        return is_same_size and digest_of_path(path) == record.digest
    return False
