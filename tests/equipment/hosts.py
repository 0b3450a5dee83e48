"""Several hosts on this machine: network namespaces on one bridge, with links that can be cut.

Host 1, 2, ... has the address 10.77.0.1, 10.77.0.2, ... of a network that only these hosts see.
They share the files and mounts of this machine. A namespace ends with the process that holds it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from tests.equipment.waiting import becomes_true

# setns(2).
_CLONE_NEWNET = 0x40000000


def unavailable() -> str | None:
    """Why there can be no hosts here, in words for ``pytest.skip``; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "nsenter", "unshare"):
        if shutil.which(command, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") is None:
            return f"{command} is not installed"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no network namespace: {tried.stderr.strip()}" if tried.returncode else None


def enter(namespace: Path) -> None:
    """Moves this thread, and the processes that it starts, into a network namespace. OSError."""
    fd = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))
    finally:
        os.close(fd)


def address(host: int | str) -> str:
    return f"10.77.0.{host}"


class Hosts:
    """``count`` hosts for the length of a ``with`` block. ``mbit``: the rate of each link in both
    directions, in Mbit/s; 0: no limit."""

    def __init__(self, count: int, *, mbit: int = 0) -> None:
        self._count = count
        self._mbit = mbit
        self._holders: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as failed:
            failed.callback(self.close)
            # The first one has the bridge.
            for _ in range(self._count + 1):
                self._holders.append(self._stack.enter_context(_holder()))
                self._stack.callback(self._holders[-1].kill)
            own = os.readlink("/proc/self/ns/net")
            for holder in self._holders:
                if not becomes_true(partial(_is_elsewhere, holder.pid, own)):
                    raise RuntimeError("a network namespace was not made")
            self._connect()
            failed.pop_all()
        return self

    def _connect(self) -> None:
        lines = ["link add br0 type bridge forward_delay 0", "link set br0 up"]
        for host in range(1, self._count + 1):
            pid = self._holders[host].pid
            lines += [
                f"link add p{host} type veth peer name eth0 netns {pid}",
                f"link set p{host} master br0",
                f"link set p{host} up",
            ]
        self._ip(0, *lines)
        for host in range(1, self._count + 1):
            self._ip(
                host,
                f"addr add {address(host)}/24 dev eth0",
                "link set lo up",
                "link set eth0 up",
            )
        self.limit(self._mbit)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the namespaces. A process that is left in one keeps its own until it ends."""
        self._stack.close()

    def namespace(self, host: int) -> Path:
        """The file of the network namespace of a host, for setns(2)."""
        return Path(f"/proc/{self._holders[host].pid}/ns/net")

    def command(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["nsenter", f"--net={self.namespace(host)}", *command]

    def cut(self, host: int) -> None:
        """Packets from and to a host vanish; the others see timeouts."""
        self._ip(0, f"link set p{host} nomaster")

    def heal(self, host: int) -> None:
        self._ip(0, f"link set p{host} master br0")

    def limit(self, mbit: int, *numbers: int) -> None:
        """Sets the rate of the links of some hosts, or of all, in both directions, in Mbit/s; 0: no
        limit."""
        for host in numbers or range(1, self._count + 1):
            for end, device in ((0, f"p{host}"), (host, "eth0")):
                command = ["tc", "qdisc", "del", "dev", device, "root"]
                subprocess.run(self.command(end, *command), stderr=subprocess.DEVNULL)
                if mbit:
                    limits = f"rate {mbit}mbit burst 256kb latency 50ms".split()
                    command = ["tc", "qdisc", "add", "dev", device, "root", "tbf", *limits]
                    subprocess.run(self.command(end, *command), check=True)

    def _ip(self, host: int, *lines: str) -> None:
        subprocess.run(
            self.command(host, "ip", "-batch", "-"),
            input="".join(f"{line}\n" for line in lines),
            text=True,
            check=True,
        )


def _holder() -> subprocess.Popen[bytes]:
    """A process in a new network namespace, which ends with this one."""
    return subprocess.Popen(
        ["unshare", "--net", "setpriv", "--pdeathsig", "KILL", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _is_elsewhere(pid: int, own: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != own
    except OSError:
        return False
