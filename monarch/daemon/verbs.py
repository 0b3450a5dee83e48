"""The requests of the control socket; those about written files are in daemon/write_verbs.py."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from monarch.control.server import Send, Verb
from monarch.daemon.fsck import OnlineFsck
from monarch.daemon.status import Status
from monarch.errors import MonarchError, UsageError
from monarch.namespace.namespace import Namespace
from monarch.placement.residency import SOURCE, Residency
from monarch.posix import failpoints
from monarch.telemetry.report import WarmProgress, WarmReport
from monarch.text import counted
from monarch.types import ROOT_INO, Ino
from monarch.vfs.promotions import Promotions

# Files handled before the event loop runs other tasks.
_STRIDE = 64
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs:
    """``background`` runs work whose client may disconnect, and logs its failures; ``stop`` ends
    the mount; ``abandon`` makes the end not wait for written data that is not at the source."""

    names: Namespace
    promotions: Promotions
    residency: Residency
    status: Status
    online_fsck: OnlineFsck
    background: Callable[[Callable[[], Awaitable[None]]], None]
    stop: Callable[[], None]
    abandon: Callable[[], None]
    _warmings: list[_Warming] = field(default_factory=list, init=False)
    _one_at_a_time: trio.Lock = field(default_factory=trio.Lock, init=False)

    def __post_init__(self) -> None:
        self.status.warming = lambda: [work.progress() for work in self._warmings]

    def table(self) -> Mapping[str, Verb]:
        return {
            "ping": self._ping,
            "status": self._report,
            "warm": self._warm,
            "evict": self._evict,
            "fsck": self._check,
            "stop": self._end,
        }

    async def _ping(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        return {"pid": os.getpid()}

    async def _report(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        return self.status.report().to_dict()

    async def _end(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """``abandon``: data that is not at the source stays in the tier for the next mount."""
        if params.get("abandon") is True:
            self.abandon()
        self.stop()
        return {}

    async def _warm(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Copies files into the tiers; with ``wait`` the answer is sent when they are resident.

        Answers ``files`` and ``bytes`` requested, and ``refused`` for lack of space. ``cancel``
        instead stops earlier requests; copies that are already queued are still made.
        """
        if params.get("cancel") is True:
            for work in self._warmings:
                work.cancelled = True
            return {"cancelled": len(self._warmings)}
        roots = self._roots(params)
        work = _Warming()
        # Registered first: an eviction or a cancel while the files are counted must apply.
        self._warmings.append(work)
        try:
            for _ino, size in self._files(roots):
                work.files, work.bytes = work.files + 1, work.bytes + size
                if work.files % _STRIDE == 0:
                    await trio.sleep(0)
        except BaseException:
            self._warmings.remove(work)
            raise
        self.background(partial(self._bring_in, roots, work))
        if params.get("wait") is True:
            while not work.done:
                await send(work.progress().to_dict())
                await trio.sleep(_LOOK_S)
            await send(work.progress().to_dict())
            if work.failed:
                raise MonarchError("not all files were copied", hint="see the log of the daemon")
            if work.closed:
                raise MonarchError(
                    f"{counted(work.closed, 'file is', 'files are')} closed to the daemon at the"
                    " source; all others that fit were copied",
                    hint="with `source_identity: caller` such a file is copied when a process that"
                    " may read it does so",
                )
        return WarmReport(work.files, work.bytes, work.refused, work.cancelled).to_dict()

    async def _bring_in(self, roots: list[Ino], work: _Warming) -> None:
        try:
            failpoints.failpoint("task-warm")
            async with self._one_at_a_time:
                await self._bring_each(roots, work)
        except BaseException:
            work.failed = True
            raise
        finally:
            work.done = True
            self._warmings.remove(work)

    async def _bring_each(self, roots: list[Ino], work: _Warming) -> None:
        """Requests each file when the engine has a free place, and waits for the copies."""
        arriving: list[tuple[Ino, int]] = []
        for ino, size in self._files(roots):
            while not (work.cancelled or work.is_evicted(ino) or self.promotions.has_place()):
                arriving = self._arrived(arriving, work)
                await trio.sleep(_LOOK_S / 10)
            if work.cancelled:
                break
            if work.is_evicted(ino):
                work.no_longer_asked(size)
            elif self.promotions.warm(ino):
                arriving.append((ino, size))
            else:
                work.refused += 1
            if len(arriving) % _STRIDE == 0:
                arriving = self._arrived(arriving, work)
                await trio.sleep(0)
        while arriving:
            await trio.sleep(_LOOK_S / 2)
            arriving = self._arrived(arriving, work)

    def _arrived(self, arriving: list[tuple[Ino, int]], work: _Warming) -> list[tuple[Ino, int]]:
        """The files that are still being copied; counts the others as resident or refused."""
        waiting = []
        work.bytes_moving = 0
        for ino, size in arriving:
            if work.is_evicted(ino):
                work.no_longer_asked(size)
            elif self.residency.tier_of(ino) != SOURCE:
                work.files_done += 1
                work.bytes_done += size
            elif self.residency.is_wanted(ino):
                waiting.append((ino, size))
                work.bytes_moving += self.promotions.bytes_copied(ino)
            elif self.promotions.is_closed(ino):
                work.closed += 1
            else:
                work.refused += 1
        return waiting

    async def _evict(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        files = size = 0
        for seen, (ino, _size) in enumerate(self._files(self._roots(params))):
            for work in self._warmings:
                work.evicted(ino, entries=self.residency.entries)
            freed = self.promotions.has_copy(ino)
            size += self.promotions.evict(ino)
            files += freed
            if seen % _STRIDE == 0:
                await trio.sleep(0)
        await self.promotions.removed()
        return {"files": files, "bytes": size}

    async def _check(self, params: dict[str, Any], send: Send) -> dict[str, Any]:
        """Checks all data of the daemon; ``digests`` and ``repair`` as in ``OnlineFsck.run``."""
        report = await self.online_fsck.run(
            digests=params.get("digests") is True,
            repair=params.get("repair") is True,
            report=lambda progress: send(progress.to_dict()),
        )
        return report.to_dict()

    def _roots(self, params: dict[str, Any]) -> list[Ino]:
        """The inodes of ``paths``, relative to the mount point; the root if there are none."""
        paths = params.get("paths") or [""]
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UsageError("paths must be a list of texts")
        # A path that is named twice, or is beneath another named directory, counts once.
        roots = {existing(self.names, path)[1] for path in paths}
        return sorted(ino for ino in roots if roots.isdisjoint(self._above(ino)))

    def _above(self, ino: Ino) -> Iterator[Ino]:
        """The parent directories of ``ino``, up to the root."""
        while ino != ROOT_INO:
            ino = self.names.attributes(ino).parent
            yield ino

    def _files(self, roots: list[Ino]) -> Iterator[tuple[Ino, int]]:
        for root in roots:
            for ino, attributes in self.names.walk(root):
                # A file written through the mount has no copy.
                if not self.names.is_rewritten(ino):
                    yield ino, attributes.size


def existing(names: Namespace, path: str) -> tuple[bytes, Ino]:
    """A path relative to the mount as bytes, and its inode. Raises UsageError if there is none."""
    with suppress(UnicodeEncodeError):
        name = os.fsencode(path).strip(b"/")
        ino = names.resolve(name)
        if ino is not None:
            return name, ino
    raise UsageError(f"no such file in the mount: {path!r}")


@dataclass(slots=True, eq=False)
class _Warming:
    """The progress of one ``warm`` request."""

    files: int = 0
    bytes: int = 0
    files_done: int = 0
    bytes_done: int = 0
    bytes_moving: int = 0
    refused: int = 0
    closed: int = 0
    done: bool = False
    failed: bool = False
    cancelled: bool = False
    # One byte for each inode, allocated at the first eviction.
    _evicted: bytearray = field(default_factory=bytearray)

    def evicted(self, ino: Ino, *, entries: int) -> None:
        """Marks that the user evicted the file after the request: it is not copied again."""
        if not self._evicted:
            self._evicted = bytearray(entries + 1)
        self._evicted[ino] = True

    def is_evicted(self, ino: Ino) -> bool:
        return bool(self._evicted) and bool(self._evicted[ino])

    def no_longer_asked(self, size: int) -> None:
        self.files -= 1
        self.bytes -= size

    def progress(self) -> WarmProgress:
        return WarmProgress(
            done=self.files_done,
            total=self.files,
            bytes_done=self.bytes_done + self.bytes_moving,
            bytes_total=self.bytes,
            refused=self.refused,
        )
