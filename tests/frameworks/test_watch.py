"""``monarch.watch``: the loader itself without an analysis, the same batches with one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import monarch
from monarch.analysis.plan import (
    VARIABLE,
    WINDOWS,
    Phase,
    Plan,
    ProcessId,
    RunReport,
    decode_report,
    encode,
)
from monarch.control.registry import process_started
from monarch.frameworks import measured_loader
from monarch.frameworks.job_limits import JobLimits
from monarch.frameworks.measured_loader import MeasuredLoader
from monarch.posix.processes import process_space
from tests.equipment.waiting import wait_until

BATCHES = [[number, number + 1] for number in range(0, 40, 2)]


class FakeLimits:
    """Counts an open, and 1,000 bytes of the source, for each batch that ``read`` is called for."""

    asked: ClassVar[list[tuple[float, int]]] = []
    batches = 0

    def __init__(self, mountpoint: str) -> None:
        assert mountpoint == "/mnt/data"

    def limit(self, share: float, source_limit: int) -> None:
        self.asked.append((share, source_limit))

    def counts(self) -> tuple[int, int, int]:
        return 0, self.batches, 1000 * self.batches

    @classmethod
    def read(cls, batches: Any) -> Iterator[Any]:
        for batch in batches:
            cls.batches += 1
            yield batch


class Loader:
    """A loader that may be iterated again, with the attributes of one of PyTorch."""

    num_workers = 2
    prefetch_factor = 1
    name = "train"

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return FakeLimits.read(self.batches)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> type[FakeLimits]:
    monkeypatch.setattr(measured_loader, "JobLimits", FakeLimits)
    monkeypatch.setattr(FakeLimits, "asked", [])
    monkeypatch.setattr(FakeLimits, "batches", 0)
    return FakeLimits


def plan(tmp_path: Path, phase: Phase, **values: Any) -> Plan:
    return Plan(
        **{
            "phase": phase,
            "mountpoint": "/mnt/data",
            "report": os.fspath(tmp_path / "report"),
            "iterations": 10,
            "warmup": 2,
            **values,
        }
    )


def measure(loader: Any, planned: Plan) -> tuple[list[Any], RunReport]:
    """The batches that a script gets until its process ends, and the report."""
    got: list[Any] = []
    train(loader, planned, got.append)
    return got, decode_report(Path(planned.report).read_text())


def train(loader: Any, planned: Plan, step: Callable[[Any], object]) -> None:
    def script() -> None:
        for batch in MeasuredLoader(loader, planned):
            step(batch)

    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 0


@pytest.mark.promise(295)
def test_without_an_analysis_the_loader_itself_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for loader in (Loader(BATCHES), iter(BATCHES), BATCHES):
        assert monarch.watch(loader) is loader
    monkeypatch.setenv(VARIABLE, "")
    assert monarch.watch(BATCHES) is BATCHES


def test_without_an_analysis_little_is_loaded() -> None:
    program = "import sys, monarch; monarch.watch([]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "trio", "pydantic", "torch", "lmdb", "pyfuse3", "yaml", "click"}
    assert "monarch.frameworks.measured_loader" not in done.stdout.split()


@pytest.mark.promise(295)
def test_a_measured_loader_yields_the_batches_of_the_loader_in_its_order(
    tmp_path: Path, limits: type[FakeLimits]
) -> None:
    planned = plan(tmp_path, "real", share=0.5, source_limit=1 << 20)
    got, report = measure(Loader(BATCHES), planned)
    # Three are in flight, and one begins the first interval; the rest is taken without training.
    assert got == BATCHES[:13]
    assert limits.asked == [(0.5, 1 << 20)]
    assert report.window == 2 and len(report.train_s) == len(report.load_s) == WINDOWS
    assert report.workers == 2 and report.epoch_batches == 20 and not report.in_stages
    assert report.misses == report.batches and report.source_bytes == 1000 * report.batches


class Clock:
    """The time of a measured loader: it passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(
        measured_loader, "time", SimpleNamespace(perf_counter=lambda: made.now_s, sleep=time.sleep)
    )
    return made


class Timed(Loader):
    """A loader that takes 0.25 s for a batch, and 100 s to begin."""

    def __init__(self, batches: list[Any], clock: Clock) -> None:
        super().__init__(batches)
        self.clock = clock

    def __iter__(self) -> Iterator[Any]:
        self.clock.passes(100)
        for batch in super().__iter__():
            self.clock.passes(0.25)
            yield batch


def test_the_training_and_the_loader_are_measured_together_and_the_loader_alone(
    tmp_path: Path, limits: type[FakeLimits], clock: Clock
) -> None:
    planned = plan(tmp_path, "real", share=0.0)
    train(Timed(BATCHES, clock), planned, lambda batch: clock.passes(1))
    report = decode_report(Path(planned.report).read_text())
    # Windows of two batches.
    assert report.train_s == pytest.approx([2.5] * WINDOWS)
    assert report.load_s == pytest.approx([0.5] * WINDOWS)


