"""Several nodes of one job over one slow source, which share their copies or each work alone.

A node is a network namespace with a daemon, a tier for 30 % of the data, and twelve readers, as the
DataLoaders of four processes with three workers each. Together they read all files, or all pieces
of 1 MiB of a large one, in each epoch once, in an order of the node. All nodes read the same slow
source, whose bandwidth is that of all of them together. The bytes read there are counted by the
source. The kernel keeps no pages of it, since the nodes of this machine would share them.

At last one node reads the files of the others through its mount, and plain HTTP clients on that
node get the same files from the same engines, in the same order: one reader and one client, and
then as many of both as a node has readers. Without a limit of the links, for both. They take turns,
each turn in another order.
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from monarch.daemon.peers import ownership_of
from monarch.namespace.snapshot import Snapshot
from monarch.peers.client import TOKEN_HEADER
from monarch.peers.hello import MemberKey
from monarch.peers.ranges import block_items
from monarch.peers.spans import Span
from monarch.placement.parts import BLOCK
from monarch.text import counted
from monarch.tiers.contents import copy_name
from monarch.tiers.partial import GRANULE
from monarch.types import Ino
from scripts.benchmark.packs_writers import tree
from scripts.benchmark.page_cache import can_drop, drop_pages
from scripts.benchmark.quantities import MB
from scripts.benchmark.readers import (
    BUFFER_BYTES,
    Counts,
    Reading,
    Shared,
    read_lists,
    read_pieces,
    read_share,
    together,
)
from scripts.benchmark.requirements import (
    ATTRIBUTES_EXPIRE_S,
    require_room,
    require_slow_source,
)
from scripts.benchmark.rows import BenchError, Result, Row, measure
from scripts.tools.mount import Mount, monarch
from tests.equipment import hosts
from tests.equipment.hosts import Hosts, address, enter
from tests.equipment.processes import cpu_seconds
from tests.equipment.slowfs import SlowSource

T = TypeVar("T")

NODES = 4
# With N readers in all, where each waits for one of M equal links, the links are used for
# N / (N + M - 1) of the time (mean value analysis of a closed network): 0.84 with four readers a
# node, 0.94 with twelve. The bar allows 0.9.
READERS = 12
SIZE = 110_000
# The part of the data that the tier of each node holds.
SHARE = 0.3
LARGE_MB = (2000, 256)
# With less, chance decides whether the blocks of a node fit into its tier.
LEAST_LARGE = 2000 * MB
ALONE = "each node alone"
PLAIN = "plain HTTP clients"
# The least ratio to as many plain clients over the same links.
LINKS_BAR = 0.9
# The plain client reads the head of an answer, and at most this of its bytes with it.
_HEAD = 4096
# The least ratio of remote reads to as many plain clients, for the readers of a node (ADR 124), and
# how often both read all files. Once takes a fifth of a second, in which any other program of this
# machine would count.
REMOTE_BAR, REMOTE_TURNS = 0.6, 5
REMOTE_READERS = (1, READERS)


@dataclass(frozen=True, slots=True)
class Epoch:
    """``read_bytes`` and ``opens`` are those of the source."""

    reading: Reading
    read_bytes: int
    opens: int


@dataclass(frozen=True, slots=True)
class Remote:
    """What one node reads from others: by itself, and with plain clients. ``asking_s`` and
    ``answering_s`` are the processor time of its daemon, and of the daemons and engines of the
    others, in s."""

    mounted: Reading
    plain: Reading
    asking_s: float
    answering_s: float


class Job:
    """The mounts of all nodes, with empty tiers, until ``stack`` is closed."""

    def __init__(
        self, bench: Bench, place: str, size: int, stack: ExitStack, *, shares: bool
    ) -> None:
        self._bench = bench
        bench.jobs += 1
        own = bench.work / f"job{bench.jobs}"
        own.mkdir()
        self._secret = own / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text(secrets.token_hex(32))
        # Each way to read has the same modes, whatever these files would choose.
        options = ["datapath=relay", "open=open"]
        self.mounts = []
        for number in range(1, NODES + 1):
            peers = [
                f"peers.members=10.77.0.[1-{NODES}]",
                f"peers.address={address(number)}",
                f"peers.secret_file={self._secret}",
                # Two cores for all nodes must not make one of them look slow.
                "peers.patience=5",
            ]
            mounted = Mount(
                bench.source.path / place,
                own / f"mnt{number}",
                tier=own / f"tier{number}",
                capacity=str(int(SHARE * size)),
                state=own / f"state{number}",
                snapshot=bench.snapshots[place],
                options=",".join([*options, *(peers if shares else [])]),
                within=bench.network.command(number),
            )
            self.mounts.append(stack.enter_context(mounted))

    def epoch(self, names: Sequence[str], seed: int) -> Epoch:
        """All nodes read all files, or all pieces of the only one, at the same time."""
        tasks: list[Callable[[], Counts]] = []
        for number, mounted in enumerate(self.mounts):
            chance = random.Random(seed * NODES + number)
            if len(names) == 1:
                places = list(range(0, self._bench.large_bytes, BUFFER_BYTES))
                chance.shuffle(places)
                path = f"{mounted.path}/{names[0]}"
                tasks += [partial(read_pieces, path, Shared(places))] * READERS
            else:
                order = [f"{mounted.path}/{name}" for name in names]
                chance.shuffle(order)
                tasks += [partial(read_share, Shared(order))] * READERS
        drop_pages()
        time.sleep(ATTRIBUTES_EXPIRE_S)
        before = self._bench.source.counters()
        reading = together(tasks)
        for mounted in self.mounts:
            mounted.settle(0)
        after = self._bench.source.counters()
        if reading.bytes != NODES * self._bench.bytes_of(names):
            raise BenchError(f"{reading.bytes} bytes were read")
        return Epoch(
            reading,
            after["read_bytes"] - before["read_bytes"],
            after["open"] - before["open"],
        )

    def remote(self, names: Sequence[str], readers: int) -> Remote:
        """The first node reads the files whose only copies are on other nodes, with so many
        readers, or as many clients."""
        first, *others = self.mounts
        files = self._lacking_files(names, 0)
        if not files:
            raise BenchError("no node has the only copy of a file")
        servers = {number: self._server(number) for number in range(1, NODES)}
        namespace = self._bench.network.namespace(1)
        mounted = plain = Reading(0, 0, 0.0)
        asking_s = answering_s = 0.0
        for turn in range(REMOTE_TURNS):
            random.Random(turn).shuffle(files)
            shares = _dealt(files, readers)
            clients = [
                partial(_get_all, namespace, servers, [request for _, request in share])
                for share in shares
            ]
            drop_pages()
            # Their first run brings the copies into memory.
            plain += [together(clients) for _ in range(2)][1]
            before = _cpu_s(first), sum(map(_cpu_s, others))
            mounted += read_lists([[path for path, _ in share] for share in shares])
            asking_s += _cpu_s(first) - before[0]
            answering_s += sum(map(_cpu_s, others)) - before[1]
        if plain.bytes != mounted.bytes:
            raise BenchError(f"plain clients have read {plain.bytes} of {mounted.bytes} bytes")
        return Remote(mounted, plain, asking_s, answering_s)

    def exchange(self, place: str) -> Reading:
        """On all nodes at the same time, as many plain clients as readers get what the node has no
        copy of, over the same links. It is what the links allow so many readers."""
        servers = {number: self._server(number) for number in range(NODES)}
        tasks: list[Callable[[], Counts]] = []
        for number in range(NODES):
            if place == "files":
                lacking = self._lacking_files(self._bench.names, number)
                requests = [request for _, request in lacking]
            else:
                requests = self._lacking_pieces(number)
            random.Random(number).shuffle(requests)
            namespace = self._bench.network.namespace(number + 1)
            tasks += [partial(_get_all, namespace, servers, Shared(requests))] * READERS
        return together(tasks)

    def _lacking_files(self, names: Sequence[str], number: int) -> list[tuple[str, Request]]:
        """The files whose only copies are on other nodes: the path in the mount of this node, and
        the request of a client."""
        kept = [_copies(mounted.tier) for mounted in self.mounts]
        top = self.mounts[number].path
        files = []
        for name in names:
            ino = (top / name).stat().st_ino
            owners = [other for other in range(NODES) if ino in kept[other]]
            if owners and number not in owners:
                request = Request(owners[0], f"c/{copy_name(Ino(ino))}")
                files.append((str(top / name), request))
        return files

    def _lacking_pieces(self, number: int) -> list[Request]:
        """The requests of a client for the pieces of the large file that other nodes own."""
        ino = Ino((self.mounts[number].path / "file").stat().st_ino)
        owners = self._bench.owners("large").tolist()
        requests = []
        for offset in range(0, self._bench.large_bytes, BUFFER_BYTES):
            owner = owners[offset // BLOCK]
            end = min(offset + BUFFER_BYTES, self._bench.large_bytes)
            span = Span(ino, offset // GRANULE, (end - 1) // GRANULE)
            if owner != number:
                fields = f"Range: bytes={offset}-{end - 1}\r\n"
                requests.append(Request(owner, span.name_at_engine, fields))
        return requests

    def _server(self, number: int) -> Server:
        mounted = self.mounts[number]
        set_name = mounted.status()["peers"]["set"]
        name = address(number + 1)
        key = MemberKey(name, set_name, self._secret.read_text().encode())
        port = int((mounted.state / "peers" / "port").read_text())
        headers = f"Host: monarch\r\n{TOKEN_HEADER}: {key.token()}\r\n"
        return Server(name, port, f"/{set_name}/", headers)


def _dealt(order: list[T], readers: int) -> list[list[T]]:
    """The part of an order that each reader has."""
    return [order[number::readers] for number in range(readers)]


@dataclass(frozen=True, slots=True)
class Server:
    """The engine of a node, as a client uses it."""

    host: str
    port: int
    path: str
    headers: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a client wants of a node: ``name`` follows the path of its engine, ``fields`` are more
    lines of the head."""

    owner: int
    name: str
    fields: str = ""


