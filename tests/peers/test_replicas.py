"""Written files that another host keeps: the loss of a host costs no fsynced checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mounted, contents, require_fuse
from tests.equipment import hosts
from tests.equipment.hosts import Hosts
from tests.equipment.waiting import wait_until
from tests.mount.observe import account
from tests.peers.lab import Lab, lab

EARLY, SHARD, LATER = (
    contents("early", 300_000),
    contents("shard", 3_000_000),
    contents("l", 70_000),
)
OPTIONS = (
    "absorb=ckpt/**",
    "writeback.shared=true",
    "writeback.replicate=1",
    "writeback.recover_after=1s",
    # What is not fsynced is not safe.
    "writeback.commit=0",
    # The hosts have the same snapshot, also one that is started later.
    "snapshot.freshness=never",
)
# The first 8 MiB pass at once; the rest of a file that is longer takes hours.
SLOW = "writeback.bandwidth=1000"
BLOCKER = 9 << 20
LONG_S = 100.0


@pytest.fixture
def network() -> Iterator[Hosts]:
    require_fuse()
    if reason := hosts.unavailable():
        pytest.skip(reason)
    with Hosts(3) as made:
        yield made


@pytest.fixture
def job(network: Hosts, tmp_path: Path) -> Iterator[Lab]:
    source = tmp_path / "source"
    (source / "ckpt").mkdir(parents=True)
    with lab(tmp_path / "lab", source, 3, network) as made:
        yield made


def mount(job: Lab, number: int, *options: str) -> Mounted:
    made = job.mount(number, *OPTIONS, *options, tier="64MiB")
    job.commands[-1].allows_log("another mount|other mount|is to keep written|is gone: ")
    return made


def durable(path: Path) -> str:
    return os.getxattr(path, "user.monarch.durable").decode()


def is_at_a_peer(path: Path) -> bool:
    return durable(path) == "peer"


def replicas(node: Mounted) -> dict[str, Any]:
    found: dict[str, Any] = account(node)["peers"]["replicas"]
    return found


def save(path: Path, content: bytes, *, name: str | None = None) -> Path:
    """Writes a file as frameworks do: fsynced, and renamed to ``name`` then."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if name is None:
        return path
    final = path.with_name(name)
    path.rename(final)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return final


def block_the_drain(node: Mounted) -> None:
    """Files that are written from now on do not come to the source."""
    (node.path / "ckpt" / "blocker").write_bytes(bytes(BLOCKER))
    parts = node.source / "ckpt"

    def has_begun() -> bool:
        # Then nothing is left of the 8 MiB.
        return any(path.stat().st_size > 4 << 20 for path in parts.glob(".*part*"))

    wait_until(has_begun, "the drain is at its limit", timeout_s=LONG_S)


@pytest.mark.promise(331)
def test_the_loss_of_two_hosts_costs_nothing_that_was_fsynced(job: Lab) -> None:
    owner, peer, last = mount(job, 1, SLOW), mount(job, 2), mount(job, 3)
    # What is at the source is kept no longer.
    early = save(last.path / "ckpt" / "early", EARLY)
    wait_until(lambda: durable(early) == "source", "it is at the source", timeout_s=LONG_S)
    wait_until(lambda: not replicas(owner)["held_files"], "it is not kept", timeout_s=LONG_S)
    assert replicas(last)["sent"] > 0
    assert list((owner.state / "held").glob("*/*")) == []
    # The names of frameworks: a temporary one, and then the final one.
    block_the_drain(owner)
    run = owner.path / "ckpt" / "run"
    shard = save(run / "shard.tmp", SHARD, name="shard")
    later = save(run / "later", LATER)
    later.chmod(0o600)
    save(later, LATER)
    save(run / "gone", LATER).unlink()
    # Each fsync has waited for that. A host that is very slow gets the file later.
    for path in (shard, later):
        wait_until(partial(is_at_a_peer, path), "another host keeps it", timeout_s=LONG_S)

    def are_kept() -> bool:
        found = replicas(peer)
        return (found["held_files"], found["held_bytes"]) == (2, len(SHARD) + len(LATER))

    wait_until(are_kept, "the file that was removed is forgotten", timeout_s=LONG_S)
    # A change after the last fsync is not safe anywhere.
    with open(later, "ab") as file:
        file.write(b"more")
        file.flush()
        assert durable(later) == "none"
    save(later, LATER)
    # The host that keeps them is lost: they are only here, until another one keeps them.
    peer.kill()
    states: set[str] = set()

    def is_kept_again() -> bool:
        states.update({durable(shard), durable(later)})
        return replicas(last)["held_files"] == 2

    wait_until(is_kept_again, "the next host keeps them", timeout_s=LONG_S)
    assert states <= {"local", "peer"}
    wait_until(partial(is_at_a_peer, shard), "the owner knows it", timeout_s=LONG_S)
    # The owner is lost, and its disk.
    owner.kill()
    shutil.rmtree(owner.state)
    for tier in owner.tiers.values():
        shutil.rmtree(tier)
    there = owner.source / "ckpt" / "run"
    wait_until(
        lambda: (there / "shard").exists() and (there / "later").exists(),
        "the host that keeps them has drained them",
        timeout_s=LONG_S,
    )
    assert (there / "shard").read_bytes() == SHARD
    assert (there / "later").read_bytes() == LATER
    assert (there / "later").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in there.iterdir()} == {"shard", "later"}
    assert (last.path / "ckpt" / "run" / "shard").read_bytes() == SHARD

    def is_forgotten() -> bool:
        found = replicas(last)
        return (found["held_files"], found["held_bytes"], found["recovered"]) == (0, 0, 2)

    wait_until(is_forgotten, "it keeps nothing", timeout_s=LONG_S)
