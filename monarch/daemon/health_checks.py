"""Checks the parts of one daemon and reports each problem with a remedy.

Each class here and in write_status.py checks one part. The checks run for each status request, each
scrape of the metrics, and every ten seconds. docs/operations.md has a row for each kind of problem.
"""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from monarch.config.settings import MountSettings
from monarch.daemon.freshness import FreshnessWatch
from monarch.fuse.mountpoint import detached_users, mount_at
from monarch.packmount.damage import Damage
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.placement.rules import Rules
from monarch.posix.cgroups import machine_memory, memory_groups
from monarch.posix.credentials import can_act_as_others
from monarch.telemetry.health import Problem, Spell
from monarch.telemetry.log import Logbook
from monarch.telemetry.metrics import Metrics
from monarch.telemetry.peers_report import PeersReport
from monarch.telemetry.report import Requests
from monarch.text import GiB, counted, format_bytes
from monarch.tiers.tier import Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.tier_monitor import TierMonitor
from monarch.writeback.drain import Drain

# A damaged copy is reported for this long, so that it is seen the next morning.
_DAMAGED_S = 86400.0
# The counters of errors, in reading copies, that the disk of the tier causes.
_DAMAGE = ("copy-ESTALE", "copy-EIO", "copy-EUCLEAN", "copy-EBADMSG")
# A request is answered within this time unless the source or a tier hangs.
_ANSWERED_S = 60.0
# Greatest age of the list of processes that use a detached mount: the list reads all of /proc.
_USERS_S = 5.0
_SHOWN_PIDS = 10
_SHOWN_DAMAGE = 3
# An internal error leaves no trace: it is reported for this long after its last occurrence.
_INTERNAL_S = 3600.0
# Descriptors, or the memory of a control group, are reported as scarce above this share in use.
_SCARCE_SHARE = 0.9
# Greatest age of the kernel's figures of the memory: reading them takes a third of the time of
# a status report.
_MEMORY_S = 1.0
# Memory is scarce if less than this share, and less than this size, is available.
_LEAST_AVAILABLE_SHARE = 0.02
_LEAST_AVAILABLE = GiB
# Memory that a control group cannot reclaim by dropping pages: the keys of versions 2 and 1.
_PINNED = r"^(?:anon|shmem|total_rss|total_shmem) (\d+)$"
# Nodes that a problem names.
_SHOWN_NODES = 3


class Check(Protocol):
    """``problems`` makes a few system calls and does not wait for a disk."""

    def problems(self) -> Iterable[Problem]: ...


