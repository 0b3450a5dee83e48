"""The page of `monarch report`: its figures, what is unknown, hostile names, and a real browser."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from monarch.analysis.profile import Result, ShareResult
from monarch.analysis.summary import Spared, Summary, summary_of
from monarch.cli.report_page import page
from monarch.cli.svg import Axis, Series, line_plot, most_of
from monarch.control.state_directory import read_figures, write_figures
from monarch.telemetry.figures import VERSION, Figures, PlaceFigures
from monarch.telemetry.foresight_report import StreamReport
from monarch.telemetry.health import health_of
from monarch.telemetry.report import EpochReport, Mode
from monarch.telemetry.timeline import MOST_SAMPLES, Sample, Timeline
from monarch.text import MiB
from tests.equipment import browser
from tests.reports import a_problem, a_report

BEGUN_NS = 1_700_000_000_000_000_000
HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\"&\u202e\n\udcff"


def a_sample(time_s: float, epoch: int = 1, **changes: Any) -> Sample:
    count = int(time_s)
    sample = Sample(
        time_s, epoch, 100 * count, 60 * count, count * MiB, count * MiB // 2, 40 * count, 9, 5
    )
    return dataclasses.replace(sample, **changes)


def figures(**changes: Any) -> Figures:
    found = Figures(
        monarch_figures=VERSION,
        begun_ns=BEGUN_NS,
        until_ns=BEGUN_NS + 3600 * 10**9,
        is_ended=True,
        job="4711",
        status=a_report(),
        places=[
            PlaceFigures("source", 1100, 1000, 2.0, 50, 0.5, 90 * MiB),
            PlaceFigures("ram", 300, 300, 0.1, 200, 0.2, 60 * MiB),
        ],
        samples=[a_sample(float(number), 1 + number // 10) for number in range(20)],
        epoch_begins=[a_sample(0.0), a_sample(10.0, 2)],
    )
    return dataclasses.replace(found, **changes)


def many_epochs() -> Figures:
    """A mount with a hundred epochs and a full timeline."""
    epochs = [EpochReport(number, 5000, 4000, 0.8) for number in range(1, 101)]
    return figures(
        status=a_report(epochs=epochs),
        samples=[a_sample(float(number), 1 + number // 5) for number in range(MOST_SAMPLES)],
        epoch_begins=[a_sample(5.0 * number, 1 + number) for number in range(100)],
    )


def result() -> Result:
    share = ShareResult(0.0, 0.01, 15.1, 15.2, 0.01, 0.76, 7.0, 0.02, 0.01)
    return Result(
        *("fetch-bound", "it waits 76% of its time for files", [], 65.0, 0.01, 0.01, [share]),
        *(4, 2, 3.5e6, 100, 3.5e8, "serial", 0.046, 0.85, 21 * MiB),
    )


# -- the timeline ----------------------------------------------------------------------------------


def test_a_timeline_has_the_whole_mount_in_bounded_memory() -> None:
    timeline = Timeline()
    for second in range(100_000):
        if timeline.is_due(float(second), 1):
            timeline.add(a_sample(float(second)))
    samples = timeline.samples()
    assert MOST_SAMPLES / 4 < len(samples) < MOST_SAMPLES
    assert samples[0].time_s == 0 and samples[-1].time_s > 99_000
    steps = {after.time_s - before.time_s for before, after in itertools.pairwise(samples)}
    assert max(steps) <= 2 * min(steps)


def test_each_of_the_last_epochs_has_its_begin() -> None:
    timeline = Timeline()
    for epoch in range(1, 301):
        assert timeline.is_due(epoch / 128, epoch)
        timeline.add(a_sample(epoch / 128, epoch))
        assert not timeline.is_due(epoch / 128 + 0.001, epoch)
    begins = timeline.epoch_begins()
    assert [each.epoch for each in begins] == list(range(200, 301))
    assert [each.time_s for each in timeline.samples()] == [1 / 128, 129 / 128, 257 / 128]


# -- what the figures mean -------------------------------------------------------------------------


def test_the_source_was_spared_what_it_was_not_asked_for() -> None:
    spared = summary_of(figures()).spared
    assert (spared.asked_opens, spared.source_opens, spared.opens) == (1400, 700, 700)
    assert spared.bytes == 101 * MiB
    # 300 opens of 2 ms and 200 reads of 10 ms, less the 0.3 s that the tier took.
    assert spared.seconds == pytest.approx(300 * 0.002 + 200 * 0.01 - 0.3)


def test_an_epoch_has_its_time_and_only_a_large_one_what_the_source_was_asked_for() -> None:
    first, second = summary_of(figures()).epochs
    assert (first.begun_s, first.seconds, second.seconds) == (0, 10, 9)
    assert first.source_opens is None, "1,000 opens"
    last = summary_of(many_epochs()).epochs[-1]
    assert (last.number, last.hits, last.source_opens) == (100, 4000, 640)
    assert summary_of(many_epochs()).epochs[3].source_opens == 200


def no_open() -> Figures:
    """A mount whose opens and reads the kernel answers."""
    status = a_report(
        mode=Mode("passthrough", "none", "x"),
        opens=None,
        epochs=None,
        hit_ratio=None,
        bytes=None,
        opens_not_counted="foresight.count_opens is false",
    )
    hidden = {"opens": None, "hits": None, "bytes": None, "tier_bytes": None}
    return figures(
        status=status,
        places=[
            PlaceFigures("source", None, 0, 0.0, 50, 0.5, 90 * MiB),
            PlaceFigures("ram", None, 0, 0.0, None, 0.0, None),
        ],
        samples=[a_sample(float(number), **hidden) for number in range(5)],
    )


@pytest.mark.promise(305)
def test_a_figure_that_is_not_counted_is_shown_as_unknown() -> None:
    summary = summary_of(no_open())
    assert summary.spared == Spared(None, 700, None, None, 99 * MiB, None, None)
    text = page(summary, None)
    assert text.count("unknown") >= 10
    assert "Opens are not counted: foresight.count_opens is false." in text
    assert "The epochs are unknown." in text
    assert "nan" not in text and "None" not in text


def test_bytes_are_unknown_if_the_page_cache_has_served_more_than_the_source_gave() -> None:
    mode = Mode("relay", "none", "x")
    assert summary_of(figures(status=a_report(mode=mode, bytes=5))).spared.bytes is None
    assert summary_of(figures(status=a_report(bytes=5))).spared.bytes == 5 - 99 * MiB


def test_a_mount_without_a_second_has_a_page() -> None:
    found = figures(samples=[a_sample(0.0)], epoch_begins=[], status=a_report(epochs=[]))
    assert "too short for a timeline" in page(summary_of(found), None)


def test_the_stalls_are_those_of_the_profile() -> None:
    text = page(summary_of(figures()), result(), "profile.json")
    assert "fetch-bound: it waits 76% of its time for files" in text
    assert "<td>76%</td>" in text and "profile.json" in text
    assert "--profile" in page(summary_of(figures()), None)


# -- the state directory ---------------------------------------------------------------------------


def test_figures_are_kept_in_the_state_directory(tmp_path: Path) -> None:
    assert read_figures(tmp_path) is None
    write_figures(tmp_path, many_epochs())
    assert read_figures(tmp_path) == many_epochs()
    (tmp_path / "figures.json").write_text('{"monarch_figures": 2}')
    with pytest.raises(ValueError, match="another version"):
        read_figures(tmp_path)
    (tmp_path / "figures.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested"):
        read_figures(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("begun_ns", 10**400),
        ("until_ns", -(10**400)),
        ("samples", [{**dataclasses.asdict(a_sample(1.0)), "source_bytes": 1 << 64}]),
        ("epoch_begins", [{**dataclasses.asdict(a_sample(1.0)), "time_s": math.inf}]),
    ],
)
def test_a_number_that_no_mount_has_is_refused(tmp_path: Path, key: str, value: object) -> None:
    raw = {**figures().to_dict(), key: value}
    (tmp_path / "figures.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="out of its range"):
        read_figures(tmp_path)
    assert Figures.from_dict({**raw, key: figures().to_dict()[key]}) == figures()


def test_figures_without_a_place_or_with_impossible_times_have_a_page() -> None:
    slow = [dataclasses.replace(place, open_s=1e308, read_s=-1e308) for place in figures().places]
    for places in ([], slow):
        summary = summary_of(figures(places=places))
        assert summary.spared.seconds is None and "</html>" in page(summary, None)


# -- the page --------------------------------------------------------------------------------------


def hostile() -> Summary:
    """Everything that has text has a hostile one."""
    status = a_report(
        mountpoint=f"/mnt/{HOSTILE}",
        source=f"/pfs/{HOSTILE}",
        version=HOSTILE,
        mode=Mode(HOSTILE, HOSTILE, HOSTILE),
        health=health_of([a_problem(what=HOSTILE)]),
        opens_not_counted=HOSTILE,
    )
    streams = [StreamReport(HOSTILE, HOSTILE, 1000, 3, 0.42, 0)]
    foresight = dataclasses.replace(status.foresight, streams=streams)
    places = [dataclasses.replace(place, name=HOSTILE) for place in figures().places]
    return summary_of(
        figures(status=dataclasses.replace(status, foresight=foresight), job=HOSTILE, places=places)
    )


class Elements(HTMLParser):
    """The elements of a page and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.promise(306)
