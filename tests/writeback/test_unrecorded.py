"""Bytes for which the journal had no room: the tier has the only copy, and everything reports them
as not drained."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from monarch.daemon.write_status import LossAlarm, WriteStatus
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.errors import Refused, Unanswered
from monarch.telemetry.report import DrainReport
from monarch.types import Ino
from monarch.writeback import journal_file, journal_found
from monarch.writeback.earlier import inspect
from monarch.writeback.journal_file import JournalFile
from monarch.writeback.objects import Objects
from tests.writeback.remounts import Rig, Session

pytestmark = pytest.mark.promise(64, 70, 138)

FIRST, SECOND = b"first" * 1000, b"newer" * 1000


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


@contextmanager
def full_journal(session: Session) -> Iterator[None]:
    """No room for contents, as on a disk that others have filled; smaller records still fit."""
    file = session.write_back.place.journal.file
    append = file.append

    def refusing(*records: dict[str, Any], keep: int = 0) -> None:
        if any(record.get("op") == "content" for record in records):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(*records, keep=keep)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file, "append", refusing)
        for question in ("has_room", "has_left"):
            patched.setattr(file, question, lambda count: False)
        yield


@contextmanager
def marks_alone() -> Iterator[None]:
    """All journals have the room that is left for marks, and no other."""
    append = JournalFile.append

    def refusing(file: JournalFile, *records: dict[str, Any], keep: int = 0) -> int:
        if keep:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(file, *records)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JournalFile, "append", refusing)
        for question in ("has_room", "has_left"):
            patched.setattr(JournalFile, question, lambda file, count: False)
        yield


async def drained_and_open(session: Session) -> Ino:
    """A drained file that a process has open to write: so it stays in the tier."""
    await session.write(b"a", FIRST, synced=True)
    await session.drained()
    return await session.open(b"a")


async def rewrite(session: Session, ino: Ino) -> None:
    await session.files.write(ino, 0, SECOND)
    session.files.release(ino)


def of_mount(session: Session) -> str:
    node = session.names.node(session.ino(b"a"))
    assert node is not None
    return session.front.drained.durable(node).decode()


async def waited(session: Session, *, timeout_s: float | None = 1) -> DrainReport:
    """What `monarch ckpt wait` reports, by default after a second."""
    verbs = WrittenVerbs(
        names=session.names, write_back=session.write_back, loss_alarm=LossAlarm(session.rig.state)
    )

    async def send(part: object) -> None: ...

    return DrainReport.from_dict(await verbs.table()["drain"]({"timeout": timeout_s}, send))


async def drained(session: Session) -> None:
    """Waits until `monarch ckpt wait` reports that all is drained."""
    with trio.fail_after(3600):
        assert (await waited(session, timeout_s=None)).drained


def problems(session: Session) -> list[str]:
    check = WriteStatus(session.rig.settings(), session.write_back, LossAlarm(session.rig.state))
    return [problem.what for problem in check.problems() if problem.kind == "writes-refused"]


async def test_an_object_with_bytes_that_have_no_record_does_not_leave_the_tier(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        with full_journal(session):
            await rewrite(session, ino)
            node = session.names.node(ino)
            assert node is not None
            assert session.front.drained.release_oldest(1 << 30) == 0
            assert not session.front.drained.release_if_clean(node)
            assert session.shown()[b"a"].content == SECOND
        await trio.sleep(5)
        await session.drained()
        assert (rig.source / "a").read_bytes() == SECOND
        assert of_mount(session) == "source"


async def test_bytes_without_a_record_are_not_called_drained(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        with full_journal(session):
            await rewrite(session, ino)
            assert of_mount(session) == "none"
            report = await waited(session)
            assert not report.drained and "'a'" in report.trouble
            # Health names the file also when no write was refused for long.
            await trio.sleep(1000)
            assert any("'a'" in what for what in problems(session))
            [waiting] = inspect(rig.directory).waiting
            assert (waiting.path, waiting.size) == (b"a", len(SECOND))
        await drained(session)
        assert not inspect(rig.directory).operations
        assert (rig.source / "a").read_bytes() == SECOND


async def test_an_fsync_for_which_the_journal_has_no_room_fails_until_it_has(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    """The source has as many bytes as the file: it must not be taken for one that has not grown."""
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        with full_journal(session):
            await session.files.write(ino, 0, SECOND)
            for _ in range(2):
                with pytest.raises(Refused) as caught:
                    await session.front.fsyncs.sync(ino, None)
                assert caught.value.errno == errno.ENOSPC
        await session.front.fsyncs.sync(ino, None)
        session.files.release(ino)
        await session.drained()
        assert (rig.source / "a").read_bytes() == SECOND


async def test_bytes_without_a_record_reach_the_source_with_what_is_appended_later(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    """The source has the beginning of an older version, to which nothing may be appended."""
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        with full_journal(session):
            await rewrite(session, ino)
        ino = await session.open(b"a")
        await session.files.write(ino, len(SECOND), b"appended")
        session.files.release(ino)
        await session.drained()
        assert (rig.source / "a").read_bytes() == SECOND + b"appended"


async def test_the_next_mount_finds_bytes_without_a_record_after_a_clean_end(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        with full_journal(session):
            await rewrite(session, ino)
            await session.end(abandoned=True)
    assert [waiting.path for waiting in inspect(rig.directory).waiting] == [b"a"]
    async with rig.mount() as session:
        await session.drained()
        assert (rig.source / "a").read_bytes() == SECOND


async def test_a_mount_begins_although_the_journal_has_no_room_for_these_bytes(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    """Others have filled the disk. Without a mount nothing would give room again."""
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        await session.write(b"waits", FIRST)
        await session.files.write(ino, len(FIRST), SECOND)
    with marks_alone():
        async with rig.mount() as session:
            await session.drained()
            assert (rig.source / "waits").read_bytes() == FIRST
            assert not (await waited(session)).drained
            session.front.drained.release_oldest(1 << 30)
            assert session.shown()[b"a"].content == FIRST + SECOND
            assert of_mount(session) == "none"
    async with rig.mount() as session:
        await session.drained()
        assert (rig.source / "a").read_bytes() == FIRST + SECOND


async def test_the_end_waits_until_the_journal_has_room(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount(writeback={"end_timeout": "10h"}) as session:
        ino = await drained_and_open(session)
        async with trio.open_nursery() as nursery:
            with full_journal(session):
                await rewrite(session, ino)
                nursery.start_soon(session.end)
                await trio.sleep(1)
                assert not session.is_closed
    assert (rig.source / "a").read_bytes() == SECOND
    assert not inspect(rig.directory).operations


async def test_the_end_does_not_wait_for_a_journal_that_has_failed(
    rig: Rig, clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts nothing before the next mount, which finds the bytes."""
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        file = session.write_back.place.journal.file

        def failing(*records: dict[str, Any], keep: int = 0) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(file, "append", failing)
            await session.files.write(ino, len(FIRST), SECOND)
            session.files.release(ino)
            assert "the journal in tier fast has failed" in (await waited(session)).trouble
            await session.end()
    assert not any("not drained at the end" in message for message in caplog.messages)
    assert any("has not accepted" in message for message in caplog.messages)
    async with rig.mount() as session:
        await session.drained()
        assert (rig.source / "a").read_bytes() == FIRST + SECOND


