"""Written files of other members: what is kept, over a restart, and records of any form."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from monarch.peers import held as held_files
from monarch.peers.held import RECORD_BYTES, HeldFiles, Record, Take

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"
CONTENT = os.urandom(5000)


def record_of(content: bytes = CONTENT, number: int = 7, **fields: object) -> Record:
    made = Record(
        token=TOKEN,
        number=number,
        size=len(content),
        digest=xxhash.xxh3_128_hexdigest(content),
        path=b"ckpt/step-1/\xff \n.pt",
        mode=0o640,
        uid=1000,
        gid=1000,
        mtime_ns=1_700_000_000_000_000_000,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def giving(content: bytes = CONTENT) -> Callable[[Take], None]:
    def fetch(take: Take) -> None:
        take(content[:100])
        take(content[100:])

    return fetch


def read(held: HeldFiles, record: Record) -> bytes:
    fd = held.open(record)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def not_asked(take: Take) -> None:
    raise AssertionError("its bytes are here")


def test_files_are_kept_over_a_restart_until_they_are_forgotten(tmp_path: Path) -> None:
    held = HeldFiles(tmp_path / "held", 100_000)
    first, other = record_of(), record_of(number=8, token=OTHER)
    assert held.put(first, giving()) and held.put(other, giving())
    (tmp_path / "held" / TOKEN / "9.00").write_bytes(b"of a put that was interrupted")
    again = HeldFiles(tmp_path / "held", 100_000)
    assert again.tokens() == [TOKEN, OTHER]
    assert again.of(TOKEN) == [first] and read(again, first) == CONTENT
    assert (again.files, again.nbytes) == (2, 2 * len(CONTENT))
    assert not (tmp_path / "held" / TOKEN / "9.00").exists()
    again.forget(TOKEN, 7, 0)
    again.forget(OTHER, 0, 0)
    assert (again.files, again.nbytes, again.tokens()) == (0, 0, [])
    assert list((tmp_path / "held").iterdir()) == []


def test_a_new_path_moves_no_bytes_and_new_bytes_replace_the_earlier_ones(tmp_path: Path) -> None:
    held = HeldFiles(tmp_path, 100_000)
    assert held.put(record_of(), giving())
    renamed = record_of(path=b"latest")
    assert held.put(renamed, not_asked) and held.of(TOKEN) == [renamed]
    longer = record_of(CONTENT * 2)
    assert held.put(longer, giving(CONTENT * 2))
    assert (held.of(TOKEN), held.nbytes) == ([longer], 2 * len(CONTENT))
    assert len(list((tmp_path / TOKEN).iterdir())) == 2


def test_the_file_that_has_got_a_path_last_is_the_first_to_be_recovered(tmp_path: Path) -> None:
    held = HeldFiles(tmp_path, 100_000)
    # As after a rename over a file that is not forgotten yet.
    last = record_of(number=9, path=b"latest.tmp", version=1)
    before = record_of(number=8, path=b"latest", version=2)
    assert held.put(last, giving()) and held.put(before, giving())
    renamed = record_of(number=9, path=b"latest", version=3)
    assert held.put(renamed, not_asked)
    assert held.of(TOKEN) == [renamed, before]
    assert HeldFiles(tmp_path, 100_000).of(TOKEN) == [renamed, before]


@pytest.mark.fault("N7")
@pytest.mark.parametrize("is_same", [True, False])
def test_an_earlier_version_does_not_replace_a_later_one(tmp_path: Path, is_same: bool) -> None:
    held = HeldFiles(tmp_path, 100_000)
    later = record_of(version=6)
    assert held.put(later, giving())
    content = CONTENT if is_same else CONTENT[::-1]
    assert not held.put(record_of(content, path=b"earlier", version=5), giving(content))
    for each in (held, HeldFiles(tmp_path, 100_000)):
        assert each.of(TOKEN) == [later] and read(each, later) == CONTENT
        assert each.version(TOKEN, 7) == 6


def test_a_version_that_is_forgotten_while_the_next_one_arrives_is_counted_once(
    tmp_path: Path,
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    assert held.put(record_of(version=1), giving())
    longer = CONTENT * 2

    def fetch(take: Take) -> None:
        held.forget(TOKEN, 7, 1)
        take(longer)

    assert held.put(record_of(longer, version=2), fetch)
    assert (held.files, held.nbytes) == (1, len(longer))
    assert HeldFiles(tmp_path, 100_000).version(TOKEN, 7) == 2
    held.forget(TOKEN, 7, 1)
    assert held.files == 1
    held.forget(TOKEN, 7, 2)
    assert (held.files, held.nbytes, held.keeps(TOKEN)) == (0, 0, False)


@pytest.mark.fault("N7")
@pytest.mark.parametrize("number", [7, 0])
@pytest.mark.parametrize("has_earlier", [True, False])
def test_a_file_that_is_forgotten_while_it_arrives_is_not_kept(
    tmp_path: Path, number: int, has_earlier: bool
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    if has_earlier:
        assert held.put(record_of(version=1), giving())

    def fetch(take: Take) -> None:
        held.forget(TOKEN, number, 3)
        take(CONTENT * 2)

    assert not held.put(record_of(CONTENT * 2, version=2), fetch)
    assert (held.files, held.nbytes, list(tmp_path.iterdir())) == (0, 0, [])


def test_a_file_that_comes_again_while_it_is_removed_is_whole_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    assert held.put(record_of(version=1), giving())
    unlink, results = Path.unlink, []

    def put_meanwhile(path: Path, missing_ok: bool = False) -> None:
        if not results:
            results.append(held.put(record_of(version=2), giving()))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", put_meanwhile)
    held.forget(TOKEN, 7, 1)
    assert len(results) == 1
    for each in (held, HeldFiles(tmp_path, 100_000)):
        assert bool(each.files) == results[0]
        assert [read(each, record) for record in each.of(TOKEN)] == [CONTENT] * results[0]


def test_an_error_when_a_file_is_removed_leaves_no_object_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    for number in (1, 2):
        assert held.put(record_of(number=number), giving())

    def failing(path: Path, missing_ok: bool = False) -> None:
        raise OSError("an error of the disk")

    with monkeypatch.context() as failures:
        failures.setattr(Path, "unlink", failing)
        with pytest.raises(OSError, match="of the disk"):
            held.forget(TOKEN, 0, 0)
    for number in (1, 2):
        assert held.put(record_of(number=number, version=1), giving())


@pytest.mark.parametrize("bad", ["digest", "short", "fails"])
def test_bytes_that_are_not_those_of_the_record_leave_the_earlier_version(
    tmp_path: Path, bad: str
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    before = record_of()
    assert held.put(before, giving())
    content = CONTENT[::-1]
    wanted = record_of(content)

    def failing(take: Take) -> None:
        take(content[:10])
        raise OSError("the member is gone")

    if bad == "fails":
        with pytest.raises(OSError, match="gone"):
            held.put(wanted, failing)
    else:
        assert not held.put(wanted, giving(CONTENT if bad == "digest" else content[:-1]))
    assert held.of(TOKEN) == [before] and read(held, before) == CONTENT
    assert held.nbytes == len(CONTENT)
    assert len(list((tmp_path / TOKEN).iterdir())) == 2


def test_an_error_of_the_disk_behind_the_bytes_leaves_the_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    before, content = record_of(), CONTENT[::-1]
    assert held.put(before, giving())

    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(held_files, "replace_private", full)
    with pytest.raises(OSError, match="no space"):
        held.put(record_of(content), giving(content))
    assert held.of(TOKEN) == [before] and read(held, before) == CONTENT
    assert held.nbytes == len(CONTENT)
    assert HeldFiles(tmp_path, 100_000).of(TOKEN) == [before]


@pytest.mark.fault("N7")
def test_a_record_that_cannot_be_read_now_stays_for_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = record_of()
    assert HeldFiles(tmp_path, 100_000).put(record, giving())

    def failing(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as failures:
        failures.setattr(held_files, "read_private", failing)
        assert HeldFiles(tmp_path, 100_000).files == 0
    assert "7.json, a file of another node, is not known: Too many open files" in caplog.text
    again = HeldFiles(tmp_path, 100_000)
    assert again.of(TOKEN) == [record] and read(again, record) == CONTENT


@pytest.mark.fault("N7")
def test_a_record_of_another_version_stays_for_a_mount_that_can_read_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = record_of()
    assert HeldFiles(tmp_path, 100_000).put(record, giving())
    path = tmp_path / TOKEN / "7.json"
    whole = path.read_text()
    for other in ({"size": str(record.size)}, {"path": None}, {"digest": {"xxh4": "00"}}):
        path.write_text(json.dumps(json.loads(whole) | other))
        assert HeldFiles(tmp_path, 100_000).files == 0
    assert "7.json, a file of another node, is not known" in caplog.text
    # What another version adds does no harm.
    path.write_text(json.dumps(json.loads(whole) | {"flags": 5}))
    again = HeldFiles(tmp_path, 100_000)
    assert again.of(TOKEN) == [record] and read(again, record) == CONTENT


def test_a_directory_whose_removal_hangs_delays_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFiles(tmp_path, 100_000)
    assert held.put(record_of(), giving())
    begun, may_end, answers = threading.Event(), threading.Event(), list[object]()

    def hanging(path: Path) -> None:
        begun.set()
        may_end.wait()

    def ask() -> None:
        answers.append((held.keeps(TOKEN), held.files, held.version(TOKEN, 7), held.of(TOKEN)))

    monkeypatch.setattr(Path, "rmdir", hanging)
    threads = [threading.Thread(target=held.forget, args=(TOKEN, 7, 0))]
    threads[0].start()
    try:
        assert begun.wait(60)
        threads.append(threading.Thread(target=ask))
        threads[1].start()
        threads[1].join(60)
        assert answers == [(False, 0, None, [])]
    finally:
        may_end.set()
        for thread in threads:
            thread.join()


def test_the_directory_of_a_mount_stays_while_a_file_arrives(tmp_path: Path) -> None:
    held = HeldFiles(tmp_path, 100_000)
    assert held.put(record_of(number=1), giving())
    mkdir, forgotten = Path.mkdir, []

    def forget_meanwhile(path: Path, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if not forgotten:
            forgotten.append(1)
            held.forget(TOKEN, 1, 0)

    with pytest.MonkeyPatch.context() as change:
        change.setattr(Path, "mkdir", forget_meanwhile)
        assert held.put(record_of(number=2), giving())
    assert [record.number for record in HeldFiles(tmp_path, 100_000).of(TOKEN)] == [2]
    held.forget(TOKEN, 2, 0)
    assert list(tmp_path.iterdir()) == []


def test_no_more_is_kept_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFiles(tmp_path, 2 * len(CONTENT))
    assert held.put(record_of(number=1), giving()) and held.put(record_of(number=2), giving())
    assert not held.put(record_of(number=3), not_asked)
    held.forget(TOKEN, 1, 0)
    assert held.put(record_of(number=3), giving())
    monkeypatch.setattr(held_files, "_KEEP_FREE", 1 << 62)
    held.forget(TOKEN, 2, 0)
    assert not held.put(record_of(number=4), not_asked)
    assert held.nbytes == len(CONTENT)


def test_files_that_arrive_at_the_same_time_have_room_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them alone would leave enough of the disk free."""
    held = HeldFiles(tmp_path, 100 * len(CONTENT))
    room = SimpleNamespace(f_bavail=held_files._KEEP_FREE + 2 * len(CONTENT), f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda directory: room)
    taken: list[bool] = []

    def fetch(number: int) -> Callable[[Take], None]:
        def give(take: Take) -> None:
            # Nothing has been written yet when the next one comes.
            taken.append(held.put(record_of(number=number + 1), fetch(number + 1)))
            take(CONTENT)

        return give

    assert held.put(record_of(number=1), fetch(1))
    assert taken == [False, True]
    assert sorted(record.number for record in held.of(TOKEN)) == [1, 2]
    assert held.put(record_of(number=3), giving())


