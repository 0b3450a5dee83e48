"""Mounts that end anywhere and are mounted again in every way: each acknowledged change is shown,
reaches the source, or is named."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.daemon.write_status import LossAlarm, WriteStatus
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.errors import Refused, SourceError
from monarch.namespace import scan
from monarch.namespace.build import build
from monarch.posix import failpoints
from monarch.telemetry.report import LostReport
from monarch.tiers.source import identity_of
from monarch.writeback import replay as replay_module
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_writer import SourceWriter
from tests.equipment.remounts import tree_of
from tests.writeback.conftest import small_disk
from tests.writeback.remount_histories import history, how, prepared
from tests.writeback.remounts import Session
from tests.writeback.rig import Killed, is_killed

# The tests that share the histories. A history whose changes the source refuses for good waits
# 1,800 virtual seconds, which take 18 real ones: few of them may meet in one test.
_PARTS = 100


@pytest.mark.finding("W1", "W2", "S1", "S2")
@pytest.mark.promise(128, 129, 130, 138)
@pytest.mark.parametrize("part", range(_PARTS))
async def test_a_history_with_remounts_of_every_kind_is_shown_and_drained_whole(
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    pytestconfig: pytest.Config,
    caplog: pytest.LogCaptureFixture,
    part: int,
) -> None:
    for number in numbers(part, pytestconfig):
        caplog.clear()
        root = memory / str(number)
        disk = small_disk(memory, number)
        try:
            await history(root, monkeypatch, number, disk=disk)
            assert "internal error" not in caplog.text, caplog.text
        except BaseException as error:
            error.add_note(f"in history {number}")
            raise
        finally:
            for left in filter(None, (root, disk)):
                shutil.rmtree(left)


def numbers(part: int, pytestconfig: pytest.Config) -> Iterator[int]:
    """A part of the histories that are asked for, and with --soak others for so long."""
    end = time.monotonic() + pytestconfig.getoption("--soak")
    first = pytestconfig.getoption("--first-history")
    number, beyond = first + part, first + pytestconfig.getoption("--histories")
    while number < beyond or time.monotonic() < end:
        yield number
        number += _PARTS


@pytest.mark.finding("S2")
@pytest.mark.promise(128)
async def test_while_something_waits_the_names_are_those_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.mkdir(b"e")
        await session.write(b"e/new", b"new", synced=True)
        snapshot_id = session.names.snapshot.id
    (rig.source / "others").write_bytes(b"x")
    given = tmp_path / "given.snapshot"
    build(rig.source, given, jobs=1)
    for more, is_reported in (
        ({}, False),
        ({"refreshed": True}, True),
        ({"snapshot": {"file": given}}, True),
    ):
        async with rig.mount(works=False, **more) as session:
            assert session.names.snapshot.id == snapshot_id
            assert b"others" not in session.shown()
            assert session.shown()[b"e/new"].content == b"new"
            assert ("mount again" in rig.put_off) is is_reported
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    async with rig.mount() as session:
        assert session.names.snapshot.id != snapshot_id
        assert session.shown()[b"others"].content == b"x"
        assert session.shown()[b"e/new"].content == b"new"
        assert not rig.put_off


async def test_one_change_that_waits_is_one_change_in_the_messages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.mkdir(b"e")
    async with rig.mount(works=False, refreshed=True):
        assert "does not have 1 change that follows it;" in rig.put_off
    rig.lose_state()
    monkeypatch.setattr(SourceEntries, "mkdir", _failing)
    async with rig.mount() as session:
        assert "the snapshot is gone for 1 change of earlier mounts;" in caplog.text
        await trio.sleep(10)
        assert "1 change is kept in the tier" in caplog.text
        await session.end()
    assert "not drained at the end: 1 change of names; kept in tier fast" in caplog.text


def _failing(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.promise(170)
async def test_a_renewed_snapshot_has_what_earlier_mounts_have_changed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    # Directories are believed that were changed a moment ago.
    monkeypatch.setattr(scan, "_RACY_NS", -3600 * 10**9)
    rig = prepared(tmp_path, monkeypatch)
    for name in ("mode", "time", "linked"):
        (rig.source / "d" / name).write_bytes(b"six666")
    os.mkfifo(rig.source / "d/fifo", 0o644)
    before = os.stat(rig.source / "d")
    async with rig.mount() as session:
        await session.chmod(b"d/mode", 0o600)
        await session.chmod(b"d/fifo", 0o600)
        await session.utime(b"d/time", 10**18)
        await session.link(b"d/linked", b"other name")
        await session.drained()
    assert os.stat(rig.source / "d").st_mtime_ns == before.st_mtime_ns
    for _ in range(2):
        async with rig.mount() as session:
            found = {
                path: session.names.attributes(session.ino(path))
                for path in map(b"d/".__add__, os.listdir(os.fsencode(rig.source / "d")))
            }
            assert found[b"d/mode"].mode & 0o777 == found[b"d/fifo"].mode & 0o777 == 0o600
            assert found[b"d/time"].mtime_ns == 10**18
            assert session.ino(b"other name") == found[b"d/linked"].ino
            assert found[b"d/linked"].nlink == 2
            await session.end()


@pytest.mark.promise(170)
async def test_a_renewed_snapshot_has_late_changes_of_files_that_mounts_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """The first snapshot with these files lacks changes that the source gets later."""
    monkeypatch.setattr(scan, "_RACY_NS", -3600 * 10**9)
    rig = prepared(tmp_path, monkeypatch)
    with monkeypatch.context() as patched:
        async with rig.mount() as session:
            for name in (b"d/mode", b"d/time", b"d/longer"):
                await session.write(name, b"new")
            await session.mkdir(b"d/made")
            await session.drained()
            patched.setattr(SourceWriter, "carry_out", _full)
            await session.chmod(b"d/mode", 0o600)
            await session.chmod(b"d/made", 0o700)
            await session.utime(b"d/time", 10**18)
            ino = await session.open(b"d/longer")
            await session.files.write(ino, 3, b"er")
            session.files.release(ino)
            session.kill()
    rig.lose_state()
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    async with rig.mount() as session:
        shown = {path: session.names.attributes(session.ino(path)) for path in session.shown()}
        assert shown[b"d/mode"].mode & 0o777 == 0o600
        assert shown[b"d/made"].mode & 0o777 == 0o700
        assert shown[b"d/time"].mtime_ns == 10**18
        assert shown[b"d/longer"].size == 5
        await session.end()


@pytest.mark.promise(170)
@pytest.mark.parametrize("freshness", ["mount", "never"])
@pytest.mark.parametrize("between", ["given snapshot", "other state"])
async def test_a_mount_between_with_another_snapshot_hides_no_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    between: str,
    freshness: str,
) -> None:
    # Directories are believed that were changed a moment ago.
    monkeypatch.setattr(scan, "_RACY_NS", -3600 * 10**9)
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.end()
    async with rig.mount() as session:
        await session.chmod(b"d/a", 0o600)
        ino = await session.open(b"b")
        await session.files.write(ino, 5, b" and more")
        session.files.release(ino)
        await session.drained()
        before = session.shown()
        await session.end()
    rig.states = int(between == "other state")
    # Its journal forgets what is in its snapshot.
    async with rig.mount(**how("given" if between == "given snapshot" else "same", rig)) as session:
        await session.end()
    rig.states = 0
    async with rig.mount(freshness=freshness) as session:
        assert {path: it.bare for path, it in session.shown().items()} == {
            path: it.bare for path, it in before.items()
        }
        await session.end()


@pytest.mark.promise(170)
async def test_a_change_from_before_the_snapshot_does_not_bring_older_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """Others write a file between a change of its mode and the snapshot over which that is drained.
    The mark of the drain has the size and time from the moment of the change."""
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.chmod(b"d/a", 0o600)
    (rig.source / "d/a").write_bytes(b"others")
    rig.lose_state()
    async with rig.mount() as session:
        await session.drained()
        session.kill()
    async with rig.mount(works=False, freshness="never") as session:
        assert session.names.attributes(session.ino(b"d/a")).size == len(b"others")
        assert session.shown()[b"d/a"].bare == tree_of(rig.source)[b"d/a"].bare


@pytest.mark.promise(170)
@pytest.mark.parametrize("path", [b"d/a", b"d/new"])
async def test_a_content_from_before_the_snapshot_does_not_bring_older_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, path: bytes
) -> None:
    """As above, with a file that was written here, and whose object has left the tier."""
    rig = prepared(tmp_path, monkeypatch)
    at_source = rig.source / os.fsdecode(path)
    async with rig.mount() as session:
        await session.write(path, b"written")
        await session.drained()
        # The drain lets a task that makes changes continue for a while.
        await session.chmod(path, 0o600)
    at_source.write_bytes(b"others")
    rig.lose_state()
    async with rig.mount() as session:
        await session.drained()
        node = session.names.node(session.ino(path))
        assert node is not None and session.front.drained.release_if_clean(node)
        await session.revalidation.look_again(node.ino)
        before = session.shown()[path]
        assert before.bare == tree_of(rig.source)[path].bare
        session.kill()
    async with rig.mount(works=False, freshness="never") as session:
        assert session.shown()[path] == before
        assert session.shown()[path].status == before.status


@pytest.mark.promise(170)
@pytest.mark.parametrize("is_older", [False, True])
async def test_times_from_before_the_snapshot_are_known_to_each_mount_that_uses_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    is_older: bool,
) -> None:
    """``is_older``: that snapshot was made before others wrote the file, and these changed it."""
    rig = prepared(tmp_path, monkeypatch)
    given = tmp_path / "given.snapshot"
    if is_older:
        build(rig.source, given, jobs=1)
        (rig.source / "d/a").write_bytes(b"others")
    async with rig.mount(works=False) as session:
        for number in (1, 2):
            await session.utime(b"d/a", number * 10**18)
    rig.lose_state()
    if not is_older:
        build(rig.source, given, jobs=1)
    snapshot = {"file": given, "jobs": 1}
    async with rig.mount(snapshot=snapshot) as session:
        await session.drained()
        session.kill()
    async with rig.mount(works=False, snapshot=snapshot) as session:
        known = session.names.stored(session.ino(b"d/a"))
        assert known.identity == identity_of((rig.source / "d/a").stat())


@pytest.mark.promise(170)
@pytest.mark.parametrize("kind", ["given", "same"])
async def test_a_mount_that_never_checks_shows_drained_files_over_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, kind: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.end()
    async with rig.mount(**how(kind, rig)) as session:
        await session.write(b"d/new", b"written")
        session.unlink(b"d/a")
        await session.chmod(b"h/of the source", 0o600)
        await session.drained()
        before = session.shown()
        await session.end()
    # Its journal forgets what is in its snapshot.
    async with rig.mount(**how("given", rig)) as session:
        await session.end()
    for _ in range(2):
        async with rig.mount(freshness="never") as session:
            now = session.shown()
            assert {path: it.bare for path, it in now.items()} == {
                path: it.bare for path, it in before.items()
            }
            await session.end()


@pytest.mark.promise(129)
async def test_a_damaged_note_of_the_snapshot_keeps_no_mount_from_coming_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.write(b"d/new", b"new", synced=True)
    (rig.directory / "snapshot").write_bytes(b"\xff\x00")
    async with rig.mount() as session:
        assert session.shown()[b"d/new"].content == b"new"
        await session.drained()
        await session.end()
    assert (rig.source / "d/new").read_bytes() == b"new"


@pytest.mark.finding("W2", "S2")
@pytest.mark.promise(130)
async def test_files_without_a_place_in_the_tree_after_a_remount_are_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.mkdir(b"e")
        await session.write(b"e/kept", b"kept", synced=True)
        await session.write(b"e/gone", b"gone", synced=True)
        session.unlink(b"e/gone")
    # A tree in which nothing has a place.
    monkeypatch.setattr(replay_module._Replayed, "do", _refused)
    async with rig.mount() as session:
        assert session.shown().keys() == tree_of(rig.source).keys()
        assert list(session.write_back.front.object_table.unshown.values()) == [b"e/kept"]
        assert await hidden_files(session) == (["e/kept"], ["written-hidden"])
        await session.drained()
        assert await hidden_files(session) == ([], [])
    there = tree_of(rig.source)
    assert there[b"e/kept"].content == b"kept"
    assert b"e/gone" not in there


@pytest.mark.promise(116)
@pytest.mark.parametrize("change", ["replace", "unlink"])
async def test_a_file_whose_time_an_earlier_mount_has_set_is_known_over_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, change: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.utime(b"d/a", 10**18)
    # The object of the file was never synced, and its time alone is left to be brought.
    rig.lose_state()
    rig.boot_again()
    async with rig.mount() as session:
        if change == "replace":
            await session.write(b"new", b"written", synced=True)
            await session.rename(b"new", b"d/a")
        else:
            session.unlink(b"d/a")
        await session.drained()
        assert session.shown().keys() == tree_of(rig.source).keys()
        if change == "replace":
            assert (rig.source / "d/a").read_bytes() == b"written"
        await session.end()


@pytest.mark.promise(176)
@pytest.mark.parametrize("kind", ["same", "lost state"])
@pytest.mark.parametrize("change", ["rename", "link"])
async def test_a_renamed_file_that_others_have_removed_is_drained_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    kind: str,
    change: str,
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"d/new", b"written")
        await session.chmod(b"d/a", 0o600)
        await session.drained()
        # The drain lets a task that changes names continue for a while.
        for name in (b"new", b"a"):
            await getattr(session, change)(b"d/" + name, b"h/" + name)
    shutil.rmtree(rig.source / "d")
    async with rig.mount(works=False, **how(kind, rig)) as session:
        shown = session.shown()
        for name, content in ((b"h/new", b"written"), (b"h/a", b"old d/a")):
            assert (shown[name].content, shown[name].safety) == (content, "none")
    async with rig.mount() as session:
        await session.drained()
        assert session.shown()[b"h/a"].safety == "source"
        there = tree_of(rig.source)
        assert (there[b"h/new"].content, there[b"h/a"].content) == (b"written", b"old d/a")
        await session.end()
    async with rig.mount() as session:
        assert session.shown().keys() == tree_of(rig.source).keys()


@pytest.mark.promise(176)
@pytest.mark.parametrize("change", ["rename", "link"])
async def test_a_file_that_one_mount_did_not_find_is_drained_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, change: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await getattr(session, change)(b"d/a", b"h/a")
        if change == "link":
            session.unlink(b"d/a")
    shutil.rmtree(rig.source / "d")
    with monkeypatch.context() as patched:
        patched.setattr(SourceEntries, change, refused)
        async with rig.mount() as session:
            # The content that was not written is done without a file; the change is refused.
            await session.at_rest()
            assert [it.kind for it in session.write_back.drain.queue.refusals()][:1] == [change]
    async with rig.mount() as session:
        with trio.move_on_after(3600):
            await session.drained()
        assert tree_of(rig.source)[b"h/a"].content == b"old d/a"


def refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.promise(128)
async def test_a_refused_link_of_a_file_that_others_have_written_is_no_conflict_of_a_later_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.link(b"d/a", b"h/a")
    (rig.source / "d/a").write_bytes(b"others' version")
    with monkeypatch.context() as patched:
        patched.setattr(SourceEntries, "link", refused)
        for _ in range(2):
            async with rig.mount() as session:
                await session.at_rest()
                assert [it.kind for it in session.write_back.drain.queue.refusals()] == ["link"]
    async with rig.mount() as session:
        await session.drained()
    assert (rig.source / "h/a").samefile(rig.source / "d/a")
    assert not [path for path in tree_of(rig.source) if b".monarch-conflict-" in path]


@pytest.mark.promise(176)
@pytest.mark.parametrize("place", ["file", "link"])
@pytest.mark.parametrize("change", ["rename", "link"])
async def test_a_file_whose_directory_others_have_replaced_is_drained_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    change: str,
    place: str,
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await getattr(session, change)(b"d/a", b"h/a")
        if change == "link":
            session.unlink(b"d/a")
    shutil.rmtree(rig.source / "d")
    if place == "file":
        (rig.source / "d").write_bytes(b"others' file")
    else:
        (rig.source / "d").symlink_to("h")
    async with rig.mount() as session:
        await session.drained()
        assert session.write_back.drain.backlog().trouble is None
    assert tree_of(rig.source)[b"h/a"].content == b"old d/a"


@pytest.mark.promise(129)
async def test_a_renamed_file_that_the_source_has_is_not_drained_again_over_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"d/new", b"written")
        await session.drained()
        await session.rename(b"d/new", b"h/new")
    before = (rig.source / "d/new").stat()
    async with rig.mount(**how("lost state", rig)) as session:
        await session.drained()
    async with rig.mount(refreshed=True) as session:
        assert not rig.put_off
        await session.drained()
        assert session.shown()[b"h/new"].content == b"written"
    assert (rig.source / "h/new").stat().st_ino == before.st_ino


@pytest.mark.promise(129)
@pytest.mark.parametrize("change", ["rename", "link"])
async def test_a_time_that_the_source_has_is_not_drained_again_over_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, change: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"d/new", b"written")
        await session.drained()
        await session.utime(b"d/new", 10**18)
        await session.setxattr(b"d/new", b"user.set", b"later")
        await session.drained()
        await getattr(session, change)(b"d/new", b"h/new")
    async with rig.mount(**how("lost state", rig)) as session:
        shown = session.shown()[b"h/new"]
        assert shown.xattrs == ((b"user.set", b"later"),)
        assert session.names.attributes(session.ino(b"h/new")).mtime_ns == 10**18
        await session.drained()
        await session.end()
    async with rig.mount(refreshed=True):
        assert not rig.put_off
    survey = rig.left.survey()
    assert survey is not None and survey.operations == 0


@pytest.mark.promise(31, 129)
@pytest.mark.parametrize("change", ["chmod", "utime"])
async def test_attributes_that_the_source_has_are_shown_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, change: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"d/new", b"written")
        await session.setxattr(b"d/new", b"user.set", b"1")
        await session.drained()
        # The drain lets a task that makes changes continue for a while.
        await getattr(session, change)(b"d/new", 0o600)
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        assert await shown_xattrs(session, b"d/new") == {b"user.set": b"1"}
    async with rig.mount() as session:
        await session.drained()
        assert await shown_xattrs(session, b"d/new") == {b"user.set": b"1"}
        await session.end()
    assert os.getxattr(rig.source / "d/new", "user.set") == b"1"


@pytest.mark.promise(31, 129)
async def test_a_file_that_loses_one_of_its_names_keeps_its_attributes_over_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"d/new", b"written")
        await session.setxattr(b"d/new", b"user.set", b"1")
        await session.link(b"d/new", b"h/new")
        await session.drained()
        # The drain lets a task that makes changes continue for a while.
        session.unlink(b"h/new")
        expected = session.shown()[b"d/new"]
        assert await shown_xattrs(session, b"d/new") == {b"user.set": b"1"}
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        assert await shown_xattrs(session, b"d/new") == {b"user.set": b"1"}
        assert session.shown()[b"d/new"] == expected
    async with rig.mount() as session:
        await session.drained()
        assert await shown_xattrs(session, b"d/new") == {b"user.set": b"1"}
        await session.end()
    assert os.getxattr(rig.source / "d/new", "user.set") == b"1"
    assert not (rig.source / "h/new").exists()


@pytest.mark.promise(31, 128)
@pytest.mark.parametrize("kind", ["same", "lost state"])
async def test_attributes_of_directories_that_the_source_lacks_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, kind: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    for name in ("user.theirs", "user.removed", "user.changed"):
        os.setxattr(rig.source / "d", name, b"old")
    async with rig.mount(works=False) as session:
        await session.setxattr(b"d", b"user.set", b"new")
        await session.setxattr(b"d", b"user.changed", b"new")
        await session.setxattr(b"d", b"user.removed", None)
    expected = {b"user.theirs": b"old", b"user.set": b"new", b"user.changed": b"new"}
    async with rig.mount(works=False, **how(kind, rig)) as session:
        assert await shown_xattrs(session, b"d") == expected
        # A further change must not forget those of the earlier mount.
        await session.setxattr(b"d", b"user.last", b"new")
        expected[b"user.last"] = b"new"
        assert await shown_xattrs(session, b"d") == expected
    async with rig.mount() as session:
        assert await shown_xattrs(session, b"d") == expected
        await session.drained()
        assert await shown_xattrs(session, b"d") == expected
        await session.end()
    names = map(os.fsencode, os.listxattr(rig.source / "d"))
    assert {name: os.getxattr(rig.source / "d", name) for name in names} == expected


@pytest.mark.promise(67, 88)
@pytest.mark.parametrize("kind", ["same", "lost state"])
async def test_the_set_id_bits_that_a_write_has_removed_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, kind: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        for path in (b"d/a", b"d/new"):
            await session.write(path, b"program")
            await session.chmod(path, 0o6755)
            await session.write(path, b"written", synced=True)
            assert session.shown()[path].mode == 0o755
    async with rig.mount(works=False, **how(kind, rig)) as session:
        assert {session.shown()[path].mode for path in (b"d/a", b"d/new")} == {0o755}
    async with rig.mount() as session:
        await session.drained()
        assert session.shown()[b"d/new"].mode == 0o755
        await session.end()
    assert {tree_of(rig.source)[path].mode for path in (b"d/a", b"d/new")} == {0o755}


@pytest.mark.promise(67, 128)
@pytest.mark.parametrize("kind", ["same", "never", "lost state"])
async def test_a_written_file_has_the_mode_that_its_owner_gave_it_at_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, kind: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        (rig.source / "d/a").chmod(0o600)
        os.chown(rig.source / "d/a", 1234, 1234)
        # It is served with these from now on.
        with suppress(SourceError):
            await session.front.source.look_again(session.ino(b"d/a"))
        await session.write(b"d/a", b"written")
        assert session.shown()[b"d/a"].mode == 0o600
    async with rig.mount(works=False, **how(kind, rig)) as session:
        now = session.names.attributes(session.ino(b"d/a"))
        assert (now.mode & 0o7777, now.uid, now.gid) == (0o600, 1234, 1234)
        assert session.shown()[b"d/a"].content == b"written"


@pytest.mark.promise(67, 129)
async def test_a_file_that_others_have_removed_stays_its_owner_s_if_it_was_written_at_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """The journal has no content of it, and the next mount has a new snapshot."""
    rig = prepared(tmp_path, monkeypatch)
    (rig.source / "d/a").chmod(0o640)
    os.chown(rig.source / "d/a", 1234, 4321)
    async with rig.mount(works=False) as session:
        await session.files.write(await session.open(b"d/a"), 0, b"new")
    (rig.source / "d/a").unlink()
    rig.lose_state()
    async with rig.mount() as session:
        now = session.names.attributes(session.ino(b"d/a"))
        assert (now.mode & 0o7777, now.uid, now.gid) == (0o640, 1234, 4321)
        await session.drained()
        await session.end()
    status = (rig.source / "d/a").stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o640, 1234, 4321)
    assert (rig.source / "d/a").read_bytes() == b"new d/a"


@pytest.mark.promise(79, 129)
@pytest.mark.parametrize("is_recorded", [False, True])
async def test_written_bytes_do_not_get_the_owner_of_a_file_that_another_user_has_put_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    is_recorded: bool,
) -> None:
    """The next mount has a new snapshot. ``is_recorded``: the journal has a content."""
    rig = prepared(tmp_path, monkeypatch)
    (rig.source / "d/a").chmod(0o600)
    async with rig.mount(works=False) as session:
        ino = await session.open(b"d/a")
        await session.files.write(ino, 0, b"new")
        if is_recorded:
            session.files.release(ino)
    (rig.source / "theirs").write_bytes(b"of another")
    (rig.source / "theirs").chmod(0o666)
    os.chown(rig.source / "theirs", 1234, 1234)
    (rig.source / "theirs").replace(rig.source / "d/a")
    rig.lose_state()
    async with rig.mount() as session:
        now = session.names.attributes(session.ino(b"d/a"))
        assert (now.mode & 0o7777, now.uid, now.gid) == (0o600, os.geteuid(), os.getegid())
        assert session.shown()[b"d/a"].content == b"new d/a"
        await session.drained()
        await session.end()
    assert (rig.source / "d/a").read_bytes() == b"of another"
    (kept,) = (rig.source / "d").glob("a.monarch-conflict-*")
    status = kept.stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o600, os.geteuid())
    assert kept.read_bytes() == b"new d/a"


@pytest.mark.promise(79, 129)
async def test_a_file_that_was_closed_and_given_away_at_the_source_is_not_opened_by_a_new_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    """The mount that has brought it was killed before the journal has a mark of that."""

    def reached(name: str) -> None:
        if name == "drain-renamed":
            raise Killed(name)

    rig = prepared(tmp_path, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", reached)
        try:
            async with rig.mount() as session:
                await session.write(b"d/a", b"written", synced=True)
                await session.drained()
        except BaseException as error:
            if not is_killed(error):
                raise
    assert (rig.source / "d/a").read_bytes() == b"written"
    (rig.source / "d/a").chmod(0o640)
    os.chown(rig.source / "d/a", 1234, 1234)
    rig.lose_state()
    async with rig.mount(works=False) as session:
        now = session.names.attributes(session.ino(b"d/a"))
        # The owner is known when it is drained: another file may have its number.
        assert (now.mode & 0o7777, now.uid) == (0o640, os.geteuid())
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    status = (rig.source / "d/a").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o640, 1234)


@pytest.mark.promise(31, 128)
@pytest.mark.parametrize("kind", ["same", "never", "refresh"])
async def test_attributes_are_not_those_of_the_file_that_has_the_first_name_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, kind: str
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.write(b"d/a", b"written")
        await session.setxattr(b"d/a", b"user.set", b"1")
        await session.link(b"d/a", b"h/x")
        session.unlink(b"d/a")
        await session.write(b"d/a", b"other")
        await session.setxattr(b"d/a", b"user.other", b"2")
        await session.drained()
        node = session.names.node(session.ino(b"h/x"))
        assert node is not None and session.front.drained.release_if_clean(node)
        assert await shown_xattrs(session, b"h/x") == {b"user.set": b"1"}
        await session.end()
    async with rig.mount(**how(kind, rig)) as session:
        assert await shown_xattrs(session, b"h/x") == {b"user.set": b"1"}
        assert await shown_xattrs(session, b"d/a") == {b"user.other": b"2"}
        await session.end()


async def shown_xattrs(session: Session, path: bytes) -> dict[bytes, bytes]:
    """The extended attributes that a process finds, as ``ExtendedAttributes`` answers."""
    attributes, ino = session.front.attributes, session.ino(path)
    there = await attributes.xattrs_elsewhere(ino)
    if there is not None:
        return there
    known = {name: attributes.xattr(ino, name) for name in attributes.xattrs(ino)}
    return {name: value for name, value in known.items() if value is not None}


@pytest.mark.promise(129)
async def test_a_file_that_replaced_one_name_of_another_is_shown_under_that_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.rename(b"h/of the source", b"b")
    shutil.rmtree(rig.source / "h")
    with monkeypatch.context() as patched:
        patched.setattr(StagedContents, "open_place", _full)
        patched.setattr(SourceWriter, "has_room", _has_no_room)
        async with rig.mount() as session:
            # The rename found no file: the content is to bring it, and the source is full.
            while next(session.write_back.drain.queue.entries()).op.kind != "content":
                await trio.sleep(1)
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        shown = session.shown()
        assert shown[b"b"].content == b"old h/of the source"
        assert (shown[b"c"].content, shown[b"c"].safety) == (b"old b", "source")
        before = shown
    async with rig.mount() as session:
        await session.drained()
        there = tree_of(rig.source)
        assert {path: it.bare for path, it in there.items()} == {
            path: it.bare for path, it in before.items() if path != b"h"
        }


@pytest.mark.promise(129)
async def test_a_file_with_a_name_in_a_directory_that_was_replaced_has_its_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.write(b"x", b"written", synced=True)
    (rig.source / "x/deep").mkdir(parents=True)
    for path in ("x/one", "x/deep/two"):
        (rig.source / path).write_bytes(b"of others")
        (rig.source / Path(path).name).hardlink_to(rig.source / path)
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        assert session.shown()[b"x"].content == b"written"
        for path in (b"one", b"two"):
            await session.chmod(path, 0o600)
            assert list(session.names.visible_paths(session.ino(path))) == [path]
            assert session.shown()[path].content == b"of others"
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    there = tree_of(rig.source)
    assert there[b"one"].mode == there[b"two"].mode == 0o600
    assert there[b"x/one"].content == there[b"x/deep/two"].content == b"of others"


@pytest.mark.promise(116, 129)
async def test_a_drained_time_of_a_file_that_has_lost_a_name_is_no_conflict_over_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.utime(b"c", 10**9)
    # A drain that was killed before it could tell: the file's other name is another's.
    (rig.source / "b").unlink()
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        await session.write(b"c", b"new c", synced=True)
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    there = tree_of(rig.source)
    assert there[b"c"].content == b"new c"
    assert not any(b".monarch-conflict-" in path for path in there)


@pytest.mark.promise(129, 133)
@pytest.mark.parametrize("order", [(b"b", b"x"), (b"x", b"b")])
async def test_two_files_of_which_others_have_made_one_both_keep_what_was_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    order: tuple[bytes, bytes],
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    other = rig.source / "x"
    other.write_bytes(b"old x")
    async with rig.mount(works=False) as session:
        other.unlink()
        other.hardlink_to(rig.source / "b")
        for path in order:
            await session.write(path, b"new " + path, synced=True)
    async with rig.mount(**how("lost state", rig)) as session:
        for _ in range(2):
            shown = session.shown()
            assert {path: shown[path].content for path in order} == {
                path: b"new " + path for path in order
            }
            await session.drained()
        await session.end()
    there = tree_of(rig.source)
    assert [there[path].content for path in (b"b", b"c", b"x")] == [b"new b", b"new b", b"new x"]


@pytest.mark.promise(128, 176)
async def test_a_conflict_is_met_once_and_does_not_put_the_snapshot_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.write(b"a", b"written", synced=True)
        await session.chmod(b"d/a", 0o600)
    for name in ("a", "d/a"):
        (rig.source / name).write_bytes(b"others' version")
    for _ in range(2):
        async with rig.mount() as session:
            await session.drained()
    [kept] = rig.source.glob("a.monarch-conflict-*")
    assert kept.read_bytes() == b"written"
    # Of this one nothing was written here.
    assert not list(rig.source.glob("d/*.monarch-conflict-*"))
    async with rig.mount(refreshed=True) as session:
        assert not rig.put_off
        assert session.shown()[b"a"].content == b"others' version"


@pytest.mark.promise(128)
async def test_a_file_that_others_alone_have_changed_is_no_conflict_of_a_later_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        # The file has got an object before it shows that the name is taken.
        with pytest.raises(Refused):
            await session.link(b"d/a", b"b")
    (rig.source / "d/a").write_bytes(b"others' version")
    for _ in range(2):
        async with rig.mount() as session:
            await session.drained()
    assert not list(rig.source.glob("d/*.monarch-conflict-*"))
    async with rig.mount(refreshed=True) as session:
        assert not rig.put_off
        assert session.shown()[b"d/a"].content == b"others' version"


@pytest.mark.promise(128)
async def test_a_conflict_of_a_renamed_file_with_newer_bytes_is_met_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount(works=False) as session:
        await session.write(b"d/a", b"written")
        await session.rename(b"d/a", b"a")
        # The first content brings these bytes already.
        await session.write(b"a", b"newer")
    (rig.source / "a").write_bytes(b"others' version")
    for _ in range(2):
        async with rig.mount(refreshed=True) as session:
            await session.drained()
    assert not rig.put_off
    [kept] = rig.source.glob("*.monarch-conflict-*")
    assert kept.read_bytes() == b"newer"
    assert (rig.source / "a").read_bytes() == b"others' version"


async def hidden_files(session: Session) -> tuple[list[str], list[str]]:
    """What `monarch ckpt lost` and health report about files that are not shown."""
    loss_alarm = LossAlarm(session.rig.state)
    verb = WrittenVerbs(
        names=session.names, write_back=session.write_back, loss_alarm=loss_alarm
    ).table()["lost"]

    async def send(part: object) -> None:
        raise AssertionError("it is one answer")

    answer = LostReport.from_dict(await verb({}, send))
    check = WriteStatus(session.rig.settings(), session.write_back, loss_alarm)
    return answer.hidden, [problem.kind for problem in check.problems()]


def _full(*args: object, **more: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _has_no_room(writer: SourceWriter, size: int) -> bool:
    return False


def _refused(again: object) -> None:
    raise ValueError("as a mistake would")


@pytest.mark.promise(67, 129)
async def test_a_name_beneath_a_directory_that_is_to_be_renamed_is_not_taken_for_a_removed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = prepared(tmp_path, monkeypatch)
    async with rig.mount() as session:
        await session.mkdir(b"made")
        await session.write(b"made/new", b"written")
        await session.link(b"made/new", b"d/new")
        await session.drained()
        # The drain lets a task that makes changes continue for a while.
        await session.rename(b"made", b"renamed")
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        ino = session.ino(b"renamed/new")
        with suppress(SourceError):
            await session.revalidation.look_again(ino)
        assert session.ino(b"renamed/new") == ino
