"""Names that others make and remove at the source, in directories that a mount absorbs."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.errors import Refused, SourceError
from monarch.vfs.others import LOOK_S
from tests.writeback.remounts import Ground, Life, tree_of

pytestmark = [pytest.mark.promise(148), pytest.mark.fault("N5")]

Clock = trio.testing.MockClock


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    ground = Ground(tmp_path, monkeypatch)
    (ground.source / "d").mkdir()
    for name in ("d/theirs", "d/other"):
        (ground.source / name).write_bytes(b"old")
    return ground


def use(life: Life, *paths: bytes) -> None:
    others = life.side.others
    assert others is not None
    for path in paths:
        assert others.used(life.ino(path))


async def listed(life: Life) -> None:
    """All that is shown was listed, as by a process that goes through the tree."""
    others = life.side.others
    assert others is not None
    for _ in range(5):
        for path, it in life.shown().items():
            if it.kind == "dir":
                await others.listed(life.ino(path))
                others.used(life.ino(path))


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(100):
        while not holds():
            await trio.sleep(0.5)


async def looked() -> None:
    """Used directories were looked at."""
    await trio.sleep(2 * LOOK_S + 1)


async def test_what_others_make_and_remove_is_shown(ground: Ground, clock: Clock) -> None:
    async with ground.mount() as life:
        await life.write(b"d/mine", b"mine")
        await life.drained()
        use(life, b"d")
        (ground.source / "d/theirs").unlink()
        (ground.source / "d/mine").unlink()
        (ground.source / "d/new").write_bytes(b"new")
        (ground.source / "d/link").symlink_to("new")
        (ground.source / "d/deep/er").mkdir(parents=True)
        (ground.source / "d/deep/er/file").write_bytes(b"deep")
        await looked()
        await listed(life)
        shown = life.shown()
        assert shown.keys() == tree_of(ground.source).keys()
        assert shown[b"d/new"].content == b"new" and shown[b"d/link"].target == b"new"
        assert shown[b"d/deep/er/file"].content == b"deep"
        # They can be changed like any other.
        await life.write(b"d/new", b"changed here")
        await life.rename(b"d/new", b"d/deep/new")
        with pytest.raises(Refused) as refused:
            await life.rename(b"d/deep", b"d/moved")
        assert refused.value.errno == errno.EXDEV
        await life.drained()
        assert (ground.source / "d/deep/new").read_bytes() == b"changed here"
        shutil.rmtree(ground.source / "d/deep")
        await looked()
        assert set(life.shown()) == {b"d", b"d/other", b"d/link"}
        assert life.side.drain.backlog().conflicts == 0


async def test_what_the_source_has_not_got_yet_stays(ground: Ground, clock: Clock) -> None:
    async with ground.mount(works=False) as life:
        use(life, b"d")
        await life.write(b"d/mine", b"mine")
        life.unlink(b"d/theirs")
        await life.rename(b"d/other", b"d/renamed")
        await life.mkdir(b"d/empty")
        await life.symlink(b"d/link", b"mine")
        await life.mkdir(b"d/made")
        await life.write(b"d/made/file", b"beneath")
        (ground.source / "d/new").write_bytes(b"new")
        before = set(life.shown())
        await looked()
        assert set(life.shown()) == before | {b"d/new"}
        assert life.shown()[b"d/mine"].content == b"mine"


async def test_what_is_made_and_drained_while_a_directory_is_listed_stays(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ground.mount() as life:
        others = life.side.others
        assert others is not None
        use(life, b"d")
        await looked()
        run, made = others._threads.run, []

        async def late(function: Any, *args: Any) -> Any:
            answer = await run(function, *args)
            if not made:
                made.append(function)
                await life.write(b"d/mine", b"mine")
                await life.drained()
            return answer

        monkeypatch.setattr(others._threads, "run", late)
        (ground.source / "d/new").write_bytes(b"new")
        # One look only: the next would find it at the source.
        await until(lambda: b"d/new" in life.shown())
        assert made and {b"d/mine", b"d/new"} <= life.shown().keys()


async def test_a_file_that_is_open_or_was_replaced_elsewhere(ground: Ground, clock: Clock) -> None:
    async with ground.mount() as life:
        for name in (b"d/open", b"d/latest"):
            await life.write(name, b"step 1")
        await life.drained()
        use(life, b"d")
        ino = await life.open(b"d/open")
        (ground.source / "d/open").unlink()
        (ground.source / "beside").write_bytes(b"step 2 of others")
        (ground.source / "beside").rename(ground.source / "d/latest")
        await looked()
        shown = life.shown()
        assert shown[b"d/latest"].content == b"step 2 of others"
        # Whoever has it open may still write it.
        assert shown[b"d/open"].content == b"step 1"
        life.files.release(ino)
        (ground.source / "d/touch").write_bytes(b"")
        await looked()
        assert b"d/open" not in life.shown()


async def test_only_used_directories_are_looked_at_and_only_if_they_are_absorbed(
    ground: Ground, clock: Clock
) -> None:
    (ground.source / "ckpt").mkdir()
    async with ground.mount(write="none", absorb=["ckpt/**"]) as life:
        others = life.side.others
        assert others is not None
        assert not others.used(life.ino(b"d"))
        use(life, b"", b"ckpt")
        for name in ("new", "d/new", "ckpt/new"):
            (ground.source / name).write_bytes(b"new")
        await looked()
        assert b"ckpt/new" in life.shown()
        assert not {b"new", b"d/new"} & life.shown().keys()
        # After a while without use nobody pays for it any more.
        await trio.sleep(700)
        (ground.source / "ckpt/later").write_bytes(b"later")
        await looked()
        assert b"ckpt/later" not in life.shown()
    async with ground.mount(freshness="never") as life:
        assert life.side.others is None


@pytest.mark.parametrize("seed", range(20))
async def test_a_mount_shows_what_the_source_has_when_all_rest(
    ground: Ground, clock: Clock, seed: int
) -> None:
    chance = random.Random(seed)
    async with ground.mount() as life:
        use(life, b"", b"d")
        for _ in range(60):
            with suppress(Refused, SourceError, OSError):
                await chance.choice([change_here, change_there, wait])(life, chance)
            await listed(life)
        await life.drained()
        await looked()
        await listed(life)
        await looked()
        shown = {path: it.bare for path, it in life.shown().items()}
        there = {path: it.bare for path, it in tree_of(ground.source).items()}
        assert shown.keys() == there.keys()
        for path, it in there.items():
            assert it[0] == "dir" or shown[path] == it, path
        assert life.side.drain.backlog().conflicts == 0


async def wait(life: Life, chance: random.Random) -> None:
    await trio.sleep(chance.choice([0.01, 1, 12]))


async def change_here(life: Life, chance: random.Random) -> None:
    """Names of its own, in directories of all."""
    above = chance.choice([b"", b"d/", b"d/sub/", b"mine/"])
    path, to = (above + b"mine%d" % chance.randrange(4) for _ in range(2))
    kind = chance.choice(["write", "write", "write", "rename", "unlink", "mkdir", "link"])
    if kind == "write":
        await life.write(path, b"%d here" % chance.randrange(1000))
    elif kind == "rename":
        await life.rename(path, to)
    elif kind == "unlink":
        life.unlink(path)
    elif kind == "link":
        await life.link(path, to)
    else:
        await life.mkdir(b"mine")


async def change_there(life: Life, chance: random.Random) -> None:
    """As another node would: each file by a rename."""
    source = life.ground.source
    above = source / chance.choice(["", "d", "d/sub", "mine"])
    path, to = (above / f"theirs{chance.randrange(4)}" for _ in range(2))
    kind = chance.choice(["write", "write", "write", "rename", "unlink", "mkdir", "rmtree"])
    if kind == "write" and above.is_dir():
        (source / ".monarch-theirs.part").write_bytes(b"%d there" % chance.randrange(1000))
        os.rename(source / ".monarch-theirs.part", path)
    elif kind == "rename":
        path.rename(to)
    elif kind == "unlink":
        path.unlink()
    elif kind == "mkdir":
        (source / "d/sub").mkdir()
    elif not list((source / "d/sub").glob("mine*")):
        with life.side.drain.noting() as waiting:
            if not any(name.startswith(b"d/sub") for op in waiting for name in op.names()):
                shutil.rmtree(source / "d/sub")


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_file_whose_times_were_set_here_is_no_file_of_others(
    ground: Ground, clock: Clock, is_killed: bool
) -> None:
    async with ground.mount(freshness="never") as life:
        await life.write(b"x", b"bytes")
        await life.drained()
        await life.utime(b"x", 10**18)
        await life.drained()
        if is_killed:
            life.kill()
        else:
            # The source's file is what the mount knows of it from now on.
            assert life.files.let_drained_go(1 << 30)
            life.unlink(b"x")
            await life.drained()
    if is_killed:
        async with ground.mount(freshness="never") as life:
            assert life.files.let_drained_go(1 << 30)
            life.unlink(b"x")
            await life.drained()
    assert not (ground.source / "x").exists()
