"""Opens that are recorded together for each job: one by one they cost twice as much."""

from __future__ import annotations

from array import array

from monarch.foresight.foresight import Foresight
from monarch.types import Ino


class Opens:
    """Belongs to the event loop. ``foresight`` gets the opens of each job in their order."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight
        # For each job its files, in an array of type I, and the process of each open.
        self._of_jobs: dict[int, tuple[array[int], list[int]]] = {}

    def add(self, ino: Ino, job: int, process: int) -> None:
        """Records an open at the next ``flush``."""
        of_job = self._of_jobs.get(job)
        if of_job is None:
            of_job = self._of_jobs[job] = array("I"), []
        of_job[0].append(ino)
        of_job[1].append(process)

    def flush(self) -> None:
        """Must be called before a decision that depends on the opens so far."""
        for job, (inos, processes) in self._of_jobs.items():
            self._foresight.opened_all(inos, job, processes)
        self._of_jobs.clear()
