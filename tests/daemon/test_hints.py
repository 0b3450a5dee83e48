"""Hints: their files are checked, and their orders end with the descriptor or the process."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from monarch.daemon import hints
from monarch.daemon.hints import Hints
from monarch.daemon.measuring import Measuring
from monarch.errors import Refused
from monarch.foresight.announced import Announcements, Limits
from monarch.foresight.messages import (
    HITS,
    NO_DESCRIPTOR,
    SAMPLES,
    Begin,
    encode_begin,
    encode_count,
    encode_end,
    encode_limit,
    encode_piece,
    encode_progress,
)
from monarch.namespace.build import build
from monarch.namespace.snapshot import Snapshot
from monarch.posix.buckets import bucket
from monarch.posix.credentials import Credentials
from monarch.transfer.source_calls import Caller
from monarch.types import Ino
from monarch.vfs.measured import MeasuredJobs

ALICE = 1001
NAMES = ("all", "alice's", "root's")


class Rig:
    """Hints of this process, and of others, about three files with different modes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.announcements = Announcements(Limits(user_orders=4))
        self.woken = 0
        self.measured = MeasuredJobs(bucket)
        self.measuring = Measuring(self.measured, sends_opens=True)
        # Opens that the datapath has answered, and that are not counted yet.
        self.answered: list[Ino] = []
        # Hints that the datapath has refused since it was asked: their number, and of the last one
        # the user and the process.
        self.full = (0, 0, 0)
        self.hints = Hints(
            snapshot, self.announcements, self.measuring, self._wake, self._catch_up, self._refused
        )
        self.inos = [snapshot.lookup(Ino(1), name.encode()) or 0 for name in NAMES]

    def _catch_up(self) -> None:
        for ino in self.answered:
            self.announcements.opened(ino)
        self.answered.clear()

    def _wake(self) -> None:
        self.woken += 1

    def _refused(self) -> tuple[int, int, int]:
        full, self.full = self.full, (0, 0, 0)
        return full

    def send(self, message: bytes, *, uid: int = ALICE, pid: int | None = None) -> int:
        pid = os.getpid() if pid is None else pid
        return self.hints.receive(message, Caller(pid, uid, uid))

    def begin(self, descriptor: int = NO_DESCRIPTOR, *, pid: int | None = None) -> int:
        return self.send(encode_begin(Begin(1, descriptor, SAMPLES, 3)), pid=pid)

    def refused(self, message: bytes, **kwargs: int) -> int:
        with pytest.raises(Refused) as refusal:
            self.send(message, **kwargs)
        return refusal.value.errno


@pytest.fixture
def rig(source: Path, tmp_path: Path) -> Iterator[Rig]:
    for name, mode, owner in zip(NAMES, (0o644, 0o600, 0o600), (0, ALICE, 0), strict=True):
        (source / name).write_bytes(b"x")
        (source / name).chmod(mode)
        os.chown(source / name, owner, 0)
    build(source, tmp_path / "snapshot")
    with Snapshot.open(tmp_path / "snapshot") as snapshot:
        yield Rig(snapshot)


