"""Random histories of mounts that end anywhere and are mounted again in every way.

A history is a few sessions of a mount. Between two of them others may act at the source, the tier
may be filled, the machine may start again. Each acknowledged change must be shown, reach the
source, or be named: ``MountHistory`` compares the mount and the source with these changes.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.errors import Refused, SourceError
from monarch.namespace.build import build
from monarch.posix import failpoints
from tests.equipment.remounts import KINDS, Ending, HistoryChecker, Others, Shown, Tree
from tests.writeback.remounts import Rig, Session
from tests.writeback.rig import Killed, Model, is_killed

FILES = [b"a", b"b", b"c", b"d/a", b"d/b", b"e/a", b"e/f/a", b"e/f/b", b"h/i/b", b"\xff\n"]
FOLDERS = [b"d", b"e", b"e/f", b"g", b"h", b"h/i"]

# How long the source is given at the end of a history for refused changes, in seconds.
_PATIENCE_S = 1800


class RandomChanges:
    """Random changes of a mount, each as a process would make it. ``moved`` is called with
    renames."""

    def __init__(self, chance: random.Random, moved: Callable[[bytes, bytes], None]) -> None:
        self._chance = chance
        self._moved = moved
        self._open: dict[bytes, int] = {}
        self._count = 0

    async def step(self, session: Session) -> None:
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
            await getattr(self, "_" + kind)(session)

    def _bytes(self) -> bytes:
        self._count += 1
        return (b"<%d>" % self._count) * self._chance.choice([0, 1, 1, 40])

    def _free(self, session: Session) -> bytes:
        """An unused name, if there is one."""
        names = [*FILES, *FOLDERS]
        free = [name for name in names if session.names.resolve(name) is None]
        return self._chance.choice(free or names)

    def _any(self, session: Session, *kinds: str) -> bytes:
        there = session.kinds()
        found = sorted(path for path, kind in there.items() if kind in kinds)
        if not found and b"a" in there:
            # The kernel would not let a process write into a directory.
            raise Refused(errno.EISDIR)
        return self._chance.choice(found) if found else b"a"

    async def _rename_to(self, session: Session, path: bytes, to: bytes) -> None:
        # Before: a task that is killed meanwhile has recorded it.
        self._moved(path, to)
        await session.rename(path, to)

    async def _pause(self, session: Session) -> None:
        await trio.sleep(self._chance.choice([0.3, 3]))

    async def _write(self, session: Session) -> None:
        path = self._chance.choice([self._any(session, "file"), self._free(session)])
        await session.write(path, self._bytes(), synced=self._chance.random() < 0.5)

    async def _save(self, session: Session) -> None:
        """As a careful program does: beside it, synced, and then over it."""
        beside, path = self._free(session), self._any(session, "file")
        await session.write(beside, self._bytes(), synced=True)
        await self._rename_to(session, beside, path)
        await session.front.recorder.sync()

    async def _come_and_go(self, session: Session) -> None:
        path = self._free(session)
        await session.write(path, self._bytes())
        session.unlink(path)

    async def _begin(self, session: Session) -> None:
        path = self._chance.choice([self._any(session, "file"), self._free(session)])
        if path not in self._open:
            self._open[path] = await session.open(path)

    async def _go_on(self, session: Session) -> None:
        for ino in [*self._open.values()][:1]:
            await session.files.write(ino, self._chance.randrange(20), b"more " + self._bytes())

    async def _sync(self, session: Session) -> None:
        for ino in [*self._open.values()][:1]:
            await session.front.fsyncs.sync(ino, None)

    async def _close(self, session: Session) -> None:
        for path in [*self._open][:1]:
            session.files.release(self._open.pop(path))

    async def _rename(self, session: Session) -> None:
        to = self._chance.choice([self._any(session, "file", "link"), self._free(session)])
        await self._rename_to(session, self._any(session, "file", "link", "fifo"), to)

    async def _rename_folder(self, session: Session) -> None:
        to = self._chance.choice(
            [self._any(session, "dir"), self._free(session), self._free(session)]
        )
        await self._rename_to(session, self._any(session, "dir"), to)

    async def _link(self, session: Session) -> None:
        path, to = self._any(session, "file", "link"), self._free(session)
        self._moved(path, to)
        await session.link(path, to)

    async def _unlink(self, session: Session) -> None:
        session.unlink(self._any(session, "file", "link", "fifo"))

    async def _mkdir(self, session: Session) -> None:
        await session.mkdir(self._free(session), self._chance.choice([0o755, 0o700]))

    async def _rmdir(self, session: Session) -> None:
        session.rmdir(self._any(session, "dir"))

    async def _symlink(self, session: Session) -> None:
        path = self._free(session)
        await session.symlink(path, b"../" + path)

    async def _mkfifo(self, session: Session) -> None:
        await session.mkfifo(self._free(session))

    async def _chmod(self, session: Session) -> None:
        mode = self._chance.choice([0o600, 0o640, 0o755, 0o6755])
        await session.chmod(self._any(session, "file", "dir", "fifo"), mode)

    async def _utime(self, session: Session) -> None:
        await session.utime(self._any(session, "file"), self._chance.randrange(10**18))

    async def _setxattr(self, session: Session) -> None:
        value = self._chance.choice([None, b"\0value", b""])
        await session.setxattr(self._any(session, "file"), b"user.n%d" % self._count, value)

    def all_closed(self) -> None:
        """Those who had files open are gone, with their mount."""
        self._open.clear()


def prepared(root: Path, monkeypatch: pytest.MonkeyPatch, *, disk: Path | None = None) -> Rig:
    rig = Rig(root, monkeypatch, disk)
    source = rig.source
    (source / "d").mkdir()
    (source / "h/i").mkdir(parents=True)
    for name in ("a", "b", "d/a", "h/of the source", "h/i/of the source"):
        (source / name).write_bytes(b"old " + name.encode())
    (source / "c").hardlink_to(source / "b")
    return rig


class MountHistory:
    """One history of mounts, and the checker of it."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.rig = rig
        self.chance = chance
        self.checker = HistoryChecker(rig.source, rig.left)
        self.random_changes = RandomChanges(chance, self.checker.moved)
        self._others = Others(chance, rig.source, FILES)

    def others_act(self, kind: str) -> None:
        self.checker.others_act(self._others.act, kind)

    async def lived(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One session of random steps, ended somehow."""
        chance, more = self.chance, how(kind, self.rig)
        way = chance.choice(["kill", "kill", "kill", "abandon", "clean"])
        turn, passed = chance.randrange(1, 60), 0
        steps = chance.randrange(0, 14)
        works = chance.random() < 0.5
        ending = Ending({}, way)
        sessions: list[Session] = []

        def reached(name: str) -> None:
            nonlocal passed
            if not sessions or not (name.startswith("drain-") or name == "journal-appended"):
                return
            passed += 1
            if passed >= turn:
                if name == "journal-appended":
                    # The names are those that the journal leads to, and must not be used without
                    # it. A file has the bytes of a write that is under way.
                    self.rig.finish_calls()
                    ending.tree = sessions[0].kill()
                    for threads in self.rig.threads.values():
                        patched.setattr(threads, "_put", over)
                raise Killed(name)

        def over(call: object) -> None:
            raise Killed("a task that runs on")

        with monkeypatch.context() as patched:
            if way == "kill":
                patched.setattr(failpoints, "failpoint", reached)
            try:
                async with self.rig.mount(works=works, **more) as session:
                    self.checker.check_shown(session.shown(), kind)
                    sessions.append(session)
                    try:
                        for _ in range(steps):
                            await self.random_changes.step(session)
                            if chance.random() < 0.3:
                                await trio.sleep(0.001)
                        if way == "clean" and works and not self.checker.theirs:
                            await session.end()
                        elif way in ("clean", "abandon"):
                            await session.end(abandoned=True)
                            ending.way = "abandon"
                    finally:
                        with trio.CancelScope(shield=True):
                            await self.rig.come_to_rest()
                        ending.tree = ending.tree or session.shown()
            except BaseException as error:
                if not is_killed(error):
                    raise
        self.random_changes.all_closed()
        self.checker.ended(ending)

    async def ended(self, kind: str) -> None:
        """A last mount drains all that the source accepts, and reports the rest."""
        async with self.rig.mount(**how(kind, self.rig)) as session:
            self.checker.check_shown(session.shown(), kind)
            self.checker.before = Ending(session.shown(), "clean")
            with trio.move_on_after(_PATIENCE_S):
                await session.drained()
            now, trouble = session.shown(), session.write_back.drain.backlog().trouble
            self.checker.check_drained(now, trouble)
            await session.end(abandoned=trouble is not None)
        self.checker.ended(Ending(now, "clean"))
        self.checker.check_nothing_left(trouble)
        async with self.rig.mount(refreshed=True) as session:
            assert bool(self.rig.put_off) == (trouble is not None)
            self.checker.check_shown(session.shown(), "refresh")


def how(kind: str, rig: Rig) -> dict[str, Any]:
    """How to mount again."""
    if rig.disk is not None:
        rig.fill(kind == "full")
    match kind:
        case "refresh":
            return {"refreshed": True}
        case "never":
            return {"freshness": "never"}
        case "given":
            rig.given += 1
            given = rig.root / f"given-{rig.given}.snapshot"
            build(rig.source, given, jobs=1)
            return {"snapshot": {"file": given, "jobs": 1}}
        case "lost state":
            rig.lose_state()
        case "read-only":
            return {"write": False}
        case "elsewhere":
            return {"write": False, "absorb": ["none/here/**"]}
        case "boot":
            rig.boot_again()
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
    mount_history = MountHistory(prepared(root, monkeypatch, disk=disk), chance)
    others = chance.random() < 0.5
    kind = "same"
    for _ in range(chance.randrange(2, 6)):
        await mount_history.lived(kind, monkeypatch)
        kind = chance.choice(kinds)
        if others and chance.random() < 0.5:
            mount_history.others_act(kind)
    await mount_history.ended(kind)


async def remounts_of(
    model: Model, monkeypatch: pytest.MonkeyPatch, number: int, *, count: int = 4
) -> None:
    """Mounts what a killed model has left ``count`` times, each time in another way, with changes
    by processes and by others; at last brings all to the source."""
    chance = random.Random(number)
    rig = Rig(model.source.parent, monkeypatch)
    (rig.root / "boot").write_text(f"{model.boot}\n")
    mount_history = MountHistory(rig, chance)
    mount_history.checker.ended(Ending(_as_shown(model), "kill"))
    others = chance.random() < 0.5
    # What the machine's stop takes is judged by what the mount before it has shown.
    kinds = ["same" if number % 2 else "lost state", *chance.sample(sorted(set(KINDS)), count - 1)]
    try:
        for kind in kinds:
            await mount_history.lived(kind, monkeypatch)
            if others and chance.random() < 0.5:
                mount_history.others_act(kind)
        await mount_history.ended("same")
    except BaseException as error:
        error.add_note(f"behind history {number}, mounted again as {kinds}")
        raise


def _as_shown(model: Model) -> Tree:
    """What a mount shows of a model that was killed."""
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
        for path, node in model.tree.items()
    }
