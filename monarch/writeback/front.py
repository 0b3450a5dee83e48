"""The front of write-back: everything that answers the kernel's requests to change files, wired."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from monarch.config.settings import MountSettings
from monarch.config.write_patterns import WritePatterns
from monarch.errors import Refused
from monarch.namespace.namespace import Namespace
from monarch.namespace.overlay import NAME_BYTES
from monarch.text import errno_words
from monarch.transfer.source_calls import SourceCalls
from monarch.types import Ino
from monarch.writeback.attributes import WrittenAttributes
from monarch.writeback.change_log import ChangeLog
from monarch.writeback.copy_up import CopyUp
from monarch.writeback.drain import Drain
from monarch.writeback.drained import DrainedObjects
from monarch.writeback.fsync_failures import FsyncFailures
from monarch.writeback.fsyncs import Fsyncs
from monarch.writeback.journal import Journal
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.open_file import OpenTable
from monarch.writeback.open_files import WrittenFiles
from monarch.writeback.operations import WriteOperations
from monarch.writeback.recorder import Recorder
from monarch.writeback.source_contents import StagedContents
from monarch.writeback.source_files import SourceFiles
from monarch.writeback.space import SpaceReclaimer
from monarch.writeback.tier_objects import TierObjects
from monarch.writeback.unlinked import UnlinkedFiles
from monarch.writeback.write_gate import FileSystems, WriteGate

log = logging.getLogger(__name__)

_LOOK_S = 0.5
# The pause after names could not be put away, in seconds.
_PUT_AWAY_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What write-back asks of the side that reads.

    ``copied_up`` is called with each inode that the source no longer has as the mount shows it.
    ``look_again`` compares a file with the source. ``evict`` drops a copy and returns its size in
    bytes; ``evicted`` waits until all dropped copies are deleted. ``is_open`` returns whether a
    process has a file open that was not written through the mount.
    """

    copied_up: Callable[[Ino], None]
    look_again: Callable[[Ino], Awaitable[None]]
    evict: Callable[[Ino], int]
    evicted: Callable[[], Awaitable[None]]
    is_open: Callable[[Ino], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFront:
    """The parts of one mount. ``operations`` changes names, ``attributes`` what they lead to, and
    ``files`` bytes."""

    names: Namespace
    object_table: ObjectTable
    opens: OpenTable
    objects: TierObjects
    changes: ChangeLog
    recorder: Recorder
    unlinked: UnlinkedFiles
    drained: DrainedObjects
    source: SourceFiles
    failures: FsyncFailures
    space: SpaceReclaimer
    files: WrittenFiles
    gate: WriteGate
    operations: WriteOperations
    attributes: WrittenAttributes
    fsyncs: Fsyncs

    async def run(self) -> None:
        """Do what is due without a request, until cancelled: record files that are open and were
        not written for a while, and forget what is not needed."""
        put_away_s = -math.inf
        while True:
            await trio.sleep(_LOOK_S)
            self.objects.close_pending()
            self.changes.note_delayed()
            self.recorder.record_delayed()
            with suppress(Refused):
                self.unlinked.forget_old()
                self.drained.release_arrived()
            for file in list(self.object_table.open.values()):
                if not file.is_write_through:
                    self.recorder.record_if_quiet(file, _LOOK_S)
            if trio.current_time() >= put_away_s and not await self._put_names_away():
                put_away_s = trio.current_time() + _PUT_AWAY_PAUSE_S

    async def _put_names_away(self) -> bool:
        """Have unused names out of memory, a few in one turn of the loop; whether that worked."""
        try:
            while self.names.put_away():
                await trio.lowlevel.checkpoint()
        except (OSError, Refused) as error:
            log.warning("names of written files stay in memory: %s", errno_words(error.errno))
            return False
        return True


def build_front(
    *,
    settings: MountSettings,
    names: Namespace,
    object_table: ObjectTable,
    opens: OpenTable,
    objects: TierObjects,
    journal: Journal,
    drain: Drain,
    staged: StagedContents,
    source_calls: SourceCalls,
    read: Reading,
    make_space: Callable[[DrainedObjects], SpaceReclaimer],
) -> WriteFront:
    """``make_space`` makes the reclaimer of the tier's room."""
    table, taken, look_again = object_table, read.copied_up, read.look_again
    changes = ChangeLog(journal, drain, table.states, objects)
    recorder = Recorder(names, table, changes)
    unlinked = UnlinkedFiles(names, table, opens, objects, changes, recorder, staged)
    drained = DrainedObjects(table, objects.on_disk, drain, opens, changes, recorder, unlinked)
    space = make_space(drained)
    source = SourceFiles(
        names, table.states, opens, unlinked, drained, drain, staged, source_calls, look_again
    )
    failures = FsyncFailures(names, table, objects, opens, drained)
    files = WrittenFiles(
        names, table, opens, objects, changes, recorder, unlinked, failures, source, space
    )
    patterns = WritePatterns(settings.absorbs)
    names_max = settings.writeback.names_within(0, each=NAME_BYTES)
    systems = FileSystems(source_calls.source.path)
    gate = WriteGate(names, patterns, changes, objects, unlinked, space, names_max, systems)
    copies = CopyUp(
        names, gate, files, objects, changes, recorder, source, drained, unlinked, taken
    )
    operations = WriteOperations(
        names, gate, files, opens, copies, changes, recorder, drained, unlinked, taken
    )
    states, tier = table.states, opens.tier
    attributes = WrittenAttributes(
        names, gate, files, copies, changes, recorder, drained, states, source_calls, tier
    )
    fsyncs = Fsyncs(names, files, changes, drain, settings.writeback.fsync == "source")
    return WriteFront(
        names=names,
        object_table=table,
        opens=opens,
        objects=objects,
        changes=changes,
        recorder=recorder,
        unlinked=unlinked,
        drained=drained,
        source=source,
        failures=failures,
        space=space,
        files=files,
        gate=gate,
        operations=operations,
        attributes=attributes,
        fsyncs=fsyncs,
    )
