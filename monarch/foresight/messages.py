"""The messages of hints: a process announces the order in which it will read files.

docs/hints.md describes each byte. A message has at most ``MOST_BYTES`` bytes, all numbers are
little-endian, and it is sent by an ioctl on an open directory of the mount. Both sides use this
module: the daemon, and the library in the process of a trainer.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from monarch.errors import Refused

VERSION: Final = 1

# The kinds of messages.
_BEGIN, _ORDER, _PROGRESS, _END, _LIMIT, _COUNT = 1, 2, 3, 4, 5, 6
# version, kind, bytes of an entry (of an order, else 0), 0, number of the order
_HEADER = struct.Struct("<BBBBI")
# descriptor, unit, number of entries
_BEGIN_BODY = struct.Struct("<IIQ")
_POSITION = struct.Struct("<Q")
# millionths of the files, 0, bytes/s
_LIMIT_BODY = struct.Struct("<IIQ")
_COUNTED = struct.Struct("<Q")

# The bytes behind the header of each kind but an order.
_SIZES = {
    _BEGIN: _BEGIN_BODY.size,
    _PROGRESS: _POSITION.size,
    _END: 0,
    _LIMIT: _LIMIT_BODY.size,
    _COUNT: _COUNTED.size,
}

# No descriptor, in ``Begin.descriptor``.
NO_DESCRIPTOR: Final = 0xFFFFFFFF
# What an entry of an order is: the file of a sample, or a shard that is read as a whole.
UNKNOWN_UNIT, SAMPLES, SHARDS = 0, 1, 2

# No order has more entries.
MOST_ENTRIES: Final = 1 << 40
# The entries that are sent at the begin of an order, if it has so many: a message takes some
# milliseconds.
FIRST_ENTRIES: Final = 1 << 16
_MOST_U32 = 0xFFFFFFFF

# asm/ioctl.h: on these machines the size has 13 bits and the direction "write" is 4.
_HAS_SHORT_SIZE = platform.machine().startswith(("ppc", "mips", "sparc", "alpha"))
_SIZE_BITS, _WRITE = (13, 4) if _HAS_SHORT_SIZE else (14, 1)
# Not used by another driver (Documentation/userspace-api/ioctl/ioctl-number.rst of Linux).
_TYPE, _NUMBER = 0xE9, 1

# The largest message of an ioctl.
MOST_BYTES: Final = (1 << _SIZE_BITS) - 1


@dataclass(frozen=True, slots=True)
class Begin:
    """Begins the order ``order``, a number that the process has chosen.

    ``descriptor`` is the number of a descriptor whose close ends the order, or NO_DESCRIPTOR.
    ``unit`` is UNKNOWN_UNIT, SAMPLES or SHARDS. ``entries`` is the number of entries that the order
    will have, 0 if it is unknown.
    """

    order: int
    descriptor: int
    unit: int
    entries: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next entries of an order: inode numbers, in the order of the reads. ``position`` is that
    of the first entry: the number of entries before it. An entry 0 is of an unknown file."""

    order: int
    position: int
    inos: array[int]


@dataclass(frozen=True, slots=True)
class Progress:
    """The process has read all entries before ``position``."""

    order: int
    position: int


@dataclass(frozen=True, slots=True)
class End:
    """The process will read no further entry of the order."""

    order: int


# A share of all files in ``Limit``.
WHOLE: Final = 1_000_000
# What is counted of a measured job: opens that tiers have served, other opens, and KiB read from
# the source. A result of an ioctl has 31 bits.
HITS, MISSES, SOURCE_KIB = 0, 1, 2
MOST_COUNTED: Final = (1 << 31) - 1
# The lowest and the highest limit of the source, in bytes/s.
LEAST_LIMIT: Final = 1 << 20
MOST_LIMIT: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Limit:
    """The session of the process is measured until the process ends: ``share`` millionths of the
    files may be read from tiers, and the source gives at most ``source_limit`` bytes/s, 0: as many
    as it can."""

    share: int
    source_limit: int


@dataclass(frozen=True, slots=True)
class Count:
    """Asks for one of the counts of the measured session."""

    counted: int


Message: TypeAlias = Begin | Piece | Progress | End | Limit | Count


