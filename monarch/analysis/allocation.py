"""Divides the cores and tiers of servers, and a source, among jobs whose GPUs are given.

No job gets less than its fair share gives it, which is in proportion to its GPUs. ``tune`` and
``greedy`` are the schedulers of the same names in Synergy (Mohan et al., "Looking beyond GPUs for
DNN scheduling on multi-tenant clusters", OSDI 2022); ``bound`` is an upper limit for all of them.
Unlike there, ``tune`` finally gives to jobs what is left on their servers, and the bandwidth of the
source is a third resource, as in SiloD (Zhao et al., EuroSys 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from monarch.analysis.sensitivity import Job, Option

POLICIES = ("fair", "greedy", "tune")

# An option is enough if it gives this share of the highest rate.
_ENOUGH = 0.99
# The bound divides the cores and the bytes of all servers into at most so many units each; and into
# fewer while it searches for the price of a byte from the source, in so many steps.
_MOST_UNITS = 512
_SEARCHED_UNITS = 64
_STEPS = 16
# Sums of parts of the source may be too large by this share of it.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    gpus: int
    cores: int
    tier_bytes: int


class Source(NamedTuple):
    """What the source gives all jobs together, and the fair share of each by its name, in
    bytes/s."""

    budget: float
    shares: Mapping[str, float]

    @classmethod
    def of(cls, budget: float, jobs: Sequence[Job], servers: Sequence[Server]) -> Source:
        """Only jobs that have GPUs read from the source. Each gets a part in proportion to its
        GPUs."""
        running = _with_gpus(jobs, sum(server.gpus for server in servers))
        each_gpu = budget / max(1, sum(job.gpus for job in running))
        return cls(budget, {job.name: each_gpu * job.gpus for job in jobs})


@dataclass(frozen=True, slots=True)
class Grant:
    """What a job gets: an option, and the number of its GPUs on each server. ``fair`` is what its
    fair share would give. ``need`` are the bytes/s from the source with which the option has its
    full rate: it is limited if it gets fewer."""

    job: Job
    option: Option
    fair: Option
    gpus: Mapping[str, int]
    need: float


class Allocation(NamedTuple):
    """``waiting``: the names of jobs for which there was no place."""

    grants: list[Grant]
    waiting: list[str]


def allocate(
    policy: str, jobs: Sequence[Job], servers: Sequence[Server], source: Source | None = None
) -> Allocation:
    """Places jobs by one of ``POLICIES``. If there are too few GPUs, jobs that come first in
    ``jobs`` have priority. Raises ValueError as ``Needs``, or for an unknown policy."""
    needs = {job.name: Needs.of(job, servers, source) for job in jobs}
    cluster = _Cluster(servers, source)
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
                cluster.improve(cluster.placed[job.name], needs[job.name].options)
    grants = [
        _granted(cluster.placed[job.name], needs[job.name])
        for job in jobs
        if job.name in cluster.placed
    ]
    waiting = [job.name for job in jobs if job.name not in cluster.placed]
    return Allocation(grants if source is None else _with_rest(grants, source.budget), waiting)


def _granted(placed: _Placed, needs: Needs) -> Grant:
    amounts = placed.option.cores, placed.option.tier_bytes
    full = (each for each in placed.job.options if (each.cores, each.tier_bytes) == amounts)
    need = max(full, key=lambda each: each.rate).source
    return Grant(placed.job, placed.option, needs.fair, dict(sorted(placed.gpus.items())), need)


def _with_rest(grants: Sequence[Grant], budget: float) -> list[Grant]:
    """What is left of the source is for the jobs that are limited."""
    # The sum does not depend on the order of the jobs.
    rest = max(0.0, budget - math.fsum(grant.option.source for grant in grants))
    missing = [grant.need - grant.option.source for grant in grants]
    found = []
    for grant, more in zip(grants, divided_source(missing, rest), strict=True):
        option = grant.option
        if more > 0:
            given = min(grant.need, option.source + more)
            option = replace(option, rate=option.rate * given / option.source, source=given)
        found.append(replace(grant, option=option))
    return found


class Needs(NamedTuple):
    """Three options of a job: its ``fair`` share; its ``demand``, the least that gives (almost) the
    highest rate; and its ``least`` within the fair share that gives the rate of that. ``options``
    are all that it may get: also those that its fair share of the source limits.

    Raises ValueError if no option is within the fair share, or if a job has more GPUs than all
    servers.
    """

    fair: Option
    demand: Option
    least: Option
    options: Sequence[Option]

    @classmethod
    def of(cls, job: Job, servers: Sequence[Server], source: Source | None = None) -> Needs:
        if job.gpus > sum(server.gpus for server in servers):
            raise ValueError(f"{job.name} needs {job.gpus} GPUs, and all servers have fewer")
        cores = min(server.cores / server.gpus for server in servers) * job.gpus
        tier = min(server.tier_bytes // server.gpus for server in servers) * job.gpus
        share = math.inf if source is None else source.shares[job.name]
        options = _usable(job, share)
        within = [
            each
            for each in options
            if each.cores <= cores and each.tier_bytes <= tier and each.source <= share
        ]
        if not within:
            raise ValueError(
                f"{job.name} has no option within its fair share of {math.floor(cores)} cores and"
                f" {tier} bytes, with as many cores for each of its GPUs"
            )
        fair = max(within, key=_worth)
        enough = max(_ENOUGH * max(each.rate for each in options), fair.rate)
        return cls(fair, _least(options, enough), _least(within, fair.rate), options)


def _usable(job: Job, share: float) -> list[Option]:
    """A job may be on several servers, with the same cores for each of its GPUs. An option may also
    be limited by the job's share of the source."""
    usable = [option for option in job.options if option.cores % job.gpus == 0]
    return usable + [each.limited(share) for each in usable if each.source > share]


