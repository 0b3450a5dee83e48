"""Reads of copies that the datapath answers through a pipe, and those beside its limits."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from tests.conftest import MonarchCommand, Mounted, Tree, contents
from tests.equipment.pipes import RefusedPipes
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import account, copy_of, epoch, settled, wait_until

pytestmark = pytest.mark.modes("relay", "no_open")

KiB, MiB = 1 << 10, 1 << 20
CONTENT = {"large": contents("large", 2 * MiB + 12_345)}
# The least and the largest answer that goes through a pipe, and their neighbours, in pages.
PAGES = (1, 3, 4, 5, 27, 32, 61, 62, 63, 64, 65, 256)


# The pipes of the datapath (monarch/fuse/native/_datapath.h).
MOST_PIPES = 64


def warm(monarch: MonarchCommand, tree: Tree) -> Mounted:
    source = tree(CONTENT)
    mounted = monarch.mount(source)
    epoch(mounted, CONTENT)
    settled(mounted)
    return mounted


@contextmanager
def directly(path: Path) -> Iterator[Callable[[int, int], bytes]]:
    """A function that reads so many bytes at an offset in one request, without readahead."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, MiB) as room, memoryview(room) as view:

        def read(size: int, offset: int) -> bytes:
            return bytes(view[: os.preadv(fd, [view[:size]], offset)])

        yield read
    os.close(fd)


def read_into_memory(mounted: Mounted) -> int:
    """The bytes that the daemon has read into its memory so far."""
    fields = Path(f"/proc/{mounted.pid}/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


def test_reads_of_each_size_at_each_offset_have_the_bytes_of_the_copy(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = warm(monarch, tree)
    content = CONTENT["large"]
    with directly(mounted.path / "large") as read:
        for pages in PAGES:
            for offset in (0, 1, 4096, 100_001, MiB, len(content) - 5000, len(content)):
                size = pages * 4096
                assert read(size, offset) == content[offset : offset + size]


def test_the_bytes_of_a_copy_are_not_read_into_the_memory_of_the_daemon(
    monarch: MonarchCommand, tree: Tree
) -> None:
    mounted = warm(monarch, tree)
    before = read_into_memory(mounted)
    with directly(mounted.path / "large") as read:
        for number in range(200):
            assert len(read(128 * KiB, number % 8 * 4096)) == 128 * KiB
    # Of 25 MiB; the daemon reads other files meanwhile.
    assert read_into_memory(mounted) - before < 2 * MiB


def test_a_copy_that_ends_within_an_answer_is_read_on_at_the_source(
    monarch: MonarchCommand, tree: Tree
) -> None:
    monarch.expects_log("tier fast: copy of .* dropped")
    mounted = warm(monarch, tree)
    content = CONTENT["large"]
    with (mounted.path / "large").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), 100_000, 0) == content[:100_000]
        os.truncate(copy_of(mounted, "large"), MiB + 50_000)
        assert os.pread(file.fileno(), 100_000, MiB) == content[MiB : MiB + 100_000]
        # The thread's next answers begin with their own bytes.
        assert os.pread(file.fileno(), 100_000, 200_000) == content[200_000:300_000]
    wait_until(lambda: not account(mounted)["handles"]["open_files"], "the release arrived")
    epoch(mounted, CONTENT)


