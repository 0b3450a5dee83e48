"""Real mounts that end anywhere and are made again in every way, each compared with the last."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from monarch.control.client import call as ask
from monarch.writeback import journal_found
from monarch.writeback.store import directory_of
from tests.conftest import MonarchCommand, Mounted
from tests.equipment.disks import Disk, fill, unavailable
from tests.equipment.remounts import KINDS, Ending, HistoryChecker, Left, Tree, tree_of

# How a mount ends.
WAYS = ("kill", "abandon", "clean")
# The kinds of mounts that absorb all changes.
WRITABLE = frozenset(KINDS) - {"read-only", "elsewhere", "full"}
# What a daemon may log after such ends, and when others have changed the source meanwhile.
LOGGED = (
    r"writeback.[a-z_]+: source: |the source refuses |(changed at|is gone from) the source"
    r"|tier \S+ (is|given up)|not drained at the end|the names are those of the last mount"
    "|record [0-9]+ .* does not fit|[0-9]+ more records do not fit|the snapshot is gone"
    "|was never synced, and the machine"
)
DISK_MIB = 64
# How long a drain of everything may take, and how long one is watched, in seconds.
_DRAINED_S = 100
_LOOK_S = 0.4
# A rate of the drain, in bytes a second, at which most written bytes wait.
_SLOW = 10_000


def rotated(number: int, count: int) -> list[str]:
    """``count`` of the kinds of remounts; successive numbers meet all of them."""
    kinds = list(dict.fromkeys(KINDS))
    return [kinds[(number * count + n) % len(kinds)] for n in range(count)]


@contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """A disk for the tier of ``Remounts`` in ``directory``, which can be full; whether the machine
    can have it."""
    with ExitStack() as stack:
        if is_made := not unavailable():
            disk = Disk(directory / "disk", size=DISK_MIB << 20)
            stack.enter_context(disk.mounted(directory / "tiers" / "fast"))
        yield is_made


def drained_or_refused(mounted: Mounted, tell: Callable[[str], None] = lambda line: None) -> str:
    """Have all changes come to the source but those that it refuses; the reason for these, or an
    empty text."""
    socket, left = mounted.state / "control.sock", None
    deadline = time.monotonic() + _DRAINED_S
    while True:
        answer = ask(socket, "drain", {"timeout": _LOOK_S})
        now = (answer["trouble"], ask(socket, "status", {})["writing"]["operations"])
        if answer["drained"] or (answer["trouble"] and now == left):
            break
        assert time.monotonic() < deadline, f"the drain does not come to rest: {answer}"
        left = now
    tell(f"-- drained, {now[1]} changes are left: {now[0] or 'no trouble'} --")
    return "" if answer["drained"] else str(now[0])


class Remounts:
    """A source that one daemon after another mounts. ``write``: the options by which it absorbs,
    ``options``: all others. ``disk``: whether the tier is on a ``small_disk``."""

    def __init__(
        self,
        monarch: MonarchCommand,
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        write: Sequence[str],
        options: Sequence[str] = (),
        disk: bool,
        capacity: str = f"{DISK_MIB // 2}MiB",
    ) -> None:
        self._monarch = monarch
        self._source = source
        self._write = write
        self._options = options
        self._disk = disk
        self._capacity = capacity
        self._is_known = True
        self._given = self._states = self._boots = 0
        self._tier = monarch.directory / "tiers" / "fast"
        left = Left(directory_of(self._tier, source))
        self.checker = HistoryChecker(source, left, closely=True)
        self.steps: list[str] = []
        monarch.allows_log(LOGGED)
        monarch.boot = monarch.directory / "boot"
        monkeypatch.setattr(journal_found, "_BOOT", monarch.boot)
        self._boot_again()
        self.mounted = self.mount_unseen("same")

    @property
    def path(self) -> Path:
        return self.mounted.path

    def look(self) -> Tree:
        """What the mount shows. Outside of absorbed directories it shows no extended attributes:
        there those of the mount before are taken."""
        tree = tree_of(self.path, closely=True)
        if self._kind != "elsewhere":
            return tree
        before = self.checker.before.tree
        return {
            path: replace(it, xattrs=before[path].xattrs) if path in before else it
            for path, it in tree.items()
        }

    def end(self, way: str) -> None:
        """End the mount: ``kill``, ``abandon`` or ``clean``. No process uses it."""
        # What processes have mapped and changed is in the kernel's memory only.
        subprocess.run(["sync", "-f", self.path], check=True)
        tree = self.look()
        self.steps.append(way)
        if way == "kill":
            self.mounted.kill()
        else:
            self.mounted.umount(*(("--abandon",) if way == "abandon" else ()))
        self.checker.ended(Ending(self.checker.in_tier.numbered(tree), way))
        self._is_known = True

    def kill_in_use(self) -> None:
        """Kill the daemon while processes write: what the mount showed last is not known."""
        self.steps.append("kill")
        self.mounted.kill()
        self._is_known = False

    def mount(self, kind: str, *, slow: bool = False) -> Path:
        """The mount point; what is shown there is compared with the last mount. ``slow``: little
        comes to the source."""
        self.mounted = self.mount_unseen(kind, slow=slow)
        if self._is_known:
            self._check(lambda: self.checker.check_shown(self.look(), kind))
        return self.path

    def mount_unseen(self, kind: str, *, slow: bool = False) -> Mounted:
        """As ``mount``, for a test that looks itself."""
        self.steps.append(kind)
        self._kind = kind
        options, arguments, write, snapshot = [*self._options], [], self._write, None
        match kind:
            case "refresh":
                arguments.append("--refresh")
            case "never":
                options.append("snapshot.freshness=never")
            case "given":
                self._given += 1
                snapshot = self._monarch.directory / f"given-{self._given}.snapshot"
                self._monarch("snapshot", "build", str(self._source), "-o", str(snapshot))
            case "lost state":
                self._states += 1
            case "read-only":
                write = ()
            case "elsewhere":
                write = ("absorb=none/here/**",)
            case "boot":
                self._boot_again()
        if slow:
            options.append(f"writeback.bandwidth={_SLOW}")
        # Others fill the disk of the tier, or make room again.
        (self._tier / "filler").unlink(missing_ok=True)
        if self._disk and kind == "full":
            fill(self._tier)
        return self._monarch.mount(
            self._source,
            tiers={"fast": self._capacity},
            options=[*write, *options],
            snapshot=snapshot,
            state=self._monarch.directory / f"state-{self._states}",
            arguments=arguments,
        )

    def others_act(self, act: Callable[[], None], what: str, kind: str) -> None:
        """Others do ``act`` at the source, before a mount of this kind."""
        self.steps.append(f"others: {what}")
        self.checker.others_act(act, kind)

    def sync(self) -> None:
        """Sync each file, so that all of it survives the machine's end."""
        for path, it in self.look().items():
            if it.kind == "file":
                fd = os.open(os.path.join(os.fsencode(self.path), path), os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def finish(self, kind: str) -> None:
        """A last mount drains all that the source accepts, and reports the rest."""
        self.mount(kind)
        self.checker.before = Ending(self.checker.in_tier.numbered(self.look()), "clean")
        trouble = drained_or_refused(self.mounted) or None
        now = self.checker.in_tier.numbered(self.look())
        self._check(lambda: self.checker.check_drained(now, trouble))
        self.end("abandon" if trouble else "clean")
        self._check(lambda: self.checker.check_nothing_left(trouble))
        self.mount("refresh")
        self.end("abandon")

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            raise AssertionError(
                f"{error}\nthe mounts until then: {', '.join(self.steps)}"
            ) from error

    def _boot_again(self) -> None:
        self._boots += 1
        assert self._monarch.boot is not None
        self._monarch.boot.write_text(f"boot-{self._boots}\n")
