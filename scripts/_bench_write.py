"""Writing: how long a job waits for checkpoints and other files on a slow source, on the tier's own
file system, through Monarch in between, and through others that write back; and what small files
cost on a local source (_bench_small.py).

Each round mounts one contender after the other over the slow source, in another order each time.
Every row is measured next to native, which is the same calls in a plain directory of the tier's
file system. After each the clock stops until all of it has come to the source.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import _bench_small as small
from _bench import BenchError, Result, Row, kind_of_file_system, measure_once
from _bench import slow_source_unavailable as unavailable
from _contenders import (
    MODES,
    Contender,
    JuiceFS,
    Mounted,
    PassthroughHP,
    Rclone,
    Source,
    install,
    program,
    required,
)
from _mounts import Mount
from _writers import (
    SMALL_BYTES,
    append_and_sync,
    create_files,
    replace_file,
    save_model,
    tensors,
    wait_until,
    write_through,
)

MB = 1_000_000
AUTO = "auto"
SLOW = "slow source"
# Without an open that is told, nobody knows who writes.
WAYS = {name: options for name, options in MODES.items() if name != "no_open"}
NAMED_BAR, WAITS_BAR = 1.2, 5.0
# Beyond what the bandwidth takes, until all has come to the source. Seconds.
PATIENCE_S = 120.0

Written = Mapping[str, int | None]


# -- who writes ------------------------------------------------------------------------------------


class SourceItself(Contender):
    name = shares = SLOW

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        yield Mounted(source.path, os.getpid(), lambda: None)


class MonarchWriting(Contender):
    """One mode, with everything absorbed."""

    shares = "monarch"

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self._capacity = name, capacity

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        mount = Mount(
            source.path,
            mountpoint,
            tier=place / "tier",
            capacity=str(self._capacity),
            state=place / "state",
            options=f"write=absorb,{WAYS[self.name]}",
        )
        with mount:
            yield Mounted(mount.path, mount.status()["pid"], lambda: None)


class RcloneWriting(Rclone):
    """It answers fsync at once and writes back a second after a file was closed."""

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [
            *(required("rclone"), "mount", str(source.path), str(mountpoint)),
            *("--config", "", "--cache-dir", str(place / "vfs"), "--vfs-cache-mode", "writes"),
            *("--vfs-write-back", "1s", "--vfs-cache-max-age", "24h", "--dir-cache-time", "24h"),
            *("--no-checksum", "--transfers", "4"),
        ]


class JuiceFSWriting(JuiceFS):
    """Its objects lie at the slow source; with ``--writeback`` they wait in its cache for that."""

    def prepare(self, source: Source, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True)
        format_ = ("format", self._names(place), "writes", "--storage", "file")
        self._run(*format_, "--bucket", f"{source.path / 'juicefs'}/", "--trash-days", "0")

    def command(self, source: Source, mountpoint: Path, place: Path) -> list[str]:
        return [
            *(required("juicefs"), "mount", self._names(self._place), str(mountpoint)),
            *("--cache-dir", str(place / "blocks"), "--writeback", "--no-usage-report"),
            *("--no-syslog", "--no-bgjob"),
        ]

    @contextmanager
    def mount(self, source: Source, mountpoint: Path, place: Path) -> Iterator[Mounted]:
        def is_staged() -> bool:
            return any(path.is_file() for path in place.glob("blocks/**/rawstaging/**/*"))

        def settle() -> None:
            if not wait_until(lambda: not is_staged(), timeout_s=PATIENCE_S * 10):
                raise BenchError("juicefs does not write back")

        with super().mount(source, mountpoint, place) as mounted:
            yield replace(mounted, settle=settle)


PEERS: Mapping[str, Callable[[], Contender]] = {
    "rclone": RcloneWriting,
    "juicefs": JuiceFSWriting,
    "passthrough_hp": PassthroughHP,
}


# -- what is written -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much: bytes of a checkpoint, files, renames and appends; the source's MB a second."""

    checkpoint: int
    files: int
    renames: int
    appends: int
    bandwidth: float


