"""The written files of this node that other nodes keep, and those of other nodes that it keeps."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from monarch.config.write_patterns import WritePatterns
from monarch.daemon.recovery import Recovery, can_be_recovered
from monarch.daemon.subsystems import Parts
from monarch.fuse.mountpoint import open_root
from monarch.peers.client import PeerClient
from monarch.peers.held import HeldFiles
from monarch.peers.holding import Holding, member_id
from monarch.telemetry.peers_report import ReplicasReport
from monarch.text import counted
from monarch.writeback.objects import object_path
from monarch.writeback.replication import Replication
from monarch.writeback.setup import WriteBack

log = logging.getLogger(__name__)

# The directory of the written files of other nodes, in the state directory.
HELD = "held"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Other nodes keep files of this one if there is a ``replication``."""

    holding: Holding
    replication: Replication | None
    recovery: Recovery

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        tasks = {"recovery": self.recovery.run}
        if self.replication is not None:
            tasks["replicas"] = self.replication.run
        return tasks

    async def finish(self, within_s: float) -> None:
        """At the end of the mount, after its drain."""
        if self.replication is not None:
            await self.replication.finish()
        await self.recovery.finish(within_s)

    def report(self) -> ReplicasReport:
        held, sent = self.holding.held, self.replication
        return ReplicasReport(
            kept=0 if sent is None else sent.kept,
            sent=0 if sent is None else sent.sent,
            not_taken=0 if sent is None else sent.not_taken,
            held_files=held.files,
            held_bytes=held.nbytes,
            recovered=self.recovery.recovered,
        )


def build_replicas(
    parts: Parts,
    write_back: WriteBack | None,
    clients: Sequence[PeerClient | None],
    own: str,
    patience_s: float,
) -> Replicas | None:
    """Connects write-back with the other nodes; None if they keep no written files and this node
    keeps none of them. Without ``writeback.replicate`` it takes no more."""
    given = parts.settings.writeback
    if write_back is None or not parts.settings.absorbs:
        return None
    held = HeldFiles(parts.state / HELD, given.hold if given.replicate else 0)
    if not (given.replicate or held.files):
        return None
    # Each node begins with the one after it, so that all keep about as much.
    turn = clients.index(None)
    others = [each for each in (*clients[turn:], *clients[:turn]) if each is not None]
    directory, patterns = write_back.place.directory, WritePatterns(parts.settings.absorbs)
    holding = Holding(
        held,
        {member_id(each.name): each for each in others},
        member_id(own),
        patience_s,
        lambda number: object_path(directory, number).relative_to(directory),
        lambda record: can_be_recovered(record, patterns.covers),
    )
    recovery = _recovery(held, parts, write_back, holding)
    if not given.replicate:
        return Replicas(holding, None, recovery)
    front = write_back.front
    replication = Replication(
        front.names,
        front.object_table,
        front.drained,
        write_back.drain,
        write_back.lease,
        holding,
        directory,
        write_back.place.journal.token,
    )
    front.fsyncs.replication = replication
    front.recorder.follow = replication.moved
    front.drained.has_replica = replication.has
    return Replicas(holding, replication, recovery)


def recovery_of_left(parts: Parts, write_back: WriteBack | None) -> Recovery | None:
    """Recovers files of other nodes that earlier mounts with this state directory have kept, for a
    mount without other nodes or ``absorb``; None if there are none, or this mount cannot write
    them."""
    held = HeldFiles(parts.state / HELD, 0)
    if not held.files:
        return None
    is_possible = write_back is not None and bool(parts.settings.absorbs)
    log.warning(
        "%s in %s, which other nodes of a job have written, may not be at the source: %s",
        counted(held.files, "file", "files"),
        parts.state / HELD,
        "they are written to this mount when their nodes are gone"
        if is_possible
        else "mount with `absorb`, and they are written when their nodes are gone",
    )
    return None if write_back is None or not is_possible else _recovery(held, parts, write_back)


def _recovery(
    held: HeldFiles, parts: Parts, write_back: WriteBack, others: Holding | None = None
) -> Recovery:
    return Recovery(
        held,
        partial(open_root, parts.settings.mountpoint),
        parts.settings.writeback.recover_after,
        write_back.is_in_force,
        others,
    )
