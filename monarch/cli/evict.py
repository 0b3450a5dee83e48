"""``monarch evict``: drop copies from the tiers; the source keeps everything."""

from __future__ import annotations

from pathlib import Path

import click

from monarch.cli import complete
from monarch.cli.ask import ask, inside
from monarch.cli.output import emit_json, stdout
from monarch.places import state_root
from monarch.registry import Registry
from monarch.report import EvictReport
from monarch.units import format_bytes


@click.command(
    epilog="""\b
Examples:
  monarch evict /mnt/data
  monarch evict /mnt/data train
"""
)
@click.argument("mountpoint", type=click.Path(path_type=Path), shell_complete=complete.mount_points)
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def evict(mountpoint: Path, paths: tuple[str, ...], as_json: bool) -> None:
    """Drop copies from the tiers.

    PATHs are files and directories inside the mount, or relative to it; without any, everything.
    The files stay readable, from the source; those open now are read from their copy until they
    are closed.
    """
    record = Registry(state_root()).find(mountpoint)
    params = {"paths": inside(record, paths)}
    report = ask(record, "evict", params, answer=EvictReport, timeout=None)
    if as_json:
        emit_json(report.to_dict())
    else:
        copies = "copy" if report.files == 1 else "copies"
        stdout().print(f"{report.files:,} {copies} dropped, {format_bytes(report.bytes)} freed")
