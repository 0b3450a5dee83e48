"""The subsystems of a mount, each built by one function from those before it."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.daemon.freshness import FreshnessWatch, SecondLook
from monarch.daemon.fsck import OnlineFsck
from monarch.daemon.scrub import Scrub
from monarch.placement.controller import Controller
from monarch.placement.epochs import Epochs
from monarch.placement.ledger import Ledger
from monarch.placement.residency import Residency
from monarch.tiers.hierarchy import Hierarchy


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers, and the decisions on what they hold."""

    hierarchy: Hierarchy
    residency: Residency
    ledger: Ledger
    controller: Controller
    epochs: Epochs


@dataclass(frozen=True, slots=True)
class Upkeep:
    """The comparisons of the copies and the snapshot with the source, and the checks of copies."""

    watch: FreshnessWatch
    second_look: SecondLook
    scrub: Scrub
    online_fsck: OnlineFsck
