"""Runs a command again and again, each time with the plan of one measured run."""

from __future__ import annotations

import glob
import math
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from monarch.analysis.plan import (
    PHASE_VARIABLE,
    VARIABLE,
    Phase,
    Plan,
    ProcessId,
    RunReport,
    decode_report,
    encode,
)
from monarch.analysis.stalls import Run, last_rounds, trouble_in
from monarch.cli.output import remark
from monarch.control.registry import process_started, process_stat
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.posix.bounded_calls import BoundedCalls
from monarch.posix.mounts import MONARCH_TYPE, is_dead, mount_table
from monarch.posix.processes import process_space
from monarch.posix.signals import Interruption, interruptible_where_heeded
from monarch.posix.unfinished import is_locked, remove_if_left
from monarch.text import escape_text
from monarch.types import Progress

# The interval in which it is checked whether the mount has ended.
_LOOK_MOUNT_S = 1.0
# How long the processes of a run may take to end: after the report, and after each signal.
_GRACE_S = 5.0
_LOOK_S = 0.02
# After so long without a call of monarch.watch it is said what is waited for.
_UNSEEN_S = 60.0
# Lines of the output of a command that has failed, the characters at the end of each, and the bytes
# at the end of all that are kept: as many as a pipe has.
_SHOWN, _WIDEST, _KEPT = 15, 1000, 1 << 16
# How a directory is opened.
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Characters of a command in a message.
_LONGEST = 80
_UNSEEN = (
    f"its environment lacks {VARIABLE}, which env -i, sudo, ssh and sbatch --export=NONE remove"
)

# Measures one run: its phase, the share of the files that the tiers may serve, and the number of
# cores that it may use, None: all.
Measure: TypeAlias = Callable[[Phase, float, int | None], RunReport]


