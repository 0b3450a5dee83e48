"""The parts of the source's writer, each alone, on a real directory."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch.posix.credentials import Credentials
from monarch.posix.files import closing_fd, rename_new, status_at, sync_path
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity
from monarch.writeback.expected import (
    Conflict,
    Expected,
    SourceLog,
    grown_to,
    is_shared,
    is_time,
    shared,
)
from monarch.writeback.op import Kind, Op
from monarch.writeback.source_attributes import ITSELF, SourceAttributes
from monarch.writeback.source_contents import Place, StagedContents, kind_of_place
from monarch.writeback.source_directories import OpenDirectories, Temporaries
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_publishing import Publishing
from monarch.writeback.source_writer import SourceWriter
from tests.conftest import require_root

NOTHING = Identity(0, 0, 0, 0)


class Rig:
    """All parts of a writer to ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = Source(os.fsencode(root))
        self.log = SourceLog("0123456789abcdef", "node")
        self.attributes = SourceAttributes(self.log)
        self.temporaries = Temporaries("0123456789abcdef", self.log)
        self.entries = SourceEntries(self.attributes, self.temporaries, self.log)
        self.staged = StagedContents(
            self.source, self.directories, self.attributes, self.temporaries
        )
        self.publishing = Publishing(self.directories, self.attributes, self.temporaries, self.log)

    def directories(self) -> closing[OpenDirectories]:
        return closing(OpenDirectories(self.source, self.attributes, self.log))

    def identity(self, name: str) -> Identity:
        return identity_of(os.lstat(self.root / name))

    def conflict(self) -> Conflict:
        (conflict,) = self.log.conflicts
        return conflict


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    root = tmp_path / "source"
    root.mkdir()
    made = Rig(root)
    yield made
    made.source.close()


# -- what is expected ----------------------------------------------------------------------------


def status(path: Path, content: bytes = b"") -> os.stat_result:
    path.write_bytes(content)
    return path.stat()


def test_a_number_is_enough_for_an_entry_but_not_for_a_version(tmp_path: Path) -> None:
    found = status(tmp_path / "a", b"12345")
    known = identity_of(found)
    older = Identity(known.size, known.mtime_ns - 1, known.ctime_ns, known.source_ino)
    assert Expected(known=known).is_it(found, strict=True, version=True)
    assert Expected(known=older).is_it(found, strict=True)
    assert not Expected(known=older).is_it(found, strict=True, version=True)
    assert Expected(known=older, as_set=(known,)).is_it(found, strict=True, version=True)
    assert Expected(over=(known,)).is_it(found, strict=True, version=True)
    assert not Expected().is_it(found, strict=True)
    assert Expected().is_it(found, strict=False)


def test_an_entry_of_which_nothing_is_known_may_be_it_unless_it_was_made_here(
    tmp_path: Path,
) -> None:
    found = status(tmp_path / "a")
    assert Expected().is_same(found)
    assert not Expected(is_made=True).is_same(found)
    assert not Expected(known=NOTHING).is_same(found)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    known = identity_of(fifo.stat())
    assert Expected(known=known).is_same(fifo.stat(), version=True)
    assert not Expected(known=known, is_file=True).is_same(fifo.stat())


@pytest.mark.parametrize(("size", "is_ours"), [(4, False), (5, True), (9, True), (10, False)])
def test_a_file_that_may_have_grown_is_monarchs_within_its_bounds(
    tmp_path: Path, size: int, is_ours: bool
) -> None:
    found = status(tmp_path / "a", bytes(size))
    known = Identity(5, 0, 0, found.st_ino)
    ours = replace(grown_to(9), source_ino=found.st_ino)
    assert Expected(known=known, ours=frozenset({ours})).is_staged(found) == is_ours
    # It may be the file that this one has replaced on the mount.
    other = replace(known, source_ino=found.st_ino + 1)
    assert Expected(known=other, ours=frozenset({ours})).is_staged(found) == (size < 10)
    # A mark without a length is that of a staged file.
    older = frozenset({replace(ours, mtime_ns=0)})
    assert not Expected(known=known, ours=older).is_staged(found)
    assert Expected(known=other, ours=older).is_staged(found)


@pytest.mark.parametrize("unit_ns", [1, 100, 1000, 10**6, 10**9, 2 * 10**9])
def test_a_time_is_known_again_in_the_precision_of_the_file_system(unit_ns: int) -> None:
    set_ns = 1_234_567_891_234_567_891
    assert is_time(set_ns - set_ns % unit_ns, set_ns)
    assert not is_time(set_ns + 1, set_ns)


