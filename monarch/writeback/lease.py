"""Leases at the source: a mount that absorbs writes sees whether another one absorbs them too.

    SOURCE/.monarch-leases.part/TOKEN      one file for each mount that absorbs: who it is, as JSON

TOKEN is that of the mount's journal, so the next mount with the same journal takes its own lease
over at once. A holder renews its lease every 15 seconds by setting the file's times; a lease that
was not renewed for 60 seconds, by the clock of the source's file system, is not in force any more.
One of this machine whose process is gone is not in force either.

Where the daemon may not write at the root of the source, the lease lies in the nearest directory at
or above the paths of each pattern that takes it. Two mounts that write there see each other, and
each sees a lease at the root; the root's mount does not see theirs.

The files are what anybody who may write there has put there. They are read with limits, never
through a symbolic link, and decide about nothing but whether a mount is refused or told.

Every call may wait for the source: none belongs on the event loop.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch.errors import LockedError
from monarch.posix.openat2 import open_beneath
from monarch.text import errno_words
from monarch.tiers.source import Source
from monarch.units import KiB

log = logging.getLogger(__name__)

DIRECTORY = b".monarch-leases.part"
RENEW_S = 15.0
# A lease that was not renewed for so long is not in force any more. Seconds.
STALE_S = 60.0
# The largest file that is read as a lease, in bytes, and how many are looked at in a directory.
_LARGEST = 64 * KiB
_MOST = 4096
# Of the text of a lease, characters and patterns that a message shows.
_SHOWN = 255
_SHOWN_PATTERNS = 4
# What a source answers where the daemon may make nothing.
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FLAGS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_FLAGS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = ".new"
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as its file tells. ``since_ns``: when it was made, by the clock of the
    source's file system. ``undrained``: the mount has ended, and its tier holds changes that the
    source has not got. ``age_s``: how long ago the lease was renewed, in seconds. ``uid`` owns the
    file.
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
    age_s: float = 0.0
    uid: int = 0

    def words(self) -> str:
        """Who it is, for a message."""
        paths = ", ".join(map(_shown, self.patterns[:_SHOWN_PATTERNS])) or "**"
        if len(self.patterns) > _SHOWN_PATTERNS:
            paths += ", ..."
        return f"{self.mountpoint} on node {self.node} (pid {self.pid}, paths {paths})"

    @property
    def is_in_force(self) -> bool:
        return not self.undrained and self.age_s <= STALE_S and not self._is_dead()

    def _is_dead(self) -> bool:
        """Whether it is a process of this machine that has ended."""
        if (self.boot, self.namespace) != (_boot(), _pid_namespace()):
            return False
        return _started(self.pid) != self.started


def overlap(patterns: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two sets of patterns may name the same path. True where that is not certain."""
    return any(_may_meet(_parts(one), _parts(other)) for one in patterns for other in others)


def _parts(pattern: str) -> list[str]:
    return pattern.rstrip("/").split("/")


def _may_meet(one: list[str], other: list[str]) -> bool:
    for part, opposite in zip(one, other, strict=False):
        if "**" in (part, opposite):
            return True
        if _WILD & set(part) and _WILD & set(opposite):
            continue
        if not (fnmatch.fnmatchcase(part, opposite) or fnmatch.fnmatchcase(opposite, part)):
            return False
    # What a pattern names is covered with all beneath it.
    return True


def begins_with(pattern: str) -> str:
    """The directory that all paths of a pattern are in or at, relative to the root; "" is that."""
    fixed = []
    for part in _parts(pattern):
        if _WILD & set(part):
            break
        fixed.append(part)
    return "/".join(fixed)


def prepare(source: Source) -> None:
    """Make the directory of the leases before the names of the source are read, whose root would
    be seen to have changed else. That it cannot be made is found out by ``Lease.acquire``."""
    with suppress(OSError):
        os.close(source.at_root(_open_leases, b"", True))