class JobRuns:
    """The runs of ``command``, which reads ``mountpoint``: each measures ``iterations`` batches
    after ``warmup`` others, or up to ``most_iterations`` if its windows differ, and the source
    gives at most ``source_limit`` bytes/s, 0: no limit."""

    def __init__(
        self,
        command: Sequence[str],
        mountpoint: str,
        iterations: int,
        warmup: int,
        source_limit: int,
        most_iterations: int = 0,
    ) -> None:
        self._command = list(command)
        shown = escape_text(shlex.join(command))
        self._shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
        self._mountpoint = mountpoint
        self._iterations = iterations
        self._most_iterations = most_iterations
        self._warmup = warmup
        self._source_limit = source_limit
        self._is_explained = False
        self._is_mounted = self._is_in_table()
        self._calls = BoundedCalls("mount", wait_s=_LOOK_MOUNT_S)
        own = os.getpid()
        self._analysis = ProcessId(own, process_started(own) or 0, process_space())

    def all(
        self,
        phases: Sequence[tuple[Phase, float]],
        rounds: int,
        most_rounds: int,
        advance: Progress,
    ) -> list[Run]:
        """All phases in each round, alternately in this order and the other, after a run that is
        not measured. While the last ``rounds`` of them have a rate that cannot be used, another one
        follows, up to ``most_rounds``. Raises MonarchError if a run was not measured."""
        runs: list[Run] = []
        advance(0, 1 + rounds * len(phases), "runs: files get copies")
        with self.begun() as measure:
            for number in range(max(rounds, most_rounds)):
                trouble = trouble_in(last_rounds(runs, rounds)) if number >= rounds else ""
                if number >= rounds and not trouble:
                    break
                total = 1 + max(rounds, number + 1) * len(phases)
                why = f" ({trouble})" if trouble else ""
                for phase, share in phases if number % 2 == 0 else reversed(phases):
                    of = "" if phase == "synthetic" else f", {share:.0%} from the tiers"
                    advance(1 + len(runs), total, f"runs: {phase}{of}{why}")
                    runs.append(Run(phase, share, number, measure(phase, share, None)))
        advance(1 + len(runs), 1 + len(runs), "runs: all measured")
        return runs

    @contextmanager
    def begun(self) -> Iterator[Measure]:
        """Runs the command once, so that its files get copies, and yields a function that measures
        one run of it. For one use."""
        with (
            interruptible_where_heeded() as interruption,
            _own_directory() as directory,
            closing(self._calls),
        ):
            measure = partial(self._measure, interruption, directory)
            measure("fill", 1.0, None)
            yield measure

    def _measure(
        self,
        interruption: Interruption,
        directory: Path,
        phase: Phase,
        share: float,
        cores: int | None,
    ) -> RunReport:
        plan = Plan(
            phase=phase,
            mountpoint=self._mountpoint,
            report=os.fspath(directory / "report"),
            share=share,
            source_limit=self._source_limit,
            iterations=self._iterations,
            most_iterations=self._most_iterations,
            warmup=self._warmup,
            analysis=self._analysis,
        )
        report, seen = Path(plan.report), Path(plan.seen)
        report.unlink(missing_ok=True)
        seen.unlink(missing_ok=True)
        environment = {**os.environ, VARIABLE: encode(plan), PHASE_VARIABLE: phase}
        with closing(_Output()) as output:
            code = self._run(interruption, environment, plan, output, cores)
            output.take(0.0)
        if not report.exists():
            self._require_mount()
            for line in output.last_lines():
                remark(f"  | {line}")
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            hint = "its loop must be over monarch.watch(loader), "
            hint += (
                f"and must not end before {self._warmup + self._iterations} batches (--warmup,"
                " --iters)"
                if seen.exists()
                else f"which no process of it has called; perhaps {_UNSEEN}, or it ended before"
                " its job began, as sbatch does"
            )
            raise MonarchError(
                f"`{self._shown}` ended ({how}) before it was measured, in the run {phase!r}",
                hint=hint,
            )
        try:
            found = decode_report(report.read_text())
            if not found.is_possible():
                raise ValueError("it has a number out of its range")
            return found
        except ValueError as error:
            raise MonarchError(
                f"the run {phase!r} of `{self._shown}` left a report that cannot be read: {error}",
                hint="let it import the same version of monarch",
            ) from error

    def _run(
        self,
        interruption: Interruption,
        environment: dict[str, str],
        plan: Plan,
        output: _Output,
        cores: int | None,
    ) -> int:
        """Runs the command in a session of its own: the limits of a run are those of its session.
        Its processes end with it, also at an ending signal."""
        try:
            with _on_cores(cores):
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output.writing,
                    stderr=output.writing,
                    start_new_session=True,
                )
        except OSError as error:
            name = escape_text(self._command[0])
            raise UsageError(f"{name} cannot be run: {error.strerror}") from error
        output.begin()
        try:
            with interruption.heeded():
                self._wait(process.pid, plan, output)
        finally:
            _end(process, output)
            # Not before, or another session may have its number.
            process.poll()
        return process.wait()

    def _wait(self, pid: int, plan: Plan, output: _Output) -> None:
        """Waits until the command ends, but not long after its report: what it does then, such as
        to wait for a thread, may have no end. Raises NotMountedError if the mount ends."""
        begun_s = time.monotonic()
        look_s, until_s = begun_s + _LOOK_MOUNT_S, math.inf
        while not _has_ended(pid) and time.monotonic() < until_s:
            output.take(_LOOK_S)
            if time.monotonic() >= look_s:
                # A job may wait for ever for what it has not read.
                self._require_mount()
                look_s = time.monotonic() + _LOOK_MOUNT_S
                if until_s == math.inf and Path(plan.report).exists():
                    until_s = time.monotonic() + _GRACE_S
                if time.monotonic() - begun_s >= _UNSEEN_S and not Path(plan.seen).exists():
                    self._explain()

    def _explain(self) -> None:
        """Says once why nothing is measured, since the command may take long to end."""
        if not self._is_explained:
            remark(
                f"monarch: no process of `{self._shown}` has called monarch.watch(loader) in"
                f" {_UNSEEN_S:.0f} s. It is waited for until it ends; Ctrl-C ends it. Either its"
                f" loop has not begun, or {_UNSEEN}"
            )
        self._is_explained = True

    def _is_in_table(self) -> bool:
        return any(
            each.kind == MONARCH_TYPE and os.fspath(each.mount_point) == self._mountpoint
            for each in mount_table()
        )

    def _require_mount(self) -> None:
        """Raises NotMountedError if the mount has ended since the command began."""
        if not self._is_mounted:
            return
        if not self._is_in_table() or is_dead(self._mountpoint, calls=self._calls):
            raise NotMountedError(
                f"the mount {escape_text(self._mountpoint)} has ended while the job was measured"
            )


