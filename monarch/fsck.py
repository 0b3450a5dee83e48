"""Checks, and mends if told to, what a mount has left in its state directory and its tiers.

For a state directory that no daemon uses; checkup.py does the same within a daemon. All that a
daemon keeps is held against all else: records, copies, stages, snapshot, registry, directories.
What is wrong is removed: it is a copy, or made of the source anew. The source itself is neither
changed nor looked at.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from monarch.absorbing import PREFIX as ABSORBED
from monarch.errors import LockedError, MonarchError, SnapshotError, TierError
from monarch.fuse import mountpoint as mountpoints
from monarch.namespace.snapshot import Snapshot
from monarch.registry import Registry, alive
from monarch.report import Finding, FsckProgress, FsckReport
from monarch.state import MountNote, read_note
from monarch.text import counted
from monarch.tiers.directory import keeps_seals, own_directory
from monarch.tiers.examine import (
    DIGEST,
    MISSING,
    SEAL,
    SIZE,
    TIER,
    TORN,
    UNKNOWN,
    UNREADABLE,
    VERSION,
    Contents,
    Step,
    Suspect,
    compare,
)
from monarch.tiers.hierarchy import owner_of
from monarch.tiers.lock import Lock
from monarch.tiers.records import Records, other_generations
from monarch.tiers.seal import seal
from monarch.types import Identity, Ino
from monarch.writeback.objects import object_path
from monarch.writeback.survey import Survey, survey

STATE = "state"

RECORD_LOST = "record-lost"
RECORD_UNUSED = "record-unused"
JOURNAL = "journal"
WRITTEN_MISSING = "written-missing"
WRITTEN_UNSYNCED = "written-unsynced"
WRITTEN_UNKNOWN = "written-unknown"

_LEFT_BY_A_KILLED = "left by a process that was killed while writing it"


@dataclass(frozen=True, slots=True)
class Kind:
    """``remedy`` is what a repair does, or, if it ``mends`` nothing, what a person can do."""

    meaning: str
    remedy: str
    mends: bool = True


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        MISSING: Kind("a copy is recorded, and gone", "its record is cleared"),
        SIZE: Kind("a copy has another size than was recorded", "it is removed"),
        DIGEST: Kind("a copy has other bytes than were recorded", "it is removed"),
        SEAL: Kind("a copy was touched, and its bytes are right", "it is sealed again"),
        UNREADABLE: Kind("the disk does not give a copy back", "it is removed"),
        VERSION: Kind("a copy is of another version than the snapshot's", "it is removed"),
        TIER: Kind("a copy lies in another tier than was recorded", "it is removed"),
        UNKNOWN: Kind("no record knows of a file in a tier", "it is removed"),
        TORN: Kind("a record is damaged", "it is cleared, and its copy removed"),
        RECORD_LOST: Kind("the daemon uses a copy that is not recorded", "it is removed"),
        RECORD_UNUSED: Kind("a copy is recorded that the daemon does not use", "it is removed"),
        JOURNAL: Kind(
            "the journal of what was written cannot be read",
            "leave the directory as it is; docs/operations.md says how to save its files",
            mends=False,
        ),
        WRITTEN_MISSING: Kind(
            "a written file is recorded, and its bytes are gone",
            "at the source it is as it was; look at the tier's disk (`dmesg`)",
            mends=False,
        ),
        WRITTEN_UNSYNCED: Kind(
            "a written file was never fsynced, and the power was cut",
            "the next mount drops it; at the source it is as it was",
            mends=False,
        ),
        WRITTEN_UNKNOWN: Kind("no record knows of a written file's bytes", "they are removed"),
        "records-file": Kind(
            "the file of the records cannot be read", "it is removed, and its copies with it"
        ),
        "accounts": Kind(
            "what the daemon counts is not what is recorded",
            "report it; unmounting and mounting counts anew",
            mends=False,
        ),
        "stage": Kind("a piece was left of something that was being written", "it is removed"),
        "stranger": Kind(
            "something in a tier's own directory is not Monarch's", "move it away", mends=False
        ),
        "snapshot": Kind(
            "the snapshot is damaged", "it is removed, and the next mount builds it anew"
        ),
        "snapshot-given": Kind(
            "a snapshot that is not the mount's own is damaged or gone",
            "build it with `monarch snapshot build`",
            mends=False,
        ),
        "tier-gone": Kind(
            "a tier's directory cannot be used",
            "is its disk mounted? Without it a mount makes it anew, empty",
            mends=False,
        ),
        "tier-name": Kind(
            "a tier has lost its name", "with the next mount its copies are made anew", mends=False
        ),
        "directory-mode": Kind("a directory is open to others", "it is closed to them (0700)"),
        "directory-owner": Kind(
            "a directory belongs to another user", "chown it, or name another", mends=False
        ),
        "registry": Kind("a mount is registered whose daemon is dead", "its record is removed"),
        "mount-dead": Kind("a mount is left whose daemon is dead", "it is unmounted"),
    }
)

# What a line of the control protocol has room for, with some to spare. Bytes.
_MOST_TOLD_BYTES = 512 * 1024


class Findings:
    """What was found so far; all is counted, and listed as far as there is room."""

    def __init__(self) -> None:
        self.files = 0
        self.nbytes = 0
        self._problems = 0
        self._repaired = 0
        self._listed: list[Finding] = []
        self._room = _MOST_TOLD_BYTES

    def add(self, kind: str, where: str, path: str, what: str, *, repaired: bool) -> None:
        known = KINDS[kind]
        finding = Finding(kind, where, path, what, known.remedy, known.mends, repaired)
        self._problems += 1
        self._repaired += repaired
        self._room -= len(json.dumps(dataclasses.asdict(finding)))
        if self._room > 0:
            self._listed.append(finding)

    def mend(
        self, kind: str, where: str, path: str, what: str, *, by: Callable[[], object] | None
    ) -> None:
        """Add a finding, after mending it ``by`` that call, if there is one."""
        repaired = False
        if by is not None and KINDS[kind].mends:
            try:
                by()
                repaired = True
            except (OSError, MonarchError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                what = f"{what}; mending it failed: {reason}"
        self.add(kind, where, path, what, repaired=repaired)

    def report(self, *, state: str, mountpoint: str, served: bool) -> FsckReport:
        return FsckReport(
            state=state,
            mountpoint=mountpoint,
            served=served,
            files=self.files,
            bytes=self.nbytes,
            problems=self._problems,
            repaired=self._repaired,
            findings=self._listed,
        )


def check_doors(
    findings: Findings, doors: Iterable[tuple[str, Path]], *, owner: int, repair: bool
) -> None:
    """See that directories, each with what it is of, are ``owner``'s and closed to all others."""
    for where, path in doors:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        told = os.fspath(path)
        if status.st_uid != owner:
            what = f"it belongs to uid {status.st_uid}, not {owner}"
            findings.add("directory-owner", where, told, what, repaired=False)
        elif stat.S_IMODE(status.st_mode) & 0o077:
            what = f"its mode is {stat.S_IMODE(status.st_mode):04o}"
            by = partial(_close, path) if repair else None
            findings.mend("directory-mode", where, told, what, by=by)


