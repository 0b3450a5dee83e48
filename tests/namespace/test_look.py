"""Reading the entries of a directory gives the same with the C extension and without it."""

from __future__ import annotations

import errno
import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.namespace import look as look_module
from monarch.namespace import scan
from monarch.namespace.build import build
from monarch.namespace.look import Seen, look
from monarch.namespace.refresh import directories_changed, refresh
from monarch.namespace.schema import RECORD_BYTES
from monarch.namespace.snapshot import Snapshot
from monarch.posix import acl
from monarch.tiers.source import Source, identity_now, identity_of
from monarch.types import Ino
from tests.equipment import slowfs

PARENT = Ino(7)
NO_ID = 0xFFFFFFFF
# In the year 2300, which 64 bits of ns do not reach.
FAR_NS = 10_413_792_000_000_000_001


def an_acl(named: int) -> bytes:
    """An access control list with ``named`` users."""
    entries = [(0x01, 7, NO_ID), *((0x02, 4, 5000 + n) for n in range(named))]
    entries += [(0x04, 5, NO_ID), (0x10, 5, NO_ID), (0x20, 0, NO_ID)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    directory = tmp_path / "looked-at"
    directory.mkdir()
    for name in ("plain", "named", "many", "closed", "before-1970", "first", "far"):
        (directory / name).write_bytes(b"0123456789" * 1000)
    os.link(directory / "first", directory / "second")
    os.utime(directory / "before-1970", ns=(0, -1_500_000_001))
    os.utime(directory / "far", ns=(0, FAR_NS))
    (directory / "below").mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "link").symlink_to("nowhere")
    os.setxattr(directory / "named", acl.ACCESS, an_acl(1))
    os.setxattr(directory / "many", acl.ACCESS, an_acl(100))
    os.setxattr(directory / "closed", acl.ACCESS, an_acl(1))
    (directory / "closed").chmod(0o600)
    os.setxattr(directory / "below", acl.DEFAULT, an_acl(2))
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_the_extension_sees_what_python_sees(descriptor: int) -> None:
    names = (*sorted(map(os.fsencode, os.listdir(descriptor))), b"missing")
    assert look_module._look is not look_module._look_slowly, "the extension is not built"
    records, others = look(descriptor, names, PARENT, 0)
    assert (records, others) == look_module._look_slowly(descriptor, names, PARENT, 0)
    seen = {names[found.place]: found for found in others}
    assert b"plain" not in seen and b"before-1970" not in seen
    assert seen[b"missing"] == Seen(len(names) - 1, errno.ENOENT)
    assert seen[b"named"].access == an_acl(1)
    assert seen[b"many"].access == an_acl(100)
    # The list is there whether the mode bits let it give anything or not.
    assert len(seen[b"closed"].access) == len(an_acl(1))
    assert seen[b"below"].inherited == an_acl(2)
    assert not records[-RECORD_BYTES:].strip(b"\0")


@pytest.mark.promise(122)
@pytest.mark.parametrize("fast", [True, False], ids=["extension", "python"])
def test_a_scan_takes_files_that_are_dated_beyond_the_year_2262(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    if not fast:
        monkeypatch.setattr(look_module, "_look", look_module._look_slowly)
    source = tmp_path / "source"
    (source / "directory").mkdir(parents=True)
    (source / "far").write_bytes(b"x")
    for path in (source / "far", source / "directory", source):
        os.utime(path, ns=(0, FAR_NS))
    assert (source / "far").stat().st_mtime_ns == FAR_NS
    build(source, tmp_path / "snapshot")
    with Snapshot.open(tmp_path / "snapshot") as snapshot:
        ino = snapshot.resolve(b"far")
        assert ino is not None
        assert snapshot.attributes(ino).mtime_ns == 2**63 - 1
        assert directories_changed(source, snapshot, jobs=1, patience_s=60) is False
    opened = Source(os.fsencode(source))
    file = opened.open(b"far")
    assert identity_of(file.status) == identity_now(file.fd)
    assert identity_of(file.status).mtime_ns == 2**63 - 1
    file.release()
    opened.close()
    report = refresh(source, tmp_path / "snapshot")
    assert (report.added, report.removed, report.changed) == (0, 0, 0)


def test_devices_are_compared_alike() -> None:
    fd = os.open("/dev", os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = (b"null", b"zero")
        assert look(fd, names, PARENT, 0) == look_module._look_slowly(fd, names, PARENT, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("looks", ["_look", "_look_slowly"])
def test_a_device_that_knows_no_lists_is_not_asked_for_them(descriptor: int, looks: str) -> None:
    asked = look_module._look if looks == "_look" else look_module._look_slowly
    here = os.fstat(descriptor).st_dev
    _, others = asked(descriptor, (b"named", b"below"), PARENT, here)
    assert [Seen(*seen) for seen in others] == [Seen(1, 0, here)]


def test_a_signal_ends_a_comparison_with_a_slow_source(tmp_path: Path) -> None:
    reason = slowfs.unavailable()
    if reason is not None:
        pytest.skip(reason)
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    for number in range(32):
        (source / "d" / f"{number}").touch()

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGUSR1))
    try:
        with slowfs.SlowSource(source, tmp_path / "slow", attribute_s=0) as slow:
            fd = os.open(slow.path / "d", os.O_RDONLY | os.O_DIRECTORY)
            names = tuple(b"%d" % number for number in range(32))
            slow.rules("lat getattr 300 ^/d/")
            asked = slow.counters()["getattr"]
            timer.start()
            try:
                with pytest.raises(Interrupted):
                    look(fd, names, PARENT, slow.path.stat().st_dev)
                assert slow.counters()["getattr"] - asked < 16
            finally:
                timer.cancel()
                os.close(fd)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_entries_that_vanish_during_the_comparison_move_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = tmp_path / "source", tmp_path / "snapshot"
    for name in ("a", "b", "d"):
        (source / name).mkdir(parents=True)
    (source / "c").symlink_to("target of c")
    (source / "e").symlink_to("target of e")
    (source / "f").write_bytes(b"12345")
    monkeypatch.setattr(scan, "_RACY_NS", -3600 * 10**9)
    build(source, file)

    def removing(*asked: int) -> tuple[bytearray, list[Seen]]:
        if (source / "b").exists():
            (source / "b").rmdir()
        return look(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr("monarch.namespace.scan.look", removing)
    report = refresh(source, file, quick=True)
    assert report.reused == 3
    with Snapshot.open(file) as snapshot:
        root = Ino(1)
        assert snapshot.names(root) == [b"a", b"c", b"d", b"e", b"f"]
        for name, target in ((b"c", b"target of c"), (b"e", b"target of e")):
            ino = snapshot.lookup(root, name)
            assert ino is not None and snapshot.readlink(ino) == target
        for name in (b"a", b"d"):
            ino = snapshot.lookup(root, name)
            assert ino is not None and snapshot.attributes(ino).is_dir
            assert snapshot.attributes(ino).source_ino == (source / name.decode()).stat().st_ino
