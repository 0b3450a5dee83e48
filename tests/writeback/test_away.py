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
from monarch.writeback.source_writer import SourceWriter
from tests.writeback.remounts import ROOT, Ground, Life

# Long enough for any number of tries of the drain, by a clock that jumps, in seconds.
PATIENCE_S = 600


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A tier without room for any object."""
    ground = Ground(tmp_path, monkeypatch)
    (ground.source / "a").write_bytes(b"old")
    (ground.source / "d").mkdir()
    monkeypatch.setattr(Objects, "create", _full)
    return ground


def _full(*args: object, **more: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def require_read(life: Life, path: bytes) -> None:
    ino = await life.open(path, os.O_RDONLY)
    assert await life.files.read(ino, 0, 10) == b"new"
    with pytest.raises(Refused) as raised:
        await life.open(path)
    assert raised.value.errno == errno.ETXTBSY
    life.files.release(ino)


async def written(life: Life, path: bytes) -> None:
    await life.write(path, b"new", synced=True)
    node = life.names.node(life.ino(path))
    assert node is not None and life.front.drained.is_away(node)


async def require_refused(life: Life, path: bytes) -> None:
    """It is read, and nothing else can be done with it."""
    for _ in range(2):
        await require_read(life, path)
    for call in (
        partial(life.open, path),
        partial(life.open, path, os.O_WRONLY | os.O_TRUNC),
        partial(life.chmod, path, 0o600),
        partial(life.setxattr, path, b"user.a", b"1"),
    ):
        with pytest.raises(Refused) as raised:
            await call()
        assert raised.value.errno == errno.ENOSPC


@pytest.mark.promise(71)
async def test_no_call_waits_for_a_source_that_is_full(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                for path in (b"tmp", b"other", b"gone"):
                    await written(life, path)
                await life.rename(b"tmp", b"a")
                await life.link(b"other", b"d/more")
                life.unlink(b"gone")
                await require_refused(life, b"a")
                await require_refused(life, b"d/more")
                assert (ground.source / "a").read_bytes() == b"old"
            await life.drained()
            there = sorted(name for name in os.listdir(ground.source) if name[0] != ".")
            assert there == ["a", "d", "other"]
            assert (ground.source / "a").read_bytes() == b"new"
            assert (ground.source / "d/more").samefile(ground.source / "other")
            # They are the source's own from then on.
            for path in (b"a", b"d/more"):
                await require_read(life, path)


@pytest.mark.promise(71)
async def test_a_file_published_under_an_older_name_is_not_searched_under_a_newer(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            with monkeypatch.context() as patched:
                patched.setattr(SourceEntries, "rename", _full)
                await written(life, b"tmp")
                await life.rename(b"tmp", b"d/final")
                await trio.sleep(30)
                assert (ground.source / "tmp").read_bytes() == b"new"
                await require_refused(life, b"d/final")
            await life.drained()
            assert (ground.source / "d/final").read_bytes() == b"new"
            await require_read(life, b"d/final")


@pytest.mark.promise(71)
async def test_a_reader_sees_no_full_source_where_another_file_has_come_into_the_way(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                await written(life, b"tmp")
                (part,) = ground.source.glob(".monarch-*-through.part")
                part.rename(ground.source / "moved")
                (ground.source / "secret").write_bytes(b"of another")
                (ground.source / "secret").rename(part)
                with pytest.raises(Refused) as raised:
                    await life.open(b"tmp", os.O_RDONLY)
                assert raised.value.errno == errno.EIO
                part.unlink()
                (ground.source / "moved").rename(part)
                await require_read(life, b"tmp")
            await life.drained()
            await require_read(life, b"tmp")


@pytest.mark.promise(73)
async def test_a_file_whose_staged_bytes_others_have_taken_away_cannot_be_opened_and_is_named(
    ground: Ground, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount(works=False) as life:
            await written(life, b"d/x")
        (ground.source / "d").rename(ground.source / "moved")
        (part,) = (ground.source / "moved").glob(".monarch-*-through.part")
        async with ground.mount() as life:
            await life.drained()
            assert life.write_back.drain.backlog().lost == (b"d/x",)
            assert f"'{part.name}' at the source, or have moved it" in caplog.text
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with pytest.raises(Refused) as raised:
                    await life.open(b"d/x", flags)
                assert raised.value.errno == errno.EIO
            life.unlink(b"d/x")


def staged(ground: Ground) -> list[Path]:
    return [*ground.source.rglob("*-through.part")]


@pytest.mark.promise(71)
async def test_a_file_that_is_read_where_it_is_staged_is_truncated_by_its_path(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            with monkeypatch.context() as patched:
                patched.setattr(SourceWriter, "carry_out", _full)
                await written(life, b"a")
                ino = await life.open(b"a", os.O_RDONLY)
                with pytest.raises(Refused) as raised:
                    await life.front.attributes.change(ino, size=1, by=ROOT)
                assert raised.value.errno == errno.ENOSPC
                assert await life.files.read(ino, 0, 10) == b"new"
            await life.front.attributes.change(ino, size=1, by=ROOT)
            assert await life.files.read(ino, 0, 10) == b"n"
            life.files.release(ino)
            await life.drained()
            assert (ground.source / "a").read_bytes() == b"n"
            assert staged(ground) == []


@pytest.mark.promise(71)
@pytest.mark.parametrize("fails", ["_copy_all", "_synced"])
async def test_a_file_that_has_no_room_at_the_source_either_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, fails: str
) -> None:
    ground = Ground(tmp_path, monkeypatch)
    (ground.source / "d").mkdir()
    async with ground.mount() as life:
        ino = await life.open(b"d/a", os.O_WRONLY)
        await life.files.write(ino, 0, b"old")
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(open_files, "_write_all", _full)
                patched.setattr(open_files, fails, _full)
                with pytest.raises((Refused, SourceError)) as raised:
                    await life.files.write(ino, 0, b"new")
                assert raised.value.errno == errno.ENOSPC
            assert staged(ground) == []
        await life.files.write(ino, 3, b" and new")
        life.files.release(ino)
        await life.drained()
        assert (ground.source / "d/a").read_bytes() == b"old and new"


@pytest.mark.promise(71)
async def test_a_file_that_cannot_be_made_at_the_source_either_leaves_nothing_there(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    async with ground.mount() as life:
        with monkeypatch.context() as patched:
            patched.setattr(open_files, "_synced", _full)
            for path, flags in ((b"made", os.O_WRONLY), (b"a", os.O_WRONLY), (b"a", os.O_TRUNC)):
                with pytest.raises((Refused, SourceError)) as raised:
                    await life.open(path, os.O_WRONLY | flags)
                assert raised.value.errno == errno.ENOSPC
        await trio.sleep(5)
        assert staged(ground) == [] and not life.front.opens.files
        assert life.kinds() == {b"a": "file", b"d": "dir"}
        await life.write(b"made", b"new")
        await life.drained()
    assert (ground.source / "made").read_bytes() == b"new"
    assert (ground.source / "a").read_bytes() == b"old"
