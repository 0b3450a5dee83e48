"""The chunk-wise order of files in a pack, for a pack or a mount of one (docs/packs.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import SupportsIndex, cast

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
    group: SupportsIndex,
    seed: SupportsIndex,
    rank: SupportsIndex = 0,
    world_size: SupportsIndex = 1,
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
        # Whether a directory that this process may not read is a pack is not known.
        if is_pack(directory) or isinstance(error.__cause__, PermissionError):
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
    names = _encoded(paths)
    known: dict[bytes, int] = {}
    # A directory is made relative once: for each path this takes longer than the search.
    for directory in {name[: name.rfind(b"/") + 1] for name in names}:
        listed = _listed(opened, _relative(directory, top))
        known.update((directory + name, number) for name, number in listed)
    numbers = np.fromiter(map(known.get, names, repeat(0)), np.int64, len(names))
    for place in np.flatnonzero(numbers == 0).tolist():
        # Perhaps a path that does not end with a name.
        path = _relative(names[place], top)
        numbers[place] = opened.number(path) if path else 0
        if not numbers[place]:
            raise ValueError(f"the pack has no {escape_text(os.fsdecode(paths[place]))!r}")
    return numbers


def _encoded(paths: Sequence[AnyPath]) -> list[bytes]:
    """``os.fsencode`` of each path, which takes longer one by one."""
    with suppress(TypeError):
        names = os.fsencode("\0".join(cast(Sequence[str], paths))).split(b"\0")
        if len(names) == len(paths):
            return names
    return [*map(os.fsencode, paths)]


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
