"""The reports of a daemon, behind ``monarch status`` and the metrics.

Frozen values that are converted to JSON and back. Sizes are in bytes, durations in seconds. Names
with ``_ns`` are times in nanoseconds since the epoch. Paths are text in which undecodable bytes
are surrogate escapes.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from monarch.telemetry.foresight_report import ForesightReport
from monarch.telemetry.health import Health
from monarch.telemetry.peers_report import PeersReport
from monarch.telemetry.placement_report import AdmissionReport, PackReport, RuleReport

State = Literal["starting", "serving", "stopping"]

T = TypeVar("T")


class Report:
    """A value that is converted to JSON and back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls: type[T], raw: Mapping[str, Any]) -> T:
        """The report in ``raw``; unknown keys, of a newer daemon, are ignored.

        Raises ValueError if a key is missing or its value has the wrong type.
        """
        return _decode(cls, raw, "report")


@dataclass(frozen=True, slots=True)
class Mode:
    """Which part moves the bytes of a read, whether the kernel sends opens, and the reason.

    ``datapath`` is "passthrough", "relay" or "python"; ``open`` is "open" or "none".
    """

    datapath: str
    open: str
    why: str

    @property
    def counts_opens(self) -> bool:
        """Whether the kernel sends every open to the daemon. Otherwise the daemon does not know
        which tier served an open, or the time that it took."""
        return self.open == "open"

    @property
    def counts_tier_reads(self) -> bool:
        """Whether reads of copies reach the daemon. Otherwise the kernel answers them."""
        return self.datapath != "passthrough"


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """``size_bytes`` is the size of the snapshot file; ``bytes`` is the sum of the sizes in it.

    ``stale``: a difference to the source was found since it was made; None before a comparison.
    ``checks`` counts the comparisons of an entry with the source.
    """

    file: str
    id: str
    entries: int
    files: int
    bytes: int
    size_bytes: int
    created_ns: int
    age_s: float
    stale: bool | None
    freshness: str
    checks: int


@dataclass(frozen=True, slots=True)
class TierReport:
    """``free`` is the space for further copies; ``out_why`` is empty while the tier is in service.

    ``opens`` is None if the kernel sends no opens; ``reads`` and ``bytes`` are None if it reads
    copies itself. ``others`` are the sources of other mounts with copies in this path. ``parts``
    files have partial copies, with ``part_bytes`` of ``used``.
    """

    name: str
    path: str
    capacity: int
    used: int
    reserved: int
    free: int
    files: int
    in_service: bool
    opens: int | None
    reads: int | None
    bytes: int | None
    out_why: str = ""
    others: list[str] = field(default_factory=list)
    parts: int = 0
    part_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Opens and read calls that reached the source, and the bytes read."""

    opens: int
    reads: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SourceTotals(Traffic):
    """All traffic to the source, and its parts for readers and for copies."""

    reader: Traffic
    copy: Traffic


@dataclass(frozen=True, slots=True)
class Saved:
    """Opens and bytes that readers got without the source; None if they are not counted.

    Both are lower bounds: an open that was served from bytes in memory counts as one of the source,
    and reads that the kernel answers from its page cache are not counted.
    """

    opens: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Residency:
    """The regular files of the snapshot that have a copy. Fractions are 0 to 1."""

    files: int
    bytes: int
    wanted: int
    fraction_files: float
    fraction_bytes: float


@dataclass(frozen=True, slots=True)
class Copies:
    queued: int
    running: int
    done: int
    failed: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EpochReport:
    """``hit_ratio`` is None before the first open. Hits are None with ``open: none``: the daemon
    does not know which opens the source has served."""

    number: int
    opens: int
    hits: int | None
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds: the upper bound of the bucket of each quantile, None beyond the last bucket."""

    count: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """By tier name, or "source". ``open`` is None if the kernel sends no opens."""

    open: dict[str, Quantiles] | None
    read: dict[str, Quantiles]


@dataclass(frozen=True, slots=True)
class Memory:
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Requests:
    """Kernel requests that are not answered yet: their number, and the age of the oldest."""

    waiting: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Handles:
    """``open_files`` is None if the kernel sends no opens; ``backing_ids`` are files that it reads
    itself."""

    open_files: int | None
    backing_ids: int


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """The progress of the scrub. ``bytes`` and ``found`` (damaged copies) are sums over all rounds;
    ``last_round_ns`` is the end of the last round, 0 before.
    """

    enabled: bool
    done_files: int
    total_files: int
    bytes: int
    rounds: int
    found: int
    started_ns: int
    last_round_ns: int


