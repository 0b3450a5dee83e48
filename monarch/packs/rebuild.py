"""Reads the tables of all chunks of a pack, and writes its index and description from them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from monarch.errors import NewerPack, PackError
from monarch.packs.directory import DESCRIPTION, INDEX, MARK, TREE, naming, require_known
from monarch.packs.format import LARGE, ORDERS, PAYLOAD, Entry, Header
from monarch.packs.format import TREE as TREE_KIND
from monarch.packs.index import ChunkFile, encode_index
from monarch.packs.output import lock, write_file
from monarch.packs.pack import (
    Pack,
    PackSummary,
    chunk_name,
    encode_description,
    large_name,
    summary_of,
)
from monarch.packs.tables import TableFile, read_table
from monarch.posix.files import closing_fd
from monarch.posix.openat2 import lstat_beneath, open_beneath
from monarch.text import counted, escape_text
from monarch.types import Progress

_CHUNK = re.compile(rb"([0-9]{6,})\.chunk")
_READ = os.O_RDONLY | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is wrong: the file of the pack, the entry in it if one is meant, the reason.
    ``loses``: the tables of this file cannot be read, so its entries are not known."""

    file: bytes
    path: bytes | None
    what: str
    loses: bool = False


@dataclass(slots=True)
class Tables:
    """All that the tables of a pack say. A chunk without a readable table is None."""

    tree: Header | None = None
    chunks: list[TableFile | None] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)

    def index(self) -> tuple[bytes, PackSummary]:
        """The index and the description. Raises PackError if nothing can be read, or the tables
        contradict each other."""
        headers = [self.tree, *(chunk.header for chunk in self.chunks if chunk is not None)]
        header = next((each for each in headers if each is not None), None)
        if header is None:
            raise PackError("no chunk can be read", hint="pack the source again")
        raw = encode_index(self.entries, [_chunk_file(chunk) for chunk in self.chunks])
        large = sum(entry.chunk == LARGE for entry in self.entries)
        return raw, summary_of(
            raw,
            large=self.tree.large if self.tree is not None else large,
            chunk_bytes=header.chunk_bytes,
            seed=header.seed,
            order=ORDERS[header.order],
        )


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """``pack`` describes the pack as it is now. ``is_changed``: the index or the description was
    written. ``is_kept``: the present index is sound and knows more than the damaged chunks."""

    pack: PackSummary
    is_changed: bool
    is_kept: bool
    damage: list[Damage]


def read_tables(root: int, *, progress: Progress) -> Tables:
    """The tables of the pack in the open directory ``root``. Damage is collected, not raised.
    Raises OSError if the directory of the chunks cannot be read."""
    tables = Tables()
    with closing_fd(open_beneath(root, b"chunks", os.O_RDONLY | os.O_DIRECTORY)) as fd:
        names = {os.fsencode(name) for name in os.listdir(fd)}
    numbers = [int(match[1]) for name in names if (match := _CHUNK.fullmatch(name))]
    tree = _table(root, TREE, tables.damage)
    if tree is not None and tree.header.kind == TREE_KIND:
        tables.tree = tree.header
    elif tree is not None:
        tables.damage.append(Damage(TREE, None, "it is another chunk", loses=True))
        tree = None
    # A number alone takes no memory: each chunk that is missing is reported.
    count = tables.tree.sequence if tables.tree is not None else _count(numbers)
    if count > len(numbers) + _MOST_MISSING:
        missing = counted(count - len(numbers), "chunk", "chunks")
        raise PackError(f"{missing} of {count:,} are missing", hint="copy the pack again")
    reference = tables.tree
    seen: set[bytes] = set()
    if tree is not None:
        _add(tables, TREE, tree, seen)
    for number in range(count):
        progress(number, count, "reading tables")
        found = _table(root, chunk_name(number), tables.damage)
        if found is not None:
            what = _misfit(found.header, number, reference)
            if what:
                tables.damage.append(Damage(chunk_name(number), None, what, loses=True))
                found = None
            elif not _add(tables, chunk_name(number), found, seen):
                found = None
        if found is not None:
            reference = reference or found.header
        tables.chunks.append(found)
    progress(count, count, "reading tables")
    _require_large(root, tables)
    return tables


