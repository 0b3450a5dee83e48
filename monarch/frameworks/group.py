"""The ranks that save one state together: their messages, and which saved state they restore.

A checkpoint of several ranks is a set: each rank writes its part into its own directory, under the
same name. A set counts only when it is complete: each part has the number of ranks, and once all
ranks have reported that their part is on storage, each manifest has the checksums of all parts.
Restored is the newest state that is complete at every rank.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monarch.errors import CheckpointError
from monarch.frameworks.format import Parts
from monarch.frameworks.store import Checkpoint, CheckpointStore, entry_of, list_checkpoints, load

_DIRECTORY = re.compile(r"rank-(\d+)")


@dataclass(frozen=True, slots=True)
class Group:
    """This rank, the number of ranks, and their means of communication.

    ``all_gather(message)`` returns the messages of all ranks, by rank. Every rank must call it the
    same number of times, from the training thread, at most once an update. With mpi4py:
    ``Group(comm.rank, comm.size, comm.allgather)``. ``monarch.frameworks.torch.group()`` makes one
    from torch.distributed.
    """

    rank: int
    size: int
    all_gather: Callable[[bytes], Sequence[bytes]]

    def exchange(
        self, call: str, at: object, *, error: str = "", **facts: object
    ) -> list[dict[str, Any]]:
        """The message of each rank, by rank; JSON. Raises CheckpointError, at every rank, if one
        reports an error or is at another call."""
        message = {"call": call, "at": at, "error": error, **facts}
        answers = self.all_gather(json.dumps(message, separators=(",", ":")).encode())
        received: list[dict[str, Any]] = [json.loads(bytes(answer)) for answer in answers]
        for rank, other in enumerate(received):
            if other["error"]:
                raise CheckpointError(f"rank {rank}: {other['error']}")
        calls = [f"{other['call']} of {other['at']}" for other in received]
        for rank, other_call in enumerate(calls):
            if other_call != calls[0]:
                hint = "all ranks must call after_update, save and restore the same number of times"
                what = f"rank {rank} is at {other_call}, rank 0 at {calls[0]}"
                raise CheckpointError(what, hint=hint)
        return received


@dataclass(frozen=True, slots=True)
class PartSet:
    """The parts of one checkpoint of several ranks, by rank; ``one`` is any of them."""

    one: Checkpoint
    parts: Mapping[int, Checkpoint]

    @property
    def ranks(self) -> int:
        return self.one.ranks

    @property
    def digests(self) -> tuple[str, ...]:
        """The checksums in its commit record, empty if no rank has one."""
        return next((part.digests for part in self.parts.values() if part.digests), ())

    @property
    def is_complete(self) -> bool:
        """Whether the part of every rank is there, with the recorded checksum."""
        found = tuple(self.parts[r].xxh3 if r in self.parts else "" for r in range(self.ranks))
        return all(found) and self.digests in ((), found)


def directory_of(root: Path, rank: int) -> Path:
    return root / f"rank-{rank:05d}"


def ranks_in(root: Path) -> list[int]:
    """The ranks that have a directory below ``root``, ascending."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_DIRECTORY.fullmatch, names) if match)


def sets_of(parts: Iterable[Checkpoint]) -> list[PartSet]:
    """The sets that the parts form, newest first."""
    by_set: dict[tuple[str, int], dict[int, Checkpoint]] = {}
    for part in parts:
        by_set.setdefault((part.name, part.ranks), {})[part.rank] = part
    found = [PartSet(next(iter(members.values())), members) for members in by_set.values()]
    return sorted(found, key=lambda each: (each.one.serial, each.one.name), reverse=True)


# -- what is restored ------------------------------------------------------------------------------


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
    raise _no_checkpoint(root, step, "whole")


def newest_set(store: CheckpointStore, root: Path, group: Group, step: int | None) -> Found | None:
    """The newest set that all ranks can restore, as they agree; else as ``newest_whole``."""
    own = list(store.checkpoints)
    if group.rank == 0:
        # Also the parts of ranks that no longer exist.
        for rank in [rank for rank in ranks_in(root) if rank >= group.size]:
            own += [each.checkpoint for each in list_checkpoints(directory_of(root, rank))]
    answers = group.exchange("restore", step, parts=[*map(asdict, own)])
    parts = [entry_of(part) for each in answers for part in each["parts"]]
    sets = [each for each in sets_of(parts) if step is None or each.one.step == step]
    for each in sets:
        trouble, read = "", None
        if not each.is_complete:
            trouble = f"{each.one.name}: some of its {each.ranks} parts are missing"
        else:
            try:
                read = _read_set(store, root, group, each)
            except CheckpointError as error:
                trouble = str(error)
        answers = group.exchange("restore", each.one.name, trouble=trouble)
        troubles = [f"rank {r}: {a['trouble']}" for r, a in enumerate(answers) if a["trouble"]]
        if troubles or read is None:
            what = f"{troubles[0]}; the previous one is tried"
            warnings.warn(what, CheckpointWarning, stacklevel=3)
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
    raise _no_checkpoint(root, step, "whole at every rank")


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


def _no_checkpoint(root: Path, step: int | None, whole: str) -> CheckpointError:
    which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    return CheckpointError(
        f"{which} in {os.fspath(root)!r} is {whole}",
        hint="restore one from a backup, or start in another directory",
    )