def _worth(option: Option) -> tuple[float, float, int, int]:
    """The highest rate is best; then what leaves the most of the source, the cores and the tier."""
    return option.rate, -option.source, -option.cores, -option.tier_bytes


def _least(options: Iterable[Option], rate: float) -> Option:
    """The option with the fewest cores, and then bytes, that gives at least ``rate``."""
    enough = [option for option in options if option.rate >= rate]
    return min(enough, key=lambda each: (each.cores, each.tier_bytes, each.source))


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
    """``free_source`` is what is left of the source, in bytes/s."""

    servers: Sequence[Server]
    source: Source | None
    free: dict[str, _Free] = field(init=False)
    free_source: float = field(init=False)
    placed: dict[str, _Placed] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.free_source = math.inf if self.source is None else self.source.budget
        self.free = {
            each.name: _Free(each.gpus, each.cores, each.tier_bytes) for each in self.servers
        }

    def room_for(self, server: str, job: Job, option: Option) -> int:
        """How many GPUs of a job, each with its cores and bytes, a server has room for; none if the
        source cannot give enough."""
        free = self.free[server]
        if option.source > self.free_source + self._rounding():
            return 0
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

    def limited(self, needs: Needs) -> Iterator[Option]:
        """The options that give the rate of the fair share with what is left of the source; none
        without a source."""
        if self.source is not None and self.free_source > 0:
            for option in sorted(needs.options, key=lambda each: (each.cores, each.tier_bytes)):
                limited = option.limited(self.free_source)
                if limited.rate >= needs.fair.rate:
                    yield limited

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

    def exceeds_source(self) -> bool:
        """Whether the jobs have more of the source than there is."""
        return self.free_source < -self._rounding()

    def _rounding(self) -> float:
        return 0.0 if self.source is None else _ROUNDING * self.source.budget

    def replace(self, placed: _Placed, option: Option) -> None:
        """Gives a placed job another option."""
        self._take(placed.job, placed.option, placed.gpus, -1)
        self._take(placed.job, option, placed.gpus, 1)
        placed.option = option

    def improve(self, placed: _Placed, options: Iterable[Option]) -> None:
        """Gives a job the best of the options for which there is room, or one of them with what it
        has of the source; its present one is among them."""
        job, before = placed.job, placed.option
        self._take(job, before, placed.gpus, -1)
        same = [each.limited(before.source) for each in options if each.source > before.source > 0]
        better = [
            option
            for option in (*options, *same, before)
            if all(
                self.room_for(server, job, option) >= count for server, count in placed.gpus.items()
            )
        ]
        placed.option = max(better, key=_worth)
        self._take(job, placed.option, placed.gpus, 1)

    def _take(self, job: Job, option: Option, gpus: Mapping[str, int], sign: int) -> None:
        cores, tier = _for_each_gpu(job, option)
        self.free_source -= sign * option.source
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
    """Best fit with the full demand, or else with the least share, or with what is left of the
    source. Without room, the job is placed on servers with free GPUs, and other jobs there are
    reduced to their least shares until all fit; jobs anywhere, if the source has not enough.

    The least share of a job may have more of something than its option. So this may exceed another
    server of that job, or the source, and continues there. It ends: jobs with their least shares
    fit."""
    own = needs[job.name]
    for option in (own.demand, own.least, *cluster.limited(own)):
        gpus = cluster.best_fit(job, option)
        if gpus is not None:
            cluster.place(job, option, gpus)
            return
    cluster.place(job, own.least, _required(cluster, job))
    while (server := cluster.exceeded()) is not None or cluster.exceeds_source():
        excess = _excess if server is not None else _source_excess
        others = [
            (-excess(placed.option, needs[name].least), name)
            for name, placed in cluster.placed.items()
            if placed.option != needs[name].least and (server is None or server in placed.gpus)
        ]
        _, most = min(others)
        cluster.replace(cluster.placed[most], needs[most].least)


