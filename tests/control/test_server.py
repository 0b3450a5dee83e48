"""The control socket: its answers, and that no client disturbs the daemon (faults I3)."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.control.client import call
from monarch.control.messages import MAX_LINE_BYTES, decode, encode
from monarch.control.server import MAX_CONNECTIONS, Send, Server, Verb
from monarch.errors import (
    BusyError,
    MonarchError,
    NotMountedError,
    SnapshotError,
    TierError,
    UsageError,
)


async def echo(params: dict[str, Any], send: Send) -> dict[str, Any]:
    return params


async def count(params: dict[str, Any], send: Send) -> dict[str, Any]:
    for done in range(3):
        await send({"done": done, "total": 3})
    return {"files": 3}


async def refuse(params: dict[str, Any], send: Send) -> dict[str, Any]:
    raise SnapshotError("the snapshot is of another source", hint="build it again")


async def refuse_in_a_nursery(params: dict[str, Any], send: Send) -> dict[str, Any]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse, params, send)
    return {}


async def break_down(params: dict[str, Any], send: Send) -> dict[str, Any]:
    raise ZeroDivisionError("a slip")


async def boast(params: dict[str, Any], send: Send) -> dict[str, Any]:
    return {"words": "x" * MAX_LINE_BYTES}


VERBS: dict[str, Verb] = {
    "echo": echo,
    "count": count,
    "refuse": refuse,
    "refuse_in_a_nursery": refuse_in_a_nursery,
    "break": break_down,
    "boast": boast,
}


@asynccontextmanager
async def serving(
    path: Path, verbs: dict[str, Verb] = VERBS, **options: Any
) -> AsyncIterator[Path]:
    async with trio.open_nursery() as nursery:
        await nursery.start(Server(path, verbs, **options).serve)
        yield path
        nursery.cancel_scope.cancel()


async def ask(path: Path, verb: str, params: dict[str, Any] | None = None, **options: Any) -> Any:
    return await trio.to_thread.run_sync(partial(call, path, verb, params or {}, **options))


async def say(path: Path, data: bytes, *, end: bool = False) -> dict[str, Any]:
    """The one reply to raw bytes, decoded."""
    async with await trio.open_unix_socket(path) as stream:
        try:
            await stream.send_all(data)
            if end:
                await stream.send_eof()
        except trio.BrokenResourceError:
            pass
        received = b""
        with trio.fail_after(60):
            try:
                async for chunk in stream:
                    received += chunk
            except trio.BrokenResourceError:
                pass
    reply = json.loads(received)
    assert isinstance(reply, dict)
    return reply


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


async def test_a_verb_answers_with_names_that_are_not_utf8(path: Path) -> None:
    params = {"paths": [os.fsdecode(b"caf\xe9\n"), "train"]}
    async with serving(path):
        assert await ask(path, "echo", params) == params


async def test_progress_arrives_before_the_result(path: Path) -> None:
    seen: list[dict[str, Any]] = []
    async with serving(path):
        result = await ask(path, "count", on_progress=seen.append)
    assert result == {"files": 3}
    assert [p["done"] for p in seen] == [0, 1, 2]


async def test_an_error_of_the_callback_is_not_taken_for_one_of_the_daemon(path: Path) -> None:
    """Such as a disk that is full, or a pipe that its reader has closed."""

    def fail(_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    async with serving(path):
        with pytest.raises(BrokenPipeError):
            await ask(path, "count", on_progress=fail)


@pytest.mark.parametrize("verb", ["refuse", "refuse_in_a_nursery"])
async def test_an_error_of_the_tree_arrives_as_itself(path: Path, verb: str) -> None:
    async with serving(path):
        with pytest.raises(SnapshotError, match=r"another source; build it again"):
            await ask(path, verb)


@pytest.mark.fault("M6")
async def test_an_unexpected_exception_is_answered_and_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path):
        with pytest.raises(MonarchError, match="a slip") as caught:
            await ask(path, "break")
        assert caught.value.exit_code == 1
        assert await ask(path, "echo") == {}
    assert [r.exc_info is not None for r in caplog.records] == [True]


async def test_an_unknown_verb_is_a_usage_error_that_names_the_known(path: Path) -> None:
    async with serving(path):
        with pytest.raises(UsageError, match="known: boast, break, count, echo"):
            await ask(path, "fly")


async def test_a_result_too_long_for_a_line_is_an_error_not_a_hang(path: Path) -> None:
    async with serving(path):
        with pytest.raises(MonarchError, match="cannot be sent"):
            await ask(path, "boast")


async def test_a_request_too_long_is_refused_before_it_is_sent(path: Path) -> None:
    async with serving(path):
        with pytest.raises(UsageError, match="longer than"):
            await ask(path, "echo", {"paths": ["x" * MAX_LINE_BYTES]})


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"\0\xff\xfe\n",
        b"GET / HTTP/1.1\r\n",
        b"null\n",
        b"[]\n",
        b'"status"\n',
        b'{"verb": "echo"}\n',
        b'{"verb": 1, "params": {}}\n',
        b'{"verb": "echo", "params": []}\n',
        b'{"verb": "echo", "params": {}, "more": 1}\n',
        b'{"verb": "echo", "params": {"n": NaN}}\n',
        b'{"verb": "echo", "params": {"n": ' + b"9" * 10_000 + b"}}\n",
        b"[" * 500_000 + b"\n",
        b'{"verb": "echo", "params": {}}\n{"verb": "echo", "params": {}}\n',
        b'{"verb": "echo", "params": {}}\n ',
    ],
    ids=lambda garbage: repr(garbage[:40]),
)
@pytest.mark.fault("I3")
async def test_garbage_is_answered_and_the_next_is_served(path: Path, garbage: bytes) -> None:
    async with serving(path):
        reply = await say(path, garbage)
        assert (reply["ok"], reply["exit_code"]) == (False, 1)
        assert await ask(path, "echo", {"a": 1}) == {"a": 1}


@pytest.mark.fault("I3")
async def test_a_huge_line_is_cut_off(path: Path) -> None:
    async with serving(path):
        reply = await say(path, b"x" * (8 * MAX_LINE_BYTES))
        assert "at most" in reply["error"]


@pytest.mark.fault("I3")
async def test_half_a_message_is_refused_when_the_client_ends(path: Path) -> None:
    async with serving(path):
        reply = await say(path, b'{"verb": "echo", ', end=True)
        assert "ends before its newline" in reply["error"]


@pytest.mark.fault("I3")
async def test_half_a_message_is_waited_for_only_so_long(path: Path) -> None:
    async with serving(path, idle_seconds=0.05):
        reply = await say(path, b'{"verb": "echo", ')
        assert "no request came" in reply["error"]


async def test_a_message_in_pieces_is_put_together(path: Path) -> None:
    line = encode({"verb": "echo", "params": {"a": "b"}})
    async with serving(path):
        async with await trio.open_unix_socket(path) as stream:
            for i in range(len(line)):
                await stream.send_all(line[i : i + 1])
            received = b"".join([chunk async for chunk in stream])
    assert json.loads(received) == {"ok": True, "result": {"a": "b"}}


async def test_a_client_that_hangs_up_ends_its_verb(path: Path) -> None:
    running, ended = trio.Event(), trio.Event()

    async def wait(params: dict[str, Any], send: Send) -> dict[str, Any]:
        running.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with serving(path, {"wait": wait}):
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(encode({"verb": "wait", "params": {}}))
            await running.wait()
        with trio.fail_after(60):
            await ended.wait()


async def test_a_client_that_does_not_read_its_progress_is_dropped(path: Path) -> None:
    ended = trio.Event()

    async def flood(params: dict[str, Any], send: Send) -> dict[str, Any]:
        try:
            while True:
                await send({"words": "x" * 100_000})
        finally:
            ended.set()

    async with serving(path, {"flood": flood}, idle_seconds=0.05):
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(encode({"verb": "flood", "params": {}}))
            with trio.fail_after(60):
                await ended.wait()


async def test_a_client_that_vanishes_in_its_progress_leaves_no_trace(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def flood(params: dict[str, Any], send: Send) -> dict[str, Any]:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(send, {"words": "x" * 500_000})
        return {}

    async with serving(path, {"flood": flood, "echo": echo}):
        for _ in range(20):
            async with await trio.open_unix_socket(path) as stream:
                await stream.send_all(encode({"verb": "flood", "params": {}}))
                await stream.receive_some(10)
        assert await ask(path, "echo") == {}
    assert not caplog.records


async def test_the_reply_to_stop_arrives_although_the_server_ends(path: Path) -> None:
    async with trio.open_nursery() as nursery:

        async def stop(params: dict[str, Any], send: Send) -> dict[str, Any]:
            nursery.cancel_scope.cancel()
            return {"stopped": True}

        await nursery.start(Server(path, {"stop": stop}).serve)
        answer: list[Any] = []

        async def caller() -> None:
            with trio.CancelScope(shield=True):
                answer.append(await ask(path, "stop"))

        nursery.start_soon(caller)
    assert answer == [{"stopped": True}]
    assert not path.exists()


@pytest.mark.fault("I3")
async def test_a_thousand_connections_are_answered_and_leave_nothing(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    outcomes: list[str] = []

    async def one() -> None:
        reply = await say(path, encode({"verb": "echo", "params": {}}))
        outcomes.append("served" if reply["ok"] else reply["error"])

    async with serving(path):
        async with trio.open_nursery() as nursery:
            # More than are served at once, fewer than the kernel lets wait.
            limiter = trio.CapacityLimiter(120)

            async def limited() -> None:
                async with limiter:
                    await one()

            for _ in range(1000):
                nursery.start_soon(limited)
        assert await ask(path, "echo") == {}
    assert len(outcomes) == 1000
    assert outcomes.count("served") >= MAX_CONNECTIONS
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.fault("I3", "M4")
async def test_idle_connections_beyond_the_limit_get_an_error(path: Path) -> None:
    async with serving(path):
        held = [await trio.open_unix_socket(path) for _ in range(MAX_CONNECTIONS)]
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BusyError, match="try again later"):
            await ask(path, "echo")
        for stream in held:
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert await ask(path, "echo") == {}


@pytest.mark.fault("I3", "M4")
async def test_without_a_descriptor_one_client_is_served_and_others_wait(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(path):
        first, waiting = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        taken = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
        fillers: list[int] = []
        try:
            with suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            first.connect(str(path))
            await trio.sleep(0.05)
            waiting.connect(str(path))
            await trio.sleep(0.05)
            first.sendall(encode({"verb": "echo", "params": {}}))
            await trio.sleep(0.05)
            assert decode(first.recv(1000)) == {"ok": True, "result": {}}
        finally:
            for descriptor in fillers:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "cannot accept a control connection" in caplog.text
        for client in (first, waiting):
            client.close()
        assert await ask(path, "echo") == {}


def in_a_child(uid: int, task: Callable[[], None]) -> int:
    """The exit status of ``task`` in a process of that user; a failure writes its traceback."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            task()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.fault("I3", "Security")
