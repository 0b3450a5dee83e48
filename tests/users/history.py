"""Histories of hostile users, each made from its seed alone, and the check of their results.

A history has rounds. In a round two ordinary users and root make calls, each at the source or on
the mount, while the drain is held; then everything is drained. Before the drain the directory at
the source is copied. In the copy the same users repeat the calls that they made on the mount. After
the drain each file must have the state of the copy, or its state before the drain. A call that
concerned one inode and would now meet another is not repeated: its user did not mean the other.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from monarch.posix import acl
from monarch.posix.credentials import Credentials
from tests.users import lists
from tests.users.calls import ROOT, SHARED, Call, Outcome
from tests.users.trees import Entry, Tree

Side = Literal["source", "mount"]

_FILE_MODES = (0o600, 0o640, 0o644, 0o660, 0o664, 0o666, 0o700, 0o755, 0o4755, 0o2755, 0o4775)
_DIRECTORY_MODES = (0o700, 0o750, 0o755, 0o770, 0o777, 0o1777, 0o2775)
# Where all users, or those of the group, may make names; and what is closed to others.
_SHARED_DIRECTORIES = ("sticky", "group", "open")
_NAMES = ("x", "y", "z")
_ROUNDS, _CALLS = 2, 10


@dataclass(frozen=True, slots=True)
class Step:
    side: Side
    call: Call

    def __str__(self) -> str:
        call = self.call
        if call.name == "setfacl":
            path, name, value = call.arguments
            text = lists.text_of(bytes.fromhex(value))
            return f"{self.side:6} {call.user:4} setfacl({path!r}, {name!r}, {text!r})"
        words = [oct(a) if isinstance(a, int) and a > 0 else repr(a) for a in call.arguments]
        return f"{self.side:6} {call.user:4} {call.name}({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class History:
    """``tree``: what is there when it begins. A round ends with a drain.

    Each history has users of its own: a change that the source refuses holds up later ones of the
    same user.
    """

    name: str
    tree: Mapping[str, Entry]
    rounds: Sequence[Sequence[Step]]


def directory(uid: int, gid: int, mode: int) -> Entry:
    return Entry("directory", uid, gid, mode, "")


def file(uid: int, gid: int, mode: int, data: str) -> Entry:
    return Entry("file", uid, gid, mode, data)


def users_of(number: int) -> tuple[int, int]:
    """The two ordinary users of a history."""
    return 10_000 + 2 * number, 10_001 + 2 * number


def third_user_of(number: int) -> int:
    """The third ordinary user of a history with lists."""
    return 20_000_000 + number


def surroundings(alice: int, mallory: int) -> dict[str, Entry]:
    """The directories that each history has."""
    return {
        "": directory(ROOT, ROOT, 0o755),
        "group": directory(ROOT, SHARED, 0o2775),
        "open": directory(ROOT, ROOT, 0o777),
        "sticky": directory(ROOT, ROOT, 0o1777),
        "alice": directory(alice, alice, 0o700),
        "mallory": directory(mallory, mallory, 0o755),
    }


def generated(seed: int, *, lists: bool = False) -> History:
    """The history of a seed; with ``lists`` three users also set access control lists."""
    return (_GeneratorOfLists if lists else _Generator)(seed).history()


class _Generator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._alice, self._mallory = users_of(seed)
        self._ordinary: tuple[int, ...] = (self._alice, self._mallory)
        self._users: tuple[int, ...] = (*self._ordinary, ROOT)
        self._shares: tuple[int, ...] = (45, 45, 10)
        self._written = 0
        self._near: list[str] = []
        # What is believed to be there: directories, and files for all else.
        self._there: dict[str, str] = {}

    def history(self) -> History:
        tree = surroundings(self._alice, self._mallory)
        tree["alice/key"] = file(self._alice, self._alice, 0o600, self._content(self._alice))
        tree["mallory/tool"] = file(
            self._mallory, self._mallory, 0o755, self._content(self._mallory)
        )
        for above in _SHARED_DIRECTORIES:
            for name in _NAMES:
                uid = self._random.choice(self._ordinary)
                kind = self._random.random()
                mode = self._random.choice(_FILE_MODES)
                if kind < 0.3:
                    gid = self._random.choice((uid, SHARED))
                    tree[f"{above}/{name}"] = file(uid, gid, mode, self._content(uid))
                elif kind < 0.45:
                    mode = self._random.choice(_DIRECTORY_MODES)
                    tree[f"{above}/{name}"] = directory(uid, SHARED, mode)
                    tree[f"{above}/{name}/x"] = file(uid, uid, 0o644, self._content(uid))
        self._there = {path: entry.kind for path, entry in tree.items()}
        rounds = [[self._step() for _ in range(_CALLS)] for _ in range(_ROUNDS)]
        return History(f"seed-{self._seed}", tree, rounds)

    def _content(self, user: int) -> str:
        """Bytes that no other user writes, and this user once only."""
        self._written += 1
        return f"{user}:{self._seed}:{self._written};"

    def _path(self) -> str:
        """Mostly one of a few names that are used again and again, so that users meet."""
        if self._near and self._random.random() < 0.6:
            return self._random.choice(self._near[-2:])
        chance = self._random.random()
        above, name = self._random.choice(_SHARED_DIRECTORIES), self._random.choice(_NAMES)
        if chance < 0.08:
            path = "alice/key"
        elif chance < 0.12:
            path = "mallory/tool"
        elif chance < 0.16:
            path = f"alice/{name}"
        elif chance < 0.2:
            path = f"mallory/{name}"
        elif chance < 0.35:
            path = f"{above}/{name}/{self._random.choice(_NAMES)}"
        else:
            path = f"{above}/{name}"
        self._near.append(path)
        return path

    def _step(self) -> Step:
        side: Side = "mount" if self._random.random() < 0.55 else "source"
        user = self._random.choices(self._users, self._shares)[0]
        return Step(side, self._call(user))

    def _call(self, user: int) -> Call:
        path = self._path()
        weights = _OF_MISSING if path not in self._there else _OF_DIRECTORIES
        if self._there.get(path) == "file":
            weights = _OF_FILES
        if self._random.random() < 0.15:
            weights = _OF_FILES  # whatever there is
        name = self._random.choices(tuple(weights), tuple(weights.values()))[0]
        call = Call(user, name, (path, *self._rest(user, name)))
        self._note(call)
        return call

    def _rest(self, user: int, name: str) -> tuple[Any, ...]:
        """The arguments behind the path."""
        chosen = self._random.choice
        match name:
            case "mkdir":
                return (chosen(_DIRECTORY_MODES),)
            case "create" | "save":
                return (chosen(_FILE_MODES), self._content(user))
            case "write" | "append":
                return (self._content(user),)
            case "rename" | "link":
                return (self._path(),)
            case "symlink":
                return (chosen((*_NAMES, "../alice/key")),)
            case "mkfifo":
                return (chosen(_FILE_MODES),)
            case "chmod":
                return (chosen((*_FILE_MODES, *_DIRECTORY_MODES)),)
            case "chown":
                uid = chosen(self._ordinary) if user == ROOT else -1
                return (uid, chosen((user, SHARED)))
        return ()

    def _note(self, call: Call) -> None:
        """Believe that the call was made; whether it was is seen when it is played."""
        path, to = call.paths[0], call.paths[-1]
        if call.name in ("unlink", "rmdir"):
            self._there.pop(path, None)
        elif call.name == "rename":
            self._there[to] = self._there.pop(path, "file")
        elif call.name == "mkdir":
            self._there.setdefault(path, "directory")
        elif call.name in ("create", "save", "symlink", "mkfifo", "link"):
            self._there.setdefault(to, "file")


class _GeneratorOfLists(_Generator):
    """Directories and files have lists from the beginning, or get them at the source, and the users
    meet each other in them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._ordinary = (self._alice, self._mallory, third_user_of(seed))
        self._users = (*self._ordinary, ROOT)
        self._shares = (30, 30, 30, 10)

    def history(self) -> History:
        history = super().history()
        tree = dict(history.tree)
        tree["third"] = directory(self._ordinary[2], self._ordinary[2], 0o750)
        for path, it in tree.items():
            if path and self._random.random() < 0.6:
                is_directory = it.kind == "directory"
                rights = _WIDE if path in _SHARED_DIRECTORIES else _RIGHTS
                access, default = (
                    self._list(rights) if is_there else b""
                    for is_there in (
                        not is_directory or self._random.random() < 0.6,
                        is_directory and self._random.random() < 0.6,
                    )
                )
                tree[path] = replace(it, lists=(access, default))
        return History(f"lists-{self._seed}", tree, history.rounds)

    def _step(self) -> Step:
        if self._random.random() > 0.25:
            return super()._step()
        # The mount sets no lists.
        side: Side = "mount" if self._random.random() < 0.1 else "source"
        user = self._random.choices(self._users, self._shares)[0]
        path = self._path() if self._random.random() < 0.6 else self._random.choice(_LISTED)
        name = self._random.choice(lists.NAMES)
        if self._random.random() < 0.25:
            return Step(side, Call(user, "delfacl", (path, name)))
        rights = _WIDE if path in _SHARED_DIRECTORIES else _RIGHTS
        return Step(side, Call(user, "setfacl", (path, name, self._list(rights).hex())))

    def _list(self, rights: Sequence[int]) -> bytes:
        bits = partial(self._random.choice, rights)
        users, groups = (
            {each: bits() for each in numbers if self._random.random() < 0.4}
            for numbers in (self._ordinary, (SHARED, *self._ordinary))
        )
        return lists.packed(bits(), bits(), bits(), bits(), users, groups)


