"""Objects that the tier has cut short, or lost: they are no whole files, and never reach the
source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.writeback.objects import object_path
from tests.writeback.remounts import Ground, Life

OLD, NEW = b"what the source had", b"what was written on the mount, and synced"


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


def number_of(life: Life, path: bytes) -> int:
    node = life.names.node(life.ino(path))
    assert node is not None and node.object
    return node.object


def cut(ground: Ground, number: int, *, restored: bool) -> None:
    """Cuts an object short. With ``restored`` it keeps its time, as in a backup."""
    path = object_path(ground.directory, number)
    before = path.stat()
    os.truncate(path, 5)
    if restored:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.fault("T19")
@pytest.mark.promise(73)
@pytest.mark.parametrize(
    ("is_ended", "is_restored"), [(True, True), (True, False), (False, True)], ids=str
)
async def test_a_synced_object_that_is_shorter_by_now_is_lost_and_never_published(
    ground: Ground, clock: trio.testing.MockClock, is_ended: bool, is_restored: bool
) -> None:
    (ground.source / "f").write_bytes(OLD)
    async with ground.mount(works=False) as life:
        await life.write(b"f", NEW, synced=True)
        await life.write(b"other", NEW, synced=True)
        number = number_of(life, b"f")
        if is_ended:
            await life.end(abandoned=True)
        else:
            life.kill()
    cut(ground, number, restored=is_restored)
    async with ground.mount() as life:
        place = life.write_back.place
        assert [op.path for op in place.found.lost] == [b"f"]
        assert [(it.path, it.size) for it in place.doubtful.list()] == [(b"f", 5)]
        assert life.shown()[b"f"].content == OLD
        await life.drained()
        await life.end()
    assert (ground.source / "f").read_bytes() == OLD
    assert (ground.source / "other").read_bytes() == NEW


@pytest.mark.fault("T19")
@pytest.mark.promise(73)
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "short"])
async def test_a_drained_object_that_is_damaged_is_read_from_the_source(
    ground: Ground, clock: trio.testing.MockClock, is_missing: bool
) -> None:
    async with ground.mount() as life:
        await life.write(b"f", NEW, synced=True)
        await life.drained()
        number = number_of(life, b"f")
        await life.end()
    if is_missing:
        object_path(ground.directory, number).unlink()
    else:
        cut(ground, number, restored=False)
    async with ground.mount(freshness="never") as life:
        assert not life.write_back.place.found.lost
        shown = life.shown()[b"f"]
        assert (shown.content, shown.safety, shown.object) == (NEW, "source", 0)
        await life.drained()
        await life.end()
    assert (ground.source / "f").read_bytes() == NEW


async def test_a_file_truncated_after_a_clean_end_and_before_a_kill_keeps_its_length(
    ground: Ground, clock: trio.testing.MockClock
) -> None:
    async with ground.mount(works=False) as life:
        await life.write(b"f", NEW, synced=True)
        await life.end(abandoned=True)
    async with ground.mount(works=False) as life:
        ino = await life.open(b"f", os.O_WRONLY)
        await trio.to_thread.run_sync(os.ftruncate, life.front.opens.files[ino].place.fd, 5)
        life.kill()
    async with ground.mount() as life:
        assert not life.write_back.place.found.lost
        await life.drained()
        await life.end()
    assert (ground.source / "f").read_bytes() == NEW[:5]
