"""Changes of attributes of files of the source through a mount, counted at the source."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import account, copies, forget_pages, objects_in, wait_until

pytestmark = [pytest.mark.modes(*OPENS_ARE_REPORTED), pytest.mark.promise(172)]

_MB = 1 << 20
_MTIME_NS = 1_000_000_000 * 10**9


def changes(path: Path) -> list[Callable[[], object]]:
    return [
        lambda: path.chmod(0o640),
        lambda: os.chown(path, 12, 34),
        lambda: os.utime(path, ns=(_MTIME_NS, _MTIME_NS)),
    ]


def check_changed(path: Path) -> None:
    status = path.stat()
    found = status.st_mode & 0o777, status.st_uid, status.st_gid, status.st_mtime_ns
    assert found == (0o640, 12, 34, _MTIME_NS)


def drained(mounted: Mounted) -> None:
    wait_until(lambda: not account(mounted)["writing"]["operations"], "it is not drained")


def absorbing(monarch: MonarchCommand, source: Path, *options: str) -> Mounted:
    more = ["write=absorb", *options]
    return monarch.mount(source, tiers={"fast": "64MiB"}, options=more)


@pytest.mark.finding("W10")
def test_no_byte_of_a_large_file_is_read_and_the_file_is_not_opened(
    monarch: MonarchCommand, slow: SlowSource, tree: Tree
) -> None:
    tree({"large": 8 * _MB})
    mounted = absorbing(monarch, slow.path)
    path = mounted.path / "large"
    before = slow.counters()
    for change in changes(path):
        change()
    check_changed(path)
    now = slow.counters()
    assert now["read_bytes"] == before["read_bytes"]
    assert now["open"] == before["open"]
    assert not objects_in(mounted.tiers["fast"])
    drained(mounted)
    now = slow.counters()
    assert now["read_bytes"] - before["read_bytes"] == 0
    # The lease is written.
    assert now["write_bytes"] - before["write_bytes"] < 64 * 1024
    check_changed(path)
    check_changed(slow.path / "large")
    assert path.read_bytes() == contents("large", 8 * _MB)


def test_a_copy_is_served_before_and_behind_the_drain_and_by_the_next_mount(
    monarch: MonarchCommand, slow: SlowSource, tree: Tree
) -> None:
    sizes = {"small": 1000, "large": 8 * _MB}
    tree(sizes)
    mounted = absorbing(monarch, slow.path)

    def read(mounted: Mounted) -> None:
        for name, size in sizes.items():
            with (mounted.path / name).open("rb") as file:
                forget_pages(file.fileno())
                assert file.read() == contents(name, size)

    read(mounted)
    wait_until(lambda: len(copies(mounted)["fast"]) == 2, "there are no copies")
    before = slow.counters()
    for name in sizes:
        for change in changes(mounted.path / name):
            change()
            read(mounted)
    drained(mounted)
    read(mounted)
    for name in sizes:
        assert mounted.xattr(name) == "fast"
        assert mounted.xattr(name, "user.monarch.state") == "resident"
        assert mounted.xattr(name, "user.monarch.digest")
        check_changed(mounted.path / name)
    assert slow.counters()["read_bytes"] == before["read_bytes"]
    assert monarch("fsck", str(mounted.path)).returncode == 0
    mounted.umount()
    assert monarch("fsck", str(mounted.state)).returncode == 0
    mounted = absorbing(monarch, slow.path)
    read(mounted)
    assert slow.counters()["read_bytes"] == before["read_bytes"]
    for name in sizes:
        check_changed(mounted.path / name)
    assert account(mounted)["health"]["problems"] == []


def test_a_killed_mount_has_kept_the_changes(
    monarch: MonarchCommand, slow: SlowSource, tree: Tree
) -> None:
    tree({"large": 8 * _MB})
    mounted = absorbing(monarch, slow.path, "writeback.bandwidth=1MiB")
    before = slow.counters()
    for change in changes(mounted.path / "large"):
        change()
    mounted.kill()
    mounted = absorbing(monarch, slow.path)
    check_changed(mounted.path / "large")
    drained(mounted)
    check_changed(slow.path / "large")
    assert slow.counters()["read_bytes"] == before["read_bytes"]


def test_a_reader_reads_on_and_a_writer_has_the_bytes_and_the_attributes(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = absorbing(monarch, tree({"f": 300_000}))
    path, content = mounted.path / "f", contents("f", 300_000)
    with path.open("rb", buffering=0) as reader:
        assert reader.read(1) == content[:1]
        for change in changes(path):
            change()
        os.setxattr(path, "user.note", b"a note")
        assert os.listxattr(path) == ["user.note"]
        drained(mounted)
        assert os.getxattr(path, "user.note") == b"a note"
        forget_pages(reader.fileno())
        assert reader.read() == content[1:]
        with path.open("rb") as second:
            assert second.read() == content
        with suppress(OSError), path.open("r+b"):
            # As for any file of the source: ETXTBSY where the reader would not see the bytes.
            pass
    with path.open("r+b", buffering=0) as writer:
        check_changed(path)
        writer.write(b"new")
    assert path.read_bytes() == b"new" + content[3:]
    os.truncate(path, 100_000)
    mounted.umount()
    there = mounted.source / "f"
    assert there.read_bytes() == (b"new" + content[3:])[:100_000]
    assert there.stat().st_mode & 0o777 == 0o640
    assert os.getxattr(there, "user.note") == b"a note"


def test_a_file_that_others_write_meanwhile_is_read_anew(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("changed at the source")
    mounted = absorbing(monarch, tree({"f": 1000}))
    path, there = mounted.path / "f", mounted.source / "f"
    path.chmod(0o640)
    drained(mounted)
    there.write_bytes(b"of others")
    with suppress(OSError):
        path.read_bytes()
    assert path.read_bytes() == b"of others"
    there.chmod(0o604)
    path.unlink()
    with pytest.raises(OSError) as raised:
        path.stat()
    assert raised.value.errno == errno.ENOENT
    mounted.umount()
    assert not there.exists()
