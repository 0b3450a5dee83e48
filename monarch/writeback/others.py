"""Shows what others create and remove at the source, in directories that this mount absorbs.

A directory is *used* if a process has searched it for a missing name, listed it, or written in it.
Used directories are compared with the source at regular intervals. A directory that has changed
there is listed; entries that others have created are shown, and entries that they have removed are
hidden. Names with changes that are not drained yet are left alone. The kernel may remember a
missing name for one such interval.

No process waits for these comparisons, except one that enters a new directory of others for the
first time, and, with ``writeback.shared`` and for a moment, one that uses a directory that was not
used for a while.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.config.write_patterns import is_staged
from monarch.errors import MonarchError, Refused, SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES
from monarch.namespace.scan import settled_ns
from monarch.posix.acl import Acls, narrowed
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.tiers.source import Source
from monarch.types import Ino, KernelCaches, attributes_of, kept_ns
from monarch.writeback.conflicts import PendingWatch
from monarch.writeback.directory_access import DirectoryAccess, DirectoryFound, directory_found
from monarch.writeback.drain import Drain
from monarch.writeback.front import WriteFront

log = logging.getLogger(__name__)

# The interval of comparisons of used directories, and how long the kernel may remember a missing
# name, in seconds.
LOOK_S = 10
# How long a directory counts as used after its last use, in seconds; the most used directories.
_USED_S = 600.0
_MOST = 1000
# How long processes wait for the first comparison of a directory, and for all of them in an
# interval, in seconds.
_WAIT_S = 1.0
# After a comparison, a directory is not compared again for this many times the time that it took.
_SHARE = 20
# A change may leave the times of a directory as they are if it comes within this time, in seconds,
# after the change that has set them.
_YOUNG_S = 2.0
# The file types that ``os.scandir`` distinguishes.
_KINDS = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})
# The errors for the path of a directory that the source does not have: ELOOP if a link has the
# place of a directory above.
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Listed:
    """A listing of a directory of the source. ``names`` is None if the directory is unchanged.

    ``times`` are the inode number and times that the directory had all the while; None if it was
    changed meanwhile. ``found`` is the directory itself; None if it is as it is shown, or missing.
    """

    times: tuple[int, int, int] | None
    names: Mapping[bytes, _Entry] | None
    found: DirectoryFound | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The inode number and times of a listed directory; ``since_s``: when they were first seen, in
    real seconds. ``is_old``: a change after the listing gives the directory other times."""

    times: tuple[int, int, int]
    since_s: float
    is_old: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    """An inode number of the source, and the file type; 0 for devices, sockets and fifos."""

    number: int
    kind: int


@dataclass(frozen=True, slots=True)
class _Found:
    status: os.stat_result
    acls: Acls
    target: bytes


