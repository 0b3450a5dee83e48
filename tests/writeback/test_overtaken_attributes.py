"""Changes of attributes while the object of the file leaves the tier: the source has its bytes from
then on, and not yet the change."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock as Clock

from monarch.errors import SourceError
from monarch.types import Ino, attributes_of
from monarch.writeback.recorder import Recorder
from tests.writeback.remounts import ROOT, Rig, Session

pytestmark = pytest.mark.promise(62)

MTIME_NS = 1_234_567_890 * 10**9


async def chown(session: Session) -> None:
    await session.front.attributes.change(session.ino(b"a"), uid=12, gid=34, by=ROOT)


async def chmod_and_utime(session: Session) -> None:
    ino = session.ino(b"a")
    await session.front.attributes.change(ino, mode=0o640, mtime_ns=MTIME_NS, by=ROOT)


CHANGES: dict[str, Callable[[Session], Awaitable[object]]] = {
    "chmod": lambda session: session.chmod(b"a", 0o640),
    "chown": chown,
    "utime": lambda session: session.utime(b"a", MTIME_NS),
    "chmod and utime": chmod_and_utime,
    "setxattr": lambda session: session.setxattr(b"a", b"user.note", b"1"),
}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


async def drain(session: Session) -> None:
    """The drain works until the source has all."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.write_back.drain.run)
        await session.drained()
        nursery.cancel_scope.cancel()


def shown(session: Session) -> tuple[int, int, int, int]:
    now = session.front.attributes.of(session.ino(b"a"))
    return stat.S_IMODE(now.mode), now.uid, now.gid, now.mtime_ns


def note(session: Session) -> bytes | None:
    return session.front.attributes.xattr(session.ino(b"a"), b"user.note")


def release(session: Session) -> None:
    node = session.names.node(session.ino(b"a"))
    assert node is not None and session.front.drained.release_if_clean(node)


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *((kind, "room") for kind in CHANGES),
        *((kind, "times") for kind in CHANGES if "utime" in kind),
    ],
)
async def test_a_change_stays_shown_whose_object_has_left_the_tier_meanwhile(
    kind: str, moment: str, rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    async with rig.mount(works=False) as session:
        await session.write(b"a", b"bytes")
        await drain(session)
        place = session.front.attributes._gate if moment == "room" else session.files
        name = "require_room" if moment == "room" else "set_times"
        wait, waits = getattr(place, name), 0

        async def released(*arguments: Any, **more: Any) -> None:
            nonlocal waits
            waits += 1
            await wait(*arguments, **more)
            if waits == 1:
                # As if the room was needed.
                release(session)

        monkeypatch.setattr(place, name, released)
        await CHANGES[kind](session)
        before = shown(session)
        assert (
            before
            == {
                "chmod": (0o640, 0, 0, before[3]),
                "chown": (0o644, 12, 34, before[3]),
                "utime": (0o644, 0, 0, MTIME_NS),
                "chmod and utime": (0o640, 0, 0, MTIME_NS),
                "setxattr": (0o644, 0, 0, before[3]),
            }[kind]
        )
        # The source has the file without the change.
        await session.revalidation.look_again(session.ino(b"a"))
        assert shown(session) == before
        assert note(session) == (b"1" if kind == "setxattr" else None)
        await drain(session)
        assert shown(session) == before and (rig.source / "a").read_bytes() == b"bytes"
        there = (rig.source / "a").stat()
        found = stat.S_IMODE(there.st_mode), there.st_uid, there.st_gid, there.st_mtime_ns
        assert found == before
        assert os.listxattr(rig.source / "a") == (["user.note"] if kind == "setxattr" else [])
        assert not session.write_back.drain.backlog().conflicts and waits > 1


async def test_an_owner_is_shown_while_a_look_at_the_source_waits_or_after_it_has_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The mount may know an older owner at the source than the source has: others have changed the
    file before the drain has."""
    (rig.source / "a").write_bytes(b"of the source")
    older = (rig.source / "a").stat()
    async with rig.mount() as session:
        await chown(session)
        await session.drained()
        ino = session.ino(b"a")
        acls, seen = session.source_calls.acls, []

        def know_older() -> None:
            parent = session.names.stored(ino).parent
            session.names.refresh(ino, attributes_of(older, ino, parent, older.st_mode))
            seen.append(shown(session)[1:3])

        async def overtaken(ino: Ino) -> Any:
            know_older()
            if len(seen) == 1:
                raise SourceError("no answer")
            return await acls(ino)

        know_older()
        monkeypatch.setattr(session.source_calls, "acls", overtaken)
        seen.clear()
        (rig.source / "a").write_bytes(b"of others")
        with pytest.raises(SourceError):
            await session.revalidation.look_again(ino)
        know_older()
        await session.revalidation.look_again(ino)
        assert seen == [(12, 34)] * 3
        assert shown(session)[1:3] == (12, 34)


@pytest.mark.promise(172)
async def test_bytes_of_other_users_are_recorded_behind_the_last_wait_of_a_change_of_mode(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """They are recorded before the mode that ends their right."""
    async with rig.mount(works=False) as session:
        ino = await session.open(b"a")
        order: list[str] = []
        record_of_others, set_times = Recorder.record_of_others, session.files.set_times

        def recorded(*arguments: Any) -> None:
            order.append("record")
            record_of_others(*arguments)

        async def timed(*arguments: Any, **more: Any) -> None:
            await set_times(*arguments, **more)
            order.append("times")

        monkeypatch.setattr(Recorder, "record_of_others", recorded)
        monkeypatch.setattr(session.files, "set_times", timed)
        await chmod_and_utime(session)
        assert order == ["times", "record"]
        session.files.release(ino)
