"""One tier path for several mounts: each keeps its own copies, and nothing else is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree
from tests.equipment.inotify import OpenCounter
from tests.mount.command import needs_fuse
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
