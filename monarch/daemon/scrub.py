"""Reads every copy repeatedly, slowly, and removes copies that differ from their records.

A disk may return other bytes than were written, without an error. To find that before a reader
does, copies are read at ``limits.scrub_bandwidth``, one small piece at a time, and compared with
their records. The scrub keeps no state: each daemon begins at a random place, so that mounts with a
short life still have all copies read in the course of time.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from monarch.placement.residency import Residency
from monarch.posix.thread_pool import ThreadPool, batches
from monarch.telemetry.report import ScrubReport
from monarch.text import GiB, KiB
from monarch.tiers.partial import verify_part
from monarch.tiers.records import Record, Records
from monarch.tiers.tier import Tier
from monarch.tiers.verify import GOOD, MISSING, PIECE_BYTES, SEAL, Step, Verdict, turn, verify_copy
from monarch.transfer.pace import TokenBucket
from monarch.types import ROOT_INO, Ino
from monarch.vfs.copies import Copies
from monarch.vfs.parts import PartialCopies

# The cost of a file besides its bytes: a hard disk reads this much in the time of a seek.
_FILE_BYTES = 64 * KiB
# The least cost of a round, so that a few copies are not read without a pause.
_ROUND_BYTES = 1 * GiB
# Files whose records are looked up before the event loop runs other tasks.
_BATCH = 64
# Errors by a lack of resources, or of a missing tier, which do not mean that a copy is damaged.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOTDIR})


class _Question(NamedTuple):
    ino: Ino
    record: Record | None


# A piece that was read, or the verdict on a copy.
_Step = Step | tuple[_Question, Verdict]


@dataclass(kw_only=True, eq=False)
class Scrub:
    """``bandwidth`` in bytes per second, 0: no scrub. ``run`` is its task.

    ``is_read`` tells whether copies in a tier are to be read, or skipped for now.
    """

    tiers: Sequence[Tier]
    is_read: Callable[[int], bool]
    records: Records
    residency: Residency
    copies: Copies
    parts: PartialCopies
    threads: ThreadPool
    bandwidth: int

    def __post_init__(self) -> None:
        self._bucket = TokenBucket(self.bandwidth, PIECE_BYTES)
        self._done = self._total = self._bytes = self._rounds = self._found = 0
        self._started_ns = self._last_round_ns = 0

    def report(self) -> ScrubReport:
        return ScrubReport(
            enabled=self.bandwidth > 0,
            done_files=self._done,
            total_files=self._total,
            bytes=self._bytes,
            rounds=self._rounds,
            found=self._found,
            started_ns=self._started_ns,
            last_round_ns=self._last_round_ns,
        )

    async def run(self) -> None:
        """Scrubs all copies repeatedly until cancelled."""
        start = Ino(random.randint(ROOT_INO, max(ROOT_INO, self.residency.entries)))
        while self.bandwidth:
            await self.go_round(start)
            start = ROOT_INO

    async def go_round(self, start: Ino) -> None:
        """Reads every copy once, from the inode number ``start`` on, then those before it."""
        self._started_ns = time.time_ns()
        self._done = 0
        self._total = sum(self.residency.resident_files(tier.number) for tier in self.tiers)
        cost = 0
        for first in (True, False):
            for tier in self.tiers:
                for batch in batches(self._questions(tier, start, behind=first), _BATCH):
                    cost += await self._look_at(tier, batch)
        for tier in self.tiers:
            for ino in self.parts.accounts.inos(tier.number):
                cost += await self._look_at_part(tier, ino)
        await self._pay(_ROUND_BYTES - cost)
        self._rounds += 1
        self._last_round_ns = time.time_ns()

    def _questions(self, tier: Tier, start: Ino, *, behind: bool) -> Iterator[_Question]:
        for ino in self.residency.resident_in(tier.number):
            if (ino >= start) == behind and self.is_read(tier.number):
                yield _Question(ino, self.records.get(ino))

    async def _look_at(self, tier: Tier, batch: Sequence[_Question]) -> int:
        steps = _steps(tier, batch)
        cost = 0
        while done := await self.threads.run(turn, steps, _cost):
            nbytes = sum(step.nbytes for step in done if isinstance(step, Step))
            self._bytes += nbytes
            judged = [step for step in done if not isinstance(step, Step)]
            for question, verdict in judged:
                await self._judge(tier, question, verdict)
            spent = nbytes + _FILE_BYTES * len(judged)
            cost += spent
            await self._pay(spent)
        return cost

    async def _look_at_part(self, tier: Tier, ino: Ino) -> int:
        """Compares the granules of a partial copy with their digests."""
        steps = _part_steps(tier, ino)
        cost = 0
        while self.is_read(tier.number) and (done := await self.threads.run(turn, steps, _cost)):
            nbytes = sum(step.nbytes for step in done if isinstance(step, Step))
            self._bytes += nbytes
            for verdict in (step for step in done if isinstance(step, Verdict)):
                # One that is missing was dropped or completed, or its next open misses it.
                wrong = verdict.kind not in ("", MISSING) and verdict.error not in _SCARCE
                if wrong:
                    await self.parts.settled(ino)
                if wrong and self.is_read(tier.number):
                    failure = OSError(verdict.error, f"found by scrub: {verdict.what}")
                    self._found += self.parts.drop_damaged(ino, tier.number, failure)
            spent = nbytes + _FILE_BYTES
            cost += spent
            await self._pay(spent)
        return cost

    async def _pay(self, nbytes: int) -> None:
        if nbytes > 0:
            await trio.sleep(self._bucket.take(nbytes, trio.current_time()))

    async def _judge(self, tier: Tier, question: _Question, verdict: Verdict) -> None:
        ino, record = question.ino, question.record
        if self.records.get(ino) != record:
            self._done += 1
            return  # the copy was evicted, replaced or renewed meanwhile
        if verdict.kind == SEAL and record is not None:
            try:
                await self.threads.run(tier.verify, ino, record.identity, record.digest)
                verdict = GOOD
            except OSError as error:
                verdict = Verdict(SEAL, error.strerror or "", error.errno or errno.EIO)
        self._done += 1
        if verdict.kind == MISSING and await self.threads.run(tier.has, ino):
            return  # a new copy was made meanwhile
        if self.residency.tier_of(ino) != tier.number or self.records.get(ino) != record:
            return  # the copy was evicted or replaced meanwhile
        if record is not None and not verdict.kind:
            self.copies.confirm(ino, record)
        elif verdict.error not in _SCARCE and self.is_read(tier.number):
            failure = OSError(verdict.error, f"found by scrub: {verdict.what}")
            self._found += await self.copies.drop_damaged(ino, tier.number, failure)


def _steps(tier: Tier, batch: Sequence[_Question]) -> Iterator[_Step]:
    for question in batch:
        verdict = Verdict("record", "it has no record")
        if question.record is not None:
            verdict = yield from verify_copy(
                tier.directory, question.ino, question.record, seals=tier.seals, whole=True
            )
        yield question, verdict


def _part_steps(tier: Tier, ino: Ino) -> Iterator[Step | Verdict]:
    yield (yield from verify_part(tier.directory, ino, None, whole=True))


def _cost(step: _Step | Verdict) -> int:
    return step.nbytes if isinstance(step, Step) else _FILE_BYTES
