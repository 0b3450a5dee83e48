"""``monarch ckpt``: what was written through a mount, and whether it is at the source."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click
from rich.table import Table
from rich.text import Text

from monarch.cli import complete
from monarch.cli.ask import ask, inside
from monarch.cli.draining import SILENCE_S, drain, seconds, waiting
from monarch.cli.output import age, duration, emit_json, progress_bar, remark, say, stdout
from monarch.errors import MonarchError, NotDrainedError, TierError, UsageError
from monarch.frameworks.shelf import MANIFEST, Listed, list_checkpoints, prune
from monarch.places import state_root
from monarch.registry import MountRecord, Registry
from monarch.report import (
    ConflictsReport,
    KeptReport,
    LostReport,
    RefusalsReport,
    WrittenFile,
    WrittenFiles,
    WrittenTotals,
)
from monarch.sides import Compared, compare
from monarch.text import counted, escape_text
from monarch.timeouts import within
from monarch.units import MiB, format_bytes

INTERRUPTED = 130
_WRONG = 1
_COPY_BYTES = 8 * MiB
# A manifest is read through the mount: from the node's disk, or from a source that may hang.
_PATIENCE_S = 10.0
# What a checkpointer keeps beside the checkpoints.
_BESIDE = frozenset({MANIFEST, "lock"})
_WRONG_VERDICTS = frozenset({"damaged", "different", "missing", "unreadable"})

_MOUNT = click.argument(
    "mountpoint",
    metavar="MOUNT",
    type=click.Path(path_type=Path),
    shell_complete=complete.mount_points,
)
_PATH = click.argument("path", required=False, type=click.Path(), metavar="[PATH]")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@dataclass(frozen=True, slots=True)
class Row:
    """A checkpoint, or another file that was written. ``path`` is relative to the mount.

    ``xxh3`` is the checksum that its manifest has, ``complete`` whether it has the length that
    this tells; both are None without a manifest. ``step`` and ``epoch`` as there.
    """

    path: str
    bytes: int
    durable: str
    written_ns: int
    xxh3: str | None = None
    complete: bool | None = None
    step: int | None = None
    epoch: int | None = None


@click.group()
def ckpt() -> None:
    """List, await, verify or thin out all files written through a mount, checkpoints or not.

    Files come to the source in the background. Checkpoints of monarch.frameworks.checkpoint are
    known by their manifests, all others as the files that they are.
    """


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt ls /mnt/data
  monarch ckpt ls /mnt/data ckpt
  monarch ckpt ls /mnt/data --json | jq '.files[] | select(.durable != "source")'
"""
)
@_MOUNT
@_PATH
@_JSON
def ls(mountpoint: Path, path: str | None, as_json: bool) -> None:
    """Show what was written: bytes, where they are safe, age, checksum, and whether complete.

    PATH is a directory or file in the mount, or relative to it; without it, all that this mount
    and those before it have written and not forgotten. DURABLE is none (a crash of the node may
    take it), local (on the node's disk) or source.
    """
    record, below = _place(mountpoint, path)
    rows = rows_of(record, below)
    if as_json:
        emit_json({"mountpoint": record.mountpoint, "files": [asdict(row) for row in rows]})
        return
    if not rows:
        say("nothing was written")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("name", "bytes", "durable", "age", "checksum", "complete"):
        table.add_column(column, overflow="fold")
    for row in rows:
        complete = {True: "yes", False: "no", None: "-"}[row.complete]
        table.add_row(
            Text(escape_text(row.path)),
            format_bytes(row.bytes),
            row.durable,
            age(row.written_ns),
            "recorded" if row.xxh3 else "-",
            complete,
        )
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
@_MOUNT
@_PATH
@click.option("--newest", is_flag=True, help="Only the newest checkpoint, or file, of PATH.")
@click.option("--all", "everything", is_flag=True, help="All that was written by now: the default.")
@click.option(
    "--timeout",
    "timeout_s",
    callback=seconds,
    default=None,
    metavar="TIME",
    help="Give up after so long, with exit code 13. Without it: as long as it takes.",
)
@_JSON
def wait(
    mountpoint: Path,
    path: str | None,
    newest: bool,
    everything: bool,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Wait until what was written is at the source.

    The exit code is 0 when it is, and 13 if it was not in time; draining goes on all the same.
    """
    if newest and everything:
        raise UsageError("--newest and --all exclude each other", hint="leave one of them out")
    record, below = _place(mountpoint, path)
    params: dict[str, Any] = {"paths": [below]} if below else {}
    if newest:
        params = {"paths": _newest(record, below)}
    try:
        report = drain(record, params, timeout_s=timeout_s, quiet=as_json)
    except KeyboardInterrupt:
        remark("draining goes on; `monarch ckpt ls MOUNT` shows how far")
        return INTERRUPTED
    if as_json:
        emit_json(report.to_dict())
        return 0 if report.drained else NotDrainedError.exit_code
    if not report.drained:
        after = f"after {duration(timeout_s or 0.0)}, "
        hint = "draining goes on; `monarch status MOUNT` shows what it waits for"
        raise NotDrainedError(f"{after}{waiting(report)}", hint=hint)
    say("all of it is at the source")
    return 0


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt verify /mnt/data
  monarch ckpt verify /mnt/data ckpt --json | jq '.files[] | select(.verdict != "same")'
"""
)
@_MOUNT
@_PATH
@_JSON
def verify(mountpoint: Path, path: str | None, as_json: bool) -> int:
    """Read what was written on both sides, and compare: the mount's bytes and the source's.

    Checksums of a manifest are compared as well. What is not at the source yet is read in the mount
    alone. The exit code is 1 if anything is not as it should be.
    """
    record, below = _place(mountpoint, path)
    rows = rows_of(record, below)
    mount, source = Path(record.mountpoint), Path(record.source)
    total = sum(row.bytes * (1 + (row.durable == "source")) for row in rows)
    done = 0
    results: list[Compared] = []
    with progress_bar(quiet=as_json, of_bytes=True) as advance:
        for row in rows:

            def progress(count: int, name: str = row.path) -> None:
                nonlocal done
                done += count
                advance(done, max(total, done), f"reading {name}")

            results.append(
                compare(
                    row.path,
                    mount=mount,
                    source=source,
                    drained=row.durable == "source",
                    expected=row.xxh3,
                    progress=progress,
                )
            )
    wrong = [result for result in results if result.verdict in _WRONG_VERDICTS]
    if as_json:
        emit_json({"ok": not wrong, "files": [asdict(result) for result in results]})
    else:
        for result in results:
            stdout().print(_line(result), soft_wrap=True)
        say(_summary(results))
    return _WRONG if wrong else 0


