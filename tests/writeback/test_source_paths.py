"""Files and directories at the source while a rename above them waits, or is being made."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.errors import SourceError
from monarch.types import Ino
from monarch.writeback.source_entries import SourceEntries
from tests.writeback.remount_histories import how
from tests.writeback.remounts import Rig, Session

Clock = trio.testing.MockClock


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def _refused(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class HeldRename:
    """A rename at the source that waits for the test before it is made, and after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_begin, self.is_made, self.may_end = (threading.Event() for _ in range(3))
        rename = SourceEntries.rename

        def held(*arguments: Any, **more: Any) -> Any:
            assert self.may_begin.wait(60)
            result = rename(*arguments, **more)
            self.is_made.set()
            assert self.may_end.wait(60)
            return result

        monkeypatch.setattr(SourceEntries, "rename", held)

    @contextmanager
    def released(self) -> Iterator[None]:
        """At the end of the block the thread that makes it is released."""
        try:
            yield
        finally:
            self.may_begin.set()
            self.may_end.set()


async def release(session: Session, path: bytes) -> Ino:
    """The bytes of a file are at the source only."""
    await session.drained()
    ino = session.ino(path)
    node = session.names.node(ino)
    assert node is not None and session.front.drained.release_if_clean(node)
    return ino


async def bytes_at_source(session: Session, ino: Ino) -> bytes:
    """As a reader gets them whose file is not in a tier."""
    calls, identity = session.source_calls, session.names.stored(ino).identity
    return (await calls.at(ino, session.source.fetch, identity)).data


@pytest.mark.promise(62, 67)
async def test_a_file_is_found_at_the_source_while_a_directory_above_is_being_renamed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    async with rig.mount() as session:
        await session.mkdir(b"d")
        await session.write(b"d/a", b"old")
        await session.setxattr(b"d/a", b"user.note", b"1")
        ino, attributes = await release(session, b"d/a"), session.front.attributes
        held = HeldRename(monkeypatch)
        with held.released():
            await session.rename(b"d", b"e")
            for is_made in (False, True):
                if is_made:
                    held.may_begin.set()
                    # The drain begins with it when the event loop lets it.
                    while not held.is_made.is_set():
                        await trio.sleep(0.01)
                assert (rig.source / "e/a").exists() is is_made
                assert await attributes.xattrs_elsewhere(ino) == {b"user.note": b"1"}
                await session.revalidation.look_again(ino)
                await session.open(b"e/a", os.O_RDONLY)
                assert await session.files.read(ino, 0, 10) == b"old"
                session.files.release(ino)
                assert session.ino(b"e/a") == ino
            # It waits in the queue of the drain still.
            assert session.write_back.drain.queue.source_paths(b"e/a") == [b"d/a", b"e/a"]
        await session.drained()
        assert session.write_back.drain.queue.source_paths(b"e/a") == [b"e/a"]


async def renamed(rig: Rig) -> None:
    """A directory ``d`` with files that are at the source, and its rename to ``e``, which is
    not."""
    async with rig.mount() as session:
        await session.mkdir(b"d")
        await session.write(b"d/a", b"written")
        await session.write(b"d/b", b"another")
        await session.drained()
        with rig.monkeypatch.context() as patched:
            patched.setattr(SourceEntries, "rename", _refused)
            await session.rename(b"d", b"e")
            session.kill()
            await rig.come_to_rest()


@pytest.mark.promise(67, 129)
async def test_over_a_new_snapshot_a_file_is_read_where_the_source_has_it(
    rig: Rig, clock: Clock
) -> None:
    await renamed(rig)
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        ino = session.ino(b"e/a")
        for is_made in (False, True):
            if is_made:
                # As by an earlier mount, which was killed before it recorded that.
                os.rename(rig.source / "d", rig.source / "e")
            # Others have changed the directory above.
            (rig.source / f"of others {is_made}").touch()
            await session.revalidation.look_again(ino)
            assert session.ino(b"e/a") == ino
            assert await bytes_at_source(session, ino) == b"written"
        await session.open(b"e/a", os.O_WRONLY)
        assert session.shown()[b"e/a"].content == b"written"
        session.files.release(ino)


@pytest.mark.promise(67, 129)
async def test_over_a_new_snapshot_a_file_that_others_remove_before_a_rename_is_gone(
    rig: Rig, clock: Clock
) -> None:
    await renamed(rig)
    # The time of a directory shows that others have changed it.
    os.utime(rig.source / "d", (0, 0))
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        ino, other = session.ino(b"e/a"), session.ino(b"e/b")
        (rig.source / "d/a").unlink()
        with pytest.raises(SourceError) as raised:
            await session.revalidation.look_again(ino)
        assert raised.value.errno == errno.ENOENT
        assert session.names.resolve(b"e/a") is None
        await session.revalidation.look_again(other)
        assert session.ino(b"e/b") == other


@pytest.mark.promise(67, 129)
@pytest.mark.parametrize("is_made", [False, True])
async def test_over_a_new_snapshot_a_directory_that_is_to_be_renamed_keeps_extended_attributes(
    rig: Rig, clock: Clock, is_made: bool
) -> None:
    await renamed(rig)
    os.setxattr(rig.source / "d", "user.earlier", b"1")
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        directory, attributes = session.ino(b"e"), session.front.attributes
        if is_made:
            os.rename(rig.source / "d", rig.source / "e")
        assert await attributes.xattrs_elsewhere(directory) == {b"user.earlier": b"1"}
        await session.setxattr(b"e", b"user.note", b"2")
        assert set(attributes.xattrs(directory)) == {b"user.earlier", b"user.note"}
        assert attributes.xattr(directory, b"user.earlier") == b"1"
