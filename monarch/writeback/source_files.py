"""Written files whose bytes are at the source: under a name, or staged as the tier was full; and
objects that are not needed any more for that."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from monarch.errors import Refused, SourceChanged, SourceError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.posix.credentials import Credentials, can_act_as_others
from monarch.tiers.source import Source, SourceFile, identity_of
from monarch.transfer.source_calls import SourceCalls
from monarch.types import ROOT_INO, Ino
from monarch.writeback.drain import Drain
from monarch.writeback.object_states import ObjectStates
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import Objects
from monarch.writeback.op import Op
from monarch.writeback.open_file import OpenTable
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.tier_objects import FULL
from monarch.writeback.unlinked import UnlinkedFiles

log = logging.getLogger(__name__)

# How often a file that changes at the source is opened there.
_ATTEMPTS = 3


@dataclass(eq=False, repr=False)
class DrainedObjects:
    """Belongs to the event loop. A file whose object is *released* is read from the source."""

    _object_table: ObjectTable
    _on_disk: Objects
    _drain: Drain
    _opens: OpenTable
    _recorder: Recorder
    _unlinked: UnlinkedFiles
    # Whether another node keeps a file as well, as it is.
    has_replica: Callable[[Node], bool] = field(default=lambda node: False)

    def durable(self, node: Node) -> bytes:
        """How safe the bytes are: ``none``, ``local``, ``peer`` or ``source``."""
        if not node.object:
            return b"source"
        seq, synced = self._object_table.states.content(node.object)
        file = self._opens.files.get(node.ino)
        if seq == 0 or (file is not None and file.is_changed):
            return b"none"
        if self._is_done(node.object) and not (file is not None and file.is_write_through):
            # The tier may have lost the bytes, and the content was left out.
            return b"source" if self.is_settled(node) else b"none"
        if self._on_disk.failure(node.object):
            return b"none"
        if not synced:
            return b"none"
        return b"peer" if self.has_replica(node) else b"local"

    def is_only_here(self, node: Node) -> bool:
        """Whether bytes were made safe here that the source lacks under the file's name, whatever
        was written since."""
        states = self._object_table.states
        if states.is_safe_only_here(node.object):
            return True
        return states.content(node.object)[1] and not self._is_done(node.object)

    def is_clean(self, node: Node) -> bool:
        """Whether the source has all of a file that has an object."""
        return self._is_done(node.object) and self._object_table.states.is_drained(node.object)

    def is_settled(self, node: Node) -> bool:
        """Whether the source gets no more of a file that has an object. It may lack a file that
        others have removed, if nothing was written here."""
        is_unwritten = self._object_table.states.is_unwritten(node.object)
        return self.is_clean(node) or (is_unwritten and self._is_done(node.object))

    def _is_done(self, number: int) -> bool:
        """Whether the last change of an object's file is at the source for good."""
        return self._drain.progress.is_done(self._object_table.states.last(number))

    def is_away(self, node: Node) -> bool:
        """Whether a file went to the source directly, and no process has it open."""
        return (
            self._object_table.states.is_write_through(node.object)
            and node.ino not in self._opens.files
        )

    def is_read_there(self, node: Node) -> bool:
        """Whether a file went to the source directly, and processes only read it there."""
        file = self._opens.files.get(node.ino)
        is_read = file is not None and file.place.is_from_source
        return is_read and self._object_table.states.is_write_through(node.object)

    async def arrive(self, node: Node) -> None:
        """Waits until a file that went to the source directly is there, and then the source's.
        Raises Refused with what the source answers to the drain, and EIO if the bytes are lost."""
        try:
            await self._drain.progress.wait_or_fail(self._object_table.states.last(node.object))
        except OSError as error:
            raise Refused(error.errno or errno.EIO) from error
        if not node.object or not (self.is_away(node) or self.is_read_there(node)):
            return
        if not self._object_table.states.is_drained(node.object):
            raise Refused(errno.EIO)
        self.release(node)

    def release(self, node: Node) -> int:
        """Read a file from the source from now on; how many bytes are free."""
        number = node.object
        self._opens.fast.forget_object(node.ino)
        freed = self._object_table.leave(node)
        self._recorder.remove_object(number, is_at_source=True)
        return freed

    def release_if_clean(self, node: Node) -> bool:
        """Releases the object of a file that the source has, unless a process has it open."""
        if not self.is_clean(node) or self._opens.is_in_use(node.ino):
            return False
        self.release(node)
        return True

    def release_oldest(self, size: int, *, count: int = 0) -> int:
        """Releases objects that the source has and no process has open, the oldest first, until
        ``size`` bytes are free and ``count`` objects released; returns the freed bytes."""
        if size > 0:
            self._unlinked.forget_objects()
        # A process that reads one without Python keeps its bytes.
        busy, is_done = self._opens.busy(), self._drain.progress.is_done
        leaving = self._object_table.leaving(size, count=count, busy=busy, is_done=is_done)
        return sum(self.release(node) for node in leaving)

    def release_arrived(self) -> None:
        """Release the files that went to the source directly and are there. Raises Refused."""
        busy, is_done = self._opens.busy(), self._drain.progress.is_done
        for node in self._object_table.arrived(busy=busy, is_done=is_done):
            self.release(node)


