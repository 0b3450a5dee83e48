"""Random calls in random order have the same result on a mount and on a disk."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import shutil
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import MonarchCommand
from tests.equipment.remounted import WAYS, WRITABLE, Remounts, rotated, small_disk
from tests.equipment.remounts import ACTS, Others
from tests.posix.calls import (
    KEEP_SIZE,
    PUNCH_HOLE,
    ZERO_RANGE,
    fallocate,
    opened,
    read_file,
)
from tests.posix.conftest import NATIVE, Place, options
from tests.posix.sequence import Differs, content, lasting, make_tree, play
from tests.posix.trees import differences

# Each is played in a directory of its own; a soak makes a mount anew for each so many.
SEQUENCES, CALLS = 5, 300
# After each remount so many calls more. The kinds of remounts that a mount meets in turn.
CALLS_BETWEEN, REMOUNTS = 40, 4
ROUNDS = 400


@pytest.mark.promise(66, 67, 99, 128, 129, 149)
def test_random_calls_have_the_outcome_that_they_have_on_a_disk(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    soak = pytestconfig.getoption("--soak")
    end = time.monotonic() + soak
    number = sorted(("python", "relay", "passthrough", NATIVE)).index(way)
    begin = (1 + number) * 1_000_000
    for turn in itertools.count():
        directory = tmp_path / f"{turn}"
        played = Played(way, directory, range(begin, begin + SEQUENCES), number)
        if way == NATIVE:
            played.play(played.source, CALLS if not soak else 1000)
            assert differences(lasting(played.expected), lasting(played.source)) == []
        else:
            played.on_mounts(monkeypatch, CALLS if not soak else 1000)
        begin, number = begin + SEQUENCES, number + 1
        if time.monotonic() >= end:
            break
        shutil.rmtree(directory)


class Played:
    """Sequences that are played in a directory and on mounts of another that is alike. ``number``
    chooses the kinds of these mounts."""

    def __init__(self, way: str, directory: Path, seeds: range, number: int) -> None:
        self._way = way
        self._directory = directory
        self._seeds = seeds
        self._number = number
        self.expected, self.source = directory / "expected", directory / "source"
        for root in (self.expected, self.source):
            root.mkdir(parents=True)
            for seed in seeds:
                make_tree(root / f"{seed}")

    def play(self, path: Path, calls: int, *, turn: int = 0) -> None:
        """Play the sequences of all seeds, or others in another turn, below ``path``."""
        for seed in self._seeds:
            try:
                play(
                    seed + turn * 100_000_000,
                    self.expected / f"{seed}",
                    path / f"{seed}",
                    calls=calls,
                    native_datapath=self._way != "python",
                    by_user=os.geteuid() == 0 and seed % 3 == 2,
                )
            except Differs as difference:
                pytest.fail(str(difference), pytrace=False)

    def on_mounts(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
        """Play on mounts that end and are made again; at last others change the source."""
        chance = random.Random(self._seeds[0])
        with ExitStack() as stack:
            is_small = stack.enter_context(small_disk(self._directory))
            command = MonarchCommand(self._directory, uuid.uuid4().hex, self._way)
            stack.callback(command.close)
            # A user may close a file after its directory was made read-only. The drain then has to
            # try again.
            command.allows_log("the source refuses content .* Permission denied")
            more = [each for each in options(self._way) if not each.startswith("write=")]
            remounts = Remounts(
                command,
                self.source,
                monkeypatch,
                write=["write=absorb"],
                options=more,
                disk=is_small,
            )
            self.play(remounts.path, calls)
            kinds = rotated(self._number, REMOUNTS)
            for turn, kind in enumerate(kinds, start=1):
                self._mount_again(remounts, kind, WAYS[(self._number + turn) % len(WAYS)])
                if kind in WRITABLE:
                    self.play(remounts.path, CALLS_BETWEEN, turn=turn)
            self._mount_again(remounts, "same", "clean")
            assert differences(lasting(self.expected), lasting(self.source)) == []
            # Others meet changes that the source lacks.
            remounts.end("kill")
            remounts.mount("same", slow=True)
            self.play(remounts.path, CALLS_BETWEEN, turn=REMOUNTS + 1)
            remounts.end("kill" if kinds[0] != "boot" else "abandon")
            others = Others(chance, self.source, [b"%d/a/a" % seed for seed in self._seeds])
            for number in range(2):
                act = ACTS[(2 * self._number + number) % len(ACTS)]
                remounts.others_act(lambda act=act: others.act(act), act, kinds[0])
            remounts.mount(kinds[0], slow=True)
            remounts.end("abandon")
            remounts.finish(kinds[1])

    def _mount_again(self, remounts: Remounts, kind: str, way: str) -> None:
        """The next mount shows all that the sequences have done."""
        if kind == "boot" and way == "kill":
            remounts.sync()
        remounts.end(way)
        path = remounts.mount(kind)
        expected, shown = lasting(self.expected), lasting(path)
        if kind == "elsewhere":
            # It shows extended attributes in directories that it absorbs, and of files whose bytes
            # it has.
            expected, shown = (
                {name: replace(it, xattrs=()) for name, it in entries.items()}
                for entries in (expected, shown)
            )
        found = differences(expected, shown)
        assert found == [], (found, remounts.steps)
        self._have_times_of_directories(path)

    def _have_times_of_directories(self, path: Path) -> None:
        """A new mount shows the time of the drain's last change in a directory. The drain brings
        the bytes of a file as a new file, which changes the time at the source; on a disk a write
        leaves the time of the directory as it is."""
        for directory, _, _ in os.walk(self.expected):
            shown = (path / Path(directory).relative_to(self.expected)).stat()
            os.utime(directory, ns=(shown.st_mtime_ns, shown.st_mtime_ns))


def test_random_reads_and_writes_of_one_file_find_the_bytes_that_were_written_last(
    here: Place, pytestconfig: pytest.Config
) -> None:
    end = time.monotonic() + pytestconfig.getoption("--soak")
    for seed in itertools.count():
        OneFile(seed, allocates=here.way != "python").play(ROUNDS)
        if time.monotonic() >= end:
            break


class OneFile:
    """A file that is open twice and mapped, and the bytes that it has to hold."""

    LARGEST = 400_000

    def __init__(self, seed: int, *, allocates: bool) -> None:
        self._dice = random.Random(seed)
        self._seed = seed
        self._bytes = bytearray()
        self._name = f"one file {seed}"
        self._calls = [
            *(self.write, self.write, self.read, self.read, self.append),
            *(self.cut, self.map_and_write, self.map_and_read, self.copy),
            *(self.safe, self.forget, self.close_and_open, self.rename, self.look_for_holes),
        ]
        if allocates:
            self._calls += [self.allocate, self.allocate, self.punch]

    def play(self, rounds: int) -> None:
        done: list[str] = []
        self._fd = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._other = os.open(self._name, os.O_RDWR)
        try:
            for _ in range(rounds):
                done.append(self._dice.choice(self._calls)())
                size = os.fstat(self._fd).st_size
                assert size == len(self._bytes), self._mount_history(done)
            assert read_file(self._name) == self._bytes, self._mount_history(done)
        except (AssertionError, OSError) as error:
            raise AssertionError(self._mount_history(done)) from error
        finally:
            os.close(self._fd)
            os.close(self._other)
        assert read_file(self._name) == self._bytes, self._mount_history(done)

    def _mount_history(self, done: list[str]) -> str:
        last = "\n".join(done[-20:])
        return f"seed {self._seed}, {len(done)} calls, {len(self._bytes)} bytes; the last:\n{last}"

    def _range(self, *, within: bool = False) -> tuple[int, int]:
        end = len(self._bytes) if within else self.LARGEST
        offset = self._dice.randrange(end + 1)
        if self._dice.random() < 0.3:
            offset &= ~4095
        size = self._dice.choice((1, 100, 4096, 5000, self._dice.randrange(150_000)))
        return offset, max(0, min(size, end - offset))

    def _put(self, offset: int, new: bytes) -> None:
        if len(self._bytes) < offset:
            self._bytes.extend(bytes(offset - len(self._bytes)))
        self._bytes[offset : offset + len(new)] = new

    def _either(self) -> int:
        return self._dice.choice((self._fd, self._other))

    def write(self) -> str:
        offset, size = self._range()
        new = content(self._dice.randrange(1 << 30), size)
        assert os.pwrite(self._either(), new, offset) == size
        if size:
            self._put(offset, new)
        return f"write {offset} {size}"

    def append(self) -> str:
        new = content(self._dice.randrange(1 << 30), self._dice.randrange(5000))
        with opened(self._name, os.O_WRONLY | os.O_APPEND) as fd:
            assert os.write(fd, new) == len(new)
        self._put(len(self._bytes), new)
        if len(self._bytes) > 2 * self.LARGEST:
            self.cut()
        return f"append {len(new)}"

    def read(self) -> str:
        offset, size = self._range()
        expected = self._bytes[offset : offset + size]
        assert os.pread(self._either(), size, offset) == expected, f"read {offset} {size}"
        return f"read {offset} {size}"

    def cut(self) -> str:
        size = self._dice.randrange(self.LARGEST)
        if self._dice.random() < 0.5:
            os.ftruncate(self._either(), size)
        else:
            os.truncate(self._name, size)
        if size < len(self._bytes):
            del self._bytes[size:]
        else:
            self._bytes.extend(bytes(size - len(self._bytes)))
        return f"cut to {size}"

    def map_and_write(self) -> str:
        offset, size = self._range(within=True)
        if size:
            new = content(self._dice.randrange(1 << 30), size)
            with mmap.mmap(self._either(), len(self._bytes)) as pages:
                pages[offset : offset + size] = new
                if self._dice.random() < 0.3:
                    pages.flush()
            self._put(offset, new)
        return f"map and write {offset} {size}"

    def map_and_read(self) -> str:
        offset, size = self._range(within=True)
        if size:
            with mmap.mmap(self._either(), len(self._bytes), prot=mmap.PROT_READ) as pages:
                seen = pages[offset : offset + size]
            assert seen == self._bytes[offset : offset + size], f"map and read {offset} {size}"
        return f"map and read {offset} {size}"

    def copy(self) -> str:
        """From before an offset to behind it, so that the two ranges never meet."""
        middle = self._dice.randrange(len(self._bytes) + 1)
        size, to = (
            self._dice.randrange(min(middle, 50_000) + 1),
            middle + self._dice.randrange(5000),
        )
        start, done = middle - size, 0
        while done < size:
            done += os.copy_file_range(self._fd, self._other, size - done, start + done, to + done)
        if size:
            self._put(to, bytes(self._bytes[start:middle]))
        return f"copy {start} {size} to {to}"

    def safe(self) -> str:
        self._dice.choice((os.fsync, os.fdatasync))(self._either())
        return "fsync"

    def forget(self) -> str:
        os.posix_fadvise(self._either(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "forget the pages"

    def close_and_open(self) -> str:
        os.close(self._other)
        if self._dice.random() < 0.5:
            os.close(self._fd)
            self._fd = os.open(self._name, os.O_RDWR)
        self._other = os.open(self._name, os.O_RDWR)
        return "close and open"

    def rename(self) -> str:
        name = f"one file {self._seed}, {self._dice.randrange(1 << 30)}"
        os.rename(self._name, name)
        self._name = name
        return "rename"

    def look_for_holes(self) -> str:
        """A region that is reported as a hole holds zeros."""
        position, end = 0, len(self._bytes)
        while position < end:
            try:
                start = os.lseek(self._fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                start = end
            assert not any(self._bytes[position:start]), f"hole {position} to {start}"
            if start < end:
                position = os.lseek(self._fd, start, os.SEEK_HOLE)
                assert start < position <= end
            else:
                position = end
        return "look for holes"

    def allocate(self) -> str:
        offset, size = self._range()
        mode = self._dice.choice((0, KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE))
        if size:
            fallocate(self._either(), mode, offset, size)
            zeroed = bytes(size) if mode & ZERO_RANGE else b""
            end = min(offset + size, len(self._bytes)) if mode & KEEP_SIZE else offset + size
            if not mode & KEEP_SIZE and end > len(self._bytes):
                self._bytes.extend(bytes(end - len(self._bytes)))
            if end > offset:
                self._bytes[offset:end] = zeroed[: end - offset] or self._bytes[offset:end]
        return f"allocate {mode} {offset} {size}"

    def punch(self) -> str:
        offset, size = self._range()
        if size:
            fallocate(self._either(), PUNCH_HOLE | KEEP_SIZE, offset, size)
            end = min(offset + size, len(self._bytes))
            if end > offset:
                self._bytes[offset:end] = bytes(end - offset)
        return f"punch {offset} {size}"
