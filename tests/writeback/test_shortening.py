"""The journal stays short while it is mounted, and keeps every record that is needed."""

from __future__ import annotations

import itertools
import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from monarch.namespace.build import build
from monarch.posix import failpoints
from monarch.posix.thread_pool import ThreadPool
from monarch.tiers.source import Source
from monarch.types import Identity
from monarch.writeback import journal as journals
from monarch.writeback import setup
from monarch.writeback.history import Numbered, Summary, obsolete
from monarch.writeback.journal import Journal, Op
from monarch.writeback.journal_file import JournalFile
from monarch.writeback.op import Kind
from monarch.writeback.source_state import SourceState
from tests.equipment.virtual_clock import until
from tests.writeback.remounts import Rig
from tests.writeback.rig import Killed, Model, drain_of, draining

ID = Identity(5, 1, 2, 3)


def content(path: bytes, number: int) -> Op:
    return Op(kind="content", path=path, paths=(path,), object=number, size=5, synced=True)


def shortened(ops: Sequence[Numbered], done: Mapping[int, Identity | None]) -> list[Numbered]:
    """``ops`` without those that do not matter any more; ``done`` has those that are drained."""
    contents = Counter(op.object for _, op in ops if op.kind == "content")
    found = obsolete(
        ops,
        Summary(
            done=done,
            published={seq for seq, identity in done.items() if identity is not None},
            gone={op.object for _, op in ops if op.kind == "gone"},
            several={number for number, count in contents.items() if count > 1},
            unnamed={
                number
                for _, op in ops
                if op.kind in ("unlink", "rename")
                for number in (op.object, op.over_object)
            },
        ),
    )
    return [(seq, found.changed.get(seq, op)) for seq, op in ops if seq not in found.seqs]


def tables(of: object) -> int:
    """How many entries all tables of something have."""
    return sum(len(it) for it in vars(of).values() if isinstance(it, (dict, set, list)))


def month(journal: Journal, lines: int, checkpoints: int, *, keep: int = 3) -> int:
    """Fsyncs lines to one log, and writes checkpoints, but keeps only the newest. Returns the
    largest size that the journal's tables and its file had, in entries and bytes."""
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
            assert journal.file.position < 8192
        most = max(most, tables(journal))
    return most


