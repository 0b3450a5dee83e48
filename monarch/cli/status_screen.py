"""The status of mounts as text for a terminal or a file: tables, fields and rates."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from monarch.cli.output import age, duration, stdout
from monarch.cli.overview import Line, elsewhere, overview, report_of
from monarch.cli.peers_screen import peers_fields
from monarch.cli.screen import Column, bar, fields, paragraph, table
from monarch.control.registry import MountRecord, Registry
from monarch.telemetry import report as reports
from monarch.telemetry.foresight_report import ForesightReport
from monarch.telemetry.health import Health, Problem, State
from monarch.telemetry.placement_report import AdmissionReport, PackReport, RuleReport
from monarch.text import counted, escape_text, format_bytes

WATCH_SECONDS = 2.0
# In a file each mount has one line of any length, for `grep` and `awk`.
_FILE_COLUMNS = 100_000
_BAR_CELLS = 20
_SHOWN_LOST = 5
_SHOWN_ELSEWHERE = 5
_SHOWN_EPOCHS = 10


def print_status(records: Registry, mountpoint: Path | None, *, watch: bool) -> None:
    """Prints the overview, or the details of one mount; with ``watch`` repeatedly."""
    rates = _Rates()

    def lines(width: int, ascii_only: bool) -> list[Text]:
        if mountpoint is None:
            found = _overview_lines(overview(records), width, rates)
            return [*found, *_elsewhere_lines(elsewhere(records), width)]
        record = records.find(mountpoint)
        return _detail_lines(report_of(record), record, width, ascii_only, rates)

    console = stdout()
    if watch:
        _watch(lines, console)
        return
    width = console.width if console.is_terminal else _FILE_COLUMNS
    for line in lines(width, _ascii_only(console)):
        console.print(line, soft_wrap=True)


def _ascii_only(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


Lines = Callable[[int, bool], list[Text]]


def _watch(lines: Lines, console: Console) -> None:
    """Shows ``lines`` repeatedly: a terminal is overwritten, a file gets one block after another.

    Ends with Ctrl-C, or when the reader of a pipe has closed it.
    """
    try:
        if not console.is_terminal:
            while True:
                seen = lines(_FILE_COLUMNS, _ascii_only(console))
                # Not printed by rich, which ends the process when the reader has closed the pipe.
                text = "\n".join(line.plain for line in seen)
                sys.stdout.write(f"{time.strftime('%H:%M:%S')}\n{text}\n\n")
                sys.stdout.flush()
                if _is_pipe_closed(WATCH_SECONDS):
                    return
        # On the alternate screen no frame depends on the line wrapping of the frame before.
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                seen = lines(console.width, _ascii_only(console))
                room = console.height - 1
                if (hidden := len(seen) - room) > 0:
                    words = f"({hidden + 1} more lines in a higher window)"
                    seen = [*seen[: room - 1], Text(words)]
                live.update(Group(*seen), refresh=True)
                time.sleep(WATCH_SECONDS)
    except (KeyboardInterrupt, BrokenPipeError):
        # Ctrl-C is the normal end.
        return


def _is_pipe_closed(patience_s: float) -> bool:
    """Waits up to ``patience_s``; returns whether the reader of our output closed the pipe."""
    output = select.poll()
    # No event is requested: poll() always reports errors.
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(patience_s * 1000))


class _Rates:
    """The activity of each mount since its last report, as text; empty for the first report."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, reports.StatusReport]] = {}

    def since_last_look(self, report: reports.StatusReport) -> dict[str, str]:
        """Rates by name: read by readers, read from the source, copied, flushed."""
        now = time.monotonic()
        then, before = self._seen.get(report.mountpoint, (now, report))
        self._seen[report.mountpoint] = (now, report)
        if before is report or before.pid != report.pid or now <= then:
            return {}

        def rate(value: Callable[[reports.StatusReport], int | None]) -> float | None:
            new, old = value(report), value(before)
            return None if new is None or old is None else (new - old) / (now - then)

        def of_bytes(value: Callable[[reports.StatusReport], int | None]) -> str:
            number = rate(value)
            return "" if number is None else f"{format_bytes(number)}/s"

        opens = rate(lambda r: r.opens)
        rates = {
            "opens": "" if opens is None else f"{opens:,.0f}/s",
            "answered": of_bytes(lambda r: r.bytes),
            "source": of_bytes(lambda r: r.source_totals.bytes),
            "copies": f"{rate(lambda r: r.copies.done) or 0.0:,.0f}/s",
            "flushed": of_bytes(lambda r: r.writing.drained_bytes if r.writing else None),
        }
        return {name: words for name, words in rates.items() if words}


