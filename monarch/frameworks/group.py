"""The ranks that save one state together: what they tell each other, and which sets are complete.

A checkpoint of several ranks is a set: each rank's part lies in a directory of its own, under the
same name. A set counts only when every part is there: the parts say how many ranks there were, and
once all ranks have told that theirs is on storage, each manifest has the checksums of all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.errors import CheckpointError
from monarch.frameworks.shelf import Checkpoint

_DIRECTORY = re.compile(r"rank-(\d+)")


@dataclass(frozen=True, slots=True)
class Group:
    """This rank, how many there are, and how they tell each other something.

    ``all_gather(message)`` gives the messages of all ranks, by rank. Each rank calls it equally
    often, from the thread that trains, at most once an update: with mpi4py
    ``Group(comm.rank, comm.size, comm.allgather)``; ``monarch.frameworks.torch.group()`` makes the
    one of torch.distributed.
    """

    rank: int
    size: int
    all_gather: Callable[[bytes], Sequence[bytes]]

    def exchange(
        self, call: str, at: object, *, error: str = "", **told: object
    ) -> list[dict[str, Any]]:
        """What each rank tells, by rank; JSON.

        Raises CheckpointError, at every rank, if one has an error to tell, or is at another call.
        """
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
                    hint="all ranks call after_update, save and restore equally often",
                )
        return heard


@dataclass(frozen=True, slots=True)
class PartSet:
    """The parts of one checkpoint of several ranks, by rank; ``digests``: the checksums that its
    commit record names, empty if no rank has one."""

    name: str
    step: int
    serial: int
    ranks: int
    parts: Mapping[int, Checkpoint]
    digests: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Every rank's part is there, with the checksum that was recorded."""
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
    """What belongs together, newest first."""
    by_set: dict[tuple[str, int], dict[int, Checkpoint]] = {}
    for part in parts:
        by_set.setdefault((part.name, part.ranks), {})[part.rank] = part
    found = []
    for (name, ranks), members in by_set.items():
        one = next(iter(members.values()))
        digests = next((part.digests for part in members.values() if part.digests), ())
        found.append(PartSet(name, one.step, one.serial, ranks, members, digests))
    return sorted(found, key=lambda each: (each.serial, each.name), reverse=True)
