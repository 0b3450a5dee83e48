"""nginx and the answers of the daemon behind it, with copies and files of the test."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from monarch.errors import MonarchError, UsageError
from monarch.peers import engine as engines
from monarch.peers.answers import Answers, Found, Wanted, digest_of
from monarch.peers.breaker import Breaker
from monarch.peers.client import OK, Answer, PeerClient, PeerFailed
from monarch.peers.engine import Engine, find_engine
from monarch.peers.hello import PROOFS_BYTES, MemberKey, hello_request, new_challenge
from monarch.peers.members import Endpoint
from monarch.peers.nginx import SOCKET, Site
from monarch.peers.ports import claim
from monarch.peers.spans import Span, granule_digests, span_digest
from monarch.peers.tls import Certificate
from monarch.tiers.contents import PARTS, copy_name, part_name
from monarch.tiers.partial import GRANULE
from monarch.types import Ino

HOST, SET, SECRET = "127.0.0.1", "ab" * 16, b"the secret of the job"
KEY = MemberKey(HOST, SET, SECRET)
TOKEN = KEY.token()
FIRST, SECOND, SMALL, LARGE, REFUSED = Ino(257), Ino(70_000), Ino(3), Ino(4), Ino(5)
# A file for which the code has a bug.
ODD = Ino(6)


class Files:
    """Copies in two tiers, and a source from which two files can be fetched."""

    def __init__(self, directory: Path) -> None:
        self.tiers = [directory / "tier1", directory / "tier2"]
        self.copies: dict[Ino, Found] = {}
        self.source: dict[Wanted, bytes] = {SMALL: b"small" * 100, LARGE: os.urandom(3_000_000)}
        self.fetched: list[Wanted] = []
        # Spans whose granules the engine has.
        self.spans: dict[Span, Found] = {}
        self.may_arrive = trio.Event()
        self.fails = False
        self.error: Exception = MonarchError("the source fails")
        for tier in self.tiers:
            tier.mkdir(parents=True)

    def put(self, ino: Ino, content: bytes, tier: int) -> None:
        path = self.tiers[tier - 1] / copy_name(ino)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self.copies[ino] = Found(digest_of(content), place=f"{tier}/{copy_name(ino)}")

    def copy_of(self, ino: Ino) -> Found | None:
        if ino == ODD:
            raise LookupError("a bug")
        return self.copies.get(ino)

    def size_to_fetch(self, wanted: Wanted) -> int | None:
        if wanted in self.spans:
            return 1
        return len(self.source[wanted]) if wanted in self.source else None

    async def fetch(self, wanted: Wanted) -> Found | None:
        self.fetched.append(wanted)
        await self.may_arrive.wait()
        if self.fails:
            raise self.error
        if isinstance(wanted, Span) and wanted in self.spans:
            return self.spans[wanted]
        return Found(digest_of(self.source[wanted]), self.source[wanted])


class Node:
    """An engine that runs, and how a member reaches it."""

    def __init__(self, files: Files, engine: Engine, host: str, port: int) -> None:
        self.files, self.engine, self.host, self.port = files, engine, host, port

    def client(
        self, *, key: MemberKey = KEY, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> PeerClient:
        return PeerClient(Endpoint(self.host), [port or self.port], key, Breaker(10.0), tls)

    def raw(self, request: bytes) -> bytes:
        """The answer to any bytes, up to its end; empty if the engine hangs up."""
        answer = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request)
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    answer += part
        return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def with_node(
    directory: Path,
    check: Callable[[Node], Awaitable[None]],
    certificate: Certificate | None = None,
    host: str = HOST,
) -> None:
    """Runs ``check`` beside an engine and its daemon."""

    async def main() -> None:
        files, port = Files(directory), free_port()
        peers = directory / "peers"
        answers = Answers(
            peers / SOCKET,
            files,
            KEY,
            patience_s=0.02,
            most_held=8_000_000,
            certificate=certificate,
        )
        site = Site(files.tiers, KEY, host, [port], certificate)
        engine = Engine(find_engine(None), peers, site)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers.run)
                nursery.start_soon(engine.run)
                await engine.settled.wait()
                assert engine.port == port, (peers / "nginx.log").read_text()
                await check(Node(files, engine, host, port))
                nursery.cancel_scope.cancel()
        assert engine.port is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    if shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.fail("nginx is not installed")
    trio.run(main)


async def call(function: Callable[[], object]) -> object:
    return await trio.to_thread.run_sync(function)


def test_a_member_may_have_an_ipv6_address_only(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.files.put(FIRST, b"a copy", 1)
        node.files.may_arrive.set()
        client = node.client()
        for ino, content in ((FIRST, b"a copy"), (SMALL, node.files.source[SMALL])):
            answer = await call(partial(client.get, f"d/{ino}", len(content)))
            assert answer == Answer(OK, content, digest_of(content))
        client.close()

    if "00000000000000000000000000000001" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    with_node(tmp_path, check, host="::1")


@pytest.mark.promise(271)
def test_copies_come_from_the_engine_and_other_files_from_the_daemon_once(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        files, client, other = node.files, node.client(), node.client()
        first, second = os.urandom(100_000), os.urandom(2_000_000)
        files.put(FIRST, first, 1)
        files.put(SECOND, second, 2)
        for ino, content in ((FIRST, first), (SECOND, second)):
            asked = await trio.to_thread.run_sync(client.get, f"d/{ino}", len(content))
            assert (asked.data, asked.digest) == (content, digest_of(content))
            direct = await trio.to_thread.run_sync(client.get, f"c/{copy_name(ino)}", len(content))
            assert (direct.data, direct.digest) == (content, None)
        missing = await trio.to_thread.run_sync(client.get, f"c/{copy_name(REFUSED)}", 5)
        assert missing.status == 404
        # Two members ask for a file while it is fetched.
        small = len(files.source[SMALL])
        for each in (client, other):
            assert (await trio.to_thread.run_sync(each.get, f"d/{SMALL}", small)).status == 202
        files.may_arrive.set()
        for each in (client, other):
            answer = await trio.to_thread.run_sync(each.get, f"d/{SMALL}", small)
            while answer.status == 202:
                answer = await trio.to_thread.run_sync(each.get, f"d/{SMALL}", small)
            assert answer.data == files.source[SMALL]
            assert answer.digest == digest_of(answer.data)
        assert files.fetched == [SMALL]
        large = await trio.to_thread.run_sync(client.get, f"d/{LARGE}", 3_000_000)
        assert large.data == files.source[LARGE]
        client.close()
        other.close()

    with_node(tmp_path, check)


@pytest.mark.promise(340)
def test_granules_come_from_the_engine_if_the_file_has_them_and_otherwise_from_the_daemon(
    tmp_path: Path,
) -> None:
    whole, partial_, missing = Ino(0x1FF), Ino(0x2FF), Ino(0x3FF)
    data = os.urandom(3 * GRANULE + 5)

    async def check(node: Node) -> None:
        files, client = node.files, node.client()
        files.may_arrive.set()
        get = partial(trio.to_thread.run_sync, client.get)
        files.put(whole, data, 2)
        (files.tiers[0] / PARTS).mkdir()
        # The map and the digests of a partial copy follow its data.
        (files.tiers[0] / part_name(partial_)).write_bytes(data + b"x" * 1000)
        for ino in (whole, partial_):
            span, size = Span(ino, 1, 3), 2 * GRANULE + 5
            answer = await get(span.name_at_engine, size, GRANULE)
            assert (answer.status, answer.data, answer.digest) == (200, data[GRANULE:], None)
            span = Span(ino, 0, 1)
            answer = await get(span.name_at_engine, 2 * GRANULE, 0)
            assert answer.data == data[: 2 * GRANULE]
        assert files.fetched == []
        # The daemon names the granules that the engine sends, and gives others itself.
        span, digest = Span(partial_, 2, 2), span_digest(granule_digests(data[2 * GRANULE :]))
        files.spans[span] = Found(digest, place=f"1/{part_name(partial_)}")
        answer = await get(span.name, GRANULE, span.offset)
        assert (answer.data, answer.digest) == (data[2 * GRANULE : 3 * GRANULE], digest)
        span = Span(missing, 4, 4)
        files.source[span] = data[:GRANULE]
        for name in (span.name, span.name_at_engine):
            answer = await get(name, GRANULE, span.offset)
            assert (answer.data, answer.digest) == (data[:GRANULE], digest_of(data[:GRANULE]))
        assert (await get(Span(missing, 5, 5).name, 5, 0)).status == 404
        client.close()

    with_node(tmp_path, check)


@pytest.mark.promise(271)
def test_each_of_many_requests_at_once_gets_an_answer(tmp_path: Path) -> None:
    """The daemon is at work meanwhile, and accepts no connection of the engine."""
    many, statuses = 400, list[int]()
    asked = request(f"/{SET}/d/{REFUSED}")

    async def check(node: Node) -> None:
        with ExitStack() as cleanup:
            where = ("127.0.0.1", node.port)
            made = [
                cleanup.enter_context(socket.create_connection(where, timeout=60))
                for _ in range(many)
            ]
            for connection in made:
                connection.sendall(asked)
            # Not trio.sleep: it holds the event loop up.
            time.sleep(0.5)
            for connection in made:
                statuses.append(status_of(await trio.to_thread.run_sync(connection.recv, 4096)))

    with_node(tmp_path, check)
    assert statuses == [404] * many


def test_a_fetch_that_fails_is_answered_as_not_kept(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        node.files.fails = True
        node.files.may_arrive.set()
        client = node.client()
        assert (await trio.to_thread.run_sync(client.get, f"d/{SMALL}", 500)).status == 404
        client.close()

    with_node(tmp_path, check)


def request(name: str, *, method: str = "GET", token: str = TOKEN, more: str = "") -> bytes:
    head = f"{method} {name} HTTP/1.1\r\nHost: monarch\r\nX-Monarch-Token: {token}\r\n"
    return f"{head}Connection: close\r\n{more}\r\n".encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer else 0


@pytest.mark.promise(272)
def test_without_the_token_or_outside_of_the_set_nothing_is_served(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        files, ask = node.files, partial(trio.to_thread.run_sync, node.raw)
        files.put(FIRST, b"secret bytes", 1)
        (files.tiers[0] / "01" / "257.part").write_bytes(b"secret bytes")
        (tmp_path / "outside").write_bytes(b"secret bytes")
        good = f"/{SET}/c/{copy_name(FIRST)}"
        assert b"secret bytes" in await ask(request(good))
        of_another_member = MemberKey("127.0.0.2", SET, SECRET).token()
        for token in ("", "x", "0", "1", "default", TOKEN[:-1], TOKEN + "0", of_another_member):
            assert status_of(await ask(request(good, token=token))) == 403, token
        challenge = new_challenge()
        for name in (
            good,
            f"/hello/{challenge}0",
            f"/hello/{challenge[1:]}",
            f"/hello/{challenge}/127.0.0.1/80",
            f"/hello/{challenge.upper()}",
            f"/hello/../{SET}/c/{copy_name(FIRST)}",
            f"/{SET}/hello",
        ):
            bare = f"GET {name} HTTP/1.1\r\nHost: monarch\r\nConnection: close\r\n\r\n".encode()
            assert status_of(await ask(bare)) == 403, name
        names = [
            f"/{'0' * 32}/c/{copy_name(FIRST)}",
            f"/{SET}/c/01/257.part",
            f"/{SET}/c/01/../../../outside",
            f"/{SET}/c/01/..%2f..%2f..%2foutside",
            f"/{SET}/c/%2e%2e/outside",
            f"/{SET}/c//etc/passwd",
            f"/{SET}/d/../../outside",
            f"/{SET}/d/-1",
            f"/{SET}/d/99999999999999999999",
            f"/{SET}/d/0",
            f"/{SET}/",
            "/1/01/257",
            "/copies/1/01/257",
            "/nginx.conf",
            "/",
            "/" + "a" * 900,
        ]
        for name in names:
            answer = await ask(request(name))
            assert status_of(answer) in (400, 404, 502), (name, answer)
            assert b"secret" not in answer and TOKEN.encode() not in answer
        for method in ("POST", "PUT", "DELETE", "HEAD", "TRACE", "PROPFIND"):
            answer = await ask(request(good, method=method, more="Content-Length: 0\r\n"))
            assert status_of(answer) == 405, method
        for odd in (
            request(good, more=f"X-Long: {'a' * 1_000_000}\r\n"),
            request(good, more="X: y\r\n" * 5000),
            b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"\x00\x16\x03\x01\x02\x00\x01\x00" * 100 + b"\r\n\r\n",
        ):
            assert b"secret" not in await ask(odd)
        # It still works.
        assert b"secret bytes" in await ask(request(good))

    with_node(tmp_path, check)


def test_a_member_with_another_secret_is_refused_and_says_so(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        for client, kind in (
            (node.client(key=MemberKey(HOST, SET, b"another secret")), "wrong-secret"),
            (node.client(key=MemberKey("127.0.0.2", SET, SECRET)), "wrong-secret"),
            (node.client(key=MemberKey(HOST, "ef" * 16, SECRET)), "other-set"),
        ):
            with pytest.raises(PeerFailed) as failed:
                await trio.to_thread.run_sync(client.get, "d/1", 5)
            assert failed.value.kind == kind

    with_node(tmp_path, check)


@pytest.mark.promise(297)
def test_the_proofs_are_of_the_port_at_which_the_hello_arrived(tmp_path: Path) -> None:
    """A program at another port passes each connection on to the member, and reads all of it."""
    received: list[bytes] = []

    def pass_on(listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, socket.create_connection((HOST, port), 20) as member:
                    connection.settimeout(60)
                    while part := connection.recv(4096):
                        received.append(part)
                        member.sendall(part)
                        answer = b""
                        while len(answer.partition(b"\r\n\r\n")[2]) < PROOFS_BYTES:
                            got = member.recv(65536)
                            assert got
                            answer += got
                        connection.sendall(answer)

    async def check(node: Node) -> None:
        with ExitStack() as cleanup:
            listener = cleanup.enter_context(socket.create_server((HOST, 0)))
            thread = threading.Thread(target=pass_on, args=(listener, node.port))
            thread.start()
            cleanup.callback(thread.join)
            cleanup.callback(listener.shutdown, socket.SHUT_RDWR)
            client = node.client(port=listener.getsockname()[1])
            with pytest.raises(PeerFailed) as failed:
                await trio.to_thread.run_sync(client.get, "d/1", 5)
            assert failed.value.kind == "wrong-secret"
        assert b"".join(received).startswith(b"GET /hello/")
        assert TOKEN.encode() not in b"".join(received)

    with_node(tmp_path, check)


def test_a_hello_needs_no_token_and_its_rate_is_limited(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        challenge = new_challenge()
        # One node may send 256 of them at once, and then 50/s.
        many = 2000
        last = f"GET /hello/{challenge} HTTP/1.1\r\nHost: monarch\r\nConnection: close\r\n\r\n"
        answer = await trio.to_thread.run_sync(
            node.raw, hello_request(challenge) * many + last.encode()
        )
        statuses = re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", answer)
        assert len(statuses) == many + 1
        assert {b"200", b"429"} == set(statuses)
        assert statuses.count(b"200") >= 256
        assert KEY.proofs(challenge, HOST, node.port) in answer
        assert TOKEN.encode() not in answer
        assert (tmp_path / "peers" / "nginx.log").read_bytes() == b""

    with_node(tmp_path, check)


def test_the_log_of_the_engine_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MOST_LOG", 1000)

    async def check(node: Node) -> None:
        node.files.put(FIRST, b"bytes", 1)
        # Each such request is a line at the level error.
        large = request(f"/{SET}/d/{FIRST}", more="Content-Length: 100\r\n") + b"x" * 100
        for _ in range(20):
            answer = await trio.to_thread.run_sync(node.raw, large)
            assert status_of(answer) == 413
        assert (tmp_path / "peers" / "nginx.log").stat().st_size == 1000
        client = node.client()
        assert (await trio.to_thread.run_sync(client.get, f"d/{FIRST}", 5)).data == b"bytes"
        client.close()
        assert node.engine.starts == 1

    with_node(tmp_path, check)


@pytest.fixture
def old_nginx(tmp_path: Path) -> Path:
    """nginx as before 1.19.5, which does not know ``-e``."""
    made = tmp_path / "old" / "nginx"
    made.parent.mkdir()
    made.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -e "*) echo \'nginx: invalid option: "e"\' >&2; exit 1 ;; esac\n'
        f'exec {find_engine(None)} -e stderr "$@"\n'
    )
    made.chmod(0o700)
    return made


def test_an_nginx_without_the_option_of_newer_ones_serves_copies(
    tmp_path: Path, old_nginx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "find_engine", lambda given: old_nginx)

    async def check(node: Node) -> None:
        node.files.put(FIRST, b"a copy", 1)
        client = node.client()
        answer = await trio.to_thread.run_sync(client.get, f"d/{FIRST}", 6)
        assert answer.data == b"a copy"
        client.close()
        # It is known from the second start on.
        assert node.engine.starts == 2

    with_node(tmp_path, check)
    site = Site([tmp_path / "tier"], KEY, HOST, [free_port()])
    assert Engine(old_nginx, tmp_path / "checked", site).check(site.ports[0]) == ""


@pytest.mark.promise(274)
def test_an_engine_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        process = node.engine._process
        assert process is not None
        content, size = os.urandom(200_000), 200_000
        node.files.put(FIRST, content, 1)
        client = node.client()
        assert (await trio.to_thread.run_sync(client.get, f"d/{FIRST}", size)).data == content
        # The kernel counts the bytes when the call has ended that sent them.
        while (sent := node.engine.sent_bytes()) is None or sent < size:
            await trio.sleep(0.01)
        assert sent < 2 * size
        os.kill(process.pid, signal.SIGKILL)
        while node.engine.starts < 2 or node.engine.port is None:
            await trio.sleep(0.01)
        assert (await trio.to_thread.run_sync(client.get, f"d/{FIRST}", size)).data == content
        while (node.engine.sent_bytes() or 0) < sent + size:
            await trio.sleep(0.01)
        client.close()

    with_node(tmp_path, check)


@pytest.mark.promise(274)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may enter what its engine may not")
def test_an_engine_that_may_not_enter_a_tier_is_not_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed, peers = tmp_path / "closed", tmp_path / "peers"
    files = Files(closed / "node")
    os.chown(closed, 4242, 4242)
    closed.chmod(0o700)

    async def main() -> None:
        answers = Answers(peers / SOCKET, files, KEY, patience_s=0.02, most_held=8_000_000)
        engine = Engine(find_engine(None), peers, Site(files.tiers, KEY, HOST, [free_port()]))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers.run)
                nursery.start_soon(engine.run)
                await engine.settled.wait()
                assert (engine.port, engine.starts) == (None, 0)
                closed.chmod(0o755)
                while engine.port is None:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(main)
    (said, *_) = (record.getMessage() for record in caplog.records)
    assert f"may not enter {closed / 'node'}: a directory above it" in said


def test_a_port_is_reserved_until_the_engine_has_ended(tmp_path: Path) -> None:
    """Two Caddys of a user could listen at one port, and the kernel would choose between them."""
    ports = []

    async def check(node: Node) -> None:
        assert claim(HOST, node.port) is None
        ports.append(node.port)

    with_node(tmp_path, check)
    made = claim(HOST, ports[0])
    assert made is not None
    made.close()


@pytest.mark.parametrize("is_same", [True, False])
def test_the_log_names_another_mount_with_the_same_secret(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_same: bool,
) -> None:
    monkeypatch.setattr(engines, "_HELLO_S", 60.0)
    key = KEY if is_same else MemberKey(HOST, "cd" * 16, SECRET)

    async def check(node: Node) -> None:
        directory, files = tmp_path / "second" / "peers", Files(tmp_path / "second")
        answers = Answers(directory / SOCKET, files, key, patience_s=0.02, most_held=1)
        site = Site(files.tiers, key, HOST, [node.port, free_port()])
        engine = Engine(find_engine(None), directory, site)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answers.run)
            nursery.start_soon(engine.run)
            await engine.settled.wait()
            # A killed engine is started again: then all of this has been done once.
            assert engine._process is not None
            os.kill(engine._process.pid, signal.SIGKILL)
            while engine.starts < 2:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        found = [each for each in caplog.messages if f"at port {node.port}, has the same" in each]
        assert bool(found) == is_same

    with_node(tmp_path, check)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("no directory", "/gone/peers: No such file or directory"),
        ("a full disk", "/peers: No space left on device"),
        ("another address", "192.0.2.1 port [0-9]+: Cannot assign requested address"),
        ("ports in use", r"no port of \[[0-9]+\] is free"),
        ("no word", "no word in its log, exit status 0"),
    ],
)
def test_the_log_says_why_the_engine_does_not_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cause: str,
    reason: str,
) -> None:
    directory = tmp_path / ("gone/peers" if cause == "no directory" else "peers")
    address = "192.0.2.1" if cause == "another address" else HOST
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)

    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if cause == "a full disk":
        monkeypatch.setattr(engines, "replace_private", full)

    async def main(port: int) -> None:
        engine = Engine(program, directory, Site([], KEY, address, [port]))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                while not caplog.records:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    with socket.create_server((HOST, 0)) as listener:
        trio.run(main, listener.getsockname()[1] if cause == "ports in use" else free_port())
    (said, *_) = (record.getMessage() for record in caplog.records)
    assert re.search(rf"ended or did not start: \S*{reason}; they read the source", said), said


def test_an_engine_that_hangs_is_not_started_at_each_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it counts as not started the mount reports that it starts."""
    monkeypatch.setattr(engines, "_READY_S", 0.5)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o700)
    engine = Engine(program, tmp_path / "peers", Site([], KEY, HOST, [free_port(), free_port()]))

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.run)
                while not caplog.records:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert engine.settled.is_set() and engine.starts == 1
    assert "ended or did not start: no answer after 0.5 s; they read" in caplog.text


