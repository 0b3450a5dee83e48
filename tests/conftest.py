"""Fixtures for every test: a source tree, the command line, and a mount that is removed at the end.

A mount is made by the real ``monarch`` in a process of its own, with state, home and run-time
directories of its own. After each test nothing may be left: no mount, no process, no ``.part``
file, no warning in a daemon's log that the test did not announce.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from tests.equipment import forkserver, modes
from tests.equipment.forkserver import ForkServer
from tests.equipment.mounts import mounts
from tests.equipment.processes import is_running, waits_in
from tests.equipment.waiting import becomes_true, wait_until

# Each process that a test starts inherits these, so it can be found however it daemonised. The run
# is that of one process of pytest; several may share the tests.
_RUN_VARIABLE = "MONARCH_TEST_RUN"
_TEST_VARIABLE = "MONARCH_TEST_CASE"

_CLI_TIMEOUT_S = 100.0
# A line of the log in either format, or of text that was written past the log.
_TROUBLE = re.compile(
    r"^\S+Z (warning|error|critical) "
    r'|"level": ?"(warning|error|critical)"'
    r"|^\s*Traceback \(most recent call last\)"
)

fork_server = ForkServer()

# The ways that reads can take. Whatever the mount promises holds in each of them.
MODES: dict[str, tuple[str, ...]] = {
    "auto": (),
    **{name: tuple(options.split(",")) for name, options in modes.MODES.items()},
}


# Where an open is asked of the daemon. With no open reported, the daemon cannot distinguish a file
# that changes after it was read from one that is being read, and its readers get ESTALE
# (docs/semantics.md).
OPENS_ARE_REPORTED = ("python", "relay", "passthrough")
EVERY_MODE = (*OPENS_ARE_REPORTED, "no_open")
# For tests that are not about the reading of copies. Names, attributes, written files and files of
# the source are served by Python or by the extension; the extension does it the same in each mode.
EITHER_SIDE = ("python", "relay")

# Files listed at the end of a run with the time of their tests.
_SLOW_FILES = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--modes",
        default=",".join(EVERY_MODE),
        help=f"the ways of reading that tests of a mount go through: {', '.join(MODES)}",
    )
    parser.addoption(
        "--soak",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long tests under load and with random messages last; without it a few seconds",
    )
    parser.addoption(
        "--histories",
        type=int,
        default=200,
        metavar="COUNT",
        help="the number of histories of remounts to play",
    )
    parser.addoption(
        "--first-history",
        type=int,
        default=0,
        metavar="NUMBER",
        help="the number of the first of these histories",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that mounts runs in every mode, unless it is marked as having to do with none."""
    if "mode" not in metafunc.fixturenames:
        return
    marked = metafunc.definition.get_closest_marker("modes")
    chosen = metafunc.config.getoption("--modes").split(",")
    if marked is not None:
        chosen = [m for m in marked.args if m == "auto" or m in chosen]
    metafunc.parametrize("mode", chosen)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make rows, promises and findings words that ``-k`` knows.

    ``-k S1`` chooses the tests of a row of the table of faults, ``-k promise_3`` those of a
    promise, ``-k finding_D3`` those of a finding of an outside test.
    """
    for item in items:
        for mark in item.iter_markers("fault"):
            item.extra_keyword_matches.update(mark.args)
        for mark in item.iter_markers("promise"):
            item.extra_keyword_matches.update(f"promise_{number}" for number in mark.args)
        for mark in item.iter_markers("finding"):
            item.extra_keyword_matches.update(f"finding_{number}" for number in mark.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the test files that took most time, in seconds of one worker."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    slowest = sorted(seconds.items(), key=itemgetter(1), reverse=True)[:_SLOW_FILES]
    slow = [(file, taken) for file, taken in slowest if taken >= 30]
    if slow:
        terminalreporter.section("slowest files")
        for file, taken in slow:
            terminalreporter.write_line(f"{taken:8.0f}s {file}")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_RUN_VARIABLE] = uuid.uuid4().hex
    # A shell that starts the run in the background has it ignore SIGINT, and each program that a
    # test starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def require_root() -> None:
    """Skips the test for an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")


