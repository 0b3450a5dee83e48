"""Two mounts that absorb writes for the same paths of one source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import LEASES, MonarchCommand, Tree
from tests.mount.command import wait_until
from tests.mount.observe import account

pytestmark = pytest.mark.modes("relay")

ABSORB = ["write=absorb"]


@pytest.mark.finding("W8")
@pytest.mark.promise(167, 168)
@pytest.mark.fault("N1", "N2")
def test_the_second_writer_is_refused_or_both_are_warned(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"a": 10})
    first = monarch.mount(source, tiers={"fast": "16MiB"}, options=ABSORB)
    assert LEASES not in os.listdir(first.path)
    monarch.expects_log("is written through another mount")
    monarch.allows_log("the same paths are written through another mount")
    second = monarch.mount
    at, two = tmp_path / "second", {"slow": "16MiB"}
    with pytest.raises(pytest.fail.Exception) as refused:
        second(source, at, tiers=two, state=tmp_path / "state2", options=ABSORB)
    assert f"is written through another mount: {first.path} on node" in str(refused.value)
    assert "writeback.shared" in str(refused.value)
    # A killed mount blocks no mount on this machine, least of all itself.
    first.kill()
    again = second(source, at, tiers=two, state=tmp_path / "state2", options=ABSORB)
    with pytest.raises(pytest.fail.Exception):
        monarch.mount(source, tiers={"fast": "16MiB"}, options=ABSORB)
    shared = [*ABSORB, "writeback.shared=true"]
    first = monarch.mount(source, tiers={"fast": "16MiB"}, options=shared)
    (problem,) = account(first)["health"]["problems"]
    assert problem["kind"] == "other-writer" and str(at) in problem["what"]
    again.umount()
    first.umount()
    assert os.listdir(source / LEASES) == []


@pytest.mark.promise(167)
@pytest.mark.fault("N4")
def test_health_says_that_the_source_takes_no_lease(monarch: MonarchCommand, tree: Tree) -> None:
    source = tree({"a": 10})
    os.mkfifo(source / LEASES)
    monarch.expects_log("no lease can be put there")
    mounted = monarch.mount(source, tiers={"fast": "16MiB"}, options=ABSORB)
    (problem,) = account(mounted)["health"]["problems"]
    assert problem["kind"] == "no-lease" and LEASES in problem["remedy"]
    mounted.umount()
    assert (source / LEASES).is_fifo()


@pytest.mark.finding("W8")
@pytest.mark.promise(148)
@pytest.mark.fault("N5")
def test_each_of_two_mounts_shows_what_the_other_has_made_and_removed(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"ckpt/old": 10, "data/a": 10})
    shared = ["absorb=ckpt/**", "writeback.shared=true"]
    monarch.allows_log("is written through another mount")
    monarch.allows_log("the same paths are written through another mount")
    mounts = [
        monarch.mount(
            source, tmp_path / at, tiers={at: "16MiB"}, state=tmp_path / f"s-{at}", options=shared
        )
        for at in ("one", "two")
    ]
    one, two = (mounted.path / "ckpt" for mounted in mounts)
    # The kernel of each knows that the names are missing, and the listing that there is.
    assert not (two / "tmp/rank1").exists() and not (two / "latest").exists()
    assert os.listdir(two) == ["old"]
    (one / "tmp").mkdir()
    (two / "other").mkdir()
    for rank in range(3):
        (one / "tmp" / f"rank{rank}").write_bytes(b"weights %d" % rank)
    (one / "latest").write_bytes(b"tmp")
    wait_until(lambda: (two / "latest").exists(), "it is not seen", timeout_s=60)
    wait_until(lambda: (two / "tmp/rank2").exists(), "it is not seen", timeout_s=60)
    assert sorted(os.listdir(two)) == ["latest", "old", "other", "tmp"]
    assert (two / "tmp/rank2").read_bytes() == b"weights 2"
    wait_until(lambda: "other" in os.listdir(one), "it is not seen", timeout_s=60)
    # As rank 0 of a job commits what all have written.
    (one / "tmp").rename(one / "step")
    (one / "old").unlink()
    wait_until(lambda: not (two / "old").exists(), "it is still there", timeout_s=60)
    wait_until(lambda: (two / "step/rank0").exists(), "it is not seen", timeout_s=60)
    wait_until(lambda: not (two / "tmp").exists(), "it is still there", timeout_s=60)
    assert sorted(os.listdir(two)) == ["latest", "other", "step"]
    assert (two / "step/rank1").read_bytes() == b"weights 1"
    # A person at the source as well.
    (source / "ckpt/latest").unlink()
    (source / "ckpt/note").write_bytes(b"by hand")
    for at in (one, two):
        wait_until(lambda at=at: (at / "note").exists(), "it is not seen", timeout_s=60)
        wait_until(lambda at=at: not (at / "latest").exists(), "it is still there", timeout_s=60)