def _excess(option: Option, least: Option) -> float:
    """By which share an option has more cores or bytes than the least share, whichever is more."""
    cores = option.cores / least.cores - 1
    tier = option.tier_bytes / least.tier_bytes - 1 if least.tier_bytes else 0.0
    return max(cores, tier)


def _source_excess(option: Option, least: Option) -> float:
    """The bytes/s from the source that an option has beyond the least share."""
    return option.source - least.source


# -- the bound -------------------------------------------------------------------------------------


def bound(jobs: Sequence[Job], servers: Sequence[Server], source: Source | None = None) -> float:
    """The highest sum of the speed-ups over fair shares that any division of all servers together
    allows, if each job gets an option with at least the rate of its fair share: a knapsack with one
    option for each job, solved by dynamic programming. It ignores which server has what. Amounts
    are rounded in favour of the jobs if there are more than 512 units. Raises ValueError as
    ``Needs``.

    With a source the knapsack has a price for each byte from it, and the value of the budget is
    added: by Lagrangian duality this is an upper limit for every price. The price with (almost) the
    lowest limit is used. An option may also be limited by the source, down to the rate of the fair
    share: the value is linear between the two, so one of them is best.
    """
    fair = [Needs.of(job, servers, source).fair for job in jobs]
    found = [
        [option for option in job.options if option.rate >= least.rate]
        for job, least in zip(jobs, fair, strict=True)
    ]
    rates = [least.rate for least in fair]
    most = sum(max(each.source for each in options) for options in found)
    if source is None or most <= source.budget:
        return _Knapsack.of(found, rates, servers, _MOST_UNITS).best(0.0)
    budget = source.budget * (1 + _ROUNDING)
    for options, rate in zip(found, rates, strict=True):
        options += [each.limited(each.source * rate / each.rate) for each in options if each.source]
    coarse = _Knapsack.of(found, rates, servers, _SEARCHED_UNITS)
    price = _lowest(lambda at: coarse.best(at) + at * budget, len(jobs) / budget)
    exact = _Knapsack.of(found, rates, servers, _MOST_UNITS)
    return min(exact.best(0.0), exact.best(price) + price * budget)


def _lowest(value: Callable[[float], float], step: float) -> float:
    """About where a convex function of a number from 0 on is lowest."""
    end = step
    while value(2 * end) < value(end):
        end *= 2
    low, high = 0.0, 2 * end
    for _ in range(_STEPS):
        third = (high - low) / 3
        if value(low + third) <= value(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class _Knapsack:
    """The ``options`` of each job, with the rates that their speed-ups are relative to."""

    options: Sequence[Sequence[Option]]
    rates: Sequence[float]
    cores: _Units
    tier: _Units

    @classmethod
    def of(
        cls,
        options: Sequence[Sequence[Option]],
        rates: Sequence[float],
        servers: Sequence[Server],
        most_units: int,
    ) -> _Knapsack:
        everything = [option for each in options for option in each]
        cores = _Units.of(
            sum(server.cores for server in servers),
            [option.cores for option in everything],
            most_units,
        )
        tier = _Units.of(
            sum(server.tier_bytes for server in servers),
            [option.tier_bytes for option in everything],
            most_units,
        )
        return cls(options, rates, cores, tier)

    def best(self, price: float) -> float:
        """The highest sum of speed-ups, less ``price`` for each byte/s from the source."""
        cores, tier = self.cores, self.tier
        best: npt.NDArray[np.float64] = np.zeros((cores.number + 1, tier.number + 1))
        for options, rate in zip(self.options, self.rates, strict=True):
            after = np.full_like(best, -math.inf)
            for option in options:
                used_cores, used_tier = option.cores // cores.size, option.tier_bytes // tier.size
                if used_cores > cores.number or used_tier > tier.number:
                    continue
                rest = best[: cores.number + 1 - used_cores, : tier.number + 1 - used_tier]
                target = after[used_cores:, used_tier:]
                value = option.rate / rate - price * option.source
                np.maximum(target, rest + value, out=target)
            best = after
        return float(best[-1, -1])


class _Units(NamedTuple):
    """Amounts of a resource are counted in units of ``size``; there are ``number`` of them."""

    size: int
    number: int

    @classmethod
    def of(cls, total: int, amounts: Iterable[int], most: int) -> _Units:
        size = math.gcd(*amounts) or 1
        if total // size <= most:
            return cls(size, total // size)
        return cls(-(-total // most), most)


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
