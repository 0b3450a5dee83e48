"""Seeded random histories of mounts that are ended anywhere and mounted again in every way: what
was acknowledged is shown, comes to the source, or is named."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch import points
from monarch.errors import Refused, SourceError
from monarch.namespace import scan
from monarch.namespace.build import build
from monarch.vfs import replay as replay_module
from tests.writeback.remounts import Ground, Life, Shown, Tree, tree_of
from tests.writeback.rig import Killed, is_killed

FILES = [b"a", b"b", b"c", b"d/a", b"d/b", b"e/a", b"e/f/a", b"e/f/b", b"\xff\n"]
FOLDERS = [b"d", b"e", b"e/f", b"g", b"h"]


class Walk:
    """Random changes of a mount, each as a process would make it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._open: dict[bytes, int] = {}
        self._count = 0

    async def step(self, life: Life) -> None:
        kind = self._chance.choice(
            ["write"] * 4
            + ["save"] * 3
            + ["begin", "go_on", "go_on", "sync", "close", "close"]
            + ["rename"] * 3
            + ["rename_folder"] * 3
            + ["unlink", "unlink", "come_and_go", "mkdir", "mkdir", "rmdir", "symlink", "mkfifo"]
            + ["link", "chmod", "utime", "setxattr", "pause"]
        )
        # What a mount refuses is no matter here.
        with suppress(Refused, SourceError), trio.move_on_after(30):
            await getattr(self, "_" + kind)(life)

    def _bytes(self) -> bytes:
        self._count += 1
        return (b"%d " % self._count) * self._chance.choice([0, 1, 40])

    def _free(self, life: Life) -> bytes:
        """A name that nobody has, if there is one."""
        names = [*FILES, *FOLDERS]
        free = [name for name in names if life.names.resolve(name) is None]
        return self._chance.choice(free or names)

    def _any(self, life: Life, *kinds: str) -> bytes:
        found = sorted(path for path, it in life.shown().items() if it.kind in kinds)
        return self._chance.choice(found) if found else b"a"

    async def _pause(self, life: Life) -> None:
        await trio.sleep(self._chance.choice([0.3, 3]))

    async def _write(self, life: Life) -> None:
        path = self._chance.choice([self._any(life, "file"), self._free(life)])
        await life.write(path, self._bytes(), synced=self._chance.random() < 0.5)

    async def _save(self, life: Life) -> None:
        """As a careful program does: beside it, synced, and then over it."""
        beside, path = self._free(life), self._any(life, "file")
        await life.write(beside, self._bytes(), synced=True)
        await life.rename(beside, path)
        await life.files.sync_journal()

    async def _come_and_go(self, life: Life) -> None:
        path = self._free(life)
        await life.write(path, self._bytes())
        life.unlink(path)

    async def _begin(self, life: Life) -> None:
        path = self._chance.choice([self._any(life, "file"), self._free(life)])
        if path not in self._open:
            self._open[path] = await life.open(path)

    async def _go_on(self, life: Life) -> None:
        for ino in [*self._open.values()][:1]:
            await life.files.write(ino, self._chance.randrange(20), b"more " + self._bytes())

    async def _sync(self, life: Life) -> None:
        for ino in [*self._open.values()][:1]:
            await life.writing.sync(ino, None)

    async def _close(self, life: Life) -> None:
        for path in [*self._open][:1]:
            life.files.release(self._open.pop(path))

    async def _rename(self, life: Life) -> None:
        to = self._chance.choice([self._any(life, "file", "link"), self._free(life)])
        await life.rename(self._any(life, "file", "link", "fifo"), to)

    async def _rename_folder(self, life: Life) -> None:
        to = self._chance.choice([self._any(life, "dir"), self._free(life), self._free(life)])
        await life.rename(self._any(life, "dir"), to)

    async def _link(self, life: Life) -> None:
        await life.link(self._any(life, "file", "link"), self._free(life))

    async def _unlink(self, life: Life) -> None:
        life.unlink(self._any(life, "file", "link", "fifo"))

    async def _mkdir(self, life: Life) -> None:
        await life.mkdir(self._free(life), self._chance.choice([0o755, 0o700]))

    async def _rmdir(self, life: Life) -> None:
        life.rmdir(self._any(life, "dir"))

    async def _symlink(self, life: Life) -> None:
        path = self._free(life)
        await life.symlink(path, b"../" + path)

    async def _mkfifo(self, life: Life) -> None:
        await life.mkfifo(self._free(life))

    async def _chmod(self, life: Life) -> None:
        mode = self._chance.choice([0o600, 0o640, 0o755])
        await life.chmod(self._any(life, "file", "dir", "fifo"), mode)

    async def _utime(self, life: Life) -> None:
        await life.utime(self._any(life, "file"), self._chance.randrange(10**18))

    async def _setxattr(self, life: Life) -> None:
        value = self._chance.choice([None, b"\0value", b""])
        await life.setxattr(self._any(life, "file"), b"user.n%d" % self._count, value)

    def all_closed(self) -> None:
        """Those who had files open are gone, with their mount."""
        self._open.clear()


