"""The known state of the source: a snapshot, and the differences found since.

The snapshot is immutable. An entry that the source has changed or lost is recorded here, so memory
grows with the changes and not with the files. Used from one thread, that of the event loop; nothing
here waits.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace

from monarch.errors import SourceError
from monarch.namespace.snapshot import Snapshot
from monarch.posix.acl import NO_ACLS, Acls
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino


class SourceView:
    """The source's side of a namespace, with the drained data of the mount. ``differs`` is called
    with each inode that does not match the snapshot, for components that read the snapshot
    directly."""

    def __init__(self, snapshot: Snapshot, differs: Callable[[Ino], None]) -> None:
        self.snapshot = snapshot
        self._differs = differs
        self.refreshed: dict[Ino, Attributes] = {}
        self.gone: set[Ino] = set()
        self._acls: dict[Ino, Acls] = {}
        self._moved: dict[Ino, bytes] = {}
        self._has_unreadable = snapshot.info().unreadable > 0

    def differs(self, ino: Ino) -> None:
        if ino < WRITTEN_INO:
            self._differs(ino)

    def refresh(self, ino: Ino, attributes: Attributes, acls: Acls | None = None) -> None:
        """Records attributes of the source that differ; the entry may exist again. Its access
        control lists stay if None are given."""
        self.differs(ino)
        self.gone.discard(ino)
        parent = attributes.parent if ino >= WRITTEN_INO else self.snapshot.attributes(ino).parent
        self.refreshed[ino] = replace(attributes, ino=ino, parent=parent)
        if acls is not None:
            self._acls[ino] = acls

    def forget(self, ino: Ino) -> None:
        self.differs(ino)
        self.refreshed.pop(ino, None)
        self.gone.add(ino)

    def move(self, ino: Ino, path: bytes) -> None:
        self.differs(ino)
        self._moved[ino] = path

    def moved(self, ino: Ino) -> bytes | None:
        return self._moved.get(ino)

    def drop(self, ino: Ino) -> None:
        """Removes all that is known of an inode that is not used any more."""
        self.refreshed.pop(ino, None)
        self._acls.pop(ino, None)
        self._moved.pop(ino, None)
        if ino >= WRITTEN_INO:
            self.gone.discard(ino)

    def has_more(self, ino: Ino) -> bool:
        """Whether more than the attributes of an inode is known."""
        acls = self._acls.get(ino, NO_ACLS)
        has_acls = acls is not NO_ACLS or (ino < WRITTEN_INO and self.snapshot.has_acls)
        return has_acls or ino in self._moved

    def put_away(self, ino: Ino) -> None:
        """Removes an inode whose attributes are now kept in the spill file."""
        self.refreshed.pop(ino, None)
        self._acls.pop(ino, None)

    def attributes(self, ino: Ino) -> Attributes:
        """The newest known attributes; of a removed entry, the last ones."""
        return self.refreshed.get(ino) or self.snapshot.attributes(ino)

    def acls(self, ino: Ino) -> Acls:
        """The last known access control lists at the source."""
        known = self._acls.get(ino)
        if known is None:
            known = NO_ACLS if ino >= WRITTEN_INO else self.snapshot.acls(ino)
        return known

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        """The child with a name, or None. Raises SourceError, EACCES, if it was not listed."""
        ino = self.snapshot.lookup(parent, name)
        if ino is None:
            self.require_listed(parent)
        return None if ino is None or ino in self.gone else ino

    def require_listed(self, ino: Ino) -> None:
        """Raises SourceError, EACCES, if the entries of a directory are unknown."""
        if not self.is_listed(ino):
            raise SourceError("the directory could not be listed", errno=errno.EACCES)

    def is_listed(self, ino: Ino) -> bool:
        return not self._has_unreadable or not self.snapshot.unreadable(ino)

    def walk(self, ino: Ino) -> Iterator[tuple[Ino, Attributes]]:
        """The regular files at and beneath ``ino`` that were not removed, as Snapshot.walk."""
        for found, attributes in self.snapshot.walk(ino):
            if found not in self.gone:
                yield found, self.refreshed.get(found, attributes)

    def names(self, ino: Ino) -> Iterator[tuple[Ino, bytes]]:
        """The names of an entry in the snapshot: directory and name, the first name first. For a
        file with several names the first call searches the whole snapshot."""
        if ino == ROOT_INO:
            return
        snapshot = self.snapshot
        yield snapshot.parent(ino), snapshot.name(ino)
        attributes = snapshot.attributes(ino)
        if attributes.nlink > 1 and not stat.S_ISDIR(attributes.mode):
            for slot in snapshot.aliases(ino):
                yield snapshot.parent(slot), snapshot.name(slot)