# The most missing chunks that are listed one by one.
_MOST_MISSING = 100_000


def _count(numbers: Sequence[int]) -> int:
    """The number of chunks by their names, without those far beyond the others."""
    count = max(numbers, default=-1) + 1
    return count if count <= len(numbers) + _MOST_MISSING else len(numbers)


def _table(root: int, name: bytes, damage: list[Damage]) -> TableFile | None:
    try:
        with closing_fd(open_beneath(root, name, _READ)) as fd:
            found = read_table(fd)
    except OSError as error:
        damage.append(Damage(name, None, f"it cannot be read: {error.strerror}", loses=True))
        return None
    except NewerPack as error:
        # Not damaged: this Monarch must not write an index without its entries.
        raise NewerPack(f"{name.decode()}: {error.args[0]}", hint=error.hint) from error
    except PackError as error:
        damage.append(Damage(name, None, str(error), loses=True))
        return None
    if not found.is_whole:
        damage.append(Damage(name, None, "it is cut off, or longer than its header says"))
    return found


def _misfit(header: Header, number: int, reference: Header | None) -> str:
    """Why a chunk does not belong to the pack, empty if it does."""
    if header.kind != PAYLOAD or header.sequence != number:
        return "it is another chunk"
    if reference is not None and (header.seed, header.order, header.chunk_bytes) != (
        *(reference.seed, reference.order, reference.chunk_bytes),
    ):
        return "it belongs to another pack"
    return ""


def _add(tables: Tables, name: bytes, found: TableFile, seen: set[bytes]) -> bool:
    """Adds the entries of a chunk, unless one of them is known already."""
    paths = {entry.path for entry in found.entries}
    if len(paths) < len(found.entries) or not paths.isdisjoint(seen):
        what = "it has an entry twice, or one that another chunk has"
        tables.damage.append(Damage(name, None, what, loses=True))
        return False
    seen |= paths
    tables.entries += found.entries
    return True


def _require_large(root: int, tables: Tables) -> None:
    """Notes the large files that are missing or have another size."""
    for entry in tables.entries:
        if entry.chunk != LARGE:
            continue
        name = large_name(entry.offset)
        try:
            if lstat_beneath(root, name).st_size != entry.size:
                tables.damage.append(Damage(name, entry.path, "it has another size"))
        except OSError as error:
            what = f"it cannot be read: {error.strerror}"
            tables.damage.append(Damage(name, entry.path, what))


def _chunk_file(found: TableFile | None) -> ChunkFile:
    if found is None:
        return ChunkFile(0, 0)
    return ChunkFile(found.header.file_bytes, found.header.table_digest)


def rebuild(path: Path, *, progress: Progress) -> RebuildReport:
    """Writes the index and the description of the pack ``path`` from its chunks, if they differ.

    A present index that is sound is kept if the tables of chunks are damaged: it still lists their
    files. Raises PackError if there is no pack, or it cannot be written; NewerPack if a file of it
    is of a newer Monarch; LockedError if another process writes it.
    """
    name = escape_text(os.fspath(path))
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
            lock(root, name)
            _require_finished(root, name)
            with naming(os.fsencode(path)):
                require_known(root)
                tables = read_tables(root, progress=progress)
                raw, info = tables.index()
            present = _present(path)
            if present == info:
                return RebuildReport(info, False, False, tables.damage)
            if present is not None and any(each.loses for each in tables.damage):
                return RebuildReport(present, False, True, tables.damage)
            write_file(root, INDEX, raw)
            write_file(root, DESCRIPTION, encode_description(info))
            return RebuildReport(info, True, False, tables.damage)
    except OSError as error:
        raise PackError(f"{name}: {error.strerror}", hint="name the directory of a pack") from error


def _require_finished(root: int, name: str) -> None:
    """Raises PackError if the pack was never completed."""
    names = set(os.listdir(root))
    if os.fsdecode(MARK) in names and os.fsdecode(DESCRIPTION) not in names:
        raise PackError(
            f"{name}: the pack is not finished", hint="run the command `monarch pack` again"
        )


def _present(path: Path) -> PackSummary | None:
    """The description of the pack if its index is sound and fits it."""
    with suppress(PackError):
        with Pack.open(os.fsencode(path)) as pack:
            pack.require_sound()
            return pack.info
    return None
