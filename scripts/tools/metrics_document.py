"""Writes docs/metrics.md from the table in monarch/telemetry/metric_families.py."""

from __future__ import annotations

from monarch.telemetry.metric_families import FAMILIES
from scripts.tools.launch import ROOT


def document() -> str:
    """The table of metrics as Markdown."""
    lines = [
        "# Metrics",
        "",
        "`scripts/tools/metrics_document.py` writes this page; do not edit it.",
        "",
        "With `metrics: {enabled: true}` the daemon serves these metrics at",
        "`http://localhost:9464/metrics` (`metrics.address`). `tier` is a tier's name",
        "from the configuration, or `source`.",
        "Histograms have buckets from 10 us to 10 s in steps of 1-2-5.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.type} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "metrics.md").write_text(document())
