"""Where what is written goes: the tier that absorbs it, its journal, and what that tells.

    TIER/monarch/absorbed-SOURCE/      SOURCE: which source it is of, 16 hexadecimal digits
        lock                           held while a daemon uses it
        journal                        every operation, in its order (writeback/journal.py)
        XX/NUMBER                      the bytes of the files that were written

What was not drained when a mount ended is found by the next one that has the tier, even if that
mount cannot be written any more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import trio
import xxhash

from monarch.absorbed import Covered
from monarch.errors import TierError
from monarch.footing import private_opener
from monarch.namespace.overlay import Namespace
from monarch.namespace.written import NAME_BYTES
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.settings import MountSettings
from monarch.state import read_note
from monarch.text import counted
from monarch.threads import Threads
from monarch.tiers.directory import PRIVATE, Space, Tier
from monarch.tiers.lock import Lock
from monarch.transfer.readers import Readers
from monarch.types import WRITTEN_INO, Ino, file_now_ns
from monarch.units import format_bytes
from monarch.vfs.files import WrittenFiles
from monarch.vfs.inquiry import Inquiry
from monarch.vfs.replay import replay
from monarch.vfs.room import Room
from monarch.vfs.served import FastWrites
from monarch.vfs.stock import Stock
from monarch.vfs.writing import Writing
from monarch.writeback.drain import Drain
from monarch.writeback.home import Home
from monarch.writeback.journal import Journal, Replay, Told
from monarch.writeback.losses import Numbered, names_of
from monarch.writeback.objects import Objects
from monarch.writeback.survey import survey

log = logging.getLogger(__name__)

PREFIX = "absorbed-"
_SNAPSHOT = "snapshot"
# How long small files may wait for the drain while more of them come. Seconds.
_HOLD_S = 5.0
# Calls of the absorbing tier at the same time: opening, writing beside the fast path, fsync.
_TIER_THREADS = 16


@dataclass(frozen=True, slots=True)
class Absorbing:
    """The tier that absorbs, and what it holds of earlier mounts."""

    tier: Tier
    directory: Path
    lock: Lock
    journal: Journal
    objects: Objects
    found: Replay


def directory_of(tier: Path, source: Path) -> Path:
    """Where a tier keeps what is written for a source."""
    digest = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(source)))
    return tier / PRIVATE / f"{PREFIX}{digest}"


def absorbing(settings: MountSettings, tiers: Sequence[Tier], state: Path) -> Absorbing | None:
    """The place for what is written; None for a mount that is read-only and never was another.

    Raises TierError if it cannot be used, or if another tier than these has what was not drained,
    and LockedError if another mount of the source uses it.
    """
    _require_nothing_left_behind(settings, state)
    kept = [tier for tier in tiers if directory_of(tier.path, settings.source).exists()]
    if not kept and not settings.absorbs:
        return None
    chosen = kept[0] if kept else _chosen(settings, tiers)
    if kept and settings.absorbs and (wanted := _chosen(settings, tiers)) is not chosen:
        log.warning(
            "tier %s still has what was written before, so it goes on absorbing instead of %s",
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
        lock = _locked(directory, settings)
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(chosen.path)!r}: {error.strerror}",
            hint="make room there, or name another with writeback.tier",
        ) from error
    journal = Journal.open(directory, source=os.fsencode(settings.source))
    objects = Objects(directory)
    found = journal.replay()
    return Absorbing(chosen, directory, lock, journal, objects, found)


def _locked(directory: Path, settings: MountSettings) -> Lock:
    """Raises OSError, LockedError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        what = f"what is written for {os.fspath(settings.source)!r} in {os.fspath(directory)!r}"
        another = "give this mount another tier with --tier PATH"
        return Lock(fd, what, os.fspath(settings.mountpoint), instead=another)
    finally:
        os.close(fd)


