"""The user's decisions about refused changes: retry, set-aside and discard."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.errors import BusyError, UsageError
from monarch.posix.credentials import Credentials
from monarch.writeback.source_entries import SourceEntries
from tests.writeback.remounts import Ground, Life

ANOTHER = Credentials(1234, 1234)

pytestmark = pytest.mark.promise(147)


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    ground = Ground(tmp_path, monkeypatch)
    (ground.source / "d").mkdir()
    (ground.source / "kept").write_bytes(b"of the source")
    return ground


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(20_000):
        while not holds():
            await trio.sleep(1)


async def refused(life: Life, path: bytes = b"d/new") -> None:
    """A directory that cannot be made at the source, a file and a directory beneath it."""
    (life.ground.source / os.fsdecode(path)).write_bytes(b"theirs")
    await life.mkdir(path)
    await life.write(path + b"/file", b"beneath")
    await life.mkdir(path + b"/deep")
    await life.write(path + b"/deep/file", b"deep beneath")
    await life.at_rest()


def paths(life: Life) -> list[bytes]:
    return [refusal.path for refusal in life.write_back.refusals.list()]


async def test_a_change_set_aside_does_not_block_its_user_and_stays_aside_over_a_remount(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.write(b"weights", b"1")
        await life.at_rest()
        assert not (ground.source / "weights").exists()
        await life.write_back.refusals.set_aside(b"d/new/file")
        await life.at_rest()
        assert (ground.source / "weights").read_bytes() == b"1"
        backlog = life.write_back.drain.backlog()
        assert [each.path for each in backlog.aside] == [b"d/new"]
        assert backlog.aside_ops > 1 and backlog.only_aside
    for _ in range(2):
        async with ground.mount() as life:
            await life.write(b"weights", b"1 and more")
            await life.at_rest()
            assert (ground.source / "weights").read_bytes() == b"1 and more"
            assert paths(life) == [b"d/new"]
            # Also when the journal was written anew.
            life.write_back.place.journal.shorten()
    (ground.source / "d/new").unlink()
    async with ground.mount() as life:
        await life.write_back.refusals.retry(None)
        await life.drained()
        assert (ground.source / "d/new/deep/file").read_bytes() == b"deep beneath"
        assert life.write_back.refusals.list() == []


async def test_a_retry_asks_the_source_at_once(
    ground: Ground, clock: trio.testing.MockClock
) -> None:
    async with ground.mount() as life:
        await refused(life)
        with trio.fail_after(3000):
            while life.write_back.refusals.list()[0].tries < 6:
                await trio.sleep(1)
        tries = life.write_back.refusals.list()[0].tries
        begun = trio.current_time()
        await life.write_back.refusals.retry(b"d/new")
        assert life.write_back.refusals.list()[0].tries == tries + 1
        (ground.source / "d/new").unlink()
        await life.write_back.refusals.retry(None)
        assert life.write_back.refusals.list() == [] and trio.current_time() - begun < 5
        with pytest.raises(UsageError, match="refuses nothing at 'd/new'"):
            await life.write_back.refusals.retry(b"d/new")


@pytest.mark.finding("W11")
async def test_a_discarded_change_is_gone_on_the_mount_and_changes_nothing_at_the_source(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.write(b"weights", b"1")
        removed = await life.write_back.refusals.discard(b"d/new")
        assert set(removed) == {b"d/new", b"d/new/file", b"d/new/deep", b"d/new/deep/file"}
        await life.drained()
        shown = life.shown()
        assert b"d/new" not in shown and b"d/new/file" not in shown
        assert (ground.source / "d/new").read_bytes() == b"theirs"
        assert (ground.source / "weights").read_bytes() == b"1"
        assert life.write_back.refusals.list() == [] and life.write_back.drain.backlog().ops == 0
        assert life.write_back.drain.backlog().conflicts == 0
    for more in ({"freshness": "never"}, {}):
        async with ground.mount(**more) as life:
            await life.drained()
            assert b"d/new/file" not in life.shown()
    assert (ground.source / "d/new").read_bytes() == b"theirs"
    assert sorted(os.listdir(ground.source / "d")) == ["new"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_file_of_the_source_is_shown_as_it_is_there_when_its_change_is_given_up(
    ground: Ground,
) -> None:
    (ground.source / "kept").chmod(0o666)
    async with ground.mount(freshness="never") as life:
        ino = life.ino(b"kept")
        await life.writing.open(ino, os.O_WRONLY, ANOTHER)
        # By then that user may not write it any more.
        (ground.source / "kept").chmod(0o600)
        await life.files.write(ino, 0, b"written here!")
        life.front.recorder.record(life.names.copy_up(ino))
        await until(lambda: paths(life) == [b"kept"])
        with pytest.raises(BusyError, match="'kept' is open"):
            await life.write_back.refusals.discard(b"kept")
        life.files.release(ino)
        (ground.source / "kept").write_bytes(b"of others")
        assert await life.write_back.refusals.discard(b"kept") == []
        await life.drained()
        assert life.shown()[b"kept"].content == b"of others"
        assert life.shown()[b"kept"].safety == "source"
    async with ground.mount(freshness="never") as life:
        await life.drained()
        assert life.shown()[b"kept"].content == b"of others"
    assert (ground.source / "kept").read_bytes() == b"of others"


async def test_a_file_moved_elsewhere_is_not_discarded_with_the_directory_it_was_made_in(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.rename(b"d/new/file", b"moved")
        await life.rename(b"kept", b"d/new/theirs")
        await life.at_rest()
        with pytest.raises(UsageError, match="'d/new/theirs' is at the source"):
            await life.write_back.refusals.discard(b"d/new")
        await life.rename(b"d/new/theirs", b"kept")
        await life.write_back.refusals.discard(b"d/new")
        await life.drained()
        assert (ground.source / "moved").read_bytes() == b"beneath"
        assert (ground.source / "kept").read_bytes() == b"of the source"
        assert life.shown()[b"moved"].content == b"beneath"
        with pytest.raises(UsageError, match="refuses nothing"):
            await life.write_back.refusals.discard(b"d/new")


@pytest.mark.parametrize("kept", [2, 8192])
async def test_a_directory_whose_rename_is_given_up_has_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    ground = Ground(tmp_path, monkeypatch, names_kept=kept)
    (ground.source / "d").mkdir()
    async with ground.mount() as life:
        await life.mkdir(b"box")
        await life.write(b"box/file", b"drained")
        await life.drained()
        with monkeypatch.context() as patched:
            patched.setattr(SourceEntries, "rename", refuse)
            await life.rename(b"box", b"d/moved")
            await life.write(b"d/moved/file", b"again")
            await life.write(b"d/moved/new", b"new")
            await life.at_rest()
            await life.mkdir(b"box")
            with pytest.raises(UsageError, match="cannot be 'box' again"):
                await life.write_back.refusals.discard(b"d/moved")
            life.rmdir(b"box")
            assert await life.write_back.refusals.discard(b"d/moved") == [b"d/moved/new"]
            assert b"d/moved" not in life.shown() and b"box" in life.shown()
        await life.drained()
        assert life.shown()[b"box/file"].content == b"drained"
        await life.write(b"box/later", b"later")
        await life.rename(b"box", b"d/moved")
        await life.drained()
        assert life.write_back.drain.backlog().conflicts == 0
    for more in ({"freshness": "never"}, {}):
        async with ground.mount(**more) as life:
            await life.drained()
            shown = {path: it.content for path, it in life.shown().items()}
            assert shown == {
                b"d": b"",
                b"d/moved": b"",
                b"d/moved/file": b"drained",
                b"d/moved/later": b"later",
            }
    assert (ground.source / "d/moved/later").read_bytes() == b"later"


@pytest.mark.finding("W11")
@pytest.mark.promise(146)
async def test_a_link_that_the_source_cannot_have_is_set_aside_at_once(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    async with ground.mount() as life:
        await life.symlink(b"latest", b"kept")
        await life.write(b"weights", b"1")
        await life.at_rest()
        assert (ground.source / "weights").read_bytes() == b"1"
        assert [(each.path, each.is_aside) for each in life.write_back.refusals.list()] == [
            (b"latest", True)
        ]
        assert await life.write_back.refusals.discard(b"latest") == [b"latest"]
        await life.drained()


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_file_of_others_under_the_name_of_what_is_given_up_is_no_conflict(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        made = await life.writing.create(*life.at(b"d/f"), mode=0o644, by=ANOTHER)
        await life.files.write(made.ino, 0, b"not theirs")
        life.files.release(made.ino)
        await until(lambda: paths(life) == [b"d/f"])
        (ground.source / "d/f").write_bytes(b"theirs")
        assert await life.write_back.refusals.discard(b"d/f") == [b"d/f"]
        await life.drained()
        assert life.write_back.drain.backlog().conflicts == 0
    assert (ground.source / "d/f").read_bytes() == b"theirs"


async def test_a_file_with_another_name_elsewhere_is_given_up_at_the_path_alone(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.link(b"d/new/file", b"linked")
        await life.link(b"d/new/deep/file", b"d/new/again")
        await life.at_rest()
        assert not (ground.source / "linked").exists()
        removed = await life.write_back.refusals.discard(b"d/new")
        assert set(removed) == {
            *(b"d/new", b"d/new/file", b"d/new/again", b"d/new/deep", b"d/new/deep/file"),
        }
        await life.drained()
        assert (
            life.write_back.refusals.list() == [] and life.write_back.drain.backlog().conflicts == 0
        )
        assert life.shown()[b"linked"].content == b"beneath"
        assert (ground.source / "linked").read_bytes() == b"beneath"
    for more in ({"freshness": "never"}, {}):
        async with ground.mount(**more) as life:
            await life.drained()
            assert life.shown()[b"linked"].content == b"beneath"
            assert b"d/new/file" not in life.shown()
    assert (ground.source / "d/new").read_bytes() == b"theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
@pytest.mark.parametrize("theirs", [b"", b"theirs"])
async def test_a_file_that_cannot_be_made_is_given_up_where_that_is_and_comes_under_its_other_name(
    ground: Ground, theirs: bytes
) -> None:
    (ground.source / "ok").mkdir()
    (ground.source / "ok").chmod(0o777)
    async with ground.mount() as life:
        made = await life.writing.create(*life.at(b"d/f"), mode=0o644, by=ANOTHER)
        await life.files.write(made.ino, 0, b"bytes")
        life.files.release(made.ino)
        await life.writing.link(made.ino, *life.at(b"ok/link"), by=ANOTHER)
        await until(lambda: paths(life) == [b"d/f"])
        if theirs:
            (ground.source / "d/f").write_bytes(theirs)
        assert await life.write_back.refusals.discard(b"d") == [b"d/f"]
        await life.drained()
        assert (
            life.write_back.refusals.list() == [] and life.write_back.drain.backlog().conflicts == 0
        )
        assert b"d/f" not in life.shown() or theirs
        assert (ground.source / "ok/link").read_bytes() == b"bytes"
    assert os.listdir(ground.source / "d") == (["f"] if theirs else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_name_that_was_removed_since_is_given_up_as_well(ground: Ground) -> None:
    (ground.source / "kept").chmod(0o666)
    async with ground.mount() as life:
        await life.writing.link(life.ino(b"kept"), *life.at(b"d/link"), by=ANOTHER)
        await life.writing.link(life.ino(b"kept"), *life.at(b"d/other"), by=ANOTHER)
        await until(lambda: b"d/link" in paths(life))
        life.unlink(b"d/link")
        assert await life.write_back.refusals.discard(b"d") == [b"d/other"]
        await life.drained()
        assert life.write_back.refusals.list() == [] and os.listdir(ground.source / "d") == []
        assert life.shown()[b"kept"].content == b"of the source"


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_link_elsewhere_comes_though_the_content_of_its_file_is_given_up(
    ground: Ground,
) -> None:
    (ground.source / "kept").chmod(0o666)
    async with ground.mount(freshness="never") as life:
        ino = life.ino(b"kept")
        await life.writing.open(ino, os.O_WRONLY, ANOTHER)
        (ground.source / "kept").chmod(0o600)
        await life.files.write(ino, 0, b"written here!")
        life.files.release(ino)
        await until(lambda: paths(life) == [b"kept"])
        await life.link(b"kept", b"once")
        await life.link(b"once", b"linked")
        life.unlink(b"once")
        assert await life.write_back.refusals.discard(b"kept") == []
        await life.drained()
        assert life.shown()[b"kept"].content == b"of the source"
        assert life.shown()[b"linked"].content == b"of the source"
        assert (ground.source / "linked").samefile(ground.source / "kept")
        assert not (ground.source / "once").exists()
        assert life.write_back.drain.backlog().conflicts == 0
    async with ground.mount(freshness="never") as life:
        await life.drained()
        assert life.shown()[b"linked"].content == b"of the source"
