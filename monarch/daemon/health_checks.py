"""Checks the parts of one daemon and reports each problem with a remedy.

The checks run for each status request, each scrape of the metrics, and every ten seconds.
docs/operations.md has a row for each kind of problem.
"""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from monarch.config.settings import MountSettings
from monarch.daemon.freshness import FreshnessWatch
from monarch.daemon.loss_alarm import LossAlarm
from monarch.fuse.mountpoint import detached_users, mount_at
from monarch.placement.residency import Residency
from monarch.posix.cgroups import memory_groups
from monarch.posix.credentials import can_act_as_others
from monarch.telemetry.health import Problem, Spell
from monarch.telemetry.log import Logbook
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.report import Requests
from monarch.text import counted
from monarch.tiers.tier import Tier
from monarch.transfer.engine import Engine
from monarch.transfer.source_calls import SourceCalls
from monarch.units import GiB, format_bytes
from monarch.writeback.operations import WriteOperations
from monarch.writeback.setup import WriteBack

# A fault that leaves no trace is reported for this long after its last occurrence. A damaged copy
# is reported for a day, so that it is seen the next morning.
_QUIET_S = {"internal-error": 3600.0, "copies-damaged": 86400.0, "writes-refused": 60.0}
# The counters of errors, in reading copies, that the disk of the tier causes.
_DAMAGE = ("copy-ESTALE", "copy-EIO", "copy-EUCLEAN", "copy-EBADMSG")
# Descriptors, or the memory of a control group, are reported as scarce above this share in use.
_SCARCE_SHARE = 0.9
# A request is answered within this time unless the source or a tier hangs.
_ANSWERED_S = 60.0
# Greatest age of the list of processes that use a detached mount: the list reads all of /proc.
_USERS_S = 5.0
# Greatest age of the kernel's figures of the memory: reading them takes a third of the time of
# a status report.
_MEMORY_S = 1.0
_SHOWN_PIDS = 10
_SHOWN_HOLDERS = 3
_SHOWN_PATHS = 3
# Memory is scarce if less than this share, and less than this size, is available.
_LEAST_AVAILABLE_SHARE = 0.02
_LEAST_AVAILABLE = GiB
# Memory that a control group cannot reclaim by dropping pages: the keys of versions 2 and 1.
_PINNED = r"^(anon|shmem|total_rss|total_shmem) (\d+)$"


