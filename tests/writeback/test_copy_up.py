"""Files that get an object while processes read them at the source, since theirs was released."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.errors import Refused
from monarch.posix import failpoints
from monarch.tiers.source import SourceFile
from monarch.types import Ino
from monarch.writeback import copy_up
from monarch.writeback.op import Op
from monarch.writeback.source_entries import SourceEntries
from tests.writeback.remount_histories import how
from tests.writeback.remounts import ROOT, Rig, Session
from tests.writeback.rig import Killed, is_killed

# Long enough for any number of tries of the drain, by a clock that jumps, in seconds.
PATIENCE_S = 600

Change = Callable[[Session], Awaitable[object]]


async def truncate(session: Session) -> None:
    await session.front.attributes.change(session.ino(b"a"), size=2, by=ROOT)


CHANGES: dict[str, Change] = {
    "chmod": lambda session: session.chmod(b"a", 0o600),
    "utime": lambda session: session.utime(b"a", 1_000_000_000),
    "setxattr": lambda session: session.setxattr(b"a", b"user.note", b"1"),
    "truncate": truncate,
    "link": lambda session: session.link(b"a", b"b"),
    "rename": lambda session: session.rename(b"a", b"b"),
}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


async def released(session: Session) -> Ino:
    """A file ``a`` that is drained and whose object is released."""
    await session.write(b"a", b"old")
    await session.drained()
    ino = session.ino(b"a")
    node = session.names.node(ino)
    assert node is not None and session.front.drained.release_if_clean(node)
    return ino


async def closed(session: Session, number: int) -> None:
    """Wait until no descriptor is left, neither of an object nor of a file at the source."""
    await session.drained()
    while True:
        held = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                held.append(Path("/proc/self/fd", fd).readlink())
        objects = [path.name for path in held if session.rig.directory in path.parents]
        assert "journal" in objects
        there = [path for path in held if session.rig.source in path.parents]
        if not there and str(number) not in objects:
            return
        # Threads close them.
        await trio.sleep(1)


def recorded(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """The changes that are recorded from now on."""
    ops: list[Op] = []
    append = session.write_back.place.journal.append

    def noted(op: Op) -> int:
        ops.append(op)
        return append(op)

    monkeypatch.setattr(session.write_back.place.journal, "append", noted)
    return ops


@pytest.mark.promise(74)
@pytest.mark.parametrize("kind", CHANGES)
async def test_a_reader_at_the_source_reads_on_and_closes_a_file_that_is_changed_by_path(
    kind: str, rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            for _ in range(2):
                await session.open(b"a", os.O_RDONLY)
            ops = recorded(session, monkeypatch)
            await CHANGES[kind](session)
            (number,) = session.front.object_table.open
            expected = b"ol" if kind == "truncate" else b"old"
            assert await session.files.read(ino, 0, 10) == expected
            if kind != "truncate":
                # The source gets it, whatever time its readers take.
                assert [op.kind for op in ops].count("content") == 1
            session.files.release(ino)
            assert session.files.is_open(ino), "for the second reader"
            assert await session.files.read(ino, 0, 10) == expected
            session.files.release(ino)
            assert not session.front.opens.files and not session.front.object_table.open
            assert [op.kind for op in ops].count("content") == 1
            await closed(session, number)
            for name in {"link": ("a", "b"), "rename": ("b",)}.get(kind, ("a",)):
                assert (rig.source / name).read_bytes() == expected


@pytest.mark.promise(74)
async def test_after_such_a_change_the_file_can_be_written_and_its_reader_sees_that(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            await session.open(b"a", os.O_RDONLY)
            with pytest.raises(Refused) as raised:
                await session.open(b"a")
            assert raised.value.errno == errno.ETXTBSY
            await session.chmod(b"a", 0o600)
            await session.write(b"a", b"newer")
            assert await session.files.read(ino, 0, 10) == b"newer"
            session.files.release(ino)
            await session.drained()
            assert (rig.source / "a").read_bytes() == b"newer"


@pytest.mark.promise(74)
async def test_a_writer_waits_for_the_release_of_a_reader_that_has_closed_it(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            await session.open(b"a", os.O_RDONLY)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.write, b"a", b"newer")
                await trio.sleep(0.9)
                session.files.release(ino)
            await session.drained()
            assert (rig.source / "a").read_bytes() == b"newer"


@pytest.mark.promise(71, 74)
@pytest.mark.parametrize("kind", ["chmod", "truncate", "link"])
async def test_such_a_reader_reads_on_if_the_tier_has_no_room_for_the_object(
    kind: str, rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    async def full() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            await session.open(b"a", os.O_RDONLY)
            monkeypatch.setattr(session.front.objects.spares, "take", full)
            await CHANGES[kind](session)
            expected = b"ol" if kind == "truncate" else b"old"
            ((number, file),) = session.front.object_table.open.items()
            assert file.is_write_through and await session.files.read(ino, 0, 10) == expected
            session.files.release(ino)
            await closed(session, number)
            assert (rig.source / "a").read_bytes() == expected


@asynccontextmanager
async def opening(session: Session, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """While a process opens the file at the source; the open continues at the end of the block."""
    begun, may_open, open_there = trio.Event(), trio.Event(), session.front.source.open

    async def open_later(ino: Ino) -> SourceFile:
        begun.set()
        await may_open.wait()
        return await open_there(ino)

    with monkeypatch.context() as patched:
        patched.setattr(session.front.source, "open", open_later)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.open, b"a", os.O_RDONLY)
            await begun.wait()
            nursery.start_soon(truncate, session)
            # It has been copied by then.
            await trio.sleep(10)
            yield
            may_open.set()


@pytest.mark.promise(74)
async def test_a_file_that_is_being_opened_at_the_source_gets_its_object_afterwards(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            async with opening(session, monkeypatch):
                assert not session.front.object_table.open
            ((number, file),) = session.front.object_table.open.items()
            assert file.users == 1 and await session.files.read(ino, 0, 10) == b"ol"
            session.files.release(ino)
            assert not session.front.opens.files
            await closed(session, number)


@pytest.mark.promise(74, 79)
async def test_a_version_of_others_that_such_an_open_finds_is_not_replaced_by_an_older_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            async with opening(session, monkeypatch):
                (rig.source / "theirs").write_bytes(b"of others")
                (rig.source / "theirs").rename(rig.source / "a")
            assert await session.files.read(ino, 0, 10) == b"ol"
            session.files.release(ino)
            await session.drained()
            assert (rig.source / "a").read_bytes() == b"of others"


@pytest.mark.promise(5)
@pytest.mark.parametrize("how", ["unlink", "rename over", "remove directory"])
async def test_a_file_that_is_read_at_the_source_is_read_on_without_a_name(
    rig: Rig, clock: trio.testing.MockClock, how: str
) -> None:
    async with rig.mount() as session:
        ino = await released(session)
        await session.open(b"a", os.O_RDONLY)
        if how == "unlink":
            session.unlink(b"a")
        elif how == "rename over":
            await session.write(b"new", b"new")
            await session.rename(b"new", b"a")
        else:
            await session.mkdir(b"gone")
            await session.rename(b"a", b"gone/a")
            session.unlink(b"gone/a")
            session.rmdir(b"gone")
        assert await session.files.read(ino, 0, 10) == b"old"
        await session.drained()
        await trio.sleep(5)
        assert await session.files.read(ino, 0, 10) == b"old"
        session.files.release(ino)
        await session.end()


@pytest.mark.promise(62, 67)
async def test_a_name_beneath_a_directory_that_is_to_be_renamed_is_not_taken_for_one_of_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    may_rename, rename = threading.Event(), SourceEntries.rename

    def renamed(*arguments: Any, **more: Any) -> Any:
        assert may_rename.wait(60)
        return rename(*arguments, **more)

    async with rig.mount() as session:
        ino = await released(session)
        await session.mkdir(b"d")
        await session.link(b"a", b"d/b")
        await session.drained()
        node = session.names.node(ino)
        assert node is not None and session.front.drained.release_if_clean(node)
        monkeypatch.setattr(SourceEntries, "rename", renamed)
        await session.rename(b"d", b"e")
        (rig.source / "a").write_bytes(b"of others")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.front.source.look_again, ino)
            # The source has the name ``d/b`` still.
            await trio.sleep(5)
            may_rename.set()
        assert session.names.resolve(b"e/b") == session.names.resolve(b"a") == ino
        await session.drained()
    assert (rig.source / "e/b").read_bytes() == b"of others"


@pytest.mark.promise(62, 81)
@pytest.mark.parametrize("names", [1, 2])
async def test_a_file_in_a_directory_whose_rename_the_source_refuses_is_shown_and_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, names: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    async with rig.mount() as session:
        await session.mkdir(b"d")
        await session.write(b"d/a", b"old")
        await session.setxattr(b"d/a", b"user.note", b"1")
        if names > 1:
            await session.link(b"d/a", b"b")
        await session.drained()
        ino = session.ino(b"d/a")
        node = session.names.node(ino)
        assert node is not None and session.front.drained.release_if_clean(node)
        with monkeypatch.context() as patched:
            patched.setattr(SourceEntries, "rename", refused)
            await session.rename(b"d", b"e")
            await session.at_rest()
            await session.open(b"e/a", os.O_RDONLY)
            assert await session.files.read(ino, 0, 10) == b"old"
            session.files.release(ino)
            assert session.front.attributes.xattr(ino, b"user.note") == b"1"
            assert session.ino(b"e/a") == ino
            await session.chmod(b"e/a", 0o600)
            assert session.shown()[b"e/a"].content == b"old"
        await session.drained()
    assert (rig.source / "e/a").read_bytes() == b"old"
    assert (rig.source / "e/a").stat().st_mode & 0o777 == 0o600
    assert os.getxattr(rig.source / "e/a", "user.note") == b"1"


@pytest.mark.promise(62)
async def test_the_mode_of_an_open_file_that_has_replaced_another_comes_to_its_last_name(
    rig: Rig, clock: trio.testing.MockClock
) -> None:
    """Its older version is at the source until its newest bytes come."""
    for name in ("a", "c"):
        (rig.source / name).write_bytes(b"old")
        (rig.source / name).chmod(0o644)
    (rig.source / "b").hardlink_to(rig.source / "a")
    async with rig.mount() as session:
        ino = await session.open(b"a")
        await session.files.write(ino, 0, b"new")
        await session.rename(b"b", b"c")
        # The recorded bytes are left out: the object has others already.
        await session.files.write(ino, 0, b"newer")
        await session.at_rest()
        await session.write(b"d", b"another")
        await session.rename(b"d", b"c")
        await session.chmod(b"a", 0o751)
        await session.at_rest()
        session.files.release(ino)
        await session.drained()
    assert (rig.source / "a").read_bytes() == b"newer"
    assert (rig.source / "c").read_bytes() == b"another"
    assert (rig.source / "a").stat().st_mode & 0o7777 == 0o751


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that has room for new objects, and for a part of the bytes that are copied there."""
    copy = copy_up.copy_data

    def partly(source: int, to: int, size: int) -> int:
        if "-through.part" not in os.readlink(f"/proc/self/fd/{to}"):
            copy(source, to, size - 1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, to, size)

    monkeypatch.setattr(copy_up, "copy_data", partly)


