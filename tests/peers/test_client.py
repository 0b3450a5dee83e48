"""Requests to a member that answers anything: the reader gets the right bytes or an error, soon."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch.peers import client as clients
from monarch.peers.breaker import Breaker
from monarch.peers.client import (
    COMING,
    OTHER_SIZE,
    Answer,
    PeerClient,
    PeerFailed,
    until_known,
)
from monarch.peers.connections import (
    Connection,
    Connections,
    DatapathConnections,
    OwnConnections,
    PeerFetcher,
)
from monarch.peers.hello import MemberKey
from monarch.peers.members import Endpoint
from monarch.peers.requests import Requests
from monarch.text import MiB
from tests.peers.member import (
    HOST,
    KEY,
    SET,
    TOKEN,
    Act,
    Member,
    hang_up,
    head,
    say,
    silent,
    without_end,
)


@pytest.fixture
def member() -> Iterator[Callable[..., Member]]:
    with ExitStack() as cleanup:

        def make(*acts: Act, **options: Any) -> Member:
            made = Member(*acts, **options)
            cleanup.callback(made.close)
            return made

        yield make


def client_of(*ports: int, limit_s: float = 10.0) -> PeerClient:
    return PeerClient(Endpoint(HOST), ports, KEY, Breaker(limit_s))


def test_bytes_arrive_with_their_digest_over_one_connection(member: Callable[..., Member]) -> None:
    large = bytes(range(256)) * 12_000
    made = member(
        say(head(5, "X-Monarch-Digest: 00000000000000ff"), b"hello"),
        say(head(0, status="202 Accepted")),
        say(head(9, status="404 Not Found"), b"not found"),
        say(head(len(large)), large),
    )
    client = client_of(made.port)
    answer = client.get("c/01/257", 5)
    assert (answer.status, answer.data, answer.digest) == (200, b"hello", 255)
    assert client.get("d/1", 5).status == 202
    assert client.get("d/1", 5).status == 404
    answer = client.get("d/2", len(large))
    assert (answer.data, answer.digest) == (large, None)
    client.close()
    assert made.requests[0].startswith(b"GET /hello/")
    assert made.requests[1].startswith(f"GET /{SET}/c/01/257 HTTP/1.1\r\n".encode())
    for request in made.requests:
        is_hello = request.startswith(b"GET /hello/")
        assert is_hello != (b"X-Monarch-Token: " + TOKEN + b"\r\n" in request)


def test_a_part_of_a_copy_is_requested_by_its_place(member: Callable[..., Member]) -> None:
    made = member(
        say(head(5, status="206 Partial Content"), b"hello"),
        say(head(100, status="206 Partial Content"), b"hello"),
        say(head(0, status="416 Range Not Satisfiable")),
    )
    client = client_of(made.port)
    answer = client.get("s/01/257/3-3", 5, 393216)
    assert (answer.status, answer.data) == (200, b"hello")
    assert made.requests[1].endswith(b"\r\nRange: bytes=393216-393220\r\n\r\n")
    for _ in range(2):
        assert client.get("s/01/257/3-3", 5, 393216).status == OTHER_SIZE
    client.close()


@pytest.mark.promise(270)
def test_a_copy_of_another_size_is_another_version_and_no_failure(
    member: Callable[..., Member],
) -> None:
    made = member(say(head(4), b"hell"), say(head(10_000_000_000), b"x" * 100))
    client = client_of(made.port)
    for _ in range(2):
        answer = client.get("c/01/1", 5)
        assert (answer.status, answer.data) == (OTHER_SIZE, b"")
    assert client.trouble is None
    client.close()


@pytest.mark.promise(273)
@pytest.mark.parametrize(
    ("act", "kind"),
    [
        pytest.param(say(head(10_000_000_000), b"x" * 100), "broken", id="10 GB"),
        pytest.param(say(head(4), b"hell"), "broken", id="too few"),
        pytest.param(say(head(5) + b"hello, world"), "broken", id="more than it says"),
        pytest.param(say(b"HTTP/1.1 200 OK\r\n\r\nhello"), "broken", id="no length"),
        pytest.param(say(b"HTTP/1.1 200 OK\r\nContent-Length: 5e0\r\n\r\n"), "broken", id="length"),
        pytest.param(
            say(b"HTTP/1.1 2\xc2\xb2 OK\r\nContent-Length: 5\r\n\r\n"), "broken", id="digits"
        ),
        pytest.param(say(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "broken", id="another program"),
        pytest.param(say(b"hello"), "slow", id="HTTP/0.9"),
        pytest.param(say(head(5).replace(b"/1.1", b"/1.0") + b"hello"), "broken", id="HTTP/1.0"),
        pytest.param(
            say(b"HTTP/1.1 100 Continue\r\n\r\n" + head(5) + b"hello"), "broken", id="continue"
        ),
        pytest.param(
            say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
            "broken",
            id="chunks",
        ),
        pytest.param(without_end(b"x" * 1000), "broken", id="a head without an end"),
        pytest.param(say(head(9, status="500 Error"), b"sorry"), "broken", id="an error"),
        pytest.param(say(head(9, status="403 Forbidden")), "wrong-secret", id="refused"),
        pytest.param(silent, "slow", id="no answer"),
        pytest.param(say(b"HTTP/1.1 200 OK\r\n"), "slow", id="half a head"),
    ],
)
def test_an_answer_of_any_other_form_is_a_failure(
    member: Callable[..., Member], act: Act, kind: str
) -> None:
    limit_s = 0.2 if kind == "slow" else 10.0
    client = client_of(member(act).port, limit_s=limit_s)
    with pytest.raises(PeerFailed) as failed:
        client.get("d/1", 5)
    client.close()
    assert failed.value.kind == kind == client.trouble


def test_a_member_that_breaks_off_in_the_bytes_is_a_failure(member: Callable[..., Member]) -> None:
    def act(connection: socket.socket) -> None:
        connection.sendall(head(5 * MiB) + b"x" * MiB)
        hang_up(connection)

    with pytest.raises(PeerFailed) as failed:
        client_of(member(act).port).get("c/01/1", 5 * MiB)
    assert failed.value.kind == "broken"


def test_each_mib_has_a_limit_however_steadily_the_bytes_come(
    member: Callable[..., Member],
) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(head(2 * MiB))
        while not _closed(connection):
            connection.sendall(b"x")

    with pytest.raises(PeerFailed) as failed:
        client_of(member(trickle).port, limit_s=0.3).get("c/01/1", 2 * MiB)
    assert failed.value.kind == "slow"


def _closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def test_a_kept_connection_that_the_member_has_closed_is_replaced(
    member: Callable[..., Member],
) -> None:
    def answer_and_end(connection: socket.socket) -> None:
        connection.sendall(head(5) + b"hello")
        hang_up(connection)

    client = client_of(member(answer_and_end, say(head(5) + b"again")).port)
    assert client.get("c/01/1", 5).data == b"hello"
    assert client.get("c/01/1", 5).data == b"again"
    client.close()


def test_requests_of_the_datapath_count_as_those_of_the_client() -> None:
    client = client_of(1, limit_s=0.01)
    client.used([1e-4] * 64, 0, 0.0)
    assert (client.was_asked, client.trouble, client.breaker.limit_s) == (True, None, 0.01)
    dropped: list[bool] = []
    client.connections = cast(Connections, SimpleNamespace(drop=lambda: dropped.append(True)))
    client.used([1e-4], 2, 0.0)
    assert (client.trouble, dropped) == ("slow", [])
    client.used([], 1, 0.0)
    assert client.breaker.is_failing
    assert dropped == [True], "so the datapath asks it no more"


@pytest.mark.promise(274)
def test_answers_from_before_the_failures_of_a_member_end_no_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=lambda: now))
    client = client_of(1)
    client.used([], 3, 0.0)
    assert client.breaker.is_failing
    # The datapath reports them only now.
    client.used([1e-4] * 5, 0, 0.0)
    assert client.breaker.is_failing and client.trouble == "slow"
    now += 10.0
    client.used([1e-4], 0, 0.0)
    assert not client.breaker.is_failing and client.trouble is None


def test_a_member_that_takes_too_long_to_read_the_source_is_shown_as_slow(
    member: Callable[..., Member],
) -> None:
    coming = say(head(0, status="202 Answer"))
    client = client_of(member(coming, coming, say(head(5) + b"hello")).port)
    requests = Requests([None, client], coming_s=0.0)
    with pytest.raises(PeerFailed, match="slow"):
        requests.answer(client, "d/1", 5)
    assert client.trouble == "slow"
    assert not client.breaker.is_failing
    assert requests.answer(client, "d/1", 5).data == b"hello"
    assert client.trouble is None
    client.close()


@pytest.mark.fault("M4")
def test_connections_without_a_request_leave_the_last_descriptors_to_others(
    member: Callable[..., Member],
) -> None:
    port, most = member().port, resource.getrlimit(resource.RLIMIT_NOFILE)
    made, kept, taken = list[int](), list[int](), list[int]()

    def keep_connection(member: int, fd: int, limit_us: int) -> bool:
        taken.append(fd)
        return False

    datapath = cast(PeerFetcher, SimpleNamespace(keep_connection=keep_connection))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, most[1]))
        for number in (250, 350):
            with socket.create_connection((HOST, port)) as connected:
                made.append(fcntl.fcntl(connected, fcntl.F_DUPFD_CLOEXEC, number))
            connection = Connection(socket.socket(fileno=made[-1]))
            DatapathConnections(datapath, 1).keep(connection)
            if OwnConnections().keep(connection):
                kept.append(made[-1])
            connection.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert kept == taken == made[:1]


@pytest.mark.promise(341)
def test_the_late_time_of_the_datapath_counts_as_that_of_the_client() -> None:
    client = client_of(1)
    dropped: list[bool] = []
    client.connections = cast(Connections, SimpleNamespace(drop=lambda: dropped.append(True)))
    client.used([0.5], 0, 11.0)
    assert (client.trouble, dropped) == ("slow", [True])


OTHER_SET = MemberKey(HOST, "1" * 32, b"the secret of the job")
OTHER_JOB = MemberKey(HOST, SET, b"the secret of another job")
OTHER_MEMBER = MemberKey("127.0.0.2", SET, b"the secret of the job")


def test_another_set_and_another_secret_on_the_first_ports_are_passed_over(
    member: Callable[..., Member],
) -> None:
    others = [member(key=OTHER_JOB), member(key=OTHER_SET), member(key=OTHER_MEMBER)]
    right = member(say(head(5) + b"hello"))
    client = client_of(*(other.port for other in others), right.port)
    assert client.get("c/01/1", 5).data == b"hello"
    client.close()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({"key": OTHER_SET}, "other-set", id="set"),
        pytest.param({"key": OTHER_JOB}, "wrong-secret", id="secret"),
        pytest.param({"key": OTHER_MEMBER}, "wrong-secret", id="another member"),
        pytest.param({"hello": lambda connection: hang_up(connection)}, "broken", id="hangs up"),
        pytest.param(
            {"hello": lambda connection: connection.sendall(b"SSH-2.0\r\n\r\n")}, "broken"
        ),
    ],
)
def test_a_member_of_another_set_or_secret_only_is_named_so(
    member: Callable[..., Member], options: dict[str, Any], kind: str
) -> None:
    client = client_of(member(**options).port)
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == kind


@pytest.mark.promise(297)
@pytest.mark.parametrize(
    "answer",
    [head(0), head(128) + b"0" * 128, head(128) + b"\xff" * 128, head(5) + b"wrong"],
    ids=["empty", "proofs", "no digits", "other bytes"],
)
def test_a_stranger_at_an_earlier_port_gets_no_token_and_is_not_believed(
    member: Callable[..., Member], answer: bytes
) -> None:
    stranger = member(say(head(5) + b"wrong"), hello=say(answer))
    right = member(say(head(5) + b"right"))
    client = client_of(stranger.port, right.port)
    assert client.get("c/01/1", 5).data == b"right"
    client.close()
    assert stranger.requests
    assert all(TOKEN not in request for request in stranger.requests)


@pytest.mark.promise(297)
def test_a_stranger_at_the_port_of_a_member_that_has_ended_gets_no_token(
    member: Callable[..., Member],
) -> None:
    right = member(say(head(5, "Connection: close") + b"right"))
    client = client_of(right.port)
    assert client.get("c/01/1", 5).data == b"right"
    right.close()
    stranger = member(say(head(5) + b"wrong"), hello=say(head(128) + b"0" * 128), port=right.port)
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == "wrong-secret"
    assert stranger.requests
    assert all(TOKEN not in request for request in stranger.requests)


def test_each_connection_has_a_challenge_of_its_own(member: Callable[..., Member]) -> None:
    close = say(head(5, "Connection: close") + b"hello")
    made = member(close, close)
    client = client_of(made.port)
    client.get("c/01/1", 5)
    client.get("c/01/1", 5)
    hellos = [request for request in made.requests if request.startswith(b"GET /hello/")]
    assert len(set(hellos)) == len(hellos) == 2


def test_a_silent_program_at_an_earlier_port_hides_the_member_only_once(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_HELLO_S", 0.0)
    stranger = member(hello=silent)
    right = member(say(head(5) + b"right"))
    client = client_of(stranger.port, right.port)
    client.breaker.limit_s = 0.2
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == "slow"
    client.breaker.limit_s = 10.0
    assert client.get("c/01/1", 5).data == b"right"
    client.close()


@pytest.mark.promise(341)
def test_strangers_that_answer_late_at_all_ports_cost_little_more_than_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, asked = 0.0, list[int]()

    def answers_late(self: PeerClient, address: tuple[str, int]) -> None:
        nonlocal now_s
        now_s += 0.7
        asked.append(address[1])
        raise PeerFailed("wrong-secret")

    monkeypatch.setattr(PeerClient, "_proven", answers_late)
    monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=lambda: now_s))
    client = client_of(*range(1, 9), limit_s=1.0)
    for others in ([1, 2], [1, 3]):
        with pytest.raises(PeerFailed):
            client.get("c/01/1", 5)
        assert asked == others
        asked.clear()


def test_a_member_with_too_many_hellos_is_slow(member: Callable[..., Member]) -> None:
    client = client_of(member(hello=say(head(0, status="429 Too Many Requests"))).port)
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == "slow"


def test_a_member_that_answers_at_once_that_bytes_are_coming_is_not_asked_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(clients, "time", clock)
    asked: list[float] = []

    def get() -> Answer:
        asked.append(clock.monotonic())
        assert len(asked) < 2000
        return Answer(COMING, b"", None)

    assert until_known(get, lambda: clock.monotonic() > 10.0).status == COMING
    assert len(asked) > 500
    # A member that waits before it answers is asked at once.
    asked.clear()

    def get_slowly() -> Answer:
        clock.sleep(0.02)
        return get()

    begun = clock.monotonic()
    until_known(get_slowly, lambda: len(asked) == 100)
    assert clock.monotonic() - begun == pytest.approx(100 * 0.02)


class Clock:
    """Time that passes only in ``sleep``."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


