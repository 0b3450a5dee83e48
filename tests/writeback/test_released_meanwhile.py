"""Calls of processes that are killed: the kernel reports the last close before they have ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from monarch.types import Ino
from tests.writeback.remounts import ROOT, Rig, Session

CALLS: dict[str, Callable[[Session, Ino], Awaitable[object]]] = {
    "read": lambda session, ino: session.files.read(ino, 0, 5),
    "write": lambda session, ino: session.files.write(ino, 0, b"after"),
    "fsync": lambda session, ino: session.files.sync(ino),
}


@pytest.mark.fault("M8")
@pytest.mark.promise(44)
@pytest.mark.parametrize("name", CALLS)
async def test_a_file_stays_open_until_the_calls_of_a_killed_process_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its descriptor would be that of another file by then."""
    rig = Rig(tmp_path, monkeypatch)
    reached, go_on = trio.Event(), trio.Event()

    def late(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def called(*args: Any) -> Any:
            reached.set()
            await go_on.wait()
            return await run(*args)

        return called

    async with rig.mount() as session:
        made = await session.writing.create(*session.at(b"new"), mode=0o644, by=ROOT)
        await session.files.write(made.ino, 0, b"bytes")
        async with trio.open_nursery() as nursery:
            with monkeypatch.context() as patched:
                for method in ("run", "run_sync"):
                    objects = session.front.objects
                    patched.setattr(objects, method, late(getattr(objects, method)))
                nursery.start_soon(CALLS[name], session, made.ino)
                await reached.wait()
                session.files.release(made.ino)
                assert session.files.is_open(made.ino)
                go_on.set()
        assert not session.files.is_open(made.ino)
        await session.drained()
    assert (rig.source / "new").read_bytes() == (b"after" if name == "write" else b"bytes")
