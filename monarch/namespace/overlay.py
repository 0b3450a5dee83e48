"""The names that the mount shows: a snapshot, and what has been found different since.

The snapshot is immutable. When the source turns out to have changed an entry or to have lost it,
that one entry is noted here, so memory grows with the changes and not with the files. Used from
one thread, the event loop's; nothing here waits.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace

from monarch.errors import SourceError
from monarch.namespace.schema import SnapshotSummary
from monarch.namespace.snapshot import Snapshot
from monarch.types import ROOT_INO, Attributes, Ino


class Namespace:
    """Answers as Snapshot does; ``refresh`` and ``forget`` note what is different.

    ``differs`` is told each inode of which that is so, for those who ask the snapshot itself.
    """

    def __init__(self, snapshot: Snapshot, differs: Callable[[Ino], None]) -> None:
        self._snapshot = snapshot
        self._differs = differs
        self._refreshed: dict[Ino, Attributes] = {}
        self._gone: set[Ino] = set()
        self._moved: dict[Ino, bytes] = {}
        self._has_unreadable = snapshot.info().unreadable > 0

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def entries(self) -> int:
        return self._snapshot.entries

    @property
    def files(self) -> int:
        return self._snapshot.files

    @property
    def bytes_total(self) -> int:
        return self._snapshot.bytes_total

    @property
    def refreshed(self) -> int:
        """How many entries were found changed."""
        return len(self._refreshed)

    def info(self) -> SnapshotSummary:
        return self._snapshot.info()

    def refresh(self, ino: Ino, attributes: Attributes) -> None:
        """The source tells other attributes than the snapshot; it may have the entry again."""
        self._differs(ino)
        self._gone.discard(ino)
        self._refreshed[ino] = replace(
            attributes, ino=ino, parent=self._snapshot.attributes(ino).parent
        )

    def forget(self, ino: Ino) -> None:
        """The source has the entry no more: neither ``lookup`` nor a listing shows it."""
        if ino == ROOT_INO:
            raise ValueError("the root of a mount cannot go")
        self._differs(ino)
        self._refreshed.pop(ino, None)
        self._gone.add(ino)

    def is_gone(self, ino: Ino) -> bool:
        return ino in self._gone

    def move(self, ino: Ino, path: bytes) -> None:
        """The source has a file no more under its first name, but still under ``path``."""
        self._differs(ino)
        self._moved[ino] = path

    def lost(self, parent: Ino, name: bytes) -> Ino | None:
        """The number of an entry that the snapshot has and the source was found not to have."""
        ino = self._snapshot.lookup(parent, name) if self._gone else None
        return ino if ino in self._gone else None

    def attributes(self, ino: Ino) -> Attributes:
        """The newest that is known; of an entry that is gone, what it was."""
        return self._refreshed.get(ino) or self._snapshot.attributes(ino)

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        """Raises SourceError, EACCES, if the directory could not be listed."""
        ino = self._snapshot.lookup(parent, name)
        if ino is None:
            self._require_listed(parent)
        return None if ino is None or ino in self._gone else ino

    def resolve(self, path: bytes) -> Ino | None:
        ino = ROOT_INO
        for part in path.split(b"/"):
            if part not in (b"", b"."):
                found = self.lookup(ino, part)
                if found is None:
                    return None
                ino = found
        return ino

    def list_from(self, ino: Ino, start: int) -> Iterator[tuple[int, bytes, Attributes]]:
        """The entries of a directory from the index ``start`` on, each with its index.

        The index is an entry's place in the snapshot, so that a listing can be continued behind
        an entry whatever went in between. Raises SourceError, EACCES, if it could not be listed.
        """
        self._require_listed(ino)
        listing = enumerate(self._snapshot.list_from(ino, start), start)
        if not self._refreshed and not self._gone:
            for index, (name, attributes) in listing:
                yield index, name, attributes
            return
        for index, (name, attributes) in listing:
            if attributes.ino not in self._gone:
                yield index, name, self._refreshed.get(attributes.ino, attributes)

    def _require_listed(self, ino: Ino) -> None:
        """What is in a directory that could not be listed is unknown; it is not empty."""
        if self._has_unreadable and self._snapshot.unreadable(ino):
            raise SourceError("the directory could not be listed", errno=errno.EACCES)

    def walk(self, ino: Ino = ROOT_INO) -> Iterator[tuple[Ino, Attributes]]:
        """The regular files at and beneath ``ino`` that are not gone, as Snapshot.walk."""
        for found, attributes in self._snapshot.walk(ino):
            if found not in self._gone:
                yield found, self._refreshed.get(found, attributes)

    def path(self, ino: Ino) -> bytes:
        """Where the source has the entry, relative to its root."""
        return self._moved.get(ino) or self._snapshot.path(ino)

    def other_paths(self, ino: Ino) -> Iterator[bytes]:
        """The paths of a file but its first: its hard links. Takes a pass over the snapshot."""
        return map(self._snapshot.path, self._snapshot.aliases(ino))

    def readlink(self, ino: Ino) -> bytes:
        return self._snapshot.readlink(ino)
