"""The mount's names follow the source entry by entry, over a snapshot that does not change."""

from __future__ import annotations

import stat
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from monarch.namespace.namespace import Namespace
from monarch.posix import acl
from monarch.tiers.source import identity_of
from monarch.types import ROOT_INO, SHOWING_CHANGES, WRITTEN_INO, Attributes, Ino
from monarch.writeback import replay as replaying
from monarch.writeback.object_table import content_of
from monarch.writeback.op import Op
from monarch.writeback.replay import replay
from tests.namespace.conftest import Taken


@pytest.fixture
def names(source: Path, taken: Taken) -> Namespace:
    for name in "abcd":
        (source / name).write_bytes(b"old")
    (source / "dir").mkdir()
    (source / "dir" / "file").touch()
    return Namespace(taken(source), lambda _: None)


def ino_of(names: Namespace, path: bytes) -> Ino:
    ino = names.resolve(path)
    assert ino is not None
    return ino


def listed(names: Namespace, start: int = 0) -> list[tuple[int, bytes]]:
    return [(index, name) for index, name, _ in names.list_from(ROOT_INO, start)]


def changed(names: Namespace, ino: Ino) -> Attributes:
    return replace(names.attributes(ino), size=10, mtime_ns=1)


def test_without_changes_it_is_the_snapshot(names: Namespace) -> None:
    snapshot = names.snapshot
    assert listed(names) == list(enumerate([b"a", b"b", b"c", b"d", b"dir"]))
    ino = ino_of(names, b"dir/file")
    assert names.attributes(ino) == snapshot.attributes(ino)
    assert names.path(ino) == b"dir/file"
    assert names.entries == snapshot.entries
    assert list(names.walk()) == list(snapshot.walk())


def test_refreshed_attributes_are_shown_everywhere(names: Namespace) -> None:
    ino = ino_of(names, b"b")
    new = changed(names, ino)
    names.refresh(ino, new)
    assert names.attributes(ino) == new
    assert [attributes.size for _, _, attributes in names.list_from(ROOT_INO, 0)][:4] == [
        3,
        10,
        3,
        3,
    ]
    assert dict(names.walk())[ino] == new
    assert names.refreshed == 1


def test_a_refreshed_entry_keeps_its_number_and_place(names: Namespace) -> None:
    ino = ino_of(names, b"dir/file")
    names.refresh(ino, replace(changed(names, ino), ino=Ino(999), parent=Ino(999)))
    assert names.attributes(ino).ino == ino
    assert names.attributes(ino).parent == names.resolve(b"dir")


def test_removed_names_are_not_shown(names: Namespace) -> None:
    ino = ino_of(names, b"b")
    names.forget(ino)
    assert names.is_gone(ino)
    assert names.lookup(ROOT_INO, b"b") is None
    assert names.resolve(b"b") is None
    assert [name for _, name in listed(names)] == [b"a", b"c", b"d", b"dir"]
    assert ino not in dict(names.walk())
    # An open file may still be asked for.
    assert names.attributes(ino).size == 3


def test_nothing_beneath_a_directory_that_is_gone_is_found(names: Namespace) -> None:
    names.forget(ino_of(names, b"dir"))
    assert names.resolve(b"dir/file") is None


def test_a_listing_continues_behind_an_entry_though_others_were_removed(names: Namespace) -> None:
    first = listed(names)[:2]
    names.forget(ino_of(names, b"a"))
    following = listed(names, first[-1][0] + 1)
    assert [name for _, name in first + following] == [b"a", b"b", b"c", b"d", b"dir"]


def test_a_removed_name_may_come_back(names: Namespace) -> None:
    ino = ino_of(names, b"b")
    names.forget(ino)
    names.refresh(ino, changed(names, ino))
    assert names.lookup(ROOT_INO, b"b") == ino


def test_the_root_stays(names: Namespace) -> None:
    with pytest.raises(ValueError, match="root"):
        names.forget(ROOT_INO)


