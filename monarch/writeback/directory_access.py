"""Shows modes, owners and access control lists of directories as others have changed them.

The mount shows what others make in a directory (``others.py``). An earlier mode of that directory,
or of one above it, could let processes read entries that the source keeps from them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace

from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix import acl
from monarch.posix.acl import Acls
from monarch.posix.credentials import can_act_as_others
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import open_beneath
from monarch.posix.thread_pool import ThreadPool
from monarch.tiers.source import Source
from monarch.types import ROOT_INO, Ino, KernelCaches, kept_ns
from monarch.writeback.drain import Drain
from monarch.writeback.expected import is_shared

_DIRECTORY = os.O_PATH | os.O_DIRECTORY
# The most directories in ``followed``.
_MOST = 1000


@dataclass(frozen=True, slots=True)
class DirectoryFound:
    """A directory of the source."""

    status: os.stat_result
    acls: Acls


@dataclass(frozen=True, slots=True)
class Shown:
    """What decides about access to a directory on the mount. ``is_waiting``: the source lacks a
    change of it."""

    directory: Ino
    mode: int
    uid: int
    gid: int
    acls: Acls
    is_waiting: bool

    @property
    def rights(self) -> tuple[int, int, int]:
        return self.mode, self.uid, self.gid


@dataclass(eq=False, repr=False)
class DirectoryAccess:
    """Belongs to the event loop. ``followed`` are the directories that were last shown in another
    way than before."""

    _names: Namespace
    _drain: Drain
    _kernel: KernelCaches
    followed: dict[Ino, None] = field(default_factory=dict, init=False)

    def shown(self, directory: Ino) -> Shown:
        """What the mount shows of a directory now."""
        now, acls = self._names.attributes(directory), self._names.acls(directory)
        is_waiting = self._drain.state.entries.is_waiting(directory)
        return Shown(directory, now.mode, now.uid, now.gid, acls, is_waiting)

    async def show_above(self, directory: Ino, threads: ThreadPool, source: Source) -> bool:
        """Shows all directories above one as they are at the source; returns as ``show``."""
        above: dict[bytes, Shown] = {}
        while directory != ROOT_INO:
            directory = self._names.attributes(directory).parent
            above[self._names.visible_path(directory)] = self.shown(directory)
        found = await threads.run(source.at_root, _all_found, [*above])
        results = [self.show(above[path], found[path]) for path in found]
        return all(results)

    def show(self, before: Shown, found: DirectoryFound) -> bool:
        """Shows a directory with the mode, owner and lists that it was found to have at the source.
        Returns whether what others have put into it may be shown.

        ``before`` was shown before it was found. What was set on the mount since then, and what the
        source lacks, stays. So does a directory in whose place others have put another one, until
        the source has all that was written beneath: its users have relied on the earlier mode.
        """
        names, directory, status = self._names, before.directory, found.status
        mode = status.st_mode
        if not names.has_acls:
            mode = acl.narrowed(mode, found.acls)
        now = replace(before, mode=mode, uid=status.st_uid, gid=status.st_gid, acls=found.acls)
        if now == before or before.is_waiting or names.is_gone(directory):
            return True
        is_other = self._is_other(directory, status)
        if is_other and self._drain.queue.pending.has_names_in(names.visible_path(directory)):
            return False
        node = names.node(directory)
        if self.shown(directory) != before or not self._may_follow(node, now):
            return True
        if node is not None:
            node.keeps_mode = node.keeps_owner = False
        # The known time of modification stays: it tells whether a name may be gone since.
        known = names.at_source(directory) or names.attributes(directory)
        if is_other and known.source_ino:
            ctime_ns = kept_ns(status.st_ctime_ns)
            known = replace(known, source_ino=status.st_ino, ctime_ns=ctime_ns)
        names.refresh(directory, replace(known, mode=mode, uid=now.uid, gid=now.gid), now.acls)
        self._kernel.invalidate_attributes(directory)
        self.followed[directory] = None
        if len(self.followed) > _MOST:
            del self.followed[next(iter(self.followed))]
        return True

    def _is_other(self, directory: Ino, found: os.stat_result) -> bool:
        """Whether it is another directory than the one that the mount knows at the source."""
        made = self._drain.state.entries.made.get(directory)
        known = made or self._names.at_source(directory)
        return known is not None and known.source_ino not in (0, found.st_ino)

    def _may_follow(self, node: Node | None, now: Shown) -> bool:
        """Whether a directory that is different at the source is to be shown like that."""
        path = self._names.visible_path(now.directory)
        if not stat.S_ISDIR(now.mode) or any(
            entry.op.path == path and entry.op.kind in ("attr", "xattr", "mkdir")
            for entry in self._drain.queue.entries()
        ):
            # A change over an older snapshot has another number of the directory.
            return False
        made = self._drain.state.entries.made.get(now.directory)
        if can_act_as_others() or (made is not None and is_shared(made)):
            return True
        # A daemon that is not root owns at the source what others have made on the mount.
        return node is None or not node.keeps_owner or node.uid == now.uid


def directory_found(fd: int) -> DirectoryFound:
    """An open directory of the source. Raises OSError."""
    access, default = (acl.read(fd, b"", name) for name in acl.NAMES)
    return DirectoryFound(os.fstat(fd), Acls(acl.stored(access), default))


def _all_found(root: int, paths: Collection[bytes]) -> dict[bytes, DirectoryFound]:
    found = {}
    for path in paths:
        with suppress(OSError), closing_fd(open_beneath(root, path, _DIRECTORY)) as fd:
            found[path] = directory_found(fd)
    return found
