"""The counters of a daemon in the formats of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from monarch.telemetry.metric_families import FAMILIES, Family, Sample
from monarch.telemetry.metrics import BUCKETS_S, Histogram, Metrics
from monarch.telemetry.report import StatusReport


class PrometheusCollector(Collector):
    """Turns the counters and a status report into families."""

    def __init__(self, metrics: Metrics, status: Callable[[], StatusReport]) -> None:
        self._metrics = metrics
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        for family in FAMILIES:
            yield _exposed(family, family.samples(self._metrics, status))

    def describe(self) -> Iterable[Metric]:
        # Without this method, registering would call collect() before there is a report.
        return [_exposed(family, ()) for family in FAMILIES]


def _exposed(family: Family, samples: Iterable[Sample]) -> Metric:
    if family.type == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for sample in samples:
            assert isinstance(sample.value, Histogram)
            cumulative = accumulate(sample.value.counts)
            bounds = [*map(str, BUCKETS_S), "+Inf"]
            buckets = [(b, float(n)) for b, n in zip(bounds, cumulative, strict=True)]
            histogram.add_metric(sample.labels, buckets, sum_value=sample.value.total_s)
        return histogram
    kind = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for sample in samples:
        assert not isinstance(sample.value, Histogram)
        metric.add_metric(sample.labels, float(sample.value))
    return metric


def exposition(metrics: Metrics, report: StatusReport, accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that ``accept`` requests; thread-safe."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics, lambda: report))
    encode, kind = choose_encoder(accept)
    return encode(registry), kind
