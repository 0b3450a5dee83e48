"""The counters add up, and Prometheus and `status` show their values."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from monarch.errors import ConfigError, MonarchError
from monarch.telemetry import metric_families, metrics_page
from monarch.telemetry.metric_families import FAMILIES, PrometheusCollector
from monarch.telemetry.metrics import BUCKETS_S, MAX_KINDS, Metrics
from monarch.telemetry.metrics_page import MetricsPage
from monarch.telemetry.report import EpochReport, Handles, Mode, StatusReport
from scripts.tools.metrics_document import document
from tests.reports import a_report

DOCS = Path(metric_families.__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["ram", "nvme"])


def samples(metrics: Metrics, report: StatusReport) -> dict[tuple[str, ...], float]:
    """All samples of the page, by name and sorted label values."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics, report))
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


def test_traffic_to_the_source_is_split_by_its_cause(metrics: Metrics) -> None:
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
    report = a_report(mode=Mode("relay", "open", ""))
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
        "names": writing.names,
        "names_max": writing.names_max,
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
    registry.register(PrometheusCollector(metrics, a_report()))
    text = generate_latest(registry).decode()
    shown = {f.name: f for f in text_string_to_metric_families(text)}
    for family in FAMILIES:
        found = shown[family.name.removesuffix("_total")]
        assert (found.type, found.documentation) == (family.type, family.help)
    assert len(shown) == len(FAMILIES)


@pytest.mark.promise(42)
@pytest.mark.finding("B4")
def test_values_that_the_mode_does_not_count_have_no_sample(metrics: Metrics) -> None:
    metrics.opened(1, 0.1)
    metrics.read(0, 7, 0.1)
    metrics.read(1, 7, 0.1)
    epochs = [EpochReport(1, 300, 0, 0.0)]
    mode = Mode("relay", "none", "")
    shown = samples(metrics, a_report(mode=mode, opens=None, epochs=None, handles=Handles(None, 0)))
    names = {key[0] for key in shown}
    not_counted = ("opens_total", "open_seconds_count", "hit_ratio", "epoch", "open_files")
    assert not names & {f"monarch_{name}" for name in not_counted}
    assert shown["monarch_reads_total", "ram"] == 1
    watched = a_report(mode=mode, opens=300, epochs=[EpochReport(2, 300, None, None)])
    shown = samples(metrics, watched)
    assert shown["monarch_opens_total", "unknown"] == 300 and shown["monarch_epoch",] == 2
    assert not {("monarch_opens_total", "ram"), ("monarch_hit_ratio",)} & shown.keys()
    passthrough = Mode("passthrough", "open", "")
    shown = samples(metrics, a_report(mode=passthrough, epochs=epochs))
    assert shown["monarch_opens_total", "ram"] == 1 and shown["monarch_hit_ratio",] == 0
    for name in ("reads_total", "read_bytes_total", "read_seconds_count"):
        assert (f"monarch_{name}", "ram") not in shown
        assert shown[f"monarch_{name}", "source"] > 0


# -- the page over HTTP ----------------------------------------------------------------------------


@contextlib.contextmanager
def page(metrics: Metrics, report: Callable[[], StatusReport] = a_report) -> Iterator[int]:
    """The page on a port of its own, which is yielded; its event loop runs in a thread."""
    server = MetricsPage("127.0.0.1:0", metrics, report)
    started, scopes = threading.Event(), []

    async def serve() -> None:
        with trio.CancelScope() as scope:
            scopes.append((trio.lowlevel.current_trio_token(), scope))
            started.set()
            await server.serve()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    started.wait()
    try:
        yield int(server.address.rpartition(":")[2])
    finally:
        ((token, scope),) = scopes
        token.run_sync_soon(scope.cancel)
        thread.join()
        server.close()


def asked(port: int, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_the_page_is_served_on_the_given_host_only_and_closes(metrics: Metrics) -> None:
    metrics.opened(1, 0.1)
    with page(metrics, lambda: a_report(mode=Mode("relay", "open", ""))) as port:
        status, text = asked(port)
        assert status == 200 and 'monarch_opens_total{tier="ram"} 1.0' in text
        assert asked(port, path="/metrics?name[]=x")[0] == 200
        assert asked(port, "HEAD") == (200, "")
        assert asked(port, path="/other")[0] == 404
        assert asked(port, "POST")[0] == 405
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        with pytest.raises(MonarchError, match=r"Address already in use; give each mount"):
            MetricsPage(f"127.0.0.1:{port}", metrics, a_report)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.fault("M16")
@pytest.mark.finding("D12")
def test_three_hundred_idle_connections_take_no_thread_and_few_descriptors_and_a_scrape_is_answered(
    metrics: Metrics,
) -> None:
    with page(metrics) as port, contextlib.ExitStack() as idle:
        assert asked(port)[0] == 200  # the thread that renders is there from now on
        us, threads = psutil.Process(), threading.active_count()
        ends = [
            idle.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)
        ]
        ends[-1].sendall(b"GET /metrics HT")  # one that says a little
        for _ in range(3):
            assert asked(port)[0] == 200
        assert threading.active_count() <= threads
        served = [c for c in us.net_connections("tcp") if c.laddr and c.laddr.port == port]
        established = [c for c in served if c.status == psutil.CONN_ESTABLISHED]
        assert len(established) <= metrics_page.MAX_CONNECTIONS


@pytest.mark.fault("M16")
@pytest.mark.finding("D12")
def test_connections_that_were_reset_make_no_room_for_more_than_there_may_be(
    metrics: Metrics,
) -> None:
    """A reset is reported in its own way, and must not be counted as two that have gone."""
    with page(metrics) as port, contextlib.ExitStack() as idle:
        assert asked(port)[0] == 200
        for number in range(40):
            end = socket.create_connection(("127.0.0.1", port))
            if number % 2:
                end.sendall(b"GET /metr")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        assert asked(port)[0] == 200
        for _ in range(100):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(3):
            assert asked(port)[0] == 200
        served = [
            c for c in psutil.Process().net_connections("tcp") if c.laddr and c.laddr.port == port
        ]
        established = [c for c in served if c.status == psutil.CONN_ESTABLISHED]
        assert len(established) <= metrics_page.MAX_CONNECTIONS


def test_an_invalid_request_is_disconnected_and_the_page_continues(metrics: Metrics) -> None:
    with page(metrics) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"x" * 2 * metrics_page.MAX_REQUEST_BYTES)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""
        assert asked(port)[0] == 200


def test_an_error_in_the_page_is_counted_and_the_page_continues(metrics: Metrics) -> None:
    def report() -> StatusReport:
        if not metrics.errors:
            raise RuntimeError("a bug")
        return a_report()

    with page(metrics, report) as port:
        with pytest.raises(http.client.RemoteDisconnected):
            asked(port)
        assert asked(port)[0] == 200
    assert metrics.errors == {"handler-metrics": 1}


@pytest.mark.parametrize(
    "address", ["", "9464", ":9464", "localhost:", "localhost:http", "h:99999"]
)
def test_an_address_that_is_none_is_a_mistake_of_the_configuration(
    metrics: Metrics, address: str
) -> None:
    with pytest.raises(ConfigError, match="write it like localhost:9464"):
        MetricsPage(address, metrics, a_report)


def test_the_document_is_made_from_the_table() -> None:
    assert DOCS.read_text() == document()


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
