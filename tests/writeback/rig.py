"""A model of a mount that absorbs writes: names in memory, real objects and a real source.

``Model`` knows the bytes of each name and which contents of a file were whole, and compares the
source with both. ``shown`` builds the tree from the journal's changes alone.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import trio

from monarch.config.settings import WritebackSettings
from monarch.posix.credentials import Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity
from monarch.writeback.commits import Commits
from monarch.writeback.drain import Drain
from monarch.writeback.earlier import unfinished
from monarch.writeback.journal import Journal, Op, Replay
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.objects import Objects
from monarch.writeback.open_file import UNTOUCHED
from monarch.writeback.source_writer import SourceWriter
from monarch.writeback.store import WriteStore, directory_of


class Killed(BaseException):
    """The end of the daemon, at a point."""


_INOS = itertools.count(1 << 33)


@dataclass(eq=False)
class Node:
    """What a name leads to. ``content``: its bytes now, ``whole``: at the moments of a record.

    ``lowest``: the lowest offset that was changed since a record. ``is_kept``: their writer has
    synced them. ``was``: what the source had of it at the start.
    """

    kind: str
    mode: int
    object: int = 0
    content: bytes = b""
    target: bytes = b""
    mtime_ns: int | None = None
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    whole: set[bytes] = field(default_factory=set)
    writers: int = 0
    is_recorded: bool = True
    is_kept: bool = False
    lowest: int = UNTOUCHED
    was: Identity | None = None
    ino: int = field(default_factory=partial(next, _INOS))


Tree = dict[bytes, Node]


def read_tree(root: Path) -> Tree:
    """What is in a directory; hard links share a node. Staged files are not shown."""
    found: Tree = {}
    seen: dict[int, Node] = {}
    top = os.fsencode(root)
    for directory, folders, files in os.walk(top):
        for name in [*folders, *files]:
            path = os.path.join(directory, name)
            if name.startswith(b".monarch-"):
                continue
            try:
                found[os.path.relpath(path, top)] = _node(path, seen)
            except FileNotFoundError:
                continue
    return found


def _node(path: bytes, seen: dict[int, Node]) -> Node:
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return Node("dir", mode, was=identity_of(status))
    if stat.S_ISLNK(status.st_mode):
        return Node("symlink", 0, target=os.readlink(path), was=identity_of(status))
    if stat.S_ISFIFO(status.st_mode):
        return Node("fifo", mode, was=identity_of(status))
    with open(path, "rb") as file:
        # The drain may have put another file there since.
        status = os.fstat(file.fileno())
        if status.st_ino in seen:
            return seen[status.st_ino]
        mode, content = stat.S_IMODE(status.st_mode), file.read()
        xattrs = {
            os.fsencode(n): os.getxattr(file.fileno(), n) for n in os.listxattr(file.fileno())
        }
    node = Node("file", mode, content=content, mtime_ns=status.st_mtime_ns, whole={content})
    node.was, node.xattrs = identity_of(status), xattrs
    seen[status.st_ino] = node
    return node


def parts(root: Path) -> list[Path]:
    return list(root.rglob(".monarch-*"))


def described(tree: Tree) -> dict[bytes, object]:
    """A tree as values that can be compared: each file with all the names that it has."""
    names: dict[int, list[bytes]] = {}
    for path, node in tree.items():
        names.setdefault(id(node), []).append(path)
    return {
        path: (
            node.kind,
            node.mode,
            node.content,
            node.target,
            node.mtime_ns if node.kind == "file" else None,
            sorted(node.xattrs.items()),
            sorted(names[id(node)]) if node.kind == "file" else None,
        )
        for path, node in tree.items()
    }


def applied(tree: Tree, ops: Iterable[Op], objects: Objects) -> Tree:
    """The tree that the changes lead to from ``tree``, with the bytes that the objects hold now."""
    tree = copy.deepcopy(tree)
    for op in ops:
        _apply(tree, op)
    # Each once, however many names it has.
    for node in {id(node): node for node in tree.values()}.values():
        if node.object:
            fd = objects.open(node.object)
            try:
                status = os.fstat(fd)
                # Whether it is what was recorded last.
                now = (status.st_size, status.st_mtime_ns)
                node.is_recorded = now == (len(node.content), node.mtime_ns)
                node.content = os.pread(fd, status.st_size, 0)
                node.mtime_ns = status.st_mtime_ns
            finally:
                os.close(fd)
    return tree


def _apply(tree: Tree, op: Op) -> None:
    match op.kind:
        case "create":
            assert op.path not in tree
            tree[op.path] = Node("file", op.mode or 0, object=op.object)
        case "take":
            tree[op.path].object = op.object
        case "mkdir":
            assert op.path not in tree
            tree[op.path] = Node("dir", op.mode or 0, ino=op.ino)
        case "symlink":
            assert op.path not in tree
            tree[op.path] = Node("symlink", 0, target=op.to, ino=op.ino)
        case "mknod":
            tree[op.path] = Node("fifo", stat.S_IMODE(op.mode or 0), ino=op.ino)
        case "link":
            assert op.to not in tree
            tree[op.to] = tree[op.path]
        case "unlink":
            # What a power cut took may have had that name.
            tree.pop(op.path, None)
        case "rmdir":
            del tree[op.path]
        case "rename":
            move(tree, op.path, op.to)
        case "attr" | "xattr" | "content":
            node = tree[op.path] if op.kind != "content" or op.path in tree else None
            if node is None:
                return
            node.mode = node.mode if op.mode is None else op.mode
            if op.kind == "content":
                node.content = bytes(op.size)
            for name, value in op.xattrs.items():
                if value is None:
                    node.xattrs.pop(name, None)
                else:
                    node.xattrs[name] = value
            if op.mtime_ns is not None:
                node.mtime_ns = op.mtime_ns


def move(tree: Tree, path: bytes, to: bytes) -> list[bytes]:
    """Rename in a tree; the names that are new."""
    tree.pop(to, None)
    moved = [name for name in tree if name == path or name.startswith(path + b"/")]
    for name in moved:
        tree[to + name[len(path) :]] = tree.pop(name)
    return [to + name[len(path) :] for name in moved]


class Disk(Objects):
    """Objects that know what a power cut leaves of them: ``on_disk``, by number."""

    def __init__(self, directory: Path, on_disk: dict[int, bytes]) -> None:
        super().__init__(directory)
        self.on_disk = on_disk

    def sync(self, number: int, fd: int) -> None:
        super().sync(number, fd)
        self.on_disk[number] = self.content(number)

    def sync_all(self, fd: int) -> None:
        super().sync_all(fd)
        self.on_disk.update({number: self.content(number) for number in self.numbers()})

    def content(self, number: int) -> bytes:
        fd = self.open(number)
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)


class States:
    """What the drain and the commits say about the objects of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.published_: list[tuple[int, Identity]] = []

    def published(self, object: int, identity: Identity) -> None:
        self.published_.append((object, identity))

    def record(self, object: int, seq: int, *, synced: bool) -> None:
        self._model.last_seq = seq

    def changed(self, object: int, identity: Identity) -> None: ...

    def unsynced(self) -> dict[int, int]:
        return {}

    def synced(self, contents: Mapping[int, int]) -> None: ...


