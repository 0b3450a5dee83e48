"""``monarch ckpt``: the files written through a mount, and whether they are at the source."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click
from rich.table import Table
from rich.text import Text

from monarch.cli import checkpoints, daemon_call
from monarch.cli.output import age, emit_json, progress_bar, remark, say, show, stdout
from monarch.cli.undrained import conflicts, discard, lost, retry, set_aside
from monarch.errors import NotDrainedError, UsageError
from monarch.frameworks.store import Retention, pruned
from monarch.text import counted, escape_text, format_bytes

_WRONG = 1


@click.group()
def ckpt() -> None:
    """List, await, verify or prune all files written through a mount, checkpoints or not.

    Files are written to the source in the background. A manifest identifies checkpoints of
    monarch.frameworks.checkpoint; all other files are listed as files.
    """


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt ls /mnt/data
  monarch ckpt ls /mnt/data ckpt
  monarch ckpt ls /mnt/data --json | jq '.files[] | select(.durable != "source")'
"""
)
@daemon_call.MOUNT
@daemon_call.PATH
@daemon_call.JSON
def ls(mountpoint: Path, path: str | None, as_json: bool) -> None:
    """Show the files written: size, durability, age, checksum, and whether each is complete.

    PATH is a directory or file in the mount, or relative to it. Without PATH the list has all
    files that this mount and earlier ones wrote. DURABLE is none (lost if the node crashes), local
    (on the disk of the node), peer (also on the disk of another node) or source.
    """
    record, below = daemon_call.mount_and_path(mountpoint, path)
    rows = checkpoints.rows_of(record, below)
    if as_json or not rows:
        show({"mountpoint": record.mountpoint, "files": rows}, as_json, "nothing was written")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "bytes", "durable", "age", "checksum", "complete"):
        table.add_column(column, overflow="fold")
    for row in rows:
        name, size, written = Text(escape_text(row.path)), format_bytes(row.bytes), row.written_ns
        checksum = "recorded" if row.xxh3 else "-"
        complete = {True: "yes", False: "no", None: "-"}[row.complete]
        table.add_row(name, size, row.durable, age(written), checksum, complete)
    console = stdout()
    if not console.is_terminal:
        console.width = max(console.width, 250)
    console.print(table)


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt wait /mnt/data
  monarch ckpt wait /mnt/data --newest --timeout 10m && echo safe
"""
)
@daemon_call.MOUNT
@daemon_call.PATH
@click.option("--newest", is_flag=True, help="Only the newest checkpoint, or file, of PATH.")
@click.option("--all", "everything", is_flag=True, help="All files written so far (the default).")
@click.option(
    "--timeout",
    "timeout_s",
    callback=daemon_call.seconds,
    default=None,
    metavar="TIME",
    help="Give up after this time, with exit code 13. Default: no limit.",
)
@daemon_call.JSON
def wait(
    mountpoint: Path,
    path: str | None,
    newest: bool,
    everything: bool,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Wait until the written files are at the source.

    The exit code is 0 when they are, and 13 after the timeout, while draining continues. It is also
    13 when the journal in the tier has failed, so that nothing is drained before the next mount.
    """
    if newest and everything:
        raise UsageError("--newest and --all exclude each other", hint="leave one of them out")
    record, below = daemon_call.mount_and_path(mountpoint, path)
    params = {"paths": [below]} if below else {}
    if newest:
        params = {"paths": checkpoints.newest_of(record, below)}
    since_s = time.monotonic()
    try:
        report = daemon_call.drain(record, params, timeout_s=timeout_s, quiet=as_json)
    except KeyboardInterrupt:
        remark("draining continues; `monarch ckpt ls MOUNT` shows its progress")
        return daemon_call.INTERRUPTED
    if not report.drained and not as_json:
        after = daemon_call.waited(timeout_s, since_s)
        hint = "draining continues; `monarch status MOUNT` shows what it waits for"
        if not after:
            hint = "the next mount continues; check the disk of the tier first: `dmesg`"
        raise NotDrainedError(f"{after}{daemon_call.waiting(report)}", hint=hint)
    show(report, as_json, "all files are at the source")
    return 0 if report.drained else NotDrainedError.exit_code


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt verify /mnt/data
  monarch ckpt verify /mnt/data ckpt --json | jq '.files[] | select(.verdict != "same")'
