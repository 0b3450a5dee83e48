"""Which signals end a command.

A shell ignores SIGINT for what it starts with ``&``, and ``nohup`` ignores SIGHUP. Programs inherit
that, and it is kept: such a command ends on SIGTERM.
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
    """Have every signal that ends the process do so as Ctrl-C does, so that nothing is left."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heed_all() -> None:
    """Have no ending signal ignored: for a daemon in a session of its own, which no terminal ends.

    A signal that is sent to it is meant for it.
    """
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
