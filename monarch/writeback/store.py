"""Where written data is kept: a directory of the absorbing tier, with the data of earlier mounts.

    TIER/monarch/absorbed-SOURCE/      SOURCE: 16 hexadecimal digits of the source's path
        lock                           held while a daemon uses the directory
        journal                        every change, in order (writeback/journal.py)
        snapshot                       the id of the snapshot that the journal changes
        XX/NUMBER                      objects: the bytes of written files
        reserve                        space for the journal on a full disk
        doubtful/                      what a power cut left of objects (writeback/doubtful.py)

Data that was not drained when a mount ended is found by the next mount that has the tier, even by a
read-only one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from monarch.config.settings import MountSettings
from monarch.errors import TierError
from monarch.posix.files import closing_fd
from monarch.posix.private_directory import Lock, open_private, read_private, replace_private
from monarch.tiers.ownership import PRIVATE
from monarch.tiers.tier import Space, Tier
from monarch.writeback.doubtful import Doubtful
from monarch.writeback.journal import Journal, Replay, read_replay
from monarch.writeback.objects import Objects
from monarch.writeback.reserve import Reserve
from monarch.writeback.tier_objects import FULL

log = logging.getLogger(__name__)

PREFIX = "absorbed-"
_SNAPSHOT = "snapshot"


@dataclass(slots=True)
class WriteStore:
    """The absorbing tier with its written data. ``found`` is the journal of earlier mounts; a
    WriteBack that has replayed it removes its history."""

    tier: Tier
    directory: Path
    lock: Lock
    journal: Journal
    objects: Objects
    found: Replay
    doubtful: Doubtful
    reserve: Reserve

    def space(self) -> Space:
        """The space of the tier's disk; restores the reserve if there is room. Waits for the disk.
        Raises OSError."""
        self.reserve.make()
        return self.tier.space()

    def close(self) -> None:
        with suppress(OSError):
            self.journal.sync()
        self.journal.close()
        self.lock.release()


def directory_of(tier: Path, source: Path) -> Path:
    """Where a tier keeps the data written for a source."""
    digest = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(source)))
    return tier / PRIVATE / f"{PREFIX}{digest}"


def open_write_store(settings: MountSettings, tiers: Sequence[Tier]) -> WriteStore | None:
    """Opens the directory for written data; None for a read-only mount if no tier has such data.

    Raises TierError if the directory cannot be used, LockedError if another mount of the source
    uses it.
    """
    kept = [tier for tier in tiers if directory_of(tier.path, settings.source).exists()]
    if not kept and not settings.absorbs:
        return None
    chosen = _with_changes(settings, kept) if kept else _chosen(settings, tiers)
    if kept and settings.absorbs and (wanted := _chosen(settings, tiers)) is not chosen:
        log.warning(
            "tier %s still has data of an earlier mount, so it continues to absorb instead of %s",
            chosen.name,
            wanted.name,
        )
    if chosen.in_memory and settings.absorbs:
        log.warning(
            "tier %s is memory: what is written there survives the daemon, not the machine",
            chosen.name,
        )
    directory = directory_of(chosen.path, settings.source)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        with closing_fd(os.open(directory, flags)) as fd:
            lock = Lock(
                fd,
                f"what is written for {os.fspath(settings.source)!r} in {os.fspath(directory)!r}",
                os.fspath(settings.mountpoint),
                instead="give this mount another tier with --tier PATH",
            )
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(chosen.path)!r}: {error.strerror}",
            hint="make room there, or name another with writeback.tier",
        ) from error
    journal = Journal.open(directory, source=os.fsencode(settings.source))
    objects = Objects(directory, unsynced=journal.doubtful)
    found = journal.replay()
    doubtful = Doubtful(directory)
    doubtful.keep(found.doubted)
    reserve = Reserve(directory)
    reserve.make()
    return WriteStore(chosen, directory, lock, journal, objects, found, doubtful, reserve)


def make_room(settings: MountSettings) -> None:
    """Gives up the reserve of each full tier: a mount needs some space there."""
    for tier in settings.tiers:
        if Reserve(directory_of(tier.path, settings.source)).give_up_if_full():
            log.warning("tier %s is full: what it has in reserve is given up", tier.path)


def _chosen(settings: MountSettings, tiers: Sequence[Tier]) -> Tier:
    name = settings.writeback.tier
    if name is None:
        return next((tier for tier in tiers if not tier.in_memory), tiers[0])
    for tier in tiers:
        if tier.name == name:
            return tier
    known = ", ".join(tier.name for tier in tiers)
    raise TierError(f"writeback.tier: there is no tier {name!r}", hint=f"there are: {known}")


def _with_changes(settings: MountSettings, kept: Sequence[Tier]) -> Tier:
    """Of tiers with written data the first with changes that the source lacks, else the first.
    Raises TierError if a journal cannot be read."""
    if len(kept) == 1:
        return kept[0]
    undrained = [tier for tier in kept if _has_undrained(directory_of(tier.path, settings.source))]
    for tier in undrained[1:]:
        log.warning(
            "tier %s has changes that the source lacks, too: they are shown and drained by the next"
            " mount, after those of tier %s",
            tier.name,
            undrained[0].name,
        )
    return next(iter(undrained), kept[0])


def _has_undrained(directory: Path) -> bool:
    if not (directory / "journal").exists():
        return False
    found = read_replay(directory)
    return any(seq not in found.done and op.kind != "gone" for seq, op in found.ops)


def snapshot_known(directory: Path) -> str:
    """The id of the snapshot that the journal changes; empty if none is known."""
    with suppress(OSError, UnicodeDecodeError):
        return read_private(directory / _SNAPSHOT).decode("ascii").strip()
    return ""


def know_snapshot(directory: Path, snapshot_id: str) -> None:
    """Notes the id of the snapshot that the journal changes; empty for none. Raises OSError.

    On a full disk it is written over the earlier id, and keeps its length: the block stays. What a
    power cut leaves of the two is the id of no snapshot.
    """
    path = directory / _SNAPSHOT
    try:
        replace_private(path, snapshot_id)
    except OSError as error:
        if error.errno not in FULL or not path.exists():
            raise
        with closing_fd(open_private(path, os.O_WRONLY)) as fd:
            content = snapshot_id.encode("ascii").ljust(os.fstat(fd).st_size)
            if os.pwrite(fd, content, 0) < len(content):
                raise
            os.fsync(fd)


def forget_snapshot(directory: Path) -> None:
    """As ``know_snapshot`` of none; gives the place of a file back to the disk. Raises OSError."""
    (directory / _SNAPSHOT).unlink(missing_ok=True)
