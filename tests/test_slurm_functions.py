"""What prolog and epilog of Slurm share: the lock of a job, and which caches stay."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.equipment.waiting import wait_until

FUNCTIONS = Path(__file__).parents[1] / "conf" / "slurm" / "functions.sh"


class Shells:
    """Shells that have read ``functions.sh``. Each ends when its standard input ends."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.locks = directory / "run"
        (directory / "conf").write_text(
            f"MONARCH_RUN={self.locks} MONARCH_LOG={directory}/log MONARCH_JOBS={directory}/jobs\n"
        )
        self._directory = directory
        self._stack = stack
        self.environment = {**os.environ, "MONARCH_SLURM_CONF": str(directory / "conf")}

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """A shell that takes the lock of job 7: ``NAME-opened`` exists when it has opened the file,
        ``NAME-locked`` while it has the lock. A line on its standard input lets it remove the file
        as ``end_job`` does, and end."""
        script = f"""\
            exec 3<&0
            . {FUNCTIONS}
            cd {self._directory}
            flock() {{ : >{name}-opened; command flock "$@"; }}
            lock_job 7
            : >{name}-locked
            read -r _ <&3
            rm -f "$MONARCH_RUN/job-7.lock"
        """
        process = subprocess.Popen(
            ["bash", "-c", script], stdin=subprocess.PIPE, env=self.environment
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.communicate)
        wait_until((self._directory / f"{name}-opened").exists, f"{name} has opened the lock")
        return process

    def wait_for_lock(self, name: str) -> None:
        wait_until((self._directory / f"{name}-locked").exists, f"{name} has the lock")

    def can_lock(self) -> bool:
        """Whether another shell gets the lock now, which then ends."""
        return self.answers("lock_job 7 -n")

    def answers(self, call: str) -> bool:
        """Whether a shell ends with 0 after the call of a function."""
        command = ["bash", "-c", f". {FUNCTIONS}; {call}"]
        return subprocess.run(command, env=self.environment, timeout=60).returncode == 0


def test_a_shell_that_has_waited_for_a_lock_is_the_only_one_with_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        shells = Shells(tmp_path, stack)
        first = shells.start("first")
        shells.wait_for_lock("first")
        assert not shells.can_lock()
        # Its file is the one that the first shell removes.
        second = shells.start("second")
        first.communicate(b"\n")
        shells.wait_for_lock("second")
        assert not shells.can_lock()
        second.communicate(b"\n")
        assert shells.can_lock()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_lock_that_no_shell_has_is_free(tmp_path: Path, is_removed: bool) -> None:
    with ExitStack() as stack:
        shells = Shells(tmp_path, stack)
        assert shells.can_lock()
        if is_removed:
            (shells.locks / "job-7.lock").unlink()
        assert shells.can_lock()


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("state/figures.json", False),
        ("state/undrained.json", True),
        ("state/held/0123456789abcdef/7.json", True),
        # Bytes without a record do not count.
        ("state/held/0123456789abcdef/7.00", False),
    ],
)
def test_a_cache_with_the_only_copy_of_a_written_file_stays(
    tmp_path: Path, name: str, stays: bool
) -> None:
    # The directories of all jobs may be below one with any name.
    tmp_path = tmp_path / "held" / "on" / "disk"
    cache = tmp_path / "jobs" / "7"
    (cache / "state" / "held").mkdir(parents=True)
    (cache / "mounts").touch()
    path = cache / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with ExitStack() as stack:
        shells = Shells(tmp_path, stack)
        assert shells.answers("lock_job 7; end_job 7 1s") == (not stays)
    assert cache.exists() == stays


def test_the_end_of_a_job_without_a_cache_removes_its_lock(tmp_path: Path) -> None:
    """The epilog of a job may come twice, or after a prolog that failed."""
    with ExitStack() as stack:
        shells = Shells(tmp_path, stack)
        assert shells.answers("lock_job 7; end_job 7 1s")
        assert list(shells.locks.iterdir()) == []


def test_a_cache_that_cannot_be_searched_stays(tmp_path: Path) -> None:
    cache = tmp_path / "jobs" / "7"
    cache.mkdir(parents=True)
    (cache / "mounts").touch()
    with ExitStack() as stack:
        shells = Shells(tmp_path, stack)
        assert not shells.answers("find() { return 1; }; lock_job 7; end_job 7 1s")
        assert cache.exists()
        assert shells.answers("lock_job 7; end_job 7 1s")
    assert not cache.exists()


@pytest.mark.promise(311)
@pytest.mark.parametrize("is_requeued", [False, True])
def test_a_prolog_leaves_the_cache_of_a_job_that_was_requeued_meanwhile(
    tmp_path: Path, is_requeued: bool
) -> None:
    cache, programs = tmp_path / "jobs" / "7", tmp_path / "bin"
    cache.mkdir(parents=True)
    (cache / "mounts").touch()
    programs.mkdir()
    # The job waits at the first call, and may run at the second one.
    squeue = programs / "squeue"
    squeue.write_text(f"#!/bin/sh\n[ ! -e {tmp_path}/asked ] || echo {7 if is_requeued else 8}\n")
    with squeue.open("a") as script:
        script.write(f": >{tmp_path}/asked\n")
    squeue.chmod(0o755)
    (tmp_path / "conf").write_text(
        f"MONARCH_RUN={tmp_path}/run MONARCH_LOG={tmp_path}/log MONARCH_JOBS={tmp_path}/jobs"
        f" MONARCH_PATH={programs}\n"
    )
    environment = {**os.environ, "MONARCH_SLURM_CONF": str(tmp_path / "conf")}
    script_of_prolog = "exit() { :; }; . $0; end_earlier_jobs"
    command = ["bash", "-c", script_of_prolog, os.fspath(FUNCTIONS.with_name("prolog.sh"))]
    subprocess.run(command, env=environment | {"SLURM_JOB_ID": "9"}, timeout=60, check=False)
    assert cache.exists() == is_requeued


@pytest.mark.promise(311)
def test_the_lock_of_a_job_outlives_a_prolog_that_is_killed_while_it_mounts(tmp_path: Path) -> None:
    """Otherwise the epilog would remove the cache before the mount has begun, which would stay."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "monarch").write_text(
        f"#!/bin/sh\ncd {tmp_path}\n: >begun\nwhile [ ! -e go ]; do sleep 0.01; done\n: >mounted\n"
    )
    # It runs the command behind its options.
    (programs / "systemd-run").write_text(
        "#!/bin/sh\nwhile :; do case $1 in --unit) shift 2 ;; -*) shift ;; *) break ;; esac; done\n"
        'exec "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    with ExitStack() as stack:
        shells = Shells(tmp_path, stack)
        stack.callback((tmp_path / "go").touch)
        with (tmp_path / "conf").open("a") as conf:
            conf.write(f"MONARCH_PATH={programs} MONARCH_MOUNTS=data:{tmp_path}/mnt-%j\n")
        prolog = subprocess.Popen(
            [str(FUNCTIONS.with_name("prolog.sh"))],
            env={**shells.environment, "SLURM_JOB_ID": "7"},
            start_new_session=True,
        )
        wait_until((tmp_path / "begun").exists, "the mount begins")
        os.killpg(prolog.pid, signal.SIGKILL)
        prolog.wait(60)
        assert not shells.can_lock()
        (tmp_path / "go").touch()
        wait_until(shells.can_lock, "the lock is free")
        assert (tmp_path / "mounted").exists()