@dataclass(frozen=True, slots=True)
class WritingReport:
    """Data written through the mount; ``directory`` of the tier holds it until it is drained.

    ``files``, ``bytes`` and ``operations`` (of files, names and attributes) are not at the source
    yet. ``oldest_ns`` is the time of the oldest of them, 0 if there are none. ``drained_*`` and
    ``errors`` (of the source) are counted since the mount. ``trouble`` is the reason why the drain
    does not proceed, else empty. ``reserve`` bytes of the tier are kept for writing; ``held`` are
    in use, also by drained files. ``lost`` names the first of ``lost_files`` in the mount.
    ``in_memory``: the tier is in memory, so its data does not survive the end of the machine, even
    after fsync. ``names`` is the number of names in memory that were changed since the snapshot,
    ``names_max`` its limit. ``aside``: the first paths that are set aside; ``aside_operations``
    counts these changes and those that wait for them.
    """

    tier: str
    directory: str
    fsync: str
    files: int
    bytes: int
    operations: int
    oldest_ns: int
    drained_files: int
    drained_bytes: int
    errors: int
    trouble: str
    reserve: int
    held: int
    lost: list[str]
    in_memory: bool = False
    names: int = 0
    names_max: int = 0
    aside: list[str] = field(default_factory=list)
    aside_operations: int = 0
    lost_files: int = 0


@dataclass(frozen=True, slots=True)
class WarmProgress(Report):
    """``done`` of the ``total`` requested files are resident; ``refused`` will not be.

    ``bytes_done`` includes the bytes already copied of files that are being copied.
    """

    done: int
    total: int
    bytes_done: int
    bytes_total: int
    refused: int


