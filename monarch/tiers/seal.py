"""A copy's time of modification is its seal: computed from its number and the version it is of.

Whoever writes into a copy, puts another in its place or restores an old one breaks the seal, which
costs no memory per file and no read to look at: who opens a copy asks for its attributes anyway.
A broken seal proves nothing; the copy is then compared with its digest. The datapath computes the
same (fuse/_requests.c).
"""

from __future__ import annotations

import errno

from monarch.types import Identity, Ino

_MASK = (1 << 64) - 1
_SECOND_NS = 1_000_000_000
# The bits of the seconds: 30 of them are a time that every file system can store (until 2004).
_SECONDS_SHIFT = 34


class BrokenSeal(OSError):
    """A copy that somebody may have touched: its digest tells whether it is whole."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "the copy's seal is broken")


def seal(ino: Ino, identity: Identity) -> int:
    """The ``st_mtime_ns`` of the copy of ``ino`` in the version ``identity``."""
    x = int(ino)
    for value in (identity.size, identity.mtime_ns, identity.ctime_ns, identity.source_ino):
        x = _mix(x ^ (value & _MASK))
    seconds = x >> _SECONDS_SHIFT
    return seconds * _SECOND_NS + (x & ((1 << _SECONDS_SHIFT) - 1)) % _SECOND_NS


def _mix(z: int) -> int:
    """splitmix64."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31
