"""Members that were left out are asked whether they are back, though no reader wants their files.

Otherwise the state of a member would remain that of the last request, also long after its return.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import trio

from monarch.peers.client import PeerClient
from monarch.posix.thread_pool import ThreadPool

# The pause between two looks, on average, in seconds. Nodes that have left out a member at the same
# time must not ask it at the same time: an engine answers only so many hellos in a second.
_LOOK_S = 4.0
# Members that are asked at a time. Each takes some seconds at most.
_AT_ONCE = 8


class Probes:
    """Belongs to the event loop. ``clients`` are the members, None for this node."""

    def __init__(self, clients: Sequence[PeerClient | None]) -> None:
        self._clients = [client for client in clients if client is not None]
        self._threads = ThreadPool(_AT_ONCE, "peer probes", abandon=True)

    async def run(self) -> None:
        """Asks the members that are left out, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S * random.uniform(0.5, 1.5))
            await self.look()

    async def look(self) -> None:
        """Asks those whose pause is over."""
        now = time.monotonic()
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                if client.breaker.is_failing and client.breaker.admits(now):
                    nursery.start_soon(self._threads.run, client.greet)
