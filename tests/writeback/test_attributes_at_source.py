"""Changes of attributes of files of the source: they move attributes, and no bytes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from monarch.errors import Refused
from monarch.tiers.source import Source, identity_of
from monarch.types import Identity
from monarch.writeback import copy_up
from monarch.writeback.source_entries import SourceEntries
from tests.writeback.remount_histories import how
from tests.writeback.remounts import ROOT, Ground, Life

pytestmark = pytest.mark.promise(172)

MTIME_NS = 1_234_567_890 * 10**9
Change = Callable[[Life], Awaitable[object]]


async def chown(life: Life) -> None:
    await life.front.attributes.change(life.ino(b"a"), uid=12, gid=34, by=ROOT)


CHANGES: dict[str, Change] = {
    "chmod": lambda life: life.chmod(b"a", 0o640),
    "chown": chown,
    "utime": lambda life: life.utime(b"a", MTIME_NS),
    "setxattr": lambda life: life.setxattr(b"a", b"user.note", b"1"),
}


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    ground = Ground(tmp_path, monkeypatch)
    (ground.source / "a").write_bytes(b"of the source")
    (ground.source / "a").chmod(0o644)
    os.setxattr(ground.source / "a", "user.old", b"0")
    return ground


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Any:
        raise AssertionError("the source is read")

    monkeypatch.setattr(copy_up, "_copy_file", read)
    for name in ("open", "fetch"):
        monkeypatch.setattr(Source, name, read)


def at(ground: Ground, name: str = "a") -> os.stat_result:
    return (ground.source / name).stat()


def known(life: Life, path: bytes = b"a") -> Identity:
    return life.names.stored(life.ino(path)).identity


async def xattrs(life: Life, path: bytes = b"a") -> dict[bytes, bytes]:
    found = await life.front.attributes.xattrs_elsewhere(life.ino(path))
    if found is not None:
        return found
    node = life.names.node(life.ino(path))
    assert node is not None
    return node.xattrs


async def shows(life: Life, kind: str, path: bytes = b"a") -> bool:
    """Whether the mount shows a change of ``CHANGES``."""
    now = life.front.attributes.of(life.ino(path))
    # A mount that absorbs other paths shows only those that the source may lack.
    both = {b"user.old": b"0", b"user.note": b"1"}
    return {
        "chmod": stat.S_IMODE(now.mode) == 0o640,
        "chown": (now.uid, now.gid) == (12, 34),
        "utime": now.mtime_ns == MTIME_NS,
        "setxattr": await xattrs(life, path) in (both, {b"user.note": b"1"}),
    }[kind]


def has(ground: Ground, kind: str, name: str = "a") -> bool:
    """Whether the source has it."""
    now = at(ground, name)
    return {
        "chmod": stat.S_IMODE(now.st_mode) == 0o640,
        "chown": (now.st_uid, now.st_gid) == (12, 34),
        "utime": now.st_mtime_ns == MTIME_NS,
        "setxattr": set(os.listxattr(ground.source / name)) == {"user.old", "user.note"},
    }[kind]


def check_no_object(life: Life, path: bytes = b"a") -> None:
    node = life.names.node(life.ino(path))
    assert node is not None and not node.object
    assert not life.front.operations.has(node.ino)


@pytest.mark.parametrize("kind", CHANGES)
async def test_a_change_is_shown_and_drained_without_a_read_of_the_file(
    kind: str, ground: Ground, no_reads: None
) -> None:
    async with ground.mount() as life:
        await CHANGES[kind](life)
        check_no_object(life)
        assert await shows(life, kind)
        assert life.shown()[b"a"].safety == "source"
        await life.drained()
        assert has(ground, kind) and await shows(life, kind)
        # What the mount knows of the file is what the source has: its copies stay valid.
        assert known(life) == identity_of(at(ground))
        node = life.names.node(life.ino(b"a"))
        assert node is not None and not node.undrained and not node.xattrs
        # Many such files take no memory when they are drained.
        entries = life.write_back.drain.state.entries
        assert not entries.made and not entries._before and not entries._waiting
        assert life.write_back.drain.backlog().conflicts == 0


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(
    "remount", ["same", "refresh", "never", "given", "lost state", "boot", "read-only", "elsewhere"]
)
async def test_a_change_that_is_not_drained_survives_each_remount(
    kind: str, remount: str, ground: Ground, no_reads: None
) -> None:
    async with ground.mount(works=False) as life:
        await CHANGES[kind](life)
        # A later change of the same file by its new state.
        await life.chmod(b"a", 0o640)
        await life.front.recorder.sync()
    for works in (False, True):
        async with ground.mount(works=works, **how(remount, ground)) as life:
            check_no_object(life)
            assert await shows(life, kind) and await shows(life, "chmod")
            if works:
                await life.drained()
                assert has(ground, kind) and has(ground, "chmod")
                assert known(life) == identity_of(at(ground))
                assert life.write_back.drain.backlog().conflicts == 0
    assert (ground.source / "a").read_bytes() == b"of the source"


@pytest.mark.parametrize("remount", ["same", "refresh", "never", "lost state"])
async def test_a_drained_change_is_known_to_the_next_mount(
    remount: str, ground: Ground, no_reads: None
) -> None:
    async with ground.mount(freshness="never") as life:
        for kind in CHANGES:
            await CHANGES[kind](life)
        await life.drained()
    more = {"freshness": "never"} if remount == "same" else how(remount, ground)
    async with ground.mount(**more) as life:
        for kind in CHANGES:
            assert await shows(life, kind)
        assert known(life) == identity_of(at(ground))
        await life.chmod(b"a", 0o600)
        await life.drained()
        assert stat.S_IMODE(at(ground).st_mode) == 0o600
        assert life.write_back.drain.backlog().conflicts == 0


@pytest.mark.promise(157)
async def test_an_extended_attribute_that_the_source_does_not_take_is_shown_by_this_mount(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async with ground.mount() as life:
        monkeypatch.setattr(os, "setxattr", refused)
        await life.setxattr(b"a", b"user.note", b"1")
        await life.drained()
        assert await xattrs(life) == {b"user.old": b"0", b"user.note": b"1"}
        log = life.write_back.drain.writer.log
        assert list(log.dropped_xattrs) == [(b"a", b"user.note")]
    async with ground.mount() as life:
        assert await xattrs(life) == {b"user.old": b"0"}


async def test_a_removed_extended_attribute_stays_removed(ground: Ground) -> None:
    async with ground.mount(works=False) as life:
        with pytest.raises(Refused) as refused:
            await life.setxattr(b"a", b"user.none", None)
        assert refused.value.errno == errno.ENODATA
        await life.setxattr(b"a", b"user.note", b"1")
        await life.setxattr(b"a", b"user.old", None)
        assert await xattrs(life) == {b"user.note": b"1"}
        with pytest.raises(Refused) as refused:
            await life.setxattr(b"a", b"user.old", None)
        assert refused.value.errno == errno.ENODATA
    async with ground.mount(works=False) as life:
        assert await xattrs(life) == {b"user.note": b"1"}
        # The object of a file that is written then has them, too.
        await life.write(b"a", b"written")
        assert await xattrs(life) == {b"user.note": b"1"}
    async with ground.mount() as life:
        await life.drained()
        assert os.listxattr(ground.source / "a") == ["user.note"]


@pytest.mark.fault("N6")
async def test_bytes_of_others_are_shown_with_the_attributes_that_were_set(
    ground: Ground,
) -> None:
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        (ground.source / "a").write_bytes(b"of others, and longer")
        (ground.source / "a").chmod(0o606)
        await life.front.source._revalidate(life.ino(b"a"))
        now = life.names.attributes(life.ino(b"a"))
        assert now.size == 21 and stat.S_IMODE(now.mode) == 0o640
        assert known(life) == identity_of(at(ground))
    async with ground.mount() as life:
        await life.drained()
        assert has(ground, "chmod") and (ground.source / "a").read_bytes().startswith(b"of others")
        # Others have it again, so their attributes count.
        (ground.source / "a").chmod(0o606)
        with pytest.raises(Exception, match="access changed"):
            await life.front.source._revalidate(life.ino(b"a"))
        assert stat.S_IMODE(life.names.attributes(life.ino(b"a")).mode) == 0o606


@pytest.mark.fault("N6")
async def test_a_change_by_others_before_the_drain_is_noticed_behind_it(ground: Ground) -> None:
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        before = at(ground)
        (ground.source / "a").write_bytes(b"OF THE SOURCE")
        os.utime(ground.source / "a", ns=(before.st_mtime_ns, before.st_mtime_ns))
    async with ground.mount() as life:
        await life.drained()
        # Only the time of change tells it, and the drain has changed that, too.
        assert has(ground, "chmod") and known(life) != identity_of(at(ground))


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
async def test_bytes_of_others_are_not_overwritten_behind_a_change_of_attributes(
    ground: Ground,
) -> None:
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        await life.write(b"a", b"written here")
        (ground.source / "a").write_bytes(b"of others")
    async with ground.mount() as life:
        await life.drained()
        assert (ground.source / "a").read_bytes() == b"of others"
        (conflict,) = life.write_back.drain.writer.log.conflicts
        kept = ground.source / os.fsdecode(conflict.kept)
        assert kept.read_bytes() == b"written here"


@pytest.mark.fault("N6")
@pytest.mark.promise(79)
async def test_times_do_not_hide_what_others_have_written(ground: Ground) -> None:
    async with ground.mount(works=False) as life:
        await life.utime(b"a", MTIME_NS)
        (ground.source / "a").write_bytes(b"of others")
    async with ground.mount() as life:
        await life.drained()
        assert at(ground).st_mtime_ns != MTIME_NS
        assert life.write_back.drain.backlog().conflicts == 1


async def test_a_time_set_without_a_mark_is_no_conflict(ground: Ground) -> None:
    async with ground.mount(works=False) as life:
        await life.utime(b"a", MTIME_NS)
    os.utime(ground.source / "a", ns=(MTIME_NS, MTIME_NS))
    async with ground.mount() as life:
        await life.drained()
        assert has(ground, "utime") and life.write_back.drain.backlog().conflicts == 0


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("works", [False, True])
async def test_a_file_that_is_written_afterwards_has_both(
    kind: str, works: bool, ground: Ground
) -> None:
    async with ground.mount(works=works) as life:
        await CHANGES[kind](life)
        if works:
            await life.drained()
        ino = await life.open(b"a")
        # Until a byte is written, the time stays.
        assert await shows(life, kind)
        await life.files.write(ino, 0, b"OF")
        life.files.release(ino)
        await CHANGES["utime"](life)
        assert await shows(life, kind)
    async with ground.mount() as life:
        await life.drained()
        assert has(ground, kind) and has(ground, "utime")
        assert (ground.source / "a").read_bytes() == b"OF the source"
        assert life.write_back.drain.backlog().conflicts == 0


@pytest.mark.parametrize("kind", ["chmod", "utime"])
@pytest.mark.parametrize("works", [False, True])
async def test_a_changed_file_can_be_renamed_linked_and_removed(
    kind: str, works: bool, ground: Ground
) -> None:
    for name in ("b", "c"):
        (ground.source / name).write_bytes(b"more")
    async with ground.mount(works=works) as life:
        for path in (b"b", b"c"):
            await life.chmod(path, 0o600)
            await life.utime(path, MTIME_NS)
        await CHANGES[kind](life)
        if works:
            await life.drained()
        await life.rename(b"a", b"new")
        await life.link(b"new", b"other")
        # Over a file that was changed as well.
        await life.rename(b"new", b"b")
        life.unlink(b"c")
        assert await shows(life, kind, b"b")
    async with ground.mount(**how("lost state", ground)) as life:
        assert await shows(life, kind, b"b")
        await life.drained()
        assert sorted(path.name for path in ground.source.glob("[!.]*")) == ["b", "other"]
        assert has(ground, kind, "b") and (ground.source / "b").read_bytes() == b"of the source"
        assert life.write_back.drain.backlog().conflicts == 0


@pytest.mark.fault("N6")
@pytest.mark.parametrize("then", ["chmod", "utime", "unlink"])
async def test_a_file_that_others_replaced_since_can_be_changed_again(
    then: str, ground: Ground
) -> None:
    async with ground.mount() as life:
        await life.chmod(b"a", 0o600)
        await life.drained()
        (ground.source / "new").write_bytes(b"of others")
        (ground.source / "new").chmod(0o600)
        (ground.source / "new").rename(ground.source / "a")
        await life.front.source._revalidate(life.ino(b"a"))
        if then == "unlink":
            life.unlink(b"a")
        else:
            await CHANGES[then](life)
        await life.drained()
        assert life.write_back.drain.backlog().conflicts == 0
        assert (ground.source / "a").exists() == (then != "unlink")
        assert then == "unlink" or has(ground, then)


@pytest.mark.fault("N6")
async def test_changes_in_a_queue_are_made_on_the_version_that_each_has_found(
    ground: Ground,
) -> None:
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        (ground.source / "a").write_bytes(b"of others")
        await life.front.source._revalidate(life.ino(b"a"))
        await CHANGES["utime"](life)
    async with ground.mount() as life:
        await life.drained()
        assert life.write_back.drain.backlog().conflicts == 0
        assert has(ground, "chmod") and has(ground, "utime")


async def test_a_file_with_several_names_is_changed_under_one_that_is_its_own(
    ground: Ground,
) -> None:
    (ground.source / "b").hardlink_to(ground.source / "a")
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        assert life.ino(b"b") == life.ino(b"a")
        (ground.source / "new").write_bytes(b"of others")
        (ground.source / "new").chmod(0o604)
        (ground.source / "new").rename(ground.source / "a")
    for remount in ("same", "lost state"):
        async with ground.mount(works=remount == "lost state", **how(remount, ground)) as life:
            if remount == "lost state":
                await life.drained()
            assert await shows(life, "chmod", b"b")
    assert has(ground, "chmod", "b") and stat.S_IMODE(at(ground).st_mode) == 0o604


async def test_a_name_less_is_read_under_another(ground: Ground) -> None:
    (ground.source / "b").hardlink_to(ground.source / "a")
    async with ground.mount() as life:
        ino = life.ino(b"a")
        await life.chmod(b"a", 0o640)
        first = life.names.path(ino)
        life.unlink(first)
        await life.drained()
        (left,) = {b"a", b"b"} - {first}
        assert life.names.path(ino) == left and life.shown()[left].content == b"of the source"


async def test_a_new_snapshot_shows_no_change_on_a_file_of_others(ground: Ground) -> None:
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        (ground.source / "new").write_bytes(b"of others")
        (ground.source / "new").chmod(0o604)
        (ground.source / "new").rename(ground.source / "a")
    async with ground.mount(works=False, **how("lost state", ground)) as life:
        assert stat.S_IMODE(life.names.attributes(life.ino(b"a")).mode) == 0o604


async def test_a_discarded_change_shows_the_file_as_at_the_source(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(SourceEntries, "change_attributes", refused)
    for remount in ("same", "lost state"):
        async with ground.mount(**how(remount, ground)) as life:
            if remount == "same":
                await life.chmod(b"a", 0o640)
                await life.setxattr(b"a", b"user.note", b"1")
            await life.at_rest()
            assert await shows(life, "chmod")
            await life.write_back.refusals.set_aside(b"a")
            if remount == "lost state":
                await life.write_back.refusals.discard(b"a")
                now = life.names.attributes(life.ino(b"a"))
                assert stat.S_IMODE(now.mode) == 0o644
                assert await xattrs(life) == {b"user.old": b"0"}
                assert life.write_back.refusals.list() == []


async def test_a_file_whose_object_was_lost_keeps_its_changes(ground: Ground) -> None:
    """After a power cut the source has the bytes of a file that was only copied up."""
    async with ground.mount(works=False) as life:
        await life.chmod(b"a", 0o640)
        await life.setxattr(b"a", b"trusted.note", b"1")
        await life.utime(b"a", MTIME_NS)
    ground.boot_again()
    async with ground.mount() as life:
        assert await shows(life, "chmod") and await shows(life, "utime")
        await life.drained()
        assert has(ground, "chmod") and has(ground, "utime")
        assert (ground.source / "a").read_bytes() == b"of the source"
