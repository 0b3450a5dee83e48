"""Looks at the parts of one daemon and names what is not as it should be, each with a remedy.

A problem is noticed when somebody looks: who asks for the status, the page of metrics, and the
daemon itself every ten seconds. docs/operations.md has a row for each kind.
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

from monarch.absorbing import WriteSide
from monarch.credentials import can_act_as_others
from monarch.fuse.mountpoint import detached_users, mount_at
from monarch.health import Problem, Spell
from monarch.log import Logbook
from monarch.lost import Lost
from monarch.metrics import Metrics
from monarch.modes import memory_groups
from monarch.placement.residency import Residency
from monarch.report import Requests
from monarch.settings import MountSettings
from monarch.text import counted
from monarch.tiers.directory import Tier
from monarch.transfer.engine import Engine
from monarch.units import GiB, format_bytes
from monarch.vfs.inquiry import Inquiry
from monarch.watch import Watch

# How long after the last a fault is still told that leaves nothing to look at. Seconds. A disk that
# gave one wrong byte is to be known the next morning.
_QUIET_S = {"internal-error": 3600.0, "copies-damaged": 86400.0, "writes-refused": 60.0}
# What reading a copy failed with, as the counters of errors have it, that its disk is to blame for.
_DAMAGE = ("copy-ESTALE", "copy-EIO", "copy-EUCLEAN", "copy-EBADMSG")
# Of descriptors, and of a control group's memory, this share used is nearly all.
_SCARCE_SHARE = 0.9
# A request is answered within this time, unless the source or a tier hangs. Seconds.
_ANSWERED_S = 60.0
# How old the list of the processes that use a detached mount may be. Seconds. All of /proc is read.
_USERS_S = 5.0
# How old what the kernel said of the memory may be. Seconds. The files that tell it cost a third of
# a status report.
_MEMORY_S = 1.0
_SHOWN_PIDS = 10
_SHOWN_HOLDERS = 3
_SHOWN_PATHS = 3
# A machine that has less than this share of its memory left, and less than so much, is short.
_LEAST_AVAILABLE_SHARE = 0.02
_LEAST_AVAILABLE = GiB
# What a control group cannot give back by dropping pages, in the words of versions 2 and 1.
_PINNED = r"^(anon|shmem|total_rss|total_shmem) (\d+)$"


class Symptoms:
    """``clock`` never jumps, ``wall_ns`` is the time of day; /proc and /sys are below ``root``."""

    def __init__(
        self,
        *,
        settings: MountSettings,
        tiers: Sequence[Tier],
        residency: Residency,
        engine: Engine,
        inquiry: Inquiry,
        metrics: Metrics,
        watch: Watch,
        logbook: Logbook,
        writing: WriteSide | None,
        lost: Lost,
        requests: Callable[[], Requests],
        put_off: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        root: Path = Path("/"),
    ) -> None:
        self._mountpoint = os.fspath(settings.mountpoint)
        # Of the mount table, as long as the mount was in it.
        self._mount_id: int | None = None
        self._users: Sequence[int] = ()
        self._users_seen_s = -math.inf
        # What the last look at the memory found, and when that was.
        self._memory: list[Problem] = []
        self._memory_seen_s = -math.inf
        self._source = os.fspath(settings.source)
        self._as_caller = settings.source_identity == "caller"
        self._tiers = tiers
        self._residency = residency
        self._engine = engine
        self._inquiry = inquiry
        self._metrics = metrics
        self._watch = watch
        self._logbook = logbook
        self._writing = writing
        self._lost = lost
        self._requests = requests
        self._put_off = put_off
        self._clock = clock
        self._wall_ns = wall_ns
        self._root = root
        self._spells = {kind: Spell(quiet_s) for kind, quiet_s in _QUIET_S.items()}
        # Kind and subject of what was found at the last look, and when it was first found.
        self._since_ns: dict[tuple[str, str], int] = {}

    def problems(self) -> list[Problem]:
        """All there are now. A few system calls, no wait for a disk."""
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
        """Problems, each with what it is about; ``since_ns`` is 0 where nobody has kept it."""
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
        """That it was taken away while files were open; not before it was made."""
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
                "it ends with the last of them; a process that only has its directory there is not"
                " listed, and other users' processes only for root",
            )

    def _users_of(self, mount_id: int) -> Sequence[int]:
        now = self._clock()
        if now - self._users_seen_s > _USERS_S:
            self._users_seen_s, self._users = now, detached_users(mount_id)
        return self._users

    def _of_source(self) -> Iterator[Problem]:
        trouble = self._inquiry.trouble()
        if trouble is None:
            return
        if trouble.hangs:
            yield Problem(
                "source-hangs",
                f"the source {self._source} {trouble.what}; reads that need it wait",
                trouble.since_ns,
                f"look whether its file system answers: `timeout 5 stat {self._source}`;"
                " resident files are served, and the others go on by themselves when it does",
            )
        else:
            yield Problem(
                "source-errors",
                f"the source {self._source} answers with errors: {trouble.what}",
                trouble.since_ns,
                f"look at it as the daemon's user: `ls {self._source}`, and at its client:"
                " `dmesg`; resident files are served, the others again as soon as it answers",
            )

    def _of_closed_files(self) -> Iterator[Problem]:
        closed = len(self._metrics.closed_files)
        # A daemon of a user reads what this user may, which is as it should be.
        if not closed or self._as_caller or not can_act_as_others():
            return
        told = counted(closed, "file is", "files are")
        yield Problem(
            "source-closed",
            f"{told} closed to the daemon at the source, though it runs as root",
            0,
            "the source refuses root (root squash): set `source_identity: caller`, and files are"
            " opened there with the rights of the process that reads",
        )

    def _of_requests(self) -> Iterator[Problem]:
        oldest_s = self._requests().oldest_s
        trouble = self._inquiry.trouble()
        explained = (trouble is not None and trouble.hangs) or any(
            outage.slow for outage in self._engine.out_of_service().values()
        )
        if oldest_s > _ANSWERED_S and not explained:
            yield Problem(
                "requests-wait",
                f"a request has waited {oldest_s:.0f} s for an answer, though neither the source"
                " nor a tier is seen to hang",
                self._wall_ns() - int(oldest_s * 1e9),
                f"look for the process that waits: `ps -eo pid,stat,wchan,args | grep ' D'`, and at"
                f" {self._logbook.path}; if it stays, report it and mount {self._mountpoint} again",
            )

    def _of_writing(self) -> Iterator[Problem]:
        side, mountpoint = self._writing, self._mountpoint
        if self._lost.names:
            names = self._lost.names
            left = len(side.place.doubtful.list()) if side is not None else 0
            aside = f"; what is left of {left:,} is kept aside" if left else ""
            yield Problem(
                "written-lost",
                f"{counted(len(names), 'written file has', 'written files have')} lost their bytes:"
                f" {os.fsdecode(names[0])}{', ...' if len(names) > 1 else ''}{aside}",
                0,
                f"`monarch ckpt lost {mountpoint}` lists them; at the source each is as it was"
                " before. With --acknowledge this alarm ends",
            )
        if side is None:
            return
        spell = self._spells["writes-refused"]
        if self._goes_on(spell, side.files.failures) or side.place.journal.failed:
            where = os.fspath(side.place.directory)
            yield Problem(
                "writes-refused",
                f"what is written is refused: {side.place.journal.failed or side.files.failure}",
                0,
                f"look at the disk of tier {side.place.tier.name} (`df {where}`, `dmesg`), and, if"
                " that is full, at the source's; what was fsynced is safe, and writing goes on as"
                " soon as one of them has room",
            )
        if unsynced := side.files.unsynced():
            yield Problem(
                "fsync-failed",
                f"{counted(len(unsynced), 'file', 'files')} could not be synced:"
                f" {os.fsdecode(unsynced[0])!r}: nobody knows what the disk of tier"
                f" {side.place.tier.name} has of it",
                0,
                "write it again, from its start, or close it: then it is written anew as it is"
                " read, or read from the source. `dmesg` tells what is wrong with the disk",
            )
        if hidden := side.hidden():
            yield Problem(
                "written-hidden",
                f"{counted(len(hidden), 'file', 'files')} of an earlier mount cannot be shown:"
                f" {os.fsdecode(hidden[0])!r}",
                0,
                f"its bytes are brought to the source: `monarch ckpt wait {mountpoint}`, then mount"
                f" again; `monarch ckpt lost {mountpoint}` lists all",
            )
        if not side.writing.names_free:
            held, most = side.writing.names_held, side.writing.names_max
            yield Problem(
                "written-names",
                f"what was made and changed through the mount takes the memory of {held:,} names of"
                f" {most:,}: no new names, they fail with ENOSPC",
                0,
                f"remove what is not needed from {mountpoint}; or, when all is drained (`monarch"
                f" ckpt wait {mountpoint}`), unmount and mount again: the snapshot has it then; or"
                " raise `writeback.names_max`, 3 KiB of memory each",
            )
        yield from self._of_other_writers(side)
        backlog = side.drain.backlog()
        if backlog.conflict is not None:
            conflict, count = backlog.conflict, backlog.conflicts
            told = f"{os.fsdecode(conflict.path)!r} {conflict.why}"
            if conflict.kept:
                told += f"; what was written here is {os.fsdecode(conflict.kept)!r}"
            yield Problem(
                "drain-conflict",
                f"{counted(count, 'change', 'changes')} of this mount met others of the source:"
                f" {told}{' (the last)' if count > 1 else ''}",
                0,
                f"compare them at the source: `find {self._source} -name '*.monarch-conflict-*'`,"
                f" keep one, remove the other; `monarch ckpt conflicts {mountpoint}` lists the last"
                " of them. With --acknowledge this alarm ends, and so it does with the mount",
            )
        if dropped := side.drain.dropped_xattrs():
            files = len({path for path, _ in dropped})
            (path, name), why = dropped.popitem()
            yield Problem(
                "attributes-dropped",
                "the source has not taken all extended attributes of"
                f" {counted(files, 'file', 'files')}: {os.fsdecode(path)!r},"
                f" {os.fsdecode(name)}: {why}",
                0,
                "remove some of them (`setfattr -x`), or set smaller ones;"
                f" `monarch ckpt conflicts {mountpoint} --acknowledge` ends this alarm, and so does"
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
                f"`monarch ckpt set-aside {mountpoint}` lists them; mend the source and"
                f" `monarch ckpt retry {mountpoint}`, or copy the bytes elsewhere and give them up"
                f" with `monarch ckpt discard {mountpoint} PATH`",
            )
        if backlog.trouble and not backlog.only_aside:
            kept = f"{counted(backlog.files, 'file', 'files')}, {format_bytes(backlog.bytes)}"
            yield Problem(
                "drain-refused",
                f"the source does not take what was written ({kept} wait): {backlog.trouble}",
                0,
                f"look at it as the daemon's user: `ls -ld {self._source}`, `df {self._source}`;"
                f" all is kept in {os.fspath(side.place.directory)} and tried again by itself;"
                " what the source never will take can be copied elsewhere on the mount and removed"
                " there",
            )

    def _of_other_writers(self, side: WriteSide) -> Iterator[Problem]:
        lease = side.lease
        if lease is None:
            return
        if lease.others:
            told = ", ".join(holder.words() for holder in lease.others[:_SHOWN_HOLDERS])
            yield Problem(
                "other-writer",
                f"the same paths of {self._source} are written through"
                f" {counted(len(lease.others), 'other mount', 'other mounts')}: {told}",
                0,
                "unmount one of them, or let each write paths of its own (`absorb`); what both"
                " write is kept beside as a conflict, and never overwritten",
            )
        if lease.trouble:
            yield Problem(
                "no-lease",
                f"{self._source} takes no lease of this mount: {lease.trouble}; another mount that"
                " writes the same paths is not seen",
                0,
                f"look at `ls -la {self._source}`: a directory `.monarch-leases.part` that this"
                " mount's daemon may write is to be there; anything else of that name can be"
                " removed",
            )
        if lease.was_lost:
            yield Problem(
                "lease-lost",
                "this mount's lease at the source was gone, or could not be renewed in time:"
                " another mount may have begun to write the same paths",
                0,
                f"`monarch ckpt conflicts {self._mountpoint}` tells whether both have written; it"
                " ends with the mount",
            )

    def _of_tier(self, tier: Tier) -> Iterator[Problem]:
        outage = self._engine.out_of_service().get(tier.number)
        if outage is None:
            return
        since_ns, where = outage.since_ns, os.fspath(tier.path)
        if outage.full:
            # Not by its capacity: one that is full of copies is in service.
            others = ", ".join(self._engine.others(tier.number))
            yield Problem(
                "tier-full",
                f"tier {tier.name} takes no copies, others have filled its disk: {outage.why}"
                + (f"; copies of {others} lie there, too" if others else ""),
                since_ns,
                f"make room there (`df {where}`) or lower its `keep_free`; `monarch evict --tier"
                f" {where}` shows and drops copies of sources that are not mounted; what it holds"
                " is served, and it takes copies again by itself",
            )
        elif outage.slow:
            yield Problem(
                "tier-slow",
                f"tier {tier.name} is too slow and left alone: {outage.why}",
                since_ns,
                f"look at its disk ({where}): `iostat -x 1`, `dmesg`; reads are served from"
                " below, and it comes back by itself",
            )
        else:
            yield Problem(
                "tier-out",
                f"tier {tier.name} is out of service: {outage.why}",
                since_ns,
                f"repair {where} (`ls -ld {where}`, `findmnt -T {where}`, `dmesg`); reads are"
                " served from below, and it comes back by itself",
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
            told = counted(spell.number, "copy was", "copies were")
            yield Problem(
                "copies-damaged",
                f"{told} damaged, dropped, and read from the source instead",
                spell.since_ns,
                "look at the disk that the log names: `smartctl -a`, `dmesg`; then"
                f" `monarch fsck {self._mountpoint}`",
            )
        if waiting := self._residency.unverified_files():
            told = counted(waiting, "copy has", "copies have")
            yield Problem(
                "copies-unverified",
                f"the last daemon did not end cleanly: {told} not been verified yet",
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
                f"make room or repair the disk: `df {self._logbook.path}`; reads are served",
            )

    def _of_memory(self) -> Sequence[Problem]:
        now = self._clock()
        if now - self._memory_seen_s > _MEMORY_S:
            self._memory_seen_s, self._memory = now, list(self._memory_scarce())
        return self._memory

    def _memory_scarce(self) -> Iterator[Problem]:
        remedy = (
            "the daemon may be killed, and reads with it: end what takes the memory, raise the"
            " limit, or make a tier in memory smaller"
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
        """What control group has nearly used up its memory, in words."""
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
            "the names are still those of the last mount's snapshot; the source has all changes"
            " that belong to it by now: mount again"
        )

    def _of_changes(self) -> Iterator[Problem]:
        if self._put_off:
            yield Problem(
                "snapshot-behind",
                self._behind(),
                0,
                f"wait with `monarch ckpt wait {self._mountpoint}`, `monarch umount"
                f" {self._mountpoint}`, and mount again; nothing is lost meanwhile",
            )
        refresh = f"`monarch umount {self._mountpoint}` and mount again with --refresh"
        if changes := self._metrics.changes:
            yield Problem(
                "files-changed",
                f"{counted(changes, 'file', 'files')} changed at the source since the snapshot",
                0,
                f"each was noticed and is read as it is now; {refresh} ends this",
            )
        if changes := self._watch.changed_directories:
            told = counted(changes, "directory", "directories")
            yield Problem(
                "snapshot-stale",
                f"{told} changed at the source since the snapshot: what is new there is not shown",
                0,
                f"{refresh} to see it",
            )

    def _goes_on(self, spell: Spell, count: int) -> bool:
        return spell.goes_on(count, now_s=self._clock(), wall_ns=self._wall_ns())


def _numbers(path: Path, pattern: str) -> dict[str, int]:
    """The names and numbers that ``pattern`` finds in a file of the kernel, if it is there."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(pattern, text, re.MULTILINE)}


def _descriptors() -> int:
    """How many are open; without one to spare for a listing, all."""
    try:
        # Linux 6.2 and later tell it at once, a million descriptors take a second to list.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return 0