def test_a_shared_directory_is_marked_in_its_identity() -> None:
    assert is_shared(shared(NOTHING)) and not is_shared(NOTHING)


# -- the log -------------------------------------------------------------------------------------


def test_a_conflict_name_is_short_enough_and_names_node_journal_and_change() -> None:
    log = SourceLog("0123456789abcdef", "node")
    assert log.conflict_name(b"a", 7) == b"a.monarch-conflict-node-012345-7"
    long = log.conflict_name(b"a" * 255, 7)
    assert len(long) == 255 and long.endswith(b"-7")
    log.note_conflict(b"d/a", "was changed", kept=long)
    assert log.conflicts[0].kept == b"d/" + long
    log.forget()
    assert (list(log.conflicts), log.conflict_count) == ([], 0)


def test_a_missing_feature_of_the_source_is_reported_once_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = SourceLog("t", "node")
    for number in (errno.EPERM, errno.EPERM, errno.ENOTSUP):
        log.note_refused("modes", OSError(number, ""), b"a")
    assert caplog.text.count("it does not take modes") == 2


def test_dropped_attributes_are_kept_until_they_are_set_or_their_file_is_removed() -> None:
    log = SourceLog("t", "node")
    for index in range(150):
        log.note_dropped(b"%d" % index, b"user.x", "why")
    assert len(log.dropped_xattrs) == 100
    log.note_taken(b"149", b"user.x")
    log.note_removed(b"148")
    assert (b"147", b"user.x") in log.dropped_xattrs
    assert len(log.dropped_xattrs) == 98


# -- names in directories --------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("links", [True, False])
def test_a_rename_replaces_nothing_whatever_the_file_system_supports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: bool, links: bool
) -> None:
    from monarch.posix import files

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not flag:
        monkeypatch.setattr(files, "_RENAME_NOREPLACE", 1 << 30)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "old").write_bytes(b"old")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(FileExistsError):
            rename_new(fd, b"new", b"old")
        rename_new(fd, b"new", b"other")
        assert status_at(fd, b"new") is None
    finally:
        os.close(fd)
    sync_path(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "old": b"old",
        "other": b"new",
    }


def test_a_directory_that_others_removed_is_made_again_with_the_rights_above_it(rig: Rig) -> None:
    (rig.root / "d").mkdir(mode=0o750)
    with rig.directories() as directories:
        with pytest.raises(FileNotFoundError):
            directories.of(b"d/e/a", None)
        fd, name = directories.of(b"d/e/a", None, make=True)
        assert name == b"a"
        assert os.fstat(fd).st_ino == (rig.root / "d/e").stat().st_ino
        assert directories.of(b"d/e/b", None)[0] == fd
        assert directories.of(b"", None)[1] == b"."
        directories.sync()
    assert stat.S_IMODE((rig.root / "d/e").stat().st_mode) == 0o750
    assert rig.conflict().path == b"d/e"
    with pytest.raises(OSError):
        os.fstat(fd)


@pytest.mark.parametrize("groups", [(), (1777,)], ids=["in no group", "in the group"])
def test_a_directory_that_a_user_makes_again_is_the_users(
    rig: Rig, caplog: pytest.LogCaptureFixture, groups: tuple[int, ...]
) -> None:
    """The source takes owners; only the user may not give a directory away."""
    require_root()
    os.chown(rig.root, 0, 1777)
    rig.root.chmod(0o777)
    with rig.directories() as directories:
        directories.of(b"d/a", Credentials(1234, 1235, groups), make=True)
    made = (rig.root / "d").stat()
    assert (made.st_uid, made.st_gid) == (1234, 1777 if groups else 1235)
    assert stat.S_IMODE(made.st_mode) == 0o777
    assert "does not take" not in caplog.text
    assert rig.conflict().path == b"d"


# -- temporaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_is_a_link_or_a_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    (rig.root / "a").write_bytes(b"bytes")
    (rig.root / "a").chmod(0o640)
    os.utime(rig.root / "a", ns=(5, 6))
    (rig.root / "b").write_bytes(b"older")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with rig.directories() as directories:
        fd, name = directories.of(b"a", None)
        with closing_fd(os.open(name, ITSELF, dir_fd=fd)) as it:
            rig.temporaries.link_over(it, fd, b"b", 7, None)
    one, two = (rig.root / "a").stat(), (rig.root / "b").stat()
    assert (one.st_ino == two.st_ino) == links
    assert (two.st_mode, two.st_mtime_ns, two.st_size) == (one.st_mode, 6, 5)
    assert sorted(os.listdir(rig.root)) == ["a", "b"]


