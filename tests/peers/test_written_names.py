"""Nodes that write into one directory: what each sees of it, and which snapshot it has later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounted, Tree, contents, require_fuse
from tests.equipment import hosts
from tests.equipment.hosts import Hosts
from tests.equipment.waiting import wait_until
from tests.peers.lab import Lab, lab

CONTENT = {f"f{n:02}": contents(f"f{n}", 500 + 41 * n) for n in range(20)}


@pytest.fixture
def network() -> Iterator[Hosts]:
    require_fuse()
    if reason := hosts.unavailable():
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made


def save(node: Mounted, name: str) -> None:
    """Writes a file that comes to the source."""
    path = node.path / "ckpt" / name
    path.write_bytes(CONTENT["f00"])
    wait_until(lambda: os.getxattr(path, "user.monarch.durable") == b"source", "it is drained")


def states(made: Lab) -> set[str]:
    made.read_all(CONTENT)
    return {made.state_of(1, 2), made.state_of(2, 1)}


@pytest.mark.promise(148, 275)
@pytest.mark.parametrize("freshness", ["mount", "never"])
def test_nodes_see_what_the_others_have_written_and_one_that_comes_back_may_have_another_snapshot(
    tmp_path: Path, tree: Tree, network: Hosts, freshness: str
) -> None:
    tree(CONTENT)
    (tmp_path / "source" / "ckpt").mkdir()
    with lab(tmp_path, tmp_path / "source", 2, network) as made:
        for number in (1, 2):
            made.mount(
                number,
                "absorb=ckpt/**",
                "writeback.shared=true",
                f"snapshot.freshness={freshness}",
            )
            made.commands[-1].allows_log("another mount|other mount")
        assert states(made) == {"answers"}
        for writer, reader in ((1, 2), (2, 1)):
            save(made.nodes[writer], f"of {writer}")
            shown = made.nodes[reader].path / "ckpt" / f"of {writer}"
            wait_until(shown.exists, "it is shown", timeout_s=100.0)
            assert shown.read_bytes() == CONTENT["f00"]
        made.nodes[2].umount()
        made.mount_again(2)
        assert states(made) == {"answers" if freshness == "never" else "other-set"}
        made.nodes[1].umount()
        made.mount_again(1)
        # It has taken over the files of the other one.
        made.commands[0]("evict", str(made.nodes[1].path))
        made.read_all(CONTENT, [1])
        assert made.state_of(1, 2) == "answers"
