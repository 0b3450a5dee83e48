"""The journal on a real disk: its records, its refusals, and its state after a power cut."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from monarch.errors import TierError
from monarch.posix import failpoints
from monarch.posix.credentials import Credentials
from monarch.types import Identity
from monarch.writeback.journal import Journal, Op, Replay
from monarch.writeback.objects import Objects
from tests.conftest import require_root
from tests.equipment import disks
from tests.equipment.waiting import wait_until

SOURCE = b"/data/\xff source"
IDENTITY = Identity(5, 1_000_000_001, 2_000_000_002, 77)

EVERYTHING = (
    Op(kind="create", path=b"a", object=1, ino=1 << 33, mode=0o640, uid=1000, gid=1001),
    Op(kind="take", path=b"d/\xff\n\"'", object=2, by=Credentials(1001, 1002, (7, 4294967294))),
    Op(kind="mkdir", path=b"d", mode=0o1777, ino=(1 << 33) + 1),
    Op(kind="symlink", path=b"s", to=b"../\x80 target"),
    Op(kind="mknod", path=b"f", mode=0o10600, rdev=259),
    Op(kind="link", path=b"a", to=b"b", object=1),
    Op(
        kind="rename",
        path=b"b",
        to=b"\xe9",
        object=1,
        by=Credentials(0, 0),
        also=(Credentials(1, 2), Credentials(3, 4, (5,))),
        was=Identity(1, 2, 3, 1 << 63),
        over=Identity(0, -1, 2, 3),
        over_object=7,
        strict=True,
    ),
    Op(kind="attr", path=b"a", object=1, mode=0, uid=0, gid=0, mtime_ns=0, atime_ns=-5),
    Op(kind="xattr", path=b"a", object=1, xattrs={b"user.\xff": b"\0\xff", b"user.b": None}),
    Op(
        kind="content",
        path=b"a",
        paths=(b"a", b"\xe9"),
        object=1,
        size=5,
        mode=0o600,
        uid=1,
        gid=2,
        mtime_ns=10**18 + 1,
        atime_ns=10**18 + 2,
        xattrs={b"user.x": b""},
        synced=True,
    ),
    Op(kind="unlink", path=b"a", object=1),
    Op(kind="rmdir", path=b"d"),
    Op(kind="gone", object=1),
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "absorbed"


def opened(directory: Path, boot: str = "one") -> tuple[Journal, Replay]:
    journal = Journal.open(directory, source=SOURCE, boot=boot)
    return journal, journal.replay()


def filled(directory: Path, *ops: Op, boot: str = "one", done: int = 0) -> Replay:
    journal, replay = opened(directory, boot)
    for op in ops:
        journal.append(op)
    if done:
        journal.mark_done({done: None})
    journal.close()
    return replay


def read(directory: Path, boot: str = "one") -> Replay:
    journal, replay = opened(directory, boot)
    journal.close()
    return replay


def test_every_change_comes_back_as_it_was_recorded(directory: Path) -> None:
    assert filled(directory, *EVERYTHING).ops == ()
    replay = read(directory)
    assert replay.ops == tuple(enumerate(EVERYTHING, 1))
    assert (replay.next_object, replay.next_ino) == (3, (1 << 33) + 2)
    assert set(replay.recorded_ns) == {seq for seq, _ in replay.ops}


def test_marks_come_back_with_what_the_source_has(directory: Path) -> None:
    journal, _ = opened(directory)
    seqs = [journal.append(op) for op in EVERYTHING]
    journal.mark_done({seqs[0]: None, seqs[1]: None})
    journal.mark_done({seqs[8]: None, seqs[9]: IDENTITY})
    journal.close()
    replay = read(directory)
    assert replay.done == {seq: (IDENTITY if seq == 10 else None) for seq in range(1, 11)}
    assert set(replay.recorded_ns) == {11, 12, 13}


def test_the_token_stays_and_is_another_in_another_place(tmp_path: Path) -> None:
    tokens = []
    for name in ("one", "two", "one"):
        journal, _ = opened(tmp_path / name)
        tokens.append(journal.token)
        journal.close()
    assert tokens[0] == tokens[2] != tokens[1]


def test_a_record_of_which_a_crash_left_a_part_is_cut_off_and_none_before_it(
    directory: Path,
) -> None:
    filled(directory, *EVERYTHING[:3])
    path = directory / "journal"
    whole = path.read_bytes()
    filled(directory, EVERYTHING[9])
    longer = path.read_bytes()
    for end in range(len(whole), len(longer)):
        path.write_bytes(longer[:end])
        assert [op for _, op in read(directory).ops] == list(EVERYTHING[:3])
        path.write_bytes(longer[:end] + bytes(100))
        filled(directory, EVERYTHING[4])
        assert [op for _, op in read(directory).ops] == [*EVERYTHING[:3], EVERYTHING[4]]


def damaged(path: Path, line: int) -> bytes:
    """The journal with a byte of a line turned; what it is then."""
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = lines[line - 1].replace(b'"op"', b'"oq"')
    path.write_bytes(b"\n".join(lines))
    return path.read_bytes()


def test_a_damaged_record_before_good_ones_is_reported_and_nothing_is_changed(
    directory: Path,
) -> None:
    filled(directory, *EVERYTHING)
    content = damaged(directory / "journal", 5)
    with pytest.raises(TierError, match=r"journal', line 5: .* damaged, and 10 good ones follow"):
        opened(directory)
    assert (directory / "journal").read_bytes() == content


def test_unsynced_records_may_be_lost_page_by_page_when_the_power_fails(
    directory: Path,
) -> None:
    folders = [Op(kind="mkdir", path=b"%d" % number) for number in range(9)]
    filled(directory, *folders)
    damaged(directory / "journal", 5)
    assert [op for _, op in read(directory, boot="two").ops] == folders[:2]


def test_synced_records_that_are_missing_after_a_power_cut_are_damage(directory: Path) -> None:
    journal, _ = opened(directory)
    for op in EVERYTHING[:6]:
        journal.append(op)
    journal.sync()
    journal.append(EVERYTHING[6])
    journal.close()
    damaged(directory / "journal", 5)
    with pytest.raises(TierError, match="line 5"):
        opened(directory, boot="two")


def given_version(path: Path, version: int, *, torn: bytes = b"") -> None:
    first, _, others = path.read_bytes().partition(b"\n")
    record = {**json.loads(first[17:]), "monarch": version}
    raw = json.dumps(record, separators=(",", ":")).encode()
    line = xxhash.xxh3_64_hexdigest(raw).encode() + b" " + raw + b"\n"
    path.write_bytes(line + others + torn)


def test_a_journal_of_a_newer_monarch_is_refused_and_not_touched(directory: Path) -> None:
    filled(directory, *EVERYTHING)
    path = directory / "journal"
    given_version(path, 3, torn=b"torn")
    before = path.read_bytes()
    with pytest.raises(TierError, match="of version 3, this Monarch knows 2"):
        opened(directory)
    assert path.read_bytes() == before


@pytest.mark.promise(49)
def without_positions(path: Path) -> list[dict[str, Any]]:
    """The records of a journal without what they say of positions in the file."""
    records = [json.loads(line[17:]) for line in path.read_bytes().splitlines()]
    return [{name: it for name, it in record.items() if name != "upto"} for record in records]


def test_a_journal_of_an_older_monarch_is_taken_over_and_then_closed_to_that(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older one would make as root what each user has done since."""
    caplog.set_level(logging.INFO)
    filled(directory, *EVERYTHING)
    before = read(directory)
    path = directory / "journal"
    records = without_positions(path)
    given_version(path, 1, torn=b"torn")
    journal, replay = opened(directory)
    assert replay.ops == before.ops
    assert without_positions(path) == records
    assert f"journal {path}: is of version 1, now 2" in caplog.text
    journal.append(Op(kind="mkdir", path=b"later", ino=(1 << 33) + 9))
    journal.sync()
    journal.close()
    assert read(directory).ops[:-1] == before.ops
    assert os.listdir(directory) == ["journal"]


