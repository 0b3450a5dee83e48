"""The broker refuses messages that no job sends, and other users; the client reports what is wrong.

The broker is a thread here, except where it is started.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monarch.datasets import staging_broker, staging_link, staging_socket
from monarch.datasets.staging import StagingArea, StagingWarning
from monarch.datasets.staging_batch import store
from monarch.datasets.staging_broker import Broker
from monarch.datasets.staging_link import Link, Place
from monarch.datasets.staging_messages import (
    Answer,
    Ask,
    MessageError,
    Request,
    Terms,
    decode_answer,
    receive,
)
from monarch.datasets.staging_table import Kind
from monarch.errors import MonarchError
from monarch.posix.files import closing_fd
from tests.equipment.waiting import wait_until

TERMS = Terms(10, 4, 60.0, 0)
JOIN = Request(Ask.JOIN, 0, 1, 1, TERMS)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path) as directory:
        yield directory


@contextmanager
def serving(tmp_path: Path) -> Iterator[Path]:
    """A directory with the socket of a broker ``test``, which ends with its connections."""
    (tmp_path / "area").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "area/test"))
        listener.listen(16)
        thread = threading.Thread(target=Broker(listener, 0.0).serve)
        with connected(tmp_path / "area"):
            thread.start()
            # Connections are accepted in their order, so the first one is accepted now.
            with connected(tmp_path / "area") as second:
                second.send(b"x")
                assert is_refused(second)
            yield tmp_path / "area"
        thread.join(60)
        assert not thread.is_alive()


def connected(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(str(directory / "test"))
    return connection


def asked(connection: socket.socket, kind: Ask, position: int) -> Answer:
    connection.send(JOIN._replace(kind=kind, position=position).encode())
    message, fd = receive(connection)
    if fd >= 0:
        os.close(fd)
    return decode_answer(message)


def open_files() -> set[str]:
    """The paths of the files that this process has open."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            found.add(os.readlink(entry))
    return found


def send_without_end(connection: socket.socket, message: bytes) -> None:
    while True:
        connection.send(message)


def is_refused(connection: socket.socket) -> bool:
    try:
        return receive(connection) == (b"", -1)
    except ConnectionError:
        return True


def area(
    directory: Path, *, jobs: int = 1, depth: int = 16, stall_timeout: float = 60.0
) -> StagingArea:
    return StagingArea(
        "test", jobs=jobs, depth=depth, stall_timeout=stall_timeout, directory=directory
    )


def numbers(made: StagingArea, epoch: int = 0, count: int = 10) -> list[int]:
    return [
        int(batch["b"])
        for batch in made.epoch(epoch, count, lambda b: {"b": np.array(b)})
        if isinstance(batch, dict)
    ]


@pytest.mark.promise(263)
@pytest.mark.parametrize(
    "message",
    [
        b"x",
        JOIN.encode()[:-1],
        JOIN.encode() + b"x",
        b"y" * 10000,
        JOIN._replace(jobs=0).encode(),
        JOIN._replace(terms=TERMS._replace(depth=257)).encode(),
        JOIN._replace(terms=TERMS._replace(stall_s=float("nan"))).encode(),
        JOIN._replace(terms=TERMS._replace(stall_s=-1.0)).encode(),
        JOIN._replace(terms=TERMS._replace(batches=0)).encode(),
        JOIN._replace(position=(1 << 64) - 1).encode(),
        JOIN._replace(kind=Ask.WANT).encode(),
        b"MSA1" + JOIN.encode()[4:],
        JOIN.encode()[:4] + b"\x09" + JOIN.encode()[5:],
    ],
    ids=range(13),
)
def test_a_message_that_no_job_sends_ends_its_connection_only(
    directory: Path, message: bytes
) -> None:
    with connected(directory) as job, connected(directory) as hostile:
        job.send(JOIN.encode())
        hostile.send(message)
        assert is_refused(hostile)
        assert asked(job, Ask.WANT, 0).kind == Kind.PRODUCE


