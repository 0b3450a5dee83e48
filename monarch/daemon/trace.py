"""Records the opens of the mount for `monarch trace`: only while a client is connected, and in
bounded memory. A client that is too slow loses opens, and its trace has their number."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import trio

from monarch.control.server import Send, Verb
from monarch.errors import BusyError, MonarchError, UsageError
from monarch.foresight.stream import Seen
from monarch.namespace.namespace import Namespace
from monarch.placement.epochs import Epochs
from monarch.telemetry.report import StatusReport
from monarch.telemetry.trace import (
    VERSION,
    TraceEnd,
    TraceHeader,
    TraceProgress,
    TraceStopped,
    file_line,
    lost_line,
    object_line,
    open_line,
)
from monarch.types import Ino
from monarch.vfs.readers import Readers

# Recordings at a time, and the opens that wait for one client: some 200 bytes each.
_MOST_RECORDINGS = 4
_MOST_WAITING = 1 << 16
# Opens that may belong to the next epoch.
_MOST_UNDECIDED = 1 << 12
# The text of one message to a client: JSON at most doubles it, and a message is at most 1 MiB.
_MESSAGE_CHARACTERS = 1 << 18
# The interval of messages, in seconds.
_STEP_S = 0.2
# How long the end of a mount waits for the clients, in seconds.
_LAST_S = 1.0
# In place of the name of a tier, as JSON.
_UNKNOWN = "null"


class OpenedFile(NamedTuple):
    """An open before its epoch is known; as in ``open_line`` otherwise."""

    time_s: float
    ino: Ino
    tier: str
    latency_s: float | None
    job: int


class Recording:
    """The opens for one client since its begin. ``last_epoch``: opens of later ones end it.

    Whether an open belongs to the next epoch is known some opens later (placement/epochs.py), so
    these wait in ``_undecided``. A number in place of an open is that of lost opens.
    """

    def __init__(
        self, names: Namespace, last_epoch: int | None, *, has_all_opens: bool = True
    ) -> None:
        """``has_all_opens``: every open is counted now."""
        self._names = names
        self._last_epoch = last_epoch
        self.has_all_opens = has_all_opens
        self._begun_s = trio.current_time()
        self._undecided: list[OpenedFile | int] = []
        self._waiting: deque[tuple[OpenedFile | int, int | None]] = deque()
        self._lost_now = 0
        # The files that the client knows by name.
        self._named = Seen(names.entries + 1)
        self.opens = self.lost = 0
        self.why_ended = ""

    def add(self, opened: OpenedFile, epoch: int | None, *, is_undecided: bool) -> None:
        """Records an open. ``is_undecided``: it may begin the epoch after ``epoch``."""
        if self.why_ended:
            return
        if len(self._waiting) + len(self._undecided) >= _MOST_WAITING:
            self.lost += 1
            self._lost_now += 1
        else:
            if self._lost_now:
                self._undecided.append(self._lost_now)
                self._lost_now = 0
            time_s = opened.time_s - self._begun_s
            self._undecided.append(opened._replace(time_s=time_s))
        # A lost open, too, shows the epoch of those before it.
        if not is_undecided or len(self._undecided) >= _MOST_UNDECIDED:
            self.why_ended = self._decide(epoch)

    def _decide(self, epoch: int | None) -> str:
        """Puts the opens that were undecided into an epoch; returns "epochs" if it is too late."""
        is_late = epoch is not None and self._last_epoch is not None and epoch > self._last_epoch
        if is_late:
            self.lost -= sum(item for item in self._undecided if isinstance(item, int))
            self._end_with_lost(self._last_epoch)
        else:
            self._waiting.extend((item, epoch) for item in self._undecided)
        self._undecided.clear()
        return "epochs" if is_late else ""

    def _end_with_lost(self, epoch: int | None) -> None:
        """Puts the number of the opens that were lost at the end."""
        if self._lost_now:
            self._waiting.append((self._lost_now, epoch))
            self._lost_now = 0

    def end(self, why: str, epoch: int | None) -> None:
        """Ends the recording; what waits is still taken."""
        if not self.why_ended:
            self.why_ended = self._decide(epoch) or why
            self._end_with_lost(epoch)

    def take(self) -> str:
        """The next lines of the trace; empty if there are none now."""
        parts: list[str] = []
        size = 0
        while self._waiting and size < _MESSAGE_CHARACTERS:
            item, epoch = self._waiting.popleft()
            if isinstance(item, int):
                text = lost_line(item)
            else:
                self.opens += 1
                text = self._name(item.ino) + open_line(item.time_s, item.ino, epoch, *item[2:])
            parts.append(text)
            size += len(text)
        return "".join(parts)

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def _name(self, ino: Ino) -> str:
        """The line that names a file, before its first open."""
        if ino <= self._names.entries and not self._named.add(ino):
            return ""
        path = b""
        with suppress(MonarchError):
            # A file without a name on the mount may have had one.
            path = self._names.path(ino)
            path = self._names.visible_path(ino)
        return file_line(ino, os.fsdecode(path), self._names.attributes(ino).size)


class Traces:
    """The running recordings, and the request of the control socket that makes one."""

    def __init__(
        self, names: Namespace, readers: Readers, epochs: Epochs, report: Callable[[], StatusReport]
    ) -> None:
        self._names = names
        self._readers = readers
        self._epochs = epochs
        self._report = report
        self._recordings: dict[int, Recording] = {}
        self._numbers = itertools.count(1)

    def table(self) -> Mapping[str, Verb]:
        return {"trace": self._trace}

    async def finish(self) -> None:
        """Ends all traces, and waits a moment until their clients have them."""
        for recording in self._recordings.values():
            self._end(recording, "unmounted")
        with trio.move_on_after(_LAST_S, shield=True):
            while self._recordings:
                await trio.sleep(_STEP_S / 4)

    async def _trace(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Sends the lines of a trace as they come, until ``seconds`` or ``epochs`` are over.
        ``stop`` instead ends the trace of that number."""
        if "stop" in params:
            stopped = self._recordings.get(params["stop"])
            if stopped is not None:
                self._end(stopped, "interrupted")
            return TraceStopped(stopped is not None).to_dict()
        seconds, epochs = _limit(params, "seconds"), _limit(params, "epochs")
        report = self._report()
        if epochs is not None and report.epochs is None:
            raise UsageError(
                f"epochs are not counted: {report.opens_not_counted}",
                hint="give --seconds, or end the trace with Ctrl-C",
            )
        header = TraceHeader(
            VERSION,
            report.mountpoint,
            report.source,
            report.snapshot.id,
            time.time_ns(),
            list(self._readers.tier_names),
            report.mode.open,
        )
        last = None if epochs is None else self._epochs.number + int(epochs) - 1
        with self._recording(last) as (number, recording):
            await send(_progress(number, recording, object_line(header.to_dict())))
            deadline = None if seconds is None else trio.current_time() + seconds
            while not (recording.why_ended and recording.is_empty):
                text = recording.take()
                await send(_progress(number, recording, text))
                if recording.is_empty:
                    await trio.sleep(_STEP_S)
                    self._readers.catch_up()
                    self._end_uncounted()
                    if deadline is not None and trio.current_time() >= deadline:
                        self._end(recording, "seconds")
            end = TraceEnd(recording.why_ended, recording.opens, recording.lost)
            await send(_progress(number, recording, object_line(end.to_dict())))
            return end.to_dict()

    @contextmanager
    def _recording(self, last_epoch: int | None) -> Iterator[tuple[int, Recording]]:
        if len(self._recordings) >= _MOST_RECORDINGS:
            raise BusyError(
                f"{_MOST_RECORDINGS} traces of this mount are being recorded",
                hint="end one of them",
            )
        # Opens before this are not in the trace.
        self._readers.catch_up()
        recording = Recording(self._names, last_epoch, has_all_opens=self._readers.counts_opens)
        number = next(self._numbers)
        self._recordings[number] = recording
        self._readers.traced = self._opened
        try:
            yield number, recording
        finally:
            del self._recordings[number]
            if not self._recordings:
                self._readers.traced = None

    def _opened(self, ino: Ino, tier: int | None, latency_s: float | None, job: int) -> None:
        name = _UNKNOWN if tier is None else json.dumps(self._readers.tier_names[tier])
        self._end_uncounted()
        for recording in self._recordings.values():
            recording.add(
                OpenedFile(trio.current_time(), ino, name, latency_s, job),
                self._epoch(),
                is_undecided=self._epochs.is_undecided,
            )

    def _end_uncounted(self) -> None:
        """Ends the traces that would miss opens from now on, and could not state how many."""
        if not self._readers.counts_opens:
            for recording in self._recordings.values():
                if recording.has_all_opens:
                    recording.end("uncounted", self._epochs.number)

    def _epoch(self) -> int | None:
        return self._epochs.number if self._readers.counts_opens else None

    def _end(self, recording: Recording, why: str) -> None:
        self._readers.catch_up()
        recording.end(why, self._epoch())


def _progress(number: int, recording: Recording, text: str) -> dict[str, Any]:
    progress = TraceProgress(number, recording.opens, recording.lost, text)
    return progress.to_dict()


def _limit(params: Mapping[str, Any], name: str) -> float | None:
    value = params.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UsageError(f"{name} must be above 0")
    return float(value)