class _Output:
    """The output of a command: a pipe, of which the end is kept. A process that still writes when
    it is closed gets SIGPIPE, so a daemon that the command has left takes no room."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC)
        self._kept = b""
        self._written = select.poll()
        self._written.register(self._reading, select.POLLIN)

    def begin(self) -> None:
        """Called when the command has the end for writing."""
        os.close(self.writing)
        self.writing = -1

    def take(self, wait_s: float) -> None:
        """Takes what is in the pipe, as soon as there is something, or waits so long in vain."""
        if self._written.poll(1000 * wait_s):
            if taken := os.read(self._reading, _KEPT):
                self._kept = (self._kept + taken)[-_KEPT:]
            else:
                # All writers have closed it.
                time.sleep(wait_s)

    def last_lines(self) -> list[str]:
        lines = self._kept.decode(errors="replace").splitlines()
        return [escape_text(line.rstrip()[-_WIDEST:]) for line in lines[-_SHOWN:]]

    def close(self) -> None:
        os.close(self._reading)
        if self.writing >= 0:
            os.close(self.writing)


@contextmanager
def _own_directory() -> Iterator[Path]:
    """A directory for the reports of the command, which is removed at the end. Those of commands
    that were killed on this node are removed before."""
    prefix = f"monarch-analyze-{socket.gethostname()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*"):
        remove_if_left(left, _OPEN, shutil.rmtree)
    lock = None
    while lock is None:
        directory = Path(tempfile.mkdtemp(prefix=prefix))
        lock = _locked(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _locked(directory: Path) -> int | None:
    """A descriptor with a lock on a new directory; None if another command has removed it."""
    with suppress(FileNotFoundError):
        fd = os.open(directory, _OPEN)
        if is_locked(directory, fd):
            return fd
        os.close(fd)
    return None


@contextmanager
def _on_cores(count: int | None) -> Iterator[None]:
    """A process that this thread starts meanwhile, and all processes that this one starts, run on
    ``count`` of the cores of this process; None: on all of them."""
    usable = os.sched_getaffinity(0)
    if count is not None:
        os.sched_setaffinity(0, sorted(usable)[:count])
    try:
        yield
    finally:
        if count is not None:
            os.sched_setaffinity(0, usable)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended. It stays a zombie, so its number belongs to no other process, nor
    to a session of another one."""
    # Without a zombie where SIGCHLD is ignored.
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def _end(process: subprocess.Popen[bytes], output: _Output) -> None:
    """Ends all processes of the session that the command has begun."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _GRACE_S
        signalled: set[int] = set()
        while running := _running(process):
            for pid in running - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            signalled |= running
            if time.monotonic() > until:
                break
            output.take(_LOOK_S)
        if not running:
            return


def _running(process: subprocess.Popen[bytes]) -> set[int]:
    """The processes of the session of the command that run: others may outlive the first one, also
    in process groups of their own. A zombie does not run; it stays where nothing waits for the
    orphans of a container."""
    first = set() if _has_ended(process.pid) else {process.pid}
    session = str(process.pid).encode()
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return first | {pid for pid in pids if _runs_in(session, pid)}


def _runs_in(session: bytes, pid: int) -> bool:
    """Whether the process ``pid`` runs, and is of the session ``session``."""
    try:
        stat = process_stat(pid)
    except PermissionError:
        # /proc is mounted with hidepid=1, and the process is one of another user, which this
        # process cannot end either.
        return False
    return stat is not None and stat[3] == session and stat[0] != b"Z"
