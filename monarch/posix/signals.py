"""Which signals end a command.

A shell ignores SIGINT for a command started with ``&``, and ``nohup`` ignores SIGHUP. A program
inherits ignored signals and keeps them so: such a command ends on SIGTERM only.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The time in which a command heeds an ending signal unless a call hangs, in seconds; and its exit
# code.
_PATIENCE_S = 5.0
_INTERRUPTED = 130
# Raises KeyboardInterrupt in the main thread while that does not get ending signals.
_FORWARDED = signal.SIGUSR2
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


class Interruption:
    """Ending signals as one KeyboardInterrupt, which comes only where it is heeded."""

    def __init__(self) -> None:
        self._has_come = False
        self._is_heeded = False

    def note(self, *_: object) -> None:
        """Handles a signal. Further ones do not interrupt the clean-up after the first one."""
        is_first, self._has_come = not self._has_come, True
        if is_first and self._is_heeded:
            raise KeyboardInterrupt

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Raises KeyboardInterrupt if a signal has come, or comes in this block."""
        self._is_heeded = True
        try:
            self.require_none()
            yield
        finally:
            self._is_heeded = False

    def require_none(self) -> None:
        """Raises KeyboardInterrupt if a signal has come."""
        if self._has_come:
            raise KeyboardInterrupt


@contextmanager
def interruptible_where_heeded() -> Iterator[Interruption]:
    """As ``interruptible``, for a command that starts processes and makes temporary files: between
    the blocks in which it heeds a signal it cannot lose one of them. A signal that comes after the
    last of these blocks raises KeyboardInterrupt at the end."""
    interruption = Interruption()
    before = {number: signal.signal(number, interruption.note) for number in ending()}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    interruption.require_none()


@contextmanager
def interruptible_at_once() -> Iterator[None]:
    """As ``interruptible``, for a command that may be killed at any moment, and whose calls may
    hang. If the block has not ended five seconds after an ending signal, the process ends with the
    exit code 130: neither the main thread nor another one can be interrupted in a call that hangs.
    """
    numbers = ending()
    handlers = {number: signal.signal(number, _ignore) for number in numbers}
    handlers[_FORWARDED] = signal.signal(_FORWARDED, signal.default_int_handler)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    has_ended = threading.Event()
    arguments = (reading, numbers, threading.get_ident(), has_ended)
    watch = threading.Thread(target=_watch, args=arguments, daemon=True)
    watch.start()
    # The kernel prefers the main thread, which takes a signal only when its call has ended.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        # A further signal does not interrupt the rest.
        signal.signal(_FORWARDED, _ignore)
        has_ended.set()
        signal.set_wakeup_fd(wakeup)
        # The end of the pipe ends the thread.
        os.close(writing)
        watch.join()
        os.close(reading)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ignore(*_: object) -> None:
    """The thread of ``_watch`` reads the number of the signal."""


def _watch(
    reading: int, numbers: tuple[signal.Signals, ...], main: int, has_ended: threading.Event
) -> None:
    """Forwards ending signals, whose numbers it reads, to the main thread. Ends the process if that
    thread does not heed them."""
    while received := os.read(reading, 64):
        if has_ended.is_set() or not any(number in numbers for number in received):
            continue
        signal.pthread_kill(main, _FORWARDED)
        if not has_ended.wait(_PATIENCE_S):
            # A progress bar may have hidden the cursor.
            shown = "\x1b[?25h\n" if os.isatty(2) else ""
            os.write(2, f"{shown}monarch: interrupted: a file system does not answer\n".encode())
            os._exit(_INTERRUPTED)


def heed_all() -> None:
    """Makes no ending signal ignored: for a daemon in its own session, which no terminal ends."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
