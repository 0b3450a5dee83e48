"""Checks of the other nodes of the job of a mount, which need no daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from monarch.checks.preflight import Check
from monarch.config.settings import MountSettings
from monarch.errors import UsageError
from monarch.peers.engine import is_free
from monarch.peers.membership import membership
from monarch.text import counted


def check_peers(mount: MountSettings, environ: Mapping[str, str]) -> Iterator[Check]:
    """Checks the members, the secret, the engine and the ports of a mount with other nodes."""
    name = f"peers of {mount.name}"
    replicates = bool(mount.writeback.replicate and mount.absorbs)
    if not mount.peers.members:
        if replicates:
            yield _alone(name, "peers.members is not set")
        return
    try:
        found = membership(mount.peers, environ)
    except UsageError as error:
        yield Check(name, "fail", str(error.args[0]), error.hint or "correct `peers`")
        return
    if found is None:
        if replicates:
            yield _alone(name, "this node is the only member")
        else:
            yield Check(name, "ok", "this node is the only member: nothing listens")
        return
    members = counted(len(found.members), "member", "members")
    own = f"{members}, this one is {found.members[found.own]} at {found.address}"
    try:
        free = [port for port in found.own_ports if is_free(found.address, port)]
    except OSError as error:
        yield Check(
            name,
            "fail",
            f"{own}: no program can listen at {error.filename}: {error.strerror}",
            "set peers.address to an address of this node, and peers.port above 1023",
        )
        return
    if not free:
        yield Check(
            name,
            "warn",
            f"{own}: none of its ports {found.own_ports} is free",
            "end the programs there, or set peers.port; a running mount of the job has one of them",
        )
        return
    yield Check(name, "ok", f"{own} port {free[0]}, served by {found.engine}")


def _alone(name: str, why: str) -> Check:
    return Check(
        name,
        "warn",
        f"{why}, so writeback.replicate has no effect: no other node keeps written files",
        "name the other nodes in peers.members, or remove writeback.replicate",
    )
