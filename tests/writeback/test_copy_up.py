"""Files that get an object while processes read them at the source, since theirs was released."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.errors import Refused
from monarch.tiers.source import SourceFile
from monarch.types import Ino
from monarch.writeback.op import Op
from tests.writeback.remounts import ROOT, Ground, Life

# Long enough for any number of tries of the drain, by a clock that jumps, in seconds.
PATIENCE_S = 600

Change = Callable[[Life], Awaitable[object]]


async def truncate(life: Life) -> None:
    await life.front.attributes.change(life.ino(b"a"), size=2, by=ROOT)


CHANGES: dict[str, Change] = {
    "chmod": lambda life: life.chmod(b"a", 0o600),
    "utime": lambda life: life.utime(b"a", 1_000_000_000),
    "setxattr": lambda life: life.setxattr(b"a", b"user.note", b"1"),
    "truncate": truncate,
    "link": lambda life: life.link(b"a", b"b"),
    "rename": lambda life: life.rename(b"a", b"b"),
}


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


async def released(life: Life) -> Ino:
    """A file ``a`` that is drained and whose object is released."""
    await life.write(b"a", b"old")
    await life.drained()
    ino = life.ino(b"a")
    node = life.names.node(ino)
    assert node is not None and life.front.drained.release_if_clean(node)
    return ino


async def closed(life: Life, number: int) -> None:
    """Wait until no descriptor is left, neither of an object nor of a file at the source."""
    await life.drained()
    while True:
        held = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                held.append(Path("/proc/self/fd", fd).readlink())
        objects = [path.name for path in held if life.ground.directory in path.parents]
        assert "journal" in objects
        there = [path for path in held if life.ground.source in path.parents]
        if not there and str(number) not in objects:
            return
        # Threads close them.
        await trio.sleep(1)


def recorded(life: Life, monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """The changes that are recorded from now on."""
    ops: list[Op] = []
    append = life.write_back.place.journal.append

    def noted(op: Op) -> int:
        ops.append(op)
        return append(op)

    monkeypatch.setattr(life.write_back.place.journal, "append", noted)
    return ops


@pytest.mark.promise(74)
@pytest.mark.parametrize("kind", CHANGES)
async def test_a_reader_at_the_source_reads_on_and_closes_a_file_that_is_changed_by_path(
    kind: str, ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            ino = await released(life)
            for _ in range(2):
                await life.open(b"a", os.O_RDONLY)
            ops = recorded(life, monkeypatch)
            await CHANGES[kind](life)
            (number,) = life.front.object_table.open
            expected = b"ol" if kind == "truncate" else b"old"
            assert await life.files.read(ino, 0, 10) == expected
            if kind != "truncate":
                # The source gets it, whatever time its readers take.
                assert [op.kind for op in ops].count("content") == 1
            life.files.release(ino)
            assert life.files.is_open(ino), "for the second reader"
            assert await life.files.read(ino, 0, 10) == expected
            life.files.release(ino)
            assert not life.front.opens.files and not life.front.object_table.open
            assert [op.kind for op in ops].count("content") == 1
            await closed(life, number)
            for name in {"link": ("a", "b"), "rename": ("b",)}.get(kind, ("a",)):
                assert (ground.source / name).read_bytes() == expected


@pytest.mark.promise(74)
async def test_after_such_a_change_the_file_can_be_written_and_its_reader_sees_that(
    ground: Ground, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            ino = await released(life)
            await life.open(b"a", os.O_RDONLY)
            with pytest.raises(Refused) as raised:
                await life.open(b"a")
            assert raised.value.errno == errno.ETXTBSY
            await life.chmod(b"a", 0o600)
            await life.write(b"a", b"newer")
            assert await life.files.read(ino, 0, 10) == b"newer"
            life.files.release(ino)
            await life.drained()
            assert (ground.source / "a").read_bytes() == b"newer"


@pytest.mark.promise(71, 74)
@pytest.mark.parametrize("kind", ["chmod", "truncate", "link"])
async def test_such_a_reader_reads_on_if_the_tier_has_no_room_for_the_object(
    kind: str, ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    async def full() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            ino = await released(life)
            await life.open(b"a", os.O_RDONLY)
            monkeypatch.setattr(life.front.objects.spares, "take", full)
            await CHANGES[kind](life)
            expected = b"ol" if kind == "truncate" else b"old"
            ((number, file),) = life.front.object_table.open.items()
            assert file.is_write_through and await life.files.read(ino, 0, 10) == expected
            life.files.release(ino)
            await closed(life, number)
            assert (ground.source / "a").read_bytes() == expected


@asynccontextmanager
async def opening(life: Life, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """While a process opens the file at the source; the open continues at the end of the block."""
    begun, may_open, open_there = trio.Event(), trio.Event(), life.front.source.open

    async def open_later(ino: Ino) -> SourceFile:
        begun.set()
        await may_open.wait()
        return await open_there(ino)

    with monkeypatch.context() as patched:
        patched.setattr(life.front.source, "open", open_later)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.open, b"a", os.O_RDONLY)
            await begun.wait()
            nursery.start_soon(truncate, life)
            # It has been copied by then.
            await trio.sleep(10)
            yield
            may_open.set()


@pytest.mark.promise(74)
async def test_a_file_that_is_being_opened_at_the_source_gets_its_object_afterwards(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            ino = await released(life)
            async with opening(life, monkeypatch):
                assert not life.front.object_table.open
            ((number, file),) = life.front.object_table.open.items()
            assert file.users == 1 and await life.files.read(ino, 0, 10) == b"ol"
            life.files.release(ino)
            assert not life.front.opens.files
            await closed(life, number)


@pytest.mark.promise(74, 79)
async def test_a_version_of_others_that_such_an_open_finds_is_not_replaced_by_an_older_copy(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with ground.mount() as life:
            ino = await released(life)
            async with opening(life, monkeypatch):
                (ground.source / "theirs").write_bytes(b"of others")
                (ground.source / "theirs").rename(ground.source / "a")
            assert await life.files.read(ino, 0, 10) == b"ol"
            life.files.release(ino)
            await life.drained()
            assert (ground.source / "a").read_bytes() == b"of others"


@pytest.mark.promise(5)
@pytest.mark.parametrize("how", ["unlink", "rename over", "remove directory"])
async def test_a_file_that_is_read_at_the_source_is_read_on_without_a_name(
    ground: Ground, clock: trio.testing.MockClock, how: str
) -> None:
    async with ground.mount() as life:
        ino = await released(life)
        await life.open(b"a", os.O_RDONLY)
        if how == "unlink":
            life.unlink(b"a")
        elif how == "rename over":
            await life.write(b"new", b"new")
            await life.rename(b"new", b"a")
        else:
            await life.mkdir(b"gone")
            await life.rename(b"a", b"gone/a")
            life.unlink(b"gone/a")
            life.rmdir(b"gone")
        assert await life.files.read(ino, 0, 10) == b"old"
        await life.drained()
        await trio.sleep(5)
        assert await life.files.read(ino, 0, 10) == b"old"
        life.files.release(ino)
        await life.end()