def test_a_port_at_which_nothing_listens_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = client_of(port)
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == "unreachable"


def test_a_node_that_drops_all_packets_is_left_after_the_limit_of_a_connection() -> None:
    with dropping() as port:
        client = client_of(port)
        with pytest.raises(PeerFailed) as failed:
            client.get("c/01/1", 5)
    assert failed.value.kind == "unreachable"


@contextmanager
def dropping(host: str = HOST, port: int = 0) -> Iterator[int]:
    """A port at which the kernel drops the packets that would open a connection: its queue is
    full."""
    with ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(4):
            waiting = cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_member_may_listen_at_one_of_its_addresses_only(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["127.0.0.2", "127.0.0.3"]
    asked: list[str] = []

    def resolved(name: str, *, within_s: float) -> list[str]:
        asked.append(name)
        return [*others, HOST]

    monkeypatch.setattr(clients, "CONNECT_S", 60.0)
    monkeypatch.setattr(clients, "addresses_of", resolved)
    right = member(*[say(head(5, "Connection: close") + b"hello")] * 2)

    client = PeerClient(Endpoint("a-node"), [right.port], KEY, Breaker(10.0))
    assert client.get("c/01/1", 5).data == b"hello"
    assert client.get("c/01/1", 5).data == b"hello"
    assert asked == ["a-node"]
    client.close()


def test_an_address_that_drops_all_packets_hides_the_others_once(
    member: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["127.0.0.2", "127.0.0.3"]
    monkeypatch.setattr(clients, "addresses_of", lambda name, *, within_s: [*others, HOST])
    right = member(say(head(5) + b"hello"))
    client = PeerClient(Endpoint("a-node"), [right.port], KEY, Breaker(10.0))
    with ExitStack() as cleanup:
        for other in others:
            cleanup.enter_context(dropping(other, right.port))
        for _ in others:
            with pytest.raises(PeerFailed) as failed:
                client.get("c/01/1", 5)
            assert failed.value.kind == "unreachable"
        monkeypatch.setattr(clients, "CONNECT_S", 60.0)
        assert client.get("c/01/1", 5).data == b"hello"
    client.close()


def test_addresses_that_a_name_does_not_have_any_more_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [f"192.0.2.{number}" for number in range(1, 200)]
    monkeypatch.setattr(clients, "addresses_of", lambda name, *, within_s: found[:1])
    monkeypatch.setattr(clients, "_connect", lambda address: raise_(TimeoutError()))
    client = PeerClient(Endpoint("a-node"), [1], KEY, Breaker(10.0))
    while found:
        with pytest.raises(PeerFailed):
            client.get("c/01/1", 5)
        assert client._slow == found[:1]
        del found[0]


def raise_(error: Exception) -> socket.socket:
    raise error


def test_a_member_that_fails_again_and_again_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = client_of(port)
    for _ in range(3):
        assert client.breaker.admits(0.0)
        with pytest.raises(PeerFailed):
            client.get("c/01/1", 5)
    assert not client.breaker.admits(0.0)


def test_a_failure_that_is_late_too_keeps_its_name() -> None:
    client = client_of(1)
    for _ in range(3):
        client.damaged()
    client.late(2.0)
    assert client.trouble == "damaged"
    # Late answers alone.
    client = client_of(1)
    client.late(20.0)
    assert client.trouble == "slow"
