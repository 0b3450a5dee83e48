"""Inodes that a copy has found changed are compared, and an error ends nothing."""

from __future__ import annotations

import trio
import trio.testing

from monarch.daemon.freshness import ChangedInodes
from monarch.errors import SourceError
from monarch.types import Ino


async def test_each_inode_is_compared_in_its_order_also_after_an_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    changed, compared = ChangedInodes(), list[Ino]()

    async def look_again(ino: Ino) -> None:
        compared.append(ino)
        if ino == 1:
            raise SourceError("gone")

    changed.add(Ino(1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(changed.run, look_again)
        await trio.sleep(1)
        changed.add(Ino(2))
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert compared == [1, 2]


def test_adding_never_waits_and_the_number_is_limited() -> None:
    changed = ChangedInodes()
    for ino in range(5000):
        changed.add(Ino(ino))
