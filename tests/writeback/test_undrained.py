"""The note of the changes that the source lacks, and the mount that compares it with the tiers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio

from monarch.config.settings import MountSettings, TierSettings
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
@pytest.mark.timeout(20)
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
        self.unrecorded: set[int] = set()
        self.changed = trio.Event()
        directory = tmp_path / "tier/monarch/absorbed-1"
        tier = SimpleNamespace(path=tmp_path / "tier", in_memory=False)
        journal = SimpleNamespace(token="0123")
        place = SimpleNamespace(tier=tier, directory=directory, journal=journal)
        drain = SimpleNamespace(queue=self, progress=self)
        table = SimpleNamespace(unrecorded=lambda: self.unrecorded)
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

    async def until_waiting(self) -> None:
        await self.changed.wait()
        self.changed = trio.Event()

    def put(self, *ops: Op) -> None:
        self.ops += ops
        self.changed.set()

    async def named(self) -> list[str]:
        await self.notes.finish()
        note = read_undrained(self.state)
        return [] if note is None else note.names


async def becomes(holds: Callable[[], bool]) -> None:
    with trio.fail_after(20):
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
            waiting.put(change("create", b"a", 1), change("content", b"a", 1, size=5))
            await becomes(undrained_file(tmp_path).exists)
            note = read_undrained(tmp_path)
            assert note is not None
            assert (note.names, note.operations, note.bytes) == (["a"], 2, 5)
            assert (note.journal, note.boot, note.in_memory) == ("0123", boot_now(), False)
            waiting.ops.clear()
            waiting.unrecorded.add(1)
            assert await waiting.named() == ["undrained-0123"]
            waiting.unrecorded.clear()
            await becomes(lambda: not undrained_file(tmp_path).exists())
            nursery.cancel_scope.cancel()

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
        undrained_file(tmp_path).rmdir()
        assert await waiting.named() == ["a"]

    trio.run(run)
