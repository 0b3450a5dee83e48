"""Opens of files that are not written: each inode is bound to the best place that holds it.

A small file that only the source has is fetched once, whole, by the first open; the others wait
for the same open. A file whose copy is being made shares the bytes or the descriptor of the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from monarch.config.settings import LimitSettings
from monarch.errors import SourceChanged
from monarch.namespace.namespace import Namespace
from monarch.tiers.source import SourceFile
from monarch.types import WRITTEN_INO, Attributes, Ino
from monarch.vfs.binding import Binding, Bindings
from monarch.vfs.copies import Copies
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.promotions import Promotions
from monarch.vfs.revalidation import Revalidation
from monarch.vfs.source_files import SourceFiles
from monarch.writeback.front import WriteFront

# How often an open begins again when the source changes meanwhile. A file that changes faster than
# it can be read is being written: its reader gets ESTALE.
_ATTEMPTS = 3


@dataclass(eq=False, repr=False)
class Opens:
    """``written`` has the written files that are open, None if the mount is read-only."""

    _names: Namespace
    _bindings: Bindings
    _copies: Copies
    _promotions: Promotions
    _source_files: SourceFiles
    _revalidation: Revalidation
    _kernel: KernelView
    _limits: LimitSettings
    _written: WriteFront | None

    async def enter(self, ino: Ino, *, renew: bool, store: bool) -> Binding:
        """The binding of an inode, with one more user. ``renew``: it may be of a newer version.

        ``store``: no process reads the file yet, so its bytes may go to the kernel's page cache. A
        read that waits has locked these pages, and storing would wait for the read for ever.
        Raises SourceError; ESTALE if the file changes all the time.
        """
        while (binding := self._bindings.get(ino)) is None:
            begun = self._bindings.begin(ino)
            if begun is not None:
                await begun.wait()
                continue
            try:
                binding = await self._bind(ino, renew=renew, store=store)
            finally:
                self._bindings.settle(ino, binding)
            break
        binding.users += 1
        return binding

    async def open(self, ino: Ino) -> Binding:
        """As ``enter``, for an open of the kernel; the datapath then reads from the descriptor."""
        binding = await self.enter(ino, renew=True, store=True)
        try:
            if binding.users > 1 and binding.file is not None:
                await self._revalidation.notice_rewriting(binding.file, ino)
            self._bindings.hand_over(binding, self._names)
        except BaseException:
            self.leave(ino)
            raise
        return binding

    def release(self, ino: Ino) -> None:
        """Ends one open of a file, whether it was written or not."""
        if self._written is not None and self._written.files.is_open(ino):
            self._written.files.release(ino)
        else:
            self.leave(ino)

    def leave(self, ino: Ino) -> None:
        """Ends one use of a binding."""
        if self._bindings.leave(ino):
            self.old_version_released(ino)

    def old_version_released(self, ino: Ino) -> None:
        """The last open of an outdated version was released; the kernel may have its pages."""
        if ino >= WRITTEN_INO:
            # It has no copy.
            if self._written is not None:
                self._written.unlinked.read_past(ino)
            return
        self._promotions.forget_copy(ino)
        if self._kernel.sends_opens:
            self._kernel.drop_pages(ino)

    async def _bind(self, ino: Ino, *, renew: bool, store: bool) -> Binding:
        if self._names.is_gone(ino):
            await self._revalidation.find_again(ino)
        for _ in range(_ATTEMPTS):
            attributes = self._names.attributes(ino)
            binding = await self._copies.bind(attributes) or await self._bind_flight(attributes)
            if binding is not None:
                return binding
            try:
                return await self._bind_source(attributes, store=store)
            except SourceChanged:
                await self._revalidation.look_again(ino)
                if not renew:
                    break
        raise self._revalidation.changed_while_read(ino)

    async def _bind_flight(self, attributes: Attributes) -> Binding | None:
        """Binds to a copy that is being made, so that the source is not asked twice."""
        ino, size = attributes.ino, attributes.size
        flight = self._promotions.flight(ino)
        if flight is None or flight.identity != attributes.identity:
            return None
        if flight.content is not None:
            return Binding(ino, size, content=flight.content)
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

    async def _bind_source(self, attributes: Attributes, *, store: bool) -> Binding:
        """Opens a file at the source, or fetches a small one. Raises SourceChanged, SourceError."""
        ino, size = attributes.ino, attributes.size
        promote = self._promotions.opened(attributes)
        content: bytes | None = None
        file: SourceFile | None = None
        try:
            is_small = size <= self._limits.inline_max
            if is_small and self._bindings.held_bytes + size <= self._limits.buffer_max:
                store = store and self._kernel.keeps_pages(ino)
                content = await self._source_files.fetch(attributes, store=store)
            else:
                file = await self._source_files.open(attributes)
        except BaseException:
            if promote is not None:
                self._promotions.abandon(promote)
            raise
        if promote is not None:
            self._promotions.submit(promote, attributes.identity, content=content, file=file)
        return Binding(ino, size, content=content, file=file)
