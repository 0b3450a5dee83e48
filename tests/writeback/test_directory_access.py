"""The access to directories whose modes, owners or lists others change while they are mounted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.posix.acl import ACCESS, stored
from monarch.writeback import directory_access
from monarch.writeback.directory_access import directory_found
from tests.users import lists
from tests.writeback.remount_histories import how
from tests.writeback.remounts import Rig, Session
from tests.writeback.test_names_of_others import until, use

pytestmark = [
    pytest.mark.promise(148),
    pytest.mark.fault("N5"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away"),
]

Clock = trio.testing.MockClock
# The owner of the closed directories, and a list that lets one other user in.
OWNER = 1001
LIST = lists.packed(7, 0, 5, 0, {1002: 5}, {})


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "p/d").mkdir(parents=True)
    (rig.source / "p/d/old").write_bytes(b"old")
    # So that the mount has the kernel check lists.
    (rig.source / "listed").touch()
    os.setxattr(rig.source / "listed", ACCESS, lists.packed(6, 4, 6, 4, {1002: 6}, {}))
    return rig


def access(session: Session, path: bytes) -> tuple[int, int, bytes]:
    ino = session.ino(path)
    now = session.names.attributes(ino)
    return stat.S_IMODE(now.mode), now.uid, session.names.acls(ino).access


async def look(session: Session, path: bytes) -> None:
    """Compare one directory with the source."""
    assert session.write_back.others is not None
    await session.write_back.others._look(session.ino(path))


@pytest.mark.parametrize("kind", ["closed", "replaced", "above", "of others", "made here"])
async def test_a_file_of_others_in_a_closed_directory_is_not_opened(
    rig: Rig, clock: Clock, kind: str
) -> None:
    async with rig.mount() as session:
        path = b"p/new" if kind in ("of others", "made here") else b"p/d"
        closed = b"p" if kind == "above" else path
        if kind == "of others":
            (rig.source / "p/new").mkdir()
            await look(session, b"p")
        elif kind == "made here":
            await session.mkdir(path)
            await session.drained()
        assert access(session, closed) == (0o755, 0, b"")
        there = rig.source / os.fsdecode(closed)
        if kind == "replaced":
            there.rename(rig.source / "p/earlier")
            there.mkdir()
        there.chmod(0o700)
        os.chown(there, OWNER, OWNER)
        (rig.source / os.fsdecode(path) / "private").write_bytes(b"private")
        await look(session, path)
        assert session.shown()[path + b"/private"].content == b"private"
        assert access(session, closed) == (0o700, OWNER, b"")
        # The owner lets others in again.
        os.setxattr(there, ACCESS, LIST)
        await look(session, closed)
        assert access(session, closed) == (0o750, OWNER, stored(LIST))


async def test_a_directory_that_is_open_again_is_shown_so_although_it_is_not_used(
    rig: Rig, clock: Clock
) -> None:
    async with rig.mount() as session:
        (rig.source / "p").chmod(0o700)
        (rig.source / "p/d/new").touch()
        use(session, b"p/d")
        await until(lambda: access(session, b"p")[0] == 0o700)
        await trio.sleep(3600)
        (rig.source / "p").chmod(0o755)
        await until(lambda: access(session, b"p")[0] == 0o755)


@pytest.mark.promise(128)
@pytest.mark.parametrize("remount", ["same", "lost state"])
async def test_a_mode_that_was_set_on_the_mount_stays_until_the_source_has_it(
    rig: Rig, clock: Clock, remount: str
) -> None:
    async with rig.mount(works=False) as session:
        await session.chmod(b"p/d", 0o711)
        await session.front.recorder.sync()
    async with rig.mount(works=False, **how(remount, rig)) as session:
        (rig.source / "p/d/new").write_bytes(b"new")
        await look(session, b"p/d")
        assert b"p/d/new" in session.shown()
        assert access(session, b"p/d")[0] == 0o711
    async with rig.mount() as session:
        await session.drained()
        await look(session, b"p/d")
        assert access(session, b"p/d")[0] == 0o711
        (rig.source / "p/d").chmod(0o700)
        await look(session, b"p/d")
        assert access(session, b"p/d")[0] == 0o700


@pytest.mark.parametrize("is_above", [False, True])
async def test_a_directory_of_others_opens_nothing_that_waits_in_the_one_that_it_has_replaced(
    rig: Rig, clock: Clock, is_above: bool
) -> None:
    closed, path = (b"p", b"p/d") if is_above else (b"p/d", b"p/d")
    there = rig.source / os.fsdecode(closed)
    there.chmod(0o700)
    async with rig.mount(works=False) as session:
        await session.write(path + b"/private", b"private")
        await session.front.recorder.sync()
        there.rename(rig.source / "earlier")
        (rig.source / os.fsdecode(path)).mkdir(parents=True)
        os.chown(there, OWNER, OWNER)
        (rig.source / os.fsdecode(path) / "theirs").write_bytes(b"theirs")
        await look(session, path)
        assert access(session, closed) == (0o700, 0, b"")
        assert path + b"/theirs" not in session.shown()
    async with rig.mount() as session:
        await session.drained()
        await look(session, path)
        # The source has it there now.
        assert access(session, closed) == (0o755, OWNER, b"")
        assert session.shown()[path + b"/theirs"].content == b"theirs"
        assert (rig.source / os.fsdecode(path) / "private").read_bytes() == b"private"
        await session.chmod(closed, 0o711)
        await session.drained()
    # As for any other directory that others have made.
    assert stat.S_IMODE(there.stat().st_mode) == 0o711


async def test_a_mode_that_was_set_during_a_comparison_stays(rig: Rig, clock: Clock) -> None:
    async with rig.mount() as session:
        others = session.write_back.others
        assert others is not None
        (rig.source / "p/d").chmod(0o750)
        before = others._access.shown(session.ino(b"p/d"))
        fd = os.open(rig.source / "p/d", os.O_RDONLY)
        found = directory_found(fd)
        os.close(fd)
        await session.chmod(b"p/d", 0o711)
        await session.drained()
        others._access.show(before, found)
        assert access(session, b"p/d")[0] == 0o711


async def test_a_daemon_that_is_not_root_leaves_users_what_they_have_made(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the source all belongs to the user of the daemon."""
    async with rig.mount() as session:
        await session.mkdir(b"p/new", 0o700)
        await session.drained()
        os.chown(rig.source / "p/new", OWNER, OWNER)
        (rig.source / "p/new/more").touch()
        with monkeypatch.context() as patched:
            patched.setattr(directory_access, "can_act_as_others", lambda: False)
            await look(session, b"p/new")
            assert access(session, b"p/new") == (0o700, 0, b"")
        (rig.source / "p/new/even more").touch()
        await look(session, b"p/new")
        assert access(session, b"p/new") == (0o700, OWNER, b"")
