"""Mounts with a newer snapshot after changes of one name of a file that has several."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.writeback.op import Op
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_writer import SourceWriter
from tests.equipment.remounts import tree_of
from tests.writeback.remount_histories import how, prepared
from tests.writeback.remounts import Rig, Session


@pytest.mark.promise(128, 129)
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("is_forgotten", [True, False])
async def test_a_file_keeps_its_content_if_another_one_had_its_other_name_and_was_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    is_written: bool,
    is_forgotten: bool,
) -> None:
    """The source still has the first file under both names. ``is_forgotten``: the mount has removed
    the object of the other one."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        if is_written:
            await session.write(b"b", b"first", synced=True)
        await session.write(b"x", b"other", synced=True)
        await session.rename(b"x", b"b")
        if is_written:
            await session.write(b"c", b"last", synced=True)
        session.unlink(b"b")
        expected = session.shown()
    with monkeypatch.context() as patched:
        _refuse_removals(patched)
        patched.setattr(StagedContents, "open_place", _full)
        patched.setattr(SourceWriter, "has_room", lambda *_: False)
        async with rig.mount() as session:
            while _waiting(session) & {"create", "rename"}:
                await trio.sleep(0.1)
            await trio.sleep(20 * is_forgotten)
            assert ("gone" in _waiting(session)) == is_forgotten
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        assert _bare(session.shown()) == _bare(expected)
    await _end(rig)
    assert _bare(tree_of(rig.source)) == _bare(expected)


@pytest.mark.promise(128)
async def test_the_object_of_a_removed_file_is_removed_with_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"new", b"new", synced=True)
        await session.drained()
        # The drain continues with the next turn of the event loop.
        session.unlink(b"new")
        assert 1 in session.write_back.place.objects.numbers()
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        assert b"new" not in session.shown()
        assert 1 not in session.write_back.place.objects.numbers()
    await _end(rig)
    assert not (rig.source / "new").exists()


@pytest.mark.promise(128, 148)
async def test_a_name_that_others_have_kept_from_a_rename_shows_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """The file has a second name, under which the content of the mount waits."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.rename(b"b", b"x")
    (rig.source / "b").write_bytes(b"of others")
    with monkeypatch.context() as patched:
        patched.setattr(StagedContents, "open_place", _full)
        patched.setattr(SourceWriter, "has_room", lambda *_: False)
        async with rig.mount() as session:
            while _waiting(session) != {"content"}:
                await trio.sleep(0.1)
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        shown = session.shown()
        contents = {path: shown[path].content for path in (b"b", b"c", b"x")}
        assert contents == {b"b": b"of others", b"c": b"old b", b"x": b"old b"}
        assert shown[b"b"].ino != shown[b"c"].ino == shown[b"x"].ino
    await _end(rig)
    assert tree_of(rig.source)[b"x"].content == b"old b"
    assert tree_of(rig.source)[b"b"].content == b"of others"


@pytest.mark.promise(79)
async def test_a_new_name_has_the_written_bytes_and_not_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """Others have changed the file under its old name, before the source has the new one."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.link(b"d/a", b"d/b")
        await session.write(b"d/b", b"written")
    (rig.source / "d/a").write_bytes(b"of others")
    await _end(rig)
    there = tree_of(rig.source)
    assert (there[b"d/a"].content, there[b"d/b"].content) == (b"of others", b"written")


@pytest.mark.promise(79)
async def test_a_new_name_leads_to_the_bytes_of_others_if_none_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.link(b"d/a", b"d/b")
    (rig.source / "d/a").write_bytes(b"of others")
    await _end(rig)
    assert (rig.source / "d/a").samefile(rig.source / "d/b")
    assert (rig.source / "d/b").read_bytes() == b"of others"


async def _end(rig: Rig) -> None:
    async with rig.mount() as session:
        await session.drained()
        await session.end()


def _waiting(session: Session) -> set[str]:
    return {entry.op.kind for entry in session.write_back.drain.queue.entries()}


def _bare(tree: Any) -> dict[bytes, Any]:
    return {path: it.bare for path, it in tree.items()}


def _refuse_removals(patched: pytest.MonkeyPatch) -> None:
    unlink = SourceEntries.unlink

    def refused(entries: SourceEntries, directories: Any, op: Op, *more: Any, **named: Any) -> None:
        if op.kind == "unlink":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(entries, directories, op, *more, **named)

    patched.setattr(SourceEntries, "unlink", refused)


def _full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.promise(79, 128)
@pytest.mark.parametrize("kind", ["same", "lost state"])
async def test_a_file_renamed_over_a_link_to_a_file_of_others_is_kept_beside_it_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, kind: str
) -> None:
    """The source gets the link first, and then finds their bytes under the name."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.link(b"b", b"x")
        await session.write(b"y", b"newer")
        await session.rename(b"y", b"x")
        session.kill()
    os.truncate(rig.source / "b", 2)
    async with rig.mount(**how(kind, rig)) as session:
        await session.drained()
        (conflict,) = session.write_back.drain.writer.log.conflicts
        await session.end()
    assert conflict.path == b"x"
    there = {path: it.content for path, it in tree_of(rig.source).items()}
    assert {there[name] for name in (b"b", b"c", b"x")} == {b"ol"}
    assert there[conflict.kept] == b"newer"


@pytest.mark.promise(128, 129)
@pytest.mark.parametrize("change", ["unlink", "replace", "write"])
@pytest.mark.parametrize("kind", ["lost state", "same"])
async def test_a_name_is_changed_of_a_file_whose_time_waits_over_another_snapshot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    kind: str,
    change: str,
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.utime(b"b", 1_000_000_000)
        session.kill()
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        if change == "unlink":
            session.unlink(b"c")
        elif change == "replace":
            await session.rename(b"a", b"c")
        else:
            await session.write(b"c", b"written")
        session.kill()
    async with rig.mount(**how(kind, rig)) as session:
        await session.drained()
        assert not session.write_back.drain.writer.log.conflicts
        await session.end()
    there = {path: it.content for path, it in tree_of(rig.source).items()}
    expected = {"unlink": None, "replace": b"old a", "write": b"written"}[change]
    assert there.get(b"c") == expected
    assert there[b"b"] == (b"written" if change == "write" else b"old b")
