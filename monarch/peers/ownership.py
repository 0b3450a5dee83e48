"""Which node of a job owns a file: rendezvous hashing (highest random weight).

Each member gets a pseudo-random score for each file, and the member with the highest score owns the
file (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
Transactions on Networking 6, 1998). Every node computes the same owners from the names alone. If a
member leaves, only its files get another owner: the member with the next highest score.

A member of weight w gets a share proportional to w: its score is -w / ln(u) for a uniform u
(Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005).
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.posix.buckets import mixed

# The number of a member must fit into two bytes for each file.
MOST_MEMBERS = 16_384

# Items that are hashed at once: their arrays stay in the processor's cache.
_BLOCK = 1 << 14
# Scores that are computed at once, if they are few items of many members.
_SCORES = 1 << 16

_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


@dataclass(frozen=True, slots=True)
class Member:
    """A node. ``name`` must be the same text on all nodes; ``weight`` is its share of the files
    relative to the other members, such as the capacity of its tiers in bytes."""

    name: str
    weight: float = 1.0


class Ownership:
    """The owner of each item among ``members``, as an index of that sequence. Items are integers of
    0 to 2**64 - 1, such as inode numbers; ``seed`` identifies the set of items.

    The owners depend on the names and weights only, not on the order of the members. Raises
    ValueError for no members, more than ``MOST_MEMBERS``, two of one name, or a weight that is not
    positive and finite.
    """

    def __init__(self, members: Sequence[Member], seed: int = 0) -> None:
        if not 1 <= len(members) <= MOST_MEMBERS:
            raise ValueError(f"{len(members):,} members: there must be 1 to {MOST_MEMBERS:,}")
        if len({member.name for member in members}) < len(members):
            raise ValueError("two members have the same name")
        weights = [member.weight for member in members]
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError("the weight of a member must be a positive number")
        self.members = tuple(members)
        names = [member.name.encode("utf-8", "surrogateescape") for member in members]
        self._hashes = np.array([xxhash.xxh3_64_intdigest(name) for name in names], np.uint64)
        self._seed = np.uint64(xxhash.xxh3_64_intdigest(seed.to_bytes(16, "little", signed=True)))
        # With equal weights the hashes are in the order of the scores.
        self._weights = np.array(weights) if len(set(weights)) > 1 else None

    def owner(self, item: int) -> int:
        """The member that owns an item. For many items ``owners`` is faster."""
        return self.order(item)[0]

    def order(self, item: int) -> list[int]:
        """All members, the owner first. If a member is down, the next one owns the item; the first
        k are those of k replicas."""
        scores = self._scores(self._mixed(np.array([item], np.uint64)), self._hashes, self._weights)
        ranked: list[int] = np.argsort(-scores, kind="stable").tolist()
        return ranked

    def owners(
        self, items: npt.NDArray[np.integer], *, without: Container[int] = ()
    ) -> npt.NDArray[np.uint16]:
        """The owner of each item of an array, if the members ``without`` are down. Raises
        ValueError if all members are."""
        present = [index for index in range(len(self.members)) if index not in without]
        if not present:
            raise ValueError("all members are down")
        found = np.full(len(items), present[0], np.uint16)
        for start in range(0, len(items), _BLOCK):
            hashed = self._mixed(items[start : start + _BLOCK].astype(np.uint64))
            block = found[start : start + _BLOCK]
            best = self._score_of(present[0], hashed)
            for index in present[1:]:
                scores = self._score_of(index, hashed)
                is_better = scores > best
                block[is_better] = index
                best = np.maximum(best, scores)
        return found

    def first(self, items: npt.NDArray[np.integer], count: int) -> npt.NDArray[np.uint16]:
        """The first ``count`` members in the order of each item, at most all: a row for each. For
        few items of many members it is faster than ``owners``."""
        count = min(count, len(self.members))
        found = np.empty((len(items), count), np.uint16)
        at_once = max(1, _SCORES // len(self.members))
        for start in range(0, len(items), at_once):
            hashed = self._mixed(items[start : start + at_once].astype(np.uint64))
            scores = self._scores(hashed[:, np.newaxis], self._hashes, self._weights)
            rows = np.arange(len(hashed))
            for place in range(count):
                best = scores.argmax(axis=1)
                found[start : start + at_once, place] = best
                # Less than each score.
                scores[rows, best] = -1
        return found

    def owns(
        self, items: npt.NDArray[np.integer], member: int, *, replicas: int = 1
    ) -> npt.NDArray[np.bool_]:
        """Whether ``member`` is among the first ``replicas`` in the order of each item."""
        found = np.empty(len(items), bool)
        for start in range(0, len(items), _BLOCK):
            hashed = self._mixed(items[start : start + _BLOCK].astype(np.uint64))
            own = self._score_of(member, hashed)
            before = np.zeros(len(hashed), np.uint16)
            for index in range(len(self.members)):
                scores = self._score_of(index, hashed)
                # Of equal scores that of the first member counts more.
                before += scores >= own if index < member else scores > own
            found[start : start + _BLOCK] = before < replicas
        return found

    def _mixed(self, items: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return mixed(items ^ self._seed)

    def _score_of(self, index: int, hashed: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        weights = None if self._weights is None else self._weights[index : index + 1]
        return self._scores(hashed, self._hashes[index : index + 1], weights)

    def _scores(
        self,
        hashed: npt.NDArray[np.uint64],
        members: npt.NDArray[np.uint64],
        weights: npt.NDArray[np.float64] | None,
    ) -> npt.NDArray[np.float64]:
        """The scores of one member for many items, of many members for one item, or of members for
        a column of items."""
        # 52 bits, so that each step up to the logarithm is exact.
        uniform: npt.NDArray[np.float64] = (
            (mixed(hashed ^ members) >> np.uint64(12)).astype(np.float64) + 0.5
        ) * 2.0**-52
        if weights is None:
            return uniform
        weighted: npt.NDArray[np.float64] = -weights / _ln(uniform)
        return weighted


def _ln(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The natural logarithm of numbers between 0 and 1, to about 1e-15. It uses only operations
    whose result IEEE 754 defines, so that all machines compute the same owners; a library's
    logarithm may differ in the last bit."""
    mantissa, exponent = np.frexp(values)
    ratio = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
    square = ratio * ratio
    series = np.full_like(square, 1 / 17)
    for odd in range(15, 0, -2):
        series = series * square + 1 / odd
    logarithm: npt.NDArray[np.float64] = (exponent - 0.5) * _LN_2 + 2 * ratio * series
    return logarithm