def _require_nothing_left_behind(settings: MountSettings, state: Path) -> None:
    """Who takes a tier out of the configuration must not forget what only that has."""
    try:
        before = read_note(state).tiers
    except TierError:
        return
    now = {os.path.realpath(tier.path) for tier in settings.tiers}
    for tier in before:
        directory = directory_of(Path(tier.path), settings.source)
        if os.path.realpath(tier.path) in now or not (directory / "journal").exists():
            continue
        left = survey(directory)
        if left.operations:
            told = f"{counted(len(left.waiting), 'file', 'files')}, {format_bytes(left.bytes)},"
            raise TierError(
                f"tier {tier.path!r} is not used any more, but still has {told} not at the source",
                hint="mount with it until they are drained, or give them up by removing"
                f" {os.fspath(directory)}",
            )


def _chosen(settings: MountSettings, tiers: Sequence[Tier]) -> Tier:
    name = settings.writeback.tier
    if name is None:
        return next((tier for tier in tiers if not tier.in_memory), tiers[0])
    for tier in tiers:
        if tier.name == name:
            return tier
    known = ", ".join(tier.name for tier in tiers)
    raise TierError(f"writeback.tier: there is no tier {name!r}", hint=f"there are: {known}")


def snapshot_known(directory: Path) -> str:
    """The id of the snapshot over which the journal leads to the tree; empty if none is known."""
    with suppress(OSError):
        return (directory / _SNAPSHOT).read_text().strip()
    return ""


def know_snapshot(directory: Path, snapshot_id: str) -> None:
    """Raises OSError."""
    staged = directory / f"{_SNAPSHOT}.part"
    with open(staged, "w", encoding="ascii", opener=private_opener) as file:
        file.write(snapshot_id)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(directory / _SNAPSHOT)


def _renumbered(found: Replay) -> Replay:
    """``found`` with numbers below 0 for what an older snapshot had, by which a new one has others.

    Those of what was made on a mount are never given again.
    """
    numbers: dict[int, int] = {}
    ops = []
    for seq, op in found.ops:
        if 0 < op.ino < WRITTEN_INO:
            op = replace(op, ino=numbers.setdefault(op.ino, -2 * seq))
        if 0 < op.over_ino < WRITTEN_INO:
            op = replace(op, over_ino=numbers.setdefault(op.over_ino, -2 * seq - 1))
        ops.append((seq, op))
    return replace(found, ops=tuple(ops))


def unfinished(found: Replay, objects: Objects) -> Iterator[Numbered]:
    """What the source has not got: changes, and the making of files that were open when their
    daemon was killed, under the names that they have by now."""
    ops = found.ops
    made = {op.object for _, op in ops if op.kind in ("create", "take")}
    told = found.told()
    new = found.unpublished(made) | {n for n in made & told.keys() if _differs(objects, n, told[n])}
    names = names_of(ops, new)
    latest = {
        n: replace(op, path=names[n][0], paths=tuple(names[n]) if len(names[n]) > 1 else ())
        for _, op in ops
        if (n := op.object) in names and op.kind in ("create", "take")
    }
    for _, op in ops:
        if op.kind == "attr" and op.object in latest:
            given = {name: getattr(op, name) for name in ("mode", "uid", "gid")}
            told_of = {name: value for name, value in given.items() if value is not None}
            latest[op.object] = replace(latest[op.object], **told_of)
    for seq, op in ops:
        if seq not in found.done:
            yield seq, op
        elif op.kind in ("create", "take") and op.object in latest:
            yield seq, latest[op.object]


def _differs(objects: Objects, number: int, told: Told) -> bool:
    """Whether an object was written since ``told`` was recorded of it."""
    try:
        status = objects.status(number)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) != told


