"""What is known of one job: processes that read one data set together."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch.foresight.stream import Stream
from monarch.types import Ino


@dataclass(eq=False, slots=True)
class Job:
    """Streams of one job, the last used first, and its opens in none of them. ``is_new``: these may
    become its first stream. ``last`` is the number of its last open, of those of all jobs."""

    streams: list[Stream] = field(default_factory=list)
    outside: list[Ino] = field(default_factory=list)
    is_new: bool = True
    last: int = 0

    def awaits(self, ino: Ino) -> bool:
        """Whether the job is expected to open a file; of a new job nothing else is known."""
        found = (stream for stream in self.streams if ino in stream.subtree.files)
        stream = next(found, None)
        return self.is_new if stream is None else stream.awaits(ino)
