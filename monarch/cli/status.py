"""``monarch status``: what the mounts of this node hold, serve and copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monarch.cli.ask import ask
from monarch.cli.output import age, duration, emit_json, stdout
from monarch.doctor import SeenMount, seen_mounts
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.health import Problem, State, worst
from monarch.places import state_root
from monarch.registry import MountRecord, Registry
from monarch.report import Mode, Quantiles, StatusReport, WritingReport
from monarch.text import counted, escape_text
from monarch.units import format_bytes

WATCH_SECONDS = 2.0
# A daemon answers from memory; longer than this it is in trouble, and the other mounts wait.
ANSWER_SECONDS = 5.0
LOG_COLUMNS = 250
_SHOWN_LOST = 5
# What --check ends with, beside that of a mount that nobody serves.
CHECK_CODES: Mapping[State, int] = {"ok": 0, "degraded": 11, "failing": 12}


@dataclass(frozen=True, slots=True)
class Line:
    """A mount of the overview: its report, or what is wrong with it and what to do."""

    seen: SeenMount
    report: StatusReport | None
    trouble: str

    def to_dict(self) -> dict[str, Any]:
        record = self.seen.record
        return {
            "mountpoint": self.seen.mountpoint,
            "state": self.report.state if self.report else self.seen.state,
            "source": record.source if record else None,
            "pid": record.pid if record else None,
            "log": record.log if record else None,
            "trouble": self.trouble,
            "report": self.report.to_dict() if self.report else None,
        }


@click.command(
    epilog="""\b
Examples:
  monarch status
  monarch status /mnt/data --watch
  monarch status /mnt/data --json | jq .residency.fraction_files
  monarch status --check
