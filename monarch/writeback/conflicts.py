"""The paths of changes: of those without a durable mark, and of those that wait. Pure.

If a crash loses the mark of a change that was made at the source, the change is made again. That is
harmless if all changes that are made again with it have other paths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from monarch.writeback.op import Op, above

# Changes of these kinds may create, remove or move a directory.
OF_DIRECTORIES = frozenset({"mkdir", "rmdir", "rename"})
# Making one of these changes again has no effect on entries beneath its path.
_OF_ITSELF = frozenset({"mkdir", "attr", "xattr"})


class PathSet:
    """The paths of changes whose marks are not on the disk yet."""

    def __init__(self) -> None:
        # Paths of changes that affect the entries beneath them; paths of changes that affect no
        # entries beneath them; the directories above all these paths.
        self._paths: set[bytes] = set()
        self._themselves: set[bytes] = set()
        self._above: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._paths or self._themselves)

    def add(self, op: Op) -> None:
        paths = self._themselves if op.kind in _OF_ITSELF else self._paths
        for path in op.names():
            paths.add(path)
            self._above.update(above(path))

    def conflicts_with(self, op: Op) -> bool:
        """Whether ``op`` has a path of the set, or a path above or beneath one."""
        for path in op.names():
            if path in self._paths or path in self._themselves:
                return True
            if any(directory in self._paths for directory in above(path)):
                return True
            if op.kind in _OF_ITSELF:
                continue
            if path in self._above:
                return True
        return False

    def is_above(self, path: bytes) -> bool:
        """Whether a path of the set is beneath ``path``."""
        return path in self._above

    def clear(self) -> None:
        self._paths.clear()
        self._above.clear()
        self._themselves.clear()


class Subjects:
    """The files and paths of some changes."""

    def __init__(self) -> None:
        self._objects: set[int] = set()
        self._paths = PathSet()
        self._directories: set[bytes] = set()
        # Of which attributes are changed.
        self._changed: set[bytes] = set()

    def add(self, op: Op) -> None:
        # The file that a rename replaces must stay known until the rename is done.
        self._objects |= {op.object, op.over_object} - {0}
        if op.names() != (b"",):
            self._paths.add(op)
        if op.kind == "mkdir":
            self._directories.add(op.path)
        elif op.kind in ("attr", "xattr"):
            self._changed.add(op.path)

    def may_permit(self, op: Op) -> bool:
        """Whether attributes of a directory above the path of a change are changed: its mode, or a
        list, may not let the change be made before."""
        return any(directory in self._changed for directory in above(op.path))

    def are_beneath(self, path: bytes) -> bool:
        """Whether one of the paths is beneath ``path``."""
        return self._paths.is_above(path)

    def meets(self, op: Op) -> bool:
        """Whether a change has one of these files or paths, or a path above or beneath one."""
        if {op.object, op.over_object} & self._objects:
            return True
        if op.names() == (b"",):
            return False
        return self._paths.conflicts_with(op) or any(
            directory in self._directories for path in op.names() for directory in above(path)
        )


class PendingNames:
    """The names of changes that the source lacks, by directory. A directory with pending names
    beneath it is a pending name of its parent."""

    def __init__(self) -> None:
        # The number of changes of each name; a directory counts one for pending names beneath it.
        self._names: dict[bytes, dict[bytes, int]] = {}
        # The number of changes that create, remove or move a directory, by path.
        self._directories: dict[bytes, int] = {}
        self._watches: list[PendingWatch] = []

    def add(self, op: Op) -> None:
        for path in op.names():
            self._add_name(path)
            if op.kind in OF_DIRECTORIES:
                self._directories[path] = self._directories.get(path, 0) + 1
        for watch in self._watches:
            watch.add(op)

    def _add_name(self, path: bytes) -> None:
        while path:
            parent, _, name = path.rpartition(b"/")
            names = self._names.get(parent)
            if names is not None:
                names[name] = names.get(name, 0) + 1
                return
            self._names[parent] = {name: 1}
            path = parent

    def remove(self, op: Op) -> None:
        for path in op.names():
            self._remove_name(path)
            if op.kind in OF_DIRECTORIES:
                _count_down(self._directories, path)

    def _remove_name(self, path: bytes) -> None:
        while path:
            parent, _, name = path.rpartition(b"/")
            names = self._names[parent]
            _count_down(names, name)
            if names:
                return
            del self._names[parent]
            path = parent

    def has_directory_of(self, path: bytes) -> bool:
        """Whether a pending change creates, removes or moves a directory above ``path``."""
        return any(directory in self._directories for directory in above(path))

    def has_names_in(self, directory: bytes) -> bool:
        """Whether there are pending names beneath a directory."""
        return directory in self._names

    @contextmanager
    def watching(self, directory: bytes) -> Iterator[PendingWatch]:
        """Collects the names that are pending in a directory at any time in this block."""
        moves = directory in self._directories or self.has_directory_of(directory)
        watch = PendingWatch(directory, None if moves else self._names.get(directory, ()))
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches.remove(watch)


class PendingWatch:
    """The names of a directory that were pending at any time since the watch began."""

    def __init__(self, directory: bytes, names: Collection[bytes] | None) -> None:
        self._names = None if names is None else set(names)
        self._directory = directory
        self._start = directory + b"/" if directory else b""

    def names(self) -> set[bytes] | None:
        """None if a change may have made, removed or moved the directory itself."""
        return self._names

    def add(self, op: Op) -> None:
        if self._names is None:
            return
        for path in op.names():
            if path.startswith(self._start) and path:
                self._names.add(path[len(self._start) :].partition(b"/")[0])
            elif op.kind in OF_DIRECTORIES and path in (self._directory, *above(self._directory)):
                self._names = None
                return


def _count_down(counts: dict[bytes, int], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
