"""The remarks of `monarch mount`: the mode, the share of data that fits, and warnings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.config.defaults import is_remote, kind_of, state_beside
from monarch.config.settings import MountSettings
from monarch.posix.mounts import mount_table
from monarch.telemetry.report import Mode
from monarch.text import MiB, counted, format_bytes
from monarch.tiers.ownership import other_mounts
from monarch.tiers.tier import Space, Tier

# A smaller capacity is probably a mistake.
_LEAST_CAPACITY = 1 * MiB


@dataclass(frozen=True, slots=True)
class TierRoom:
    """A tier with the bytes that it already holds; ``forgotten``: the number of copies there that
    the mount has no record of."""

    tier: Tier
    capacity: int
    space: Space
    held: int
    forgotten: int


def remarks(
    settings: MountSettings,
    mode: Mode,
    *,
    nbytes: int,
    tiers: Sequence[TierRoom],
    absorbs_in_memory: bool,
    served: Collection[str],
    state: Path,
) -> list[str]:
    """The mode and the share of ``nbytes`` that fits, then a line for each warning.

    ``served``: the state directories of running mounts; ``state``: that of this mount.
    """
    room = 0
    lines = []
    table = mount_table()
    for each, given in zip(tiers, settings.tiers, strict=True):
        tier, name = each.tier, each.tier.name
        free = each.space.available - given.keep_free_within(each.space.total)
        room += max(0, min(each.capacity, each.held + free))
        if given.capacity is not None and given.capacity > each.held + each.space.available:
            asked, available = format_bytes(given.capacity), format_bytes(each.space.available)
            lines.append(f"tier {name}: {asked} asked for, {available} free at {tier.path}")
        if each.capacity < min(nbytes, _LEAST_CAPACITY):
            lines.append(
                f"tier {name}: its capacity is {format_bytes(each.capacity)}, which holds next to"
                " nothing; a size without a unit is in bytes, write it like 500MB or 800GiB"
            )
        if each.forgotten:
            lines.append(
                f"tier {name}: {counted(each.forgotten, 'copy', 'copies')} of an earlier mount will"
                f" be removed and made anew: the state directory {state} has no record of them (it"
                " is new, was mounted with other tiers meanwhile, or with another pack)"
            )
        kind = kind_of(tier.path.resolve(), table)
        if is_remote(kind):
            lines.append(
                f"tier {name} is on {kind}, a network file system: no faster than the source"
            )
    fits = 1.0 if nbytes <= room else room / nbytes
    for tier in [each.tier for each in tiers if fits < 1]:
        found = other_mounts(tier.own)
        others = {source or "another source" for source, own in found if own not in served}
        if others:
            lines.append(
                f"tier {tier.name} also holds copies of {', '.join(sorted(others))},"
                f" not mounted: `monarch evict --tier {tier.path}` shows them"
            )
    if state == state_beside(settings):
        lines.append(
            f"a second mount of this source: its records, snapshot and log are in {state}, and its"
            " copies are its own"
        )
    if absorbs_in_memory and settings.absorbs:
        lines.append(
            "written data is kept in memory: after fsync it survives the daemon, not the machine;"
            " add a tier on a disk"
        )
    opens = ", open: none" if mode.open == "none" else ""
    share = "all" if fits == 1 else f"{int(fits * 100)}%"
    return [f"{mode.datapath}{opens}; {share} of {format_bytes(nbytes)} fits", *lines]
