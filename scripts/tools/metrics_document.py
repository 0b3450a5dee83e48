"""Writes docs/metrics.md from the table in monarch/telemetry/metric_families.py."""

from __future__ import annotations

from monarch.telemetry.metric_families import document
from scripts.tools.launch import ROOT

if __name__ == "__main__":
    (ROOT / "docs" / "metrics.md").write_text(document())
