"""Files that are written through to the source while both the tier and the source are full."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.errors import Refused, SourceError
from monarch.writeback import open_files
from monarch.writeback.objects import Objects
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_publishing import Publishing
from monarch.writeback.source_writer import SourceWriter
from tests.equipment.virtual_clock import until
from tests.writeback.remounts import ROOT, Rig, Session

# Long enough for any number of tries of the drain, by a clock that jumps, in seconds.
PATIENCE_S = 600


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A tier without room for any object."""
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"old")
    (rig.source / "d").mkdir()
    monkeypatch.setattr(Objects, "create", _full)
    return rig


def _full(*args: object, **more: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def require_read(session: Session, path: bytes) -> None:
    ino = await session.open(path, os.O_RDONLY)
    assert await session.files.read(ino, 0, 10) == b"new"
    with pytest.raises(Refused) as raised:
        await session.open(path)
    assert raised.value.errno == errno.ETXTBSY
    session.files.release(ino)


async def written(session: Session, path: bytes) -> None:
    await session.write(path, b"new", synced=True)
    node = session.names.node(session.ino(path))
    assert node is not None and session.front.drained.is_away(node)


async def require_refused(session: Session, path: bytes) -> None:
    """It is read, and nothing else can be done with it."""
    for _ in range(2):
        await require_read(session, path)
    for call in (
        partial(session.open, path),
        partial(session.open, path, os.O_WRONLY | os.O_TRUNC),
        partial(session.chmod, path, 0o600),
        partial(session.setxattr, path, b"user.a", b"1"),
    ):
        with pytest.raises(Refused) as raised:
            await call()
        assert raised.value.errno == errno.ENOSPC


@pytest.mark.promise(71)
async def test_no_call_waits_for_a_source_that_is_full(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                for path in (b"tmp", b"other", b"gone"):
                    await written(session, path)
                await session.rename(b"tmp", b"a")
                await session.link(b"other", b"d/more")
                session.unlink(b"gone")
                await require_refused(session, b"a")
                await require_refused(session, b"d/more")
                assert (rig.source / "a").read_bytes() == b"old"
            await session.drained()
            there = sorted(name for name in os.listdir(rig.source) if name[0] != ".")
            assert there == ["a", "d", "other"]
            assert (rig.source / "a").read_bytes() == b"new"
            assert (rig.source / "d/more").samefile(rig.source / "other")
            # They are the source's own from then on.
            for path in (b"a", b"d/more"):
                await require_read(session, path)


@pytest.mark.promise(71)
async def test_a_file_published_under_an_older_name_is_not_searched_under_a_newer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            with monkeypatch.context() as patched:
                patched.setattr(SourceEntries, "rename", _full)
                await written(session, b"tmp")
                await session.rename(b"tmp", b"d/final")
                await trio.sleep(30)
                await until((rig.source / "tmp").exists)
                assert (rig.source / "tmp").read_bytes() == b"new"
                await require_refused(session, b"d/final")
            await session.drained()
            assert (rig.source / "d/final").read_bytes() == b"new"
            await require_read(session, b"d/final")


@pytest.mark.promise(71)
async def test_a_reader_sees_no_full_source_where_another_file_has_come_into_the_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                await written(session, b"tmp")
                (part,) = rig.source.glob(".monarch-*-through.part")
                part.rename(rig.source / "moved")
                (rig.source / "secret").write_bytes(b"of another")
                (rig.source / "secret").rename(part)
                with pytest.raises(Refused) as raised:
                    await session.open(b"tmp", os.O_RDONLY)
                assert raised.value.errno == errno.EIO
                part.unlink()
                (rig.source / "moved").rename(part)
                await require_read(session, b"tmp")
            await session.drained()
            await require_read(session, b"tmp")


@pytest.mark.promise(73)
async def test_a_file_whose_staged_bytes_others_have_taken_away_cannot_be_opened_and_is_named(
    rig: Rig, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount(works=False) as session:
            await written(session, b"d/x")
        (rig.source / "d").rename(rig.source / "moved")
        (part,) = (rig.source / "moved").glob(".monarch-*-through.part")
        async with rig.mount() as session:
            await session.drained()
            assert session.write_back.drain.backlog().lost == (b"d/x",)
            assert f"'{part.name}' at the source, or have moved it" in caplog.text
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with pytest.raises(Refused) as raised:
                    await session.open(b"d/x", flags)
                assert raised.value.errno == errno.EIO
            session.unlink(b"d/x")


def staged(rig: Rig) -> list[Path]:
    return [*rig.source.rglob("*-through.part")]


@pytest.mark.promise(71)
async def test_a_file_that_is_read_where_it_is_staged_is_truncated_by_its_path(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                await written(session, b"a")
                ino = await session.open(b"a", os.O_RDONLY)
                with pytest.raises(Refused) as raised:
                    await session.front.attributes.change(ino, size=1, by=ROOT)
                assert raised.value.errno == errno.ENOSPC
                assert await session.files.read(ino, 0, 10) == b"new"
            await session.front.attributes.change(ino, size=1, by=ROOT)
            assert await session.files.read(ino, 0, 10) == b"n"
            session.files.release(ino)
            await session.drained()
            assert (rig.source / "a").read_bytes() == b"n"
            assert staged(rig) == []


@pytest.mark.promise(71)
@pytest.mark.parametrize("fails", ["_copy_all", "_synced"])
async def test_a_file_that_has_no_room_at_the_source_either_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, fails: str
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "d").mkdir()
    async with rig.mount() as session:
        ino = await session.open(b"d/a", os.O_WRONLY)
        await session.files.write(ino, 0, b"old")
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(open_files, "_write_all", _full)
                patched.setattr(open_files, fails, _full)
                with pytest.raises((Refused, SourceError)) as raised:
                    await session.files.write(ino, 0, b"new")
                assert raised.value.errno == errno.ENOSPC
            assert staged(rig) == []
        await session.files.write(ino, 3, b" and new")
        session.files.release(ino)
        await session.drained()
        assert (rig.source / "d/a").read_bytes() == b"old and new"


@pytest.mark.promise(71)
async def test_a_file_that_cannot_be_made_at_the_source_either_leaves_nothing_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        with monkeypatch.context() as patched:
            patched.setattr(open_files, "_synced", _full)
            for path, flags in ((b"made", os.O_WRONLY), (b"a", os.O_WRONLY), (b"a", os.O_TRUNC)):
                with pytest.raises((Refused, SourceError)) as raised:
                    await session.open(path, os.O_WRONLY | flags)
                assert raised.value.errno == errno.ENOSPC
        await trio.sleep(5)
        await until(lambda: staged(rig) == [] and not session.front.opens.files)
        assert session.kinds() == {b"a": "file", b"d": "dir"}
        await session.write(b"made", b"new")
        await session.drained()
    assert (rig.source / "made").read_bytes() == b"new"
    assert (rig.source / "a").read_bytes() == b"old"


@pytest.mark.promise(71, 177)
async def test_a_file_without_room_waits_for_its_directories(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            await session.mkdir(b"tmp")
            await session.drained()
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                await session.rename(b"tmp", b"final")
                await session.mkdir(b"final/below", mode=0o700)
                with pytest.raises(Refused) as raised:
                    await session.write(b"final/below/f", b"new")
                assert raised.value.errno == errno.ENOSPC
                assert staged(rig) == [] and (rig.source / "tmp").exists()
            await session.write(b"final/below/f", b"new")
            await session.drained()
    assert sorted(name for name in os.listdir(rig.source) if name[0] != ".") == ["a", "d", "final"]
    assert (rig.source / "final/below/f").read_bytes() == b"new"
    assert (rig.source / "final/below").stat().st_mode & 0o777 == 0o700


@pytest.mark.promise(71)
async def test_a_file_is_read_where_it_is_staged_though_a_directory_above_it_is_renamed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            await session.mkdir(b"tmp")
            await session.drained()
            ino = await session.open(b"tmp/f")
            await session.files.write(ino, 0, b"new")
            with monkeypatch.context() as patched:
                patched.setattr(Publishing, "publish", _full)
                await session.rename(b"tmp", b"final")
                session.files.release(ino)
                await until((rig.source / "final").exists)
                await trio.sleep(30)
                await require_read(session, b"final/f")
            await session.drained()
    assert (rig.source / "final/f").read_bytes() == b"new"


@pytest.mark.promise(71)
@pytest.mark.parametrize("rename", ["before", "behind"])
@pytest.mark.parametrize("mounts", [1, 2])
async def test_a_staged_file_does_not_stay_in_a_renamed_directory_when_its_file_is_removed(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    rename: str,
    mounts: int,
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            await session.mkdir(b"tmp")
            await session.drained()
            ino = await session.open(b"tmp/f")
            await session.files.write(ino, 0, b"new")
            with monkeypatch.context() as patched:
                if rename == "behind":
                    # The source makes the rename only after the removal.
                    patched.setattr(SourceEntries, "rename", _full)
                await session.rename(b"tmp", b"final")
                if rename == "before":
                    await until((rig.source / "final").exists)
                session.unlink(b"final/f")
                if mounts == 1:
                    session.files.release(ino)
                    await until(lambda: staged(rig) == [])
                    assert (rig.source / "tmp").exists() == (rename == "behind")
                else:
                    session.kill()
        if mounts == 2:
            assert len(staged(rig)) == 1
            async with rig.mount() as session:
                await until(lambda: staged(rig) == [])


@pytest.mark.promise(67, 71)
@pytest.mark.parametrize("way", ["rename", "link", "replace", "leave"])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_open_file_without_room_is_drained_under_a_name_in_another_directory(
    rig: Rig, clock: trio.testing.MockClock, way: str, is_killed: bool
) -> None:
    """With "leave" its old directory stays, and the staged file in it."""
    (rig.source / "h").mkdir()
    name = "h/y" if way == "leave" else "y"
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await session.open(b"d/x")
            await session.files.write(ino, 0, b"ne")
            if way == "rename":
                await session.rename(b"d/x", os.fsencode(name))
            else:
                await session.link(b"d/x", os.fsencode(name))
                session.unlink(b"d/x")
            if way == "replace":
                await session.mkdir(b"new")
                await session.rename(b"new", b"d")
            elif way != "leave":
                session.rmdir(b"d")
            # The drain waits for the close, and has made all other changes.
            await trio.sleep(30)
            assert (rig.source / "d").exists() == (way in ("replace", "leave"))
            await session.files.write(ino, 2, b"w")
            if is_killed:
                session.kill()
            else:
                session.files.release(ino)
                await session.drained()
        async with rig.mount() as session:
            await session.drained()
            assert session.write_back.drain.backlog().lost == ()
    assert (rig.source / name).read_bytes() == b"new"
    assert staged(rig) == [] and not (rig.source / "d/x").exists()