class WriteSide:
    """Everything of a mount that can be written, wired: what ``daemon`` runs and asks."""

    def __init__(
        self,
        place: Absorbing,
        *,
        settings: MountSettings,
        snapshot_id: str,
        names: Namespace,
        inquiry: Inquiry,
        readers: Readers,
        ledger: Ledger,
        residency: Residency,
        fast: FastWrites | None,
        taken: Callable[[Ino], None],
        evict: Callable[[Ino], int],
        evicted: Callable[[], Awaitable[None]],
    ) -> None:
        self.place = place
        self._names = names
        self._settings = settings.writeback
        # Who ends the mount may not want to wait.
        self._patience = trio.CancelScope(shield=True)
        self._is_abandoned = False
        # Of their own, for what they wait for must hold up nobody who reads.
        self._threads = Threads(_TIER_THREADS, "absorb", abandon=True)
        drain_threads = Threads(settings.writeback.workers + 2, "drain", abandon=True)
        home = Home(inquiry.source, place.journal.token)
        stock = self.stock = Stock(names)
        self.drain = Drain(
            contents=stock,
            journal=place.journal,
            objects=place.objects,
            home=home,
            threads=drain_threads,
            bandwidth=settings.writeback.bandwidth,
            verify=settings.writeback.verify,
            workers=settings.writeback.workers,
            busy=readers.busy,
            demand=self._is_pressed,
            hold_s=_HOLD_S,
        )
        self.files = WrittenFiles(
            names=names,
            stock=stock,
            journal=place.journal,
            objects=place.objects,
            drain=self.drain,
            home=home,
            inquiry=inquiry,
            make_room=self._make_room,
            threads=self._threads,
            tier=place.tier.number,
            fast=fast,
        )
        self.room = Room(
            tier=place.tier,
            reserve=settings.writeback.reserve,
            files=self.files,
            stock=stock,
            ledger=ledger,
            residency=residency,
            look=self._look,
            evict=evict,
            evicted=evicted,
        )
        is_new = snapshot_known(place.directory) != snapshot_id
        found = self._found = _renumbered(place.found) if is_new else place.found
        self.drain.load(found)
        ops = self._unfinished(snapshot_id) if is_new else list(found.ops)
        self.writing = Writing(
            names=names,
            covered=Covered(settings.absorbs),
            drain=self.drain,
            files=self.files,
            inquiry=inquiry,
            next_object=place.found.next_object,
            waits_for_source=settings.writeback.fsync == "source",
            names_max=settings.writeback.names_within(0, each=NAME_BYTES),
            taken=taken,
            space=self.room.told,
        )
        self._take_up(ops)

    def _unfinished(self, snapshot_id: str) -> list[Numbered]:
        """What leads from a new snapshot to the tree: it knows what the source has got."""
        found, place = self._found, self.place
        ops = [*unfinished(found, place.objects)]
        if ops or found.done:
            known = self.drain.known_of(ops)
            place.journal.compact(ops, position=place.journal.position, known=known)
        know_snapshot(place.directory, snapshot_id)
        return ops

    def _take_up(self, ops: list[Numbered]) -> None:
        """Show what was written in earlier mounts, and go on draining it."""
        found, place = self._found, self.place
        replay(self._names, ops, now_ns=file_now_ns())
        waiting = [(seq, op) for seq, op in ops if seq not in found.done]
        if waiting:
            log.info(
                "%s of earlier mounts %s on the way to the source",
                counted(len(waiting), "operation", "operations"),
                "is" if len(waiting) == 1 else "are",
            )
        self.files.take_up(ops, found.done)
        place.objects.sweep({op.object for _, op in ops})
        self.files.record_unrecorded(found)

    def _is_pressed(self) -> bool:
        """Whether what waits takes so much that it goes before readers of the source."""
        return self.drain.waiting_bytes > self.room.reserve / 2

    async def _make_room(self, size: int) -> bool:
        return await self.room.make(size)

    async def _look(self) -> Space:
        return await self._threads.run(self.place.tier.space)

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What goes on beside the answers."""
        return {"drain": self.drain.run, "writing": self.files.run, "room": self.room.run}

    def abandon(self) -> None:
        """Have ``finish`` end now, or, if it has not begun, at once."""
        self._is_abandoned = True
        self._patience.cancel()

    async def finish(self) -> None:
        """Wait until the source has all, but for no longer than configured."""
        self._patience.deadline = trio.current_time() + self._settings.end_timeout
        with self._patience:
            await self.drain.settle()
        if self._patience.cancelled_caught:
            backlog = self.drain.backlog()
            log.log(
                logging.INFO if self._is_abandoned else logging.WARNING,
                "%s with %s were not drained; they stay in tier %s, and the next mount goes on",
                counted(backlog.files, "file", "files"),
                format_bytes(backlog.bytes),
                self.place.tier.name,
            )

    def close(self) -> None:
        with suppress(OSError):
            self.place.journal.sync()
        self.place.journal.close()
        self.place.lock.release()
