"""Which paths the last changes at the source were about. Pure.

A change that was made, but whose mark a crash takes, is made once more. That is harmless while all
the others that are made once more with it are about other paths.
"""

from __future__ import annotations

from monarch.writeback.op import Op, above

# Made again they change nothing of what lies beneath the directory that they are about.
_OF_ITSELF = frozenset({"mkdir", "attr", "xattr"})


class PathSet:
    """The paths of changes whose marks are not on the disk yet."""

    def __init__(self) -> None:
        # Of which what lies beneath is touched as well; all directories above; those of which only
        # the name itself is.
        self._paths: set[bytes] = set()
        self._above: set[bytes] = set()
        self._themselves: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._paths or self._themselves)

    def add(self, op: Op) -> None:
        if op.kind in _OF_ITSELF:
            self._themselves.add(op.path)
            return
        for path in op.names():
            self._paths.add(path)
            self._above.update(above(path))

    def conflicts_with(self, op: Op) -> bool:
        """Whether ``op`` is about a path that is touched, or one above or beneath it."""
        for path in op.names():
            if path in self._paths or path in self._themselves:
                return True
            if any(directory in self._paths for directory in above(path)):
                return True
            if op.kind not in _OF_ITSELF and self._holds(path):
                return True
        return False

    def _holds(self, path: bytes) -> bool:
        return path in self._above or any(name.startswith(path + b"/") for name in self._themselves)

    def clear(self) -> None:
        self._paths.clear()
        self._above.clear()
        self._themselves.clear()
