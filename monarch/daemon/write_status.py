"""What the daemon reports of written files: the section of its report, each problem, and losses."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from monarch.config.settings import MountSettings
from monarch.control.messages import first_rows
from monarch.posix.private_directory import read_private, replace_private
from monarch.telemetry.health import Problem, Spell
from monarch.telemetry.report import WritingReport
from monarch.text import counted, counted_changes
from monarch.writeback.drain import Drain
from monarch.writeback.front import WriteFront
from monarch.writeback.lease import Lease
from monarch.writeback.setup import WriteBack
from monarch.writeback.undrained import UndrainedNotes
from monarch.writeback.wakeups import Cause

log = logging.getLogger(__name__)

# A refused write leaves no trace: it is reported for this long after its last occurrence.
_REFUSED_S = 60.0
_SHOWN_HOLDERS = 3
_SHOWN_PATHS = 3
_LOST_FILE = "lost.json"
# The list of lost files keeps at most this many names; the log has all.
_MOST_LOST = 10_000


class LossAlarm:
    """Remembers which written files lost their bytes, until the loss is acknowledged: a restart or
    an unmount does not end the alarm. ``state`` is the state directory. No call raises."""

    def __init__(self, state: Path) -> None:
        self._path = state / _LOST_FILE
        self._names = dict.fromkeys(self._read())
        # Names that were reported before: the drain reports each repeatedly.
        self._reported: set[bytes] = set()

    @property
    def names(self) -> tuple[bytes, ...]:
        """Paths in the mount, in the order in which they were reported."""
        return tuple(self._names)

    def report(self, names: Iterable[bytes]) -> None:
        """Adds ``names``, all files known to be lost since the daemon started."""
        if new := [name for name in names if name not in self._reported]:
            self._reported.update(new)
            self._names.update(dict.fromkeys(new[: max(0, _MOST_LOST - len(self._names))]))
            self._write()

    def acknowledge(self) -> None:
        """Ends the alarm, until further files are lost."""
        self._names.clear()
        self._write()

    def _read(self) -> list[bytes]:
        try:
            return [os.fsencode(name) for name in json.loads(read_private(self._path))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("%s cannot be read (%s); its names are in older logs", _LOST_FILE, error)
            return []

    def _write(self) -> None:
        try:
            if not self._names:
                self._path.unlink(missing_ok=True)
                return
            names = [os.fsdecode(name) for name in self._names]
            replace_private(self._path, json.dumps(names))
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; the loss is not remembered after the daemon ends",
                _LOST_FILE,
                error,
            )


class WriteStatus:
    """``write_back`` is None for a read-only mount without written data; it may have lost files of
    earlier mounts."""

    def __init__(
        self, settings: MountSettings, write_back: WriteBack | None, loss_alarm: LossAlarm
    ) -> None:
        self._fsync = settings.writeback.fsync
        self._mountpoint, self._source = settings.mountpoint, settings.source
        self._write_back = write_back
        self._loss_alarm = loss_alarm
        self._refused = Spell(_REFUSED_S)
        # The note of undrained changes in the state directory; None without written data.
        self.notes: UndrainedNotes | None = None

    def report(self) -> WritingReport | None:
        write_back = self._write_back
        if write_back is None:
            return None
        backlog = write_back.drain.backlog()
        return WritingReport(
            tier=write_back.place.tier.name,
            directory=os.fspath(write_back.place.directory),
            fsync=self._fsync,
            files=backlog.files,
            bytes=backlog.bytes,
            operations=backlog.ops,
            oldest_ns=backlog.oldest_ns,
            drained_files=backlog.drained_files,
            drained_bytes=backlog.drained_bytes,
            errors=backlog.failures,
            trouble=backlog.trouble or "",
            reserve=write_back.front.space.reserve.bytes,
            held=write_back.front.object_table.states.bytes + write_back.place.doubtful.held,
            lost=first_rows(map(os.fsdecode, self._loss_alarm.names)),
            lost_files=len(self._loss_alarm.names),
            in_memory=write_back.place.tier.in_memory,
            names=write_back.front.gate.names_held,
            names_max=write_back.front.gate.names_max,
            aside=first_rows(os.fsdecode(refusal.path) for refusal in backlog.aside),
            aside_operations=backlog.aside_ops,
        )

    def problems(self) -> Iterator[Problem]:
        write_back = self._write_back
        if write_back is not None:
            self._loss_alarm.report(write_back.drain.backlog().lost)
        yield from self._of_losses()
        if write_back is None:
            return
        yield from self._of_disk(write_back)
        if hidden := write_back.hidden():
            yield Problem(
                "written-hidden",
                f"{counted(len(hidden), 'file', 'files')} of an earlier mount cannot be shown:"
                f" {os.fsdecode(hidden[0])!r}",
                remedy="their bytes are written to the source: `monarch ckpt wait"
                f" {self._mountpoint}`, then mount again; `monarch ckpt lost {self._mountpoint}`"
                " lists all",
            )
        yield from self._of_names(write_back.front)
        if write_back.lease is not None:
            yield from self._of_other_writers(write_back.lease)
        if self.notes is not None and self.notes.failure:
            yield self._of_notes(self.notes)
        yield from self._of_source(write_back.drain)
        yield from self._of_refusals(write_back)

    def _of_losses(self) -> Iterator[Problem]:
        names = self._loss_alarm.names
        if not names:
            return
        kept = len(self._write_back.place.doubtful.list()) if self._write_back is not None else 0
        aside = f"; the remaining bytes of {kept:,} are kept aside" if kept else ""
        yield Problem(
            "written-lost",
            f"{counted(len(names), 'written file has lost its', 'written files have lost their')}"
            f" bytes: {os.fsdecode(names[0])}{', ...' if len(names) > 1 else ''}{aside}",
            remedy=f"`monarch ckpt lost {self._mountpoint}` lists them; the source still has the"
            " version from before the write. With --acknowledge this alarm ends",
        )

    def _of_disk(self, write_back: WriteBack) -> Iterator[Problem]:
        place, objects = write_back.place, write_back.front.objects
        now_s, wall_ns = time.monotonic(), time.time_ns()
        is_refused = self._refused.goes_on(objects.failures, now_s=now_s, wall_ns=wall_ns)
        refused = write_back.front.object_table.refused()
        if is_refused or refused or place.journal.file.failed:
            what = f"writes are refused: {place.journal.file.failed or objects.failure}"
            if refused:
                path = write_back.front.names.path_text(refused[0].ino, is_visible=True)
                what += (
                    f"; the last bytes of {counted(len(refused), 'file', 'files')} are not in the"
                    f" journal and do not reach the source: {path}"
                )
            yield Problem(
                "writes-refused",
                what,
                remedy=f"check the disk of tier {place.tier.name} (`df {place.directory}`, `dmesg`)"
                " and, if it is full, the disk of the source; fsynced data is safe, and writing"
                " continues when one of them has space",
            )
        if unsynced := write_back.front.failures.shown():
            yield Problem(
                "fsync-failed",
                f"{counted(len(unsynced), 'file', 'files')} could not be synced:"
                f" {unsynced[0]}: how much of the data the disk of tier"
                f" {place.tier.name} holds is unknown",
                remedy="write the file again from its start, or close it: then its data is written"
                " anew from memory, or read from the source. `dmesg` shows what is wrong with the"
                " disk",
            )

    def _of_notes(self, notes: UndrainedNotes) -> Problem:
        return Problem(
            "undrained-unnoted",
            "the state directory cannot note which changes the source lacks:"
            f" {notes.failure}; the next mount may not notice that the tier is missing",
            remedy=f"check the disk of that directory: `df {notes.state}`, `dmesg`; the note is"
            " written as soon as there is room. Until then mount the tier's disk before the next"
            " mount",
        )

    def _of_names(self, front: WriteFront) -> Iterator[Problem]:
        if not front.gate.names_free:
            held, most = front.gate.names_held, front.gate.names_max
            yield Problem(
                "written-names",
                f"the names created and changed through the mount use the memory of {held:,} of"
                f" {most:,} names: a new name fails with ENOSPC",
                remedy=f"remove files that are not needed from {self._mountpoint}; or, when all is"
                f" drained (`monarch ckpt wait {self._mountpoint}`), unmount and mount again: the"
                " new snapshot has the names; or raise `writeback.names_max`, which takes 3 KiB of"
                " memory a name",
            )
        if failure := front.names.put_away_failure:
            yield Problem(
                "names-unreadable",
                f"names of written files cannot be read from the state directory {failure}",
                remedy="nothing is lost: check the disk of that directory (`dmesg`), `monarch"
                f" umount {self._mountpoint}` (with --abandon if the drain waits), and mount again:"
                " the journal has all names",
            )

    def _of_other_writers(self, lease: Lease) -> Iterator[Problem]:
        if lease.others:
            words = ", ".join(holder.words() for holder in lease.others[:_SHOWN_HOLDERS])
            yield Problem(
                "other-writer",
                f"the same paths of {self._source} are written through"
                f" {counted(len(lease.others), 'other mount', 'other mounts')}: {words}",
                remedy="unmount one of them, or give each its own paths to write (`absorb`); if"
                " both write a path, the second version is kept beside the first as a conflict",
            )
        if lease.trouble:
            yield Problem(
                "no-lease",
                f"{self._source} refuses the lease of this mount: {lease.trouble}; another mount"
                " that writes the same paths would not be detected",
                remedy=f"check `ls -la {self._source}`: it must show a directory"
                " `.monarch-leases.part` that the daemon of this mount may write; anything else of"
                " that name can be removed",
            )
        if lease.was_lost:
            yield Problem(
                "lease-lost",
                "the lease of this mount at the source was missing, or was not renewed in time:"
                " another mount may have begun to write the same paths",
                remedy=f"`monarch ckpt conflicts {self._mountpoint}` shows whether both have"
                " written; the problem ends with the mount",
            )

    def _of_source(self, drain: Drain) -> Iterator[Problem]:
        """Reports what the source has otherwise than it was written here."""
        backlog = drain.backlog()
        if backlog.conflict is not None:
            conflict, count = backlog.conflict, backlog.conflicts
            what = f"{os.fsdecode(conflict.path)!r} {conflict.why}"
            if conflict.kept:
                what += f"; the version written here is {os.fsdecode(conflict.kept)!r}"
            yield Problem(
                "drain-conflict",
                f"{counted(count, 'change conflicts', 'changes conflict')} with changes at the"
                f" source: {what}{' (the last)' if count > 1 else ''}",
                remedy=f"compare them at the source: `find {self._source} -name"
                " '*.monarch-conflict-*'`, keep one, remove the other; `monarch ckpt conflicts"
                f" {self._mountpoint}` lists the last of them. The alarm ends with --acknowledge,"
                " and when the mount ends",
            )
        if dropped := dict(drain.writer.log.dropped_xattrs):
            files = len({path for path, _ in dropped})
            (path, name), why = dropped.popitem()
            yield Problem(
                "attributes-dropped",
                "the source did not accept all extended attributes of"
                f" {counted(files, 'file', 'files')}: {os.fsdecode(path)!r},"
                f" {os.fsdecode(name)}: {why}",
                remedy="remove some of them (`setfattr -x`), or set smaller ones;"
                f" `monarch ckpt conflicts {self._mountpoint} --acknowledge` ends this alarm, as"
                " does the end of the mount",
            )

    def _of_refusals(self, write_back: WriteBack) -> Iterator[Problem]:
        backlog = write_back.drain.backlog()
        if backlog.aside:
            count, paths = len(backlog.aside), [each.path for each in backlog.aside[:_SHOWN_PATHS]]
            shown = ", ".join(repr(os.fsdecode(path)) for path in paths)
            more = ", ..." if count > len(paths) else ""
            them = "it" if count == 1 else "them"
            waiting = counted(backlog.aside_ops - count, "change waits", "changes wait")
            yield Problem(
                "written-set-aside",
                f"{counted(count, 'change is', 'changes are')} set aside, the source refuses"
                f" {them}: {shown}{more} ({backlog.aside[0].why}); {waiting} with {them}",
                remedy=f"`monarch ckpt set-aside {self._mountpoint}` lists them; repair the source"
                f" and run `monarch ckpt retry {self._mountpoint}`, or copy the bytes elsewhere and"
                f" discard them with `monarch ckpt discard {self._mountpoint} PATH`",
            )
        if backlog.trouble and not backlog.only_aside:
            kept = counted_changes(backlog.ops, backlog.files, backlog.bytes)
            queue = write_back.drain.queue
            waiting_for = [each.path for each in queue.refusals() if not each.is_aside]
            what, remedy = self._why_it_waits(
                backlog.cause, write_back.place.directory, waiting_for
            )
            yield Problem(
                "drain-refused", f"{what} ({kept} wait): {backlog.trouble}", remedy=remedy
            )

    def _why_it_waits(
        self, cause: Cause, directory: Path, refused: Sequence[bytes]
    ) -> tuple[str, str]:
        """The failed part and the remedy, for written data that is not drained. ``refused``: the
        paths of changes that the source refuses and that are not set aside."""
        stays = f"all data is kept in {directory} and retried automatically"
        if cause == "tier":
            return (
                "the disk of the tier fails, so written data cannot be drained",
                f"check that disk: `df {directory}`, `dmesg`; {stays}",
            )
        if cause == "room":
            return (
                "the source is full, so written data cannot be drained",
                f"make room there: `df {self._source}`, `df -i {self._source}`; what is removed on"
                f" the mount is removed there at once; {stays}",
            )
        if cause == "daemon":
            return (
                "the daemon lacks file descriptors or memory, so written data cannot be drained",
                "raise the limit: `LimitNOFILE=` of the systemd unit or `ulimit -n`, for ENFILE"
                f" `sysctl fs.file-max`, for ENOMEM the memory of the daemon; {stays}",
            )
        if refused:
            above = shlex.quote(os.fspath(self._source / os.fsdecode(os.path.dirname(refused[0]))))
            return (
                "the source refuses written data",
                f"check the directory as the user who wrote there: `ls -ld {above}`, `df {above}`;"
                f" `monarch ckpt set-aside {self._mountpoint}` lists what is refused, and with a"
                " path has other changes made first; `monarch ckpt retry"
                f" {self._mountpoint}` tries again now, `monarch ckpt discard {self._mountpoint}"
                f" PATH` gives changes up; {stays}",
            )
        return (
            "the source refuses written data",
            f"check it as the daemon's user: `ls -ld {self._source}`, `df {self._source}`;"
            f" {stays}; data that the source will never accept can be copied elsewhere on the mount"
            " and removed there",
        )