@pytest.mark.promise(272)
def test_the_configuration_is_private_and_the_engine_has_no_capabilities(tmp_path: Path) -> None:
    async def check(node: Node) -> None:
        directory = tmp_path / "peers"
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "nginx.conf").stat().st_mode & 0o777 == 0o600
        assert (directory / SOCKET).stat().st_mode & 0o777 == 0o600
        process = node.engine._process
        assert process is not None
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in command + environment

    with_node(tmp_path, check)


def test_the_daemon_works_on_while_its_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ends only after another task of the daemon has run."""
    monkeypatch.setattr(engines, "_END_S", 50.0)
    program, directory = tmp_path / "program", tmp_path / "peers"
    program.write_text(
        "#!/bin/sh\n"
        "trap ': >asked; while [ ! -e go ]; do sleep 0.01; done; : >ended; exit' TERM\n"
        ": >ready\n"
        "while :; do sleep 0.01; done\n"
    )
    program.chmod(0o700)
    engine = Engine(program, directory, Site([], KEY, HOST, [free_port()]))

    async def exists(name: str) -> None:
        while not (directory / name).exists():
            await trio.sleep(0.01)

    async def release() -> None:
        await exists("asked")
        (directory / "go").touch()

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as others:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.run)
                    await exists("ready")
                    others.start_soon(release)
                    nursery.cancel_scope.cancel()
        assert (directory / "ended").exists()

    trio.run(main)


def test_an_engine_that_is_missing_or_cannot_be_executed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be executed"):
        find_engine(tmp_path / "nginx")
    # A directory may be entered, which is the same right.
    (tmp_path / "nginx").mkdir()
    with pytest.raises(UsageError, match="cannot be executed"):
        find_engine(tmp_path / "nginx")
