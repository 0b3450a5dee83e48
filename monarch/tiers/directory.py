"""One tier: a private directory on a local file system that holds whole, verified copies.

    PATH/monarch/                    0700, owned by the daemon's user
        absorbed-SOURCE/             what is written for a source (absorbing.py)
        MOUNT/                       the copies of one mount; named after its state directory
            lock                     held while a daemon uses them: pid and mount point
            tier.json                the tier's own id, the version of all this, source and state
            stage/INO.part           copies being written, swept at start
            copies-GENERATION/XX/INO committed copies; XX is the low byte of INO in hex, the time of
                                     modification is the seal (seal.py)

So several mounts share a PATH, one after the other or at the same time, and none touches what
another has. Earlier versions of Monarch kept the contents of MOUNT in PATH/monarch itself: the
mount whose records know that tier's id moves them, all others leave them alone.

A generation is one snapshot: inode numbers mean something only within it. Copies of another
generation are adopted by rename or removed, never served. Calls here may wait for the local
disk. A file's content is read through the descriptor that ``open`` returns, so removing a copy
never disturbs who reads it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from monarch import points
from monarch.beneath import kind_of_file_system
from monarch.errors import TierError
from monarch.footing import open_directory
from monarch.tiers.lock import Lock
from monarch.tiers.seal import BrokenSeal, seal
from monarch.types import Identity, Ino
from monarch.units import MiB

log = logging.getLogger(__name__)

PRIVATE = "monarch"
_VERSION = 1
_PREFIX = "copies-"
_GENERATION = re.compile(r"copies-[0-9A-Za-z-]+")
# The names beneath stage/.
STAGED = re.compile(r"[0-9]+\.part|probe")
_CHUNK = 1 * MiB
_ZEROS = bytes(_CHUNK)
_LIBC = ctypes.CDLL(None, use_errno=True)
# TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
_MEMORY = frozenset({0x01021994, 0x858458F6})


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the tier's file system: all of it, and what an ordinary user may still write."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The mount that a tier's copies belong to.

    Its directory is the one whose id the mount's records know, else that of the name ``directory``.
    """

    directory: str
    mountpoint: str = ""
    source: str = ""
    state: str = ""
    known: frozenset[str] = frozenset()


def own_directory(path: Path, owner: Owner) -> Path:
    """Where the tier at ``path`` has, or will have, the copies of a mount; changes nothing."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        shared = os.open(path / PRIVATE, flags)
    except OSError:
        return path / PRIVATE / owner.directory
    try:
        return path / PRIVATE / _own_name(shared, owner)
    finally:
        os.close(shared)


def _own_name(shared: int, owner: Owner) -> str:
    if os.fstat(shared).st_uid != os.geteuid() or _exists(shared, owner.directory):
        return owner.directory
    # The state directory, whose path makes the name, may have been moved.
    for name in sorted(os.listdir(shared)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            fd = os.open(f"{name}/tier.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=shared)
            with open(fd, "rb") as file:
                if json.load(file)["id"] in owner.known:
                    return name
    return owner.directory


def require_known_version(path: Path, owner: Owner) -> None:
    """Raises TierError if a newer version has written the tier at ``path``; changes nothing."""
    for own in (own_directory(path, owner), path / PRIVATE):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            _id_of((own / "tier.json").read_bytes(), path)


def _id_of(told: bytes, path: Path) -> str:
    known = json.loads(told)
    version = known.get("version", _VERSION)
    if version > _VERSION:
        raise TierError(
            f"tier {os.fspath(path)!r} is of version {version}, this Monarch knows {_VERSION}",
            hint="mount with the Monarch that wrote it, or name another directory",
        )
    return str(known["id"])


def copy_name(ino: Ino) -> str:
    """Where a generation's directory holds the copy of ``ino``; the datapath knows this too."""
    return f"{ino & 0xFF:02x}/{ino}"


def ino_of(path: str) -> Ino | None:
    """The inode number that a path beneath a generation's directory is the name of, if any."""
    name = path.partition("/")[2]
    # A name of ours is plain digits: others that Python takes for a number are not.
    if not (name.isascii() and name.isdecimal() and len(name) < 20):
        return None
    ino = Ino(int(name))
    return ino if ino > 0 and path == copy_name(ino) else None


