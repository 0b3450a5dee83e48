"""A process that has imported Monarch once and forks for each ``monarch`` that a test runs.

Starting Python and importing the modules of ``monarch mount`` takes most of a second of processor
time, and the tests do it thousands of times. The forked process equals a new process: its
arguments, environment, directory, umask, limits and the three standard descriptors are the
caller's. Tests of the start itself do not use it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import monarch
from monarch.posix import failpoints

_ROOT = Path(__file__).parents[2]
_LONGEST = 1 << 20
# Its value is overwritten in the memory that /proc/PID/environ shows.
_VARIABLE = "MONARCH_TEST_CASE"
_UNSET = "-" * 32
# A file that takes the place of the kernel's, with the number of the machine's start.
BOOT = "MONARCH_TEST_BOOT"
# How many written inodes stay in memory, in place of the number of the daemon.
KEPT = "MONARCH_TEST_KEPT"
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)


class ForkServer:
    """The server of this process, started when first needed; ``close`` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """``python -m monarch ARGUMENTS`` without standard input; its output as text.

        Raises subprocess.TimeoutExpired, and has killed it then.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": os.getcwd(),
            "umask": _umask(),
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        }
        with ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(ours)
            with ExitStack() as handed_over:
                handed_over.enter_context(theirs)
                pipes = [os.pipe2(os.O_CLOEXEC) for _ in ("stdout", "stderr")]
                for reading, writing in pipes:
                    stack.callback(os.close, reading)
                    handed_over.callback(os.close, writing)
                fds = [theirs.fileno(), *(writing for _, writing in pipes)]
                _send(self._connection(), request, fds)
            pid = int(ours.recv(64))
            texts = _read_all([reading for reading, _ in pipes], timeout_s, pid)
            code = int(ours.recv(64))
        if texts is None:
            raise subprocess.TimeoutExpired(["monarch", *arguments], timeout_s)
        return subprocess.CompletedProcess(["monarch", *arguments], code, *texts)

    def close(self) -> None:
        if self._server is not None:
            assert self._requests is not None
            self._requests.close()
            self._server.wait()
            self._server = None

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._requests is None:
                self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end in (self._requests, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
                with theirs:
                    self._server = subprocess.Popen(
                        [sys.executable, "-m", "tests.equipment.forkserver", str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        cwd=_ROOT,
                        env={
                            **os.environ,
                            "PYTHONPATH": str(_ROOT),
                            # Its threads would not survive the fork.
                            "OPENBLAS_NUM_THREADS": "1",
                            _VARIABLE: _UNSET,
                        },
                        stdin=subprocess.DEVNULL,
                    )
            return self._requests


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("this kernel tells no umask")


def _read_all(pipes: Iterable[int], timeout_s: float, pid: int) -> list[str] | None:
    """The output of each pipe until its end; None, and the process killed, if it lasts."""
    deadline = time.monotonic() + timeout_s
    got = {fd: bytearray() for fd in pipes}
    waiting = select.poll()
    for fd in got:
        waiting.register(fd, select.POLLIN)
    opened = set(got)
    while opened:
        ready = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return None
        for fd, _ in ready:
            data = os.read(fd, 1 << 16)
            got[fd] += data
            if not data:
                waiting.unregister(fd)
                opened.remove(fd)
    return [bytes(data).decode(errors="backslashreplace") for data in got.values()]


def all_modules() -> list[str]:
    """The modules that verbs and daemons may import: all but those for training frameworks."""
    packages = pkgutil.walk_packages(monarch.__path__, "monarch.")
    names = [module.name for module in packages]
    return [name for name in names if not name.startswith(("monarch.frameworks", "monarch.__"))]


# -- the server ------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    """Fork for each request until the other end is closed; tell each its pid and exit status."""
    for module in all_modules():
        # What cannot be imported fails in the process that needs it.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # What is here now is never collected, so its pages stay shared.
    gc.collect()
    gc.freeze()
    ended, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    callers: dict[int, socket.socket] = {}
    waiting = select.poll()
    waiting.register(requests, select.POLLIN)
    waiting.register(ended, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waiting.poll()}
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 1 << 16)
            while callers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with callers.pop(pid) as caller, contextlib.suppress(OSError):
                    caller.send(str(os.waitstatus_to_exitcode(status)).encode())
        if requests.fileno() in ready:
            request, fds = _receive(requests)
            if request is None:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (requests, *callers.values()):
                    end.close()
                for fd in (ended, wakes, fds[0]):
                    os.close(fd)
                _become(request, fds[1:])
            callers[pid] = socket.socket(fileno=fds[0])
            callers[pid].send(str(pid).encode())
            for fd in fds[1:]:
                os.close(fd)


def _become(request: dict[str, Any], output: list[int]) -> NoReturn:
    """Run the command line as a fresh process would."""
    for target, fd in zip((1, 2), output, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for limit, (soft, hard) in zip(_LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, (soft, hard))
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_in_proc(request["environment"].get(_VARIABLE, _UNSET))
    if BOOT in os.environ:
        module = importlib.import_module("monarch.writeback.journal_found")
        vars(module)["_BOOT"] = Path(os.environ[BOOT])
    if KEPT in os.environ:
        vars(importlib.import_module("monarch.namespace.overlay"))["_KEPT"] = int(os.environ[KEPT])
    # A new process would read the variable of the failpoints when it imports Monarch.
    failpoints._NAME, failpoints._TURN, failpoints._RAISES = failpoints._armed()
    sys.argv = [str(_ROOT / "monarch/__main__.py"), *request["arguments"]]
    code = 1
    try:
        code = importlib.import_module("monarch.cli.main").main()
    except BaseException:
        traceback.print_exc()
    # The interpreter's own end would touch, and so copy, each page that is shared with the server.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show_in_proc(case: str) -> None:
    """Write the variable into the environment that the kernel shows of this process."""
    assert len(case) <= len(_UNSET), "the case is longer than its place"
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        wanted = f"{_VARIABLE}={_UNSET}".encode()
        at = memory.read(end - start).index(wanted)
        memory.seek(start + at + len(_VARIABLE) + 1)
        memory.write(case.encode() + b"\0" * (len(case) < len(_UNSET)))


def _send(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    connection.sendmsg(
        [json.dumps(request).encode()],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))],
    )


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    text, fds, _, _ = socket.recv_fds(connection, _LONGEST, 3)
    return (json.loads(text) if text else None), fds


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
