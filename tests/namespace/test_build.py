"""A snapshot has the results of ``lstat`` and ``readlink`` for each entry of any tree."""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.errors import SnapshotError, SourceError, UsageError
from monarch.namespace import build as build_module
from monarch.namespace.build import build
from monarch.namespace.numbering import Batch
from monarch.namespace.refresh import refresh
from monarch.namespace.scan import Scan
from monarch.namespace.snapshot import Snapshot
from monarch.posix.buckets import BUCKETS, bucket
from monarch.types import ROOT_INO, Ino
from tests.equipment import slowfs
from tests.equipment.waiting import wait_until
from tests.namespace.conftest import Taken

HOSTILE = [
    b"with space",
    b"new\nline",
    b"\x1b[31mred",
    b"not utf-8 \xff\xfe",
    b"x" * 255,
    b".part",
    b"copy.part",
    b"...",
    b"-rf",
    b"\\x41",
    "ünïcode".encode(),
    "\U0001f600".encode(),
]


def entries_of(source: Path) -> dict[bytes, os.stat_result]:
    """Every path beneath ``source`` by ``os.walk``, with its ``lstat`` result."""
    root = os.fsencode(source)
    found = {b"": os.lstat(root)}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, root)] = os.lstat(path)
    return found


def paths_of(snapshot: Snapshot) -> list[bytes]:
    return [snapshot.path(Ino(slot)) for slot in range(1, snapshot.entries + 1)]


def assert_same(snapshot: Snapshot, source: Path) -> None:
    expected = entries_of(source)
    assert sorted(paths_of(snapshot)) == sorted(expected)
    for path, status in expected.items():
        ino = snapshot.resolve(path)
        assert ino is not None, path
        found = snapshot.attributes(ino)
        assert found.ino == ino
        assert (found.mode, found.nlink, found.uid, found.gid, found.size) == (
            status.st_mode,
            status.st_nlink,
            status.st_uid,
            status.st_gid,
            status.st_size,
        ), path
        assert (found.mtime_ns, found.ctime_ns, found.source_ino) == (
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
        ), path
        if stat.S_ISREG(status.st_mode):
            assert found.blocks == status.st_blocks
        if stat.S_ISLNK(status.st_mode):
            assert snapshot.readlink(ino) == os.readlink(os.path.join(os.fsencode(source), path))
        if stat.S_ISDIR(status.st_mode):
            names = sorted(os.listdir(os.path.join(os.fsencode(source), path)))
            assert snapshot.names(ino) == names
            listed = list(snapshot.list_from(ino, 0))
            assert [name for name, _ in listed] == names
            assert all(
                attributes == snapshot.attributes(attributes.ino) for _, attributes in listed
            )
            assert [attributes.ino for _, attributes in listed] == [
                snapshot.lookup(ino, name) for name in names
            ]


def test_every_kind_of_entry(source: Path, taken: Taken, workers: str) -> None:
    for name in HOSTILE:
        (source / os.fsdecode(name)).write_bytes(name)
    for name in HOSTILE:
        directory = source / "dirs" / os.fsdecode(name)
        directory.mkdir(parents=True)
        (directory / os.fsdecode(name)).touch()
    (source / "empty").mkdir()
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as endpoint, open_root(str(source)) as fd:
        # A path of a socket is 107 bytes at most.
        endpoint.bind(f"/proc/self/fd/{fd}/socket")
    (source / "link").symlink_to(b"any/where \xff".decode(errors="surrogateescape"))
    (source / "long link").symlink_to("t" * 4000)
    (source / "dangling").symlink_to("nothing")
    (source / "to a directory").symlink_to("dirs")
    with open(source / "sparse", "wb") as sparse:
        sparse.truncate(1 << 40)
    (source / "modes").touch()
    (source / "modes").chmod(0o4755)
    os.utime(source / "modes", ns=(1, -1_000_000_007))
    snapshot = taken(source)
    assert_same(snapshot, source)
    info = snapshot.info()
    assert info.others == 2
    assert info.symlinks == 4
    assert info.largest == 1 << 40
    assert info.unreadable == 0
    assert info.files + info.directories + info.symlinks + info.others == info.entries


def test_an_empty_source(source: Path, taken: Taken) -> None:
    snapshot = taken(source)
    assert_same(snapshot, source)
    assert snapshot.entries == snapshot.info().directories == 1
    assert snapshot.attributes(ROOT_INO).parent == ROOT_INO


