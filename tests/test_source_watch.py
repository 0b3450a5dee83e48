"""A mount gives up when nothing shows that its source answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from monarch.cli import source_watch
from monarch.cli.output import Scanning
from monarch.cli.source_watch import watched
from monarch.types import READING_CHANGES, SHOWING_CHANGES

STEPS = 1000


class _Scan(threading.Event):
    """Ends each step of the watch at once; the scan goes ahead in the first steps."""

    def __init__(self, scanning: Scanning) -> None:
        super().__init__()
        self.scanning = scanning
        self.steps = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.steps += 1
        # The progress of a scan that hangs may be repeated.
        self.scanning(min(self.steps, STEPS), None, "names")
        return False


@pytest.mark.promise(346)
def test_a_scan_that_goes_ahead_is_an_answer_although_each_question_hangs(tmp_path: Path) -> None:
    scanning, answered, given_up = Scanning(tmp_path), threading.Event(), []
    scanning.advanced = answered.set
    scan = _Scan(scanning)
    source_watch._wait(tmp_path, lambda: given_up.append(scan.steps), answered, scan)
    assert given_up == [STEPS + source_watch._HUNG_STEPS]


def test_the_watch_takes_answers_of_the_block(tmp_path: Path) -> None:
    with watched(tmp_path, lambda: None) as answered:
        answered()


@pytest.mark.parametrize("words", [READING_CHANGES, SHOWING_CHANGES])
def test_a_journal_that_is_read_is_shown_and_no_answer_of_the_source(
    words: str, tmp_path: Path
) -> None:
    scanning, answers, shown = Scanning(tmp_path), list[None](), list[str]()
    scanning.advanced = lambda: answers.append(None)
    scanning.bar = lambda done, total, words: shown.append(words)
    scanning(4096, 8192, words)
    assert (shown, answers, scanning.entries) == ([words], [], 0)
