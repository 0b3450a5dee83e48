"""The request that changes quotas: all or none, within the places that there are."""

from __future__ import annotations

import pwd
import threading
from pathlib import PurePosixPath
from typing import Any

import pytest
import trio
import trio.testing

from monarch.daemon.quota_verbs import QuotaVerbs
from monarch.errors import UsageError
from monarch.placement.quotas import MOST_JOBS, Quotas
from monarch.telemetry.quota_changes import QuotaChange, QuotaChanges
from monarch.types import Ino
from monarch.vfs import quotas as module
from monarch.vfs.quotas import JobQuotas, Quota
from monarch.vfs.source_limit import SourceLimit

CAPACITY = 1000


def _group() -> PurePosixPath:
    return PurePosixPath("/slurm/job_7/step_0")


class Served:
    """The quotas of a mount: of user 1001, and of all others."""

    def __init__(self) -> None:
        jobs = (
            Quota("user 1001", user=1001, tier=300, source=SourceLimit(5)),
            Quota("all others"),
        )
        self.quotas = JobQuotas(jobs, Quotas([job.tier for job in jobs], 10))
        self._verb = QuotaVerbs(self.quotas, lambda: CAPACITY).table()["quotas"]

    async def ask(self, *wanted: Any, dry: bool = False) -> list[QuotaChange]:
        answer = await self._verb({"quotas": [*wanted], "dry": dry}, _send)
        return QuotaChanges.from_dict(answer).changes

    def limits(self) -> dict[str, tuple[int | None, int]]:
        return {each.job: (each.tier, each.source_limit) for each in self.quotas.report()}


async def _send(message: Any) -> None:
    raise AssertionError(message)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(module, "group_of", lambda pid: PurePosixPath("/slurm/job_7/step_0"))
    return Served()


BEFORE = {"user 1001": (300, 5), "all others": (None, 0)}


@pytest.mark.promise(321)
async def test_a_quota_is_changed_and_copies_beyond_it_stay(served: Served) -> None:
    copies = served.quotas.copies
    copies.opened(Ino(1), 250, 0)
    wanted = {"user": 1001, "tier": "10%", "source_bandwidth": "20MB"}
    change = QuotaChange("user 1001", False, 250, 100, 20_000_000, 300, 5)
    assert await served.ask(wanted, dry=True) == [change]
    assert served.limits() == BEFORE
    assert await served.ask(wanted) == [change]
    assert served.limits()["user 1001"] == (100, 20_000_000)
    assert copies.charged(0) == 250 and not copies.fits(0, 1)
    await served.ask({"user": "1001"})
    assert served.limits()["user 1001"] == (None, 0) and copies.fits(0, 10**12)


@pytest.mark.promise(298, 321)
async def test_a_job_that_is_added_counts_before_that_of_all_others(served: Served) -> None:
    assert served.quotas._number(1002, _group) == 1
    (change,) = await served.ask({"cgroup": "/slurm/job_7", "tier": 500})
    assert (change.is_new, change.tier, change.tier_before) == (True, 500, None)
    assert served.quotas._number(1002, _group) == 2 and served.quotas._number(1001, _group) == 0
    assert served.quotas.copies.fits(2, 500) and not served.quotas.copies.fits(2, 501)


@pytest.mark.promise(321)
async def test_jobs_that_have_ended_leave_their_places_and_configured_ones_do_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "runs_any_of", lambda user: True)
    more = MOST_JOBS - 2
    await served.ask(*({"user": 2000 + n, "tier": n} for n in range(more)))
    served.quotas.copies.opened(Ino(1), 3, 2 + 5)
    with pytest.raises(UsageError, match="room for 0 more quotas, and 1 are new"):
        await served.ask({"user": 3000})
    # Of two the second has no place, so the first is not changed either.
    with pytest.raises(UsageError, match="room for 0"):
        await served.ask({"user": 2001, "tier": 9}, {"user": 3000})
    assert served.limits()["user 2001"] == (1, 0)
    monkeypatch.setattr(module, "runs_any_of", lambda user: user not in (1001, 2005))
    await served.ask({"user": 3000, "tier": 70})
    assert served.limits()["user 3000"] == (70, 0) and "user 2005" not in served.limits()
    assert len(served.limits()) == MOST_JOBS and "user 1001" in served.limits()
    # It is charged for nothing that the other had.
    assert served.quotas.copies.charged(2 + 5) == 0


@pytest.mark.promise(321)
async def test_the_quotas_of_one_request_do_not_replace_each_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "runs_any_of", lambda user: True)
    await served.ask(*({"user": 2000 + n} for n in range(MOST_JOBS - 2)))
    # Two have ended, and the new ones have no process yet.
    monkeypatch.setattr(module, "runs_any_of", lambda user: user in range(1000, 2012))
    await served.ask({"user": 3000, "tier": 1}, {"user": 3001, "tier": 2})
    assert served.limits()["user 3000"] == (1, 0) and served.limits()["user 3001"] == (2, 0)
    # One that is changed keeps its place, although it has ended.
    await served.ask({"user": 3000, "tier": 3}, {"user": 4000, "tier": 4})
    limits = served.limits()
    assert limits["user 3000"] == (3, 0) and limits["user 4000"] == (4, 0)
    assert len(limits) == MOST_JOBS and "user 3001" not in limits
    with pytest.raises(UsageError, match="room for 1 more quotas, and 2 are new"):
        await served.ask({"user": 3000}, {"user": 5000}, {"user": 5001})


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ([{"user": "no such user"}], "^there is no user"),
        ([{"tier": "much"}], "is not a size"),
        ([{"user": 1, "cgroup": "/a"}], "exclude each other"),
        ([{"speed": 1}], "speed: "),
        ([{"user": 1}, {"user": "1", "tier": 5}], "two quotas are for one job"),
        (["user"], "must be a list of objects"),
        ("user", "must be a list"),
        (None, "must be a list"),
    ],
)
async def test_quotas_with_a_mistake_change_nothing(
    served: Served, wanted: Any, complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        await QuotaVerbs(served.quotas, lambda: 1).table()["quotas"]({"quotas": wanted}, _send)
    if isinstance(wanted, list):
        with pytest.raises(UsageError):
            await served.ask({"user": 1001, "tier": 1}, *wanted)
    assert served.limits() == BEFORE


async def test_a_mount_without_quotas_says_how_to_get_them() -> None:
    with pytest.raises(UsageError, match="has no quotas; mount it with at least one"):
        await QuotaVerbs(None, lambda: 1).table()["quotas"]({"quotas": []}, _send)


async def test_a_directory_service_that_hangs_delays_no_other_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def hanging(name: str) -> None:
        assert ended.wait(60)
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", hanging)

    async def change() -> None:
        with pytest.raises(UsageError, match="there is no user"):
            await served.ask({"user": "somebody"})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        await trio.testing.wait_all_tasks_blocked()
        ended.set()
    assert served.limits() == BEFORE
