"""Writes the files of a node that is gone, which this node keeps, through the mount of this node.

So they are written files of this mount, with its journal, drain and rules for conflicts. An owner
that has no lease in force at the source for ``writeback.recover_after`` counts as gone. If it comes
back later, its drain finds files that it has not made, and keeps both if they differ.

Several nodes may keep versions of one file, if some were slow. The one with the latest version of
those that answer writes it, and lets the others remove theirs. If it writes none for a long time,
the others do so, and its own version gets a name beside theirs.

The record of a file comes from another node, and other users may change the directories of the
mount meanwhile. So no symbolic link is followed, and nothing is written outside the mount.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from monarch.peers.held import HeldFiles, Record, digest_of_file
from monarch.peers.holding import Holding
from monarch.posix.credentials import Credentials, acting_as
from monarch.posix.files import closing_fd, copy_data, rename_new
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.text import counted, errno_words

log = logging.getLogger(__name__)

_LOOK_S = 2.0
_STEP_S = 0.2
# The time after which a file that is being written is late, in seconds.
_LATE_S = 60.0
# The pause after a file could not be written, in seconds: each attempt reads all of its bytes.
_AGAIN_S = 30.0
# How long files are left to other nodes that have later versions, in seconds, while these write
# none: such a node may never be able to, or may not have them.
_LEFT_S = 600.0
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Other users may be allowed to read the files in a directory only because they cannot reach them,
# and the mode of a directory is not known here.
_DIRECTORY_MODE = 0o700
_LONGEST_NAME = 255


@dataclass(eq=False, repr=False)
class Recovery:
    """Belongs to the event loop. ``root`` opens the root of this mount; it raises OSError if that
    is not mounted any more. ``is_alive`` returns whether the mount with a token has a lease in
    force at the source; it raises OSError if that is not known. ``others`` asks the other nodes;
    None if there are none."""

    _held: HeldFiles
    _root: Callable[[], int]
    _after_s: float
    _is_alive: Callable[[str], Awaitable[bool]]
    _others: Holding | None = None
    # Since when each mount was seen without a lease, and when its files are tried again.
    _gone_s: dict[str, float] = field(default_factory=dict, init=False)
    _again_s: dict[str, float] = field(default_factory=dict, init=False)
    # The objects of each mount that are left to other nodes, and since when these have written
    # none of them.
    _left: dict[str, tuple[set[int], float]] = field(default_factory=dict, init=False)
    _threads: ThreadPool = field(
        default_factory=lambda: ThreadPool(1, "recovery", abandon=True), init=False
    )
    _limiter: Limiter = field(default_factory=lambda: Limiter(log), init=False)
    recovered: int = field(default=0, init=False)

    async def run(self) -> None:
        """Recovers until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                await trio.sleep(_LOOK_S)
                await self.look()

    async def _watch(self) -> None:
        """Reports a file that is late: the disk of this node or its mount may hang."""
        while True:
            await trio.sleep(_LOOK_S)
            if (late_s := self._threads.oldest_s()) > _LATE_S:
                self._limiter.warning(
                    "late",
                    "a file of another node, which is being recovered, has waited %.0f s for the"
                    " state directory or the mount of this node; this node keeps it",
                    late_s,
                )

    async def finish(self, within_s: float) -> None:
        """At the end of the mount: waits until the owners that live need no file any more, for at
        most ``within_s`` seconds. What is kept then is recovered by the next mount."""
        with trio.move_on_after(within_s, shield=True):
            for token in self._held.tokens():
                while self._held.keeps(token) and await self._lives(token):
                    # The lease is read less often.
                    with trio.move_on_after(_LOOK_S):
                        while self._held.keeps(token):
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
        for token in {*self._gone_s, *self._again_s, *self._left}.difference(tokens):
            self._gone_s.pop(token, None)
            self._again_s.pop(token, None)
            self._left.pop(token, None)
        for token in tokens:
            await self._look_at(token)

    async def _look_at(self, token: str) -> None:
        """Recovers the files of a mount if it is gone for long enough."""
        now = trio.current_time()
        try:
            is_alive = await self._is_alive(token)
        except OSError:
            # The source does not answer. Nor did it answer the owner, so the time begins anew.
            is_alive = True
        if is_alive:
            self._gone_s.pop(token, None)
            self._left.pop(token, None)
            return
        is_gone = now - self._gone_s.setdefault(token, now) >= self._after_s
        if is_gone and now >= self._again_s.get(token, now):
            await self._recover(token)

    async def _recover(self, token: str) -> None:
        others = self._others
        keepers = [] if others is None else await others.keepers(token)
        records, count = self._held.of(token), 0
        now, left = trio.current_time(), set[int]()
        before, since_s = self._left.get(token, (left, now))
        if not before.issubset(record.number for record in records):
            # Another node has written one of them.
            since_s = now
        waits = now - since_s < _LEFT_S
        for record in records:
            if self._held.version(token, record.number) != record.version:
                # The owner has come back, or another node has written it.
                since_s = trio.current_time()
                continue
            if waits and others is not None and await others.is_left_to(keepers, record):
                self._again_s[token] = trio.current_time() + _AGAIN_S
                left.add(record.number)
                continue
            try:
                await self._threads.run(self._write, record)
                await self._threads.run(self._held.forget, token, record.number, record.version)
            except OSError as error:
                self._again_s[token] = trio.current_time() + _AGAIN_S
                self._limiter.warning(
                    f"recovery {token} {error.errno}",
                    "%r of another node is not recovered yet: %s; this node keeps it",
                    *(os.fsdecode(record.path), errno_words(error.errno)),
                )
            else:
                count += 1
                if others is not None:
                    await others.recovered(keepers, record)
        if waits and not left:
            self._left.pop(token, None)
        else:
            self._left[token] = left, since_s
        self.recovered += count
        if count:
            log.warning(
                "a node with the lease %s is gone: %s that it had written %s recovered",
                *(token, counted(count, "file", "files"), "is" if count == 1 else "are"),
            )

    def _write(self, record: Record) -> None:
        """Writes a file as its user, beside the name if another file has that. Raises OSError."""
        *above, name = record.path.split(b"/")
        with closing_fd(self._held.open(record)) as content, closing_fd(self._root()) as root:
            with acting_as(Credentials(record.uid, record.gid)):
                with closing_fd(_directory(root, above)) as directory:
                    if not _is_there(directory, name, record):
                        self._write_in(directory, name, content, record)

    def _write_in(self, directory: int, name: bytes, content: int, record: Record) -> None:
        staged, beside = _names_beside(name, record)
        # An earlier attempt may have left it, or another user may have made it, to get the bytes.
        with suppress(FileNotFoundError):
            os.unlink(staged, dir_fd=directory)
        try:
            with closing_fd(os.open(staged, _NEW, 0o600, dir_fd=directory)) as fd:
                copy_data(content, fd, record.size)
                # Another node may say anything: no program gets the rights of a user by it.
                os.fchmod(fd, record.mode & 0o777)
                os.utime(fd, ns=(record.mtime_ns, record.mtime_ns))
                os.fsync(fd)
                try:
                    rename_new(directory, staged, name)
                    _require_same(fd, directory, name)
                except FileExistsError:
                    if _is_there(directory, beside, record):
                        os.unlink(staged, dir_fd=directory)
                    else:
                        rename_new(directory, staged, beside)
                        _require_same(fd, directory, beside)
                    log.warning(
                        "%r exists with other bytes: what another node has written is %r",
                        *(os.fsdecode(record.path), os.fsdecode(beside)),
                    )
            os.fsync(directory)
        except OSError:
            # It would come to the source.
            with suppress(OSError):
                os.unlink(staged, dir_fd=directory)
            raise


