"""A real Slurm with several nodes on this machine, each with a network and local disk of its own.

The nodes n1, n2, ... are hosts of ``hosts.py``; one more host has the controller. All daemons run
in one namespace of processes and mounts, which ends with its first process, so nothing is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from tests.equipment import accounting, hosts
from tests.equipment.accounting import Accounting
from tests.equipment.hosts import Hosts, address
from tests.equipment.mounts import mount_table
from tests.equipment.processes import is_running
from tests.equipment.waiting import becomes_true

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", *accounting.PROGRAMS)
_CONTROLLER = "ctl"
_START_S = 120.0
# How long a credential of a job is good, in seconds. A requeued job waits so long before it starts
# again: a node that knows a credential of the first run may refuse the second one.
_CREDENTIAL_S = 30
# The state of a socket in /proc/net/tcp.
_LISTENS = "0A"

_MACHINE = """\
set -e
mount --bind "$0/hosts" /etc/hosts
mount --bind "$0/fuse" /dev/fuse
mount -t tmpfs shm /dev/shm
hostname ctl
echo ready
# This shell is the first process of the namespace and waits for all orphans.
sleep infinity & wait
"""
_NODE = """\
set -e
hostname "$1"
mount --bind "$0/disk.$1" "$0/disk"
exec slurmd -D -N "$1"
"""


def unavailable() -> str | None:
    """Why there can be no Slurm here, in words for ``pytest.skip``; None if there can."""
    if reason := hosts.unavailable():
        return reason
    for command in _PROGRAMS:
        if shutil.which(command, path=_path()) is None:
            return f"{command} is not installed"
    return None


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"


class SlurmLab:
    """Slurm with ``count`` nodes for the length of a ``with`` block. All nodes see the files of
    this machine; ``disk`` is another directory on each node. The test writes ``prolog`` and
    ``epilog`` before."""

    def __init__(self, count: int, environment: Mapping[str, str]) -> None:
        self.nodes = [f"n{number}" for number in range(1, count + 1)]
        # The names of sockets are limited to 108 bytes, and ordinary users need a way to it.
        self.directory = Path(tempfile.mkdtemp(prefix="monarch-slurm-"))
        self.directory.chmod(0o755)
        self.disk = self.directory / "disk"
        # A directory of the disk that ordinary users may write.
        self.scratch = self.disk / "scratch"
        self._accounting = Accounting(self.directory, _CONTROLLER)
        self.prolog, self.epilog = self.directory / "prolog", self.directory / "epilog"
        self._environment = {
            **environment,
            "PATH": _path(),
            "SLURM_CONF": str(self.directory / "slurm.conf"),
        }
        self._stack = ExitStack()
        self._machine = 0
        # The process of slurmd of each node.
        self._slurmd: dict[str, int] = {}

    def __enter__(self) -> SlurmLab:
        with ExitStack() as failed:
            failed.callback(self.close)
            self._prepare()
            self._hosts = self._stack.enter_context(Hosts(len(self.nodes) + 1))
            self._begin()
            failed.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        becomes_true(lambda: not self._machine or not is_running(self._machine))
        shutil.rmtree(self.directory, ignore_errors=True)

    def disk_of(self, node: str) -> Path:
        """Where this machine sees the disk of a node."""
        return self.directory / f"disk.{node}"

    def run(self, *command: str, node: str = _CONTROLLER) -> subprocess.CompletedProcess[str]:
        """A command on a node, as its root."""
        return subprocess.run(
            self._on(node, command),
            env=self._environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def ask(self, *command: str, node: str = _CONTROLLER) -> str:
        """What a command says that must succeed."""
        done = self.run(*command, node=node)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout.strip()

    def is_settled(self, *states: str) -> bool:
        """Whether each node is in one of the states, as ``sinfo`` shows them."""
        return set(self.ask("sinfo", "-h", "-N", "-o", "%T").split()) <= set(states)

    def mounts(self, node: str) -> list[str]:
        """The mount points of Monarch on a node."""
        # The nodes see the mounts that this machine had before, too.
        own = f"{self.directory}/"
        table = mount_table(self._slurmd[node])
        return [m.path for m in table if m.kind == "fuse.monarch" and m.path.startswith(own)]

    def ports(self, node: str) -> set[int]:
        """The TCP ports at which programs listen on a node."""
        lines = Path(f"/proc/{self._slurmd[node]}/net/tcp").read_text().splitlines()[1:]
        fields = [line.split() for line in lines]
        return {int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == _LISTENS}

    def processes(self, node: str) -> dict[int, str]:
        """The processes on a node and their command lines."""
        own, found = _network(self._slurmd[node]), {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if own and _network(pid) == own:
                with suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
        return found

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"{path}:\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.directory.glob("**/*.log"))
        )

    def _prepare(self) -> None:
        addresses = [f"{address(number)} {name}" for number, name in self._hosts_by_number()]
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(addresses) + "\n")
        (self.directory / "slurm.conf").write_text(self._configuration())
        # This machine's may be closed to ordinary users.
        os.mknod(self.directory / "fuse", 0o020666, os.makedev(10, 229))
        (self.directory / "fuse").chmod(0o666)
        self._accounting.prepare()
        munge = self.directory / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        for name in ["disk", "state", *(self.disk_of(node).name for node in self.nodes)]:
            (self.directory / name).mkdir(mode=0o755)
        for node in self.nodes:
            scratch = self.disk_of(node) / self.scratch.name
            scratch.mkdir()
            scratch.chmod(0o1777)
        for script in (self.prolog, self.epilog):
            script.chmod(0o755)

    def _hosts_by_number(self) -> list[tuple[int, str]]:
        return list(enumerate([*self.nodes, _CONTROLLER], start=1))

    def _configuration(self) -> str:
        where = self.directory
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address(number)} CPUs=8 RealMemory=2000"
            for number, name in self._hosts_by_number()[:-1]
        )
        return f"""\
