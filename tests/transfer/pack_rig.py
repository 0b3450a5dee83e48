"""A mount of a pack below the kernel, in virtual time, with a count of the reads of each chunk."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monarch.config.settings import ForesightSettings
from monarch.foresight.announced import Announcer, OrderKey
from monarch.foresight.messages import Piece
from monarch.namespace.build import write
from monarch.packmount.chunks import PackChunks
from monarch.packmount.source import PackSource
from monarch.packmount.tree import PackTree
from monarch.packs.build import Parameters, build
from monarch.packs.pack import Pack
from monarch.placement.policy import NoEvict, Policy
from monarch.tiers.source import Source
from monarch.transfer.chunks import ChunkReads
from monarch.transfer.queue import Buffer
from monarch.types import Ino
from tests.transfer.ahead_rig import AheadRig


def packed(source: Path, pack: Path, *, chunk_bytes: int, order: str = "path") -> Path:
    """Packs a tree. With the order "path" the chunks have the files in the order of their paths."""
    parameters = Parameters(seed=1, order=order, chunk_bytes=chunk_bytes)
    build(source, pack, parameters, jobs=1, progress=lambda *step: None)
    return pack


class CountingPack(PackSource):
    """``reads`` has the pieces that were read of each chunk, ``nbytes`` their bytes in all."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.reads: Counter[int] = Counter()
        self.nbytes = 0
        self.failing: set[int] = set()

    def _read(self, chunk: int, offset: int, size: int) -> tuple[bytes | bytearray, int, int]:
        self.reads[chunk] += 1
        if chunk in self.failing:
            raise OSError(5, os.strerror(5))
        raw, reads, opens = super()._read(chunk, offset, size)
        self.nbytes += len(raw)
        return raw, reads, opens


class PackRig(AheadRig):
    """A rig over a pack. The window has memory of its own."""

    source: CountingPack
    foreseeing = ForesightSettings(fill=False)

    def __init__(self, root: Path, source: Path, *, in_tier: float = 1.0, **settings: Any) -> None:
        """``in_tier``: the share of the bytes of the pack that the tier has room for."""
        with Pack.open(os.fsencode(source)) as pack:
            capacity = int(in_tier * pack.info.bytes)
        super().__init__(root, source, capacity=capacity, **settings)
        self.ahead._foreseen = self.foresight
        self.foresight.on_more(self.ahead.wake)
        assert self.chunks is not None
        self.chunks.fetched = self.foresight.fetched

    def announce(self, order: Sequence[Ino]) -> OrderKey:
        """A process announces the order in which it will open files."""
        announced = self.foresight.announced
        announcer = Announcer(0, 0, 0)
        key = announced.begin(announcer, 1)
        announced.extend(announcer, Piece(1, 0, array("I", order)))
        self.foresight.wake()
        return key

    def _policy(self, policy: Policy | None, capacity: int) -> Policy:
        return NoEvict(self.snapshot.curve(), [capacity], self.source.files.bucket)

    def _opened_source(self, source: Path) -> Source:
        return CountingPack(os.fsencode(source))

    def _make_snapshot(self, source: Path, target: Path) -> None:
        with Pack.open(os.fsencode(source)) as pack:
            tree = PackTree(pack)
            write(
                tree,
                target,
                source=os.fsencode(source),
                mode=None,
                progress=None,
                expected=None,
                snapshot_id=tree.id,
                buckets=tree.buckets,
            )

    def _window_buffer(self, most: int) -> Buffer:
        return Buffer(most)

    def _chunk_reads(self) -> ChunkReads:
        self.of_pack = PackChunks(self.source, self.snapshot, self.residency)
        return ChunkReads(
            self.of_pack,
            self.controller,
            self.engine,
            self.reader,
            self.foresight.announced,
        )

    def by_chunk(self) -> list[list[Ino]]:
        """The files of each chunk; without those that have a copy."""
        members = map(self.of_pack.missing, range(self.source.info.chunks))
        return [[member.ino for member in each] for each in members]
