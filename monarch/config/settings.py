"""The settings of a mount as typed values: every key, its default and its meaning.

``conf/monarch.yaml`` lists the same keys with the same texts; a test compares the two.
"""

from __future__ import annotations

import ipaddress
import re
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from monarch.config.path_pattern import check_pattern
from monarch.config.quotas import MOST_QUOTAS, QuotaSettings
from monarch.config.values import (
    NAME_PATTERN,
    AbsolutePath,
    CommitInterval,
    Count,
    Duration,
    NameCount,
    PositiveSize,
    Section,
    Size,
    whole_number,
)
from monarch.text import GiB, MiB, format_bytes, parse_bytes, parse_seconds, plain_name

# The share of the free space of a tier's file system that copies use if no capacity is given. The
# other half is left for the files of the job.
FREE_SHARE = 0.5

# The largest share of a small file system that the default `keep_free` reserves.
SMALL_KEEP_SHARE = 0.05

# The share of the memory of the daemon for the default of `buffer_max`. A fixed default could
# exceed the limit of its control group (MemoryMax of systemd, a container, a job).
BUFFER_SHARE = 1 / 8

# The share of that memory for names made through the mount, and the least number of names.
NAMES_SHARE = 1 / 8
LEAST_NAMES = 100_000


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


_MOST_MEMBERS_TEXT = 1 << 20
# --- Settings -------------------------------------------------------------------------------------


def _tier_name(fields: dict[str, Any]) -> str:
    path = fields.get("path")
    return plain_name(path) if isinstance(path, Path) else "tier"


