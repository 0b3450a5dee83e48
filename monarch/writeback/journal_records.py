"""The records of the journal as text: encoded and decoded, and what is known from rewritten ones.

A record is a line: 16 hex digits of the xxh3-64 of the rest, a blank, JSON, a newline. Records are

    {"monarch": 2, "token", "source", "seq", "object", "ino"}   first: the version of the format,
                                the source, and the numbers from which new ones are counted
    {"boot"}                    the records that follow were written after this start of the machine
    {"seq", "ns", "op", ...}    a change (op.py) and when it was recorded, in ns since the epoch
    {"done", "at", "also"}      the source has all changes up to that seq and, of those after a
                                change that it refuses, those in ``also``; ``at``: [seq, size,
                                mtime_ns, ctime_ns, source_ino] of each content that was published
                                and of each entry that was made; ``aside``: all refused changes that
                                are set aside, if they have changed; ``withheld``: [seq, bits] of
                                contents and changes of modes: the set-ID bits that the file is to
                                get with its next content; ``removed``: objects whose older version
                                these changes have removed at the source
    {"staged"}                  [object, source_ino, size, mtime_ns]: this daemon has staged that
                                file at the source and is about to give it the object's name; or,
                                [object, source_ino, -1, length]: it appends to the object's file,
                                up to that length in bytes. ``instead``: the number of an earlier
                                staged file, which was removed before it had a name
    {"known", "made", "over", "ours", "new", "present", "given_up", "settled", "set_id", "withheld"}
                                in a rewritten journal: the state that the changes that it does not
                                contain any more have left at the source (``Known``), each as a
                                list of lists or of objects
    {"believed"}, {"lost"}      objects that have been synced though no content says so; objects
                                whose bytes are lost; ``ended`` beside "believed": a clean end of
                                the mount, after which no object changes

and each may have "upto": the length of the file in bytes that had been synced before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import xxhash

from monarch.types import ANY_SIZE, Identity
from monarch.writeback.op import Op, text, to_record

# Version 2 names the user of each change. A Monarch that knows only version 1 would make all
# changes as root.
VERSION = 2
DIGITS = 16
_ENCODED = json.JSONEncoder(separators=(",", ":")).encode

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Known:
    """The state that changes have left at the source which a rewritten journal does not contain any
    more.

    By object: ``known`` is the source's version of its file. ``over``: files that a rename on the
    mount has replaced by this one, and that the source still has; none if the file only has another
    name there. ``ours``: staged files that may have got its name. ``new``: the file was created on
    the mount. ``present``: the source has it under its names.

    ``made``: the source's version of entries without an object, by their inode number on the mount.
    ``given_up``: inode numbers of entries that were created on the mount and are not at the source
    under their name. ``settled``: files of the source that were copied up before the journal was
    rewritten, so that everything else here is newer. ``set_id``: of files whose mode was changed
    after their last bytes came, or whose last bytes came before their record, by object, the set-ID
    bits that the drain may have withheld: a Monarch that did not record ``withheld`` has changed
    them. ``withheld``: by object, the set-ID bits that the file gets with its next content.
    """

    known: Mapping[int, Identity] = field(default_factory=dict)
    made: Mapping[int, Identity] = field(default_factory=dict)
    over: Mapping[int, tuple[Identity, ...]] = field(default_factory=dict)
    ours: Mapping[int, frozenset[Identity]] = field(default_factory=dict)
    new: frozenset[int] = frozenset()
    present: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()
    set_id: Mapping[int, int] = field(default_factory=dict)
    withheld: Mapping[int, int] = field(default_factory=dict)

    def record(self) -> Record:
        return {
            "known": [[number, *astuple(it)] for number, it in self.known.items()],
            "made": [[ino, *astuple(it)] for ino, it in self.made.items()],
            "over": [[number, *astuple(it)] for number, its in self.over.items() for it in its],
            # Older versions do not know this.
            "renamed": [number for number, its in self.over.items() if not its],
            "ours": [_staged_list(number, it) for number, its in self.ours.items() for it in its],
            "new": sorted(self.new),
            "present": sorted(self.present),
            "given_up": sorted(self.given_up),
            "settled": sorted(self.settled),
            # Older versions distinguish bits that were withheld from those that were given.
            "set_id": [[number, held, held] for number, held in self.set_id.items()],
            "withheld": [[number, bits] for number, bits in self.withheld.items()],
        }

    @classmethod
    def of(cls, record: Record) -> Known:
        """The inverse of ``record``. Raises KeyError, TypeError, ValueError if it is none."""
        over: dict[int, tuple[Identity, ...]] = dict.fromkeys(record.get("renamed", ()), ())
        for number, *it in record["over"]:
            over[number] = (*over.get(number, ()), Identity(*it))
        ours: dict[int, frozenset[Identity]] = {}
        for staged in record["ours"]:
            number, identity = staged_of(*staged)
            ours[number] = ours.get(number, frozenset()) | {identity}
        return cls(
            known={number: Identity(*it) for number, *it in record["known"]},
            made={ino: Identity(*it) for ino, *it in record["made"]},
            over=over,
            ours=ours,
            new=frozenset(record["new"]),
            present=frozenset(record["present"]),
            given_up=frozenset(record.get("given_up", ())),
            settled=frozenset(record.get("settled", ())),
            set_id={number: held for number, held, _ in record.get("set_id", ())},
            withheld=dict(record.get("withheld", ())),
        )


def header(token: str, source: bytes, next_seq: int, next_object: int, next_ino: int) -> Record:
    return {
        "monarch": VERSION,
        "token": token,
        "source": text(source),
        "seq": next_seq,
        "object": next_object,
        "ino": next_ino,
    }


def change(seq: int, recorded_ns: int, op: Op) -> Record:
    return {"seq": seq, "ns": recorded_ns, **to_record(op)}


def marks(done: Mapping[int, Identity | None]) -> list[list[int]]:
    """The list ``at`` of a mark."""
    return [
        [seq, it.size, it.mtime_ns, it.ctime_ns, it.source_ino]
        for seq, it in done.items()
        if it is not None
    ]


def staged_record(number: int, staged: Identity, instead: int = 0) -> Record:
    record: Record = {"staged": _staged_list(number, staged)}
    if instead:
        record["instead"] = instead
    return record


def staged_besides(staged: frozenset[Identity], instead: int) -> frozenset[Identity]:
    """``staged`` without the file with the number ``instead``, unless that is 0."""
    if not instead:
        return staged
    return frozenset(it for it in staged if it.source_ino != instead)


def _staged_list(number: int, staged: Identity) -> list[int]:
    return [number, staged.source_ino, staged.size, staged.mtime_ns]


def staged_of(
    number: int, source_ino: int, size: int = ANY_SIZE, mtime_ns: int = 0
) -> tuple[int, Identity]:
    """An object and a staged file of it, from the list in a record."""
    # An older journal has the inode number alone.
    return number, Identity(size, mtime_ns, 0, source_ino)


def encoded(record: Mapping[str, Any]) -> bytes:
    """The line of a record."""
    content = _ENCODED(record).encode("ascii")
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(content).encode("ascii"), content)


def decoded(line: bytes) -> Record | None:
    """The record of a line without its newline, None if the line is not whole."""
    content = line[DIGITS + 1 :]
    if line[:DIGITS] != xxhash.xxh3_64_hexdigest(content).encode("ascii"):
        return None
    try:
        record = json.loads(content)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
