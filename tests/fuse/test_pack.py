"""What the datapath answers for a mount of a pack: extents of chunks, and bytes that it keeps."""

from __future__ import annotations

import ctypes
import random
import subprocess
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from monarch.packmount.source import PackSource
from monarch.types import Ino
from tests.conftest import contents
from tests.fuse import wire
from tests.fuse.rig import Rig, rig
from tests.fuse.wire import Op
from tests.packs.trees import pack

ROOT = Path(__file__).parents[2]
# Sizes on both sides of each border of the digest.
SIZES = (1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 96, 97, 128, 129, 240, 241, 1024, 1025, 1088, 5000)
FETCHED = 0xFE


def name_of(size: int) -> str:
    return f"{size:05d}"


@contextmanager
def rig_of(directory: Path, *, no_open: bool) -> Iterator[Rig]:
    """A file of each size, in one chunk, and an empty one."""
    (directory / "tree").mkdir()
    (directory / "tree" / "empty").touch()
    for size in SIZES:
        (directory / "tree" / name_of(size)).write_bytes(contents(name_of(size), size))
    pack(directory / "tree", directory / "pack", chunk=1 << 20)
    with rig(
        directory / "pack", directory, fetch_max=max(SIZES), pack=True, no_open=no_open
    ) as made:
        made.init(wire.INIT_NO_OPEN_SUPPORT if no_open else 0)
        yield made


