"""The bucket of a file: a fixed pseudo-random number by which a share of a dataset is admitted.

It depends only on the inode number at the source, so that it survives a rebuild of the snapshot and
is independent of the order of names. The function is ``mix``, of which the top bits are used: the
finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). The order of samples (frameworks/sampler.py) is drawn with it, too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BUCKETS = 65536

_MASK = (1 << 64) - 1
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(z: int) -> int:
    """The finaliser of splitmix64, of the lower 64 bits of ``z``."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix`` of each element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def bucket(source_ino: int) -> int:
    """The bucket, 0 to ``BUCKETS - 1``, of the file with this inode number at the source."""
    return mix(source_ino) >> 48


def buckets(source_inos: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """``bucket`` of each element of a uint64 array, as an int64 array of the same shape."""
    return (mixed(source_inos.astype(np.uint64)) >> np.uint64(48)).astype(np.int64)
