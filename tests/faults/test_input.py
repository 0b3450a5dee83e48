"""Wrong input: in a file, on the command line and at the control socket."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.faults import fuzzing
from tests.mount.command import assert_nothing_is_left, needs_fuse, needs_root, one_line
from tests.mount.observe import account, accounts_agree, epoch, settled, wait_until
from tests.mount.test_permissions import as_another_user

ROOT = Path(__file__).parents[2]


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    """How long a random test lasts."""
    soak = request.config.getoption("--soak")
    assert isinstance(soak, float)
    if soak > 30:
        request.node.add_marker(pytest.mark.timeout(2 * soak + 120))
    return soak or 3.0


# -- I1: configurations ----------------------------------------------------------------------------


@pytest.mark.fault("I1")
def test_no_configuration_does_more_than_load_or_be_refused(tmp_path: Path, seconds: float) -> None:
    seed = str(random.randrange(10**6)) if seconds > 10 else "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.fuzzing", str(tmp_path), str(seconds), seed],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 10


@needs_fuse
@pytest.mark.modes("auto")
@pytest.mark.fault("I1")
@pytest.mark.parametrize(
    ("content", "output"),
    [
        (b"mounts:\n  one: {source: /pfs\xe9}\n", r":2: byte 0xe9 is not UTF-8"),
        (b"a: &a [x]\n" + b"b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n" * 1, r":1: unknown key"),
        (b"mounts: {one: {source: /s, mountpoint: /m, verfy: no}}", r":1: .*did you mean 'verify'"),
        (b"", r":1: the file is empty"),
        (None, r": is a directory"),
    ],
    ids=["bytes", "aliases", "key", "empty", "directory"],
)
def test_a_mount_by_a_wrong_file_is_refused_with_its_line(
    monarch: MonarchCommand, tmp_path: Path, content: bytes | None, output: str
) -> None:
    file = tmp_path / "monarch.yaml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    done = monarch("mount", "-c", str(file), "one", check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert all(line.startswith(f"monarch: {file}:") for line in lines), lines
    assert any(re.search(output, line) for line in lines), lines
    assert_nothing_is_left(monarch)


# -- I2: command line ------------------------------------------------------------------------------


@needs_fuse
@pytest.mark.modes("auto")
@pytest.mark.fault("I2")
@pytest.mark.parametrize(
    "arguments",
    [
        ["mount"],
        ["mount", "/a"],
        ["mount", "/a", "/b", "/c"],
        ["mount", "/a", "/b", "--teir", "/t"],
        ["mount", "/a", "/b", "--tier"],
        ["mount", "-c"],
        ["mount", "-c", "file", "name", "--tier", "/t"],
        ["umount"],
        ["umount", "/a", "--lzay"],
        ["status", "--jsno"],
        ["warm"],
        ["evict"],
        ["snapshot", "biuld"],
        ["doctor", "--jsno"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_one_line_with_a_hint_and_exit_code_2(
    monarch: MonarchCommand, arguments: list[str]
) -> None:
    done = monarch(*arguments, check=False)
    line = one_line(done)
    assert done.returncode == 2, line
    assert "--help" in line or "; " in line or "(" in line, line
    assert_nothing_is_left(monarch)


@needs_fuse
@pytest.mark.modes("auto")
@pytest.mark.fault("I2")
@pytest.mark.parametrize("verb", ["umount", "status", "warm", "evict"])
def test_a_path_that_is_no_mount_is_one_line_with_a_hint(
    monarch: MonarchCommand, tmp_path: Path, verb: str
) -> None:
    done = monarch(verb, str(tmp_path), check=False)
    line = one_line(done)
    # A code of its own, so that scripts tell it from a slip on the command line.
    assert (done.returncode, "Monarch mount" in line) == (9, True), line
    assert "`monarch status` lists the mounts" in line, line


# -- I3: the control socket ------------------------------------------------------------------------


@contextmanager
def undisturbed(mounted: Mounted, sizes: dict[str, int], seconds: float) -> Iterator[None]:
    """A reader reads meanwhile; whatever it finds wrong fails the test."""
    reader = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.fuse.reading", str(mounted.path), str(seconds)),
            *("1", json.dumps(sizes)),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield
        _, output = reader.communicate(timeout=seconds + 60)
        assert reader.returncode == 0, output
    finally:
        reader.kill()
        reader.communicate()


def sockets(mounted: Mounted) -> int:
    """The number of the daemon's sockets."""
    directory, count = Path(f"/proc/{mounted.pid}/fd"), 0
    for number in os.listdir(directory):
        with suppress(FileNotFoundError):
            count += os.readlink(directory / number).startswith("socket:")
    return count


