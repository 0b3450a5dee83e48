"""Mounting again: the kinds, what others do to the source meanwhile, and a checker of the results.

Tests below the kernel and tests of real mounts share this module. ``HistoryChecker`` compares what
a mount shows with what the mount before it showed: each acknowledged change must be shown, reach
the source, or be reported.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monarch.writeback.earlier import Inspection, inspect
from monarch.writeback.history import names_of
from monarch.writeback.journal import read_replay
from monarch.writeback.op import Op

# How a mount is made again; a kind that occurs twice is drawn twice as often.
KINDS = (
    *("same", "same", "refresh", "new", "never", "given", "lost state", "lost state"),
    *("read-only", "elsewhere", "boot", "boot", "full"),
)
# A staged file at the source that alone has the bytes of an object, with the object's number.
_WRITE_THROUGH = re.compile(rb"/?\.monarch-[0-9a-f]+-([0-9]+)-through\.part$")
_DURABLE = b"user.monarch.durable"
_BESIDE = b".monarch-conflict-"
# Contents above this size, in bytes, are compared by a digest.
_LONG = 200
# What others may do: to a directory the first four.
ACTS = ("rename", "rename", "remove", "file", "link", "add", "rewrite")
# What they may do to a file in its place, which changes no time of its directory.
IN_PLACE = ("mode", "owner", "time", "grow", "cut")


@dataclass(frozen=True)
class Shown:
    """An entry of a tree. ``content`` of a file, ``target`` of a link; ``safety`` as
    ``user.monarch.durable`` tells it, empty at the source; ``object`` has its bytes in the tier,
    ``ino`` is its number there; ``source_ino`` that of a directory at the source, if known.
    ``more``: owner, time and links, if they and the extended attributes are compared as well.
    ``status``: ``attributes_of`` a file on a mount."""

    kind: str
    mode: int
    content: bytes = b""
    target: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    safety: str = ""
    object: int = 0
    ino: int = 0
    source_ino: int = 0
    more: tuple[Any, ...] = ()
    status: tuple[int, ...] = field(default=(), compare=False)

    @property
    def bare(self) -> tuple[Any, ...]:
        xattrs = self.xattrs if self.more else ()
        return self.kind, self.mode, self.content, self.target, self.more, xattrs

    @property
    def without_links(self) -> Shown:
        """The same without the number of a file's links."""
        return replace(self, more=self.more[:3]) if self.kind == "file" else self


Tree = dict[bytes, Shown]

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


def kind_of(mode: int) -> str:
    return _KINDS[stat.S_IFMT(mode)]


def tree_of(root: Path, *, closely: bool = False) -> Tree:
    """What is in a directory of the source, or on a mount, without what Monarch has there for
    itself. ``closely``: with owners, times, links and extended attributes, to be compared, and with
    a digest in place of the end of long contents."""
    found: Tree = {}
    top = os.fsencode(root)
    for above, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(b".monarch-")]
        for name in [*folders, *files]:
            path = os.path.join(above, name)
            if name.startswith(b".monarch-"):
                continue
            try:
                found[os.path.relpath(path, top)] = _entry(path, closely)
            except FileNotFoundError:
                # A mount finds when it opens a file that others have removed it.
                assert name not in os.listdir(above), f"{path!r} is listed, and cannot be found"
    return found


def _entry(path: bytes, closely: bool) -> Shown:
    status = os.lstat(path)
    it = Shown(kind_of(status.st_mode), stat.S_IMODE(status.st_mode))
    if it.kind == "file":
        it = _file(path, it.mode)
    elif it.kind == "link":
        it = replace(it, mode=0o777, target=os.readlink(path))
    return _with_more(it, status) if closely else it