@pytest.mark.promise(263)
def test_only_sealed_memory_is_published(directory: Path) -> None:
    def published(job: socket.socket, fd: int) -> bool:
        job.send(JOIN.encode())
        assert asked(job, Ask.WANT, 0)[:2] == (Kind.PRODUCE, 0)
        publish = JOIN._replace(kind=Ask.PUBLISH).encode()
        socket.send_fds(job, [publish], [fd] if fd >= 0 else [])
        try:
            return asked(job, Ask.WANT, 0).kind == Kind.READY
        except (ConnectionError, MessageError):
            return False

    with connected(directory) as job, closing_fd(os.open("/dev/zero", os.O_RDONLY)) as fd:
        assert not published(job, fd)
    with connected(directory) as job, closing_fd(os.memfd_create("test")) as fd:
        assert not published(job, fd)
    with connected(directory) as job:
        assert not published(job, -1)
    with connected(directory) as job, closing_fd(store(b"abc")) as fd:
        assert published(job, fd)
    with connected(directory) as job, closing_fd(store(b"abc")) as fd:
        socket.send_fds(job, [JOIN.encode()], [fd])
        assert is_refused(job)


@pytest.mark.promise(263)
def test_a_job_that_reads_no_replies_is_removed(directory: Path) -> None:
    with connected(directory) as job:
        job.send(JOIN.encode())
        with pytest.raises(ConnectionError):
            send_without_end(job, JOIN._replace(kind=Ask.WANT).encode())


@pytest.mark.promise(259)
def test_the_broker_keeps_no_descriptor_of_jobs_that_have_left(directory: Path) -> None:
    # The pidfd of the second connection may still be among them.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with area(directory) as made:
            assert numbers(made) == list(range(10))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "all are closed")


@pytest.mark.promise(263)
def test_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_broker, "peer_of", lambda _: (os.getpid(), os.geteuid() + 1))
    with connected(directory) as other:
        assert is_refused(other)


@pytest.mark.promise(263)
def test_a_socket_of_another_user_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_socket, "peer_of", lambda _: (os.getpid(), os.geteuid() + 1))
    with area(directory) as made, pytest.raises(MonarchError, match="of another user"):
        numbers(made)


@pytest.mark.promise(263)
def test_a_directory_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        with area(tmp_path / name) as made, pytest.raises(MonarchError, match="mode 0700"):
            numbers(made)


def test_jobs_with_other_epochs_are_refused(directory: Path) -> None:
    with connected(directory) as job:
        job.send(JOIN.encode())
        asked(job, Ask.WANT, 0)
        with area(directory) as made, pytest.raises(MonarchError, match="another number of batch"):
            numbers(made, count=11)
    with area(directory) as made:
        numbers(made)
        with pytest.raises(ValueError, match="10 batches, not 11"):
            numbers(made, count=11)


def test_an_error_of_the_preparation_is_raised_and_the_epoch_can_be_begun_again(
    directory: Path,
) -> None:
    def fail(_: int) -> bytes:
        raise ZeroDivisionError

    with area(directory) as made:
        with pytest.raises(ZeroDivisionError):
            next(made.epoch(0, 10, fail))
        assert numbers(made) == list(range(10))
        assert (made.prepared, made.expulsions) == (10, 0)


def test_epochs_may_be_left_and_skipped(directory: Path) -> None:
    with area(directory) as made:
        assert [next(made.epoch(epoch, 10, lambda b: b"%d" % b)) for epoch in (0, 7, 3)] == [
            b"0"
        ] * 3
        assert numbers(made, epoch=4) == list(range(10))


@pytest.mark.promise(261)
def test_a_job_works_alone_if_the_broker_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_link, "_LEAST_SILENCE_S", 0.1)
    directory = tmp_path / "area"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / "test"))
        listener.listen(16)
        with (
            area(directory, stall_timeout=0.1) as made,
            pytest.warns(StagingWarning, match="does not answer"),
        ):
            assert numbers(made) == list(range(10))