class HealthChecks:
    """All checks of one mount. ``wall_ns`` is the time of day."""

    def __init__(
        self, checks: Sequence[Check], *, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._checks = checks
        self._wall_ns = wall_ns
        # When each kind of problem without a recorded start was first found.
        self._since_ns: dict[str, int] = {}

    def problems(self) -> list[Problem]:
        """All current problems."""
        before, self._since_ns = self._since_ns, {}
        found = []
        for problem in (problem for check in self._checks for problem in check.problems()):
            kind, since_ns = problem.kind, problem.since_ns
            if not since_ns:
                since_ns = self._since_ns[kind] = before.get(kind) or self._wall_ns()
            found.append(Problem(kind, problem.what, since_ns, problem.remedy))
        return found


class MountCheck:
    """Reports that the mount was detached while processes used it."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        # The id in the mount table when the mount was last seen there.
        self._mount_id: int | None = None
        self._users: Sequence[int] = ()
        self._users_seen_s = -math.inf

    def problems(self) -> Iterator[Problem]:
        try:
            mounted = mount_at(self._mountpoint)
        except OSError:
            # Out of descriptors, which another check reports.
            return
        if mounted is not None:
            self._mount_id = mounted.id
        elif self._mount_id is not None:
            pids = self._users_of(self._mount_id)
            more = ", ..." if pids[_SHOWN_PIDS:] else ""
            shown = ", ".join(map(str, pids[:_SHOWN_PIDS])) + more
            yield Problem(
                "detached",
                f"{self._mountpoint} is detached (umount --lazy), and processes still use it"
                + (f": pid {shown}" if pids else ""),
                remedy="the mount ends with the last of them; a process that only has its current"
                " directory there is not listed, and root alone sees the processes of other users",
            )

    def _users_of(self, mount_id: int) -> Sequence[int]:
        now = time.monotonic()
        if now - self._users_seen_s > _USERS_S:
            self._users_seen_s, self._users = now, detached_users(mount_id)
        return self._users


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """``requests`` returns the requests of the kernel that wait; ``log`` is the path of
    the daemon's log."""

    settings: MountSettings
    source_calls: SourceCalls
    monitor: TierMonitor
    metrics: Metrics
    requests: Callable[[], Requests]
    log: str

    def problems(self) -> Iterator[Problem]:
        yield from self._of_source()
        yield from self._of_requests()
        yield from self._of_closed_files()

    def _of_source(self) -> Iterator[Problem]:
        trouble = self.source_calls.trouble()
        if trouble is None:
            return
        if trouble.hangs:
            yield Problem(
                "source-hangs",
                f"the source {self.settings.source} {trouble.what}; reads that need it wait",
                trouble.since_ns,
                f"check whether its file system answers: `timeout 5 stat {self.settings.source}`;"
                " resident files are served, and reads of other files continue when it answers",
            )
        else:
            yield Problem(
                "source-errors",
                f"the source {self.settings.source} answers with errors: {trouble.what}",
                trouble.since_ns,
                f"check it as the daemon's user: `ls {self.settings.source}`, and check its client:"
                " `dmesg`; resident files are served, and other files again when it answers",
            )

    def _of_closed_files(self) -> Iterator[Problem]:
        closed = len(self.metrics.closed_files)
        # An unprivileged daemon reads what its user may read: a refusal is then no problem.
        is_expected = self.settings.source_identity == "caller" or not can_act_as_others()
        if not closed or is_expected:
            return
        words = counted(closed, "file", "files")
        yield Problem(
            "source-closed",
            f"the source does not let the daemon read {words}, though the daemon runs as root",
            remedy="the source refuses root (root squash): set `source_identity: caller`, and files"
            " are opened there with the rights of the process that reads",
        )

    def _of_requests(self) -> Iterator[Problem]:
        oldest_s = self.requests().oldest_s
        trouble = self.source_calls.trouble()
        explained = (trouble is not None and trouble.hangs) or any(
            outage.slow for outage in self.monitor.out_of_service().values()
        )
        if oldest_s > _ANSWERED_S and not explained:
            yield Problem(
                "requests-wait",
                f"a request has waited {oldest_s:.0f} s for an answer, though neither the source"
                " nor a tier seems to hang",
                time.time_ns() - int(oldest_s * 1e9),
                f"find the process that waits: `ps -eo pid,stat,wchan,args | grep ' D'`, and read"
                f" {self.log}; if it persists, report it and mount {self.settings.mountpoint}"
                " again",
            )


@dataclass(frozen=True, slots=True)
class PackCheck:
    """The chunks and large files of a pack at ``source``."""

    damage: Damage
    source: Path

    def problems(self) -> Iterator[Problem]:
        found = self.damage.files()
        if not found:
            return
        files = counted(sum(each.entries for each in found), "file", "files")
        shown = ", ".join(f"{each.name} {each.what}" for each in found[:_SHOWN_DAMAGE])
        yield Problem(
            "pack-damaged",
            f"{files} of the pack cannot be read (EIO), or get no copy if they are large: {shown}"
            + (", ..." if found[_SHOWN_DAMAGE:] else ""),
            found[0].since_ns,
            f"put intact files of the same pack in their place: `monarch pack verify {self.source}`"
            " lists all damage; all other files are served, and these when they are intact",
        )


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """The tiers, and the copies there."""

    monitor: TierMonitor
    residency: Residency
    metrics: Metrics
    mountpoint: Path
    _damaged: Spell = field(default_factory=lambda: Spell(_DAMAGED_S), init=False)

    def problems(self) -> Iterator[Problem]:
        for tier in self.monitor.tiers.values():
            yield from self._of_tier(tier)
        spell, count = self._damaged, sum(self.metrics.errors[kind] for kind in _DAMAGE)
        if spell.goes_on(count, now_s=time.monotonic(), wall_ns=time.time_ns()):
            words = counted(spell.number, "copy was", "copies were")
            yield Problem(
                "copies-damaged",
                f"{words} damaged and removed; the source served the reads",
                spell.since_ns,
                "check the disk that the log names: `smartctl -a`, `dmesg`; then run"
                f" `monarch fsck {self.mountpoint}`",
            )
        if waiting := self.residency.unverified_files():
            words = counted(waiting, "copy has", "copies have")
            yield Problem(
                "copies-unverified",
                f"the last daemon did not end cleanly: {words} not been verified yet",
                remedy="nothing to do: each is compared with its digest before its first use",
            )

    def _of_tier(self, tier: Tier) -> Iterator[Problem]:
        outage = self.monitor.out_of_service().get(tier.number)
        if outage is None:
            return
        since_ns, where = outage.since_ns, os.fspath(tier.path)
        if outage.full:
            # The disk is full, not the capacity: a tier that is full of copies is in service.
            others = ", ".join(self.monitor.others(tier.number))
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
        elif outage.state:
            yield Problem(
                "tier-out",
                f"tier {tier.name} stores no copies: {outage.why}",
                since_ns,
                f"free space or repair the disk of the state directory: `df {outage.state}`,"
                " `dmesg`; its copies are served, and it stores copies again by itself",
            )
        else:
            yield Problem(
                "tier-out",
                f"tier {tier.name} is out of service: {outage.why}",
                since_ns,
                f"repair {where} (`ls -ld {where}`, `findmnt -T {where}`, `dmesg`); reads are"
                " served from lower tiers or the source, and the tier returns by itself",
            )


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """The pinned files."""

    rules: Rules
    ledger: Ledger

    def problems(self) -> Iterator[Problem]:
        if excess := self.rules.excess(self.ledger):
            yield Problem(
                "pins-too-large",
                f"{format_bytes(excess)} of pinned files do not fit into the tiers",
                remedy="pin fewer files (`rules` of the mount), or give the tiers more capacity;"
                " readers get the rest from the source",
            )


@dataclass(frozen=True, slots=True)
class PeersCheck:
    """The other nodes of the job. ``report`` returns None without them."""

    report: Callable[[], PeersReport | None]

    def problems(self) -> Iterator[Problem]:
        report = self.report()
        if report is None:
            return
        out = [f"{peer.name} ({peer.state})" for peer in report.peers if peer.out]
        if report.out:
            named = ", ".join(out[:_SHOWN_NODES]) + (", ..." if report.out > _SHOWN_NODES else "")
            others = counted(report.members - 1, "other node", "other nodes")
            do_not = "does not share its" if report.out == 1 else "do not share their"
            has_other_set = any(peer.out and peer.state == "other-set" for peer in report.peers)
            yield Problem(
                "peers-out",
                f"{report.out:,} of {others} {do_not} copies: {named}",
                remedy="their files are read from the source, and kept by the next node; "
                + (
                    "mount all nodes again with one snapshot (`--snapshot FILE`): the source may"
                    " have changed since some of them were mounted"
                    if has_other_set
                    else "docs/nodes.md has the remedy for each state"
                ),
            )
        if not report.address and not report.is_starting:
            yield Problem(
                "peers-engine",
                "nginx or Caddy, which serves copies to the other nodes, does not run",
                remedy="see the log for the reason; it is started again and again, and the other"
                " nodes read the source meanwhile",
            )


@dataclass(frozen=True, slots=True)
class SnapshotCheck:
    """``put_off``: why the snapshot is not the requested one, as long as ``drain`` has data that is
    not at the source; empty if it is the requested one."""

    watch: FreshnessWatch
    metrics: Metrics
    mountpoint: Path
    put_off: str
    drain: Drain | None

    def problems(self) -> Iterator[Problem]:
        if self.put_off:
            yield Problem(
                "snapshot-behind",
                self._behind(),
                remedy=f"wait with `monarch ckpt wait {self.mountpoint}`, `monarch umount"
                f" {self.mountpoint}`, then mount again; nothing is lost",
            )
        refresh = f"`monarch umount {self.mountpoint}` and mount again with --refresh"
        if changes := self.metrics.changes:
            yield Problem(
                "files-changed",
                f"{counted(changes, 'file', 'files')} changed at the source since the snapshot",
                remedy=f"readers get the current version of each; {refresh} ends this",
            )
        if changes := self.watch.changed_directories:
            words = counted(changes, "directory", "directories")
            yield Problem(
                "snapshot-stale",
                f"{words} changed at the source since the snapshot: new files there are not shown",
                remedy=f"{refresh} to see it",
            )

    def _behind(self) -> str:
        if self.drain is not None and self.drain.queue.last_seq:
            return self.put_off
        return (
            "the names are those of the snapshot of the last mount; the source now has all changes"
            " that follow it: mount again"
        )


class ProcessCheck:
    """``clock`` is monotonic; /proc and /sys are below ``root``."""

    def __init__(
        self,
        logbook: Logbook,
        *,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        self._logbook = logbook
        self._clock = clock
        self._root = root
        self._internal = Spell(_INTERNAL_S)
        # The result of the last check of the memory, and its time.
        self._memory: Sequence[Problem] = ()
        self._memory_seen_s = -math.inf

    def problems(self) -> Iterator[Problem]:
        spell, path = self._internal, self._logbook.path
        if spell.goes_on(self._logbook.exceptions, now_s=self._clock(), wall_ns=time.time_ns()):
            times = counted(spell.number, "time", "times")
            yield Problem(
                "internal-error",
                f"internal error, {times}; the calls concerned failed with EIO",
                spell.since_ns,
                f"this is a bug, please report it with the traceback in {path}; the mount"
                " continues",
            )
        trouble = self._logbook.trouble()
        if trouble is not None:
            yield Problem(
                "log-unwritable",
                f"the log {path} cannot be written: {trouble.what}",
                trouble.since_ns,
                f"free space or repair the disk: `df {path}`; reads are served",
            )
        yield from self._of_memory()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and _descriptors() > limit * _SCARCE_SHARE:
            yield Problem(
                "descriptors-scarce",
                f"more than {_SCARCE_SHARE:.0%} of {limit} file descriptors are in use",
                remedy=f"as root `prlimit --pid {os.getpid()} --nofile=1048576` raises the limit"
                " now; LimitNOFILE= of the unit, or limits.conf, for the next mount",
            )

    def _of_memory(self) -> Sequence[Problem]:
        now = self._clock()
        if now - self._memory_seen_s > _MEMORY_S:
            what = self._full_group() or self._full_machine()
            remedy = (
                "the kernel may kill the daemon, then reads fail: end processes that use memory,"
                " raise the limit, or give a tier in memory less capacity"
            )
            self._memory_seen_s = now
            self._memory = [Problem("memory-scarce", what, 0, remedy)] if what else ()
        return self._memory

    def _full_machine(self) -> str:
        """A sentence about the machine if it is short of memory, or empty."""
        total, available = machine_memory(self._root)
        if total and available < min(total * _LEAST_AVAILABLE_SHARE, _LEAST_AVAILABLE):
            shown = f"{format_bytes(available)} of {format_bytes(total)} are available"
            return f"the machine is short of memory: {shown}"
        return ""

    def _full_group(self) -> str:
        """A sentence about a control group that has nearly used up its memory, or empty."""
        for directory, limit in memory_groups(self._root):
            pinned = 0
            with suppress(OSError):
                text = (directory / "memory.stat").read_text()
                pinned = sum(map(int, re.findall(_PINNED, text, re.MULTILINE)))
            if limit and pinned > limit * _SCARCE_SHARE:
                shown = f"{format_bytes(pinned)} of {format_bytes(limit)}"
                return f"the control group {directory} is short of memory: {shown} are in use"
        return ""


def _descriptors() -> int:
    """The number of open descriptors; the limit if none is free for the listing."""
    try:
        # Linux 6.2 and later report the number as st_size; listing a million takes a second.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return 0
