"""Quotas of jobs through a mount: two users, each within one file of its quota."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from monarch.cli.plan_file import GrantReport, PlanReport
from monarch.control.client import call
from monarch.errors import MonarchError
from tests.conftest import MODES, MonarchCommand, Tree, contents
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, needs_root, registered
from tests.mount.observe import account, settled
from tests.mount.test_hints import ALICE, Process
from tests.mount.test_permissions import as_another_user

pytestmark = [needs_fuse, needs_root]

SIZE, CAPACITY = 4096, 1 << 16
FILES = {f"{number:03}": contents(str(number), SIZE) for number in range(60)}
THEIRS = list(FILES)[:30]


@pytest.mark.promise(298, 321)
@pytest.mark.modes("relay", "passthrough", "python")
def test_users_stay_within_their_quotas_and_give_them_back(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    file = tmp_path / "monarch.yaml"
    file.write_text(
        f"""\
mounts:
  data:
    source: {tree(FILES)}
    mountpoint: {tmp_path}/mnt
    state: {tmp_path}/state
    tiers: [{{path: {tmp_path}/tier, capacity: {CAPACITY}}}]
    quotas: [{{user: "{ALICE}", tier: 30%}}, {{tier: 70%}}]
    allow_other: true
"""
    )
    (tmp_path / "mnt").mkdir()
    tiers = {"tier": tmp_path / "tier"}
    mounted = registered(monarch, tmp_path / "mnt", tmp_path / "source", tmp_path / "state", tiers)
    monarch("mount", "-c", str(file), "data", "-o", ",".join(MODES[monarch.mode]))
    mounted.pid = int(mounted.status()["pid"])

    def quotas() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = account(mounted)["quotas"]
        return found

    def work(fd: int) -> str:
        for again in range(2):
            for name in THEIRS:
                opened = os.open(name, os.O_RDONLY, dir_fd=fd)
                assert os.read(opened, 2 * SIZE) == FILES[name]
                os.close(opened)
            if not again:
                # Another session is the same job.
                os.setsid()
        return "read"

    process = Process(mounted, work)
    try:
        assert process.said == "read"
        for name in FILES:
            if name not in THEIRS:
                assert (mounted.path / name).read_bytes() == FILES[name]
        settled(mounted)
        for quota, share in zip(quotas(), (0.3, 0.7), strict=True):
            assert CAPACITY * share - SIZE < quota["charged"] <= quota["tier"] <= CAPACITY * share
        held = sum(mounted.xattr(name) == "tier" for name in THEIRS)
        assert held * SIZE == quotas()[0]["charged"]
        assert account(mounted)["residency"]["bytes"] == sum(q["charged"] for q in quotas())
    finally:
        process.end()
    wait_until(lambda: quotas()[0]["charged"] == 0, "the user has no process any more")
    assert quotas()[1]["charged"] > 0
    # The plan of an administrator changes the quota of the user in the mount.
    plan = tmp_path / "plan.json"
    limit = 5e6
    grant = GrantReport(
        *("a", {"n1": 1}, 1, {"n1": 2 * SIZE}, 1.0, 1.0, 1.0, 0.0, limit, "--gpus=1", {})
    )
    plan.write_text(json.dumps(PlanReport(1, "tune", 1, 1, [grant], [], 1.0, 1.0).to_dict()))
    apply = ("plan", "apply", str(plan), "--mount", str(mounted.path), "--node", "n1")
    apply += ("--job", f"a=user:{ALICE}")
    settled(mounted)
    before = quotas()
    # The user itself cannot, not even where the socket of the daemon is open to all by mistake.
    mounted.state.chmod(0o711)
    (mounted.state / "control.sock").chmod(0o666)
    monarch.expects_log(f"refused user {ALICE}")

    def raise_its_own() -> None:
        wanted = {"user": str(ALICE), "tier": "100%", "source_bandwidth": 0}
        with pytest.raises(MonarchError, match="only the mount's user may ask"):
            call(Path("state/control.sock"), "quotas", {"quotas": [wanted]})

    assert as_another_user(tmp_path, {"raise": raise_its_own}, uid=ALICE) == {"raise": "done"}
    assert quotas() == before
    assert "would set in" in monarch(*apply, "--dry-run").stdout and quotas() == before
    monarch(*apply)
    assert [(each["tier"], each["source_limit"]) for each in quotas()] == [
        (2 * SIZE, int(limit)),
        (before[1]["tier"], 0),
    ]


def test_a_user_without_a_quota_takes_the_whole_tier(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    mounted = monarch.mount(tree(FILES), tiers={"fast": str(CAPACITY)}, options=["allow_other"])

    def work(fd: int) -> str:
        for name in FILES:
            opened = os.open(name, os.O_RDONLY, dir_fd=fd)
            assert os.read(opened, 2 * SIZE) == FILES[name]
            os.close(opened)
        return "read"

    process = Process(mounted, work)
    try:
        assert process.said == "read"
        settled(mounted)
        assert account(mounted)["residency"]["bytes"] > CAPACITY - SIZE
    finally:
        process.end()


@pytest.mark.promise(299)
@pytest.mark.modes("relay", "passthrough", "python")
def test_a_user_reads_the_source_at_its_rate(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Without --soak only the lower bound: a busy machine reads later, and never earlier."""
    rate, seconds = 20_000_000, 3
    file = tmp_path / "monarch.yaml"
    file.write_text(
        f"""\
mounts:
  data:
    source: {tree({"large": b""})}
    mountpoint: {tmp_path}/mnt
    state: {tmp_path}/state
    tiers: [{{path: {tmp_path}/tier, capacity: {CAPACITY}}}]
    quotas: [{{user: "{ALICE}", tier: 5%, source_bandwidth: {rate}}}, {{tier: 70%}}]
    allow_other: true
"""
    )
    os.truncate(tmp_path / "source" / "large", rate * seconds)
    (tmp_path / "mnt").mkdir()
    tiers = {"tier": tmp_path / "tier"}
    mounted = registered(monarch, tmp_path / "mnt", tmp_path / "source", tmp_path / "state", tiers)
    monarch("mount", "-c", str(file), "data", "-o", ",".join(MODES[monarch.mode]))
    mounted.pid = int(mounted.status()["pid"])

    def work(fd: int) -> float:
        opened = os.open("large", os.O_RDONLY, dir_fd=fd)
        begin = time.monotonic()
        while os.read(opened, 1 << 20):
            pass
        return time.monotonic() - begin

    process = Process(mounted, work)
    try:
        assert process.said >= 0.9 * seconds
        if pytestconfig.getoption("--soak"):
            assert process.said <= 1.1 * seconds
        assert account(mounted)["quotas"][0]["source_bytes"] == rate * seconds
    finally:
        process.end()
