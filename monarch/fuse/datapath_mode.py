"""The datapath of a mount: what this machine and this process can do for it, the configured one or
the fastest that is possible here, and the requests that wait for it.

If the files and their copies fit into memory, the time of an epoch is predicted from their number
and their bytes, for each mode that is possible. Most of the time of a small file is its open, which
the kernel need not send. Most of the time of a large file is moving its bytes, which passthrough
leaves to the kernel.
"""

from __future__ import annotations

import errno
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monarch.config.settings import MountSettings
from monarch.errors import FuseError, UsageError
from monarch.fuse.datapath import Datapath, DatapathState, built
from monarch.namespace.schema import SnapshotSummary
from monarch.posix.cgroups import memory_bytes
from monarch.posix.credentials import can_act_as_others
from monarch.telemetry.report import Mode, Requests
from monarch.text import counted, format_bytes


@dataclass(frozen=True, slots=True)
class _Cost:
    """The time of one reader: of an open and close, in seconds, and of each byte."""

    open_s: float
    byte_s: float

    def epoch_s(self, files: int, nbytes: int) -> float:
        return files * self.open_s + nbytes * self.byte_s


# From docs/benchmarks.md, "A full run", with one reader: the large file from memory gives the time
# of a byte (20,000 MB/s with passthrough, 9,119 with relay), and the files of 110 KB from memory
# give the time of an open (18,000 files/s with opens, 51,000 without). Without opens the bytes take
# the path of relay.
_PASSTHROUGH = _Cost(1 / 18_000 - 110e3 / 20e9, 1 / 20e9)
_RELAY = _Cost(1 / 18_000 - 110e3 / 9.119e9, 1 / 9.119e9)
_WITHOUT_OPENS = _Cost(1 / 51_000 - 110e3 / 9.119e9, 1 / 9.119e9)
# The part of an epoch that `open: none` must save: it holds each file twice in memory, and a reader
# waits longer for the first pass (the rows of dropped files).
_LEAST_SAVED = 0.1
# A file may be cached twice: in pages of the mount and of the tier's file system.
_COPIES_IN_MEMORY = 2
# A file has whole pages, so many files below a page need much more than their bytes.
_PAGE, _PAGE_BITS = 4096, 12

_PASSTHROUGH_KERNEL = (6, 9)

_CAP_SYS_ADMIN = 21
# The capabilities that let a thread of root take the identity of a user.
_IDENTITY_CAPABILITIES = {"CAP_SETGID": 6, "CAP_SETUID": 7}
# The capabilities to set owner, mode and times of written files at the source.
_OF_OTHERS = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4}
# In these versions of Linux cached listings never expire; 6.13 has the correction.
_STUCK_LISTINGS = ((6, 9), (6, 13))

NOT_BUILT = "the native datapath is not built"
BUILD_IT = "install gcc and the headers of Python, then install Monarch again"


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a machine and of this process. ``release`` is the full release of the
    kernel, ``lacking`` the capabilities to act for other users that this process of root does not
    have."""

    built: bool
    release: str
    may_pass_through: bool
    memory_bytes: int
    lacking: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Abilities:
        held = _effective_capabilities(Path("/proc/self/status").read_text())
        wanted = {**_IDENTITY_CAPABILITIES, **_OF_OTHERS} if can_act_as_others() else {}
        return cls(
            built=built(),
            release=platform.release(),
            may_pass_through=bool(held >> _CAP_SYS_ADMIN & 1),
            memory_bytes=memory_bytes(Path("/")),
            lacking=frozenset(name for name, bit in wanted.items() if not held >> bit & 1),
        )

    @property
    def kernel(self) -> tuple[int, int]:
        found = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def cached_listings_expire(self) -> bool:
        first, corrected = _STUCK_LISTINGS
        return not first <= self.kernel < corrected


def _effective_capabilities(status: str) -> int:
    """The effective capabilities, from the text of ``/proc/self/status``."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


@dataclass(frozen=True, slots=True)
class Choice:
    """How a mount is served. ``why`` is a short sentence for the administrator. ``open`` is "none"
    if the kernel sends no opens, ``cache_listings`` whether it may cache listings of
    directories."""

    datapath: str
    open: str
    why: str
    cache_listings: bool

    @property
    def mode(self) -> Mode:
        return Mode(self.datapath, self.open, self.why)


