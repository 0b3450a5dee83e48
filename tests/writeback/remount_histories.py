"""Random histories of mounts that end anywhere and are mounted again in every way.

A history is a few sessions of a mount. Between two of them others may act at the source, the tier
may be filled, the machine may start again. Each acknowledged change must be shown, reach the
source, or be named: ``MountHistory`` compares the mount and the source with these changes.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.errors import Refused, SourceError
from monarch.namespace import scan
from monarch.namespace.build import build
from monarch.posix import failpoints
from monarch.types import kept_ns
from tests.equipment.remounts import (
    IN_PLACE,
    KINDS,
    Ending,
    HistoryChecker,
    Others,
    Shown,
    Tree,
    is_beside,
)
from tests.writeback.remounts import Rig, Session
from tests.writeback.rig import Killed, Model, is_killed

FILES = [b"a", b"b", b"c", b"d/a", b"d/b", b"e/a", b"e/f/a", b"e/f/b", b"h/i/b", b"\xff\n"]
FOLDERS = [b"d", b"e", b"e/f", b"g", b"h", b"h/i"]

# A mount in between had another state directory.
_KINDS = (*KINDS, "earlier state")
# How many of the remounts have a mount with another snapshot before them.
_BETWEEN = 0.25
# A directory is believed behind five ticks of CLOCK_REALTIME_COARSE, which gives files their times:
# on a busy virtual machine that clock may be late.
_BELIEVED_S = 5 * time.clock_getres(5)
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
            + ["link", "append", "append", "chmod", "chmod", "utime", "setxattr", "pause"]
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
        # The checker looks for the bytes of a conflict beside it: no process changes them.
        found = sorted(
            path for path, kind in there.items() if kind in kinds and not is_beside(path)
        )
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

    async def _append(self, session: Session) -> None:
        ino = await session.open(self._any(session, "file"))
        try:
            end = session.names.attributes(ino).size
            await session.files.write(ino, end, b" and " + self._bytes())
        finally:
            session.files.release(ino)

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


class Agreed:
    """The files that a mount has shown just as the source has them. Each mount that follows shows
    them like that until they are changed here or there, whichever snapshot it has.

    This concerns also the files that others have changed in their place, which ``HistoryChecker``
    excepts.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        # What the source has of each, with what tells that it was changed there.
        self._files: dict[bytes, tuple[tuple[int, ...], tuple[int, int]]] = {}

    def check_shown(self, now: Tree, kind: str, way: str) -> None:
        """A mount of this kind, behind one that has ended in this way, has begun with ``now``."""
        there = {path: self._at_source(path) for path in now.keys() | self._files.keys()}
        # What the machine's stop takes may be as old as that.
        known = {} if (kind, way) == ("boot", "kill") else self._files
        for path, it in known.items():
            if there[path] == it:
                shown = now[path].status if path in now else None
                message = f"{path!r} is {shown} after {way} and {kind}, and the source has had {it}"
                assert shown == it[0], f"{message} since an earlier mount has shown that"
        self._files = {path: it for path, it in there.items() if it is not None}
        self.ended(now)

    def ended(self, tree: Tree) -> None:
        """A mount has ended with ``tree``."""
        self._files = {
            path: it
            for path, it in self._files.items()
            if path in tree and tree[path].status == it[0] and tree[path].safety in ("", "source")
        }

    def _at_source(self, path: bytes) -> tuple[tuple[int, ...], tuple[int, int]] | None:
        above, _, name = path.rpartition(b"/")
        folder = os.path.join(os.path.realpath(os.fsencode(self._source)), above)
        if os.path.realpath(folder) != os.path.normpath(folder):
            # Others have put a link in the place of a directory.
            return None
        try:
            it = os.lstat(os.path.join(folder, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        status = (it.st_mode, it.st_uid, it.st_gid, it.st_size, kept_ns(it.st_mtime_ns))
        return status, (it.st_ino, it.st_ctime_ns)


class MountHistory:
    """One history of mounts, and the checkers of it."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.rig = rig
        self.chance = chance
        # The two seconds of a mount are longer than a history, so it would always read everything.
        # Source and mount have one clock.
        believed_ns = int(_BELIEVED_S * 10**9)
        rig.monkeypatch.setattr(
            scan, "settled_ns", lambda snapshot: snapshot.created_ns - believed_ns
        )
        self.checker = HistoryChecker(rig.source, rig.left)
        self.agreed = Agreed(rig.source)
        self.random_changes = RandomChanges(chance, self.checker.moved)
        self._others = Others(chance, rig.source, FILES)

    def others_act(self, kind: str) -> None:
        self.checker.others_act(self._others.act, kind)

    def _how(self, kind: str) -> dict[str, Any]:
        """As ``how``. A mount of a source without a name is refused unless it is refreshed."""
        more = how(kind, self.rig)
        return more if self.checker.at_source() else more | {"refreshed": True}

    def _begun(self, session: Session, kind: str) -> Tree:
        """A mount shows what it must; what that is."""
        shown = session.shown()
        self.checker.check_shown(shown, kind)
        self.agreed.check_shown(shown, kind, self.checker.before.way)
        return shown

    def _ended(self, ending: Ending) -> None:
        self.checker.ended(ending)
        self.agreed.ended(ending.tree)

    async def mounted_between(self, *, others: bool) -> None:
        """A mount with another snapshot than those before it and behind it. With ``others`` it is
        the first to show a change that they have made to a file in its place."""
        kind, states = self.chance.choice(["given", "lost state"]), self.rig.states
        if others:
            act = partial(self._others.act, self.chance.choice(IN_PLACE))
            self.checker.others_act(act, kind)
        async with self.rig.mount(**self._how(kind)) as session:
            self._begun(session, kind)
            await session.end(abandoned=True)
            shown = session.shown()
        self._ended(Ending(shown, "abandon"))
        self.rig.states = states

    async def lived(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One session of random steps, ended somehow."""
        chance, more = self.chance, self._how(kind)
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
                    self._begun(session, kind)
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
        self._ended(ending)

    async def ended(self, kind: str) -> None:
        """A last mount drains all that the source accepts, and reports the rest."""
        async with self.rig.mount(**self._how(kind)) as session:
            self.checker.before = Ending(self._begun(session, kind), "clean")
            with trio.move_on_after(_PATIENCE_S):
                await session.drained()
            is_compared = await session.looked()
            now, trouble = session.shown(), session.write_back.drain.backlog().trouble
            self.checker.check_drained(now, trouble, is_compared=is_compared)
            if is_compared and trouble is None:
                self._require_all_names(now)
            await session.end(abandoned=trouble is not None)
        self._ended(Ending(now, "clean"))
        self.checker.check_nothing_left(trouble)
        async with self.rig.mount(refreshed=True) as session:
            assert bool(self.rig.put_off) == (trouble is not None)
            shown = self._begun(session, "refresh")
            if trouble is None:
                self._require_all_names(shown)

    def _require_all_names(self, shown: Tree) -> None:
        """A mount shows all that the source has, and nothing else."""
        there = self.checker.at_source()
        differing = {
            path: (shown.get(path), there.get(path)) for path in shown.keys() ^ there.keys()
        }
        assert not differing, differing


def how(kind: str, rig: Rig) -> dict[str, Any]:
    """How to mount again."""
    if rig.disk is not None:
        rig.fill(kind == "full")
    match kind:
        case "refresh":
            return {"refreshed": True}
        case "never":
            return {"freshness": "never"}
        case "new":
            # Of a directory with other times the names are renewed.
            os.utime(rig.source)
        case "given":
            rig.given += 1
            given = rig.root / f"given-{rig.given}.snapshot"
            build(rig.source, given, jobs=1)
            return {"snapshot": {"file": given, "jobs": 1}}
        case "lost state":
            rig.lose_state()
        case "earlier state":
            rig.states = max(0, rig.states - 1)
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
    kinds: tuple[str, ...] = _KINDS,
) -> None:
    """``disk``: a small one for the tier; without it none is ever full."""
    chance = random.Random(number)
    mount_history = MountHistory(prepared(root, monkeypatch, disk=disk), chance)
    others = chance.random() < 0.5
    kind = "same"
    # The first snapshot believes the directories.
    time.sleep(2 * _BELIEVED_S)
    for _ in range(chance.randrange(2, 6)):
        await mount_history.lived(kind, monkeypatch)
        kind = chance.choice(kinds)
        if others and chance.random() < 0.5:
            mount_history.others_act(kind)
        if chance.random() < _BETWEEN:
            await mount_history.mounted_between(others=others)
    await mount_history.ended(kind)


async def remounts_of(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    disk: Path | None,
    count: int = 4,
) -> None:
    """Mounts what a killed model has left ``count`` times, each time in another way, with changes
    by processes and by others; at last brings all to the source."""
    chance = random.Random(number)
    rig = Rig(model.source.parent, monkeypatch, disk)
    (rig.root / "boot").write_text(f"{model.boot}\n")
    mount_history = MountHistory(rig, chance)
    mount_history.checker.ended(Ending(_as_shown(model), "kill"))
    others = chance.random() < 0.5
    # What the machine's stop takes is judged by what the mount before it has shown.
    kinds = ["same" if number % 2 else "lost state", *chance.sample(sorted(set(_KINDS)), count - 1)]
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
