"""The ports at which the engine of this node may listen: those that no other program has."""

from __future__ import annotations

import errno
import socket


def is_free(address: str, port: int) -> bool:
    """Whether no program listens at a port of this node. Raises OSError, with the address as its
    file, if this process may not listen there: the address may be of another node."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise OSError(error.errno, error.strerror, f"{address} port {port}") from None
    return True


def claim(address: str, port: int) -> socket.socket | None:
    """A socket that keeps this port for the engine of this daemon until it is closed; None if
    another daemon has it. Two Caddys of a user can listen at one port (SO_REUSEPORT), and each
    connection would go to either of them."""
    made = socket.socket(socket.AF_UNIX)
    try:
        # A name without a file, in the network of this process.
        made.bind(f"\0monarch {address} {port}")
    except OSError:
        made.close()
        return None
    return made