def test_numbers_are_dense_and_children_consecutive_and_sorted(
    source: Path, taken: Taken, workers: str
) -> None:
    for top in "cab":
        for name in ("z", "y"):
            (source / top / name).mkdir(parents=True)
            (source / top / name / "file").touch()
    snapshot = taken(source)
    assert [snapshot.path(Ino(slot)) for slot in range(1, 17)] == [
        b"",
        b"a",
        b"b",
        b"c",
        b"a/y",
        b"a/z",
        b"b/y",
        b"b/z",
        b"c/y",
        b"c/z",
        b"a/y/file",
        b"a/z/file",
        b"b/y/file",
        b"b/z/file",
        b"c/y/file",
        b"c/z/file",
    ]


def test_a_wide_directory_over_several_blocks(source: Path, taken: Taken, workers: str) -> None:
    for number in range(4400):
        os.close(os.open(source / f"{number:05}", os.O_CREAT | os.O_WRONLY))
    (source / "00000").write_bytes(b"first")
    snapshot = taken(source)
    listed = list(snapshot.list_from(ROOT_INO, 0))
    assert [name for name, _ in listed] == [b"%05d" % number for number in range(4400)]
    for start in (0, 1, 127, 128, 4094, 4095, 4096, 4399, 4400, 4401):
        assert list(snapshot.list_from(ROOT_INO, start)) == listed[start:]
    assert snapshot.attributes(Ino(2)).size == 5
    assert snapshot.lookup(ROOT_INO, b"04399") == 4401
    assert snapshot.lookup(ROOT_INO, b"04400") is None


def test_many_directories_and_links_over_several_blocks(source: Path, taken: Taken) -> None:
    for number in range(4100):
        os.mkdir(source / f"d{number:04}")
        os.symlink(f"d{number:04}", source / f"l{number:04}")
    (source / "d4099" / "last").touch()
    snapshot = taken(source)
    assert snapshot.resolve(b"d4099/last") == snapshot.entries == 8202
    for number in (0, 4094, 4095, 4096, 4099):
        ino = snapshot.resolve(b"l%04d" % number)
        assert ino is not None and snapshot.readlink(ino) == b"d%04d" % number
        directory = snapshot.resolve(b"d%04d" % number)
        assert directory is not None
        assert len(snapshot.children(directory)) == (number == 4099)


