"""Which nodes are the members of a job: those of Slurm, of a list, or of a name in the DNS.

Pure: the environment, the names of this node and the answers of the DNS are arguments. Names are in
lower case and sorted, so all nodes have the same members in the same order.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from monarch.errors import UsageError
from monarch.peers.ownership import MOST_MEMBERS
from monarch.text import counted, escape_text

# The variables of the nodes of a job: in the job, and in the prolog and epilog.
_NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NODE_NAME = "SLURMD_NODENAME"
# 16,384 names of the greatest length that the DNS allows are 4 MiB.
_MOST_TEXT = 4 << 20
_MOST_NAME = 253
_MOST_SHOWN = 5

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?")
_RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?", re.ASCII)
# A separator ends an entry, unless it is in brackets.
_ENTRY = re.compile(r"(?:\[[^\[\]]*\]|[^\s,\[\]]|[\[\]])+")


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Where a member listens. ``host`` is a name or an IP address, ``port`` is 0 for the port that
    all members have. The text of an endpoint is the name of the member."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        return f"{host}:{self.port}" if self.port else host


def members_of(
    setting: str | Sequence[str],
    environ: Mapping[str, str],
    resolve: Callable[[str], Iterable[str]],
    *,
    address: str | None = None,
) -> list[Endpoint]:
    """The members that ``setting`` names: ``slurm``, ``dns:NAME``, or a list as for ``listed``.
    ``resolve`` returns the IP addresses of a name; it may raise OSError, which is not caught.
    ``address`` is that of this node, if it is known. Raises UsageError with one line if there are
    none or too many."""
    if not isinstance(setting, str):
        return listed(",".join(setting))
    if setting == "slurm":
        return slurm_members(environ)
    if setting.startswith("dns:"):
        return _addresses(setting[4:], resolve, address)
    return listed(setting)


def slurm_members(environ: Mapping[str, str]) -> list[Endpoint]:
    """The nodes of the Slurm job of this environment. Raises UsageError."""
    for name in _NODE_LISTS:
        if environ.get(name, "(null)") not in ("", "(null)"):
            return _checked([Endpoint(host) for host in expand(environ[name])])
    raise UsageError(
        f"this is no job of Slurm: neither {' nor '.join(_NODE_LISTS)} is set",
        hint="run it in a job, or list the members",
    )


def listed(text: str) -> list[Endpoint]:
    """The members of a list such as ``a,b:8080``, ``n[01-16]`` or ``[fd00::1]:8080``. Raises
    UsageError."""
    endpoints = []
    for entry in _entries(text):
        host, port = _divided(entry)
        endpoints += [Endpoint(_plain(name), port) for name in _hosts(host)]
        _require_few(len(endpoints))
    return _checked(endpoints)


def own_index(
    members: Sequence[Endpoint],
    environ: Mapping[str, str],
    names: Iterable[str],
    *,
    port: int = 0,
) -> int:
    """The index of this node in ``members``: by Slurm's name of the node, else by ``names``, which
    are its host names and addresses. A name also matches its part before the first dot. If several
    members are on this node, ``port`` decides. Raises UsageError if no member, or more than one, is
    this node."""
    slurm = environ.get(_NODE_NAME)
    own = [_plain(name) for name in ([slurm] if slurm else names)]
    found = [index for index, member in enumerate(members) if member.host in own]
    if not found:
        short = {_short(name) for name in own}
        found = [index for index, member in enumerate(members) if _short(member.host) in short]
    chosen = [index for index in found if members[index].port == port]
    if len(found) == 1 or len(chosen) == 1:
        return (chosen or found)[0]
    this = escape_text(" or ".join(own[:_MOST_SHOWN])) or "without a name"
    relation, hint = "is none", "start it on the nodes of the job, or name this node in the list"
    if found:
        relation = "is more than one"
        hint = "list each node once, or set peers.port to the port of this mount in the list"
    raise UsageError(
        f"this node, {this}, {relation} of the members {_some(map(str, members))}", hint=hint
    )


def is_of_one_link(address: _Address) -> bool:
    """Whether an address of IPv6 needs the name of an interface, which each node chooses."""
    return address.version == 6 and (address.is_link_local or address.scope_id is not None)


def require_of_one_node(host: str) -> None:
    """Raises UsageError for an IP address that is not that of one node, at which others reach
    it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    why = ""
    if is_of_one_link(address):
        why = "is an address of one link, which says nothing without an interface"
    elif address.version == 6 and address.ipv4_mapped is not None:
        why = f"is an IPv4 address: write {address.ipv4_mapped}"
    elif address.is_unspecified or address.is_multicast or address == _BROADCAST:
        why = "is not the address of one node"
    if why:
        raise UsageError(f"{host} {why}", hint="use an address at which the nodes reach each other")


