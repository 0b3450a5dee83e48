"""Seeded random histories of a mount, killed anywhere: in the end the source is what it was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch import points
from tests.writeback.rig import Killed, World, applied, described, draining

NAMES = [b"a", b"b", b"c", b"d/a", b"d/b", b"e/a", b"e/f/a", b"\xff\n"]
FOLDERS = [b"d", b"e", b"e/f", b"g"]


@pytest.fixture
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0.002)


class Walk:
    """Random changes of a world, each one that a mount would allow."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._open: list[tuple[object, bytes]] = []
        self._count = 0

    def step(self) -> None:
        kind = self._random.choice(
            ["write"] * 4
            + ["replace"] * 3
            + ["begin", "begin", "half", "sync", "end", "end"]
            + ["rename", "rename", "link", "unlink", "mkdir", "rmdir", "symlink", "mknod"]
            + ["chmod", "utime", "setxattr", "rename_folder"]
        )
        getattr(self, kind)()

    def bytes(self) -> bytes:
        self._count += 1
        return (b"%d " % self._count) * self._random.choice([0, 1, 50])

    def _is_free(self, path: bytes) -> bool:
        parent = path.rpartition(b"/")[0]
        tree = self._world.tree
        return path not in tree and (not parent or (parent in tree and tree[parent].kind == "dir"))

    def _free(self) -> bytes | None:
        found = [name for name in [*NAMES, *FOLDERS] if self._is_free(name)]
        return self._random.choice(found) if found else None

    def _any(self, *kinds: str) -> bytes | None:
        found = sorted(p for p, node in self._world.tree.items() if node.kind in kinds)
        return self._random.choice(found) if found else None

    def write(self) -> None:
        path = self._random.choice([self._any("file"), self._free()])
        if path is not None and not (path in self._world.tree and self._world.tree[path].writers):
            self._world.write(path, self.bytes(), synced=self._random.random() < 0.3)

    def replace(self) -> None:
        """As a careful program writes: beside it, then over it."""
        path = self._any("file")
        beside = self._free()
        if path is not None and beside is not None:
            self._world.write(beside, self.bytes(), synced=True)
            if path in self._world.tree:
                self._world.rename(beside, path)

    def begin(self) -> None:
        path = self._any("file")
        if path is None:
            path = self._free()
            if path is None:
                return
            self._world.create(path)
        self._world.begin(path)

    def _writers(self) -> list[bytes]:
        return sorted(path for path, node in self._world.tree.items() if node.writers)

    def half(self) -> None:
        for path in self._writers()[:1]:
            self._world.store(self._world.tree[path], b"half of " + self.bytes())

    def sync(self) -> None:
        for path in self._writers()[:1]:
            self._world.content(self._world.tree[path], synced=True)

    def end(self) -> None:
        for path in self._writers()[:1]:
            node = self._world.tree[path]
            self._world.store(node, b"all of " + self.bytes())
            self._world.end(node)

    def rename(self) -> None:
        path = self._any("file", "symlink", "fifo")
        to = self._random.choice([self._any("file", "symlink"), self._free()])
        tree = self._world.tree
        if path is not None and to is not None and tree.get(to) is not tree[path]:
            self._world.rename(path, to)

    def rename_folder(self) -> None:
        path, to = self._any("dir"), self._free()
        if path is not None and to is not None and not to.startswith(path + b"/"):
            self._world.rename(path, to)

    def link(self) -> None:
        path, to = self._any("file"), self._free()
        if path is not None and to is not None:
            self._world.link(path, to)

    def unlink(self) -> None:
        path = self._any("file", "symlink", "fifo")
        if path is not None:
            self._world.unlink(path)

    def mkdir(self) -> None:
        path = self._free()
        if path is not None:
            self._world.mkdir(path, self._random.choice([0o755, 0o700, 0o1777]))

    def rmdir(self) -> None:
        path = self._any("dir")
        tree = self._world.tree
        if path is not None and not any(name.startswith(path + b"/") for name in tree):
            self._world.rmdir(path)

    def symlink(self) -> None:
        path = self._free()
        if path is not None:
            self._world.symlink(path, b"../" + path)

    def mknod(self) -> None:
        path = self._free()
        if path is not None:
            self._world.mknod(path)

    def chmod(self) -> None:
        path = self._any("file", "dir", "fifo")
        if path is not None:
            self._world.chmod(path, self._random.choice([0o600, 0o640, 0o755]))

    def utime(self) -> None:
        path = self._any("file")
        if path is not None and not self._world.tree[path].writers:
            self._world.utime(path, self._random.randrange(10**18))

    def setxattr(self) -> None:
        path = self._any("file")
        if path is not None:
            value = self._random.choice([None, b"\0value", b""])
            self._world.setxattr(path, b"user.n%d" % self._random.randrange(2), value)


def prepared(tmp_path: Path) -> World:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    for name in ("a", "b", "d/a"):
        (source / name).write_bytes(b"old " + name.encode())
    (source / "c").hardlink_to(source / "b")
    (tmp_path / "tier").mkdir()
    return World(source, tmp_path / "tier")


def is_killed(error: BaseException) -> bool:
    # A group of a nursery's, which Python 3.10 has no name for.
    group: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    if group:
        return all(map(is_killed, group))
    return isinstance(error, (Killed, trio.Cancelled))


async def life(
    world: World, walk: Walk, *, steps: int, turn: int, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """A life of the drain that ends when a point is passed for the turn-th time; whether it did."""
    replay = world.kill()
    passed = 0

    def reached(name: str) -> None:
        nonlocal passed
        if name.startswith("drain-"):
            passed += 1
            if passed >= turn:
                raise Killed(name)
            world.check_order()

    with monkeypatch.context() as patched:
        patched.setattr(points, "reached", reached)
        try:
            async with draining(world, replay) as drain:
                for _ in range(steps):
                    walk.step()
                    await trio.sleep(0.0001 if walk._random.random() < 0.7 else 1)
                for path in walk._writers():
                    if path in world.tree:
                        world.end(world.tree[path])
                await drain.wait(world.last_seq)
        except BaseException as error:
            if not is_killed(error):
                raise
            return True
    return False


@pytest.mark.parametrize("seed", range(60))
async def test_a_history_killed_anywhere_ends_with_the_source_as_the_mount_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    seed: int,
) -> None:
    world = prepared(tmp_path)
    walk = Walk(world, seed)
    chance = random.Random(seed)
    for _ in range(8):
        await life(world, walk, steps=12, turn=chance.randrange(1, 40), monkeypatch=monkeypatch)
        world.check_order()
    assert not await life(world, walk, steps=10, turn=10**9, monkeypatch=monkeypatch)
    world.check_all_is_there()
    # And whoever reads the journal sees what the mount showed.
    replay = world.kill()
    assert described(
        applied(world.first, [op for _, op in replay.ops], world.objects)
    ) == described(world.tree)
    world.journal.close()
