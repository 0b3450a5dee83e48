"""What the benchmarks of writing share: a job that writes below a directory, and its lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmark.contenders import Mounted
from scripts.benchmark.rows import Row


@dataclass(kw_only=True)
class Job:
    """One contender in one round.

    A method measures the side whose root it is given: the mount's directory, or native's. ``name``
    is that of no other job.
    """

    name: str
    mounted: Mounted
    native: Path
    directories: int = 0

    @property
    def ours(self) -> Path:
        return self.mounted.path

    def new_directory(self, root: Path) -> Path:
        self.directories += 1
        made = root / f"{self.name}-{self.directories}"
        made.mkdir()
        return made


@dataclass(frozen=True, slots=True)
class Line:
    """One row for each contender, of whom one is judged.

    ``ratio_bar`` is a bar for the ratio to native; ``bar`` is one for the value itself.
    """

    name: str
    unit: str
    function: Callable[[Any, Path], float]
    has_native: bool = True
    bar: float | None = None
    ratio_bar: float | None = None
    more_is_better: bool = False

    def row(self, contender: str, judged: str) -> Row[Any]:
        function = self.function
        bar = self.ratio_bar if self.has_native else self.bar
        return Row(
            self.name,
            lambda job: function(job, job.ours),
            self.unit,
            against=(lambda job: function(job, job.native)) if self.has_native else None,
            against_name="native" if self.has_native else "",
            bar=bar if contender == judged else None,
            contender=contender,
            more_is_better=self.more_is_better,
        )
