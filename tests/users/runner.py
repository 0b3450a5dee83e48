"""The places of histories: a source with its mount, and copies of the source without a mount."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MonarchCommand
from tests.equipment.remounted import Remounts, drained_or_refused, rotated
from tests.users.calls import Actors, Call
from tests.users.history import Allowed, History, Made, Round, SourceChecker, Step, replay
from tests.users.lists import lists_at, set_lists
from tests.users.trees import Entry, Tree, build, entry, look

# Histories that go through their rounds together: one drain for all, within the time for which the
# drain is held while changes come.
_TOGETHER = 25
# The kinds of mounts behind the last round.
_REMOUNTS = 3
_DIRECTORIES = ("source", "mnt", "view", "shadow", "plain")
_IN_MEMORY = ("view", "shadow")


def play(
    monarch: MonarchCommand,
    directory: Path,
    histories: Sequence[History],
    tell: Callable[[str], None] = lambda line: None,
    *,
    number: int = 0,
) -> list[str]:
    """Play all histories on one mount; what could not have been without it. ``tell`` gets each
    message, ``number`` chooses the kinds of the mounts that follow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        runner = HistoryRunner(monarch, directory, histories, tell, monkeypatch)
        problems = []
        try:
            for first in range(0, len(histories), _TOGETHER):
                problems += runner.play(histories[first : first + _TOGETHER])
            problems += runner.mounted_again(histories, rotated(number, _REMOUNTS))
        finally:
            runner.close()
    # A file that is drained in the middle of a round cannot be distinguished from the users' own
    # changes, and a drain that stands still changes nothing.
    if len(histories) > _TOGETHER:
        summary = (
            f"judged {runner.judged} rounds, {runner.complete} drained, {runner.not_held} not held"
        )
        tell(summary)
        assert runner.not_held < runner.judged / 4, summary
        assert runner.complete > runner.judged / 2, summary
    return problems


