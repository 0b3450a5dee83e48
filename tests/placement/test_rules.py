"""Rules for paths: which rule a file has, what its copies do, and what is left for other files."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from monarch.config.settings import RuleSettings
from monarch.config.write_patterns import WritePatterns
from monarch.namespace.build import build
from monarch.namespace.snapshot import Snapshot
from monarch.placement import controller as controller_module
from monarch.placement import rules as rules_module
from monarch.placement.belady import Belady
from monarch.placement.controller import Controller, Promote
from monarch.placement.ledger import Ledger
from monarch.placement.policy import FirstCome, Item, Lru, NoEvict, Placement, Policy
from monarch.placement.residency import Residency
from monarch.placement.rules import Rule, Rules
from monarch.posix.buckets import BUCKETS, buckets
from monarch.types import ROOT_INO, Ino

TIERS = ["ram", "nvme"]
SIZE = 100


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snapshot]:
    """Files of 100 bytes in directories of three depths, with further names of some."""
    directory = tmp_path_factory.mktemp("rules")
    source = directory / "source"
    for parent in ("train/a", "train/b", "val/a", "raw", "raw/deep/er", "."):
        (source / parent).mkdir(parents=True, exist_ok=True)
        for number in range(20):
            suffix = "lmdb" if number % 10 == 0 else "jpg"
            (source / parent / f"{number:02}.{suffix}").write_bytes(b"x" * SIZE)
    (source / "raw/deep/er/again.jpg").hardlink_to(source / "val/a/01.jpg")
    build(source, directory / "snapshot")
    with Snapshot.open(directory / "snapshot") as opened:
        yield opened


def rule(match: str, **keys: object) -> Rule:
    return Rule.of(RuleSettings.model_validate({"match": match, **keys}), TIERS)


def files_of(snapshot: Snapshot) -> dict[Ino, bytes]:
    return {
        attributes.ino: snapshot.path(attributes.ino)
        for slot in range(1, snapshot.entries + 1)
        if (attributes := snapshot.attributes(Ino(slot))).is_file and attributes.ino == slot
    }


class Mount:
    """A controller with rules over the files of a snapshot; copies are committed at once."""

    def __init__(
        self, snapshot: Snapshot, rules: list[Rule], capacities: list[int], policy: str = "no_evict"
    ) -> None:
        self.snapshot = snapshot
        self.files = files_of(snapshot)
        self.residency, self.ledger = Residency(snapshot.entries), Ledger(capacities)
        self.rules = Rules(rules, snapshot, self.residency)
        policies: dict[str, Policy] = {
            "no_evict": NoEvict(snapshot.curve(), capacities),
            "first_come": FirstCome(),
            "lru": Lru(),
        }
        self.use(policies[policy])

    def use(self, policy: Policy) -> None:
        self.policy = policy
        self.controller = Controller(self.residency, self.ledger, policy, self.rules)
        self.controller.sizes_by(lambda ino: SIZE)

    def item(self, ino: Ino) -> Item:
        return Item.of(self.snapshot.attributes(ino))

    def under(self, prefix: bytes) -> set[Ino]:
        return {ino for ino, path in self.files.items() if path.startswith(prefix)}

    def measure(self) -> None:
        for _ in self.rules.measure():
            pass
        self.controller.draw(self.snapshot.curve())

    def read(self, inos: set[Ino], seed: int = 1) -> None:
        for ino in random.Random(seed).sample(sorted(inos), len(inos)):
            self.settle(self.controller.opened(self.item(ino)))

    def fetch(self, ino: Ino) -> None:
        self.settle(self.controller.offered(self.item(ino)))

    def settle(self, promote: Promote | None) -> None:
        if promote is not None:
            self.controller.committed(promote.item, promote.tier)
        for tier in self.ledger.tiers:
            assert self.ledger.used(tier) <= self.ledger.capacity(tier)

    def resident(self, tier: int | None = None) -> set[Ino]:
        tiers = self.ledger.tiers if tier is None else [tier]
        return {ino for number in tiers for ino in self.residency.resident_in(number)}


class Uses:
    """The next two uses of files."""

    ended = 0

    def __init__(self) -> None:
        self.of: dict[Ino, tuple[float, float]] = {}

    def next_use(self, ino: Ino) -> float:
        return self.of.get(ino, (math.inf, math.inf))[0]

    def use_after(self, ino: Ino) -> float:
        return self.of.get(ino, (math.inf, math.inf))[1]

    def repeats_within(self, begin: float, end: float) -> bool:
        return True


PATTERNS = ["val/**", "*.lmdb", "**/*.lmdb", "raw", "raw/*/er", "train/*/0*", "**", "no/**", "*/a"]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_rule_that_covers_the_path_of_a_file_counts(
    snapshot: Snapshot, seed: int
) -> None:
    chosen = random.Random(seed).sample(PATTERNS, 4)
    mount = Mount(snapshot, [rule(match, pin=True) for match in chosen], [0, 0])
    for ino, path in mount.files.items():
        expected = next((m for m in chosen if WritePatterns([m]).covers(path)), None)
        found = mount.rules.of(ino)
        assert (found.match if found is not None else None) == expected, path


def test_a_file_made_through_the_mount_has_no_rule(snapshot: Snapshot) -> None:
    rules = Rules([rule("**", pin=True)], snapshot, Residency(snapshot.entries))
    assert rules.of(Ino(snapshot.entries + 1)) is None


@pytest.mark.parametrize("seed", range(10))
def test_the_files_of_all_rules_are_counted_while_copies_come_and_go(
    snapshot: Snapshot, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_module, "_SLICE", 7)
    draw = random.Random(seed)
    rules = [rule(match, pin=True) for match in draw.sample(PATTERNS, 4)]
    mount = Mount(snapshot, rules, [40 * SIZE, 40 * SIZE], "lru")

    def change() -> None:
        ino = draw.choice(sorted(mount.files))
        if mount.residency.tier_of(ino):
            mount.controller.dropped(ino, SIZE)
        else:
            mount.settle(mount.controller.opened(mount.item(ino)))

    for _ in range(20):
        change()
    for _ in mount.rules.measure():
        change()
    for _ in range(20):
        change()
    resident = mount.resident()
    for number, each in enumerate(mount.rules.rules):
        inos = {ino for ino in mount.files if mount.rules.of(ino) is mount.rules.rules[number]}
        count = mount.rules.counts[number]
        assert (count.files, count.bytes) == (len(inos), SIZE * len(inos)), each
        here = len(inos & resident)
        assert (count.resident_files, count.resident_bytes) == (here, SIZE * here), each
    assert mount.rules.misses_pinned


@pytest.mark.promise(190)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_files_of_admit_never_get_no_copy_and_leave_their_room_to_others(
    snapshot: Snapshot, policy: str
) -> None:
    mount = Mount(snapshot, [rule("raw/**", admit="never")], [60 * SIZE, 20 * SIZE], policy)
    mount.measure()
    raw = mount.under(b"raw/")
    for ino in raw:
        assert mount.controller.opened(mount.item(ino)) is None
        assert mount.controller.offered(mount.item(ino)) is None
        assert mount.controller.warm(mount.item(ino)) is None
    assert mount.residency.wanted == 0
    mount.read(set(mount.files))
    assert not mount.resident() & raw
    assert len(mount.resident()) == 80, "all others fit into the tiers"


@pytest.mark.promise(190)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_files_of_a_tier_get_copies_there_only(snapshot: Snapshot, policy: str) -> None:
    rules = [rule("**/*.lmdb", tier="nvme")]
    mount = Mount(snapshot, rules, [30 * SIZE, 30 * SIZE], policy)
    lmdb = {ino for ino, path in mount.files.items() if path.endswith(b".lmdb")}
    for seed in range(2):
        mount.read(set(mount.files), seed)
        mount.measure()
    assert not mount.resident(1) & lmdb
    assert len(mount.resident(1)) == 30 or policy == "no_evict"
    mount.read(lmdb)
    mount.read(set(mount.files))
    assert not mount.resident(1) & lmdb
    if policy == "no_evict":
        # Before the files were counted, as many as fit by their buckets.
        assert len(mount.resident(2) & lmdb) <= 12
    assert mount.controller.opened(mount.item(min(lmdb))) is None or policy == "lru"


def test_no_evict_draws_each_file_for_the_tiers_that_may_have_it(snapshot: Snapshot) -> None:
    rules = [rule("train/**", tier="nvme")]
    mount = Mount(snapshot, rules, [20 * SIZE, 20 * SIZE])
    mount.measure()
    mount.read(set(mount.files))
    train = mount.under(b"train/")
    assert not mount.resident(1) & train
    assert len(mount.resident(1)) == 20, "those without a rule fill the first tier"
    here = mount.resident(2)
    assert len(here) == 20 and here & train and here - train, "and share the second one"


@pytest.mark.promise(191)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
def test_pinned_files_find_room_in_full_tiers_and_are_never_evicted(
    snapshot: Snapshot, policy: str
) -> None:
    mount = Mount(snapshot, [rule("val/**", pin=True)], [15 * SIZE, 30 * SIZE], policy)
    pinned = mount.under(b"val/")
    others = set(mount.files) - pinned
    for seed in range(4):
        mount.read(others, seed)
    mount.measure()
    for ino in pinned:
        mount.fetch(ino)
    assert pinned <= mount.resident()
    for seed in range(4):
        mount.read(set(mount.files), seed)
        assert pinned <= mount.resident()
    count = mount.rules.counts[0]
    assert (count.resident_files, count.files) == (20, 20)
    assert not mount.rules.misses_pinned
    assert mount.rules.excess(mount.ledger) == 0


def test_a_policy_that_knows_many_pinned_copies_forgets_some_of_them_for_one_file(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of an earlier mount: the policy has them all, and it would evict pinned ones."""
    monkeypatch.setattr(controller_module, "_MOST_FORGOTTEN", 5)
    mount = Mount(snapshot, [rule("val", pin=True)], [20 * SIZE], "lru")
    pinned = np.array(sorted(mount.under(b"val/")))
    mount.controller.load(pinned, np.full(len(pinned), SIZE), tier=1)
    chosen = 0
    choose = mount.policy.choose

    def count(item: Item, ledger: Ledger, *, forced: bool = False) -> Placement | None:
        nonlocal chosen
        chosen += 1
        return choose(item, ledger, forced=forced)

    monkeypatch.setattr(mount.policy, "choose", count)
    others = [mount.item(ino) for ino in sorted(mount.under(b"train/"))]
    for number, item in enumerate(others[:4], 1):
        assert mount.controller.opened(item) is None
        assert chosen == 5 * number
    assert mount.resident() == set(pinned.tolist())
    assert mount.controller.opened(others[4]) is None and chosen == 21
    # A pinned copy that is made later is not even known to the policy.
    mount.controller.dropped(Ino(int(pinned[0])), SIZE)
    mount.settle(mount.controller.offered(mount.item(Ino(int(pinned[0])))))
    assert mount.controller.opened(others[5]) is None and chosen == 23


