"""Which way reads take on this machine: what was configured, or the best that can be had here.

The rules follow a measurement. Where the files are small and fit into memory with their copies,
most of a read is its open, and a kernel that asks for none is quickest. Elsewhere most of it is
moving bytes, and that is nobody's work with passthrough.
"""

from __future__ import annotations

import errno
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from monarch.credentials import can_act_as_others
from monarch.errors import FuseError, UsageError
from monarch.fuse import datapath
from monarch.fuse.datapath import DatapathState
from monarch.namespace.schema import SnapshotSummary
from monarch.report import Mode
from monarch.settings import MountSettings
from monarch.text import counted
from monarch.units import MiB, format_bytes

# Below this mean size an open costs more than the read that follows it.
SMALL_FILE_BYTES = MiB
# In memory a file may be twice: as the mount's pages and as those of the tier below.
_COPIES_IN_MEMORY = 2

_CAP_SYS_ADMIN = 21
# With these a thread of root takes the identity of a user.
_OF_IDENTITY = {"CAP_SETGID": 6, "CAP_SETUID": 7}
# With these it gives what was written the owner, the mode and the times that it has on the mount.
_OF_OTHERS = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4}
_PASSTHROUGH_KERNEL = (6, 9)
# Their listings never expired once cached; 6.13 has the correction.
_STUCK_LISTINGS = ((6, 9), (6, 13))

NOT_BUILT = "the native datapath is not built"
BUILD_IT = "install gcc and the headers of Python, then install Monarch again"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a machine and this process on it can do. ``release`` is the kernel's, in full.

    ``lacking``: capabilities that root acts for other users with, and this process of root has not.
    """

    built: bool
    release: str
    may_pass_through: bool
    memory_bytes: int
    lacking: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Abilities:
        held = _effective_capabilities(Path("/proc/self/status").read_text())
        wanted = {**_OF_IDENTITY, **_OF_OTHERS} if can_act_as_others() else {}
        return cls(
            built=datapath.built(),
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


@dataclass(frozen=True, slots=True)
class Choice:
    """How a mount is served. ``why`` is a short sentence for the administrator.

    ``open`` is "none" when the kernel is told to ask for no open at all. ``cache_listings``:
    whether the kernel may keep the listings of directories.
    """

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
    """The way reads take; ``capacity`` is what all tiers may take, in bytes.

    ``holds_written``: a tier has files that were written through an earlier mount. Raises FuseError
    for what cannot be had on this machine, UsageError for ``open: none`` where opens must be seen.
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
    configured = f"the configuration says datapath: {settings.datapath}"
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
    """The choice, corrected by what the kernel has agreed to."""
    way, opens, why = choice.datapath, choice.open, choice.why
    if way == "passthrough" and state.serving and not state.passthrough:
        way, why = "relay", "the kernel does not offer passthrough"
    elif way == "passthrough" and state.refusal:
        name = errno.errorcode.get(state.refusal, str(state.refusal))
        why += f"; the kernel refuses a tier's file system ({name}), so its files are relayed"
    if opens == "none" and state.serving and not state.no_open:
        opens, why = "open", "the kernel must be asked for opens"
    return Mode(way, opens, why)


def check_possible(settings: MountSettings, abilities: Abilities) -> None:
    """FuseError for ``datapath: passthrough`` where there is none, and for ``source_identity:
    caller`` and for writing of a daemon that cannot act as others."""
    if settings.source_identity == "caller" and not can_act_as_others():
        raise FuseError(
            "source_identity: caller is not possible: only root acts with the rights of others",
            hint="mount as root, or leave it out: the files are opened as the user who mounts",
        )
    lacking = abilities.lacking & _OF_IDENTITY.keys()
    if settings.source_identity == "caller" and lacking:
        raise FuseError(
            f"source_identity: caller is not possible: root is here without {_listed(lacking)}",
            hint="let the container or the unit have what is missing, or leave it out",
        )
    if settings.absorbs:
        check_may_drain(abilities)
    if settings.datapath == "passthrough" and (why := without_passthrough(abilities)):
        raise FuseError(
            f"datapath: passthrough is not possible: {why}",
            hint="set datapath: auto for the best there is here",
        )


