"""Comparisons of a file with the source while the drain changes the attributes of the file."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import trio

from monarch.errors import SourceError
from monarch.types import Ino
from monarch.writeback.source_entries import SourceEntries
from tests.writeback.remounts import Rig, Session

pytestmark = pytest.mark.promise(172)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"of the source")
    (rig.source / "a").chmod(0o644)
    return rig


async def drain(session: Session) -> None:
    """Has the drain of a mount without one make all changes that wait."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.write_back.drain.run)
        await session.drained()
        nursery.cancel_scope.cancel()


def overtake(session: Session, call: str, by: Callable[[], Awaitable[None]], number: int) -> None:
    """Has ``by`` run between the answer of the source and its receipt, for one call."""
    answer, calls = getattr(session.source_calls, call), 0

    async def overtaken(*arguments: Any) -> Any:
        nonlocal calls
        found = await answer(*arguments)
        calls += 1
        if calls == number:
            await by()
        return found

    session.rig.monkeypatch.setattr(session.source_calls, call, overtaken)


def mode(session: Session) -> int:
    return stat.S_IMODE(session.names.attributes(session.ino(b"a")).mode)


async def look_twice(session: Session) -> None:
    """The second look finds what the first one has wrongly recorded."""
    for _ in range(2):
        await session.revalidation.look_again(session.ino(b"a"))


# A file with two names is compared under both, and then as a whole.
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
async def test_a_look_that_the_drain_overtakes_shows_no_older_mode_of_a_file_that_lost_a_name(
    rig: Rig, moment: str, number: int
) -> None:
    """The drain keeps the known time of change of a file from which it has removed a name: the
    record of a later change then has the same identity as before."""
    for name in ("b", "c"):
        (rig.source / name).hardlink_to(rig.source / "a")
    async with rig.mount(works=False) as session:
        session.unlink(b"c")
        await drain(session)

        async def change() -> None:
            await session.chmod(b"a", 0o600)

        async def overtaking() -> None:
            if moment == "meanwhile":
                await change()
            await drain(session)

        if moment == "before":
            await change()
        overtake(session, "status", overtaking, number)
        await look_twice(session)
        assert stat.S_IMODE((rig.source / "a").stat().st_mode) == mode(session) == 0o600
        assert session.revalidation._metrics.changes == 0


async def test_an_attribute_drained_while_lists_are_read_is_no_change_by_others(rig: Rig) -> None:
    (rig.source / "b").hardlink_to(rig.source / "a")
    async with rig.mount(works=False) as session:
        session.unlink(b"b")
        await drain(session)

        async def overtaking() -> None:
            await session.setxattr(b"a", b"user.note", b"1")
            await drain(session)

        overtake(session, "acls", overtaking, 1)
        await look_twice(session)
        assert os.getxattr(rig.source / "a", "user.note") == b"1"
        assert session.revalidation._metrics.changes == 0


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "made"])
async def test_a_first_change_during_a_look_is_no_change_by_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """Also if the source is read between the change there and its record."""
    make, is_made, may_record = SourceEntries.change_attributes, Event(), Event()

    def made(*arguments: Any, **more: Any) -> Any:
        identity = make(*arguments, **more)
        is_made.set()
        assert may_record.wait(60)
        return identity

    async with rig.mount(works=False) as session:
        status, was_changed = session.source_calls.status, False

        async def late(*arguments: Any) -> Any:
            """The answer of a source that has the change."""
            nonlocal was_changed
            if was_changed:
                return await status(*arguments)
            was_changed = True
            await session.chmod(b"a", 0o600)
            nursery.start_soon(session.write_back.drain.run)
            if is_recorded:
                may_record.set()
                await session.drained()
            await trio.to_thread.run_sync(is_made.wait, 60)
            found = await status(*arguments)
            may_record.set()
            return found

        monkeypatch.setattr(SourceEntries, "change_attributes", made)
        monkeypatch.setattr(session.source_calls, "status", late)
        async with trio.open_nursery() as nursery:
            await look_twice(session)
            await session.drained()
            nursery.cancel_scope.cancel()
        assert stat.S_IMODE((rig.source / "a").stat().st_mode) == mode(session) == 0o600
        assert session.revalidation._metrics.changes == 0


