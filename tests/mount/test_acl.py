"""Access control lists of the source: the kernel uses them on the mount as at the source."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import lmdb
import numpy as np
import psutil
import pytest

from monarch.namespace.build import build
from monarch.namespace.compare import diff, verify
from monarch.namespace.look import _look_slowly
from monarch.namespace.refresh import refresh
from monarch.namespace.schema import ACL_SHIFT, INODES, META, RECORD, seal, unseal
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import append_trailer
from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted, Tree, contents
from tests.equipment.slowfs import SlowSource
from tests.faults.conftest import slow
from tests.mount.command import needs_root
from tests.mount.test_permissions import as_another_user, reading

__all__ = ["slow"]

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
ALICE, BOB, TEAM = 1001, 1002, 2000
NAMED_USER, NAMED_GROUP = 0x02, 0x08


def acl(mode: int, *named: tuple[int, int, int], group: int = 0, mask: int | None = None) -> bytes:
    """An access control list as the kernel has it (linux/posix_acl_xattr.h).

    ``named`` are (kind, id, permissions). The mask is all of them if it is not given.
    """
    if mask is None:
        mask = group
        for _, _, bits in named:
            mask |= bits
    no_id = 2**32 - 1
    users = [(kind, bits, number) for kind, number, bits in named if kind == NAMED_USER]
    groups = [(kind, bits, number) for kind, number, bits in named if kind == NAMED_GROUP]
    entries = [(1, mode >> 6 & 7, no_id), *users, (4, group, no_id), *groups]
    entries += [(16, mask, no_id), (32, mode & 7, no_id)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def guarded(tree: Tree) -> Path:
    """Files and directories whose mode alone would tell another story."""
    source = tree({name: name.encode() for name in ("named", "denied", "masked", "team", "group")})
    tree({"for alice/file": b"x", "for alice/later": None, "closed/file": b"x", "plain": b"p"})
    for name, mode, listed in (
        ("named", 0o600, acl(0o600, (NAMED_USER, ALICE, 4))),
        ("denied", 0o644, acl(0o604, (NAMED_USER, ALICE, 0), group=4)),
        ("masked", 0o640, acl(0o640, (NAMED_USER, ALICE, 6), group=2, mask=2)),
        ("team", 0o640, acl(0o640, (NAMED_GROUP, TEAM, 4))),
        # The group bits are the mask: they promise the group what the list does not give it.
        ("group", 0o640, acl(0o640, (NAMED_USER, ALICE, 4), group=0)),
        ("for alice", 0o700, acl(0o700, (NAMED_USER, ALICE, 5))),
        ("closed", 0o755, acl(0o705, (NAMED_USER, ALICE, 0), group=5)),
    ):
        (source / name).chmod(mode)
        os.setxattr(source / name, ACCESS, listed)
    os.chown(source / "group", 0, BOB)
    os.setxattr(source / "for alice", DEFAULT, acl(0o700, (NAMED_USER, BOB, 5)))
    (source / "for alice/inherits").write_bytes(b"i")
    return source


def outcomes(directory: Path, top: str, uid: int) -> Mapping[str, str]:
    names = ["named", "denied", "masked", "team", "group", "plain"]
    names += ["for alice/file", "for alice/inherits", "closed/file"]
    attempts = {name: reading(f"{top}/{name}") for name in names}
    for name in ("for alice", "closed"):
        attempts[f"list {name}"] = lambda name=name: os.listdir(f"{top}/{name}")  # type: ignore[misc]
    return as_another_user(directory, attempts, uid=uid)


@needs_root
@pytest.mark.promise(20)
@pytest.mark.finding("C2")
def test_the_lists_of_the_source_decide_as_they_do_there(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = guarded(tree)
    mounted = monarch.mount(source, options=["allow_other"])
    for _epoch in range(2):
        for uid in (ALICE, BOB, TEAM, 65534):
            there = outcomes(tmp_path, "source", uid)
            assert outcomes(tmp_path, "mnt", uid) == there, uid
            assert {"done", "EACCES"} <= set(there.values())
        for path in source.rglob("*"):
            here = mounted.path / path.relative_to(source)
            assert os.stat(here).st_mode == os.stat(path).st_mode
            assert xattrs(here) == xattrs(path)
            if path.is_file():
                assert here.read_bytes() == path.read_bytes()
    assert xattrs(mounted.path / "for alice").keys() == {ACCESS, DEFAULT}
    assert xattrs(mounted.path / "plain") == {}


def xattrs(path: Path) -> dict[str, bytes]:
    listed = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    for name in (ACCESS, DEFAULT):
        try:
            value = os.getxattr(path, name)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
        else:
            assert listed[name] == value
    return listed


@needs_root
@pytest.mark.promise(20, 26)
@pytest.mark.modes(*OPENS_ARE_REPORTED)
def test_a_list_that_changes_at_the_source_decides_when_the_file_is_opened_next(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = guarded(tree)
    mounted = monarch.mount(source, options=["allow_other"])
    monarch.expects_log("changed at the source since the snapshot")
    for name in ("plain", "denied"):
        os.stat(mounted.path / name)
    (source / "plain").chmod(0o600)
    os.setxattr(source / "plain", ACCESS, acl(0o600, (NAMED_USER, BOB, 4)))
    os.setxattr(source / "denied", ACCESS, acl(0o604, (NAMED_USER, BOB, 0), group=4))
    for _ in range(2):  # the first open finds out
        outcomes(tmp_path, "mnt", BOB)
    for uid in (ALICE, BOB):
        there, here = outcomes(tmp_path, "source", uid), outcomes(tmp_path, "mnt", uid)
        assert (here["plain"], here["denied"]) == (there["plain"], there["denied"])
    assert xattrs(mounted.path / "plain") == xattrs(source / "plain")


@needs_root
@pytest.mark.promise(20)
@pytest.mark.modes("python", "relay")
def test_a_first_list_that_comes_while_mounted_promises_the_group_nothing(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    """The kernel does not check lists: then the group bits are not the mask."""
    source = tree({"file": b"bytes", "other": b"x"})
    (source / "file").chmod(0o600)
    os.chown(source / "file", 0, BOB)
    mounted = monarch.mount(source, options=["allow_other"])
    monarch.expects_log("changed at the source since the snapshot")
    os.setxattr(source / "file", ACCESS, acl(0o600, (NAMED_USER, ALICE, 4)))
    assert stat.S_IMODE((source / "file").stat().st_mode) == 0o640
    (mounted.path / "file").read_bytes()
    assert stat.S_IMODE((mounted.path / "file").stat().st_mode) == 0o600
    for _ in range(2):
        assert as_another_user(tmp_path, {"bob": reading("mnt/file")}, uid=BOB)["bob"] == "EACCES"
        assert (mounted.path / "file").read_bytes() == b"bytes"


@needs_root
@pytest.mark.promise(20, 62)
@pytest.mark.modes("python", "relay")
def test_a_change_of_the_mode_through_the_mount_changes_the_mask(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = guarded(tree)
    mounted = monarch.mount(source, options=["allow_other", "write=absorb"])
    with pytest.raises(OSError) as refused:
        os.setxattr(mounted.path / "plain", ACCESS, acl(0o600, (NAMED_USER, BOB, 4)))
    assert refused.value.errno == errno.EOPNOTSUPP
    before = xattrs(source / "group")[ACCESS]
    os.chmod(mounted.path / "group", 0o660)
    expected = acl(0o660, (NAMED_USER, ALICE, 4), group=0, mask=6)
    assert before != expected == xattrs(mounted.path / "group")[ACCESS]
    assert as_another_user(tmp_path, {"bob": reading("mnt/group")}, uid=BOB)["bob"] == "EACCES"
    os.chmod(mounted.path / "group", 0o600)
    assert as_another_user(tmp_path, {"alice": reading("mnt/group")}, uid=ALICE) == {
        "alice": "EACCES"
    }
    mounted.umount()


@pytest.mark.promise(95)
@pytest.mark.finding("C2")
@pytest.mark.parametrize("listed", [False, True], ids=["without lists", "with lists"])
def test_listing_with_attributes_asks_for_nothing_twice(
    monarch: MonarchCommand, tree: Tree, listed: bool
) -> None:
    count = 500
    source = tree({f"d/f{number}": b"" for number in range(count)})
    if listed:
        os.setxattr(source / "d/f7", ACCESS, acl(0o644, (NAMED_USER, ALICE, 4), group=4))
    mounted = monarch.mount(source)
    first = requests_of(mounted, ["ls", "-lR", str(mounted.path)])
    again = requests_of(mounted, ["ls", "-lR", str(mounted.path)])
    # With datapath: python the kernel keeps no listing, and lists are forgotten with it.
    if monarch.mode != "python" or not listed:
        assert again < count / 10
    if not listed:
        assert first < count
    for client in (
        ["cp", "-a"],
        ["rsync", "-aXA"],
        ["rsync", "-a"],
    ):
        target = monarch.directory / f"to {' '.join(client)}"
        done = subprocess.run(
            [*client, f"{mounted.path}/d", str(target)], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, ""), client
    archive = ["tar", "--selinux", "--xattrs", "--acls", "-cf", "/dev/null"]
    for client in (archive, ["getfattr", "-d"]):
        done = subprocess.run([*client, "d/f7"], cwd=mounted.path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), client


def requests_of(mounted: Mounted, command: list[str]) -> int:
    """How often the daemon read anything while the command ran; each request is one such read."""
    daemon = psutil.Process(mounted.pid)
    before = daemon.io_counters().read_count
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return int(daemon.io_counters().read_count - before)


def lists_of(snapshot: Snapshot) -> Iterator[tuple[bytes, tuple[bytes, bytes]]]:
    for first, rows in snapshot.records():
        for place in range(len(rows)):
            if any(acls := snapshot.acls(type(first)(first + place))):
                yield snapshot.path(type(first)(first + place)), acls


def test_a_snapshot_has_the_lists_and_knows_when_they_change(tree: Tree, tmp_path: Path) -> None:
    source, file = guarded(tree), tmp_path / "snapshot"
    os.setxattr(source, ACCESS, acl(0o755, (NAMED_USER, ALICE, 5), group=5))
    os.link(source / "named", source / "zz linked")
    built = build(source, file)
    with Snapshot.open(file) as snapshot:
        found = dict(lists_of(snapshot))
        assert found.keys() == {
            *(b"", b"named", b"denied", b"masked", b"team", b"group", b"for alice", b"closed"),
            b"for alice/inherits",
        }
        assert built.acls == len(found)
        assert verify(source, snapshot) == verify(source, snapshot, sample=100) == []
    times = os.stat(source / "closed")
    os.setxattr(source / "closed", ACCESS, acl(0o705, (NAMED_USER, BOB, 0), group=5))
    os.removexattr(source / "for alice", DEFAULT)
    assert os.stat(source / "closed").st_mode == times.st_mode
    with Snapshot.open(file) as snapshot:
        for sample in (None, 100):
            differences = verify(source, snapshot, sample=sample)
            assert {(d.path, d.what) for d in differences} == {
                (b"closed", "access control lists"),
                (b"for alice", "access control lists"),
            }
    refresh(source, file, quick=True)
    with Snapshot.open(file) as snapshot:
        assert list(verify(source, snapshot)) == []
        assert list(diff(snapshot, snapshot)) == []
        assert dict(lists_of(snapshot))[b"named"] == found[b"named"]


def test_one_list_of_many_files_is_kept_once(tree: Tree, tmp_path: Path) -> None:
    source = tree({"d": None})
    os.setxattr(source / "d", DEFAULT, acl(0o750, (NAMED_USER, ALICE, 5), group=5))
    for number in range(300):
        (source / f"d/{number}").write_bytes(b"")
        (source / f"d/{number}").chmod(0o600 + number % 8)
    built = build(source, tmp_path / "snapshot")
    assert (built.acls, built.acl_values) == (301, 2)


def test_the_slow_way_of_reading_lists_finds_the_same(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = guarded(tree)
    build(source, tmp_path / "one")
    monkeypatch.setattr("monarch.namespace.look._look", _look_slowly)
    build(source, tmp_path / "other")
    with Snapshot.open(tmp_path / "one") as one, Snapshot.open(tmp_path / "other") as other:
        assert dict(lists_of(one)) == dict(lists_of(other)) != {}


@pytest.mark.promise(123)
@pytest.mark.parametrize("fast", [True, False], ids=["extension", "python"])
def test_a_source_without_lists_is_asked_once_for_all_its_entries(
    source: Path, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """To ask for a list the kernel looks the name up again."""
    directories = 50
    tree({f"d{n:02}/f": b"" for n in range(directories)})
    if not fast:
        monkeypatch.setattr("monarch.namespace.look._look", _look_slowly)
    # Here the kernel keeps no attributes: each look is a call that is counted.
    with SlowSource(source, tmp_path / "without", attribute_s=0) as slow:
        before = slow.counters()["getattr"]
        built = build(slow.path, tmp_path / "snapshot")
        looks = slow.counters()["getattr"] - before
    assert built.acls == 0
    entries = 1 + 2 * directories
    assert looks < 3 * entries + 10


@pytest.mark.promise(20, 49)
@pytest.mark.modes("relay")
def test_access_control_lists_are_looked_up_where_an_older_snapshot_has_none(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    source = guarded(tree)
    mounted = monarch.mount(source)
    mounted.umount()
    ours, given = mounted.state / "snapshot.lmdb", tmp_path / "given"
    make_older(ours)
    shutil.copy(ours, given)
    mounted = monarch.mount(source)
    assert xattrs(mounted.path / "named") == xattrs(source / "named")
    mounted.umount()
    monarch.expects_log("mode bits alone")
    mounted = monarch.mount(source, snapshot=given, state=tmp_path / "other")
    assert "mode bits alone decide; run: monarch snapshot refresh" in mounted.log_text
    with pytest.raises(OSError) as unknown:
        os.getxattr(mounted.path / "named", ACCESS)
    assert unknown.value.errno == errno.EOPNOTSUPP


def make_older(file: Path) -> None:
    """Make a snapshot one of version 1, which has no lists."""
    with lmdb.open(str(file), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            report = json.loads(bytes(unseal(META, transaction.get(META), where="")))
            del report["acls"], report["acl_values"], report["newest_ns"]
            transaction.put(META, seal(META, json.dumps({**report, "version": 1}).encode()))
            blocks = [(key, bytes(value)) for key, value in transaction.cursor()]
            for key, value in blocks:
                if len(key) == len(INODES) + 4 and key.startswith(INODES):
                    records = np.frombuffer(unseal(key, value, where=""), RECORD).copy()
                    records["flags"] &= (1 << ACL_SHIFT) - 1
                    transaction.put(key, seal(key, records.tobytes()))
    append_trailer(file, page_bytes=os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.finding("W10", "S3")
@pytest.mark.promise(80)
@pytest.mark.modes("relay")
@needs_root
def test_a_changed_file_keeps_all_attributes_that_it_has_at_the_source(
    monarch: MonarchCommand, tree: Tree
) -> None:
    names = ("renamed", "touched", "modded", "appended", "linked", "owned", "rewritten")
    source = tree(dict.fromkeys(names, 1000))
    # Without the list its mask would be the rights of the group.
    access = acl(0o640, (NAMED_USER, ALICE, 6), group=4, mask=6)
    capability = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
    kept = {
        ACCESS: access,
        "trusted.t": b"t",
        "user.u": b"u",
        "security.capability": capability,
    }
    for name in names:
        for attribute, value in kept.items():
            os.setxattr(source / name, attribute, value)
        (source / f"{name} too").hardlink_to(source / name)
    for name in ("sparse", "sparse too"):
        with (source / name).open("wb") as file:
            file.write(b"x")
            file.truncate(8 << 20)
    blocks = (source / "sparse").stat().st_blocks
    mounted = monarch.mount(source, options=["write=absorb"])
    path = mounted.path
    for name in ("sparse", "sparse too"):
        with (path / name).open("rb+") as file:
            if name == "sparse too":
                # It is brought whole, not only its end.
                file.write(b"y")
            file.seek(0, os.SEEK_END)
            file.write(b"more")
    (path / "renamed").rename(path / "new")
    os.utime(path / "touched", ns=(10**18, 10**18))
    (path / "modded").chmod(0o660)
    with (path / "appended").open("ab") as file:
        file.write(b"more")
    with (path / "rewritten").open("rb+") as file:
        file.write(b"new")
    (path / "link").hardlink_to(path / "linked")
    os.chown(path / "owned", 0, TEAM)
    mounted.umount()
    for name, first in (("sparse", b"x"), ("sparse too", b"y")):
        assert (source / name).stat().st_blocks < blocks + 4096
        assert (source / name).read_bytes() == first.ljust(8 << 20, b"\0") + b"more"
    for name in ("new", *names[1:], "link"):
        found = {each: os.getxattr(source / name, each) for each in os.listxattr(source / name)}
        expected = dict(kept)
        if name in ("appended", "rewritten", "owned"):
            # A write takes it, and so does a change of the owner.
            del expected["security.capability"]
            found.pop("security.capability", None)
        assert found == expected, name
        other = source / ("renamed too" if name == "new" else f"{name} too")
        if name == "link":
            other = source / "linked too"
        assert os.path.samefile(source / name, other), name
    assert (source / "appended too").read_bytes() == contents("appended", 1000) + b"more"
    assert (source / "rewritten too").read_bytes() == b"new" + contents("rewritten", 1000)[3:]