def require_fuse() -> None:
    """Skip the test, with the reason, where the machine cannot mount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")


def let_others_in(directory: Path) -> None:
    """Open a directory of a test, and those above it that pytest has made, to other users."""
    for path in (directory, *directory.parents):
        if path == Path(tempfile.gettempdir()):
            return
        path.chmod(path.stat().st_mode | 0o055)


def processes(variable: str, value: str) -> dict[int, str]:
    """The running processes whose environment holds ``variable=value``: pid to command line."""
    wanted, own = f"{variable}={value}".encode(), str(os.getpid())
    found = {}
    # Each test that mounts calls this function several times, so it makes no ``Path`` objects.
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == own:
            continue
        with contextlib.suppress(OSError):
            if wanted in _whole(f"/proc/{name}/environ").split(b"\0"):
                command = _whole(f"/proc/{name}/cmdline").replace(b"\0", b" ")
                found[int(name)] = command.decode(errors="replace").strip()
    return found


def _whole(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The run leaves no mount in its directories and no process that it started."""
    yield
    fork_server.close()
    ours = str(tmp_path_factory.getbasetemp().resolve())
    assert {path for path in mounts() if path.startswith(ours)} == set()
    # A pool of workers that ends with its parent may need a moment.
    becomes_true(lambda: not _strays())
    assert _strays() == {}


def _strays() -> dict[int, str]:
    everyone = processes(_RUN_VARIABLE, os.environ[_RUN_VARIABLE])
    # The process that multiprocessing keeps beside this one until it ends is no leftover.
    return {
        pid: command
        for pid, command in everyone.items()
        if "multiprocessing.resource_tracker" not in command
    }


def below(directory: Path, pattern: str) -> list[Path]:
    """As ``Path.rglob``, which fails where a daemon removes a directory while it looks."""
    return [
        path
        for top, directories, names in os.walk(directory)
        for path in (Path(top, name) for name in (*directories, *names))
        if path.match(pattern)
    ]


def trouble(line: str) -> bool:
    """Whether a line of a daemon's log reports a failure."""
    return _TROUBLE.search(line) is not None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty directory to be mounted."""
    path = tmp_path / "source"
    path.mkdir()
    return path


Tree = Callable[[Mapping[str, "bytes | int | None"]], Path]


@pytest.fixture
def tree(source: Path) -> Tree:
    """Fills ``source``: a path to its bytes, to a size (reproducible bytes), or None: a directory.

    Returns the source.
    """

    def fill(entries: Mapping[str, bytes | int | None]) -> Path:
        for name, content in entries.items():
            path = source / name
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else contents(name, content))
        return source

    return fill


# Where a source has the leases of mounts that write it.
LEASES = ".monarch-leases.part"


def names_in(source: Path) -> list[str]:
    """What is in a source's root, but for the leases of mounts that write it."""
    return sorted(name for name in os.listdir(source) if name != LEASES)


