"""Which messages the datapath answers and which it passes to Python; no message harms it.

The test plays the kernel on one side and pyfuse3 on the other (``rig``). A device that is a socket
takes no backing files, so opens are relayed here.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from monarch.daemon import run
from monarch.fuse.datapath import built, split_handle
from monarch.transfer.source_load import SourceTraffic
from monarch.types import ROOT_INO, Attributes
from monarch.vfs.interfaces import ABANDONED
from tests.conftest import Tree, contents
from tests.fuse import wire
from tests.fuse.rig import NoMessage, Rig, eventually, kill, rig
from tests.fuse.wire import Op
from tests.mount.command import needs_root

ROOT = Path(__file__).parents[2]
SIZE = 300_000


@pytest.fixture
def made(tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    tree({"a": SIZE, "b": SIZE, "empty": b"", "sub/c": 1000})
    with rig(tmp_path / "source", tmp_path) as it:
        it.init()
        yield it


@pytest.fixture
def no_open(tree: Tree, tmp_path: Path) -> Iterator[Rig]:
    tree({"a": SIZE, "b": SIZE, "empty": b""})
    with rig(tmp_path / "source", tmp_path, no_open=True) as it:
        it.init(wire.INIT_NO_OPEN_SUPPORT)
        assert it.datapath.state().no_open
        yield it


def test_the_extension_is_built() -> None:
    """Without it the modes of the other tests would all be the interpreter's."""
    assert built()


