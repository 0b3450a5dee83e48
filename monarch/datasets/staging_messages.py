"""The messages between the processes of a job and the broker of a staging area, of fixed sizes, and
the seals of the memory that they carry."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from enum import IntEnum
from typing import NamedTuple

from monarch.datasets.staging_table import Kind

MOST_JOBS = 256
# Jobs, and the processes that prepare batches for them.
MOST_CONNECTIONS = 2048
MOST_DEPTH = 256
# Of a batch number, and of an epoch number.
MOST_COUNT = 1 << 31
MOST_STALL_S = 10.0**6

_REQUEST = struct.Struct("<4sBxHHxxdQQQQ")
_REPLY = struct.Struct("<B?HHHQQQ")
_LONGEST = max(_REQUEST.size, _REPLY.size) + 1
_DESCRIPTOR = struct.Struct("@i")
# The version of the messages.
_MAGIC = b"MSA2"

_CREDENTIALS = struct.Struct("iII")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Ask(IntEnum):
    """The kinds of requests. Only WANT, AWAIT and WORK have a reply, and JOIN and ATTACH if they
    are refused."""

    # A job, at its first or next batch.
    JOIN = 1
    # A process that prepares batches.
    ATTACH = 2
    # The memory of a batch is attached, which an earlier broker had.
    KEEP = 3
    # The job waits for a batch, and may prepare one meanwhile.
    WANT = 4
    # The job waits for a batch, which other processes prepare.
    AWAIT = 5
    # The process can prepare a batch of the epoch that begins with the batch of the position.
    WORK = 6
    # The memory of the batch is attached.
    PUBLISH = 7
    # The job has used all batches before the position.
    MOVE = 8


# A reply beside those of the table: the area is used with other batches.
REFUSED = 8


class MessageError(Exception):
    """A message that a job, or a broker, of this version does not send."""


class Terms(NamedTuple):
    """What the processes of an area have in common. An epoch has ``batches`` batches, and
    ``content`` is a number for what is in them. ``depth`` and ``stall_s`` are those of
    ``StagingTable``."""

    batches: int
    depth: int
    stall_s: float
    content: int


class Request(NamedTuple):
    """What a process asks for. ``jobs`` is that of ``StagingTable.join``, ``member`` the number of
    the process in ``staging_members.py``."""

    kind: Ask
    position: int
    jobs: int
    member: int
    terms: Terms

    def encode(self) -> bytes:
        batches, depth, stall_s, content = self.terms
        head = (_MAGIC, self.kind, self.jobs, depth, stall_s)
        return _REQUEST.pack(*head, batches, self.position, self.member, content)


class Answer(NamedTuple):
    """A reply, with the number of jobs, the number of batches that are kept, the largest such
    number, and the number of batches that were published. No job needs a batch before ``floor``.
    ``has_all``: the broker waits for no further jobs."""

    kind: int
    position: int
    has_all: bool
    jobs: int
    kept: int
    most_kept: int
    published: int
    floor: int

    def encode(self) -> bytes:
        numbers = (self.jobs, self.kept, self.most_kept, self.published, self.position, self.floor)
        return _REPLY.pack(self.kind, self.has_all, *numbers)


def decode_request(message: bytes) -> Request:
    """Raises MessageError for another length, version or kind, and for a number out of range."""
    if len(message) != _REQUEST.size:
        raise MessageError("the length of the request is wrong")
    magic, kind, jobs, depth, stall_s, count, position, member, content = _REQUEST.unpack(message)
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
    return Request(Ask(kind), position, jobs, member, Terms(count, depth, stall_s, content))


def decode_answer(message: bytes) -> Answer:
    """Raises MessageError."""
    if len(message) != _REPLY.size:
        raise MessageError("the length of the reply is wrong")
    kind, has_all, jobs, kept, most_kept, published, position, floor = _REPLY.unpack(message)
    if kind != REFUSED and kind not in tuple(Kind):
        raise MessageError("the kind of the reply is not known")
    return Answer(kind, position, has_all, jobs, kept, most_kept, published, floor)


def receive(
    connection: socket.socket, size: int = _LONGEST, *, wait: bool = True
) -> tuple[bytes, int]:
    """One message and its descriptor, or -1. The message is empty if the connection has ended.

    A message that is too long keeps ``size`` bytes, one more than a valid request. Further
    descriptors of a message are closed by the kernel. Raises OSError: BlockingIOError without
    ``wait`` if there is no message, and EMFILE if the process has too many descriptors.
    """
    # socket.recv_fds does not pass flags on, so a program that is started would get descriptors.
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    message, ancillary, received, _ = connection.recvmsg(size, room, flags)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            for (fd,) in _DESCRIPTOR.iter_unpack(content):
                return message, fd
    if received & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "this process cannot have the descriptor of a batch")
    return message, -1


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
