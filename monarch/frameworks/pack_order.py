"""The chunk-wise order of files in a pack, for a pack or a mount of one (docs/packs.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from monarch.config.defaults import state_root
from monarch.control.registry import Registry
from monarch.errors import ConfigError, PackError
from monarch.frameworks.announce import AnyPath
from monarch.frameworks.chunk_order import ChunkwiseSampler
from monarch.packs.directory import KEPT_INDEX, is_pack
from monarch.packs.mixing import chunk_of_each
from monarch.packs.pack import Pack
from monarch.posix.mounts import MONARCH_TYPE, mount_table
from monarch.text import escape_text

# The text behind the last slash of a path that does not end with a name.
_NO_NAMES = frozenset((b"", b".", b".."))


def chunks_of_files(pack: AnyPath, paths: Sequence[AnyPath]) -> npt.NDArray[np.int64]:
    """The chunk of each of the files ``paths``, numbered from 0 without gaps, of shape (files,).

    ``pack`` is the directory of a pack, or the mount point of one. A path is relative to the root
    of the tree, or an absolute path beneath ``pack``. A large file counts as a chunk. Entries
    without bytes, such as files of 0 bytes, cost no read: they are spread over the chunks.

    Raises PackError if there is no pack, and ValueError for a path that it does not have.
    """
    return _chunks(pack, paths)[0]


def pack_sampler(
    pack: AnyPath,
    paths: Sequence[AnyPath],
    *,
    group: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
) -> ChunkwiseSampler:
    """A sampler of the samples ``paths`` in the chunk-wise order of a pack, with groups of
    ``group`` chunks; ``pack`` and ``paths`` are those of ``chunks_of_files``.

    The identity of the pack is part of its fingerprint: a saved state continues only with the same
    pack. Raises PackError and ValueError as ``chunks_of_files`` and ``ChunkwiseSampler``.
    """
    chunks, identity = _chunks(pack, paths)
    return ChunkwiseSampler(
        chunks,
        group=group,
        seed=seed,
        rank=rank,
        world_size=world_size,
        fingerprint=f"pack:{identity}",
        drop_last=drop_last,
    )


def _chunks(pack: AnyPath, paths: Sequence[AnyPath]) -> tuple[npt.NDArray[np.int64], str]:
    """The chunk of each file, and the identity of the pack."""
    top = os.path.abspath(os.fsencode(pack))
    with _opened(top) as opened:
        opened.require_sound()
        numbers = _numbers(opened, top, paths)
        links = opened.records["link"][numbers].astype(np.int64)
        has_bytes = (links > 0) & (opened.size_of[numbers] > 0)
        chunks = np.zeros(len(numbers), np.int64)
        found = chunk_of_each(opened, links[has_bytes])
        chunks[has_bytes] = found
        bare = np.flatnonzero(~has_bytes)
        chunks[bare] = np.arange(len(bare)) % (int(found.max(initial=0)) + 1)
        return chunks, opened.info.identity


def _opened(top: bytes) -> Pack:
    """The pack that ``top`` is, or is a mount of. Raises PackError."""
    mounts = [
        each
        for each in mount_table()
        if each.kind == MONARCH_TYPE and os.fsencode(each.mount_point) == top
    ]
    # The newest mount covers the others. It comes first: its tree may have the files of a pack.
    directory = os.fsencode(mounts[-1].source) if mounts else top
    try:
        return Pack.open(directory, _kept_index(directory))
    except PackError as error:
        if is_pack(directory):
            raise
        name = escape_text(os.fsdecode(top))
        raise PackError(
            f"{name} is neither a pack nor the mount point of one", hint="name the pack itself"
        ) from error


def _kept_index(pack: bytes) -> Path | None:
    """A file that may have the index of a pack: that of a mount of this user. So the index need not
    cross the network for each process."""
    with suppress(ConfigError):
        for record in Registry(state_root()).all():
            if os.fsencode(record.source) == pack:
                return Path(record.state, KEPT_INDEX)
    return None


def _numbers(opened: Pack, top: bytes, paths: Sequence[AnyPath]) -> npt.NDArray[np.int64]:
    """The record of each path. Each directory is listed once. Raises ValueError."""
    places: dict[bytes, list[tuple[bytes, int]]] = {}
    for place, path in enumerate(map(os.fsencode, paths)):
        directory, _, name = path.rpartition(b"/")
        if name in _NO_NAMES or not directory:
            directory, _, name = _relative(path, top).rpartition(b"/")
        places.setdefault(directory, []).append((name, place))
    numbers = np.zeros(len(paths), np.int64)
    for directory, of_directory in places.items():
        # A directory is made relative once: for each path this takes longer than the search.
        names = dict(_listed(opened, _relative(directory, top)))
        for name, place in of_directory:
            number = names.get(name)
            if number is None:
                text = escape_text(os.fsdecode(paths[place]))
                raise ValueError(f"the pack has no {text!r}")
            numbers[place] = number
    return numbers


def _relative(path: bytes, top: bytes) -> bytes:
    if os.path.isabs(path):
        path = os.path.relpath(path, top)
    if path.startswith(b".") or b"//" in path or b"/." in path or path.endswith(b"/"):
        path = os.path.normpath(path)
    return b"" if path == b"." else path


def _listed(opened: Pack, directory: bytes) -> Iterator[tuple[bytes, int]]:
    """The names in a directory of the pack, and the number of each."""
    number = opened.number(directory)
    if not number:
        return iter(())
    numbers = opened.names(number)
    return zip(opened.names_of(numbers), numbers.tolist(), strict=True)
