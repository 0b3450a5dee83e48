"""The command line of ``scripts/bench``: the subjects and their options."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.equipment.modes import MODES

SUBJECTS = (
    "datapath",
    "epochs",
    "foresight",
    "hang",
    "hpsearch",
    "month",
    "nodes",
    "packs",
    "seeds",
    "snapshot",
    "stalls",
    "write",
)
# The parts of the subject packs.
PARTS_OF_PACKS = ("lmdb", "trees", "many")
# The papers of the subject seeds.
PAPERS = ("monarch", "coordl", "prep", "diesel", "lmdbio", "checkfreq", "synergy")

_EXAMPLES = """\
examples:
  scripts/bench
  scripts/bench --quick --peers rclone,juicefs --install-peers
  scripts/bench epochs --quick --json epochs.json --plot epochs.png
  scripts/bench foresight --quick --json foresight.json --plot foresight.png
  scripts/bench foresight --only opens
  scripts/bench hang --seconds 10 --modes relay
  scripts/bench hpsearch --quick
  scripts/bench hpsearch --jobs 8 --workers 2 --json hpsearch.json
  scripts/bench month --lines 20000
  scripts/bench nodes --quick
  scripts/bench nodes --only remote
  scripts/bench nodes --only large --json large.json
  scripts/bench nodes --json nodes.json --plot nodes.png
  scripts/bench packs --only lmdb --quick
  scripts/bench packs --only lmdb --json lmdb.json
  scripts/bench packs --only trees --quick
  scripts/bench packs --only trees --json trees.json --plot trees.png
  scripts/bench packs --only many --modes relay,auto
  scripts/bench seeds --quick
  scripts/bench seeds --only coordl --json coordl.json
  scripts/bench snapshot --files 1000000
  scripts/bench stalls --quick --rounds 1
  scripts/bench write --quick --modes relay,auto
  scripts/bench write --only small --quick --rounds 1 --modes auto

scripts/bench SUBJECT --help lists the options of a subject.
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
        prog="scripts/bench",
        description="Measures Monarch, and compares it with the source, the tier and other systems."
        " Without a SUBJECT: datapath.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")

    def subject(
        name: str, summary: str, files: int, quick_files: int, rounds: int, count: str = "--files"
    ) -> argparse.ArgumentParser:
        examples = [line for line in _EXAMPLES.splitlines() if f"scripts/bench {name}" in line]
        if name == SUBJECTS[0]:
            examples = _EXAMPLES.splitlines()[1:3]
        added = subjects.add_parser(
            name,
            help=summary,
            description=f"Measures {summary}.",
            epilog="\n".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument(
            count, dest="files", type=int, help=f"number of {count.removeprefix('--')} ({files:,})"
        )
        added.add_argument("--rounds", type=int, help=f"measurements of each row ({rounds})")
        added.set_defaults(sizes=(files, quick_files), default_rounds=rounds)
        _common(added)
        return added

    _datapath(
        subject("datapath", "reads, compared with the tier and with other systems", 5000, 500, 3)
    )
    _epochs(subject("epochs", "training epochs through a slow source", 600, 300, 5))
    _foresight(subject("foresight", "epoch 1 with files that are fetched ahead", 3264, 640, 3))
    _hang(subject("hang", "readers of copies while the source hangs", 2000, 500, 3))
    search = "jobs of one node with the same images, with and without a staging area"
    _hpsearch(subject("hpsearch", search, 3072, 256, 3))
    month = "a month of fsynced lines and checkpoints"
    _month(subject("month", month, 2_600_000, 20_000, 1, "--lines"))
    nodes = "several nodes that share their copies, over one slow source"
    _nodes(subject("nodes", nodes, 2000, 600, 3))
    _packs(subject("packs", "packs and data sets in large files over a slow source", 20_000, 0, 3))
    _seeds(subject("seeds", "the main figures of the papers that Monarch builds on", 1600, 320, 3))
    _snapshot(subject("snapshot", "the cost of the names of a large tree", 1_000_000, 50_000, 5))
    stalls = "what monarch analyze calls a job of PyTorch, and what its advice brings"
    subject("stalls", stalls, 1600, 1200, 3)
    _write(subject("write", "checkpoints and small files on a slow source", 2000, 200, 3))
    return parser


def _common(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--quick", action="store_true", help="less data: takes a few minutes")
    subject.add_argument("--json", type=Path, metavar="FILE", help="write all values to this file")
    subject.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the table into this file"
    )
    subject.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="directory for the data and the tier during the run (%(default)s)",
    )