class Model:
    """The names of a mount over ``source``. It answers the drain's questions (``ObjectTable``)."""

    def __init__(self, source: Path, tier: Path, *, boot: str = "boot-1") -> None:
        self.source = source
        # Where a mount looks for it.
        self.directory = directory_of(tier, source)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.boot = boot
        self.on_disk: dict[int, bytes] = {}
        self.tree = read_tree(source)
        # With the same inode numbers, as a mount has them of its snapshot.
        self.first = copy.deepcopy(self.tree)
        # Which files each name has ever led to; those that were never without one.
        self.led_to: dict[bytes, set[Node]] = {}
        self.always = {path for path, node in self.tree.items() if node.kind == "file"}
        self._note(self.tree)
        self.states = States(self)
        self.drain: Drain | None = None
        self.recorded: list[tuple[int, Op]] = []
        self.wrong: list[str] = []
        # The user who does what follows.
        self.by: Credentials | None = None
        # Whose the files are that are written, if not that user's.
        self.owner: int | None = None
        self.open()

    def open(self) -> Replay:
        """A new session: what the journal holds, for a drain that does not run yet."""
        self.journal = Journal.open(self.directory, source=os.fsencode(self.source), boot=self.boot)
        self.objects = Disk(self.directory, self.on_disk)
        replay = self.journal.replay()
        self.next_object = replay.next_object
        self.last_seq = replay.ops[-1][0] if replay.ops else 0
        self.drain = None
        return replay

    # -- what the drain asks -----------------------------------------------------------------

    def is_dead(self, object: int) -> bool:
        return all(node.object != object for node in self.tree.values())

    def is_removed(self, ino: int) -> bool:
        return False

    def is_written(self, object: int) -> bool:
        return any(node.writers for node in self.tree.values() if node.object == object)

    def lowest(self, object: int) -> int:
        nodes = (node for node in self.tree.values() if node.object == object)
        return min((node.lowest for node in nodes), default=UNTOUCHED)

    def left_out(self, object: int) -> None:
        for node in self.tree.values():
            if node.object == object:
                node.is_recorded = False

    def whole(self, object: int) -> Op | None:
        found = (node for node in self.tree.values() if node.object == object and object)
        if (node := next(found, None)) is None:
            return None
        names = self.names(node)
        mtime_ns = self.objects.status(object).st_mtime_ns
        return Op(
            kind="content",
            path=names[0],
            paths=names,
            object=object,
            size=len(node.content),
            mode=node.mode,
            uid=self.owner if self.owner is not None else os.geteuid(),
            gid=self.owner if self.owner is not None else os.getegid(),
            mtime_ns=mtime_ns,
            xattrs=dict(node.xattrs),
            strict=True,
        )

    def drop_bits(self, object: int, bits: int) -> None:
        for node in self.tree.values():
            if node.object == object:
                node.mode &= ~bits

    # -- what commits ask --------------------------------------------------------------------

    def is_being_written(self) -> bool:
        return any(not node.is_recorded for node in self.tree.values() if node.object)

    def commits(self, interval_s: float = 0.0) -> Commits:
        return Commits(cast(WriteStore, self), cast(ObjectTable, self), interval_s)

    async def commit(self) -> None:
        """All that was written by now survives the machine."""
        with closing(self.commits()) as commits:
            assert await commits.commit()
        for node in self.tree.values():
            node.is_kept = node.is_kept or node.object != 0

    # -- what is done to the mount -----------------------------------------------------------

    def record(self, op: Op) -> int:
        op = replace(op, strict=True, by=op.by or self.by)
        self.last_seq = self.journal.append(op)
        self.recorded.append((self.last_seq, op))
        if self.drain is not None:
            self.drain.put(self.last_seq, op)
        return self.last_seq

    def names(self, node: Node) -> tuple[bytes, ...]:
        return tuple(path for path, other in self.tree.items() if other is node)

    def create(self, path: bytes, *, mode: int = 0o644) -> Node:
        node = Node("file", mode, object=self._new_object(), is_recorded=False)
        self.tree[path] = node
        self._note([path])
        self.record(Op(kind="create", path=path, object=node.object, mode=mode))
        return node

    def take(self, path: bytes) -> None:
        """The file gets an object, before its first write."""
        node = self.tree[path]
        if not node.object:
            node.object = self._new_object(node.content)
            if node.mtime_ns is not None:
                self._set_times(node.object, node.mtime_ns)
            was = node.was
            with suppress(FileNotFoundError, NotADirectoryError):
                now = identity_of(os.lstat(os.path.join(os.fsencode(self.source), path)))
                if was is not None and replace(was, ctime_ns=now.ctime_ns) == now:
                    # Its attributes were changed here. The number alone is given to others again.
                    was = now
            names = self.names(node)
            paths = names if len(names) > 1 else ()
            self.record(
                Op(
                    kind="take",
                    path=path,
                    paths=paths,
                    ino=node.ino,
                    object=node.object,
                    was=was,
                )
            )

    def _new_object(self, content: bytes = b"") -> int:
        number, self.next_object = self.next_object, self.next_object + 1
        fd = self.objects.create(number)
        os.pwrite(fd, content, 0)
        os.close(fd)
        return number

    def _set_times(self, number: int, mtime_ns: int) -> None:
        fd = self.objects.open(number)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        os.close(fd)

    def begin(self, path: bytes) -> Node:
        """A process opens a file for writing."""
        self.take(path)
        node = self.tree[path]
        node.writers += 1
        return node

    def store(self, node: Node, content: bytes) -> None:
        """One write by a process that has it open: its first half, which no reader may see
        alone."""
        fd = self.objects.open(node.object)
        try:
            os.ftruncate(fd, len(content))
            os.pwrite(fd, content, 0)
        finally:
            os.close(fd)
        node.content, node.is_recorded, node.is_kept = content, False, False
        node.lowest = 0
        node.mtime_ns = self.objects.status(node.object).st_mtime_ns

    def append(self, node: Node, content: bytes) -> None:
        """One write at the end by a process that has it open."""
        offset = len(node.content)
        fd = self.objects.open(node.object)
        os.pwrite(fd, content, offset)
        os.close(fd)
        node.content, node.is_recorded, node.is_kept = node.content + content, False, False
        node.lowest = min(node.lowest, offset)
        node.mtime_ns = self.objects.status(node.object).st_mtime_ns

    def content(self, node: Node, *, synced: bool = False) -> int:
        """What is recorded when a file is closed, synced, or gets another name."""
        names = self.names(node)
        if not names:
            return self.last_seq
        if synced:
            fd = self.objects.open(node.object)
            self.objects.sync(node.object, fd)
            os.close(fd)
        node.is_recorded = True
        intact, node.lowest = min(node.lowest, len(node.content)), UNTOUCHED
        node.whole.add(node.content)
        node.mtime_ns = self.objects.status(node.object).st_mtime_ns
        seq = self.record(
            Op(
                kind="content",
                path=names[0],
                paths=names,
                object=node.object,
                size=len(node.content),
                intact=intact,
                mode=node.mode,
                uid=self.owner,
                gid=self.owner,
                mtime_ns=node.mtime_ns,
                xattrs=dict(node.xattrs),
                synced=synced,
            )
        )
        if synced:
            self.journal.sync()
            node.is_kept = True
        return seq

    def end(self, node: Node) -> None:
        """The last close."""
        node.writers = 0
        if not node.is_recorded:
            self.content(node)
        self._bury(node)

    def write(self, path: bytes, content: bytes, *, synced: bool = False) -> int:
        """A whole file, as ``cp`` writes it."""
        if path not in self.tree:
            self.create(path)
        node = self.begin(path)
        self.store(node, content)
        node.writers = 0
        return self.content(node, synced=synced)

    def rename(self, path: bytes, to: bytes) -> int:
        node = self.tree[path]
        if node.kind == "file":
            self.take(path)
        replaced = self.tree.get(to)
        if node.object and replaced is not None and not node.is_kept:
            # Only what is kept may be all that there is.
            self.content(node, synced=True)
        if not node.is_recorded and node.object:
            self.content(node)
        self.always -= {name for name in self.always if name == path}
        self.always = {name for name in self.always if not name.startswith(path + b"/")}
        moved = move(self.tree, path, to)
        self._note(moved)
        if node.kind == "dir":
            # What the source still has of a name until its new content comes goes along.
            for name in moved:
                before = path + name[len(to) :]
                self.led_to.setdefault(name, set()).update(self.led_to.get(before, ()))
        over = replaced or Node("none", 0)
        seq = self.record(
            Op(
                kind="rename",
                path=path,
                to=to,
                object=node.object,
                ino=node.ino,
                was=None if node.object else node.was,
                over=None if over.object else over.was,
                over_ino=over.ino,
                over_object=over.object,
            )
        )
        if replaced is not None:
            self._bury(replaced)
        return seq

    def link(self, path: bytes, to: bytes) -> int:
        self.take(path)
        node = self.tree[path]
        if not node.is_recorded and node.object:
            self.content(node)
        self.tree[to] = node
        self._note([to])
        return self.record(Op(kind="link", path=path, to=to, ino=node.ino, object=node.object))

    def unlink(self, path: bytes) -> int:
        node = self.tree.pop(path)
        self.always.discard(path)
        was = None if node.object else node.was
        seq = self.record(Op(kind="unlink", path=path, ino=node.ino, object=node.object, was=was))
        self._bury(node)
        return seq

    def _bury(self, node: Node) -> None:
        if node.object and not node.writers and not self.names(node):
            by, self.by = self.by, None
            self.record(Op(kind="gone", object=node.object))
            self.by = by
            self.journal.sync()
            self.objects.remove(node.object)
            node.object = 0

    def mkdir(self, path: bytes, mode: int = 0o755) -> int:
        node = self.tree[path] = Node("dir", mode)
        return self.record(Op(kind="mkdir", path=path, ino=node.ino, mode=mode))

    def rmdir(self, path: bytes) -> int:
        node = self.tree.pop(path)
        return self.record(Op(kind="rmdir", path=path, ino=node.ino))

    def symlink(self, path: bytes, target: bytes) -> int:
        node = self.tree[path] = Node("symlink", 0, target=target)
        return self.record(Op(kind="symlink", path=path, ino=node.ino, to=target))

    def mknod(self, path: bytes) -> int:
        node = self.tree[path] = Node("fifo", 0o600)
        return self.record(Op(kind="mknod", path=path, ino=node.ino, mode=stat.S_IFIFO | 0o600))

    def _paths(self, node: Node) -> tuple[bytes, ...]:
        """What a change of attributes records of the names of a file that has several."""
        names = self.names(node)
        return names if node.kind == "file" and len(names) > 1 else ()

    def chmod(self, path: bytes, mode: int) -> int:
        node = self.tree[path]
        node.mode = mode
        return self.record(
            Op(
                kind="attr",
                path=path,
                paths=self._paths(node),
                ino=node.ino,
                object=node.object,
                mode=mode,
            )
        )

    def utime(self, path: bytes, mtime_ns: int) -> int:
        node = self.tree[path]
        if node.kind == "file":
            self.take(path)
        node.mtime_ns = mtime_ns
        if node.object:
            self._set_times(node.object, mtime_ns)
        return self.record(
            Op(
                kind="attr",
                path=path,
                paths=self._paths(node),
                ino=node.ino,
                object=node.object,
                mtime_ns=mtime_ns,
                same=node.is_recorded,
            )
        )

    def setxattr(self, path: bytes, name: bytes, value: bytes | None) -> int:
        node = self.tree[path]
        if value is None:
            node.xattrs.pop(name, None)
        else:
            node.xattrs[name] = value
        return self.record(
            Op(
                kind="xattr",
                path=path,
                paths=self._paths(node),
                object=node.object,
                xattrs={name: value},
            )
        )

    # -- ends --------------------------------------------------------------------------------

    def kill(self) -> Replay:
        """The daemon is gone, and with it those who wrote; the next session begins."""
        self.journal.close()
        for node in self.tree.values():
            node.writers = 0
        replay = self.open()
        known = [node.object for node in self.tree.values() if node.object]
        self.objects.sweep(set(known))
        return replay

    def look_anew(self) -> Replay:
        """As ``kill``; the next mount makes a snapshot, and is killed as well."""
        replay = self.kill()
        with closing(Source(os.fsencode(self.source))) as source:
            drain = drain_of(self, source, ThreadPool(1, "drain", abandon=False))
            drain.load(replay)
        ops = [*unfinished(replay, self.objects)]
        if any(op.kind == "rename" and not op.object for _, op in ops):
            # The content of a directory would be searched at its new path.
            return replay
        known = drain.known_of(ops)
        self.journal.compact(ops, position=self.journal.file.position, known=known)
        self.first = read_tree(self.source)
        kept = {op.object for _, op in ops} - {0}
        made = {op.ino for _, op in ops if op.kind in ("mkdir", "symlink", "mknod")}
        for path, node in self.tree.items():
            if node.object not in kept:
                # It is the source's from now on, with another number.
                node.ino = node.ino if node.ino in made else next(_INOS)
                node.object, node.was = 0, self.first[path].was if path in self.first else None
            if path in self.first:
                self.first[path].ino = node.ino
        return self.kill()

    def cut_power(self, chance: random.Random) -> Replay:
        """The machine stops: unsynced bytes are partly on the disk, or not at all, or random.

        The tree is then what the journal says, and it must have all that was kept.
        """
        kept = {node.object: node.content for node in self.tree.values() if node.is_kept}
        path = self.directory / "journal"
        content = path.read_bytes()
        ends = [end + 1 for end, byte in enumerate(content) if byte == 10]
        end = chance.choice([end for end in ends if end >= self.journal.file.synced_bytes])
        path.write_bytes(content[: min(len(content), end + chance.randrange(30))])
        for number in self.objects.numbers():
            on_disk = self.objects.on_disk.get(number)
            if on_disk != self.objects.content(number):
                self._spoil(number, chance, is_new=on_disk is None)
        self.journal.close()
        self.boot += "'"
        replay = self.open()
        self.tree = applied(self.first, [op for _, op in replay.ops], self.objects)
        self._look_again()
        here = {node.object: node.content for node in self.tree.values() if node.object}
        assert kept.items() <= here.items()
        self.objects.sweep(here.keys())
        return replay

    def _look_again(self) -> None:
        """A mount asks the source anew for files that are not as its snapshot tells."""
        there = read_tree(self.source)
        for path, node in self.tree.items():
            found = there.get(path)
            if found is not None and found.kind == node.kind == "file" and not node.object:
                node.was = found.was

    def _spoil(self, number: int, chance: random.Random, *, is_new: bool) -> None:
        fd = self.objects.open(number)
        try:
            size = os.fstat(fd).st_size
            match chance.randrange(4):
                case 0:
                    os.pwrite(fd, bytes(size // 2), size // 4)
                case 1:
                    os.ftruncate(fd, size // 2)
                case 2 if is_new:
                    self.objects.remove(number)
        finally:
            os.close(fd)

    def catch_up(self, replay: Replay) -> None:
        """Record the contents of files that the daemon's end has left unrecorded."""
        live = {node.object: node for node in self.tree.values() if node.object}
        unpublished = replay.unpublished(live)
        for number, node in live.items():
            if number in unpublished or not node.is_recorded:
                node.lowest = 0
                self.content(node)

    # -- what must hold ----------------------------------------------------------------------

    def _note(self, paths: Iterable[bytes]) -> None:
        for path in paths:
            self.led_to.setdefault(path, set()).add(self.tree[path])

    def look(self) -> None:
        """Note what the source shows now that was never whole here under that name, and what it
        does not show though it was always here."""
        there = read_tree(self.source)
        for path, node in there.items():
            files = self.led_to.get(path, set())
            if node.kind == "file" and not any(node.content in file.whole for file in files):
                self.wrong.append(f"{path!r} has shown {node.content[:50]!r}")
        self.wrong += [f"{path!r} was not there" for path in self.always - there.keys()]

    def check_all_is_there(self) -> None:
        there, here = described(read_tree(self.source)), described(self.tree)
        for path in there.keys() | here.keys():
            message = f"{path!r}: {there.get(path)} at the source, {here.get(path)} here"
            assert there.get(path) == here.get(path), message
        assert parts(self.source) == []
        assert self.wrong == [], self.wrong


def drain_of(
    model: Model,
    source: Source,
    threads: ThreadPool,
    *,
    workers: int = 2,
    verify: bool = True,
    bandwidth: int = 0,
    busy: Callable[[float], bool] = lambda now: False,
    is_urgent: Callable[[int], bool] = lambda waiting: False,
    hold_s: float = 0.0,
) -> Drain:
    """A drain that does nothing yet."""
    return Drain(
        journal=model.journal,
        objects=model.objects,
        writer=SourceWriter(source, model.journal.token),
        contents=cast(ObjectTable, model),
        threads=threads,
        settings=WritebackSettings(bandwidth=bandwidth, verify=verify, workers=workers),
        busy=busy,
        is_urgent=is_urgent,
        hold_s=hold_s,
    )


@asynccontextmanager
async def draining(
    model: Model,
    replay: Replay | None = None,
    *,
    root: Path | None = None,
    workers: int = 2,
    verify: bool = True,
    bandwidth: int = 0,
    busy: Callable[[float], bool] = lambda now: False,
    is_urgent: Callable[[int], bool] = lambda waiting: False,
    hold_s: float = 0.0,
    catch_up: bool = True,
    abandon: bool = True,
) -> AsyncIterator[Drain]:
    """A drain at work to ``root``, by default the model's own source.

    Without ``abandon`` its threads are at rest when it is over, as those of a killed daemon are.
    """
    source = Source(os.fsencode(root or model.source))
    threads = ThreadPool(workers + 2, "drain", abandon=abandon)
    drain = drain_of(
        model,
        source,
        threads,
        workers=workers,
        verify=verify,
        bandwidth=bandwidth,
        busy=busy,
        is_urgent=is_urgent,
        hold_s=hold_s,
    )
    if replay is not None:
        drain.load(replay)
    model.drain = drain
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain.run)
            if replay is not None and catch_up:
                model.catch_up(replay)
            yield drain
            nursery.cancel_scope.cancel()
    finally:
        model.drain = None
        source.close()


def is_killed(error: BaseException) -> bool:
    """Whether all that ended a drain was the kill."""
    # A group of a nursery's, which Python 3.10 has no name for.
    group: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    if group:
        return all(map(is_killed, group))
    return isinstance(error, (Killed, trio.Cancelled))
