"""Jobs that read files through the real controller, with what foresight recognises of them."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from monarch.config.settings import ForesightSettings
from monarch.foresight.foresight import Foresight
from monarch.placement.admission import Admission
from monarch.placement.controller import Controller
from monarch.placement.ledger import Ledger
from monarch.placement.policy import Item
from monarch.placement.residency import Residency
from monarch.types import Ino
from tests.foresight.streams import SIZE, Tree
from tests.placement.simulate import policy_named


class Readers:
    """Files of one size, of which the only tier holds ``capacity``. Copies are made at once."""

    def __init__(
        self, policy: str, capacity: int, tree: Tree, *, frequency: bool = True, scans: bool = True
    ) -> None:
        self.tree = tree
        self.items = {
            Ino(ino): Item(Ino(ino), SIZE, 10**9 + ino) for files in tree.files for ino in files
        }
        self.residency, self.ledger = Residency(tree.entries), Ledger([capacity * SIZE])
        policy_of = policy_named(policy, list(self.items.values()), [capacity * SIZE])
        self.controller = Controller(self.residency, self.ledger, policy_of)
        self.controller.sizes_by(lambda ino: SIZE)
        self.foresight = Foresight(tree, ForesightSettings())
        self.admission = Admission(
            self.foresight, tree.entries, by_frequency=frequency, spares_copies=scans
        )
        self.controller.admit_by(self.admission)
        self.foresight.on_skewed(self.admission.opened)

    def read(self, inos: Iterable[int], job: int = 1, *, processes: int = 1) -> list[bool]:
        """Opens files; returns for each whether it had a copy. ``processes`` read in turn; 0: they
        are not known."""
        return [
            self._open(Ino(ino), job, 100 + number % processes if processes else 0)
            for number, ino in enumerate(inos)
        ]

    def _open(self, ino: Ino, job: int, process: int) -> bool:
        hit = self.residency.tier_of(ino) != 0
        promote = self.controller.opened(self.items[ino])
        if promote is not None:
            self.controller.committed(promote.item, promote.tier)
        self.foresight.opened(ino, job, process)
        assert self.ledger.used(1) <= self.ledger.capacity(1)
        return hit

    def resident(self) -> set[Ino]:
        return set(self.residency.resident_in(1))

    def pattern(self, job_directory: int = 0) -> str:
        streams = self.foresight.report(counts_opens=True).streams
        return streams[job_directory].pattern if streams else "none"


def zipf(files: Sequence[int], count: int, rng: random.Random) -> list[int]:
    """Opens of files: the k-th most frequent one has the weight 1/k; which one it is, is random."""
    ranked = rng.sample(files, len(files))
    weights = list(accumulate(1 / rank for rank in range(1, len(files) + 1)))
    return rng.choices(ranked, cum_weights=weights, k=count)


def lru(inos: Iterable[int], capacity: int) -> list[bool]:
    """The hits of an LRU cache of ``capacity`` files, simulated on its own."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ino in inos:
        hits.append(ino in kept)
        kept[ino] = None
        kept.move_to_end(ino)
        if len(kept) > capacity:
            kept.popitem(last=False)
    return hits
