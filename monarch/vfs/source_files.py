"""Files of the source, as readers use them: opened or fetched whole, and read."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio
from typing_extensions import TypeVarTuple, Unpack

from monarch.errors import SourceChanged, SourceError
from monarch.namespace.namespace import Namespace
from monarch.placement.residency import SOURCE, Residency
from monarch.posix.files import is_scarce
from monarch.telemetry.metrics import Metrics
from monarch.tiers.doubts import Doubts
from monarch.tiers.source import Fetched, SourceFile, identity_of, read_open
from monarch.transfer.source_calls import SourceCalls
from monarch.transfer.source_load import SourceLoad
from monarch.types import Attributes, Identity, Ino
from monarch.vfs.alone import Alone
from monarch.vfs.binding import Binding, read_fully
from monarch.vfs.kernel_view import KernelView
from monarch.vfs.revalidation import Revalidation

Args = TypeVarTuple("Args")
T = TypeVar("T")

# The part of the descriptors that no file stays open with.
_LAST = 1 / 8


@dataclass(eq=False, repr=False)
class SourceFiles:
    """Belongs to the event loop; each call of the source runs in a thread."""

    _names: Namespace
    _calls: SourceCalls
    _load: SourceLoad
    _revalidation: Revalidation
    _residency: Residency
    _kernel: KernelView
    _doubts: Doubts
    _metrics: Metrics

    def __post_init__(self) -> None:
        # Waits for a call that another task makes. Raises SourceError.
        self.wait = self._calls.wait
        self.metrics = self._metrics
        self.drop_pages = self._kernel.drop_pages
        self._alone = Alone()

    async def open(self, attributes: Attributes, *, from_storage: bool = False) -> SourceFile:
        """``from_storage``: the page cache of this node drops the file first. Raises SourceError;
        SourceChanged if the source has another version."""
        opens = self._open_from_storage if from_storage else self._open
        return await self._count(attributes, opens, attributes.identity)

    async def fetch(
        self, attributes: Attributes, *, store: bool, from_storage: bool = False
    ) -> bytes:
        """The bytes of a small file. With ``store`` the kernel gets them at once, before any read;
        ``from_storage`` as in ``open``. Raises SourceError; SourceChanged if the source has another
        version."""
        ino, identity = attributes.ino, attributes.identity
        fetch = self._fetch_from_storage if from_storage else self._fetch
        fetched = await self._count(attributes, fetch, ino, identity, store)
        self._metrics.source_reads[0] += fetched.reads
        self._metrics.source_bytes[0] += fetched.read_bytes
        if fetched.data and store:
            # The kernel has the bytes and sends no read: this counts as the read.
            self._metrics.given(SOURCE, len(fetched.data))
        return fetched.data

    def is_current(self, attributes: Attributes) -> bool:
        """Whether no other version of a file was noticed since ``attributes`` were known. The
        bindings of an old version are marked when it is noticed, those that are being made are
        not."""
        return self._names.stored(attributes.ino).identity == attributes.identity

    async def _count(
        self,
        attributes: Attributes,
        call: Callable[[bytes, Unpack[Args]], T],
        *args: Unpack[Args],
    ) -> T:
        """Runs a call that opens a file, and counts the open."""
        since_ns = time.monotonic_ns()
        try:
            result = await self._calls.at(attributes.ino, call, *args)
        except SourceChanged as error:
            if error.__cause__ is None:
                # The file was opened, and is another version.
                self._metrics.source_opened()
            raise
        self._load.ended((time.monotonic_ns() - since_ns) / 1e9)
        self._metrics.source_opened(result.opens if isinstance(result, Fetched) else 1)
        if not self.is_current(attributes):
            if isinstance(result, SourceFile):
                result.release()
            raise SourceChanged("another version was noticed meanwhile")
        self._doubts.fetched(attributes.ino, attributes.identity, since_ns=since_ns)
        return result

    def _open(self, path: bytes, identity: Identity) -> SourceFile:
        """In a thread. Raises OSError, SourceChanged."""
        file = self._calls.source.open_version(path, identity)
        if is_scarce(file.fd, _LAST):
            # The last descriptors are for files that are fetched, copied and closed again.
            os.close(file.fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return file

    def _open_from_storage(self, path: bytes, identity: Identity) -> SourceFile:
        """In a thread. Raises OSError, SourceChanged."""
        file = self._open(path, identity)
        _drop_cached(file)
        return file

    def _fetch_from_storage(
        self, path: bytes, ino: Ino, identity: Identity, store: bool
    ) -> Fetched:
        """In a thread. Raises OSError, SourceChanged."""
        file = self._calls.source.open_version(path, identity)
        try:
            _drop_cached(file)
            fetched = read_open(file, identity)
        finally:
            file.release()
        if fetched.data and store:
            self._kernel.store(ino, fetched.data)
        return fetched

    def _fetch(self, path: bytes, ino: Ino, identity: Identity, store: bool) -> Fetched:
        """In a thread. Raises OSError, SourceChanged."""
        fetched = self._calls.source.fetch_shared(path, identity, ino)
        if fetched.data and store:
            self._kernel.store(ino, fetched.data)
        return fetched

    async def identity_now(self, ino: Ino, file: SourceFile) -> Identity:
        """The version that an open file has now. Raises SourceError."""
        return await self._calls.call(
            ino, self._calls.source.on, file, self._names.source_paths(ino), _identify, file
        )

    async def notice_rewriting(self, ino: Ino, file: SourceFile) -> None:
        """Compares a file that other processes have open with its entry: if it was overwritten in
        place, pages of both versions must not be mixed. Raises SourceError."""
        file.retain()
        try:
            now = await self.identity_now(ino, file)
        finally:
            file.release()
        known = self._names.stored(ino)
        if (now.size, now.mtime_ns) != (known.size, known.mtime_ns):
            await self._revalidation.look_again(ino)

    async def read(self, binding: Binding, offset: int, size: int) -> bytes:
        """``size`` bytes of a file that is bound to the source, fewer only at its end. Raises
        SourceError."""
        ino, file = binding.ino, binding.file
        if file is None:
            raise SourceError(f"{self._names.path_text(ino)}: not open")
        if binding.is_shared:
            shared = await self._from_others(ino, identity_of(file.status), offset, size)
            if shared is not None:
                return shared
        file.retain()
        began = trio.current_time()
        self._load.begin(began)
        try:
            paths = self._names.source_paths(ino)
            data = await self._calls.call(
                ino, self._calls.source.on, file, paths, read_fully, offset, size
            )
            if not self._kernel.sends_opens:
                await self._require_version(ino, file)
            if not data and offset < binding.size:
                await self._require_end(ino, file, offset)
        finally:
            self._load.end(trio.current_time())
            file.release()
        took_s = trio.current_time() - began
        self._load.ended(took_s)
        self._calls.source.took(took_s)
        self._metrics.source_read(len(data))
        file.note_read(offset, offset + len(data))
        return data

    async def read_version(
        self, binding: Binding, identity: Identity, offset: int, size: int, *, alone: bool
    ) -> bytes | None:
        """``size`` bytes of the version ``identity``; None if the source has another version by
        now. ``alone``: the client of the source must not read ahead. Raises SourceError."""
        ino = binding.ino
        if binding.is_shared:
            shared = await self._from_others(ino, identity, offset, size)
            if shared is not None and len(shared) == size:
                return shared
        try:
            file = await self._opened(binding)
        except SourceChanged:
            return None
        file.retain()
        began = trio.current_time()
        self._load.begin(began)
        if alone:
            self._alone.begin(file)
        try:
            paths = self._names.source_paths(ino)
            data, now = await self._calls.call(
                ino,
                self._calls.source.on,
                file,
                paths,
                partial(_read_and_identify, file),
                offset,
                size,
            )
        except SourceChanged:
            return None
        finally:
            if alone:
                self._alone.end(file)
            self._load.end(trio.current_time())
            file.release()
        took_s = trio.current_time() - began
        self._load.ended(took_s)
        self._calls.source.took(took_s)
        self._metrics.source_read(len(data))
        file.note_read(offset, offset + len(data))
        return data if now == identity and len(data) == size else None

    async def _from_others(
        self, ino: Ino, identity: Identity, offset: int, size: int
    ) -> bytes | None:
        """Bytes that other nodes give; None if the source must be read. Raises SourceError."""
        return await self._calls.call(
            ino, self._calls.source.read_shared, ino, identity, offset, size
        )

    async def continue_with(self, binding: Binding) -> None:
        """Opens the file of a binding at the source if it is not open there. Raises SourceError."""
        await self._opened(binding)

    async def _opened(self, binding: Binding) -> SourceFile:
        if binding.file is None:
            attributes, part = self._names.stored(binding.ino), binding.part
            if part is not None and part.identity != attributes.identity:
                # Its readers may have bytes of that version.
                raise SourceChanged("not the version of the partial copy")
            binding.put_file(await self.open(attributes))
        if binding.file is None:
            raise SourceError(f"{self._names.path_text(binding.ino)}: not open")
        return binding.file

    def reached(self, ino: Ino, file: SourceFile) -> int:
        """The position, in bytes, of a reader that reads the file from its start."""
        return max(file.read_up_to, self._load.reached(ino))

    async def _require_version(self, ino: Ino, file: SourceFile) -> None:
        """Raises SourceError, ESTALE, if a file that may have been read was overwritten: where the
        kernel sends no opens, its pages of the old version would be mixed with the bytes read
        now."""
        now = await self._calls.call(ino, file.identity_now)
        then = identity_of(file.status)
        if (now.size, now.mtime_ns) != (then.size, then.mtime_ns):
            await self._revalidation.look_again(ino)
            self._residency.mark_changed(ino)
            raise self._revalidation.changed_while_read(ino)

    async def _require_end(self, ino: Ino, file: SourceFile, offset: int) -> None:
        """Raises SourceError, ESTALE, if a file from which nothing was read ends before ``offset``.

        The kernel takes the end of the first short answer for the size of the file. Of the reads
        that it has sent ahead into a file that was truncated meanwhile, one far behind the new end
        must not be the first: the bytes between would be read as zeros.
        """
        if (await self.identity_now(ino, file)).size < offset:
            raise SourceError(f"{self._names.path_text(ino)}: cut short", errno=errno.ESTALE)


def _drop_cached(file: SourceFile) -> None:
    """In a thread. A file system without a page cache has nothing to drop."""
    with suppress(OSError):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _identify(fd: int, file: SourceFile) -> Identity:
    """In a thread. Raises OSError."""
    return file.identity_now()


def _read_and_identify(file: SourceFile, fd: int, offset: int, size: int) -> tuple[bytes, Identity]:
    """In a thread. Raises OSError."""
    return read_fully(fd, offset, size), file.identity_now()