ClusterName=lab
SlurmctldHost={_CONTROLLER}({address(len(self.nodes) + 1)})
AuthInfo=socket={where}/munge/socket,cred_expire={_CREDENTIAL_S}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/spool.%n
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/slurmd.%n.pid
SlurmctldLogFile={where}/slurmctld.log
SlurmdLogFile={where}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
Prolog={self.prolog}
Epilog={self.epilog}
PrologFlags=Alloc
SlurmdTimeout=120
KillWait=20
MinJobAge=300
SlurmdParameters=config_overrides
{self._accounting.settings()}\
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

    def _begin(self) -> None:
        own = self._started(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
            + ["--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child"]
            + ["bash", "-c", _MACHINE, str(self.directory)],
            stdout=subprocess.PIPE,
        )
        assert own.stdout is not None
        if own.stdout.readline() != b"ready\n":
            raise RuntimeError("the namespace of Slurm was not made")
        self._machine = _child(own.pid)
        self._started(self._within(*self._accounting.database()))
        munge = self.directory / "munge"
        self._started(
            self._within("munged", "--force", "--foreground", f"--key-file={munge}/key")
            + [f"--socket={munge}/socket", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"]
            + [f"--log-file={munge}/munge.log"]
        )
        if not becomes_true((munge / "socket").exists, timeout_s=_START_S):
            raise RuntimeError(f"munged does not start\n{self.logs()}")
        if not becomes_true(self._accounting.is_ready, timeout_s=_START_S):
            raise RuntimeError(f"the database does not start\n{self.logs()}")
        environment = [f"{name}={value}" for name, value in self._accounting.environment().items()]
        self._started(self._on(_CONTROLLER, ["env", *environment, "slurmdbd", "-D"]))

        def is_accounting() -> bool:
            return self.run("sacctmgr", "--noheader", "show", "cluster").returncode == 0

        # The controller ends if it finds no accounting at its start.
        if not becomes_true(is_accounting, timeout_s=_START_S, step_s=0.05):
            raise RuntimeError(f"slurmdbd does not start\n{self.logs()}")
        self._started(self._on(_CONTROLLER, ["slurmctld", "-D", "-c"]))
        for node in self.nodes:
            unshare = ["unshare", "--mount", "--propagation", "private", "--uts"]
            shell = ["bash", "-c", _NODE, str(self.directory), node]
            started = self._started(self._at(node, [*unshare, *shell]))
            if not becomes_true(partial(_has_child, started.pid, "slurmd")):
                raise RuntimeError(f"slurmd of {node} does not start\n{self.logs()}")
            self._slurmd[node] = _child(started.pid)

        def is_up() -> bool:
            found = self.run("sinfo", "-h", "-N", "-o", "%T")
            return found.stdout.split() == ["idle"] * len(self.nodes)

        if not becomes_true(is_up, timeout_s=_START_S, step_s=0.1):
            raise RuntimeError(f"the nodes of Slurm are not idle\n{self.logs()}")

    def _started(
        self, command: Sequence[str], stdout: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        process = self._stack.enter_context(
            subprocess.Popen(
                command,
                env=self._environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
            )
        )
        self._stack.callback(process.kill)
        return process

    def _within(self, *command: str) -> list[str]:
        names = ("--mount", "--pid", "--uts", "--ipc")
        return ["nsenter", f"--target={self._machine}", *names, *command]

    def _at(self, node: str, command: Sequence[str]) -> list[str]:
        """In the network of a node, with the files of the controller."""
        number = {name: number for number, name in self._hosts_by_number()}[node]
        return self._hosts.command(number, *self._within(*command))

    def _on(self, node: str, command: Sequence[str]) -> list[str]:
        if node == _CONTROLLER:
            return self._at(node, command)
        names = ("--mount", "--net", "--pid", "--uts", "--ipc")
        return ["nsenter", f"--target={self._slurmd[node]}", *names, *command]


def _child(pid: int) -> int:
    """The only child of a process; 0 while there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return int(children[0]) if len(children) == 1 else 0


def _has_child(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{_child(pid)}/comm").read_text() == f"{name}\n"
    except OSError:
        return False


def _network(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""
