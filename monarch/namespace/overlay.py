"""The names that the mount shows: a snapshot, what the source was found to have, what was written.

The snapshot is immutable. Where the source turns out to be different (``known``), or somebody made,
changed or removed something through the mount (``written``), that is noted by entry. What was
written wins: the source is where it goes. Used from one thread, the event loop's; nothing here
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from monarch.acl import NO_ACLS, Acls
from monarch.namespace.known import Known
from monarch.namespace.schema import SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.written import Written
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino


class Namespace(Written):
    """Answers as Snapshot does; ``refresh`` and ``forget`` note what the source has.

    ``differs`` is told each inode of the snapshot of which it is no more what is shown, for those
    who ask the snapshot itself. Counts are the snapshot's.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        differs: Callable[[Ino], None],
        *,
        first_ino: Ino = WRITTEN_INO,
        spill: Path | None = None,
    ) -> None:
        super().__init__(Known(snapshot, differs), first_ino=first_ino, spill=spill)

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
        """How many entries were found changed."""
        return len(self._known.refreshed)

    def info(self) -> SnapshotSummary:
        return self.snapshot.info()

    @property
    def has_acls(self) -> bool:
        """Whether the snapshot has access control lists, so that the kernel decides with them."""
        return self.snapshot.has_acls

    def acls(self, ino: Ino) -> Acls:
        """The access control lists of an entry, without its mode (acl.py)."""
        return self._known.acls(ino)

    def refresh(self, ino: Ino, attributes: Attributes, acls: Acls = NO_ACLS) -> None:
        """The source has other attributes than was known; it may have the entry again.

        What was set through the mount is shown as before, and what was removed stays so.
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
        """The source has the entry no more: neither ``lookup`` nor a listing shows it.

        A file whose bytes are absorbed is shown as before.
        """
        if ino == ROOT_INO:
            raise ValueError("the root of a mount cannot go")
        node = self.node(ino)
        if node is None or not node.object:
            self._known.forget(ino)

    def move(self, ino: Ino, path: bytes) -> None:
        """The source has the entry no more where it was, but still, or now, under ``path``."""
        self._known.move(ino, path)

    def lost(self, parent: Ino, name: bytes) -> Ino | None:
        """Whose name it is that the source was found not to have, and nobody else has since."""
        if not self._known.gone or parent >= WRITTEN_INO or parent in self._removed:
            return None
        listing = self._listings.get(parent)
        ino = None if listing is None else listing.find(name)
        if ino is None:
            ino = self.snapshot.lookup(parent, name)
        if ino not in self._known.gone:
            return None
        node = self.node(ino)
        # One that was taken when it was gone already is another's by now, whom nobody can name.
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
