"""Changes that the source refuses for long, and the other changes that wait with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from monarch.posix.credentials import Credentials
from monarch.types import Identity
from monarch.writeback import source_writer
from monarch.writeback.expected import Expected
from monarch.writeback.op import Op
from monarch.writeback.source_contents import Place, StagedContents
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_publishing import Publishing
from tests.conftest import require_root
from tests.writeback.rig import Model, draining

Clock = trio.testing.MockClock


async def until(holds: Callable[[], bool]) -> None:
    """In small steps: the clock of the test runs while a thread works."""
    with trio.fail_after(20_000):
        while not holds():
            await trio.sleep(1)


@pytest.mark.finding("W11")
@pytest.mark.promise(146)
async def test_a_change_that_is_refused_for_long_does_not_block_other_changes_of_its_user(
    model: Model, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (model.source / "x").write_bytes(b"blocks")
    async with draining(model) as drain:
        refused = model.mkdir(b"x")
        beneath = model.write(b"x/file", b"1")
        later = model.write(b"weights", b"2")
        await trio.sleep(300)
        assert not drain.progress.is_done(later)
        await until(lambda: drain.progress.is_done(later))
        assert not (
            drain.progress.is_done(refused)
            or drain.progress.is_done(beneath)
            or drain.progress.has_all(later)
        )
        assert "mkdir 'x'" in (drain.backlog().trouble or "")
        assert caplog.text.count("set aside") == 1
        # A change after that does not wait at all, unless it depends on one that is set aside.
        after, again = model.write(b"latest", b"3"), model.write(b"x/again", b"4")
        await until(lambda: drain.progress.is_done(after))
        assert not drain.progress.is_done(again)
        assert (model.source / "x").read_bytes() == b"blocks"
        # It is tried again by itself.
        (model.source / "x").unlink()
        await until(lambda: drain.progress.has_all(again))
        assert drain.backlog().trouble is None
    model.check_all_is_there()


@pytest.mark.promise(146)
async def test_a_change_set_aside_is_never_marked_as_done_whatever_comes_later(
    model: Model, clock: Clock
) -> None:
    for name in ("x", "y"):
        (model.source / name).write_bytes(b"blocks")
    async with draining(model) as drain:
        refused = [model.mkdir(b"x"), model.mkdir(b"y"), model.write(b"x/1", b"1")]
        await trio.sleep(900)
        for number in range(20):
            last = model.write(b"file%d" % number, b"bytes")
            refused.append(model.write(b"%s/%d" % (b"xy"[number % 2 :][:1], number), b"2"))
            await trio.sleep(number * 7)
            held = [entry.seq for entry in drain.queue.held]
            assert held == sorted(held)
        # The file may be there before its mark is in the journal.
        await drain.progress.wait(last)
        assert not any(map(drain.progress.is_done, refused))
    # Another session knows exactly what was not made.
    replay = model.kill()
    undone = {seq for seq, op in replay.ops if seq not in replay.done and op.kind != "create"}
    assert undone == set(refused)
    for name in ("x", "y"):
        os.unlink(model.source / name)
    async with draining(model, replay) as drain:
        await drain.progress.settle()
    model.check_all_is_there()


@pytest.mark.finding("W11")
@pytest.mark.promise(146)
@pytest.mark.parametrize(
    "error",
    [errno.ENAMETOOLONG, errno.EDQUOT, errno.EILSEQ, errno.EFBIG, errno.ENOSPC],
    ids=errno.errorcode.get,
)
async def test_a_file_that_the_source_cannot_have_does_not_block_others_of_its_user(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """ENOSPC: of a quota of a directory, for the file system has room."""
    # Whatever room there is where the tests are run.
    monkeypatch.setattr(source_writer, "_FULL_BYTES", 0)
    open_place = StagedContents.open_place

    def refused(self: StagedContents, op: Op, *more: Any, **others: Any) -> int:
        if op.path == b"x":
            raise OSError(error, os.strerror(error))
        return open_place(self, op, *more, **others)

    monkeypatch.setattr(StagedContents, "open_place", refused)
    async with draining(model) as drain:
        first, later = model.write(b"x", b"1"), model.write(b"weights", b"2", synced=True)
        await until(lambda: drain.progress.is_done(later))
        assert not drain.progress.is_done(first)
        assert "content 'x'" in (drain.backlog().trouble or "")
        monkeypatch.undo()
        await until(lambda: drain.progress.has_all(later))
    model.check_all_is_there()


@pytest.mark.promise(81)
@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC], ids=errno.errorcode.get)
async def test_a_directory_without_space_holds_up_no_other_user(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(source_writer, "_FULL_BYTES", 0)
    mkdir = SourceEntries.mkdir

    def refused(self: SourceEntries, directories: Any, op: Op, expected: Any) -> Identity:
        if op.path.startswith(b"x/"):
            raise OSError(error, os.strerror(error))
        return mkdir(self, directories, op, expected)

    monkeypatch.setattr(SourceEntries, "mkdir", refused)
    async with draining(model) as drain:
        model.mkdir(b"x", 0o777)
        model.by = Credentials(65534, 65534)
        full = model.mkdir(b"x/y")
        model.by = None
        other = model.mkdir(b"z")
        await until(lambda: drain.progress.is_done(other))
        assert not drain.progress.is_done(full)
        monkeypatch.undo()
        await until(lambda: drain.progress.has_all(other))
    model.check_all_is_there()


@pytest.mark.promise(81)
@pytest.mark.fault("U4")
@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC], ids=errno.errorcode.get)
async def test_removals_reach_a_source_whose_quota_is_full_before_what_needs_their_room(
    model: Model,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    there = [model.source / "a", model.source / "d"]
    refuse_while(monkeypatch, error, lambda: any(path.exists() for path in there))
    async with draining(model) as drain:
        late = [model.write(b"new", b"1", synced=True)]
        await until(lambda: bool(drain.queue.held))
        late += [model.rename(b"b", b"to"), model.mkdir(b"made")]
        model.unlink(b"a")
        # It depends on what waits.
        late.append(model.unlink(b"to"))
        model.unlink(b"d/a")
        model.rmdir(b"d")
        await until(lambda: not any(path.exists() for path in there))
        await until(lambda: drain.progress.has_all(late[-1]))
        # Then they would not have waited any more.
        assert "set aside" not in caplog.text
    assert not (model.source / "to").exists()
    model.check_all_is_there()


@pytest.mark.promise(65, 81)
async def test_a_removal_waits_behind_changes_that_need_more_than_room(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [True]
    refuse_while(monkeypatch, errno.EACCES, lambda: refused[0])
    async with draining(model) as drain:
        model.write(b"new", b"1", synced=True)
        removed = model.unlink(b"a")
        await until(lambda: drain.queue.refused > 2)
        assert (model.source / "a").exists()
        refused[0] = False
        await until(lambda: drain.progress.has_all(removed))
    model.check_all_is_there()


@pytest.mark.promise(65, 81)
@pytest.mark.parametrize("kind", ["mode", "list"])
@pytest.mark.parametrize("beneath", [False, True], ids=["alone", "with a content beneath"])
async def test_a_removal_waits_behind_changed_attributes_of_a_directory_above_it(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str, beneath: bool
) -> None:
    """They may be what lets the user remove it, and go ahead with it. They wait, too, if they may
    close the directory to what waits there."""
    refused, made = [True], list[str]()
    refuse_while(monkeypatch, errno.EDQUOT, lambda: refused[0])
    for method in ("change_attributes", "unlink"):
        monkeypatch.setattr(SourceEntries, method, noted(getattr(SourceEntries, method), made))
    async with draining(model) as drain:
        model.write(b"d/new" if beneath else b"new", b"1", synced=True)
        changed = (
            model.chmod(b"d", 0o755) if kind == "mode" else model.setxattr(b"d", b"user.list", b"1")
        )
        removed = model.unlink(b"d/a")
        if beneath:
            await until(lambda: drain.queue.refused > 2)
            assert not made
            refused[0] = False
        await until(lambda: drain.progress.is_done(removed) and drain.progress.is_done(changed))
        assert made == ["change_attributes", "unlink"]
        refused[0] = False
        await until(lambda: drain.progress.has_all(removed))
    assert not (model.source / "d/a").exists()


def noted(method: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        made.append(method.__name__)
        return method(*arguments, **options)

    return call


def refuse_while(monkeypatch: pytest.MonkeyPatch, error: int, holds: Callable[[], bool]) -> None:
    """The source takes no bytes while ``holds`` returns true, though its file system has room."""
    monkeypatch.setattr(source_writer, "_FULL_BYTES", 0)
    open_place = StagedContents.open_place

    def refused(self: StagedContents, op: Op, *more: Any, **others: Any) -> int:
        if holds():
            raise OSError(error, os.strerror(error))
        return open_place(self, op, *more, **others)

    monkeypatch.setattr(StagedContents, "open_place", refused)


@pytest.mark.promise(81, 149)
async def test_a_directory_that_its_user_may_not_make_again_holds_up_no_other_user(
    model: Model, clock: Clock
) -> None:
    require_root()
    model.source.chmod(0o755)
    async with draining(model) as drain:
        model.mkdir(b"x", 0o777)
        model.by = Credentials(65534, 65534)
        await drain.progress.wait(model.mkdir(b"x/y", 0o777))
        (model.source / "x").rename(model.source / "theirs")
        missing = model.rename(b"x/y", b"x/z")
        model.by = None
        other = model.mkdir(b"other")
        await until(lambda: drain.progress.is_done(other))
        assert not drain.progress.is_done(missing)
        assert "rename 'x/y'" in (drain.backlog().trouble or "")
        (model.source / "theirs").rename(model.source / "x")
        await until(lambda: drain.progress.has_all(other))
    model.check_all_is_there()


@pytest.mark.finding("W11")
@pytest.mark.promise(79, 146, 149)
@pytest.mark.parametrize("theirs", ["a directory for a file", "a link for a directory"])
async def test_a_file_of_others_in_the_way_does_not_block_a_later_checkpoint(
    model: Model, clock: Clock, theirs: str
) -> None:
    if theirs == "a directory for a file":
        (model.source / "x").mkdir()
        model.write(b"x", b"1")
    else:
        model.write(b"d/x", b"1")
        (model.source / "d").rename(model.source / "theirs")
        (model.source / "d").symlink_to("theirs")
    later = model.write(b"weights", b"2", synced=True)
    async with draining(model, model.kill()) as drain:
        await until(lambda: drain.progress.is_done(later))
        backlog = drain.backlog()
        # The one is kept beside, the other is named as refused.
        assert backlog.conflicts == 1 or "'d/x'" in (backlog.trouble or "")
    assert (model.source / "weights").read_bytes() == b"2"
    assert (model.source / "x").is_dir() or (model.source / "d").is_symlink()
    assert not (model.source / "theirs/x").exists()


@pytest.mark.finding("W11")
@pytest.mark.promise(139, 146)
async def test_the_journal_does_not_grow_while_a_content_is_refused(
    model: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_place, numbers = StagedContents.open_place, set[int]()

    def opened(
        self: StagedContents, op: Op, place: Place, expected: Expected, *, make: bool
    ) -> int:
        fd = open_place(self, op, place, expected, make=make)
        numbers.add(place.source_ino)
        return fd

    def refused(self: Publishing, directories: Any, op: Op, *args: Any, **more: Any) -> Identity:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(StagedContents, "open_place", opened)
    with monkeypatch.context() as patched:
        patched.setattr(Publishing, "publish", refused)
        async with draining(model) as drain:
            written = model.write(b"x", b"1")
            await until(lambda: drain.queue.refused > 20)
            size, file = model.journal.file.position, model.journal.file
            numbers.clear()
            await until(lambda: drain.queue.refused > 200)
            # The source may have given each staged file another number.
            assert file.position - size <= 256 * len(numbers)
            model.journal.shorten()
            records = file.path.read_bytes().splitlines()
            assert sum(b'"staged"' in record for record in records) == 1
            patched.undo()
            await until(lambda: drain.progress.has_all(written))
    model.check_all_is_there()
