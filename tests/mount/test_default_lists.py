"""Default access control lists of the source: new entries inherit them as in a local directory."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from monarch.namespace.build import build
from monarch.namespace.namespace import Namespace
from monarch.namespace.snapshot import Snapshot
from monarch.writeback.expected import SourceLog
from monarch.writeback.object_table import content_of
from monarch.writeback.source_attributes import SourceAttributes
from tests.conftest import OPENS_ARE_REPORTED, MonarchCommand, Mounted
from tests.mount.command import needs_root, ordinary_user
from tests.mount.observe import account, objects_in, wait_until
from tests.mount.test_acl import (
    ACCESS,
    ALICE,
    BOB,
    DEFAULT,
    NAMED_GROUP,
    NAMED_USER,
    TEAM,
    acl,
    xattrs,
)
from tests.mount.test_permissions import as_another_user, reading

pytestmark = [needs_root, pytest.mark.promise(20)]

OPTIONS = ["allow_other", "write=absorb"]
_MADE_BY_A_USER = """
umask 027
cd "$0" || exit
for at in listed plain; do
    : > $at/file && mkdir $at/dir $at/dir/inner && mkfifo $at/fifo || exit
    stat -c '%n %a' $at/file $at/dir $at/dir/inner $at/fifo
done
"""


def drained(mounted: Mounted) -> None:
    wait_until(lambda: not account(mounted)["writing"]["operations"], "it is not drained")


def default_lists(top: Path) -> None:
    """Directories with default lists, and one without, in which ALICE may make entries."""
    alice = (NAMED_USER, ALICE, 7)
    for name, default in (
        ("listed", acl(0o750, alice, (NAMED_GROUP, TEAM, 5), group=4)),
        ("masked", acl(0o707, alice, (NAMED_USER, BOB, 6), group=7, mask=4)),
        ("short", short_list(0o754)),
        ("plain", b""),
    ):
        directory = top / name
        directory.mkdir(parents=True)
        directory.chmod(0o755)
        (directory / "older").write_bytes(b"older")
        (directory / "older").chmod(0o660)
        os.chown(directory / "older", ALICE, ALICE)
        os.setxattr(directory, ACCESS, acl(0o755, alice, group=5))
        if default:
            os.setxattr(directory, DEFAULT, default)
        before = os.umask(0)
        (directory / "old").write_bytes(b"old")
        (directory / "over").write_bytes(b"over")
        os.umask(before)
        for each in ("old", "over"):
            os.chown(directory / each, ALICE, ALICE)


def short_list(mode: int) -> bytes:
    """A list that has the same entries as the bits of a mode."""
    tags = ((1, mode >> 6), (4, mode >> 3), (32, mode))
    entries = (struct.pack("<HHI", tag, bits & 7, 2**32 - 1) for tag, bits in tags)
    return struct.pack("<I", 2) + b"".join(entries)


def made_by_alice(directory: Path, top: str, umask: int) -> Mapping[str, str]:
    """New entries, and entries that move into and out of directories with default lists."""

    def make(at: str) -> None:
        write(f"{top}/{at}/file")
        write(f"{top}/{at}/program", 0o777)
        write(f"{top}/{at}/secret", 0o600)
        write(f"{top}/{at}/old")
        with open(f"{top}/{at}/older", "wb") as older:
            older.write(b"new")
        os.mkdir(f"{top}/{at}/dir")
        os.mkdir(f"{top}/{at}/dir/closed", 0o700)
        write(f"{top}/{at}/dir/file")
        os.mkdir(f"{top}/{at}/dir/inner")
        write(f"{top}/{at}/dir/inner/file")
        os.symlink("file", f"{top}/{at}/symlink")
        os.mknod(f"{top}/{at}/node", stat.S_IFREG | 0o666)
        os.mkfifo(f"{top}/{at}/fifo")
        write(f"{top}/{at}/changed")
        os.chmod(f"{top}/{at}/changed", 0o640)

    def move(at: str, to: str) -> None:
        name = f"of {at}"
        write(f"{top}/{at}/{name}")
        os.rename(f"{top}/{at}/{name}", f"{top}/{to}/{name}")
        write(f"{top}/{at}/again")
        os.rename(f"{top}/{at}/again", f"{top}/{to}/{name} again")
        write(f"{top}/{to}/{name} again")
        write(f"{top}/{at}/over")
        os.rename(f"{top}/{at}/over", f"{top}/{to}/over {name}")
        write(f"{top}/{at}/linked")
        os.link(f"{top}/{at}/linked", f"{top}/{to}/{name} linked")
        os.unlink(f"{top}/{at}/linked")
        write(f"{top}/{to}/{name} linked")
        os.mkdir(f"{top}/{at}/{name} moved")
        os.rename(f"{top}/{at}/{name} moved", f"{top}/{to}/{name} moved")
        write(f"{top}/{to}/{name} moved/file")

    places = ["listed", "masked", "short", "plain"]
    attempts: dict[str, Callable[[], object]] = {"umask": lambda: os.umask(umask)}
    attempts |= {at: lambda at=at: make(at) for at in places}  # type: ignore[misc]
    for at in places:
        for to in places:
            if at != to:
                attempts[f"{at} to {to}"] = lambda at=at, to=to: move(at, to)  # type: ignore[misc]
    return as_another_user(directory, attempts, uid=ALICE)


def rights(directory: Path, top: str) -> dict[str, object]:
    """All entries with their modes, owners and lists, and which of them other users may use."""
    found: dict[str, object] = {}
    attempts: dict[str, Callable[[], object]] = {}
    for path in sorted((directory / top).rglob("*")):
        name, now = os.fspath(path.relative_to(directory / top)), path.lstat()
        if name.startswith(".monarch-leases"):
            continue
        if stat.S_ISLNK(now.st_mode):
            found[name] = os.readlink(path)
            continue
        found[name] = oct(now.st_mode), now.st_uid, now.st_gid, now.st_nlink, xattrs(path)
        for right in (os.R_OK, os.W_OK, os.X_OK):
            attempts[f"{name}: {right}"] = asking(f"{top}/{name}", right)
        if stat.S_ISREG(now.st_mode):
            attempts[f"{name}: read"] = reading(f"{top}/{name}")
    for uid in (BOB, TEAM, 65534):
        outcomes = as_another_user(directory, attempts, uid=uid)
        found |= {f"{name} by {uid}": outcome for name, outcome in outcomes.items()}
    return found


def asking(path: str, right: int) -> Callable[[], object]:
    def ask() -> None:
        if not os.access(path, right):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    return ask


def write(path: str, mode: int = 0o666) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    os.write(fd, b"bytes")
    os.close(fd)


@pytest.mark.modes(*OPENS_ARE_REPORTED)
@pytest.mark.parametrize("umask", [0, 0o077], ids=oct)
def test_new_entries_inherit_default_lists_as_in_a_local_directory(
    monarch: MonarchCommand, source: Path, tmp_path: Path, umask: int
) -> None:
    local = tmp_path / "local"
    for top in (source, local):
        default_lists(top)
    mounted = monarch.mount(source, options=OPTIONS)
    for name in ("local", "mnt"):
        assert {*(outcomes := made_by_alice(tmp_path, name, umask)).values()} == {"done"}, outcomes
    expected = rights(tmp_path, "local")
    assert {"done", "EACCES"} <= {each for each in expected.values() if isinstance(each, str)}
    assert rights(tmp_path, "mnt") == expected
    with pytest.raises(OSError) as refused:
        os.open(mounted.path / "listed", os.O_TMPFILE | os.O_RDWR)
    assert refused.value.errno == errno.EOPNOTSUPP
    drained(mounted)
    assert rights(tmp_path, "source") == expected
    assert rights(tmp_path, "mnt") == expected
    mounted.umount()
    for more in ([], ["--refresh"]):
        mounted = monarch.mount(source, options=OPTIONS, arguments=more)
        assert rights(tmp_path, "mnt") == expected
        mounted.umount()


@pytest.mark.modes("auto")
@pytest.mark.parametrize("datapath", ["python", "relay"])
def test_the_umask_counts_once_on_a_mount_of_an_ordinary_user(
    monarch: MonarchCommand, datapath: str
) -> None:
    with ordinary_user(monarch.case) as user:
        local, source, mnt = (user.mkdir(name) for name in ("local", "source", "mnt"))
        for top in (local, source):
            for name in ("listed", "plain"):
                directory = user.mkdir(f"{top.name}/{name}")
                if name == "listed":
                    os.setxattr(directory, DEFAULT, acl(0o770, (NAMED_USER, BOB, 7), group=7))
        options = ("-o", "write=absorb", "-o", f"datapath={datapath}")
        tier = f"{user.directory}/home/tier:64MiB"
        done = user("mount", str(source), str(mnt), "--tier", tier, *options)
        assert done.returncode == 0, done.stderr
        shown = {}
        for top in (local, mnt):
            done = user.run("sh", "-c", _MADE_BY_A_USER, str(top))
            assert done.returncode == 0, done.stderr
            shown[top] = [line.split() for line in done.stdout.splitlines()]
        assert user("umount", str(mnt)).returncode == 0
    if datapath == "python":
        # The kernel has applied it before.
        shown[local] = [
            [name, f"{int(mode, 8) & ~0o027:o}" if name.startswith("listed/") else mode]
            for name, mode in shown[local]
        ]
    assert shown[mnt] == shown[local]
    assert len(shown[local]) == 8


@pytest.mark.modes("python", "relay")
def test_a_killed_mount_drains_the_lists_of_new_entries(
    monarch: MonarchCommand, source: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    for top in (source, local):
        default_lists(top)
    tiers = {"fast": "64MiB"}
    mounted = monarch.mount(source, tiers=tiers, options=[*OPTIONS, "writeback.bandwidth=100KiB"])
    # The drain may write 8 MiB before it is held to its bandwidth.
    for top in (local, mounted.path):
        (top / "first").write_bytes(b"n" * 10_000_000)
    for name in ("local", "mnt"):
        assert {*(outcomes := made_by_alice(tmp_path, name, 0o022)).values()} == {"done"}, outcomes
    expected = rights(tmp_path, "local")
    assert rights(tmp_path, "mnt") == expected
    mounted.kill()
    mounted = monarch.mount(source, tiers=tiers, options=OPTIONS)
    assert rights(tmp_path, "mnt") == expected
    drained(mounted)
    assert rights(tmp_path, "source") == expected
    assert rights(tmp_path, "mnt") == expected
    mounted.umount()


@pytest.mark.modes("python", "relay")
def test_a_written_file_keeps_its_list_when_it_is_read_from_the_source_again(
    monarch: MonarchCommand, source: Path, tmp_path: Path
) -> None:
    default_lists(source)
    tiers = {"fast": "8MiB"}
    mounted = monarch.mount(source, tiers=tiers, options=OPTIONS)
    made_by_alice(tmp_path, "mnt", 0o022)
    drained(mounted)
    expected = rights(tmp_path, "source")
    objects = len(objects_in(mounted.tiers["fast"]))
    (mounted.path / "large").write_bytes(bytes(7 << 20))
    drained(mounted)
    (mounted.path / "larger").write_bytes(bytes(7 << 20))
    # The small files were drained first, so they leave the tier first.
    left = mounted.tiers["fast"]
    wait_until(lambda: len(objects_in(left)) < objects / 2, "no object leaves the tier")
    found = rights(tmp_path, "mnt")
    assert {name: found[name] for name in expected} == expected
    changes: dict[str, Callable[[], object]] = {}
    for at in ("listed", "masked"):
        changes |= {
            f"mode in {at}": lambda at=at: os.chmod(f"mnt/{at}/file", 0o660),  # type: ignore[misc]
            f"time in {at}": lambda at=at: os.utime(f"mnt/{at}/program"),  # type: ignore[misc]
            f"attribute in {at}": lambda at=at: os.setxattr(  # type: ignore[misc]
                f"mnt/{at}/changed", "user.a", b"1"
            ),
        }
    assert {*as_another_user(tmp_path, changes, uid=ALICE).values()} == {"done"}
    for _ in range(2):
        drained(mounted)
        expected, found = (rights(tmp_path, top) for top in ("source", "mnt"))
        assert {name: found[name] for name in expected} == expected
        write(f"{mounted.path}/listed/file")
    mounted.umount()


def test_a_file_that_moves_into_a_directory_with_a_default_list_gets_none_there(
    source: Path, tmp_path: Path
) -> None:
    """Also if the drain makes it there, because a newer content has made that before needless."""
    default_lists(source)
    build(source, tmp_path / "snapshot")
    with Snapshot.open(tmp_path / "snapshot") as snapshot:
        names = Namespace(snapshot, lambda ino: None)
        plain, listed = (names.resolve(name) for name in (b"plain", b"listed"))
        assert plain is not None
        assert listed is not None
        mode, new = stat.S_IFREG | 0o666, {"uid": 0, "gid": 0, "umask": 0o022}
        node = names.make(plain, b"new", mode=mode, now_ns=1, object=7, **new)
        names.rename(plain, b"new", listed, b"new", now_ns=2)
        content = content_of(node, (b"listed/new",), size=0)
    staged = source / "listed/staged"
    staged.touch()
    assert ACCESS in xattrs(staged)
    with staged.open("r+b") as file:
        SourceAttributes(SourceLog("token")).set(file.fileno(), content)
    assert xattrs(staged) == {}
    assert stat.S_IMODE(staged.stat().st_mode) == 0o644