def test_a_loader_that_ends_is_begun_again_and_its_begin_is_not_measured(
    tmp_path: Path, limits: type[FakeLimits], clock: Clock
) -> None:
    got, report = measure(Timed(BATCHES[:8], clock), plan(tmp_path, "cached"))
    assert got[:10] == [*BATCHES[:8], *BATCHES[:2]]
    assert report.train_s == report.load_s == pytest.approx([0.5] * WINDOWS)


class Together(Timed):
    """The batches of four workers come together, every second."""

    num_workers = 4

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            self.clock.passes(number % 4 == 0)
            yield batch


def test_windows_have_whole_rounds_of_workers_whose_batches_come_together(
    tmp_path: Path, limits: type[FakeLimits], clock: Clock
) -> None:
    loader = Together([*range(40)], clock)
    _, report = measure(loader, plan(tmp_path, "cached", iterations=35))
    assert report.window == 4
    # Those without the training continue in a second pass.
    assert report.train_s == report.load_s == pytest.approx([1.0] * WINDOWS)
    _, report = measure(loader, plan(tmp_path, "cached", iterations=15))
    assert report.window == 3


@pytest.mark.parametrize("batches", [[], BATCHES[:3]])
def test_a_loader_with_too_few_batches_is_an_error(
    tmp_path: Path, limits: type[FakeLimits], batches: list[Any]
) -> None:
    with pytest.raises(ValueError, match=f"after {len(batches)} batches"):
        list(MeasuredLoader(iter(batches), plan(tmp_path, "cached")))
    with pytest.raises(ValueError, match="no batches"):
        list(MeasuredLoader([], plan(tmp_path, "synthetic")))
    # A generator has no second pass.
    with pytest.raises(ValueError, match="gave 8 batches once"):
        list(MeasuredLoader(iter(range(8)), plan(tmp_path, "cached")))


def test_the_training_alone_gets_ready_batches_that_it_may_change(
    tmp_path: Path, limits: type[FakeLimits]
) -> None:
    loader = Loader([{"images": number, "labels": -number} for number in range(50)])
    planned = plan(tmp_path, "synthetic", iterations=20)
    seen: list[int] = []

    def step(batch: dict[str, int]) -> None:
        seen.append(batch.pop("images"))
        assert batch.pop("labels") == -seen[-1] and not batch

    train(loader, planned, step)
    assert seen[:16] == [*range(8), *range(8)]
    assert limits.batches == 8
    report = decode_report(Path(planned.report).read_text())
    assert len(report.train_s) == WINDOWS and report.load_s == [] and report.misses == 0


def test_a_loop_that_is_left_early_begins_again_and_one_that_continues_ends_the_process(
    tmp_path: Path, limits: type[FakeLimits]
) -> None:
    watched = MeasuredLoader(Loader(BATCHES), plan(tmp_path, "real", share=0.0))
    for _batch, _ in zip(watched, range(5), strict=False):
        pass
    assert not (tmp_path / "report").exists()
    with pytest.raises(SystemExit):
        list(watched)
    assert (tmp_path / "report").exists()
    # The script caught the exit, and begins another epoch.
    with pytest.raises(SystemExit):
        list(watched)
    # The limits are asked for once a process.
    assert limits.asked == [(0.0, 0)]


@pytest.mark.promise(295)
def test_a_loader_that_is_an_iterator_may_be_asked_for_each_batch(
    tmp_path: Path, limits: type[FakeLimits]
) -> None:
    watched: Any = measured_loader.measured(iter(range(1000)), plan(tmp_path, "real"))
    assert next(iter(watched)) == 0
    assert [next(watched) for _ in range(5)] == list(range(1, 6))
    with pytest.raises(SystemExit):
        list(iter(lambda: next(watched), None))
    assert (tmp_path / "report").exists()


def test_a_measured_loader_has_the_length_and_the_attributes_of_the_loader(tmp_path: Path) -> None:
    watched: Any = measured_loader.measured(Loader(BATCHES), plan(tmp_path, "real"))
    assert not hasattr(watched, "__next__") and not isinstance(watched, Iterator)
    assert len(watched) == 20 and watched.name == "train"
    with pytest.raises(AttributeError):
        _ = watched.missing


@pytest.mark.promise(295)
@pytest.mark.parametrize("error", [TypeError, NotImplementedError, RuntimeError])
def test_a_loader_without_a_length_is_measured(
    tmp_path: Path, limits: type[FakeLimits], error: type[Exception]
) -> None:
    class Endless(Loader):
        def __len__(self) -> int:
            raise error("no length")

    assert measure(Endless(BATCHES), plan(tmp_path, "real"))[1].epoch_batches is None


def test_only_the_first_rank_reports(
    tmp_path: Path, limits: type[FakeLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        list(MeasuredLoader(Loader(BATCHES), plan(tmp_path, "real")))
    assert list(tmp_path.iterdir()) == []
    # As by RANK=$SLURM_PROCID without Slurm.
    monkeypatch.setenv("RANK", "")
    assert measure(Loader(BATCHES), plan(tmp_path, "real"))[1].epoch_batches == len(BATCHES)


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"phase": "other", "mountpoint": "/", "report": "r"}']
)
def test_a_plan_that_is_not_one_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError):
        monarch.watch(BATCHES)