class Others:
    """Belongs to the event loop. ``is_open`` returns whether a process has a file open that was not
    written through this mount. ``waits``: the first use of a directory waits for its comparison."""

    def __init__(
        self,
        front: WriteFront,
        drain: Drain,
        source: Source,
        kernel: KernelCaches,
        is_open: Callable[[Ino], bool],
        *,
        waits: bool,
    ) -> None:
        self._is_open = is_open
        self._waits = waits
        self._front = front
        self._names: Namespace = front.names
        self._patterns = front.gate.patterns
        self._states = front.object_table.states
        self._drain = drain
        self._source = source
        self._kernel = kernel
        self._access = DirectoryAccess(front.names, drain, kernel)
        # A pool of its own: a source that hangs must hold up no other calls.
        self._threads = ThreadPool(1, "others", abandon=True)
        # The time of the last use of each directory, the oldest first.
        self._used: dict[Ino, float] = {}
        self._not_covered: set[Ino] = set()
        self._seen: dict[Ino, _Seen] = {}
        self._settled_ns = settled_ns(self._names.snapshot)
        self._next_s: dict[Ino, float] = {}
        self._looking: dict[Ino, trio.Event] = {}
        # The directories that are compared for their first use, and how long that was waited for in
        # this interval, in seconds.
        self._first: set[Ino] = set()
        self._waited_s = 0.0
        # Directories of others that were not listed yet.
        self._unlisted: set[Ino] = set()
        self._limiter = Limiter(log)

    def used(self, directory: Ino) -> bool:
        """Records the use of a directory; returns whether it is compared with the source now."""
        if directory not in self._used and not self._is_covered(directory):
            return False
        self._used.pop(directory, None)
        self._used[directory] = trio.current_time()
        while len(self._used) > _MOST:
            self._forget(next(iter(self._used)))
        return True

    def changed_here(self, directory: Ino) -> None:
        """Names in a directory were changed through this mount, which is a use of it. The source
        may keep what others have changed there, and no time of the directory tells that."""
        self._seen.pop(directory, None)
        self.used(directory)

    async def catch_up(self, directory: Ino) -> bool:
        """Records the use of a directory. If it was not used for a while, this waits until its
        names are those of the source, or for a second. Returns whether it has waited."""
        is_first = directory not in self._used or directory in self._first
        if not self.used(directory) or not (is_first and self._waits):
            return False
        looking = self._looking.get(directory)
        # A source that hangs, or a walk through a large tree, must not wait in each directory.
        if max(self._waited_s, self._threads.oldest_s()) >= _WAIT_S:
            return False
        begun = trio.current_time()
        with trio.move_on_after(_WAIT_S):
            if looking is not None:
                await looking.wait()
                return True
            self._first.add(directory)
            try:
                await self._look_if_possible(directory)
            finally:
                self._first.discard(directory)
                self._waited_s += trio.current_time() - begun
        return True

    def _is_covered(self, directory: Ino) -> bool:
        if directory in self._not_covered:
            return False
        try:
            is_covered = self._patterns.leads_to(self._names.visible_path(directory))
        except Refused:
            return False
        if not is_covered and len(self._not_covered) < _MOST:
            self._not_covered.add(directory)
        return is_covered

    def _forget(self, directory: Ino) -> None:
        if self._used.pop(directory, None) is not None:
            # The next process that lists the directory must be noticed, even if the kernel has
            # cached the listing.
            self._kernel.invalidate_listing(directory)
        self._seen.pop(directory, None)
        self._next_s.pop(directory, None)
        self._access.followed.pop(directory, None)

    def knows(self, directory: Ino) -> bool:
        """Whether the names of a directory are known, as of its last comparison."""
        return directory not in self._unlisted

    async def listed(self, directory: Ino) -> None:
        """Waits until a directory that others have created is listed. Raises SourceError."""
        while directory in self._unlisted:
            looking = self._looking.get(directory)
            if looking is not None:
                await looking.wait()
                continue
            try:
                await self._look(directory)
            except OSError as error:
                path_text = os.fsdecode(self._names.path(directory))
                raise SourceError(
                    f"{path_text!r}: {error.strerror}", errno=error.errno or 5
                ) from error
            self.used(directory)
            if directory in self._unlisted:
                # Changes in it are being drained at this moment.
                break

    async def run(self) -> None:
        """Compares the used directories at regular intervals, until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            self._waited_s = 0.0
            # Processes that a directory keeps out do not use it, also when it is open again.
            followed = self._access.followed
            for directory in list(dict.fromkeys((*self._used, *followed))):
                now = trio.current_time()
                last_s = self._used.get(directory, -_USED_S)
                if now - last_s > _USED_S and directory not in followed:
                    self._forget(directory)
                elif self._next_s.get(directory, 0.0) <= now and directory not in self._looking:
                    await self._look_if_possible(directory)

    async def _look_if_possible(self, directory: Ino) -> None:
        begun = trio.current_time()
        try:
            await self._look(directory)
        except (OSError, MonarchError) as error:
            log.debug("a directory was not compared with the source: %s", error)
        except Exception:
            self._limiter.exception(
                "unforeseen", "internal error in a search for others' names: please report it"
            )
        now = trio.current_time()
        self._next_s[directory] = now + _SHARE * (now - begun)

    async def _look(self, directory: Ino, *, is_unlinked: bool = False) -> None:
        """Compares a directory with the source. ``is_unlinked``: the directory above has lost its
        name. Raises OSError, SourceError."""
        names = self._names
        if names.is_forgotten(directory) or names.is_gone(directory):
            self._forget(directory)
            self._unlisted.discard(directory)
            return
        looked = self._looking[directory] = trio.Event()
        try:
            path = names.visible_path(directory)
            # The listing may show the changes that are drained from here on, or not.
            with self._drain.queue.pending.watching(path) as pending:
                await self._compare(directory, path, pending, is_unlinked)
        finally:
            del self._looking[directory]
            looked.set()

    async def _compare(
        self, directory: Ino, path: bytes, pending: PendingWatch, is_unlinked: bool
    ) -> None:
        if pending.names() is None:
            return
        shown = self._access.shown(directory)
        known, begun_s = self._known(directory), time.monotonic()
        try:
            listed = await self._threads.run(
                self._source.at_root, _listed, path, known, shown.rights
            )
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            if not is_unlinked:
                # The comparison of the directory above hides it, if it is missing there.
                self.used(self._names.attributes(directory).parent)
                raise
            listed = _Listed(None, {})
        if listed.found is not None and not self._access.show(shown, listed.found):
            return
        if listed.names is None:
            return
        new, other = self._differing(directory, listed.names)
        found: Mapping[bytes, _Found] = {}
        if new or other:
            asked = [*new, *other]
            found = await self._threads.run(_found, self._source, path, asked)
            if not await self._access.show_above(directory, self._threads, self._source):
                return
        touched = pending.names()
        if touched is None or self._names.is_gone(directory):
            return
        changed = is_skipped = False
        for name in new:
            if name in found and name not in touched:
                changed |= await self._show(directory, name, found[name])
        for name, ino in other.items():
            if name in found and name not in touched:
                is_skipped |= not await self._renew(directory, name, ino, found[name])
                changed |= self._names.lookup(directory, name) != ino
        for name, ino in self._missing(directory, listed.names):
            if name not in touched:
                is_hidden = await self._hide(directory, name, ino)
                changed |= is_hidden
                is_skipped |= not is_hidden
        self._unlisted.discard(directory)
        # If a name was left alone, the directory is listed again even if it does not change.
        if listed.times is not None and not touched and not is_skipped:
            self._note_listed(directory, listed.times, begun_s)
        if changed:
            self._kernel.invalidate_listing(directory)
            self._kernel.invalidate_attributes(directory)

    def _known(self, directory: Ino) -> tuple[int, int, int] | None:
        """The source's inode number and times of a directory whose names are known; else None.

        A directory that had just changed when it was listed may have changed once more within the
        same tick of the source's clock."""
        seen = self._seen.get(directory)
        if seen is not None:
            return seen.times if seen.is_old else None
        there = None if self._names.is_written(directory) else self._names.at_source(directory)
        if there is not None and max(there.mtime_ns, there.ctime_ns) < self._settled_ns:
            return there.source_ino, there.mtime_ns, there.ctime_ns
        return None

    def _note_listed(self, directory: Ino, times: tuple[int, int, int], begun_s: float) -> None:
        """Records the times of a directory whose listing has begun at ``begun_s``. The clocks of
        this node and of the source may differ: times are as old as this mount has seen them."""
        before, since_s = self._seen.get(directory), time.monotonic()
        if before is not None and before.times == times:
            since_s = before.since_s
        self._seen[directory] = _Seen(times, since_s, begun_s - since_s >= _YOUNG_S)

    def _differing(
        self, directory: Ino, listed: Mapping[bytes, _Entry]
    ) -> tuple[list[bytes], dict[bytes, Ino]]:
        """Two sets of names: names that only the source has; and names with another file at the
        source, or perhaps another, with their inodes in the mount."""
        new, other = [], {}
        for name, entry in listed.items():
            if not self._covers(directory, name):
                continue
            ino = self._names.lookup(directory, name)
            if ino is None:
                new.append(name)
            elif self._differs(ino, entry):
                other[name] = ino
        return new, other

    def _differs(self, ino: Ino, entry: _Entry) -> bool:
        """Whether the source has, or may have, another file under the name of an inode."""
        kind = stat.S_IFMT(self._names.attributes(ino).mode)
        if kind != entry.kind:
            return kind in _KINDS or entry.kind > 0
        if kind == stat.S_IFLNK:
            # The source's number of a symbolic link made here is not known: ``_renew`` compares
            # the target.
            return self._names.attributes(ino).source_ino != entry.number
        return self._number(ino) not in (0, entry.number)

    def _number(self, ino: Ino) -> int:
        """The inode number of a file at the source; 0 if it is not known."""
        node = self._names.node(ino)
        if node is not None and node.object:
            return self._states.source_ino(node.object)
        attributes = self._names.attributes(ino)
        return attributes.source_ino if attributes.is_file else 0

    def _covers(self, directory: Ino, name: bytes) -> bool:
        return not is_staged(name) and self._patterns.covers(self._names.path_of(directory, name))

    def _missing(self, directory: Ino, listed: Collection[bytes]) -> list[tuple[bytes, Ino]]:
        """The names that are missing at the source, with their inodes in the mount."""
        return [
            (name, attributes.ino)
            for _, name, attributes in self._names.list_from(directory, 0)
            if name not in listed and self._covers(directory, name)
        ]

    # -- differences ---------------------------------------------------------------------------

    async def _show(self, directory: Ino, name: bytes, found: _Found) -> bool:
        """Shows a name that others have created; returns whether that was possible."""
        names = self._names
        if names.lookup(directory, name) is not None:
            return False
        if names.held_bytes + NAME_BYTES > self._front.gate.names_max * NAME_BYTES:
            self._limiter.warning(
                "room", "names that others have made are not shown: `writeback.names_max`"
            )
            return False
        status, mode = found.status, found.status.st_mode
        if not names.has_acls:
            mode = narrowed(mode, found.acls)
        now = attributes_of(status, Ino(0), directory, mode)
        node = names.adopt(directory, name, now, target=found.target)
        names.refresh(node.ino, now, found.acls)
        if node.is_dir:
            self._unlisted.add(node.ino)
        return True

    async def _renew(self, directory: Ino, name: bytes, ino: Ino, found: _Found) -> bool:
        """Shows the entry that has replaced ``ino`` at the source; returns whether it could."""
        mode, now = self._names.attributes(ino).mode, found.status.st_mode
        if stat.S_ISREG(mode) and stat.S_ISREG(now):
            is_done = await self._look_again(ino, found.status)
            # The inode may have lost the name by then.
            await self._show(directory, name, found)
            return is_done
        if stat.S_IFMT(mode) == stat.S_IFMT(now) and (
            not stat.S_ISLNK(mode) or self._names.readlink(ino) == found.target
        ):
            return True
        return await self._hide(directory, name, ino) and await self._show(directory, name, found)

    async def _look_again(self, ino: Ino, status: os.stat_result) -> bool:
        """Reads a file again that was replaced at the source; returns whether it could."""
        if self._number(ino) == status.st_ino:
            return True
        node = self._names.node(ino)
        if node is not None and self._is_busy(ino):
            return False
        if node is not None and node.object and not self._front.drained.release_if_clean(node):
            return False
        # A file that was removed meanwhile is noticed at the next comparison.
        with suppress(Refused, SourceError):
            await self._front.source.look_again(ino)
        self._kernel.invalidate_attributes(ino)
        return True

    def _is_busy(self, ino: Ino) -> bool:
        """Whether a file is open in the mount, or has changes that are not drained."""
        if not self._names.attributes(ino).is_file:
            return False
        node = self._names.node(ino)
        if node is not None and (
            node.undrained or (node.object and not self._front.drained.is_settled(node))
        ):
            return True
        return self._is_open(ino) or self._front.opens.is_in_use(ino)

    async def _hide(self, directory: Ino, name: bytes, ino: Ino) -> bool:
        """Hides a name that others have removed; returns whether that was possible."""
        names = self._names
        if self._is_busy(ino) or names.lookup(directory, name) != ino:
            return False
        if names.attributes(ino).is_dir:
            if self._has_more(ino):
                with suppress(OSError, MonarchError):
                    await self._look(ino, is_unlinked=True)
            if self._has_more(ino) or names.lookup(directory, name) != ino:
                return False
        self._front.operations.take_away(directory, name, by=None)
        self._kernel.invalidate_attributes(ino)
        return True

    def _has_more(self, directory: Ino) -> bool:
        return next(iter(self._names.list_from(directory, 0)), None) is not None