def _close(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def doors_of_tier(name: str, own: Path) -> Iterator[tuple[str, Path]]:
    """The directories of a tier that must be closed to others; ``own`` has the mount's copies."""
    yield name, own.parent
    yield name, own
    yield name, own / "stage"
    with suppress(OSError):
        for entry in sorted(own.iterdir()):
            if entry.name.startswith(Contents.PREFIX):
                yield name, entry
        for entry in sorted(own.parent.iterdir()):
            if entry.name.startswith(ABSORBED):
                yield name, entry


def tell_written(findings: Findings, where: str, found: Survey) -> None:
    """What is wrong with written files in the tier ``where`` and cannot be mended."""
    for waiting in found.waiting:
        if waiting.fault:
            told = os.fsdecode(waiting.path)
            findings.add(WRITTEN_MISSING, where, told, waiting.fault, repaired=False)
    for path in found.lost:
        what = "it was never fsynced, and the machine has stopped since"
        findings.add(WRITTEN_UNSYNCED, where, os.fsdecode(path), what, repaired=False)


# -- a state directory that nobody uses ------------------------------------------------------------


def check_state(
    state: Path,
    *,
    registry: Registry,
    digests: bool,
    repair: bool,
    progress: Callable[[FsckProgress], None],
) -> FsckReport:
    """Check the mount that ``state`` is of, which must not be served, and mend it if told to.

    ``digests``: read every copy. Raises TierError if it is no state directory, LockedError if a
    daemon uses it or one of its tiers.
    """
    with ExitStack() as held:
        return _StateCheck(state, registry, digests, repair, progress, held).run()


@dataclass(slots=True)
class _OpenTier:
    """A tier whose lock is ours. ``root`` is a descriptor of ``own``, the mount's directory."""

    number: int
    name: str
    own: Path
    root: int
    id: str
    seals: bool


class _StateCheck:
    """One check of a state directory; ``held`` lets go of locks and descriptors at the end."""

    def __init__(
        self,
        state: Path,
        registry: Registry,
        digests: bool,
        repair: bool,
        progress: Callable[[FsckProgress], None],
        held: ExitStack,
    ) -> None:
        self._state = state
        self._registry = registry
        self._digests = digests
        self._repair = repair
        self._progress = progress
        self._held = held
        self._findings = Findings()
        self._snapshot: Snapshot | None = None
        self._total_files = self._total_bytes = 0

    def run(self) -> FsckReport:
        what = f"state directory {os.fspath(self._state)!r}"
        try:
            directory = self._opened(self._state)
            owner = os.fstat(directory).st_uid
            note = read_note(self._state)
            self._lock(directory, what)
        except OSError as error:
            raise TierError(
                f"{what}: {error.strerror}", hint="name a state directory; its owner must ask"
            ) from error
        tiers = [
            tier
            for number, noted in enumerate(note.tiers, start=1)
            if (tier := self._tier(number, noted.name, Path(noted.path))) is not None
        ]
        self._check_registry(note)
        doors = [(STATE, self._state)]
        for tier in tiers:
            doors += doors_of_tier(tier.name, tier.own)
        check_doors(self._findings, doors, owner=owner, repair=self._repair)
        for path in sorted(self._state.glob("*.part")):
            self._mend("stage", STATE, path, _LEFT_BY_A_KILLED, path)
        self._check_snapshot(Path(note.snapshot))
        self._check_copies(tiers)
        for tier in tiers:
            self._check_written(tier)
        return self._findings.report(
            state=os.fspath(self._state), mountpoint=note.mountpoint, served=False
        )

    def _opened(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._held.callback(os.close, fd)
        return fd

    def _lock(self, directory: int, what: str) -> None:
        lock = Lock(directory, what, "monarch fsck")
        self._held.callback(lock.release)

    def _mend(self, kind: str, where: str, path: Path, what: str, *removed: Path) -> None:
        """A finding that is mended by removing files."""

        def by() -> None:
            for each in removed:
                remove(each)

        self._findings.mend(kind, where, os.fspath(path), what, by=by if self._repair else None)

    def _tier(self, number: int, name: str, path: Path) -> _OpenTier | None:
        """A tier to be looked at; None if it cannot be used. Raises LockedError."""
        own = own_directory(path, owner_of(self._state))
        try:
            root = self._opened(own)
            self._lock(root, f"tier {os.fspath(path)!r}")
        except OSError as error:
            told = error.strerror or "cannot be used"
            self._findings.add("tier-gone", name, os.fspath(own), told, repaired=False)
            return None
        identity = ""
        try:
            with open(own / "tier.json", "rb") as file:
                identity = str(json.load(file)["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"tier.json cannot be read: {error}"
            self._findings.add("tier-name", name, os.fspath(own), what, repaired=False)
        try:
            seals = keeps_seals(root)
        except OSError:
            # It cannot be written: nothing there was touched of late.
            seals = False
        return _OpenTier(number, name, own, root, identity, seals)

    def _check_registry(self, note: MountNote) -> None:
        for record in self._registry.all():
            if record.state == os.fspath(self._state) and not alive(record):
                what = f"its daemon, pid {record.pid}, is dead"
                by = partial(self._registry.remove, record.mountpoint) if self._repair else None
                self._findings.mend("registry", STATE, record.mountpoint, what, by=by)
        mountpoint = Path(note.mountpoint)
        if mountpoints.mount_at(mountpoint) is not None and mountpoints.is_dead(mountpoint):
            by = partial(mountpoints.unmount, mountpoint, lazy=True) if self._repair else None
            what = "every access there fails with ENOTCONN"
            self._findings.mend("mount-dead", STATE, note.mountpoint, what, by=by)

    def _check_snapshot(self, path: Path) -> None:
        """Check it, and keep it for the copies' versions if it is whole."""
        own = path.parent == self._state
        if own and not path.exists():
            return  # the next mount builds it
        try:
            snapshot = self._held.enter_context(Snapshot.open(path))
            damages = list(filter(None, snapshot.damages()))
            if not damages:
                self._snapshot = snapshot
        except SnapshotError as error:
            damages = [str(error)]
        if damages:
            kind = "snapshot" if own else "snapshot-given"
            self._mend(kind, STATE, path, damages[0], path)

    # -- copies ------------------------------------------------------------------------------------

    def _check_copies(self, tiers: Sequence[_OpenTier]) -> None:
        ids = [tier.id for tier in tiers]
        known: dict[str, Records] = {}
        for generation in other_generations(self._state, ""):
            path = self._state / f"residency-{generation}"
            records = Records.existing(self._state, generation, ids)
            if records is None:
                what = "it is damaged, or not Monarch's"
                self._mend("records-file", STATE, path, what, path)
                continue
            self._held.callback(records.leave)
            known[generation] = records
            for _inos, numbers, sizes in records.load():
                self._total_files += len(numbers)
                self._total_bytes += int(sizes.sum()) if self._digests else 0
        for place, tier in enumerate(tiers, start=1):
            self._check_tier(tier, place, known)

    def _check_tier(self, tier: _OpenTier, place: int, known: Mapping[str, Records]) -> None:
        own = tier.own
        contents = Contents(tier.root)
        for name in contents.strangers():
            told = os.fspath(own / name)
            self._findings.add("stranger", tier.name, told, "it is not ours", repaired=False)
        for name in contents.stages():
            what = _LEFT_BY_A_KILLED
            self._mend("stage", tier.name, own / name, what, own / name)
        there = contents.generations()
        for generation in there:
            if generation not in known:
                path = own / (Contents.PREFIX + generation)
                count = sum(map(len, contents.copies(generation)))
                what = f"no record knows of the {counted(count, 'file', 'files')} in it"
                self._mend(UNKNOWN, tier.name, path, what, path)
        for generation, records in known.items():
            for step in compare(
                tier.root,
                generation,
                place,
                records,
                seals=tier.seals,
                whole=self._digests,
                version_of=partial(self._version, generation),
            ):
                self._note(step)
                if step.suspect is not None:
                    self._tell(tier, generation, records, step.suspect)

    def _version(self, generation: str, ino: Ino) -> Identity | None:
        """What the snapshot tells of a file; None of the copies of another snapshot."""
        if self._snapshot is None or self._snapshot.id != generation:
            return None
        try:
            return self._snapshot.attributes(ino).identity
        except IndexError:
            return Identity(-1, 0, 0, 0)

    def _note(self, step: Step) -> None:
        self._findings.files += step.files
        self._findings.nbytes += step.nbytes
        if step.files or step.nbytes:
            self._progress(
                FsckProgress(
                    self._findings.files,
                    self._total_files,
                    self._findings.nbytes,
                    self._total_bytes,
                )
            )

    def _tell(self, tier: _OpenTier, generation: str, records: Records, suspect: Suspect) -> None:
        path = tier.own / (Contents.PREFIX + generation) / suspect.path

        def by() -> None:
            if suspect.kind == SEAL and suspect.ino is not None and suspect.record is not None:
                os.utime(path, ns=(time.time_ns(), seal(suspect.ino, suspect.record.identity)))
                return
            remove(path)
            if suspect.ino is not None and suspect.kind not in (UNKNOWN, TIER):
                records.clear(suspect.ino)

        told = os.fspath(path)
        if suspect.ino is not None and suspect.kind != UNKNOWN:
            told = self._name(generation, suspect.ino) or told
        self._findings.mend(
            suspect.kind, tier.name, told, suspect.what, by=by if self._repair else None
        )

    # -- written files -----------------------------------------------------------------------------

    def _check_written(self, tier: _OpenTier) -> None:
        for directory in sorted(tier.own.parent.glob(f"{ABSORBED}*")):
            try:
                self._lock(self._opened(directory), os.fspath(directory))
            except (OSError, LockedError):
                # Of another mount, which is served: its own check looks at it.
                continue
            for path in sorted(directory.glob("*.part")):
                self._mend(
                    "stage",
                    tier.name,
                    path,
                    _LEFT_BY_A_KILLED,
                    path,
                )
            try:
                found = survey(directory)
            except TierError as error:
                told = os.fspath(directory)
                self._findings.add(JOURNAL, tier.name, told, str(error.args[0]), repaired=False)
                continue
            self._findings.files += len(found.waiting)
            tell_written(self._findings, tier.name, found)
            for number in found.unknown:
                path = object_path(directory, number)
                self._mend(WRITTEN_UNKNOWN, tier.name, path, "no record needs it", path)

    def _name(self, generation: str, ino: Ino) -> str | None:
        if self._snapshot is None or self._snapshot.id != generation:
            return None
        with suppress(IndexError):
            return os.fsdecode(self._snapshot.path(ino))
        return None


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that it holds; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
