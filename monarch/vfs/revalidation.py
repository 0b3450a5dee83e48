"""What happens when the source, or a copy, is not what the snapshot or the record says.

The source is the truth: an entry that differs is refreshed, its copy dropped, the kernel told to
ask again. Readers that hold bytes of the old version keep that version whole until the last of
them is done.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace

from monarch.errors import SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.placement.controller import Controller
from monarch.placement.residency import SOURCE, Residency
from monarch.posix.acl import Acls, narrowed
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.tiers.source import SourceFile, identity_now, identity_of
from monarch.transfer.source_calls import SourceCalls
from monarch.types import ROOT_INO, Attributes, Ino, attributes_of, file_now_ns, kept_ns
from monarch.vfs.binding import Binding

log = logging.getLogger(__name__)


class Revalidation:
    """``bindings`` are the open inodes. ``remove_copy`` takes an inode and the tier to clear,
    ``copy_unreadable`` the tier of a copy that could not be read, and the error.

    ``attributes_changed`` tells the kernel that what it knows of an inode is out of date,
    ``names_changed`` that the listing of a directory is. ``is_held_elsewhere`` says whether
    somebody has a copy open beside the bindings, and has its last release told.
    ``may_be_half_read`` says whether somebody of whom nothing is told may have read a part of it.
    """

    def __init__(
        self,
        *,
        source_calls: SourceCalls,
        names: Namespace,
        bindings: Mapping[Ino, Binding],
        residency: Residency,
        controller: Controller,
        metrics: Metrics,
        remove_copy: Callable[[Ino, int], None],
        copy_unreadable: Callable[[int, OSError], None],
        attributes_changed: Callable[[Ino], None],
        names_changed: Callable[[Ino], None],
        is_held_elsewhere: Callable[[Ino], bool],
        may_be_half_read: Callable[[Ino], bool],
        forget_pages: Callable[[Ino], None],
    ) -> None:
        self._source_calls = source_calls
        self._names = names
        self._bindings = bindings
        self._residency = residency
        self._controller = controller
        self._metrics = metrics
        self._remove_copy = remove_copy
        self._copy_unreadable = copy_unreadable
        self._attributes_changed = attributes_changed
        self._names_changed = names_changed
        self._is_held_elsewhere = is_held_elsewhere
        self._may_be_half_read = may_be_half_read
        self._forget_pages = forget_pages
        self._limiter = Limiter(60.0)

    async def look_again(self, ino: Ino) -> None:
        """Ask the source what a file is now; if it changed, refresh the entry and drop copies.

        While readers hold bytes of the old version, that waits until the last of them is done.
        Raises SourceError, ENOENT if the file is gone or something else has its name, ESTALE if
        others may open it than before, EIO if the source denies what it must have.
        """
        if self._names.is_written(ino):
            node = self._names.node(ino)
            # What the source has of others comes from here.
            if node is not None and node.is_file and node.names and not node.object:
                await self._look_again_at(node)
            return
        known = self._names.attributes(ino)
        status = await self._source_calls.status(ino, self._names.path(ino))
        if status is None and await self._has_another_name(known):
            return
        is_other = status is not None and status.st_ino != known.source_ino
        if is_other and await self._has_another_name(known):
            # Its other names must not show what others have put in the place of this one.
            self._noticed(ino, "has lost one of its names to another file at the source")
            status = await self._source_calls.status(ino, self._names.path(ino))
        if status is None and not await self._can_be_gone(known):
            raise self._source_calls.failed(ino, errno.EIO)
        if status is None or not stat.S_ISREG(status.st_mode):
            self._lost(ino, "is gone from the source")
            raise self._gone(ino)
        acls = self._names.acls(ino)
        mode = self._shown_mode(status, acls)
        if identity_of(status) == known.identity and mode == known.mode:
            return
        access = (known.mode, known.uid, known.gid, acls)
        acls = await self._source_calls.acls(ino, self._names.path(ino))
        mode = self._shown_mode(status, acls)
        if self._is_held(known, status):
            # All who have it open see one version whole, its size included. Who comes when they
            # are done finds the mark.
            self._residency.mark_changed(ino)
            fresh = replace(known, mode=mode, uid=status.st_uid, gid=status.st_gid)
        elif self._may_be_half_read(ino):
            # A reader must not find another end of the file than that of the version at which it
            # began: its next read fails.
            first = not self._residency.is_changed(ino)
            self.forget_copy(ino)
            self._residency.mark_changed(ino)
            # Else the kernel would go on serving the old version from its pages.
            self._forget_pages(ino)
            fresh = replace(known, mode=mode, uid=status.st_uid, gid=status.st_gid)
            if first and fresh == known:
                self._noticed(ino, "changed at the source")
        else:
            self.forget_copy(ino)
            fresh = attributes_of(status, known.ino, known.parent, mode)
        if fresh != known or acls != access[3]:
            self._names.refresh(ino, fresh, acls)
            self._noticed(ino, "changed at the source")
        if (mode, status.st_uid, status.st_gid, acls) != access:
            # The kernel let the caller in by what it knew: told this, it looks at the mode anew.
            raise SourceError(
                f"{self._source_calls.path_text(ino)}: access changed", errno=errno.ESTALE
            )

    async def _look_again_at(self, node: Node) -> None:
        """The same for a file that was written here, and is read from the source by now."""
        ino, path = node.ino, self._names.visible_path(node.ino)
        status = await self._source_calls.status(ino, path)
        if len(node.names) > 1:
            await self._drop_names_of_others(node)
        if status is None and not await self._can_be_gone(node.attributes):
            raise self._source_calls.failed(ino, errno.EIO)
        if status is None or not stat.S_ISREG(status.st_mode):
            parents = {parent for parent, _ in node.names}
            for parent, name in list(node.names):
                self._names.unlink(parent, name, now_ns=file_now_ns())
            for parent in parents:
                self._names_changed(parent)
            self._metrics.changed()
            raise self._gone(ino)
        acls = await self._source_calls.acls(ino, path)
        known, access = node.attributes, (node.mode, node.uid, node.gid)
        # The source has all that was set here, and others have changed it.
        node.keeps_mode = node.keeps_owner = node.keeps_times = False
        fresh = attributes_of(status, known.ino, known.parent, self._shown_mode(status, acls))
        self._names.refresh(ino, fresh, acls)
        if (known.size, known.mtime_ns, known.source_ino) != (
            node.size,
            node.mtime_ns,
            node.source_ino,
        ):
            self._metrics.changed()
            self._limiter.warning(
                log,
                "written",
                "%r was changed at the source since it was written here",
                os.fsdecode(path),
            )
        self._attributes_changed(ino)
        if (node.mode, node.uid, node.gid) != access:
            raise SourceError(f"{os.fsdecode(path)!r}: access changed", errno=errno.ESTALE)

    async def _drop_names_of_others(self, node: Node) -> None:
        """Take from a file those of its names that are not its own at the source any more, if one
        is. Raises SourceError, ESTALE, if there were any: who has found one looks it up anew."""
        left = []
        for named in list(node.names):
            path = self._names.path_of(*named)
            status = await self._source_calls.status(node.ino, path)
            if status is None or status.st_ino != node.source_ino:
                left.append(named)
        left = [named for named in left if named in node.names]
        if node.object or len(left) == len(node.names):
            return
        for parent, name in left:
            self._names.unlink(parent, name, now_ns=file_now_ns())
            self._names_changed(parent)
        self._metrics.changed()
        self._attributes_changed(node.ino)
        raise SourceError(f"{self._source_calls.path_text(node.ino)}: changed", errno=errno.ESTALE)

    def _shown_mode(self, status: os.stat_result, acls: Acls) -> int:
        """The mode to show: narrower if the kernel was not told to decide with the lists."""
        return status.st_mode if self._names.has_acls else narrowed(status.st_mode, acls)

    def _is_held(self, known: Attributes, status: os.stat_result) -> bool:
        """Whether readers have other bytes open than the source has now; it is then outdated."""
        then = (known.size, known.mtime_ns, known.source_ino)
        if (status.st_size, kept_ns(status.st_mtime_ns), status.st_ino) == then:
            return False
        binding = self._bindings.get(known.ino)
        if binding is None:
            return self._is_held_elsewhere(known.ino)
        if binding.file is not None and status.st_ino == known.source_ino:
            return False  # written in place: readers see it as readers of the source do
        binding.outdated = True
        return True

    async def find_again(self, ino: Ino) -> None:
        """Ask the source for a file that was gone. Raises SourceError, ENOENT if it still is."""
        status = await self._source_calls.status(ino, self._names.path(ino))
        if status is None or not stat.S_ISREG(status.st_mode):
            raise self._gone(ino)
        if self._names.is_gone(ino):
            acls = await self._source_calls.acls(ino, self._names.path(ino))
            mode = self._shown_mode(status, acls)
            fresh = attributes_of(status, ino, self._names.attributes(ino).parent, mode)
            self._names.refresh(ino, fresh, acls)
            self._names_changed(self._names.attributes(ino).parent)
            log.info("%s is back at the source", self._source_calls.path_text(ino))

    async def _can_be_gone(self, known: Attributes) -> bool:
        """Whether a directory above was changed, as it is when a name is taken from it.

        A distributed file system that has lost a server may deny files that exist; its word is
        then no reason to forget them. Raises SourceError.
        """
        while known.ino != ROOT_INO:
            known = self._names.attributes(known.parent)
            now = await self._source_calls.status(known.ino, self._names.path(known.ino))
            if now is not None:
                mtime_ns, ctime_ns = kept_ns(now.st_mtime_ns), kept_ns(now.st_ctime_ns)
                return mtime_ns > known.mtime_ns or ctime_ns > known.ctime_ns
        return False

    async def _has_another_name(self, known: Attributes) -> bool:
        """Whether a file that is gone under its first name is there under another, a hard link."""
        if known.nlink == 1:
            return False
        for path in self._names.other_paths(known.ino):
            status = await self._source_calls.status(known.ino, path)
            if status is not None and status.st_ino == known.source_ino:
                self._names.move(known.ino, path)
                return True
        return False

    def _lost(self, ino: Ino, what: str) -> None:
        if not self._names.is_gone(ino):
            self.forget_copy(ino)
            self._names.forget(ino)
            self._names_changed(self._names.attributes(ino).parent)
            self._noticed(ino, what)

    def _gone(self, ino: Ino) -> SourceError:
        return SourceError(f"{self._source_calls.path_text(ino)}: gone", errno=errno.ENOENT)

    async def notice_rewriting(self, file: SourceFile, ino: Ino) -> None:
        """Look whether a file that others have open was rewritten in place.

        If so, pages of its old version must not be mixed with the new ones. Raises SourceError.
        """
        file.retain()
        try:
            now = await self._source_calls.call(
                ino, self._source_calls.source.on, file, self._names.path(ino), identity_now
            )
        finally:
            file.release()
        known = self._names.attributes(ino)
        if (now.size, now.mtime_ns) != (known.size, known.mtime_ns):
            await self.look_again(ino)

    def _noticed(self, ino: Ino, what: str) -> None:
        self._metrics.changed()
        self._residency.mark_changed(ino)
        self._attributes_changed(ino)
        self._limiter.warning(
            log,
            what,
            "%s %s since the snapshot; run: monarch snapshot refresh",
            self._source_calls.path_text(ino),
            what,
        )

    def copy_failed(self, attributes: Attributes, tier: int, error: OSError) -> None:
        """A copy that cannot be read is a miss, not an error."""
        kind = errno.errorcode.get(error.errno or 0, "error")
        self._metrics.error(f"copy-{kind}")
        self._limiter.warning(
            log,
            f"copy {tier}",
            "tier %s: copy of %s dropped, and the source read instead: %s (%s)",
            self._metrics.names[tier],
            self._source_calls.path_text(attributes.ino),
            error.strerror,
            kind,
        )
        self.forget_copy(attributes.ino)
        self._copy_unreadable(tier, error)

    def forget_copy(self, ino: Ino) -> int:
        """Drop the copy of ``ino`` if there is one; its size in bytes."""
        size = self._names.attributes(ino).size
        tier = self._controller.dropped(ino, size)
        if tier == SOURCE:
            return 0
        self._remove_copy(ino, tier)
        return size