@pytest.mark.fault("U7")
@pytest.mark.promise(77)
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("bits", [0o644, 0o4775])
def test_a_user_gets_no_copy_in_the_place_of_a_link_that_the_user_may_not_make(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, bits: int, links: bool
) -> None:
    """A source without hard links refuses them with the same error. A copy there is the user's, and
    does not run with the user's rights."""
    require_root()
    rig.root.chmod(0o777)
    (rig.root / "a").write_bytes(b"bytes")
    os.chown(rig.root / "a", 1234, 1234)
    (rig.root / "a").chmod(bits)
    user, link = Credentials(1235, 1235), os.link

    def refuse(path: bytes, to: bytes, **kwargs: Any) -> None:
        # Whatever fs.protected_hardlinks is.
        if not links or ctypes.CDLL(None).setfsuid(-1):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        link(path, to, **kwargs)

    monkeypatch.setattr(os, "link", refuse)
    with rig.directories() as directories:
        fd, name = directories.of(b"a", None)
        with closing_fd(os.open(name, ITSELF, dir_fd=fd)) as it:
            if links:
                with pytest.raises(PermissionError):
                    rig.temporaries.link_over(it, fd, b"b", 7, user)
            else:
                rig.temporaries.link_over(it, fd, b"b", 7, user)
    if links:
        assert os.listdir(rig.root) == ["a"]
    else:
        copy = (rig.root / "b").stat()
        assert (copy.st_uid, stat.S_IMODE(copy.st_mode)) == (1235, bits & 0o777)


def test_only_temporary_files_of_this_journal_are_swept(rig: Rig) -> None:
    (rig.root / "d").mkdir()
    names = [rig.temporaries.part(1), rig.temporaries.part(1, through=True), b".monarch-other-1"]
    for name in [*names, rig.temporaries.link(1)]:
        (rig.root / "d" / os.fsdecode(name)).touch()
    with rig.directories() as directories:
        fd, name = directories.of(b"d", None)
        assert rig.temporaries.sweep(fd, name)
        assert not rig.temporaries.sweep(fd, name)
    assert os.listdir(rig.root / "d") == [".monarch-other-1"]


# -- attributes ------------------------------------------------------------------------------------


def test_an_attribute_that_is_refused_is_left_out_and_the_others_are_set(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    for name in ("chown", "setxattr", "chmod"):
        monkeypatch.setattr(os, name, refuse)
    fd = os.open(rig.root / "a", os.O_RDWR | os.O_CREAT, 0o600)
    op = Op(kind="content", path=b"a", uid=77, mode=0o755, mtime_ns=9, xattrs={b"user.x": b"y"})
    try:
        rig.attributes.set(fd, op)
        found = os.fstat(fd)
    finally:
        os.close(fd)
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o600, 9)
    assert list(rig.log.dropped_xattrs) == [(b"a", b"user.x")]


