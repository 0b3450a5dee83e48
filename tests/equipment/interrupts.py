"""Exceptions as a signal handler raises them: between any two lines of the thread of a test."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """What the handler raises."""


@contextmanager
def raised_in_line(number: int, modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """Raises Interrupted in this thread before the line ``number`` of ``modules`` that it runs in
    this block, counted from 0."""
    files = {module.__file__ for module in modules}
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise Interrupted
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)


def interrupted_in_each_line(call: Callable[[], T], *modules: ModuleType) -> tuple[T, int]:
    """Calls ``call`` again and again, and raises Interrupted in the first line of ``modules`` that
    it runs, then in the second one, and so on. Returns the result of the call that ran to its end,
    and the number of calls before it."""
    number = 0
    # What the collector calls could run lines of these modules too, and an exception there is lost.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        while True:
            try:
                with raised_in_line(number, modules):
                    # A generator: Python 3.11 takes an exception for still handled if another one
                    # is raised in the ``break`` of its handler. What is handled in a generator
                    # ends with it, and no later test logs it as the context of its own.
                    return next(call() for _ in range(1)), number
            except Interrupted:
                number += 1
    finally:
        if was_enabled:
            gc.enable()