@pytest.mark.finding("W21")
@pytest.mark.promise(139)
def test_a_month_of_lines_and_checkpoints_keeps_the_journal_and_its_tables_short(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_LONG_BYTES", 1 << 16)
    most = month(model.journal, 20_000, 2_000)
    assert most < 1000 and model.journal.file.position < 5 << 16
    replay = model.kill()
    assert len(replay.ops) + len(replay.done) < 1000
    assert {op.path for _, op in replay.ops if op.kind == "content"} >= {b"log"}
    with closing(Source(os.fsencode(model.source))) as source:
        drain = drain_of(model, source, ThreadPool(1, "drain", abandon=False))
        drain.load(replay)
        assert tables(drain) < 1000


def test_changes_that_later_ones_need_are_not_left_out() -> None:
    def of(*ops: Op, undone: int = 0) -> list[int]:
        numbered = list(enumerate(ops, 1))
        done = {seq: ID if op.kind == "content" else None for seq, op in numbered}
        done.pop(undone, None)
        return [seq for seq, _ in shortened(numbered, done)]

    made = Op(kind="create", path=b"a", object=1)
    removed = Op(kind="unlink", path=b"a", object=1), Op(kind="gone", object=1)
    assert of(made, content(b"a", 1), *removed) == []
    # Dropped: it is read from the source.
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
def test_a_file_made_and_removed_without_an_object_is_left_out_if_it_left_no_trace() -> None:
    def of(*ops: Op, undone: int = 0) -> list[int]:
        numbered = list(enumerate(ops, 1))
        done: dict[int, Identity | None] = dict.fromkeys(seq for seq, _ in numbered)
        done.pop(undone, None)
        return [seq for seq, _ in shortened(numbered, done)]

    made = Op(kind="mkdir", path=b"a.tmp", ino=7)
    renamed = Op(kind="rename", path=b"a.tmp", to=b"a", ino=7)
    removed = Op(kind="rmdir", path=b"a", ino=7)
    assert of(made, renamed, removed) == []
    assert of(made, renamed, removed, undone=3) == [1, 2, 3]
    assert of(made, renamed) == [1, 2]
    below = (
        Op(kind="mkdir", path=b"a/b", ino=8),
        Op(kind="attr", path=b"a/b", ino=8, mode=0o700),
        Op(kind="rmdir", path=b"a/b", ino=8),
    )
    assert of(made, renamed, *below, removed) == []
    # What was made in it is elsewhere now, and was moved there from it.
    file = Op(kind="create", path=b"a/c", ino=9, object=1)
    away = Op(kind="rename", path=b"a/c", to=b"c", ino=9, object=1)
    assert of(made, renamed, file, away, *below, removed) == [1, 2, 3, 4, 8]
    # A new link in the place of the last: only what the first has replaced must not come back.
    links = [
        Op(kind=kind, path=path, to=to, ino=ino, over_ino=over)
        for ino in (11, 12, 13)
        for kind, path, to, over in (
            ("symlink", b"new", b"target", 0),
            ("rename", b"new", b"latest", ino - 1),
        )
    ]
    assert of(*links) == [5, 6]
    assert of(*links, Op(kind="unlink", path=b"latest", ino=13)) == [5, 6, 7]
    # A file whose bytes are not there yet: the source has the link under its name until then.
    file = Op(kind="create", path=b"new", ino=14, object=2)
    over = Op(kind="rename", path=b"new", to=b"latest", ino=14, object=2, over_ino=13)
    assert of(*links, file, over) == [5, 6, 7, 8]
    other = replace(links[3], to=b"other", over_ino=3)
    assert of(*links[:3], other, *links[4:]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.promise(139)
def test_of_the_contents_of_a_file_the_last_published_and_the_last_left_out_stay() -> None:
    made = Op(kind="create", path=b"a", object=1)
    for expected, left in (("nnp", [4]), ("pnn", [2, 4]), ("pnpnp", [6]), ("pnnpn", [5, 6])):
        ops = [(1, made), *((seq, content(b"a", 1)) for seq, _ in enumerate(expected, 2))]
        done = {seq: ID if each == "p" else None for seq, each in enumerate("n" + expected, 1)}
        assert [seq for seq, _ in shortened(ops, done)] == [1, *left]
    # What the one that is missing has changed is not taken for what the source has.
    changed = [replace(content(b"a", 1), intact=intact) for intact in (0, 2, 5)]
    kept = shortened([(1, made), *enumerate(changed, 2)], {1: None, 2: ID, 3: None, 4: None})
    assert [op.intact for _, op in kept] == [0, 0, 2]


@pytest.mark.promise(139)
def test_a_replaced_file_stays_until_the_content_that_replaces_it_at_the_source() -> None:
    def of(*ops: Op, published: tuple[int, ...], undone: int = 0) -> list[int]:
        numbered = list(enumerate(ops, 1))
        done = {seq: ID if seq in published else None for seq, _ in numbered}
        done = {seq: each for seq, each in done.items() if not undone or seq < undone}
        return [seq for seq, _ in shortened(numbered, done)]

    into = Op(kind="rename", to=b"a", strict=True)

    def over(path: bytes, number: int) -> list[Op]:
        return [
            Op(kind="create", path=path, object=number),
            content(path, number),
            replace(into, path=path, object=number, over_object=number - 1),
            Op(kind="gone", object=number - 1),
        ]

    ops = [Op(kind="create", path=b"a", object=1), content(b"a", 1), *over(b"b", 2)]
    # The content is left out, and comes with a later one.
    assert of(*ops, published=(2,)) == [1, 2, 3, 4, 5, 6]
    assert of(*ops, content(b"a", 2), published=(2, 7)) == [3, 4, 5, 7]
    assert of(*ops, published=(2, 4, 5)) == [3, 4, 5]
    # The file that replaces it is replaced before it has come.
    assert of(*ops, *over(b"c", 3), published=(2,)) == [*range(1, 11)]
    assert of(*ops, *over(b"c", 3), content(b"a", 3), published=(2, 11)) == [7, 8, 9, 11]
    removed = Op(kind="unlink", path=b"a", object=2, strict=True), Op(kind="gone", object=2)
    assert of(*ops, *removed, published=(2,)) == []
    # It is to be removed at the source in the place of the file that was to replace it.
    assert of(*ops, *removed, published=(2,), undone=7) == [*range(1, 9)]


@pytest.mark.promise(139)
def test_a_replaced_file_with_another_name_is_not_taken_for_the_file_that_replaced_it() -> None:
    rename = Op(kind="rename", path=b"new", to=b"c", object=1, strict=True)
    ops = [
        Op(kind="create", path=b"new", object=1),
        content(b"new", 1),
        # A file of the source, which still has another name.
        replace(rename, over=replace(ID, source_ino=7), over_ino=7),
        replace(rename, path=b"c", to=b"d"),
        Op(kind="unlink", path=b"d", object=1, strict=True),
        Op(kind="gone", object=1),
    ]
    done = {1: None, 2: ID, 3: ID, 4: ID, 5: None, 6: None}
    kept = shortened([*enumerate(ops, 1)], done)
    assert [(seq, op.kind, op.ino) for seq, op in kept] == [(4, "unlink", 7)]
    state = SourceState()
    for seq, op in kept:
        state.note(op, done[seq])
    was = replace(ID, source_ino=7)
    assert state.entries.current_file(7, was) == was


@pytest.mark.promise(139)
@pytest.mark.parametrize("replaced", [1, 2])
async def test_a_kill_after_the_shortening_leaves_the_file_that_a_later_content_replaces(
    model: Model, clock: trio.testing.MockClock, replaced: int
) -> None:
    async with draining(model) as drain:
        await drain.progress.wait(model.write(b"a", b"first"))
        for path in (b"x", b"y")[:replaced]:
            model.tree[b"a"].writers = 0
            # The process continues to write after it has renamed the file.
            node = model.create(path)
            node.writers = 1
            model.store(node, b"half of " + path)
            model.content(node)
            model.store(node, b"more of " + path)
            model.rename(path, b"a")
            model.store(node, b"all of " + path)
        await until(lambda: not len(drain.queue))
    assert (model.source / "a").read_bytes() == b"first"
    model.journal.shorten()
    async with draining(model, model.kill()) as drain:
        await drain.progress.wait(model.last_seq)
    assert not drain.writer.log.conflict_count
    model.check_all_is_there()


NAMES = (b"a", b"b", b"c", b"d")


def random_ops(chance: random.Random, count: int) -> list[Op]:
    """Changes of directories, links and files as a mount records them, over a tree of its own."""
    tree: dict[bytes, tuple[str, int, int]] = {b"a": ("mkdir", 3, 0), b"b": ("symlink", 4, 0)}
    inos, objects, ops = itertools.count(1 << 33), itertools.count(1), []

    def remove(path: bytes) -> None:
        kind, ino, number = tree.pop(path)
        end: Kind = "rmdir" if kind == "mkdir" else "unlink"
        ops.append(Op(kind=end, path=path, ino=ino, object=number, strict=True))
        if number:
            ops.append(Op(kind="gone", object=number))

    for _ in range(count):
        parents = [b"", *(path + b"/" for path, (kind, *_) in tree.items() if kind == "mkdir")]
        path = chance.choice(parents) + chance.choice(NAMES)
        if path not in tree:
            kind: Kind = chance.choice(("mkdir", "symlink", "create"))
            number = next(objects) if kind == "create" else 0
            tree[path] = kind, next(inos), number
            ops.append(Op(kind=kind, path=path, ino=tree[path][1], object=number, strict=True))
            if number:
                ops.append(content(path, number))
            continue
        is_empty = not any(other.startswith(path + b"/") for other in tree)
        to = chance.choice(parents) + chance.choice(NAMES)
        if chance.random() < 0.4 and is_empty:
            remove(path)
        elif not to.startswith(path) and not path.startswith(to + b"/"):
            kind, ino, number = tree[path]
            over = tree.get(to, ("", 0, 0))
            is_dir = kind == "mkdir"
            full = any(other.startswith(to + b"/") for other in tree)
            if (over[1] and ((over[0] == "mkdir") != is_dir or full)) or (is_dir and ino < 1 << 33):
                continue
            ops.append(
                Op(
                    kind="rename",
                    path=path,
                    to=to,
                    ino=ino,
                    object=number,
                    over_ino=over[1],
                    over_object=over[2],
                    strict=True,
                )
            )
            if over[2]:
                ops.append(Op(kind="gone", object=over[2]))
            tree.pop(to, None)
            for name in [n for n in tree if n == path or n.startswith(path + b"/")]:
                tree[to + name[len(path) :]] = tree.pop(name)
    return ops


def tree_after(ops: Iterable[Op]) -> dict[bytes, tuple[str, int]]:
    """The tree that changes lead to; one that finds no place fails, as no replay may have to."""
    tree: dict[bytes, tuple[str, int]] = {b"a": ("mkdir", 3), b"b": ("symlink", 4)}
    for op in ops:
        directory = op.path.rpartition(b"/")[0]
        assert not directory or tree[directory][0] == "mkdir"
        match op.kind:
            case "mkdir" | "symlink" | "create":
                assert op.path not in tree
                tree[op.path] = op.kind, op.ino
            case "unlink" | "rmdir":
                tree.pop(op.path, None)
                assert not any(name.startswith(op.path + b"/") for name in tree)
            case "rename":
                tree.pop(op.to, None)
                assert op.path in tree
                for name in [n for n in tree if n == op.path or n.startswith(op.path + b"/")]:
                    tree[op.to + name[len(op.path) :]] = tree.pop(name)
    return tree


@pytest.mark.promise(139)
def test_the_shortened_changes_lead_to_the_same_tree() -> None:
    left = 0
    for seed in range(400):
        chance = random.Random(seed)
        ops = list(enumerate(random_ops(chance, chance.randrange(60)), 1))
        # The last ones are on their way.
        upto = len(ops) - chance.choice((0, 0, 3, 10))
        done = {seq: ID if op.kind == "content" else None for seq, op in ops if seq <= upto}
        kept = shortened(ops, done)
        assert {seq for seq, _ in ops} - done.keys() <= {seq for seq, _ in kept}
        assert tree_after(op for _, op in kept) == tree_after(op for _, op in ops), seed
        left += len(ops) - len(kept)
    assert left > 1000


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
        patched.setattr(failpoints, "failpoint", killed)
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
def test_records_synced_during_the_shortening_are_not_delayed_and_are_kept(
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
            assert journal.file.synced == journal.file.written

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "failpoint", reached)
        journal.shorten()
    assert journal.file.synced == journal.file.written
    journal.close()
    journal = Journal.open(directory, source=b"/source", boot="two")
    assert journal.replay().ops[-1] == (meanwhile[0], content(b"log", 1))
    journal.close()


@pytest.mark.promise(139)
def test_few_records_are_copied_while_changes_wait_for_the_shortened_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes are recorded all the time, one for each eight records that are read."""
    with closing(Journal.open(tmp_path / "journal", source=b"/s")) as journal:
        month(journal, 2000, 2)
        seqs: list[int] = []
        left: list[int] = []
        take_over = JournalFile._take_over

        def pause() -> None:
            seqs.extend(journal.append(content(b"log", 1)) for _ in range(2))

        def taken_over(file: JournalFile, fd: int, staged: Path, end: int) -> tuple[int, int]:
            left.append(file.position - end)
            return take_over(file, fd, staged, end)

        monkeypatch.setattr(JournalFile, "_take_over", taken_over)
        journal.shorten(pause)
        assert len(left) == 1 and left[0] <= 32 << 10
        assert len(seqs) > 500
    with closing(Journal.open(tmp_path / "journal", source=b"/s")) as journal:
        kept = {seq for seq, _ in journal.replay().ops}
        assert kept.issuperset(seqs)


async def test_a_journal_that_was_closed_is_not_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "absorbed"
    journal = Journal.open(directory, source=b"/source", boot="one")
    month(journal, 40, 10)
    before = (directory / "journal").read_bytes()
    journal.close()
    with pytest.raises(OSError):
        journal.shorten()
    assert (directory / "journal").read_bytes() == before


@pytest.mark.finding("W21")
@pytest.mark.promise(139)
async def test_a_mount_of_a_given_snapshot_keeps_its_journal_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(journals, "_LONG_BYTES", 1 << 13)
    rig = Rig(tmp_path, monkeypatch)
    given = tmp_path / "given.snapshot"
    build(rig.source, given, jobs=1)
    lengths: list[int] = []
    shorten = Journal.shorten

    def noted(journal: Journal, pause: Callable[[], object]) -> None:
        shorten(journal, pause)
        lengths.append(journal.file.position)

    monkeypatch.setattr(Journal, "shorten", noted)
    pauses: list[float] = []
    monkeypatch.setattr(setup, "time", SimpleNamespace(sleep=pauses.append))
    for _ in range(2):
        before = len(lengths)
        async with rig.mount(snapshot={"file": given, "jobs": 1}) as session:
            for number in range(40):
                await session.write(b"log", b"%d" % number, synced=True)
                await session.drained()
            # The clock jumps while threads are at work, so the journal may have been shortened
            # between these writes, and be too short to be shortened again.
            journal = session.write_back.place.journal
            await until(lambda before=before: len(lengths) > before)
            await until(lambda journal=journal: not journal.is_long)
            assert journal.file.position <= 1 << 13
            await session.end()
    assert max(lengths) < 1 << 12
    # The event loop can run meanwhile.
    assert pauses and min(pauses) > 0


@pytest.mark.promise(139)
def test_changes_that_wait_for_the_drain_do_not_make_the_journal_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_LONG_BYTES", 1 << 13)
    directory, files = tmp_path / "absorbed", 200
    journal = Journal.open(directory, source=b"/source", boot="one")
    for number in range(1, files + 1):
        journal.append(Op(kind="create", path=b"%d" % number, object=number))
        journal.append(content(b"%d" % number, number))
        assert not journal.is_long
    assert journal.file.position > 5 << 13
    journal.close()
    journal = Journal.open(directory, source=b"/source", boot="one")
    undone = [seq for seq, _ in journal.replay().ops]
    assert len(undone) == 2 * files and not journal.is_long
    for made, written in zip(undone[::2], undone[1::2], strict=True):
        journal.mark_done({made: None, written: ID})
        # At half of them most of the journal may not be left out.
        assert written > files or not journal.is_long
    assert journal.is_long
    journal.close()


@pytest.mark.promise(139)
def test_a_journal_of_which_nearly_all_matters_is_read_once_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path / "absorbed", source=b"/source", boot="one")
    files, read, pauses = 200, [0], list[int]()
    record = JournalFile.record

    def counted(file: JournalFile, line: bytes) -> dict[str, object]:
        read[0] += 1
        return record(file, line)

    def shorten() -> float:
        """Shorten it; how often each record was read."""
        lines, read[0] = journal.file.path.read_bytes().count(b"\n"), 0
        pauses.clear()
        journal.shorten(lambda: pauses.append(read[0]))
        # The event loop gets the interpreter after a few records.
        assert all(after - before < 64 for before, after in itertools.pairwise([*pauses, read[0]]))
        return read[0] / lines

    monkeypatch.setattr(JournalFile, "record", counted)
    for number in range(1, files + 1):
        made = journal.append(Op(kind="create", path=b"%d" % number, object=number))
        journal.mark_done({made: None, journal.append(content(b"%d" % number, number)): ID})
        # The object leaves the tier, and the file is read from the source.
        journal.mark_done({journal.append(Op(kind="gone", object=number)): None})
    before = journal.file.path.read_bytes()
    assert shorten() == 1
    assert journal.file.path.read_bytes() == before

    # Marks of tries that have failed can be left out, also where all changes matter.
    for _ in range(10):
        journal.mark_staged(*((number, ID, 0) for number in range(1, files + 1)))
    assert shorten() > 2
    assert journal.file.position < 1.1 * len(before)

    journal.append(Op(kind="create", path=b"temporary", object=files + 1))
    journal.mark_done({journal.append(content(b"temporary", files + 1)): ID})
    journal.append(Op(kind="unlink", path=b"temporary", object=files + 1))
    journal.mark_done({journal.append(Op(kind="gone", object=files + 1)): None})
    assert shorten() > 2
    assert b"temporary" not in journal.file.path.read_bytes()
    for op in (content(b"8", 8), Op(kind="rmdir", path=b"d", ino=9), Op(kind="gone", object=999)):
        journal.mark_done({journal.append(op): ID if op.kind == "content" else None})
        assert shorten() > 2
    journal.close()


def peak_of_shortening(directory: Path, files: int) -> int:
    """The most memory that the rewriting of a journal takes at once, in bytes, if all its files
    stay, and are read from the source."""
    journal = Journal.open(directory, source=b"/source", boot="one")
    for number in range(1, files + 1):
        path = b"run/sample-%07d.bin" % number
        made = journal.append(Op(kind="create", path=path, object=number))
        journal.mark_staged((number, ID, 0))
        journal.mark_done({made: None, journal.append(content(path, number)): ID})
        journal.mark_done({journal.append(Op(kind="gone", object=number)): None})
    # Something may be left out, so the journal is rewritten.
    journal.append(Op(kind="create", path=b"log", object=files + 1))
    journal.mark_done({journal.append(content(b"log", files + 1)): ID})
    journal.mark_done({journal.append(content(b"log", files + 1)): ID})
    before = journal.file.position
    tracemalloc.start()
    try:
        journal.shorten()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert journal.file.position > before / 2
    journal.close()
    journal = Journal.open(directory, source=b"/source", boot="two")
    replay = journal.replay()
    assert len(replay.ops) == len(replay.done) == 3 * files + 2 and not replay.lost
    journal.close()
    return peak


@pytest.mark.promise(139)
def test_the_rewriting_holds_no_records_of_the_files_that_stay(tmp_path: Path) -> None:
    # What it takes for any number of files differs by some 100 KB, also between two plays.
    few, many = (peak_of_shortening(tmp_path / f"{files}", files) for files in (500, 2500))
    assert many - few < 2000 * 100
