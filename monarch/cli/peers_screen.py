"""The other nodes of a job in the status of a mount, as text."""

from __future__ import annotations

from collections.abc import Iterator

from monarch.telemetry.peers_report import PeerReport, PeersReport, ReplicasReport
from monarch.telemetry.report import StatusReport
from monarch.text import counted, format_bytes

# Nodes that are named with their state, those in trouble first.
_SHOWN = 8


def peers_fields(report: StatusReport) -> Iterator[tuple[str, str]]:
    """The fields on the other nodes; none without them."""
    peers = report.peers
    if peers is None:
        return
    where = f"answers at {peers.address}" if peers.address else "its engine does not run"
    yield "nodes", f"{peers.members:,}, this one is {peers.own} and {where}"
    yield "places", _places(report, peers)
    yield "from other nodes", _received(peers)
    fetched = counted(peers.fetched_files, "file", "files")
    size = format_bytes(peers.fetched_bytes)
    sent = "an unknown size" if peers.sent_bytes is None else format_bytes(peers.sent_bytes)
    yield "for other nodes", f"{sent} sent; {fetched}, {size} read from the source"
    if peers.replicas is not None:
        yield "written", _written(peers.replicas)
    yield from (("node", _node(peer)) for peer in peers.peers[:_SHOWN])


def _places(report: StatusReport, peers: PeersReport) -> str:
    """The shares of the opens by the place of the bytes."""
    opens = report.opens or 0
    if not opens or report.hit_ratio is None:
        return "not counted"
    remote = min(1.0 - report.hit_ratio, peers.files / opens)
    return (
        f"{report.hit_ratio:.1%} of the opens from this node, {remote:.1%} from other nodes,"
        f" {max(0.0, 1.0 - report.hit_ratio - remote):.1%} from the source"
    )


def _received(peers: PeersReport) -> str:
    words = f"{counted(peers.files, 'file', 'files')}, {format_bytes(peers.bytes)}"
    failed = sum(peers.failures.values())
    if failed:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(peers.failures.items()))
        words += f"; {counted(failed, 'request', 'requests')} failed ({kinds})"
    if peers.not_kept:
        words += f"; {counted(peers.not_kept, 'file', 'files')} not kept there"
    return words


def _written(replicas: ReplicasReport) -> str:
    """Written files that other nodes keep, and those of other nodes."""
    words = f"{counted(replicas.kept, 'file', 'files')} kept by other nodes"
    if replicas.not_taken:
        words += f" ({counted(replicas.not_taken, 'time', 'times')} no node took one)"
    held = counted(replicas.held_files, "file", "files")
    words += f"; {held}, {format_bytes(replicas.held_bytes)} kept for other nodes"
    if replicas.recovered:
        words += f"; {counted(replicas.recovered, 'file', 'files')} recovered"
    return words


def _node(peer: PeerReport) -> str:
    out = ", not asked for a while" if peer.out else ""
    failed = f", {counted(peer.failed, 'request', 'requests')} failed" if peer.failed else ""
    files = counted(peer.files, "file", "files")
    return f"{peer.name}: {peer.state}{out}; {files}, {format_bytes(peer.bytes)}{failed}"
