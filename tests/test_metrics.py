"""The counters add up, and what Prometheus and `status` are shown is what was counted."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from monarch import metrics as metrics_module
from monarch.errors import ConfigError, MonarchError
from monarch.metrics import (
    BUCKETS_S,
    FAMILIES,
    MAX_KINDS,
    Metrics,
    PrometheusCollector,
    serve_metrics,
)
from monarch.report import StatusReport
from tests.reports import a_report

DOCS = Path(metrics_module.__file__).parents[1] / "docs" / "metrics.md"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["ram", "nvme"])


def samples(metrics: Metrics, report: StatusReport) -> dict[tuple[str, ...], float]:
    """All samples of the page, by name and sorted label values."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics, lambda: report))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_opens_and_reads_count_where_they_were_served(metrics: Metrics) -> None:
    metrics.opened(0, 0.001)
    metrics.opened(2, 0.00001)
    metrics.read(2, 100, 0.00002)
    metrics.read(2, 50, 0.00002)
    assert metrics.names == ("source", "ram", "nvme")
    assert metrics.opens == [1, 0, 1]
    assert metrics.reads == [0, 0, 2]
    assert metrics.read_bytes == [0, 0, 150]
    assert (metrics.hits(), metrics.hit_ratio()) == (1, 0.5)


def test_nothing_opened_has_no_hit_ratio(metrics: Metrics) -> None:
    assert metrics.hit_ratio() is None


def test_what_reaches_the_source_is_split_by_who_asked(metrics: Metrics) -> None:
    metrics.source_opened()
    metrics.source_read(10)
    metrics.source_opened(2, copy=True)
    metrics.source_read(100, copy=True)
    metrics.source_read(200, copy=True)
    totals = metrics.source_totals()
    assert (totals.opens, totals.reads, totals.bytes) == (3, 3, 310)
    assert (totals.reader.opens, totals.reader.reads, totals.reader.bytes) == (1, 1, 10)
    assert (totals.copy.opens, totals.copy.reads, totals.copy.bytes) == (2, 2, 300)


def test_kinds_of_errors_are_bounded(metrics: Metrics) -> None:
    for number in range(1000):
        metrics.error(f"kind {number}")
        metrics.error("kind 0")
    assert len(metrics.errors) == MAX_KINDS
    assert metrics.errors["kind 0"] == 1001
    assert metrics.errors["other"] == 1000 - (MAX_KINDS - 1)
    assert sum(metrics.errors.values()) == 2000


def test_quantiles_are_the_bounds_of_their_buckets(metrics: Metrics) -> None:
    assert metrics.latency().open["ram"].p50_s is None
    for _ in range(98):
        metrics.opened(1, 0.00001)
    metrics.opened(1, 0.003)
    metrics.opened(1, 100.0)
    ram = metrics.latency().open["ram"]
    assert (ram.count, ram.p50_s, ram.p99_s) == (100, 0.00001, 0.005)
    metrics.opened(1, 100.0)
    assert metrics.latency().open["ram"].p99_s is None


def test_a_negative_latency_of_a_clock_that_jumped_falls_in_the_first_bucket(
    metrics: Metrics,
) -> None:
    metrics.opened(1, -5.0)
    assert metrics.open_latency[1].counts[0] == 1


def test_the_buckets_go_from_10_us_to_10_s_in_steps_of_1_2_5() -> None:
    assert (BUCKETS_S[0], BUCKETS_S[1], BUCKETS_S[2], BUCKETS_S[-1]) == (1e-5, 2e-5, 5e-5, 10.0)
    assert list(BUCKETS_S) == sorted(BUCKETS_S)
    assert len(BUCKETS_S) == 19


