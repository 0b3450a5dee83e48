"""The journal stays short while it is mounted, and nothing that matters is left out of it."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from monarch import points
from monarch.threads import Threads
from monarch.tiers.source import Source
from monarch.types import Identity
from monarch.writeback import journal as journals
from monarch.writeback.journal import Journal, Op
from monarch.writeback.shortening import shortened
from tests.writeback.rig import Killed, World, drain_of

ID = Identity(5, 1, 2, 3)


def content(path: bytes, number: int) -> Op:
    return Op(kind="content", path=path, paths=(path,), object=number, size=5, synced=True)


def tables(of: object) -> int:
    """How many entries all tables of something have."""
    return sum(len(it) for it in vars(of).values() if isinstance(it, (dict, set, list)))


def month(journal: Journal, lines: int, checkpoints: int, *, keep: int = 3) -> int:
    """Lines fsynced to one log, and checkpoints of which the newest are kept; the most that the
    journal's tables and its file had, in entries and bytes."""
    journal.append(Op(kind="create", path=b"log", object=1))
    most = number = 1
    for line in range(lines):
        seq = journal.append(content(b"log", 1))
        journal.mark_done({seq: ID})
        if line % (lines // checkpoints):
            continue
        number += 1
        name = b"step-%d" % number
        seqs = [
            journal.append(Op(kind="create", path=b"tmp", object=number)),
            journal.append(content(b"tmp", number)),
            journal.append(Op(kind="rename", path=b"tmp", to=name, object=number, strict=True)),
        ]
        journal.mark_done({seqs[0]: None, seqs[1]: ID, seqs[2]: ID})
        if (old := number - keep) > 1:
            path = b"step-%d" % old
            seqs = [
                journal.append(Op(kind="unlink", path=path, object=old)),
                journal.append(Op(kind="gone", object=old)),
            ]
            journal.mark_done(dict.fromkeys(seqs))
        if journal.is_long:
            journal.shorten()
            assert journal.position < 8192
        most = max(most, tables(journal))
    return most


@pytest.mark.promise(139)
def test_a_month_of_lines_and_checkpoints_keeps_the_journal_and_its_tables_short(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_LONG_BYTES", 1 << 16)
    most = month(world.journal, 20_000, 2_000)
    assert most < 1000 and world.journal.position < 5 << 16
    replay = world.kill()
    assert len(replay.ops) + len(replay.done) < 1000
    assert {op.path for _, op in replay.ops if op.kind == "content"} >= {b"log"}
    with closing(Source(os.fsencode(world.source))) as source:
        drain = drain_of(world, source, Threads(1, "drain", abandon=False))
        drain.load(replay)
        assert tables(drain) < 1000


def test_what_others_need_is_not_left_out() -> None:
    def of(*ops: Op, undone: int = 0) -> list[int]:
        numbered = list(enumerate(ops, 1))
        done = {seq: ID if op.kind == "content" else None for seq, op in numbered}
        done.pop(undone, None)
        return [seq for seq, _ in shortened(numbered, done)]

    made = Op(kind="create", path=b"a", object=1)
    removed = Op(kind="unlink", path=b"a", object=1), Op(kind="gone", object=1)
    assert of(made, content(b"a", 1), *removed) == []
    # Let go of: it is read from the source.
    assert of(made, content(b"a", 1), removed[1]) == [1, 2, 3]
    # The source has it still.
    assert of(made, content(b"a", 1), *removed, undone=3) == [1, 2, 3, 4]
    assert of(made, content(b"a", 1), content(b"a", 1)) == [1, 3]
    assert of(made, content(b"a", 1), content(b"a", 1), undone=3) == [1, 2, 3]
    rename = Op(kind="rename", path=b"a", to=b"b", object=1)
    assert of(made, content(b"a", 1), rename, content(b"b", 1)) == [1, 2, 3, 4]
    # What it has replaced must not come back.
    over = replace(rename, strict=True, over=ID, over_ino=7)
    unlink = Op(kind="unlink", path=b"b", object=1, strict=True)
    assert of(made, over, unlink, removed[1]) == [3]
    assert of(made, replace(rename, strict=True), unlink, removed[1]) == []


@pytest.mark.promise(139)
@pytest.mark.parametrize("at", ["journal-staged", "journal-compacted"])
def test_a_kill_while_it_is_shortened_leaves_all_that_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    directory = tmp_path / "absorbed"
    journal = Journal.open(directory, source=b"/source", boot="one")
    month(journal, 40, 10)
    last = journal.append(content(b"log", 1))

    def killed(name: str) -> None:
        if name == at:
            raise Killed(name)

    with monkeypatch.context() as patched:
        patched.setattr(points, "reached", killed)
        with pytest.raises(Killed):
            journal.shorten()
    journal.close()
    journal = Journal.open(directory, source=b"/source", boot="two")
    replay = journal.replay()
    done = replay.done
    assert last not in done and replay.ops[-1][0] == last and not replay.lost
    names = {op.to for _, op in shortened(replay.ops, done) if op.kind == "rename"}
    assert names == {b"step-9", b"step-10", b"step-11"}
    journal.close()


@pytest.mark.promise(139)
def test_what_is_recorded_and_synced_meanwhile_is_not_held_up_and_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "absorbed"
    journal = Journal.open(directory, source=b"/source", boot="one")
    month(journal, 40, 10)
    meanwhile: list[int] = []

    def reached(name: str) -> None:
        if name == "journal-staged":
            meanwhile.append(journal.append(content(b"log", 1)))
            journal.sync()
            assert journal.synced == journal.written

    with monkeypatch.context() as patched:
        patched.setattr(points, "reached", reached)
        journal.shorten()
    assert journal.synced == journal.written
    journal.close()
    journal = Journal.open(directory, source=b"/source", boot="two")
    assert journal.replay().ops[-1] == (meanwhile[0], content(b"log", 1))
    journal.close()


async def test_a_journal_that_was_closed_is_not_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "absorbed"
    journal = Journal.open(directory, source=b"/source", boot="one")
    month(journal, 40, 10)
    before = (directory / "journal").read_bytes()
    journal.close()
    with pytest.raises(OSError):
        journal.shorten()
    assert (directory / "journal").read_bytes() == before
