"""Values by path, of which those beneath a renamed directory move without being visited. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Directory(Generic[T]):
    __slots__ = ("below", "values")

    def __init__(self) -> None:
        self.below: dict[bytes, _Directory[T]] = {}
        self.values: dict[bytes, T] = {}

    def take_in(self, other: _Directory[T]) -> None:
        """Adds what is beneath another directory, and not here."""
        pairs = [(self, other)]
        while pairs:
            into, it = pairs.pop()
            into.values = {**it.values, **into.values}
            for name, below in it.below.items():
                if (there := into.below.setdefault(name, below)) is not below:
                    pairs.append((there, below))


class PathTable(Generic[T]):
    """The values of one directory are in the order in which their names were added."""

    def __init__(self) -> None:
        self._root = _Directory[T]()
        # The directory that was looked up last: most changes follow others in the same directory.
        self._last = b"", self._root

    def __setitem__(self, path: bytes, value: T) -> None:
        directory, _, name = path.rpartition(b"/")
        self._made(directory).values[name] = value

    def get(self, path: bytes) -> T | None:
        directory, _, name = path.rpartition(b"/")
        found = self._found(directory)
        return None if found is None else found.values.get(name)

    def pop(self, path: bytes) -> T | None:
        directory, _, name = path.rpartition(b"/")
        found = self._found(directory)
        return None if found is None else found.values.pop(name, None)

    def move(self, path: bytes, to: bytes) -> None:
        """Moves all paths beneath the directory ``path``, whose new path is ``to``, but not the
        value of ``path`` itself."""
        directory, _, name = path.rpartition(b"/")
        above = self._found(directory)
        moved = None if above is None else above.below.pop(name, None)
        if moved is None:
            return
        self._last = b"", self._root
        directory, _, name = to.rpartition(b"/")
        above = self._made(directory)
        if (replaced := above.below.get(name)) is not None:
            moved.take_in(replaced)
        above.below[name] = moved

    def above(self, path: bytes) -> Iterator[T]:
        """The values of the directories above ``path``."""
        directory: _Directory[T] | None = self._root
        for name in path.split(b"/")[:-1]:
            if directory is None:
                return
            if (value := directory.values.get(name)) is not None:
                yield value
            directory = directory.below.get(name)

    def items(self) -> Iterator[tuple[bytes, T]]:
        to_visit = [(b"", self._root)]
        while to_visit:
            start, directory = to_visit.pop()
            for name, value in directory.values.items():
                yield start + name, value
            to_visit += [(start + name + b"/", below) for name, below in directory.below.items()]

    def _found(self, path: bytes) -> _Directory[T] | None:
        last, directory = self._last
        if path == last:
            return directory
        directory = self._root
        for name in path.split(b"/") if path else ():
            below = directory.below.get(name)
            if below is None:
                return None
            directory = below
        self._last = path, directory
        return directory

    def _made(self, path: bytes) -> _Directory[T]:
        if (found := self._found(path)) is not None:
            return found
        found = self._root
        for name in path.split(b"/"):
            below = found.below.get(name)
            if below is None:
                below = found.below[name] = _Directory()
            found = below
        return found
