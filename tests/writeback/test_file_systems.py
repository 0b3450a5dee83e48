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
from tests.writeback.remounts import Rig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """``h/i`` of the source is another file system."""
    rig = prepared(tmp_path, monkeypatch)
    at = rig.source / "h/i"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", at], check=True)
    try:
        (at / "there").write_bytes(b"there")
        (at / "more").mkdir()
        yield rig
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@needs_root
@pytest.mark.promise(177)
async def test_a_name_is_moved_within_a_file_system_of_the_source_only(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        await session.write(b"new", b"written", synced=True)
        await session.mkdir(b"e")
        for path, to in (
            (b"new", b"h/i/new"),
            (b"a", b"h/i/there"),
            (b"h/i/there", b"h/there"),
            (b"e", b"h/i/more/e"),
        ):
            for call in (session.rename, session.link):
                if (call, path) == (session.link, b"e"):
                    continue
                with pytest.raises(Refused) as raised:
                    await call(path, to)
                assert raised.value.errno == errno.EXDEV
        await session.rename(b"h/i/there", b"h/i/more/there")
        await session.rename(b"new", b"h/new")
        await session.drained()
        assert session.shown().keys() == tree_of(rig.source).keys()
        assert os.listdir(rig.source / "h/i/more") == ["there"]
        await session.end()
