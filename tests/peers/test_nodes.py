"""Several daemons share one data set: it is read once, and a fault costs only reads."""

from __future__ import annotations

import math
import os
import signal
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tree, contents, require_fuse
from tests.equipment import hosts
from tests.equipment.hosts import Hosts
from tests.equipment.processes import is_running
from tests.equipment.waiting import wait_until
from tests.mount.observe import as_a_disk_does, copies, resident
from tests.peers.lab import Lab, free_port, host, lab

CONTENT = {f"d{n % 4}/f{n:03}": contents(f"f{n}", 500 + 41 * n) for n in range(60)}


def owners(made: Lab) -> dict[str, int]:
    """The node that has the copy of each file; no file has two."""
    found: dict[str, int] = {}
    for number, node in made.nodes.items():
        for name in resident(node, CONTENT):
            assert name not in found, f"{name} has two copies"
            found[name] = number
    return found


def assert_fair(counts: list[int], *, replicas: int = 1) -> None:
    """Each node has its part of the files, but for chance: binomial. The owners follow from the
    inode numbers, which differ from run to run, so the limit is 5 sigma."""
    assert sum(counts) == replicas * len(CONTENT)
    part = replicas / len(counts)
    sigma = math.sqrt(len(CONTENT) * part * (1 - part))
    assert all(abs(count - len(CONTENT) * part) < 5 * sigma for count in counts), counts


@pytest.fixture
def network() -> Iterator[Hosts | None]:
    """Four hosts; None where there can be none: then the nodes are addresses of the loopback."""
    require_fuse()
    if hosts.unavailable():
        yield None
        return
    with Hosts(4) as made:
        yield made


@pytest.mark.promise(271, 274)
def test_four_nodes_read_each_file_once_and_a_dead_node_costs_only_its_files(
    tmp_path: Path, tree: Tree, network: Hosts | None
) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 4, network) as made:
        for number in (1, 2, 3, 4):
            made.mount(number)
        made.read_all(CONTENT)
        assert made.opens_at_the_source() == len(CONTENT)
        kept = owners(made)
        assert len(kept) == len(CONTENT), "each file has one copy in the job"
        reports = made.reports()
        assert_fair([report["tiers"][0]["files"] for report in reports.values()])
        assert set(kept.values()) == {1, 2, 3, 4}
        first = {number: report["peers"]["files"] for number, report in reports.items()}
        made.read_all(CONTENT)
        made.read_all(CONTENT)
        assert made.opens_at_the_source() == len(CONTENT), "later epochs need no source"
        for number, report in made.reports().items():
            others = sum(owner != number for owner in kept.values())
            peers = report["peers"]
            assert peers["files"] - first[number] == 2 * others
            assert peers["failures"] == {}
            assert peers["bytes"] >= peers["files"] * 500
        # A node dies, and its nginx with it.
        engine = made.engine(4)
        assert engine is not None
        made.nodes[4].kill()
        wait_until(lambda: not is_running(engine), "the engine has ended with its daemon")
        before = made.opens_at_the_source()
        lost = [name for name, owner in kept.items() if owner == 4]
        made.read_all(CONTENT, (1, 2, 3))
        assert made.opens_at_the_source() == before + len(lost), "the lost files, once each"
        made.read_all(CONTENT, (1, 2, 3))
        assert made.opens_at_the_source() == before + len(lost)
        assert all(made.state_of(number, 4) == "unreachable" for number in (1, 2, 3))
        for report in made.reports().values():
            (problem,) = report["health"]["problems"]
            assert problem["kind"] == "peers-out"
            assert problem["what"].endswith(f"copies: {made.address(4)} (unreachable)")


@pytest.mark.promise(352)
def test_a_node_that_answers_again_is_shown_so_without_a_read(tmp_path: Path, tree: Tree) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 2) as made:
        made.mount(1)
        made.mount(2)
        made.nodes[2].kill()
        made.read_all(CONTENT, (1,))
        assert made.peers(1)["out"] == 1 and made.state_of(1, 2) == "unreachable"
        made.mount_again(2)
        wait_until(lambda: made.peers(1)["out"] == 0, "it is shown as back", timeout_s=120)
        assert made.state_of(1, 2) == "answers"
        assert made.reports()[1]["health"]["problems"] == []


@pytest.mark.promise(270, 274)
def test_a_damaged_copy_and_a_killed_engine_give_no_wrong_byte_and_no_error(
    tmp_path: Path, tree: Tree
) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 2) as made:
        first, second = made.mount(1), made.mount(2)
        made.read_all(CONTENT)
        made.read_all(CONTENT)
        made.reports()
        name = next(name for name, owner in owners(made).items() if owner == 2)
        (copy,) = (
            path for path in copies(second)["fast"].values() if path.read_bytes() == CONTENT[name]
        )
        with as_a_disk_does(copy):
            damaged = bytearray(CONTENT[name])
            damaged[7] ^= 1
            copy.write_bytes(damaged)
        made.commands[0].expects_log("gave other bytes of inode")
        made.read_all(CONTENT, [1])
        assert made.peers(1)["failures"] == {"damaged": 1}
        # The engine of the second node dies and is started again.
        made.commands[1].expects_log("nginx, which serves copies to the other nodes, ended")
        engine, starts = made.engine(2), made.peers(2)["starts"]
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        made.read_all(CONTENT, [1])
        wait_until(
            lambda: made.peers(2)["starts"] > starts and made.peers(2)["address"] != "",
            "it is started again",
        )
        made.read_all(CONTENT, [1])
        assert first.pid != second.pid


