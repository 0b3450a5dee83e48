"""``monarch trace``: records the opens of a mount in a file."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click

from monarch.cli.daemon_call import JSON, MOUNT, ask, mount_of, seconds
from monarch.cli.output import progress_bar, show
from monarch.control.registry import MountRecord, alive
from monarch.errors import MonarchError, NotMountedError, UsageError
from monarch.posix.files import closing_fd
from monarch.posix.signals import ending
from monarch.telemetry.trace import TraceEnd, TraceProgress, TraceStopped, open_text
from monarch.text import counted, escape_text

_STDOUT = Path("-")


@click.command(
    epilog="""\b
Examples:
  monarch trace /mnt/data -o opens.jsonl.gz
  monarch trace /mnt/data -o opens.jsonl --seconds 10m
  monarch trace /mnt/data -o opens.jsonl --epochs 2 --json
  monarch trace /mnt/data -o - | zstd > opens.jsonl.zst
"""
)
@MOUNT
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="The file to write; compressed if its name ends with .gz. - is the standard output.",
)
@click.option(
    "--seconds", "for_s", callback=seconds, metavar="TIME", help="End after this time, like 30s."
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    metavar="N",
    help="End when N epochs have ended, the present one included.",
)
@JSON
def trace(
    mountpoint: Path, output: Path, for_s: float | None, epochs: int | None, as_json: bool
) -> int:
    """Record the opens of a mount, in their order, until Ctrl-C.

    Each open has its time, file, epoch, the tier that served it, the time that it took, and its job
    (the session of the process); an unknown value is null. The file has one JSON object a line
    (docs/trace.md). A file that exists is replaced. Nothing is recorded while no trace runs. If
    FILE cannot be written fast enough, opens are lost, and the trace has their number. The exit
    code is 1 if opens were lost, or if the kernel has lost reports of opens, which ends the trace.
    """
    if output.suffix in (".zst", ".xz", ".bz2"):
        raise UsageError(
            f"a trace is not compressed as {output.suffix}",
            hint=f"use .gz, or a pipe: monarch trace {escape_text(str(mountpoint))} -o - | ...",
        )
    if output == _STDOUT and as_json:
        raise UsageError("the standard output cannot have both the trace and --json")
    record = mount_of(mountpoint)
    asked = {"seconds": for_s, "epochs": epochs}
    with _opened(output) as write, _stopping(record) as on_number, progress_bar() as advance:

        def on_progress(raw: dict[str, Any]) -> None:
            part = TraceProgress.from_dict(raw)
            if part.text:
                write(part.text)
            on_number(part.number)
            lost = f", {part.lost:,} lost" if part.lost else ""
            advance(part.opens, None, f"tracing opens{lost}")

        try:
            end = ask(record, "trace", asked, answer=TraceEnd, on_progress=on_progress)
        except NotMountedError:
            if not alive(record):
                raise
            raise MonarchError(
                "the daemon has cut the trace off: it could not be written for 30 seconds",
                hint="the opens until then are in it",
            ) from None
    is_uncounted = end.end == "uncounted"
    if output != _STDOUT:
        lost = f"; {end.lost:,} were lost, since the file was written too slowly"
        where = escape_text(os.fspath(output))
        opens = counted(end.opens, "open", "opens")
        is_cut = "; it ended early: the kernel has lost reports of opens" if is_uncounted else ""
        show(end, as_json, f"{opens} in {where}{lost if end.lost else ''}{is_cut}")
    return 1 if end.lost or is_uncounted else 0


@contextmanager
def _opened(output: Path) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes to the output. A file that exists is replaced by the first
    call, so it stays if the trace is refused. A new file is closed to other users: it has the names
    of files."""
    with _naming(output), ExitStack() as stack:
        file: TextIO | None = sys.stdout
        descriptor = -1
        if output != _STDOUT:
            file = None
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.enter_context(closing_fd(descriptor))

        def write(text: str) -> None:
            nonlocal file
            if file is None:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.ftruncate(descriptor, 0)
                file = stack.enter_context(open_text(output, "w", descriptor))
            file.write(text)
            # A trace that is killed has all opens up to then.
            file.flush()

        yield write


@contextmanager
def _naming(output: Path) -> Iterator[None]:
    """Adds the name of the output to an OSError that has none, such as ENOSPC."""
    try:
        yield
    except BrokenPipeError:
        if output == _STDOUT:
            raise
        # Of an OSError click would say nothing.
        where = escape_text(os.fspath(output))
        raise MonarchError(f"{where}: the reader of the pipe has gone") from None
    except OSError as error:
        if error.filename is None and output != _STDOUT:
            error.filename = os.fspath(output)
        raise


@contextmanager
def _stopping(record: MountRecord) -> Iterator[Callable[[int], None]]:
    """The first signal that ends commands ends the trace, the next one the command. Yields a
    function that must be called often with the number of the trace."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if stopped:
            signal.default_int_handler(number, None)
        stopped.append(number)

    def on_number(trace: int) -> None:
        if stopped and trace not in asked:
            asked.add(trace)
            ask(record, "trace", {"stop": trace}, answer=TraceStopped)

    asked: set[int] = set()
    before = {number: signal.signal(number, stop) for number in ending()}
    try:
        yield on_number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
