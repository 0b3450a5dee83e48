"""Mounts without a kernel: the write side of a mount, ended and begun anew.

``Rig`` has everything that outlives a mount. ``Session`` is one mount: the real tree, journal,
objects and drain, wired as the daemon wires them, with threads that are idle when it is over.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.config.settings import MountSettings
from monarch.daemon.snapshot_choice import snapshot_for
from monarch.errors import Refused
from monarch.namespace import overlay
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.placement.controller import Controller, Promote
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome
from monarch.placement.residency import Residency
from monarch.posix.credentials import Credentials
from monarch.posix.thread_pool import ThreadPool
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts, SourceClock
from monarch.tiers.ownership import Owner
from monarch.tiers.source import Source
from monarch.tiers.tier import Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import NoDatapath, SourceLoad
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Identity, Ino
from monarch.vfs.binding import Bindings
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.promotions import Promotions
from monarch.vfs.revalidation import Revalidation
from monarch.writeback import commits, front, journal_found, others, replication, setup
from monarch.writeback.front import Reading
from monarch.writeback.open_file import SourceBytes
from monarch.writeback.setup import build_write_back
from monarch.writeback.store import WriteStore, directory_of, make_room, open_write_store
from tests.equipment.disks import fill
from tests.equipment.remounts import Left, Shown, Tree, kind_of

ROOT = Credentials(os.geteuid(), os.getegid())


@dataclass
class Rig:
    """Source, tier and state, and the start of the machine."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    # A disk of its own for the tier, which can be full; else it lies on that of the rest.
    disk: Path | None = None
    threads: dict[str, ThreadPool] = field(default_factory=dict)
    names_kept: int = 2
    boots: int = 0
    states: int = 0
    given: int = 0
    # Of the last mount: why it has not the snapshot that was asked for.
    put_off: str = ""

    def __post_init__(self) -> None:
        # Names leave memory all the time.
        self.monkeypatch.setattr(overlay, "_KEPT", self.names_kept)
        for path in (self.source, self.tier, self.root / "run"):
            path.mkdir(parents=True, exist_ok=True)
        self.boot_again()
        self.monkeypatch.setattr(journal_found, "_BOOT", self.root / "boot")
        for module in (setup, front, commits, others, replication):
            self.monkeypatch.setattr(module, "ThreadPool", self._threads)

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def tier(self) -> Path:
        return (self.disk or self.root) / "tier"

    @property
    def state(self) -> Path:
        path = self.root / f"state-{self.states}"
        path.mkdir(exist_ok=True)
        return path

    @property
    def directory(self) -> Path:
        """Of the journal."""
        return directory_of(self.tier, self.source)

    def boot_again(self) -> None:
        self.boots += 1
        (self.root / "boot").write_text(f"boot-{self.boots}\n")

    def lose_state(self) -> None:
        while (self.root / f"state-{self.states}").exists():
            self.states += 1

    def fill(self, is_full: bool) -> None:
        """Have others fill the disk of the tier, or make room again."""
        (self.tier / "filler").unlink(missing_ok=True)
        if is_full:
            fill(self.tier)

    def _threads(self, limit: int, name: str, *, abandon: bool, **more: Any) -> ThreadPool:
        """The same for all mounts; also a cancelled caller waits for it."""
        if name not in self.threads:
            self.threads[name] = ThreadPool(limit, name, abandon=False, **more)
        return self.threads[name]

    async def come_to_rest(self) -> None:
        """What was begun in threads is over."""
        for threads in self.threads.values():
            while threads._under_way or not threads._calls.empty():
                await trio.lowlevel.checkpoint()
                threading.Event().wait(0.0002)

    def finish_calls(self) -> None:
        """What was begun in threads is over. Its answers come to the tasks later."""
        for threads in self.threads.values():
            while len(threads._answers) < len(threads._under_way):
                threading.Event().wait(0.0002)

    def settings(
        self, *, write: bool = True, freshness: str = "mount", **more: Any
    ) -> MountSettings:
        settings = {
            "name": "m",
            "source": self.source,
            "mountpoint": self.root / "run",
            "tiers": [{"path": self.tier, "capacity": "64MiB"}],
            "write": "absorb" if write else "none",
            "snapshot": {"freshness": freshness, "jobs": 1},
            "limits": {"source_timeout": None},
        }
        return MountSettings.model_validate(settings | more)

    @property
    def left(self) -> Left:
        return Left(self.directory)

    @asynccontextmanager
    async def mount(
        self, *, refreshed: bool = False, works: bool = True, **more: Any
    ) -> AsyncIterator[Session]:
        """One session; it is killed at the end of the block, or by what is raised there. Without
        ``works`` the drain does nothing."""
        settings = self.settings(**more)
        session = None
        with ExitStack() as cleanup:
            source = Source(os.fsencode(self.source))
            cleanup.callback(source.close)
            chosen = snapshot_for(settings, self.state, source, refreshed, lambda *_: None)
            self.put_off = chosen.put_off
            cleanup.callback(chosen.snapshot.close)
            make_room(settings)
            tier = Tier(1, "fast", self.tier, owner=Owner("test"))
            cleanup.callback(tier.close)
            tier.use(chosen.snapshot.id)
            place = open_write_store(settings, [tier])
            assert place is not None
            is_closed = False
            try:
                session = Session(self, settings, chosen.snapshot, source, place)
                async with trio.open_nursery() as nursery:
                    for name, task in session.write_back.tasks().items():
                        if works or name != "drain":
                            nursery.start_soon(task)
                    yield session
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    await self.come_to_rest()
                if session is not None:
                    is_closed = session.is_closed
                    if not is_closed:
                        session.write_back.commits.close()
                    session.let_go()
                if not is_closed:
                    place.journal.close()
                    place.lock.release()


