"""Several ranks in one process: threads that exchange the messages of real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from monarch.frameworks.group import Group

T = TypeVar("T")


def in_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """What ``work`` returns in each rank. The first error of one ends the waiting of all."""
    meeting = threading.Barrier(size)
    messages: list[Any] = [b""] * size
    answers: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def all_gather(message: bytes) -> list[bytes]:
            messages[rank] = message
            meeting.wait(60)
            gathered = list(messages)
            meeting.wait(60)
            return gathered

        try:
            answers[rank] = work(Group(rank, size, all_gather))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return answers
