"""The paths of pending changes: which names of a directory must not be changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from monarch.writeback.conflicts import PathSet, PendingNames
from monarch.writeback.op import Kind, Op, above

_DIRECTORIES = [b"", b"a", b"a/b", b"a/b/c", b"ab"]
_KINDS: list[Kind] = [
    "create",
    "content",
    "attr",
    "mkdir",
    "rmdir",
    "rename",
    "link",
    "unlink",
]
_PATHS = [b"a", b"a/b", b"a/b/c", b"a/b/c/d", b"a/x", b"ab/y", b"z", b"a/b/e"]


class _Searched(set[bytes]):
    """A set whose elements are never read one after the other."""

    def __iter__(self) -> Iterator[bytes]:
        pytest.fail("all paths are read")


def _has_conflict(op: Op, others: Sequence[Op]) -> bool:
    """As ``PathSet.conflicts_with``, by reading all paths."""
    of_itself = ("mkdir", "attr", "xattr")
    return any(
        path == other
        or (each.kind not in of_itself and path.startswith(other + b"/"))
        or (op.kind not in of_itself and other.startswith(path + b"/"))
        for each in others
        for other in each.names()
        for path in op.names()
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_conflict_is_found_without_reading_all_paths(seed: int) -> None:
    rng = random.Random(seed)
    paths, made = PathSet(), list[Op]()
    for name, value in vars(paths).items():
        assert value == set()
        setattr(paths, name, _Searched())
    for _ in range(12):
        for _ in range(8):
            op = _change(rng)
            assert paths.conflicts_with(op) == _has_conflict(op, made)
        made.append(op)
        paths.add(op)
    paths.clear()
    assert not paths and not paths.conflicts_with(op)


def _by_reading_all(directory: bytes, ops: Sequence[Op]) -> set[bytes] | None:
    start = directory + b"/" if directory else b""
    names = set()
    for op in ops:
        for path in op.names():
            if path.startswith(start) and path:
                names.add(path[len(start) :].partition(b"/")[0])
            elif op.kind in ("mkdir", "rmdir", "rename") and path in (directory, *above(directory)):
                return None
    return names


def _change(rng: random.Random) -> Op:
    path, to = rng.choice(_PATHS), rng.choice(_PATHS)
    kind = rng.choice(_KINDS)
    if kind == "content":
        return Op(kind=kind, paths=(path, to), object=1)
    return Op(kind=kind, path=path, to=to if kind in ("rename", "link") else b"")


@pytest.mark.parametrize("seed", range(40))
def test_pending_names_are_those_of_all_changes_that_wait(seed: int) -> None:
    rng = random.Random(seed)
    pending, waiting = PendingNames(), list[Op]()
    for _ in range(60):
        if waiting and rng.random() < 0.45:
            pending.remove(waiting.pop(rng.randrange(len(waiting))))
        else:
            waiting.append(op := _change(rng))
            pending.add(op)
        for directory in _DIRECTORIES:
            with pending.watching(directory) as watch:
                assert watch.names() == _by_reading_all(directory, waiting)
    for op in waiting:
        pending.remove(op)
    with pending.watching(b"") as watch:
        assert watch.names() == set()


@pytest.mark.parametrize("seed", range(20))
def test_a_watch_has_the_changes_that_came_and_those_that_went(seed: int) -> None:
    rng = random.Random(seed)
    pending, directory = PendingNames(), rng.choice(_DIRECTORIES)
    before = [_change(rng) for _ in range(3)]
    for op in before:
        pending.add(op)
    with pending.watching(directory) as watch:
        later = [_change(rng) for _ in range(3)]
        for op in later:
            pending.add(op)
        for op in (*before, *later):
            pending.remove(op)
        assert watch.names() == _by_reading_all(directory, [*before, *later])
    pending.add(Op(kind="create", path=b"a/b/after"))
    assert b"after" not in (watch.names() or ())