def test_a_directory_that_is_no_mount_is_named(tmp_path: Path) -> None:
    limits = JobLimits(os.fspath(tmp_path))
    with pytest.raises(monarch.errors.NotMountedError, match="not a mount of Monarch"):
        limits.limit(0.5, 0)
    with pytest.raises(monarch.errors.MonarchError, match="No such file"):
        JobLimits(os.fspath(tmp_path / "missing")).counts()


def process_id(number: int, space: str | None = None) -> ProcessId:
    return ProcessId(number, process_started(number) or 0, space or process_space())


@pytest.mark.promise(293)
def test_a_process_and_its_group_end_with_the_command_that_analyses_it(tmp_path: Path) -> None:
    program = (
        "import monarch, time; from monarch.frameworks import measured_loader as module;"
        "from tests.frameworks.test_watch import FakeLimits; module.JobLimits = FakeLimits;"
        "[(print(batch, flush=True), time.sleep(600)) for batch in monarch.watch([1] * 100)]"
    )
    with subprocess.Popen(["sleep", "600"]) as analysis:
        planned = plan(tmp_path, "real", analysis=process_id(analysis.pid))
        # A shell, as in a script with several commands, whose standard input is closed.
        with subprocess.Popen(
            ["sh", "-c", 'exec <&-; "$0" -c "$1"; echo later', sys.executable, program],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, VARIABLE: encode(planned), "PYTHONPATH": os.getcwd()},
        ) as job:
            try:
                assert job.stdout is not None and job.stdout.readline() == "1\n"
                assert job.poll() is None
                # It has not been waited for, so it is a zombie.
                analysis.kill()
                assert job.wait(100) < 0 and job.stdout.read() == ""
            finally:
                analysis.kill()
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)


def test_a_process_that_has_ended_or_given_its_number_to_another_is_not_waited_for() -> None:
    with subprocess.Popen(["true"]) as ended:
        had = ProcessId(ended.pid, 1, process_space())
    measured_loader._wait_for_end(had)
    measured_loader._wait_for_end(ProcessId(os.getpid(), 1, process_space()))


def test_only_a_command_in_the_same_process_space_ends_the_job(
    tmp_path: Path, limits: type[FakeLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container or on another node another process may have the number."""
    awaited: list[ProcessId] = []
    monkeypatch.setattr(measured_loader, "_end_with", lambda process, _: awaited.append(process))
    here = process_id(os.getpid())
    for analysis in (None, process_id(os.getpid(), "elsewhere"), here):
        measure(Loader(BATCHES), plan(tmp_path, "real", analysis=analysis))
    wait_until(lambda: awaited == [here], "the job waits for its analysis only")


@pytest.mark.frameworks
def test_a_loader_of_pytorch_yields_the_same_batches(
    tmp_path: Path, limits: type[FakeLimits]
) -> None:
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("torch.utils.data")
    generator = torch.Generator()

    def loader() -> Any:
        generator.manual_seed(7)
        return data.DataLoader(
            list(range(120)), batch_size=4, shuffle=True, num_workers=1, generator=generator
        )

    expected = [batch.tolist() for batch in loader()]
    got, report = measure(loader(), plan(tmp_path, "real", share=0.5))
    assert [batch.tolist() for batch in got] == expected[: len(got)] and len(got) == 13
    assert report.workers == 1 and report.epoch_batches == 30
    assert json.loads((tmp_path / "report").read_text())["in_stages"] is False


def test_a_data_set_of_tensorflow_is_taken_for_one_of_stages(
    tmp_path: Path, limits: type[FakeLimits]
) -> None:
    dataset = type("PrefetchDataset", (), {"__module__": "tensorflow.python.data.ops"})
    dataset.__iter__ = lambda self: iter(range(100))
    got, report = measure(dataset(), plan(tmp_path, "cached"))
    assert got[:2] == [0, 1]
    assert report.in_stages and report.workers is None and report.epoch_batches is None


class Noisy(Timed):
    """A loader whose batches take 0.5 s and 1.5 s, in turns of two, and from the batch ``steady``
    on 1 s."""

    steady = 1000

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            noise = 0.5 if number // 2 % 2 else -0.5
            self.clock.passes(1 + (noise if number < self.steady else 0))
            yield batch


@pytest.mark.promise(291)
def test_a_run_continues_with_longer_windows_until_they_agree(
    tmp_path: Path, limits: type[FakeLimits], clock: Clock
) -> None:
    loader = Noisy([*range(400)], clock)
    _, report = measure(loader, plan(tmp_path, "cached", most_iterations=1000))
    # Windows of two batches differ, those of four have one turn each.
    assert report.window == 4 and report.train_s == pytest.approx([4.0] * WINDOWS)
    assert len(report.load_s) == WINDOWS
    _, report = measure(loader, plan(tmp_path, "cached", most_iterations=19))
    assert report.window == 2
    # It ends at the limit although they differ.
    loader.steady = 15
    _, report = measure(loader, plan(tmp_path, "cached", iterations=5, most_iterations=10))
    assert report.window == 2 and max(report.train_s) > 1.2 * min(report.train_s)
