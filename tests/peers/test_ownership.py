"""Rendezvous hashing: even shares, the least movement, and the same owners on every node."""

from __future__ import annotations

import math

import numpy as np
import pytest

from monarch.peers.ownership import MOST_MEMBERS, Member, Ownership

ITEMS = np.arange(2, 20_002)
SIZES = np.random.default_rng(5).lognormal(11, 1, len(ITEMS))


def ownership(count: int, *, seed: int = 1) -> Ownership:
    return Ownership([Member(f"node{number:04}") for number in range(count)], seed)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_the_bytes_of_the_members_are_as_even_as_those_of_a_random_choice(count: int) -> None:
    shares = np.bincount(ownership(count).owners(ITEMS), weights=SIZES, minlength=count)
    # Of the bytes of one member, relative to their mean.
    deviation = math.sqrt((count - 1) * (SIZES**2).sum()) / SIZES.sum()
    assert np.abs(shares / shares.mean() - 1).max() < 3 * deviation
    assert shares.max() / shares.mean() < 1.11


def test_the_numbers_of_items_are_as_even_as_those_of_a_random_choice() -> None:
    files = np.arange(1, 200_001)
    for seed in range(3):
        shares = np.bincount(ownership(50, seed=seed).owners(files), minlength=50)
        deviation = (shares - 4000) / math.sqrt(4000 * 0.98)
        assert np.abs(deviation).max() < 4
        assert 0.7 < deviation.std() < 1.3


@pytest.mark.promise(287)
def test_the_loss_of_a_member_moves_only_what_it_owned() -> None:
    whole = ownership(4)
    before = whole.owners(ITEMS)
    after = whole.owners(ITEMS, without={2})
    moved = before != after
    assert np.array_equal(moved, before == 2)
    assert moved.sum() == pytest.approx(5000, abs=200)
    # Each of the others takes a third of it.
    assert np.bincount(after[moved], minlength=4).tolist() == pytest.approx(
        [moved.sum() / 3, moved.sum() / 3, 0, moved.sum() / 3], abs=150
    )
    rest = Ownership([member for member in whole.members if member.name != "node0002"], 1)
    assert [rest.members[index].name for index in rest.owners(ITEMS)] == [
        whole.members[index].name for index in after
    ]


def test_a_new_member_takes_its_share_and_moves_nothing_else() -> None:
    before, after = ownership(7).owners(ITEMS), ownership(8).owners(ITEMS)
    moved = before != after
    assert set(after[moved].tolist()) == {7}
    assert moved.sum() == pytest.approx(len(ITEMS) / 8, rel=0.1)


@pytest.mark.promise(287)
def test_the_owners_depend_on_names_and_not_on_their_order() -> None:
    names = ["n3", "n1", "login", "n2"]
    one = Ownership([Member(name, 1 + len(name)) for name in names], 9)
    other = Ownership([Member(name, 1 + len(name)) for name in sorted(names)], 9)
    assert [names[index] for index in one.owners(ITEMS)] == [
        sorted(names)[index] for index in other.owners(ITEMS)
    ]


def test_another_set_of_items_has_other_owners() -> None:
    same = ownership(4, seed=1).owners(ITEMS) == ownership(4, seed=2).owners(ITEMS)
    assert same.mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 2, 5]])
def test_one_item_has_the_owner_that_many_have(weights: list[int]) -> None:
    some = Ownership([Member(f"n{weight}.{n}", weight) for n, weight in enumerate(weights)], -1)
    items = np.array([0, 1, 2**63, 2**64 - 1, *range(100, 150)], np.uint64)
    owners = some.owners(items).tolist()
    assert [some.owner(item) for item in items.tolist()] == owners
    # The order is that in which the members would own the item if those before were down.
    orders = [some.order(item) for item in items.tolist()]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    for place in (1, 2):
        for item, order in zip(items, orders, strict=True):
            (owner,) = some.owners(np.array([item]), without=order[:place])
            assert owner == order[place]


def test_members_own_shares_in_proportion_to_their_weights() -> None:
    weights = [1.0, 2.0, 4.0, 0.5]
    items = np.arange(100_000)
    members = [Member(f"n{n}", weight * 1e12) for n, weight in enumerate(weights)]
    shares = np.bincount(Ownership(members).owners(items)) / len(items)
    assert shares.tolist() == pytest.approx([w / sum(weights) for w in weights], abs=0.006)


def test_a_larger_weight_only_takes_items_from_others() -> None:
    def owners(weight: float) -> list[int]:
        members = [Member("a", 1), Member("b", weight), Member("c", 3)]
        return Ownership(members).owners(ITEMS).tolist()

    before, after = np.array(owners(1)), np.array(owners(1.5))
    assert set(after[before != after].tolist()) == {1}
    # A weight close to that of all others gives the owners of equal weights, but for a few items.
    members = [Member(f"node{number:04}", 1 + 1e-12 * number) for number in range(4)]
    differ = Ownership(members, 1).owners(ITEMS) != ownership(4).owners(ITEMS)
    assert differ.sum() <= 1


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_the_first_members_of_many_items_are_those_of_each_order(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Ownership([Member("n0", weight), *(Member(f"n{number}") for number in range(1, 9))])
    # Several blocks, and a last one that is not full.
    monkeypatch.setattr("monarch.peers.ownership._SCORES", 64)
    orders = [whole.order(item)[:3] for item in range(1, 41)]
    items = np.arange(1, 41)
    assert whole.first(items, 3).tolist() == orders
    assert whole.first(items, 1)[:, 0].tolist() == whole.owners(items).tolist()
    assert whole.first(items, 20).shape == (40, 9)


@pytest.mark.promise(287)
def test_the_owners_are_those_of_every_machine_and_version() -> None:
    """Nodes of one job may run on different processors: these values must never change."""
    items = np.arange(1, 25)
    equal = Ownership([Member("n1"), Member("n2"), Member("gpu-03.cluster")], 20_260_101)
    assert "".join(map(str, equal.owners(items))) == "220021010002110122001112"
    weighted = Ownership([Member("n1", 1), Member("n2", 2), Member("gpu-03.cluster", 3)])
    assert "".join(map(str, weighted.owners(items))) == "110110002202221110022212"


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ([], "0 members"),
        ([Member("a"), Member("a", 2)], "same name"),
        ([Member("a", 0)], "positive"),
        ([Member("a", math.nan)], "positive"),
        ([Member("a", math.inf)], "positive"),
        ([Member(str(n)) for n in range(MOST_MEMBERS + 1)], "16,385 members"),
    ],
)
def test_members_that_cannot_be_are_refused(members: list[Member], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Ownership(members)


def test_without_any_member_nothing_is_owned() -> None:
    with pytest.raises(ValueError, match="all members are down"):
        ownership(2).owners(ITEMS, without={0, 1})
    assert ownership(2).owners(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 2.0, 3.0, 1.0, 1.0]])
def test_the_replicas_of_an_item_are_on_the_first_members_of_its_order(
    weights: list[float],
) -> None:
    members = [Member(f"n{number}", weight) for number, weight in enumerate(weights)]
    made = Ownership(members, seed=4)
    items = np.arange(1, 301)
    orders = [made.order(item) for item in items.tolist()]
    for member in range(5):
        assert np.array_equal(made.owns(items, member), made.owners(items) == member)
        for replicas in (1, 2, 5):
            expected = [member in order[:replicas] for order in orders]
            assert made.owns(items, member, replicas=replicas).tolist() == expected
