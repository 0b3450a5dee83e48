"""Requests to a member that answers anything: the reader gets the right bytes or an error, soon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from monarch.peers.breaker import Breaker
from monarch.peers.client import PeerClient, PeerFailed
from monarch.peers.members import Endpoint
from monarch.text import MiB

Act = Callable[[socket.socket], None]

SET = "0" * 32
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Member:
    """A server that plays one act for each request after the first of all, which finds its port."""

    def __init__(self, *acts: Act) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._acts = iter((say(HELLO), *acts))
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        while True:
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                part = connection.recv(4096)
                if not part:
                    return
                request += part
            self.requests.append(request)
            act = next(self._acts, None)
            if act is None:
                return
            act(connection)

    def close(self) -> None:
        # A thread that waits in accept is woken by shutdown, not by close.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()


def say(*parts: bytes) -> Act:
    def act(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return act


def hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def without_end(part: bytes) -> Act:
    """Sends until the client closes the connection."""

    def act(connection: socket.socket) -> None:
        while True:
            connection.sendall(part)

    return act


def silent(connection: socket.socket) -> None:
    """Answers nothing until the client closes the connection."""
    connection.recv(1)


def head(size: int, *fields: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {size}", *fields, "", ""]).encode()


@pytest.fixture
def member() -> Iterator[Callable[..., Member]]:
    with ExitStack() as cleanup:

        def make(*acts: Act) -> Member:
            made = Member(*acts)
            cleanup.callback(made.close)
            return made

        yield make


def client_of(*ports: int, limit_s: float = 10.0, token: str = "token") -> PeerClient:
    return PeerClient(Endpoint("127.0.0.1"), ports, token, SET, Breaker(limit_s))


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
    assert made.requests[1].startswith(f"GET /{SET}/c/01/257 HTTP/1.1\r\n".encode())
    assert all(b"X-Monarch-Token: token\r\n" in request for request in made.requests)


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
        client.get("c/01/1", 5)
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


def test_another_set_and_another_secret_on_the_first_ports_are_passed_over(
    member: Callable[..., Member],
) -> None:
    def refusing(status: str) -> int:
        made = member()
        made._acts = iter([say(head(0, status=status))])
        return made.port

    other_set, other_job = refusing("404 Not Found"), refusing("403 Forbidden")
    right = member(say(head(5) + b"hello"))
    client = client_of(other_job, other_set, right.port)
    assert client.get("c/01/1", 5).data == b"hello"
    client.close()


@pytest.mark.parametrize(
    ("status", "kind"), [("404 Not Found", "other-set"), ("403 Forbidden", "wrong-secret")]
)
def test_a_member_of_another_set_or_secret_only_is_named_so(
    member: Callable[..., Member], status: str, kind: str
) -> None:
    made = member()
    made._acts = iter([say(head(0, status=status))])
    client = client_of(made.port)
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == kind


def test_a_port_at_which_nothing_listens_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = client_of(port)
    with pytest.raises(PeerFailed) as failed:
        client.get("c/01/1", 5)
    assert failed.value.kind == "unreachable"


def test_a_node_that_drops_all_packets_is_left_after_the_limit_of_a_connection() -> None:
    """The kernel drops the packets that would open a connection while the queue is full."""
    with ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = cleanup.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        client = client_of(listener.getsockname()[1])
        with pytest.raises(PeerFailed) as failed:
            client.get("c/01/1", 5)
    assert failed.value.kind == "unreachable"


def test_a_member_that_fails_again_and_again_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = client_of(port)
    for _ in range(3):
        assert client.breaker.admits(0.0)
        with pytest.raises(PeerFailed):
            client.get("c/01/1", 5)
    assert not client.breaker.admits(0.0)
