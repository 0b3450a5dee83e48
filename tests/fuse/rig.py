"""The datapath over real tables and copies; the test plays the kernel and pyfuse3."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from monarch.config.settings import LimitSettings
from monarch.fuse.datapath import Datapath, DatapathOptions
from monarch.namespace.build import build, write
from monarch.namespace.snapshot import Snapshot
from monarch.packmount.source import open_source
from monarch.packmount.tree import PackTree
from monarch.packs.pack import Pack
from monarch.peers.source import PeerSource
from monarch.placement.residency import Residency
from monarch.tiers.contents import copy_name
from monarch.tiers.ownership import Owner
from monarch.tiers.source import Source
from monarch.tiers.tier import Tier
from monarch.types import Ino
from tests.fuse import wire
from tests.fuse.wire import Answer, Op, Request

PATIENCE_S = 60.0
# The largest message is a read of 1 MiB.
_SOCKET_BYTES = 4 << 20
_SO_SNDBUFFORCE = 32


class NoMessage(Exception):
    """No message came."""


class Rig:
    """``kernel`` and ``python`` are the test's ends. Requests have even numbers, as real ones."""

    def __init__(
        self,
        *,
        datapath: Datapath,
        snapshot: Snapshot,
        residency: Residency,
        tiers: list[Tier],
        source: Path,
        opened: Source,
    ) -> None:
        self.datapath = datapath
        self.snapshot = snapshot
        self.residency = residency
        self.tiers = tiers
        self.source = source
        self.opened = opened
        self._unique = 0
        self._early: dict[int, Answer] = {}
        self._answers, self._requests = bytearray(2 << 20), bytearray(2 << 20)
        self.kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.kernel, device):
            _widen(end)
            end.settimeout(None)
        self.kernel.settimeout(PATIENCE_S)
        self.python = socket.socket(fileno=datapath.start(device.detach()))
        self.python.settimeout(PATIENCE_S)

    def close(self) -> None:
        self.python.close()
        self.datapath.stop()
        self.kernel.close()

    # -- the kernel's side -----------------------------------------------------------------------

    @property
    def next_unique(self) -> int:
        """The number that the next request will have."""
        return self._unique + 2

    def send(self, opcode: int, node: int, body: bytes = b"", *, pid: int = 0, uid: int = 0) -> int:
        """Send a request; its number."""
        self._unique += 2
        self.kernel.send(wire.request(opcode, self._unique, node, body, pid=pid, uid=uid))
        return self._unique

    def answer(self, unique: int, *, within_s: float = PATIENCE_S) -> Answer:
        """The answer to a request, whatever comes before it. Raises NoMessage."""
        deadline = time.monotonic() + within_s
        while unique not in self._early:
            found = self.any_answer(max(0.0, deadline - time.monotonic()))
            if found.unique == 0:
                continue  # a notification
            assert found.unique not in self._early, "answered twice"
            self._early[found.unique] = found
        return self._early.pop(unique)

    def any_answer(self, within_s: float) -> Answer:
        return wire.parse_answer(_received(self.kernel, self._answers, within_s))

    def ask(self, opcode: int, node: int, body: bytes = b"", *, pid: int = 0) -> Answer:
        return self.answer(self.send(opcode, node, body, pid=pid))

    def ask_often(self, count: int, opcode: int, node: int, body: bytes) -> Answer:
        """The same request ``count`` times, many at once; one of the answers, all without error."""
        answer = Answer(0, 0, b"")
        for start in range(0, count, 64):
            sent = [self.send(opcode, node, body) for _ in range(min(64, count - start))]
            for unique in sent:
                answer = self.answer(unique)
                assert answer.error == 0
        return answer

    def init(self, flags: int = 0, flags2: int = 0) -> tuple[int, ...]:
        """The first request, which pyfuse3 answers; returns the answer to the kernel."""
        unique = self.send(Op.INIT, 0, wire.INIT_IN.pack(7, 40, 1 << 20, flags, flags2))
        passed = self.passed()
        assert passed.opcode == Op.INIT
        self.reply(passed, wire.INIT_OUT.pack(7, 38, 1 << 20, 0, 12, 9, 1 << 20, 1, 256, 0, 0, 0))
        answer = self.answer(unique)
        assert answer.error == 0
        return wire.INIT_OUT.unpack(answer.body)

    def open(self, node: int) -> tuple[int, int, int]:
        """Open what C opens itself: handle, flags, backing id."""
        answer = self.ask(Op.OPEN, node, wire.OPEN_IN.pack(os.O_RDONLY, 0))
        assert answer.error == 0
        handle, flags, backing = wire.OPEN_OUT.unpack(answer.body)
        return handle, flags, backing

    def send_open(self, node: int, *, flags: int = os.O_RDONLY, pid: int = 0, uid: int = 0) -> int:
        return self.send(Op.OPEN, node, wire.OPEN_IN.pack(flags, 0), pid=pid, uid=uid)

    def send_create(self, name: bytes, *, pid: int = 0) -> int:
        body = wire.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT, 0o100600, 0o022, 0) + name + b"\0"
        return self.send(Op.CREATE, 1, body, pid=pid)

    def send_write(
        self,
        node: int,
        handle: int,
        offset: int,
        data: bytes,
        *,
        flags: int = 0,
        write_flags: int = 0,
    ) -> int:
        body = wire.WRITE_IN.pack(handle, offset, len(data), write_flags, 0, flags, 0) + data
        return self.send(Op.WRITE, node, body)

    def write(self, node: int, handle: int, offset: int, data: bytes) -> Answer:
        return self.answer(self.send_write(node, handle, offset, data))

    def send_read(self, node: int, handle: int, offset: int, size: int, *, pid: int = 0) -> int:
        body = wire.READ_IN.pack(handle, offset, size, 0, 0, 0, 0)
        return self.send(Op.READ, node, body, pid=pid)

    def read(self, node: int, handle: int, offset: int, size: int) -> Answer:
        return self.answer(self.send_read(node, handle, offset, size))

    def release(self, node: int, handle: int) -> Answer:
        return self.answer(self.send_release(node, handle))

    def send_release(self, node: int, handle: int) -> int:
        return self.send(Op.RELEASE, node, wire.RELEASE_IN.pack(handle, 0, 0, 0))

    def lookup(self, parent: int, name: bytes) -> Answer:
        return self.ask(Op.LOOKUP, parent, name + b"\0")

    def interrupt(self, unique: int) -> None:
        self.kernel.send(wire.request(Op.INTERRUPT, unique | 1, 0, wire.INTERRUPT_IN.pack(unique)))

    # -- pyfuse3's side --------------------------------------------------------------------------

    def passed(self, within_s: float = PATIENCE_S) -> Request:
        """The next request that was passed on. Raises NoMessage."""
        return wire.parse_request(_received(self.python, self._requests, within_s))

    def reply(self, to: Request, body: bytes = b"", *, error: int = 0) -> None:
        self.python.send(wire.answer(to.unique, body, error=error))

    def reply_open(self, to: Request, *, flags: int = wire.FOPEN_KEEP_CACHE) -> None:
        self.reply(to, wire.OPEN_OUT.pack(to.node, flags, 0))

    def reply_create(self, to: Request, node: int, *, flags: int = wire.FOPEN_KEEP_CACHE) -> None:
        self.reply(to, wire.entry(node) + wire.OPEN_OUT.pack(node, flags, 0))

    def is_quiet(self, within_s: float = 0.1) -> bool:
        """Whether nothing more is passed on."""
        try:
            self.passed(within_s)
        except NoMessage:
            return True
        return False

    # -- paths -----------------------------------------------------------------------------------

    def ino(self, path: str) -> Ino:
        found = self.snapshot.resolve(os.fsencode(path))
        assert found is not None, path
        return found

    def content(self, path: str) -> bytes:
        return (self.source / path).read_bytes()

    def place(self, path: str, tier: int = 1) -> Ino:
        """Commit a copy of a file, and record it."""
        ino = self.ino(path)
        with self.tiers[tier - 1].stage(ino) as staged:
            staged.append(self.content(path))
            staged.commit(self.snapshot.attributes(ino).identity)
        self.residency.place(ino, tier)
        return ino

    def evict(self, ino: Ino) -> None:
        tier = self.residency.clear(ino)
        self.tiers[tier - 1].remove(ino)

    def copy(self, ino: Ino, tier: int = 1) -> Path:
        (generation,) = self.tiers[tier - 1].own.glob("copies-*")
        return generation / copy_name(ino)

    def load(self) -> None:
        """Have every block of the snapshot published."""
        for _ in self.snapshot.records():
            pass
        for ino in list(self.snapshot.directories()):
            for _ in self.snapshot.list_from(ino, 0):
                pass