def test_a_failure_of_the_disk_is_no_missing_support(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "chmod", fail)
    fd = os.open(rig.root / "a", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with pytest.raises(OSError) as raised:
            rig.attributes.set(fd, Op(kind="attr", path=b"a", mode=0o755))
    finally:
        os.close(fd)
    assert raised.value.errno == errno.EIO


def test_a_change_of_attributes_goes_to_the_name_that_is_the_file_s_own(rig: Rig) -> None:
    for name in ("a", "b"):
        (rig.root / name).write_bytes(b"")
    expected = Expected(known=rig.identity("b"), is_file=True)
    op = Op(kind="attr", path=b"a", paths=(b"a", b"b"), mode=0o711, strict=True)
    with rig.directories() as directories:
        assert rig.entries.change_attributes(directories, op, expected) == rig.identity("b")
    assert stat.S_IMODE((rig.root / "b").stat().st_mode) == 0o711
    assert stat.S_IMODE((rig.root / "a").stat().st_mode) != 0o711


def test_times_of_bytes_of_others_stay(rig: Rig) -> None:
    (rig.root / "a").write_bytes(b"")
    known = rig.identity("a")
    (rig.root / "a").write_bytes(b"of others")
    op = Op(kind="attr", path=b"a", mode=0o711, mtime_ns=5, strict=True)
    with rig.directories() as directories:
        assert rig.entries.change_attributes(directories, op, Expected(known=known)) is not None
    found = (rig.root / "a").stat()
    assert stat.S_IMODE(found.st_mode) == 0o711 and found.st_mtime_ns != 5
    assert rig.conflict().why == "was changed there by others: its times stay"


@pytest.mark.parametrize(("will_come", "count"), [(False, 1), (True, 0)])
def test_a_missing_entry_is_reported_unless_its_content_is_still_to_come(
    rig: Rig, caplog: pytest.LogCaptureFixture, will_come: bool, count: int
) -> None:
    op = Op(kind="attr", path=b"d/a", mode=0o700, strict=True)
    with rig.directories() as directories:
        assert (
            rig.entries.change_attributes(directories, op, Expected(), will_come=will_come) is None
        )
    assert caplog.text.count("is not there to be changed") == count


# -- contents --------------------------------------------------------------------------------------


def content(*paths: bytes, number: int = 7) -> Op:
    return Op(
        kind="content",
        path=paths[0],
        paths=paths,
        object=number,
        size=5,
        mode=0o640,
        mtime_ns=5,
        strict=True,
    )


def publish(rig: Rig, op: Op, expected: Expected, meanwhile: Callable[[], object]) -> Identity:
    place = Place()
    fd = rig.staged.open_place(op, place, expected, make=True)
    try:
        os.write(fd, b"bytes")
        rig.staged.apply_attributes(fd, op, place, expected)
    finally:
        os.close(fd)
    meanwhile()
    with rig.directories() as directories:
        return rig.publishing.publish(directories, op, 5, place, expected)


def test_a_content_gets_all_its_names_and_attributes(rig: Rig) -> None:
    identity = publish(rig, content(b"a", b"d/b"), Expected(seq=3), lambda: None)
    assert identity == rig.identity("a") == rig.identity("d/b")
    found = (rig.root / "a").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o640, 5)
    assert sorted(os.listdir(rig.root)) == ["a", "d"]


@pytest.mark.finding("W10")
def test_a_content_keeps_the_attributes_of_the_version_that_it_replaces(rig: Rig) -> None:
    (rig.root / "a").write_bytes(b"older")
    (rig.root / "a").chmod(0o604)
    expected = Expected(known=rig.identity("a"), is_file=True)
    publish(rig, content(b"a"), expected, lambda: None)
    assert (rig.root / "a").read_bytes() == b"bytes"
    assert stat.S_IMODE((rig.root / "a").stat().st_mode) == 0o604


def test_a_content_is_kept_beside_the_file_of_others(rig: Rig) -> None:
    (rig.root / "a").write_bytes(b"of others")
    identity = publish(rig, content(b"a", b"b"), Expected(seq=3), lambda: None)
    kept = os.fsdecode(rig.conflict().kept)
    assert kept == "a.monarch-conflict-node-012345-3"
    assert (rig.root / "a").read_bytes() == b"of others"
    assert rig.identity(kept) == rig.identity("b") == identity


def test_a_second_name_is_not_taken_from_a_file_of_others_with_the_number_of_the_older_version(
    rig: Rig,
) -> None:
    (rig.root / "b").write_bytes(b"of others")
    older = replace(rig.identity("b"), mtime_ns=1)
    publish(rig, content(b"a", b"b"), Expected(seq=3, known=older, is_file=True), lambda: None)
    assert (rig.root / "b").read_bytes() == b"of others"
    kept = os.fsdecode(rig.conflict().kept)
    assert kept == "b.monarch-conflict-node-012345-3"
    assert rig.identity(kept) == rig.identity("a")


@pytest.mark.parametrize("change", ["appears", "is changed", "staged file is cut"])
def test_a_place_that_changes_meanwhile_is_left_and_staged_for_again(rig: Rig, change: str) -> None:
    expected = Expected()
    if change == "is changed":
        (rig.root / "a").write_bytes(b"older")
        expected = Expected(known=rig.identity("a"), is_file=True)

    def meanwhile() -> None:
        if change == "staged file is cut":
            os.truncate(rig.root / os.fsdecode(rig.temporaries.part(7)), 0)
        else:
            (rig.root / "a").write_bytes(b"of others")

    with pytest.raises(OSError) as raised:
        publish(rig, content(b"a"), expected, meanwhile)
    assert raised.value.errno == errno.EAGAIN
    if change != "staged file is cut":
        assert (rig.root / "a").read_bytes() == b"of others"
    with rig.directories() as directories:
        rig.publishing.discard(directories, content(b"a"))
    assert not list(rig.root.glob(".monarch-*"))


