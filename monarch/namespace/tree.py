"""The names and attributes that the mount shows: snapshot, source differences, written changes.

A written change takes precedence: it will be drained to the source. Used from one thread, that of
the event loop; nothing here waits. Calls that need an inode or a name that was moved out of memory
raise Unanswered while the disk of that file hangs.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from monarch.errors import MonarchError, Refused
from monarch.namespace.listing import ADDED_INDEX, REMOVED, Listings, Named
from monarch.namespace.overlay import Node, Overlay, xattr_bytes
from monarch.namespace.snapshot import Snapshot, resolve, walk
from monarch.namespace.source_view import SourceView
from monarch.posix import acl
from monarch.posix.acl import Acls
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino

# Memory of an inode of the snapshot that was removed, in bytes.
_REMOVED_BYTES = 64


class Tree:
    """The merged tree, for reading.

    Methods that take an inode number raise IndexError for one that the snapshot does not have, and
    Refused, ESTALE, for one that was made through the mount and is forgotten. Methods that take a
    name raise SourceError, EACCES, if the directory could not be listed when the snapshot was made.
    ``entries``, ``files`` and ``bytes_total`` are counts of the snapshot; ``has_acls``: it has
    access control lists, so that the kernel checks them.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        differs: Callable[[Ino], None],
        *,
        first_ino: Ino,
        spill: Path | None,
    ) -> None:
        self.snapshot = snapshot
        self.entries = snapshot.entries
        self.files = snapshot.files
        self.bytes_total = snapshot.bytes_total
        self.has_acls = snapshot.has_acls
        self.info = snapshot.info
        self._known = SourceView(snapshot, differs)
        self._listings = Listings(snapshot)
        self._overlay = Overlay(self._known, self._listings, first_ino=first_ino, spill=spill)
        # Inodes of the snapshot that lost all names through the mount.
        self._removed: set[Ino] = set()
        self.acls = partial(_acls, self._overlay, self._known)
        self.node = self._overlay.get
        self.nodes = self._overlay.all
        self.is_written = self._overlay.has
        self.put_away = self._overlay.put_away
        self.answers = self._overlay.answers
        # The paths at which an entry of a path may be at the source while renames wait.
        self._places: Callable[[bytes], list[bytes]] = _only

    # -- numbers ---------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """About how much memory all that takes which differs from the snapshot."""
        removed = len(self._removed) * _REMOVED_BYTES
        return self._overlay.held_bytes + self._listings.held_bytes + removed

    def more_for_xattr(self, ino: Ino, name: bytes, value: bytes) -> int:
        """How many bytes ``held_bytes`` grows if an inode gets an extended attribute."""
        node = self._overlay.peek(ino)
        before = {} if node is None else {key: v for key, v in node.xattrs.items() if key == name}
        return xattr_bytes({name: value}) - xattr_bytes(before)

    @property
    def put_away_failure(self) -> str:
        """Why written names that are not in memory cannot be read, empty if all could be."""
        return self._overlay.failure

    @property
    def refreshed(self) -> int:
        """The number of entries that were found changed."""
        return len(self._known.refreshed)

    # -- inodes ----------------------------------------------------------------------------------

    def is_forgotten(self, ino: Ino) -> bool:
        """Whether it was removed through the mount, and nothing is known of it any more."""
        return (ino >= WRITTEN_INO or ino in self._removed) and not self._overlay.has(ino)

    def is_gone(self, ino: Ino) -> bool:
        """Whether it has no name any more, through the mount or at the source."""
        if ino in self._known.gone or ino in self._removed:
            return True
        node = self._overlay.peek(ino)
        if node is None:
            return ino >= WRITTEN_INO
        return not node.names and ino != ROOT_INO

    def attributes(self, ino: Ino) -> Attributes:
        """The newest known attributes; of an entry that is gone, the last ones."""
        node = self._overlay.peek(ino)
        if node is not None:
            return node.attributes
        self._require_known(ino)
        return self._known.attributes(ino)

    def at_source(self, ino: Ino) -> Attributes | None:
        """The last known attributes at the source, whatever was written since; of an inode that was
        made through the mount, those of ``refresh``, or None."""
        refreshed = self._overlay.refreshed(ino)
        if refreshed is not None:
            return refreshed
        if ino >= WRITTEN_INO:
            return self._known.refreshed.get(ino)
        return self._known.attributes(ino)

    def is_rewritten(self, ino: Ino) -> bool:
        """Whether it was made or changed through the mount, and not only the attributes or names of
        a file."""
        node = self._overlay.peek(ino)
        return node is not None and not node.has_source_bytes

    def stored(self, ino: Ino) -> Attributes:
        """The attributes of the version whose bytes a reader gets: those at the source, if only
        attributes of the file were changed through the mount."""
        node = self._overlay.peek(ino)
        if node is None or not node.has_source_bytes:
            return self.attributes(ino)
        return self._overlay.refreshed(ino) or self._known.attributes(ino)

    def readlink(self, ino: Ino) -> bytes:
        """The target of a symbolic link. Raises ValueError for anything else."""
        node = self._overlay.peek(ino)
        if node is None:
            self._require_known(ino)
            return self.snapshot.readlink(ino)
        if not stat.S_ISLNK(node.mode):
            raise ValueError(f"inode {ino} is not a symbolic link")
        return node.target

    def _require_known(self, ino: Ino) -> None:
        """All that is known of an inode that was made through the mount is in its node."""
        if ino >= WRITTEN_INO:
            raise Refused(errno.ESTALE)

    # -- names -----------------------------------------------------------------------------------

    def lookup(self, parent: Ino, name: bytes) -> Ino | None:
        """The inode of a name; None if the name is free, or ``parent`` is gone or no directory."""
        if self._overlay.is_empty:
            return self._known.lookup(parent, name) if parent < WRITTEN_INO else None
        listing = self._listings.get(parent)
        if listing is not None:
            found = listing.find(name, self.snapshot)
            if found is not None:
                return found if found != REMOVED and found not in self._known.gone else None
        if parent >= WRITTEN_INO or parent in self._removed:
            return None
        return self._known.lookup(parent, name)

    def resolve(self, path: bytes) -> Ino | None:
        """The inode at a path relative to the root. Symbolic links are not followed."""
        return resolve(path, self.lookup)

    def lost(self, parent: Ino, name: bytes) -> Ino | None:
        """The inode whose name the source has lost, if no other inode has the name since."""
        if not self._known.gone or parent >= WRITTEN_INO or parent in self._removed:
            return None
        ino = self._listings.find(parent, name)
        if ino is None:
            ino = self.snapshot.lookup(parent, name)
        if ino not in self._known.gone:
            return None
        node = self._overlay.get(ino)
        # A node without names was written after it was lost: its former name does not count.
        return ino if node is None or node.names else None

    def list_from(
        self, ino: Ino, start: int, *, end: int | None = None
    ) -> Iterator[tuple[int, bytes, Attributes]]:
        """The entries of a directory from the index ``start`` on, each with its index.

        The index is an entry's place in the snapshot; added entries have higher ones. So a listing
        can be continued behind an entry whatever was added or removed in between. It ends at the
        entries that exist when the first one is read; with ``end``, at those that existed when
        ``list_end`` gave that. Raises SourceError, EACCES, if it could not be listed.
        """
        if ino < WRITTEN_INO:
            self._known.require_listed(ino)
        return self._entries(ino, start, end)

    def list_end(self, ino: Ino) -> int:
        """The index behind all present entries of a directory. A listing that is continued to there
        ends, though a process renames each file that it finds."""
        listing = self._listings.get(ino)
        return ADDED_INDEX if listing is None else listing.end

    def _entries(
        self, ino: Ino, start: int, end: int | None
    ) -> Iterator[tuple[int, bytes, Attributes]]:
        """As list_from; of a directory that could not be listed, only added entries."""
        listing = self._listings.get(ino)
        if end is None:
            end = self.list_end(ino)
        refreshed, gone = self._known.refreshed, self._known.gone
        if ino < WRITTEN_INO and start < ADDED_INDEX and ino not in self._removed:
            entries = enumerate(self.snapshot.list_from(ino, start), start)
            if self._overlay.is_empty and not refreshed and not gone:
                for index, (name, attributes) in entries:
                    yield index, name, attributes
                return
            changed = {} if listing is None else listing.changed
            for index, (name, attributes) in entries:
                found = changed.get(name, attributes.ino)
                if found == REMOVED or found in gone:
                    continue
                node = self._overlay.peek(found)
                if node is not None:
                    yield index, name, node.attributes
                elif found == attributes.ino:
                    yield index, name, refreshed.get(found, attributes)
                else:
                    yield index, name, self._known.attributes(found)
        if listing is not None:
            for index, name, found in listing.added(start, end):
                if found not in gone:
                    yield index, name, self.attributes(found)

    def walk(self, ino: Ino = ROOT_INO) -> Iterator[tuple[Ino, Attributes]]:
        """The regular files at and beneath ``ino`` that are not gone, depth first. A file with
        several names comes once for each."""
        if self._overlay.is_empty:
            yield from self._known.walk(ino)
            return
        attributes = self.attributes(ino)
        if attributes.is_dir or not self.is_gone(ino):
            yield from walk(
                attributes, lambda above: (it[1:] for it in self._entries(above, 0, None))
            )

    # -- paths -----------------------------------------------------------------------------------

    def know_places(self, places: Callable[[bytes], list[bytes]]) -> None:
        """Registers the function that returns the paths at which the source may have the entry of
        a path on the mount, the earliest first and that path last: renames may wait."""
        self._places = places

    def source_paths(self, ino: Ino, named: Named | None = None) -> list[bytes]:
        """The paths at which the source may have an entry: the last is its path on the mount, the
        others are those that it had before renames that the source may lack, the earliest first.
        At the source it moves from an earlier one to a later one only. With ``named``, a directory
        and a name in it, those of this name. Raises as ``path``."""
        if named is not None:
            return self._places(self.path_of(*named))
        node = self._overlay.peek(ino)
        if node is not None and node.names:
            # A directory above may have lost its own name since.
            with suppress(Refused):
                moved = self._known.moved(ino)
                is_shown = moved is not None and moved in self.visible_paths(ino)
                return self._places(moved if moved and is_shown else self.visible_path(ino))
        return [self.path(ino)]

    def path(self, ino: Ino) -> bytes:
        """The path of the entry at the source, relative to its root, without regard to renames that
        the source lacks (``source_paths``).

        An inode that was made through the mount is where the mount shows it, unless ``move``
        records another path; raises Refused, ENOENT, if it has no name. A file of the snapshot that
        has lost names there has one of the others.
        """
        moved = self._known.moved(ino)
        node = self._overlay.peek(ino) if ino < WRITTEN_INO else None
        if node is not None and node.names and node.has_source_bytes:
            # A directory above may have lost its own name since.
            with suppress(Refused):
                paths = list(self.visible_paths(ino))
                return moved if moved in paths else paths[0]
        if moved:
            return moved
        return self.snapshot.path(ino) if ino < WRITTEN_INO else self.visible_path(ino)

    def path_text(self, ino: Ino, *, is_visible: bool = False) -> str:
        """The path of an inode for a message, at the source, or on the mount if ``is_visible``:
        quoted, since a name may have any byte."""
        try:
            return repr(os.fsdecode((self.visible_path if is_visible else self.path)(ino)))
        except MonarchError:
            return f"inode {ino}"

    def other_paths(self, ino: Ino) -> Iterator[bytes]:
        """The paths of a file at the source except that of its first name: its hard links. The
        first call takes a pass over the snapshot."""
        if ino >= WRITTEN_INO:
            paths = self.visible_paths(ino)
            next(paths, None)
            return paths
        return map(self.snapshot.path, self.snapshot.aliases(ino))

    def visible_path(self, ino: Ino) -> bytes:
        """The path of an inode in the mount, by its first name, relative to the root. Raises
        Refused, ENOENT, if it has no name."""
        parts: list[bytes] = []
        while ino != ROOT_INO:
            node = self._overlay.peek(ino)
            if node is None:
                if ino >= WRITTEN_INO or ino in self._removed:
                    raise Refused(errno.ENOENT)
                # A directory of the snapshot is never renamed, nor are those above it.
                parts.append(self.snapshot.path(ino))
                break
            ino, name = first_name(node)
            parts.append(name)
        return b"/".join(reversed(parts))

    def path_of(self, parent: Ino, name: bytes) -> bytes:
        """The path of a name in a directory, whether it exists or not. Raises as visible_path."""
        above = self.visible_path(parent)
        return above + b"/" + name if above else name

    def visible_paths(self, ino: Ino) -> Iterator[bytes]:
        """All paths of an inode in the mount, that of the first name first."""
        node = self._overlay.peek(ino)
        names = iter(node.names) if node is not None else self._names_below(ino)
        for parent, name in names:
            yield self.path_of(parent, name)

    def _is_at_or_above(self, ino: Ino, directory: Ino) -> bool:
        while directory not in (ino, ROOT_INO):
            node = self._overlay.peek(directory)
            directory = self.snapshot.parent(directory) if node is None else node.parent
        return directory == ino

    def _names_below(self, ino: Ino) -> Iterator[Named]:
        """The names of an inode that has no node."""
        if ino < WRITTEN_INO and not self.is_gone(ino):
            yield from self._known.names(ino)


def _only(path: bytes) -> list[bytes]:
    return [path]


def first_name(node: Node) -> Named:
    """Raises Refused, ENOENT, if it has no name."""
    for named in node.names:
        return named
    raise Refused(errno.ENOENT)


def _acls(overlay: Overlay, known: SourceView, ino: Ino) -> Acls:
    """The access control lists of an entry, without its mode (posix/acl.py)."""
    node = overlay.peek(ino)
    if node is None or node.xattrs.keys().isdisjoint(acl.NAMES):
        return known.acls(ino)
    return Acls(*(node.xattrs.get(name, b"") for name in acl.NAMES))
