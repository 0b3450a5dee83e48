"""The index of a pack: every entry of its tree as a record, in one file (docs/packs.md).

The index is computed from the tables of the chunks alone, so that it can be made again, byte for
byte. A record has a number: its position, from 1, the root. An entry's record stands behind that of
its directory. Nothing here opens a file.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from monarch.errors import PackError
from monarch.packs.format import (
    EMPTY_DIGEST,
    KINDS,
    LARGE,
    MOST,
    MOST_CHUNK,
    MOST_NAME,
    MOST_PATH,
    MOST_SIZE,
    MOST_TARGET,
    NONE,
    VERSION,
    Entry,
    path_key,
    require_version,
)
from monarch.text import MiB

INDEX_MAGIC: Final = b"MONINDEX"

# magic, version, bytes of a record, records, chunks, placed records, heap bytes, files, file bytes.
_HEADER = struct.Struct("<8sIIQQQQQQ")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size + _DIGEST.size

RECORD_DTYPE: Final = np.dtype(
    [
        ("name_offset", "<u8"),
        ("extra_offset", "<u8"),
        ("size", "<u8"),
        ("offset", "<u8"),
        ("digest", "<u8"),
        ("mtime_ns", "<i8"),
        ("parent", "<u4"),
        ("chunk", "<u4"),
        ("mode", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("nlink", "<u4"),
        ("link", "<u4"),
        ("first_child", "<u4"),
        ("children", "<u4"),
        ("name_length", "<u4"),
        ("target_length", "<u4"),
        ("xattr_length", "<u4"),
    ]
)
CHUNK_DTYPE: Final = np.dtype(
    [("file_bytes", "<u8"), ("table_digest", "<u8"), ("first", "<u4"), ("count", "<u4")]
)
_NUMBER: Final = np.dtype("<u4")

# The paths of directories without an entry have at most this number of bytes for each byte of the
# paths of the entries, or the least number.
_MOST_LOST, _LEAST_LOST_BYTES = 64, 16 * MiB

# Names that are compared at once.
_TOGETHER: Final = 1 << 14

# The mode of a directory whose own entry is lost with its chunk.
_LOST_MODE: Final = stat.S_IFDIR | 0o755


class ChunkFile(NamedTuple):
    """One chunk as the index knows it: the size of its file and the digest of its table. Both are
    0 if its table is lost."""

    file_bytes: int
    table_digest: int


def encode_index(entries: Iterable[Entry], chunks: Sequence[ChunkFile]) -> bytes:
    """The whole index. Raises PackError if the entries contradict each other.

    A directory without an entry gets one: its entry may be lost with a damaged chunk. A further
    name of a file whose bytes are lost is left out.
    """
    ordered = _complete(entries)
    links = _links(ordered)
    ordered = [entry for entry in ordered if not _is_lost(entry, links)]
    if len(ordered) > MOST or len(chunks) > MOST:
        raise PackError("the pack has too many entries")
    records, heap = _records(ordered, links)
    _require_own_large(records)
    children = _children(records)
    placed = _placed(records, ordered, len(chunks))
    table = np.zeros(len(chunks), CHUNK_DTYPE)
    counts = np.bincount(records["chunk"][placed], minlength=len(chunks)) if placed.size else 0
    table["file_bytes"] = [chunk.file_bytes for chunk in chunks]
    table["table_digest"] = [chunk.table_digest for chunk in chunks]
    table["count"] = counts
    table["first"][1:] = np.cumsum(table["count"][:-1])
    files, file_bytes = _totals(records)
    if file_bytes > MOST_SIZE:
        raise PackError("the files have more bytes than a pack can have")
    plain = _HEADER.pack(
        *(INDEX_MAGIC, VERSION, RECORD_DTYPE.itemsize, len(records) - 1, len(chunks), placed.size),
        *(len(heap), files, file_bytes),
    )
    head = plain + _DIGEST.pack(xxhash.xxh3_64_intdigest(plain))
    arrays = (records, table, children, placed)
    return head + b"".join(array.tobytes() for array in arrays) + heap


def _complete(entries: Iterable[Entry]) -> list[Entry]:
    """The entries in the order of the index, with a directory above each. Raises PackError."""
    by_path: dict[bytes, Entry] = {}
    lost = 0
    for entry in entries:
        if entry.path in by_path:
            raise PackError("two entries have the same path")
        by_path[entry.path] = entry
    most = max(_LEAST_LOST_BYTES, _MOST_LOST * sum(map(len, by_path)))
    for path in list(by_path):
        while path:
            path = path.rpartition(b"/")[0]
            above = by_path.get(path)
            if above is None:
                by_path[path] = Entry(path, _LOST_MODE)
                lost += len(path)
                if lost > most:
                    raise PackError("too many directories have no entry")
            elif stat.S_ISDIR(above.mode):
                break
            else:
                raise PackError("an entry lies beneath one that is no directory")
    by_path.setdefault(b"", Entry(b"", _LOST_MODE))
    return sorted(by_path.values(), key=lambda entry: path_key(entry.path))


def _links(ordered: Sequence[Entry]) -> Mapping[int, Entry]:
    """The name of each group of hard links whose entry has the bytes. Raises PackError."""
    first: dict[int, Entry] = {}
    for entry in ordered:
        if not entry.group:
            continue
        known = first.get(entry.group)
        if known is None or (known.chunk == NONE and entry.chunk != NONE):
            first[entry.group] = entry
        elif entry.chunk != NONE:
            raise PackError("two names of one file have bytes")
    return first


def _is_lost(entry: Entry, links: Mapping[int, Entry]) -> bool:
    """Whether the bytes of a further name are in a chunk that is lost."""
    return bool(entry.group and entry.size and links[entry.group].chunk == NONE)


def _records(
    ordered: Sequence[Entry], links: Mapping[int, Entry]
) -> tuple[npt.NDArray[Any], bytes]:
    """The array of records, with an empty one at 0, and the heap."""
    number = {entry.path: position for position, entry in enumerate(ordered, 1)}
    bytes_of = [links[entry.group] if entry.group else entry for entry in ordered]
    names = [entry.path.rpartition(b"/")[2] for entry in ordered]
    records = np.zeros(len(ordered) + 1, RECORD_DTYPE)
    rows = records[1:]
    for field in ("digest", "mtime_ns", "chunk", "offset", "mode", "uid", "gid", "size"):
        rows[field] = [getattr(entry, field) for entry in bytes_of]
    is_file = rows["mode"] & 0o170000 == stat.S_IFREG
    rows["digest"][is_file & (rows["size"] == 0)] = EMPTY_DIGEST
    rows["name_length"] = [len(name) for name in names]
    rows["target_length"] = [len(entry.target) for entry in ordered]
    rows["xattr_length"] = [len(entry.xattrs) for entry in bytes_of]
    rows["size"] += rows["target_length"]
    rows["name_offset"], rows["extra_offset"], _ = _text_places(rows)
    rows["parent"] = [number[entry.path.rpartition(b"/")[0]] for entry in ordered]
    rows["parent"][0] = 0
    link = np.fromiter((number[entry.path] for entry in bytes_of), np.int64, len(ordered))
    rows["link"] = np.where(is_file, link, 0)
    counts = np.bincount(records["parent"], minlength=len(records))
    counts[0] = 0
    records["children"] = counts
    rows["first_child"] = np.cumsum(counts)[:-1]
    rows["nlink"] = _link_counts(records)
    texts = zip(names, ordered, bytes_of, strict=True)
    heap = b"".join(
        text for name, entry, of in texts for text in (name, entry.target, of.xattrs) if text
    )
    return records, heap


def _link_counts(records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The number of links of each record, without that of element 0."""
    kind, link = records["mode"][1:] & 0o170000, records["link"][1:].astype(np.int64)
    is_folder = kind == stat.S_IFDIR
    folders = np.bincount(records["parent"][1:][is_folder], minlength=len(records))
    names = np.bincount(link, minlength=len(records))
    return np.where(is_folder, 2 + folders[1:], np.where(kind == stat.S_IFREG, names[link], 1))