@pytest.mark.promise(270, 274)
def test_a_node_behind_a_slow_link_costs_no_byte_and_is_named_so(
    tmp_path: Path, tree: Tree, network: Hosts | None
) -> None:
    if network is None:
        pytest.skip("there are no network namespaces")
    content = {f"f{n:02}": contents(f"f{n}", 1_200_000 + 41 * n) for n in range(16)}
    tree(content)
    with lab(tmp_path, tmp_path / "source", 3, network) as made:
        for number in (1, 2, 3):
            made.mount(number, "peers.patience=1", tier="30MiB")
        made.read_all(content)
        # 0.5 MB/s: a MiB takes longer than the second that it may.
        network.limit(4, 3)

        def seen_by(number: int) -> dict[str, Any]:
            (found,) = (p for p in made.peers(number)["peers"] if p["name"] == made.address(3))
            return dict(found)

        def is_named(number: int) -> bool:
            before = seen_by(number)
            made.read_all(content, (number,))
            after = seen_by(number)
            was_asked = any(before[key] != after[key] for key in ("files", "failed"))
            # Bytes of earlier answers in the queue of the link can hold up a new connection.
            return not was_asked or after["state"] in ("slow", "unreachable")

        for number in (1, 2):
            wait_until(partial(is_named, number), "it is slow", timeout_s=120)


@pytest.mark.promise(270)
def test_files_that_were_changed_at_the_source_are_no_failures_of_their_owner(
    tmp_path: Path, tree: Tree
) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 2) as made:
        for number in (1, 2):
            made.mount(number)
            made.commands[-1].allows_log("changed at the source since the snapshot")
        # The first node knows the digests then.
        made.read_all(CONTENT)
        made.reports()
        kept = sorted(name for name, owner in owners(made).items() if owner == 2)
        # The first three have their sizes, the others have more bytes.
        changed = {
            name: contents(f"changed {name}", len(CONTENT[name]) + n // 3)
            for n, name in enumerate(kept[:6])
        }
        tree(changed)
        made.commands[1]("evict", str(made.nodes[2].path))
        made.read_all(changed, (2,))
        wait_until(lambda: len(resident(made.nodes[2], changed)) == 6, "the owner has copies")
        made.read_all(changed, (1,))
        assert made.peers(1)["failures"] == {}
        assert made.state_of(1, 2) == "answers"


@pytest.mark.promise(27, 28)
def test_each_node_compares_the_files_that_others_have_given_it_with_the_source(
    tmp_path: Path, tree: Tree
) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 2) as made:
        for number in (1, 2):
            made.mount(number, "snapshot.freshness=ttl:1s")
            made.commands[-1].allows_log("changed at the source since the snapshot")
        made.read_all(CONTENT)
        made.reports()
        name = next(name for name, owner in owners(made).items() if owner == 2)
        (made.source / name).chmod(0o640)
        # Not opened there: it would be by chance whether its owner has a copy again.
        shown = made.nodes[1].path / name
        wait_until(lambda: stat.S_IMODE(shown.stat().st_mode) == 0o640, "it has the new mode")


@pytest.mark.promise(272, 275)
def test_nodes_with_another_snapshot_or_another_secret_share_nothing(
    tmp_path: Path, tree: Tree
) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 3) as made:
        port = f"peers.port={free_port()}"
        made.mount(1, port)
        made.mount(2, port, secret=made.write_secret("other"))
        tree({"added": b"a file that the first node does not know"})
        made.mount(3, port)
        made.read_all(CONTENT)
        assert made.opens_at_the_source() == 3 * len(CONTENT)
        assert all(report["peers"]["files"] == 0 for report in made.reports().values())
        assert made.state_of(1, 2) == made.state_of(2, 3) == "wrong-secret"
        assert made.state_of(1, 3) == made.state_of(3, 1) == "other-set"
        text = made.commands[0]("status", str(made.nodes[1].path)).stdout
        assert f"{host(3)}: other-set" in text
        secret = made.secret.read_text()
        for number, node in made.nodes.items():
            assert secret not in node.log_text, number


@pytest.mark.promise(277)
def test_with_two_replicas_a_dead_node_costs_no_read_of_the_source(
    tmp_path: Path, tree: Tree
) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 3) as made:
        for number in (1, 2, 3):
            made.mount(number, "peers.replicate=2")
        made.read_all(CONTENT)
        assert made.opens_at_the_source() == len(CONTENT)
        assert_fair([r["tiers"][0]["files"] for r in made.reports().values()], replicas=2)
        kept = [set(resident(node, CONTENT)) for node in made.nodes.values()]
        assert sum(map(len, kept)) == 2 * len(CONTENT)
        engine = made.engine(3)
        assert engine is not None
        made.nodes[3].kill()
        # Until then it gives answers without the daemon.
        wait_until(lambda: not is_running(engine), "the engine has ended with its daemon")
        before = made.opens_at_the_source()
        made.read_all(CONTENT, (1, 2))
        assert made.opens_at_the_source() == before


@pytest.mark.promise(276)
def test_one_node_alone_opens_no_port(tmp_path: Path, tree: Tree) -> None:
    tree(CONTENT)
    with lab(tmp_path, tmp_path / "source", 1) as made:
        node = made.mount(1)
        made.read_all(CONTENT)
        assert made.reports()[1]["peers"] is None
        assert not (node.state / "peers").exists()
