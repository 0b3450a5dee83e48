"""The partial copies that the tiers hold at the start of a mount.

Those of an earlier snapshot are adopted: the same version of a file with another inode number. Each
granule of them is compared with its digest before its first use, since their term is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from monarch.tiers import partial
from monarch.tiers.contents import Contents, part_of
from monarch.tiers.records import Records
from monarch.tiers.tier import Tier
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)


def identity_in(row: np.void) -> Identity:
    """The identity in a row of the snapshot's inode table."""
    times = int(row["mtime_ns"]), int(row["ctime_ns"])
    return Identity(int(row["size"]), *times, int(row["source_ino"]))


class PartsAtStart:
    """Finds the partial copies of all tiers. Its methods wait for the disks."""

    def __init__(self, tiers: Sequence[Tier], records: Records, generation: str) -> None:
        self._tiers = tiers
        self._records = records
        self._generation = generation
        self._found: set[Ino] = set()

    def adopt(self, inodes: Callable[[], Iterator[tuple[int, npt.NDArray[np.void]]]]) -> None:
        """Adopts those of earlier snapshots; ``inodes`` returns the snapshot's inode table."""
        earlier: dict[int, tuple[Tier, str, Ino, Identity]] = {}
        for tier in self._tiers:
            with suppress(OSError):
                contents = Contents(tier.root)
                for generation in contents.generations():
                    if generation != self._generation:
                        for found in _found_in(contents, tier.root, generation):
                            identity = found.header.identity
                            earlier[identity.source_ino] = (tier, generation, found.ino, identity)
        if not earlier:
            return
        keys = np.fromiter(earlier, np.uint64, len(earlier))
        adopted = 0
        for first, rows in inodes():
            for row in np.flatnonzero(np.isin(rows["source_ino"], keys)).tolist():
                tier, generation, old, identity = earlier[int(rows["source_ino"][row])]
                if identity_in(rows[row]) == identity:
                    with suppress(OSError):
                        tier.adopt_part(generation, old, Ino(first + row))
                        adopted += 1
                        partial.doubt(tier, Ino(first + row))
        log.info("%d partial copies of earlier snapshots were adopted", adopted)

    def usable(
        self, tier: Tier, entries: int, version_of: Callable[[Ino], Identity]
    ) -> list[partial.Found]:
        """The partial copies of a tier that may be used. Removes all others: of another version,
        of a file with a whole copy or with a partial copy in a faster tier, and damaged ones."""
        usable = []
        with suppress(OSError):
            for ino in filter(None, map(part_of, Contents(tier.root).parts(self._generation))):
                found = self._look_at(tier, ino, entries, version_of)
                if found is not None:
                    self._found.add(ino)
                    usable.append(found)
                    continue
                with suppress(OSError):
                    partial.remove(tier, ino)
        return usable

    def _look_at(
        self, tier: Tier, ino: Ino, entries: int, version_of: Callable[[Ino], Identity]
    ) -> partial.Found | None:
        if ino > entries or ino in self._found or self._records.get(ino) is not None:
            return None
        try:
            found = partial.look_at(tier.directory, ino)
            if found.header.identity != version_of(ino):
                return None
            if self._records.is_new:
                # The records, whose term it is of, are lost.
                partial.doubt(tier, ino)
        except OSError as error:
            log.info("tier %s: a partial copy is removed: %s", tier.name, error.strerror)
            return None
        return found


def _found_in(contents: Contents, root: int, generation: str) -> Iterator[partial.Found]:
    for ino in filter(None, map(part_of, contents.parts(generation))):
        with suppress(OSError):
            yield partial.look_at_in(root, generation, ino)