def _totals(records: npt.NDArray[Any]) -> tuple[int, int]:
    """The number of the files, and their bytes; those of a file with several names once."""
    is_file = records["mode"] & 0o170000 == stat.S_IFREG
    is_first = is_file & (records["link"] == np.arange(len(records)))
    # Their sum may leave the range of 64 bits.
    upper, lower = np.divmod(records["size"][is_first], np.uint64(1 << 32))
    return int(is_file.sum()), (int(upper.sum()) << 32) + int(lower.sum())


def _text_places(
    rows: npt.NDArray[Any],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], int]:
    """The positions in the heap of the names, and of the targets and attributes behind them, of all
    records, and the bytes of the heap."""
    lengths = [rows[f"{text}_length"].astype(np.uint64) for text in ("name", "target", "xattr")]
    total = lengths[0] + lengths[1] + lengths[2]
    ends = np.cumsum(total)
    begins = ends - total
    return begins, begins + lengths[0], int(ends[-1])


def _require_own_large(records: npt.NDArray[Any]) -> None:
    """Raises PackError if two files have the bytes of one large file: with them a small pack would
    have a tree of any size."""
    is_large = (records["chunk"] == LARGE) & (records["link"] == np.arange(len(records)))
    numbers = np.sort(records["offset"][is_large])
    if bool((numbers[1:] == numbers[:-1]).any()):
        raise PackError("two files have the bytes of one large file")


