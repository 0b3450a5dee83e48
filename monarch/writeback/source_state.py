"""The state of the source: of each file that the drain has changed, or is about to change.

Files are identified by the number of their object. Directories, symbolic links and other entries
without an object are identified by their inode number in the mount.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from monarch.posix.credentials import Credentials
from monarch.types import ANY_SIZE, Identity
from monarch.writeback.expected import Expected, is_shared, is_time, shared
from monarch.writeback.history import followed
from monarch.writeback.journal import Known, Replay
from monarch.writeback.journal_records import staged_besides
from monarch.writeback.op import Op

T = TypeVar("T")

_WITHOUT_OBJECT = ("mkdir", "symlink", "mknod")
# How many earlier identities of a file are kept: as many as its changes that may wait in the queue.
_MOST_BEFORE = 1024


class Entries:
    """Entries without an object: ``made`` has their identities at the source by inode number."""

    def __init__(self) -> None:
        self.made: dict[int, Identity] = {}
        # Of files that have changes in the queue: the identities from which changes of the drain
        # have led to the one in ``made``.
        self._before: dict[int, dict[Identity, None]] = {}
        # The number of changes in the queue, by inode number.
        self._waiting: dict[int, int] = {}
        # Times of modification that an earlier mount may have set without marking it.
        self.set_times: dict[int, frozenset[int]] = {}
        # Those that changes over an older snapshot set, by inode number at the source. Changes over
        # a newer one number the file differently, and so may be made at the same time.
        self._older_times: dict[int, frozenset[int]] = {}
        # Entries of an older snapshot, by their former identity, with the identity that changes of
        # the drain gave them. A newer snapshot numbers them differently, and may be older than the
        # changes.
        self._became: dict[tuple[int, int, int], Identity] = {}

    def current(self, ino: int, was: Identity | None) -> Identity | None:
        """The source's identity of an entry that the mount knew as ``was``."""
        if ino in self.made:
            return self.made[ino]
        while was is not None and (now := self._became.get(_version(was))) is not None:
            was = now
        return was

    def current_file(self, ino: int, was: Identity | None) -> Identity | None:
        """The same for a file: others may have changed it since the drain has, and the mount may
        have noticed that."""
        made = self.made.get(ino)
        if made is None or was is None or ino < 0 or was == made:
            return self.current(ino, was)
        before = self._before.get(ino)
        return made if not before or was in before else was

    def will_set_time(self, op: Op, mtime_ns: int) -> None:
        """A change of an earlier mount sets a time of modification, or has set it without a
        mark."""
        tables = [(self.set_times, op.ino)]
        if op.ino < 0 and op.was is not None:
            tables.append((self._older_times, op.was.source_ino))
        for table, key in tables:
            table[key] = table.get(key, frozenset()) | {mtime_ns}

    def as_set(self, ino: int, known: Identity) -> Iterator[Identity]:
        """A known identity with each time that may have been set without a mark."""
        older = self._older_times.get(known.source_ino, frozenset())
        for mtime_ns in self.set_times.get(ino, frozenset()) | older:
            yield replace(known, mtime_ns=mtime_ns)

    def queued(self, op: Op) -> None:
        """A change is in the queue."""
        for ino in {op.ino, op.over_ino} - {0}:
            self._waiting[ino] = self._waiting.get(ino, 0) + 1

    def is_waiting(self, ino: int) -> bool:
        """Whether a change of an entry is in the queue."""
        return ino in self._waiting

    def left(self, op: Op) -> None:
        """A change has left the queue, after it was noted."""
        for ino in {op.ino, op.over_ino} - {0}:
            count = self._waiting.pop(ino, 1) - 1
            if count:
                self._waiting[ino] = count
            elif ino in self._before:
                self.forget(ino)

    def forget_settled(self) -> None:
        """Forgets files without changes in the queue: later changes name the present identity."""
        for ino in self._before.keys() - self._waiting.keys():
            self.forget(ino)

    def forget(self, ino: int) -> None:
        """Forgets a file that has an object from now on, or no changes in the queue."""
        self.made.pop(ino, None)
        self._before.pop(ino, None)
        self.set_times.pop(ino, None)

    def note(self, ino: int, before: Identity | None, now: Identity) -> None:
        """Call this when the drain has changed an entry."""
        self.made[ino] = now
        if before is not None and ino < 0:
            self._became[_version(before)] = now
            self._became.pop(_version(now), None)

    def note_file(
        self, ino: int, before: Identity | None, now: Identity, was: Identity | None
    ) -> None:
        """The same for a file that the mount knew as ``was``."""
        self.note(ino, before, now)
        if led := dict.fromkeys(each for each in (before, was) if each is not None):
            earlier = self._before.setdefault(ino, {})
            earlier.update(led)
            while len(earlier) > _MOST_BEFORE:
                del earlier[next(iter(earlier))]


