"""``monarch evict``: removes copies from the tiers; the source keeps all files."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from monarch.cli.daemon_call import JSON, MAYBE_MOUNTPOINT, PATHS, ask, mount_and_paths
from monarch.cli.output import age, show
from monarch.errors import LockedError, TierError, UsageError
from monarch.telemetry.report import EvictReport
from monarch.text import counted, escape_text, format_bytes


@click.command(
    epilog="""\b
Examples:
  monarch evict /mnt/data
  monarch evict /mnt/data train
  monarch evict --tier /local/me                       list the sources of its copies
  monarch evict --tier /local/me --source /pfs/old     remove those of a source that is not mounted
"""
)
@MAYBE_MOUNTPOINT
@PATHS
@click.option("--tier", metavar="PATH", help="Show the copies in a tier, of all sources.")
@click.option("--source", metavar="DIR", help="With --tier: remove the copies of this source.")
@click.option(
    "--all", "everything", is_flag=True, help="With --tier: remove all copies that are not in use."
)
@JSON
def evict(
    mountpoint: Path | None,
    paths: tuple[str, ...],
    *,
    tier: str | None,
    source: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Remove copies from the tiers.

    PATHs are files and directories inside the mount, or relative to it; without PATH, all files. A
    PATH inside the mount can be given without MOUNTPOINT. The files stay readable from the source.
    A file that is open is read from its copy until it is closed. A copy that is being made is
    removed, and a running `monarch warm` does not copy these files.

    With --tier, copies of sources that are not mounted are removed. Written data that is not at its
    source yet is kept.
    """
    if (tier is None) == (mountpoint is None) or (tier is None and (source or everything)):
        raise UsageError(
            "name a mount point, or a tier with --tier",
            hint="monarch evict MOUNTPOINT [PATH]..., or monarch evict --tier PATH [--source DIR]",
        )
    if tier is not None:
        _of_tier(Path(os.path.abspath(tier)), source, everything=everything, as_json=as_json)
        return
    assert mountpoint is not None
    record, relative = mount_and_paths(mountpoint, paths)
    report = ask(record, "evict", {"paths": relative}, answer=EvictReport, timeout=None)
    dropped = counted(report.files, "copy", "copies")
    show(report, as_json, f"{dropped} dropped, {format_bytes(report.bytes)} freed")


def _of_tier(tier: Path, source: str | None, *, everything: bool, as_json: bool) -> None:
    from monarch.tiers.ownership import remove_copies, shared_copies

    if not tier.is_dir():
        what = "is not a directory" if tier.exists() else "does not exist"
        raise TierError(
            f"tier {escape_text(os.fspath(tier))!r} {what}",
            hint="name the PATH of `--tier PATH[:SIZE]`, without the size; is its disk mounted?",
        )
    wanted = os.path.realpath(source) if source is not None else None
    copies, lines = [], []
    is_found = False
    for held in shared_copies(tier):
        is_wanted = everything or (wanted is not None and os.path.realpath(held.source) == wanted)
        is_found |= is_wanted
        dropped, outcome = False, ""
        if is_wanted:
            try:
                remove_copies(held)
                dropped, outcome = True, "; dropped"
            except LockedError as error:
                outcome = f"; kept: {error.args[0]}"
        copies.append({**asdict(held), "dropped": dropped})
        what = f"{counted(held.files, 'copy', 'copies')}, {format_bytes(held.bytes)}"
        of = held.source or "an unknown source (of an earlier version)"
        lines.append(escape_text(f"{of}: {what}, last used {age(held.used_ns)} ago{outcome}"))
    if wanted is not None and not is_found:
        raise UsageError(
            f"tier {os.fspath(tier)!r} holds no copies of {source!r}",
            hint=f"`monarch evict --tier {tier}` lists its copies",
        )
    result = {"tier": os.fspath(tier), "copies": copies}
    show(result, as_json, *(lines or [f"{tier} holds no copies"]))
