"""Pipelines of WebDataset that announce their shards to a mount of Monarch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from webdataset import cache, filters, shardlists, tariterators

from monarch.foresight.messages import SHARDS
from monarch.frameworks.announce import LatestAnnouncement

Pipeline = TypeVar("Pipeline")

# Shards that are taken from the source in advance: it may have no end.
_AHEAD = 1024
_OPENERS = (tariterators.tarfile_samples, tariterators.url_opener)


class Announced:
    """A stage between the list of shards, after their division between workers, and the stage that
    opens them. It yields the same shards. Each worker announces its own."""

    def __init__(self) -> None:
        self._latest: LatestAnnouncement | None = None

    def __call__(self, shards: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        latest = self._latest = self._latest or LatestAnnouncement(SHARDS)
        source = iter(shards)
        while taken := list(islice(source, _AHEAD)):
            latest.announce([str(shard["url"]).removeprefix("file:") for shard in taken])
            yield from taken

    def __getstate__(self) -> dict[str, Any]:
        """Without the announcement, which belongs to this process."""
        return {"_latest": None}


def announce(dataset: Pipeline) -> Pipeline:
    """Makes a WebDataset, or another pipeline that opens shards, announce them; returns it.

    Nothing is announced for a ``DirectoryShardList``, which takes each shard for this process and
    waits for further ones. Raises TypeError if no stage of WebDataset opens the shards: put
    ``Announced()`` before it.
    """
    stages: list[Any] = getattr(dataset, "pipeline", [])
    if stages and isinstance(stages[0], shardlists.DirectoryShardList):
        return dataset
    for place, stage in enumerate(stages):
        is_filter = isinstance(stage, filters.FilterFunction) and stage.f in _OPENERS
        if is_filter or isinstance(stage, cache.StreamingOpen | cache.FileCache):
            stages.insert(place, Announced())
            return dataset
    raise TypeError("no stage that opens shards was found; put Announced() before that stage")
