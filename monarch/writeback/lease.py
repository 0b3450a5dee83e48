"""Leases at the source: a mount that absorbs writes sees other mounts that absorb the same paths.

    SOURCE/.monarch-leases.part/TOKEN      one file for each mount that absorbs: its holder, as JSON

TOKEN is the token of the mount's journal, so the next mount with the same journal takes over the
lease at once. A mount renews its lease every 15 seconds by setting the file's times. A lease has
expired if it was not renewed for 60 seconds, or if its holder is a process of this machine that has
ended. A mount that begins knows the age of a lease by the clock of the source's file system only.
Later it sees the renewals, and its own clock tells the age: the clock of the source may jump.

Where the daemon may not write at the root of the source, it puts the lease of each pattern into the
nearest directory, at or above the paths of the pattern, in which it may write. Two mounts that
write there see each other, and each sees a lease at the root. The mount with a lease at the root
does not see their leases.

Any user with permission to write there may have made these files. They are read with limits on
size and number, and never through a symbolic link. Their only effect is that a mount is refused,
that a warning is logged, or that the files of a node count as not lost (``is_in_force``).

Every call may wait for the source: call none on the event loop.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from monarch.errors import LockedError
from monarch.posix.files import closing_fd, status_at
from monarch.posix.openat2 import open_beneath
from monarch.text import KiB, MiB, errno_words
from monarch.tiers.source import Source
from monarch.writeback.journal_found import boot_now

log = logging.getLogger(__name__)

DIRECTORY = b".monarch-leases.part"
RENEW_S = 15.0
# The age at which a lease that was not renewed expires, in seconds.
STALE_S = 60.0
# The largest file that is read as a lease, in bytes, and the most files read in a directory.
_LARGEST = 64 * KiB
_MOST = 4096
# The most bytes of leases that are read in a directory; the smallest leases are read first.
_MOST_BYTES = 4 * MiB
# A part of a pattern is compared if it has at most so many characters, as a name has, and so many
# brackets: the time of a comparison grows with the square of their number.
_LONGEST_PART = 255
# The most comparisons of two patterns at a time. A lease behind them counts as one for the same
# paths.
_MOST_COMPARED = 32 * 1024
_MOST_BRACKETS = 8
# The most characters of a text and the most patterns of a lease that a message shows.
_SHOWN = 255
_SHOWN_PATTERNS = 4
# The errors in directories where the daemon may not create files.
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FLAGS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_FLAGS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = ".new"
# What a lease of another version of Monarch may lack: then it counts for all paths.
_MISSING: dict[str, Any] = {
    "node": "?",
    "pid": 0,
    "mountpoint": "?",
    "patterns": ("**",),
    "since_ns": 0,
    "boot": "",
    "namespace": 0,
    "started": 0,
    "undrained": False,
}
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease, as read from its file.

    ``since_ns`` is the time at which the lease was made, by the clock of the source's file system.
    ``undrained``: the mount has ended, and its tier holds changes that are not at the source.
    ``renewed_ns`` is the time of the last renewal, by that clock. ``age_s`` is the time between it
    and now, in seconds; a renewal in the future is one before the clock was set back. ``uid`` is
    the owner of the file.
    """

    token: str
    node: str
    pid: int
    mountpoint: str
    patterns: tuple[str, ...]
    since_ns: int
    boot: str = ""
    namespace: int = 0
    started: int = 0
    undrained: bool = False
    renewed_ns: int = 0
    age_s: float = 0.0
    uid: int = 0

    def words(self) -> str:
        """The holder's mount, node, process and patterns, for a message."""
        paths = ", ".join(map(_shown, self.patterns[:_SHOWN_PATTERNS])) or "**"
        if len(self.patterns) > _SHOWN_PATTERNS:
            paths += ", ..."
        return f"{self.mountpoint} on node {self.node} (pid {self.pid}, paths {paths})"

    @property
    def is_in_force(self) -> bool:
        return not self.undrained and self.age_s <= STALE_S and not self._is_dead()

    def is_before(self, other: Holder) -> bool:
        """Whether this lease was made before ``other``, whose mount begins now. A lease from the
        future was made before the clock was set back."""
        if self.since_ns > other.since_ns + int(STALE_S * 1e9):
            return True
        return (self.since_ns, self.token) < (other.since_ns, other.token)

    def _is_dead(self) -> bool:
        """Whether the holder is a process of this machine that has ended."""
        if (self.boot, self.namespace) != (boot_now(), _namespaces()):
            return False
        return _started(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class _Renewal:
    """The last renewal of another lease: its time in the file, and when it was, by the clock of
    this machine. ``looked_s``: when the file was last read."""

    renewed_ns: int
    at_s: float
    looked_s: float


def overlap(patterns: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two sets of patterns may match the same path. True also if that is not certain."""
    return any(_may_meet(_parts(one), _parts(other)) for one in patterns for other in others)


def _parts(pattern: str) -> list[str]:
    return pattern.rstrip("/").split("/")


def _may_meet(one: list[str], other: list[str]) -> bool:
    for part, opposite in zip(one, other, strict=False):
        if "**" in (part, opposite):
            return True
        if _WILD & set(part) and _WILD & set(opposite):
            continue
        if _is_costly(part) or _is_costly(opposite):
            continue
        if not (fnmatch.fnmatchcase(part, opposite) or fnmatch.fnmatchcase(opposite, part)):
            return False
    # The shorter pattern covers everything beneath the paths that it matches.
    return True


def _is_costly(part: str) -> bool:
    return len(part) > _LONGEST_PART or part.count("[") > _MOST_BRACKETS


def begins_with(pattern: str) -> str:
    """The longest path that begins all paths of a pattern, relative to the root; "" is the root."""
    fixed = []
    for part in _parts(pattern):
        if _WILD & set(part):
            break
        fixed.append(part)
    return "/".join(fixed)


def _upwards(pattern: str) -> Iterator[bytes]:
    """The directory that begins all paths of a pattern, and those above, without the root."""
    path = os.fsencode(begins_with(pattern))
    while path:
        yield path
        path = path.rpartition(b"/")[0]


@contextmanager
def prepared(source: Source) -> Iterator[None]:
    """Makes the directory of the leases; if the mount is refused meanwhile, it is removed again.

    Read the names of the source in this context: making the directory later would change the root.
    Errors are ignored; ``Lease.acquire`` reports them.
    """
    is_new = False
    with suppress(OSError):
        is_new = source.at_root(_make_leases)
    try:
        yield
    except BaseException:
        if is_new:
            # Another mount may have put a lease there.
            with suppress(OSError):
                source.at_root(_remove_leases)
        raise


class Lease:
    """The lease of one mount, made by ``acquire``.

    ``others`` are the holders of leases in force for the same paths, at the last read. ``trouble``
    is why the lease cannot be put or renewed, empty if it can. ``was_lost``: the lease was once
    removed, or not renewed in time, so another mount may have begun to write.
    """

    def __init__(self, source: Source, me: Holder) -> None:
        self._source = source
        self._me = me
        self._directories: tuple[bytes, ...] = ()
        # The time of the last renewal, by the clock of the source's file system, and by that of
        # this machine.
        self._now_ns = 0
        self._renewed_s = -math.inf
        # The renewals that this mount has seen, by the inode number of the directory and the token.
        self._renewals: dict[tuple[int, str], _Renewal] = {}
        self._is_released = False
        self.others: tuple[Holder, ...] = ()
        self.trouble = ""
        self.was_lost = False

    @classmethod
    def acquire(
        cls, source: Source, *, token: str, patterns: Sequence[str], mountpoint: str, shared: bool
    ) -> Lease:
        """Puts the lease of a mount that absorbs ``patterns``; returns it.

        Raises LockedError if another mount has an earlier lease in force for some of the same
        paths, unless ``shared``. If no lease can be put, that is logged and stands in ``trouble``.
        """
        me = Holder(
            token=token,
            node=os.uname().nodename,
            pid=os.getpid(),
            mountpoint=mountpoint,
            patterns=tuple(patterns),
            since_ns=0,
            boot=boot_now(),
            namespace=_namespaces(),
            started=_started(os.getpid()),
        )
        lease = cls(source, me)
        try:
            lease._take()
        except OSError as error:
            lease.trouble = errno_words(error.errno)
            log.warning(
                "source: no lease can be put there (%s): another mount that writes the same paths"
                " will not be seen",
                lease.trouble,
            )
            return lease
        holders = lease._read_others()
        for ended in holders:
            if ended.undrained:
                log.warning(
                    "%s has ended with changes that are not at the source; they are drained when it"
                    " is mounted again; of files that were changed meanwhile both versions are"
                    " kept",
                    ended.words(),
                )
        lease.others = tuple(holder for holder in holders if holder.is_in_force)
        earlier = [holder for holder in lease.others if holder.is_before(lease._me)]
        if earlier and not shared:
            lease.release()
            raise LockedError(
                f"source {os.fsdecode(source.path)!r} is written through another mount:"
                f" {earlier[0].words()}",
                hint="unmount that one, or name other paths with `-o absorb=PATTERN`; if each"
                " writes files of its own, set writeback.shared; the lease of a dead node ends"
                f" {STALE_S:.0f} s after its last renewal",
            )
        for holder in lease.others:
            log.warning("the same paths are written through another mount: %s", holder.words())
        return lease

    # -- while it is held ----------------------------------------------------------------------

    def renew(self) -> None:
        """Renews the lease, puts it again if it was removed, and reads the leases of others. Does
        nothing after ``release``."""
        if self._is_released:
            return
        try:
            if self._directories:
                self._renew()
            else:
                self._take()
            self.others = tuple(holder for holder in self._read_others() if holder.is_in_force)
        except OSError as error:
            self.trouble = errno_words(error.errno)
        else:
            self.trouble = ""

    def release(self, *, undrained: bool = False) -> None:
        """Removes the lease; with ``undrained`` a file stays that says so."""
        self._is_released = True
        for path in self._directories:
            with suppress(OSError):
                with closing_fd(self._opened(path)) as directory:
                    if undrained:
                        _write(directory, replace(self._me, undrained=True))
                    else:
                        os.unlink(self._me.token, dir_fd=directory)
        self._directories = ()

    def is_in_force(self, token: str) -> bool:
        """Whether the mount with this token has a lease in force. Raises OSError if that is not
        known, also because this mount never had a lease: its time is compared."""
        if self._renewed_s == -math.inf:
            raise OSError(errno.ENOLCK, "the time at the source is not known")
        # The clock there continues if this mount cannot renew its lease, or has released it.
        now_ns = self._now_ns + int((time.monotonic() - self._renewed_s) * 1e9)
        # The lease is read by its name: it counts also behind many leases of others.
        found = (self._read(directory, token, now_ns) for directory in self._opened_all())
        return any(holder is not None and holder.is_in_force for holder in found)

    # -- internal ------------------------------------------------------------------------------

    def _take(self) -> None:
        """Puts the lease. Raises OSError if no directory allows it."""
        try:
            self._put(b"")
            self._directories = (b"",)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            nearest: set[bytes] = set()
            for pattern in self._me.patterns:
                for path in _upwards(pattern):
                    with suppress(OSError):
                        self._put(path)
                        nearest.add(path)
                        break
            if not nearest:
                raise
            self._directories = tuple(sorted(nearest))

    def _put(self, path: bytes) -> None:
        with closing_fd(self._opened(path, make=True)) as directory:
            self._renewed_at(_write(directory, self._me))
            if not self._me.since_ns:
                self._me = replace(self._me, since_ns=self._now_ns)
                _write(directory, self._me)

    def _renewed_at(self, now_ns: int) -> None:
        self._now_ns, self._renewed_s = now_ns, time.monotonic()

    def _opened(self, path: bytes, *, make: bool = False) -> int:
        """A descriptor of the directory of the leases in ``path``. Raises OSError."""
        return self._source.at_root(_open_leases, path, make)

    def _renew(self) -> None:
        """Renews the lease in each of its directories. Raises OSError."""
        for path in self._directories:
            try:
                directory = self._opened(path, make=True)
            except FileNotFoundError:
                # The directory of the pattern's paths was removed.
                continue
            with closing_fd(directory):
                self._renew_in(directory)

    def _renew_in(self, directory: int) -> None:
        name, before = self._me.token, None
        with suppress(OSError):
            before = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.utime(name, dir_fd=directory, follow_symlinks=False)
            renewed = os.stat(name, dir_fd=directory, follow_symlinks=False)
            self._renewed_at(renewed.st_mtime_ns)
        found = _read(directory, name, self._now_ns)
        is_ours = found is not None and (found.pid, found.since_ns) == (
            self._me.pid,
            self._me.since_ns,
        )
        if is_ours and before is not None and self._now_ns - before.st_mtime_ns <= STALE_S * 1e9:
            return
        if not self.was_lost:
            log.warning(
                "source: the lease was gone, or not renewed for %.0f s: another mount may have"
                " written the same paths meanwhile; it is made again",
                STALE_S,
            )
        self.was_lost = True
        self._renewed_at(_write(directory, self._me))

    def _read_others(self) -> list[Holder]:
        """The holders of other leases for the same paths, in force or not. Raises OSError."""
        found: dict[str, Holder] = {}
        compared = 0
        for directory in self._opened_all():
            for name in _smallest(directory):
                if name == self._me.token or name.endswith(_NEW):
                    continue
                holder = self._read(directory, name, self._now_ns)
                if holder is None:
                    continue
                compared += len(self._me.patterns) * len(holder.patterns)
                if compared > _MOST_COMPARED or overlap(self._me.patterns, holder.patterns):
                    found[name] = holder
        return sorted(found.values(), key=lambda holder: (holder.since_ns, holder.token))

    def _read(self, directory: int, name: str, now_ns: int) -> Holder | None:
        """As the function. The age of a lease that was read before is by this machine's clock."""
        holder = _read(directory, name, now_ns)
        if holder is None:
            return None
        key, now_s = (os.fstat(directory).st_ino, name), time.monotonic()
        at_s, before = now_s - holder.age_s, self._renewals.pop(key, None)
        if before is not None:
            is_same = before.renewed_ns == holder.renewed_ns
            at_s = before.at_s if is_same else max(at_s, before.looked_s)
        self._renewals[key] = _Renewal(holder.renewed_ns, at_s, now_s)
        while len(self._renewals) > _MOST:
            del self._renewals[next(iter(self._renewals))]
        return replace(holder, age_s=now_s - at_s)

    def _opened_all(self) -> Iterator[int]:
        """Descriptors of the directories in which others may have put leases for the same paths,
        each open until the next one is. Raises OSError."""
        for path in sorted({b"", *chain.from_iterable(map(_upwards, self._me.patterns))}):
            try:
                directory = self._opened(path)
            except OSError as error:
                if path in self._directories and error.errno != errno.ENOENT:
                    raise
                continue
            with closing_fd(directory):
                yield directory


def _smallest(directory: int) -> list[str]:
    """The names of the leases to be read, the smallest first. Raises OSError."""
    sizes: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in islice(entries, _MOST):
            with suppress(OSError):
                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    names = sorted(sizes, key=sizes.__getitem__)
    totals = accumulate(sizes[name] for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total <= _MOST_BYTES]


def _open_leases(root: int, path: bytes, make: bool) -> int:
    with closing_fd(open_beneath(root, path, _FLAGS_DIRECTORY)) as above:
        try:
            return os.open(DIRECTORY, _FLAGS_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o700, dir_fd=above)
            _open_to_the_same(above)
        return os.open(DIRECTORY, _FLAGS_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


def _make_leases(root: int) -> bool:
    """Makes the directory of the leases in the root; returns whether there was none."""
    is_new = status_at(root, DIRECTORY) is None
    os.close(_open_leases(root, b"", True))
    return is_new


def _remove_leases(root: int) -> None:
    os.rmdir(DIRECTORY, dir_fd=root)


def _open_to_the_same(above: int) -> None:
    """Lets the users who may create files in ``above`` put leases, but not change others'."""
    like = os.fstat(above)
    with closing_fd(os.open(DIRECTORY, _FLAGS_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)) as fd:
        with suppress(OSError):
            os.fchown(fd, -1, like.st_gid)
        os.fchmod(fd, stat.S_IMODE(like.st_mode) & 0o777 | 0o700 | stat.S_ISVTX)


def _write(directory: int, holder: Holder) -> int:
    """Writes the file of a lease; returns its time of modification. Raises OSError."""
    staged = holder.token + _NEW
    # The name, age and owner are those of the file.
    fields = asdict(holder)
    for name in ("token", "renewed_ns", "age_s", "uid"):
        del fields[name]
    with suppress(FileNotFoundError):
        os.unlink(staged, dir_fd=directory)
    with closing_fd(os.open(staged, _FLAGS_NEW, 0o644, dir_fd=directory)) as fd:
        os.write(fd, json.dumps({"monarch": 1} | fields).encode("ascii"))
        os.fchmod(fd, 0o644)
        made_ns = os.fstat(fd).st_mtime_ns
    os.rename(staged, holder.token, src_dir_fd=directory, dst_dir_fd=directory)
    return made_ns


def _read(directory: int, name: str, now_ns: int) -> Holder | None:
    """The lease of that name; None if the file is not a valid lease or cannot be read."""
    try:
        with closing_fd(os.open(name, _FLAGS_READ, dir_fd=directory)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                return None
            raw = _MISSING | json.loads(os.read(fd, _LARGEST))
        if "monarch" not in raw:
            return None
        return Holder(
            token=name,
            node=_shown(raw["node"]),
            pid=int(raw["pid"]),
            mountpoint=_shown(raw["mountpoint"]),
            patterns=tuple(str(pattern) for pattern in raw["patterns"]),
            since_ns=int(raw["since_ns"]),
            boot=str(raw["boot"]),
            namespace=int(raw["namespace"]),
            started=int(raw["started"]),
            undrained=bool(raw["undrained"]),
            renewed_ns=status.st_mtime_ns,
            age_s=abs(now_ns - status.st_mtime_ns) / 1e9,
            uid=status.st_uid,
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _shown(value: object) -> str:
    """A value from another user's file as a text that is safe to show in a terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(value)[:_SHOWN])


def _namespaces() -> int:
    """The namespaces of process numbers and of times, which shifts start times, as one number."""
    number = 0
    for kind in ("pid", "time"):
        with suppress(OSError):
            number = number << 32 | os.stat(f"/proc/self/ns/{kind}").st_ino
    return number


def _started(pid: int) -> int:
    """The start time of a process, in clock ticks since boot; 0 if it is none, or a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
    fields = line.rpartition(b")")[2].split()
    # The first thread of a killed process is a zombie while other threads still wait for the
    # source.
    if fields[0] in (b"Z", b"X") and threads <= 1:
        return 0
    return int(fields[19])
