"""Checks before a writable mount: its source and tiers, and written files of earlier mounts. As in
checks/preflight.py, nothing is changed, and a call that hangs is abandoned."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from monarch.checks.preflight import Check, bounded, nearest, room_of, with_state_directory
from monarch.config.defaults import kind_of, state_directory
from monarch.config.settings import MountSettings, TierSettings
from monarch.control import registry
from monarch.control.registry import MountRecord
from monarch.errors import TierError, Unanswered
from monarch.fuse.datapath_mode import Abilities
from monarch.posix.bounded_calls import PATIENCE_S, call_within
from monarch.posix.mounts import MountedFileSystem, mount_table
from monarch.text import counted, counted_changes, escape_text, format_bytes
from monarch.tiers.ownership import PRIVATE
from monarch.writeback.earlier import inspect, lost_changes
from monarch.writeback.store import PREFIX, directory_of

_MEMORY = frozenset({"tmpfs", "ramfs"})
_WILD = frozenset("*?[")
# Time limit for reading a journal, which is read as a whole.
_READING_S = 30.0


def check_writing(mount: MountSettings, records: Sequence[MountRecord]) -> Iterator[Check]:
    """All checks of a writable mount. ``records``: the existing mounts."""
    name = f"{mount.name}: writing"
    if mount.absorbs:
        yield from check_mappings(name, Abilities.here())
        yield from bounded(name, mount.source, lambda: _check_source(name, mount))
        tiers = mount.tiers[0].path if mount.tiers else mount.source
        yield from bounded(name, tiers, lambda: _check_tier(name, mount, mount_table()))
    state = state_directory(with_state_directory(mount, records))
    yield from bounded(name, state, lambda: _check_missing(name, mount, state))
    served = any(
        record.mountpoint == os.fspath(mount.mountpoint) and registry.alive(record)
        for record in records
    )
    for tier in mount.tiers:
        name = f"{mount.name}: tier {tier.name}"
        for directory in _written_in(tier):
            look = partial(_check_undrained, name, mount, directory, served=served)
            yield from bounded(name, directory, look, patience_s=_READING_S)


def _check_missing(name: str, mount: MountSettings, state: Path) -> Iterator[Check]:
    """Reports changes of earlier mounts whose tier is missing."""
    try:
        lost = lost_changes(mount, state)
    except TierError as error:
        yield Check(name, "fail", error.args[0], error.hint)
        return
    if lost is not None:
        what = counted(lost.operations, "change", "changes")
        were = "was" if lost.operations == 1 else "were"
        yield Check(
            name,
            "warn",
            f"{what} not at the source {were} in memory in tier {lost.tier}, and {were} lost when"
            " the machine was started",
            "the next mount names the files: `monarch ckpt lost`",
        )


def check_mappings(name: str, abilities: Abilities) -> Iterator[Check]:
    """Whether a process with a mapped file sees writes of other processes on this kernel."""
    if abilities.kernel < (6, 6):
        yield Check(
            name,
            "warn",
            f"Linux {abilities.release}: a process that has a file mapped may not see what another"
            " process writes into it",
            "use 6.6 or newer, or read files that are being written without mapping them",
        )


def _written_in(tier: TierSettings) -> list[Path]:
    """Directories of written files in a tier; empty if it does not answer (check_tier reports
    that)."""
    with suppress(OSError, Unanswered):
        return call_within(PATIENCE_S, lambda: sorted((tier.path / PRIVATE).glob(f"{PREFIX}*")))
    return []


def _check_source(name: str, mount: MountSettings) -> Iterator[Check]:
    """Whether the source can be written, so that data can be drained to it."""
    for directory in sorted({_fixed(mount.source, pattern) for pattern in mount.absorbs}):
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            advice = "mount it with write access; until then all written data stays in the tier"
            yield Check(name, "fail", f"{directory} is on a read-only file system", advice)
        elif not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            who = f"uid {os.geteuid()}"
            advice = "mount as a user who may write there, or give this user the permission"
            yield Check(name, "fail", f"{directory} cannot be written by {who}", advice)
        else:
            yield Check(name, "ok", f"{directory} can be written by the drain")


def _fixed(source: Path, pattern: str) -> Path:
    """The deepest existing directory above all paths that a pattern can match."""
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
    """Whether the tier for written data is persistent and has space."""
    wanted = mount.writeback.tier
    chosen = [tier for tier in mount.tiers if wanted in (None, tier.name)]
    if wanted is not None and not chosen:
        known = ", ".join(tier.name for tier in mount.tiers)
        detail = f"writeback.tier: there is no tier {wanted!r}"
        yield Check(name, "fail", detail, f"there are: {known}")
        return
    on_disk = [t for t in chosen if kind_of(nearest(t.path).resolve(), table) not in _MEMORY]
    for tier in (on_disk or chosen)[:1]:
        if not on_disk:
            yield Check(
                name,
                "warn",
                f"tier {tier.name} ({tier.path}), which stores written data, is in memory: the data"
                " survives a crash of the daemon, not of the machine",
                "add a tier on a disk, or name one with `writeback.tier`",
            )
        free, reserve = room_of(nearest(tier.path)).free, mount.writeback.reserve or 0
        if free < reserve:
            shown = f"{format_bytes(free)} are free, {format_bytes(reserve)} reserved for writing"
            advice = "free space; data that does not fit is written at the speed of the source"
            yield Check(name, "warn", f"{tier.path}: {shown}", advice)


def _check_undrained(
    name: str, mount: MountSettings, directory: Path, *, served: bool
) -> Iterator[Check]:
    """Reports written data in ``directory`` that is not at its source."""
    own = directory.name == directory_of(Path(), mount.source).name
    try:
        found = inspect(directory)
    except TierError as error:
        yield Check(name, "fail", error.args[0], error.hint)
        return
    faulty = next((waiting for waiting in found.waiting if waiting.fault), None)
    if faulty is not None and not served:
        what = f"{escape_text(os.fsdecode(faulty.path))} in {directory}: {faulty.fault}"
        advice = f"`monarch fsck {mount.mountpoint}` lists all; check the disk: `dmesg`"
        yield Check(name, "fail", what, advice)
    if not found.operations or (own and served):
        return
    count = len(found.waiting) or found.operations
    what = counted_changes(found.operations, len(found.waiting), found.bytes)
    are = "is" if count == 1 else "are"
    if own:
        detail = f"{what}, written earlier, {are} not at the source yet"
        yield Check(name, "warn", detail, "mount it: draining continues automatically")
    else:
        source = escape_text(os.fsdecode(found.source))
        detail = f"{what}, written for {source}, {are} not there yet"
        advice = f"mount {source} with this tier; until then leave {directory} alone"
        yield Check(name, "warn", detail, advice)
