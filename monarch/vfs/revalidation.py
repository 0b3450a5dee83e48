"""What happens when the source differs from the snapshot.

The source is the truth: an entry that differs is refreshed, its copy is dropped, and the kernel
asks for its attributes again. Readers that hold bytes of the old version keep that version whole
until the last of them has closed the file.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass, field, replace

import trio

from monarch.errors import SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.placement.residency import Residency
from monarch.posix.acl import Acls, narrowed
from monarch.telemetry.log import Limiter
from monarch.telemetry.metrics import Metrics
from monarch.tiers.source import identity_of
from monarch.transfer.source_calls import SourceCalls
from monarch.types import ROOT_INO, Attributes, Identity, Ino, attributes_of, file_now_ns, kept_ns
from monarch.vfs.binding import Bindings
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.promotions import Promotions

log = logging.getLogger(__name__)

# How long a change that the drain may have made is awaited in the journal, and the interval of
# checks, in seconds.
_RECORDED_S = 1.0
_RECORDED_STEP_S = 0.002


@dataclass(eq=False, repr=False)
class Revalidation:
    """Compares entries with the source. Belongs to the event loop; only coroutines wait."""

    _names: Namespace
    _source_calls: SourceCalls
    _bindings: Bindings
    _residency: Residency
    _promotions: Promotions
    _kernel: KernelView
    _metrics: Metrics
    _limiter: Limiter = field(default_factory=lambda: Limiter(log), init=False)

    async def look_again(self, ino: Ino) -> None:
        """Compares a file with the source; refreshes its entry and drops its copy if it changed.

        If readers hold bytes of the old version, that waits until the last of them has closed it.
        Raises SourceError: ENOENT if the file is gone or its name is of something else, ESTALE if
        its owner, mode or access control lists changed, EIO if the source denies a file that must
        exist.
        """
        if self._names.is_written(ino):
            node = self._names.node(ino)
            # If it has an object, the bytes written here will replace those of the source.
            if node is not None and node.is_file and node.names and not node.object:
                await self._look_again_at_written(node)
            return
        known = self._names.attributes(ino)
        status = await self._source_calls.status_of(ino, known.source_ino)
        if status is None and await self._has_another_name(known):
            return
        is_other = status is not None and status.st_ino != known.source_ino
        if is_other and await self._has_another_name(known):
            # Its other names must not show the file that replaced this one.
            self._noticed(ino, "has lost one of its names to another file at the source")
            status = await self._source_calls.status_of(ino, known.source_ino)
        can_be_gone = status is not None or await self._can_be_gone(known)
        if self._names.is_written(ino):
            # It was changed through the mount meanwhile: the drain may have made the difference.
            await self.look_again(ino)
            return
        if not can_be_gone:
            raise self._source_calls.failed(ino, errno.EIO)
        if status is None or not stat.S_ISREG(status.st_mode):
            self._lost(ino)
            raise self._gone(ino)
        acls = self._names.acls(ino)
        mode = self._shown_mode(status, acls)
        if identity_of(status) != known.identity or mode != known.mode:
            await self._refresh(known, status, acls)

    async def _refresh(self, known: Attributes, status: os.stat_result, acls: Acls) -> None:
        """A file of the snapshot has changed; ``acls`` are its lists as known so far."""
        ino = known.ino
        access, recorded = (*self._shown_access(ino), acls), self._recorded(ino)
        acls = await self._source_calls.acls(ino)
        if (self._shown_access(ino), self._recorded(ino)) != (access[:3], recorded):
            # Attributes were changed on the mount meanwhile, and ``status`` may be older.
            return
        node = self._names.node(ino)
        if (
            node is not None
            and not node.object
            and (not node.undrained or _is_of_another(node, known, status))
        ):
            node.follow_all()
        mode = self._shown_mode(status, acls)
        only_access = replace(known, mode=mode, uid=status.st_uid, gid=status.st_gid)
        if self._is_held(known, status):
            # All processes that have it open see one version whole, its size included. The first
            # open after them finds the mark.
            self._residency.mark_changed(ino)
            fresh = only_access
        elif self._kernel.may_be_half_read(ino):
            # A reader must not find another end of the file than that of the version that it has
            # begun: its next read fails.
            first = not self._residency.is_changed(ino)
            self._promotions.forget_copy(ino)
            self._residency.mark_changed(ino)
            # Otherwise the kernel would serve the old version from its pages.
            self._kernel.drop_pages(ino)
            fresh = only_access
            if first and fresh == known:
                self._noticed(ino, "changed at the source")
        else:
            self._promotions.forget_copy(ino)
            fresh = attributes_of(status, ino, known.parent, mode)
        if fresh != known or acls != access[3]:
            self._names.refresh(ino, fresh, acls)
            if not self._has_lost_names_here(known, status):
                self._noticed(ino, "changed at the source")
        if (*self._shown_access(ino), acls) != access:
            # The kernel has admitted the caller by the old mode; after this error it checks again.
            raise SourceError(f"{self._names.path_text(ino)}: access changed", errno=errno.ESTALE)

    def _has_lost_names_here(self, known: Attributes, status: os.stat_result) -> bool:
        """Whether the file at the source differs only because the drain has removed names of it:
        that changes its number of names and its time of change."""
        node = self._names.node(known.ino)
        return (
            node is not None
            and node.nlink <= status.st_nlink < known.nlink
            and (status.st_size, kept_ns(status.st_mtime_ns), status.st_ino)
            == (known.size, known.mtime_ns, known.source_ino)
        )

    def _shown_access(self, ino: Ino) -> tuple[int, int, int]:
        shown = self._names.attributes(ino)
        return shown.mode, shown.uid, shown.gid

    async def _look_again_at_written(self, node: Node) -> None:
        """The same for a file that was written or changed here and is read from the source now."""
        ino = node.ino
        if len(node.names) > 1:
            await self._drop_names_of_others(node)
        status = await self._settled_status(ino)
        can_be_gone = status is not None or await self._can_be_gone(node.attributes)
        if node.object:
            # It was written meanwhile: the bytes written here will replace those of the source.
            return
        if not can_be_gone:
            raise self._source_calls.failed(ino, errno.EIO)
        if status is None or not stat.S_ISREG(status.st_mode):
            if node.has_source_bytes:
                self._promotions.forget_copy(ino)
            self._unlink(list(node.names))
            self._metrics.changed()
            raise self._gone(ino)
        if node.has_source_bytes:
            await self._look_again_at_changed(node, status)
            return
        recorded = (node.object, *self._recorded(ino))
        acls = await self._source_calls.acls(ino)
        if not node.names or (node.object, *self._recorded(ino)) != recorded:
            # It was changed on the mount meanwhile, and ``status`` may be older.
            return
        known = node.attributes
        # The source had all that was set here, and another program has changed it.
        node.follow_all()
        fresh = attributes_of(status, ino, known.parent, self._shown_mode(status, acls))
        self._names.refresh(ino, fresh, acls)
        now = node.attributes
        before = known.size, known.mtime_ns, known.source_ino
        if (now.size, now.mtime_ns, now.source_ino) != before:
            self._metrics.changed()
            what = "%s was changed at the source since it was written here"
            self._limiter.warning("written", what, self._names.path_text(ino, is_visible=True))
        self._kernel.invalidate_attributes(ino)
        if (known.mode, known.uid, known.gid) != (now.mode, now.uid, now.gid):
            raise SourceError(
                f"{self._names.path_text(ino, is_visible=True)}: access changed", errno=errno.ESTALE
            )

    async def _settled_status(self, ino: Ino) -> os.stat_result | None:
        """The status of a file at the source. A change by the drain that the mount has not recorded
        yet is awaited, up to ``_RECORDED_S``. Raises SourceError."""
        until = trio.current_time() + _RECORDED_S
        while True:
            stored, drained = self._recorded(ino)
            status = await self._source_calls.status_of(ino, stored.source_ino)
            if self._recorded(ino) != (stored, drained):
                # The status may be older than the change that the drain has made meanwhile.
                until = trio.current_time() + _RECORDED_S
                continue
            found = None if status is None else identity_of(status)
            is_settled = found == stored or not self.may_be_drained(ino, found)
            if is_settled or trio.current_time() >= until:
                return status
            await trio.sleep(_RECORDED_STEP_S)

    def _recorded(self, ino: Ino) -> tuple[Identity, int]:
        """The identity that is known of a file at the source, and the last change of its attributes
        that the drain has recorded. Such a record may have the same identity as before: after a
        change that others may have made, it keeps the known time of change."""
        node = self._names.node(ino)
        return self._names.stored(ino).identity, 0 if node is None else node.drained

    def may_be_drained(self, ino: Ino, found: Identity | None) -> bool:
        """Whether a file that is ``found`` at the source is as known by now, or may differ only
        because the drain is changing its attributes: the source has the change before the mount has
        it recorded."""
        node, known = self._names.node(ino), self._names.stored(ino).identity
        if found is None or node is None or found == known or not node.undrained:
            return found == known
        is_same_file = (found.size, found.source_ino) == (known.size, known.source_ino)
        mtimes = (known.mtime_ns, *(node.undrained_mtimes or {}).values())
        return is_same_file and found.mtime_ns in map(kept_ns, mtimes)

    async def _look_again_at_changed(self, node: Node, status: os.stat_result) -> None:
        """The same if only attributes of a file of the snapshot were changed here: changes that the
        source may lack stay."""
        known, acls = self._names.stored(node.ino), self._names.acls(node.ino)
        if identity_of(status) != known.identity:
            await self._refresh(known, status, acls)

    async def _drop_names_of_others(self, node: Node) -> None:
        """Removes from a file those of its names that are another file's at the source, unless all
        are. Raises SourceError, ESTALE, if there were any: the caller looks its name up again."""
        others = []
        for named in list(node.names):
            status = await self._source_calls.status_of(node.ino, node.source_ino, named)
            if status is None or status.st_ino != node.source_ino:
                others.append(named)
        others = [named for named in others if named in node.names]
        if node.object or len(others) in (0, len(node.names)):
            return
        self._unlink(others)
        self._metrics.changed()
        self._kernel.invalidate_attributes(node.ino)
        raise SourceError(f"{self._names.path_text(node.ino)}: changed", errno=errno.ESTALE)

    def _unlink(self, names: list[tuple[Ino, bytes]]) -> None:
        for parent, name in names:
            self._names.unlink(parent, name, now_ns=file_now_ns())
        for parent in {parent for parent, _ in names}:
            self._kernel.invalidate_listing(parent)

    def _shown_mode(self, status: os.stat_result, acls: Acls) -> int:
        """The mode to show: narrower if the kernel does not check access control lists."""
        return status.st_mode if self._names.has_acls else narrowed(status.st_mode, acls)

    def _is_held(self, known: Attributes, status: os.stat_result) -> bool:
        """Whether readers have other bytes open than the source has now; they are then outdated."""
        then = (known.size, known.mtime_ns, known.source_ino)
        if (status.st_size, kept_ns(status.st_mtime_ns), status.st_ino) == then:
            return False
        binding = self._bindings.get(known.ino)
        if binding is None:
            return self._bindings.outdate_elsewhere(known.ino)
        if binding.file is not None and status.st_ino == known.source_ino:
            return False  # written in place: readers see it as readers of the source do
        binding.outdated = True
        return True

    async def find_again(self, ino: Ino) -> None:
        """Asks the source for a file that was gone. Raises SourceError, ENOENT if it still is."""
        known = self._names.stored(ino)
        status = await self._source_calls.status_of(ino, known.source_ino)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise self._gone(ino)
        if self._names.is_gone(ino):
            acls = await self._source_calls.acls(ino)
            mode = self._shown_mode(status, acls)
            parent = self._names.attributes(ino).parent
            self._names.refresh(ino, attributes_of(status, ino, parent, mode), acls)
            self._kernel.invalidate_listing(parent)
            log.info("%s is back at the source", self._names.path_text(ino))

    async def _can_be_gone(self, known: Attributes) -> bool:
        """Whether a directory above was changed, as it is when a name is removed from it. A
        distributed file system that has lost a server may deny files that exist. Raises
        SourceError."""
        while known.ino != ROOT_INO:
            known = self._names.attributes(known.parent)
            # A directory that was changed on the mount shows the times of that change.
            then = self._names.at_source(known.ino) or known
            now = await self._source_calls.status_of(known.ino, then.source_ino)
            if now is not None:
                mtime_ns, ctime_ns = kept_ns(now.st_mtime_ns), kept_ns(now.st_ctime_ns)
                return mtime_ns > then.mtime_ns or ctime_ns > then.ctime_ns
        return False

    async def _has_another_name(self, known: Attributes) -> bool:
        """Whether a file that its first name does not lead to has another name, a hard link."""
        if known.nlink == 1:
            return False
        for path in self._names.other_paths(known.ino):
            status = await self._source_calls.status(known.ino, path)
            if status is not None and status.st_ino == known.source_ino:
                self._names.move(known.ino, path)
                return True
        return False

    def _lost(self, ino: Ino) -> None:
        if not self._names.is_gone(ino):
            self._promotions.forget_copy(ino)
            self._names.forget(ino)
            self._promotions.left(ino)
            self._kernel.invalidate_listing(self._names.attributes(ino).parent)
            self._noticed(ino, "is gone from the source")

    def _gone(self, ino: Ino) -> SourceError:
        return SourceError(f"{self._names.path_text(ino)}: gone", errno=errno.ENOENT)

    def changed_while_read(self, ino: Ino) -> SourceError:
        """The error for a reader that would mix two versions of a file."""
        words = f"{self._names.path_text(ino)}: changed while it was read"
        return SourceError(words, errno=errno.ESTALE)

    def distrust(self, ino: Ino, *, differs: bool) -> None:
        """The source may have other bytes under the same times, or has, with ``differs``.

        Bytes that were fetched before are served only to processes that have the file open, and to
        those that open it meanwhile.
        """
        if self._promotions.forget_copy(ino):
            self._residency.want(ino)
            self._promotions.wake()
        if self._kernel.sends_opens or differs:
            self._kernel.drop_pages(ino)
        if self._kernel.sends_opens:
            binding = self._bindings.get(ino)
            if binding is None:
                self._bindings.outdate_elsewhere(ino)
            else:
                binding.outdated = binding.file is None
        elif differs and self._kernel.was_read(ino):
            # A process that has begun to read the old version must not continue with this one.
            self._residency.mark_changed(ino)
        if differs:
            self._metrics.changed()
            log.info("%s was written twice within a tick of the source", self._names.path_text(ino))

    def _noticed(self, ino: Ino, what: str) -> None:
        self._metrics.changed()
        self._residency.mark_changed(ino)
        self._kernel.invalidate_attributes(ino)
        words = "%s %s since the snapshot; run: monarch snapshot refresh"
        self._limiter.warning(what, words, self._names.path_text(ino), what)


def _is_of_another(node: Node, known: Attributes, status: os.stat_result) -> bool:
    """Whether the source has another file in the place of a known one, or the file belongs to
    another user: attributes that were set on the mount and wait are not for that one."""
    if status.st_ino != known.source_ino:
        return True
    return status.st_uid != known.uid and not node.keeps_owner
