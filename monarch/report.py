"""What a daemon tells about itself: the report behind ``monarch status`` and the Prometheus page.

Plain frozen values that become JSON and come back. Sizes are bytes, durations seconds unless the
name says ``_ns``; times are nanoseconds since the epoch. Paths are text in which undecodable bytes
are surrogate escapes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from monarch.health import Health

State = Literal["starting", "serving", "stopping"]

T = TypeVar("T")


class Report:
    """A value that becomes JSON and comes back."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls: type[T], raw: Mapping[str, Any]) -> T:
        """Keys of a newer daemon are passed over.

        Raises ValueError when a key is missing or of the wrong kind.
        """
        return _decode(cls, raw, "report")


@dataclass(frozen=True, slots=True)
class Mode:
    """Who moves the bytes of a read, whether the kernel tells opens, and why it is so.

    ``datapath`` is "passthrough", "relay" or "python"; ``open`` is "open" or "none".
    """

    datapath: str
    open: str
    why: str

    @property
    def counts_opens(self) -> bool:
        """Whether the daemon hears of every open. Else no figure made of opens is true."""
        return self.open == "open"

    @property
    def counts_tier_reads(self) -> bool:
        """Whether reads of copies reach the daemon. Else the kernel answers them by itself."""
        return self.datapath != "passthrough"


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """``size_bytes`` is the file on disk; ``bytes`` what the files described add up to.

    ``stale``: a difference to the source was seen since it was made; None when nobody looked.
    ``checks`` counts the times an entry was compared with the source.
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
    """``free`` is what the tier may still take; ``out_why`` is empty while it is in service.

    ``opens`` is None where the kernel tells no opens, ``reads`` and ``bytes`` are None where it
    reads copies by itself. ``others`` are the sources of other mounts with copies in this path.
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """Opens and read calls that reached the source, and the bytes they brought."""

    opens: int
    reads: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SourceTotals:
    """All traffic to the source, and the same split by who caused it."""

    opens: int
    reads: int
    bytes: int
    reader: Traffic
    copy: Traffic


@dataclass(frozen=True, slots=True)
class Saved:
    """What readers got without the source, as far as it is known; None: it is not counted.

    Both are lower bounds: an open that a file's bytes in memory served is counted as the source's,
    and reads that the kernel answers from its page cache are not counted.
    """

    opens: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of the snapshot's regular files has a copy. Fractions are 0 to 1."""

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
    """``hit_ratio`` is None until something was opened."""

    number: int
    opens: int
    hits: int
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; each is the upper bound of the bucket it falls in, None beyond the last one."""

    count: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """By tier name; "source" is the source. ``open`` is None where the kernel tells no opens."""

    open: dict[str, Quantiles] | None
    read: dict[str, Quantiles]


@dataclass(frozen=True, slots=True)
class Memory:
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of the kernel that are not answered yet: how many wait, and the oldest one's age."""

    waiting: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Handles:
    """``backing_ids`` are files that the kernel reads itself, in passthrough.

    ``open_files`` is None where the kernel tells no opens.
    """

    open_files: int | None
    backing_ids: int


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """How far the reading of all copies has got. ``bytes`` and ``found`` (damaged copies) are of
    all rounds; ``last_round_ns`` is when the last one ended, 0 before.
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
    """What is written through the mount. ``directory`` of the tier holds it until it is drained.

    ``files``, ``bytes`` and ``operations`` (files, names, attributes) are not at the source yet;
    ``oldest_ns`` is when the oldest of them was written, 0 if there are none. ``drained_*`` and
    ``errors`` (failures of the source) are counted since the mount. ``trouble`` is why nothing
    goes on, empty while it does. ``reserve`` bytes of the tier are kept for writing, ``held`` are
    taken, by what was drained too. ``lost`` files are names in the mount. ``in_memory``: that
    tier is memory, so that nothing in it survives the end of the machine, synced or not. What was
    made and changed since the snapshot takes the memory of ``names`` names, of ``names_max``.
    ``aside``: paths of changes that are set aside, the first of them; ``aside_operations`` are
    these and what waits with them.
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


@dataclass(frozen=True, slots=True)
class WarmProgress(Report):
    """``done`` of the ``total`` files asked for are resident; ``refused`` will not be.

    ``bytes_done`` counts what is copied of files under way, too.
    """

    done: int
    total: int
    bytes_done: int
    bytes_total: int
    refused: int


