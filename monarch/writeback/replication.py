"""Written files that another node of the job keeps as well, until the source has them.

A file is sent at its fsync, before that returns. If no other node takes it, fsync returns all the
same, and the file is sent again and again later. A node keeps a file under its path here, so it
gets new names, too.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import trio

from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.peers.client import PeerClient
from monarch.peers.held import Record, digest_of_path
from monarch.peers.holding import CHECK_S, Holding
from monarch.posix.thread_pool import ThreadPool
from monarch.types import Ino
from monarch.writeback.drain import Drain
from monarch.writeback.lease import Lease
from monarch.writeback.object_table import ObjectTable, mode_of
from monarch.writeback.objects import object_path
from monarch.writeback.op import Op
from monarch.writeback.source_files import DrainedObjects

_LOOK_S = 0.5
# Files of up to this size are sent at each fsync; others at most once in this time, so that an
# fsync of each line of a long log does not send all of it, in bytes and seconds.
_SMALL = 1 << 20
_AGAIN_S = 10.0
# The pause after no node has taken a file, in seconds.
_PAUSE_S = 5.0
# How long the end of the mount waits for other nodes, in seconds.
_END_S = 2.0
_THREADS = 2
# Objects that one look checks, and removals at one node that it requests.
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class _Placed:
    """What a node keeps of an object: ``seq`` is the number of its content in the journal."""

    client: PeerClient
    seq: int
    record: Record


class Replication:
    """Belongs to the event loop. ``objects`` is the directory of the objects, and ``token`` that of
    their journal. Without a ``lease`` at the source other nodes could not know that this one is
    alive, so nothing is sent."""

    def __init__(
        self,
        names: Namespace,
        object_table: ObjectTable,
        drained: DrainedObjects,
        drain: Drain,
        lease: Lease | None,
        holding: Holding,
        objects: Path,
        token: str,
    ) -> None:
        self._names = names
        self._object_table = object_table
        self._drained = drained
        self._drain = drain
        self._lease = lease
        self._holding = holding
        self._objects = objects
        self._token = token
        self._threads = ThreadPool(_THREADS, "replica digests", abandon=True)
        # The objects that other nodes are to keep, in the order in which they are checked, and
        # those that they do.
        self._wanted: dict[int, None] = {}
        self._placed: dict[int, _Placed] = {}
        # Objects whose paths may have changed since, and directories that were renamed since.
        self._moved: set[int] = set()
        self._renamed: set[bytes] = set()
        # What nodes need not keep but may: objects, each up to a version.
        self._left: dict[PeerClient, dict[int, int]] = {}
        self._turns: defaultdict[int, trio.Lock] = defaultdict(trio.Lock)
        # When an object may be sent again.
        self._due_s: dict[int, float] = {}
        self._check_s = -math.inf
        # The nodes that may keep files that the source has, each with a number that changes when it
        # may have got one: an earlier mount may have sent some, and may have ended between its
        # drain and their removal.
        self._stale = dict.fromkeys(holding.members, 0)
        # When other nodes may be asked again to remove all files.
        self._clear_s = -math.inf
        # Files that other nodes have taken, and those that none took, each time.
        self.sent = self.not_taken = 0

    @property
    def kept(self) -> int:
        """Files that other nodes keep now."""
        return len(self._placed)

    def has(self, node: Node) -> bool:
        """Whether a node that answers keeps a file with its last content, under its path."""
        placed = self._placed.get(node.object)
        if placed is None or placed.client.breaker.is_failing:
            return False
        seq, _ = self._object_table.states.content(node.object)
        return placed.seq == seq and placed.record == self._record(node, placed.record.digest)

    def _record(self, node: Node, digest: str) -> Record:
        return Record(
            token=self._token,
            number=node.object,
            size=node.size,
            digest=digest,
            path=self._names.visible_path(node.ino),
            mode=mode_of(node),
            uid=node.uid,
            gid=node.gid,
            mtime_ns=max(node.mtime_ns, 0),
        )

    async def synced(self, ino: Ino) -> None:
        """Sends a file that was made safe here, unless the source has it."""
        node = self._names.node(ino)
        if node is not None and self._is_only_here(node):
            await self._send(node)

    def moved(self, op: Op) -> None:
        """A change of names was recorded."""
        if op.kind not in ("rename", "link", "unlink"):
            return
        if op.object:
            if op.object in self._wanted:
                self._moved.add(op.object)
        elif op.kind == "rename" and self._wanted:
            self._renamed.add(op.path)

    async def renamed(self) -> None:
        """Tells other nodes new paths of the files that they keep."""
        if self._renamed:
            await self._find_moved()
        for number in list(self._moved):
            node, placed = self._object_table.node(number), self._placed.get(number)
            seq, _ = self._object_table.states.content(number)
            if node is None or placed is None or placed.seq != seq or not self._is_only_here(node):
                # It is sent under its present path, if at all.
                self._moved.discard(number)
                continue
            await self._send(node)
            if self.has(node):
                self._moved.discard(number)

    async def _find_moved(self) -> None:
        """Finds the files beneath directories that were renamed."""
        above = tuple(path + b"/" for path in self._renamed)
        self._renamed.clear()
        for count, (number, placed) in enumerate(list(self._placed.items())):
            if placed.record.path.startswith(above):
                self._moved.add(number)
            if count % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _is_only_here(self, node: Node) -> bool:
        if not (node.object and node.names) or node.size < 0:
            return False
        return self._drained.durable(node) in (b"local", b"peer")

    async def _send(self, node: Node) -> None:
        """Lets another node keep a file, unless one does, or it was sent a short time ago."""
        number = node.object
        # It stays wanted until this ends.
        self._wanted[number] = None
        async with self._turns[number]:
            if (
                self._lease is None
                or self._lease.trouble
                or not self._is_only_here(node)
                or self.has(node)
            ):
                return
            now, placed = trio.current_time(), self._placed.get(number)
            seq, _ = self._object_table.states.content(number)
            if placed is not None and placed.seq == seq:
                # No bytes move.
                digest = placed.record.digest
            elif now < self._due_s.get(number, -math.inf):
                return
            else:
                try:
                    path = object_path(self._objects, number)
                    digest = await self._threads.run(digest_of_path, path)
                except OSError:
                    return
            record = self._record(node, digest)
            try:
                found = await self._holding.ask(record)
            except BaseException:
                # One of them may have got it.
                self._stale.update(dict.fromkeys(self._holding.members, self._holding.newest()))
                raise
            for client in found.doubtful:
                self._leave(client, number)
            if found.client is None:
                self.not_taken += 1
                self._due_s[number] = now + _PAUSE_S
                return
            self.sent += 1
            self._due_s[number] = now + (_AGAIN_S if record.size > _SMALL else 0.0)
            if placed is not None and placed.client is not found.client:
                self._leave(placed.client, number)
            self._stale[found.client] = self._holding.newest()
            self._left.get(found.client, {}).pop(number, None)
            self._placed[number] = _Placed(found.client, seq, record)

    def _leave(self, client: PeerClient, number: int) -> None:
        """A node need not keep an object any more, if it does."""
        version = self._holding.newest()
        self._stale[client] = self._left.setdefault(client, {})[number] = version

    async def run(self) -> None:
        """Follows the changes of the files that were sent, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Sends what is due, and lets other nodes remove what they need not keep."""
        await self.renamed()
        for number in list(islice(self._wanted, _AT_ONCE)):
            if number in self._wanted:
                # The next look begins with others.
                del self._wanted[number]
                self._wanted[number] = None
                await self._follow(number)
        if (now := trio.current_time()) >= self._check_s:
            await self._check()
            self._check_s = now + CHECK_S
        await self._remove_left()
        is_all_drained = not self._wanted and not self._drain.queue.last_seq
        if self._stale and is_all_drained and now >= self._clear_s:
            await self._clear()
            self._clear_s = now + _PAUSE_S if self._stale else -math.inf

    async def _clear(self) -> None:
        """Lets the nodes that may keep any file remove all of them. They are asked at the same
        time: those that do not answer must not delay the others."""
        # A file that is sent meanwhile is later than what is removed.
        version = self._holding.newest()
        async with trio.open_nursery() as nursery:
            for client, number in self._stale.items():
                nursery.start_soon(self._clear_at, client, number, version)

    async def _clear_at(self, client: PeerClient, number: int, version: int) -> None:
        is_clear = await self._holding.forget(client, self._token, 0, version)
        if is_clear and self._stale.get(client) == number:
            del self._stale[client]
            self._left.pop(client, None)

    async def _remove_left(self) -> None:
        """Lets nodes remove what they need not keep; those that do not answer are asked again."""
        for client, numbers in list(self._left.items()):
            # An object that no other node has taken stays.
            free = (
                each
                for each in numbers.items()
                if each[0] not in self._wanted or each[0] in self._placed
            )
            for number, version in list(islice(free, _AT_ONCE)):
                if not await self._holding.forget(client, self._token, number, version):
                    break
                if numbers.get(number) == version:
                    del numbers[number]
            if not numbers:
                self._left.pop(client, None)

    async def _follow(self, number: int) -> None:
        node = self._object_table.node(number)
        if node is not None and self._is_only_here(node):
            await self._send(node)
        elif self._turns[number].locked():
            # It is being sent.
            return
        elif node is None or not node.names or self._drained.is_clean(node):
            self._wanted.pop(number, None)
            self._moved.discard(number)
            self._turns.pop(number, None)
            self._due_s.pop(number, None)
            placed = self._placed.pop(number, None)
            if placed is not None:
                self._leave(placed.client, number)

    async def _check(self) -> None:
        """Asks each node that keeps files for one of them: it may have lost them, or be gone."""
        of: dict[PeerClient, list[int]] = {}
        for number, placed in self._placed.items():
            of.setdefault(placed.client, []).append(number)
        for client, numbers in of.items():
            record = self._placed[random.choice(numbers)].record
            if not await self._holding.is_held(client, record):
                for number in numbers:
                    known = self._placed.get(number)
                    if known is not None and known.client is client:
                        del self._placed[number]
                        self._leave(client, number)

    async def finish(self) -> None:
        """At the end of the mount: lets other nodes remove the files if the source has all."""
        if not self._drain.queue.last_seq:
            with trio.move_on_after(_END_S, shield=True):
                await self._clear()
                # A node that has said that it keeps a later version.
                await self._clear()