def test_a_hostile_name_is_text() -> None:
    text = page(hostile(), dataclasses.replace(result(), why=HOSTILE), HOSTILE)
    assert text.count("&lt;script&gt;") >= 10
    found, expected = Elements(text), Elements(page(summary_of(figures()), result(), "p"))
    assert found.tags == expected.tags
    assert found.tags.isdisjoint({"script", "img", "iframe", "link", "a", "object"})
    assert found.attributes == expected.attributes
    assert not {name for name in found.attributes if name.startswith("on")}
    # A name has no line break of its own, and changes no direction.
    assert "\u202e" not in text and "\udcff" not in text
    text.encode()


def test_a_page_needs_no_network_and_no_script() -> None:
    text = page(summary_of(many_epochs()), result(), "profile.json")
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//|url\(|@import|src=|href=", text.replace("</", ""))


def test_a_page_of_a_hundred_epochs_is_small() -> None:
    text = page(summary_of(many_epochs()), result(), "profile.json")
    assert len(text.encode()) < 1 << 20
    assert "<td>100</td>" in text


def test_a_line_has_a_gap_where_there_is_no_value() -> None:
    series = [Series("a", [(0, 1.0), (1, None), (2, None), (3, 2.0), (4, 2.5)])]
    axis = Axis("x", str, 4)
    assert line_plot("title", series, axis, axis).count("<polyline") == 2
    assert most_of(series) == 2.5 and most_of([]) == 1
    assert most_of([Series("b", [(0, 1500.0)])], is_bytes=True) == 2048
    assert most_of([Series("b", [(0, 1023.0)])], is_bytes=True) >= 1023


def pixels(picture: Path, colour: tuple[int, int, int]) -> int:
    from PIL import Image

    with Image.open(picture) as image:
        counts = image.convert("RGB").getcolors(1 << 24)
    assert counts is not None
    return sum(count for count, each in counts if each == colour)


@pytest.mark.promise(306)
def test_a_real_browser_renders_the_plots_without_a_network(tmp_path: Path) -> None:
    text = page(hostile(), result(), "profile.json")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    dom, picture = browser.rendered(tmp_path / "report.html", tmp_path, width=940, height=2400)
    found = Elements(dom)
    assert dom.count('<svg class="plot"') == 4
    assert dom.count("<polyline") == 5 and dom.count('<rect class="bar') >= 8
    assert found.tags.isdisjoint({"script", "img"})
    assert "&lt;script&gt;" in dom
    # What is drawn: the lines of the source and of the tiers, and the bars of the epochs.
    assert pixels(picture, (0xC0, 0x39, 0x2B)) > 2000
    assert pixels(picture, (0x1F, 0x77, 0xB4)) > 500
