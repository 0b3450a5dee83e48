"""The ranks that save one state together: their messages, and which sets are complete.

A checkpoint of several ranks is a set: each rank writes its part into its own directory, under the
same name. A set counts only when it is complete: each part has the number of ranks, and once all
ranks have reported that their part is on storage, each manifest has the checksums of all parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.errors import CheckpointError
from monarch.frameworks.store import Checkpoint

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
        self, call: str, at: object, *, error: str = "", **told: object
    ) -> list[dict[str, Any]]:
        """The message of each rank, by rank; JSON. Raises CheckpointError, at every rank, if one
        reports an error or is at another call."""
        message = {"call": call, "at": at, "error": error, **told}
        answers = self.all_gather(json.dumps(message, separators=(",", ":")).encode())
        heard: list[dict[str, Any]] = [json.loads(bytes(answer)) for answer in answers]
        for rank, other in enumerate(heard):
            if other["error"]:
                raise CheckpointError(f"rank {rank}: {other['error']}")
        calls = [f"{other['call']} of {other['at']}" for other in heard]
        for rank, other_call in enumerate(calls):
            if other_call != calls[0]:
                raise CheckpointError(
                    f"rank {rank} is at {other_call}, rank 0 at {calls[0]}",
                    hint="all ranks must call after_update, save and restore the same number of"
                    " times",
                )
        return heard


@dataclass(frozen=True, slots=True)
class PartSet:
    """The parts of one checkpoint of several ranks, by rank; ``digests``: the checksums in its
    commit record, empty if no rank has one."""

    name: str
    step: int
    serial: int
    ranks: int
    parts: Mapping[int, Checkpoint]
    digests: tuple[str, ...]

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
    found = []
    for (name, ranks), members in by_set.items():
        one = next(iter(members.values()))
        digests = next((part.digests for part in members.values() if part.digests), ())
        found.append(PartSet(name, one.step, one.serial, ranks, members, digests))
    return sorted(found, key=lambda each: (each.serial, each.name), reverse=True)
