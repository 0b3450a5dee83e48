"""Seeded random histories of a mount, killed anywhere: in the end the source equals the model."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.posix import failpoints
from monarch.writeback.journal import Replay
from tests.writeback.conftest import small_disk
from tests.writeback.remount_histories import remounts_of
from tests.writeback.rig import Killed, Model, applied, described, draining, is_killed

NAMES = [b"a", b"b", b"c", b"d/a", b"d/b", b"e/a", b"e/f/a", b"\xff\n"]
FOLDERS = [b"d", b"e", b"e/f", b"g"]


class RandomChanges:
    """Random changes of a model, each one that a mount would allow."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model = model
        self._random = random.Random(seed)
        # When the journal is shortened: of its own, so that the history is the same without.
        self._moments = random.Random(~seed)
        self._open: list[tuple[object, bytes]] = []
        self._count = 0

    def step(self) -> None:
        kind = self._random.choice(
            ["write"] * 4
            + ["replace"] * 3
            + ["begin", "begin", "half", "grow", "grow", "sync", "sync", "end", "end"]
            + ["rename", "rename", "link", "unlink", "mkdir", "rmdir", "symlink", "mknod"]
            + ["chmod", "utime", "setxattr", "rename_folder"]
        )
        getattr(self, kind)()
        if self._moments.random() < 0.05:
            self._model.journal.shorten()

    def bytes(self) -> bytes:
        self._count += 1
        return (b"%d " % self._count) * self._random.choice([0, 1, 50])

    def _is_free(self, path: bytes) -> bool:
        parent = path.rpartition(b"/")[0]
        tree = self._model.tree
        return path not in tree and (not parent or (parent in tree and tree[parent].kind == "dir"))

    def _free(self) -> bytes | None:
        found = [name for name in [*NAMES, *FOLDERS] if self._is_free(name)]
        return self._random.choice(found) if found else None

    def _any(self, *kinds: str) -> bytes | None:
        found = sorted(p for p, node in self._model.tree.items() if node.kind in kinds)
        return self._random.choice(found) if found else None

    def write(self) -> None:
        path = self._random.choice([self._any("file"), self._free()])
        if path is not None and not (path in self._model.tree and self._model.tree[path].writers):
            self._model.write(path, self.bytes(), synced=self._random.random() < 0.3)

    def replace(self) -> None:
        """As a careful program writes: beside it, then over it."""
        path = self._any("file")
        beside = self._free()
        if path is not None and beside is not None:
            self._model.write(beside, self.bytes(), synced=True)
            if path in self._model.tree:
                self._model.rename(beside, path)

    def begin(self) -> None:
        path = self._any("file")
        if path is None:
            path = self._free()
            if path is None:
                return
            self._model.create(path)
        self._model.begin(path)

    def _writers(self) -> list[bytes]:
        return sorted(path for path, node in self._model.tree.items() if node.writers)

    def half(self) -> None:
        for path in self._writers()[:1]:
            self._model.store(self._model.tree[path], b"half of " + self.bytes())

    def grow(self) -> None:
        for path in self._writers()[:1]:
            self._model.append(self._model.tree[path], b"and " + self.bytes())

    def sync(self) -> None:
        for path in self._writers()[:1]:
            self._model.content(self._model.tree[path], synced=True)

    def end(self) -> None:
        for path in self._writers()[:1]:
            node = self._model.tree[path]
            self._model.store(node, b"all of " + self.bytes())
            self._model.end(node)

    def rename(self) -> None:
        path = self._any("file", "symlink", "fifo")
        to = self._random.choice([self._any("file", "symlink"), self._free()])
        tree = self._model.tree
        if path is not None and to is not None and tree.get(to) is not tree[path]:
            self._model.rename(path, to)

    def rename_folder(self) -> None:
        path, to = self._any("dir"), self._free()
        if path is not None and to is not None and not to.startswith(path + b"/"):
            self._model.rename(path, to)

    def link(self) -> None:
        path, to = self._any("file"), self._free()
        if path is not None and to is not None:
            self._model.link(path, to)

    def unlink(self) -> None:
        path = self._any("file", "symlink", "fifo")
        if path is not None:
            self._model.unlink(path)

    def mkdir(self) -> None:
        path = self._free()
        if path is not None:
            self._model.mkdir(path, self._random.choice([0o755, 0o700, 0o1777]))

    def rmdir(self) -> None:
        path = self._any("dir")
        tree = self._model.tree
        if path is not None and not any(name.startswith(path + b"/") for name in tree):
            self._model.rmdir(path)

    def symlink(self) -> None:
        path = self._free()
        if path is not None:
            self._model.symlink(path, b"../" + path)

    def mknod(self) -> None:
        path = self._free()
        if path is not None:
            self._model.mknod(path)

    def chmod(self) -> None:
        path = self._any("file", "dir", "fifo")
        if path is not None:
            self._model.chmod(path, self._random.choice([0o600, 0o640, 0o755]))

    def utime(self) -> None:
        path = self._any("file")
        if path is not None and not self._model.tree[path].writers:
            self._model.utime(path, self._random.randrange(10**18))

    def setxattr(self) -> None:
        path = self._any("file")
        if path is not None:
            value = self._random.choice([None, b"\0value", b""])
            self._model.setxattr(path, b"user.n%d" % self._random.randrange(2), value)