async def test_the_drain_goes_on_behind_a_file_that_the_source_has_lost(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    """The rename needs a content of the file, for which the room for marks is used."""
    (rig.source / "other").touch()
    async with rig.mount() as session:
        await session.write(b"a", FIRST, synced=True)
        await session.drained()
    async with rig.mount(works=False) as session:
        await session.rename(b"a", b"b")
        await session.mkdir(b"later")
    (rig.source / "a").unlink()
    with marks_alone():
        async with rig.mount() as session:
            with trio.fail_after(3600):
                await session.drained()
    assert (rig.source / "b").read_bytes() == FIRST
    assert (rig.source / "later").is_dir()


def _no_disk(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.promise(72)
@pytest.mark.parametrize(
    ("call", "why"), [("append", "the journal in tier fast has failed"), ("sync", "EIO")]
)
async def test_a_wait_without_a_limit_ends_when_the_journal_has_failed(
    rig: Rig, clock: trio.testing.MockClock, call: str, why: str
) -> None:
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        file = session.write_back.place.journal.file
        with pytest.MonkeyPatch.context() as patched:
            if call == "append":
                patched.setattr(file, "append", _no_disk)
            else:
                patched.setattr(journal_file.os, "fdatasync", _no_disk)
            with suppress(Refused):
                await rewrite(session, ino)
            with trio.fail_after(3600):
                report = await waited(session, timeout_s=None)
            assert not report.drained and why in report.trouble
            assert (call == "append") == session.front.recorder.is_broken


@pytest.mark.promise(72, 139)
async def test_a_wait_goes_on_when_another_file_takes_the_place_of_a_failed_journal(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        ino = await drained_and_open(session)
        file = session.write_back.place.journal.file
        with pytest.MonkeyPatch.context() as patched, trio.fail_after(3600):
            patched.setattr(journal_file.os, "fdatasync", _no_disk)
            with suppress(Refused):
                await rewrite(session, ino)
            while not file.failed:
                await trio.sleep(0.01)
        with trio.fail_after(3600):
            report = await waited(session, timeout_s=None)
        assert report.drained and not file.failed
    assert (rig.source / "a").read_bytes() == SECOND
    assert not inspect(rig.directory).operations


async def test_a_file_whose_path_cannot_be_read_is_reported_all_the_same(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    """The status never fails, and no file with bytes that have no record counts as drained."""

    def unreadable(*_: object) -> Iterator[bytes]:
        raise Unanswered

    async with rig.mount() as session:
        ino = await drained_and_open(session)
        with full_journal(session):
            await rewrite(session, ino)
            objects = session.front.objects.on_disk
            objects.note_failure(1, errno.EIO)
            with pytest.MonkeyPatch.context() as patched:
                for question in ("visible_path", "visible_paths"):
                    patched.setattr(session.names, question, unreadable)
                check = WriteStatus(
                    rig.settings(), session.write_back, LossAlarm(session.rig.state)
                )
                found = {problem.kind: problem.what for problem in check.problems()}
                assert found.keys() >= {"writes-refused", "fsync-failed"}
                assert f"inode {ino}" in found["writes-refused"]
                report = await waited(session)
                assert not report.drained
            objects.forget_failure(1)
        await drained(session)


@pytest.mark.parametrize("is_clean", [True, False])
async def test_the_end_of_a_mount_checks_no_object_unless_its_daemon_was_killed(
    rig: Rig,
    clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    is_clean: bool,
) -> None:
    async with rig.mount() as session:
        await drained_and_open(session)
        await session.write(b"waits", FIRST, synced=True)
        if is_clean:
            await session.end(abandoned=True)
    found = inspect(rig.directory)
    looks: list[int] = []
    status, find = Objects.status, journal_found.object_path

    def looked(objects: Objects, number: int) -> os.stat_result:
        looks.append(number)
        return status(objects, number)

    def at(directory: Path, number: int) -> Path:
        looks.append(number)
        return find(directory, number)

    monkeypatch.setattr(Objects, "status", looked)
    monkeypatch.setattr(journal_found, "object_path", at)
    assert inspect(rig.directory, has_ended=True) == found
    assert bool(looks) != is_clean
    # The next mount checks them: the tier may have been restored meanwhile.
    inspect(rig.directory)
    assert looks
