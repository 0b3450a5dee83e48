"""Names that other nodes, or people at the source, put into directories that this mount absorbs.

A directory in which a process looked for a missing name, listed what there is, or wrote, is
*used*. Used directories are looked at again and again: one that has changed at the source is
listed, and what others have made or removed there is shown. What this mount has not brought to the
source yet is left alone. The kernel forgets after as long a time that a name was missing.

Nobody waits for that, but a process that enters a directory of others for the first time.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.config.write_patterns import WritePatterns, is_staged
from monarch.errors import MonarchError, Refused, SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES
from monarch.posix.acl import Acls, narrowed
from monarch.posix.openat2 import open_beneath
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.log import Limiter
from monarch.tiers.source import Source
from monarch.types import Ino, KernelCaches, attributes_of, kept_ns
from monarch.writeback.conflicts import PendingWatch
from monarch.writeback.drain import Drain
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_files import WrittenFiles
from monarch.writeback.operations import WriteOperations

log = logging.getLogger(__name__)

# How often used directories are looked at, and how long the kernel may know a name to be missing.
# Seconds.
LOOK_S = 10
# A directory is used for so long after the last use, and no more than so many are. Seconds.
_USED_S = 600.0
_MOST = 1000
# A directory is listed for no more than one in so many seconds of the time that it takes.
_SHARE = 20
# One that changed so recently may change again without another time. Seconds.
_YOUNG_S = 2.0
# What the names of a directory tell apart.
_KINDS = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Listed:
    """``names`` of a directory of the source, each with what has it; None if it is as it was.
    ``seen`` is by what that is known."""

    seen: tuple[int, int, int] | None
    names: Mapping[bytes, _Entry] | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """``kind`` is 0 of what is neither a file nor a directory nor a symbolic link."""

    number: int
    kind: int


@dataclass(frozen=True, slots=True)
class _Found:
    status: os.stat_result
    acls: Acls
    target: bytes


class Others:
    """Belongs to the event loop. ``is_open`` returns whether a process has a file open that was not
    written through the mount."""

    def __init__(
        self,
        *,
        writing: WriteOperations,
        patterns: WritePatterns,
        object_table: ObjectTable,
        drain: Drain,
        source: Source,
        kernel: KernelCaches,
        is_open: Callable[[Ino], bool],
    ) -> None:
        self._is_open = is_open
        self._writing = writing
        self._names: Namespace = writing.names
        self._files: WrittenFiles = writing.files
        self._patterns = patterns
        self._object_table = object_table
        self._drain = drain
        self._source = source
        self._kernel = kernel
        # Of its own: a source that hangs must hold up nothing else.
        self._threads = ThreadPool(1, "others", abandon=True)
        # When each was used last, the longest ago first.
        self._used: dict[Ino, float] = {}
        self._not_covered: set[Ino] = set()
        self._seen: dict[Ino, tuple[int, int, int]] = {}
        self._next_s: dict[Ino, float] = {}
        self._looking: dict[Ino, trio.Event] = {}
        # Directories of others of which nothing is known yet.
        self._unlisted: set[Ino] = set()
        self._limiter = Limiter(60.0)

    def used(self, directory: Ino) -> bool:
        """A process has looked into a directory; whether it is looked at from now on."""
        if directory not in self._used and not self._is_covered(directory):
            return False
        self._used.pop(directory, None)
        self._used[directory] = trio.current_time()
        while len(self._used) > _MOST:
            self._forget(next(iter(self._used)))
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
            # Whoever lists it again is to be seen, even where the kernel keeps listings.
            self._kernel.invalidate_listing(directory)
        self._seen.pop(directory, None)
        self._next_s.pop(directory, None)

    def knows(self, directory: Ino) -> bool:
        """Whether it is known what is in a directory, as far as others have not changed it since
        it was looked at last."""
        return directory not in self._unlisted

    async def listed(self, directory: Ino) -> None:
        """Until it is known what is in a directory that others have made. Raises SourceError."""
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
            if directory in self._unlisted:
                # Something of it is on the way to the source.
                break

    async def run(self) -> None:
        """Look at what is used, again and again, until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            for directory in list(self._used):
                now = trio.current_time()
                if now - self._used.get(directory, -_USED_S) > _USED_S:
                    self._forget(directory)
                elif self._next_s.get(directory, 0.0) <= now and directory not in self._looking:
                    await self._look_if_possible(directory)

    async def _look_if_possible(self, directory: Ino) -> None:
        begun = trio.current_time()
        try:
            await self._look(directory)
        except (OSError, MonarchError) as error:
            log.debug("a directory that others may write was not looked at: %s", error)
        except Exception:
            self._limiter.exception(
                log, "unforeseen", "internal error in a look at others' names: please report it"
            )
        now = trio.current_time()
        self._next_s[directory] = now + _SHARE * (now - begun)

    async def _look(self, directory: Ino, *, is_gone: bool = False) -> None:
        """``is_gone``: the directory above has lost it. Raises OSError, SourceError."""
        names = self._names
        if names.is_forgotten(directory) or names.is_gone(directory):
            self._forget(directory)
            self._unlisted.discard(directory)
            return
        looked = self._looking[directory] = trio.Event()
        try:
            path = names.visible_path(directory)
            # The listing may show a change that the source gets from here on, or not.
            with self._drain.queue.pending.watching(path) as pending:
                await self._compare(directory, path, pending, is_gone)
        finally:
            del self._looking[directory]
            looked.set()

    async def _compare(
        self, directory: Ino, path: bytes, pending: PendingWatch, is_gone: bool
    ) -> None:
        if pending.names() is None:
            return
        known = self._known(directory)
        try:
            listed = await self._threads.run(_listed, self._source, path, known)
        except (FileNotFoundError, NotADirectoryError):
            if not is_gone:
                # The one above tells, if there it is missing as well.
                self.used(self._names.attributes(directory).parent)
                raise
            listed = _Listed(None, {})
        if listed.names is None:
            return
        new, other = self._differing(directory, listed.names)
        found: Mapping[bytes, _Found] = {}
        if new or other:
            asked = [*new, *other]
            found = await self._threads.run(_found, self._source, path, asked)
        touched = pending.names()
        if touched is None or self._names.is_gone(directory):
            return
        changed = is_left = False
        for name in new:
            if name in found and name not in touched:
                changed |= await self._show(directory, name, found[name])
        for name, ino in other.items():
            if name in found and name not in touched:
                is_left |= not await self._renew(directory, name, ino, found[name])
                changed |= self._names.lookup(directory, name) != ino
        for name, ino in self._missing(directory, listed.names):
            if name not in touched:
                is_hidden = await self._hide(directory, name, ino)
                changed |= is_hidden
                is_left |= not is_hidden
        self._unlisted.discard(directory)
        # What was left alone is looked at again, though the directory stays as it is.
        if listed.seen is not None and not touched and not is_left:
            self._seen[directory] = listed.seen
        if changed:
            self._kernel.invalidate_listing(directory)
            self._kernel.invalidate_attributes(directory)

    def _known(self, directory: Ino) -> tuple[int, int, int] | None:
        """By what a directory is known not to have changed; None if that is not known."""
        seen = self._seen.get(directory)
        if seen is None and not self._names.is_written(directory):
            there = self._names.at_source(directory)
            if there is not None:
                return there.source_ino, there.mtime_ns, there.ctime_ns
        return seen

    def _differing(
        self, directory: Ino, listed: Mapping[bytes, _Entry]
    ) -> tuple[list[bytes], dict[bytes, Ino]]:
        """Names that only the source has, and those under which it has, or may have, another."""
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
        """Whether the source has, or may have, something else under the name of an inode."""
        kind = stat.S_IFMT(self._names.attributes(ino).mode)
        if kind != entry.kind:
            return kind in _KINDS or entry.kind > 0
        if kind == stat.S_IFLNK:
            # Its number is not known if it was made here: its target tells.
            return self._names.attributes(ino).source_ino != entry.number
        return self._number(ino) not in (0, entry.number)

    def _number(self, ino: Ino) -> int:
        """The source's number of a file that is there as it is here; 0 if that is not known."""
        node = self._names.node(ino)
        if node is not None and node.object:
            return self._object_table.source_ino(node.object)
        attributes = self._names.attributes(ino)
        return attributes.source_ino if attributes.is_file else 0

    def _covers(self, directory: Ino, name: bytes) -> bool:
        return not is_staged(name) and self._patterns.covers(self._names.path_of(directory, name))

    def _missing(self, directory: Ino, listed: Collection[bytes]) -> list[tuple[bytes, Ino]]:
        """Names that the source has not, and whose they are here."""
        return [
            (name, attributes.ino)
            for _, name, attributes in self._names.list_from(directory, 0)
            if name not in listed and self._covers(directory, name)
        ]

    # -- what is found -------------------------------------------------------------------------

    async def _show(self, directory: Ino, name: bytes, found: _Found) -> bool:
        """Whether a name is shown now that others have made."""
        names = self._names
        if names.lookup(directory, name) is not None:
            return False
        if names.held_bytes + NAME_BYTES > self._writing.names_max * NAME_BYTES:
            self._limiter.warning(
                log, "room", "names that others have made are not shown: `writeback.names_max`"
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
        """Show what has come into the place of something that is known here; False if that is left
        alone for now."""
        mode, now = self._names.attributes(ino).mode, found.status.st_mode
        if stat.S_ISREG(mode) and stat.S_ISREG(now):
            is_done = await self._look_again(ino, found.status)
            # It may have lost the name to what is there.
            await self._show(directory, name, found)
            return is_done
        if stat.S_IFMT(mode) == stat.S_IFMT(now) and (
            not stat.S_ISLNK(mode) or self._names.readlink(ino) == found.target
        ):
            return True
        return await self._hide(directory, name, ino) and await self._show(directory, name, found)

    async def _look_again(self, ino: Ino, status: os.stat_result) -> bool:
        """Another file has come into the place of one that is known here; False if that is left
        alone for now."""
        if self._number(ino) == status.st_ino:
            return True
        node = self._names.node(ino)
        if node is not None and self._is_busy(ino):
            return False
        if node is not None and node.object and not self._files.release_object(node):
            return False
        # One that is gone by now is missing at the next look.
        with suppress(Refused, SourceError):
            await self._files.look_again(ino)
        self._kernel.invalidate_attributes(ino)
        return True

    def _is_busy(self, ino: Ino) -> bool:
        """Whether a file is open here, or the source has not got all of it."""
        if not self._names.attributes(ino).is_file:
            return False
        node = self._names.node(ino)
        if node is not None and node.object and not self._files.is_clean(node):
            return True
        return self._is_open(ino) or self._files.is_in_use(ino)

    async def _hide(self, directory: Ino, name: bytes, ino: Ino) -> bool:
        """Whether a name is gone now that others have removed."""
        names = self._names
        if self._is_busy(ino) or names.lookup(directory, name) != ino:
            return False
        if names.attributes(ino).is_dir:
            if self._has_more(ino):
                with suppress(OSError, MonarchError):
                    await self._look(ino, is_gone=True)
            if self._has_more(ino) or names.lookup(directory, name) != ino:
                return False
        self._writing.take_away(directory, name, by=None)
        self._kernel.invalidate_attributes(ino)
        return True

    def _has_more(self, directory: Ino) -> bool:
        return next(iter(self._names.list_from(directory, 0)), None) is not None


def _listed(source: Source, path: bytes, known: tuple[int, int, int] | None) -> _Listed:
    """Raises OSError."""
    return source.at_root(_listed_at, path, known)


def _listed_at(root: int, path: bytes, known: tuple[int, int, int] | None) -> _Listed:
    fd = open_beneath(root, path, _DIRECTORY)
    try:
        before = _seen(os.fstat(fd))
        if before == known:
            return _Listed(before, None)
        with os.scandir(fd) as entries:
            names = {
                os.fsencode(entry.name): _Entry(entry.inode(), _kind(entry)) for entry in entries
            }
        status = os.fstat(fd)
        is_old = abs(time.time_ns() - status.st_ctime_ns) > _YOUNG_S * 1e9
        return _Listed(before if is_old and _seen(status) == before else None, names)
    finally:
        os.close(fd)


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
    fd = open_beneath(root, directory, os.O_PATH | os.O_DIRECTORY)
    try:
        return os.readlink(name, dir_fd=fd)
    finally:
        os.close(fd)
