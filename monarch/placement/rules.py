"""Rules of the administrator for the files of certain paths. They go before policy and foresight.

The rule of a file follows from its path in the snapshot, by its first name. The states of the
patterns in a directory are kept, so a file costs little more than the comparison of its own name.
``measure`` visits the files of all rules once, in slices, to count them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from monarch.config.path_pattern import PathPattern
from monarch.config.settings import RuleSettings
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.posix.buckets import BUCKETS, buckets
from monarch.types import ROOT_INO, Ino

# Entries of one slice: a few milliseconds if each name must be compared.
_SLICE = 1024
# Directories whose states are kept: a few hundred bytes each.
_KEPT_DIRECTORIES = 1 << 14

_NO_RULE = -1

# Inode numbers of files, their sizes in bytes, and their inode numbers at the source.
Files: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]


class Names(Protocol):
    """What is needed of the snapshot: entries have the numbers 1 to ``entries``. ``files_in`` and
    ``directories_in`` select among consecutive entries, each file at its first name only."""

    @property
    def entries(self) -> int: ...
    def parent(self, slot: Ino) -> Ino: ...
    def name(self, slot: int) -> bytes: ...
    def children(self, ino: Ino) -> range: ...
    def files_in(self, slots: range) -> Files: ...
    def directories_in(self, slots: range) -> list[Ino]: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the paths that ``match`` covers. ``never``: no copies are made; ``tier`` is the
    number of the only tier for copies, None for any."""

    match: str
    pin: bool
    never: bool
    tier: int | None

    @classmethod
    def of(cls, settings: RuleSettings, tiers: Sequence[str]) -> Rule:
        """``tiers``: the names of the tiers. Raises ValueError if there is no such tier."""
        tier = None if settings.tier is None else tiers.index(settings.tier) + 1
        return cls(settings.match, settings.pin, settings.admit == "never", tier)

    def action(self, tiers: Sequence[str]) -> str:
        """The rule without its pattern, as it is written in a configuration file."""
        keys = [
            *(["admit: never"] if self.never else []),
            *(["pin: true"] if self.pin else []),
            *([f"tier: {tiers[self.tier - 1]}"] if self.tier is not None else []),
        ]
        return ", ".join(keys)


