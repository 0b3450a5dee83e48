"""What the source has of each file that the drain has changed, or is about to change.

Files are known by the number of their object. Directories, symbolic links and other things without
an object are known by the inode number that the mount shows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from monarch.types import Identity
from monarch.writeback.expected import Expected, is_shared, is_time, shared
from monarch.writeback.journal import Known, Replay
from monarch.writeback.op import Op

T = TypeVar("T")

_WITHOUT_OBJECT = ("mkdir", "symlink", "mknod")


class _Entries:
    """What the source has of everything that has no object: ``made``, by inode number."""

    def __init__(self) -> None:
        self.made: dict[int, Identity] = {}
        # What entries of an older snapshot have become by changes of the drain, by what they were:
        # a newer snapshot numbers them differently, and may have been made before the changes.
        self._became: dict[tuple[int, int, int], Identity] = {}

    def current(self, ino: int, was: Identity | None) -> Identity | None:
        """What the source has of an entry that the mount knew as ``was``."""
        if ino in self.made:
            return self.made[ino]
        while was is not None and (now := self._became.get(_version(was))) is not None:
            was = now
        return was

    def note(self, ino: int, before: Identity | None, now: Identity) -> None:
        """The drain has changed an entry."""
        self.made[ino] = now
        if before is not None and ino < 0:
            self._became[_version(before)] = now
            self._became.pop(_version(now), None)


class SourceState:
    """Belongs to the event loop, and never calls the source: the drain reports what it did there.

    The tables keep what the next change of a file is compared with (``expected``) before it
    replaces, removes or changes something at the source.
    """

    def __init__(self) -> None:
        # Objects whose file is at the source, under its current names. An object leaves this set
        # when a content of it is left out.
        self._present: set[int] = set()
        # The last known identity of the source's file, by object.
        self._known: dict[int, Identity] = {}
        self._entries = _Entries()
        # Objects of files that were made on the mount.
        self._new: set[int] = set()
        # Objects of files of the source whose "take" is still in the queue.
        self._to_take: set[int] = set()
        # Files of the source that renames on the mount have replaced by an object's file.
        self._over: dict[int, tuple[Identity, ...]] = {}
        # Staged files of an object that may have got their name without a mark in the journal.
        self._ours: dict[int, frozenset[Identity]] = {}
        # Times of modification that an earlier mount may have set without marking it, by object.
        self._set_times: dict[int, frozenset[int]] = {}
        # The version of an object that was published last.
        self._published: dict[int, Identity] = {}
        # Growth in place: the source has this number of first bytes of an object...
        self._base: dict[int, int] = {}
        # ... except for what contents that were left out have changed from this offset on.
        self._intact: dict[int, int] = {}
        # The longest content that may have been appended in place without a mark.
        self._longest: dict[int, int] = {}
        # Inode numbers of what was given up, or is at the source under another name only, and
        # objects that were given up: no further change of them goes to the source.
        self._given_up: set[int] = set()
        self._discarded: set[int] = set()

    # -- over a remount ----------------------------------------------------------------------

    def load(self, replay: Replay) -> None:
        """Take over what the journal tells of the source. Before any other call."""
        # What a rename that is done has replaced may have been one of these.
        self._ours = dict(replay.staged)
        if replay.known is not None:
            self._restore(replay.known)
        else:
            # A journal that an older version has compacted does not say what the source had then,
            # and has left out the records of files that were made before.
            made = {op.object for _, op in replay.ops if op.kind in ("create", "take")}
            self._present = {op.object for _, op in replay.ops if op.object} - made
        settled = replay.known.settled if replay.known is not None else frozenset()
        for seq, op in replay.ops:
            self.foresee(op)
            if op.kind == "content":
                self.note_growth(op.object, op.size)
            if seq in replay.done:
                if not (op.kind == "take" and op.object in settled):
                    self.note(op, replay.done[seq])
                if op.kind == "content":
                    self.rebase(op, replay.done[seq])
                if op.object in replay.staged:
                    # These were staged after what is marked as done.
                    ours = self._ours.get(op.object, frozenset())
                    self._ours[op.object] = ours | replay.staged[op.object]
            elif op.object and op.mtime_ns is not None:
                times = self._set_times.get(op.object, frozenset())
                self._set_times[op.object] = times | {op.mtime_ns}
        if replay.known is not None:
            # Contents that say which bytes were changed may be missing.
            self._base.clear()

    def _restore(self, known: Known) -> None:
        self._known.update(known.known)
        self._entries.made.update(known.made)
        self._over.update(known.over)
        for number, inos in known.ours.items():
            self._ours[number] = self._ours.get(number, frozenset()) | inos
        self._new |= known.new
        self._present |= known.present
        self._given_up |= known.given_up

    def known_of(self, ops: Iterable[tuple[int, Op]], is_done: Callable[[int], bool]) -> Known:
        """What a journal that is compacted to ``ops`` must tell of the source."""
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
                if (now := self._entries.current(ino, was)) is not None and now != was:
                    made[ino] = now
        return Known(
            known=_of(self._known, numbers),
            made=made | _of(self._entries.made, inos),
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
        """Whether the source has a file of an object, in whatever version, under its name."""
        return number in self._known and number not in self._over

    def may_be_published(self, number: int) -> bool:
        """Whether a staged file of an object may have got a name without a mark."""
        return number in self._ours

    def is_given_up(self, op: Op) -> bool:
        """Whether no change of this file, directory or link goes to the source any more."""
        return op.ino in self._given_up or op.object in self._discarded

    def has_nothing_of(self, op: Op) -> bool:
        """Whether a change is of something that was made on the mount and is not at the source."""
        number = op.object
        if not number:
            return op.was is None and op.ino > 0 and op.ino not in self._entries.made
        return number in self._new and not (number in self._present or number in self._known)

    def is_needless(self, op: Op, is_removed: Callable[[int], bool]) -> bool:
        """Whether the source needs no more to get a change that it refuses.

        That is a change of what was removed on the mount since (``is_removed``, by inode number),
        and the removal of what the source has never got.
        """
        match op.kind:
            case "mkdir" | "symlink" | "mknod" | "attr" | "xattr":
                return op.ino > 0 and is_removed(op.ino)
            case "unlink" if op.object:
                had = (self._present, self._known, self._over, self._ours)
                return op.object in self._new and not any(op.object in table for table in had)
            case "unlink" | "rmdir":
                return (
                    op.ino != 0
                    and op.strict
                    and op.was is None
                    and op.ino not in self._entries.made
                )
        return False

    def expected(self, seq: int, op: Op) -> Expected:
        """What may stand at the source where the change ``op``, number ``seq``, is made."""
        number = op.object
        if not number:
            return Expected(seq=seq, known=self._entries.current(op.ino, op.was))
        return Expected(
            seq=seq,
            known=self._known.get(number),
            as_set=tuple(self._as_set(number)),
            ours=self._ours_of(number),
            over=self._over.get(number, ()),
            is_made=number in self._new,
            # Not if a rename has taken it away there, until its content comes.
            was_there=(number in self._known or number in self._to_take)
            and number not in self._over,
            longest=self._longest.get(number, 0),
            is_file=True,
        )

    def expected_over(self, rename: Op) -> Expected:
        """What may stand at the source under the new name of a rename."""
        return Expected(over=self._replaced(rename), ours=self._ours_of(rename.over_object))

    def _as_set(self, number: int) -> Iterator[Identity]:
        """What is known of an object's file, with each time that may have been set unmarked."""
        if (known := self._known.get(number)) is not None:
            for mtime_ns in self._set_times.get(number, ()):
                yield replace(known, mtime_ns=mtime_ns)

    def _ours_of(self, number: int) -> frozenset[Identity]:
        """Staged files that may have an object's name, with each time that may have been set
        unmarked."""
        ours = self._ours.get(number, frozenset())
        times = self._set_times.get(number, ())
        return ours | {replace(each, mtime_ns=time_ns) for each in ours for time_ns in times}

    def _replaced(self, rename: Op) -> tuple[Identity, ...]:
        """What the source may have of the file that a rename on the mount has replaced."""
        made = self._entries.current(rename.over_ino, rename.over)
        found = [rename.over, self._known.get(rename.over_object), made]
        over = (*self._over.get(rename.over_object, ()), *self._as_set(rename.over_object))
        return (*over, *(each for each in found if each))

    # -- what is done ------------------------------------------------------------------------

    def foresee(self, op: Op) -> None:
        """Note what holds for all later changes, also before this one is made."""
        if op.kind == "create":
            self._new.add(op.object)
        elif op.kind == "take":
            self._to_take.add(op.object)

    def note(self, op: Op, identity: Identity | None) -> None:
        """A change was made, and the source's file is ``identity`` now; None: it has no such file,
        or that is not known."""
        number = op.object
        match op.kind:
            case "take":
                self._to_take.discard(number)
                self._present.add(number)
                # Attributes may have been changed here since the mount has read the identity.
                known = self._entries.current(op.ino, op.was)
                if known is not None and number not in self._known:
                    self._known[number] = known
                    self._base[number] = known.size
            case "content" if identity is not None:
                self._present.add(number)
                self._known[number] = identity
                self._over.pop(number, None)
                self._ours.pop(number, None)
                self._set_times.pop(number, None)
            case "content":
                self._present.discard(number)
                self._published.pop(number, None)
            case "gone":
                self.forget(number)
            case "link" if number and identity is None:
                self._present.discard(number)
            case "rename" if number and (number not in self._present or identity is None):
                self._present.discard(number)
                # The file may have another name, at which it has replaced something else.
                over = dict.fromkeys((*self._over.get(number, ()), *self._replaced(op)))
                self._over[number] = tuple(over)
                if ours := self._ours.get(op.over_object):
                    self._ours[number] = self._ours.get(number, frozenset()) | ours
            case "rename" | "link" | "attr" | "xattr" if identity is not None and number:
                identity = _with_bytes_of(self._known.get(number), identity, op)
                self._renew(self._known.get(number), identity)
                self._known[number] = identity
            case "rmdir":
                self._entries.made.pop(op.ino, None)
            case "mkdir" | "symlink" | "mknod" if identity is None and op.strict:
                # The name belongs to something else at the source: later changes are not of that.
                self._given_up.add(op.ino)
            case _ if identity is not None and op.ino:
                before = self._entries.current(op.ino, op.was)
                if before is not None and is_shared(before):
                    identity = shared(identity)
                self._renew(before, identity)
                self._entries.note(op.ino, before, identity)

    def _renew(self, before: Identity | None, now: Identity) -> None:
        """The drain has changed a file that may also wait to be replaced under another name."""
        for number, over in self._over.items():
            if before in over:
                self._over[number] = tuple(now if each == before else each for each in over)

    def forget(self, number: int) -> None:
        """Know nothing of an object any more: its file is removed, or is brought anew."""
        for table in (
            self._published,
            self._known,
            self._over,
            self._ours,
            self._set_times,
            self._base,
            self._intact,
            self._longest,
        ):
            table.pop(number, None)
        self._present.discard(number)
        self._new.discard(number)

    def give_up(self, ops: Iterable[Op], objects: Iterable[int] = ()) -> None:
        """The source gets no further change of ``objects``, nor of what ``ops`` make that has no
        object."""
        self._discarded.update(objects)
        self._given_up.update(op.ino for op in ops if op.kind in _WITHOUT_OBJECT)

    def note_staged(self, number: int, staged: Identity) -> None:
        """A staged file of an object is in the journal, and may get its name from now on."""
        self._ours[number] = self._ours.get(number, frozenset()) | {staged}

    def note_version(self, number: int, version: Identity | None) -> None:
        """The source has the bytes of that version of an object; None: it may not have them."""
        if version is None:
            self._published.pop(number, None)
        else:
            self._published[number] = version

    # -- growth in place ---------------------------------------------------------------------

    def rebase(self, op: Op, identity: Identity | None) -> None:
        """A content is at the source, as ``identity``, or was left out."""
        number = op.object
        if identity is not None:
            self._base[number] = identity.size
            self._intact.pop(number, None)
        else:
            self._intact[number] = min(self._intact.get(number, op.intact), op.intact)

    def grows_from(self, op: Op) -> int | None:
        """How many first bytes of a content the source has, if the rest can be appended there;
        None if the file has to be brought whole."""
        number = op.object
        base = self._base.get(number)
        if base is None or op.same or op.through or not op.strict or number in self._over:
            return None
        intact = min(self._intact.get(number, op.intact), op.intact)
        is_known = number in self._known and op.mtime_ns is not None
        return base if is_known and 0 < base <= min(intact, op.size) else None

    def note_growth(self, number: int, size: int) -> None:
        """A content of ``size`` bytes may be appended in place."""
        self._longest[number] = max(self._longest.get(number, 0), size)

    def note_grown(self, number: int, identity: Identity) -> None:
        """Bytes were appended in place: the source's file is ``identity`` now."""
        self._known[number] = identity

    def stop_growth(self, number: int) -> None:
        """Others have changed the file: it is to be brought whole, and theirs is a conflict."""
        self._base.pop(number, None)
        self._ours.pop(number, None)


def _version(identity: Identity) -> tuple[int, int, int]:
    """What of an identity no change of modes and names changes."""
    return identity.source_ino, identity.size, identity.mtime_ns


def _with_bytes_of(known: Identity | None, now: Identity, op: Op) -> Identity:
    """A file's identity after a change that was none of its bytes.

    If others have written the file in place meanwhile, the known size and time stay: the next
    content then meets theirs as a conflict.
    """
    if known is None or known.source_ino != now.source_ino:
        return now
    if op.mtime_ns is not None and is_time(now.mtime_ns, op.mtime_ns):
        return now
    return replace(now, size=known.size, mtime_ns=known.mtime_ns)


def _of(table: Mapping[int, T], keys: Container[int]) -> dict[int, T]:
    return {key: value for key, value in table.items() if key in keys}
