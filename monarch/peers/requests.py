"""Requests to the members of the job in the order in which they own a file or a part of it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from monarch.peers.breaker import SourceTime
from monarch.peers.client import COMING, Answer, PeerClient, PeerFailed, until_known

# Members that are asked for one file: the owner, and the next one.
_ASKED = 2
# The last reads of the source that tell how long one may take.
_READS = 64
# An answer may take so many times what a read of the source takes before it is late.
_TIMES_SOURCE = 4
# A fetch by a member may take at least this long before it is late, in seconds.
_LEAST_COMING_S = 1.0


@dataclass(slots=True)
class Received:
    """What one member has given: files, the bytes of files and spans, and requests that failed."""

    files: int = 0
    nbytes: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """The result of requests. ``content`` has come from ``giver``; None: the source must be read.
    ``takes_over``: the members that own the file before this node did not answer."""

    content: bytes | None = None
    giver: int = -1
    takes_over: bool = False


class Requests:
    """The members, None for this node. A member may read from the source for ``coming_s`` seconds.
    All methods may run in any thread."""

    def __init__(self, clients: Sequence[PeerClient | None], *, coming_s: float) -> None:
        self.clients = tuple(clients)
        self.own = self.clients.index(None)
        self._coming_s = coming_s
        self.counting = threading.Lock()
        self.received = [Received() for _ in clients]
        self.failures: Counter[str] = Counter()
        # Requests to which the owner answered that it does not keep the file or span.
        self.not_kept = 0
        self._reads_s: deque[float] = deque(maxlen=_READS)
        self._source = SourceTime()
        for client in self.clients:
            if client is not None:
                client.breaker.source = self._source

    def source_took(self, seconds: float) -> None:
        """Records a read of the source by this node."""
        self._reads_s.append(seconds)
        self._source.seconds = _TIMES_SOURCE * max(self._reads_s.copy())

    def ask(self, order: Iterable[int], request: Callable[[PeerClient], bytes | None]) -> Asked:
        """Asks the members in this order, up to this node. ``request`` returns None if the member
        does not keep the file, and raises PeerFailed."""
        asked = 0
        for index in order:
            client = self.clients[index]
            if client is None:
                return Asked(takes_over=asked > 0)
            if asked == _ASKED:
                break
            if not client.breaker.admits(time.monotonic()):
                continue
            asked += 1
            try:
                content = request(client)
            except PeerFailed as error:
                self.failed(index, error.kind)
                is_down = error.kind == "unreachable" or client.breaker.is_out(time.monotonic())
                if not is_down or error.kind == "damaged":
                    # The member is there: another one would keep the file in vain.
                    break
                continue
            if content is not None:
                with self.counting:
                    self.received[index].nbytes += len(content)
            return Asked(content, index)
        return Asked()

    def answer(self, client: PeerClient, name: str, size: int, offset: int | None = None) -> Answer:
        """The answer of a member that may have to fetch the bytes. ``offset``: as for
        ``PeerClient.get``. Raises PeerFailed."""
        began_s = time.monotonic()
        answer = client.get(name, size, offset)
        if answer.status != COMING:
            return answer
        fair_s = max(_LEAST_COMING_S, client.breaker.fair_s)
        until_s = began_s + self._coming_s
        try:
            answer = until_known(
                partial(client.get, name, size, offset), lambda: time.monotonic() > until_s
            )
            if answer.status == COMING:
                raise client.too_late()
            return answer
        finally:
            client.late(time.monotonic() - began_s - fair_s)

    def failed(self, index: int, kind: str) -> None:
        with self.counting:
            self.received[index].failed += 1
            self.failures[kind] += 1

    def note_not_kept(self) -> None:
        with self.counting:
            self.not_kept += 1

    def close(self) -> None:
        for client in self.clients:
            if client is not None:
                client.close()
