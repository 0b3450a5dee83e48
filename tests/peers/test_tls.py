"""Connections between members over TLS, with certificates of a real authority."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import pytest
import trio

from monarch.errors import UsageError
from monarch.peers.breaker import Breaker
from monarch.peers.client import PeerClient, PeerFailed
from monarch.peers.hello import CHALLENGE
from monarch.peers.members import Endpoint
from monarch.peers.tls import Certificate, client_context
from monarch.tiers.contents import copy_name
from tests.conftest import require_fuse
from tests.mount.observe import files
from tests.peers.lab import lab
from tests.peers.member import head
from tests.peers.test_engine import (
    FIRST,
    HOST,
    KEY,
    SECOND,
    SET,
    TOKEN,
    Node,
    request,
    status_of,
    with_node,
)

COPY = f"/{SET}/c/{copy_name(FIRST)}"
CONTENT = b"secret bytes"


def run(*command: str, **options: str) -> None:
    subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=60, **options)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an authority, which has signed the certificates ``a`` and ``b``."""
    made = tmp_path_factory.mktemp("authority")
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run(*new, "-x509", "-subj", "/CN=authority", "-keyout", f"{made}/ca.key", "-out", f"{made}/ca")
    signed = ("-CA", f"{made}/ca", "-CAkey", f"{made}/ca.key", "-subj", "/CN=node", "-x509")
    for name in ("a", "b"):
        run(*new, *signed, "-keyout", f"{made}/{name}.key", "-out", f"{made}/{name}.crt")
    return made


def certificate_of(authority: Path, name: str) -> Certificate:
    return Certificate(authority / f"{name}.crt", authority / f"{name}.key")


def ask(port: int, data: bytes) -> bytes:
    """The answer to bytes inside of TLS, up to its end."""
    answer = b""
    plain = socket.create_connection((HOST, port), timeout=60)
    with client_context().wrap_socket(plain) as connection, suppress(OSError):
        connection.sendall(data)
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.promise(330)
def test_members_read_copies_over_tls_and_strangers_get_nothing(
    tmp_path: Path, authority: Path
) -> None:
    certificate = certificate_of(authority, "a")

    async def check(node: Node) -> None:
        large = os.urandom(3_000_000)
        node.files.put(FIRST, CONTENT, 1)
        node.files.put(SECOND, large, 2)
        client = node.client(tls=client_context())
        for _ in range(2):
            for ino, content in ((FIRST, CONTENT), (SECOND, large)):
                answer = await trio.to_thread.run_sync(client.get, f"d/{ino}", len(content))
                assert answer.data == content
        client.close()
        with pytest.raises(PeerFailed) as failed:
            await trio.to_thread.run_sync(node.client().get, f"d/{FIRST}", len(CONTENT))
        assert failed.value.kind == "broken"
        for token, status in ((TOKEN, 200), ("", 403), (TOKEN[1:], 403)):
            answered = await trio.to_thread.run_sync(ask, node.port, request(COPY, token=token))
            assert (status_of(answered), CONTENT in answered) == (status, status == 200)
        # Without TLS even the token is of no use.
        plain = await trio.to_thread.run_sync(node.raw, request(COPY))
        assert status_of(plain) == 400 and CONTENT not in plain

    with_node(tmp_path, check, certificate)


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_log_names_the_setting_if_only_one_of_two_nodes_has_a_certificate(
    tmp_path: Path, authority: Path, caplog: pytest.LogCaptureFixture, has_tls: bool
) -> None:
    async def check(node: Node) -> None:
        node.files.put(FIRST, CONTENT, 1)
        client = node.client(tls=None if has_tls else client_context())
        for _ in range(2):
            with pytest.raises(PeerFailed) as failed:
                await trio.to_thread.run_sync(client.get, f"d/{FIRST}", len(CONTENT))
            assert failed.value.kind == "broken"
        client.close()
        (line,) = (each.getMessage() for each in caplog.records if HOST in each.getMessage())
        assert "peers.tls_cert on all nodes or on none" in line

    caplog.set_level("WARNING")
    with_node(tmp_path, check, certificate_of(authority, "a") if has_tls else None)


@pytest.mark.promise(330)
def test_mounts_of_a_job_share_their_copies_over_tls(tmp_path: Path, authority: Path) -> None:
    require_fuse()
    source = tmp_path / "source"
    source.mkdir()
    content = files(20)
    for name, data in content.items():
        (source / name).write_bytes(data)
    with lab(tmp_path / "lab", source, 2) as job:
        for number, name in ((1, "a"), (2, "b")):
            own = f"{authority}/{name}"
            job.mount(number, f"peers.tls_cert={own}.crt", f"peers.tls_key={own}.key")
        job.read_all(content)
        assert job.opens_at_the_source() == len(content)
        for number in job.nodes:
            found = job.peers(number)
            assert found["files"] > 0 and not found["failures"]
            assert found["address"].endswith(", TLS")


