"""Changes that were made in a directory before its mode was changed, or by another name."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from monarch.posix.credentials import Credentials
from monarch.tiers.source import Source
from monarch.writeback.expected import Expected, SourceLog
from monarch.writeback.op import Op
from monarch.writeback.source_attributes import SourceAttributes
from monarch.writeback.source_contents import Place
from monarch.writeback.source_directories import OpenDirectories, Temporaries
from monarch.writeback.source_entries import SourceEntries
from tests.conftest import let_others_in
from tests.writeback.remounts import Rig, Session

ALICE = Credentials(1001, 1001)
BOB = Credentials(1002, 1002)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    for name in ("closed", "open"):
        given(rig.source / name, ALICE, 0o755)
    let_others_in(rig.source)
    return rig


def given(directory: Path, owner: Credentials, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    os.chown(directory, owner.uid, owner.gid)


async def symlink(session: Session, path: bytes) -> None:
    mode = stat.S_IFLNK | 0o777
    await session.writing.make(*session.at(path), mode=mode, target=b"target", by=ALICE)


async def link(session: Session, path: bytes, to: bytes, by: Credentials) -> None:
    await session.writing.link(session.ino(path), *session.at(to), by=by)


async def close(session: Session, path: bytes, by: Credentials) -> None:
    await session.front.attributes.change(session.ino(path), mode=0, by=by)


async def test_a_link_is_made_of_an_entry_with_another_name_in_a_closed_directory(rig: Rig) -> None:
    async with rig.mount() as session:
        await symlink(session, b"closed/s")
        await link(session, b"closed/s", b"open/s", ALICE)
        await close(session, b"closed", ALICE)
        # A program names it "open/s".
        await link(session, b"closed/s", b"open/t", ALICE)
        await session.at_rest()
        assert session.write_back.refusals.list() == []
        await session.end()
    assert os.lstat(rig.source / "open/t").st_ino == os.lstat(rig.source / "closed/s").st_ino


@pytest.mark.parametrize("is_reached", [True, False])
async def test_a_link_needs_one_name_that_its_user_may_reach(rig: Rig, is_reached: bool) -> None:
    given(rig.source / "bob", BOB, 0o755)
    (rig.source / "closed/f").write_bytes(b"bytes")
    (rig.source / "closed/f").chmod(0o666)
    os.link(rig.source / "closed/f", rig.source / "open/f")
    async with rig.mount() as session:
        # Others close it at the source, of which the mount does not know.
        (rig.source / "closed").chmod(0o700)
        if not is_reached:
            (rig.source / "open").chmod(0o700)
        await link(session, b"closed/f", b"bob/f", BOB)
        await session.at_rest()
        refused = [each.kind for each in session.write_back.refusals.list()]
        assert (refused == []) is is_reached, refused
    assert (rig.source / "bob/f").exists() == is_reached


async def test_a_file_gets_its_name_in_a_directory_that_its_owner_closed_since(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        made = await session.writing.create(*session.at(b"open/f"), mode=0o644, by=ALICE)
        await session.files.write(made.ino, 0, b"12345")
        await link(session, b"open/f", b"closed/f", ALICE)
        await session.files.write(made.ino, 0, b"bytes")
        await close(session, b"closed", ALICE)
        session.files.release(made.ino)
        await session.end(abandoned=True)
    async with rig.mount() as session:
        await session.at_rest()
        assert session.write_back.refusals.list() == []
    assert (rig.source / "closed/f").stat().st_ino == (rig.source / "open/f").stat().st_ino
    assert (rig.source / "open/f").read_bytes() == b"bytes"


async def test_the_owner_of_an_open_file_changes_it_below_a_directory_that_others_closed(
    rig: Rig,
) -> None:
    given(rig.source / "top", BOB, 0o755)
    given(rig.source / "top/below", BOB, 0o755)
    for name, owner in (("own", ALICE), ("other", BOB)):
        (rig.source / "top/below" / name).write_bytes(b"bytes")
        (rig.source / "top/below" / name).chmod(0o666)
        os.chown(rig.source / "top/below" / name, owner.uid, owner.gid)
    async with rig.mount() as session:
        attributes = session.front.attributes
        own, other = (session.ino(b"top/below/%s" % name) for name in (b"own", b"other"))
        await close(session, b"top", BOB)
        await attributes.change(own, mode=0o600, by=ALICE)
        await session.at_rest()
        assert session.write_back.refusals.list() == []
        # The source decides about the entries of others.
        await attributes.change(other, mtime_ns=5, by=ALICE)
        await session.at_rest()
        assert [each.path for each in session.write_back.refusals.list()] == [b"top/below/other"]
    assert stat.S_IMODE((rig.source / "top/below/own").stat().st_mode) == 0o600


@pytest.mark.promise(65, 80)
@pytest.mark.parametrize("change", [{"mode": 0o600}, {"uid": 0, "gid": 0, "mode": 0o600}])
async def test_the_bytes_of_a_user_come_before_the_change_that_ends_the_right_to_write_them(
    rig: Rig, change: dict[str, int]
) -> None:
    file = rig.source / "open/f"
    file.write_bytes(b"old")
    os.chown(file, ALICE.uid, ALICE.gid)
    file.chmod(0o666)
    async with rig.mount() as session:
        ino = session.ino(b"open/f")
        # Another process keeps the file open, so the release of the writer records nothing.
        for user in (ALICE, BOB):
            await session.writing.open(ino, os.O_RDWR, user)
        await session.files.write(ino, 0, b"new")
        session.files.release(ino)
        await session.front.attributes.change(ino, **change, by=Credentials(0, 0))
        session.files.release(ino)
        await session.at_rest()
        assert session.write_back.refusals.list() == []
        await session.end()
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.promise(80)
@pytest.mark.parametrize("works", [True, False], ids=["same mount", "next mount"])
@pytest.mark.parametrize("may_make", [True, False], ids=["open", "closed"])
async def test_another_user_writes_a_new_file_where_only_its_maker_may_make_files(
    rig: Rig, works: bool, may_make: bool
) -> None:
    async with rig.mount(works=works) as session:
        made = await session.writing.create(*session.at(b"open/f"), mode=0o666, by=ALICE)
        await session.writing.open(made.ino, os.O_RDWR, BOB)
        await session.files.write(made.ino, 0, b"bytes")
        if not may_make:
            # Others give the directory away at the source, of which the mount does not know.
            os.chown(rig.source / "open", 0, 0)
        session.files.release(made.ino)
        session.files.release(made.ino)
        if not works:
            session.kill()
        else:
            await session.at_rest()
            refused = session.write_back.refusals.list()
    if not works:
        async with rig.mount() as session:
            await session.at_rest()
            refused = session.write_back.refusals.list()
    file = rig.source / "open/f"
    assert [each.path for each in refused] == ([] if may_make else [b"open/f"])
    assert file.exists() == may_make
    if may_make:
        assert file.read_bytes() == b"bytes"
        assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (ALICE.uid, 0o666)


@pytest.mark.promise(80)
async def test_a_new_file_that_another_user_has_renamed_is_not_made_with_the_rights_of_its_maker(
    rig: Rig,
) -> None:
    """The maker may make files there, and has not made this one there."""
    given(rig.source / "both", ALICE, 0o777)
    async with rig.mount(works=False) as session:
        made = await session.writing.create(*session.at(b"both/f"), mode=0o666, by=ALICE)
        await session.writing.open(made.ino, os.O_RDWR, BOB)
        await session.files.write(made.ino, 0, b"older")
        # The mount has not asked the kernel, which would not let this user do that.
        await session.writing.rename(*session.at(b"both/f"), *session.at(b"open/f"), 0, by=BOB)
        await session.files.write(made.ino, 0, b"bytes")
        for _ in range(2):
            session.files.release(made.ino)
        session.kill()
    async with rig.mount() as session:
        await session.at_rest()
        assert b"open/f" in {each.path for each in session.write_back.refusals.list()}
    assert not (rig.source / "open/f").exists()


@pytest.mark.parametrize("kind", ["mkdir", "symlink", "mknod", "link", "rename", "unlink", "rmdir"])
def test_a_change_is_made_twice_though_its_directory_was_closed_after_the_first_time(
    tmp_path: Path, kind: str
) -> None:
    """As after a crash that has lost the marks of both changes."""
    source = tmp_path / "source"
    source.mkdir()
    let_others_in(source)
    given(source / "d", ALICE, 0o755)
    os.symlink("target", source / "d/file")
    os.chown(source / "d/file", ALICE.uid, ALICE.gid, follow_symlinks=False)
    given(source / "d/below", ALICE, 0o755)
    more = {
        "mkdir": {"path": b"d/new", "mode": 0o755},
        "symlink": {"path": b"d/new", "to": b"target"},
        "mknod": {"path": b"d/new", "mode": stat.S_IFIFO | 0o600},
        "link": {"path": b"d/file", "to": b"d/new"},
        "rename": {"path": b"d/file", "to": b"d/new"},
        "unlink": {"path": b"d/file"},
        "rmdir": {"path": b"d/below"},
    }
    log = SourceLog("0123456789abcdef", "node")
    attributes = SourceAttributes(log)
    entries = SourceEntries(attributes, Temporaries("0123456789abcdef", log), log)
    op = Op(kind=kind, by=ALICE, **more[kind])
    found = []
    for _ in range(2):
        with closing(OpenDirectories(Source(os.fsencode(source)), attributes, log)) as directories:
            last = {"rename": (Expected(), Place()), "unlink": (Place(),)}.get(kind, ())
            getattr(entries, kind)(directories, op, Expected(), *last)
        (source / "d").chmod(0o000)
        found.append({path.name: path.lstat().st_ino for path in (source / "d").iterdir()})
    assert found[0] == found[1]
    assert log.conflict_count == 0
