"""What one mount left behind, mounted again in every way: shown unchanged, then at the source."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.namespace.build import build
from monarch.writeback.drain import Drain
from monarch.writeback.op import Op
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_writer import SourceWriter
from tests.equipment.remounts import KINDS, Tree, tree_of
from tests.equipment.virtual_clock import until
from tests.writeback.remount_histories import how, prepared
from tests.writeback.remounts import Rig, Session

Clock = trio.testing.MockClock

# Each way to mount again, with another way in which the mount before it has ended. A disk that is
# full has tests of its own.
_WAYS = ("kill", "abandon", "timeout")
_KINDS = [*zip(sorted({*KINDS} - {"full"}), cycle(_WAYS))]


async def ended(session: Session, way: str) -> None:
    """End a mount. Its drain does nothing, so a clean end waits in vain for it."""
    if way in ("abandon", "timeout"):
        await session.end(abandoned=way == "abandon")


def bare(tree: Tree) -> dict[bytes, tuple[object, ...]]:
    return {path: it.bare for path, it in tree.items()}


async def brought(rig: Rig) -> Tree:
    """What the source has after a mount that drains all; that mount shows the same."""
    async with rig.mount() as session:
        await session.drained()
        assert bare(session.shown()) == bare(tree_of(rig.source))
        await session.end()
    async with rig.mount(refreshed=True) as session:
        assert bare(session.shown()) == bare(tree_of(rig.source)) and not rig.put_off
        await session.end()
    return tree_of(rig.source)


@pytest.mark.finding("W1", "S1")
@pytest.mark.promise(67, 128, 129)
@pytest.mark.parametrize(("kind", "way"), _KINDS)
async def test_files_that_came_and_went_prevent_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, kind: str, way: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"drained", b"1")
        await session.write(b"replaced", b"1")
        await session.drained()
        await session.end()
    async with rig.mount(works=False, writeback={"end_timeout": "1s"}) as session:
        await session.write(b"ckpt", b"weights", synced=True)
        await session.write(b"new", b"never drained")
        session.unlink(b"new")
        # The source has it under the name from which it was renamed.
        await session.rename(b"drained", b"moved")
        session.unlink(b"moved")
        await session.write(b"one", b"1")
        await session.write(b"two", b"2", synced=True)
        await session.rename(b"two", b"one")
        await session.write(b"other", b"other", synced=True)
        await session.rename(b"other", b"replaced")
        await session.front.recorder.sync()
        await ended(session, way)
        before = session.shown()
    names = {b"ckpt": b"weights", b"one": b"2", b"replaced": b"other"}
    for _ in range(2):
        async with rig.mount(works=False, **how(kind, rig)) as session:
            shown = session.shown()
            assert {name: shown[name].content for name in names} == names
            assert bare(shown) == bare(before)
    there = await brought(rig)
    assert {name: there[name].content for name in names} == names
    assert not there.keys() & {b"new", b"drained", b"moved", b"two", b"other"}


@pytest.mark.finding("W1")
@pytest.mark.promise(67, 98)
@pytest.mark.parametrize("kind", ["read-only", "same", "refresh", "given"])
async def test_checkpoints_over_a_given_snapshot_prevent_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, kind: str
) -> None:
    """As a Checkpointer writes: each file beside its name, the old ones removed."""
    rig = prepared(tmp_path, monkeypatch)
    given = {"snapshot": {"file": tmp_path / "given.snapshot", "jobs": 1}}
    build(rig.source, tmp_path / "given.snapshot", jobs=1)
    async with rig.mount(**given) as session:
        for step in range(30):
            await session.write(b"d/tmp", b"step %d" % step, synced=True)
            await session.rename(b"d/tmp", b"d/step-%d" % step)
            await session.write(b"d/manifest.tmp", b"%d" % step, synced=True)
            await session.rename(b"d/manifest.tmp", b"d/manifest")
            if step >= 2:
                session.unlink(b"d/step-%d" % (step - 2))
            if step % 3:
                await session.drained()
        await session.end()
        before = session.shown()
    assert {b"d/step-28", b"d/step-29", b"d/manifest"} <= before.keys()
    for more in (given, {**given, "write": False}, given, how(kind, rig)):
        async with rig.mount(**more) as session:
            assert bare(session.shown()) == bare(before)
            await session.drained()
            await session.end()
    assert bare(tree_of(rig.source)) == bare(before)


def read_only(*args: object, **more: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def nothing(source: Path) -> None:
    pass


def renamed(source: Path) -> None:
    (source / "run").rename(source / "run-old")


def removed(source: Path) -> None:
    shutil.rmtree(source / "run")


def replaced_by_file(source: Path) -> None:
    removed(source)
    (source / "run").write_bytes(b"others' file")


def replaced_by_link(source: Path) -> None:
    renamed(source)
    (source / "run").symlink_to("run-old")


@pytest.mark.finding("W2", "S2")
@pytest.mark.promise(128, 129, 130, 149)
@pytest.mark.parametrize(("kind", "way"), _KINDS)
@pytest.mark.parametrize("others", [nothing, renamed, removed, replaced_by_file, replaced_by_link])
async def test_synced_files_in_renamed_directories_are_shown_and_drained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    others: Callable[[Path], None],
    kind: str,
    way: str,
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    (rig.source / "run").mkdir()
    with monkeypatch.context() as patched:
        async with rig.mount(writeback={"end_timeout": "1s"}) as session:
            await session.mkdir(b"run/tmp-100")
            await session.write(b"run/tmp-100/shard", b"shard", synced=True)
            await session.drained()
            patched.setattr(SourceWriter, "carry_out", read_only)
            await session.write(b"run/ckpt", b"weights", synced=True)
            await session.rename(b"run/tmp-100", b"run/step-100")
            await session.write(b"run/step-100/COMMIT", b"done", synced=True)
            await session.front.recorder.sync()
            await ended(session, way)
    others(rig.source)
    synced = {b"run/ckpt": b"weights", b"run/step-100/COMMIT": b"done"}
    for _ in range(2):
        async with rig.mount(works=False, **how(kind, rig)) as session:
            shown = session.shown()
            assert {name: shown[name].content for name in synced} == synced
            assert b"run/tmp-100" not in shown
            assert session.write_back.drain.backlog().ops > 0
    async with rig.mount() as session:
        await session.at_rest()
        trouble = session.write_back.drain.backlog().trouble
        there = tree_of(rig.source)
        for name, content in synced.items():
            assert session.shown()[name].content == content
            # It is there, or health names what the source refuses, and the file is not lost.
            assert trouble or there[name].content == content
        assert not trouble or others in (replaced_by_file, replaced_by_link)
        if others is nothing:
            assert there[b"run/step-100/shard"].content == b"shard"
            assert b"run/tmp-100" not in there
        await session.end(abandoned=trouble is not None)
    async with rig.mount() as session:
        shown = session.shown()
        assert {name: shown[name].content for name in synced} == synced
        await session.end(abandoned=trouble is not None)


@pytest.mark.finding("W3")
@pytest.mark.promise(136)
@pytest.mark.parametrize("way", ["abandon", "timeout", "kill"])
async def test_files_without_an_fsync_survive_a_reboot_after_a_clean_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, way: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    settings = {"end_timeout": "1s", "commit": "0s"}
    async with rig.mount(works=False, writeback=settings) as session:
        await session.write(b"result", b"never synced")
        await session.write(b"d/a", b"never synced either")
        await ended(session, way)
        before = session.shown()
    rig.boot_again()
    async with rig.mount() as session:
        shown = session.shown()
        lost = session.write_back.place.found.lost
        if way == "kill":
            # The old file stays where the new one never was.
            assert b"result" not in shown and shown[b"d/a"].content == b"old d/a"
            assert {op.path for op in lost} == {b"result", b"d/a"}
            return
        assert bare(shown) == bare(before) and lost == ()
        await session.drained()
        await session.end()
    assert (rig.source / "result").read_bytes() == b"never synced"
    assert (rig.source / "d/a").read_bytes() == b"never synced either"


@pytest.mark.promise(136)
@pytest.mark.parametrize("way", ["abandon", "timeout"])
async def test_a_file_in_a_full_tier_without_an_fsync_survives_a_reboot_after_a_clean_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, way: str
) -> None:
    async def full() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rig = prepared(tmp_path, monkeypatch)
    settings = {"end_timeout": "1s", "commit": "0s"}
    async with rig.mount(works=False, writeback=settings) as session:
        monkeypatch.setattr(session.front.objects.spares, "take", full)
        await session.write(b"d/a", b"never synced")
        await ended(session, way)
        before = session.shown()
    rig.boot_again()
    async with rig.mount() as session:
        assert bare(session.shown()) == bare(before)
        assert session.write_back.place.found.lost == ()
        await session.drained()
        await session.end()
    assert (rig.source / "d/a").read_bytes() == b"never synced"


@pytest.mark.promise(67, 129)
async def test_a_file_that_went_to_the_source_directly_is_read_there_with_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    async def full() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        monkeypatch.setattr(session.front.objects.spares, "take", full)
        await session.open(b"a")
        # The record that the tier has no room for it is done, and its content is not recorded.
        await trio.sleep(5)
    for kind in ("same", "lost state"):
        async with rig.mount(works=False, **how(kind, rig)) as session:
            assert session.shown()[b"a"].content == b"old a"
    assert (await brought(rig))[b"a"].content == b"old a"


@pytest.mark.promise(170)
@pytest.mark.parametrize("kind", ["same", "new", "lost state", "refresh"])
async def test_attributes_that_come_with_a_content_are_shown_until_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, kind: str
) -> None:
    """Others have changed a file with two names, so the source keeps both names as they are. The
    file of the mount comes there with a content, and so does the mode that it has got."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        session.unlink(b"b")
        await session.rename(b"c", b"b")
        await session.chmod(b"b", 0o755)
        session.kill()
    os.utime(rig.source / "b", ns=(0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(StagedContents, "open_place", read_only)
        async with rig.mount(**how(kind, rig)) as session:
            await until(lambda: [op.kind for op in rig.left.waiting()] == ["content"])
            session.kill()
    for _ in range(2):
        async with rig.mount(works=False, **how(kind, rig)) as session:
            assert session.shown()[b"b"].mode == 0o755
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    (kept,) = rig.source.glob("b.monarch-conflict-*")
    assert (stat.S_IMODE(kept.stat().st_mode), kept.read_bytes()) == (0o755, b"old b")
    assert stat.S_IMODE((rig.source / "b").stat().st_mode) == 0o644


@pytest.mark.promise(170)
@pytest.mark.parametrize("kind", ["same", "new", "lost state", "refresh"])
async def test_a_mode_that_comes_with_the_content_of_a_removed_file_is_shown_until_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, kind: str
) -> None:
    """The mode was set before the file was written, and finds no file at the source."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.chmod(b"d/a", 0o640)
        await session.write(b"d/a", b"written", synced=True)
        await session.rename(b"d/a", b"x")
        session.kill()
    rig.lose_state()
    async with rig.mount(works=False, refreshed=True) as session:
        session.kill()
    (rig.source / "d/a").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(StagedContents, "open_place", read_only)
        async with rig.mount() as session:
            await until(lambda: "attr" not in [op.kind for op in rig.left.waiting()])
            session.kill()
    for _ in range(2):
        async with rig.mount(works=False, **how(kind, rig)) as session:
            assert session.shown()[b"x"].mode == 0o640
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    assert stat.S_IMODE((rig.source / "x").stat().st_mode) == 0o640


@pytest.mark.promise(170)
@pytest.mark.parametrize("has_link", [False, True])
async def test_a_file_renamed_there_without_a_mark_has_the_mode_that_others_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, has_link: bool
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    path, names = (b"b", {b"c", b"x"}) if has_link else (b"d/a", {b"x"})
    async with rig.mount(works=False) as session:
        await session.rename(path, b"x")
        session.kill()
    (rig.source / os.fsdecode(path)).rename(rig.source / "x")
    (rig.source / "x").chmod(0o604)
    async with rig.mount(**how("lost state", rig)) as session:
        shown = session.shown()
        assert {name: shown[name].mode for name in names} == dict.fromkeys(names, 0o604)
        assert path not in shown
        await session.drained()
        await session.end()
    there = tree_of(rig.source)
    assert {name: there[name].mode for name in names} == dict.fromkeys(names, 0o604)
    assert path not in there


@pytest.mark.promise(170)
async def test_a_content_that_came_without_a_mark_has_the_mode_that_others_gave_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    mark = Drain._mark

    async def marked(drain: Drain, *changes: Any) -> None:
        if (rig.source / "a").read_bytes() == b"written":
            await trio.sleep_forever()
        await mark(drain, *changes)

    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.write(b"a", b"written")
        session.kill()
    (rig.source / "a").chmod(0o604)
    with monkeypatch.context() as patched:
        patched.setattr(Drain, "_mark", marked)
        async with rig.mount() as session:
            await until(lambda: (rig.source / "a").read_bytes() == b"written")
            session.kill()
    assert stat.S_IMODE((rig.source / "a").stat().st_mode) == 0o604
    async with rig.mount(**how("lost state", rig)) as session:
        assert (session.shown()[b"a"].mode, session.shown()[b"a"].content) == (0o604, b"written")
        await session.drained()
        await session.end()
    assert tree_of(rig.source)[b"a"].mode == 0o604


@pytest.mark.promise(170)
async def test_a_content_that_came_after_the_snapshot_has_the_mode_that_the_snapshot_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Another content still waits, so the next mount has the same snapshot."""
    open_place = StagedContents.open_place

    def opened(staged: StagedContents, op: Op, *more: Any, **named: Any) -> int:
        if op.path == b"d/a":
            read_only()
        return open_place(staged, op, *more, **named)

    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.write(b"a", b"written")
        await session.write(b"d/a", b"written")
        session.kill()
    (rig.source / "a").chmod(0o604)
    monkeypatch.setattr(StagedContents, "open_place", opened)
    async with rig.mount(**how("lost state", rig)) as session:
        await until(lambda: {op.path for op in rig.left.waiting()} == {b"d/a"})
        session.kill()
    async with rig.mount(works=False) as session:
        assert session.shown()[b"a"].mode == tree_of(rig.source)[b"a"].mode == 0o604


@pytest.mark.promise(129)
async def test_a_change_that_no_name_shows_does_not_disturb_the_drain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others have removed the file. The names of the mount are in its file, not in memory."""
    rig = prepared(tmp_path, monkeypatch)
    names = [b"%02d" % number for number in range(40)]
    for name in names:
        (rig.source / os.fsdecode(name)).write_bytes(name)
    async with rig.mount(works=False) as session:
        for name in names:
            await session.chmod(name, 0o600)
    (rig.source / os.fsdecode(names[-1])).unlink()
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        # Names leave memory.
        await trio.sleep(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.write_back.drain.run)
            await session.drained()
            await session.end()
            nursery.cancel_scope.cancel()
    assert "internal error" not in caplog.text
    assert {tree_of(rig.source)[name].mode for name in names[:-1]} == {0o600}


@pytest.mark.promise(170)
@pytest.mark.parametrize("is_written", [False, True])
async def test_a_file_that_others_have_changed_before_its_rename_has_the_mode_that_comes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, is_written: bool
) -> None:
    """The source keeps their file under the old name."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.rename(b"a", b"x")
        if is_written:
            await session.write(b"x", b"written")
        session.kill()
    (rig.source / "a").chmod(0o604)
    os.truncate(rig.source / "a", 2)
    async with rig.mount(**how("lost state", rig)) as session:
        assert session.shown()[b"x"].mode == 0o644
        await session.drained()
        assert session.shown()[b"x"].mode == 0o644
        await session.end()
    there = tree_of(rig.source)
    assert (there[b"x"].mode, there[b"a"].mode) == (0o644, 0o604)


@pytest.mark.promise(170)
async def test_a_file_that_the_drain_leaves_as_it_is_has_the_mode_that_others_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """It is at the source, and has another name to come only."""
    rig = prepared(tmp_path, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(SourceEntries, "link", read_only)
        async with rig.mount() as session:
            await session.write(b"b", b"written")
            await session.drained()
            (rig.source / "b").chmod(0o711)
            await session.link(b"c", b"x")
            session.kill()
    with (rig.source / "b").open("ab") as file:
        file.write(b" others' end")
    for _ in range(2):
        async with rig.mount(works=False, **how("lost state", rig)) as session:
            shown = session.shown()
            assert {shown[name].mode for name in (b"b", b"c", b"x")} == {0o711}
    async with rig.mount() as session:
        await session.drained()
        shown = session.shown()
        assert {shown[name].mode for name in (b"b", b"c", b"x")} == {0o711}
        await session.end()
    there = tree_of(rig.source)
    assert {there[name].mode for name in (b"b", b"c", b"x")} == {0o711}
    assert there[b"b"].content == b"written others' end"