def _connects(connection: socket.socket, directory: int) -> bool:
    try:
        connection.connect(f"/proc/self/fd/{directory}/control.sock")
    except BlockingIOError:
        # Many are waiting already.
        return False
    return True


@contextmanager
def connected(mounted: Mounted) -> Iterator[socket.socket]:
    directory = os.open(mounted.state, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(100)
            wait_until(lambda: _connects(connection, directory), "it takes the connection")
            yield connection
    finally:
        os.close(directory)


@needs_fuse
@pytest.mark.modes("python", "relay")
@pytest.mark.fault("I3")
def test_no_request_disturbs_the_readers_or_the_next_request(
    monarch: MonarchCommand, tree: Tree, seconds: float
) -> None:
    sizes = {f"small/{n:04}": 30_000 + n for n in range(20)} | {"large": 6_000_000}
    tree(sizes)
    mounted = monarch.mount(monarch.directory / "source", tiers={"fast": "1GiB"})
    seed = str(random.randrange(10**6)) if seconds > 10 else "1"
    before = sockets(mounted)
    answered = 0
    with undisturbed(mounted, sizes, seconds):
        until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < until:
            number += 1
            dice = random.Random(f"{seed}:{number}")
            answered += _said(mounted, dice, f"seed {seed}:{number}")
    assert answered > 10
    assert account(mounted)["state"] == "serving"
    assert "Traceback" not in mounted.log_text
    wait_until(lambda: sockets(mounted) <= before + 40, "connections are closed")
    epoch(mounted, {name: contents(name, size) for name, size in sizes.items()})
    settled(mounted)
    accounts_agree(mounted)


def _said(mounted: Mounted, dice: random.Random, what: str) -> bool:
    """One connection: whether it got an answer, which must then be one of ours."""
    message = fuzzing.request(dice)
    with connected(mounted) as connection:
        received = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            if dice.random() < 0.2:
                connection.sendall(message[: len(message) // 2])
                time.sleep(0.01)
                message = message[len(message) // 2 :]
            connection.sendall(message)
            if dice.random() < 0.2:
                return False
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                received += piece
    for line in received.splitlines():
        reply = json.loads(line)
        assert set(reply) in ({"ok", "result"}, {"ok", "error", "hint", "exit_code"}, {"progress"})
        assert "see the log" not in reply.get("hint", ""), (what, message[:200], reply)
    return received != b""


@needs_fuse
@pytest.mark.modes("python", "relay")
@pytest.mark.fault("I3")
def test_thousands_of_connections_take_nothing_from_the_readers(
    monarch: MonarchCommand, tree: Tree
) -> None:
    sizes = {f"small/{n:04}": 30_000 + n for n in range(20)}
    tree(sizes)
    mounted = monarch.mount(monarch.directory / "source")
    before = sockets(mounted)
    with undisturbed(mounted, sizes, 3), ExitStack() as held:
        # Some say nothing and stay, more than there may be.
        for _ in range(100):
            held.enter_context(connected(mounted))
        for _ in range(2000):
            with connected(mounted) as connection, suppress(BrokenPipeError):
                connection.sendall(b'{"verb": "ping"')
    assert account(mounted)["state"] == "serving"
    wait_until(lambda: sockets(mounted) <= before + 10, "connections are closed")


@needs_fuse
@needs_root
@pytest.mark.modes("auto")
@pytest.mark.fault("I3", "Security")
def test_another_user_reaches_no_control_socket(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mounted = monarch.mount(tree({"a": 1}), options=["allow_other"])

    def knock() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("state/control.sock")

    assert as_another_user(tmp_path, {"knock": knock}) == {"knock": "EACCES"}
    # Nor where the directory was left open by mistake.
    mounted.state.chmod(0o755)
    assert as_another_user(tmp_path, {"knock": knock}) == {"knock": "EACCES"}
    # Nor where the socket is, too: then the daemon asks the kernel who it is.
    (mounted.state / "control.sock").chmod(0o666)
    monarch.expects_log("refused user 65534")

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(100)
            connection.connect("state/control.sock")
            with suppress(BrokenPipeError):
                connection.sendall(b'{"verb": "status", "params": {}}\n')
            reply = json.loads(connection.makefile().readline())
            if reply["ok"] or "only the mount's user" not in reply["error"]:
                raise AssertionError(reply)

    assert as_another_user(tmp_path, {"ask": ask}) == {"ask": "done"}
    assert account(mounted)["state"] == "serving"
