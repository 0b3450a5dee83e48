"""Chooses the saved state to restore: the newest that is complete at every rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monarch.errors import CheckpointError
from monarch.frameworks.format import Parts
from monarch.frameworks.group import Group, PartSet, directory_of, ranks_in, sets_of
from monarch.frameworks.store import Checkpoint, CheckpointStore, entry_of, list_checkpoints, load


class CheckpointWarning(RuntimeWarning):
    """A checkpoint was not saved, or one that was saved cannot be used. The training continues."""


@dataclass(frozen=True, slots=True)
class Found:
    """A state that was read, with its facts.

    ``digests``: the checksums of the parts of all ranks; empty if one rank saved it alone.
    ``is_of_others``: another number of ranks saved it, and the state is a ``Parts``.
    """

    checkpoint: Checkpoint
    facts: Mapping[str, Any]
    state: Any
    digests: tuple[str, ...] = ()
    is_of_others: bool = False


def newest_whole(store: CheckpointStore, root: Path, step: int | None) -> Found | None:
    """The newest readable checkpoint, or the newest of ``step``; None if the directory never had
    one. Raises CheckpointError, and warns the caller of ``restore`` of each damaged one.
    """
    wanted = [c for c in store.checkpoints if step is None or c.step == step]
    if not wanted and (others := ranks_in(root)):
        raise CheckpointError(
            f"{os.fspath(root)!r} has the checkpoints of {len(others)} ranks",
            hint="give the Checkpointer of each rank the group; the number of ranks may differ",
        )
    for checkpoint in reversed(wanted):
        try:
            return Found(checkpoint, *load(store.directory, checkpoint))
        except CheckpointError as error:
            warnings.warn(f"{error}; the previous one is tried", CheckpointWarning, stacklevel=3)
    if not wanted and step is None:
        return None
    raise _nothing_left(root, step, "whole")


def newest_set(store: CheckpointStore, root: Path, group: Group, step: int | None) -> Found | None:
    """The newest set that all ranks can restore, as they agree; else as ``newest_whole``."""
    told = group.exchange("restore", step, parts=[*map(asdict, _parts(store, root, group))])
    parts = [entry_of(part) for each in told for part in each["parts"]]
    sets = [each for each in sets_of(parts) if step is None or each.step == step]
    for each in sets:
        trouble, read = "", None
        if not each.is_complete:
            trouble = f"{each.name}: some of its {each.ranks} parts are missing"
        else:
            try:
                read = _read_set(store, root, group, each)
            except CheckpointError as error:
                trouble = str(error)
        answers = group.exchange("restore", each.name, trouble=trouble)
        troubles = [f"rank {r}: {a['trouble']}" for r, a in enumerate(answers) if a["trouble"]]
        if troubles or read is None:
            warnings.warn(
                f"{troubles[0]}; the previous one is tried", CheckpointWarning, stacklevel=3
            )
            continue
        return Found(
            each.parts[min(group.rank, each.ranks - 1)],
            *read,
            digests=tuple(each.parts[r].xxh3 for r in range(each.ranks)),
            is_of_others=each.ranks != group.size,
        )
    if step is None and not any(each.digests for each in sets):
        # No rank knows of a complete set.
        return None
    raise _nothing_left(root, step, "whole at every rank")


def _parts(store: CheckpointStore, root: Path, group: Group) -> Iterator[Checkpoint]:
    """The parts of this rank; rank 0 also yields those of ranks that no longer exist."""
    yield from store.checkpoints
    if group.rank:
        return
    for rank in [rank for rank in ranks_in(root) if rank >= group.size]:
        for listed in list_checkpoints(directory_of(root, rank)):
            yield listed.checkpoint


def _read_set(
    store: CheckpointStore, root: Path, group: Group, found: PartSet
) -> tuple[dict[str, Any], Any]:
    """Reads the facts and the state of this rank. Raises CheckpointError."""
    if found.ranks == group.size:
        return load(store.directory, found.parts[group.rank])
    read = [
        load(directory_of(root, rank), found.parts[rank], mapped=True)
        for rank in range(found.ranks)
    ]
    facts = read[min(group.rank, found.ranks - 1)][0]
    return facts, Parts(tuple(state for _, state in read), group.rank, group.size)


def _nothing_left(root: Path, step: int | None, whole: str) -> CheckpointError:
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    return CheckpointError(
        f"{which} in {os.fspath(root)!r} is {whole}",
        hint="restore one from a backup, or start in another directory",
    )
