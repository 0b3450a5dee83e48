"""What the settings of a mount say about the nodes of its job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from monarch.config.settings import PeerSettings
from monarch.errors import UsageError
from monarch.peers.engine import find_engine, is_caddy
from monarch.peers.members import Endpoint, members_of, own_index, require_of_one_node
from monarch.peers.network import addresses_of, listening_address, own_names
from monarch.peers.secret import ports_of, read_secret
from monarch.peers.tls import Certificate


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of the job. This node is the one with the number ``own``, and listens at
    ``address`` and the first free one of ``own_ports``. The others do so at ``ports``, unless their
    endpoint has a port. With ``certificate`` all of them use TLS."""

    members: list[Endpoint]
    own: int
    address: str
    ports: list[int]
    own_ports: list[int]
    engine: Path
    secret: bytes = field(repr=False)
    certificate: Certificate | None = None


def membership(settings: PeerSettings, environ: Mapping[str, str]) -> Membership | None:
    """The members of the job; None if there are none beside this node. Raises UsageError."""
    if not settings.members:
        return None
    if settings.address is not None:
        require_of_one_node(settings.address)
    try:
        members = members_of(settings.members, environ, addresses_of, address=settings.address)
    except OSError as error:
        what = error.strerror or error
        raise UsageError(f"peers.members: {settings.members}: {what}") from error
    hosts = {member.host for member in members}
    names = [settings.address] if settings.address in hosts else own_names()
    own = own_index(members, environ, names, port=settings.port)
    if len(members) == 1:
        return None
    secret = read_secret(settings.secret_file, environ)
    certificate = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificate = Certificate(settings.tls_cert, settings.tls_key)
        certificate.read()
    engine = find_engine(settings.engine)
    if certificate is not None and is_caddy(engine):
        raise UsageError(
            f"peers.tls_cert needs nginx, and {os.fspath(engine)} is Caddy",
            hint="install nginx, or name it with peers.engine",
        )
    port, ports = members[own].port, ports_of(secret, settings.port)
    return Membership(
        members=members,
        own=own,
        address=settings.address or listening_address(members, own),
        ports=ports,
        own_ports=[port] if port else ports,
        engine=engine,
        secret=secret,
        certificate=certificate,
    )
