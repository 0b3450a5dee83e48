"""Names that others make and remove at the source, in directories that a mount absorbs."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from monarch.errors import Refused, SourceError
from monarch.types import Ino
from monarch.writeback import others, write_gate
from monarch.writeback.others import LOOK_S
from tests.equipment import remounts
from tests.equipment.remounts import tree_of
from tests.writeback import remount_histories
from tests.writeback.remounts import ROOT, Ground, Life

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
    others = life.write_back.others
    assert others is not None
    for path in paths:
        assert others.used(life.ino(path))


async def listed(life: Life) -> None:
    """All that is shown was listed, as by a process that goes through the tree."""
    others = life.write_back.others
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


async def looked(life: Life) -> None:
    """Used directories were checked. The threads that do so know nothing of this clock."""
    others = life.write_back.others
    assert others is not None
    # A look that waited for a thread seems to have taken seconds of this clock, so the next one
    # would be put off for minutes.
    others._next_s.clear()
    for _ in range(4 * LOOK_S + 2):
        await trio.sleep(0.5)
        while (
            others._looking or others._threads._under_way or life.source_calls._threads._under_way
        ):
            threading.Event().wait(0.0005)
            await trio.lowlevel.checkpoint()


async def test_names_that_others_make_and_remove_are_shown(ground: Ground, clock: Clock) -> None:
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
        await looked(life)
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
        await looked(life)
        assert set(life.shown()) == {b"d", b"d/other", b"d/link"}
        assert life.write_back.drain.backlog().conflicts == 0


async def test_names_that_the_source_does_not_have_yet_stay(ground: Ground, clock: Clock) -> None:
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
        await looked(life)
        assert set(life.shown()) == before | {b"d/new"}
        assert life.shown()[b"d/mine"].content == b"mine"


@pytest.mark.promise(134)
@pytest.mark.parametrize("name", ["one", "two"])
async def test_modes_and_attributes_come_to_the_names_that_others_have_not_taken(
    ground: Ground, clock: Clock, name: str
) -> None:
    async with ground.mount() as life:
        await life.write(b"one", b"mine")
        await life.link(b"one", b"two")
        await life.drained()
        other = ground.source / ("two" if name == "one" else "one")
        (ground.source / "beside").write_bytes(b"of others")
        (ground.source / "beside").chmod(0o604)
        (ground.source / "beside").rename(ground.source / name)
        await life.chmod(os.fsencode(other.name), 0o600)
        await life.setxattr(os.fsencode(other.name), b"user.a", b"1")
        await life.drained()
        assert stat.S_IMODE(other.stat().st_mode) == 0o600
        assert os.listxattr(other) == ["user.a"]
        assert stat.S_IMODE((ground.source / name).stat().st_mode) == 0o604
        assert os.listxattr(ground.source / name) == []
        assert life.write_back.drain.backlog().conflicts == 0


async def test_a_file_made_and_drained_while_its_directory_is_listed_stays(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ground.mount() as life:
        others = life.write_back.others
        assert others is not None
        use(life, b"d")
        await looked(life)
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


async def test_a_file_that_is_open_or_was_replaced_elsewhere(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A directory that was changed a moment ago is listed again in any case.
    monkeypatch.setattr(others, "_YOUNG_S", 0.0)
    async with ground.mount() as life:
        for name in (b"d/open", b"d/latest"):
            await life.write(name, b"step 1")
        await life.drained()
        use(life, b"d")
        ino = await life.open(b"d/open")
        (ground.source / "d/open").unlink()
        (ground.source / "beside").write_bytes(b"step 2 of others")
        (ground.source / "beside").rename(ground.source / "d/latest")
        await looked(life)
        shown = life.shown()
        assert shown[b"d/latest"].content == b"step 2 of others"
        # A process that has it open may still write it.
        assert shown[b"d/open"].content == b"step 1"
        life.files.release(ino)
        await looked(life)
        assert b"d/open" not in life.shown()


async def test_a_file_that_was_not_written_is_hidden_when_others_have_removed_it(
    ground: Ground, clock: Clock
) -> None:
    async with ground.mount(works=False) as life:
        # Its bytes are copied, and not changed.
        await life.setxattr(b"d/theirs", b"trusted.note", b"1")
        await life.utime(b"d/other", 10**18)
        await life.write(b"d/new", b"new", synced=True)
    for name in ("theirs", "other"):
        (ground.source / "d" / name).unlink()
    ground.lose_state()
    async with ground.mount(works=False) as life:
        use(life, b"d")
        await looked(life)
        # They wait for the drain. Nothing of a file waits if only its attributes were changed.
        assert life.shown().keys() == {b"d", b"d/theirs", b"d/new"}
    async with ground.mount() as life:
        await life.drained()
        use(life, b"d")
        await looked(life)
        assert life.shown().keys() == tree_of(ground.source).keys() == {b"d", b"d/new"}
        await life.end()


@pytest.mark.promise(133)
async def test_a_name_that_a_file_gets_after_a_conflict_has_its_bytes(
    ground: Ground, clock: Clock
) -> None:
    async with ground.mount() as life:
        ino = await life.open(b"d/theirs")
        await life.files.write(ino, 0, b"mine")
        (ground.source / "beside").write_bytes(b"of others")
        (ground.source / "beside").rename(ground.source / "d/theirs")
        life.files.release(ino)
        await life.drained()
        assert life.write_back.drain.backlog().conflicts == 1
        await life.link(b"d/theirs", b"d/second")
        await life.link(b"d/second", b"third")
        await life.drained()
        assert (ground.source / "d/theirs").read_bytes() == b"of others"
        assert (ground.source / "d/second").read_bytes() == b"mine"
        assert (ground.source / "third").samefile(ground.source / "d/second")


@pytest.mark.promise(133)
@pytest.mark.parametrize("name", [b"d/one", b"d/two"])
async def test_a_drained_file_does_not_show_the_bytes_of_what_took_one_of_its_names(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    monkeypatch.setattr(write_gate, "_MOST_DRAINED", 0)
    async with ground.mount() as life:
        await life.write(b"d/one", b"mine")
        await life.link(b"d/one", b"d/two")
        await life.drained()
        await trio.sleep(10)
        use(life, b"d")
        ino = life.ino(name)
        assert not life.names.copy_up(ino).object
        (ground.source / "beside").write_bytes(b"of others")
        (ground.source / "beside").rename(ground.source / os.fsdecode(name))
        with suppress(Refused, SourceError):
            life.files.release(await life.open(name, os.O_RDONLY))
        other = b"d/two" if name == b"d/one" else b"d/one"
        assert life.ino(other) == ino
        assert life.shown()[other].content == b"mine"
        await looked(life)
        assert life.shown()[other].content == b"mine"
        assert life.shown()[name].content == b"of others"


class Readers:
    """A datapath that has given the files of ``read`` to readers."""

    def __init__(self, read: set[Ino]) -> None:
        self.read = read

    def is_open(self, ino: Ino) -> bool:
        return ino in self.read

    outdate = is_open

    def forget_object(self, ino: Ino) -> None: ...


@pytest.mark.promise(5)
@pytest.mark.parametrize("content", [b"", b"others", b"longer than what was there before"])
@pytest.mark.parametrize("name", ["d/mine", "d/theirs", "d/dropped"])
async def test_a_file_that_a_process_reads_stays_as_it_was_opened(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    at, path = ground.source / name, name.encode()
    async with ground.mount() as life:
        if name != "d/theirs":
            await life.write(path, b"written here")
            await life.drained()
        use(life, b"d")
        await looked(life)
        if name == "d/dropped":
            assert life.front.drained.release_oldest(1 << 30)
        if name != "d/theirs":
            monkeypatch.setattr(life.front.opens, "fast", Readers(life.read))
        ino = life.ino(path)
        was = life.names.attributes(ino)
        life.read.add(ino)
        if name != "d/theirs" and content:
            (ground.source / "beside").write_bytes(content)
            (ground.source / "beside").rename(at)
        else:
            at.unlink()
        await looked(life)
        assert life.names.attributes(ino) == was and life.ino(path) == ino
        # Nothing more changes in the directory.
        life.read.clear()
        await looked(life)
        shown = life.shown()
        assert shown[path].content == content if at.exists() else path not in shown


@pytest.mark.promise(5, 147)
async def test_a_file_that_is_given_up_is_read_to_its_end(
    ground: Ground, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ground.mount() as life:
        await life.write(b"d/mine", b"mine")
        ino = life.ino(b"d/mine")
        monkeypatch.setattr(life.front.opens, "fast", Readers(life.read))
        life.read.add(ino)
        life.writing.take_away(*life.at(b"d/mine"), by=ROOT)
        assert life.names.attributes(ino).size == 4
        life.read.clear()
        life.front.unlinked.closed_by_readers(ino)
        await until(lambda: life.names.is_forgotten(ino))


KINDS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"now a file"),
    "empty": lambda path: path.mkdir(),
    "full": lambda path: [path.mkdir(), (path / "in").write_bytes(b"in")],
    "link": lambda path: path.symlink_to("other"),
    "fifo": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("of", KINDS)
async def test_a_name_that_is_of_another_kind_by_now(
    ground: Ground, clock: Clock, of: str, to: str, is_new: bool
) -> None:
    at = ground.source / "d/it"
    if not is_new:
        KINDS[of](at)
    async with ground.mount() as life:
        use(life, b"d")
        if is_new:
            KINDS[of](at)
        await looked(life)
        await listed(life)
        assert b"d/it" in life.shown()
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink()
        KINDS[to](at)
        await looked(life)
        await listed(life)
        await looked(life)
        shown = {path: it.bare for path, it in life.shown().items()}
        there = {path: it.bare for path, it in tree_of(ground.source).items()}
        assert shown.keys() == there.keys()
        assert shown[b"d/it"] == there[b"d/it"]


async def test_a_link_that_was_made_here_and_leads_elsewhere_by_now(
    ground: Ground, clock: Clock
) -> None:
    async with ground.mount() as life:
        await life.symlink(b"d/latest", b"step-1")
        await life.drained()
        use(life, b"d")
        await looked(life)
        (ground.source / "d/beside").symlink_to("step-2")
        (ground.source / "d/beside").rename(ground.source / "d/latest")
        await looked(life)
        assert life.shown()[b"d/latest"].target == b"step-2"


async def test_only_used_directories_are_checked_and_only_if_they_are_absorbed(
    ground: Ground, clock: Clock
) -> None:
    (ground.source / "ckpt").mkdir()
    async with ground.mount(write="none", absorb=["ckpt/**"]) as life:
        others = life.write_back.others
        assert others is not None
        assert not others.used(life.ino(b"d"))
        use(life, b"", b"ckpt")
        for name in ("new", "d/new", "ckpt/new"):
            (ground.source / name).write_bytes(b"new")
        await looked(life)
        assert b"ckpt/new" in life.shown()
        assert not {b"new", b"d/new"} & life.shown().keys()
        # After a while without use it costs no call any more.
        await trio.sleep(700)
        (ground.source / "ckpt/later").write_bytes(b"later")
        await looked(life)
        assert b"ckpt/later" not in life.shown()
    async with ground.mount(freshness="never") as life:
        assert life.write_back.others is None


@pytest.mark.promise(10)
async def test_a_file_that_others_removed_is_gone_also_where_names_were_changed_here(
    ground: Ground, clock: Clock
) -> None:
    async with ground.mount(works=False) as life:
        (ground.source / "d/theirs").unlink()
        # The directory has a later time on the mount than at the source.
        await life.write(b"d/mine", b"mine")
        with pytest.raises(SourceError) as raised:
            await life.front.source._revalidate(life.ino(b"d/theirs"))
        assert raised.value.errno == errno.ENOENT
        assert set(life.kinds()) == {b"d", b"d/other", b"d/mine"}


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
        await looked(life)
        await listed(life)
        await looked(life)
        shown = {path: it.bare for path, it in life.shown().items()}
        there = {path: it.bare for path, it in tree_of(ground.source).items()}
        assert shown.keys() == there.keys()
        for path, it in there.items():
            assert it[0] == "dir" or shown[path] == it, path
        assert life.write_back.drain.backlog().conflicts == 0
        if seed % 2:
            await life.end()
    # A mount that never compares names does not see what others have changed.
    kinds = sorted({*remounts.KINDS} - {"never"})
    for kind in (kinds[seed % len(kinds)], "same"):
        async with ground.mount(**remount_histories.how(kind, ground)) as life:
            shown = {path: it.bare for path, it in life.shown().items()}
            assert shown == there, kind
            await life.drained()
            await life.end()
    assert {path: it.bare for path, it in tree_of(ground.source).items()} == there


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
        waiting = [entry.op for entry in life.write_back.drain.queue.entries()]
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
            assert life.front.drained.release_oldest(1 << 30)
            life.unlink(b"x")
            await life.drained()
    if is_killed:
        async with ground.mount(freshness="never") as life:
            assert life.front.drained.release_oldest(1 << 30)
            life.unlink(b"x")
            await life.drained()
    assert not (ground.source / "x").exists()
