"""The source of a mount that shares its copies with the other nodes of a job.

A small file that another node owns is requested from that node. Its bytes count only if they have
the size and the digest that the owner has given. Whatever fails, the file is read from the source
itself: a peer may save a read of the source, and never causes an error.

If the owner does not answer, the next member in the order of the hash owns the file.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVarTuple, Unpack

from monarch.namespace.snapshot import Snapshot
from monarch.peers.answers import digest_of
from monarch.peers.client import NOT_KEPT, OK, Answer, PeerClient
from monarch.peers.connections import DatapathConnections, PeerFetcher, microseconds
from monarch.peers.ownership import Ownership
from monarch.peers.ranges import Ranges
from monarch.peers.requests import Requests
from monarch.posix.buckets import BUCKETS, buckets
from monarch.posix.thread_pool import waiting_elsewhere
from monarch.telemetry.log import Limiter
from monarch.tiers.contents import copy_name
from monarch.tiers.source import Fetched, Source
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")

# A member that does not keep a file is asked again after one to two times this, in seconds.
_NOT_KEPT_S = 60
_TURNS = 254
# Scores of members for files that are computed at once: about a millisecond.
_AT_ONCE = 1 << 16
# Scores of members that are computed at the mount at most: some 3 s. With more of them each file
# counts with the part of its bytes that a node owns on average.
_MOST_SCORES = 1 << 29
# Why the datapath got no bytes of a file: in the place of the member that it has asked. The same
# numbers are in _peers.h.
_GIVER_NOT_KEPT, _GIVER_SLOW = 0xFFFE, 0xFFFF
# Files of other members that this node keeps although these are asked again: some MiB.
_MOST_TAKEN_OVER = 100_000


class Peers:
    """The other members as this node sees them. ``clients`` are in the order of the members of
    ``ownership``, None for this node. Files of up to ``largest`` bytes are shared as a whole, and
    larger ones in ``ranges``, which use ``most_held`` bytes of memory; None: not at all. A member
    may read a file from the source for ``coming_s`` seconds before this node does so, too. The
    first ``replicas`` members in the order of a file own it: the first one reads the source, and
    the other owners get the bytes from those before them. All methods may run in any thread; only
    ``fetch`` waits."""

    def __init__(
        self,
        snapshot: Snapshot,
        ownership: Ownership,
        clients: Sequence[PeerClient | None],
        *,
        largest: int,
        coming_s: float,
        replicas: int = 1,
        most_held: int | None = None,
    ) -> None:
        self._replicas = min(replicas, len(clients))
        self._snapshot = snapshot
        self._ownership = ownership
        self._requests = requests = Requests(clients, coming_s=coming_s)
        self.clients, self._own = requests.clients, requests.own
        self.received, self.failures = requests.received, requests.failures
        self.source_took = requests.source_took
        self.close = requests.close
        self._largest = largest
        self.ranges: Ranges | None = None
        if most_held is not None:
            self.ranges = Ranges(
                snapshot,
                ownership,
                requests,
                largest=largest,
                replicas=self._replicas,
                most_held=most_held,
            )
        # The digest of each file whose owner has given it, 0: unknown; and when the owner answered
        # that it does not keep the file, 0: it has not. Pages that are not written need no memory.
        self._digests = np.zeros(snapshot.entries + 1, np.uint64)
        self._not_kept = np.zeros(snapshot.entries + 1, np.uint8)
        # One more than the member that the datapath asks for a file, 0: none.
        self._givers = np.zeros(snapshot.entries + 1, np.uint16)
        self._fetcher: PeerFetcher | None = None
        # One more than each owner of each file, 0: not computed; and the files whose owners are
        # computed at once.
        self._owners = np.zeros((snapshot.entries + 1, self._replicas), np.uint16)
        self._at_once = max(1, _AT_ONCE // len(self.clients))
        # Whether this node owns each file while all members answer; None: too many to compute.
        scores = snapshot.entries * len(self.clients)
        self._is_own = np.zeros(snapshot.entries + 1, bool) if scores <= _MOST_SCORES else None
        # Files whose owner has just failed to give them: this node is the next one.
        self._taken_over: set[Ino] = set()
        self._limiter = Limiter(log)

    @property
    def not_kept(self) -> int:
        """The requests to which the owner answered that it does not keep the file."""
        return self._requests.not_kept

    def fetch_by(self, datapath: PeerFetcher) -> None:
        """Lets the datapath fetch files whose owner is known, and files that a member has given.
        Before it is started."""
        requests = [None if client is None else client.request for client in self.clients]
        # With several owners this node may have to keep a file that another one has, too.
        gives_bytes = self._replicas > 1
        datapath.set_peers(self._givers, self._digests, requests, gives_bytes=gives_bytes)
        for index, client in enumerate(self.clients):
            if client is not None:
                client.connections = DatapathConnections(datapath, index)
        self._fetcher = datapath

    def catch_up(self) -> None:
        """Counts what the datapath has fetched."""
        if self._fetcher is None:
            return
        for index, client in enumerate(self.clients):
            if client is None:
                continue
            limit_us = microseconds(client.breaker.limit_s)
            fair_us = microseconds(client.breaker.fair_s)
            files, nbytes, slow, late_us, latencies_us = self._fetcher.received(
                index, limit_us, fair_us
            )
            if files or slow or late_us:
                client.used([latency / 1e6 for latency in latencies_us], slow, late_us / 1e6)
                with self._requests.counting:
                    self.received[index].files += files
                    self.received[index].nbytes += nbytes
                    self.received[index].failed += slow
                    self.failures.update({"slow": slow} if slow else {})

    @property
    def share(self) -> float:
        """The part of the files that this node owns while all members answer."""
        members = self._ownership.members
        total = sum(member.weight for member in members)
        return min(1.0, self._replicas * members[self._own].weight / total)

    def curve(self) -> npt.NDArray[np.uint64]:
        """The bytes in each bucket of the files that this node keeps while all members answer, as
        ``kept_bytes`` counts them. Reads the whole table of the snapshot, and computes what would
        take too long at an open."""
        curve = np.zeros(BUCKETS, np.uint64)
        end = self._snapshot.entries + 1
        for start in range(1, end, _AT_ONCE):
            slots = range(start, min(start + _AT_ONCE, end))
            inos, sizes, keys = self._snapshot.files_in(slots)
            if self._is_own is not None:
                self._is_own[inos] = self._ownership.owns(inos, self._own, replicas=self._replicas)
            if self.ranges is not None:
                self.ranges.prepare(inos, sizes)
            np.add.at(curve, buckets(keys), self.kept_bytes(inos, sizes))
        return curve

    def kept_bytes(
        self, inos: npt.NDArray[np.int64], sizes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """The bytes of each file that this node keeps while all members answer: its size, and 0 if
        only other nodes keep it; of a large file its part of the blocks, on average. Only after
        ``curve``."""
        is_small = sizes <= np.uint64(self._largest)
        part = (sizes * self.share).astype(np.uint64)
        if self.ranges is None:
            part = np.where(is_small, part, sizes)
        if self._is_own is None:
            return part
        return np.where(is_small, sizes * self._is_own[inos], part).astype(np.uint64)

    def given(self) -> Iterator[Ino]:
        """The files that came from other nodes, at least in part. It may change meanwhile."""
        for start in range(0, len(self._digests), _AT_ONCE):
            for offset in np.flatnonzero(self._digests[start : start + _AT_ONCE]).tolist():
                yield Ino(start + offset)
        if self.ranges is not None:
            yield from self.ranges.known()

    def is_shared(self, ino: Ino, size: int) -> bool:
        """Whether a file has an owner: it is in the snapshot, and small."""
        return 1 <= ino <= self._snapshot.entries and 0 < size <= self._largest

    def owns(self, ino: Ino) -> bool:
        """Whether this node owns a file now: of the members before it in the order, too few answer
        to own it."""
        if ino in self._taken_over:
            return True
        now, before = time.monotonic(), 0
        for index in self._order(ino):
            client = self.clients[index]
            if client is None:
                return True
            before += not client.breaker.is_out(now)
            if before == self._replicas:
                return False
        return True

    def fetch(self, ino: Ino, identity: Identity) -> bytes | None:
        """The bytes of a file from its owner; None if it must be read from the source."""
        if not self.is_shared(ino, identity.size):
            return None
        if (mark := int(self._givers[ino])) >= _GIVER_NOT_KEPT:
            # The datapath has asked the member, and this open has waited for it.
            self._givers[ino] = 0
            if mark == _GIVER_NOT_KEPT:
                self._note_not_kept(ino)
            else:
                # The limit of the member must not wait for the next count.
                self.catch_up()
            return None
        if not self._may_ask(ino, identity):
            return None
        asked = self._requests.ask(
            self._asked_for(ino), partial(self._from, ino=ino, size=identity.size)
        )
        if asked.takes_over:
            self._take_over(ino)
        if asked.content is not None:
            self._givers[ino] = asked.giver + 1
            with self._requests.counting:
                self.received[asked.giver].files += 1
        return asked.content

    def _asked_for(self, ino: Ino) -> Iterable[int]:
        """The members that are asked for a file, one after the other, up to this node. An owner
        asks only those before it, so that no two members wait for each other. The other nodes begin
        with different owners."""
        order = self._order(ino)
        owners = list(islice(order, self._replicas))
        if self._own in owners:
            return owners
        turn = (ino + self._own) % len(owners)
        return chain(owners[turn:], owners[:turn], order)

    def _order(self, ino: Ino) -> Iterator[int]:
        """The members in the order in which they own a file."""
        owners: list[int] = self._owners[ino].tolist()
        # Another thread may have written only some of them.
        if 0 in owners:
            owners = self._find_owners(ino)
        yield from (owner - 1 for owner in owners)
        # The scores of all members, only if the owners do not answer.
        yield from self._ownership.order(ino)[self._replicas :]

    def _find_owners(self, ino: Ino) -> list[int]:
        """Computes the owners of a file and of those beside it, which the datapath then asks.
        Returns the row of the file."""
        first = ino - ino % self._at_once
        inos = np.arange(first, min(first + self._at_once, len(self._owners)))
        owners = self._ownership.first(inos, self._replicas) + 1
        # As in ``_asked_for``.
        turns = (inos + self._own) % self._replicas
        givers = owners[np.arange(len(inos)), turns]
        self._givers[inos] = np.where((owners == self._own + 1).any(axis=1), 0, givers)
        self._owners[inos] = owners
        found: list[int] = owners[ino - first].tolist()
        return found

    def _take_over(self, ino: Ino) -> None:
        if len(self._taken_over) >= _MOST_TAKEN_OVER:
            self._taken_over.clear()
        self._taken_over.add(ino)

    def _may_ask(self, ino: Ino, identity: Identity) -> bool:
        """Whether a member may have the file: in this version, and kept by its owner."""
        mark = int(self._not_kept[ino])
        if mark and (_turn() - mark) % _TURNS <= 1:
            return False
        # Members know the version of the snapshot only.
        return self._snapshot.attributes(ino).identity == identity

    def _from(self, client: PeerClient, ino: Ino, size: int) -> bytes | None:
        """The bytes of a file from a member; None if the member does not keep it. Raises
        PeerFailed."""
        # Without its digest the copy is of no use, and the daemon of the member knows it.
        names = [f"c/{copy_name(ino)}"] if self._digests[ino] else []
        for name in (*names, f"d/{ino}"):
            answer = self._requests.answer(client, name, size)
            if answer.status == NOT_KEPT:
                self._givers[ino] = 0
                self._note_not_kept(ino)
                return None
            if self._is_right(answer, ino):
                client.breaker.right()
                return answer.data
            # The member may have made its copy anew, also of another version: its daemon knows.
            self._digests[ino] = self._givers[ino] = 0
        self._limiter.warning(
            f"damaged {client.name}",
            "node %s gave other bytes of inode %d than it should: the source is read instead",
            *(client.name, ino),
        )
        raise client.damaged()

    def _note_not_kept(self, ino: Ino) -> None:
        self._not_kept[ino] = _turn()
        self._requests.note_not_kept()

    def _is_right(self, answer: Answer, ino: Ino) -> bool:
        """Whether an answer has the bytes of its digest, or of the one that is known."""
        found = digest_of(answer.data)
        wanted = int(self._digests[ino]) if answer.digest is None else answer.digest
        if answer.status != OK or found != wanted:
            return False
        self._digests[ino] = found
        return True


class PeerSource(Source):
    """A directory whose files other nodes may give. ``peers`` is None until the parts of the mount
    are built."""

    def __init__(self, path: bytes, close: Callable[[int], None] = os.close) -> None:
        super().__init__(path, close)
        self.peers: Peers | None = None
        self._limiter = Limiter(log)
        # The file of each call for which other nodes are asked now.
        self._asking: list[Ino] = []

    @property
    def directory(self) -> int:
        # The datapath would read each file from the source, unless another node gives it.
        return -1

    def fetch_shared(self, path: bytes, identity: Identity, ino: Ino) -> Fetched:
        """As ``fetch``; of a file from another node the numbers of calls are 0."""
        content = None
        if self.peers is not None:
            content = self._or_none(self.peers.fetch, ino, identity)
        if content is not None:
            return Fetched(content, 0, 0)
        began_s = time.monotonic()
        fetched = self.fetch(path, identity)
        self.took(time.monotonic() - began_s)
        return fetched

    def read_shared(self, ino: Ino, identity: Identity, offset: int, size: int) -> bytes | None:
        ranges = None if self.peers is None else self.peers.ranges
        if ranges is None or not ranges.is_shared(ino, identity):
            return None
        return self._or_none(ranges.read, ino, offset, size)

    def asks_others(self, ino: Ino) -> bool:
        return ino in self._asking

    def took(self, seconds: float) -> None:
        if self.peers is not None:
            self.peers.source_took(seconds)

    def _or_none(
        self, call: Callable[[Ino, Unpack[Args]], bytes | None], ino: Ino, *args: Unpack[Args]
    ) -> bytes | None:
        """The result of a request to other nodes for a file. The source is the truth, whatever
        happens with them."""
        self._asking.append(ino)
        try:
            with waiting_elsewhere():
                return call(ino, *args)
        except Exception:
            self._limiter.exception(
                "unexpected",
                "internal error in a request to another node: the source is read instead. This is a"
                " bug, please report it",
            )
            return None
        finally:
            self._asking.remove(ino)


def _turn() -> int:
    """A number from 1 on for each ``_NOT_KEPT_S`` seconds, again and again."""
    return int(time.monotonic() // _NOT_KEPT_S) % _TURNS + 1
