"""Every way that Linux has to read a file, over a mount, cold and warm."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import Client, settle, three_epochs
from tests.conftest import MonarchCommand, contents
from tests.equipment import slowfs
from tests.equipment.inotify import OpenCounter

# Odd sizes around the page, the read-ahead and the requests of FUSE; the last is a large file.
SIZES = (0, 1, 4095, 4096, 4097, 131_071, 131_073, 1_048_577, 3_999_999, 9_000_001)
INLINE = [size for size in SIZES if size < 4 << 20]

Reader = Callable[[str, int], bytes]


def by_small_reads(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    parts = []
    while part := os.read(fd, 7777):
        parts.append(part)
    os.close(fd)
    return b"".join(parts)


def by_one_read(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    content = os.read(fd, size + 100)
    assert os.read(fd, 100) == b""
    os.close(fd)
    return content


def by_pread_at_random(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    offsets = list(range(0, size, 10_007))
    random.Random(size).shuffle(offsets)
    content = bytearray(size)
    for offset in offsets:
        part = os.pread(fd, 10_007, offset)
        content[offset : offset + len(part)] = part
    assert os.pread(fd, 10, size) == b""
    assert os.pread(fd, 10, size + 10_000) == b""
    os.close(fd)
    return bytes(content)


def by_vectors(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    buffers = [bytearray(size // 2), bytearray(size - size // 2), bytearray(10)]
    assert os.preadv(fd, buffers, 0) == size
    os.close(fd)
    return bytes(buffers[0] + buffers[1])


def by_mmap(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        if size == 0:
            return file.read()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert len(mapped) == size
            return bytes(mapped)


def by_mmap_backwards(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        if size == 0:
            return b""
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
    # The mapping outlives its descriptor.
    with mapped:
        pages = range(0, size, mmap.PAGESIZE)
        return b"".join(
            reversed([mapped[start : start + mmap.PAGESIZE] for start in reversed(pages)])
        )


def by_direct_io(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    # Direct I/O wants memory that starts on a page, which an anonymous mapping does.
    with mmap.mmap(-1, 1 << 20) as buffer:
        content = bytearray()
        while count := os.preadv(fd, [buffer], len(content)):
            content += buffer[:count]
            if count % 4096:
                break
    os.close(fd)
    return bytes(content)


def by_sendfile(path: str, size: int) -> bytes:
    """To a socket, as a web server does."""
    ours, theirs = socket.socketpair()
    fd = os.open(path, os.O_RDONLY)
    content = bytearray()

    def receive() -> None:
        while part := theirs.recv(1 << 20):
            content.extend(part)

    receiver = threading.Thread(target=receive)
    receiver.start()
    offset = 0
    while count := os.sendfile(ours.fileno(), fd, offset, 1 << 20):
        offset += count
    ours.close()
    receiver.join()
    theirs.close()
    os.close(fd)
    return bytes(content)


def by_copy_file_range(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    target = os.memfd_create("copy")
    try:
        while os.copy_file_range(fd, target, 1 << 20):
            pass
        return os.pread(target, size + 1, 0)
    except OSError as error:
        # Across file systems of different kinds the kernel may refuse, and tools fall back.
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.read(fd, size + 1)
    finally:
        os.close(fd)
        os.close(target)


def by_splice(path: str, size: int) -> bytes:
    """Through a pipe, as ``cat file | reader`` in C programs does without copying."""
    fd = os.open(path, os.O_RDONLY)
    output, input_ = os.pipe()
    content = bytearray()
    copy = _libc_splice()
    while (count := copy(fd, input_, 65536)) > 0:
        while count > 0:
            part = os.read(output, count)
            content += part
            count -= len(part)
    for one in (fd, output, input_):
        os.close(one)
    return bytes(content)


def _libc_splice() -> Callable[[int, int, int], int]:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.splice.restype = ctypes.c_ssize_t

    def splice(source: int, target: int, count: int) -> int:
        moved: int = libc.splice(source, None, target, None, ctypes.c_size_t(count), 0)
        if moved < 0:
            raise OSError(ctypes.get_errno(), "splice")
        return moved

    return splice


def by_stdio(path: str, size: int) -> bytes:
    return subprocess.run(["cat", path], capture_output=True, check=True).stdout


def by_relative_name(path: str, size: int) -> bytes:
    directory, name = os.path.split(path)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fd = os.open(name, os.O_RDONLY, dir_fd=handle)
    os.close(handle)
    with open(fd, "rb", buffering=0) as file:
        return file.readall()


READERS: tuple[Reader, ...] = (
    by_small_reads,
    by_one_read,
    by_pread_at_random,
    by_vectors,
    by_mmap,
    by_mmap_backwards,
    by_direct_io,
    by_sendfile,
    by_copy_file_range,
    by_splice,
    by_stdio,
    by_relative_name,
)


def fill(source: Path, sizes: tuple[int, ...] | list[int]) -> dict[str, str]:
    """Files of ``sizes`` in two directories, and their digests by name."""
    expected = {}
    for number, size in enumerate(sizes):
        name = f"part{number % 2}/{size:08d}.bin"
        content = random.Random(size).randbytes(size)
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
        expected[name] = hashlib.sha256(content).hexdigest()
    return expected


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_way_to_read_gives_the_bytes_of_the_source_and_opens_it_once(
    monarch: MonarchCommand, source: Path, reader: Reader
) -> None:
    expected = fill(source, INLINE)

    def epoch(root: Path, number: int) -> dict[str, str]:
        names = list(expected)
        random.Random(number).shuffle(names)
        found = {}
        for name in names:
            content = reader(str(root / name), int(name[-12:-4]))
            found[name] = hashlib.sha256(content).hexdigest()
        return found

    three_epochs(monarch, source, epoch, expected=expected)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_way_to_read_a_large_file_works_while_it_is_copied_and_after(
    monarch: MonarchCommand, source: Path, reader: Reader
) -> None:
    expected = fill(source, SIZES[-1:])
    (name,) = expected
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    for _ in range(3):
        content = reader(str(mounted.path / name), SIZES[-1])
        assert hashlib.sha256(content).hexdigest() == expected[name]
    settle(mounted, 1)
    with OpenCounter(source) as opened:
        content = reader(str(mounted.path / name), SIZES[-1])
        assert hashlib.sha256(content).hexdigest() == expected[name]
        assert opened.count() == 0


def test_a_file_read_in_parts_costs_the_source_its_bytes_once(
    monarch: MonarchCommand, source: Path
) -> None:
    (source / "file").write_bytes(contents("file", 1_000_000))
    mounted = monarch.mount(source)
    with OpenCounter(source) as opened:
        for offset in range(0, 1_000_000, 50_000):
            with open(mounted.path / "file", "rb", buffering=0) as file:
                file.seek(offset)
                assert file.read(100) == contents("file", 1_000_000)[offset : offset + 100]
        settle(mounted, 1)
        assert opened.paths() == {"file": 1}
    assert mounted.status()["source_totals"]["bytes"] == 1_000_000


def test_two_opens_of_one_file_have_offsets_of_their_own(
    monarch: MonarchCommand, source: Path
) -> None:
    content = contents("file", 100_000)
    (source / "file").write_bytes(content)
    mounted = monarch.mount(source)
    path = mounted.path / "file"
    for _ in ("cold", "warm"):
        first, second = (os.open(path, os.O_RDONLY) for _ in range(2))
        assert os.read(first, 1000) == content[:1000]
        assert os.read(second, 1000) == content[:1000]
        assert os.pread(first, 10, 50_000) == content[50_000:50_010]
        assert os.read(first, 1000) == content[1000:2000]
        assert os.lseek(second, 0, os.SEEK_CUR) == 1000
        os.close(first)
        assert os.read(second, 1000) == content[1000:2000]
        os.close(second)
        settle(mounted, 1)


def test_duplicates_of_a_descriptor_share_its_offset_and_outlive_it(
    monarch: MonarchCommand, source: Path
) -> None:
    content = contents("file", 100_000)
    (source / "file").write_bytes(content)
    mounted = monarch.mount(source)
    for _ in ("cold", "warm"):
        fd = os.open(mounted.path / "file", os.O_RDONLY)
        duplicate = os.dup(fd)
        assert os.read(fd, 10) + os.read(duplicate, 10) == content[:20]
        os.close(fd)
        command = [sys.executable, "-c", "import os; print(os.read(0, 10).hex())"]
        child = subprocess.run(command, stdin=duplicate, capture_output=True, check=True)
        assert bytes.fromhex(child.stdout.decode()) == content[20:30]
        assert os.read(duplicate, 10) == content[30:40]
        os.close(duplicate)
        settle(mounted, 1)


def test_a_descriptor_opened_cold_reads_on_after_its_file_was_promoted(
    monarch: MonarchCommand, source: Path
) -> None:
    size = 9_000_001
    (source / "large").write_bytes(contents("large", size))
    mounted = monarch.mount(source, tiers={"fast": "100MiB"})
    with open(mounted.path / "large", "rb", buffering=0) as file:
        assert file.read(1000) == contents("large", size)[:1000]
        settle(mounted, 1)
        file.seek(size - 1000)
        assert file.read() == contents("large", size)[-1000:]


def test_eight_processes_that_start_at_once_cost_the_source_one_open_per_file(
    monarch: MonarchCommand, source: Path, tmp_path: Path, client: Callable[..., Client]
) -> None:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    expected = fill(source, [1000 * number + 1 for number in range(60)])
    with slowfs.SlowSource(source, tmp_path / "slow") as slow:
        slow.rules("lat open 5", "lat read 5")
        mounted = monarch.mount(slow.path, tiers={"fast": "100MiB"})
        before = slow.counters()["open"]
        clients = [client("all_files") for _ in range(8)]
        for number, one in enumerate(clients):
            # Half of them in the same order, so that they meet at the same files.
            one.begin(mounted.path, number // 2 % 2)
        assert [one.finish() for one in clients] == [expected] * 8
        settle(mounted, len(expected))
        assert slow.counters()["open"] - before == len(expected)
        mounted.umount()
