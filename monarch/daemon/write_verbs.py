"""The requests of the control socket about written files: listing, waiting, losses, conflicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import trio

from monarch.control.messages import first_rows
from monarch.control.server import Send, Verb
from monarch.daemon.verbs import existing
from monarch.daemon.write_status import LossAlarm
from monarch.errors import NotDrainedError, Refused, UsageError
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import Node
from monarch.telemetry import report as reports
from monarch.writeback.doubtful import Kept
from monarch.writeback.drain import Drain
from monarch.writeback.op import is_within
from monarch.writeback.progress import Progress
from monarch.writeback.setup import WriteBack

T = TypeVar("T")

# The size of one part of a long answer, and files handled before other tasks run.
_PART_BYTES = 128 * 1024
_STRIDE = 256
_LOOK_S = 0.2
# The kernel reports a last close some time after close() has returned, at most this in seconds.
_CLOSING_S = 1.0
_STEP_S = 0.02
# Time limit for the answer of the source to a retried change, in seconds.
_ASKED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVerbs:
    """``write_back`` is None for a read-only mount, which has no written data."""

    names: Namespace
    write_back: WriteBack | None
    loss_alarm: LossAlarm

    def table(self) -> Mapping[str, Verb]:
        return {
            "written": self._written,
            "drain": self._drain,
            "lost": self._lost,
            "conflicts": self._conflicts,
            "refused": self._list_refused,
            "set-aside": self._set_aside,
            "retry": self._retry,
            "discard": self._discard,
        }

    async def _written(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Sends every written file at and beneath ``path``, in parts; the answer is the last."""
        files = self._written_files(self._name(params.get("path", "")))
        return reports.WrittenFiles(await _last_part(files, reports.WrittenFiles, send)).to_dict()

    def _written_files(self, below: bytes) -> Iterator[reports.WrittenFile]:
        write_back = self.write_back
        for node, path in self._nodes(below):
            assert write_back is not None
            durable = write_back.front.drained.durable(node).decode()
            write_back.front.files.status(node)
            moves = write_back.drain.queue.pending.has_directory_of(path)
            yield reports.WrittenFile(os.fsdecode(path), node.size, durable, node.mtime_ns, moves)

    async def _drain(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Waits until all data written so far, or that at and beneath ``paths``, is at the source,
        or cannot get there before the next mount, since the journal has failed. For ``timeout``
        seconds at most; None is no limit."""
        timeout_s = params.get("timeout")
        if timeout_s is not None and not isinstance(timeout_s, int | float):
            raise UsageError("timeout must be a number of seconds")
        write_back = self.write_back
        if write_back is None:
            return reports.DrainReport(True, 0, 0, 0, "", "", []).to_dict()
        paths = params.get("paths")
        if paths is not None and not isinstance(paths, list):
            raise UsageError("paths must be a list of texts")
        below = None if paths is None else [self._name(path) for path in paths]
        waited: _Waited | None = None
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            await self._recorded(write_back)
            waited = self._waited(write_back, below)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_report_progress, write_back.drain, send)
                nursery.start_soon(_end_if_failed, write_back, nursery.cancel_scope)
                await waited.wait()
                while (
                    self._refused_by_journal(write_back, below)
                    and not write_back.front.recorder.is_broken
                ):
                    await trio.sleep(_LOOK_S)
                    waited = self._waited(write_back, below)
                    await waited.wait()
                nursery.cancel_scope.cancel()
        refused = self._refused_by_journal(write_back, below)
        drained = waited is not None and waited.is_done() and not refused
        backlog = write_back.drain.backlog()
        trouble = backlog.trouble or ""
        if not (drained or trouble):
            trouble = _trouble_of_journal(write_back, refused)
        self.loss_alarm.report(backlog.lost)
        return reports.DrainReport(
            drained=drained,
            files=backlog.files,
            bytes=backlog.bytes,
            oldest_ns=backlog.oldest_ns,
            trouble=trouble,
            directory=os.fspath(write_back.place.directory),
            lost=first_rows(map(os.fsdecode, self.loss_alarm.names)),
        ).to_dict()

    async def _recorded(self, write_back: WriteBack) -> None:
        """Waits until the journal has all data written so far."""
        pending = write_back.front.object_table.unrecorded()
        with trio.move_on_after(_CLOSING_S):
            while pending:
                await trio.sleep(_STEP_S)
                pending &= write_back.front.object_table.unrecorded()
        # Files that stay open are recorded in their current state.
        for ino in pending:
            node = self.names.node(ino)
            if node is not None:
                with suppress(Refused):
                    write_back.front.recorder.record(node)

    def _refused_by_journal(self, write_back: WriteBack, below: list[bytes] | None) -> str:
        """The path of a file, at or beneath ``below``, whose last content the journal has not
        accepted; empty if there is none. A file whose paths cannot be read may be there."""
        for node in write_back.front.object_table.refused():
            try:
                for path in self.names.visible_paths(node.ino):
                    if below is None or any(is_within(path, each) for each in below):
                        return repr(os.fsdecode(path))
            except Refused:
                return f"inode {node.ino}"
        return ""

    def _waited(self, write_back: WriteBack, below: list[bytes] | None) -> _Waited:
        """The changes to wait for: all so far, or those of the files beneath some paths, of the
        names there, and of the directories above."""
        progress = write_back.drain.progress
        if below is None:
            return _Waited(progress, write_back.drain.queue.last_seq, [])
        # A content has the names that its file had at that time.
        seqs = [
            write_back.front.object_table.states.last(node.object)
            for each in below
            for node, _ in self._nodes(each)
            if node.object
        ]
        return _Waited(progress, 0, [*seqs, *chain.from_iterable(map(progress.waiting_at, below))])

    async def _lost(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Sends the files whose bytes are lost, in parts; the answer is the last. ``acknowledge``
        ends the alarm. ``discard`` has the numbers of kept files to remove before, ``discard_all``
        means all."""
        kept: list[reports.KeptReport] = []
        hidden: list[str] = []
        if (write_back := self.write_back) is not None:
            self.loss_alarm.report(write_back.drain.backlog().lost)
            doubtful, numbers = write_back.place.doubtful, _numbers(params.get("discard", []))
            if params.get("discard_all") is True:
                numbers = [each.number for each in doubtful.list()]
            await write_back.discard(numbers)
            kept = await _last_part(map(_kept, doubtful.list()), _kept_part, send)
            hidden = await _last_part(map(os.fsdecode, write_back.hidden()), _hidden_part, send)
        lost = map(os.fsdecode, self.loss_alarm.names)
        names = await _last_part(lost, lambda part: reports.LostReport(part, False), send)
        acknowledged = params.get("acknowledge") is True
        if acknowledged:
            self.loss_alarm.acknowledge()
        return reports.LostReport(names, acknowledged, kept, hidden).to_dict()

    async def _conflicts(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """The conflicts with changes at the source; ``acknowledge`` ends the alarm."""
        log = None if self.write_back is None else self.write_back.drain.writer.log
        # The newest first, and the others as far as they fit.
        newest = (
            reports.ConflictReport(os.fsdecode(each.path), os.fsdecode(each.kept), each.why)
            for each in (() if log is None else list(reversed(log.conflicts)))
        )
        conflicts = first_rows(newest)[::-1]
        acknowledged = params.get("acknowledge") is True
        if acknowledged and log is not None:
            log.forget()
        return reports.ConflictsReport(conflicts, acknowledged).to_dict()

    async def _list_refused(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """The changes that the source refuses."""
        return self._refused().to_dict()

    async def _set_aside(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Lets other changes overtake those that are refused at ``path``."""
        write_back, path = self._write_back_and_path(params)
        with _patience():
            await write_back.refusals.set_aside(path)
        return self._refused().to_dict()

    async def _retry(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Tries refused changes again; the answer has those at ``path``, or all. None there is
        refused if the drain was faster than this request: that is success."""
        write_back, path = self.write_back, None
        if params.get("path") is not None:
            write_back, path = self._write_back_and_path(params)
        if write_back is not None:
            with _patience():
                await write_back.refusals.retry()
        return self._refused(path or b"").to_dict()

    async def _discard(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Discards the refused changes at ``path``, and all that depend on them."""
        write_back, path = self._write_back_and_path(params)
        with _patience():
            removed = await write_back.refusals.discard(path)
        return self._refused(removed=removed).to_dict()

    def _write_back_and_path(self, params: dict[str, Any]) -> tuple[WriteBack, bytes]:
        path = params.get("path")
        if not isinstance(path, str) or not path:
            raise UsageError(
                "no path is named", hint="name a file or directory in the mount, not the mount"
            )
        if self.write_back is None:
            raise UsageError("no file was written through this mount")
        return self.write_back, os.fsencode(path).strip(b"/")

    def _refused(
        self, path: bytes = b"", *, removed: Sequence[bytes] = ()
    ) -> reports.RefusalsReport:
        if self.write_back is None:
            return reports.RefusalsReport([], 0)
        rows = (
            reports.RefusalReport(
                os.fsdecode(each.path), each.kind, each.why, each.tries, each.is_aside
            )
            for each in self.write_back.refusals.list(path)
        )
        # An answer without one says that nothing is refused.
        refused = first_rows(rows, least=1)
        waiting, stopped = self.write_back.drain.backlog().ops, self.write_back.refusals.stopped()
        names = first_rows(map(os.fsdecode, removed))
        return reports.RefusalsReport(refused, waiting, names, stopped)

    def _name(self, path: object) -> bytes:
        """An existing path, relative to the mount, as bytes. Raises UsageError."""
        if not isinstance(path, str):
            raise UsageError("a path must be a text")
        return existing(self.names, path)[0]

    def _nodes(self, below: bytes) -> Iterator[tuple[Node, bytes]]:
        """The written regular files beneath ``below``, each with a path there."""
        if self.write_back is None:
            return
        names = self.names
        for node in names.nodes():
            if not node.is_file or not node.names or _is_of_others(node):
                continue
            for path in names.visible_paths(node.ino):
                if is_within(path, below):
                    yield node, path
                    break


def _is_of_others(node: Node) -> bool:
    """Whether a file of the source was neither written nor changed through the mount."""
    was_written = node.object or node.is_separate or node.undrained or node.drained
    return not (was_written or node.keeps_mode or node.keeps_owner or node.keeps_times)


class _Waited:
    """The changes up to the number ``upto``, and those in ``seqs``."""

    def __init__(self, progress: Progress, upto: int, seqs: list[int]) -> None:
        self._progress = progress
        self._upto = upto
        self._seqs = sorted(seqs)

    async def wait(self) -> None:
        await self._progress.wait_all(self._upto)
        for seq in self._seqs:
            await self._progress.wait(seq)

    def is_done(self) -> bool:
        return self._progress.has_all(self._upto) and all(map(self._progress.is_done, self._seqs))


async def _end_if_failed(write_back: WriteBack, scope: trio.CancelScope) -> None:
    """Cancels a wait for a drain that stands still, since the journal accepts no marks before the
    next mount. One whose syncs fail gets another file soon, if the disk takes that."""
    recorder, journal = write_back.front.recorder, write_back.place.journal
    while not (journal.is_beyond_repair or (recorder.is_broken and write_back.drain.stopped)):
        await trio.sleep(_LOOK_S)
    scope.cancel()


def _trouble_of_journal(write_back: WriteBack, refused: str) -> str:
    """Why the journal keeps data from the source; empty if it does not. ``refused``: the path of a
    file whose last content it has not accepted."""
    why, failed = "", write_back.place.journal.file.failed
    if refused:
        is_broken = write_back.front.recorder.is_broken
        why = "has failed, and lacks the last bytes of" if is_broken else "has no room for"
        why = f"{why} {refused}"
    elif failed:
        why = f"has failed: {failed}"
    return why and f"the journal in tier {write_back.place.tier.name} {why}"


async def _report_progress(drain: Drain, send: Send) -> None:
    """Sends the progress of the data that waits now, until cancelled; it never decreases."""
    begun = drain.backlog()
    files = size = 0
    while True:
        now = drain.backlog()
        files = max(files, _done(begun.files, now.files, now.drained_files - begun.drained_files))
        # The bytes of a file that is being moved count already.
        drained = now.drained_bytes + now.moving_bytes - begun.drained_bytes
        size = max(size, _done(begun.bytes, now.bytes, drained))
        progress = reports.DrainProgress(files, begun.files, size, begun.bytes, now.trouble or "")
        await send(progress.to_dict())
        await trio.sleep(_LOOK_S)


async def _last_part(
    rows: Iterable[T], report: Callable[[list[T]], reports.Report], send: Send
) -> list[T]:
    """Sends rows in reports of a limited size, all but the last ones, which are returned. Other
    tasks run meanwhile."""
    part: list[T] = []
    room = _PART_BYTES
    for count, row in enumerate(rows):
        part.append(row)
        room -= len(json.dumps(report([row]).to_dict()))
        if room <= 0:
            await send(report(part).to_dict())
            part, room = [], _PART_BYTES
        elif count % _STRIDE == 0:
            await trio.sleep(0)
    return part


def _kept_part(kept: list[reports.KeptReport]) -> reports.LostReport:
    return reports.LostReport([], False, kept)


def _hidden_part(hidden: list[str]) -> reports.LostReport:
    return reports.LostReport([], False, hidden=hidden)


@contextmanager
def _patience() -> Iterator[None]:
    """Raises NotDrainedError if the source does not answer for ``_ASKED_S``."""
    with trio.move_on_after(_ASKED_S) as scope:
        yield
    if scope.cancelled_caught:
        raise NotDrainedError(
            f"the source has not answered for {_ASKED_S:.0f} s",
            hint="the request is carried out when it answers; `monarch status MOUNT` shows what"
            " hangs",
        )


def _numbers(given: object) -> list[int]:
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        raise UsageError("discard must be a list of numbers")
    return given


def _kept(kept: Kept) -> reports.KeptReport:
    return reports.KeptReport(
        number=kept.number,
        path=os.fsdecode(kept.path),
        size=kept.size,
        recorded=kept.recorded,
        written_ns=kept.written_ns,
        found_ns=kept.found_ns,
        file=os.fspath(kept.file),
    )


def _done(total: int, waiting: int, drained: int) -> int:
    """The part of ``total`` that is done; data may have been removed or rewritten before it was
    drained."""
    return min(total, max(drained, total - waiting))