class TierSettings(Section):
    path: AbsolutePath
    """Directory of the tier, created if missing. Required. One daemon uses it."""
    name: str = Field(default_factory=_tier_name, pattern=NAME_PATTERN)
    """Name in messages and metrics. Default: the last component of the path."""
    capacity: PositiveSize | None = None
    """Bytes that copies may use, like 800GiB. null: half of the free space there."""
    keep_free: Size = GiB
    """Bytes of the tier's file system that copies leave free. If not set, at most 5 % of that file
    system."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return parse_tier(value) if isinstance(value, str) else value

    def capacity_within(self, free: int, *, held: int = 0) -> int:
        """Bytes for copies: the capacity, else a share of ``free`` and ``held`` bytes."""
        return int((free + held) * FREE_SHARE) if self.capacity is None else self.capacity

    def keep_free_within(self, total: int) -> int:
        """``keep_free`` for a file system of ``total`` bytes; the default is less on small ones."""
        if "keep_free" in self.model_fields_set:
            return self.keep_free
        return min(self.keep_free, int(total * SMALL_KEEP_SHARE))


class SnapshotSettings(Section):
    file: AbsolutePath | None = None
    """Snapshot of the names. null: in the state directory, built at first mount."""
    jobs: Count = 32
    """Directories scanned concurrently while building."""
    freshness: Annotated[str, AfterValidator(_freshness)] = "mount"
    """When to check the source for changes: mount (at each mount), never, or ttl:DURATION like
    ttl:10m (at mount, and again after each such time)."""
    one_file_system: bool = False
    """Leave out mount points of other file systems at the source."""

    @property
    def ttl_s(self) -> float | None:
        """Seconds of ``freshness: ttl:...``; None for ``mount`` and ``never``."""
        kind, _, duration = self.freshness.partition(":")
        return parse_seconds(duration) if kind == "ttl" else None


class PlacementSettings(Section):
    policy: Literal["no_evict", "first_come", "lru"] = "no_evict"
    """Which files are kept if not all fit: no_evict (a fixed share, best for shuffled epochs),
    first_come, or lru (the least recently used is evicted)."""


class RuleSettings(Section):
    match: Annotated[str, AfterValidator(check_pattern)]
    """Pattern of paths, as of `absorb`: relative to the mount, with all paths beneath. Required."""
    pin: bool = False
    """Fetch the files after the mount, and never evict them."""
    admit: Literal["auto", "never"] = "auto"
    """never: the files get no copies, and nothing of them is fetched ahead."""
    tier: str | None = None
    """Name of the only tier that gets copies of the files. null: any tier."""

    @model_validator(mode="after")
    def _does_one_thing(self) -> RuleSettings:
        acts = [
            *(["pin: true"] if self.pin else []),
            *([f"tier: {self.tier}"] if self.tier is not None else []),
        ]
        if self.admit == "never" and acts:
            raise ValueError(
                f"admit: never and {acts[0]} exclude each other; leave one of them out"
            )
        if self.admit == "auto" and not acts:
            raise ValueError(
                f"the rule for {self.match} does nothing; add `pin: true`, `admit: never` or"
                " `tier: NAME`"
            )
        return self


class ForesightSettings(Section):
    announced: bool = True
    """Fetch the next files of an order that a training program has announced."""
    ahead: bool = True
    """Fetch the next files of a directory that is read in an order which was recognised: that of
    the names, every n-th file, or that of the last epoch."""
    fill: bool = True
    """Fetch the remaining files of a directory that is read in random order, when a fifth of them
    was read."""
    frequency: bool = True
    """While some files of a directory are opened again and again, keep copies of those that are
    opened most often, in place of others of the directory."""
    scans: bool = True
    """Remove no copies for a directory that one process reads for the first time, in the order of
    the names, as `cp -r` and `grep -r` do (`placement.policy: lru`)."""
    count_opens: bool = True
    """Count the opens of files with inotify where the kernel does not report them (open: none)."""
    window: bool = True
    """Fetch also small files that no tier has a place for, if their order was announced or
    recognised, into at most a quarter of `limits.buffer_max`. They leave when they are read."""
    parts: bool = True
    """Copy of a file of `limits.range_min` or more only the parts that are read, if it is not read
    from its start. false: such a file is always copied as a whole."""
    belady: bool = True
    """If the next reads of the files are known beyond this epoch, keep the copies that are read
    soonest, and replace one if that brings a hit. Other files are left to `placement.policy`."""


class LimitSettings(Section):
    copy_workers: Count = 4
    """Files copied into each tier concurrently."""
    source_concurrency: Count = 128
    """Concurrent calls to the source."""
    source_timeout: Duration | None = None
    """How long an open or a read waits for a source that hangs before it fails with ETIMEDOUT, like
    2m. null: until the source answers, as without Monarch."""
    range_min: Annotated[Size, Field(ge=16 * MiB)] = 64 * MiB
    """The least size of a file that may be copied in parts, 16MiB or more."""
    source_bandwidth: Size = 0
    """Bytes per second that copies read from the source; 0: no limit. Readers are never delayed."""
    scrub_bandwidth: Size = 16 * MiB
    """Bytes per second of the tiers' disks for reading all copies again and again, to find damaged
    ones; 0: off."""
    tier_timeout: Duration = 5.0
    """How long a tier may take to answer before it counts as slow and is neither written nor read;
    a request for many files or MiB may take longer."""
    tier_probe: Duration = 10.0
    """How often tiers are checked, and a tier out of service is tried: at first this often, then
    less and less, down to once a minute."""
    inline_max: Size = 4 * MiB
    """Files up to this size are fetched as a whole at their first open; larger files are copied
    while they are read."""
    buffer_max: PositiveSize = 256 * MiB
    """Memory for files that are copied from the source to a tier. If not set, at most an eighth of
    the memory that the daemon may use."""

    pack_window: Size = 1024 * MiB
    """Memory for the files of a pack that no tier has a place for and whose order was announced:
    their chunks are read as a whole if their files are opened before this is full. With an order of
    groups of G chunks it must hold G + 1 chunks. If not set, at most an eighth of the memory that
    the daemon may use."""

    def within(self, memory: int) -> LimitSettings:
        """These limits for a process that may use ``memory`` bytes; 0: unknown."""
        if memory <= 0:
            return self
        share = max(self.inline_max, int(memory * BUFFER_SHARE))
        most = {
            "buffer_max": min(self.buffer_max, share),
            "pack_window": min(self.pack_window, share),
        }
        return self.model_copy(
            update={key: most[key] for key in most.keys() - self.model_fields_set}
        )

    @model_validator(mode="after")
    def _buffer_holds_an_inline_file(self) -> LimitSettings:
        if self.buffer_max < self.inline_max:
            raise ValueError(
                f"buffer_max ({format_bytes(self.buffer_max)}) is less than inline_max"
                f" ({format_bytes(self.inline_max)}); raise buffer_max or lower inline_max"
            )
        return self


class MetricsSettings(Section):
    enabled: bool = False
    """Serve metrics for Prometheus over HTTP."""
    address: Annotated[str, AfterValidator(_address)] = "localhost:9464"
    """HOST:PORT at which metrics are served."""


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: debug, info, warning or error."""
    file: AbsolutePath | None = None
    """Log file. null: daemon.log in the state directory."""
    format: Literal["text", "json"] = "text"
    """text, or json: one object a line."""


