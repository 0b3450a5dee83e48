"""Set-ID bits of programs that are written on the mount: they come with their bytes."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from monarch.posix.credentials import Credentials
from monarch.writeback.drain import Drain
from monarch.writeback.journal import Op, Replay
from monarch.writeback.journal_records import decoded, encoded
from monarch.writeback.source_entries import SourceEntries
from tests.conftest import let_others_in
from tests.writeback.rig import Model, draining
from tests.writeback.test_others import ALICE, MALLORY, ROOT, owned, until

Clock = trio.testing.MockClock
SUID = stat.S_ISUID

pytestmark = [
    pytest.mark.promise(88),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user"),
]


@pytest.fixture
def shared(model: Model) -> Model:
    """A model whose source every user may enter and write; ``a`` belongs to Alice."""
    let_others_in(model.source)
    model.source.chmod(0o1777)
    owned(model, "a", 0o777)
    model.tree[b"a"].mode = 0o777
    return model


def mode_of(model: Model, name: str) -> int:
    return stat.S_IMODE((model.source / name).stat().st_mode)


def next_mount(model: Model, journal: str) -> Replay:
    """What the next mount finds after a kill. ``journal``: it was shortened before, is that of an
    older version, or mounts with a new snapshot write it anew, once or twice."""
    path = model.directory / "journal"
    if journal == "shortened":
        model.journal.shorten()
    elif journal == "older":
        records = [decoded(line) or {} for line in path.read_bytes().splitlines()]
        for record in records:
            record.pop("withheld", None)
        path.write_bytes(b"".join(map(encoded, records)))
    replay = model.kill()
    for _ in range({"rewritten": 1, "rewritten twice": 2}.get(journal, 0)):
        replay = model.look_anew()
    return replay


@contextmanager
def looks(monkeypatch: pytest.MonkeyPatch, model: Model) -> Iterator[set[tuple[bytes, bool]]]:
    """The bytes of ``a`` at the source after each change, and whether the file has a set-ID bit."""
    seen: set[tuple[bytes, bool]] = set()

    def looking(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: Any, **kwargs: Any) -> None:
            change(*args, **kwargs)
            with suppress(FileNotFoundError):
                has_bit = bool(mode_of(model, "a") & (stat.S_ISUID | stat.S_ISGID))
                seen.add(((model.source / "a").read_bytes(), has_bit))

        return changed

    with monkeypatch.context() as patched:
        for change in ("chmod", "fchmod", "rename", "link"):
            patched.setattr(os, change, looking(getattr(os, change)))
        yield seen


@pytest.mark.parametrize("times", [1, 2])
async def test_a_program_whose_times_are_set_keeps_its_bits(
    model: Model, clock: Clock, times: int
) -> None:
    async with draining(model) as drain:
        model.create(b"program", mode=0o2755)
        model.write(b"program", b"bytes")
        for turn in range(times):
            model.utime(b"program", (turn + 1) * 10**18)
        await drain.progress.wait(model.last_seq)
    assert mode_of(model, "program") == 0o2755
    assert (model.source / "program").stat().st_mtime_ns == times * 10**18


async def test_bytes_that_were_written_before_the_times_were_set_do_not_get_the_bits(
    model: Model, clock: Clock
) -> None:
    async with draining(model) as drain:
        model.create(b"program", mode=0o4755)
        model.write(b"program", b"bytes")
        node = model.begin(b"program")
        model.store(node, b"newer")
        # They are not recorded yet, and their version is not known from this change.
        seq = model.utime(b"program", 10**18)
        node.writers = 0
        await drain.progress.wait(seq)
        assert mode_of(model, "program") == 0o755
        model.content(node)
        await drain.progress.wait(model.last_seq)
    assert mode_of(model, "program") == 0o4755


@pytest.mark.parametrize("writer", [ROOT, ALICE])
@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("bits", [0o4000, 0o2000])
async def test_bits_that_are_set_while_a_file_is_open_come_with_its_bytes(
    shared: Model,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    writer: Credentials,
    is_written: bool,
    bits: int,
) -> None:
    shared.by = writer
    with looks(monkeypatch, shared) as seen:
        async with draining(shared) as drain:
            node = shared.begin(b"a")
            shared.store(node, b"new")
            seq = shared.chmod(b"a", 0o755 | bits)
            if is_written:
                await drain.progress.wait(seq)
                assert mode_of(shared, "a") == 0o755
            shared.end(node)
            await drain.progress.wait(shared.last_seq)
    assert mode_of(shared, "a") == 0o755 | bits
    assert (shared.source / "a").read_bytes() == b"new"
    assert (shared.source / "a").stat().st_uid == 1001
    assert not is_written or (b"old a", True) not in seen


@pytest.mark.fault("U7")
@pytest.mark.promise(160)
@pytest.mark.parametrize("later", [False, True])
async def test_bits_that_were_withheld_stay_away_when_the_owner_changes_the_mode_at_the_source(
    shared: Model, clock: Clock, later: bool
) -> None:
    shared.by = ROOT
    async with draining(shared) as drain:
        node = shared.begin(b"a")
        shared.store(node, b"of root")
        await drain.progress.wait(shared.chmod(b"a", 0o4777))
        assert mode_of(shared, "a") == 0o777
        (shared.source / "a").chmod(0o700)
        if later:
            # The bits that were given are not given again either.
            shared.end(node)
            await drain.progress.wait(shared.last_seq)
            await drain.progress.wait(shared.write(b"a", b"of root again"))
        else:
            shared.end(node)
            await drain.progress.wait(shared.last_seq)
    assert mode_of(shared, "a") == 0o700


@pytest.mark.fault("U7")
async def test_bits_that_the_owner_has_removed_at_the_source_are_not_given_again(
    shared: Model, clock: Clock
) -> None:
    shared.by = ROOT
    async with draining(shared) as drain:
        shared.write(b"a", b"of root")
        await drain.progress.wait(shared.chmod(b"a", 0o4777))
        assert mode_of(shared, "a") == 0o4777
        (shared.source / "a").chmod(0o777)
        # The drain changes the file after its owner has.
        shared.setxattr(b"a", b"user.n", b"1")
        await drain.progress.wait(shared.write(b"a", b"of root again"))
    assert mode_of(shared, "a") == 0o777


@pytest.mark.fault("U7")
@pytest.mark.promise(88)
@pytest.mark.parametrize("end", ["none", "killed", "shortened", "rewritten"])
async def test_a_write_removes_the_bits_and_leaves_the_others_as_the_owner_has_set_them(
    shared: Model, clock: Clock, end: str
) -> None:
    shared.by, shared.owner = ALICE, 1001
    owned(shared, "a", 0o4777)
    shared.tree[b"a"].mode = 0o4777
    async with draining(shared, abandon=False) as drain:
        shared.take(b"a")
        await drain.progress.wait(shared.last_seq)
        # Another user has written the file on the mount.
        change = Op(kind="attr", path=b"a", object=shared.tree[b"a"].object, mode=0o777)
        (shared.source / "a").chmod(0o4700)
        shared.tree[b"a"].mode = 0o777
        if end == "none":
            await drain.progress.wait(shared.record(replace(change, ends_set_id=True)))
    if end != "none":
        shared.drain = None
        shared.record(replace(change, ends_set_id=True))
        async with draining(shared, next_mount(shared, end)) as drain:
            await drain.progress.wait(shared.last_seq)
    assert mode_of(shared, "a") == 0o700


@pytest.mark.parametrize("writer", [ROOT, MALLORY])
async def test_newer_bytes_of_another_user_come_without_the_bits_until_its_record(
    shared: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, writer: Credentials
) -> None:
    with looks(monkeypatch, shared) as seen:
        async with draining(shared) as drain:
            shared.unlink(b"a")
            shared.by = ALICE
            shared.create(b"a", mode=0o4777)
            shared.write(b"a", b"of alice")
            if writer is MALLORY:
                # The kernel removes the bit, as the owner could.
                shared.chmod(b"a", 0o777)
            shared.by = writer
            shared.write(b"a", b"of another")
            await until(lambda: drain.backlog().ops == 0)
    assert mode_of(shared, "a") == (0o4777 if writer is ROOT else 0o777)
    assert (shared.source / "a").read_bytes() == b"of another"
    assert ((b"of another", True) in seen) is (writer is ROOT)


@pytest.mark.fault("U7")
async def test_newer_bytes_of_another_user_do_not_keep_the_bits_of_the_replaced_version(
    shared: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared.source / "a").chmod(0o4777)
    shared.tree[b"a"].mode = 0o4777
    with looks(monkeypatch, shared) as seen:
        async with draining(shared) as drain:
            shared.by = ROOT
            shared.write(b"a", b"of root")
            shared.by = ALICE
            shared.chmod(b"a", 0o777)
            shared.by = MALLORY
            shared.write(b"a", b"of mallory")
            await until(lambda: drain.backlog().ops == 0)
    assert (b"of mallory", False) in seen
    assert (b"of mallory", True) not in seen


@pytest.mark.fault("U7")
async def test_bytes_of_several_users_do_not_keep_the_bits_if_root_wrote_last(
    shared: Model, clock: Clock
) -> None:
    (shared.source / "a").chmod(0o4777)
    async with draining(shared) as drain:
        node = shared.begin(b"a")
        shared.store(node, b"of both")
        shared.record(
            Op(
                kind="content",
                path=b"a",
                paths=(b"a",),
                object=node.object,
                size=len(b"of both"),
                mode=0o777,
                mtime_ns=node.mtime_ns,
                by=ROOT,
                also=(MALLORY,),
            )
        )
        node.writers, node.is_recorded = 0, True
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "a").read_bytes() == b"of both"
    assert mode_of(shared, "a") == 0o777


async def test_withheld_bits_come_although_a_name_is_removed_before(
    shared: Model, clock: Clock
) -> None:
    shared.by = ROOT
    async with draining(shared) as drain:
        await drain.progress.wait(shared.link(b"a", b"linked"))
        node = shared.begin(b"a")
        shared.store(node, b"of root")
        await drain.progress.wait(shared.chmod(b"a", 0o2775))
        # The change time at the source is another then.
        await drain.progress.wait(shared.unlink(b"linked"))
        assert mode_of(shared, "a") == 0o775
        shared.end(node)
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "a").read_bytes() == b"of root"
    assert mode_of(shared, "a") == 0o2775


@pytest.mark.fault("U7")
@pytest.mark.promise(67)
@pytest.mark.parametrize("changes", [(), ("before",), ("after",), ("before", "after")])
async def test_bits_that_the_owner_has_removed_at_the_source_are_not_given_by_the_next_mount(
    shared: Model, clock: Clock, changes: tuple[str, ...]
) -> None:
    """``changes``: of another attribute, which the drain makes after the owner's change, before or
    after the kill."""
    shared.by = ROOT
    async with draining(shared, abandon=False) as drain:
        shared.write(b"a", b"of root")
        await drain.progress.wait(shared.chmod(b"a", 0o4777))
        await drain.progress.settle()
        assert mode_of(shared, "a") == 0o4777
        (shared.source / "a").chmod(0o777)
        if "before" in changes:
            await drain.progress.wait(shared.setxattr(b"a", b"user.n", b"1"))
            await drain.progress.settle()
    async with draining(shared, shared.kill()) as drain:
        if "after" in changes:
            await drain.progress.wait(shared.setxattr(b"a", b"user.n", b"2"))
        await drain.progress.wait(shared.write(b"a", b"of root again"))
    assert (shared.source / "a").read_bytes() == b"of root again"
    assert mode_of(shared, "a") == 0o777


@pytest.mark.promise(67)
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("journal", ["", "shortened", "older", "rewritten", "rewritten twice"])
async def test_withheld_bits_come_after_a_kill(
    shared: Model, clock: Clock, is_changed: bool, journal: str
) -> None:
    shared.by = ROOT
    async with draining(shared, abandon=False) as drain:
        node = shared.begin(b"a")
        shared.store(node, b"of root")
        await drain.progress.wait(shared.chmod(b"a", 0o4777))
        await drain.progress.settle()
    assert mode_of(shared, "a") == 0o777
    if is_changed:
        (shared.source / "a").chmod(0o700)
    async with draining(shared, next_mount(shared, journal)) as drain:
        if not node.is_recorded:
            shared.content(node)
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "a").read_bytes() == b"of root"
    assert mode_of(shared, "a") == (0o700 if is_changed else 0o4777)


@pytest.mark.promise(67)
@pytest.mark.parametrize("journal", ["", "shortened", "rewritten", "rewritten twice"])
@pytest.mark.parametrize("change", ["unlink", "rename", "link"])
async def test_withheld_bits_come_after_a_kill_and_a_change_of_names(
    shared: Model, clock: Clock, change: str, journal: str
) -> None:
    """The drain makes ``change`` between the withholding of the bits and the next content, and so
    gives the file another time of change."""
    shared.by, shared.owner = ROOT, 1001
    async with draining(shared, abandon=False) as drain:
        shared.link(b"a", b"linked")
        node = shared.begin(b"a")
        shared.store(node, b"half")
        await drain.progress.wait(shared.chmod(b"a", 0o4777))
        if change == "unlink":
            shared.unlink(b"linked")
        else:
            # A content is recorded before the file gets a name, and comes with newer bytes.
            getattr(shared, change)(b"a", b"new")
            shared.store(node, b"newer")
            node.writers = 0
        await drain.progress.wait(shared.last_seq)
        await drain.progress.settle()
    name = "new" if change == "rename" else "a"
    assert mode_of(shared, name) == 0o777
    async with draining(shared, next_mount(shared, journal)) as drain:
        if not node.is_recorded:
            shared.content(node)
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / name).read_bytes() == node.content
    assert mode_of(shared, name) == 0o4777


@pytest.mark.promise(67)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", ["xattr", "times", "unlink"])
@pytest.mark.parametrize("is_new", [False, True])
async def test_withheld_bits_come_after_a_kill_and_another_change(
    shared: Model, clock: Clock, is_new: bool, change: str, when: str
) -> None:
    """The drain makes ``change`` between the withholding of the bits and the next content,
    ``when``: before or after the kill."""
    shared.by, shared.owner = ROOT, 0 if is_new else 1001

    async def changed(drain: Drain) -> None:
        if change == "xattr":
            seq = shared.setxattr(name, b"user.n", b"1")
        elif change == "times":
            seq = shared.utime(name, 10**18)
        else:
            seq = shared.unlink(b"linked")
        await drain.progress.wait(seq)
        await drain.progress.settle()

    async with draining(shared, abandon=False) as drain:
        if is_new:
            name = b"new"
            shared.create(name, mode=0o2777)
            shared.write(name, b"of root")
            if change == "unlink":
                shared.link(name, b"linked")
            node = shared.begin(name)
            shared.store(node, b"newer")
            # The newer bytes come without a record of their own.
            node.writers = 0
        else:
            name = b"a"
            if change == "unlink":
                shared.link(name, b"linked")
            node = shared.begin(name)
            shared.store(node, b"newer")
            shared.chmod(name, 0o2777)
        await drain.progress.wait(shared.last_seq)
        await drain.progress.settle()
        if when == "before":
            await changed(drain)
    assert mode_of(shared, name.decode()) == 0o777
    async with draining(shared, shared.kill(), catch_up=False) as drain:
        if when == "after":
            await changed(drain)
        await drain.progress.wait(shared.content(node))
    assert (shared.source / name.decode()).read_bytes() == b"newer"
    assert mode_of(shared, name.decode()) == 0o2777


@pytest.mark.promise(67)
@pytest.mark.parametrize("end", ["none", "killed", "rewritten"])
@pytest.mark.parametrize("by", [ROOT, ALICE])
@pytest.mark.parametrize("bits", [0o4000, 0o2000])
async def test_withheld_bits_come_to_a_file_of_the_source_that_gets_a_new_name(
    shared: Model, clock: Clock, by: Credentials, bits: int, end: str
) -> None:
    """The content that the earlier name was to get is left out, so the file has no name at the
    source until its next content comes. ``end`` of the mount before the newest bytes are recorded;
    ``rewritten``: the next mount with a new snapshot writes the journal anew."""
    shared.by, shared.owner = by, by.uid
    os.chown(shared.source / "a", by.uid, by.gid)
    async with draining(shared, abandon=False) as drain:
        node = shared.begin(b"a")
        shared.store(node, b"half")
        shared.content(node)
        shared.store(node, b"other")
        shared.rename(b"a", b"renamed")
        shared.chmod(b"renamed", 0o755 | bits)
        shared.store(node, b"newer")
        await until(lambda: drain.backlog().ops == 0)
        assert not (shared.source / "renamed").exists()
        shared.store(node, b"")
        shared.content(node)
        shared.store(node, b"newest")
        node.writers = 0
        await drain.progress.wait(shared.last_seq)
        await drain.progress.settle()
        assert (shared.source / "renamed").read_bytes() == b"newest"
        assert mode_of(shared, "renamed") == 0o755
        if end == "none":
            await drain.progress.wait(shared.content(node))
    if end != "none":
        replay = shared.look_anew() if end == "rewritten" else shared.kill()
        async with draining(shared, replay) as drain:
            await drain.progress.wait(shared.last_seq)
    assert not (shared.source / "a").exists()
    assert (shared.source / "renamed").read_bytes() == b"newest"
    assert (shared.source / "renamed").stat().st_uid == by.uid
    assert mode_of(shared, "renamed") == 0o755 | bits


@pytest.mark.fault("U7")
@pytest.mark.promise(160)
@pytest.mark.parametrize("end", ["none", "killed", "shortened", "rewritten", "rewritten twice"])
@pytest.mark.parametrize("kind", ["rename", "link"])
@pytest.mark.parametrize("change", ["none", "removed", "replaced", "renamed"])
async def test_a_program_that_its_owner_removed_gets_no_bits_under_its_new_name(
    shared: Model, clock: Clock, change: str, kind: str, end: str
) -> None:
    """Root writes the program, and gives it the new name on the mount, while the owner removes it
    at the source. The next mount after a kill knows whether the drain has removed it."""
    shared.by, shared.owner = ROOT, 1001
    owned(shared, "a", 0o4755)
    shared.tree[b"a"].mode = 0o4755
    async with draining(shared, abandon=False) as drain:
        node = shared.begin(b"a")
        shared.store(node, b"half")
        shared.content(node)
        shared.store(node, b"other")
        if kind == "link":
            shared.link(b"a", b"new")
            shared.unlink(b"a")
        else:
            shared.rename(b"a", b"new")
        shared.store(node, b"newest")
        if change == "renamed":
            (shared.source / "a").rename(shared.source / "elsewhere")
        elif change != "none":
            (shared.source / "a").unlink()
        if change == "replaced":
            (shared.source / "a").write_bytes(b"of others")
        await until(lambda: drain.backlog().ops == 0)
        assert (shared.source / "a").exists() is (change == "replaced")
        assert not (shared.source / "new").exists()
        if end == "none":
            shared.end(node)
            await drain.progress.wait(shared.last_seq)
    if end != "none":
        async with draining(shared, next_mount(shared, end)) as drain:
            await drain.progress.wait(shared.last_seq)
    assert (shared.source / "new").read_bytes() == b"newest"
    assert mode_of(shared, "new") == (0o4755 if change == "none" else 0o755)


@pytest.mark.fault("U7")
@pytest.mark.promise(160, 176)
@pytest.mark.parametrize("begun", ["copied up", "recorded", "drained"])
@pytest.mark.parametrize("change", ["none", "removed", "replaced", "renamed"])
@pytest.mark.parametrize("kind", ["rename", "rename over another file", "link"])
@pytest.mark.parametrize(
    ("owner", "by"), [(0, MALLORY), (1001, MALLORY), (1001, ROOT), (1001, ALICE), (0, ROOT)]
)
async def test_a_removed_program_that_another_user_renames_comes_back_without_its_bits(
    shared: Model,
    clock: Clock,
    owner: int,
    by: Credentials,
    change: str,
    begun: str,
    kind: str,
) -> None:
    """No process writes into the program. Only its owner may give the new name these rights."""
    if kind == "link" and by is MALLORY:
        # The kernel allows no user a link to the program of another.
        return
    (shared.source / "d").chmod(0o777)
    os.chown(shared.source / "d/a", owner, owner)
    (shared.source / "d/a").chmod(0o4755)
    shared.tree[b"d/a"].mode = 0o4755
    async with draining(shared) as drain:
        shared.by, shared.owner = MALLORY, 1002
        shared.write(b"d/over", b"of mallory", synced=True)
        shared.by, shared.owner = ROOT if owner == 0 else ALICE, owner
        if begun == "drained":
            shared.write(b"d/a", b"old d/a", synced=True)
        await drain.progress.wait(shared.last_seq)
        assert mode_of(shared, "d/a") == 0o4755
        _renamed_by(shared, by, change, begun, kind)
        await until(lambda: drain.backlog().ops == 0)
    new = shared.source / ("d/over" if kind == "rename over another file" else "d/new")
    assert new.read_bytes() == b"old d/a"
    assert new.stat().st_uid == owner
    keeps = change == "none" or by.uid == owner
    assert stat.S_IMODE(new.stat().st_mode) == (0o4755 if keeps else 0o755)


def _renamed_by(shared: Model, by: Credentials, change: str, begun: str, kind: str) -> int:
    """Others change ``d/a`` at the source, then a user gives it another name on the mount."""
    if change == "renamed":
        (shared.source / "d/a").rename(shared.source / "elsewhere")
    elif change != "none":
        (shared.source / "d/a").unlink()
    if change == "replaced":
        (shared.source / "d/a").write_bytes(b"of others")
    shared.by, node = by, shared.tree[b"d/a"]
    shared.take(b"d/a")
    node.is_kept = True
    if kind == "link":
        shared.link(b"d/a", b"d/new")
        shared.unlink(b"d/a")
    else:
        shared.rename(b"d/a", b"d/over" if "over" in kind else b"d/new")
    content = shared.whole(node.object)
    if begun == "recorded" and content is not None:
        shared.record(replace(content, same=True))
    return shared.last_seq


@pytest.mark.promise(160)
@pytest.mark.parametrize("change", ["unlink", "rename"])
async def test_a_program_is_not_staged_while_its_last_old_name_is_taken(
    shared: Model, clock: Clock, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The bits come with the bytes if the drain has removed the older version."""
    shared.by, shared.owner = ROOT, 1001
    owned(shared, "a", 0o4755)
    shared.tree[b"a"].mode = 0o4755
    token, make = trio.lowlevel.current_trio_token(), getattr(SourceEntries, change)
    async with draining(shared) as drain:

        async def stage_ahead() -> None:
            for entry in itertools.chain(*drain._ahead.next_lots()):
                await drain._stager.stage(entry, in_turn=False)

        def made(*arguments: Any, **more: Any) -> Any:
            trio.from_thread.run(stage_ahead, trio_token=token)
            return make(*arguments, **more)

        await drain.progress.wait(shared.write(b"s", b"another"))
        node = shared.begin(b"a")
        shared.store(node, b"half")
        shared.content(node)
        shared.store(node, b"other")
        shared.link(b"a", b"new")
        shared.store(node, b"newest")
        await until(lambda: drain.backlog().ops == 0)
        monkeypatch.setattr(SourceEntries, change, made)
        shared.unlink(b"a") if change == "unlink" else shared.rename(b"s", b"a")
        shared.end(node)
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "new").read_bytes() == b"newest"
    assert mode_of(shared, "new") == 0o4755


