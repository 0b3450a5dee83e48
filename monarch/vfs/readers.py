"""Opens and reads of files that are not written, and their counts.

Each inode is bound to the best place that holds it. A small file that only the source has is
fetched once, whole, by the first open; the others wait for the same open. A file whose copy is
being made shares the bytes or the descriptor of the copy.

The first read that no open precedes (``open: none``, or a copy that the datapath had open and could
not read) binds the file as an open would. That binding, a visit, is kept until as many bytes as the
file has were read, or no read has come for a while.

The datapath answers opens and reads of copies outside the interpreter, and fetches small files.
Policies, epochs and metrics receive each of them: opens one by one in their order, reads as totals.
"""

from __future__ import annotations

import errno
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

import trio

from monarch.errors import SourceChanged, SourceError
from monarch.foresight.foresight import Foresight
from monarch.foresight.opens import Opens
from monarch.placement.epochs import Epochs
from monarch.placement.residency import SOURCE
from monarch.posix.processes import Sessions
from monarch.transfer.source_calls import CALLER, Caller
from monarch.types import WRITTEN_INO, Attributes, Ino
from monarch.vfs.binding import Binding
from monarch.vfs.interfaces import ABANDONED, RELEASED
from monarch.vfs.measured import MeasuredJob, MeasuredJobs
from monarch.vfs.open_watch import OpenWatch
from monarch.vfs.quotas import JobQuotas
from monarch.vfs.read_side import ReadSide
from monarch.vfs.source_limit import LimitedCalls, Payment, Unpaid
from monarch.writeback.front import WriteFront

# How often an open begins again when the source changes meanwhile. A file that changes faster than
# it can be read is being written: its reader gets ESTALE.
_ATTEMPTS = 3
# The same while the drain still changes attributes of the file: each change makes another version.
_ATTEMPTS_DRAINING = 100
# How long a visit is kept after the last read, in seconds, and the interval of checks.
_VISIT_S = 1.0
_VISIT_STEP_S = 0.25
# The interval in which it is checked whether jobs have ended, in seconds. Unknown processes are
# taken to have ended after the second time without an open.
_JOBS_STEP_S, _UNKNOWN_S = 1.0, 600.0