@pytest.fixture(autouse=True)
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The processor time of the messages: it does not pass by itself."""
    seconds = [0.0, 0.0]
    clock = itertools.count()
    # Each message asks twice.
    monkeypatch.setattr(
        hints, "time", SimpleNamespace(thread_time=lambda: seconds[0] * (next(clock) % 2))
    )
    return seconds


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.hints.run)
        yield
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_files_that_the_user_may_not_read_keep_only_their_position(rig: Rig) -> None:
    assert rig.begin() == 0
    assert rig.send(encode_piece(1, 0, [*rig.inos, 99, 1])) == 2
    assert rig.announcements.next(9, 9) == rig.inos[:2]
    assert rig.announcements.report().unknown == 3
    assert rig.send(encode_progress(1, 1)) == 0
    assert rig.announcements.report().entries == 4
    assert rig.woken == 3
    assert rig.send(encode_end(1)) == 0
    assert len(rig.announcements) == 0


async def test_the_orders_of_a_user_share_what_is_known_of_directories(rig: Rig) -> None:
    """It takes megabytes that are not counted as memory of orders."""
    for uid in (ALICE, ALICE + 1):
        for number in range(4):
            begin = encode_begin(Begin(10 * uid + number, NO_DESCRIPTOR, SAMPLES, 0))
            assert rig.send(begin, uid=uid) == 0
    assert len({id(watched.access) for watched in rig.hints._watched.values()}) == 2
    for uid in (ALICE, ALICE + 1):
        for number in range(4):
            rig.send(encode_end(10 * uid + number), uid=uid)
    assert len(rig.hints._access) == 0


async def test_a_limit_measures_the_session_of_its_process(rig: Rig) -> None:
    # The session of the tests has no number if it was begun outside their PID namespace.
    with subprocess.Popen(["sleep", "infinity"], start_new_session=True) as process:
        try:
            pid = process.pid
            assert rig.refused(encode_count(HITS), pid=pid) == errno.EINVAL
            assert rig.send(encode_limit(0.5, 1 << 20), pid=pid) == 0
            job = rig.measured.of(pid)
            assert job is not None
            assert (job.share, job.source.rate, job.uid) == (0.5, 1 << 20, ALICE)
            job.hits = 3
            assert rig.send(encode_count(HITS), pid=pid) == 3
        finally:
            process.kill()
    assert rig.woken == 0 and len(rig.announcements) == 0


async def test_refusals_are_counted_and_logged_once_a_minute(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert rig.refused(b"\2" + bytes(30)) == errno.EINVAL
        assert rig.refused(encode_piece(1, 0, [2])) == errno.EINVAL
        for number in range(4):
            rig.send(encode_begin(Begin(number, NO_DESCRIPTOR, SAMPLES, 0)))
        assert rig.refused(encode_begin(Begin(9, NO_DESCRIPTOR, SAMPLES, 0))) == errno.ENOSPC
        assert rig.refused(encode_end(1), uid=ALICE + 1) == errno.EPERM
        assert rig.refused(encode_end(1), pid=os.getppid()) == errno.EINVAL
        assert rig.woken == 4
    assert [record.args[2] for record in caplog.records if record.args] == [  # type: ignore[index]
        "Invalid argument (EINVAL)",
        "No space left on device (ENOSPC)",
        "Operation not permitted (EPERM)",
    ]
    assert rig.announcements.report().refused == 5


async def test_the_refusals_of_many_users_do_not_fill_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A person may have 65,536 user numbers in a user namespace."""
    with caplog.at_level(logging.WARNING):
        for uid in range(100_000, 101_000):
            assert rig.refused(encode_end(1), uid=uid) == errno.EINVAL
    assert len(caplog.records) <= 64
    assert rig.announcements.report().refused == 1000


@pytest.mark.fault("I10")
async def test_hints_that_the_datapath_has_refused_are_counted_and_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async with running(rig):
        with caplog.at_level(logging.WARNING):
            await trio.sleep(2.5)
            assert caplog.messages == []
            for count in (7, 1):
                rig.full = (count, ALICE, 55)
                await trio.sleep(1.1)
    (line,) = caplog.messages
    assert line.startswith(f"a hint of user {ALICE}, process 55, was refused, as 6 others were")
    assert rig.announcements.report().refused == 8


async def test_the_opens_before_a_report_of_progress_count_for_the_order(rig: Rig) -> None:
    rig.begin()
    rig.send(encode_piece(1, 0, rig.inos))
    rig.answered += map(Ino, rig.inos[:2])
    rig.send(encode_progress(1, 2))
    assert rig.announcements.report().opened == 2


