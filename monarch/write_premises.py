"""What a mount that can be written asks of this machine, and what earlier ones left in its tiers.

As in premises.py nothing is changed, and a path that hangs is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from monarch import registry
from monarch.absorbing import PREFIX, directory_of
from monarch.errors import TierError
from monarch.modes import Abilities
from monarch.places import MountedFileSystem, mount_table
from monarch.premises import Check, bounded, kind_of, nearest, room_of
from monarch.registry import MountRecord
from monarch.settings import MountSettings, TierSettings
from monarch.text import counted, escape_text
from monarch.tiers.directory import PRIVATE
from monarch.timeouts import PATIENCE_S, within
from monarch.units import format_bytes
from monarch.writeback.survey import survey

_MEMORY = frozenset({"tmpfs", "ramfs"})
_WILD = frozenset("*?[")
# A journal is read as a whole. Seconds.
_READING_S = 30.0


def check_writing(mount: MountSettings, records: Sequence[MountRecord]) -> Iterator[Check]:
    """``records``: the mounts there are."""
    name = f"{mount.name}: writing"
    if mount.absorbs:
        yield from check_mappings(name, Abilities.here())
        yield from bounded(name, mount.source, lambda: _check_source(name, mount))
        tiers = mount.tiers[0].path if mount.tiers else mount.source
        yield from bounded(name, tiers, lambda: _check_tier(name, mount, mount_table()))
    served = any(
        record.mountpoint == os.fspath(mount.mountpoint) and registry.alive(record)
        for record in records
    )
    for tier in mount.tiers:
        name = f"{mount.name}: tier {tier.name}"
        for directory in _left_in(tier):
            look = partial(_check_left, name, mount, directory, served=served)
            yield from bounded(name, directory, look, patience_s=_READING_S)


def check_mappings(name: str, abilities: Abilities) -> Iterator[Check]:
    """Whether a process that has a file mapped sees what another writes."""
    if abilities.kernel < (6, 6):
        yield Check(
            name,
            "warn",
            f"Linux {abilities.release}: a process that has a file mapped may not see what another"
            " process writes into it",
            "use 6.6 or newer, or read files that are being written without mapping them",
        )


def _left_in(tier: TierSettings) -> list[Path]:
    """Where written files may lie in a tier; none if it does not answer, which others tell of."""
    found: list[Path] = []

    def task() -> None:
        with suppress(OSError):
            found.extend(sorted((tier.path / PRIVATE).glob(f"{PREFIX}*")))

    return found if within(PATIENCE_S, task) else []


def _check_source(name: str, mount: MountSettings) -> Iterator[Check]:
    """Whether the source takes what is drained there."""
    for directory in sorted({_fixed(mount.source, pattern) for pattern in mount.absorbs}):
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            advice = "mount it with write access; until then all that is written stays in the tier"
            yield Check(name, "fail", f"{directory} is on a read-only file system", advice)
        elif not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            who = f"uid {os.geteuid()}"
            advice = "mount as a user who may write there, or give this one the right"
            yield Check(name, "fail", f"{directory} cannot be written by {who}", advice)
        else:
            yield Check(name, "ok", f"{directory} takes what is drained")


def _fixed(source: Path, pattern: str) -> Path:
    """The deepest directory there is above all that a pattern names."""
    path = source
    for part in pattern.split("/"):
        if _WILD & set(part):
            break
        path = path / part
    found = nearest(path)
    return found if found.is_dir() else found.parent


def _check_tier(
    name: str, mount: MountSettings, table: Sequence[MountedFileSystem]
) -> Iterator[Check]:
    """Whether what is written is safe in the tier that takes it, and has room."""
    wanted = mount.writeback.tier
    chosen = [tier for tier in mount.tiers if wanted in (None, tier.name)]
    if wanted is not None and not chosen:
        known = ", ".join(tier.name for tier in mount.tiers)
        detail = f"writeback.tier: there is no tier {wanted!r}"
        yield Check(name, "fail", detail, f"there are: {known}")
        return
    on_disk = [t for t in chosen if kind_of(nearest(t.path), table) not in _MEMORY]
    for tier in (on_disk or chosen)[:1]:
        if not on_disk:
            yield Check(
                name,
                "warn",
                f"tier {tier.name} ({tier.path}), which takes what is written, is memory: that"
                " survives a crash of the daemon, not of the machine",
                "add a tier on a disk, or name one with `writeback.tier`",
            )
        free, reserve = room_of(nearest(tier.path)).free, mount.writeback.reserve or 0
        if free < reserve:
            shown = f"{format_bytes(free)} are free, {format_bytes(reserve)} reserved for writing"
            advice = "make room; what does not fit is written at the source's speed"
            yield Check(name, "warn", f"{tier.path}: {shown}", advice)


def _check_left(
    name: str, mount: MountSettings, directory: Path, *, served: bool
) -> Iterator[Check]:
    """What was written and is not at its source."""
    own = directory.name == directory_of(Path(), mount.source).name
    try:
        found = survey(directory)
    except TierError as error:
        yield Check(name, "fail", error.args[0], error.hint)
        return
    faulty = next((waiting for waiting in found.waiting if waiting.fault), None)
    if faulty is not None and not served:
        what = f"{escape_text(os.fsdecode(faulty.path))} in {directory}: {faulty.fault}"
        advice = f"`monarch fsck {mount.mountpoint}` lists all; look at the disk: `dmesg`"
        yield Check(name, "fail", what, advice)
    if not found.operations or (own and served):
        return
    what = f"{counted(len(found.waiting), 'file', 'files')}, {format_bytes(found.bytes)}"
    if own:
        detail = f"{what}, written earlier, are not at the source yet"
        yield Check(name, "warn", detail, "mount it: draining goes on by itself")
    else:
        source = escape_text(os.fsdecode(found.source))
        detail = f"{what}, written for {source}, are not there yet"
        advice = f"mount {source} with this tier; until then leave {directory} alone"
        yield Check(name, "warn", detail, advice)
