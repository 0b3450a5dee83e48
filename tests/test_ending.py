"""Waiting for the end of a daemon: as long as there is progress, and with the reason of a delay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.cli import ckpt, daemon_call, umount
from monarch.control import ending
from monarch.control.registry import MountRecord
from monarch.errors import FuseError, NotDrainedError
from monarch.telemetry.report import DrainReport


@pytest.fixture(autouse=True)
def own_name() -> Iterator[None]:
    name = Path("/proc/self/comm").read_text()
    yield
    Path("/proc/self/comm").write_text(name)


class Daemon:
    """Virtual time, in which a daemon ends by ``steps``, each with how long it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[str | None, float]]):
        self.now = 0.0
        self._steps = steps
        monkeypatch.setattr(umount, "step_of", lambda pid: self._step())
        monkeypatch.setattr(umount, "alive", lambda record: self.now < self._length())
        monkeypatch.setattr(umount.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(umount.time, "sleep", self._sleep)

    def _length(self) -> float:
        return sum(seconds for _, seconds in self._steps)

    def _sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)

    def _step(self) -> str | None:
        end = 0.0
        for name, seconds in self._steps:
            end += seconds
            if self.now < end:
                return name
        return None


RECORD = MountRecord(
    mountpoint="/mnt",
    source="/src",
    pid=os.getpid(),
    pid_started=1,
    socket="/s",
    state="/st",
    log="/st/daemon.log",
    started_ns=0,
)


@pytest.mark.finding("C8", "S8")
@pytest.mark.promise(105)
def test_umount_waits_while_the_daemon_gets_on_and_says_what_holds_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[tuple[str | None, float]] = [("copies", 50), ("written", 50), ("tiers", 50)]
    daemon = Daemon(monkeypatch, steps)
    umount._wait_for_end(RECORD)
    assert daemon.now >= 150
    stuck = Daemon(monkeypatch, [(None, 5), ("tiers", 1000)])
    with pytest.raises(FuseError, match="has not ended: it has waited 60 s for the disks of its"):
        umount._wait_for_end(RECORD)
    assert stuck.now < 70


@pytest.mark.finding("C8")
def test_each_step_is_seen_by_others_while_it_lasts() -> None:
    assert ending.step_of(os.getpid()) is None
    for name in ending.STEPS:
        with ending.step(name):
            assert ending.step_of(os.getpid()) == name
    assert ending.step_of(1 << 22) is None


@pytest.mark.promise(72)
@pytest.mark.parametrize("took_s", [1.0, 600.0])
def test_a_wait_that_has_ended_early_names_no_time_and_promises_no_drain(
    monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    """As after a failure of the journal: nothing is drained before the next mount."""
    daemon = Daemon(monkeypatch, [])
    report = DrainReport(False, 1, 5, 0, "the journal in tier fast has failed", "/tier", [])

    def drain(record: MountRecord, *_: object, **more: object) -> DrainReport:
        daemon.now += took_s
        return report

    monkeypatch.setattr(umount, "drain", drain)
    monkeypatch.setattr(daemon_call, "drain", drain)
    monkeypatch.setattr(daemon_call, "mount_and_path", lambda mount, path: (RECORD, ""))
    with pytest.raises(NotDrainedError) as of_umount:
        umount._drain(RECORD, 600.0, quiet=True)
    wait = ckpt.wait.callback
    assert wait is not None
    with pytest.raises(NotDrainedError) as of_wait:
        wait(Path("/mnt"), None, False, False, 600.0, False)
    for error in (of_umount.value, of_wait.value):
        assert ("after 10 min" in str(error)) == (took_s == 600.0), error
        assert "the journal in tier fast has failed" in str(error)
    assert ("waits longer" in str(of_umount.value)) == (took_s == 600.0)
    assert ("draining continues" in str(of_wait.value)) == (took_s == 600.0)
