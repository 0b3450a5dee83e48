"""The settings of a mount as typed values: every key, its default and what it means.

``conf/monarch.yaml`` lists the same keys; a test holds the two together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from monarch.absorbed import check_pattern
from monarch.text import plain_name
from monarch.units import GiB, MiB, format_bytes, parse_bytes, parse_seconds

# Of a tier's file system when no capacity is given. The other half is left to the job, which was
# given the node's scratch for its own files and must never find it full because of us.
FREE_SHARE = 0.5

# On a file system so small that the default `keep_free` would take most of it, this share instead.
SMALL_KEEP_SHARE = 0.05

# Of the memory that the daemon may use. Under a limit of its control group (MemoryMax of systemd,
# a container, a job) the default of `buffer_max` could be all there is.
BUFFER_SHARE = 1 / 8

# Of the same memory, what names made through the mount may take, and at least so many of them.
NAMES_SHARE = 1 / 8
LEAST_NAMES = 100_000

# Offsets and counters are signed 64-bit numbers everywhere below us.
_LARGEST = 2**63 - 1


def _size(value: object) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("is not a size; write it like 500MB, 800GiB or 2T")


def _duration(value: object) -> float:
    if isinstance(value, str):
        return parse_seconds(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError("is not a duration; write it like 250ms, 30s, 10m or 7d")


def _count(value: object) -> object:
    # pydantic takes `yes` for 1, and YAML reads many a word as a truth value.
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def expand(text: str) -> Path:
    """A path as written in a file: ``~`` and ``$NAME`` expanded. ValueError for an unset name."""
    expanded = os.path.expandvars(os.path.expanduser(text))
    unset = re.search(r"\$(\w+|\{[^}]*\})", expanded)
    if unset is not None and unset[0] in text:
        raise ValueError(f"{unset[0]} is not set in the environment; set it or write the path out")
    if text.startswith("~") and expanded.startswith("~"):
        raise ValueError(f"{text.split('/', 1)[0]} has no home directory; write the path out")
    return Path(expanded)


def _path(value: object) -> Path:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty; give a path")
        value = expand(value)
    if not isinstance(value, Path):
        raise ValueError("must be a path")
    if "\0" in str(value):
        raise ValueError("holds a NUL byte; no path can")
    if not value.is_absolute():
        raise ValueError(f"{str(value)!r} is relative; write the path from / on")
    return value


def _freshness(value: str) -> str:
    if value in ("mount", "never"):
        return value
    kind, _, duration = value.partition(":")
    if kind != "ttl":
        raise ValueError(f"{value!r} is not known; use mount, never or ttl:DURATION like ttl:10m")
    if parse_seconds(duration) <= 0:
        raise ValueError("a ttl must be longer than 0; write it like ttl:10m")
    return value


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT; write it like localhost:9464")
    return value


def _pattern(value: str) -> str:
    check_pattern(value)
    return value


Size = Annotated[int, BeforeValidator(_size), Field(ge=0, le=_LARGEST)]
# Beyond a year somebody means "for ever".
Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=366 * 86400)]
CommitInterval = Annotated[float, BeforeValidator(_duration), Field(ge=0, le=300)]
PositiveSize = Annotated[int, BeforeValidator(_size), Field(ge=1, le=_LARGEST)]
# A thread each; beyond this it is a slip of the keyboard.
Count = Annotated[int, BeforeValidator(_count), Field(ge=1, le=4096)]
NameCount = Annotated[int, BeforeValidator(_count), Field(ge=1, le=2**40)]
AbsolutePath = Annotated[Path, BeforeValidator(_path)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


# --- Settings -------------------------------------------------------------------------------------


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _tier_name(fields: dict[str, Any]) -> str:
    path = fields.get("path")
    return plain_name(path) if isinstance(path, Path) else "tier"


class TierSettings(Section):
    path: AbsolutePath = Field(
        description="Directory of the tier, created if missing. Required. One daemon uses it."
    )
    name: str = Field(
        default_factory=_tier_name,
        pattern=_NAME,
        description="Name in messages and metrics. Default: the last component of the path.",
    )
    capacity: PositiveSize | None = Field(
        default=None,
        description="Bytes that copies may take, like 800GiB. null: half of what is free there.",
    )
    keep_free: Size = Field(
        default=GiB,
        description="Bytes of the tier's file system which copies never use. If not set, at most"
        " 5 % of that file system.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return parse_tier(value) if isinstance(value, str) else value

    def capacity_within(self, free: int, *, held: int = 0) -> int:
        """Bytes for copies: as set, else a share of ``free`` and of what the tier already holds."""
        return int((free + held) * FREE_SHARE) if self.capacity is None else self.capacity

    def keep_free_within(self, total: int) -> int:
        """``keep_free`` on a file system of ``total`` bytes: a default never takes a small one."""
        if "keep_free" in self.model_fields_set:
            return self.keep_free
        return min(self.keep_free, int(total * SMALL_KEEP_SHARE))


class SnapshotSettings(Section):
    file: AbsolutePath | None = Field(
        default=None,
        description="Snapshot of the names. null: in the state directory, built at first mount.",
    )
    jobs: Count = Field(
        default=32, description="Directories scanned at the same time while building."
    )
    freshness: Annotated[str, AfterValidator(_freshness)] = Field(
        default="mount",
        description="When to look for changes at the source: mount (at each mount), never, or"
        " ttl:DURATION like ttl:10m (at mount, and again whenever it is that old).",
    )
    one_file_system: bool = Field(
        default=False,
        description="Leave out directories that are other file systems at the source.",
    )

    @property
    def ttl_s(self) -> float | None:
        """Seconds of ``freshness: ttl:...``; None for ``mount`` and ``never``."""
        kind, _, duration = self.freshness.partition(":")
        return parse_seconds(duration) if kind == "ttl" else None


class PlacementSettings(Section):
    policy: Literal["no_evict", "first_come", "lru"] = Field(
        default="no_evict",
        description="Which files are kept when not all fit: no_evict (a fixed share, best for"
        " shuffled epochs), first_come, or lru (least recently used leaves).",
    )


class LimitSettings(Section):
    copy_workers: Count = Field(
        default=4, description="Files copied into each tier at the same time."
    )
    source_concurrency: Count = Field(default=128, description="Calls to the source in flight.")
    source_timeout: Duration | None = Field(
        default=None,
        description="How long an open or a read waits for a source that hangs before it fails with"
        " ETIMEDOUT, like 2m. null: as long as the source does, as without Monarch.",
    )
    source_bandwidth: Size = Field(
        default=0,
        description="Bytes per second that copies read from the source; 0: no limit. Readers are"
        " never held back.",
    )
    scrub_bandwidth: Size = Field(
        default=16 * MiB,
        description="Bytes per second of the tiers' disks that go into reading all copies again and"
        " again, to find those that are damaged; 0: they are not read.",
    )
    tier_timeout: Duration = Field(
        default=5.0,
        description="How long a tier may take to answer, and longer if it is asked for many files"
        " or MiB at once, before it counts as slow: it is then neither written nor read.",
    )
    tier_probe: Duration = Field(
        default=10.0,
        description="How often tiers are looked after, and one that is out of service is tried: at"
        " first so often, then less and less, down to once a minute.",
    )
    inline_max: Size = Field(
        default=4 * MiB,
        description="Files up to this size are fetched whole when first opened; larger ones are"
        " copied behind the reader.",
    )
    buffer_max: PositiveSize = Field(
        default=256 * MiB,
        description="Memory for files on their way from the source to a tier. If not set, at most"
        " an eighth of the memory that the daemon may use.",
    )

    def within(self, memory: int) -> LimitSettings:
        """These limits where so many bytes of memory may be used; 0: nobody knows."""
        if "buffer_max" in self.model_fields_set or memory <= 0:
            return self
        share = max(self.inline_max, int(memory * BUFFER_SHARE))
        return self.model_copy(update={"buffer_max": min(self.buffer_max, share)})

    @model_validator(mode="after")
    def _buffer_holds_an_inline_file(self) -> LimitSettings:
        if self.buffer_max < self.inline_max:
            raise ValueError(
                f"buffer_max ({format_bytes(self.buffer_max)}) is less than inline_max"
                f" ({format_bytes(self.inline_max)}); raise buffer_max or lower inline_max"
            )
        return self


class MetricsSettings(Section):
    enabled: bool = Field(default=False, description="Serve metrics for Prometheus over HTTP.")
    address: Annotated[str, AfterValidator(_address)] = Field(
        default="localhost:9464", description="HOST:PORT on which they are served."
    )


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged: debug, info, warning or error."
    )
    file: AbsolutePath | None = Field(
        default=None, description="Log file. null: daemon.log in the state directory."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="text, or json: one object a line."
    )


class WritebackSettings(Section):
    fsync: Literal["local", "source"] = Field(
        default="local",
        description="What fsync waits for: local (the bytes are safe on this node's disk) or source"
        " (they are at the source).",
    )
    tier: str | None = Field(
        default=None,
        description="Name of the tier that takes what is written. null: the first that is not"
        " memory.",
    )
    reserve: Size | None = Field(
        default=None,
        description="Bytes of that tier which copies of the source leave to what is written; so"
        " much of what is drained stays there to be read. null: twice the largest file written so"
        " far, and a twentieth of the tier.",
    )
    names_max: NameCount | None = Field(
        default=None,
        description="Files, directories and links that the mount may hold in memory because they"
        " were made or changed through it since the snapshot; 3 KiB of memory each. Those that are"
        " not used are in the state directory and count a 48th. null: an eighth of the memory that"
        " the daemon may use, and at least 100000.",
    )
    bandwidth: Size = Field(
        default=0, description="Bytes per second that are written to the source; 0: no limit."
    )
    workers: Count = Field(
        default=4, description="Files that are written to the source at the same time."
    )
    verify: bool = Field(
        default=True,
        description="Read each file back from the source and compare digests before it gets its"
        " name there.",
    )
    commit: CommitInterval = Field(
        default=5.0,
        description="How often all that was written is synced in the tier, fsynced or not: a crash"
        " of the machine takes what nobody fsynced in that time. At most 5m; 0: only at the end.",
    )
    shared: bool = Field(
        default=False,
        description="Let this mount absorb writes although another mount, on any node, absorbs them"
        " for the same paths. Otherwise the second one is refused.",
    )
    end_timeout: Duration = Field(
        default=60.0,
        description="How long a daemon that is told to end by a signal goes on draining. What is"
        " left stays in the tier, and the next mount goes on.",
    )

    def names_within(self, memory: int, *, each: int) -> int:
        """``names_max`` of ``each`` bytes where so many bytes of memory may be used; 0: unknown."""
        if self.names_max is not None:
            return self.names_max
        return max(LEAST_NAMES, int(memory * NAMES_SHARE) // each)


class MountSettings(Section):
    name: str = Field(pattern=_NAME, description="Name of the mount: its key under `mounts`.")
    source: AbsolutePath = Field(description="Directory to be mounted. Required.")
    mountpoint: AbsolutePath = Field(description="Where it appears. Required.")
    tiers: tuple[TierSettings, ...] = Field(
        default=(),
        max_length=16,
        description="Fastest first. Each is PATH, PATH:SIZE or a mapping as in the example below."
        " Empty: one tier on the roomiest local scratch of the node.",
    )
    state: AbsolutePath | None = Field(
        default=None,
        description="Directory for what outlives a mount. null: one per source in"
        " /var/lib/monarch (root) or ~/.local/state/monarch.",
    )
    snapshot: SnapshotSettings = Field(
        default=SnapshotSettings(),
        description="The names and attributes of the source, kept locally.",
    )
    placement: PlacementSettings = Field(
        default=PlacementSettings(), description="The choice of the files that tiers hold."
    )
    limits: LimitSettings = Field(
        default=LimitSettings(), description="How much of the node and of the source may be used."
    )
    write: Literal["none", "absorb"] = Field(
        default="none",
        description="Whether the mount can be written: none (it is read-only, but for the paths of"
        " `absorb`), or absorb (everything can: a tier takes it and it is drained to the source).",
    )
    absorb: tuple[Annotated[str, AfterValidator(_pattern)], ...] = Field(
        default=(),
        description="Paths that can be written while all others are read-only, relative to the"
        " mount, like ckpt/** or runs/*/logs.",
    )
    writeback: WritebackSettings = Field(
        default=WritebackSettings(),
        description="What is written: what fsync means, and how it comes home to the source.",
    )
    verify: Literal["unclean", "open", "never"] = Field(
        default="unclean",
        description="When a copy is checked against its digest before use: unclean (once, after a"
        " crash or power cut), open (at every first open), or never.",
    )
    datapath: Literal["auto", "passthrough", "relay", "python"] = Field(
        default="auto",
        description="Who reads copies for readers: passthrough (the kernel itself; needs Linux 6.9"
        " and root; a copy that cannot be read is the reader's error), relay (threads in C), python"
        " (the slowest, needs nothing), or auto (the best for these files on this machine).",
    )
    open: Literal["auto", "open", "none"] = Field(
        default="auto",
        description="Whether the kernel tells every open of a file: open, none (best for small"
        " files that fit into memory; not with passthrough, python or verify: open), or auto.",
    )
    source_identity: Literal["daemon", "caller"] = Field(
        default="daemon",
        description="With whose rights files are opened at the source for a reader: daemon, or"
        " caller (of the process that reads; for a source that refuses root, as Lustre and NFS"
        " with root squash do; needs root, not with open: none).",
    )
    allow_other: bool = Field(
        default=False,
        description="Let other users in, as the modes of the files allow. Unless root mounts,"
        " /etc/fuse.conf must say user_allow_other.",
    )
    metrics: MetricsSettings = Field(default=MetricsSettings(), description="What can be measured.")
    log: LogSettings = Field(default=LogSettings(), description="What the daemon writes down.")

    @field_validator(
        "snapshot", "placement", "limits", "writeback", "metrics", "log", mode="before"
    )
    @classmethod
    def _empty_section(cls, value: object) -> object:
        # A section whose every line is commented out.
        return {} if value is None else value

    @field_validator("open", mode="after")
    @classmethod
    def _opens_are_seen_by_who_needs_them(cls, value: str, fields: ValidationInfo) -> str:
        if value == "none":
            datapath = fields.data.get("datapath")
            if datapath in ("passthrough", "python"):
                raise ValueError(
                    f"none and datapath: {datapath} exclude each other; set datapath: relay or"
                    " leave one of them out"
                )
            if fields.data.get("verify") == "open":
                raise ValueError(
                    "none and verify: open exclude each other, for no open would be seen; leave"
                    " one of them out"
                )
            if fields.data.get("absorb") or fields.data.get("write") == "absorb":
                raise ValueError(
                    "none and write-back exclude each other, because opens must be tracked; leave"
                    " one of them out"
                )
        return value

    @field_validator("source_identity", mode="after")
    @classmethod
    def _callers_are_seen(cls, value: str, fields: ValidationInfo) -> str:
        if value == "caller" and fields.data.get("open") == "none":
            raise ValueError(
                "caller and open: none exclude each other: the opening process must be known;"
                " leave one of them out"
            )
        return value

    @property
    def absorbs(self) -> tuple[str, ...]:
        """The patterns of what can be written; empty for a mount that is read-only."""
        return ("**",) if self.write == "absorb" and not self.absorb else self.absorb

    @field_validator("absorb", mode="before")
    @classmethod
    def _one_pattern(cls, value: object) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("tiers", mode="before")
    @classmethod
    def _no_tiers(cls, value: object) -> object:
        return () if value is None else value

    @field_validator("tiers", mode="after")
    @classmethod
    def _unique_names(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        given = [tier.name for tier in tiers if "name" in tier.model_fields_set]
        for name in given:
            if given.count(name) > 1:
                raise ValueError(f"two tiers are named {name!r}; give each its own name")
        # Readers of metrics and of status take "source" for the source.
        taken = {*given, "source"}
        named = []
        for tier in tiers:
            if "name" not in tier.model_fields_set:
                name = next(n for n in _numbered(tier.name) if n not in taken)
                taken.add(name)
                tier = tier.model_copy(update={"name": name})
            named.append(tier)
        return tuple(named)


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in range(2, 1000):
        yield f"{name[:60]}-{number}"


def parse_tier(text: str) -> dict[str, Any]:
    """``PATH[:SIZE]`` as the fields of a tier. A path may hold colons.

    What follows the last colon is the size if it begins like a number; then it must be one, or
    ``/local:10GBB`` would silently become a directory of that name.
    """
    path, colon, size = text.rpartition(":")
    if not colon or not re.match(r"-?[0-9.][^/]*$|$", size):
        return {"path": text}
    if not path:
        raise ValueError(f"{text!r} has no path; write it like /local/scratch:800GiB")
    return {"path": path, "capacity": parse_bytes(size)}
