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
    if not mount.peers.members:
        return
    name = f"peers of {mount.name}"
    try:
        found = membership(mount.peers, environ)
    except UsageError as error:
        yield Check(name, "fail", str(error.args[0]), error.hint or "correct `peers`")
        return
    if found is None:
        yield Check(name, "ok", "this node is the only member: nothing listens")
        return
    members = counted(len(found.members), "member", "members")
    own = f"{members}, this one is {found.members[found.own]} at {found.address}"
    free = [port for port in found.own_ports if is_free(found.address, port)]
    if not free:
        yield Check(
            name,
            "warn",
            f"{own}: none of its ports {found.own_ports} is free",
            "end the programs there, or set peers.port; a running mount of the job has one of them",
        )
        return
    yield Check(name, "ok", f"{own} port {free[0]}, served by {found.engine}")