def test_prometheus_shows_what_was_counted(metrics: Metrics) -> None:
    metrics.opened(0, 0.03)
    metrics.opened(1, 0.00001)
    metrics.read(1, 4096, 0.00003)
    metrics.source_opened(copy=True)
    metrics.source_read(4096, copy=True)
    metrics.promoted(1, 4096)
    metrics.promotion_failed("enospc")
    metrics.evicted(2, 7)
    metrics.error('odd"\n\\kind')
    metrics.changed()
    report = a_report()
    shown = samples(metrics, report)
    expected = {
        ("monarch_opens_total", "source"): 1,
        ("monarch_opens_total", "ram"): 1,
        ("monarch_opens_total", "nvme"): 0,
        ("monarch_read_bytes_total", "ram"): 4096,
        ("monarch_source_opens_total", "reader"): 0,
        ("monarch_source_opens_total", "copy"): 1,
        ("monarch_source_bytes_total", "copy"): 4096,
        ("monarch_source_changes_total",): 1,
        ("monarch_promotions_total", "ram"): 1,
        ("monarch_promotion_failures_total", "enospc"): 1,
        ("monarch_evicted_bytes_total", "nvme"): 7,
        ("monarch_errors_total", 'odd"\n\\kind'): 1,
        ("monarch_promotions_running",): report.copies.running,
        ("monarch_wanted_files",): report.residency.wanted,
        ("monarch_resident_files", "ram"): report.tiers[0].files,
        ("monarch_tier_bytes", "ram", "reserved"): report.tiers[0].reserved,
        ("monarch_tier_in_service", "nvme"): 0,
        ("monarch_hit_ratio",): 0.75,
        ("monarch_epoch",): 2,
        ("monarch_snapshot_entries",): report.snapshot.entries,
        ("monarch_open_seconds_count", "source"): 1,
        ("monarch_open_seconds_bucket", "0.02", "source"): 0,
        ("monarch_open_seconds_bucket", "0.05", "source"): 1,
        ("monarch_open_seconds_bucket", "+Inf", "source"): 1,
        ("monarch_open_seconds_sum", "source"): 0.03,
        ("monarch_read_seconds_count", "ram"): 1,
    }
    assert {key: shown.get(key) for key in expected} == expected
    writing = report.writing
    assert writing is not None
    written = {
        "backlog_files": writing.files,
        "backlog_bytes": writing.bytes,
        "drained_files_total": writing.drained_files,
        "drained_bytes_total": writing.drained_bytes,
        "errors_total": writing.errors,
        "held_bytes": writing.held,
        "reserve_bytes": writing.reserve,
        "lost_files": 1,
    }
    found = {name: shown[f"monarch_writeback_{name}",] for name in written}
    assert found == written
    assert shown["monarch_writeback_oldest_seconds",] > 10**6
    read_only = samples(metrics, dataclasses.replace(report, writing=None))
    assert not [key for key in read_only if key[0].startswith("monarch_writeback")]
    # The source is no tier that copies go to.
    assert ("monarch_promotions_total", "source") not in shown


def test_every_family_of_the_table_is_shown_with_its_help(metrics: Metrics) -> None:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics, a_report))
    text = generate_latest(registry).decode()
    shown = {f.name: f for f in text_string_to_metric_families(text)}
    for family in FAMILIES:
        found = shown[family.name.removesuffix("_total")]
        assert (found.type, found.documentation) == (family.type, family.help)
    assert len(shown) == len(FAMILIES)


def test_the_page_is_served_on_the_given_host_only_and_closes(metrics: Metrics) -> None:
    metrics.opened(1, 0.1)
    server = serve_metrics("127.0.0.1:0", PrometheusCollector(metrics, a_report))
    host, _, port = server.address.rpartition(":")
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        assert 'monarch_opens_total{tier="ram"} 1.0' in page
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", int(port)), timeout=5)
        with pytest.raises(MonarchError, match=r"Address already in use; choose another"):
            serve_metrics(f"127.0.0.1:{port}", PrometheusCollector(metrics, a_report))
    finally:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=5)


@pytest.mark.parametrize(
    "address", ["", "9464", ":9464", "localhost:", "localhost:http", "h:99999"]
)
def test_an_address_that_is_none_is_a_mistake_of_the_configuration(
    metrics: Metrics, address: str
) -> None:
    with pytest.raises(ConfigError, match="write it like localhost:9464"):
        serve_metrics(address, PrometheusCollector(metrics, a_report))


def test_the_document_is_made_from_the_table() -> None:
    assert DOCS.read_text() == metrics_module.document()


def test_a_report_comes_back_from_json() -> None:
    report = a_report()
    assert StatusReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_of_a_newer_daemon_is_read() -> None:
    raw = a_report().to_dict()
    raw["new"] = 1
    raw["tiers"][0]["new"] = 1
    assert StatusReport.from_dict(raw) == a_report()


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "12"},
        {"pid": True},
        {"state": "asleep"},
        {"tiers": {}},
        {"tiers": [1]},
        {"snapshot": None},
        {"errors": {"eio": "1"}},
        {"hit_ratio": "high"},
    ],
    ids=str,
)
def test_a_report_with_a_wrong_value_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change)) + "|eio"):
        StatusReport.from_dict({**a_report().to_dict(), **change})


def test_a_report_that_lacks_something_is_refused() -> None:
    raw = a_report().to_dict()
    del raw["snapshot"]["id"]
    with pytest.raises(ValueError, match=r"snapshot is incomplete.*'id'"):
        StatusReport.from_dict(raw)
