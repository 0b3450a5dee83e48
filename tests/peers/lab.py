"""Several nodes of a job on this machine: one daemon for each, at addresses of the loopback, or on
hosts with a network of their own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import MonarchCommand, Mounted
from tests.equipment import hosts
from tests.equipment.hosts import Hosts
from tests.mount.observe import account, epoch, settled

# A loaded machine must not make a member look slow.
PATIENCE = "peers.patience=10"
# More than the time in which a file may change without another time of change, in seconds.
_RESTED_S = 2.5


# Each process that runs tests has addresses of its own, all of them of the loopback interface.
_NETWORK = f"127.{1 + os.getpid() // 254 % 254}.{1 + os.getpid() % 254}"


def host(number: int | str) -> str:
    """The address of a node, whose numbers are 1, 2, ..."""
    return f"{_NETWORK}.{number}"


def free_port() -> int:
    """A port at which no program listens at the address of the first node."""
    with socket.create_server((host(1), 0)) as listener:
        return int(listener.getsockname()[1])


class Lab:
    """The nodes of one job. ``members`` of them are in the list; ``mount`` starts each, with a
    ``network`` on its host there."""

    def __init__(
        self, directory: Path, source: Path, members: int, network: Hosts | None = None
    ) -> None:
        self.directory = directory
        self.source = source
        self._members = members
        self._network = network
        directory.mkdir(exist_ok=True)
        self.secret = self.write_secret("secret")
        self.nodes: dict[int, Mounted] = {}
        self._starts: dict[int, Callable[[], Mounted]] = {}
        self.commands: list[MonarchCommand] = []

    def write_secret(self, name: str) -> Path:
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        return path

    def mount(
        self, number: int, *options: str, secret: Path | None = None, tier: str = "10MiB"
    ) -> Mounted:
        own = self.directory / f"node{number}"
        own.mkdir()
        command = MonarchCommand(own, uuid.uuid4().hex, "relay")
        self.commands.append(command)
        common = [
            f"peers.members={self.address(f'[1-{self._members}]')}",
            f"peers.address={self.address(number)}",
            f"peers.secret_file={secret or self.secret}",
            PATIENCE,
            # A damaged copy is for the other nodes to find.
            "limits.scrub_bandwidth=0",
        ]
        given = ["datapath=relay", "open=open", *common, *options]

        def start() -> Mounted:
            if self._network is not None:
                # For this command alone: all others reach the daemon from everywhere.
                command.wrapper = self._network.command(number)
            try:
                return command.mount(self.source, tiers={"fast": tier}, options=given)
            finally:
                command.wrapper = ()

        self._starts[number] = start
        return self.mount_again(number)

    def mount_again(self, number: int) -> Mounted:
        """Starts a node, also after its daemon was killed, with its state and copies."""
        self.nodes[number] = self._starts[number]()
        return self.nodes[number]

    def address(self, number: int | str) -> str:
        """The address of a node, which is its name."""
        return host(number) if self._network is None else hosts.address(number)

    def read_all(self, content: Mapping[str, bytes], numbers: Sequence[int] = ()) -> None:
        """Reads all files on the nodes at the same time, each in an order of its own. The files
        have rested before: young ones would be read from the source again."""
        newest = max((self.source / name).stat().st_ctime for name in content)
        time.sleep(max(0.0, newest + _RESTED_S - time.time()))
        failed: list[BaseException] = []

        def read(number: int) -> None:
            # Not ``random``: the nodes begin at different places of one order.
            names = sorted(content)
            start = number * len(names) // 5
            try:
                epoch(self.nodes[number], content, names[start:] + names[:start])
                # The daemon finds the session of a reader, with which it counts the opens, only
                # while the thread is there.
                account(self.nodes[number])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(n,)) for n in numbers or self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def reports(self) -> dict[int, dict[str, Any]]:
        """The settled reports of the nodes that run."""
        return {n: settled(node) for n, node in self.nodes.items() if not node.killed}

    def opens_at_the_source(self, *, but: int = 0) -> int:
        """The opens of all nodes, without those of the node ``but``."""
        reports = self.reports().items()
        return sum(report["source_totals"]["opens"] for n, report in reports if n != but)

    def peers(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = account(self.nodes[number])["peers"]
        return found

    def state_of(self, number: int, other: int) -> str:
        """How node ``number`` sees node ``other``."""
        (found,) = (p for p in self.peers(number)["peers"] if p["name"] == self.address(other))
        return str(found["state"])

    def engine(self, number: int) -> int | None:
        """The process of the engine of a node; None if there is none."""
        directory = self.nodes[number].state / "peers"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                is_nginx = Path(f"/proc/{pid}/comm").read_text() == "nginx\n"
                if is_nginx and Path(os.readlink(f"/proc/{pid}/cwd")) == directory:
                    return int(pid)
            except OSError:
                continue
        return None

    def close(self) -> None:
        for command in self.commands:
            command.close()


@contextmanager
def lab(directory: Path, source: Path, members: int, network: Hosts | None = None) -> Iterator[Lab]:
    made = Lab(directory, source, members, network)
    try:
        yield made
    finally:
        made.close()
