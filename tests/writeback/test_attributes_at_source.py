"""Changes of attributes of files of the source: they move attributes, and no bytes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from monarch.errors import Refused, SourceError
from monarch.posix.credentials import Credentials
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity, Ino
from monarch.vfs.filesystem import ExtendedAttributes
from monarch.vfs.measured import MeasuredJobs
from monarch.vfs.read_side import ReadSide
from monarch.vfs.readers import Readers
from monarch.writeback import copy_up, source_entries
from monarch.writeback.earlier import renewed_by_drain
from monarch.writeback.source_entries import SourceEntries
from tests.writeback.remount_histories import how
from tests.writeback.remounts import ROOT, Rig, Session

pytestmark = pytest.mark.promise(172)

MTIME_NS = 1_234_567_890 * 10**9
Change = Callable[[Session], Awaitable[object]]


async def chown(session: Session) -> None:
    await session.front.attributes.change(session.ino(b"a"), uid=12, gid=34, by=ROOT)


CHANGES: dict[str, Change] = {
    "chmod": lambda session: session.chmod(b"a", 0o640),
    "chown": chown,
    "utime": lambda session: session.utime(b"a", MTIME_NS),
    "setxattr": lambda session: session.setxattr(b"a", b"user.note", b"1"),
}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    (rig.source / "a").write_bytes(b"of the source")
    (rig.source / "a").chmod(0o644)
    os.setxattr(rig.source / "a", "user.old", b"0")
    return rig


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Any:
        raise AssertionError("the source is read")

    monkeypatch.setattr(copy_up, "_copy_file", read)
    for name in ("open", "fetch"):
        monkeypatch.setattr(Source, name, read)


def at(rig: Rig, name: str = "a") -> os.stat_result:
    return (rig.source / name).stat()


def known(session: Session, path: bytes = b"a") -> Identity:
    return session.names.stored(session.ino(path)).identity


async def xattrs(session: Session, path: bytes = b"a") -> dict[bytes, bytes]:
    found = await session.front.attributes.xattrs_elsewhere(session.ino(path))
    if found is not None:
        return found
    node = session.names.node(session.ino(path))
    assert node is not None
    return node.xattrs


async def shows(session: Session, kind: str, path: bytes = b"a") -> bool:
    """Whether the mount shows a change of ``CHANGES``."""
    now = session.front.attributes.of(session.ino(path))
    # A mount that absorbs other paths shows only those that the source may lack.
    both = {b"user.old": b"0", b"user.note": b"1"}
    return {
        "chmod": stat.S_IMODE(now.mode) == 0o640,
        "chown": (now.uid, now.gid) == (12, 34),
        "utime": now.mtime_ns == MTIME_NS,
        "setxattr": await xattrs(session, path) in (both, {b"user.note": b"1"}),
    }[kind]


def has(rig: Rig, kind: str, name: str = "a") -> bool:
    """Whether the source has it."""
    now = at(rig, name)
    return {
        "chmod": stat.S_IMODE(now.st_mode) == 0o640,
        "chown": (now.st_uid, now.st_gid) == (12, 34),
        "utime": now.st_mtime_ns == MTIME_NS,
        "setxattr": set(os.listxattr(rig.source / name)) == {"user.old", "user.note"},
    }[kind]


def check_no_object(session: Session, path: bytes = b"a") -> None:
    node = session.names.node(session.ino(path))
    assert node is not None and not node.object
    assert not session.front.operations.has(node.ino)


@pytest.mark.parametrize("kind", CHANGES)
async def test_a_change_is_shown_and_drained_without_a_read_of_the_file(
    kind: str, rig: Rig, no_reads: None
) -> None:
    async with rig.mount() as session:
        await CHANGES[kind](session)
        check_no_object(session)
        assert await shows(session, kind)
        assert session.shown()[b"a"].safety == "source"
        await session.drained()
        assert has(rig, kind) and await shows(session, kind)
        # What the mount knows of the file is what the source has: its copies stay valid.
        assert known(session) == identity_of(at(rig))
        node = session.names.node(session.ino(b"a"))
        assert node is not None and not node.undrained and not node.xattrs
        # Many such files take no memory when they are drained.
        entries = session.write_back.drain.state.entries
        assert not entries.made and not entries._before and not entries._waiting
        assert session.write_back.drain.backlog().conflicts == 0


@pytest.mark.fault("U7")
@pytest.mark.promise(88)
@pytest.mark.parametrize(
    "change",
    [{"by": Credentials(1002, 1002)}, {"by": ROOT, "gid": 12}, {"by": ROOT, "size": 3}],
    ids=["write", "chown", "truncate"],
)
async def test_a_mode_that_the_kernel_sets_takes_set_id_bits_and_no_others(
    rig: Rig, change: dict[str, Any]
) -> None:
    (rig.source / "a").chmod(0o4755)
    async with rig.mount(works=False) as session:
        await session.front.attributes.change(session.ino(b"a"), mode=0o755, **change)
        await session.front.recorder.sync()
    (rig.source / "a").chmod(0o4700)
    async with rig.mount() as session:
        await session.drained()
    assert stat.S_IMODE(at(rig).st_mode) == 0o700


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(
    "remount", ["same", "refresh", "never", "given", "lost state", "boot", "read-only", "elsewhere"]
)
async def test_a_change_that_is_not_drained_survives_each_remount(
    kind: str, remount: str, rig: Rig, no_reads: None
) -> None:
    async with rig.mount(works=False) as session:
        await CHANGES[kind](session)
        # A later change of the same file by its new state.
        await session.chmod(b"a", 0o640)
        await session.front.recorder.sync()
    for works in (False, True):
        async with rig.mount(works=works, **how(remount, rig)) as session:
            check_no_object(session)
            assert await shows(session, kind) and await shows(session, "chmod")
            if works:
                await session.drained()
                assert has(rig, kind) and has(rig, "chmod")
                assert known(session) == identity_of(at(rig))
                assert session.write_back.drain.backlog().conflicts == 0
    assert (rig.source / "a").read_bytes() == b"of the source"


@pytest.mark.promise(31)
@pytest.mark.parametrize("remount", ["same", "read-only", "elsewhere"])
async def test_each_extended_attribute_that_a_mount_lists_has_a_value(
    remount: str, rig: Rig
) -> None:
    async with rig.mount(works=False) as session:
        await CHANGES["setxattr"](session)
        await session.front.recorder.sync()
    for works in (False, True):
        async with rig.mount(works=works, **how(remount, rig)) as session:
            if works:
                await session.drained()
            shown, ino = extended_attributes(session), session.ino(b"a")
            found = {name: await shown.get(ino, name) for name in await shown.names(ino)}
            assert None not in found.values()
            assert works or found[b"user.note"] == b"1"


def extended_attributes(session: Session) -> ExtendedAttributes:
    """What answers the processes, for attributes that Monarch does not define."""
    parts = dict.fromkeys(("residency", "records", "metrics", "copies"))
    return ExtendedAttributes(
        cast(ReadSide, SimpleNamespace(names=session.names, **parts)),
        cast(Readers, SimpleNamespace(catch_up=None)),
        session.front.attributes,
        MeasuredJobs(lambda ino: 0),
    )


@pytest.mark.parametrize("remount", ["same", "refresh", "never", "lost state"])
async def test_a_drained_change_is_known_to_the_next_mount(
    remount: str, rig: Rig, no_reads: None
) -> None:
    async with rig.mount(freshness="never") as session:
        for kind in CHANGES:
            await CHANGES[kind](session)
        await session.drained()
    more = {"freshness": "never"} if remount == "same" else how(remount, rig)
    async with rig.mount(**more) as session:
        for kind in CHANGES:
            assert await shows(session, kind)
        assert known(session) == identity_of(at(rig))
        await session.chmod(b"a", 0o600)
        await session.drained()
        assert stat.S_IMODE(at(rig).st_mode) == 0o600
        assert session.write_back.drain.backlog().conflicts == 0


@pytest.mark.promise(157)
async def test_an_extended_attribute_that_the_source_does_not_take_is_shown_by_this_mount(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async with rig.mount() as session:
        monkeypatch.setattr(os, "setxattr", refused)
        await session.setxattr(b"a", b"user.note", b"1")
        await session.drained()
        assert await xattrs(session) == {b"user.old": b"0", b"user.note": b"1"}
        log = session.write_back.drain.writer.log
        assert list(log.dropped_xattrs) == [(b"a", b"user.note")]
    async with rig.mount() as session:
        assert await xattrs(session) == {b"user.old": b"0"}


@pytest.mark.promise(81, 157)
@pytest.mark.parametrize("size", [1, 4000])
async def test_an_extended_attribute_waits_for_room_unless_it_is_too_large(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """XFS needs some free blocks for an attribute, and tmpfs a free inode."""
    setxattr, is_full = os.setxattr, True

    def limited(path: Any, name: Any, *more: Any, **options: Any) -> None:
        if is_full and os.fsencode(name) == b"user.note":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        setxattr(path, name, *more, **options)

    async with rig.mount() as session:
        monkeypatch.setattr(os, "setxattr", limited)
        await session.setxattr(b"a", b"user.note", b"1" * size)
        await session.at_rest()
        log = session.write_back.drain.writer.log
        assert list(log.dropped_xattrs) == ([] if size == 1 else [(b"a", b"user.note")])
        is_full = False
        if size == 1:
            await session.write_back.refusals.retry()
        await session.drained()
    assert ("user.note" in os.listxattr(rig.source / "a")) is (size == 1)


async def test_a_removed_extended_attribute_stays_removed(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        with pytest.raises(Refused) as refused:
            await session.setxattr(b"a", b"user.none", None)
        assert refused.value.errno == errno.ENODATA
        await session.setxattr(b"a", b"user.note", b"1")
        await session.setxattr(b"a", b"user.old", None)
        assert await xattrs(session) == {b"user.note": b"1"}
        with pytest.raises(Refused) as refused:
            await session.setxattr(b"a", b"user.old", None)
        assert refused.value.errno == errno.ENODATA
    async with rig.mount(works=False) as session:
        assert await xattrs(session) == {b"user.note": b"1"}
        # The object of a file that is written then has them, too.
        await session.write(b"a", b"written")
        assert await xattrs(session) == {b"user.note": b"1"}
    async with rig.mount() as session:
        await session.drained()
        assert os.listxattr(rig.source / "a") == ["user.note"]


@pytest.mark.parametrize("call", ["status", "acls"])
async def test_a_look_at_the_source_that_the_drain_overtakes_shows_no_older_attributes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with rig.mount() as session:
        await session.chmod(b"a", 0o600)
        await session.drained()
        if call == "acls":
            # Others have changed it, so its access control lists are read.
            (rig.source / "a").write_bytes(b"others")
        answer, calls = getattr(session.source_calls, call), 0

        async def overtaken(*arguments: Any) -> Any:
            nonlocal calls
            found = await answer(*arguments)
            calls += 1
            if calls == 1:
                await session.chmod(b"a", 0o640)
                await session.drained()
            return found

        monkeypatch.setattr(session.source_calls, call, overtaken)
        await session.front.source.look_again(session.ino(b"a"))
        assert calls
        assert stat.S_IMODE(session.front.attributes.of(session.ino(b"a")).mode) == 0o640


@pytest.mark.promise(31)
@pytest.mark.parametrize("kind", ["open", "list"])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
async def test_extended_attributes_that_the_drain_brings_during_a_read_of_the_source_are_shown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    async with rig.mount(works=False) as session:
        call, was_overtaken = session.source_calls.at, False

        async def overtaken(ino: Ino, function: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal was_overtaken
            found = await call(ino, function, *arguments)
            is_read = function in (copy_up._copy_file, session.source.xattrs)
            if is_read and not was_overtaken and session.write_back.drain.queue:
                was_overtaken = True
                if moment == "meanwhile":
                    await change(session)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.write_back.drain.run)
                    await session.drained()
                    nursery.cancel_scope.cancel()
            return found

        async def change(session: Session) -> None:
            await session.setxattr(b"a", b"user.note", b"1")
            await session.setxattr(b"a", b"user.old", None)

        await session.chmod(b"a", 0o640)
        if moment == "before":
            await change(session)
        monkeypatch.setattr(session.source_calls, "at", overtaken)
        if kind == "open":
            ino = await session.open(b"a")
            session.files.release(ino)
        assert await xattrs(session) == {b"user.note": b"1"}
        assert was_overtaken and os.listxattr(rig.source / "a") == ["user.note"]


async def test_each_version_that_the_drain_makes_is_taken_for_one_of_the_drain(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the change at the source and its record, also if later changes wait."""
    make, found = SourceEntries.change_attributes, []

    def made(*arguments: Any, **more: Any) -> Any:
        identity = make(*arguments, **more)
        found.append(identity_of(at(rig)))
        expected.append(session.revalidation.may_be_drained(session.ino(b"a"), found[-1]))
        return identity

    expected: list[bool] = []
    monkeypatch.setattr(SourceEntries, "change_attributes", made)
    async with rig.mount() as session:
        for number in range(3):
            await session.utime(b"a", MTIME_NS + number)
        await session.chmod(b"a", 0o640)
        await session.drained()
        assert len(set(found)) == 4 and all(expected)
        node = session.names.node(session.ino(b"a"))
        assert node is not None and not node.undrained and not node.undrained_mtimes
        others = Identity(found[-1].size, MTIME_NS, found[-1].ctime_ns, found[-1].source_ino)
        assert not session.revalidation.may_be_drained(node.ino, others)


