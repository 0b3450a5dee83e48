"""The front of write-back: everything that answers the kernel's requests to change files, wired."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.config.settings import MountSettings
from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.posix.thread_pool import ThreadPool
from monarch.text import errno_words
from monarch.transfer.source_calls import SourceCalls
from monarch.types import Identity, Ino
from monarch.writeback.attributes import WrittenAttributes
from monarch.writeback.commits import FsyncFailures
from monarch.writeback.copy_up import CopyUp
from monarch.writeback.drain import Drain
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import FastWrites, OpenTable
from monarch.writeback.open_files import Fsyncs, WrittenFiles
from monarch.writeback.operations import WriteOperations
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_files import DrainedObjects, SourceFiles
from monarch.writeback.store import WriteStore
from monarch.writeback.tier_objects import TierObjects
from monarch.writeback.unlinked import UnlinkedFiles
from monarch.writeback.write_gate import SpaceReclaimer, WriteGate, WriteReserve

log = logging.getLogger(__name__)

# Concurrent calls of the absorbing tier: opens, and writes that Python makes; fsyncs.
_TIER_THREADS = 16
_SYNC_THREADS = 32
_LOOK_S = 0.5
# The pause after names could not be put away, in seconds.
_PUT_AWAY_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What write-back asks of the side that reads.

    ``copied_up`` is called with each inode that the source no longer has as the mount shows it.
    ``look_again`` compares a file with the source. ``copies`` returns the files with copies in a
    tier, in the order in which they leave for written files; ``evict`` drops a copy and returns its
    size in bytes; ``evicted`` waits until all dropped copies are deleted. ``is_open`` returns
    whether a process has a file open that was not written through the mount. ``renewed`` as of
    ``UndrainedAttributes``.
    """

    copied_up: Callable[[Ino], None]
    look_again: Callable[[Ino], Awaitable[None]]
    copies: Callable[[int], Iterator[Ino]]
    evict: Callable[[Ino], int]
    evicted: Callable[[], Awaitable[None]]
    is_open: Callable[[Ino], bool]
    renewed: Callable[[Ino, Identity, Identity], None]


class WriteFront:
    """The parts of one mount. ``operations`` changes names, ``attributes`` what they lead to, and
    ``files`` bytes. ``fast`` is the datapath, if there is one."""

    def __init__(
        self,
        place: WriteStore,
        *,
        settings: MountSettings,
        names: Namespace,
        object_table: ObjectTable,
        reserve: WriteReserve,
        drain: Drain,
        source_calls: SourceCalls,
        fast: FastWrites | None,
        read: Reading,
    ) -> None:
        self.names = names
        self.object_table = table = object_table
        staged = drain.writer.staged
        copied_up, look_again = read.copied_up, read.look_again
        # Calls that wait for the absorbing tier must not delay readers.
        threads = ThreadPool(_TIER_THREADS, "absorb", abandon=True)
        sync_threads = ThreadPool(_SYNC_THREADS, "fsync", abandon=True)
        first = place.found.next_object
        self.opens = opens = OpenTable(fast, place.tier.number)
        self.objects = objects = TierObjects(place.objects, threads, sync_threads, first)
        self.recorder = recorder = Recorder(names, table, place.journal, drain, objects)
        self.unlinked = unlinked = UnlinkedFiles(
            names, table, opens, objects, recorder, staged, drain.queue.source_paths
        )
        self.drained = drained = DrainedObjects(
            table, place.objects, drain, opens, recorder, unlinked
        )
        self.space = space = SpaceReclaimer(
            place, threads, reserve, drained, read.copies, read.evict, read.evicted
        )
        self.source = source = SourceFiles(
            names, table.states, opens, unlinked, drained, drain, staged, source_calls, look_again
        )
        self.failures = failures = FsyncFailures(names, table, objects, opens, drained)
        self.gate = gate = WriteGate(names, settings, recorder, objects, unlinked, space)
        self.files = files = WrittenFiles(
            names, table, opens, objects, recorder, unlinked, failures, source, space, gate
        )
        self.fsyncs = Fsyncs(names, files, recorder, drain, settings.writeback.fsync == "source")
        self.copies = copies = CopyUp(
            names,
            gate,
            files,
            objects,
            recorder,
            source,
            drained,
            unlinked,
            table.attributes,
            copied_up,
        )
        self.operations = WriteOperations(
            names, gate, files, opens, copies, recorder, drained, unlinked, copied_up
        )
        states, tier = table.states, place.tier.number
        self.attributes = WrittenAttributes(
            names,
            gate,
            files,
            copies,
            recorder,
            drained,
            states,
            table.attributes,
            source_calls,
            tier,
        )

    async def run(self) -> None:
        """Do what is due without a request, until cancelled: record files that are open and were
        not written for a while, and forget what is not needed."""
        put_away_s = -math.inf
        while True:
            await trio.sleep(_LOOK_S)
            self.objects.close_pending()
            self.recorder.note_delayed()
            self.recorder.record_delayed()
            with suppress(Refused):
                self.unlinked.forget_old()
                self.drained.release_arrived()
            for file in list(self.object_table.open.values()):
                if not file.is_write_through:
                    self.recorder.record_if_quiet(file, _LOOK_S)
            if trio.current_time() < put_away_s:
                continue
            try:
                # A few unused names leave memory in one turn of the loop.
                while self.names.put_away():
                    await trio.lowlevel.checkpoint()
            except (OSError, Refused) as error:
                log.warning("names of written files stay in memory: %s", errno_words(error.errno))
                put_away_s = trio.current_time() + _PUT_AWAY_PAUSE_S