_LISTED = (*_SHARED_DIRECTORIES, "alice", "mallory", "third")
_RIGHTS = (0, 4, 5, 6, 6, 7, 7, 7)
_WIDE = (5, *(7,) * 7)

_OF_MISSING = {"mkdir": 10, "create": 14, "save": 10, "symlink": 3, "mkfifo": 4}
_OF_DIRECTORIES = {"rename": 8, "rmdir": 8, "chmod": 10, "chown": 4, "mkdir": 3, "save": 3}
_OF_FILES = {
    **{"write": 8, "append": 4, "read": 10, "rename": 12, "link": 8, "unlink": 9, "chmod": 12},
    **{"chown": 4, "save": 5, "create": 3, "mkdir": 3},
}


# -- judgement -------------------------------------------------------------------------------------


# A call that the mount carried out, and for each of its paths the inodes at the source that it may
# have been about; None for what was made on the mount.
Made = tuple[Call, tuple["frozenset[int | None]", ...]]


@dataclass(slots=True)
class Round:
    """What was done in a round, and what should not have been."""

    made: list[Made] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Allowed:
    """What each path and each inode of the source may be after a drain.

    ``last``: what all is if the drain has come to its end. ``left``: the calls that do nothing in
    the place of the drain. If the source refuses changes, they may be among them.
    """

    paths: dict[str, set[Entry | None]] = field(default_factory=lambda: defaultdict(set))
    inodes: dict[int, set[Entry]] = field(default_factory=lambda: defaultdict(set))
    moments: int = 0
    last: Mapping[str, Entry] = field(default_factory=dict)
    left: list[Made] = field(default_factory=list)

    def add(self, tree: Tree, origins: Mapping[int, int]) -> None:
        """``origins``: inodes of ``tree`` that stand for those of the source."""
        for path in self.paths.keys() - tree.entries.keys():
            self.paths[path].add(None)
        for path, entry in tree.entries.items():
            if path not in self.paths and self.moments:
                # It was not there at the moments before.
                self.paths[path].add(None)
            self.paths[path].add(entry)
            if (origin := origins.get(tree.inodes[path])) is not None:
                self.inodes[origin].add(entry)
        self.moments += 1
        self.last = tree.entries


