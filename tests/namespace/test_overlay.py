"""The overlay and the snapshot form one tree, which behaves like a local file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from monarch.errors import Refused, SourceError
from monarch.namespace import overlay
from monarch.namespace.listing import (
    ADDED_INDEX,
    LINK_MAX,
    RENAME_NOREPLACE,
    TARGET_MAX,
    XATTRS_MAX,
)
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES, Node
from monarch.namespace.snapshot import Snapshot
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino
from tests.conftest import Tree
from tests.namespace.conftest import Taken

NOW = 2_000_000_000_000_000_000
LATER = NOW + 1_000_000_007
LONG = b"n" * 255
TOO_LONG = b"n" * 256
FILE = stat.S_IFREG | 0o644
DIR = stat.S_IFDIR | 0o755
LINK = stat.S_IFLNK | 0o777


class Reported(set[Ino]):
    """The inodes that differ from the snapshot, as reported by a namespace."""


class Given(set[tuple[Ino, bytes]]):
    """The names beside those of the snapshot, as reported by a namespace."""

    def __init__(self, names: Namespace) -> None:
        self._names = names
        # Of directories, as they were when they were asked for.
        self._attributes: dict[Ino, Attributes] = {}
        names.report_names(self.give, self.take, lambda ino: self._attributes.pop(ino, None))

    def compare_attributes(self) -> None:
        """An inode that was not reported as changed has not changed."""
        for ino, before in self._attributes.items():
            assert self._names.attributes(ino) == before
        for node in self._names.nodes():
            if node.is_dir:
                self._attributes[node.ino] = node.attributes

    def give(self, parent: Ino, name: bytes) -> None:
        assert (parent, name) not in self
        self.add((parent, name))

    def take(self, parent: Ino, name: bytes) -> None:
        self.remove((parent, name))

    def shown(self) -> set[tuple[Ino, bytes]]:
        """Those that are listed."""
        names, snapshot = self._names, self._names.snapshot
        made = {node.ino for node in names.nodes() if node.is_dir and node.names}
        return {
            (directory, name)
            for directory in {ROOT_INO, *made}
            for _, name, _ in names.list_from(directory, 0)
            if directory >= WRITTEN_INO or snapshot.slot(directory, name) is None
        }


@dataclass(frozen=True, slots=True)
class Shown:
    names: Namespace
    reported: Reported

    def ino(self, path: bytes) -> Ino:
        ino = self.names.resolve(path)
        assert ino is not None, path
        return ino

    def make(self, path: bytes, mode: int = FILE, **more: Any) -> Node:
        parent, _, name = path.rpartition(b"/")
        given = {"uid": 0, "gid": 0, "now_ns": NOW} | more
        return self.names.make(self.ino(parent), name, mode=mode, **given)

    def link(self, path: bytes, to: bytes) -> Node:
        parent, _, name = to.rpartition(b"/")
        return self.names.link(self.ino(path), self.ino(parent), name, now_ns=NOW)

    def unlink(self, path: bytes) -> Node:
        parent, _, name = path.rpartition(b"/")
        return self.names.unlink(self.ino(parent), name, now_ns=NOW)

    def rmdir(self, path: bytes) -> Node:
        parent, _, name = path.rpartition(b"/")
        return self.names.rmdir(self.ino(parent), name, now_ns=NOW)

    def rename(self, path: bytes, to: bytes, flags: int = 0) -> Any:
        parent, _, name = path.rpartition(b"/")
        to_parent, _, to_name = to.rpartition(b"/")
        return self.names.rename(
            self.ino(parent), name, self.ino(to_parent), to_name, flags=flags, now_ns=NOW
        )

    def listed(self, path: bytes = b"") -> list[bytes]:
        return [name for _, name, _ in self.names.list_from(self.ino(path), 0)]


def xattrs_of(names: Namespace, ino: Ino) -> dict[bytes, bytes]:
    node = names.node(ino)
    return {} if node is None else node.xattrs


class PutAway(Namespace):
    """Moves all unreferenced nodes out of memory before each call of any kind."""

    CALLS = frozenset(
        (
            *("attributes", "at_source", "change", "forget", "forget_node", "hide", "is_forgotten"),
            *("is_gone", "is_written", "link", "list_from", "lookup", "make", "move", "node"),
            *("path", "readlink", "refresh", "rename", "rmdir", "set_xattr", "unlink"),
            *("visible_path", "visible_paths", "walk"),
        )
    )

    def __getattribute__(self, name: str) -> Any:
        if name in PutAway.CALLS:
            while self.put_away():
                pass
        return super().__getattribute__(name)


@pytest.fixture(params=["in memory", "put away"])
def over(
    taken: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[Path], Shown]:
    def over(source: Path) -> Shown:
        reported = Reported()
        if request.param == "in memory":
            return Shown(Namespace(taken(source), reported.add), reported)
        monkeypatch.setattr(overlay, "_KEPT", 0)
        return Shown(PutAway(taken(source), reported.add, spill=tmp_path / "names"), reported)

    return over


# Where it is asked what is in memory.
in_memory = pytest.mark.parametrize("over", ["in memory"], indirect=True)


@pytest.fixture
def shown(tree: Tree, over: Callable[[Path], Shown]) -> Shown:
    source = tree(
        {
            "file": b"bytes",
            "other": b"",
            "dir/file": 100,
            "dir/sub/deep": 1,
            "empty": None,
            "full/a": 1,
            "hard": b"linked",
        }
    )
    (source / "link").symlink_to("file")
    os.link(source / "hard", source / "dir" / "hard")
    return over(source)


def number(call: Callable[[], object]) -> int:
    """The errno with which a call is refused, 0 if it is not."""
    try:
        call()
    except Refused as error:
        return error.errno
    return 0


# -- how much memory it takes ------------------------------------------------------------------


@in_memory
def test_removed_names_release_their_memory(shown: Shown) -> None:
    names = shown.names
    shown.names.copy_up(ROOT_INO)
    before = names.held_bytes

    def removed(path: bytes) -> None:
        parent, _, name = path.rpartition(b"/")
        node = names.node(shown.ino(path))
        assert node is not None
        is_dir = node.is_dir
        (names.rmdir if is_dir else names.unlink)(shown.ino(parent), name, now_ns=NOW)
        if not node.names:
            names.forget_node(node.ino)

    steps = []
    for path, mode, target in (
        (b"made", FILE, b""),
        (b"made-dir", DIR, b""),
        (b"made-dir/inner", DIR, b""),
        (b"made-link", LINK, b"t" * 3000),
    ):
        steps.append(names.held_bytes)
        shown.make(path, mode, target=target)
        assert names.held_bytes >= steps[-1] + NAME_BYTES + len(target)
    shown.link(b"made", b"made-too")
    shown.rename(b"made-too", b"made-three")
    held = names.held_bytes
    for value in (b"short", b"v" * 60000, b"v" * 100):
        reported = names.more_for_xattr(shown.ino(b"made"), b"user.a", value)
        names.set_xattr(shown.ino(b"made"), b"user.a", value, now_ns=NOW)
        assert names.held_bytes == held + reported and reported != 0
        held = names.held_bytes
    names.have_xattrs(names.copy_up(shown.ino(b"made-dir")), {b"user.b": b"w" * 500})
    names.set_xattr(shown.ino(b"made-dir"), b"user.b", None, now_ns=NOW)
    assert names.held_bytes == held
    for path in (b"made", b"made-three", b"made-link", b"made-dir/inner", b"made-dir"):
        removed(path)
    assert names.held_bytes == before
    # One of the snapshot leaves a mark, however often its name is given and removed again.
    for _ in range(3):
        names.copy_up(shown.ino(b"other"))
        removed(b"other")
        marked = names.held_bytes
        assert before < marked < before + NAME_BYTES / 4
        shown.make(b"other")
        removed(b"other")
        assert names.held_bytes == marked
        shown.make(b"other")
    removed(b"other")
    # What is in a directory that goes needs no marks any more.
    removed_dir = names.held_bytes
    for path in (b"full/a", b"full"):
        names.copy_up(shown.ino(path))
        removed(path)
    assert names.held_bytes < removed_dir + NAME_BYTES / 4


# -- what is made ------------------------------------------------------------------------------


def test_new_names_are_found_and_listed_behind_the_snapshot(shown: Shown) -> None:
    names = shown.names
    before = shown.listed(b"dir")
    node = shown.make(b"dir/new", uid=7, gid=8, object=3)
    assert node.ino == WRITTEN_INO and names.is_written(node.ino)
    assert shown.ino(b"dir/new") == node.ino
    assert shown.listed(b"dir") == [*before, b"new"]
    attributes = names.attributes(node.ino)
    assert (attributes.mode, attributes.uid, attributes.gid) == (FILE, 7, 8)
    assert (attributes.nlink, attributes.size) == (1, 0)
    assert attributes.parent == shown.ino(b"dir")
    assert attributes.atime_ns == attributes.mtime_ns == attributes.ctime_ns == NOW
    assert names.node(node.ino) is node and node.object == 3
    assert names.visible_path(node.ino) == names.path(node.ino) == b"dir/new"
    assert (node.ino, attributes) in list(names.walk())


def test_every_kind_but_an_unknown_one_is_made(shown: Shown) -> None:
    shown.make(b"made", DIR)
    shown.make(b"made/link", LINK, target=b"../nowhere")
    shown.make(b"made/fifo", stat.S_IFIFO | 0o600)
    shown.make(b"made/socket", stat.S_IFSOCK | 0o600)
    shown.make(b"made/device", stat.S_IFCHR | 0o600, rdev=0x103)
    names = shown.names
    assert names.readlink(shown.ino(b"made/link")) == b"../nowhere"
    assert names.attributes(shown.ino(b"made/link")).size == 10
    assert names.attributes(shown.ino(b"made/device")).rdev == 0x103
    assert number(lambda: shown.make(b"made/none", 0o644)) == errno.EINVAL
    with pytest.raises(ValueError, match="symbolic"):
        names.readlink(shown.ino(b"made/fifo"))


def test_numbers_are_drawn_from_where_the_counter_is_set_and_never_come_again(
    tree: Tree, taken: Taken
) -> None:
    start = Ino(WRITTEN_INO + 100)
    names = Namespace(taken(tree({})), lambda _: None, first_ino=start)
    shown = Shown(names, Reported())
    assert shown.make(b"a").ino == start
    # One that is made again, from before.
    assert shown.make(b"old", ino=Ino(WRITTEN_INO + 5)).ino == WRITTEN_INO + 5
    assert shown.make(b"next").ino == start + 1
    assert shown.make(b"ahead", ino=Ino(start + 50)).ino == start + 50
    names.forget_node(shown.unlink(b"ahead").ino)
    assert shown.make(b"b").ino == names._overlay._next_ino - 1 == start + 51
    for taken_ino in (start, Ino(1)):
        with pytest.raises(ValueError, match="another's"):
            shown.make(b"c", ino=taken_ino)
    assert names.resolve(b"c") is None


def test_a_directory_with_the_group_bit_hands_its_group_down(shown: Shown) -> None:
    shown.make(b"team", DIR | stat.S_ISGID, gid=50)
    assert shown.make(b"team/file", gid=9).gid == 50
    below = shown.make(b"team/below", DIR, gid=9)
    assert (below.gid, below.mode) == (50, DIR | stat.S_ISGID)
    assert shown.make(b"team/below/deeper", gid=9).gid == 50


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"", errno.ENOENT),
        (b".", errno.EEXIST),
        (b"..", errno.EEXIST),
        (b"a/b", errno.EINVAL),
        (b"a\0b", errno.EINVAL),
        (TOO_LONG, errno.ENAMETOOLONG),
        (b"file", errno.EEXIST),
        (b"dir", errno.EEXIST),
        (LONG, 0),
        (b"\xff\n", 0),
    ],
)
def test_a_name_that_cannot_be_is_refused(shown: Shown, name: bytes, expected: int) -> None:
    names = shown.names
    made = number(lambda: names.make(ROOT_INO, name, mode=FILE, uid=0, gid=0, now_ns=NOW))
    assert made == expected
    assert names.is_written(ROOT_INO) == (not expected)
    if expected:
        linked = number(lambda: names.link(shown.ino(b"other"), ROOT_INO, name, now_ns=NOW))
        assert linked == expected
        assert not names.is_written(shown.ino(b"other"))


def test_a_target_that_cannot_be_is_refused(shown: Shown) -> None:
    for target, expected in (
        (b"", errno.ENOENT),
        (b"a\0", errno.EINVAL),
        (b"t" * (TARGET_MAX + 1), errno.ENAMETOOLONG),
        (b"t" * TARGET_MAX, 0),
    ):
        assert number(lambda target=target: shown.make(b"l", LINK, target=target)) == expected


def test_only_directories_have_names_in_them(shown: Shown) -> None:
    names, file = shown.names, shown.ino(b"file")
    assert names.lookup(file, b"x") is None
    made = shown.make(b"made").ino
    assert names.lookup(made, b"x") is None and list(names.list_from(made, 0)) == []
    for parent in (file, made):
        assert number(lambda p=parent: names.unlink(p, b"x", now_ns=NOW)) == errno.ENOTDIR
        assert (
            number(lambda p=parent: names.make(p, b"x", mode=FILE, uid=0, gid=0, now_ns=NOW))
            == errno.ENOTDIR
        )
        assert (
            number(lambda p=parent: names.rename(ROOT_INO, b"dir", p, b"x", now_ns=NOW))
            == errno.ENOTDIR
        )


def test_a_directory_that_could_not_be_listed_takes_nothing_and_is_not_empty(
    tree: Tree, over: Callable[[Path], Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = over(tree({"closed": None, "open": None}))
    closed = shown.ino(b"closed")
    # Root can list everything.
    monkeypatch.setattr(Snapshot, "unreadable", lambda self, slot: slot == closed)
    monkeypatch.setattr(shown.names._known, "_has_unreadable", True)
    with pytest.raises(SourceError, match="listed") as caught:
        shown.make(b"closed/file")
    assert caught.value.errno == errno.EACCES
    assert number(lambda: shown.rmdir(b"closed")) == errno.ENOTEMPTY
    assert number(lambda: shown.rmdir(b"open")) == 0


# -- what is removed -----------------------------------------------------------------------------


def test_removed_names_are_neither_found_nor_listed(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"dir/file")
    node = shown.unlink(b"dir/file")
    assert (node.ino, node.nlink, list(node.names)) == (ino, 0, [])
    assert names.resolve(b"dir/file") is None
    assert shown.listed(b"dir") == [b"hard", b"sub"]
    assert ino not in dict(names.walk())
    assert names.is_gone(ino)
    # A process that has it open continues.
    assert names.attributes(ino).nlink == 0 and names.attributes(ino).size == 100
    assert number(lambda: names.visible_path(ino)) == errno.ENOENT
    assert names.path(ino) == b"dir/file"
    names.forget_node(ino)
    assert names.is_gone(ino) and names.resolve(b"dir/file") is None
    assert number(lambda: names.copy_up(ino)) == errno.ESTALE


def test_names_that_were_made_and_removed_are_forgotten(shown: Shown) -> None:
    names, node = shown.names, shown.make(b"new", object=1)
    with pytest.raises(ValueError, match="has a name"):
        names.forget_node(node.ino)
    assert shown.unlink(b"new") is node
    assert names.attributes(node.ino).nlink == 0 and names.node(node.ino) is node
    names.forget_node(node.ino)
    names.forget_node(node.ino)
    assert names.is_gone(node.ino) and not names.is_written(node.ino)
    for ask in (names.attributes, names.readlink, names.copy_up):
        assert number(lambda ask=ask: ask(node.ino)) == errno.ESTALE


def test_a_removed_directory_takes_no_names(shown: Shown) -> None:
    names = shown.names
    shown.make(b"made", DIR)
    for path in (b"made", b"empty"):
        ino = shown.ino(path)
        node = shown.rmdir(path)
        assert node.nlink == 0
        for _ in range(2):
            assert list(names.list_from(ino, 0)) == []
            assert names.lookup(ino, b"x") is None
            for refused in (
                lambda i=ino: names.make(i, b"x", mode=FILE, uid=0, gid=0, now_ns=NOW),
                lambda i=ino: names.link(shown.ino(b"file"), i, b"x", now_ns=NOW),
                lambda i=ino: names.unlink(i, b"x", now_ns=NOW),
                lambda i=ino: names.rename(ROOT_INO, b"file", i, b"x", now_ns=NOW),
                lambda i=ino: names.path_of(i, b"x"),
            ):
                assert number(refused) == errno.ENOENT
            names.forget_node(ino)
    assert shown.ino(b"file")


def test_unlink_and_rmdir_know_what_they_are_for(shown: Shown) -> None:
    names = shown.names
    for name, unlink, rmdir in (
        (b"missing", errno.ENOENT, errno.ENOENT),
        (b"dir", errno.EISDIR, errno.ENOTEMPTY),
        (b"", errno.ENOENT, errno.ENOENT),
        (b".", errno.EISDIR, errno.EINVAL),
        (b"..", errno.EISDIR, errno.ENOTEMPTY),
        (TOO_LONG, errno.ENAMETOOLONG, errno.ENAMETOOLONG),
    ):
        assert number(lambda n=name: names.unlink(ROOT_INO, n, now_ns=NOW)) == unlink, name
        assert number(lambda n=name: names.rmdir(ROOT_INO, n, now_ns=NOW)) == rmdir, name
    assert number(lambda: shown.rmdir(b"file")) == errno.ENOTDIR
    assert shown.reported == set(), "what is refused changes nothing"


def test_a_directory_of_the_snapshot_can_be_emptied_and_removed(shown: Shown) -> None:
    shown.make(b"full/new")
    assert number(lambda: shown.rmdir(b"full")) == errno.ENOTEMPTY
    shown.unlink(b"full/a")
    assert number(lambda: shown.rmdir(b"full")) == errno.ENOTEMPTY
    shown.unlink(b"full/new")
    shown.rmdir(b"full")
    assert shown.names.resolve(b"full") is None
    again = shown.make(b"full", DIR)
    assert shown.listed(b"full") == [] and shown.ino(b"full") == again.ino


def test_a_removed_name_may_be_given_again_and_keeps_its_place(shown: Shown) -> None:
    before = shown.listed()
    shown.unlink(b"file")
    node = shown.make(b"file", DIR)
    assert shown.listed() == before
    assert shown.ino(b"file") == node.ino
    assert {n: a.ino for _, n, a in shown.names.list_from(ROOT_INO, 0)}[b"file"] == node.ino


# -- names of one file ---------------------------------------------------------------------------


def test_a_file_of_the_snapshot_is_taken_with_all_its_names(shown: Shown) -> None:
    names = shown.names
    node = names.copy_up(shown.ino(b"hard"))
    assert node is names.copy_up(shown.ino(b"dir/hard"))
    assert set(node.names) == {(ROOT_INO, b"hard"), (shown.ino(b"dir"), b"hard")}
    assert set(names.visible_paths(node.ino)) == {b"hard", b"dir/hard"}
    assert node.nlink == 2 and shown.reported == {node.ino}


def test_a_file_lives_until_its_last_name_goes(shown: Shown) -> None:
    names = shown.names
    ino = shown.ino(b"hard")
    shown.link(b"hard", b"empty/third")
    assert names.attributes(ino).nlink == 3
    first = names.visible_path(ino)
    shown.unlink(first)
    assert names.visible_path(ino) != first and not names.is_gone(ino)
    for path in list(names.visible_paths(ino)):
        node = shown.unlink(path)
    assert node.nlink == 0 and names.is_gone(ino)
    assert number(lambda: names.link(ino, ROOT_INO, b"back", now_ns=NOW)) == errno.ENOENT


def test_names_outside_the_source_do_not_keep_a_file_alive(
    tree: Tree, tmp_path: Path, over: Callable[[Path], Shown]
) -> None:
    source = tree({"file": b"x"})
    os.link(source / "file", tmp_path / "outside")
    shown = over(source)
    assert shown.names.attributes(shown.ino(b"file")).nlink == 2
    assert shown.unlink(b"file").nlink == 0


def test_links_are_refused_where_they_cannot_be(shown: Shown) -> None:
    assert number(lambda: shown.link(b"dir", b"again")) == errno.EPERM
    assert number(lambda: shown.link(b"dir", b"file")) == errno.EEXIST
    shown.names.copy_up(shown.ino(b"file")).nlink = LINK_MAX
    assert number(lambda: shown.link(b"file", b"again")) == errno.EMLINK
    assert number(lambda: shown.link(b"link", b"again")) == 0
    assert shown.names.readlink(shown.ino(b"again")) == b"file"


# -- renames -------------------------------------------------------------------------------------


def test_a_renamed_file_keeps_its_number_and_the_path_at_the_source(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    done = shown.rename(b"file", b"dir/moved")
    assert done.node.ino == ino and done.replaced is None
    assert names.resolve(b"file") is None and shown.ino(b"dir/moved") == ino
    assert names.visible_path(ino) == b"dir/moved" and names.path(ino) == b"file"
    assert names.attributes(ino).parent == shown.ino(b"dir")
    assert shown.reported == {ino, ROOT_INO, shown.ino(b"dir")}
    names.move(ino, b"dir/moved")
    assert names.path(ino) == b"dir/moved"


def test_a_rename_over_a_file_tells_which(shown: Shown) -> None:
    ino = shown.ino(b"other")
    done = shown.rename(b"file", b"other")
    assert done.replaced.ino == ino and done.replaced.nlink == 0
    assert shown.listed().count(b"other") == 1 and b"file" not in shown.listed()


def test_a_rename_over_one_of_several_names_leaves_the_others(shown: Shown) -> None:
    done = shown.rename(b"file", b"hard")
    assert done.replaced.nlink == 1
    assert shown.ino(b"dir/hard") == done.replaced.ino


def test_renaming_one_name_of_a_file_to_another_does_nothing(shown: Shown) -> None:
    assert shown.rename(b"hard", b"dir/hard") is None
    assert shown.rename(b"dir", b"dir") is None
    assert shown.ino(b"hard") == shown.ino(b"dir/hard") and shown.reported == set()


def test_a_directory_that_was_made_moves_with_all_that_is_in_it(shown: Shown) -> None:
    names = shown.names
    shown.make(b"made", DIR)
    shown.make(b"made/sub", DIR)
    shown.rename(b"file", b"made/sub/file")
    shown.rename(b"made", b"dir/made")
    file = shown.ino(b"dir/made/sub/file")
    assert names.visible_path(file) == b"dir/made/sub/file"
    assert names.attributes(shown.ino(b"dir/made")).parent == shown.ino(b"dir")
    shown.rename(b"dir/made", b"empty")
    assert shown.listed(b"empty") == [b"sub"] and shown.listed(b"dir").count(b"made") == 0


@pytest.mark.parametrize(
    ("path", "to", "flags", "expected"),
    [
        (b"missing", b"x", 0, errno.ENOENT),
        (b"missing", TOO_LONG, 0, errno.ENOENT),
        (b"file", TOO_LONG, 0, errno.ENAMETOOLONG),
        (b"file", b"other", RENAME_NOREPLACE, errno.EEXIST),
        (b"file", b"file", RENAME_NOREPLACE, errno.EEXIST),
        (b"file", b"new", RENAME_NOREPLACE, 0),
        (b"file", b"other", 2, errno.EINVAL),  # RENAME_EXCHANGE
        (b"file", b"new", 4, errno.EINVAL),  # RENAME_WHITEOUT
        (b"file", b"empty", 0, errno.EISDIR),
        (b"made", b"file", 0, errno.ENOTDIR),
        (b"made", b"full", 0, errno.ENOTEMPTY),
        (b"made", b"empty", 0, 0),
        (b"made", b"made/sub/x", 0, errno.EINVAL),
        (b"made", b"made/x", 0, errno.EINVAL),
        (b"made/sub", b"made", 0, errno.ENOTEMPTY),
        (b"file", b".", 0, errno.EBUSY),
        (b"file", b"..", RENAME_NOREPLACE, errno.EEXIST),
        (b".", b"x", 0, errno.EBUSY),
        (b"file", b"", 0, errno.ENOENT),
        (b"dir", b"elsewhere", 0, errno.EXDEV),
        (b"empty", b"made", 0, errno.ENOTEMPTY),
        (b"empty", b"made/sub", 0, errno.EXDEV),
        (b"dir", b"dir/sub/x", 0, errno.EINVAL),
        (b"dir/sub", b"dir", 0, errno.ENOTEMPTY),
        (b"dir", b"file", 0, errno.ENOTDIR),
        (b"link", b"elsewhere", 0, 0),
    ],
)
def test_a_rename_that_cannot_be_is_refused(
    shown: Shown, path: bytes, to: bytes, flags: int, expected: int
) -> None:
    shown.make(b"made", DIR)
    shown.make(b"made/sub", DIR)
    before = tree_of(shown.names)
    assert number(lambda: shown.rename(path, to, flags)) == expected
    assert (tree_of(shown.names) == before) == bool(expected)


# -- attributes ------------------------------------------------------------------------------------


def test_a_changed_file_keeps_its_inode_number_and_its_other_attributes(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    before = names.attributes(ino)
    names.change(ino, mode=0o600, now_ns=NOW)
    now = names.attributes(ino)
    assert now == replace(before, mode=stat.S_IFREG | 0o600, ctime_ns=NOW, atime_ns=before.mtime_ns)
    assert shown.reported == {ino}
    assert [a for _, n, a in names.list_from(ROOT_INO, 0) if n == b"file"] == [now]
    assert names.at_source(ino) == before


def test_owners_times_and_sizes_are_set(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    names.change(ino, uid=4, now_ns=NOW)
    names.change(ino, gid=5, mtime_ns=1, now_ns=NOW)
    node = names.change(ino, atime_ns=2, now_ns=LATER)
    assert (node.uid, node.gid, node.mtime_ns, node.atime_ns, node.ctime_ns) == (4, 5, 1, 2, LATER)
    node = names.change(ino, size=1 << 40, now_ns=NOW)
    assert (node.size, node.mtime_ns, node.ctime_ns) == (1 << 40, NOW, NOW)
    node = names.change(ino, size=0, mtime_ns=3, now_ns=LATER)
    assert (node.size, node.mtime_ns, node.ctime_ns) == (0, 3, LATER)


def test_entries_without_a_size_get_none(shown: Shown) -> None:
    names = shown.names
    assert number(lambda: names.change(ROOT_INO, size=0, now_ns=NOW)) == errno.EISDIR
    link = shown.ino(b"link")
    assert number(lambda: names.change(link, size=0, now_ns=NOW)) == errno.EINVAL
    file = shown.ino(b"file")
    assert number(lambda: names.change(file, size=-1, now_ns=NOW)) == errno.EINVAL
    assert shown.reported == set()


def test_another_owner_takes_the_privileges_of_a_file(shown: Shown) -> None:
    names = shown.names
    for mode, left in ((0o6755, 0o755), (0o6745, 0o2745), (0o4644, 0o644)):
        ino = shown.ino(b"file")
        names.change(ino, mode=mode, now_ns=NOW)
        assert stat.S_IMODE(names.change(ino, uid=1, now_ns=NOW).mode) == left
    ino = shown.ino(b"dir")
    names.change(ino, mode=0o6755, now_ns=NOW)
    assert stat.S_IMODE(names.change(ino, uid=1, now_ns=NOW).mode) == 0o6755
    assert stat.S_IMODE(names.change(ino, uid=2, mode=0o4755, now_ns=NOW).mode) == 0o4755


def test_times_of_directories_follow_their_names(shown: Shown) -> None:
    names = shown.names
    operations: list[tuple[Callable[[int], object], set[bytes]]] = [
        (
            lambda t: names.make(shown.ino(b"dir"), b"n", mode=DIR, uid=0, gid=0, now_ns=t),
            {b"dir"},
        ),
        (lambda t: names.link(shown.ino(b"file"), shown.ino(b"empty"), b"l", now_ns=t), {b"empty"}),
        (
            lambda t: names.rename(shown.ino(b"empty"), b"l", shown.ino(b"full"), b"m", now_ns=t),
            {b"empty", b"full"},
        ),
        (lambda t: names.rmdir(shown.ino(b"dir"), b"n", now_ns=t), {b"dir"}),
        (lambda t: names.unlink(shown.ino(b"full"), b"m", now_ns=t), {b"full"}),
        (lambda t: names.change(shown.ino(b"dir"), mode=0o700, now_ns=t), set()),
    ]
    directories = {b"dir", b"empty", b"full"}
    for at, (operation, touched) in enumerate(operations, NOW):
        operation(at)
        assert {
            path for path in directories if names.attributes(shown.ino(path)).mtime_ns == at
        } == touched
        for path in touched:
            assert names.attributes(shown.ino(path)).ctime_ns == at


def test_the_change_time_of_what_is_linked_renamed_or_unlinked_is_now(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    mtime = names.attributes(ino).mtime_ns
    names.link(ino, ROOT_INO, b"l", now_ns=NOW)
    assert names.attributes(ino).ctime_ns == NOW
    names.rename(ROOT_INO, b"l", ROOT_INO, b"m", now_ns=NOW + 1)
    assert names.attributes(ino).ctime_ns == NOW + 1
    names.unlink(ROOT_INO, b"m", now_ns=NOW + 2)
    assert names.attributes(ino).ctime_ns == NOW + 2
    names.rename(ROOT_INO, b"other", ROOT_INO, b"file", now_ns=NOW + 3)
    assert names.attributes(ino).ctime_ns == NOW + 3
    assert names.attributes(ino).mtime_ns == mtime


def test_links_of_directories_are_not_counted_where_the_source_does_not(
    shown: Shown,
) -> None:
    names, ino = shown.names, shown.ino(b"empty")
    names.refresh(ino, replace(names.attributes(ino), nlink=1))
    shown.make(b"empty/sub", DIR)
    assert names.attributes(ino).nlink == 1
    shown.rmdir(b"empty/sub")
    assert names.attributes(ino).nlink == 1


def test_attributes_of_the_user_are_kept(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    assert number(lambda: names.set_xattr(ino, b"user.a", None, now_ns=NOW)) == errno.ENODATA
    assert xattrs_of(names, ino) == {} and not names.is_written(ino)
    names.set_xattr(ino, b"user.a", b"", now_ns=NOW)
    names.set_xattr(ino, b"user.b", b"\0\xff", now_ns=NOW)
    assert xattrs_of(names, ino) == {b"user.a": b"", b"user.b": b"\0\xff"}
    names.set_xattr(ino, b"user.a", None, now_ns=LATER)
    assert (
        xattrs_of(names, ino) == {b"user.b": b"\0\xff"} and names.attributes(ino).ctime_ns == LATER
    )
    large = b"x" * (XATTRS_MAX - 32)
    names.set_xattr(ino, b"user.b", large, now_ns=NOW)
    names.set_xattr(ino, b"user.b", large, now_ns=NOW)
    assert number(lambda: names.set_xattr(ino, b"user.c", b"y" * 64, now_ns=NOW)) == errno.ENOSPC


# -- listings that are read while names come and go ------------------------------------------------


def test_a_continued_listing_shows_each_entry_once_whatever_happens_meanwhile(
    tree: Tree, over: Callable[[Path], Shown]
) -> None:
    shown = over(tree({f"d/{n:03}": b"" for n in range(60)}))
    names, parent = shown.names, shown.ino(b"d")
    rng = random.Random(1)
    renamed = 0
    for _ in range(20):
        for n in range(60):
            with contextlib.suppress(Refused):
                shown.make(b"d/x%03d" % n)
        steady = set(shown.listed(b"d"))
        seen: list[tuple[bytes, Ino]] = []
        at, end = 0, names.list_end(parent)
        while page := list(islice(names.list_from(parent, at, end=end), rng.randint(1, 9))):
            seen += [(name, attributes.ino) for _, name, attributes in page]
            at = page[-1][0] + 1
            for _ in range(rng.randint(0, 4)):
                name = rng.choice(shown.listed(b"d"))
                match rng.randrange(4):
                    case 0:
                        shown.unlink(b"d/" + name)
                        steady.discard(name)
                    case 1:
                        shown.rename(b"d/" + name, b"d/r%d" % renamed)
                        steady.discard(name)
                        renamed += 1
                    case 2:
                        other = rng.choice(shown.listed(b"d"))
                        if shown.rename(b"d/" + name, b"d/" + other) is not None:
                            steady -= {name, other}
                    case 3:
                        with contextlib.suppress(Refused):
                            shown.make(b"d/%s%03d" % (rng.choice([b"", b"x"]), rng.randrange(60)))
        assert len(seen) == len(set(seen))
        assert sorted(name for name, _ in seen if name in steady) == sorted(steady)


def test_removing_all_that_is_listed_finds_each_entry_once(
    tree: Tree, over: Callable[[Path], Shown]
) -> None:
    shown = over(tree({f"d/{n}": b"" for n in range(300)}))
    names, parent = shown.names, shown.ino(b"d")
    for n in range(300):
        shown.make(b"d/new%d" % n)
    removed, at = 0, 0
    while page := list(islice(names.list_from(parent, at), 7)):
        for index, name, _ in page:
            names.forget_node(names.unlink(parent, name, now_ns=NOW).ino)
            removed, at = removed + 1, index + 1
    assert removed == 600
    shown.rmdir(b"d")


def test_a_process_that_renames_each_file_that_it_lists_comes_to_an_end(
    tree: Tree, over: Callable[[Path], Shown]
) -> None:
    shown = over(tree({f"d/{n}": b"" for n in range(10)}))
    names, parent = shown.names, shown.ino(b"d")
    for n in range(10):
        shown.make(b"d/new%d" % n)
    end, at, count = names.list_end(parent), 0, 0
    while page := list(islice(names.list_from(parent, at, end=end), 3)):
        for index, name, _ in page:
            shown.rename(b"d/" + name, b"d/" + name + b".bak")
            at, count = index + 1, count + 1
    assert count == 20
    assert all(name.endswith(b".bak") for name in shown.listed(b"d"))


def test_a_name_that_replaces_another_has_its_place_in_the_listing(shown: Shown) -> None:
    names, parent = shown.names, shown.ino(b"full")
    for name in (b"x", b"y", b"z"):
        shown.make(b"full/" + name)
    (index, first, _), (_, second, _) = islice(names.list_from(parent, 0), 2)
    assert (index, first, second) == (0, b"a", b"x")
    shown.rename(b"full/y", b"full/x")
    shown.rename(b"full/z", b"full/a")
    assert shown.listed(b"full") == [b"a", b"x"]
    assert list(names.list_from(parent, ADDED_INDEX + 1)) == []


@in_memory
def test_names_made_and_removed_again_take_no_memory(shown: Shown) -> None:
    names = shown.names
    for _ in range(500):
        shown.make(b"empty/d", DIR)
        shown.make(b"empty/d/f")
        names.forget_node(shown.unlink(b"empty/d/f").ino)
        names.forget_node(shown.rmdir(b"empty/d").ino)
    assert set(names._overlay._nodes) == {shown.ino(b"empty")}
    assert set(names._listings._listings) == {shown.ino(b"empty")}
    assert len(names._listings._listings[shown.ino(b"empty")]._order) < 100


def test_indices_of_what_is_added_grow_and_never_come_again(shown: Shown) -> None:
    seen: list[int] = []
    for _ in range(200):
        shown.make(b"empty/x")
        ((index, _, _),) = shown.names.list_from(shown.ino(b"empty"), 0)
        seen.append(index)
        shown.unlink(b"empty/x")
    assert seen == list(range(ADDED_INDEX, ADDED_INDEX + 200))


# -- changes at the source -------------------------------------------------------------------------


def test_changes_at_the_source_show_where_nothing_was_written(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    known = names.attributes(ino)
    names.change(ino, mode=0o600, now_ns=NOW)
    fresh = replace(known, size=77, blocks=8, uid=9, mode=stat.S_IFREG | 0o444, mtime_ns=5)
    names.refresh(ino, fresh)
    now = names.attributes(ino)
    assert (now.size, now.blocks, now.uid, now.mtime_ns) == (77, 8, 9, 5)
    assert (now.mode, now.ctime_ns) == (stat.S_IFREG | 0o600, NOW)
    assert names.at_source(ino) == fresh


def test_absorbed_files_do_not_follow_the_source(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    fresh = replace(names.attributes(ino), size=77, mtime_ns=5)
    names.copy_up(ino).object = 1
    names.change(ino, size=3, now_ns=NOW)
    shown_now = names.attributes(ino)
    names.refresh(ino, fresh)
    names.forget(ino)
    assert names.attributes(ino) == shown_now and not names.is_gone(ino)
    assert shown.ino(b"file") == ino
    assert names.at_source(ino) == fresh


def test_removed_files_do_not_come_back_by_a_change_at_the_source(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    known = names.attributes(ino)
    shown.unlink(b"file")
    for _ in range(2):
        names.refresh(ino, known)
        names.forget(ino)
        assert names.lost(ROOT_INO, b"file") is None
        names.refresh(ino, known)
        assert names.resolve(b"file") is None and names.is_gone(ino)
        names.forget_node(ino)
    assert names.refreshed == 0


def test_a_name_that_the_source_lost_can_be_given_anew(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    known = names.attributes(ino)
    before = shown.listed()
    names.forget(ino)
    assert names.lost(ROOT_INO, b"file") == ino
    node = shown.make(b"file")
    assert names.lost(ROOT_INO, b"file") is None
    assert shown.listed() == before
    names.refresh(ino, known)
    assert shown.ino(b"file") == node.ino


def test_a_file_that_is_the_sources_again_has_only_its_remaining_names(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"hard")
    known = names.attributes(ino)
    first = names.visible_path(ino)
    names.forget(ino)
    shown.make(first)
    names.refresh(ino, known)
    (left,) = names.visible_paths(ino)
    assert {first, left} == {b"hard", b"dir/hard"}
    assert names.visible_path(ino) == left and shown.ino(left) == ino
    assert names.copy_up(ino).nlink == 1


def test_a_renamed_file_that_the_source_loses_leaves_its_name_to_others(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    known = names.attributes(ino)
    shown.rename(b"file", b"dir/moved")
    names.forget(ino)
    assert names.resolve(b"dir/moved") is None and b"moved" not in shown.listed(b"dir")
    names.refresh(ino, known)
    assert shown.ino(b"dir/moved") == ino
    names.forget(ino)
    other = shown.make(b"dir/moved")
    names.refresh(ino, known)
    assert shown.ino(b"dir/moved") == other.ino and names.is_gone(ino)


def test_an_open_file_that_the_source_lost_has_no_name_to_be_written_to(shown: Shown) -> None:
    names, ino = shown.names, shown.ino(b"file")
    known = names.attributes(ino)
    names.forget(ino)
    node = names.copy_up(ino)
    assert node.nlink == 0 and not node.names
    assert names.lost(ROOT_INO, b"file") is None
    names.refresh(ino, known)
    assert names.resolve(b"file") is None
    names.forget_node(ino)
    names.refresh(ino, known)
    assert shown.ino(b"file") == ino


def test_a_directory_whose_rest_the_source_lost_is_empty(shown: Shown) -> None:
    names, lost, moved = shown.names, shown.ino(b"full/a"), shown.ino(b"file")
    shown.rename(b"file", b"full/moved")
    for ino in (lost, moved):
        names.forget(ino)
    shown.rmdir(b"full")
    assert names.resolve(b"full") is None
    for ino in (lost, moved):
        assert names.attributes(ino).nlink == 0
        names.refresh(ino, replace(names.attributes(ino), nlink=1))
        assert names.is_gone(ino), "there is no directory to show it in"


def test_a_new_file_is_at_the_source_once_that_is_recorded(shown: Shown) -> None:
    names = shown.names
    node = shown.make(b"dir/new", object=1)
    assert names.at_source(node.ino) is None
    fresh = replace(node.attributes, size=9, mtime_ns=4, source_ino=1234)
    names.refresh(node.ino, fresh)
    assert names.at_source(node.ino) == fresh
    assert (node.size, node.mtime_ns) == (0, NOW)
    shown.link(b"dir/new", b"second")
    assert list(names.other_paths(node.ino)) == [b"second"]
    # Its bytes are the source's from now on.
    node.object, node.keeps_times = 0, False
    names.refresh(node.ino, fresh)
    assert (node.size, node.mtime_ns, node.source_ino) == (9, 4, 1234)
    names.forget(node.ino)
    assert names.resolve(b"dir/new") is None
    assert not shown.reported & {node.ino}, "the snapshot does not know that number"


# -- the same done to a real directory -------------------------------------------------------------


def tree_of(names: Namespace) -> dict[bytes, tuple[Any, ...]]:
    """What is shown at each path, and which other paths are the same inode."""
    found: dict[bytes, Attributes] = {}
    pending = [(b"", names.attributes(ROOT_INO))]
    while pending:
        path, attributes = pending.pop()
        assert path not in found, f"{path!r} is listed twice"
        found[path] = attributes
        if attributes.is_dir:
            for _, name, below in names.list_from(attributes.ino, 0):
                assert names.lookup(attributes.ino, name) == below.ino
                assert names.attributes(below.ino) == below
                pending.append((path + b"/" + name if path else name, below))
    same: dict[Ino, set[bytes]] = {}
    for path, attributes in found.items():
        same.setdefault(attributes.ino, set()).add(path)
    for ino, paths in same.items():
        if not names.attributes(ino).is_dir or ino != ROOT_INO:
            assert set(names.visible_paths(ino)) == paths
            assert names.visible_path(ino) in paths
    return {
        path: (
            attributes.mode,
            attributes.nlink,
            attributes.uid,
            attributes.gid,
            attributes.rdev,
            None if attributes.is_dir else attributes.size,
            names.readlink(attributes.ino) if stat.S_ISLNK(attributes.mode) else None,
            frozenset(same[attributes.ino]),
            xattrs_of(names, attributes.ino),
        )
        for path, attributes in found.items()
    }


def real_tree_of(top: bytes) -> dict[bytes, tuple[Any, ...]]:
    found: dict[bytes, os.stat_result] = {b"": os.lstat(top)}
    pending = [b""]
    while pending:
        path = pending.pop()
        for name in os.listdir(os.path.join(top, path)):
            below = os.path.join(path, name)
            found[below] = os.lstat(os.path.join(top, below))
            if stat.S_ISDIR(found[below].st_mode):
                pending.append(below)
    same: dict[int, set[bytes]] = {}
    for path, status in found.items():
        same.setdefault(status.st_ino, set()).add(path)
    answer = {}
    for path, status in found.items():
        full = os.path.join(top, path)
        answer[path] = (
            status.st_mode,
            status.st_nlink,
            status.st_uid,
            status.st_gid,
            status.st_rdev,
            None if stat.S_ISDIR(status.st_mode) else status.st_size,
            os.readlink(full) if stat.S_ISLNK(status.st_mode) else None,
            frozenset(same[status.st_ino]),
            {
                os.fsencode(name): os.getxattr(full, name, follow_symlinks=False)
                for name in os.listxattr(full, follow_symlinks=False)
                if name.startswith("user.")
            },
        )
    return answer


LIBC = ctypes.CDLL(None, use_errno=True)


def real_rename(name: bytes, to: bytes, fd: int, to_fd: int, flags: int) -> None:
    if LIBC.renameat2(fd, name, to_fd, to, flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def fill_both(*tops: Path) -> None:
    for top in tops:
        top.mkdir(exist_ok=True)
        top.chmod(0o755)
        for directory in ("a", "b", "a/c", "a/c/d", "e"):
            (top / directory).mkdir()
        for file in ("a/a", "a/b", "b/a", "a/c/a", "f"):
            (top / file).write_bytes(file.encode())
        os.link(top / "f", top / "b" / "f")
        os.link(top / "a" / "a", top / "a" / "c" / "f")
        os.link(top / "a" / "a", top / "g")
        (top / "b" / "c").symlink_to("../f")
        os.mkfifo(top / "e" / "a")


class Comparison:
    """The same done to a namespace and to a real directory that began alike.

    ``done`` is what succeeded, by paths, to be done again elsewhere. ``places`` are the directories
    that there are or were, and a few files, each with a descriptor of its real counterpart.
    """

    NAMES = (*(b"%c" % letter for letter in b"abcdefg"), b"h" * 255)
    ODD = (b"", b".", b"..", TOO_LONG)

    def __init__(self, shown: Shown, top: Path, rng: random.Random) -> None:
        self.shown, self.names, self.top, self.rng = shown, shown.names, os.fsencode(top), rng
        self.places: dict[Ino, int] = {}
        self.dead: set[Ino] = set()
        self.done: list[tuple[str, list[bytes], dict[str, Any]]] = []
        self.now = NOW
        for path, what in tree_of(self.names).items():
            if stat.S_ISDIR(what[0]) or path == b"f":
                self.add_place(path)

    def add_place(self, path: bytes) -> None:
        ino = self.shown.ino(path)
        full = os.path.join(self.top, path) if path else self.top
        self.places[ino] = os.open(full, os.O_PATH | os.O_NOFOLLOW)

    def close(self) -> None:
        for fd in self.places.values():
            os.close(fd)

    def retire(self, node: Node | None) -> None:
        """No process has it open, or one has for a while."""
        if node is None or node.nlink:
            return
        if node.is_dir:
            self.dead.add(node.ino)
        if self.rng.random() < 0.7:
            self.names.forget_node(node.ino)
        while len(self.dead) > 4:
            ino = self.dead.pop()
            os.close(self.places.pop(ino))

    def place(self) -> Ino:
        return self.rng.choice(list(self.places))

    def entry(self) -> tuple[Ino, bytes] | None:
        """A name that is there, in a directory chosen at random."""
        for _ in range(8):
            parent = self.place()
            there = [name for _, name, _ in self.names.list_from(parent, 0)]
            if there:
                return parent, self.rng.choice(there)
        return None

    def named(self) -> tuple[Ino, bytes]:
        if self.rng.random() < 0.6 and (entry := self.entry()) is not None:
            return entry
        parent = self.place()
        live = parent not in self.dead and self.names.attributes(parent).is_dir
        odd = live and self.rng.random() < 0.03
        return parent, self.rng.choice(self.ODD if odd else self.NAMES)

    def real(self, parent: Ino, name: bytes) -> bytes:
        return b"/proc/self/fd/%d/%s" % (self.places[parent], name)

    def agree(
        self,
        ours: Callable[[], object],
        real: Callable[[], object],
        *done: tuple[str, list[bytes], dict[str, Any]],
    ) -> Any:
        """Do both; they end alike. Returns what ours gave, None if it was refused."""
        answer: Any = None
        expected = got = 0
        try:
            answer = ours()
        except Refused as error:
            got = error.errno
        if got == errno.EXDEV:
            return None
        try:
            real()
        except OSError as error:
            expected = error.errno or 0
        assert errno.errorcode.get(got, 0) == errno.errorcode.get(expected, 0), done
        if not got:
            self.done += done
        return answer

    def step(self) -> str:
        self.now += 1
        kind = self.rng.choice(
            ("create", "create", "mkdir", "mkdir", "symlink", "mknod", "link", "link", "unlink")
            + ("unlink", "rmdir", "rmdir", "rename", "rename", "rename", "rename")
            + ("chmod", "chown", "truncate", "xattr")
        )
        getattr(self, kind)()
        return kind

    def make(self, mode: int, real: Callable[[int, bytes, int], object], **more: Any) -> None:
        parent, name = self.named()
        given = {"mode": mode, "uid": os.geteuid(), "gid": os.getegid(), "now_ns": self.now, **more}
        ino = self.names._overlay._next_ino

        def ours() -> Node:
            return self.names.make(parent, name, **given)

        done = ("make", [self.path(parent, name)], {**given, "ino": ino})
        if self.agree(ours, lambda: real(self.places[parent], name, mode), done) is not None:
            assert self.names.lookup(parent, name) == ino
            if stat.S_ISDIR(mode):
                self.add_place(done[1][0])

    def path(self, parent: Ino, name: bytes) -> bytes:
        try:
            return self.names.path_of(parent, name)
        except Refused:
            return b"?"

    def create(self) -> None:
        def real(fd: int, name: bytes, mode: int) -> None:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode & 0o7777, dir_fd=fd))

        self.make(stat.S_IFREG | self.rng.randrange(0o10000), real, object=1)

    def mkdir(self) -> None:
        mode = stat.S_IFDIR | self.rng.randrange(0o1000)
        self.make(mode, lambda fd, name, mode: os.mkdir(name, mode & 0o7777, dir_fd=fd))

    def symlink(self) -> None:
        target = self.rng.choice((b"a", b"../b", b"", b"t" * 4095, b"t" * 4096))
        self.make(LINK, lambda fd, name, _: os.symlink(target, name, dir_fd=fd), target=target)

    def mknod(self) -> None:
        kinds = [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG]
        if os.geteuid() == 0:
            kinds += [stat.S_IFCHR, stat.S_IFBLK]
        mode = self.rng.choice(kinds) | self.rng.randrange(0o10000)
        rdev = os.makedev(1, 3) if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0
        self.make(mode, lambda fd, name, mode: os.mknod(name, mode, rdev, dir_fd=fd), rdev=rdev)

    def link(self) -> None:
        if (entry := self.entry()) is None:
            return
        (parent, name), (to, to_name) = entry, self.named()
        ino = self.names.lookup(parent, name)
        assert ino is not None
        self.agree(
            lambda: self.names.link(ino, to, to_name, now_ns=self.now),
            lambda: os.link(
                name,
                to_name,
                src_dir_fd=self.places[parent],
                dst_dir_fd=self.places[to],
                follow_symlinks=False,
            ),
            ("link", [self.path(parent, name), self.path(to, to_name)], {"now_ns": self.now}),
        )

    def unlink(self) -> None:
        parent, name = self.named()
        gone = self.agree(
            lambda: self.names.unlink(parent, name, now_ns=self.now),
            lambda: os.unlink(name, dir_fd=self.places[parent]),
            ("unlink", [self.path(parent, name)], {"now_ns": self.now}),
        )
        self.retire(gone)

    def rmdir(self) -> None:
        parent, name = self.named()
        gone = self.agree(
            lambda: self.names.rmdir(parent, name, now_ns=self.now),
            lambda: os.rmdir(name, dir_fd=self.places[parent]),
            ("rmdir", [self.path(parent, name)], {"now_ns": self.now}),
        )
        self.retire(gone)

    def rename(self) -> None:
        (parent, name), (to, to_name) = self.named(), self.named()
        if self.dead & {parent, to} or to_name in self.ODD:
            # The order of two possible errors does not matter.
            to, to_name = parent, self.rng.choice(self.NAMES)
        flags = RENAME_NOREPLACE if self.rng.random() < 0.2 else 0
        ino = self.names.lookup(parent, name)
        paths = [self.path(parent, name), self.path(to, to_name)]
        same = ino is not None and ino == self.names.lookup(to, to_name)
        done = ("rename", paths, {"flags": flags, "now_ns": self.now})
        moved = self.agree(
            lambda: self.names.rename(parent, name, to, to_name, flags=flags, now_ns=self.now),
            lambda: real_rename(name, to_name, self.places[parent], self.places[to], flags),
            *(() if same else (done,)),
        )
        if moved is not None:
            self.retire(moved.replaced)

    def chosen(self, *, links: bool) -> tuple[bytes, Ino, bytes] | None:
        entry = self.entry()
        if entry is None:
            return None
        ino = self.names.lookup(*entry)
        assert ino is not None
        if not links and stat.S_ISLNK(self.names.attributes(ino).mode):
            return None
        return self.real(*entry), ino, self.path(*entry)

    def chmod(self) -> None:
        if (chosen := self.chosen(links=False)) is not None:
            real, ino, path = chosen
            mode = self.rng.randrange(0o10000)
            self.agree(
                lambda: self.names.change(ino, mode=mode, now_ns=self.now),
                lambda: os.chmod(real, mode),
                ("change", [path], {"mode": mode, "now_ns": self.now}),
            )

    def chown(self) -> None:
        if os.geteuid() == 0 and (chosen := self.chosen(links=True)) is not None:
            real, ino, path = chosen
            owner: dict[str, int] = {
                "uid": self.rng.randrange(3),
                "gid": self.rng.randrange(3),
            }
            if left := self.rng.choice(("", "uid", "gid")):
                del owner[left]
            self.agree(
                lambda: self.names.change(ino, **owner, now_ns=self.now),
                lambda: os.chown(
                    real, owner.get("uid", -1), owner.get("gid", -1), follow_symlinks=False
                ),
                ("change", [path], {**owner, "now_ns": self.now}),
            )

    def truncate(self) -> None:
        if (chosen := self.chosen(links=False)) is not None:
            real, ino, path = chosen
            if stat.S_IFMT(self.names.attributes(ino).mode) in (stat.S_IFCHR, stat.S_IFBLK):
                return
            size = self.rng.choice((0, 1, 100_000, -1))
            self.agree(
                lambda: self.names.change(ino, size=size, now_ns=self.now),
                lambda: os.truncate(real, size),
                ("change", [path], {"size": size, "now_ns": self.now}),
            )

    def xattr(self) -> None:
        if (chosen := self.chosen(links=False)) is not None:
            real, ino, path = chosen
            attributes = self.names.attributes(ino)
            if not (attributes.is_dir or attributes.is_file):
                return
            name = self.rng.choice((b"user.a", b"user.b"))
            if self.rng.random() < 0.4:
                self.agree(
                    lambda: self.names.set_xattr(ino, name, None, now_ns=self.now),
                    lambda: os.removexattr(real, name),
                    ("set_xattr", [path], {"name": name, "value": None, "now_ns": self.now}),
                )
                return
            value = b"%d" % self.now
            self.agree(
                lambda: self.names.set_xattr(ino, name, value, now_ns=self.now),
                lambda: os.setxattr(real, name, value),
                ("set_xattr", [path], {"name": name, "value": value, "now_ns": self.now}),
            )


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_is_whole_while_the_source_loses_and_finds_files(
    seed: int, source: Path, over: Callable[[Path], Shown]
) -> None:
    """What is listed is found, and each inode knows its names and no other (``tree_of``)."""
    fill_both(source)
    shown = over(source)
    names, rng = shown.names, random.Random(seed)
    given = Given(names)
    snapshot = names.snapshot
    places = map(Ino, range(2, snapshot.entries + 1))
    inos = [ino for ino in places if snapshot.attributes(ino).ino == ino]
    files = [ino for ino in inos if snapshot.attributes(ino).is_file]

    tree = tree_of(names)

    def somewhere() -> tuple[Ino, bytes]:
        directories = [path for path, what in tree.items() if stat.S_ISDIR(what[0])]
        return shown.ino(rng.choice(directories)), rng.choice(b"a b c f g".split())

    def step() -> None:
        ino, (parent, name) = rng.choice(files), somewhere()
        match rng.randrange(9):
            case 0:
                names.forget(ino)
            case 1:
                names.refresh(ino, snapshot.attributes(ino))
            case 2:
                names.make(parent, name, mode=rng.choice((FILE, DIR)), uid=0, gid=0, now_ns=NOW)
            case 3:
                names.unlink(parent, name, now_ns=NOW)
            case 4:
                names.rmdir(parent, name, now_ns=NOW)
            case 5:
                names.link(ino, parent, name, now_ns=NOW)
            case 6:
                if not names.is_gone(ino):
                    names.copy_up(ino).object = rng.randrange(2)
            case _:
                names.rename(parent, name, *somewhere(), now_ns=NOW)

    for _ in range(300):
        with contextlib.suppress(Refused):
            step()
        tree = tree_of(names)
        given.compare_attributes()
        # Those whose files the source has lost are given still.
        assert given.shown() == {it for it in given if names.lookup(*it) is not None}
        for ino in inos:
            for path in () if names.is_gone(ino) else names.visible_paths(ino):
                assert names.resolve(path) == ino


def do_again(shown: Shown, kind: str, paths: list[bytes], given: dict[str, Any]) -> None:
    """One thing that was done, by the paths that there were."""
    names = shown.names

    def split(path: bytes) -> tuple[Ino, bytes]:
        parent, _, name = path.rpartition(b"/")
        return shown.ino(parent), name

    if kind == "link":
        names.link(shown.ino(paths[0]), *split(paths[1]), **given)
    elif kind == "rename":
        names.rename(*split(paths[0]), *split(paths[1]), **given)
    elif kind in ("make", "unlink", "rmdir"):
        getattr(names, kind)(*split(paths[0]), **given)
    else:
        getattr(names, kind)(shown.ino(paths[0]), **given)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_of_changes_has_the_result_that_it_has_in_a_real_directory(
    seed: int,
    source: Path,
    tmp_path: Path,
    over: Callable[[Path], Shown],
    no_umask: None,
    request: pytest.FixtureRequest,
) -> None:
    """Also: what was done, done again by paths from the snapshot on, gives the same tree."""
    top = tmp_path / "real"
    fill_both(source, top)
    shown = over(source)
    given = Given(shown.names)
    snapshot = shown.names.snapshot
    until = time.monotonic() + request.config.getoption("--soak") / 6
    comparison = Comparison(shown, top, random.Random(seed))
    try:
        while len(comparison.done) < 600 or time.monotonic() < until:
            for _ in range(20):
                comparison.step()
                given.compare_attributes()
            assert tree_of(shown.names) == real_tree_of(comparison.top), comparison.done[-20:]
            assert given.shown() == given
    finally:
        comparison.close()
    assert {kind for kind, _, _ in comparison.done} == {
        *("make", "link", "unlink", "rmdir", "rename", "change", "set_xattr"),
    }
    for ino in map(Ino, range(1, snapshot.entries + 1)):
        if ino not in shown.reported:
            assert shown.names.attributes(ino) == snapshot.attributes(ino)
            assert [name for _, name, _ in shown.names.list_from(ino, 0)] == snapshot.names(ino)

    again = Shown(Namespace(snapshot, lambda _: None), Reported())
    for done in comparison.done:
        do_again(again, *done)
    assert tree_of(again.names) == tree_of(shown.names)
    for path in tree_of(shown.names):
        assert again.names.attributes(again.ino(path)) == shown.names.attributes(shown.ino(path))
