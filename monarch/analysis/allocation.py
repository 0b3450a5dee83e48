"""Divides the cores and the tiers of servers among jobs whose GPUs are given.

No job gets less than its fair share gives it, which is in proportion to its GPUs. ``tune`` and
``greedy`` are the schedulers of the same names in Synergy (Mohan et al., "Looking beyond GPUs for
DNN scheduling on multi-tenant clusters", OSDI 2022); ``bound`` is an upper limit for all of them.
Unlike there, ``tune`` finally gives to jobs what is left on their servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from monarch.analysis.sensitivity import Job, Option

POLICIES = ("fair", "greedy", "tune")

# An option is enough if it gives this share of the highest rate.
_ENOUGH = 0.99
# The bound divides the cores and the bytes of all servers into at most so many units each.
_MOST_UNITS = 512


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    gpus: int
    cores: int
    tier_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What a job gets: an option, and the number of its GPUs on each server. ``fair`` is what its
    fair share would give."""

    job: Job
    option: Option
    fair: Option
    gpus: Mapping[str, int]


class Allocation(NamedTuple):
    """``waiting``: the names of jobs for which there was no place."""

    grants: list[Grant]
    waiting: list[str]


def allocate(policy: str, jobs: Sequence[Job], servers: Sequence[Server]) -> Allocation:
    """Places jobs by one of ``POLICIES``. If there are too few GPUs, jobs that come first in
    ``jobs`` have priority. Raises ValueError as ``Needs``, or for an unknown policy."""
    needs = {job.name: Needs.of(job, servers) for job in jobs}
    cluster = _Cluster(servers)
    if policy == "greedy":
        for job in jobs:
            _place_greedily(cluster, job, needs[job.name])
    else:
        running = _with_gpus(jobs, sum(server.gpus for server in servers))
        for job in sorted(running, key=lambda each: _rank(each, needs[each.name])):
            if policy == "tune":
                _place_and_tune(cluster, job, needs)
            elif policy == "fair":
                cluster.place(job, needs[job.name].fair, _required(cluster, job))
            else:
                raise ValueError(f"no policy {policy!r}")
        if policy == "tune":
            for job in sorted(running, key=lambda each: _rank(each, needs[each.name])):
                cluster.improve(cluster.placed[job.name])
    grants = [
        Grant(job, *_granted(cluster.placed[job.name], needs[job.name]))
        for job in jobs
        if job.name in cluster.placed
    ]
    return Allocation(grants, [job.name for job in jobs if job.name not in cluster.placed])


def _granted(placed: _Placed, needs: Needs) -> tuple[Option, Option, Mapping[str, int]]:
    return placed.option, needs.fair, dict(sorted(placed.gpus.items()))