def request_number(size: int) -> int:
    """The number of the ioctl with a message of ``size`` bytes (asm/ioctl.h, ``_IOC``)."""
    return _WRITE << (16 + _SIZE_BITS) | size << 16 | _TYPE << 8 | _NUMBER


def encode_begin(begin: Begin) -> bytes:
    body = _BEGIN_BODY.pack(begin.descriptor, begin.unit, begin.entries)
    return _HEADER.pack(VERSION, _BEGIN, 0, 0, begin.order) + body


def encode_piece(order: int, position: int, inos: Sequence[int]) -> bytes:
    """``inos`` has at most ``entries_of_a_piece`` entries for the width of its largest number."""
    width = 4 if max(inos, default=0) <= _MOST_U32 else 8
    header = _HEADER.pack(VERSION, _ORDER, width, 0, order)
    return header + _POSITION.pack(position) + _swapped(array("IQ"[width // 8], inos)).tobytes()


def encode_progress(order: int, position: int) -> bytes:
    return _HEADER.pack(VERSION, _PROGRESS, 0, 0, order) + _POSITION.pack(position)


def encode_end(order: int) -> bytes:
    return _HEADER.pack(VERSION, _END, 0, 0, order)


def encode_limit(share: float, source_limit: int) -> bytes:
    header = _HEADER.pack(VERSION, _LIMIT, 0, 0, 0)
    return header + _LIMIT_BODY.pack(round(share * WHOLE), 0, source_limit)


def encode_count(counted: int) -> bytes:
    return _HEADER.pack(VERSION, _COUNT, 0, 0, 0) + _COUNTED.pack(counted)


def entries_of_a_piece(width: int) -> int:
    """The most entries of ``width`` bytes, 4 or 8, in one message."""
    return (MOST_BYTES - _HEADER.size - _POSITION.size) // width


def decode(message: bytes) -> Message:
    """The message in ``message``. Entries above 32 bits become 0, since no snapshot has them.

    Raises Refused: EINVAL for anything that is not a message of this version, E2BIG for a message
    above ``MOST_BYTES``, and for positions and numbers of entries above ``MOST_ENTRIES``.
    """
    if len(message) > MOST_BYTES:
        raise Refused(errno.E2BIG)
    if len(message) < _HEADER.size:
        raise Refused(errno.EINVAL)
    version, kind, width, zero, order = _HEADER.unpack_from(message)
    if version != VERSION or zero or (width and kind != _ORDER):
        raise Refused(errno.EINVAL)
    body = memoryview(message)[_HEADER.size :]
    if kind == _ORDER:
        return _piece(order, width, body)
    size = _SIZES.get(kind)
    if size != len(body) or (kind in (_LIMIT, _COUNT) and order):
        raise Refused(errno.EINVAL)
    if kind == _BEGIN:
        descriptor, unit, entries = _BEGIN_BODY.unpack(body)
        if unit > SHARDS:
            raise Refused(errno.EINVAL)
        return Begin(order, descriptor, unit, _bounded(entries))
    if kind == _PROGRESS:
        return Progress(order, _bounded(*_POSITION.unpack(body)))
    if kind == _LIMIT:
        return _limit(*_LIMIT_BODY.unpack(body))
    if kind == _COUNT:
        (counted,) = _COUNTED.unpack(body)
        if counted > SOURCE_KIB:
            raise Refused(errno.EINVAL)
        return Count(counted)
    return End(order)


def _limit(share: int, zero: int, source_limit: int) -> Limit:
    if zero or share > WHOLE or 0 < source_limit < LEAST_LIMIT or source_limit > MOST_LIMIT:
        raise Refused(errno.EINVAL)
    return Limit(share, source_limit)


def _piece(order: int, width: int, body: memoryview) -> Piece:
    if width not in (4, 8) or len(body) < _POSITION.size:
        raise Refused(errno.EINVAL)
    (position,) = _POSITION.unpack_from(body)
    entries = body[_POSITION.size :]
    if len(entries) % width:
        raise Refused(errno.EINVAL)
    inos = array("IQ"[width // 8])
    inos.frombytes(entries)
    inos = _swapped(inos)
    if width == 8:
        inos = array("I", [ino if ino <= _MOST_U32 else 0 for ino in inos])
    return Piece(order, _bounded(position), inos)


def _bounded(number: int) -> int:
    if number > MOST_ENTRIES:
        raise Refused(errno.E2BIG)
    return number


def _swapped(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
