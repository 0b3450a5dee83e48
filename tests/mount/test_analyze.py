"""`monarch analyze`: measured jobs through a mount, and the command from the job to the advice."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarch.frameworks.job_limits import JobLimits
from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.processes import is_running, stop
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, needs_root, one_line
from tests.mount.measured_job import LIMITED, PREPARED, TRAINED
from tests.mount.observe import account, settled
from tests.mount.test_hints import Process

pytestmark = [needs_fuse]

# The kernel sends opens in these modes, and the extension answers them.
MEASURED = ("relay", "passthrough")
FILES = {f"{number:03}": contents(str(number), 4096) for number in range(48)}
# Larger than a file that is fetched whole at its open.
LARGE = {"large": contents("large", 6 << 20)}


class Job:
    """A process in a session of its own that limits itself and reads files."""

    def __init__(self, mounted: Mounted, share: float, rate: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LIMITED, str(mounted.path), str(share), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.session = self._process.pid

    def read(self, names: list[str]) -> tuple[str, int, int, int]:
        """The digest of all bytes; then the hits, the misses and the bytes from the source that
        the daemon has counted."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(names) + "\n")
        process.stdin.flush()
        digest, hits, misses, nbytes = json.loads(process.stdout.readline())
        return digest, hits, misses, nbytes

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def job(mounted: Mounted, share: float, rate: int = 0) -> Iterator[Job]:
    made = Job(mounted, share, rate)
    try:
        yield made
    finally:
        made.kill()


def digest(files: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(files.values())).hexdigest()


def measured(mounted: Mounted) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = account(mounted)["measured"]
    return found


def source_opens(mounted: Mounted) -> int:
    opens: int = account(mounted)["source_totals"]["opens"]
    return opens


@pytest.fixture
def mounted(monarch: MonarchCommand, tree: Tree) -> Mounted:
    """All files have copies."""
    made = monarch.mount(tree({**FILES, **LARGE}))
    monarch("warm", str(made.path), "--wait")
    settled(made)
    return made


@pytest.mark.promise(292, 293)
@pytest.mark.modes(*MEASURED)
def test_a_job_reads_as_with_a_smaller_tier_and_other_jobs_do_not(mounted: Mounted) -> None:
    with job(mounted, 0.5) as half, job(mounted, 1.0) as whole:
        before = source_opens(mounted)
        found, hits, misses, nbytes = half.read(list(FILES))
        assert found == digest(FILES)
        assert hits + misses == len(FILES) and 8 <= hits <= 40
        assert nbytes == misses * 4096
        assert source_opens(mounted) == before + misses
        assert whole.read(list(FILES)) == (digest(FILES), len(FILES), 0, 0)
        assert source_opens(mounted) == before + misses
        # The same files are hidden at each open, and again in the page cache of the kernel.
        assert half.read(list(FILES))[1:3] == (2 * hits, 2 * misses)
        with job(mounted, 0.0) as none:
            assert none.read(list(LARGE)) == (digest(LARGE), 0, 1, len(LARGE["large"]))
            assert none.read(list(LARGE)) == (digest(LARGE), 0, 2, 2 * len(LARGE["large"]))
            assert {each["session"]: each["share"] for each in measured(mounted)} == {
                half.session: 0.5,
                whole.session: 1.0,
                none.session: 0.0,
            }
        half.kill()
        wait_until(
            lambda: [each["session"] for each in measured(mounted)] == [whole.session],
            "the limits of killed jobs have ended",
        )
    report = account(mounted)
    assert report["residency"]["files"] == len(FILES) + len(LARGE)
    assert report["errors"] == {}


@pytest.mark.promise(292)
@pytest.mark.modes(*MEASURED)
def test_a_measured_job_is_limited_in_a_file_that_another_job_has_open(
    monarch: MonarchCommand, tree: Tree
) -> None:
    # The tier has no room for a copy, so the datapath reads the file at the source.
    mounted = monarch.mount(tree({**FILES, **LARGE}), tiers={"fast": "1MiB"})
    with open(mounted.path / "large", "rb"), job(mounted, 1.0) as second:
        assert second.read(list(LARGE)) == (digest(LARGE), 0, 1, len(LARGE["large"]))


@pytest.mark.promise(299)
@pytest.mark.modes(*MEASURED)
def test_a_measured_job_reads_large_files_at_the_rate_of_its_source(mounted: Mounted) -> None:
    with job(mounted, 0.0, 6 << 20) as slow:
        assert slow.read(["000"])[1:3] == (0, 1)
        begin = time.monotonic()
        assert slow.read(list(LARGE)) == (digest(LARGE), 0, 2, 4096 + len(LARGE["large"]))
        # The file has the bytes of a second. A busy machine reads later, and never earlier.
        assert time.monotonic() - begin >= 0.9


