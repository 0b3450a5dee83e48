"""The user's decisions about refused changes: retry, set-aside and discard."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.errors import BusyError, UsageError
from monarch.posix.credentials import Credentials
from monarch.tiers.source import Source
from monarch.writeback.objects import TierCallError
from monarch.writeback.op import Op
from monarch.writeback.source_entries import SourceEntries
from monarch.writeback.source_writer import SourceWriter, Step
from tests.conftest import require_root
from tests.equipment.disks import in_memory
from tests.writeback.remounts import Rig, Session

ANOTHER = Credentials(1234, 1234)

pytestmark = pytest.mark.promise(147)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "d").mkdir()
    (rig.source / "kept").write_bytes(b"of the source")
    return rig


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(20_000):
        while not holds():
            await trio.sleep(1)


async def refused(session: Session, path: bytes = b"d/new") -> None:
    """A directory that cannot be made at the source, a file and a directory beneath it."""
    (session.rig.source / os.fsdecode(path)).write_bytes(b"theirs")
    await session.mkdir(path)
    await session.write(path + b"/file", b"beneath")
    await session.mkdir(path + b"/deep")
    await session.write(path + b"/deep/file", b"deep beneath")
    await session.at_rest()


def paths(session: Session) -> list[bytes]:
    return [refusal.path for refusal in session.write_back.refusals.list()]


async def test_a_change_set_aside_does_not_block_its_user_and_stays_aside_over_a_remount(
    rig: Rig,
) -> None:
    async with rig.mount() as session:
        await refused(session)
        await session.write(b"weights", b"1")
        await session.at_rest()
        assert not (rig.source / "weights").exists()
        await session.write_back.refusals.set_aside(b"d/new/file")
        await session.at_rest()
        assert (rig.source / "weights").read_bytes() == b"1"
        backlog = session.write_back.drain.backlog()
        assert [each.path for each in backlog.aside] == [b"d/new"]
        assert backlog.aside_ops > 1 and backlog.only_aside
    for _ in range(2):
        async with rig.mount() as session:
            await session.write(b"weights", b"1 and more")
            await session.at_rest()
            assert (rig.source / "weights").read_bytes() == b"1 and more"
            assert paths(session) == [b"d/new"]
            # Also when the journal was written anew.
            session.write_back.place.journal.shorten()
    (rig.source / "d/new").unlink()
    async with rig.mount() as session:
        await session.write_back.refusals.retry()
        await session.drained()
        assert (rig.source / "d/new/deep/file").read_bytes() == b"deep beneath"
        assert session.write_back.refusals.list() == []


async def test_a_retry_asks_the_source_at_once(
    rig: Rig, patient_clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        await refused(session)
        with trio.fail_after(3000):
            while session.write_back.refusals.list()[0].tries < 6:
                await trio.sleep(1)
        tries = session.write_back.refusals.list()[0].tries
        begun = trio.current_time()
        await session.write_back.refusals.retry()
        assert session.write_back.refusals.list()[0].tries == tries + 1
        (rig.source / "d/new").unlink()
        await session.write_back.refusals.retry()
        assert session.write_back.refusals.list() == [] and trio.current_time() - begun < 5


def _read_only(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        (OSError(errno.EROFS, ""), "the source accepts no changes now", "repair the source"),
        (OSError(errno.ENOSPC, ""), "the source is full: .*only removals", "free space"),
        (TierCallError(errno.EIO, ""), "the tier's disk fails", "disk of the tier"),
        (OSError(errno.EMFILE, ""), "the daemon lacks descriptors", "raise the limits"),
    ],
    ids=["read-only", "full", "tier", "daemon"],
)
async def test_a_failure_for_all_changes_is_not_called_a_refusal(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    error: OSError,
    what: str,
    remedy: str,
) -> None:
    def failing(*_: object) -> tuple[list[None], OSError]:
        return [], error

    async with rig.mount() as session:
        refusals = session.write_back.refusals
        assert refusals.stopped() == ""
        with monkeypatch.context() as patched:
            patched.setattr(SourceWriter, "carry_out", failing)
            patched.setattr(SourceWriter, "has_room", lambda *_: False)
            await session.write(b"weights", b"1")
            await until(lambda: session.write_back.drain.stopped is not None)
            name = errno.errorcode[error.errno or 0]
            for verb in (refusals.set_aside, refusals.discard):
                with pytest.raises(UsageError, match=f"^{what}.*'weights' alone.*{name}") as raised:
                    await verb(b"weights")
                assert remedy in (raised.value.hint or "")
            assert re.match(f"{what}.*'weights': .*{name}", refusals.stopped())
            # A retry ends as soon as the source was asked once more.
            failures = session.write_back.drain.backlog().failures
            await refusals.retry()
            assert session.write_back.drain.backlog().failures > failures
            assert refusals.list() == []
        await refusals.retry()
        await session.drained()
        assert session.write_back.drain.stopped is None


async def test_the_reason_shown_is_that_of_the_last_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    async with rig.mount() as session:
        drain = session.write_back.drain
        with monkeypatch.context() as patched:
            patched.setattr(SourceWriter, "carry_out", _read_only)
            await session.mkdir(b"d/new")
            await until(lambda: drain.stopped is not None)
            (rig.source / "d" / "new").write_bytes(b"theirs")
        await until(lambda: bool(session.write_back.refusals.list()))
        assert drain.stopped is None
        assert "EEXIST" in (drain.backlog().trouble or "")


@pytest.mark.promise(81)
async def test_a_read_only_file_system_below_the_source_holds_up_its_own_changes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    carry_out = SourceWriter.carry_out

    def beneath(writer: SourceWriter, steps: Sequence[Step]) -> object:
        if any(getattr(step, "keywords", {})["op"].path.startswith(b"d/") for step in steps):
            return [], OSError(errno.EROFS, os.strerror(errno.EROFS))
        return carry_out(writer, steps)

    monkeypatch.setattr(SourceWriter, "carry_out", beneath)
    monkeypatch.setattr(
        SourceWriter, "is_read_only_there", lambda writer, op: op.path.startswith(b"d/")
    )
    async with rig.mount() as session:
        await session.mkdir(b"d/new")
        await session.at_rest()
        assert paths(session) == [b"d/new"]
        await session.write_back.refusals.set_aside(b"d/new")
        await session.write(b"weights", b"1")
        await session.at_rest()
        assert (rig.source / "weights").read_bytes() == b"1"


def test_a_change_in_a_read_only_file_system_below_a_writable_root_is_recognised(
    tmp_path: Path,
) -> None:
    require_root()
    source = Source(os.fsencode(tmp_path))
    writer = SourceWriter(source, "0123456789abcdef")
    (tmp_path / "a").mkdir()
    op = Op(kind="rename", path=b"a", to=b"below/missing/b")
    with in_memory(tmp_path / "below", 1) as below:
        assert not writer.is_read_only_there(op)
        subprocess.run(["mount", "-o", "remount,ro", below], check=True)
        assert writer.is_read_only_there(op)
        assert not writer.is_read_only_there(Op(kind="mkdir", path=b"b"))
    source.close()


@pytest.mark.finding("W11")
async def test_a_discarded_change_is_gone_on_the_mount_and_changes_nothing_at_the_source(
    rig: Rig,
) -> None:
    async with rig.mount() as session:
        await refused(session)
        await session.write(b"weights", b"1")
        removed = await session.write_back.refusals.discard(b"d/new")
        assert set(removed) == {b"d/new", b"d/new/file", b"d/new/deep", b"d/new/deep/file"}
        await session.drained()
        shown = session.shown()
        assert b"d/new" not in shown and b"d/new/file" not in shown
        assert (rig.source / "d/new").read_bytes() == b"theirs"
        assert (rig.source / "weights").read_bytes() == b"1"
        assert (
            session.write_back.refusals.list() == [] and session.write_back.drain.backlog().ops == 0
        )
        assert session.write_back.drain.backlog().conflicts == 0
    for more in ({"freshness": "never"}, {}):
        async with rig.mount(**more) as session:
            await session.drained()
            assert b"d/new/file" not in session.shown()
    assert (rig.source / "d/new").read_bytes() == b"theirs"
    assert sorted(os.listdir(rig.source / "d")) == ["new"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_file_of_the_source_is_shown_as_it_is_there_when_its_change_is_given_up(
    rig: Rig,
) -> None:
    (rig.source / "kept").chmod(0o666)
    async with rig.mount(freshness="never") as session:
        ino = session.ino(b"kept")
        await session.writing.open(ino, os.O_WRONLY, ANOTHER)
        # By then that user may not write it any more.
        (rig.source / "kept").chmod(0o600)
        await session.files.write(ino, 0, b"written here!")
        session.front.recorder.record(session.names.copy_up(ino))
        await until(lambda: paths(session) == [b"kept"])
        with pytest.raises(BusyError, match="'kept' is open"):
            await session.write_back.refusals.discard(b"kept")
        session.files.release(ino)
        (rig.source / "kept").write_bytes(b"of others")
        assert await session.write_back.refusals.discard(b"kept") == []
        await session.drained()
        assert session.shown()[b"kept"].content == b"of others"
        assert session.shown()[b"kept"].safety == "source"
    async with rig.mount(freshness="never") as session:
        await session.drained()
        assert session.shown()[b"kept"].content == b"of others"
    assert (rig.source / "kept").read_bytes() == b"of others"


async def test_a_file_moved_elsewhere_is_not_discarded_with_the_directory_it_was_made_in(
    rig: Rig,
) -> None:
    async with rig.mount() as session:
        await refused(session)
        await session.rename(b"d/new/file", b"moved")
        await session.rename(b"kept", b"d/new/theirs")
        await session.at_rest()
        with pytest.raises(UsageError, match="'d/new/theirs' is at the source"):
            await session.write_back.refusals.discard(b"d/new")
        await session.rename(b"d/new/theirs", b"kept")
        await session.write_back.refusals.discard(b"d/new")
        await session.drained()
        assert (rig.source / "moved").read_bytes() == b"beneath"
        assert (rig.source / "kept").read_bytes() == b"of the source"
        assert session.shown()[b"moved"].content == b"beneath"
        with pytest.raises(UsageError, match="refuses nothing"):
            await session.write_back.refusals.discard(b"d/new")


@pytest.mark.parametrize("kept", [2, 8192])
async def test_a_directory_whose_rename_is_given_up_has_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    rig = Rig(tmp_path, monkeypatch, names_kept=kept)
    (rig.source / "d").mkdir()
    async with rig.mount() as session:
        await session.mkdir(b"box")
        await session.write(b"box/file", b"drained")
        await session.drained()
        with monkeypatch.context() as patched:
            patched.setattr(SourceEntries, "rename", refuse)
            await session.rename(b"box", b"d/moved")
            await session.write(b"d/moved/file", b"again")
            await session.write(b"d/moved/new", b"new")
            await session.at_rest()
            await session.mkdir(b"box")
            with pytest.raises(UsageError, match="cannot be 'box' again"):
                await session.write_back.refusals.discard(b"d/moved")
            session.rmdir(b"box")
            assert await session.write_back.refusals.discard(b"d/moved") == [b"d/moved/new"]
            assert b"d/moved" not in session.shown() and b"box" in session.shown()
        await session.drained()
        assert session.shown()[b"box/file"].content == b"drained"
        await session.write(b"box/later", b"later")
        await session.rename(b"box", b"d/moved")
        await session.drained()
        assert session.write_back.drain.backlog().conflicts == 0
    for more in ({"freshness": "never"}, {}):
        async with rig.mount(**more) as session:
            await session.drained()
            shown = {path: it.content for path, it in session.shown().items()}
            assert shown == {
                b"d": b"",
                b"d/moved": b"",
                b"d/moved/file": b"drained",
                b"d/moved/later": b"later",
            }
    assert (rig.source / "d/moved/later").read_bytes() == b"later"


@pytest.mark.finding("W11")
@pytest.mark.promise(146)
async def test_a_link_that_the_source_cannot_have_is_set_aside_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    async with rig.mount() as session:
        await session.symlink(b"latest", b"kept")
        await session.write(b"weights", b"1")
        await session.at_rest()
        assert (rig.source / "weights").read_bytes() == b"1"
        assert [(each.path, each.is_aside) for each in session.write_back.refusals.list()] == [
            (b"latest", True)
        ]
        assert await session.write_back.refusals.discard(b"latest") == [b"latest"]
        await session.drained()


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_file_of_others_under_the_name_of_what_is_given_up_is_no_conflict(
    rig: Rig,
) -> None:
    async with rig.mount() as session:
        made = await session.writing.create(*session.at(b"d/f"), mode=0o644, by=ANOTHER)
        await session.files.write(made.ino, 0, b"not theirs")
        session.files.release(made.ino)
        await until(lambda: paths(session) == [b"d/f"])
        (rig.source / "d/f").write_bytes(b"theirs")
        assert await session.write_back.refusals.discard(b"d/f") == [b"d/f"]
        await session.drained()
        assert session.write_back.drain.backlog().conflicts == 0
    assert (rig.source / "d/f").read_bytes() == b"theirs"


async def test_a_file_with_another_name_elsewhere_is_given_up_at_the_path_alone(
    rig: Rig,
) -> None:
    async with rig.mount() as session:
        await refused(session)
        await session.link(b"d/new/file", b"linked")
        await session.link(b"d/new/deep/file", b"d/new/again")
        await session.at_rest()
        assert not (rig.source / "linked").exists()
        removed = await session.write_back.refusals.discard(b"d/new")
        assert set(removed) == {
            *(b"d/new", b"d/new/file", b"d/new/again", b"d/new/deep", b"d/new/deep/file"),
        }
        await session.drained()
        assert (
            session.write_back.refusals.list() == []
            and session.write_back.drain.backlog().conflicts == 0
        )
        assert session.shown()[b"linked"].content == b"beneath"
        assert (rig.source / "linked").read_bytes() == b"beneath"
    for more in ({"freshness": "never"}, {}):
        async with rig.mount(**more) as session:
            await session.drained()
            assert session.shown()[b"linked"].content == b"beneath"
            assert b"d/new/file" not in session.shown()
    assert (rig.source / "d/new").read_bytes() == b"theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
@pytest.mark.parametrize("theirs", [b"", b"theirs"])
async def test_a_file_that_cannot_be_made_is_given_up_where_that_is_and_comes_under_its_other_name(
    rig: Rig, theirs: bytes
) -> None:
    (rig.source / "ok").mkdir()
    (rig.source / "ok").chmod(0o777)
    async with rig.mount() as session:
        made = await session.writing.create(*session.at(b"d/f"), mode=0o644, by=ANOTHER)
        await session.files.write(made.ino, 0, b"bytes")
        session.files.release(made.ino)
        await session.writing.link(made.ino, *session.at(b"ok/link"), by=ANOTHER)
        await until(lambda: paths(session) == [b"d/f"])
        if theirs:
            (rig.source / "d/f").write_bytes(theirs)
        assert await session.write_back.refusals.discard(b"d") == [b"d/f"]
        await session.drained()
        assert (
            session.write_back.refusals.list() == []
            and session.write_back.drain.backlog().conflicts == 0
        )
        assert b"d/f" not in session.shown() or theirs
        assert (rig.source / "ok/link").read_bytes() == b"bytes"
    assert os.listdir(rig.source / "d") == (["f"] if theirs else [])


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_name_that_was_removed_since_is_given_up_as_well(rig: Rig) -> None:
    (rig.source / "kept").chmod(0o666)
    async with rig.mount() as session:
        await session.writing.link(session.ino(b"kept"), *session.at(b"d/link"), by=ANOTHER)
        await session.writing.link(session.ino(b"kept"), *session.at(b"d/other"), by=ANOTHER)
        await until(lambda: b"d/link" in paths(session))
        session.unlink(b"d/link")
        assert await session.write_back.refusals.discard(b"d") == [b"d/other"]
        await session.drained()
        assert session.write_back.refusals.list() == [] and os.listdir(rig.source / "d") == []
        assert session.shown()[b"kept"].content == b"of the source"


@pytest.mark.skipif(os.geteuid() != 0, reason="the source must refuse what another user does")
async def test_a_link_elsewhere_comes_though_the_content_of_its_file_is_given_up(
    rig: Rig,
) -> None:
    (rig.source / "kept").chmod(0o666)
    async with rig.mount(freshness="never") as session:
        ino = session.ino(b"kept")
        await session.writing.open(ino, os.O_WRONLY, ANOTHER)
        (rig.source / "kept").chmod(0o600)
        await session.files.write(ino, 0, b"written here!")
        session.files.release(ino)
        await until(lambda: paths(session) == [b"kept"])
        await session.link(b"kept", b"once")
        await session.link(b"once", b"linked")
        session.unlink(b"once")
        assert await session.write_back.refusals.discard(b"kept") == []
        await session.drained()
        assert session.shown()[b"kept"].content == b"of the source"
        assert session.shown()[b"linked"].content == b"of the source"
        assert (rig.source / "linked").samefile(rig.source / "kept")
        assert not (rig.source / "once").exists()
        assert session.write_back.drain.backlog().conflicts == 0
    async with rig.mount(freshness="never") as session:
        await session.drained()
        assert session.shown()[b"linked"].content == b"of the source"


@pytest.mark.parametrize("what", ["file", "link"])
async def test_changes_beneath_a_directory_that_others_have_replaced_are_given_up(
    rig: Rig, what: str
) -> None:
    (rig.source / "d/deep").mkdir()
    (rig.source / "d/deep/old").write_bytes(b"old")
    async with rig.mount() as session:
        ino = await session.open(b"d/deep/new")
        assert session.names.resolve(b"d/deep/old") is not None
        (rig.source / "d").rename(rig.source / "moved")
        if what == "file":
            (rig.source / "d").write_bytes(b"theirs")
        else:
            (rig.source / "d").symlink_to("moved")
        await session.files.write(ino, 0, b"new")
        session.files.release(ino)
        await session.at_rest()
        assert paths(session) == [b"d/deep/new"]
        with trio.fail_after(600):
            assert await session.write_back.refusals.discard(b"d") == [b"d/deep/new"]
            # The source does not have this name any more.
            session.unlink(b"d/deep/old")
            await session.drained()
    assert (rig.source / "moved/deep/old").read_bytes() == b"old"