def can_be_recovered(record: Record, covers: Callable[[bytes], bool]) -> bool:
    """Whether a mount that may write the paths for which ``covers`` returns True can recover a
    file, also if its name is taken."""
    directory, slash, name = record.path.rpartition(b"/")
    names = (name, *_names_beside(name, record))
    return all(covers(directory + slash + each) for each in names)


def _names_beside(name: bytes, record: Record) -> tuple[bytes, bytes]:
    """The names of a file while it is written, and if another file has its name."""
    mark = f"{record.token[:8]}-{record.number}".encode()
    end = b".recovered-" + mark
    return b".%s.recovering" % mark, name[: _LONGEST_NAME - len(end)] + end


def _directory(root: int, names: Sequence[bytes]) -> int:
    """A descriptor of the directory of that path beneath ``root``. Directories that are missing are
    made. Raises OSError, ENOTDIR for a symbolic link in the way."""
    directory = os.open(".", _WAY, dir_fd=root)
    try:
        for name in names:
            try:
                below = os.open(name, _WAY, dir_fd=directory)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, _DIRECTORY_MODE, dir_fd=directory)
                below = os.open(name, _WAY, dir_fd=directory)
            os.close(directory)
            directory = below
        return os.open(".", _LIST, dir_fd=directory)
    finally:
        os.close(directory)


def _require_same(fd: int, directory: int, name: bytes) -> None:
    """Raises OSError unless ``name`` is that of an open file: another user who may write in the
    directory may have exchanged it before it got the name."""
    own, found = os.fstat(fd), os.stat(name, dir_fd=directory, follow_symlinks=False)
    if (own.st_dev, own.st_ino) != (found.st_dev, found.st_ino):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _is_there(directory: int, name: bytes, record: Record) -> bool:
    """Whether a file has the bytes already, as after an end in the middle of a recovery."""
    with suppress(OSError), closing_fd(os.open(name, _READ, dir_fd=directory)) as fd:
        status = os.fstat(fd)
        is_same_size = stat.S_ISREG(status.st_mode) and status.st_size == record.size
        return is_same_size and digest_of_file(fd) == record.digest
    return False
