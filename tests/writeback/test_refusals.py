"""What a person decides about changes that the source refuses: retry, set-aside and discard."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.credentials import Credentials
from monarch.errors import BusyError, UsageError
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
    return [refusal.path for refusal in life.side.refusals.list()]


async def test_what_is_set_aside_lets_its_user_go_on_and_stays_aside_over_a_remount(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.write(b"weights", b"1")
        await life.at_rest()
        assert not (ground.source / "weights").exists()
        await life.side.refusals.set_aside(b"d/new/file")
        await life.at_rest()
        assert (ground.source / "weights").read_bytes() == b"1"
        backlog = life.side.drain.backlog()
        assert [each.path for each in backlog.aside] == [b"d/new"]
        assert backlog.aside_ops > 1 and backlog.only_aside
    for _ in range(2):
        async with ground.mount() as life:
            await life.write(b"weights", b"1 and more")
            await life.at_rest()
            assert (ground.source / "weights").read_bytes() == b"1 and more"
            assert paths(life) == [b"d/new"]
            # Also when the journal was written anew.
            life.side.place.journal.shorten()
    (ground.source / "d/new").unlink()
    async with ground.mount() as life:
        await life.side.refusals.retry(None)
        await life.drained()
        assert (ground.source / "d/new/deep/file").read_bytes() == b"deep beneath"
        assert life.side.refusals.list() == []


async def test_a_retry_asks_the_source_at_once(
    ground: Ground, clock: trio.testing.MockClock
) -> None:
    async with ground.mount() as life:
        await refused(life)
        with trio.fail_after(3000):
            while life.side.refusals.list()[0].tries < 6:
                await trio.sleep(1)
        tries = life.side.refusals.list()[0].tries
        begun = trio.current_time()
        await life.side.refusals.retry(b"d/new")
        assert life.side.refusals.list()[0].tries == tries + 1
        (ground.source / "d/new").unlink()
        await life.side.refusals.retry(None)
        assert life.side.refusals.list() == [] and trio.current_time() - begun < 5
        with pytest.raises(UsageError, match="refuses nothing at 'd/new'"):
            await life.side.refusals.retry(b"d/new")


async def test_what_is_given_up_is_gone_on_the_mount_and_changes_nothing_at_the_source(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.write(b"weights", b"1")
        removed = await life.side.refusals.discard(b"d/new")
        assert set(removed) == {b"d/new", b"d/new/file", b"d/new/deep", b"d/new/deep/file"}
        await life.drained()
        shown = life.shown()
        assert b"d/new" not in shown and b"d/new/file" not in shown
        assert (ground.source / "d/new").read_bytes() == b"theirs"
        assert (ground.source / "weights").read_bytes() == b"1"
        assert life.side.refusals.list() == [] and life.side.drain.backlog().ops == 0
        assert life.side.drain.backlog().conflicts == 0
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
        life.files.record(life.names.take(ino))
        await until(lambda: paths(life) == [b"kept"])
        with pytest.raises(BusyError, match="'kept' is open"):
            await life.side.refusals.discard(b"kept")
        life.files.release(ino)
        (ground.source / "kept").write_bytes(b"of others")
        assert await life.side.refusals.discard(b"kept") == []
        await life.drained()
        assert life.shown()[b"kept"].content == b"of others"
        assert life.shown()[b"kept"].safety == "source"
    async with ground.mount(freshness="never") as life:
        await life.drained()
        assert life.shown()[b"kept"].content == b"of others"
    assert (ground.source / "kept").read_bytes() == b"of others"


async def test_what_was_moved_elsewhere_is_not_given_up_with_where_it_was_made(
    ground: Ground,
) -> None:
    async with ground.mount() as life:
        await refused(life)
        await life.rename(b"d/new/file", b"moved")
        await life.rename(b"kept", b"d/new/theirs")
        await life.at_rest()
        with pytest.raises(UsageError, match="'d/new/theirs' is at the source"):
            await life.side.refusals.discard(b"d/new")
        await life.rename(b"d/new/theirs", b"kept")
        await life.side.refusals.discard(b"d/new")
        await life.drained()
        assert (ground.source / "moved").read_bytes() == b"beneath"
        assert (ground.source / "kept").read_bytes() == b"of the source"
        assert life.shown()[b"moved"].content == b"beneath"
        with pytest.raises(UsageError, match="refuses nothing"):
            await life.side.refusals.discard(b"d/new")


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
        assert [(each.path, each.is_aside) for each in life.side.refusals.list()] == [
            (b"latest", True)
        ]
        assert await life.side.refusals.discard(b"latest") == [b"latest"]
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
        assert await life.side.refusals.discard(b"d/f") == [b"d/f"]
        await life.drained()
        assert life.side.drain.backlog().conflicts == 0
    assert (ground.source / "d/f").read_bytes() == b"theirs"