def expand(hostlist: str) -> list[str]:
    """The names of a host list of Slurm: ``n[01-03,7],gpu5`` is n01, n02, n03, n7 and gpu5.

    Brackets may stand at several places of a name; the rightmost varies first. The digits of the
    first number of a range are the least width. Raises UsageError for anything else than such a
    list, and for more than ``MOST_MEMBERS`` names."""
    return [_plain(name) for name in expand_as_written(hostlist)]


def expand_as_written(hostlist: str) -> list[str]:
    """The names as ``expand``, with the letters that the list has: Slurm knows no node n01 if its
    configuration names it N01."""
    names: list[str] = []
    for entry in _entries(hostlist):
        names += _hosts(entry)
        _require_few(len(names))
    return names


def _entries(text: str) -> Iterator[str]:
    if len(text) > _MOST_TEXT:
        raise UsageError(f"a list of members with {len(text):,} characters is too long")
    return (match[0] for match in _ENTRY.finditer(text))


def _divided(entry: str) -> tuple[str, int]:
    """An entry of a list as the text of its hosts and a port, 0 for none."""
    host, colon, port = entry.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = entry, "0"
    elif not (port.isascii() and port.isdigit() and len(port) < 6 and 1 <= int(port) <= 65535):
        raise UsageError(f"{_shown(entry)}: the port must be 1 to 65535")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    return host, int(port)


def _hosts(text: str) -> list[str]:
    """The hosts of one entry: an IP address, or a name whose brackets are expanded."""
    if ":" in text:
        try:
            return [ipaddress.IPv6Address(text).compressed]
        except ValueError:
            raise UsageError(f"{_shown(text)} is no host and no IPv6 address") from None
    parts: list[list[str]] = []
    count = 1
    for place, part in enumerate(re.split(r"\[([^\[\]]*)\]", text)):
        parts.append(_numbers(part, text) if place % 2 else [part])
        count *= len(parts[-1])
        _require_few(count)
    hosts = ["".join(each) for each in itertools.product(*parts)]
    for host in map(_plain, hosts):
        if _HOST.fullmatch(host) is None or len(host) > _MOST_NAME:
            raise UsageError(f"{_shown(text)} is no host name, no address and no list of hosts")
    return hosts


def _numbers(text: str, entry: str) -> list[str]:
    """The numbers in a pair of brackets, as text of the right width."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match is not None else 1
        last = int(match[2] or match[1]) if match is not None else 0
        if match is None or first > last:
            raise UsageError(f"{_shown(part)} in {_shown(entry)} is no range such as 01-16")
        _require_few(len(numbers) + last - first + 1)
        numbers += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return numbers


def _addresses(
    name: str, resolve: Callable[[str], Iterable[str]], own: str | None
) -> list[Endpoint]:
    """The members behind a name of the DNS that has one address for each of them, or one of each
    family."""
    host, port = _divided(name)
    if _HOST.fullmatch(_plain(host)) is None or len(host) > _MOST_NAME:
        raise UsageError(f"{_shown(name)} is no name for the DNS", hint="write dns:NAME")
    found = _of_one_family({ipaddress.ip_address(each) for each in resolve(host)}, own)
    if not found:
        raise UsageError(f"the name {host} has no address in the DNS")
    _require_few(len(found))
    return _checked([Endpoint(each.compressed, port) for each in found])


def _of_one_family(addresses: Iterable[_Address], own: str | None) -> list[_Address]:
    """Those of the family of ``own``, if there are any, else of the family with more of them, else
    of IPv4. Where each node reaches all others, they have one family in common, and it is this one:
    a node may have an address of the other one, too, and must not count twice."""
    by_version: dict[int, list[_Address]] = {4: [], 6: []}
    for each in addresses:
        by_version[each.version].append(each)
    common = max(by_version.values(), key=len)
    return (by_version[ipaddress.ip_address(own).version] if own else []) or common


def _checked(endpoints: list[Endpoint]) -> list[Endpoint]:
    """The endpoints in their order, which must be some, and different."""
    if not endpoints:
        raise UsageError("the list of members is empty", hint="write it like n[01-16] or a,b:8080")
    for each in endpoints:
        require_of_one_node(each.host)
    ordered = sorted(endpoints)
    twice = [one for one, next_one in itertools.pairwise(ordered) if one == next_one]
    if twice:
        raise UsageError(f"the member {twice[0]} is listed twice")
    return ordered


def _require_few(count: int) -> None:
    if count > MOST_MEMBERS:
        raise UsageError(f"a list of members may have at most {MOST_MEMBERS:,} hosts")


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _short(host: str) -> str:
    """The name before the first dot; an address stays as it is."""
    is_address = ":" in host or host.replace(".", "").isdigit()
    return host if is_address else host.partition(".")[0]


def _shown(text: str) -> str:
    return repr(escape_text(text if len(text) <= 60 else text[:57] + "..."))


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = len(every) - _MOST_SHOWN
    text = ", ".join(every[:_MOST_SHOWN])
    return f"{text} and {counted(more, 'other', 'others')}" if more > 0 else text
