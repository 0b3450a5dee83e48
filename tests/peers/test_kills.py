"""An engine, a daemon or a link fails at a random moment of an epoch of four nodes, a link becomes
slow, or a bit of a copy flips."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Tree, contents, require_fuse
from tests.equipment import hosts
from tests.equipment.hosts import Hosts
from tests.equipment.waiting import wait_until
from tests.mount.observe import copies, flip_bit, resident
from tests.peers.lab import Lab, lab

NODES = 4
NAMES = [f"d{n % 4}/f{n:03}" for n in range(60)]
# By the kind of a fault, the size of the smallest file: of a slow link an answer takes long.
FAULTS = {"engine": 500, "daemon": 500, "link": 500, "slow": 200_000, "bit": 500}
SLOW_MBIT = 4
# What happens without --soak: tests/peers/test_nodes.py has the others.
_USUAL, _USUAL_SEED = "link", 2
# The seeds of each kind with --soak, and those of one test.
_SEEDS, _LOT = 50, 5
# With more, an epoch that meets a cut link would take long.
PATIENCE = "peers.patience=1"
# The longest that a read may take: two nodes are asked, each with a connection (0.2 s), a hello
# (1 s) and a request (1 s); the rest is for the source and this machine, in s.
LONGEST_S = 2 * (0.2 + 1.0 + 1.0) + 3.0


@dataclass
class Fault:
    """``kind`` happens to the node ``victim`` when a node has read ``moment`` files."""

    kind: str
    victim: int
    moment: int
    copy: Path

    def happens(self, made: Lab, network: Hosts) -> None:
        if self.kind == "link":
            network.cut(self.victim)
        elif self.kind == "slow":
            network.limit(SLOW_MBIT, self.victim)
        elif self.kind == "bit":
            flip_bit(self.copy)
        elif self.kind == "daemon":
            made.nodes[self.victim].kill()
        elif (engine := made.engine(self.victim)) is not None:
            os.kill(engine, signal.SIGKILL)

    def ends(self, made: Lab, network: Hosts) -> None:
        if self.kind == "link":
            network.heal(self.victim)
        elif self.kind == "slow":
            network.limit(0, self.victim)
        elif self.kind == "bit":
            # It is as before.
            flip_bit(self.copy)
        elif self.kind == "daemon":
            made.mount_again(self.victim)

    def most_opens(self, lost: int) -> int:
        """The most opens of the other nodes at the source, if the victim has ``lost`` files. A
        request of each reader may have been under way. Each reads itself what a node gives late, or
        with other bytes."""
        readers = NODES - 1
        return {"slow": readers * lost, "bit": readers}.get(self.kind, lost + readers)


@pytest.fixture
def network() -> Iterator[Hosts]:
    require_fuse()
    if reason := hosts.unavailable():
        pytest.skip(reason)
    with Hosts(NODES) as made:
        yield made


def read_with(
    made: Lab, network: Hosts, fault: Fault, content: Mapping[str, bytes], chance: random.Random
) -> float:
    """All nodes but the one with the fault read all files. The longest read, in s."""
    readers = [number for number in made.nodes if number != fault.victim]
    acting, longest, failed = readers[0], [0.0], list[BaseException]()

    def read(number: int, order: list[str]) -> None:
        try:
            for done, name in enumerate(order):
                if number == acting and done == fault.moment:
                    fault.happens(made, network)
                begin = time.monotonic()
                found = (made.nodes[number].path / name).read_bytes()
                longest.append(time.monotonic() - begin)
                assert found == content[name], f"wrong bytes in {name}"
        except BaseException as error:
            failed.append(error)

    threads = []
    for number in readers:
        order = sorted(content)
        chance.shuffle(order)
        threads.append(threading.Thread(target=read, args=(number, order)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(longest)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = [(_USUAL, range(_USUAL_SEED, _USUAL_SEED + 1))]
    if metafunc.config.getoption("--soak"):
        lots = [range(first, first + _LOT) for first in range(0, _SEEDS, _LOT)]
        chosen = [(kind, lot) for kind in FAULTS for lot in lots]
    if "seeds" in metafunc.fixturenames:
        ids = [f"{kind}_from_{lot.start}" for kind, lot in chosen]
        metafunc.parametrize(("kind", "seeds"), chosen, ids=ids)


@pytest.mark.timeout(600)
@pytest.mark.promise(270, 273, 274)
def test_a_failure_at_any_moment_costs_no_byte_and_at_most_the_files_of_its_node(
    tmp_path: Path,
    tree: Tree,
    network: Hosts,
    kind: str,
    seeds: range,
    request: pytest.FixtureRequest,
) -> None:
    soak = bool(request.config.getoption("--soak"))
    content = {name: contents(name, FAULTS[kind] + 41 * n) for n, name in enumerate(NAMES)}
    tree(content)
    for seed in seeds:
        # In a job of its own: files that were taken over are lost no more, and nodes that still
        # leave out another one disagree about the next owner.
        with lab(tmp_path / f"seed{seed}", tmp_path / "source", NODES, network) as made:
            for number in range(1, NODES + 1):
                made.mount(number, PATIENCE, tier="30MiB")
                made.commands[-1].allows_log("nginx, which serves copies to the other nodes, ended")
                if kind == "bit":
                    made.commands[-1].allows_log("gave other bytes of inode")
            made.read_all(content)
            made.reports()
            chance = random.Random(seed)
            victim = chance.randint(1, NODES)
            kept = sorted(copies(made.nodes[victim])["fast"].values())
            fault = Fault(kind, victim, chance.randrange(len(content)), chance.choice(kept))
            lost = resident(made.nodes[victim], content)
            before = made.opens_at_the_source(but=victim)
            longest_s = read_with(made, network, fault, content, chance)
            opens = made.opens_at_the_source(but=victim) - before
            assert opens <= fault.most_opens(len(lost)), (seed, fault, opens)
            if soak:
                print(f"seed {seed}: {fault}, {opens} of {len(lost)} opens, {longest_s:.2f} s")
                assert longest_s <= LONGEST_S, (seed, fault, longest_s)
            fault.ends(made, network)
            wait_until(
                lambda: made.peers(fault.victim)["address"] != "",  # noqa: B023
                "the engine answers",
            )
