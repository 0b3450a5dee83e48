"""The mount whose job is measured, and the options of the commands that measure one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import click

from monarch.analysis.plan import WINDOWS
from monarch.errors import MountPointError, NotMountedError, UsageError
from monarch.foresight.messages import LEAST_LIMIT, MOST_LIMIT
from monarch.posix.mounts import MONARCH_TYPE, mount_table
from monarch.text import escape_text

# The attribute of the root of a mount that has its public figures.
_FIGURES = "user.monarch.status"

ITERS = click.option(
    "--iters",
    type=click.IntRange(min=2 * WINDOWS),
    default=100,
    show_default=True,
    metavar="N",
    help="Batches that each run measures.",
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
    type=click.Path(path_type=Path, file_okay=False),
    metavar="MOUNT",
    help="The mount that the job reads. Default: the only mount of this node.",
)
COMMAND = click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD..."
)


@dataclass(frozen=True, slots=True)
class MeasuredMount:
    """``data_bytes`` are those of all its files, ``tier_bytes`` the capacity of its tiers."""

    mountpoint: str
    data_bytes: int
    tier_bytes: int


def measured_mount(place: Path | None) -> MeasuredMount:
    """The mount at or above ``place``, or the only one of this node. Raises NotMountedError, and
    MountPointError if no job that reads it can be measured."""
    mountpoint = _mountpoint(place)
    where = escape_text(mountpoint)
    try:
        figures = json.loads(os.getxattr(mountpoint, _FIGURES))
    except OSError as error:
        raise NotMountedError(f"the mount {where} does not answer: {error.strerror}") from error
    for key, value in (("open", "none"), ("datapath", "python")):
        if figures[key] == value:
            raise MountPointError(
                f"{where} is mounted with `{key}: {value}`, so its daemon does not see which job"
                " opens a file, and cannot measure one",
                hint="mount it again with -o open=open,datapath=auto",
            )
    return MeasuredMount(
        mountpoint, figures["bytes"], sum(tier["capacity"] for tier in figures["tiers"])
    )


def _mountpoint(place: Path | None) -> str:
    found = [os.fspath(mount.mount_point) for mount in mount_table() if mount.kind == MONARCH_TYPE]
    if place is not None:
        real = os.path.realpath(place)
        above = [each for each in found if f"{real}/".startswith(f"{each.rstrip('/')}/")]
        if not above:
            raise NotMountedError(f"{escape_text(os.fspath(place))} is not in a mount of Monarch")
        return max(above, key=len)
    if len(found) != 1:
        which = ", ".join(map(escape_text, found)) or "none"
        raise NotMountedError(
            f"the job needs one mount of Monarch, and there are: {which}",
            hint="name it with --mount",
        )
    return found[0]


def limit_of(rate: float | None) -> int:
    """The limit of the source in bytes/s, 0 for none. Raises UsageError if it is out of range."""
    if rate is not None and not LEAST_LIMIT <= rate <= MOST_LIMIT:
        raise UsageError("--source is a rate of at least 1MiB/s and at most 1TiB/s")
    return int(rate or 0)
