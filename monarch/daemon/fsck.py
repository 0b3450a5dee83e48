"""Checks, and with ``repair`` corrects, what a running daemon keeps: ``fsck`` of a served mount.

The checks are those of checks/fsck.py. Copies come and go meanwhile: so each suspect is checked
again on the event loop, where nothing changes in between, before it is reported or repaired.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import trio

from monarch.checks import findings
from monarch.checks.fsck import remove
from monarch.errors import SnapshotError, TierError
from monarch.namespace.namespace import Namespace
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.posix.files import closing_fd
from monarch.posix.thread_pool import ThreadPool, batches
from monarch.telemetry.report import FsckProgress, FsckReport
from monarch.tiers import verify
from monarch.tiers.contents import Contents, copy_name, part_name, part_of
from monarch.tiers.hierarchy import Hierarchy
from monarch.tiers.partial import compare_parts
from monarch.tiers.tier import Tier
from monarch.transfer.engine import Engine
from monarch.transfer.tier_monitor import TierMonitor
from monarch.types import Identity, Ino
from monarch.vfs.copies import Copies
from monarch.vfs.parts import PartialCopies
from monarch.vfs.renewals import Renewals
from monarch.writeback.earlier import inspect
from monarch.writeback.objects import object_path
from monarch.writeback.setup import WriteBack

# Files handled before the event loop runs other tasks.
_STRIDE = 256
# Time limit for a moment without running copies, in which the accounts can be compared.
_REST_S = 2.0
_STEP_S = 0.02

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

_LOST = "the daemon serves it, and it has no record"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFsck:
    """Checks what a running daemon keeps. ``threads`` wait for the disks."""

    state: Path
    mountpoint: Path
    hierarchy: Hierarchy
    names: Namespace
    residency: Residency
    ledger: Ledger
    monitor: TierMonitor
    engine: Engine
    copies: Copies
    parts: PartialCopies
    renewals: Renewals
    writing: WriteBack | None
    threads: ThreadPool
    _one_at_a_time: trio.Lock = field(default_factory=trio.Lock, init=False)

    async def run(
        self, *, digests: bool, repair: bool, report: Callable[[FsckProgress], Awaitable[None]]
    ) -> FsckReport:
        """Checks everything; ``digests``: reads every copy. ``report`` receives the progress."""
        async with self._one_at_a_time:
            return await _FsckRun(self, digests, repair, report).run()


@dataclass
class _FsckRun:
    """One running check."""

    _of: OnlineFsck
    _digests: bool
    _repair: bool
    _report: Callable[[FsckProgress], Awaitable[None]]

    def __post_init__(self) -> None:
        self._records = self._of.hierarchy.records
        self._residency = self._of.residency
        self._findings = findings.Findings()
        self._began_ns = time.time_ns()
        # The files that were reported: one fault that is found in two ways is one finding.
        self._reported: set[Ino] = set()

    async def run(self) -> FsckReport:
        of = self._of
        tiers = of.hierarchy.tiers
        directories = [(findings.STATE, of.state)]
        for tier in tiers:
            directories += await of.threads.run(list, findings.private_in_tier(tier.name, tier.own))
        check = partial(findings.check_private, self._findings, directories)
        await of.threads.run(partial(check, owner=os.geteuid(), repair=self._repair))
        await self._check_snapshot()
        for tier in tiers:
            held = of.hierarchy.held(tier)
            self._findings.total_files += len(held.inos)
            self._findings.total_nbytes += held.bytes if self._digests else 0
        for tier in tiers:
            await self._check_tier(tier)
            await self._check_table(tier)
        await self._check_accounts(tiers)
        if of.writing is not None:
            await self._check_written(of.writing)
        return self._findings.report(
            state=os.fspath(of.state), mountpoint=os.fspath(of.mountpoint), served=True
        )

    async def _check_snapshot(self) -> None:
        served = self._of.names.snapshot
        damage = ""
        try:
            # The served snapshot may be in memory; the next mount reads the file, so it is checked.
            with await self._of.threads.run(served.opened_again) as snapshot:
                damages = snapshot.damages()
                while looked := await self._of.threads.run(list, islice(damages, 64)):
                    if damage := next(filter(None, looked), ""):
                        break
        except SnapshotError as error:
            damage = str(error)
        if damage:
            what = f"{damage}; unmount, and repair it then"
            self._findings.add("snapshot", findings.STATE, os.fspath(served.file), what)

    async def _check_tier(self, tier: Tier) -> None:
        own = tier.own
        outage = self._of.monitor.out_of_service().get(tier.number)
        why = ""
        if outage is not None and not outage.is_read:
            # A tier out of service is not read: the check would wait for its disk.
            why = outage.why
        else:
            try:
                with closing_fd(await self._of.threads.run(os.open, own, _LIST)) as root:
                    why = await self._check_directory(tier, own, root)
            except OSError as error:
                why = error.strerror or "cannot be used"
        if why:
            self._findings.add("tier-gone", tier.name, os.fspath(own), why)

    async def _check_directory(self, tier: Tier, own: Path, root: int) -> str:
        """Returns why the directory cannot be checked; empty if it was."""
        run = self._of.threads.run
        generation = self._of.names.snapshot.id
        if not await run(_is_in_use, tier.directory, root, generation):
            return "the daemon uses another directory, which had this name"
        contents = Contents(root)
        findings.add_strangers(self._findings, tier.name, own, await run(contents.strangers))
        for path in await run(_older, contents, own, self._began_ns):
            number = path.name.removesuffix(".part")
            known = number.isdecimal() and int(number) <= self._residency.entries
            if not (known and self._residency.is_copying(Ino(int(number)))):
                await self._remove("stage", tier, path, "no process is writing it")
        for other in await run(contents.generations):
            if other != generation:
                # The daemon removes at its start all contents that it does not adopt.
                path = own / (Contents.PREFIX + other)
                await self._remove(verify.UNKNOWN, tier, path, "it belongs to no known snapshot")
        steps = verify.compare(
            root,
            generation,
            tier.number,
            self._records,
            seals=tier.seals,
            whole=self._digests,
            version_of=self._version,
        )
        while done := await self._of.threads.run(verify.turn, steps, _cost):
            for step in done:
                self._findings.files += step.files
                self._findings.nbytes += step.nbytes
                if step.suspect is not None and await self._holds(tier, step.suspect):
                    await self._note(tier, self._better_known(tier, step.suspect))
            await self._report(self._findings.progress())
        await self._check_parts(tier, root, generation)
        return ""

    async def _check_parts(self, tier: Tier, root: int, generation: str) -> None:
        """Compares the partial copies on the disk with those that the daemon uses."""
        accounts = self._of.parts.accounts
        missing = set(accounts.inos(tier.number))
        steps = compare_parts(root, generation, whole=self._digests, version_of=self._version)
        while done := await self._of.threads.run(verify.turn, steps, _cost):
            for step in done:
                self._findings.files += step.files
                self._findings.nbytes += step.nbytes
                if step.suspect is not None:
                    await self._note_part(tier, step.suspect)
            await self._report(self._findings.progress())
        names = await self._of.threads.run(Contents(root).parts, generation)
        found = set(filter(None, map(part_of, names)))
        for ino in sorted(found - set(accounts.inos(tier.number))):
            suspect = verify.Suspect(verify.UNKNOWN, part_name(ino), "the daemon does not use it")
            await self._note_part(tier, suspect)
        for ino in sorted(missing - found):
            what = "the partial copy is missing"
            await self._note_part(
                tier, verify.Suspect(verify.MISSING, part_name(ino), what, ino, None, errno.ENOENT)
            )

    async def _note_part(self, tier: Tier, suspect: verify.Suspect) -> None:
        """Reports a suspect if it is still wrong, and repairs it if asked to."""
        ino = suspect.ino
        if ino is not None:
            await self._of.parts.settled(ino)
        used = ino is not None and self._of.parts.accounts.tier_of(ino) == tier.number
        stays = await self._stays(tier, suspect.path)
        if stays == (suspect.kind == verify.MISSING) or (ino is not None and not used):
            # It came or went meanwhile.
            return
        path = f"{Contents.PREFIX}{self._of.names.snapshot.id}/{suspect.path}"
        path_text = os.fspath(tier.own / path)
        if ino is not None:
            path_text = os.fsdecode(self._of.names.path(ino))
        await self._add(
            suspect.kind, tier, path_text, suspect.what, by=partial(self._mend_part, tier, suspect)
        )

    async def _mend_part(self, tier: Tier, suspect: verify.Suspect) -> None:
        if suspect.ino is not None:
            failure = OSError(suspect.error, f"found by fsck: {suspect.what}")
            self._of.parts.drop_damaged(suspect.ino, tier.number, failure)
        else:
            by = partial(tier.remove_stranger, suspect.path, before_ns=self._began_ns)
            await self._of.threads.run(by)

    async def _remove(self, kind: str, tier: Tier, path: Path, what: str) -> None:
        """Adds a finding whose repair removes a file, or a directory with its contents."""
        by = partial(self._of.threads.run, remove, path)
        await self._add(kind, tier, os.fspath(path), what, by=by)

    async def _add(
        self, kind: str, tier: Tier, path: str, what: str, *, by: Callable[[], Awaitable[object]]
    ) -> None:
        """Adds a finding, after repairing it by the call ``by`` if that is asked for."""
        repaired = False
        if self._repair:
            try:
                await by()
                repaired = True
            except OSError as error:
                what = f"{what}; repairing it failed: {error.strerror}"
        self._findings.add(kind, tier.name, path, what, repaired=repaired)

    def _version(self, ino: Ino) -> Identity | None:
        try:
            return self._of.names.stored(ino).identity
        except IndexError:
            return Identity(-1, 0, 0, 0)

    async def _holds(self, tier: Tier, suspect: verify.Suspect) -> bool:
        """Whether the suspect is still wrong, and was not a copy that just came or went."""
        ino = suspect.ino
        if suspect.kind in verify.UNRECORDED and not await self._stays(tier, suspect.path):
            return False
        if ino is None or ino > self._residency.entries:
            return True
        if self._residency.is_copying(ino):
            return False
        record = self._records.get(ino)
        if suspect.kind in verify.UNRECORDED:
            return record is None or record.tier != tier.number
        if suspect.kind == verify.TORN:
            return self._records.is_torn(ino)
        if suspect.kind == verify.SEAL:
            # The drain may have changed attributes: the record is renewed before the seal.
            await self._of.renewals.settled(ino)
            record = self._records.get(ino)
        here = self._is_resident(tier, ino) and record == suspect.record
        if suspect.kind == verify.SEAL and record is not None:
            return here and not await self._of.threads.run(_is_sealed, tier, ino, record.identity)
        if suspect.kind == verify.MISSING:
            return here and not await self._of.threads.run(tier.has, ino)
        return here

    async def _stays(self, tier: Tier, path: str) -> bool:
        """Whether a file still exists after all pending removals."""
        with trio.move_on_after(_REST_S):
            await self._of.engine.removed()
            return await self._of.threads.run(tier.has_file, path)
        return False

    def _better_known(self, tier: Tier, suspect: verify.Suspect) -> verify.Suspect:
        """The kind of a suspect without a record: the daemon may still serve that copy."""
        if suspect.kind != verify.UNKNOWN or not self._is_resident(tier, suspect.ino):
            return suspect
        return verify.Suspect(findings.RECORD_LOST, suspect.path, _LOST, suspect.ino)

    async def _note(self, tier: Tier, suspect: verify.Suspect) -> None:
        """Reports a confirmed suspect, and repairs it if asked to."""
        ino = suspect.ino
        if ino is not None:
            self._reported.add(ino)
        path = f"{Contents.PREFIX}{self._of.names.snapshot.id}/{suspect.path}"
        path_text = os.fspath(tier.own / path)
        if ino is not None and suspect.kind != verify.UNKNOWN and ino <= self._residency.entries:
            path_text = os.fsdecode(self._of.names.path(ino))
        by = partial(self._mend, tier, suspect)
        await self._add(suspect.kind, tier, path_text, suspect.what, by=by)

    async def _mend(self, tier: Tier, suspect: verify.Suspect) -> None:
        """Seals a copy, or removes it with its record; removes other files. Raises OSError."""
        of, ino, record = self._of, suspect.ino, suspect.record
        if suspect.kind == verify.SEAL and ino is not None and record is not None:
            await of.threads.run(tier.verify, ino, record.identity, record.digest)
        elif suspect.kind == findings.RECORD_UNUSED and ino is not None:
            self._records.clear(ino)
            await of.threads.run(tier.remove, ino)
        elif self._is_resident(tier, ino) and ino is not None and suspect.kind != verify.TIER:
            failure = OSError(suspect.error, f"found by fsck: {suspect.what}")
            await of.copies.drop_damaged(ino, tier.number, failure)
        else:
            by = partial(tier.remove_stranger, suspect.path, before_ns=self._began_ns)
            await of.threads.run(by)
            if suspect.kind == verify.TORN and ino is not None:
                self._records.clear(ino)

    def _is_resident(self, tier: Tier, ino: Ino | None) -> bool:
        known = ino is not None and ino <= self._residency.entries
        return known and self._residency.tier_of(Ino(ino or 0)) == tier.number

    async def _check_table(self, tier: Tier) -> None:
        """Compares the residency table of the daemon with the records, in both directions."""
        for batch in batches(self._residency.resident_in(tier.number), _STRIDE):
            for ino in batch:
                record = self._records.get(ino)
                lost = record is None or record.tier != tier.number
                if lost and ino not in self._reported and self._is_resident(tier, ino):
                    suspect = verify.Suspect(findings.RECORD_LOST, copy_name(ino), _LOST, ino)
                    await self._note(tier, suspect)
            await trio.sleep(0)
        recorded = self._of.hierarchy.held(tier).inos.tolist()
        for batch in batches(map(Ino, recorded), _STRIDE):
            for ino in batch:
                record = self._records.get(ino)
                unused = record is not None and record.tier == tier.number
                if unused and not (self._residency.tier_of(ino) or self._residency.is_copying(ino)):
                    what = "it has a record, but the daemon does not serve it"
                    suspect = verify.Suspect(findings.RECORD_UNUSED, copy_name(ino), what, ino)
                    await self._note(tier, suspect)
            await trio.sleep(0)

    async def _check_written(self, write_back: WriteBack) -> None:
        """Compares journal and objects twice, as both change: only a fault in both is real."""
        place = write_back.place
        try:
            found = await self._of.threads.run(inspect, place.directory)
            if found.unknown or any(waiting.fault for waiting in found.waiting):
                await trio.sleep(_REST_S)
                before, found = found, await self._of.threads.run(inspect, place.directory)
                found = found.confirming(before)
        except TierError as error:
            path_text, what = os.fspath(place.directory), str(error.args[0])
            self._findings.add(findings.JOURNAL, place.tier.name, path_text, what)
            return
        findings.add_written(self._findings, place.tier.name, found)
        for number in found.unknown:
            # A newer object of this mount may not be recorded yet.
            if number < place.found.next_object:
                path = object_path(place.directory, number)
                await self._remove(findings.WRITTEN_UNKNOWN, place.tier, path, "no record needs it")

    async def _check_accounts(self, tiers: Sequence[Tier]) -> None:
        """Compares the ledger with the records, at a moment without running copies."""
        with trio.move_on_after(_REST_S) as patience:
            engine, reading = self._of.engine, self._of.parts
            while engine.running or engine.queued or reading.pending:
                await trio.sleep(_STEP_S)
        if patience.cancelled_caught:
            return
        for tier in tiers:
            held = self._of.hierarchy.held(tier)
            files = self._residency.resident_files(tier.number)
            parts = self._of.parts.accounts.bytes(tier.number)
            nbytes = self._of.ledger.used(tier.number) - parts
            if (files, nbytes) != (len(held.inos), held.bytes):
                what = (
                    f"{files} files with {nbytes} bytes are counted,"
                    f" {len(held.inos)} with {held.bytes} recorded"
                )
                self._findings.add("accounts", tier.name, os.fspath(tier.path), what)


def _is_in_use(directory: int, root: int, generation: str) -> bool:
    """Whether ``directory`` is the directory of ``generation`` beneath ``root``. Raises OSError."""
    used = os.fstat(directory)
    there = os.stat(Contents.PREFIX + generation, dir_fd=root, follow_symlinks=False)
    return (there.st_dev, there.st_ino) == (used.st_dev, used.st_ino)


def _is_sealed(tier: Tier, ino: Ino, identity: Identity) -> bool:
    """In a thread: whether a copy can be opened and has the seal of a version."""
    try:
        os.close(tier.open(ino, identity))
    except OSError:
        return False
    return True


def _older(contents: Contents, own: Path, than_ns: int) -> list[Path]:
    """The stages that have not changed since ``than_ns`` (wall clock)."""
    older = []
    for path in (own / name for name in contents.stages()):
        # The stage of a running copy disappears when the copy is done.
        with suppress(FileNotFoundError):
            if path.lstat().st_ctime_ns < than_ns:
                older.append(path)
    return older


def _cost(step: verify.Step) -> int:
    return step.nbytes + verify.PIECE_BYTES // _STRIDE