def _line(result: Compared) -> Text:
    styles = {"same": "green", "waiting": "yellow"}
    why = f": {result.why}" if result.why else ""
    return Text.assemble(
        (f"{result.verdict:10}", styles.get(result.verdict, "bold red")),
        f"  {escape_text(result.path)}{escape_text(why)}",
    )


def _summary(results: Sequence[Compared]) -> str:
    counts = {
        verdict: sum(result.verdict == verdict for result in results)
        for verdict in ("same", "waiting")
    }
    told = f"{counted(counts['same'], 'file is', 'files are')} the same on both sides"
    if counts["waiting"]:
        told += f", {counts['waiting']:,} not at the source yet"
    if wrong := len(results) - sum(counts.values()):
        told += f", {wrong:,} not as they should be"
    return told


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
    told = f"{value!r} is neither 'epoch' nor a number of steps"
    raise click.BadParameter(told, context, parameter)


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt gc /mnt/data --keep-last 2 --dry-run
  monarch ckpt gc /mnt/data ckpt --keep-last 2 --keep-every epoch
"""
)
@_MOUNT
@_PATH
@click.option(
    "--keep-last",
    type=click.IntRange(1, 1_000_000),
    required=True,
    metavar="N",
    help="Keep the newest N whose bytes have their checksum.",
)
@click.option(
    "--keep-every",
    callback=_every,
    default=None,
    metavar="epoch|STEPS",
    help="Keep the newest of each epoch, or of each so many steps, too.",
)
@click.option(
    "--durable",
    type=click.Choice(["local", "source"]),
    default="source",
    show_default=True,
    help="Remove nothing before one of the newest N is that safe.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@_JSON
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

    The newest ones are read first, and those count whose bytes have their checksum: never is the
    newest good one removed, nor anything newer. A trainer that runs removes old ones itself; its
    directory is refused (exit code 7).
    """
    record, below = _place(mountpoint, path)
    removed = []
    for directory in _shelves(below, _written(record, below)):
        # What has no manifest is not looked into, and is not made one.
        if not _listed(record, directory):
            continue
        gone = prune(
            Path(record.mountpoint) / directory,
            keep_last=keep_last,
            keep_every=keep_every,
            durable=durable,
            dry_run=dry_run,
        )
        removed += [(os.path.join(directory, each.name), each.size) for each in gone]
    total = sum(size for _, size in removed)
    if as_json:
        files = [{"path": name, "bytes": size} for name, size in removed]
        emit_json({"removed": not dry_run, "files": files, "bytes": total})
        return
    for name, size in removed:
        say(f"{escape_text(name)}  {format_bytes(size)}")
    verb = "would go" if dry_run else "removed"
    told = f"{counted(len(removed), 'checkpoint', 'checkpoints')} {verb}, {format_bytes(total)}"
    say(told)


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt lost /mnt/data
  monarch ckpt lost /mnt/data --recover ckpt/step-100 --to /scratch/step-100
  monarch ckpt lost /mnt/data --discard ckpt/step-100
  monarch ckpt lost /mnt/data --acknowledge