class NoKernel:
    """The caches of no kernel."""

    def invalidate_attributes(self, ino: Ino) -> None: ...
    def invalidate_listing(self, directory: Ino) -> None: ...
    def store(self, ino: Ino, content: bytes) -> None: ...
    def drop(self, ino: Ino) -> None: ...


class NoCopies:
    """An engine that has nothing to copy."""

    def make_room(self, promote: Promote) -> Promote:
        return promote

    def submit(self, promote: Promote, identity: Identity, **more: object) -> bool:
        return False

    def flight(self, ino: Ino) -> None:
        return None

    def take_over(self, ino: Ino) -> bool:
        return False

    def remove_copy(self, ino: Ino, tier: int) -> None: ...

    def wake(self) -> None: ...

    async def removed(self) -> None: ...

    def has_place(self) -> bool:
        return True


class Session:
    def __init__(
        self,
        rig: Rig,
        settings: MountSettings,
        snapshot: Snapshot,
        source: Source,
        place: WriteStore,
    ) -> None:
        self.rig = rig
        self.source = source
        self.is_closed = False
        # Files that a process has open to read, of which the event loop was not notified.
        self.read: set[Ino] = set()
        residency, ledger, metrics = (
            Residency(snapshot.entries),
            Ledger([64 << 20]),
            Metrics(["fast"]),
        )
        self.names = Namespace(
            snapshot,
            residency.mark_differing,
            first_ino=Ino(max(WRITTEN_INO, place.found.next_ino)),
            spill=rig.state / "names",
        )
        self.source_calls = SourceCalls(
            source,
            rig._threads(4, "source", abandon=False),
            names=self.names,
            metrics=metrics,
            timeout_s=None,
            datapath=NoDatapath(),
        )
        self.write_back = build_write_back(
            place,
            settings=settings,
            names=self.names,
            source_calls=self.source_calls,
            source_load=SourceLoad(NoDatapath()),
            ledger=ledger,
            fast=None,
            read=Reading(
                copied_up=lambda ino: None,
                look_again=lambda ino: self.revalidation.look_again(ino),
                copies=residency.resident_in,
                evict=lambda ino: 0,
                evicted=_nothing,
                is_open=lambda ino: ino in self.read,
                renewed=lambda ino, before, now: None,
            ),
            kernel=NoKernel(),
        )
        self.front = self.write_back.front
        self.writing = self.front.operations
        self.files = self.front.files
        # There is neither a kernel to notify nor a copy to drop.
        bindings = Bindings(None)
        kernel = KernelView(
            NoKernel(), self.names, residency, None, sends_opens=True, reads_copies=False
        )
        self.revalidation = Revalidation(
            self.names,
            self.source_calls,
            bindings,
            residency,
            Promotions(
                self.names,
                residency,
                Controller(residency, ledger, FirstCome()),
                NoCopies(),
                bindings,
                Doubts(SourceClock(0, 0)),
                metrics,
                1.0,
            ),
            kernel,
            metrics,
        )

    def kill(self) -> Tree:
        """What it shows; nothing that still runs of it can tell the journal anything more."""
        shown = self.shown()
        self.rig.monkeypatch.setattr(self.write_back.place.journal.file, "append", _killed)
        return shown

    def let_go(self) -> None:
        """The descriptors of a killed daemon."""
        for file in self.front.opens.files.values():
            if file.earlier_place is not None:
                file.earlier_place.close()
            if isinstance(file.place, SourceBytes):
                file.place.close()
                continue
            for fd in (file.place.fd, getattr(file.place, "_before", -1)):
                with suppress(OSError):
                    os.close(fd)

    async def end(self, *, abandoned: bool = False) -> None:
        """A clean end; if not ``abandoned``, all that was written is at the source then."""
        self.files.close()
        if abandoned:
            self.write_back.abandon()
        await self.write_back.finish()
        await self.rig.come_to_rest()
        self.write_back.close()
        self.is_closed = True

    # -- what is done --------------------------------------------------------------------------

    def at(self, path: bytes) -> tuple[Ino, bytes]:
        above, _, name = path.rpartition(b"/")
        found = self.names.resolve(above)
        if found is None:
            raise Refused(errno.ENOENT)
        return found, name

    def ino(self, path: bytes) -> Ino:
        found = self.names.resolve(path)
        if found is None:
            raise Refused(errno.ENOENT)
        return found

    async def open(self, path: bytes, flags: int = os.O_WRONLY) -> Ino:
        if self.names.resolve(path) is None:
            attributes = await self.writing.create(*self.at(path), mode=0o644, by=ROOT)
            return attributes.ino
        ino = self.ino(path)
        await self.writing.open(ino, flags, ROOT)
        return ino

    async def write(self, path: bytes, content: bytes, *, synced: bool = False) -> None:
        """A whole file."""
        ino = await self.open(path, os.O_WRONLY | os.O_TRUNC)
        try:
            await self.files.write(ino, 0, content)
            if synced:
                await self.front.fsyncs.sync(ino, None)
        finally:
            self.files.release(ino)

    async def rename(self, path: bytes, to: bytes) -> None:
        await self.writing.rename(*self.at(path), *self.at(to), 0, by=ROOT)

    async def link(self, path: bytes, to: bytes) -> None:
        await self.writing.link(self.ino(path), *self.at(to), by=ROOT)

    def unlink(self, path: bytes) -> None:
        self.writing.unlink(*self.at(path), by=ROOT)

    async def mkdir(self, path: bytes, mode: int = 0o755) -> None:
        await self.writing.make(*self.at(path), mode=stat.S_IFDIR | mode, by=ROOT)

    def rmdir(self, path: bytes) -> None:
        self.writing.rmdir(*self.at(path), by=ROOT)

    async def symlink(self, path: bytes, target: bytes) -> None:
        await self.writing.make(*self.at(path), mode=stat.S_IFLNK | 0o777, target=target, by=ROOT)

    async def mkfifo(self, path: bytes) -> None:
        await self.writing.make(*self.at(path), mode=stat.S_IFIFO | 0o600, by=ROOT)

    async def chmod(self, path: bytes, mode: int) -> None:
        await self.front.attributes.change(self.ino(path), mode=mode, by=ROOT)

    async def utime(self, path: bytes, mtime_ns: int) -> None:
        await self.front.attributes.change(self.ino(path), mtime_ns=mtime_ns, by=ROOT)

    async def setxattr(self, path: bytes, name: bytes, value: bytes | None) -> None:
        await self.front.attributes.set_xattr(self.ino(path), name, value, by=ROOT)

    async def drained(self) -> None:
        """All that was recorded is at the source."""
        await self.write_back.drain.progress.settle()
        await self.rig.come_to_rest()

    async def at_rest(self) -> None:
        """All that the source takes is there."""
        drain = self.write_back.drain
        # What the source refuses is not counted.
        await drain._wakeups.until(lambda: not len(drain.queue))
        await self.rig.come_to_rest()

    async def looked(self) -> bool:
        """All directories were compared with the source, as those are that processes use; whether
        this mount does that."""
        others = self.write_back.others
        if others is None or not others._covers(ROOT_INO, b"any"):
            return False
        looked: set[Ino] = set()
        while left := {ROOT_INO, *self._directories()} - looked:
            for ino in sorted(left):
                while (looking := others._looking.get(ino)) is not None:
                    await looking.wait()
                await others._look_if_possible(ino)
            looked |= left
        await self.rig.come_to_rest()
        return True

    def _directories(self) -> Iterator[Ino]:
        return (attributes.ino for _, attributes in self._entries() if attributes.is_dir)

    # -- what is seen --------------------------------------------------------------------------

    def shown(self) -> Tree:
        """The tree of the mount, each file with the bytes that a reader gets."""
        return {path: self._shown(path, attributes.ino) for path, attributes in self._entries()}

    def kinds(self) -> dict[bytes, str]:
        """The kinds of all that it shows."""
        return {path: kind_of(attributes.mode) for path, attributes in self._entries()}

    def _entries(self) -> Iterator[tuple[bytes, Attributes]]:
        pending = [(b"", ROOT_INO)]
        while pending:
            above, ino = pending.pop()
            for _, name, attributes in self.names.list_from(ino, 0):
                path = above + b"/" + name if above else name
                assert self.names.resolve(path) == attributes.ino, path
                yield path, attributes
                if attributes.is_dir:
                    pending.append((path, attributes.ino))

    def _shown(self, path: bytes, ino: Ino) -> Shown:
        attributes, node = self.names.attributes(ino), self.names.node(ino)
        kind, mode = kind_of(attributes.mode), stat.S_IMODE(attributes.mode)
        if kind == "link":
            return Shown(kind, 0o777, target=self.names.readlink(ino), ino=ino)
        if kind != "file":
            there = self.write_back.drain.state.entries.made.get(ino) or self.names.at_source(ino)
            return Shown(kind, mode, ino=ino, source_ino=there.source_ino if there else 0)
        content = self._content(path, ino)
        xattrs: Mapping[bytes, bytes] = node.xattrs if node is not None else {}
        safety = self.front.drained.durable(node).decode() if node is not None else ""
        number = node.object if node is not None else 0
        known = (attributes.mode, attributes.uid, attributes.gid)
        return Shown(
            kind,
            mode,
            content,
            xattrs=tuple(sorted(xattrs.items())),
            safety=safety,
            object=number,
            ino=ino,
            status=(*known, attributes.size, attributes.mtime_ns),
        )

    def _content(self, path: bytes, ino: Ino) -> bytes:
        node = self.names.node(ino)
        file = self.front.opens.files.get(ino)
        if file is not None:
            return os.pread(file.place.fd, 1 << 20, 0)
        if (
            node is not None
            and node.object
            and not self.write_back.front.object_table.states.is_write_through(node.object)
        ):
            # A file that is being copied to its staged file is not open yet.
            with suppress(FileNotFoundError):
                fd = self.write_back.place.objects.open(node.object)
                try:
                    return os.pread(fd, 1 << 20, 0)
                finally:
                    os.close(fd)
        if node is not None and node.object:
            # Without room in the tier: in its staged file until it has its name.
            beside = self.write_back.front.object_table.states.staged_beside(node.object) or b""
            part = b".monarch-%s-%d-through.part" % (
                self.write_back.place.journal.token.encode("ascii"),
                node.object,
            )
            published = self.rig.source / os.fsdecode(beside)
            with suppress(OSError):
                return published.with_name(os.fsdecode(part)).read_bytes()
            with suppress(OSError):
                # It may wait for a rename there.
                if published.stat().st_ino == self.write_back.front.object_table.states.source_ino(
                    node.object
                ):
                    return published.read_bytes()
        # At the source, where it is shown or, before the source knows of its renames, was.
        shown = path if node is None else self.names.visible_path(ino)
        known, found = self.names.at_source(ino), b"ENOENT"
        places = (self.names.path(ino), shown)
        for at in (*places, *self.names.source_paths(ino)):
            with suppress(OSError):
                there = self.rig.source / os.fsdecode(at)
                if not stat.S_ISREG(there.lstat().st_mode):
                    continue
                is_it = known is None or there.stat().st_ino == known.source_ino
                if is_it or at in places:
                    found = there.read_bytes()
                if is_it:
                    break
        return found


def _killed(*records: object, keep: int = 0) -> None:
    raise OSError(errno.EIO, "killed")


async def _nothing() -> None:
    return
