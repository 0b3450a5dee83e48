"""The results of a soak as a table, as JSON, and as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from monarch.text import MiB, format_bytes
from scripts.soaking.soaked_mount import SoakedMount
from scripts.soaking.verdict import Verdict


def table(mounts: Sequence[SoakedMount]) -> Table:
    made = Table("mount", "lifetimes", "files", "bytes", "wrong", "errors", "without reason")
    for mount in mounts:
        readers = mount.readers
        made.add_row(
            mount.name,
            str(len(mount.lifetimes)),
            f"{readers.files:,}",
            format_bytes(readers.bytes),
            str(len(readers.wrong)),
            str(len(readers.refused)),
            str(len(mount.unexplained())),
        )
    return made


def to_dict(
    mounts: Sequence[SoakedMount],
    *,
    minutes: float,
    seed: int,
    faults: dict[str, int],
    problems: Sequence[str],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    return {
        "minutes": minutes,
        "seed": seed,
        "problems": problems,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "faults": faults,
        "mounts": {
            mount.name: {
                "files": mount.readers.files,
                "bytes": mount.readers.bytes,
                "wrong": mount.readers.wrong,
                "errors": len(mount.readers.refused),
                "unexplained": [asdict(refused) for refused in mount.unexplained()],
                "lifetimes": [asdict(life) for life in mount.lifetimes],
            }
            for mount in mounts
        },
    }


def plot(report: dict[str, Any], modes: Sequence[str], path: Path) -> None:
    """Draw memory, descriptors and threads over time: of the steady daemon, and of the others."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    panels = (
        ("rss", "resident memory, MiB", MiB),
        ("descriptors", "descriptors", 1),
        ("threads", "threads", 1),
    )
    figure, axes = pyplot.subplots(len(panels), 1, sharex=True, figsize=(8, 7))
    for axis, (slot, label, scale) in zip(axes, panels, strict=True):
        for name, width in (("changing", 0.8), ("steady", 1.8)):
            for life in report["mounts"][name]["lifetimes"]:
                color = "black" if name == "steady" else f"C{modes.index(life['mode'])}"
                axis.plot(
                    [sample["at_s"] / 60 for sample in life["samples"]],
                    [sample[slot] / scale for sample in life["samples"]],
                    color=color,
                    linewidth=width,
                )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes")
    lines = [Line2D([], [], color="black", linewidth=1.8)]
    lines += [Line2D([], [], color=f"C{number}") for number in range(len(modes))]
    axes[0].legend(lines, ["one daemon", *modes], ncols=len(lines), fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