class Versions(dict[int, Identity]):
    """Identities by object. ``objects_of`` finds the objects whose file has a number at the source,
    by an index that is made at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[int, set[int]] | None = None

    def __setitem__(self, number: int, identity: Identity) -> None:
        self._leave(number)
        super().__setitem__(number, identity)
        if self._objects is not None:
            self._objects.setdefault(identity.source_ino, set()).add(number)

    def pop(self, number: int, default: Any = None) -> Any:
        self._leave(number)
        return super().pop(number, default)

    def _leave(self, number: int) -> None:
        if self._objects is not None and (identity := self.get(number)) is not None:
            objects = self._objects[identity.source_ino]
            objects.discard(number)
            if not objects:
                del self._objects[identity.source_ino]

    def objects_of(self, source_ino: int) -> list[int]:
        if self._objects is None:
            self._objects = {}
            for number, identity in self.items():
                self._objects.setdefault(identity.source_ino, set()).add(number)
        return list(self._objects.get(source_ino, ()))


class SourceState:
    """Belongs to the event loop, and never calls the source: the drain reports its changes here.

    The tables determine the identity that the next change of a file must find at the source
    (``expected``) before it replaces, removes or changes an entry. ``entries`` are those without an
    object. ``staged_beside``: by object, the path beside which the staged file lies that has the
    only bytes of an object without room in the tier.
    """

    def __init__(self) -> None:
        # Objects whose file is at the source, under its current names. An object leaves this set
        # when a content of it is left out.
        self._present: set[int] = set()
        # The last known identity of the source's file, by object.
        self._known = Versions()
        self.entries = Entries()
        # Objects of files that were created on the mount.
        self._new: set[int] = set()
        # Of those that the source does not have yet: the path of each, and the user who made it.
        self._makers: dict[int, tuple[bytes, Credentials]] = {}
        # Objects of files of the source whose "take" is still in the queue.
        self._to_take: set[int] = set()
        # Files of the source that renames on the mount have replaced by an object's file.
        self._over: dict[int, tuple[Identity, ...]] = {}
        # Staged files of an object that may have got their name without a mark in the journal.
        self._ours: dict[int, frozenset[Identity]] = {}
        # Times of modification that an earlier mount may have set without marking it, by object.
        self._set_times: dict[int, frozenset[int]] = {}
        self.staged_beside: dict[int, bytes] = {}
        # The version of an object that was published last.
        self._published: dict[int, Identity] = {}
        # Growth in place: the number of first bytes of an object that the source has ...
        self._base: dict[int, int] = {}
        # ... except for bytes from this offset on, changed by contents that were left out.
        self._intact: dict[int, int] = {}
        # Entries to which no further change goes: inode numbers of entries that were given up, or
        # that are at the source under another name only, and objects that were given up.
        self._given_up: set[int] = set()
        self._discarded: set[int] = set()

    # -- over a remount ----------------------------------------------------------------------

    def load(self, replay: Replay) -> None:
        """Takes over the state in the journal. Must be called before all other methods."""
        # A rename that is done may have replaced one of these files.
        self._ours = dict(replay.staged)
        if replay.known is not None:
            known = replay.known
            for number, identity in known.known.items():
                self._known[number] = identity
            self.entries.made.update(known.made)
            self._over.update(known.over)
            for number, inos in known.ours.items():
                self._ours[number] = self._ours.get(number, frozenset()) | inos
            self._new |= known.new
            self._present |= known.present
            self._given_up |= known.given_up
        else:
            # A journal that an older version has compacted does not have the state of the source,
            # and lacks the records of files that were created before.
            made = {op.object for _, op in replay.ops if op.kind in ("create", "take")}
            self._present = {op.object for _, op in replay.ops if op.object} - made
        settled = replay.known.settled if replay.known is not None else frozenset()
        for seq, op in replay.ops:
            self.foresee(op)
            if seq in replay.done:
                now = replay.done[seq]
                if op.kind == "take" and op.object in settled:
                    self.entries.forget(op.ino)
                elif not (op.kind == "content" and op.same and now is None):
                    # The source has a file that was only copied up, though perhaps with other
                    # bytes by others.
                    self.note(op, now)
                if op.kind == "content":
                    self.rebase(op, now)
                if op.object in replay.staged:
                    # These files were staged after the last change that is marked as done.
                    ours = self._ours.get(op.object, frozenset())
                    self._ours[op.object] = ours | replay.staged[op.object]
            elif op.mtime_ns is not None and (op.object or op.file):
                if op.object:
                    times = self._set_times.get(op.object, frozenset())
                    self._set_times[op.object] = times | {op.mtime_ns}
                else:
                    self.entries.will_set_time(op, op.mtime_ns)
            if seq not in replay.done:
                self.entries.queued(op)
        self.entries.forget_settled()
        if replay.known is not None:
            # Contents that show which bytes were changed may be missing.
            self._base.clear()

    def known_of(self, ops: Iterable[tuple[int, Op]], is_done: Callable[[int], bool]) -> Known:
        """The state of the source that a journal must record when it is compacted to ``ops``."""
        numbers: set[int] = set()
        inos: set[int] = set()
        settled = set()
        made = {}
        for seq, op in ops:
            if op.kind == "take" and is_done(seq):
                settled.add(op.object)
            numbers |= {op.object, op.over_object}
            inos |= {op.ino, op.over_ino}
            for ino, was in ((op.ino, op.was), (op.over_ino, op.over)):
                if (now := self.entries.current(ino, was)) is not None and now != was:
                    made[ino] = now
        return Known(
            known=_of(self._known, numbers),
            made=made | _of(self.entries.made, inos),
            over=_of(self._over, numbers),
            ours=_of(self._ours, numbers),
            new=frozenset(self._new & numbers),
            present=frozenset(self._present & numbers),
            given_up=frozenset(self._given_up & inos),
            settled=frozenset(settled),
        )

    # -- questions ---------------------------------------------------------------------------

    def is_present(self, number: int) -> bool:
        """Whether the source has an object's file, under its current names."""
        return number in self._present

    def identity(self, number: int) -> Identity | None:
        """The last known identity of the source's file of an object; None if there is none."""
        return self._known.get(number)

    def version(self, number: int) -> Identity | None:
        """The version of an object that was published last; None if that is not known."""
        return self._published.get(number)

    def has_older(self, number: int) -> bool:
        """Whether the source has a file of an object, in any version, under its name."""
        return number in self._known and number not in self._over

    def is_to_replace(self, op: Op) -> bool:
        """Whether a change is about a file that has replaced another one on the mount, and not yet
        at the source."""
        return op.object in self._over or op.over_object in self._over

    def unmarked(self, number: int) -> frozenset[Identity]:
        """The staged files of an object that may have got a name without a mark."""
        return self._ours.get(number, frozenset())

    def is_given_up(self, op: Op) -> bool:
        """Whether no further change of this entry goes to the source."""
        return op.ino in self._given_up or op.object in self._discarded

    def has_nothing_of(self, op: Op) -> bool:
        """Whether the source has nothing of an entry that was created on the mount."""
        number = op.object
        if not number:
            return op.was is None and op.ino > 0 and op.ino not in self.entries.made
        return number in self._new and not (number in self._present or number in self._known)

    def is_needless(self, op: Op, is_removed: Callable[[int], bool]) -> bool:
        """Whether a refused change is needless: of an entry that was removed on the mount since
        (``is_removed``, by inode number), or the removal of an entry that the source never had."""
        match op.kind:
            case "mkdir" | "symlink" | "mknod" | "attr" | "xattr":
                return op.ino > 0 and is_removed(op.ino)
            case "unlink" if op.object:
                had = (self._present, self._known, self._over, self._ours)
                return op.object in self._new and not any(op.object in table for table in had)
            case "unlink" | "rmdir":
                return (
                    op.ino != 0 and op.strict and op.was is None and op.ino not in self.entries.made
                )
        return False

    def expected(self, seq: int, op: Op) -> Expected:
        """The entry that may be at the source where the change ``op``, number ``seq``, is made."""
        number = op.object
        if not number or (op.kind == "take" and number not in self._known):
            return self._expected_entry(seq, op)
        made_at, maker = self._makers.get(number, (b"", None))
        return Expected(
            seq=seq,
            known=self._known.get(number),
            as_set=tuple(self._as_set(number)),
            ours=self._ours_of(number),
            over=self._over.get(number, ()),
            is_made=number in self._new,
            maker=maker if made_at == op.path else None,
            was_there=number in self._known or number in self._to_take,
            is_file=True,
        )

    def _expected_entry(self, seq: int, op: Op) -> Expected:
        entries = self.entries
        if not (op.file or op.kind in ("unlink", "take")):
            return Expected(seq=seq, known=entries.current(op.ino, op.was))
        known = entries.current_file(op.ino, op.was)
        as_set = tuple(entries.as_set(op.ino, known)) if known is not None else ()
        return Expected(seq=seq, known=known, as_set=as_set, is_file=op.file)

    def expected_over(self, rename: Op) -> Expected:
        """The entry that may be at the source under the new name of a rename."""
        return Expected(over=self._replaced(rename), ours=self._ours_of(rename.over_object))

    def _as_set(self, number: int) -> Iterator[Identity]:
        """The known identity with each time that may have been set without a mark."""
        if (known := self._known.get(number)) is not None:
            for mtime_ns in self._set_times.get(number, ()):
                yield replace(known, mtime_ns=mtime_ns)

    def _ours_of(self, number: int) -> frozenset[Identity]:
        """The staged files that may have an object's name, also with each such time."""
        ours = self._ours.get(number, frozenset())
        times = self._set_times.get(number, ())
        timed = [each for each in ours if each.size != ANY_SIZE]
        return ours | {replace(each, mtime_ns=time_ns) for each in timed for time_ns in times}

    def _replaced(self, rename: Op) -> tuple[Identity, ...]:
        """The possible identities at the source of the file that a rename has replaced."""
        made = self.entries.current(rename.over_ino, rename.over)
        found = [rename.over, self._known.get(rename.over_object), made]
        over = (*self._over.get(rename.over_object, ()), *self._as_set(rename.over_object))
        return (*over, *(each for each in found if each))

    # -- what is done ------------------------------------------------------------------------

    def foresee(self, op: Op) -> None:
        """Records the effects on all later changes; called also before the change is made."""
        if op.kind == "create":
            self._new.add(op.object)
            if op.by is not None:
                self._makers[op.object] = op.path, op.by
        elif op.kind == "take":
            self._to_take.add(op.object)

    def note(self, op: Op, identity: Identity | None) -> None:
        """Records that a change was made. ``identity`` is that of the source's file now; None if
        there is no such file, or it is not known."""
        number = op.object
        if op.kind in ("rename", "rmdir"):
            places = self.staged_beside.items()
            self.staged_beside = {each: followed(path, op) for each, path in places}
        match op.kind:
            case "through":
                self.staged_beside[number] = op.path
            case "take":
                self._to_take.discard(number)
                self._present.add(number)
                # The drain may have changed attributes since the mount has read the identity.
                known = self.entries.current_file(op.ino, op.was)
                if known is not None and number not in self._known:
                    self._known[number] = known
                    self._base[number] = known.size
                self.entries.forget(op.ino)
            case "content" if identity is not None:
                self.staged_beside.pop(number, None)
                known = self._known.get(number)
                if known is not None and known.source_ino == identity.source_ino:
                    self._renew(known, identity)
                self._present.add(number)
                self._known[number] = identity
                self._over.pop(number, None)
                self._ours.pop(number, None)
                self._set_times.pop(number, None)
                self._makers.pop(number, None)
            case "content":
                self._present.discard(number)
                self._published.pop(number, None)
            case "gone":
                self.forget(number)
            case "link" if number and identity is None:
                self._present.discard(number)
            case "rename" if number and (number not in self._present or identity is None):
                self._present.discard(number)
                # The file may have another name, under which it has replaced another entry.
                over = dict.fromkeys((*self._over.get(number, ()), *self._replaced(op)))
                self._over[number] = tuple(over)
                if ours := self._ours.get(op.over_object):
                    self._ours[number] = self._ours.get(number, frozenset()) | ours
            case "rename" | "link" | "attr" | "xattr" if identity is not None and number:
                identity = _with_bytes_of(self._known.get(number), identity, op)
                self._renew(self._known.get(number), identity)
                self._known[number] = identity
            case "rmdir":
                self.entries.made.pop(op.ino, None)
            case "mkdir" | "symlink" | "mknod" if identity is None and op.strict:
                # The name belongs to another entry at the source: later changes are not made there.
                self._given_up.add(op.ino)
            case "unlink":
                # In a shortened journal it may be in the place of a rename of another file, and
                # have the mark of that rename.
                pass
            case _ if identity is not None and op.ino:
                current = self.entries.current_file if op.file else self.entries.current
                before = current(op.ino, op.was)
                if before is not None and is_shared(before):
                    identity = shared(identity)
                self._renew(before, identity)
                if op.ino < 0:
                    self._renew_taken(before, identity)
                if op.file:
                    self.entries.note_file(op.ino, before, identity, op.was)
                else:
                    self.entries.note(op.ino, before, identity)

    def _renew(self, before: Identity | None, now: Identity) -> None:
        """Records a change of a file that may also wait to be replaced under another name."""
        for number, over in self._over.items():
            if before in over:
                self._over[number] = tuple(now if each == before else each for each in over)

    def _renew_taken(self, before: Identity | None, now: Identity) -> None:
        """Records a change of a file of an older snapshot, which objects of a newer snapshot may
        have replaced meanwhile: the changes do not wait for each other, as their numbers differ.
        The newer snapshot may have known it after a change of names or modes."""
        if before is None:
            return
        for number in self._known.objects_of(before.source_ino):
            if _version(self._known[number]) == _version(before):
                self._known[number] = now

    def forget(self, number: int) -> None:
        """Removes the state of an object: its file was removed, or will be staged anew."""
        for table in (
            self._published,
            self._known,
            self._over,
            self._ours,
            self._set_times,
            self._base,
            self._intact,
            self._makers,
            self.staged_beside,
        ):
            table.pop(number, None)
        self._present.discard(number)
        self._new.discard(number)

    def give_up(self, ops: Iterable[Op], objects: Iterable[int] = ()) -> None:
        """Gives up ``objects``, and the entries without an object that ``ops`` create: the source
        gets no further change of them."""
        self._discarded.update(objects)
        self._given_up.update(op.ino for op in ops if op.kind in _WITHOUT_OBJECT)

    def note_staged(self, number: int, staged: Identity, instead: int = 0) -> None:
        """Records that a staged file is in the journal: it may get its name from now on. The one
        with the number ``instead`` was removed before it had a name."""
        earlier = self._ours.get(number, frozenset())
        self._ours[number] = staged_besides(earlier, instead) | {staged}

    def note_version(self, number: int, version: Identity | None) -> None:
        """Records which version of an object's bytes the source has; None if it may have none."""
        if version is None:
            self._published.pop(number, None)
        else:
            self._published[number] = version

    # -- growth in place ---------------------------------------------------------------------

    def rebase(self, op: Op, identity: Identity | None) -> None:
        """Records that a content is at the source, as ``identity``, or was left out."""
        number = op.object
        if identity is not None:
            self._base[number] = identity.size
            self._intact.pop(number, None)
        else:
            self._intact[number] = min(self._intact.get(number, op.intact), op.intact)

    def grows_from(self, op: Op) -> int | None:
        """The number of first bytes of a content that the source has, if the rest can be appended
        there; None if the file must be staged as a whole."""
        number = op.object
        base = self._base.get(number)
        if base is None or op.same or op.through or not op.strict or number in self._over:
            return None
        intact = min(self._intact.get(number, op.intact), op.intact)
        is_known = number in self._known and op.mtime_ns is not None
        return base if is_known and 0 < base <= min(intact, op.size) else None

    def note_grown(self, number: int, identity: Identity) -> None:
        """Records that bytes were appended in place: the source's file is ``identity`` now."""
        self._renew(self._known.get(number), identity)
        self._known[number] = identity

    def stop_growth(self, number: int) -> None:
        """Records that others have changed the file: it is staged whole, and a conflict."""
        self._base.pop(number, None)
        self._ours.pop(number, None)


def _version(identity: Identity) -> tuple[int, int, int]:
    """The part of an identity that changes of modes and names leave alone."""
    return identity.source_ino, identity.size, identity.mtime_ns


def _with_bytes_of(known: Identity | None, now: Identity, op: Op) -> Identity:
    """The identity of a file after a change that did not concern its bytes.

    If others have written the file in place meanwhile, the known size and time stay: the next
    content then finds their version as a conflict.
    """
    if known is None or known.source_ino != now.source_ino:
        return now
    if op.mtime_ns is not None and is_time(now.mtime_ns, op.mtime_ns):
        return now
    return replace(now, size=known.size, mtime_ns=known.mtime_ns)


def _of(table: Mapping[int, T], keys: Container[int]) -> dict[int, T]:
    return {key: value for key, value in table.items() if key in keys}