def _file(path: bytes, mode: int) -> Shown:
    content = Path(os.fsdecode(path)).read_bytes()
    try:
        xattrs = _xattrs(path)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        # A mount that does not absorb shows them until the file is drained, which may be now.
        xattrs = _xattrs(path)
    safety = ""
    # A mount does not list it.
    with suppress(OSError):
        safety = os.getxattr(path, _DURABLE).decode()
    return Shown("file", mode, content, b"", xattrs, safety)


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    names = sorted(map(os.fsencode, os.listxattr(path)))
    return tuple((name, os.getxattr(path, name)) for name in names)


def _with_more(it: Shown, status: os.stat_result) -> Shown:
    more: tuple[object, ...] = (status.st_uid, status.st_gid)
    if it.kind != "file":
        return replace(it, more=more, ino=status.st_ino)
    more = (*more, status.st_mtime_ns, status.st_nlink)
    content = it.content
    if len(content) > _LONG:
        digest = hashlib.sha256(content).hexdigest()[:16]
        content = content[:40] + f"... {len(content)} bytes, {digest}".encode()
    return replace(it, content=content, more=more, ino=status.st_ino)


@dataclass(frozen=True)
class Left:
    """What mounts left in a tier, by the journal in ``directory``."""

    directory: Path

    def waiting(self) -> list[Op]:
        """The changes that the source lacks, in their order."""
        if not (self.directory / "journal").exists():
            return []
        found = read_replay(self.directory)
        return [op for seq, op in found.ops if seq not in found.done and not op.same]

    def owed(self) -> set[int]:
        """Objects whose bytes, or one of whose names, the source lacks."""
        kinds = ("create", "content", "rename", "link")
        return {op.object for op in self.waiting() if op.kind in kinds} - {0}

    def through(self) -> dict[int, int]:
        """The objects whose bytes only a file at the source has, under a name there, with the inode
        number of that file."""
        if not (self.directory / "journal").exists():
            return {}
        found = read_replay(self.directory)
        numbers = {op.object for _, op in found.ops if op.kind == "through"}
        there = {
            op.object: found.done.get(seq)
            for seq, op in found.ops
            if op.kind == "content" and op.object in numbers
        }
        return {number: it.source_ino for number, it in there.items() if it is not None}

    def names(self) -> dict[bytes, int]:
        """The objects of all written files by the names that the last mount showed."""
        if not (self.directory / "journal").exists():
            return {}
        ops = read_replay(self.directory).ops
        names = names_of(ops, {op.object for _, op in ops} - {0})
        return {path: number for number, paths in names.items() for path in paths}

    def numbered(self, tree: Tree) -> Tree:
        """``tree``, as the last mount showed it, with the objects of its files."""
        numbers = self.names()
        return {path: replace(it, object=numbers.get(path, 0)) for path, it in tree.items()}

    def survey(self) -> Inspection | None:
        return inspect(self.directory) if (self.directory / "journal").exists() else None