def _datapath(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--size-mb", type=int, help="size of the large file in MB (2,000)")
    subject.add_argument(
        "--entries", type=int, help="number of names in the large tree (1,000,000)"
    )
    subject.add_argument(
        "--modes", type=_names, help=f"modes to measure: {','.join(MODES)},auto (all)"
    )
    subject.add_argument(
        "--peers",
        type=_names,
        help="other systems: rclone,mergerfs,juicefs (the installed ones), or none",
    )
    subject.add_argument(
        "--no-drop", action="store_true", help="do not drop the page cache of this machine"
    )
    _slow_reads(subject)
    _contenders(subject)


def _epochs(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--tier",
        type=Path,
        metavar="DIR",
        help="directory of the tier, such as /dev/shm (--directory)",
    )
    _slow_reads(subject)


def _hang(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time in s for which the source hangs in each round (60)",
    )
    subject.add_argument(
        "--waiters",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[600, 2000],
        metavar="N,...",
        help="numbers of requests that wait for the source meanwhile (600,2000)",
    )
    subject.add_argument(
        "--modes",
        type=_names,
        default=list(MODES),
        help=f"modes to measure: {','.join(MODES)} (all)",
    )


def _hpsearch(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--jobs", type=int, default=4, help="number of jobs (%(default)s)")
    subject.add_argument("--workers", type=int, default=1, help="workers of each job (%(default)s)")
    subject.add_argument(
        "--step-ms",
        type=float,
        default=20.0,
        help="time of a step of the training, without the processor, in ms (%(default)s)",
    )


def _month(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--checkpoints", type=int, help="number of checkpoints (one for each 260 lines)"
    )
    subject.add_argument(
        "--latency",
        type=float,
        default=1.0,
        help="virtual latency of a call of the drain to the source, in s (1)",
    )
    subject.set_defaults(directory=Path("/dev/shm"))


def _nodes(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--only",
        choices=("remote", "large"),
        help="only the rows of files that other nodes have, or only those of the large file",
    )
    subject.add_argument(
        "--large-mb", type=int, help="size of the large file in MB (2,000; with --quick 256)"
    )
    subject.add_argument(
        "--link-mbit",
        type=int,
        default=200,
        help="rate of the link of each node in Mbit/s (%(default)s)",
    )
    _slow_reads(subject)


def _packs(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--only", choices=PARTS_OF_PACKS, help="only this part (all)")
    subject.add_argument(
        "--record-kb", type=int, default=110, help="size of a record of an LMDB in KB (110)"
    )
    subject.add_argument(
        "--file-kb", type=int, choices=(10, 110), help="size of the files of trees in KB (both)"
    )
    subject.add_argument(
        "--peers",
        type=_names,
        help="other formats: webdataset,tfrecord,litdata (the installed ones), or none",
    )
    subject.add_argument(
        "--modes", type=_names, help=f"modes to read many files in: {','.join(MODES)},auto (all)"
    )
    # Each part has a number of files of its own.
    subject.set_defaults(sizes=(0, 0))
    _slow_reads(subject)


def _seeds(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--only", choices=PAPERS, help="only the figures of this paper (all)")
    _slow_reads(subject)


def _snapshot(subject: argparse.ArgumentParser) -> None:
    _latency(subject, 1)
    subject.add_argument(
        "--jobs", type=int, default=32, help="number of concurrent calls to the source (32)"
    )


def _foresight(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--only",
        choices=("epochs", "opens"),
        help="only the rows of epochs, or only those of the cost of an open",
    )


def _write(subject: argparse.ArgumentParser) -> None:
    subject.add_argument("--size-mb", type=int, help="size of a checkpoint in MB (1,000)")
    subject.add_argument(
        "--modes", type=_names, help="modes to measure: python,relay,passthrough,auto (all)"
    )
    subject.add_argument(
        "--peers",
        type=_names,
        help="other systems: rclone,juicefs,passthrough_hp (the installed ones), or none",
    )
    subject.add_argument(
        "--only",
        choices=("slow", "small"),
        help="only the rows of the slow source, or only those of small files on a local one",
    )
    _latency(subject, 0)
    subject.add_argument(
        "--bandwidth", type=float, default=100.0, help="write bandwidth of the source in MB/s (100)"
    )
    _contenders(subject)


def _slow_reads(subject: argparse.ArgumentParser) -> None:
    _latency(subject, 1)
    subject.add_argument(
        "--bandwidth", type=float, default=50.0, help="bandwidth of the slow source in MB/s (50)"
    )


def _latency(subject: argparse.ArgumentParser, default_ms: int) -> None:
    subject.add_argument(
        "--latency",
        type=float,
        default=float(default_ms),
        help=f"latency of a call to the source in ms ({default_ms})",
    )


def _contenders(subject: argparse.ArgumentParser) -> None:
    subject.add_argument(
        "--install-peers",
        action="store_true",
        help="install the other systems from Debian and PyPI",
    )
    subject.add_argument("--markdown", action="store_true", help="print tables for a document")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name and name != "none"]
