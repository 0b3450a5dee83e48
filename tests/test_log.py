"""The log: private, of limited size, with lines that cannot be forged, and without floods."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from monarch.config.settings import LogSettings
from monarch.telemetry import log
from tests.equipment.slowfs import SlowSource

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
    LOGGER.debug("below the level")
    (line,) = logged(path)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info monarch\.test: copied 3 files", line
    )


@pytest.mark.fault("S9")
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


def test_a_full_disk_under_the_log_stops_no_request(tmp_path: Path) -> None:
    code = """
import logging, resource, sys
from pathlib import Path
from monarch.telemetry import log
from monarch.config.settings import LogSettings
from tests.equipment.slowfs import SlowSource
log.setup(LogSettings(), path=Path(sys.argv[1]), foreground=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
logging.getLogger("monarch").error("nowhere")
"""
    path = tmp_path / "daemon.log"
    run = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, timeout=100, check=True
    )
    assert path.read_text() == ""
    assert b"Logging error" not in run.stderr


def test_a_device_as_the_log_keeps_its_mode() -> None:
    before = os.stat("/dev/null").st_mode
    log.setup(LogSettings(), path=Path("/dev/null"), foreground=False)
    LOGGER.info("nowhere")
    assert os.stat("/dev/null").st_mode == before


def test_in_the_foreground_lines_are_also_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "daemon.log"
    log.setup(LogSettings(), path=path, foreground=True)
    LOGGER.error("both")
    assert capsys.readouterr().err == path.read_text()


def logged_in_the_foreground(path: Path, form: str, *, journal: bool) -> list[str]:
    """What a process in the foreground writes to its stderr, which may be that of a service."""
    code = """
import logging, sys
from pathlib import Path
from monarch.telemetry import log
from monarch.config.settings import LogSettings
from tests.equipment.slowfs import SlowSource
settings = LogSettings(format=sys.argv[2], level="debug")
log.setup(settings, path=Path(sys.argv[1]), foreground=True)
logger = logging.getLogger("monarch.test")
logger.debug("a")
logger.info("b")
logger.warning("c\\nd")
try:
    raise OSError(5, "cannot read")
except OSError:
    logger.exception("e")
"""
    reading, writing = os.pipe()
    status = os.fstat(writing)
    # As systemd does; a program that it has started may have its own output elsewhere.
    stream = f"{status.st_dev}:{status.st_ino if journal else 1}"
    with open(reading) as lines:
        subprocess.run(
            [sys.executable, "-c", code, path, form],
            env={**os.environ, "JOURNAL_STREAM": stream},
            stderr=writing,
            timeout=100,
            check=True,
        )
        os.close(writing)
        return lines.read().splitlines()


@pytest.mark.parametrize("form", ["text", "json"])
def test_in_the_journal_each_line_bears_its_priority_and_no_time(form: str, tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    lines = logged_in_the_foreground(path, form, journal=True)
    assert [line[:3] for line in lines[:4]] == ["<7>", "<6>", "<4>", "<3>"]
    if form == "text":
        assert lines[:4] == [
            *("<7>monarch.test: a", "<6>monarch.test: b"),
            *("<4>monarch.test: c\\nd", "<3>monarch.test: e"),
        ]
        assert len(lines) > 5
        assert all(line.startswith("<3>    ") for line in lines[4:])
    else:
        assert [json.loads(line[3:])["message"] for line in lines] == ["a", "b", "c\\nd", "e"]
    # The file keeps its own time: no handler adds another.
    assert len(logged(path)) == len(lines)
    assert not path.read_text().startswith("<")


def test_a_stream_that_is_not_the_journals_is_for_people(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    assert logged_in_the_foreground(path, "text", journal=False) == logged(path)


def test_the_log_counts_the_exceptions_that_it_wrote(tmp_path: Path) -> None:
    logbook = log.setup(LogSettings(level="error"), path=tmp_path / "daemon.log", foreground=False)
    LOGGER.error("no exception")
    LOGGER.warning("nor this", exc_info=OSError(5, "foreseen"))
    assert logbook.exceptions == 0
    LOGGER.error("this is", exc_info=OSError(5, "unforeseen"))
    assert logbook.exceptions == 1
    assert logbook.path == str(tmp_path / "daemon.log")


@pytest.mark.finding("B20")
@pytest.mark.fault("M6")
def test_exceptions_that_are_held_back_are_counted_all_the_same(tmp_path: Path) -> None:
    logbook = log.setup(LogSettings(level="error"), path=tmp_path / "daemon.log", foreground=False)
    limiter = log.Limiter(LOGGER)
    for _ in range(5):
        try:
            raise IndexError("a bug")
        except IndexError:
            limiter.exception("read", "internal error")
    assert logbook.exceptions == 5
    assert (tmp_path / "daemon.log").read_text().count("Traceback") == 1


def test_a_log_that_cannot_be_written_knows_so_until_it_can_again() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    directory = Path(tempfile.mkdtemp())
    options = ["-o", "size=16k", "tmpfs", str(directory)]
    subprocess.run(["mount", "-t", "tmpfs", *options], check=True)
    try:
        path = directory / "daemon.log"
        logbook = log.setup(LogSettings(level="error"), path=path, foreground=False)
        assert logbook.trouble() is None
        filler = directory / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(1 << 20))
        for _ in range(5):
            LOGGER.error("x" * 1000)
        found = logbook.trouble()
        assert found is not None and found.what == "No space left on device"
        assert logbook.trouble() == found
        filler.unlink()
        assert logbook.trouble() is None
        assert "warning monarch.telemetry.log: lines may be missing here" in path.read_text()
    finally:
        for handler in logging.getLogger().handlers:
            handler.close()
        logging.getLogger().handlers.clear()
        subprocess.run(["umount", "-l", str(directory)], check=True)
        directory.rmdir()


def test_a_second_setup_replaces_the_first(tmp_path: Path) -> None:
    log.setup(LogSettings(), path=tmp_path / "one", foreground=False)
    log.setup(LogSettings(level="error"), path=tmp_path / "two", foreground=False)
    LOGGER.warning("below the level")
    LOGGER.error("above the level")
    assert logged(tmp_path / "one") == []
    assert len(logged(tmp_path / "two")) == 1


def test_a_repeating_fault_is_logged_once_an_interval_with_its_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    limiter = log.Limiter(LOGGER, clock=lambda: now)
    for _ in range(5):
        limiter.warning("tier1", "tier %s fails", "tier1")
    limiter.warning("tier2", "tier %s fails", "tier2")
    now = 159.9
    limiter.warning("tier1", "tier %s fails", "tier1")
    now = 160.0
    limiter.warning("tier1", "tier %s fails", "tier1")
    assert [record.getMessage() for record in caplog.records] == [
        "tier tier1 fails",
        "tier tier2 fails",
        "tier tier1 fails (5 more like this since the last)",
    ]


def test_an_exception_that_repeats_is_one_traceback_an_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    limiter = log.Limiter(LOGGER, clock=lambda: now)
    for _ in range(3):
        try:
            raise OSError(5, "x")
        except OSError:
            limiter.exception("read", "%s failed", "read")
        now += 40
    assert [record.getMessage() for record in caplog.records] == [
        "read failed",
        "read failed (1 more like this since the last)",
    ]
    assert all(record.exc_info and record.levelname == "ERROR" for record in caplog.records)


def test_many_kinds_of_faults_take_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    limiter = log.Limiter(LOGGER, clock=lambda: 0.0)
    for key in range(3000):
        limiter.warning(key, "fault")
    caplog.clear()
    # The latest are still known, the oldest forgotten: rather reported once too often than never.
    limiter.warning(2999, "fault")
    limiter.warning(0, "fault")
    assert len(caplog.records) == 1


@pytest.mark.fault("T14")
def test_a_line_that_its_disk_does_not_take_holds_up_nothing(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    lifted = threading.Event()
    with SlowSource(tmp_path / "backing", tmp_path / "slow") as slow:
        logbook = log.setup(LogSettings(), path=slow.path / "daemon.log", foreground=False)
        LOGGER.info("before")

        def lift() -> None:
            lifted.set()
            slow.rules()

        timer = threading.Timer(20.0, lift)
        slow.rules("hang write .*")
        timer.start()
        for number in range(100):
            LOGGER.info("line %d", number)
        assert not lifted.is_set()
        trouble = logbook.trouble()
        assert trouble is not None and trouble.what == "its disk does not answer"
        timer.cancel()
        slow.rules()
        while logbook.trouble() is not None:
            time.sleep(0.01)
        LOGGER.info("after")
        lines = [line.partition("monarch.")[2] for line in logged(slow.path / "daemon.log")]
    assert lines[:2] == ["test: before", "test: line 0"] and lines[-1] == "test: after"
    assert any("lines may be missing" in line for line in lines)
    for handler in logging.getLogger().handlers:
        handler.close()