_NOT_COUNTED = "not counted"
_HEALTH_STYLES: Mapping[State, str] = {"ok": "green", "degraded": "yellow", "failing": "bold red"}
# The styles for a mount whose daemon gives no report.
_STATE_STYLES = {"served": "red", "stale": "red", "leftover": "yellow"}

_OVERVIEW = (
    Column("mount point", shrinks=True),
    Column("source", shrinks=True, drop=3),
    Column("files", right=True, drop=4),
    Column("resident", right=True),
    Column("hits", right=True, drop=2),
    Column("epoch", right=True, drop=7),
    Column("copies", drop=5),
    Column("health"),
)
_OVERVIEW_RATES = (
    Column("answered", right=True, drop=6),
    Column("from source", right=True, drop=1),
)


def _overview_lines(lines: Sequence[Line], width: int, rates: _Rates) -> list[Text]:
    if not lines:
        return [Text("no Monarch mounts; `monarch mount SOURCE MOUNTPOINT` makes one")]
    rows: list[list[str | Text]] = []
    remarks: list[Text] = []
    looked: list[Mapping[str, str]] = [
        rates.since_last_look(line.report) if line.report else {} for line in lines
    ]
    watched = any(looked)
    for line, rate in zip(lines, looked, strict=True):
        report, name = line.report, escape_text(line.seen.mountpoint)
        if report is None:
            record = line.seen.record
            word = Text(line.state, style=_STATE_STYLES.get(line.seen.state, ""))
            blank = [""] * (len(_OVERVIEW) - 3 + (len(_OVERVIEW_RATES) if watched else 0))
            rows.append([name, escape_text(record.source) if record else "", *blank, word])
            remarks += paragraph(f"{name}: {escape_text(line.trouble)}", width, indent="  ")
            continue
        word = Text(report.state)
        if report.state == "serving":
            word = Text(report.health.state, style=_HEALTH_STYLES[report.health.state])
        rows.append(
            [
                name,
                escape_text(report.source),
                f"{report.snapshot.files:,}",
                _percent(report.residency.fraction_files),
                _percent(report.hit_ratio) if report.mode.counts_opens else _NOT_COUNTED,
                str(report.epochs[-1].number) if report.epochs else "-",
                _copies(report),
                *([rate.get("answered", "-"), rate.get("source", "-")] if watched else []),
                word,
            ]
        )
        for problem in report.health.problems:
            remarks += paragraph(f"{name}: {escape_text(_words(problem))}", width, indent="  ")
    columns = (*_OVERVIEW[:-1], *(_OVERVIEW_RATES if watched else ()), _OVERVIEW[-1])
    return [*table(columns, rows, width), *remarks]


def _elsewhere_lines(others: Sequence[Mapping[str, str]], width: int) -> list[Text]:
    """A line about the records of other nodes, whose state is not known here."""
    if not others:
        return []
    named = [f"{each['mountpoint']} on {each['node']}" for each in others[:_SHOWN_ELSEWHERE]]
    more = [f"{len(others) - len(named):,} more"] * (len(others) > len(named))
    words = f"other nodes share this state directory: {', '.join([*named, *more])}"
    return paragraph(escape_text(f"{words}; `monarch status` there shows them"), width, indent="  ")