def test_the_kind_of_a_place_follows_from_the_known_state(rig: Rig) -> None:
    (rig.root / "d").mkdir()
    (rig.root / "a").write_bytes(b"")
    os.mkfifo(rig.root / "f")
    known, fifo = rig.identity("a"), rig.identity("f")
    # An older version that the drain has removed: the source has used its number again.
    older, as_fifo = replace(known, mtime_ns=1), replace(fifo, mtime_ns=1)
    kinds = [
        (b"b", Expected()),
        (b"a", Expected(known=known)),
        (b"a", Expected(over=(known,))),
        (b"a", Expected()),
        (b"d", Expected(known=rig.identity("d"))),
        (b"a", Expected(known=older, over=(known,), is_file=True)),
        (b"f", Expected(known=as_fifo, over=(fifo,), is_file=True)),
    ]
    with rig.directories() as directories:
        found = []
        for path, expected in kinds:
            fd, name = directories.of(path, None)
            found.append(kind_of_place(fd, name, content(path), expected)[0])
    assert found == ["new", "over", "replace", "conflict", "conflict", "replace", "replace"]


def test_a_file_is_grown_in_the_version_that_is_known_and_no_other(rig: Rig) -> None:
    (rig.root / "a").write_bytes(b"byt")
    op, expected = content(b"a"), Expected(known=rig.identity("a"), is_file=True)
    opened = rig.publishing.open_to_grow(op, expected, 3)
    assert opened is not None and opened[1] is None
    os.pwrite(opened[0], b"es", 3)
    os.close(opened[0])
    assert rig.publishing.open_to_grow(op, expected, 3) is None
    assert rig.publishing.open_to_grow(content(b"missing"), expected, 3) is None


@pytest.mark.promise(351)
def test_a_file_that_its_user_may_only_read_is_grown_with_the_rights_of_that_user(rig: Rig) -> None:
    """The owner could allow the write, so the daemon opens the file."""
    (rig.root / "a").write_bytes(b"byt")
    os.chown(rig.root / "a", 1001, 1001)
    (rig.root / "a").chmod(0o444)
    alice = Credentials(1001, 1001)
    op = replace(content(b"a"), by=alice)
    opened = rig.publishing.open_to_grow(op, Expected(known=rig.identity("a"), is_file=True), 3)
    assert opened is not None and opened[1] == alice
    os.close(opened[0])


@pytest.mark.promise(88)
def test_a_program_is_not_opened_to_be_grown(rig: Rig) -> None:
    (rig.root / "p").write_bytes(b"byt")
    (rig.root / "p").chmod(0o4755)
    expected = Expected(known=rig.identity("p"), is_file=True)
    assert rig.publishing.open_to_grow(content(b"p"), expected, 3) is None


def test_bytes_that_the_source_has_get_their_time_and_their_other_names(rig: Rig) -> None:
    (rig.root / "a").write_bytes(b"bytes")
    (rig.root / "a").chmod(0o4750)
    expected = Expected(known=rig.identity("a"), is_file=True)
    with rig.directories() as directories:
        identity = rig.publishing.grown(directories, content(b"a", b"b"), expected, tried=True)
    assert identity == rig.identity("b")
    found = (rig.root / "a").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o750, 5)
    with rig.directories() as directories:
        assert rig.publishing.look_at_same(directories, content(b"a"), Expected()) is None
        assert rig.publishing.look_at_same(directories, content(b"no"), expected) is None


# -- names -----------------------------------------------------------------------------------------