class WritebackSettings(Section):
    fsync: Literal["local", "source"] = "local"
    """When fsync returns: local (the data is safe on the disk of this node) or source (it is at the
    source)."""
    tier: str | None = None
    """Name of the tier that absorbs writes. null: the first that is not memory."""
    reserve: Size | None = None
    """Bytes of that tier that copies of the source leave to written files; drained files stay there
    to be read within this room. null: twice the largest file written so far, and a twentieth of the
    tier."""
    names_max: NameCount | None = None
    """Files, directories and links made or changed through the mount since the snapshot that it may
    hold in memory; 3 KiB of memory each. Unused ones are in the state directory and count a 48th.
    null: an eighth of the memory that the daemon may use, and at least 100000."""
    bandwidth: Size = 0
    """Bytes per second written to the source; 0: no limit."""
    workers: Count = 4
    """Files written to the source concurrently."""
    verify: bool = True
    """Read each file back from the source and compare digests before it is renamed to its name
    there."""
    commit: CommitInterval = 5.0
    """How often all written data is synced in the tier, fsynced or not: a crash of the machine
    loses at most the unsynced data of that time. At most 5m; 0: only at the end."""
    shared: bool = False
    """Let this mount absorb writes although another mount, on any node, absorbs them for the same
    paths. Otherwise the second mount is refused."""
    replicate: Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=1)] = 0
    """Other nodes of the job (`peers`) that keep each file from its fsync on until the source has
    it: 0 or 1."""
    hold: Size = 16 * GiB
    """With `replicate`: bytes of files of other nodes that this node keeps, in the state
    directory."""
    recover_after: Duration = 60.0
    """With `replicate`: how long the lease of a node at the source is out of force before this node
    writes the files that it keeps of that node."""
    end_timeout: Duration = 60.0
    """How long a daemon that a signal ends continues to drain. Undrained data stays in the tier,
    and the next mount drains it."""

    def names_within(self, memory: int, *, each: int) -> int:
        """``names_max`` for ``each`` bytes a name and ``memory`` usable bytes; 0: unknown."""
        if self.names_max is not None:
            return self.names_max
        return max(LEAST_NAMES, int(memory * NAMES_SHARE) // each)


def _members(value: object) -> object:
    """A list of members as text; another value stays as it is."""
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return "" if value is None else value


class PeerSettings(Section):
    members: Annotated[str, BeforeValidator(_members)] = ""
    """The nodes of the job: slurm (those of the Slurm job), dns:NAME (one for each address of the
    name), or a list like [node1, node2] or node[1-16], each with :PORT if needed. Empty: this node
    shares nothing, and nothing listens."""
    address: str | None = None
    """IP address of this node at which other nodes read its copies, such as that of a fast network.
    null: that of its name in the list."""
    port: Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=65535)] = 0
    """Port for that; the next free one of eight is used. 0: a port that follows from the secret."""
    secret_file: AbsolutePath | None = None
    """File with the secret of the job, 16 bytes or more, which only its owner may read. null: the
    environment variable MONARCH_PEERS_SECRET has it."""
    replicate: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=64)] = 1
    """Nodes that keep each file: with 2 the loss of a node costs no read of the source, and the
    tiers of all nodes together hold half as many files."""
    engine: AbsolutePath | None = None
    """The program nginx, or caddy. null: found in PATH, nginx first."""
    tls_cert: AbsolutePath | None = None
    """File with a certificate of this node, PEM: the nodes encrypt what they send to each other.
    All nodes need one, or none of them. It needs no authority: the secret of the job vouches for
    it."""
    tls_key: AbsolutePath | None = None
    """File with the key of `tls_cert`, PEM without a password, which only its owner may read."""
    patience: Annotated[Duration, Field(le=10)] = 0.05
    """The least time to wait for an answer of another node, and for each MiB of it, before a file
    is read from the source; a node that is slower may get four times its usual time, up to 1s."""

    @field_validator("members", mode="after")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        if len(value) > _MOST_MEMBERS_TEXT or not value.isprintable():
            raise ValueError("is no list of members; write it like [node1, node2]")
        return value.strip()

    @field_validator("address", mode="after")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                return str(ipaddress.ip_address(value))
            except ValueError:
                raise ValueError(f"{value!r} is no IP address") from None
        return None

    @model_validator(mode="after")
    def _has_both(self) -> PeerSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        return self