"""
)
@daemon_call.MOUNT
@daemon_call.PATH
@daemon_call.JSON
def verify(mountpoint: Path, path: str | None, as_json: bool) -> int:
    """Compare the bytes of written files in the mount with those at the source.

    Checksums of a manifest are compared as well. A file that is not at the source yet is only read
    in the mount, and so is one that is being changed. The exit code is 1 if a file is damaged,
    different, missing or unreadable.
    """
    record, below = daemon_call.mount_and_path(mountpoint, path)
    with progress_bar(quiet=as_json, of_bytes=True) as advance:

        def progress(row: checkpoints.Row, done: int, total: int) -> None:
            advance(done, total, f"reading {row.path}")

        results = checkpoints.compare_all(record, below, progress)
    wrong = [result for result in results if result.verdict in checkpoints.WRONG]
    if as_json:
        emit_json({"ok": not wrong, "files": results})
    else:
        for result in results:
            stdout().print(_line(result), soft_wrap=True)
        say(_summary(results))
    return _WRONG if wrong else 0


def _line(result: checkpoints.Compared) -> Text:
    styles = {"same": "green", "waiting": "yellow"}
    why = f": {result.why}" if result.why else ""
    return Text.assemble(
        (f"{result.verdict:10}", styles.get(result.verdict, "bold red")),
        f"  {escape_text(result.path)}{escape_text(why)}",
    )


def _summary(results: Sequence[checkpoints.Compared]) -> str:
    counts = Counter(result.verdict for result in results)
    same, undrained = counts["same"], counts["waiting"]
    summary = f"{counted(same, 'file is', 'files are')} the same on both sides"
    if undrained:
        summary += f", {undrained:,} not at the source yet"
    if wrong := len(results) - same - undrained:
        summary += f", {wrong:,} wrong"
    return summary


def _every(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | Literal["epoch"] | None:
    """``epoch``, or a number of steps."""
    if value is None:
        return None
    if value == "epoch":
        return "epoch"
    if value.isdecimal() and int(value) > 0:
        return int(value)
    words = f"{value!r} is neither 'epoch' nor a number of steps"
    raise click.BadParameter(words, context, parameter)


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt gc /mnt/data --keep-last 2 --dry-run
  monarch ckpt gc /mnt/data ckpt --keep-last 2 --keep-every epoch
"""
)
@daemon_call.MOUNT
@daemon_call.PATH
@click.option(
    "--keep-last",
    type=click.IntRange(1, 1_000_000),
    required=True,
    metavar="N",
    help="Keep the newest N checkpoints whose checksum is right.",
)
@click.option(
    "--keep-every",
    callback=_every,
    default=None,
    metavar="epoch|STEPS",
    help="Keep the newest of each epoch, or of each interval of STEPS steps, too.",
)
@click.option(
    "--durable",
    type=click.Choice(["local", "source"]),
    default="source",
    show_default=True,
    help="Remove nothing until one of the newest N is durable there.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@daemon_call.JSON
def gc(
    mountpoint: Path,
    path: str | None,
    keep_last: int,
    keep_every: int | Literal["epoch"] | None,
    durable: Literal["local", "source"],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove old checkpoints that a manifest names, in the mount and so at the source.

    The newest are read first, and only those with the right checksum count: the newest good
    checkpoint and all newer ones are kept. A running trainer removes old ones itself: its directory
    is refused (exit code 7).
    """
    record, below = daemon_call.mount_and_path(mountpoint, path)
    removed = []
    written = checkpoints.written_of(record, below)
    for directory in checkpoints.manifest_directories(below, written):
        if not checkpoints.is_beneath(directory, below):
            continue
        with checkpoints.directory_of_checkpoints(record, directory) as opened:
            if opened is None:
                continue
            gone = pruned(
                opened,
                Retention(keep_last, keep_every, durable),
                dry_run=dry_run,
                shown=Path(record.mountpoint, directory),
            )
        removed += [(os.path.join(directory, each.name), each.size) for each in gone]
    total = sum(size for _, size in removed)
    files = [{"path": name, "bytes": size} for name, size in removed]
    lines = [f"{escape_text(name)}  {format_bytes(size)}" for name, size in removed]
    verb = "would be removed" if dry_run else "removed"
    last = f"{counted(len(removed), 'checkpoint', 'checkpoints')} {verb}, {format_bytes(total)}"
    show({"removed": not dry_run, "files": files, "bytes": total}, as_json, *lines, last)


for verb in (lost, conflicts, set_aside, retry, discard):
    ckpt.add_command(verb)
