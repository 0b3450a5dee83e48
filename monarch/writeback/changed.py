"""Which files of the source a journal has changed where they stand. Pure.

A file that is made, renamed or replaced gives its directory another time. By that time a snapshot
is renewed, so what else was changed has to be looked at by name: modes, owners, what was appended,
and how many names a file has.
"""

from __future__ import annotations

from collections.abc import Iterable

from monarch.writeback.crash_losses import Numbered


def changed_in_place(ops: Iterable[Numbered]) -> set[bytes]:
    """Paths of what ``ops`` have changed and not made; there may be more than that."""
    made: set[tuple[int, int]] = set()
    paths: set[bytes] = set()
    for _, op in ops:
        what = (op.object, 0 if op.object else op.ino)
        match op.kind:
            case "create" | "mkdir" | "symlink" | "mknod":
                made.add(what)
            case "take" | "content" | "attr" | "xattr" if what not in made:
                paths |= {op.path, *op.paths}
            case "link" if what not in made:
                paths |= {op.path, op.to}
    return paths
