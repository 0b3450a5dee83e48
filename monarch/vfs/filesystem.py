"""What the mount means, free of FUSE types: opening, reading, and what a file tells of itself.

An open asks for the best place that holds the file and binds the inode to it (``handles``). A
small file that is only at the source is fetched once, whole, by whoever comes first; the others
wait for the same flight. Names and attributes never ask the source.

A kernel that tells no opens (``open: none``) only reads: the first read of a file then binds it as
an open would, and the binding stays until its bytes were all given or nobody asks any more.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol, TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.config.settings import LimitSettings
from monarch.errors import Refused, SourceChanged, SourceError
from monarch.namespace.namespace import Namespace
from monarch.placement.controller import Controller, Promote
from monarch.placement.epochs import Epochs
from monarch.placement.policy import Item
from monarch.placement.residency import SOURCE, Residency
from monarch.posix import acl
from monarch.posix.credentials import Credentials
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts
from monarch.tiers.records import Record, Records
from monarch.tiers.seal import BrokenSeal
from monarch.tiers.source import Fetched, SourceFile, identity_now, identity_of
from monarch.tiers.tier import Space, Tier
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import WRITTEN_INO, Attributes, Identity, Ino, KernelCaches
from monarch.vfs.binding import Binding, OpenCopy
from monarch.vfs.datapath_events import EventConsumer, FastPath
from monarch.vfs.reads_without_open import StaleSizes
from monarch.vfs.revalidation import Revalidation
from monarch.writeback.operations import XATTR_DURABLE, WriteOperations
from monarch.writeback.others import Others

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
T = TypeVar("T")

_OURS = b"user.monarch."
XATTR_TIER = b"user.monarch.tier"
XATTR_STATE = b"user.monarch.state"
XATTR_DIGEST = b"user.monarch.digest"

# How often an open looks again when the source changes under it. A file that changes faster than
# it can be read is being written: its reader gets ESTALE.
_ATTEMPTS = 3

# How long a binding that no open made is kept after the last read, and how often that is looked
# at. Seconds.
_VISIT_S = 1.0
_VISIT_STEP_S = 0.25

# The pause until a file that stays open is offered for a copy once more, if the copy then began but
# did not arrive, doubles up to this. Seconds.
_LONGEST_PAUSE_S = 600.0


class Flight(Protocol):
    """A copy under way, as far as a reader cares: bytes or an open file it may share."""

    @property
    def identity(self) -> Identity: ...
    @property
    def content(self) -> bytes | memoryview | None: ...
    @property
    def file(self) -> SourceFile | None: ...
    @property
    def copied(self) -> int: ...


# What this process or machine is short of, or a tier that does not answer: nothing that says
# anything of the copy.
_NOT_THE_COPY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETIMEDOUT})


class Movement(Protocol):
    """What the file system asks of the transfer engine. Only what is a coroutine waits.

    ``ask`` runs a call that reads so many bytes of a copy, in a thread. Raises OSError, ETIMEDOUT
    if the tier hangs. Tiers for which ``is_read`` is False are passed by.
    """

    def make_room(self, promote: Promote) -> Promote: ...
    def submit(
        self,
        promote: Promote,
        identity: Identity,
        *,
        content: bytes | memoryview | None = None,
        file: SourceFile | None = None,
    ) -> bool: ...
    def flight(self, ino: Ino) -> Flight | None: ...
    def remove_copy(self, ino: Ino, tier: int) -> None: ...
    async def removed(self) -> None: ...
    def has_place(self) -> bool: ...
    def is_read(self, tier: int) -> bool: ...
    def copy_unreadable(self, tier: int, error: OSError) -> None: ...
    async def ask(
        self,
        tier: int,
        function: Callable[[Unpack[Args]], T],
        *args: Unpack[Args],
        size: int = 0,
    ) -> T: ...


class _Opening:
    """The first open of an inode that is under way; whoever comes meanwhile waits for it."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = trio.Event()


