"""Workers of a staging area prepare batches ahead, and end with their job. The broker is started as
a process, and the workers are forked from the test."""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch.datasets.staging import StagingArea, StagingWarning
from monarch.datasets.staging_batch import Views, store
from monarch.datasets.staging_members import Membership, living_members
from monarch.datasets.staging_messages import receive
from monarch.datasets.staging_worker import Workers
from monarch.errors import MonarchError
from monarch.posix.files import closing_fd
from tests.datasets.brokers import brokers, kill_brokers
from tests.equipment.waiting import wait_until

ROOT = Path(__file__).parents[2]
COUNT = 10


class Log:
    """The batches that were prepared, by any process, each with the process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, number: int) -> None:
        os.write(self._fd, b"%d %d\n" % (number, os.getpid()))

    def lines(self) -> list[list[int]]:
        content = os.pread(self._fd, 1 << 20, 0).decode()
        return [list(map(int, line.split())) for line in content.splitlines()]

    @property
    def numbers(self) -> list[int]:
        return sorted(number for number, _ in self.lines())

    @property
    def processes(self) -> set[int]:
        return {process for _, process in self.lines()}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The directory of an area, whose broker is killed at the end."""
    yield tmp_path / "area"
    kill_brokers(tmp_path / "area")


def kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), f"process {pid} ends")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def has_ended(pid: int) -> bool:
    """Whether this process could wait for its child, or has. The state of a process is that of a
    zombie a moment earlier, while its other threads end."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def area(directory: Path, **options: Any) -> StagingArea:
    return StagingArea("test", directory=directory, **{"jobs": 1, "stall_timeout": 600, **options})


def number_of(batch: Views) -> int:
    assert isinstance(batch, dict)
    return int(batch["b"])


def batches(made: StagingArea, log: Log, epoch: int = 0) -> Iterator[int]:
    def produce(number: int) -> dict[str, Any]:
        log.note(number)
        return {"b": np.array(number)}

    return map(number_of, made.epoch(epoch, COUNT, produce))


@pytest.mark.promise(256)
def test_workers_prepare_batches_while_the_job_trains_up_to_the_depth(
    directory: Path, log: Log
) -> None:
    with area(directory, workers=2, depth=4) as made:
        epoch = batches(made, log)
        assert next(epoch) == 0
        wait_until(lambda: log.numbers == [0, 1, 2, 3], "the depth is prepared")
        assert next(epoch) == 1
        # The job has used batch 0 now.
        wait_until(lambda: log.numbers == [0, 1, 2, 3, 4], "one more is prepared")
        assert list(epoch) == list(range(2, COUNT))
        assert made.prepared == COUNT
    assert log.numbers == list(range(COUNT))
    assert os.getpid() not in log.processes
    assert len(log.processes) <= 2


@pytest.mark.promise(261)
def test_a_new_broker_gets_the_batches_of_the_old_one(directory: Path, log: Log) -> None:
    with area(directory, workers=2, depth=6) as made:
        epoch = batches(made, log)
        assert next(epoch) == 0
        wait_until(lambda: log.numbers == list(range(6)), "the depth is prepared")
        (broker,) = brokers(directory)
        kill_process(broker)
        assert list(epoch) == list(range(1, COUNT))
        assert log.numbers == list(range(COUNT))
        assert broker not in brokers(directory)


@pytest.mark.promise(258)
def test_a_worker_that_is_killed_is_replaced_and_its_batch_is_prepared_again(
    directory: Path, tmp_path: Path, log: Log
) -> None:
    def produce(number: int) -> bytes:
        log.note(number)
        if number == 3 and len(log.numbers) == len(set(log.numbers)):
            os.kill(os.getpid(), signal.SIGKILL)
        return b"%d" % number

    with area(directory) as made:
        assert [int(bytes(each)) for each in made.epoch(0, COUNT, produce)] == list(range(COUNT))
    assert log.numbers == sorted([*range(COUNT), 3])


def test_workers_that_always_end_are_reported(directory: Path) -> None:
    def produce(_: int) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    with (
        area(directory) as made,
        pytest.raises(MonarchError, match=r"end again and again, the last one by signal 9"),
    ):
        next(iter(made.epoch(0, COUNT, produce)))


def test_an_error_in_a_worker_is_raised_in_the_job_with_its_trace(directory: Path) -> None:
    def fail(_: int) -> bytes:
        raise ZeroDivisionError("in the batch")

    with area(directory) as made:
        with pytest.raises(ZeroDivisionError, match="in the batch") as caught:
            next(iter(made.epoch(0, COUNT, fail)))
        assert "in fail" in str(caught.value.__cause__)
        assert [bytes(each) for each in made.epoch(0, 10, lambda b: b"%d" % b)][9] == b"9"


@pytest.mark.promise(255)
def test_a_reply_that_comes_after_an_error_is_not_taken_for_the_next_batch(
    directory: Path, tmp_path: Path
) -> None:
    asks, goes = tmp_path / "asks", tmp_path / "goes"

    def produce(number: int) -> dict[str, Any]:
        if number == 1:
            wait_until(goes.exists, "the error was raised")
        if number == 2 and not goes.exists():
            wait_until(asks.exists, "the job asks for batch 1")
            raise ZeroDivisionError
        return {"b": np.array(number)}

    with area(directory, workers=2) as made:
        epoch = made.epoch(0, COUNT, produce)
        assert number_of(next(epoch)) == 0
        asks.touch()
        with pytest.raises(ZeroDivisionError):
            next(epoch)
        goes.touch()
        connection = made._link._connection
        if connection is not None:
            wait_until(lambda: bool(select.select([connection], [], [], 0)[0]), "the reply comes")
        again = made.epoch(0, COUNT, produce)
        assert [number_of(batch) for batch in again] == list(range(COUNT))


def test_an_error_that_cannot_be_sent_is_raised_as_text(directory: Path) -> None:
    class LocalError(Exception):
        pass

    def fail(_: int) -> bytes:
        raise LocalError("text")

    with area(directory) as made, pytest.raises(RuntimeError, match="LocalError: text"):
        next(iter(made.epoch(0, COUNT, fail)))


_PROGRAM = """
import os, sys, time
from monarch.datasets.staging import StagingArea
def produce(number):
    print(os.getpid(), flush=True)
    time.sleep(1000)