async def released(session: Session, path: bytes) -> None:
    """Has the source all of a written file, which is read from there from now on."""
    await drain(session)
    node = session.names.node(session.ino(path))
    assert node is not None and session.front.drained.release_if_clean(node)
    await session.rig.come_to_rest()


async def test_a_written_file_that_is_changed_while_its_lists_are_read_shows_that_change(
    rig: Rig,
) -> None:
    async with rig.mount(works=False) as session:
        await session.write(b"w", b"written here")
        await released(session, b"w")
        ino = session.ino(b"w")

        async def overtaking() -> None:
            await session.chmod(b"w", 0o600)
            await released(session, b"w")

        overtake(session, "acls", overtaking, 1)
        await session.revalidation.look_again(ino)
        assert stat.S_IMODE(session.names.attributes(ino).mode) == 0o600
        # It is no change by others, for which a reader would have to look its name up again.
        await session.revalidation.look_again(ino)
        assert session.revalidation._metrics.changes == 0


async def test_a_file_that_is_written_before_others_remove_it_keeps_its_name(rig: Rig) -> None:
    """A look that has begun before both must not hide the bytes that were written."""
    async with rig.mount(works=False) as session:
        await session.write(b"w", b"first")
        await released(session, b"w")
        ask = session.source_calls.status
        begun: list[None] = []

        async def asked(*arguments: Any) -> Any:
            if not begun:
                begun.append(None)
                await session.write(b"w", b"second", synced=True)
                (rig.source / "w").unlink()
            return await ask(*arguments)

        rig.monkeypatch.setattr(session.source_calls, "status", asked)
        await session.revalidation.look_again(session.ino(b"w"))
        assert begun and session.shown()[b"w"].content == b"second"


async def append(session: Session) -> None:
    ino = await session.open(b"b")
    await session.files.write(ino, len(b"written"), b" and more")
    session.files.release(ino)


CHANGES: dict[str, Callable[[Session], Awaitable[object]]] = {
    "append": append,
    "write": lambda session: session.write(b"b", b"newer"),
    "rename": lambda session: session.rename(b"b", b"c"),
    "link": lambda session: session.link(b"b", b"c"),
    "utime": lambda session: session.utime(b"b", 10**18),
    "setxattr": lambda session: session.setxattr(b"b", b"user.n", b"1"),
}


def close_there(rig: Rig, name: str) -> None:
    """Others close a file to all but its owner, which its time of change tells."""
    before = (rig.source / name).stat().st_ctime_ns
    while (rig.source / name).stat().st_ctime_ns == before:
        (rig.source / name).chmod(0o600)


async def require_noticed(session: Session, ino: Ino) -> None:
    """An open at the source finds that the mode of a file was changed there."""
    node = session.names.node(ino)
    assert node is not None and session.front.drained.release_if_clean(node)
    assert stat.S_IMODE(node.mode) == 0o644
    with pytest.raises(SourceError, match="access changed"):
        (await session.front.source.open(ino)).release()
    assert stat.S_IMODE(node.mode) == 0o600
    (await session.front.source.open(ino)).release()


@pytest.mark.promise(156)
@pytest.mark.parametrize("change", CHANGES)
async def test_a_mode_that_others_set_before_the_last_change_of_a_written_file_is_noticed(
    rig: Rig, change: str
) -> None:
    """Else an open would find the version that the drain has left, and not look."""
    async with rig.mount(works=False) as session:
        await session.write(b"b", b"written")
        await drain(session)
        close_there(rig, "b")
        ino = session.ino(b"b")
        await CHANGES[change](session)
        await drain(session)
        await require_noticed(session, ino)


@pytest.mark.promise(156)
async def test_a_mode_that_others_have_given_a_linked_file_is_noticed(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        await session.link(b"a", b"c")
        close_there(rig, "a")
        await drain(session)
        await require_noticed(session, session.ino(b"c"))