@dataclass(frozen=True, slots=True)
class StatusReport(Report):
    """One daemon, now.

    ``opens`` are those of readers, ``reads`` and ``bytes`` what the daemon answered, wherever it
    was served; what the kernel answers from its page cache reaches nobody. ``hit_ratio`` is the
    share of opens that a tier served, None before the first. Where ``mode`` does not tell opens,
    ``opens``, ``hit_ratio`` and ``epochs`` are None; where the kernel reads copies by itself,
    ``reads`` and ``bytes`` are. ``writing`` is None for a mount that is read-only. ``warming``:
    what `monarch warm` was asked for and has not finished.
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
    writing: WritingReport | None = None
    warming: list[WarmProgress] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WarmReport(Report):
    """The files asked for; ``refused`` of them did not fit or could not be copied, so far.

    ``cancelled``: `monarch warm --cancel` has stopped it, the rest is not copied.
    """

    files: int
    bytes: int
    refused: int
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class WarmCancelled(Report):
    """How many calls of `monarch warm` were stopped."""

    cancelled: int


@dataclass(frozen=True, slots=True)
class EvictReport(Report):
    """The copies that left the tiers."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written through the mount, by its ``path`` there, last at ``mtime_ns``.

    ``durable`` is "none" (a crash of the node may take it), "local" or "source".
    """

    path: str
    bytes: int
    durable: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class WrittenFiles(Report):
    """Some of the files: an answer comes in several parts."""

    files: list[WrittenFile]


@dataclass(frozen=True, slots=True)
class WrittenTotals(Report):
    """The files told of, and those of them that are at the source."""

    files: int
    bytes: int
    drained_files: int
    drained_bytes: int


@dataclass(frozen=True, slots=True)
class DrainProgress(Report):
    """``*_done`` of what was not at the source when asked; ``trouble`` as in WritingReport."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int
    trouble: str


@dataclass(frozen=True, slots=True)
class DrainReport(Report):
    """``drained``: all that was asked for is at the source; else so much is not, in ``directory``.

    ``lost`` are files whose bytes are gone, which will never be.
    """

    drained: bool
    files: int
    bytes: int
    oldest_ns: int
    trouble: str
    directory: str
    lost: list[str]


@dataclass(frozen=True, slots=True)
class ConflictReport:
    """A change of this mount that met another one at the source. Paths are relative to the source.

    ``kept`` is where what was written here lies there; empty if nothing of it had to be kept.
    """

    path: str
    kept: str
    why: str


@dataclass(frozen=True, slots=True)
class ConflictsReport(Report):
    """The last conflicts of a mount, the newest last; ``acknowledged``: the alarm is over."""

    conflicts: list[ConflictReport]
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class RefusalReport:
    """A change that the source refuses: ``kind`` of ``path`` in the mount, ``why``, and how often
    it was tried. ``aside``: the other changes of its user go on."""

    path: str
    kind: str
    why: str
    tries: int
    aside: bool


@dataclass(frozen=True, slots=True)
class RefusalsReport(Report):
    """What the source refuses. ``waiting`` changes are not at the source, with these. ``removed``:
    paths in the mount that were given up and are gone."""

    refused: list[RefusalReport]
    waiting: int
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KeptReport:
    """What a power cut has left of a file that was never synced. ``path`` in the mount, empty if it
    is not known; ``size`` in bytes, ``recorded`` as it was told last, at ``written_ns``, 0 if it
    was not. ``file`` has the bytes."""

    number: int
    path: str
    size: int
    recorded: int
    written_ns: int
    found_ns: int
    file: str


@dataclass(frozen=True, slots=True)
class LostReport(Report):
    """Files that were written and whose bytes are gone; ``acknowledged``: the alarm is over.

    ``kept`` is what is left of files, the oldest loss first. ``hidden``: files that the mount does
    not show, whose bytes are on their way to the source.
    """

    files: list[str]
    acknowledged: bool
    kept: list[KeptReport] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. ``where`` is a tier's name, or ``state``.

    ``kind`` is for programs (docs/operations.md lists them), ``path`` the file of the mount or of
    the disk that it is about, ``remedy`` what a repair does, or a person can do where it ``mends``
    nothing.
    """

    kind: str
    where: str
    path: str
    what: str
    remedy: str
    mends: bool
    repaired: bool


@dataclass(frozen=True, slots=True)
class FsckProgress(Report):
    """Copies looked at, of all; and their bytes, of all, as far as they are to be read."""

    done: int
    total: int
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class FsckReport(Report):
    """``files`` copies were looked at and ``bytes`` of them read; ``served`` by a daemon.

    ``problems`` were found, of which ``repaired`` are mended. ``findings`` lists as many as an
    answer has room for.
    """

    state: str
    mountpoint: str
    served: bool
    files: int
    bytes: int
    problems: int
    repaired: int
    findings: list[Finding]


def _decode(kind: type[T], raw: Any, where: str) -> T:
    """``raw``, as JSON gives it, as a value of ``kind``."""
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
        value = float(_checked(raw, (int, float), where))
    else:
        value = _checked(raw, kind, where)
    return typing.cast(T, value)


def _checked(raw: Any, kind: Any, where: str) -> Any:
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is not bool):
        raise ValueError(f"{where} is {type(raw).__name__}")
    return raw