def _children(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The numbers of all entries but the root, directory by directory."""
    by_parent = np.argsort(records["parent"][2:], kind="stable") + 2
    return by_parent.astype(_NUMBER)


def _placed(
    records: npt.NDArray[Any], ordered: Sequence[Entry], chunks: int
) -> npt.NDArray[np.uint32]:
    """The numbers of the records with bytes in a chunk, chunk by chunk, in the order of the bytes.
    Raises PackError."""
    is_placed = (records["chunk"] < LARGE) & (records["link"] == np.arange(len(records)))
    is_placed[0] = False
    numbers = np.flatnonzero(is_placed)
    if numbers.size and int(records["chunk"][numbers].max()) >= chunks:
        raise PackError("an entry names a chunk that the pack does not have")
    order = np.lexsort((numbers, records["offset"][numbers], records["chunk"][numbers]))
    return numbers[order].astype(_NUMBER)


class Index:
    """The arrays of an index. Opening compares only the header.

    Raises PackError if the sizes do not fit. ``require_sound`` checks all records; an index that
    was not checked may give wrong numbers, but none outside of its arrays raises more than
    IndexError. Element 0 of ``records`` belongs to no entry.
    """

    def __init__(self, raw: bytes) -> None:
        if len(raw) < HEADER_BYTES:
            raise PackError("the index ends within its header")
        magic, version, record_bytes, entries, chunks, placed, heap, files, file_bytes = (
            _HEADER.unpack_from(raw)
        )
        if magic != INDEX_MAGIC:
            raise PackError("it is no index of a pack")
        (digest,) = _DIGEST.unpack_from(raw, _HEADER.size)
        if digest != xxhash.xxh3_64_intdigest(raw[: _HEADER.size]):
            raise PackError("the header of the index is damaged")
        require_version(version, "the index has")
        is_possible = 0 < entries <= MOST and chunks <= MOST and placed <= entries
        if record_bytes != RECORD_DTYPE.itemsize or not is_possible:
            raise PackError("the header of the index has impossible numbers")
        begins = HEADER_BYTES
        arrays: list[npt.NDArray[Any]] = []
        for dtype, count in (
            (RECORD_DTYPE, entries + 1),
            (CHUNK_DTYPE, chunks),
            (_NUMBER, entries - 1),
            (_NUMBER, placed),
        ):
            ends = begins + dtype.itemsize * count
            if ends > len(raw):
                raise PackError("the index is cut off")
            arrays.append(np.frombuffer(raw, dtype, count, begins))
            begins = ends
        if begins + heap != len(raw):
            raise PackError("the index is cut off, or longer than it should be")
        self.records, self.chunks, self.children, self.placed = arrays
        self.entries: int = entries
        self.files: int = files
        self.file_bytes: int = file_bytes
        self._heap = memoryview(raw)[begins:]

    def text(self, offset: int, length: int) -> bytes:
        """Bytes of the heap. Raises PackError."""
        found = bytes(self._heap[offset : offset + length])
        if len(found) != length:
            raise PackError("a text lies outside of the index")
        return found

    def names(self, directory: int) -> npt.NDArray[np.uint32]:
        """The numbers of the entries of a directory, in the order of their names."""
        first, count = self.records[["first_child", "children"]][directory].tolist()
        return self.children[first : first + count]

    def name(self, number: int) -> bytes:
        """The last component of the path of a record. Raises PackError."""
        record = self.records[number]
        return self.text(int(record["name_offset"]), int(record["name_length"]))

    def names_of(self, numbers: npt.NDArray[np.uint32]) -> list[bytes]:
        """The last components of the paths of records. Raises PackError."""
        records, heap = self.records[numbers], self._heap
        begins = records["name_offset"].astype(np.int64)
        ends = begins + records["name_length"]
        if int(ends.max(initial=0)) > len(heap) or int(begins.min(initial=0)) < 0:
            raise PackError("a text lies outside of the index")
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        return [bytes(heap[begin:end]) for begin, end in spans]

    def path(self, number: int) -> bytes:
        """The path of a record relative to the root. Raises PackError."""
        names: list[bytes] = []
        while number > 1:
            names.append(self.name(number))
            above = int(self.records["parent"][number])
            if above >= number:
                raise PackError("a directory of the index stands behind its entry")
            number = above
        return b"/".join(reversed(names))

    def number(self, path: bytes) -> int:
        """The number of the record with ``path``, 0 if there is none. Raises PackError."""
        number = 1
        for name in path.split(b"/") if path else ():
            names = self.names(number)
            low, high = 0, len(names)
            while low < high:
                middle = (low + high) // 2
                if self.name(int(names[middle])) < name:
                    low = middle + 1
                else:
                    high = middle
            if low == len(names) or self.name(int(names[low])) != name:
                return 0
            number = int(names[low])
        return number

    def require_sound(self) -> None:
        """Checks all records, in about a second for each million. Raises PackError.

        Names are unique and plain, directories are above their entries, extents are inside their
        chunks and do not overlap.
        """
        self._require_sound_tree()
        self._require_sound_texts()
        self._require_sound_places()
        self._require_sound_names()

    def _require_sound_tree(self) -> None:
        records = self.records
        numbers = np.arange(len(records))
        parent = records["parent"].astype(np.int64)
        is_folder = records["mode"] & 0o170000 == stat.S_IFDIR
        is_sound = (
            parent[1] == 0
            and bool(is_folder[1])
            and not int(records["name_length"][1])
            and bool(((parent[2:] > 0) & (parent[2:] < numbers[2:])).all())
            and bool(is_folder[parent[2:]].all())
        )
        counts = records["children"].astype(np.int64)
        counts[0] = 0
        first = np.cumsum(counts) - counts
        is_sound = (
            is_sound
            and int(counts.sum()) == len(self.children)
            and np.array_equal(first[1:], records["first_child"][1:])
            and int(self.children.max(initial=0)) < len(records)
            and np.array_equal(np.repeat(numbers, counts), parent[self.children])
        )
        if not is_sound:
            raise PackError("the tree of the index contradicts itself")

    def _require_sound_texts(self) -> None:
        records = self.records[1:]
        names, extras, end = _text_places(records)
        is_sound = (
            np.array_equal(records["name_offset"], names)
            and np.array_equal(records["extra_offset"], extras)
            and end == len(self._heap)
        )
        if not is_sound:
            # With texts in common a small index would have attributes of any size.
            raise PackError("the texts of the index do not lie one behind the other")
        is_link = records["mode"] & 0o170000 == stat.S_IFLNK
        if not np.array_equal(is_link, records["target_length"] > 0):
            raise PackError("a symbolic link has no target, or another entry has one")
        links = records[is_link]
        if int(links["target_length"].max(initial=0)) > MOST_TARGET or any(
            b"\0" in self.text(*link) for link in links[["extra_offset", "target_length"]].tolist()
        ):
            raise PackError("a symbolic link has an impossible target")

    def _require_sound_places(self) -> None:
        records = self.records
        kind = records["mode"][1:] & 0o170000
        if not bool(np.isin(kind, list(KINDS)).all()) or bool((records["mode"] > 0xFFFF).any()):
            raise PackError("an entry of the index has an unknown type")
        is_file = kind == stat.S_IFREG
        chunk, size = records["chunk"][1:], records["size"][1:]
        has_bytes = chunk != NONE
        is_sound = (
            not bool((size > MOST_SIZE).any())
            and not bool(((chunk < LARGE) & (size > MOST_CHUNK)).any())
            and not bool((has_bytes & ~is_file).any())
            and not bool((is_file & ~has_bytes & (size > 0)).any())
            and bool((is_file | (size == records["target_length"][1:])).all())
            and bool(((chunk >= LARGE) | (chunk < len(self.chunks))).all())
        )
        if not is_sound:
            raise PackError("an entry of the index has its bytes in an impossible place")
        self._require_sound_links(is_file)
        _require_own_large(self.records)
        files, nbytes = _totals(records)
        if (files, nbytes) != (self.files, self.file_bytes) or nbytes > MOST_SIZE:
            raise PackError("the header of the index counts other files or bytes than there are")
        self._require_sound_extents()

    def _require_sound_links(self, is_file: npt.NDArray[np.bool_]) -> None:
        link = self.records["link"].astype(np.int64)
        if bool((link[1:][~is_file] != 0).any()) or bool((link >= len(link)).any()):
            raise PackError("a hard link of the index has no file")
        here = np.flatnonzero(is_file) + 1
        first = link[here]
        same = all(
            np.array_equal(self.records[name][here], self.records[name][first])
            for name in ("chunk", "offset", "size", "digest", "link", "mode")
        )
        same = same and np.array_equal(self.records["nlink"][1:], _link_counts(self.records))
        if not same or bool((first == 0).any()):
            raise PackError("the names of a file in the index contradict each other")

    def _require_sound_extents(self) -> None:
        counts = self.chunks["count"].astype(np.int64)
        first = np.cumsum(counts) - counts
        numbers = np.arange(len(self.records))
        is_placed = (self.records["chunk"] < LARGE) & (self.records["link"] == numbers)
        is_placed[0] = False
        is_sound = (
            int(counts.sum()) == len(self.placed) == int(is_placed.sum())
            and np.array_equal(first, self.chunks["first"])
            and not bool((self.chunks["file_bytes"] > MOST_SIZE).any())
            and int(self.placed.max(initial=0)) < len(self.records)
            and bool(is_placed[self.placed].all())
        )
        if is_sound:
            chunk = self.records["chunk"][self.placed]
            begin, size = self.records["offset"][self.placed], self.records["size"][self.placed]
            end = begin + size
            limit = self.chunks["file_bytes"][chunk]
            together = chunk[1:] == chunk[:-1]
            is_sound = (
                np.array_equal(chunk, np.repeat(np.arange(len(counts)), counts))
                and bool((np.bincount(self.placed) <= 1).all())
                and bool(((begin <= limit) & (size <= limit) & (end <= limit)).all())
                and bool((begin[1:] >= end[:-1])[together].all())
            )
        if not is_sound:
            raise PackError("the extents of the index contradict each other")

    def _require_sound_names(self) -> None:
        # Zeros behind the heap: the last name may be shorter than the widest one.
        heap = np.zeros(len(self._heap) + MOST_NAME, np.uint8)
        heap[: len(self._heap)] = np.frombuffer(self._heap, np.uint8)
        begins = self.records["name_offset"].astype(np.int64)
        lengths = self.records["name_length"].astype(np.int64)
        parents = self.records["parent"]
        if not bool(((lengths[2:] > 0) & (lengths[2:] <= MOST_NAME)).all()):
            raise PackError("an entry has an impossible name")
        for first in range(0, len(self.children), _TOGETHER):
            # The last one before them, too, which has its place in the order.
            numbers = self.children[max(0, first - 1) : first + _TOGETHER]
            names = _names(heap, begins[numbers], lengths[numbers])
            is_ordered = _ascends(names) | (parents[numbers[1:]] != parents[numbers[:-1]])
            if not bool(is_ordered.all()):
                above = int(parents[numbers[1:][~is_ordered][0]])
                raise PackError(f"the names in directory {above} of the index are not sorted")
        self._require_short_paths(lengths)

    def _require_short_paths(self, name_lengths: npt.NDArray[np.int64]) -> None:
        parents = self.records["parent"]
        folders = np.flatnonzero(self.records["mode"] & 0o170000 == stat.S_IFDIR)[1:]
        # Of each path of a directory, with the separator behind it.
        path_bytes = [0] * len(parents)
        columns = folders.tolist(), parents[folders].tolist(), name_lengths[folders].tolist()
        for number, parent, length in zip(*columns, strict=True):
            path_bytes[number] = path_bytes[parent] + length + 1
        above = np.array(path_bytes, np.int64)[parents[2:]]
        if int((above + name_lengths[2:]).max(initial=0)) > MOST_PATH:
            raise PackError("a path of the index is too long")


def _names(
    heap: npt.NDArray[np.uint8], begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Names of the heap, one in each row, with zeros behind the shorter ones. Raises PackError for
    one that no entry has."""
    places = np.arange(int(lengths.max(initial=0)))
    names: npt.NDArray[np.uint8] = heap[begins[:, None] + places]
    is_behind = places >= lengths[:, None]
    is_dots = ((names == ord(".")) | is_behind).all(axis=1) & (lengths <= 2)
    if bool(is_dots.any()) or bool((((names == 0) | (names == ord("/"))) & ~is_behind).any()):
        raise PackError("an entry has an impossible name")
    names[is_behind] = 0
    return names


def _ascends(names: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Of each row but the first, whether it is greater than the one before."""
    differs = names[1:] != names[:-1]
    rows = np.arange(len(differs))
    # Of equal names the first place, where they do not ascend.
    first = differs.argmax(axis=1) if differs.size else np.zeros(len(differs), np.int64)
    ascends: npt.NDArray[np.bool_] = names[1:][rows, first] > names[:-1][rows, first]
    return ascends