@pytest.mark.promise(99)
@pytest.mark.parametrize("is_written", [False, True], ids=["of the source", "written"])
@pytest.mark.parametrize("is_drained", [False, True], ids=["waiting", "drained"])
async def test_an_open_file_without_a_name_takes_extended_attributes(
    rig: Rig, is_written: bool, is_drained: bool
) -> None:
    async with rig.mount(works=is_drained) as session:
        if is_written:
            await session.write(b"a", b"written")
            await session.open(b"a", os.O_RDONLY)
        attributes, ino = session.front.attributes, session.ino(b"a")
        session.read.add(ino)

        async def found() -> dict[bytes, bytes]:
            there = await attributes.xattrs_elsewhere(ino)
            names = attributes.xattrs(ino)
            return {name: attributes.xattr(ino, name) or b"" for name in names} | (there or {})

        session.unlink(b"a")
        if is_drained:
            await session.drained()
        await attributes.set_xattr(ino, b"user.note", b"1", by=ROOT)
        assert (await found())[b"user.note"] == b"1"
        await attributes.set_xattr(ino, b"user.note", None, by=ROOT)
        assert b"user.note" not in await found()
        with pytest.raises(Refused) as refused:
            await attributes.set_xattr(ino, b"user.note", None, by=ROOT)
        assert refused.value.errno == errno.ENODATA
        # The source gets nothing of it.
        assert all(op.kind != "xattr" for op in rig.left.waiting())
        assert session.write_back.drain.backlog().conflicts == 0