def test_every_change_of_a_name_may_be_made_twice(rig: Rig) -> None:
    by = Credentials(os.geteuid(), os.getegid())
    ops = [
        Op(kind="mkdir", path=b"d", mode=0o750, by=by, strict=True),
        Op(kind="symlink", path=b"d/s", to=b"a", by=by, strict=True),
        Op(kind="mknod", path=b"d/f", mode=stat.S_IFIFO | 0o600, by=by, strict=True),
        Op(kind="link", path=b"d/f", to=b"d/g", by=by),
    ]
    with rig.directories() as directories:
        for op in ops:
            make = getattr(rig.entries, op.kind)
            first = make(directories, op, Expected())
            if op.kind != "mkdir":
                assert make(directories, op, Expected()).source_ino == first.source_ino
        moved = Op(kind="rename", path=b"d/g", to=b"d/h", by=by)
        for _ in range(2):
            assert (
                rig.entries.rename(directories, moved, Expected(), Expected(), Place()) is not None
            )
        for name in (b"d/s", b"d/f", b"d/h"):
            for _ in range(2):
                unlink = Op(kind="unlink", path=name, by=by)
                rig.entries.unlink(directories, unlink, Expected(), Place())
        (rig.root / "d" / os.fsdecode(rig.temporaries.part(5))).touch()
        for _ in range(2):
            rig.entries.rmdir(directories, Op(kind="rmdir", path=b"d", by=by), Expected())
    assert os.listdir(rig.root) == []
    assert rig.log.conflict_count == 0


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_link_that_a_killed_mount_has_made_gets_its_time(rig: Rig, is_finished: bool) -> None:
    """``is_finished``: it has all attributes since, and another time by its owner."""
    op = Op(kind="symlink", path=b"s", to=b"a", mtime_ns=10**18, strict=True)
    os.symlink(b"a", rig.root / "s")
    if is_finished:
        os.utime(rig.root / "s", ns=(5, 5), follow_symlinks=False)
    with rig.directories() as directories:
        assert rig.entries.symlink(directories, op, Expected()) == rig.identity("s")
    assert os.lstat(rig.root / "s").st_mtime_ns == (5 if is_finished else 10**18)


@pytest.mark.parametrize("place", ["file", "link"])
@pytest.mark.parametrize("kind", ["rename", "link", "attr"])
def test_an_entry_whose_directory_others_have_replaced_is_gone(
    rig: Rig, kind: Kind, place: str
) -> None:
    (rig.root / "elsewhere").mkdir()
    (rig.root / "elsewhere/a").write_bytes(b"")
    if place == "file":
        (rig.root / "d").write_bytes(b"")
    else:
        (rig.root / "d").symlink_to("elsewhere")
    known = Expected(known=rig.identity("elsewhere/a"), is_file=True)
    op = Op(kind=kind, path=b"d/a", to=b"b", mode=0o600, object=1, strict=True)
    with rig.directories() as directories:
        if kind == "rename":
            found = rig.entries.rename(directories, op, known, Expected(), Place())
        elif kind == "link":
            found = rig.entries.link(directories, op, known)
        else:
            found = rig.entries.change_attributes(directories, op, known)
    assert found is None
    assert not (rig.root / "b").exists()
    assert stat.S_IMODE((rig.root / "elsewhere/a").stat().st_mode) != 0o600


def test_a_name_that_others_have_taken_is_neither_removed_nor_replaced(rig: Rig) -> None:
    for name in ("a", "b"):
        (rig.root / name).write_bytes(name.encode())
    known = Expected(seq=4, known=rig.identity("a"), is_file=True)
    other = Expected(seq=5, known=NOTHING)
    with rig.directories() as directories:
        unlink = Op(kind="unlink", path=b"a", strict=True)
        rig.entries.unlink(directories, unlink, other, Place())
        rename = Op(kind="rename", path=b"a", to=b"b", strict=True)
        assert rig.entries.rename(directories, rename, other, Expected(), Place()) is None
        assert rig.entries.rename(directories, rename, known, Expected(), Place()) is not None
        link = Op(kind="link", path=b"b", to=b"c", strict=True)
        assert rig.entries.link(directories, link, other) is None
    assert sorted(os.listdir(rig.root)) == ["b", "b.monarch-conflict-node-012345-4"]
    assert [each.path for each in rig.log.conflicts] == [b"a", b"a", b"b", b"b"]


# -- several steps in one call -------------------------------------------------------------------


def test_steps_end_at_the_first_that_fails_and_those_before_it_are_made(rig: Rig) -> None:
    writer = SourceWriter(rig.source, "0123456789abcdef", "node")
    (rig.root / "file").write_bytes(b"")

    def made(path: bytes) -> Callable[[OpenDirectories], Identity]:
        op = Op(kind="mkdir", path=path, mode=0o700)
        return lambda directories: writer.entries.mkdir(directories, op, Expected())

    results, error = writer.carry_out([made(b"one"), made(b"file"), made(b"two")])
    assert [each.source_ino for each in results if each] == [rig.identity("one").source_ino]
    assert error is not None and error.errno == errno.EEXIST
    assert sorted(os.listdir(rig.root)) == ["file", "one"]
