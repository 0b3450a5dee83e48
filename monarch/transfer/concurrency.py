"""How many fetches ahead may run at the source beside the readers.

Pure: time is an argument, in seconds of a monotonic clock.

The rule is that of TCP Vegas (Brakmo and Peterson, 1995) and of the gradient limit in Netflix's
concurrency-limits. A call takes ``base`` seconds if no other fetch ahead runs, and ``now`` seconds
on average while ``c`` run. By Little's law ``c * (1 - base / now)`` of them wait in a queue of the
source. While that queue is short, more calls bring more bytes; beyond that they only make readers
wait. So the limit doubles at first, until there is a queue, and then keeps the queue short.

* Both latencies are means, and the limit changes only by what exceeds their standard errors.
* ``base`` is kept for each class of sizes, and measured again from time to time with one call.
* Before that measurement there is a pause. It shows how long reads of readers take without fetches
  ahead. If they take longer beside fetches ahead, by more than ``_SLOWER``, and readers do not wait
  less often in return, the limit falls.
* Calls that take much longer than usual are not counted, so that one bad file does not stop the
  others. If no call ends any more, the source hangs, and no call begins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

# The share by which fetches ahead may prolong the reads of readers, and the share if more readers
# gain by them than lose.
_SLOWER = 0.05
_MOST_SLOWER = 0.25
# Standard errors by which a difference must exceed the allowed one: of the queue, of readers.
_QUEUE_ERRORS = 1.0
_READER_ERRORS = 2.0
# The relative standard deviation that is assumed for a single sample.
_ASSUMED_DEVIATION = 0.5
# A latency counts as at most this multiple of its base, or of the median of its measurement.
_MOST_RATIO = 4.0
# The greatest standard error that is assumed: however noisy the source is, the limit follows.
_MOST_ERROR = 0.5
# A queue of this share of the running calls is allowed, and of at least one call.
_QUEUE_SHARE = 1 / 16
# The share by which the limit rises at once after the first queue, and the smallest factor by which
# it falls.
_STEP = 1 / 8
_FALL = 0.75
# The fewest and the most calls in a measurement of the base, the standard error that suffices, and
# the number of samples that a base remembers.
_PROBE_CALLS = (6, 16)
_PROBE_ERROR = 0.15
_BASE_SAMPLES = 48
# Sizes of one class differ by at most two to the power of this.
_CLASS_BITS = 4
# The interval of measurements doubles from the first value up to the second, in seconds.
_PROBE_INTERVAL_S = (2.0, 16.0)
# The shortest and the longest pause in which the readers are watched; enough reads end it sooner.
_PAUSE_S = (0.16, 0.26)
_PAUSE_READS = 24
# A measurement of the base is given up after this time without items, in seconds.
_PROBE_S = 1.0
# Reads of readers are averaged over this time, and compared over so many averages.
_BATCH_S = 0.05
_BATCHES = 16
# A call is late, or the source hangs, after this multiple of the usual latency, and this time.
_LATE = 8.0
_LATE_S = 1.0
# The share of the source's calls that is left to readers, and the calls for each of their reads.
_KEPT_SHARE = 1 / 4
_KEPT_FOR_EACH = 2


@dataclass(slots=True, eq=False)
class Call:
    """A running fetch ahead. ``round``: the measurement to which it belongs."""

    began_s: float
    round: int


@dataclass(slots=True)
class _Mean:
    """A weighted mean; after ``most`` samples the older ones fade."""

    most: float = math.inf
    weight: float = 0.0
    mean: float = 0.0
    _squares: float = 0.0
    _samples: int = 0

    def add(self, value: float, weight: float = 1.0) -> None:
        if self.weight + weight > self.most:
            kept = max(0.0, self.most - weight) / self.weight
            self.weight *= kept
            self._squares *= kept
        self.weight += weight
        change = value - self.mean
        self.mean += change * weight / self.weight
        self._squares += weight * change * (value - self.mean)
        self._samples += 1

    @property
    def error(self) -> float:
        """The relative standard error of the mean."""
        if self._samples < 2 or self.mean <= 0:
            return _ASSUMED_DEVIATION
        samples = min(self._samples, self.most)
        return math.sqrt(self._squares / self.weight / (samples - 1)) / self.mean


@dataclass(slots=True)
class _Round:
    """The calls that began since the last change of the limit: their latencies as multiples of
    their bases, the standard errors of these, and the most calls that ran."""

    number: int
    ratios: _Mean = field(default_factory=_Mean)
    base_errors: float = 0.0
    busiest: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Reads of readers that ended in some time, their mean duration, and the fetches ahead that
    ended meanwhile."""

    reads: int
    seconds: float
    fetched: int


