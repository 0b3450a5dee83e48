"""Unpacking: the tree is the original one, and a hostile or damaged pack does no harm."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.errors import PackError, UsageError
from monarch.packs import unpack as unpacking
from monarch.packs.format import Entry
from monarch.packs.index import Index
from monarch.packs.pack import Pack
from monarch.packs.unpack import UnpackReport, unpack
from monarch.posix.files import closing_fd, empty_directory
from monarch.posix.openat2 import open_beneath
from tests.packs.test_damage import hostile, rebuilt
from tests.packs.test_format import FILE, FOLDER, NAMES
from tests.packs.trees import contents, deep_tree, make_tree, pack, shown

# User 1000 may read.
_ACL = bytes.fromhex(
    "02000000 01000700ffffffff 02000400e8030000 04000500ffffffff 10000500ffffffff 20000500ffffffff"
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change owners")


def unpacked(directory: Path, to: Path, *, set_id: bool = False) -> UnpackReport:
    return unpack(directory, to, set_id=set_id, progress=lambda done, total, words: None)


def _supports_attributes(path: Path) -> bool:
    try:
        os.setxattr(path, "user.monarch", b"1")
    except OSError:
        return False
    os.removexattr(path, "user.monarch")
    return True


@pytest.mark.promise(224)
def test_the_unpacked_tree_is_the_original_one(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, directory = made
    report = unpacked(directory, tmp_path / "again", set_id=True)
    assert report.incomplete == 0
    assert shown(tmp_path / "again") == shown(source)
    compared = subprocess.run(
        ["diff", "-r", "--no-dereference", str(source), str(tmp_path / "again")],
        check=False,
        capture_output=True,
        text=True,
    )
    # Diff does not compare fifos, and reports each.
    assert [line for line in compared.stdout.splitlines() if "fifo" not in line] == []
    assert (tmp_path / "again/sparse").stat().st_blocks * 512 < 1 << 19
    (tmp_path / "again/class2/002.jpg").write_bytes(b"other")
    assert shown(tmp_path / "again") != shown(source)


FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(b"/".join),
    st.one_of(st.none(), st.binary(max_size=300), st.just(b"long " * 200)),
    max_size=8,
)


@given(FILES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_returns_from_its_pack(files: dict[bytes, bytes | None]) -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "source").mkdir()
        for path, content in files.items():
            _make(os.fsencode(top / "source") + b"/" + path, content)
        pack(top / "source", top / "pack", chunk=512, jobs=2)
        unpacked(top / "pack", top / "again")
        assert shown(top / "again") == shown(top / "source")


def _make(path: bytes, content: bytes | None) -> None:
    """A directory without content, else a file; nothing if a file is in the way."""
    try:
        os.makedirs(path if content is None else os.path.dirname(path), exist_ok=True)
        if content is not None:
            with open(path, "xb") as file:
                file.write(content)
    except (FileExistsError, NotADirectoryError):
        return


@pytest.mark.promise(224)
def test_extended_attributes_and_acls_return(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=4)
    if not _supports_attributes(source / "large"):
        pytest.skip("this file system has no extended attributes")
    os.setxattr(source / "large", "user.label", b"\0\1 binary")
    os.setxattr(source / "class0/000.jpg", "user.label", b"x" * 100)
    (source / "class0/000.jpg").chmod(0o444)
    try:
        os.setxattr(source / "class1", "system.posix_acl_default", _ACL)
        os.setxattr(source / "large", "system.posix_acl_access", _ACL)
    except OSError:
        pytest.skip("this file system has no access control lists")
    pack(source, tmp_path / "pack")
    assert unpacked(tmp_path / "pack", tmp_path / "again", set_id=True).incomplete == 0
    assert shown(tmp_path / "again") == shown(source)
    assert os.getxattr(tmp_path / "again/class1", "system.posix_acl_default") == _ACL


@pytest.mark.promise(224)
def test_a_default_access_control_list_of_the_place_is_not_inherited(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source", files=4)
    pack(source, tmp_path / "pack")
    (tmp_path / "place").mkdir()
    try:
        os.setxattr(tmp_path / "place", "system.posix_acl_default", _ACL)
    except OSError:
        pytest.skip("this file system has no access control lists")
    # What is made there inherits it.
    (tmp_path / "place/file").touch()
    assert os.listxattr(tmp_path / "place/file")
    unpacked(tmp_path / "pack", tmp_path / "place/again", set_id=True)
    assert shown(tmp_path / "place/again") == shown(source)


# -- owners and set-ID bits ------------------------------------------------------------------------


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """This process acts as another user."""
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def _tree_with_owners(root: Path) -> Path:
    root.mkdir()
    for name, uid in (("mine", 1234), ("of another", 4321), ("of root", 0)):
        (root / name).write_bytes(name.encode())
        os.chown(root / name, uid, uid)
        (root / name).chmod(0o6755)
    return root


@pytest.mark.promise(224)
@needs_root
def test_root_restores_owners_and_set_id_bits_only_of_its_own_files_as_asked(
    tmp_path: Path,
) -> None:
    source = _tree_with_owners(tmp_path / "source")
    pack(source, tmp_path / "pack")
    unpacked(tmp_path / "pack", tmp_path / "plain")
    report = unpacked(tmp_path / "pack", tmp_path / "asked", set_id=True)
    assert {each.path for each in report.left_out} == {b"mine", b"of another"}
    for name in ("mine", "of another", "of root"):
        status = (tmp_path / "plain" / name).stat()
        assert (status.st_uid, status.st_gid) == (
            *((source / name).stat().st_uid, (source / name).stat().st_gid),
        )
        assert stat.S_IMODE(status.st_mode) == 0o755
        mode = stat.S_IMODE((tmp_path / "asked" / name).stat().st_mode)
        assert mode == (0o6755 if name == "of root" else 0o755)


@needs_root
def test_another_user_owns_all_files_that_it_unpacks() -> None:
    # The directories of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o777)
        source = _tree_with_owners(top / "source")
        pack(source, top / "pack")
        subprocess.run(["chmod", "-R", "a+rX", str(top / "pack")], check=True)
        with as_user(1234):
            unpacked(top / "pack", top / "plain")
            unpacked(top / "pack", top / "asked", set_id=True)
        for path in (*(top / "plain").iterdir(), *(top / "asked").iterdir()):
            status = path.stat()
            assert (status.st_uid, status.st_gid) == (1234, 1234)
            expected = 0o6755 if path == top / "asked/mine" else 0o755
            assert stat.S_IMODE(status.st_mode) == expected


@needs_root
@pytest.mark.promise(224)
@pytest.mark.parametrize("field", ["uid", "gid"])
def test_an_owner_that_no_file_can_have_is_listed(tmp_path: Path, field: str) -> None:
    entry = Entry(b"of no one", FILE | 0o6755)._replace(**{field: (1 << 32) - 1})
    top = hostile(tmp_path, [Entry(b"", FOLDER), entry], [])
    rebuilt(top)
    report = unpacked(top, tmp_path / "tree", set_id=True)
    ((path, what),) = report.left_out
    assert (path, "cannot be set" in what) == (b"of no one", True)
    assert stat.S_IMODE((tmp_path / "tree/of no one").stat().st_mode) == 0o755


@needs_root
def test_owners_that_this_root_may_not_set_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _tree_with_owners(tmp_path / "source")
    os.symlink("mine", source / "link")
    os.lchown(source / "link", 4321, 4321)
    pack(source, tmp_path / "pack")

    def refuses(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: Any, uid: int, gid: int, **options: Any) -> None:
            if uid == 4321:
                # Not mapped in the user namespace of a container.
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            change(*args, uid, gid, **options)

        return changed

    monkeypatch.setattr(unpacking.os, "fchown", refuses(os.fchown))
    monkeypatch.setattr(unpacking.os, "chown", refuses(os.chown))
    report = unpacked(tmp_path / "pack", tmp_path / "again")
    assert {each.path for each in report.left_out} == {b"of another", b"link"}
    assert all("owner 4321:4321" in each.what for each in report.left_out)
    assert contents(tmp_path / "again") == contents(source)
    assert (tmp_path / "again/mine").stat().st_uid == 1234


@needs_root
def test_set_id_bits_are_not_set_if_the_owner_cannot_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the program would have the rights of a group that it does not have in the pack."""
    source = tmp_path / "source"
    (source / "directory").mkdir(parents=True)
    (source / "program").touch()
    os.mkfifo(source / "fifo")
    names = ("directory", "program", "fifo")
    for name in names:
        os.chown(source / name, 0, 4321)
        (source / name).chmod(0o6755)
    pack(source, tmp_path / "pack")

    def refuse(path: object, uid: int, gid: int, **options: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(unpacking.os, "fchown", refuse)
    monkeypatch.setattr(unpacking.os, "chown", refuse)
    report = unpacked(tmp_path / "pack", tmp_path / "again", set_id=True)
    assert {os.fsencode(name) for name in names} <= {each.path for each in report.left_out}
    modes = [stat.S_IMODE((tmp_path / "again" / name).stat().st_mode) for name in names]
    assert modes == [0o755] * 3


@pytest.mark.promise(224)
@needs_root
def test_a_device_file_is_packed_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    os.mknod(tmp_path / "source/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    pack(tmp_path / "source", tmp_path / "pack")
    with Pack.open(os.fsencode(tmp_path / "pack")) as opened:
        record = opened.record(opened.number(b"null"))
        assert stat.S_ISCHR(record.mode)
        assert record.offset == os.makedev(1, 3)
    report = unpacked(tmp_path / "pack", tmp_path / "again")
    assert [each.path for each in report.left_out] == [b"null"]
    assert list((tmp_path / "again").iterdir()) == []


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.promise(224)
def test_a_damaged_file_leaves_nothing_behind(own: Path, tmp_path: Path) -> None:
    chunk = own / "chunks/000002.chunk"
    raw = bytearray(chunk.read_bytes())
    raw[-1] ^= 1
    chunk.write_bytes(raw)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PackError, match=r"is damaged; .*pack verify"):
        unpacked(own, tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.promise(224)
def test_a_damaged_file_in_a_deep_tree_leaves_nothing_behind(tmp_path: Path) -> None:
    """There are more directories than a function of Python can call itself."""
    with deep_tree(tmp_path / "source", "d", 1200) as source:
        pack(source, tmp_path / "pack")
    os.truncate(tmp_path / "pack/chunks/000000.chunk", 100)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PackError, match="cut off"):
        unpacked(tmp_path / "pack", tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == before


def test_a_deep_tree_takes_few_steps_for_each_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 300
    with deep_tree(tmp_path / "source", "d", depth) as source:
        pack(source, tmp_path / "pack")
    steps = 0

    def open_counted(directory: int, path: bytes, flags: int) -> int:
        nonlocal steps
        steps += 1 + path.count(b"/")
        return open_beneath(directory, path, flags)

    def name_counted(index: Index, number: int) -> bytes:
        nonlocal steps
        steps += 1
        return name(index, number)

    name = Index.name
    monkeypatch.setattr(unpacking, "open_beneath", open_counted)
    monkeypatch.setattr(Index, "name", name_counted)
    unpacked(tmp_path / "pack", tmp_path / "again")
    with closing_fd(os.open(tmp_path / "again", os.O_RDONLY | os.O_DIRECTORY)) as top:
        with closing_fd(open_beneath(top, b"d/" * depth + b"file", os.O_RDONLY)) as file:
            assert os.read(file, 10) == b"deep"
        empty_directory(top)
    # Each is made, opened for the next one, and opened for its attributes. With a path from the
    # root each time, the mean would be above 300.
    assert steps <= 20 * depth


@pytest.mark.promise(224)
def test_the_tree_gets_its_name_when_it_is_on_the_disk(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synced(fd: int) -> None:
        # All but the root has its final attributes.
        assert not (tmp_path / "again").exists()
        assert sorted(os.listdir(fd)) == sorted(os.listdir(tmp_path / "first"))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    unpacked(own, tmp_path / "first")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(unpacking, "sync_file_system", synced)
    with pytest.raises(PackError, match="cannot be written: Input/output error"):
        unpacked(own, tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == before


def test_a_tree_may_have_the_longest_name(own: Path, tmp_path: Path) -> None:
    name = "ü" * 127 + "x"
    unpacked(own, tmp_path / name)
    assert (tmp_path / name / "large").exists()


def test_a_directory_in_use_is_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for to in ("mine", "mine/file", "link", "own/new", "own"):
        with pytest.raises(UsageError):
            unpacked(own, tmp_path / to)
    with pytest.raises(PackError):
        unpacked(own, tmp_path / "missing/below")
    assert (tmp_path / "mine/file").read_bytes() == b"mine"
    (tmp_path / "empty").mkdir()
    unpacked(own, tmp_path / "empty")
    assert (tmp_path / "empty/large").exists()