@dataclass(eq=False, repr=False)
class SourceFiles:
    """Belongs to the event loop. Calls of the source raise SourceError. ``revalidate`` asks the
    source what a file is now, as ``Revalidation.look_again``."""

    _names: Namespace
    _states: ObjectStates
    _opens: OpenTable
    _unlinked: UnlinkedFiles
    _drained: DrainedObjects
    _drain: Drain
    _staged: StagedContents
    calls: SourceCalls
    _revalidate: Callable[[Ino], Awaitable[None]]

    async def stage(
        self,
        path_now: Callable[[], bytes],
        number: int,
        *,
        by: tuple[Credentials, ...],
        is_new: bool,
    ) -> int:
        """The descriptor of a staged file, in the place of an object that has no room. ``path_now``
        returns the path of the file on the mount; ``is_new``: the source has no such file.

        The directories above the file get to the source first, with their names and attributes.
        Raises Refused with the answer of the source to these changes.
        """
        while True:
            path = await self._with_directories(path_now)
            op = Op(kind="through", path=path, object=number, through=True, by=by[0], also=by[1:])
            if not can_act_as_others():
                op = replace(op, by=None, also=())
            part = partial(self._staged.open_part, op, make=True, is_new=is_new)
            self._states.stage(number, path)
            fd = await self.calls.call(ROOT_INO, part)
            if not self._drain.progress.last_of_directories(path):
                return fd
            # A directory was renamed meanwhile, and the source may have made that change already.
            await self.discard(number, fd)

    async def _with_directories(self, path_now: Callable[[], bytes]) -> bytes:
        """The path of a file, once the source has the directories above it. Raises Refused."""
        while seq := self._drain.progress.last_of_directories(path := path_now()):
            try:
                await self._drain.progress.wait_or_fail(seq)
            except OSError as error:
                raise Refused(error.errno or errno.EIO) from error
        return path

    async def discard(self, number: int, fd: int) -> None:
        """Closes and removes a staged file of an object that keeps its bytes."""
        path = self._states.unstage(number)
        places = [] if path is None else self._drain.queue.source_paths(path)
        with suppress(SourceError):
            await self.calls.call(ROOT_INO, _discard, self._staged, places, number, fd)

    def take_up(self) -> None:
        """Shows the staged files of earlier mounts with the size that they have: a daemon may have
        been killed before it recorded the last writes. May wait for the source."""
        for node in self._names.nodes():
            number = node.object
            if not (node.names and self._states.is_write_through(number)):
                continue
            if self._states.is_drained(number):
                continue
            found = (self._staged.staged_status(at, number) for at in self._staged_beside(node))
            status = next(filter(None, found), None)
            if status is not None and status.st_size != node.size:
                node.set_content(status.st_size, blocks=0, mtime_ns=status.st_mtime_ns)

    async def open_away(self, node: Node, *, to_read: bool) -> SourceFile | None:
        """A file that went to the source directly, if it is read while it is staged there; else
        None. Raises Refused if it cannot get its name."""
        if not self._drained.is_away(node):
            return None
        if to_read and (staged := await self._open_staged(node)) is not None:
            return staged
        # It is read where it will be: the drain has little to do for it.
        try:
            await self._drained.arrive(node)
        except Refused as error:
            if to_read and error.errno in FULL:
                # No reader lacks room.
                raise Refused(errno.EIO) from error
            raise
        return None

    def _staged_beside(self, node: Node) -> list[bytes]:
        """The paths beside which a staged file may be, the earliest first: the source makes renames
        of the directories above it later than the mount."""
        beside, paths = self._states.staged_beside(node.object), self._drain.queue.source_paths
        assert beside is not None
        # The drain moves it beside the first name of the file before it gets that name.
        return list(dict.fromkeys((*paths(beside), *paths(self._names.visible_path(node.ino)))))

    async def _open_staged(self, node: Node) -> SourceFile | None:
        """A staged file, to read it: the source may lack room for its name. None if it has it."""
        number, source = node.object, self.calls.source
        if self._drain.progress.is_done(self._states.last(number)):
            return None
        places, source_ino = self._staged_beside(node), self._states.staged_inos.get(number, 0)
        with suppress(SourceChanged):
            staged = self._staged.open_staged
            return await self.calls.call(node.ino, staged, places, number, source_ino)
        # It has a name, which another change is to follow.
        path, source_ino = self._drain.queue.path_of(number), self._states.source_ino(number)
        if path is None or not source_ino:
            return None
        with suppress(SourceChanged):
            return await self.calls.call(node.ino, source.open_known, path, source_ino)
        return None

    async def sync_staged(self) -> list[int]:
        """Syncs the staged files that no process has synced; their objects. Those that cannot be
        synced are left out."""
        synced = list[int]()
        if not (unsynced := {*self._states.unsynced_staged()}):
            return synced
        for node in [node for node in self._names.nodes() if node.object in unsynced]:
            try:
                if not node.names or (staged := await self._open_staged(node)) is None:
                    continue
                try:
                    await self.calls.call(node.ino, os.fsync, staged.fd)
                finally:
                    staged.release()
            except (SourceError, Refused) as error:
                path = self._names.path_text(node.ino, is_visible=True)
                log.warning("%s may not survive a restart of the machine: %s", path, error)
            else:
                synced.append(node.object)
        return synced

    async def open_instead(self, node: Node, *, to_read: bool) -> SourceFile | None:
        """Opens a file at the source whose object the tier has lost.

        With ``to_read`` the file is returned if a change of it waits for the drain. Else the object
        is released once the drain has made all changes, and None is returned. Raises SourceError,
        and Refused: EIO if the source lacks bytes of the file, else the answer of the source to the
        drain."""
        number = node.object
        if not (self._states.is_drained(number) or self._states.is_unwritten(number)):
            raise Refused(errno.EIO)
        if to_read and not self._drain.progress.is_done(self._states.last(number)):
            path, known = self._drain.queue.path_of(number), self._names.at_source(node.ino)
            source_ino = self._states.source_ino(number) or (known.source_ino if known else 0)
            if path is not None and source_ino:
                open_known = self.calls.source.open_known
                with suppress(SourceChanged):
                    return await self.calls.call(node.ino, open_known, path, source_ino)
        try:
            await self._drain.progress.wait_or_fail(self._states.last(number))
        except OSError as error:
            raise Refused(error.errno or errno.EIO) from error
        if node.object == number and not self.release_lost(node):
            raise Refused(errno.EIO)
        return None

    def release_lost(self, node: Node) -> bool:
        """Has a file read from the source whose object lacks bytes. Returns False if the source
        lacks some as well."""
        if not node.names or not self._drained.is_clean(node):
            return False
        log.error(
            "the tier has lost bytes of %s: it is read from the source, which has all of it",
            self._names.path_text(node.ino, is_visible=True),
        )
        self._drained.release(node)
        return True

    async def open(self, ino: Ino) -> SourceFile:
        """A file whose object was released, as the version that the source has now. Raises
        SourceError, and Refused, ESTALE, if others have removed it."""
        source = self.calls.source
        for _ in range(_ATTEMPTS):
            known = self._names.at_source(ino)
            with suppress(SourceChanged):
                source_ino = 0 if known is None else known.source_ino
                file = await self.calls.at(ino, _open_file, source, source_ino)
                known = self._names.at_source(ino)
                if known is None or identity_of(file.status) == known.identity:
                    return file
                file.release()
            await self.look_again(ino)
        raise SourceChanged("changes all the time")

    async def look_again(self, ino: Ino) -> None:
        """Reads a file anew that has changed at the source. Raises Refused, ESTALE if gone."""
        if self._names.is_written(ino):
            # It, or a directory above, may have a name that the source does not know yet.
            await self._drain.progress.settle_paths([*self._names.visible_paths(ino)])
            self._opens.outdated.add(ino)
        try:
            await self._revalidate(ino)
        except SourceError as error:
            node = self._names.node(ino)
            if node is not None and not node.names:
                self._unlinked.leave(node)
            if error.errno == errno.ENOENT:
                # The caller looks its name up anew, and may make it.
                raise Refused(errno.ESTALE) from error
            raise

    async def show_again(self, node: Node) -> bool:
        """Shows a file as it is at the source after changes of its attributes were given up.
        Returns False if other changes of the file wait."""
        if not node.names or not node.has_source_bytes or node.undrained:
            return False
        node.follow_all()
        ino = node.ino
        self._names.refresh(ino, self._names.stored(ino))
        with suppress(Refused, SourceError):
            await self.look_again(ino)
        return True

    async def give_back(self, node: Node) -> None:
        """Show a file that no process has open as the source has it. What was written here is given
        up, and the drain brings no more of it."""
        number = node.take_object()
        self._names.have_xattrs(node, {})
        self._unlinked.remove_object(number)
        with suppress(Refused, SourceError):
            await self.look_again(node.ino)


def _open_file(path: bytes, source: Source, source_ino: int) -> SourceFile:
    """Opens the file with that number, or any if it is 0. Raises OSError, SourceChanged."""
    file = source.open(path)
    if source_ino not in (0, file.status.st_ino):
        file.release()
        raise SourceChanged(f"{os.fsdecode(path)!r} is another file")
    return file


def _discard(staged: StagedContents, places: list[bytes], number: int, fd: int) -> None:
    with suppress(OSError):
        os.close(fd)
    staged.discard_part(places, number)