def check_may_drain(abilities: Abilities) -> None:
    """FuseError for a daemon of root that would bring files home with wrong owners or modes."""
    if abilities.lacking:
        raise FuseError(
            f"draining is not possible: root is here without {_listed(abilities.lacking)}, so what"
            " users wrote would not come to the source as theirs",
            hint="let the container or the unit have what is missing, or mount as an ordinary user",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def without_passthrough(abilities: Abilities) -> str:
    """Why the kernel cannot read copies by itself here; empty if it can."""
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
    """Whether the kernel is told to ask for no open, and why or why not."""
    if settings.open != "auto":
        return settings.open == "none", f"the configuration says open: {settings.open}"
    if settings.verify == "open":
        return False, "verify: open must see every open"
    if settings.absorbs:
        return False, "write-back is enabled, so opens must be tracked"
    if holds_written:
        return False, "opens of files that were written through an earlier mount must be seen"
    if settings.source_identity == "caller":
        return False, "source_identity: caller needs to know the opening process"
    if settings.snapshot.ttl_s is not None:
        return False, f"snapshot.freshness: {settings.snapshot.freshness} needs to see opens"
    if summary.unreadable:
        # Their sizes are not known, and a kernel that asks for no open takes them for empty.
        return False, f"{counted(summary.unreadable, 'entry', 'entries')} could not be read"
    mean = summary.bytes_total / summary.files if summary.files else 0
    size = f"mean file size {format_bytes(mean)}"
    if mean >= SMALL_FILE_BYTES:
        return False, f"{size}: large files"
    total = format_bytes(summary.bytes_total)
    if summary.bytes_total > capacity:
        # What has no copy is where a source that changes is noticed, at the next open.
        tiers = format_bytes(capacity)
        return False, f"the data set, {total}, does not fit into the tiers, {tiers}"
    needed = summary.bytes_total * _COPIES_IN_MEMORY
    memory = f"{format_bytes(abilities.memory_bytes)} available"
    if needed > abilities.memory_bytes:
        return False, f"{size}; page cache for {format_bytes(needed)} is missing, {memory}"
    return True, f"{size}; needs {format_bytes(needed)} of page cache, {memory}"


def _effective_capabilities(status: str) -> int:
    """The set that is in force, from the text of ``/proc/self/status``."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def memory_bytes(root: Path) -> int:
    """What this process may use: the machine's memory, or less if a control group says so.

    0 if even the first cannot be found out.
    """
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return 0
    found = re.search(r"^MemTotal:\s+(\d+) kB$", text, re.MULTILINE)
    limits = [limit for _, limit in memory_groups(root)]
    return min([int(found[1]) * 1024, *limits]) if found else 0


def memory_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that limit the memory of this process: the directory and the bytes."""
    return _groups(root, "memory", new="memory.max", old="memory.limit_in_bytes")


def pids_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups that limit processes and threads: the directory and how many."""
    return _groups(root, "pids", new="pids.max", old="pids.max")


def _groups(root: Path, controller: str, *, new: str, old: str) -> Iterator[tuple[Path, int]]:
    """Limits in the files ``new`` of version 2 and ``old`` of version 1."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for group in groups:
        number, controllers, path = group.split(":", 2)
        if number == "0":
            tops, name = [mounted, mounted / "unified"], new
        elif controller in controllers.split(","):
            tops, name = [mounted / controller], old
        else:
            continue
        # A limit above ours holds as well. In a container the path may be that of the host, and
        # then what is mounted is our own group: the last one looked at.
        for top in tops:
            for below in (Path(path), *Path(path).parents):
                directory = top / below.relative_to("/")
                try:
                    text = (directory / name).read_text()
                except OSError:
                    continue
                # Without a limit version 2 says "max", version 1 a number beyond all memory.
                if text.strip().isdigit():
                    yield directory, int(text)
