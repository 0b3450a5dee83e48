"""The answers of the daemon without an engine: other requests, and errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from monarch.peers.answers import Answers
from monarch.peers.nginx import SOCKET
from monarch.peers.spans import Span
from tests.peers.test_engine import KEY, LARGE, ODD, SET, SMALL, Files


@pytest.mark.promise(273)
def test_requests_of_any_form_to_the_daemon_end_their_connection_only(tmp_path: Path) -> None:
    right = f"GET /{SET}/d/{SMALL} HTTP/1.1\r\n\r\n".encode()
    odd = [
        b"",
        b"\r\n\r\n",
        right[:-2],
        b"POST" + right[3:],
        right.replace(b"/d/", b"/../"),
        right.replace(b"/d/3", b"/d/" + b"9" * 5000),
        right.replace(b"/d/3", b"/d/\xd9\xa3"),
        bytes(range(256)) * 4 + b"\r\n\r\n",
        b"x" * 1_000_000,
    ]

    async def check(files: Files, path: Path) -> None:
        files.may_arrive.set()
        for request in odd:
            assert await ask_daemon(path, request) == b"", request[:80]
        assert (await ask_daemon(path, right)).startswith(b"HTTP/1.1 200 ")

    with_answers(tmp_path, check)


def to_daemon(name: str) -> bytes:
    return f"GET {name} HTTP/1.1\r\n\r\n".encode()


@pytest.mark.promise(273)
@pytest.mark.parametrize(
    "field", ["Content-Length: %d", "content-length : 0%d", "Transfer-Encoding: chunked"]
)
def test_a_request_in_the_body_of_another_one_gets_no_answer(tmp_path: Path, field: str) -> None:
    """An engine that passes on the body of a hello, which needs no token, must not get a file."""
    hidden = to_daemon(f"/{SET}/d/{SMALL}")
    hello = to_daemon(f"/hello/{'0' * 64}/127.0.0.1/20000")
    fields = field.replace("%d", str(len(hidden))).encode()
    outer = hello.replace(b"\r\n\r\n", b"\r\n" + fields + b"\r\n\r\n")

    async def check(files: Files, path: Path) -> None:
        files.may_arrive.set()
        # Some reads end with the head, and others with the body.
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(outer)
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some(4096) == b""
        assert await ask_daemon(path, outer + hidden) == b""
        assert not files.fetched
        for right in (hello, hello.replace(b"\r\n\r\n", b"\r\nContent-Length: 0\r\n\r\n")):
            assert (await ask_daemon(path, right)).startswith(b"HTTP/1.1 200 ")

    with_answers(tmp_path, check)


async def ask_daemon(path: Path, request: bytes) -> bytes:
    """The answer of the daemon; empty if it hangs up."""
    stream = await trio.open_unix_socket(path)
    async with stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(request)
            await stream.send_eof()
        with suppress(trio.BrokenResourceError):
            return b"".join([bytes(part) async for part in stream])
    return b""


def with_answers(
    directory: Path,
    check: Callable[[Files, Path], Awaitable[None]],
    *,
    patience_s: float = 20.0,
    meanwhile: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
) -> None:
    """Runs ``check`` beside the answers of a daemon without an engine, at the socket ``path``;
    ``meanwhile`` until the socket is there."""

    async def main() -> None:
        files, path = Files(directory), directory / "peers" / SOCKET
        answers = Answers(path, files, KEY, patience_s=patience_s, most_held=8_000_000)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers.run)
                await meanwhile()
                while not path.exists():
                    await trio.sleep(0.01)
                await check(files, path)
                nursery.cancel_scope.cancel()
        assert not path.exists()

    trio.run(main)


@pytest.mark.promise(274)
def test_a_socket_that_cannot_be_made_is_tried_again_and_is_no_internal_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch.peers.answers._SOCKET_PAUSE_S", 0.01, raising=False)
    in_the_place_of_the_directory = tmp_path / "peers"
    in_the_place_of_the_directory.touch()

    async def no_directory_at_first() -> None:
        while "Not a directory" not in caplog.text:
            await trio.sleep(0.01)
        in_the_place_of_the_directory.unlink()

    async def check(files: Files, path: Path) -> None:
        hello = to_daemon(f"/hello/{'0' * 64}/127.0.0.1/20000")
        assert (await ask_daemon(path, hello)).startswith(b"HTTP/1.1 200 ")

    with_answers(tmp_path, check, meanwhile=no_directory_at_first)
    # Health names each one as a bug.
    assert not any(record.exc_info for record in caplog.records)


def test_bytes_that_are_kept_are_given_up_for_others(tmp_path: Path) -> None:
    """All of them together are twice as many as may be held."""

    async def check(files: Files, path: Path) -> None:
        files.may_arrive.set()
        for number in (0, 1, 2, 3, 4, 0):
            files.source[Span(ODD, number, number)] = bytes([number]) * 3_000_000
            answer = await ask_daemon(path, to_daemon(f"/{SET}/r/{ODD}/{number}-{number}"))
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(bytes([number]) * 3_000_000)

    with_answers(tmp_path, check)


def test_bytes_that_a_slow_member_gets_are_held_until_it_has_them(tmp_path: Path) -> None:
    async def check(files: Files, path: Path) -> None:
        files.may_arrive.set()
        requests = []
        for number in range(3):
            files.source[Span(ODD, number, number)] = bytes([number]) * 3_000_000
            requests.append(to_daemon(f"/{SET}/r/{ODD}/{number}-{number}"))
        slow = [await trio.open_unix_socket(path) for _ in range(2)]
        for stream, request in zip(slow, requests, strict=False):
            await stream.send_all(request)
            # The rest does not fit into the buffer of the socket.
            assert (await stream.receive_some(12)) == b"HTTP/1.1 200"
        for _ in range(2):
            assert (await ask_daemon(path, requests[2])).startswith(b"HTTP/1.1 202 ")
        await slow[0].aclose()
        while (await ask_daemon(path, requests[2])).startswith(b"HTTP/1.1 202 "):
            pass
        assert (await ask_daemon(path, requests[2])).endswith(bytes([2]) * 3_000_000)
        await slow[1].aclose()

    with_answers(tmp_path, check, patience_s=0.05)


def test_an_unknown_error_in_one_answer_ends_its_connection_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(files: Files, path: Path) -> None:
        files.may_arrive.set()
        assert await ask_daemon(path, to_daemon(f"/{SET}/d/{ODD}")) == b""
        assert "a bug, please report it" in caplog.text
        files.fails, files.error = True, LookupError("a bug")
        answer = await ask_daemon(path, to_daemon(f"/{SET}/d/{LARGE}"))
        assert answer.startswith(b"HTTP/1.1 404 ")
        files.fails = False
        answer = await ask_daemon(path, to_daemon(f"/{SET}/d/{SMALL}"))
        assert answer.endswith(files.source[SMALL])

    with_answers(tmp_path, check)


@pytest.mark.promise(271)
def test_more_connections_than_are_served_at_a_time_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer the engine would say 502, and the member take this node for broken."""
    monkeypatch.setattr("monarch.peers.answers._MOST_CONNECTIONS", 4)

    async def check(files: Files, path: Path) -> None:
        streams = [await trio.open_unix_socket(path) for _ in range(12)]
        for stream in streams:
            await stream.send_all(to_daemon(f"/{SET}/d/{SMALL}"))
        files.may_arrive.set()
        for stream in streams:
            # The daemon keeps a connection until the engine closes it.
            async with stream:
                assert (await stream.receive_some(4096)).startswith(b"HTTP/1.1 200 ")

    with_answers(tmp_path, check)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_answers_continue_after_a_time_without_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    accept, failed = trio.SocketListener.accept, 0

    async def scarce(listener: trio.SocketListener) -> trio.SocketStream:
        nonlocal failed
        if failed < 3:
            failed += 1
            raise OSError(number, os.strerror(number))
        return await accept(listener)

    monkeypatch.setattr(trio.SocketListener, "accept", scarce)

    async def check(files: Files, path: Path) -> None:
        files.may_arrive.set()
        answer = await ask_daemon(path, to_daemon(f"/{SET}/d/{SMALL}"))
        assert answer.endswith(files.source[SMALL])
        assert failed == 3

    with_answers(tmp_path, check)
