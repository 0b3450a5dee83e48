"""Objects on a disk that does not accept their bytes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio.testing

from monarch.writeback.objects import Objects
from tests.writeback.rig import Model, draining

_fdatasync = os.fdatasync


class Disk:
    """Tells once, and to one caller, that it has not taken something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        self.lock = threading.Lock()
        self.at_it = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def fdatasync(self, fd: int) -> None:
        with self.lock:
            fails, self.fails = self.fails, False
        if fails:
            self.at_it.set()
            assert self.goes_on.wait(60)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        _fdatasync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@contextmanager
def written(objects: Objects, number: int, content: bytes) -> Iterator[int]:
    fd = objects.create(number)
    try:
        os.pwrite(fd, content, 0)
        yield fd
    finally:
        os.close(fd)


def failing(objects: Objects, number: int, fd: int) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        objects.sync(number, fd)


@pytest.mark.finding("W19")
@pytest.mark.promise(154)
def test_a_failed_sync_fails_until_the_object_is_written_anew(tmp_path: Path, disk: Disk) -> None:
    objects = Objects(tmp_path)
    with written(objects, 1, b"one") as fd, written(objects, 2, b"two") as other:
        os.ftruncate(fd, 3 << 20)
        os.pwrite(fd, b"end", 3 << 20)
        before = os.fstat(fd)
        disk.fails = True
        failing(objects, 1, fd)
        failing(objects, 1, fd)
        objects.sync(2, other)
        disk.fails = True
        with pytest.raises(OSError, match="Input/output error"):
            objects.rewrite(1)
        assert objects.failed == {1}
        objects.rewrite(1)
        objects.sync(1, fd)
        assert not objects.failed
        now = os.fstat(fd)
        assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert os.pread(fd, 4, 0) == b"one\0" and os.pread(fd, 4, 3 << 20) == b"end"
        disk.fails = True
        failing(objects, 1, fd)
        objects.forget_failure(1)
        objects.sync(1, fd)


@pytest.mark.promise(154)
def test_syncs_of_one_object_at_once_fail_together(tmp_path: Path, disk: Disk) -> None:
    objects = Objects(tmp_path)
    reported: list[int] = []

    def sync() -> None:
        try:
            objects.sync(1, fd)
        except OSError as error:
            reported.append(error.errno or 0)
        else:
            reported.append(0)

    with written(objects, 1, b"one") as fd:
        disk.fails = True
        disk.goes_on.clear()
        first, second = threading.Thread(target=sync), threading.Thread(target=sync)
        first.start()
        assert disk.at_it.wait(60)
        second.start()
        second.join(timeout=0.1)
        disk.goes_on.set()
        first.join()
        second.join()
    assert reported == [errno.EIO, errno.EIO]


@pytest.mark.promise(154)
async def test_an_object_whose_sync_failed_is_drained_and_not_durable(
    model: Model, clock: trio.testing.MockClock, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    believed: list[int] = []
    monkeypatch.setattr(model.journal, "mark_durable", believed.append)
    async with draining(model) as drain:
        model.create(b"new")
        node = model.begin(b"new")
        model.store(node, b"as it is read")
        fd = model.objects.open(node.object)
        disk.fails = True
        failing(model.objects, node.object, fd)
        os.close(fd)
        model.end(node)
        await drain.progress.wait(model.last_seq)
    assert (model.source / "new").read_bytes() == b"as it is read"
    assert believed == []


@pytest.mark.promise(67)
def test_objects_are_found_while_the_path_of_their_directory_leads_elsewhere(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "objects"
    directory.mkdir()
    objects = Objects(directory)
    os.close(objects.create(1))
    # As by a lazy unmount of their disk, and by another disk at its place.
    directory.rename(tmp_path / "detached")
    directory.mkdir()
    for number in (1, 2):
        fd = objects.open(1) if number == 1 else objects.create(2)
        os.write(fd, b"bytes")
        objects.sync(number, fd)
        os.close(fd)
    assert objects.numbers() == {1, 2}
    assert objects.status(2).st_size == 5
    assert not list(directory.iterdir())
