"""What is known of one job: processes that read one data set together."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch.foresight.stream import Stream
from monarch.types import Ino

# Opens that decide whether a job follows an announced order.
_COMPARED = 64


@dataclass(eq=False, slots=True)
class Job:
    """Streams of one job, the last used first, and its opens in none of them, each with the process
    (0: unknown). ``is_new``: these may become its first stream. ``last`` is the number of its last
    open, of those of all jobs. ``announced`` rises with each open that an announced order has
    before it, and falls with each other one."""

    streams: list[Stream] = field(default_factory=list)
    outside: list[tuple[Ino, int]] = field(default_factory=list)
    is_new: bool = True
    last: int = 0
    announced: int = 0

    def compare(self, *, is_announced: bool) -> None:
        """Records whether an announced order had an open of the job before it."""
        if is_announced:
            self.announced = min(_COMPARED, self.announced + 1)
        elif self.announced:
            self.announced -= 1

    @property
    def is_announced(self) -> bool:
        """Whether most of the latest opens were announced."""
        return self.announced > _COMPARED // 2

    def has(self, ino: Ino) -> bool:
        """Whether a stream of the job has a file."""
        return any(ino in stream.subtree.files for stream in self.streams)

    def awaits(self, ino: Ino) -> bool:
        """Whether the job is expected to open a file; of a new job nothing else is known."""
        found = (stream for stream in self.streams if ino in stream.subtree.files)
        stream = next(found, None)
        return self.is_new if stream is None else stream.awaits(ino)
