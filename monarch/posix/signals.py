"""Which signals end a command.

A shell ignores SIGINT for a command started with ``&``, and ``nohup`` ignores SIGHUP. A program
inherits ignored signals and keeps them so: such a command ends on SIGTERM only.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ending() -> tuple[signal.Signals, ...]:
    """The signals that end this process: SIGTERM always, others unless they are ignored."""
    return tuple(
        number
        for number in _ENDING
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes every ending signal raise KeyboardInterrupt, so that clean-up code runs."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heed_all() -> None:
    """Makes no ending signal ignored: for a daemon in its own session, which no terminal ends."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