class Middle:
    """A program between two members, with a certificate of its own: it gives the client the proofs
    that the member gives for the certificate with the ``fingerprint``."""

    def __init__(self, own: Certificate, fingerprint: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(own.cert, own.key)
        self._fingerprint = fingerprint
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.received = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            plain, _ = self._listener.accept()
            with self._context.wrap_socket(plain, server_side=True) as connection:
                while part := connection.recv(65536):
                    self.received += part
                    found = re.findall(CHALLENGE.encode(), self.received)
                    proofs = KEY.proofs(found[0].decode(), HOST, self.port, self._fingerprint)
                    is_hello = TOKEN.encode() not in self.received
                    connection.sendall(head(128) + proofs if is_hello else head(5) + b"hello")

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.mark.promise(330)
@pytest.mark.parametrize("passed_on", ["a", "b"])
def test_a_program_between_members_with_another_certificate_gets_no_token(
    authority: Path, passed_on: str
) -> None:
    """The authority has signed both certificates."""
    member, own = certificate_of(authority, passed_on), certificate_of(authority, "b")
    member.read()
    with ExitStack() as cleanup:
        middle = Middle(own, member.fingerprint)
        cleanup.callback(middle.close)
        client = PeerClient(Endpoint(HOST), [middle.port], KEY, Breaker(10.0), client_context())
        cleanup.callback(client.close)
        if passed_on == "b":
            # The test can fail: these proofs are right.
            assert client.get("d/1", 5).data == b"hello"
        else:
            with pytest.raises(PeerFailed) as failed:
                client.get("d/1", 5)
            assert failed.value.kind == "wrong-secret"
        assert (TOKEN.encode() in middle.received) == (passed_on == "b")


def test_a_member_that_stops_in_the_bytes_is_a_failure_also_with_tls(authority: Path) -> None:
    own = certificate_of(authority, "a")
    own.read()
    with ExitStack() as cleanup:
        # It answers with 5 bytes and waits, where the client waits for the whole of 9.
        middle = Middle(own, own.fingerprint)
        cleanup.callback(middle.close)
        client = PeerClient(Endpoint(HOST), [middle.port], KEY, Breaker(10.0), client_context())
        cleanup.callback(client.close)
        assert client.get("d/1", 5).data == b"hello"
        kept = client.connections.take()
        assert kept is not None
        kept.limit(0.05)
        with pytest.raises(TimeoutError):
            kept.receive_whole(9)
        kept.close()


def test_requests_of_any_form_leave_the_engine_answering(tmp_path: Path, authority: Path) -> None:
    dice = Random(16)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(505)

    def broken(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(dice.randrange(1, 8)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        return bytes(changed[: dice.randrange(1, len(changed) + 1)])

    async def check(node: Node) -> None:
        node.files.put(FIRST, CONTENT, 1)
        stranger = request(COPY, token="0" * len(TOKEN))
        for _ in range(20):
            # The end of the input lets the engine hang up at once.
            for data in (broken(hello), broken(stranger), dice.randbytes(300)):
                assert CONTENT not in await trio.to_thread.run_sync(sent, node.port, data)
            # The second request ends the connection, whatever the first one was.
            inside = broken(stranger) + b"\r\n\r\n" + stranger
            assert CONTENT not in await trio.to_thread.run_sync(ask, node.port, inside)
        answered = await trio.to_thread.run_sync(ask, node.port, request(COPY))
        assert answered.endswith(CONTENT) and node.engine.starts == 1

    with_node(tmp_path, check, certificate_of(authority, "a"))


def sent(port: int, data: bytes) -> bytes:
    """The answer to bytes without TLS, up to its end."""
    answer = b""
    with socket.create_connection((HOST, port), timeout=60) as connection, suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
    return answer


def test_a_certificate_that_was_replaced_counts_from_the_next_start_of_the_engine(
    tmp_path: Path, authority: Path
) -> None:
    own = Certificate(tmp_path / "crt", tmp_path / "key")

    def put(name: str) -> None:
        own.cert.write_bytes((authority / f"{name}.crt").read_bytes())
        own.key.touch(mode=0o600)
        own.key.write_bytes((authority / f"{name}.key").read_bytes())

    async def check(node: Node) -> None:
        node.files.put(FIRST, CONTENT, 1)
        before = own.fingerprint
        put("b")
        process = node.engine._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        while node.engine.starts < 2 or node.engine.port is None:
            await trio.sleep(0.01)
        assert own.fingerprint != before
        client = node.client(tls=client_context())
        answer = await trio.to_thread.run_sync(client.get, f"d/{FIRST}", len(CONTENT))
        assert answer.data == CONTENT
        client.close()

    put("a")
    with_node(tmp_path, check, own)


def encrypted(made: Path, authority: Path) -> None:
    source = ("-in", f"{authority}/a.key", "-out", f"{made}/key")
    run("ec", *source, "-aes256", "-passout", "pass:x")


def exchanged(made: Path, authority: Path) -> None:
    (made / "key").write_bytes((authority / "b.key").read_bytes())


def shown(made: Path, authority: Path) -> None:
    (made / "key").chmod(0o644)


def empty(made: Path, authority: Path) -> None:
    (made / "crt").write_bytes(b"")


def missing(made: Path, authority: Path) -> None:
    (made / "crt").unlink()


@pytest.mark.parametrize("spoil", [encrypted, exchanged, shown, empty, missing])
def test_a_certificate_that_cannot_be_used_ends_the_mount(
    tmp_path: Path, authority: Path, spoil: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_bytes((authority / "a.key").read_bytes())
    (tmp_path / "crt").write_bytes((authority / "a.crt").read_bytes())
    own = Certificate(tmp_path / "crt", tmp_path / "key")
    own.read()
    spoil(tmp_path, authority)
    with pytest.raises(UsageError) as refused:
        own.read()
    assert "peers.tls_" in str(refused.value.args[0]) and refused.value.hint
