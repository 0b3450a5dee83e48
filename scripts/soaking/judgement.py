"""What a soak has found: wrong bytes, errors without a fault, and values that grow."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from monarch.text import MiB
from scripts.soaking.soaked_mount import Lifetime, SoakedMount
from scripts.soaking.verdict import Verdict, judge


def problems(mounts: Sequence[SoakedMount], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Sentences; none of them is a success."""
    for mount in mounts:
        for wrong in mount.readers.wrong[:10]:
            yield f"{mount.name}: wrong: {wrong}"
        for refused in mount.unexplained()[:10]:
            name = errno.errorcode.get(refused.number, str(refused.number))
            yield f"{mount.name}: {name} for {refused.name}, without a reason"
        text = (mount.state / "daemon.log").read_text(errors="replace")
        if "Traceback" in text:
            where = text.index("Traceback")
            yield f"{mount.name}: the log: {text[where : where + 600]}"
    yield from (verdict.words for verdict in verdicts if verdict.flat is False)


def verdicts_of_one(life: Lifetime) -> list[Verdict]:
    """Of the daemon that lives through the whole run, over its samples."""
    times = [sample.at_s for sample in life.samples]
    # In the first epochs pages and copies come in.
    warm_up = max(times[-1] * 0.25, min(60.0, times[-1] * 0.5))
    minutes = [
        (b.log_lines - a.log_lines) / max(b.at_s - a.at_s, 1e-3) * 60
        for a, b in zip(life.samples, life.samples[1:], strict=False)
    ]
    made = [
        judge(
            f"steady daemon ({life.mode}), {what}",
            times,
            [getattr(sample, slot) / scale for sample in life.samples],
            warm_up=warm_up,
            tolerance=tolerance,
            share=share,
            unit=unit,
        )
        for what, slot, scale, tolerance, share, unit in (
            ("resident memory", "rss", MiB, 4.0, 0.05, " MiB"),
            ("memory of its own", "own", MiB, 4.0, 0.05, " MiB"),
            ("descriptors", "descriptors", 1, 8.0, 0.1, ""),
            ("threads", "threads", 1, 6.0, 0.1, ""),
        )
    ]
    made.append(
        judge(
            f"steady daemon ({life.mode}), lines of log a minute",
            times[1:],
            minutes,
            warm_up=warm_up,
            tolerance=20.0,
        )
    )
    return made


def verdicts_over(lives: Sequence[Lifetime]) -> Iterator[Verdict]:
    """Of the other daemons, from one to the next; of each mode, since their memory differs."""
    for mode in dict.fromkeys(life.mode for life in lives):
        for what, slot, scale, tolerance, unit in (
            ("resident memory", "rss", MiB, 6.0, " MiB"),
            ("descriptors", "descriptors", 1, 10.0, ""),
            ("threads", "threads", 1, 8.0, ""),
        ):
            late = [life.late(slot) for life in lives if life.mode == mode]
            values = [value / scale for value in late if value is not None]
            yield judge(
                f"lifetimes in mode {mode}, {what}",
                [float(number) for number in range(len(values))],
                values,
                warm_up=0.0,
                tolerance=tolerance,
                share=0.08,
                unit=unit,
                per=(1.0, "lifetime"),
            )
