"""The parts of the journal, each alone: records as text, the file, and the state that is found."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from monarch.errors import TierError
from monarch.text import errno_words
from monarch.types import ANY_SIZE, READING_CHANGES, Identity, Progress
from monarch.writeback import journal_file, journal_found
from monarch.writeback.earlier import renewed_in
from monarch.writeback.journal_file import JournalFile
from monarch.writeback.journal_found import Found, read_journal, read_replay
from monarch.writeback.journal_records import (
    VERSION,
    Known,
    Record,
    change,
    decoded,
    encoded,
    header,
    marks,
    staged_of,
    staged_record,
)
from monarch.writeback.op import Op

ONE, TWO = Identity(1, 2, 3, 4), Identity(5, 6, 7, 8)
NOWHERE = Path("/nonexistent")
CREATE = Op(kind="create", path=b"a", object=1, ino=1 << 33)
CONTENT = Op(kind="content", path=b"a", paths=(b"a",), object=1, size=5)


# -- records ---------------------------------------------------------------------------------------


def test_a_line_is_its_digest_and_json() -> None:
    line = encoded({"boot": "one"})
    assert line[16:] == b' {"boot":"one"}\n'
    assert decoded(line[:-1]) == {"boot": "one"}


@pytest.mark.parametrize("content", [b"{}", b"[]", b"7", b"{"])
def test_only_a_whole_line_with_an_object_is_a_record(content: bytes) -> None:
    line = xxhash.xxh3_64_hexdigest(content).encode() + b" " + content
    assert (decoded(line) == {}) == (content == b"{}")
    assert decoded(line[:-1]) is None
    assert decoded(b"0" * 16 + line[16:]) is None


def test_known_states_are_restored() -> None:
    known = Known(
        known={1: ONE},
        made={2: TWO},
        over={3: (ONE, TWO)},
        ours={4: frozenset({Identity(1, 2, 0, 4), Identity(5, 6, 0, 8)})},
        new=frozenset({5, 6}),
        present=frozenset({7}),
        given_up=frozenset({8}),
        settled=frozenset({9}),
        set_id={10: 0o4000},
    )
    record = json.loads(json.dumps(known.record()))
    assert Known.of(record) == known
    # An older version has written none of these.
    del record["given_up"], record["settled"], record["set_id"]
    assert Known.of(record).new == known.new
    with pytest.raises(KeyError):
        Known.of({"known": []})


def test_staged_files_come_back_also_those_of_an_older_journal() -> None:
    staged = Identity(5, 6, 0, 8)
    assert staged_record(3, staged) == {"staged": [3, 8, 5, 6]}
    assert staged_of(3, 8, 5, 6) == (3, staged)
    assert staged_of(3, 8) == (3, Identity(ANY_SIZE, 0, 0, 8))


def test_a_mark_has_what_was_published() -> None:
    assert marks({1: None, 2: ONE}) == [[2, 1, 2, 3, 4]]


# -- the file --------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[JournalFile]:
    directory = tmp_path / "monarch/absorbed"
    directory.mkdir(parents=True)
    file = JournalFile.open(directory / "journal")
    file.begin({"n": 0})
    yield file
    file.close()


def lines(file: JournalFile) -> list[Record]:
    content = file.path.read_bytes()
    assert len(content) == file.position
    return [record for record in map(decoded, content.splitlines()) if record is not None]


def test_a_record_says_once_how_much_was_synced(file: JournalFile) -> None:
    file.append({"n": 1})
    synced = file.position
    file.sync()
    assert (file.written, file.synced, file.synced_bytes) == (2, 2, synced)
    file.append({"n": 2}, {"n": 3})
    file.append({"n": 4})
    assert [record.get("upto") for record in lines(file)] == [None, None, synced, None, None]
    assert [record["n"] for record in file.records(0, file.position)] == [0, 1, 2, 3, 4]
    assert (file.written, file.synced) == (5, 2)


def test_a_file_is_cut_and_replaced_before_it_is_used(file: JournalFile) -> None:
    file.append({"n": 1})
    end = file.position
    with file.path.open("ab") as torn:
        torn.write(b"torn")
    file.cut(end)
    assert [record["n"] for record in lines(file)] == [0, 1]
    file.replace(lambda: [{"n": 7}], end)
    file.append({"n": 8})
    assert [record["n"] for record in lines(file)] == [7, 8]
    file.path.with_name("journal.part").touch()
    file.remove_staged()
    file.remove_staged()
    assert os.listdir(file.path.parent) == ["journal"]


def test_records_appended_during_a_compaction_follow_the_replaced_ones(file: JournalFile) -> None:
    file.append({"n": 1})
    file.sync()
    end = file.position

    def first() -> Iterator[Record]:
        yield {"n": 100}
        file.append({"n": 2})
        file.sync()

    file.replace(first, end)
    assert [record["n"] for record in lines(file)] == [100, 2]
    assert file.synced == file.written == 3
    file.append({"n": 3})
    assert lines(file)[-1]["upto"] == file.synced_bytes


def test_a_journal_that_is_closed_while_it_is_replaced_leaves_no_other_file(tmp_path: Path) -> None:
    file = JournalFile.open(tmp_path / "journal")
    file.begin({"n": 0})
    before = file.path.read_bytes()

    def first() -> Iterator[Record]:
        yield {"n": 100}
        assert sorted(os.listdir(tmp_path)) == ["journal", "journal.part"]
        file.close()
        # The thread may end only with the process, which does not wait for it.
        assert os.listdir(tmp_path) == ["journal"]

    with pytest.raises(OSError):
        file.replace(first, file.position)
    assert os.listdir(tmp_path) == ["journal"]
    assert file.path.read_bytes() == before


def test_a_replacement_that_fails_leaves_the_file(
    file: JournalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.append({"n": 1})

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError):
            file.replace(lambda: [{"n": 100}], file.position)
        with pytest.raises(OSError):
            file.sync()
    assert file.failed
    assert [record["n"] for record in lines(file)] == [0, 1]
    assert os.listdir(file.path.parent) == ["journal"]
    file.replace(lambda: [{"n": 100}], file.position)
    assert not file.failed and file.synced == file.written


@pytest.mark.promise(139)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_records_go_into_the_new_file_although_its_name_may_not_be_durable(
    file: JournalFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    file.append({"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(journal_file, "sync_path", fail)
        with pytest.raises(OSError):
            file.replace(lambda: [{"n": 100}], file.position)
    file.append({"n": 2})
    assert [record["n"] for record in lines(file)] == [100, 2]
    assert file.failed == errno_words(number)
    with pytest.raises(OSError):
        file.sync()
    file.replace(lambda: [{"n": 200}], file.position)
    assert [record["n"] for record in lines(file)] == [200]
    file.sync()
    assert not file.failed and file.synced == file.written


@pytest.mark.promise(139)
def test_no_record_counts_as_synced_before_the_name_of_the_new_file_is_durable(
    file: JournalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.append({"n": 1})
    synced: list[int] = []
    monkeypatch.setattr(journal_file, "sync_path", lambda path: synced.append(file.synced))
    file.replace(lambda: [{"n": 100}], file.position)
    assert synced == [0]
    assert file.synced == file.written


def test_a_file_that_was_closed_is_not_replaced(tmp_path: Path) -> None:
    file = JournalFile.open(tmp_path / "journal")
    file.append({"n": 1})
    started, closed = threading.Event(), threading.Event()

    def first() -> Iterator[Record]:
        yield {"n": 100}
        started.set()
        assert closed.wait(60)

    failures: list[OSError] = []

    def replace() -> None:
        try:
            file.replace(first, file.position)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=replace)
    thread.start()
    assert started.wait(60)
    file.close()
    closed.set()
    thread.join()
    assert [failure.errno for failure in failures] == [errno.EBADF]
    assert decoded((tmp_path / "journal").read_bytes().rstrip()) == {"n": 1}


# -- what was found --------------------------------------------------------------------------------


def found_of(*records: Record, boot: str = "one") -> Found:
    content = b"".join(map(encoded, [header("t", b"/s", 1, 1, 1), *records]))
    found = Found.of(content, Path("journal"), boot)
    assert found is not None and found.end == len(content)
    return found


def test_numbers_that_were_used_are_not_used_again() -> None:
    found = found_of({"boot": "one"}, change(7, 1, CREATE))
    assert (found.next_seq, found.next_object, found.next_ino) == (8, 2, (1 << 33) + 1)


def test_a_content_without_a_sync_is_lost_at_the_next_start_of_the_machine() -> None:
    records: list[Record] = [{"boot": "one"}, change(1, 10, CREATE), change(2, 20, CONTENT)]
    found = found_of(*records)
    assert found.lost_now("one", NOWHERE) == {}
    lost = found.lost_now("two", NOWHERE)
    assert lost == {1: CONTENT}
    assert found.last_of([1]) == {1: (CONTENT, 20)}
    replay = found.replay(lost)
    assert (replay.ops, replay.lost) == ((), (CONTENT,))
    assert replay.doubted == {1: (CONTENT, 20)}
    assert found.replay({}).ops == ((1, CREATE), (2, CONTENT))
    for mark in ({"believed": [1]}, {"done": 2, "at": [[2, 5, 0, 0, 9]]}):
        assert found_of(*records, mark).lost_now("two", NOWHERE) == {}
    assert (
        found_of(*records, {"boot": "two"}, change(3, 30, CONTENT)).lost_now("two", NOWHERE) == {}
    )


@pytest.mark.promise(67)
def test_an_earlier_content_does_not_cover_bytes_written_through_later() -> None:
    through = Op(kind="through", path=CONTENT.path, object=1)
    records: list[Record] = [change(1, 10, CREATE), change(2, 20, CONTENT), change(3, 30, through)]
    for mark in ({"done": 1}, {"done": 2, "at": [[2, 5, 0, 0, 9]]}):
        assert found_of(*records, mark).replay({}).unpublished([1]) == {1}
        behind = change(4, 40, CONTENT)
        assert found_of(*records, behind, mark).replay({}).unpublished([1]) == set()


def test_a_staged_file_is_monarchs_until_the_content_is_published() -> None:
    records: list[Record] = [
        {"boot": "one"},
        change(1, 10, CONTENT),
        staged_record(1, Identity(5, 6, 0, 8)),
    ]
    assert found_of(*records).replay({}).staged == {1: frozenset({Identity(5, 6, 0, 8)})}
    published = found_of(*records, {"done": 1, "at": [[1, 5, 6, 7, 8]]})
    assert published.staged == {}
    assert published.replay({}).done == {1: Identity(5, 6, 7, 8)}


def test_a_rewritten_journal_leads_to_the_same_state() -> None:
    other = Op(kind="mkdir", path=b"d", ino=(1 << 33) + 1)
    found = found_of(
        {"boot": "one"},
        change(1, 10, CREATE),
        change(2, 20, CONTENT),
        {"believed": [1]},
        {"lost": [9]},
        Known(known={1: ONE}).record(),
        change(3, 30, other),
        change(4, 40, other),
        {"done": 2, "at": [[2, 5, 6, 7, 8]], "also": [4], "aside": [3]},
        staged_record(1, TWO),
    )
    again = found_of(*[*found.rewritten(found.ops, "one")][1:])
    for name in ("ops", "durable", "lost", "known", "done_upto", "done_beyond", "identities"):
        assert getattr(again, name) == getattr(found, name), name
    assert again.aside == {3} and again.recorded_ns == found.recorded_ns
    assert again.staged == {1: {Identity(TWO.size, TWO.mtime_ns, 0, TWO.source_ino)}}
    fewer = found_of(*[*found.rewritten(found.ops[2:], "one")][1:])
    assert (fewer.identities, [*fewer.durable], fewer.staged) == ({}, [], {})
    assert next(found.rewritten([], "one"))["seq"] == 5


@pytest.mark.parametrize(
    "record", [{}, {"seq": 1, "op": "no such"}, {"done": "x"}, {"op": "create"}]
)
def test_a_record_of_another_program_is_an_error_that_names_its_line(record: Record) -> None:
    with pytest.raises(TierError, match="line 2"):
        found_of(record)
    with pytest.raises(TierError, match="of version 9"):
        Found.of(encoded({"monarch": VERSION + 7}), Path("journal"), "one")


def test_a_journal_that_was_inspected_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    path.write_bytes(encoded(header("t", b"/s", 1, 1, 1)) + encoded({"boot": "one"}))
    reads, of = [], Found.of

    def counting(content: bytes, path: Path, boot: str, progress: Progress) -> Found | None:
        reads.append(path)
        return of(content, path, boot, progress)

    monkeypatch.setattr(Found, "of", counting)
    assert read_replay(tmp_path).source == b"/s"
    with path.open("rb") as journal:
        assert read_journal(journal.fileno(), path, "one") is not None
        assert len(reads) == 1
        assert read_journal(journal.fileno(), path, "one") is not None
        assert len(reads) == 2
    path.write_bytes(b"")
    assert read_replay(tmp_path).ops == ()


def test_the_objects_of_a_journal_are_checked_once_before_the_mount_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount of 100,000 written files checks each of them once before it has the lock of the
    directory, and once behind it."""
    made = Op(kind="content", path=b"f", paths=(b"f",), object=1, size=3, mtime_ns=1, synced=True)
    records = [header("t", b"/s", 1, 1, 1), {"boot": "one"}, change(1, 1, made)]
    (tmp_path / "journal").write_bytes(b"".join(map(encoded, records)))
    (tmp_path / "snapshot").write_text("its id")
    (tmp_path / "01").mkdir()
    (tmp_path / "01" / "1").write_bytes(b"new")
    looks, path_of = [], journal_found.object_path

    def counting(directory: Path, number: int) -> Path:
        looks.append(number)
        return path_of(directory, number)

    monkeypatch.setattr(journal_found, "object_path", counting)
    read_replay(tmp_path)
    assert renewed_in(tmp_path, "its id") == {}
    assert looks == [1]
    read_replay(tmp_path)
    assert looks == [1, 1]
    # A call that trusts a clean end has checked none.
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(encoded({"believed": [1], "ended": True}))
    read_replay(tmp_path, trusts_end=True)
    assert looks == [1, 1]
    renewed_in(tmp_path, "its id")
    assert looks == [1, 1, 1]


def test_the_progress_of_reading_is_shown_and_the_collector_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [Op(kind="mkdir", path=b"d%d" % number, ino=number) for number in range(1, 6)]
    changes = [change(seq, 1, op) for seq, op in enumerate(made, 1)]
    records = [header("t", b"/s", 1, 1, 1), {"boot": "one"}, *changes]
    (tmp_path / "journal").write_bytes(b"".join(map(encoded, records)))
    monkeypatch.setattr(journal_found, "PROGRESS_STEP", 3)
    shown, collects, add = list[tuple[int, int | None, str]](), list[bool](), Found.add

    def noting(found: Found, record: Record) -> None:
        collects.append(gc.isenabled())
        add(found, record)

    monkeypatch.setattr(Found, "add", noting)
    read_replay(tmp_path, progress=lambda *step: shown.append(step))
    assert shown == [(3, None, READING_CHANGES), (6, None, READING_CHANGES)]
    assert collects == [False] * 6 and gc.isenabled()