"""
)
@_MOUNT
@click.option("--acknowledge", is_flag=True, help="It is known now: `monarch status` is ok again.")
@click.option(
    "--recover",
    metavar="PATH|NUMBER",
    help="Copy what is kept of this file, the newest if there are several, to the file --to names.",
)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where --recover writes; it must not exist.",
)
@click.option("--discard", metavar="PATH|NUMBER", help="Give up what is kept of this file.")
@click.option("--discard-all", is_flag=True, help="Give up all that is kept.")
@_JSON
def lost(
    mountpoint: Path,
    acknowledge: bool,
    recover: str | None,
    to: Path | None,
    discard: str | None,
    discard_all: bool,
    as_json: bool,
) -> int:
    """Show the files that were written and whose bytes are gone, and what is left of them.

    A power cut takes what was never fsynced; a disk that fails can take more. At the source each
    is as it was before. What a power cut has left is kept in the tier, whole or not: it can be
    copied from there, or given up. Files that this mount cannot show and brings to the source are
    named as well. The exit code is 1 if files were lost and not acknowledged.
    """
    if (recover is None) != (to is None):
        raise UsageError("--recover needs --to, and --to needs --recover")
    record = Registry(state_root()).find(mountpoint)

    params: dict[str, Any] = {"acknowledge": acknowledge}
    report = ask(record, "lost", params, answer=LostReport, timeout=SILENCE_S)
    if recover is not None and to is not None:
        kept = _kept_of(report, record, recover)[-1]
        count = _recover(kept, to)
        if not as_json:
            say(f"{format_bytes(count)} of {_kept_name(kept)} are in {escape_text(os.fspath(to))}")
    given_up = report.kept if discard_all else []
    if discard is not None:
        given_up = _kept_of(report, record, discard)
    if given_up:
        params["discard"] = [kept.number for kept in given_up]
        # As long as the removal of large files takes.
        report = ask(record, "lost", params, answer=LostReport, timeout=None)
    if as_json:
        emit_json(report.to_dict())
    elif recover is None:
        for name in report.files:
            say(escape_text(name))
        for kept in report.kept:
            short = f" of {format_bytes(kept.recorded)}" if kept.recorded > kept.size else ""
            when = f"written {age(kept.written_ns)} ago, lost {age(kept.found_ns)} ago"
            say(
                f"kept: {kept.number}  {_kept_name(kept)}  {format_bytes(kept.size)}{short}, {when}"
            )
        for name in report.hidden:
            say(f"not shown, on its way to the source: {escape_text(name)}")
        if not (report.files or report.kept or report.hidden):
            say("nothing is lost")
    return _WRONG if report.files and not report.acknowledged else 0


def _kept_name(kept: KeptReport) -> str:
    return escape_text(kept.path) or "a file whose name is not known"


def _kept_of(report: LostReport, record: MountRecord, wanted: str) -> list[KeptReport]:
    """What is kept of a file, by its path or its number, the oldest first. Raises UsageError."""
    found = [kept for kept in report.kept if str(kept.number) == wanted]
    if not found:
        (path,) = inside(record, [wanted])
        found = [kept for kept in report.kept if kept.path == path]
    if not found:
        hint = f"`monarch ckpt lost {escape_text(record.mountpoint)}` lists what is kept"
        raise UsageError(f"nothing is kept of {escape_text(wanted)}", hint=hint)
    return found


def _recover(kept: KeptReport, to: Path) -> int:
    """Copy what is kept to a new file; how many bytes. Raises UsageError, TierError."""
    try:
        source = os.open(kept.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        told = f"{escape_text(kept.file)}: {error.strerror}"
        raise TierError(told, hint="run it as the user of the mount's daemon") from error
    with open(source, "rb") as kept_file:
        try:
            with to.open("xb") as file:
                shutil.copyfileobj(kept_file, file, _COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            told = f"{escape_text(os.fspath(to))}: {error.strerror}"
            raise UsageError(
                told, hint="name a new file in a place with room, with --to"
            ) from error


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt conflicts /mnt/data
  monarch ckpt conflicts /mnt/data --acknowledge
"""
)
@_MOUNT
@click.option("--acknowledge", is_flag=True, help="It is known now: `monarch status` is ok again.")
@_JSON
def conflicts(mountpoint: Path, acknowledge: bool, as_json: bool) -> int:
    """Show what was written here and was changed by others at the source as well.

    The source keeps what others wrote. What was written here lies beside it, under the name behind
    "kept as". The last conflicts of this mount are shown. The exit code is 1 if there are any that
    were not acknowledged.
    """
    record = Registry(state_root()).find(mountpoint)
    params = {"acknowledge": acknowledge}
    report = ask(record, "conflicts", params, answer=ConflictsReport, timeout=SILENCE_S)
    if as_json:
        emit_json(report.to_dict())
    else:
        for each in report.conflicts:
            kept = f"; kept as {each.kept}" if each.kept else ""
            told = escape_text(f"{each.path}: {each.why}{kept}")
            say(told)
        if not report.conflicts:
            say("no conflicts")
    return _WRONG if report.conflicts and not report.acknowledged else 0


