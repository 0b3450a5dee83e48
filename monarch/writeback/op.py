"""One change made through the mount: its fields, and its record in the journal."""

from __future__ import annotations

import stat
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast, get_args

from monarch.posix.credentials import Credentials
from monarch.types import Identity

Kind = Literal[
    "create",
    "take",
    "mkdir",
    "symlink",
    "mknod",
    "link",
    "unlink",
    "rmdir",
    "rename",
    "attr",
    "xattr",
    "content",
    "through",
    "gone",
]
_KINDS = frozenset(get_args(Kind))

_NAMES = ("path", "to")
_NUMBERS = ("ino", "object", "over_ino", "over_object", "rdev", "size", "intact")
_IDENTITIES = ("was", "over")
_FLAGS = ("synced", "through", "same", "strict", "file", "ends_set_id")
_ATTRIBUTES = ("mode", "uid", "gid", "mtime_ns", "atime_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A change. Paths are relative to the mount's root, as they were at the time of the change.

    create   A new regular file with an empty ``object``. If the journal was compacted since, the
             file may have several names; they are in ``paths``.
    take     Copy-up: a file of the source has got an ``object``. The source has the bytes that it
             had until then. The record has the mode, the owner and the extended attributes;
             ``paths`` holds the names of a file with several.
    mkdir, symlink (``to``: the target), mknod (``rdev``; the file type in ``mode``)
    link, rename     From ``path`` to the new name ``to``. A link of an entry with several names has
             some of them in ``paths``, unless root or its owner made it: which of them that user
             has named is not known.
    unlink, rmdir
    attr     Those of ``mode``, ``uid``, ``gid``, ``mtime_ns`` and ``atime_ns`` that are not None
             have changed. ``paths`` holds the names of a file with several, also for xattr.
             ``same``: no bytes were written since the last content. ``ends_set_id``: another user
             than the owner has written bytes, which has removed the set-ID bits that ``mode``
             lacks, and no others: the owner may have changed those at the source.
    xattr    ``xattrs``: new values; None for a removed attribute.
    content  The first ``size`` bytes of the object are complete. The record has all attributes of
             the file for the source, and all its names in ``paths``; ``path`` is the first.
             ``synced``: the object was synced before the record was written. ``through``: the
             bytes are not in the object but at the source, in its staged file or under its names.
             ``same``: the bytes are those of the source at the copy-up. ``intact``: this many
             bytes at the beginning are unchanged since the previous content, or since the copy-up
             if there was none; 0 also if that is not known.
    through  The tier had no room for the object. From now on its bytes are in its staged file at
             the source, beside ``path``, and the object was removed.
    gone     No file uses the ``object`` any more, and it was removed.

    ``ino`` is the inode number in the mount; it is negative for an entry of an older snapshot.
    ``object`` is 0 if the file has none. Modes are permission bits, for mknod with the file type.
    Sizes are in bytes, times in ns since the epoch.

    ``by`` is the user who made the change. It is None if the daemon has one identity only, and in a
    journal of a version that did not record users. ``also`` are the other users who have written a
    content. ``was`` is the identity that the mount knew of the source's file or directory at
    ``path``, and ``over`` that of the entry that a rename replaced; None for one made through the
    mount. ``over_ino`` and ``over_object`` are the numbers of the replaced entry, 0 if it had none.
    ``strict``: ``was`` and ``over`` are complete, so the drain compares the source with them; false
    in journals of older versions. ``file``: an attr or xattr of a regular file that had no object.
    """

    kind: Kind
    path: bytes = b""
    to: bytes = b""
    ino: int = 0
    object: int = 0
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    rdev: int = 0
    mtime_ns: int | None = None
    atime_ns: int | None = None
    size: int = 0
    intact: int = 0
    paths: tuple[bytes, ...] = ()
    xattrs: Mapping[bytes, bytes | None] = field(default_factory=dict)
    synced: bool = False
    through: bool = False
    same: bool = False
    strict: bool = False
    file: bool = False
    ends_set_id: bool = False
    by: Credentials | None = None
    also: tuple[Credentials, ...] = ()
    was: Identity | None = None
    over: Identity | None = None
    over_ino: int = 0
    over_object: int = 0

    def mode_from(self, mode: int) -> int | None:
        """The mode after the change of an entry with ``mode``; None if it does not change."""
        if self.mode is None or not self.ends_set_id:
            return self.mode
        return mode & ~((stat.S_ISUID | stat.S_ISGID) & ~self.mode)

    def names(self) -> tuple[bytes, ...]:
        """All paths of the change."""
        if self.kind == "content":
            return self.paths
        return (self.path, self.to) if self.kind in ("link", "rename") else (self.path,)


def above(path: bytes) -> Iterator[bytes]:
    """The directories above ``path``, the nearest first, without the root."""
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        yield path


def is_within(path: bytes, directory: bytes) -> bool:
    """Whether ``path`` is ``directory``, or beneath it; an empty ``directory`` is the root."""
    return not directory or path == directory or path.startswith(directory + b"/")


def to_record(op: Op) -> dict[str, Any]:
    """``op`` as a JSON object, without the fields that have their default values."""
    record: dict[str, Any] = {"op": op.kind}
    for name in _NAMES:
        if value := getattr(op, name):
            record[name] = text(value)
    for name in _NUMBERS:
        if value := getattr(op, name):
            record[name] = value
    for name in _ATTRIBUTES:
        if (value := getattr(op, name)) is not None:
            record[name] = value
    if op.paths:
        record["paths"] = [text(path) for path in op.paths]
    if op.xattrs:
        record["xattrs"] = {
            text(name): None if value is None else b64encode(value).decode("ascii")
            for name, value in op.xattrs.items()
        }
    for name in _FLAGS:
        if getattr(op, name):
            record[name] = True
    if op.by is not None:
        record["by"] = _numbers(op.by)
    if op.also:
        record["also"] = [_numbers(other) for other in op.also]
    for name in _IDENTITIES:
        if (identity := getattr(op, name)) is not None:
            record[name] = list(astuple(identity))
    return record


def _numbers(credentials: Credentials) -> list[int]:
    return [credentials.uid, credentials.gid, *credentials.groups]


def from_record(record: Mapping[str, Any]) -> Op:
    """The inverse of ``to_record``. Raises ValueError if ``record`` is not valid."""
    kind = record.get("op")
    if kind not in _KINDS:
        raise ValueError(f"an operation of an unknown kind: {kind!r}")
    try:
        plain: dict[str, Any] = {name: raw(record.get(name, "")) for name in _NAMES}
        plain |= {name: int(record.get(name, 0)) for name in _NUMBERS}
        plain |= {name: record.get(name) for name in _ATTRIBUTES}
        plain |= {name: bool(record.get(name)) for name in _FLAGS}
        return Op(
            kind=cast(Kind, kind),
            **plain,
            paths=tuple(raw(path) for path in record.get("paths", ())),
            xattrs={
                raw(name): None if value is None else b64decode(value, validate=True)
                for name, value in record.get("xattrs", {}).items()
            },
            by=_credentials(*record["by"]) if "by" in record else None,
            also=tuple(_credentials(*other) for other in record.get("also", ())),
            was=Identity(*record["was"]) if "was" in record else None,
            over=Identity(*record["over"]) if "over" in record else None,
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"an operation that cannot be read: {error}") from error


@lru_cache(1024)
def _credentials(uid: int, gid: int, *groups: int) -> Credentials:
    # Cached, so that the records of one user share one object.
    return Credentials(uid, gid, groups)


def text(name: bytes) -> str:
    """A name as a JSON string, in any locale."""
    return name.decode("utf-8", "surrogateescape")


def raw(name: str) -> bytes:
    """The inverse of ``text``."""
    return name.encode("utf-8", "surrogateescape")
