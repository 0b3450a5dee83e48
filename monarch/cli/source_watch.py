"""Watches whether a source answers while a command needs it and may be in a call that hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from monarch.cli.output import remark
from monarch.errors import SourceError
from monarch.text import escape_text

# The interval of the questions. The number of intervals without an answer after which a line says
# so, and after which the command gives up: a process that was stopped does not count the time.
_STEP_S = 1.0
_SLOW_STEPS, _HUNG_STEPS = 5, 60


@contextmanager
def watched(source: Path, give_up: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Asks ``source`` every second, while the block runs, whether it answers. If it has not done so
    for five seconds, a line on stderr says that; after a minute ``give_up`` is called in a thread.
    At the end of the block the threads have ended, except one whose question hangs.

    The block calls what it gets when the source has answered it: on a source with several servers
    the question may hang while a scan goes ahead."""
    ended, answered = threading.Event(), threading.Event()
    asking = threading.Thread(target=_ask, args=(source, answered, ended), daemon=True)
    waiting = threading.Thread(target=_wait, args=(source, give_up, answered, ended), daemon=True)
    asking.start()
    waiting.start()
    try:
        yield answered.set
    finally:
        ended.set()
        waiting.join()
        asking.join(_STEP_S)


def unanswered(source: Path) -> SourceError:
    """The error of a mount that has given up."""
    return SourceError(
        f"source {os.fspath(source)!r} has not answered for {_HUNG_STEPS * _STEP_S:g} s: nothing is"
        " mounted",
        hint="repair its file system or its network (`timeout 5 stat SOURCE`), and mount again",
    )


def _ask(source: Path, answered: threading.Event, ended: threading.Event) -> None:
    while not ended.wait(_STEP_S):
        # An error is an answer. The kernel may answer a stat from its cache.
        with suppress(OSError):
            os.statvfs(source)
            with os.scandir(source) as entries:
                next(entries, None)
        answered.set()


def _wait(
    source: Path, give_up: Callable[[], None], answered: threading.Event, ended: threading.Event
) -> None:
    steps = 0
    while not ended.wait(_STEP_S):
        steps = 0 if answered.is_set() else steps + 1
        answered.clear()
        if steps == _SLOW_STEPS:
            remark(
                f"monarch: source {escape_text(os.fspath(source))} does not answer yet: the mount"
                f" waits for it, at most {_HUNG_STEPS * _STEP_S:g} s"
            )
        if steps == _HUNG_STEPS:
            give_up()
            return
