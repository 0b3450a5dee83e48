"""What the datapath fetches from other nodes: the right bytes, or Python decides."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from monarch.fuse.datapath import Datapath
from monarch.namespace.snapshot import Snapshot
from monarch.peers.answers import digest_of
from monarch.peers.connections import Connection
from monarch.tiers.contents import copy_name
from monarch.types import Ino
from tests.conftest import contents
from tests.equipment.waiting import becomes_true
from tests.fuse import wire
from tests.fuse.rig import PATIENCE_S, NoMessage, Rig, rig
from tests.fuse.wire import Op
from tests.peers.member import HOST, Act, Member, hang_up, head, say, silent, without_end

# The datapath reads the first bytes of the large file while the others come.
SIZE, LARGE = 5000, 300_000
NAMES = ("one", "two", *(f"more{number}" for number in range(20)))
NOT_KEPT, SLOW = 0xFFFE, 0xFFFF
# A loaded machine must not make a member look slow. A test fails if a thread waits as long.
LONG_US, SHORT_US = int(2e6 * PATIENCE_S), 50_000
# What each MiB may take without being late.
FAIR_US = 1000
FETCHED = 0xFE


class Job:
    """A datapath with one other member, whose number is 1. It has given each file before."""

    def __init__(self, made: Rig, member: Member, arrays: list[np.ndarray], size: int) -> None:
        self.rig = made
        self.member = member
        self.givers, self.digests = arrays
        self._size = size
        for name in NAMES:
            self.givers[made.ino(name)] = 2
            self.digests[made.ino(name)] = digest_of(contents(name, size))

    def connect(self, limit_us: int = LONG_US) -> None:
        """Gives the datapath one more connection."""
        made = Connection(socket.create_connection((HOST, self.member.port)))
        made.limit(limit_us / 1e6)
        assert self.rig.datapath.keep_connection(1, made.socket.detach(), limit_us)

    def read(self, name: str) -> bytes:
        """Opens, reads and releases a file that the datapath opens itself."""
        ino, made = self.rig.ino(name), self.rig
        if made.datapath.state().no_open:
            return made.read(ino, 0, 0, self._size).body
        handle, _, _ = made.open(ino)
        found = made.read(ino, handle, 0, self._size).body
        made.release(ino, handle)
        return found

    def is_passed_on(self, name: str) -> bool:
        """Whether Python must open, or read, a file."""
        ino, made = self.rig.ino(name), self.rig
        if made.datapath.state().no_open:
            unique = made.send_read(ino, 0, 0, 1)
        else:
            unique = made.send_open(ino)
        found = made.passed()
        made.reply(found, error=5)
        assert made.answer(unique).error == 5
        return (found.opcode, found.node) in ((Op.OPEN, ino), (Op.READ, ino))

    def take_events(self) -> list[tuple[Ino, bytes | None]]:
        found = [
            (ino, None if data is None else bytes(data))
            for ino, what, data, *_ in self.rig.datapath.served()
            if what == FETCHED
        ]
        for ino, _ in found:
            self.rig.datapath.taken(ino)
        return found


@contextmanager
def job_of(
    directory: Path,
    *acts: Act,
    no_open: bool = False,
    gives_bytes: bool = True,
    size: int = SIZE,
    source_timeout: float | None = None,
) -> Iterator[Job]:
    """A job whose member plays ``acts``."""
    (directory / "tree").mkdir()
    for name in NAMES:
        (directory / "tree" / name).write_bytes(contents(name, size))
    arrays: list[np.ndarray] = []

    def peers(datapath: Datapath, snapshot: Snapshot) -> None:
        arrays.append(np.zeros(snapshot.entries + 1, np.uint16))
        arrays.append(np.zeros(snapshot.entries + 1, np.uint64))
        requests = [None, (b"GET /set/", b" HTTP/1.1\r\nToken: t\r\n\r\n")]
        datapath.set_peers(*arrays, requests, gives_bytes=gives_bytes)

    with ExitStack() as cleanup:
        member = Member(*acts)
        cleanup.callback(member.close)
        made = cleanup.enter_context(
            rig(
                directory / "tree",
                directory,
                fetch_max=size,
                fetched_at_once=len(NAMES),
                source_timeout=source_timeout,
                peers=peers,
                no_open=no_open,
            )
        )
        made.init(wire.INIT_NO_OPEN_SUPPORT if no_open else 0)
        try:
            yield Job(made, member, arrays, size)
        finally:
            made.datapath.drop_connections(1)


def gives(name: str, *fields: str) -> Act:
    return say(head(SIZE, *fields), contents(name, SIZE))


@pytest.mark.promise(271)
@pytest.mark.parametrize("no_open", [False, True], ids=["open", "no_open"])
def test_files_of_another_node_are_fetched_without_python_over_one_connection(
    tmp_path: Path, no_open: bool
) -> None:
    digest = f"{digest_of(contents('two', SIZE)):016x}"
    acts = gives("one"), gives("two", f"x-monarch-digest: {digest}"), gives("two")
    with job_of(tmp_path, *acts, no_open=no_open) as job:
        made, two = job.rig, job.rig.ino("two")
        job.digests[two] = 0
        job.connect()
        for name in ("one", "two", "two"):
            assert job.read(name) == contents(name, SIZE)
            assert job.take_events() == [(made.ino(name), contents(name, SIZE))]
        assert int(job.digests[two]) == int(digest, 16)
        end = " HTTP/1.1\r\nToken: t\r\n\r\n"
        paths = f"c/{copy_name(made.ino('one'))}", f"d/{two}", f"c/{copy_name(two)}"
        assert job.member.requests == [f"GET /set/{path}{end}".encode() for path in paths]
        files, nbytes, slow, late_us, latencies = made.datapath.received(1, LONG_US, FAIR_US)
        assert (files, nbytes, slow, len(latencies)) == (3, 3 * SIZE, 0, 3)
        assert late_us == 0, "nothing is late before Python has said when"
        assert made.datapath.received(1, LONG_US, FAIR_US) == (0, 0, 0, 0, [])
        traffic = made.datapath.source_traffic()
        assert (traffic.opens, traffic.reads, traffic.calls) == (0, 0, 3)
        assert traffic.waited_ns > 0 and made.datapath.open_files() == 0


@pytest.mark.promise(270, 273)
@pytest.mark.parametrize(
    ("act", "mark"),
    [
        pytest.param(say(head(SIZE), contents("two", SIZE)), 0, id="other bytes"),
        pytest.param(say(head(SIZE - 1), contents("one", SIZE - 1)), 0, id="another size"),
        pytest.param(say(head(10**18), b"x"), 0, id="a great size"),
        pytest.param(
            say(head(SIZE, "X-Monarch-Digest: 00000000000000ff"), contents("one", SIZE)),
            0,
            id="another digest",
        ),
        pytest.param(say(b"HTTP/1.1 200 OK\r\n\r\n", contents("one", SIZE)), 0, id="no length"),
        pytest.param(say(b"HTTP/1.1 200 OK\r\nContent-Length: 5e3\r\n\r\n"), 0, id="length"),
        pytest.param(say(b"\r\n\r\n"), 0, id="an empty head"),
        pytest.param(say(b"HTTP/1.1 \r\n\r\n"), 0, id="no status"),
        pytest.param(say(b"HTTP/1.1 200 OK\r\nA\0: b\r\n\r\n"), 0, id="a zero"),
        pytest.param(say(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), 0, id="another program"),
        pytest.param(without_end(b"x" * 1000), 0, id="a head without an end"),
        pytest.param(say(head(0, status="202 Accepted")), 0, id="being fetched"),
        pytest.param(say(head(9, status="403 Forbidden")), 0, id="refused"),
        pytest.param(say(head(3, status="404 Not Found"), b"no!"), NOT_KEPT, id="not kept"),
        pytest.param(silent, SLOW, id="no answer"),
        pytest.param(say(b"HTTP/1.1 200 OK\r\n"), SLOW, id="half a head"),
        pytest.param(say(head(SIZE), b"x" * 99), SLOW, id="half the bytes"),
    ],
)
def test_all_but_the_right_bytes_in_time_is_left_to_python(
    tmp_path: Path, act: Act, mark: int
) -> None:
    with job_of(tmp_path, act) as job:
        job.connect(SHORT_US if mark == SLOW else LONG_US)
        assert job.is_passed_on("one")
        assert job.givers[job.rig.ino("one")] == mark
        files, _, slow, _, latencies = job.rig.datapath.received(1, LONG_US, FAIR_US)
        assert (files, slow, latencies) == (0, mark == SLOW, [])
        # The member is not asked again before Python says so.
        assert job.is_passed_on("one")
        assert len(job.member.requests) == 1
        assert job.rig.datapath.state().open_files == 0


def test_opens_of_files_that_other_nodes_keep_are_only_counted(tmp_path: Path) -> None:
    acts = gives("one"), gives("two"), gives("one")
    with job_of(tmp_path, *acts, gives_bytes=False) as job:
        datapath, one, two = job.rig.datapath, job.rig.ino("one"), job.rig.ino("two")
        job.rig.residency.want(two, forced=True)
        job.connect()
        for name in ("one", "two", "one"):
            assert job.read(name) == contents(name, SIZE)
        assert len(job.member.requests) == 2, "the next open has the bytes of the last one"
        events = [(ino, what, data is not None) for ino, what, data, *_ in datapath.served()]
        assert events == [(one, 0, False), (two, FETCHED, True), (one, 0, False)]
        datapath.taken(two)
        assert datapath.open_files() == 0
        assert job.read("one") == contents("one", SIZE)
        assert len(job.member.requests) == 3, "until Python has counted it"


def test_the_bytes_of_a_few_files_stay_until_their_opens_are_counted(tmp_path: Path) -> None:
    with job_of(tmp_path, *map(gives, NAMES), gives_bytes=False) as job:
        job.connect()
        for name in NAMES:
            assert job.read(name) == contents(name, SIZE)
        assert 0 < job.rig.datapath.open_files() < len(NAMES) / 2
        job.rig.datapath.served()
        assert job.rig.datapath.open_files() == 0


@pytest.mark.parametrize("size", [1, 200, SIZE, LARGE])
def test_an_answer_may_come_in_parts(tmp_path: Path, size: int) -> None:
    """Each pause is longer than the datapath waits for a whole answer."""

    def gives_slowly(connection: socket.socket) -> None:
        answer = head(size) + contents("one", size)
        ends = [0, 9, len(head(size)), len(answer) - size // 2, len(answer)]
        for begin, end in pairwise(ends):
            connection.sendall(answer[begin:end])
            time.sleep(0.01)

    whole = say(head(size) + contents("two", size))
    with job_of(tmp_path, gives_slowly, whole, size=size) as job:
        job.connect()
        for name in ("one", "two"):
            assert job.read(name) == contents(name, size)
        assert len(job.member.requests) == 2


def test_a_thread_wakes_when_a_whole_answer_has_come(tmp_path: Path) -> None:
    first, second = (head(SIZE) + contents(name, SIZE) for name in ("one", "two"))
    # The answer to the second request is there before it.
    with job_of(tmp_path, say(first + second), say()) as job:
        datapath = job.rig.datapath
        made = socket.create_connection((HOST, job.member.port))
        with made.dup() as watched:
            assert datapath.keep_connection(1, made.detach(), LONG_US)
            assert job.read("one") == contents("one", SIZE)

            def has_come() -> bool:
                return len(watched.recv(len(second), socket.MSG_PEEK)) == len(second)

            assert becomes_true(has_come)
            assert job.read("two") == contents("two", SIZE)
            assert watched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == SIZE
            # Python waits for answers of any size.
            found = datapath.take_connection(1)
            assert found is not None
            os.close(found[0])
            assert watched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@pytest.mark.promise(43, 274)
def test_a_wait_for_another_node_is_none_for_the_source(tmp_path: Path) -> None:
    is_asked, answers = threading.Event(), threading.Event()

    def gives_late(connection: socket.socket) -> None:
        is_asked.set()
        assert answers.wait(PATIENCE_S)
        gives("one")(connection)

    with job_of(tmp_path, gives_late, source_timeout=0.01) as job:
        made = job.rig
        job.connect()
        # The second one waits for the first one to settle the entry of the file.
        opens = [made.send_open(made.ino("one")) for _ in range(2)]
        assert is_asked.wait(PATIENCE_S)
        # The requests that wait are checked once a second.
        with pytest.raises(NoMessage):
            made.any_answer(2.5)
        assert made.datapath.oldest_wait_s() == 0.0
        answers.set()
        for answer in map(made.answer, opens):
            assert answer.error == 0
            made.release(made.ino("one"), wire.OPEN_OUT.unpack(answer.body)[0])


def breaks_off(connection: socket.socket) -> None:
    connection.sendall(head(SIZE) + b"x" * 99)
    hang_up(connection)


def test_a_connection_that_the_member_has_closed_is_passed_over(tmp_path: Path) -> None:
    ended = threading.Event()

    def gives_and_ends(connection: socket.socket) -> None:
        connection.sendall(head(SIZE) + contents("one", SIZE))
        try:
            hang_up(connection)
        finally:
            ended.set()

    with job_of(tmp_path, gives_and_ends, gives("one"), breaks_off) as job:
        ino = job.rig.ino("one")
        job.connect()
        assert job.read("one") == contents("one", SIZE)
        job.take_events()
        assert ended.wait(60)
        assert job.is_passed_on("one"), "there is no other connection"
        assert job.givers[ino] == 2, "with one it is asked again"
        job.connect()
        assert job.read("one") == contents("one", SIZE)
        job.take_events()
        assert job.is_passed_on("one"), "it broke off in the bytes"
        assert job.givers[ino] == 0


def test_a_member_that_takes_requests_and_closes_late_is_slow(tmp_path: Path) -> None:
    def closes_late(connection: socket.socket) -> None:
        time.sleep(0.35)
        hang_up(connection)

    with job_of(tmp_path, closes_late) as job:
        job.connect(400_000)
        assert job.is_passed_on("one")
        # Later than the limit, it is slow as well.
        assert job.givers[job.rig.ino("one")] == SLOW
        assert job.rig.datapath.received(1, LONG_US, FAIR_US)[2] == 1


@pytest.mark.promise(341)
def test_the_time_for_which_answers_are_late_is_that_of_all_files_and_each_mib(
    tmp_path: Path,
) -> None:
    # One MiB, and no byte of the second.
    size, pause_s = 1 << 20, 0.1

    def gives_late(connection: socket.socket) -> None:
        name = "one" if len(job.member.requests) == 1 else "two"
        answer = head(size) + contents(name, size)
        for begin, end in pairwise((0, size // 2, len(answer))):
            time.sleep(pause_s)
            connection.sendall(answer[begin:end])

    with job_of(tmp_path, gives_late, gives_late, size=size) as job:
        datapath = job.rig.datapath
        datapath.received(1, LONG_US, FAIR_US)
        job.connect()
        for name in ("one", "two"):
            assert job.read(name) == contents(name, size)
        files, _, _, late_us, _ = datapath.received(1, LONG_US, FAIR_US)
        assert files == 2
        assert late_us >= 2 * (2 * 1e6 * pause_s - 2 * FAIR_US)
        assert datapath.received(1, LONG_US, FAIR_US)[3] == 0


@pytest.mark.promise(341)
def test_of_requests_at_the_same_time_each_late_moment_counts_once(tmp_path: Path) -> None:
    pause_s, both = 0.5, threading.Barrier(2)

    def lacks_it(connection: socket.socket) -> None:
        both.wait(PATIENCE_S)
        time.sleep(pause_s)
        connection.sendall(head(0, status="404 Not Found"))

    with job_of(tmp_path, lacks_it) as job, closing(Member(lacks_it)) as second:
        made, datapath = job.rig, job.rig.datapath
        datapath.received(1, LONG_US, FAIR_US)
        job.connect()
        connection = socket.create_connection((HOST, second.port))
        assert datapath.keep_connection(1, connection.detach(), LONG_US)
        began_s = time.monotonic()
        sent = [made.send_open(made.ino(name)) for name in ("one", "two")]
        for _ in sent:
            made.reply(made.passed(), error=5)
        assert [made.answer(unique).error for unique in sent] == [5, 5]
        late_us = datapath.received(1, LONG_US, FAIR_US)[3]
        assert 1e6 * pause_s - FAIR_US <= late_us <= 1e6 * (time.monotonic() - began_s)
        datapath.drop_connections(1)


def test_python_takes_connections_back_and_drops_them(tmp_path: Path) -> None:
    with job_of(tmp_path, gives("one")) as job:
        datapath = job.rig.datapath
        job.connect(SHORT_US)
        found = datapath.take_connection(1)
        assert found is not None
        assert found[1] == SHORT_US
        assert datapath.take_connection(1) is None
        assert job.is_passed_on("one")
        with socket.socket(fileno=found[0]) as taken:
            # The descriptor itself does not block.
            taken.settimeout(60)
            taken.sendall(b"GET /x HTTP/1.1\r\n\r\n")
            assert taken.recv(4) == b"HTTP"
            assert datapath.keep_connection(1, taken.detach(), LONG_US)
        datapath.drop_connections(1)
        assert job.is_passed_on("one")
        assert not datapath.keep_connection(7, 0, LONG_US)
        assert datapath.take_connection(7) is None
        datapath.drop_connections(7)
        assert datapath.received(7, 1, 1) == (0, 0, 0, 0, [])


def changed(job: Job, ino: Ino) -> None:
    job.rig.residency.mark_differing(ino)


def without_giver(job: Job, ino: Ino) -> None:
    job.givers[ino] = 0


def of_no_member(job: Job, ino: Ino) -> None:
    job.givers[ino] = 3


def of_this_node(job: Job, ino: Ino) -> None:
    job.givers[ino] = 1


@pytest.mark.parametrize("why", [changed, without_giver, of_no_member, of_this_node])
def test_only_files_of_the_snapshot_that_a_member_has_are_requested(
    tmp_path: Path, why: Callable[[Job, Ino], None]
) -> None:
    with job_of(tmp_path, gives("one")) as job:
        job.connect()
        why(job, job.rig.ino("one"))
        assert job.is_passed_on("one")
        assert job.member.requests == []