@dataclass
class Lab:
    """One contender in one round. A method is given the side: the mount's directory or native's.

    ``backing`` is what lies behind the slow source, where nothing is slow to look. ``name`` is no
    other's, nor that of another round.
    """

    name: str
    sizes: Sizes
    mounted: Mounted
    native: Path
    backing: Path
    names_arrive: bool
    state: Any
    slowest: dict[Path, float] = field(default_factory=dict)
    count: int = 0

    @property
    def ours(self) -> Path:
        return self.mounted.path

    def _directory(self, root: Path) -> Path:
        self.count += 1
        made = root / f"{self.name}-{self.count}"
        made.mkdir()
        return made

    def _arrived(self, directory: Path, written: Written) -> None:
        """Stop until all is at the source, and everything on a disk; None: it has to be gone."""
        if directory.parent == self.ours and self.names_arrive:
            at = self.backing / directory.name
            size = sum(size or 0 for size in written.values())
            patience_s = PATIENCE_S + 3 * size / MB / self.sizes.bandwidth

            def all_there() -> bool:
                return all(size_of(at / name) == size for name, size in written.items())

            if not wait_until(all_there, timeout_s=patience_s):
                raise BenchError(f"{directory} is not at the source after {patience_s:.0f} s")
        self.mounted.settle()
        os.sync()

    def _remove(self, path: Path) -> None:
        """What is large goes at once: it is room that the next one needs."""
        size = path.stat().st_size
        self._arrived(path.parent, {path.name: size})
        path.unlink()
        self._arrived(path.parent, {path.name: None})

    def save(self, root: Path) -> float:
        path = self._directory(root) / "model.pt"
        seconds = save_model(path, self.state)
        self._remove(path)
        return seconds

    def sequential(self, root: Path) -> float:
        path = self._directory(root) / "file"
        seconds = write_through(path, self.sizes.checkpoint)
        self._remove(path)
        return seconds

    def create(self, root: Path) -> float:
        return self._created(root, sync=False)

    def create_safely(self, root: Path) -> float:
        return self._created(root, sync=True)

    def _created(self, root: Path, *, sync: bool) -> float:
        directory = self._directory(root)
        seconds = create_files(directory, self.sizes.files, sync=sync)
        self._arrived(directory, {f"{number}": SMALL_BYTES for number in range(self.sizes.files)})
        return seconds

    def storm(self, root: Path) -> float:
        directory, count = self._directory(root), self.sizes.renames
        seconds = replace_file(directory, count)
        self._arrived(directory, {"target": SMALL_BYTES + count - 1, "staged": None})
        return seconds

    def fsync(self, root: Path) -> float:
        """The median, in milliseconds; ``fsync_99`` has the rest of the same run."""
        path = self._directory(root) / "log"
        seconds = append_and_sync(path, self.sizes.appends)
        self._arrived(path.parent, {path.name: path.stat().st_size})
        self.slowest[root] = seconds[len(seconds) * 99 // 100] * 1000
        return median(seconds) * 1000

    def fsync_99(self, root: Path) -> float:
        return self.slowest[root]


def size_of(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    unit: str
    function: Callable[[Lab, Path], float]
    bar: float | None = None

    def row(self, who: str, judged: str) -> Row[Lab]:
        function = self.function
        return Row(
            self.name,
            lambda lab: function(lab, lab.ours),
            self.unit,
            against=lambda lab: function(lab, lab.native),
            against_name="native",
            bar=self.bar if who == judged else None,
            who=who,
        )


SAVE = Line("checkpoint: torch.save and fsync", "s", Lab.save, NAMED_BAR)
LINES = (
    SAVE,
    Line("checkpoint: 1 MiB writes and fsync", "s", Lab.sequential),
    Line("small files: create", "s", Lab.create),
    Line("small files: create and fsync", "s", Lab.create_safely),
    Line("small files: write and rename over", "s", Lab.storm),
    Line("fsync of 4 KiB: median", "ms", Lab.fsync),
    Line("fsync of 4 KiB: 99 of 100", "ms", Lab.fsync_99),
)
GROUPS = ("checkpoint", "small files", "fsync of 4 KiB", *small.GROUPS)
# How _matrix.py shows the results.
SHOWN: dict[str, Any] = {"groups": GROUPS, "log": True}
SHOWN["caption"] = (
    "ratio of the time to native's and the time itself; "
    "~: the ratios of the rounds scatter by more than 10 %."
)


def derived(results: Sequence[Result[Lab]], judged: str) -> list[Result[Lab]]:
    """How many times longer the job waits for the slow source than for Monarch."""
    found = {result.row.who: result for result in results if result.row.name == SAVE.name}
    if not {SLOW, judged} <= found.keys():
        return []
    row = replace(
        found[SLOW].row,
        who=f"{SLOW} against {judged}",
        against_name=judged,
        bar=WAITS_BAR,
        more_is_better=True,
        derived=True,
    )
    return [Result(row, found[SLOW].values, found[judged].values)]


# -- the run ---------------------------------------------------------------------------------------


class Bench:
    def __init__(self, sizes: Sizes, work: Path, source: Source, backing: Path) -> None:
        self._sizes, self._work, self._source, self._backing = sizes, work, source, backing
        self._native = work / "native"
        self._native.mkdir()
        self._mounts = 0
        self._state: Any = None
        self._results: dict[tuple[str, str], Result[Lab]] = {}
        self.contenders: list[Contender] = []
        self.notes: list[str] = []
        self.lines: tuple[Line, ...] = LINES
        if importlib.util.find_spec("torch") is None:
            self.note("without torch.save: PyTorch is not installed")
            self.lines = LINES[1:]
        else:
            # The first one would pay for what is loaded for it.
            save_model(work / "warm-up", tensors(MB))
            self._state = tensors(sizes.checkpoint)

    def note(self, line: str) -> None:
        self.notes.append(line)
        sys.stderr.write(f"bench: {line}\n")

    def add(self, one: Contender) -> None:
        one.prepare(self._source, self._work / one.name)
        self.contenders.append(one)

    def measure(self, rounds: int, judged: str) -> list[Result[Lab]]:
        for turn in range(rounds):
            begin = turn * len(self.contenders) // rounds
            for one in self.contenders[begin:] + self.contenders[:begin]:
                sys.stderr.write(f"round {turn + 1} of {rounds}: {one.name}\n")
                self._measure(one, turn, judged)
        return list(self._results.values())

    def _measure(self, one: Contender, turn: int, judged: str) -> None:
        self._mounts += 1
        place = self._work / f"{one.name.replace(' ', '-')}-{self._mounts}"
        with self._mounted(one, place) as mounted:
            lab = Lab(
                name=place.name,
                sizes=self._sizes,
                mounted=mounted,
                native=self._native,
                backing=self._backing,
                names_arrive=one.fronts,
                state=self._state,
            )
            for line in self.lines:
                key = line.name, one.name
                result = self._results.setdefault(key, Result(line.row(one.name, judged)))
                measure_once(result, lab, turn)

    def _mounted(self, one: Contender, place: Path) -> AbstractContextManager[Mounted]:
        return one.mount(self._source, self._work / "mnt", place)


def _who(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The modes of Monarch and the peers that were asked for, or can be had here."""
    modes, peers = options.modes or list(WAYS), options.peers
    for name in (*modes, *(peers or [])):
        if name not in WAYS and name not in PEERS:
            raise BenchError(f"there is no {name}; {', '.join(WAYS)} or {', '.join(PEERS)}")
    if options.install_peers:
        peers = list(PEERS) if peers is None else peers
        install(peers)
    for name in peers or []:
        required(name)
    return modes, [name for name in PEERS if program(name)] if peers is None else peers


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    modes, peers = _who(options)
    judged = AUTO if AUTO in modes else modes[0]
    for name in PEERS if options.peers is None else ():
        if name not in peers:
            sys.stderr.write(f"bench: without {name}: it is unknown here; --install-peers\n")
    conditions: dict[str, object] = {
        "rounds": options.rounds,
        "quick": options.quick,
        "tier": kind_of_file_system(work),
        "judged": judged,
    }
    titles, results = [], list[Result[Any]]()
    for part in (_run_slow, _run_small):
        if options.only in (None, part.__name__.removeprefix("_run_")):
            title, more, found = part(options, work, modes, peers, judged)
            titles.append(title)
            conditions |= more
            results += found
    conditions["peers"] = {name: PEERS[name]().version() for name in peers}
    title = f"{'. '.join(titles)}; tier on {conditions['tier']}; {options.rounds} rounds"
    return title, conditions, results


Part = tuple[str, dict[str, object], list[Result[Any]]]


def _run_small(
    options: argparse.Namespace, work: Path, modes: list[str], peers: list[str], judged: str
) -> Part:
    counts = small.Counts(
        files=options.files,
        packed=10 * options.files if not options.quick else 5 * options.files,
        cloned=options.files,
    )
    contenders: list[Contender] = [MonarchWriting(name, 4 << 30) for name in modes]
    contenders += [PEERS[name]() for name in peers]
    results = small.Bench(counts, work / "small").measure(contenders, options.rounds, judged)
    title = (
        f"Local source: {counts.files:,} files of 10 KB, {counts.packed:,} files in an archive,"
        f" {counts.cloned:,} in a repository"
    )
    return title, {"packed": counts.packed, "cloned": counts.cloned}, results


def _run_slow(
    options: argparse.Namespace, work: Path, modes: list[str], peers: list[str], judged: str
) -> Part:
    if reason := unavailable():
        raise BenchError(f"there is no slow source: {reason}")
    from tests.equipment.slowfs import SlowSource

    size_mb = options.size_mb or (100 if options.quick else 1000)
    room = (size_mb * 5 + options.files * 0.08 * options.rounds * (len(modes) + 2)) * MB
    if room > shutil.disk_usage(work).free:
        raise BenchError(f"this needs {room / 1e9:.0f} GB at {work}; name another --directory")
    sizes = Sizes(
        checkpoint=size_mb * MB,
        files=options.files,
        renames=max(1, options.files // 2),
        appends=max(1, options.files // 10),
        bandwidth=options.bandwidth,
    )
    backing = work / "source"
    backing.mkdir()
    with ExitStack() as stack:
        slow = stack.enter_context(SlowSource(backing, work / "slow"))
        latency = [f"lat * {options.latency}"] if options.latency else []
        slow.rules(f"write_MBps {options.bandwidth}", *latency)
        bench = Bench(sizes, work, Source("writes", slow.path, 0, 0), backing)
        bench.add(SourceItself())
        for name in modes:
            bench.add(MonarchWriting(name, sizes.checkpoint * 4 + (1 << 30)))
        for name in peers:
            if (peer := PEERS[name]()).fills:
                bench.add(peer)
        results = bench.measure(options.rounds, judged)
    conditions: dict[str, object] = {
        "size_mb": size_mb,
        "files": sizes.files,
        "renames": sizes.renames,
        "appends": sizes.appends,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
        "notes": bench.notes,
    }
    title = (
        f"A checkpoint of {size_mb:,} MB, {sizes.files:,} files of 10 KB, {sizes.renames:,} renames"
        f", {sizes.appends:,} appends; slow source: {options.bandwidth:g} MB/s,"
        f" {options.latency:g} ms a call"
    )
    return title, conditions, results + derived(results, judged)