class Lease:
    """One mount's lease; ``acquire`` makes it.

    ``others``: who else absorbs writes for the same paths, as of the last look. ``trouble``: why it
    cannot be held or renewed, empty if it can. ``was_lost``: it was once gone, or not renewed in
    time, so another mount may have begun to write meanwhile.
    """

    def __init__(self, source: Source, me: Holder) -> None:
        self._source = source
        self._me = me
        self._directories: tuple[bytes, ...] = ()
        # By the clock of the source's file system, as of the last renewal.
        self._now_ns = 0
        self.others: tuple[Holder, ...] = ()
        self.trouble = ""
        self.was_lost = False

    @classmethod
    def acquire(
        cls, source: Source, *, token: str, patterns: Sequence[str], mountpoint: str, shared: bool
    ) -> Lease:
        """Take the lease of a mount that absorbs ``patterns``.

        Raises LockedError if another mount has one in force for paths of these, unless ``shared``.
        A source that takes no lease is told in the log.
        """
        me = Holder(
            token=token,
            node=os.uname().nodename,
            pid=os.getpid(),
            mountpoint=mountpoint,
            patterns=tuple(patterns),
            since_ns=0,
            boot=_boot(),
            namespace=_pid_namespace(),
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
        holders = lease._look()
        for left in holders:
            if left.undrained:
                log.warning(
                    "%s has ended with changes that are not at the source; they come when it is"
                    " mounted again, and what has changed by then is kept beside them",
                    left.words(),
                )
        lease.others = tuple(holder for holder in holders if holder.is_in_force)
        earlier = [
            holder
            for holder in lease.others
            if (holder.since_ns, holder.token) < (lease._me.since_ns, token)
        ]
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
        """Renew it, made again if it is gone, and look who else has one."""
        try:
            if self._directories:
                self._renew()
            else:
                self._take()
            self.others = tuple(holder for holder in self._look() if holder.is_in_force)
        except OSError as error:
            self.trouble = errno_words(error.errno)
        else:
            self.trouble = ""

    def release(self, *, undrained: bool = False) -> None:
        """Give it up; with ``undrained`` a note stays that this mount has more to bring."""
        for path in self._directories:
            with suppress(OSError):
                directory = self._opened(path)
                try:
                    if undrained:
                        _write(directory, replace(self._me, undrained=True))
                    else:
                        os.unlink(self._me.token, dir_fd=directory)
                finally:
                    os.close(directory)
        self._directories = ()

    # -- how -----------------------------------------------------------------------------------

    def _take(self) -> None:
        """Raises OSError if it can be put nowhere."""
        try:
            self._put(b"")
            self._directories = (b"",)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            taken = {path for pattern in self._me.patterns if (path := self._put_near(pattern))}
            if not taken:
                raise
            self._directories = tuple(sorted(taken))

    def _put_near(self, pattern: str) -> bytes:
        """Put it into the nearest directory at or above the paths of a pattern that takes it; which
        one, empty if there is none below the root."""
        path = os.fsencode(begins_with(pattern))
        while path:
            try:
                self._put(path)
            except OSError:
                path = path.rpartition(b"/")[0]
            else:
                break
        return path

    def _put(self, path: bytes) -> None:
        directory = self._opened(path, make=True)
        try:
            self._now_ns = _write(directory, self._me)
            if not self._me.since_ns:
                self._me = replace(self._me, since_ns=self._now_ns)
                _write(directory, self._me)
        finally:
            os.close(directory)

    def _opened(self, path: bytes, *, make: bool = False) -> int:
        """The directory of the leases beneath ``path``. Raises OSError."""
        return self._source.at_root(_open_leases, path, make)

    def _renew(self) -> None:
        """Raises OSError."""
        for path in self._directories:
            try:
                directory = self._opened(path, make=True)
            except FileNotFoundError:
                # The directory that it was for is gone.
                continue
            try:
                self._renew_in(directory)
            finally:
                os.close(directory)

    def _renew_in(self, directory: int) -> None:
        name, before = self._me.token, None
        with suppress(OSError):
            before = os.stat(name, dir_fd=directory, follow_symlinks=False)
            os.utime(name, dir_fd=directory, follow_symlinks=False)
            self._now_ns = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns
        told = _read(directory, name, self._now_ns)
        is_ours = told is not None and (told.pid, told.since_ns) == (
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
        self._now_ns = _write(directory, self._me)

    def _look(self) -> list[Holder]:
        """Who else has a lease for some of the same paths, in force or not. Raises OSError."""
        found: dict[str, Holder] = {}
        for path in self._seen_from():
            try:
                directory = self._opened(path)
            except OSError as error:
                if path in self._directories and error.errno != errno.ENOENT:
                    raise
                continue
            try:
                for name in _names(directory):
                    if name == self._me.token or name.endswith(_NEW):
                        continue
                    holder = _read(directory, name, self._now_ns)
                    if holder is not None and overlap(self._me.patterns, holder.patterns):
                        found[name] = holder
            finally:
                os.close(directory)
        return sorted(found.values(), key=lambda holder: (holder.since_ns, holder.token))

    def _seen_from(self) -> Iterator[bytes]:
        """Where leases of others for the same paths may lie."""
        seen = {b""}
        for pattern in self._me.patterns:
            path = os.fsencode(begins_with(pattern))
            while path:
                seen.add(path)
                path = path.rpartition(b"/")[0]
        return iter(sorted(seen))


def _open_leases(root: int, path: bytes, make: bool) -> int:
    above = open_beneath(root, path, _FLAGS_DIRECTORY)
    try:
        try:
            return os.open(DIRECTORY, _FLAGS_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o700, dir_fd=above)
            _open_to_the_same(above)
        return os.open(DIRECTORY, _FLAGS_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)


def _open_to_the_same(above: int) -> None:
    """Whoever may make names in the directory above may have a lease; nobody another's."""
    like = os.fstat(above)
    fd = os.open(DIRECTORY, _FLAGS_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        with suppress(OSError):
            os.fchown(fd, -1, like.st_gid)
        os.fchmod(fd, stat.S_IMODE(like.st_mode) & 0o777 | 0o700 | stat.S_ISVTX)
    finally:
        os.close(fd)


def _write(directory: int, holder: Holder) -> int:
    """Put a lease in its place; the time that its file got. Raises OSError."""
    staged = holder.token + _NEW
    with suppress(FileNotFoundError):
        os.unlink(staged, dir_fd=directory)
    fd = os.open(staged, _FLAGS_NEW, 0o644, dir_fd=directory)
    try:
        os.write(fd, json.dumps(_record(holder)).encode("ascii"))
        os.fchmod(fd, 0o644)
        made_ns = os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
    os.rename(staged, holder.token, src_dir_fd=directory, dst_dir_fd=directory)
    return made_ns


def _record(holder: Holder) -> dict[str, Any]:
    return {
        "monarch": 1,
        "node": holder.node,
        "boot": holder.boot,
        "namespace": holder.namespace,
        "pid": holder.pid,
        "started": holder.started,
        "mountpoint": holder.mountpoint,
        "patterns": list(holder.patterns),
        "since_ns": holder.since_ns,
        "undrained": holder.undrained,
    }


def _read(directory: int, name: str, now_ns: int) -> Holder | None:
    """The lease of that name; None if it is none, or not to be read as one."""
    try:
        fd = os.open(name, _FLAGS_READ, dir_fd=directory)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return None
        raw = json.loads(os.read(fd, _LARGEST))
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
            age_s=max(0.0, (now_ns - status.st_mtime_ns) / 1e9),
            uid=status.st_uid,
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    finally:
        os.close(fd)


def _shown(told: object) -> str:
    """What a stranger's file tells, so that it can do no harm in a terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(told)[:_SHOWN])


def _names(directory: int) -> list[str]:
    names = []
    with os.scandir(directory) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) == _MOST:
                break
    return names


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_namespace() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _started(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 if there is none of that number, or
    if it has ended and only waits for its parent's look."""
    try:
        told = Path(f"/proc/{pid}/stat").read_bytes()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
    fields = told.rpartition(b")")[2].split()
    # The first thread of a killed process has ended while others still wait for the source.
    if fields[0] in (b"Z", b"X") and threads <= 1:
        return 0
    return int(fields[19])