def _get_all(
    namespace: Path, servers: Mapping[int, Server], requests: Iterable[Request]
) -> tuple[int, int]:
    """Makes requests over kept connections, in a network namespace. The number of answers, and of
    their bytes."""
    enter(namespace)
    buffer = memoryview(bytearray(_HEAD + BUFFER_BYTES))
    count = size = 0
    with ExitStack() as stack:
        connections: dict[int, socket.socket] = {}
        for request in requests:
            server = servers[request.owner]
            if request.owner not in connections:
                # An engine closes one that has no request for some seconds.
                made = socket.create_connection((server.host, server.port))
                connections[request.owner] = stack.enter_context(made)
            connection = connections[request.owner]
            head = f"GET {server.path}{request.name} HTTP/1.1\r\n{server.headers}{request.fields}"
            connection.sendall(f"{head}\r\n".encode())
            size += _received(connection, buffer)
            count += 1
    return count, size


def _received(connection: socket.socket, buffer: memoryview) -> int:
    """Reads an answer into a buffer that holds it; the number of bytes behind its head."""
    got = 0
    while (end := bytes(buffer[:got]).find(b"\r\n\r\n")) < 0:
        more = connection.recv_into(buffer[got:], _HEAD)
        if not more:
            raise BenchError("an engine has closed the connection")
        got += more
    head = bytes(buffer[:end]).decode().lower()
    length = re.search(r"\r\ncontent-length: (\d+)", head)
    if not re.match(r"http/1\.1 20[06] ", head) or length is None:
        raise BenchError(f"an engine answered {head.partition(chr(13))[0]}")
    whole = end + 4 + int(length[1])
    while got < whole:
        more = connection.recv_into(buffer[got:whole], 0, socket.MSG_WAITALL)
        if not more:
            raise BenchError("an engine has closed the connection")
        got += more
    return int(length[1])