@pytest.mark.fault("N6")
async def test_bytes_of_others_are_shown_with_the_attributes_that_were_set(
    rig: Rig,
) -> None:
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        (rig.source / "a").write_bytes(b"of others, and longer")
        (rig.source / "a").chmod(0o606)
        await session.front.source._revalidate(session.ino(b"a"))
        now = session.names.attributes(session.ino(b"a"))
        assert now.size == 21 and stat.S_IMODE(now.mode) == 0o640
        assert known(session) == identity_of(at(rig))
    async with rig.mount() as session:
        await session.drained()
        assert has(rig, "chmod") and (rig.source / "a").read_bytes().startswith(b"of others")
        # Others have it again, so their attributes count.
        (rig.source / "a").chmod(0o606)
        with pytest.raises(Exception, match="access changed"):
            await session.front.source._revalidate(session.ino(b"a"))
        assert stat.S_IMODE(session.names.attributes(session.ino(b"a")).mode) == 0o606


@pytest.mark.fault("N6")
async def test_a_change_by_others_before_the_drain_is_noticed_behind_it(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        before = at(rig)
        (rig.source / "a").write_bytes(b"OF THE SOURCE")
        os.utime(rig.source / "a", ns=(before.st_mtime_ns, before.st_mtime_ns))
    async with rig.mount() as session:
        await session.drained()
        # Only the time of change tells it, and the drain has changed that, too.
        assert has(rig, "chmod") and known(session) != identity_of(at(rig))


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
async def test_bytes_of_others_are_not_overwritten_behind_a_change_of_attributes(
    rig: Rig,
) -> None:
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        await session.write(b"a", b"written here")
        (rig.source / "a").write_bytes(b"of others")
    async with rig.mount() as session:
        await session.drained()
        assert (rig.source / "a").read_bytes() == b"of others"
        (conflict,) = session.write_back.drain.writer.log.conflicts
        kept = rig.source / os.fsdecode(conflict.kept)
        assert kept.read_bytes() == b"written here"


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
async def test_times_do_not_hide_what_others_have_written(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        await session.utime(b"a", MTIME_NS)
        (rig.source / "a").write_bytes(b"of others")
    async with rig.mount() as session:
        await session.drained()
        assert at(rig).st_mtime_ns != MTIME_NS
        assert session.write_back.drain.backlog().conflicts == 1


async def drain(session: Session) -> None:
    """The drain works until the source has all."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.write_back.drain.run)
        await session.drained()
        nursery.cancel_scope.cancel()


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
@pytest.mark.parametrize("kind", ["chmod", "utime"])
@pytest.mark.parametrize("noticed", ["by a look", "by the next snapshot"])
async def test_changes_that_the_drain_leaves_out_for_others_are_not_shown(
    kind: str, noticed: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount knows the file of others before the drain does."""

    def check(session: Session) -> None:
        now, there = session.names.attributes(session.ino(b"a")), at(rig)
        assert (now.size, now.mtime_ns) == (there.st_size, there.st_mtime_ns)
        assert now.mode == there.st_mode and stat.S_IMODE(now.mode) == 0o644

    async with rig.mount(works=False) as session:
        await CHANGES[kind](session)
        (rig.source / "a").write_bytes(b"of others")
        if kind == "chmod":
            # As if they had made it anew, and the source had used the number again.
            born_ns = at(rig).st_ctime_ns
            monkeypatch.setattr(source_entries, "born_ns", lambda fd, name=b"": born_ns)
        if noticed == "by a look":
            await session.front.source._revalidate(session.ino(b"a"))
            assert await shows(session, kind)
            await drain(session)
            check(session)
        session.kill()
    if noticed == "by the next snapshot":
        rig.lose_state()
        async with rig.mount(works=False) as session:
            assert await shows(session, kind)
            await drain(session)
            assert session.write_back.drain.backlog().conflicts == 1
            check(session)
            session.kill()
        async with rig.mount(works=False, freshness="never") as session:
            check(session)


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
@pytest.mark.parametrize("way", ["replaced", "given away"])
async def test_a_mode_that_waits_is_not_shown_of_a_file_that_is_another_user_s_by_now(
    way: str, rig: Rig
) -> None:
    """Else each user could read through the mount what its owner has closed at the source."""
    os.chown(rig.source / "a", 1001, 1001)

    def access(session: Session) -> tuple[int, int]:
        now = session.names.attributes(session.ino(b"a"))
        return stat.S_IMODE(now.mode), now.uid

    async with rig.mount(works=False) as session:
        ino, alice = session.ino(b"a"), Credentials(1001, 1001)
        await session.front.attributes.change(ino, mode=0o666, by=alice)
        theirs = rig.source / ("new" if way == "replaced" else "a")
        theirs.write_bytes(b"private")
        os.chown(theirs, 1002, 1002)
        theirs.chmod(0o600)
        theirs.replace(rig.source / "a")
        with suppress(SourceError):
            await session.front.source._revalidate(ino)
        assert access(session) == (0o600, 1002)
        await drain(session)
        assert access(session) == (0o600, 1002)
        assert stat.S_IMODE(at(rig).st_mode) == 0o600


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
async def test_a_new_snapshot_shows_no_mode_on_a_file_that_is_another_user_s_by_now(
    rig: Rig,
) -> None:
    os.chown(rig.source / "a", 1001, 1001)
    async with rig.mount(works=False) as session:
        ino, alice = session.ino(b"a"), Credentials(1001, 1001)
        await session.front.attributes.change(ino, mode=0o666, by=alice)
    os.chown(rig.source / "a", 1002, 1002)
    (rig.source / "a").chmod(0o600)
    for works in (False, True):
        async with rig.mount(works=works, **how("lost state" if not works else "same", rig)) as it:
            if works:
                await it.drained()
            assert stat.S_IMODE(it.names.attributes(it.ino(b"a")).mode) == 0o600


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
@pytest.mark.parametrize("by", [ROOT, Credentials(1001, 1001)], ids=["by root", "by its owner"])
async def test_a_new_snapshot_shows_no_mode_of_an_earlier_directory(
    by: Credentials, rig: Rig
) -> None:
    """Others have put another one in its place since."""
    for name, uid in (("d", by.uid), ("theirs", 0 if by.is_root else 1002)):
        (rig.source / name).mkdir(0o700)
        os.chown(rig.source / name, uid, uid)
    async with rig.mount(works=False) as session:
        await session.front.attributes.change(session.ino(b"d"), mode=0o777, by=by)
    (rig.source / "theirs").replace(rig.source / "d")
    for works in (False, True):
        async with rig.mount(works=works, **how("lost state" if not works else "same", rig)) as it:
            if works:
                await it.drained()
            assert stat.S_IMODE(it.names.attributes(it.ino(b"d")).mode) == 0o700


async def test_a_time_set_without_a_mark_is_no_conflict(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        await session.utime(b"a", MTIME_NS)
    os.utime(rig.source / "a", ns=(MTIME_NS, MTIME_NS))
    async with rig.mount() as session:
        await session.drained()
        assert has(rig, "utime") and session.write_back.drain.backlog().conflicts == 0


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("works", [False, True])
async def test_a_file_that_is_written_afterwards_has_both(kind: str, works: bool, rig: Rig) -> None:
    async with rig.mount(works=works) as session:
        await CHANGES[kind](session)
        if works:
            await session.drained()
        ino = await session.open(b"a")
        # Until a byte is written, the time stays.
        assert await shows(session, kind)
        await session.files.write(ino, 0, b"OF")
        session.files.release(ino)
        await CHANGES["utime"](session)
        assert await shows(session, kind)
    async with rig.mount() as session:
        await session.drained()
        assert has(rig, kind) and has(rig, "utime")
        assert (rig.source / "a").read_bytes() == b"OF the source"
        assert session.write_back.drain.backlog().conflicts == 0


@pytest.mark.parametrize("kind", ["chmod", "utime"])
@pytest.mark.parametrize("works", [False, True])
async def test_a_changed_file_can_be_renamed_linked_and_removed(
    kind: str, works: bool, rig: Rig
) -> None:
    for name in ("b", "c"):
        (rig.source / name).write_bytes(b"more")
    async with rig.mount(works=works) as session:
        for path in (b"b", b"c"):
            await session.chmod(path, 0o600)
            await session.utime(path, MTIME_NS)
        await CHANGES[kind](session)
        if works:
            await session.drained()
        await session.rename(b"a", b"new")
        await session.link(b"new", b"other")
        # Over a file that was changed as well.
        await session.rename(b"new", b"b")
        session.unlink(b"c")
        assert await shows(session, kind, b"b")
    async with rig.mount(**how("lost state", rig)) as session:
        assert await shows(session, kind, b"b")
        await session.drained()
        assert sorted(path.name for path in rig.source.glob("[!.]*")) == ["b", "other"]
        assert has(rig, kind, "b") and (rig.source / "b").read_bytes() == b"of the source"
        assert session.write_back.drain.backlog().conflicts == 0


@pytest.mark.fault("N6")
@pytest.mark.parametrize("then", ["chmod", "utime", "unlink"])
async def test_a_file_that_others_replaced_since_can_be_changed_again(then: str, rig: Rig) -> None:
    async with rig.mount() as session:
        await session.chmod(b"a", 0o600)
        await session.drained()
        (rig.source / "new").write_bytes(b"of others")
        (rig.source / "new").chmod(0o600)
        (rig.source / "new").rename(rig.source / "a")
        await session.front.source._revalidate(session.ino(b"a"))
        if then == "unlink":
            session.unlink(b"a")
        else:
            await CHANGES[then](session)
        await session.drained()
        assert session.write_back.drain.backlog().conflicts == 0
        assert (rig.source / "a").exists() == (then != "unlink")
        assert then == "unlink" or has(rig, then)


@pytest.mark.fault("N6")
async def test_changes_in_a_queue_are_made_on_the_version_that_each_has_found(
    rig: Rig,
) -> None:
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        (rig.source / "a").write_bytes(b"of others")
        await session.front.source._revalidate(session.ino(b"a"))
        await CHANGES["utime"](session)
    async with rig.mount() as session:
        await session.drained()
        assert session.write_back.drain.backlog().conflicts == 0
        assert has(rig, "chmod") and has(rig, "utime")


async def test_a_file_with_several_names_is_changed_under_one_that_is_its_own(
    rig: Rig,
) -> None:
    (rig.source / "b").hardlink_to(rig.source / "a")
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        assert session.ino(b"b") == session.ino(b"a")
        (rig.source / "new").write_bytes(b"of others")
        (rig.source / "new").chmod(0o604)
        (rig.source / "new").rename(rig.source / "a")
    for remount in ("same", "lost state"):
        async with rig.mount(works=remount == "lost state", **how(remount, rig)) as session:
            if remount == "lost state":
                await session.drained()
            assert await shows(session, "chmod", b"b")
    assert has(rig, "chmod", "b") and stat.S_IMODE(at(rig).st_mode) == 0o604


async def test_a_name_less_is_read_under_another(rig: Rig) -> None:
    (rig.source / "b").hardlink_to(rig.source / "a")
    async with rig.mount() as session:
        ino = session.ino(b"a")
        await session.chmod(b"a", 0o640)
        first = session.names.path(ino)
        session.unlink(first)
        await session.drained()
        (left,) = {b"a", b"b"} - {first}
        assert session.names.path(ino) == left and session.shown()[left].content == b"of the source"


async def test_a_new_snapshot_shows_no_change_on_a_file_of_others(rig: Rig) -> None:
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        (rig.source / "new").write_bytes(b"of others")
        (rig.source / "new").chmod(0o604)
        (rig.source / "new").rename(rig.source / "a")
    async with rig.mount(works=False, **how("lost state", rig)) as session:
        assert stat.S_IMODE(session.names.attributes(session.ino(b"a")).mode) == 0o604


async def test_a_discarded_change_shows_the_file_as_at_the_source(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(SourceEntries, "change_attributes", refused)
    for remount in ("same", "lost state"):
        async with rig.mount(**how(remount, rig)) as session:
            if remount == "same":
                await session.chmod(b"a", 0o640)
                await session.setxattr(b"a", b"user.note", b"1")
            await session.at_rest()
            assert await shows(session, "chmod")
            await session.write_back.refusals.set_aside(b"a")
            if remount == "lost state":
                await session.write_back.refusals.discard(b"a")
                now = session.names.attributes(session.ino(b"a"))
                assert stat.S_IMODE(now.mode) == 0o644
                assert await xattrs(session) == {b"user.old": b"0"}
                assert session.write_back.refusals.list() == []


async def test_a_file_whose_object_was_lost_keeps_its_changes(rig: Rig) -> None:
    """After a power cut the source has the bytes of a file that was only copied up."""
    async with rig.mount(works=False) as session:
        await session.chmod(b"a", 0o640)
        await session.setxattr(b"a", b"trusted.note", b"1")
        await session.utime(b"a", MTIME_NS)
    rig.boot_again()
    async with rig.mount() as session:
        assert await shows(session, "chmod") and await shows(session, "utime")
        await session.drained()
        assert has(rig, "chmod") and has(rig, "utime")
        assert (rig.source / "a").read_bytes() == b"of the source"


@pytest.mark.parametrize("path", [b"a", b"d/f"])
async def test_the_version_of_a_file_that_the_drain_has_changed_is_known_after_a_lost_snapshot(
    rig: Rig, clock: trio.testing.MockClock, path: bytes
) -> None:
    """A copy of the file is renewed by that version, and is not made again."""
    (rig.source / "before").write_bytes(b"another inode number for each file")
    (rig.source / "d").mkdir()
    (rig.source / "d" / "f").write_bytes(b"of the source")
    async with rig.mount(works=False) as session:
        await session.chmod(path, 0o600)
        session.kill()
    rig.lose_state()
    (rig.source / "before").unlink()
    async with rig.mount() as session:
        snapshot_id = session.names.snapshot.id
        await session.drained()
        await session.end()
    there = identity_of((rig.source / os.fsdecode(path)).stat())
    assert renewed_by_drain(rig.settings(), snapshot_id) == {there.source_ino: there}
