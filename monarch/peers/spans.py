"""The names of parts of large files in requests, and their digests.

A large file is shared in blocks of 4 MiB, which have owners as small files have. A request is for a
span: some granules of one block. Its digest is that of the digests of its granules, which the owner
has in its partial copy; so the owner need not read the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from monarch.placement.parts import BLOCK
from monarch.tiers.contents import copy_name
from monarch.tiers.partial import GRANULE
from monarch.types import Ino

# The bytes of the digest of a granule.
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The granules from ``first`` to ``last`` of the file ``ino``."""

    ino: Ino
    first: int
    last: int

    @property
    def offset(self) -> int:
        return self.first * GRANULE

    @property
    def block(self) -> int:
        """The block with the first granule."""
        return self.offset // BLOCK

    def length(self, size: int) -> int:
        """The bytes of the span in a file of ``size`` bytes."""
        return min((self.last + 1) * GRANULE, size) - self.offset

    def is_in(self, size: int) -> bool:
        """Whether a file of ``size`` bytes has all of the granules, in one block."""
        is_in_order = 0 <= self.first <= self.last and self.last * GRANULE < size
        return is_in_order and self.last * GRANULE // BLOCK == self.block

    @property
    def name(self) -> str:
        """What is requested of the daemon of a member."""
        return f"r/{self.ino}/{self.first}-{self.last}"

    @property
    def name_at_engine(self) -> str:
        """What is requested of the engine of a member, which passes it on if it has no copy."""
        return f"s/{copy_name(self.ino)}/{self.first}-{self.last}"


def short_digest(digest: bytes) -> int:
    """The first 8 bytes of an XXH3 (128 bits): what members compare."""
    return int.from_bytes(digest[:8], "big")


def granule_digests(data: bytes | memoryview) -> bytes:
    """The digests of granules, one after the other."""
    view = memoryview(data)
    return b"".join(
        xxhash.xxh3_128_digest(view[start : start + GRANULE])
        for start in range(0, len(view), GRANULE)
    )


def span_digest(digests: bytes) -> int:
    """The digest of a span whose granules have these digests."""
    return short_digest(xxhash.xxh3_128_digest(digests))