class _Readers:
    """How long reads of readers take, beside fetches ahead and without."""

    def __init__(self) -> None:
        # The time and the totals at the begin of the current batch.
        self._seen = -math.inf, 0, 0.0
        self._fetched = 0
        self._beside: list[_Batch] = []
        self._alone: deque[_Batch] = deque(maxlen=_BATCHES)
        # Whether any read ended since the last pause.
        self.are_reading = False

    def fetched(self) -> None:
        self._fetched += 1

    def look(self, reads: int, waited_s: float, now: float, *, alone: bool) -> None:
        """Takes the totals of the reads so far. ``alone``: no fetch ahead has run since the last
        call."""
        elapsed, count = now - self._seen[0], reads - self._seen[1]
        if elapsed < _BATCH_S:
            return
        if elapsed == math.inf:
            self.restart(reads, waited_s, now)
            return
        batch = _Batch(count, (waited_s - self._seen[2]) / max(1, count), self._fetched)
        self.restart(reads, waited_s, now)
        if alone and count:
            self._alone.append(batch)
        elif not alone:
            self._beside.append(batch)
            self.are_reading |= count > 0

    def restart(self, reads: int, waited_s: float, now: float) -> None:
        """Begins a batch now."""
        self._seen, self._fetched = (now, reads, waited_s), 0

    def forget_beside(self) -> None:
        self._beside.clear()

    def are_slowed(self) -> bool:
        """Whether the readers lose by fetches ahead. To be asked after each ``look``; decides each
        time that enough was seen.

        A fetch ahead saves a reader one read, but only half of that is counted: the file may never
        be read, or by another reader than the one that waits longer.
        """
        if len(self._beside) < _BATCHES:
            return False
        beside, alone = _mean_of(self._beside), _mean_of(self._alone)
        fetched = sum(batch.fetched for batch in self._beside)
        self._beside.clear()
        if beside.weight == 0 or alone.weight == 0:
            return False
        error = _READER_ERRORS * math.hypot(beside.error, alone.error)
        slower = beside.mean / (1 + error) / alone.mean - 1 if alone.mean > 0 else 0.0
        lost_s = beside.weight * (beside.mean - alone.mean)
        gained_s = fetched * alone.mean / 2
        return slower > (_SLOWER if lost_s > gained_s else _MOST_SLOWER)


def _mean_of(batches: Iterable[_Batch]) -> _Mean:
    mean = _Mean()
    for batch in batches:
        if batch.reads:
            mean.add(batch.seconds, batch.reads)
    return mean


