"""Write docs/metrics.md from the table in monarch/metrics.py."""

from __future__ import annotations

from pathlib import Path

from monarch.metrics import document

if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "metrics.md").write_text(document())