class HistoryRunner:
    """The directories in which histories take place: the source, the mount, and three copies.

    ``view`` is what the mount is to show: each call of the mount is made there, too. ``shadow`` is
    the source without a drain: each call of the source is made there, too. ``plain`` is the source
    before a drain: there the calls of the mount are made at the moment of the drain.
    """

    def __init__(
        self,
        monarch: MonarchCommand,
        directory: Path,
        histories: Sequence[History],
        tell: Callable[[str], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self._tell = tell
        # In memory, for they are made anew for each round.
        self._memory = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._directories = {
            name: (Path(self._memory.name) if name in _IN_MEMORY else directory) / name
            for name in _DIRECTORIES
        }
        for path in self._directories.values():
            path.mkdir(exist_ok=True)
        # Rounds in which the mount was changed; those at whose end the source had all of it.
        self.judged = self.complete = 0
        self.not_held = 0
        self._fds = {}
        self._fds["source"] = os.open(self._directories["source"], os.O_PATH)
        for history in histories:
            numbers = {path: number for number, path in enumerate(history.tree)}
            build(self._fds["source"], history.name, Tree(history.tree, numbers))
        self._remounts = Remounts(
            monarch,
            self._directories["source"],
            monkeypatch,
            write=["write=absorb"],
            # What stays refused is not waited for.
            options=["allow_other", "limits.tier_timeout=60", "writeback.end_timeout=1"],
            disk=False,
            capacity="1GiB",
        )
        for name in _DIRECTORIES[1:]:
            self._fds[name] = os.open(self._directories[name], os.O_PATH)
        self._act = Actors({name: str(path) for name, path in self._directories.items()})
        # Calls that the mount carried out and that may not be at the source yet, by history.
        self._pending: dict[str, list[Made]] = {history.name: [] for history in histories}
        # What the mount showed before each round with such calls, by history.
        self._began: dict[str, list[Mapping[str, Entry]]] = {it.name: [] for it in histories}

    def mounted_again(self, histories: Sequence[History], kinds: Sequence[str]) -> list[str]:
        """Kill the daemon and mount again in these ways: what changed at the source, cannot be
        read, or is not shown although the source lacks it."""
        before = {history.name: self._look("source", history.name) for history in histories}
        shown = {
            f"{history.name}/{path}": it
            for history in histories
            for path, it in self._look("mnt", history.name).entries.items()
        }
        os.close(self._fds.pop("mnt"))
        self._act.close()
        self._remounts.mounted.kill()
        problems = []
        for kind in kinds:
            waiting = self._waiting() if kind != "boot" else set()
            self._remounts.mounted = self._remounts.mount_unseen(kind)
            fd = os.open(self._directories["mnt"], os.O_PATH)
            for path in waiting & shown.keys():
                now, was = entry(fd, path), shown[path]
                if kind == "lost state" and now is not None:
                    # A new snapshot has the owners and modes that others have set.
                    now = replace(now, uid=was.uid, gid=was.gid, mode=was.mode, lists=was.lists)
                if now != was:
                    problems.append(f"{path}: mounted again ({kind}), {now}, not {was}")
            self._drain()
            for name, tree in before.items():
                if _lasting(self._look("source", name)) != _lasting(tree):
                    problems.append(f"{name}: mounted again ({kind}), the source has changed")
                try:
                    look(fd, name)
                except OSError as error:
                    problems.append(f"{name}: mounted again ({kind}), it cannot be read: {error}")
            os.close(fd)
            self._remounts.mounted.umount("--abandon")
        return problems

    def _waiting(self) -> set[str]:
        """The files that the source lacks, or some of their names. A machine that stops may lose
        those that were not synced."""
        left = self._remounts.checker.in_tier
        owed = left.owed()
        return {os.fsdecode(path) for path, number in left.names().items() if number in owed}

    def close(self) -> None:
        if "mnt" in self._fds:
            self._act.close()
        self._memory.cleanup()
        for fd in self._fds.values():
            os.close(fd)

    def play(self, histories: Sequence[History]) -> list[str]:
        """Have the histories take place together; what could not have been without the mount."""
        problems = {history.name: list[str]() for history in histories}
        for number in range(max(len(history.rounds) for history in histories)):
            taking_part = [history for history in histories if number < len(history.rounds)]
            self._play_round(taking_part, number, problems)
        return [
            f"{history.name}: {problem}"
            for history in histories
            for problem in problems[history.name]
        ]

    def _play_round(
        self, histories: Sequence[History], number: int, problems: Mapping[str, list[str]]
    ) -> None:
        views = {}
        for history in histories:
            tree = self._look("mnt", history.name)
            views[history.name] = self._copied("view", history.name, tree)
            self._began[history.name].append(tree.entries)
        for history in histories:
            self._copied("shadow", history.name, self._look_at_source(history.name))
        rounds = {
            history.name: self._steps(history, history.rounds[number], views[history.name])
            for history in histories
        }
        with ExitStack() as stack:
            before = {history.name: self._held(stack, history.name) for history in histories}
            trouble = self._drain()
            for history in histories:
                name = history.name
                problems[name] += rounds[name].problems
                pending = self._pending[name]
                pending += rounds[name].made
                if before[name].entries != self._look("shadow", name).entries:
                    self.not_held += 1
                    continue
                allowed = self._allowed(name, before[name], pending)
                after = self._look("source", name)
                self.judged += bool(pending)
                began = self._began[name]
                if after.entries == allowed.last:
                    self.complete += bool(pending)
                    pending[:] = allowed.left if trouble else []
                    if not pending:
                        began.clear()
                shown = self._look("view", name).entries
                checker = SourceChecker(before[name], allowed, pending, shown, began)
                found = checker.problems(after)
                problems[name] += [f"round {number + 1}: {text}" for text in found]

    def _drain(self) -> str:
        """Have all come to the source but what that refuses; as ``drained_or_refused``."""
        return drained_or_refused(self._remounts.mounted, self._tell)

    def _steps(self, history: History, steps: Sequence[Step], origins: Mapping[int, int]) -> Round:
        """``origins``: for inodes of the view those of the source."""
        played = Round()
        for step in steps:
            call, actor = step.call, self._act
            if step.side == "source":
                self._tell(f"{step}: {actor('source', history.name, call)}")
                actor("shadow", history.name, call)
                continue
            call = self._followed(history.name, call)
            # The mount may take what the source has under a name by now, when it looks there again.
            now = [self._source_ino(history.name, path) for path in call.paths]
            outcome = actor("mnt", history.name, call)
            # The mount may have taken what the source has of a directory before the call or after.
            has_learned = self._learn_directories(history.name, call)
            if outcome.error:
                self._tell(f"{step}: {outcome.error}")
                self._learn(history.name, call, origins, played)
                continue
            shown = [self._origin(history.name, path, origins) for path in call.paths]
            meant = tuple(map(frozenset, zip(shown, now, strict=True)))
            expected = actor("view", history.name, call)
            self._tell(f"{step}: done, without the mount {expected}")
            played.made.append((call, meant))
            # Where the source has another file by now, the mount may have taken that file. The
            # outcome of the call is compared at the source.
            is_other = has_learned or any(len(inodes - {None}) > 1 for inodes in meant)
            is_other = is_other or any(self._is_taken(history.name, path) for path in call.paths)
            if expected.error in ("EACCES", "EPERM") and not is_other:
                played.problems.append(f"{step}: done, though without the mount {expected.error}")
            if (
                call.name == "read"
                and not has_learned
                and outcome not in (expected, actor("source", history.name, call))
            ):
                played.problems.append(f"{step}: read {outcome.content!r}")
            self._learn(history.name, call, origins, played)
        return played

    def _followed(self, name: str, call: Call) -> Call:
        """The call with the path of the file that it is about: chmod alone follows a link.

        The link leads there when the call is made. The source may have no such link at the drain.
        """
        path = call.paths[0]
        status = self._status("view", name, path)
        if call.name != "chmod" or status is None or not stat.S_ISLNK(status.st_mode):
            return call
        # Of a loop of links this is a path in the loop. Then the call fails.
        root = os.path.realpath(self._directories["view"] / name)
        target = Path(os.path.realpath(f"{root}/{path}"))
        if not target.is_relative_to(root):
            return call
        return replace(call, arguments=(str(target.relative_to(root)), *call.arguments[1:]))

    def _learn(self, name: str, call: Call, origins: Mapping[int, int], played: Round) -> None:
        """Give the view the owner and mode that the mount has taken from the source for a file.

        It takes them when it opens the file there (promise 26), unless users have set others on
        the mount. A write may have removed the set-ID bits. The file is not opened here, for that
        would have the mount take them.
        """
        for path in call.paths:
            origin = self._origin(name, path, origins)
            if origin is None or origin in self._set(name, played):
                continue
            shown, viewed = self._status("mnt", name, path), self._status("view", name, path)
            if shown is None or viewed is None or not stat.S_ISREG(shown.st_mode):
                continue
            at, below = self._fds["view"], f"{name}/{path}"
            lists = lists_at(self._fds["mnt"], below)
            if (_rights(shown), lists) == (_rights(viewed), lists_at(at, below)):
                continue
            there = self._look_at_source(name)
            names = [at for at, ino in there.inodes.items() if ino == origin]
            found = self._status("source", name, names[0]) if names else None
            if found is not None and (_rights(found), there.entries[names[0]].lists) == (
                _rights(shown),
                lists,
            ):
                os.chown(below, shown.st_uid, shown.st_gid, dir_fd=at, follow_symlinks=False)
                set_lists(at, below, lists, anew=True)
                os.chmod(below, stat.S_IMODE(shown.st_mode), dir_fd=at)

    def _learn_directories(self, name: str, call: Call) -> bool:
        """Give the view the owner, mode and lists that the mount has taken from the source for a
        directory above a path of the call (promise 148); whether there was any."""
        has_learned = False
        for path in call.paths:
            while path:
                path = path.rpartition("/")[0]
                shown = self._status("mnt", name, path)
                access, viewed = (self._access(where, name, path) for where in ("mnt", "view"))
                if shown is None or viewed in (None, access) or not stat.S_ISDIR(shown.st_mode):
                    continue
                if access != self._access("source", name, path):
                    # It was set on the mount.
                    continue
                at, below = self._fds["view"], f"{name}/{path}"
                os.chown(below, shown.st_uid, shown.st_gid, dir_fd=at, follow_symlinks=False)
                set_lists(at, below, lists_at(self._fds["mnt"], below), anew=True)
                os.chmod(below, stat.S_IMODE(shown.st_mode), dir_fd=at)
                has_learned = True
        return has_learned

    def _is_taken(self, name: str, path: str) -> bool:
        """Whether the mount has taken what the source has under a name now, and the view has not:
        when the round began others had removed it there, or put another kind of entry there."""
        of_mount, of_view, of_source = (
            self._access(where, name, path) for where in ("mnt", "view", "source")
        )
        return of_mount == of_source != of_view

    def _access(self, where: str, name: str, path: str) -> tuple[Any, ...] | None:
        """What decides about access to an entry; None if there is none."""
        with suppress(FileNotFoundError):
            status = self._status(where, name, path)
            return status and (_rights(status), lists_at(self._fds[where], f"{name}/{path}"))
        return None

    def _set(self, name: str, played: Round) -> set[int | None]:
        """The files of the source whose owner or mode the mount has to bring there."""
        made = [*self._pending[name], *played.made]
        calls = [meant for call, meant in made if call.name in ("chmod", "chown")]
        return {inode for meant in calls for inodes in meant for inode in inodes}

    def _origin(self, name: str, path: str, origins: Mapping[int, int]) -> int | None:
        status = self._status("view", name, path)
        return origins.get(status.st_ino) if status is not None else None

    def _allowed(self, name: str, before: Tree, made: Sequence[Made]) -> Allowed:
        self._copied("plain", name, before)
        numbers = self._numbers
        return replay(
            made,
            before,
            numbers,
            lambda call: self._act("plain", name, call),
            lambda: self._look("plain", name),
        )

    def _copied(self, where: str, name: str, tree: Tree) -> Mapping[int, int]:
        """Make a copy anew; for its inodes those of the source that have the same names."""
        target = self._directories[where] / name
        if target.exists():
            shutil.rmtree(target)
        self._numbers = build(self._fds[where], name, tree)
        origins = {}
        for path, ino in tree.inodes.items():
            found = self._source_ino(name, path) if where == "view" else ino
            if found is not None:
                origins[self._numbers[ino]] = found
        return origins

    def _source_ino(self, name: str, path: str) -> int | None:
        status = self._status("source", name, path)
        return status.st_ino if status is not None else None

    def _status(self, where: str, name: str, path: str) -> os.stat_result | None:
        below = f"{name}/{path}" if path else name
        try:
            return os.stat(below, dir_fd=self._fds[where], follow_symlinks=False)
        except OSError:
            return None

    def _look(self, where: str, name: str) -> Tree:
        return look(self._fds[where], name)

    def _held(self, stack: ExitStack, name: str) -> Tree:
        """The source as it is, each inode open: as long as it is open no other gets its number."""
        while True:
            with ExitStack() as opened:
                before = self._look_at_source(name)
                try:
                    for path in before.inodes:
                        below = f"{name}/{path}" if path else name
                        fd = os.open(below, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._fds["source"])
                        opened.callback(os.close, fd)
                except FileNotFoundError:
                    continue
                if self._look_at_source(name) == before:
                    stack.push(opened.pop_all())
                    return before

    def _look_at_source(self, name: str) -> Tree:
        """The drain may try a refused change again meanwhile; then a name found may be gone."""
        while True:
            with suppress(FileNotFoundError):
                return self._look("source", name)


def _rights(status: os.stat_result) -> tuple[int, int, int]:
    """The kind and mode but for the set-ID bits, the owner and the group."""
    return status.st_mode & ~(stat.S_ISUID | stat.S_ISGID), status.st_uid, status.st_gid


def _lasting(tree: Tree) -> dict[str, Entry]:
    """The entries but for staged files, which come and go."""
    return {
        path: entry
        for path, entry in tree.entries.items()
        if not path.rpartition("/")[2].startswith(".monarch-")
    }
