"""Compares a snapshot with its source, or with another snapshot.

Of a directory only the names in it, its mode, its owner and its access control lists are compared:
its times and its size only show that names came or went, which is reported for each name.
"""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from monarch.config.write_patterns import is_staged
from monarch.namespace.build import open_source, paced
from monarch.namespace.look import pack_record
from monarch.namespace.scan import CALL_WAIT_S, Scan, joined
from monarch.namespace.schema import ACL_SHIFT, ALIAS, RECORD, RECORD_STRUCT, UNREADABLE
from monarch.namespace.snapshot import Snapshot
from monarch.posix import acl
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import lstat_beneath, open_beneath
from monarch.posix.workers import Workers
from monarch.types import ROOT_INO, Ino, Progress

Kind = Literal["missing", "new", "changed-size", "changed-mtime", "changed"]

_COMPARED_OF_FILES = ("mode", "uid", "gid", "size", "mtime_ns", "ctime_ns", "source_ino")
_COMPARED_OF_DIRECTORIES = ("mode", "uid", "gid")
_UNLISTED = "cannot be listed"
_ACLS = "access control lists"
_FIELDS = RECORD.names or ()


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs: ``missing`` in the newer side, ``new`` there, or ``changed``, with
    the same size and mtime. ``what`` names the attributes, as text."""

    kind: Kind
    path: bytes
    what: str = ""


def verify(
    source: Path | bytes,
    snapshot: Snapshot,
    *,
    sample: int | None = None,
    jobs: int = 32,
    progress: Progress | None = None,
) -> list[Difference]:
    """The differences between ``source`` and ``snapshot``, sorted by path: of everything, or of
    ``sample`` random entries and the names beside and in them. Raises SourceError if the source
    fails as a whole."""
    with open_source(source) as (root_fd, _):
        found: Iterable[Difference]
        if sample is None:
            found = _verify_all(root_fd, snapshot, jobs=jobs, progress=progress)
        else:
            found = _verify_sample(root_fd, snapshot, sample=sample, jobs=jobs, progress=progress)
        return sorted(found, key=lambda difference: difference.path)


def diff(before: Snapshot, after: Snapshot) -> Iterator[Difference]:
    """Yields the changes from one snapshot to the other, directory by directory."""
    pending: deque[tuple[bytes, Ino, Ino]] = deque([(b"", ROOT_INO, ROOT_INO)])
    root = range(1, 2)
    old_root, new_root = before.columns(root), after.columns(root)
    yield from _compare_entries(b"", [b""], old_root, [b""], new_root, before, after, after)
    while pending:
        path, old, new = pending.popleft()
        if before.unreadable(old) or after.unreadable(new):
            continue
        old_slots, new_slots = before.children(old), after.children(new)
        old_names, new_names = before.names(old), after.names(new)
        old_records, new_records = before.columns(old_slots), after.columns(new_slots)
        yield from _compare_entries(
            path, old_names, old_records, new_names, new_records, before, after, after
        )
        old_directories = _directories(old_names, old_records, old_slots.start)
        new_directories = _directories(new_names, new_records, new_slots.start)
        pending.extend(
            (joined(path, name), ino, new_directories[name])
            for name, ino in old_directories.items()
            if name in new_directories
        )


def _verify_all(
    root_fd: int, snapshot: Snapshot, *, jobs: int, progress: Progress | None
) -> Iterator[Difference]:
    one_file_system = snapshot.info().one_file_system
    report = paced(progress)
    done = 0
    with Scan(root_fd, jobs=jobs, one_file_system=one_file_system) as scan:
        for _, group in itertools.groupby(scan.batches(), key=lambda batch: batch.rank):
            batches = list(group)
            head = batches[0]
            names = list(itertools.chain.from_iterable(batch.names for batch in batches))
            records = np.frombuffer(b"".join(batch.records for batch in batches), dtype=RECORD)
            done += len(names)
            report(done, snapshot.entries, "entries")
            if head.rank < 0:
                was = snapshot.columns(range(1, 2))
                yield from _compare_entries(b"", [b""], was, names, records, snapshot, None, scan)
                continue
            old = snapshot.resolve(head.path)
            known = old is not None and snapshot.attributes(old).is_dir
            if head.closed:
                if old is not None and known and not snapshot.unreadable(old):
                    yield Difference("changed", head.path, _UNLISTED)
                continue
            if old is not None and known:
                old_names = snapshot.names(old)
                was = snapshot.columns(snapshot.children(old))
            else:
                old_names, was = [], np.empty(0, dtype=RECORD)
            yield from _compare_entries(
                head.path, old_names, was, names, records, snapshot, None, scan
            )
    if progress is not None:
        progress(done, done, "entries")


def _verify_sample(
    root_fd: int, snapshot: Snapshot, *, sample: int, jobs: int, progress: Progress | None
) -> list[Difference]:
    chosen = sorted(random.sample(range(1, snapshot.entries + 1), min(sample, snapshot.entries)))
    listed = {snapshot.parent(Ino(slot)) for slot in chosen}
    listed.update(Ino(slot) for slot in chosen if snapshot.attributes(Ino(slot)).is_dir)
    work: list[Callable[[], list[Difference]]] = [
        *(lambda slot=slot: _verify_entry(root_fd, snapshot, Ino(slot)) for slot in chosen),
        *(lambda ino=ino: _verify_names(root_fd, snapshot, ino) for ino in sorted(listed)),
    ]
    report = paced(progress)
    found: dict[bytes, Difference] = {}
    with Workers[list[Difference]](max(1, jobs), wait_s=CALL_WAIT_S) as workers:
        for done, differences in enumerate(workers.map(lambda look: look(), work), 1):
            found.update((difference.path, difference) for difference in differences)
            report(done, len(work), "looks")
    if progress is not None:
        progress(len(work), len(work), "looks")
    return list(found.values())


def _verify_entry(root_fd: int, snapshot: Snapshot, slot: Ino) -> list[Difference]:
    path = snapshot.path(slot)
    was = snapshot.columns(range(slot, slot + 1))[0].item()
    try:
        status = lstat_beneath(root_fd, path)
    except (FileNotFoundError, NotADirectoryError):
        return [Difference("missing", path)]
    except OSError as error:
        if was[5] & UNREADABLE:
            return []
        return [Difference("changed", path, error.strerror or str(error))]
    # ``extra`` is not compared.
    now = RECORD_STRUCT.unpack(pack_record(status, Ino(was[0])))
    acls_differ = False
    if snapshot.info().acls is not None and not was[5] & ALIAS:
        try:
            acls_differ = acl.read_beneath(root_fd, path) != snapshot.acls_of(was[5])
        except OSError as error:
            return [Difference("changed", path, error.strerror or str(error))]
    difference = _changed(path, was, now, acls_differ=acls_differ)
    return [] if difference is None else [difference]


def _verify_names(root_fd: int, snapshot: Snapshot, directory: Ino) -> list[Difference]:
    path = snapshot.path(directory)
    if snapshot.unreadable(directory):
        return []
    try:
        with closing_fd(open_beneath(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            now = {name for name in map(os.fsencode, os.listdir(fd)) if not is_staged(name)}
    except (FileNotFoundError, NotADirectoryError):
        return [Difference("missing", path)]
    except OSError as error:
        return [Difference("changed", path, error.strerror or str(error))]
    was = set(snapshot.names(directory))
    return [
        *(Difference("new", joined(path, name)) for name in now - was),
        *(Difference("missing", joined(path, name)) for name in was - now),
    ]


def _compare_entries(
    path: bytes,
    old_names: Sequence[bytes],
    old: npt.NDArray[np.void],
    new_names: Sequence[bytes],
    new: npt.NDArray[np.void],
    before: Snapshot,
    after: Snapshot | None,
    seen: Snapshot | Scan,
) -> Iterator[Difference]:
    """Compares the entries of one directory, and yields all entries beneath new or missing ones.

    ``after`` is None if new directories are reported later. ``seen`` has the access control lists
    of the new entries.
    """
    if old_names == new_names:
        common = list(old_names)
    else:
        old_places = {name: place for place, name in enumerate(old_names)}
        new_places = {name: place for place, name in enumerate(new_names)}
        for name, place in old_places.items():
            if name not in new_places:
                yield Difference("missing", joined(path, name))
                yield from _beneath(before, "missing", joined(path, name), old[place])
        for name, place in new_places.items():
            if name not in old_places:
                yield Difference("new", joined(path, name))
                if after is not None:
                    yield from _beneath(after, "new", joined(path, name), new[place])
        common = [name for name in old_names if name in new_places]
        old = old[[old_places[name] for name in common]]
        new = new[[new_places[name] for name in common]]
    differs = (old["flags"] ^ new["flags"]) & UNREADABLE != 0
    for column in _COMPARED_OF_FILES:
        differs |= old[column] != new[column]
    # The lists of an alias are compared under the first name of its file.
    flags = old["flags"] | new["flags"]
    have_acls = (flags >> ACL_SHIFT != 0) & (flags & ALIAS == 0)
    if before.info().acls is None or (after is not None and after.info().acls is None):
        have_acls[:] = False
    for place in np.flatnonzero(differs | have_acls).tolist():
        was, now = old[place].item(), new[place].item()
        name = joined(path, common[place])
        acls_differ = have_acls[place] and before.acls_of(was[5]) != seen.acls_of(now[5])
        difference = _changed(name, was, now, acls_differ=bool(acls_differ))
        if difference is not None:
            yield difference
        if stat.S_IFMT(was[1]) != stat.S_IFMT(now[1]):
            yield from _beneath(before, "missing", name, old[place])
            if after is not None:
                yield from _beneath(after, "new", name, new[place])


def _changed(
    path: bytes, was: tuple[int, ...], now: tuple[int, ...], *, acls_differ: bool
) -> Difference | None:
    is_directory = stat.S_ISDIR(was[1]) and stat.S_ISDIR(now[1])
    compared = _COMPARED_OF_DIRECTORIES if is_directory else _COMPARED_OF_FILES
    old, new = dict(zip(_FIELDS, was, strict=True)), dict(zip(_FIELDS, now, strict=True))
    changed = [column for column in compared if old[column] != new[column]]
    what = ", ".join([*(c.removesuffix("_ns") for c in changed), *[_ACLS] * acls_differ])
    if "size" in changed:
        return Difference("changed-size", path, f"{what}: {old['size']} -> {new['size']} bytes")
    if "mtime_ns" in changed:
        return Difference("changed-mtime", path, what)
    if what:
        return Difference("changed", path, what)
    if (was[5] ^ now[5]) & UNREADABLE:
        return Difference("changed", path, _UNLISTED if now[5] & UNREADABLE else "can be read now")
    return None


def _beneath(
    snapshot: Snapshot, kind: Kind, path: bytes, record: npt.NDArray[np.void] | np.void
) -> Iterator[Difference]:
    """All entries beneath a new or missing entry, if it is a directory."""
    if not stat.S_ISDIR(int(record["mode"])):
        return
    top = snapshot.resolve(path)
    pending = [] if top is None else [(path, top)]
    while pending:
        above, ino = pending.pop()
        names, slots = snapshot.names(ino), snapshot.children(ino)
        for name in names:
            yield Difference(kind, joined(above, name))
        directories = _directories(names, snapshot.columns(slots), slots.start)
        pending.extend((joined(above, name), found) for name, found in directories.items())


def _directories(
    names: Sequence[bytes], records: npt.NDArray[np.void], first: int
) -> dict[bytes, Ino]:
    places = np.flatnonzero((records["mode"] & 0o170000) == stat.S_IFDIR)
    return {names[place]: Ino(first + place) for place in places.tolist()}