def replay(
    made: Sequence[Made],
    before: Tree,
    numbers: Mapping[int, int],
    perform: Callable[[Call], Outcome],
    look: Callable[[], Tree],
) -> Allowed:
    """What the calls of a round could have done to ``before`` if they had been made there.

    ``numbers``: the numbers that stand for the source's inodes in the copy of it.
    """
    allowed = Allowed()
    origins = {copy: origin for origin, copy in numbers.items()}
    tree = look()
    allowed.add(before, {ino: ino for ino in before.inodes.values()})
    for call, meant in made:
        if _meets_what_it_meant(call, meant, tree, origins) and not perform(call).error:
            tree = look()
            allowed.add(tree, origins)
        else:
            allowed.left.append((call, meant))
    return allowed


def _meets_what_it_meant(
    call: Call, meant: tuple[frozenset[int | None], ...], tree: Tree, origins: Mapping[int, int]
) -> bool:
    for path, inodes in zip(call.paths, meant, strict=True):
        found = tree.inodes.get(path)
        origin = None if found is None else origins.get(found)
        if origin is not None and origin not in inodes:
            return False
    return True


_MAKING = ("create", "save", "mkdir", "mkfifo", "symlink")
_CONFLICT = ".monarch-conflict-"
# What waits for its turn at the source has such a name.
_STAGED = ".monarch-"
_SPECIAL_BITS = 0o6000
# A user who is in no group of the others.
_STRANGER = 65534
_STICKY = 0o1000


