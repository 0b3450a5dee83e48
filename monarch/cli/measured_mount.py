"""The mount whose job is measured, and the options of the commands that measure one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from monarch.analysis.plan import WINDOWS
from monarch.cli.overview import public_status
from monarch.errors import MountPointError, NotMountedError, UsageError
from monarch.foresight.messages import LEAST_LIMIT, MOST_LIMIT
from monarch.posix.mounts import MONARCH_TYPE, mount_table
from monarch.text import escape_text

ITERS = click.option(
    "--iters",
    type=click.IntRange(min=2 * WINDOWS),
    default=100,
    show_default=True,
    metavar="N",
    help="Batches that each run measures.",
)
MOST_ITERS = click.option(
    "--most-iters",
    type=click.IntRange(min=2 * WINDOWS),
    metavar="N",
    help="A run measures twice as many batches while its windows differ, up to N. Default: four"
    " times --iters.",
)
WARMUP = click.option(
    "--warmup",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Batches before the measured ones.",
)
PLACE = click.option(
    "--mount",
    "place",
    type=click.Path(path_type=Path),
    metavar="MOUNT",
    help="The mount that the job reads. Default: the only mount of this node.",
)
COMMAND = click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD..."
)
# How many times as many batches a run measures at most, if its windows differ.
_LONGER = 4


@dataclass(frozen=True, slots=True)
class MeasuredMount:
    """``data_bytes`` are those of all its files, ``tier_bytes`` the capacity of its tiers."""

    mountpoint: str
    data_bytes: int
    tier_bytes: int


def measured_mount(place: Path | None) -> MeasuredMount:
    """The mount at or above ``place``, or the only one of this node. Raises MonarchError if it does
    not answer, and MountPointError if no job that reads it can be measured."""
    mountpoint, figures = public_status(_only() if place is None else place)
    for key, value in (("open", "none"), ("datapath", "python")):
        if figures[key] == value:
            raise MountPointError(
                f"{escape_text(mountpoint)} is mounted with `{key}: {value}`, so its daemon does"
                " not see which job opens a file, and cannot measure one",
                hint="mount it again with -o open=open,datapath=auto",
            )
    return MeasuredMount(
        mountpoint, figures["bytes"], sum(tier["capacity"] for tier in figures["tiers"])
    )


def _only() -> Path:
    found = [mount.mount_point for mount in mount_table() if mount.kind == MONARCH_TYPE]
    if len(found) != 1:
        which = ", ".join(escape_text(os.fspath(each)) for each in found) or "none"
        raise NotMountedError(
            f"the job needs one mount of Monarch, and there are: {which}",
            hint="name it with --mount",
        )
    return found[0]


def most_batches(iters: int, most_iters: int | None) -> int:
    """The batches that a run measures at most. Raises UsageError if they are fewer than at
    least."""
    most = _LONGER * iters if most_iters is None else most_iters
    if most < iters:
        raise UsageError(f"--most-iters {most} is less than --iters {iters}")
    return most


def limit_of(rate: float | None) -> int:
    """The limit of the source in bytes/s, 0 for none. Raises UsageError if it is out of range."""
    if rate is not None and not LEAST_LIMIT <= rate <= MOST_LIMIT:
        raise UsageError("--source is a rate of at least 1MiB/s and at most 1TiB/s")
    return int(rate or 0)