@dataclass(slots=True)
class Count:
    """The files of a rule in the snapshot, and those that have copies; sizes are in bytes.
    ``left_files``: the pinned files that were removed or written since."""

    files: int = 0
    bytes: int = 0
    resident_files: int = 0
    resident_bytes: int = 0
    left_files: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the files of the rule ``rule``."""

    rule: Rule
    inos: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _State:
    """The states of the patterns in a directory that can cover a path beneath, with the number of
    the rule of each. ``rule``: the number of the first rule if it covers all paths beneath."""

    places: tuple[tuple[int, PathPattern, int], ...]
    rule: int | None

    @property
    def is_dead(self) -> bool:
        return not self.places


class Rules:
    """The rules of a mount, the first one that covers a path first. Belongs to the event loop.
    ``buckets``: those of files by their inode numbers at the source."""

    def __init__(
        self,
        rules: Sequence[Rule],
        names: Names,
        residency: Residency,
        buckets: Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.int64]] = buckets,
    ) -> None:
        self._buckets = buckets
        # With other nodes: the bytes of each file that this node keeps without a request, from the
        # inode numbers and sizes of files.
        self.kept_bytes: Callable[
            [npt.NDArray[np.int64], npt.NDArray[np.uint64]], npt.NDArray[np.uint64]
        ] = _all_bytes
        self.rules = tuple(rules)
        self.counts = [Count() for _ in self.rules]
        self._names = names
        self._tiers = np.frombuffer(residency.tiers_table, np.uint8)
        # Whether each entry is a pinned one that has left.
        self._has_left = np.zeros(names.entries + 1, np.bool_)
        patterns = [PathPattern(rule.match) for rule in rules]
        self._root = _state((n, pattern, pattern.start) for n, pattern in enumerate(patterns))
        self._kept: dict[Ino, _State] = {}
        # Files below this number are counted; the counts follow their copies from then on.
        self._counted = 0
        self.is_measured = not rules
        self._curve = np.zeros(BUCKETS, np.uint64)
        self._curves: dict[int, npt.NDArray[np.uint64]] = {}

    def of(self, ino: Ino) -> Rule | None:
        """The rule for a file; None if there is none, or the file was made through the mount."""
        number = self._number(ino)
        return None if number == _NO_RULE else self.rules[number]

    def is_pinned(self, ino: Ino) -> bool:
        rule = self.of(ino)
        return rule is not None and rule.pin

    def left(self, ino: Ino) -> None:
        """Records that an entry was removed, or is written: a pinned file gets no copy until it is
        ``placed``, since a process has found it at the source again."""
        if self.is_pinned(ino) and not self._has_left[ino]:
            self._has_left[ino] = True
            self._leave(ino, 1)

    def placed(self, ino: Ino, size: int) -> None:
        """Records that a file has got a copy of ``size`` bytes."""
        if ino <= self._names.entries and self._has_left[ino]:
            self._has_left[ino] = False
            self._leave(ino, -1)
        self._changed(ino, 1, size)

    def removed(self, ino: Ino, size: int) -> None:
        """Records that a copy of ``size`` bytes is gone."""
        self._changed(ino, -1, -size)

    def _changed(self, ino: Ino, files: int, size: int) -> None:
        if ino < self._counted and (number := self._number(ino)) != _NO_RULE:
            count = self.counts[number]
            count.resident_files += files
            count.resident_bytes += size

    def _leave(self, ino: Ino, files: int) -> None:
        if ino < self._counted:
            _, sizes, _ = self._names.files_in(range(ino, ino + 1))
            count = self.counts[self._number(ino)]
            count.left_files += files * len(sizes)
            count.left_bytes += files * sum(sizes.tolist())

    # -- all files of the rules ------------------------------------------------------------------

    def measure(self) -> Iterator[list[Part]]:
        """Counts the files of all rules. Yields them in slices, in the order of their numbers."""
        self.counts = [Count() for _ in self.rules]
        self._counted = 0
        self._curve = np.zeros(BUCKETS, np.uint64)
        self._curves = {}
        for slots, parts in self._walk():
            found = []
            for number, (inos, sizes, keys) in parts:
                self._count(number, inos, sizes, keys)
                found.append(Part(self.rules[number], inos))
            self._counted = slots.stop
            yield found
        self._counted = self._names.entries + 1
        self.is_measured = True

    def pinned(self) -> Iterator[list[Ino]]:
        """The pinned files that have no copy and have not left, in slices. A slice may be empty."""
        for _, parts in self._walk():
            yield [
                Ino(ino)
                for number, (inos, _, _) in parts
                if self.rules[number].pin
                for ino in inos[(self._tiers[inos] == 0) & ~self._has_left[inos]].tolist()
            ]

    @property
    def misses_pinned(self) -> bool:
        """Whether a pinned file that has not left has no copy. Only after ``measure``."""
        return any(
            rule.pin and count.resident_files < count.files - count.left_files
            for rule, count in zip(self.rules, self.counts, strict=True)
        )

    def _count(
        self,
        number: int,
        inos: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.uint64],
        keys: npt.NDArray[np.uint64],
    ) -> None:
        rule, count = self.rules[number], self.counts[number]
        resident = self._tiers[inos] != 0
        count.files += len(inos)
        count.bytes += sum(sizes.tolist())
        count.resident_files += int(np.count_nonzero(resident))
        count.resident_bytes += sum(sizes[resident].tolist())
        has_left = self._has_left[inos]
        count.left_files += int(np.count_nonzero(has_left))
        count.left_bytes += sum(sizes[has_left].tolist())
        places, kept = self._buckets(keys), self.kept_bytes(inos, sizes)
        np.add.at(self._curve, places, kept)
        if rule.tier is not None and not rule.pin:
            curve = self._curves.setdefault(rule.tier, np.zeros(BUCKETS, np.uint64))
            np.add.at(curve, places, kept)

    def _walk(self) -> Iterator[tuple[range, list[tuple[int, Files]]]]:
        """Slices of entries, ascending, with their files by the number of the rule. Entries of
        directories without files of a rule are left out."""
        names = self._names
        waiting = deque([(ROOT_INO, self._root)])
        while waiting:
            directory, state = waiting.popleft()
            children = names.children(directory)
            for start in range(children.start, children.stop, _SLICE):
                slots = range(start, min(start + _SLICE, children.stop))
                yield slots, list(self._files_of(slots, state))
                for inner in names.directories_in(slots):
                    below = state if state.rule is not None else self._below(state, inner)
                    if not below.is_dead:
                        waiting.append((inner, below))

    def _files_of(self, slots: range, state: _State) -> Iterator[tuple[int, Files]]:
        inos, sizes, keys = self._names.files_in(slots)
        if not len(inos):
            return
        if state.rule is not None:
            yield state.rule, (inos, sizes, keys)
            return
        numbers = np.array([self._first(state, Ino(ino)) for ino in inos.tolist()])
        for number in np.unique(numbers).tolist():
            if number != _NO_RULE:
                found = numbers == number
                yield number, (inos[found], sizes[found], keys[found])

    # -- the draw of the policy ------------------------------------------------------------------

    def shares(
        self, curve: npt.NDArray[np.uint64], capacities: Sequence[int]
    ) -> tuple[dict[range, npt.NDArray[np.uint64]], list[int]]:
        """The bytes in each bucket that the policy may choose from, by the tiers that it may choose
        for them, and what the pinned files leave of the capacities. ``curve``: those of all files
        that this node keeps, as ``kept_bytes`` counts them. Only after ``measure``."""
        tiers = range(1, len(capacities) + 1)
        shares = {tiers: curve - self._curve}
        for tier, own in self._curves.items():
            only = range(tier, tier + 1)
            shares[only] = shares[only] + own if only in shares else own
        return shares, self._left(capacities)[0]

    def excess(self, ledger: Ledger) -> int:
        """Bytes of pinned files that do not fit into the tiers, as far as they are counted. Those
        that have left need no room."""
        return self._left([ledger.usable(tier) for tier in ledger.tiers])[1]

    def _left(self, capacities: Sequence[int]) -> tuple[list[int], int]:
        """What the pinned files leave of each capacity, and their bytes that do not fit."""
        left, anywhere, excess = list(capacities), 0, 0
        for rule, count in zip(self.rules, self.counts, strict=True):
            pinned = count.bytes - count.left_bytes if rule.pin else 0
            if rule.tier is None:
                anywhere += pinned
            else:
                taken = min(pinned, left[rule.tier - 1])
                left[rule.tier - 1] -= taken
                excess += pinned - taken
        for index, free in enumerate(left):
            taken = min(anywhere, free)
            left[index] -= taken
            anywhere -= taken
        return left, excess + anywhere

    # -- the rule of one file --------------------------------------------------------------------

    def _number(self, ino: Ino) -> int:
        if ino > self._names.entries:
            return _NO_RULE
        state = self._state_of(self._names.parent(ino))
        if state.is_dead:
            return _NO_RULE
        return state.rule if state.rule is not None else self._first(state, ino)

    def _state_of(self, directory: Ino) -> _State:
        above: list[Ino] = []
        state = self._root
        while directory != ROOT_INO:
            kept = self._kept.get(directory)
            if kept is not None:
                state = kept
                break
            above.append(directory)
            directory = self._names.parent(directory)
        for each in reversed(above):
            state = self._below(state, each)
            if len(self._kept) >= _KEPT_DIRECTORIES:
                self._kept.clear()
            self._kept[each] = state
        return state

    def _below(self, state: _State, slot: Ino) -> _State:
        """The state of a directory in one with ``state``."""
        name = self._names.name(slot)
        return _state(
            (number, pattern, pattern.after(place, name)) for number, pattern, place in state.places
        )

    def _first(self, state: _State, slot: Ino) -> int:
        """The number of the first rule that covers a file of a directory with ``state``."""
        name = self._names.name(slot)
        for number, pattern, place in state.places:
            if pattern.covers(pattern.after(place, name)):
                return number
        return _NO_RULE


def _all_bytes(
    inos: npt.NDArray[np.int64], sizes: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    return sizes


def _state(places: Iterable[tuple[int, PathPattern, int]]) -> _State:
    kept = []
    for number, pattern, place in places:
        if place:
            kept.append((number, pattern, place))
        if pattern.covers(place):
            # The later rules do not count.
            break
    first = kept[0] if kept else None
    is_covered = first is not None and first[1].covers(first[2])
    return _State(tuple(kept), first[0] if first is not None and is_covered else None)
