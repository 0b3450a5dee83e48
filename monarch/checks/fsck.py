"""Checks, and with ``repair`` corrects, the state directory and the tiers of a mount.

For a state directory that no daemon uses; daemon/fsck.py does the same within a daemon. Records,
copies, stages, snapshot, registry and directories are compared with each other. Wrong data is
removed: it is a copy, or can be made again from the source. The source is neither changed nor read.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from monarch.checks import findings
from monarch.control.registry import Registry, alive
from monarch.control.state_directory import MountNote, read_note
from monarch.errors import LockedError, SnapshotError, TierError
from monarch.fuse import mountpoint as mountpoints
from monarch.namespace.snapshot import Snapshot
from monarch.posix.mounts import is_dead
from monarch.posix.private_directory import Lock, read_private
from monarch.telemetry.report import FsckProgress, FsckReport
from monarch.text import counted
from monarch.tiers.contents import PARTS, Contents, keeps_seals, seal
from monarch.tiers.hierarchy import owner_of
from monarch.tiers.ownership import PRIVATE, own_directory
from monarch.tiers.partial import compare_parts
from monarch.tiers.records import Records, other_generations
from monarch.tiers.verify import SEAL, UNKNOWN, UNRECORDED, Suspect, compare
from monarch.types import Identity, Ino
from monarch.writeback.earlier import inspect, renewed_in
from monarch.writeback.objects import object_path
from monarch.writeback.store import PREFIX as ABSORBED

_INTERRUPTED = "left by a process that was killed while writing it"


def check_state(
    state: Path,
    *,
    registry: Registry,
    digests: bool,
    repair: bool,
    progress: Callable[[FsckProgress], None],
) -> FsckReport:
    """Checks the mount of ``state``, which must not be served; with ``repair`` corrects it.

    ``digests``: read every copy. Raises TierError if ``state`` is not a state directory,
    LockedError if a daemon uses it or one of its tiers.
    """
    with ExitStack() as held:
        return _StateCheck(state, registry, digests, repair, progress, held).run()


@dataclass(slots=True)
class _OpenTier:
    """A tier that this process has locked. ``root`` is a descriptor of ``own``."""

    name: str
    own: Path
    root: int
    id: str
    seals: bool


@dataclass
class _StateCheck:
    """One check of a state directory; ``held`` releases locks and descriptors at the end."""

    _state: Path
    _registry: Registry
    _digests: bool
    _repair: bool
    _progress: Callable[[FsckProgress], None]
    _held: ExitStack

    def __post_init__(self) -> None:
        self._findings = findings.Findings()
        self._snapshot: Snapshot | None = None
        # The versions that the drain has made of files of the snapshot, by inode number at the
        # source.
        self._renewed: dict[int, Identity] = {}

    def run(self) -> FsckReport:
        what = f"state directory {os.fspath(self._state)!r}"
        try:
            directory = self._opened(self._state)
            owner = os.fstat(directory).st_uid
            note = read_note(self._state)
            self._lock(directory, what)
        except OSError as error:
            raise TierError(
                f"{what}: {error.strerror}",
                hint="name a state directory, and run fsck as its owner",
            ) from error
        tiers = [
            tier
            for noted in note.tiers
            if (tier := self._tier(noted.name, Path(noted.path))) is not None
        ]
        self._check_registry(note)
        directories = [(findings.STATE, self._state)]
        for tier in tiers:
            directories += findings.private_in_tier(tier.name, tier.own)
        findings.check_private(self._findings, directories, owner=owner, repair=self._repair)
        for path in sorted(self._state.glob("*.part")):
            self._mend("stage", findings.STATE, path, _INTERRUPTED, path)
        self._check_snapshot(Path(note.snapshot))
        for noted in note.tiers:
            self._know_renewed(Path(noted.path) / PRIVATE)
        self._check_copies(tiers)
        for noted in note.tiers:
            self._check_written(noted.name, Path(noted.path) / PRIVATE)
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
        """Adds a finding whose repair removes files."""

        def by() -> None:
            for each in removed:
                remove(each)

        self._findings.mend(kind, where, os.fspath(path), what, by=by if self._repair else None)

    def _tier(self, name: str, path: Path) -> _OpenTier | None:
        """Opens and locks a tier; None if it is gone, or without copies. Raises LockedError."""
        own = own_directory(path, owner_of(self._state))
        try:
            root = self._opened(own)
            self._lock(root, f"tier {os.fspath(path)!r}")
        except OSError as error:
            # Where PATH/monarch is left, the tier's disk is there: the copies have been removed.
            if not (isinstance(error, FileNotFoundError) and own.parent.is_dir()):
                words = error.strerror or "cannot be used"
                self._findings.add("tier-gone", name, os.fspath(own), words)
            return None
        identity = ""
        try:
            identity = str(json.loads(read_private(own / "tier.json"))["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"tier.json cannot be read: {error}"
            self._findings.add("tier-name", name, os.fspath(own), what)
        try:
            seals = keeps_seals(root)
        except OSError:
            # It is not writable: no file there can have changed lately.
            seals = False
        return _OpenTier(name, own, root, identity, seals)

    def _check_registry(self, note: MountNote) -> None:
        for record in self._registry.all():
            if record.state == os.fspath(self._state) and not alive(record):
                what = f"its daemon, pid {record.pid}, is dead"
                by = partial(self._registry.remove, record.mountpoint) if self._repair else None
                self._findings.mend("registry", findings.STATE, record.mountpoint, what, by=by)
        mountpoint = Path(note.mountpoint)
        if mountpoints.mount_at(mountpoint) is not None and is_dead(mountpoint):
            by = partial(mountpoints.unmount, mountpoint, lazy=True) if self._repair else None
            what = "every access there fails with ENOTCONN"
            self._findings.mend("mount-dead", findings.STATE, note.mountpoint, what, by=by)

    def _check_snapshot(self, path: Path) -> None:
        """Checks the snapshot, and keeps a valid one to look up the versions of copies."""
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
            self._mend(kind, findings.STATE, path, damages[0], path)

    def _know_renewed(self, private: Path) -> None:
        if self._snapshot is None:
            return
        for directory in sorted(private.glob(f"{ABSORBED}*")):
            # The check of the written files reports a journal that cannot be read.
            with suppress(OSError, TierError):
                self._renewed |= renewed_in(directory, self._snapshot.id)

    # -- copies ------------------------------------------------------------------------------------

    def _check_copies(self, tiers: Sequence[_OpenTier]) -> None:
        ids = [tier.id for tier in tiers]
        known: dict[str, Records] = {}
        for generation in other_generations(self._state, ""):
            path = self._state / f"residency-{generation}"
            records = Records.existing(self._state, generation, ids)
            if records is None:
                what = "it is damaged, or not Monarch's"
                self._mend("records-file", findings.STATE, path, what, path)
                continue
            self._held.callback(records.leave)
            known[generation] = records
            for _inos, numbers, sizes in records.load():
                self._findings.total_files += len(numbers)
                self._findings.total_nbytes += int(sizes.sum()) if self._digests else 0
        for place, tier in enumerate(tiers, start=1):
            self._check_tier(tier, place, known)

    def _check_tier(self, tier: _OpenTier, place: int, known: Mapping[str, Records]) -> None:
        own = tier.own
        contents = Contents(tier.root)
        findings.add_strangers(self._findings, tier.name, own, contents.strangers())
        for name in contents.stages():
            self._mend("stage", tier.name, own / name, _INTERRUPTED, own / name)
        for generation in contents.generations():
            if generation not in known:
                path = own / (Contents.PREFIX + generation)
                count = sum(map(len, contents.files(generation)))
                what = f"no record knows of the {counted(count, 'file', 'files')} in it"
                self._mend(UNKNOWN, tier.name, path, what, path)
        for generation, records in known.items():
            version_of = partial(self._version, generation, records)
            copies = compare(
                tier.root,
                generation,
                place,
                records,
                seals=tier.seals,
                whole=self._digests,
                version_of=version_of,
            )
            parts = compare_parts(tier.root, generation, whole=self._digests, version_of=version_of)
            for step in chain(copies, parts):
                self._findings.files += step.files
                self._findings.nbytes += step.nbytes
                if step.files or step.nbytes:
                    self._progress(self._findings.progress())
                if step.suspect is not None:
                    self._add(tier, generation, records, step.suspect)

    def _snapshot_of(self, generation: str) -> Snapshot | None:
        """The snapshot of the mount, None if it is invalid or not that of ``generation``."""
        is_same = self._snapshot is not None and self._snapshot.id == generation
        return self._snapshot if is_same else None

    def _version(self, generation: str, records: Records, ino: Ino) -> Identity | None:
        """The identity of a file in the snapshot, or since a change by the drain that the record of
        its copy has; None for copies of another snapshot."""
        snapshot = self._snapshot_of(generation)
        if snapshot is None:
            return None
        try:
            identity = snapshot.attributes(ino).identity
        except IndexError:
            return Identity(-1, 0, 0, 0)
        record, renewed = records.get(ino), self._renewed.get(identity.source_ino)
        return renewed if record is not None and record.identity == renewed else identity

    def _add(self, tier: _OpenTier, generation: str, records: Records, suspect: Suspect) -> None:
        path = tier.own / (Contents.PREFIX + generation) / suspect.path

        def by() -> None:
            if suspect.kind == SEAL and suspect.ino is not None and suspect.record is not None:
                os.utime(path, ns=(time.time_ns(), seal(suspect.ino, suspect.record.identity)))
                return
            remove(path)
            if path.parent.name == PARTS:
                return
            if suspect.ino is not None and suspect.kind not in UNRECORDED:
                records.clear(suspect.ino)

        path_text = os.fspath(path)
        snapshot = self._snapshot_of(generation)
        if snapshot is not None and suspect.ino is not None and suspect.kind != UNKNOWN:
            with suppress(IndexError):
                path_text = os.fsdecode(snapshot.path(suspect.ino)) or path_text
        self._findings.mend(
            suspect.kind, tier.name, path_text, suspect.what, by=by if self._repair else None
        )

    # -- written files -----------------------------------------------------------------------------

    def _check_written(self, where: str, private: Path) -> None:
        for directory in sorted(private.glob(f"{ABSORBED}*")):
            try:
                self._lock(self._opened(directory), os.fspath(directory))
            except (OSError, LockedError):
                # Files of another mount, which is served: the check of that mount covers them.
                continue
            for path in sorted(directory.glob("*.part")):
                self._mend("stage", where, path, _INTERRUPTED, path)
            try:
                found = inspect(directory)
            except TierError as error:
                self._findings.add(
                    findings.JOURNAL, where, os.fspath(directory), str(error.args[0])
                )
                continue
            findings.add_written(self._findings, where, found)
            for number in found.unknown:
                path = object_path(directory, number)
                self._mend(findings.WRITTEN_UNKNOWN, where, path, "no record needs it", path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
