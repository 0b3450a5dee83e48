"""fsync: when it returns, the file and all earlier changes of names are safe."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.namespace.namespace import Namespace
from monarch.types import Ino
from monarch.writeback.change_log import ChangeLog
from monarch.writeback.copy_up import object_of
from monarch.writeback.drain import Drain
from monarch.writeback.open_files import WrittenFiles


@dataclass(eq=False, repr=False)
class Fsyncs:
    """Belongs to the event loop. ``waits_for_source``: safe means at the source.

    ``user`` is the user who calls fsync, as for ``Drain.wait_for``. Raises Refused and SourceError.
    """

    _names: Namespace
    _files: WrittenFiles
    _changes: ChangeLog
    _drain: Drain
    _waits_for_source: bool

    async def sync(self, ino: Ino, user: int | None) -> None:
        """Have a file safe, and all that was done to names."""
        node = self._names.node(ino)
        if node is None or not (node.names and node.object) or self._files.is_open(ino):
            await self._sync(ino, user)
            return
        # The process may have opened it without Python, to read.
        await self._files.open(node)
        try:
            await self._sync(ino, user)
        finally:
            self._files.release(ino)

    async def _sync(self, ino: Ino, user: int | None) -> None:
        while True:
            seq = await self._files.sync(ino) if self._files.is_open(ino) else 0
            await self._changes.sync()
            if not self._waits_for_source:
                return
            if seq:
                await self._drain.progress.wait(seq)
            if not (seq and self._files.is_left_out(ino)):
                break
        await self._wait_for_names(ino, user)

    async def sync_directory(self, ino: Ino, user: int | None) -> None:
        """Have all that was done to names safe."""
        await self._changes.sync()
        if self._waits_for_source:
            await self._wait_for_names(ino, user)

    async def _wait_for_names(self, ino: Ino, user: int | None) -> None:
        path, number = self._names.visible_path(ino), object_of(self._names, ino)
        await self._drain.progress.wait_for(path, object=number, user=user)