def ends_of_pipes(mounted: Mounted) -> int:
    """The descriptors of pipes that the daemon has open."""
    found = 0
    for path in Path(f"/proc/{mounted.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(path).startswith("pipe:")
    return found


class HangingReaders:
    """Many readers, each with a file and, while the tier hangs, a thread of the daemon."""

    CONTENT: ClassVar = {f"{number:03}": contents(str(number), 64 * KiB) for number in range(120)}

    def __init__(self, mounted: Mounted, tier: SlowSource) -> None:
        self._mounted, self._tier = mounted, tier
        epoch(mounted, self.CONTENT)
        settled(mounted)

    @property
    def threads(self) -> int:
        return len(list(Path(f"/proc/{self._mounted.pid}/task").iterdir()))

    @contextmanager
    def hang(self) -> Iterator[None]:
        """Each reader waits for the tier, and has its bytes at the end."""
        failed, opened = [], threading.Barrier(len(self.CONTENT) + 1)
        hangs = threading.Event()

        def read(name: str) -> None:
            with directly(self._mounted.path / name) as read:
                opened.wait()
                hangs.wait()
                failed.extend([name] * (read(64 * KiB, 0) != self.CONTENT[name]))

        readers = [threading.Thread(target=read, args=(name,)) for name in self.CONTENT]
        for reader in readers:
            reader.start()
        opened.wait()
        self._tier.rules("hang read copies-")
        hangs.set()
        try:
            wait_until(lambda: self.threads > len(readers), "each reader has a thread")
            yield
        finally:
            self._tier.rules()
            for reader in readers:
                reader.join()
        assert not failed


@pytest.mark.modes("relay")
def test_threads_that_wait_for_the_source_keep_no_pipe_from_others(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    cold = {f"cold/{number:03}": contents(str(number), 5000) for number in range(100)}
    with SlowSource(tree({**CONTENT, **cold}), tmp_path / "slow") as slow:
        mounted = monarch.mount(slow.path)
        epoch(mounted, CONTENT)
        settled(mounted)
        slow.rules("hang * .*")
        failed: list[str] = []

        def read(name: str) -> None:
            failed.extend([name] * ((mounted.path / name).read_bytes() != cold[name]))

        readers = [threading.Thread(target=read, args=(name,)) for name in cold]
        for reader in readers:
            reader.start()
        try:
            wait_until(lambda: slow.counters()["hanging"] > MOST_PIPES, "more wait than have pipes")
            before = read_into_memory(mounted)
            with directly(mounted.path / "large") as read_directly:
                for number in range(200):
                    offset = number % 8 * 4096
                    wanted = CONTENT["large"][offset : offset + 128 * KiB]
                    assert read_directly(128 * KiB, offset) == wanted
            # Of 25 MiB; the daemon reads other files meanwhile.
            assert read_into_memory(mounted) - before < 2 * MiB
        finally:
            slow.rules()
            for reader in readers:
                reader.join()
        assert not failed
        mounted.umount()


@pytest.mark.modes("relay")
def test_few_of_many_threads_have_a_pipe(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    """The kernel limits the places of all pipes of a user."""
    source = tree(HangingReaders.CONTENT)
    (tmp_path / "below").mkdir()
    with SlowSource(tmp_path / "below", tmp_path / "tiers" / "fast") as tier:
        mounted = monarch.mount(source, options=["limits.tier_timeout=60s"])
        readers = HangingReaders(mounted, tier)
        before = ends_of_pipes(mounted)
        with readers.hang():
            assert ends_of_pipes(mounted) - before <= 2 * MOST_PIPES
        mounted.umount()


@pytest.mark.modes("relay")
def test_threads_that_begin_do_not_try_what_was_refused_before(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    pipes = RefusedPipes(tmp_path)
    monarch.wrapper = pipes.by
    source = tree(HangingReaders.CONTENT)
    (tmp_path / "below").mkdir()
    with SlowSource(tmp_path / "below", tmp_path / "tiers" / "fast") as tier:
        mounted = monarch.mount(source, options=["limits.tier_timeout=60s"])
        readers = HangingReaders(mounted, tier)
        before = pipes.tries
        for _ in range(2):
            with readers.hang():
                pass
            wait_until(lambda: readers.threads < len(readers.CONTENT) // 2, "most threads ended")
        assert MOST_PIPES // 2 < pipes.tries - before <= MOST_PIPES
        mounted.umount()


def test_a_refused_pipe_is_not_tried_for_each_read(
    monarch: MonarchCommand, tree: Tree, tmp_path: Path
) -> None:
    pipes = RefusedPipes(tmp_path)
    monarch.wrapper = pipes.by
    mounted = warm(monarch, tree)
    with directly(mounted.path / "large") as read:
        for number in range(500):
            offset = number % 8 * 4096
            assert read(64 * KiB, offset) == CONTENT["large"][offset : offset + 64 * KiB]
    assert 0 < pipes.tries <= MOST_PIPES
