"""Another file system in the place of the source: changes are not drained into it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio.testing

from monarch.errors import SourceError
from monarch.writeback.lease import DIRECTORY as LEASES
from tests.mount.command import needs_root
from tests.writeback.remounts import Rig

Mount = Callable[[], None]


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Mount]:
    """Mounts another file system at the path of the source. Each has the same root inode number."""
    (tmp_path / "source").mkdir()
    mounted = 0

    def mount() -> None:
        nonlocal mounted
        how = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "source")]
        subprocess.run(how, check=True)
        mounted += 1

    mount()
    yield mount
    for _ in range(mounted):
        subprocess.run(["umount", "-l", str(tmp_path / "source")], check=True)


@needs_root
@pytest.mark.promise(178)
@pytest.mark.parametrize("is_drained", [True, False])
async def test_no_change_is_drained_into_another_file_system_with_the_same_root_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    exchange: Mount,
    is_drained: bool,
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"of the source")
    number = rig.source.stat().st_ino
    if is_drained:
        async with rig.mount() as session:
            await session.write(b"a", b"drained")
            await session.drained()
            await session.end()
    async with rig.mount(works=False) as session:
        await session.write(b"new", b"of the mount", synced=True)
        await session.end(abandoned=True)
    exchange()
    (rig.source / "other").write_bytes(b"of another disk")
    assert rig.source.stat().st_ino == number
    with pytest.raises(SourceError) as raised:
        async with rig.mount():
            pass
    assert raised.value.errno == errno.ENODEV and "is another directory" in str(raised.value)
    assert set(os.listdir(rig.source)) <= {"other", ".monarch-leases.part"}
    async with rig.mount(refreshed=True) as session:
        await session.drained()
        await session.end()
    assert (rig.source / "new").read_bytes() == b"of the mount"


@needs_root
@pytest.mark.promise(178)
@pytest.mark.parametrize("change", ["replaced", "renamed", "removed"])
async def test_a_source_is_recognised_after_all_names_in_its_root_have_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    exchange: Mount,
    change: str,
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"of the source")
    async with rig.mount(freshness="never") as session:
        if change == "replaced":
            await session.write(b"a", b"drained")
        elif change == "renamed":
            await session.rename(b"a", b"b")
        else:
            await session.write(b"b", b"drained")
            session.unlink(b"a")
        await session.drained()
        await session.write(b"new", b"of the mount", synced=True)
        session.kill()
    async with rig.mount(freshness="never") as session:
        await session.drained()
        await session.end()
    assert (rig.source / "new").read_bytes() == b"of the mount"


@pytest.mark.promise(178)
@pytest.mark.parametrize("history", ["waiting", "removed", "moved"])
async def test_a_source_without_a_name_that_must_be_there_is_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, history: str
) -> None:
    """The source was empty; what was drained into it is not there any more, or not yet."""
    rig = Rig(tmp_path, monkeypatch)
    async with rig.mount(freshness="never") as session:
        if history != "waiting":
            await session.write(b"a", b"drained")
            await session.drained()
            if history == "removed":
                session.unlink(b"a")
            else:
                await session.mkdir(b"d")
                await session.rename(b"a", b"d/a")
                await session.drained()
                session.unlink(b"d/a")
                session.rmdir(b"d")
            await session.drained()
        await session.end()
    async with rig.mount(freshness="never", works=False) as session:
        # Each content but the last counts as drained at once.
        for turn in range(3):
            await session.write(b"new", b"%d" % turn, synced=True)
        await session.end(abandoned=True)
    os.utime(rig.source)
    async with rig.mount(freshness="never") as session:
        await session.drained()
        await session.end()
    assert (rig.source / "new").read_bytes() == b"2"


@pytest.mark.promise(178)
async def test_a_source_is_recognised_by_the_lease_that_its_last_mount_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"of the source")
    (rig.source / "d").mkdir()
    async with rig.mount(works=False) as session:
        session.unlink(b"a")
        await session.write(b"new", b"of the mount", synced=True)
        await session.end(abandoned=True)
    # As by a drain that was killed before it could record that, and by others.
    (rig.source / "a").unlink()
    (rig.source / "d").rename(rig.source / "renamed")
    async with rig.mount() as session:
        await session.drained()
        await session.end()
    assert set(os.listdir(os.fsencode(rig.source))) - {LEASES} == {b"new", b"renamed"}
