"""Two mounts that absorb writes for the same paths of one source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import LEASES, MonarchCommand, Tree
from tests.mount.observe import account

pytestmark = pytest.mark.modes("relay")

ABSORB = ["write=absorb"]


@pytest.mark.promise(167, 168)
@pytest.mark.fault("N1", "N2")
def test_the_second_one_is_refused_or_both_are_told(
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
    # Who is killed keeps nobody of this machine waiting, least of all itself.
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
