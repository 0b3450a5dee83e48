"""Copies the bytes of staged files to the source, in turns, so that readers of the source go
first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from monarch.posix.thread_pool import ThreadPool
from monarch.types import Identity
from monarch.units import MiB
from monarch.writeback.courtesy import Courtesy
from monarch.writeback.lots import move_all
from monarch.writeback.staging import Staging

# The number of bytes that one turn in a worker thread moves.
TURN_BYTES = 4 * MiB

Apply = Callable[[int], None]


class Mover:
    """With ``verify`` each staged file is read back."""

    def __init__(self, threads: ThreadPool, courtesy: Courtesy, *, verify: bool) -> None:
        self._threads = threads
        self._courtesy = courtesy
        self._verify = verify
        self._moving: list[Staging] = []

    @property
    def moved_bytes(self) -> int:
        """The bytes of the files under way that have reached the source."""
        return sum(staging.moved for staging in self._moving)

    async def move(self, staging: Staging, size: int, apply: Apply) -> None:
        """Copies the ``size`` bytes of a staged file, sets its attributes with ``apply``, and makes
        it durable. Raises OSError."""
        self._moving.append(staging)
        try:
            await self._courtesy.wait(min(size, TURN_BYTES))
            if size <= TURN_BYTES:
                await self._threads.run(_move_at_once, staging, apply, self._verify)
                return
            while await self._threads.run(staging.turn, TURN_BYTES):
                await self._courtesy.wait(TURN_BYTES)
            await self._threads.run(staging.finish, apply)
            if self._verify:
                while await self._threads.run(staging.verify, TURN_BYTES):
                    await self._courtesy.wait(0)
        finally:
            self._moving.remove(staging)

    async def move_lot(
        self, stagings: Sequence[Staging], applies: Sequence[Apply], size: int
    ) -> list[Identity | OSError]:
        """Copies many small files of ``size`` bytes together, in one turn. Returns the versions of
        their objects after it, or the errors of files that failed."""
        self._moving += stagings
        try:
            await self._courtesy.wait(size)
            return await self._threads.run(
                partial(move_all, stagings, applies, verify=self._verify)
            )
        finally:
            for staging in stagings:
                self._moving.remove(staging)


def _move_at_once(staging: Staging, apply: Apply, verify: bool) -> None:
    while staging.turn(TURN_BYTES):
        pass
    staging.finish(apply)
    while verify and staging.verify(TURN_BYTES):
        pass