def test_paths_longer_than_the_kernel_takes(source: Path, taken: Taken, workers: str) -> None:
    fd = os.open(source, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.symlink("target", "link", dir_fd=fd)
    os.close(fd)
    snapshot = taken(source)
    path = b"/".join([b"d" * 200] * 30) + b"/link"
    ino = snapshot.resolve(path)
    assert ino == snapshot.entries == 32
    assert snapshot.path(ino) == path
    assert snapshot.readlink(ino) == b"target"


def test_hard_links_are_one_file(source: Path, taken: Taken, workers: str) -> None:
    (source / "b" / "c").mkdir(parents=True)
    (source / "b" / "name").write_bytes(b"same")
    os.link(source / "b" / "name", source / "a")
    os.link(source / "b" / "name", source / "b" / "c" / "third")
    (source / "link").symlink_to("target")
    os.link(source / "link", source / "b" / "link", follow_symlinks=False)
    (source / "other").symlink_to("elsewhere")
    snapshot = taken(source)
    assert_same(snapshot, source)
    inos = {snapshot.resolve(path) for path in (b"a", b"b/name", b"b/c/third")}
    assert inos == {snapshot.slot(ROOT_INO, b"a")}
    info = snapshot.info()
    assert (info.files, info.aliases, info.symlinks, info.bytes_total) == (1, 3, 2, 4)
    alias = snapshot.resolve(b"b/link")
    assert alias is not None and snapshot.readlink(alias) == b"target"
    assert [found.ino for _, found in snapshot.walk()] == [snapshot.resolve(b"a")] * 3


def test_the_totals(source: Path, taken: Taken) -> None:
    sizes = [0, 0, 1, 2, 3, 4, 1023, 1024, 5000]
    expected = np.zeros(BUCKETS, dtype=np.uint64)
    for number, size in enumerate(sizes):
        path = source / str(number)
        path.write_bytes(bytes(size))
        expected[bucket(path.stat().st_ino)] += size
    snapshot = taken(source)
    info = snapshot.info()
    assert info.bytes_total == snapshot.bytes_total == sum(sizes)
    assert info.files == snapshot.files == len(sizes)
    assert info.largest == 5000
    assert info.sizes == ((0, 2), (1, 1), (2, 2), (3, 1), (10, 1), (11, 1), (13, 1))
    assert np.array_equal(snapshot.curve(), expected)
    assert info.source == os.fsencode(source)
    assert abs(info.created_ns - time.time_ns()) < 60e9
    total = sum(int(records["size"].sum()) for _, records in snapshot.records())
    assert total == sum(sizes) + snapshot.attributes(ROOT_INO).size


def test_the_same_tree_gets_the_same_numbers(
    source: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for top in range(20):
        for name in range(top):
            path = source / f"{top}" / f"{name % 3}" / f"{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    tables = []
    for jobs in (1, 8, 32):
        if jobs > 1:
            monkeypatch.setattr("monarch.namespace.scan._is_waiting", lambda mean, done: True)
        build(source, file, jobs=jobs)
        with Snapshot.open(file) as snapshot:
            records = [records.tobytes() for _, records in snapshot.records()]
            tables.append((paths_of(snapshot), records, snapshot.id))
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({identity for _, _, identity in tables}) == 3


NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
TREES = st.recursive(
    st.binary(max_size=20),
    lambda below: st.dictionaries(NAMES, below, max_size=6),
    max_leaves=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=st.dictionaries(NAMES, TREES, max_size=6), threads=st.booleans())
def test_any_tree(tree: dict[bytes, object], threads: bool) -> None:
    def create(directory: bytes, content: dict[bytes, object]) -> None:
        for name, below in content.items():
            path = directory + b"/" + name
            if isinstance(below, dict):
                os.mkdir(path)
                create(path, below)
            else:
                assert isinstance(below, bytes)
                with open(path, "wb") as created:
                    created.write(below)

    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        if threads:
            patch.setattr("monarch.namespace.scan._SLICE_FIRST", 1)
            patch.setattr("monarch.namespace.scan._is_waiting", lambda mean, done: True)
        root = Path(scratch, "source")
        root.mkdir()
        create(os.fsencode(root), tree)
        build(root, Path(scratch, "snapshot"))
        with Snapshot.open(Path(scratch, "snapshot")) as snapshot:
            assert_same(snapshot, root)


def build_in_child_as_user(source: Path, file: Path) -> None:
    """Builds without the privileges of root, which may read everything."""
    file.parent.chmod(0o777)
    for parent in source.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            build(source, file)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def locked(source: Path) -> Iterator[Path]:
    source.chmod(0o755)
    for name in ("closed", "open", "names only"):
        (source / name / "below").mkdir(parents=True)
        (source / name / "file").touch()
    (source / "closed").chmod(0o000)
    (source / "names only").chmod(0o744)
    yield source
    (source / "closed").chmod(0o755)
    (source / "names only").chmod(0o755)


@pytest.mark.fault("S7")
def test_unreadable_entries_are_shown_and_counted(locked: Path, file: Path, workers: str) -> None:
    if os.getuid() != 0:
        (locked / "names only").chmod(0o400)
    build_in_child_as_user(locked, file)
    with Snapshot.open(file) as snapshot:
        assert sorted(paths_of(snapshot)) == [
            b"",
            b"closed",
            b"names only",
            b"names only/below",
            b"names only/file",
            b"open",
            b"open/below",
            b"open/file",
        ]
        closed = snapshot.resolve(b"closed")
        assert closed is not None and snapshot.unreadable(closed)
        assert snapshot.attributes(closed).mode == stat.S_IFDIR
        assert snapshot.names(closed) == []
        below = snapshot.resolve(b"names only/below")
        assert below is not None and snapshot.unreadable(below)
        assert snapshot.attributes(below).is_dir
        hidden = snapshot.resolve(b"names only/file")
        assert hidden is not None and snapshot.attributes(hidden).is_file
        opened = snapshot.resolve(b"open")
        assert opened is not None and not snapshot.unreadable(opened)
        info = snapshot.info()
        assert set(info.unreadable_paths) == {"closed", "names only/below", "names only/file"}


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_source_that_is_no_directory(source: Path, file: Path, kind: str) -> None:
    if kind == "file":
        (source / "nothing").touch()
    with pytest.raises(SourceError, match="cannot open the source") as failure:
        build(source / "nothing", file)
    assert failure.value.errno == (errno.ENOTDIR if kind == "file" else errno.ENOENT)
    assert failure.value.hint
    assert list(file.parent.iterdir()) == []


def test_a_target_whose_directory_is_missing(source: Path, file: Path) -> None:
    with pytest.raises(SnapshotError, match="there is no directory"):
        build(source, file.parent / "missing" / "snapshot")


def test_a_target_that_is_a_directory(source: Path, file: Path) -> None:
    file.mkdir()
    with pytest.raises(SnapshotError, match="cannot write snapshot"):
        build(source, file)
    assert list(file.parent.iterdir()) == [file]


def test_a_replaced_snapshot_keeps_its_mode(source: Path, file: Path) -> None:
    build(source, file)
    file.chmod(0o600)
    build(source, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.promise(100)
@pytest.mark.finding("D10")
def test_a_new_snapshot_is_closed_to_others_unless_a_mode_is_given(
    source: Path, file: Path
) -> None:
    def mode() -> int:
        return stat.S_IMODE(file.stat().st_mode)

    before = os.umask(0o022)
    try:
        build(source, file)
        assert mode() == 0o600
        build(source, file, mode=0o644)
        assert mode() == 0o644
        build(source, file)
        refresh(source, file)
        assert mode() == 0o644
        if os.geteuid() == 0:
            os.chown(file, 1234, 1235)
            refresh(source, file)
            assert (mode(), file.stat().st_uid, file.stat().st_gid) == (0o644, 1234, 1235)
    finally:
        os.umask(before)


@pytest.mark.fault("Security")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_root_changes_no_file_that_a_user_puts_in_place_of_an_unfinished_snapshot(
    source: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(source, file, mode=0o644)
    os.chown(file, 1234, 1235)
    victim = tmp_path / "victim"
    victim.touch(0o600)
    append_trailer = build_module.append_trailer

    def swapped(path: Path, *, page_bytes: int) -> None:
        append_trailer(path, page_bytes=page_bytes)
        (part,) = file.parent.glob(f"{file.name}.*.part")
        part.unlink()
        part.symlink_to(victim)

    monkeypatch.setattr(build_module, "append_trailer", swapped)
    with contextlib.suppress(SnapshotError):
        refresh(source, file)
    status = victim.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size) == (0, 0o600, 0)


@pytest.mark.fault("S15")
@pytest.mark.finding("B21")
def test_temporary_files_of_a_killed_build_are_removed_and_those_of_a_running_one_kept(
    source: Path, file: Path
) -> None:
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_module, "append_trailer", lambda *_, **__: os.kill(os.getpid(), 9))
            build(source, file)
        os._exit(0)
    os.waitpid(child, 0)
    (left,) = file.parent.iterdir()
    assert left.name.endswith(".part") and left.stat().st_mode & 0o777 == 0o600

    living: list[Path] = []

    def beside(done: int, total: int | None, words: str) -> None:
        # Another node's build of the same file begins and ends while this one is under way.
        if not living:
            living.extend(file.parent.iterdir())
            build(source, file)

    (source / "one").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "_PROGRESS_SECONDS", 0)
        build(source, file, progress=beside)
    assert len(living) == 1 and left not in living
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.finding("B22")
def test_a_snapshot_inside_its_own_source_is_refused(source: Path, file: Path) -> None:
    (source / "below").mkdir()
    (file.parent / "link").symlink_to(source / "below")
    for inside in (source / "x", source / "below/x", file.parent / "link/x"):
        with pytest.raises(UsageError, match="would be inside its source"):
            build(source, inside)
    assert os.listdir(source) == ["below"] and os.listdir(source / "below") == []
    build(source, file)
    inside = file.rename(source / "x")
    with pytest.raises(UsageError, match="would be inside its source"):
        refresh(source, inside)


def test_a_full_disk_leaves_the_old_snapshot_and_nothing_else(source: Path, file: Path) -> None:
    (source / "one").touch()
    build(source, file)
    code = (
        "import resource, signal, sys; from pathlib import Path;"
        "from monarch.namespace.build import build; from monarch.errors import SnapshotError;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try: build(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except SnapshotError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source, file], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"cannot write snapshot {file}: "), done
    assert list(file.parent.iterdir()) == [file]
    with Snapshot.open(file) as snapshot:
        assert snapshot.entries == 2


@pytest.mark.fault("S8")
def test_another_file_system_is_not_entered_if_so_asked(source: Path, file: Path) -> None:
    if os.stat("/").st_dev == os.stat("/proc").st_dev:
        pytest.skip("/proc is not a file system of its own")
    (source / "before").mkdir()
    with open_root("/") as fd:
        directories = set()
        with Scan(fd, jobs=1, one_file_system=True) as scan:
            for batch in scan.batches():
                directories.add(batch.path)
                if b"proc" in batch.path.split(b"/")[:1]:
                    assert batch.path == b"proc" and batch.names == []
                    break
    assert b"proc" in directories


@contextlib.contextmanager
def open_root(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_tree_that_changes_during_the_scan(source: Path, file: Path, workers: str) -> None:
    """Whatever vanishes between its listing and its look is left out, and nothing else."""
    for top in range(30):
        (source / f"{top:02}").mkdir()
        for name in range(20):
            (source / f"{top:02}" / f"{name:02}").touch()
    (source / "00" / "kept").touch()
    with open_root(str(source)) as fd, Scan(fd, jobs=4) as scan:
        paths = []
        for batch in scan.batches():
            paths += [batch.path + b"/" + name for name in batch.names]
            if batch.path == b"00":
                for name in range(20):
                    (source / "29" / f"{name:02}").unlink()
                (source / "29").rmdir()
                (source / "28" / "00").unlink()
    assert b"00/kept" in paths
    assert b"27/19" in paths
    assert b"/29" in paths
    if workers == "alone":
        assert b"28/00" not in paths and b"28/01" in paths
        assert b"29/00" not in paths


def test_an_entry_that_vanishes_between_listing_and_lstat_is_left_out(source: Path) -> None:
    for name in range(200):
        (source / f"{name:03}").touch()
    with open_root(str(source)) as fd, Scan(fd, jobs=1) as scan:
        batches = scan.batches()
        next(batches)
        names = next(batches).names
        assert names[0] == b"000" and b"150" not in names
        (source / "150").unlink()
        (source / "151").unlink()
        (source / "151").symlink_to("target")
        for batch in batches:
            names += batch.names
    assert names == [b"%03d" % name for name in range(200) if name != 150]


def test_builds_of_one_target_at_the_same_time(source: Path, file: Path) -> None:
    for name in range(3000):
        (source / f"{name}").touch()
    code = (
        "import sys; from pathlib import Path; from monarch.namespace.build import build;"
        "[build(Path(sys.argv[1]), Path(sys.argv[2])) for _ in range(5)]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, source, file]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert list(file.parent.iterdir()) == [file]
    with Snapshot.open(file) as snapshot:
        assert snapshot.entries == 3001


def test_an_interrupt_leaves_nothing(source: Path, file: Path, workers: str) -> None:
    for name in range(500):
        (source / f"{name}").mkdir()

    class Interrupted(KeyboardInterrupt):
        pass

    parts = []

    def interrupt(done: int, total: int | None, words: str) -> None:
        parts.extend(file.parent.iterdir())
        raise Interrupted

    before, threads = len(os.listdir("/proc/self/fd")), _thread._count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("monarch.namespace.build._PROGRESS_SECONDS", 0)
        with pytest.raises(Interrupted):
            build(source, file, progress=interrupt)
    assert [path.name.endswith(".part") for path in parts] == [True]
    assert list(file.parent.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    wait_until(lambda: _thread._count() <= threads, "the threads have ended")


def test_control_c_leaves_nothing(tmp_path: Path, file: Path) -> None:
    source = tmp_path / "large"
    source.mkdir()
    for top in range(20):
        (source / f"{top}").mkdir()
        for name in range(200):
            os.symlink("x", source / f"{top}" / f"{name}")
    code = (
        "import os, sys; from pathlib import Path; from monarch.namespace.build import build\n"
        # The first build imports modules, and Python ignores an exception at the end of an import.
        "build(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print('ready', flush=True)\n"
        "while os.getppid() == int(sys.argv[3]): build(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    errors = tmp_path / "errors"
    with errors.open("w") as stderr, contextlib.ExitStack() as cleanup:
        process = cleanup.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code, source, file, str(os.getpid())],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        )
        cleanup.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while not any(file.parent.glob("*.part")) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        assert process.returncode not in (None, 0), errors.read_text()
    assert [path for path in file.parent.iterdir() if path != file] == []


def test_progress_ends_with_all_entries(source: Path, file: Path) -> None:
    (source / "file").touch()
    seen: list[tuple[int, int | None, str]] = []
    build(source, file, progress=lambda *report: seen.append(report))
    assert seen[-1] == (2, 2, "entries")


@pytest.fixture
def slow(tmp_path: Path, source: Path) -> Iterator[slowfs.SlowSource]:
    reason = slowfs.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with slowfs.SlowSource(source, tmp_path / "slow", attribute_s=0) as mounted:
        yield mounted


def test_a_slow_source_is_asked_by_many_threads(
    slow: slowfs.SlowSource, source: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(1000):
        (source / f"{name}").touch()
    slow.rules("lat getattr 5")
    asking: list[None] = []
    most = 0
    look = Scan._look

    def counted(scan: Scan, directory: Any, names: list[bytes]) -> Batch:
        nonlocal most
        asking.append(None)
        most = max(most, len(asking))
        try:
            return look(scan, directory, names)
        finally:
            asking.pop()

    monkeypatch.setattr(Scan, "_look", counted)
    built = build(slow.path, file, jobs=32)
    assert built.entries >= 1001
    assert most > 8


@pytest.mark.finding("C7")
def test_a_small_directory_is_listed_in_one_call_and_not_closed_by_the_main_thread(
    slow: slowfs.SlowSource, source: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 400
    for number in range(count):
        (source / f"{number}").mkdir()
        (source / f"{number}" / "file").touch()
    closed: list[bool] = []
    close = os.close

    def counting_close(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{slow.path}/"):
            closed.append(threading.current_thread() is threading.main_thread())
        close(fd)

    monkeypatch.setattr("monarch.namespace.scan.os.close", counting_close)
    slow.rules("lat getattr 1", "lat readdir 1")
    before = slow.counters()
    build(slow.path, file)
    calls = {name: number - before[name] for name, number in slow.counters().items()}
    monkeypatch.undo()
    assert calls["readdir"] <= count + 10
    # The main thread works alone until it has seen that the source is slow.
    assert len(closed) >= count and sum(closed) < count / 4


@pytest.mark.fault("S2")
def test_an_entry_whose_attributes_cannot_be_read(
    slow: slowfs.SlowSource, source: Path, file: Path
) -> None:
    for name in ("good", "broken", "also good"):
        (source / name).touch()
    slow.rules(f"err getattr {errno.EIO} ^/broken$")
    built = build(slow.path, file)
    assert built.unreadable_paths == ("broken",)
    with Snapshot.open(file) as snapshot:
        ino = snapshot.resolve(b"broken")
        assert ino is not None and snapshot.unreadable(ino)


@pytest.mark.fault("S2")
@pytest.mark.parametrize(
    "rules",
    [
        ["err readdir EIO ^/d$"],
        ["err getattr EIO ^/d/"],
        ["err readdir ESTALE .*", "err statfs ESTALE .*"],
    ],
)
def test_a_refresh_forgets_nothing_because_the_source_fails_today(
    slow: slowfs.SlowSource, source: Path, file: Path, rules: list[str]
) -> None:
    (source / "d").mkdir()
    (source / "d" / "known").touch()
    build(slow.path, file)
    (source / "d" / "new").touch()
    slow.rules(*rules)
    with pytest.raises(SourceError):
        refresh(slow.path, file)
    slow.rules()
    with Snapshot.open(file) as snapshot:
        assert snapshot.resolve(b"d/known") is not None
    refresh(slow.path, file)
    with Snapshot.open(file) as snapshot:
        assert snapshot.resolve(b"d/new") is not None


@pytest.mark.fault("S2")
def test_a_source_that_dies_fails_the_build(
    slow: slowfs.SlowSource, source: Path, file: Path
) -> None:
    for name in range(100):
        (source / f"{name}").touch()
    fd = os.open(slow.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with Scan(fd, jobs=4) as scan:
            batches = scan.batches()
            next(batches)
            slow.kill()
            with pytest.raises(SourceError, match="check that the source is mounted") as failure:
                list(batches)
        assert failure.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    finally:
        os.close(fd)
