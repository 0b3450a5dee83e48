"""The checkpoints and other files that were written through a mount."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from monarch.cli.daemon_call import ask
from monarch.cli.wait_drained import SILENCE_S
from monarch.control.registry import MountRecord
from monarch.errors import MonarchError, UsageError
from monarch.frameworks.store import MANIFEST, Listed, list_checkpoints
from monarch.posix.bounded_calls import within
from monarch.telemetry.report import WrittenFile, WrittenFiles, WrittenTotals
from monarch.text import escape_text

# Time limit for reading a manifest: the read goes through the mount, whose source may hang.
_PATIENCE_S = 10.0
# Files that a checkpointer keeps beside the checkpoints.
_BESIDE = frozenset({MANIFEST, "lock"})


@dataclass(frozen=True, slots=True)
class Row:
    """A checkpoint, or another file that was written. ``path`` is relative to the mount.

    ``xxh3`` is the checksum in the manifest. ``complete``: the file has the length that the
    manifest gives. ``xxh3``, ``complete``, ``step`` and ``epoch`` are None without a manifest.
    """

    path: str
    bytes: int
    durable: str
    written_ns: int
    xxh3: str | None = None
    complete: bool | None = None
    step: int | None = None
    epoch: int | None = None


def rows_of(record: MountRecord, below: str) -> list[Row]:
    """Checkpoints and other written files at and beneath ``below``, newest first."""
    written = written_of(record, below)
    known = {file.path: file for file in written}
    shelves = shelves_in(below, written)
    rows = [
        _row_of(directory, listed, known)
        for directory in shelves
        for listed in listed_in(record, directory)
    ]
    rows = [row for row in rows if _is_within(row.path, below)]
    named = {row.path for row in rows}
    rows += [
        Row(file.path, file.bytes, file.durable, file.mtime_ns)
        for file in written
        if file.path not in named
        and not (os.path.dirname(file.path) in shelves and os.path.basename(file.path) in _BESIDE)
    ]
    return sorted(rows, key=lambda row: (-row.written_ns, row.path))


def _row_of(directory: str, listed: Listed, known: dict[str, WrittenFile]) -> Row:
    checkpoint = listed.checkpoint
    path = os.path.join(directory, checkpoint.name)
    # A file that was not written through this mount comes from the source.
    durable = known[path].durable if path in known else listed.durable or "source"
    return Row(
        path,
        checkpoint.size,
        durable,
        checkpoint.saved_ns,
        checkpoint.xxh3,
        listed.complete,
        checkpoint.step,
        checkpoint.epoch,
    )


def written_of(record: MountRecord, below: str) -> list[WrittenFile]:
    """The files at and beneath ``below`` that the daemon lists as written, in no order."""
    files: list[WrittenFile] = []
    ask(
        record,
        "written",
        {"path": below},
        answer=WrittenTotals,
        timeout=SILENCE_S,
        on_progress=lambda raw: files.extend(WrittenFiles.from_dict(raw).files),
    )
    return files


def shelves_in(below: str, written: Iterable[WrittenFile]) -> list[str]:
    """The directories that may have a manifest, relative to the mount."""
    found = {os.path.dirname(f.path) for f in written if os.path.basename(f.path) == MANIFEST}
    return sorted(found | {below, os.path.dirname(below)})


def listed_in(record: MountRecord, directory: str) -> list[Listed]:
    """The checkpoints of ``directory``. Raises MonarchError if its manifest cannot be read in
    time."""
    where = Path(record.mountpoint) / directory
    found: list[Listed] = []
    failed: list[BaseException] = []

    def task() -> None:
        try:
            found.extend(list_checkpoints(where))
        except NotADirectoryError:
            pass
        except (OSError, MonarchError) as error:
            failed.append(error)

    if not within(_PATIENCE_S, task):
        raise MonarchError(
            f"{escape_text(os.fspath(where))} has not answered for {_PATIENCE_S:g} seconds",
            hint=f"`monarch status {escape_text(record.mountpoint)}` shows what hangs",
        )
    if failed:
        raise failed[0]
    return found


def newest_of(record: MountRecord, below: str) -> list[str]:
    """The newest complete checkpoint with its manifest, or the newest file."""
    rows = rows_of(record, below)
    checkpoints = [row for row in rows if row.complete]
    for row in checkpoints or rows:
        beside = os.path.join(os.path.dirname(row.path), MANIFEST)
        return [row.path, beside] if row.complete else [row.path]
    raise UsageError(
        "no file was written there", hint="`monarch ckpt ls MOUNT` lists written files"
    )


def _is_within(path: str, directory: str) -> bool:
    return not directory or path == directory or path.startswith(directory + "/")
