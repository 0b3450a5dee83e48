"""All tiers of a mount and the records of their copies: opened, adopted and swept together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from monarch.config.defaults import readable_name
from monarch.config.settings import TierSettings
from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.telemetry.log import Limiter
from monarch.text import errno_words
from monarch.tiers.contents import ino_of
from monarch.tiers.kept_parts import PartsAtStart, identity_in
from monarch.tiers.ownership import Owner, require_known_version
from monarch.tiers.partial import Found
from monarch.tiers.records import Records, known_tiers, other_generations
from monarch.tiers.tier import Tier
from monarch.types import Identity, Ino

log = logging.getLogger(__name__)

# Returns pieces of the snapshot's inode table: the first inode number of each, and its rows.
InodeTable = Callable[[], Iterator[tuple[int, npt.NDArray[np.void]]]]


@dataclass(frozen=True, slots=True)
class Held:
    """The recorded copies of one tier: inode numbers and sizes in bytes, of equal length."""

    inos: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint64]

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())


def require_known(settings: Sequence[TierSettings], state: Path) -> None:
    """Raises TierError if a newer version has written records or tiers; changes nothing."""
    owner = owner_of(state)
    for tier in settings:
        require_known_version(tier.path, owner)


def owner_of(state: Path, *, mountpoint: str = "", source: str = "") -> Owner:
    """The owner that the tiers of a state directory's mount know. Raises TierError."""
    known = known_tiers(state) if state.is_dir() else frozenset()
    return Owner(readable_name(state), mountpoint, source, os.fspath(state), known)


