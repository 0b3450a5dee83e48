"""The messages between a job and the broker of a staging area, of fixed sizes, and the seals of
the memory that they carry."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from enum import IntEnum
from typing import NamedTuple

from monarch.datasets.staging_table import Kind

MOST_JOBS = 256
MOST_DEPTH = 256
# Of a batch number, and of an epoch number.
MOST_COUNT = 1 << 31
MOST_STALL_S = 10.0**6

_REQUEST = struct.Struct("<4sBxHHxxdQQ")
_REPLY = struct.Struct("<BxHHHQQ")
# The version of the messages.
_MAGIC = b"MSA1"

_CREDENTIALS = struct.Struct("iII")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Ask(IntEnum):
    """The kinds of requests. Only WANT has a reply, and JOIN if it is refused."""

    JOIN = 1
    WANT = 2
    # The memory of the batch is attached.
    PUBLISH = 3
    MOVE = 4


# A reply beside those of the table: the area is used with another number of batches an epoch.
REFUSED = 6


class MessageError(Exception):
    """A message that a job, or a broker, of this version does not send."""


class Request(NamedTuple):
    """What a job asks for. ``jobs``, ``depth`` and ``stall_s`` are those of ``StagingTable``; an
    epoch has ``batches`` batches."""

    kind: Ask
    position: int
    jobs: int
    depth: int
    stall_s: float
    batches: int

    def encode(self) -> bytes:
        return _REQUEST.pack(
            *(_MAGIC, self.kind, self.jobs, self.depth, self.stall_s, self.batches, self.position)
        )


class Answer(NamedTuple):
    """A reply, with the number of jobs, the number of batches that are kept, the largest such
    number, and the number of batches that were published."""

    kind: int
    position: int
    jobs: int
    kept: int
    most_kept: int
    published: int

    def encode(self) -> bytes:
        return _REPLY.pack(
            *(self.kind, self.jobs, self.kept, self.most_kept, self.published, self.position)
        )


def decode_request(message: bytes) -> Request:
    """Raises MessageError for another length, version or kind, and for a number out of range."""
    if len(message) != _REQUEST.size:
        raise MessageError("the length of the request is wrong")
    magic, kind, jobs, depth, stall_s, count, position = _REQUEST.unpack(message)
    if (
        magic != _MAGIC
        or kind not in tuple(Ask)
        or not 1 <= jobs <= MOST_JOBS
        or not 1 <= depth <= MOST_DEPTH
        or not 0 < stall_s <= MOST_STALL_S
        or not 1 <= count <= MOST_COUNT
        or position > MOST_COUNT**2
    ):
        raise MessageError("the request is not valid")
    return Request(Ask(kind), position, jobs, depth, stall_s, count)


def decode_answer(message: bytes) -> Answer:
    """Raises MessageError."""
    if len(message) != _REPLY.size:
        raise MessageError("the length of the reply is wrong")
    kind, jobs, kept, most_kept, published, position = _REPLY.unpack(message)
    if kind != REFUSED and kind not in tuple(Kind):
        raise MessageError("the kind of the reply is not known")
    return Answer(kind, position, jobs, kept, most_kept, published)


def receive(connection: socket.socket) -> tuple[bytes, int]:
    """One message and its descriptor, or -1. The message is empty if the connection has ended.

    A message that is too long keeps one byte more than a valid one. Further descriptors of a
    message are closed by the kernel. Raises OSError.
    """
    size = max(_REQUEST.size, _REPLY.size) + 1
    flags = socket.MSG_CMSG_CLOEXEC
    message, descriptors, _, _ = socket.recv_fds(connection, size, 1, flags)
    return message, descriptors[0] if descriptors else -1


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process number and the user of the process at the other end. Raises OSError."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(peer)
    return pid, uid


def seal(fd: int) -> None:
    """From now on no process can change the memory. Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def sealed_size(fd: int) -> int:
    """The size of memory that no process can change; 0 for any other descriptor."""
    if fd < 0:
        return 0
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return 0
        status = os.fstat(fd)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
