"""Announcements of lists of files: what is sent, and what a refusal changes."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from monarch.foresight.messages import SHARDS, Begin, End, Message, Piece, Progress
from monarch.frameworks import announce as module
from monarch.frameworks.announce import AnnouncedFiles, Announcement, Inodes, announce
from tests.frameworks.announcing import FakeMount, fake_mount

__all__ = ["fake_mount"]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number:02}" for number in range(20)]
    for path in paths:
        path.touch()
    return paths


def test_a_list_of_files_is_sent_in_its_order(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path
) -> None:
    wanted = [*files[5:], tmp_path / "missing", files[0], files[0]]
    announcement = announce(wanted, unit=SHARDS)
    assert announcement is not None
    [order] = fake_mount.orders
    assert (order.begin.unit, order.begin.entries) == (SHARDS, 18)
    assert fake_mount.paths(0, tmp_path) == [*(p.name for p in files[5:]), "", "00", "00"]
    assert order.inos[15] == 0
    announcement.close()
    assert order.is_ended
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(order.begin.descriptor)
    # The mount knows how many to expect, also of an iterator.
    assert announce(iter(wanted)) is not None
    assert fake_mount.orders[1].begin.entries == 18


@pytest.mark.parametrize("place", [0, 18])
@pytest.mark.parametrize("bad", [b"na\0me", b"direc\0tory/name", "\ud800"])
def test_a_path_that_no_file_can_have_is_that_of_no_file(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path, place: int, bad: str | bytes
) -> None:
    """A wrong line in a list ends no training job."""
    top = str(tmp_path)
    wanted: list[str | bytes | Path] = [*files]
    wanted.insert(place, f"{top}/{bad}" if isinstance(bad, str) else os.fsencode(top) + b"/" + bad)
    shown = [path.name for path in files]
    shown.insert(place, "")
    announcement = announce(wanted)
    known = AnnouncedFiles(lambda index: wanted[index], len(wanted))
    assert announcement is not None and known.announce(range(len(wanted))) is not None
    assert fake_mount.paths(0, tmp_path) == fake_mount.paths(1, tmp_path) == shown
    # It stays one when it is compared with the mount.
    assert known.announce(range(len(wanted))) is not None


@pytest.fixture
def listed(fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each directory that is listed, how many entries the mount had received by then."""
    received: list[int] = []
    real = os.scandir

    def scandir(path: bytes) -> Iterator[os.DirEntry[bytes]]:
        received.append(sum(len(order.inos) for order in fake_mount.orders))
        return real(path)

    monkeypatch.setattr(module.os, "scandir", scandir)
    return received


def test_the_mount_knows_the_first_files_before_a_directory_is_listed(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path, listed: list[int]
) -> None:
    """It reads them while the other files of a large data set are looked up."""
    orders = random.Random(1).sample(range(20), 20), [3, 1, 2]
    announcement = announce([files[index] for index in orders[0]])
    announced = AnnouncedFiles(lambda index: files[index], len(files))
    assert announced.announce(orders[1], orders[0]) is not None
    assert listed == [16, 20 + 3]
    assert [order.begin.entries for order in fake_mount.orders] == [20, 23]
    for number, order in enumerate(([*orders[0]], [*orders[1], *orders[0]])):
        assert fake_mount.paths(number, tmp_path) == [files[index].name for index in order]
    assert announcement is not None


def test_no_directory_is_listed_for_a_mount_that_refuses(
    fake_mount: FakeMount, files: list[Path], listed: list[int]
) -> None:
    """As any other file system does: a million files must not be listed there."""
    fake_mount.refuses = lambda message: errno.ENOTTY
    assert announce(files) is None
    known = AnnouncedFiles(lambda index: files[index], len(files))
    assert known.announce([1, 2]) is None
    assert listed == []


def open_paths() -> set[str]:
    """The paths of the files that this process has open."""
    paths = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.add(os.readlink(f"/proc/self/fd/{name}"))
    return paths