@dataclass(slots=True)
class _Origin:
    """The name that a file had on the mount first, the users who may have made it there, and those
    who have renamed it."""

    path: str
    makers: set[int] = field(default_factory=set)
    renamers: set[int] = field(default_factory=set)


class SourceChecker:
    """Finds what is at the source after a drain and could not be there without the mount.

    A change is in order if the calls that were made could have had just this effect in the place of
    the drain (``allowed``). Some are in order beside that, for a drain need not end in one of these
    moments: The names that a user has requested by ``made``, and may make by the modes at the
    source. ``shown`` is what the mount was to show, ``began`` what it has shown at the beginning of
    each round whose calls are in ``made``.
    """

    def __init__(
        self,
        before: Tree,
        allowed: Allowed,
        made: Sequence[Made],
        shown: Mapping[str, Entry],
        began: Sequence[Mapping[str, Entry]],
    ) -> None:
        self._before = before
        self._allowed = allowed
        self._made = made
        self._shown = shown
        self._began = began
        self._users = {call.user for call, _ in made} - {ROOT}

    def problems(self, after: Tree) -> list[str]:
        before, found = self._before, []
        for path in sorted(before.entries.keys() | after.entries.keys()):
            was, now = before.entries.get(path), after.entries.get(path)
            if now == was or now in self._allowed.paths.get(path, ()):
                continue
            if now is None and _is_staged(path):
                continue
            if was is None and now is not None and self._is_kept_beside(path, now):
                continue
            if now is None and self._is_renamed_beside(path, after):
                continue
            if was is None and now is not None and self._is_made_again(path, now):
                continue
            if now is not None and self._is_brought_renamed(path, was, now):
                continue
            if any(self._may(user, path, was, now, after) for user in self._users):
                continue
            allowed = self._allowed.paths.get(path, {was})
            words = ", ".join(sorted(map(str, allowed)))
            found.append(f"{path}: was {was}, is {now}, could have been {words}")
        return [*found, *self._of_inodes(after)]

    def _of_inodes(self, after: Tree) -> Iterator[str]:
        """What has become of each inode that is there still, whatever its names are."""
        there = {ino: after.entries[path] for path, ino in after.inodes.items()}
        for path, ino in self._before.inodes.items():
            was, now = self._before.entries[path], there.get(ino)
            if now in (None, was) or now in self._allowed.inodes.get(ino, ()):
                continue
            assert now is not None
            if not any(
                self._has_named(user, name) and self._may_change(user, was, now)
                for user in self._users
                for name in _names(self._before, ino)
            ):
                yield f"the inode that was {path}: was {was}, is {now}"

    # -- what a user may do --------------------------------------------------------------------

    def _may(self, user: int, path: str, was: Entry | None, now: Entry | None, after: Tree) -> bool:
        if was is not None and now is not None and self._may_change(user, was, now):
            # What changes a file changes it under each name that it had and has.
            names = _names(self._before, self._before.inodes[path])
            names &= _names(after, after.inodes[path])
            if any(self._has_named(user, name) for name in {path, *names}):
                return True
        if not self._has_named(user, path):
            return False
        above = after.entries.get(path.rpartition("/")[0])
        is_in_own = was is None and above is not None and above.uid == user
        if not is_in_own and not self._may_name(user, path, was):
            return False
        if now is None or after.inodes[path] in self._before.inodes.values():
            return True
        return now.uid == user and not self._is_dressed_up(now)

    def _may_change(self, user: int, was: Entry, now: Entry) -> bool:
        """Whether a user may make an inode into what it is."""
        if (now.kind, now.uid) != (was.kind, was.uid) or self._is_dressed_up(now):
            return False
        attributes = (now.gid, now.lists) == (was.gid, was.lists)
        attributes = attributes and now.mode in (was.mode, was.mode & ~_SPECIAL_BITS)
        content = now.data == was.data or all(
            _grants(was, writer, 2) for writer in {user} | (_writers(now) - _writers(was) - {ROOT})
        )
        return content and (attributes or user == was.uid)

    def _is_dressed_up(self, entry: Entry) -> bool:
        """Whether it is a program that runs as its owner, and another user has written it.

        Root may: what root writes takes no bits.
        """
        return bool(entry.mode & _SPECIAL_BITS) and not _writers(entry) <= {entry.uid, ROOT}

    def _has_named(self, user: int, path: str) -> bool:
        """Whether a user has called something on the mount with that path, or one above it, or
        beneath it: directories that are missing are made."""
        return any(
            path == each or path.startswith(f"{each}/") or each.startswith(f"{path}/")
            for call, _ in self._made
            if call.user == user
            for each in call.paths
        )

    def _may_name(self, user: int, path: str, was: Entry | None) -> bool:
        """Whether a user may make, replace and remove a name, at some moment."""
        above = path.rpartition("/")[0]
        return any(
            _grants(each, user, 3)
            and (was is None or not each.mode & _STICKY or user in (each.uid, was.uid))
            for each in self._allowed.paths.get(above, ())
            if each is not None and each.kind == "directory"
        )

    def _is_kept_beside(self, path: str, now: Entry) -> bool:
        """Whether it has the bytes that a user has written, under another name, and is readable for
        no more users."""
        above, _, name = path.rpartition("/")
        if _CONFLICT not in name and not _is_staged(path):
            return False
        if _CONFLICT in name and not self._is_as_closed(now):
            return False
        if all(_grants(now, writer, 2) for writer in _writers(now) - {ROOT, now.uid}):
            return not self._is_dressed_up(now)
        is_closed = not (now.mode & 0o007 or self._is_for_others(now))
        if now.kind != "file" or _writers(now) <= {now.uid} or is_closed:
            return not self._is_dressed_up(now)
        return any(
            (now.uid, now.data) == (each.uid, each.data) and self._is_no_wider(now, each)
            for shown, each in self._shown.items()
            if shown.rpartition("/")[0] == above
        )

    def _is_as_closed(self, now: Entry) -> bool:
        """Whether what a user has written is open to no more users than on the mount. A file
        that the source had before, and that was moved there, keeps its mode. A list may come from
        the directory at the source."""
        written = [
            each
            for each in self._shown.values()
            if (each.kind, each.uid, each.data) == (now.kind, now.uid, now.data)
        ]
        is_exempt = any(now.lists) or now in self._before.entries.values()
        return is_exempt or not written or any(self._is_no_wider(now, each) for each in written)

    def _is_for_others(self, now: Entry) -> bool:
        """Whether the group of an entry, or a user of its list, has any right."""
        if not any(now.lists):
            return bool(now.mode & 0o070)
        others = self._users - {now.uid}
        return any(_grants(now, user, right) for user in others for right in (1, 2, 4))

    def _is_no_wider(self, now: Entry, than: Entry) -> bool:
        """Whether an entry gives no user a right that another gives not."""
        if not (any(now.lists) or any(than.lists)):
            return not now.mode & ~than.mode
        return all(
            _grants(than, user, right)
            for user in (*self._users, _STRANGER)
            for right in (1, 2, 4)
            if _grants(now, user, right)
        )

    def _is_brought_renamed(self, path: str, was: Entry | None, now: Entry) -> bool:
        """Whether a file has the name that a user gave it who was allowed to.

        It is not found under its first name: its owner has made it on the mount, and others have
        taken that name at the source, or others have moved, removed or written it there meanwhile.
        If others have, it has its set-ID bits only if its owner has renamed it.
        """
        shown = self._shown.get(path)
        if shown is None or self._is_dressed_up(now):
            return False
        origin = self._origin(path)
        is_there = now in self._before.entries.values()
        is_made = now.uid in origin.makers
        was_there = any(shown == each.get(origin.path) for each in self._began)
        may_have_bits = is_there or is_made or now.uid in origin.renamers
        plain = replace(shown, mode=shown.mode & ~_SPECIAL_BITS)
        return (
            ((now == shown and may_have_bits) or (now == plain and was_there))
            and (is_there or is_made or was_there)
            and any(
                call.name == "rename"
                and call.paths[1] == path
                and (call.user == ROOT or self._may_name(call.user, path, was))
                for call, _ in self._made
            )
        )

    def _origin(self, path: str) -> _Origin:
        """Where the file came from that has a name on the mount."""
        origin = _Origin(path)
        for call, _ in reversed(self._made):
            if call.name in ("rename", "link"):
                first, to = call.paths
                if origin.path == to or origin.path.startswith(f"{to}/"):
                    origin.path = f"{first}{origin.path[len(to) :]}"
                    if call.name == "rename":
                        origin.renamers.add(call.user)
            elif call.name in _MAKING and call.paths[0] == origin.path:
                origin.makers.add(call.user)
        return origin

    def _is_made_again(self, path: str, now: Entry) -> bool:
        """Whether root has written it into a file that its owner removed, and it has no rights."""
        shown = self._shown.get(path)
        return (
            any(call.user == ROOT and path in call.paths for call, _ in self._made)
            and shown is not None
            and now == replace(shown, mode=shown.mode & ~_SPECIAL_BITS)
        )

    def _is_renamed_beside(self, path: str, after: Tree) -> bool:
        """Whether a rename has moved it beside its new name, which others have taken."""
        names = [name for name, ino in after.inodes.items() if ino == self._before.inodes[path]]
        return any(
            call.name == "rename"
            and call.paths[0] == path
            and any(name.startswith(f"{call.paths[1]}{_CONFLICT}") for name in names)
            for call, _ in self._made
        )


def _names(tree: Tree, ino: int) -> set[str]:
    return {path for path, each in tree.inodes.items() if each == ino}


def _is_staged(path: str) -> bool:
    return path.rpartition("/")[2].startswith(_STAGED)


def _writers(entry: Entry) -> set[int]:
    """The users that wrote the bytes of a file."""
    if entry.kind != "file":
        return set()
    return {int(tag.split(":")[0]) for tag in entry.data.split(";") if tag}


def _grants(entry: Entry, user: int, bits: int) -> bool:
    """Whether the mode and list of an entry let an ordinary user do all of ``bits``, as in rwx."""
    groups = () if user == _STRANGER else (SHARED,)
    by = Credentials(user, user, groups)
    return acl.allows(entry.lists[0], entry.mode, uid=entry.uid, gid=entry.gid, by=by, wanted=bits)
