"""The copies of this node for the other nodes of the job, and those of the other nodes for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import trio

from monarch.daemon.replicas import Replicas, build_replicas
from monarch.daemon.subsystems import Parts, Tiers
from monarch.fuse.datapath import Datapath
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.packmount.source import PackSource
from monarch.peers.answers import Answers, Found, Wanted, digest_of
from monarch.peers.breaker import Breaker
from monarch.peers.client import PeerClient
from monarch.peers.engine import Engine
from monarch.peers.hello import MemberKey
from monarch.peers.membership import Membership
from monarch.peers.nginx import SOCKET, Site
from monarch.peers.ownership import Member, Ownership
from monarch.peers.probes import Probes
from monarch.peers.source import Peers, PeerSource
from monarch.peers.spans import Span, granule_digests, short_digest, span_digest
from monarch.peers.tls import client_context
from monarch.placement.controller import Controller
from monarch.placement.policy import Item
from monarch.placement.residency import SOURCE, Residency
from monarch.telemetry.peers_report import PeerReport, PeersReport
from monarch.tiers.contents import Contents, copy_name, part_name
from monarch.tiers.records import Records
from monarch.types import Attributes, Ino
from monarch.vfs.peer_reads import Granules, PeerReads
from monarch.writeback.setup import WriteBack

_DIRECTORY = "peers"
# The parts of `limits.buffer_max` for bytes that are fetched for other nodes, and for granules that
# came from them.
_SHARE, _HELD = 4, 8
# A node that waits for a fetch gets an answer after this part of its patience.
_EARLY = 0.4
# A node that waits for a fetch reads the source itself after so many times its patience.
_COMING = 100
# How often the requests of the datapath and the bytes of the engine are counted, in seconds.
_COUNT_S = 0.25
# The start of the engine delays the mount at most so long, in seconds.
_READY_S = 10.0
# Other nodes in a report, those in trouble first.
_MOST_REPORTED = 256


@dataclass(eq=False, repr=False)
class SharedFiles:
    """The files of this node for the other nodes. Belongs to the event loop."""

    _peers: Peers
    _snapshot: Snapshot
    _names: Namespace
    _residency: Residency
    _records: Records
    _controller: Controller
    _reads: PeerReads

    def copy_of(self, ino: Ino) -> Found | None:
        if not self._is_shared(ino) or self._residency.tier_of(ino) == SOURCE:
            return None
        record = self._records.get(ino)
        if record is None or record.identity != self._snapshot.attributes(ino).identity:
            return None
        return Found(short_digest(record.digest), place=f"{record.tier}/{copy_name(ino)}")

    def size_to_fetch(self, wanted: Wanted) -> int | None:
        if isinstance(wanted, Span):
            return self._size_of_span(wanted)
        if not self._is_shared(wanted):
            return None
        attributes = self._snapshot.attributes(wanted)
        is_placed = self._controller.is_placed(wanted)
        is_kept = is_placed or self._controller.admits(Item.of(attributes))
        return attributes.size if is_kept else None

    def _size_of_span(self, span: Span) -> int | None:
        if not self.shares_parts(span.ino):
            return None
        size = self._snapshot.attributes(span.ino).size
        # Whether there is a place for it is known when the file is open.
        return span.length(size) if span.is_in(size) else None

    async def fetch(self, wanted: Wanted) -> Found | None:
        if isinstance(wanted, Span):
            return await self._fetch_span(wanted)
        content = await self._reads.whole(wanted)
        return self.copy_of(wanted) if content is None else Found(digest_of(content), content)

    async def _fetch_span(self, span: Span) -> Found | None:
        size = span.length(self._snapshot.attributes(span.ino).size)
        found = await self._reads.span(span.ino, span.offset, size)
        if isinstance(found, Granules):
            place = f"{found.tier}/{part_name(span.ino)}"
            return Found(span_digest(found.digests), place=place)
        if found is None or len(found) != size:
            return None
        return Found(span_digest(granule_digests(found)), found)

    def shares_parts(self, ino: Ino) -> bool:
        """Whether the nodes share the blocks of a file: it is a large one."""
        ranges = self._peers.ranges
        return (
            ranges is not None
            and self.is_as_in_snapshot(ino)
            and ranges.is_shared(ino, self._snapshot.attributes(ino).identity)
        )

    def blocks_of(self, item: Item) -> bytearray | None:
        """The blocks of a file that this node keeps; None if they are not shared."""
        ranges = self._peers.ranges
        if ranges is None or self._peers.is_shared(item.ino, item.size):
            return None
        return ranges.blocks(item.ino) if self.shares_parts(item.ino) else None

    def _is_shared(self, ino: Ino) -> bool:
        """Whether it is a small file that the nodes share."""
        return self.is_as_in_snapshot(ino) and self._peers.is_shared(
            ino, self._snapshot.attributes(ino).size
        )

    def is_as_in_snapshot(self, ino: Ino) -> bool:
        """Whether it is a file, and as in the snapshot, which the other nodes have, too."""
        if not 1 <= ino <= self._snapshot.entries or self._residency.is_changed(ino):
            return False
        names, known = self._names, self._snapshot.attributes(ino)
        return (
            known.is_file
            and known.ino == ino
            and not names.is_gone(ino)
            and not names.is_rewritten(ino)
            and names.stored(ino).identity == known.identity
        )


@dataclass(eq=False, repr=False)
class Sharing:
    """The parts with which this node shares its copies."""

    _peers: Peers
    _answers: Answers
    _engine: Engine
    _site: Site
    _own: str
    _files: SharedFiles
    replicas: Replicas | None = None

    def keeps(self, item: Item) -> bool:
        """Whether this node keeps a whole file: it owns it, fetches it for a node for which it is
        the owner, or the file is not shared."""
        ino = item.ino
        if not self._peers.is_shared(ino, item.size):
            return not self._files.shares_parts(ino)
        return self._answers.is_asked(ino) or self._peers.owns(ino)

    def shares_parts(self, attributes: Attributes) -> bool:
        """Whether the nodes share the blocks of a file."""
        return self._files.shares_parts(attributes.ino)

    def is_kept_elsewhere(self, ino: Ino) -> bool:
        """Whether a small file that the datapath has fetched has another owner."""
        return not (self._answers.is_asked(ino) or self._peers.owns(ino))

    def given(self) -> Iterator[Ino]:
        """The files that came from other nodes, at least in part, unless this node knows that they
        have changed."""
        return filter(self._files.is_as_in_snapshot, self._peers.given())

    def tasks(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "peers": self._answers.run,
            "peers engine": self._engine.run,
            "peers counts": self._count,
            "peers probes": Probes(self._peers.clients).run,
        }
        if self.replicas is not None:
            tasks |= self.replicas.tasks()
        return tasks

    async def _count(self) -> None:
        """Counts what the datapath fetches and the engine sends, until cancelled."""
        while True:
            await trio.sleep(_COUNT_S)
            self._peers.catch_up()
            self._engine.sent_bytes()

    async def started(self) -> None:
        """Waits until the engine answers, or could not be started, for a short time."""
        with trio.move_on_after(_READY_S):
            await self._engine.settled.wait()

    def close(self) -> None:
        self._peers.close()

    def report(self) -> PeersReport:
        peers, engine = self._peers, self._engine
        peers.catch_up()
        others = [
            PeerReport(
                name=client.name,
                state=client.trouble or ("answers" if client.was_asked else "not asked"),
                out=client.breaker.is_failing,
                files=received.files,
                bytes=received.nbytes,
                failed=received.failed,
            )
            for client, received in zip(peers.clients, peers.received, strict=True)
            if client is not None
        ]
        return PeersReport(
            members=len(peers.clients),
            own=self._own,
            share=peers.share,
            address="" if engine.port is None else self._site.shown(engine.port),
            starts=engine.starts,
            out=sum(each.out for each in others),
            set=self._site.key.set_name,
            files=sum(each.files for each in others),
            bytes=sum(each.bytes for each in others),
            not_kept=peers.not_kept,
            fetched_files=self._answers.fetched_files,
            fetched_bytes=self._answers.fetched_bytes,
            sent_bytes=engine.sent_bytes(),
            is_starting=not engine.settled.is_set(),
            failures=dict(peers.failures),
            replicas=None if self.replicas is None else self.replicas.report(),
            peers=sorted(others, key=lambda each: (not each.out, -each.failed))[:_MOST_REPORTED],
        )


def set_name_of(snapshot: Snapshot, pack: PackSource | None) -> str:
    """The name of the data set, 32 hexadecimal digits. Nodes share copies only if it is the same.
    The records of a snapshot of a pack do not depend on the bytes of the files, but its id does."""
    return snapshot.content_digest() if pack is None else snapshot.id


def ownership_of(names: Iterable[str], set_name: str) -> Ownership:
    """The owners of the files and blocks of a data set, by the names of the members."""
    return Ownership([Member(name) for name in names], int(set_name[:16], 16))


def build_sharing(
    parts: Parts,
    membership: Membership,
    tiers: Tiers,
    names: Namespace,
    reads: PeerReads,
    datapath: Datapath | None,
    write_back: WriteBack | None,
) -> Sharing:
    """Connects the mount with the other nodes of its job."""
    settings, snapshot, hierarchy = parts.settings, parts.snapshot, tiers.hierarchy
    limits, patience_s = settings.limits, settings.peers.patience
    set_name = set_name_of(snapshot, parts.pack)
    keys = [MemberKey(str(each), set_name, membership.secret) for each in membership.members]
    own_key = keys[membership.own]
    certificate = membership.certificate
    tls = None if certificate is None else client_context()
    clients = [
        None
        if key is own_key
        else PeerClient(each, membership.ports, key, Breaker(patience_s), tls)
        for each, key in zip(membership.members, keys, strict=True)
    ]
    ownership = ownership_of(map(str, membership.members), set_name)
    peers = Peers(
        snapshot,
        ownership,
        clients,
        largest=limits.inline_max,
        coming_s=_COMING * patience_s,
        replicas=settings.peers.replicate,
        # As the read side: there are no partial copies otherwise.
        most_held=limits.buffer_max // _HELD if settings.foresight.parts else None,
    )
    files = SharedFiles(
        peers, snapshot, names, tiers.residency, hierarchy.records, tiers.controller, reads
    )
    own = str(membership.members[membership.own])
    replicas = build_replicas(parts, write_back, clients, own, _EARLY * patience_s)
    directory = parts.state / _DIRECTORY
    answers = Answers(
        directory / SOCKET,
        files,
        own_key,
        patience_s=_EARLY * patience_s,
        most_held=max(limits.buffer_max // _SHARE, limits.inline_max),
        certificate=certificate,
        holding=None if replicas is None else replicas.holding,
    )
    site = Site(
        tiers=[tier.own / (Contents.PREFIX + snapshot.id) for tier in hierarchy.tiers],
        key=own_key,
        address=membership.address,
        ports=membership.own_ports,
        certificate=certificate,
        written=None if replicas is None or write_back is None else write_back.place.directory,
    )
    engine = Engine(membership.engine, directory, site)
    sharing = Sharing(peers, answers, engine, site, own, files, replicas)
    tiers.controller.parts.blocks_of = files.blocks_of
    tiers.controller.keeps, tiers.rules.kept_bytes = sharing.keeps, peers.kept_bytes
    tiers.controller.kept_curve = peers.curve()
    tiers.controller.draw(snapshot.curve())
    if isinstance(parts.source, PeerSource):
        parts.source.peers = peers
        # It has no TLS.
        if datapath is not None and tls is None:
            peers.fetch_by(datapath)
    return sharing