class Hierarchy:
    """The tiers, fastest first, in the generation of one snapshot, with their records.

    ``columns`` returns the rows of the snapshot's inode table for a range of inode numbers;
    ``inodes`` returns all of it, and is called only to adopt copies of an earlier snapshot.
    ``renewed`` as of ``Records.forget_other_versions``. Raises TierError and LockedError.
    """

    def __init__(
        self,
        settings: Sequence[TierSettings],
        state: Path,
        *,
        generation: str,
        inodes: InodeTable,
        columns: Callable[[range], npt.NDArray[np.void]],
        renewed: Mapping[int, Identity],
        mountpoint: str,
        source: str,
    ) -> None:
        self._limiter = Limiter(log)
        owner = owner_of(state, mountpoint=mountpoint, source=source)
        with ExitStack() as opened:
            self.tiers: list[Tier] = []
            for number, tier in enumerate(settings, start=1):
                with _as_tier_error(tier):
                    self.tiers.append(Tier(number, tier.name, tier.path, owner=owner))
                    opened.callback(self.tiers[-1].close)
            for used, tier in zip(self.tiers, settings, strict=True):
                with _as_tier_error(tier):
                    used.use(generation)
            self.records = Records(state, generation, [tier.id for tier in self.tiers])
            opened.callback(self.records.close, clean=False)
            self.records.forget_other_versions(columns, renewed)
            self._adopt(state, generation, inodes)
            self._parts = PartsAtStart(self.tiers, self.records, generation)
            self._parts.adopt(inodes)
            self._version_of = partial(_version_of, columns, renewed)
            opened.pop_all()

    def _adopt(self, state: Path, generation: str, inodes: InodeTable) -> None:
        """Adopts copies of earlier snapshots: the same files with other inode numbers."""
        tier_ids = [tier.id for tier in self.tiers]
        for earlier in other_generations(state, generation):
            old = Records(state, earlier, tier_ids)
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
            failpoints.failpoint("adopt-done")
            old.remove()
            log.info("the snapshot is new: %d copies of earlier ones were adopted", adopted)

    def _adopt_one(self, old: Records, earlier: str, before: Ino, now: Ino, row: np.void) -> bool:
        record = old.get(before)
        if record is None or record.identity != identity_in(row):
            return False
        try:
            if not self.tiers[record.tier - 1].adopt(earlier, before, now, record.identity):
                return False
            self.records.put(now, record, doubted=old.doubts(before))
        except OSError as error:
            tier = self.tiers[record.tier - 1].name
            self._limiter.warning(
                tier,
                "tier %s: a copy of an earlier snapshot was given up, it will be made again: %s",
                tier,
                errno_words(error.errno),
            )
            return False
        failpoints.failpoint("adopt-recorded")
        return True

    def held(self, tier: Tier) -> Held:
        inos: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        sizes: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
        for found, tiers, found_sizes in self.records.load():
            here = tiers == tier.number
            inos.append(found[here])
            sizes.append(found_sizes[here])
        return Held(np.concatenate(inos), np.concatenate(sizes))

    def keep_within(self, tier: Tier, capacity: int) -> Held:
        """Removes the copies that do not fit into ``capacity`` bytes; returns the others. A tier
        may have a smaller capacity than at the last mount."""
        held = self.held(tier)
        fits = np.cumsum(held.sizes) <= capacity
        for ino in held.inos[~fits].tolist():
            self.records.clear(Ino(ino))
            tier.remove(Ino(ino))
        return Held(held.inos[fits], held.sizes[fits])

    def parts(self, tier: Tier, entries: int) -> list[Found]:
        """The partial copies of a tier of the versions in the snapshot, which has ``entries``
        inodes. All others are removed. To be called once, at start."""
        return self._parts.usable(tier, entries, self._version_of)

    def forgotten(self, tier: Tier) -> int:
        """The number of copies of a tier without any record, which ``sweep`` will remove."""
        with suppress(OSError):
            return 0 if len(self.held(tier).inos) else tier.count_copies()
        return 0

    def doubt(self, tier: Tier) -> npt.NDArray[np.int64]:
        """Marks all copies of a tier to be verified before use; returns them."""
        inos = self.held(tier).inos
        for ino in inos.tolist():
            record = self.records.get(Ino(ino))
            if record is not None and record.tier == tier.number:
                young = self.records.is_young(Ino(ino))
                self.records.put(Ino(ino), record, doubted=True, young=young)
        return inos

    def sweep(self, tier: Tier, *, before_ns: int) -> list[Ino]:
        """Removes copies without a record; returns the inode numbers of missing or truncated ones.

        Waits for the disk. Copies made after ``before_ns`` (wall clock) are kept: one may be
        committed and not recorded yet.
        """
        removed = tier.remove_other_generations()
        held = self.held(tier)
        believed = dict(zip(held.inos.tolist(), held.sizes.tolist(), strict=True))
        doubted = {ino for inos in self.records.unverified() for ino in inos.tolist()}
        for paths in tier.copies():
            for path in paths:
                ino = ino_of(path)
                if ino is None:
                    # Another program has put it there.
                    continue
                known = ino in believed
                # After a power cut a name may exist without its bytes.
                size = believed[ino] if known and ino in doubted else None
                if known and size is None:
                    del believed[ino]
                elif not known and (now := self.records.get(ino)) and now.tier == tier.number:
                    # The copy was made meanwhile, whatever the clock says.
                    continue
                elif tier.remove_stranger(path, before_ns=before_ns, unless_size=size):
                    removed += 1
                    failpoints.failpoint("sweep-removed")
                elif known:
                    del believed[ino]
        if removed:
            log.info("tier %s: removed %d files without a record", tier.name, removed)
        return [Ino(ino) for ino in sorted(believed)]

    def close(self, *, clean: bool) -> None:
        """``clean``: no copy is running. Then waits until the copies are on the disks."""
        synced = False
        if clean:
            with suppress(OSError):
                for tier in self.tiers:
                    tier.sync()
                synced = True
        failpoints.failpoint("end-synced")
        self.records.close(clean=synced)
        failpoints.failpoint("end-clean")
        for tier in self.tiers:
            # A stage, or the tier itself, may be gone; the next start sweeps again.
            with suppress(OSError):
                tier.sweep_stage()
            tier.close()


def _version_of(
    columns: Callable[[range], npt.NDArray[np.void]], renewed: Mapping[int, Identity], ino: Ino
) -> Identity:
    """The version of a file in the snapshot, or since a change by the drain."""
    identity = identity_in(columns(range(ino, ino + 1))[0])
    return renewed.get(identity.source_ino, identity)


@contextmanager
def _as_tier_error(tier: TierSettings) -> Iterator[None]:
    """Raises the OSError of a failing disk as a TierError."""
    try:
        yield
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(tier.path)!r}: {error.strerror}",
            hint="free space there, or name another directory",
        ) from error