def test_damaged_bytes_are_not_given(tmp_path: Path) -> None:
    held = HeldFiles(tmp_path, 100_000)
    record = record_of()
    assert held.put(record, giving())
    (path,) = (tmp_path / TOKEN).glob("7.*[!n]")
    path.write_bytes(CONTENT[::-1])
    with pytest.raises(OSError, match="damaged"):
        held.open(record)


def test_a_record_is_sent_with_one_length() -> None:
    record = record_of(path=b"/".join([b"\xff" * 254] * 16))
    text = record.to_text().encode("ascii")
    assert len(text) == RECORD_BYTES and Record.from_text(text) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", b"../etc/passwd".hex()),
        ("path", b"/etc/passwd".hex()),
        ("path", b"a//b".hex()),
        ("path", b"a/./b".hex()),
        ("path", b"".hex()),
        ("path", b"a\0b".hex()),
        ("path", (b"a" * 256).hex()),
        ("path", (b"a/" * 2100 + b"a").hex()),
        ("path", "zz"),
        ("path", 5),
        ("token", "../../etc/passwd"),
        ("token", 5),
        ("digest", "0" * 31),
        ("size", -1),
        ("size", True),
        ("size", 1.5),
        ("uid", 1 << 32),
        ("mode", 0o10000),
        ("mtime_ns", "now"),
        ("number", None),
        ("version", "last"),
    ],
)
def test_a_record_of_another_form_is_refused(field: str, value: object) -> None:
    raw = json.loads(record_of().to_text())
    with pytest.raises(ValueError):
        Record.from_text(json.dumps(raw | {field: value}).encode())


def test_records_with_any_change_are_refused_or_have_the_form_of_one() -> None:
    dice, text = Random(16), record_of().to_text().strip().encode()
    refused = 0
    for _ in range(3000):
        changed = bytearray(text)
        for _ in range(dice.randrange(1, 6)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        try:
            found = Record.from_text(bytes(changed[: dice.randrange(1, len(changed) + 1)]))
        except ValueError:
            refused += 1
        else:
            assert b".." not in found.path.split(b"/") and found.token.isalnum()
    assert refused > 1000
