"""The page of ``monarch report``: one HTML file that needs no network and no script.

Names of files and everything else that comes from the mount may be hostile: each text passes
through ``as_html``, and the page forbids scripts and requests by its content security policy.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from monarch.analysis.profile import Result
from monarch.analysis.summary import EpochSummary, Summary
from monarch.cli.options import time_text
from monarch.cli.output import duration
from monarch.cli.svg import Axis, Series, as_html, bar_plot, line_plot, most_of
from monarch.telemetry.timeline import Sample
from monarch.text import format_bytes

UNKNOWN = "unknown"

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:920px;margin:24px auto;padding:0 16px;
color:#222;background:#fff}
h1{font-size:1.5em;overflow-wrap:anywhere}h2{font-size:1.15em;margin-top:1.8em}
table{border-collapse:collapse;width:100%;margin:.5em 0}
th,td{text-align:right;padding:3px 8px;border-bottom:1px solid #ddd;overflow-wrap:anywhere}
th:first-child,td:first-child{text-align:left}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:1em 0}
.card{flex:1 1 150px;border:1px solid #ddd;border-radius:6px;padding:8px 12px}
.card b{display:block;font-size:1.35em}.note{color:#666;font-size:.9em}
.plot{width:100%;height:auto;margin:.5em 0}
.plot text{font:11px system-ui,sans-serif;fill:#444}
.plot .end{text-anchor:end}.plot .middle{text-anchor:middle}
.grid{stroke:#ddd;stroke-width:1}.line{fill:none;stroke-width:1.8}
.line.c0{stroke:#c0392b}.line.c1{stroke:#1f77b4}
.bar.c0{fill:#c0392b}.bar.c1{fill:#1f77b4}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(summary: Summary, stalls: Result | None, profile: str = "") -> str:
    """The whole page. ``stalls`` is what `monarch analyze` has found, from the file ``profile``."""
    title = f"Monarch: {summary.mountpoint}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{as_html(title)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{as_html(title)}</h1>",
        *_head(summary),
        *_timeline(summary),
        *_epochs(summary),
        *_places(summary),
        *_spared(summary),
        *_stalls(stalls, profile),
        *_patterns(summary),
        *_problems(summary),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


# -- texts -----------------------------------------------------------------------------------------


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _bytes(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    return f"-{format_bytes(-value)}" if value < 0 else format_bytes(value)


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else time_text(value) if value else "0 s"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _time(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(ns / 1e9))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells are escaped here."""
    lines = ["<table>", _row("th", head)]
    lines += [_row("td", row) for row in rows]
    return "\n".join([*lines, "</table>"])


def _row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{as_html(cell)}</{kind}>" for cell in cells) + "</tr>"


def _note(text: str) -> str:
    return f'<p class="note">{as_html(text)}</p>'


# -- sections --------------------------------------------------------------------------------------


def _head(summary: Summary) -> list[str]:
    seconds = (summary.until_ns - summary.begun_ns) / 1e9
    until = f"unmounted {_time(summary.until_ns)}" if summary.is_ended else "still mounted"
    lines = [
        f"source {summary.source}",
        f"mounted {_time(summary.begun_ns)}, {until}, {duration(seconds)}",
        f"{summary.files:,} files, {format_bytes(summary.bytes)}; {summary.resident_files:,} of"
        f" them, {format_bytes(summary.resident_bytes)}, have a copy in the tiers",
        f"Monarch {summary.version}, {summary.mode}",
    ]
    if summary.job:
        lines.insert(1, f"Slurm job {summary.job}")
    spared = summary.spared
    cards = (
        ("epochs", _count(len(summary.epochs) if summary.epochs else None)),
        ("opens served by tiers", _share(summary.hit_ratio)),
        ("opens that the source was spared", _count(spared.opens)),
        ("bytes that the source was spared, at least", _bytes(spared.bytes)),
        ("waiting that readers were spared", _seconds(spared.seconds)),
    )
    return [
        *(f"<div>{as_html(line)}</div>" for line in lines),
        '<div class="cards">',
        *(f'<div class="card">{as_html(name)}<b>{as_html(text)}</b></div>' for name, text in cards),
        "</div>",
        *([_note(f"Opens are not counted: {summary.not_counted}.")] if summary.not_counted else []),
    ]


def _timeline(summary: Summary) -> list[str]:
    samples = summary.samples
    head = ["<h2>Timeline</h2>"]
    if len(samples) < 2:
        return [*head, _note("The mount was too short for a timeline.")]
    source = Series("from the source", _rates(samples, [each.source_bytes for each in samples]))
    tiers = Series("from tiers", _rates(samples, [each.tier_bytes for each in samples]))
    copies = Series(
        "copies in the tiers", [(each.time_s, float(each.resident_bytes)) for each in samples]
    )
    missed = [
        None if each.opens is None or each.hits is None else each.opens - each.hits
        for each in samples
    ]
    opens = [
        Series("the source", _rates(samples, missed)),
        Series("tiers", _rates(samples, [each.hits for each in samples])),
    ]
    if missed[-1] is None:
        # Without hits all opens are one line.
        opens = [Series("all places", _rates(samples, [each.opens for each in samples]))]
    x = Axis("time since the mount", _elapsed, max(samples[-1].time_s, 1e-3))
    served = Axis("opens/s", lambda value: f"{value:,.4g}", most_of(opens))
    given = Axis("bytes/s", format_bytes, most_of([source, tiers], is_bytes=True))
    filled = Axis("bytes", format_bytes, most_of([copies], is_bytes=True))
    parts = [
        *head,
        line_plot("Opens a second, by what served them", opens, x, served),
        line_plot("Bytes a second from the source and from tiers", [source, tiers], x, given),
        line_plot("Copies in the tiers", [copies], x, filled),
    ]
    if all(each.tier_bytes is None for each in samples):
        parts.append(
            _note("Bytes from tiers are unknown: the kernel reads copies without the daemon.")
        )
    return parts