def contents(name: str, size: int) -> bytes:
    """``size`` bytes that are the same for the same name, and differ between names."""
    seed = (name + "\n").encode()
    return (seed * (size // len(seed) + 1))[:size]


def own_directory(tier: Path) -> Path:
    """Where a tier keeps the copies of the one mount that has used it."""
    (own,) = (p for p in (tier / "monarch").iterdir() if not p.name.startswith("absorbed-"))
    return own


@dataclass
class Mounted:
    """A live mount that a test made. ``path`` is the mount point."""

    cli: MonarchCommand
    path: Path
    source: Path
    state: Path
    tiers: dict[str, Path]
    pid: int = 0
    # After a SIGKILL a stage may be left in a tier until the next mount sweeps it.
    killed: bool = False

    def status(self) -> dict[str, Any]:
        """What ``monarch status --json`` says of this mount."""
        answer: Any = json.loads(self.cli("status", str(self.path), "--json").stdout)
        if isinstance(answer, list):
            assert len(answer) == 1
            answer = answer[0]
        assert isinstance(answer, dict)
        return answer

    def xattr(self, name: str, attribute: str = "user.monarch.tier") -> str:
        """An extended attribute of the entry ``name`` below the mount point."""
        return os.getxattr(self.path / name, attribute, follow_symlinks=False).decode()

    def umount(self, *options: str) -> None:
        """A clean end: returns when the mount and its daemon are gone."""
        self.cli("umount", str(self.path), *options)
        wait_until(lambda: str(self.path) not in mounts(), f"{self.path} is not mounted")
        wait_until(lambda: not is_running(self.pid), f"the daemon {self.pid} has ended")

    def kill(self) -> None:
        """SIGKILL, as when the machine runs out of memory; the dead mount stays."""
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(self.pid), f"the daemon {self.pid} has ended")

    @property
    def log_text(self) -> str:
        path = self.state / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stages(self) -> list[Path]:
        """The ``.part`` files in its tiers."""
        return [path for tier in self.tiers.values() for path in below(tier, "*.part")]


@dataclass
class MonarchCommand:
    """The real command line in a process of its own; what it mounts is unmounted after the test."""

    directory: Path
    case: str
    mode: str = "auto"
    # In front of each command, such as setpriv with its options.
    wrapper: Sequence[str] = ()
    # Whether commands are forked from a process that has imported Monarch, which is faster, but
    # takes them out of a control group or a namespace of the test.
    forked: bool = True
    # A file with the number of the machine's start, in place of the kernel's; for forked commands.
    boot: Path | None = None
    # The number of written inodes that stay in memory, if not that of the daemon; for forked ones.
    kept: int | None = None
    mounted: list[Mounted] = field(default_factory=list)
    _expected: list[str] = field(default_factory=list)
    _allowed: list[str] = field(default_factory=list)

    def __call__(
        self, *arguments: str, check: bool = True, timeout_s: float = _CLI_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run ``monarch ARGUMENTS``; with ``check`` an exit code other than 0 fails the test."""
        if self.wrapper or not self.forked:
            done = subprocess.run(
                [*self.wrapper, sys.executable, "-m", "monarch", *arguments],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=timeout_s,
            )
        else:
            done = fork_server.run(arguments, self.environment(), timeout_s)
        if check and done.returncode != 0:
            pytest.fail(
                f"monarch {' '.join(arguments)} exited with {done.returncode}:\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    def environment(self) -> dict[str, str]:
        """An environment in which Monarch sees no state but this test's."""
        own = self.directory / "home"
        own.mkdir(exist_ok=True)
        return {
            **os.environ,
            "HOME": str(own),
            "XDG_STATE_HOME": str(own / "state"),
            "XDG_CONFIG_HOME": str(own / "config"),
            "MONARCH_STATE_ROOT": str(own / "state" / "monarch"),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "NO_COLOR": "1",
            "COLUMNS": "200",
            _TEST_VARIABLE: self.case,
            **({forkserver.BOOT: str(self.boot)} if self.boot is not None else {}),
            **({forkserver.KEPT: str(self.kept)} if self.kept is not None else {}),
        }

    def mount(
        self,
        source: Path,
        mountpoint: Path | None = None,
        *,
        tiers: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        snapshot: Path | None = None,
        state: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> Mounted:
        """Mount ``source``; tiers are directories of the test, by name, with their sizes.

        ``options`` are ``key=value`` for ``-o``. A second mount with the same arguments finds
        the tiers and the state of the first.
        """
        require_fuse()
        mountpoint = mountpoint or self.directory / "mnt"
        with contextlib.suppress(FileExistsError):
            mountpoint.mkdir()
        state = state or self.directory / "state"
        sizes = {"fast": "10MiB"} if tiers is None else tiers
        directories = {name: self.directory / "tiers" / name for name in sizes}
        command = ["mount", str(source), str(mountpoint), "--state", str(state)]
        for name, size in sizes.items():
            directories[name].mkdir(parents=True, exist_ok=True)
            command += ["--tier", f"{directories[name]}:{size}"]
        if not any(option.startswith(("datapath=", "open=")) for option in options):
            options = [*options, *MODES[self.mode]]
        if options:
            command += ["-o", ",".join(options)]
        if snapshot is not None:
            command += ["--snapshot", str(snapshot)]
        before = set(processes(_TEST_VARIABLE, self.case))
        made = Mounted(self, mountpoint, source, state, directories)
        # Registered first: a mount that fails half-way is cleaned up as well.
        self.mounted.append(made)
        self(*command, *arguments)
        assert str(mountpoint) in mounts(), f"monarch mount returned, but not {mountpoint}"
        new = set(processes(_TEST_VARIABLE, self.case)) - before
        assert len(new) == 1, f"one daemon was expected to serve {mountpoint}, not {new}"
        made.pid = new.pop()
        return made

    def expects_log(self, pattern: str) -> None:
        """Allow, and demand, trouble in a daemon's log that matches the regular expression."""
        self._expected.append(pattern)

    def allows_log(self, pattern: str) -> None:
        """As ``expects_log``, for what only some runs have."""
        self._allowed.append(pattern)

    def close(self) -> None:
        """End everything, then say what should not have been there."""
        problems = [*self._end_mounts(), *self._end_processes()]
        for made in self.mounted:
            later = any(
                other.tiers == made.tiers and self.mounted.index(other) > self.mounted.index(made)
                for other in self.mounted
            )
            if not made.killed and not later:
                problems += [f"a stage was left: {path}" for path in made.stages()]
        problems += self._trouble_in_logs()
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)

    def _end_mounts(self) -> list[str]:
        problems = []
        for path in {made.path for made in self.mounted}:
            serving = [made for made in self.mounted if made.path == path and is_running(made.pid)]
            if serving and not self._end(serving, path):
                problems.append(f"the mount at {path} did not end on request")
            while str(path) in mounts():
                for made in serving:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(made.pid, signal.SIGKILL)
                subprocess.run(["umount", "-l", str(path)], check=True)
        return problems

    def _end(self, serving: Sequence[Mounted], path: Path) -> bool:
        """By SIGTERM, a clean end like that of ``monarch umount``, which would cost a process."""
        for made in serving:
            with contextlib.suppress(ProcessLookupError):
                os.kill(made.pid, signal.SIGTERM)
        return becomes_true(lambda: str(path) not in mounts())

    def _end_processes(self) -> list[str]:
        becomes_true(lambda: not processes(_TEST_VARIABLE, self.case))
        left = processes(_TEST_VARIABLE, self.case)
        where = {pid: waits_in(pid) for pid in left}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"process {pid} was left: {what} {where[pid]}" for pid, what in left.items()]

    def _trouble_in_logs(self) -> list[str]:
        problems = []
        missing = list(self._expected)
        for path in sorted({made.state / "daemon.log" for made in self.mounted}):
            if not path.exists():
                continue
            for line in path.read_text(errors="replace").splitlines():
                matching = [pattern for pattern in self._expected if re.search(pattern, line)]
                missing = [pattern for pattern in missing if pattern not in matching]
                matching += [pattern for pattern in self._allowed if re.search(pattern, line)]
                if not matching and trouble(line):
                    problems.append(f"{path.name}: {line}")
        problems += [f"nothing in the daemon's log matches {pattern!r}" for pattern in missing]
        return problems


@pytest.fixture
def monarch(tmp_path: Path, mode: str) -> Iterator[MonarchCommand]:
    """The command line, isolated from every other test and from the machine's own mounts.

    Its mounts read as ``mode`` says.
    """
    command = MonarchCommand(tmp_path, uuid.uuid4().hex, mode)
    yield command
    command.close()
