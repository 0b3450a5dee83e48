"""Access control lists of files that the drain makes anew, since others have removed or replaced
them at the source: each keeps its list, and gets none of the directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from monarch.errors import SourceError
from monarch.posix.acl import stored
from tests.mount.test_acl import ACCESS, DEFAULT, NAMED_GROUP, NAMED_USER, acl
from tests.writeback.remount_histories import how
from tests.writeback.remounts import Rig

pytestmark = [
    pytest.mark.promise(20),
    pytest.mark.fault("U1"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user"),
]

# The group bits are the mask: without the list the group would get them.
OWN = acl(0o600, (NAMED_USER, 1001, 6), group=0)
LATER = acl(0o600, (NAMED_USER, 1002, 4), group=0)
OF_DIRECTORY = acl(0o770, (NAMED_GROUP, 2000, 7), group=7)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "d").mkdir()
    for name in ("a", "d/a", "plain", "d/plain"):
        (rig.source / name).write_bytes(b"of the source")
        (rig.source / name).chmod(0o640)
        if name.endswith("a"):
            os.setxattr(rig.source / name, ACCESS, OWN)
    os.setxattr(rig.source / "d", DEFAULT, OF_DIRECTORY)
    return rig


def list_of(path: Path) -> bytes:
    return os.getxattr(path, ACCESS) if ACCESS in os.listxattr(path) else b""


@pytest.mark.promise(176)
@pytest.mark.parametrize("remount", ["same", "refresh", "given", "lost state"])
async def test_a_renamed_file_keeps_its_list(rig: Rig, remount: str) -> None:
    async with rig.mount(works=False) as session:
        for name in (b"a", b"plain"):
            await session.rename(name, b"d/renamed " + name)
        await session.front.recorder.sync()
    for name in ("a", "plain"):
        (rig.source / name).unlink()
    async with rig.mount(**how(remount, rig)) as session:
        await session.drained()
        for name, own in (("a", OWN), ("plain", b"")):
            path = f"d/renamed {name}"
            assert (rig.source / path).read_bytes() == b"of the source"
            assert list_of(rig.source / path) == own
            assert session.names.acls(session.ino(path.encode())).access == (own and stored(own))


@pytest.mark.promise(79)
@pytest.mark.parametrize("remount", ["same", "refresh", "given", "lost state"])
async def test_a_file_that_is_kept_beside_keeps_its_list(rig: Rig, remount: str) -> None:
    async with rig.mount(works=False) as session:
        for name in (b"d/a", b"d/plain"):
            await session.write(name, b"written")
        await session.front.recorder.sync()
    for name in ("d/a", "d/plain"):
        (rig.source / name).unlink()
        (rig.source / name).write_bytes(b"of others")
    async with rig.mount(**how(remount, rig)) as session:
        await session.drained()
    for name, own in (("a", OWN), ("plain", b"")):
        [kept] = (rig.source / "d").glob(f"{name}.monarch-conflict-*")
        assert kept.read_bytes() == b"written"
        assert list_of(kept) == own
        assert stat.S_IMODE(kept.stat().st_mode) == (0o660 if own else 0o640)


async def test_the_next_mount_shows_the_list_that_a_written_file_had(rig: Rig) -> None:
    """It was set at the source after the snapshot was made, and was known when the file was
    written."""
    async with rig.mount(works=False, freshness="never") as session:
        os.setxattr(rig.source / "a", ACCESS, LATER)
        with pytest.raises(SourceError, match="access changed"):
            # The kernel opens it again then.
            await session.write(b"a", b"written")
        await session.write(b"a", b"written")
        assert session.names.acls(session.ino(b"a")).access == stored(LATER)
        await session.front.recorder.sync()
    async with rig.mount(works=False, freshness="never") as session:
        assert session.names.acls(session.ino(b"a")).access == stored(LATER)
