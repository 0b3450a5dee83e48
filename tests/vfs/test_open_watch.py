"""Opens that inotify reports: real watches of a directory, set by another process."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from monarch.posix.inotify import OpenEvents
from monarch.types import Ino
from monarch.vfs import open_watch
from monarch.vfs.open_watch import OpenWatch

_EVENT = struct.Struct("iIII")
_IN_OPEN, _IN_UNMOUNT, _IN_Q_OVERFLOW, _IN_IGNORED = 0x20, 0x2000, 0x4000, 0x8000
_IN_ISDIR = 0x40000000

DIRECTORIES = {Ino(1): b"", Ino(2): b"sub"}
FILES = {(1, b"a"): Ino(3), (1, b"b"): Ino(4), (2, b"a"): Ino(5)}


class Names:
    """Two directories with files."""

    def __init__(self, directories: dict[Ino, bytes]) -> None:
        self._directories = directories

    def directories_of_files(self) -> list[Ino]:
        return sorted(self._directories)

    def path(self, ino: Ino) -> bytes:
        return self._directories[ino]


class Reader:
    """What the datapath does with events, in Python."""

    def opened(self, events: bytes, directories: array[int]) -> array[int]:
        found = array("I")
        at = 0
        while at < len(events):
            number, mask, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size
            name = events[at : at + length].rstrip(b"\0")
            at += length
            if mask & _IN_UNMOUNT:
                found.append(0xFFFFFFFF)
                break
            if mask & (_IN_Q_OVERFLOW | _IN_IGNORED):
                found.append(0)
            elif not mask & _IN_ISDIR and name:
                found.append(FILES[directories[number], name])
        return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in ("a", "b", "sub/a"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
async def watch(place: Path) -> AsyncIterator[OpenWatch]:
    before = queues()
    watch = OpenWatch(Names(DIRECTORIES), Reader(), place)
    yield watch
    watch.close()
    assert queues() == before, "its descriptor is closed"


def queues() -> int:
    """The descriptors of inotify that this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += "inotify" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def open_all(place: Path, *names: str) -> None:
    for name in names:
        (place / name).read_bytes()


@pytest.mark.promise(183)
async def test_opens_are_counted_in_their_order_of_any_process(
    watch: OpenWatch, place: Path
) -> None:
    open_all(place, "a")
    assert not watch.opened() and not watch.counts
    await watch.begin()
    assert watch.counts and not watch.opened()
    open_all(place, "b", "a")
    subprocess.run([sys.executable, "-S", "-c", "open('a').close()"], cwd=place / "sub", check=True)
    os.listdir(place / "sub")
    open_all(place, "b")
    assert watch.opened().tolist() == [4, 3, 5, 4]
    assert not watch.opened()
    assert watch.opens == 4


@pytest.mark.promise(183)
async def test_opens_by_processes_of_the_daemon_are_not_counted(
    watch: OpenWatch, place: Path
) -> None:
    await watch.begin()
    watch.expect_own(Ino(3))
    open_all(place, "a", "b", "a", "b")
    assert watch.opened().tolist() == [4, 3, 4]
    assert watch.opens == 3


async def test_the_events_of_an_unmount_that_are_read_in_two_turns_are_no_loss(
    watch: OpenWatch, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = queues()
    await watch.begin()
    turns = [_EVENT.pack(1, _IN_UNMOUNT, 0, 0), _EVENT.pack(1, _IN_IGNORED, 0, 0)]
    monkeypatch.setattr(OpenEvents, "read", lambda events: turns.pop(0))
    for _ in range(2):
        assert not watch.opened()
    assert not watch.not_counted
    assert queues() == others


@pytest.mark.promise(183)
async def test_lost_events_end_the_count(
    watch: OpenWatch, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = queues()
    await watch.begin()
    assert queues() == others + 1
    open_all(place, "a", "b")
    read = OpenEvents.read

    def read_and_overflow(events: OpenEvents) -> bytes:
        return read(events) + _EVENT.pack(-1, _IN_Q_OVERFLOW, 0, 0)

    monkeypatch.setattr(OpenEvents, "read", read_and_overflow)
    assert watch.opened().tolist() == [3, 4]
    assert watch.not_counted == "the kernel has lost reports of opens"
    assert queues() == others
    open_all(place, "a")
    watch.expect_own(Ino(3))
    assert not watch.opened()
    # The task that waits for events ends.
    await watch.run(lambda: None)


@pytest.mark.promise(183)
async def test_no_directory_is_watched_if_not_all_may_be(
    watch: OpenWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_watch, "most_watches", lambda: 4)
    await watch.begin()
    assert watch.not_counted == "2 directories, and at most 1 are watched"
    await watch.run(lambda: None)


@pytest.mark.promise(183)
async def test_a_directory_that_cannot_be_watched_ends_the_count(place: Path) -> None:
    watch = OpenWatch(Names({**DIRECTORIES, Ino(9): b"missing"}), Reader(), place)
    await watch.begin()
    assert watch.not_counted.startswith("a directory cannot be watched: ")
    assert os.strerror(errno.ENOENT).lower() in watch.not_counted.lower()
    open_all(place, "a")
    assert not watch.opened()


@pytest.mark.promise(183)
@pytest.mark.parametrize(
    ("number", "setting"),
    [(errno.ENOSPC, "max_user_watches"), (errno.EMFILE, "max_user_instances")],
)
async def test_the_setting_that_ends_the_count_is_shown(
    watch: OpenWatch, monkeypatch: pytest.MonkeyPatch, number: int, setting: str
) -> None:
    async def set_watches(events: OpenEvents, inos: list[Ino]) -> tuple[int, array[int]]:
        if number == errno.EMFILE:
            raise OSError(number, os.strerror(number))
        return number, array("i", [1])

    monkeypatch.setattr(watch, "_set_watches", set_watches)
    await watch.begin()
    assert watch.not_counted.endswith(f"fs.inotify.{setting}")


@pytest.mark.promise(183)
async def test_opens_wake_the_task_that_counts_them(watch: OpenWatch, place: Path) -> None:
    counted: list[int] = []
    async with trio.open_nursery() as tasks:
        tasks.start_soon(watch.run, lambda: counted.extend(watch.opened()))
        await watch.begin()
        open_all(place, "a", "sub/a")
        with trio.fail_after(60):
            while len(counted) < 2:
                await trio.sleep(0.01)
        watch.close()
    assert counted == [3, 5]
