"""A source with file systems of its own below it: names are not moved from one to another."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio.testing

from monarch.errors import Refused
from tests.equipment.remounts import tree_of
from tests.mount.command import needs_root
from tests.writeback.remount_histories import prepared
from tests.writeback.remounts import Ground


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    """``h/i`` of the source is another file system."""
    ground = prepared(tmp_path, monkeypatch)
    at = ground.source / "h/i"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", at], check=True)
    try:
        (at / "there").write_bytes(b"there")
        (at / "more").mkdir()
        yield ground
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@needs_root
@pytest.mark.promise(177)
async def test_a_name_is_moved_within_a_file_system_of_the_source_only(
    ground: Ground, clock: trio.testing.MockClock
) -> None:
    async with ground.mount() as life:
        await life.write(b"new", b"written", synced=True)
        await life.mkdir(b"e")
        for path, to in (
            (b"new", b"h/i/new"),
            (b"a", b"h/i/there"),
            (b"h/i/there", b"h/there"),
            (b"e", b"h/i/more/e"),
        ):
            for call in (life.rename, life.link):
                if (call, path) == (life.link, b"e"):
                    continue
                with pytest.raises(Refused) as raised:
                    await call(path, to)
                assert raised.value.errno == errno.EXDEV
        await life.rename(b"h/i/there", b"h/i/more/there")
        await life.rename(b"new", b"h/new")
        await life.drained()
        assert life.shown().keys() == tree_of(ground.source).keys()
        assert os.listdir(ground.source / "h/i/more") == ["there"]
        await life.end()
