"""The entry that the mount expects at the source, compared with the present one.

Other hosts and users may change the source at any time. An entry that differs from the expected one
is theirs, and is neither replaced nor removed: that is a conflict, which is reported to the user
(``SourceLog``), as are attributes that the source does not support.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import deque
from dataclasses import dataclass, replace
from os import stat_result

from monarch.posix.credentials import Credentials
from monarch.text import errno_words
from monarch.types import ANY_SIZE, Identity, kept_ns

log = logging.getLogger(__name__)

# The precision with which file systems keep times: NTFS 100 ns, many others microseconds or
# seconds, FAT 2 s.
_TIME_UNITS_NS = (1, 100, 1000, 10**6, 10**9, 2 * 10**9)
# How much the clocks of a source's server and of its clients may differ.
_CLOCKS_APART_NS = 10 * 10**9
# The ctime in the identity of a directory of others, if a directory of that name was created on the
# mount, too. No source has such a ctime, but some have 0 for all entries.
_SHARED_NS = -1
_NAME_MAX = 255
# Digits of a journal's token in a conflict name.
_TOKEN_DIGITS = 6
# The conflicts, and the extended attributes, that are kept for the status.
_MOST_KEPT = 100


@dataclass(frozen=True, slots=True)
class Expected:
    """The entry that a change may replace or remove at the source.

    ``seq`` is the sequence number of the change. ``known`` is the last known identity of the entry
    at its path; ``as_set``: the same with each time that may have been set there without a mark.
    ``ours``: staged files that an earlier mount may have renamed to the path without a record, and
    files that it may have grown in place (``grown_to``). They are not identified by an inode number
    alone, since the source reuses numbers. ``over``: entries that renames on the mount have
    replaced. ``is_made``: the file was created on the mount, so its owner and mode at the source
    are those that the kernel allowed; ``maker`` is the user who created it, None if it has another
    path by now, or the source has it. ``was_there``: the source has had the file under its name,
    and the drain has not removed it; if there is no such file now, or another, others have removed
    or replaced it. ``is_file``: ``known`` is the identity of a regular file.

    Set-ID bits of a file whose content replaces an older version: ``due`` are those that the drain
    has withheld from the older version, and that come with the content. ``kept`` are those that
    the file has on the mount: the content keeps them if the older version has them. ``doubtful``
    are those that an earlier mount may have withheld in its last change of the file. ``taken``
    are those that later changes in the queue remove. ``lacking`` are those that the file has on the
    mount, and that a staged file of an earlier mount may lack, since its bytes were newer than the
    record.
    """

    seq: int = 0
    known: Identity | None = None
    as_set: tuple[Identity, ...] = ()
    ours: frozenset[Identity] = frozenset()
    over: tuple[Identity, ...] = ()
    is_made: bool = False
    maker: Credentials | None = None
    was_there: bool = False
    is_file: bool = False
    due: int = 0
    kept: int = 0
    doubtful: int = 0
    taken: int = 0
    lacking: int = 0

    def is_it(self, found: stat_result, *, strict: bool, version: bool = False) -> bool:
        """Whether ``found`` may be replaced; with ``version`` only in the known version: the source
        reuses the number of a removed file at once, so it identifies no version."""
        if not strict or self.is_staged(found):
            return True
        if self.is_known(found, version=version):
            return True
        return any(_is_entry(found, each, version=version) for each in self.over)

    def is_known(self, found: stat_result, *, version: bool) -> bool:
        """Whether ``found`` is the known entry, with ``version`` in its known version."""
        if self.is_file and not stat.S_ISREG(found.st_mode):
            return False
        known = () if self.known is None else (self.known, *self.as_set)
        return any(_is_entry(found, each, version=version) for each in known)

    def is_unmarked(self, found: stat_result) -> bool:
        """Whether ``found`` is one of ``ours``, and not the known version."""
        return self.is_staged(found) and not self.is_known(found, version=True)

    def is_staged(self, found: stat_result) -> bool:
        """Whether ``found`` is one of ``ours``."""
        return self._is_ours(found.st_ino, found.st_size, found.st_mtime_ns)

    def may_be(self, there: Identity) -> bool:
        """Whether a file may be the known one in a version that the drain knows, or has made and
        not marked, by its identity."""
        known = () if self.known is None else (self.known, *self.as_set)
        version = there.source_ino, there.size, there.mtime_ns
        is_known = any(version == (each.source_ino, each.size, each.mtime_ns) for each in known)
        return is_known or self._is_ours(*version)

    def _is_ours(self, source_ino: int, size: int, mtime_ns: int) -> bool:
        return any(
            source_ino == each.source_ino
            and (
                self._is_grown(source_ino, size, each)
                if each.size == ANY_SIZE
                else (size == each.size and is_time(mtime_ns, each.mtime_ns))
            )
            for each in self.ours
        )

    def _is_grown(self, source_ino: int, size: int, mark: Identity) -> bool:
        """Whether an earlier mount may have appended the bytes behind the known ones."""
        known = self.known
        is_known = known is not None and source_ino == known.source_ino
        if not mark.mtime_ns:
            # The mark of a staged file by an older version, which knew nothing but its number.
            return not is_known
        least = known.size if known is not None and is_known else 0
        return least <= size <= max(least, mark.mtime_ns)

    def is_reused(self, found: stat_result, born_ns: int | None) -> bool:
        """Whether ``found`` is another entry to which the source has given the inode number of the
        known one: it was created at ``born_ns``, after the last known change of that one. None: the
        source does not report times of creation."""
        if born_ns is None or self.is_staged(found):
            return False
        known = () if self.known is None else (self.known,)
        same = [each for each in (*known, *self.over) if each.source_ino == found.st_ino]
        return bool(same) and all(_is_before(each.ctime_ns, born_ns) for each in same)

    def is_same(self, found: stat_result, *, version: bool = False) -> bool:
        """Whether ``found`` may be the expected entry, with ``version`` in its known version. An
        unknown entry may be it, unless it was created on the mount and never drained."""
        is_unknown = self.known is None and not (self.ours or self.over or self.is_made)
        return is_unknown or self.is_it(found, strict=True, version=version)


def grown_to(size: int) -> Identity:
    """The mark of a file to which bytes are being appended at the source, up to ``size`` bytes.

    It is recorded as the mark of a staged file (``journal_records.py``) without a size and with the
    length in the place of the time: an older version ignores it there.
    """
    return Identity(ANY_SIZE, size, 0, 0)


def _is_entry(found: stat_result, known: Identity, *, version: bool) -> bool:
    return found.st_ino == known.source_ino and (not version or _is_version(found, known))


def _is_version(found: stat_result, known: Identity) -> bool:
    """Whether an entry with a known number is unchanged, as far as its type shows."""
    if stat.S_ISDIR(found.st_mode):
        # Each entry that is made in a directory changes its time.
        return True
    if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
        return (found.st_size, kept_ns(found.st_mtime_ns)) == (known.size, known.mtime_ns)
    # Each process that writes to a fifo changes its time.
    return found.st_size == known.size


def _is_before(ctime_ns: int, born_ns: int) -> bool:
    """Whether a time of change is before a time of creation, in the precision with which the source
    keeps the former. A source that keeps none has 0. The times of a source with whole seconds may
    be of two clocks: Lustre has the time of change from the client that makes the change, and the
    time of creation from its server."""
    if ctime_ns <= 0:
        return False
    unit_ns = max(unit_ns for unit_ns in _TIME_UNITS_NS if ctime_ns % unit_ns == 0)
    apart_ns = _CLOCKS_APART_NS if unit_ns >= 10**9 else 0
    return ctime_ns + apart_ns < born_ns - born_ns % unit_ns


def is_time(found_ns: int, set_ns: int) -> bool:
    """Whether a file system may have kept the time ``set_ns`` as ``found_ns``."""
    return any(found_ns == set_ns - set_ns % unit_ns for unit_ns in _TIME_UNITS_NS)


def shared(identity: Identity) -> Identity:
    """The identity of a directory of others with the name of one that was created on the mount."""
    return replace(identity, ctime_ns=_SHARED_NS)


def is_shared(identity: Identity) -> bool:
    return identity.ctime_ns == _SHARED_NS


def with_known_time(known: Identity | None, found: stat_result, now: Identity) -> Identity:
    """The identity ``now`` of the file of an object after a change by the drain; ``found`` is what
    the file was before, and ``known`` what the mount knew of it.

    If others have changed the file before, the identity keeps the known time of change. So a later
    open notices their change, perhaps of the mode. They may have removed set-ID bits as well, and
    then no later mount gives these again (``due_bits``).
    """
    if known is None or known.source_ino != found.st_ino:
        return now
    is_known = kept_ns(found.st_ctime_ns) == known.ctime_ns
    return now if is_known else replace(now, ctime_ns=known.ctime_ns)


@dataclass(frozen=True, slots=True)
class Conflict:
    """``kept`` is the path of the bytes that were written on the mount, empty if there are none."""

    path: bytes
    kept: bytes
    why: str


class SourceLog:
    """``token`` of the journal and ``node`` are parts of conflict names.

    ``conflicts`` are the last ones, ``conflict_count`` counts all. ``dropped_xattrs`` are the last
    extended attributes, by path and name, that the source has not taken, with the reason. All
    methods may be called from any thread.
    """

    def __init__(self, token: str, node: str | None = None) -> None:
        # Two mounts of one node, or a new journal, also count changes from 1.
        self._ending = b".monarch-conflict-%s-%s-" % (
            os.fsencode(os.uname().nodename if node is None else node),
            token[:_TOKEN_DIGITS].encode("ascii"),
        )
        self._refused: set[tuple[str, int]] = set()
        self.conflicts: deque[Conflict] = deque(maxlen=_MOST_KEPT)
        self.conflict_count = 0
        self.dropped_xattrs: dict[tuple[bytes, bytes], str] = {}

    def conflict_name(self, name: bytes, seq: int) -> bytes:
        """The name beside ``name``, which is others' now, for the version of change ``seq``."""
        ending = b"%s%d" % (self._ending, seq)
        return name[: _NAME_MAX - len(ending)] + ending

    def note_conflict(self, path: bytes, why: str, *, kept: bytes = b"") -> None:
        """``kept`` is the name, in the directory of ``path``, of the bytes that were written. The
        same bytes are reported once."""
        if kept:
            directory, slash, _ = path.rpartition(b"/")
            kept = directory + slash + kept
        if kept and any(each.kept == kept for each in self.conflicts):
            return
        self.conflicts.append(Conflict(path, kept, why))
        self.conflict_count += 1
        where = f"; what was written here is kept as {os.fsdecode(kept)!r}" if kept else ""
        log.warning("source: conflict: %r %s%s", os.fsdecode(path), why, where)

    def forget(self) -> None:
        """Call this when the user has acknowledged the conflicts and dropped attributes."""
        self.conflicts.clear()
        self.dropped_xattrs.clear()
        self.conflict_count = 0

    def note_refused(self, what: str, error: OSError, path: bytes) -> None:
        """Warns that the source does not support ``what``: once for each reason."""
        number = error.errno or errno.EIO
        if (what, number) not in self._refused:
            self._refused.add((what, number))
            log.warning(
                "source: it does not take %s as they are here: %r: %s; reported once",
                what,
                os.fsdecode(path),
                errno_words(number),
            )

    def note_dropped(self, path: bytes, name: bytes, why: str) -> None:
        """Records that the source has not accepted the extended attribute ``name``."""
        self.dropped_xattrs[path, name] = why
        # Other threads change the table as well.
        for oldest in list(self.dropped_xattrs)[:-_MOST_KEPT]:
            self.dropped_xattrs.pop(oldest, None)

    def note_taken(self, path: bytes, name: bytes) -> None:
        """Records that the source has the value of ``name`` that was set on the mount."""
        self.dropped_xattrs.pop((path, name), None)

    def note_removed(self, path: bytes) -> None:
        """Records that the file at ``path`` was removed on the mount."""
        for dropped in list(self.dropped_xattrs):
            if dropped[0] == path:
                self.dropped_xattrs.pop(dropped, None)
