"""A source that is full for all users: removals overtake the contents that lack room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.posix.credentials import Credentials
from monarch.text import KiB, MiB
from monarch.writeback.drain import Drain
from monarch.writeback.op import Op
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_entries import SourceEntries
from tests.conftest import require_root
from tests.equipment import disks
from tests.writeback.rig import Model, draining

Clock = trio.testing.MockClock

ALICE, BOB = Credentials(1001, 1001), Credentials(1002, 1002)
_OLD = 900 * KiB
_NEW = b"n" * (1500 * KiB)


async def until(holds: Callable[[], bool]) -> None:
    """In small steps: the clock of the test runs while a thread works."""
    with trio.fail_after(20_000):
        while not holds():
            await trio.sleep(0.25)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Model]:
    """Of a disk of 4 MiB with four old files, two of them in a directory, and no room for ``_NEW``.
    All users may write there."""
    require_root()
    with disks.in_memory(tmp_path / "full", 4) as source:
        (source / "d").mkdir()
        for name in ("a", "b", "d/a", "d/b"):
            (source / name).write_bytes(os.urandom(_OLD))
        for path in (source, source / "d"):
            path.chmod(0o777)
        (tmp_path / "tier").mkdir()
        yield Model(source, tmp_path / "tier")


class Counter:
    """The calls of ``method`` of a class, which are made in threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: type, method: str) -> None:
        self.calls = 0
        call = getattr(of, method)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return call(*arguments, **options)

        monkeypatch.setattr(of, method, counted)


async def until_full(drain: Drain) -> None:
    await until(lambda: drain.queue.is_full)
    assert "No space left on device (ENOSPC)" in (drain.stopped or "")
    assert drain.backlog().cause == "room"


def require_drained(
    model: Model, drain: Drain, caplog: pytest.LogCaptureFixture, *, refused: int = 0
) -> None:
    assert drain.backlog().trouble is None
    assert drain.queue.refused == refused
    assert "set aside" not in caplog.text
    assert caplog.text.count("the source is full") == 1
    model.check_all_is_there()