async def test_another_user_is_refused_by_the_file_and_by_the_server(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused_by_the_file() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            with pytest.raises(PermissionError):
                connection.connect(bytes(path))

    def refused_by_the_server() -> None:
        with pytest.raises(MonarchError, match="only the mount's user"):
            call(path, "echo", {})

    for directory in [tmp_path, *tmp_path.parents[:3]]:
        if directory != Path("/tmp"):
            directory.chmod(0o755)
    async with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        in_thread = trio.to_thread.run_sync
        assert await in_thread(in_a_child, 65534, refused_by_the_file) == 0
        path.chmod(0o666)
        assert await in_thread(in_a_child, 65534, refused_by_the_server) == 0
        assert "refused user 65534" in caplog.text
        assert await ask(path, "echo") == {}


async def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    async with serving(deep / "control.sock") as path:
        assert await ask(path, "echo", {"a": 1}) == {"a": 1}


async def test_the_socket_of_a_dead_daemon_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotMountedError, match="no daemon listens"):
        await ask(path, "echo")
    async with serving(path):
        assert await ask(path, "echo") == {}
    assert not path.exists()


async def test_a_successors_socket_is_left_alone(path: Path) -> None:
    async with serving(path):
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(path, VERBS).serve)
            nursery.cancel_scope.cancel()
        assert not path.exists()
        async with trio.open_nursery() as nursery:
            await nursery.start(Server(path, VERBS).serve)
            async with serving(path):
                pass
            nursery.cancel_scope.cancel()


async def test_a_file_in_the_sockets_place_is_not_deleted(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(TierError, match="cannot make the control socket"):
        await Server(path, VERBS).serve()
    assert path.read_text() == "mine"


async def test_a_path_without_a_daemon_is_not_mounted(tmp_path: Path) -> None:
    for path in (tmp_path / "none.sock", tmp_path / "no" / "directory.sock"):
        with pytest.raises(NotMountedError, match="`monarch status` lists"):
            await ask(path, "status")


async def test_a_daemon_that_dies_before_it_answers_is_reported(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def accept_and_die() -> None:
            connection, _ = listener.accept()
            connection.recv(10_000)
            connection.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, accept_and_die)
            with pytest.raises(NotMountedError, match="ended before it answered"):
                await ask(path, "status")


async def test_a_daemon_that_never_answers_is_given_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(MonarchError, match=r"not answered for 0\.1 seconds"):
            await ask(path, "status", timeout=0.1)


def test_a_trainer_that_imports_the_client_loads_no_heavy_module() -> None:
    code = (
        "import sys, monarch.control.client\n"
        "heavy = {'trio', 'lmdb', 'pyfuse3', 'numpy', 'pydantic', 'click'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