def choose(
    settings: MountSettings,
    summary: SnapshotSummary,
    abilities: Abilities,
    *,
    capacity: int,
    holds_written: bool = False,
) -> Choice:
    """The datapath; ``capacity`` is the sum of the capacities of all tiers, in bytes.

    ``holds_written``: a tier has files written through an earlier mount. Raises FuseError if the
    configuration is not possible on this machine, UsageError if ``open: none`` would miss opens.
    """
    check_possible(settings, abilities)
    if holds_written:
        check_may_drain(abilities)
    if holds_written and settings.open == "none":
        raise UsageError(
            "open: none is not possible: a tier has files that were written through an earlier"
            " mount, and their opens must be seen",
            hint="leave open: none out; it is possible again with the snapshot after the one in"
            " which they are at the source (monarch mount --refresh)",
        )
    way, opens, why = _decided(settings, summary, abilities, capacity, holds_written)
    return Choice(way, opens, why, cache_listings=abilities.cached_listings_expire)


def _decided(
    settings: MountSettings,
    summary: SnapshotSummary,
    abilities: Abilities,
    capacity: int,
    holds_written: bool,
) -> tuple[str, str, str]:
    configured = f"the configuration sets datapath: {settings.datapath}"
    if settings.datapath == "python":
        return "python", "open", configured
    if not abilities.built:
        return "python", "open", f"{NOT_BUILT}: {BUILD_IT}"
    if settings.datapath == "passthrough":
        return "passthrough", "open", configured
    without, why = _without_opens(settings, summary, abilities, capacity, holds_written)
    if without:
        return "relay", "none", why
    if settings.datapath == "relay":
        return "relay", "open", configured
    if missing := without_passthrough(abilities):
        return "relay", "open", missing
    return "passthrough", "open", why


def agreed(choice: Choice, state: DatapathState) -> Mode:
    """The choice, corrected by the answer of the kernel."""
    way, opens, why = choice.datapath, choice.open, choice.why
    if way == "passthrough" and state.serving and not state.passthrough:
        way, why = "relay", "the kernel does not offer passthrough"
    elif way == "passthrough" and state.refusal:
        name = errno.errorcode.get(state.refusal, str(state.refusal))
        why += f"; the kernel refuses a tier's file system ({name}), so its files are relayed"
    if opens == "none" and state.serving and not state.no_open:
        opens, why = "open", "the kernel must send opens"
    return Mode(way, opens, why)