@pytest.mark.promise(342)
def test_no_file_of_the_mount_stays_open_while_an_order_lives(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file would keep the mount from being unmounted. The directory of the process may
    change."""
    monkeypatch.setattr(module, "_STEP_ENTRIES", 1)
    monkeypatch.chdir(tmp_path)
    announcement = announce([path.name for path in files])
    assert announcement is not None
    monkeypatch.chdir("/")
    announcement.progress(3)
    assert not {path for path in open_paths() if path.startswith(str(tmp_path))}
    announcement.close()
    assert set(fake_mount.directories) == {str(tmp_path)}
    [order] = fake_mount.orders
    assert order.progress == [3] and order.is_ended


@pytest.mark.parametrize("kind", [Piece, Progress, End])
def test_a_mount_that_is_unmounted_ends_the_announcement(
    fake_mount: FakeMount,
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Message],
) -> None:
    """The directory beneath it has another file system, or is gone."""
    monkeypatch.setattr(module, "_STEP_ENTRIES", 1)
    announcement = announce(files)
    assert announcement is not None
    tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-gone"))
    sent, [order] = len(fake_mount.messages), fake_mount.orders
    if kind is Piece:
        announcement.append([1])
    elif kind is Progress:
        announcement.progress(5)
    announcement.close()
    assert len(fake_mount.messages) == sent and not announcement.is_sent
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(order.begin.descriptor)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_process_without_a_free_descriptor_sends_the_rest_later(
    fake_mount: FakeMount, files: list[Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(module, "_STEP_ENTRIES", 1)
    announcement = announce(files)
    assert announcement is not None
    fake_mount.refuses = lambda message: number
    announcement.progress(5)
    fake_mount.refuses = lambda message: 0
    announcement.progress(6)
    assert announcement.is_sent and fake_mount.orders[0].progress == [6]


def pickled(announcement: Announcement) -> Announcement:
    """As another process gets it."""
    other: Announcement = pickle.loads(pickle.dumps(announcement))
    return other


def test_an_order_ends_when_it_is_not_used_any_more(
    fake_mount: FakeMount, files: list[Path]
) -> None:
    announcement = announce(files)
    assert announcement is not None and not fake_mount.orders[0].is_ended
    del announcement
    assert fake_mount.orders[0].is_ended


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled], ids=lambda f: f.__name__)
def test_a_copy_of_an_announcement_neither_announces_nor_ends_it(
    fake_mount: FakeMount, files: list[Path], duplicate: Callable[[Announcement], Announcement]
) -> None:
    """As when a program copies its loader. Else each of them would close the descriptor, and the
    last one perhaps that of another file."""
    announcement = announce(files)
    assert announcement is not None
    [order] = fake_mount.orders
    other = duplicate(announcement)
    assert not other.is_sent
    other.progress(20)
    other.close()
    del other
    os.fstat(order.begin.descriptor)
    assert announcement.is_sent and not order.is_ended and order.progress == []


def test_a_forked_process_cannot_change_an_order(fake_mount: FakeMount, files: list[Path]) -> None:
    announcement = announce(files)
    assert announcement is not None
    child = os.fork()
    if child == 0:
        before = len(fake_mount.messages)
        announcement.progress(20)
        announcement.close()
        os._exit(len(fake_mount.messages) - before)
    assert os.waitpid(child, 0)[1] == 0
    announcement.close()
    assert fake_mount.orders[0].is_ended


@pytest.mark.parametrize("number", [errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.EIO])
@pytest.mark.parametrize("kind", [Begin, Piece, Progress, End])
def test_after_a_refusal_nothing_more_is_sent(
    fake_mount: FakeMount, files: list[Path], kind: type[Message], number: int
) -> None:
    fake_mount.refuses = lambda message: number if isinstance(message, kind) else 0
    announcement = announce(files)
    assert (announcement is None) == (kind in (Begin, Piece))
    if announcement is not None:
        announcement.progress(20 if kind is End else 4096)
        announcement.close()
    sent = len(fake_mount.messages)
    if announcement is not None:
        announcement.progress(20)
        announcement.close()
    assert len(fake_mount.messages) == sent


def test_without_room_for_an_order_nothing_is_announced(
    fake_mount: FakeMount, files: list[Path]
) -> None:
    fake_mount.refuses = lambda message: errno.ENOSPC if isinstance(message, Begin) else 0
    assert announce(files) is None
    assert fake_mount.messages == []


def test_a_message_is_sent_again_while_others_send_too_many(
    fake_mount: FakeMount, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP_ENTRIES", 1)
    # Of the begin, and of two pieces: the first files, and the others.
    answers = [errno.EBUSY, errno.EBUSY, 0, errno.EBUSY, 0, errno.EBUSY, 0]
    fake_mount.refuses = lambda message: answers.pop(0)
    announcement = announce(files)
    assert announcement is not None and len(fake_mount.orders[0].inos) == len(files)
    answers += [errno.EBUSY] * 5
    announcement.progress(20)
    assert answers == [] and announcement.is_sent
    answers += [0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EBUSY])
def test_entries_without_room_in_the_mount_are_sent_later(
    fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    monkeypatch.setattr(module, "FIRST_ENTRIES", 50)
    monkeypatch.setattr(module, "_STEP_ENTRIES", 5)
    room = 30

    def refuses(message: Message) -> int:
        is_full = isinstance(message, Piece) and message.position + len(message.inos) > room
        return number if is_full else 0

    fake_mount.refuses = refuses
    announcement = Announcement(tmp_path, range(1, 201))
    assert announcement.is_sent
    [order] = fake_mount.orders
    assert len(order.inos) == 30
    announcement.progress(8)
    room = 1000
    announcement.progress(9)  # too little progress for a message
    assert len(order.inos) == 30 and order.progress == [8]
    announcement.progress(13)
    assert len(order.inos) == 70 and order.progress == [8, 13]
    for read in range(14, 201):
        announcement.progress(read)
    assert order.inos == [*range(1, 201)]
    assert order.progress[-1] >= 195
    assert order.progress == sorted(order.progress)


def test_progress_beyond_the_entries_that_were_sent_is_not_reported(
    fake_mount: FakeMount, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    fake_mount.refuses = lambda message: errno.ENOSPC if isinstance(message, Piece) else 0
    announcement = Announcement(tmp_path, range(1, 50_001))
    announcement.progress(40_000)
    assert announcement.is_sent and fake_mount.orders[0].progress == []


def test_large_inode_numbers_are_sent_whole(fake_mount: FakeMount, tmp_path: Path) -> None:
    numbers: list[int] = [5, (1 << 32) - 1, *range(1, 9000)]
    numbers[4000] = 1 << 40
    Announcement(tmp_path, numbers)
    kept = [number if number < 1 << 32 else 0 for number in numbers]
    assert fake_mount.orders[0].inos == kept


def test_listings_give_the_numbers_without_a_stat_of_each_file(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "inside").touch()
    (tmp_path / "link").symlink_to(files[3])
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "elsewhere").symlink_to("/proc/self/status")
    expected = {path: path.stat().st_ino for path in [*files, tmp_path / "directory" / "inside"]}
    stats: list[object] = []
    real = os.stat

    def counted(path: int | str | bytes, **kwargs: int) -> os.stat_result:
        stats.append(path)
        return real(path, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module.os, "stat", counted)
    inodes = Inodes()
    assert {path: inodes.of(path) for path in expected} == expected
    # One of each directory, and one of each link.
    assert len(stats) == 2 + 3
    assert inodes.of(bytes(tmp_path / "link")) == expected[files[3]]
    assert inodes.of(str(tmp_path / "dangling")) == inodes.of(tmp_path / "elsewhere") == 0
    assert inodes.of("/proc/self/status") == inodes.of("") == inodes.of(tmp_path / "no" / "x") == 0
    monkeypatch.chdir(tmp_path)
    assert Inodes().of("03") == expected[files[3]]


def test_each_directory_of_a_shuffled_list_is_listed_once(
    fake_mount: FakeMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set has a thousand directories, and a list for each file would take an hour."""
    paths = [tmp_path / f"{number % 30}" / f"{number}" for number in range(300)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    random.Random(1).shuffle(paths)
    listed, real = list[bytes](), os.scandir

    def counted(path: bytes) -> Iterator[os.DirEntry[bytes]]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(module.os, "scandir", counted)
    assert announce(paths) is not None
    assert AnnouncedFiles(paths.__getitem__, 300).announce(range(300)) is not None
    expected = [path.stat().st_ino for path in paths]
    assert [order.inos for order in fake_mount.orders] == [expected, expected]
    assert len(listed) == 60
    monkeypatch.setattr(module, "_TOGETHER", 100)
    assert [*Inodes().of_all(paths)] == expected


def test_few_listings_are_kept(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" / "file" for number in range(30)]
    for path in paths:
        path.parent.mkdir()
        path.touch()
    inodes = Inodes()
    for path in paths * 2:
        assert inodes.of(path) == path.stat().st_ino
    assert len(inodes._listings) <= 8


def test_each_order_of_a_data_set_ends_the_last_one(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path
) -> None:
    asked: list[int] = []

    def path_of(index: int) -> Path:
        asked.append(index)
        return files[index]

    known = AnnouncedFiles(path_of, len(files))
    orders: Sequence[Sequence[int]] = ([3, 1, 1], [0, 19], [5])
    for number, indices in enumerate(orders):
        assert known.announce(indices) is not None
        assert fake_mount.paths(number, tmp_path) == [f"{index:02}" for index in indices]
        assert [order.is_ended for order in fake_mount.orders] == [True] * number + [False]
    # The first order, then all samples, then some before each further order.
    assert asked[:3] == [3, 1, 1] and asked[3:23] == [*range(20)] and len(asked) <= 23 + 2 * 31
    known.close()
    assert fake_mount.orders[-1].is_ended


@pytest.mark.parametrize("is_there", [False, True])
def test_the_numbers_are_found_again_when_another_mount_has_taken_the_place(
    fake_mount: FakeMount, tmp_path: Path, is_there: bool
) -> None:
    """A training process lives longer than a mount, whose next snapshot has other numbers."""
    place, paths = tmp_path / "mount", [f"{number:03}" for number in range(100)]
    if is_there:
        place.mkdir()
        for name in paths:
            (place / name).touch()
    known = AnnouncedFiles(lambda index: place / paths[index], len(paths))
    assert (known.announce([3, 1]) is not None) == is_there
    if is_there:
        place.rename(tmp_path / "old")
    place.mkdir()
    for name in ["0000", *paths]:
        (place / name).touch()
    assert known.announce([3, 1]) is not None
    assert fake_mount.paths(-1, place) == ["003", "001"]


def test_an_order_goes_on_with_the_samples_that_were_expected(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP_ENTRIES", 1)
    known = AnnouncedFiles(files.__getitem__, len(files))
    progress = known.announce([3, 1], [1, 2, 3])
    assert progress is not None
    progress(2)
    progress = known.announce([1, 2, 3], [4])
    assert progress is not None
    progress(3)
    assert known.announce([4]) is not None
    [order] = fake_mount.orders
    assert fake_mount.paths(0, tmp_path) == ["03", "01", "01", "02", "03", "04"]
    assert order.progress == [2, 5] and not order.is_ended
    assert known.announce([7], [8]) is not None
    assert known.announce([9], []) is not None
    assert [order.is_ended for order in fake_mount.orders] == [True, True, False]
    assert fake_mount.paths(2, tmp_path) == ["09"]


@pytest.mark.parametrize("expected", [[], [5, 6]])
def test_an_order_that_the_mount_has_ended_between_two_epochs_begins_anew(
    fake_mount: FakeMount, files: list[Path], tmp_path: Path, expected: list[int]
) -> None:
    """As by a daemon that was started again, or while another job has read very many files."""
    known = AnnouncedFiles(files.__getitem__, len(files))
    assert known.announce([3, 1], [1, 2, 3]) is not None
    fake_mount.end_all()
    progress = known.announce([1, 2, 3], expected)
    assert progress is not None
    assert fake_mount.paths(1, tmp_path) == [f"{index:02}" for index in (1, 2, 3, *expected)]
    progress(3)
    assert len(fake_mount.orders) == 2 and not fake_mount.orders[1].is_ended
