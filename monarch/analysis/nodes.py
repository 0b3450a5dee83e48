"""Simulates the nodes of a job that share their tiers: the bytes that each node reads from each
place, and the duration of an epoch.

Each epoch is a new random order of all files, of which each node reads an equal part. The owner of
a file (peers/ownership.py) keeps it if the rule of ``no_evict`` admits it, for the bytes in each
bucket that the node owns at the start (placement/policy.py), and if there is room. In the first
epoch the owner fetches such a file from the source, and gives it to the reader. A file that no
owner keeps is read from the source by its reader.

Time is virtual. A node reads up to ``Rates.ahead`` files in advance. While all nodes read so many
files, the slowest resource takes the time of its bytes: the source, or the network, tier or job of
the busiest node. Then all nodes have waited for each other. Requests cost nothing but their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monarch.analysis.formulas import partitioned
from monarch.analysis.replay import Files, Order
from monarch.peers.ownership import Member, Ownership
from monarch.placement.policy import assign
from monarch.posix.buckets import BUCKETS, buckets

_TIER = range(1, 2)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second: ``source`` gives all nodes together, ``network`` each node in each direction,
    ``tier`` each node, and ``job`` is what a node uses if it never waits. ``ahead`` counts the
    files that a node reads in advance."""

    source: float
    network: float
    tier: float
    job: float = math.inf
    ahead: int = 512


@dataclass(frozen=True, slots=True)
class NodesEpoch:
    """What all nodes read in one epoch. ``source_opens`` and ``source_bytes`` are those of the
    source, ``local_bytes`` come from the tier of the reader and ``remote_bytes`` from another node.
    ``most_remote_bytes`` are those of the node that received the most. ``nodes``: those at the end
    of the epoch."""

    nodes: int
    source_opens: int
    source_bytes: int
    local_bytes: int
    remote_bytes: int
    most_remote_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Expected:
    """The closed forms for an epoch after the first one: bytes, and seconds if all nodes are alike.
    ``alone_s``: each node keeps files for itself. ``source_s``: no node keeps anything.
    ``local_s``: each node has all files in its tier."""

    cached: float
    source_bytes: float
    local_bytes: float
    remote_bytes: float
    seconds: float
    alone_s: float
    source_s: float
    local_s: float


def expected(total: int, nodes: int, capacity: int, rates: Rates) -> Expected:
    """The closed forms for a data set of ``total`` bytes (CoorDL, VLDB 2021, section 4.1)."""
    shares = partitioned(capacity / total, nodes)
    alone = min(1.0, capacity / total)

    def seconds(source: float, local: float, remote: float) -> float:
        """The duration of an epoch from the shares of the bytes of a node."""
        return (total / nodes) * max(
            source * nodes / rates.source,
            (source + remote) / rates.network,
            (local + remote) / rates.tier,
            1 / rates.job,
        )

    return Expected(
        cached=1 - shares.source,
        source_bytes=total * shares.source,
        local_bytes=total * shares.local,
        remote_bytes=total * shares.remote,
        seconds=seconds(shares.source, shares.local, shares.remote),
        alone_s=seconds(1 - alone, alone, 0),
        source_s=seconds(1, 0, 0),
        local_s=seconds(0, 1, 0),
    )