def _detail_lines(
    report: reports.StatusReport, record: MountRecord, width: int, ascii_only: bool, rates: _Rates
) -> list[Text]:
    """The details of one mount, the most important first: a low window shows only the top."""
    up, copies, mode = age(report.started_ns), report.copies, report.mode
    opens = ", open: none" if mode.open == "none" else ""
    rate = rates.since_last_look(report)
    now = ", ".join(f"{name} {words}" for name, words in rate.items())
    pairs: list[tuple[str, str]] = [
        ("mount point", report.mountpoint),
        ("source", report.source),
        *([("pack", _pack(report.pack))] if report.pack is not None else []),
        ("state", f"{report.state} for {up}, pid {report.pid}, version {report.version}"),
        *([("now", now)] if now else []),
        ("resident", _resident(report, ascii_only)),
        *_parts(report),
        *_fits(report),
        ("copies", f"{_copies(report)}; {copies.done:,} done, {copies.failed:,} failed"),
        *(("warming", _warming(work)) for work in report.warming),
        ("readers", _readers(report)),
        ("source traffic", _source(report)),
        ("saved", _saved(report)),
        *peers_fields(report),
        *_foresight(report.foresight),
        *_admission(report.admission),
        *(("rule", _rule(rule)) for rule in report.rules),
        *(("measured", _measured(job)) for job in report.measured),
        *(("quota", _quota(quota)) for quota in report.quotas),
        *_writing(report.writing),
        ("datapath", f"{mode.datapath}{opens} ({mode.why})"),
        ("snapshot", _snapshot(report)),
        ("memory", format_bytes(report.memory.rss_bytes)),
        ("log", record.log),
    ]
    sections = [
        [
            *_health_lines(report.health, width),
            *fields([(name, escape_text(value)) for name, value in pairs], width),
        ],
        _tiers(report.tiers, width, ascii_only),
        _latency(report, width, ascii_only),
    ]
    if report.epochs:
        sections.append(_epochs(report.epochs, width))
    if report.errors:
        kinds = sorted(report.errors.items(), key=lambda item: -item[1])
        rows = [(escape_text(kind), f"{n:,}") for kind, n in kinds]
        columns = (Column("error", shrinks=True), Column("count", right=True))
        sections.append(table(columns, rows, width))
    return [line for section in sections for line in (*section, Text())][:-1]


def _health_lines(health: Health, width: int) -> list[Text]:
    style = _HEALTH_STYLES[health.state]
    lines = [Text(f"health: {health.state}", style=style)]
    for problem in health.problems:
        lines += paragraph(f"! {escape_text(_words(problem))}", width, indent="  ", style=style)
        remedy = paragraph(escape_text(problem.remedy), width - 2)
        lines += [Text(f"  {line.plain}") for line in remedy]
    return lines


def _words(problem: Problem) -> str:
    return f"{problem.what}, since {_moment(problem.since_ns)}"


def _moment(ns: int) -> str:
    """``12:04``, with the date if it is not today."""
    then = datetime.fromtimestamp(ns / 1e9)
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def _tiers(tiers: Sequence[reports.TierReport], width: int, ascii_only: bool) -> list[Text]:
    columns = (
        Column("tier"),
        Column("path", shrinks=True, drop=3),
        Column("used", right=True),
        Column("", drop=1),
        Column("capacity", right=True),
        Column("files", right=True, drop=2),
        Column("opens", right=True, drop=5),
        Column("reads", right=True, drop=6),
        Column("answered", right=True, drop=4),
        Column("state", shrinks=True, prose=True),
    )
    rows = [
        (
            tier.name,
            escape_text(tier.path),
            format_bytes(tier.used),
            bar(tier.used / tier.capacity if tier.capacity else 1.0, 10, ascii_only=ascii_only),
            format_bytes(tier.capacity),
            f"{tier.files:,}",
            _number(tier.opens),
            _number(tier.reads),
            _NOT_COUNTED if tier.bytes is None else format_bytes(tier.bytes),
            "in service" if tier.in_service else f"out: {escape_text(tier.out_why)}",
        )
        for tier in tiers
    ]
    lines = table(columns, rows, width)
    for tier in tiers:
        if tier.others:
            words = f"tier {tier.name} also holds copies of {', '.join(tier.others)}"
            words += f": `monarch evict --tier {tier.path}` lists them"
            lines += paragraph(escape_text(words), width, indent="  ")
    return lines