def test_pinned_copies_that_stay_are_not_counted_as_replaced(snapshot: Snapshot) -> None:
    """Belady's rule would replace a pinned copy that no order has. The pin keeps it, so nothing was
    replaced for the file, which gets a free place later."""
    mount = Mount(snapshot, [rule("val", pin=True)], [20 * SIZE])
    uses = Uses()
    policy = Belady(FirstCome(), uses, lambda ino: SIZE)
    mount.use(policy)
    pinned, (other, *_) = sorted(mount.under(b"val/")), sorted(mount.under(b"train/"))
    uses.of = {ino: (float(ino), 1000.0 + ino) for ino in pinned}
    for ino in pinned:
        mount.settle(mount.controller.opened(mount.item(ino)))
        mount.settle(mount.controller.opened(mount.item(ino)))
    uses.of = {other: (1.0, 2.0)}
    assert mount.controller.opened(mount.item(other)) is None
    mount.controller.dropped(pinned[0], SIZE)
    mount.settle(mount.controller.opened(mount.item(other)))
    assert mount.resident() == {*pinned[1:], other}
    assert policy.report().replaced_files == 0


def test_pinned_copies_are_the_last_that_leave_for_written_files(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = Mount(snapshot, [rule("val/**", pin=True)], [200 * SIZE])
    mount.read(set(mount.files))
    pinned = mount.under(b"val/")
    order = list(mount.controller.copies(1))
    assert set(order[-20:]) == pinned and set(order) == mount.resident()
    monkeypatch.setattr("monarch.placement.controller._MOST_SKIPPED", 5)
    order = list(mount.controller.copies(1))
    assert len(order) == len(set(order)) == len(mount.resident())


@pytest.mark.promise(191)
def test_the_hash_leaves_room_for_pinned_files_and_draws_among_the_others(
    snapshot: Snapshot,
) -> None:
    mount = Mount(snapshot, [rule("val/**", pin=True)], [50 * SIZE])
    mount.measure()
    mount.read(set(mount.files) - mount.under(b"val/"))
    assert len(mount.resident()) == 30
    before = mount.resident()
    for ino in mount.under(b"val/"):
        mount.fetch(ino)
    assert mount.resident() == before | mount.under(b"val/"), "none left for them"


def test_the_draw_of_a_member_of_a_job_is_over_the_files_that_it_keeps(snapshot: Snapshot) -> None:
    """Other members keep the files with odd numbers; pinned files are kept by each member."""

    def kept_bytes(
        inos: npt.NDArray[np.int64], sizes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        return sizes * (inos % 2 == 0)

    rules = [
        rule("raw/**", pin=True),
        rule("val/**", admit="never"),
        rule("train/a/**", tier="ram"),
    ]
    own = {ino for ino in files_of(snapshot) if ino % 2 == 0}
    inos, sizes, keys = snapshot.files_in(range(1, snapshot.entries + 1))
    curve = np.zeros(BUCKETS, np.uint64)
    np.add.at(curve, buckets(keys), kept_bytes(inos, sizes))

    def read(capacities: list[int]) -> Mount:
        mount = Mount(snapshot, rules, capacities)
        mount.rules.kept_bytes, mount.controller.kept_curve = kept_bytes, curve
        mount.controller.keeps = lambda item: item.ino in own
        mount.measure()
        mount.read(set(mount.files))
        return mount

    # All of the 40 pinned files and of its about 30 other ones fit.
    large = read([60 * SIZE, 30 * SIZE])
    pinned, never = large.under(b"raw/"), large.under(b"val/")
    rest = own - pinned - never
    assert large.resident() == pinned | rest
    assert large.resident(1) >= large.under(b"train/a/") & own
    # Not all of the others fit: the tiers are full.
    count = len(rest - large.under(b"train/a/")) - 10
    small = read([45 * SIZE, count * SIZE])
    assert small.resident() > pinned
    assert small.resident() - pinned <= rest
    assert len(small.resident()) == 45 + count


@pytest.mark.promise(191)
def test_pinned_files_that_do_not_fit_are_counted_and_evict_no_other_pinned_file(
    snapshot: Snapshot,
) -> None:
    rules = [rule("val/**", pin=True), rule("raw/**", pin=True, tier="ram")]
    mount = Mount(snapshot, rules, [15 * SIZE, 8 * SIZE])
    mount.measure()
    # 40 files want the first tier, 20 any: 23 of 60 fit.
    assert mount.rules.excess(mount.ledger) == 37 * SIZE
    for _ in range(2):
        for ino in sorted(mount.under(b"raw/") | mount.under(b"val/")):
            before = mount.resident()
            mount.fetch(ino)
            assert before <= mount.resident()
    assert len(mount.resident()) == 23
    mount.ledger.hold(2, 5 * SIZE)
    assert mount.rules.excess(mount.ledger) == 42 * SIZE


@pytest.mark.promise(191)
@pytest.mark.parametrize("is_counted", [True, False])
def test_pinned_files_that_were_removed_need_no_room(snapshot: Snapshot, is_counted: bool) -> None:
    rules = [rule("val/**", pin=True), rule("raw/**", pin=True, tier="ram")]
    mount = Mount(snapshot, rules, [15 * SIZE, 8 * SIZE])
    raw, val = sorted(mount.under(b"raw/")), sorted(mount.under(b"val/"))
    removed = {*raw[:30], *val[:16]}
    if is_counted:
        mount.measure()
    for ino in [*removed, *removed, snapshot.lookup(ROOT_INO, b"raw"), Ino(snapshot.entries + 1)]:
        assert ino is not None
        mount.rules.left(ino)
    if not is_counted:
        mount.measure()
    assert mount.rules.excess(mount.ledger) == 0
    assert {ino for inos in mount.rules.pinned() for ino in inos} == {*raw, *val} - removed
    for ino in {*raw, *val} - removed:
        mount.fetch(ino)
    assert not mount.rules.misses_pinned
    assert [count.files for count in mount.rules.counts] == [20, 40], "those of the snapshot"
    # A process has opened one that is back at the source.
    mount.fetch(raw[0])
    assert [count.left_files for count in mount.rules.counts] == [16, 29]
    assert not mount.rules.misses_pinned
    mount.controller.dropped(raw[0], SIZE)
    assert mount.rules.misses_pinned


def test_a_tier_that_another_program_has_filled_gets_no_pinned_files(snapshot: Snapshot) -> None:
    mount = Mount(snapshot, [rule("val/**", pin=True)], [30 * SIZE])
    mount.ledger.close(1)
    for ino in mount.under(b"val/"):
        mount.fetch(ino)
    assert mount.resident() == set()


def test_without_rules_the_draw_is_as_before(snapshot: Snapshot) -> None:
    plain = Mount(snapshot, [], [50 * SIZE])
    ruled = Mount(snapshot, [rule("no/**", pin=True)], [50 * SIZE])
    ruled.measure()
    for mount in (plain, ruled):
        mount.read(set(mount.files))
    assert plain.resident() == ruled.resident()
    assert ruled.rules.counts[0].files == 0 and ruled.rules.is_measured
    assert np.array_equal(plain.snapshot.curve(), ruled.snapshot.curve())


def test_the_kept_states_of_directories_are_bounded(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_module, "_KEPT_DIRECTORIES", 2)
    rules = Rules([rule("**/*.lmdb", pin=True)], snapshot, Residency(snapshot.entries))
    for ino, path in files_of(snapshot).items():
        assert (rules.of(ino) is not None) == path.endswith(b".lmdb")
    assert len(rules._kept) <= 2


def test_a_further_name_of_a_file_changes_no_rule(snapshot: Snapshot) -> None:
    mount = Mount(snapshot, [rule("raw/**", pin=True)], [0])
    mount.measure()
    first = next(ino for ino, path in mount.files.items() if path == b"val/a/01.jpg")
    assert mount.rules.of(first) is None
    assert mount.rules.counts[0].files == 40


def test_rules_hold_for_partial_copies(snapshot: Snapshot) -> None:
    rules = [
        rule("raw/**", admit="never"),
        rule("val/**", pin=True),
        rule("train/a/**", tier="nvme"),
    ]
    mount = Mount(snapshot, rules, [40 * SIZE, 40 * SIZE], "first_come")
    raw, pinned, other = (mount.item(min(mount.under(p))) for p in (b"raw/", b"val/", b"train/b/"))
    restricted = mount.item(min(mount.under(b"train/a/")))
    begun = {
        item.ino: mount.controller.begin_part(item, overhead=0)
        for item in (raw, pinned, restricted, other)
    }
    tiers = [None if part is None else part.tier for part in begun.values()]
    assert tiers == [None, None, 2, 1]
    # A whole copy that a partial one has become counts for its rule.
    mount.measure()
    mount.controller.parts.reserve(restricted.ino, SIZE)
    mount.controller.parts.stored(restricted.ino, SIZE)
    mount.controller.part_completed(restricted.ino)
    assert mount.rules.counts[2].resident_files == 1
    mount.controller.dropped(restricted.ino, SIZE)
    assert mount.rules.counts[2].resident_files == 0


def test_a_pinned_file_takes_the_room_of_partial_copies(snapshot: Snapshot) -> None:
    mount = Mount(snapshot, [rule("val/**", pin=True)], [SIZE, 0], "first_come")
    other, pinned = (mount.item(min(mount.under(prefix))) for prefix in (b"train/b/", b"val/"))
    assert mount.controller.begin_part(other, overhead=SIZE // 2)
    promote = mount.controller.offered(pinned)
    assert promote is not None and promote.evict == (other.ino,)
    assert len(mount.controller.parts) == 0


@pytest.mark.promise(190, 191)
@pytest.mark.parametrize("policy", ["no_evict", "first_come", "lru"])
@pytest.mark.parametrize("seed", range(3))
def test_no_history_of_copies_breaks_a_rule(snapshot: Snapshot, policy: str, seed: int) -> None:
    draw = random.Random(seed)
    rules = [
        rule("val/**", pin=True),
        rule("raw/deep/**", pin=True, tier="nvme"),
        rule("raw/**", admit="never"),
        rule("**/*.lmdb", tier="ram"),
    ]
    mount = Mount(snapshot, rules, [30 * SIZE, 30 * SIZE], policy)
    controller, residency = mount.controller, mount.residency
    measuring = mount.rules.measure()
    copying: list[Promote] = []
    lookup = {ino: mount.item(ino) for ino in mount.files}.get
    for _ in range(3000):
        ino = draw.choice(sorted(mount.files))
        ask = draw.choice([controller.opened, controller.offered, controller.warm])
        before = {each for each in mount.resident() if mount.rules.is_pinned(each)}
        promote = controller.next_wanted(lookup) if draw.random() < 0.1 else ask(mount.item(ino))
        assert before <= mount.resident()
        if promote is not None:
            copying.append(promote)
        while copying and draw.random() < 0.6:
            done = copying.pop(draw.randrange(len(copying)))
            draw.choice([controller.committed, abandon(controller), abandon(controller, True)])(
                done.item, done.tier
            )
        resident = sorted(mount.resident())
        if resident and draw.random() < 0.1:
            controller.dropped(draw.choice(resident), SIZE)
        next(measuring, None)
        for tier in mount.ledger.tiers:
            assert 0 <= mount.ledger.used(tier) <= mount.ledger.capacity(tier)
    for ino in mount.files:
        tier, found = residency.tier_of(ino), mount.rules.of(ino)
        if tier and found is not None:
            assert not found.never and found.tier in (None, tier)
    for number, count in enumerate(mount.rules.counts):
        inos = [i for i in mount.files if mount.rules.of(i) is mount.rules.rules[number]]
        assert count.resident_files == sum(residency.tier_of(ino) != 0 for ino in inos)


def abandon(controller: Controller, retry: bool = False) -> Callable[[Item, int], None]:
    return partial(controller.abandoned, retry=retry)
