"""Checks, and mends if told to, what a daemon that serves a mount keeps: ``fsck`` from within.

The questions are those of fsck.py. Here copies come and go meanwhile, so whatever looks wrong is
looked at again on the event loop, where nothing changes in between, before it is told or mended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from monarch.absorbing import WriteSide
from monarch.errors import SnapshotError, TierError
from monarch.fsck import (
    JOURNAL,
    RECORD_LOST,
    RECORD_UNUSED,
    STATE,
    WRITTEN_UNKNOWN,
    Findings,
    check_doors,
    doors_of_tier,
    remove,
    tell_written,
)
from monarch.namespace.overlay import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.report import FsckProgress, FsckReport
from monarch.threads import Threads, batches
from monarch.tiers.directory import Tier, copy_name
from monarch.tiers.examine import (
    MISSING,
    PIECE_BYTES,
    SEAL,
    TIER,
    TORN,
    UNKNOWN,
    Contents,
    Step,
    Suspect,
    compare,
)
from monarch.tiers.hierarchy import Hierarchy
from monarch.transfer.engine import Engine
from monarch.types import Identity, Ino
from monarch.vfs.filesystem import FileSystem
from monarch.writeback.objects import object_path
from monarch.writeback.survey import Survey, survey

Tell = Callable[[FsckProgress], Awaitable[None]]

# Files handled between two looks of the event loop at its other work.
_STRIDE = 256
# How long the accounts may take to come to rest, copies being under way. Seconds.
_REST_S = 2.0
_STEP_S = 0.02

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

_LOST = "the daemon serves it, and no record knows of it"


class Checkup:
    """Makes one check after the other. ``threads`` wait for the disks."""

    def __init__(
        self,
        *,
        state: Path,
        mountpoint: Path,
        hierarchy: Hierarchy,
        names: Namespace,
        residency: Residency,
        ledger: Ledger,
        engine: Engine,
        filesystem: FileSystem,
        writing: WriteSide | None,
        threads: Threads,
    ) -> None:
        self._state = state
        self._mountpoint = mountpoint
        self._hierarchy = hierarchy
        self._records = hierarchy.records
        self._names = names
        self._residency = residency
        self._ledger = ledger
        self._engine = engine
        self._filesystem = filesystem
        self._writing = writing
        self._threads = threads
        self._one_at_a_time = trio.Lock()

    async def run(self, *, digests: bool, repair: bool, tell: Tell) -> FsckReport:
        """Check everything; ``digests``: read every copy. ``tell`` hears how far that is."""
        async with self._one_at_a_time:
            check = _Check(self, digests=digests, repair=repair, tell=tell)
            return await check.run()


class _Check:
    """One check under way."""

    def __init__(self, of: Checkup, *, digests: bool, repair: bool, tell: Tell) -> None:
        self._of = of
        self._records = of._records
        self._residency = of._residency
        self._digests = digests
        self._repair = repair
        self._tell = tell
        self._findings = Findings()
        self._began_ns = time.time_ns()
        self._total_files = self._total_bytes = 0
        # The files that were told of: one fault is one finding, though it shows in two ways.
        self._told: set[Ino] = set()

    async def run(self) -> FsckReport:
        of = self._of
        tiers = of._hierarchy.tiers
        doors = [(STATE, of._state)]
        for tier in tiers:
            doors += await of._threads.run(list, doors_of_tier(tier.name, tier.own))
        await of._threads.run(
            partial(check_doors, self._findings, doors, owner=os.geteuid(), repair=self._repair)
        )
        await self._check_snapshot()
        for tier in tiers:
            held = of._hierarchy.held(tier)
            self._total_files += len(held.inos)
            self._total_bytes += held.bytes if self._digests else 0
        for tier in tiers:
            await self._check_tier(tier)
            await self._check_table(tier)
        await self._check_accounts(tiers)
        if of._writing is not None:
            await self._check_written(of._writing)
        return self._findings.report(
            state=os.fspath(of._state), mountpoint=os.fspath(of._mountpoint), served=True
        )

    async def _check_snapshot(self) -> None:
        served = self._of._names.snapshot
        try:
            # What is served may be in memory: the next mount begins with the file.
            snapshot = await self._of._threads.run(served.opened_again)
        except SnapshotError as error:
            self._tell_snapshot(served, str(error))
            return
        with snapshot:
            damages = snapshot.damages()
            while (found := await self._of._threads.run(_some, damages)) is not None:
                if found:
                    self._tell_snapshot(served, found[0])
                    return

    def _tell_snapshot(self, snapshot: Snapshot, what: str) -> None:
        told = os.fspath(snapshot.file)
        what = f"{what}; unmount, and mend it then"
        self._findings.add("snapshot", STATE, told, what, repaired=False)

    async def _check_tier(self, tier: Tier) -> None:
        own = tier.own
        outage = self._of._engine.out_of_service().get(tier.number)
        if outage is not None and not outage.is_read:
            # Nobody goes there now, and whoever asked would wait.
            self._findings.add("tier-gone", tier.name, os.fspath(own), outage.why, repaired=False)
            return
        root = -1
        try:
            root = await self._of._threads.run(os.open, own, _LIST)
            await self._check_directory(tier, own, root)
        except OSError as error:
            told = error.strerror or "cannot be used"
            self._findings.add("tier-gone", tier.name, os.fspath(own), told, repaired=False)
        finally:
            if root >= 0:
                os.close(root)

    async def _check_directory(self, tier: Tier, own: Path, root: int) -> None:
        run = self._of._threads.run
        generation = self._of._names.snapshot.id
        if not await run(_is_in_use, tier.directory, root, generation):
            what = "the daemon uses another one, that had this name"
            self._findings.add("tier-gone", tier.name, os.fspath(own), what, repaired=False)
            return
        contents = Contents(root)
        for name in await run(contents.strangers):
            told = os.fspath(own / name)
            self._findings.add("stranger", tier.name, told, "it is not ours", repaired=False)
        for path in await run(_older, contents, own, self._began_ns):
            number = path.name.removesuffix(".part")
            known = number.isdecimal() and int(number) <= self._residency.entries
            if not (known and self._residency.is_copying(Ino(int(number)))):
                await self._remove("stage", tier, path, "no process is writing it")
        for other in await run(contents.generations):
            if other != generation:
                # The start has removed all that it did not adopt.
                path = own / (Contents.PREFIX + other)
                await self._remove(UNKNOWN, tier, path, "it is of no snapshot that is known")
        steps = compare(
            root,
            generation,
            tier.number,
            self._records,
            seals=tier.seals,
            whole=self._digests,
            version_of=self._version,
        )
        while (turn := await self._of._threads.run(_turn, steps)) is not None:
            for step in turn:
                self._findings.files += step.files
                self._findings.nbytes += step.nbytes
                if step.suspect is not None and await self._holds(tier, step.suspect):
                    await self._note(tier, self._better_known(tier, step.suspect))
            await self._tell(
                FsckProgress(
                    self._findings.files,
                    self._total_files,
                    self._findings.nbytes,
                    self._total_bytes,
                )
            )

    async def _remove(self, kind: str, tier: Tier, path: Path, what: str) -> None:
        """A finding that is mended by removing a file, or a directory with all that it holds."""
        mended = False
        if self._repair:
            try:
                await self._of._threads.run(remove, path)
                mended = True
            except OSError as error:
                what = f"{what}; mending it failed: {error.strerror}"
        self._findings.add(kind, tier.name, os.fspath(path), what, repaired=mended)

    def _version(self, ino: Ino) -> Identity | None:
        try:
            return self._of._names.attributes(ino).identity
        except IndexError:
            return Identity(-1, 0, 0, 0)

    async def _holds(self, tier: Tier, suspect: Suspect) -> bool:
        """Whether it is still so, or was a copy that came or went while it was looked at."""
        ino = suspect.ino
        if suspect.kind in (UNKNOWN, TIER) and not await self._stays(tier, suspect.path):
            return False
        if ino is None or ino > self._residency.entries:
            return True
        if self._residency.is_copying(ino):
            return False
        record = self._records.get(ino)
        if suspect.kind in (UNKNOWN, TIER):
            return record is None or record.tier != tier.number
        if suspect.kind == TORN:
            return self._records.is_torn(ino)
        here = self._is_resident(tier, ino) and record == suspect.record
        if suspect.kind == MISSING:
            return here and not await self._of._threads.run(tier.has, ino)
        return here

    async def _stays(self, tier: Tier, path: str) -> bool:
        """Whether a file is there when all that was let go of has been removed."""
        with trio.move_on_after(_REST_S):
            await self._of._engine.removed()
            return await self._of._threads.run(_is_there, tier.directory, path)
        return False

    def _better_known(self, tier: Tier, suspect: Suspect) -> Suspect:
        """Of a copy that no record knows the daemon may know all the same."""
        if suspect.kind != UNKNOWN or not self._is_resident(tier, suspect.ino):
            return suspect
        return Suspect(RECORD_LOST, suspect.path, _LOST, suspect.ino)

    async def _note(self, tier: Tier, suspect: Suspect) -> None:
        """Tell of a suspect that is one, and mend it."""
        ino = suspect.ino
        if ino is not None:
            self._told.add(ino)
        path = f"{Contents.PREFIX}{self._of._names.snapshot.id}/{suspect.path}"
        told = os.fspath(tier.own / path)
        if ino is not None and suspect.kind != UNKNOWN and ino <= self._residency.entries:
            told = os.fsdecode(self._of._names.path(ino))
        what, mended = suspect.what, False
        if self._repair:
            try:
                await self._mend(tier, suspect)
                mended = True
            except OSError as error:
                what = f"{what}; mending it failed: {error.strerror}"
        self._findings.add(suspect.kind, tier.name, told, what, repaired=mended)

    async def _mend(self, tier: Tier, suspect: Suspect) -> None:
        """Seal a copy, or remove it with its record, or what is none. Raises OSError."""
        of, ino, record = self._of, suspect.ino, suspect.record
        if suspect.kind == SEAL and ino is not None and record is not None:
            await of._threads.run(tier.verify, ino, record.identity, record.digest)
        elif suspect.kind == RECORD_UNUSED and ino is not None:
            self._records.clear(ino)
            await of._threads.run(tier.remove, ino)
        elif self._is_resident(tier, ino) and ino is not None and suspect.kind != TIER:
            failure = OSError(suspect.error, f"found by fsck: {suspect.what}")
            await of._filesystem.drop_damaged(ino, tier.number, failure)
        else:
            await of._threads.run(
                partial(tier.remove_stranger, suspect.path, before_ns=self._began_ns)
            )
            if suspect.kind == TORN and ino is not None:
                self._records.clear(ino)

    def _is_resident(self, tier: Tier, ino: Ino | None) -> bool:
        known = ino is not None and ino <= self._residency.entries
        return known and self._residency.tier_of(Ino(ino or 0)) == tier.number

    async def _check_table(self, tier: Tier) -> None:
        """What the daemon believes to be resident against the records, both ways."""
        for batch in batches(self._residency.resident_in(tier.number), _STRIDE):
            for ino in batch:
                record = self._records.get(ino)
                lost = record is None or record.tier != tier.number
                if lost and ino not in self._told and self._is_resident(tier, ino):
                    await self._note(tier, Suspect(RECORD_LOST, copy_name(ino), _LOST, ino))
            await trio.sleep(0)
        recorded = self._of._hierarchy.held(tier).inos.tolist()
        for batch in batches(map(Ino, recorded), _STRIDE):
            for ino in batch:
                record = self._records.get(ino)
                unused = record is not None and record.tier == tier.number
                if unused and not (self._residency.tier_of(ino) or self._residency.is_copying(ino)):
                    what = "it is recorded, and the daemon does not serve it"
                    await self._note(tier, Suspect(RECORD_UNUSED, copy_name(ino), what, ino))
            await trio.sleep(0)

    async def _check_written(self, side: WriteSide) -> None:
        """The journal against the objects, both changing meanwhile: what is so twice is so."""
        place = side.place
        try:
            found = await self._of._threads.run(survey, place.directory)
            if found.unknown or any(waiting.fault for waiting in found.waiting):
                await trio.sleep(_REST_S)
                before, found = found, await self._of._threads.run(survey, place.directory)
                found = _in_both(before, found)
        except TierError as error:
            told, what = os.fspath(place.directory), str(error.args[0])
            self._findings.add(JOURNAL, place.tier.name, told, what, repaired=False)
            return
        self._findings.files += len(found.waiting)
        tell_written(self._findings, place.tier.name, found)
        for number in found.unknown:
            # One of this mount may be about to be recorded.
            if number < place.found.next_object:
                path = object_path(place.directory, number)
                await self._remove(WRITTEN_UNKNOWN, place.tier, path, "no record needs it")

    async def _check_accounts(self, tiers: Sequence[Tier]) -> None:
        """The ledger against the records, at a moment when nothing is on its way."""
        with trio.move_on_after(_REST_S) as patience:
            while self._of._engine.running or self._of._engine.queued:
                await trio.sleep(_STEP_S)
        if patience.cancelled_caught:
            return
        for tier in tiers:
            held = self._of._hierarchy.held(tier)
            counted = (
                self._residency.resident_files(tier.number),
                self._of._ledger.used(tier.number),
            )
            recorded = (len(held.inos), held.bytes)
            if counted != recorded:
                what = (
                    f"{counted[0]} files with {counted[1]} bytes are counted,"
                    f" {recorded[0]} with {recorded[1]} recorded"
                )
                told = os.fspath(tier.path)
                self._findings.add("accounts", tier.name, told, what, repaired=False)


def _in_both(before: Survey, after: Survey) -> Survey:
    """What is wrong in two surveys, one after the other."""
    faults = {(w.object, w.fault) for w in before.waiting}
    waiting = tuple(
        w if (w.object, w.fault) in faults else replace(w, fault="") for w in after.waiting
    )
    unknown = tuple(number for number in after.unknown if number in before.unknown)
    return replace(after, waiting=waiting, unknown=unknown)


def _is_in_use(directory: int, root: int, generation: str) -> bool:
    """Whether ``directory`` is that of the generation beneath ``root``. Raises OSError."""
    used = os.fstat(directory)
    there = os.stat(Contents.PREFIX + generation, dir_fd=root, follow_symlinks=False)
    return (there.st_dev, there.st_ino) == (used.st_dev, used.st_ino)


def _older(contents: Contents, own: Path, than_ns: int) -> list[Path]:
    """The stages that have been as they are since before that time (wall clock)."""
    older = []
    for path in (own / name for name in contents.stages()):
        # Of a copy under way it goes when the copy is done.
        with suppress(FileNotFoundError):
            if path.lstat().st_ctime_ns < than_ns:
                older.append(path)
    return older


def _is_there(directory: int, path: str) -> bool:
    try:
        os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _turn(steps: Iterator[Step]) -> list[Step] | None:
    """Go on for about a piece's worth of reading; None at the end. Waits for the disk."""
    done: list[Step] = []
    nbytes = 0
    for step in steps:
        done.append(step)
        nbytes += step.nbytes
        if nbytes >= PIECE_BYTES or len(done) >= _STRIDE:
            break
    return done or None


def _some(damages: Iterator[str]) -> list[str] | None:
    """The damages among the next few blocks; None at the end."""
    looked = [text for text, _ in zip(damages, range(64), strict=False)]
    return [text for text in looked if text] if looked else None
