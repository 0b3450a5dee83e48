"""Mounts over the state of earlier mounts: no written file is hidden, dropped or stuck."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, names_in
from tests.mount.command import needs_root
from tests.mount.observe import account, wait_until

pytestmark = pytest.mark.modes("relay")

TIERS = {"fast": "32MiB"}
ABSORB = ["write=absorb", "writeback.end_timeout=1s"]


def drained(mounted: Mounted) -> None:
    mounted.cli("ckpt", "wait", str(mounted.path), "--timeout", "60s")


def reported_undrained(mounted: Mounted) -> list[str]:
    problems = account(mounted)["health"]["problems"]
    return [problem["what"] for problem in problems if problem["kind"] == "snapshot-behind"]


@pytest.fixture
def closable(tree: Tree, tmp_path: Path) -> Iterator[Path]:
    """A source on a bind mount, which ``closed`` makes read-only."""
    made = tree({"a": 10, "run/old": 10})
    place = tmp_path / "bound"
    place.mkdir()
    subprocess.run(["mount", "--bind", str(made), str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def closed(place: Path, way: str = "ro") -> None:
    subprocess.run(["mount", "-o", f"remount,bind,{way}", str(place)], check=True)


@pytest.mark.finding("W1", "S1")
@pytest.mark.promise(67)
@pytest.mark.parametrize("ends", ["clean", "killed"])
def test_a_file_that_came_and_went_keeps_no_mount_from_coming_up(
    monarch: MonarchCommand, tree: Tree, ends: str
) -> None:
    source = tree({"a": 10})
    options = [*ABSORB, "snapshot.freshness=never"]

    def end(mounted: Mounted) -> None:
        if ends == "killed":
            mounted.kill()
        else:
            mounted.umount()

    mounted = monarch.mount(source, tiers=TIERS, options=ABSORB)
    (mounted.path / "t").write_bytes(b"x")
    (mounted.path / "t").unlink()
    end(mounted)
    # The source has not changed.
    mounted = monarch.mount(source, tiers=TIERS, options=ABSORB)
    assert names_in(mounted.path) == ["a"]
    (mounted.path / "one").write_bytes(b"1")
    (mounted.path / "two").write_bytes(b"2")
    (mounted.path / "two").rename(mounted.path / "one")
    end(mounted)
    for more in (options, ABSORB):
        again = monarch.mount(source, tiers=TIERS, options=more)
        assert names_in(again.path) == ["a", "one"]
        assert (again.path / "one").read_bytes() == b"2"
        drained(again)
        again.umount()
    assert names_in(source) == ["a", "one"] and (source / "one").read_bytes() == b"2"


@pytest.mark.finding("W2", "S2")
@needs_root
@pytest.mark.promise(178)
@pytest.mark.parametrize("what", ["written", "drained", "state lost"])
def test_nothing_is_drained_into_the_mount_point_of_a_source_that_is_not_mounted(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path, what: str
) -> None:
    monarch.expects_log("is another directory|is empty")
    monarch.allows_log("changed at the source since the snapshot|the snapshot is gone")
    source = tree({"a": 10, "run/old": 10})
    # The drain may write 8 MiB before it is held to its bandwidth.
    content = b"n" * (1_000_000 if what == "drained" else 10_000_000)
    options = [*ABSORB, "writeback.bandwidth=100KiB"]
    mounted = monarch.mount(source, tiers=TIERS, options=options)
    (mounted.path / "run/new").write_bytes(content)
    if what == "drained":
        drained(mounted)
    mounted.cli("umount", "--abandon", str(mounted.path))
    if what == "state lost":
        shutil.rmtree(mounted.state)
    source.rename(tmp_path / "elsewhere")
    source.mkdir()
    command = ["mount", str(source), str(mounted.path), "--state", str(mounted.state)]
    command += ["--tier", f"{mounted.tiers['fast']}:32MiB", "-o", "write=absorb"]
    for left in ([], ["README"]) if what == "written" else ([],):
        for name in left:
            (source / name).touch()
        refused = monarch(*command, check=False)
        assert (refused.returncode, "mount its file system" in refused.stderr) == (4, True)
        assert {*names_in(source)} <= {*left, ".monarch-leases.part"}
    shutil.rmtree(source)
    (tmp_path / "elsewhere").rename(source)
    again = monarch.mount(source, tiers=TIERS, options=ABSORB)
    drained(again)
    assert (source / "run/new").read_bytes() == content
    again.umount()


@pytest.mark.promise(128)
@pytest.mark.parametrize("more", [[], ["--refresh"]], ids=["as it is", "refresh"])
def test_a_directory_renamed_before_the_kill_is_shown_and_drained(
    monarch: MonarchCommand, closable: Path, more: list[str]
) -> None:
    monarch.allows_log("draining to the source has stopped|the names are those of|EROFS")
    monarch.allows_log("no lease can be put there|the lease was gone")
    mounted = monarch.mount(closable, tiers=TIERS, options=ABSORB)
    at = mounted.path / "run"
    (at / "tmp-100").mkdir()
    (at / "tmp-100/shard").write_bytes(b"shard")
    drained(mounted)
    closed(closable)
    (at / "tmp-100").rename(at / "step-100")
    with (at / "step-100/COMMIT").open("wb") as file:
        file.write(b"done")
        file.flush()
        os.fsync(file.fileno())
    mounted.kill()
    closed(closable, "rw")
    again = monarch.mount(closable, tiers=TIERS, options=ABSORB, arguments=more)
    shown = again.path / "run/step-100"
    assert sorted(os.listdir(again.path / "run")) == ["old", "step-100"]
    assert {p.name: p.read_bytes() for p in shown.iterdir()} == {
        "COMMIT": b"done",
        "shard": b"shard",
    }
    drained(again)
    assert (closable / "run/step-100/COMMIT").read_bytes() == b"done"
    behind = reported_undrained(again)
    assert ["the source now has all changes" in what for what in behind] == [True] * len(more)
    assert not (closable / "run/tmp-100").exists()
    again.umount()


@pytest.mark.finding("W2")
@needs_root
@pytest.mark.promise(129)
@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_files_written_into_a_directory_that_others_removed_are_drained(
    monarch: MonarchCommand, closable: Path, how: str
) -> None:
    monarch.allows_log(
        "draining to the source has stopped|was removed by others|EROFS|changed at the source"
    )
    monarch.allows_log("no lease can be put there|the lease was gone")
    mounted = monarch.mount(closable, tiers=TIERS, options=ABSORB)
    closed(closable)
    with (mounted.path / "run/ckpt").open("wb") as file:
        file.write(b"weights")
        file.flush()
        os.fsync(file.fileno())
    mounted.kill()
    closed(closable, "rw")
    if how == "renamed":
        (closable / "run").rename(closable / "run-old")
    else:
        (closable / "run/old").unlink()
        (closable / "run").rmdir()
    again = monarch.mount(closable, tiers=TIERS, options=ABSORB)
    assert (again.path / "run/ckpt").read_bytes() == b"weights"
    drained(again)
    wait_until((closable / "run/ckpt").exists, "it is not at the source")
    assert (closable / "run/ckpt").read_bytes() == b"weights"
    again.umount()
    last = monarch.mount(closable, tiers=TIERS, options=ABSORB)
    assert (last.path / "run/ckpt").read_bytes() == b"weights"
    last.umount()


@pytest.mark.promise(128)
def test_a_directory_that_a_mount_has_removed_makes_no_snapshot_stale(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = tree({"a": 10, "d/e": 10})
    (source / "d/e").unlink()
    more = ["--snapshot", str(tmp_path / "given.snapshot")]
    mounted = monarch.mount(source, tiers=TIERS, options=ABSORB, arguments=more)
    (mounted.path / "d").rmdir()
    drained(mounted)
    mounted.umount()
    assert not (source / "d").exists()
    again = monarch.mount(source, tiers=TIERS, options=ABSORB, arguments=more)
    wait_until(lambda: account(again)["snapshot"]["stale"] is not None, "it looks")
    assert account(again)["snapshot"]["stale"] is False
    assert not account(again)["health"]["problems"]