@pytest.mark.fault("I10")
async def test_the_pieces_of_a_user_in_a_second_are_limited(
    rig: Rig, caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    rig.begin()
    async with running(rig):
        for second in range(2):
            for position in range(128):
                rig.send(encode_piece(1, 128 * second + position, [rig.inos[0]]))
            with caplog.at_level(logging.WARNING):
                number = rig.refused(encode_piece(1, 128 * (second + 1), [rig.inos[0]]))
            assert number == errno.EBUSY
            # One line a minute.
            (line,) = (line for line in caplog.messages if f"user {ALICE}," in line)
            assert "busy" in line
            # All other messages, and the pieces of other users, are handled.
            assert rig.send(encode_progress(1, 128 * second)) == 0
            rig.send(encode_begin(Begin(7, NO_DESCRIPTOR, SAMPLES, 0)), uid=ALICE + 1)
            assert rig.send(encode_piece(7, 0, [rig.inos[0]]), uid=ALICE + 1) == 1
            # Many users together may send twice as many.
            sent = 129
            for uid in range(ALICE + 2, ALICE + 200):
                rig.send(encode_begin(Begin(uid, NO_DESCRIPTOR, SAMPLES, 0)), uid=uid)
                with suppress(Refused):
                    sent += rig.send(encode_piece(uid, 0, [rig.inos[0]]), uid=uid)
                rig.send(encode_end(uid), uid=uid)
            assert sent == 256
            await trio.sleep(1.1)


@pytest.mark.fault("I10")
async def test_the_processor_time_of_a_user_and_of_all_in_a_second_is_limited(
    rig: Rig, spent: list[float], autojump_clock: trio.testing.MockClock
) -> None:
    """A process may have 65,536 groups, which a message reads again and again."""
    spent[0] = 0.05
    async with running(rig):
        for _ in range(2):
            for user in (ALICE, ALICE + 1):
                for number in range(4):
                    begin = encode_begin(Begin(100 * user + number, NO_DESCRIPTOR, SAMPLES, 0))
                    assert rig.send(begin, uid=user) == 0
            assert rig.refused(encode_end(100 * ALICE), uid=ALICE) == errno.EBUSY
            assert rig.refused(encode_end(1), uid=ALICE + 2) == errno.EBUSY, "all together"
            await trio.sleep(1.1)
    assert len(rig.announcements) == 8


@pytest.mark.fault("I10")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_few_sets_of_groups_of_a_user_are_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = itertools.count(1)
    monkeypatch.setattr(
        hints, "credentials_of", lambda pid, uid, gid: Credentials(uid, gid, (next(groups),))
    )
    monkeypatch.setattr(hints, "_MOST_ACCESS_OF_ALL", 10)
    rig.announcements = rig.hints._announcements = Announcements()
    begins = [encode_begin(Begin(number, NO_DESCRIPTOR, SAMPLES, 0)) for number in range(12)]
    for begin in begins[:8]:
        assert rig.send(begin) == 0
    assert rig.refused(begins[8]) == errno.ENOSPC
    assert rig.send(begins[9], uid=ALICE + 1) == 0
    assert rig.send(encode_end(0)) == 0
    assert rig.send(begins[8]) == 0
    assert rig.send(begins[10], uid=ALICE + 2) == 0
    assert rig.refused(begins[11], uid=ALICE + 3) == errno.ENOSPC


async def test_an_order_ends_when_its_descriptor_is_closed(
    rig: Rig, source: Path, autojump_clock: trio.testing.MockClock
) -> None:
    fd = os.open(source, os.O_RDONLY)
    rig.begin(fd)
    async with running(rig):
        await trio.sleep(100)
        assert len(rig.announcements) == 1
        os.close(fd)
        await trio.sleep(1.1)
        assert len(rig.announcements) == 0
        # The next file with the number of the descriptor is another one.
        fd = os.open(source, os.O_RDONLY)
        rig.begin(fd)
        os.dup2(os.open(source / "all", os.O_RDONLY), fd)
        await trio.sleep(1.1)
        assert len(rig.announcements) == 0
        os.close(fd)


async def test_a_descriptor_that_is_not_open_is_refused(rig: Rig, source: Path) -> None:
    fd = os.open(source, os.O_RDONLY)
    os.close(fd)
    assert rig.refused(encode_begin(Begin(1, fd, SAMPLES, 3))) == errno.EINVAL
    assert len(rig.announcements) == 0


async def test_the_locks_and_watches_of_a_process_are_not_read(
    rig: Rig,
    source: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel makes a line in ``fdinfo`` for each lock and each watch of a descriptor, and a
    process may have a hundred thousand: that would take a second, in which no request is answered.
    """
    opened, real = list[str](), os.open
    monkeypatch.setattr(
        os, "open", lambda path, *more: (opened.append(str(path)), real(path, *more))[1]
    )
    fd = os.open(source, os.O_RDONLY)
    rig.begin(fd)
    async with running(rig):
        await trio.sleep(2.1)
        assert len(rig.announcements) == 1
    os.close(fd)
    assert [path for path in opened if "fdinfo" in path] == []


async def test_an_order_ends_with_its_process(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        rig.begin(pid=process.pid)
        rig.begin()
        async with running(rig):
            await trio.sleep(100)
            assert len(rig.announcements) == 2
            process.kill()
            # Not reaped yet.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            await trio.sleep(1.1)
            assert len(rig.announcements) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM])
async def test_an_order_whose_process_cannot_be_read_stays(
    rig: Rig,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """The daemon has no free descriptor, or the process has become one of another user."""
    rig.begin()
    with monkeypatch.context() as patch:

        def refuse(_: int) -> int | None:
            raise OSError(number, os.strerror(number))

        patch.setattr(hints, "process_started", refuse)
        assert rig.refused(encode_progress(1, 0)) == errno.EBUSY
        async with running(rig):
            await trio.sleep(5)
            assert len(rig.announcements) == 1
    assert rig.send(encode_progress(1, 0)) == 0


@pytest.mark.parametrize("descriptor", [NO_DESCRIPTOR, 0])
@pytest.mark.parametrize("is_reaped", [True, False])
async def test_an_order_of_a_process_that_has_ended_before_its_message_is_not_kept(
    rig: Rig, caplog: pytest.LogCaptureFixture, is_reaped: bool, descriptor: int
) -> None:
    """It is none of a process that cannot be seen, whose order would stay for ten minutes."""
    begin = encode_begin(Begin(1, descriptor, SAMPLES, 3))
    with subprocess.Popen(["true"]) as process, caplog.at_level(logging.WARNING):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if is_reaped:
            process.wait()
        assert rig.refused(begin, pid=process.pid) == errno.ESRCH
    assert len(rig.announcements) == 0 and caplog.records == []


async def test_all_threads_of_a_process_share_its_orders(rig: Rig) -> None:
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    try:
        rig.begin(pid=waiting.native_id)
        assert rig.send(encode_piece(1, 0, rig.inos[:1])) == 1
    finally:
        done.set()
        waiting.join()


async def test_an_order_of_a_process_that_cannot_be_seen_ends_when_it_is_idle(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    rig.begin(pid=0)
    rig.send(encode_piece(1, 0, [rig.inos[0]] * 3), pid=0)
    async with running(rig):
        for _ in range(3):
            await trio.sleep(590)
            assert rig.announcements.opened(Ino(rig.inos[0]))
        await trio.sleep(590)
        assert len(rig.announcements) == 1
        await trio.sleep(20)
        assert len(rig.announcements) == 0


async def test_an_order_whose_reader_was_killed_unseen_ends_while_another_job_reads(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    """As of a trainer in a container that was killed, and whose next run reads the same files."""
    ino = Ino(rig.inos[0])
    rig.begin(pid=0)
    rig.send(encode_piece(1, 0, [ino] * 99), pid=0)
    async with running(rig):
        for read in range(1, 4):
            await trio.sleep(590)
            assert rig.announcements.opened(ino)
            rig.send(encode_progress(1, read), pid=0)
        assert len(rig.announcements) == 1
        for _ in range(3):
            await trio.sleep(30)
            rig.announcements.opened(ino)
        assert rig.announcements.is_idle(ino)
        await trio.sleep(500)
        rig.announcements.opened(ino)
        await trio.sleep(30)
        assert len(rig.announcements) == 0


async def test_an_order_without_an_open_for_a_minute_is_idle(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    (ino,) = inos = [Ino(rig.inos[0])]
    rig.begin()
    rig.send(encode_piece(1, 0, inos * 3))
    async with running(rig):
        for _ in range(2):
            await trio.sleep(58)
            assert not rig.announcements.is_idle(ino)
            rig.announcements.opened(ino)
        await trio.sleep(58)
        rig.send(encode_progress(1, 1))
        await trio.sleep(5)
        assert rig.announcements.is_idle(ino), "messages are no opens"
        rig.begin()
        rig.send(encode_piece(1, 0, inos))
        await trio.sleep(2)
        assert not rig.announcements.is_idle(ino)


async def test_an_order_that_was_dropped_is_watched_no_longer(
    rig: Rig, autojump_clock: trio.testing.MockClock
) -> None:
    rig.announcements = Announcements(Limits(unmatched=5))
    rig.hints = Hints(rig.snapshot, rig.announcements, rig.measuring)
    rig.begin()
    rig.send(encode_piece(1, 0, rig.inos[:1]))
    for _ in range(6):
        rig.announcements.opened(Ino(99))
    assert rig.refused(encode_progress(1, 1)) == errno.EINVAL
    async with running(rig):
        await trio.sleep(1.1)
    rig.begin()
    assert len(rig.announcements) == 1