def _copies(tier: Path) -> set[int]:
    """The inode numbers of the copies in a tier."""
    return {int(path.name) for path in tier.glob("monarch/*/copies-*/??/*") if path.name.isdigit()}


def _cpu_s(mounted: Mount) -> float:
    """The processor time of a daemon and its engine, in s."""
    return cpu_seconds(mounted.status()["pid"])


class Bench:
    """The files, the large file, the slow source over them, and the hosts."""

    def __init__(self, work: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self.work = work
        self.jobs = 0
        self.link_mbit: int = options.link_mbit
        self._bandwidth: float = options.bandwidth
        self.large_bytes = MB * (options.large_mb or LARGE_MB[options.quick])
        if options.only == "remote":
            self.large_bytes = 0
        self.files_bytes = SIZE * options.files
        tiers = 2 * NODES * SHARE * options.rounds
        require_room(work.parent, (1 + tiers) * (self.files_bytes + self.large_bytes))
        data = work / "data"
        self.names = tree(data / "files", options.files, SIZE)
        (data / "large").mkdir()
        chance = random.Random(1)
        with open(data / "large" / "file", "wb") as file:
            for _ in range(self.large_bytes // MB):
                file.write(chance.randbytes(MB))
        self.network = stack.enter_context(Hosts(NODES))
        self.source = stack.enter_context(SlowSource(data, work / "slow"))
        self.snapshots = {}
        for place in ("files", "large"):
            self.snapshots[place] = work / f"{place}.snapshot"
            monarch("snapshot", "build", self.source.path / place, "-o", self.snapshots[place])
        self.source.rules(f"lat * {options.latency}", f"read_MBps {options.bandwidth}", "direct .")

    def bytes_of(self, names: Sequence[str]) -> int:
        return self.files_bytes if names is self.names else self.large_bytes

    def allowed(self, place: str) -> float:
        """By which factor the bandwidths let nodes that share read an epoch faster than nodes that
        work alone, from the second epoch on. Alone, each node reads from the source what its tier
        does not hold. Sharing, it gets from others all but its own part, over its link; a node that
        owns more than the others sends more over its own."""
        alone_s = NODES * (1 - SHARE) / (self._bandwidth * MB)
        kept = [min(part, SHARE) for part in self.owned(place)]
        most = max(max(sum(kept) - part, (NODES - 1) * part) for part in kept)
        link_s = most / (self.link_mbit * MB / 8)
        source_s = NODES * (1 - sum(kept)) / (self._bandwidth * MB)
        return alone_s / max(link_s, source_s)

    def owned(self, place: str) -> list[float]:
        """The part of the data that each node owns, by the hash."""
        owners = self.owners(place)
        return [count / len(owners) for count in np.bincount(owners, minlength=NODES).tolist()]

    def owners(self, place: str) -> npt.NDArray[np.int64]:
        """The node that owns each file, or each block of the large file, by the hash."""
        with Snapshot.open(self.snapshots[place]) as snapshot:
            inos, sizes, _ = snapshot.files_in(range(1, snapshot.entries + 1))
            ownership = ownership_of(map(address, range(1, NODES + 1)), snapshot.content_digest())
        items = inos if place == "files" else block_items(Ino(int(inos[0])), int(sizes[0]))
        return ownership.owners(items).astype(np.int64)


class Lab:
    """One round: both kinds of jobs, with the files and with the large file."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._epochs: dict[tuple[str, bool], list[Epoch]] = {}
        self._exchanges: dict[str, Reading] = {}
        # By the number of readers.
        self._remote: dict[int, Remote] = {}

    def epoch(self, place: str, number: int, *, shares: bool) -> Epoch:
        key = place, shares
        if key not in self._epochs:
            self._epochs[key] = self._measured(place, shares=shares)
        return self._epochs[key][number - 1]

    def remote(self, readers: int) -> Remote:
        if not self._remote:
            self.epoch("files", 1, shares=True)
        return self._remote[readers]

    def _measured(self, place: str, *, shares: bool) -> list[Epoch]:
        bench = self._bench
        is_of_files = place == "files"
        names = bench.names if is_of_files else ["file"]
        size = bench.files_bytes if is_of_files else bench.large_bytes
        with ExitStack() as stack:
            bench.network.limit(bench.link_mbit)
            job = Job(bench, place, size, stack, shares=shares)
            epochs = [job.epoch(names, number) for number in (1, 2)]
            if shares:
                self._exchanges[place] = job.exchange(place)
            if shares and is_of_files:
                bench.network.limit(0)
                for readers in REMOTE_READERS:
                    self._remote[readers] = job.remote(names, readers)
        return epochs

    def rate(self, place: str, number: int, *, shares: bool) -> float:
        """Files a second of each node."""
        reading = self.epoch(place, number, shares=shares).reading
        return reading.count / NODES / reading.seconds

    def exchanged(self) -> float:
        """Files a second of each node by plain clients, with those of its own tier in no time."""
        self.epoch("files", 2, shares=True)
        return len(self._bench.names) / self._exchanges["files"].seconds

    def exchanged_large(self) -> float:
        """MB a second of each node by plain clients, with the blocks of its own in no time."""
        self.epoch("large", 2, shares=True)
        return self._bench.large_bytes / MB / self._exchanges["large"].seconds

    def speed(self, place: str, number: int, *, shares: bool) -> float:
        """MB a second of each node."""
        return self.epoch(place, number, shares=shares).reading.megabytes_per_s / NODES

    def source_share(self, place: str, number: int, *, shares: bool) -> float:
        """The bytes that the source served in an epoch, over those of the data."""
        size = self._bench.files_bytes if place == "files" else self._bench.large_bytes
        return self.epoch(place, number, shares=shares).read_bytes / size

    def remote_speed(self, readers: int) -> float:
        return self.remote(readers).mounted.megabytes_per_s

    def plain_speed(self, readers: int) -> float:
        return self.remote(readers).plain.megabytes_per_s

    def asking(self, readers: int) -> float:
        """Processor time of the node that reads, in s for each GB."""
        return self.remote(readers).asking_s / self.remote(readers).mounted.bytes * 1e9

    def answering(self, readers: int) -> float:
        """Processor time of the nodes that have the copies, in s for each GB."""
        return self.remote(readers).answering_s / self.remote(readers).mounted.bytes * 1e9


def _compared(name: str, value: Any, unit: str) -> Row[Lab]:
    ours, theirs = partial(value, shares=True), partial(value, shares=False)
    return Row(name, ours, unit, theirs, ALONE, more_is_better=True)


def _of_source(name: str, place: str, number: int, bar: float | None) -> Row[Lab]:
    ours = partial(Lab.source_share, place=place, number=number, shares=True)
    return Row(name, ours, "of the bytes", bar=bar)


def rows(*, is_large: bool) -> list[Row[Lab]]:
    """``is_large``: the large file has so many blocks that each node has room for its own."""
    first = partial(Lab.rate, place="files", number=1)
    second = partial(Lab.rate, place="files", number=2)
    return [
        _of_source("read at the source, epoch 1", "files", 1, 1.02),
        _of_source("read at the source, epoch 2", "files", 2, 0.01),
        _compared("a node, epoch 1", first, "files/s"),
        _compared("a node, epoch 2", second, "files/s"),
        Row(
            "a node, epoch 2, same links",
            partial(second, shares=True),
            "files/s",
            Lab.exchanged,
            PLAIN,
            LINKS_BAR,
            True,
        ),
        *remote_rows(),
        *large_rows(is_large=is_large),
    ]


def large_rows(*, is_large: bool) -> list[Row[Lab]]:
    """The rows of ``--only large``."""
    second = partial(Lab.speed, place="large", number=2)
    name, first_bar = "large file, epoch 2", 1.02 if is_large else None
    return [
        _of_source("large file, read at the source, epoch 1", "large", 1, first_bar),
        _of_source("large file, read at the source, epoch 2", "large", 2, None),
        _compared("large file, epoch 1", partial(Lab.speed, place="large", number=1), "MB/s"),
        _compared(name, second, "MB/s"),
        Row(
            f"{name}, same links",
            partial(second, shares=True),
            "MB/s",
            Lab.exchanged_large,
            PLAIN,
            LINKS_BAR if is_large else None,
            True,
        ),
    ]


def remote_rows() -> list[Row[Lab]]:
    """The rows of ``--only remote``."""
    return [row for readers in REMOTE_READERS for row in _remote_rows_with(readers)]


def _remote_rows_with(readers: int) -> list[Row[Lab]]:
    named = counted(readers, "reader", "readers")
    values = Lab.remote_speed, Lab.plain_speed, Lab.asking, Lab.answering
    ours, theirs, asking, answering = [partial(value, readers=readers) for value in values]
    bar = REMOTE_BAR if readers == READERS else None
    return [
        Row(f"copies of other nodes, {named}", ours, "MB/s", theirs, PLAIN, bar, True),
        Row(f"processor, the node that reads, {named}", asking, "s/GB"),
        Row(f"processor, the nodes with the copies, {named}", answering, "s/GB"),
    ]


def run(
    options: argparse.Namespace, work: Path
) -> tuple[str, dict[str, object], list[Result[Any]]]:
    require_slow_source()
    if reason := hosts.unavailable():
        raise BenchError(reason)
    if not can_drop():
        raise BenchError("only root can drop the page cache")
    with ExitStack() as stack:
        bench = Bench(work, options, stack)
        is_large = bench.large_bytes >= LEAST_LARGE
        places, measured = {
            "remote": ([], remote_rows()),
            "large": (["large"], large_rows(is_large=is_large)),
            None: (["files", "large"], rows(is_large=is_large)),
        }[options.only]
        results = measure(measured, partial(Lab, bench), options.rounds)
    conditions: dict[str, object] = {
        "nodes": NODES,
        "files": options.files,
        "file_bytes": SIZE,
        "large_bytes": bench.large_bytes,
        "share_of_a_tier": SHARE,
        "link_mbit": options.link_mbit,
        "latency_ms": options.latency,
        "bandwidth_MBps": options.bandwidth,
        "allowed_ratio": {place: bench.allowed(place) for place in places},
        "rounds": options.rounds,
        "remote_turns": REMOTE_TURNS,
    }
    title = (
        f"{NODES} nodes, source with {options.latency:g} ms a call and {options.bandwidth:g} MB/s,"
        f" links of {options.link_mbit} Mbit/s"
    )
    return title, conditions, results