@pytest.mark.fault("S19")
@pytest.mark.promise(65, 81)
async def test_removals_make_room_at_a_full_source_for_what_waits(
    full: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(full) as drain:
        full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        full.rename(b"new", b"latest")
        made = full.mkdir(b"made")
        full.unlink(b"a")
        await until(lambda: not (full.source / "a").exists())
        assert not (drain.progress.is_done(made) or (full.source / "made").exists())
        full.unlink(b"d/a")
        await until(lambda: drain.progress.has_all(full.last_seq))
        require_drained(full, drain, caplog)


@pytest.mark.promise(65, 81)
async def test_a_directory_removed_on_the_mount_makes_room_at_a_full_source(
    full: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """With changes of it that waited before, as ``chmod -R u+w`` makes them."""
    async with draining(full) as drain:
        full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        for path in (b"d", b"d/a", b"d/b"):
            full.chmod(path, 0o700)
        for name in (b"d/a", b"d/b"):
            full.unlink(name)
        full.rmdir(b"d")
        await until(lambda: drain.progress.has_all(full.last_seq))
        require_drained(full, drain, caplog)


@pytest.mark.promise(65, 81)
async def test_a_truncation_waits_for_its_turn_and_the_removal_of_its_file_does_not(
    full: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that was emptied or cut is a new version: the log that was copied before may not be at
    the source yet."""
    async with draining(full) as drain:
        full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        cut = full.write(b"a", b"", synced=True), full.write(b"b", b"1", synced=True)
        over = full.rename(b"d/a", b"d/b")
        await trio.sleep(600)
        assert [(full.source / name).stat().st_size for name in ("a", "b", "d/b")] == [_OLD] * 3
        assert not any(map(drain.progress.is_done, (*cut, over)))
        full.unlink(b"a")
        full.unlink(b"b")
        await until(lambda: drain.progress.has_all(full.last_seq))
        require_drained(full, drain, caplog)


@pytest.mark.promise(65, 81)
async def test_removals_of_one_user_make_room_for_another_user(
    full: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("d/a", "d/b"):
        os.chown(full.source / name, BOB.uid, BOB.gid)
    async with draining(full) as drain:
        full.by, full.owner = ALICE, ALICE.uid
        first = full.write(b"alice", _NEW, synced=True)
        await until_full(drain)
        full.by, full.owner = BOB, BOB.uid
        second = full.write(b"bob", b"1", synced=True)
        full.unlink(b"d/a")
        await until(lambda: not (full.source / "d/a").exists())
        assert not (drain.progress.is_done(first) or drain.progress.is_done(second))
        full.unlink(b"d/b")
        await until(lambda: drain.progress.has_all(full.last_seq))
        require_drained(full, drain, caplog)


@pytest.mark.promise(67, 81)
async def test_removals_make_room_at_a_full_source_over_a_remount(
    full: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(full) as drain:
        full.write(b"new", _NEW, synced=True)
        full.chmod(b"d", 0o755)
        await until_full(drain)
        removed = full.unlink(b"a")
        await until(lambda: drain.progress.is_done(removed))
        full.unlink(b"d/a")
    caplog.clear()
    async with draining(full, full.kill()) as drain:
        await until(lambda: drain.progress.has_all(full.last_seq))
        require_drained(full, drain, caplog)


@pytest.mark.promise(65, 81)
@pytest.mark.parametrize("order", ["before", "behind"])
async def test_a_waiting_content_whose_file_is_removed_is_given_up(
    full: Model, patient_clock: Clock, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    """Also behind one that waits: the older version at the source then leaves, and makes room."""
    async with draining(full) as drain:
        if order == "before":
            full.write(b"huge", bytes(8 * MiB), synced=True)
            await until_full(drain)
        small = full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        full.write(b"a", b"2" * MiB, synced=True)
        full.write(b"d/a", b"2" * MiB, synced=True)
        begun_s = trio.current_time()
        for name in (b"a", b"d/a"):
            full.unlink(name)
        if order == "before":
            full.unlink(b"huge")
        await until(lambda: drain.progress.is_done(small))
        assert trio.current_time() - begun_s < 10
        await until(lambda: drain.progress.has_all(full.last_seq))
        require_drained(full, drain, caplog)


@pytest.mark.promise(65, 81)
async def test_a_removal_does_not_go_ahead_of_what_it_depends_on(
    full: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(full) as drain:
        full.write(b"d/new", _NEW, synced=True)
        await until_full(drain)
        # It may close the directory to the content beneath it, which waits; and the removal may
        # need it.
        full.chmod(b"d", 0o755)
        full.unlink(b"d/a")
        # The only name of the file, until the source has the other one.
        full.link(b"a", b"second")
        full.unlink(b"a")
        tried = drain.backlog().failures
        await until(lambda: drain.backlog().failures > tried + 3)
        assert {"a", "d"} <= {*os.listdir(full.source)} and (full.source / "d/a").exists()
        full.unlink(b"b")
        await until(lambda: not (full.source / "b").exists())
        assert (full.source / "a").exists()
        # Others make room.
        os.truncate(full.source / "d/b", 0)
        await until(lambda: drain.progress.has_all(full.last_seq))
    assert not (full.source / "d/a").exists() and (full.source / "second").exists()


@pytest.mark.fault("S19")
@pytest.mark.promise(69)
async def test_a_full_source_is_tried_once_a_minute_while_nothing_makes_room(
    full: Model, patient_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if temporary files come and go, of which the source never has one."""
    begun = Counter(monkeypatch, StagedContents, "open_place")
    async with draining(full) as drain:
        full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        await trio.sleep(300)
        before = begun.calls
        await trio.sleep(3600)
        assert 59 <= begun.calls - before <= 61
        before, waiting = begun.calls, len(drain.queue.held)
        for number in range(600):
            full.write(b"temporary%d" % number, b"1")
            await trio.sleep(0.5)
            full.unlink(b"temporary%d" % number)
            await trio.sleep(0.5)
        assert begun.calls - before <= 12
        # Their changes have left the queue.
        assert len(drain.queue.held) - waiting < 4 * 70


@pytest.mark.promise(63, 69, 153)
async def test_callers_wait_for_a_full_source_and_do_not_make_it_busy(
    full: Model, patient_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, done = Counter(monkeypatch, StagedContents, "open_place"), list[int]()

    async def fsync(drain: Drain, user: int) -> None:
        await drain.progress.wait_for(b"other", object=0, user=user)
        done.append(user)

    async with draining(full) as drain, trio.open_nursery() as nursery:
        full.by, full.owner = ALICE, ALICE.uid
        full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        before = begun.calls
        # All changes before an fsync are at the source when it returns, also those of other users.
        for number in range(100):
            nursery.start_soon(fsync, drain, BOB.uid)
            await trio.sleep(0.1 if number < 50 else 1)
        assert begun.calls - before <= 10 + 60 // 1
        await trio.sleep(60)
        before = begun.calls
        await trio.sleep(600)
        assert begun.calls - before <= 121 and not done
        full.unlink(b"a")
        full.unlink(b"b")
    assert len(done) == 100


@pytest.mark.promise(81, 146)
async def test_a_quota_of_one_user_and_a_source_that_is_full_for_all(
    full: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_place, quota = StagedContents.open_place, [True]

    def refused(self: StagedContents, op: Op, *more: Any, **others: Any) -> int:
        if op.by == ALICE and quota[0]:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return open_place(self, op, *more, **others)

    monkeypatch.setattr(StagedContents, "open_place", refused)
    async with draining(full) as drain:
        full.by, full.owner = ALICE, ALICE.uid
        alice = full.write(b"alice", b"1", synced=True)
        await until(lambda: drain.queue.refused > 0)
        full.by, full.owner = BOB, BOB.uid
        bob = full.write(b"bob", _NEW, synced=True)
        await until_full(drain)
        full.by = None
        full.unlink(b"a")
        full.unlink(b"b")
        await until(lambda: drain.progress.is_done(bob))
        assert not drain.progress.is_done(alice)
        # Only that is a refusal.
        await until(lambda: bool(drain.backlog().aside))
        (refusal,) = drain.backlog().aside
        assert (refusal.path, refusal.seq) == (b"alice", alice)
        assert drain.stopped is None
        quota[0] = False
        await until(lambda: drain.progress.has_all(full.last_seq))
    full.check_all_is_there()


def remounted(path: Path, option: str) -> bool:
    """Whether the file system could be mounted anew: not while a file is open to be written."""
    return subprocess.run(["mount", "-o", f"remount,{option}", path]).returncode == 0


@pytest.mark.fault("S19")
@pytest.mark.promise(69, 81)
async def test_a_full_source_that_becomes_read_only_continues_when_it_is_neither(
    full: Model, patient_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(full) as drain:
        full.write(b"new", _NEW, synced=True)
        await until_full(drain)
        await until(lambda: remounted(full.source, "ro"))
        full.unlink(b"a")
        full.unlink(b"b")
        await until(lambda: "(EROFS)" in (drain.stopped or ""))
        assert drain.backlog().cause == "source"
        failures = drain.backlog().failures
        await trio.sleep(600)
        assert drain.backlog().failures - failures <= 16
        assert remounted(full.source, "rw")
        await until(lambda: drain.progress.has_all(full.last_seq))
        assert drain.queue.refused == 0 and drain.stopped is None
    full.check_all_is_there()


@pytest.mark.promise(69, 81)
async def test_removals_for_which_a_full_source_has_no_room_are_not_tried_one_after_the_other(
    full: Model, patient_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that copies on write."""
    with monkeypatch.context() as patched:

        def refused(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(SourceEntries, "unlink", refused)
        removals = Counter(patched, SourceEntries, "unlink")
        async with draining(full) as drain:
            full.write(b"new", _NEW, synced=True)
            await until_full(drain)
            for name in (b"a", b"b", b"d/a", b"d/b"):
                full.unlink(name)
            await until(lambda: removals.calls > 0)
            await trio.sleep(300)
            before = removals.calls
            await trio.sleep(3600)
            assert 59 <= removals.calls - before <= 61
            patched.undo()
            await until(lambda: drain.progress.has_all(full.last_seq))
            assert drain.queue.refused == 0
    full.check_all_is_there()
