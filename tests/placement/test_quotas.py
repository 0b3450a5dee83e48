"""Quotas of jobs: what each is charged for, and which copies it gets."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from monarch.placement.policy import Item
from monarch.placement.quotas import Quotas
from tests.placement.simulate import Mount, items_of

SIZE = 10


def mount_of(limits: list[int | None], *, capacity: int, items: int) -> tuple[Mount, Quotas]:
    mount = Mount("no_evict", items_of([SIZE] * items), [capacity])
    sizes = {item.ino: item.size for item in mount.items}
    mount.controller.sizes_by(sizes.__getitem__)
    mount.controller.quotas = quotas = Quotas(limits, mount.residency.entries)
    return mount, quotas


def read(mount: Mount, items: list[Item], job: int | None) -> None:
    """Opens files for a job, whose copies are made at once."""
    for item in items:
        promote = mount.controller.opened(item, job=job)
        if promote is not None:
            mount.commit(promote)


def resident(mount: Mount, items: list[Item]) -> int:
    return sum(item.size for item in items if mount.residency.tier_of(item.ino))


@pytest.mark.promise(298)
@pytest.mark.parametrize("capacity", [1000, 1005, 2000])
def test_two_jobs_stay_within_one_file_of_their_quotas(capacity: int) -> None:
    limits: list[int | None] = [capacity * 3 // 10, capacity * 7 // 10]
    mount, quotas = mount_of(limits, capacity=capacity, items=1000)
    ours, theirs = list(mount.items[:500]), list(mount.items[500:])
    for start in range(0, 500, 50):
        read(mount, ours[start : start + 50], 0)
        read(mount, theirs[start : start + 50], 1)
    for job, items in enumerate((ours, theirs)):
        limit = limits[job]
        assert limit is not None
        assert limit - SIZE < resident(mount, items) <= limit
        assert quotas.charged(job) == resident(mount, items)


@pytest.mark.promise(298)
def test_copies_of_no_job_leave_for_those_of_a_job_within_its_quota() -> None:
    mount, quotas = mount_of([50], capacity=100, items=40)
    old, new = list(mount.items[:10]), list(mount.items[10:])
    for item in old:
        promote = mount.controller.warm(item)
        assert promote is not None
        mount.commit(promote)
    read(mount, new, None)
    assert resident(mount, old) == 100 and resident(mount, new) == 0
    read(mount, new, 0)
    assert (resident(mount, old), resident(mount, new)) == (50, 50)
    # Its own copies stay, and only the first ones fit.
    assert resident(mount, new[:5]) == 50 == quotas.charged(0)


@pytest.mark.promise(298)
def test_a_job_that_has_ended_leaves_its_room_to_the_others() -> None:
    mount, quotas = mount_of([60, 60], capacity=100, items=40)
    ours, theirs = list(mount.items[:20]), list(mount.items[20:])
    read(mount, ours, 0)
    read(mount, theirs, 1)
    assert (resident(mount, ours), resident(mount, theirs)) == (60, 40)
    # The other job is charged for its copies, which do not leave.
    read(mount, theirs, 1)
    assert resident(mount, theirs) == 40
    quotas.ended(0)
    assert quotas.charged(0) == 0
    read(mount, theirs, 1)
    assert resident(mount, theirs) == 60 == quotas.charged(1)


@pytest.mark.promise(298)
def test_with_quotas_only_opens_and_requests_bring_copies() -> None:
    mount, quotas = mount_of([100], capacity=100, items=4)
    first, second, third, _ = mount.items
    controller = mount.controller
    assert controller.offered(first) is None and not controller.admits(first)
    assert controller.offered_together(mount.items) == []
    assert controller.begin_part(first, overhead=0) is None
    assert controller.warm(first) is not None and quotas.charged(0) == 0
    # A copy that is given up is charged to no job, also if it is to be made later.
    for retry in (False, True):
        promote = controller.opened(second, job=0)
        assert promote is not None and quotas.charged(0) == SIZE
        controller.abandoned(promote.item, promote.tier, retry=retry)
        assert quotas.charged(0) == 0
    promote = controller.opened(third, job=0)
    assert promote is not None
    mount.commit(promote)
    controller.dropped(third.ino, third.size)
    assert quotas.charged(0) == 0


@pytest.mark.promise(298)
def test_a_copy_is_charged_in_equal_parts_to_the_jobs_that_have_opened_it() -> None:
    quotas = Quotas([100, 30, None], 10)
    item = items_of([60])[0]
    quotas.opened(item.ino, 60, 0)
    assert quotas.charged(0) == 60
    quotas.opened(item.ino, 60, 1)
    quotas.opened(item.ino, 60, 1)
    assert [quotas.charged(job) for job in range(3)] == [30, 30, 0]
    quotas.opened(item.ino, 60, 2)
    assert [quotas.charged(job) for job in range(3)] == [20, 20, 20]
    quotas.ended(2)
    assert [quotas.charged(job) for job in range(3)] == [30, 30, 0]
    # A part that exceeds the quota is not charged, and the parts of the others stay.
    other = items_of([60, 60])[1]
    quotas.opened(other.ino, 60, 0)
    quotas.opened(other.ino, 60, 1)
    assert [quotas.charged(job) for job in range(3)] == [90, 30, 0]
    quotas.removed(item.ino, 60)
    assert [quotas.charged(job) for job in range(3)] == [60, 0, 0]
    assert quotas.is_charged(other.ino) and not quotas.is_charged(item.ino)


@pytest.mark.promise(298)
@pytest.mark.parametrize("seed", range(8))
def test_the_charges_are_those_of_a_list_of_sharers(seed: int) -> None:
    dice = random.Random(seed)
    limits = [dice.choice([None, 50, 200, 1000]) for _ in range(4)]
    items = items_of(dice.randrange(1, 100) for _ in range(20))
    quotas = Quotas(limits, max(item.ino for item in items))
    sharers: dict[Item, set[int]] = {item: set() for item in items}

    def charged(job: int) -> Fraction:
        parts = (Fraction(i.size, len(by)) for i, by in sharers.items() if job in by)
        return sum(parts, Fraction(0))

    for _ in range(400):
        item, job = dice.choice(items), dice.randrange(4)
        act = dice.random()
        if act < 0.7:
            quotas.opened(item.ino, item.size, job)
            part = Fraction(item.size, len(sharers[item] | {job}))
            limit = limits[job]
            if job in sharers[item] or limit is None or charged(job) + part <= limit:
                sharers[item].add(job)
        elif act < 0.95:
            quotas.removed(item.ino, item.size)
            sharers[item].clear()
        else:
            quotas.ended(job)
            for by in sharers.values():
                by.discard(job)
        assert [quotas.charged(job) for job in range(4)] == [charged(job) for job in range(4)]