@dataclass(frozen=True, slots=True)
class MeasuredReport:
    """A session that is measured: ``share`` of the files it may read from tiers, and the source
    gives it at most ``source_limit`` bytes/s, 0: no limit. ``hits`` of its opens were served by
    tiers, ``misses`` were not."""

    session: int
    share: float
    source_limit: int
    hits: int
    misses: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class QuotaReport:
    """The quota of a job: ``tier`` bytes of copies, None: no limit, of which ``charged`` are used;
    it reads the source with at most ``source_limit`` bytes/s, 0: no limit."""

    job: str
    tier: int | None
    charged: int
    source_limit: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class StatusReport(Report):
    """The report of one daemon.

    ``opens`` are opens of readers; ``reads`` and ``bytes`` are those that the daemon answered from
    any tier, without those from the page cache of the kernel. ``hit_ratio`` is the share of opens
    that a tier served, None before the first, and if the kernel sends no opens. ``opens`` and
    ``epochs`` are None if opens are not counted, for the reason ``opens_not_counted``; ``reads``
    and ``bytes`` if the kernel reads copies itself. ``writing`` is None for a read-only mount.
    ``warming``: the unfinished requests of `monarch warm`. ``measured``: the sessions that
    `monarch analyze` measures. ``pack``: None for another source. ``peers``: None without other
    nodes.
    ``copied_per_wanted``: bytes of the source for each byte that readers got, if that is counted.
    """

    version: str
    pid: int
    mountpoint: str
    source: str
    state: State
    started_ns: int
    health: Health
    mode: Mode
    snapshot: SnapshotReport
    tiers: list[TierReport]
    source_totals: SourceTotals
    residency: Residency
    copies: Copies
    epochs: list[EpochReport] | None
    foresight: ForesightReport
    opens: int | None
    reads: int | None
    bytes: int | None
    hit_ratio: float | None
    saved: Saved
    latency: Latency
    errors: dict[str, int]
    memory: Memory
    handles: Handles
    requests: Requests
    scrub: ScrubReport
    opens_not_counted: str = ""
    writing: WritingReport | None = None
    warming: list[WarmProgress] = field(default_factory=list)
    rules: list[RuleReport] = field(default_factory=list)
    admission: AdmissionReport = field(default_factory=AdmissionReport)
    copied_per_wanted: float | None = None
    pack: PackReport | None = None
    peers: PeersReport | None = None
    measured: list[MeasuredReport] = field(default_factory=list)
    quotas: list[QuotaReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EvictReport(Report):
    """The copies that were removed from the tiers."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WarmReport(Report):
    """The requested files; ``refused`` of them did not fit or could not be copied so far.
    ``cancelled``: `monarch warm --cancel` has stopped the request."""

    files: int
    bytes: int
    refused: int
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class WarmCancelled(Report):
    """The number of requests of `monarch warm` that were stopped."""

    cancelled: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file written through the mount: its ``path`` there, last written at ``mtime_ns``.

    ``durable`` is "none" (lost if the node crashes), "local" or "source". ``moves``: a change of a
    directory above waits for the source, so the file may not be at ``path`` there.
    """

    path: str
    bytes: int
    durable: str
    mtime_ns: int
    moves: bool


@dataclass(frozen=True, slots=True)
class WrittenFiles(Report):
    """Some of the files: an answer has several parts."""

    files: list[WrittenFile]


@dataclass(frozen=True, slots=True)
class DrainProgress(Report):
    """``*_done`` of the data that waited at the request; ``trouble`` as in WritingReport."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int
    trouble: str


@dataclass(frozen=True, slots=True)
class DrainReport(Report):
    """``drained``: all requested data is at the source; else the numbers are of the data that is
    not, in ``directory``. ``lost`` are files whose bytes are lost and cannot be drained."""

    drained: bool
    files: int
    bytes: int
    oldest_ns: int
    trouble: str
    directory: str
    lost: list[str]


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """A change of this mount in conflict with one at the source. Paths are relative to the source.

    ``kept`` is the name there of the version written here; empty if it did not have to be kept.
    """

    path: str
    kept: str
    why: str


@dataclass(frozen=True, slots=True)
class ConflictsReport(Report):
    """The last conflicts of a mount, the newest last; ``acknowledged``: the alarm has ended."""

    conflicts: list[ConflictReport]
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class RefusalReport:
    """A change that the source refuses: ``kind`` of ``path`` in the mount, ``why``, and the number
    of tries. ``aside``: other changes of its user overtake it."""

    path: str
    kind: str
    why: str
    tries: int
    aside: bool


@dataclass(frozen=True, slots=True)
class RefusalsReport(Report):
    """The changes that the source refuses. ``waiting`` counts all changes that are not at the
    source. ``removed``: paths in the mount that were discarded. ``stopped`` names the failed part
    and the reason while the changes of all users wait. Else it is empty."""

    refused: list[RefusalReport]
    waiting: int
    removed: list[str] = field(default_factory=list)
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class KeptReport:
    """Bytes of a lost file that remain. ``path`` in the mount, empty if unknown; ``size`` in bytes;
    ``recorded``: the last recorded size, ``written_ns``: its time, both 0 if there is none.
    ``file`` holds the bytes."""

    number: int
    path: str
    size: int
    recorded: int
    written_ns: int
    found_ns: int
    file: str


@dataclass(frozen=True, slots=True)
class LostReport(Report):
    """Written files whose bytes are lost; ``acknowledged``: the alarm has ended. ``kept``: bytes
    that remain, the oldest loss first. ``hidden``: files that are drained, but not shown."""

    files: list[str]
    acknowledged: bool
    kept: list[KeptReport] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a ``kind`` of docs/operations.md. ``where``: the name of a tier, or ``state``;
    ``path``: in the mount or on the disk. ``remedy`` is what a repair does, or, if no repair
    ``mends`` the fault, what the user can do."""

    kind: str
    where: str
    path: str
    what: str
    remedy: str
    mends: bool
    repaired: bool


@dataclass(frozen=True, slots=True)
class FsckProgress(Report):
    """Checked copies and bytes, and the totals to be checked."""

    done: int
    total: int
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class FsckReport(Report):
    """``files`` copies were checked and ``bytes`` of them read; ``served``: by a daemon. Of
    ``problems`` faults ``repaired`` were repaired; ``findings`` has as many as fit in an answer."""

    state: str
    mountpoint: str
    served: bool
    files: int
    bytes: int
    problems: int
    repaired: int
    findings: list[Finding]


def _decode(kind: type[T], raw: Any, where: str) -> T:
    """Converts ``raw``, a value from JSON, to ``kind``. Raises ValueError."""
    value: Any
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise ValueError(f"{where} is not an object")
        hints = typing.get_type_hints(kind)
        given = {field.name for field in dataclasses.fields(kind)} & raw.keys()
        try:
            value = kind(**{name: _decode(hints[name], raw[name], name) for name in given})
        except TypeError as error:
            raise ValueError(f"{where} is incomplete: {error}") from error
    elif origin is list:
        (inner,) = typing.get_args(kind)
        value = [_decode(inner, item, where) for item in _checked(raw, list, where)]
    elif origin is dict:
        inner = typing.get_args(kind)[1]
        value = {key: _decode(inner, v, key) for key, v in _checked(raw, dict, where).items()}
    elif origin is types.UnionType:
        (inner,) = (arm for arm in typing.get_args(kind) if arm is not types.NoneType)
        value = None if raw is None else _decode(inner, raw, where)
    elif origin is Literal:
        if raw not in typing.get_args(kind):
            raise ValueError(f"{where} is {raw!r}")
        value = raw
    elif kind is float:
        number = _checked(raw, (int, float), where)
        if not abs(number) <= sys.float_info.max:
            raise ValueError(f"{where} is out of its range")
        value = float(number)
    elif kind is int:
        value = _checked(raw, int, where)
        # Counters and sizes of the kernel have 64 bits.
        if not abs(value) < 1 << 64:
            raise ValueError(f"{where} is out of its range")
    else:
        value = _checked(raw, kind, where)
    return typing.cast(T, value)


def _checked(raw: Any, kind: Any, where: str) -> Any:
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is not bool):
        raise ValueError(f"{where} is {type(raw).__name__}")
    return raw
