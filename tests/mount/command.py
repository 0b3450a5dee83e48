"""Helpers for tests of the command line: one clear line, nothing left behind, another user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, below, mounts, processes
from tests.equipment.mounts import mount_table
from tests.equipment.waiting import wait_until

needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse cannot be opened"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

_ROOT = Path(__file__).parents[2]
_UID = 65534


def bytecode_cache() -> dict[str, str]:
    """Where compiled modules lie, for an environment that is made anew: an ordinary user cannot
    write there, and would compile each module in each command."""
    name = "PYTHONPYCACHEPREFIX"
    return {name: os.environ[name]} if name in os.environ else {}


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line that a command wrote to stderr, without ``monarch: ``; stdout is empty."""
    assert done.stdout == ""
    assert done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("monarch: "), done.stderr
    return done.stderr.removeprefix("monarch: ").rstrip("\n")


def not_mounted(
    monarch: MonarchCommand, mountpoint: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a ``monarch mount`` that has to fail; if it mounts, the test fails and cleans up."""
    before = mounts()
    done = monarch(*arguments, check=False)
    if str(mountpoint) in mounts() - before:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)
        pytest.fail(f"it was mounted: {' '.join(arguments)}")
    return done


def start(
    monarch: MonarchCommand, *arguments: str, ignored: Sequence[signal.Signals] = ()
) -> subprocess.Popen[str]:
    """``monarch ARGUMENTS`` beside the test, with its stderr as a pipe.

    ``ignored``: signals that it inherits as ignored, SIGHUP as by ``nohup``, SIGINT as by ``&``.
    """

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, "-m", "monarch", *arguments],
        env=monarch.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore,
    )


def registered(
    monarch: MonarchCommand,
    mountpoint: Path,
    source: Path,
    state: Path,
    tiers: Mapping[str, Path] | None = None,
) -> Mounted:
    """A mount that the test makes itself; the fixture checks and removes it."""
    made = Mounted(monarch, mountpoint, source, state, dict(tiers or {}))
    monarch.mounted.append(made)
    return made


def stages(directory: Path) -> list[Path]:
    return below(directory, "*.part")


def locked(directory: Path) -> list[Path]:
    """The lock files below ``directory`` that a process holds."""
    held = []
    for path in directory.rglob("lock"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path)
    return held


def assert_nothing_is_left(monarch: MonarchCommand, *kept: Mounted) -> None:
    """No mount, process, lock, stage or record of this test, but those of ``kept``."""
    directory = monarch.directory
    monarchs = {m.path for m in mount_table() if m.kind == "fuse.monarch"}
    assert {m for m in monarchs if m.startswith(f"{directory}/")} == {
        str(made.path) for made in kept
    }
    wait_until(
        lambda: set(processes("MONARCH_TEST_CASE", monarch.case)) == {made.pid for made in kept},
        f"processes are left: {processes('MONARCH_TEST_CASE', monarch.case)}",
    )
    if not kept:
        # A process of the fork server may hold a descriptor of a lock until it has started.
        wait_until(lambda: locked(directory) == [], f"locks are left: {locked(directory)}")
        assert list((directory / "home" / "state" / "monarch").glob("mounts/*")) == []
    assert stages(directory) == []


@dataclass(frozen=True, slots=True)
class OrdinaryUser:
    """An ordinary user with a directory and a mount namespace of its own.

    There ``/dev/fuse`` has the given mode and ``/etc/fuse.conf`` is empty, whatever this machine's
    are.
    """

    directory: Path
    namespace: int
    python: str
    case: str

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``monarch ARGUMENTS`` as this user."""
        return self.run(self.python, "-m", "monarch", *arguments)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(command),
            env=self._environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A process with pipes as its input and output."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command(command),
            env=self._environment(),
            cwd="/",
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def _command(self, command: Sequence[str]) -> list[str]:
        return [
            *("nsenter", f"--mount=/proc/{self.namespace}/ns/mnt", "setpriv"),
            *(f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups", *command),
        ]

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory / "home"),
            "XDG_STATE_HOME": str(self.directory / "home/state"),
            "PYTHONPATH": f"{_ROOT}:{sysconfig.get_paths()['purelib']}",
            "NO_COLOR": "1",
            "MONARCH_TEST_CASE": self.case,
            **bytecode_cache(),
        }

    def mounts(self) -> dict[str, str]:
        """Mount points and types as this user sees them."""
        return {mounted.path: mounted.kind for mounted in mount_table(self.namespace)}

    def mkdir(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir(mode=0o700)
        os.chown(path, _UID, _UID)
        return path

    def daemons(self) -> dict[int, str]:
        return processes("MONARCH_TEST_CASE", self.case)


@contextlib.contextmanager
def ordinary_user(case: str, *, device_mode: int = 0o666) -> Iterator[OrdinaryUser]:
    """The ordinary user; skips where there cannot be one."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    # Not below tmp_path: its parents are the owner's alone.
    directory = Path(tempfile.mkdtemp(prefix="monarch-nobody-"))
    directory.chmod(0o755)
    holder = None
    try:
        device = directory / "fuse"
        os.mknod(device, 0o020000, os.makedev(10, 229))
        device.chmod(device_mode)
        (directory / "fuse.conf").touch()
        holder = subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
                'mount --bind "$0/fuse" /dev/fuse && mount --bind "$0/fuse.conf" /etc/fuse.conf'
                " && echo ready && exec sleep infinity",
                str(directory),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip("a mount namespace cannot be made here")
        user = OrdinaryUser(directory, holder.pid, python_for_others(), case)
        user.mkdir("home")
        yield user
        wait_until(lambda: not user.daemons(), f"processes are left: {user.daemons()}")
    finally:
        for pid in processes("MONARCH_TEST_CASE", case):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if holder is not None:
            holder.kill()
            holder.communicate()
        shutil.rmtree(directory)


def python_for_others() -> str:
    """An interpreter of this version that an ordinary user may run, with our packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        tried = subprocess.run(
            [
                *("setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups"),
                # By a shell: setpriv still has the right to find what the user may not.
                *("sh", "-c", 'exec "$0" -c "import pyfuse3, trio, click, monarch"', candidate),
            ],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{_ROOT}:{sysconfig.get_paths()['purelib']}",
                **bytecode_cache(),
            },
            cwd="/",
            capture_output=True,
        )
        if tried.returncode == 0:
            return candidate
    pytest.skip("no interpreter with Monarch's packages that an ordinary user may run")
