"""Plays a plan: carries out its operations on the rig and compares the reads with the model."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from monarch.errors import MonarchError
from tests.equipment.remounts import KINDS
from tests.model.model import File, Handle, Model, Moment, Version, Wrong
from tests.model.plan import Operation, Plan
from tests.model.rig import Rig, Workers, is_refused, rig, wait_until
from tests.mount.observe import accounts_agree

# Operations of a reader, which may be under way while something else happens.
READERS = ("read", "open", "readall", "pread", "map", "touch", "forget", "close", "stat", "list")
_KiB = 1 << 10
# How a mount ends after the plan, and the kind of the next one. The others concern written files.
_REMOUNTS = [
    (end, kind)
    for end in ("clean", "kill")
    for kind in dict.fromkeys(KINDS)
    if kind not in ("read-only", "elsewhere", "boot")
]
# Longer than what was read without an open is kept.
_IDLE_S = 1.4


@dataclass(frozen=True, slots=True)
class Failure:
    """``number`` is the place in the plan of the operation that failed."""

    number: int
    operation: Operation
    what: str
    log: str

    def __str__(self) -> str:
        return f"operation {self.number} {self.operation}: {self.what}"


def play(
    plan: Plan, directory: Path, workers: Workers, trace: Callable[[str], None] | None = None
) -> Failure | None:
    """What went wrong, if anything did. ``directory`` is made for it and taken away."""
    number, operation = -1, ("begin",)
    steps: list[Operation] = [("begin",), *plan.operations, ("finish",)]
    log = ""
    try:
        with rig(directory, plan.settings, workers) as made:
            try:
                player = Player(plan, made)
                for number, operation in enumerate(steps, start=-1):
                    began = time.monotonic()
                    player.play(operation)
                    if trace is not None:
                        trace(f"{number:3} {time.monotonic() - began:.3f} s  {operation}")
            finally:
                log = made.mounted.log_text
    except (Wrong, MonarchError, AssertionError, OSError) as error:
        what = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        return Failure(number, operation, what, log)
    return None


class Player:
    def __init__(self, plan: Plan, made: Rig) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._rig = made
        self._opens_are_reported = plan.settings.mode != "no_open"
        small = 64 * _KiB if "limits.inline_max=64KiB" in plan.settings.options else 4096 * _KiB
        self._model = Model(opens_are_reported=self._opens_are_reported, inline_max=small)
        self._handles: dict[tuple[int, int], Handle] = {}
        self._dice = random.Random(plan.seed)
        # Bytes differ from version to version, not from run to run.
        self._contents = 0
        # The tiers do not hold what the daemon believes.
        self._damaged = False
        # The last daemon was killed: copies are verified before their first use.
        self._unclean = False
        # Readers are under way while something else happens.
        self._busy = False

    def play(self, operation: Operation) -> None:
        name, *arguments = operation
        if name in READERS:
            self._together((operation,))
        else:
            getattr(self, f"_{name}")(*arguments)

    def _file(self, name: str) -> File:
        return self._model.files[name]

    # -- beginning and end -------------------------------------------------------------------------

    def _begin(self) -> None:
        (self._rig.source / "d").mkdir()
        for name, size in self._settings.files:
            self._change("replace", name, size)
        self._mount(False)

    def _finish(self) -> None:
        """Every file once more, from wherever it is, then from the source, then remounted."""
        self._mount(False)
        for evict in (False, True):
            self._quiet(evict)
            self._read_all()
        # A given snapshot comes last: a mount without it has the names that it had before.
        for end, kind in sorted(self._dice.sample(_REMOUNTS, 2), key=lambda it: it[1] == "given"):
            self._end(end)
            if kind == "lost state":
                self._rig.lose_state()
            self._rig.fill(full=kind == "full")
            self._mount(kind == "refresh", kind)
            self._read_all()
        self._quiet(True)
        self._end("clean")

    def _read_all(self) -> None:
        for number, name in enumerate(self._model.files):
            self._together((("read", number % self._settings.readers, name),))

    def _mount(self, refresh: bool, kind: str = "same") -> None:
        if self._rig.is_mounted:
            return
        before = self._model.now()
        first = not self._rig.inos
        names = self._rig.mount(refreshed=refresh, kind=kind)
        looks = "never" not in (self._settings.freshness, kind)
        is_new = refresh or first or kind == "given"
        self._model.mounted(names, before, looks=looks, refreshed=is_new)
        if looks or is_new:
            self._wait_until_compared(before)
        wait_until(self._swept, "what no record knows is removed")

    def _swept(self) -> bool:
        try:
            return not self._rig.mounted.stages() and not self._rig.strangers()
        except FileNotFoundError:
            return False  # a directory went while it was listed

    def _wait_until_compared(self, before: dict[str, Moment]) -> None:
        """After a mount each copy is of the version that the source has, or is dropped."""

        def compared(path: Path, version: Version) -> bool:
            try:
                if os.getxattr(path, "user.monarch.tier") == b"source":
                    return True
                status = os.stat(path)
            except OSError as error:
                return error.errno == errno.ENOENT
            return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) == version.times

        for name, moment in before.items():
            version = self._file(name).versions[moment.current]
            path = self._rig.mounted.path / name
            if self._file(name).known:
                wait_until(
                    lambda path=path, version=version: compared(path, version),  # type: ignore[misc]
                    f"27: the copy of {name} is compared with the source",
                )
            self._model.compared(name, moment.current)

    def _end(self, how: str) -> None:
        if not self._rig.is_mounted:
            return
        killed = how == "kill"
        if killed:
            self._rig.kill()
            for handle in self._handles.values():
                handle.dead = True
        else:
            self._close_all()
            self._rig.umount()
        self._unclean = killed
        self._model.unmounted(killed=killed)
        self._rig.check_log()

    # -- what readers do ---------------------------------------------------------------------------

    def _together(self, operations: tuple[Operation, ...]) -> None:
        """Readers are asked at once, and answer while the others' operations are carried out."""
        before = self._model.now()
        self._busy = len(operations) > 1
        asked: list[tuple[int, Callable[[Any], None]]] = []
        busy: set[tuple[int, int]] = set()
        try:
            for operation in operations:
                name, *arguments = operation
                if name not in READERS:
                    self.play(operation)
                    continue
                if name not in ("read", "stat", "list"):
                    if (place := (arguments[0], arguments[1])) in busy:
                        continue
                    busy.add(place)
                check = getattr(self, f"_ask_{name}")(before, *arguments)
                if check is not None:
                    asked.append((arguments[0], check))
        finally:
            self._busy = False
            answers = [(self._rig.reader(reader).receive(), check) for reader, check in asked]
        for answer, check in answers:
            check(answer)

    def _path(self, name: str) -> str:
        return str(self._rig.mounted.path / name)

    def _needs_mount(self, before: dict[str, Moment]) -> None:
        if not self._rig.is_mounted:
            self._mount(False)
        del before

    def _ask_read(self, before: dict[str, Moment], reader: int, name: str) -> Callable[[Any], None]:
        self._needs_mount(before)
        self._rig.reader(reader).send("read", self._path(name))
        return lambda answer: self._check_read(name, before[name], answer)

    def _check_read(self, name: str, before: Moment, answer: tuple[int, int, bytes, int]) -> None:
        self._model.read_whole(name, before, answer)

    def _ask_open(
        self, before: dict[str, Moment], reader: int, slot: int, name: str
    ) -> Callable[[Any], None]:
        self._needs_mount(before)
        self._close(reader, slot)
        self._rig.reader(reader).send("open", slot, self._path(name))

        def check(answer: tuple[int, int]) -> None:
            if not answer[0]:
                # Known first: whatever comes of it, it has to be closed.
                placeholder = Handle(self._file(name), set(), 0, True, True, dead=True)
                self._handles[reader, slot] = placeholder
            handle = self._model.opened(name, before[name], *answer)
            if handle is not None:
                self._handles[reader, slot] = handle

        return check

    def _ask_close(self, before: dict[str, Moment], reader: int, slot: int) -> None:
        del before
        self._close(reader, slot)

    def _close(self, reader: int, slot: int) -> None:
        if self._handles.pop((reader, slot), None) is not None:
            self._rig.reader(reader).send("close", slot)
            self._rig.reader(reader).receive()

    def _close_all(self) -> None:
        for reader, slot in list(self._handles):
            self._close(reader, slot)

    def _ask_forget(self, before: dict[str, Moment], reader: int, slot: int) -> None:
        del before
        if (reader, slot) in self._handles:
            self._rig.reader(reader).send("forget", slot)
            self._rig.reader(reader).receive()

    def _ask_readall(
        self, before: dict[str, Moment], reader: int, slot: int
    ) -> Callable[[Any], None] | None:
        handle = self._handles.get((reader, slot))
        if handle is None:
            return None
        self._rig.reader(reader).send("readall", slot)
        return lambda answer: self._model.read(
            handle, before[handle.file.name], 0, None, answer[0], answer[1]
        )

    def _ask_pread(
        self, before: dict[str, Moment], reader: int, slot: int, offset: int, size: int
    ) -> Callable[[Any], None] | None:
        handle = self._handles.get((reader, slot))
        if handle is None:
            return None
        self._rig.reader(reader).send("pread", slot, offset, size)
        return lambda answer: self._model.read(
            handle, before[handle.file.name], offset, size, answer[0], answer[1]
        )

    def _ask_map(
        self, before: dict[str, Moment], reader: int, slot: int
    ) -> Callable[[Any], None] | None:
        handle = self._handles.get((reader, slot))
        if handle is None or handle.length >= 0:
            return None
        self._rig.reader(reader).send("map", slot)

        def check(answer: tuple[int, int]) -> None:
            number, length = answer
            if number and not handle.dead:
                raise Wrong(f"{handle.file.name}: mmap: {errno.errorcode.get(number, number)}")
            if length:
                handle.length = length

        return check

    def _ask_touch(
        self, before: dict[str, Moment], reader: int, slot: int, offset: int, size: int
    ) -> Callable[[Any], None] | None:
        handle = self._handles.get((reader, slot))
        if handle is None or handle.length <= offset:
            return None
        size = min(size, handle.length - offset)
        self._rig.reader(reader).send("touch", slot, offset, size)
        return lambda answer: self._model.read(
            handle, before[handle.file.name], offset, size, answer[0], answer[1]
        )

    def _ask_stat(self, before: dict[str, Moment], reader: int, name: str) -> Callable[[Any], None]:
        self._needs_mount(before)
        self._rig.reader(reader).send("stat", self._path(name))
        return lambda answer: self._model.stated(name, before[name], answer)

    def _ask_list(self, before: dict[str, Moment], reader: int) -> Callable[[Any], None]:
        self._needs_mount(before)
        self._rig.reader(reader).send("names", str(self._rig.mounted.path))
        return lambda answer: self._model.listed("", before, answer)

    def _ask(self, name: str) -> None:
        """The extended attributes of a file."""
        self._mount(False)
        file, path = self._file(name), self._path(name)
        try:
            digest = os.getxattr(path, "user.monarch.digest").decode()
        except OSError as error:
            absent = file.absent(range(file.shown, file.current + 1))
            if error.errno == errno.ENODATA or (error.errno == errno.ENOENT and absent):
                return
            if error.errno == errno.ENOENT and not file.known:
                return
            raise
        digests = {
            number: xxhash.xxh3_128_hexdigest(version.content)
            for number, version in enumerate(file.versions)
            if version.content is not None
        }
        self._model.digest(name, digests, digest)

    # -- what the mount is asked -------------------------------------------------------------------

    def _verb(self, verb: str, names: tuple[str, ...]) -> None:
        self._mount(False)
        try:
            self._rig.ask(verb, paths=list(names))
        except MonarchError as error:
            if not is_refused(error):
                raise

    def _evict(self, *names: str) -> None:
        self._verb("evict", names)

    def _warm(self, *names: str) -> None:
        self._verb("warm", names)

    def _settle(self) -> None:
        self._mount(False)
        self._rig.settle()

    def _idle(self) -> None:
        time.sleep(_IDLE_S)

    def _look(self) -> None:
        """Two whole checks of the source while nothing else happens: all copies are of today."""
        if not self._rig.is_mounted or not self._settings.freshness.startswith("ttl"):
            return
        self._quiet(False)
        entries = len(self._model.files) + 2
        seen = self._rig.account()["snapshot"]["checks"]
        wait_until(
            lambda: self._rig.account()["snapshot"]["checks"] >= seen + 2 * entries,
            "27: it checks the source",
        )
        for name, moment in self._model.now().items():
            # With ``open: none`` the kernel may have pages of a file without a copy.
            if self._opens_are_reported or self._rig.copy_of(name) is not None:
                self._model.compared(name, moment.current)

    def _quiet(self, evict: bool) -> None:
        """Nothing is open, nothing is copied: the accounts have to agree, nothing may be left."""
        self._mount(False)
        self._close_all()
        self._rig.settle()
        self._rig.closed()
        report = self._rig.account()
        if report["state"] != "serving":
            raise Wrong(f"the daemon is {report['state']}")
        if not self._damaged:
            wait_until(self._agree, "the accounts agree with the files in the tiers")
        if evict:
            self._rig.ask("evict", paths=[])
            report = self._rig.settle()
            for tier in report["tiers"]:
                if tier["used"] or tier["reserved"] or tier["files"]:
                    raise Wrong(f"all was evicted, and yet: {tier}")
            self._damaged = bool(self._rig.strangers())
            if self._opens_are_reported:
                for name, moment in self._model.now().items():
                    self._model.compared(name, moment.current)
        self._rig.check_log()

    def _agree(self) -> bool:
        """The sweep after a mount may be under way."""
        try:
            accounts_agree(self._rig.mounted)
        except (AssertionError, FileNotFoundError):
            return False
        return True

    # -- the source and the tiers ------------------------------------------------------------------

    def _change(self, kind: str, name: str, size: int) -> None:
        file = self._model.files.get(name)
        old = file.content if file is not None else None
        if old is None:
            if kind not in ("replace", "rewrite", "resize"):
                return
            kind = "replace"
        content: bytes | None = None
        if kind == "forged" and file is not None:
            # For the tests of all this: a version that the file never had.
            forged = replace(file.versions[-1], content=self._bytes(name, 10))
            file.versions[-1] = forged
            return
        match kind:
            case "rewrite":
                content = self._bytes(name, len(old or b""))
            case "resize" | "replace":
                content = self._bytes(name, size)
            case "append":
                content = (old or b"") + self._bytes(name, min(size, 50_000) or 1)
            case "truncate":
                content = (old or b"")[: min(size, len(old or b"") // 2)]
        if content == old and kind != "replace":
            kind = "touch"
        for version in self._rig.change(kind, name, content, restless=self._busy):
            self._model.changed(name, version)

    def _bytes(self, name: str, size: int) -> bytes:
        self._contents += 1
        return random.Random(f"{self._plan.seed} {name} {self._contents}").randbytes(size)

    def _damage(self, kind: str, first: str, second: str) -> None:
        """Only what the mount promises to survive: see ``_is_found``."""
        if self._rig.is_mounted:
            self._close_all()
            self._rig.settle()
            self._rig.closed()
        if self._is_found(kind, first, second):
            self._damaged |= self._rig.damage(kind, first, second, self._dice)

    def _is_found(self, kind: str, first: str, second: str) -> bool:
        """Whether the damage is found before the copy is served again (3, 4, 45)."""
        if kind in ("delete", "truncate", "stranger"):
            return True
        if self._settings.verify == "never":
            return False
        if self._settings.verify == "open" or kind != "rot":
            return True
        return self._unclean and not self._rig.is_mounted

    def _fill(self) -> None:
        self._rig.fill(full=True)

    def _drain(self) -> None:
        self._rig.fill(full=False)