"""
)
@click.argument("mountpoint", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C.")
@click.option(
    "--check",
    is_flag=True,
    help="Tell the health only, and by the exit code: 0 ok, 11 degraded, 12 failing, 9 dead or not"
    " answering; of several mounts the worst.",
)
def status(mountpoint: Path | None, as_json: bool, watch: bool, check: bool) -> int:
    """Show what mounts hold, serve and copy.

    Without MOUNTPOINT one line for each mount of this user; with it, or with any path inside,
    everything about that mount.
    """
    if watch and (as_json or check):
        raise UsageError(
            f"--watch and {'--json' if as_json else '--check'} exclude each other",
            hint="call `monarch status --json` repeatedly",
        )
    records = Registry(state_root())
    if check:
        return _check(_chosen(records, mountpoint), as_json=as_json)
    if as_json:
        if mountpoint is None:
            emit_json({"mounts": [line.to_dict() for line in overview(records)]})
        else:
            emit_json(report_of(records.find(mountpoint)).to_dict())
        return 0

    def shown() -> RenderableType:
        if mountpoint is None:
            return _table_of(overview(records))
        record = records.find(mountpoint)
        return _details(report_of(record), record)

    if watch:
        _watch(shown)
    else:
        console = stdout()
        if not console.is_terminal:
            # For `grep` and `awk` a mount stays on its line.
            console.width = max(console.width, LOG_COLUMNS)
        console.print(shown())
    return 0


def report_of(record: MountRecord) -> StatusReport:
    """Asks the daemon. NotMountedError if it is dead, MonarchError if it does not answer."""
    return ask(record, "status", {}, answer=StatusReport, timeout=ANSWER_SECONDS)


def overview(records: Registry, *, only: str | None = None) -> list[Line]:
    """A line for each mount, or for the one at the mount point ``only``; all are asked."""
    lines = []
    for seen in seen_mounts(records):
        if only is not None and seen.mountpoint != only:
            continue
        report, trouble = None, seen.advice
        if seen.state == "served" and seen.record is not None:
            try:
                report = report_of(seen.record)
            except MonarchError as error:
                trouble = str(error)
        lines.append(Line(seen, report, trouble))
    return lines


def _chosen(records: Registry, mountpoint: Path | None) -> list[Line]:
    """The lines of all mounts, or of the one that ``mountpoint`` is in. NotMountedError if none."""
    only = None if mountpoint is None else records.find(mountpoint).mountpoint
    return [line for line in overview(records, only=only) if line.seen.state != "foreign"]


def _check(lines: Sequence[Line], *, as_json: bool) -> int:
    """Tell the health of each mount on a line of its own; the exit code says the worst."""
    found = [line.report.health for line in lines if line.report is not None]
    told = [
        {
            "mountpoint": line.seen.mountpoint,
            "health": line.report.health.state if line.report else None,
            "why": line.report.health.why if line.report else line.trouble,
        }
        for line in lines
    ]
    if as_json:
        emit_json({"mounts": told})
    for mount in [] if as_json else told:
        why = f": {mount['why']}" if mount["why"] else ""
        line = escape_text(f"{mount['mountpoint']}: {mount['health'] or 'not served'}{why}")
        stdout().print(Text(line), soft_wrap=True)
    if len(found) < len(lines):
        return NotMountedError.exit_code
    return CHECK_CODES[worst([health.state for health in found])]


def _watch(shown: Callable[[], RenderableType]) -> None:
    try:
        with Live(shown(), console=stdout(), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(shown(), refresh=True)
    except KeyboardInterrupt:
        # It is how one ends watching.
        return


_NOT_COUNTED = "not counted"
_HEALTH_STYLES: Mapping[State, str] = {"ok": "green", "degraded": "yellow", "failing": "bold red"}
_STATE_WORDS = {
    "served": "[red]not answering[/]",
    "stale": "[red]dead[/]",
    "leftover": "[yellow]ended[/]",
    "foreign": "another user's",
}


def _table_of(lines: list[Line]) -> RenderableType:
    if not lines:
        return Text("no Monarch mounts; `monarch mount SOURCE MOUNTPOINT` makes one")
    table = _table(
        "mount point", "source", "files", "resident", "hits", "epoch", "copies", "health"
    )
    remarks = []
    for line in lines:
        report, record = line.report, line.seen.record
        name = Text(escape_text(line.seen.mountpoint))
        if report is None:
            source = escape_text(record.source) if record else ""
            state = _STATE_WORDS[line.seen.state]
            table.add_row(name, Text(source), *[""] * 5, state)
            remarks.append(f"{escape_text(line.seen.mountpoint)}: {line.trouble}")
            continue
        table.add_row(
            name,
            Text(escape_text(report.source)),
            f"{report.snapshot.files:,}",
            _percent(report.residency.fraction_files),
            _percent(report.hit_ratio) if report.mode.counts_opens else _NOT_COUNTED,
            str(report.epochs[-1].number) if report.epochs else "-",
            _copies(report),
            _health_word(report),
        )
        for problem in report.health.problems:
            remarks.append(f"{escape_text(line.seen.mountpoint)}: {_told(problem)}")
    return Group(table, *(Text(escape_text(remark)) for remark in remarks))


def _details(report: StatusReport, record: MountRecord) -> RenderableType:
    up = duration(max(time.time() - report.started_ns / 1e9, 0))
    head = _table("", "", header=False)
    for name, value in (
        ("mount point", report.mountpoint),
        ("source", report.source),
        ("state", f"{report.state} for {up}, pid {report.pid}, version {report.version}"),
        ("datapath", _mode(report.mode)),
        ("snapshot", _snapshot(report)),
        ("resident", _resident(report)),
        (
            "copies",
            _copies(report) + f"; {report.copies.done:,} done, {report.copies.failed:,} failed",
        ),
        ("readers", _readers(report)),
        ("source traffic", _source(report)),
        ("saved", _saved(report)),
        *_writing(report.writing),
        ("memory", format_bytes(report.memory.rss_bytes)),
        ("log", record.log),
    ):
        head.add_row(name, Text(escape_text(value)))
    tables = [head, _tiers(report), _latency(report)]
    if report.epochs:
        tables.append(_epochs(report))
    if report.errors:
        kinds = sorted(report.errors.items(), key=lambda item: -item[1])
        tables.append(_counted("error", ((escape_text(kind), f"{n:,}") for kind, n in kinds)))
    parts = [part for table in tables for part in (table, Text())]
    health = report.health
    parts.append(Text(f"health: {health.state}", style=_HEALTH_STYLES[health.state]))
    for problem in health.problems:
        parts.append(Text(f"! {escape_text(_told(problem))}", style=_HEALTH_STYLES[health.state]))
        parts.append(Text(f"  {escape_text(problem.remedy)}"))
    return Group(*parts)


def _told(problem: Problem) -> str:
    return f"{problem.what}, since {_moment(problem.since_ns)}"


def _moment(ns: int) -> str:
    """``12:04``, and the date with it if that is not today."""
    then = datetime.fromtimestamp(ns / 1e9)
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def _tiers(report: StatusReport) -> Table:
    table = _table(
        "tier", "path", "used", "capacity", "files", "opens", "reads", "answered", "state"
    )
    for tier in report.tiers:
        table.add_row(
            tier.name,
            Text(escape_text(tier.path)),
            format_bytes(tier.used),
            format_bytes(tier.capacity),
            f"{tier.files:,}",
            _number(tier.opens),
            _number(tier.reads),
            _NOT_COUNTED if tier.bytes is None else format_bytes(tier.bytes),
            Text("in service" if tier.in_service else f"out: {escape_text(tier.out_why)}"),
        )
    return table


def _latency(report: StatusReport) -> Table:
    table = _table("latency", "open p50", "open p99", "read p50", "read p99")
    opens = report.latency.open or {}
    for name, read in report.latency.read.items():
        table.add_row(name, *_quantiles(opens.get(name)), *_quantiles(read))
    return table


def _quantiles(quantiles: Quantiles | None) -> tuple[str, str]:
    if quantiles is None or not quantiles.count:
        return "-", "-"
    return _latency_word(quantiles.p50_s), _latency_word(quantiles.p99_s)


def _latency_word(seconds: float | None) -> str:
    if seconds is None:
        return "> 10 s"
    if seconds < 0.001:
        return f"≤ {seconds * 1e6:.0f} us"
    return f"≤ {seconds * 1e3:.0f} ms" if seconds < 1 else f"≤ {seconds:.0f} s"


def _epochs(report: StatusReport) -> Table:
    table = _table("epoch", "opens", "hits", "hit ratio")
    for epoch in (report.epochs or [])[-10:]:
        opens, hits = f"{epoch.opens:,}", f"{epoch.hits:,}"
        table.add_row(str(epoch.number), opens, hits, _percent(epoch.hit_ratio))
    return table


def _counted(name: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = _table(name, "count")
    for kind, count in rows:
        table.add_row(Text(kind), count)
    return table


def _mode(mode: Mode) -> str:
    opens = ", no opens" if mode.open == "none" else ""
    return f"{mode.datapath}{opens} ({mode.why})"


def _snapshot(report: StatusReport) -> str:
    snapshot = report.snapshot
    stale = {True: "stale", False: "fresh", None: "not compared yet"}[snapshot.stale]
    return (
        f"{snapshot.files:,} files, {format_bytes(snapshot.bytes)}, {snapshot.entries:,} entries;"
        f" {duration(snapshot.age_s)} old, {stale} (freshness {snapshot.freshness},"
        f" {snapshot.checks:,} checks); {snapshot.file}, {format_bytes(snapshot.size_bytes)}"
    )


def _resident(report: StatusReport) -> str:
    residency = report.residency
    return (
        f"{residency.files:,} files ({_percent(residency.fraction_files)}),"
        f" {format_bytes(residency.bytes)} ({_percent(residency.fraction_bytes)});"
        f" {residency.wanted:,} wanted"
    )


def _readers(report: StatusReport) -> str:
    if report.opens is None:
        told = "opens and hits not counted (the kernel serves them)"
    else:
        told = (
            f"{counted(report.opens, 'open', 'opens')}, {_percent(report.hit_ratio)} hits,"
            f" {counted(report.handles.open_files or 0, 'file', 'files')} open"
        )
    if report.reads is None or report.bytes is None:
        return f"{told}; reads not counted (the kernel reads copies itself)"
    reads = f"{counted(report.reads, 'read', 'reads')}, {format_bytes(report.bytes)}"
    return f"{told}; {reads} answered by the daemon"


def _saved(report: StatusReport) -> str:
    """What the source did not serve, as far as that is known."""
    saved, residency = report.saved, report.residency
    parts = []
    if saved.opens is not None:
        parts.append(counted(saved.opens, "open", "opens"))
    if saved.bytes is not None:
        parts.append(f"at least {format_bytes(saved.bytes)}")
    told = f"{', '.join(parts)} not served by the source; " if parts else ""
    if report.snapshot.files and residency.files == report.snapshot.files:
        return f"{told}all files are resident: later reads come from this node"
    resident = counted(residency.files, "resident file", "resident files")
    return f"{told}later reads of {resident} come from this node"


def _source(report: StatusReport) -> str:
    reader, copy = report.source_totals.reader, report.source_totals.copy
    return (
        f"{reader.opens:,} opens and {format_bytes(reader.bytes)} by readers,"
        f" {copy.opens:,} opens and {format_bytes(copy.bytes)} by copies"
    )


def _writing(writing: WritingReport | None) -> Iterable[tuple[str, str]]:
    """What the source has not got yet, and what it has; nothing where nothing is written."""
    if writing is None:
        return
    backlog = f"{counted(writing.files, 'file', 'files')}, {format_bytes(writing.bytes)}"
    if not writing.operations:
        told = "all is at the source"
    elif not writing.files:
        changes = counted(writing.operations, "change", "changes")
        told = f"{changes} of names and attributes not at the source yet"
    else:
        told = f"{backlog} not at the source yet"
    if writing.oldest_ns:
        told += f", the oldest written {age(writing.oldest_ns)} ago"
    if writing.trouble:
        told += f"; it waits: {writing.trouble}"
    yield "written", told
    yield (
        "drained",
        f"{counted(writing.drained_files, 'file', 'files')}, {format_bytes(writing.drained_bytes)};"
        f" {counted(writing.errors, 'error', 'errors')} of the source",
    )
    yield (
        "absorbed by",
        f"tier {writing.tier}, {writing.directory}: {format_bytes(writing.held)} held,"
        f" {format_bytes(writing.reserve)} reserved; fsync waits for"
        f" {'the source' if writing.fsync == 'source' else 'this disk'}",
    )
    if writing.lost:
        shown = ", ".join(writing.lost[:_SHOWN_LOST])
        more = ", ..." if len(writing.lost) > _SHOWN_LOST else ""
        yield "lost", f"{counted(len(writing.lost), 'file', 'files')}: {shown}{more}"


def _copies(report: StatusReport) -> str:
    copies = report.copies
    if not copies.running and not copies.queued:
        return "idle"
    return f"{copies.running:,} running, {copies.queued:,} queued"


def _health_word(report: StatusReport) -> str:
    if report.state != "serving":
        return report.state
    state = report.health.state
    return f"[{_HEALTH_STYLES[state]}]{state}[/]"


def _number(value: int | None) -> str:
    return _NOT_COUNTED if value is None else f"{value:,}"


def _percent(ratio: float | None) -> str:
    # 99.96 % must not read as complete.
    return "-" if ratio is None else f"{int(ratio * 1000) / 10:g}%"


def _table(*columns: str, header: bool = True) -> Table:
    table = Table(box=None, show_header=header, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