@ckpt.command(
    name="set-aside",
    epilog="""\b
Examples:
  monarch ckpt set-aside /mnt/data
  monarch ckpt set-aside /mnt/data ckpt/new
  monarch ckpt set-aside /mnt/data --json | jq -r '.refused[].path'
""",
)
@_MOUNT
@_PATH
@_JSON
def set_aside(mountpoint: Path, path: str | None, as_json: bool) -> int:
    """Show the changes that the source refuses, or let others go before those of PATH.

    A change that the source refuses holds up all later changes of the same user. Set aside, it
    holds up only what depends on its path or file. After eight tries and ten minutes that happens
    by itself. What is set aside is kept, is tried again every minute, and stays set aside over
    unmount and mount. The exit code is 1 if the source refuses anything.
    """
    record = Registry(state_root()).find(mountpoint)
    if path is None:
        report = ask(record, "refused", {}, answer=RefusalsReport, timeout=SILENCE_S)
    else:
        report = _decided(record, "set-aside", path)
    _tell_refused(report, as_json=as_json)
    return _WRONG if report.refused else 0


@ckpt.command(
    epilog="""\b
Examples:
  monarch ckpt retry /mnt/data
  monarch ckpt retry /mnt/data ckpt/new && echo taken
"""
)
@_MOUNT
@_PATH
@_JSON
def retry(mountpoint: Path, path: str | None, as_json: bool) -> int:
    """Try now what the source has refused, without PATH all of it.

    The exit code is 0 if the source has taken it, 1 if it refuses it again, and 13 if it does not
    answer in a minute; then it is tried when the source answers.
    """
    record = Registry(state_root()).find(mountpoint)
    report = _decided(record, "retry", path)
    _tell_refused(report, as_json=as_json)
    return _WRONG if report.refused else 0


@ckpt.command(
    epilog="""\b
Examples:
  cp -r /mnt/data/ckpt/new /scratch/ && monarch ckpt discard /mnt/data ckpt/new
"""
)
@_MOUNT
@click.argument("path", type=click.Path(), metavar="PATH")
@_JSON
def discard(mountpoint: Path, path: str, as_json: bool) -> None:
    """Give up what the source refuses at PATH, with all that waits beneath it: it cannot be undone.

    What was made on the mount there is removed on it, bytes and all, and a file that the source has
    is shown as it is there. At the source nothing is changed. What cannot be given up is refused
    (exit code 2): nothing is refused there, or something there is a file of the source under
    another name. So is a file that is open (exit code 10). Without an answer of the source for a
    minute the exit code is 13.
    """
    record = Registry(state_root()).find(mountpoint)
    report = _decided(record, "discard", path)
    if as_json:
        emit_json(report.to_dict())
        return
    for name in report.removed:
        say(f"removed on the mount: {escape_text(name)}")
    told = counted(len(report.refused), "change is", "changes are")
    say(f"given up; {told} still refused" if report.refused else "given up")


