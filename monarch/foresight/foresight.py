"""Foresees the next reads: the only interface of this package for the rest of the daemon.

Each open is given to ``opened`` in its order, with the number of its *job*: processes of one job
read one data set together. ``next`` returns the files that should be fetched ahead, without those
that ``has_copy`` knows. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Protocol, TypeAlias

import numpy as np

from monarch.config.settings import ForesightSettings
from monarch.errors import SnapshotError
from monarch.foresight import marks
from monarch.foresight.announced import Announcements, Limits
from monarch.foresight.job import Job
from monarch.foresight.marks import FETCHED, GIVEN, GONE, READ, Marks
from monarch.foresight.recognition import LEAST_FILES, WINDOW
from monarch.foresight.stream import Stream, Subtree
from monarch.telemetry.foresight_report import ForesightReport, StreamReport
from monarch.types import ROOT_INO, Attributes, Ino

# Jobs that are known at the same time, streams of each, and subtrees of all: the job that was idle
# for longest gives way.
_MOST_JOBS = 64
_MOST_STREAMS = 4
_MOST_SUBTREES = 16
# Files of an announced order that are given out and not opened yet. Up to this part of them it goes
# before all that is recognised; then it takes turns with random orders of other jobs.
_LEAD = 4096
_NEAR_PART = 16
# A job that has opened no file for so many opens of all jobs has paused.
_PAUSE = 4096
# Files with copies that are passed before other tasks run: an order may have millions of them.
_MOST_PASSED = 1024
# Fewer opens than this cost less one by one.
_MANY = 8
# The share of a window that must be beneath one directory: the rest may be other programs.
_MAJORITY = 0.9
# The characters of a path in a report, which may have 256 paths: messages to clients are limited.
_LONGEST = 256


# Returns up to so many files to fetch.
_Ask: TypeAlias = Callable[[int], list[Ino]]


class Names(marks.Names, Protocol):
    """What is needed of the snapshot. ``level``: the entries that are ``depth`` levels beneath a
    directory; their numbers are consecutive. ``count_files``: the regular files among consecutive
    entries, each at its first name only."""

    def parent(self, slot: Ino) -> Ino: ...
    def path(self, ino: Ino) -> bytes: ...
    def attributes(self, ino: Ino) -> Attributes: ...
    def level(self, directory: Ino, depth: int) -> range: ...
    def count_files(self, slots: range) -> int: ...


class Foresight:
    """Belongs to the event loop; no method waits. ``has_copy`` returns whether a file needs no
    fetch, ``have_copies`` whether all of some files have copies."""

    def __init__(
        self,
        names: Names,
        settings: ForesightSettings,
        has_copy: Callable[[Ino], bool] = lambda ino: False,
        have_copies: Callable[[range], bool] = lambda files: False,
    ) -> None:
        self._has_copy, self._have_copies = has_copy, have_copies
        self._names = names
        self._settings = settings
        self.announced = Announcements(Limits(has_positions=settings.belady))
        self._wake: Callable[[], None] = _nothing
        self._skewed_open: Callable[[Ino], None] = _ignore
        # The jobs that are known, by number; 0: unknown processes.
        self.jobs: OrderedDict[int, Job] = OrderedDict()
        self._subtrees: dict[tuple[Ino, int], Subtree] = {}
        self._opens = 0
        # Whether any stream had the order of its last epoch.
        self.has_learned = False
        self._fetched_files = self._fetched_bytes = 0
        self._marks = Marks(names.entries)
        # As ``left`` for each of many files, before the first open.
        self.left_before = partial(self._marks.leave, names)
        self._unread_bytes = 0
        # The job of the last open, which is the last one in ``jobs``.
        self._latest: tuple[int, Job] | None = None

    def on_more(self, wake: Callable[[], None]) -> None:
        """``wake`` is called from now on when ``next`` may return files again."""
        self._wake = wake

    def on_skewed(self, call: Callable[[Ino], None]) -> None:
        """``call`` is called from now on for each open in a stream that is skewed."""
        self._skewed_open = call

    def wake(self) -> None:
        """Must be called after a message about an announced order."""
        self._wake()

    # -- what happens ------------------------------------------------------------------------

    def opened(self, ino: Ino, job: int, process: int = 0) -> None:
        """Records an open of a file by a ``process`` of ``job`` (0: unknown)."""
        if ino >= len(self._marks.of):
            # A file that was made through the mount.
            return
        is_announced = self.announced.opened(ino)
        if is_announced and self._settings.announced:
            self._wake()
        mark = self._marks.of[ino]
        if mark != READ:
            if mark & FETCHED:
                self._unread_bytes -= self._names.attributes(ino).size
            self._marks.set(ino, READ)
        known = self._job(job or self._likely_job(ino))
        self._opens += 1
        known.last = self._opens
        known.compare(is_announced=is_announced)
        stream = self._stream_of(known, ino)
        if stream is None:
            known.outside.append((ino, process))
            if len(known.outside) >= WINDOW:
                known.is_new = False
                self._begin_stream(known)
            return
        is_complete = stream.opened(ino, process)
        if is_complete and stream.pattern == "same order":
            self.has_learned = True
        if is_complete or (stream.is_filling and self._settings.fill):
            self._wake()
        if stream.pattern == "skewed":
            self._skewed_open(ino)

    def opened_all(
        self, inos: array[int], job: int = 0, processes: Sequence[int] | None = None
    ) -> None:
        """As ``opened`` for each of ``inos``, at least one, in an array of type I, each by the one
        of ``processes`` at its place (None: unknown)."""
        stream = self._stream_of_all(inos, job) if len(inos) >= _MANY else None
        if stream is None:
            for ino, process in zip(inos, processes or repeat(0), strict=False):
                self.opened(Ino(ino), job, process)
            return
        is_complete = stream.opened_all(inos, frozenset(processes or (0,)))
        self.has_learned |= is_complete and stream.pattern == "same order"
        is_ahead = is_complete and stream.reach > 0 and not self._have_copies(stream.subtree.files)
        if is_ahead or stream.is_filling:
            self._wake()
        if stream.pattern == "skewed":
            # Not before: the next ones are recorded one by one.
            for ino in inos:
                self._skewed_open(Ino(ino))

    def _stream_of_all(self, inos: array[int], job: int) -> Stream | None:
        """The stream of the job that an open of each of ``inos`` belongs to, if no other part
        records them; counts the opens of the job then."""
        known = self._job(job)
        stream = next(iter(known.streams), None)
        if stream is None or stream.pattern == "skewed" or self.announced.has_orders:
            return None
        files = stream.subtree.files
        if min(inos) not in files or max(inos) not in files:
            return None
        marks = np.frombuffer(self._marks.of, np.uint8)
        if not bool((marks[np.frombuffer(inos, np.uint32)] == READ).all()):
            return None
        self._opens += len(inos)
        known.last = self._opens
        known.announced = max(0, known.announced - len(inos))
        return stream

    def left(self, ino: Ino) -> None:
        """Records that a file was removed, or is written: it is read from the source no more, and
        its opens are not recorded, nor a fetch. If it is opened all the same, it is back."""
        if ino >= len(self._marks.of) or not _is_file(self._names, ino):
            return
        if self._marks.of[ino] & FETCHED:
            self._unread_bytes -= self._names.attributes(ino).size
        self._marks.set(ino, GONE)
        for stream in self.streams_with(ino):
            stream.left(ino)

    def end_jobs(self, ended: Iterable[int], *, with_unknown: bool = False) -> None:
        """Ends the streams of the jobs that have ended. Another job in the same files then keeps
        their order. ``with_unknown``: also those of unknown processes."""
        for number in ended:
            if number in self.jobs:
                self._end_job(number)
        if with_unknown and 0 in self.jobs:
            self._end_job(0)

    def fetched(self, ino: Ino, nbytes: int) -> None:
        """Records that ``nbytes`` of a file were fetched ahead; 0: it has a copy, or is empty."""
        if not nbytes:
            self.refused(ino)
            return
        self._fetched_files += 1
        self._fetched_bytes += nbytes
        mark = self._marks.of[ino]
        if mark & GIVEN:
            self._marks.set(ino, mark & (READ | GONE) | FETCHED)
            if not mark & FETCHED:
                # Not ``nbytes``, which differs from the size at the open if the source has changed.
                self._unread_bytes += self._names.attributes(ino).size

    def refused(self, ino: Ino) -> None:
        """Records that a file that was given out is not fetched."""
        self._marks.set(ino, self._marks.of[ino] & ~GIVEN)

    # -- the files to fetch --------------------------------------------------------------------

    def next(self, most: int) -> list[Ino]:
        """Up to ``most`` files that should be fetched now, or one for each reader if that is more,
        the most urgent first. Each is returned once for each of its reads. If so many have copies
        that this takes long, none is returned now, and the function of ``on_more`` is called."""
        turns, passed = _turns(self._settings, self.announced, self.jobs), 0
        while passed < _MOST_PASSED:
            found = _ask_in_turn(turns, most)
            if not found:
                return []
            given = []
            for ino in found:
                if self._has_copy(ino):
                    self.refused(ino)
                else:
                    self._marks.set(ino, self._marks.of[ino] | GIVEN)
                    given.append(ino)
            if given:
                return given
            passed += len(found)
        self._wake()
        return []

    def reader_of(self, ino: Ino) -> Hashable:
        """The announced order, or else the job, that a file was returned for by ``next``. Of
        several one that has it before it; None if it is not known any more."""
        order = self.announced.order_of(ino)
        if order is not None:
            return order
        found = (number for number, job in self.jobs.items() if job.has(ino))
        return next(found, None)

    def is_foreseen(self, ino: Ino) -> bool:
        """Whether a file that was returned by ``next`` will still be read: not if its job, or its
        announced order, has ended."""
        return self.announced.is_waiting(ino) or any(
            ino in subtree.files for subtree in self._subtrees.values()
        )

    # -- what is recognised of the readers of a file --------------------------------------------

    def skewed(self, ino: Ino) -> range | None:
        """The files of the subtree in which a job opens some files again and again, with ``ino``
        among them; None if there is no such job, or if its next use is known."""
        if self.announced.next_use(ino) < math.inf:
            return None
        found = (stream for stream in self.streams_with(ino) if stream.pattern == "skewed")
        stream = next(found, None)
        return stream.subtree.files if stream is not None else None

    def is_scan(self, ino: Ino) -> bool:
        """Whether all jobs that read the subtree of a file read it for the first time, by one
        process and in the order of the names, and none of them has announced its order."""
        reading = [
            stream.is_scan and not job.is_announced
            for job in self.jobs.values()
            for stream in job.streams
            if ino in stream.subtree.files
        ]
        return bool(reading) and all(reading) and self.announced.next_use(ino) == math.inf

    def streams_with(self, ino: Ino) -> Iterator[Stream]:
        """The streams whose files include ``ino``."""
        for job in self.jobs.values():
            for stream in job.streams:
                if ino in stream.subtree.files:
                    yield stream

    # -- readers to come -----------------------------------------------------------------------

    def is_announced(self, ino: Ino) -> bool:
        """Whether an announced order has the file before it."""
        return self._settings.announced and self.announced.is_waiting(ino)

    def is_idle(self, ino: Ino) -> bool:
        """Whether the readers of all announced orders that have the file have paused."""
        return self.announced.is_idle(ino)

    def is_expected_again(self, ino: Ino, job: int) -> bool:
        """Whether a file that ``job`` opens will be opened for another announced order, too, or by
        another job that reads its directory and has not paused. Job 0: of all jobs that are
        known."""
        if self._settings.announced and self.announced.readers_of(ino) > 1:
            return True
        since = self._opens - _PAUSE
        return any(
            known.last > since and known.awaits(ino)
            for number, known in self.jobs.items()
            if number not in (0, job)
        )

    def is_recognised(self, ino: Ino) -> bool:
        """Whether a recognised order has the file before it."""
        is_expected = (stream.expects(ino) for stream in self.streams_with(ino))
        return self._settings.ahead and any(is_expected)

    def report(self, *, counts_opens: bool) -> ForesightReport:
        """``counts_opens``: the kernel sends all opens. Otherwise epochs after the first are not
        seen, since the kernel reads from its page cache."""
        streams = [
            self._stream_report(stream, counts_opens and stream.pattern != "skewed")
            for job in reversed(self.jobs.values())
            for stream in job.streams
            if stream.subtree.count
        ]
        return ForesightReport(
            streams,
            self.announced.report(),
            self._fetched_files,
            self._fetched_bytes,
            self._marks.fetched,
            self._unread_bytes,
        )

    def _stream_report(self, stream: Stream, has_epochs: bool) -> StreamReport:
        subtree = stream.subtree
        directory = self._names.path(subtree.directory).decode(errors="surrogateescape")
        is_ahead = self._settings.ahead and not self._have_copies(subtree.files)
        return StreamReport(
            directory=directory if len(directory) <= _LONGEST else f"...{directory[-_LONGEST:]}",
            pattern=stream.pattern,
            files=subtree.count,
            epoch=stream.epoch if has_epochs and not stream.is_mixed else None,
            share=stream.share if has_epochs and not stream.is_mixed else None,
            ahead=stream.reach if is_ahead else 0,
            is_mixed=has_epochs and stream.is_mixed,
        )

    # -- jobs and subtrees -----------------------------------------------------------------------

    def _job(self, number: int) -> Job:
        if self._latest is not None and self._latest[0] == number:
            return self._latest[1]
        job = self.jobs.get(number)
        if job is None:
            job = self.jobs[number] = Job()
            if len(self.jobs) > _MOST_JOBS:
                self._end_job(next(iter(self.jobs)))
        else:
            self.jobs.move_to_end(number)
        self._latest = number, job
        return job

    def _likely_job(self, ino: Ino) -> int:
        """The job of an unknown process: the only one that reads the subtree of the file; 0 if none
        or several do. A process of another pid namespace is unknown."""
        if not len(self.jobs) - (0 in self.jobs):
            return 0
        readers = [
            number
            for number, job in self.jobs.items()
            if any(ino in stream.subtree.files for stream in job.streams)
        ]
        return readers[0] if len(readers) == 1 else 0

    def _end_job(self, number: int) -> None:
        self._latest = None
        for stream in self.jobs.pop(number).streams:
            self._end_stream(stream)

    def _stream_of(self, job: Job, ino: Ino) -> Stream | None:
        """The stream of the job whose files include ``ino``; it becomes the first."""
        for index, stream in enumerate(job.streams):
            if ino in stream.subtree.files:
                if index:
                    job.streams.insert(0, job.streams.pop(index))
                return stream
        return None

    def _begin_stream(self, job: Job) -> None:
        """Begins a stream in the subtree that has most of the opens outside of all others."""
        outside, job.outside = job.outside, []
        found = _subtree_of(self._names, [ino for ino, _ in outside])
        if found is None:
            return
        directory, depth = found
        files = self._names.level(directory, depth)
        joined = next((stream for stream in job.streams if _continues(stream, files)), None)
        if joined is not None and directory != ROOT_INO:
            # The readers continue with the next directory in the order of the snapshot.
            directory, depth = self._names.parent(directory), depth + 1
            files = self._names.level(directory, depth)
            job.streams.remove(joined)
            self._end_stream(joined)
        subtree = self._subtrees.get((directory, depth))
        if subtree is None:
            count_files = partial(_count_files, self._names)
            subtree = Subtree(directory, depth, files, self._marks, count_files)
            subtree.look()
        if subtree.count < LEAST_FILES:
            return
        while len(self._subtrees) >= _MOST_SUBTREES and len(self.jobs) > 1:
            self._end_job(next(iter(self.jobs)))
        stream = self._new_stream(subtree)
        job.streams.insert(0, stream)
        for stale in job.streams[_MOST_STREAMS:]:
            self._end_stream(stale)
        del job.streams[_MOST_STREAMS:]
        for ino, process in outside:
            if ino in files and not self._marks.of[ino] & GONE:
                stream.opened(ino, process)

    def _new_stream(self, subtree: Subtree) -> Stream:
        if not subtree.streams:
            self._subtrees[subtree.directory, subtree.depth] = subtree
            self._marks.add(subtree)
        subtree.streams += 1
        kept = sum(len(other.files) for other in self._subtrees.values() if other.is_order_kept)
        keeps_order = not subtree.is_order_kept and kept + len(subtree.files) <= self._names.entries
        subtree.is_order_kept |= keeps_order
        return Stream(subtree, keeps_order=keeps_order)

    def _end_stream(self, stream: Stream) -> None:
        stream.close()
        subtree = stream.subtree
        subtree.streams -= 1
        if not subtree.streams:
            del self._subtrees[subtree.directory, subtree.depth]
            self._marks.remove(subtree)


def _is_file(names: Names, ino: Ino) -> bool:
    try:
        return names.attributes(ino).is_file
    except SnapshotError:
        return False


def _count_files(names: Names, entries: range) -> int:
    try:
        return names.count_files(entries)
    except SnapshotError:
        # The open that is recorded now may be of a file whose record is sound.
        return len(entries)


def _subtree_of(names: Names, inos: Sequence[Ino]) -> tuple[Ino, int] | None:
    """The deepest directory, and the depth beneath it, that has most of the files."""
    votes: Counter[tuple[Ino, int]] = Counter()
    for ino in inos:
        depth = 0
        while ino != ROOT_INO:
            ino, depth = names.parent(ino), depth + 1
            votes[ino, depth] += 1
    most = [where for where, count in votes.items() if count >= _MAJORITY * len(inos)]
    return min(most, key=lambda where: where[1], default=None)


def _turns(
    settings: ForesightSettings, announced: Announcements, jobs: OrderedDict[int, Job]
) -> list[list[_Ask]]:
    """What returns files to fetch, also those that have copies: the most urgent first, and side by
    side what takes turns."""
    streams = [(job, stream) for job in reversed(jobs.values()) for stream in job.streams]
    leads = (_LEAD // _NEAR_PART, _LEAD) if settings.announced else ()
    orders: list[_Ask] = [partial(announced.next, lead=lead) for lead in leads]
    # A job that has announced its order needs a fill last.
    fills: tuple[list[_Ask], list[_Ask]] = [], []
    for job, stream in streams if settings.fill else ():
        fills[job.is_announced].append(stream.fill)
    return [
        orders[:1],
        [stream.ahead for _, stream in streams if settings.ahead],
        [*orders[1:], *fills[False]],
        fills[True],
    ]


def _ask_in_turn(turns: Sequence[list[_Ask]], most: int) -> list[Ino]:
    """Files from the first of ``turns`` that have some, until there are ``most``. None keeps those
    beside it waiting. Those without further ones are removed."""
    given: list[Ino] = []
    for waiting in turns:
        while waiting and len(given) < most:
            share = max(1, (most - len(given)) // len(waiting))
            found = [(ask, ask(share)) for ask in waiting]
            given += [ino for _, inos in found for ino in inos]
            waiting[:] = [ask for ask, inos in found if inos]
    return given


def _nothing() -> None:
    """Until ``on_more`` is called."""


def _ignore(ino: Ino) -> None:
    """Until ``on_skewed`` is called."""


def _continues(stream: Stream, files: range) -> bool:
    """Whether ``files`` follow the files of a stream that reads them in order."""
    is_ordered = stream.pattern in ("sequential", "strided")
    return is_ordered and files.start == stream.subtree.files.stop
