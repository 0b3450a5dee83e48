"""The arguments and options that several verbs have."""

from __future__ import annotations

import os
from pathlib import Path

import click

from monarch.cli import complete
from monarch.cli.daemon_call import inside
from monarch.config.defaults import state_root
from monarch.control.registry import MountRecord, Registry

MOUNT = click.argument(
    "mountpoint",
    metavar="MOUNT",
    type=click.Path(path_type=Path),
    shell_complete=complete.mount_points,
)
PATH = click.argument("path", required=False, type=click.Path(), metavar="[PATH]")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def place(mountpoint: Path, path: str | None) -> tuple[MountRecord, str]:
    """The mount, and ``path`` relative to it: "" for the whole mount."""
    record = Registry(state_root()).find(mountpoint)
    return record, inside(record, [path if path is not None else os.path.abspath(mountpoint)])[0]
