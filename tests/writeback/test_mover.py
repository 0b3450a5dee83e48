"""How the bytes of staged files move: in turns, after readers of the source, and read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from monarch.types import Identity
from monarch.writeback.mover import TURN_BYTES, Courtesy, Mover

VERSION = Identity(1, 2, 3, 4)


class StagedFile:
    """A staged file of ``size`` bytes. ``done`` are the calls and waits, in their order."""

    def __init__(self, size: int, *, verify: bool = True) -> None:
        self.size, self.moved, self.read = size, 0, 0
        self.done: list[str] = []
        self.moving: list[int] = []
        self.mover = Mover(cast(Any, self), cast(Courtesy, self), verify=verify)
        self.trouble: OSError | None = None

    # A thread pool.
    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        self.done.append("hop")
        return call(*args)

    # Courtesy.
    async def wait(self, count: int) -> None:
        self.moving.append(self.mover.moved_bytes)
        self.done.append(f"wait {count}")

    # A staged file.
    def turn(self, count: int) -> int:
        if self.trouble is not None:
            raise self.trouble
        moved = min(count, self.size - self.moved)
        self.moved += moved
        return moved

    def finish(self, apply: Callable[[int], None]) -> None:
        apply(0)

    def verify(self, count: int) -> int:
        read = min(count, self.size - self.read)
        self.read += read
        return read

    async def move(self) -> None:
        await self.mover.move(cast(Any, self), self.size, lambda fd: self.done.append("attributes"))


async def test_a_small_file_moves_in_one_turn() -> None:
    staged = StagedFile(10)
    await staged.move()
    assert staged.done == ["wait 10", "hop", "attributes"]
    assert (staged.moved, staged.read, staged.mover.moved_bytes) == (10, 10, 0)


@pytest.mark.parametrize("verify", [False, True])
async def test_a_large_file_lets_readers_go_first_before_each_turn(verify: bool) -> None:
    staged = StagedFile(2 * TURN_BYTES + 5, verify=verify)
    await staged.move()
    waits = [each for each in staged.done if each.startswith("wait")]
    assert waits == [f"wait {TURN_BYTES}"] * 4 + ["wait 0"] * (3 * verify)
    assert staged.moving[:4] == [0, TURN_BYTES, 2 * TURN_BYTES, staged.size]
    assert staged.read == staged.size * verify
    assert staged.mover.moved_bytes == 0


async def test_a_file_that_fails_is_not_moving_any_more() -> None:
    staged = StagedFile(10)
    staged.trouble, staged.moved = OSError(28, "full"), 4
    with pytest.raises(OSError, match="full"):
        await staged.move()
    assert staged.mover.moved_bytes == 0