def prepared(tmp_path: Path, disk: Path | None) -> Model:
    """``disk``: for the tier, which can be full then."""
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    for name in ("a", "b", "d/a"):
        (source / name).write_bytes(b"old " + name.encode())
    (source / "c").hardlink_to(source / "b")
    tier = (disk or tmp_path) / "tier"
    tier.mkdir(parents=True)
    return Model(source, tier)


async def session(
    model: Model,
    random_changes: RandomChanges,
    replay: Replay,
    *,
    steps: int,
    turn: int,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[[], None],
) -> bool:
    """A session of the drain that ends when a point is passed for the turn-th time; whether it did.

    ``look`` is called at each.
    """
    passed = 0

    def reached(name: str) -> None:
        nonlocal passed
        if name.startswith("drain-"):
            passed += 1
            if passed >= turn:
                raise Killed(name)
            look()

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", reached)
        try:
            async with draining(model, replay, abandon=False) as drain:
                for _ in range(steps):
                    random_changes.step()
                    await trio.sleep(0.0001 if random_changes._random.random() < 0.7 else 1)
                for path in random_changes._writers():
                    if path in model.tree:
                        model.end(model.tree[path])
                await drain.progress.wait(model.last_seq)
        except BaseException as error:
            if not is_killed(error):
                raise
            return True
    return False


@pytest.mark.parametrize("seed", range(10))
async def test_a_history_killed_anywhere_ends_with_the_source_as_the_mount_was(
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    pytestconfig: pytest.Config,
    seed: int,
) -> None:
    for number in seeds(seed, pytestconfig):
        disk = small_disk(memory, number)
        model = prepared(tmp_path / str(number), disk)
        random_changes, chance = RandomChanges(model, number), random.Random(number)
        live = partial(session, model, random_changes, monkeypatch=monkeypatch, look=model.look)
        for _ in range(8):
            await live(model.kill(), steps=12, turn=chance.randrange(1, 40))
            model.look()
        assert not await live(model.kill(), steps=10, turn=10**9)
        model.check_all_is_there()
        # And a replay of the journal shows what the mount showed.
        ops = [op for _, op in model.kill().ops]
        assert described(applied(model.first, ops, model.objects)) == described(model.tree)
        await live(model.kill(), steps=12, turn=chance.randrange(1, 40))
        model.kill()
        model.journal.close()
        await remounts_of(model, monkeypatch, number, disk=disk)
        for left in filter(None, (tmp_path / str(number), disk)):
            shutil.rmtree(left)


@pytest.mark.promise(116)
@pytest.mark.parametrize("seed", range(5))
async def test_a_history_of_mounts_with_new_snapshots_ends_with_the_source_as_the_mount_was(
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    pytestconfig: pytest.Config,
    seed: int,
) -> None:
    for number in seeds(seed, pytestconfig):
        disk = small_disk(memory, number)
        model = prepared(tmp_path / str(number), disk)
        random_changes, chance = RandomChanges(model, number), random.Random(number)
        live = partial(session, model, random_changes, monkeypatch=monkeypatch, look=model.look)
        for _ in range(8):
            replay = model.look_anew() if chance.random() < 0.3 else model.kill()
            await live(replay, steps=12, turn=chance.randrange(1, 40))
            model.look()
        assert not await live(model.kill(), steps=10, turn=10**9)
        model.check_all_is_there()
        await live(model.kill(), steps=12, turn=chance.randrange(1, 40))
        model.kill()
        model.journal.close()
        await remounts_of(model, monkeypatch, number, disk=disk)
        for left in filter(None, (tmp_path / str(number), disk)):
            shutil.rmtree(left)


@pytest.mark.parametrize("seed", range(10))
async def test_power_cuts_lose_nothing_that_was_synced_and_the_drain_continues(
    tmp_path: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    pytestconfig: pytest.Config,
    seed: int,
) -> None:
    for number in seeds(seed, pytestconfig):
        disk = small_disk(memory, number)
        model = prepared(tmp_path / str(number), disk)
        random_changes, chance = RandomChanges(model, number), random.Random(number)
        live = partial(session, model, random_changes, monkeypatch=monkeypatch, look=lambda: None)
        replay = model.kill()
        for _ in range(6):
            await live(replay, steps=15, turn=chance.randrange(1, 40))
            if chance.random() < 0.5:
                await model.commit()
                for _ in range(chance.randrange(5)):
                    random_changes.step()
            replay = model.cut_power(chance)
        assert not await live(replay, steps=0, turn=10**9)
        model.check_all_is_there()
        await live(model.kill(), steps=12, turn=chance.randrange(1, 40))
        model.kill()
        model.journal.close()
        await remounts_of(model, monkeypatch, number, disk=disk)
        for left in filter(None, (tmp_path / str(number), disk)):
            shutil.rmtree(left)


def seeds(seed: int, pytestconfig: pytest.Config) -> Iterator[int]:
    """That one, and with --soak others for so long."""
    end = time.monotonic() + pytestconfig.getoption("--soak")
    yield seed
    while time.monotonic() < end:
        seed += 10
        yield seed