def _latency(report: reports.StatusReport, width: int, ascii_only: bool) -> list[Text]:
    names = ("open p50", "open p99", "read p50", "read p99")
    columns = (Column("latency"), *(Column(name, right=True) for name in names))
    opens = report.latency.open or {}
    bound = "<=" if ascii_only else "≤"
    rows = [
        (name, *_quantiles(opens.get(name), bound), *_quantiles(read, bound))
        for name, read in report.latency.read.items()
    ]
    return table(columns, rows, width)


def _quantiles(quantiles: reports.Quantiles | None, bound: str) -> tuple[str, str]:
    if quantiles is None or not quantiles.count:
        return "-", "-"
    return _latency_word(quantiles.p50_s, bound), _latency_word(quantiles.p99_s, bound)


def _latency_word(seconds: float | None, bound: str) -> str:
    if seconds is None:
        return "> 10 s"
    if seconds < 0.001:
        return f"{bound} {seconds * 1e6:.0f} us"
    return f"{bound} {seconds * 1e3:.0f} ms" if seconds < 1 else f"{bound} {seconds:.0f} s"


def _epochs(epochs: Sequence[reports.EpochReport], width: int) -> list[Text]:
    names = ("epoch", "opens", "hits", "hit ratio")
    rows = [
        (
            str(epoch.number),
            f"{epoch.opens:,}",
            *(
                (_NOT_COUNTED, _NOT_COUNTED)
                if epoch.hits is None
                else (f"{epoch.hits:,}", _percent(epoch.hit_ratio))
            ),
        )
        for epoch in epochs[-_SHOWN_EPOCHS:]
    ]
    return table([Column(name, right=True) for name in names], rows, width)


def _snapshot(report: reports.StatusReport) -> str:
    snapshot = report.snapshot
    stale = {True: "stale", False: "fresh", None: "not compared yet"}[snapshot.stale]
    files = counted(snapshot.files, "file", "files")
    entries = counted(snapshot.entries, "entry", "entries")
    return (
        f"{files}, {format_bytes(snapshot.bytes)}, {entries};"
        f" {duration(snapshot.age_s)} old, {stale} (freshness {snapshot.freshness},"
        f" {counted(snapshot.checks, 'check', 'checks')}); {snapshot.file},"
        f" {format_bytes(snapshot.size_bytes)}"
    )


def _resident(report: reports.StatusReport, ascii_only: bool) -> str:
    residency, snapshot = report.residency, report.snapshot
    line = bar(residency.fraction_bytes, _BAR_CELLS, ascii_only=ascii_only)
    files = counted(snapshot.files, "file", "files")
    return (
        f"{line} {_percent(residency.fraction_bytes)}: {residency.files:,} of {files},"
        f" {format_bytes(residency.bytes)} of {format_bytes(snapshot.bytes)};"
        f" {residency.wanted:,} wanted"
    )


def _fits(report: reports.StatusReport) -> Iterable[tuple[str, str]]:
    """The share of the data set that fits into the tiers, if not all of it does."""
    reserve = report.writing.reserve if report.writing is not None else 0
    capacity = max(0, sum(tier.capacity for tier in report.tiers) - reserve)
    if capacity < report.snapshot.bytes:
        share = _percent(capacity / report.snapshot.bytes)
        yield (
            "fits",
            f"{share} of the data set: the tiers hold {format_bytes(capacity)} of"
            f" {format_bytes(report.snapshot.bytes)}, the rest is read from the source each time",
        )


def _warming(work: reports.WarmProgress) -> str:
    return (
        f"{work.done:,} of {counted(work.total, 'file', 'files')},"
        f" {format_bytes(work.bytes_done)} of {format_bytes(work.bytes_total)}, {work.refused:,}"
        " did not fit or failed; `monarch warm MOUNTPOINT --cancel` stops it"
    )