class Readers:
    """Belongs to the event loop. ``run`` is its task. ``written`` has the written files that are
    open, None if the mount is read-only. ``watch`` counts opens that the kernel does not report,
    None if it reports all. ``measured`` has the sessions that read as with smaller tiers."""

    def __init__(
        self,
        read: ReadSide,
        epochs: Epochs,
        foresight: Foresight,
        written: WriteFront | None,
        watch: OpenWatch | None,
        measured: MeasuredJobs,
    ) -> None:
        self._names = read.names
        self._bindings = read.bindings
        self._copies = read.copies
        self._parts = read.parts
        self._promotions = read.promotions
        self._source_files = read.source_files
        self._revalidation = read.revalidation
        self._residency = read.residency
        self._kernel = read.kernel
        self._limits = read.limits
        self._metrics = read.metrics
        self._fast = read.fast
        self._epochs = epochs
        self._foresight = foresight
        self._sessions = Sessions()
        self._written = written
        self._watch = watch
        self._measured = measured
        self._limited = LimitedCalls(None if read.fast is None else read.fast.throttled)
        self.tier_names = read.metrics.names
        # The quotas of jobs, None if there are none.
        self.quotas: JobQuotas | None = None
        # Is called for each open with its file, tier, latency in seconds and job, if not None.
        self.traced: Callable[[Ino, int | None, float | None, int], None] | None = None
        # Opens by unknown processes.
        self._unknown = 0
        # When each visit ends.
        self._visits: dict[Ino, float] = {}
        self._visited = trio.Event()
        self._noted_ns = time.monotonic_ns()
        if self._fast is not None:
            self._tallies = self._fast.tallies()
            self._traffic = self._fast.source_traffic()

    # -- opens -----------------------------------------------------------------------------------

    async def open(self, ino: Ino) -> bool:
        """Opens a file for one more user of the kernel; the datapath then reads from its
        descriptor. Returns whether the kernel may keep its cached pages. Raises as ``_enter``."""
        started = time.perf_counter()
        self.catch_up()
        job = self._measured_caller(CALLER.get())
        binding = await self._enter(ino, renew=True, store=True, job=job)
        try:
            if binding.users > 1 and binding.file is not None:
                await self._source_files.notice_rewriting(ino, binding.file)
            binding.opener = CALLER.get()
            if job is not None and binding.file is not None:
                # Another job may have opened it, or a copy of it is being made.
                binding.job = job
            if self.quotas is None or binding.fd >= 0:
                # The bytes of the source are counted, and limited, for the job that reads them.
                self._bindings.hand_over(binding, self._names)
        except BaseException:
            self._leave(ino)
            raise
        if not self._kernel.opened(ino):
            # The kernel drops the pages in the process of each open, and another open of the same
            # binding may be answered, and read pages, before.
            binding.has_old_pages = True
        self._count(binding, started)
        return not binding.has_old_pages

    def _measured_caller(self, caller: Caller | None) -> MeasuredJob | None:
        """The job of a process, if it is measured."""
        if self._measured.is_empty or caller is None:
            return None
        job = self._measured.of(self._sessions.of(caller.pid))
        return job if job is not None and job.uid == caller.uid else None

    async def _enter(
        self, ino: Ino, *, renew: bool, store: bool, job: MeasuredJob | None = None
    ) -> Binding:
        """The binding of an inode, with one more user. ``renew``: it may be of a newer version.

        ``store``: no process reads the file yet, so its bytes may go to the kernel's page cache. A
        read that waits has locked these pages, and storing would wait for the read for ever.
        Raises SourceError; ESTALE if the file changes all the time.
        """
        with self._payment(CALLER.get()) as payment:
            while (binding := self._bindings.get(ino)) is None:
                begun = self._bindings.begin(ino)
                if begun is not None:
                    await begun.wait()
                    continue
                due = 0
                try:
                    binding = await self._bind(ino, job, payment, renew=renew, store=store)
                except Unpaid as unpaid:
                    due = unpaid.nbytes
                finally:
                    self._bindings.settle(ino, binding)
                if binding is not None:
                    break
                # Not while the file is being bound: opens of other jobs may wait for that.
                await payment.pay(due)
            binding.users += 1
            return binding

    @asynccontextmanager
    async def bound(self, ino: Ino, *, stays: bool) -> AsyncIterator[Binding]:
        """The binding of a file for another node, made as for a reader of this one, but not counted
        as its open. ``stays``: afterwards the file stays bound for a while, as for reads without an
        open. Raises as ``_enter``."""
        binding = await self._enter(ino, renew=False, store=False)
        try:
            if stays:
                binding.users += ino not in self._visits
                self._visits[ino] = trio.current_time() + _VISIT_S
                self._visited.set()
            yield binding
        finally:
            self._leave(ino)

    def release(self, ino: Ino) -> None:
        """Ends one open of a file, whether it was written or not."""
        # The daemon itself may have a file with readers open as well, for example to sync it.
        is_bound = self._bindings.get(ino) is not None
        if not is_bound and self._written is not None and self._written.files.is_open(ino):
            self._written.files.release(ino)
        else:
            self._leave(ino)

    def _leave(self, ino: Ino) -> None:
        """Ends one use of a binding."""
        if self._bindings.leave(ino):
            self._old_version_released(ino)

    def _old_version_released(self, ino: Ino) -> None:
        """The last open of an outdated version was released; the kernel may have its pages."""
        if ino >= WRITTEN_INO:
            # It has no copy.
            if self._written is not None:
                self._written.unlinked.closed_by_readers(ino)
            return
        self._promotions.forget_copy(ino)
        if self._kernel.sends_opens:
            self._kernel.drop_pages(ino)

    async def _bind(
        self, ino: Ino, job: MeasuredJob | None, payment: Payment, *, renew: bool, store: bool
    ) -> Binding:
        if self._names.is_gone(ino):
            await self._revalidation.find_again(ino)
        attempts = 0
        for _ in range(_ATTEMPTS_DRAINING):
            node = self._names.node(ino)
            attempts += node is None or not node.undrained
            attributes = self._names.stored(ino)
            is_hidden = job is not None and self._measured.hides(job, attributes)
            # A partial copy may become the copy meanwhile, so it is looked for first.
            binding = None
            if not is_hidden:
                binding = (
                    await self._parts.bind(attributes)
                    or await self._copies.bind(attributes)
                    or await self._bind_flight(attributes, payment)
                )
            if binding is not None:
                return binding
            if self._is_renewed(attributes):
                continue
            try:
                if is_hidden:
                    binding = await self._bind_hidden(attributes, payment, store=store)
                else:
                    binding = await self._bind_source(attributes, payment, store=store)
                binding.job = job
                return binding
            except SourceChanged:
                await self._revalidation.look_again(ino)
                if not (renew or self._is_renewed(attributes)) or attempts >= _ATTEMPTS:
                    break
        raise self._revalidation.changed_while_read(ino)

    def _is_renewed(self, known: Attributes) -> bool:
        """Whether a file has another version than ``known`` only because the drain has changed its
        attributes: its bytes are the same."""
        ino, node = known.ino, self._names.node(known.ino)
        is_ours = node is not None and node.has_source_bytes and not self._residency.is_changed(ino)
        return is_ours and self._names.stored(ino).identity != known.identity

    async def _bind_flight(self, attributes: Attributes, payment: Payment) -> Binding | None:
        """Binds to a copy that is being made, so that the source is not asked twice. Waits for one
        that is fetched ahead, or comes with its chunk. Raises SourceError, Unpaid."""
        ino, size = attributes.ino, attributes.size
        flight = self._promotions.flight(ino) or self._promotions.chunks.open(ino)
        if flight is None or flight.identity != attributes.identity:
            return None
        content = flight.content
        if content is None and flight.arrival is not None:
            if self._promotions.take_over(ino):
                return None
            await self._source_files.wait(ino, flight.arrival.done)
            if not self._source_files.is_current(attributes):
                return None
            content = flight.arrival.content
        if content is not None:
            if flight.arrival is not None:
                payment.require(size)
                payment.read(size)
                # Not a part of the bytes of other files, which would stay in memory with it.
                content = bytes(content)
            self._promotions.read_from_window(attributes, content, self._job(), quota=self._quota())
            return Binding(ino, size, content=content)
        if flight.file is None:
            return None
        binding = Binding(ino, size, file=flight.file.retain())
        try:
            if await self._source_files.identity_now(ino, flight.file) == attributes.identity:
                return binding
        except BaseException:
            binding.close()
            raise
        binding.close()
        return None

    async def _bind_source(
        self, attributes: Attributes, payment: Payment, *, store: bool
    ) -> Binding:
        """Opens a file at the source, or fetches a small one. Raises SourceChanged, SourceError,
        Unpaid."""
        ino, size = attributes.ino, attributes.size
        if self._fits(size):
            store = store and self._kernel.keeps_pages(ino)
            content = await self._fetched(attributes, payment, store=store)
            self._promotions.keep(attributes, content, self._job(), quota=self._quota())
            return Binding(ino, size, content=content)
        is_wanted = self._residency.is_wanted(ino)
        if self._parts.is_shared(attributes) and not is_wanted:
            binding = Binding(ino, size, file=await self._source_files.open(attributes))
            binding.is_shared = True
            self._parts.begin(binding, attributes)
            return binding
        is_watched = self._parts.watches(size) and not is_wanted
        quota = self._quota()
        promote = None if is_watched else self._promotions.opened(attributes, quota=quota)
        try:
            file = await self._source_files.open(attributes)
        except BaseException:
            if promote is not None:
                self._promotions.abandon(promote)
            raise
        if promote is not None:
            self._promotions.submit(promote, attributes.identity, file=file)
        return Binding(ino, size, file=file, is_watched=is_watched)

    async def _bind_hidden(
        self, attributes: Attributes, payment: Payment, *, store: bool
    ) -> Binding:
        """Binds a file to the source for a measured job, as if no tier had it: no page cache of
        this node is used, and no copy is made. Raises as ``_bind_source``."""
        ino, size = attributes.ino, attributes.size
        if not self._fits(size):
            file = await self._source_files.open(attributes, from_storage=True)
            return Binding(ino, size, file=file, has_old_pages=True)
        store = store and self._kernel.keeps_pages(ino)
        content = await self._fetched(attributes, payment, store=store, from_storage=True)
        return Binding(ino, size, content=content)

    async def _fetched(
        self, attributes: Attributes, payment: Payment, *, store: bool, from_storage: bool = False
    ) -> bytes:
        """A small file from the source, for which its reader pays. Raises as ``_bind_source``."""
        payment.require(attributes.size)
        fetch = self._source_files.fetch
        content = await fetch(attributes, store=store, from_storage=from_storage)
        payment.read(len(content))
        return content

    def _fits(self, size: int) -> bool:
        """Whether a file is fetched whole into memory."""
        is_small = size <= self._limits.inline_max
        return is_small and self._bindings.held_bytes + size <= self._limits.buffer_max

    # -- reads -----------------------------------------------------------------------------------

    async def read(
        self, ino: Ino, offset: int, size: int, caller: Caller | None = None
    ) -> bytes | bytearray | memoryview:
        """Up to ``size`` bytes from ``offset`` on; short only at the end of the file. If it is not
        known who reads, the last process that opened the file counts. Raises SourceError."""
        started = time.perf_counter()
        binding = self._bindings.get(ino)
        if binding is None or not (self._kernel.sends_opens or self._kernel.was_read(ino)):
            # Without an open, or the first read of a file that is bound for another node.
            binding = await self._visit(ino)
        if self._kernel.is_size_stale(ino):
            raise self._revalidation.changed_while_read(ino)
        if offset == 0 and not self._kernel.sends_opens:
            self.catch_up()
            self._count(binding, started)
        # The file may be released while its bytes are read, if the reader is killed.
        binding.users += 1
        try:
            data, tier = await self._read_from(binding, offset, size, caller)
        finally:
            self._leave(ino)
        self._metrics.read(tier, len(data), time.perf_counter() - started)
        if ino in self._visits:
            binding.unread_bytes -= len(data)
            self._visits[ino] = trio.current_time() + _VISIT_S
            if binding.unread_bytes <= 0 or self._bindings.leave_content(binding):
                self._end_visit(ino)
        return data

    async def _read_from(
        self, binding: Binding, offset: int, size: int, caller: Caller | None
    ) -> tuple[bytes | bytearray | memoryview, int]:
        """The bytes, and the number of the tier that has answered. Raises SourceError."""
        if binding.content is not None:
            return binding.content[offset : offset + size], SOURCE
        caller = caller or CALLER.get() or binding.opener
        if binding.is_watched:
            self._parts.decide(binding, offset)
        if binding.part is not None:
            with self._payment(caller) as payment:
                found = await self._parts.read(binding, offset, size, payment)
            if found is not None:
                return found
            await self._source_files.continue_with(binding)
        if binding.fd >= 0:
            tier, data = binding.tier, await self._copies.read(binding, offset, size)
            if data is not None:
                return data, tier
            # The copy is lost, the reader is not: it continues at the source.
            if binding.fd >= 0:
                file = await self._source_files.open(self._names.stored(binding.ino))
                if binding.fd < 0:
                    file.release()
                else:
                    binding.fall_back(file)
        with self._payment(caller) as payment:
            await payment.pay(max(0, min(size, binding.size - offset)))
            data = await self._source_files.read(binding, offset, size)
            payment.read(len(data))
        return data, SOURCE

    async def _visit(self, ino: Ino) -> Binding:
        """Binds an inode for reads that no open precedes. Raises SourceError.

        A process may have the file open and have read a part of it. If the source has another
        version now, such reads fail with ESTALE: the two versions are never mixed.
        """
        seen = self._kernel.sends_opens or self._kernel.was_read(ino)
        if seen and self._residency.is_changed(ino):
            raise self._revalidation.changed_while_read(ino)
        try:
            binding = await self._enter(ino, renew=not seen, store=False)
        except SourceError as error:
            if error.errno == errno.ESTALE:
                # Its owner and mode may not be those by which the kernel has admitted the reader.
                self._residency.mark_served(ino)
            raise
        if not seen and not binding.outdated:
            self._residency.unmark_changed(ino)
        if self._kernel.is_size_stale(ino):
            self._leave(ino)
            raise self._revalidation.changed_while_read(ino)
        if ino in self._visits:
            binding.users -= 1  # another read was faster
        self._residency.mark_served(ino)
        self._visits[ino] = trio.current_time() + _VISIT_S
        self._visited.set()
        return binding

    def _end_visit(self, ino: Ino) -> None:
        del self._visits[ino]
        self._leave(ino)

    async def run(self) -> None:
        """Ends the visits without a read for a while, until cancelled."""
        while True:
            await self._visited.wait()
            await trio.sleep(_VISIT_STEP_S)
            now = trio.current_time()
            for ino in [ino for ino, until in self._visits.items() if until < now]:
                self._end_visit(ino)
            if not self._visits:
                self._visited = trio.Event()

    async def end_jobs(self) -> None:
        """Forgets what the jobs that have ended were reading, until cancelled."""
        unknown, since_s = self._unknown, trio.current_time()
        while True:
            await trio.sleep(_JOBS_STEP_S)
            if unknown != self._unknown:
                unknown, since_s = self._unknown, trio.current_time()
            is_idle = trio.current_time() - since_s > _UNKNOWN_S
            ended = self._sessions.over([job for job in self._foresight.jobs if job])
            # The datapath may have answered their last opens a moment ago.
            self.catch_up()
            self._foresight.end_jobs(ended, with_unknown=is_idle)
            if self.quotas is not None:
                self.quotas.end_jobs()

    # -- counts ----------------------------------------------------------------------------------

    def _count(self, binding: Binding, started: float) -> None:
        """Counts an open that was answered here; ``started`` is of ``time.perf_counter``."""
        self._metrics.opened(binding.tier, time.perf_counter() - started)
        if self._watch is not None and self._watch.counts:
            # A read that stands for an open: the open itself was counted.
            return
        caller, job, latency_s = CALLER.get(), self._job(), time.perf_counter() - started
        pid, user = (0, None) if caller is None else (caller.pid, caller.uid)
        self._count_open(binding.ino, binding.tier, pid, job, user, latency_s)
        self._foresight.opened(binding.ino, job, pid)

    def _job(self) -> int:
        """The session of the process whose call is answered, 0: unknown."""
        caller = CALLER.get()
        return 0 if caller is None else self._sessions.of(caller.pid)

    def _quota(self) -> int | None:
        """The number of the quota of the process whose call is answered; None without one."""
        return None if self.quotas is None else self.quotas.job_of(CALLER.get())

    def _payment(self, caller: Caller | None) -> AbstractContextManager[Payment]:
        """What a call pays to the limits of its process, if it reads the source. Other jobs may
        read from the same binding."""
        job = self._measured_caller(caller)
        quota = None if self.quotas is None else self.quotas.source_of(caller)
        limits = [] if job is None else [job.source]
        return self._limited.payment(limits if quota is None else [*limits, quota])

    def _count_open(
        self,
        ino: Ino,
        tier: int | None,
        pid: int,
        job: int,
        user: int | None = None,
        latency_s: float | None = None,
    ) -> None:
        """``pid`` is the process that opened the file, ``job`` its session, 0: unknown, and
        ``user`` the user with whose rights it did. ``tier`` has served the open. None: unknown."""
        self._epochs.opened(ino, bool(tier))
        self._unknown += not job
        self._measured.opened(job, tier)
        # The copy may have left since, and a written file is none.
        if (
            self.quotas is not None
            and user is not None
            and tier
            and self._residency.tier_of(ino) != SOURCE
        ):
            size = self._names.attributes(ino).size
            self.quotas.opened(ino, size, user=user, pid=pid, session=job)
        if self.traced is not None:
            self.traced(ino, tier, latency_s, job)

    def _count_watched(self, inos: array[int]) -> None:
        """Counts opens that the kernel has reported without the process."""
        if self.traced is not None:
            for ino in inos:
                self._count_open(Ino(ino), None, 0, 0)
        else:
            self._epochs.opened_all(inos)
            self._unknown += len(inos)
        self._foresight.opened_all(inos)

    @property
    def counts_opens(self) -> bool:
        """Whether every open is counted."""
        return self._kernel.sends_opens or (self._watch is not None and self._watch.counts)

    def catch_up(self) -> None:
        """Handles the events of the datapath. Called before an open is decided here, so that all
        opens are counted in their order."""
        if self._fast is None:
            return
        is_watched = self._watch is not None and self._watch.counts
        if self._watch is not None and is_watched and (opened := self._watch.opened()):
            self._count_watched(opened)
        # The events happened since the last call.
        since_ns, self._noted_ns = self._noted_ns, time.monotonic_ns()
        opens = Opens(self._foresight)
        for ino, tier, content, pid, job, user in self._fast.served():
            if tier == RELEASED:
                self._old_version_released(ino)
                continue
            if tier == ABANDONED:
                binding = self._bindings.get(ino)
                if binding is not None and binding.has_old_pages:
                    # The answer by which the kernel drops them is lost.
                    self._kernel.drop_pages(ino)
                self.release(ino)
                continue
            self._sessions.saw(pid, job)
            if tier == SOURCE or content is not None or self._foresight.announced.has_orders:
                # Placement asks what is foreseen.
                opens.flush()
            if content is not None:
                self._promotions.keep_fetched(ino, content, job, since_ns)
                self._fast.taken(ino)
                tier = SOURCE
            elif tier == SOURCE:
                self._promotions.read_kept(ino, job)
            else:
                self._promotions.accessed(ino, tier)
            if not is_watched:
                self._count_open(ino, tier, pid, job, user)
                opens.add(ino, job, pid)
        opens.flush()

    def catch_up_all(self) -> None:
        """Handles the events and adds up the totals of the datapath. Called before the metrics are
        read, and from time to time."""
        if self._fast is None:
            return
        self.catch_up()
        tallies = self._fast.tallies()
        for tier, (now, then) in enumerate(zip(tallies, self._tallies, strict=True)):
            self._metrics.served(
                tier,
                opens=now.opens - then.opens,
                reads=now.reads - then.reads,
                nbytes=now.bytes - then.bytes,
            )
            opens, reads = self._metrics.open_latency[tier], self._metrics.read_latency[tier]
            opens.add(_difference(now.open_counts, then.open_counts), now.open_ns - then.open_ns)
            reads.add(_difference(now.read_counts, then.read_counts), now.read_ns - then.read_ns)
        self._tallies = tallies
        before, self._traffic = self._traffic, self._fast.source_traffic()
        self._metrics.source_opens[0] += self._traffic.opens - before.opens
        self._metrics.source_reads[0] += self._traffic.reads - before.reads
        self._metrics.source_bytes[0] += self._traffic.bytes - before.bytes


def _difference(now: list[int], then: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, then, strict=True)]