def _without_extremes(latencies: list[float]) -> _Mean:
    """The mean of a measurement. One call that has waited for something else, like the start of a
    thread, must not make all others look fast."""
    most = _MOST_RATIO * sorted(latencies)[len(latencies) // 2]
    mean = _Mean(_BASE_SAMPLES)
    for latency in latencies:
        mean.add(min(latency, most))
    return mean


class Concurrency:
    """Belongs to the event loop. ``most``: the calls that may run at the source in total.

    ``look`` must be called from time to time while there are items, at least every 50 ms. A caller
    asks ``may_begin`` before each call, and reports its end with ``ended`` or ``failed``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = 1
        # Whether the limit doubles; whether a pause or a measurement of the base is under way.
        self._doubles = True
        self._pauses = False
        self._probes = True
        self._since_s = math.inf
        self._round = _Round(0)
        self._running: dict[Call, None] = {}
        self._base: dict[int, _Mean] = {}
        self._found: dict[int, list[float]] = {}
        self._probed = 0
        # The last ratio of latency and base, and the usual latency.
        self._ratio = 1.0
        self._usual = _Mean(_BASE_SAMPLES)
        self._ended_s = -math.inf
        self._next_probe_s = -math.inf
        self._interval_s = _PROBE_INTERVAL_S[0]
        self._limit_then = 1
        # The limit that readers have set.
        self._ceiling = math.inf
        self._readers = _Readers()
        self._in_flight = 0

    @property
    def limit(self) -> int:
        """How many calls may run now; 0 in a pause."""
        if self._pauses:
            return 0
        return 1 if self._probes else min(self._limit, self._room)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def _room(self) -> int:
        kept = max(math.ceil(self._most * _KEPT_SHARE), _KEPT_FOR_EACH * self._in_flight)
        return max(min(1, self._most - 1), self._most - kept)

    def may_begin(self, now: float) -> bool:
        """Whether one more call may begin now."""
        late = self._late(now)
        is_hanging = late and now - self._ended_s > self._late_s
        return (
            not is_hanging
            and len(self._running) - late < self.limit
            and len(self._running) < self._room
        )

    def began(self, now: float) -> Call:
        if self._since_s == math.inf:
            self._since_s = self._ended_s = now
            self._next_probe_s = now + self._interval_s
        call = Call(now, self._round.number)
        self._running[call] = None
        self._round.busiest = max(self._round.busiest, len(self._running))
        return call

    def failed(self, call: Call, now: float) -> None:
        """Reports a call that gave no bytes, so its duration says nothing."""
        del self._running[call]
        self._ended_s = now

    def ended(self, call: Call, nbytes: int, now: float) -> None:
        """Reports a call that fetched a file of ``nbytes``."""
        self.failed(call, now)
        self._readers.fetched()
        latency, size = now - call.began_s, nbytes.bit_length() // _CLASS_BITS
        self._usual.add(latency)
        if call.round != self._round.number:
            return
        if self._probes:
            found = self._found.setdefault(size, [])
            found.append(latency)
            self._probed += 1
            fewest, most = _PROBE_CALLS
            if self._probed >= (fewest if _without_extremes(found).error <= _PROBE_ERROR else most):
                self._end_probe(now)
            return
        base = self._base.setdefault(size, _Mean(_BASE_SAMPLES))
        if base.weight < _PROBE_CALLS[0]:
            # No measurement has met a file of this size: the load has not changed by it.
            base.add(latency / self._ratio)
        ratios = self._round.ratios
        ratios.add(min(latency / base.mean, _MOST_RATIO) if base.mean > 0 else 1.0)
        self._round.base_errors += base.error
        if ratios.weight >= max(4 if self._doubles else 8, self._limit):
            self._end_round()

    def look(self, reads: int, waited_s: float, in_flight: int, now: float) -> None:
        """Takes the totals of readers: the number and the summed duration of their reads of the
        source so far, and the reads that run now."""
        self._in_flight = in_flight
        is_quiet = len(self._running) <= self._late(now)
        if self._pauses:
            self._watch_pause(reads, waited_s, now, is_quiet=is_quiet)
            return
        self._readers.look(reads, waited_s, now, alone=is_quiet and self._since_s == math.inf)
        if self._probes:
            if now - self._since_s > max(_PROBE_S, _LATE * self._usual.mean):
                self._end_probe(now)
        elif now >= self._next_probe_s or (
            # The base may not be right any more.
            self._limit < self._limit_then / 2 and now - self._since_s > _PROBE_INTERVAL_S[0]
        ):
            self._begin_pause(reads, waited_s, now)
        elif self._readers.are_slowed():
            self._limit = max(1, int(self._limit * _FALL))
            self._ceiling = self._limit
            self._doubles = False
            self._readers.forget_beside()
            self._next_round()

    # -- the queue -----------------------------------------------------------------------------

    def _next_round(self) -> None:
        self._round = _Round(self._round.number + 1, busiest=len(self._running))

    def _end_round(self) -> None:
        current = self._round
        ratios, running = current.ratios, min(current.busiest, self._limit)
        self._ratio = max(1.0, ratios.mean)
        error = min(_MOST_ERROR, math.hypot(ratios.error, current.base_errors / ratios.weight))
        surely = max(1.0, ratios.mean / (1 + _QUEUE_ERRORS * error))
        allowed = max(1.0, running * _QUEUE_SHARE)
        queue = running * (1 - 1 / surely)
        if queue > allowed and (self._doubles or queue > 2 * allowed):
            # Netflix's gradient: the calls that the source works on, and a short queue.
            fitting = math.ceil(running / surely + allowed)
            least = 1 if self._doubles else int(self._limit * _FALL)
            self._limit = max(1, least, min(fitting, self._limit - 1))
            self._doubles = False
        elif queue <= allowed and running >= self._limit:
            step = self._limit if self._doubles else max(1, int(self._limit * _STEP))
            self._limit = int(max(1, min(self._room, self._ceiling, self._limit + step)))
        if ratios.mean * (1 + 2 * error) < 1:
            # The source has become faster.
            for base in self._base.values():
                base.mean *= ratios.mean
        self._next_round()

    # -- the measurements ----------------------------------------------------------------------

    def _begin_pause(self, reads: int, waited_s: float, now: float) -> None:
        self._limit_then = self._limit
        self._since_s = now
        if self._readers.are_reading:
            self._readers.are_reading = False
            self._pauses = True
            self._paused_s = math.inf
            self._paused_at = reads
        else:
            self._begin_probe(now)

    def _watch_pause(self, reads: int, waited_s: float, now: float, *, is_quiet: bool) -> None:
        if self._paused_s == math.inf:
            if is_quiet:
                self._paused_s, self._paused_at = now, reads
                self._readers.restart(reads, waited_s, now)
            elif now - self._since_s > self._late_s:
                self._begin_probe(now)
            return
        self._readers.look(reads, waited_s, now, alone=True)
        shortest, longest = _PAUSE_S
        if now - self._paused_s >= (
            shortest if reads - self._paused_at >= _PAUSE_READS else longest
        ):
            self._begin_probe(now)

    def _begin_probe(self, now: float) -> None:
        self._pauses = False
        self._probes = True
        self._since_s = now
        self._probed = 0
        self._found = {}
        self._next_round()

    def _end_probe(self, now: float) -> None:
        is_new = not self._base
        for size, latencies in self._found.items():
            found, base = _without_extremes(latencies), self._base.get(size)
            if base is None:
                self._base[size] = found
                continue
            allowed = 0.1 + 2 * math.hypot(found.error, base.error)
            is_sure = found.weight >= _PROBE_CALLS[0] / 2
            if is_sure and abs(found.mean - base.mean) > allowed * base.mean:
                is_new = True
                self._doubles |= found.mean > 1.5 * base.mean
                self._base[size] = found
            else:
                base.add(found.mean, found.weight)
        self._probes = False
        if self._doubles:
            # One call is the measurement itself.
            self._limit = max(2, self._limit)
        self._since_s = now
        self._interval_s = (
            _PROBE_INTERVAL_S[0] if is_new else min(2 * self._interval_s, _PROBE_INTERVAL_S[1])
        )
        self._next_probe_s = now + max(self._interval_s, 50 * self._usual.mean)
        self._ceiling = max(2.0, self._ceiling / _FALL)
        self._ratio = 1.0
        self._readers.forget_beside()
        self._next_round()

    # -- late calls ----------------------------------------------------------------------------

    @property
    def _late_s(self) -> float:
        return max(_LATE_S, _LATE * self._usual.mean)

    def _late(self, now: float) -> int:
        """The running calls that take much longer than usual; the oldest come first."""
        count, before = 0, now - self._late_s
        for call in self._running:
            if call.began_s > before:
                break
            count += 1
        return count
