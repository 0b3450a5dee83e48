"""Two and three mounts that absorb writes for the same paths of one source, in random histories.

No mount sees the files of the others, as with ``writeback.shared`` on several nodes. In the end
the source has the bytes of every file that a mount has written: under its name, or beside it as a
named conflict; or the file waits for a change that the source refuses.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from monarch.types import ANY_SIZE, Identity
from monarch.writeback import source_contents, source_entries
from monarch.writeback.doubtful import Doubtful
from monarch.writeback.drain import Drain
from monarch.writeback.expected import Expected, is_shared
from monarch.writeback.journal import Replay
from monarch.writeback.op import Op, above
from tests.equipment.remounts import KINDS, tree_of
from tests.writeback.remount_histories import how
from tests.writeback.remounts import Rig
from tests.writeback.rig import Model, draining, read_tree
from tests.writeback.test_histories import RandomChanges, seeds
from tests.writeback.test_others import until


class Writer(RandomChanges):
    """One of several, whose bytes are unique."""

    def __init__(self, model: Model, seed: int, number: int) -> None:
        super().__init__(model, 1000 * seed + number)
        self.number = number
        # Paths of the conflicts that its drains have reported.
        self.reported_conflicts: set[bytes] = set()

    def bytes(self) -> bytes:
        self._count += 1
        return (b"%d of writer %d; " % (self._count, self.number)) * self._random.choice([1, 50])

    def chmod(self) -> None:
        """A mount takes a file before it changes anything of it, so it knows what it changes."""
        self._take_any()
        super().chmod()

    def setxattr(self) -> None:
        self._take_any()
        super().setxattr()

    def _take_any(self) -> None:
        for path, node in sorted(self._model.tree.items()):
            if node.kind == "file":
                self._model.take(path)


def models(directory: Path, count: int) -> list[Model]:
    source = directory / "source"
    (source / "d").mkdir(parents=True)
    for name in ("a", "b", "d/a"):
        (source / name).write_bytes(b"old " + name.encode())
    found = []
    for number in range(count):
        (directory / f"{number}/tier").mkdir(parents=True)
        found.append(Model(source, directory / f"{number}/tier"))
    return found


def written(model: Model) -> dict[bytes, bytes]:
    """The files of a model that have bytes of its own, each by one of its names."""
    return {
        node.content: path
        for path, node in model.tree.items()
        if node.kind == "file" and b"of writer" in node.content
    }


def killed(model: Model) -> Replay:
    """The end of the daemon. The next mount removes the files that were open and had no name."""
    before, replay = set(model.objects.numbers()), model.kill()
    for number in sorted(before - set(model.objects.numbers())):
        model.record(Op(kind="gone", object=number))
    return replay


async def session(
    writers: list[Writer],
    stack: AsyncExitStack,
    chance: random.Random,
    *,
    steps: int,
    is_last: bool,
) -> list[Drain]:
    """All of them at work at the same time; then each ends at a moment of its own, or has brought
    all that the source takes."""
    drains = []
    for random_changes in writers:
        model = random_changes._model
        drains.append(
            await stack.enter_async_context(draining(model, killed(model), abandon=False))
        )
    for _ in range(steps):
        chance.choice(writers).step()
        await trio.sleep(0.0001 if chance.random() < 0.7 else 1)
    if is_last:
        for random_changes, drain in zip(writers, drains, strict=True):
            for path in random_changes._writers():
                if path in random_changes._model.tree:
                    random_changes._model.end(random_changes._model.tree[path])
            await until(partial(is_at_rest, drain))
    return drains


def is_at_rest(drain: Drain) -> bool:
    """Whether the source has all that it takes."""
    drain._wakeups.end_pause()
    return len(drain.queue) == 0


def missing(model: Model, drain: Drain, there: set[bytes]) -> list[str]:
    """The names of files whose bytes are nowhere, although no loss was reported."""
    entries = list(drain.queue.entries())
    waiting = {entry.op.object for entry in entries}
    # One that is tried again at this moment stands in the queue like any other.
    refused = any(entry.refusal for entry in entries)
    lost = []
    for content, path in written(model).items():
        if content not in there and not (refused and model.tree[path].object in waiting):
            lost.append(f"{path!r}: {content[:30]!r}")
    return lost


def torn_unheard(
    source: Path, random_changes: Writer, writers: list[Writer], drain: Drain
) -> list[bytes]:
    """Directories that a writer has made, with files of its own in them, which are others at the
    source by now, though no conflict was reported to a writer and no other has made them."""
    torn, theirs = [], set[bytes]().union(*(other.reported_conflicts for other in writers))
    for other in writers:
        for _, op in other._model.recorded:
            if other is not random_changes and op.kind in ("mkdir", "rename"):
                theirs.add(op.names()[-1])
    for path, node in random_changes._model.tree.items():
        known = drain.state.entries.made.get(node.ino) if node.kind == "dir" else None
        there = source / os.fsdecode(path)
        if known is None or is_shared(known) or not there.is_dir():
            continue
        inside = [
            name
            for name in read_tree(there).values()
            if b"writer %d" % random_changes.number in name.content
        ]
        is_heard = any(each in (path, *above(path)) for each in theirs)
        if there.lstat().st_ino != known.source_ino and inside and not is_heard:
            torn.append(path)
    return torn


def in_memory() -> Path | None:
    """A directory for a source that syncs at once, if there is one that keeps attributes."""
    place = Path("/dev/shm")
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            os.setxattr(file.name, b"user.n", b"1")
    except OSError:
        return None
    return place


@pytest.mark.finding("W8")
@pytest.mark.promise(79, 149, 168)
@pytest.mark.fault("N1")
@pytest.mark.parametrize("seed", range(10))
async def test_no_bytes_of_several_writers_are_lost_and_every_conflict_has_a_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: trio.testing.MockClock,
    pytestconfig: pytest.Config,
    seed: int,
) -> None:
    # 20 of each, and with --soak others for so long.
    for number in itertools.chain(range(seed, 200, 10), seeds(seed + 200, pytestconfig)):
        place = tempfile.mkdtemp(dir=in_memory() or tmp_path)
        directory, chance = Path(place), random.Random(number)
        several = models(directory, chance.choice([2, 3]))
        writers = [Writer(model, number, n) for n, model in enumerate(several)]
        for turn in range(4):
            async with AsyncExitStack() as stack:
                drains = await session(writers, stack, chance, steps=25, is_last=turn == 3)
                for random_changes, drain in zip(writers, drains, strict=True):
                    random_changes.reported_conflicts |= {
                        conflict.path for conflict in drain.writer.log.conflicts
                    }
                if turn < 3:
                    continue
                there = {node.content for node in read_tree(directory / "source").values()}
                for random_changes, drain in zip(writers, drains, strict=True):
                    lost = missing(random_changes._model, drain, there)
                    assert not lost, f"seed {number}, writer {random_changes.number}: {lost}"
                    torn = torn_unheard(directory / "source", random_changes, writers, drain)
                    assert not torn, f"seed {number}, writer {random_changes.number}: {torn}"
        for random_changes in writers:
            # The next mount removes the objects of files that were open and had no name.
            random_changes._model.journal.close()
        # Of most of those that always run one writer, which costs a fifth.
        for random_changes in [chance.choice(writers)] if 10 <= number < 200 else writers:
            await mounted_again(directory, random_changes, monkeypatch, chance)
        shutil.rmtree(directory)


async def mounted_again(
    directory: Path, random_changes: Writer, monkeypatch: pytest.MonkeyPatch, chance: random.Random
) -> None:
    """Mounts what one of the writers has left, in two ways: none of its bytes are lost."""
    model = random_changes._model
    rig = Rig(directory, monkeypatch, directory / f"{random_changes.number}")
    (rig.root / "boot").write_text(f"{model.boot}\n")
    # Each writer has a state directory of its own.
    rig.states = 100 * (1 + random_changes.number)
    shared = {"writeback": {"shared": True}}
    for kind in chance.sample(sorted({*KINDS} - {"full"}), 2):
        async with rig.mount(**shared, **how(kind, rig)) as session:
            shown = {it.content for it in session.shown().values()}
            there = {it.content for it in tree_of(rig.source).values()}
            lost = written(model).keys() - shown - there - put_aside(rig, model)
            assert not lost, f"writer {random_changes.number}, mounted as {kind}: {lost}"
            await session.at_rest()
            await session.end(abandoned=True)
    there = {it.content for it in tree_of(rig.source).values()}
    owed, kept = rig.left.owed(), put_aside(rig, model)
    lost = {
        content
        for content, path in written(model).items()
        if content not in there | kept and model.tree[path].object not in owed
    }
    assert not lost, f"writer {random_changes.number}: {lost}"


def put_aside(rig: Rig, model: Model) -> set[bytes]:
    """The bytes that the machine's end has left of files that were never synced: `monarch ckpt`
    names them."""
    synced = {node.content for node in model.tree.values() if node.is_kept}
    found = {each.file.read_bytes() for each in Doubtful(rig.directory).list()}
    return found - synced


@pytest.mark.finding("W8")
@pytest.mark.promise(149)
@pytest.mark.fault("N1")
async def test_a_directory_of_two_writers_that_one_renames_is_named_by_the_other(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    one, other = models(tmp_path, 2)
    for model in (one, other):
        async with draining(model) as drain:
            model.mkdir(b"tmp")
            model.write(b"tmp/%d" % id(model), b"before")
            await drain.progress.settle()
    one.rename(b"tmp", b"step")
    async with draining(one, one.kill()) as drain:
        await drain.progress.settle()
        assert drain.backlog().conflicts == 0
    # What one has renamed has all that the source had then, and no more comes into it.
    other.write(b"tmp/late", b"late")
    async with draining(other, other.kill()) as drain:
        await drain.progress.settle()
        (conflict,) = drain.writer.log.conflicts
        assert conflict.path == b"tmp" and "by others, or renamed" in conflict.why
    source = tmp_path / "source"
    assert len(os.listdir(source / "step")) == 2 and os.listdir(source / "tmp") == ["late"]


def kept(source: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in source.rglob("*.monarch-conflict-*"))


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
async def test_a_second_name_that_others_took_is_kept_beside(
    model: Model, clock: trio.testing.MockClock
) -> None:
    async with draining(model) as drain:
        model.write(b"x", b"first")
        model.link(b"x", b"y")
        await drain.progress.wait(model.last_seq)
        (model.source / "y").unlink()
        (model.source / "y").write_bytes(b"theirs")
        model.write(b"x", b"second")
        model.write(b"z", b"third")
        # On the mount the bytes have one name now, which is another's at the source.
        model.rename(b"z", b"x")
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 1
    assert (model.source / "y").read_bytes() == b"theirs"
    assert (model.source / "x").read_bytes() == b"third"
    assert kept(model.source) == [b"second"]


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
async def test_a_link_that_others_made_between_the_same_names_stays_theirs(
    model: Model, clock: trio.testing.MockClock
) -> None:
    async with draining(model) as drain:
        model.write(b"x", b"first")
        await drain.progress.wait(model.last_seq)
        # Others make both names lead to a file of theirs.
        (model.source / "x").unlink()
        (model.source / "x").write_bytes(b"theirs")
        (model.source / "y").hardlink_to(model.source / "x")
        model.write(b"x", b"second version")
        await drain.progress.wait(model.last_seq)
        model.link(b"x", b"y")
        await drain.progress.wait(model.last_seq)
        model.write(b"x", b"third")
        await drain.progress.wait(model.last_seq)
    assert (model.source / "x").read_bytes() == (model.source / "y").read_bytes() == b"theirs"
    assert {b"second version", b"third"} <= set(kept(model.source))


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
async def test_a_file_of_others_with_the_size_and_time_of_a_hard_link_is_no_copy_of_it(
    model: Model, clock: trio.testing.MockClock
) -> None:
    async with draining(model) as drain:
        model.write(b"x", b"first!")
        model.link(b"x", b"y")
        await drain.progress.wait(model.last_seq)
        time_ns = (model.source / "x").stat().st_mtime_ns
        (model.source / "y").unlink()
        (model.source / "y").write_bytes(b"theirs")
        os.utime(model.source / "y", ns=(time_ns, time_ns))
        model.write(b"x", b"second")
        await drain.progress.wait(model.last_seq)
    assert (model.source / "y").read_bytes() == b"theirs"
    assert (model.source / "x").read_bytes() == b"second"
    assert kept(model.source) == [b"second"]


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
async def test_two_mounts_of_one_node_name_their_conflicts_differently(
    tmp_path: Path, clock: trio.testing.MockClock
) -> None:
    one, other = models(tmp_path, 2)
    for model, content in ((one, b"one"), (other, b"other")):
        model.begin(b"a")
        async with draining(model) as drain:
            (model.source / "a").write_bytes(b"theirs " + content)
            model.write(b"a", content)
            await drain.progress.wait(model.last_seq)
    assert kept(tmp_path / "source") == [b"one", b"other"]


@pytest.mark.promise(79, 116)
async def test_a_change_of_a_hard_link_is_known_to_the_rename_that_follows_at_once(
    model: Model, clock: trio.testing.MockClock
) -> None:
    replaced = model.tree[b"b"]
    async with draining(model) as drain:
        # The bytes of the file that replaces one of two names never come to the source.
        node = model.create(b"new")
        node.writers = 1
        model.store(node, b"half of it")
        model.content(node)
        model.rename(b"new", b"b")
        model.store(node, b"all of it")
        await until(lambda: not drain.queue)
        # In one turn of the drain the replaced file gets another time, by its other name, and the
        # name at which it still is at the source is given up.
        model.tree[b"c"].mtime_ns = time_ns = 10**18
        ino, was = replaced.ino, replaced.was
        model.record(Op(kind="attr", path=b"c", ino=ino, mtime_ns=time_ns, was=was))
        model.rename(b"b", b"d/new")
        model.unlink(b"d/new")
        model.end(node)
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 0
    model.check_all_is_there()


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
def test_a_file_of_others_with_a_reused_inode_number_is_not_taken_for_monarchs(
    tmp_path: Path,
) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    found = (tmp_path / "theirs").stat()
    ours = Identity(found.st_size, found.st_mtime_ns, 0, found.st_ino)
    assert Expected(ours=frozenset({ours})).is_it(found, strict=True)
    for other in (replace(ours, size=5), replace(ours, mtime_ns=ours.mtime_ns + 1)):
        assert not Expected(ours=frozenset({other})).is_it(found, strict=True)
    # A journal of an older version has nothing but the number.
    older = replace(ours, size=ANY_SIZE, mtime_ns=0)
    assert Expected(ours=frozenset({older})).is_it(found, strict=True)


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
async def test_bytes_that_others_wrote_into_a_file_stay_where_they_are(
    model: Model, clock: trio.testing.MockClock
) -> None:
    async with draining(model) as drain:
        model.write(b"x", b"first")
        await drain.progress.wait(model.last_seq)
        (model.source / "x").write_bytes(b"theirs")
        model.chmod(b"x", 0o600)
        model.rename(b"x", b"y")
        await drain.progress.wait(model.last_seq)
        assert drain.backlog().conflicts == 1
        model.write(b"y", b"second")
        await drain.progress.wait(model.last_seq)
    assert (model.source / "x").read_bytes() == b"theirs"
    assert (model.source / "y").read_bytes() == b"second"


def in_place(path: Path) -> None:
    path.write_bytes(b"theirs")


def on_the_same_number(path: Path, make: Callable[[Path], object] = in_place) -> None:
    """As a file system that gives a number again at once."""
    number = path.stat().st_ino
    path.unlink()
    for _ in range(200):
        make(path)
        if path.stat().st_ino == number:
            return
        path.rename(path.with_name(f"{path.name}.other-{time.monotonic_ns()}"))
    pytest.skip("this file system gave the number to no other file")


@pytest.mark.finding("W15")
@pytest.mark.promise(79)
@pytest.mark.fault("N1")
@pytest.mark.parametrize("theirs", [in_place, on_the_same_number])
@pytest.mark.parametrize(
    "change", ["unlink", "rename", "append rename", "append unlink", "replace"]
)
async def test_files_that_others_wrote_meanwhile_are_neither_removed_nor_renamed(
    model: Model, clock: trio.testing.MockClock, theirs: Callable[[Path], None], change: str
) -> None:
    for step in change.split():
        match step:
            case "unlink":
                model.unlink(b"a")
            case "rename":
                model.rename(b"a", b"x")
            case "append":
                model.append(model.begin(b"a"), b" and more")
                model.end(model.tree[b"a"])
            case "replace":
                model.write(b"x", b"new")
                model.rename(b"x", b"a")
    theirs(model.source / "a")
    replay = model.kill()
    async with draining(model, replay) as drain:
        await drain.progress.settle()
        conflicts = [conflict.path for conflict in drain.writer.log.conflicts]
    assert (model.source / "a").read_bytes() == b"theirs"
    assert set(conflicts) == {b"a"}
    ours = {"append rename": b"old a and more", "replace": b"new"}.get(change)
    found = [path.read_bytes() for path in model.source.iterdir() if path.is_file()]
    assert ours is None or ours in found


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
@pytest.mark.parametrize("change", ["append", "unlink", "rename"])
async def test_a_fifo_of_others_is_not_taken_for_a_file(
    model: Model, clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    # A source that reports no times of creation.
    for module in (source_contents, source_entries):
        monkeypatch.setattr(module, "born_ns", lambda fd, name=b"": None)
    async with draining(model) as drain:
        model.write(b"empty", b"")
        await drain.progress.wait(model.last_seq)
    for name in ("a", "empty"):
        path = os.fsencode(name)
        if change == "append":
            model.append(model.begin(path), b" and more")
            model.end(model.tree[path])
        elif change == "unlink":
            model.unlink(path)
        else:
            model.rename(path, path + b"-renamed")
        on_the_same_number(model.source / name, os.mkfifo)
    async with draining(model, model.kill()) as drain:
        await drain.progress.settle()
        assert {conflict.path for conflict in drain.writer.log.conflicts} == {b"a", b"empty"}
    for name in ("a", "empty"):
        assert (model.source / name).is_fifo()


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
async def test_a_time_set_on_the_mount_does_not_claim_bytes_of_others(
    model: Model, clock: trio.testing.MockClock
) -> None:
    model.begin(b"a")
    model.end(model.tree[b"a"])
    model.utime(b"a", 10**18)
    in_place(model.source / "a")
    theirs = (model.source / "a").stat().st_mtime_ns
    async with draining(model, model.kill()) as drain:
        await drain.progress.settle()
        model.write(b"a", b"ours")
        await drain.progress.settle()
    assert (model.source / "a").read_bytes() == b"theirs"
    assert (model.source / "a").stat().st_mtime_ns == theirs
    assert b"ours" in kept(model.source)