def _readers(report: reports.StatusReport) -> str:
    if report.opens is None:
        words = f"opens and hits not counted (the kernel serves them; {report.opens_not_counted})"
    elif not report.mode.counts_opens:
        words = (
            f"{counted(report.opens, 'open', 'opens')}, hits not counted (the kernel serves them)"
        )
    else:
        words = (
            f"{counted(report.opens, 'open', 'opens')}, {_percent(report.hit_ratio)} hits,"
            f" {counted(report.handles.open_files or 0, 'file', 'files')} open"
        )
    if report.reads is None or report.bytes is None:
        return f"{words}; reads not counted (the kernel reads copies itself)"
    reads = f"{counted(report.reads, 'read', 'reads')}, {format_bytes(report.bytes)}"
    return f"{words}; {reads} answered by the daemon"


def _saved(report: reports.StatusReport) -> str:
    """The opens and reads that the source did not serve, if they are counted."""
    saved, files = report.saved, report.residency.files
    parts = []
    if saved.opens is not None:
        parts.append(counted(saved.opens, "open", "opens"))
    if saved.bytes is not None:
        parts.append(format_bytes(saved.bytes))
    past = f"at least {', '.join(parts)} not served by the source; " if parts else ""
    if report.snapshot.files and files == report.snapshot.files:
        return f"{past}all files are resident: later reads come from this node"
    resident = counted(files, "resident file", "resident files")
    return f"{past}later reads of {resident} come from this node"


def _source(report: reports.StatusReport) -> str:
    reader, copy = report.source_totals.reader, report.source_totals.copy
    return (
        f"{counted(reader.opens, 'open', 'opens')} and {format_bytes(reader.bytes)} by readers,"
        f" {counted(copy.opens, 'open', 'opens')} and {format_bytes(copy.bytes)} by copies"
        f"{_copied_per_wanted(report)}"
    )


def _copied_per_wanted(report: reports.StatusReport) -> str:
    ratio = report.copied_per_wanted
    return "" if ratio is None else f"; copied / wanted {ratio:.2f}"


def _parts(report: reports.StatusReport) -> Iterable[tuple[str, str]]:
    """The large files that have partial copies."""
    files = sum(tier.parts for tier in report.tiers)
    if files:
        nbytes = format_bytes(sum(tier.part_bytes for tier in report.tiers))
        yield "in parts", f"{counted(files, 'large file', 'large files')}, {nbytes} of them"


def _foresight(foresight: ForesightReport) -> Iterable[tuple[str, str]]:
    """How the files are read, and what was fetched before it was opened."""
    for stream in foresight.streams:
        words = [f"{stream.directory}/: {stream.pattern}"]
        if stream.epoch is not None:
            words.append(f"epoch {stream.epoch}")
        elif stream.is_mixed:
            words.append(f"epoch unknown, {stream.files:,} files")
        if stream.share is not None:
            words.append(f"{_percent(stream.share)} of {stream.files:,} files opened")
        if stream.ahead:
            words.append(f"up to the next {stream.ahead:,} are fetched ahead")
        yield "read order", ", ".join(words)
    if foresight.fetched_files:
        yield (
            "fetched ahead",
            f"{counted(foresight.fetched_files, 'file', 'files')},"
            f" {format_bytes(foresight.fetched_bytes)};"
            f" {foresight.unread_files:,}, {format_bytes(foresight.unread_bytes)},"
            " were not opened since",
        )
    if foresight.next_use.replaced_files:
        yield (
            "by next use",
            f"{counted(foresight.next_use.replaced_files, 'copy', 'copies')} replaced,"
            f" {format_bytes(foresight.next_use.replaced_bytes)} written for that",
        )
    window = foresight.window
    if window.files or window.served_files or window.dropped_files:
        yield (
            "window",
            f"{format_bytes(window.bytes)} of {format_bytes(window.capacity)};"
            f" {counted(window.served_files, 'file', 'files')},"
            f" {format_bytes(window.served_bytes)}, read from it;"
            f" {window.dropped_files:,}, {format_bytes(window.dropped_bytes)}, not read",
        )


def _admission(admission: AdmissionReport) -> Iterable[tuple[str, str]]:
    """How often frequency and scans have decided."""
    if admission.replaced or admission.refused:
        yield (
            "by frequency",
            f"{counted(admission.replaced, 'copy', 'copies')} made in place of files that are"
            f" opened less often, {admission.refused:,} not made",
        )
    if admission.spared:
        yield "scans", f"{counted(admission.spared, 'file', 'files')} read, no copy removed"