@pytest.mark.promise(260)
def test_a_job_that_was_stopped_together_with_the_broker_is_not_expelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_s, was_stopped = [0.0], threading.Event()

    class Stopped(selectors.DefaultSelector):
        """The process of the broker is stopped in its first wait with a limit."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            events = super().select(timeout)
            if timeout and not events and not was_stopped.is_set():
                stopped_s[0] = 10 * TERMS.stall_s
                was_stopped.set()
            return events

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s[0], sleep=time.sleep)
    monkeypatch.setattr(staging_broker, "time", clock)
    monkeypatch.setattr(staging_broker.selectors, "DefaultSelector", Stopped)
    with serving(tmp_path) as directory, connected(directory) as job, connected(directory) as other:
        job.send(JOIN.encode())
        assert asked(job, Ask.WANT, 0).kind == Kind.PRODUCE
        other.send(JOIN.encode())
        other.send(JOIN._replace(kind=Ask.AWAIT).encode())
        assert was_stopped.wait(60)
        with closing_fd(store(b"content")) as fd:
            socket.send_fds(job, [JOIN._replace(kind=Ask.PUBLISH).encode()], [fd])
        message, received = receive(other)
        with closing_fd(received):
            assert decode_answer(message).kind == Kind.READY


@pytest.mark.promise(261)
def test_a_job_that_was_stopped_together_with_the_broker_waits_for_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        """Nothing can be read when the process continues: the broker has not answered yet."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register
            self._waits = 0

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            self._waits += 1
            return [] if self._waits == 1 else self._poll.poll(timeout_ms)

    monkeypatch.setattr(staging_link, "select", SimpleNamespace(poll=Stopped, POLLIN=select.POLLIN))
    with area(directory) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(made) == list(range(10))


@pytest.mark.parametrize("name", ["", "a/b", ".x", "a b", "x" * 65, "t.lock"])
def test_a_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(ValueError, match="plain word"):
        StagingArea(name)


@pytest.mark.parametrize("option", ["jobs", "depth", "stall_timeout"])
def test_numbers_out_of_range_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        area(tmp_path, **{option: 0})


@pytest.mark.promise(264)
def test_the_broker_ends_after_its_jobs_and_leaves_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_socket, "LINGER_S", 1.0)
    directory = tmp_path / ("long" * 50) / "area"
    directory.parent.mkdir()
    with area(directory) as made:
        assert numbers(made) == list(range(10))
        assert sorted(os.listdir(directory)) == ["test", "test.jobs", "test.lock"]
        assert (directory / "test").stat().st_mode & 0o777 == 0o600
    wait_until(lambda: os.listdir(directory) == [], "the broker has ended")


@pytest.mark.promise(261)
def test_a_process_belongs_to_the_directory_of_its_broker_also_if_another_one_has_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the broker of the new directory waits for a process that never comes, and the old
    broker removes the files of the new one."""
    directory, moved = tmp_path / "area", tmp_path / "moved"
    names = ["test", "test.jobs", "test.lock"]
    spawn = staging_socket._spawn

    def replace_directory(*arguments: Any) -> None:
        directory.rename(moved)
        directory.mkdir(mode=0o700)
        for name in names:
            (directory / name).touch()
        spawn(*arguments)

    monkeypatch.setattr(staging_socket, "_spawn", replace_directory)
    monkeypatch.setattr(staging_socket, "LINGER_S", 0.1)
    link = Link(Place(directory, "test", 1))
    link.open(Terms(1, 1, 1.0, 0), Ask.ATTACH, 0)
    assert str(moved / "test.jobs") in open_files()
    link.close()
    wait_until(lambda: os.listdir(moved) == [], "the broker has ended")
    assert sorted(os.listdir(directory)) == names