@pytest.mark.promise(71, 74)
@pytest.mark.usefixtures("without_room")
async def test_a_reader_has_all_bytes_of_a_file_that_the_tier_has_room_for_in_part(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session:
            ino = await released(session)
            await session.open(b"a", os.O_RDONLY)
            seen = []
            run = session.front.objects.run

            async def read_meanwhile(function: Callable[..., Any], *args: Any) -> Any:
                if session.front.object_table.open and function is not os.pread:
                    seen.append(await session.files.read(ino, 0, 10))
                return await run(function, *args)

            monkeypatch.setattr(session.front.objects, "run", read_meanwhile)
            await session.chmod(b"a", 0o600)
            assert set(seen) == {b"old"}
            session.files.release(ino)
            await session.drained()
    assert (rig.source / "a").read_bytes() == b"old"


@pytest.mark.promise(71, 128)
@pytest.mark.parametrize("record", ["take", "through", "content"])
@pytest.mark.parametrize("has_object", [True, False])
@pytest.mark.parametrize("kind", ["same", "lost state", "refresh", "boot"])
async def test_a_file_whose_copy_up_had_no_room_is_whole_after_a_kill(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    record: str,
    has_object: bool,
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    (rig.source / "a").write_bytes(b"old")

    def killed(name: str) -> None:
        if name == "journal-appended" and ops[-1].kind == record:
            session.kill()
            raise Killed(name)

    async def full() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with trio.fail_after(PATIENCE_S):
        was_killed = False
        with monkeypatch.context() as patched:
            try:
                async with rig.mount(works=False) as session:
                    if has_object:
                        request.getfixturevalue("without_room")
                    else:
                        patched.setattr(session.front.objects.spares, "take", full)
                    ops = recorded(session, patched)
                    patched.setattr(failpoints, "failpoint", killed)
                    session.files.release(await session.open(b"a"))
            except BaseException as error:
                if not is_killed(error):
                    raise
                was_killed = True
        assert was_killed
        async with rig.mount(**how(kind, rig)) as session:
            assert session.shown()[b"a"].content == b"old"
            await session.drained()
            assert session.shown()[b"a"].content == b"old"
            await session.end()
    assert (rig.source / "a").read_bytes() == b"old"


@pytest.mark.promise(71)
@pytest.mark.parametrize("path", [b"a", b"new"])
async def test_a_process_that_opens_a_file_while_it_goes_to_the_source_loses_no_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock, path: bytes
) -> None:
    async def full() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (rig.source / "a").write_bytes(b"old")
    with trio.fail_after(PATIENCE_S):
        async with rig.mount() as session, trio.open_nursery() as nursery:
            has_come, run = False, session.front.objects.run

            async def append() -> None:
                ino = await session.open(path)
                end = session.names.attributes(ino).size
                await session.files.write(ino, end, b" and new")
                session.files.release(ino)

            async def append_meanwhile(function: Callable[..., Any], *args: Any) -> Any:
                nonlocal has_come
                if session.front.object_table.open and not has_come:
                    has_come = True
                    nursery.start_soon(append)
                    await trio.sleep(10)
                return await run(function, *args)

            monkeypatch.setattr(session.front.objects.spares, "take", full)
            monkeypatch.setattr(session.front.objects, "run", append_meanwhile)
            session.files.release(await session.open(path))
            assert has_come
            await session.drained()
    expected = b"old and new" if path == b"a" else b" and new"
    assert (rig.source / os.fsdecode(path)).read_bytes() == expected
