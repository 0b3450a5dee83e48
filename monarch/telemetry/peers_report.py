"""The part of a status report on the other nodes of the job."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PeerReport:
    """One other node. ``state``: "answers", "not asked", or why it did not answer: "unreachable",
    "slow", "broken", "wrong-secret", "other-set" (another snapshot), "damaged". ``out``: it is left
    out for a while after several failures or late answers, and has not answered since. ``files``,
    small ones, and ``bytes``, also of large files, came from it; ``failed`` requests did not."""

    name: str
    state: str
    out: bool
    files: int
    bytes: int
    failed: int


@dataclass(frozen=True, slots=True)
class ReplicasReport:
    """Written files with ``writeback.replicate``. Of this node's, other nodes keep ``kept`` now;
    ``sent`` counts how often one was sent, and ``not_taken`` how often no node took it. Of other
    nodes' this node keeps ``held_files``, ``held_bytes``, and has ``recovered`` some."""

    kept: int
    sent: int
    not_taken: int
    held_files: int
    held_bytes: int
    recovered: int


@dataclass(frozen=True, slots=True)
class PeersReport:
    """The members of the job. ``own`` is the name of this node, which owns a part ``share`` of the
    files. ``address`` is where its engine answers, empty if it does not; ``starts`` counts its
    starts, and ``is_starting`` until the first one has succeeded or failed. ``out`` counts the
    other nodes that are left out. ``peers`` has at most 256 nodes, those that are left out first.
    ``set`` identifies the snapshot. ``files`` and ``bytes`` came from other nodes; ``failures`` by
    kind are requests that did not bring bytes; ``not_kept`` requests were for files that their
    owner does not keep. ``fetched_*`` were read from the source for other nodes. ``sent_bytes``
    were sent by the engine, with the heads of its answers; None: not known. ``replicas``: None
    without ``writeback.replicate``."""

    members: int
    own: str
    share: float
    address: str
    starts: int
    out: int
    set: str
    files: int
    bytes: int
    not_kept: int
    fetched_files: int
    fetched_bytes: int
    sent_bytes: int | None
    is_starting: bool
    failures: dict[str, int] = field(default_factory=dict)
    peers: list[PeerReport] = field(default_factory=list)
    replicas: ReplicasReport | None = None
