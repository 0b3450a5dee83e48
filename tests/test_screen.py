"""Layout for a terminal: no word is broken, and no line is wider than the terminal."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarch.cli import status_screen as screens
from monarch.cli.overview import Line
from monarch.cli.screen import Column, bar, fields, paragraph, shortened, table
from monarch.control.registry import MountRecord, SeenMount
from monarch.telemetry.foresight_report import StreamReport
from monarch.telemetry.report import QuotaReport, StatusReport
from tests.equipment.waiting import readable
from tests.reports import a_report

LONG = "/lustre/scratch/group/project/imagenet-1k/original"


def test_the_end_of_a_long_path_is_kept() -> None:
    assert shortened("/pfs/data", 9) == "/pfs/data"
    assert shortened("/pfs/data", 8) == ".../data"
    assert shortened("/pfs/\N{CJK UNIFIED IDEOGRAPH-4E00}a", 5) == "...a"


def test_columns_without_a_place_are_left_out_the_least_important_first() -> None:
    columns = (
        Column("mount", shrinks=True),
        Column("files", right=True, drop=2),
        Column("copies", drop=3),
        Column("why", shrinks=True, prose=True),
    )
    rows = [(LONG, "1,000", "4 running", "the disk is gone")]
    wide, middle, narrow = (
        [line.plain for line in table(columns, rows, width)] for width in (100, 45, 32)
    )
    assert wide[1] == f"{LONG}  1,000  4 running  the disk is gone"
    assert middle[0].split() == ["mount", "files", "why"]
    assert narrow[0].split() == ["mount", "why"]
    for width, lines in ((45, middle), (32, narrow)):
        assert max(map(len, lines)) <= width
        assert lines[1].startswith("...")
    assert narrow[1].endswith("...")


def test_a_quota_is_shown_with_its_limits_and_what_is_used() -> None:
    gib = 1 << 30
    quota = QuotaReport("user alice", 200 * gib, 12 * gib, 20_000_000, 32 * gib)
    shown = screens._quota(quota)
    assert shown == "user alice: copies 12 GiB of 200 GiB; source 32 GiB, at most 19.1 MiB/s"
    unlimited = dataclasses.replace(quota, tier=None, source_limit=0)
    assert screens._quota(unlimited) == "user alice: copies 12 GiB; source 32 GiB"


def test_the_order_of_a_job_is_shown_with_its_epoch_or_that_it_is_unknown() -> None:
    known = StreamReport("train", "shuffled", 1000, 3, 0.42, 0)
    mixed = StreamReport("part", "shuffled", 1000, None, None, 0, is_mixed=True)
    again = StreamReport("val", "skewed", 1000, None, None, 0)
    shown = dataclasses.replace(a_report().foresight, streams=[known, mixed, again])
    assert [value for name, value in screens._foresight(shown) if name == "read order"] == [
        "train/: shuffled, epoch 3, 42% of 1,000 files opened",
        "part/: shuffled, epoch unknown, 1,000 files",
        "val/: skewed",
    ]


def test_fields_wrap_at_the_end_of_a_word_and_keep_numbers_with_their_units() -> None:
    pairs = [("source", LONG), ("resident", "400 files, 60 MiB of 150 MiB; 50 wanted")]
    lines = [line.plain for line in fields(pairs, 40)]
    assert max(map(len, lines)) <= 40
    assert lines[0] == "source    ..." + LONG[-27:]
    assert lines[1:] == ["resident  400 files, 60 MiB of 150 MiB;", "          50 wanted"]
    assert [line.plain for line in fields(pairs[1:], 34)][1] == "          150 MiB; 50 wanted"


def test_a_command_in_a_remedy_can_be_copied() -> None:
    lines = [line.plain for line in paragraph(f"use `monarch umount {LONG}`", 30, indent="  ")]
    assert lines == ["use `monarch umount", f"  {LONG}`"]


def test_a_bar_is_full_only_when_all_is_there() -> None:
    assert [bar(f, 4, ascii_only=True) for f in (0, 0.001, 0.5, 0.999, 1, 7)] == [
        *("....", "#...", "##..", "###.", "####", "####")
    ]


def record(report: StatusReport) -> MountRecord:
    return MountRecord(report.mountpoint, report.source, 1, 1, "/s", "/st", f"{LONG}/daemon.log", 1)


@pytest.mark.finding("B8")
@pytest.mark.parametrize("width", [60, 80, 90, 100])
def test_no_line_of_status_is_wider_than_the_terminal_and_health_comes_first(width: int) -> None:
    report = a_report(mountpoint=f"{LONG}/mnt", source=LONG)
    seen = SeenMount(report.mountpoint, "served", record(report))
    overview = screens._overview_lines(
        [Line(seen, report, ""), Line(SeenMount("/m", "stale", None), None, "gone")],
        width,
        screens._Rates(),
    )
    details = screens._detail_lines(report, record(report), width, False, screens._Rates())
    for line in (*overview, *details):
        assert line.cell_len <= width, line.plain
    words = {word for line in (*overview, *details) for word in line.plain.split()}
    assert {"resident", "capacity", "health", "degraded", "dead", "..." + LONG[-10:]} - words <= {
        "..." + LONG[-10:]
    }
    assert details[0].plain == "health: degraded"
    assert "tier nvme is out of service" in details[1].plain


def test_data_that_exceeds_the_tiers_is_reported() -> None:
    report = a_report(writing=None)
    tiers = [dataclasses.replace(tier, capacity=10 << 20) for tier in report.tiers]
    report = dataclasses.replace(report, tiers=tiers)
    lines = screens._detail_lines(report, record(report), 100, False, screens._Rates())
    assert any(line.plain.startswith("fits            13.3% of the data set") for line in lines)


@pytest.mark.promise(192)
def test_each_rule_and_what_readers_have_decided_have_a_line() -> None:
    report = a_report()
    lines = screens._detail_lines(report, record(report), 120, False, screens._Rates())
    shown = [line.plain for line in lines]
    for expected in (
        "rule            val/**: pin: true; 50 files, 5 MiB, in the snapshot;"
        " 40, 4 MiB, have copies",
        "rule            raw/**: admit: never; 20 files, 1 MiB, found so far in the snapshot;"
        " 0, 0 B, have copies",
        "by frequency    12 copies made in place of files that are opened less often, 300 not made",
        "scans           1,000 files read, no copy removed",
    ):
        assert expected in shown


@pytest.mark.finding("B8")
def test_watching_shows_what_happened_since_the_last_look() -> None:
    rates = screens._Rates()
    report = a_report()
    assert rates.since_last_look(report) == {}
    time.sleep(0.01)
    text = rates.since_last_look(dataclasses.replace(report, opens=2400, bytes=None))
    assert text["opens"].endswith("/s") and text["opens"] != "0/s"
    assert "answered" not in text, "what is not counted has no rate"
    assert text["source"] == "0 B/s"


@pytest.mark.finding("B9")
def test_watching_into_a_pipe_prints_anew_and_ends_with_its_reader(tmp_path: Path) -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-m", "monarch", "status", "--watch"],
        env={**os.environ, "MONARCH_STATE_ROOT": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert watcher.stdout is not None and watcher.stderr is not None
        text = b""
        while b"no Monarch mounts" not in text and b"mount point" not in text:
            assert readable(watcher.stdout, within_s=100), "it prints at once"
            text += os.read(watcher.stdout.fileno(), 4096)
        watcher.stdout.close()
        assert watcher.wait(100) == 0
        assert watcher.stderr.read() == b""
    finally:
        watcher.kill()
        watcher.wait()
        watcher.stderr.close()