class FileSystem:
    """One mount. Everything here runs on the event loop; what may wait goes to a thread.

    ``kernel``: its caches. ``verify`` says when a copy is checked before use
    (``config.MountSettings.verify``). ``fast`` serves beside the interpreter, if there is such a
    thing; ``opens_are_told`` is False if the kernel only reads, ``kernel_reads`` True if it reads
    copies by itself. ``doubts`` is told of each fetch.
    ``writing`` does what a mount that can be written does beyond reading, ``others`` looks for what
    is written elsewhere.
    """

    def __init__(
        self,
        *,
        names: Namespace,
        source_calls: SourceCalls,
        tiers: Sequence[Tier],
        records: Records,
        residency: Residency,
        controller: Controller,
        epochs: Epochs,
        movement: Movement,
        metrics: Metrics,
        limits: LimitSettings,
        source_load: SourceLoad,
        verify: Literal["unclean", "open", "never"],
        kernel: KernelCaches,
        fast: FastPath | None,
        opens_are_told: bool,
        kernel_reads: bool,
        doubts: Doubts,
        writing: WriteOperations | None,
        others: Others | None,
    ) -> None:
        self.writing = writing
        self.others = others
        self.names = names
        self._source_calls = source_calls
        self._tiers: Mapping[int, Tier] = {tier.number: tier for tier in tiers}
        self._records = records
        self._residency = residency
        self._controller = controller
        self._epochs = epochs
        self._movement = movement
        self._metrics = metrics
        self._limits = limits
        self._source_load = source_load
        self._verify = verify
        self._kernel = kernel
        self._fast = fast
        self._opens_are_told = opens_are_told
        self._kernel_reads = kernel_reads
        self._doubts = doubts
        # When a binding that no open made may go.
        self._visits: dict[Ino, float] = {}
        self._visited = trio.Event()
        self._sizes = StaleSizes(names, attributes_changed=kernel.invalidate_attributes)
        self._bindings: dict[Ino, Binding] = {}
        self._openings: dict[Ino, _Opening] = {}
        self._held_bytes = 0
        self.revalidation = Revalidation(
            source_calls=source_calls,
            names=names,
            bindings=self._bindings,
            residency=residency,
            controller=controller,
            metrics=metrics,
            remove_copy=movement.remove_copy,
            copy_unreadable=movement.copy_unreadable,
            attributes_changed=(
                kernel.invalidate_attributes if opens_are_told else self._sizes.changed
            ),
            names_changed=kernel.invalidate_listing,
            is_held_elsewhere=fast.outdate if fast is not None else lambda _: False,
            may_be_half_read=lambda ino: not opens_are_told and self._was_read(ino),
            forget_pages=kernel.drop,
        )
        self._events = (
            None
            if fast is None
            else EventConsumer(
                fast,
                controller=controller,
                epochs=epochs,
                metrics=metrics,
                keep=self._keep_fetched,
                release=self.release,
                forget_copy=self._old_version_released,
            )
        )

    @property
    def open_files(self) -> int:
        """Opens that were not released yet."""
        if self._fast is not None:
            return self._fast.open_files()
        return sum(binding.users for binding in self._bindings.values())

    def is_open(self, ino: Ino) -> bool:
        """Whether a process has a file open that was not written, or is about to."""
        is_fast = self._fast is not None and self._fast.is_open(ino)
        return is_fast or ino in self._bindings or ino in self._openings

    @property
    def backing_ids(self) -> int:
        """Files that the kernel was given to read itself."""
        return 0 if self._fast is None else self._fast.backing_ids()

    @property
    def tier_numbers(self) -> Sequence[int]:
        return tuple(self._tiers)

    # -- open, read, release -----------------------------------------------------------------

    async def open(self, ino: Ino, flags: int, by: Credentials) -> bool:
        """Bind ``ino`` for one more user; whether the kernel may keep its cached pages.

        ``flags`` as of open(2), ``by`` is who asks. Raises SourceError with the source's errno if
        the file has to come from there and does not, ESTALE if it changes all the time; Refused if
        it cannot be written.
        """
        if self.names.is_forgotten(ino):
            # Whoever found its name looks it up anew: another file may have it.
            raise Refused(errno.ESTALE)
        if self._is_written(ino) or flags & (os.O_ACCMODE | os.O_TRUNC):
            return await self._open_written(ino, flags, by)
        started = time.perf_counter()
        if self._events is not None:
            self._events.note_opens()
        binding = await self._enter(ino, renew=True, store=True)
        if binding.users > 1 and binding.file is not None:
            try:
                await self.revalidation.notice_rewriting(binding.file, ino)
            except BaseException:
                self.release(ino)
                raise
        keep_pages = not (self._residency.is_changed(ino) or self._residency.is_spoiled(ino))
        self._residency.unmark_changed(ino)
        self._residency.unmark_spoiled(ino)
        self._hand_over(binding)
        self._count_open(binding, started)
        return keep_pages

    def _is_written(self, ino: Ino) -> bool:
        return self.writing is not None and self.writing.has(ino)

    async def _open_written(self, ino: Ino, flags: int, by: Credentials) -> bool:
        """Whether the kernel may keep its pages."""
        if self.writing is None:
            raise Refused(errno.EROFS)
        passed = self._fast is not None and self._fast.is_passed(ino)
        if passed or (not self._is_written(ino) and ino in self._bindings):
            # They read a copy, or the source, and would not see what is written.
            raise Refused(errno.ETXTBSY)
        await self.writing.open(ino, flags, by)
        return not self.writing.files.is_outdated(ino)

    def _count_open(self, binding: Binding, started: float) -> None:
        self._metrics.opened(binding.tier, time.perf_counter() - started)
        self._epochs.opened(binding.ino, binding.tier != SOURCE)

    async def _enter(self, ino: Ino, *, renew: bool, store: bool) -> Binding:
        """The binding of ``ino``, with one more user. ``renew``: also of a newer version.

        ``store``: nobody reads it yet, so its bytes may go to the kernel's pages. A read that waits
        has locked them, and storing would wait for it for ever.
        """
        while (binding := self._bindings.get(ino)) is None:
            opening = self._openings.get(ino)
            if opening is not None:
                await opening.done.wait()
                continue
            opening = self._openings[ino] = _Opening()
            try:
                binding = await self._bind(ino, renew=renew, store=store)
                self._bindings[ino] = binding
            finally:
                del self._openings[ino]
                opening.done.set()
            break
        binding.users += 1
        return binding

    def _hand_over(self, binding: Binding) -> None:
        """Let the fast path read what is bound to a descriptor; what it cannot comes here."""
        if self._fast is None:
            return
        fd = binding.file.fd if binding.file is not None else binding.fd
        if fd >= 0:
            size = self.names.attributes(binding.ino).size
            copy = binding.copy
            backing_id = copy.take_backing_id() if copy is not None else 0
            self._fast.bind(binding.ino, fd, tier=binding.tier, size=size, backing_id=backing_id)

    async def read(self, ino: Ino, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Up to ``size`` bytes from ``offset`` on of an inode that is open; short only at its end.

        Raises SourceError.
        """
        if self.writing is not None and self.writing.files.is_open(ino):
            return await self.writing.files.read(ino, offset, size)
        started = time.perf_counter()
        binding = self._bindings.get(ino) or await self._visit(ino)
        if self._sizes.are_unheard(ino):
            raise self._changed_under_reader(ino)
        if offset == 0 and not self._opens_are_told:
            if self._events is not None:
                self._events.note_opens()
            self._count_open(binding, started)
        # Its caller may be killed and the file released while its bytes are under way.
        binding.users += 1
        try:
            data = await self._read_from(binding, offset, size)
        finally:
            self.release(ino)
        self._metrics.read(binding.tier, len(data), time.perf_counter() - started)
        if ino in self._visits:
            binding.left -= len(data)
            self._visits[ino] = trio.current_time() + _VISIT_S
            if binding.left <= 0:
                self._end_visit(ino)
        return data

    async def _read_from(
        self, binding: Binding, offset: int, size: int
    ) -> bytes | bytearray | memoryview:
        if binding.content is not None:
            return binding.content[offset : offset + size]
        if binding.fd >= 0:
            return await self._read_tier(binding, offset, size)
        return await self._read_source(binding, offset, size)

    async def _visit(self, ino: Ino) -> Binding:
        """Bind an inode for reads that no open came before. Raises SourceError.

        Somebody may have the file open and have read a part of it. If the source has another
        version by now, its reads fail with ESTALE from now on, instead of mixing the two.
        """
        seen = self._opens_are_told or self._was_read(ino)
        if seen and self._residency.is_changed(ino):
            raise self._changed_under_reader(ino)
        try:
            binding = await self._enter(ino, renew=not seen, store=False)
        except SourceError as error:
            if error.errno == errno.ESTALE:
                # Its owner and mode may not be those by which the kernel has let the reader in.
                self._residency.mark_served(ino)
            raise
        if not seen:
            self._residency.unmark_changed(ino)
        if self._sizes.are_unheard(ino):
            self.release(ino)
            raise self._changed_under_reader(ino)
        if ino in self._visits:
            binding.users -= 1  # another read was faster
        self._residency.mark_served(ino)
        self._visits[ino] = trio.current_time() + _VISIT_S
        self._visited.set()
        return binding

    def _was_read(self, ino: Ino) -> bool:
        """Whether a part of it was given to somebody of whose opens the kernel does not tell."""
        given = self._fast is not None and self._fast.was_given(ino)
        return given or self._residency.is_served(ino)

    def _end_visit(self, ino: Ino) -> None:
        del self._visits[ino]
        self.release(ino)

    async def tell_sizes(self) -> None:
        """Have a kernel that tells no opens know the sizes of what has changed, until cancelled."""
        await self._sizes.run()

    async def expire_visits(self) -> None:
        """Let go of what is read no more, until cancelled."""
        while True:
            await self._visited.wait()
            await trio.sleep(_VISIT_STEP_S)
            now = trio.current_time()
            for ino in [ino for ino, until in self._visits.items() if until < now]:
                self._end_visit(ino)
            if not self._visits:
                self._visited = trio.Event()

    async def offer_again(self) -> None:
        """Have copied, as soon as that is possible, what stays open at the source, until cancelled.

        Its copy may have been refused or given up while a tier was full or out of service, and the
        next first open of a large file may be days away.
        """
        while True:
            await trio.sleep(self._limits.tier_probe)
            for binding in list(self._bindings.values()):
                if binding.file is not None and not self._is_written(binding.ino):
                    self._offer(binding, binding.file, trio.current_time())

    def _offer(self, binding: Binding, file: SourceFile, now: float) -> None:
        attributes = self.names.attributes(binding.ino)
        if now < binding.offer_s or identity_of(file.status) != attributes.identity:
            return
        promote = self._controller.offered(self._item(attributes))
        if promote is not None:
            binding.pause_s = min(
                max(self._limits.tier_probe, 2 * binding.pause_s), _LONGEST_PAUSE_S
            )
            binding.offer_s = now + binding.pause_s
            self._movement.submit(promote, attributes.identity, file=file)

    def note_served(self) -> None:
        """Bring what the fast path has served into the books."""
        if self._events is not None:
            self._events.note_all()

    def release(self, ino: Ino) -> None:
        if self.writing is not None and self.writing.files.is_open(ino):
            self.writing.files.release(ino)
            return
        binding = self._bindings[ino]
        binding.users -= 1
        if binding.users == 0:
            del self._bindings[ino]
            if binding.content is not None:
                self._held_bytes -= len(binding.content)
            binding.close()
            if binding.outdated:
                self._old_version_released(ino)

    def _old_version_released(self, ino: Ino) -> None:
        """Nobody has the version before open any more; the kernel may hold pages of it."""
        if ino >= WRITTEN_INO:
            # It has no copy.
            if self.writing is not None:
                self.writing.files.read_past(ino)
            return
        self.revalidation.forget_copy(ino)
        if self._opens_are_told:
            self._residency.mark_spoiled(ino)

    def close(self) -> None:
        """Let go of everything that readers had open when the mount went away."""
        for binding in self._bindings.values():
            binding.close()
        self._bindings.clear()
        self._visits.clear()

    def latest(self, attributes: Attributes) -> Attributes:
        """The same, with the size and times that a file has which is being written now."""
        if self.writing is not None and self.writing.files.is_open(attributes.ino):
            return self.writing.attributes(attributes.ino)
        return attributes

    def room(self) -> Space | None:
        """What may still be written; None where nothing may."""
        return self.writing.room() if self.writing is not None else None

    async def attributes(self, ino: Ino) -> Attributes:
        """What ``stat`` tells; asks the source only for a file that was gone and is not open.

        Raises SourceError, ENOENT if it still is.
        """
        is_ours = self.names.is_written(ino)
        if self.names.is_gone(ino) and ino not in self._bindings and not is_ours:
            await self.revalidation.find_again(ino)
        return self.latest(self.names.attributes(ino))

    # -- binding -------------------------------------------------------------------------------

    async def _bind(self, ino: Ino, *, renew: bool, store: bool) -> Binding:
        if self.names.is_gone(ino):
            await self.revalidation.find_again(ino)
        for _ in range(_ATTEMPTS):
            attributes = self.names.attributes(ino)
            binding = await self._bind_tier(attributes) or await self._bind_flight(attributes)
            if binding is not None:
                return binding
            try:
                return await self._bind_source(attributes, store=store)
            except SourceChanged:
                await self.revalidation.look_again(ino)
                if not renew:
                    break
        raise self._changed_under_reader(ino)

    def _changed_under_reader(self, ino: Ino) -> SourceError:
        return SourceError(
            f"{self._source_calls.path_text(ino)}: changed while it was read", errno=errno.ESTALE
        )

    async def _bind_tier(self, attributes: Attributes) -> Binding | None:
        """From the copy, if there is one and it is believed; else it is dropped, and None."""
        ino = attributes.ino
        number = self._residency.tier_of(ino)
        if number == SOURCE or not self._movement.is_read(number):
            return None
        tier = self._tiers[number]
        try:
            copy = await self._open_copy(tier, attributes)
        except OSError as error:
            # Evicted meanwhile, it is not there, and nothing is wrong with that.
            if error.errno not in _NOT_THE_COPY and self._residency.tier_of(ino) == number:
                self.revalidation.copy_failed(attributes, number, error)
                self._spoil_pages(ino)
            return None
        known = self.names.attributes(ino).identity
        if self._residency.tier_of(ino) != number or known != attributes.identity:
            # Evicted meanwhile, or replaced by the copy of another version.
            copy.close()
            return None
        self._controller.opened(self._item(attributes))
        return Binding(ino, attributes.size, tier=number, copy=copy)

    async def _open_copy(self, tier: Tier, attributes: Attributes) -> OpenCopy:
        """The copy, open, which is believed or compared with its digest first.

        Raises OSError, ESTALE if it is another.
        """
        ino, identity = attributes.ino, attributes.identity
        if self._verify != "open" and not self._residency.is_unverified(ino):
            with suppress(BrokenSeal):
                return await self._opened(tier, attributes)
        record = self._records.get(ino)
        if record is None or record.identity != identity:
            raise OSError(errno.ESTALE, "no record of this version")
        await self._movement.ask(
            tier.number, tier.verify, ino, identity, record.digest, size=identity.size
        )
        self.confirm_copy(ino, record)
        return await self._opened(tier, attributes)

    def confirm_copy(self, ino: Ino, record: Record) -> None:
        """The copy was compared with this record of it: believe it, in the mounts to come too."""
        self._residency.mark_verified(ino)
        # If the state cannot be written, the next mount compares once more.
        with suppress(OSError):
            self._records.confirm(ino, record)

    async def _opened(self, tier: Tier, attributes: Attributes) -> OpenCopy:
        if tier.in_memory:
            return self._open_registered(tier, attributes.ino, attributes.identity)
        return await self._movement.ask(
            tier.number, self._open_registered, tier, attributes.ino, attributes.identity
        )

    def _open_registered(self, tier: Tier, ino: Ino, identity: Identity) -> OpenCopy:
        """In a thread: whether the kernel can read the copy is seen by reading it."""
        fd = tier.open(ino, identity)
        if self._fast is None:
            return OpenCopy(fd, 0, lambda backing_id: None)
        return OpenCopy(fd, self._fast.register(fd, tier.number), self._fast.unregister)

    async def _bind_flight(self, attributes: Attributes) -> Binding | None:
        """Share the bytes or the descriptor of a copy under way: the source is not asked twice."""
        flight = self._movement.flight(attributes.ino)
        if flight is None or flight.identity != attributes.identity:
            return None
        if flight.content is not None:
            self._held_bytes += len(flight.content)
            return Binding(attributes.ino, attributes.size, content=flight.content)
        if flight.file is not None:
            file = flight.file.retain()
            binding = Binding(attributes.ino, attributes.size, file=file)
            try:
                now = await self._identity_now(attributes.ino, file)
            except BaseException:
                binding.close()
                raise
            if now == attributes.identity:
                return binding
            binding.close()
        return None

    async def _bind_source(self, attributes: Attributes, *, store: bool) -> Binding:
        """Open at the source; take a small file whole. Raises SourceChanged, SourceError."""
        ino, size = attributes.ino, attributes.size
        path = self.names.path(ino)
        since_ns = time.monotonic_ns()
        promote = self._controller.opened(self._item(attributes))
        file: SourceFile | None = None
        fetched: Fetched | None = None
        store = store and not (self._residency.is_changed(ino) or self._residency.is_spoiled(ino))
        try:
            if promote is not None:
                promote = self._movement.make_room(promote)
            small = size <= self._limits.inline_max
            if small and self._held_bytes + size <= self._limits.buffer_max:
                fetched = await self._source_calls.call(
                    ino, self._fetch, ino, path, attributes.identity, store
                )
            else:
                file = await self._source_calls.call(ino, self._open, path, attributes.identity)
        except BaseException as error:
            if isinstance(error, SourceChanged) and error.__cause__ is None:
                self._metrics.source_opened()
            if promote is not None:
                self._controller.abandoned(promote.item, promote.tier, retry=False)
            raise
        self._metrics.source_opened()
        self._doubts.fetched(ino, attributes.identity, since_ns=since_ns)
        if file is not None:
            if promote is not None:
                self._movement.submit(promote, attributes.identity, file=file)
            return Binding(ino, size, file=file)
        assert fetched is not None
        self._metrics.source_reads[0] += fetched.reads
        self._metrics.source_bytes[0] += len(fetched.data)
        if fetched.data and store:
            # The kernel has the bytes and will not ask: this is the read.
            self._metrics.given(SOURCE, len(fetched.data))
        if promote is not None:
            self._movement.submit(promote, attributes.identity, content=fetched.data)
        self._held_bytes += len(fetched.data)
        return Binding(ino, size, content=fetched.data)

    def _keep_fetched(self, ino: Ino, content: memoryview, since_ns: int) -> None:
        """The fast path has fetched a file as the snapshot tells of it: a copy of it, or none."""
        attributes = self.names.attributes(ino)
        if self._residency.is_changed(ino) or self.names.is_gone(ino) or self._is_written(ino):
            return
        self._doubts.fetched(ino, attributes.identity, since_ns=since_ns)
        promote = self._controller.opened(self._item(attributes))
        if promote is not None:
            self._movement.submit(promote, attributes.identity, content=content)

    def _open(self, path: bytes, identity: Identity) -> SourceFile:
        file = self._source_calls.source.open(path)
        if _is_scarce(file.fd):
            # The last descriptors are for files that are fetched, copied and closed again.
            os.close(file.fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if identity_of(file.status) != identity:
            os.close(file.fd)
            raise SourceChanged("not the version that the snapshot tells of")
        return file

    def _fetch(self, ino: Ino, path: bytes, identity: Identity, store: bool) -> Fetched:
        """In a thread. With ``store`` the kernel gets the bytes at once: no READ asks for them."""
        fetched = self._source_calls.source.fetch(path, identity)
        if fetched.data and store:
            self._kernel.store(ino, fetched.data)
        return fetched

    # -- reading -------------------------------------------------------------------------------

    async def _read_tier(self, binding: Binding, offset: int, size: int) -> bytes | bytearray:
        size = min(size, max(0, binding.size - offset))
        data: bytes | bytearray
        try:
            if self._tiers[binding.tier].in_memory:
                data = os.pread(binding.fd, size, offset)
            else:
                data = _read_if_in_memory(binding.fd, offset, size)
            if len(data) < size:
                data = await self._movement.ask(
                    binding.tier, _read_all, binding.fd, offset, size, size=size
                )
            if len(data) == size:
                return data
            failure = OSError(errno.ESTALE, "the copy is shorter than its record says")
        except OSError as error:
            failure = error
        # The copy is lost, the reader is not: the rest of this file comes from the source.
        if failure.errno not in _NOT_THE_COPY:
            self.revalidation.copy_failed(self.names.attributes(binding.ino), binding.tier, failure)
        if binding.fd >= 0:
            path = self.names.path(binding.ino)
            identity = self.names.attributes(binding.ino).identity
            file = await self._source_calls.call(binding.ino, self._open, path, identity)
            self._metrics.source_opened()
            if binding.fd < 0:
                file.release()
            else:
                binding.fall_back(file)
        return await self._read_source(binding, offset, size)

    async def _read_source(self, binding: Binding, offset: int, size: int) -> bytes:
        file = binding.file
        if file is None:
            raise SourceError(f"{self._source_calls.path_text(binding.ino)}: not open")
        file.retain()
        self._source_load.begin(trio.current_time())
        try:
            path = self.names.path(binding.ino)
            data = await self._source_calls.call(
                binding.ino, self._source_calls.source.on, file, path, _read_all, offset, size
            )
            if not self._opens_are_told:
                await self._require_version(binding.ino, file)
            if not data and offset < binding.size:
                await self._require_end(binding.ino, file, offset)
        finally:
            self._source_load.end(trio.current_time())
            file.release()
        self._metrics.source_read(len(data))
        file.note_read(offset, offset + len(data))
        return data

    # -- what people ask for -------------------------------------------------------------------

    def evict(self, ino: Ino) -> int:
        """Give the space of a copy back; its bytes, 0 if there was none. Readers go on.

        A copy under way is given up, and one that waits for its turn is not made.
        """
        self._residency.unwant(ino)
        tier = self._residency.tier_of(ino)
        if (binding := self._bindings.get(ino)) is not None:
            # Whoever has the file open does not bring it back.
            binding.offer_s = math.inf
        size = self.revalidation.forget_copy(ino)
        if tier != SOURCE:
            self._metrics.evicted(tier, size)
        return size

    async def evicted(self) -> None:
        """Until what was evicted is gone from the disks of the tiers that answer."""
        await self._movement.removed()

    async def drop_damaged(self, ino: Ino, tier: int, error: OSError) -> bool:
        """Drop a copy that may have been read and is not what was recorded; False if it is gone.

        It is not read again. A process that has it open goes on at the source, unless the kernel
        reads for that process: it would take an empty copy for the end of the file, so it keeps the
        damaged one until it closes the file.
        """
        fd = -1
        try:
            if not self._kernel_reads:
                with suppress(OSError):
                    fd = await self._movement.ask(tier, self._tiers[tier].open_to_empty, ino)
            if self._residency.tier_of(ino) != tier:
                return False
            self.revalidation.copy_failed(self.names.attributes(ino), tier, error)
            self._spoil_pages(ino)
            emptied, fd = fd, -1
            if emptied >= 0:
                # A disk that hangs keeps the descriptor: its number must not become another's.
                with suppress(OSError):
                    await self._movement.ask(tier, _empty, emptied)
            return True
        finally:
            if fd >= 0:
                os.close(fd)

    def _spoil_pages(self, ino: Ino) -> None:
        """The kernel may hold pages of a copy that is damaged, and shall not show them again."""
        if self._opens_are_told:
            self._residency.mark_spoiled(ino)
        else:
            self._kernel.drop(ino)

    def distrust(self, ino: Ino, *, differs: bool) -> None:
        """The source may have other bytes under the same times, or, with ``differs``, has.

        What was fetched is served no more, except to those who have it open and who open it while
        they do.
        """
        if self.revalidation.forget_copy(ino):
            self._residency.want(ino)
        if self._opens_are_told:
            self._residency.mark_spoiled(ino)
            binding = self._bindings.get(ino)
            if binding is not None:
                binding.outdated = binding.file is None
            elif self._fast is not None:
                self._fast.outdate(ino)
        elif differs:
            self._kernel.drop(ino)
            if self._was_read(ino):
                # Who has begun with the version before must not go on with this one.
                self._residency.mark_changed(ino)
        if differs:
            self._metrics.changed()
            log.info(
                "%s was written twice within a tick of the source",
                self._source_calls.path_text(ino),
            )

    def has_place_to_warm(self) -> bool:
        """Whether ``warm`` would start a copy soon instead of only noting the wish."""
        return self._movement.has_place()

    def bytes_copied(self, ino: Ino) -> int:
        """How much of a file a copy under way has brought so far."""
        flight = self._movement.flight(ino)
        return 0 if flight is None else flight.copied

    def warm(self, ino: Ino) -> bool:
        """Bring a file in; False if no tier has room for it."""
        attributes = self.names.attributes(ino)
        if self._residency.tier_of(ino) != SOURCE:
            return True
        promote = self._controller.warm(self._item(attributes))
        if promote is None:
            return self._residency.is_copying(ino)
        self._metrics.closed_files.discard(ino)
        self._movement.submit(promote, attributes.identity)
        return True

    def is_closed(self, ino: Ino) -> bool:
        """Whether the source did not let the daemon open a file when it was last tried."""
        return ino in self._metrics.closed_files

    # -- what a file tells of itself -------------------------------------------------------------

    async def xattr(self, ino: Ino, name: bytes) -> bytes | None:
        """The value of an attribute that was set, or of ``user.monarch.*`` of a regular file, or an
        access control list of the source's. None where there is none. Raises SourceError.
        """
        if name in acl.NAMES:
            return self._acl(ino, name) or None
        if self.writing is not None and name.startswith(b"user.") and not name.startswith(_OURS):
            there = await self.writing.xattrs_elsewhere(ino)
            if there is not None:
                return there.get(name)
        is_ours = self.writing is not None and self.names.is_written(ino)
        if self.writing is not None and is_ours and name not in (XATTR_TIER, XATTR_STATE):
            return self.writing.xattr(ino, name)
        if not self.names.attributes(ino).is_file:
            return None
        if self._events is not None:
            self._events.note_opens()
        if self.writing is not None and is_ours:
            tier = self.writing.tier_of(ino)
        else:
            tier = self._residency.tier_of(ino)
        if name == XATTR_DURABLE:
            return b"source"
        if name == XATTR_TIER:
            return self._metrics.names[tier].encode()
        if name == XATTR_STATE:
            if tier != SOURCE:
                return b"resident"
            return b"wanted" if not is_ours and self._residency.is_wanted(ino) else b"source"
        if name == XATTR_DIGEST and tier != SOURCE:
            record = self._records.get(ino)
            return record.digest.hex().encode() if record is not None else None
        return None

    async def xattrs(self, ino: Ino) -> list[bytes]:
        """The names of the attributes that were set, and of access control lists. Raises
        SourceError."""
        lists = [name for name in acl.NAMES if self._acl(ino, name)]
        if self.writing is None:
            return lists
        there = await self.writing.xattrs_elsewhere(ino)
        return lists + (list(there) if there is not None else self.writing.xattrs(ino))

    def _acl(self, ino: Ino, name: bytes) -> bytes:
        if not self.names.has_acls:
            return b""
        acls = self.names.acls(ino)
        if name == acl.DEFAULT:
            return acls.default
        return acl.with_mode(acls.access, self.names.attributes(ino).mode)

    def _item(self, attributes: Attributes) -> Item:
        return Item(attributes.ino, attributes.size, attributes.source_ino)

    async def _require_version(self, ino: Ino, file: SourceFile) -> None:
        """Raises SourceError, ESTALE, if others have written into a file that may have been read.

        Where opens are told, the next one drops what the kernel holds of the version before. Here
        it would be mixed with what was read now.
        """
        now, then = (
            await self._source_calls.call(ino, identity_now, file.fd),
            identity_of(file.status),
        )
        if (now.size, now.mtime_ns) != (then.size, then.mtime_ns):
            await self.revalidation.look_again(ino)
            self._residency.mark_changed(ino)
            raise self._changed_under_reader(ino)

    async def _require_end(self, ino: Ino, file: SourceFile, offset: int) -> None:
        """Nothing was read at ``offset``: raises SourceError, ESTALE, if the file ends before it.

        The kernel takes the end of the first short answer for the size of the file. Of the reads
        that it has sent ahead into a file that was cut meanwhile, one far behind the new end must
        not be the first: what lies between would be read as zeros.
        """
        if (await self._identity_now(ino, file)).size < offset:
            raise SourceError(f"{self._source_calls.path_text(ino)}: cut short", errno=errno.ESTALE)

    async def _identity_now(self, ino: Ino, file: SourceFile) -> Identity:
        path = self.names.path(ino)
        return await self._source_calls.call(
            ino, self._source_calls.source.on, file, path, identity_now
        )


def _is_scarce(fd: int) -> bool:
    """Whether nearly all descriptors are in use: the lowest free number is always taken."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fd >= 128 and limit != resource.RLIM_INFINITY and fd >= limit - limit // 8


def _empty(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _read_if_in_memory(fd: int, offset: int, size: int) -> bytes | bytearray:
    """What the page cache gives without waiting for a disk; may be short or empty."""
    buffer = bytearray(size)
    try:
        count = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return b""
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return b""
    del buffer[count:]
    return buffer


def _read_all(fd: int, offset: int, size: int) -> bytes:
    """``size`` bytes, fewer only at the end of the file."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, offset + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)
