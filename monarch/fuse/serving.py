"""How the requests of the kernel are answered: in which mode, and which wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from monarch.fuse.datapath import Datapath
from monarch.fuse.datapath_mode import Choice, agreed
from monarch.telemetry.report import Mode, Requests


class Serving:
    """``choice`` was made before the mount; ``datapath`` is None without the C extension."""

    def __init__(self, choice: Choice, datapath: Datapath | None) -> None:
        self._choice = choice
        self._datapath = datapath
        # The arrival of each request that Python is answering, the oldest first, in seconds.
        self._arrivals: dict[object, float] = {}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts one request that Python answers."""
        request = object()
        self._arrivals[request] = time.monotonic()
        try:
            yield
        finally:
            del self._arrivals[request]

    def requests(self) -> Requests:
        """The requests without an answer."""
        if self._datapath is not None:
            # These include the requests that were passed on to Python.
            state = self._datapath.state()
            return Requests(state.waiting, state.oldest_request_s)
        oldest_s = next(iter(self._arrivals.values()), None)
        age_s = time.monotonic() - oldest_s if oldest_s is not None else 0.0
        return Requests(len(self._arrivals), age_s)

    def mode(self) -> Mode:
        """How reads are served now: as chosen, unless the kernel refused it."""
        if self._datapath is None:
            return self._choice.mode
        return agreed(self._choice, self._datapath.state())