class MountSettings(Section):
    name: str = Field(pattern=NAME_PATTERN)
    """Name of the mount: its key under `mounts`."""
    source: AbsolutePath
    """Directory to be mounted. Required."""
    mountpoint: AbsolutePath
    """Directory at which the source appears. Required."""
    tiers: tuple[TierSettings, ...] = Field(default=(), max_length=16)
    """Fastest first. Each is PATH, PATH:SIZE or a mapping as in the example below. Empty: one tier
    on the local scratch with the most free space."""
    state: AbsolutePath | None = None
    """Directory for persistent state. null: one per source in /var/lib/monarch (root) or
    ~/.local/state/monarch."""
    snapshot: SnapshotSettings = SnapshotSettings()
    """The names and attributes of the source, kept locally."""
    placement: PlacementSettings = PlacementSettings()
    """The choice of files that the tiers keep."""
    rules: tuple[RuleSettings, ...] = Field(default=(), max_length=64)
    """Rules for the files of certain paths, like [{match: val/**, pin: true}]. They go before
    `placement` and `foresight`; of several rules for a file the first counts. Each has a `match`
    (a pattern as of `absorb`) and one or more of `pin: true` (fetched after the mount, and never
    evicted), `tier: NAME` (copied to this tier only) and `admit: never` (never copied)."""
    foresight: ForesightSettings = ForesightSettings()
    """Fetches of files that no process has opened yet."""
    limits: LimitSettings = LimitSettings()
    """Limits on the use of the node and of the source."""
    peers: PeerSettings = PeerSettings()
    """Other nodes of the job: each file of up to `limits.inline_max`, and each block of a larger
    one, is read from the source by one of them, and the others get its bytes from there
    (docs/nodes.md)."""
    write: Literal["none", "absorb"] = "none"
    """Whether the mount can be written: none (read-only, except for the paths of `absorb`), or
    absorb (everywhere: a tier stores the data, which is drained to the source)."""
    absorb: tuple[Annotated[str, AfterValidator(check_pattern)], ...] = ()
    """Paths that can be written while all others are read-only, relative to the mount, like ckpt/**
    or runs/*/logs."""
    writeback: WritebackSettings = WritebackSettings()
    """Writing: what fsync means, and how written data is drained to the source."""
    verify: Literal["unclean", "open", "never"] = "unclean"
    """When a copy is compared with its digest before use: unclean (once, after a crash or power
    cut), open (at every first open), or never."""
    datapath: Literal["auto", "passthrough", "relay", "python"] = "auto"
    """How copies are read: passthrough (by the kernel itself; needs Linux 6.9 and root; a copy that
    cannot be read gives the reader an error), relay (by threads in C), python (the slowest, needs
    nothing), or auto (the best for these files on this machine)."""
    open: Literal["auto", "open", "none"] = "auto"
    """Whether the kernel reports every open of a file: open, none (best for small files that fit
    into memory; not with passthrough, python or verify: open), or auto."""
    source_identity: Literal["daemon", "caller"] = "daemon"
    """The rights with which files are opened at the source for a reader: daemon, or caller (those
    of the process that reads; for a source that refuses root, as Lustre and NFS with root squash
    do; needs root, not with open: none)."""
    quotas: tuple[QuotaSettings, ...] = Field(default=(), max_length=MOST_QUOTAS)
    """Quotas of jobs that share the mount, like [{user: alice, tier: 30%}, {tier: 70%}]. A process
    belongs to the first that names its `user` or its `cgroup`, or neither; one that none names gets
    no copies. Each may have a `tier` (bytes of copies, or a share of the tiers; a copy that several
    jobs have opened counts for them in equal parts) and a `source_bandwidth` (bytes per second).
    With quotas nothing is fetched ahead (docs/operations.md)."""
    allow_other: bool = False
    """Let other users use the mount, as the modes of the files allow. Unless root mounts,
    /etc/fuse.conf must say user_allow_other."""
    metrics: MetricsSettings = MetricsSettings()
    """The page of metrics."""
    log: LogSettings = LogSettings()
    """The log of the daemon."""

    @field_validator(
        *("snapshot", "placement", "limits", "peers", "writeback", "metrics", "log"), mode="before"
    )
    @classmethod
    def _empty_section(cls, value: object) -> object:
        # A section with all lines commented out is null.
        return {} if value is None else value

    @field_validator("open", mode="after")
    @classmethod
    def _opens_are_seen_if_needed(cls, value: str, fields: ValidationInfo) -> str:
        if value == "none":
            datapath = fields.data.get("datapath")
            if datapath in ("passthrough", "python"):
                raise ValueError(
                    f"none and datapath: {datapath} exclude each other; set datapath: relay or"
                    " leave one of them out"
                )
            if fields.data.get("verify") == "open":
                raise ValueError(
                    "none and verify: open exclude each other, because no open would be seen; leave"
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
        peers = fields.data.get("peers")
        if value == "caller" and peers is not None and peers.members:
            raise ValueError(
                "caller and peers.members exclude each other: other nodes do not know the rights of"
                " the process that reads; leave one of them out"
            )
        pins = any(rule.pin for rule in fields.data.get("rules", ()))
        if value == "caller" and pins:
            raise ValueError(
                "caller and a rule with pin: true exclude each other: a file that no process has"
                " opened has no caller; leave one of them out"
            )
        return value

    @field_validator("quotas", mode="after")
    @classmethod
    def _quotas_are_possible(
        cls, quotas: tuple[QuotaSettings, ...], fields: ValidationInfo
    ) -> tuple[QuotaSettings, ...]:
        for number, quota in enumerate(quotas):
            if any((each.user, each.cgroup) == (None, None) for each in quotas[:number]):
                raise ValueError(f"[{number}] has no effect: an earlier one is for all processes")
            known = [(each.user_number(), each.cgroup) for each in quotas[:number]]
            if (quota.user_number(), quota.cgroup) in known:
                raise ValueError(f"[{number}] has no effect: an earlier one is for {quota.job}")
        placement, peers = fields.data.get("placement"), fields.data.get("peers")
        for name, excludes in (
            ("open: none, because opens must be seen", fields.data.get("open") == "none"),
            ("placement.policy: lru", placement is not None and placement.policy == "lru"),
            ("peers.members", peers is not None and bool(peers.members)),
        ):
            if quotas and excludes:
                raise ValueError(f"quotas exclude {name}; leave one of them out")
        return quotas

    @field_validator("rules", mode="after")
    @classmethod
    def _rules_are_possible(
        cls, rules: tuple[RuleSettings, ...], fields: ValidationInfo
    ) -> tuple[RuleSettings, ...]:
        tiers = fields.data.get("tiers")
        names = [tier.name for tier in tiers] if tiers is not None else None
        seen: set[str] = set()
        for number, rule in enumerate(rules):
            if rule.match in seen:
                raise ValueError(
                    f"[{number}] has no effect: an earlier rule has the match {rule.match!r};"
                    " make it one rule"
                )
            seen.add(rule.match)
            if rule.tier is not None and names is not None and rule.tier not in names:
                known = f"the tiers are {', '.join(names)}" if names else "name one under `tiers`"
                raise ValueError(f"[{number}] names no tier of the mount: {rule.tier!r}; {known}")
        return rules

    @property
    def absorbs(self) -> tuple[str, ...]:
        """The patterns of paths that can be written; empty for a read-only mount."""
        return ("**",) if self.write == "absorb" and not self.absorb else self.absorb

    @field_validator("absorb", "quotas", "rules", "tiers", mode="before")
    @classmethod
    def _empty_list(cls, value: object, field: ValidationInfo) -> object:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) and field.field_name == "absorb" else value

    @field_validator("tiers", mode="after")
    @classmethod
    def _unique_names(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        given = [tier.name for tier in tiers if "name" in tier.model_fields_set]
        for name in given:
            if given.count(name) > 1:
                raise ValueError(f"two tiers are named {name!r}; give each its own name")
        # In metrics and status the name "source" means the source.
        taken = {*given, "source"}
        named = []
        for tier in tiers:
            if "name" not in tier.model_fields_set:
                numbered = (f"{tier.name[:60]}-{number}" for number in count(2))
                name = next(n for n in chain([tier.name], numbered) if n not in taken)
                taken.add(name)
                tier = tier.model_copy(update={"name": name})
            named.append(tier)
        return tuple(named)


def parse_tier(text: str) -> dict[str, Any]:
    """``PATH[:SIZE]`` as the fields of a tier. A path may contain colons.

    The text after the last colon is a size if it begins like a number. Then it must be valid: else
    ``/local:10GBB`` would silently become a directory of that name.
    """
    path, colon, size = text.rpartition(":")
    if not colon or not re.match(r"-?[0-9.][^/]*$|$", size):
        return {"path": text}
    if not path:
        raise ValueError(f"{text!r} has no path; write it like /local/scratch:800GiB")
    return {"path": path, "capacity": parse_bytes(size)}