def test_a_journal_of_another_source_is_refused(directory: Path) -> None:
    filled(directory, *EVERYTHING)
    with pytest.raises(TierError, match="belongs to the source"):
        Journal.open(directory, source=b"/elsewhere", boot="one")


def test_objects_without_a_journal_are_not_taken_for_leftovers(directory: Path) -> None:
    filled(directory, *EVERYTHING)
    os.close(Objects(directory).create(5))
    (directory / "journal").unlink()
    with pytest.raises(TierError, match="no journal that knows them"):
        opened(directory)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    require_root()
    with disks.in_memory(tmp_path / "disk", 8) as path:
        yield path


def until_full(call: Callable[[], object]) -> int:
    """How often it could be called before the disk was full."""
    for count in range(10_000):
        try:
            call()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return count
    raise AssertionError("the disk does not become full")


def test_a_full_disk_takes_what_there_is_room_for_and_no_half_record(small_disk: Path) -> None:
    journal, _ = opened(small_disk / "absorbed")
    journal.append(EVERYTHING[0])
    with (small_disk / "filler").open("wb", buffering=0) as file:
        until_full(lambda: file.write(bytes(4096)))
    big = Op(kind="xattr", path=b"a", xattrs={b"user.x": bytes(60_000)})
    kept = until_full(lambda: journal.append(big))
    # Room was kept for it.
    assert kept > 10
    (small_disk / "filler").unlink()
    last = journal.append(EVERYTHING[2])
    journal.sync()
    journal.close()
    replay = read(small_disk / "absorbed")
    assert [op for _, op in replay.ops] == [EVERYTHING[0], *[big] * kept, EVERYTHING[2]]
    assert last == kept + 2


