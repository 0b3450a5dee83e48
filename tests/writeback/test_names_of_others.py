"""Names that others make and remove at the source, in directories that a mount absorbs."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from monarch.daemon.write_status import LossAlarm
from monarch.daemon.write_verbs import WrittenVerbs
from monarch.errors import Refused, SourceError
from monarch.fuse.handlers import Handlers
from monarch.types import Attributes, Ino
from monarch.writeback import others, write_gate
from monarch.writeback.others import LOOK_S
from tests.equipment import remounts
from tests.equipment.remounts import tree_of
from tests.writeback import remount_histories
from tests.writeback.remounts import ROOT, Rig, Session

pytestmark = [pytest.mark.promise(148), pytest.mark.fault("N5")]

Clock = trio.testing.MockClock


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "d").mkdir()
    for name in ("d/theirs", "d/other"):
        (rig.source / name).write_bytes(b"old")
    return rig


def use(session: Session, *paths: bytes) -> None:
    others = session.write_back.others
    assert others is not None
    for path in paths:
        assert others.used(session.ino(path))


async def listed(session: Session) -> None:
    """All that is shown was listed, as by a process that goes through the tree."""
    others = session.write_back.others
    assert others is not None
    for _ in range(5):
        for path, it in session.shown().items():
            if it.kind == "dir":
                await others.listed(session.ino(path))
                others.used(session.ino(path))


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(10_000):
        while not holds():
            await trio.sleep(0.5)


async def looked(session: Session) -> None:
    """Used directories were checked. The threads that do so know nothing of this clock."""
    others = session.write_back.others
    assert others is not None
    # A look that waited for a thread seems to have taken seconds of this clock, so the next one
    # would be put off for minutes.
    others._next_s.clear()
    for _ in range(4 * LOOK_S + 2):
        await trio.sleep(0.5)
        while (
            others._looking
            or others._threads._under_way
            or session.source_calls._threads._under_way
        ):
            threading.Event().wait(0.0005)
            await trio.lowlevel.checkpoint()


def handlers_of(session: Session) -> Handlers:
    filesystem: Any = SimpleNamespace(
        names=session.names,
        others=session.write_back.others,
        writing=session.front,
        latest=lambda attributes: attributes,
    )
    return Handlers(filesystem, None, lambda what: None, lambda *hint: 0)


async def test_files_of_others_are_not_listed_as_written(rig: Rig, clock: Clock) -> None:
    async with rig.mount() as session:
        await session.write(b"d/mine", b"mine")
        await session.write(b"d/other", b"written here")
        await session.chmod(b"d/theirs", 0o600)
        use(session, b"d")
        (rig.source / "d/new").write_bytes(b"new")
        await looked(session)
        await listed(session)
        assert b"d/new" in session.shown()
        assert await written(session) == ["d/mine", "d/other", "d/theirs"]
        await session.drained()
        drained = session.write_back.front.drained
        drained.release_oldest(1 << 30)
        assert await written(session) == ["d/mine", "d/other", "d/theirs"]


async def written(session: Session) -> list[str]:
    """The files that ``monarch ckpt ls`` lists, and among which ``--newest`` chooses."""
    verbs = WrittenVerbs(
        names=session.names,
        write_back=session.write_back,
        loss_alarm=LossAlarm(session.rig.state),
    )

    async def send(part: object) -> None:
        raise AssertionError("it is one answer")

    answer = await verbs.table()["written"]({}, send)
    return sorted(file["path"] for file in answer["files"])


async def test_names_that_others_make_and_remove_are_shown(rig: Rig, clock: Clock) -> None:
    async with rig.mount() as session:
        await session.write(b"d/mine", b"mine")
        await session.drained()
        use(session, b"d")
        (rig.source / "d/theirs").unlink()
        (rig.source / "d/mine").unlink()
        (rig.source / "d/new").write_bytes(b"new")
        (rig.source / "d/link").symlink_to("new")
        (rig.source / "d/deep/er").mkdir(parents=True)
        (rig.source / "d/deep/er/file").write_bytes(b"deep")
        await looked(session)
        await listed(session)
        shown = session.shown()
        assert shown.keys() == tree_of(rig.source).keys()
        assert shown[b"d/new"].content == b"new" and shown[b"d/link"].target == b"new"
        assert shown[b"d/deep/er/file"].content == b"deep"
        # They can be changed like any other.
        await session.write(b"d/new", b"changed here")
        await session.rename(b"d/new", b"d/deep/new")
        with pytest.raises(Refused) as refused:
            await session.rename(b"d/deep", b"d/moved")
        assert refused.value.errno == errno.EXDEV
        await session.drained()
        assert (rig.source / "d/deep/new").read_bytes() == b"changed here"
        shutil.rmtree(rig.source / "d/deep")
        await looked(session)
        assert set(session.shown()) == {b"d", b"d/other", b"d/link"}
        assert session.write_back.drain.backlog().conflicts == 0


async def test_with_other_writers_the_first_use_of_a_directory_waits_for_its_names(
    rig: Rig, patient_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.mount() as session:
        others = session.write_back.others
        assert others is not None
        others._waits = True
        # This process may be stopped for a while.
        monkeypatch.setattr(others._threads, "oldest_s", lambda: 0.0)
        handlers, ino = handlers_of(session), session.ino(b"d")
        for use in ("first", "after a while"):
            (rig.source / "d" / use).write_bytes(b"new")
            (rig.source / "d" / f"{use}, too").mkdir()
            found: list[Attributes | int] = []

            async def look_up(name: str, found: list[Attributes | int] = found) -> None:
                found.append(await handlers.lookup(ino, name.encode()))

            async with trio.open_nursery() as nursery:
                for name in (use, f"{use}, too", use):
                    nursery.start_soon(look_up, name)
            assert [isinstance(each, Attributes) for each in found] == [True] * 3
            # A directory that is used is compared in its turn.
            assert await handlers.lookup(ino, b"none") == LOOK_S
            assert not await others.catch_up(ino)
            await trio.sleep(700)


async def test_no_process_waits_long_for_names_at_a_source_that_hangs_or_is_slow(
    rig: Rig, patient_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (rig.source / f"d{number}").mkdir()
    # The time that was waited is forgotten in each interval.
    monkeypatch.setattr("monarch.writeback.others.LOOK_S", 10**6)
    async with rig.mount() as session:
        others = session.write_back.others
        assert others is not None
        others._waits = True
        inos = [session.ino(b"d%d" % number) for number in range(4)]
        run, slow_s = others._threads.run, [0.6, 0.6, 0.6, 1e6]

        async def slow(function: Any, *args: Any) -> Any:
            await trio.sleep(slow_s.pop(0))
            return await run(function, *args)

        monkeypatch.setattr(others._threads, "run", slow)
        begun = trio.current_time()
        assert [await others.catch_up(ino) for ino in inos[:3]] == [True, True, False]
        assert trio.current_time() == pytest.approx(begun + 1.2)
        del slow_s[:-1]
        others._waited_s = 0.0
        assert await others.catch_up(inos[3])
        assert trio.current_time() == pytest.approx(begun + 2.2)
        assert not others._looking and not others._first


@pytest.mark.parametrize("is_young", [True, False])
async def test_a_name_that_came_in_the_tick_of_the_snapshot_is_shown(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_young: bool
) -> None:
    """The directory has the times of the snapshot. If they are older, it is not listed."""
    times = others._seen((rig.source / "d").stat())
    monkeypatch.setattr(others, "settled_ns", lambda snapshot: max(times[1:]) + (not is_young))
    monkeypatch.setattr(others, "_seen", lambda status: times)
    async with rig.mount() as session:
        (rig.source / "d/new").write_bytes(b"new")
        use(session, b"d")
        await looked(session)
        assert (b"d/new" in session.shown()) is is_young


@pytest.mark.fault("M5")
@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
async def test_names_that_come_in_one_tick_are_shown_whatever_the_clock_of_the_node(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + ahead_s * 10**9)
    times = others._seen((rig.source / "d").stat())
    monkeypatch.setattr(others, "_seen", lambda status: times)
    async with rig.mount() as session:
        it = session.write_back.others
        assert it is not None
        use(session, b"d")
        for name in ("one", "two"):
            (rig.source / "d" / name).write_bytes(b"new")
            await it._look_if_possible(session.ino(b"d"))
            assert os.fsencode(f"d/{name}") in session.shown()


async def test_a_directory_that_rests_is_listed_until_its_times_were_seen_for_two_seconds(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, now_s, listings = others._listed, 1000.0, []

    def counted(root: int, *arguments: Any) -> Any:
        answer = listed(root, *arguments)
        listings.append(answer.names is not None)
        return answer

    monkeypatch.setattr(others, "_listed", counted)
    monkeypatch.setattr(others, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with rig.mount() as session:
        it = session.write_back.others
        assert it is not None
        use(session, b"d")
        for _ in range(4):
            await it._look_if_possible(session.ino(b"d"))
            now_s += 1
        assert listings == [True, True, True, False]
        (rig.source / "d/new").write_bytes(b"new")
        await it._look_if_possible(session.ino(b"d"))
        assert b"d/new" in session.shown() and listings[4:] == [True]


async def test_names_that_the_source_does_not_have_yet_stay(rig: Rig, clock: Clock) -> None:
    async with rig.mount(works=False) as session:
        use(session, b"d")
        await session.write(b"d/mine", b"mine")
        session.unlink(b"d/theirs")
        await session.rename(b"d/other", b"d/renamed")
        await session.mkdir(b"d/empty")
        await session.symlink(b"d/link", b"mine")
        await session.mkdir(b"d/made")
        await session.write(b"d/made/file", b"beneath")
        (rig.source / "d/new").write_bytes(b"new")
        before = set(session.shown())
        await looked(session)
        assert set(session.shown()) == before | {b"d/new"}
        assert session.shown()[b"d/mine"].content == b"mine"


@pytest.mark.promise(79)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("removed", ["sub", "other"])
async def test_a_removed_name_that_the_source_keeps_for_others_is_shown_again(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, removed: str, is_known: bool
) -> None:
    """The directory above has the same times at the source. ``is_known``: it was compared."""
    # A directory that was changed a moment ago is listed again in any case.
    monkeypatch.setattr(others, "_YOUNG_S", 0.0)
    (rig.source / "d/sub").mkdir()
    async with rig.mount() as session:
        if is_known:
            (rig.source / "d/new").write_bytes(b"new")
            use(session, b"d")
            await looked(session)
        for name in ("sub/theirs", "other"):
            (rig.source / "d" / name).write_bytes(b"of others")
        handlers, ino = handlers_of(session), session.ino(b"d")
        if removed == "sub":
            await handlers.rmdir(ino, b"sub", ROOT)
        else:
            await handlers.unlink(ino, b"other", ROOT)
        await session.drained()
        await looked(session)
        assert b"d/" + os.fsencode(removed) in session.shown()
        there = {path: it.content for path, it in tree_of(rig.source).items() if it.kind == "file"}
        assert await all_shown(session) == there
        assert there[b"d/other"] == there[b"d/sub/theirs"] == b"of others"


async def all_shown(session: Session) -> dict[bytes, bytes]:
    """The contents that a process finds that goes through the tree, and later once more."""
    await listed(session)
    await looked(session)
    return {path: it.content for path, it in session.shown().items() if it.kind == "file"}


@pytest.mark.promise(78, 79)
@pytest.mark.parametrize("instead", ["directory", "file", "link", "renamed"])
async def test_files_of_others_in_a_directory_that_was_replaced_are_shown(
    rig: Rig, clock: Clock, instead: str
) -> None:
    (rig.source / "d/sub").mkdir()
    async with rig.mount() as session:
        await session.mkdir(b"made")
        await session.write(b"made/mine", b"mine")
        await session.drained()
        handlers, ino = handlers_of(session), session.ino(b"d")
        (rig.source / "d/sub/theirs").write_bytes(b"of others")
        await handlers.rmdir(ino, b"sub", ROOT)
        match instead:
            case "directory":
                await handlers.make(ino, b"sub", stat.S_IFDIR | 0o755, 0, ROOT)
            case "file":
                await session.write(b"d/sub", b"mine")
            case "link":
                await session.symlink(b"d/sub", b"other")
            case "renamed":
                await handlers.rename(session.ino(b""), b"made", ino, b"sub", 0, ROOT)
        await session.drained()
        for _ in range(2):
            shown = await all_shown(session)
        there = {path: it.content for path, it in tree_of(rig.source).items() if it.kind == "file"}
        assert shown == there and shown[b"d/sub/theirs"] == b"of others"
        assert sorted(shown.values()).count(b"mine") == (2 if instead == "file" else 1)


@pytest.mark.promise(79)
@pytest.mark.parametrize("is_shown", [True, False])
async def test_files_of_others_in_a_directory_that_was_renamed_are_shown(
    rig: Rig, clock: Clock, is_shown: bool
) -> None:
    async with rig.mount() as session:
        await session.mkdir(b"made")
        await session.mkdir(b"made/sub")
        await session.write(b"made/mine", b"mine")
        await session.drained()
        handlers = handlers_of(session)
        (rig.source / "made/deep").mkdir()
        for name in ("made/theirs", "made/deep/theirs"):
            (rig.source / name).write_bytes(b"of others")
        if is_shown:
            use(session, b"made")
            await looked(session)
            await listed(session)
            assert b"made/deep/theirs" in session.shown()
        (rig.source / "made/sub/theirs").write_bytes(b"of others")
        await handlers.rmdir(session.ino(b"made"), b"sub", ROOT)
        await handlers.rename(session.ino(b""), b"made", session.ino(b"d"), b"made", 0, ROOT)
        await session.drained()
        for _ in range(2):
            shown = await all_shown(session)
        there = {path: it.content for path, it in tree_of(rig.source).items() if it.kind == "file"}
        assert shown == there and len(there) == 6


@pytest.mark.promise(128)
@pytest.mark.parametrize("kind", sorted({*remounts.KINDS} - {"full"}))
async def test_files_of_others_in_a_directory_whose_removal_waited_are_shown(
    rig: Rig, clock: Clock, kind: str
) -> None:
    (rig.source / "d/sub").mkdir()
    async with rig.mount(works=False) as session:
        session.rmdir(b"d/sub")
    (rig.source / "d/sub/theirs").write_bytes(b"of others")
    there = {b"d/theirs": b"old", b"d/other": b"old", b"d/sub/theirs": b"of others"}
    async with rig.mount(**remount_histories.how(kind, rig)) as session:
        # What is there in a new snapshot does not wait for the drain.
        assert (b"d/sub" in session.shown()) is (kind == "lost state")
        await session.drained()
        if session.write_back.others is not None and kind != "elsewhere":
            use(session, b"d")
            await looked(session)
            assert await all_shown(session) == there
        await session.end()
    async with rig.mount() as session:
        shown = session.shown()
        assert {path: it.content for path, it in shown.items() if it.kind == "file"} == there
        await session.end()


@pytest.mark.promise(134)
@pytest.mark.parametrize("name", ["one", "two"])
async def test_modes_and_attributes_come_to_the_names_that_others_have_not_taken(
    rig: Rig, clock: Clock, name: str
) -> None:
    async with rig.mount() as session:
        await session.write(b"one", b"mine")
        await session.link(b"one", b"two")
        await session.drained()
        other = rig.source / ("two" if name == "one" else "one")
        (rig.source / "beside").write_bytes(b"of others")
        (rig.source / "beside").chmod(0o604)
        (rig.source / "beside").rename(rig.source / name)
        await session.chmod(os.fsencode(other.name), 0o600)
        await session.setxattr(os.fsencode(other.name), b"user.a", b"1")
        await session.drained()
        assert stat.S_IMODE(other.stat().st_mode) == 0o600
        assert os.listxattr(other) == ["user.a"]
        assert stat.S_IMODE((rig.source / name).stat().st_mode) == 0o604
        assert os.listxattr(rig.source / name) == []
        assert session.write_back.drain.backlog().conflicts == 0


async def test_a_file_made_and_drained_while_its_directory_is_listed_stays(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.mount() as session:
        others = session.write_back.others
        assert others is not None
        use(session, b"d")
        await looked(session)
        run, made = others._threads.run, []

        async def late(function: Any, *args: Any) -> Any:
            answer = await run(function, *args)
            if not made:
                made.append(function)
                await session.write(b"d/mine", b"mine")
                await session.drained()
            return answer

        monkeypatch.setattr(others._threads, "run", late)
        (rig.source / "d/new").write_bytes(b"new")
        # One look only: the next would find it at the source.
        await until(lambda: b"d/new" in session.shown())
        assert made and {b"d/mine", b"d/new"} <= session.shown().keys()


async def test_a_file_that_is_open_or_was_replaced_elsewhere(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A directory that was changed a moment ago is listed again in any case.
    monkeypatch.setattr(others, "_YOUNG_S", 0.0)
    async with rig.mount() as session:
        for name in (b"d/open", b"d/latest"):
            await session.write(name, b"step 1")
        await session.drained()
        use(session, b"d")
        ino = await session.open(b"d/open")
        (rig.source / "d/open").unlink()
        (rig.source / "beside").write_bytes(b"step 2 of others")
        (rig.source / "beside").rename(rig.source / "d/latest")
        await looked(session)
        shown = session.shown()
        assert shown[b"d/latest"].content == b"step 2 of others"
        # A process that has it open may still write it.
        assert shown[b"d/open"].content == b"step 1"
        session.files.release(ino)
        await looked(session)
        assert b"d/open" not in session.shown()


async def test_a_file_that_was_not_written_is_hidden_when_others_have_removed_it(
    rig: Rig, clock: Clock
) -> None:
    async with rig.mount(works=False) as session:
        # Its bytes are copied, and not changed.
        await session.setxattr(b"d/theirs", b"trusted.note", b"1")
        await session.utime(b"d/other", 10**18)
        await session.write(b"d/new", b"new", synced=True)
    for name in ("theirs", "other"):
        (rig.source / "d" / name).unlink()
    rig.lose_state()
    async with rig.mount(works=False) as session:
        use(session, b"d")
        await looked(session)
        # They wait for the drain. Nothing of a file waits if only its attributes were changed.
        assert session.shown().keys() == {b"d", b"d/theirs", b"d/new"}
    async with rig.mount() as session:
        await session.drained()
        use(session, b"d")
        await looked(session)
        assert session.shown().keys() == tree_of(rig.source).keys() == {b"d", b"d/new"}
        await session.end()


@pytest.mark.promise(133)
async def test_a_name_that_a_file_gets_after_a_conflict_has_its_bytes(
    rig: Rig, clock: Clock
) -> None:
    async with rig.mount() as session:
        ino = await session.open(b"d/theirs")
        await session.files.write(ino, 0, b"mine")
        (rig.source / "beside").write_bytes(b"of others")
        (rig.source / "beside").rename(rig.source / "d/theirs")
        session.files.release(ino)
        await session.drained()
        assert session.write_back.drain.backlog().conflicts == 1
        await session.link(b"d/theirs", b"d/second")
        await session.link(b"d/second", b"third")
        await session.drained()
        assert (rig.source / "d/theirs").read_bytes() == b"of others"
        assert (rig.source / "d/second").read_bytes() == b"mine"
        assert (rig.source / "third").samefile(rig.source / "d/second")


@pytest.mark.promise(133)
@pytest.mark.parametrize("name", [b"d/one", b"d/two"])
async def test_a_drained_file_does_not_show_the_bytes_of_what_took_one_of_its_names(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    monkeypatch.setattr(write_gate, "_MOST_DRAINED", 0)
    async with rig.mount() as session:
        await session.write(b"d/one", b"mine")
        await session.link(b"d/one", b"d/two")
        await session.drained()
        await trio.sleep(10)
        use(session, b"d")
        ino = session.ino(name)
        assert not session.names.copy_up(ino).object
        (rig.source / "beside").write_bytes(b"of others")
        (rig.source / "beside").rename(rig.source / os.fsdecode(name))
        with suppress(Refused, SourceError):
            session.files.release(await session.open(name, os.O_RDONLY))
        other = b"d/two" if name == b"d/one" else b"d/one"
        assert session.ino(other) == ino
        assert session.shown()[other].content == b"mine"
        await looked(session)
        assert session.shown()[other].content == b"mine"
        assert session.shown()[name].content == b"of others"


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
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    at, path = rig.source / name, name.encode()
    async with rig.mount() as session:
        if name != "d/theirs":
            await session.write(path, b"written here")
            await session.drained()
        use(session, b"d")
        await looked(session)
        if name == "d/dropped":
            assert session.front.drained.release_oldest(1 << 30)
        if name != "d/theirs":
            monkeypatch.setattr(session.front.opens, "fast", Readers(session.read))
        ino = session.ino(path)
        was = session.names.attributes(ino)
        session.read.add(ino)
        if name != "d/theirs" and content:
            (rig.source / "beside").write_bytes(content)
            (rig.source / "beside").rename(at)
        else:
            at.unlink()
        await looked(session)
        assert session.names.attributes(ino) == was and session.ino(path) == ino
        # Nothing more changes in the directory.
        session.read.clear()
        await looked(session)
        shown = session.shown()
        assert shown[path].content == content if at.exists() else path not in shown


@pytest.mark.promise(5, 147)
async def test_a_file_that_is_given_up_is_read_to_its_end(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.mount() as session:
        await session.write(b"d/mine", b"mine")
        ino = session.ino(b"d/mine")
        monkeypatch.setattr(session.front.opens, "fast", Readers(session.read))
        session.read.add(ino)
        session.writing.take_away(*session.at(b"d/mine"), by=ROOT)
        assert session.names.attributes(ino).size == 4
        session.read.clear()
        session.front.unlinked.closed_by_readers(ino)
        await until(lambda: session.names.is_forgotten(ino))


KINDS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"now a file"),
    "empty": lambda path: path.mkdir(),
    "full": lambda path: [
        (path / "deep").mkdir(parents=True),
        (path / "deep/in").write_bytes(b"in"),
    ],
    "link": lambda path: path.symlink_to("other"),
    "fifo": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("of", KINDS)
async def test_a_name_that_is_of_another_kind_by_now(
    rig: Rig, clock: Clock, of: str, to: str, is_new: bool
) -> None:
    at = rig.source / "d/it"
    if not is_new:
        KINDS[of](at)
    async with rig.mount() as session:
        use(session, b"d")
        if is_new:
            KINDS[of](at)
        await looked(session)
        await listed(session)
        assert b"d/it" in session.shown()
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink()
        KINDS[to](at)
        await looked(session)
        await listed(session)
        await looked(session)
        shown = {path: it.bare for path, it in session.shown().items()}
        there = {path: it.bare for path, it in tree_of(rig.source).items()}
        assert shown.keys() == there.keys()
        assert shown[b"d/it"] == there[b"d/it"]


async def test_a_link_that_was_made_here_and_leads_elsewhere_by_now(rig: Rig, clock: Clock) -> None:
    async with rig.mount() as session:
        await session.symlink(b"d/latest", b"step-1")
        await session.drained()
        use(session, b"d")
        await looked(session)
        (rig.source / "d/beside").symlink_to("step-2")
        (rig.source / "d/beside").rename(rig.source / "d/latest")
        await looked(session)
        assert session.shown()[b"d/latest"].target == b"step-2"


async def test_only_used_directories_are_checked_and_only_if_they_are_absorbed(
    rig: Rig, clock: Clock
) -> None:
    (rig.source / "ckpt").mkdir()
    async with rig.mount(write="none", absorb=["ckpt/**"]) as session:
        others = session.write_back.others
        assert others is not None
        assert not others.used(session.ino(b"d"))
        use(session, b"", b"ckpt")
        for name in ("new", "d/new", "ckpt/new"):
            (rig.source / name).write_bytes(b"new")
        await looked(session)
        assert b"ckpt/new" in session.shown()
        assert not {b"new", b"d/new"} & session.shown().keys()
        # After a while without use it costs no call any more.
        await trio.sleep(700)
        (rig.source / "ckpt/later").write_bytes(b"later")
        await looked(session)
        assert b"ckpt/later" not in session.shown()
    async with rig.mount(freshness="never") as session:
        assert session.write_back.others is None


async def test_names_of_other_writers_are_shown_although_the_source_never_changes(
    rig: Rig, clock: Clock
) -> None:
    async with rig.mount(freshness="never", writeback={"shared": True}) as session:
        use(session, b"d")
        (rig.source / "d/new").write_bytes(b"new")
        (rig.source / "d/theirs").unlink()
        await looked(session)
        assert set(session.shown()) == {b"d", b"d/new", b"d/other"}


@pytest.mark.promise(10)
async def test_a_file_that_others_removed_is_gone_also_where_names_were_changed_here(
    rig: Rig, clock: Clock
) -> None:
    async with rig.mount(works=False) as session:
        (rig.source / "d/theirs").unlink()
        # The directory has a later time on the mount than at the source.
        await session.write(b"d/mine", b"mine")
        with pytest.raises(SourceError) as raised:
            await session.front.source._revalidate(session.ino(b"d/theirs"))
        assert raised.value.errno == errno.ENOENT
        assert set(session.kinds()) == {b"d", b"d/other", b"d/mine"}


@pytest.mark.parametrize("seed", range(20))
async def test_a_mount_shows_what_the_source_has_when_all_rest(
    rig: Rig, clock: Clock, seed: int
) -> None:
    chance = random.Random(seed)
    async with rig.mount() as session:
        use(session, b"", b"d")
        for _ in range(60):
            with suppress(Refused, SourceError, OSError):
                await chance.choice([change_here, change_there, wait])(session, chance)
            await listed(session)
        await session.drained()
        await looked(session)
        await listed(session)
        await looked(session)
        shown = {path: it.bare for path, it in session.shown().items()}
        there = {path: it.bare for path, it in tree_of(rig.source).items()}
        assert shown.keys() == there.keys()
        for path, it in there.items():
            assert it[0] == "dir" or shown[path] == it, path
        assert session.write_back.drain.backlog().conflicts == 0
        if seed % 2:
            await session.end()
    # A mount that never compares names does not see what others have changed.
    kinds = sorted({*remounts.KINDS} - {"never"})
    for kind in (kinds[seed % len(kinds)], "same"):
        async with rig.mount(**remount_histories.how(kind, rig)) as session:
            shown = {path: it.bare for path, it in session.shown().items()}
            assert shown == there, kind
            await session.drained()
            await session.end()
    assert {path: it.bare for path, it in tree_of(rig.source).items()} == there


async def wait(session: Session, chance: random.Random) -> None:
    await trio.sleep(chance.choice([0.01, 1, 12]))


async def change_here(session: Session, chance: random.Random) -> None:
    """Names of its own, in directories of all."""
    above = chance.choice([b"", b"d/", b"d/sub/", b"mine/"])
    path, to = (above + b"mine%d" % chance.randrange(4) for _ in range(2))
    kind = chance.choice(["write", "write", "write", "rename", "unlink", "mkdir", "link"])
    if kind == "write":
        await session.write(path, b"%d here" % chance.randrange(1000))
    elif kind == "rename":
        await session.rename(path, to)
    elif kind == "unlink":
        session.unlink(path)
    elif kind == "link":
        await session.link(path, to)
    else:
        await session.mkdir(b"mine")


async def change_there(session: Session, chance: random.Random) -> None:
    """As another node would: each file by a rename."""
    source = session.rig.source
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
        waiting = [entry.op for entry in session.write_back.drain.queue.entries()]
        if not any(name.startswith(b"d/sub") for op in waiting for name in op.names()):
            shutil.rmtree(source / "d/sub")


@pytest.mark.promise(79)
@pytest.mark.fault("N1")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_file_whose_times_were_set_here_is_no_file_of_others(
    rig: Rig, clock: Clock, is_killed: bool
) -> None:
    async with rig.mount(freshness="never") as session:
        await session.write(b"x", b"bytes")
        await session.drained()
        await session.utime(b"x", 10**18)
        await session.drained()
        if is_killed:
            session.kill()
        else:
            # The source's file is what the mount knows of it from now on.
            assert session.front.drained.release_oldest(1 << 30)
            session.unlink(b"x")
            await session.drained()
    if is_killed:
        async with rig.mount(freshness="never") as session:
            assert session.front.drained.release_oldest(1 << 30)
            session.unlink(b"x")
            await session.drained()
    assert not (rig.source / "x").exists()


@pytest.mark.promise(78)
async def test_a_directory_that_another_user_has_made_opens_no_file_of_that_user(
    rig: Rig, clock: Clock
) -> None:
    """The same directory was made on the mount, with a mode that lets everyone in."""
    async with rig.mount(works=False) as session:
        await session.mkdir(b"e", 0o777)
    (rig.source / "e").mkdir(0o700)
    (rig.source / "e/private").write_bytes(b"private")
    os.chown(rig.source / "e", 1001, 1001)
    async with rig.mount() as session:
        await session.drained()
        await session.looked()
        assert session.shown()[b"e/private"].content == b"private"
        for _ in range(2):
            now = session.names.attributes(session.ino(b"e"))
            assert (stat.S_IMODE(now.mode), now.uid) == (0o700, 1001)
            # Neither does root open it: that is left out at the source.
            await session.chmod(b"e", 0o755)
            await session.drained()
            await session.looked()
    assert stat.S_IMODE((rig.source / "e").stat().st_mode) == 0o700
