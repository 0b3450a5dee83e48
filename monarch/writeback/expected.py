"""The entry that the mount expects at the source, compared with the present one.

Other hosts and users may change the source at any time. An entry that differs from the expected one
is theirs, and is neither replaced nor removed.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace
from os import stat_result

from monarch.types import ANY_SIZE, Identity

# The precision with which file systems keep times: NTFS 100 ns, many others microseconds or
# seconds, FAT 2 s.
_TIME_UNITS_NS = (1, 100, 1000, 10**6, 10**9, 2 * 10**9)
# The ctime in the identity of a directory of others, if a directory of that name was created on the
# mount, too. No source has such a ctime, but some have 0 for all entries.
_SHARED_NS = -1


@dataclass(frozen=True, slots=True)
class Expected:
    """The entry that a change may replace or remove at the source.

    ``seq`` is the sequence number of the change. ``known`` is the last known identity of the entry
    at its path; ``as_set``: the same with each time that may have been set there without a mark.
    ``ours``: staged files that an earlier mount may have renamed to the path without a record. They
    are not identified by an inode number alone, since the source reuses numbers. ``over``: entries
    that renames on the mount have replaced. ``is_made``: the file was created on the mount, so its
    owner and mode at the source are those that the kernel allowed. ``was_there``: the source has
    had the file under its name; if that is another file now, others have changed it. ``longest``:
    the file may have been grown in place, up to this many bytes. ``is_file``: ``known`` is the
    identity of a regular file.
    """

    seq: int = 0
    known: Identity | None = None
    as_set: tuple[Identity, ...] = ()
    ours: frozenset[Identity] = frozenset()
    over: tuple[Identity, ...] = ()
    is_made: bool = False
    was_there: bool = False
    longest: int = 0
    is_file: bool = False

    def is_it(self, found: stat_result, *, strict: bool, version: bool = False) -> bool:
        """Whether ``found`` may be replaced; with ``version`` only in the known version.

        The source reuses an inode number as soon as its file is removed, so the number alone
        identifies no version.
        """
        if not strict or self.is_staged(found):
            return True
        known = [] if self.known is None else [self.known, *self.as_set]
        if self.is_file and not stat.S_ISREG(found.st_mode):
            known = []
        return any(
            found.st_ino == each.source_ino and (not version or _is_version(found, each))
            for each in (*self.over, *known)
        )

    def is_staged(self, found: stat_result) -> bool:
        """Whether ``found`` is one of ``ours``."""
        return any(
            found.st_ino == each.source_ino
            and (
                self._is_as_long(found)
                if each.size == ANY_SIZE
                else (found.st_size == each.size and is_time(found.st_mtime_ns, each.mtime_ns))
            )
            for each in self.ours
        )

    def _is_as_long(self, found: stat_result) -> bool:
        """Whether the bytes of ``found`` behind the known ones may have been appended by an earlier
        mount."""
        known = self.known
        if known is None or found.st_ino != known.source_ino or not self.longest:
            return True
        return known.size <= found.st_size <= max(known.size, self.longest)

    def is_same(self, found: stat_result, *, version: bool = False) -> bool:
        """Whether ``found`` may be the expected entry, with ``version`` in its known version.

        An entry without a known identity may be it, unless it was created on the mount and never
        drained.
        """
        is_unknown = self.known is None and not (self.ours or self.over or self.is_made)
        return is_unknown or self.is_it(found, strict=True, version=version)


def _is_version(found: stat_result, known: Identity) -> bool:
    """Whether an entry with a known number is unchanged, as far as its type shows."""
    if stat.S_ISDIR(found.st_mode):
        # Each entry that is made in a directory changes its time.
        return True
    if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
        return (found.st_size, found.st_mtime_ns) == (known.size, known.mtime_ns)
    # Each process that writes to a fifo changes its time.
    return found.st_size == known.size


def is_time(found_ns: int, set_ns: int) -> bool:
    """Whether ``found_ns`` is the time that was set, in the precision of the source's file
    system."""
    return any(found_ns == set_ns - set_ns % unit_ns for unit_ns in _TIME_UNITS_NS)


def shared(identity: Identity) -> Identity:
    """The identity of a directory of others with the name of one that was created on the mount."""
    return replace(identity, ctime_ns=_SHARED_NS)


def is_shared(identity: Identity) -> bool:
    return identity.ctime_ns == _SHARED_NS