class HealthChecks:
    """``clock`` is monotonic, ``wall_ns`` is the time of day; /proc and /sys are below ``root``."""

    def __init__(
        self,
        *,
        settings: MountSettings,
        tiers: Sequence[Tier],
        residency: Residency,
        engine: Engine,
        source_calls: SourceCalls,
        metrics: Metrics,
        watch: FreshnessWatch,
        logbook: Logbook,
        writing: WriteBack | None,
        loss_alarm: LossAlarm,
        requests: Callable[[], Requests],
        put_off: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        root: Path = Path("/"),
    ) -> None:
        self._mountpoint = os.fspath(settings.mountpoint)
        # The id in the mount table when the mount was last seen there.
        self._mount_id: int | None = None
        self._users: Sequence[int] = ()
        self._users_seen_s = -math.inf
        # The result of the last check of the memory, and its time.
        self._memory: list[Problem] = []
        self._memory_seen_s = -math.inf
        self._source = os.fspath(settings.source)
        self._as_caller = settings.source_identity == "caller"
        self._tiers = tiers
        self._residency = residency
        self._engine = engine
        self._source_calls = source_calls
        self._metrics = metrics
        self._watch = watch
        self._logbook = logbook
        self._writing = writing
        self._loss_alarm = loss_alarm
        self._requests = requests
        self._put_off = put_off
        self._clock = clock
        self._wall_ns = wall_ns
        self._root = root
        self._spells = {kind: Spell(quiet_s) for kind, quiet_s in _QUIET_S.items()}
        # Kind and subject of each problem of the last check, and when it was first found.
        self._since_ns: dict[tuple[str, str], int] = {}

    def problems(self) -> list[Problem]:
        """All current problems. Makes a few system calls and does not wait for a disk."""
        before, self._since_ns = self._since_ns, {}
        found = []
        for subject, problem in self._look():
            if not problem.since_ns:
                key = (problem.kind, subject)
                since_ns = before.get(key) or self._wall_ns()
                self._since_ns[key] = since_ns
                problem = Problem(problem.kind, problem.what, since_ns, problem.remedy)
            found.append(problem)
        return found

    def _look(self) -> Iterator[tuple[str, Problem]]:
        """Problems, each with its subject; ``since_ns`` is 0 if the start was not recorded."""
        for tier in self._tiers:
            for problem in self._of_tier(tier):
                yield tier.name, problem
        for look in (
            self._of_source,
            self._of_requests,
            self._of_mount,
            self._of_closed_files,
            self._of_writing,
            self._of_our_own_making,
            self._of_copies,
            self._of_log,
            self._of_memory,
            self._of_descriptors,
            self._of_changes,
        ):
            for problem in look():
                yield "", problem

    def _of_mount(self) -> Iterator[Problem]:
        """Reports that the mount was detached while processes used it."""
        mounted = mount_at(Path(self._mountpoint))
        if mounted is not None:
            self._mount_id = mounted.id
        elif self._mount_id is not None:
            pids = self._users_of(self._mount_id)
            shown = ", ".join(map(str, pids[:_SHOWN_PIDS])) + (
                ", ..." if pids[_SHOWN_PIDS:] else ""
            )
            yield Problem(
                "detached",
                f"{self._mountpoint} is detached (umount --lazy), and processes still use it"
                + (f": pid {shown}" if pids else ""),
                0,
                "the mount ends with the last of them; a process that only has its current"
                " directory"
                " there is not listed, and root alone sees the processes of other users",
            )

    def _users_of(self, mount_id: int) -> Sequence[int]:
        now = self._clock()
        if now - self._users_seen_s > _USERS_S:
            self._users_seen_s, self._users = now, detached_users(mount_id)
        return self._users

    def _of_source(self) -> Iterator[Problem]:
        trouble = self._source_calls.trouble()
        if trouble is None:
            return
        if trouble.hangs:
            yield Problem(
                "source-hangs",
                f"the source {self._source} {trouble.what}; reads that need it wait",
                trouble.since_ns,
                f"check whether its file system answers: `timeout 5 stat {self._source}`;"
                " resident files are served, and reads of other files continue when it answers",
            )
        else:
            yield Problem(
                "source-errors",
                f"the source {self._source} answers with errors: {trouble.what}",
                trouble.since_ns,
                f"check it as the daemon's user: `ls {self._source}`, and check its client:"
                " `dmesg`; resident files are served, and other files again when it answers",
            )

    def _of_closed_files(self) -> Iterator[Problem]:
        closed = len(self._metrics.closed_files)
        # An unprivileged daemon reads what its user may read: a refusal is then no problem.
        if not closed or self._as_caller or not can_act_as_others():
            return
        words = counted(closed, "file", "files")
        yield Problem(
            "source-closed",
            f"the source does not let the daemon read {words}, though the daemon runs as root",
            0,
            "the source refuses root (root squash): set `source_identity: caller`, and files are"
            " opened there with the rights of the process that reads",
        )

    def _of_requests(self) -> Iterator[Problem]:
        oldest_s = self._requests().oldest_s
        trouble = self._source_calls.trouble()
        explained = (trouble is not None and trouble.hangs) or any(
            outage.slow for outage in self._engine.out_of_service().values()
        )
        if oldest_s > _ANSWERED_S and not explained:
            yield Problem(
                "requests-wait",
                f"a request has waited {oldest_s:.0f} s for an answer, though neither the source"
                " nor a tier seems to hang",
                self._wall_ns() - int(oldest_s * 1e9),
                f"find the process that waits: `ps -eo pid,stat,wchan,args | grep ' D'`, and read"
                f" {self._logbook.path}; if it persists, report it and mount {self._mountpoint}"
                " again",
            )

    def _of_writing(self) -> Iterator[Problem]:
        write_back, mountpoint = self._writing, self._mountpoint
        if self._loss_alarm.names:
            names = self._loss_alarm.names
            left = len(write_back.place.doubtful.list()) if write_back is not None else 0
            aside = f"; the remaining bytes of {left:,} are kept aside" if left else ""
            yield Problem(
                "written-lost",
                f"{counted(len(names), 'written file has', 'written files have')} lost their bytes:"
                f" {os.fsdecode(names[0])}{', ...' if len(names) > 1 else ''}{aside}",
                0,
                f"`monarch ckpt lost {mountpoint}` lists them; the source still has the version"
                " from"
                " before the write. With --acknowledge this alarm ends",
            )
        if write_back is None:
            return
        spell = self._spells["writes-refused"]
        if self._goes_on(spell, write_back.files.failures) or write_back.place.journal.failed:
            where = os.fspath(write_back.place.directory)
            yield Problem(
                "writes-refused",
                "writes are refused: "
                f"{write_back.place.journal.failed or write_back.files.failure}",
                0,
                f"check the disk of tier {write_back.place.tier.name} (`df {where}`, `dmesg`) "
                "and, if it"
                " is full, the disk of the source; fsynced data is safe, and writing continues when"
                " one of them has space",
            )
        if unsynced := write_back.files.unsynced():
            yield Problem(
                "fsync-failed",
                f"{counted(len(unsynced), 'file', 'files')} could not be synced:"
                f" {os.fsdecode(unsynced[0])!r}: how much of the data the disk of tier"
                f" {write_back.place.tier.name} holds is unknown",
                0,
                "write the file again from its start, or close it: then its data is written anew"
                " from"
                " memory, or read from the source. `dmesg` shows what is wrong with the disk",
            )
        if hidden := write_back.hidden():
            yield Problem(
                "written-hidden",
                f"{counted(len(hidden), 'file', 'files')} of an earlier mount cannot be shown:"
                f" {os.fsdecode(hidden[0])!r}",
                0,
                f"their bytes are written to the source: `monarch ckpt wait {mountpoint}`, then"
                " mount"
                f" again; `monarch ckpt lost {mountpoint}` lists all",
            )
        yield from self._of_names(write_back.writing)
        yield from self._of_other_writers(write_back)
        backlog = write_back.drain.backlog()
        if backlog.conflict is not None:
            conflict, count = backlog.conflict, backlog.conflicts
            told = f"{os.fsdecode(conflict.path)!r} {conflict.why}"
            if conflict.kept:
                told += f"; the version written here is {os.fsdecode(conflict.kept)!r}"
            yield Problem(
                "drain-conflict",
                f"{counted(count, 'change', 'changes')} of this mount conflict with changes at the"
                " source:"
                f" {told}{' (the last)' if count > 1 else ''}",
                0,
                f"compare them at the source: `find {self._source} -name '*.monarch-conflict-*'`,"
                f" keep one, remove the other; `monarch ckpt conflicts {mountpoint}` lists the last"
                " of them. The alarm ends with --acknowledge, and when the mount ends",
            )
        if dropped := write_back.drain.dropped_xattrs():
            files = len({path for path, _ in dropped})
            (path, name), why = dropped.popitem()
            yield Problem(
                "attributes-dropped",
                "the source did not accept all extended attributes of"
                f" {counted(files, 'file', 'files')}: {os.fsdecode(path)!r},"
                f" {os.fsdecode(name)}: {why}",
                0,
                "remove some of them (`setfattr -x`), or set smaller ones;"
                f" `monarch ckpt conflicts {mountpoint} --acknowledge` ends this alarm, as does"
                " the end of the mount",
            )
        if backlog.aside:
            count, paths = len(backlog.aside), [each.path for each in backlog.aside[:_SHOWN_PATHS]]
            told = ", ".join(repr(os.fsdecode(path)) for path in paths)
            more = ", ..." if count > len(paths) else ""
            waiting = counted(backlog.aside_ops - count, "change waits", "changes wait")
            yield Problem(
                "written-set-aside",
                f"{counted(count, 'change is', 'changes are')} set aside, the source refuses"
                f" {'it' if count == 1 else 'them'}: {told}{more} ({backlog.aside[0].why});"
                f" {waiting} with {'it' if count == 1 else 'them'}",
                0,
                f"`monarch ckpt set-aside {mountpoint}` lists them; repair the source and run"
                f" `monarch ckpt retry {mountpoint}`, or copy the bytes elsewhere and discard them"
                f" with `monarch ckpt discard {mountpoint} PATH`",
            )
        if backlog.trouble and not backlog.only_aside:
            kept = f"{counted(backlog.files, 'file', 'files')}, {format_bytes(backlog.bytes)}"
            yield Problem(
                "drain-refused",
                f"the source refuses written data ({kept} wait): {backlog.trouble}",
                0,
                f"check it as the daemon's user: `ls -ld {self._source}`, `df {self._source}`;"
                f" all data is kept in {os.fspath(write_back.place.directory)} and retried "
                "automatically;"
                " data that the source will never accept can be copied elsewhere on the mount and"
                " removed there",
            )

    def _of_names(self, writing: WriteOperations) -> Iterator[Problem]:
        if not writing.names_free:
            held, most = writing.names_held, writing.names_max
            yield Problem(
                "written-names",
                f"the names created and changed through the mount use the memory of {held:,} of"
                f" {most:,} names: a new name fails with ENOSPC",
                0,
                f"remove files that are not needed from {self._mountpoint}; or, when all is drained"
                f" (`monarch ckpt wait {self._mountpoint}`), unmount and mount again: the new"
                " snapshot has the names; or raise `writeback.names_max`, which takes 3 KiB of"
                " memory a name",
            )
        if failure := writing.names.put_away_failure:
            yield Problem(
                "names-unreadable",
                f"names of written files cannot be read from the state directory {failure}",
                0,
                "nothing is lost: check the disk of that directory (`dmesg`), `monarch umount"
                f" {self._mountpoint}` (with --abandon if the drain waits), and mount again: the"
                " journal has all names",
            )

    def _of_other_writers(self, write_back: WriteBack) -> Iterator[Problem]:
        lease = write_back.lease
        if lease is None:
            return
        if lease.others:
            words = ", ".join(holder.words() for holder in lease.others[:_SHOWN_HOLDERS])
            yield Problem(
                "other-writer",
                f"the same paths of {self._source} are written through"
                f" {counted(len(lease.others), 'other mount', 'other mounts')}: {words}",
                0,
                "unmount one of them, or give each its own paths to write (`absorb`); if both write"
                " a path, the second version is kept beside the first as a conflict",
            )
        if lease.trouble:
            yield Problem(
                "no-lease",
                f"{self._source} refuses the lease of this mount: {lease.trouble}; another mount"
                " that"
                " writes the same paths would not be detected",
                0,
                f"check `ls -la {self._source}`: it must show a directory `.monarch-leases.part`"
                " that"
                " the daemon of this mount may write; anything else of that name can be"
                " removed",
            )
        if lease.was_lost:
            yield Problem(
                "lease-lost",
                "the lease of this mount at the source was missing, or was not renewed in time:"
                " another mount may have begun to write the same paths",
                0,
                f"`monarch ckpt conflicts {self._mountpoint}` shows whether both have written; the"
                " problem ends with the mount",
            )

    def _of_tier(self, tier: Tier) -> Iterator[Problem]:
        outage = self._engine.out_of_service().get(tier.number)
        if outage is None:
            return
        since_ns, where = outage.since_ns, os.fspath(tier.path)
        if outage.full:
            # The disk is full, not the capacity: a tier that is full of copies is in service.
            others = ", ".join(self._engine.others(tier.number))
            yield Problem(
                "tier-full",
                f"tier {tier.name} stores no copies, other files have filled its disk: {outage.why}"
                + (f"; it also holds copies of {others}" if others else ""),
                since_ns,
                f"free space there (`df {where}`) or lower its `keep_free`; `monarch evict --tier"
                f" {where}` lists and removes copies of sources that are not mounted; its copies"
                " are served, and it stores copies again when there is space",
            )
        elif outage.slow:
            yield Problem(
                "tier-slow",
                f"tier {tier.name} is too slow and not used now: {outage.why}",
                since_ns,
                f"check its disk ({where}): `iostat -x 1`, `dmesg`; reads are served from"
                " below, and the tier is used again when it answers in time",
            )
        else:
            yield Problem(
                "tier-out",
                f"tier {tier.name} is out of service: {outage.why}",
                since_ns,
                f"repair {where} (`ls -ld {where}`, `findmnt -T {where}`, `dmesg`); reads are"
                " served from lower tiers or the source, and the tier returns by itself",
            )

    def _of_our_own_making(self) -> Iterator[Problem]:
        spell = self._spells["internal-error"]
        if self._goes_on(spell, self._logbook.exceptions):
            times = counted(spell.number, "time", "times")
            yield Problem(
                "internal-error",
                f"internal error, {times}; the calls concerned failed with EIO",
                spell.since_ns,
                "this is a bug, please report it with the traceback in"
                f" {self._logbook.path}; the mount continues",
            )

    def _of_copies(self) -> Iterator[Problem]:
        spell = self._spells["copies-damaged"]
        if self._goes_on(spell, sum(self._metrics.errors[kind] for kind in _DAMAGE)):
            words = counted(spell.number, "copy was", "copies were")
            yield Problem(
                "copies-damaged",
                f"{words} damaged and removed; the source served the reads",
                spell.since_ns,
                "check the disk that the log names: `smartctl -a`, `dmesg`; then run"
                f" `monarch fsck {self._mountpoint}`",
            )
        if waiting := self._residency.unverified_files():
            words = counted(waiting, "copy has", "copies have")
            yield Problem(
                "copies-unverified",
                f"the last daemon did not end cleanly: {words} not been verified yet",
                0,
                "nothing to do: each is compared with its digest before its first use",
            )

    def _of_log(self) -> Iterator[Problem]:
        trouble = self._logbook.trouble()
        if trouble is not None:
            yield Problem(
                "log-unwritable",
                f"the log {self._logbook.path} cannot be written: {trouble.what}",
                trouble.since_ns,
                f"free space or repair the disk: `df {self._logbook.path}`; reads are served",
            )

    def _of_memory(self) -> Sequence[Problem]:
        now = self._clock()
        if now - self._memory_seen_s > _MEMORY_S:
            self._memory_seen_s, self._memory = now, list(self._memory_scarce())
        return self._memory

    def _memory_scarce(self) -> Iterator[Problem]:
        remedy = (
            "the kernel may kill the daemon, then reads fail: end processes that use memory, raise"
            " the"
            " limit, or give a tier in memory less capacity"
        )
        if group := self._full_group():
            yield Problem("memory-scarce", group, 0, remedy)
            return
        told = _numbers(self._root / "proc/meminfo", r"^(MemTotal|MemAvailable):\s+(\d+) kB$")
        total, available = (told.get(f"Mem{name}", 0) * 1024 for name in ("Total", "Available"))
        if total and available < min(total * _LEAST_AVAILABLE_SHARE, _LEAST_AVAILABLE):
            shown = f"{format_bytes(available)} of {format_bytes(total)} are available"
            yield Problem("memory-scarce", f"the machine is short of memory: {shown}", 0, remedy)

    def _full_group(self) -> str:
        """A sentence about a control group that has nearly used up its memory, or empty."""
        for directory, limit in memory_groups(self._root):
            pinned = sum(_numbers(directory / "memory.stat", _PINNED).values())
            if limit and pinned > limit * _SCARCE_SHARE:
                shown = f"{format_bytes(pinned)} of {format_bytes(limit)}"
                return f"the control group {directory} is short of memory: {shown} are in use"
        return ""

    def _of_descriptors(self) -> Iterator[Problem]:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and _descriptors() > limit * _SCARCE_SHARE:
            yield Problem(
                "descriptors-scarce",
                f"more than {_SCARCE_SHARE:.0%} of {limit} file descriptors are in use",
                0,
                f"as root `prlimit --pid {os.getpid()} --nofile=1048576` raises the limit now;"
                " LimitNOFILE= of the unit, or limits.conf, for the next mount",
            )

    def _behind(self) -> str:
        if self._writing is not None and self._writing.drain.last_seq:
            return self._put_off
        return (
            "the names are those of the snapshot of the last mount; the source now has all changes"
            " that follow it: mount again"
        )

    def _of_changes(self) -> Iterator[Problem]:
        if self._put_off:
            yield Problem(
                "snapshot-behind",
                self._behind(),
                0,
                f"wait with `monarch ckpt wait {self._mountpoint}`, `monarch umount"
                f" {self._mountpoint}`, then mount again; nothing is lost",
            )
        refresh = f"`monarch umount {self._mountpoint}` and mount again with --refresh"
        if changes := self._metrics.changes:
            yield Problem(
                "files-changed",
                f"{counted(changes, 'file', 'files')} changed at the source since the snapshot",
                0,
                f"readers get the current version of each; {refresh} ends this",
            )
        if changes := self._watch.changed_directories:
            words = counted(changes, "directory", "directories")
            yield Problem(
                "snapshot-stale",
                f"{words} changed at the source since the snapshot: new files there are not shown",
                0,
                f"{refresh} to see it",
            )

    def _goes_on(self, spell: Spell, count: int) -> bool:
        return spell.goes_on(count, now_s=self._clock(), wall_ns=self._wall_ns())


def _numbers(path: Path, pattern: str) -> dict[str, int]:
    """The names and numbers that ``pattern`` finds in ``path``; empty if it cannot be read."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(pattern, text, re.MULTILINE)}


def _descriptors() -> int:
    """The number of open descriptors; the limit if none is free for the listing."""
    try:
        # Linux 6.2 and later report the number as st_size; listing a million takes a second.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return 0