def _rates(
    samples: Sequence[Sample], values: Sequence[int | None]
) -> list[tuple[float, float | None]]:
    """The increase a second between each sample and the next one; it begins and ends there."""
    points: list[tuple[float, float | None]] = []
    for (before, first), (after, last) in itertools.pairwise(zip(samples, values, strict=True)):
        seconds = after.time_s - before.time_s
        if seconds <= 0:
            continue
        rate = None if first is None or last is None else (last - first) / seconds
        points += [(before.time_s, rate), (after.time_s, rate)]
    return points


def _elapsed(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _epochs(summary: Summary) -> list[str]:
    head = ["<h2>Epochs</h2>"]
    epochs = summary.epochs
    if not epochs:
        return [*head, _note("The epochs are unknown.")]
    x = Axis("epoch", lambda value: str(epochs[int(value) - 1].number), float(len(epochs)))
    misses, hits = (
        Series(name, [(place, value(each)) for place, each in enumerate(epochs, 1)])
        for name, value in (("the source", _missed), ("tiers", _hit))
    )
    # Where hits are not counted, a bar has all opens.
    names = ["the source", "tiers"] if epochs[0].hits is not None else ["all places"]
    total = [Series("", [(place, float(each.opens)) for place, each in enumerate(epochs, 1)])]
    y = Axis("opens", lambda value: f"{value:,.0f}", most_of(total))
    rows = [
        (
            str(each.number),
            f"{each.opens:,}",
            _share(each.hits / each.opens if each.hits is not None and each.opens else None),
            _count(each.source_opens),
            _bytes(each.source_bytes),
            _seconds(each.seconds),
        )
        for each in epochs
    ]
    return [
        *head,
        bar_plot("Opens of each epoch, by what served them", names, [misses, hits], x, y),
        _table(("epoch", "opens", "served by tiers", "source opens", "source bytes", "time"), rows),
        _note(
            "The begin of an epoch is noticed after up to 64 opens, so its time is about right, and"
            " what the source was asked for is unknown of small epochs. The last epoch may not be"
            " complete."
        ),
    ]


def _missed(epoch: EpochSummary) -> float:
    return float(epoch.opens - (epoch.hits or 0))


def _hit(epoch: EpochSummary) -> float:
    return float(epoch.hits or 0)


def _places(summary: Summary) -> list[str]:
    rows = [
        (
            place.name,
            _count(place.opens),
            _count(place.reads),
            _bytes(place.bytes),
            _seconds(place.mean_open_s),
        )
        for place in summary.places
    ]
    return [
        "<h2>What served the readers</h2>",
        _table(("place", "opens", "reads", "bytes", "mean time of an open"), rows),
        _note(
            "Reads that the kernel answers from its page cache are not counted, and neither are the"
            " opens and bytes of copies from the source."
        ),
    ]


def _spared(summary: Summary) -> list[str]:
    spared = summary.spared
    rows = [
        ("opens", _count(spared.asked_opens), _count(spared.source_opens), _count(spared.opens)),
        (
            "bytes, at least",
            _bytes(spared.asked_bytes),
            _bytes(spared.source_bytes),
            _bytes(spared.bytes),
        ),
        ("waiting of all readers", "", "", _seconds(spared.seconds)),
    ]
    return [
        "<h2>What the source was spared</h2>",
        _table(("", "readers asked for", "the source was asked for", "spared"), rows),
        _note(
            "The source is asked for copies, too. Waiting is an estimate: the time for the opens"
            " and reads of the tiers, if each had taken the mean time of the source, less the time"
            " that they took."
        ),
    ]


def _stalls(stalls: Result | None, profile: str) -> list[str]:
    head = ["<h2>Where the training waited</h2>"]
    if stalls is None:
        return [
            *head,
            _note(f"{UNKNOWN}: `monarch analyze run` measures it; name its profile by --profile."),
        ]
    rows = [
        (
            f"{each.share:.0%}",
            f"{each.hits:.0%}",
            f"{each.rate:.3g}",
            f"{each.fetch_stall:.0%}",
            f"{each.prep_stall:.0%}",
        )
        for each in stalls.shares
    ]
    return [
        *head,
        f"<p>{as_html(f'{stalls.verdict}: {stalls.why}')}</p>",
        _table(("files from tiers", "hits", "batches/s", "fetch stall", "prep stall"), rows),
        _note(f"Measured by `monarch analyze run`: {profile}."),
    ]


def _patterns(summary: Summary) -> list[str]:
    rows = [(each.directory or "/", each.pattern, f"{each.files:,}") for each in summary.patterns]
    return [
        "<h2>How the files were read</h2>",
        _table(("directory", "pattern", "files"), rows)
        if rows
        else _note("The pattern is unknown."),
        _note(
            f"Orders that programs have announced: {summary.announced_orders:,}. Fetched before"
            f" they were opened: {format_bytes(summary.fetched_ahead_bytes)}."
        ),
    ]


def _problems(summary: Summary) -> list[str]:
    items = "".join(f"<li>{as_html(what)}</li>" for what in summary.problems)
    return [f"<h2>Health: {as_html(summary.health)}</h2>", f"<ul>{items}</ul>" if items else ""]
