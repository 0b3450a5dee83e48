"""The prepared batches that a staging area keeps, and which process keeps each for another broker.

A batch has a position and a token of the caller. The process that has prepared it keeps it, too: if
the broker is killed, the next one gets the batch from there. When that process leaves, another one
is given the batch to keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple


class _Batch(NamedTuple):
    token: int
    holder: int


class KeptBatches:
    """``outdated`` are the processes that keep batches which were removed here."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._removed: list[int] = []
        self.outdated: set[int] = set()

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, position: int) -> bool:
        return position in self._batches

    def token(self, position: int) -> int:
        """The token of a batch of a READY or HOLD reply; valid until the next event."""
        return self._batches[position].token

    def add(self, position: int, token: int, holder: int) -> None:
        """Keeps a batch, which is not kept yet."""
        self._batches[position] = _Batch(token, holder)

    def reject(self, token: int) -> None:
        """The batch of the token is not kept."""
        self._removed.append(token)

    def remove_outside(self, begin: int, end: int) -> None:
        """Keeps only the batches from ``begin`` to ``end`` - 1."""
        for position in [at for at in self._batches if not begin <= at < end]:
            batch = self._batches.pop(position)
            self._removed.append(batch.token)
            self.outdated.add(batch.holder)

    def take_removed(self) -> list[int]:
        """The tokens of the batches that are not kept any more, each once."""
        removed, self._removed = self._removed, []
        return removed

    def hand_over(
        self, everyone: Collection[int], candidates: Collection[int]
    ) -> Iterator[tuple[int, int]]:
        """Each batch of a process that is not one of ``everyone``, after the candidate that is to
        keep it: those that keep fewest come first."""
        orphans = [at for at, batch in self._batches.items() if batch.holder not in everyone]
        if not orphans or not candidates:
            return
        numbers = dict.fromkeys(candidates, 0)
        for batch in self._batches.values():
            if batch.holder in numbers:
                numbers[batch.holder] += 1
        for position in orphans:
            holder = min(numbers, key=lambda candidate: numbers[candidate])
            numbers[holder] += 1
            self._batches[position] = self._batches[position]._replace(holder=holder)
            yield holder, position
