"""The log: private, bounded, in lines that nobody forges, and no flood of one fault."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from monarch import log
from monarch.settings import LogSettings

LOGGER = logging.getLogger("monarch.test")


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_line_has_time_level_logger_and_message(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    log.setup(LogSettings(), path=path, foreground=False)
    LOGGER.info("copied %d files", 3)
    LOGGER.debug("not told")
    (line,) = logged(path)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info monarch\.test: copied 3 files", line
    )


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_hostile_name_forges_no_line(form: Literal["text", "json"], tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    log.setup(LogSettings(format=form), path=path, foreground=False)
    name = os.fsdecode(b"a\n2026-01-01T00:00:00.000Z error monarch: forged\r\x1b[31m\xff")
    LOGGER.warning("cannot read %s", name)
    try:
        raise OSError(5, "cannot read", name)
    except OSError:
        LOGGER.exception("failed on %s", name)
    if form == "json":
        events = [json.loads(line) for line in logged(path)]
        assert [event["level"] for event in events] == ["warning", "error"]
        assert "Traceback" in events[1]["exception"]
        messages = [event["message"] for event in events]
        assert messages[0].endswith("forged\\r\\x1b[31m\\xff")
    else:
        events = [line for line in logged(path) if not line.startswith("    ")]
        assert len(events) == 2
        assert all("forged\\r\\x1b[31m\\xff" in line for line in events)
    assert path.read_text().isascii()


def test_the_log_is_private_even_if_it_was_not(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    path.touch(0o644)
    log.setup(LogSettings(), path=path, foreground=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("")
    (tmp_path / "daemon.log").symlink_to(precious)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        log.setup(LogSettings(), path=tmp_path / "daemon.log", foreground=False)


def test_the_log_is_bounded_and_what_is_rotated_stays_private(tmp_path: Path) -> None:
    log.setup(LogSettings(), path=tmp_path / "daemon.log", foreground=False)
    for _ in range(35):
        LOGGER.info("%s", "x" * (1 << 20))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(file.stat().st_size <= 10 << 20 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_a_full_disk_under_the_log_stops_nobody(tmp_path: Path) -> None:
    code = """
import logging, resource, sys
from pathlib import Path
from monarch import log
from monarch.settings import LogSettings
log.setup(LogSettings(), path=Path(sys.argv[1]), foreground=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
logging.getLogger("monarch").error("nowhere")
"""
    path = tmp_path / "daemon.log"
    run = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, timeout=30, check=True
    )
    assert path.read_text() == ""
    assert b"Logging error" not in run.stderr


def test_a_device_as_the_log_keeps_its_mode() -> None:
    before = os.stat("/dev/null").st_mode
    log.setup(LogSettings(), path=Path("/dev/null"), foreground=False)
    LOGGER.info("nowhere")
    assert os.stat("/dev/null").st_mode == before


def test_in_the_foreground_it_is_told_on_stderr_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "daemon.log"
    log.setup(LogSettings(), path=path, foreground=True)
    LOGGER.error("both")
    assert capsys.readouterr().err == path.read_text()


def test_a_second_setup_replaces_the_first(tmp_path: Path) -> None:
    log.setup(LogSettings(), path=tmp_path / "one", foreground=False)
    log.setup(LogSettings(level="error"), path=tmp_path / "two", foreground=False)
    LOGGER.warning("not told")
    LOGGER.error("told")
    assert logged(tmp_path / "one") == []
    assert len(logged(tmp_path / "two")) == 1


def test_a_fault_that_repeats_is_told_once_an_interval_with_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    limiter = log.Limiter(60.0, clock=lambda: now)
    for _ in range(5):
        limiter.warning(LOGGER, "tier1", "tier %s fails", "tier1")
    limiter.warning(LOGGER, "tier2", "tier %s fails", "tier2")
    now = 159.9
    limiter.warning(LOGGER, "tier1", "tier %s fails", "tier1")
    now = 160.0
    limiter.warning(LOGGER, "tier1", "tier %s fails", "tier1")
    assert [record.getMessage() for record in caplog.records] == [
        "tier tier1 fails",
        "tier tier2 fails",
        "tier tier1 fails (5 more like this since the last)",
    ]


def test_many_kinds_of_faults_take_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    limiter = log.Limiter(60.0, clock=lambda: 0.0)
    for key in range(3000):
        limiter.warning(LOGGER, key, "fault")
    caplog.clear()
    # The latest are still known, the oldest forgotten: told once too often, never too little.
    limiter.warning(LOGGER, 2999, "fault")
    limiter.warning(LOGGER, 0, "fault")
    assert len(caplog.records) == 1
