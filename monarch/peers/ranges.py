"""Large files, whose blocks the nodes of a job share.

Each block has an owner. It reads the block from the source once and keeps it in a partial copy. The
other nodes request spans of it. What a node has from others it keeps in memory for a short time
only: a reader in order needs the rest of a granule soon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt

from monarch.namespace.snapshot import Snapshot
from monarch.peers.client import NOT_KEPT, OK, Answer, PeerClient
from monarch.peers.ownership import Ownership
from monarch.peers.requests import Requests
from monarch.peers.spans import DIGEST_BYTES, Span, granule_digests, short_digest, span_digest
from monarch.placement.parts import BLOCK
from monarch.telemetry.log import Limiter
from monarch.text import MiB
from monarch.tiers.partial import GRANULE
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)

# The items of ``Ownership`` for blocks: no inode number is one of them.
_BLOCKS, _BLOCK_BITS = 1 << 63, 24
# A block that its owner does not keep, or has damaged, is requested again after this, in seconds.
_NOT_KEPT_S = 60.0
# Scores of members for blocks that are computed at once, and for all blocks of a file at its first
# open: about a millisecond. Those of larger files are computed at the mount, up to a number that
# takes some 2 s.
_AT_ONCE, _AT_OPEN, _AT_MOUNT = 1 << 16, 1 << 18, 1 << 29
# The memory for what is known of large files, in bytes: that of 4 TB. Those that were not used for
# the longest time are forgotten then.
_MOST_KNOWN = 256 * MiB
_OVERHEAD = 1024
# The granules of a request ahead of a reader in order, and the readers that are followed.
_AHEAD = 1 * MiB // GRANULE
_FOLLOWED = 64


@dataclass(slots=True, eq=False)
class _Large:
    """What is known of a large file. ``owners`` has a row for each block, with one more than each
    member that owns it, 0: not computed. ``mine`` has one byte for each block, 1 if this node keeps
    it. ``digests`` of the granules that others have
    given, 0: unknown. ``not_kept`` is when each block is requested again, in s."""

    size: int
    owners: npt.NDArray[np.uint16]
    mine: bytearray
    digests: npt.NDArray[np.uint64]
    not_kept: dict[int, float]

    @property
    def nbytes(self) -> int:
        """The most bytes that it uses."""
        return _OVERHEAD + self.digests.nbytes + self.owners.nbytes + len(self.mine)


class Ranges:
    """The large files of ``snapshot``: those of more than ``largest`` bytes. Each block has
    ``replicas`` owners. At most ``most_held`` bytes from others are kept in memory. All methods may
    run in any thread; only ``read`` waits."""

    def __init__(
        self,
        snapshot: Snapshot,
        ownership: Ownership,
        requests: Requests,
        *,
        largest: int,
        replicas: int,
        most_held: int,
    ) -> None:
        self._snapshot = snapshot
        self._ownership = ownership
        self._requests = requests
        self._largest = largest
        self._replicas = replicas
        self._most_held = most_held
        # The last used ones last.
        self._files: OrderedDict[Ino, _Large] = OrderedDict()
        self._known_bytes = 0
        # The blocks of this node of very large files, and the scores that may still be computed for
        # others.
        self._mine: dict[Ino, bytes] = {}
        self._scores_left = _AT_MOUNT
        self._lock = threading.Lock()
        # Granules from other nodes, the last used ones last.
        self._held: OrderedDict[tuple[Ino, int], bytes] = OrderedDict()
        self._held_bytes = 0
        # The granule behind the last request of each reader in order.
        self._ends: OrderedDict[tuple[Ino, int], None] = OrderedDict()
        self._limiter = Limiter(log)

    def is_shared(self, ino: Ino, identity: Identity) -> bool:
        """Whether the nodes share a file of this version: it is in the snapshot, and large."""
        if not (1 <= ino <= self._snapshot.entries and identity.size > self._largest):
            return False
        return self._snapshot.attributes(ino).identity == identity

    def known(self) -> list[Ino]:
        """The large files that were opened here or requested from here."""
        with self._lock:
            return list(self._files)

    def blocks(self, ino: Ino) -> bytearray:
        """One byte for each block of a shared file, 1 if this node keeps it. Blocks whose owners do
        not answer are added later."""
        return self._known(ino).mine

    def prepare(self, inos: npt.NDArray[np.int64], sizes: npt.NDArray[np.uint64]) -> None:
        """Computes which blocks of very large files this node keeps: at their first open that would
        take too long."""
        members = len(self._ownership.members)
        is_large = sizes > np.uint64(max(self._largest, _AT_OPEN // members * BLOCK))
        for ino, size in zip(inos[is_large].tolist(), sizes[is_large].tolist(), strict=True):
            self._scores_left -= -(-size // BLOCK) * members
            if self._scores_left >= 0:
                self._mine[ino] = self._blocks_of_own(ino, size)

    def _blocks_of_own(self, ino: Ino, size: int) -> bytes:
        items = block_items(ino, size)
        own = self._ownership.owns(items, self._requests.own, replicas=self._replicas)
        return own.astype(np.uint8).tobytes()

    def _known(self, ino: Ino) -> _Large:
        with self._lock:
            known = self._files.get(ino)
            if known is not None:
                self._files.move_to_end(ino)
                return known
        size = self._snapshot.attributes(ino).identity.size
        known = _Large(
            size,
            # Pages that are not written need no memory.
            np.zeros((-(-size // BLOCK), self._replicas), np.uint16),
            bytearray(self._mine.get(ino) or self._blocks_of_own(ino, size)),
            np.zeros(-(-size // GRANULE), np.uint64),
            {},
        )
        with self._lock:
            if ino not in self._files:
                self._files[ino] = known
                self._known_bytes += known.nbytes
            while self._known_bytes > _MOST_KNOWN and len(self._files) > 1:
                self._known_bytes -= self._files.popitem(last=False)[1].nbytes
            return self._files[ino]

    # -- reads -------------------------------------------------------------------------------------

    def read(self, ino: Ino, offset: int, size: int) -> bytes | None:
        """``size`` bytes of a shared file from other nodes, fewer only at its end; None if they
        must be read from the source."""
        file = self._known(ino)
        end = min(offset + size, file.size)
        pieces = []
        while offset < end:
            stop = min(end, (offset // BLOCK + 1) * BLOCK)
            piece = self._in_block(ino, file, offset, stop)
            if piece is None:
                return None
            pieces.append(piece)
            offset = stop
        return b"".join(pieces) or None

    def _in_block(self, ino: Ino, file: _Large, offset: int, end: int) -> bytes | None:
        """The bytes from ``offset`` to ``end``, which are in one block; None as for ``read``."""
        span = Span(ino, offset // GRANULE, (end - 1) // GRANULE)
        found = self._kept(span)
        missing = [granule for granule in range(span.first, span.last + 1) if granule not in found]
        if missing:
            wanted = self._extended(Span(ino, missing[0], missing[-1]), file)
            data = self._requested(wanted, file)
            if data is None:
                return None
            for granule in range(wanted.first, wanted.last + 1):
                start = (granule - wanted.first) * GRANULE
                found[granule] = data[start : start + GRANULE]
            # Of the other granules the reader has all bytes.
            self._keep(
                ino,
                {
                    granule: data
                    for granule, data in found.items()
                    if granule * GRANULE < offset or granule * GRANULE + len(data) > end
                },
            )
        whole = b"".join(found[granule] for granule in range(span.first, span.last + 1))
        start = offset - span.offset
        return whole[start : start + end - offset]

    def _extended(self, span: Span, file: _Large) -> Span:
        """A span with more granules of its block, if the reader comes in order."""
        last = span.last
        with self._lock:
            if self._ends.pop((span.ino, span.first), True) is None:
                first_of_next = (span.block + 1) * (BLOCK // GRANULE)
                granules = -(-file.size // GRANULE)
                last = max(last, min(span.first + _AHEAD, first_of_next, granules) - 1)
            self._ends[span.ino, last + 1] = None
            if len(self._ends) > _FOLLOWED:
                self._ends.popitem(last=False)
        return Span(span.ino, span.first, last)

    def _kept(self, span: Span) -> dict[int, bytes]:
        """The granules of a span that are in memory."""
        found = {}
        with self._lock:
            for granule in range(span.first, span.last + 1):
                data = self._held.get((span.ino, granule))
                if data is not None:
                    found[granule] = data
                    self._held.move_to_end((span.ino, granule))
        return found

    def _keep(self, ino: Ino, granules: dict[int, bytes]) -> None:
        with self._lock:
            for granule, data in granules.items():
                before = self._held.pop((ino, granule), b"")
                self._held[ino, granule] = data
                self._held_bytes += len(data) - len(before)
            while self._held_bytes > self._most_held:
                _, data = self._held.popitem(last=False)
                self._held_bytes -= len(data)

    # -- requests ----------------------------------------------------------------------------------

    def _requested(self, span: Span, file: _Large) -> bytes | None:
        """The bytes of a span from another node; None if they must be read from the source."""
        block = span.block
        if time.monotonic() < file.not_kept.get(block, 0.0):
            return None
        asked = self._requests.ask(self._order(span, file), partial(self._from, span, file))
        if asked.takes_over:
            file.mine[block] = 1
        return asked.content

    def _order(self, span: Span, file: _Large) -> Iterable[int]:
        """The members that are asked for a span, as ``Peers`` asks for a file."""
        owners = self._owners(span, file)
        if self._requests.own in owners:
            return owners
        turn = (span.block + self._requests.own) % len(owners)
        return chain(owners[turn:], owners[:turn], self._others(span))

    def _owners(self, span: Span, file: _Large) -> list[int]:
        """The owners of a block. Those of the blocks beside it are computed with them."""
        block = span.block
        # Another thread may have written only some of them.
        owners: list[int] = file.owners[block].tolist()
        if 0 in owners:
            at_once = max(1, _AT_ONCE // len(self._ownership.members))
            first = block - block % at_once
            count = len(file.owners[first : first + at_once])
            items = _item(span.ino, first) + np.arange(count, dtype=np.uint64)
            computed = self._ownership.first(items, self._replicas) + 1
            file.owners[first : first + count] = computed
            owners = computed[block - first].tolist()
        return [owner - 1 for owner in owners]

    def _others(self, span: Span) -> Iterator[int]:
        """The members behind the owners. Their scores are computed only if these do not answer."""
        yield from self._ownership.order(_item(span.ino, span.block))[self._replicas :]

    def _from(self, span: Span, file: _Large, client: PeerClient) -> bytes | None:
        """The bytes of a span from a member; None if it does not keep them. Raises PeerFailed."""
        size = span.length(file.size)
        known = file.digests[span.first : span.last + 1]
        if known.all():
            answer = self._requests.answer(client, span.name_at_engine, size, span.offset)
            if self._is_right(answer, file, span):
                client.breaker.right()
                return answer.data
            # The member may have made its copy anew, also of another version, and may lack these
            # granules.
            known[:] = 0
        answer = self._requests.answer(client, span.name, size, span.offset)
        if answer.status == NOT_KEPT:
            file.not_kept[span.block] = time.monotonic() + _NOT_KEPT_S
            self._requests.note_not_kept()
            return None
        if answer.digest is not None and self._is_right(answer, file, span):
            client.breaker.right()
            return answer.data
        file.not_kept[span.block] = time.monotonic() + _NOT_KEPT_S
        self._limiter.warning(
            f"damaged {client.name}",
            "node %s gave other bytes of inode %d than it should: the source is read instead",
            *(client.name, span.ino),
        )
        raise client.damaged()

    def _is_right(self, answer: Answer, file: _Large, span: Span) -> bool:
        """Whether an answer has the bytes of its digest, or of the digests that are known."""
        if answer.status != OK:
            return False
        digests = granule_digests(answer.data)
        found = [
            short_digest(digests[start : start + DIGEST_BYTES])
            for start in range(0, len(digests), DIGEST_BYTES)
        ]
        known = file.digests[span.first : span.last + 1]
        if answer.digest is None:
            return bool(known.tolist() == found)
        if answer.digest != span_digest(digests):
            return False
        known[:] = found
        return True


def block_items(ino: Ino, size: int) -> npt.NDArray[np.uint64]:
    """The items of ``Ownership`` for the blocks of a file of ``size`` bytes."""
    return _item(ino, 0) + np.arange(-(-size // BLOCK), dtype=np.uint64)


def _item(ino: Ino, block: int) -> int:
    return _BLOCKS + (ino << _BLOCK_BITS) + block
