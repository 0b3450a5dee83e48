"""The course of a mount: its counters at many times, in bounded memory, and where epochs begin.

Pure: the time is an argument, in seconds since the mount began.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# When there are so many samples, every second one is dropped, and the step between two doubles.
MOST_SAMPLES = 512
_FIRST_STEP_S = 1.0
# Epochs whose begins are kept: as many as are counted (placement/epochs.py), and the present one.
_KEPT_EPOCHS = 101


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters ``time_s`` after the begin of the mount, as in the report of the status.

    ``opens`` of readers, of which tiers served ``hits``; ``bytes`` that readers got, of which
    ``tier_bytes`` came from tiers. They are None if they are not counted. ``source_opens`` and
    ``source_bytes`` are all calls that reached the source. Copies have ``resident_bytes``.
    """

    time_s: float
    epoch: int
    opens: int | None
    hits: int | None
    bytes: int | None
    tier_bytes: int | None
    source_opens: int
    source_bytes: int
    resident_bytes: int


class Timeline:
    """The samples of one mount, the oldest first, and one at the begin of each epoch."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._step_s = _FIRST_STEP_S
        self._begins: deque[Sample] = deque(maxlen=_KEPT_EPOCHS)

    def is_due(self, time_s: float, epoch: int) -> bool:
        """Whether a sample should be taken now: the step is over, or a new epoch has begun."""
        if not self._samples or self._begins[-1].epoch != epoch:
            return True
        return time_s - self._samples[-1].time_s >= self._step_s

    def add(self, sample: Sample) -> None:
        """Adds a sample whose time is not before that of the last one."""
        if not self._begins or self._begins[-1].epoch != sample.epoch:
            self._begins.append(sample)
        if self._samples and sample.time_s - self._samples[-1].time_s < self._step_s:
            return
        self._samples.append(sample)
        if len(self._samples) >= MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._step_s *= 2

    def samples(self) -> list[Sample]:
        return list(self._samples)

    def epoch_begins(self) -> list[Sample]:
        """The first sample of each of the last epochs."""
        return list(self._begins)
