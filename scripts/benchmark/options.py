"""The command line of ``scripts/bench``: the subjects and their options."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.equipment.modes import MODES

SUBJECTS = ("datapath", "epochs", "hang", "month", "snapshot", "write")

_EXAMPLES = """\
examples:
  scripts/bench
  scripts/bench --quick --peers rclone,juicefs --install-peers
  scripts/bench epochs --quick --json epochs.json --plot epochs.png
  scripts/bench hang --seconds 10 --modes relay
  scripts/bench month --lines 20000
  scripts/bench snapshot --files 1000000
  scripts/bench write --quick --modes relay,auto
  scripts/bench write --only small --quick --rounds 1 --modes auto
"""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; without a subject those of the first one."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = [SUBJECTS[0], *arguments]
    options = _parser().parse_args(arguments)
    options.files = options.files or options.sizes[options.quick]
    options.rounds = options.rounds or (3 if options.quick else options.default_rounds)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures Monarch against the source, the tier and what one would pick instead."
        " Without a SUBJECT: datapath.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")

    def subject(
        name: str, summary: str, files: int, quick_files: int, rounds: int, count: str = "--files"
    ) -> argparse.ArgumentParser:
        added = subjects.add_parser(name, help=summary, description=summary)
        added.add_argument(count, dest="files", type=int, help=f"how many ({files:,})")
        added.add_argument("--rounds", type=int, help=f"how often each row is measured ({rounds})")
        added.set_defaults(sizes=(files, quick_files), default_rounds=rounds)
        _common(added)
        return added

    _datapath(subject("datapath", "reading, next to the tier itself and to others", 5000, 500, 3))
    _epochs(subject("epochs", "training epochs through a slow source", 600, 300, 5))
    _hang(subject("hang", "readers of copies while the source hangs", 2000, 500, 3))
    month = "a month of fsynced lines and checkpoints"
    _month(subject("month", month, 2_600_000, 20_000, 1, "--lines"))
    _snapshot(subject("snapshot", "what the names of a large tree cost", 1_000_000, 50_000, 5))
    _write(subject("write", "checkpoints and small files on a slow source", 2000, 200, 3))
    return parser


def _common(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--quick", action="store_true", help="smaller, in a few minutes")
    subject.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    subject.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table")
    subject.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the data and the tier lie while it runs (%(default)s)",
    )


def _datapath(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--size-mb", type=int, help="MB of the large file (2,000)")
    subject.add_argument("--entries", type=int, help="names of the large tree (1,000,000)")
    subject.add_argument("--modes", type=_names, help=f"{','.join(MODES)},auto (all)")
    subject.add_argument(
        "--peers", type=_names, help="rclone,mergerfs,juicefs (the installed ones), or none"
    )
    subject.add_argument(
        "--no-drop", action="store_true", help="leave the page cache of this machine alone"
    )
    _slow_reads(subject)
    _contenders(subject)


def _epochs(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--tier", type=Path, metavar="DIR", help="where the tier lies, like /dev/shm (--directory)"
    )
    _slow_reads(subject)


def _hang(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--seconds", type=float, default=60.0, help="how long it hangs in each round (60)"
    )
    subject.add_argument(
        "--waiters",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[600, 2000],
        metavar="N,...",
        help="requests that wait for the source meanwhile (600,2000)",
    )
    subject.add_argument(
        "--modes", type=_names, default=list(MODES), help=f"{','.join(MODES)} (all)"
    )


def _month(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--checkpoints", type=int, help="how many (one for each 260 lines)")
    subject.add_argument(
        "--latency", type=float, default=1.0, help="virtual s a call of the drain to the source (1)"
    )
    subject.set_defaults(directory=Path("/dev/shm"))


def _snapshot(subject: argparse.ArgumentParser) -> None:
    _latency(subject, 1)
    subject.add_argument("--jobs", type=int, default=32, help="calls to the source at once (32)")


def _write(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--size-mb", type=int, help="MB of a checkpoint (1,000)")
    subject.add_argument("--modes", type=_names, help="python,relay,passthrough,auto (all)")
    subject.add_argument(
        "--peers", type=_names, help="rclone,juicefs,passthrough_hp (the installed ones), or none"
    )
    subject.add_argument(
        "--only", choices=("slow", "small"), help="a slow source, or small files on a local one"
    )
    _latency(subject, 0)
    subject.add_argument(
        "--bandwidth", type=float, default=100.0, help="MB/s that the source takes (100)"
    )
    _contenders(subject)


def _slow_reads(subject: argparse.ArgumentParser) -> None:
    _latency(subject, 1)
    subject.add_argument(
        "--bandwidth", type=float, default=50.0, help="MB/s of the slow source (50)"
    )


def _latency(subject: argparse.ArgumentParser, default_ms: int) -> None:
    subject.add_argument(
        "--latency",
        type=float,
        default=float(default_ms),
        help=f"ms a call of the source ({default_ms})",
    )


def _contenders(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--install-peers", action="store_true", help="install them: from Debian and from PyPI"
    )
    subject.add_argument("--markdown", action="store_true", help="print tables for a document")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name and name != "none"]
