"""The daemon's counters equal the calls of the test and the events at the source."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.mount.observe import (
    account,
    accounts_agree,
    epoch,
    files,
    resident,
    settled,
    wait_until,
)

NOT_COUNTED_WITHOUT_OPENS = (
    *("monarch_hit_ratio", "monarch_open_files", "monarch_open_seconds_count"),
)

Samples = dict[tuple[str, frozenset[str]], float]


def scraped(address: str) -> Samples:
    """The page, by name and label values."""
    with urllib.request.urlopen(address, timeout=100) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def settled_status(mounted: Mounted) -> dict[str, Any]:
    settled(mounted)
    # The kernel sends a release after the close.
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the releases arrived")
    return mounted.status()


@pytest.mark.promise(42)
@pytest.mark.finding("B4")
def test_the_counters_are_what_was_done(monarch: MonarchCommand, tree: Tree, source: Path) -> None:
    content = files(40, 10_000, step=1)
    tree(content)
    size = sum(map(len, content.values()))
    mounted = monarch.mount(source, tiers={"fast": "205000", "large": "105000"})
    opens_seen = []
    for seed in range(3):
        with OpenCounter(source) as counter:
            order = sorted(content)
            random.Random(seed).shuffle(order)
            epoch(mounted, content, order)
            opens_seen.append(counter.count())
            settled(mounted)
    where = resident(mounted, content)
    left = len(content) - len(where)
    assert 0 < left < 40
    assert opens_seen == [40, left, left]
    report = settled_status(mounted)
    is_not_counted = monarch.mode == "no_open"
    by_tier = {tier["name"]: tier for tier in report["tiers"]}
    for name, tier in by_tier.items():
        here = [file for file, place in where.items() if place == name]
        assert here != []
        assert tier["files"] == len(here)
        assert tier["used"] == sum(len(content[file]) for file in here)
        assert tier["opens"] == (None if is_not_counted else 2 * len(here))
        if monarch.mode == "passthrough":
            # Reads that the kernel answers itself are not reported.
            assert tier["bytes"] is tier["reads"] is None
            continue
        assert tier["bytes"] == 2 * sum(len(content[file]) for file in here)
        # Files of at most 128 KiB are one request of the kernel, and one for their end.
        assert 2 * len(here) <= tier["reads"] <= 4 * len(here)
    outside = sum(len(content[file]) for file in content if file not in where)
    passthrough = monarch.mode == "passthrough"
    assert report["opens"] == 120
    assert report["bytes"] == (None if passthrough else 3 * size)
    totals = report["source_totals"]
    assert totals["opens"] == totals["reader"]["opens"] == sum(opens_seen)
    assert totals["bytes"] == totals["reader"]["bytes"] == size + 2 * outside
    assert totals["reads"] == sum(opens_seen)
    assert totals["copy"] == {"opens": 0, "reads": 0, "bytes": 0}
    hits = len(where)
    saved = 2 * (size - outside)
    assert report["saved"] == {
        "opens": None if is_not_counted else 2 * hits,
        "bytes": None if passthrough else saved,
    }
    if is_not_counted:
        assert report["hit_ratio"] is report["latency"]["open"] is None
        assert [(e["opens"], e["hits"]) for e in report["epochs"]] == [(40, None)] * 3
    else:
        epochs = [(e["opens"], e["hits"]) for e in report["epochs"]]
        assert epochs == [(40, 0), (40, hits), (40, hits)]
        assert report["epochs"][-1]["hit_ratio"] == hits / 40
        assert report["hit_ratio"] == 2 * hits / 120
    assert report["copies"] == {
        "queued": 0,
        "running": 0,
        "done": hits,
        "failed": 0,
        "bytes": sum(tier["used"] for tier in by_tier.values()),
    }
    assert report["residency"]["files"] == hits
    assert report["residency"]["fraction_files"] == hits / 40
    assert report["residency"]["fraction_bytes"] == (size - outside) / size
    assert report["residency"]["wanted"] == 0
    assert report["handles"]["open_files"] == (None if is_not_counted else 0)
    assert report["errors"] == {}
    assert report["health"]["state"] == "ok"
    accounts_agree(mounted)


def test_the_metrics_page_tells_what_status_tells(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = files(30, 10_000, step=1)
    tree(content)
    mounted = monarch.mount(
        source,
        tiers={"fast": "100000", "large": "100000"},
        options=[
            "metrics.enabled",
            "metrics.address=127.0.0.1:0",
            "placement.policy=lru",
        ],
    )
    for _ in range(3):
        epoch(mounted, content)
        settled(mounted)
    monarch("evict", str(mounted.path), sorted(content)[-1])
    report = settled_status(mounted)
    address = re.search(r"metrics at (http://\S+)", mounted.log_text)
    assert address is not None
    samples = scraped(address[1])

    def page(name: str, *labels: str) -> float:
        return samples[f"monarch_{name}", frozenset(labels)]

    if monarch.mode != "no_open":
        tiers = sum(tier["opens"] for tier in report["tiers"])
        assert page("opens_total", "source") == report["opens"] - tiers
    assert page("reads_total", "source") > 0
    for tier in report["tiers"]:
        name = tier["name"]
        for sample, value in (
            ("opens_total", tier["opens"]),
            ("reads_total", tier["reads"]),
            ("read_bytes_total", tier["bytes"]),
        ):
            key = f"monarch_{sample}", frozenset({name})
            assert samples.get(key) == value, "what is not counted is no sample"
        assert page("resident_files", name) == tier["files"]
        assert page("tier_bytes", name, "used") == tier["used"]
        assert page("tier_bytes", name, "reserved") == 0
        assert page("tier_bytes", name, "capacity") == tier["capacity"]
        assert page("tier_in_service", name) == 1
        # A copy that was made and is not there any more has left.
        came = page("promotions_total", name)
        assert page("evictions_total", name) == came - tier["files"]
        bytes_came = page("promoted_bytes_total", name)
        assert page("evicted_bytes_total", name) == bytes_came - tier["used"]
    assert sum(page("evictions_total", tier["name"]) for tier in report["tiers"]) > 1
    for cause in ("reader", "copy"):
        totals = report["source_totals"][cause]
        assert page("source_opens_total", cause) == totals["opens"]
        assert page("source_reads_total", cause) == totals["reads"]
        assert page("source_bytes_total", cause) == totals["bytes"]
    promotions = sum(page("promotions_total", tier["name"]) for tier in report["tiers"])
    assert promotions == report["copies"]["done"]
    assert page("wanted_files") == 0
    assert page("promotions_running") == 0
    assert page("promotions_queued") == 0
    if monarch.mode == "no_open":
        assert not [name for name, _ in samples if name in NOT_COUNTED_WITHOUT_OPENS]
        assert page("opens_total", "unknown") == report["opens"]
    else:
        assert page("open_files") == 0
    assert page("epoch") == report["epochs"][-1]["number"] == 3


def test_nothing_listens_on_the_network_unless_metrics_are_asked_for(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"file": 1000})
    mounted = monarch.mount(source)
    epoch(mounted, {"file": contents("file", 1000)})
    assert psutil.Process(mounted.pid).net_connections(kind="inet") == []


def test_status_is_the_same_in_words_and_over_the_socket(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"file": 1000})
    mounted = monarch.mount(source)
    epoch(mounted, {"file": contents("file", 1000)})
    # The kernel sends the release after the close.
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the release arrived")
    over_the_socket = settled(mounted)
    command_line = json.loads(monarch("status", str(mounted.path), "--json").stdout)
    for volatile in ("memory", "snapshot", "log", "trouble"):
        over_the_socket.pop(volatile, None)
        del command_line[volatile]
    assert command_line == over_the_socket