def _pack(pack: PackReport) -> str:
    """The chunks of a pack, and what was read of them."""
    chunks = f"{counted(pack.chunks, 'chunk', 'chunks')} of {format_bytes(pack.chunk_bytes)}"
    damaged = f"; {counted(pack.damaged, 'file', 'files')} of it damaged" if pack.damaged else ""
    return f"{chunks}; {pack.read:,} read as a whole{damaged}"


def _rule(rule: RuleReport) -> str:
    """A rule for paths, its files in the snapshot, and those that have copies now."""
    so_far = "" if rule.counted else "found so far "
    size = format_bytes(rule.bytes)
    files = f"{counted(rule.files, 'file', 'files')}, {size}, {so_far}in the snapshot"
    copies = f"{rule.resident_files:,}, {format_bytes(rule.resident_bytes)}"
    return f"{rule.match}: {rule.action}; {files}; {copies}, have copies"


def _measured(job: reports.MeasuredReport) -> str:
    """A session that `monarch analyze` measures."""
    limit = f", source at most {format_bytes(job.source_limit)}/s" if job.source_limit else ""
    return f"session {job.session}: {job.share:.0%} of the files from tiers{limit}"


def _quota(quota: reports.QuotaReport) -> str:
    """The quota of a job, and what it uses."""
    limit = "" if quota.tier is None else f" of {format_bytes(quota.tier)}"
    rate = f", at most {format_bytes(quota.source_limit)}/s" if quota.source_limit else ""
    return (
        f"{quota.job}: copies {format_bytes(quota.charged)}{limit};"
        f" source {format_bytes(quota.source_bytes)}{rate}"
    )


def _writing(writing: reports.WritingReport | None) -> Iterable[tuple[str, str]]:
    """The written data that waits for the source, and that which was flushed, if any."""
    if writing is None:
        return
    backlog = f"{counted(writing.files, 'file', 'files')}, {format_bytes(writing.bytes)}"
    if not writing.operations:
        words = "all is at the source"
    elif not writing.files:
        changes = counted(writing.operations, "change", "changes")
        words = f"{changes} of names and attributes not at the source yet"
    else:
        words = f"{backlog} not at the source yet"
    if writing.oldest_ns:
        words += f", the oldest written {age(writing.oldest_ns)} ago"
    if writing.trouble:
        words += f"; it waits because: {writing.trouble}"
    yield "written", words
    yield (
        "drained",
        f"{counted(writing.drained_files, 'file', 'files')}, {format_bytes(writing.drained_bytes)};"
        f" {counted(writing.errors, 'error', 'errors')} of the source",
    )
    local = "this node's memory, which a power cut erases" if writing.in_memory else "this disk"
    yield (
        "written to",
        f"tier {writing.tier}, {writing.directory}: {format_bytes(writing.held)} held,"
        f" {format_bytes(writing.reserve)} reserved; fsync waits for"
        f" {'the source' if writing.fsync == 'source' else local}",
    )
    yield "names", f"{writing.names:,} written since the snapshot, of {writing.names_max:,}"
    # The daemon of an earlier version gives no number.
    lost = max(writing.lost_files, len(writing.lost))
    if lost:
        shown = ", ".join(writing.lost[:_SHOWN_LOST])
        more = ", ..." if lost > _SHOWN_LOST else ""
        yield "lost", f"{counted(lost, 'file', 'files')}: {shown}{more}"


def _copies(report: reports.StatusReport) -> str:
    copies = report.copies
    if not copies.running and not copies.queued:
        return "idle"
    return f"{copies.running:,} running, {copies.queued:,} queued"


def _number(value: int | None) -> str:
    return _NOT_COUNTED if value is None else f"{value:,}"


def _percent(ratio: float | None) -> str:
    # Rounded down: 99.96 % must not be shown as 100 %.
    return "-" if ratio is None else f"{int(ratio * 1000) / 10:g}%"
