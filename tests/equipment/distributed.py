"""A real distributed file system as a source: GlusterFS bricks on this machine and one client.

There is no management daemon: each brick is a server process that a test may stop, continue, kill
and start again, and the client is a FUSE mount like that of any compute node. With one brick a
dead server is ENOTCONN. With two, names are spread over both, and the client answers ENOENT for
names of a dead server, although they exist.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

_WAIT_S = 60.0

# The client of another host must see what is new at once, so times of the brick's own disk count.
_BRICK = """\
volume posix
    type storage/posix
    option directory {directory}
    option ctime off
end-volume
volume locks
    type features/locks
    subvolumes posix
end-volume
volume threads
    type performance/io-threads
    subvolumes locks
end-volume
volume server
    type protocol/server
    option transport-type tcp
    option transport.socket.listen-port {port}
    option transport.socket.bind-address 127.0.0.1
    option auth.addr.threads.allow *
    subvolumes threads
end-volume
"""
_CONNECTION = """\
volume client{number}
    type protocol/client
    option transport-type tcp
    option remote-host 127.0.0.1
    option remote-port {port}
    option remote-subvolume threads
    option ping-timeout {patience_s}
end-volume
"""
# On a disk that is nearly full it would put all names on the first server.
_SPREAD = """\
volume spread
    type cluster/distribute
    option min-free-disk 1%
    subvolumes {all}
end-volume
"""


def unavailable() -> str | None:
    """Why there can be no such file system here, in words for ``pytest.skip``; None if it can."""
    if os.geteuid() != 0:
        return "GlusterFS needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    for command in ("glusterfsd", "glusterfs"):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    return None


class DistributedSource:
    """A file system of ``bricks`` servers, mounted at ``mountpoint``, for a ``with`` block.

    The client gives up on a server that does not answer after ``patience_s``.
    """

    def __init__(
        self, directory: Path, mountpoint: Path, *, bricks: int = 1, patience_s: int = 42
    ) -> None:
        self.path = mountpoint
        self._directory = directory
        self._patience_s = patience_s
        self._ports = _free_ports(bricks)
        self._servers: list[subprocess.Popen[bytes]] = []
        self._client: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DistributedSource:
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(len(self._ports)):
                (self._directory / f"brick{number}").mkdir(parents=True)
                self._servers.append(self._server(number))
            # A client that finds no server tries again only after seconds.
            for port in self._ports:
                _wait_for(port)
            self._client = self._mounted()
            self._wait_until_written()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def stop(self, brick: int = 0) -> None:
        """The server answers nothing any more, as one that is overloaded or cut off."""
        server = self._servers[brick]
        server.send_signal(signal.SIGSTOP)
        # Until then its other threads continue.
        os.waitpid(server.pid, os.WUNTRACED)

    def go_on(self, brick: int = 0) -> None:
        self._servers[brick].send_signal(signal.SIGCONT)

    def kill(self, brick: int = 0) -> None:
        self._servers[brick].kill()
        self._servers[brick].wait()

    def start(self, brick: int = 0) -> None:
        """The server of the same disk again; its clients find it within seconds."""
        self._servers[brick] = self._server(brick)

    def names_on(self, brick: int) -> list[str]:
        """The files whose bytes are with that server."""
        root = self._directory / f"brick{brick}"
        return sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file() and ".glusterfs" not in path.parts and path.stat().st_size
        )

    def close(self) -> None:
        """Unmount and end all processes, whatever state they are in."""
        if os.path.ismount(self.path) or self._client is not None:
            subprocess.run(["umount", "-l", str(self.path)], capture_output=True)
        processes = [*([self._client] if self._client else []), *self._servers]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self._client = None
        self._servers.clear()

    def _server(self, number: int) -> subprocess.Popen[bytes]:
        volume = self._directory / f"brick{number}.vol"
        directory = self._directory / f"brick{number}"
        volume.write_text(_BRICK.format(directory=directory, port=self._ports[number]))
        return self._run("glusterfsd", f"brick{number}", volume)

    def _mounted(self) -> subprocess.Popen[bytes]:
        volume = self._directory / "client.vol"
        parts = [
            _CONNECTION.format(number=number, port=port, patience_s=self._patience_s)
            for number, port in enumerate(self._ports)
        ]
        if len(self._ports) > 1:
            clients = " ".join(f"client{number}" for number in range(len(self._ports)))
            parts.append(_SPREAD.format(all=clients))
        volume.write_text("".join(parts))
        coherent = ["--auto-invalidation=on", "--fopen-keep-cache=off"]
        return self._run("glusterfs", "client", volume, *coherent, str(self.path))

    def _run(self, program: str, name: str, volume: Path, *more: str) -> subprocess.Popen[bytes]:
        log, pid = self._directory / f"{name}.log", self._directory / f"{name}.pid"
        command = [program, "--no-daemon", "-f", str(volume), "-l", str(log), "-p", str(pid)]
        return subprocess.Popen([*command, *more], stdin=subprocess.DEVNULL)

    def _wait_until_written(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while True:
            if os.path.ismount(self.path):
                with contextlib.suppress(OSError):
                    # A directory is made on all of them.
                    (self.path / "ready").mkdir()
                    (self.path / "ready").rmdir()
                    return
            if time.monotonic() > deadline:
                log = (self._directory / "client.log").read_text()[-2000:]
                raise TimeoutError(f"GlusterFS is not mounted after {_WAIT_S:.0f} s:\n{log}")
            time.sleep(0.05)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _free_ports(count: int) -> list[int]:
    """None of those that the kernel gives to clients: a client that looks for a server that is dead
    could be given its port, and find itself there."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
                found.append(int(one.getsockname()[1]))
        return found
