"""What a reader may see: the versions of each file, and which of them a mount may serve now.

The rules are those of docs/semantics.md, by their numbers. The model accesses no file system. It is
called with each change at the source and each result of a reader, and raises Wrong if a promise
was broken. ``before`` is always the state when the operation began: its current version is
older than the file's if the file was changed meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_PAGE = 4096


class Wrong(AssertionError):
    """A reader got what it must not get, or something was left."""


@dataclass(frozen=True, slots=True)
class Version:
    """``content`` is None while there is no file. ``times`` are size, mtime and ctime as stat tells
    them, None for a state that lasted no longer than a system call.

    ``restless``: a reader may have seen it while it was being made.
    """

    content: bytes | None
    times: tuple[int, int, int] | None
    inode: int
    mode: int
    restless: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """What was known of a file when an operation began."""

    current: int
    floor: int
    shown: int


@dataclass(slots=True)
class File:
    """``floor`` is the oldest version that an open may be served, ``shown`` the oldest that
    ``stat`` may show, ``snapped`` the oldest that the snapshot may hold.

    ``known``: the mount has the name. ``read_from`` is the oldest version that may have been read
    since the mount.
    """

    name: str
    versions: list[Version] = field(default_factory=list)
    floor: int = 0
    floor_at_mount: int = 0
    shown: int = 0
    snapped: int = 0
    known: bool = False
    read_from: int | None = None

    @property
    def current(self) -> int:
        return len(self.versions) - 1

    @property
    def content(self) -> bytes | None:
        return self.versions[-1].content

    def absent(self, numbers: Iterable[int]) -> bool:
        return any(self.versions[number].content is None for number in numbers)


@dataclass(slots=True)
class Handle:
    """An open file. ``candidates`` are the versions that it may be of: each read leaves fewer.

    ``bound``: it has been opened or read so that the mount knows of it. ``loose``: it may read the
    source's own file, in which others may write. ``length`` is that of its map.
    """

    file: File
    candidates: set[int]
    opened: int
    bound: bool
    loose: bool
    dead: bool = False
    length: int = -1


class Model:
    """``opens_are_reported`` is False with ``open: none``; files up to ``inline_max`` are fetched
    whole."""

    def __init__(self, *, opens_are_reported: bool, inline_max: int) -> None:
        self._opens_are_reported = opens_are_reported
        self._inline_max = inline_max
        self.files: dict[str, File] = {}
        self._was_mounted = False

    # -- the source --------------------------------------------------------------------------

    def changed(self, name: str, version: Version) -> None:
        self.files.setdefault(name, File(name)).versions.append(version)

    def now(self) -> dict[str, Moment]:
        return {
            name: Moment(file.current, file.floor, file.shown) for name, file in self.files.items()
        }

    # -- the mount -----------------------------------------------------------------------------

    def mounted(
        self, names: set[str], before: Mapping[str, Moment], *, looks: bool, refreshed: bool
    ) -> None:
        """A mount lists ``names``. ``looks``: it compares directories (27), ``refreshed``: all."""
        there = {name for name in before if self.files[name].content is not None}
        if refreshed or looks or not self._was_mounted:
            expected = there
        else:
            expected = {name for name, file in self.files.items() if file.known}
        if names != expected:
            raise Wrong(f"27: the mount lists {sorted(names)} instead of {sorted(expected)}")
        for name, file in self.files.items():
            if refreshed or not self._was_mounted:
                file.floor = file.snapped = before[name].current
            elif not file.known:
                # A file that appears now was not there, so no older version is possible.
                file.snapped = before[name].current
            file.known = name in names
            file.shown = file.snapped
            file.read_from = None
            file.floor_at_mount = file.floor
        self._was_mounted = True

    def unmounted(self, *, killed: bool) -> None:
        if killed:
            # A copy of an older version may have been on its way and be found by the next mount.
            for file in self.files.values():
                file.floor = file.floor_at_mount

    def compared(self, name: str, number: int) -> None:
        """The mount has compared its copy with this version of the source, or has none."""
        file = self.files[name]
        if not self._opens_are_reported and file.versions[file.floor].content == b"":
            return  # the kernel does not ask for the bytes of an empty file
        file.floor = max(file.floor, number)

    # -- opening -------------------------------------------------------------------------------

    def opened(self, name: str, before: Moment, number: int, size: int) -> Handle | None:
        """An open gave this error, or a file of this size."""
        file = self.files[name]
        if number:
            self._failed(file, before, number)
            return None
        self._require_known(file)
        handle = self._handle(file, before)
        if self._opens_are_reported:
            if before.current == file.current:
                contents = {n: file.versions[n].content or b"" for n in handle.candidates}
                handle.candidates = {n for n, content in contents.items() if len(content) == size}
            if not handle.candidates:
                raise Wrong(f"26: {name}: no version that may be opened has {size} bytes")
            self._seen(file, min(handle.candidates))
        return handle

    def read_whole(
        self, name: str, before: Moment, answer: tuple[int, int, bytes, int]
    ) -> Handle | None:
        """Opened, read to its end and closed."""
        failed, size, content, number = answer
        file = self.files[name]
        if failed:
            self._failed(file, before, failed)
            return None
        self._require_known(file)
        handle = self._handle(file, before)
        if before.current == file.current:
            handle.loose = False
        self.read(handle, before, 0, None, content, number)
        alone = self._opens_are_reported and before.current == file.current and not number
        if alone and size != len(content):
            raise Wrong(f"26: {name}: fstat tells {size} bytes, {len(content)} were read")
        return handle

    def _handle(self, file: File, before: Moment) -> Handle:
        versions = range(before.floor, file.current + 1)
        there = {n for n in versions if file.versions[n].content is not None}
        loose = any(len(file.versions[n].content or b"") > self._inline_max for n in there)
        return Handle(file, there, file.current, self._opens_are_reported, loose)

    def _require_known(self, file: File) -> None:
        if not file.known:
            raise Wrong(f"28: {file.name} is served, and was not there when the mount looked")

    def _failed(self, file: File, before: Moment, number: int) -> None:
        window = range(before.current, file.current + 1)
        if number == errno.ENOENT:
            if file.known and not file.absent(window):
                raise Wrong(f"10: {file.name} is ENOENT, but it is there")
            if before.current == file.current and file.known:
                self._seen(file, before.current)
        elif number != errno.ESTALE or not self._may_be_stale(file, before):
            raise Wrong(f"{file.name}: {_name(number)}")

    def _may_be_stale(self, file: File, before: Moment) -> bool:
        """ESTALE is for a file that changes all the time, and with ``open: none`` for one that has
        changed since it was read, or whose mode or size is another (40)."""
        if self._opens_are_reported:
            return before.current < file.current
        since = [v for v in file.versions[file.snapped :] if v.content is not None]
        if len({(version.mode, len(version.content or b"")) for version in since}) > 1:
            return True
        return file.read_from is not None and file.read_from < file.current

    def _seen(self, file: File, number: int) -> None:
        """An open from now on sees this version or a newer one, and so does ``stat``."""
        file.floor = max(file.floor, number)
        file.shown = max(file.shown, number)

    # -- reading -------------------------------------------------------------------------------

    def read(
        self,
        handle: Handle,
        before: Moment,
        offset: int,
        size: int | None,
        got: bytes,
        number: int,
    ) -> None:
        """``got`` was read at ``offset``, less than ``size`` only at the end or for the error
        ``number``. ``size`` None: all there is."""
        file = handle.file
        if file.read_from is None:
            file.read_from = min(handle.candidates, default=before.current)
        if not handle.bound and not handle.dead:
            handle.candidates = self._handle(file, before).candidates
        end = None if size is None else offset + size
        fitting = {
            n
            for n in handle.candidates
            if _fits(file.versions[n].content or b"", offset, end, got, complete=not number)
        }
        if fitting:
            # An empty answer may come from the kernel, which knows where the file ends.
            if got:
                handle.candidates = fitting
                handle.bound = True
        elif (got or not number) and not self._is_patchwork(
            handle, offset, end, got, complete=not number
        ):
            raise Wrong(f"1: {self._describe(handle, offset, end, got)}")
        if number:
            self._read_failed(handle, before, number)
        elif size is None and before.current == file.current and handle.opened == file.current:
            self._seen(file, min(handle.candidates))

    def _read_failed(self, handle: Handle, before: Moment, number: int) -> None:
        file = handle.file
        if handle.dead and number in (errno.ENOTCONN, errno.EFAULT):
            return
        changed = file.current > handle.opened or before.current < file.current
        if number in (errno.ESTALE, errno.EFAULT):
            if not self._opens_are_reported and self._may_be_stale(file, before):
                return
            if handle.loose and changed:
                return
        if number == errno.ENOENT and not self._opens_are_reported:
            # The open was not reported: it is the first read that finds nothing.
            changes = range(handle.opened, file.current + 1)
            if file.absent(changes):
                return
        raise Wrong(f"5: {file.name}: {_name(number)} for an open file")

    def _is_patchwork(
        self, handle: Handle, offset: int, end: int | None, got: bytes, *, complete: bool
    ) -> bool:
        """Whether each page is of a version that was written into the file that is open.

        A file that is read from the source shows what others write into it, as the source does.
        """
        if not handle.loose:
            return False
        file = handle.file
        inodes = {file.versions[n].inode for n in handle.candidates}
        contents = [
            version.content
            for version in file.versions[min(handle.candidates, default=0) :]
            if version.inode in inodes and version.content is not None
        ]
        ended = complete and (end is None or len(got) < end - offset)
        if ended and all(len(content) > offset + len(got) for content in contents):
            return False
        place = 0
        while place < len(got):
            step = min(_PAGE - (offset + place) % _PAGE, len(got) - place)
            start = offset + place
            piece = got[place : place + step]
            if all(content[start : start + step] != piece for content in contents):
                return False
            place += step
        return True

    def _describe(self, handle: Handle, offset: int, end: int | None, got: bytes) -> str:
        """What the wrong bytes are, as far as that can be found out."""
        file = handle.file
        known = [
            n
            for n, version in enumerate(file.versions)
            if version.content is not None and _fits(version.content, offset, end, got)
        ]
        sizes = [len(version.content or b"") for version in file.versions]
        may = sorted(handle.candidates)
        text = f"{file.name}: {len(got)} bytes at {offset} must be of version {may}"
        text += f" of {len(file.versions)} (sizes {sizes}, floor {file.floor})"
        if known:
            return f"{text} but are of {known}"
        pages: dict[str, int] = {}
        for place in range(0, len(got), _PAGE):
            piece, start = got[place : place + _PAGE], offset + place
            whose = [
                str(n)
                for n, version in enumerate(file.versions)
                if (version.content or b"")[start : start + len(piece)] == piece
            ]
            what = "/".join(whose) or ("zeros" if not any(piece) else "none")
            pages[what] = pages.get(what, 0) + 1
        return f"{text} but are of none; pages by version: {pages}"

    # -- names and attributes ---------------------------------------------------------------------

    def stated(self, name: str, before: Moment, answer: tuple[int, int, int, int]) -> None:
        """What ``stat`` said."""
        number, *times = answer
        file = self.files[name]
        if number:
            self._failed(file, before, number)
            return
        self._require_known(file)
        may = file.versions[before.shown :]
        if tuple(times) in [version.times for version in may]:
            return
        # Attributes change one after the other; a reader in between has seen some of each.
        if not any(version.restless for version in may):
            whose = [n for n, v in enumerate(file.versions) if v.times == tuple(times)]
            raise Wrong(f"26: stat of {name} shows version {whose}, not {before.shown} or later")

    def listed(
        self, directory: str, before: Mapping[str, Moment], answer: tuple[int, list[str]]
    ) -> None:
        number, names = answer
        if number:
            raise Wrong(f"13: listing {directory or 'the root'}: {_name(number)}")
        here = {f for f in self.files if os.path.dirname(f) == directory}
        for name in {os.path.join(directory, n) for n in names}:
            file = self.files.get(name)
            if file is None and any(f.startswith(f"{name}/") for f in self.files):
                continue
            if file is None or not file.known:
                raise Wrong(f"28: {name} is listed, and was not there when the mount looked")
            if before[name].shown == file.current and file.content is None:
                raise Wrong(f"26: {name} is listed, and was found gone")
            here.discard(name)
        for name in here:
            file = self.files[name]
            if file.known and not file.absent(range(before[name].shown, file.current + 1)):
                raise Wrong(f"10: {name} is not listed")

    def digest(self, name: str, digests: Mapping[int, str], shown: str) -> None:
        """``user.monarch.digest`` (30), where ``digests`` are those of all versions."""
        file = self.files[name]
        if shown not in [digests[n] for n in range(file.floor, file.current + 1) if n in digests]:
            whose = [n for n, digest in digests.items() if digest == shown]
            raise Wrong(
                f"30: the digest of {name} is that of {whose}, not of {file.floor} or later"
            )


def _fits(
    content: bytes, offset: int, end: int | None, got: bytes, *, complete: bool = True
) -> bool:
    expected = content[offset:end]
    return got == expected if complete else expected.startswith(got)


def _name(number: int) -> str:
    return errno.errorcode.get(number, str(number))
