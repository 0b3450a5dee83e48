"""What ``fsck`` finds: the kinds of findings, and how each is reported and mended."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from monarch.errors import MonarchError
from monarch.posix.files import closing_fd
from monarch.telemetry.report import Finding, FsckProgress, FsckReport
from monarch.tiers import verify
from monarch.tiers.contents import Contents
from monarch.writeback.earlier import Inspection
from monarch.writeback.store import PREFIX as ABSORBED

STATE = "state"
RECORD_LOST = "record-lost"
RECORD_UNUSED = "record-unused"
JOURNAL = "journal"
WRITTEN_MISSING = "written-missing"
WRITTEN_UNSYNCED = "written-unsynced"
WRITTEN_UNKNOWN = "written-unknown"


@dataclass(frozen=True, slots=True)
class Kind:
    """``remedy`` says what a repair does, or, unless it ``mends``, what the user can do."""

    meaning: str
    remedy: str
    mends: bool = True


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        verify.MISSING: Kind("a copy is recorded, but missing", "its record is cleared"),
        verify.SIZE: Kind("a copy has another size than was recorded", "it is removed"),
        verify.DIGEST: Kind("a copy has other bytes than were recorded", "it is removed"),
        verify.SEAL: Kind("a copy was touched, but its bytes are right", "it is sealed again"),
        verify.UNREADABLE: Kind("the disk fails to read a copy", "it is removed"),
        verify.VERSION: Kind("a copy is of another version than the snapshot's", "it is removed"),
        verify.TIER: Kind("a copy lies in another tier than was recorded", "it is removed"),
        verify.UNKNOWN: Kind("no record knows of a file in a tier", "it is removed"),
        verify.TORN: Kind("a record is damaged", "it is cleared, and its copy removed"),
        RECORD_LOST: Kind("the daemon uses a copy that is not recorded", "it is removed"),
        RECORD_UNUSED: Kind("a copy is recorded that the daemon does not use", "it is removed"),
        JOURNAL: Kind(
            "the journal of written data cannot be read",
            "leave the directory as it is; docs/operations.md describes how to save its files",
            mends=False,
        ),
        WRITTEN_MISSING: Kind(
            "a written file is recorded, but its bytes are missing",
            "the source has the version before; check the tier's disk (`dmesg`)",
            mends=False,
        ),
        WRITTEN_UNSYNCED: Kind(
            "a written file was not fsynced before a power cut",
            "the next mount drops it; the source has the version before",
            mends=False,
        ),
        WRITTEN_UNKNOWN: Kind("no record knows of a written file's bytes", "they are removed"),
        "records-file": Kind(
            "the file of the records cannot be read", "it is removed, and its copies with it"
        ),
        "accounts": Kind(
            "the counts of the daemon differ from the records",
            "report it; unmounting and mounting counts anew",
            mends=False,
        ),
        "stage": Kind("a write was interrupted and left a temporary file", "it is removed"),
        "stranger": Kind(
            "something in a tier's own directory is not Monarch's", "move it away", mends=False
        ),
        "snapshot": Kind(
            "the snapshot is damaged", "it is removed, and the next mount builds it anew"
        ),
        "snapshot-given": Kind(
            "a snapshot that was given to the mount is damaged or missing",
            "build it with `monarch snapshot build`",
            mends=False,
        ),
        "tier-gone": Kind(
            "a tier's directory cannot be used",
            "check that its disk is mounted; without it the next mount creates it, empty",
            mends=False,
        ),
        "tier-name": Kind(
            "a tier has lost its name", "the next mount makes its copies again", mends=False
        ),
        "directory-mode": Kind("a directory is open to others", "it is closed to them (0700)"),
        "directory-owner": Kind(
            "a directory belongs to another user",
            "chown it, or name another directory",
            mends=False,
        ),
        "registry": Kind("a mount is registered whose daemon is dead", "its record is removed"),
        "mount-dead": Kind("a mount is left whose daemon is dead", "it is unmounted"),
    }
)
# Bytes of findings in one answer, which must fit into a line of the control protocol.
_MOST_LISTED_BYTES = 512 * 1024


class Findings:
    """The progress of a check, and its findings: all are counted, and listed up to
    _MOST_LISTED_BYTES."""

    def __init__(self) -> None:
        self.files = self.total_files = 0
        self.nbytes = self.total_nbytes = 0
        self._problems = 0
        self._repaired = 0
        self._listed: list[Finding] = []
        self._room = _MOST_LISTED_BYTES

    def progress(self) -> FsckProgress:
        return FsckProgress(self.files, self.total_files, self.nbytes, self.total_nbytes)

    def add(self, kind: str, where: str, path: str, what: str, *, repaired: bool = False) -> None:
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
        """Adds a finding, after repairing it by the call ``by``, if given."""
        if by is None or not KINDS[kind].mends:
            self.add(kind, where, path, what)
            return
        try:
            by()
            self.add(kind, where, path, what, repaired=True)
        except (OSError, MonarchError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.add(kind, where, path, f"{what}; repairing it failed: {reason}")

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


def check_private(
    findings: Findings, directories: Iterable[tuple[str, Path]], *, owner: int, repair: bool
) -> None:
    """Checks that directories, each with a label, belong to ``owner`` and are closed to others."""
    for where, path in directories:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        path_text = os.fspath(path)
        if status.st_uid != owner:
            what = f"it belongs to uid {status.st_uid}, not {owner}"
            findings.add("directory-owner", where, path_text, what)
        elif stat.S_IMODE(status.st_mode) & 0o077:
            what = f"its mode is {stat.S_IMODE(status.st_mode):04o}"
            by = partial(_close, path) if repair else None
            findings.mend("directory-mode", where, path_text, what, by=by)


def _close(path: Path) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_fd(os.open(path, flags)) as fd:
        os.fchmod(fd, 0o700)


def private_in_tier(name: str, own: Path) -> Iterator[tuple[str, Path]]:
    """The directories of a tier that must be private; ``own`` holds the copies of the mount."""
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


def add_strangers(findings: Findings, where: str, own: Path, names: Iterable[str]) -> None:
    """Adds the files ``names`` in ``own``, the directory of a tier, that are not Monarch's."""
    for name in names:
        findings.add("stranger", where, os.fspath(own / name), "it is not Monarch's")


def add_written(findings: Findings, where: str, found: Inspection) -> None:
    """Counts the written files in the tier ``where``, and adds faults that cannot be repaired."""
    findings.files += len(found.waiting)
    for waiting in found.waiting:
        if waiting.fault:
            findings.add(WRITTEN_MISSING, where, os.fsdecode(waiting.path), waiting.fault)
    for path in found.lost:
        what = "it was not fsynced before the machine stopped"
        findings.add(WRITTEN_UNSYNCED, where, os.fsdecode(path), what)