class Others:
    """What others do to the source between two mounts. ``files``: names that they write to."""

    def __init__(self, chance: random.Random, source: Path, files: Sequence[bytes]) -> None:
        self._chance = chance
        self._source = source
        self._files = files
        self._count = 0

    def act(self, kind: str = "") -> None:
        """One of ``ACTS`` or ``IN_PLACE``, by default any."""
        getattr(self, "_" + (kind or self._chance.choice((*ACTS, *ACTS, *IN_PLACE))))()

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
        path = self._source / os.fsdecode(self._chance.choice(self._files))
        # An open of a fifo would wait for a reader.
        with suppress(OSError):
            if path.is_file() or not path.exists():
                path.write_bytes(b"others' version")

    def _written(self) -> Path | None:
        paths = [self._source / os.fsdecode(name) for name in self._files]
        found = [path for path in paths if path.is_file() and not path.is_symlink()]
        return self._chance.choice(found) if found else None

    def _mode(self) -> None:
        if path := self._written():
            path.chmod(self._chance.choice([0o604, 0o660, 0o711]))

    def _owner(self) -> None:
        # Root alone may give a file away.
        with suppress(PermissionError):
            if path := self._written():
                os.chown(path, 1234, 1234)

    def _time(self) -> None:
        if path := self._written():
            os.utime(path, ns=(0, self._chance.randrange(10**18)))

    def _grow(self) -> None:
        if path := self._written():
            with path.open("ab") as file:
                file.write(b" others' end")

    def _cut(self) -> None:
        if path := self._written():
            os.truncate(path, path.stat().st_size // 2)


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


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
class HistoryChecker:
    """What is known of one history of mounts of ``source``. ``in_tier``: what its mounts left in
    the tier. ``closely``: whether trees have the owners, times and extended attributes of all
    entries.

    ``theirs``: paths that others have touched at the source, with all beneath; ``gone``: contents
    that others have taken from it. ``left``: the paths, with these contents, from which others have
    taken files that nothing waited for. ``taken``: objects with all of their bytes in a staged
    file, or a file with a name, that others have taken away. ``modes``: those that others have
    given to files: a written file has the mode that it was given at the source. ``shown``: the
    modes of each object that mounts have shown; a file that others have written is another one than
    that of the mount, which has its own mode again. ``given_away``: the paths of files that others
    have given another owner.
    """

    source: Path
    in_tier: Left
    closely: bool = False
    theirs: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)
    left: set[tuple[bytes, bytes]] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    modes: set[int] = field(default_factory=set)
    shown: dict[int, set[int]] = field(default_factory=dict)
    given_away: set[bytes] = field(default_factory=set)
    before: Ending = field(init=False)

    def __post_init__(self) -> None:
        self.before = Ending(self.at_source(), "clean")

    def at_source(self) -> Tree:
        return tree_of(self.source, closely=self.closely)

    def ended(self, ending: Ending) -> None:
        """A mount has ended so; the next one is compared with it."""
        ending.owed = self.in_tier.owed() - self.taken
        for it in ending.tree.values():
            self.shown.setdefault(it.object, set()).add(it.mode)
        self.before = ending

    def is_theirs(self, path: bytes) -> bool:
        return any(path == at or path.startswith(at + b"/") for at in self.theirs)

    def has_theirs(self, path: bytes, tree: Tree) -> bool:
        """Whether a directory holds something of others, so that it cannot be removed."""
        return any(at.startswith(path + b"/") and self.is_theirs(at) for at in tree)

    def is_beside_a_directory(self, path: bytes, there: Tree, now: Tree) -> bool:
        """Whether what was made in the place of a directory is a conflict beside it at the source,
        because the directory stays there for something of others in it."""
        if path not in there or path not in now:
            return False
        return (
            there[path].kind == "dir"
            and now[path].kind != "dir"
            and self.has_theirs(path, there)
            and any(at.startswith(path + _BESIDE) for at in there)
        )

    def is_kept_for_others(self, path: bytes, there: Tree) -> bool:
        """Whether it is a directory that was removed on the mount, and stays at the source for
        something of others in it. What was made in its place is a conflict beside it."""
        it, was = there.get(path), self.before.tree.get(path)
        if it is None or it.kind != "dir" or not self.has_theirs(path, there):
            return False
        return was is None or (
            was.kind != "dir" and any(at.startswith(path + _BESIDE) for at in there)
        )

    def is_of_others(self, it: Shown) -> bool:
        """Whether bytes are of others, or were replaced by theirs."""
        return it.content.startswith(b"others'") or it.content in self.gone

    def numbers_of_others(self, tree: Tree) -> set[int]:
        """The objects with a name that others have changed."""
        return {it.ino for path, it in tree.items() if self.is_theirs(path)}

    def linked_by_others(self) -> set[bytes]:
        """Paths of files with another name at the source that others have moved there. The file
        keeps that name, also if it has lost it on the mount: a snapshot shows one link more."""
        there = self.at_source()
        numbers = self.numbers_of_others(there)
        return {path for path, it in there.items() if it.ino in numbers}

    def moved(self, path: bytes, to: bytes) -> None:
        """What is another's goes with what is renamed."""
        if self.is_theirs(path):
            self.theirs.add(to)
        self.theirs |= {to + at[len(path) :] for at in self.theirs if at.startswith(path + b"/")}

    def others_act(self, act: Callable[[], None], kind: str) -> None:
        """Others do ``act`` at the source, before the next mount of this kind."""
        then, had = _marks(self.source), self.at_source()
        act()
        now, has = _marks(self.source), self.at_source()
        self.theirs |= {
            path for path in then.keys() | now.keys() if then.get(path) != now.get(path)
        }
        given = [now[path][1] for path in then.keys() & now.keys() if then[path][1] != now[path][1]]
        self.modes |= set(map(stat.S_IMODE, given))
        tree = self.before.tree
        owners = [path for path in then.keys() & now.keys() if then[path][3:] != now[path][3:]]
        numbers = {tree[path].ino for path in owners if path in tree}
        self.given_away |= {path for path, it in tree.items() if it.ino in numbers}
        self.taken |= {
            int(found[1]) for found in map(_WRITE_THROUGH.search, then.keys() - now.keys()) if found
        }
        away = {then[path][0] for path in then.keys() - now.keys()}
        stay = {now[path][0] for path in then.keys() & now.keys()}
        self.taken |= {
            number for number, ino in self.in_tier.through().items() if ino in away - stay
        }
        self.before.owed -= self.taken
        self.theirs |= {path for path, it in self.before.tree.items() if it.object in self.taken}
        # A directory that others have taken away may have another name on the mount by now.
        self.theirs |= {path for path, it in self.before.tree.items() if it.source_ino in away}
        # A file that others have touched under one name is theirs under its others.
        numbers = self.numbers_of_others(self.before.tree)
        self.theirs |= {path for path, it in self.before.tree.items() if it.ino in numbers}
        # Names, links and special files that meet a conflict on their way go no further, nor do
        # files of the source whose unsynced bytes go with the machine. A file of others keeps a
        # name that it has got on its way, and that the mount has removed since, or given to
        # another file.
        kept = {it.object for it in self.before.tree.values() if self.before.is_owed(it, kind)}
        for op in self.in_tier.waiting():
            is_named = op.kind == "rename" or (op.kind == "link" and op.object)
            shown = self.before.tree.get(op.to)
            goes_on = op.object in kept and shown is not None and shown.object == op.object
            if is_named and not goes_on and self.is_theirs(op.path):
                self.theirs.add(op.to)
        owed = {it.content for it in self.before.tree.values() if self.before.is_owed(it, kind)}
        self.gone |= _contents(had) - _contents(has) - owed
        # A conflict is kept beside the path at which the mount shows the bytes.
        self.left |= {
            (path.partition(_BESIDE)[0], it.content)
            for path, it in had.items()
            if it.kind == "file" and path not in has and it.content not in owed
        }
        # A write into a file changes it under all names that it has or is to have.
        self.gone |= {
            had[path].content
            for path in then.keys() & now.keys()
            if then[path][0] == now[path][0] and then[path] != now[path]
        }

    def check_shown(self, now: Tree, kind: str) -> None:
        """A mount of this kind shows what the one before did."""
        before = self.before
        theirs, linked = self.numbers_of_others(before.tree), self.linked_by_others()
        for path in sorted(now.keys() | before.tree.keys()):
            was, it = before.tree.get(path), now.get(path)
            is_owed = before.is_owed(was, kind)
            if kind == "boot" and before.way == "kill" and not is_owed:
                # A removal may be as new as that as well.
                continue
            if is_beside(path) or (self.is_theirs(path) and not is_owed):
                continue
            if it is not None and it.kind == "dir" and self.has_theirs(path, now):
                continue
            if was is not None and was.ino in theirs and not is_owed:
                continue
            if not is_owed and any(self.is_of_others(each) for each in (was, it) if each):
                continue
            if path in linked and was is not None and it is not None:
                was, it = was.without_links, it.without_links
            is_written = was is not None and was.ino in theirs
            was = self._with_mode_of_others(was, it, is_written=is_written)
            if was is not None and it is not None and path in self.given_away:
                # Until it is drained it has the owner of before, and no right of others that is not
                # there as well.
                was = replace(was, mode=was.mode & it.mode)
            message = f"{path!r} is {it} after {before.way} and {kind}, and was {was}"
            assert (it and it.bare) == (was and was.bare), message

    def check_drained(self, now: Tree, trouble: str | None, *, is_compared: bool = False) -> None:
        """A mount has drained all that the source accepts, and shows ``now``; ``trouble``: the
        reason that it reports for what is left. ``is_compared``: the mount has compared the names
        with the source since."""
        there = self.at_source()
        self._check_losses_reported(now, there, trouble)
        theirs = self.numbers_of_others(now)
        for path in sorted(now.keys() | there.keys() | self.before.tree.keys()):
            found = [tree[path] for tree in (now, there) if path in tree]
            if trouble or is_beside(path) or self.is_theirs(path):
                continue
            if path in now and now[path].ino in theirs:
                continue
            if any(self.is_of_others(it) for it in found):
                continue
            if self.is_beside_a_directory(path, there, now):
                continue
            if self.is_kept_for_others(path, there):
                # A mount shows it again when it compares the names.
                if is_compared or path in now:
                    _require_same(path, there, now, "at the source and here")
                continue
            # A mode that others have given a file shows at the next mount.
            here = self._with_mode_of_others(now.get(path), there.get(path))
            _require_same(path, there, {path: here} if here else {}, "at the source and here")
            # What a reader would wait for, a rename that is to come, is not read here.
            if (was := self.before.tree.get(path)) is None or was.content != b"ENOENT":
                was = self._with_mode_of_others(was, now.get(path))
                _require_same(path, now, {path: was} if was else {}, "behind the drain and before")

    def _with_mode_of_others(
        self, was: Shown | None, now: Shown | None, *, is_written: bool = False
    ) -> Shown | None:
        """``is_written``: others have written or touched the file at the source."""
        if was is None or now is None or now.kind != "file":
            return was
        own = self.shown.get(now.object, set()) if now.object and is_written else set()
        return replace(was, mode=now.mode) if now.mode in self.modes | own else was

    def check_nothing_left(self, trouble: str | None) -> None:
        """What the last mount left is reported, and nothing is lost."""
        report = self.in_tier.survey()
        assert report is not None and not report.lost, report
        if trouble is None:
            assert (report.operations, report.waiting) == (0, ()), report

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


def is_beside(path: bytes) -> bool:
    """Whether it is at the source what a conflict has left beside another's."""
    return _BESIDE in path


def _require_same(path: bytes, one: Tree, other: Tree, message: str) -> None:
    a, b = one.get(path), other.get(path)
    assert (a and a.bare) == (b and b.bare), f"{path!r}, {message}: {a} and {b}"


def _contents(tree: Tree) -> set[bytes]:
    return {it.content for it in tree.values() if it.kind == "file"}


def _marks(source: Path) -> dict[bytes, tuple[int, ...]]:
    """What of the source tells that others have been at it: of a directory not what is in it."""
    found: dict[bytes, tuple[int, ...]] = {}
    top = os.fsencode(source)
    for above, folders, files in os.walk(top):
        for name in [*folders, *files]:
            path = os.path.join(above, name)
            it = os.lstat(path)
            time_ns = 0 if stat.S_ISDIR(it.st_mode) else it.st_mtime_ns
            owner = (it.st_uid, it.st_gid)
            found[os.path.relpath(path, top)] = (it.st_ino, it.st_mode, time_ns, *owner)
    return found
