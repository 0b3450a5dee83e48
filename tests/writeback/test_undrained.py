"""The note of the changes that the source lacks, and the mount that compares it with the tiers."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from monarch.config.settings import MountSettings, TierSettings
from monarch.control import state_directory
from monarch.control.state_directory import (
    UndrainedNote,
    read_undrained,
    undrained_file,
    write_undrained,
)
from monarch.errors import TierError
from monarch.tiers.tier import Tier
from monarch.writeback import undrained
from monarch.writeback.drain import Drain
from monarch.writeback.earlier import lost_changes
from monarch.writeback.journal import Journal
from monarch.writeback.journal_found import boot_now, token_of
from monarch.writeback.object_table import ObjectTable
from monarch.writeback.op import Kind, Op
from monarch.writeback.store import WriteStore, directory_of, open_write_store
from monarch.writeback.undrained import UndrainedNotes


@pytest.fixture
def settings(tmp_path: Path) -> MountSettings:
    tier = TierSettings(name="fast", path=tmp_path / "tier")
    return MountSettings(
        name="m", source=tmp_path / "source", mountpoint=tmp_path / "mnt", tiers=(tier,)
    )


def journal_in(tier: Path, settings: MountSettings) -> str:
    """Makes a journal in a tier; returns its token."""
    directory = directory_of(tier, settings.source)
    directory.parent.mkdir(parents=True)
    journal = Journal.open(directory, source=os.fsencode(settings.source))
    journal.close()
    return journal.token


def note_of(settings: MountSettings, journal: str) -> UndrainedNote:
    directory = directory_of(settings.tiers[0].path, settings.source)
    return UndrainedNote(
        version=1,
        tier=os.fspath(settings.tiers[0].path),
        directory=os.fspath(directory),
        journal=journal,
        in_memory=False,
        boot=boot_now(),
        operations=1,
        bytes=9,
        names=["ckpt"],
    )


# -- the next mount ----------------------------------------------------------------------------


def test_a_mount_with_the_journal_is_made(settings: MountSettings, tmp_path: Path) -> None:
    assert lost_changes(settings, tmp_path) is None
    token = journal_in(settings.tiers[0].path, settings)
    assert token == token_of(directory_of(settings.tiers[0].path, settings.source)) != ""
    write_undrained(tmp_path, note_of(settings, token))
    assert lost_changes(settings, tmp_path) is None
    # The disk of the tier is mounted at another path, which the mount names.
    (tmp_path / "tier").rename(tmp_path / "moved")
    with pytest.raises(TierError):
        lost_changes(settings, tmp_path)
    moved = TierSettings(name="moved", path=tmp_path / "moved")
    assert lost_changes(settings.model_copy(update={"tiers": (moved,)}), tmp_path) is None


@pytest.mark.promise(179)
@pytest.mark.parametrize("left", ["nothing", "an empty tier", "an empty journal"])
def test_a_mount_without_the_journal_is_refused(
    settings: MountSettings, tmp_path: Path, left: str
) -> None:
    directory = directory_of(settings.tiers[0].path, settings.source)
    if left != "nothing":
        directory.mkdir(parents=True)
    if left == "an empty journal":
        (directory / "journal").touch()
    write_undrained(tmp_path, note_of(settings, "0123456789abcdef"))
    with pytest.raises(TierError) as refusal:
        lost_changes(settings, tmp_path)
    assert str(settings.tiers[0].path) in refusal.value.args[0]
    assert "1 change (9 B) not at the source, but no journal" in refusal.value.args[0]
    assert str(undrained_file(tmp_path)) in (refusal.value.hint or "")


@pytest.mark.promise(179)
def test_a_mount_with_the_journal_of_another_tier_is_refused(
    settings: MountSettings, tmp_path: Path
) -> None:
    journal_in(settings.tiers[0].path, settings)
    write_undrained(tmp_path, note_of(settings, "0123456789abcdef"))
    with pytest.raises(TierError, match="another journal"):
        lost_changes(settings, tmp_path)


@pytest.mark.promise(179)
def test_changes_in_memory_are_lost_with_a_start_of_the_machine(
    settings: MountSettings, tmp_path: Path
) -> None:
    note = replace(note_of(settings, "0123456789abcdef"), in_memory=True)
    write_undrained(tmp_path, note)
    with pytest.raises(TierError):
        lost_changes(settings, tmp_path)
    lost = replace(note, boot="an earlier one")
    write_undrained(tmp_path, lost)
    assert lost_changes(settings, tmp_path) == lost
    write_undrained(tmp_path, replace(lost, in_memory=False))
    with pytest.raises(TierError):
        lost_changes(settings, tmp_path)


@pytest.mark.promise(179)
@pytest.mark.parametrize("undrained", ["first", "second", "first and second"])
def test_of_two_tiers_with_journals_that_with_undrained_changes_absorbs(
    settings: MountSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture, undrained: str
) -> None:
    tiers = []
    for name in ("first", "second"):
        journal_in(tmp_path / name, settings)
        directory = directory_of(tmp_path / name, settings.source)
        journal = Journal.open(directory, source=os.fsencode(settings.source))
        seq = journal.append(change("mkdir", b"made"))
        if name not in undrained:
            journal.mark_done({seq: None})
        journal.close()
        tiers.append(SimpleNamespace(name=name, path=tmp_path / name, in_memory=False))
    store = open_write_store(settings, [cast(Tier, tier) for tier in tiers])
    assert store is not None and store.tier.name == undrained.split()[0]
    store.close()
    assert ("tier second has changes" in caplog.text) is ("and" in undrained)


def test_an_unreadable_note_is_reported_and_a_newer_one_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in ("", "{", "[]", '{"version": 1}'):
        undrained_file(tmp_path).write_text(content)
        caplog.clear()
        assert read_undrained(tmp_path) is None and "cannot be read" in caplog.text
    undrained_file(tmp_path).write_text('{"version": 9}')
    with pytest.raises(TierError, match="version 9"):
        read_undrained(tmp_path)


@pytest.mark.promise(179)
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["fifo", "directory", "link"],
)
@pytest.mark.timeout(100)
def test_something_else_in_the_place_of_the_note_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], object]
) -> None:
    path = undrained_file(tmp_path)
    make(path)
    with caplog.at_level(logging.WARNING):
        assert read_undrained(tmp_path) is None
    assert "cannot be read" in caplog.text


# -- the note while a mount runs ---------------------------------------------------------------


class Waiting:
    """A drain whose queue has the changes ``ops``, in a tier with a journal."""

    def __init__(self, tmp_path: Path) -> None:
        self.state = tmp_path
        self.ops: list[Op] = []
        self.written: set[int] = set()
        directory = tmp_path / "tier/monarch/absorbed-1"
        tier = SimpleNamespace(path=tmp_path / "tier", in_memory=False)
        journal = SimpleNamespace(token="0123")
        place = SimpleNamespace(tier=tier, directory=directory, journal=journal)
        drain = SimpleNamespace(queue=self, progress=self)
        table = SimpleNamespace(writable=lambda: self.written)
        self.notes = UndrainedNotes(
            self.state,
            cast(WriteStore, place),
            cast(Drain, drain),
            cast(ObjectTable, table),
        )
        self.held: list[object] = []

    @property
    def waiting_bytes(self) -> int:
        return sum(op.size for op in self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def entries(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(op=op) for op in self.ops]

    def put(self, *ops: Op) -> None:
        self.notes.begin()
        self.ops += ops

    async def named(self) -> list[str]:
        await self.notes.finish()
        return names_in(self.state)


def names_in(state: Path) -> list[str]:
    note = read_undrained(state)
    return [] if note is None else note.names


async def becomes(holds: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not holds():
            await trio.sleep(0.01)


def change(kind: Kind, path: bytes, object: int = 0, *, to: bytes = b"", size: int = 0) -> Op:
    return Op(kind=kind, path=path, object=object, to=to, size=size)


@pytest.mark.promise(179)
def test_the_note_comes_with_the_first_change_and_goes_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undrained, "_STEP_S", 0.01)

    async def run() -> None:
        waiting = Waiting(tmp_path)
        # The note of an earlier mount, whose changes are drained.
        undrained_file(tmp_path).write_text("{}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiting.notes.run)
            await becomes(lambda: not undrained_file(tmp_path).exists())
            for _ in range(2):
                waiting.put(change("create", b"a", 1), change("content", b"a", 1, size=5))
                # The caller has no answer yet.
                note = read_undrained(tmp_path)
                assert note is not None and note.names == ["undrained-0123"]
                assert (note.journal, note.boot, note.in_memory) == ("0123", boot_now(), False)
                await becomes(lambda: names_in(tmp_path) == ["a"])
                note = read_undrained(tmp_path)
                assert note is not None and (note.operations, note.bytes) == (2, 5)
                waiting.ops.clear()
                waiting.written.add(1)
                assert await waiting.named() == ["undrained-0123"]
                waiting.written.clear()
                await becomes(lambda: not undrained_file(tmp_path).exists())
            nursery.cancel_scope.cancel()
        await waiting.notes.finish()
        assert os.listdir(tmp_path) == []

    trio.run(run)


@pytest.mark.promise(179)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_first_note_needs_no_turn_of_the_loop_and_a_prepared_one_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    async def run() -> None:
        waiting = Waiting(tmp_path)
        async with trio.open_nursery() as nursery:
            if is_prepared:
                nursery.start_soon(waiting.notes.run)
                prepared = tmp_path / "undrained-first.part"
                await becomes(lambda: prepared.exists() and waiting.notes._is_known)
                monkeypatch.setattr(state_directory, "replace_private", full)
            # A process opens a file for writing.
            waiting.notes.begin()
            waiting.written.add(1)
            assert names_in(tmp_path) == ["undrained-0123"]
            waiting.written.clear()
            await waiting.notes._update()
            assert names_in(tmp_path) == []
            nursery.cancel_scope.cancel()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trio.run(run)


@pytest.mark.promise(179)
def test_a_note_that_an_earlier_mount_has_prepared_is_not_used(tmp_path: Path) -> None:
    """That mount was killed, and had another tier."""

    async def run() -> None:
        waiting = Waiting(tmp_path)
        earlier = replace(waiting.notes._note(1, []), journal="earlier")
        state_directory.prepare_undrained(tmp_path, earlier)
        waiting.notes.begin()
        note = read_undrained(tmp_path)
        assert note is not None and note.journal == "0123"

    trio.run(run)


@pytest.mark.promise(179)
def test_a_change_that_comes_while_the_note_is_removed_has_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepares = state_directory.prepare_undrained

    async def run() -> None:
        waiting = Waiting(tmp_path)
        undrained_file(tmp_path).write_text("{}")
        token = trio.lowlevel.current_trio_token()

        def prepared(*arguments: Any) -> None:
            prepares(*arguments)
            trio.from_thread.run_sync(waiting.put, change("mkdir", b"d"), trio_token=token)

        monkeypatch.setattr(undrained, "prepare_undrained", prepared)
        await waiting.notes._update()
        assert names_in(tmp_path) == ["undrained-0123"]
        await waiting.notes._update()
        assert names_in(tmp_path) == ["d"]

    trio.run(run)


@pytest.mark.promise(179)
def test_a_state_directory_that_does_not_answer_delays_one_change_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(undrained, "_WAIT_S", 0.01)

    def hanging(state: Path) -> None:
        answers.wait()
        raise FileNotFoundError

    monkeypatch.setattr(undrained, "put_undrained", hanging)

    async def run() -> None:
        waiting = Waiting(tmp_path)
        waiting.notes._is_prepared = True
        with caplog.at_level(logging.WARNING):
            waiting.put(change("mkdir", b"d"))
        assert "what the source lacks: no answer" in caplog.text
        waiting.put(change("mkdir", b"e"))
        assert names_in(tmp_path) == []
        answers.set()
        await becomes(lambda: not waiting.notes._calls.is_stuck)
        assert await waiting.named() == ["d", "e"]

    trio.run(run)


def test_the_note_has_the_last_names_of_the_files(tmp_path: Path) -> None:
    async def run() -> None:
        waiting = Waiting(tmp_path)
        waiting.put(
            change("create", b"tmp", 1),
            change("content", b"tmp", 1),
            change("rename", b"tmp", 1, to=b"caf\xe9"),
            change("create", b"gone", 2),
            change("unlink", b"gone", 2),
            change("mkdir", b"old"),
            change("rename", b"old", to=b"new"),
        )
        assert await waiting.named() == [os.fsdecode(b"caf\xe9"), "new"]
        waiting.put(*(change("create", b"%d" % number, number) for number in range(10, 5000)))
        names = await waiting.named()
        assert len(names) < 5000 and names[-1] == "undrained-0123"
        waiting.ops = [change("create", b"x" * 4000 + b"%d" % n, n) for n in range(1, 100)]
        names = await waiting.named()
        assert 10 < len(names) < 99 and names[-1] == "undrained-0123"
        waiting.ops = [change("unlink", b"of the source")]
        assert await waiting.named() == ["undrained-0123"]

    trio.run(run)


def test_a_state_directory_that_cannot_be_written_is_reported_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        waiting = Waiting(tmp_path)
        waiting.state.joinpath("undrained.json").mkdir()
        waiting.put(change("create", b"a", 1))
        with caplog.at_level(logging.WARNING):
            await waiting.notes.finish()
        assert "cannot note what the source lacks" in caplog.text
        assert waiting.notes.failure == "Is a directory (EISDIR)"
        undrained_file(tmp_path).rmdir()
        assert await waiting.named() == ["a"]
        assert not waiting.notes.failure

    trio.run(run)