class Serving:
    """``choice`` was made before the mount; ``datapath`` is None without the C extension."""

    def __init__(self, choice: Choice, datapath: Datapath | None) -> None:
        self._choice = choice
        self._datapath = datapath
        # The arrival of each request that Python is answering, the oldest first, in seconds.
        self._arrivals: dict[object, float] = {}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts one request that Python answers."""
        request = object()
        self._arrivals[request] = time.monotonic()
        try:
            yield
        finally:
            del self._arrivals[request]

    def requests(self) -> Requests:
        """The requests without an answer."""
        if self._datapath is not None:
            # These include the requests that were passed on to Python.
            state = self._datapath.state()
            return Requests(state.waiting, state.oldest_request_s)
        oldest_s = next(iter(self._arrivals.values()), None)
        age_s = time.monotonic() - oldest_s if oldest_s is not None else 0.0
        return Requests(len(self._arrivals), age_s)

    def mode(self) -> Mode:
        """How reads are served now: as chosen, unless the kernel refused it."""
        if self._datapath is None:
            return self._choice.mode
        return agreed(self._choice, self._datapath.state())


def check_possible(settings: MountSettings, abilities: Abilities) -> None:
    """Raises FuseError for ``datapath: passthrough`` if it is not available, and for
    ``source_identity: caller`` and for writing if the daemon cannot act as other users."""
    if settings.source_identity == "caller" and not can_act_as_others():
        raise FuseError(
            "source_identity: caller is not possible: only root can act with the rights of other"
            " users",
            hint="mount as root, or leave it out: the files are then opened as the mounting user",
        )
    lacking = abilities.lacking & _IDENTITY_CAPABILITIES.keys()
    if settings.source_identity == "caller" and lacking:
        raise FuseError(
            f"source_identity: caller is not possible: root lacks {_listed(lacking)}",
            hint="grant these to the container or the unit, or leave the setting out",
        )
    if settings.absorbs:
        check_may_drain(abilities)
    if settings.datapath == "passthrough" and (why := without_passthrough(abilities)):
        raise FuseError(
            f"datapath: passthrough is not possible: {why}",
            hint="set datapath: auto for the best that is possible here",
        )


def check_may_drain(abilities: Abilities) -> None:
    """Raises FuseError if a root daemon could not set owners or modes at the source."""
    if abilities.lacking:
        raise FuseError(
            f"draining is not possible: root lacks {_listed(abilities.lacking)}, so written files"
            " would not get their owners and modes at the source",
            hint="grant these to the container or the unit, or mount as an ordinary user",
        )


def _unused_in_pages(summary: SnapshotSummary) -> int:
    """The bytes, about, that files below a page leave unused in their pages. A file whose size has
    n bits has some 3/4 of 2**n bytes."""
    small = ((bits, count) for bits, count in summary.sizes if 0 < bits <= _PAGE_BITS)
    return sum(count * (_PAGE - (3 << bits) // 4) for bits, count in small)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def without_passthrough(abilities: Abilities) -> str:
    """Why passthrough is not possible here; empty if it is."""
    first = ".".join(map(str, _PASSTHROUGH_KERNEL))
    if not abilities.built:
        return f"{NOT_BUILT}: {BUILD_IT}"
    if abilities.kernel < _PASSTHROUGH_KERNEL:
        return f"Linux {abilities.release} has no passthrough, it needs {first}"
    if not abilities.may_pass_through:
        return "passthrough needs root (the capability CAP_SYS_ADMIN)"
    return ""


def _without_opens(
    settings: MountSettings,
    summary: SnapshotSummary,
    abilities: Abilities,
    capacity: int,
    holds_written: bool,
) -> tuple[bool, str]:
    """Whether ``open: none`` is used, and the reason."""
    if settings.open != "auto":
        return settings.open == "none", f"the configuration sets open: {settings.open}"
    if settings.verify == "open":
        return False, "verify: open must see every open"
    if settings.absorbs:
        return False, "write-back is enabled, so opens must be tracked"
    if holds_written:
        return False, "opens of files that were written through an earlier mount must be seen"
    if settings.quotas:
        return False, "quotas need to know the opening process"
    if settings.source_identity == "caller":
        return False, "source_identity: caller needs to know the opening process"
    if settings.snapshot.ttl_s is not None:
        return False, f"snapshot.freshness: {settings.snapshot.freshness} must see opens"
    if summary.unreadable:
        # Their sizes are unknown, and without opens the kernel would take them for empty.
        return False, f"{counted(summary.unreadable, 'entry', 'entries')} could not be read"
    mean = summary.bytes_total / summary.files if summary.files else 0
    size = f"mean file size {format_bytes(mean)}"
    passes = settings.datapath != "relay" and not without_passthrough(abilities)
    name, cost = ("passthrough", _PASSTHROUGH) if passes else ("relay", _RELAY)
    opening_s = cost.epoch_s(summary.files, summary.bytes_total)
    without_s = _WITHOUT_OPENS.epoch_s(summary.files, summary.bytes_total)
    epoch = (
        f"an epoch from memory takes about {_time(without_s)} without opens and"
        f" {_time(opening_s)} with {name}"
    )
    if without_s > (1 - _LEAST_SAVED) * opening_s:
        return False, f"{size}: {epoch}"
    total = format_bytes(summary.bytes_total)
    if summary.bytes_total > capacity:
        # A changed source is noticed at the next open of a file without a copy.
        tiers = format_bytes(capacity)
        return False, f"the data set, {total}, does not fit into the tiers, {tiers}"
    needed = (summary.bytes_total + _unused_in_pages(summary)) * _COPIES_IN_MEMORY
    memory = f"{format_bytes(abilities.memory_bytes)} available"
    if needed > abilities.memory_bytes:
        return False, f"{size}; page cache for {format_bytes(needed)} is missing, {memory}"
    return True, f"{size}: {epoch}; needs {format_bytes(needed)} of page cache, {memory}"