def simulate_nodes(
    files: Files,
    members: Sequence[Member],
    capacity: int,
    rates: Rates,
    *,
    epochs: int,
    seed: int = 0,
    lost: Mapping[int, int] | None = None,
) -> Iterator[NodesEpoch]:
    """The epochs of a job on ``members``, each with a tier of ``capacity`` bytes. ``lost`` has the
    numbers of nodes that fail in the middle of an epoch, by the number of the epoch from 1 on: the
    others read the rest. Raises ValueError if all nodes fail."""
    lost = lost or {}
    nodes = _Nodes(files, members, capacity, rates, seed)
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(files))
        failing = lost.get(epoch + 1, 0)
        middle = len(order) // 2 if failing else len(order)
        parts = [nodes.read(order[:middle])]
        if failing:
            nodes.fail(failing)
            parts.append(nodes.read(order[middle:]))
        yield _summary(parts, len(nodes.live))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an epoch; arrays have a value for each member."""

    source_opens: int
    source: npt.NDArray[np.float64]
    local: npt.NDArray[np.float64]
    remote: npt.NDArray[np.float64]
    seconds: float


def _summary(parts: Sequence[_Part], nodes: int) -> NodesEpoch:
    return NodesEpoch(
        nodes=nodes,
        source_opens=sum(part.source_opens for part in parts),
        source_bytes=int(sum(part.source.sum() for part in parts)),
        local_bytes=int(sum(part.local.sum() for part in parts)),
        remote_bytes=int(sum(part.remote.sum() for part in parts)),
        most_remote_bytes=int(np.sum([part.remote for part in parts], axis=0).max()),
        seconds=sum(part.seconds for part in parts),
    )


class _Nodes:
    """The state of all nodes: for each file its owner, whether that keeps it, and has it."""

    def __init__(
        self, files: Files, members: Sequence[Member], capacity: int, rates: Rates, seed: int
    ) -> None:
        self._files = files
        self._rates = rates
        self._count = len(members)
        self._ownership = Ownership(members, seed)
        self._owners = self._ownership.owners(files.keys).astype(np.int64)
        self._places = buckets(files.keys)
        self._room = [capacity] * len(members)
        self._capacity = capacity
        # The files that each member owns at the start.
        self._first = np.argsort(self._owners, kind="stable")
        self._bounds = np.searchsorted(self._owners[self._first], np.arange(len(members) + 1))
        self._is_kept = np.zeros(len(files), bool)
        self._is_resident = np.zeros(len(files), bool)
        self.live = list(range(len(members)))
        self._keep(np.arange(len(files)))

    def fail(self, count: int) -> None:
        """``count`` nodes fail, with their copies. Their files get the next owners, which keep them
        as far as they have room."""
        lost, self.live = self.live[:count], self.live[count:]
        moved = np.flatnonzero(np.isin(self._owners, lost))
        without = set(range(self._count)) - set(self.live)
        self._owners[moved] = self._ownership.owners(self._files.keys[moved], without=without)
        self._is_kept[moved] = self._is_resident[moved] = False
        self._keep(moved)

    def _keep(self, indices: npt.NDArray[np.int64]) -> None:
        """Decides which of these files their owners keep: those admitted, while there is room."""
        by_owner = indices[np.argsort(self._owners[indices], kind="stable")]
        owners, starts = np.unique(self._owners[by_owner], return_index=True)
        for owner, own in zip(owners.tolist(), np.split(by_owner, starts[1:]), strict=False):
            admitted = own[self._are_admitted(owner, own)]
            kept = admitted[_filling(self._files.sizes[admitted], self._room[owner])]
            self._is_kept[kept] = True
            self._room[owner] -= int(self._files.sizes[kept].sum())

    def _are_admitted(self, owner: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which files ``no_evict`` admits on a node, as in the mount of a member."""
        files = self._files
        first = self._first[self._bounds[owner] : self._bounds[owner + 1]]
        sizes = files.sizes[first]
        if int(sizes.sum()) <= self._capacity:
            return np.ones(len(indices), bool)
        curve = np.zeros(BUCKETS, np.uint64)
        np.add.at(curve, self._places[first], sizes.astype(np.uint64))
        table = np.frombuffer(assign({_TIER: curve}, [self._capacity])[_TIER], np.uint8)
        # An empty file needs no space, so its bucket may have no tier.
        is_admitted: npt.NDArray[np.bool_] = files.sizes[indices] == 0
        is_admitted |= table[self._places[indices]] > 0
        return is_admitted

    def read(self, order: Order) -> _Part:
        """The nodes read the files of ``order`` in turn."""
        sizes = self._files.sizes[order].astype(np.float64)
        places = np.arange(len(order))
        readers = np.array(self.live)[places % len(self.live)]
        owners = self._owners[order]
        is_kept = self._is_kept[order]
        is_read = ~self._is_resident[order]
        is_remote = is_kept & (owners != readers)
        # The node that reads from the source: the owner of a file that will be kept.
        fetchers = np.where(is_kept, owners, readers)
        self._is_resident[order[is_kept]] = True

        windows = places // (len(self.live) * self._rates.ahead)
        shape = (int(windows[-1]) + 1 if len(order) else 0, self._count)

        def by_node(
            nodes: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
        ) -> npt.NDArray[np.float64]:
            """The bytes of the ``chosen`` opens, for each window and node."""
            cells = windows[chosen] * self._count + nodes[chosen]
            found = np.bincount(cells, sizes[chosen], minlength=shape[0] * shape[1])
            return found.astype(np.float64).reshape(shape)

        source = by_node(fetchers, is_read)
        received = by_node(readers, is_remote)
        sent = by_node(owners, is_remote)
        # Copies are written once and read for each reader.
        tier = by_node(owners, is_kept)
        used = by_node(readers, np.ones(len(order), bool))
        rates = self._rates
        busiest = np.max(
            [(source + received) / rates.network, sent / rates.network, tier / rates.tier]
            + ([used / rates.job] if rates.job < math.inf else []),
            axis=(0, 2),
            initial=0,
        )
        return _Part(
            source_opens=int(is_read.sum()),
            source=source.sum(axis=0),
            local=by_node(owners, is_kept & ~is_remote & ~is_read).sum(axis=0),
            remote=received.sum(axis=0),
            seconds=float(np.maximum(busiest, source.sum(axis=1) / rates.source).sum()),
        )


def _filling(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.bool_]:
    """Which files fill a room in their order: each one that still fits."""
    is_kept = np.zeros(len(sizes), bool)
    rest = np.flatnonzero(sizes <= room)
    while len(rest):
        count = np.searchsorted(np.cumsum(sizes[rest]), room, side="right")
        is_kept[rest[:count]] = True
        room -= int(sizes[rest[:count]].sum())
        rest = rest[count:]
        rest = rest[sizes[rest] <= room]
    return is_kept
