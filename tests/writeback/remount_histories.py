"""Random histories of mounts that end anywhere and are mounted again in every way.

A history is a few lives of a mount. Between two of them others may act at the source, the tier may
be filled, the machine may start again. Each acknowledged change must be shown, reach the source, or
be named: ``Story`` compares the mount and the source with these changes.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.errors import Refused, SourceError
from monarch.namespace.build import build
from monarch.posix import failpoints
from tests.writeback.remounts import Ground, Life, Shown, Tree, tree_of
from tests.writeback.rig import Killed, World, is_killed

FILES = [b"a", b"b", b"c", b"d/a", b"d/b", b"e/a", b"e/f/a", b"e/f/b", b"h/i/b", b"\xff\n"]
FOLDERS = [b"d", b"e", b"e/f", b"g", b"h", b"h/i"]

KINDS = (
    *("same", "same", "refresh", "new", "never", "given", "lost state", "lost state"),
    *("read-only", "elsewhere", "boot", "boot", "full"),
)
# A staged file at the source that alone has the bytes of an object, with the object's number.
_WRITE_THROUGH = re.compile(rb"/?\.monarch-[0-9a-f]+-([0-9]+)-through\.part$")
# How long the source is given at the end of a history for refused changes, in seconds.
_PATIENCE_S = 1800


class Walk:
    """Random changes of a mount, each as a process would make it. ``moved`` is called with
    renames."""

    def __init__(self, chance: random.Random, moved: Callable[[bytes, bytes], None]) -> None:
        self._chance = chance
        self._moved = moved
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
        return (b"<%d>" % self._count) * self._chance.choice([0, 1, 1, 40])

    def _free(self, life: Life) -> bytes:
        """An unused name, if there is one."""
        names = [*FILES, *FOLDERS]
        free = [name for name in names if life.names.resolve(name) is None]
        return self._chance.choice(free or names)

    def _any(self, life: Life, *kinds: str) -> bytes:
        there = life.kinds()
        found = sorted(path for path, kind in there.items() if kind in kinds)
        if not found and b"a" in there:
            # The kernel would not let a process write into a directory.
            raise Refused(errno.EISDIR)
        return self._chance.choice(found) if found else b"a"

    async def _rename_to(self, life: Life, path: bytes, to: bytes) -> None:
        # Before: a task that is killed meanwhile has recorded it.
        self._moved(path, to)
        await life.rename(path, to)

    async def _pause(self, life: Life) -> None:
        await trio.sleep(self._chance.choice([0.3, 3]))

    async def _write(self, life: Life) -> None:
        path = self._chance.choice([self._any(life, "file"), self._free(life)])
        await life.write(path, self._bytes(), synced=self._chance.random() < 0.5)

    async def _save(self, life: Life) -> None:
        """As a careful program does: beside it, synced, and then over it."""
        beside, path = self._free(life), self._any(life, "file")
        await life.write(beside, self._bytes(), synced=True)
        await self._rename_to(life, beside, path)
        await life.front.recorder.sync()

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
            await life.front.fsyncs.sync(ino, None)

    async def _close(self, life: Life) -> None:
        for path in [*self._open][:1]:
            life.files.release(self._open.pop(path))

    async def _rename(self, life: Life) -> None:
        to = self._chance.choice([self._any(life, "file", "link"), self._free(life)])
        await self._rename_to(life, self._any(life, "file", "link", "fifo"), to)

    async def _rename_folder(self, life: Life) -> None:
        to = self._chance.choice([self._any(life, "dir"), self._free(life), self._free(life)])
        await self._rename_to(life, self._any(life, "dir"), to)

    async def _link(self, life: Life) -> None:
        path, to = self._any(life, "file", "link"), self._free(life)
        self._moved(path, to)
        await life.link(path, to)

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
        found = sorted(path for path in self._source.rglob("[!.]*") if _is_folder(path))
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
        path = self._source / os.fsdecode(self._chance.choice(FILES))
        # An open of a fifo would wait for a reader.
        if path.is_file() or not path.exists():
            with suppress(OSError):
                path.write_bytes(b"others' version")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def prepared(root: Path, monkeypatch: pytest.MonkeyPatch, *, disk: Path | None = None) -> Ground:
    ground = Ground(root, monkeypatch, disk)
    source = ground.source
    (source / "d").mkdir()
    (source / "h/i").mkdir(parents=True)
    for name in ("a", "b", "d/a", "h/of the source", "h/i/of the source"):
        (source / name).write_bytes(b"old " + name.encode())
    (source / "c").hardlink_to(source / "b")
    return ground


@dataclass
class Ending:
    """What a mount showed last, and how it ended: kill, abandon or clean. ``owed``: objects that
    the source lacks under their names."""

    tree: Tree
    way: str
    owed: set[int] = field(default_factory=set)

    def is_owed(self, it: Shown | None, kind: str) -> bool:
        """Whether it is a file that was acknowledged and is not all at the source: a machine that
        stopped may have lost bytes that were not synced."""
        if it is None or it.object not in self.owed:
            return False
        return it.safety == "local" if kind == "boot" and self.way == "kill" else True


@dataclass
class Story:
    """What is known of one history. ``theirs``: paths that others have touched at the source, with
    all beneath; ``gone``: contents that others have taken from it. ``left``: the paths, with these
    contents, from which others have taken files that nothing waited for. ``taken``: objects whose
    staged files others have taken away, with all the bytes that there were."""

    ground: Ground
    chance: random.Random
    theirs: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    left: set[tuple[bytes, bytes]] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    before: Ending = field(init=False)

    def __post_init__(self) -> None:
        self.before = Ending(tree_of(self.ground.source), "clean")
        self.others = Others(self.chance, self.ground.source)
        self.walk = Walk(self.chance, self.moved)

    def is_theirs(self, path: bytes) -> bool:
        return any(path == at or path.startswith(at + b"/") for at in self.theirs)

    def has_theirs(self, path: bytes, tree: Tree) -> bool:
        """Whether a directory holds something of others, so that it cannot be removed."""
        return any(at.startswith(path + b"/") and self.is_theirs(at) for at in tree)

    def is_of_others(self, it: Shown) -> bool:
        """Whether bytes are of others, or were replaced by theirs."""
        return it.content.startswith(b"others'") or it.content in self.gone

    def numbers_of_others(self, tree: Tree) -> set[int]:
        """The objects with a name that others have changed."""
        return {it.ino for path, it in tree.items() if self.is_theirs(path)}

    def moved(self, path: bytes, to: bytes) -> None:
        """What is another's goes with what is renamed."""
        if self.is_theirs(path):
            self.theirs.add(to)
        self.theirs |= {to + at[len(path) :] for at in self.theirs if at.startswith(path + b"/")}

    def others_act(self, kind: str) -> None:
        then, had = _marks(self.ground.source), tree_of(self.ground.source)
        self.others.act()
        now, has = _marks(self.ground.source), tree_of(self.ground.source)
        self.theirs |= {
            path for path in then.keys() | now.keys() if then.get(path) != now.get(path)
        }
        self.taken |= {
            int(found[1]) for found in map(_WRITE_THROUGH.search, then.keys() - now.keys()) if found
        }
        self.before.owed -= self.taken
        self.theirs |= {path for path, it in self.before.tree.items() if it.object in self.taken}
        # A directory that others have taken away may have another name on the mount by now.
        away = {then[path][0] for path in then.keys() - now.keys()}
        self.theirs |= {path for path, it in self.before.tree.items() if it.source_ino in away}
        # A file that others have touched under one name is theirs under its others.
        numbers = self.numbers_of_others(self.before.tree)
        self.theirs |= {path for path, it in self.before.tree.items() if it.ino in numbers}
        # Names, links and special files that meet a conflict on their way go no further.
        for op in self.ground.waiting():
            if op.kind == "rename" and not op.object and self.is_theirs(op.path):
                self.theirs.add(op.to)
        owed = {it.content for it in self.before.tree.values() if self.before.is_owed(it, kind)}
        self.gone |= _contents(had) - _contents(has) - owed
        self.left |= {
            (path, it.content)
            for path, it in had.items()
            if it.kind == "file" and path not in has and it.content not in owed
        }
        # A write into a file changes it under all names that it has or is to have.
        self.gone |= {
            had[path].content
            for path in then.keys() & now.keys()
            if then[path][0] == now[path][0] and then[path] != now[path]
        }

    def check_shown(self, life: Life, kind: str) -> None:
        """The mount shows what the one before did."""
        now, before = life.shown(), self.before
        theirs = self.numbers_of_others(before.tree)
        for path in sorted(now.keys() | before.tree.keys()):
            was, it = before.tree.get(path), now.get(path)
            is_owed = before.is_owed(was, kind)
            if kind == "boot" and before.way == "kill" and not is_owed:
                # A removal may be as new as that as well.
                continue
            if _is_beside(path) or (self.is_theirs(path) and not is_owed):
                continue
            if it is not None and it.kind == "dir" and self.has_theirs(path, now):
                continue
            if was is not None and was.ino in theirs and not is_owed:
                continue
            if not is_owed and any(self.is_of_others(each) for each in (was, it) if each):
                continue
            message = f"{path!r} is {it} after {before.way} and {kind}, and was {was}"
            assert (it and it.bare) == (was and was.bare), message

    async def lived(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One life of random steps, ended somehow."""
        chance, more = self.chance, how(kind, self.ground)
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
                    # The names are those that the journal leads to, and must not be used without
                    # it.
                    ending.tree = lives[0].kill()
                raise Killed(name)

        with monkeypatch.context() as patched:
            if way == "kill":
                patched.setattr(failpoints, "failpoint", reached)
            try:
                async with self.ground.mount(works=works, **more) as life:
                    self.check_shown(life, kind)
                    lives.append(life)
                    try:
                        for _ in range(steps):
                            await self.walk.step(life)
                            if chance.random() < 0.3:
                                await trio.sleep(0.001)
                        if way == "clean" and works and not self.theirs:
                            await life.end()
                        elif way in ("clean", "abandon"):
                            await life.end(abandoned=True)
                            ending.way = "abandon"
                    finally:
                        with trio.CancelScope(shield=True):
                            await self.ground.come_to_rest()
                        ending.tree = ending.tree or life.shown()
            except BaseException as error:
                if not is_killed(error):
                    raise
        self.walk.all_closed()
        ending.owed = self.ground.owed() - self.taken
        self.before = ending

    async def ended(self, kind: str) -> None:
        """A last mount drains all that the source accepts, and reports the rest."""
        async with self.ground.mount(**how(kind, self.ground)) as life:
            self.check_shown(life, kind)
            self.before = Ending(life.shown(), "clean")
            with trio.move_on_after(_PATIENCE_S):
                await life.drained()
            now, there = life.shown(), tree_of(self.ground.source)
            trouble = life.write_back.drain.backlog().trouble
            self._check_losses_reported(now, there, trouble)
            theirs = self.numbers_of_others(now)
            for path in sorted(now.keys() | there.keys() | self.before.tree.keys()):
                found = [tree[path] for tree in (now, there) if path in tree]
                if trouble or _is_beside(path) or self.is_theirs(path):
                    continue
                if any(it.ino in theirs or self.is_of_others(it) for it in found):
                    continue
                _require_same(path, there, now, "at the source and here")
                # What a reader would wait for, a rename that is to come, is not read here.
                if (was := self.before.tree.get(path)) is None or was.content != b"ENOENT":
                    _require_same(path, now, self.before.tree, "behind the drain and before it")
            await life.end(abandoned=trouble is not None)
        self.before = Ending(now, "clean", self.ground.owed() - self.taken)
        report = self.ground.survey()
        assert report is not None and not report.lost, report
        if trouble is None:
            assert (report.operations, report.waiting) == (0, ()), report
        async with self.ground.mount(refreshed=True) as life:
            assert bool(self.ground.put_off) == (trouble is not None)
            self.check_shown(life, "refresh")

    def _check_losses_reported(self, now: Tree, there: Tree, trouble: str | None) -> None:
        """Every byte that is shown is at the source, or waits for what the source refuses."""
        contents = _contents(there)
        for path, it in now.items():
            if it.kind != "file" or it.content in contents | {b"", b"ENOENT"}:
                continue
            if self.is_of_others(it) or it.object in self.taken:
                continue
            if (path, it.content) in self.left and it.safety == "source":
                # It is shown until its directory is compared with the source.
                continue
            waits = it.safety in ("local", "none") and trouble is not None
            assert waits, f"{path!r} is nowhere but here, and that is not reported: {it}, {trouble}"


def how(kind: str, ground: Ground) -> dict[str, Any]:
    """How to mount again."""
    if ground.disk is not None:
        ground.fill(kind == "full")
    match kind:
        case "refresh":
            return {"refreshed": True}
        case "never":
            return {"freshness": "never"}
        case "given":
            ground.given += 1
            given = ground.root / f"given-{ground.given}.snapshot"
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


async def history(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    disk: Path | None,
    kinds: tuple[str, ...] = KINDS,
) -> None:
    """``disk``: a small one for the tier; without it none is ever full."""
    chance = random.Random(number)
    story = Story(prepared(root, monkeypatch, disk=disk), chance)
    others = chance.random() < 0.5
    kind = "same"
    for _ in range(chance.randrange(2, 6)):
        await story.lived(kind, monkeypatch)
        kind = chance.choice(kinds)
        if others and chance.random() < 0.5:
            story.others_act(kind)
    await story.ended(kind)


async def remounts_of(
    world: World, monkeypatch: pytest.MonkeyPatch, number: int, *, count: int = 4
) -> None:
    """Mounts what a killed world has left ``count`` times, each time in another way, with changes
    by processes and by others; at last brings all to the source."""
    chance = random.Random(number)
    ground = Ground(world.source.parent, monkeypatch)
    (ground.root / "boot").write_text(f"{world.boot}\n")
    story = Story(ground, chance)
    story.before = Ending(_as_shown(world), "kill", ground.owed())
    others = chance.random() < 0.5
    # What the machine's stop takes is judged by what the mount before it has shown.
    kinds = ["same" if number % 2 else "lost state", *chance.sample(sorted(set(KINDS)), count - 1)]
    try:
        for kind in kinds:
            await story.lived(kind, monkeypatch)
            if others and chance.random() < 0.5:
                story.others_act(kind)
        await story.ended("same")
    except BaseException as error:
        error.add_note(f"behind history {number}, mounted again as {kinds}")
        raise


def _as_shown(world: World) -> Tree:
    """What a mount shows of a world that was killed."""
    names = {"symlink": "link"}
    return {
        path: Shown(
            names.get(node.kind, node.kind),
            0o777 if node.kind == "symlink" else node.mode,
            node.content,
            node.target,
            object=node.object,
            ino=node.ino,
        )
        for path, node in world.tree.items()
    }


def _is_beside(path: bytes) -> bool:
    """Whether it is at the source what a conflict has left beside another's."""
    return b".monarch-conflict-" in path


def _require_same(path: bytes, one: Tree, other: Tree, message: str) -> None:
    a, b = one.get(path), other.get(path)
    assert (a and a.bare) == (b and b.bare), f"{path!r}, {message}: {a} and {b}"


def _contents(tree: Tree) -> set[bytes]:
    return {it.content for it in tree.values() if it.kind == "file"}


def _marks(source: Path) -> dict[bytes, tuple[int, int, int]]:
    """What of the source tells that others have been at it: of a directory not what is in it."""
    found = {}
    top = os.fsencode(source)
    for above, folders, files in os.walk(top):
        for name in [*folders, *files]:
            path = os.path.join(above, name)
            it = os.lstat(path)
            time_ns = 0 if stat.S_ISDIR(it.st_mode) else it.st_mtime_ns
            found[os.path.relpath(path, top)] = (it.st_ino, it.st_mode, time_ns)
    return found