class Others:
    """What others do to the source between two mounts."""

    def __init__(self, chance: random.Random, source: Path) -> None:
        self._chance = chance
        self._source = source
        self._count = 0

    def act(self) -> None:
        kind = self._chance.choice(["rename", "rename", "remove", "file", "link", "add", "rewrite"])
        getattr(self, "_" + kind)()

    def _new(self) -> Path:
        self._count += 1
        return self._source / f"others-{self._count}"

    def _folder(self) -> Path | None:
        found = sorted(path for path in self._source.rglob("*") if _is_folder(path))
        return self._chance.choice(found) if found else None

    def _away(self, path: Path) -> None:
        if self._chance.random() < 0.5:
            shutil.rmtree(path)
        else:
            path.rename(self._new())

    def _rename(self) -> None:
        if path := self._folder():
            path.rename(self._new())

    def _remove(self) -> None:
        if path := self._folder():
            shutil.rmtree(path)

    def _file(self) -> None:
        if path := self._folder():
            self._away(path)
            path.write_bytes(b"others' file")

    def _link(self) -> None:
        if path := self._folder():
            self._away(path)
            path.symlink_to("/nowhere" if self._chance.random() < 0.5 else self._source)

    def _add(self) -> None:
        self._new().write_bytes(b"others' own")

    def _rewrite(self) -> None:
        name = os.fsdecode(self._chance.choice(FILES))
        with suppress(OSError):
            (self._source / name).write_bytes(b"others' version")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def prepared(root: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    ground = Ground(root, monkeypatch)
    source = ground.source
    (source / "d").mkdir()
    (source / "h").mkdir()
    for name in ("a", "b", "d/a", "h/of the source"):
        (source / name).write_bytes(b"old " + name.encode())
    (source / "c").hardlink_to(source / "b")
    return ground


@dataclass
class Ending:
    """What a mount showed last, and how it ended: kill, abandon or clean."""

    tree: Tree
    way: str


Check = Callable[[Life], None]

KINDS = (
    *("same", "same", "refresh", "new", "never", "given", "lost state"),
    *("read-only", "elsewhere", "boot"),
)


def how(kind: str, ground: Ground) -> dict[str, Any]:
    """How to mount again."""
    match kind:
        case "refresh":
            return {"refreshed": True}
        case "never":
            return {"freshness": "never"}
        case "given":
            given = ground.root / f"given-{ground.boots}.snapshot"
            build(ground.source, given, jobs=1)
            return {"snapshot": {"file": given, "jobs": 1}}
        case "lost state":
            ground.lose_state()
        case "read-only":
            return {"write": False}
        case "elsewhere":
            return {"write": False, "absorb": ["none/here/**"]}
        case "boot":
            ground.boot_again()
    return {}


def check_shown(life: Life, before: Ending, kind: str) -> None:
    """The mount shows what the one before did."""
    now = life.shown()
    for path in sorted(now.keys() | before.tree.keys()):
        was, it = before.tree.get(path), now.get(path)
        if kind == "boot" and before.way != "clean" and not _is_safe(was):
            # A machine that stopped may have lost what nobody has synced.
            continue
        told = f"{path!r} is {it} after {before.way} and {kind}, and was {was}"
        assert (it and it.bare) == (was and was.bare), told


def _is_safe(it: Shown | None) -> bool:
    return it is not None and (it.kind != "file" or it.safety in ("local", "source"))


async def lived(
    ground: Ground,
    walk: Walk,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    *,
    check: Check,
    **more: Any,
) -> Ending:
    """One life of random steps, ended somehow: what the mount showed then, and how it ended."""
    way = chance.choice(["kill", "kill", "kill", "abandon", "clean"])
    turn, passed = chance.randrange(1, 60), 0
    steps = chance.randrange(0, 14)
    works = chance.random() < 0.5
    ending = Ending({}, way)
    lives: list[Life] = []

    def reached(name: str) -> None:
        nonlocal passed
        if not lives or not (name.startswith("drain-") or name == "journal-appended"):
            return
        passed += 1
        if passed >= turn:
            if name == "journal-appended":
                # The names are those that the journal leads to, and must not go on without it.
                ending.tree = lives[0].kill()
            raise Killed(name)

    with monkeypatch.context() as patched:
        if way == "kill":
            patched.setattr(points, "reached", reached)
        try:
            async with ground.mount(works=works, **more) as life:
                check(life)
                lives.append(life)
                try:
                    for _ in range(steps):
                        await walk.step(life)
                        if chance.random() < 0.3:
                            await trio.sleep(0.001)
                    if way == "clean" and works:
                        await life.end()
                    elif way in ("clean", "abandon"):
                        await life.end(abandoned=True)
                        ending.way = "abandon"
                finally:
                    with trio.CancelScope(shield=True):
                        await ground.come_to_rest()
                    ending.tree = ending.tree or life.shown()
        except BaseException as error:
            if not is_killed(error):
                raise
    walk.all_closed()
    return ending


async def history(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, kinds: tuple[str, ...] = KINDS
) -> None:
    chance = random.Random(number)
    ground, walk = prepared(root, monkeypatch), Walk(chance)
    before = Ending(tree_of(ground.source), "clean")
    kind = "same"
    for _ in range(5):
        before = await lived(
            ground,
            walk,
            chance,
            monkeypatch,
            check=partial(check_shown, before=before, kind=kind),
            **how(kind, ground),
        )
        kind = chance.choice(kinds)
    async with ground.mount(**how(kind, ground)) as life:
        check_shown(life, before, kind)
        before = Ending(life.shown(), "clean")
        await life.drained()
        require_same(tree_of(ground.source), life.shown(), "at the source and here")
        require_same(life.shown(), before.tree, "before the drain and behind it")
        await life.end()
    told = ground.survey()
    assert told is not None
    assert (told.operations, told.waiting, told.lost) == (0, (), ()), told
    async with ground.mount(refreshed=True) as life:
        assert not ground.put_off
        check_shown(life, before, "refresh")


def require_same(one: Tree, other: Tree, told: str) -> None:
    for path in sorted(one.keys() | other.keys()):
        a, b = one.get(path), other.get(path)
        assert (a and a.bare) == (b and b.bare), f"{path!r}, {told}: {a} and {b}"


@pytest.mark.promise(128, 129)
@pytest.mark.parametrize("seed", range(10))
async def test_a_history_with_remounts_of_every_kind_is_shown_and_drained_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    pytestconfig: pytest.Config,
    seed: int,
) -> None:
    for number in seeds(seed, pytestconfig):
        root = tmp_path / str(number)
        await history(root, monkeypatch, number)
        shutil.rmtree(root)


