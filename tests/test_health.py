"""The health of a mount: the word that follows from the problems, their start and their end."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch import daemon
from monarch.cli import status, status_screen
from monarch.daemon import health_checks
from monarch.daemon.health_checks import (
    CopyCheck,
    HealthChecks,
    ProcessCheck,
    SnapshotCheck,
    SourceCheck,
)
from monarch.errors import NotMountedError, UsageError
from monarch.fuse import mountpoint
from monarch.telemetry.health import KINDS, STATES, Health, Problem, Spell, health_of, worst
from monarch.telemetry.report import Requests, StatusReport
from monarch.transfer.outages import Outage
from monarch.transfer.source_calls import Trouble
from tests.reports import a_problem, a_report

ROOT = Path(__file__).parents[1]


def test_nothing_wrong_is_ok() -> None:
    assert health_of([]) == Health("ok", "", [])


def test_the_gravest_problem_gives_the_word_and_the_reason() -> None:
    tier, source = a_problem(), a_problem(kind="source-hangs", what="the source hangs")
    assert health_of([tier]) == Health("degraded", tier.what, [tier])
    assert health_of([tier, source]) == Health(
        "failing", "the source hangs (and 1 more)", [source, tier]
    )
    assert [worst(words) for words in ([], ["ok", "failing", "degraded"], ["ok", "degraded"])] == [
        "ok",
        "failing",
        "degraded",
    ]


def test_each_kind_means_that_something_is_wrong() -> None:
    assert set(KINDS.values()) == set(STATES) - {"ok"}


def test_each_kind_is_reported_by_the_daemon_and_no_other() -> None:
    text = "".join(path.read_text() for path in Path(daemon.__file__).parent.glob("*.py"))
    reported = re.findall(r'Problem\(\s*"([a-z-]+)"', text)
    assert set(reported) == set(KINDS)


@pytest.mark.promise(55)
def test_each_state_and_kind_has_its_place_in_the_handbook_and_no_other() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^### Health: `([a-z]+)`$", text, re.MULTILINE) == list(STATES)
    rows = dict(
        re.findall(r"^\| `([a-z-]+)` \| ([a-z]+) \| .* \| .* \| .* \|$", text, re.MULTILINE)
    )
    assert rows == dict(KINDS)


def test_a_count_that_rises_is_a_spell_until_it_has_been_quiet_for_long() -> None:
    spell = Spell(60.0)
    assert not spell.goes_on(0, now_s=1e6, wall_ns=1)
    assert spell.goes_on(2, now_s=1e6 + 1, wall_ns=2)
    assert spell.goes_on(2, now_s=1e6 + 61, wall_ns=3)
    assert spell.goes_on(3, now_s=1e6 + 61, wall_ns=4)
    assert (spell.number, spell.since_ns) == (3, 2)
    assert not spell.goes_on(3, now_s=1e6 + 121.5, wall_ns=5)
    assert spell.goes_on(4, now_s=1e6 + 122, wall_ns=6)
    assert (spell.number, spell.since_ns) == (1, 6)


def test_health_comes_back_from_json_with_kinds_of_a_newer_daemon() -> None:
    report = a_report(health=Health("degraded", "x", [Problem("brand-new", "x", 1, "y")]))
    assert StatusReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


# -- the command line ------------------------------------------------------------------------------


def checked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *lines: status.Line,
    arguments: tuple[str, ...] = (),
) -> tuple[int, str]:
    monkeypatch.setattr(status, "overview", lambda records, only=None: list(lines))
    code = status.status.main(["--check", *arguments], standalone_mode=False)
    return code, capsys.readouterr().out


def line(found: Health | None, mountpoint: str = "/mnt/data") -> status.Line:
    from monarch.control.registry import SeenMount

    report = None if found is None else a_report(health=found)
    seen = SeenMount(mountpoint, "served" if found else "stale", None)
    return status.Line(seen, report, "" if found else "the daemon is dead")


OK = health_of([])
DEGRADED = health_of([a_problem()])
FAILING = health_of([a_problem(kind="source-hangs", what="it hangs")])


@pytest.mark.promise(55)
def test_check_tells_the_worst_of_the_mounts_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(monkeypatch, capsys) == (0, "")
    assert checked(monkeypatch, capsys, line(OK)) == (0, "/mnt/data: ok\n")
    assert checked(monkeypatch, capsys, line(DEGRADED), line(OK, "/mnt/b\n")) == (
        11,
        "/mnt/data: degraded: tier nvme is out of service: Input/output error\n/mnt/b\\n: ok\n",
    )
    assert checked(monkeypatch, capsys, line(DEGRADED), line(FAILING))[0] == 12
    assert checked(monkeypatch, capsys, line(FAILING), line(None)) == (
        NotMountedError.exit_code,
        "/mnt/data: failing: it hangs\n/mnt/data: dead: the daemon is dead\n",
    )


def test_check_speaks_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = checked(monkeypatch, capsys, line(FAILING), line(None), arguments=("--json",))
    assert code == NotMountedError.exit_code
    served, dead = json.loads(shown)["mounts"]
    assert (served["health"]["state"], served["health"]["why"]) == ("failing", "it hangs")
    assert (dead["state"], dead["health"], dead["trouble"]) == ("dead", None, "the daemon is dead")


def test_watch_and_check_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--check exclude each other"):
        status.status.main(["--check", "--watch"], standalone_mode=False)


def test_the_exit_codes_of_check_are_no_others() -> None:
    from monarch.cli.main import EXIT_CODES

    assert len(set(status.CHECK_CODES.values())) == len(STATES)
    errors = [code for code, words in EXIT_CODES.items() if "--check" not in words]
    assert set(status.CHECK_CODES.values()) & set(errors) == {0}


def test_a_time_of_another_day_is_shown_with_its_date() -> None:
    from datetime import datetime, timedelta

    now = datetime.now().replace(second=0, microsecond=0)
    assert status_screen._moment(int(now.timestamp() * 1e9)) == now.strftime("%H:%M")
    before = now - timedelta(days=1)
    assert status_screen._moment(int(before.timestamp() * 1e9)) == before.strftime("%Y-%m-%d %H:%M")


# -- the checks ------------------------------------------------------------------------------------

MOUNTPOINT = Path("/mnt")


class Clear:
    """A check that finds what it was given."""

    def __init__(self, *found: Problem) -> None:
        self.found = list(found)

    def problems(self) -> list[Problem]:
        return self.found


def fake(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


def kinds_of(check: Any) -> list[str]:
    return [problem.kind for problem in check.problems()]


def test_a_problem_without_a_recorded_start_began_when_it_was_first_found() -> None:
    check, now = Clear(Problem("files-changed", "x", 0, "y"), Problem("tier-out", "x", 7, "y")), [1]
    health = HealthChecks([Clear(), check], wall_ns=lambda: now[0])
    assert [problem.since_ns for problem in health.problems()] == [1, 7]
    now[0] = 2
    assert [problem.since_ns for problem in health.problems()] == [1, 7]
    found, check.found = check.found, []
    assert health.problems() == []
    check.found = found
    assert [problem.since_ns for problem in health.problems()] == [2, 7]


def source_check(
    trouble: Trouble | None = None, oldest_s: float = 0.0, outages: Any = (), closed: int = 0
) -> SourceCheck:
    return SourceCheck(
        fake(mountpoint=MOUNTPOINT, source=Path("/pfs"), source_identity="daemon"),
        fake(trouble=lambda: trouble),
        fake(out_of_service=lambda: dict(enumerate(outages))),
        fake(closed_files=set(range(closed))),
        requests=lambda: Requests(3, oldest_s),
        log="/log",
    )


@pytest.mark.finding("D6")
@pytest.mark.promise(91)
@pytest.mark.fault("M12")
@pytest.mark.parametrize(
    ("oldest_s", "hangs", "kinds"),
    [(59.0, False, []), (61.0, False, ["requests-wait"]), (61.0, True, ["source-hangs"])],
)
def test_a_request_that_waits_for_a_minute_is_a_problem_unless_the_source_explains_it(
    oldest_s: float, hangs: bool, kinds: list[str]
) -> None:
    reported = Trouble("does not answer", 1, hangs=True) if hangs else None
    found = HealthChecks([source_check(reported, oldest_s)]).problems()
    assert [problem.kind for problem in found] == kinds
    if kinds == ["requests-wait"]:
        assert abs(found[0].since_ns - (time.time_ns() - 61 * 10**9)) < 30 * 10**9
        assert health_of(found).state == "failing"


def test_a_slow_tier_explains_a_request_that_waits() -> None:
    assert kinds_of(source_check(oldest_s=61.0, outages=[Outage("x", 1, slow=True)])) == []
    assert kinds_of(source_check(oldest_s=61.0, outages=[Outage("x", 1, slow=False)])) == [
        "requests-wait"
    ]


def test_files_closed_to_a_daemon_of_root_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_root, kinds in ((True, ["source-closed"]), (False, [])):
        monkeypatch.setattr(health_checks, "can_act_as_others", lambda is_root=is_root: is_root)
        assert kinds_of(source_check(closed=2)) == kinds


@pytest.mark.parametrize(
    ("outage", "kind"),
    [
        (Outage("x", 5, slow=False), "tier-out"),
        (Outage("x", 5, slow=True), "tier-slow"),
        (Outage("x", 5, slow=False, full=True), "tier-full"),
        (Outage("x", 5, slow=False, state="/state"), "tier-out"),
    ],
)
def test_each_outage_of_a_tier_is_a_problem_since_its_start(outage: Outage, kind: str) -> None:
    tier = fake(number=1, name="fast", path=Path("/fast"))
    monitor = fake(
        tiers={1: tier}, out_of_service=lambda: {1: outage}, others=lambda number: ["/other"]
    )
    metrics = fake(errors=Counter())
    check = CopyCheck(monitor, fake(unverified_files=lambda: 2), metrics, MOUNTPOINT)
    problem, unverified = check.problems()
    assert (problem.kind, problem.since_ns) == (kind, 5)
    assert ("/other" in problem.what) == (kind == "tier-full")
    assert ("df /state" in problem.remedy) == bool(outage.state)
    assert ("/fast" in problem.remedy) != bool(outage.state)
    assert unverified.kind == "copies-unverified" and "2 copies" in unverified.what
    metrics.errors["copy-EIO"] = 1
    assert kinds_of(check) == [kind, "copies-damaged", "copies-unverified"]


def test_a_snapshot_that_is_behind_is_reported_as_long_as_data_waits_and_then_as_old() -> None:
    drain = fake(queue=fake(last_seq=3))
    check = SnapshotCheck(
        fake(changed_directories=1), fake(changes=1), MOUNTPOINT, put_off="why", drain=drain
    )
    assert kinds_of(check) == ["snapshot-behind", "files-changed", "snapshot-stale"]
    assert next(check.problems()).what == "why"
    drain.queue.last_seq = 0
    assert "now has all changes" in next(check.problems()).what


def test_the_memory_is_read_once_a_second_however_often_it_is_checked(tmp_path: Path) -> None:
    def leave(kib: int) -> None:
        reported = f"MemTotal:       1000000 kB\nMemAvailable:   {kib} kB\n"
        (tmp_path / "proc" / "meminfo").write_text(reported)

    (tmp_path / "proc").mkdir()
    moments = [100.0]
    logbook = fake(exceptions=0, path="/log", trouble=lambda: None)
    look = ProcessCheck(logbook, clock=lambda: moments[-1], root=tmp_path)
    kinds = []
    for kib, at in ((900_000, 100.0), (10_000, 100.9), (10_000, 101.1), (900_000, 102.2)):
        moments.append(at)
        leave(kib)
        kinds.append(kinds_of(look))
    assert kinds == [[], [], ["memory-scarce"], []]
    logbook.exceptions = 2
    assert kinds_of(look) == ["internal-error"]


@pytest.mark.fault("M4")
def test_a_daemon_without_descriptors_still_reports_its_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(mountpoint, "open", refused, raising=False)
    assert kinds_of(health_checks.MountCheck(Path("/mnt"))) == []