next(StagingArea("test", jobs=1, stall_timeout=600, directory=sys.argv[1]).epoch(0, 9, produce))
"""


@pytest.mark.promise(258)
def test_a_worker_ends_with_its_job_in_the_middle_of_a_batch(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(directory)], cwd=ROOT, stdout=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        worker = int(job.stdout.readline())
        assert is_running(worker)
        job.kill()
        try:
            wait_until(lambda: not is_running(worker), "the worker ends")
        finally:
            kill_process(worker)


def test_an_epoch_that_is_left_ends_its_workers(directory: Path, log: Log) -> None:
    with area(directory) as made:
        for epoch in range(3):
            assert next(batches(made, log, epoch)) == 0
        processes = log.processes
        assert len(processes) == 3
    wait_until(lambda: not any(map(is_running, processes)), "all have ended")


def test_a_worker_that_has_ended_does_not_stay_a_zombie(directory: Path, log: Log) -> None:
    with area(directory) as made:
        assert list(batches(made, log)) == list(range(COUNT))
        (first,) = log.processes
        epoch = batches(made, log, 1)
        next(epoch)
        wait_until(lambda: has_ended(first), "the worker of the first epoch ends")
        next(epoch)
        assert not Path(f"/proc/{first}").exists()


def test_an_interrupt_in_the_first_moment_of_a_worker_stays_there(
    directory: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, fork, forks = os.getpid(), os.fork, list[int]()

    def interrupted() -> int:
        forks.append(fork())
        if forks == [0]:
            raise KeyboardInterrupt
        return forks[-1]

    monkeypatch.setattr(os, "fork", interrupted)
    try:
        with area(directory) as made:
            assert list(batches(made, log)) == list(range(COUNT))
    finally:
        if os.getpid() != job:
            (directory.parent / "escaped").touch()
            os._exit(1)
    assert len(forks) == 2 and not (directory.parent / "escaped").exists()


def test_a_worker_that_ends_late_does_not_stay_a_zombie(
    directory: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.datasets.staging_worker._END_S", 0)
    with area(directory, workers=9) as made:
        next(batches(made, log))
    late = log.processes
    wait_until(lambda: all(map(has_ended, late)), "the workers end")
    with area(directory) as made:
        next(batches(made, log))
        assert not any(Path(f"/proc/{worker}").exists() for worker in late)


def test_the_workers_of_an_area_that_was_dropped_end(directory: Path, log: Log) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    made = area(directory)
    next(batches(made, log))
    (worker,) = log.processes
    del made
    assert not Path(f"/proc/{worker}").exists()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_forked_process_leaves_the_workers_of_the_first_one_alone(
    directory: Path, log: Log
) -> None:
    with area(directory) as made:
        epoch = batches(made, log)
        assert next(epoch) == 0
        child = os.fork()
        if not child:
            # The end of the process ends its copies of the iterator and of the area.
            status = 1
            with suppress(BaseException):
                del epoch
                made.close()
                status = 0
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(epoch) == list(range(1, COUNT))
        assert len(log.processes) == 1


def test_a_job_that_works_alone_uses_its_workers(directory: Path, log: Log) -> None:
    with area(directory, workers=2) as first, area(directory, workers=2) as late:
        epoch = batches(first, log, 5)
        next(epoch)
        assert list(batches(late, log)) == list(range(COUNT))
        assert os.getpid() not in log.processes
        assert late.prepared == COUNT


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """The workers that hang, as they note before: time passes only while one of them runs."""
    noted = Log(tmp_path / "hung")
    monkeypatch.setattr("monarch.datasets.staging_worker._LOOK_MS", 10)
    listen = Workers._listen

    def listened(workers: Workers) -> float:
        listen(workers)
        return 1e9 if any(map(is_running, noted.processes)) else 0.0

    monkeypatch.setattr(Workers, "_listen", listened)
    return noted


@pytest.mark.promise(260)
def test_a_worker_that_hangs_while_its_job_works_alone_is_replaced(
    directory: Path, log: Log, hung: Log
) -> None:
    def produce(number: int) -> dict[str, Any]:
        log.note(number)
        if number == 3 and not hung.lines():
            hung.note(number)
            signal.pause()
        return {"b": np.array(number)}

    with area(directory) as first, area(directory) as late:
        next(batches(first, Log(directory.parent / "first"), 5))
        with pytest.warns(StagingWarning, match=r"1 process .* sent nothing for 3000 seconds"):
            made = [number_of(batch) for batch in late.epoch(0, COUNT, produce)]
        assert made == list(range(COUNT))
        assert not any(map(is_running, hung.processes))
    assert log.numbers.count(3) == 2
    assert os.getpid() not in log.processes


@pytest.mark.promise(260)
def test_a_job_whose_workers_hang_again_and_again_is_an_error(directory: Path, hung: Log) -> None:
    def produce(number: int) -> bytes:
        hung.note(number)
        signal.pause()
        return b""

    with area(directory) as first, area(directory) as late:
        next(batches(first, Log(directory.parent / "first"), 5))
        with pytest.raises(MonarchError, match=r"hang again and again.*for 3000 seconds"):
            next(iter(late.epoch(0, COUNT, produce)))
        assert len(hung.processes) == 4
        assert not any(map(is_running, hung.processes))


@pytest.mark.promise(261)
def test_workers_continue_if_the_broker_hangs(
    directory: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.datasets.staging_link._LEAST_SILENCE_S", 0.2)
    with area(directory, stall_timeout=0.1) as made:
        epoch = batches(made, log)
        assert next(epoch) == 0
        (broker,) = brokers(directory)
        os.kill(broker, signal.SIGSTOP)
        with pytest.warns(StagingWarning, match="does not answer"):
            assert list(epoch) == list(range(1, COUNT))
        assert os.getpid() not in log.processes


def test_jobs_with_other_fingerprints_are_refused(directory: Path, log: Log) -> None:
    with (
        area(directory, fingerprint="seed 1, batches of 256") as made,
        area(directory, fingerprint="seed 2, batches of 256") as other,
    ):
        next(batches(made, log))
        with pytest.raises(MonarchError, match="another fingerprint"):
            next(batches(other, log))


def test_members_are_known_by_their_locks(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    here = Membership("test")
    here.enter(directory)
    fd = os.open(tmp_path / "test.jobs", os.O_RDWR)
    go, ended = os.pipe()
    children = []
    for _ in range(20):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            other = Membership("test")
            other.enter(directory)
            os.write(writing, other.number.to_bytes(8, "little"))
            os.close(ended)
            os.read(go, 1)
            os._exit(0)
        children.append((child, int.from_bytes(os.read(reading, 8), "little")))
        os.close(reading)
        os.close(writing)
    assert living_members(fd) == {number for _, number in children}
    kill_process(children[0][0])
    assert living_members(fd) == {number for _, number in children[1:]}
    os.close(ended)
    for child, _ in children:
        os.waitpid(child, 0)
    assert living_members(fd) == set()
    for each in (go, fd, directory):
        os.close(each)
    here.leave()


def test_a_member_notices_that_its_file_was_removed(tmp_path: Path) -> None:
    here = Membership("test")
    with closing_fd(os.open(tmp_path, os.O_RDONLY)) as directory:
        here.enter(directory)
        (tmp_path / "test.jobs").unlink()
        here.enter(directory)
    assert (tmp_path / "test.jobs").exists()
    here.leave()


def test_a_worker_prepares_with_signals_and_threads_of_its_own(directory: Path) -> None:
    def produce(_: int) -> bytes:
        is_main = threading.current_thread() is threading.main_thread()
        return b"%d %d" % (is_main, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with area(directory) as made:
            assert bytes(next(iter(made.epoch(0, 10, produce)))) == b"1 1"
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.promise(261)
def test_workers_continue_if_no_broker_can_be_started(directory: Path, log: Log) -> None:
    with area(directory, workers=2) as made:
        assert list(batches(made, log)) == list(range(COUNT))
        kill_brokers(directory)
        # A worker of the first epoch may start a broker at any time.
        directory.chmod(0o750)
        with pytest.warns(StagingWarning, match="mode 0700"):
            assert list(batches(made, log, 1)) == list(range(COUNT))
        assert os.getpid() not in log.processes
        directory.chmod(0o700)
        assert list(batches(made, log, 2)) == list(range(COUNT))


def test_a_descriptor_of_a_batch_is_not_inherited_and_its_loss_is_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, closing_fd(store(b"abc")) as fd:
        socket.send_fds(ours, [b"x"], [fd])
        message, received = receive(theirs)
        with closing_fd(received):
            assert (message, os.get_inheritable(received)) == (b"x", False)
        socket.send_fds(ours, [b"x"], [fd])
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                receive(theirs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.errno == errno.EMFILE