def _widen(end: socket.socket) -> None:
    for option in (_SO_SNDBUFFORCE, socket.SO_SNDBUF):
        try:
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        except PermissionError:
            continue
        return


def _received(end: socket.socket, buffer: bytearray, within_s: float) -> bytes:
    end.settimeout(max(within_s, 0.001))
    try:
        size = end.recv_into(buffer)
    except TimeoutError:
        raise NoMessage from None
    if not size:
        raise NoMessage
    return bytes(memoryview(buffer)[:size])


def _build_of_pack(source: Path, file: Path) -> None:
    with Pack.open(os.fsencode(source)) as pack:
        tree = PackTree(pack)
        write(
            tree,
            file,
            source=os.fsencode(source),
            mode=None,
            progress=None,
            expected=None,
            snapshot_id=tree.id,
            buckets=tree.buckets,
        )


@contextmanager
def rig(
    source: Path,
    directory: Path,
    *,
    loaded: bool = True,
    fetch_max: int = 0,
    fetched_at_once: int = 4,
    source_timeout: float | None = None,
    pack: bool = False,
    peers: Callable[[Datapath, Snapshot], None] | None = None,
    **options: bool,
) -> Iterator[Rig]:
    """A datapath over a snapshot of ``source`` and two empty tiers in ``directory``, with the
    objects of written files in ``objects`` beside these.

    Files of the source are fetched up to ``fetch_max`` bytes, so many of them at once. With
    ``pack`` the source is a pack. With ``peers``, which is called before the start, other nodes
    give them.
    """
    wanted: Mapping[str, bool] = {
        "passthrough": False,
        "no_open": False,
        "decide_opens": False,
        "cache_listings": False,
        "ask_names": False,
        "ask_xattrs": False,
        "as_caller": False,
        **options,
    }
    file = directory / "snapshot"
    (_build_of_pack if pack else build)(source, file)
    tiers = [Tier(n, f"t{n}", directory / f"tier{n}", owner=Owner("mount")) for n in (1, 2)]
    opened = (open_source if peers is None else PeerSource)(os.fsencode(source))
    limits = LimitSettings(
        inline_max=fetch_max,
        buffer_max=max(1, fetched_at_once * fetch_max),
        source_timeout=source_timeout,
    )
    with Snapshot.open(file) as snapshot:
        residency = Residency(snapshot.entries)
        for tier in tiers:
            tier.use(snapshot.id)
        datapath = Datapath(
            snapshot=snapshot,
            source=opened,
            limits=limits,
            residency=residency,
            tiers=tiers,
            options=DatapathOptions(**wanted),
        )
        if peers is not None:
            peers(datapath, snapshot)
        (directory / "objects").mkdir(exist_ok=True)
        objects = os.open(directory / "objects", os.O_RDONLY)
        datapath.set_objects(objects, tier=1)
        os.close(objects)
        made = Rig(
            datapath=datapath,
            snapshot=snapshot,
            residency=residency,
            tiers=tiers,
            source=source,
            opened=opened,
        )
        try:
            if loaded:
                made.load()
            yield made
        finally:
            made.close()
            for tier in tiers:
                tier.close()
            opened.close()
            # Its tables and blocks are views of the objects that are closed next.
            del datapath, made.datapath, made.snapshot, made.opened, opened


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that cannot end yet; returns when the kernel has decided to end it."""
    process.kill()
    state = Path(f"/proc/{process.pid}/status")
    eventually(lambda: "SigPnd:\t0000000000000100" in state.read_text(), "it is being killed")