def test_a_datapath_that_cannot_be_made_closes_no_descriptor() -> None:
    program = (
        "import os; from monarch.fuse._datapath import Datapath;"
        "rest = dict(differs=1, unusable=2, copying=4, entries=1, directories=1, bounds_ns=[]);"
        "tables = dict(residency=bytearray(2), marks=bytearray(2), acls=[])\n"
        "for wrong in ({'marks': bytearray(3)}, {'acls': [()]}):\n"
        "    try:\n"
        "        Datapath(**rest, **{**tables, **wrong})\n"
        "    except (TypeError, ValueError):\n"
        "        print(os.readlink('/proc/self/fd/0'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout.split() == ["/dev/null"] * 2, done.stderr


# -- names -----------------------------------------------------------------------------------------


@pytest.fixture
def varied(source: Path) -> Path:
    """All kinds of entries, hard links, odd times and names, a directory of several blocks."""
    (source / "wide").mkdir()
    for number in range(5000):
        os.close(os.open(source / "wide" / f"{number:05}", os.O_CREAT | os.O_WRONLY))
    for name in ("a", "b" * 255, "ü", "z z\n"):
        (source / name).write_bytes(contents(name, 777))
    (source / "deep" / "er").mkdir(parents=True)
    (source / "none").mkdir(mode=0o700)
    os.link(source / "a", source / "deep" / "alias")
    os.link(source / "a", source / "aa")
    os.symlink("a", source / "link")
    os.mkfifo(source / "fifo")
    with open(source / "deep" / "er" / "sparse", "wb") as file:
        file.truncate(1 << 40)
    (source / "old").write_bytes(b"1")
    os.utime(source / "old", ns=(-1, -1_500_000_001))
    os.utime(source / "aa", ns=(2**33 * 10**9, 2**33 * 10**9 + 999_999_999))
    if os.geteuid() == 0:
        os.mknod(source / "null", 0o020666, os.makedev(1, 3))
        os.chown(source / "old", 12345, 54321)
    return source


def assert_shown_as(seen: wire.Stat, known: Attributes) -> None:
    assert (seen.ino, seen.mode, seen.nlink) == (known.ino, known.mode, known.nlink)
    assert (seen.uid, seen.gid, seen.rdev) == (known.uid, known.gid, known.rdev)
    assert (seen.size, seen.blocks, seen.blksize) == (known.size, known.blocks, 4096)
    assert (seen.mtime_ns, seen.atime_ns) == (known.mtime_ns, known.mtime_ns)
    assert seen.ctime_ns == known.ctime_ns


def test_every_name_and_attribute_is_answered_as_in_the_snapshot(
    varied: Path, tmp_path: Path
) -> None:
    with rig(varied, tmp_path) as made:
        snapshot = made.snapshot
        compared = 0
        for directory in list(snapshot.directories()):
            for name, known in snapshot.list_from(directory, 0):
                node, seen = wire.parse_entry(made.lookup(directory, name).body)
                assert node == known.ino == snapshot.lookup(directory, name)
                assert_shown_as(seen, known)
                attributes = made.ask(Op.GETATTR, node, bytes(16)).body
                assert wire.ATTR_OUT.unpack_from(attributes)[:2] == (86400, 0)
                assert wire.parse_stat(attributes, wire.ATTR_OUT.size) == seen
                compared += 1
        assert compared == snapshot.entries - 1
        root = made.ask(Op.GETATTR, ROOT_INO, bytes(16)).body
        assert_shown_as(wire.parse_stat(root, wire.ATTR_OUT.size), snapshot.attributes(ROOT_INO))
        assert made.is_quiet()


def test_a_name_that_is_not_there_is_remembered_as_such(varied: Path, tmp_path: Path) -> None:
    with rig(varied, tmp_path) as made:
        wide = made.ino("wide")
        for parent, name in [
            *((ROOT_INO, name) for name in (b"A", b"aaa", b"", b"zzz", b"\xff" * 255)),
            *((wide, name) for name in (b"00000x", b"04999x", b"05000", b"-")),
            (made.ino("none"), b"a"),
        ]:
            assert made.snapshot.lookup(parent, name) is None
            answer = made.lookup(parent, name)
            assert answer.error == 0
            assert wire.parse_entry(answer.body)[0] == 0
        assert made.is_quiet()


def listing(made: Rig, ino: int, size: int, *, plus: bool) -> list[wire.Entry]:
    entries: list[wire.Entry] = []
    operation = Op.READDIRPLUS if plus else Op.READDIR
    offset = 0
    while True:
        answer = made.ask(operation, ino, wire.READ_IN.pack(0, offset, size, 0, 0, 0, 0))
        assert answer.error == 0 and len(answer.body) <= size
        part = wire.parse_listing(answer.body, plus=plus)
        if not part:
            return entries
        entries += part
        offset = part[-1].offset


@pytest.mark.finding("C1")
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("size", [432, 4096, 100_000, 1 << 20, (1 << 32) - 1])
def test_listings_are_the_snapshots_whatever_the_buffer(
    varied: Path, tmp_path: Path, size: int, plus: bool
) -> None:
    with rig(varied, tmp_path) as made:
        for directory in list(made.snapshot.directories()):
            if size == 432 and directory == made.ino("wide"):
                continue
            known = list(made.snapshot.list_from(directory, 0))
            seen = listing(made, directory, size, plus=plus)
            parent = made.snapshot.parent(directory)
            assert [(e.name, e.ino) for e in seen[:2]] == [(b".", directory), (b"..", parent)]
            assert {(entry.kind, entry.stat) for entry in seen[:2]} == {(stat.S_IFDIR >> 12, None)}
            assert [entry.name for entry in seen[2:]] == [name for name, _ in known]
            assert [entry.offset for entry in seen] == list(range(1, len(known) + 3))
            for entry, (_, attributes) in zip(seen[2:], known, strict=True):
                assert entry.ino == attributes.ino
                assert entry.kind == stat.S_IFMT(attributes.mode) >> 12
                assert (entry.stat is not None) == plus
                if entry.stat is not None:
                    assert_shown_as(entry.stat, attributes)
        assert made.is_quiet()


def test_a_listing_continues_at_any_offset_and_ends_behind_the_last(
    varied: Path, tmp_path: Path
) -> None:
    with rig(varied, tmp_path) as made:
        wide = made.ino("wide")
        for offset in (0, 1, 4094, 4095, 4096, 4999, 5000, 5001, 2**32, 2**63, 2**64 - 3):
            place = offset + 2  # behind the directory's own two names
            answer = made.ask(Op.READDIRPLUS, wide, wire.READ_IN.pack(0, place, 4096, 0, 0, 0, 0))
            names = [entry.name for entry in wire.parse_listing(answer.body, plus=True)]
            expected = [b"%05d" % number for number in range(offset, min(offset + 25, 5000))]
            assert answer.error == 0 and names == expected
        for place in (0, 2):
            answer = made.ask(Op.READDIR, wide, wire.READ_IN.pack(0, place, 24, 0, 0, 0, 0))
            assert answer.error == 0 and answer.body == b""


def test_blocks_that_were_not_read_from_the_snapshot_yet_are_answered_by_python(
    varied: Path, tmp_path: Path
) -> None:
    with rig(varied, tmp_path, loaded=False) as made:
        body = b"a\0"
        for opcode, node, sent in (
            (Op.LOOKUP, 1, body),
            (Op.GETATTR, 1, bytes(16)),
            (Op.READDIRPLUS, 1, wire.READ_IN.pack(0, 0, 4096, 0, 0, 0, 0)),
        ):
            unique = made.send(opcode, node, sent)
            passed = made.passed()
            assert (passed.opcode, passed.node) == (opcode, node)
            made.reply(passed, error=errno.ENOENT)
            assert made.answer(unique).error == errno.ENOENT
        made.load()
        assert wire.parse_entry(made.lookup(1, b"a").body)[0] == made.ino("a")


def test_files_that_differ_from_the_snapshot_are_answered_by_python(made: Rig) -> None:
    ino = made.ino("b")
    made.residency.mark_differing(ino)
    made.residency.mark_differing(made.ino("sub"))
    read = wire.READ_IN.pack(0, 0, 4096, 0, 0, 0, 0)
    for opcode, node, body in (
        (Op.LOOKUP, 1, b"b\0"),
        (Op.GETATTR, ino, bytes(16)),
        (Op.LOOKUP, made.ino("sub"), b"c\0"),
        (Op.READDIRPLUS, made.ino("sub"), read),
    ):
        unique = made.send(opcode, node, body)
        passed = made.passed()
        assert (passed.opcode, passed.node) == (opcode, node)
        made.reply(passed, b"x" * 8)
        assert made.answer(unique).body == b"x" * 8
    first = made.ask(Op.READDIRPLUS, 1, read)
    # A listing stops before b.
    assert [e.name for e in wire.parse_listing(first.body, plus=True)] == [b".", b"..", b"a"]
    unique = made.send(Op.READDIRPLUS, 1, wire.READ_IN.pack(0, 3, 1 << 20, 0, 0, 0, 0))
    passed = made.passed()
    handle, offset, size = wire.READ_IN.unpack(passed.body)[:3]
    # As pyfuse3 wants it: its handle is the inode, its answer fits the socket.
    assert (handle, offset, size) == (1, 3, 65536)
    made.reply(passed)
    made.answer(unique)


def test_names_that_only_python_understands_are_passed_on(made: Rig) -> None:
    for name in (b".", b"..", b"n" * 256, b"n" * 1024):
        unique = made.send(Op.LOOKUP, 1, name + b"\0")
        assert made.passed().body == name + b"\0"
        assert made.is_quiet(0)
        del unique


def test_foreign_attributes_are_refused_without_python(made: Rig) -> None:
    ino = made.ino("a")
    for name in (b"security.capability", b"user.x", b"user.monarc", b""):
        answer = made.ask(Op.GETXATTR, ino, wire.GETXATTR_IN.pack(100, 0) + name + b"\0")
        assert answer.error == errno.ENODATA
    label = wire.GETXATTR_IN.pack(0, 0) + b"security.selinux\0"
    assert made.ask(Op.GETXATTR, ino, label).error == errno.EOPNOTSUPP
    assert made.ask(Op.LISTXATTR, ino, wire.GETXATTR_IN.pack(0, 0)).body == bytes(8)
    assert made.ask(Op.LISTXATTR, ino, wire.GETXATTR_IN.pack(100, 0)).body == b""
    assert made.is_quiet()
    made.send(Op.GETXATTR, ino, wire.GETXATTR_IN.pack(100, 0) + b"user.monarch.tier\0")
    assert made.passed().body.endswith(b"user.monarch.tier\0")


def test_whether_a_file_is_a_terminal_is_answered_without_python(made: Rig) -> None:
    tcgets = struct.pack("=QIIQII", 0, 0, 0x5401, 0, 0, 60)
    assert made.ask(Op.IOCTL, made.ino("a"), tcgets).error == errno.ENOTTY
    assert made.is_quiet()


def test_the_kernel_gets_the_flags_that_libfuse_does_not_know(tree: Tree, tmp_path: Path) -> None:
    with rig(tree({}), tmp_path, passthrough=True, cache_listings=True) as made:
        reply = made.init(wire.INIT_EXT | wire.INIT_NO_OPENDIR_SUPPORT, wire.INIT2_PASSTHROUGH)
        flags, flags2, depth = reply[3], reply[10], reply[11]
        assert flags & wire.INIT_PARALLEL_DIROPS and flags & wire.INIT_EXT
        assert flags2 & wire.INIT2_PASSTHROUGH and depth == 1
        assert made.datapath.state().passthrough
        assert made.ask(Op.OPENDIR, 1, bytes(8)).error == errno.ENOSYS
        assert made.ask(Op.RELEASEDIR, 1, bytes(24)).error == 0


def test_a_kernel_that_knows_little_is_asked_for_little(tree: Tree, tmp_path: Path) -> None:
    options = {"passthrough": True, "no_open": False, "cache_listings": True}
    with rig(tree({}), tmp_path, **options) as made:
        reply = made.init()
        assert reply[10] == 0 and reply[11] == 0
        assert not made.datapath.state().passthrough and not made.datapath.state().no_open
        assert wire.OPEN_OUT.unpack(made.ask(Op.OPENDIR, 1, bytes(8)).body)[0] == 1


# -- opening and reading ---------------------------------------------------------------------------


def test_a_resident_file_is_opened_read_and_closed_without_python(made: Rig) -> None:
    ino, content = made.place("a"), made.content("a")
    handle, flags, backing = made.open(ino)
    assert handle & wire.HANDLE_FAST and not handle & wire.HANDLE_BOUND
    assert (flags, backing) == (wire.FOPEN_KEEP_CACHE | wire.FOPEN_NOFLUSH, 0)
    for offset, size in ((0, 4096), (SIZE - 10, 4096), (SIZE, 10), (1 << 40, 5), (0, 1 << 20)):
        assert made.read(ino, handle, offset, size).body == content[offset : offset + size]
    assert made.ask(Op.FLUSH, ino, bytes(24)).error == errno.ENOSYS
    assert made.datapath.open_files() == 1
    assert made.release(ino, handle).error == 0
    assert made.datapath.open_files() == 0
    assert made.release(ino, handle).error == errno.EBADF
    assert made.is_quiet()
    assert made.datapath.served() == [(ino, 1, None, 0, 0, 0)]


def test_all_opens_share_the_first_ones_copy_though_it_is_evicted(made: Rig) -> None:
    ino, content = made.place("a"), made.content("a")
    first, _, _ = made.open(ino)
    made.evict(ino)
    second, _, _ = made.open(ino)
    assert made.read(ino, second, 0, SIZE).body == content
    made.release(ino, first)
    assert made.read(ino, second, 100, SIZE).body == content[100:]
    made.release(ino, second)
    # The last is gone: the next one is Python's to decide.
    made.send_open(ino)
    assert made.passed().opcode == Op.OPEN


def test_a_file_that_is_not_resident_is_pythons_to_open_read_and_close(made: Rig) -> None:
    ino = made.ino("a")
    opened = made.send_open(ino)
    made.reply_open(made.passed())
    handle, _, _ = wire.OPEN_OUT.unpack(made.answer(opened).body)
    assert handle == ino and made.datapath.open_files() == 1
    # Promoted meanwhile: an open now shares Python's binding.
    made.place("a")
    again = made.send_open(ino)
    made.reply_open(made.passed())
    made.answer(again)
    unique = made.send_read(ino, handle, 5, 10)
    passed = made.passed()
    seen, token = split_handle(wire.READ_IN.unpack(passed.body)[0])
    assert seen == ino and token > 0
    made.datapath.answer(token, b"0123456789")
    assert made.answer(unique).body == b"0123456789"
    # What pyfuse3 says then is not for the kernel, nor is a second answer.
    made.datapath.answer(token, b"again")
    made.reply(passed)
    made.datapath.answer(token, b"again")
    for _ in range(2):
        closed = made.send_release(ino, handle)
        passed = made.passed()
        assert passed.opcode == Op.RELEASE and wire.RELEASE_IN.unpack(passed.body)[0] == ino
        made.reply(passed)
        assert made.answer(closed).error == 0
    assert made.datapath.open_files() == 0
    made.open(ino)
    assert made.is_quiet()


def test_an_error_of_pythons_open_is_the_callers_and_leaves_nothing_open(made: Rig) -> None:
    opened = made.send_open(made.ino("a"))
    made.reply(made.passed(), error=errno.ESTALE)
    assert made.answer(opened).error == errno.ESTALE
    assert made.datapath.open_files() == 0


def test_a_descriptor_that_python_hands_over_is_read_without_it(made: Rig) -> None:
    ino, content = made.ino("a"), made.content("a")
    opened = made.send_open(ino)
    passed = made.passed()
    with open(made.source / "a", "rb") as file:
        assert made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
        # The next open tells how long the file is by now.
        assert made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
    made.reply_open(passed, flags=0)
    handle, flags, _ = wire.OPEN_OUT.unpack(made.answer(opened).body)
    assert handle & wire.HANDLE_FAST and handle & wire.HANDLE_BOUND
    assert flags == wire.FOPEN_NOFLUSH  # Python said that older pages must not be kept
    assert made.read(ino, handle, 0, 1000).body == content[:1000]
    assert made.datapath.reached(ino) == 1000
    made.read(ino, handle, 5000, 1000)
    # What the kernel reads ahead does not come in order.
    assert made.datapath.reached(ino) == 6000
    traffic = made.datapath.source_traffic()
    assert traffic == SourceTraffic(0, 2, 2000, 0, 2, traffic.waited_ns) and traffic.waited_ns
    # Python decided, so it is notified of each open and each release.
    again = made.send_open(ino)
    made.reply_open(made.passed())
    assert wire.OPEN_OUT.unpack(made.answer(again).body)[0] == handle
    for _ in range(2):
        closed = made.send_release(ino, handle)
        passed = made.passed()
        assert wire.RELEASE_IN.unpack(passed.body)[0] == ino
        made.reply(passed)
        assert made.answer(closed).error == 0
    assert made.datapath.open_files() == 0
    assert made.is_quiet()


def test_an_open_that_the_last_release_overtakes_reads_what_it_is_bound_to(made: Rig) -> None:
    ino, old, new = made.ino("a"), made.content("a"), made.content("b")
    first = made.send_open(ino)
    passed = made.passed()
    with open(made.source / "a", "rb") as file:
        assert made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
    made.reply_open(passed)
    handle = wire.OPEN_OUT.unpack(made.answer(first).body)[0]
    assert made.read(ino, handle, 0, 1000).body == old[:1000]
    second = made.send_open(ino)
    opening = made.passed()
    closed = made.send_release(ino, handle)
    releasing = made.passed()
    # Python handles the release first, and binds the file to another version then.
    made.datapath.end_binding(ino)
    made.reply(releasing)
    assert made.answer(closed).error == 0
    with open(made.source / "b", "rb") as file:
        assert made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
    made.reply_open(opening)
    handle = wire.OPEN_OUT.unpack(made.answer(second).body)[0]
    assert handle & wire.HANDLE_FAST and handle & wire.HANDLE_BOUND
    assert made.read(ino, handle, 0, 1000).body == new[:1000] != old[:1000]
    closed = made.send_release(ino, handle)
    made.reply(made.passed())
    assert made.answer(closed).error == 0 and made.datapath.open_files() == 0
    # A file that Python does not have bound stays as it is.
    made.datapath.end_binding(ino)


def test_an_inode_that_is_open_with_python_cannot_be_handed_over(made: Rig) -> None:
    ino = made.ino("a")
    with open(made.source / "a", "rb") as file:
        assert not made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
        opened = made.send_open(ino)
        made.reply_open(made.passed())
        made.answer(opened)
        assert not made.datapath.bind(ino, file.fileno(), tier=0, size=SIZE)
        assert not made.datapath.bind(ino, -1, tier=1, size=SIZE)


@pytest.mark.parametrize("damage", ["missing", "short", "long", "link"])
def test_a_copy_that_is_not_as_it_must_be_is_pythons(made: Rig, damage: str) -> None:
    ino = made.place("a")
    copy = made.copy(ino)
    if damage == "missing":
        copy.unlink()
    elif damage == "short":
        os.truncate(copy, SIZE - 1)
    elif damage == "long":
        os.truncate(copy, SIZE + 1)
    else:
        copy.rename(copy.with_name("other"))
        copy.symlink_to("other")
    made.send_open(ino)
    assert made.passed().opcode == Op.OPEN
    assert made.datapath.served() == []


def test_a_copy_that_is_cut_while_it_is_open_is_read_by_python(made: Rig) -> None:
    ino = made.place("a")
    handle, _, _ = made.open(ino)
    os.truncate(made.copy(ino), 1000)
    assert len(made.read(ino, handle, 0, 1000).body) == 1000
    unique = made.send_read(ino, handle, 0, 2000)
    passed = made.passed()
    seen, token = split_handle(wire.READ_IN.unpack(passed.body)[0])
    assert (passed.opcode, seen) == (Op.READ, ino)
    made.datapath.answer(token, bytes(2000))
    assert made.answer(unique).body == bytes(2000)


@pytest.mark.parametrize("mark", ["mark_changed", "mark_differing", "mark_unverified"])
def test_a_copy_that_must_be_verified_first_is_opened_by_python(made: Rig, mark: str) -> None:
    ino = made.place("a")
    call = getattr(made.residency, mark)
    call(np.array([ino]) if mark == "mark_unverified" else ino)
    made.send_open(ino)
    assert made.passed().opcode == Op.OPEN
    assert made.datapath.served() == []


def test_python_decides_every_open_if_it_wants_to(tree: Tree, tmp_path: Path) -> None:
    with rig(tree({"a": 100}), tmp_path, decide_opens=True) as made:
        made.init()
        made.send_open(made.place("a"))
        assert made.passed().opcode == Op.OPEN


def test_a_tier_of_which_the_kernel_takes_no_file_is_relayed(tree: Tree, tmp_path: Path) -> None:
    with rig(tree({"a": 100}), tmp_path, passthrough=True) as made:
        made.init(wire.INIT_EXT, wire.INIT2_PASSTHROUGH)
        handle, flags, backing = made.open(made.place("a"))
        assert (flags & wire.FOPEN_PASSTHROUGH, backing) == (0, 0)
        assert made.read(made.ino("a"), handle, 0, 100).body == made.content("a")
        state = made.datapath.state()
        assert state.refusal == errno.ENOTTY and state.backing_ids == 0


@pytest.mark.fault("M4")
def test_without_descriptors_left_copies_are_read_by_their_names(made: Rig) -> None:
    ino, content = made.place("a"), made.content("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    holes: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        with suppress(OSError):
            while True:
                holes.append(os.open("/dev/null", os.O_RDONLY))
        handle, _, _ = made.open(ino)
        os.close(holes.pop())
        assert made.read(ino, handle, 10, SIZE).body == content[10:]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)
    # Evicted: no copy is open, so Python continues to read.
    made.evict(ino)
    made.send_read(ino, handle, 0, 10)
    assert made.passed().opcode == Op.READ


@pytest.mark.fault("I4")
def test_reads_that_make_no_sense_are_refused(made: Rig) -> None:
    ino, other = made.place("a"), made.place("b")
    handle, _, _ = made.open(ino)
    for node, fh, offset, size, error in (
        (ino, handle, 0, (1 << 20) + 1, errno.EINVAL),
        (ino, handle, (1 << 63) - 1, 1, errno.EINVAL),
        (ino, handle, (1 << 64) - 1, 1, errno.EINVAL),
        (other, handle, 0, 1, errno.EBADF),
        (ino, handle | 0xFFFFFFFF, 0, 1, errno.EBADF),
        (ino, handle + 1, 0, 1, errno.EBADF),
        (0, handle, 0, 1, errno.EBADF),
        ((1 << 64) - 1, handle, 0, 1, errno.EBADF),
    ):
        assert made.read(node, fh, offset, size).error == error
    for opcode in (Op.READ, Op.READDIR, Op.READDIRPLUS, Op.RELEASE):
        assert made.ask(opcode, ino, bytes(7)).error == errno.EINVAL
    assert made.ask(Op.LOOKUP, 1, b"").error == errno.EINVAL
    assert made.ask(Op.LOOKUP, 1, b"no end").error == errno.EINVAL
    assert made.read(ino, handle, 0, 5).body == made.content("a")[:5]


# -- without opens ---------------------------------------------------------------------------------


def test_a_kernel_that_tells_no_opens_reads_resident_files_without_python(no_open: Rig) -> None:
    ino, content = no_open.place("a"), no_open.content("a")
    answer = no_open.ask(Op.OPEN, ino, wire.OPEN_IN.pack(0, 0))
    assert answer.error == errno.ENOSYS
    assert no_open.read(ino, 0, 0, SIZE + 5).body == content
    assert no_open.read(ino, 0, 100_000, 50).body == content[100_000:100_050]
    assert no_open.is_quiet()
    # The read of the beginning stands for the open.
    assert no_open.datapath.served() == [(ino, 1, None, 0, 0, 0)]
    tally = no_open.datapath.tallies()[1]
    assert (tally.opens, tally.reads, tally.bytes) == (1, 2, SIZE + 50)
    assert no_open.datapath.open_files() == 0


@pytest.mark.parametrize("why", ["not resident", "evicted", "short", "changed"])
def test_other_reads_are_pythons_and_name_the_inode(no_open: Rig, why: str) -> None:
    ino = no_open.ino("a")
    if why != "not resident":
        no_open.place("a")
    if why == "evicted":
        no_open.evict(ino)
    elif why == "short":
        os.truncate(no_open.copy(ino), SIZE - 1)
    elif why == "changed":
        no_open.residency.mark_changed(ino)
    unique = no_open.send_read(ino, 0, 0, 100)
    passed = no_open.passed()
    seen, token = split_handle(wire.READ_IN.unpack(passed.body)[0])
    assert seen == ino
    no_open.datapath.answer(token, b"from python")
    assert no_open.answer(unique).body == b"from python"
    assert no_open.datapath.served() == []
    assert no_open.datapath.tallies()[1].opens == 0


# -- fetching --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reports_opens", [True, False], ids=["open", "no_open"])
def test_a_small_file_is_fetched_once_and_python_gets_its_bytes(
    tree: Tree, tmp_path: Path, reports_opens: bool
) -> None:
    tree({"a": SIZE, "empty": b""})
    with rig(tmp_path / "source", tmp_path, fetch_max=SIZE, no_open=not reports_opens) as made:
        made.init(0 if reports_opens else wire.INIT_NO_OPEN_SUPPORT)
        handle = 0
        for name in ("a", "empty"):
            ino, content = made.ino(name), made.content(name)
            for _ in range(2):
                if reports_opens:
                    handle, _, _ = made.open(ino)
                assert made.read(ino, handle, 0, SIZE).body == content
            assert made.read(ino, handle, SIZE // 2, SIZE).body == content[SIZE // 2 :]
            (found, what, fetched, *_), again = made.datapath.served()
            assert (found, what) == (ino, 0xFE) and fetched is not None
            assert bytes(fetched) == content
            assert again == (ino, 0, None, 0, 0, 0)
            made.datapath.taken(ino)
            if reports_opens:
                made.release(ino, handle)
                made.release(ino, handle)
            assert made.datapath.open_files() == 0
            # The bytes stay as long as Python uses them.
            assert bytes(fetched) == content
        traffic = made.datapath.source_traffic()
        assert traffic == SourceTraffic(2, 1, SIZE, 0, 2, traffic.waited_ns)
        assert made.is_quiet()


@pytest.mark.promise(40, 347)
@pytest.mark.parametrize("kept_by", ["c", "python"])
def test_bytes_that_are_kept_for_further_reads_end_when_the_source_has_changed(
    tree: Tree, tmp_path: Path, kept_by: str
) -> None:
    """The next read is Python's, which mixes no versions, and the source is not read for it."""
    tree({"a": SIZE})
    with rig(tmp_path / "source", tmp_path, fetch_max=SIZE, no_open=True) as made:
        made.init(wire.INIT_NO_OPEN_SUPPORT)
        ino, content = made.ino("a"), made.content("a")
        if kept_by == "python":
            assert made.datapath.keep_unread(ino, content, SIZE)
        assert made.read(ino, 0, 0, 1000).body == content[:1000]
        if kept_by == "c":
            assert [what for _, what, *_ in made.datapath.served()] == [0xFE]
            made.datapath.taken(ino)
        assert made.read(ino, 0, 1000, 1000).body == content[1000:2000]
        before = made.datapath.source_traffic()
        made.residency.mark_changed(ino)
        unique = made.send_read(ino, 0, 2000, 1000)
        passed = made.passed()
        seen, token = split_handle(wire.READ_IN.unpack(passed.body)[0])
        assert (passed.opcode, seen) == (Op.READ, ino)
        made.datapath.answer(token, b"from python")
        assert made.answer(unique).body == b"from python"
        assert made.datapath.source_traffic() == before


def test_bytes_that_python_keeps_outlive_the_datapath(tree: Tree, tmp_path: Path) -> None:
    tree({"a": SIZE})
    with rig(tmp_path / "source", tmp_path, fetch_max=SIZE) as made:
        made.init()
        content = made.content("a")
        made.open(made.ino("a"))
        ((_, _, kept, *_),) = made.datapath.served()
        assert kept is not None
    del made
    gc.collect()
    assert bytes(kept) == content
    kept.release()


@pytest.mark.parametrize("why", ["changed", "gone", "other", "marked", "large", "held"])
def test_files_that_cannot_be_fetched_are_opened_by_python(
    tree: Tree, tmp_path: Path, why: str
) -> None:
    source = tree({"a": SIZE, **{f"b{n}": SIZE for n in range(4)}})
    with rig(source, tmp_path, fetch_max=SIZE - 1 if why == "large" else SIZE) as made:
        made.init()
        ino = made.ino("a")
        if why == "changed":
            (source / "a").write_bytes(contents("other bytes", SIZE))
        elif why == "gone":
            (source / "a").unlink()
        elif why == "other":
            (source / "a").unlink()
            (source / "a").symlink_to("b1")
        elif why == "marked":
            made.residency.mark_changed(ino)
        elif why == "held":
            # As many bytes as may be held are held.
            for number in range(4):
                made.open(made.ino(f"b{number}"))
        unique = made.send_open(ino)
        passed = made.passed()
        assert (passed.opcode, passed.node) == (Op.OPEN, ino)
        made.reply_open(passed)
        assert made.answer(unique).error == 0
        assert all(found != ino for found, *_ in made.datapath.served())


@needs_root
@pytest.mark.fault("U6")
@pytest.mark.promise(85, 86)
def test_a_file_is_fetched_with_the_rights_of_the_process_that_opens_it(
    tree: Tree, tmp_path: Path
) -> None:
    names = ("own", "others", "groups", "roots")
    source = tree(dict.fromkeys(names, SIZE))
    for name, uid, gid in (("own", 1001, 0), ("others", 1002, 0), ("groups", 0, 2449)):
        os.chown(source / name, uid, gid)
    for name in names:
        (source / name).chmod(0o640 if name == "groups" else 0o600)
    many = range(2000, 2450)
    command = ["setpriv", "--reuid=1001", "--regid=1001", f"--groups={','.join(map(str, many))}"]
    with subprocess.Popen([*command, "sleep", "60"]) as process:
        eventually(lambda: _user_of(process.pid) == 1001, "it has become an ordinary user")
        with rig(source, tmp_path, fetch_max=SIZE, as_caller=True) as made:
            made.init()
            for name, pid, uid, is_fetched in (
                ("others", process.pid, 1001, False),
                ("roots", process.pid, 1001, False),
                ("groups", 0, 1001, False),  # of another pid namespace: no groups are known
                ("groups", process.pid, 1002, False),  # not whose number it is
                ("groups", process.pid, 1001, True),
                ("own", 0, 1001, True),
                ("roots", 0, 0, True),
            ):
                opened = wire.OPEN_IN.pack(os.O_RDONLY, 0)
                unique = made.send(Op.OPEN, made.ino(name), opened, pid=pid, uid=uid)
                if is_fetched:
                    assert made.answer(unique).error == 0, name
                else:
                    passed = made.passed()
                    assert passed.opcode == Op.OPEN, name
                    made.reply(passed, error=errno.EACCES)
                    assert made.answer(unique).error == errno.EACCES
            # No thread has kept what it was lent.
            assert made.is_quiet()
            for thread in Path("/proc/self/task").iterdir():
                assert _user_of(int(thread.name)) == 0
        process.kill()


def _user_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("Uid:")]
    return int(line.split()[4])


_OLD = """
import ctypes, os, struct, sys
from pathlib import Path
OPENAT2, ENOSYS = 437, 38
def statement(code, jump_true, jump_false, k):
    return struct.pack("<HBBI", code, jump_true, jump_false, k)
program = ctypes.create_string_buffer(b"".join([
    statement(0x20, 0, 0, 0),
    statement(0x15, 0, 1, OPENAT2),
    statement(0x06, 0, 0, 0x50000 | ENOSYS),
    statement(0x06, 0, 0, 0x7FFF0000),
]), 32)
sock_fprog = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(program)), 16)
prctl = ctypes.CDLL(None, use_errno=True).prctl
unsigned = ctypes.c_ulong
assert prctl(38, unsigned(1), unsigned(0), unsigned(0), unsigned(0)) == 0
assert prctl(22, unsigned(2), unsigned(ctypes.addressof(sock_fprog)), unsigned(0), unsigned(0)) == 0
from tests.fuse.rig import rig
from tests.fuse.wire import OPEN_IN, Op
"""
_OLD_AND_LINKED = """
with rig(Path(sys.argv[1]), Path(sys.argv[2]), fetch_max=5000) as made:
    made.init()
    ino = made.ino("deep/er/file")
    handle, _, _ = made.open(ino)
    assert made.read(ino, handle, 0, 5000).body == made.content("deep/er/file")
    made.datapath.served()
    made.datapath.taken(ino)
    made.release(ino, handle)
    # A link in the place of a directory leads nowhere.
    os.rename(made.source / "deep" / "er", made.source / "deep" / "there")
    os.symlink("there", made.source / "deep" / "er")
    made.send_open(ino)
    assert made.passed().opcode == Op.OPEN
    assert made.datapath.source_traffic().opens == 1
"""
# The name of a directory is not one that a directory can have.
_OLD_AND_FORGED = """
import lmdb
from monarch.namespace.build import build
from monarch.namespace.schema import NAMES, seal, unseal
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.trailer import append_trailer
from tests.fuse import rig as module
forged, inos = sys.argv[3].encode(), []
def build_and_forge(source, file):
    build(source, file)
    with Snapshot.open(file) as snapshot:
        inos.append(snapshot.resolve(b"deep/er/file"))
    with lmdb.open(str(file), subdir=False, lock=False) as environment:
        with environment.begin(write=True) as transaction:
            blocks = [(key, bytes(value)) for key, value in transaction.cursor()]
            for key, value in blocks:
                if len(key) == len(NAMES) + 4 and key.startswith(NAMES):
                    names = bytes(unseal(key, value, where=""))
                    assert names.count(b"er") == 1
                    transaction.put(key, seal(key, names.replace(b"er", forged)))
    append_trailer(file, page_bytes=os.sysconf("SC_PAGE_SIZE"))
module.build = build_and_forge
with rig(Path(sys.argv[1]), Path(sys.argv[2]), fetch_max=5000) as made:
    made.init()
    assert made.snapshot.path(inos[0]) == b"deep/" + forged + b"/file"
    made.send_open(inos[0])
    assert made.passed().opcode == Op.OPEN
    assert made.datapath.source_traffic().opens == 0
"""


@pytest.mark.finding("K1")
def test_small_files_are_fetched_by_kernels_without_openat2(tree: Tree, tmp_path: Path) -> None:
    source = tree({"deep/er/file": 5000})
    arguments = [sys.executable, "-c", _OLD + _OLD_AND_LINKED, str(source), str(tmp_path)]
    subprocess.run(arguments, check=True, cwd=ROOT, timeout=60)


@pytest.mark.finding("K1")
@pytest.mark.fault("S9")
@pytest.mark.parametrize("name", ["..", "/."])
def test_without_openat2_a_name_that_is_none_leads_nowhere(
    tree: Tree, tmp_path: Path, name: str
) -> None:
    """A forged snapshot, which the datapath must survive."""
    # A program that resolves such a name finds a file there, and opens it.
    source = tree(dict.fromkeys(("deep/er/file", "deep/file", "file"), 5000))
    arguments = [sys.executable, "-c", _OLD + _OLD_AND_FORGED, str(source), str(tmp_path), name]
    subprocess.run(arguments, check=True, cwd=ROOT, timeout=60)


# -- what is counted -------------------------------------------------------------------------------


def test_each_open_is_reported_with_its_process_user_and_session_though_these_have_ended(
    tree: Tree, tmp_path: Path
) -> None:
    """The reader of a short process may end long before Python takes the event."""
    with rig(tree({"a": SIZE, "b": SIZE}), tmp_path, fetch_max=SIZE) as made:
        made.init()
        opens = []
        for user, ino in enumerate((made.place("a"), made.ino("b"), made.ino("b")), 1001):
            with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
                assert made.answer(made.send_open(ino, pid=process.pid, uid=user)).error == 0
                process.kill()
            opens.append((ino, process.pid, process.pid, user))
        assert made.answer(made.send_open(opens[0][0], pid=process.pid)).error == 0
        served = made.datapath.served()
        assert [(ino, *opener) for ino, _, _, *opener in served] == [
            *opens,
            (opens[0][0], process.pid, 0, 0),
        ]


def test_every_open_and_read_is_counted_once_and_in_its_order(made: Rig) -> None:
    a, b = made.place("a", 1), made.place("b", 2)
    os.set_blocking(made.datapath.fileno(), False)
    order = [a, b, b, a, b]
    handles = [(ino, made.open(ino)[0]) for ino in order]
    assert os.read(made.datapath.fileno(), 8)
    assert made.datapath.served() == [(ino, 1 if ino == a else 2, None, 0, 0, 0) for ino in order]
    assert made.datapath.served() == []
    for ino, handle in handles:
        made.read(ino, handle, 0, 1000)
        made.release(ino, handle)
    eventually(lambda: made.datapath.tallies()[2].reads == 3, "all reads are counted")
    source, first, second = made.datapath.tallies()
    assert (first.opens, first.reads, first.bytes) == (2, 2, 2000)
    assert (second.opens, second.reads, second.bytes) == (3, 3, 3000)
    assert (source.opens, source.reads, source.bytes) == (0, 0, 0)
    assert sum(first.open_counts) == 2 and sum(second.read_counts) == 3
    assert first.open_ns > 0 and second.read_ns > 0


def test_an_open_waits_for_python_rather_than_go_uncounted(made: Rig) -> None:
    ino = made.place("empty")
    ring = 1 << 16
    answer = made.ask_often(ring, Op.OPEN, ino, wire.OPEN_IN.pack(0, 0))
    handle = wire.OPEN_OUT.unpack(answer.body)[0]
    unique = made.send_open(ino)
    with pytest.raises(NoMessage):
        made.answer(unique, within_s=0.2)
    served = made.datapath.served()
    assert made.answer(unique).error == 0
    served += made.datapath.served()
    assert served == [(ino, 1, None, 0, 0, 0)] * (ring + 1)
    made.ask_often(ring + 1, Op.RELEASE, ino, wire.RELEASE_IN.pack(handle, 0, 0, 0))
    assert made.datapath.open_files() == 0


def test_a_read_without_an_open_goes_to_python_rather_than_uncounted(no_open: Rig) -> None:
    ino = no_open.place("empty")
    no_open.ask_often(1 << 16, Op.READ, ino, wire.READ_IN.pack(0, 0, 10, 0, 0, 0, 0))
    no_open.send_read(ino, 0, 0, 10)
    assert no_open.passed().opcode == Op.READ
    no_open.read(ino, 0, 5, 10)
    assert len(no_open.datapath.served()) == 1 << 16


# -- callers that are killed -----------------------------------------------------------------------


def test_a_process_killed_while_python_opens_its_file_is_released(made: Rig, killed: int) -> None:
    ino = made.ino("a")
    opened = made.send_open(ino, pid=killed)
    passed = made.passed()
    assert made.datapath.open_files() == 1
    made.interrupt(opened)
    assert made.answer(opened).error == errno.EINTR
    # The answer comes late: no process receives it, but the file that it opened is closed again.
    made.reply_open(passed)
    eventually(lambda: made.datapath.open_files() == 0, "it is closed")
    assert made.datapath.served() == [(ino, ABANDONED, None, 0, 0, 0)]
    with pytest.raises(NoMessage):
        made.any_answer(0.1)


def test_a_process_killed_while_python_reads_is_released(made: Rig, killed: int) -> None:
    unique = made.send(Op.STATFS, 1, pid=killed)
    read = made.send_read(made.ino("a"), 2, 0, 10, pid=killed)
    late = [made.passed(), made.passed()]
    made.interrupt(unique)
    made.interrupt(read)
    assert made.answer(unique).error == errno.EINTR
    assert made.answer(read).error == errno.EINTR
    for passed in late:
        if passed.opcode == Op.READ:
            _, token = split_handle(wire.READ_IN.unpack(passed.body)[0])
            made.datapath.answer(token, b"late")
        made.reply(passed, b"late")
    with pytest.raises(NoMessage):
        made.any_answer(0.1)


def test_an_interrupt_that_comes_first_is_not_lost(made: Rig, killed: int) -> None:
    made.interrupt(made.next_unique)
    time.sleep(0.1)  # another thread takes the request
    unique = made.send(Op.STATFS, 1, pid=killed)
    made.passed()
    assert made.answer(unique).error == errno.EINTR


def test_a_process_killed_after_a_signal_that_it_survived_is_released(
    made: Rig, stuck: subprocess.Popen[bytes]
) -> None:
    """The kernel reports the first signal only, so the datapath checks again, however busy."""
    unique = made.send(Op.STATFS, 1, pid=stuck.pid)
    waiting = made.passed()
    made.interrupt(unique)

    def answered() -> bool:
        other = made.send(Op.STATFS, 1)
        made.reply(made.passed())
        made.answer(other)
        try:
            return made.answer(unique, within_s=0.1).error == errno.EINTR
        except NoMessage:
            return False

    for _ in range(12):
        assert not answered()
    kill(stuck)
    eventually(answered, "it is let go")
    made.reply(waiting)


# -- the end ---------------------------------------------------------------------------------------


def test_the_end_of_the_device_is_reported(made: Rig) -> None:
    assert not made.datapath.state().ended
    made.kernel.shutdown(socket.SHUT_RDWR)
    eventually(lambda: made.datapath.state().ended, "the end is noticed")
    eventually(lambda: made.datapath.state().threads == 0, "all threads have ended")
    # One task waits for the end, and others take events: these must not take the end from it.
    for _ in range(3):
        assert made.datapath.served() == []
        poll = select.poll()
        poll.register(made.datapath.fileno(), select.POLLIN)
        assert poll.poll(0) != [], "it still wakes the task that waits for the end"


def test_stopping_lets_go_of_everything(tree: Tree, tmp_path: Path) -> None:
    tree({"a": SIZE})
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    with rig(tmp_path / "source", tmp_path) as made:
        made.init()
        ino = made.place("a")
        for _ in range(3):
            made.open(ino)
        made.send(Op.STATFS, 1)
        made.datapath.stop()
        made.datapath.stop()
        assert not made.datapath.bind(ino, 0, tier=0, size=1)
        assert not made.datapath.store(ino, b"x")
        made.datapath.answer(1, b"x")
        del made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    eventually(lambda: len(os.listdir("/proc/self/task")) <= threads, "all threads have ended")


def test_a_datapath_that_was_never_started_goes_quietly(tree: Tree, tmp_path: Path) -> None:
    del tree, tmp_path
    from monarch.fuse.datapath import _extension

    native = _extension().Datapath
    streams = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
    for entries, directories, bounds in ((1, 1, []), (2, 1, []), (1, 1, [1] * 40), (1, 1, [-1])):
        try:
            native(
                residency=bytes(2),
                marks=bytes(2),
                differs=1,
                unusable=1,
                copying=1,
                forced=1,
                entries=entries,
                directories=directories,
                bounds_ns=bounds,
                acls=(),
            )
        except (ValueError, OverflowError):
            continue
        assert (entries, bounds) == (1, [])
    # A descriptor that was never set has the number -1, and not 0.
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)] == streams


# -- whatever comes --------------------------------------------------------------------------------


@pytest.mark.fault("I4")
def test_no_message_crashes_it_and_each_request_gets_one_answer(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """In a process of its own, whose crash is a failure of this test alone."""
    seconds = pytestconfig.getoption("--soak") or 4
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuse.fuzzing", str(tmp_path), str(seconds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds * 2 + 60,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert "requests" in done.stdout


_SMALL_STACKS = """
import ctypes, runpy
libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)
assert libc.pthread_attr_init(attributes) == 0
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(128 * 1024)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0
runpy.run_module("tests.fuse.fuzzing", run_name="__main__", alter_sys=True)
"""


@pytest.mark.finding("K6")
def test_threads_need_no_more_stack_than_musl_gives_them(tmp_path: Path) -> None:
    """128 KiB, where glibc gives 8 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_STACKS, str(tmp_path), "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert "requests" in done.stdout


@pytest.mark.finding("K6")
def test_a_c_library_without_mallopt_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.ctypes, "CDLL", lambda name: object())
    run._give_memory_back()
