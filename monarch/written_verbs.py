"""What the control socket can be asked about written files: which there are, and to await them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import trio

from monarch.absorbing import WriteSide
from monarch.control.server import Send, Verb
from monarch.errors import NotDrainedError, UsageError
from monarch.lost import Lost
from monarch.namespace.overlay import Namespace
from monarch.namespace.written import Node
from monarch.report import (
    ConflictReport,
    ConflictsReport,
    DrainProgress,
    DrainReport,
    KeptReport,
    LostReport,
    RefusalReport,
    RefusalsReport,
    WrittenFile,
    WrittenFiles,
    WrittenTotals,
)
from monarch.writeback.doubtful import Kept
from monarch.writeback.drain import Backlog, Drain

# Of one part of a long answer, in bytes, and files between two looks at other work.
_PART_BYTES = 128 * 1024
_STRIDE = 256
_LOOK_S = 0.2
# A last close is told to us some time after the one who closed goes on. Seconds.
_CLOSING_S = 1.0
_STEP_S = 0.02
# How long the source may take to answer for what it has refused. Seconds.
_ASKED_S = 60.0
# So many lost files are named in an answer: a line of the protocol has its end.
_NAMED = 1000


class WrittenVerbs:
    """``side`` is None for a mount that is read-only: nothing was written, nothing waits."""

    def __init__(self, *, names: Namespace, side: WriteSide | None, lost: Lost) -> None:
        self._names = names
        self._side = side
        self._lost = lost

    def table(self) -> Mapping[str, Verb]:
        return {
            "written": self._written,
            "drain": self._drain,
            "lost": self._tell_lost,
            "conflicts": self._tell_conflicts,
            "refused": self._tell_refused,
            "set-aside": self._set_aside,
            "retry": self._retry,
            "discard": self._discard,
        }

    async def _written(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Every file at and beneath ``path`` that was written, in parts."""
        side, below = self._side, self._name(params.get("path", ""))
        files = size = drained_files = drained_bytes = 0
        part: list[WrittenFile] = []
        room = _PART_BYTES
        for count, (node, path) in enumerate(self._nodes(below)):
            assert side is not None
            durable = side.files.durable(node).decode()
            side.files.status(node)
            told = WrittenFile(os.fsdecode(path), node.size, durable, node.mtime_ns)
            files, size = files + 1, size + node.size
            if durable == "source":
                drained_files, drained_bytes = drained_files + 1, drained_bytes + node.size
            part.append(told)
            room -= len(json.dumps(asdict(told)))
            if room <= 0:
                await send(WrittenFiles(part).to_dict())
                part, room = [], _PART_BYTES
            elif count % _STRIDE == 0:
                await trio.sleep(0)
        await send(WrittenFiles(part).to_dict())
        return WrittenTotals(files, size, drained_files, drained_bytes).to_dict()

    async def _drain(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Wait until all that was written by now is at the source, or what ``paths`` name.

        For ``timeout`` seconds, None for as long as it takes.
        """
        timeout_s = params.get("timeout")
        if timeout_s is not None and not isinstance(timeout_s, int | float):
            raise UsageError("timeout must be a number of seconds")
        side = self._side
        if side is None:
            return DrainReport(True, 0, 0, 0, "", "", []).to_dict()
        paths = params.get("paths")
        if paths is not None and not isinstance(paths, list):
            raise UsageError("paths must be a list of texts")
        below = None if paths is None else [self._name(path) for path in paths]
        waited: _Waited | None = None
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            await self._recorded(side)
            waited = self._waited(side, below)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, _Course(side.drain.backlog()), send)
                await waited.wait()
                nursery.cancel_scope.cancel()
        drained = waited is not None and waited.is_done()
        backlog = side.drain.backlog()
        self._lost.hear(backlog.lost)
        return DrainReport(
            drained=drained,
            files=backlog.files,
            bytes=backlog.bytes,
            oldest_ns=backlog.oldest_ns,
            trouble=backlog.trouble or "",
            directory=os.fspath(side.place.directory),
            lost=[os.fsdecode(name) for name in self._lost.names[:_NAMED]],
        ).to_dict()

    async def _recorded(self, side: WriteSide) -> None:
        """Until the journal tells of all that was written by now."""
        pending = side.stock.unrecorded()
        with trio.move_on_after(_CLOSING_S):
            while pending:
                await trio.sleep(_STEP_S)
                pending &= side.stock.unrecorded()
        # Those that stay open are recorded as they are.
        for ino in pending:
            node = self._names.node(ino)
            if node is not None:
                side.files.record(node)

    def _waited(self, side: WriteSide, below: list[bytes] | None) -> _Waited:
        """What is waited for: all that was put by now, or the contents below some paths."""
        if below is None:
            return _Waited(side.drain, side.drain.last_seq, [])
        seqs = [
            side.stock.content(node.object)[0]
            for each in below
            for node, _ in self._nodes(each)
            if node.object
        ]
        return _Waited(side.drain, 0, seqs)

    async def _tell(self, course: _Course, send: Send) -> None:
        assert self._side is not None
        while True:
            await send(course.progress(self._side.drain.backlog()).to_dict())
            await trio.sleep(_LOOK_S)

    async def _tell_lost(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """The files whose bytes are gone; ``acknowledge`` ends the alarm. What is kept of those
        that ``discard`` names by their numbers is removed."""
        kept: list[KeptReport] = []
        hidden: list[str] = []
        if (side := self._side) is not None:
            self._lost.hear(side.drain.backlog().lost)
            await side.discard(_numbers(params.get("discard", [])))
            kept = [_kept(each) for each in side.place.doubtful.list()[:_NAMED]]
            hidden = [os.fsdecode(path) for path in side.hidden()[:_NAMED]]
        names = [os.fsdecode(name) for name in self._lost.names[:_NAMED]]
        acknowledged = params.get("acknowledge") is True
        if acknowledged:
            self._lost.acknowledge()
        return LostReport(names, acknowledged, kept, hidden).to_dict()

    async def _tell_conflicts(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """What met changes of others at the source; ``acknowledge`` ends the alarm."""
        found = self._side.drain.conflicts() if self._side is not None else []
        acknowledged = params.get("acknowledge") is True
        if acknowledged and self._side is not None:
            self._side.drain.acknowledge_conflicts()
        conflicts = [
            ConflictReport(os.fsdecode(each.path), os.fsdecode(each.kept), each.why)
            for each in found
        ]
        return ConflictsReport(conflicts, acknowledged).to_dict()

    async def _tell_refused(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """What the source refuses."""
        return self._refused().to_dict()

    async def _set_aside(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Let others go before what is refused at ``path``."""
        side, path = self._side_and_path(params)
        with _patience():
            await side.refusals.set_aside(path)
        return self._refused().to_dict()

    async def _retry(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Try once more what is refused, at ``path`` if that is given."""
        if params.get("path") is None:
            if self._side is not None:
                with _patience():
                    await self._side.refusals.retry(None)
            return self._refused().to_dict()
        side, path = self._side_and_path(params)
        with _patience():
            await side.refusals.retry(path)
        return self._refused(path).to_dict()

    async def _discard(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Give up what is refused at ``path``, and all that depends on it."""
        side, path = self._side_and_path(params)
        with _patience():
            removed = await side.refusals.discard(path)
        return self._refused(removed=removed).to_dict()

    def _side_and_path(self, params: dict[str, Any]) -> tuple[WriteSide, bytes]:
        path = params.get("path")
        if not isinstance(path, str) or not path:
            raise UsageError("a path must be a text", hint="name a path in the mount")
        if self._side is None:
            raise UsageError("nothing was written through this mount")
        return self._side, os.fsencode(path).strip(b"/")

    def _refused(self, path: bytes = b"", *, removed: Sequence[bytes] = ()) -> RefusalsReport:
        found = self._side.refusals.list(path) if self._side is not None else []
        return RefusalsReport(
            refused=[
                RefusalReport(
                    path=os.fsdecode(refusal.path),
                    kind=refusal.kind,
                    why=refusal.why,
                    tries=refusal.tries,
                    aside=refusal.is_aside,
                )
                for refusal in found[:_NAMED]
            ],
            waiting=self._side.drain.backlog().ops if self._side is not None else 0,
            removed=[os.fsdecode(name) for name in removed[:_NAMED]],
        )

    def _name(self, path: object) -> bytes:
        """A path relative to the mount, of something that is there. Raises UsageError."""
        if not isinstance(path, str):
            raise UsageError("a path must be a text")
        try:
            name = os.fsencode(path).strip(b"/")
        except UnicodeEncodeError as error:
            raise UsageError(f"no such file in the mount: {path!r}") from error
        if self._names.resolve(name) is None:
            raise UsageError(f"no such file in the mount: {path!r}")
        return name

    def _nodes(self, below: bytes) -> Iterator[tuple[Node, bytes]]:
        """The regular files that were written and have a name, with a path that lies there."""
        if self._side is None:
            return
        names = self._names
        for node in names.nodes():
            if not node.is_file or not node.names:
                continue
            for path in names.visible_paths(node.ino):
                if not below or path == below or path.startswith(below + b"/"):
                    yield node, path
                    break


class _Waited:
    """All changes up to ``upto``, and those in ``seqs``."""

    def __init__(self, drain: Drain, upto: int, seqs: list[int]) -> None:
        self._drain = drain
        self._upto = upto
        self._seqs = sorted(seqs)

    async def wait(self) -> None:
        await self._drain.wait_all(self._upto)
        for seq in self._seqs:
            await self._drain.wait(seq)

    def is_done(self) -> bool:
        return self._drain.has_all(self._upto) and all(map(self._drain.is_done, self._seqs))


class _Course:
    """How far draining has come since it was asked about."""

    def __init__(self, begun: Backlog) -> None:
        self._begun = begun
        self._files = self._bytes = 0

    def progress(self, now: Backlog) -> DrainProgress:
        """Of what waited then; what has come since does not count, and nothing goes backwards."""
        begun = self._begun
        files = _done(begun.files, now.files, now.drained_files - begun.drained_files)
        # A large file counts while it is moved, not only when it is there.
        drained = now.drained_bytes + now.moving_bytes - begun.drained_bytes
        size = _done(begun.bytes, now.bytes, drained)
        self._files, self._bytes = max(self._files, files), max(self._bytes, size)
        return DrainProgress(self._files, begun.files, self._bytes, begun.bytes, now.trouble or "")


@contextmanager
def _patience() -> Iterator[None]:
    """Raises NotDrainedError if the source does not answer for too long."""
    with trio.move_on_after(_ASKED_S) as scope:
        yield
    if scope.cancelled_caught:
        raise NotDrainedError(
            f"the source has not answered for {_ASKED_S:.0f} s",
            hint="what was asked for is done when it answers; `monarch status MOUNT` says what"
            " hangs",
        )


def _numbers(given: object) -> list[int]:
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        raise UsageError("discard must be a list of numbers")
    return given


def _kept(kept: Kept) -> KeptReport:
    return KeptReport(
        number=kept.number,
        path=os.fsdecode(kept.path),
        size=kept.size,
        recorded=kept.recorded,
        written_ns=kept.written_ns,
        found_ns=kept.found_ns,
        file=os.fspath(kept.file),
    )


def _done(total: int, left: int, drained: int) -> int:
    """What was not drained may have gone: removed again, or written anew."""
    return min(total, max(drained, total - left))
