"""Files without an fsync are on the tier's disk after a commit, and no file is reported safer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.posix.thread_pool import ThreadPool
from monarch.writeback.journal import Journal, Op
from monarch.writeback.objects import Objects
from tests.writeback.rig import Disk, Model

Clock = trio.testing.MockClock


async def at_once(threads: ThreadPool, function: Callable[..., object], *args: object) -> object:
    return function(*args)


def rebooted(model: Model) -> list[bytes]:
    """The machine starts again after a clean end; what is lost then."""
    model.journal.close()
    model.boot += "'"
    return [op.path for op in model.open().lost]


@pytest.mark.finding("W3", "W18")
@pytest.mark.promise(136)
async def test_files_that_were_never_fsynced_survive_a_power_cut_after_a_commit(
    model: Model, clock: Clock
) -> None:
    model.write(b"new", b"closed")
    model.create(b"empty")
    model.store(model.begin(b"a"), b"being written")
    await model.commit()
    assert rebooted(model) == []


async def test_files_made_during_a_sync_do_not_count_as_synced(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = Disk.sync_all

    def meanwhile(self: Disk, fd: int) -> None:
        synced(self, fd)
        model.write(b"late", b"2")

    model.write(b"early", b"1")
    monkeypatch.setattr(Disk, "sync_all", meanwhile)
    await model.commit()
    assert rebooted(model) == [b"late"]


async def test_bytes_that_the_disk_refused_do_not_become_durable_by_a_later_commit(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Disk, fd: int) -> None:
        raise OSError(errno.EIO, "no")

    model.write(b"dropped", b"1")
    with closing(model.commits()) as commits:
        with monkeypatch.context() as patched:
            patched.setattr(Disk, "sync_all", refused)
            assert not await commits.commit()
        # The kernel tells so once.
        model.write(b"taken", b"2")
        assert await commits.commit()
    assert rebooted(model) == [b"dropped"]


@pytest.mark.finding("W3", "W18")
async def test_commits_are_made_at_their_interval_while_something_is_written(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[float] = []
    monkeypatch.setattr(Disk, "sync_all", lambda self, fd: synced.append(clock.current_time()))
    # The clock jumps while a thread waits for the disk.
    monkeypatch.setattr(ThreadPool, "run", at_once)
    begun = trio.current_time()
    with closing(model.commits(5.0)) as commits:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(commits.run)
            await trio.sleep(12)
            model.write(b"new", b"1")
            await trio.sleep(20)
            node = model.begin(b"new")
            model.store(node, b"2")
            await trio.sleep(9)
            nursery.cancel_scope.cancel()
    # At the start it is not known what was written before.
    assert [round(at - begun) for at in synced] == [5, 15, 35, 40]


async def test_no_commit_is_made_before_the_end_without_an_interval(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "sync_all", lambda self, fd: pytest.fail("not asked for"))
    model.write(b"new", b"1")
    with closing(model.commits()) as commits, trio.move_on_after(1000):
        await commits.run()


def test_an_object_of_a_killed_life_has_its_name_synced_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "absorbed"
    journal = Journal.open(directory, source=b"/source")
    os.close(Objects(directory).create(5))
    journal.append(Op(kind="create", path=b"a", object=5))
    journal.close()
    journal = Journal.open(directory, source=b"/source")
    objects = Objects(directory, unsynced=journal.doubtful)
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    fd = objects.open(5)
    monkeypatch.setattr(os, "fsync", noted)
    objects.sync(5, fd)
    assert synced == [str(directory / "05"), str(directory)]
    objects.sync(5, fd)
    assert len(synced) == 2
    os.close(fd)
    journal.close()


def test_all_directories_down_to_the_journal_are_synced_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    directory = tmp_path / "monarch" / "absorbed"
    directory.parent.mkdir()
    Journal.open(directory, source=b"/source").close()
    assert {str(directory), str(directory.parent), str(tmp_path)} <= {*synced}


async def test_belief_in_what_was_synced_outlives_a_journal_written_anew(
    model: Model, clock: Clock
) -> None:
    model.write(b"new", b"1", synced=True)
    model.write(b"new", b"2")
    replay = model.kill()
    ops = [(seq, op) for seq, op in replay.ops if op.kind != "content" or not op.synced]
    model.journal.mark_done({seq: None for seq, op in replay.ops if op.synced})
    model.journal.compact(ops, position=model.journal.file.position)
    assert rebooted(model) == []
