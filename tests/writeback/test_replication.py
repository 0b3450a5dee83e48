"""Written files that another node keeps: when they are sent, and when they are called so."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from monarch.peers.held import Record
from monarch.peers.holding import Placed
from monarch.writeback import replication
from monarch.writeback.objects import object_path
from monarch.writeback.op import Op
from monarch.writeback.replication import Replication

TOKEN = "0123456789abcdef"
LARGE = 3 << 20


class _Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.breaker = SimpleNamespace(is_failing=False)


class Rig:
    """A file with the object 7 and the content 1, and two nodes that may keep it."""

    def __init__(self, directory: Path, clock: MockClock) -> None:
        self._clock = clock
        self.content, self.path, self.base, self.waiting = 1, b"ckpt/a", b"local", 1
        self.node: Any = SimpleNamespace(
            object=7,
            ino=70,
            names={(1, b"a"): None},
            size=0,
            mode=0o100644,
            hidden_bits=0,
            uid=1,
            gid=2,
            mtime_ns=5,
        )
        self.lease = SimpleNamespace(trouble="")
        self.nodes = [_Node(f"n{number}") for number in (1, 2)]
        self.takers = self.nodes[:1]
        self.asked: list[Record] = []
        # Removals, by node and object, and those that were requested.
        self.forgotten: list[tuple[str, int]] = []
        self.requested: list[tuple[str, int]] = []
        self.is_held = True
        # Nodes that may have got the next file that is sent, and those that do not answer.
        self.doubtful: list[_Node] = []
        self.silent: set[str] = set()
        self.newest = 0
        # Called with each object whose file is requested.
        self.looked_up: Callable[[int], None] = lambda number: None
        # Run in the middle of a request.
        self.while_asked: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.while_cleared: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._object = object_path(directory, 7)
        self._object.parent.mkdir()
        self.write(1000)
        rig = self

        class Holding:
            members = rig.nodes

            async def ask(self, record: Record) -> Any:
                rig.asked.append(record)
                await rig.while_asked()
                client = rig.takers[0] if rig.takers else None
                doubtful, rig.doubtful = rig.doubtful, []
                return Placed(cast(Any, client), cast(Any, doubtful))

            def newest(self) -> int:
                rig.newest += 1
                return rig.newest

            async def is_held(self, client: Any, record: Record) -> bool:
                return rig.is_held

            async def forget(self, client: Any, token: str, number: int, version: int) -> bool:
                if number == 0:
                    await rig.while_cleared()
                rig.requested.append((client.name, number))
                if client.name in rig.silent:
                    return False
                rig.forgotten.append((client.name, number))
                return True

        self.made = Replication(
            cast(Any, SimpleNamespace(node=lambda ino: self.node, visible_path=self.visible_path)),
            cast(
                Any,
                SimpleNamespace(
                    node=self._node_of,
                    states=SimpleNamespace(content=lambda number: (self.content, True)),
                ),
            ),
            cast(Any, SimpleNamespace(durable=self.durable, is_clean=self.is_clean)),
            cast(Any, self),
            cast(Any, self.lease),
            cast(Any, Holding()),
            directory,
            TOKEN,
        )

    def _node_of(self, number: int) -> Any:
        self.looked_up(number)
        return self.node

    @property
    def queue(self) -> Any:
        return SimpleNamespace(last_seq=self.waiting)

    def visible_path(self, ino: int) -> bytes:
        return self.path

    def durable(self, node: Any) -> bytes:
        return b"peer" if self.base == b"local" and self.made.has(node) else self.base

    def is_clean(self, node: Any) -> bool:
        return self.base == b"source"

    def write(self, size: int) -> None:
        self._object.write_bytes(os.urandom(size))
        self.node.size = size
        self.content += 1

    async def later(self, seconds: float) -> None:
        self._clock.jump(seconds)
        await self.made.look()

    async def fsync(self) -> bytes:
        await self.made.synced(70)
        return self.durable(self.node)


def play(directory: Path, scene: Callable[[Rig], Awaitable[None]]) -> None:
    """Plays a scene in virtual time, which only ``Rig.later`` moves."""
    clock = MockClock()

    async def main() -> None:
        await scene(Rig(directory, clock))

    trio.run(main, clock=clock)


def test_a_file_is_sent_at_its_fsync_and_forgotten_when_the_source_has_it(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        assert await rig.fsync() == b"peer"
        assert await rig.fsync() == b"peer"
        (record,) = rig.asked
        assert (record.path, record.mode, record.uid, record.gid) == (b"ckpt/a", 0o644, 1, 2)
        rig.write(2000)
        assert rig.durable(rig.node) == b"local"
        rig.base, rig.waiting = b"source", 0
        await rig.later(2)
        assert sorted(rig.forgotten) == [("n1", 0), ("n1", 7), ("n2", 0)]
        assert rig.made.kept == 0

    play(tmp_path, scene)


def test_a_node_gets_a_new_name_without_another_digest(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.write(LARGE)
        assert await rig.fsync() == b"peer"
        rig.path = b"ckpt/final"
        assert rig.durable(rig.node) == b"local"
        rig.made.moved(Op(kind="rename", path=b"ckpt/a", to=b"ckpt/final", object=7))
        await rig.made.renamed()
        assert rig.durable(rig.node) == b"peer"
        first, second = rig.asked
        assert (first.digest, second.path) == (second.digest, b"ckpt/final")
        # Without an fsync the task does it.
        rig.path = b"ckpt/again"
        await rig.later(2)
        assert rig.durable(rig.node) == b"peer"

    play(tmp_path, scene)


def test_a_long_file_is_not_sent_at_each_fsync(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.write(LARGE)
        assert await rig.fsync() == b"peer"
        for _ in range(5):
            rig.write(LARGE)
            assert await rig.fsync() == b"local"
        assert len(rig.asked) == 1
        await rig.later(11)
        assert rig.durable(rig.node) == b"peer"
        assert len(rig.asked) == 2

    play(tmp_path, scene)


def test_no_node_takes_a_file_at_first(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.takers = []
        assert await rig.fsync() == b"local"
        assert rig.made.not_taken == 1
        rig.takers = rig.nodes[1:]
        await rig.later(6)
        assert rig.durable(rig.node) == b"peer"

    play(tmp_path, scene)


def test_a_node_that_fails_or_has_lost_a_file_does_not_count(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        assert await rig.fsync() == b"peer"
        rig.takers = []
        rig.nodes[0].breaker.is_failing = True
        assert rig.durable(rig.node) == b"local"
        rig.takers = rig.nodes[1:]
        await rig.later(10)
        assert rig.durable(rig.node) == b"peer"
        assert rig.forgotten == [("n1", 7)]
        # It answers, and has lost its disk.
        rig.is_held, rig.takers = False, []
        await rig.later(6)
        assert rig.durable(rig.node) == b"local" and rig.made.kept == 0

    play(tmp_path, scene)


def test_a_directory_above_is_renamed(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        assert await rig.fsync() == b"peer"
        rig.path = b"final/a"
        rig.made.moved(Op(kind="rename", path=b"other", to=b"another"))
        await rig.made.renamed()
        assert rig.durable(rig.node) == b"local"
        rig.made.moved(Op(kind="rename", path=b"ckpt", to=b"final"))
        await rig.made.renamed()
        assert rig.durable(rig.node) == b"peer"

    play(tmp_path, scene)


def test_an_fsync_of_a_directory_looks_only_at_files_with_new_names(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.fsync()
        # As many files that other nodes keep.
        placed = rig.made._placed[7]
        rig.made._placed |= dict.fromkeys(range(100, 1100), placed)
        rig.made._wanted |= dict.fromkeys(range(100, 1100))
        asked_for: list[int] = []
        rig.looked_up = asked_for.append
        for _ in range(20):
            await rig.made.renamed()
        assert not asked_for
        rig.made.moved(Op(kind="rename", path=b"ckpt/a", to=b"ckpt/b", object=7))
        await rig.made.renamed()
        assert set(asked_for) == {7}

    play(tmp_path, scene)


def test_a_look_visits_a_limited_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "_AT_ONCE", 10)

    async def scene(rig: Rig) -> None:
        await rig.fsync()
        rig.made._wanted |= dict.fromkeys(range(100, 125))
        seen: list[int] = []
        rig.looked_up = seen.append
        for look in range(1, 4):
            await rig.made.look()
            assert len(set(seen)) == min(10 * look, 26)

    play(tmp_path, scene)


@pytest.mark.fault("N7")
def test_a_node_that_may_keep_an_earlier_version_removes_it(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        # The first node was too slow, so the second one was asked.
        rig.doubtful, rig.takers, rig.silent = rig.nodes[:1], rig.nodes[1:], {"n1"}
        assert await rig.fsync() == b"peer"
        await rig.later(1)
        assert rig.forgotten == []
        rig.silent.clear()
        await rig.later(1)
        assert rig.forgotten == [("n1", 7)]
        await rig.later(1)
        assert rig.forgotten == [("n1", 7)]

    play(tmp_path, scene)


@pytest.mark.fault("N7")
def test_a_node_removes_nothing_that_no_other_node_has(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        assert await rig.fsync() == b"peer"
        # It does not answer for a moment, and no other node takes the file.
        rig.is_held, rig.takers = False, []
        await rig.later(6)
        assert rig.durable(rig.node) == b"local"
        await rig.later(1)
        assert rig.forgotten == []
        # It takes it again, and need not remove it.
        rig.takers = rig.nodes[:1]
        rig.is_held = True
        await rig.later(6)
        await rig.later(1)
        assert (rig.durable(rig.node), rig.forgotten) == (b"peer", [])

    play(tmp_path, scene)


def test_a_file_that_is_sent_while_other_nodes_remove_all_is_removed_later(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.fsync()

        async def again() -> None:
            rig.base, rig.waiting = b"local", 1
            rig.write(2000)
            assert await rig.fsync() == b"peer"

        rig.base, rig.waiting, rig.while_cleared = b"source", 0, again
        await rig.later(2)
        assert sorted(rig.forgotten) == [("n1", 0), ("n1", 7), ("n2", 0)]
        assert rig.durable(rig.node) == b"peer"
        rig.base, rig.waiting, rig.while_cleared = b"source", 0, trio.lowlevel.checkpoint
        await rig.later(6)
        # The other node has got nothing since.
        assert sorted(rig.forgotten) == [("n1", 0)] * 2 + [("n1", 7)] * 2 + [("n2", 0)]

    play(tmp_path, scene)


@pytest.mark.fault("N7")
def test_nodes_are_asked_at_the_same_time_to_remove_all(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        begun, others = 0, list[int]()

        async def takes_long() -> None:
            nonlocal begun
            begun += 1
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            others.append(begun)

        rig.base, rig.waiting, rig.while_cleared = b"source", 0, takes_long
        await rig.later(2)
        assert others == [2, 2]
        assert sorted(rig.forgotten) == [("n1", 0), ("n2", 0)]

    play(tmp_path, scene)


def test_a_file_that_the_source_gets_while_it_is_sent_is_forgotten(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        async def drained() -> None:
            rig.base, rig.waiting = b"source", 0
            await rig.later(2)
            assert not rig.forgotten

        rig.while_asked = drained
        await rig.fsync()
        await rig.later(2)
        assert sorted(rig.forgotten) == [("n1", 0), ("n1", 7), ("n2", 0)] and rig.made.kept == 0

    play(tmp_path, scene)


def test_without_a_lease_at_the_source_nothing_is_sent(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.lease.trouble = "EROFS"
        assert await rig.fsync() == b"local"
        assert not rig.asked
        rig.lease.trouble = ""
        await rig.later(2)
        assert rig.durable(rig.node) == b"peer"

    play(tmp_path, scene)


def test_a_mount_removes_at_its_start_what_an_earlier_one_has_left(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        rig.base, rig.waiting, rig.silent = b"source", 0, {"n2"}
        for _ in range(3):
            await rig.later(1)
        assert sorted(rig.requested) == [("n1", 0), ("n2", 0)] and rig.forgotten == [("n1", 0)]
        rig.silent.clear()
        for _ in range(2):
            await rig.later(6)
        # A node that has answered is not asked again.
        assert sorted(rig.requested) == [("n1", 0), ("n2", 0), ("n2", 0)]
        assert rig.forgotten == [("n1", 0), ("n2", 0)]

    play(tmp_path, scene)


def test_the_end_of_a_mount_leaves_nothing_on_other_nodes(tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.fsync()
        await rig.made.finish()
        assert not rig.forgotten, "the source lacks it"
        rig.waiting = 0
        await rig.made.finish()
        assert sorted(rig.forgotten) == [("n1", 0), ("n2", 0)]

    play(tmp_path, scene)