@pytest.fixture(params=[False, True], ids=["open", "no_open"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with rig_of(tmp_path, no_open=request.param) as it:
        yield it


@pytest.fixture
def with_opens(tmp_path: Path) -> Iterator[Rig]:
    with rig_of(tmp_path, no_open=False) as it:
        yield it


def read(made: Rig, ino: Ino, size: int) -> bytes:
    """Opens, reads and releases a file that the datapath opens itself."""
    if made.datapath.state().no_open:
        return made.read(ino, 0, 0, size).body
    handle, _, _ = made.open(ino)
    found = made.read(ino, handle, 0, size).body
    made.release(ino, handle)
    return found


def is_passed_on(made: Rig, ino: Ino) -> bool:
    """Whether Python must open, or read, a file."""
    if made.datapath.state().no_open:
        unique = made.send_read(ino, 0, 0, 1)
    else:
        unique = made.send_open(ino)
    found = made.passed()
    made.reply(found, error=5)
    assert made.answer(unique).error == 5
    return (found.opcode, found.node) in ((Op.OPEN, ino), (Op.READ, ino))


def lend(made: Rig) -> None:
    """Python reads the first file, and has its chunk open from then on."""
    ino = made.ino(name_of(SIZES[0]))
    made.opened.fetch(b"", made.snapshot.attributes(ino).identity)


@pytest.mark.parametrize("options", [(), ("-U__SSE2__",)], ids=["as built", "portable"])
def test_the_digest_is_that_of_the_library(tmp_path: Path, options: Sequence[str]) -> None:
    code, library = ROOT / "monarch/fuse/native/_xxh3.c", tmp_path / "xxh3.so"
    command = ["gcc", "-O2", "-std=c11", "-shared", "-fPIC", str(code), "-o", str(library)]
    subprocess.run([*command, *options], check=True)
    functions = ctypes.CDLL(str(library))
    for function in (functions.xxh3, functions.xxh3_high):
        function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    draw = random.Random(1)
    for size in (*range(1200), 10_000, 65_536, 100_001):
        data = draw.randbytes(size)
        assert functions.xxh3(data, size) == xxhash.xxh3_64_intdigest(data), size
        assert functions.xxh3_high(data, size) == xxhash.xxh3_128_intdigest(data) >> 64, size


@pytest.mark.promise(233)
def test_files_of_a_chunk_that_is_open_are_read_without_python(made: Rig) -> None:
    first = made.ino(name_of(SIZES[0]))
    assert is_passed_on(made, first)
    lend(made)
    for size in SIZES:
        ino = made.ino(name_of(size))
        assert read(made, ino, size + 1) == contents(name_of(size), size)
        ((found, what, fetched, *_),) = made.datapath.served()
        assert (found, what) == (ino, FETCHED) and fetched is not None
        assert bytes(fetched) == contents(name_of(size), size)
        made.datapath.taken(ino)
    traffic = made.datapath.source_traffic()
    assert (traffic.opens, traffic.reads, traffic.bytes) == (0, len(SIZES), sum(SIZES))
    assert made.datapath.open_files() == 0
    # A chunk that is not open any more is opened by Python.
    made.opened.close()
    assert is_passed_on(made, first)
    made.opened = type(made.opened)(made.opened.path)


@pytest.mark.promise(233)
def test_bytes_that_differ_from_the_index_are_left_to_python(made: Rig) -> None:
    lend(made)
    assert isinstance(made.opened, PackSource)
    damaged = made.ino(name_of(SIZES[-1]))
    number = made.snapshot.attributes(damaged).source_ino
    (chunk,) = (made.source / "chunks").glob("0*.chunk")
    with chunk.open("r+b") as file:
        file.seek(int(made.opened.files.offset[number]) + SIZES[-1] // 2)
        file.write(b"?!")
    assert is_passed_on(made, damaged)
    size = SIZES[-2]
    assert read(made, made.ino(name_of(size)), size) == contents(name_of(size), size)


def test_bytes_that_python_gives_are_served_until_it_takes_them_back(made: Rig) -> None:
    size = SIZES[-1]
    ino = made.ino(name_of(size))
    # A part of them, to see where the bytes come from.
    given = b"xyz" + bytes(size)
    assert made.datapath.keep(array("Q", [ino, 3, size]), given) == [bytes(size)]
    assert not made.datapath.is_open(ino) and made.datapath.open_files() == 0
    for _ in range(2):
        assert read(made, ino, size) == bytes(size)
    assert [event[:3] for event in made.datapath.served()] == [(ino, 0, None)] * 2
    assert made.is_quiet()
    # They are kept already.
    assert made.datapath.keep(array("Q", [ino, 0, size]), given) == [None]
    made.datapath.unkeep(ino)
    made.datapath.unkeep(ino)
    assert is_passed_on(made, ino)


def test_bytes_that_python_gives_leave_room_for_those_that_are_fetched(made: Rig) -> None:
    lend(made)
    large, size = made.ino(name_of(SIZES[-1])), SIZES[-2]
    # As many as the datapath may hold of those that it fetches itself.
    assert made.datapath.keep(array("Q", [large, 0, 4 * SIZES[-1]]), bytes(4 * SIZES[-1])) != [None]
    assert read(made, made.ino(name_of(size)), size) == contents(name_of(size), size)


def test_a_file_that_is_open_keeps_the_bytes_that_python_takes_back(with_opens: Rig) -> None:
    made = with_opens
    ino = made.ino(name_of(5000))
    (kept,) = made.datapath.keep(array("Q", [ino, 0, 5000]), bytes(5000))
    handle, _, _ = made.open(ino)
    assert made.datapath.is_open(ino) and made.datapath.open_files() == 1
    made.datapath.unkeep(ino)
    assert made.read(ino, handle, 0, 5000).body == bytes(5000)
    assert made.release(ino, handle).error == 0
    assert not made.datapath.is_open(ino) and made.datapath.open_files() == 0
    assert is_passed_on(made, ino)
    assert kept is not None and bytes(kept) == bytes(5000)


def test_only_files_of_the_mount_and_bytes_that_are_there_are_kept(made: Rig) -> None:
    ino = made.ino(name_of(5000))
    wrong = [(0, 0, 1), (made.snapshot.entries + 1, 0, 1), (ino, 0, 11), (ino, 11, 0), (ino, 1, 10)]
    for each in wrong:
        assert made.datapath.keep(array("Q", each), bytes(10)) == [None]
    assert made.datapath.keep(array("Q"), b"") == []
    assert made.datapath.keep(array("Q", [ino, 2**64 - 1, 2]), bytes(10)) == [None]


def test_no_bytes_are_kept_for_a_file_that_python_reads(with_opens: Rig) -> None:
    ino = with_opens.ino(name_of(5000))
    unique = with_opens.send_open(ino)
    with_opens.reply_open(with_opens.passed())
    assert with_opens.answer(unique).error == 0
    assert with_opens.datapath.keep(array("Q", [ino, 0, 10]), bytes(10)) == [None]
