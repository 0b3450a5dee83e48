"""Checks of the other nodes of the job of a mount, which need no daemon."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from monarch.checks.preflight import Check
from monarch.config.settings import MountSettings
from monarch.errors import UsageError
from monarch.peers.engine import Engine
from monarch.peers.hello import MemberKey
from monarch.peers.membership import Membership, membership
from monarch.peers.network import addresses_of_all
from monarch.peers.nginx import Site
from monarch.peers.ports import is_free
from monarch.text import counted

_MOST_DOUBTS = 5


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
    if mount.absorbs and mount.snapshot.file is None and mount.snapshot.freshness != "never":
        yield Check(
            name,
            "warn",
            "each node has its own snapshot: a node that mounts again when written files have"
            " reached the source has another one than the others, and shares nothing with them",
            "build one snapshot for all nodes, and name it with snapshot.file",
        )
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
    if why := _why_not(found, free[0]):
        yield Check(
            name,
            "fail",
            f"{own}: {found.engine} cannot serve the copies: {why}",
            "install nginx or Caddy of this machine anew, or name another one with peers.engine",
        )
        return
    if doubts := list(islice(_doubts(found), _MOST_DOUBTS)):
        yield Check(
            name,
            "warn",
            f"{own}; {'; '.join(doubts)}",
            "list each node once, by a name or an address at which the other nodes reach it",
        )
        return
    yield Check(name, "ok", f"{own} port {free[0]}, served by {found.engine}")


def _why_not(found: Membership, port: int) -> str:
    """Why the engine cannot run with the configuration of a mount; empty if it can."""
    key = MemberKey(str(found.members[found.own]), "0" * 32, found.secret)
    site = Site([Path("tier")], key, found.address, [port], found.certificate, Path("written"))
    try:
        with TemporaryDirectory(prefix="monarch-doctor-") as directory:
            return Engine(found.engine, Path(directory), site).check(port)
    except (OSError, UsageError) as error:
        return str(error)


def _doubts(found: Membership) -> Iterator[str]:
    """Members that cannot be other nodes, or at which no other node reaches this one."""
    own = found.members[found.own]
    if _is_loopback(own.host) and own.host != found.address:
        yield f"at {own.host} each node reaches only itself"
    known = addresses_of_all({member.host for member in found.members})
    at = {(found.address, own.port): "this node"}
    for member in found.members:
        if member is own:
            continue
        if member.host not in known:
            yield f"the name {member.host} is not known"
        for address in known.get(member.host, []):
            is_here = _is_loopback(address) and not _is_loopback(found.address)
            where = (found.address if is_here else address, member.port)
            other = at.setdefault(where, str(member))
            if other != str(member):
                yield f"{member} is {other}, too"
                break


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _alone(name: str, why: str) -> Check:
    return Check(
        name,
        "warn",
        f"{why}, so writeback.replicate has no effect: no other node keeps written files",
        "name the other nodes in peers.members, or remove writeback.replicate",
    )
