"""Rules for paths in a mount: what is pinned, never copied, or in one tier only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.inotify import OpenCounter
from tests.equipment.waiting import wait_until
from tests.mount.command import needs_fuse, not_mounted, one_line, registered
from tests.mount.observe import account, epoch, resident, settled

# How reads are served has nothing to do with it.
pytestmark = [needs_fuse, pytest.mark.modes("auto")]

KiB = 1024
SIZE = 8 * KiB

Configured = Callable[..., Path]


def small(directory: str, count: int = 20) -> dict[str, bytes]:
    names = [f"{directory}/{number:02}" for number in range(count)]
    return {name: contents(name, SIZE) for name in names}


TRAIN, VAL, RAW = small("train", 40), small("val"), small("raw")
LMDB = {"data.lmdb": contents("lmdb", 3 * SIZE)}


@pytest.fixture
def configured(tmp_path: Path, source: Path) -> Configured:
    def write(rules: str, *, ram: int, more: str = "") -> Path:
        path = tmp_path / "monarch.yaml"
        path.write_text(
            f"""\
mounts:
  data:
    source: {source}
    mountpoint: {tmp_path}/mnt
    state: {tmp_path}/state
    tiers:
      - {{path: {tmp_path}/ram, name: ram, capacity: {ram}}}
      - {{path: {tmp_path}/nvme, name: nvme, capacity: {64 * KiB}}}
    limits: {{inline_max: 16KiB}}
    rules: {rules}
    {more}
"""
        )
        (tmp_path / "mnt").mkdir(exist_ok=True)
        return path

    return write


def mounted(monarch: MonarchCommand, file: Path) -> Mounted:
    at = file.parent
    tiers = {name: at / name for name in ("ram", "nvme")}
    made = registered(monarch, at / "mnt", at / "source", at / "state", tiers)
    monarch("mount", "-c", str(file), "data")
    made.pid = int(made.status()["pid"])
    return made


@pytest.mark.promise(190, 191, 192)
def test_rules_pin_exclude_and_direct_files_and_status_shows_it(
    monarch: MonarchCommand, tree: Tree, configured: Configured
) -> None:
    tree({**TRAIN, **VAL, **RAW, **LMDB})
    made = mounted(monarch, configured("[]", ram=30 * SIZE))
    # The tiers are full of other files before there are rules.
    epoch(made, {**RAW, **TRAIN})
    settled(made)
    assert resident(made, RAW)
    made.umount()

    rules = (
        "[{match: val, pin: true}, {match: 'raw/**', admit: never}, {match: '*.lmdb', tier: nvme}]"
    )
    made = mounted(monarch, configured(rules, ram=30 * SIZE))
    with OpenCounter(made.source) as counter:
        wait_until(lambda: len(resident(made, VAL)) == 20, "the pinned files are fetched")
        wait_until(lambda: not resident(made, RAW), "the copies of excluded files are removed")
        before = counter.count()
        epoch(made, VAL)
        assert counter.count() == before, "no pinned file is read from the source"
    for _ in range(2):
        epoch(made, {**RAW, **LMDB, **TRAIN})
        report = settled(made)
    assert resident(made, RAW) == {}
    assert len(resident(made, VAL)) == 20
    assert resident(made, LMDB) in ({}, {"data.lmdb": "nvme"})
    assert monarch("warm", "--wait", str(made.path / "raw"), check=False).returncode != 0
    assert resident(made, RAW) == {}
    shown = {rule["match"]: rule for rule in report["rules"]}
    assert [shown[name]["files"] for name in ("val", "raw/**", "*.lmdb")] == [20, 20, 1]
    assert [shown[name]["resident_files"] for name in ("val", "raw/**")] == [20, 0]
    assert shown["val"]["resident_bytes"] == 20 * SIZE
    assert shown["*.lmdb"]["action"] == "tier: nvme"
    assert (
        json.loads(monarch("status", "--json", str(made.path)).stdout)["rules"] == report["rules"]
    )
    screen = monarch("status", str(made.path)).stdout
    assert "val: pin: true; 20 files, 160 KiB, in the snapshot; 20, 160 KiB, have copies" in screen
    assert report["health"]["state"] == "ok"


@pytest.mark.promise(191)
def test_pinned_files_that_do_not_fit_are_one_problem(
    monarch: MonarchCommand, tree: Tree, configured: Configured
) -> None:
    monarch.expects_log("is gone from the source")
    tree({**TRAIN, **VAL})
    made = mounted(monarch, configured("[{match: val, pin: true, tier: ram}]", ram=15 * SIZE))

    def problems() -> dict[str, dict[str, str]]:
        return {problem["kind"]: problem for problem in account(made)["health"]["problems"]}

    wait_until(lambda: len(resident(made, VAL)) == 15, "as many as fit are fetched")
    problem = problems()["pins-too-large"]
    assert "40 KiB of pinned files do not fit" in problem["what"]
    assert "pin fewer files" in problem["remedy"]
    kept = {name: VAL[name] for name in resident(made, VAL)}
    for name in set(VAL) - set(kept):
        (made.source / name).unlink()
        with pytest.raises(OSError):
            (made.path / name).read_bytes()
    wait_until(lambda: "pins-too-large" not in problems(), "the removed files need no room")
    epoch(made, kept)


def test_rules_that_are_wrong_are_refused_in_one_line(
    monarch: MonarchCommand, tree: Tree, configured: Configured
) -> None:
    tree(VAL)
    file = configured("[{match: val, tier: tape}]", ram=SIZE)
    done = not_mounted(monarch, file.parent / "mnt", "mount", "-c", str(file), "data")
    assert (done.returncode, "[0] names no tier of the mount: 'tape'" in one_line(done)) == (
        2,
        True,
    )
    option = "placement.rules=[{match: val, pin: true}]"
    file = configured("[]", ram=SIZE)
    done = not_mounted(monarch, file.parent / "mnt", "mount", "-c", str(file), "data", "-o", option)
    assert (done.returncode, "rules are written in a configuration file" in one_line(done)) == (
        2,
        True,
    )
