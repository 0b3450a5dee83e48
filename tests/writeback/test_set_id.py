"""Writes remove the set-ID bits of a file: on the mount, and at the source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.errors import Refused
from monarch.posix.credentials import ROOT, Credentials
from monarch.types import Ino
from monarch.writeback.open_file import NO_FAST_WRITES
from tests.equipment.remounts import tree_of
from tests.writeback.remount_histories import prepared
from tests.writeback.remounts import Rig, Session

USER = Credentials(1234, 1234)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock) -> Rig:
    return prepared(tmp_path, monkeypatch)


class Datapath:
    """A datapath that serves nothing. ``set_id`` has the last report of each inode."""

    def __init__(self) -> None:
        self.set_id: dict[Ino, bool] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(NO_FAST_WRITES, name)

    def know_set_id(self, ino: Ino, *, has_set_id: bool) -> None:
        self.set_id[ino] = has_set_id


def with_datapath(session: Session) -> Datapath:
    made = Datapath()
    session.front.opens.has_datapath = True
    session.front.opens.fast = cast(Any, made)
    return made


@pytest.mark.promise(88)
async def test_a_write_of_a_user_past_the_pages_of_the_kernel_removes_the_bits(rig: Rig) -> None:
    async with rig.mount() as session:
        datapath = with_datapath(session)
        for path in (b"d/a", b"d/new"):
            ino = await session.open(path)
            await session.files.write(ino, 0, b"before")
            await session.chmod(path, 0o755)
            assert datapath.set_id[ino] is False
            await session.chmod(path, 0o6755)
            assert datapath.set_id[ino] is True
            # Root keeps the bits.
            await session.files.write(ino, 0, b"root")
            assert session.shown()[path].mode == 0o6755
            for _ in range(2):
                await session.files.write(ino, 0, b"user", removes_set_id=True)
                assert session.shown()[path].mode == 0o755
                assert datapath.set_id[ino] is False
            # Also without the execute bit of the group, which root may set later.
            await session.chmod(path, 0o6745)
            await session.files.write(ino, 0, b"user", removes_set_id=True)
            assert session.shown()[path].mode == 0o745
            session.files.release(ino)
        await session.drained()
        await session.end()
    assert {tree_of(rig.source)[path].mode for path in (b"d/a", b"d/new")} == {0o745}


@pytest.mark.promise(88)
@pytest.mark.parametrize("is_unlinked", [False, True])
async def test_nothing_is_written_where_the_new_mode_cannot_be_recorded(
    rig: Rig, is_unlinked: bool
) -> None:
    async with rig.mount() as session:
        with_datapath(session)
        ino = await session.open(b"d/a")
        await session.chmod(b"d/a", 0o6755)
        if is_unlinked:
            session.unlink(b"d/a")
        session.front.recorder.is_broken = True
        if is_unlinked:
            # A file without a name never comes to the source.
            await session.files.write(ino, 0, b"user", removes_set_id=True)
            assert session.names.attributes(ino).mode & 0o7777 == 0o755
        else:
            with pytest.raises(Refused):
                await session.files.write(ino, 0, b"user", removes_set_id=True)
            assert await session.files.read(ino, 0, 4) == b"old "
            assert session.names.attributes(ino).mode & 0o7777 == 0o6755
        session.files.release(ino)


@pytest.mark.promise(88)
@pytest.mark.parametrize("by", [ROOT, USER], ids=["root", "user"])
@pytest.mark.parametrize("change", ["write", "truncate"])
async def test_the_source_loses_the_bits_that_the_mount_has_removed(
    rig: Rig, by: Credentials, change: str
) -> None:
    paths = (b"d/a", b"d/new", b"h/linked")
    # Without a datapath a mount does not know who writes.
    mode = 0o6777 if by == ROOT and change == "truncate" else 0o777
    async with rig.mount() as session:
        await session.write(b"d/new", b"program")
        await session.link(b"d/new", b"h/linked")
        for path in paths[:2]:
            await session.chmod(path, 0o6777)
        await session.drained()
        assert {tree_of(rig.source)[path].mode for path in paths} == {0o6777}
        for path in paths[:2]:
            ino = session.ino(path)
            await session.writing.open(ino, os.O_WRONLY, by)
            # The drain makes the change for root, which leaves the bits at the source.
            await session.open(path)
            if change == "write":
                await session.files.write(ino, 0, b"x")
            else:
                await session.front.attributes.change(ino, size=1, by=by)
            for _ in range(2):
                session.files.release(ino)
        assert {session.shown()[path].mode for path in paths} == {mode}
        await session.drained()
        assert {session.shown()[path].mode for path in paths} == {mode}
        await session.end()
    assert {tree_of(rig.source)[path].mode for path in paths} == {mode}


@pytest.mark.promise(88)
@pytest.mark.parametrize("by", [ROOT, USER], ids=["root", "user"])
async def test_an_open_for_writing_without_a_write_leaves_the_bits(
    rig: Rig, by: Credentials
) -> None:
    os.chown(rig.source / "d/a", USER.uid, USER.gid)
    (rig.source / "d/a").chmod(0o6755)
    async with rig.mount() as session:
        ino = session.ino(b"d/a")
        await session.writing.open(ino, os.O_RDWR, by)
        session.files.release(ino)
        await session.drained()
        assert session.shown()[b"d/a"].mode == 0o6755
        await session.end()
    assert tree_of(rig.source)[b"d/a"].mode == 0o6755