class Needs(NamedTuple):
    """Three options of a job: its ``fair`` share; its ``demand``, the least that gives (almost) the
    highest rate; and its ``least`` within the fair share that gives the rate of that.

    Raises ValueError if no option is within the fair share, or if a job has more GPUs than all
    servers.
    """

    fair: Option
    demand: Option
    least: Option

    @classmethod
    def of(cls, job: Job, servers: Sequence[Server]) -> Needs:
        if job.gpus > sum(server.gpus for server in servers):
            raise ValueError(f"{job.name} needs {job.gpus} GPUs, and all servers have fewer")
        cores = min(server.cores / server.gpus for server in servers) * job.gpus
        tier = min(server.tier_bytes // server.gpus for server in servers) * job.gpus
        options = _usable(job)
        within = [each for each in options if each.cores <= cores and each.tier_bytes <= tier]
        if not within:
            raise ValueError(
                f"{job.name} has no option within its fair share of {math.floor(cores)} cores and"
                f" {tier} bytes, with as many cores for each of its GPUs"
            )
        fair = max(within, key=_worth)
        enough = max(_ENOUGH * max(each.rate for each in options), fair.rate)
        return cls(fair, _least(options, enough), _least(within, fair.rate))


def _usable(job: Job) -> list[Option]:
    """A job may be on several servers, with the same cores for each of its GPUs."""
    return [option for option in job.options if option.cores % job.gpus == 0]


def _worth(option: Option) -> tuple[float, float, int, int]:
    """The highest rate is best; then what leaves the most of the source, the cores and the tier."""
    return option.rate, -option.source, -option.cores, -option.tier_bytes


def _least(options: Iterable[Option], rate: float) -> Option:
    """The option with the fewest cores, and then bytes, that gives at least ``rate``."""
    enough = [option for option in options if option.rate >= rate]
    return min(enough, key=lambda each: (each.cores, each.tier_bytes))


def _rank(job: Job, needs: Needs) -> tuple[int, int, int, str]:
    """The largest demands are placed first."""
    return -job.gpus, -needs.demand.cores, -needs.demand.tier_bytes, job.name


def _with_gpus(jobs: Sequence[Job], gpus: int) -> list[Job]:
    """The jobs that have GPUs, in their order; a smaller job may fill what a larger one leaves."""
    running = []
    for job in jobs:
        if job.gpus <= gpus:
            running.append(job)
            gpus -= job.gpus
    return running


# -- placing ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Free:
    gpus: int
    cores: int
    tier_bytes: int


@dataclass(slots=True)
class _Placed:
    job: Job
    option: Option
    gpus: Mapping[str, int]


def _for_each_gpu(job: Job, option: Option) -> tuple[int, int]:
    """The cores and bytes that a job takes on a server for each of its GPUs there."""
    return option.cores // job.gpus, -(-option.tier_bytes // job.gpus)


@dataclass(slots=True)
class _Cluster:
    servers: Sequence[Server]
    free: dict[str, _Free] = field(init=False)
    placed: dict[str, _Placed] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.free = {
            each.name: _Free(each.gpus, each.cores, each.tier_bytes) for each in self.servers
        }

    def room_for(self, server: str, job: Job, option: Option) -> int:
        """How many GPUs of a job, each with its cores and bytes, a server has room for."""
        free = self.free[server]
        cores, tier = _for_each_gpu(job, option)
        by_tier = free.tier_bytes // tier if tier else free.gpus
        return min(free.gpus, free.cores // cores, by_tier)

    def best_fit(self, job: Job, option: Option) -> Mapping[str, int] | None:
        """The server with the least free resources that has room for all of a job. If no server is
        large enough, several with the most free GPUs; None if there is no room."""
        rooms = {server: self.room_for(server, job, option) for server in self.free}
        whole = [server for server, room in rooms.items() if room >= job.gpus]
        if whole:
            return {min(whole, key=self._fullness): job.gpus}
        if job.gpus <= max(server.gpus for server in self.servers):
            return None
        return _spread(rooms, job.gpus)

    def _fullness(self, server: str) -> tuple[int, int, int, str]:
        free = self.free[server]
        return free.gpus, free.cores, free.tier_bytes, server

    def place(self, job: Job, option: Option, gpus: Mapping[str, int]) -> None:
        self._take(job, option, gpus, 1)
        self.placed[job.name] = _Placed(job, option, gpus)

    def exceeded(self) -> str | None:
        """A server whose jobs have more cores or bytes than it has; None if there is none."""
        for server, free in self.free.items():
            if free.cores < 0 or free.tier_bytes < 0:
                return server
        return None

    def replace(self, placed: _Placed, option: Option) -> None:
        """Gives a placed job another option."""
        self._take(placed.job, placed.option, placed.gpus, -1)
        self._take(placed.job, option, placed.gpus, 1)
        placed.option = option

    def improve(self, placed: _Placed) -> None:
        """Gives a job the best option for which there is room; its present one is among them."""
        job, before = placed.job, placed.option
        self._take(job, before, placed.gpus, -1)
        better = [
            option
            for option in _usable(job)
            if all(
                self.room_for(server, job, option) >= count for server, count in placed.gpus.items()
            )
        ]
        placed.option = max(better, key=_worth)
        self._take(job, placed.option, placed.gpus, 1)

    def _take(self, job: Job, option: Option, gpus: Mapping[str, int], sign: int) -> None:
        cores, tier = _for_each_gpu(job, option)
        for server, count in gpus.items():
            free = self.free[server]
            free.gpus -= sign * count
            free.cores -= sign * count * cores
            free.tier_bytes -= sign * count * tier


def _spread(rooms: Mapping[str, int], gpus: int) -> Mapping[str, int] | None:
    """Divides GPUs among the servers with the most room; None if that is too little."""
    chosen: dict[str, int] = {}
    for server, room in sorted(rooms.items(), key=lambda each: (-each[1], each[0])):
        count = min(room, gpus - sum(chosen.values()))
        if count > 0:
            chosen[server] = count
    return chosen if sum(chosen.values()) == gpus else None


def _required(cluster: _Cluster, job: Job) -> Mapping[str, int]:
    """Where a job finds its GPUs, whatever else is free there: on one server if possible, that with
    the most free cores."""
    whole = [server for server, free in cluster.free.items() if free.gpus >= job.gpus]
    if whole:
        chosen = max(whole, key=lambda each: (cluster.free[each].cores, each))
        return {chosen: job.gpus}
    spread = _spread({server: free.gpus for server, free in cluster.free.items()}, job.gpus)
    assert spread is not None, "the GPUs of running jobs are counted before"
    return spread


def _place_greedily(cluster: _Cluster, job: Job, needs: Needs) -> None:
    """First fit with the full demand; a job that does not fit is passed over."""
    rooms = {name: cluster.room_for(name, job, needs.demand) for name in cluster.free}
    first = next((name for name, room in rooms.items() if room >= job.gpus), None)
    gpus = _spread(rooms, job.gpus) if first is None else {first: job.gpus}
    if gpus is not None:
        cluster.place(job, needs.demand, gpus)


def _place_and_tune(cluster: _Cluster, job: Job, needs: Mapping[str, Needs]) -> None:
    """Best fit with the full demand, or else with the least share. Without room, the job is placed
    on servers with free GPUs, and other jobs there are reduced to their least shares until all fit.

    The least share of a job may have more cores or more bytes than its option. So this may exceed
    another server of that job, and continues there. It ends: jobs with their least shares fit."""
    own = needs[job.name]
    for option in (own.demand, own.least):
        gpus = cluster.best_fit(job, option)
        if gpus is not None:
            cluster.place(job, option, gpus)
            return
    cluster.place(job, own.least, _required(cluster, job))
    while (server := cluster.exceeded()) is not None:
        others = [
            placed
            for placed in cluster.placed.values()
            if server in placed.gpus and placed.option != needs[placed.job.name].least
        ]
        excess = {
            placed.job.name: _excess(placed, needs[placed.job.name].least) for placed in others
        }
        most = min(others, key=lambda each: (-excess[each.job.name], each.job.name))
        cluster.replace(most, needs[most.job.name].least)


def _excess(placed: _Placed, least: Option) -> float:
    """By which share a job has more cores or bytes than its least share, whichever is more."""
    cores = placed.option.cores / least.cores - 1
    tier = placed.option.tier_bytes / least.tier_bytes - 1 if least.tier_bytes else 0.0
    return max(cores, tier)


# -- the bound -------------------------------------------------------------------------------------


def bound(
    jobs: Sequence[Job], servers: Sequence[Server], rates: Mapping[str, float] | None = None
) -> float:
    """The highest sum of the speed-ups that any division of all servers together allows, if each
    job gets an option with at least the rate of its fair share: a knapsack with one option for each
    job, solved by dynamic programming. It ignores which server has what, and the source. Speed-ups
    are relative to ``rates`` by the name of a job, or else to the fair shares. Amounts are rounded
    in favour of the jobs if there are more than 512 units. Raises ValueError as ``Needs``."""
    cores = _Units.of(
        sum(server.cores for server in servers),
        [option.cores for job in jobs for option in job.options],
    )
    tier = _Units.of(
        sum(server.tier_bytes for server in servers),
        [option.tier_bytes for job in jobs for option in job.options],
    )
    best: npt.NDArray[np.float64] = np.zeros((cores.number + 1, tier.number + 1))
    for job in jobs:
        fair = Needs.of(job, servers).fair
        divisor = fair.rate if rates is None else rates[job.name]
        after = np.full_like(best, -math.inf)
        for option in job.options:
            used_cores, used_tier = option.cores // cores.size, option.tier_bytes // tier.size
            if option.rate < fair.rate or used_cores > cores.number or used_tier > tier.number:
                continue
            rest = best[: cores.number + 1 - used_cores, : tier.number + 1 - used_tier]
            target = after[used_cores:, used_tier:]
            np.maximum(target, rest + option.rate / divisor, out=target)
        best = after
    return float(best[-1, -1])


class _Units(NamedTuple):
    """Amounts of a resource are counted in units of ``size``; there are ``number`` of them."""

    size: int
    number: int

    @classmethod
    def of(cls, total: int, amounts: Iterable[int]) -> _Units:
        size = math.gcd(*amounts) or 1
        if total // size <= _MOST_UNITS:
            return cls(size, total // size)
        return cls(-(-total // _MOST_UNITS), _MOST_UNITS)


# -- the source ------------------------------------------------------------------------------------


def divided_source(needs: Sequence[float], budget: float) -> list[float]:
    """The bandwidth of the source that each job gets: what it needs, or if that is too much for all
    together, an equal part for those that need more than that (max-min fairness). Bytes a
    second."""
    given = [0.0] * len(needs)
    left = budget
    order = sorted(range(len(needs)), key=needs.__getitem__)
    for place, index in enumerate(order):
        given[index] = min(needs[index], left / (len(order) - place))
        left -= given[index]
    return given
