"""The kernel's side of the FUSE protocol: makes its requests, and parses the replies."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY = struct.Struct("<QQQQII")
ATTR_OUT = struct.Struct("<QII")
OPEN_IN = struct.Struct("<II")
OPEN_OUT = struct.Struct("<QIi")
READ_IN = struct.Struct("<QQIIQII")
RELEASE_IN = struct.Struct("<QIIQ")
WRITE_IN = struct.Struct("<QQIIQII")
WRITE_OUT = struct.Struct("<II")
CREATE_IN = struct.Struct("<IIII")
FSYNC_IN = struct.Struct("<QII")
FALLOCATE_IN = struct.Struct("<QQQII")
LSEEK_IN = struct.Struct("<QQII")
LSEEK_OUT = struct.Struct("<Q")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
GETXATTR_IN = struct.Struct("<II")
INTERRUPT_IN = struct.Struct("<Q")
INIT_IN = struct.Struct("<IIIII44x")
INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
DIRENT = struct.Struct("<QQII")
STORE_OUT = struct.Struct("<QQII")

FOPEN_DIRECT_IO = 1 << 0
WRITE_KILL_SUIDGID = 1 << 2
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7
INIT_NO_OPEN_SUPPORT = 1 << 17
INIT_PARALLEL_DIROPS = 1 << 18
INIT_HANDLE_KILLPRIV = 1 << 19
INIT_NO_OPENDIR_SUPPORT = 1 << 24
INIT_EXT = 1 << 30
INIT2_PASSTHROUGH = 1 << 5
NOTIFY_STORE = 4
FATTR_FH = 1 << 6

HANDLE_FAST = 1 << 63
HANDLE_BOUND = 1 << 62
HANDLE_DIRECT = 1 << 61
WRITE_SYNC = 1 << 60
TOKEN_SHIFT = 40


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46


UNANSWERED = frozenset({Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT})


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives at pyfuse3's end."""

    length: int
    opcode: int
    unique: int
    node: int
    pid: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it arrives at the kernel. ``error`` is 0 or an errno, positive."""

    error: int
    unique: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Stat:
    """The attributes of an inode on the wire."""

    ino: int
    size: int
    blocks: int
    mtime_ns: int
    atime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    blksize: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a listing: ``stat`` is None in one that tells no attributes."""

    name: bytes
    ino: int
    offset: int
    kind: int
    stat: Stat | None


def request(
    opcode: int,
    unique: int,
    node: int,
    body: bytes,
    *,
    pid: int = 0,
    uid: int = 0,
    length: int | None = None,
) -> bytes:
    """A request of a process of ``uid``, whose group has the same number."""
    length = IN_HEADER.size + len(body) if length is None else length
    return IN_HEADER.pack(length, opcode, unique, node, uid, uid, pid, 0, 0) + body


def parse_request(message: bytes) -> Request:
    length, opcode, unique, node, _, _, pid, _, _ = IN_HEADER.unpack_from(message)
    return Request(length, opcode, unique, node, pid, message[IN_HEADER.size :])


def answer(unique: int, body: bytes = b"", *, error: int = 0, length: int | None = None) -> bytes:
    length = OUT_HEADER.size + len(body) if length is None else length
    return OUT_HEADER.pack(length, -error, unique) + body


def parse_answer(message: bytes) -> Answer:
    length, error, unique = OUT_HEADER.unpack_from(message)
    assert length == len(message), "a message whose length is not what it says"
    return Answer(-error, unique, message[OUT_HEADER.size :])


def parse_stat(body: bytes, offset: int = 0) -> Stat:
    fields = ATTR.unpack_from(body, offset)
    ino, size, blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns = fields[:9]
    mode, nlink, uid, gid, rdev, blksize = fields[9:15]
    return Stat(
        ino=ino,
        size=size,
        blocks=blocks,
        mtime_ns=_ns(mtime, mtime_ns),
        atime_ns=_ns(atime, atime_ns),
        ctime_ns=_ns(ctime, ctime_ns),
        mode=mode,
        nlink=nlink,
        uid=uid,
        gid=gid,
        rdev=rdev,
        blksize=blksize,
    )


def _ns(seconds: int, rest: int) -> int:
    assert rest < 10**9
    return (seconds - (1 << 64) if seconds >> 63 else seconds) * 10**9 + rest


# The answer to a CREATE: an entry, and behind it the handle.
CREATED_SIZE = ENTRY.size + ATTR.size + OPEN_OUT.size


def entry(node: int) -> bytes:
    """The attributes with which pyfuse3 answers a new regular file."""
    attributes = ATTR.pack(node, 0, 0, *[0] * 6, 0o100600, 1, 0, 0, 0, 4096, 0)
    return ENTRY.pack(node, 0, 86400, 86400, 0, 0) + attributes


def parse_entry(body: bytes) -> tuple[int, Stat]:
    """The inode number of a LOOKUP's answer, 0 if there is no such name, and its attributes."""
    assert len(body) == ENTRY.size + ATTR.size
    node, generation, entry_valid, attr_valid, entry_ns, attr_ns = ENTRY.unpack_from(body)
    assert (generation, entry_ns, attr_ns) == (0, 0, 0)
    assert entry_valid == 86400 and attr_valid == (86400 if node else 0)
    return node, parse_stat(body, ENTRY.size)


def parse_listing(body: bytes, *, plus: bool) -> list[Entry]:
    entries = []
    at = 0
    while at < len(body):
        stat = None
        start = at
        if plus:
            attributes = body[at : at + ENTRY.size + ATTR.size]
            at += ENTRY.size + ATTR.size
            # Of "." and ".." the kernel takes no attributes.
            if any(attributes):
                node, stat = parse_entry(attributes)
                assert node == stat.ino
        ino, offset, length, kind = DIRENT.unpack_from(body, at)
        at += DIRENT.size
        entries.append(Entry(body[at : at + length], ino, offset, kind, stat))
        end = start + -(-(at + length - start) // 8) * 8
        assert body[at + length : end] == bytes(end - at - length)
        at = end
    assert at == len(body)
    return entries