def _decided(record: MountRecord, verb: str, path: str | None) -> RefusalsReport:
    params = {} if path is None else {"path": inside(record, [path])[0]}
    # As long as the source takes, which the daemon bounds.
    return ask(record, verb, params, answer=RefusalsReport, timeout=None)


def _tell_refused(report: RefusalsReport, *, as_json: bool) -> None:
    if as_json:
        emit_json(report.to_dict())
        return
    for each in report.refused:
        how = "set aside" if each.aside else "holds up its user"
        tries = counted(each.tries, "try", "tries")
        say(escape_text(f"{each.path}: {each.kind}: {each.why} ({how}, {tries})"))
    if not report.refused:
        say("the source refuses nothing")


# -- what there is ---------------------------------------------------------------------------------


def _place(mountpoint: Path, path: str | None) -> tuple[MountRecord, str]:
    """The mount, and the path relative to it that is asked about: "" for all of it."""
    record = Registry(state_root()).find(mountpoint)
    return record, inside(record, [path if path is not None else os.path.abspath(mountpoint)])[0]


def rows_of(record: MountRecord, below: str) -> list[Row]:
    """Checkpoints and other written files at and beneath ``below``, newest first."""
    written = _written(record, below)
    known = {file.path: file for file in written}
    shelves = _shelves(below, written)
    rows = [
        _row_of(directory, listed, known)
        for directory in shelves
        for listed in _listed(record, directory)
    ]
    rows = [row for row in rows if _is_within(row.path, below)]
    named = {row.path for row in rows}
    rows += [
        Row(file.path, file.bytes, file.durable, file.mtime_ns)
        for file in written
        if file.path not in named
        and not (os.path.dirname(file.path) in shelves and os.path.basename(file.path) in _BESIDE)
    ]
    return sorted(rows, key=lambda row: (-row.written_ns, row.path))


def _row_of(directory: str, listed: Listed, known: dict[str, WrittenFile]) -> Row:
    checkpoint = listed.checkpoint
    path = os.path.join(directory, checkpoint.name)
    # What nobody has written through this mount comes from the source.
    durable = known[path].durable if path in known else listed.durable or "source"
    return Row(
        path,
        checkpoint.size,
        durable,
        checkpoint.saved_ns,
        checkpoint.xxh3,
        listed.complete,
        checkpoint.step,
        checkpoint.epoch,
    )


def _written(record: MountRecord, below: str) -> list[WrittenFile]:
    """What the daemon knows to be written at and beneath a path, in no order."""
    files: list[WrittenFile] = []
    ask(
        record,
        "written",
        {"path": below},
        answer=WrittenTotals,
        timeout=SILENCE_S,
        on_progress=lambda raw: files.extend(WrittenFiles.from_dict(raw).files),
    )
    return files


def _shelves(below: str, written: Iterable[WrittenFile]) -> list[str]:
    """The directories that may have a manifest, relative to the mount."""
    found = {os.path.dirname(f.path) for f in written if os.path.basename(f.path) == MANIFEST}
    return sorted(found | {below, os.path.dirname(below)})


def _listed(record: MountRecord, directory: str) -> list[Listed]:
    """Raises MonarchError if the mount does not give its manifest in time."""
    where = Path(record.mountpoint) / directory
    found: list[Listed] = []
    failed: list[BaseException] = []

    def task() -> None:
        try:
            found.extend(list_checkpoints(where))
        except NotADirectoryError:
            pass
        except (OSError, MonarchError) as error:
            failed.append(error)

    if not within(_PATIENCE_S, task):
        raise MonarchError(
            f"{escape_text(os.fspath(where))} has not answered for {_PATIENCE_S:g} seconds",
            hint=f"`monarch status {escape_text(record.mountpoint)}` says what hangs",
        )
    if failed:
        raise failed[0]
    return found


def _newest(record: MountRecord, below: str) -> list[str]:
    """The newest whole checkpoint with the manifest that names it, or the newest file."""
    rows = rows_of(record, below)
    checkpoints = [row for row in rows if row.complete]
    for row in checkpoints or rows:
        beside = os.path.join(os.path.dirname(row.path), MANIFEST)
        return [row.path, beside] if row.complete else [row.path]
    raise UsageError("nothing was written there", hint="`monarch ckpt ls MOUNT` shows what was")


def _is_within(path: str, directory: str) -> bool:
    return not directory or path == directory or path.startswith(directory + "/")