def test_a_part_of_records_that_could_not_be_removed_is_no_damage(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = opened(directory)
    journal.append(EVERYTHING[0])
    write = os.pwrite

    def cut(fd: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda fd, lines, at: write(fd, lines[:-1], at))
        patched.setattr(os, "ftruncate", cut)
        with pytest.raises(OSError, match="Input/output"):
            journal.file.append({"lost": [*range(1000)]}, {"lost": [1]}, {"lost": [2]})
    journal.append(EVERYTHING[2])
    journal.close()
    assert [op for _, op in read(directory).ops] == [EVERYTHING[0], EVERYTHING[2]]


def test_callers_that_sync_at_once_share_the_wait(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = opened(directory)
    real, calls, gate = os.fdatasync, [0], threading.Event()

    def fdatasync(fd: int) -> None:
        calls[0] += 1
        gate.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    threads = []
    for _ in range(20):
        journal.append(EVERYTHING[0])
        threads.append(threading.Thread(target=journal.sync))
        threads[-1].start()
        # The first one syncs its own record only.
        wait_until(lambda: calls[0] == 1, "the first one is under way")
    gate.set()
    for thread in threads:
        thread.join()
    # The first, and one for all who came while it was under way.
    assert calls[0] == 2
    assert journal.file.synced == journal.file.written
    journal.close()


def test_a_sync_that_failed_is_not_taken_for_done_by_the_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = opened(directory)
    journal.append(EVERYTHING[0])

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError):
            journal.sync()
    with pytest.raises(OSError) as again:
        journal.sync()
    assert again.value.errno == errno.EIO
    journal.compact([(1, EVERYTHING[0])], position=journal.file.position)
    journal.append(EVERYTHING[2])
    journal.sync()
    journal.close()
    assert [op for _, op in read(directory).ops] == [EVERYTHING[0], EVERYTHING[2]]


# -- compaction ------------------------------------------------------------------------------


def test_compaction_keeps_the_known_states_and_never_reuses_a_number(directory: Path) -> None:
    journal, _ = opened(directory)
    for op in EVERYTHING:
        journal.append(op)
    journal.mark_done({10: IDENTITY})
    position = journal.file.position
    later = journal.append(Op(kind="mkdir", path=b"later"))
    journal.compact([(10, EVERYTHING[9]), *enumerate(EVERYTHING[10:], 11)], position=position)
    last = journal.append(Op(kind="mkdir", path=b"last"))
    token = journal.token
    journal.close()
    journal, replay = opened(directory)
    assert journal.token == token
    assert [seq for seq, _ in replay.ops] == [10, 11, 12, 13, later, last]
    assert replay.done == {10: IDENTITY}
    assert (replay.next_object, replay.next_ino) == (3, (1 << 33) + 2)
    assert journal.append(EVERYTHING[0]) == last + 1
    journal.close()


def test_compaction_forgets_nothing_that_the_source_has_not_got(directory: Path) -> None:
    journal, _ = opened(directory)
    for op in EVERYTHING:
        journal.append(op)
    journal.mark_done({10: IDENTITY})
    with pytest.raises(ValueError, match="12 is not done"):
        journal.compact(
            [(11, EVERYTHING[10]), (13, EVERYTHING[12])], position=journal.file.position
        )
    journal.close()
    assert len(read(directory).ops) == len(EVERYTHING)


@pytest.mark.parametrize("point", ["journal-staged", "journal-compacted"])
def test_a_crash_while_compacting_leaves_the_old_journal_or_the_new(
    directory: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    journal, _ = opened(directory)
    for op in EVERYTHING:
        journal.append(op)
    journal.mark_done({13: None})

    def reached(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", reached)
        with pytest.raises(KeyboardInterrupt):
            journal.compact([], position=journal.file.position)
    journal.close()
    replay = read(directory)
    assert len(replay.ops) == (13 if point == "journal-staged" else 0)
    assert not replay.recorded_ns
    assert os.listdir(directory) == ["journal"]


# -- power cuts --------------------------------------------------------------------------------


def create(path: bytes, number: int) -> Op:
    return Op(kind="create", path=path, object=number)


def content(path: bytes, number: int, *, synced: bool = False, size: int = 5) -> Op:
    return Op(kind="content", path=path, paths=(path,), object=number, size=size, synced=synced)


def rename(path: bytes, to: bytes, number: int = 0) -> Op:
    return Op(kind="rename", path=path, to=to, object=number)


def test_a_file_that_was_never_synced_is_lost_with_the_power_and_the_replaced_one_stays(
    directory: Path,
) -> None:
    kept = [create(b"v1", 1), content(b"v1", 1, synced=True), rename(b"v1", b"ckpt", 1)]
    lost = [create(b"v2", 2), content(b"v2", 2), rename(b"v2", b"ckpt", 2)]
    filled(directory, *kept, *lost, Op(kind="attr", path=b"ckpt", object=2, mode=0o600))
    assert len(read(directory).ops) == 7
    replay = read(directory, boot="two")
    assert [op for _, op in replay.ops] == kept
    assert [(op.path, op.object) for op in replay.lost] == [(b"ckpt", 2)]
    assert replay.next_object == 3


def test_a_loss_is_reported_once_and_stays_recorded(directory: Path) -> None:
    filled(directory, create(b"a", 1), content(b"a", 1))
    assert read(directory, boot="two").lost
    again = filled(directory, create(b"a", 2), content(b"a", 2), boot="two")
    assert (again.lost, again.ops) == ((), ())
    replay = read(directory, boot="two")
    assert [op.object for _, op in replay.ops] == [2, 2]
    assert replay.lost == ()


def test_a_file_of_the_source_is_again_what_the_source_has(directory: Path) -> None:
    filled(
        directory,
        Op(kind="take", path=b"old", object=1),
        content(b"old", 1),
        rename(b"old", b"new", 1),
    )
    replay = read(directory, boot="two")
    assert [op for _, op in replay.ops] == [rename(b"old", b"new")]
    assert [op.path for op in replay.lost] == [b"new"]


@pytest.mark.promise(68)
def test_a_file_of_the_source_whose_bytes_were_not_changed_is_not_lost(directory: Path) -> None:
    mode = Op(kind="attr", path=b"old", object=1, mode=0o600)
    filled(
        directory,
        Op(kind="take", path=b"old", object=1),
        replace(content(b"old", 1), same=True),
        mode,
    )
    replay = read(directory, boot="two")
    assert [op for _, op in replay.ops] == [replace(mode, object=0, file=True)]
    assert replay.lost == ()


def test_a_file_that_was_replaced_and_then_removed_does_not_come_back(directory: Path) -> None:
    filled(
        directory,
        create(b"tmp", 1),
        content(b"tmp", 1),
        rename(b"tmp", b"d/ckpt", 1),
        rename(b"d", b"e"),
        rename(b"e/ckpt", b"e/other", 1),
    )
    replay = read(directory, boot="two")
    assert [op for _, op in replay.ops] == [
        rename(b"d", b"e"),
        Op(kind="unlink", path=b"e/ckpt"),
    ]
    assert [op.path for op in replay.lost] == [b"e/other"]


def test_a_file_without_a_name_or_at_the_source_is_not_lost(directory: Path) -> None:
    journal, _ = opened(directory)
    history = [
        create(b"gone", 1),
        content(b"gone", 1),
        Op(kind="unlink", path=b"gone", object=1),
        create(b"there", 3),
        content(b"there", 3),
    ]
    for op in history:
        journal.append(op)
    journal.mark_done({5: IDENTITY})
    journal.close()
    replay = read(directory, boot="two")
    assert [op for _, op in replay.ops] == history
    assert replay.lost == ()


def test_a_synced_file_stays_durable_after_compaction(directory: Path) -> None:
    journal, _ = opened(directory)
    journal.append(create(b"a", 1))
    journal.append(content(b"a", 1, synced=True))
    journal.mark_done({2: None})
    journal.append(content(b"a", 1))
    journal.compact([(1, create(b"a", 1)), (3, content(b"a", 1))], position=journal.file.position)
    journal.close()
    replay = read(directory, boot="two")
    assert [seq for seq, _ in replay.ops] == [1, 3]
    assert replay.lost == ()


# -- objects -----------------------------------------------------------------------------------


def test_objects_that_no_record_knows_are_swept(directory: Path) -> None:
    directory.mkdir()
    objects = Objects(directory)
    for number in (1, 2, 256 + 1, 70_000):
        fd = objects.create(number)
        os.write(fd, b"bytes")
        objects.sync(number, fd)
        os.close(fd)
    with pytest.raises(FileExistsError):
        objects.create(2)
    assert (directory / "01" / "257").stat().st_mode & 0o7777 == 0o600
    objects.sweep({2, 70_000})
    assert objects.numbers() == {2, 70_000}
    objects.remove(2)
    objects.remove(2)
    assert objects.numbers() == {70_000}