@pytest.mark.fault("U7")
@pytest.mark.promise(160)
@pytest.mark.parametrize("remover", ["drain", "others"])
@pytest.mark.parametrize("by", ["link", "file", "content", "later content", "second name"])
async def test_a_program_gets_its_bits_although_another_entry_has_replaced_its_older_version(
    shared: Model, clock: Clock, by: str, remover: str
) -> None:
    """Root writes the program of another user, which has a second name on the mount only. ``by``
    what the first name is taken there. Then the source has no version of the program: the bits
    come if the drain has removed that version, and do not come if others have."""
    shared.by, shared.owner = ROOT, 1001
    owned(shared, "a", 0o755)
    shared.tree[b"a"].mode = 0o755
    async with draining(shared, abandon=False) as drain:
        if by == "file":
            await drain.progress.wait(shared.write(b"s", b"another"))
        node = shared.begin(b"a")
        shared.store(node, b"half")
        shared.content(node)
        shared.store(node, b"other")
        shared.link(b"a", b"new")
        shared.store(node, b"newest")
        if remover == "others":
            (shared.source / "a").unlink()
        another = None
        if by == "link":
            shared.symlink(b"s", b"elsewhere")
        elif by != "file":
            shared.create(b"s")
            another = shared.begin(b"s")
            shared.store(another, b"another")
        if by == "later content":
            shared.create(b"earlier")
            earlier = shared.begin(b"earlier")
            shared.store(earlier, b"earlier")
            shared.rename(b"earlier", b"a")
        elif by == "second name":
            shared.link(b"s", b"other name")
        shared.rename(b"s" if by != "second name" else b"other name", b"a")
        if another is not None:
            shared.store(another, b"another, newer")
        shared.chmod(b"new", 0o2755)
        await until(lambda: drain.backlog().ops == 0)
        if another is not None:
            shared.end(another)
            await until(lambda: drain.backlog().ops == 0)
        assert (shared.source / "a").is_symlink() or (shared.source / "a").read_bytes() != b"of a"
        assert not (shared.source / "new").exists()
        shared.end(node)
        await drain.progress.wait(shared.last_seq)
    assert (shared.source / "new").read_bytes() == b"newest"
    assert (shared.source / "new").stat().st_uid == 1001
    assert mode_of(shared, "new") == (0o2755 if remover == "drain" else 0o755)
