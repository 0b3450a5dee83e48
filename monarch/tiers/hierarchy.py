"""All tiers of a mount and the records of what they hold: opened, adopted and swept together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from monarch.errors import TierError
from monarch.settings import TierSettings
from monarch.tiers.directory import Tier, copy_name
from monarch.tiers.records import Record, Records, other_generations
from monarch.types import Ino

log = logging.getLogger(__name__)

# Pieces of the snapshot's inode table: the first inode number of each, and its rows.
InodeTable = Callable[[], Iterator[tuple[int, npt.NDArray[np.void]]]]


@dataclass(frozen=True, slots=True)
class Held:
    """The copies of one tier as the records tell: inode numbers and sizes in bytes."""

    inos: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint64]

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())


class Hierarchy:
    """The tiers, fastest first, in the generation of one snapshot, with their records.

    ``columns`` gives the rows of the snapshot's inode table for a range of inode numbers;
    ``inodes`` all of it, and is asked only if copies of an earlier snapshot have to be found
    again. Raises TierError and LockedError.
    """

    def __init__(
        self,
        settings: Sequence[TierSettings],
        state: Path,
        *,
        generation: str,
        inodes: InodeTable,
        columns: Callable[[range], npt.NDArray[np.void]],
        owner: str,
    ) -> None:
        with ExitStack() as opened:
            self.tiers: list[Tier] = []
            for number, tier in enumerate(settings, start=1):
                try:
                    self.tiers.append(Tier(number, tier.name, tier.path, owner=owner))
                    opened.callback(self.tiers[-1].close)
                    self.tiers[-1].use(generation)
                except OSError as error:
                    raise TierError(
                        f"tier {os.fspath(tier.path)!r}: {error.strerror}",
                        hint="make room there, or name another directory",
                    ) from error
            self.records = Records(state, generation, [tier.id for tier in self.tiers])
            self.trusted = self.records.trusted
            self.records.forget_other_versions(columns)
            self._adopt(state, generation, inodes)
            opened.pop_all()

    def _adopt(self, state: Path, generation: str, inodes: InodeTable) -> None:
        """Find the copies that earlier snapshots promoted: same file, other inode number."""
        tier_ids = [tier.id for tier in self.tiers]
        for earlier in other_generations(state, generation):
            old = Records(state, earlier, tier_ids)
            # The present records are new and empty, or were used and have a say of their own.
            self.trusted = old.trusted and (self.trusted or self.held_bytes() == 0)
            keys, numbers = old.by_source_ino()
            adopted = 0
            if len(keys):
                for first, rows in inodes():
                    place = np.minimum(np.searchsorted(keys, rows["source_ino"]), len(keys) - 1)
                    for row in np.flatnonzero(keys[place] == rows["source_ino"]).tolist():
                        before = Ino(int(numbers[place[row]]))
                        adopted += self._adopt_one(
                            old, earlier, before, Ino(first + row), rows[row]
                        )
            old.close(clean=False)
            old.remove()
            log.info("the snapshot is new: %d copies were found again", adopted)

    def _adopt_one(self, old: Records, earlier: str, before: Ino, now: Ino, row: np.void) -> bool:
        record = old.get(before)
        if record is None or not _same(record, row):
            return False
        if not self.tiers[record.tier - 1].adopt(earlier, before, now):
            return False
        self.records.put(now, record)
        return True

    def held(self, tier: Tier) -> Held:
        """What the records tell of one tier."""
        inos: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        sizes: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        for found, tiers, found_sizes in self.records.load():
            here = tiers == tier.number
            inos.append(found[here])
            sizes.append(found_sizes[here])
        return Held(np.concatenate(inos), np.concatenate(sizes))

    def held_bytes(self) -> int:
        return sum(self.held(tier).bytes for tier in self.tiers)

    def sweep(self, tier: Tier, *, before_ns: int) -> list[Ino]:
        """Remove what no record knows; the inode numbers whose copies are missing.

        Waits for the disk. Copies made after ``before_ns`` (wall clock) are left alone: one may
        be committed and not recorded yet.
        """
        removed = tier.remove_other_generations()
        believed = set(self.held(tier).inos.tolist())
        for paths in tier.copies():
            for path in paths:
                name = path.partition("/")[2]
                ino = int(name) if name.isdecimal() else 0
                if ino in believed and path == copy_name(Ino(ino)):
                    believed.discard(ino)
                else:
                    removed += tier.remove_stranger(path, before_ns=before_ns)
        if removed:
            log.info("tier %s: removed %d files that no record knows", tier.name, removed)
        return [Ino(ino) for ino in sorted(believed)]

    def close(self, *, clean: bool) -> None:
        """``clean``: nothing is under way. Waits until the copies are on the disks, if so."""
        synced = False
        if clean:
            with suppress(OSError):
                for tier in self.tiers:
                    tier.sync()
                synced = True
        self.records.close(clean=synced)
        for tier in self.tiers:
            # What is left, or the tier itself, may be gone; the next start sweeps again.
            with suppress(OSError):
                tier.sweep_stage()
            tier.close()


def _same(record: Record, row: np.void) -> bool:
    identity = record.identity
    return bool(
        row["size"] == identity.size
        and row["mtime_ns"] == identity.mtime_ns
        and row["ctime_ns"] == identity.ctime_ns
    )
