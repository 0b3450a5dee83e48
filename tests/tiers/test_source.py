"""The source opens and reads only regular files beneath its root."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.errors import SourceChanged, SourceError
from monarch.tiers.source import Source, identity_now, identity_of, read_whole
from tests.equipment import slowfs
from tests.equipment.slowfs import SlowSource
from tests.mount.observe import wait_until


@pytest.fixture
def opened(source: Path) -> Iterator[Source]:
    (source / "directory").mkdir()
    (source / "directory" / "file").write_bytes(b"content")
    opened = Source(os.fsencode(source))
    yield opened
    opened.close()


def test_a_file_is_fetched_whole_in_one_read(opened: Source) -> None:
    identity = identity_of(opened.status(b"directory/file"))
    fetched = opened.fetch(b"directory/file", identity)
    assert (fetched.data, fetched.reads) == (b"content", 1)


def test_an_open_file_is_the_version_that_its_status_tells(opened: Source) -> None:
    file = opened.open(b"directory/file")
    assert identity_of(file.status) == identity_of(opened.status(b"directory/file"))
    assert identity_now(file.fd) == identity_of(file.status)
    file.release()


def test_a_descriptor_is_closed_with_its_last_user(opened: Source) -> None:
    file = opened.open(b"directory/file")
    assert file.retain() is file
    fd = file.fd
    file.release()
    assert os.pread(fd, 7, 0) == b"content"
    file.release()
    with pytest.raises(OSError) as closed:
        os.fstat(fd)
    assert closed.value.errno == errno.EBADF


@pytest.mark.fault("S5")
def test_another_entry_in_the_place_of_a_file_is_not_opened(
    opened: Source, source: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    os.mkfifo(source / "fifo")
    (source / "link").symlink_to(outside / "file")
    (source / "linked").symlink_to(outside)
    for path in (b"fifo", b"link", b"linked/file", b"directory"):
        with pytest.raises(SourceChanged):
            opened.open(path)
        with pytest.raises(SourceChanged):
            opened.fetch(path, identity_of(opened.status(b"directory/file")))


def test_opening_a_missing_file_raises_that_the_source_changed(opened: Source) -> None:
    with pytest.raises(SourceChanged):
        opened.open(b"directory/missing")
    with pytest.raises(FileNotFoundError):
        opened.status(b"directory/missing")


def test_another_version_than_the_one_asked_for_is_not_fetched(
    opened: Source, source: Path
) -> None:
    for change in (b"longer content", b"short", b"CONTENT"):
        file = opened.open(b"directory/file")
        identity = identity_of(file.status)
        (source / "directory" / "file").write_bytes(change)
        os.utime(source / "directory" / "file", ns=(0, len(change)))
        with pytest.raises(SourceChanged):
            opened.fetch(b"directory/file", identity)
        # Also when it changes after it was opened.
        with pytest.raises(SourceChanged):
            read_whole(file.fd, identity)
        file.release()


def test_times_before_1970_and_fractions_are_the_same_by_either_way(
    opened: Source, source: Path
) -> None:
    os.utime(source / "directory" / "file", ns=(0, -1_234_567_890_123))
    file = opened.open(b"directory/file")
    assert identity_now(file.fd) == identity_of(os.fstat(file.fd))
    assert identity_now(file.fd).mtime_ns == -1_234_567_890_123
    file.release()


@pytest.fixture
def slow(source: Path, tmp_path: Path) -> Iterator[SlowSource]:
    if reason := slowfs.unavailable():
        pytest.skip(reason)
    (source / "directory").mkdir()
    (source / "directory" / "file").write_bytes(b"content")
    with SlowSource(source, tmp_path / "slow", attribute_s=0) as slowed:
        yield slowed


@pytest.mark.fault("S2")
@pytest.mark.promise(58)
def test_a_source_mounted_anew_is_found_under_the_descriptor_that_others_have(
    slow: SlowSource,
) -> None:
    opened = Source(os.fsencode(slow.path))
    file = opened.open(b"directory/file")
    number = opened.directory
    slow.kill()
    for _ in range(2):
        with pytest.raises(OSError) as lost:
            opened.status(b"directory/file")
        assert lost.value.errno == errno.ENOTCONN
    slow.restart()
    wait_until(lambda: _is_there(opened), "it is found")
    assert opened.directory == number
    os.close(os.open("directory/file", os.O_RDONLY, dir_fd=number))
    assert not os.get_inheritable(number)
    # A file that is being read continues where it was, if it is the same.
    assert opened.on(file, [b"directory/file"], os.pread, 4, 3) == b"tent"
    slow.kill()
    slow.restart()
    (slow.root / "directory" / "file").write_bytes(b"another")
    wait_until(lambda: _is_there(opened), "it is found again")
    with pytest.raises(OSError) as changed:
        opened.on(file, [b"directory/file"], os.pread, 4, 3)
    assert changed.value.errno == errno.ENOTCONN
    file.release()
    opened.close()


def _is_there(source: Source) -> bool:
    try:
        source.status(b"directory/file")
    except OSError:
        return False
    return True


def test_a_source_that_is_missing_or_a_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="missing") as missing:
        Source(os.fsencode(tmp_path / "missing"))
    assert missing.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="Not a directory"):
        Source(os.fsencode(tmp_path / "file"))