@pytest.mark.promise(128)
async def test_while_something_waits_the_names_are_those_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    ground = prepared(tmp_path, monkeypatch)
    async with ground.mount(works=False) as life:
        await life.mkdir(b"e")
        await life.write(b"e/new", b"new", synced=True)
        snapshot_id = life.names.snapshot.id
    (ground.source / "others").write_bytes(b"x")
    given = tmp_path / "given.snapshot"
    build(ground.source, given, jobs=1)
    for more, is_told in (
        ({}, False),
        ({"refreshed": True}, True),
        ({"snapshot": {"file": given}}, True),
    ):
        async with ground.mount(works=False, **more) as life:
            assert life.names.snapshot.id == snapshot_id
            assert b"others" not in life.shown()
            assert life.shown()[b"e/new"].content == b"new"
            assert ("mount again" in ground.put_off) is is_told
    async with ground.mount() as life:
        await life.drained()
        await life.end()
    async with ground.mount() as life:
        assert life.names.snapshot.id != snapshot_id
        assert life.shown()[b"others"].content == b"x"
        assert life.shown()[b"e/new"].content == b"new"
        assert not ground.put_off


@pytest.mark.promise(170)
async def test_a_renewed_snapshot_has_what_earlier_mounts_have_changed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    # Directories are believed that were changed a moment ago.
    monkeypatch.setattr(scan, "_RACY_NS", -3600 * 10**9)
    ground = prepared(tmp_path, monkeypatch)
    for name in ("mode", "time", "linked"):
        (ground.source / "d" / name).write_bytes(b"six666")
    os.mkfifo(ground.source / "d/fifo", 0o644)
    before = os.stat(ground.source / "d")
    async with ground.mount() as life:
        await life.chmod(b"d/mode", 0o600)
        await life.chmod(b"d/fifo", 0o600)
        await life.utime(b"d/time", 10**18)
        await life.link(b"d/linked", b"other name")
        await life.drained()
    assert os.stat(ground.source / "d").st_mtime_ns == before.st_mtime_ns
    for _ in range(2):
        async with ground.mount() as life:
            found = {
                path: life.names.attributes(life.ino(path))
                for path in map(b"d/".__add__, os.listdir(os.fsencode(ground.source / "d")))
            }
            assert found[b"d/mode"].mode & 0o777 == found[b"d/fifo"].mode & 0o777 == 0o600
            assert found[b"d/time"].mtime_ns == 10**18
            assert life.ino(b"other name") == found[b"d/linked"].ino
            assert found[b"d/linked"].nlink == 2
            await life.end()


@pytest.mark.promise(130)
async def test_what_no_name_leads_to_after_a_remount_is_drained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    ground = prepared(tmp_path, monkeypatch)
    async with ground.mount(works=False) as life:
        await life.mkdir(b"e")
        await life.write(b"e/kept", b"kept", synced=True)
        await life.write(b"e/gone", b"gone", synced=True)
        life.unlink(b"e/gone")
    # A tree in which nothing has a place.
    monkeypatch.setattr(replay_module._Again, "do", _refused)
    async with ground.mount() as life:
        assert life.shown().keys() == {b"a", b"b", b"c", b"d", b"d/a", b"h", b"h/of the source"}
        assert list(life.side.stock.unshown.values()) == [b"e/kept"]
        await life.drained()
    there = tree_of(ground.source)
    assert there[b"e/kept"].content == b"kept"
    assert b"e/gone" not in there


def _refused(again: object) -> None:
    raise ValueError("as a mistake would")


def seeds(seed: int, pytestconfig: pytest.Config) -> Iterator[int]:
    """That one, and with --soak others for so long."""
    end = time.monotonic() + pytestconfig.getoption("--soak")
    yield seed
    while time.monotonic() < end:
        seed += 10
        yield seed