def _listed(
    root: int, path: bytes, known: tuple[int, int, int] | None, shown: tuple[int, int, int]
) -> _Listed:
    """``shown`` are the mode, owner and group that the mount shows. Raises OSError."""
    with closing_fd(open_beneath(root, path, _DIRECTORY)) as fd:
        status = os.fstat(fd)
        before = _seen(status)
        if before == known:
            is_shown = (status.st_mode, status.st_uid, status.st_gid) == shown
            return _Listed(before, None, None if is_shown else directory_found(fd))
        with os.scandir(fd) as entries:
            names = {
                os.fsencode(entry.name): _Entry(entry.inode(), _kind(entry)) for entry in entries
            }
        # After the listing: no name in it is shown with an earlier access.
        found = directory_found(fd)
        return _Listed(before if _seen(found.status) == before else None, names, found)


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else 0


def _seen(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, kept_ns(status.st_mtime_ns), kept_ns(status.st_ctime_ns)


def _found(source: Source, path: bytes, names: Collection[bytes]) -> dict[bytes, _Found]:
    found = {}
    for name in names:
        full = path + b"/" + name if path else name
        with suppress(OSError):
            status = source.status(full)
            target = b""
            if stat.S_ISLNK(status.st_mode):
                target = source.at_root(_target_at, full)
            found[name] = _Found(status, source.acls(full), target)
    return found


def _target_at(root: int, path: bytes) -> bytes:
    directory, _, name = path.rpartition(b"/")
    with closing_fd(open_beneath(root, directory, os.O_PATH | os.O_DIRECTORY)) as fd:
        return os.readlink(name, dir_fd=fd)