@pytest.mark.promise(342)
@pytest.mark.modes(*MEASURED)
def test_a_measured_job_between_two_reads_does_not_keep_a_mount_from_being_unmounted(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree(FILES))
    with job(mounted, 0.5) as between:
        assert between.read(["000"])[1:3] in ((0, 1), (1, 0))
        assert len(measured(mounted)) == 1
        mounted.umount()


@pytest.mark.promise(294)
@pytest.mark.modes(*MEASURED)
@needs_root
def test_an_ordinary_user_measures_its_own_session_through_the_mount_of_another(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = monarch.mount(tree(FILES), options=["allow_other"])
    monarch("warm", str(mounted.path), "--wait")
    settled(mounted)

    def work(fd: int) -> list[int]:
        os.setsid()
        limits = JobLimits(f"/proc/self/fd/{fd}")
        limits.limit(0.0, 0)
        for name in FILES:
            file = os.open(name, os.O_RDONLY, dir_fd=fd)
            assert os.read(file, 5000) == FILES[name]
            os.close(file)
        return [*limits.counts(), os.getsid(0)]

    process = Process(mounted, work)
    try:
        hits, misses, nbytes, session = process.said
        assert (hits, misses, nbytes) == (0, len(FILES), len(FILES) * 4096)
        assert [each["session"] for each in measured(mounted)] == [session]
        # This process is in another session.
        before = source_opens(mounted)
        assert all((mounted.path / name).read_bytes() == FILES[name] for name in FILES)
        assert source_opens(mounted) == before
    finally:
        process.end()
    wait_until(lambda: measured(mounted) == [], "the limits have ended")


def _out(monarch: MonarchCommand) -> str:
    return str(monarch.directory / "profile.json")


@pytest.mark.promise(296)
@pytest.mark.modes("passthrough")
def test_a_job_is_analysed_from_its_script_to_the_prediction(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    command = [sys.executable, "-c", TRAINED, str(mounted.path), "2", "0", "0"]
    done = monarch(
        *("analyze", "run", "--mount", str(mounted.path), "--iters", "10", "--repeat", "1"),
        *("--most-repeat", "1", "--x", "0", "--out", _out(monarch), "--", *command),
        check=False,
        timeout_s=100,
    )
    # Without sleeps the rates are those of a busy machine, so any verdict is right.
    assert done.returncode in (0, 15), done.stderr
    profile = json.loads(Path(_out(monarch)).read_text())
    assert [run["phase"] for run in profile["runs"]] == ["synthetic", "cached", "real"]
    assert profile["command"] == command and profile["monarch_profile"] == 1
    result = profile["result"]
    assert done.stdout.startswith(f"{result['verdict']}: ")
    assert [share["hits"] for share in result["shares"]] == [0.0, 1.0]
    assert result["epoch_batches"] == 60 and result["workers"] == 1
    # Two files are read for a batch; those that were read ahead belong to other batches.
    assert 0.5 * 8192 <= result["batch_bytes"] <= 1.5 * 8192
    # The report and the prediction are made from the file.
    report = monarch("analyze", "report", _out(monarch), "--json", check=False)
    assert report.returncode == done.returncode and json.loads(report.stdout) == result
    predicted = json.loads(
        monarch("analyze", "whatif", _out(monarch), "--tier", "1KiB,1GiB", "--json").stdout
    )
    rates = [row["rate"] for row in predicted["rows"]]
    assert rates[0] <= rates[1] and [row["share"] for row in predicted["rows"]][1] == 1.0
    wait_until(lambda: measured(mounted) == [], "the limits have ended")
    assert account(mounted)["residency"]["files"] == len(FILES) + len(LARGE)


@pytest.mark.promise(293)
@pytest.mark.modes("relay")
def test_the_job_and_its_limits_end_with_a_killed_analysis(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    command = [sys.executable, "-c", TRAINED, str(mounted.path), "1", "0", "600"]
    errors = monarch.directory / "errors"
    with errors.open("wb") as file:
        analysis = subprocess.Popen(
            [
                *(sys.executable, "-m", "monarch", "analyze", "run", "--mount", str(mounted.path)),
                *("--out", _out(monarch), "--", *command),
            ],
            env={**monarch.environment(), "TMPDIR": str(monarch.directory)},
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    try:
        wait_until(lambda: len(measured(mounted)) == 1, "the job is measured")
        (session,) = (each["session"] for each in measured(mounted))
        # The job trains on its first batch for ten minutes.
        assert is_running(session), errors.read_text()
        analysis.send_signal(signal.SIGKILL)
        wait_until(lambda: measured(mounted) == [], "the limits have ended")
        wait_until(lambda: not is_running(session), "the job has ended")
    finally:
        analysis.kill()
        analysis.wait()


@pytest.mark.promise(293)
@pytest.mark.parametrize("way", ["lazy umount", "SIGKILL"])
@pytest.mark.modes("relay")
def test_the_analysis_and_its_job_end_with_the_mount(
    monarch: MonarchCommand, mounted: Mounted, way: str
) -> None:
    # The job trains on its first batch for ten minutes.
    command = [sys.executable, "-c", TRAINED, str(mounted.path), "1", "0", "600"]
    errors = monarch.directory / "errors"
    with errors.open("wb") as file:
        analysis = subprocess.Popen(
            [
                *(sys.executable, "-m", "monarch", "analyze", "run", "--mount", str(mounted.path)),
                *("--out", _out(monarch), "--", *command),
            ],
            env={**monarch.environment(), "TMPDIR": str(monarch.directory)},
            stderr=file,
        )
    try:
        wait_until(lambda: len(measured(mounted)) == 1, "the job is measured")
        (session,) = (each["session"] for each in measured(mounted))
        if way == "SIGKILL":
            mounted.kill()
        else:
            monarch("umount", str(mounted.path), "--lazy")
        assert analysis.wait(60) == 9, errors.read_text()
        assert f"{mounted.path} has ended while" in errors.read_text()
        assert not is_running(session)
    finally:
        analysis.kill()
        analysis.wait()


@pytest.mark.modes("relay")
def test_a_job_that_cannot_be_measured_is_named(
    monarch: MonarchCommand, mounted: Mounted, tmp_path: Path
) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return monarch("analyze", "run", "--out", _out(monarch), *arguments, check=False)

    away = run("--mount", str(tmp_path), "--", "true")
    assert away.returncode == 9 and "not in a Monarch mount" in one_line(away)
    mount = ("--mount", str(mounted.path))
    unmeasured = run(*mount, "--", "sh", "-c", "echo no loop; exit 3")
    assert unmeasured.returncode == 1 and "| no loop" in unmeasured.stderr
    assert "exit code 3" in unmeasured.stderr and "monarch.watch(loader)" in unmeasured.stderr
    # An empty argument of the job is not one of this command.
    empty = run(*mount, "--", "sh", "-c", 'test -z "$0" && exit 4', "")
    assert empty.returncode == 1 and "exit code 4" in empty.stderr
    assert run("--mount", "", "--", "true").returncode == 2
    missing = run(*mount, "--", "/no/such/command")
    assert missing.returncode == 2 and "cannot be run" in one_line(missing)
    for option in (("--x", "1"), ("--x", "2"), ("--x", "a"), ("--source", "1KB"), ("--iters", "9")):
        assert run(*mount, *option, "--", "true").returncode == 2, option
    # No run has left an empty profile.
    assert not Path(_out(monarch)).exists()
    Path(_out(monarch)).write_text("{}")
    assert "not a profile" in one_line(monarch("analyze", "report", _out(monarch), check=False))


@pytest.mark.modes("relay")
def test_a_mount_that_does_not_answer_is_not_waited_for(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    stop(mounted.pid)
    try:
        for command in (("analyze", "run", "--out"), ("plan", "profile", "job", "-o")):
            mount = ("--mount", str(mounted.path), "--", "true")
            done = monarch(*command, _out(monarch), *mount, check=False, timeout_s=100)
            assert done.returncode == 1 and "does not answer" in one_line(done)
    finally:
        os.kill(mounted.pid, signal.SIGCONT)


@pytest.mark.promise(320)
@pytest.mark.modes("passthrough")
def test_the_rates_of_a_plan_are_measured_with_the_cores_and_the_share_asked_for(
    monarch: MonarchCommand, mounted: Mounted, pytestconfig: pytest.Config
) -> None:
    """Without --soak only what was measured: the rates are those of a busy machine."""
    usable = len(os.sched_getaffinity(0))
    is_quiet = bool(pytestconfig.getoption("--soak")) and usable > 1
    cores, checks, rounds = ("1,2", "2", "60000") if is_quiet else ("1", "1", "1")
    log, out = monarch.directory / "runs", monarch.directory / "job.json"
    done = monarch(
        *("plan", "profile", "job", "--mount", str(mounted.path), "--cores", cores),
        *("--tiers", "25%,100%", "--verify", checks, "--source", "1MiB/s", "--json"),
        *("--iters", "50" if is_quiet else "10", "--warmup", "1", "--repeat", "1"),
        *("-o", str(out), "--", sys.executable, "-c", PREPARED, str(mounted.path)),
        *("16", rounds, str(log)),
        check=False,
        timeout_s=300,
    )
    assert done.returncode in (0, 15), done.stderr
    found = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    # Two runs for the verified rate and for the job without a tier.
    begun = [line.split() for line in log.read_text().splitlines()]
    of_one = [["cached", "1"], ["real", "1"], ["synthetic", "1"], ["real", "1"]]
    assert begun[0] == ["fill", str(usable)]
    # On a busy machine a rate that varies is measured once more.
    assert is_quiet or [run for run, _ in itertools.groupby(begun[1:])] == of_one
    assert all(map(all, found["measured"])) and len(found["verified"]) == int(checks)
    wait_until(lambda: measured(mounted) == [], "the limits have ended")
    assert len(os.sched_getaffinity(0)) == usable
    if is_quiet:
        checked = [(each["computed"], each["measured"]) for each in found["verified"]]
        full = [(row[-1], row[-1]) for row in found["rates"]]
        require_order([*checked, *full])
        # The twin: with the rates of one core in place of those of two the order is wrong.
        one, two = full
        with pytest.raises(AssertionError):
            require_order([(one[0], two[1]), (two[0], one[1])])


def require_order(cells: list[tuple[float, float]]) -> None:
    """Of two rates, the one that was computed clearly higher is higher."""
    for computed, rate in cells:
        for other, its_rate in cells:
            if computed > 1.25 * other:
                assert rate > its_rate, cells


@pytest.mark.modes("no_open", "python")
def test_a_mount_whose_daemon_sees_no_opens_says_how_to_mount_it(
    monarch: MonarchCommand, mounted: Mounted
) -> None:
    done = monarch("analyze", "run", "--mount", str(mounted.path), "--", "true", check=False)
    assert done.returncode == 3 and "open=open" in one_line(done)
    key = "open: none" if monarch.mode == "no_open" else "datapath: python"
    assert f"is mounted with `{key}`" in one_line(done)
    out = str(monarch.directory / "job.json")
    options = ("--mount", str(mounted.path), "-o", out, "--", "true")
    assert monarch("plan", "profile", "a", *options, check=False).returncode == 3


# The files of a batch, its preparation and its training in seconds, and the rate of the source in
# bytes/s, 0: no limit. A batch of 8 files of 4 KiB takes 31 ms at the slow source.
_SLOW = 1 << 20
REGIMES = (
    ("fetch-bound", 8, 0.003, 0.010, _SLOW),
    ("prep-bound", 1, 0.040, 0.010, 0),
    ("gpu-bound", 1, 0.005, 0.050, 0),
    # Waiting for files as well, but less.
    ("prep-bound", 4, 0.040, 0.010, _SLOW),
)


@pytest.mark.promise(291)
@pytest.mark.modes("passthrough")
def test_the_verdict_and_the_stalls_are_those_of_the_emulated_training(
    monarch: MonarchCommand, mounted: Mounted, pytestconfig: pytest.Config
) -> None:
    """Without --soak only counts and lower bounds: on a busy machine sleeps last longer."""
    is_quiet = bool(pytestconfig.getoption("--soak"))
    iters, longer = (50, 2) if is_quiet else (20, 1)
    for regime, files, prep_s, training_s, limit in REGIMES if is_quiet else REGIMES[:1]:
        files, prep_s, training_s = files * longer, prep_s * longer, training_s * longer
        source = ("--source", f"{limit}/s") if limit else ()
        done = monarch(
            *("analyze", "run", "--mount", str(mounted.path), "--json", "--out", _out(monarch)),
            *("--iters", str(iters), "--repeat", "1", "--x", "0", *source, "--"),
            *(sys.executable, "-c", TRAINED, str(mounted.path)),
            *map(str, (files, prep_s, training_s)),
            check=False,
            timeout_s=300,
        )
        assert done.returncode in (0, 15), done.stderr
        profile = json.loads(Path(_out(monarch)).read_text())
        result = json.loads(done.stdout)
        assert result == profile["result"]
        least = result["shares"][0]
        assert least["hits"] == 0.0 and result["shares"][1]["hits"] == 1.0
        if limit:
            # The source gives no bytes earlier, but for those of a few batches that were ready.
            (report, *_) = (run["report"] for run in profile["runs"] if run["phase"] == "real")
            seconds = (iters - 6) * files * 4096 / limit
            assert sum(report["train_s"]) >= seconds <= sum(report["load_s"])
        if not is_quiet:
            continue
        fetch_s = files * 4096 / limit if limit else 0.0
        times = [training_s, max(training_s, prep_s), max(training_s, prep_s + fetch_s)]
        assert result["verdict"] == regime, result
        assert least["fetch_stall"] == pytest.approx((times[2] - times[1]) / times[2], abs=0.10)
        assert least["prep_stall"] == pytest.approx((times[1] - times[0]) / times[2], abs=0.10)
