"""The rests of never synced files after a power cut are kept, and served as no other file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from monarch.types import Identity
from monarch.writeback import earlier, journal, journal_found
from monarch.writeback.doubtful import Doubtful
from monarch.writeback.journal import Journal, Op, Replay
from monarch.writeback.objects import Objects, object_path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "absorbed"


def opened(directory: Path, boot: str) -> Replay:
    with_journal = Journal.open(directory, source=b"/source", boot=boot)
    with_journal.close()
    return with_journal.replay()


def filled(directory: Path, content: bytes = b"bytes") -> None:
    """Three files: one written, one made, one copied up from the source and not changed."""
    writer = Journal.open(directory, source=b"/source", boot="one")
    objects = Objects(directory)
    for number in (1, 2, 3):
        fd = objects.create(number)
        os.write(fd, b"" if number == 2 else content)
        os.utime(fd, ns=(7, 7))
        os.close(fd)
    was = Identity(len(content), 7, 8, 9)
    for op in (
        Op(kind="create", path=b"a", object=1),
        Op(kind="content", path=b"a", paths=(b"a",), object=1, size=6),
        Op(kind="rename", path=b"a", to=b"d/\xff", object=1),
        Op(kind="create", path=b"empty", object=2),
        Op(kind="take", path=b"taken", object=3, was=was),
    ):
        writer.append(op)
    writer.close()


@pytest.mark.promise(137)
def test_it_is_kept_with_what_is_known_of_it_until_it_is_discarded(directory: Path) -> None:
    filled(directory)
    for _ in range(2):
        found = opened(directory, "two")
        kept = Doubtful(directory)
        kept.keep(found.doubted)
        (it,) = kept.list()
        assert (it.number, it.path, it.file.read_bytes()) == (1, b"d/\xff", b"bytes")
        assert (it.size, it.recorded) == (5, 6)
        assert it.written_ns > 0 and it.found_ns >= it.written_ns
        assert kept.held == it.file.stat().st_blocks * 512 > 0
        # Of the others there is nothing to be kept, and none of this is an object any more.
        assert Objects(directory).numbers() == set()
        Objects(directory).sweep(set())
        assert earlier.inspect(directory).unknown == ()
    kept.discard(1)
    assert kept.list() == Doubtful(directory).list() == [] and kept.held == 0
    assert not list((directory / "doubtful").iterdir())


@pytest.mark.promise(137)
def test_a_mount_that_was_killed_before_it_was_put_aside_leaves_it_to_the_next(
    directory: Path,
) -> None:
    filled(directory)
    # The loss is recorded, and reported once.
    assert opened(directory, "two").lost
    assert earlier.inspect(directory).unknown == ()
    found = opened(directory, "two")
    assert not found.lost
    kept = Doubtful(directory)
    kept.keep(found.doubted)
    assert [it.path for it in kept.list()] == [b"d/\xff"]


def test_objects_that_cannot_be_moved_aside_stay_for_the_next_mount(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(directory)
    found = opened(directory, "two")
    (directory / "doubtful").write_bytes(b"in the way")
    kept = Doubtful(directory)
    kept.keep(found.doubted)
    assert kept.list() == [] and 1 in Objects(directory).numbers()
    assert journal.read_replay(directory).all_doubted >= {1}


@pytest.mark.fault("T16")
@pytest.mark.promise(68)
@pytest.mark.promise(67)
def test_bytes_that_the_tier_lost_without_a_start_of_the_machine_are_no_whole_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_found, "boot_now", lambda: "one")
    writer = Journal.open(directory, source=b"/source", boot="one")
    objects = Objects(directory)
    for number, content in ((1, b""), (2, b"by"), (3, b"bytes"), (4, b"bytes")):
        fd = objects.create(number)
        os.write(fd, content)
        os.close(fd)
        name = b"%d" % number
        writer.append(Op(kind="create", path=name, object=number))
        writer.append(Op(kind="content", path=name, paths=(name,), object=number, size=5))
    writer.close()
    # A program truncates a file, and the daemon is killed before it records that.
    time.sleep(0.02)
    os.truncate(object_path(directory, 4), 1)
    assert set(earlier.inspect(directory).lost) == {b"1", b"2"}
    found = opened(directory, "one")
    assert {op.path for op in found.lost} == {b"1", b"2"}
    assert {op.path for _, op in found.ops} == {b"3", b"4"}
    kept = Doubtful(directory)
    kept.keep(found.doubted)
    assert [(it.path, it.size, it.recorded) for it in kept.list()] == [(b"2", 2, 5)]
    # The next mount has the same result.
    assert {op.path for _, op in opened(directory, "one").ops} == {b"3", b"4"}


@pytest.mark.fault("T17")
@pytest.mark.promise(68)
def test_files_whose_records_were_cut_off_are_kept_and_named(directory: Path) -> None:
    filled(directory)
    path = directory / "journal"
    lines = path.read_bytes().splitlines(keepends=True)
    # Only the record that makes the first file is left, and a part of the next.
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    found = opened(directory, "one")
    assert [op.path for op in found.lost] == [b"unrecorded-3"]
    kept = Doubtful(directory)
    (it,) = kept.list()
    assert (it.number, it.path, it.file.read_bytes()) == (3, b"unrecorded-3", b"bytes")
    # While it is kept, its number is not used again.
    assert found.next_object == opened(directory, "one").next_object == 4
    # The object without bytes was made ahead.
    assert Objects(directory).numbers() == {1, 2}
    assert earlier.inspect(directory).unknown == ()


def test_the_room_that_they_take_is_known_while_one_is_discarded(directory: Path) -> None:
    """Threads remove kept objects while the room of the tier is counted."""
    filled(directory)
    kept = Doubtful(directory)
    kept.keep(opened(directory, "two").doubted)

    class Discarding:
        @property
        def held(self) -> int:
            kept.discard(1)
            return 512

    kept._kept = {1: Discarding(), 2: Discarding()}  # type: ignore[dict-item]
    assert kept.held == 1024
    assert kept.held == 512
