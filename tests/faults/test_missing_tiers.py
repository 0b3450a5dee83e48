"""The tier with undrained changes, or its disk, is missing at the next mount."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.checks.preflight import Check
from monarch.checks.preflight_writes import check_writing
from monarch.config.settings import MountSettings, TierSettings
from tests.conftest import MonarchCommand, Mounted, Tree, names_in
from tests.equipment import disks
from tests.equipment.slowfs import SlowSource
from tests.mount.command import needs_fuse, needs_root
from tests.mount.conftest import slow
from tests.mount.observe import account, wait_until

__all__ = ["slow"]

pytestmark = [needs_fuse, pytest.mark.modes("relay")]

TIERS = {"fast": "32MiB"}
OPTIONS = ["write=absorb", "writeback.end_timeout=1s"]


@pytest.fixture
def written(slow: SlowSource, monarch: MonarchCommand, tree: Tree) -> Mounted:
    """A mount with one written file, ``run/ckpt``, which the source has refused so far."""
    monarch.allows_log("the source has stopped|the source refuses|is memory: what is written")
    monarch.allows_log("had .* not at the source, but")
    tree({"a": 10, "run/old": 10})
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    slow.rules("err write EIO .*")
    (mounted.path / "run/ckpt").write_bytes(b"only here")
    wait_until(lambda: "run/ckpt" in names_noted(mounted), "the state directory names the file")
    return mounted


def names_noted(mounted: Mounted) -> list[str]:
    """The files that the source lacks, as the state directory names them."""
    try:
        names = json.loads((mounted.state / "undrained.json").read_bytes())["names"]
    except FileNotFoundError:
        return []
    assert isinstance(names, list)
    return names


def refused(monarch: MonarchCommand, mounted: Mounted, tier: Path) -> str:
    """The error of a mount that must be refused."""
    command = ["mount", str(mounted.source), str(mounted.path), "--state", str(mounted.state)]
    result = monarch(*command, "--tier", f"{tier}:32MiB", "-o", ",".join(OPTIONS), check=False)
    assert result.returncode == 6, result
    return result.stderr


def checked(mounted: Mounted, tier: Path) -> list[Check]:
    """The results of ``monarch doctor`` for a writable mount."""
    settings = MountSettings(
        name="m",
        source=mounted.source,
        mountpoint=mounted.path,
        state=mounted.state,
        tiers=(TierSettings(name="fast", path=tier),),
        absorb=("run/**",),
    )
    return list(check_writing(settings, []))


def problems(mounted: Mounted) -> dict[str, Any]:
    return {problem["kind"]: problem for problem in account(mounted)["health"]["problems"]}


def lost(mounted: Mounted, *arguments: str, code: int) -> list[str]:
    command = ("ckpt", "lost", str(mounted.path), "--json", *arguments)
    result = mounted.cli(*command, check=False)
    assert result.returncode == code, result
    files = json.loads(result.stdout)["files"]
    assert isinstance(files, list)
    return files


@pytest.mark.fault("T18")
@pytest.mark.promise(179)
@pytest.mark.parametrize("ends", ["killed", "abandoned"])
def test_the_empty_mount_point_of_the_tier_is_not_taken_for_the_tier(
    written: Mounted, slow: SlowSource, monarch: MonarchCommand, tmp_path: Path, ends: str
) -> None:
    if ends == "killed":
        written.kill()
    else:
        written.cli("umount", "--abandon", str(written.path))
    slow.rules()
    tier = written.tiers["fast"]
    tier.rename(tmp_path / "disk")
    tier.mkdir()
    said = refused(monarch, written, tier)
    assert "1 change" in said or "2 changes" in said
    assert "no journal is in" in said and str(tier) in said and "mount the disk" in said
    (missing,) = (check for check in checked(written, tier) if check.status == "fail")
    assert "no journal is in" in missing.detail and str(written.state) in missing.advice
    # A tier that the mount does not name any more is missed, too.
    assert "no journal is in" in refused(monarch, written, tmp_path / "other")
    # A call that hung in the source may have staged a file when it ended.
    published = [name for name in names_in(slow.root / "run") if not name.endswith(".part")]
    assert names_in(tier) == [] and published == ["old"]
    tier.rmdir()
    (tmp_path / "disk").rename(tier)
    again = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    assert (again.path / "run/ckpt").read_bytes() == b"only here"
    again.umount()
    assert (slow.root / "run/ckpt").read_bytes() == b"only here"


@pytest.mark.fault("T18")
@pytest.mark.promise(179)
def test_the_journal_of_another_disk_is_not_taken_for_that_of_the_tier(
    written: Mounted, slow: SlowSource, monarch: MonarchCommand, tmp_path: Path
) -> None:
    written.kill()
    slow.rules()
    tier = written.tiers["fast"]
    tier.rename(tmp_path / "disk")
    # Another mount of the same source makes a journal there.
    place = tmp_path / "other"
    monarch.mount(slow.path, place, tiers=TIERS, options=OPTIONS, state=tmp_path / "s").umount()
    assert "another journal is in" in refused(monarch, written, tier)
    # The disk of the tier may be mounted at another path.
    tier.rename(tmp_path / "second")
    (tmp_path / "disk").rename(tier.with_name("elsewhere"))
    again = monarch.mount(slow.path, tiers={"elsewhere": "32MiB"}, options=OPTIONS)
    again.umount()
    assert (slow.root / "run/ckpt").read_bytes() == b"only here"


@pytest.mark.promise(179)
def test_the_changes_of_a_missing_tier_can_be_given_up(
    written: Mounted, slow: SlowSource, monarch: MonarchCommand, tmp_path: Path
) -> None:
    written.kill()
    slow.rules()
    tier = written.tiers["fast"]
    tier.rename(tmp_path / "disk")
    tier.mkdir()
    note = written.state / "undrained.json"
    assert f"removing {note}" in refused(monarch, written, tier)
    note.unlink()
    again = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    assert names_in(again.path / "run") == ["old"]


@pytest.mark.promise(179)
def test_a_tier_that_has_drained_everything_may_be_missing(
    written: Mounted, slow: SlowSource, monarch: MonarchCommand, tmp_path: Path
) -> None:
    slow.rules()
    written.cli("ckpt", "wait", str(written.path), "--timeout", "30s")
    wait_until(lambda: not (written.state / "undrained.json").exists(), "the note is removed")
    written.kill()
    tier = written.tiers["fast"]
    tier.rename(tmp_path / "disk")
    again = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    assert (again.path / "run/ckpt").read_bytes() == b"only here"
    assert "written-lost" not in problems(again)
    (again.path / "run/more").write_bytes(b"more")
    again.umount()
    assert not (written.state / "undrained.json").exists()


@pytest.fixture
def memory(monarch: MonarchCommand) -> Iterator[Path]:
    """The directory of the tier ``fast`` is in memory. Name it before ``written``."""
    with disks.in_memory(monarch.directory / "tiers" / "fast", 64) as place:
        yield place
        monarch.close()


def start_anew(mounted: Mounted) -> None:
    """Makes the note of the state directory one of an earlier start of the machine."""
    note = mounted.state / "undrained.json"
    note.write_text(json.dumps({**json.loads(note.read_bytes()), "boot": "an earlier one"}))


@needs_root
@pytest.mark.fault("T18")
@pytest.mark.promise(179)
def test_files_in_memory_that_a_start_of_the_machine_erased_are_named(
    memory: Path, written: Mounted, slow: SlowSource, monarch: MonarchCommand
) -> None:
    written.kill()
    slow.rules()
    tier = written.tiers["fast"]
    subprocess.run(["umount", "-l", str(memory)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(memory)], check=True)
    # Without a start of the machine another file system may hold the journal.
    assert "no journal is in" in refused(monarch, written, tier)
    start_anew(written)
    monarch.expects_log("lost with the memory of tier")
    (warned,) = (check.detail for check in checked(written, tier) if "lost when" in check.detail)
    assert str(tier) in warned
    again = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    assert "run/ckpt" in problems(again)["written-lost"]["what"]
    assert lost(again, code=1) == ["run/ckpt"]
    assert names_in(again.path / "run") == ["old"]
    again.umount()
    again = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    assert lost(again, "--acknowledge", code=0) == ["run/ckpt"]
    again.umount()
    assert problems(monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)) == {}


@needs_root
@pytest.mark.promise(179)
def test_the_changes_of_a_lost_tier_are_named_by_a_mount_that_cannot_be_written(
    memory: Path, written: Mounted, slow: SlowSource, monarch: MonarchCommand
) -> None:
    written.kill()
    slow.rules()
    subprocess.run(["umount", "-l", str(memory)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(memory)], check=True)
    start_anew(written)
    monarch.expects_log("lost with the memory of tier")
    again = monarch.mount(slow.path, tiers=TIERS)
    assert lost(again, "--acknowledge", code=0) == ["run/ckpt"]
    again.umount()
    assert "written-lost" not in problems(monarch.mount(slow.path, tiers=TIERS))


@pytest.mark.promise(179)
def test_an_earlier_tier_without_undrained_changes_does_not_hide_those_of_another(
    slow: SlowSource, monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.allows_log("the source has stopped|the source refuses|still has data of an earlier")
    tree({"run/old": 10})
    earlier = monarch.mount(slow.path, tiers={"earlier": "32MiB"}, options=OPTIONS)
    (earlier.path / "run/first").write_bytes(b"first")
    earlier.umount()
    mounted = monarch.mount(slow.path, tiers=TIERS, options=OPTIONS)
    slow.rules("err write EIO .*")
    (mounted.path / "run/ckpt").write_bytes(b"only here")
    mounted.cli("umount", "--abandon", str(mounted.path))
    slow.rules()
    again = monarch.mount(slow.path, tiers={"earlier": "32MiB", **TIERS}, options=OPTIONS)
    assert names_in(again.path / "run") == ["ckpt", "first", "old"]
    again.umount()
    assert (slow.root / "run/ckpt").read_bytes() == b"only here"