@pytest.mark.promise(67)
def test_a_link_that_the_source_has_already_is_made_again_of_the_file_that_the_journal_names(
    names: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    # The first file was replaced at the source, and the second is still a link of the one before.
    records = [(1, Op(kind="link", path=b"a", to=b"b")), (2, Op(kind="link", path=b"a", to=b"new"))]
    replay(names, records, now_ns=1)
    assert caplog.messages == []
    assert ino_of(names, b"a") == ino_of(names, b"b") == ino_of(names, b"new")
    assert sorted(name for _, name in listed(names)) == [b"a", b"b", b"c", b"d", b"dir", b"new"]


@pytest.mark.promise(67)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_rename_that_the_source_has_made_already_takes_the_old_name(
    source: Path, taken: Taken, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    """``is_there``: others have given the file its old name again."""
    (source / "a").touch()
    for name in ("new", "old") if is_there else ("new",):
        (source / name).hardlink_to(source / "a")
    names = Namespace(taken(source), lambda _: None)
    records = [
        (1, Op(kind="take", path=b"a", paths=(b"a", b"old"), object=1)),
        (2, Op(kind="rename", path=b"old", to=b"new", object=1)),
        (3, Op(kind="content", path=b"a", paths=(b"a", b"new"), object=1, mtime_ns=1)),
    ]
    replay(names, records, now_ns=1)
    assert caplog.messages == []
    assert sorted(name for _, name in listed(names)) == [b"a", b"new"]
    assert ino_of(names, b"a") == ino_of(names, b"new")
    assert names.attributes(ino_of(names, b"a")).nlink == 2


@pytest.mark.promise(67, 129)
@pytest.mark.parametrize("is_made", [False, True])
def test_a_directory_of_others_is_not_renamed_for_one_that_the_source_has_renamed_already(
    source: Path, taken: Taken, caplog: pytest.LogCaptureFixture, is_made: bool
) -> None:
    """Others have made a directory with the old name since. ``is_made``: the source has made the
    rename, and the killed mount has not recorded that."""
    (source / "old").mkdir()
    (source / "old/ours").touch()
    was = identity_of((source / "old").stat())
    if is_made:
        (source / "old").rename(source / "new")
        (source / "old").mkdir()
        (source / "old/theirs").touch()
    names = Namespace(taken(source), lambda _: None)
    replay(names, [(1, Op(kind="rename", path=b"old", to=b"new", ino=-2, was=was))], now_ns=1)
    assert caplog.messages == []
    assert names.resolve(b"new/ours") is not None
    assert (names.resolve(b"old/theirs") is not None) is is_made


@pytest.mark.promise(67)
def test_a_file_that_the_source_lacks_now_has_the_owner_of_its_last_content(
    names: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """The drain has removed its older version for a rename. The numbers are of another snapshot."""
    take = Op(kind="take", path=b"new", object=1, ino=-2, mode=0o100644)
    content = Op(kind="content", path=b"new", paths=(b"new",), object=1, ino=-2, mtime_ns=1)
    there = replace(content, path=b"a", paths=(b"a",), object=2, ino=-4)
    before = names.attributes(ino_of(names, b"a"))
    records = [
        (1, take),
        (2, replace(content, mode=0o640, uid=1001, gid=1002)),
        (3, replace(there, mode=0o640, uid=1001, gid=1002)),
    ]
    replay(names, records, now_ns=1)
    assert caplog.messages == []
    found = names.attributes(ino_of(names, b"new"))
    assert (found.mode & 0o7777, found.uid, found.gid) == (0o640, 1001, 1002)
    # Others may have changed a file that the new snapshot has.
    found = names.attributes(ino_of(names, b"a"))
    assert (found.mode, found.uid, found.gid) == (before.mode, before.uid, before.gid)


@pytest.mark.promise(20)
@pytest.mark.parametrize("last", ["create", "content", "attr"])
def test_a_replayed_list_that_is_not_checked_gives_the_group_no_rights_of_its_mask(
    names: Namespace, caplog: pytest.LogCaptureFixture, last: str
) -> None:
    """The source has lost its last list since."""
    tags = ((0x01, 0, 0), (0x02, 7, 1001), (0x04, 4, 0), (0x10, 0, 0), (0x20, 0, 0))
    xattrs = {acl.ACCESS: struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *it) for it in tags)}
    new = Op(kind="create", path=b"new", object=1, ino=WRITTEN_INO, mode=0o660, xattrs=xattrs)
    content = replace(new, kind="content", paths=(b"new",), mtime_ns=1)
    records = [new, content, Op(kind="attr", path=b"new", object=1, mode=0o660)]
    kept = [op.kind for op in records].index(last) + 1
    replay(names, [*enumerate(records[:kept], 1)], now_ns=1)
    assert caplog.messages == [] and not names.has_acls
    assert stat.S_IMODE(names.attributes(ino_of(names, b"new")).mode) == 0o640
    # The source checks the list: its users keep the rights that the mask allows.
    ino = ino_of(names, b"new")
    node = names.node(ino)
    assert node is not None and content_of(node, (b"new",), size=1).mode == 0o660
    names.change(ino, mtime_ns=1, now_ns=1)
    assert content_of(node, (b"new",), size=1).mode == 0o660
    names.change(ino, mode=0o640, now_ns=1)
    assert content_of(node, (b"new",), size=1).mode == 0o640


def test_a_long_journal_shows_how_far_it_is(
    names: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "PROGRESS_STEP", 2)
    shown: list[tuple[int, int | None, str]] = []
    made = [Op(kind="mkdir", path=b"new%d" % seq, ino=WRITTEN_INO + seq) for seq in range(5)]
    records = [*enumerate(made, 1)]
    replay(names, records, now_ns=1, progress=lambda *step: shown.append(step))
    assert shown == [(2, 5, SHOWING_CHANGES), (4, 5, SHOWING_CHANGES)]
