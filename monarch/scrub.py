"""Reads every copy again and again, slowly, and drops those that are not what was recorded.

A disk may return other bytes than were written, and say nothing. Whoever finds that out first
should not be the job: the copies are read at ``limits.scrub_bandwidth`` and compared with their
records by size, seal and digest. A damaged one is dropped, and its next reader has it fetched anew.

One small piece at a time, in a thread of its own, so that a reader waits for one piece at most.
Nothing is kept between two daemons: each begins at a place by chance, so that a mount that never
lives long enough for a round still has all its copies read in the course of time.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import trio

from monarch.placement.residency import Residency
from monarch.report import ScrubReport
from monarch.threads import Threads, batches
from monarch.tiers.directory import Tier
from monarch.tiers.examine import GOOD, MISSING, PIECE_BYTES, SEAL, Verdict, examine
from monarch.tiers.records import Record, Records
from monarch.transfer.throttle import TokenBucket
from monarch.types import ROOT_INO, Ino
from monarch.units import GiB, KiB
from monarch.vfs.filesystem import FileSystem

# What a file costs beside its bytes: a disk that turns seeks for as long as it reads this.
_FILE_BYTES = 64 * KiB
# What a round costs at least, so that few copies are not read without end.
_ROUND_BYTES = 1 * GiB
# Files whose records are looked up in one go of the event loop.
_BATCH = 64
# What this process or machine is short of, or a tier that is gone, says nothing of a copy.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class _Question:
    ino: Ino
    record: Record | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """The bytes of one turn, and the copies that it has come to the end of."""

    nbytes: int
    judged: Sequence[tuple[_Question, Verdict]]


class Scrub:
    """``bandwidth`` in bytes per second, 0: nothing is done. ``run`` is its life.

    ``is_read`` tells whether copies in a tier are to be tried, or passed by for now.
    """

    def __init__(
        self,
        *,
        tiers: Sequence[Tier],
        is_read: Callable[[int], bool],
        records: Records,
        residency: Residency,
        filesystem: FileSystem,
        threads: Threads,
        bandwidth: int,
    ) -> None:
        self._tiers = tiers
        self._is_read = is_read
        self._records = records
        self._residency = residency
        self._filesystem = filesystem
        self._threads = threads
        self._bandwidth = bandwidth
        self._bucket = TokenBucket(bandwidth, PIECE_BYTES)
        self._done = self._total = self._bytes = self._rounds = self._found = 0
        self._started_ns = self._last_round_ns = 0

    def report(self) -> ScrubReport:
        return ScrubReport(
            enabled=self._bandwidth > 0,
            done_files=self._done,
            total_files=self._total,
            bytes=self._bytes,
            rounds=self._rounds,
            found=self._found,
            started_ns=self._started_ns,
            last_round_ns=self._last_round_ns,
        )

    async def run(self) -> None:
        """Go round until cancelled."""
        start = Ino(random.randint(ROOT_INO, max(ROOT_INO, self._residency.entries)))
        while self._bandwidth:
            await self.go_round(start)
            start = ROOT_INO

    async def go_round(self, start: Ino) -> None:
        """Look at every copy once, from the inode number ``start`` on, then at those before."""
        self._started_ns = time.time_ns()
        self._done = 0
        self._total = sum(self._residency.resident_files(tier.number) for tier in self._tiers)
        cost = 0
        for first in (True, False):
            for tier in self._tiers:
                for batch in batches(self._questions(tier, start, behind=first), _BATCH):
                    cost += await self._look_at(tier, batch)
        await self._pay(_ROUND_BYTES - cost)
        self._rounds += 1
        self._last_round_ns = time.time_ns()

    def _questions(self, tier: Tier, start: Ino, *, behind: bool) -> Iterator[_Question]:
        for ino in self._residency.resident_in(tier.number):
            if (ino >= start) == behind and self._is_read(tier.number):
                yield _Question(ino, self._records.get(ino))

    async def _look_at(self, tier: Tier, batch: Sequence[_Question]) -> int:
        steps = _steps(tier, batch)
        cost = 0
        while True:
            turn = await self._threads.run(_turn, steps)
            if turn is None:
                return cost
            self._bytes += turn.nbytes
            for question, verdict in turn.judged:
                await self._judge(tier, question, verdict)
            spent = turn.nbytes + _FILE_BYTES * len(turn.judged)
            cost += spent
            await self._pay(spent)

    async def _pay(self, nbytes: int) -> None:
        if nbytes > 0:
            await trio.sleep(self._bucket.take(nbytes, trio.current_time()))

    async def _judge(self, tier: Tier, question: _Question, verdict: Verdict) -> None:
        ino, record = question.ino, question.record
        if verdict.kind == SEAL and record is not None:
            try:
                await self._threads.run(tier.verify, ino, record.identity, record.digest)
                verdict = GOOD
            except OSError as error:
                verdict = Verdict(SEAL, error.strerror or "", error.errno or errno.EIO)
        self._done += 1
        if verdict.kind == MISSING and await self._threads.run(tier.has, ino):
            return  # made anew meanwhile
        if self._residency.tier_of(ino) != tier.number or self._records.get(ino) != record:
            return  # evicted, or made anew, meanwhile
        if record is not None and not verdict.kind:
            self._filesystem.confirm_copy(ino, record)
        elif verdict.error not in _SCARCE and self._is_read(tier.number):
            failure = OSError(verdict.error, f"found by scrub: {verdict.what}")
            self._found += await self._filesystem.drop_damaged(ino, tier.number, failure)


def _steps(tier: Tier, batch: Sequence[_Question]) -> Iterator[int | tuple[_Question, Verdict]]:
    """The bytes of each piece that was read, and the verdict on each copy."""
    for question in batch:
        verdict = Verdict("record", "it has no record")
        if question.record is not None:
            for step in examine(
                tier.directory, question.ino, question.record, seals=tier.seals, whole=True
            ):
                if isinstance(step, int):
                    yield step
                else:
                    verdict = step
        yield question, verdict


def _turn(steps: Iterator[int | tuple[_Question, Verdict]]) -> _Turn | None:
    """Go on until a piece's worth of bytes was read; None at the end. Waits for the disk."""
    nbytes = 0
    judged: list[tuple[_Question, Verdict]] = []
    for step in steps:
        if isinstance(step, int):
            nbytes += step
        else:
            judged.append(step)
        if nbytes + _FILE_BYTES * len(judged) >= PIECE_BYTES:
            break
    return _Turn(nbytes, judged) if nbytes or judged else None
