"""The names that the mount shows: the snapshot, differences of the source, and written changes.

The snapshot is immutable. Differences of the source (``known``) and changes through the mount
(``written``) are recorded for each entry. A written change takes precedence: it will be drained to
the source. Used from one thread, that of the event loop; nothing here waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from monarch.errors import MonarchError
from monarch.namespace.overlay import Overlay
from monarch.namespace.schema import SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.source_view import SourceView
from monarch.posix.acl import NO_ACLS, Acls
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino


class Namespace(Overlay):
    """Answers as Snapshot does; ``refresh`` and ``forget`` record the state of the source.

    ``differs`` is called when an inode no longer matches the snapshot, so that the datapath stops
    answering from the snapshot. Counts are those of the snapshot.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        differs: Callable[[Ino], None],
        *,
        first_ino: Ino = WRITTEN_INO,
        spill: Path | None = None,
    ) -> None:
        super().__init__(SourceView(snapshot, differs), first_ino=first_ino, spill=spill)

    @property
    def snapshot(self) -> Snapshot:
        return self._known.snapshot

    @property
    def entries(self) -> int:
        return self.snapshot.entries

    @property
    def files(self) -> int:
        return self.snapshot.files

    @property
    def bytes_total(self) -> int:
        return self.snapshot.bytes_total

    @property
    def refreshed(self) -> int:
        """The number of entries that were found changed."""
        return len(self._known.refreshed)

    @property
    def put_away_failure(self) -> str:
        """Why written names that are not in memory cannot be read, empty if all could be."""
        return self._spill.failure if self._spill is not None else ""

    def info(self) -> SnapshotSummary:
        return self.snapshot.info()

    @property
    def has_acls(self) -> bool:
        """Whether the snapshot has access control lists, so that the kernel decides with them."""
        return self.snapshot.has_acls

    def acls(self, ino: Ino) -> Acls:
        """The access control lists of an entry, without its mode (posix/acl.py)."""
        return self._known.acls(ino)

    def path_text(self, ino: Ino) -> str:
        """The path of an inode for a message: quoted, since a name may have any byte."""
        try:
            return repr(os.fsdecode(self.path(ino)))
        except MonarchError:
            return f"inode {ino}"

    def refresh(self, ino: Ino, attributes: Attributes, acls: Acls = NO_ACLS) -> None:
        """Records other attributes of the source; the entry may exist there again.

        Values that were set through the mount, and removals, are kept.
        """
        node = self.node(ino)
        if node is None:
            if ino in self._removed or ino >= WRITTEN_INO:
                return
        elif not node.names and ino != ROOT_INO:
            return
        else:
            node.follow(attributes)
        self._known.refresh(ino, attributes, acls)

    def forget(self, ino: Ino) -> None:
        """Records that the source has lost an entry: neither ``lookup`` nor a listing shows it.

        A file whose bytes were written through the mount stays.
        """
        if ino == ROOT_INO:
            raise ValueError("the root of a mount cannot go")
        node = self.node(ino)
        if node is None or not node.object:
            self._known.forget(ino)

    def move(self, ino: Ino, path: bytes) -> None:
        """Records that the source has the entry only under ``path`` now."""
        self._known.move(ino, path)

    def lost(self, parent: Ino, name: bytes) -> Ino | None:
        """The inode whose name the source has lost, if no other inode has the name since."""
        if not self._known.gone or parent >= WRITTEN_INO or parent in self._removed:
            return None
        listing = self._listings.get(parent)
        ino = None if listing is None else listing.find(name, self._in_snapshot)
        if ino is None:
            ino = self.snapshot.lookup(parent, name)
        if ino not in self._known.gone:
            return None
        node = self.node(ino)
        # A node without names was written after it was lost: its former name does not count.
        return ino if node is None or node.names else None

    def other_paths(self, ino: Ino) -> Iterator[bytes]:
        """Where the source has a file but under its first name: its hard links.

        The first call takes a pass over the snapshot.
        """
        if ino >= WRITTEN_INO:
            paths = self.visible_paths(ino)
            next(paths, None)
            return paths
        return map(self.snapshot.path, self.snapshot.aliases(ino))