class Tier:
    """The tier ``number`` (1 is the fastest) at ``path``. Opening it takes its lock.

    Raises TierError if the directory cannot be made or is not ours, LockedError if another
    daemon uses it.
    """

    def __init__(
        self, number: int, name: str, path: Path, *, owner: Owner, known_as: str | None = None
    ) -> None:
        self.number = number
        self.name = name
        self.path = path
        self._owner = owner
        # The directory with the copies of this mount.
        self.own, self._root = _open_private(path, owner)
        with ExitStack() as opened:
            opened.callback(os.close, self._root)
            self._lock = Lock(
                self._root,
                f"tier {os.fspath(path)!r}",
                owner.mountpoint,
                instead="give this mount another tier with --tier PATH",
            )
            opened.callback(self._lock.release)
            self.id = self._own_id(known_as)
            opened.pop_all()
        self._mounted = os.path.ismount(path)
        # A read of memory never waits, and tmpfs cannot say so through RWF_NOWAIT.
        self.in_memory = kind_of_file_system(self._root) in _MEMORY
        self._generation = -1
        self._generation_name = ""
        # Whether the file system keeps a seal exactly; ``use`` finds out.
        self.seals = False

    def close(self) -> None:
        if self._generation >= 0:
            os.close(self._generation)
        self._lock.release()
        os.close(self._root)

    def _own_id(self, known_as: str | None) -> str:
        """The id in tier.json, that or a new one if there is none. Raises TierError, OSError."""
        try:
            with open(self._opened("tier.json", os.O_RDONLY), "rb") as file:
                told = file.read()
            identity = _id_of(told, self.path)
            if json.loads(told) != self._note(identity):
                self._write_note(identity)
            return identity
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("tier %s has lost its name, and with it its copies: %s", self.path, error)
        return self._new_id(known_as or uuid.uuid4().hex)

    def _new_id(self, identity: str) -> str:
        self._write_note(identity)
        points.reached("tier-named")
        return identity

    def _note(self, identity: str) -> dict[str, object]:
        owner = self._owner
        told = {"source": owner.source, "state": owner.state}
        return {"version": _VERSION, "id": identity, **told}

    def _write_note(self, identity: str) -> None:
        # A power cut must not leave an empty file: every copy would be a stranger's.
        with open(self._opened("tier.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(self._note(identity), file)
            file.flush()
            os.fsync(file.fileno())
        points.reached("tier-name-staged")
        os.rename("tier.part", "tier.json", src_dir_fd=self._root, dst_dir_fd=self._root)
        os.fsync(self._root)

    def _opened(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._root)

    # -- generations -----------------------------------------------------------------------

    def use(self, generation: str) -> None:
        """Serve and commit in this generation from now on; empty the stage."""
        name = _PREFIX + generation
        for needed in ("stage", name):
            with suppress(FileExistsError):
                os.mkdir(needed, 0o700, dir_fd=self._root)
        if self._generation >= 0:
            os.close(self._generation)
        self._generation = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._root
        )
        self._generation_name = name
        points.reached("tier-generation-made")
        self.sweep_stage()
        self.seals = keeps_seals(self._root)
        if not self.seals:
            log.info("tier %s: times are not kept exactly there, so copies have no seal", self.name)

    def sweep_stage(self) -> None:
        with self._listing("stage") as entries:
            names = [entry.name for entry in entries]
        for name in filter(STAGED.fullmatch, names):
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(f"stage/{name}", dir_fd=self._root)

    def adopt(self, generation: str, old: Ino, new: Ino, identity: Identity) -> bool:
        """Rename a copy of another generation into this one; False if there is none.

        Its seal goes with it, if it was whole. Raises OSError.
        """
        try:
            self._into_generation(f"{_PREFIX}{generation}/{copy_name(old)}", new)
        except FileNotFoundError:
            # An earlier attempt may have come as far as this, and died before it was recorded.
            return self.has(new)
        points.reached("adopt-renamed")
        fd = self._opened_copy(new)
        try:
            if os.fstat(fd).st_mtime_ns == seal(old, identity):
                _put_seal(fd, new, identity)
        finally:
            os.close(fd)
        return True

    def remove_other_generations(self) -> int:
        """Remove the copies that belong to no known snapshot; how many there were.

        What somebody else has put among them stays, and with it the directory.
        """
        removed = 0
        for name in self._generations():
            if name != self._generation_name:
                for path in self._copies_of(name):
                    os.unlink(f"{name}/{path}", dir_fd=self._root)
                    removed += 1
                for below in [*(f"{name}/{bucket:02x}" for bucket in range(256)), name]:
                    with suppress(OSError):
                        os.rmdir(below, dir_fd=self._root)
        return removed

    def count_copies(self) -> int:
        """How many copies lie there, of any snapshot, whatever the records say."""
        return sum(1 for name in self._generations() for _ in self._copies_of(name))

    def _generations(self) -> list[str]:
        with self._listing(".") as entries:
            return [e.name for e in entries if _GENERATION.fullmatch(e.name)]

    def _copies_of(self, generation: str) -> Iterator[str]:
        for bucket in range(256):
            with suppress(FileNotFoundError, NotADirectoryError):
                with self._listing(f"{generation}/{bucket:02x}") as entries:
                    names = [e.name for e in entries if not e.is_dir(follow_symlinks=False)]
                paths = (f"{bucket:02x}/{name}" for name in names)
                yield from (path for path in paths if ino_of(path) is not None)

    def copies(self) -> Iterator[list[str]]:
        """The paths, like ``copy_name``, of all that is there, one subdirectory at a time."""
        with self._listing(self._generation_name) as entries:
            buckets = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        yield [name for name, is_directory in buckets.items() if not is_directory]
        for bucket in [name for name, is_directory in buckets.items() if is_directory]:
            with self._listing(f"{self._generation_name}/{bucket}") as entries:
                names = [f"{bucket}/{entry.name}" for entry in entries]
            yield names

    def remove_stranger(self, path: str, *, before_ns: int, unless_size: int | None = None) -> bool:
        """Remove what no record knows from this generation, unless it came after that time.

        ``unless_size``: what a record knows to have so many bytes.
        """
        try:
            status = os.stat(path, dir_fd=self._generation, follow_symlinks=False)
            if status.st_ctime_ns >= before_ns:
                return False
            if stat.S_ISREG(status.st_mode) and status.st_size == unless_size:
                return False
            _remove(self._generation, path)
        except FileNotFoundError:
            return False
        return True

    # -- copies ----------------------------------------------------------------------------

    @property
    def directory(self) -> int:
        """The descriptor of the generation in use: what ``copy_name`` names is beneath it."""
        return self._generation

    def open(self, ino: Ino, identity: Identity) -> int:
        """A descriptor of the committed copy of this version.

        Raises OSError, ESTALE if the copy has another size, and BrokenSeal.
        """
        fd = self._opened_copy(ino)
        try:
            status = os.fstat(fd)
            _require_size(status, identity)
            if self.seals and status.st_mtime_ns != seal(ino, identity):
                raise BrokenSeal
        except BaseException:
            os.close(fd)
            raise
        return fd

    def verify(self, ino: Ino, identity: Identity, digest: bytes) -> None:
        """Compare the copy with its xxh3-128, as the disk has it, and seal it.

        Raises OSError, ESTALE if it is another.
        """
        fd = self._opened_copy(ino)
        try:
            before = os.fstat(fd)
            _require_size(before, identity)
            if _digest(fd) != digest:
                raise OSError(errno.ESTALE, "the copy's digest is not the recorded one")
            points.reached("verify-compared")
            now = os.fstat(fd)
            if (now.st_mtime_ns, now.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
                raise OSError(errno.ESTALE, "the copy was changed while it was looked at")
            if self.seals and now.st_mtime_ns != seal(ino, identity):
                _put_seal(fd, ino, identity)
            points.reached("verify-sealed")
        finally:
            os.close(fd)

    def _opened_copy(self, ino: Ino) -> int:
        # O_NONBLOCK: somebody may have put a fifo in the place of a copy.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(copy_name(ino), flags, dir_fd=self._generation)

    def has(self, ino: Ino) -> bool:
        """Whether a committed copy lies there, whatever the records say."""
        try:
            os.stat(copy_name(ino), dir_fd=self._generation, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open_to_empty(self, ino: Ino) -> int:
        """A descriptor through which ``os.ftruncate`` takes the bytes of a damaged copy from those
        who have it open. Raises OSError."""
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(copy_name(ino), flags, dir_fd=self._generation)

    def remove(self, ino: Ino) -> None:
        with suppress(FileNotFoundError):
            os.unlink(copy_name(ino), dir_fd=self._generation)
        points.reached("eviction-removed")

    def stage(self, ino: Ino) -> Staged:
        """A place to write a copy that nobody sees until it is committed. Raises OSError."""
        fd = self._stage_fd(ino)
        points.reached("copy-staged")
        return Staged(self, ino, fd)

    def _stage_fd(self, ino: Ino) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(f"stage/{ino}.part", flags, 0o600, dir_fd=self._root)

    def _commit(self, ino: Ino) -> None:
        self._into_generation(f"stage/{ino}.part", ino)
        points.reached("copy-renamed")

    def _discard(self, ino: Ino) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"stage/{ino}.part", dir_fd=self._root)

    def _into_generation(self, name: str, ino: Ino) -> None:
        target = copy_name(ino)
        try:
            os.rename(name, target, src_dir_fd=self._root, dst_dir_fd=self._generation)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(target[:2], 0o700, dir_fd=self._generation)
            os.rename(name, target, src_dir_fd=self._root, dst_dir_fd=self._generation)

    # -- the file system below ---------------------------------------------------------------

    def space(self) -> Space:
        told = os.fstatvfs(self._root)
        return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)

    def probe(self) -> None:
        """Write a small stage, read it from the disk, remove it. Raises OSError if that fails."""
        fd = self._opened("stage/probe", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(fd, b"monarch")
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, 8, 0) != b"monarch":
                raise OSError(errno.EIO, "it gives other bytes than were written")
        finally:
            os.close(fd)
            os.unlink("stage/probe", dir_fd=self._root)

    def is_in_place(self) -> bool:
        """Whether PATH leads to what was opened, and that can be read. Raises OSError."""
        try:
            there = os.stat(self.own, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        here = os.fstat(self._root)
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            return False
        with suppress(FileNotFoundError):
            fd = self._opened("tier.json", os.O_RDONLY)
            try:
                os.pread(fd, 1, 0)
            finally:
                os.close(fd)
        return True

    def let_go(self) -> None:
        """Hold nothing of the directory any more: what is asked for is ENOTDIR until ``reopen``."""
        self._lock.release()
        nothing = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
        for fd in (self._root, self._generation):
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)

    def reopen(self) -> None:
        """Open what PATH leads to now, after ``let_go``; the descriptors keep their numbers.

        It is the same tier as before, with the copies that it had, or an empty directory. Raises
        OSError, TierError and LockedError.
        """
        where = os.fspath(self.path)
        os.stat(self.path)
        if self._mounted and not os.path.ismount(self.path):
            raise TierError(f"nothing is mounted at {where!r}")
        there = Tier(self.number, self.name, self.path, owner=self._owner, known_as=self.id)
        try:
            if there.id != self.id:
                raise TierError(
                    f"{where!r} is another tier than before",
                    hint="unmount and mount again to use it",
                )
            there.use(self._generation_name.removeprefix(_PREFIX))
            os.dup2(there._root, self._root, inheritable=False)
            os.dup2(there._generation, self._generation, inheritable=False)
            self.own, self.in_memory, self.seals = there.own, there.in_memory, there.seals
            self._lock, there._lock = there._lock, self._lock
        finally:
            there.close()

    def sync(self) -> None:
        """Wait until the committed copies are on the disk, so that a power cut keeps them."""
        if _LIBC.syncfs(self._root) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _listing(self, name: str) -> _Listing:
        return _Listing(self._root, name)


def keeps_seals(root: int) -> bool:
    """Whether a file in a tier may have any time of modification, to the nanosecond.

    ``root`` is a descriptor of the tier's own directory. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open("stage/probe", flags, 0o600, dir_fd=root)
    try:
        wanted = seal(Ino(1), Identity(0, 0, 0, 0))
        with suppress(OSError):
            os.utime(fd, ns=(wanted, wanted))
        return os.fstat(fd).st_mtime_ns == wanted
    finally:
        os.close(fd)
        os.unlink("stage/probe", dir_fd=root)


class _Listing:
    """``os.scandir`` beneath a descriptor, which it opens and closes."""

    def __init__(self, root: int, name: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(name, flags, dir_fd=root)

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        self._entries = os.scandir(self._fd)
        return self._entries

    def __exit__(self, *_exc: object) -> None:
        self._entries.close()
        os.close(self._fd)


class Staged:
    """A copy under way. Leaving the ``with`` block without ``commit`` removes it."""

    def __init__(self, tier: Tier, ino: Ino, fd: int) -> None:
        self._tier = tier
        self._ino = ino
        self._fd = fd
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._committed = False

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)
        if not self._committed:
            self._tier._discard(self._ino)

    @property
    def size(self) -> int:
        return self._size

    def append(self, data: bytes | memoryview) -> None:
        """The next bytes of the copy. Holes stay holes. Raises OSError, also ENOSPC."""
        self._digest.update(data)
        if len(data) == _CHUNK and data == _ZEROS:
            self._size += _CHUNK
            return
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, self._size)
            self._size += written
            view = view[written:]
        points.reached("copy-half-written")

    def commit(self, identity: Identity) -> bytes:
        """Make the copy visible under its name, sealed as this version; its xxh3-128."""
        if os.fstat(self._fd).st_size != self._size:
            os.ftruncate(self._fd, self._size)
        points.reached("copy-written")
        if self._tier.seals:
            _put_seal(self._fd, self._ino, identity)
        points.reached("copy-sealed")
        self._tier._commit(self._ino)
        self._committed = True
        return self._digest.digest()


def _put_seal(fd: int, ino: Ino, identity: Identity) -> None:
    # Whoever clears a scratch disk of what nobody has used for long looks at the other time.
    os.utime(fd, ns=(time.time_ns(), seal(ino, identity)))


def _require_size(status: os.stat_result, identity: Identity) -> None:
    if status.st_size != identity.size or not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ESTALE, "the copy has another size than its record says")


def _digest(fd: int) -> bytes:
    digest = xxhash.xxh3_128()
    offset = 0
    while part := os.pread(fd, _CHUNK, offset):
        digest.update(part)
        offset += len(part)
    return digest.digest()


def _remove(directory: int, name: str) -> int:
    """Remove a file, or a directory with all that it holds; how many files that were."""
    try:
        os.unlink(name, dir_fd=directory)
        return 1
    except IsADirectoryError:
        with _Listing(directory, name) as entries:
            names = [entry.name for entry in entries]
        removed = sum(_remove(directory, f"{name}/{below}") for below in names)
        os.rmdir(name, dir_fd=directory)
        return removed


def _open_private(path: Path, owner: Owner) -> tuple[Path, int]:
    """The owner's directory in PATH/monarch and a descriptor of it: made if missing, and proved to
    be ours. PATH stays as it is. Raises TierError, LockedError."""
    try:
        parent = open_directory(path)
        with ExitStack() as opened:
            opened.callback(os.close, parent)
            # A directory of that name may be there for another reason: it stays as it is, too.
            shared = _made(parent, PRIVATE)
            opened.callback(os.close, shared)
            _require_ours(shared, PRIVATE, path)
            name = _own_name(shared, owner)
            own = _made(shared, name)
            with ExitStack() as failed:
                failed.callback(os.close, own)
                _require_ours(own, name, path)
                os.fchmod(own, 0o700)
                _take_over(shared, own, path, owner)
                failed.pop_all()
            return path / PRIVATE / name, own
    except OSError as error:
        raise TierError(
            f"tier {os.fspath(path)!r}: {error.strerror}",
            hint="name a directory on a local disk that you may write",
        ) from error


def _made(parent: int, name: str) -> int:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(name, flags, dir_fd=parent)


def _require_ours(fd: int, name: str, path: Path) -> None:
    """Raises TierError for a directory of another user, or one that others may write."""
    status = os.fstat(fd)
    what = f"tier {os.fspath(path)!r}: its directory {name!r}"
    if status.st_uid != os.geteuid():
        raise TierError(f"{what} belongs to uid {status.st_uid}", hint="choose another directory")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise TierError(
            f"{what} may be written by other users (mode {mode:04o})",
            hint="choose another directory",
        )


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _take_over(shared: int, own: int, path: Path, owner: Owner) -> None:
    """Move what an earlier version has kept in PATH/monarch itself, if it is of this mount.

    The name of the tier goes last: a mount that was killed before goes on moving. Raises TierError,
    LockedError if a daemon of that version uses it.
    """
    try:
        with open(os.open("tier.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=shared), "rb") as file:
            identity = _id_of(file.read(), path)
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        identity = ""
    lock = Lock(shared, f"tier {os.fspath(path)!r}", owner.mountpoint)
    try:
        if identity not in owner.known or _exists(own, "tier.json"):
            log.warning(
                "tier %s holds copies of another mount, made by an earlier version of Monarch: they"
                " stay until that is mounted again, or until `monarch evict --tier` removes them",
                path,
            )
            return
        names = [name for name in os.listdir(shared) if _GENERATION.fullmatch(name)]
        for name in [*names, "stage", "tier.json"]:
            with suppress(FileNotFoundError):
                os.rename(name, name, src_dir_fd=shared, dst_dir_fd=own)
        os.unlink("lock", dir_fd=shared)
        log.info("tier %s: the copies of the earlier version are in a directory of the mount", path)
    finally:
        lock.release()
