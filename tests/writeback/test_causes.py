"""Why written data is not drained: the source, the tier's disk or the daemon is named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.daemon.write_status import LossAlarm, WriteStatus
from monarch.telemetry.health import Problem
from monarch.writeback import undrained
from monarch.writeback.journal import Journal
from monarch.writeback.objects import Objects, object_path
from monarch.writeback.op import Op
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.undrained import UndrainedNotes
from tests.writeback.remounts import Rig, Session

OLD, NEW = b"what the source had", b"what was written"
LONG_S = 700


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def problems(session: Session) -> list[Problem]:
    status = WriteStatus(session.rig.settings(), session.write_back, LossAlarm(session.rig.state))
    return list(status.problems())


def directory(path: Path) -> str:
    path.mkdir()
    return "a directory"


def link(path: Path) -> str:
    path.symlink_to("/etc/passwd")
    return "a symbolic link"


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "a fifo"


@pytest.mark.promise(73)
@pytest.mark.fault("T20")
@pytest.mark.parametrize("make", [directory, link, fifo])
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "unsynced"])
async def test_something_else_in_the_place_of_an_object_is_named_and_is_no_refusal_of_the_source(
    rig: Rig,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], str],
    synced: bool,
) -> None:
    (rig.source / "f").write_bytes(OLD)
    async with rig.mount(works=False) as session:
        await session.write(b"f", NEW, synced=synced)
        await session.write(b"other", NEW)
        node = session.names.node(session.ino(b"f"))
        assert node is not None
        path = object_path(rig.directory, node.object)
        session.kill()
    path.unlink()
    kind = make(path)
    for _ in range(2):
        async with rig.mount() as session:
            await session.drained()
            assert "drain-refused" not in {problem.kind for problem in problems(session)}
            assert not session.write_back.drain.backlog().failures
            await session.end()
        assert (rig.source / "f").read_bytes() == OLD
        assert (rig.source / "other").read_bytes() == NEW
    assert f"{kind} is in the place of its object '{path}'" in caplog.text
    assert "refuses" not in caplog.text


def raising(number: int) -> Callable[..., int]:
    def call(*args: object, **more: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.fault("M4")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE], ids=errno.errorcode.get)
@pytest.mark.parametrize(("part", "name"), [(Objects, "open"), (StagedContents, "open_place")])
async def test_a_daemon_without_descriptors_is_named_and_sets_nothing_aside(
    rig: Rig,
    clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    part: type,
    name: str,
) -> None:
    async with rig.mount() as session:
        with monkeypatch.context() as patched:
            patched.setattr(part, name, raising(number))
            await session.write(b"f", NEW, synced=True)
            await trio.sleep(LONG_S)
            [problem] = problems(session)
            assert problem.kind == "drain-refused" and "file descriptors" in problem.what
            assert errno.errorcode[number] in problem.what and "LimitNOFILE" in problem.remedy
            assert "source" not in problem.what
            assert not session.write_back.drain.queue.refusals()
        await session.drained()
        assert problems(session) == []
        await session.end()
    assert (rig.source / "f").read_bytes() == NEW


@pytest.mark.fault("T2")
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EDQUOT], ids=errno.errorcode.get)
async def test_an_error_of_the_tiers_disk_is_no_refusal_of_the_source(
    rig: Rig, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with rig.mount() as session:
        with monkeypatch.context() as patched:
            patched.setattr(Objects, "sync" if number == errno.EIO else "open", raising(number))
            await session.write(b"f", NEW)
            await trio.sleep(LONG_S)
            [problem] = problems(session)
            assert problem.kind == "drain-refused" and "the disk of the tier" in problem.what
            assert os.fspath(rig.directory) in problem.remedy
            assert not session.write_back.drain.queue.refusals()
        await session.drained()
        await session.end()
    assert (rig.source / "f").read_bytes() == NEW


@pytest.mark.fault("T2")
async def test_a_content_that_cannot_be_recorded_anew_is_no_fault_of_the_source(
    rig: Rig, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append

    def failing(journal: Journal, op: Op, *, is_due: bool = False) -> int:
        if op.kind == "content":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return append(journal, op, is_due=is_due)

    async with rig.mount() as session:
        await session.write(b"f", NEW)
        await session.drained()
        # Others remove the file before its rename is drained.
        (rig.source / "f").unlink()
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "append", failing)
            await session.rename(b"f", b"g")
            await trio.sleep(LONG_S)
            [problem] = problems(session)
            assert problem.kind == "drain-refused" and "the disk of the tier" in problem.what
        await session.drained()
        await session.end()
    assert (rig.source / "g").read_bytes() == NEW


async def test_a_refused_change_is_reported_with_its_directory_and_what_to_do(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    (rig.source / "a b").mkdir()
    async with rig.mount() as session:
        (rig.source / "a b/c").write_bytes(OLD)
        await session.mkdir(b"a b/c")
        await trio.sleep(20)
        [problem] = problems(session)
        assert problem.kind == "drain-refused" and "mkdir 'a b/c'" in problem.what
        assert f"`ls -ld '{rig.source / 'a b'}'`" in problem.remedy
        for verb in ("set-aside", "retry", "discard"):
            assert f"`monarch ckpt {verb} " in problem.remedy
        (rig.source / "a b/c").unlink()
        await session.drained()
        assert problems(session) == []
        await session.end()


@pytest.mark.promise(179)
async def test_health_reports_that_undrained_changes_cannot_be_noted(
    rig: Rig, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with rig.mount(works=False) as session:
        written = session.write_back
        notes = UndrainedNotes(rig.state, written.place, written.drain, written.front.object_table)
        status = WriteStatus(rig.settings(), written, LossAlarm(rig.state))
        status.notes = notes
        await notes.finish()
        with monkeypatch.context() as patched:
            patched.setattr(undrained, "write_undrained", full)
            await session.write(b"f", NEW)
            notes.begin()
            [problem] = status.problems()
            assert problem.kind == "undrained-unnoted" and "No space left" in problem.what
            await notes.finish()
            assert [it.kind for it in status.problems()] == ["undrained-unnoted"]
        await notes.finish()
        assert not [*status.problems()]
