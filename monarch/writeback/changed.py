"""The files of the source that a journal has changed in place. Pure functions.

A file that is created, renamed or replaced changes the time of its directory. A renewed snapshot
compares these times only. So it must read by name the files with other changes: of mode, owner,
length or number of names.
"""

from __future__ import annotations

from collections.abc import Iterable

from monarch.writeback.history import Numbered


def changed_in_place(ops: Iterable[Numbered]) -> set[bytes]:
    """The paths of entries that ``ops`` have changed but not created, and perhaps others."""
    made: set[tuple[int, int]] = set()
    paths: set[bytes] = set()
    for _, op in ops:
        entry = (op.object, 0 if op.object else op.ino)
        match op.kind:
            case "create" | "mkdir" | "symlink" | "mknod":
                made.add(entry)
            case "take" | "content" | "attr" | "xattr" if entry not in made:
                paths |= {op.path, *op.paths}
            case "link" if entry not in made:
                paths |= {op.path, op.to}
    return paths
