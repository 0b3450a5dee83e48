"""Decides which file lies where in a pack: a pure function of the tree, the seed and the order.

The random order sorts the files by a hash of seed and path. So a batch of a training that reads
chunk by chunk has as many different labels as one of a shuffle of all files (docs/packs.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from monarch.errors import PackError
from monarch.packs.format import HEADER_BYTES, LARGE, MOST, Entry, path_key, table_size
from monarch.packs.tree import Identity, Listed


class Placed(NamedTuple):
    """A file whose bytes go into a chunk or into large/; its digest is not known yet."""

    entry: Entry
    identity: Identity


class Plan(NamedTuple):
    """``chunks``: the files of each chunk in their order. ``large``: in the order of their numbers.
    ``tree``: the entries without bytes of their own, without those of the large files."""

    chunks: list[list[Placed]]
    large: list[Placed]
    tree: list[Entry]

    @property
    def bytes(self) -> int:
        """The bytes that will be read from the source."""
        return sum(each.entry.size for files in (*self.chunks, self.large) for each in files)


def plan(listed: Iterable[Listed], *, seed: int, order: str, chunk_bytes: int) -> Plan:
    """Places the entries of a tree. Raises PackError for more files than a pack can have."""
    tree: list[Entry] = []
    large: list[Placed] = []
    small: list[Placed] = []
    groups: dict[tuple[int, int], int] = {}
    ordered = sorted(listed, key=lambda each: path_key(each.entry.path))
    names = Counter(each.identity[:2] for each in ordered if each.links > 1)
    for entry, identity, links in ordered:
        is_first = True
        file = identity[:2]
        # Names outside of the tree do not count: a copy of the tree gives the same pack.
        if links > 1 and names[file] > 1:
            is_first = file not in groups
            entry = entry._replace(group=groups.setdefault(file, len(groups) + 1))
        if not entry.size or not is_first:
            tree.append(entry)
        elif entry.size > chunk_bytes:
            large.append(Placed(entry._replace(chunk=LARGE, offset=len(large)), identity))
        else:
            small.append(Placed(entry, identity))
    if len(tree) + len(large) + len(small) > MOST:
        raise PackError(f"a pack has at most {MOST:,} entries", hint="pack parts of the tree")
    if order == "random":
        small.sort(key=lambda each: _random_key(each.entry.path, seed))
    chunks = [_with_offsets(number, files) for number, files in enumerate(_cut(small, chunk_bytes))]
    return Plan(chunks, large, tree)


def _random_key(path: bytes, seed: int) -> tuple[int, bytes]:
    return xxhash.xxh3_64_intdigest(path, seed), path


def _cut(files: Iterable[Placed], chunk_bytes: int) -> Iterator[list[Placed]]:
    """The files in their order, in lists of at most ``chunk_bytes``."""
    together: list[Placed] = []
    free = chunk_bytes
    for each in files:
        if each.entry.size > free:
            yield together
            together, free = [], chunk_bytes
        together.append(each)
        free -= each.entry.size
    if together:
        yield together


def _with_offsets(number: int, files: list[Placed]) -> list[Placed]:
    """The files of chunk ``number``, one behind the other, behind their table."""
    offset = HEADER_BYTES + table_size(each.entry for each in files)
    placed = []
    for each in files:
        placed.append(each._replace(entry=each.entry._replace(chunk=number, offset=offset)))
        offset += each.entry.size
    return placed
