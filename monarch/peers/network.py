"""The names and addresses of this node, and those behind names of other nodes."""

from __future__ import annotations

import errno
import ipaddress
import queue
import re
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from monarch.errors import Unanswered, UsageError
from monarch.peers.members import Endpoint, is_of_one_link
from monarch.posix.bounded_calls import call_within
from monarch.posix.workers import Workers

# How long the DNS may take for one name, in seconds.
_RESOLVE_S = 5.0
# The part of that for the addresses of both families; then those of IPv4 are asked for alone.
_BOTH = 0.75
# The names that are resolved at the same time.
_AT_ONCE = 32
_ANY_PORT = 9
_LOCAL_V4 = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")


def addresses_of(name: str, *, within_s: float = _RESOLVE_S) -> list[str]:
    """The IP addresses of a name that other nodes can use, at least one. Raises OSError, also after
    ``within_s`` seconds and for a name that the DNS does not allow."""
    wanted = name, None, socket.AF_UNSPEC, socket.SOCK_STREAM
    try:
        try:
            found = call_within(_BOTH * within_s, socket.getaddrinfo, *wanted)
        except Unanswered:
            # Some servers never answer questions for IPv6, and then this call does not end.
            wanted = name, None, socket.AF_INET, socket.SOCK_STREAM
            found = call_within((1 - _BOTH) * within_s, socket.getaddrinfo, *wanted)
    except Unanswered:
        raise TimeoutError(errno.ETIMEDOUT, f"the DNS does not answer for {name}") from None
    except UnicodeError:
        raise OSError(errno.EINVAL, f"{name} is no name of the DNS") from None
    known = dict.fromkeys(str(entry[4][0]) for entry in found)
    usable = [each for each in known if not is_of_one_link(ipaddress.ip_address(each))]
    if not usable:
        raise OSError(errno.EADDRNOTAVAIL, f"{name} has only addresses of one link")
    return usable


def addresses_of_all(names: Iterable[str]) -> dict[str, list[str]]:
    """The IP addresses of those names that are known. Takes little longer than the slowest one."""
    return {name: found for name, found in _each_resolved(names) if not isinstance(found, OSError)}


def own_names() -> list[str]:
    """The host name and the IP addresses of this node."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names += _LOCAL_V4.findall(Path("/proc/net/fib_trie").read_text())
    with suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            names.append(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])).compressed)
    return list(dict.fromkeys(names))


def listening_address(members: Sequence[Endpoint], own: int) -> str:
    """The address of this node at which the other members reach it: that of its name, or, where the
    name leads to the loopback interface, that of the way to a member that is elsewhere and that
    this node knows. Raises UsageError."""
    host = members[own].host
    try:
        found = addresses_of(host)[0]
        if not ipaddress.ip_address(found).is_loopback:
            return found
        others = [each.host for index, each in enumerate(members) if index != own]
        return _address_towards_any(others) or found
    except OSError as error:
        raise UsageError(
            f"the address of this node, {host}, is not known: {error.strerror or error}",
            hint="set peers.address",
        ) from error


def _address_towards_any(hosts: Sequence[str]) -> str | None:
    """The address of this node on the way to a host that is elsewhere; None if all that are known
    are here. Many names are resolved at the same time: one for which the DNS does not answer must
    not take the time of the others. Raises OSError if none is known."""
    is_known = False
    failure: OSError | None = None
    with closing(_each_resolved(hosts)) as each:
        for _, found in each:
            try:
                if isinstance(found, OSError):
                    raise found
                if not ipaddress.ip_address(found[0]).is_loopback:
                    return _address_towards(found[0])
                is_known = True
            except OSError as error:
                # The member may be down, and not in the DNS yet.
                failure = failure or error
    if failure is not None and not is_known:
        raise failure
    return None


def _each_resolved(names: Iterable[str]) -> Generator[tuple[str, list[str] | OSError], None, None]:
    """The IP addresses of each name, or why they are not known, in the order of the answers. At the
    end there is one TimeoutError for all that got no answer."""
    until_s = time.monotonic() + _RESOLVE_S
    with Workers[tuple[str, list[str] | OSError]](_AT_ONCE, wait_s=0.0) as workers:
        for name in names:
            workers.put(_resolved, name, until_s)
        try:
            while workers.pending:
                yield workers.take(_left_s(until_s))
        except queue.Empty:
            yield "", TimeoutError(errno.ETIMEDOUT, "the DNS does not answer")


def _resolved(name: str, until_s: float) -> tuple[str, list[str] | OSError]:
    try:
        return name, addresses_of(name, within_s=_left_s(until_s))
    except OSError as error:
        return name, error


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - time.monotonic())


def _address_towards(address: str) -> str:
    """The address of this node on the way to another one. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # No packet is sent.
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])
