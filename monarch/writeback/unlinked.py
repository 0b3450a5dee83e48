"""Files that no name leads to: they are kept while a process may read them, and then forgotten."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.types import Ino
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import OpenTable
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.tier_objects import TierObjects

# Grace period before an unlinked file's object is deleted, in seconds: a process may have looked up
# its name already, and be about to open it.
_GRACE_S = 1.0
# How many directories, and files without an object, are kept when their names are gone.
_OBJECTLESS_KEPT = 4096


@dataclass(eq=False, repr=False)
class UnlinkedFiles:
    """Belongs to the event loop."""

    _names: Namespace
    _object_table: ObjectTable
    _opens: OpenTable
    _objects: TierObjects
    _recorder: Recorder
    _staged: StagedContents
    # As ``DrainQueue.source_paths``.
    _source_paths: Callable[[bytes], list[bytes]]
    # Files with an object and since when, and nodes without one, the longest unlinked first.
    _since: dict[Ino, float] = field(default_factory=dict, init=False)
    _objectless: dict[Ino, None] = field(default_factory=dict, init=False)
    # Files that are still read without Python.
    _read: set[Ino] = field(default_factory=set, init=False)

    def leave(self, node: Node) -> None:
        """Forget a file after a while that no name leads to and no process has open.

        Directories, and files that are read from the source, may be open all the same: the last of
        them are kept.
        """
        ino = node.ino
        if node.object:
            self._opens.fast.forget_object(ino)
            if self._opens.fast.outdate(ino):
                self._read.add(ino)
            else:
                self._since[ino] = trio.current_time()
            return
        self._objectless[ino] = None
        while len(self._objectless) > _OBJECTLESS_KEPT:
            oldest = next(iter(self._objectless))
            try:
                self._names.forget_node(oldest)
            except Refused:
                break
            del self._objectless[oldest]

    def closed_by_readers(self, ino: Ino) -> None:
        """The last process that read a file without Python has closed it."""
        if ino in self._read:
            self._read.remove(ino)
            self._since[ino] = trio.current_time()

    def forget_old(self) -> None:
        """Forget the files whose grace period is over. Raises Refused."""
        self.forget_objects(trio.current_time() - _GRACE_S)

    def forget_all(self) -> None:
        """Forget all files at once that no process has open, as far as is known."""
        self.forget_objects()
        for ino in self._objectless:
            self._names.forget_node(ino)
        self._objectless.clear()

    def forget_objects(self, before: float = math.inf) -> None:
        """Forget the files with objects that were unlinked before a time of the loop's clock."""
        for ino, since in list(self._since.items()):
            if since > before:
                break
            node = self._names.node(ino)
            del self._since[ino]
            if node is None or node.names or ino in self._opens.files:
                continue
            if self._opens.is_open(ino):
                self._since[ino] = trio.current_time()
                continue
            self.forget(node)

    def forget_at_end(self) -> None:
        """The same when the mount is gone, and with it all readers. Raises Refused."""
        self._since |= dict.fromkeys(self._read, 0.0)
        self.forget_objects()

    def forget(self, node: Node) -> None:
        """Forget a file that no name leads to and no process has open."""
        number = node.take_object()
        self._opens.fast.forget_object(node.ino)
        self._opens.outdated.discard(node.ino)
        self._names.forget_node(node.ino)
        if number:
            self.remove_object(number)

    def remove_object(self, number: int) -> None:
        """Remove an object that no file has, and what is staged of it at the source."""
        self._discard_staged(number)
        self._object_table.forget(number)
        self._recorder.remove_object(number)

    def _discard_staged(self, number: int) -> None:
        if (path := self._object_table.states.unstage(number)) is not None:
            places = self._source_paths(path)
            self._objects.threads.start(self._staged.discard_part, places, number)

    def abandon_object(self, number: int, *fds: int) -> None:
        """Give up an object that was created for a file that was not made, and what is staged of
        it at the source."""
        for fd in fds:
            if fd >= 0:
                self._objects.threads.start(os.close, fd)
        self.remove_object(number)

    def abandon_staged(self, number: int, fd: int) -> None:
        """Give up the staged file ``fd`` of an object that keeps its bytes."""
        self._objects.threads.start(os.close, fd)
        self._discard_staged(number)
