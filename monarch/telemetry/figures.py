"""The figures of a whole mount, for `monarch report`: kept in the state directory after its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from monarch.telemetry.report import Report, StatusReport
from monarch.telemetry.timeline import Sample

# The version of the format; it changes if a reader of the earlier version would misread figures.
VERSION: Final = 1
# Their name in the state directory.
FILE: Final = "figures.json"


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """What the source or a tier has served, and the sums of the times that the daemon took for it,
    in seconds. ``opens`` and ``reads`` are None if the kernel does not report them; else ``timed``
    opens are in ``open_s``."""

    name: str
    opens: int | None
    timed: int
    open_s: float
    reads: int | None
    read_s: float
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Figures(Report):
    """The figures of one mount from ``begun_ns`` to ``until_ns``. ``is_ended``: it was unmounted
    then. ``job`` is the number of the Slurm job that mounted, empty without one. ``places``: the
    source, then the tiers. ``samples`` and ``epoch_begins`` as in ``Timeline``."""

    monarch_figures: int
    begun_ns: int
    until_ns: int
    is_ended: bool
    job: str
    status: StatusReport
    places: list[PlaceFigures]
    samples: list[Sample]
    epoch_begins: list[Sample]
