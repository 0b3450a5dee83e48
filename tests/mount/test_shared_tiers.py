"""One tier path for several mounts: each keeps its own copies and touches no other files."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest

from monarch.config.defaults import readable_name
from monarch.control.registry import Registry
from tests.conftest import MonarchCommand, Mounted, Tree
from tests.equipment.inotify import OpenCounter
from tests.mount.command import needs_fuse, one_line, wait_until
from tests.mount.observe import account, copies, epoch, resident, settled

pytestmark = needs_fuse


def second_source(directory: Path) -> tuple[Path, dict[str, bytes]]:
    source = directory / "other"
    content = {f"{number}.bin": b"%d" % number * 3000 for number in range(8)}
    source.mkdir()
    for name, data in content.items():
        (source / name).write_bytes(data)
    return source, content


def mount_second(monarch: MonarchCommand, source: Path) -> Mounted:
    directory = monarch.directory
    return monarch.mount(source, directory / "mnt-b", state=directory / "state-b")


@pytest.mark.finding("B3")
@pytest.mark.promise(107)
@pytest.mark.fault("T11")
def test_two_sources_share_a_tier_and_each_keeps_its_copies(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number}.jpg": b"%d" % number * 4000 for number in range(8)}
    tree(content)
    other, others = second_source(monarch.directory)
    first = monarch.mount(source)
    epoch(first, content)
    settled(first)
    first.umount()
    # One after the other ...
    second = mount_second(monarch, other)
    epoch(second, others)
    settled(second)
    # ... and at the same time.
    again = monarch.mount(source)
    for mounted, held, root in ((again, content, source), (second, others, other)):
        assert set(resident(mounted, held)) == set(held)
        with OpenCounter(root) as counter:
            epoch(mounted, held)
            assert counter.count() == 0
        (tier,) = settled(mounted)["tiers"]
        assert (tier["files"], tier["used"]) == (len(held), sum(map(len, held.values())))
    # Each copies on without the other.
    again.cli("evict", str(again.path))
    assert account(again)["residency"]["files"] == 0
    assert set(resident(second, others)) == set(others)
    epoch(again, content)
    settled(again)
    assert len(copies(again)["fast"]) == len(content)
    second.umount()
    again.umount()


@pytest.mark.finding("D5", "B1")
@pytest.mark.promise(108)
@pytest.mark.fault("I5")
@pytest.mark.modes("relay")
def test_the_mode_of_a_tier_s_path_stays_as_it_is(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"a": 100})
    tier = monarch.directory / "tiers/fast"
    tier.mkdir(parents=True)
    for mode in (0o1777, 0o775):
        tier.chmod(mode)
        mounted = monarch.mount(source)
        assert stat.S_IMODE(tier.stat().st_mode) == mode
        assert stat.S_IMODE((tier / "monarch").stat().st_mode) == 0o700
        mounted.umount()
        assert stat.S_IMODE(tier.stat().st_mode) == mode
        os.rename(tier / "monarch", monarch.directory / f"used-{mode:o}")
    # A user may have a directory of that name there.
    own, mnt = tier / "monarch", monarch.directory / "mnt"
    own.mkdir()
    (own / "notes").write_text("mine")
    for mode, code in ((0o755, 0), (0o1777, 6), (0o775, 6)):
        own.chmod(mode)
        done = monarch("mount", str(source), str(mnt), "--tier", f"{tier}:1MiB", check=False)
        assert done.returncode == code, done.stderr
        assert stat.S_IMODE(own.stat().st_mode) == mode
        assert (own / "notes").read_text() == "mine"
        if code == 0:
            monarch("umount", str(mnt))
        else:
            assert f"may be written by other users (mode {mode:04o})" in done.stderr


@pytest.mark.finding("B3")
@pytest.mark.promise(107, 126)
@pytest.mark.fault("T11")
@pytest.mark.modes("relay")
def test_copies_of_a_source_that_is_not_mounted_are_shown_and_dropped(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number}.jpg": b"%d" % number * 4000 for number in range(4)}
    tree(content)
    other, others = second_source(monarch.directory)
    first = monarch.mount(source)
    epoch(first, content)
    settled(first)
    first.umount()
    second = mount_second(monarch, other)
    epoch(second, others)
    settled(second)
    tier = second.tiers["fast"]
    wait_until(lambda: account(second)["tiers"][0]["others"] == [str(source)], "it is not known")
    shown = " ".join(monarch("status", str(second.path)).stdout.split())
    assert f"tier fast also holds copies of {source}: `monarch evict --tier {tier}` lists" in shown
    file = monarch.directory / "monarch.yaml"
    mount = f"source: {other}, mountpoint: {second.path}, state: {second.state}"
    file.write_text(f"mounts: {{b: {{{mount}, tiers: ['{tier}:10MiB']}}}}\n")
    checks = json.loads(monarch("doctor", "-c", str(file), "--json", check=False).stdout)
    assert f"it also holds copies of {source}" in json.dumps(checks)
    # Of another tier that a link leads to nothing is dropped.
    linked = monarch.directory / "linked"
    linked.mkdir()
    (linked / "monarch").symlink_to(tier / "monarch")
    done = monarch("evict", "--tier", str(linked), "--all", check=False)
    assert (done.returncode, "is a symbolic link" in one_line(done)) == (6, True), done.stderr
    lines = monarch("evict", "--tier", str(tier)).stdout.splitlines()
    assert sorted(line.partition(", last used")[0] for line in lines) == sorted(
        [f"{source}: 4 copies, 15.6 KiB", f"{other}: 8 copies, 23.4 KiB"]
    )
    # Of one that is mounted nothing is dropped, and what is not Monarch's stays.
    (generation,) = (tier / "monarch" / readable_name(first.state)).glob("copies-*")
    strange = generation / "notes"
    strange.write_text("mine")
    output = monarch("evict", "--tier", str(tier), "--all").stdout
    assert sum("dropped" in line for line in output.splitlines()) == 1
    assert f"in use by pid {second.pid}" in output
    assert set(resident(second, others)) == set(others)
    assert strange.read_text() == "mine"
    strange.unlink()
    (line,) = monarch("evict", "--tier", str(tier)).stdout.splitlines()
    assert line.startswith(f"{other}: 8 copies")
    nothing = monarch("evict", "--tier", str(tier), "--source", str(source), check=False)
    assert (nothing.returncode, "holds no copies of" in nothing.stderr) == (2, True)
    for missing, words in ((f"{tier}:1GiB", "does not exist"), (strange.parent / "x", "is not a")):
        (strange.parent / "x").touch()
        done = monarch("evict", "--tier", str(missing), check=False)
        assert (done.returncode, words in one_line(done)) == (6, True), done.stderr
    (strange.parent / "x").unlink()


@pytest.mark.finding("D15")
@pytest.mark.promise(110)
@pytest.mark.fault("I8")
@pytest.mark.modes("relay")
def test_a_path_in_the_mount_in_the_place_of_the_mount_is_that_path_alone(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"d/{number}.jpg": b"%d" % number * 4000 for number in range(4)}
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    path = str(mounted.path / "d/2.jpg")
    assert monarch("evict", path).stdout.startswith("1 copy dropped")
    assert set(resident(mounted, content)) == set(content) - {"d/2.jpg"}
    assert monarch("warm", path, "--wait").stdout.startswith("1 file, ")
    for verb in ("evict", "warm"):
        mixed = monarch(verb, path, "d/1.jpg", check=False)
        assert (mixed.returncode, "not the mount" in mixed.stderr) == (2, True)
    whole = monarch("fsck", "--repair", path, check=False)
    assert (whole.returncode, "fsck checks a mount as a whole" in whole.stderr) == (2, True)
    assert monarch("umount", path, check=False).returncode == 9
    assert set(resident(mounted, content)) == set(content)


@pytest.mark.finding("B3")
@pytest.mark.promise(107)
@pytest.mark.modes("relay")
def test_copies_that_the_state_directory_does_not_know_are_reported_before_their_removal(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number}.jpg": b"%d" % number * 4000 for number in range(8)}
    tree(content)
    mounted = monarch.mount(source)
    epoch(mounted, content)
    settled(mounted)
    mounted.umount()
    state = ["--state", str(mounted.state)]

    def mount_output(tier: Path) -> str:
        where = [str(source), str(mounted.path), "--tier", f"{tier}:1GiB", *state]
        done = monarch("mount", *where)
        monarch("umount", str(mounted.path))
        return done.stderr

    tier = mounted.tiers["fast"]
    assert "copies of an earlier mount" not in mount_output(tier)
    # Mounted once with another tier, its records know those of the first no more.
    assert "copies of an earlier mount" not in mount_output(monarch.directory / "another")
    lost = "8 copies of an earlier mount will be removed and made anew: the state directory "
    assert f"{lost}{state[1]}" in mount_output(tier)
    assert "copies of an earlier mount" not in mount_output(tier)


@pytest.mark.finding("B18", "B24", "F4", "F6")
@pytest.mark.promise(111)
@pytest.mark.fault("I9")
@pytest.mark.modes("relay")
def test_the_mount_says_its_mode_what_fits_and_what_cannot_be(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    tree({"a": 10_000})
    mnt = monarch.directory / "mnt"
    mnt.mkdir()

    def mounted(tier: str, *options: str) -> list[str]:
        state = ["--state", str(monarch.directory / "state")]
        output = monarch("mount", str(source), str(mnt), "--tier", tier, *state, *options).stderr
        monarch("umount", str(mnt))
        return [line for line in output.splitlines() if line.startswith("monarch: ")]

    tier = monarch.directory / "tier"
    first, second = mounted(f"{tier}:900TiB", "-o", "datapath=relay,open=open")
    assert first.endswith("; relay; all of 9.77 KiB fits")
    assert "tier tier: 900 TiB asked for, " in second
    first, second = mounted(f"{tier}:1", "-o", "datapath=relay,open=open")
    assert first.endswith("; relay; 0% of 9.77 KiB fits")
    assert "tier tier: its capacity is 1 B, which holds next to nothing; a size" in second
    with tempfile.TemporaryDirectory(prefix="monarch-", dir="/dev/shm") as memory:
        monarch.expects_log("is memory: what is written there survives the daemon")
        monarch.mounted.append(
            Mounted(monarch, mnt, source, monarch.directory / "state", {"memory": Path(memory)})
        )
        lines = mounted(f"{memory}/t:1MiB", "-o", "write=absorb")
        assert any("after fsync it survives the daemon, not the machine" in line for line in lines)


@pytest.mark.finding("F2")
@pytest.mark.promise(124)
@pytest.mark.modes("relay")
def test_one_source_is_mounted_twice_without_naming_state_directories(
    monarch: MonarchCommand, tree: Tree, source: Path
) -> None:
    content = {f"{number}.jpg": b"%d" % number * 4000 for number in range(4)}
    tree(content)
    root = Path(monarch.environment()["MONARCH_STATE_ROOT"])
    tier = f"{monarch.directory}/tiers/fast:1MiB"
    made: list[Mounted] = []

    def mount(name: str, *options: str) -> tuple[Mounted, str]:
        mnt = monarch.directory / name
        mnt.mkdir(exist_ok=True)
        mode = ["-o", "datapath=relay,open=open"]
        done = monarch("mount", str(source), str(mnt), "--tier", tier, *mode, *options)
        (record,) = (r for r in Registry(root).all() if r.mountpoint == str(mnt))
        path = monarch.directory / "tiers/fast"
        mounted = Mounted(monarch, mnt, source, Path(record.state), {"fast": path}, record.pid)
        made.append(mounted)
        monarch.mounted.append(mounted)
        return mounted, done.stderr

    first, output = mount("a")
    assert first.state == root / readable_name(source)
    assert "second mount" not in output
    second, output = mount("b")
    assert (
        f"a second mount of this source: its records, snapshot and log are in {second.state}"
        in (output)
    )
    assert second.state != first.state
    for mounted in (first, second):
        epoch(mounted, content)
        settled(mounted)
        assert set(resident(mounted, content)) == set(content)
    # Each finds its own copies again, in whichever order they come.
    for mounted in (first, second):
        mounted.umount()
    for name, before in (("b", second), ("a", first)):
        again, _ = mount(name)
        assert again.state == before.state
        assert set(resident(again, content)) == set(content)
    # What is written there has one journal, so the next one needs a tier of its own.
    for mounted in made[2:]:
        mounted.umount()
    mount("a", "-o", "write=absorb")
    monarch.expects_log("what is written for .* is in use by pid")
    done = monarch("mount", str(source), str(second.path), "--tier", tier, check=False)
    output = one_line(done)
    assert (done.returncode, "or give this mount another tier with --tier PATH" in output) == (
        7,
        True,
    )
